"""What a stream has told so far: tokens, end marker, finish reason, in-band error, usage; per API.

It looks at a copy of the bytes on their way and changes none. A token-bearing event is one that carries something
generated; comments, the role-only first chunk and empty deltas are none (some gateways send empty deltas as a
heartbeat), except an empty delta with logprobs or token ids: a token whose text waits for its next half.

One typed decode per event: a chunk is recognised by its API's shape, not by searching for words in it. The tokens of
one stream differ in their text alone, though, and decoding is half of what a chunk costs us: what stands before and
behind the text of a decoded token is kept, and an event of the same bytes around another plain text is the same event
with that text. What does not decode is looked at again by Python's lenient reader (NaN, lone surrogates: Python's
engines write both) before it counts as malformed. An error wins over every later end marker: engines end broken streams
with `[DONE]`, too.
"""

from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from sidecar.wire.answer import AnswerError, Usage, error_from, error_in, read_error, reason_of, usage_of, word_of
from sidecar.wire.call import Api
from sidecar.wire.lenient import python_json, read_as
from sidecar.wire.shapes import (
    Choice,
    Chunk,
    Index,
    MessageEvent,
    OtherEvent,
    Response,
    ResponseEvent,
    decode_chunk,
    decode_message,
    decode_other,
    decode_response,
)
from sidecar.wire.sse import LIMIT_BYTES, SseReader

_MAX_CHOICES: Final = 4096
"""Choice indexes followed per stream: far above any `n`, and a bound on what a broken engine can make us hold."""


_UNREADABLE: Final = (msgspec.DecodeError, RecursionError)

_Shape = TypeVar("_Shape", bound=msgspec.Struct)


class StreamReader:
    """Reads one answer's event stream.

    `tokens`: token-bearing events. `chars`: of their texts, since a stream need not tell its usage, and mostly tells it
    at its end; an event may have the text of several tokens (speculation, an engine's stream interval, a client that
    reads slowly). `events`: readable ones, `[DONE]` and blanks not counted; zero at the end is an
    answer of nothing. `terminal`: the API's end marker came. `finish_reason`: the last one told. `error`: the first
    in-band error. `steps`: chat deltas that name no role and carry nothing: an engine's step whose token has no text
    (a special token). `tool_call`: what came last belongs to a tool call, so the next gap may be longer.
    """

    __slots__ = (
        "_after",
        "_api",
        "_before",
        "_finished",
        "_last_index",
        "_lessons",
        "_malformed",
        "_see",
        "_seen",
        "_sse",
        "_usage",
        "_usage_body",
        "chars",
        "error",
        "events",
        "finish_reason",
        "steps",
        "terminal",
        "tokens",
        "tool_call",
    )

    def __init__(self, api: Api, limit: int = LIMIT_BYTES) -> None:
        self.tokens = 0
        self.chars = 0
        self.steps = 0
        self.events = 0
        self._malformed = 0
        self.terminal = False
        self.tool_call = False
        self.finish_reason: str | None = None
        self.error: AnswerError | None = None
        self._api = api
        # What stands around the text of a plain token, once one was decoded; and how often that was worked out in vain.
        self._before = b""
        self._after = b""
        self._lessons = 0
        self._see = _SEE[api]
        self._sse = SseReader(limit)
        self._seen: set[Index] | None = None
        self._finished: set[Index] | None = None
        self._last_index: Index = -1
        self._usage: Usage | None = None
        self._usage_body: object = None

    def feed(self, data: bytes) -> bool:
        """Reads on; true if `data` completed a token-bearing event or, once there was one, a step. Never raises.

        Before the first token a step proves nothing: some fronts send empty deltas while the request still queues.
        """
        tokens, steps = self.tokens, self.steps
        for kind, payload in self._sse.feed(data):
            self.events += 1
            self._see(self, kind, payload)
        return self.tokens != tokens or (tokens != 0 and self.steps != steps)

    @property
    def malformed(self) -> int:
        """Events that are not their API's JSON, and those too long to be read."""
        return self._malformed + self._sse.oversized

    @property
    def comments(self) -> int:
        """Comment lines: an engine's or gateway's keep-alive."""
        return self._sse.comments

    @property
    def pending(self) -> bool:
        """Whether the bytes so far end within an event."""
        return self._sse.pending

    @property
    def usage(self) -> Usage | None:
        """The last usage told; what one event leaves out stays as an earlier one said."""
        if self._usage_body is not None:
            self._usage = usage_of(self._usage_body, self._usage)
            self._usage_body = None
        return self._usage

    @property
    def complete(self) -> bool:
        """Whether, if the body ended here and ended cleanly, the answer would be whole.

        True after the API's end marker; also without it once every choice seen has its finish reason and no event is
        cut in two (engines without a marker exist). Never true after an error, nor where the marker came alone.
        """
        if self.error is not None:
            return False
        if self.terminal:
            return self.events > 0
        if self._sse.pending and self._sse.tail.strip() != b"[DONE]":
            return False
        if self._api is Api.OTHER or self._api is Api.EMBEDDINGS:
            return self.events > 0
        if self._api is Api.RESPONSES and self._sse.oversized:
            # The end marker repeats the whole answer; one too long to be read is no proof that it did not come.
            return True
        if self._seen is not None:
            return self._finished is not None and self._seen <= self._finished
        return self.finish_reason is not None


