import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sidecar.policy import document
from sidecar.policy.document import MAX_ALIASED_NODES, MAX_DEPTH, MAX_FILE_BYTES, Mapping, Node, Scalar, documents
from sidecar.policy.document import Sequence as ListNode
from sidecar.policy.errors import Faults, PolicyError


@pytest.fixture(params=["libyaml", "pure"], autouse=True)
def _both_parsers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Wheels without libyaml parse in Python: everything here holds for both."""
    if request.param == "pure":
        monkeypatch.setattr(document, "_LOADER", yaml.Loader)
    elif not yaml.__with_libyaml__:
        pytest.skip("this PyYAML has no libyaml")
    yield


def read(text: str | bytes, file: str = "a.yaml") -> tuple[list[Any], list[PolicyError]]:
    faults = Faults()
    data = text if isinstance(text, bytes) else text.encode()
    return [plain(node) for node in documents(file, data, faults)], faults.errors


def value(text: str) -> Any:
    values, errors = read(text)
    assert not errors
    return values[0]


def told(text: str | bytes, file: str = "a.yaml") -> list[tuple[int, str, str]]:
    return [(error.line, error.path, error.message) for error in read(text, file)[1]]


def plain(node: Node) -> Any:
    """The tree as Python values; scalars by their kind."""
    match node:
        case Mapping(entries=entries):
            return {name: plain(child) for name, (_, child) in entries.items()}
        case ListNode(items=items):
            return [plain(item) for item in items]
        case Scalar(kind="null"):
            return None
        case Scalar(kind="bool"):
            return node.value.lower() == "true"
        case Scalar(kind="number"):
            return float(node.value) if "0x" not in node.value and "0o" not in node.value else int(node.value, 0)
        case Scalar():
            return node.value


KINDS = {
    "null": ["", "~", "null", "Null", "NULL"],
    "bool": ["true", "True", "TRUE", "false", "False", "FALSE"],
    "number": [
        *["0", "-1", "+1", "10", "1.5", "1.", ".5", "-.5e3", "1e3", "1e-3", "1E+3", "0x1F", "0o17"],
        *[".inf", "-.INF", ".nan"],
    ],
    "text": [
        # What YAML 1.1 makes into something else.
        *["off", "on", "yes", "no", "y", "n", "Off", "1:30", "1:30:00", "010", "1_000", "0b1", "2026-01-01", "="],
        *["1e", "e3", "0x", "0o8", "--1", "1.2.3", "nan", "inf", "-.nan", "tRUE", "nULL", "10s", "v1"],
    ],
}


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in KINDS.items() for text in texts])
def test_plain_scalars_mean_what_yaml_1_2_says(kind: str, text: str) -> None:
    faults = Faults()
    (tree,) = documents("a.yaml", f"key: {text}".encode(), faults)
    assert isinstance(tree, Mapping)
    scalar = tree.entries["key"][1]
    assert isinstance(scalar, Scalar)
    assert scalar.kind == kind
    assert not faults.errors


@pytest.mark.parametrize("text", [text for texts in KINDS.values() for text in texts])
@pytest.mark.parametrize(
    "form", ['"{}"', "'{}'", "!!str {}", "! {}", "|-\n  {}"], ids=["double", "single", "str", "!", "block"]
)
def test_quoted_scalars_are_text_whatever_they_look_like(form: str, text: str) -> None:
    assert value("key: " + form.format(text)) == {"key": text}


@pytest.mark.parametrize(
    ("text", "line", "path"),
    [
        ("a: 1\nb: 2\na: 3", 3, "$.a"),
        ("a:\n  b: 1\n  b: 1", 3, "$.a.b"),
        ("a: {b: 1, b: 2}", 1, "$.a.b"),
        ("a:\n- 1\n- b: 1\n  c: 2\n  'b': 3", 5, "$.a[1].b"),
        ('{"a": 1,\n "a": 2}', 2, "$.a"),
        ("'1': x\n1: y", 2, "$.1"),
        ("? a\n: 1\n? a\n: 2", 3, "$.a"),
        ("a: 1\n? !!str a\n: 2", 2, "$.a"),
    ],
)
def test_a_duplicate_key_is_an_error_where_it_stands(text: str, line: int, path: str) -> None:
    ((at, where, message),) = told(text)
    assert (at, where) == (line, path)
    assert "twice" in message


def test_every_duplicate_is_told_and_the_first_value_stays() -> None:
    values, errors = read("a: 1\na: 2\nb: {c: 1, c: 2, c: 3}\n---\nd: 4\nd: 5")
    assert values == [{"a": 1, "b": {"c": 1}}, {"d": 4}]
    assert [(error.line, error.path) for error in errors] == [(2, "$.a"), (3, "$.b.c"), (3, "$.b.c"), (6, "$.d")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: &x {b: 1}\nc: *x", {"a": {"b": 1}, "c": {"b": 1}}),
        ("a: &x 5\nc: [*x, *x]", {"a": 5, "c": [5, 5]}),
        ("base: &x {b: 1, c: 2}\nd:\n  <<: *x\n  c: 3", {"base": {"b": 1, "c": 2}, "d": {"b": 1, "c": 3}}),
        ("d:\n  c: 3\n  <<: &x {b: 1, c: 2}", {"d": {"b": 1, "c": 3}}),
        ("d: {<<: [{a: 1}, {a: 2, b: 3}]}", {"d": {"a": 1, "b": 3}}),
        ("d: {<<: {a: 1}, <<: {b: 2}}", {"d": {"a": 1, "b": 2}}),
        ("d: {'<<': 1}", {"d": {"<<": 1}}),
        ("a: &x 1\nb: &x 2\nc: *x", {"a": 1, "b": 2, "c": 2}),
    ],
)
def test_anchors_and_merge_keys_work(text: str, expected: object) -> None:
    assert value(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: *x", "no anchor"),
        ("a: &x [*x]", "no anchor"),
        ("a: &x 1\n---\nb: *x", "no anchor"),
        ("a: {<<: 5}", "merge key"),
        ("a: {<<: [{}, 5]}", "merge key"),
        ("[a]: 1", "a key must be text"),
        ("{}: 1", "a key must be text"),
        ("a: !!python/object/apply:os.system [x]", "not supported"),
        ("a: !!binary aGk=", "not supported"),
        ("a: !!int '5'", "not supported"),
        ("a: !!set {b}", "not supported"),
        ("a: !Ref b", "not supported"),
    ],
)
def test_what_is_not_plain_data_is_an_error(text: str, words: str) -> None:
    ((_, _, message),) = told(text)
    assert words in message


def test_a_tag_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def ran(*_: object) -> int:
        raise AssertionError("ran")

    monkeypatch.setattr("os.system", ran)
    assert told('!!python/object/apply:os.system ["true"]')


def test_a_bomb_of_aliases_is_refused_at_once() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 30)]
    began = time.process_time()
    ((line, _, message),) = told("\n".join(lines))
    assert time.process_time() - began < 1
    assert f"more than {MAX_ALIASED_NODES} nodes" in message
    assert line == 5


def test_a_bomb_of_merges_is_refused_at_once() -> None:
    lines = ["a0: &a0 {" + ", ".join(f"k{n}: 1" for n in range(1000)) + "}"]
    lines += [f"b{n}: {{<<: *a0}}" for n in range(1000)]
    ((_, _, message),) = told("\n".join(lines))
    assert "more than" in message


def test_sharing_as_operators_do_is_far_from_the_bound() -> None:
    text = "base: &b {a: 1, b: 2, c: {d: 3}}\n" + "\n".join(f"s{n}: {{<<: *b, e: {n}}}" for n in range(1000))
    assert value(text)["s999"] == {"a": 1, "b": 2, "c": {"d": 3}, "e": 999}


@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 100_000, "- " * 100_000, "? " * 100_000, "[{a: " * 5000])
def test_any_depth_is_an_error_and_no_crash(text: str) -> None:
    assert any("deep" in message or "not YAML" in message for _, _, message in told(text))


def test_the_deepest_tree_is_read() -> None:
    assert not told("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    ((line, _, message),) = told("\n" + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))
    assert line == 2
    assert "deeper than" in message


@pytest.mark.parametrize(
    ("data", "line", "words"),
    [
        (b"a: \xff", 1, "not UTF-8"),
        (b"a: 1\nb: \xe9\n", 2, "not UTF-8"),
        ("a: 1".encode("utf-16"), 1, "not UTF-8"),
        (b"a: \x00", 0, "not YAML"),
        (b"a: \x1b[2J", 0, "not YAML"),
        (b"a: [\n", 2, "not YAML"),
        (b"a: b: c", 1, "not YAML"),
        (b"a: 'x", 1, "not YAML"),
        (b"a: @x", 1, "not YAML"),
        (b"a:\n\tb: 1", 2, "not YAML"),
        (b"a: 1\n b: 2", 2, "not YAML"),
        (b"%YAML 3.0\n---\na: 1", 1, "not YAML"),
        (b"x" * (MAX_FILE_BYTES + 1), 0, "at most"),
    ],
)
def test_what_is_not_yaml_is_told_with_its_line(data: bytes, line: int, words: str) -> None:
    ((at, path, message),) = told(data)
    assert words in message
    assert "\n" not in message
    assert path == "$"
    assert at == line or (at > 0 and abs(at - line) <= 1)  # the two parsers mark the end of a line differently


def test_documents_before_a_fault_of_syntax_are_still_read() -> None:
    values, errors = read("a: 1\n---\nb: 2\n---\nc: [")
    assert values == [{"a": 1}, {"b": 2}]
    assert len(errors) == 1


@pytest.mark.parametrize("text", ["", "\n", "# nothing", "---", "---\n---\n...\n", "~", "\ufeff"])
def test_an_empty_document_is_none(text: str) -> None:
    assert read(text) == ([], [])


def test_a_byte_order_mark_is_no_part_of_the_first_key() -> None:
    assert value("\ufeffa: 1") == {"a": 1}


def test_lines_are_those_of_keys_and_items() -> None:
    faults = Faults()
    first, second = documents("a.yaml", b"# top\na:\n  - x\n  -\n    b: 1\n---\nc: |\n  one\n  two\nd: 1\n", faults)
    assert isinstance(first, Mapping)
    assert isinstance(second, Mapping)
    key, items = first.entries["a"]
    assert isinstance(items, ListNode)
    assert (key.line, items.items[0].line, items.items[1].line) == (2, 3, 5)
    assert second.entries["d"][0].line == 10


# What JSON allows and YAML does not: control characters and the line separators of Unicode, raw inside strings.
_TEXT = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zl", "Zp"), exclude_characters="\ufeff\uffff\ufffe")
)
_KEY = _TEXT.filter(lambda key: len(key.encode()) < 300)
_NUMBER = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
_JSON = st.recursive(
    st.none() | st.booleans() | _NUMBER | _TEXT,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(_KEY, inner, max_size=5),
    max_leaves=20,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(_JSON, st.booleans(), st.sampled_from([None, 2, "\t"]))
def test_a_json_file_is_a_yaml_file(data: Any, ascii_only: bool, indent: str | int | None) -> None:
    values, errors = read(json.dumps(data, ensure_ascii=ascii_only, indent=indent), "a.json")
    assert not errors
    assert values == ([] if data is None else [data])


def test_escapes_of_json_are_read_as_json_reads_them() -> None:
    text = r'{"a": "\/ \ud83d\ude00 \\ud83d\\ude00 \u00e9 \" \\", "\u0062": 1}'
    assert read(text, "a.json")[0] == [json.loads(text)]


@pytest.mark.parametrize("text", [r'{"a": "\ud83d"}', r'{"a": "\ude00"}', r'{"a": "\\ud83d\ude00"}', r'{"\ud83d": 1}'])
def test_half_a_surrogate_pair_is_an_error(text: str) -> None:
    ((line, _, message),) = told(text, "a.json")
    assert line == 1
    assert "half of a surrogate pair" in message or "invalid Unicode character" in message


_PIECES = ["a: ", "- ", "&x ", "*x", "<<: ", "{", "}", "[", "]", "\n", "  ", "---\n", "!!str ", "? ", "'"]
_NEARLY_YAML = st.text(alphabet="ab1:-[]{},&*!|>'\"%@`#?\n\t <~.\\u", max_size=60)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=200) | (_NEARLY_YAML | st.lists(st.sampled_from(_PIECES)).map("".join)).map(str.encode))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for file in ("a.yaml", "a.json"):
        _, errors = read(data, file)
        assert all(error.message and error.line >= 0 for error in errors)
