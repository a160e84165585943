"""Raw ends for black-box tests: a client and an upstream that show every byte and every way a connection ends.

On bare `asyncio.Protocol`s and not on a client library, since the tests ask what libraries hide: the exact bytes, the
framing, FIN or RST, and who closed first. The parser here is strict where the one under test must be: anything but
canonical HTTP/1.1 from the sidecar fails the test. Bytes are sent whole or one by one (`split`), with a turn of the
loop between; nothing here sleeps for a time.
"""

import asyncio
import contextlib
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, cast

LIMIT_S = 5.0
"""How long a test waits for what must come; generous, since it is spent only where a test fails."""

PIECE_BYTES = 1 << 20
"""So much of a long body must come within that time."""

Framing = Literal["none", "length", "chunked", "close"]


class Gone(Exception):
    """The other side ended the connection where more was expected."""


class Malformed(AssertionError):
    """The other side sent what a strict HTTP/1.1 reader refuses."""


@dataclass
class Message:
    """One parsed HTTP message. `raw` is all its bytes; `interim` holds the 1xx that came before a response."""

    start: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes = b""
    framing: Framing = "none"
    chunks: list[bytes] = field(default_factory=list)
    trailers: list[tuple[bytes, bytes]] = field(default_factory=list)
    raw: bytes = b""
    interim: list["Message"] = field(default_factory=list)

    @property
    def status(self) -> int:
        return int(self.start.split(b" ", 2)[1])

    @property
    def method(self) -> bytes:
        return self.start.split(b" ", 1)[0]

    @property
    def target(self) -> bytes:
        return self.start.split(b" ", 1)[1].rsplit(b" ", 1)[0]

    def values(self, name: bytes) -> list[bytes]:
        """Every value of a header, in order; the name in any case."""
        return [value for key, value in self.headers if key.lower() == name.lower()]

    def header(self, name: bytes) -> bytes:
        """The only value of a header; the test fails if there is none or more than one."""
        found = self.values(name)
        assert len(found) == 1, (name, found, self.headers)
        return found[0]


