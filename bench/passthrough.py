"""The floor that the sidecar's cost is measured against: a relay that does nothing but relay.

Same loop, same parser, same shape as the data path (a protocol on either side, kept-alive upstream connections,
bodies of requests held until they are whole), and nothing else: no policy, no choice, no deadline, no observation, no
log. It is a yardstick for trusted load on one machine, not a proxy to be used.
"""

import argparse
import asyncio
import contextlib
import gc
import signal
from typing import cast

import httptools
import uvloop

HOP_BY_HOP = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"te", b"upgrade"))


class Relay:
    """Where to, and the idle upstream connections."""

    def __init__(self, host: str, port: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.host = host
        self.port = port
        self.idle: list[Back] = []
        self.tasks: set[asyncio.Task[None]] = set()

    def send(self, front: "Front", request: bytes) -> None:
        """Send a whole request on an idle connection, or on a new one."""
        while self.idle:
            back = self.idle.pop()
            if not back.transport.is_closing():
                back.carry(front, request)
                return
        task = self.loop.create_task(self._connect(front, request))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _connect(self, front: "Front", request: bytes) -> None:
        try:
            _, back = await self.loop.create_connection(lambda: Back(self), self.host, self.port)
        except OSError:
            front.transport.abort()
            return
        back.carry(front, request)


class Front(asyncio.Protocol):
    """The client's side."""

    __slots__ = ("_body", "_head", "back", "keep_alive", "parser", "relay", "transport")

    transport: asyncio.Transport

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.back: Back | None = None
        self.parser = httptools.HttpRequestParser(self)
        self.keep_alive = True
        self._head: list[bytes] = []
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        back, self.back = self.back, None
        if back is not None:
            back.front = None
            back.transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.transport.abort()

    def pause_writing(self) -> None:
        if self.back is not None:
            self.back.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.back is not None:
            self.back.transport.resume_reading()

    def on_url(self, url: bytes) -> None:
        self._head = [b"%b %b HTTP/1.1\r\n" % (self.parser.get_method(), url)]
        self._body = []

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() not in HOP_BY_HOP:
            self._head.append(b"%b: %b\r\n" % (name, value))

    def on_headers_complete(self) -> None:
        self.keep_alive = self.parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        body = b"".join(self._body)
        self.relay.send(self, b"%bcontent-length: %d\r\n\r\n%b" % (b"".join(self._head), len(body), body))


class Back(asyncio.Protocol):
    """The engine's side."""

    __slots__ = ("_chunked", "_head", "_keep_alive", "_length", "front", "parser", "relay", "transport")

    transport: asyncio.Transport

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.front: Front | None = None
        self.parser = httptools.HttpResponseParser(self)
        self._head: list[bytes] = []
        self._chunked = False
        self._keep_alive = False
        self._length = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def carry(self, front: Front, request: bytes) -> None:
        """Send `request`; its answer goes to `front`."""
        if front.transport.is_closing():
            self.transport.abort()
            return
        self.front = front
        front.back = self
        self.transport.write(request)

    def connection_lost(self, exc: Exception | None) -> None:
        front, self.front = self.front, None
        if front is not None:
            front.back = None
            front.transport.close()

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.abort()

    def on_status(self, phrase: bytes) -> None:
        self._head = [b"HTTP/1.1 %d %b\r\n" % (self.parser.get_status_code(), phrase)]
        self._length = False

    def on_header(self, name: bytes, value: bytes) -> None:
        lower = name.lower()
        if lower == b"content-length":
            self._length = True
        elif lower in HOP_BY_HOP:
            return
        self._head.append(b"%b: %b\r\n" % (name, value))

    def on_headers_complete(self) -> None:
        self._keep_alive = self.parser.should_keep_alive()
        self._chunked = not self._length
        self._head.append(b"transfer-encoding: chunked\r\n\r\n" if self._chunked else b"\r\n")
        if self.front is not None:
            self.front.transport.write(b"".join(self._head))

    def on_body(self, data: bytes) -> None:
        if self.front is not None:
            self.front.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def on_message_complete(self) -> None:
        front, self.front = self.front, None
        if front is not None:
            front.back = None
            if self._chunked:
                front.transport.write(b"0\r\n\r\n")
            if not front.keep_alive:
                front.transport.close()
        if self._keep_alive:
            self.relay.idle.append(self)
        else:
            self.transport.close()


async def serve(port: int, upstream_port: int) -> None:
    loop = asyncio.get_running_loop()
    relay = Relay("127.0.0.1", upstream_port)
    server = await loop.create_server(lambda: Front(relay), "127.0.0.1", port, backlog=4096)
    print(f"passthrough listening on 127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    await stop.wait()
    server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--upstream", type=int, required=True, help="port on 127.0.0.1")
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, contextlib.suppress(KeyboardInterrupt):
        runner.run(serve(args.port, args.upstream))


if __name__ == "__main__":
    main()
