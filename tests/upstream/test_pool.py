"""The pool on real sockets: whose connection is lent, when one is closed, and that every asking is answered once."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sidecar.kernel.exchange import ResponseHead
from sidecar.policy.address import endpoint_key
from sidecar.policy.schema import Endpoint
from sidecar.proxy.ports import Link
from sidecar.upstream.pool import IDLE_S, Pool
from tests.harness import Peer, Upstream, answers, awake, eventually, response
from tests.proxy.fakes import FakeRecorder

ASK = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"


class Asker:
    """A sink that asked for a connection."""

    def __init__(self) -> None:
        self.link: Link | None = None
        self.failure = ""
        self.told = 0
        self.events: list[str] = []

    def on_connected(self, link: Link) -> None:
        self.told += 1
        self.link = link

    def on_connect_failed(self, detail: str) -> None:
        self.told += 1
        self.failure = detail

    def on_informational(self, head: ResponseHead) -> None: ...

    def on_head(self, head: ResponseHead) -> None:
        self.events.append("head")

    def on_body(self, data: bytes) -> None: ...

    def on_end(self, trailers: list[bytes]) -> bool:
        self.events.append("end")
        return True

    def on_released(self) -> None: ...

    def on_lost(self) -> None:
        self.events.append("lost")

    def on_bad_bytes(self, detail: str) -> None:
        self.events.append("bad")

    def on_tunnel(self, head: ResponseHead, data: bytes) -> None: ...

    def on_tunnel_data(self, data: bytes) -> None: ...

    def on_upload_paused(self) -> None: ...

    def on_upload_resumed(self) -> None: ...


class Bench:
    """A pool, and askings of it."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.loop = asyncio.get_running_loop()
        self.recorder = FakeRecorder()
        self.pool = Pool(self.loop, tasks, self.recorder)
        self.askers: list[Asker] = []

    def asks(self, endpoint: Endpoint, *, connect_s: float = 5.0, fresh: bool = False) -> Asker:
        asker = Asker()
        self.askers.append(asker)
        self.pool.open(endpoint_key(endpoint.url), endpoint, connect_s, asker, fresh=fresh)
        return asker

    async def lent(self, endpoint: Endpoint, *, fresh: bool = False) -> Asker:
        asker = self.asks(endpoint, fresh=fresh)
        await eventually(lambda: asker.told > 0, "an answer of the pool")
        assert asker.link is not None, asker.failure
        return asker

    async def served(self, asker: Asker) -> None:
        """One exchange, after which the connection is idle again."""
        assert asker.link is not None
        asker.events.clear()
        asker.link.send(asker, ASK, b"", head_only=False, upgrade=False)
        await eventually(lambda: "end" in asker.events, "an answer of the engine")


@asynccontextmanager
async def pooled() -> AsyncIterator[Bench]:
    async with asyncio.TaskGroup() as tasks:
        bench = Bench(tasks)
        yield bench
        for asker in bench.askers:
            if asker.link is not None:
                asker.link.abort()
        bench.pool.close()
    await eventually(lambda: bench.pool.open_connections == 0, "every connection to end")
    assert bench.pool.idle_connections == 0


def endpoint(upstream: Upstream) -> Endpoint:
    return Endpoint(url=upstream.url)


async def test_a_connection_is_lent_again_at_once_and_counts_as_used() -> None:
    async with Upstream(answers(response())) as upstream, pooled() as bench:
        first = await bench.lent(endpoint(upstream))
        assert first.link is not None and not first.link.used
        await bench.served(first)
        assert (bench.pool.open_connections, bench.pool.idle_connections) == (1, 1)
        second = bench.asks(endpoint(upstream))
        assert second.link is first.link and second.link is not None and second.link.used
        assert bench.pool.idle_connections == 0
        await bench.served(second)
        assert bench.pool.open_connections == 1


async def test_the_freshest_connection_is_lent_first() -> None:
    async with Upstream(answers(response())) as upstream, pooled() as bench:
        one, other = await bench.lent(endpoint(upstream)), await bench.lent(endpoint(upstream))
        await bench.served(one)
        await bench.served(other)
        assert bench.asks(endpoint(upstream)).link is other.link
        assert bench.asks(endpoint(upstream)).link is one.link


async def test_fresh_asks_for_a_new_one_and_drops_what_sat_beside_a_stale_one() -> None:
    async with Upstream(answers(response())) as upstream, pooled() as bench:
        one, other = await bench.lent(endpoint(upstream)), await bench.lent(endpoint(upstream))
        await bench.served(one)
        await bench.served(other)
        third = await bench.lent(endpoint(upstream), fresh=True)
        assert third.link is not None and not third.link.used
        assert bench.pool.idle_connections == 0
        await bench.served(third)
        await eventually(lambda: bench.pool.open_connections == 1, "the others to end")


@pytest.mark.parametrize("after_s", [IDLE_S - 0.01, IDLE_S, IDLE_S + 10])
async def test_what_is_idle_too_long_is_swept(after_s: float) -> None:
    async with Upstream(answers(response())) as upstream, pooled() as bench:
        await bench.served(await bench.lent(endpoint(upstream)))
        now = bench.loop.time()
        bench.pool.sweep(now + after_s)
        assert bench.pool.idle_connections == (1 if after_s < IDLE_S - 0.005 else 0)


async def test_an_idle_connection_that_its_engine_closes_is_forgotten() -> None:
    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.send(response())
        peer.close()

    async with Upstream(play) as upstream, pooled() as bench:
        await bench.served(await bench.lent(endpoint(upstream)))
        await eventually(lambda: bench.pool.open_connections == 0, "the close to be noticed")
        assert bench.pool.idle_connections == 0
        assert bench.recorder.malformed == []


