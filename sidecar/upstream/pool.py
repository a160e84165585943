"""Connections to engines: the freshest idle one at once, or a new one within the connect deadline.

Last in, first out: the connection used a moment ago is the least likely to have been closed meanwhile, and what the
load does not need falls idle and is closed by `sweep`. uvicorn, which all three engines' fronts run on, closes a
keep-alive connection after 5 s; we close ours before that, so that a request rarely meets a stale one.
"""

import asyncio
import ssl
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol, cast

from sidecar.kernel.ids import EndpointKey
from sidecar.policy.address import parse_url
from sidecar.policy.schema import Endpoint
from sidecar.proxy.patience import Patience
from sidecar.proxy.ports import Recorder, Sink
from sidecar.upstream.connection import EngineConnection

IDLE_S = 4.0
"""uvicorn's keep-alive of 5 s, less a sweep and a round trip."""


class TaskOwner(Protocol):
    """Where connect tasks live: a TaskGroup of main."""

    def create_task(self, coro: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...


_Where = tuple[str, str, bool]


def _where(endpoint: Endpoint) -> _Where:
    """What a connection depends on: two endpoints that agree in this share theirs."""
    return endpoint.url, endpoint.tls_ca, endpoint.tls_verify


class _Target:
    """One address and its idle connections, freshest last."""

    __slots__ = ("_clock", "address", "endpoint", "gone", "idle", "tls")

    def __init__(self, endpoint: Endpoint, clock: Callable[[], float]) -> None:
        self.endpoint = endpoint
        self.address = parse_url(endpoint.url)
        self.idle: list[EngineConnection] = []
        self.tls: ssl.SSLContext | None = None
        self.gone = False
        self._clock = clock

    def rest(self, connection: EngineConnection) -> None:
        """Keep a connection that carries no request now."""
        if self.gone:
            connection.abort()  # the policy moved on while it worked
            return
        connection.idle_since = self._clock()
        self.idle.append(connection)

    def drop(self) -> None:
        """Close what is idle, and keep nothing more."""
        self.gone = True
        for connection in self.idle:
            connection.abort()


class Pool:
    """All connections to all engines."""

    def __init__(self, loop: asyncio.AbstractEventLoop, tasks: TaskOwner, recorder: Recorder) -> None:
        self._loop = loop
        self._tasks = tasks
        self._recorder = recorder
        self._targets: dict[_Where, _Target] = {}
        self._connecting: dict[Sink, asyncio.Task[None]] = {}
        self.open_connections = 0

    @property
    def idle_connections(self) -> int:
        """Connections that carry no request."""
        return sum(len(target.idle) for target in self._targets.values())

    def open(self, key: EndpointKey, endpoint: Endpoint, connect_s: float, sink: Sink, *, fresh: bool = False) -> None:
        """Give `sink` a connection: `on_connected` now if one is idle, else later, or `on_connect_failed`.

        `fresh` asks for a new connection: the last one turned out to be stale.
        """
        where = _where(endpoint)
        target = self._targets.get(where)
        if target is None:
            target = self._targets[where] = _Target(endpoint, self._loop.time)
        idle = target.idle
        while idle:
            connection = idle.pop()
            if fresh:
                # What sat beside a stale connection is most likely stale, too.
                connection.abort()
                continue
            if not connection.closing:
                sink.on_connected(connection)
                return
        self._connecting[sink] = self._tasks.create_task(self._connect(key, target, connect_s, sink))

    def cancel(self, sink: Sink) -> None:
        """Forget a connect under way; its sink hears nothing more."""
        task = self._connecting.pop(sink, None)
        if task is not None:
            task.cancel()

    def sweep(self, now: float) -> None:
        """Close what has been idle too long. `now` in the loop's seconds."""
        for target in self._targets.values():
            idle = target.idle
            fresh = 0
            while fresh < len(idle) and now - idle[fresh].idle_since >= IDLE_S:
                idle[fresh].abort()
                fresh += 1
            if fresh:
                del idle[:fresh]

    def keep_only(self, endpoints: Iterable[Endpoint]) -> None:
        """Close the idle connections to endpoints that policy no longer has."""
        for gone in self._targets.keys() - {_where(endpoint) for endpoint in endpoints}:
            self._targets.pop(gone).drop()

    def let_go(self, before: Iterable[Endpoint], after: Iterable[Endpoint]) -> None:
        """Close the idle connections to what was there before and is no more; who has it still, opens new ones."""
        for gone in {_where(endpoint) for endpoint in before} - {_where(endpoint) for endpoint in after}:
            target = self._targets.pop(gone, None)
            if target is not None:
                target.drop()

    def close(self) -> None:
        """Close every idle connection."""
        self.keep_only(())

    async def _connect(self, key: EndpointKey, target: _Target, connect_s: float, sink: Sink) -> None:
        def on_gone(connection: EngineConnection, poisoned: bool) -> None:
            self.open_connections -= 1
            if poisoned:
                self._recorder.malformed_upstream(key)
            if connection in target.idle:
                target.idle.remove(connection)

        connection = EngineConnection(target.rest, on_gone)
        try:
            async with Patience(connect_s):
                await self._open(target, connection)
        except TimeoutError:
            detail = f"no connection to {key} within {connect_s:g} s"
        except Exception as exc:  # noqa: BLE001 - here a task begins; whatever fails is this connection's failure alone
            detail = f"cannot connect to {key}: {exc}"
        else:
            self.open_connections += 1
            if self._connecting.pop(sink, None) is None:
                connection.abort()
            else:
                sink.on_connected(connection)
            return
        if self._connecting.pop(sink, None) is not None:
            sink.on_connect_failed(detail)

    async def _open(self, target: _Target, connection: EngineConnection) -> None:
        address = target.address
        tls = address.scheme == "https"
        if tls and target.tls is None:
            # Reads the system's certificates: some 35 ms in which streams would stand still.
            target.tls = await asyncio.to_thread(_context, target.endpoint)
        # uvloop asks for the methods only, and a compiled class has no base of asyncio's.
        protocol = cast(asyncio.Protocol, connection)
        try:
            if address.path:
                await self._loop.create_unix_connection(lambda: protocol, address.path)
            else:
                server_hostname = address.host if tls else None
                await self._loop.create_connection(
                    lambda: protocol, address.host, address.port, ssl=target.tls, server_hostname=server_hostname
                )
        except BaseException:
            connection.give_up()
            raise


def _context(endpoint: Endpoint) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=endpoint.tls_ca or None)
    if not endpoint.tls_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["http/1.1"])
    return context
