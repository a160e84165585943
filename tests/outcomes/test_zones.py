"""A zone that slows down is spared by all sidecars within seconds, whoever of them notices, and has all back at a word.

Real sidecars, a real server of the log, real streams. What a minute of quiet traffic would have taught is told to the
sidecars beforehand; how a zone comes back by itself takes a minute, and is played in virtual time (`tests.core`).
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from sidecar.core.revise import Refused
from sidecar.core.sketch import bucket_of
from sidecar.core.table import Table
from sidecar.core.zone import Turn, turned
from sidecar.policy.schema import Breakers, NodeBreaker, Seconds, ZoneDecay
from tests.harness import Peer, Upstream, one_by_one
from tests.outcomes.pods import SERVICE, Pod, pods
from tests.servers import valkey
from tests.under_test import REQUEST_OFF, SESSION_OFF, chat, endpoint, service, whole_stream

LIMIT_S = 15.0
"""How long a test waits for what takes three seconds: spent only where it fails."""
RULE = ZoneDecay(latency_s=Seconds(0.1), weight=0.1)
FIXED = Breakers(node=NodeBreaker(adaptive=False), session=SESSION_OFF, request=REQUEST_OFF)
QUIET_S = 60


class Zone:
    """Two endpoints, as slow as it says."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.first_token_s = 0.005
        self.engines = [Upstream(one_by_one(self._answers)) for _ in range(2)]

    async def _answers(self, peer: Peer) -> None:
        await asyncio.sleep(self.first_token_s)
        await peer.send(whole_stream())


def teach(pod: Pod) -> None:
    """A minute in which all zones were quick."""
    state = pod.running.fleet.services[SERVICE]
    watch = pod.running.zones.watch(state)
    now_us = pod.running.logbook.replica.server.now_us(pod.running.now())
    for second in range(-QUIET_S, 0):
        at_us = now_us + second * 1_000_000
        for name in "abc":
            watch.heard(at_us, name, ({bucket_of(0.01): 3}, 0, 0))
        assert watch.conclude(RULE, state.ready_zones(pod.running.now()), {}, at_us) is None


@contextlib.asynccontextmanager
async def asking(some: list[Pod], seen: Counter[str], names: dict[str, str]) -> AsyncIterator[None]:
    """Twelve clients at each sidecar ask one thing after the other; `seen` counts answers by zone."""

    async def asks(pod: Pod) -> None:
        async with pod.client() as client:
            while True:
                answer = await client.ask(chat(), b"POST")
                assert answer.status == 200
                seen[names[answer.header(b"x-sidecar-endpoint").decode()]] += 1
                await asyncio.sleep(0.03)

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(asks(pod)) for pod in some for _ in range(12)]
        try:
            yield
        finally:
            for each in running:
                each.cancel()


async def until(ready: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not ready():
            await asyncio.sleep(0.01)


def shares(pod: Pod) -> dict[str, float]:
    state = pod.running.fleet.services[SERVICE]
    return {node.endpoint.zone: node.share for node in state.nodes.values()}


async def test_a_zone_that_slows_down_is_spared_by_all_sidecars(tmp_path: Path) -> None:
    zones = [Zone(name) for name in "abc"]
    async with contextlib.AsyncExitStack() as stack:
        for engine in (engine for zone in zones for engine in zone.engines):
            await stack.enter_async_context(engine)
        names = {engine.key: zone.name for zone in zones for engine in zone.engines}
        plan = service(
            *(endpoint(engine, zone=zone.name) for zone in zones for engine in zone.engines),
            breakers=FIXED,
            zone_decay=RULE,
        )
        server = await stack.enter_async_context(valkey(tmp_path))
        some = await stack.enter_async_context(pods([server.url] * 2, plan, tmp_path))
        for pod in some:
            teach(pod)
        seen: Counter[str] = Counter()
        async with asking(some, seen, names):
            await asyncio.sleep(0.3)
            zones[0].first_token_s = 0.25
            await until(lambda: all(shares(pod)["a"] < 1.0 for pod in some))
            seen.clear()
            await until(lambda: seen.total() >= 300)
            spared = seen["a"] / seen.total()
        assert all(shares(pod) == {"a": 0.1, "b": 1.0, "c": 1.0} for pod in some)
        # 4.8 % of the requests, of which some are still to come.
        assert spared < 0.1, seen
        views = [pod.running.routes.standing(SERVICE) for pod in some]
        assert views[0] is not None and views[0] == views[1]
        assert views[0].why == "zone_slow" and views[0].evidence.startswith("zone a: first tokens took 0.2")
        assert sum(pod.running.zones.turns.get("zone_slow", 0) for pod in some) == 1, "one of them wrote it"
        decay = views[0].table.zones["a"]

        def back(table: Table) -> Table | Refused:
            made = turned(table, Turn("a", 1.0, "zone_back", "", decay.since_us, 1), decay.since_us + 1)
            assert made is not None
            return made

        await some[1].running.routes.change(SERVICE, back, "operator", "zone_back")
        await until(lambda: all(shares(pod)["a"] == 1.0 for pod in some))
