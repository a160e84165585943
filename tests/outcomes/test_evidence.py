"""An engine that hangs ends nothing: what is late opens its breaker while the requests still run, and is told in words.

No deadline is near here, so nothing but the detector can open anything.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

from sidecar.core.breaker import State
from sidecar.core.pool import Node
from sidecar.policy.schema import Adaptive, Hedge, Mode, Retry
from sidecar.settings import Listen
from tests.harness import Client, Gone, Peer, Upstream, connect, eventually, one_by_one, request
from tests.under_test import Sidecar, chat, node_breaker, service, sidecar, whole_stream


class Engine:
    """Answers, or hangs while `hung`."""

    def __init__(self) -> None:
        self.hung = False
        self.upstream = Upstream(one_by_one(self._behave))

    async def _behave(self, peer: Peer) -> None:
        if self.hung:
            await peer.gone()
            raise Gone
        await peer.send(whole_stream())


async def breakers(proxy: Sidecar) -> dict[str, dict[str, object]]:
    """`GET /breakers` by key."""
    assert proxy.running.admin_port is not None
    async with connect(proxy.running.admin_port) as client:
        got = await client.ask(request(b"/breakers"))
    return {line["key"]: line for line in json.loads(got.body)}


@contextlib.asynccontextmanager
async def learnt(hedge: Mode = "off") -> AsyncIterator[tuple[Sidecar, Engine, list[str]]]:
    """A sidecar that has learnt what is usual from three engines; one of these, and the sessions that are bound to it.

    Five failures in a row would open it by the fixed rules; nothing fails here.
    """
    engines = [Engine() for _ in range(3)]
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine.upstream)
        plan = service(
            *(engine.upstream for engine in engines),
            breakers=node_breaker(5, min_closed_ratio=0.34, adaptive=Adaptive(min_samples=30)),
            hedge=Hedge(mode=hedge),
            retry=Retry(attempts=2),
        )
        proxy = await stack.enter_async_context(sidecar(plan, admin=Listen("127.0.0.1", 0)))
        page = await breakers(proxy)
        assert [line["evidence"] for line in page.values()] == [""] * 3
        assert all(_detector(line)["learning"] is True for line in page.values())
        homes: dict[str, list[str]] = {}
        for number in range(60):
            got = await proxy.once(chat(session=f"s{number}"))
            homes.setdefault(got.header(b"x-sidecar-endpoint").decode(), []).append(f"s{number}")
        [state] = proxy.running.fleet.services.values()
        nodes = list(state.nodes.values())
        # Once a second what was sampled is learnt.
        await eventually(lambda: all(_has_learnt(node) for node in nodes), "what is usual")
        yield proxy, engines[0], homes[engines[0].upstream.key]


async def test_hung_engine_is_opened_by_what_is_late_while_it_runs_and_the_page_says_so() -> None:
    async with learnt() as (proxy, sick, sessions), contextlib.AsyncExitStack() as stack:
        key = sick.upstream.key
        sick.hung = True
        clients: list[Client] = []
        for session in sessions[:8]:
            client = await stack.enter_async_context(proxy.client())
            await client.send(chat(session=session))
            clients.append(client)
            if proxy.state("node", key) is State.OPEN:
                break
            await asyncio.sleep(0.25)
        await eventually(lambda: proxy.state("node", key) is State.OPEN, "the hung engine's breaker to open")
        assert not any(client.received for client in clients), "no request has ended"
        line = (await breakers(proxy))[key]
        assert line["state"] == "open" and line["why"] in ("fast", "gray", "location")
        assert isinstance(line["evidence"], str) and "expected" in line["evidence"]
        assert _detector(line)["learning"] is False
        others = [await proxy.once(chat(session=session)) for session in sessions[:3]]
        assert all(got.header(b"x-sidecar-endpoint") != key.encode() for got in others)
        assert await late(proxy, key) >= 3
        for client in clients:
            client.reset()


async def test_late_request_moves_to_another_endpoint_and_its_client_is_served() -> None:
    async with learnt("enforce") as (proxy, sick, sessions):
        sick.hung = True
        got = await proxy.once(chat(session=sessions[0]))
        assert (got.status, got.header(b"x-sidecar-attempts")) == (200, b"2")
        assert got.header(b"x-sidecar-endpoint") != sick.upstream.key.encode()
        await sick.upstream.connections[-1].gone()
        assert await late(proxy, sick.upstream.key) == 1
        assert proxy.state("node", sick.upstream.key) is State.CLOSED, "one late answer is no evidence"


async def test_in_shadow_mode_a_late_request_stays_where_it_is_and_is_counted() -> None:
    async with learnt("shadow") as (proxy, sick, sessions), proxy.client() as client:
        sick.hung = True
        await client.send(chat(session=sessions[0]))
        [state] = proxy.running.fleet.services.values()
        await eventually(lambda: state.hedge_shadowed == 1, "the request to be late")
        await client.settled()
        assert not client.received and not sick.upstream.connections[-1].ended
        client.reset()


async def late(proxy: Sidecar, key: str) -> int:
    """How many attempts on an endpoint were late."""
    text, _ = await proxy.running.exposition()
    start = f'sidecar_late_attempts_total{{service="default",endpoint="{key}"}} '
    [line] = [line for line in text.decode().splitlines() if line.startswith(start)]
    return int(line.removeprefix(start))


def _has_learnt(node: Node) -> bool:
    detector = node.detector
    return detector is not None and detector.line is not None and detector.line.ready


def _detector(line: dict[str, object]) -> dict[str, object]:
    detector = line["detector"]
    assert isinstance(detector, dict)
    return detector
