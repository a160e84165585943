"""DeepSpeed-MII 0.3.3: its three HTTP servers, asked what OpenAI's clients ask.

Why not let its OpenAI front be as it is: its chunks lack half of what a client's library reads, its errors lie about
whose fault they are and quote its files, and what it does not like it drops, cuts off or fails at.

1. What MII refuses in earnest (a temperature of 0, a prompt of nothing) it answers with a 500, or with a stream that
   breaks off, as if it had failed itself. So before it is asked values are judged as vLLM would judge them.
2. What a client leaves out is OpenAI's default, and said: MII's own (temperature 0.7, top_p 0.9, 128 tokens) would make
   an answer depend on which engine gives it. MII ends an answer where its context ends, so limits may be higher; the
   `max_length` of 32768, which two fronts put beside a limit, may not, and is taken off.
3. The likeliest token each time (temperature 0) is a choice among one, or no sampling where that can be said.
4. api_server tells neither a finish reason nor tokens. It is asked for a stream always: then each token is an event,
   and an answer of as many as were allowed ended for its `length`. A stream's last event is an empty one.
5. `[DONE]` proves nothing: MII's load balancer gives a stalled stream up after 600 s by ending it, and the front writes
   `[DONE]`. A good end is a finish reason before it, or api_server's empty event.
6. An error's words go to the client without paths of the engine's files, and without what it was asked. A front that
   does not know the path it was asked at is another front than the policy says: the endpoint's fault, so others are
   asked; so it is where the policy named a model (`engine_model`) that is not there. Only one that the client named is
   a 404. A gateway's path is its deployment.

MII's JSON is Python's of texts that came by protobuf, so it is good UTF-8 without lone surrogates; whatever is not read
is a hole in the answer, and so an error.
"""

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import quote

from msgspec import DecodeError
from msgspec.json import Encoder

from sidecar.adapters.ask import VLLM_OWN, Ask, is_set, messages_of
from sidecar.adapters.dialect import Outgoing
from sidecar.adapters.reading import Reading, without_paths
from sidecar.adapters.sampling import numbers_of, stops_of
from sidecar.adapters.shapes import MiiText, decode_mii_chunk, decode_mii_replies, decode_mii_texts
from sidecar.kernel.errors import Reason, SidecarError
from sidecar.wire.answer import AnswerError, read_error
from sidecar.wire.call import Api

COMPLETION_TOKENS: Final = 16
"""Of a completion that names no limit, as OpenAI and vLLM have it."""

CHAT_TOKENS: Final = 4096
"""Of a chat that names none; OpenAI's API means as many as fit. MII could be asked for those, but does not notice that
a client left: a chat that rambles would be written to the end of its context for nobody."""

MOST_TOKENS: Final = 1 << 24
"""Asked for at most: more than any context holds that MII serves, and a number that its protobuf holds."""

COLDEST: Final = 0.01
"""A lower temperature above 0 is raised to it, as vLLM does: logits divided by less overflow."""

_CHAT: Final = Api.CHAT
_encode: Final = Encoder().encode
_UNREADABLE: Final = (DecodeError, RecursionError)

LACKS: Final[Mapping[str, str]] = MappingProxyType(
    {
        **VLLM_OWN,
        "n": "it returns one answer per request",
        "best_of": "it returns one answer per request",
        "prompt": "it completes one prompt per request, and takes it as text",
        "tools": "it calls no tools",
        "logprobs": "it tells no log probabilities",
        "response_format": "it cannot be held to a format",
        "structured_outputs": "it cannot be held to a format",
        "logit_bias": "it takes no bias of tokens",
        "content": "it reads text only",
        "modalities": "it answers in text only",
        "echo": "it does not repeat the prompt",
        "suffix": "it completes a prompt at its end only",
        "stop": "it knows one stop string per request",
        "presence_penalty": "it has no penalties",
        "frequency_penalty": "it has no penalties",
        "repetition_penalty": "it has no penalties",
        "min_p": "it cannot sample by min_p",
        "responses": "it has no Responses API",
        "messages": "it has no Messages API",
        "embeddings": "it makes no embeddings",
        "other": "it has none of vLLM's other paths",
        "generate": "it has no such path",
    }
)
"""What none of the fronts can, by the need."""

_NO_DEPLOYMENT: Final = frozenset({"", ".", ".."})
"""Names that no segment of a path can have."""

