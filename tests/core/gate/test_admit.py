"""The gate: who runs, who waits, who is told to come back, and who has to go."""

import math
from collections import Counter
from itertools import pairwise
from typing import Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from sidecar.core.classes import Classes
from sidecar.core.gate.admit import (
    HOLD_S,
    MAX_TOLD,
    POLL_S,
    Ticket,
    TurnedAway,
)
from sidecar.core.gate.evict import PASSED
from sidecar.core.gate.headroom import is_kept
from sidecar.core.gate.parts import Parts
from sidecar.core.gate.turns import EVICTED, LEFT, OUT, QUEUED, RUNNING
from sidecar.core.pool import LOOKS
from sidecar.kernel.errors import Reason
from sidecar.policy.schema import Admission, QosPolicy, Seconds
from tests.core.build import trip
from tests.core.gate.build import BATCH, POLICIES, TEXT, VOICE, World, full, names, reason

GateMode = Literal["enforce", "shadow"]


# Room.


def test_with_room_everybody_runs_at_once() -> None:
    world = World(2, 1)
    running = full(world)
    assert [ticket.state for ticket in running] == [RUNNING] * 3 and world.gate.running == 3
    assert world.enter(world.ticket("voice")) is False and world.gate.queued == 1
    world.leave(running[0])
    assert len(world.turns()) == 1 and world.gate.queued == 0


def test_without_limits_nobody_waits() -> None:
    world = World(1)
    world.nodes[0].limit = math.inf
    assert all(world.enter(world.ticket("batch")) is True for _ in range(1000))
    assert world.gate.due(world.now) == math.inf


def test_room_that_is_there_is_for_those_who_wait_already() -> None:
    world = World(1)
    full(world)
    batch = world.come("batch")
    world.nodes[0].limit = 2
    assert world.enter(world.ticket("batch", "b")) is False
    assert world.gate.due(world.now) == world.now
    assert world.turns() == [batch]


def test_of_very_many_endpoints_the_one_that_has_room_again_is_found_at_once() -> None:
    world = World(*[1] * (3 * LOOKS))
    running = full(world)
    for index in (LOOKS + 7, 5, 2 * LOOKS + 9):
        waits = world.come("text")
        world.leave(running[index])
        assert world.turns() == [waits]


def test_leaving_again_is_harmless() -> None:
    world = World(1)
    running, waits = full(world), world.come("voice")
    for ticket in (running[0], waits):
        for _ in range(3):
            world.gate.leave(ticket, 10, world.now)
    world.gate.leave(world.ticket("text"), 10, world.now)
    assert (world.gate.queued, world.gate.running) == (0, 0)


def test_who_leaves_while_it_waits_gets_no_turn() -> None:
    world = World(1)
    running = full(world)
    waiting = [world.come("text") for _ in range(3)]
    for ticket in (waiting[1], waiting[0]):
        world.leave(ticket)
    world.leave(running[0])
    assert world.turns() == [waiting[2]]


def test_where_nobody_can_serve_nobody_waits() -> None:
    world = World(1)
    running = full(world)
    waiting = world.come("text")
    trip(world.nodes[0].breaker, world.now)
    assert world.enter(world.ticket("text")) is True
    assert world.turns() == [waiting]
    assert running[0].state == RUNNING


def test_a_model_that_nobody_has_does_not_wait_for_room() -> None:
    world = World(1, models=(("m",),))
    full(world)
    assert world.enter(world.ticket("text", model="other")) is True
    assert world.enter(world.ticket("text")) is False


@pytest.mark.parametrize(("wait_s", "waits"), [(1.0, True), (HOLD_S, True), (HOLD_S + 1.0, False)])
def test_an_endpoint_that_asked_to_be_left_alone_is_waited_for_if_not_too_long(wait_s: float, waits: bool) -> None:
    world = World(4)
    world.nodes[0].overload_until = world.now + wait_s
    assert world.enter(world.ticket("text")) is not waits
    if waits:
        assert world.turns() == []
        world.now += wait_s
        assert len(world.turns()) == 1


def test_a_probe_that_is_due_is_room_for_one() -> None:
    world = World(1)
    running = full(world)
    waiting = [world.come("text") for _ in range(2)]
    breaker = world.nodes[0].breaker
    trip(breaker, world.now)
    world.now = breaker.probe_at(world.now)
    first = world.gate.take(world.service.pool, world.now)
    assert first is waiting[0]
    permit = breaker.acquire(world.now)  # the probe is lent: nobody can serve, and who waits hears so
    assert world.turns() == [waiting[1]]
    assert permit is not None and running[0].state == RUNNING


# Classes.


def test_the_higher_priority_goes_first_and_one_class_in_order() -> None:
    world = World(1)
    running = full(world)
    come = [world.come(name) for name in ("batch", "text", "voice", "batch", "voice", "text")]
    order = [world.serve(running)[0] for _ in come]
    assert order == [come[index] for index in (2, 4, 1, 5, 0, 3)]


def test_classes_of_one_priority_share_by_weight_in_tokens() -> None:
    policies = (
        replace(TEXT, weight=3.0),
        QosPolicy(name="other", latency_sla_ms=60_000, priority=5, max_wait_s=Seconds(3600)),
    )
    policies = (replace(policies[0], latency_sla_ms=60_000, max_wait_s=Seconds(3600)), policies[1])
    world = World(1, policies=policies, admission=Admission(queue=2000))
    running = full(world)
    for _ in range(400):
        world.come("text", tokens=200)
        world.come("other", tokens=100)
    tokens: Counter[str] = Counter()
    for _ in range(300):
        (given,) = world.serve(running)
        tokens[given.qos.name] += given.tokens
    assert tokens["text"] / tokens["other"] == pytest.approx(3.0, rel=0.05)


