"""Who waits for which endpoints, and what reloads leave of it."""

import math
from collections import Counter

from msgspec.structs import replace

from sidecar.core.classes import Classes
from sidecar.core.gate.admit import Ticket
from sidecar.core.gate.lanes import MAX_LANES, MAX_TENANTS
from sidecar.core.gate.turns import OUT, QUEUED
from sidecar.kernel.ids import VersionName
from sidecar.policy.schema import Admission, QosPolicy, Seconds
from tests.core.gate.build import BATCH, TEXT, VOICE, World, full


def test_requests_whose_endpoints_are_full_do_not_hold_up_others() -> None:
    world = World(1, 1, models=(("x",), ("y",)))
    world.come("text", model="x")
    waits = world.come("text", model="x")
    assert world.enter(world.ticket("batch", model="y")) is True
    later = world.come("batch", model="y")
    world.nodes[1].limit = 2
    assert world.turns() == [later] and waits.state == QUEUED


def test_where_lanes_overlap_priority_counts_over_both() -> None:
    world = World(1, 1, models=(("x", "y"), ("y",)))
    running = [world.come("text", model="x"), world.come("text", model="y")]
    batch, voice = world.come("batch", model="x"), world.come("voice", model="y")
    world.leave(running[0])
    assert world.turns() == [voice] and batch.state == QUEUED


def test_versions_wait_apart() -> None:
    world = World(1)
    policy = world.service.policy
    endpoints = (policy.endpoints[0], replace(policy.endpoints[0], url="http://h2:80", version="v2"))
    world.put(replace(policy, endpoints=endpoints, split={"v1": 99.0, "v2": 1.0}))

    def of(version: str) -> Ticket:
        ticket = world.ticket("text")
        ticket.version = VersionName(version)
        return ticket

    assert world.enter(of("v1")) is True
    assert world.enter(of("v1")) is False
    assert world.enter(of("v2")) is True


def test_who_waits_follows_when_endpoints_come_and_go() -> None:
    world = World(1)
    running = full(world)
    waiting = [world.come("text", tenant) for tenant in ("a", "b", "c")]
    policy = world.service.policy
    more = replace(policy.endpoints[0], url="http://h9:80")
    world.put(replace(policy, endpoints=(*policy.endpoints, more)))
    assert world.turns() == waiting[:1]
    world.put(policy)
    world.leave(running[0])
    assert world.turns() == waiting[1:2]


def test_who_waits_goes_to_the_endpoints_that_have_its_model_now() -> None:
    world = World(1, 5, models=(("x", "y"), ("z",)))
    world.come("text", model="x")
    waiting = [world.come("text", "a", model="x"), world.come("batch", "b", model="y"), world.come("voice", model="x")]
    policy = world.service.policy
    endpoints = (replace(policy.endpoints[0], models=("x",)), replace(policy.endpoints[1], models=("y",)))
    world.put(replace(policy, endpoints=endpoints))
    world.nodes[1].limit = 1
    assert world.turns() == [waiting[1]]
    assert world.gate.queued == 2
    world.nodes[0].limit = 3
    assert world.turns() == [waiting[2], waiting[0]]


# Reloads.


def test_a_reload_keeps_places_and_moves_those_whose_class_is_gone() -> None:
    world = World(1)
    running = full(world)
    waiting = [world.come("batch"), world.come("text"), world.come("voice"), world.come("text")]
    world.classes = Classes((VOICE, replace(BATCH, priority=7)))
    world.gate.use(world.admission, world.classes, world.now)
    assert [ticket.qos.name for ticket in waiting] == ["batch", "default", "voice", "default"]
    assert world.gate.view(world.now).running == 1
    assert sum(seen.running for seen in world.gate.view(world.now).classes) == 1
    order = [world.serve(running)[0] for _ in waiting]
    assert order == [waiting[2], waiting[0], waiting[1], waiting[3]]
    for ticket in list(running):
        world.leave(ticket)
    assert sum(seen.running for seen in world.gate.view(world.now).classes) == 0
    assert world.gate.running == 0


def test_a_ticket_of_the_policy_before_has_the_class_of_its_name() -> None:
    world = World(5)
    tickets = [world.ticket(name) for name in ("voice", "text", "batch")]
    world.classes = Classes((BATCH, VOICE))
    world.gate.use(world.admission, world.classes, world.now)
    for ticket in tickets:
        assert world.enter(ticket) is True
    assert [ticket.qos.name for ticket in tickets] == ["voice", "default", "batch"]
    assert all(ticket.qos in world.classes.all for ticket in tickets)


