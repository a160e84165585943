"""Who has to go for whom."""

import pytest
from msgspec.structs import replace

from sidecar.core.gate.admit import EVICTED_RETRY_S, POLL_S
from sidecar.core.gate.turns import EVICTED, RUNNING
from sidecar.kernel.errors import Reason
from sidecar.policy.schema import Admission, QosPolicy
from tests.core.gate.build import BATCH, POLICIES, VOICE, World, full, names


def test_a_voice_in_its_warning_zone_evicts_the_newest_batch() -> None:
    world = World(2, 1)
    running = full(world, "batch")
    voice = world.come("voice", "v")
    assert world.away() == [] and world.turns() == []
    assert world.gate.due(world.now) == pytest.approx(world.now + POLL_S)
    world.now += 0.8 * 0.2 - 0.001
    assert world.away() == []
    world.now += 0.0011
    ((victim, away),) = world.away()
    assert victim is running[-1] and victim.state == EVICTED
    assert away.reason is Reason.PREEMPTED and away.retry_after_s == EVICTED_RETRY_S
    assert world.away() == []  # one for one: it is about to leave
    world.leave(victim, 0)
    assert world.turns() == [voice]


def test_of_those_that_run_the_tenant_with_most_makes_way() -> None:
    world = World(4)
    tickets = [world.come("batch", tenant) for tenant in ("flood", "flood", "flood", "small")]
    for _ in range(2):
        world.come("voice", "v")
    world.now += 0.2
    assert [ticket for ticket, _ in world.away()] == [tickets[2], tickets[1]]


def test_the_lowest_priority_makes_way_first() -> None:
    lower = QosPolicy(name="lower", latency_sla_ms=60_000, priority=1, preemptible=True)
    world = World(2, policies=(*POLICIES, lower))
    tickets = [world.come("lower"), world.come("batch")]
    world.come("voice", "v")
    world.now += 0.2
    assert [ticket for ticket, _ in world.away()] == [tickets[0]]


@pytest.mark.parametrize(("evict", "goes"), [("waiting", False), ("streams", True)])
def test_who_has_spoken_goes_only_where_streams_are_evicted(evict: str, goes: bool) -> None:
    batch = replace(BATCH, evict=evict)
    world = World(1, policies=(VOICE, batch))
    running = full(world, "batch")
    world.gate.spoke(running[0], world.now)
    world.come("voice", "v")
    world.now += 0.2
    assert bool(world.away()) is goes


@pytest.mark.parametrize("waits", ["text", "batch"])
def test_who_is_not_in_the_zone_or_preemptible_evicts_nobody(waits: str) -> None:
    world = World(1)
    full(world, "batch")
    world.come(waits, "w")
    world.now += 0.7
    assert world.away() == []
    world.now += 10.0
    assert bool(world.away()) is (waits == "text")


def test_a_turn_that_was_owed_is_not_taken_back() -> None:
    world = World(1, admission=Admission(reserve=0.5))
    running = full(world)
    batch = world.come("batch")
    world.now += 5.0
    for _ in range(2):
        world.come("voice", "v")
        world.serve(running)
    assert running == [batch]
    world.now += 1.0
    assert world.gate.queued and world.away() == []


def test_with_room_nobody_has_to_go() -> None:
    world = World(1)
    full(world, "batch")
    world.come("voice", "v")
    world.now += 1.0
    world.nodes[0].limit = 2
    assert world.away() == []
    assert names(world.turns()) == ["voice"]


def test_the_time_to_a_first_token_brings_the_zone_forward() -> None:
    world = World(1, admission=Admission(fairness="class"))
    for _ in range(20):
        ticket = world.ticket("voice", "v")
        world.enter(ticket)
        world.now += 0.1
        world.gate.spoke(ticket, world.now)
        world.leave(ticket)
    full(world, "batch")
    world.come("voice", "v")
    world.now += 0.07
    assert len(world.away()) == 1
    assert world.gate.view(world.now).classes[0].usual_s == pytest.approx(0.1, rel=0.1)


def test_who_runs_elsewhere_has_nobody_make_way() -> None:
    world = World(1, 1, models=(("voice",), ("batch",)))
    batch = world.come("batch", model="batch")
    world.come("text", model="voice")
    world.come("voice", "v", model="voice")
    world.now += 1.0
    assert world.away() == [] and batch.state == RUNNING


def test_evictions_go_on_until_there_is_room() -> None:
    world = World(3)
    running = full(world, "batch")
    world.nodes[0].limit = 2  # it became less: one that leaves makes no room
    voice = world.come("voice", "v")
    world.now += 0.2
    gone = []
    while told := world.away():
        for victim, _ in told:
            gone.append(victim)
            world.leave(victim, 0)
        if world.turns() == [voice]:
            break
    assert gone == running[:0:-1]


def test_turns_that_a_class_won_by_itself_may_be_taken_back() -> None:
    """Only what the reserve paid for is spared: else one old request of a class would spare all of it."""
    world = World(1, admission=Admission(reserve=0.05))
    running = full(world)
    world.come("batch")
    world.now += 5.0
    world.come("batch")
    world.serve(running)
    assert names(running) == ["batch"]
    world.come("voice", "v")
    world.now += 0.2
    assert [ticket for ticket, _ in world.away()] == running
