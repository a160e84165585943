"""What a request asks for: which API it speaks, and the few body fields that routing and limits read.

The body is decoded once into a typed struct, with the prompt and what tells the modality as raw bytes; everything else
in it is skipped, neither built nor judged: the engine is the judge of its own fields. For the fields that we do read we
take what engines take (pydantic's lax mode: `"5"` and `5.0` are integers, `"true"` and `1` are booleans), because a
sidecar that is stricter than its engine breaks clients that work.
"""

from enum import StrEnum
from types import MappingProxyType
from typing import Final

import msgspec

from sidecar.kernel.errors import Reason, SidecarError
from sidecar.wire.lenient import read_as
from sidecar.wire.shapes import CallBody, Number, WholeBody, decode_call, decode_metadata, decode_text


class Api(StrEnum):
    """The API a request speaks: it decides what a token, an end and an error look like."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    EMBEDDINGS = "embeddings"
    OTHER = "other"
    """Inference by JSON (rerank, score, pooling ...) whose answers have no shape that we know."""


API_BY_PATH = MappingProxyType(
    {
        b"/v1/chat/completions": Api.CHAT,
        b"/v1/completions": Api.COMPLETIONS,
        b"/v1/responses": Api.RESPONSES,
        b"/v1/messages": Api.MESSAGES,
        b"/v1/embeddings": Api.EMBEDDINGS,
        b"/v1/chat/completions/batch": Api.OTHER,
        b"/v1/rerank": Api.OTHER,
        b"/v2/rerank": Api.OTHER,
        b"/rerank": Api.OTHER,
        b"/v1/score": Api.OTHER,
        b"/score": Api.OTHER,
        b"/pooling": Api.OTHER,
        b"/classify": Api.OTHER,
        b"/generate": Api.OTHER,
        b"/inference/v1/generate": Api.OTHER,
        b"/invocations": Api.OTHER,
    }
)
"""Verbatim paths. A trailing slash is another path: engines answer it with a redirect or 404, so it is no inference."""

_api_at = API_BY_PATH.get


_RESPONSES: Final = Api.RESPONSES
_MESSAGES: Final = Api.MESSAGES
_COMPLETIONS: Final = Api.COMPLETIONS


def api_of(method: bytes, path: bytes) -> Api | None:
    """The API of a request; None if it is no inference (its body then streams through unread).

    `path` is the target without its query, decoded; not normalised, since engines do not.
    """
    return _api_at(path) if method == b"POST" else None


class Call:
    """What a body asks for. `model` and `user` are empty where it names none; `n` is answers per prompt, >= 1.

    `max_tokens` is the ceiling of the answer in the engine's tokens, None where the engine's default holds. `whole` is
    the body as it was decoded, for who reads more of it; None where only Python reads it. It holds the body's bytes:
    whoever lets go of them sets it to None.
    """

    __slots__ = ("api", "max_tokens", "model", "n", "stream", "user", "whole")

    def __init__(
        self,
        api: Api,
        model: str,
        stream: bool,
        user: str,
        max_tokens: int | None,
        n: int,
        whole: WholeBody | None = None,
    ) -> None:
        self.api = api
        self.model = model
        self.stream = stream
        self.user = user
        self.max_tokens = max_tokens
        self.n = n
        self.whole = whole


_TRUE: Final = frozenset({"true", "1", "on", "t", "y", "yes"})
_FALSE: Final = frozenset({"false", "0", "off", "f", "n", "no"})


def read_call(api: Api, body: bytes) -> Call:
    """Reads a whole request body.

    Raises `SidecarError` (`BAD_REQUEST`, downstream) on what is no JSON object, or where a field that we read has a
    type that no engine takes; its detail names the field.
    """
    parsed: CallBody
    whole: WholeBody | None = None
    try:
        parsed = whole = decode_call(body)
    except msgspec.ValidationError as exc:
        raise _bad(_wording(exc)) from exc
    except msgspec.DecodeError as exc:
        parsed = _lenient(body, exc)
    except RecursionError as exc:
        raise _bad("the body is nested too deeply") from exc
    stream = parsed.stream
    if stream is None:
        stream = False
    elif stream is not True and stream is not False:
        stream = _boolean("stream", stream)
    n = _integer("n", parsed.n)
    return Call(
        api,
        parsed.model or "",
        stream,
        _user(api, parsed),
        _limit(api, parsed),
        1 if n is None or n < 1 else n,
        whole,
    )


def _limit(api: Api, body: CallBody) -> int | None:
    if api is _RESPONSES:
        return _integer("max_output_tokens", body.max_output_tokens)
    limit = _integer("max_tokens", body.max_tokens)
    if body.max_completion_tokens is None or api is _COMPLETIONS or api is _MESSAGES:  # unknown to these
        return limit
    newer = _integer("max_completion_tokens", body.max_completion_tokens)
    # Which of the two counts is for each engine to say, and 0 is to some as if it were not there.
    return newer if limit is None or (newer is not None and newer > limit) else limit


def _user(api: Api, body: CallBody) -> str:
    if body.user is None and api is _MESSAGES and memoryview(body.metadata).nbytes > 2:
        try:
            return decode_text(decode_metadata(body.metadata).user_id)  # no text is no error, nor built: it may be long
        except (msgspec.DecodeError, RecursionError):
            return ""
    return body.user or ""


def _boolean(name: str, value: int | str) -> bool:
    if isinstance(value, str):
        word = value.lower()
        if word in _TRUE:
            return True
        if word in _FALSE:
            return False
    elif value in (0, 1):
        return bool(value)
    raise _bad(f"{name}: expected a boolean")


def _integer(name: str, value: Number) -> int | None:
    if value is None or type(value) is int:
        return value
    try:
        number = float(value)
        if number.is_integer():
            return int(value)
    except (ValueError, OverflowError):
        pass
    raise _bad(f"{name}: expected an integer")


def _lenient(body: bytes, cause: msgspec.DecodeError) -> CallBody:
    try:
        return read_as(body, CallBody)
    except msgspec.ValidationError as exc:
        raise _bad(_wording(exc)) from exc
    except (ValueError, RecursionError) as exc:
        raise _bad(f"the body is not valid JSON: {cause}") from exc


def _wording(exc: msgspec.ValidationError) -> str:
    text = str(exc)
    what, at, where = text.partition(" - at `$.")
    if not at:
        return f"the body must be a JSON object: {text[:1].lower()}{text[1:]}"
    return f"{where.rstrip('`')}: {what[:1].lower()}{what[1:]}"


def _bad(detail: str) -> SidecarError:
    return SidecarError(Reason.BAD_REQUEST, "downstream", detail)
