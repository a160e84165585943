"""Whatever a peer sends, the wire readers neither raise nor depend on how it was cut, and everything gets an ending."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sidecar.core.classify import ending_of_error, ending_of_status, ending_of_stream, retry_after_s
from sidecar.kernel.errors import Reason, SidecarError
from sidecar.kernel.outcome import DOCTRINE, Ending
from sidecar.wire.answer import read_answer, read_error
from sidecar.wire.call import Api, Call, read_call
from sidecar.wire.stream import StreamReader
from tests import captures

FUZZ = settings(max_examples=200, deadline=None)

APIS = st.sampled_from(list(Api))

KEYS = st.sampled_from(
    [
        *("choices", "delta", "content", "text", "index", "finish_reason", "usage", "prompt_tokens", "input_tokens"),
        *("error", "message", "type", "code", "object", "detail", "tool_calls", "logprobs", "token_ids", "response"),
        *("status", "incomplete_details", "reason", "item", "content_block", "partial_json", "output", "reasoning"),
        *("model", "stream", "user", "max_tokens", "n", "messages", "metadata", "user_id", "data"),
    ]
)
WORDS = st.sampled_from(
    [
        *("", "error", "stop", "a", "message_stop", "message_start", "content_block_delta", "response.completed"),
        *("response.failed", "response.output_text.delta", "context length", "queue is full", "429", "\ud83d"),
    ]
)
LEAVES = (
    WORDS
    | st.none()
    | st.booleans()
    | st.integers(-2, 600)
    | st.sampled_from([10**30, -(10**30), 2**63, 40303, 1e16])
    | st.floats()
    | st.text(max_size=4)
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)
OBJECTS = st.dictionaries(KEYS, VALUES, max_size=5)


def jsonlike(value: object) -> bytes:
    # 1e400 is good JSON that no float holds.
    return json.dumps(value).replace("1e+16", "1e400").encode()


# Chunks of the right shape with anything in their places find more than noise does.
CHUNKS = st.fixed_dictionaries(
    {
        "choices": st.lists(
            st.fixed_dictionaries(
                {},
                optional={
                    "index": st.integers(0, 3) | LEAVES,
                    "delta": st.dictionaries(KEYS, LEAVES, max_size=2) | LEAVES,
                    "text": WORDS | LEAVES,
                    "finish_reason": WORDS | st.none() | LEAVES,
                    "logprobs": OBJECTS | st.none(),
                },
            ),
            max_size=3,
        )
    },
    optional={"usage": OBJECTS | st.none(), "error": VALUES},
)
BODIES = OBJECTS.map(jsonlike) | CHUNKS.map(jsonlike) | VALUES.map(jsonlike) | st.binary(max_size=40)
EVENTS = st.builds(
    lambda kind, data, end: (b"event: " + kind + b"\n" if kind else b"") + b"data: " + data + end,
    st.sampled_from([b"", b"", b"error", b"message_stop", b"response.completed", b"response.output_text.delta"]),
    BODIES | st.just(b"[DONE]"),
    st.sampled_from([b"\n\n", b"\r\n\r\n", b"\n", b"\r\r"]),
)
STREAMS = st.lists(EVENTS | st.just(b": ping\n\n"), max_size=6).map(b"".join) | st.binary(max_size=60)


def facts(reader: StreamReader) -> tuple[object, ...]:
    return (
        reader.tokens,
        reader.events,
        reader.malformed,
        reader.comments,
        reader.terminal,
        reader.finish_reason,
        reader.error,
        reader.usage,
        reader.tool_call,
        reader.complete,
    )


@settings(FUZZ, max_examples=500)
@given(APIS, STREAMS, st.data())
def test_a_stream_never_raises_and_reads_the_same_however_it_is_cut(api: Api, data: bytes, draw: st.DataObject) -> None:
    whole = StreamReader(api)
    told = whole.feed(data)
    assert told is (whole.tokens > 0)
    assert 0 <= whole.tokens <= whole.events

    cuts = sorted(draw.draw(st.lists(st.integers(0, len(data)), max_size=6)))
    pieces = StreamReader(api)
    told_in_pieces = [pieces.feed(data[a:b]) for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    assert facts(pieces) == facts(whole)
    assert any(told_in_pieces) is told

    for clean in (True, False):
        ending = ending_of_stream(whole, clean)
        assert ending in DOCTRINE
        assert (ending is Ending.COMPLETE) <= whole.complete
    if whole.error is not None:
        assert not whole.complete


RECORDED = [
    ("vllm/chat_stream_usage.raw", Api.CHAT),
    ("vllm/completion_stream_usage.raw", Api.COMPLETIONS),
    ("vllm/messages_stream.raw", Api.MESSAGES),
    ("vllm/responses_stream.raw", Api.RESPONSES),
]


@pytest.mark.parametrize(("name", "api"), RECORDED, ids=[name for name, _ in RECORDED])
@settings(FUZZ, max_examples=80)
@given(st.data())
def test_a_recorded_stream_with_bytes_changed_never_raises(name: str, api: Api, draw: st.DataObject) -> None:
    recorded = bytearray(captures.body(name))
    for _ in range(draw.draw(st.integers(1, 4))):
        at = draw.draw(st.integers(0, len(recorded) - 1))
        recorded[at : at + draw.draw(st.integers(0, 20))] = draw.draw(st.binary(max_size=4))
        if not recorded:
            break
    data = bytes(recorded)
    whole, bytewise = StreamReader(api), StreamReader(api)
    whole.feed(data)
    for i in range(len(data)):
        bytewise.feed(data[i : i + 1])
    assert facts(bytewise) == facts(whole)
    assert ending_of_stream(whole, True) in DOCTRINE


@FUZZ
@given(APIS, BODIES)
@example(Api.CHAT, b'{"stream":1e400}')
@example(Api.CHAT, b'{"max_tokens":1e400}')
@example(Api.CHAT, b'{"max_tokens":"1e400"}')
@example(Api.MESSAGES, b'{"metadata":{"user_id":"\\ud83d"}}')
def test_a_request_body_is_a_call_or_a_bad_request(api: Api, data: bytes) -> None:
    try:
        call = read_call(api, data)
    except SidecarError as refused:
        assert refused.reason is Reason.BAD_REQUEST
        assert refused.detail
    else:
        assert isinstance(call, Call)
        assert isinstance(call.model, str)
        assert isinstance(call.user, str)
        assert isinstance(call.stream, bool)
        assert call.max_tokens is None or type(call.max_tokens) is int
        assert type(call.n) is int
        assert call.n >= 1


@FUZZ
@given(st.none() | APIS, BODIES, st.integers(100, 999), st.booleans())
def test_an_answer_never_raises_and_has_an_ending(api: Api | None, data: bytes, status: int, retry_after: bool) -> None:
    answer = read_answer(api, data, status=status)
    assert ending_of_status(status, answer.error, retry_after) in DOCTRINE
    if answer.error is not None:
        assert ending_of_error(answer.error) in DOCTRINE
        assert isinstance(answer.error.message, str)
        assert len(answer.error.message) <= 512
        json.dumps([answer.error.type, answer.error.code])
    assert answer.finish_reason is None or isinstance(answer.finish_reason, str)
    if answer.usage is not None:
        assert all(
            count is None or type(count) is int
            for count in (answer.usage.prompt_tokens, answer.usage.completion_tokens)
        )


@FUZZ
@given(BODIES | STREAMS)
def test_an_error_read_strictly_is_also_read_softly(data: bytes) -> None:
    if read_error(data, soft=False) is not None:
        assert read_error(data) is not None


NAMES = st.sampled_from([b"retry-after", b"Retry-After", b"retry-after-ms", b"x", b"content-type"])
DATES = st.builds(
    lambda *parts: " ".join(parts).encode("latin-1", "replace"),
    st.sampled_from(["Sun,", "Sunday,", "", "x"]),
    st.sampled_from(["06", "99", "-1", "06-Nov-94"]),
    st.sampled_from(["Nov", "13", ""]),
    st.sampled_from(["1994", "99999999999999", "0", "-5", "00"]),
    st.sampled_from(["08:49:37", "8", "99:99:99", ":::", "0.5:1:1"]),
    st.sampled_from(["GMT", "+9999", "-99999999999", "", "EST", "\xff"]),
)


@settings(FUZZ, max_examples=500)
@given(st.lists(st.tuples(NAMES, DATES | st.binary(max_size=30) | st.integers().map(lambda n: str(n).encode()))))
def test_retry_after_never_raises_and_never_goes_back(headers: list[tuple[bytes, bytes]]) -> None:
    wait = retry_after_s(headers, 1_790_000_000.0)
    assert wait is None or 0 <= wait < float("inf")


TEXTS = st.text(max_size=6) | st.sampled_from(
    ["a", "", '"', "\\", "\\u0041", "\n", "é", "\ud83d", '","content":"x', "}]}"]
)
EXTRA = st.sampled_from(
    [
        *[""] * 8,
        *(',"usage":{"prompt_tokens":1,"completion_tokens":2}', ',"error":{"message":"m"}', ',"x":{"content":"a"}'),
    ]
)
IN_CHOICE = st.sampled_from(
    [*[""] * 8, ',"finish_reason":"stop"', ',"logprobs":{"content":[]}', ',"token_ids":[1]', ',"finish_reason":null']
)
IN_DELTA = st.sampled_from(
    [*[""] * 8, ',"role":"assistant"', ',"tool_calls":[{"index":0}]', ',"reasoning":"r"', ',"content":"b"']
)


@st.composite
def token_events(draw: st.DrawFn) -> bytes:
    content = json.dumps(draw(TEXTS), ensure_ascii=draw(st.booleans()))
    colon = draw(st.sampled_from([*[":"] * 9, ": "]))
    delta = f'{{"content"{colon}{content}{draw(IN_DELTA)}}}'
    choice = f'{{"index":{draw(st.sampled_from([0, 0, 0, 1]))},"delta":{delta}{draw(IN_CHOICE)}}}'
    number = draw(st.sampled_from([1, 1, 1, 2]))
    named = draw(st.sampled_from([*[""] * 9, "event: error\n"]))
    return f'{named}data: {{"id":{number},"choices":[{choice}]{draw(EXTRA)}}}\n\n'.encode("utf-8", "surrogatepass")


@FUZZ
@given(st.lists(token_events(), max_size=12))
def test_a_stream_of_like_tokens_tells_what_its_events_tell_alone(events: list[bytes]) -> None:
    whole = StreamReader(Api.CHAT)
    alone = []
    for event in events:
        reader = StreamReader(Api.CHAT)
        reader.feed(event)
        before = whole.tokens
        whole.feed(event)
        alone.append(reader)
        assert whole.tokens - before == reader.tokens, event
        # A silent token leaves it as it was.
        silent = b'"token_ids"' in event or b'"logprobs"' in event
        assert not reader.tokens or silent or whole.tool_call == reader.tool_call, event
    assert whole.events == sum(reader.events for reader in alone)
    assert whole.malformed == sum(reader.malformed for reader in alone)
    assert whole.error == next((reader.error for reader in alone if reader.error is not None), None)
    reasons = [reader.finish_reason for reader in alone if reader.finish_reason]
    assert whole.finish_reason == (reasons[-1] if reasons else None)
