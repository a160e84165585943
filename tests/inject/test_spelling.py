"""How things were written comes back where it says the same."""

import pytest

from sidecar.inject.spelling import respelt, spellings
from sidecar.inject.status import Text


@pytest.mark.parametrize(
    ("original", "restored", "paths"),
    [
        ("p:\n  a: 'x'\n  b: 1\n", "p:\n  a: x\n  b: 1\n", [("a",)]),
        ("p:\n  a: {b: 1}\n", "p:\n  a:\n    b: 1\n", [("a",)]),
        ("p:\n  a:\n    b:  1\n    c: 2\n", "p:\n  a:\n    b: 1\n    c: 2\n", [("a", "b")]),
        ("p:\n  a:\n  - name: m\n    v:  1\n", "p:\n  a:\n  - name: m\n    v: 1\n", [("a", "m", "v")]),
        ("p:\n  a:\n  - {name: m}\n", "p:\n  a:\n  - name: m\n", [("a", "m")]),
        ("p:\n  a: &x [1]\n  b: *x\n", "p:\n  a: &x [1]\n  b: [1]\n", [("b",)]),
        ("p:\n  a: 1 # one\n", "p:\n  a: 1\n", [("a",)]),
        ("p: {a:  1, b: 2}\n", "p: {a: 1, b: 2}\n", [("a",)]),
        ("p:\n  a: 1\n", "p:\n  a: 1\n", []),
    ],
)
def test_the_smallest_parts_are_found_and_put_back(original: str, restored: str, paths: list[tuple[str, ...]]) -> None:
    texts = spellings(original, restored, [("p",)])
    assert [each.at for each in texts["p",]] == paths
    assert respelt(restored, texts) == original


def test_the_whole_of_a_part_is_always_enough() -> None:
    original, restored = "p: {a: {b:  1,\n  c: 2}}\n", "p: {a: {b: 1, c: 2}}\n"
    (whole,) = spellings(original, restored, [("p",)], whole=True)["p",]
    assert whole.at == ("a",)
    assert respelt(restored, {("p",): (whole,)}) == original


@pytest.mark.parametrize(
    "text",
    [
        Text(("a",), "a: 2"),
        Text(("a",), "a: ["),
        Text(("none",), "none: 1"),
        Text(("a", "deeper"), "deeper: 1"),
        Text((), "p: 2"),
    ],
)
def test_a_text_that_says_something_else_is_not_put_back(text: Text) -> None:
    assert respelt("p:\n  a: 1\n", {("p",): (text,)}) == "p:\n  a: 1\n"
    beside = respelt("p:\n  a: 1\n  b: 2\n", {("p",): (text, Text(("b",), "b:  2"))})
    assert beside == "p:\n  a: 1\n  b:  2\n", "and keeps no other from it"


def test_one_within_another_is_put_back_after_it() -> None:
    texts = (Text(("a",), "a: {b: 1}"), Text(("a", "b"), "b:  1"))
    assert respelt("p:\n  a:\n    b: 1\n", {("p",): texts}) == "p:\n  a: {b:  1}\n"


def test_a_place_that_there_is_not_has_no_spelling() -> None:
    assert spellings("p: 1\n", "p: 1\n", [("q", 0)]) == {("q", 0): ()}
    assert respelt("l:\n- a: 'x'\n", {("l", 0): (Text(("a",), "a:   'x'"),)}) == "l:\n- a:   'x'\n"
    assert respelt("", {("l", 0): (Text(("a",), "a: 1"),)}) == ""