class Wire(asyncio.Protocol):
    """One end of a connection, with everything that ever came in over it."""

    def __init__(self, split: bool = False) -> None:
        self.split = split
        self.received = bytearray()
        self.reads: list[int] = []
        self.fin = False
        self.lost = False
        self.error: Exception | None = None
        self.writable = True
        self._at = 0
        self._waiters: list[asyncio.Future[None]] = []
        self._transport: asyncio.Transport | None = None

    @property
    def transport(self) -> asyncio.Transport:
        assert self._transport is not None
        return self._transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        raw = self._transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._wake()

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.reads.append(len(data))
        self._wake()

    def eof_received(self) -> bool:
        self.fin = True
        self._wake()
        # Staying half open shows whether the peer closed or only half-closed; TLS cannot stay half open.
        return self.transport.get_extra_info("sslcontext") is None

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self.error = exc
        self._wake()

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True
        self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    @property
    def ports(self) -> tuple[int, int] | None:
        """Own and other port, for what /proc/net/tcp knows; None unless plain TCP over IPv4."""
        if self.transport.get_extra_info("sslcontext") is not None:
            return None
        match self.transport.get_extra_info("sockname"), self.transport.get_extra_info("peername"):
            case (str(), int(own)), (str(), int(other)):
                return own, other
        return None

    @property
    def ended(self) -> bool:
        return self.fin or self.lost

    @property
    def unread(self) -> bytes:
        """What came in and was not yet taken by a reading method."""
        return bytes(self.received[self._at :])

    async def changed(self) -> None:
        """Waits until anything happens on this connection."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    async def until(self, ready: Callable[[], bool], what: str) -> None:
        """Waits until `ready()`; looked at whenever something happens on this connection. Fails after LIMIT_S."""
        try:
            async with asyncio.timeout(LIMIT_S):
                while not ready():
                    await self.changed()
        except TimeoutError:
            state = f"fin={self.fin} lost={self.lost} error={self.error!r}"
            raise AssertionError(f"waited in vain for {what}; {state}; unread {self.unread[:400]!r}") from None

    async def _more(self, needed: int, what: str) -> None:
        while not self.ended and (there := len(self.received) - self._at) < needed:
            await self._reached(min(needed, there + PIECE_BYTES), what)
        if len(self.received) - self._at < needed:
            raise Gone(f"{what}: connection ended, unread {self.unread[:400]!r}, error {self.error!r}")

    async def _reached(self, count: int, what: str) -> None:
        await self.until(lambda: len(self.received) - self._at >= count or self.ended, what)

    async def exactly(self, count: int) -> bytes:
        """The next `count` bytes; Gone if the connection ends before."""
        await self._more(count, f"{count} bytes")
        return self._take(count)

    async def line(self) -> bytes:
        """The next line without its CRLF; a bare LF or CR in it is malformed."""
        seen = 0
        while (end := self.received.find(b"\n", self._at + seen)) < 0:
            seen = len(self.received) - self._at
            await self._more(seen + 1, "a line")
        line = self._take(end + 1 - self._at)
        if not line.endswith(b"\r\n") or b"\r" in line[:-2]:
            raise Malformed(f"not a CRLF line: {line!r}")
        return line[:-2]

    async def seen(self, marker: bytes) -> None:
        """Waits until `marker` came in, taking nothing."""
        await self.until(lambda: marker in self.received or self.ended, repr(marker))
        if marker not in self.received:
            raise Gone(f"{marker!r} never came, unread {self.unread[:400]!r}, error {self.error!r}")

    def _take(self, count: int) -> bytes:
        data = bytes(self.received[self._at : self._at + count])
        self._at += count
        return data

    async def rest(self) -> bytes:
        """All bytes up to the end of the connection, however it ends."""
        await self.until(lambda: self.ended, "the end of the connection")
        return self._take(len(self.received) - self._at)

    async def gone(self) -> None:
        """Waits until the other side has closed wholly: a FIN that goes on reading (a half-close) is not enough."""
        await self.until(lambda: self.ended, "a close")
        for _ in range(500):
            if self.lost:
                return
            # A closed socket answers data with RST; a half-closed one takes it.
            self.transport.write(b"?")
            await asyncio.sleep(0.002)
        raise AssertionError("the other side half-closed and goes on reading")

    async def send(self, data: bytes, *, split: bool | None = None) -> None:
        """Writes `data`, whole or byte by byte; bytes for a connection that is gone are dropped."""
        if not (self.split if split is None else split):
            if not self.lost:
                self.transport.write(data)
            return
        for at in range(len(data)):
            if self.lost:
                return
            self.transport.write(data[at : at + 1])
            # Two turns: one in which the loop sends, one in which it reads.
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    def half_close(self) -> None:
        """FIN, and go on reading."""
        if not self.lost:
            self.transport.write_eof()

    def close(self) -> None:
        """Close both directions; the kernel says FIN, or RST if bytes are unread."""
        self.transport.close()

    def reset(self) -> None:
        """RST at once."""
        raw = self.transport.get_extra_info("socket")
        if raw is not None and not self.lost:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    async def abort(self) -> None:
        """Drops the connection and waits until the loop has let go of it."""
        self.transport.abort()
        await self.until(lambda: self.lost, "its own end")

    async def settled(self, turns: int = 20) -> None:
        """Lets the loop turn, so that what was sent so far has been read by whoever is in this process."""
        for _ in range(turns):
            await asyncio.sleep(0)

    # --- HTTP, read strictly ---------------------------------------------------------------------------------------

    async def head(self) -> Message:
        """A start line and headers."""
        begin = self._at
        start = await self.line()
        headers = await self._fields()
        return Message(start, headers, raw=bytes(self.received[begin : self._at]))

    async def _fields(self) -> list[tuple[bytes, bytes]]:
        fields = []
        while line := await self.line():
            name, colon, value = line.partition(b":")
            if not colon or not name or name != name.strip() or b" " in name:
                raise Malformed(f"not a header: {line!r}")
            fields.append((name, value.strip(b" \t")))
        return fields

    async def body(self, message: Message, framing: Framing) -> Message:
        """Reads the body of a head that was read before; fills the message in."""
        begin = self._at
        message.framing = framing
        match framing:
            case "length":
                message.body = await self.exactly(int(message.header(b"content-length")))
            case "chunked":
                await self._chunked(message)
            case "close":
                message.body = await self.rest()
            case "none":
                pass
        message.raw += bytes(self.received[begin : self._at])
        return message

    async def _chunked(self, message: Message) -> None:
        while True:
            chunk = await self.chunk()
            if not chunk:
                break
            message.chunks.append(chunk)
            message.body += chunk
        message.trailers = await self._fields()

    async def chunk(self) -> bytes:
        """The next chunk's payload; empty for the last one, whose trailers stay unread."""
        line = await self.line()
        size, *_ = line.split(b";")
        if not size or size.strip(b"0123456789abcdefABCDEF"):
            raise Malformed(f"not a chunk size: {line!r}")
        count = int(size, 16)
        if count == 0:
            return b""
        payload = await self.exactly(count)
        if await self.line() != b"":
            raise Malformed("chunk payload not followed by CRLF")
        return payload