_NEVER_IGNORES_EOS: Final = "it always ends at the end of sequence"


class MiiOpenai:
    """The OpenAI front: `mii.entrypoints.openai_api_server`."""

    __slots__ = ()

    name = "DeepSpeed-MII's OpenAI front"
    applies_template = True
    lacks = MappingProxyType(
        {
            **LACKS,
            "ignore_eos": _NEVER_IGNORES_EOS,
            "tool_calls": "it takes messages of nothing but texts",
        }
    )

    def outgoing(self, ask: Ask) -> Outgoing:
        """See `Translator`."""
        asked = _sampling(ask, "max_tokens", "min_tokens")
        asked |= {"model": ask.engine_model, "stream": ask.stream}
        if ask.api is _CHAT:
            # A member that is no text fails MII's validation.
            asked["messages"] = [
                {name: value for name, value in message.items() if isinstance(value, str)}
                for message in messages_of(ask.body)
            ]
            if not asked["messages"]:
                raise _bad("messages: must not be empty")
            return Outgoing(b"/v1/chat/completions", _body_of(asked))
        asked |= {"prompt": _prompt(ask), "max_length": None}
        return Outgoing(b"/v1/completions", _body_of(asked))

    def reading(self, ask: Ask) -> Reading:
        """See `Translator`."""
        return OpenaiReading(ask)


class MiiApiServer:
    """The front of one path: `mii.entrypoints.api_server`."""

    __slots__ = ()

    name = "DeepSpeed-MII's api_server"
    applies_template = False
    lacks = MappingProxyType(
        {name: why for name, why in LACKS.items() if name != "generate"} | {"ignore_eos": _NEVER_IGNORES_EOS}
    )

    def outgoing(self, ask: Ask) -> Outgoing:
        """See `Translator`."""
        asked = _sampling(ask, "max_tokens", "min_tokens")
        asked |= {"prompt": _prompt(ask), "stream": True, "max_length": None}
        return Outgoing(b"/generate", _body_of(asked))

    def reading(self, ask: Ask) -> Reading:
        """See `Translator`."""
        return ApiServerReading(ask)


class MiiGateway:
    """The RESTful gateway, whose answers come whole."""

    __slots__ = ()

    name = "DeepSpeed-MII's RESTful gateway"
    applies_template = False
    lacks = LACKS

    def outgoing(self, ask: Ask) -> Outgoing:
        """See `Translator`. The path names the deployment, whose model is the only one."""
        # The members are arguments of MII's client, which takes single values: no list and no null.
        asked = _sampling(ask, "max_new_tokens", "min_new_tokens")
        asked |= {"prompts": _prompt(ask), "return_full_text": False}
        asked["do_sample"] = asked.get("top_k") != 1
        asked["ignore_eos"] = is_set(ask.body.ignore_eos)
        model = ask.engine_model
        if model in _NO_DEPLOYMENT:
            raise _bad(f"model: DeepSpeed-MII can have no deployment of the name {model!r}")
        return Outgoing(b"/mii/" + quote(model, safe="", errors="replace").encode(), _body_of(asked))

    def reading(self, ask: Ask) -> Reading:
        """See `Translator`."""
        return GatewayReading(ask)


