"""Triton's generate extension: how a model is asked for text over HTTP, and what comes back.

What a body holds is the model's own: inputs that it has become tensors, all else request parameters. So the same wish
stands there in the words of each backend (`sampling_parameters` of the vLLM backend, `stop_words` of TensorRT-LLM's
ensemble, plain names for Python models), and a model takes what it knows.

1. Always `generate_stream`, also for a client that does not stream: a disconnect is noticed at the next write, and
   `generate` writes once (server#7077). Besides, it answers a model of several responses with an error under 200.
2. Parameters must be scalars: a list or null is refused. One stop string goes by every name; several go in
   `sampling_parameters` alone, which is JSON in a string.
3. A stream ends by its framing, without a marker. If the model tells finish reasons, none told is no good end. If it
   tells none, an end after as many tokens as were allowed is "length", any other "stop". No text at all, not even an
   empty one, is no answer.
4. The status tells no fault: a queue's timeout, an exception and a dead process are 400, a wrong type is 500, and an
   error after the first token is 200. The text decides, by a table; what it does not name is the engine's fault.
   Values are checked before they are sent, so that a client's are hardly ever what a model chokes on (`sampling`).
5. A request that the model cannot read (JSON, types, shapes, a missing input) is ours, not the client's, who sent
   another one: the model is none for text, or not as we know it. Somebody else may serve the client; that is a 500.
6. A model that the client named and Triton does not know is a 404. One that the policy named (`engine_model`) should be
   there, as should one of which it has no version ready just now: 503, and another endpoint is asked.

Sources, of triton-inference-server: docs/protocol/extension_generate.md and src/http_server.cc of server,
src/utils/request.py of vllm_backend, docs/model_config.md of tensorrtllm_backend.
"""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final
from urllib.parse import quote

import msgspec
from msgspec.json import Encoder

from sidecar.adapters.ask import VLLM_OWN, Ask, is_set
from sidecar.adapters.dialect import Outgoing
from sidecar.adapters.reading import Reading, without_paths
from sidecar.adapters.sampling import numbers_of, stops_of
from sidecar.adapters.shapes import TritonEvent, decode_texts, decode_triton_event
from sidecar.kernel.errors import Reason, SidecarError
from sidecar.wire.answer import error_from, read_error
from sidecar.wire.call import Api
from sidecar.wire.lenient import python_json, read_as

COMPLETION_TOKENS: Final = 16
"""Of a completion that names no ceiling, as OpenAI and vLLM have it."""

CHAT_TOKENS: Final = 4096
"""Of a chat that names none. OpenAI's API means as many as fit, which nobody here can be told: the vLLM backend would
stop after 16, TensorRT-LLM wants a number. vLLM and TensorRT-LLM cut what is more than their context holds."""

_ONE_TEXT: Final = "generate answers with one text"

LACKS: Final[Mapping[str, str]] = MappingProxyType(
    {
        **VLLM_OWN,
        "n": _ONE_TEXT,
        "best_of": _ONE_TEXT,
        "tools": "a tool call is not told from text",
        "logprobs": "backends tell them each in its own way",
        "response_format": "it is not passed on to the model",
        "structured_outputs": "they are not passed on to the model",
        "logit_bias": "it is not passed on to the model",
        "modalities": _ONE_TEXT,
        "echo": "the prompt is left out of the answer",
        "suffix": "text is only ever continued",
        "prompt": "it takes one prompt, in text",
        "content": "it takes text alone",
        "responses": "it has no Responses API",
        "messages": "it has no Messages API",
        "embeddings": "it has no embeddings API",
        "other": "it has none of vLLM's other paths",
        "generate": "it has no such path",
    }
)

_encode: Final = Encoder().encode

_DOTS: Final = frozenset({".", ".."})

_SEGMENT: Final = "!$&'()*+,;=:@"
"""What RFC 3986 lets stand in a segment besides letters, digits and `-._~`."""

_QUOTE: Final = ord('"')
_BRACKET: Final = ord("[")

Fault = tuple[int, str]
"""HTTP status and error type."""

_FAILED: Final[Fault] = (500, "InternalServerError")
_AWAY: Final[Fault] = (503, "ServiceUnavailableError")
_FULL: Final[Fault] = (503, "OverloadedError")
_UNKNOWN: Final[Fault] = (404, "NotFoundError")
_TOO_LARGE: Final[Fault] = (413, "RequestTooLargeError")
_TOO_LONG: Final[Fault] = (400, "context_length_exceeded")
_REFUSED: Final[Fault] = (400, "BadRequestError")

