"""The other two engines as simulated ones: Triton's generate extension and DeepSpeed-MII's OpenAI front.

As vLLM's words are in `dialect`, theirs follow recordings of the real ones: Triton names no end and lies with its
status, MII leaves half of a chunk out, tells no usage in a stream and words errors flat. Both end an answer at the
engine's own length, or where the request's limit is: a limit of thousands is only a ceiling to them.
"""

import msgspec

from sidecar.demo.dialect import DONE, Ask, Spec, quoted, text_of, token_text

_TRITON = b"/v2/models/"
_STREAM = b"/generate_stream"


class _TritonBody(msgspec.Struct):
    text_input: str
    id: str = ""
    max_tokens: int | None = None


_read_triton = msgspec.json.Decoder(_TritonBody).decode


class Generate:
    """`/v2/models/M/generate_stream`: its end is the body's."""

    __slots__ = ("_before", "_model", "_spec")

    done = b""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._model = quoted(spec.model)
        # The reason is told on every event, as the vLLM backend does where it is asked for.
        self._before = (
            b'data: {"finish_reason":"None","model_name":%b,"model_version":"1","text_output":"' % self._model
        )

    def opening(self) -> bytes:
        return b""

    def token(self, index: int) -> bytes:
        return b'%b%b"}\n\n' % (self._before, token_text(index))

    def closing(self) -> bytes:
        return b'data: {"finish_reason":%b,"model_name":%b,"model_version":"1","text_output":""}\n\n' % (
            quoted(self._spec.finish_reason),
            self._model,
        )

    def plain(self) -> bytes:
        return b'{"model_name":%b,"model_version":"1","text_output":"%b"}' % (self._model, text_of(self._spec.tokens))

    @staticmethod
    def error(status: int, message: str, kind: str = "", code: int | str | None = None, param: str = "null") -> bytes:
        """Triton names neither type nor code."""
        return b'{"error":%b}' % quoted(message)


class _Mii:
    """What MII's two APIs share: chunks without `object` and `created`, no usage in a stream."""

    __slots__ = ("_before", "_spec")

    done = b""

    def __init__(self, spec: Spec, prefix: str) -> None:
        self._spec = spec
        self._before = b'"id":%b,"model":%b,"choices":[{"index":0,' % (
            quoted(prefix + spec.request_id),
            quoted(spec.model),
        )

    @staticmethod
    def error(status: int, message: str, kind: str = "", code: int | str | None = None, param: str = "null") -> bytes:
        """Flat, and with a code of MII's own: the status is a part of it."""
        if not isinstance(code, int):
            code = 40301 if status == 404 else 50001 if status >= 500 else 40001
        return b'{"object":"error","message":%b,"code":%d}' % (quoted(message), code)

    def _whole(self, kind: bytes, answer: bytes) -> bytes:
        spec = self._spec
        return (
            b'{%b%b,"finish_reason":%b}],"object":"%b","usage":{"prompt_tokens":%d,"total_tokens":%d,'
            b'"completion_tokens":%d}}'
            % (
                self._before,
                answer,
                quoted(spec.finish_reason),
                kind,
                spec.prompt_tokens,
                spec.prompt_tokens + spec.tokens,
                spec.tokens,
            )
        )


class MiiChat(_Mii):
    """`/v1/chat/completions`."""

    __slots__ = ()

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec, "chatcmpl-")

    def opening(self) -> bytes:
        return b'data: {%b"delta":{"role":"assistant"},"finish_reason":null}]}\n\n' % self._before

    def token(self, index: int) -> bytes:
        return b'data: {%b"delta":{"content":"%b"},"finish_reason":null}]}\n\n' % (self._before, token_text(index))

    def closing(self) -> bytes:
        reason = quoted(self._spec.finish_reason)
        return b'data: {%b"delta":{"content":""},"finish_reason":%b}]}\n\n%b' % (self._before, reason, DONE)

    def plain(self) -> bytes:
        text = text_of(self._spec.tokens)
        return self._whole(b"chat.completion", b'"message":{"role":"assistant","content":"%b"}' % text)


class MiiText(_Mii):
    """`/v1/completions`."""

    __slots__ = ()

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec, "cmpl-")

    def opening(self) -> bytes:
        return b""

    def token(self, index: int) -> bytes:
        return b'data: {%b"text":"%b","logprobs":null,"finish_reason":null}]}\n\n' % (self._before, token_text(index))

    def closing(self) -> bytes:
        reason = quoted(self._spec.finish_reason)
        return b'data: {%b"text":"","logprobs":null,"finish_reason":%b}]}\n\n%b' % (self._before, reason, DONE)

    def plain(self) -> bytes:
        return self._whole(b"text_completion", b'"text":"%b","logprobs":null' % text_of(self._spec.tokens))


OtherShape = type[Generate] | type[MiiChat] | type[MiiText]

MII_SHAPES: dict[bytes, OtherShape] = {
    b"/v1/chat/completions": MiiChat,
    b"/v1/completions": MiiText,
}


def triton_model(path: bytes) -> str | None:
    """The model of a `generate_stream` path; None for any other path."""
    if not (path.startswith(_TRITON) and path.endswith(_STREAM)):
        return None
    return path[len(_TRITON) : -len(_STREAM)].decode("latin-1")


def triton_ask(model: str, body: bytes) -> tuple[Ask, str]:
    """What a generate request asks, and its id. Raises `msgspec.MsgspecError`."""
    asked = _read_triton(body)
    return Ask(model=model, stream=True, max_tokens=asked.max_tokens), asked.id


def triton_unknown(model: str) -> str:
    """What Triton says of a model that it does not have; its status alone could be another server's."""
    return f"Request for unknown model: '{model}' is not found"


def triton_page(path: bytes, models: tuple[str, ...]) -> bytes | None:
    """What Triton's pages say, all well; None where it has no such page."""
    if path in (b"/v2/health/ready", b"/v2/health/live"):
        return b""
    if path == b"/v2/repository/index":
        return b"[%b]" % b",".join(b'{"name":%b,"version":"1","state":"READY"}' % quoted(model) for model in models)
    known = [f"/v2/models/{model}/ready".encode() for model in models]
    return b"" if path in known else None
