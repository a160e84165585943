"""What is written is read as what it was, by readers of both versions of YAML."""

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sidecar.inject.patch import equal
from sidecar.inject.tree import compose
from sidecar.inject.write import Style, block, flow, json, pretty, scalar, several_lines

TEXTS = st.one_of(
    st.sampled_from(
        ["yes", "NO", "y", "~", "null", "0", "1e3", "0x1F", "0o7", "1:30", "=", ".5", "2026-01-01", "500m"]
    ),
    st.sampled_from(
        ["--host", "-", "- x", "a: b", "a #b", "#a", "&a", "*a", "!a", "|", "%", "@", "`", "'", '"', "a:", ":9"]
    ),
    st.sampled_from(["a\nb", "a\nb\n", "a\n\n", "\na", " a\nb", "a \nb", "a\n  b\n", "a\tb", "é😀", "\x85", "\u2028"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
)
VALUES = st.recursive(
    st.one_of(TEXTS, st.integers(), st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=10,
)
STYLES = st.builds(Style, step=st.sampled_from([2, 4]), dash=st.sampled_from([0, 2, 4]))


@given(st.dictionaries(TEXTS, VALUES, min_size=1, max_size=4), STYLES)
def test_a_block_is_read_as_what_it_was(value: dict[str, Any], style: Style) -> None:
    text = "\n".join(block(value, style)) + "\n"
    read = compose(text)
    assert read is not None and equal(read.value, value)
    assert yaml.safe_load(text) == value


@given(VALUES)
def test_brackets_are_read_as_what_they_were(value: Any) -> None:
    for text in (f"a: {flow(value)}", f"a: {json(value)}", f"a: {pretty(value, 2, 3)}"):
        read = compose(text)
        assert read is not None and equal(read.value, {"a": value}), text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("--host", "--host"),
        ("llm-sidecar:0.1.0", "llm-sidecar:0.1.0"),
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("500m", "500m"),
        ("0.1.0", "'0.1.0'"),
        ("8000", "'8000'"),
        ("off", "'off'"),
        ("it's", "'it''s'"),
        ("", '""'),
        ("a\tb", '"a\\tb"'),
        (True, "true"),
        (None, "null"),
        ([], "[]"),
    ],
)
def test_quotes_stand_where_a_reader_may_err(value: Any, text: str) -> None:
    assert scalar(value) == text


def test_scripts_are_written_as_such() -> None:
    value = {"command": ["python3", "import a\n\nif a:\n    b()\n"]}
    assert block(value, Style()) == ["command:", "- python3", "- |", "  import a", "", "  if a:", "      b()"]
    assert several_lines(value) and not several_lines({"a": ["b", 1]})
