r"""Answers in OpenAI's words, as vLLM writes them: what translated engines' answers are made into.

Text goes from the engine's JSON into ours as it was written, quotes, escapes and all, neither decoded nor encoded: that
is cheaper, and an emoji whose halves came in two events, each an escaped half of a surrogate pair, is whole again where
the client joins them. So `text` everywhere is a JSON string with its quotes.
"""

from typing import Final

from msgspec.json import Encoder

from sidecar.wire.call import Api

DONE: Final = b"data: [DONE]\n\n"

_CHAT: Final = Api.CHAT
_encode: Final = Encoder().encode


class Chunks:
    """One answer's way of saying things, as events of a stream or whole. All methods give bytes ready to be sent."""

    __slots__ = ("_after", "_before", "_chat", "_head", "_id")

    def __init__(self, api: Api, request_id: str, created: int, model: str) -> None:
        self._chat = chat = api is _CHAT
        self._id = b'{"id":%b,"object":"' % _quote(("chatcmpl-" if chat else "cmpl-") + request_id)
        kind = b"chat.completion.chunk" if chat else b"text_completion"
        self._head = b'","created":%d,"model":%b,' % (created, _quote(model))
        start = b'data: %b%b%b"choices":[' % (self._id, kind, self._head)
        if chat:
            self._before = start + b'{"index":0,"delta":{"content":'
            self._after = b'},"logprobs":null,"finish_reason":null}]}\n\n'
        else:
            self._before = start + b'{"index":0,"text":'
            self._after = b',"logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'

    def role(self) -> bytes:
        """The chunk that opens a chat's answer; nothing for completions, which have none."""
        if not self._chat:
            return b""
        return self._start() + (
            b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
        )

    def text(self, text: bytes) -> bytes:
        """A chunk of the answer."""
        return self._before + text + self._after

    def finish(self, reason: str) -> bytes:
        """The chunk that ends the answer: `stop`, `length` or another of OpenAI's reasons."""
        said = b'"delta":{"content":""}' if self._chat else b'"text":""'
        return self._start() + b'{"index":0,%b,"logprobs":null,"finish_reason":%b,"stop_reason":null}]}\n\n' % (
            said,
            _quote(reason),
        )

    def usage(self, prompt_tokens: int, completion_tokens: int) -> bytes:
        """The chunk that a client asks for with `stream_options.include_usage`."""
        return self._start() + b"],%b}\n\n" % _usage(prompt_tokens, completion_tokens)

    def whole(self, text: bytes, reason: str, prompt_tokens: int, completion_tokens: int) -> bytes:
        """The whole answer as one JSON body."""
        if self._chat:
            kind = b"chat.completion"
            said = b'"message":{"role":"assistant","content":%b,"refusal":null}' % text
        else:
            kind = b"text_completion"
            said = b'"text":%b' % text
        return b'%b%b%b"choices":[{"index":0,%b,"logprobs":null,"finish_reason":%b,"stop_reason":null}],%b}' % (
            self._id,
            kind,
            self._head,
            said,
            _quote(reason),
            _usage(prompt_tokens, completion_tokens),
        )

    def _start(self) -> bytes:
        kind = b"chat.completion.chunk" if self._chat else b"text_completion"
        return b'data: %b%b%b"choices":[' % (self._id, kind, self._head)


def error_body(status: int, message: str, kind: str) -> bytes:
    """An engine's error as vLLM words it: `{"error":{"message","type","param","code"}}`, `code` being the status."""
    return b'{"error":{"message":%b,"type":%b,"param":null,"code":%d}}' % (_quote(message), _quote(kind), status)


def error_event(status: int, message: str, kind: str) -> bytes:
    """The same as an event of a stream."""
    return b"data: %b\n\n" % error_body(status, message, kind)


def _quote(text: str) -> bytes:
    try:
        return _encode(text)
    except UnicodeEncodeError:
        # Half of a surrogate pair, as JSON may write one and UTF-8 may not.
        return _encode(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def _usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    return b'"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}' % (
        prompt_tokens,
        prompt_tokens + completion_tokens,
        completion_tokens,
    )