def test_of_several_classes_that_are_overdue_each_has_its_part_of_the_reserve() -> None:
    policies = tuple(
        QosPolicy(name=name, latency_sla_ms=1000, priority=priority, max_wait_s=Seconds(3600))
        for name, priority in (("voice", 9), ("text", 5), ("batch", 3))
    )
    world = World(1, policies=policies, admission=Admission(queue=10_000))
    running = full(world, "voice")
    for name in ("text", "batch"):
        for _ in range(500):
            world.come(name)
    world.now += 30.0
    turns: list[str] = []
    for _ in range(800):
        world.come("voice")
        world.now += 0.01
        turns += names(world.serve(running))
    assert turns.count("text") == turns.count("batch") == 20
    gaps = [at for at, name in enumerate(turns) if name == "batch"]
    assert all(after - before <= 2 * 20 for before, after in pairwise(gaps))


def test_a_class_that_comes_back_has_saved_nothing_up() -> None:
    policies = (replace(TEXT, latency_sla_ms=60_000), QosPolicy(name="other", latency_sla_ms=60_000, priority=5))
    world = World(1, policies=policies)
    running = full(world)
    for _ in range(100):
        world.come("text")
    for _ in range(50):
        world.serve(running)
    for _ in range(50):
        world.come("other")
    given = names([world.serve(running)[0] for _ in range(20)])
    assert 9 <= given.count("other") <= 11


# Tenants.


def jain(shares: list[float]) -> float:
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


@pytest.mark.parametrize("error", [1.0, 0.2, 5.0], ids=["right", "guessed-too-high", "guessed-too-low"])
def test_tenants_of_a_class_share_its_tokens_by_their_weights(error: float) -> None:
    sizes = {"a": 10, "b": 100, "c": 1000, "d": 350, "e": 35}
    weights = {"d": 2.0, "e": 0.5}
    admission = Admission(queue=100_000, tenant_weights=weights)
    policy = QosPolicy(name="text", latency_sla_ms=3_600_000, max_wait_s=Seconds(3600))
    world = World(4, policies=(policy,), admission=admission)
    running = full(world)
    used: Counter[str] = Counter()
    for tenant in sizes:
        for _ in range(3):
            world.come("text", tenant, int(sizes[tenant] * error))
    left = 0
    while sum(used.values()) < 600_000:
        before = running[0]
        tokens = sizes.get(before.tenant, 100)
        used[before.tenant] += tokens
        for given in world.serve(running, tokens):
            world.come("text", given.tenant, int(sizes[given.tenant] * error))
        left += 1
    shares = [used[tenant] / weights.get(tenant, 1.0) for tenant in sizes]
    assert jain(shares) >= 0.98, shares


def test_a_small_tenant_gets_all_that_it_asks_for_beside_a_flood() -> None:
    world = World(4, admission=Admission(queue=5000))
    running = full(world, tenant="flood")
    waits: list[int] = []
    for round_ in range(400):
        for _ in range(10):
            world.come("text", "flood", 1000)
        if round_ % 10 == 0:
            world.come("text", "small", 200)
            waited = 0
            while not any(ticket.tenant == "small" for ticket in world.serve(running)):
                waited += 1
            waits.append(waited)
        else:
            world.serve(running)
    assert max(waits) <= 1, waits


def test_who_was_served_while_there_was_enough_owes_nothing() -> None:
    """To the tenants of its class; of what all classes have it had its part (`fairness: service`)."""
    world = World(2, admission=Admission(fairness="class"))
    for _ in range(100):
        ticket = world.ticket("text", "busy", 100)
        assert world.enter(ticket) is True
        world.leave(ticket)
    running = full(world, tenant="x")
    for _ in range(10):
        world.come("text", "busy", 100)
        world.come("text", "new", 100)
    given = [world.serve(running)[0].tenant for _ in range(10)]
    assert 4 <= given.count("busy") <= 6, given


def test_what_was_used_replaces_the_estimate() -> None:
    world = World(2)
    running = [world.come("text", "liar", 10), world.come("text", "honest", 1000)]
    for _ in range(6):
        world.come("text", "liar", 10)
        world.come("text", "honest", 1000)
    world.leave(running[0], 10_000)
    (given,) = world.turns()
    assert given.tenant == "honest"
    world.leave(running[1], 1000)
    assert [ticket.tenant for ticket in world.turns()] == ["honest"]


def test_a_refund_counts_for_requests_that_wait_already() -> None:
    world = World(2)
    refunded = world.come("text", "a", 100_000)
    other = world.come("text", "b", 100)
    waiting = [world.come("text", "a", 100), world.come("text", "b", 100), world.come("text", "b", 100)]
    world.leave(refunded, 0)
    assert world.turns() == [waiting[0]]
    world.leave(other)
    assert world.turns() == [waiting[1]]


# Starvation.


@pytest.mark.parametrize("reserve", [0.05, 0.1, 0.3, 0.5])
def test_the_lowest_class_gets_its_reserve_however_many_of_a_higher_one_wait(reserve: float) -> None:
    world = World(1, admission=Admission(reserve=reserve, queue=10_000))
    running = full(world)
    for _ in range(30):
        world.come("batch")
    world.now += BATCH.latency_sla_ms / 1000 + 0.01
    gaps, since = [], 0
    for _ in range(300):
        world.come("voice", "v")
        (given,) = world.serve(running)
        since += 1
        if given.qos.name == "batch":
            gaps.append(since)
            since = 0
        if len(gaps) == 30:
            break
    assert max(gaps) <= math.ceil(1 / reserve) and len(gaps) > 5


