"""The sockets clients come in by, and the way out: drain.

Drain in three steps, because load balancers hear late: readiness fails first while requests are still served
(settle), then new requests are refused and idle connections closed, and live replies go on until the grace ends and
they are cut in band.
"""

import asyncio
import math
import ssl
from collections.abc import Callable
from typing import cast

from sidecar.downstream.connection import ClientConnection
from sidecar.kernel.errors import Reason
from sidecar.proxy.pipeline import Pipeline

_BACKLOG = 1024
# How often a drain looks whether the last reply has ended.
_DRAIN_POLL_S = 0.05
# How long replies that were cut may take to reach their clients.
_FLUSH_S = 1.0
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nretry-after: 1\r\n"
    b"x-sidecar-reason: overloaded\r\nconnection: close\r\n\r\n"
)


class Listener:
    """Accepts clients on one address."""

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        tls: ssl.SSLContext | None = None,
        trusted: bool = False,
        max_connections: int = 10_000,
    ) -> None:
        self._pipeline = pipeline
        self._tls = tls
        self._trusted = trusted
        self._max_connections = max_connections
        self._connections: set[ClientConnection] = set()
        self._server: asyncio.Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.rejected = 0

    @property
    def connections(self) -> int:
        """Client sockets that are open."""
        return len(self._connections)

    @property
    def busy(self) -> int:
        """Client sockets with a request being read or served."""
        return sum(not connection.idle for connection in self._connections)

    async def start(self, host: str, port: int) -> int:
        """Listen; the port that was bound. Raises OSError where the address is not to be had."""
        self._loop = asyncio.get_running_loop()
        self._server = await self._loop.create_server(self._accept, host, port, ssl=self._tls, backlog=_BACKLOG)
        return int(self._server.sockets[0].getsockname()[1])

    def _accept(self) -> asyncio.Protocol:
        assert self._loop is not None
        if len(self._connections) >= self._max_connections:
            self.rejected += 1
            return _Full()
        scheme = b"https" if self._tls else b"http"
        connection = ClientConnection(
            self._pipeline, self._loop, self._connections, scheme=scheme, trusted=self._trusted
        )
        return cast(asyncio.Protocol, connection)  # a compiled class has no base of asyncio's, and uvloop needs none

    async def drain(self, settle_s: float, grace_s: float) -> None:
        """Let live replies end, for at most `settle_s + grace_s` seconds; then cut them."""
        assert self._loop is not None
        await asyncio.sleep(settle_s)
        self._pipeline.draining = True
        for connection in tuple(self._connections):
            connection.close_if_idle()
        await self._wait(grace_s, lambda: self.busy)
        for connection in tuple(self._connections):
            connection.cut_exchange(Reason.DRAINING)
        await self._wait(_FLUSH_S, lambda: self.connections)

    async def _wait(self, at_most_s: float, left: Callable[[], int]) -> None:
        # Polled: an event that tells of the last reply's end would be paid for by every request of a lifetime.
        for _ in range(math.ceil(at_most_s / _DRAIN_POLL_S)):
            if not left():
                break
            await asyncio.sleep(_DRAIN_POLL_S)

    async def close(self) -> None:
        """Stop accepting and break what is left."""
        if self._server is None:
            return
        self._server.close()
        for connection in tuple(self._connections):
            connection.cut()
        await self._server.wait_closed()


class _Full(asyncio.Protocol):
    """Closes at once: more sockets than we are allowed to hold."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)
        transport.write(_FULL)
        transport.close()
