"""What a pool keeps at hand, against looking at every node."""

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace

from sidecar.core.breaker import FEWEST_REMEMBERED, Action, Permit, Roster
from sidecar.core.fleet import Fleet
from sidecar.core.pool import LOOKS, SLACK, Node, Pool
from sidecar.core.service import MAX_POOLS, ServiceState
from sidecar.kernel.ids import VersionName
from sidecar.kernel.outcome import Result
from sidecar.policy.schema import Endpoint, NodeBreaker, Seconds, Service
from tests.core.build import fleet_of, service_of, snapshot_of, trip


class Places(RuleBasedStateMachine):
    """Any history: `ready` is who may serve, and who may be probed is found; pools asked late know it, too."""

    @initialize(count=st.integers(1, 12))
    def start(self, count: int) -> None:
        self.now = 0.0
        rule_ = NodeBreaker(
            consecutive=1, failure_ratio=0.0, open_s=Seconds(5), open_max_s=Seconds(20), min_closed_ratio=0.0
        )
        policy = service_of(count, rule_, v1=1, v2=1)
        endpoints = tuple(replace(each, local=number % 3 == 0) for number, each in enumerate(policy.endpoints))
        self.fleet, self.service = fleet_of(replace(policy, endpoints=endpoints))
        self.pools: list[Pool] = [self.service.pool("", None), self.service.pool("", VersionName("v2"))]

    def some(self, data: st.DataObject) -> Node:
        return data.draw(st.sampled_from(list(self.service.nodes.values())))

    @rule(step=st.floats(0, 12))
    def later(self, step: float) -> None:
        self.now += step

    @rule(data=st.data(), result=st.sampled_from(Result))
    def tries(self, data: st.DataObject, result: Result) -> None:
        breaker = self.some(data).breaker
        permit = breaker.acquire(self.now)
        if isinstance(permit, Permit) and data.draw(st.booleans()):
            breaker.record(permit, result, self.now, "x")

    @rule(data=st.data(), wait_s=st.floats(0, 10))
    def is_full(self, data: st.DataObject, wait_s: float) -> None:
        self.service.overloaded(self.some(data), wait_s, self.now)

    @rule(data=st.data(), action=st.sampled_from(["open", "close", "reset"]))
    def is_ordered(self, data: st.DataObject, action: Action) -> None:
        self.some(data).breaker.force(action, self.now, "ann")

    @rule()
    def much_happens(self) -> None:
        for _ in range(FEWEST_REMEMBERED + 1):
            self.service.roster.stir("elsewhere")

    @rule(which=st.integers(0, 1))
    def asks(self, which: int) -> None:
        self.check(self.pools[which])

    def check(self, pool: Pool) -> None:
        pool.refresh(self.now)
        calm = [node for node in pool.nodes if node.overload_until <= self.now]
        usable = {node.key for node in calm if node.breaker.passes}
        probing = {node.key for node in calm if not node.breaker.passes and node.breaker.can_probe(self.now)}
        assert {node.key for node in pool.ready.nodes} == usable and len(pool.ready.nodes) == len(usable)
        assert {node.key for node in pool.nodes if pool.ready.get(node.key) is node} == usable
        assert {node.key for node in pool.local.nodes} == {node.key for node in pool.ready.nodes if node.endpoint.local}
        assert probing <= set(pool.due)
        found = pool.probe((), self.now)
        assert (found is None) == (not probing) and (found is None or found.key in probing)
        assert pool.may_serve((), self.now) == bool(usable or probing)
        assert pool.has_ready(()) == bool(usable) and not pool.has_ready(usable)
        assert pool.may_serve(usable, self.now) == bool(probing)
        assert not pool.may_serve(usable | probing, self.now)

    @invariant()
    def memory_is_bounded(self) -> None:
        if hasattr(self, "pools"):
            for pool in self.pools:
                assert len(pool._heap) <= 2 * len(pool.nodes) + SLACK


Places.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPlaces = Places.TestCase


def test_a_roster_tells_who_changed_and_admits_what_it_forgot() -> None:
    roster = Roster()
    assert roster.since(0) == [] and roster.since(-1) is None
    roster.stir("a")
    seen = roster.stirs
    roster.stir("b")
    roster.stir("c")
    assert roster.since(seen) == ["b", "c"] and roster.since(roster.stirs) == []
    for number in range(10 * FEWEST_REMEMBERED):
        roster.stir(str(number))
        assert len(roster.since(roster.stirs - 1) or []) == 1
    assert roster.since(seen) is None
    recent = roster.since(roster.stirs - FEWEST_REMEMBERED)
    assert recent is not None and recent[-1] == str(10 * FEWEST_REMEMBERED - 1)