def test_without_a_reserve_priority_is_strict() -> None:
    world = World(1, admission=Admission(reserve=0.0, queue=10_000, fairness="class"))
    running = full(world)
    world.come("batch")
    world.now += 20.0
    for _ in range(200):
        world.come("voice", "v")
        assert names(world.serve(running)) == ["voice"]


def test_a_class_without_a_promise_is_overdue_after_half_of_its_longest_wait() -> None:
    world = World(1, admission=Admission(reserve=0.5, fairness="class"))
    running = full(world)
    world.come("default")
    world.now += 14.0
    for overdue in (False, True):
        given: list[str] = []
        for _ in range(4):
            world.come("voice", "v")
            given += names(world.serve(running))
        assert ("default" in given) is overdue
        world.now += 1.5


# A full queue.


def test_a_full_queue_says_no_and_when_to_come_back() -> None:
    world = World(1, admission=Admission(queue=3))
    running = full(world)
    for _ in range(3):
        world.come("text", "a")
    verdict = world.enter(world.ticket("text", "a"))
    assert reason(verdict) is Reason.OVERLOADED and isinstance(verdict, TurnedAway)
    assert verdict.retry_after_s >= 1.0 and world.gate.queued == 3
    assert world.gate.view(world.now).classes[1].overloaded == 1
    world.leave(running[0])
    assert len(world.turns()) == 1


def test_without_a_queue_who_finds_no_room_is_refused() -> None:
    world = World(1, admission=Admission(queue=0))
    full(world)
    assert reason(world.enter(world.ticket("voice"))) is Reason.OVERLOADED


def test_a_voice_takes_the_place_of_the_newest_batch() -> None:
    world = World(1, admission=Admission(queue=3))
    full(world)
    waiting = [world.come("text"), world.come("batch"), world.come("batch")]
    voice = world.ticket("voice", "v")
    assert world.enter(voice) is False
    ((shed, away),) = world.away()
    assert shed is waiting[2] and away.reason is Reason.OVERLOADED and world.gate.queued == 3
    assert reason(world.enter(world.ticket("batch", "z"))) is Reason.OVERLOADED


def test_a_flood_fills_the_queue_with_its_own() -> None:
    world = World(1, admission=Admission(queue=10))
    full(world)
    flood = [world.come("text", "flood") for _ in range(10)]
    assert world.enter(world.ticket("text", "small")) is False
    assert [ticket for ticket, _ in world.away()] == [flood[9]]
    assert reason(world.enter(world.ticket("text", "flood"))) is Reason.OVERLOADED
    for _ in range(4):
        assert world.enter(world.ticket("text", "small")) is False
    assert reason(world.enter(world.ticket("text", "small"))) is Reason.OVERLOADED


def test_who_left_before_it_was_told_is_not_told() -> None:
    world = World(1, admission=Admission(queue=1))
    full(world)
    batch = world.come("batch")
    world.come("voice")
    assert batch.state == OUT
    world.leave(batch)
    assert world.away() == [] and batch.state == LEFT


def test_the_time_to_come_back_follows_the_queue_and_the_pace() -> None:
    world = World(
        4, admission=Admission(queue=50, fairness="class"), policies=(replace(TEXT, max_wait_s=Seconds(600)),)
    )
    running = full(world)
    for _ in range(50):
        world.come("text")
    for _ in range(40):  # ten leave in a second
        world.now += 0.1
        world.serve(running)
        world.come("text")
    verdict = world.enter(world.ticket("text"))
    assert isinstance(verdict, TurnedAway) and verdict.retry_after_s == pytest.approx(5.0, abs=1.0)


# Deadlines.


def test_waiting_ends_with_the_longest_wait() -> None:
    world = World(1)
    full(world)
    waiting = [world.come("text"), world.come("text")]
    ends_at = world.now + 30.0
    assert world.turns() == []
    assert world.gate.due(world.now + 29.99) == pytest.approx(ends_at)
    world.now = ends_at
    assert [(ticket, away.reason) for ticket, away in world.away()] == [
        (ticket, Reason.QUEUE_TIMEOUT) for ticket in waiting
    ]
    assert world.gate.queued == 0 and world.gate.due(world.now) == math.inf


def test_many_are_turned_away_a_part_at_a_time() -> None:
    world = World(1, admission=Admission(queue=1000))
    full(world)
    waiting = [world.come("text") for _ in range(3 * MAX_TOLD + 1)]
    world.now += 31.0
    told: list[Ticket] = []
    while world.gate.due(world.now) == world.now:
        part = world.away()
        assert 0 < len(part) <= MAX_TOLD
        told += [ticket for ticket, _ in part]
        assert world.gate.queued + len(told) == len(waiting)  # nor are more looked at in one call
    assert told == waiting


LATE = QosPolicy(name="late", latency_sla_ms=1000, priority=5, late="reject")


def test_who_can_no_longer_be_in_time_is_refused_while_it_waits() -> None:
    world = World(1, policies=(LATE,))
    running = full(world, "late")
    world.now += 0.3
    world.gate.spoke(running[0], world.now)  # so a first token takes 0.3 s
    waits = world.come("late")
    world.now += 0.65
    assert world.away() == []
    world.now += 0.15
    ((ticket, away),) = world.away()
    assert ticket is waits and away.reason is Reason.QUEUE_TIMEOUT


