"""The server side of HTTP for a simulated engine: one connection, its parser, and the ways it can be ended.

A protocol of our own and not a web framework, because most faults are things that frameworks exist to prevent:
a reset inside a body, a body short of its length, bytes that nobody asked for.
"""

import asyncio
import socket
import struct
from collections import deque
from typing import Protocol, cast

import httptools
import msgspec

from sidecar.kernel.exchange import Header

FAULT_HEADER = b"x-demo-fault"
RESET_LINGER = struct.pack("ii", 1, 0)
"""SO_LINGER of zero seconds: closing discards what is unsent and sends a reset."""

MAX_BODY_BYTES = 64 << 20


class Request(msgspec.Struct, frozen=True):
    """One request as it arrived. `headers` keep their case and order; `connection` counts accepts from 1."""

    method: bytes
    target: bytes
    headers: list[Header]
    body: bytes
    connection: int
    keep_alive: bool
    http_10: bool
    request_id: str
    fault: bytes

    @property
    def path(self) -> bytes:
        """The target without its query."""
        return self.target.partition(b"?")[0]


class Pending(Protocol):
    """An answer in the making, as its connection sees it."""

    def gone(self) -> None:
        """The client left or the connection was ended."""

    def resume(self) -> None:
        """The client reads again."""


class Server(Protocol):
    """What serves the requests of a connection."""

    def opened(self, connection: "Connection") -> int:
        """Take note of a connection; its number."""

    def closed(self, connection: "Connection") -> None:
        """Forget it."""

    def serve(self, connection: "Connection", request: Request) -> None:
        """Answer, now or later, by the connection's methods; `done` ends the answer."""

    def refuses(self, connection: "Connection", fault: bytes) -> bool:
        """True if an upload that waits for 100 Continue was answered with an error in place of it."""


class Connection(asyncio.Protocol):
    """Requests in, one after another; pipelined ones wait for their turn."""

    __slots__ = (
        "_body",
        "_body_bytes",
        "_continue",
        "_fault",
        "_headers",
        "_keep_alive",
        "_parser",
        "_queue",
        "_request_id",
        "_server",
        "_target",
        "_transport",
        "busy",
        "number",
        "paused",
        "pending",
    )

    _transport: asyncio.Transport
    _parser: httptools.HttpRequestParser

    def __init__(self, server: Server) -> None:
        self._server = server
        self._queue: deque[Request] = deque()
        self.busy = False
        self.paused = False
        self.pending: Pending | None = None
        self.number = 0

    # The transport's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are this in all but name.
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpRequestParser(self)
        self.number = self._server.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._queue.clear()
        pending = self.pending
        self.pending = None
        if pending is not None:
            pending.gone()
        self._server.closed(self)

    def eof_received(self) -> bool:
        # A half-close is a disconnect to the engines that this one stands for.
        return False

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        if self.pending is not None:
            self.pending.resume()

    def data_received(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._transport.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self._transport.close()

    # The parser's side.

    def on_message_begin(self) -> None:
        self._target = b""
        self._headers: list[Header] = []
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._request_id = ""
        self._fault = b""
        self._continue = False
        self._keep_alive = False

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))
        key = name.lower()
        if key == b"x-request-id":
            self._request_id = value.decode("latin-1")
        elif key == FAULT_HEADER:
            self._fault = value
        elif key == b"expect":
            self._continue = value.lower() == b"100-continue"

    def on_headers_complete(self) -> None:
        # Asked here: once the message is complete llhttp always says no.
        self._keep_alive = self._parser.should_keep_alive()
        if self._continue and not self._server.refuses(self, self._fault):
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        self._body_bytes += len(data)
        if self._body_bytes > MAX_BODY_BYTES:
            self.reset()
            return
        self._body.append(data)

    def on_message_complete(self) -> None:
        if self._transport.is_closing():
            return
        parts = self._body
        request = Request(
            self._parser.get_method(),
            self._target,
            self._headers,
            parts[0] if len(parts) == 1 else b"".join(parts),
            self.number,
            self._keep_alive,
            self._parser.get_http_version() == "1.0",
            self._request_id,
            self._fault,
        )
        if self.busy:
            self._queue.append(request)
            return
        self.busy = True
        self._server.serve(self, request)

    # The answer's side.

    def write(self, data: bytes) -> None:
        """Send bytes as they are; nothing once the connection is closing."""
        if not self._transport.is_closing():
            self._transport.write(data)

    def done(self, keep_alive: bool) -> None:
        """The answer's last byte is written: close, or go on with the next request."""
        self.pending = None
        self.busy = False
        if not keep_alive:
            self._transport.close()
        elif self._queue:
            # Not within this call: a burst of pipelined requests would be as many calls deep.
            self.busy = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        if self._queue and not self._transport.is_closing():
            self._server.serve(self, self._queue.popleft())

    def close(self) -> None:
        """FIN, behind what is already written."""
        self._transport.close()

    def reset(self) -> None:
        """RST, at once."""
        sock = self._transport.get_extra_info("socket")
        if sock is not None and not self._transport.is_closing():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_LINGER)
        self._transport.abort()
