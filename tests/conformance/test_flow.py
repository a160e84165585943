"""Flow: who does not read makes us stop reading, with 1 MiB held at most; who leaves frees the other side at once."""

import asyncio
import hashlib
from collections.abc import Callable

import pytest

from tests.harness import (
    Client,
    Peer,
    Upstream,
    Wire,
    awake,
    chunked,
    eventually,
    is_held,
    kernel_holds,
    request,
    response,
)
from tests.under_test import (
    COMPLETION,
    ROLE,
    Sidecar,
    chat,
    json_answer,
    relayed,
    sidecar,
    stream_head,
    token,
)

HELD_MAX = 1 << 20
SMALL = 32768
LEFT_S = 1.0
"""The promise is 100 ms; a test on a busy machine may see ten times that, and a proxy that forgot sees no end."""


def pushed(end: Wire, written: int) -> int:
    """Bytes that left this process's user space towards the proxy."""
    return written - end.transport.get_write_buffer_size()


async def steady(measure: Callable[[], int]) -> int:
    """The value that `measure` comes to rest at."""
    last, same = -1, 0
    for _ in range(4000):
        now = measure()
        same = same + 1 if now == last else 0
        if same == 30:
            return now
        last = now
        await asyncio.sleep(0.002)
    raise AssertionError("never came to rest: nothing stops reading")


def queued(end: Wire) -> int:
    """Bytes on this end's way out and not yet read by the proxy, in both kernels' queues."""
    own, other = end.ports or (0, 0)
    return kernel_holds(own, other)[0] + kernel_holds(other, own)[1]


def arriving(end: Wire) -> int:
    """Bytes that the proxy wrote to this end and that this end has not read."""
    own, other = end.ports or (0, 0)
    return kernel_holds(other, own)[0] + kernel_holds(own, other)[1]


BIG = bytes(range(256)) * 4 * 1024 * 6  # 6 MiB
UPLOAD = BIG * 3  # more than the buffers of a client's kernel grow to


def sse_flood(times: int = 1) -> tuple[bytes, bytes]:
    """An SSE stream of so many times 6 MiB, its head apart."""
    many = b"".join(token(number) for number in range(1000))
    return stream_head(), chunked(*[many] * 50 * times, end=False)


@pytest.mark.parametrize("kind", ["length", "chunked", "stream"])
async def test_client_that_does_not_read_stops_the_upstream(kind: str) -> None:
    # How much the kernel takes in between is its own affair: tens of MiB, if it was in the mood.
    for times in (1, 3):
        if await stopped(kind, times):
            return
    raise AssertionError("the upstream was never stopped: the test shows nothing")


async def stopped(kind: str, times: int) -> bool:
    """Whether the upstream was stopped before it had sent so many times 6 MiB; checks that we hold little of it."""
    all_of_it = BIG * times
    match kind:
        case "length":
            head, body = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(all_of_it), all_of_it
        case "chunked":
            head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
            body = chunked(*[BIG[:65536]] * 96 * times)
        case _:
            head, body = sse_flood(times)

    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.send(head + body)

    async with (
        Upstream(play, sndbuf=SMALL) as upstream,
        sidecar(upstream) as proxy,
        proxy.client(rcvbuf=SMALL) as client,
    ):
        client.transport.pause_reading()
        await client.send(chat() if kind == "stream" else request())
        await eventually(lambda: bool(upstream.requests), "the request upstream")
        peer = upstream.connections[0]
        total = len(head + body)
        await steady(lambda: pushed(peer, total))
        held = pushed(peer, total) - queued(peer) - arriving(client) - len(client.received)
        # Some bytes of the head are the proxy's own and framing may be ours: a few hundred bytes either way.
        assert held <= HELD_MAX + 1000
        was_stopped = pushed(peer, total) < total
        client.transport.resume_reading()
        if kind == "length":
            got = await client.response()
            assert hashlib.sha256(got.body).digest() == hashlib.sha256(all_of_it).digest()
        elif kind == "chunked":
            got = await client.response()
            assert len(got.body) == len(all_of_it)
        else:
            await client.exactly(total - 100_000)
        return was_stopped


@pytest.mark.parametrize("kind", ["length", "chunked"])
async def test_upstream_that_does_not_read_stops_the_client(kind: str) -> None:
    reading = asyncio.Event()

    async def play(peer: Peer) -> None:
        await peer.request_head()
        peer.transport.pause_reading()
        await reading.wait()
        peer.transport.resume_reading()
        await peer.until(lambda: len(peer.received) > len(UPLOAD), "the upload")
        await peer.send(response(b"ok"))

    data = request(method=b"POST", body=UPLOAD)
    if kind == "chunked":
        data = request(method=b"POST", headers=[b"Transfer-Encoding: chunked"]) + chunked(*[BIG[:65536]] * 288)
    async with (
        Upstream(play, rcvbuf=SMALL) as upstream,
        sidecar(upstream) as proxy,
        proxy.client() as client,
    ):
        await client.send(data)
        await eventually(lambda: bool(upstream.requests), "the head upstream")
        await steady(lambda: pushed(client, len(data)))
        peer = upstream.connections[0]
        held = pushed(client, len(data)) - queued(client) - arriving(peer) - len(peer.received)
        assert held <= HELD_MAX + 1000
        assert pushed(client, len(data)) < len(data), "the client was never stopped: the test shows nothing"
        reading.set()
        assert (await client.response()).body == b"ok"