def test_a_turn_is_not_given_to_who_can_no_longer_be_in_time() -> None:
    world = World(1, policies=(LATE,))
    running = full(world, "late")
    world.come("late")
    world.now += 1.0
    in_time = world.come("late")
    world.leave(running[0])
    assert world.turns() == [in_time]
    assert [away.reason for _, away in world.away()] == [Reason.QUEUE_TIMEOUT]


def test_who_would_be_late_by_the_pace_is_refused_at_once() -> None:
    world = World(1, policies=(LATE,))
    running = full(world, "late")
    for _ in range(10):  # four leave in a second
        world.come("late", "a")
        world.come("late", "b")
        world.now += 0.25
        world.serve(running)
    for _ in range(3):
        world.come("late", "a")
    assert reason(world.enter(world.ticket("late", "a"))) is Reason.OVERLOADED
    assert world.enter(world.ticket("late", "new")) is False  # before it only one of each tenant


def test_a_class_whose_first_tokens_were_slow_once_still_gets_turns() -> None:
    """It would see for ever what it saw when it last had one."""
    world = World(1, policies=(LATE, replace(TEXT, priority=3)))
    running = full(world, "late")
    world.now += 20.0
    world.gate.spoke(running[0], world.now)
    world.come("text", "b")
    world.serve(running)
    ticket = world.ticket("late", "a")
    assert world.enter(ticket) is False
    world.now += 0.25
    assert world.away() == []
    assert world.serve(running) == [ticket]


def test_a_class_that_is_always_late_still_runs_where_there_is_room() -> None:
    world = World(1, policies=(LATE,))
    for _ in range(20):
        ticket = world.ticket("late")
        assert world.enter(ticket) is True
        world.now += 5.0
        world.gate.spoke(ticket, world.now)
        world.leave(ticket)
    assert world.gate.view(world.now).classes[0].missed == 20


def test_a_class_that_was_late_hears_that_it_is_not_any_more() -> None:
    """Refused for what its first tokens took while an engine was choked, it would be refused for ever."""
    world = World(1, policies=(LATE, BATCH), admission=Admission(reserve=0.0))
    for _ in range(5):
        ticket = world.come("late")
        world.now += 5.0
        world.gate.spoke(ticket, world.now)
        world.leave(ticket)
    running = full(world, "batch")
    for _ in range(90):
        world.come("batch")
        late = world.come("late")
        world.now += 0.2
        assert world.away() == []
        assert world.serve(running) == [late]
        world.now += 0.1
        world.gate.spoke(late, world.now)
    assert world.gate.view(world.now).classes[0].usual_s < 0.2


def test_beside_a_class_in_its_zone_the_preemptible_get_no_turn() -> None:
    first = QosPolicy(name="first", latency_sla_ms=60_000, priority=9, preemptible=True)
    world = World(1, policies=(first, TEXT))
    running = full(world)
    world.come("first")
    text = world.come("text")
    world.now += 0.9
    assert world.serve(running) == [text]
    assert names(world.serve(running)) == ["first"]


# Parts of the whole service.

FAIR = Admission(fairness="service", queue=10_000, reserve=0.0)


def flooded(world: World, running: list[Ticket], rounds: int, flood: str, batch: str) -> Counter[str]:
    """What one tenant that asks for all there is, and four that ask for a fifth of it together, get in tokens."""
    got: Counter[str] = Counter()
    for round_ in range(rounds):
        world.come(flood, "flood", 100)
        if round_ % 5 == 0:
            world.come(batch, f"small{round_ // 5 % 4}", 100)
        world.now += 0.1
        world.gate.spoke(running[0], world.now)
        for given in world.serve(running):
            got[given.tenant] += given.tokens
    return got


def test_a_flood_of_voices_goes_behind_the_batches_of_those_within_their_part() -> None:
    world = World(2, admission=FAIR)
    got = flooded(world, full(world, "voice", "flood"), 600, "voice", "batch")
    assert sum(got[f"small{number}"] for number in range(4)) >= 11_500  # of 12,000 that they asked for
    strict = World(2, admission=replace(FAIR, fairness="class"))
    got = flooded(strict, full(strict, "voice", "flood"), 600, "voice", "batch")
    assert sum(got[f"small{number}"] for number in range(4)) == 0


def test_who_has_more_than_its_part_is_held_back_from_nothing_that_nobody_else_wants() -> None:
    world = World(2, admission=FAIR)
    running = full(world, tenant="flood")
    world.come("text", "small")
    for _ in range(100):
        world.come("voice", "flood")
        assert len(world.serve(running)) == 1


def test_the_part_of_a_tenant_is_by_its_weight() -> None:
    world = World(2, admission=replace(FAIR, tenant_weights={"big": 3.0}))
    running = full(world, tenant="big")
    got: Counter[str] = Counter()
    for _ in range(2000):
        for tenant, qos in (("big", "voice"), ("b", "text"), ("c", "text")):
            world.come(qos, tenant, 100)
        world.now += 0.05
        for given in world.serve(running):
            got[given.tenant] += given.tokens
    # Whose class is higher may have more than its part, 0.6, before it goes behind: 0.72.
    assert 0.6 <= got["big"] / sum(got.values()) <= 0.74
    assert got["b"] / got["c"] == pytest.approx(1.0, rel=0.1)


def test_among_those_within_their_part_priority_counts() -> None:
    world = World(1, admission=FAIR)
    running = full(world, tenant="flood")
    for _ in range(20):
        world.come("voice", "flood", 1000)
        world.serve(running)
    come = [world.come("batch", "b"), world.come("text", "c"), world.come("voice", "d")]
    flood = world.come("voice", "flood")
    assert [world.serve(running)[0] for _ in range(4)] == [come[2], come[1], come[0], flood]