async def test_bytes_on_an_idle_connection_cost_it_and_are_told() -> None:
    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.send(response())
        await peer.settled()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil")
        await peer.gone()

    async with Upstream(play) as upstream, pooled() as bench:
        await bench.served(await bench.lent(endpoint(upstream)))
        await eventually(lambda: bench.pool.open_connections == 0, "the connection to be dropped")
        assert bench.recorder.malformed == [endpoint_key(upstream.url)]
        assert (await bench.lent(endpoint(upstream))).link is not None


async def test_nobody_listening_is_told_with_the_endpoint_and_the_reason() -> None:
    async with Upstream(answers(response())) as upstream:
        url = upstream.url
    async with pooled() as bench:
        asker = bench.asks(Endpoint(url=url))
        await eventually(lambda: asker.told == 1, "a failure")
        assert endpoint_key(url) in asker.failure and asker.link is None


@pytest.mark.parametrize(
    "url", ["unix:///nowhere/engine.sock", "http://does-not-exist.invalid:80", "https://127.0.0.1:1"],
    ids=["no such socket", "no such host", "no such port"],
)  # fmt: skip
async def test_whatever_keeps_it_from_connecting_is_a_failure_told_once(url: str) -> None:
    async with pooled() as bench:
        asker = bench.asks(Endpoint(url=url))
        await eventually(lambda: asker.told == 1, "a failure")
        assert asker.failure and asker.link is None


async def test_a_missing_authority_is_a_failed_connection_and_not_a_crash(tmp_path: Path) -> None:
    async with Upstream(answers(response())) as upstream, pooled() as bench:
        url = upstream.url.replace("http://", "https://")
        asker = bench.asks(Endpoint(url=url, tls_ca=str(tmp_path / "missing.pem")))
        await eventually(lambda: asker.told == 1, "a failure")
        assert asker.failure and asker.link is None


async def test_an_engine_that_speaks_no_tls_is_a_failed_connection() -> None:
    def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server, pooled() as bench:
        asker = bench.asks(Endpoint(url=f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        await eventually(lambda: asker.told == 1, "a failure")
        assert asker.failure and asker.link is None


async def test_the_connect_deadline_is_kept() -> None:
    # 192.0.2.0/24 is for documentation: nobody answers; where the network refuses at once, that is a failure, too.
    async with pooled() as bench, awake() as ran:
        asker = bench.asks(Endpoint(url="http://192.0.2.1:80"), connect_s=0.1)
        await eventually(lambda: asker.told == 1, "the deadline")
        assert asker.failure and ran() < 2.0


async def test_a_connection_that_was_there_when_the_loop_stood_still_is_in_time() -> None:
    async with Upstream(answers(response())) as upstream, pooled() as bench:
        asker = bench.asks(endpoint(upstream), connect_s=0.1)
        await asyncio.sleep(0)  # the connect is under way
        time.sleep(0.3)  # and our loop is held
        await eventually(lambda: asker.told == 1, "a connection")
        assert asker.link is not None, asker.failure


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("count", range(12))
async def test_a_cancelled_asking_is_never_answered_and_leaves_no_connection(count: int) -> None:
    async with Upstream(answers(response())) as upstream, pooled() as bench:
        asker = bench.asks(endpoint(upstream))
        await turns(count)
        if asker.told:
            assert asker.link is not None
            asker.link.abort()
        bench.pool.cancel(asker)
        told = asker.told
        await turns(50)
        await eventually(lambda: bench.pool.open_connections == 0, "the connection to end")
        assert asker.told == told
        assert bench.pool.idle_connections == 0


async def test_cancelling_what_was_never_asked_is_harmless() -> None:
    async with pooled() as bench:
        bench.pool.cancel(Asker())


Change = Callable[[Upstream], Endpoint]


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        (lambda upstream: Endpoint(url=upstream.url), True),
        (lambda upstream: Endpoint(url=upstream.url, version="v2"), True),
        (lambda upstream: Endpoint(url="http://127.0.0.1:1"), False),
    ],
    ids=["the same", "another version", "another address"],
)
async def test_a_new_policy_keeps_the_connections_of_addresses_that_stay(change: Change, kept: bool) -> None:
    async with Upstream(answers(response())) as upstream, pooled() as bench:
        asker = await bench.lent(endpoint(upstream))
        await bench.served(asker)
        bench.pool.keep_only([change(upstream)])
        assert bench.pool.idle_connections == kept


async def test_only_what_a_service_lost_is_let_go() -> None:
    async with Upstream(answers(response())) as upstream, Upstream(answers(response())) as other, pooled() as bench:
        for each in (upstream, other):
            await bench.served(await bench.lent(endpoint(each)))
        before, after = [endpoint(upstream), endpoint(other)], [endpoint(other)]
        bench.pool.let_go(before, before)
        assert bench.pool.idle_connections == 2
        bench.pool.let_go(before, after)
        assert bench.pool.idle_connections == 1
        bench.pool.let_go(before, after)  # another service had it too
        await bench.served(await bench.lent(endpoint(upstream)))
        assert bench.pool.idle_connections == 2


async def test_a_connection_at_work_while_its_endpoint_goes_is_closed_after_it() -> None:
    async with Upstream(answers(response())) as upstream, pooled() as bench:
        asker = await bench.lent(endpoint(upstream))
        bench.pool.keep_only([])
        await bench.served(asker)
        assert bench.pool.idle_connections == 0
        await eventually(lambda: bench.pool.open_connections == 0, "its end")