async def test_tunnel_is_bounded_in_both_directions() -> None:
    accept = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"

    async def play(peer: Peer) -> None:
        await peer.request_head()
        await peer.send(accept + BIG)
        peer.transport.pause_reading()

    async with (
        Upstream(play, sndbuf=SMALL, rcvbuf=SMALL) as upstream,
        sidecar(upstream) as proxy,
        proxy.client(rcvbuf=SMALL) as client,
    ):
        asked = request(b"/ws", headers=[b"Connection: Upgrade", b"Upgrade: websocket"])
        await client.send(asked)
        await client.seen(b"\r\n\r\n")
        client.transport.pause_reading()
        await client.send(BIG)
        peer = upstream.connections[0]
        down, up = len(accept) + len(BIG), len(asked) + len(BIG)
        await steady(lambda: pushed(peer, down) + pushed(client, up))
        assert pushed(peer, down) - queued(peer) - arriving(client) - len(client.received) <= HELD_MAX + 1000
        assert pushed(client, up) - queued(client) - arriving(peer) - len(peer.received) <= HELD_MAX + 1000
        peer.transport.resume_reading()
        client.transport.resume_reading()
        await peer.until(lambda: bytes(peer.received[-len(BIG) :]) == BIG, "all of it upstream")
        await client.until(lambda: bytes(client.received[-len(BIG) :]) == BIG, "all of it downstream")


@pytest.mark.parametrize("inference", [False, True], ids=["streamed", "inference"])
async def test_flood_of_pipelined_requests_is_stopped(inference: bool) -> None:
    open_gate = asyncio.Event()

    async def play(peer: Peer) -> None:
        while True:
            await peer.request()
            await open_gate.wait()
            await peer.send(json_answer(COMPLETION))

    one = chat(stream=False, text="x" * 1000) if inference else request(b"/" + b"x" * 1000)
    count = 6000
    async with Upstream(play) as upstream, sidecar(upstream) as proxy, proxy.client() as client:
        await client.send(one * count)
        await eventually(lambda: bool(upstream.requests), "the first upstream")
        await steady(lambda: pushed(client, len(one) * count))
        sent_on = sum(len(sent.raw) for sent in upstream.requests)
        assert pushed(client, len(one) * count) - queued(client) - sent_on <= HELD_MAX + 1000
        assert pushed(client, len(one) * count) < len(one) * count
        open_gate.set()
        for _ in range(50):
            assert (await client.response()).status == 200


# --- leaving -------------------------------------------------------------------------------------------------------


def leave(client: Client, way: str) -> None:
    """Ends the client's side."""
    {"close": client.close, "half-close": client.half_close, "reset": client.reset}[way]()


async def freed(peer: Peer, client: Client, way: str) -> None:
    """The client leaves, and the upstream's connection is closed, wholly and soon."""
    async with awake() as ran:
        leave(client, way)
        await peer.until(lambda: peer.ended, "the upstream's connection to be closed")
        assert ran() < LEFT_S
    await peer.gone()


WAYS = pytest.mark.parametrize("way", ["close", "reset", "half-close"])
ASKED = pytest.mark.parametrize(
    "asked",
    [
        pytest.param(request(), id="get"),
        pytest.param(request(method=b"POST", body=b"x" * 100), id="post"),
        pytest.param(chat(), id="stream"),
        pytest.param(chat(stream=False), id="inference"),
    ],
)


@WAYS
@ASKED
async def test_leaving_before_the_head_frees_the_upstream(asked: bytes, way: str, split: bool) -> None:
    async def play(peer: Peer) -> None:
        await peer.request()

    async with relayed(play, split) as (upstream, _, client):
        await client.send(asked)
        await eventually(lambda: bool(upstream.requests), "the request upstream")
        await client.settled()
        await freed(upstream.connections[0], client, way)


