"""A request as the downstream parser hands it over: the head at once, the body whole or piece by piece."""

from typing import Final

from sidecar.wire.call import Api
from sidecar.wire.headers import Line


class Request:
    """One request of one client connection.

    `headers` are for looking up; `lines` are the header lines that may go on, as they were
    written. An inference request (`api` is set) is `held`: its body is whole in `body` before the request starts,
    so that it can be routed and re-sent. Any other body streams through `pieces`. `body_size` counts what arrived.
    """

    __slots__ = (
        "api",
        "body",
        "body_size",
        "chunked",
        "complete",
        "content_length",
        "expect_continue",
        "forwarded_for",
        "forwarded_proto",
        "headers",
        "held",
        "host",
        "http_10",
        "keep_alive",
        "lines",
        "method",
        "named",
        "path",
        "pieces",
        "request_id",
        "target",
        "traceparent",
        "trailers",
        "upgrade",
    )

    def __init__(self) -> None:
        self.method = b""
        self.target = b""
        self.path = b""
        self.http_10 = False
        self.keep_alive = True
        self.headers: list[Line] = []
        self.lines: list[bytes] = []
        self.named: list[bytes] = []
        self.api: Api | None = None
        self.held = False
        self.body = b""
        self.body_size = 0
        self.pieces: list[bytes] = []
        self.complete = False
        self.trailers: list[bytes] = []
        self.content_length: int | None = None
        self.chunked = False
        self.expect_continue = False
        self.upgrade = b""
        self.host = b""
        self.request_id = b""
        self.traceparent = b""
        self.forwarded_for = b""
        self.forwarded_proto = b""

    def copy(self) -> "Request":
        """Another one that asks for the same; its body is held. For sending it twice."""
        twin = Request()
        twin.method, twin.target, twin.path = self.method, self.target, self.path
        twin.headers, twin.lines, twin.named = self.headers, self.lines, self.named
        twin.api, twin.held, twin.body, twin.body_size = self.api, self.held, self.body, self.body_size
        twin.content_length, twin.chunked, twin.complete = self.content_length, self.chunked, self.complete
        twin.trailers, twin.host = self.trailers, self.host
        twin.forwarded_for, twin.forwarded_proto = self.forwarded_for, self.forwarded_proto
        return twin

    @property
    def has_body(self) -> bool:
        """Whether a body is announced; an announced length of 0 is none."""
        return self.chunked or bool(self.content_length)

    @property
    def resendable(self) -> bool:
        """Whether a second copy can be sent after the first got no answer.

        Held inference bodies, and bodiless requests whose method promises that twice is once (RFC 9110, 9.2.2).
        """
        return self.held or (not self.has_body and self.method in IDEMPOTENT)


IDEMPOTENT: Final = frozenset({b"GET", b"HEAD", b"OPTIONS", b"PUT", b"DELETE", b"TRACE"})