def _see_chunk(reader: StreamReader, kind: bytes, data: bytes) -> None:
    before = reader._before
    if before and not kind and data.startswith(before) and data.endswith(reader._after):
        text = data[len(before) : len(data) - len(reader._after)]
        if text and b'"' not in text and b"\\" not in text and text.isascii():
            reader.tokens += 1
            reader.chars += len(text)
            reader.tool_call = False
            reader._lessons = 0
            return
    try:
        chunk = decode_chunk(data)
    except _UNREADABLE:
        lenient = _look_again(reader, kind, data, Chunk)
        if lenient is None:
            return
        chunk = lenient
    choices = chunk.choices
    if chunk.error or kind == b"error" or choices is None:
        _unusual(reader, kind, data, told=choices is not None or chunk.usage is not None)
        if choices is None:
            choices = []
    if chunk.usage is not None:
        reader._usage_body = chunk.usage
    token = False
    for choice in choices:
        if choice.index != reader._last_index:
            _turn_to(reader, choice.index)
        delta = choice.delta
        if delta is not None:
            if delta.tool_calls or delta.function_call:
                token = True
                reader.tool_call = True
                reader.chars += _arguments_of(delta.tool_calls)
            elif delta.content or delta.reasoning_content or delta.reasoning or delta.refusal or delta.audio:
                token = True
                reader.tool_call = False
                said = delta.content or delta.reasoning_content or delta.reasoning
                if isinstance(said, str):
                    reader.chars += len(said)
            elif choice.logprobs is not None or choice.token_ids:
                token = token or _is_silent_token(choice)
            elif delta.role is None:
                reader.steps += 1
        elif choice.text:
            token = True
            if isinstance(choice.text, str):
                reader.chars += len(choice.text)
        elif choice.logprobs is not None or choice.token_ids:
            token = token or _is_silent_token(choice)
        if choice.finish_reason:
            _finish(reader, choice)
    if token:
        reader.tokens += 1
        if not kind and reader._lessons < _MAX_LESSONS and len(choices) == 1:
            _learn(reader, chunk, choices[0], data)


def _learn(reader: StreamReader, chunk: Chunk, choice: Choice, data: bytes) -> None:
    """Keep what stands around a token's text, if the event says nothing else."""
    reader._lessons += 1
    reader._before = b""
    if reader._lessons == _MAX_LESSONS:
        return
    delta = choice.delta
    content = delta.content if delta is not None else None
    if delta is None or not isinstance(content, str) or not content.isascii() or "\\" in content or '"' in content:
        return
    if chunk.usage is not None or chunk.error or choice.finish_reason:
        return
    if delta.role or delta.reasoning_content or delta.reasoning or delta.refusal or delta.audio:
        return
    if delta.tool_calls or delta.function_call or choice.logprobs is not None or choice.token_ids:
        return
    start = data.find(_CONTENT)
    begin = start + len(_CONTENT)
    end = begin + len(content)
    if (
        start < 0
        or data[begin:end] != content.encode()
        or data[end : end + 1] != b'"'
        or data.count(b'"content":') != 1
    ):
        return
    reader._before = data[:begin]
    reader._after = data[end:]


_CONTENT: Final = b'"content":"'
_MAX_LESSONS: Final = 8
"""Tokens in a row around which nothing stayed the same; such a stream is decoded event by event."""


def _length_of(text: object) -> int:
    return len(text) if isinstance(text, str) else 0


def _arguments_of(tool_calls: object) -> int:
    """Characters of the calls' arguments: some engines send them whole, once they could be read."""
    chars = 0
    if isinstance(tool_calls, list):
        for each in tool_calls:
            function = each.get("function") if isinstance(each, dict) else None
            arguments = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(arguments, str):
                chars += len(arguments)
    return chars


def _turn_to(reader: StreamReader, index: Index) -> None:
    reader._last_index = index
    if reader._seen is None:
        reader._seen = {index}
    elif len(reader._seen) < _MAX_CHOICES:
        reader._seen.add(index)


def _is_silent_token(choice: Choice) -> bool:
    logprobs = choice.logprobs
    if isinstance(logprobs, dict):
        logprobs = logprobs.get("content") or logprobs.get("tokens")
    return bool(choice.token_ids or logprobs)


def _finish(reader: StreamReader, choice: Choice) -> None:
    reader.finish_reason = word_of(choice.finish_reason) or "unknown"
    if reader._finished is None:
        reader._finished = {choice.index}
    elif len(reader._finished) < _MAX_CHOICES:
        reader._finished.add(choice.index)
    if choice.finish_reason == "error" and reader.error is None:
        reader.error = AnswerError("the engine finished with finish_reason error", "error")