class _MiiReading(Reading):
    """What the three have in common: how an error is told."""

    __slots__ = ()

    def on_end(self) -> None:
        """Whatever ends a stream well was an event."""

    def on_whole(self, status: int, body: bytes) -> None:
        """An answer under 200, or an error."""
        if status != 200:
            self._refused(status, body)
        elif not body:
            self.fail(502, "DeepSpeed-MII answered 200 with nothing")
        else:
            try:
                self.on_answer(body)
            except _UNREADABLE:
                self._unreadable(body)

    def on_answer(self, body: bytes) -> None:
        """A whole answer under 200. May raise `_UNREADABLE`."""
        raise NotImplementedError

    def on_missing(self) -> None:
        """404 without an error's code: the server has no such path."""
        self._other_front()

    def _other_front(self) -> None:
        self.fail(502, "DeepSpeed-MII has no such path here: it is another of its servers than the policy says")

    def _refused(self, status: int, body: bytes) -> None:
        error = read_error(body) or AnswerError("")
        code = error.code if isinstance(error.code, int) else 0
        if not 400 <= status <= 599:
            self.fail(502, f"DeepSpeed-MII answered {status}")
        elif status == 405:
            self._other_front()
        elif status == 404 and not code:
            self.on_missing()
        elif status == 401 and not code:
            self.fail(401, "DeepSpeed-MII refused the API key", "AuthenticationError")
        elif status == 422 or code == _VALIDATION:
            self.fail(400, _validation(body))
        else:
            self._told(status, code, error)

    def _told(self, status: int, code: int, error: AnswerError) -> None:
        """An error by its code, else by `status`."""
        if code == _UNKNOWN_MODEL:
            self._unknown_model()
        elif code == _TOO_LONG:
            self.fail(400, "the prompt exceeds DeepSpeed-MII's context length")
        else:
            if code >= 10000 and 400 <= code // 100 <= 599:
                status = code // 100
            kind = "TooManyRequests" if status == 429 else ""
            self.fail(status, f"DeepSpeed-MII answered {status}{_words(error.message)}", kind)

    def _unknown_model(self) -> None:
        ask = self.ask
        if ask.engine_model == ask.model:
            self.fail(404, f"DeepSpeed-MII does not serve the model {ask.model}", "NotFoundError")
        else:
            # Not by its name, which may be a folder's path.
            words = f"DeepSpeed-MII does not serve the engine_model that the policy names for {ask.model}"
            self.fail(503, words, "ServiceUnavailableError")

    def _unreadable(self, data: bytes) -> None:
        """What no front says under 200: an error in some other's words, or nothing that is known."""
        error = read_error(data, soft=False)
        if error is None:
            self.fail(502, "DeepSpeed-MII answered what cannot be read")
        else:
            code = error.code if isinstance(error.code, int) else 0
            self._told(code if 400 <= code <= 599 else 500, code, error)


class OpenaiReading(_MiiReading):
    """An answer of the OpenAI front."""

    __slots__ = ("_pieces",)

    def __init__(self, ask: Ask) -> None:
        super().__init__(ask)
        self._pieces = 0  # a piece per token, also where its text waits for the next one's

    def on_event(self, kind: bytes, data: bytes) -> None:
        """A chunk; the first names the role alone, the last the finish reason."""
        if data == b"[DONE]":
            self.over()
            return
        try:
            chunk = decode_mii_chunk(data)
        except _UNREADABLE:
            self._unreadable(data)
            return
        choices = chunk.choices
        if not choices:
            self._unreadable(data)
            return
        choice = choices[0]
        delta = choice.delta
        text = choice.text if delta is None else delta.content
        if text is not None:
            if text:
                self._pieces += 1
                self.said(_encode(text))
            elif choice.finish_reason is None:
                self._pieces += 1
        if choice.finish_reason is not None:
            self.counted(-1, self._pieces)
            self.finished(choice.finish_reason)

    def on_answer(self, body: bytes) -> None:
        """A chat's or a text's."""
        answer = decode_mii_chunk(body)
        choices = answer.choices
        if not choices:
            self._unreadable(body)
            return
        choice = choices[0]
        message = choice.message
        text = choice.text if message is None else message.content
        if text is None:
            self._unreadable(body)
            return
        self.said(_encode(text))
        if answer.usage is not None:
            self.counted(answer.usage.prompt_tokens, answer.usage.completion_tokens)
        if choice.finish_reason is not None:
            self.finished(choice.finish_reason)


class ApiServerReading(_MiiReading):
    """An answer of api_server."""

    __slots__ = ("_empty", "_limit", "_pieces")

    def __init__(self, ask: Ask) -> None:
        super().__init__(ask)
        self._limit = limit_of(ask)
        self._pieces = 0
        self._empty = False  # what came last had no text

    def on_event(self, kind: bytes, data: bytes) -> None:
        """A token's text, or an empty one: a token whose text waits for the next one's, or the end."""
        if data == b"[DONE]":
            if self._empty:
                tokens = self._pieces - 1
                self.counted(-1, tokens)
                self.finished("length" if tokens >= self._limit else "stop")
                self.over()
            return
        try:
            text = _only(decode_mii_texts(data))
        except _UNREADABLE:
            self._unreadable(data)
            return
        if text is None:
            self._unreadable(data)
            return
        self._pieces += 1
        self._empty = not text
        if text:
            self.said(_encode(text))

    def on_answer(self, body: bytes) -> None:
        """Not what we ask for; why it ended is not told."""
        text = _only(decode_mii_texts(body))
        if text is None:
            self._unreadable(body)
            return
        self.said(_encode(text))
        self.finished("stop")


