"""Which ending an engine's answer is: by its status, by the error that it tells, by its Retry-After.

The status alone does not tell a client's fault from the engine's: engines answer a prompt that is too long with 400,
a full queue with 503, and break under 200. So the words are read as well, by a list of those that engines use for
exactly two things, "too long" and "too busy"; everything else goes by the number. In band there is no status: the
code does its work where it is one (also five-digit ones, `40303`, whose first three digits are a status), then the
type's name, then the words; what none of them classifies is the engine's fault.

Decided here, where the doctrine is silent:
1. 501 and 505 are the client's: it asked for a method, feature or version that this engine never has. Counted as
   failures, one such client would open every breaker.
2. Retry-After makes a 503 overload and nothing else: on a 500 it is a courtesy, on a 4xx the client's business.
3. Words outrank the number only within its class: a 500 that speaks of context length stays a failure.
"""

from collections.abc import Iterable
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Final

from sidecar.kernel.exchange import Header
from sidecar.kernel.outcome import Ending
from sidecar.wire.answer import AnswerError
from sidecar.wire.stream import StreamReader

_OVERLOAD_WORDS = (
    "queue is full",
    "queue full",
    "maximum queue size",
    "overloaded",
    "currently busy",
    "server busy",
    "server is busy",
    "backlog limit",
    "too many requests",
    "too many concurrent",
    "rate limit",
    "currently scaling",
    "no available capacity",
    "at capacity",
)

_CONTEXT_WORDS = (
    "context length",
    "context_length",
    "context window",
    "context size",
    "max_model_len",
    "maximum model length",
    "maximum sequence length",
    "prompt is too long",
    "prompt too long",
    "input is too long",
    "input too long",
    "payload too large",
    "request too large",
    "reduce the length",
)

_DEATH_WORDS = (
    "enginecore encountered an issue",  # vllm/v1/engine/exceptions.py: EngineDeadError
    "enginedeaderror",
    "engine loop is not running",  # vLLM before it: MQEngineDeadError
    "background loop has errored",  # and AsyncEngineDeadError
    "background loop is stopped",
)

_OVERLOAD_NAMES = frozenset(
    {
        "ratelimitexceeded",
        "ratelimiterror",
        "toomanyrequests",
        "toomanyrequestserror",
        "overloaded",
        "overloadederror",
        "engineoverloaded",
        "serveroverloaded",
        "insufficientquota",
    }
)

_CONTEXT_NAMES = frozenset(
    {
        "contextlengthexceeded",
        "contextwindowexceedederror",
        "exceedcontextsizeerror",
        "stringabovemaxlength",
        "requesttoolarge",
        "requesttoolargeerror",
    }
)

_CLIENT_NAMES = frozenset(
    {
        "badrequest",
        "badrequesterror",
        "invalidrequesterror",
        "invalidrequest",
        "invalidprompt",
        "invaliduserinput",
        "invalidapikey",
        "notfounderror",
        "modelnotfound",
        "authenticationerror",
        "permissionerror",
        "permissiondeniederror",
        "unprocessableentityerror",
        "validationerror",
        "notimplementederror",
        "contentfilter",
        "contentpolicyviolation",
    }
)

ABORTED: Final = "abort"
"""The finish reason of a request that its engine gave up while the client still waited."""

_CONTEXT_CODE: Final = 40303
"""`CONTEXT_OVERFLOW` of the five-digit codes (FastChat's table, which several servers copied)."""


_COMPLETE: Final = Ending.COMPLETE


def ending_of_status(status: int, error: AnswerError | None, retry_after: bool) -> Ending:
    """How an attempt ended whose answer came whole with this status; COMPLETE below 400.

    `error` is what its body tells, `retry_after` whether its head has a usable Retry-After.
    """
    if status < 400:
        return _COMPLETE
    if status == 429 or status == 529:
        return Ending.OVERLOADED
    if status < 500:
        if status == 413 or (error is not None and _is_context(error)):
            return Ending.CONTEXT_LENGTH
        return Ending.CLIENT_ERROR
    if status == 501 or status == 505:
        return Ending.CLIENT_ERROR
    if (status == 503 and retry_after) or (error is not None and _is_overload(error)):
        return Ending.OVERLOADED
    return Ending.SERVER_ERROR


