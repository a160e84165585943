"""Each fake of a port and the real thing keep one contract: the real ones on loopback sockets, the fakes on nothing.

What the tests of the request path believe of links, connectors, clients and timers is said here, once for both.
"""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

import pytest
import uvloop

from sidecar.downstream.listener import Listener
from sidecar.kernel.errors import Reason, Refusal
from sidecar.kernel.ids import EndpointKey
from sidecar.policy.schema import Endpoint
from sidecar.proxy import ports
from sidecar.proxy.watchdog import Timers
from sidecar.upstream.pool import Pool
from tests.clock import Clock
from tests.fuzz.test_http import Heard
from tests.harness import Client, Gone, connect, eventually, request
from tests.proxy.bench import Bench
from tests.proxy.fakes import FakeClient, FakeConnector, FakeLink, FakeRecorder, head_of

ASK = b"GET / HTTP/1.1\r\nhost: h\r\n\r\n"
QUIET_TURNS = 30
"""Turns of the loop in which whatever was on its way has arrived; loopback sockets need two or three."""


async def quiet() -> None:
    for _ in range(QUIET_TURNS):
        await asyncio.sleep(0)


class Sink(Heard):
    """Hears of connecting, too."""

    def __init__(self) -> None:
        super().__init__()
        self.link: ports.Link | None = None
        self.connected: list[str] = []

    def on_connected(self, link: ports.Link) -> None:
        self.connected.append("connected")
        self.link = link

    def on_connect_failed(self, detail: str) -> None:
        assert detail
        self.connected.append("failed")

    def on_upload_paused(self) -> None:
        self.events.append(("upload paused",))

    @property
    def kinds(self) -> list[str]:
        return [str(event[0]) for event in self.events]


# --- links and connectors ---------------------------------------------------------------------------------------------


class Engines(Protocol):
    """Where links lead: a connector, and the far end of its newest link."""

    connector: ports.Connector

    async def granted(self) -> None:
        """Whoever asked is connected."""

    def ask(self, sink: Sink, *, fresh: bool = False) -> None: ...

    def ask_nobody(self, sink: Sink) -> None: ...

    async def refused(self) -> None: ...

    async def act(self, what: str) -> None: ...


BODY = b"data: x\n\n"


class FakeEngines:
    """Everything happens when it is said."""

    def __init__(self) -> None:
        self.fake = FakeConnector()
        self.fake.later = True
        self.connector: ports.Connector = self.fake
        self._idle = False

    def ask(self, sink: Sink, *, fresh: bool = False) -> None:
        self.connector.open(EndpointKey("e:1"), Endpoint(url="http://e:1"), 5.0, sink, fresh=fresh)
        self._fresh = fresh

    ask_nobody = ask

    async def granted(self) -> None:
        self.fake.connect(used=self._idle and not self._fresh)

    async def refused(self) -> None:
        self.fake.refuse()

    async def act(self, what: str) -> None:
        link: FakeLink = self.fake.link
        match what:
            case "informs":
                link.informs()
            case "heads":
                link.heads()
            case "says":
                link.says(BODY)
            case "ends":
                link.ends(b"x-t: 1\r\n")
                self._idle = True
            case "loses":
                link.lost()
            case "rubbish":
                link.talks_rubbish()
            case "tunnels":
                link.tunnels(b"early")
            case "tunnels on":
                link.tunnels_on(b"late")
            case _:
                raise AssertionError(what)