def test_an_abandoned_gate_gives_all_back_in_their_order() -> None:
    world = World(1)
    running = full(world)
    waiting = [world.come(name) for name in ("batch", "voice", "text", "voice")]
    assert world.gate.abandon(world.now) == waiting
    assert (world.gate.queued, world.gate.due(world.now)) == (0, math.inf)
    for ticket in (*waiting, *running):
        world.gate.leave(ticket, 5, world.now)
    assert world.gate.running == 0 and world.turns() == []


def test_an_abandoned_gate_gives_those_back_too_that_it_had_not_told() -> None:
    world = World(1, admission=Admission(queue=1))
    running = full(world)
    shed, voice = world.come("batch"), world.come("voice")
    assert shed.state == OUT and world.gate.abandon(world.now) == [shed, voice]
    assert world.away() == []
    for ticket in (shed, voice, *running):
        world.gate.leave(ticket, 5, world.now)
    assert (world.gate.queued, world.gate.running) == (0, 0)


def test_who_was_shed_is_told_after_a_reload_to_shadow() -> None:
    world = World(1, admission=Admission(queue=1))
    full(world)
    shed = world.come("batch")
    world.come("voice")
    world.gate.use(Admission(mode="shadow"), Classes(()), world.now)
    assert [ticket for ticket, _ in world.away()] == [shed]
    assert len(world.turns()) == 1


def test_weights_follow_a_reload() -> None:
    world = World(1)
    running = full(world)
    for _ in range(40):
        world.come("text", "a")
        world.come("text", "b")
    world.gate.use(replace(world.admission, tenant_weights={"a": 3.0}), world.classes, world.now)
    given = Counter(world.serve(running)[0].tenant for _ in range(40))
    assert 28 <= given["a"] <= 32


def test_tenants_that_are_idle_are_forgotten() -> None:
    world = World(3)
    held = world.come("text", "held")
    for number in range(MAX_TENANTS + 100):
        ticket = world.ticket("text", f"t{number}")
        assert world.enter(ticket) is True
        world.leave(ticket)
    assert world.gate.view(world.now).tenants <= MAX_TENANTS
    world.leave(held, 5)
    assert world.gate.running == 0


def test_lanes_that_nobody_uses_are_forgotten() -> None:
    world = World(1)
    policy = world.service.policy
    held = world.come("text")
    for number in range(MAX_LANES + 10):
        endpoint = replace(policy.endpoints[0], models=(f"m{number}", "m"))
        world.put(replace(policy, endpoints=(endpoint,)))
        world.nodes[0].limit = 9
        ticket = world.ticket("text", model=f"m{number}")
        assert world.enter(ticket) is True
        world.leave(ticket)
    assert world.gate.view(world.now).tenants <= MAX_LANES + 1
    world.leave(held)
    assert world.gate.running == 0


def test_a_class_that_gets_a_rival_by_a_reload_is_not_made_to_pay_for_what_it_had_alone() -> None:
    long = replace(TEXT, latency_sla_ms=60_000, max_wait_s=Seconds(3600), priority=6)
    world = World(1, policies=(long, VOICE), admission=Admission(queue=2000, reserve=0))
    for _ in range(1000):
        world.leave(world.come("text", tokens=100), 500)
    rival = replace(long, name="rival")
    world.classes = Classes((long, rival, VOICE))
    world.gate.use(world.admission, world.classes, world.now)
    running = full(world, "voice")
    for _ in range(100):
        world.come("text")
        world.come("rival")
    given = Counter(world.serve(running)[0].qos.name for _ in range(100))
    assert given["text"] == given["rival"] == 50


def test_a_class_whose_priority_changes_begins_among_its_new_rivals_as_they_do() -> None:
    def policies(priority: int) -> tuple[QosPolicy, ...]:
        long = replace(TEXT, latency_sla_ms=60_000, max_wait_s=Seconds(3600))
        return (
            replace(long, name="one", priority=priority),
            replace(long, name="mate", priority=7),
            replace(long, name="other", priority=3),
            replace(long, name="fourth", priority=3),
            VOICE,
        )

    world = World(1, policies=policies(7), admission=Admission(queue=2000, reserve=0))
    running = full(world, "voice")
    for _ in range(100):
        world.come("one", tokens=1000)
        world.serve(running)
    world.classes = Classes(policies(3))
    world.gate.use(world.admission, world.classes, world.now)
    for _ in range(60):
        for name in ("one", "other"):
            world.come(name)
    given = Counter(world.serve(running)[0].qos.name for _ in range(60))
    assert given["one"] == given["other"] == 30
