"""What every translated answer has in common, by the example of Triton's: one that is compiled has no other heirs."""

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.adapters.ask import Ask, Body
from sidecar.adapters.reading import MAX_BODY, estimated_tokens, without_paths
from sidecar.adapters.triton import TritonGenerate
from sidecar.kernel.outcome import Ending
from sidecar.wire.answer import Usage
from sidecar.wire.call import Api
from sidecar.wire.sse import LIMIT_BYTES
from tests.adapters.answers import JSON, SSE, answered, asked, bytewise, halves

TRITON = TritonGenerate()

both_apis = pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS])
both_ways = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])


def wish(api: Api = Api.CHAT, *, stream: bool = True, usage: bool = False, prompt: str = "Hi") -> Ask:
    ask = asked(api, stream=stream, prompt=prompt)
    ask.usage = usage and stream
    return ask


def members(word: str) -> dict[str, object]:
    """An engine's event in short: `+text`, `.reason`, `#prompt completion`, `!error`, or something else."""
    rest = word[1:]
    match word[:1]:
        case "+":
            return {"text_output": rest, "finish_reason": "None"}
        case ".":
            return {"text_output": "", "finish_reason": rest}
        case "#":
            prompt, _, completion = rest.partition(" ")
            return {"num_input_tokens": int(prompt), "num_output_tokens": int(completion)}
        case "!":
            return {"error": rest}
        case _:
            return {"model_name": "m"}


def events(*words: str) -> bytes:
    return "".join(f"data: {json.dumps(members(word))}\n\n" for word in words).encode()


WHOLE = json.dumps(members(".stop") | {"text_output": "Hello"} | members("#3 2")).encode()
GOOD = events("+Hel", "+lo", "#3 2", ".stop")
FULL = "Exceeds maximum queue size"


@both_ways
@both_apis
def test_a_streamed_answer_is_passed_on_or_collected(api: Api, stream: bool) -> None:
    answer = answered(TRITON.reading(wish(api, stream=stream, usage=True)), 200, SSE, GOOD)
    assert (answer.status, answer.text, answer.finish_reason) == (200, "Hello", "stop")
    assert answer.usage == Usage(3, 2)
    assert answer.ending is Ending.COMPLETE
    assert answer.media_type == (SSE if stream else JSON)


@both_ways
@both_apis
def test_an_answer_in_one_body_is_passed_on_or_put_into_a_stream(api: Api, stream: bool) -> None:
    answer = answered(
        TRITON.reading(wish(api, stream=stream, usage=True)),
        200,
        JSON,
        WHOLE,
    )
    assert (answer.status, answer.text, answer.finish_reason) == (200, "Hello", "stop")
    assert answer.usage == Usage(3, 2)
    assert answer.ending is Ending.COMPLETE
    assert answer.media_type == (SSE if stream else JSON)


@both_ways
@pytest.mark.parametrize("media_type", [SSE, JSON])
def test_an_empty_answer_is_one(stream: bool, media_type: bytes) -> None:
    body = events(".stop") if media_type == SSE else json.dumps(members(".stop")).encode()
    answer = answered(TRITON.reading(wish(stream=stream)), 200, media_type, body)
    assert (answer.status, answer.text, answer.finish_reason) == (200, "", "stop")
    assert answer.ending is Ending.COMPLETE


def test_usage_is_told_in_a_stream_only_where_it_is_asked_for() -> None:
    assert answered(TRITON.reading(wish()), 200, SSE, GOOD).usage is None


def test_a_stream_goes_on_event_by_event() -> None:
    reading = TRITON.reading(wish())
    reading.head(200, SSE)
    assert reading.status == 200
    event = events("+Hel")
    assert reading.feed(event[:9]) == b""
    pending = [reading.pending]
    first = reading.feed(event[9:])
    assert first.count(b"\n\n") == 2  # the role, and the text
    assert [*pending, reading.pending] == [True, False]
    assert reading.feed(events("+lo")).count(b"\n\n") == 1
    assert reading.tokens == 2
    assert reading.feed(b": ping\n\n") == b""
    assert reading.feed(events(".stop")) == b""
    assert reading.end().endswith(b"data: [DONE]\n\n")


