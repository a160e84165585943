"""A text's parts, where they stand and what they say."""

from typing import Any

import pytest

from sidecar.inject.tree import MAX_DEPTH, Broken, Node, chunks, compose


def read(text: str) -> Node:
    root = compose(text)
    assert root is not None
    return root


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("30", 30),
        ("-7", -7),
        ("1_000", 1000),
        ("0x1f", 31),
        ("0755", 493),
        ("0o17", 15),
        ("1.5", 1.5),
        ("1e3", 1000.0),
        ("yes", True),
        ("Off", False),
        ("y", True),
        ("~", None),
        ("'30'", "30"),
        ('"yes"', "yes"),
        ("!!str 30", "30"),
        ("!!int 30", 30),
        ("! 30", "30"),
        ("2026-01-01", "2026-01-01"),
        ("1:30", "1:30"),
        ("a: ", {"a": None}),
        ("|\n a\n b\n", "a\nb\n"),
        (">-\n a\n b\n", "a b"),
        ('"\\ud83d\\ude00"', "😀"),
        ('{"a":[1,{"b":null}]}', {"a": [1, {"b": None}]}),
        ("a: &x {b: 1}\nc: *x", {"a": {"b": 1}, "c": {"b": 1}}),
        ("a: &x {b: 1, c: 1}\nd: {<<: *x, c: 2}", {"a": {"b": 1, "c": 1}, "d": {"b": 1, "c": 2}}),
        (
            "a: &x {b: 1}\nc: &y {b: 2, d: 3}\ne: {<<: [*x, *y]}",
            {"a": {"b": 1}, "c": {"b": 2, "d": 3}, "e": {"b": 1, "d": 3}},
        ),
        ('"<<": 1', {"<<": 1}),
    ],
)
def test_a_text_says_what_kubectl_reads(text: str, value: Any) -> None:
    found = read(text).value
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "words", "line"),
    [
        ("a: 1\nb: [", "not YAML", 3),
        ("a: 1\nb: 2\na: 3\n", 'key "a" is there twice', 3),
        ("a: *none", "names no anchor", 1),
        ("\n? [a]\n: 1", "a key is no scalar", 2),
        ("a: 1\n<<: 7", "<< merges mappings only", 2),
        ("a: \x07", "not YAML", 1),
        (f"{'[' * (MAX_DEPTH + 2)}{']' * (MAX_DEPTH + 2)}", "deep", 1),
    ],
)
def test_what_cannot_be_read_in_one_way_is_told(text: str, words: str, line: int) -> None:
    with pytest.raises(Broken, match=words.replace("[", r"\[")) as caught:
        compose(text)
    assert caught.value.line == line


def test_aliases_of_aliases_are_bounded() -> None:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
    with pytest.raises(Broken, match="expand"):
        compose(bomb)


def test_each_part_knows_where_it_stands() -> None:
    text = "# é😀\na:   # one\n  - é😀 # x\n  - b\n\n# end\nc: |\n  text\n\nd: |+\n  text\n\ne: {f: [1]}  \n"
    root = read(text)
    shown = {key.value: text[value.start : value.end] for key, value in root.entries}
    assert shown == {"a": "- é😀 # x\n  - b", "c": "|\n  text", "d": "|+\n  text\n", "e": "{f: [1]}"}
    assert [key.line for key, _ in root.entries] == [2, 7, 10, 13]
    assert root.entries[0][1].column == 2 and root.end == text.rindex("}") + 1


def test_documents_are_cut_where_they_begin() -> None:
    text = "# head\n%YAML 1.1\n---\na: 1\n# tail\n...\n# next\n---\n---\nb: 2\n"
    parts = chunks(text)
    assert "".join(parts) == text
    assert [None if (root := compose(part)) is None else root.value for part in parts] == [{"a": 1}, None, {"b": 2}]


@pytest.mark.parametrize("text", ["", "\n", "# nothing\n"])
def test_there_may_be_none(text: str) -> None:
    assert chunks(text) == [text] and compose(text) is None
