"""T01: a node that was open gets exactly the configured probes, whatever the crowd; a lost one frees its place.

Where nobody else may serve, and with `probe: request`, the request itself is the probe; `test_probe_copies` has the
others.
"""

import asyncio
import contextlib
from typing import Literal

import pytest

from sidecar.core.breaker import Scope, State
from sidecar.policy.schema import Adaptive, Balance, Retry, Seconds
from tests.harness import Client, Gone, Peer, Script, Upstream, eventually, one_by_one, says
from tests.under_test import (
    PATIENT,
    Sidecar,
    chat,
    endpoint,
    error_body,
    json_answer,
    node_breaker,
    refusal,
    service,
    sidecar,
    stream_head,
    whole_stream,
)

OPEN = Seconds(0.15)
BY_REQUEST = Adaptive(probe="request")
BROKEN = says(json_answer(error_body(), b"500 Internal Server Error"))
OK = says(whole_stream())


def gated(gate: asyncio.Event, data: bytes) -> Script:
    """A behaviour: answers once the gate is open."""

    async def behave(peer: Peer) -> None:
        await gate.wait()
        await peer.send(data)

    return behave


async def open_up(proxy: Sidecar, upstream: Upstream, times: int) -> None:
    """Fails as often as it takes."""
    for _ in range(times):
        await proxy.once(chat())
    assert proxy.state("node", upstream.key) is State.OPEN


@pytest.mark.parametrize("probes", [1, 3])
@pytest.mark.parametrize(
    ("other", "probe"),
    [
        pytest.param(True, "copy", id="other-node-copies"),
        pytest.param(True, "request", id="other-node"),
        pytest.param(False, "copy", id="alone"),
    ],
)
async def test_crowd_after_the_wait_sends_exactly_the_probes(
    probes: int, other: bool, probe: Literal["copy", "request"]
) -> None:
    gate = asyncio.Event()
    script = one_by_one(*[BROKEN] * 5, gated(gate, whole_stream()))
    async with Upstream(script) as first, Upstream(one_by_one(OK)) as second:
        nodes = [endpoint(first, local=True), second] if other else [first]
        plan = service(
            *nodes,
            balance=Balance(local_first=True),
            breakers=node_breaker(5, open_s=OPEN, probes=probes, successes=probes, adaptive=Adaptive(probe=probe)),
            retry=Retry(attempts=2, budget_min=100) if other else Retry(attempts=1),
        )
        async with sidecar(plan) as proxy, contextlib.AsyncExitStack() as stack:
            await open_up(proxy, first, 5)
            seen_by_second = len(second.requests)
            await asyncio.sleep(OPEN + 0.02)
            clients: list[Client] = [await stack.enter_async_context(proxy.client()) for _ in range(50)]
            for client in clients:
                await client.send(chat())
            others = 50 if other and probe == "copy" else 50 - probes
            if other:
                await eventually(lambda: len(second.requests) - seen_by_second == others, "the others at B")
            else:
                await eventually(lambda: sum(bool(client.received) for client in clients) == others, "refusals")
            await eventually(lambda: len(first.requests) >= 5 + probes, "the probes")
            await clients[0].settled()
            assert len(first.requests) == 5 + probes
            assert proxy.state("node", first.key) is State.HALF_OPEN
            gate.set()
            answers = [await client.response(b"POST") for client in clients]
            served = [got for got in answers if got.status == 200]
            assert len(served) == (50 if other else probes)
            for got in answers:
                if got.status != 200:
                    assert refusal(got) == (503, "breaker_open", "breaker_open")
                    assert int(got.header(b"retry-after")) >= 1
            # Nobody waits for a copy.
            await eventually(lambda: proxy.state("node", first.key) is State.CLOSED, "the verdict")


async def test_success_closes_only_after_as_many_as_configured() -> None:
    async with Upstream(one_by_one(BROKEN, OK)) as upstream:
        plan = service(upstream, breakers=node_breaker(1, open_s=OPEN, successes=3))
        async with sidecar(plan) as proxy:
            await open_up(proxy, upstream, 1)
            await asyncio.sleep(OPEN + 0.02)
            for _ in range(3):
                # Its first probe was lent when the wait was over, before anybody asked for it.
                assert proxy.state("node", upstream.key) is State.HALF_OPEN
                assert (await proxy.once(chat())).status == 200
            assert proxy.state("node", upstream.key) is State.CLOSED