SERVER_SAYS: Final[tuple[tuple[str, Fault], ...]] = (
    ("exceeds maximum queue size", _FULL),
    # It waited longer than the queue's policy lets it: Triton counts that as rejected, and so do we.
    ("request timeout expired", _FULL),
    ("has no available versions", _AWAY),  # unloading, or its load failed
    ("is not at ready state", _AWAY),  # the same, of one version (server#6939)
    ("server is stopping", _AWAY),
    ("unhealthy vllm engine", _AWAY),
    ("request json size", _TOO_LARGE),
    ("is not healthy", _FAILED),  # "Stub process 'm_0_0' is not healthy.": the Python backend's process is dead
    ("request for unknown model", _UNKNOWN),
)
"""What the server says in its own name, in the order of looking; small letters."""

MODEL_SAYS: Final[tuple[tuple[str, Fault], ...]] = (
    ("maximum model length", _TOO_LONG),  # vLLM
    ("max_model_len", _TOO_LONG),
    ("exceeds maximum input length", _TOO_LONG),  # TensorRT-LLM
    ("exceeds maximum sequence length", _TOO_LONG),
    ("context length", _TOO_LONG),
    ("exceed the context", _TOO_LONG),
    ("prompt is too long", _TOO_LONG),
    ("input is too long", _TOO_LONG),
    # The vLLM backend where vLLM refuses a sampling parameter; which one stands in its log alone.
    ("has no attribute 'lora_name'", _REFUSED),
)
"""What a model says of a request that it cannot serve, whoever else could; small letters."""

_IN_MODELS_NAME: Final = ("failed to process the request", "error generating stream")
"""How the Python and the vLLM backend begin what a model raised. The rest may quote the prompt, which shall not be
taken for the server's word."""

_NO_PATH: Final = frozenset({404, 405})

_OTHER_SERVER: Final = "Triton has no such path here: it is another server, or front, than the policy says"

_KEPT: Final = frozenset({401, 403, 429})
"""Statuses of a gateway or of restricted endpoints, that mean what they say."""

_REASONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "eos": "stop",
        "eos_token": "stop",
        "end_id": "stop",
        "stop_words": "stop",
        "stop_sequence": "stop",
        "max_tokens": "length",
        "cancelled": "abort",
    }
)
"""Finish reasons of others than vLLM."""

_UNFINISHED: Final = frozenset({"", "none", "null", "not_finished"})


class TritonGenerate:
    """The translator for Triton's own HTTP server."""

    __slots__ = ()

    name = "Triton's generate API"
    lacks = LACKS
    applies_template = False

    def outgoing(self, ask: Ask) -> Outgoing:
        """`generate_stream` of the model, which is `name` or `name/versions/version`."""
        numbers: dict[str, int | float] = {"max_tokens": default_tokens(ask)}
        numbers.update(numbers_of(ask))
        stops = stops_of(ask)
        sampling: dict[str, object] = dict(numbers)
        plain: dict[str, object] = dict(numbers)
        if stops:
            sampling["stop"] = stops
        if is_set(ask.body.ignore_eos):
            sampling["ignore_eos"] = plain["ignore_eos"] = True
        if len(stops) == 1:
            plain["stop"] = plain["stop_words"] = stops[0]
        if numbers.get("seed", -1) >= 0:
            plain["random_seed"] = numbers["seed"]
        if "min_tokens" in numbers:
            plain["min_length"] = numbers["min_tokens"]
        if numbers.get("top_k", 1) < 1:
            del plain["top_k"]  # "all of them", which only vLLM writes so
        plain["id"] = ask.request_id
        plain["text_input"] = ask.prompt
        plain["stream"] = True
        plain["exclude_input_in_output"] = True
        plain["return_finish_reason"] = True
        plain["return_num_input_tokens"] = True
        plain["return_num_output_tokens"] = True
        try:
            plain["sampling_parameters"] = _encode(sampling).decode()
            body = _encode(plain)
        except UnicodeEncodeError:
            # Halves of surrogate pairs, which Triton's parser refuses: as every tokenizer would read them.
            plain["text_input"] = _whole(ask.prompt)
            if stops:
                sampling["stop"] = [_whole(stop) for stop in stops]
            if len(stops) == 1:
                plain["stop"] = plain["stop_words"] = _whole(stops[0])
            plain["sampling_parameters"] = _encode(sampling).decode()
            body = _encode(plain)
        return Outgoing(_target(ask.engine_model), body)

    def reading(self, ask: Ask) -> "TritonReading":
        """Who reads the answer."""
        return TritonReading(ask)