def framing_of(message: Message, *, response_to: bytes | None = None) -> Framing:
    """How the body that follows `message` is framed; fails on a head with contradictory framing."""
    encodings = message.values(b"transfer-encoding")
    lengths = message.values(b"content-length")
    if response_to is not None and (response_to == b"HEAD" or message.status in (204, 304) or message.status < 200):
        return "none"
    if encodings and lengths:
        raise Malformed(f"content-length beside transfer-encoding: {message.headers}")
    if encodings:
        assert [value.lower() for value in encodings] == [b"chunked"], encodings
        return "chunked"
    if lengths:
        assert len(lengths) == 1 and lengths[0].isdigit(), lengths
        return "length"
    return "none" if response_to is None else "close"


class Client(Wire):
    """The downstream end."""

    async def response(self, method: bytes = b"GET") -> Message:
        """The next whole final response, with the interim ones before it."""
        interim: list[Message] = []
        while True:
            message = await self.response_head()
            if message.status >= 200 or message.status == 101:
                break
            interim.append(message)
        message.interim = interim
        if message.status == 101:
            return message
        return await self.body(message, framing_of(message, response_to=method))

    async def response_head(self) -> Message:
        """The next head, interim or final."""
        message = await self.head()
        version, status, _ = message.start.split(b" ", 2)
        assert version == b"HTTP/1.1" and len(status) == 3 and status.isdigit(), message.start
        return message

    async def ask(self, request: bytes, method: bytes = b"GET") -> Message:
        """Sends one request and reads its response."""
        await self.send(request)
        return await self.response(method)


