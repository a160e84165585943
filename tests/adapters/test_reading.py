"""What every translated answer has in common, by an engine that says what it is told to say."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.adapters.ask import Ask, Body
from sidecar.adapters.reading import MAX_BODY, Reading, estimated_tokens
from sidecar.kernel.outcome import Ending
from sidecar.wire.answer import Usage
from sidecar.wire.call import Api
from sidecar.wire.sse import LIMIT_BYTES
from tests.adapters.answers import JSON, SSE, answered, asked, bytewise, halves

both_apis = pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS])
both_ways = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])


class Plain(Reading):
    """An engine whose events are `+text`, `.reason`, `#prompt completion` or `!status message`; its body is one."""

    def on_event(self, kind: bytes, data: bytes) -> None:
        word = data[1:].decode()
        match data[:1]:
            case b"+":
                self.said(json.dumps(word).encode())
            case b".":
                self.finished(word)
            case b"#":
                prompt, _, completion = word.partition(" ")
                self.counted(int(prompt), int(completion))
            case b"!":
                status, _, message = word.partition(" ")
                self.fail(int(status), message)

    def on_end(self) -> None:
        if self.tokens == 1:
            self.finished("stop")

    def on_whole(self, status: int, body: bytes) -> None:
        if status == 200:
            for line in body.splitlines():
                self.on_event(b"", line)
        else:
            self.fail(status, body.decode())


def wish(api: Api = Api.CHAT, *, stream: bool = True, usage: bool = False, prompt: str = "Hi") -> Ask:
    ask = asked(api, stream=stream, prompt=prompt)
    ask.usage = usage and stream
    return ask


def events(*data: str) -> bytes:
    return "".join(f"data: {each}\n\n" for each in data).encode()


GOOD = events("+Hel", "+lo", "#3 2", ".stop")


@both_ways
@both_apis
def test_a_streamed_answer_is_passed_on_or_collected(api: Api, stream: bool) -> None:
    answer = answered(Plain(wish(api, stream=stream, usage=True)), 200, SSE, GOOD)
    assert (answer.status, answer.text, answer.finish_reason) == (200, "Hello", "stop")
    assert answer.usage == Usage(3, 2)
    assert answer.ending is Ending.COMPLETE
    assert answer.media_type == (SSE if stream else JSON)


@both_ways
@both_apis
def test_an_answer_in_one_body_is_passed_on_or_put_into_a_stream(api: Api, stream: bool) -> None:
    answer = answered(Plain(wish(api, stream=stream, usage=True)), 200, JSON, b"+Hel\n+lo\n#3 2\n.stop\n")
    assert (answer.status, answer.text, answer.finish_reason) == (200, "Hello", "stop")
    assert answer.usage == Usage(3, 2)
    assert answer.ending is Ending.COMPLETE
    assert answer.media_type == (SSE if stream else JSON)


@both_ways
@pytest.mark.parametrize("media_type", [SSE, JSON])
def test_an_empty_answer_is_one(stream: bool, media_type: bytes) -> None:
    body = events(".stop") if media_type == SSE else b".stop"
    answer = answered(Plain(wish(stream=stream)), 200, media_type, body)
    assert (answer.status, answer.text, answer.finish_reason) == (200, "", "stop")
    assert answer.ending is Ending.COMPLETE


def test_usage_is_told_in_a_stream_only_where_it_is_asked_for() -> None:
    assert answered(Plain(wish()), 200, SSE, GOOD).usage is None


def test_a_stream_goes_on_event_by_event() -> None:
    reading = Plain(wish())
    reading.head(200, SSE)
    assert reading.status == 200
    assert reading.feed(b"data: +He") == b""
    pending = [reading.pending]
    first = reading.feed(b"l\n\n")
    assert first.count(b"\n\n") == 2  # the role, and the text
    assert [*pending, reading.pending] == [True, False]
    assert reading.feed(events("+lo")).count(b"\n\n") == 1
    assert reading.tokens == 2
    assert reading.feed(b": ping\n\n") == b""
    assert reading.feed(events(".stop")) == b""
    assert reading.end().endswith(b"data: [DONE]\n\n")


def test_a_collected_answer_says_nothing_until_its_end() -> None:
    reading = Plain(wish(stream=False))
    reading.head(200, SSE)
    assert (reading.status, reading.feed(GOOD), reading.tokens) == (0, b"", 2)
    assert reading.end()
    assert reading.status == 200


@both_ways
def test_the_same_in_any_pieces(stream: bool) -> None:
    whole = answered(Plain(wish(stream=stream)), 200, SSE, GOOD)
    assert answered(Plain(wish(stream=stream)), 200, SSE, *bytewise(GOOD)) == whole
    for parts in halves(GOOD):
        assert answered(Plain(wish(stream=stream)), 200, SSE, *parts) == whole


def test_the_first_reason_stays() -> None:
    assert answered(Plain(wish()), 200, SSE, events("+a", ".length", ".stop")).finish_reason == "length"


def test_a_dialect_may_take_the_framing_for_the_end() -> None:
    assert answered(Plain(wish()), 200, SSE, events("+a")).finish_reason == "stop"


# --- tokens ---------------------------------------------------------------------------------------------------------


@both_ways
@both_apis
def test_tokens_that_nobody_counted_are_estimated(api: Api, stream: bool) -> None:
    answer = answered(
        Plain(wish(api, stream=stream, usage=True, prompt="Hello, world")), 200, SSE, events("+a", "+b", "+", ".stop")
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
    answer = answered(Plain(wish(stream=stream)), 503, JSON, b"no room")
    assert (answer.status, answer.media_type) == (503, JSON)
    assert json.loads(answer.body)["error"] == {
        "message": "no room",
        "type": "InternalServerError",
        "param": None,
        "code": 503,
    }


def test_an_error_in_the_stream_is_its_last_event() -> None:
    answer = answered(Plain(wish()), 200, SSE, events("+a", "!503 no room", "+b", "!500 again", ".stop"))
    assert [each.get("error", {}).get("code") for each in answer.events] == [None, None, 503]
    assert answer.ending is Ending.ERROR_IN_BAND


def test_an_error_in_a_stream_that_is_collected_is_a_status() -> None:
    answer = answered(Plain(wish(stream=False)), 200, SSE, events("+a", "!400 bad", "+b", ".stop"))
    assert (answer.status, answer.ending) == (400, Ending.CLIENT_ERROR)
    assert answer.error is not None
    assert answer.error.type == "BadRequestError"


def test_an_error_after_the_finish_is_an_error_still() -> None:
    assert answered(Plain(wish()), 200, SSE, events("+a", ".stop", "!500 no")).ending is Ending.ERROR_IN_BAND


# --- no good end ----------------------------------------------------------------------------------------------------

UNFINISHED = {
    "nothing": (b"", Ending.EMPTY),
    "only a comment": (b": ping\n\n", Ending.EMPTY),
    "text": (events("+a", "+b"), Ending.TRUNCATED),
    "half an event": (events("+a") + b"data: +b", Ending.TRUNCATED),
    "an event that is too long": (events("+a") + events("+" + "b" * LIMIT_BYTES), Ending.ERROR_IN_BAND),
}


@pytest.mark.parametrize(("body", "ending"), UNFINISHED.values(), ids=UNFINISHED.keys())
def test_a_stream_that_does_not_finish_does_not_seem_to(body: bytes, ending: Ending) -> None:
    answer = answered(Plain(wish()), 200, SSE, body)
    assert answer.ending is ending
    assert b"[DONE]" not in answer.body
    assert answer.finish_reason is None
    whole = answered(Plain(wish(stream=False)), 200, SSE, body)
    assert (whole.status, whole.ending) == (502, Ending.SERVER_ERROR)


@both_ways
def test_a_body_that_tells_no_end_is_bad_gateway(stream: bool) -> None:
    answer = answered(Plain(wish(stream=stream)), 200, JSON, b"+a\n+b\n")
    assert (answer.status, answer.ending) == (502, Ending.SERVER_ERROR)


@both_ways
def test_what_is_held_is_bounded(stream: bool) -> None:
    piece = b"+" + b"a" * (1 << 20)
    answer = answered(Plain(wish(stream=stream)), 200, JSON, *[piece] * 6)
    assert (answer.status, answer.error and answer.error.message) == (
        502,
        f"the engine's answer exceeds {MAX_BODY} bytes",
    )


def test_what_is_collected_is_bounded_and_what_is_passed_on_is_not() -> None:
    many = [events("+" + "a" * (1 << 19))] * 9
    whole = answered(Plain(wish(stream=False)), 200, SSE, *many, events(".stop"))
    assert (whole.status, len(whole.body) < 1000) == (502, True)
    assert len(answered(Plain(wish()), 200, SSE, *many, events(".stop")).text) == 9 << 19


@given(
    st.lists(st.sampled_from(["+a", "+", "+\u00e9\U0001f600", ".stop", ".length", "#1 2", "!500 no", "?"]), max_size=6),
    st.booleans(),
    st.sampled_from([Api.CHAT, Api.COMPLETIONS]),
    st.integers(0, 99),
)
def test_whatever_comes_is_one_answer_or_one_error(words: list[str], stream: bool, api: Api, cut: int) -> None:
    body = events(*words)
    cut = min(cut, len(body))
    answer = answered(Plain(wish(api, stream=stream, usage=True)), 200, SSE, body[:cut], body[cut:])
    said = "".join(word[1:] for word in words if word.startswith("+"))
    if "!500 no" in words:
        assert answer.ending in (Ending.ERROR_IN_BAND, Ending.SERVER_ERROR)
    elif answer.ending is Ending.COMPLETE:
        assert answer.text == said
        assert answer.finish_reason
    else:
        assert not {".stop", ".length"} & set(words)
        assert stream or answer.status == 502
