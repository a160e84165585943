"""What is changed in a text is what differs, and nothing else."""

from typing import Any

import pytest

from sidecar.inject.edit import Change, applied, edited, style_of
from sidecar.inject.tree import Broken, compose
from sidecar.inject.write import Style

ANCHOR = "a: &x\n  v: 1\n"


@pytest.mark.parametrize(
    ("text", "target", "after"),
    [
        ("a: 1  # one\nb: 2", {"a": 3, "b": 2}, "a: 3  # one\nb: 2"),
        ("a:   'x'\n", {"a": "w"}, "a: w\n"),
        ("a: 1\n# of b\nb: 2\n", {"a": 1, "c": 3, "b": 2}, "a: 1\nc: 3\n# of b\nb: 2\n"),
        ("a: 1\n# of b\nb: 2\n", {"a": 1}, "a: 1\n# of b\n"),
        ("a: 1\nb: 2", {"b": 2}, "b: 2"),
        ("s:\n  # of a\n  a: 1\n", {"s": {"z": 0, "a": 1}}, "s:\n  z: 0\n  # of a\n  a: 1\n"),
        ("s:\n  # of a\n  a: 1\n  b: 2\n", {"s": {"z": 0, "b": 2}}, "s:\n  # of a\n  z: 0\n  b: 2\n"),
        ("s: {}  # none\n", {"s": {"a": 1}}, "s:  # none\n  a: 1\n"),
        ("s:\n", {"s": [1]}, "s:\n- 1\n"),
        ("s: # none\n", {"s": {"a": [1]}}, "s: # none\n  a:\n  - 1\n"),
        ("s:\n    a: 1\nl:\n", {"s": {"a": 1}, "l": {"b": {"c": 1}}}, "s:\n    a: 1\nl:\n    b:\n        c: 1\n"),
        ("s: # it\n  a: 1\n", {"s": 7}, "s: 7 # it\n"),
        ("s: |\n  a\n\n  b\nt: 1\n", {"s": "c", "t": 1}, "s: c\nt: 1\n"),
        ("l:\n  - a # 1\n  # of b\n  - b\n", {"l": ["a", "x", "b"]}, "l:\n  - a # 1\n  - x\n  # of b\n  - b\n"),
        ("l:\n- a\n- b\n", {"l": ["b"]}, "l:\n- b\n"),
        ("l:\n- a\n", {"l": ["z", "a"]}, "l:\n- z\n- a\n"),
        ("l:\n- a\n", {"l": []}, "l: []\n"),
        ("l:\n- name: a\n  v: 1 # v\n", {"l": [{"name": "a", "v": 2}]}, "l:\n- name: a\n  v: 2 # v\n"),
        ("l:\n- v: 1\n  name: a\n", {"l": [{"name": "a"}]}, "l:\n- name: a\n"),
        ("l: [a, b] # x\n", {"l": ["a", "b", "c d"]}, "l: [a, b, 'c d'] # x\n"),
        ("l: [a, b,]\n", {"l": ["a"]}, "l: [a,]\n"),
        ("l: [a, b]\n", {"l": ["b"]}, "l: [b]\n"),
        ("l: [\n  a,\n  b\n]\n", {"l": ["z", "a", "b"]}, "l: [\n  z,\n  a,\n  b\n]\n"),
        ("m: {a: 1, b: 2}\n", {"m": {"b": 3, "c": {"d": "x:y"}}}, 'm: {b: 3, c: {d: "x:y"}}\n'),
        ("m: {a: {b: []}}\n", {"m": {"a": {"b": ["x", "w"]}}}, "m: {a: {b: [x, w]}}\n"),
        ("m: {a: b}\n", {"m": {"a": "x\ny\n"}}, "m:\n  a: |\n    x\n    y\n"),
        ('{"a":[1],"b":{}}', {"a": [1, 2], "b": {"c": "d"}}, '{"a":[1, 2],"b":{"c":"d"}}'),
        ('{\n "a": [\n  1\n ]\n}\n', {"a": [1, {"b": 2}]}, '{\n "a": [\n  1,\n  {\n   "b": 2\n  }\n ]\n}\n'),
        ("a: 1\r\nb: 2\r\n", {"a": 1, "c": [3], "b": 2}, "a: 1\r\nc:\r\n- 3\r\nb: 2\r\n"),
        ("a: &x {v: 1}\nb: *x\n", {"a": {"v": 2}, "b": {"v": 2}}, "a: &x {v: 2}\nb: *x\n"),
        ("a: &x {v: 1}\nb: *x\n", {"a": {"v": 2}, "b": {"v": 1}}, "a: &x {v: 2}\nb:\n  v: 1\n"),
        ("a: &x {v: 1}\nb: *x\n", {"a": {"v": 1}, "b": {"v": 1, "w": 2}}, "a: &x {v: 1}\nb:\n  v: 1\n  w: 2\n"),
        (f"{ANCHOR}b:\n  <<: *x\n", {"a": {"v": 1}, "b": {"v": 2}}, f"{ANCHOR}b:\n  v: 2\n  <<: *x\n"),
        (f"{ANCHOR}b:\n  <<: *x\n  w: 1\n", {"a": {"v": 1}, "b": {"w": 1}}, f"{ANCHOR}b:\n  w: 1\n"),
        ("l: &x\n  - a\nm: *x\n", {"l": ["a", "b"], "m": ["a", "b"]}, "l: &x\n  - a\n  - b\nm: *x\n"),
        ("a:\n- - 1\n  - 2\n", {"a": [[1, 2, 3]]}, "a:\n- - 1\n  - 2\n  - 3\n"),
    ],
)  # fmt: skip
def test_a_text_changes_where_it_must(text: str, target: Any, after: str) -> None:
    changed = edited(text, target)
    root = compose(changed)
    assert root is not None and root.value == target
    assert changed == after


def test_what_says_so_already_stays() -> None:
    text = "a:   1   # odd\n"
    assert edited(text, {"a": 1}) == text


@pytest.mark.parametrize(
    ("text", "target"), [("# none\n", {}), ("7", {"a": 1}), ("a: &x 1\nb: *x\n", {"a": 2, "b": [1]})]
)
def test_what_cannot_be_is_told(text: str, target: Any) -> None:
    with pytest.raises(Broken, match="cannot be changed in place"):
        edited(text, target)


def test_changes_at_one_place_keep_their_order() -> None:
    text = applied("abcdef", [Change(2, 2, "1"), Change(2, 4, ""), Change(2, 2, "2"), Change(0, 1, "A")])
    assert text == "Ab12ef"


@pytest.mark.parametrize(
    ("text", "style"),
    [
        ("a: 1\n", Style(2, 0)),
        ("a:\n    b: 1\n", Style(4, 0)),
        ("a:\n  b:\n    - 1\n", Style(2, 2)),
        ("a: [1]\nb:\n- 1\n", Style(2, 0)),
    ],
)
def test_new_lines_are_indented_as_those_around(text: str, style: Style) -> None:
    root = compose(text)
    assert root is not None and style_of(root) == style