@contextlib.asynccontextmanager
async def connect(
    port: int,
    *,
    split: bool = False,
    rcvbuf: int = 0,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[Client]:
    """A client on a connection of its own, aborted at the end. `rcvbuf` bounds its kernel buffer (0: as it is)."""
    raw = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    raw.setblocking(False)
    if rcvbuf:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(raw, ("127.0.0.1", port))
    _, client = await loop.create_connection(
        lambda: Client(split), sock=raw, ssl=tls, server_hostname="localhost" if tls else None
    )
    try:
        yield client
    finally:
        await client.abort()


class Peer(Wire):
    """One connection that an `Upstream` accepted."""

    def __init__(self, upstream: "Upstream") -> None:
        super().__init__(upstream.split)
        self._upstream = upstream
        self.requests: list[Message] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._upstream.start(self)

    def eof_received(self) -> bool:
        if self.ports is not None and is_held(*reversed(self.ports)):
            self._upstream.half_closes += 1
        return super().eof_received()

    async def request_head(self) -> Message:
        """The next request's head; its body is read by `request_body`."""
        # No limit: whoever keeps a connection need not have anything to ask.
        while not (self.unread or self.ended):
            await self.changed()
        message = await self.head()
        method, target, version = message.start.split(b" ", 2)
        assert method and target and version in (b"HTTP/1.1", b"HTTP/1.0"), message.start
        self.requests.append(message)
        self._upstream.requests.append(message)
        return message

    async def request_body(self, message: Message) -> Message:
        return await self.body(message, framing_of(message))

    async def request(self) -> Message:
        """The next whole request."""
        return await self.request_body(await self.request_head())


Script = Callable[[Peer], Awaitable[None]]

_CHECKS = (b"GET /health ", b"GET /metrics ", b"GET /v1/models ", b"GET /ping ", b"GET /load ")


class Upstream:
    """A fake engine that plays a script on every connection, and keeps every byte it was sent.

    The sidecar's own health checks are answered 404 and counted nowhere, so that `connections` and `requests` are
    A script ends by returning (the connection stays open) or by `Gone`; any other exception fails the test.
    """

    def __init__(
        self,
        script: Script,
        *,
        split: bool = False,
        unix: Path | None = None,
        tls: ssl.SSLContext | None = None,
        sndbuf: int = 0,
        rcvbuf: int = 0,
        eager: bool = False,
    ) -> None:
        self.script = script
        self.split = split
        self.connections: list[Peer] = []
        self.requests: list[Message] = []
        self.checks = 0
        self.port = 0
        self._unix = unix
        self._tls = tls
        self._sndbuf = sndbuf
        self._rcvbuf = rcvbuf
        self._eager = eager
        self._server: asyncio.Server | None = None
        self._peers: list[Peer] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._failures: list[BaseException] = []
        self.half_closes = 0

    @property
    def url(self) -> str:
        if self._unix is not None:
            return f"unix://{self._unix}"
        return f"{'https' if self._tls else 'http'}://{'localhost' if self._tls else '127.0.0.1'}:{self.port}"

    @property
    def key(self) -> str:
        """What breakers and `x-sidecar-endpoint` call this upstream."""
        return str(self._unix) if self._unix is not None else self.url.partition("://")[2]

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        if self._unix is not None:
            self._server = await loop.create_unix_server(lambda: Peer(self), str(self._unix))
            return self
        raw = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if self._sndbuf:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._sndbuf)
        if self._rcvbuf:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._rcvbuf)
        raw.bind(("127.0.0.1", self.port))
        self._server = await loop.create_server(lambda: Peer(self), sock=raw, ssl=self._tls, backlog=512)
        self.port = raw.getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_listening()
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        for peer in self._peers:
            await peer.abort()
        if self._failures and (error is None or isinstance(error, Gone)):
            raise self._failures[0]
        if error is None:
            assert self.half_closes == 0, "an upstream socket was half-closed: FIN, and still held open"

    async def listen_again(self) -> None:
        """Takes connections again on the same port, after `stop_listening` or `die`."""
        await self.__aenter__()

    def stop_listening(self) -> None:
        """New connects are refused from now on; accepted connections live on."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def die(self) -> None:
        """The process is gone: connects are refused, every connection is reset."""
        self.stop_listening()
        for peer in self._peers:
            if not peer.lost:
                peer.reset()

    def start(self, peer: Peer) -> None:
        self._peers.append(peer)
        self._tasks.append(asyncio.get_running_loop().create_task(self._play(peer)))

    async def _play(self, peer: Peer) -> None:
        try:
            if not self._eager and await self._is_check(peer):
                self.checks += 1
                await peer.send(
                    b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n", split=False
                )
                peer.close()
                return
            self.connections.append(peer)
            await self.script(peer)
        except Gone:
            pass
        except Exception as error:  # noqa: BLE001 - whatever it is, the test must see it
            self._failures.append(error)
            peer.transport.abort()

    async def _is_check(self, peer: Peer) -> bool:
        def decided() -> bool:
            begin = bytes(peer.received[:32])
            return peer.ended or not any(check.startswith(begin) for check in _CHECKS)

        def known() -> bool:
            return bytes(peer.received[:32]).startswith(_CHECKS)

        # No limit: a connection made ahead of need is no client's and stays here for good.
        while not (known() or decided()):
            await peer.changed()
        return known()


def answers(*responses: bytes) -> Script:
    """A script: one response per request in turn, the last one again and again; every request is read whole."""

    async def play(peer: Peer) -> None:
        turn = 0
        while True:
            await peer.request()
            await peer.send(responses[min(turn, len(responses) - 1)])
            turn += 1

    return play


def turns(*scripts: Script) -> Script:
    """A script: the first connection plays the first script, and so on; the last plays on all later ones."""
    count = 0

    async def play(peer: Peer) -> None:
        nonlocal count
        script = scripts[min(count, len(scripts) - 1)]
        count += 1
        await script(peer)

    return play


def one_by_one(*behaviours: Script) -> Script:
    """A script: each request, on whatever connection, is answered by the next behaviour; the last one repeats."""
    count = 0

    async def play(peer: Peer) -> None:
        nonlocal count
        while True:
            await peer.request()
            behaviour = behaviours[min(count, len(behaviours) - 1)]
            count += 1
            await behaviour(peer)

    return play


def says(data: bytes) -> Script:
    """A behaviour: sends `data`."""

    async def behave(peer: Peer) -> None:
        await peer.send(data)

    return behave


def response(
    body: bytes = b"",
    *,
    status: bytes = b"200 OK",
    headers: Iterable[bytes] = (),
    length: bool = True,
) -> bytes:
    """The bytes of a response framed by length."""
    lines = [b"HTTP/1.1 " + status, *headers]
    if length:
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def chunked(*parts: bytes, trailers: Sequence[bytes] = (), end: bool = True) -> bytes:
    """The bytes of a chunked body, `end` with its last chunk."""
    body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    if end:
        body += b"0\r\n" + b"".join(line + b"\r\n" for line in trailers) + b"\r\n"
    return body


def request(
    target: bytes = b"/x",
    *,
    method: bytes = b"GET",
    headers: Iterable[bytes] = (),
    body: bytes | None = None,
    host: bytes = b"engine.test",
    version: bytes = b"HTTP/1.1",
) -> bytes:
    """The bytes of a request; a body is framed by length."""
    lines = [b"%b %b %b" % (method, target, version), b"Host: " + host, *headers]
    if body is not None:
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + (body or b"")


@contextlib.asynccontextmanager
async def awake() -> AsyncIterator[Callable[[], float]]:
    """How long this process has run since, in seconds: `ran()`, to be asked within the context.

    What the machine took from it is nobody's wait: a loop that is late in waking counts by what it worked meanwhile.
    """
    loop = asyncio.get_running_loop()
    began = at = loop.time()
    worked = time.process_time()
    lost_s = 0.0

    def late_s() -> float:
        late_s = loop.time() - at - 0.01 - (time.process_time() - worked)
        return late_s if late_s > 0.02 else 0.0

    async def watch() -> None:
        nonlocal at, worked, lost_s
        while True:
            await asyncio.sleep(0.01)
            lost_s += late_s()
            at, worked = loop.time(), time.process_time()

    watching = loop.create_task(watch())
    try:
        yield lambda: loop.time() - began - lost_s - late_s()
    finally:
        watching.cancel()
        await asyncio.wait({watching})


async def eventually(ready: Callable[[], bool], what: str) -> None:
    """Waits, by polling each turn and then each millisecond, until `ready()`; fails after LIMIT_S."""
    loop = asyncio.get_running_loop()
    end = loop.time() + LIMIT_S
    for _ in range(50):
        if ready():
            return
        await asyncio.sleep(0)
    while not ready():
        assert loop.time() < end, f"waited in vain for {what}"
        await asyncio.sleep(0.001)


def _row(local: int, remote: int) -> list[str]:
    """The columns of /proc/net/tcp for a socket between two loopback ports; empty if there is none."""
    ends = f" 0100007F:{local:04X} 0100007F:{remote:04X} "
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        if ends in line:
            return line.split()
    return []


def kernel_holds(local: int, remote: int) -> tuple[int, int]:
    """Bytes in one socket's kernel queues, (unsent or unacknowledged, unread), by its own and its other port.

    From /proc/net/tcp: exact, where socket buffer sizes are only bounds. (0, 0) once it is closed.
    """
    row = _row(local, remote)
    if not row:
        return 0, 0
    sent, _, unread = row[4].partition(":")
    return int(sent, 16), int(unread, 16)


def is_held(local: int, remote: int) -> bool:
    """Whether a process still has that socket open: tells a half-close from a close at the moment of its FIN."""
    row = _row(local, remote)
    return bool(row) and row[9] != "0"