def test_those_behind_are_evicted_first_and_have_nobody_evicted() -> None:
    world = World(4, admission=FAIR)
    flood = [world.come("batch", "flood", 5000) for _ in range(2)]
    small = [world.come("batch", f"small{number}", 10) for number in range(2)]
    world.come("voice", "flood", 5000)
    world.now += 0.2
    assert world.away() == []
    voice = world.come("voice", "v")
    world.now += 0.2
    assert [ticket for ticket, _ in world.away()] == [flood[1]]
    world.leave(flood[1], 0)
    assert world.turns() == [voice] and small[0].state == RUNNING


def test_however_many_of_a_flood_wait_before_it_a_voice_has_room_made() -> None:
    world = World(4, admission=FAIR)
    flood = [world.come("batch", "flood", 5000) for _ in range(2)]
    for number in range(2):
        world.come("batch", f"small{number}", 10)
    for _ in range(PASSED + 10):
        world.come("voice", "flood")
    voices = [world.come("voice", "v"), world.come("voice", "w")]
    for _ in range(PASSED + 10):
        world.come("voice", "flood")
    world.now += 0.2
    assert [ticket for ticket, _ in world.away()] == [flood[1], flood[0]]
    for ticket in flood:
        world.leave(ticket)
    assert world.turns() == voices


def test_in_a_full_queue_those_behind_give_way_whatever_their_class() -> None:
    world = World(1, admission=replace(FAIR, queue=3))
    full(world, tenant="small")
    running = [world.come("voice", "flood", 9000)]
    for _ in range(2):
        world.come("voice", "flood", 9000)
    world.leave(running[0])
    world.nodes[0].limit = 2
    assert len(world.turns()) == 1  # the flood is behind now
    world.come("voice", "flood")
    newest = world.come("voice", "flood")
    assert world.enter(world.ticket("batch", "small")) is False
    assert [ticket for ticket, _ in world.away()] == [newest]
    assert reason(world.enter(world.ticket("voice", "flood"))) is Reason.OVERLOADED


def beside(world: World, others: int) -> list[Ticket]:
    """A flood that had all there is, beside so many of others, who are in their part; what runs of it."""
    there = sum(int(node.limit) for node in world.nodes) - others
    flood = [world.come("batch", "flood", 5000) for _ in range(there)]
    for number in range(others):
        world.come("text", f"small{number}", 10)
    return flood


def test_a_flood_leaves_as_many_free_as_the_others_may_want_at_once() -> None:
    world = World(12, admission=FAIR)
    flood = beside(world, 9)
    waiting = [world.come("voice", "flood") for _ in range(3)]
    for ticket in flood:
        world.leave(ticket)
    assert world.turns() == waiting[:1]  # three were free, the square root of nine
    assert world.gate.due(world.now) <= world.now + POLL_S
    world.nodes[0].limit = 14
    assert world.turns() == waiting[1:]


def test_a_newcomer_of_a_flood_leaves_it_free_as_well() -> None:
    world = World(12, admission=FAIR)
    flood = beside(world, 9)
    voice = world.come("voice", "flood")
    world.leave(voice)
    world.leave(flood[0])
    assert world.enter(world.ticket("voice", "flood")) is False
    assert world.enter(world.ticket("batch", "small0")) is True


def test_who_keeps_to_its_part_does_not_wait_with_a_flood_that_is_held_back() -> None:
    world = World(12, admission=FAIR)
    flood = beside(world, 9)
    held = [world.come("voice", "flood") for _ in range(5)]
    world.leave(flood[0])
    assert world.turns() == []
    newcomer = world.ticket("batch", "small0")
    assert world.enter(newcomer) is True and newcomer.state == RUNNING
    assert {ticket.state for ticket in held} == {QUEUED}


def test_a_flood_that_is_held_back_has_its_reserve() -> None:
    """The bound of starvation is a class's, whoever of it waits."""
    world = World(12, admission=replace(FAIR, reserve=0.25))
    flood = beside(world, 9)
    batch = world.come("batch", "flood", 10)
    world.leave(flood[0])
    world.now += 5.0
    passed = []
    for number in range(8):
        ticket = world.ticket("voice", f"small{number}", 10)
        if world.enter(ticket) is False:
            break
        passed.append(ticket)
        world.leave(ticket)
    assert len(passed) == 3
    assert world.turns() == [batch]


@pytest.mark.parametrize("reserve", [0.0, 0.05, 0.25])
def test_a_flood_that_is_held_back_beside_requests_that_hang_has_its_reserve_by_the_second(reserve: float) -> None:
    """Nobody else has a turn that it could have one in twenty of."""
    world = World(12, admission=replace(FAIR, reserve=reserve))
    flood = beside(world, 9)
    held = [world.come("batch", "flood", 10) for _ in range(3)]
    for ticket in flood:
        world.leave(ticket)
    ran = world.turns()
    assert ran == held[:1]  # three were free, the square root of nine
    world.leave(ran[0])
    world.come("batch", "flood", 10)
    given = len(world.turns())
    assert given == 1
    turns, end = 0, world.now + 100.0
    while world.now < end:
        world.now += POLL_S
        assert world.gate.due(world.now) <= world.now + POLL_S
        for ticket, _ in world.away():
            world.leave(ticket)
        for ticket in world.turns():
            turns += 1
            world.leave(ticket)
        while world.gate.queued < 2:
            world.come("batch", "flood", 10)
    assert turns == pytest.approx(90 * reserve, abs=2 + 10 * reserve)


