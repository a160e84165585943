"""T17: when nothing can serve the answer is an immediate 503 that says until when, and recovery needs no restart."""

import asyncio
import contextlib

import pytest

from sidecar.core.breaker import State
from sidecar.policy.schema import Retry, Seconds
from tests.harness import Client, Peer, Upstream, awake, eventually, one_by_one, says
from tests.under_test import (
    NO_RETRY,
    Sidecar,
    chat,
    error_body,
    json_answer,
    node_breaker,
    refusal,
    service,
    sidecar,
    whole_stream,
)

BROKEN = says(json_answer(error_body(), b"500 Oh"))
ALL_TRIES = Retry(attempts=10, budget_ratio=1.0, budget_min=1000)


async def open_all(proxy: Sidecar, nodes: list[Upstream]) -> None:
    for _ in range(20):
        if all(proxy.state("node", node.key) is State.OPEN for node in nodes):
            return
        await proxy.once(chat())
    raise AssertionError("never all open")


@pytest.mark.parametrize("count", [1, 3])
async def test_all_open_is_a_fast_503_until_one_probe_each_heals(count: int) -> None:
    healed = False

    async def behave(peer: Peer) -> None:
        await (says(whole_stream()) if healed else BROKEN)(peer)

    async with contextlib.AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(Upstream(one_by_one(behave))) for _ in range(count)]
        plan = service(*nodes, breakers=node_breaker(1, open_s=Seconds(1.5), successes=1), retry=NO_RETRY)
        async with sidecar(plan) as proxy:
            await open_all(proxy, nodes)
            views = list(proxy.running.fleet.views(proxy.running.now()))
            waits = [view.retry_at for view in views if view.scope == "node"]
            earliest, latest = min(waits), max(waits)
            asked_before = [len(node.requests) for node in nodes]
            versions = [view.version for view in views]
            async with proxy.client() as client, awake() as ran:
                start = proxy.running.now()
                for number in range(100):
                    got = await client.ask(chat(stream=number % 2 == 0), b"POST")
                    assert refusal(got) == (503, "breaker_open", "breaker_open")
                    wait = int(got.header(b"retry-after"))
                    assert wait >= 1 and wait - 1 <= earliest - start
                assert ran() < 100 * 0.01, "not fast"
            assert [len(node.requests) for node in nodes] == asked_before
            after = proxy.running.fleet.views(proxy.running.now())
            assert [view.version for view in after] == versions, "an answer of ours was counted"
            healed = True
            await asyncio.sleep(latest - proxy.running.now() + 0.1)
            for _ in range(3 * count):
                assert (await proxy.once(chat())).status == 200
            assert all(proxy.state("node", node.key) is State.CLOSED for node in nodes)


async def test_after_the_wait_each_node_gets_one_probe() -> None:
    gate = asyncio.Event()
    broken = True

    async def behave(peer: Peer) -> None:
        if broken:
            await BROKEN(peer)
        else:
            await gate.wait()
            await peer.send(whole_stream())

    async with contextlib.AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(Upstream(one_by_one(behave))) for _ in range(3)]
        plan = service(*nodes, breakers=node_breaker(1, open_s=Seconds(0.3), successes=1), retry=NO_RETRY)
        async with sidecar(plan) as proxy:
            await open_all(proxy, nodes)
            counts = [len(node.requests) for node in nodes]
            broken = False
            # The first may have been opened long before the last, and again.
            views = list(proxy.running.fleet.views(proxy.running.now()))
            latest = max(view.retry_at for view in views if view.scope == "node")
            await asyncio.sleep(latest - proxy.running.now() + 0.02)
            clients: list[Client] = [await stack.enter_async_context(proxy.client()) for _ in range(40)]
            for client in clients:
                await client.send(chat())
            await eventually(lambda: sum(bool(client.received) for client in clients) == 37, "37 refusals")
            await eventually(lambda: sum(len(node.requests) for node in nodes) == sum(counts) + 3, "three probes")
            assert [len(node.requests) for node in nodes] == [count + 1 for count in counts]
            gate.set()
            statuses = sorted([(await client.response(b"POST")).status for client in clients])
            assert statuses == [200] * 3 + [503] * 37
            assert all(proxy.state("node", node.key) is State.CLOSED for node in nodes)
            for client in clients:
                await client.abort()


@pytest.mark.parametrize(
    ("count", "ratio", "stay"), [(1, 0.34, 1), (3, 0.34, 1), (3, 0.0, 0), (3, 1.0, 3), (7, 0.34, 3), (6, 0.5, 3)]
)
async def test_share_that_always_stays_closed(count: int, ratio: float, stay: int) -> None:
    async with contextlib.AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(Upstream(one_by_one(BROKEN))) for _ in range(count)]
        plan = service(*nodes, breakers=node_breaker(1, min_closed_ratio=ratio), retry=ALL_TRIES)
        async with sidecar(plan) as proxy:
            statuses = [(await proxy.once(chat())).status for _ in range(20)]
            closed = [node for node in nodes if proxy.state("node", node.key) is State.CLOSED]
            assert len(closed) == stay
            assert statuses[-1] == (500 if stay else 503), "what stays closed goes on being asked"


@pytest.mark.parametrize("mode", ["shadow", "off"])
async def test_breaker_that_does_not_enforce_refuses_nobody(mode: str) -> None:
    async with Upstream(one_by_one(*[BROKEN] * 5, says(whole_stream()))) as node:
        plan = service(node, breakers=node_breaker(1, mode=mode), retry=NO_RETRY)
        async with sidecar(plan) as proxy:
            statuses = [(await proxy.once(chat())).status for _ in range(7)]
            assert statuses == [500] * 5 + [200] * 2
            assert proxy.state("node", node.key) is (State.OPEN if mode == "shadow" else State.CLOSED)


async def test_fallback_service_serves_when_nothing_here_can() -> None:
    async with Upstream(one_by_one(BROKEN)) as bad, Upstream(one_by_one(says(whole_stream()))) as good:
        main = service(bad, name="chat", models=("*",), fallback="small", breakers=node_breaker(1), retry=NO_RETRY)
        small = service(good, name="small", models=("small",))
        async with sidecar(main, small) as proxy:
            assert (await proxy.once(chat())).status == 500
            assert proxy.state("node", bad.key) is State.OPEN
            got = await proxy.once(chat())
            assert (got.status, got.header(b"x-sidecar-endpoint")) == (200, good.key.encode())
            assert len(bad.requests) == 1
