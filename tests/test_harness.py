"""The harness tells whole from split, FIN from RST, a close from a half-close: proved without the sidecar."""

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator
from typing import cast

import pytest

from tests.blocking import nothing_blocks
from tests.harness import (
    Gone,
    Malformed,
    Peer,
    Upstream,
    answers,
    awake,
    chunked,
    connect,
    eventually,
    kernel_holds,
    request,
    response,
)


class _Splice(asyncio.Protocol):
    """Half of a relay that passes bytes and ends on, as they come."""

    def __init__(self) -> None:
        self.other: asyncio.Transport | None = None
        self.own: asyncio.Transport | None = None
        self.lost = False
        self.early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.own = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.early += data
        if self.other is not None:
            self.other.write(self.early)
            self.early = b""

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if self.other is not None:
            self.other.abort()


@contextlib.asynccontextmanager
async def relay(to: int) -> AsyncIterator[int]:
    """A relay that knows no HTTP, on a port of its own."""
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[None]] = []
    ends: list[_Splice] = []

    class Front(_Splice):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            tasks.append(loop.create_task(self._join()))

        async def _join(self) -> None:
            back, other = await loop.create_connection(_Splice, "127.0.0.1", to)
            other.other, self.other = self.own, back
            ends.extend((self, other))
            self.data_received(b"")

    server = await loop.create_server(Front, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            await task
        await eventually(lambda: all(end.lost for end in ends), "both ends of the relay to be closed")


@pytest.mark.parametrize("split", [False, True], ids=["whole", "bytewise"])
async def test_exchange_over_a_relay_is_parsed_to_the_byte(split: bool) -> None:
    reply = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n" + response(b"hello", headers=[b"X-A: \xff1"])
    async with (
        Upstream(answers(reply), split=split) as upstream,
        relay(upstream.port) as port,
        connect(port, split=split) as client,
    ):
        for _ in range(2):
            got = await client.ask(request(b"/a?b", method=b"POST", body=b"12345"), b"POST")
            assert (got.status, got.body, got.header(b"x-a")) == (200, b"hello", b"\xff1")
            assert [(early.status, early.headers) for early in got.interim] == [(103, [(b"link", b"</a>")])]
        assert len(upstream.connections) == 1
        assert [sent.body for sent in upstream.requests] == [b"12345", b"12345"]
        assert bytes(client.received) == reply * 2


async def test_split_bytes_arrive_one_by_one() -> None:
    sent = request(b"/a", method=b"POST", body=b"x" * 200)
    async with (
        Upstream(answers(response(b"y" * 200)), split=True) as upstream,
        connect(upstream.port, split=True) as client,
    ):
        await client.ask(sent, b"POST")
        [peer] = upstream.connections
        assert len(peer.reads) > 0.9 * len(sent), "reads at the upstream were not split"
        assert len(client.reads) > 0.9 * len(client.received), "reads at the client were not split"


@pytest.mark.parametrize("way", ["fin", "close", "reset"])
async def test_ends_are_told_apart(way: str) -> None:
    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\n\r\nab")
        match way:
            case "fin":
                peer.half_close()
            case "close":
                peer.close()
            case _:
                await peer.settled()
                peer.reset()

    async with Upstream(play) as upstream, connect(upstream.port) as client:
        got = await client.ask(request())
        assert (got.framing, got.body) == ("close", b"ab")
        if way == "reset":
            await eventually(lambda: client.lost, "the reset")
            assert isinstance(client.error, ConnectionResetError)
        else:
            assert client.fin and client.error is None


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"5\nhello\r\n0\r\n\r\n", id="bare-lf"),
        pytest.param(b"5x\r\nhello\r\n0\r\n\r\n", id="bad-size"),
        pytest.param(b"5\r\nhello!\r\n0\r\n\r\n", id="overlong-chunk"),
    ],
)
async def test_malformed_chunks_fail_the_test(body: bytes) -> None:
    reply = response(headers=[b"transfer-encoding: chunked"], length=False) + body
    async with Upstream(answers(reply)) as upstream, connect(upstream.port) as client:
        with pytest.raises(Malformed):
            await client.ask(request())


async def test_cut_bodies_are_gone() -> None:
    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.send(response(headers=[b"transfer-encoding: chunked"], length=False) + chunked(b"abc", end=False))
        peer.close()

    async with Upstream(play) as upstream, connect(upstream.port) as client:
        with pytest.raises(Gone):
            await client.ask(request())


async def test_half_close_is_noticed_and_close_is_not_taken_for_one() -> None:
    async with Upstream(answers(response())) as upstream:
        async with connect(upstream.port) as client:
            await client.ask(request())
            client.close()
            await upstream.connections[0].gone()
        assert upstream.half_closes == 0
        async with connect(upstream.port) as client:
            await client.ask(request())
            client.half_close()
            await upstream.connections[1].until(lambda: upstream.connections[1].fin, "FIN")
            assert upstream.half_closes == 1
            upstream.half_closes = 0


async def test_failing_script_fails_the_test() -> None:
    async def play(peer: Peer) -> None:
        await peer.request()
        raise ValueError("from the script")

    with pytest.raises(ValueError, match="from the script"):
        async with Upstream(play) as upstream, connect(upstream.port) as client:
            await client.send(request())
            await client.rest()


async def test_health_checks_are_nobodys_requests() -> None:
    async with Upstream(answers(response())) as upstream:
        async with connect(upstream.port, split=True) as client:
            assert (await client.ask(request(b"/metrics"))).status == 404
        assert (upstream.requests, upstream.connections, upstream.checks) == ([], [], 1)


async def test_kernel_queues_are_counted_exactly() -> None:
    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"x" * 3000)

    async with Upstream(play) as upstream, connect(upstream.port) as client:
        client.transport.pause_reading()
        await client.send(request())
        own, other = client.ports or (0, 0)
        await eventually(lambda: kernel_holds(own, other)[1] == 3000, "3000 unread bytes")
        client.transport.resume_reading()
        await client.exactly(3000)
        assert kernel_holds(own, other) == (0, 0)


# --- how long we ran ----------------------------------------------------------------------------------------------


async def test_what_the_process_stood_still_is_not_counted() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with awake() as ran:
        time.sleep(0.2)
        assert loop.time() - began - ran() > 0.15
        await asyncio.sleep(0.02)
        time.sleep(0.2)
        assert loop.time() - began - ran() > 0.3


async def test_what_it_waits_for_and_what_it_works_is_counted() -> None:
    async with awake() as ran:
        worked = time.process_time()
        while time.process_time() < worked + 0.05:
            pass
        assert ran() >= 0.05
        for _ in range(10):
            await asyncio.sleep(0.01)
        assert ran() >= 0.1


async def test_no_garbage_is_collected_while_nothing_may_block() -> None:
    with nothing_blocks():
        assert not gc.isenabled()
        with nothing_blocks():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