def test_who_is_behind_and_floods_no_more_does_not_wait_with_a_flood_of_its_class() -> None:
    world = World(14, admission=FAIR)
    flood = [world.come("voice", "flood", 50_000) for _ in range(2)]
    small = [world.come("text", f"small{number}", 100) for number in range(9)]
    had = world.come("batch", "had", 25_000)
    world.come("text", "flood", 1)
    for share in (small[0].share, small[1].share):
        assert share is not None and share.payer is not None and world.gate._lanes.parts is not None
        world.gate._lanes.parts.use(share.payer, 25_000, world.now)
    held, waits = world.come("batch", "flood"), world.come("batch", "had")
    assert (held.state, waits.state) == (QUEUED, QUEUED) and waits.share is not None and held.share is not None
    assert held.share.counter < waits.share.counter
    world.leave(flood[0])
    assert world.turns() == [waits]
    assert had.state == RUNNING and held.state == QUEUED


def test_who_flooded_comes_again_when_all_others_are_forgotten() -> None:
    """A reload without the class of the last of them leaves nobody of whom a part could be reckoned."""
    other = QosPolicy(name="other", latency_sla_ms=1000, priority=4)
    world = World(4, policies=(BATCH, other), admission=FAIR)
    for ticket in [world.come("batch", tenant, tokens) for tenant, tokens in (("small", 10), ("flood", 5000))]:
        world.leave(ticket)
    world.now += 61.0
    world.leave(world.come("other", "last", 10))
    world.classes = Classes((BATCH,))
    world.gate.use(FAIR, world.classes, world.now)
    assert world.come("batch", "flood").state == RUNNING


def test_in_shadow_nothing_is_kept_free() -> None:
    world = World(12, admission=replace(FAIR, mode="shadow"))
    flood = beside(world, 9)
    world.leave(flood[0])
    ticket = world.come("voice", "flood")
    assert (ticket.state, ticket.shadowed) == (RUNNING, "")


def test_those_who_go_behind_do_not_make_a_turn_come_too_late() -> None:
    world = World(4, policies=(VOICE, LATE), admission=FAIR)
    running = [world.come("late", tenant, tokens) for tenant, tokens in (("flood", 9000), ("a", 10), ("b", 10))]
    running.append(world.come("voice", "flood", 9000))
    for _ in range(40):
        world.come("voice", "flood")
    for _ in range(12):
        world.now += 0.25
        running.append(world.come("voice", "flood"))
        world.leave(running.pop(0))
        running.extend(world.turns())
    waiting = world.ticket("late", "a")
    assert world.enter(waiting) is False
    assert reason(world.enter(world.ticket("late", "flood"))) is Reason.OVERLOADED


def test_a_part_of_all_classes_is_what_is_shared_where_the_policy_says_nothing() -> None:
    world = World(2, admission=Admission(reserve=0.0))
    got = flooded(world, full(world, "voice", "flood"), 600, "voice", "batch")
    assert sum(got[f"small{number}"] for number in range(4)) >= 11_500


def test_fairness_follows_a_reload() -> None:
    world = World(1, admission=replace(FAIR, fairness="class"))
    running = full(world, tenant="flood")
    for _ in range(3):
        world.come("voice", "flood", 1000)
    batch = world.come("batch", "small")
    world.gate.use(FAIR, world.classes, world.now)
    assert world.serve(running)[0].tenant == "flood"  # nothing is known yet
    assert world.serve(running) == [batch]
    other = world.come("batch", "small")
    world.gate.use(replace(FAIR, fairness="class"), world.classes, world.now)
    assert world.serve(running)[0].tenant == "flood" and other.state == QUEUED


# Shadow.

SHADOW = Admission(mode="shadow", queue=2)


def test_in_shadow_everybody_runs_and_carries_what_would_have_been() -> None:
    world = World(1, admission=SHADOW)
    come = [world.ticket(name, f"t{place}") for place, name in enumerate(("text", "batch", "batch", "batch", "voice"))]
    assert [world.enter(ticket) for ticket in come] == [True] * 5
    assert [ticket.shadowed for ticket in come] == ["", "queued", "overloaded", "overloaded", "queued"]
    assert world.away() == [] and world.turns() == []
    world.now += 40.0
    assert world.away() == []
    assert [ticket.shadowed for ticket in come] == ["", "queue_timeout", "overloaded", "overloaded", "queue_timeout"]
    seen = {view.name: view for view in world.gate.view(world.now).classes}
    assert (seen["batch"].overloaded, seen["batch"].queue_timeout, seen["voice"].queue_timeout) == (2, 1, 1)
    for ticket in come:
        world.leave(ticket)
    assert (world.gate.queued, world.gate.running) == (0, 0)


def test_in_shadow_turns_go_as_they_would_have_gone() -> None:
    world = World(1, admission=replace(SHADOW, queue=10))
    first, batch, voice = world.come("text"), world.come("batch"), world.come("voice")
    world.leave(first)
    assert (voice.state, batch.state) == (RUNNING, QUEUED)
    world.leave(voice)
    assert batch.state == RUNNING
    world.leave(batch)
    assert (world.gate.queued, world.gate.running) == (0, 0)


def test_in_shadow_the_evicted_know_it_and_nobody_else() -> None:
    world = World(1, admission=SHADOW)
    batch, voice = world.come("batch"), world.come("voice", "v")
    world.now += 0.2
    assert world.away() == []
    assert batch.shadowed == "preempted" and voice.state == RUNNING
    for ticket in (batch, voice):
        world.leave(ticket)
    assert (world.gate.queued, world.gate.running) == (0, 0)