class TritonReading(Reading):
    """The answer of `generate_stream`; one of `generate` is read as well."""

    __slots__ = ("_answered", "_limit", "_tells_reasons")

    def __init__(self, ask: Ask) -> None:
        super().__init__(ask)
        self._answered = False
        self._limit = default_tokens(ask) if ask.max_tokens is None else ask.max_tokens
        self._tells_reasons = False

    def on_event(self, kind: bytes, data: bytes) -> None:
        """A response: text, or an error."""
        event = _read(data)
        if event is None:
            self.fail(502, "Triton sent an event that is not JSON")
        else:
            self._hear(event)

    def on_end(self) -> None:
        """Triton has no marker: an end of the framing is one."""
        if not self._answered or self.finish_reason or self._tells_reasons:
            return
        tokens = self.completion_tokens if self.completion_tokens >= 0 else self.tokens
        self.finished("length" if tokens >= self._limit else "stop")

    def on_whole(self, status: int, body: bytes) -> None:
        """An error; or a response where the media type is not a stream's."""
        if status == 200:
            event = _read(body)
            if event is None:
                self.fail(502, "Triton answered with what is not JSON")
            else:
                self._hear(event)
                if not self.failed:
                    self.on_end()
        elif status < 400:
            self.fail(502, f"Triton answered with status {status}")
        else:
            error = read_error(body)
            self._blame(status, "" if error is None else error.message)

    def _hear(self, event: TritonEvent) -> None:
        if event.error is not None:
            self._blame(200, error_from(event.error).message)
            return
        text = bytes(event.text_output)
        if text and text[0] == _BRACKET:
            text = _first(text)
        if text and text[0] == _QUOTE:
            self._answered = True
            if not text.isascii():
                text = _valid(text)
            self.said(text)
        number = event.num_output_tokens
        if number is not None:
            count = _count(number)
            if count >= 0:
                # Of this response alone.
                self.counted(-1, max(self.completion_tokens, 0) + count)
            self.counted(_count(event.num_input_tokens), -1)
        if event.finish_reason is not None:
            self._end_reason(event.finish_reason)

    def _end_reason(self, told: object) -> None:
        if isinstance(told, list):
            told = told[0] if told else None
        if not isinstance(told, str):
            return
        reason = told.lower()
        self._tells_reasons = True
        if reason in _UNFINISHED:
            return
        if reason == "error":
            self._blame(200, "the engine ended the answer with an error")
        else:
            self.finished(_REASONS.get(reason, reason))

    def _blame(self, status: int, message: str) -> None:
        # The scheduler names the request first; the client has its id.
        message = message.removeprefix(f"[request id: {self.ask.request_id}] ")
        # A traceback says where the model's files are.
        message = message.partition("\n\nAt:\n")[0]
        code, kind = fault_of(status, message, by_client=self.ask.engine_model == self.ask.model)
        if status in _NO_PATH and code == 500:
            message = _OTHER_SERVER  # what such a server says of our path helps nobody
        self.fail(code, without_paths(message) or f"Triton answered with status {status}", kind)


def fault_of(status: int, message: str, *, by_client: bool) -> Fault:
    """What an error is to be called. `status` 200: it came in a stream; `by_client`: the client named the model."""
    text = message.lower()
    if not text.startswith(_IN_MODELS_NAME):
        for words, fault in SERVER_SAYS:
            if words in text:
                return _AWAY if fault[0] == 404 and not by_client else fault
    for words, fault in MODEL_SAYS:
        if words in text:
            return fault
    if status == 413:
        return _TOO_LARGE
    if status in _KEPT:
        return status, "BadRequestError"
    return _AWAY if status == 503 else _FAILED


def default_tokens(ask: Ask) -> int:
    """The ceiling of an answer for which the client named none."""
    return CHAT_TOKENS if ask.api is Api.CHAT else COMPLETION_TOKENS


def _target(model: str) -> bytes:
    name, _, version = model.partition("/versions/")
    if not name or name in _DOTS or version in _DOTS:
        raise SidecarError(Reason.BAD_REQUEST, "downstream", f"model: Triton can have none of the name {model!r}")
    path = f"/v2/models/{_segment(name)}"
    if version:
        path += f"/versions/{_segment(version)}"
    return f"{path}/generate_stream".encode()


def _segment(name: str) -> str:
    # Triton takes a path as it is written, so what may stand in one stays: its models may be called so.
    return quote(name, safe=_SEGMENT, errors="replace")


def _read(data: bytes) -> TritonEvent | None:
    try:
        return decode_triton_event(data)
    except (msgspec.MsgspecError, RecursionError):
        pass
    try:
        # Triton writes strings as the model gave them, UTF-8 or not.
        return read_as(data.decode("utf-8", "replace").encode(), TritonEvent)
    except (ValueError, RecursionError):
        return None


def _first(texts: bytes) -> bytes:
    """The first of a list of texts; empty where there is none."""
    try:
        found = decode_texts(texts)
    except (msgspec.MsgspecError, RecursionError):
        return _first_again(texts)
    return bytes(found[0]) if found else b""


def _first_again(texts: bytes) -> bytes:
    try:
        found = python_json(texts.decode("utf-8", "replace").encode())
    except (ValueError, RecursionError):
        return b""
    return json.dumps(found[0]).encode() if found and isinstance(found, list) else b""


def _valid(text: bytes) -> bytes:
    try:
        text.decode()
    except UnicodeDecodeError:
        return text.decode("utf-8", "replace").encode()
    return text


def _count(number: object) -> int:
    if isinstance(number, list):
        number = number[0] if number else None
    return number if type(number) is int else -1


def _whole(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