def test_flapping_does_not_fill_the_heap() -> None:
    _, service = fleet_of(service_of(3, NodeBreaker(open_s=Seconds(3600), open_max_s=Seconds(3600))))
    pool = service.pool("", None)
    for turn in range(2000):
        service.overloaded(pool.nodes[0], 30.0, turn / 1000)
        pool.refresh(turn / 1000)
    assert len(pool._heap) <= 2 * 3 + SLACK
    pool.refresh(math.nextafter(32.0, math.inf))
    assert len(pool.ready.nodes) == 3


def test_probes_that_were_all_tried_or_lent_are_none() -> None:
    _, service = fleet_of(service_of(2))
    pool = service.pool("", None)
    for node in pool.nodes:
        trip(node.breaker, 0.0)
    pool.refresh(10.0)
    first = pool.probe((), 10.0)
    assert first is not None
    assert isinstance(first.breaker.acquire(10.0), Permit)
    second = pool.probe((), 10.0)
    assert second is not None and second is not first
    assert pool.probe((second.key,), 10.0) is None
    assert pool.probe((second.key,), 9.0) is None, "a clock that went back"


def lora_service(reports: bool) -> tuple[Fleet, ServiceState]:
    endpoints = tuple(
        Endpoint(url=f"http://h{number}:80", models=("*",) if reports else ("base", f"lora-{number % 2}"))
        for number in range(1, 11)
    )
    fleet, service = fleet_of(Service(name="chat", endpoints=endpoints))
    if reports:
        for number, node in enumerate(service.nodes.values(), 1):
            node.models = frozenset({"base", f"lora-{number % 2}"})
    return fleet, service


@pytest.mark.parametrize("reports", [False, True])
def test_models_of_the_same_nodes_share_a_pool(reports: bool) -> None:
    _, service = lora_service(reports)
    whole = service.pool("", None)
    assert service.pool("base", None) is whole
    assert len(service.pool("lora-0", None).nodes) == 5
    unknown = service.pool("made-up-0", None)
    assert unknown.unknown_model and not unknown.nodes
    assert service.pool("made-up-1", None) is unknown


def test_a_model_that_is_not_ready_anywhere_is_not_unknown() -> None:
    endpoints = (Endpoint(url="http://a:80", models=("smol-*",)), Endpoint(url="http://b:80", models=("big",)))
    _, service = fleet_of(Service(name="chat", endpoints=endpoints))
    small, big = service.nodes.values()
    small.models = frozenset()
    for name, unknown in (("smol-1", False), ("made-up", True), ("smol-2", False)):
        pool = service.pool(name, None)
        assert (pool.nodes, pool.unknown_model) == ((), unknown), name
    assert service.pool("big", None).nodes == (big,)
    small.models = None
    assert service.pool("smol-1", None).nodes == (small,)


def test_names_made_up_do_not_cost_the_pools() -> None:
    _, service = lora_service(True)
    whole, part = service.pool("", None), service.pool("lora-1", None)
    for number in range(3 * MAX_POOLS):
        service.pool(f"made-up-{number}", None)
    assert len(service._pools) <= MAX_POOLS
    assert service.pool("", None) is whole and service.pool("lora-1", None) is part


def test_a_reload_begins_anew() -> None:
    fleet, service = fleet_of(service_of(3))
    before = service.pool("", None)
    fleet.apply(snapshot_of(service_of(2)), 1.0)
    after = service.pool("", None)
    after.refresh(1.0)
    assert after is not before and len(after.ready.nodes) == 2


def test_room_is_found_wherever_it_is_and_a_part_of_very_many_at_a_time() -> None:
    _, service = fleet_of(service_of(3 * LOOKS))
    pool = service.pool("", None)
    pool.refresh(0.0)
    nodes = pool.ready.nodes
    for node in nodes:
        node.limit = 0
    assert not pool.has_room(0.0)
    nodes[-1].limit = 1
    assert sum(pool.has_room(0.0) for _ in range(3)) >= 1
    assert pool.has_room(0.0)  # it looks there first now
    nodes[-1].in_flight = 1
    assert not any(pool.has_room(0.0) for _ in range(4))


def test_a_probe_is_room_until_it_is_lent() -> None:
    _, service = fleet_of(service_of(1))
    (node,) = service.nodes.values()
    node.limit = 0
    pool = service.pool("", None)
    trip(node.breaker, 0.0)
    now = node.breaker.probe_at(0.0)
    pool.refresh(now)
    assert pool.has_room(now) and pool.has(node)
    assert isinstance(node.breaker.acquire(now), Permit)
    assert not pool.has_room(now)


def test_pools_of_the_same_kinds_of_nodes_say_so_when_nodes_come_and_go() -> None:
    fleet, service = fleet_of(service_of(2))
    before = service.pool("m", None)
    fleet.apply(snapshot_of(service_of(3)), 0.0)
    after = service.pool("m", None)
    assert before is not after and before.kinds == after.kinds
    assert not before.has(next(reversed(service.nodes.values())))