@pytest.mark.parametrize(("before", "after"), [("enforce", "shadow"), ("shadow", "enforce")])
def test_another_mode_leaves_nobody_waiting(before: GateMode, after: GateMode) -> None:
    world = World(1, admission=Admission(mode=before))
    running = full(world)
    waiting = [world.come("text"), world.come("voice"), world.come("text")]
    world.gate.use(replace(world.admission, mode=after), world.classes, world.now)
    assert world.gate.queued == (3 if before == "enforce" else 0)
    assert world.gate.due(world.now) == (world.now if before == "enforce" else math.inf)
    if before == "enforce":
        world.leave(waiting.pop())
        assert set(world.turns()) == set(waiting)
    for ticket in (*running, *waiting):
        world.leave(ticket)
    assert (world.gate.queued, world.gate.running, world.gate.due(world.now)) == (0, 0, math.inf)


# What is counted, and what is kept.


def test_a_promise_is_kept_by_the_first_token_or_where_no_stream_is_by_the_turn() -> None:
    world = World(2)
    streams, whole = world.come("voice"), world.come("voice", streams=False)
    world.now += 0.5
    for ticket in (streams, whole):
        world.gate.spoke(ticket, world.now)
        world.gate.spoke(ticket, world.now)
    seen = world.gate.view(world.now).classes[0]
    assert (seen.met, seen.missed) == (1, 1)
    assert seen.usual_s == pytest.approx(0.5, rel=0.1)


def test_a_clock_that_stands_still_or_goes_back_stops_nobody() -> None:
    world = World(1)
    running = full(world)
    for step in range(50):
        world.come(("voice", "text", "batch")[step % 3])
        world.now -= 0.1 if step % 10 == 0 else 0.0
        world.away()
        world.serve(running)
    while world.gate.queued:
        world.serve(running)
    assert world.gate.queued == 0


