"""What of a prompt is counted, and where its texts are cut."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.tokens import texts
from sidecar.tokens.texts import PIECE_BYTES, Texts, Uncountable, cut, first_end, pieces_of, values_of
from sidecar.wire.prompt import prompt_of


def plain(found: Texts) -> list[str]:
    return ["".join(pieces_of(raw)) for raw in found.texts]


def read(value: bytes) -> Texts:
    found = Texts()
    for _ in texts.check(value):
        pass
    for each in values_of(value)[0]:
        for _ in texts.read(each, found):
            pass
    assert found.size == sum(memoryview(text).nbytes for text in found.texts)
    return found


READ: list[tuple[str, Any, list[str]]] = [
    ("a text", "hello", ["hello"]),
    ("several prompts", ["a", "b"], ["a", "b"]),
    ("messages", [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], ["s", "u"]),
    ("a name", [{"role": "user", "name": "Ann", "content": "u"}], ["Ann", "u"]),
    ("no content", [{"role": "assistant", "content": None, "tool_calls": []}], []),
    ("parts", [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]}],
     ["a", "b"]),
    ("calls", [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}],
     ["f", "{}"]),
    ("an old call", [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}], ["f", "{}"]),
    ("a call's result", [{"role": "tool", "tool_call_id": "1", "content": "r"}], ["r"]),
    ("items of Responses", [{"type": "function_call", "name": "f", "arguments": "{}"},
                            {"type": "function_call_output", "output": "r"}], ["f", "{}", "r"]),
    ("thoughts", [{"role": "assistant", "reasoning_content": "hm", "content": "a"}], ["hm", "a"]),
    ("Anthropic's tools", [{"role": "user", "content": [
        {"type": "tool_use", "name": "f", "input": {"a": 1}},
        {"type": "tool_result", "content": [{"type": "text", "text": "r"}]}]}], ["f", '{"a":1}', "r"]),
    ("definitions", [{"type": "function", "function": {"name": "f"}}], ['{"name":"f"}']),
    ("Anthropic's definitions", [{"name": "f", "description": "d", "input_schema": {}}], ["{}", "f", "d"]),
    ("nothing", [], []),
]  # fmt: skip


@pytest.mark.parametrize(("value", "wanted"), [case[1:] for case in READ], ids=[case[0] for case in READ])
@pytest.mark.parametrize("indent", [None, 2])
def test_what_a_model_reads_is_found(value: Any, wanted: list[str], indent: int | None) -> None:
    found = read(json.dumps(value, indent=indent, separators=None if indent else (",", ":")).encode())
    assert [text.replace("\n", "").replace(" ", "") if text[:1] == "{" else text for text in plain(found)] == wanted


def test_ids_are_as_many_as_they_are() -> None:
    assert read(b"[1,2,3]").ids == 3
    assert read(b"[[1, 2], [3]]").guessed == 3


def test_a_picture_is_no_text() -> None:
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}
    found = read(json.dumps([message]).encode())
    assert found.texts == [] and found.media == 1 and found.guessed == texts.MEDIA_TOKENS


def test_tools_are_no_messages() -> None:
    assert read(json.dumps([{"type": "function", "function": {"name": "f"}}]).encode()).messages == 0


def test_the_texts_of_the_first_message_are_known() -> None:
    found = read(json.dumps([{"name": "n", "content": "a"}, {"content": "b"}]).encode())
    assert found.first == 2 and plain(found)[:2] == ["n", "a"]


def test_all_values_of_a_prompt_are_found() -> None:
    body = {"messages": [{"role": "user", "content": "a\nb"}], "system": "s", "tools": []}
    values, own = values_of(prompt_of(json.dumps(body, indent=1).encode()))
    assert [json.loads(bytes(value)) for value in values][:2] == [body["messages"], "s"] and own


def test_a_lone_half_of_a_pair_is_read_as_python_does() -> None:
    body = b'{"messages":[{"role":"user","content":"a\\ud800b"}]}'
    assert not values_of(prompt_of(body))[1]
    assert plain(read(prompt_of(body))) == ["a\ufffdb"]


UNCOUNTABLE: list[tuple[str, bytes]] = [
    ("no JSON", b"\x00\xff"),
    ("nothing", b""),
    ("another API", b'{"query":"a","documents":["b"]}'),
    ("too many messages", b"[" + b",".join([b'{"role":"user"}'] * 5000) + b"]"),
    ("too many empty ones", b"[" + b",".join([b"{}"] * 5000) + b"]"),
    ("messages and numbers", b'[{"role":"user"},1,1,1]'),
    ("lists of what is no list of ids", b'[["a"]]'),
    ("deep", b"[" * 100_000),
    ("deep in a body", b'{"prompt":' + b"[" * 20_000 + b"]" * 20_000 + b"}"),
    ("deep contents", b'[{"content":' + b'[{"content":' * 6 + b'"a"' + b"}]" * 6 + b"}]"),
    ("too large", b'"' + b"a" * texts.MOST_BYTES + b'"'),
    ("too many escapes", b'"' + b"\\n" * 500_000 + b'"'),
    ("large and no JSON", b"a" * 100_000),
    ("strange tool calls", b'[{"tool_calls":[1]}]'),
    ("too many large prompts", b"[" + b",".join([b'"' + b"a" * 300 + b'"'] * 5000) + b"]"),
]


@pytest.mark.parametrize("prompt", [case[1] for case in UNCOUNTABLE], ids=[case[0] for case in UNCOUNTABLE])
def test_what_cannot_be_counted_says_so(prompt: bytes) -> None:
    with pytest.raises(Uncountable):
        if not read(prompt).texts:
            raise Uncountable("nothing")


def test_braces_in_texts_are_no_objects() -> None:
    code = json.dumps([{"role": "user", "content": 'if (a) {"b"} else {c}' * 5000}]).encode()
    assert code.count(b"{") > texts.MOST_OBJECTS and len(read(code).texts) == 1


FIRST: list[tuple[bytes, bytes]] = [
    (b'[{"a":"}"},{"b":1}]', b'[{"a":"}"}'),
    (b'[ {"a":{"b":"\\"}"}} , {}]', b'[ {"a":{"b":"\\"}"}}'),
    (b'["a"]', b""),
    (b'[{"a":1', b""),
]


@pytest.mark.parametrize(("prompt", "wanted"), FIRST)
def test_the_end_of_the_first_message_is_found(prompt: bytes, wanted: bytes) -> None:
    assert prompt[: first_end(prompt)] == wanted


LONG: list[tuple[str, str]] = [
    ("words", "some words and more " * 10_000),
    ("one letter", "a" * 200_000),
    ("Chinese", "没有空格的文字" * 10_000),
    ("Chinese with stops", "没有空格的文字\uff0c" * 10_000),
    ("emoji", "\U0001f600" * 30_000),
    ("combining marks", "a" + "\u0301" * 60_000),
    ("quotes", '"' * 70_000),
    ("backslashes", "\\" * 100_001),
    ("one letter, then backslashes", "a" + "\\" * 100_000),
    ("lines", "\n" * 100_000),
    ("NUL", "\x00" * 30_000),
]


@pytest.mark.parametrize("text", [case[1] for case in LONG], ids=[case[0] for case in LONG])
@pytest.mark.parametrize("ascii_only", [False, True], ids=["as it is", "escaped"])
def test_pieces_are_the_text_and_small(text: str, ascii_only: bool) -> None:
    raw = json.dumps(text, ensure_ascii=ascii_only).encode()
    pieces = list(pieces_of(msgspec.Raw(raw)))
    assert "".join(pieces) == text
    assert len(pieces) > 1 and all(
        len(json.dumps(piece, ensure_ascii=ascii_only)) <= PIECE_BYTES + 8 for piece in pieces
    )
    assert len(pieces) <= 2 + len(raw) // (PIECE_BYTES // 2)


@given(st.text(alphabet=st.sampled_from('a \\"\n\x00é汉\U0001f600\u3002'), max_size=60), st.booleans())
def test_any_text_is_the_sum_of_its_pieces(text: str, ascii_only: bool) -> None:
    text = text * (PIECE_BYTES // (2 * len(text)) + 1 if text else 0)
    raw = json.dumps(text, ensure_ascii=ascii_only).encode()
    assert "".join(pieces_of(msgspec.Raw(raw))) == text


@given(st.binary(max_size=200))
def test_any_bytes_are_cut_between_start_and_end(data: bytes) -> None:
    data = data * (PIECE_BYTES // (len(data) or 1) + 2)
    start = 1
    while start < len(data):
        stop = cut(data, start, len(data))
        assert start < stop <= len(data)
        start = stop


def test_what_is_no_utf_8_is_counted_with_marks_in_its_place() -> None:
    assert list(pieces_of(b'"a\xffb"')) == ["a\ufffdb"]


def test_a_text_is_cut_where_words_are() -> None:
    pieces = list(pieces_of(json.dumps("two words " * 10_000).encode()))
    assert all(piece[:1] == " " for piece in pieces[1:])
