"""The bytes of a vLLM-like OpenAI server, as recorded from a real one, with content that can be checked.

Token `i` of every answer is the text `t<i> `, so that a lost, doubled or swapped chunk shows in the text itself, and
two runs with the same request id are byte-identical. The shapes follow recordings of vLLM 0.32 (head first, role
chunk with the first token, usage in a chunk of its own on request, `[DONE]` only where that API has it).
"""

from functools import lru_cache
from typing import Protocol

import msgspec

CREATED = 1795967837
"""A fixed moment: a clock in the content would make no two answers equal."""

DONE = b"data: [DONE]\n\n"
JSON = b"application/json"
SSE = b"text/event-stream; charset=utf-8"


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class Ask(msgspec.Struct):
    """The fields of a request body that shape the answer; everything else is skipped, as engines do."""

    model: str = ""
    stream: bool | None = False
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    n: int | None = 1
    stream_options: _StreamOptions | None = None

    @property
    def limit(self) -> int | None:
        """Tokens asked for at most; None where the request names no number."""
        for number in (self.max_completion_tokens, self.max_tokens, self.max_output_tokens):
            if number is not None:
                return number
        return None

    @property
    def usage(self) -> bool:
        """True where a stream shall report its usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class Spec(msgspec.Struct, frozen=True):
    """One answer, decided: everything its bytes depend on. `tokens` per choice, `choices` >= 1."""

    model: str
    request_id: str
    tokens: int
    prompt_tokens: int
    finish_reason: str = "stop"
    choices: int = 1
    usage: bool = False
    event_bytes: int = 0


class Shape(Protocol):
    """One API's way of saying an answer: as a stream in three parts, or plain."""

    def opening(self) -> bytes:
        """The events before the first token; empty where the API has none."""

    def token(self, index: int) -> bytes:
        """The events of one token, one event for each choice."""

    def closing(self) -> bytes:
        """The events after the last token, the API's end marker among them."""

    def plain(self) -> bytes:
        """The whole answer as one JSON body."""

    @property
    def done(self) -> bytes:
        """What follows an error in the middle of a stream."""

    @staticmethod
    def error(status: int, message: str, kind: str = "", code: int | str | None = None, param: str = "null") -> bytes:
        """An error in the API's words. `kind` and `code` None or empty: the usual ones for the status."""


@lru_cache(maxsize=256)
def quoted(text: str) -> bytes:
    """The JSON string of `text`, quotes included."""
    return msgspec.json.encode(text)


def text_of(tokens: int, width: int = 0) -> bytes:
    """The text of an answer of that many tokens; `width` as in `token_text`."""
    return _short_text(tokens, width) if tokens <= 256 else _text(tokens, width)


def _text(tokens: int, width: int) -> bytes:
    return b"".join(token_text(index, width) for index in range(tokens))


_short_text = lru_cache(maxsize=256)(_text)
"""Benchmarks ask for the same short answer again and again; their engine shares a core with their load."""


def token_text(index: int, width: int = 0) -> bytes:
    """`t<index> `, filled up with dots to `width` bytes."""
    text = b"t%d " % index
    return text if len(text) >= width else text.ljust(width, b".")


class OpenaiWords:
    """How an OpenAI server tells an error, whichever the API."""

    __slots__ = ()

    done = DONE

    @staticmethod
    def error(status: int, message: str, kind: str = "", code: int | str | None = None, param: str = "null") -> bytes:
        """See `Shape`."""
        return error_body(status, message, kind, code, param)


class _Choices(OpenaiWords):
    """What chat and text completions share: `choices` with an index each, one prefix and suffix for all tokens."""

    __slots__ = ("_after", "_before", "_id", "_spec", "_width")

    def __init__(self, spec: Spec, prefix: str, before: bytes, after: bytes) -> None:
        self._spec = spec
        self._id = quoted(prefix + spec.request_id)
        self._before = tuple(self._chunk(b'{"index":%d,%b' % (index, before)) for index in range(spec.choices))
        self._after = after
        self._width = max(0, spec.event_bytes - len(self._before[0]) - len(after))

    def token(self, index: int) -> bytes:
        text = token_text(index, self._width)
        before = self._before
        if len(before) == 1:
            return b"%b%b%b" % (before[0], text, self._after)
        return b"".join(b"%b%b%b" % (start, text, self._after) for start in before)

    def _chunk(self, choices: bytes) -> bytes:
        raise NotImplementedError

    def _usage(self) -> bytes:
        spec = self._spec
        completion = spec.tokens * spec.choices
        return b'"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}' % (
            spec.prompt_tokens,
            spec.prompt_tokens + completion,
            completion,
        )

    def _ending(self, finish: tuple[bytes, bytes]) -> bytes:
        """The finish chunk of each choice, the usage chunk where asked for, the marker."""
        reason = quoted(self._spec.finish_reason)
        parts = [
            b'%b%b,"finish_reason":%b%b]}\n\n' % (self._chunk(b'{"index":%d,' % index), finish[0], reason, finish[1])
            for index in range(self._spec.choices)
        ]
        if self._spec.usage:
            parts.append(b"%b],%b}\n\n" % (self._chunk(b""), self._usage()))
        parts.append(DONE)
        return b"".join(parts)

    def _body(self, kind: bytes, answer: bytes) -> bytes:
        reason = quoted(self._spec.finish_reason)
        choices = b",".join(
            b'{"index":%d,%b,"logprobs":null,"finish_reason":%b,"stop_reason":null,"token_ids":null}'
            % (index, answer, reason)
            for index in range(self._spec.choices)
        )
        return (
            b'{"id":%b,"object":"%b","created":%d,"model":%b,"choices":[%b],"service_tier":null,%b,"metrics":null}'
            % (self._id, kind, CREATED, quoted(self._spec.model), choices, self._usage())
        )