class Walk(RuleBasedStateMachine):
    """Any history: nobody is lost or served twice, the queue is bounded, room is used, and the counts are right."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(2, 2, 1, models=(("x",), ("x", "y"), ("y",)), admission=Admission(queue=6))
        self.waiting: set[Ticket] = set()
        self.running: set[Ticket] = set()
        self.over: set[Ticket] = set()
        self.mode = "enforce"
        self.phantoms = 0
        """Who left between a reload that ended its waiting, and being called."""

    @rule(
        qos=st.integers(0, 9),
        tenant=st.sampled_from("abc"),
        tokens=st.integers(0, 5000),
        model=st.sampled_from(["x", "y", "none"]),
        streams=st.booleans(),
    )
    def comes(self, qos: int, tenant: str, tokens: int, model: str, streams: bool) -> None:
        world = self.world
        every = world.classes.all
        ticket = Ticket(None, every[qos % len(every)], tenant, model, tokens, world.now, streams)
        queued = world.gate.queued
        verdict = world.enter(ticket)
        if verdict is True:
            self.running.add(ticket)
        elif verdict is False:
            assert self.mode == "enforce" and ticket.state == QUEUED
            self.waiting.add(ticket)
        else:
            assert self.mode == "enforce" and verdict.reason is Reason.OVERLOADED
            assert 1.0 <= verdict.retry_after_s <= 60.0
            world.leave(ticket)
            self.over.add(ticket)
        assert world.gate.queued <= max(queued, world.admission.queue)

    @rule(data=st.data(), tokens=st.integers(0, 9000))
    @precondition(lambda self: self.waiting or self.running)
    def leaves(self, data: st.DataObject, tokens: int) -> None:
        there = sorted(self.waiting | self.running, key=lambda ticket: ticket.number)
        ticket = data.draw(st.sampled_from(there))
        self.gone(ticket, tokens)

    def gone(self, ticket: Ticket, tokens: int) -> None:
        self.phantoms += ticket in self.waiting and ticket.state == RUNNING
        self.world.leave(ticket, tokens)
        self.waiting.discard(ticket)
        self.running.discard(ticket)
        self.over.add(ticket)

    @rule(data=st.data())
    @precondition(lambda self: self.running)
    def speaks(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.running, key=lambda ticket: ticket.number)))
        self.world.gate.spoke(ticket, self.world.now)

    @rule(step=st.sampled_from([0.0, 0.01, 0.1, 0.5, 2.0, 8.0, 31.0, 100.0, 1e7]))
    def later(self, step: float) -> None:
        self.world.now += step

    @rule()
    def is_asked(self) -> None:
        """As the pipeline asks when the gate wants it to."""
        world = self.world
        while told := world.away():
            for ticket, away in told:
                assert ticket not in self.over and self.mode == "enforce"
                assert (ticket in self.running) is (away.reason is Reason.PREEMPTED)
                if away.reason is Reason.PREEMPTED:
                    assert ticket.qos.preemptible and ticket.state == EVICTED
                    assert not ticket.spoken or ticket.qos.evict_streams
                self.gone(ticket, 0)
        while (given := world.gate.take(world.service.pool, world.now)) is not None:
            assert given in self.waiting and given.state == RUNNING
            world.send(given)
            self.waiting.discard(given)
            self.running.add(given)
        self.phantoms = 0
        for ticket in self.waiting:
            pool, share = world.service.pool(ticket.model, ticket.version), ticket.share
            if pool.has_room(world.now):
                parts = world.gate._lanes.parts
                assert share is not None and share.payer is not None and parts is not None, "beside room, and not held"
                assert share.payer.behind and share.behind and parts.floods(share.payer) and is_kept(share.group.lane)
        due = world.gate.due(world.now)
        if self.waiting:
            # What was turned away in the meantime (too late for its turn) is still to be told.
            assert due <= world.now + POLL_S
        elif not world.gate.queued:
            assert due in (world.now, math.inf)

    @rule(
        policies=st.sampled_from(
            [POLICIES, (), (VOICE, BATCH), (replace(BATCH, evict="streams", priority=9), LATE, VOICE, TEXT)]
        ),
        queue=st.sampled_from([0, 3, 6]),
        weights=st.sampled_from([{}, {"a": 5.0, "b": 0.5}]),
        reserve=st.sampled_from([0.0, 0.05, 0.5]),
        fairness=st.sampled_from(["class", "service"]),
        mode=st.sampled_from(["enforce", "enforce", "shadow"]),
    )
    def reloads(
        self,
        policies: tuple[QosPolicy, ...],
        queue: int,
        weights: dict[str, float],
        reserve: float,
        fairness: Literal["class", "service"],
        mode: GateMode,
    ) -> None:
        world = self.world
        world.admission = Admission(queue=queue, tenant_weights=weights, reserve=reserve, fairness=fairness, mode=mode)
        world.classes = Classes(policies)
        world.gate.use(world.admission, world.classes, world.now)
        self.mode = mode
        for ticket in self.waiting:
            assert ticket.qos in world.classes.all or ticket.state == RUNNING or ticket.state == OUT

    @rule(which=st.integers(0, 2), limit=st.integers(1, 3))
    def limit_moves(self, which: int, limit: int) -> None:
        self.world.nodes[which].limit = limit

    @rule(which=st.integers(0, 2), opens=st.booleans())
    def breaker_moves(self, which: int, opens: bool) -> None:
        breaker = self.world.nodes[which].breaker
        breaker.force("open" if opens else "close", self.world.now, "ann")

    @rule(which=st.integers(0, 2), models=st.sampled_from([("x",), ("y",), ("x", "y"), ("*",)]))
    def models_move(self, which: int, models: tuple[str, ...]) -> None:
        world = self.world
        policy = world.service.policy
        endpoints = list(policy.endpoints)
        endpoints[which] = replace(endpoints[which], models=models)
        world.put(replace(policy, endpoints=tuple(endpoints)))

    @invariant()
    def counts_are_right(self) -> None:
        gate = self.world.gate
        view = gate.view(self.world.now)
        assert sum(seen.running for seen in view.classes) == gate.running
        assert view.tenants <= 500
        there = self.waiting | self.running
        states = Counter(ticket.state for ticket in there)
        if self.mode == "enforce":
            shed = sum(ticket.state == OUT for ticket in there)
            owed = sum(ticket.state == RUNNING for ticket in self.waiting)
            assert gate.queued + gate.running + shed == len(there) + owed + self.phantoms
        assert gate.running == states[RUNNING] + states[EVICTED]
        assert not any(ticket.state in (QUEUED, RUNNING, EVICTED) for ticket in self.over)

    @invariant()
    def counts_are_what_a_recount_finds(self) -> None:
        lanes = self.world.gate._lanes
        there = {ticket for ticket in self.waiting | self.running if ticket.share is not None}
        for lane in lanes.lanes.values():
            mine = [ticket for ticket in there if ticket.share is not None and ticket.share.group.lane is lane]
            ran = [ticket for ticket in mine if ticket.state in (RUNNING, EVICTED)]
            assert lane.queued == sum(ticket.state == QUEUED for ticket in mine) == sum(g.queued for g in lane.groups)
            assert lane.running == len(ran) and lane.within == sum(ticket.within for ticket in ran)
            assert (lane in lanes.busy) is (lane.queued > 0)
            for group in lane.groups:
                assert group.behind == sum(share.queued for share in group.shares.values() if share.behind)
                assert group.waiting == sum(share.queued > 0 for share in group.shares.values())
                for share in group.shares.values():
                    of = [ticket for ticket in mine if ticket.share is share]
                    assert share.queued == sum(ticket.state == QUEUED for ticket in of)
                    assert share.running == len(of) - share.queued
                    assert (share in lanes._idle) is not bool(of) and not (share.behind and not share.queued)
                    assert (share.payer is None) is (lanes.parts is None)
        if lanes.parts is not None:
            self.parts_are_right(lanes.parts)

    def parts_are_right(self, parts: Parts) -> None:
        shares = [
            share
            for lane in self.world.gate._lanes.lanes.values()
            for group in lane.groups
            for share in group.shares.values()
        ]
        payers = list(parts._payers.values())
        for payer in payers:
            mine = [share for share in shares if share.payer is payer]
            assert (payer.shares, payer.active) == (len(mine), sum(bool(s.queued or s.running) for s in mine))
            assert all(share.weight == payer.weight for share in mine)
        assert parts._behind == sum(payer.behind for payer in payers)
        assert parts._weight == pytest.approx(sum(p.weight for p in payers if p.active or p in parts._idle), abs=1e-9)
        assert parts._total >= sum(payer.used * payer.weight for payer in payers) * (1.0 - 1e-9)

    def teardown(self) -> None:
        for ticket in list(self.waiting | self.running):
            self.gone(ticket, 1)
        self.is_asked()
        assert (self.world.gate.queued, self.world.gate.running) == (0, 0)
        assert self.world.gate.due(self.world.now) == math.inf
        assert all(node.in_flight == 0 for node in self.world.nodes)


TestWalk = Walk.TestCase
TestWalk.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
