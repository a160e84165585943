"""Our OpenAI answers, held against vLLM's recorded ones."""

import json
from typing import Any

import pytest

from sidecar.adapters.openai import DONE, Chunks, error_body, error_event
from sidecar.wire.answer import AnswerError, Usage, read_answer
from sidecar.wire.call import Api
from sidecar.wire.stream import StreamReader
from tests import captures

both = pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS])


def chunks(api: Api, **named: Any) -> Chunks:
    return Chunks(api, named.get("request_id", "r1"), 1796000000, named.get("model", "tiny"))


def parsed(event: bytes) -> dict[str, Any]:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    read: dict[str, Any] = json.loads(event[6:])
    return read


def recorded(name: str) -> list[dict[str, Any]]:
    events = [line.removeprefix(b"data: ") for line in captures.body(name).split(b"\n\n") if line]
    return [json.loads(each) for each in events if each != b"[DONE]"]


def check_shape(ours: object, theirs: object, at: str = "$") -> None:
    """All of `ours` is in `theirs`, with the same types; what ours leaves out is null or a vLLM's own."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name, value in ours.items():
            assert name in theirs, f"{at}.{name}"
            check_shape(value, theirs[name], f"{at}.{name}")
        for name, value in theirs.items():
            assert name in ours or value is None or name == "system_fingerprint", f"{at}.{name}"
    elif isinstance(ours, list) and isinstance(theirs, list):
        assert bool(ours) == bool(theirs), at
        for one, other in zip(ours, theirs, strict=False):
            check_shape(one, other, at)
    else:
        assert type(ours) is type(theirs), at


def test_chunks_of_a_chat_look_like_vllms() -> None:
    first, second, *_, last, usage = recorded("vllm/chat_stream_usage.raw")
    said = chunks(Api.CHAT)
    check_shape(parsed(said.role()), first)
    check_shape(parsed(said.text(b'"a"')), second)
    check_shape(parsed(said.finish("length")), last)
    check_shape(parsed(said.usage(1, 2)), usage)


def test_chunks_of_a_completion_look_like_vllms() -> None:
    first, *_, last, usage = recorded("vllm/completion_stream_usage.raw")
    said = chunks(Api.COMPLETIONS)
    assert said.role() == b""
    check_shape(parsed(said.text(b'"a"')), first)
    check_shape(parsed(said.finish("length")), last)
    check_shape(parsed(said.usage(1, 2)), usage)


def test_whole_answers_look_like_vllms() -> None:
    ours = json.loads(chunks(Api.COMPLETIONS).whole(b'"a"', "stop", 1, 2))
    theirs = json.loads(captures.body("vllm/completion_2prompts.txt"))
    theirs["choices"].pop()
    check_shape(ours, theirs)
    ours = json.loads(chunks(Api.CHAT).whole(b'"a"', "stop", 1, 2))
    check_shape(ours, json.loads(captures.body("vllm/chat.txt")))


def test_errors_look_like_vllms() -> None:
    theirs = json.loads(captures.body("vllm/err_model_not_found.txt"))
    theirs["error"]["param"] = None
    check_shape(json.loads(error_body(404, "no such model", "NotFoundError")), theirs)
    assert parsed(error_event(404, "no", "x")) == json.loads(error_body(404, "no", "x"))


@both
def test_a_stream_is_read_back_as_it_was_meant(api: Api) -> None:
    said = chunks(api)
    reader = StreamReader(api)
    events = [said.role(), said.text(b'"a"'), said.text(b'" b"'), said.finish("stop"), said.usage(3, 2), DONE]
    reader.feed(b"".join(events))
    assert reader.complete
    assert reader.terminal
    assert (reader.tokens, reader.finish_reason, reader.usage, reader.malformed) == (2, "stop", Usage(3, 2), 0)


@both
def test_a_whole_answer_is_read_back_as_it_was_meant(api: Api) -> None:
    answer = read_answer(api, chunks(api).whole(b'"a"', "length", 3, 2))
    assert (answer.finish_reason, answer.usage, answer.error, answer.malformed) == ("length", Usage(3, 2), None, False)


@both
def test_an_error_is_read_back_as_it_was_meant(api: Api) -> None:
    expected = AnswerError('no "such" model\n', "NotFoundError", 404)
    assert read_answer(api, error_body(404, expected.message, expected.type), status=404).error == expected
    reader = StreamReader(api)
    reader.feed(error_event(404, expected.message, expected.type))
    assert reader.error == expected


@both
def test_names_of_any_kind_stay_json(api: Api) -> None:
    said = chunks(api, model='a"b\\c\n\u2028', request_id="r-1")
    for event in (said.text(b'"a"'), said.finish('x"y'), said.usage(0, 0)):
        assert parsed(event)["model"] == 'a"b\\c\n\u2028'
    assert parsed(said.text(b'"a"'))["id"] == ("chatcmpl-r-1" if api is Api.CHAT else "cmpl-r-1")


@both
def test_half_a_character_is_replaced_in_names_and_errors(api: Api) -> None:
    # JSON may write one; what says it must still be sent.
    said = chunks(api, model="a\ud83d")
    for event in (said.text(b'"a"'), said.finish("x\ud83d")):
        assert parsed(event)["model"] == "a\ufffd"
    assert parsed(error_event(500, "\ud83d\ude00 \udc00", "x"))["error"]["message"] == "\U0001f600 \ufffd"


@both
def test_text_goes_through_as_it_was_written(api: Api) -> None:
    for written in (rb'"\ud83d"', '"\u00e9\U0001f600"'.encode(), rb'"\n\"\\"', b'""'):
        assert written in chunks(api).text(written)
        assert written in chunks(api).whole(written, "stop", 1, 1)
