"""Poison among the traffic of a busy fleet, on virtual time: what it costs, and whether anybody else pays for it."""

import random
from collections import Counter
from typing import Literal

import msgspec
import pytest

from sidecar.kernel.ids import EndpointKey
from sidecar.policy.schema import Breakers, Endpoint, Mode, NodeBreaker, Poison, RequestBreaker, Retry
from sidecar.proxy.ports import Sink
from tests import under_test
from tests.clock import Clock
from tests.proxy.bench import Bench, endpoints, request_of, service
from tests.proxy.fakes import FakeClient, FakeConnector, FakeLink
from tests.under_test import DONE, FINISH, SESSION_OFF, token

NODES = 6
RESTART_S = 30.0
DIES_AFTER_S = 0.3
ASKS_AGAIN_S = 5.0
POISON = "poison"

Way = Literal["crash", "hang"]


class Engines(FakeConnector):
    """Engines that die of poison, and serve again after `RESTART_S`: a crash breaks all connections, a hang none."""

    def __init__(self, clock: Clock, drawn: random.Random, way: Way) -> None:
        super().__init__()
        self.clock = clock
        self.drawn = drawn
        self.way = way
        self.back_at: dict[EndpointKey, float] = {}
        self.out: dict[EndpointKey, list[FakeLink]] = {}
        self.deaths = 0

    def open(self, key: EndpointKey, endpoint: Endpoint, connect_s: float, sink: Sink, *, fresh: bool = False) -> None:
        clock, dead = self.clock, self.dead(key)
        if dead and self.way == "crash":
            sink.on_connect_failed("nobody listens")
            return
        link = FakeLink()
        sink.on_connected(link)
        if dead:
            return
        self.out.setdefault(key, []).append(link)
        if POISON.encode() in link.body:
            clock.call_later(DIES_AFTER_S, self.die, key)
            return
        ttft_s = self.drawn.uniform(0.1, 0.6)
        clock.call_later(ttft_s, self.begin, key, link)
        clock.call_later(ttft_s + min(8.0, self.drawn.expovariate(1.0)), self.finish, key, link)

    def dead(self, key: EndpointKey) -> bool:
        return self.back_at.get(key, 0.0) > self.clock.now

    def begin(self, key: EndpointKey, link: FakeLink) -> None:
        if link in self.out[key]:
            link.heads().says(token(0))

    def finish(self, key: EndpointKey, link: FakeLink) -> None:
        if link in self.out[key]:
            self.out[key].remove(link)
            link.says(FINISH + DONE).ends()

    def die(self, key: EndpointKey) -> None:
        if self.dead(key):
            return
        self.deaths += 1
        self.back_at[key] = self.clock.now + RESTART_S
        links, self.out[key] = self.out[key], []
        self.drawn.shuffle(links)
        for link in links:
            if self.way == "crash":
                link.lost()


class World:
    """Innocents at `rate` per node and second, and, from the tenth second on, one client with poison (or none).

    `same`: the innocents all send one prompt.
    """

    def __init__(
        self, way: Way, rate: float, *, mode: Mode = "enforce", poison: bool = True, same: bool = False
    ) -> None:
        self.same = same
        self.drawn = random.Random(7)
        node = NodeBreaker(adaptive=False)
        breakers = Breakers(
            node=node, session=SESSION_OFF, request=RequestBreaker(mode="off", poison=Poison(mode=mode))
        )
        plan = msgspec.structs.replace(
            service(), endpoints=endpoints(NODES), breakers=breakers, retry=Retry(attempts=3, budget_min=10)
        )
        self.bench = Bench(plan, chance=self.drawn.random)
        self.clock = self.bench.clock
        self.engines = Engines(self.clock, self.drawn, way)
        self.bench.pipeline.connector = self.engines
        self.rate = rate * NODES
        self.count = 0
        self.innocents: list[FakeClient] = []
        self.poisoners: list[FakeClient] = []
        self.clock.call_later(0.0, self.arrive)
        if poison:
            self.clock.call_later(10.0, self.poison)

    def ask(self, text: str) -> FakeClient:
        return self.bench.begin(request_of(under_test.chat(text=text)))

    def arrive(self) -> None:
        self.count += 1
        self.innocents.append(
            self.ask("hello!" if self.same else f"{self.count:06d}")
        )  # as long as the poison: each is hashed
        self.clock.call_later(self.drawn.expovariate(self.rate), self.arrive)

    def poison(self) -> None:
        self.poisoners.append(self.ask(POISON))
        self.clock.call_later(ASKS_AGAIN_S, self.poison)

    def run(self, seconds: float) -> None:
        self.clock.advance(seconds)
        assert not self.bench.crashes

    @property
    def refused(self) -> Counter[str]:
        """Innocents, by the reason."""
        return Counter(client.refusal.reason.value for client in self.innocents if client.refusal is not None)