def test_a_collected_answer_says_nothing_until_its_end() -> None:
    reading = TRITON.reading(wish(stream=False))
    reading.head(200, SSE)
    assert (reading.status, reading.feed(GOOD), reading.tokens) == (0, b"", 2)
    assert reading.end()
    assert reading.status == 200


@both_ways
def test_the_same_in_any_pieces(stream: bool) -> None:
    whole = answered(TRITON.reading(wish(stream=stream)), 200, SSE, GOOD)
    assert answered(TRITON.reading(wish(stream=stream)), 200, SSE, *bytewise(GOOD)) == whole
    for parts in halves(GOOD):
        assert answered(TRITON.reading(wish(stream=stream)), 200, SSE, *parts) == whole


def test_the_first_reason_stays() -> None:
    assert answered(TRITON.reading(wish()), 200, SSE, events("+a", ".length", ".stop")).finish_reason == "length"


def test_a_dialect_may_take_the_framing_for_the_end() -> None:
    assert answered(TRITON.reading(wish()), 200, SSE, b'data: {"text_output":"a"}\n\n').finish_reason == "stop"


# --- tokens ---------------------------------------------------------------------------------------------------------


@both_ways
@both_apis
def test_tokens_that_nobody_counted_are_estimated(api: Api, stream: bool) -> None:
    answer = answered(
        TRITON.reading(wish(api, stream=stream, usage=True, prompt="Hello, world")),
        200,
        SSE,
        events("+a", "+b", "+", ".stop"),
    )
    assert answer.usage == Usage(3, 2)


@pytest.mark.parametrize(("size", "tokens"), [(0, 1), (1, 1), (4, 1), (5, 2), (400, 100)])
def test_a_token_is_four_characters(size: int, tokens: int) -> None:
    assert estimated_tokens(asked(prompt="a" * size)) == tokens


def test_a_chat_that_its_front_makes_a_prompt_of_is_counted_by_its_messages() -> None:
    messages: list[dict[str, object]] = [
        {"role": "user", "content": "Hello"},
        {"role": "user", "content": [{"type": "text", "text": "abc"}]},
    ]
    ask = asked(body=Body(messages=messages), prompt="")
    ask.sent()
    assert estimated_tokens(ask) == 2


# --- errors ---------------------------------------------------------------------------------------------------------


@both_ways
def test_an_error_before_the_answer_has_its_status(stream: bool) -> None:
    answer = answered(TRITON.reading(wish(stream=stream)), 503, JSON, json.dumps({"error": FULL}).encode())
    assert (answer.status, answer.media_type) == (503, JSON)
    assert json.loads(answer.body)["error"] == {
        "message": FULL,
        "type": "OverloadedError",
        "param": None,
        "code": 503,
    }


def test_an_error_in_the_stream_is_its_last_event() -> None:
    answer = answered(TRITON.reading(wish()), 200, SSE, events("+a", f"!{FULL}", "+b", "!again", ".stop"))
    assert [each.get("error", {}).get("code") for each in answer.events] == [None, None, 503]
    assert answer.ending is Ending.OVERLOADED_IN_BAND


def test_an_error_in_a_stream_that_is_collected_is_a_status() -> None:
    answer = answered(TRITON.reading(wish(stream=False)), 200, SSE, events("+a", "!prompt is too long", "+b", ".stop"))
    assert (answer.status, answer.ending) == (400, Ending.CONTEXT_LENGTH)
    assert answer.error is not None
    assert answer.error.type == "context_length_exceeded"


def test_an_error_after_the_finish_is_an_error_still() -> None:
    assert answered(TRITON.reading(wish()), 200, SSE, events("+a", ".stop", "!no")).ending is Ending.ERROR_IN_BAND


# --- no good end ----------------------------------------------------------------------------------------------------

UNFINISHED = {
    "nothing": (b"", Ending.EMPTY),
    "only a comment": (b": ping\n\n", Ending.EMPTY),
    "text": (events("+a", "+b"), Ending.TRUNCATED),
    "half an event": (events("+a") + events("+b")[:-1], Ending.TRUNCATED),
    "an event that is too long": (events("+a") + events("+" + "b" * LIMIT_BYTES), Ending.ERROR_IN_BAND),
}