class Chat(_Choices):
    """`/v1/chat/completions`."""

    __slots__ = ()

    def __init__(self, spec: Spec) -> None:
        super().__init__(
            spec,
            "chatcmpl-",
            b'"delta":{"content":"',
            b'"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n',
        )

    def opening(self) -> bytes:
        return b"".join(
            b'%b,"prompt_token_ids":null,"prompt_text":null}\n\n'
            % self._chunk(
                b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]' % index
            )
            for index in range(self._spec.choices)
        )

    def closing(self) -> bytes:
        return self._ending((b'"delta":{"content":""},"logprobs":null', b',"stop_reason":null,"token_ids":null}'))

    def plain(self) -> bytes:
        text = text_of(self._spec.tokens, self._width)
        return self._body(
            b"chat.completion",
            b'"message":{"role":"assistant","content":"%b","refusal":null,"tool_calls":[],"reasoning":null}' % text,
        )

    def _chunk(self, choices: bytes) -> bytes:
        return b'data: {"id":%b,"object":"chat.completion.chunk","created":%d,"model":%b,"choices":[%b' % (
            self._id,
            CREATED,
            quoted(self._spec.model),
            choices,
        )


class Text(_Choices):
    """`/v1/completions`."""

    __slots__ = ()

    def __init__(self, spec: Spec) -> None:
        super().__init__(
            spec,
            "cmpl-",
            b'"text":"',
            b'","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}\n\n',
        )

    def opening(self) -> bytes:
        return b""

    def closing(self) -> bytes:
        return self._ending((b'"text":"","logprobs":null', b',"stop_reason":null,"token_ids":null}'))

    def plain(self) -> bytes:
        return self._body(b"text_completion", b'"text":"%b"' % text_of(self._spec.tokens, self._width))

    def _chunk(self, choices: bytes) -> bytes:
        return b'data: {"id":%b,"object":"text_completion","created":%d,"model":%b,"choices":[%b' % (
            self._id,
            CREATED,
            quoted(self._spec.model),
            choices,
        )


class Messages(OpenaiWords):
    """`/v1/messages`: named events, its end is `message_stop`, and there is no `[DONE]`."""

    __slots__ = ("_spec",)

    def __init__(self, spec: Spec) -> None:
        self._spec = spec

    def opening(self) -> bytes:
        spec = self._spec
        return _named(
            b"message_start",
            b'"message":{"id":%b,"type":"message","role":"assistant","content":[],"model":%b,"stop_reason":null,'
            b'"stop_sequence":null,"usage":{"input_tokens":%d,"output_tokens":0}}'
            % (quoted("msg_" + spec.request_id), quoted(spec.model), spec.prompt_tokens),
        ) + _named(b"content_block_start", b'"content_block":{"type":"text","text":""},"index":0')

    def token(self, index: int) -> bytes:
        return _named(
            b"content_block_delta", b'"delta":{"type":"text_delta","text":"%b"},"index":0' % token_text(index)
        )

    def closing(self) -> bytes:
        spec = self._spec
        return (
            _named(b"content_block_stop", b'"index":0')
            + _named(
                b"message_delta",
                b'"delta":{"stop_reason":%b,"stop_sequence":null},"usage":{"input_tokens":%d,"output_tokens":%d}'
                % (self._reason(), spec.prompt_tokens, spec.tokens),
            )
            + b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
        )

    def plain(self) -> bytes:
        spec = self._spec
        return (
            b'{"id":%b,"type":"message","role":"assistant","content":[{"type":"text","text":"%b"}],"model":%b,'
            b'"stop_reason":%b,"usage":{"input_tokens":%d,"output_tokens":%d}}'
            % (
                quoted("msg_" + spec.request_id),
                text_of(spec.tokens),
                quoted(spec.model),
                self._reason(),
                spec.prompt_tokens,
                spec.tokens,
            )
        )

    def _reason(self) -> bytes:
        return b'"max_tokens"' if self._spec.finish_reason == "length" else b'"end_turn"'


