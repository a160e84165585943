"""Answers of ours, as bytes: OpenAI's error body, whole or as the last event of a cut stream."""

import math

import msgspec

from sidecar.kernel.errors import STATUS, Reason, Refusal

PHRASES = {
    400: b"Bad Request",
    401: b"Unauthorized",
    404: b"Not Found",
    408: b"Request Timeout",
    413: b"Content Too Large",
    422: b"Unprocessable Content",
    429: b"Too Many Requests",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error",
    502: b"Bad Gateway",
    503: b"Service Unavailable",
    504: b"Gateway Timeout",
}

# Reasons for which a mesh should know that load, not a fault, refused the request (Envoy sets it when it sheds).
OVERLOAD_REASONS = frozenset({Reason.OVERLOADED, Reason.BREAKER_OPEN, Reason.REQUEST_OPEN})

# Reasons for which the same request will be refused again: client libraries (OpenAI's) obey the header that says so.
FINAL_REASONS = frozenset({Reason.POISONED_REQUEST})

_encode = msgspec.json.Encoder().encode


class _Error(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str


class _Body(msgspec.Struct, frozen=True):
    error: _Error


def error_type(status: int) -> str:
    """OpenAI's `type` word for a status."""
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def error_body(reason: Reason, message: str, param: str | None = None) -> bytes:
    """`{"error":{"message","type","param","code"}}`; `code` is the reason."""
    return _encode(_Body(_Error(message, error_type(STATUS[reason]), param, reason.value)))


def error_event(reason: Reason, message: str) -> bytes:
    """The last event of a stream that we cut. No `[DONE]` follows, so that nobody takes a cut for an end."""
    return b"data: " + error_body(reason, message) + b"\n\n"


def refusal_answer(refusal: Refusal, request_id: bytes, extra: bytes, close: bool, no_body: bool) -> bytes:
    """A whole HTTP/1.1 answer. `extra` are ready header lines; `no_body` for HEAD."""
    status = STATUS[refusal.reason]
    body = error_body(refusal.reason, refusal.message, refusal.param)
    lines = [
        b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nx-sidecar-reason: %b\r\n"
        % (status, PHRASES[status], len(body), refusal.reason.value.encode()),
        extra,
    ]
    if request_id:
        lines.append(b"x-request-id: %b\r\n" % request_id)
    if refusal.retry_after_s is not None:
        lines.append(b"retry-after: %d\r\n" % max(1, math.ceil(refusal.retry_after_s)))
    if status == 401:
        lines.append(b"www-authenticate: Bearer\r\n")
    if refusal.reason in OVERLOAD_REASONS:
        lines.append(b"x-envoy-overloaded: true\r\n")
    if refusal.final or refusal.reason in FINAL_REASONS:
        lines.append(b"x-should-retry: false\r\n")
    if close:
        lines.append(b"connection: close\r\n")
    lines.append(b"\r\n")
    if not no_body:
        lines.append(body)
    return b"".join(lines)