def _see_response(reader: StreamReader, kind: bytes, data: bytes) -> None:
    try:
        event = decode_response(data)
    except _UNREADABLE:
        lenient = _look_again(reader, kind, data, ResponseEvent)
        if lenient is None:
            return
        event = lenient
    name = event.type or kind.decode("ascii", "replace")
    if name[-6:] == ".delta":
        if event.delta:
            reader.tokens += 1
            reader.chars += _length_of(event.delta)
            reader.tool_call = "_call" in name
        return
    response = event.response
    if name in _RESPONSE_ENDS:
        reader.terminal = True
        if response is not None:
            _end_response(reader, name, response)
        if name == "response.failed" and reader.error is None:
            reader.error = AnswerError("the response failed", "response.failed")
    elif name == "error" or event.error or not name:
        _unusual(reader, b"error" if name == "error" else kind, data, told=False)
    elif name == "response.output_item.added" and event.item is not None:
        reader.tool_call = event.item.type[-5:] == "_call"


_RESPONSE_ENDS: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})


def _end_response(reader: StreamReader, name: str, response: Response) -> None:
    if response.usage is not None:
        reader._usage_body = response.usage
    reader.finish_reason = (
        reason_of(response.incomplete_details) or word_of(response.status) or name[len("response.") :]
    )
    if response.error and reader.error is None:
        reader.error = error_from(response.error)


def _see_message(reader: StreamReader, kind: bytes, data: bytes) -> None:
    try:
        event = decode_message(data)
    except _UNREADABLE:
        lenient = _look_again(reader, kind, data, MessageEvent)
        if lenient is None:
            return
        event = lenient
    name = event.type or kind.decode("ascii", "replace")
    delta = event.delta
    if name == "content_block_delta":
        if delta is None:
            _malformed(reader)
        elif delta.partial_json:
            reader.tokens += 1
            reader.chars += _length_of(delta.partial_json)
            reader.tool_call = True
        elif delta.text or delta.thinking or delta.signature or delta.citation:
            reader.tokens += 1
            reader.chars += _length_of(delta.text or delta.thinking)
            reader.tool_call = False
    elif name == "content_block_start":
        block = event.content_block
        if block is not None:
            reader.tool_call = block.type[-8:] == "tool_use"
            if block.text:
                reader.tokens += 1
    elif name == "message_delta":
        _note_usage(reader, event.usage)
        if delta is not None and delta.stop_reason:
            reader.finish_reason = word_of(delta.stop_reason) or "unknown"
    elif name == "message_stop":
        reader.terminal = True
    elif name == "message_start":
        _note_usage(reader, event.message.usage if event.message is not None else None)
    elif name == "error" or event.error or not name:
        _unusual(reader, b"error" if name == "error" else kind, data, told=False)


def _note_usage(reader: StreamReader, body: object) -> None:
    # Input tokens come in the first event, output tokens in a later one.
    reader._usage = usage_of(body, reader._usage)


def _see_other(reader: StreamReader, kind: bytes, data: bytes) -> None:
    try:
        event = decode_other(data)
    except _UNREADABLE:
        lenient = _look_again(reader, kind, data, OtherEvent)
        if lenient is None:
            return
        event = lenient
    if event.error or event.kind == "error" or event.type == "error" or kind == b"error":
        _unusual(reader, kind, data, told=False)
    else:
        reader.tokens += 1
        usage = event.usage or event.meta_info
        if usage is not None:
            reader._usage_body = usage


_See = Callable[[StreamReader, bytes, bytes], None]

# Functions, not bound methods: a reader that held its own method would be a cycle for the collector, one per request.
_SEE: dict[Api, _See] = {
    Api.CHAT: _see_chunk,
    Api.COMPLETIONS: _see_chunk,
    Api.RESPONSES: _see_response,
    Api.MESSAGES: _see_message,
    Api.EMBEDDINGS: _see_other,
    Api.OTHER: _see_other,
}

_MARKED: Final = frozenset({Api.CHAT, Api.COMPLETIONS, Api.EMBEDDINGS, Api.OTHER})
"""APIs whose end marker is `[DONE]`; behind another API's marker it is an ornament."""


def _look_again(reader: StreamReader, kind: bytes, data: bytes, shape: type[_Shape]) -> _Shape | None:
    """What the fast reader refused: the end marker, a blank event, Python's JSON, or malformed (counted)."""
    text = data.strip()
    if not text or text.startswith(b"[DONE]"):
        reader.events -= 1
        if text and reader._api in _MARKED:
            reader.terminal = True
        return None
    try:
        return read_as(text, shape)
    except (ValueError, RecursionError):
        _unusual(reader, kind, data, told=False)
        return None


def _unusual(reader: StreamReader, kind: bytes, data: bytes, *, told: bool) -> None:
    """An event that is an error, or else (unless it `told` something of its API) malformed."""
    error: AnswerError | None = None
    if kind == b"error":
        error = read_error(data) or AnswerError("", "error")
    else:
        try:
            parsed = python_json(data)
        except (ValueError, RecursionError):
            parsed = None
        if isinstance(parsed, dict):
            error = error_in(parsed, soft=not told)
    if error is not None:
        if reader.error is None:
            reader.error = error
    elif not told:
        _malformed(reader)


def _malformed(reader: StreamReader) -> None:
    reader._malformed += 1
    reader.events -= 1