async def test_failed_probe_reopens_for_longer() -> None:
    async with Upstream(one_by_one(BROKEN)) as upstream:
        plan = service(upstream, breakers=node_breaker(1, open_s=OPEN), retry=Retry(attempts=1))
        async with sidecar(plan) as proxy:
            await open_up(proxy, upstream, 1)
            waits = []
            for _ in range(2):
                [view] = [view for view in proxy.running.fleet.views(proxy.running.now()) if view.scope == "node"]
                waits.append(view.retry_at - view.since)
                await asyncio.sleep(view.retry_at - proxy.running.now() + 0.01)
                assert (await proxy.once(chat())).status == 500
                assert proxy.state("node", upstream.key) is State.OPEN
            assert waits[0] == pytest.approx(OPEN, abs=0.001)
            assert waits[1] > waits[0] * 1.5
            count = len(upstream.requests)
            assert (await proxy.once(chat())).status == 503
            assert len(upstream.requests) == count


def _left_before_head(gate: asyncio.Event) -> Script:
    async def behave(peer: Peer) -> None:
        gate.set()
        await peer.gone()
        raise Gone

    return behave


def _left_after_head(gate: asyncio.Event) -> Script:
    async def behave(peer: Peer) -> None:
        await peer.send(stream_head())
        gate.set()
        await peer.gone()
        raise Gone

    return behave


@pytest.mark.parametrize("kind", [_left_before_head, _left_after_head], ids=["before-head", "after-head"])
async def test_probe_whose_client_leaves_is_inconclusive(kind: object) -> None:
    assert callable(kind)
    gate = asyncio.Event()
    async with Upstream(one_by_one(BROKEN, kind(gate), OK)) as upstream:
        plan = service(upstream, breakers=node_breaker(1, open_s=OPEN, successes=1))
        async with sidecar(plan) as proxy:
            await open_up(proxy, upstream, 1)
            await asyncio.sleep(OPEN + 0.02)
            async with proxy.client() as client:
                await client.send(chat())
                await gate.wait()
                await client.settled()
                assert (await proxy.once(chat())).status == 503, "its place is taken"
                client.reset()
                await upstream.connections[-1].gone()
            assert proxy.state("node", upstream.key) is State.HALF_OPEN
            assert (await proxy.once(chat())).status == 200, "the place is free: the next request probes"
            assert proxy.state("node", upstream.key) is State.CLOSED


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(json_answer(error_body(b"bad", b"400"), b"400 Bad Request"), id="400"),
        pytest.param(json_answer(error_body(b"full", b"429"), b"429 Slow", [b"retry-after-ms: 1"]), id="429"),
    ],
)
async def test_probe_that_says_nothing_of_the_node_is_inconclusive(answer: bytes) -> None:
    async with Upstream(one_by_one(BROKEN, says(answer), OK)) as upstream:
        plan = service(upstream, breakers=node_breaker(1, open_s=OPEN, successes=1), retry=Retry(attempts=1))
        async with sidecar(plan) as proxy:
            await open_up(proxy, upstream, 1)
            await asyncio.sleep(OPEN + 0.02)
            assert (await proxy.once(chat())).status in (400, 429)
            assert proxy.state("node", upstream.key) is State.HALF_OPEN
            await asyncio.sleep(0.01)
            assert (await proxy.once(chat())).status == 200
            assert proxy.state("node", upstream.key) is State.CLOSED


async def test_probe_goes_before_any_preference() -> None:
    async with Upstream(one_by_one(OK)) as near, Upstream(one_by_one(BROKEN, OK)) as far:
        plan = service(
            endpoint(near, local=True),
            far,
            balance=Balance(local_first=True),
            breakers=node_breaker(1, open_s=OPEN, successes=1, adaptive=BY_REQUEST),
            deadlines=PATIENT,
        )
        async with sidecar(plan) as proxy:
            near_key = near.key
            proxy.running.fleet.override(Scope.NODE, near_key, "open", proxy.running.now(), "test")
            await proxy.once(chat())
            assert proxy.state("node", far.key) is State.OPEN
            proxy.running.fleet.override(Scope.NODE, near_key, "reset", proxy.running.now(), "test")
            await asyncio.sleep(OPEN + 0.02)
            assert (await proxy.once(chat())).header(b"x-sidecar-endpoint") == far.key.encode()
            assert (await proxy.once(chat())).header(b"x-sidecar-endpoint") == near_key.encode()