def ending_of_error(error: AnswerError) -> Ending:
    """How an attempt ended that told this error under a 200, in a stream or a body."""
    status = _status_in(error.code)
    if status:
        return _IN_BAND[ending_of_status(status, error, False)]
    if _names(error) & _OVERLOAD_NAMES:
        return Ending.OVERLOADED_IN_BAND
    if _is_context(error):
        return Ending.CONTEXT_LENGTH_IN_BAND
    if _names(error) & _CLIENT_NAMES:
        return Ending.CLIENT_ERROR_IN_BAND
    return Ending.OVERLOADED_IN_BAND if _is_overload(error) else Ending.ERROR_IN_BAND


def ending_of_stream(stream: StreamReader, clean: bool) -> Ending:
    """How an attempt ended whose event stream is over; `clean`: its body's framing said so, it was not cut off.

    An end marker makes even a cut stream complete: all that the client waits for has gone out.
    """
    if stream.error is not None:
        return ending_of_error(stream.error)
    if stream.complete and (clean or stream.terminal):
        return Ending.ABORTED if stream.finish_reason == ABORTED else _COMPLETE
    return Ending.TRUNCATED if stream.events or not clean else Ending.EMPTY


def tells_death(message: str) -> bool:
    """Whether an error's words say that the engine itself died: its front outlives it, for as long as it takes to tell.

    For the endpoint that is a failure like any other 5xx; for the prompt it is what a broken connection is.
    """
    text = message.lower()
    return any(word in text for word in _DEATH_WORDS)


_IN_BAND = {
    Ending.OVERLOADED: Ending.OVERLOADED_IN_BAND,
    Ending.CONTEXT_LENGTH: Ending.CONTEXT_LENGTH_IN_BAND,
    Ending.CLIENT_ERROR: Ending.CLIENT_ERROR_IN_BAND,
    Ending.SERVER_ERROR: Ending.ERROR_IN_BAND,
}


def retry_after_s(headers: Iterable[Header], now_wall: float) -> float | None:
    """Seconds to wait as the head asks, >= 0, uncapped; None if it asks nothing readable.

    Reads `retry-after` (seconds or an HTTP date, against `now_wall` in seconds since the epoch) and `retry-after-ms`;
    of several the longest wait wins, since each of them was asked for.
    """
    longest: float | None = None
    for name, value in headers:
        if len(name) not in (11, 14):
            continue
        word = name.lower()
        if word == b"retry-after":
            wait = _number(value)
            if wait is None:
                wait = _until(value, now_wall)
        elif word == b"retry-after-ms":
            wait = _number(value)
            if wait is not None:
                wait /= 1000
        else:
            continue
        if wait is not None and (longest is None or wait > longest):
            longest = wait
    return longest


def _number(value: bytes) -> float | None:
    digits = value.strip()
    # Fifteen digits are thirty million years; more is noise that float() would turn into infinity.
    if len(digits) > 15 or not digits.replace(b".", b"", 1).isdigit():
        return None
    return float(digits)


def _until(value: bytes, now_wall: float) -> float | None:
    try:
        date = parsedate_to_datetime(value.decode("ascii"))
        # An HTTP date is GMT also where its form names no zone (asctime).
        at = (date if date.tzinfo is not None else date.replace(tzinfo=UTC)).timestamp()
    except (ValueError, TypeError, OverflowError, IndexError):
        return None
    return max(0.0, at - now_wall)


def _status_in(code: int | str | None) -> int:
    if not isinstance(code, int):
        return 0
    if code == _CONTEXT_CODE:
        return 413
    status = code // 100 if code >= 10000 else code
    return status if 400 <= status <= 599 else 0


def _names(error: AnswerError) -> set[str]:
    names = {_plain(error.type)}
    if isinstance(error.code, str):
        names.add(_plain(error.code))
    return names


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name)).lower()


def _is_context(error: AnswerError) -> bool:
    if error.code == _CONTEXT_CODE or _names(error) & _CONTEXT_NAMES:
        return True
    text = error.message.lower()
    return any(word in text for word in _CONTEXT_WORDS)


def _is_overload(error: AnswerError) -> bool:
    if _names(error) & _OVERLOAD_NAMES:
        return True
    text = error.message.lower()
    return any(word in text for word in _OVERLOAD_WORDS)