@WAYS
@pytest.mark.parametrize("begun", ["head", "role", "token", "body", "held-json"])
async def test_leaving_after_bytes_came_frees_the_upstream(begun: str, way: str, split: bool) -> None:
    parts = {
        "head": stream_head(),
        "role": stream_head() + chunked(ROLE, end=False),
        "token": stream_head() + chunked(ROLE, token(1), end=False),
        "body": b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf",
        "held-json": b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{",
    }
    sent = 0

    async def play(peer: Peer) -> None:
        nonlocal sent
        await peer.request()
        await peer.send(parts[begun])
        sent = 1

    async with relayed(play, split) as (upstream, _, client):
        await client.send({"body": request(), "held-json": chat(stream=False)}.get(begun, chat()))
        await eventually(lambda: sent == 1, "the answer to begin")
        await client.settled()
        if begun in ("token", "body"):
            await client.seen(b"t1" if begun == "token" else b"half")
        await freed(upstream.connections[0], client, way)


@WAYS
async def test_leaving_in_the_middle_of_an_upload_frees_the_upstream(way: str, split: bool) -> None:
    async def play(peer: Peer) -> None:
        await peer.request_head()

    async with relayed(play, split) as (upstream, _, client):
        await client.send(request(method=b"POST", headers=[b"Content-Length: 1000"]) + b"some of it")
        await eventually(lambda: bool(upstream.requests), "the head upstream")
        await upstream.connections[0].seen(b"some of it")
        await freed(upstream.connections[0], client, way)


@WAYS
async def test_leaving_in_the_middle_of_a_held_body_forwards_nothing(way: str, split: bool) -> None:
    async def play(peer: Peer) -> None:
        raise AssertionError("forwarded")

    async with relayed(play, split) as (upstream, _, client):
        await client.send(chat()[:-5])
        await client.settled()
        leave(client, way)
        await client.settled(60)
        assert upstream.connections == []


@WAYS
async def test_leaving_with_requests_pipelined_frees_the_upstream(way: str, split: bool) -> None:
    async def play(peer: Peer) -> None:
        await peer.request()

    async with relayed(play, split) as (upstream, _, client):
        await client.send(request(b"/1") + request(b"/2") + chat())
        await eventually(lambda: bool(upstream.requests), "the first upstream")
        await client.settled()
        await freed(upstream.connections[0], client, way)
        assert [sent.target for sent in upstream.requests] == [b"/1"]


@pytest.mark.parametrize("way", ["close", "reset"])
async def test_leaving_is_noticed_while_the_client_does_not_read(way: str) -> None:
    head, body = sse_flood()

    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.send(head + body)

    async with (
        Upstream(play, sndbuf=SMALL) as upstream,
        sidecar(upstream) as proxy,
        proxy.client(rcvbuf=SMALL) as client,
    ):
        await client.send(chat())
        await client.seen(b"\r\n\r\n")
        client.transport.pause_reading()
        peer = upstream.connections[0]
        await steady(lambda: pushed(peer, len(head + body)))
        await freed(peer, client, way)


async def test_leaving_is_noticed_while_we_do_not_read_the_client() -> None:
    async def play(peer: Peer) -> None:
        await peer.request_head()
        peer.transport.pause_reading()

    data = request(method=b"POST", body=UPLOAD)
    async with Upstream(play, rcvbuf=SMALL) as upstream, sidecar(upstream) as proxy, proxy.client() as client:
        await client.send(data)
        await eventually(lambda: bool(upstream.requests), "the head upstream")
        await steady(lambda: pushed(client, len(data)))
        peer = upstream.connections[0]
        own, other = peer.ports or (0, 0)
        leave(client, "reset")
        # The engine goes on not reading, so only the kernel can tell that the proxy let go.
        await eventually(lambda: not is_held(other, own), "the engine's connection to be closed")
        peer.transport.resume_reading()
        await peer.gone()


async def test_leaving_while_pipelined_bytes_are_unread_is_noticed() -> None:
    async def play(peer: Peer) -> None:
        await peer.request()

    async with Upstream(play) as upstream, sidecar(upstream) as proxy, proxy.client() as client:
        data = request(b"/" + b"x" * 1000) * 8000
        await client.send(data)
        await eventually(lambda: bool(upstream.requests), "the first upstream")
        await steady(lambda: pushed(client, len(data)))
        await freed(upstream.connections[0], client, "reset")


async def test_leaving_before_the_connect_is_done_frees_everything(split: bool) -> None:
    async with relayed(_never, split) as (_, proxy, client):
        await client.send(request())
        client.reset()
        async with proxy.client() as other:
            await other.settled()
            other.close()


async def _never(peer: Peer) -> None:
    await peer.request()


@pytest.mark.parametrize("number", [1, 20])
async def test_answer_that_was_whole_when_the_client_left_keeps_the_connection(number: int) -> None:
    async def play(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.send(response(b"whole"))

    async with Upstream(play) as upstream, sidecar(upstream) as proxy:
        for _ in range(number):
            await _leaves_after_answer(proxy)
        assert len(upstream.connections) == 1


async def _leaves_after_answer(proxy: Sidecar) -> None:
    async with proxy.client() as client:
        assert (await client.ask(request())).body == b"whole"
        client.reset()


async def test_idle_keep_alive_client_may_half_close(split: bool) -> None:
    async def play(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.send(response(b"ok"))

    async with relayed(play, split) as (_, _, client):
        assert (await client.ask(request())).body == b"ok"
        client.half_close()
        assert await client.rest() == b""
