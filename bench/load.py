"""The load: raw protocols that send what is prepared and count what comes back, bounded in number and time.

No client library, since its cost would be many times that of what is measured, on the core that the engine shares.
Answers are checked for what a proxy can get wrong cheaply enough to be checked here: status, length, event count.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import cast

HEAD_END = b"\r\n\r\n"


def request(body: bytes, number: int) -> bytes:
    """A chat POST as a client of an LLM would send it."""
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: engine:8000\r\nuser-agent: bench/1\r\naccept: */*\r\n"
        b"content-type: application/json\r\nauthorization: Bearer sk-bench\r\nx-request-id: b%d\r\n"
        b"x-session-id: s%d\r\ncontent-length: %d\r\n\r\n%b" % (number, number, len(body), body)
    )


def chat_body(*, stream: bool, max_tokens: int, size: int = 0) -> bytes:
    """A chat request, its prompt filled up so that the body has `size` bytes."""
    ask = {"model": "demo", "stream": stream, "max_tokens": max_tokens, "user": "u1"}
    ask["messages"] = [{"role": "user", "content": ""}]
    fill = max(0, size - len(json.dumps(ask)))
    ask["messages"] = [{"role": "user", "content": ("lorem ipsum " * (fill // 12 + 1))[:fill]}]
    return json.dumps(ask).encode()


@dataclass
class Tally:
    """What came back so far, of all connections. `failures` keeps the first few in words."""

    requests: int = 0
    events: int = 0
    started: int = 0
    bad: int = 0
    failures: list[str] = field(default_factory=list)
    stopping: bool = False

    def fail(self, what: str) -> None:
        if self.stopping:
            return
        self.bad += 1
        if len(self.failures) < 5:
            self.failures.append(what)


class Poster(asyncio.Protocol):
    """One kept-alive connection: the next request when the answer to the last is whole."""

    transport: asyncio.Transport
    period_s = 0.0
    """From request to request, 0 for at once."""

    def __init__(self, tally: Tally, data: bytes) -> None:
        self._tally = tally
        self._data = data
        self._missing = 0
        self._partial = b""
        self._due = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._due = asyncio.get_running_loop().time()
        self._send()

    def _send(self) -> None:
        if not self._tally.stopping and not self.transport.is_closing():
            self.transport.write(self._data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._tally.fail(f"connection lost: {exc!r}")

    def data_received(self, data: bytes) -> None:
        if self._missing == 0:
            if self._partial:
                data = self._partial + data
                self._partial = b""
            end = data.find(HEAD_END)
            if end < 0:
                self._partial = data
                return
            at = data.lower().find(b"content-length:", 0, end)
            if not data.startswith(b"HTTP/1.1 200 ") or at < 0:
                self._tally.fail(repr(data[:200]))
                self.transport.abort()
                return
            length = int(data[at + 15 : data.index(b"\r\n", at)])
            self._missing = end + 4 + length - len(data)
        else:
            self._missing -= len(data)
        if self._missing < 0:
            self._tally.fail("more bytes than announced")
            self.transport.abort()
        elif self._missing == 0:
            self._tally.requests += 1
            if self.period_s == 0.0:
                self._send()
                return
            # From when it was due: a late answer must not lower the rate.
            loop = asyncio.get_running_loop()
            self._due = max(self._due + self.period_s, loop.time())
            loop.call_at(self._due, self._send)


class PacedPoster(Poster):
    """The same at an even pace: a sidecar mostly idles, and an idle process pays more for each wake-up."""

    period_s = 0.128


class Listener(asyncio.Protocol):
    """One SSE stream: counts its events over any split."""

    transport: asyncio.Transport

    def __init__(self, tally: Tally, data: bytes) -> None:
        self._tally = tally
        self._data = data
        self._headed = False
        self._newline = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self._data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._tally.fail(f"stream ended: {exc!r}")

    def data_received(self, data: bytes) -> None:
        tally = self._tally
        if not self._headed:
            self._headed = True
            tally.started += 1
            if not data.startswith(b"HTTP/1.1 200 "):
                tally.fail(repr(data[:200]))
        tally.events += data.count(b"\n\n")
        if self._newline and data[:1] == b"\n":
            tally.events += 1
        self._newline = data.endswith(b"\n") and not data.endswith(b"\r\n") and not data.endswith(b"\n\n")


class Load:
    """Connections of one kind against one port. `open` them, look at `tally` over time, `close` them."""

    def __init__(self, port: int, kind: type[Poster] | type[Listener], body: bytes) -> None:
        self.tally = Tally()
        self._port = port
        self._kind = kind
        self._body = body
        self._protocols: list[Poster | Listener] = []

    async def open(self, connections: int, over_s: float = 0.0) -> None:
        """Connect, spread evenly over `over_s` seconds so that paced streams do not tick together."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        for number in range(connections):
            due = began + over_s * number / connections
            if due > loop.time():
                await asyncio.sleep(due - loop.time())
            make: Callable[[], Poster | Listener] = partial(self._kind, self.tally, request(self._body, number))
            _, protocol = await loop.create_connection(make, "127.0.0.1", self._port)
            self._protocols.append(protocol)

    async def close(self) -> None:
        """Abort all connections and let the loop forget them."""
        self.tally.stopping = True
        for protocol in self._protocols:
            protocol.transport.abort()
        self._protocols.clear()
        await asyncio.sleep(0.1)
