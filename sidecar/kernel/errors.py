"""The reasons for which we answer in the engine's place, and the one table from reason to HTTP status.

A reason is what an operator greps for: it is the `code` of the OpenAI error body, the `x-sidecar-reason` header,
the `reason` label of the metrics and the `reason` of the log line, always the same word.
"""

from enum import StrEnum
from types import MappingProxyType
from typing import Literal

import msgspec


class Reason(StrEnum):
    """Why the client gets an answer (or an in-band error event) of ours."""

    __hash__ = str.__hash__  # Enum's own is a Python call

    BREAKER_OPEN = "breaker_open"
    SESSION_OPEN = "session_open"
    REQUEST_OPEN = "request_open"
    POISONED_REQUEST = "poisoned_request"
    NO_ENDPOINT = "no_endpoint"
    OVERLOADED = "overloaded"
    UPSTREAM_CONNECT = "upstream_connect"
    UPSTREAM_RESET = "upstream_reset"
    UPSTREAM_TRUNCATED = "upstream_truncated"
    UPSTREAM_PROTOCOL = "upstream_protocol"
    EMPTY_RESPONSE = "empty_response"
    HEAD_TIMEOUT = "head_timeout"
    TTFT_TIMEOUT = "ttft_timeout"
    TOKEN_GAP_TIMEOUT = "token_gap_timeout"  # noqa: S105 - a language model's token, not a secret
    TOTAL_TIMEOUT = "total_timeout"
    CLIENT_TIMEOUT = "client_timeout"
    DRAINING = "draining"
    BAD_REQUEST = "bad_request"
    TOO_LARGE = "too_large"
    HEAD_TOO_LARGE = "head_too_large"
    UNKNOWN_MODEL = "unknown_model"
    UNSUPPORTED = "unsupported"
    UNAUTHORIZED = "unauthorized"
    KEYS_UNAVAILABLE = "keys_unavailable"
    QUEUE_TIMEOUT = "queue_timeout"
    PREEMPTED = "preempted"
    QUOTA_EXCEEDED = "quota_exceeded"
    INTERNAL = "internal"


STATUS = MappingProxyType(
    {
        Reason.BREAKER_OPEN: 503,
        Reason.SESSION_OPEN: 503,
        Reason.REQUEST_OPEN: 503,
        Reason.POISONED_REQUEST: 422,
        Reason.NO_ENDPOINT: 503,
        Reason.OVERLOADED: 429,
        Reason.UPSTREAM_CONNECT: 502,
        Reason.UPSTREAM_RESET: 502,
        Reason.UPSTREAM_TRUNCATED: 502,
        Reason.UPSTREAM_PROTOCOL: 502,
        Reason.EMPTY_RESPONSE: 502,
        Reason.HEAD_TIMEOUT: 504,
        Reason.TTFT_TIMEOUT: 504,
        Reason.TOKEN_GAP_TIMEOUT: 504,
        Reason.TOTAL_TIMEOUT: 504,
        Reason.CLIENT_TIMEOUT: 408,
        Reason.DRAINING: 503,
        Reason.BAD_REQUEST: 400,
        Reason.TOO_LARGE: 413,
        Reason.HEAD_TOO_LARGE: 431,
        Reason.UNKNOWN_MODEL: 404,
        Reason.UNSUPPORTED: 400,
        Reason.UNAUTHORIZED: 401,
        Reason.KEYS_UNAVAILABLE: 503,
        Reason.QUEUE_TIMEOUT: 408,
        Reason.PREEMPTED: 503,
        Reason.QUOTA_EXCEEDED: 429,
        Reason.INTERNAL: 500,
    }
)

Origin = Literal["downstream", "upstream", "local"]


class Refusal(msgspec.Struct, frozen=True):
    """An answer of ours: why, in words for its reader, and when to come back.

    `retry_after_s` is None where waiting does not help; else seconds, rounded up to at least 1 on the wire.
    `param` names the offending field of the request, as in OpenAI's error body. `final`: the same request will be
    refused again.
    """

    reason: Reason
    message: str
    retry_after_s: float | None = None
    param: str | None = None
    final: bool = False


class SidecarError(Exception):
    """A failure that a stage knows the meaning of; foreign exceptions are mapped to it at the border.

    `retryable` is decided where the fact is known: true only while nothing of the request can have had an effect.
    """

    def __init__(self, reason: Reason, origin: Origin, detail: str, *, retryable: bool = False) -> None:
        super().__init__(detail)
        self.reason = reason
        self.origin = origin
        self.detail = detail
        self.retryable = retryable