@pytest.mark.parametrize(("body", "ending"), UNFINISHED.values(), ids=UNFINISHED.keys())
def test_a_stream_that_does_not_finish_does_not_seem_to(body: bytes, ending: Ending) -> None:
    answer = answered(TRITON.reading(wish()), 200, SSE, body)
    assert answer.ending is ending
    assert b"[DONE]" not in answer.body
    assert answer.finish_reason is None
    whole = answered(TRITON.reading(wish(stream=False)), 200, SSE, body)
    assert (whole.status, whole.ending) == (502, Ending.SERVER_ERROR)


@both_ways
def test_a_body_that_tells_no_end_is_bad_gateway(stream: bool) -> None:
    answer = answered(TRITON.reading(wish(stream=stream)), 200, JSON, json.dumps(members("+a")).encode())
    assert (answer.status, answer.ending) == (502, Ending.SERVER_ERROR)


@both_ways
def test_what_is_held_is_bounded(stream: bool) -> None:
    piece = b"a" * (1 << 20)
    answer = answered(TRITON.reading(wish(stream=stream)), 200, JSON, *[piece] * 6)
    assert (answer.status, answer.error and answer.error.message) == (
        502,
        f"the engine's answer exceeds {MAX_BODY} bytes",
    )


def test_what_is_collected_weighs_what_it_says() -> None:
    reading = TRITON.reading(wish(stream=False))
    reading.head(200, SSE)
    tracemalloc.start()
    try:
        for _ in range(20):
            reading.feed(events("+token") * 500)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 3 * 10_000 * len("token")


def test_what_is_collected_is_bounded_and_what_is_passed_on_is_not() -> None:
    many = [events("+" + "a" * (1 << 19))] * 9
    whole = answered(TRITON.reading(wish(stream=False)), 200, SSE, *many, events(".stop"))
    assert (whole.status, len(whole.body) < 1000) == (502, True)
    assert len(answered(TRITON.reading(wish()), 200, SSE, *many, events(".stop")).text) == 9 << 19


@both_ways
@pytest.mark.parametrize("number", [1 << 53, 10**30, 10**4299], ids=["2^53", "10^30", "10^4299"])
def test_a_number_of_tokens_that_is_none_is_not_told(number: int, stream: bool) -> None:
    body = events("+a", f"#{number} {number}", f"#{number} {number}", ".stop")
    answer = answered(TRITON.reading(wish(stream=stream, usage=True)), 200, SSE, body)
    assert (answer.text, answer.usage) == ("a", Usage(1, 1))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("cannot open /models/llm/1/model.py: no", "cannot open ...: no"),
        ("[Errno 2] '/data/x y'", "[Errno 2] '... y'"),
        ("and/or 1/2 a / b", "and/or 1/2 a / b"),
    ],
)
def test_where_files_are_is_not_told(words: str, told: str) -> None:
    assert without_paths(words) == told


@given(
    st.lists(st.sampled_from(["+a", "+", "+\u00e9\U0001f600", ".stop", ".length", "#1 2", "!no", "?"]), max_size=6),
    st.booleans(),
    st.sampled_from([Api.CHAT, Api.COMPLETIONS]),
    st.integers(0, 99),
)
def test_whatever_comes_is_one_answer_or_one_error(words: list[str], stream: bool, api: Api, cut: int) -> None:
    body = events(*words)
    cut = min(cut, len(body))
    answer = answered(TRITON.reading(wish(api, stream=stream, usage=True)), 200, SSE, body[:cut], body[cut:])
    said = "".join(word[1:] for word in words if word.startswith("+"))
    if "!no" in words:
        assert answer.ending in (Ending.ERROR_IN_BAND, Ending.SERVER_ERROR)
    elif answer.ending is Ending.COMPLETE:
        assert answer.text == said
        assert answer.finish_reason
    else:
        assert not {".stop", ".length"} & set(words)
        assert stream or answer.status == 502
