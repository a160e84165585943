"""What a wire attempt came to, and what that means for whom: the doctrine as one table.

Decided once per wire attempt, at its end, never at the response head: engines fail under HTTP 200. Three results and
overload, not two: an answer that says something about the client (4xx, a hang-up) must count neither for nor
against a node, or a burst of bad requests opens, or closes, a breaker.
"""

from enum import Enum, StrEnum
from typing import Final

from sidecar.kernel.errors import Reason


class Result(Enum):
    """How an attempt counts in one breaker."""

    SUCCESS = "success"
    FAILURE = "failure"
    IGNORED = "ignored"
    OVERLOADED = "overloaded"


class Ending(StrEnum):
    """How one wire attempt ended."""

    # Enum's own hash is a Python call, and every request looks its ending up several times.
    __hash__ = str.__hash__

    COMPLETE = "complete"
    CONNECT_FAILED = "connect_failed"
    RESET_BEFORE_HEAD = "reset_before_head"
    BAD_BYTES = "bad_bytes"
    SERVER_ERROR = "server_error"
    OVERLOADED = "overloaded"
    CLIENT_ERROR = "client_error"
    CONTEXT_LENGTH = "context_length"
    HEAD_TIMEOUT = "head_timeout"
    TTFT_TIMEOUT = "ttft_timeout"
    TOKEN_GAP_TIMEOUT = "token_gap_timeout"  # noqa: S105 - a language model's token, not a secret
    TOTAL_TIMEOUT = "total_timeout"
    LATE = "late"
    TRUNCATED = "truncated"
    ERROR_IN_BAND = "error_in_band"
    CLIENT_ERROR_IN_BAND = "client_error_in_band"
    CONTEXT_LENGTH_IN_BAND = "context_length_in_band"
    OVERLOADED_IN_BAND = "overloaded_in_band"
    EMPTY = "empty"
    ABORTED = "aborted"
    CLIENT_LEFT = "client_left"
    CLIENT_SLOW = "client_slow"
    CLIENT_MALFORMED = "client_malformed"
    ABANDONED = "abandoned"
    PREEMPTED = "preempted"


class Verdict:
    """What an ending means.

    `resend` allows another endpoint to be tried while nothing was committed downstream. `reason` is the word for
    the client when nothing else worked; None where the upstream's own answer is what the client gets.
    """

    __slots__ = ("node", "reason", "resend", "session")

    def __init__(self, node: Result, session: Result, resend: bool, reason: Reason | None) -> None:
        self.node = node
        self.session = session
        self.resend = resend
        self.reason = reason


_S, _F, _I, _O = Result.SUCCESS, Result.FAILURE, Result.IGNORED, Result.OVERLOADED

DOCTRINE: Final[dict[Ending, Verdict]] = {
    Ending.COMPLETE: Verdict(_S, _S, False, None),
    Ending.CONNECT_FAILED: Verdict(_F, _I, True, Reason.UPSTREAM_CONNECT),
    Ending.RESET_BEFORE_HEAD: Verdict(_F, _F, True, Reason.UPSTREAM_RESET),
    Ending.BAD_BYTES: Verdict(_F, _F, True, Reason.UPSTREAM_PROTOCOL),
    Ending.SERVER_ERROR: Verdict(_F, _F, True, None),
    Ending.OVERLOADED: Verdict(_O, _I, True, None),
    Ending.CLIENT_ERROR: Verdict(_I, _I, False, None),
    Ending.CONTEXT_LENGTH: Verdict(_I, _F, False, None),
    Ending.HEAD_TIMEOUT: Verdict(_F, _F, True, Reason.HEAD_TIMEOUT),
    Ending.TTFT_TIMEOUT: Verdict(_F, _F, True, Reason.TTFT_TIMEOUT),
    Ending.TOKEN_GAP_TIMEOUT: Verdict(_F, _F, False, Reason.TOKEN_GAP_TIMEOUT),
    # The whole request ran out of time: a node that kept its own deadlines is not at fault for a long answer.
    Ending.TOTAL_TIMEOUT: Verdict(_I, _I, False, Reason.TOTAL_TIMEOUT),
    # We gave it up before its deadline, to try it elsewhere. That it was late is the detector's evidence, counted when
    # it happened; of a fleet that is merely busy it would be none.
    Ending.LATE: Verdict(_I, _I, True, Reason.TTFT_TIMEOUT),
    Ending.TRUNCATED: Verdict(_F, _F, True, Reason.UPSTREAM_TRUNCATED),
    Ending.ERROR_IN_BAND: Verdict(_F, _F, True, None),
    Ending.CLIENT_ERROR_IN_BAND: Verdict(_I, _I, False, None),
    Ending.CONTEXT_LENGTH_IN_BAND: Verdict(_I, _F, False, None),
    Ending.OVERLOADED_IN_BAND: Verdict(_O, _I, True, None),
    Ending.EMPTY: Verdict(_F, _F, True, Reason.EMPTY_RESPONSE),
    # The engine gave the request up, on an order that was not its client's: it sleeps, pauses or is going down.
    Ending.ABORTED: Verdict(_F, _I, True, None),
    Ending.CLIENT_LEFT: Verdict(_I, _I, False, None),
    Ending.CLIENT_SLOW: Verdict(_I, _I, False, Reason.CLIENT_TIMEOUT),
    # The upload broke the rules of HTTP midway.
    Ending.CLIENT_MALFORMED: Verdict(_I, _I, False, Reason.BAD_REQUEST),
    # We gave the attempt up for a reason of our own (drain, shutdown): nobody's fault.
    Ending.ABANDONED: Verdict(_I, _I, False, Reason.DRAINING),
    # We gave it up to make room for a class that may not wait.
    Ending.PREEMPTED: Verdict(_I, _I, False, Reason.PREEMPTED),
}

HANGS: Final = frozenset({Ending.HEAD_TIMEOUT, Ending.TTFT_TIMEOUT, Ending.TOKEN_GAP_TIMEOUT})
"""The endings of an attempt whose node fell silent."""

DEADLY: Final = HANGS | {Ending.RESET_BEFORE_HEAD, Ending.BAD_BYTES, Ending.TRUNCATED}
"""The endings of an attempt whose node crashed or hung, as far as one can see from here.

An engine that could not be reached was dead before; one that answers with an error lives (but see
`core.classify.tells_death`).
"""