@pytest.mark.parametrize(("rate", "nodes"), [(0.3, 2), (4.0, 3)], ids=["quiet", "busy"])
def test_poison_that_crashes_costs_two_endpoints_and_on_a_busy_fleet_three(rate: float, nodes: int) -> None:
    world = World("crash", rate)
    world.run(120.0)
    assert world.engines.deaths == nodes
    assert all(client.refusal is not None for client in world.poisoners)
    assert world.refused["poisoned_request"] == 0


@pytest.mark.parametrize("rate", [0.3, 4.0], ids=["quiet", "busy"])
@pytest.mark.parametrize("way", ["crash", "hang"])
def test_without_it_poison_goes_on_killing(way: Way, rate: float) -> None:
    with_it, without = World(way, rate), World(way, rate, mode="off")
    for world in (with_it, without):
        world.run(120.0)
    assert with_it.engines.deaths <= without.engines.deaths / 2
    # On few endpoints most of which hang, somebody may have been on two.
    assert with_it.refused["poisoned_request"] <= (way == "hang")
    assert sum(with_it.refused.values()) < sum(without.refused.values())


@pytest.mark.parametrize("way", ["crash", "hang"])
@pytest.mark.parametrize("dead", [1, 2, NODES], ids=["one", "two", "all"])
def test_an_outage_condemns_next_to_nobody(way: Way, dead: int) -> None:
    world = World(way, 4.0, poison=False)

    def outage() -> None:
        for key in list(world.engines.out)[:dead]:
            world.engines.die(key)

    world.clock.call_later(20.0, outage)
    world.run(90.0)
    assert world.engines.deaths == dead
    # Only who was on one endpoint as it died, and was sent to another that died a moment later.
    allowed = 0 if dead < NODES else 2 * NODES
    assert world.refused["poisoned_request"] <= allowed
    assert world.bench.state.suspects.condemnations <= allowed
    world.run(400.0)
    assert not world.bench.state.suspects.armed, "all is forgotten"


@pytest.mark.parametrize("way", ["crash", "hang"])
@pytest.mark.parametrize("dead", [1, 2, NODES], ids=["one", "two", "all"])
@pytest.mark.parametrize("rate", [0.3, 4.0], ids=["quiet", "busy"])
def test_traffic_that_is_all_one_prompt_outlives_an_outage(way: Way, dead: int, rate: float) -> None:
    world = World(way, rate, poison=False, same=True)

    def outage() -> None:
        for key in list(world.engines.out)[:dead]:
            world.engines.die(key)

    world.clock.call_later(20.0, outage)
    # They are back after 30 s. The last that hung are known by their deadline, 30 s later; it is tried 15 s after that.
    world.run(110.0)
    assert world.engines.deaths == dead
    if dead < NODES:
        assert world.refused["poisoned_request"] == 0
    # Where all died, nothing tells it from poison, until it is tried on those that came back.
    before = len(world.innocents)
    world.run(60.0)
    assert all(client.refusal is None for client in world.innocents[before:])