class RealEngines:
    """A pool, and a server that says what it is told to."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.loop = asyncio.get_running_loop()
        self.pool = Pool(self.loop, tasks, FakeRecorder())
        self.connector: ports.Connector = self.pool
        self.ends: list[asyncio.StreamWriter] = []
        self.asked: list[Sink] = []
        self.endpoint: Endpoint
        self.nobody: Endpoint

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.ends.append(writer)

    def _ask(self, endpoint: Endpoint, sink: Sink, fresh: bool) -> None:
        self.asked.append(sink)
        self.connector.open(EndpointKey("e:1"), endpoint, 5.0, sink, fresh=fresh)

    def ask(self, sink: Sink, *, fresh: bool = False) -> None:
        self._ask(self.endpoint, sink, fresh)

    def ask_nobody(self, sink: Sink) -> None:
        self._ask(self.nobody, sink, False)

    async def granted(self) -> None:
        sink = self.asked[-1]
        if sink.link is None:
            before = len(self.ends)
            await eventually(lambda: bool(sink.connected), "the pool's answer")
            await eventually(lambda: len(self.ends) > before or sink.link is None, "the engine's end")
        await quiet()

    async def refused(self) -> None:
        sink = self.asked[-1]
        await eventually(lambda: bool(sink.connected), "the pool's answer")

    async def act(self, what: str) -> None:
        end = self.ends[-1]
        if end.transport.is_closing():
            return  # who broke the connection hears nothing more
        match what:
            case "informs":
                end.write(b"HTTP/1.1 103 Early\r\n\r\n")
            case "heads":
                end.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            case "says":
                end.write(b"%x\r\n%b\r\n" % (len(BODY), BODY))
            case "ends":
                end.write(b"0\r\nx-t: 1\r\n\r\n")
            case "loses":
                raw = end.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.transport.abort()
            case "rubbish":
                end.write(b"\0\0\0")
            case "tunnels":
                end.write(b"HTTP/1.1 101 X\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\nearly")
            case "tunnels on":
                end.write(b"late")
            case _:
                raise AssertionError(what)
        await quiet()


@asynccontextmanager
async def fake_engines() -> AsyncIterator[Engines]:
    yield FakeEngines()


@asynccontextmanager
async def real_engines() -> AsyncIterator[Engines]:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody = unused.getsockname()[1]
    async with asyncio.TaskGroup() as tasks:
        engines = RealEngines(tasks)
        server = await asyncio.start_server(engines.accept, "127.0.0.1", 0)
        engines.endpoint = Endpoint(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        engines.nobody = Endpoint(url=f"http://127.0.0.1:{nobody}")
        try:
            yield engines
        finally:
            for sink in engines.asked:
                if sink.link is not None:
                    sink.link.abort()
            engines.pool.close()
            for end in engines.ends:
                end.transport.abort()
            server.close()
            await quiet()
    await eventually(lambda: engines.pool.open_connections == 0, "every connection to end")


WORLDS = pytest.mark.parametrize("world", [fake_engines, real_engines], ids=["fake", "real"])
World = Callable[[], AbstractAsyncContextManager[Engines]]


async def lent(engines: Engines, *, upgrade: bool = False) -> tuple[Sink, ports.Link]:
    """A link on which a request was sent."""
    sink = Sink()
    engines.ask(sink)
    await engines.granted()
    link = sink.link
    assert link is not None and sink.connected == ["connected"]
    link.send(sink, ASK, b"", head_only=False, upgrade=upgrade)
    return sink, link


HEARD: list[tuple[str, list[str], list[tuple[object, ...]]]] = [
    ("a whole answer", ["informs", "heads", "says", "says", "ends"],
     [("informational",), ("head",), ("body", BODY * 2), ("end", [b"x-t: 1\r\n"])]),
    ("nothing after an end", ["heads", "ends", "says", "loses"], [("head",), ("end", [b"x-t: 1\r\n"])]),
    ("a loss before the head", ["loses"], [("lost",)]),
    ("a loss in the body", ["heads", "says", "loses"], [("head",), ("body", BODY), ("lost",)]),
    ("rubbish for a head", ["rubbish"], [("bad",)]),
    ("rubbish in the body", ["heads", "rubbish"], [("head",), ("bad",)]),
    ("nothing after rubbish", ["rubbish", "heads", "says"], [("bad",)]),
]  # fmt: skip


@WORLDS
@pytest.mark.parametrize(("acts", "wanted"), [case[1:] for case in HEARD], ids=[case[0] for case in HEARD])
async def test_a_link_tells_its_sink(world: World, acts: list[str], wanted: list[tuple[object, ...]]) -> None:
    async with world() as engines:
        sink, link = await lent(engines)
        assert not link.received
        for act in acts:
            await engines.act(act)
        await eventually(lambda: len(sink.events) >= len(wanted), "all events")
        await quiet()
        assert [event[: len(want)] for event, want in zip(sink.events, wanted, strict=True)] == wanted
        assert link.received is (acts[0] != "loses")


@WORLDS
async def test_an_aborted_link_tells_its_sink_nothing_more(world: World) -> None:
    async with world() as engines:
        sink, link = await lent(engines)
        await engines.act("heads")
        link.abort()
        for act in ("says", "ends", "loses"):
            await engines.act(act)
        assert sink.kinds == ["head"]


@WORLDS
async def test_a_paused_link_holds_back_and_a_resumed_one_tells_all(world: World) -> None:
    async with world() as engines:
        sink, link = await lent(engines)
        await engines.act("heads")
        link.pause()
        await quiet()
        for act in ("says", "says", "ends"):
            await engines.act(act)
        assert sink.kinds == ["head"]
        link.resume()
        await eventually(lambda: sink.over, "the rest")
        assert sink.events[1:] == [("body", BODY * 2), ("end", [b"x-t: 1\r\n"])]


@WORLDS
async def test_pausing_and_resuming_twice_is_once(world: World) -> None:
    async with world() as engines:
        sink, link = await lent(engines)
        link.pause()
        link.pause()
        link.resume()
        link.resume()
        await engines.act("heads")
        await eventually(lambda: sink.kinds == ["head"], "the head")


@WORLDS
async def test_a_tunnel_is_told_with_its_first_bytes_and_then_its_bytes(world: World) -> None:
    async with world() as engines:
        sink, link = await lent(engines, upgrade=True)
        await engines.act("tunnels")
        link.send_tunnel(b"up")
        await engines.act("tunnels on")
        await eventually(lambda: sink.events[-1:] == [("body", b"earlylate")], "the tunnel's bytes")
        assert sink.kinds == ["tunnel", "body"]


@WORLDS
async def test_asking_is_answered_once_with_a_new_link(world: World) -> None:
    async with world() as engines:
        sink = Sink()
        engines.ask(sink)
        assert sink.connected == []
        await engines.granted()
        await quiet()
        assert sink.connected == ["connected"] and sink.link is not None and not sink.link.used


@WORLDS
async def test_where_nobody_listens_asking_fails_once(world: World) -> None:
    async with world() as engines:
        sink = Sink()
        engines.ask_nobody(sink)
        await engines.refused()
        await quiet()
        assert sink.connected == ["failed"]


@WORLDS
async def test_a_cancelled_asking_is_never_answered(world: World) -> None:
    async with world() as engines:
        sink, other = Sink(), Sink()
        engines.ask(sink)
        engines.connector.cancel(sink)
        engines.ask(other)
        await engines.granted()
        await quiet()
        assert sink.connected == [] and other.connected == ["connected"]
        engines.connector.cancel(other)  # too late, and harmless
        assert other.connected == ["connected"]


@WORLDS
@pytest.mark.parametrize("fresh", [False, True])
async def test_after_a_whole_answer_the_next_link_is_used_unless_a_fresh_one_was_asked_for(
    world: World, fresh: bool
) -> None:
    async with world() as engines:
        first, _ = await lent(engines)
        await engines.act("heads")
        await engines.act("ends")
        await eventually(lambda: first.over, "the end")
        second = Sink()
        engines.ask(second, fresh=fresh)
        await engines.granted()
        assert second.link is not None
        assert second.link.used is not fresh


# --- clients ----------------------------------------------------------------------------------------------------------

Summary = tuple[list[int], int, bytes, bool, bool]
"""Interim statuses, status, body, whether the reply is whole, whether the connection ends with it."""

CHUNKED = head_of(200)
LENGTH = head_of(200, b"application/json", 2)
REFUSED = Refusal(Reason.DRAINING, "going", 1.0)
Reply = Callable[[ports.Client], None]


def says_all(client: ports.Client) -> None:
    client.send_informational(head_of(103, b""))
    client.send_head(CHUNKED, b"x-ours: 1\r\n", b"a")
    client.send_body(b"b")
    client.send_end([b"x-t: 1\r\n"])


def promises_a_length(client: ports.Client) -> None:
    client.send_head(LENGTH, b"", b"{}")
    assert not client.can_append
    client.send_end([])


def appends_and_closes(client: ports.Client) -> None:
    client.send_head(CHUNKED, b"", b"a")
    assert client.can_append
    client.close_after_reply()
    client.send_body(b"b")
    client.send_end([])


def cuts(client: ports.Client) -> None:
    client.send_head(CHUNKED, b"", b"a")
    client.cut()


def refuses(client: ports.Client) -> None:
    client.refuse(REFUSED, b"id", b"x-ours: 1\r\n")


def tunnels(client: ports.Client) -> None:
    client.start_tunnel(head_of(101, b"", upgrade=b"websocket"), b"", b"a")
    client.send_body(b"b")


REPLIES: list[tuple[str, Reply, Summary]] = [
    ("whole", says_all, ([103], 200, b"ab", True, False)),
    ("length", promises_a_length, ([], 200, b"{}", True, False)),
    ("closing", appends_and_closes, ([], 200, b"ab", True, True)),
    ("cut", cuts, ([], 200, b"a", False, True)),
    ("refused", refuses, ([], 503, b"", True, False)),
    ("tunnel", tunnels, ([], 101, b"ab", False, True)),
]


async def fake_reply(reply: Reply) -> Summary:
    client = FakeClient()
    reply(client)
    client.exchange_done()
    if client.refusal is not None:
        return client.informational, 503, b"", True, client.closes
    head = client.head or client.tunnel
    assert head is not None
    closes = client.is_cut or client.closes or client.tunnel is not None
    return client.informational, head.status, client.body, client.ended, closes


async def read_reply(client: Client) -> Summary:
    interim: list[int] = []
    head = await client.response_head()
    while head.status < 200 and head.status != 101:
        interim.append(head.status)
        head = await client.response_head()
    body, whole = b"", True
    if head.status == 101:
        return interim, 101, await client.rest(), False, True
    if head.status == 503:
        await client.body(head, "length")
        return interim, 503, b"", True, client.ended
    if head.values(b"content-length"):
        body = (await client.body(head, "length")).body
    else:
        try:
            while chunk := await client.chunk():
                body += chunk
            while await client.line():
                pass
        except Gone:
            whole = False
    await quiet()
    return interim, head.status, body, whole, client.ended


async def real_reply(reply: Reply) -> Summary:
    bench = Bench()  # whose engine never answers: the reply is the test's
    listener = Listener(bench.pipeline)
    port = await listener.start("127.0.0.1", 0)
    try:
        async with connect(port) as client:
            asked = request(headers=[b"Connection: Upgrade", b"Upgrade: websocket"] if reply is tunnels else [])
            await client.send(asked)
            await eventually(lambda: len(bench.connector.links) == 1, "the request")
            (connection,) = listener._connections
            reply(connection)
            connection.exchange_done()
            return await read_reply(client)
    finally:
        await listener.close()


@pytest.mark.parametrize("world", [fake_reply, real_reply], ids=["fake", "real"])
@pytest.mark.parametrize(("reply", "wanted"), [case[1:] for case in REPLIES], ids=[case[0] for case in REPLIES])
async def test_a_reply_reaches_its_client(
    world: Callable[[Reply], Awaitable[Summary]], reply: Reply, wanted: Summary
) -> None:
    assert await world(reply) == wanted


# --- timers -----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def virtual() -> AsyncIterator[tuple[Timers, Callable[[float], Awaitable[None]]]]:
    clock = Clock()

    async def wait(seconds: float) -> None:
        clock.advance(seconds)

    yield clock, wait


@asynccontextmanager
async def real() -> AsyncIterator[tuple[Timers, Callable[[float], Awaitable[None]]]]:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, uvloop.Loop)
    yield loop, asyncio.sleep


@pytest.mark.parametrize("world", [virtual, real], ids=["fake", "real"])
async def test_timers_fire_in_order_once_not_early_and_not_when_cancelled(
    world: Callable[[], AbstractAsyncContextManager[tuple[Timers, Callable[[float], Awaitable[None]]]]],
) -> None:
    async with world() as (timers, wait):
        began = timers.time()
        fired: list[tuple[str, float]] = []

        def note(name: str) -> Callable[[], None]:
            return lambda: fired.append((name, timers.time() - began))

        timers.call_at(began + 0.02, note("second"))
        timers.call_at(began + 0.01, note("first"))
        timers.call_at(began + 0.015, note("cancelled")).cancel()
        timers.call_at(began - 1.0, note("past"))
        assert fired == []
        await wait(0.05)
        assert [name for name, _ in fired] == ["past", "first", "second"]
        # The loop's clock counts whole milliseconds.
        assert fired[1][1] >= 0.009 and fired[2][1] >= 0.019


def test_fakes_are_what_the_ports_say() -> None:
    # Checked by mypy; here so that no fake is left out.
    client: ports.Client = FakeClient()
    link: ports.Link = FakeLink()
    connector: ports.Connector = FakeConnector()
    recorder: ports.Recorder = FakeRecorder()
    assert client and link and connector and recorder
