"""Connections to engines: the freshest idle one at once, or a new one within the connect deadline.

Last in, first out: the connection used a moment ago is the least likely to have been closed meanwhile, and what the
load does not need falls idle and is closed by `sweep`. uvicorn, which all three engines' fronts run on, closes a
keep-alive connection after 5 s; we close ours before that, so that a request rarely meets a stale one.
"""

import asyncio
import ssl
from collections.abc import Coroutine
from typing import Any, Protocol
from urllib.parse import urlsplit

from sidecar.kernel.ids import EndpointKey
from sidecar.policy.schema import Endpoint
from sidecar.proxy.ports import Recorder, Sink
from sidecar.upstream.connection import EngineConnection

IDLE_S = 4.0
"""uvicorn's keep-alive of 5 s, less a sweep and a round trip."""


class TaskOwner(Protocol):
    """Where connect tasks live: a TaskGroup of main."""

    def create_task(self, coro: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...


class _Target:
    """One endpoint's address and its idle connections, freshest last."""

    __slots__ = ("endpoint", "host", "idle", "path", "port", "tls")

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.idle: list[EngineConnection] = []
        self.tls: ssl.SSLContext | None = None
        url = urlsplit(endpoint.url)
        self.path = url.path if url.scheme == "unix" else ""
        self.host = url.hostname or ""
        self.port = url.port or (443 if url.scheme == "https" else 80)
        if url.scheme == "https":
            self.tls = _context(endpoint)


class Pool:
    """All connections to all engines."""

    def __init__(self, loop: asyncio.AbstractEventLoop, tasks: TaskOwner, recorder: Recorder) -> None:
        self._loop = loop
        self._tasks = tasks
        self._recorder = recorder
        self._targets: dict[EndpointKey, _Target] = {}
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
        target = self._targets.get(key)
        if target is None or target.endpoint is not endpoint:
            target = self._retarget(key, target, endpoint)
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

    def keep_only(self, keys: set[EndpointKey]) -> None:
        """Close the idle connections of endpoints that policy no longer has."""
        for key in self._targets.keys() - keys:
            for connection in self._targets.pop(key).idle:
                connection.abort()

    def close(self) -> None:
        """Close every idle connection."""
        self.keep_only(set())

    def _retarget(self, key: EndpointKey, old: _Target | None, endpoint: Endpoint) -> _Target:
        target = _Target(endpoint)
        if old is not None:
            if old.endpoint == endpoint:
                target.idle = old.idle
            else:
                for connection in old.idle:
                    connection.abort()
        self._targets[key] = target
        return target

    async def _connect(self, key: EndpointKey, target: _Target, connect_s: float, sink: Sink) -> None:
        def on_idle(connection: EngineConnection) -> None:
            current = self._targets.get(key)
            if current is None or current.idle is not target.idle:
                connection.abort()  # the policy moved on while it worked
                return
            connection.idle_since = self._loop.time()
            target.idle.append(connection)

        def on_gone(connection: EngineConnection, poisoned: bool) -> None:
            self.open_connections -= 1
            if poisoned:
                self._recorder.malformed_upstream(key)
            if connection in target.idle:
                target.idle.remove(connection)

        def protocol() -> EngineConnection:
            return EngineConnection(on_idle, on_gone)

        try:
            async with asyncio.timeout(connect_s):
                if target.path:
                    _, connection = await self._loop.create_unix_connection(protocol, target.path)
                else:
                    _, connection = await self._loop.create_connection(
                        protocol,
                        target.host,
                        target.port,
                        ssl=target.tls,
                        server_hostname=target.host if target.tls else None,
                    )
        except TimeoutError:
            detail = f"no connection to {key} within {connect_s:g} s"
        except (OSError, ssl.SSLError) as exc:
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


def _context(endpoint: Endpoint) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=endpoint.tls_ca or None)
    if not endpoint.tls_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["http/1.1"])
    return context