class Responses(OpenaiWords):
    """`/v1/responses`: named, numbered events; its end is `response.completed`, and there is no `[DONE]`."""

    __slots__ = ("_spec",)

    def __init__(self, spec: Spec) -> None:
        self._spec = spec

    def opening(self) -> bytes:
        return self._event(b"response.created", 0, b'"response":%b' % self._response(b"in_progress")) + self._event(
            b"response.in_progress", 1, b'"response":%b' % self._response(b"in_progress")
        )

    def token(self, index: int) -> bytes:
        return self._event(
            b"response.output_text.delta",
            index + 2,
            b'"content_index":0,"delta":"%b","item_id":"msg_0","logprobs":[],"output_index":0' % token_text(index),
        )

    def closing(self) -> bytes:
        tokens = self._spec.tokens
        status = self._status()
        return self._event(
            b"response.output_text.done",
            tokens + 2,
            b'"content_index":0,"item_id":"msg_0","output_index":0,"text":"%b"' % text_of(tokens),
        ) + self._event(b"response." + status, tokens + 3, b'"response":%b' % self._response(status))

    def plain(self) -> bytes:
        return self._response(self._status())

    def _status(self) -> bytes:
        return b"incomplete" if self._spec.finish_reason == "length" else b"completed"

    def _response(self, status: bytes) -> bytes:
        spec = self._spec
        output = usage = b""
        if status != b"in_progress":
            output = (
                b'{"id":"msg_0","content":[{"annotations":[],"text":"%b","type":"output_text"}],"role":"assistant",'
                b'"status":"completed","type":"message"}' % text_of(spec.tokens)
            )
            usage = b',"usage":{"input_tokens":%d,"output_tokens":%d,"total_tokens":%d}' % (
                spec.prompt_tokens,
                spec.tokens,
                spec.prompt_tokens + spec.tokens,
            )
        return b'{"id":%b,"object":"response","created_at":%d,"model":%b,"status":"%b","output":[%b]%b}' % (
            quoted("resp_" + spec.request_id),
            CREATED,
            quoted(spec.model),
            status,
            output,
            usage,
        )

    def _event(self, kind: bytes, number: int, fields: bytes) -> bytes:
        return b'event: %b\ndata: {%b,"sequence_number":%d,"type":"%b"}\n\n' % (kind, fields, number, kind)


def _named(kind: bytes, fields: bytes) -> bytes:
    return b'event: %b\ndata: {"type":"%b",%b}\n\n' % (kind, kind, fields)


class Embeddings(OpenaiWords):
    """`/v1/embeddings`: plain only."""

    __slots__ = ("_spec",)

    def __init__(self, spec: Spec) -> None:
        self._spec = spec

    def opening(self) -> bytes:
        return b""

    def token(self, index: int) -> bytes:
        return b""

    def closing(self) -> bytes:
        return b""

    def plain(self) -> bytes:
        spec = self._spec
        return (
            b'{"id":%b,"object":"list","created":%d,"model":%b,"data":[{"index":0,"object":"embedding",'
            b'"embedding":[0.25,-0.5,0.125]}],"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":0}}'
            % (
                quoted("embd-" + spec.request_id),
                CREATED,
                quoted(spec.model),
                spec.prompt_tokens,
                spec.prompt_tokens,
            )
        )


VllmShape = type[Chat] | type[Text] | type[Messages] | type[Responses] | type[Embeddings]

SHAPES: dict[bytes, VllmShape] = {
    b"/v1/chat/completions": Chat,
    b"/v1/completions": Text,
    b"/v1/messages": Messages,
    b"/v1/responses": Responses,
    b"/v1/embeddings": Embeddings,
}


def whole_stream(shape: Shape, tokens: int) -> bytes:
    """Every byte of a streamed answer's body, without its chunked framing: what a client must receive."""
    return shape.opening() + b"".join(shape.token(index) for index in range(tokens)) + shape.closing()


def error_body(status: int, message: str, kind: str = "", code: int | str | None = None, param: str = "null") -> bytes:
    """An error in OpenAI's shape. `kind` empty: the word vLLM uses for that status."""
    word = kind or ERROR_TYPES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return b'{"error":{"message":%b,"type":%b,"param":%b,"code":%b}}' % (
        quoted(message),
        quoted(word),
        param.encode(),
        msgspec.json.encode(status if code is None else code),
    )


ERROR_TYPES = {404: "NotFoundError", 429: "RateLimitError", 503: "Service Unavailable"}