class GatewayReading(_MiiReading):
    """An answer of the gateway."""

    __slots__ = ()

    def on_event(self, kind: bytes, data: bytes) -> None:
        """It has no streams."""
        self._unreadable(data)

    def on_answer(self, body: bytes) -> None:
        """A list with a reply for each prompt."""
        replies = decode_mii_replies(body)
        if not replies:
            self._unreadable(body)
            return
        reply = replies[0]
        self.said(_encode(reply.generated_text))
        self.counted(reply.prompt_length, reply.generated_length)
        if reply.finish_reason != "none":
            self.finished(reply.finish_reason)

    def on_missing(self) -> None:
        """No deployment of that name."""
        self._unknown_model()


def limit_of(ask: Ask) -> int:
    """The tokens that an answer may have."""
    asked = ask.max_tokens
    if asked is None:
        return CHAT_TOKENS if ask.api is _CHAT else COMPLETION_TOKENS
    return min(asked, MOST_TOKENS)


def _sampling(ask: Ask, limit_name: str, least_name: str) -> dict[str, Any]:
    """How tokens are chosen and where they end, as far as the fronts share the words for it."""
    numbers = numbers_of(ask)
    temperature = numbers.get("temperature", 1.0)
    top_k = numbers.get("top_k", -1)
    least = numbers.get("min_tokens", 0)
    limit = limit_of(ask)
    if least > limit:
        raise _bad("min_tokens: must not exceed max_tokens")
    sampling: dict[str, Any] = {"top_p": numbers.get("top_p", 1.0), limit_name: limit}
    if temperature == 0:
        sampling |= {"temperature": 1.0, "top_k": 1}
    else:
        sampling["temperature"] = max(temperature, COLDEST)
        if top_k > 0:
            sampling["top_k"] = top_k
    if least > 0:
        sampling[least_name] = least
    stops = stops_of(ask)
    if stops:
        sampling["stop"] = stops[0]
    return sampling


def _body_of(asked: dict[str, Any]) -> bytes:
    try:
        return _encode(asked)
    except UnicodeEncodeError:
        # Half of a surrogate pair: no protobuf text can hold it, and the front would fail.
        return json.dumps(asked, ensure_ascii=False).encode("utf-8", "replace")


def _prompt(ask: Ask) -> str:
    if not ask.prompt:
        raise _bad("prompt: must not be empty")
    return ask.prompt


def _bad(detail: str) -> SidecarError:
    return SidecarError(Reason.BAD_REQUEST, "downstream", detail)


def _only(said: MiiText) -> str | None:
    texts = said.text
    return texts[0] if texts else None


_VALIDATION: Final = 40001
_UNKNOWN_MODEL: Final = 40301
_TOO_LONG: Final = 40303
"""`ErrorCode` of FastChat's constants.py, which MII imports. MII itself says the first two only."""

_PYTHON: Final = re.compile(r"'loc': \(([^)]*)\), 'msg': ('[^']*'|\"[^\"]*\")")
"""What FastAPI's validation error says as text: where in the request, and what."""

_JSON: Final = re.compile(r'"loc":\s*\[([^\]]*)\],\s*"msg":\s*("[^"]*")')
"""The same in its JSON."""

_PLACE: Final = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")

_MOST_WORDS: Final = 200


def _validation(body: bytes) -> str:
    """What of the request was refused: its places and why, neither its content nor the engine's files."""
    text = body[:_MOST_SEARCHED].decode("utf-8", "replace").replace('\\"', '"')
    said: list[str] = []
    for where, why in _PYTHON.findall(text) or _JSON.findall(text):
        place = ".".join(part.strip("'\"") for part in _PLACE.findall(where)).removeprefix("body.")
        said.append(f"{place}: {why[1:-1]}" if place else why[1:-1])
    return _cut(f"DeepSpeed-MII refused the request: {'; '.join(said) or 'it is not what it takes'}")


_MOST_SEARCHED: Final = 4096
"""Of a validation error, which quotes the request: the first finding stands before its quotation."""


def _words(message: str) -> str:
    """An error's first line, unless it is a page for people."""
    line = message.strip().partition("\n")[0].strip()
    return "" if not line or line.startswith("<") else ": " + _cut(without_paths(line))


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_WORDS else text[: _MOST_WORDS - 3] + "..."
