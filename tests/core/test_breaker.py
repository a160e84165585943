"""The breaker: each rule by a table, the machine by an exhaustive walk and by random histories."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sidecar.core.breaker import (
    LEAST_SHARE,
    MOST_PROBES,
    MOST_TIMES,
    PATIENCE_S,
    TRANSITIONS,
    VERDICT_WAIT_S,
    Action,
    Agreed,
    Breaker,
    Denied,
    Event,
    Permit,
    Roster,
    Scope,
    State,
    Transition,
    min_closed,
)
from sidecar.kernel.outcome import DOCTRINE, Ending, Result
from sidecar.policy.schema import Adaptive, BreakerRule, Mode, Seconds
from tests.core.build import permitted, record, trip

S, F, I, O = Result.SUCCESS, Result.FAILURE, Result.IGNORED, Result.OVERLOADED  # noqa: E741
CLOSED, OPEN, HALF_OPEN = State.CLOSED, State.OPEN, State.HALF_OPEN
LEASE_S = 60.0
RULE = BreakerRule(consecutive=5, failure_ratio=0.0, open_s=Seconds(10), open_max_s=Seconds(100), probes=1, successes=2)


def rule_of(**changes: object) -> BreakerRule:
    return msgspec.structs.replace(RULE, **changes)


def breaker_of(rule: BreakerRule = RULE, roster: Roster | None = None, key: str = "a:80") -> Breaker:
    return Breaker(Scope.NODE, key, "chat", rule, 0.0, lease_s=LEASE_S, roster=roster)


def feed(breaker: Breaker, results: list[Result], now: float = 0.0) -> None:
    for result in results:
        record(breaker, result, now)


def half_open(rule: BreakerRule = RULE) -> tuple[Breaker, Permit]:
    """A breaker that was tripped at 0 and lends its first probe at 10."""
    breaker = breaker_of(rule)
    trip(breaker, 0.0)
    return breaker, permitted(breaker, 10.0)


# --- closed ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("results", "state"),
    [
        pytest.param([F] * 4, CLOSED, id="one too few"),
        pytest.param([F] * 5, OPEN, id="enough"),
        pytest.param([F] * 4 + [S, F], CLOSED, id="a success starts again"),
        pytest.param([F] * 4 + [S] + [F] * 5, OPEN, id="and then enough"),
        pytest.param([F] * 4 + [I, F], OPEN, id="ignored neither counts nor resets"),
        pytest.param([F] * 4 + [I] * 50, CLOSED, id="ignored never opens"),
        pytest.param([F] * 4 + [O, F], OPEN, id="overload neither counts nor resets"),
        pytest.param([O] * 50, CLOSED, id="overload never opens"),
        pytest.param([I] * 50, CLOSED, id="client errors never open"),
        pytest.param([S] * 50, CLOSED, id="all is well"),
    ],
)
def test_consecutive_failures_open(results: list[Result], state: State) -> None:
    breaker = breaker_of()
    feed(breaker, results)
    assert breaker.state is state


@pytest.mark.parametrize("ending", [e for e in Ending if DOCTRINE[e].node is not F])
def test_endings_that_are_not_the_nodes_fault_open_nothing(ending: Ending) -> None:
    breaker = breaker_of()
    feed(breaker, [F] * 4)
    if DOCTRINE[ending].node is not S:
        feed(breaker, [DOCTRINE[ending].node] * 20)
        assert breaker.state is CLOSED
        feed(breaker, [F])
        assert breaker.state is OPEN
    else:
        feed(breaker, [S, F])
        assert breaker.state is CLOSED


@pytest.mark.parametrize(
    ("results", "state"),
    [
        pytest.param([F, S] * 9 + [F], CLOSED, id="19 of the minimum 20"),
        pytest.param([S, F] * 10, OPEN, id="half of 20"),
        pytest.param([F, S] * 10, CLOSED, id="a success that completes the minimum does not open"),
        pytest.param([F, S] * 10 + [F], OPEN, id="the next failure does"),
        pytest.param([S, S, F] * 30, CLOSED, id="a third"),
        pytest.param([S] * 100 + [F, S] * 40, CLOSED, id="diluted by the window"),
        pytest.param([I, O] * 50 + [S, F] * 9, CLOSED, id="what does not count does not fill the minimum"),
    ],
)
def test_failure_ratio_opens_once_the_minimum_is_there(results: list[Result], state: State) -> None:
    breaker = breaker_of(rule_of(consecutive=1000, failure_ratio=0.5, min_requests=20, window_s=Seconds(10)))
    feed(breaker, results)
    assert breaker.state is state


def test_ratio_forgets_what_left_the_window() -> None:
    breaker = breaker_of(rule_of(consecutive=1000, failure_ratio=0.5, min_requests=4, window_s=Seconds(10)))
    feed(breaker, [F] * 3, 0.0)
    feed(breaker, [F] * 3, 20.0)
    assert breaker.state is CLOSED
    feed(breaker, [F], 21.0)
    assert breaker.state is OPEN


def test_old_failures_do_not_trip_a_breaker_that_has_just_closed() -> None:
    breaker = breaker_of(
        rule_of(consecutive=1000, failure_ratio=0.5, min_requests=4, window_s=Seconds(3600), successes=1)
    )
    feed(breaker, [F] * 4)
    feed(breaker, [S], 10.0)
    assert breaker.state is CLOSED
    feed(breaker, [F] * 3, 10.0)
    assert breaker.state is CLOSED


def test_the_closed_state_allocates_nothing() -> None:
    breaker = breaker_of()
    assert breaker.acquire(0.0) is breaker.acquire(5.0)


def test_a_trip_says_what_happened() -> None:
    breaker = breaker_of(rule_of(consecutive=2))
    feed(breaker, [F])
    found = breaker.record(permitted(breaker, 3.0), F, 4.0, "ttft_timeout")
    words = "2 failures in a row, the last: ttft_timeout"
    assert found == Transition(
        Scope.NODE, "a:80", "chat", CLOSED, OPEN, 4.0, "consecutive", words, 1, wait_s=10.0, base_s=10.0, max_s=100.0
    )
    assert (breaker.state, breaker.since, breaker.why, breaker.by) == (OPEN, 4.0, "consecutive", "")


def test_each_permit_is_one_result() -> None:
    """T22: three failed attempts of one request are three failures, one success elsewhere is none here."""
    a, b = breaker_of(rule_of(consecutive=3), key="a:80"), breaker_of(rule_of(consecutive=3), key="b:80")
    feed(a, [F] * 3)
    assert a.state is OPEN
    c = breaker_of(rule_of(consecutive=2), key="c:80")
    feed(c, [F])
    feed(b, [S])
    feed(c, [F])
    assert (b.state, c.state) == (CLOSED, OPEN)


# --- open -----------------------------------------------------------------------------------------------------------


def test_open_refuses_until_its_wait_is_over_and_never_counts_refusals() -> None:
    breaker = breaker_of()
    trip(breaker, 0.0)
    for _ in range(1000):
        assert breaker.acquire(9.999) == Denied(10.0)
    assert not breaker.can_probe(9.999)
    assert breaker.can_probe(10.0)
    assert (breaker.generation, breaker.retry_at(3.0)) == (1, 10.0)


def test_results_of_before_the_trip_change_nothing() -> None:
    breaker = breaker_of()
    old = [permitted(breaker, 0.0) for _ in range(10)]
    trip(breaker, 0.0)
    probe = permitted(breaker, 10.0)
    for permit in old:
        for result in Result:
            assert breaker.record(permit, result, 11.0) is None
    assert (breaker.state, breaker.probes_out) == (HALF_OPEN, 1)
    breaker.record(probe, S, 11.0)
    breaker.record(permitted(breaker, 11.0), S, 11.0)
    assert breaker.state is CLOSED
    feed(breaker, [F] * 4, 12.0)
    for permit in [*old, probe]:
        breaker.record(permit, F, 12.0)
        breaker.record(permit, S, 12.0)
    assert breaker.state is CLOSED
    feed(breaker, [F], 12.0)
    assert breaker.state is OPEN


@pytest.mark.parametrize("failed_probes", [0, 1, 2, 3, 4, 5, 80])
def test_the_wait_doubles_with_every_failed_probe_up_to_its_limit(failed_probes: int) -> None:
    breaker = breaker_of()
    trip(breaker, 0.0)
    now = 0.0
    for _ in range(failed_probes):
        now = breaker.retry_at(now)
        assert record(breaker, F, now) is not None
    assert breaker.retry_at(now) - now == min(10.0 * 2**failed_probes, 100.0)


def test_the_longest_wait_may_be_shorter_than_the_first() -> None:
    breaker = breaker_of(rule_of(open_max_s=Seconds(3)))
    trip(breaker, 0.0)
    assert breaker.retry_at(0.0) == 3.0


@pytest.mark.parametrize(
    ("stayed_closed_s", "wait_s"),
    [(0.0, 40.0), (19.5, 40.0), (20.0, 10.0), (1000.0, 10.0)],
    ids=["at once", "nearly as long", "as long as it waited", "long"],
)
def test_waits_start_again_after_a_quiet_time_as_long_as_the_last(stayed_closed_s: float, wait_s: float) -> None:
    breaker = breaker_of()
    trip(breaker, 0.0)
    record(breaker, F, 10.0)
    record(breaker, S, 30.0, times=2)
    assert breaker.state is CLOSED
    now = 30.0 + stayed_closed_s
    trip(breaker, now)
    assert breaker.retry_at(now) - now == wait_s


# --- half-open ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probes", [1, 2, 7])
def test_half_open_lends_exactly_the_probes(probes: int) -> None:
    """T01: of fifty that ask at once, `probes` get through."""
    breaker = breaker_of(rule_of(probes=probes, successes=probes))
    trip(breaker, 0.0)
    asked = [breaker.acquire(10.0) for _ in range(50)]
    lent = [permit for permit in asked if isinstance(permit, Permit)]
    assert len(lent) == probes
    assert all(permit.probe for permit in lent)
    assert len({permit.id for permit in lent}) == probes
    assert [permit.moved is not None for permit in lent] == [True] + [False] * (probes - 1)
    assert all(d == Denied(10.0 + VERDICT_WAIT_S) for d in asked if isinstance(d, Denied))
    for permit in lent:
        assert breaker.state is HALF_OPEN
        breaker.record(permit, S, 11.0)
    assert breaker.state is CLOSED


def test_the_probe_that_asked_first_tells_of_the_half_open_state() -> None:
    _, probe = half_open()
    assert probe.moved == Transition(
        Scope.NODE,
        "a:80",
        "chat",
        OPEN,
        HALF_OPEN,
        10.0,
        "waited",
        "open for 10 s",
        2,
        wait_s=10.0,
        base_s=10.0,
        max_s=100.0,
    )


@pytest.mark.parametrize("successes", [1, 2, 3])
def test_enough_successes_close(successes: int) -> None:
    breaker, probe = half_open(rule_of(successes=successes))
    for number in range(1, successes + 1):
        transition = breaker.record(probe, S, 11.0)
        assert (transition is not None) == (number == successes)
        assert breaker.state is (CLOSED if number == successes else HALF_OPEN)
        if number < successes:
            probe = permitted(breaker, 11.0)


def test_a_failed_probe_reopens_for_longer_whatever_succeeded_before() -> None:
    breaker, probe = half_open(rule_of(successes=3))
    breaker.record(probe, S, 11.0)
    breaker.record(permitted(breaker, 11.0), S, 11.0)
    found = breaker.record(permitted(breaker, 11.0), F, 12.0, "truncated")
    assert found is not None and (found.new, found.why, found.evidence) == (
        OPEN,
        "probe_failed",
        "a probe failed: truncated",
    )
    assert breaker.acquire(31.9) == Denied(32.0)
    record(breaker, S, 32.0, times=2)
    assert breaker.state is HALF_OPEN, "successes of an earlier trial do not count"


@pytest.mark.parametrize("result", [I, O])
def test_an_inconclusive_probe_gives_its_slot_back(result: Result) -> None:
    """T01, T04, T16: the client of the probe left, or the probe was answered 400."""
    breaker, probe = half_open()
    for _ in range(20):
        assert isinstance(breaker.acquire(11.0), Denied)
        assert breaker.record(probe, result, 11.0) is None
        assert (breaker.state, breaker.probes_out) == (HALF_OPEN, 0)
        probe = permitted(breaker, 11.0)
        assert probe.probe
    breaker.record(probe, S, 11.0)
    breaker.record(permitted(breaker, 11.0), S, 11.0)
    assert breaker.state is CLOSED


def test_a_lost_probe_frees_its_slot_when_its_lease_ends() -> None:
    breaker, lost = half_open(rule_of(successes=1))
    assert not breaker.can_probe(10.0 + LEASE_S - 0.001)
    assert isinstance(breaker.acquire(10.0 + LEASE_S - 0.001), Denied)
    assert breaker.can_probe(10.0 + LEASE_S)
    probe = permitted(breaker, 10.0 + LEASE_S)
    assert isinstance(breaker.acquire(10.0 + LEASE_S), Denied)
    for result in Result:
        assert breaker.record(lost, result, 10.0 + LEASE_S) is None
    assert breaker.state is HALF_OPEN
    assert breaker.probes_out == 1
    breaker.record(probe, S, 10.0 + LEASE_S)
    assert breaker.state is CLOSED


@pytest.mark.parametrize("result", list(Result))
def test_a_result_after_the_lease_counts_for_nothing_even_if_nobody_took_the_slot(result: Result) -> None:
    breaker, probe = half_open(rule_of(successes=1))
    assert breaker.record(probe, result, 10.0 + LEASE_S) is None
    assert (breaker.state, breaker.probes_out) == (HALF_OPEN, 0)


def test_a_probe_counts_once() -> None:
    breaker, probe = half_open()
    breaker.record(probe, S, 11.0)
    breaker.record(probe, S, 11.0)
    assert breaker.state is HALF_OPEN


def test_probes_still_out_when_the_verdict_falls_change_nothing() -> None:
    breaker = breaker_of(rule_of(probes=3, successes=1))
    trip(breaker, 0.0)
    first, second, third = (permitted(breaker, 10.0) for _ in range(3))
    breaker.record(first, S, 11.0)
    assert breaker.state is CLOSED
    breaker.record(second, F, 11.0)
    breaker.record(third, F, 11.0)
    feed(breaker, [F] * 4, 11.0)
    assert breaker.state is CLOSED


# --- the floor ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "ratio", "closed"),
    [
        (0, 0.34, 0),
        (1, 0.34, 1),
        (2, 0.34, 1),
        (3, 0.34, 1),
        (5, 0.34, 1),
        (5, 0.5, 2),
        (5, 1.0, 5),
        (6, 0.34, 3),
        (9, 0.34, 4),
        (100, 0.34, 34),
        (100, 1.0, 100),
        (1, 0.0, 0),
        (100, 0.0, 0),
        (1, 0.001, 1),
        (6, 0.001, 1),
    ],
)
def test_how_many_must_stay_closed(size: int, ratio: float, closed: int) -> None:
    assert min_closed(size, ratio) == closed


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 9, 40])
@pytest.mark.parametrize("ratio", [0.0, 0.34, 0.5, 1.0])
def test_the_floor_holds_and_everything_above_it_opens(size: int, ratio: float) -> None:
    roster = Roster()
    roster.resize(size, ratio)
    breakers = [breaker_of(roster=roster, key=f"h{number}:80") for number in range(size)]
    for breaker in breakers:
        feed(breaker, [F] * 5)
    assert sum(b.state is CLOSED for b in breakers) == min_closed(size, ratio)
    assert sum(b.held_closed for b in breakers) == min_closed(size, ratio)


def test_a_trip_that_the_floor_forbade_is_tried_again_at_the_next_failure() -> None:
    roster = Roster()
    roster.resize(2, 0.34)
    a, b = breaker_of(roster=roster, key="a"), breaker_of(roster=roster, key="b")
    trip(a, 0.0)
    feed(b, [F] * 7)
    assert (b.state, b.held_closed) == (CLOSED, 3)
    record(a, S, 10.0, times=2)
    assert (a.state, b.state) == (CLOSED, CLOSED)
    feed(b, [F], 10.0)
    assert b.state is OPEN


def test_half_open_is_not_closed_for_the_floor() -> None:
    roster = Roster()
    roster.resize(2, 0.34)
    a, b = breaker_of(roster=roster, key="a"), breaker_of(roster=roster, key="b")
    trip(a, 0.0)
    permitted(a, 10.0)
    feed(b, [F] * 5, 10.0)
    assert b.state is CLOSED


def test_who_is_gone_is_in_no_roster() -> None:
    roster = Roster()
    roster.resize(2, 0.5)
    a = breaker_of(roster=roster, key="a")
    trip(a, 0.0)
    assert list(roster.not_closed) == ["a"]
    a.forget()
    assert not roster.not_closed
    record(a, F, 10.0)
    assert not roster.not_closed


# --- modes and orders -----------------------------------------------------------------------------------------------


def test_shadow_is_the_same_machine_that_refuses_nobody() -> None:
    shadow, real = breaker_of(rule_of(mode="shadow")), breaker_of()
    script = [(0.0, F)] * 8 + [(5.0, S)] * 3 + [(10.0, F), (12.0, S), (30.0, S), (30.0, S), (31.0, F)]
    denied = 0
    for now, result in script:
        permit = real.acquire(now)
        before = shadow.shadow_denied
        shadowed = permitted(shadow, now)
        assert shadow.passes
        if isinstance(permit, Denied):
            denied += 1
            assert shadow.shadow_denied == before + 1
            assert not shadowed.probe
        else:
            assert shadow.shadow_denied == before
            assert real.record(permit, result, now, "x") == shadow.record(shadowed, result, now, "x")
        assert shadow.state is real.state
    assert denied > 0


def test_shadow_results_of_the_unasked_change_nothing() -> None:
    breaker = breaker_of(rule_of(mode="shadow"))
    trip(breaker, 0.0)
    unasked = permitted(breaker, 1.0)
    breaker.record(unasked, S, 1.0)
    probe = permitted(breaker, 10.0)
    beside = permitted(breaker, 10.0)
    assert probe.probe and not beside.probe
    breaker.record(beside, F, 10.0)
    assert breaker.state is HALF_OPEN


def test_off_judges_nothing() -> None:
    breaker = breaker_of(rule_of(mode="off", failure_ratio=0.1, min_requests=1))
    feed(breaker, [F] * 100)
    assert (breaker.state, breaker.generation, breaker.passes) == (CLOSED, 0, True)


@pytest.mark.parametrize("mode", ["enforce", "shadow", "off"])
def test_an_order_to_open_refuses_in_every_mode_until_the_next_order(mode: Mode) -> None:
    breaker = breaker_of(rule_of(mode=mode))
    found = breaker.force("open", 1.0, "ann")
    assert found is not None and (found.new, found.why, found.evidence) == (OPEN, "operator", "open by ann")
    for now in (1.0, 11.0, 1e6):
        assert breaker.acquire(now) == Denied(now + 10.0)
        assert not breaker.can_probe(now) and breaker.probe_at(now) == math.inf
    assert (breaker.by, breaker.passes) == ("ann", False)
    found = breaker.force("close", 2e6, "bob")
    assert found is not None and (found.old, found.new) == (OPEN, CLOSED)
    assert breaker.passes


@pytest.mark.parametrize(("action", "wait_s"), [("close", 40.0), ("reset", 10.0)])
def test_close_remembers_how_often_it_tripped_and_reset_does_not(action: Action, wait_s: float) -> None:
    breaker = breaker_of()
    trip(breaker, 0.0)
    record(breaker, F, 10.0)
    breaker.force(action, 11.0, "ann")
    assert breaker.state is CLOSED
    trip(breaker, 12.0)
    assert breaker.retry_at(12.0) - 12.0 == wait_s


@pytest.mark.parametrize("action", ["close", "reset"])
def test_closing_what_is_closed_forgets_its_failures_and_tells_nothing(action: Action) -> None:
    breaker = breaker_of()
    old = permitted(breaker, 0.0)
    feed(breaker, [F] * 4)
    assert breaker.force(action, 1.0, "ann") is None
    breaker.record(old, F, 1.0)
    feed(breaker, [F] * 4, 1.0)
    assert breaker.state is CLOSED


def test_an_order_passes_the_floor() -> None:
    roster = Roster()
    roster.resize(1, 1.0)
    breaker = breaker_of(roster=roster)
    assert breaker.force("open", 0.0, "ann") is not None


def test_an_order_holds_a_breaker_that_was_open_already() -> None:
    breaker = breaker_of()
    trip(breaker, 0.0)
    assert breaker.force("open", 1.0, "ann") is None
    assert isinstance(breaker.acquire(1000.0), Denied)


def test_a_probe_that_was_out_when_an_order_came_changes_nothing() -> None:
    breaker, probe = half_open(rule_of(successes=1))
    breaker.force("open", 11.0, "ann")
    assert breaker.record(probe, S, 11.0) is None
    assert breaker.state is OPEN


# --- new rules ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", list(State))
def test_a_reload_keeps_state_generation_and_probes(state: State) -> None:
    breaker = breaker_of()
    if state is not CLOSED:
        trip(breaker, 0.0)
    if state is HALF_OPEN:
        probe = permitted(breaker, 10.0)
    before = breaker.generation
    assert breaker.use_rule(rule_of(consecutive=7, successes=1), 10.0, lease_s=LEASE_S) is None
    assert (breaker.state, breaker.generation) == (state, before)
    if state is HALF_OPEN:
        assert breaker.probes_out == 1
        breaker.record(probe, S, 11.0)
        assert breaker.state is CLOSED


def test_a_reload_keeps_the_failures_counted() -> None:
    breaker = breaker_of()
    feed(breaker, [F] * 4)
    breaker.use_rule(rule_of(consecutive=6), 0.0, lease_s=LEASE_S)
    feed(breaker, [F])
    assert breaker.state is CLOSED
    feed(breaker, [F])
    assert breaker.state is OPEN


def test_a_shorter_longest_wait_shortens_the_wait_that_runs() -> None:
    breaker = breaker_of()
    trip(breaker, 0.0)
    breaker.use_rule(rule_of(open_max_s=Seconds(2)), 1.0, lease_s=LEASE_S)
    assert breaker.acquire(1.9) == Denied(2.0)
    assert permitted(breaker, 2.0).probe


def test_turning_it_off_closes_it() -> None:
    breaker = breaker_of()
    trip(breaker, 0.0)
    found = breaker.use_rule(rule_of(mode="off"), 1.0, lease_s=LEASE_S)
    assert found is not None and (found.old, found.new, found.why) == (OPEN, CLOSED, "mode_off")
    assert breaker.passes


def test_turning_it_off_leaves_an_order_standing() -> None:
    breaker = breaker_of()
    breaker.force("open", 0.0, "ann")
    assert breaker.use_rule(rule_of(mode="off"), 1.0, lease_s=LEASE_S) is None
    assert isinstance(breaker.acquire(1.0), Denied)


def test_shadowing_an_open_breaker_lets_everybody_through_at_once() -> None:
    breaker = breaker_of()
    trip(breaker, 0.0)
    assert breaker.use_rule(rule_of(mode="shadow"), 1.0, lease_s=LEASE_S) is None
    assert (breaker.state, breaker.passes) == (OPEN, True)
    permitted(breaker, 1.0)
    breaker.use_rule(RULE, 2.0, lease_s=LEASE_S)
    assert isinstance(breaker.acquire(2.0), Denied)


def test_a_ratio_may_be_turned_on_and_off() -> None:
    breaker = breaker_of(rule_of(consecutive=1000))
    feed(breaker, [F] * 50)
    on = rule_of(consecutive=1000, failure_ratio=0.5, min_requests=3)
    breaker.use_rule(on, 0.0, lease_s=LEASE_S)
    feed(breaker, [F] * 2)
    assert breaker.state is CLOSED
    breaker.use_rule(rule_of(consecutive=1000), 0.0, lease_s=LEASE_S)
    feed(breaker, [F] * 50)
    assert breaker.state is CLOSED
    breaker.use_rule(on, 0.0, lease_s=LEASE_S)
    feed(breaker, [F] * 3)
    assert breaker.state is OPEN


def test_unblemished_is_what_a_new_breaker_would_judge_the_same() -> None:
    breaker = breaker_of(rule_of(failure_ratio=0.9, min_requests=100, window_s=Seconds(10)))
    found = [breaker.unblemished]
    # The success ends the row of failures, but the window remembers until it has passed.
    for now, result in ((0.0, F), (0.0, S), (30.0, S)):
        feed(breaker, [result], now)
        found.append(breaker.unblemished)
    trip(breaker, 30.0)
    assert [*found, breaker.unblemished] == [True, False, False, True, False]


# --- a detector's trip ----------------------------------------------------------------------------------------------


NUMBERS = Adaptive(open_s=Seconds(3), open_max_s=Seconds(10), ramp_s=Seconds(10))


def tripped(proofs: int, rule: BreakerRule = RULE) -> Breaker:
    """Opened by a detector at 0."""
    breaker = breaker_of(rule)
    transition = breaker.trip("fast", "3 of 3 answers bad", proofs, NUMBERS, 0.0)
    assert transition is not None
    assert (transition.new, transition.why, transition.evidence) == (OPEN, "fast", "3 of 3 answers bad")
    return breaker


def prove(breaker: Breaker, now: float, most: int = 500) -> int:
    """How many good probes, one after the other, close it."""
    for count in range(1, most + 1):
        record(breaker, S, now)
        if breaker.state is CLOSED:
            return count
    raise AssertionError(f"{most} good probes did not close it")


def test_a_detectors_trip_waits_by_its_own_numbers_and_a_fixed_one_by_its_own_again() -> None:
    breaker = tripped(1)
    assert breaker.retry_at(0.0) == 3.0
    record(breaker, F, 3.0)
    assert breaker.retry_at(3.0) == 3.0 + 6.0
    record(breaker, F, 9.0)
    assert breaker.retry_at(9.0) == 9.0 + 10.0
    breaker.force("reset", 19.0, "ann")
    trip(breaker, 100.0)
    assert breaker.retry_at(100.0) == 110.0


@pytest.mark.parametrize(
    ("successes", "proofs", "needed"),
    [(2, 1, 2), (2, 2, 2), (2, 5, 5), (1, 60, 60), (5, 3, 5)],
    ids=lambda each: str(each),
)
def test_it_closes_by_as_many_good_probes_as_outweigh_it(successes: int, proofs: int, needed: int) -> None:
    assert prove(tripped(proofs, rule_of(successes=successes)), 3.0) == needed


@pytest.mark.parametrize("failed", [1, 2, 5])
def test_after_a_failed_probe_there_is_more_to_prove_within_bounds(failed: int) -> None:
    breaker, now = tripped(5), 0.0
    for _ in range(failed):
        now = breaker.retry_at(now)
        record(breaker, F, now)
    assert prove(breaker, breaker.retry_at(now)) == 5 * MOST_TIMES


def test_probes_go_one_by_one_until_one_is_good_and_then_side_by_side() -> None:
    breaker = tripped(60)
    first = permitted(breaker, 3.0)
    assert not breaker.can_probe(3.0) and isinstance(breaker.acquire(3.0), Denied)
    breaker.record(first, S, 3.0)
    out = [permitted(breaker, 3.0) for _ in range(MOST_PROBES)]
    assert all(permit.probe for permit in out) and not breaker.can_probe(3.0)
    assert breaker.probes_out == MOST_PROBES
    breaker.record(out.pop(), I, 3.0)
    assert breaker.can_probe(3.0)


def test_no_more_probes_are_lent_than_are_wanting() -> None:
    breaker = tripped(4)
    record(breaker, S, 3.0)
    out = [permitted(breaker, 3.0) for _ in range(3)]
    assert not breaker.can_probe(3.0)
    for permit in out:
        breaker.record(permit, S, 3.0)
    assert breaker.state is CLOSED


def test_one_bad_probe_among_many_reopens_and_the_others_say_nothing_more() -> None:
    breaker = tripped(60)
    record(breaker, S, 3.0)
    out = [permitted(breaker, 3.0) for _ in range(MOST_PROBES)]
    assert breaker.record(out[3], F, 4.0, "late") is not None
    for permit in out:
        assert breaker.record(permit, S, 4.0) is None
        assert breaker.record(permit, F, 4.0) is None
    assert breaker.state is OPEN and breaker.probes_out == 0


def test_where_traffic_is_thin_patience_takes_the_place_of_proofs() -> None:
    breaker = tripped(60)
    record(breaker, S, 3.0)
    record(breaker, S, 3.0 + PATIENCE_S - 0.1)
    assert breaker.state is HALF_OPEN
    record(breaker, S, 3.0 + PATIENCE_S)
    assert breaker.state is CLOSED


def test_patience_asks_for_the_rules_successes_still() -> None:
    breaker = tripped(60, rule_of(successes=3))
    for step in range(3):
        assert breaker.state is not CLOSED
        record(breaker, S, 3.0 + step * PATIENCE_S)
    assert breaker.state is CLOSED


@pytest.mark.parametrize("mode", ["off", "open", "half_open", "floor", "panic"])
def test_a_trip_does_nothing_where_nothing_may_open(mode: str) -> None:
    roster = Roster()
    roster.resize(2, 0.5)
    breaker = breaker_of(rule_of(mode="off") if mode == "off" else RULE, roster)
    other = breaker_of(RULE, roster, "b:80")
    if mode in ("open", "half_open"):
        trip(breaker, 0.0)
        if mode == "half_open":
            permitted(breaker, 10.0)
    elif mode == "floor":
        trip(other, 0.0)
    elif mode == "panic":
        roster.panic = True
    before = (breaker.state, breaker.generation)
    assert breaker.trip("gray", "evidence", 60, NUMBERS, 10.0) is None
    assert (breaker.state, breaker.generation) == before
    assert breaker.held_closed == (mode in ("floor", "panic"))


def test_a_shadowed_trip_refuses_nobody() -> None:
    breaker = tripped(60, rule_of(mode="shadow"))
    assert isinstance(breaker.acquire(1.0), Permit) and breaker.shadow_denied == 1


def test_what_opened_it_is_its_cause_until_something_else_moves_it() -> None:
    breaker = tripped(60)
    cause = breaker.cause
    assert cause == breaker.why != ""
    for failed in range(3):
        probe = breaker.probe(1000.0 * (failed + 1))
        assert probe is not None and (breaker.why, breaker.cause) == ("waited", cause)
        breaker.record(probe, F, 1000.0 * (failed + 1), "x")
        assert (breaker.why, breaker.cause) == ("probe_failed", cause)
    breaker.force("open", 9000.0, "someone")
    assert breaker.cause == "operator"
    breaker.force("close", 9000.0, "someone")
    while breaker.state is CLOSED:
        record(breaker, F, 9001.0)
    assert breaker.cause == "consecutive"


def test_a_probe_of_nobody_is_a_probe_or_nothing() -> None:
    for mode in ("enforce", "shadow"):
        breaker = tripped(60, rule_of(mode=mode))
        assert breaker.probe(1.0) is None
        assert breaker.state is OPEN
        probe = breaker.probe(100.0)
        assert probe is not None and probe.probe and probe.moved is not None
        assert breaker.probe(100.0) is None
        assert breaker.shadow_denied == 0
        breaker.record(probe, I, 100.0)
        breaker.force("close", 100.0, "someone")
        assert breaker.probe(100.0) is None


def test_panic_closes_and_remembers_how_often_it_tripped() -> None:
    breaker = tripped(5)
    record(breaker, F, 3.0)
    closed = breaker.close_in_panic(4.0)
    assert (closed.old, closed.new, closed.why) == (OPEN, CLOSED, "panic")
    assert breaker.passes and breaker.probes_out == 0
    assert breaker.trip("fast", "again", 5, NUMBERS, 5.0) is not None
    assert breaker.retry_at(5.0) == 5.0 + 10.0, "three times in a row"


def test_after_its_proofs_it_takes_a_growing_share_until_it_has_all() -> None:
    breaker = tripped(1)
    assert breaker.share(0.0) == 1.0, "who is open has no share to ramp"
    prove(breaker, 3.0)
    assert breaker.ramp_until == 13.0
    shares = [breaker.share(3.0 + step) for step in (0.0, 0.5, 2.0, 5.0, 9.0, 10.0, 1e9)]
    assert shares == sorted(shares) and shares[0] == LEAST_SHARE and shares[-2:] == [1.0, 1.0]
    assert breaker.share(8.0) == pytest.approx(0.5)
    assert LEAST_SHARE <= breaker.share(-1e9) <= 1.0, "a clock that went back"


def test_after_orders_and_fixed_trips_it_takes_all_at_once() -> None:
    breaker = breaker_of()
    trip(breaker, 0.0)
    prove(breaker, 10.0)
    assert breaker.share(10.0) == 1.0
    breaker = tripped(1)
    breaker.force("close", 1.0, "ann")
    assert breaker.share(1.0) == 1.0


def test_what_opened_again_within_its_ramp_and_is_closed_by_order_has_no_share_left_to_ramp() -> None:
    breaker = tripped(1)
    prove(breaker, 3.0)
    trip(breaker, 4.0)
    breaker.force("close", 5.0, "ann")
    assert breaker.state is CLOSED and breaker.share(5.0) == 1.0


def test_shadow_turns_nobody_away_from_who_has_just_recovered() -> None:
    breaker = tripped(1, rule_of(mode="shadow"))
    prove(breaker, 3.0)
    assert breaker.share(3.0) == 1.0
    breaker = tripped(1)
    prove(breaker, 3.0)
    assert breaker.share(3.0) == LEAST_SHARE
    breaker.use_rule(rule_of(mode="shadow"), 3.0, lease_s=LEASE_S)
    assert breaker.share(3.0) == 1.0


def test_a_fixed_trip_after_a_detectors_asks_for_no_proofs_but_the_rules() -> None:
    breaker = tripped(60)
    breaker.force("reset", 1.0, "ann")
    trip(breaker, 2.0)
    assert prove(breaker, 12.0) == RULE.successes


# --- the whole machine ----------------------------------------------------------------------------------------------

OF_ITSELF = {
    "consecutive": Event.TRIPPED,
    "waited": Event.WAITED,
    "proved": Event.PROVED,
    "probe_failed": Event.PROBE_FAILED,
}
"""What a breaker does without an order, by what it says of it."""

Step = Callable[[Breaker], Iterator[tuple[Transition | None, Event | None]]]
"""Asks a breaker for one thing after the other; gives what it told of each, and the event if it was an order."""


def _ended(result: Result) -> Step:
    """An attempt at the earliest moment it may start, with that result."""

    def step(breaker: Breaker) -> Iterator[tuple[Transition | None, Event | None]]:
        now = max(breaker.since, breaker.retry_at(breaker.since))
        permit = breaker.acquire(now)
        if isinstance(permit, Permit):
            yield permit.moved, None
            yield breaker.record(permit, result, now, "x"), None

    return step


def _ordered(action: Action) -> Step:
    event = Event.ORDERED_OPEN if action == "open" else Event.ORDERED_CLOSED

    def step(breaker: Breaker) -> Iterator[tuple[Transition | None, Event | None]]:
        yield breaker.force(action, breaker.since, "ann"), event

    return step


def _asked(breaker: Breaker) -> Iterator[tuple[Transition | None, Event | None]]:
    permit = breaker.acquire(breaker.retry_at(breaker.since))
    yield permit.moved if isinstance(permit, Permit) else None, None


STEPS: dict[str, Step] = {
    **{f"ended {result.value}": _ended(result) for result in Result},
    **{f"ordered {action}": _ordered(action) for action in ("open", "close", "reset")},
    "asked": _asked,
}


def moves(breaker: Breaker, step: Step) -> Iterator[tuple[State, Event, State]]:
    """The moves of a step: each is one generation, and told as it was, unless an order changed nothing."""
    old, generation = breaker.state, breaker.generation
    for told, ordered in step(breaker):
        if breaker.generation == generation:
            assert told is None and breaker.state is old
            continue
        assert breaker.generation == generation + 1
        if told is not None:
            assert (told.old, told.new, told.generation) == (old, breaker.state, breaker.generation)
            assert ordered is None or told.why == "operator"
        else:
            assert ordered is not None and breaker.state is old
        yield old, ordered or OF_ITSELF[told.why if told is not None else ""], breaker.state
        old, generation = breaker.state, breaker.generation


def test_every_row_of_the_table_is_reached_and_nothing_else_happens() -> None:
    """Every history of up to five steps, from the start: the moves made are exactly the table's."""
    made: set[tuple[State, Event, State]] = set()
    histories = deque[list[str]]([[]])
    while histories:
        history = histories.popleft()
        breaker = breaker_of(rule_of(consecutive=2, successes=2))
        for name in history:
            made.update(moves(breaker, STEPS[name]))
        if len(history) < 5:
            histories.extend([*history, name] for name in STEPS)
    assert made == {(old, event, new) for (old, event), new in TRANSITIONS.items() if event not in AGREED_EVENTS}


# --- what all sidecars agree on ---------------------------------------------------------------------------------------

AGREED_EVENTS = {Event.AGREED_CLOSED: CLOSED, Event.AGREED_OPEN: OPEN, Event.AGREED_HALF_OPEN: HALF_OPEN}


class Library:
    """Lends what the test gives it, and remembers what it was told."""

    def __init__(self) -> None:
        self.wanted: list[str] = []
        self.told: list[tuple[str, int, Result, str]] = []

    def wants(self, breaker: Breaker) -> None:
        self.wanted.append(breaker.key)

    def ended(self, breaker: Breaker, seq: int, result: Result, why: str) -> None:
        self.told.append((breaker.key, seq, result, why))


def agreed_on(state: State, version: int = 1, **numbers: Any) -> Agreed:
    known: dict[str, Any] = {"since": 5.0, "until": 15.0, "why": "fast", "evidence": "6 of 8", "by": ""}
    return Agreed(state, 7, version, observer="pod-b", **(known | numbers))


@pytest.mark.parametrize("event", AGREED_EVENTS)
@pytest.mark.parametrize("old", State)
def test_what_is_agreed_on_is_taken_over_from_every_state(old: State, event: Event) -> None:
    breaker, library = breaker_of(rule_of(consecutive=2)), Library()
    breaker.adopt(agreed_on(old), library, 5.0)
    assert breaker.state is old
    generation = breaker.generation
    moved = breaker.adopt(agreed_on(AGREED_EVENTS[event], version=2), library, 6.0)
    new = TRANSITIONS[old, event]
    assert breaker.state is new
    assert (breaker.epoch, breaker.version, breaker.observer, breaker.since) == (7, 2, "pod-b", 5.0)
    if old is new:
        assert moved is None and breaker.generation == generation + (new is HALF_OPEN)
    else:
        assert moved is not None and (moved.old, moved.new, moved.agreed) == (old, new, True)


def test_probes_are_lent_by_all_together_and_their_results_told() -> None:
    breaker, library = breaker_of(rule_of(consecutive=2)), Library()
    breaker.adopt(agreed_on(OPEN), library, 5.0)
    assert isinstance(breaker.acquire(14.9), Denied) and not library.wanted
    assert isinstance(breaker.acquire(15.0), Denied) and library.wanted == ["a:80"]
    assert breaker.state is OPEN, "its wait alone moves nothing"
    breaker.adopt(agreed_on(HALF_OPEN, version=2), library, 15.0)
    assert not breaker.can_probe(15.0) and isinstance(breaker.acquire(15.0), Denied)
    assert breaker.lend(41) and breaker.can_probe(15.0)
    probe = permitted(breaker, 15.1)
    assert probe.probe and not breaker.can_probe(15.1)
    assert isinstance(breaker.acquire(15.1), Denied)
    assert breaker.record(probe, S, 16.0, "complete") is None and breaker.state is HALF_OPEN
    assert library.told == [("a:80", 41, S, "complete")]
    assert breaker.record(probe, F, 16.0, "again") is None and len(library.told) == 1
    closed = breaker.adopt(agreed_on(CLOSED, version=3, ramp_s=10.0, ramp_until=26.0), library, 16.1)
    assert closed is not None and not breaker.shared
    assert breaker.share(21.0) == 0.5


def test_a_probe_of_an_older_version_tells_nobody() -> None:
    breaker, library = breaker_of(rule_of()), Library()
    breaker.adopt(agreed_on(HALF_OPEN), library, 5.0)
    breaker.lend(1)
    probe = permitted(breaker, 5.0)
    breaker.adopt(agreed_on(OPEN, version=2), library, 6.0)
    assert breaker.record(probe, F, 7.0, "late") is None and not library.told
    assert not breaker.lend(2), "it is on trial no longer"


def test_a_probe_that_nobody_used_can_be_taken_back_once() -> None:
    breaker = breaker_of(rule_of())
    breaker.adopt(agreed_on(HALF_OPEN), Library(), 5.0)
    breaker.lend(1)
    assert breaker.take_back(1) and not breaker.take_back(1)
    breaker.lend(2)
    permitted(breaker, 5.0)
    assert not breaker.take_back(2)


def test_an_order_in_the_place_of_another_is_that_of_who_gave_it_last() -> None:
    breaker = breaker_of(rule_of())
    breaker.adopt(agreed_on(OPEN, held_until=math.inf, by="ann"), Library(), 5.0)
    assert breaker.adopt(agreed_on(OPEN, version=2, held_until=math.inf, by="bob"), Library(), 6.0) is None
    assert (breaker.held_open, breaker.by) == (True, "bob")


def test_what_it_trips_itself_is_its_own_until_the_others_agree() -> None:
    breaker, library = breaker_of(rule_of(consecutive=2)), Library()
    feed(breaker, [F] * 2)
    before = (breaker.ours, breaker.shared, breaker.generation)
    assert breaker.adopt(agreed_on(OPEN), library, 3.0) is None, "it was open already"
    assert (before, (breaker.ours, breaker.shared, breaker.generation)) == ((True, False, 1), (False, True, 1))
    assert breaker.retry_at(4.0) == 15.0


def test_without_the_log_it_is_its_own_again_and_waits_for_its_share_of_the_probes() -> None:
    breaker, library = breaker_of(rule_of(consecutive=2)), Library()
    breaker.adopt(agreed_on(OPEN), library, 5.0)
    assert breaker.lost(20.0, 6.0) is None
    assert isinstance(breaker.acquire(34.9), Denied)
    assert permitted(breaker, 35.0).probe and not library.wanted
    trial = breaker_of(rule_of(consecutive=2))
    trial.adopt(agreed_on(HALF_OPEN), library, 5.0)
    moved = trial.lost(20.0, 6.0)
    assert moved is not None and (moved.new, moved.why, moved.agreed) == (OPEN, "log_away", True)
    mine = breaker_of(rule_of(consecutive=2))
    mine.adopt(agreed_on(HALF_OPEN), library, 5.0)
    mine.lend(1)
    probe = permitted(mine, 5.0)
    assert mine.lost(20.0, 6.0) is None
    assert mine.record(probe, F, 7.0, "x") is not None and mine.state is OPEN and not library.told
    assert breaker_of(rule_of()).lost(1.0, 1.0) is None


def test_what_would_leave_too_few_is_not_taken_over_unless_ordered() -> None:
    roster = Roster()
    roster.resize(2, 0.5)
    one, two = (Breaker(Scope.NODE, k, "chat", rule_of(), 0.0, lease_s=60.0, roster=roster) for k in ("a:80", "b:80"))
    assert one.adopt(agreed_on(OPEN), Library(), 5.0) is not None
    assert two.adopt(agreed_on(OPEN), Library(), 5.0) is None and two.state is CLOSED
    assert two.adopt(agreed_on(OPEN, version=2, held_until=math.inf, by="ann"), Library(), 5.0) is not None
    off = breaker_of(rule_of(mode="off"))
    assert off.adopt(agreed_on(OPEN), Library(), 5.0) is None and off.state is CLOSED
    assert off.adopt(agreed_on(OPEN, version=2, held_until=math.inf), Library(), 5.0) is not None


def test_suspicion_halves_what_opens_until_a_success() -> None:
    breaker = breaker_of(rule_of(consecutive=6))
    breaker.suspect()
    assert [record(breaker, F, 1.0) is not None for _ in range(3)] == [False, False, True]
    other = breaker_of(rule_of(consecutive=6))
    other.suspect()
    feed(other, [S] + [F] * 5)
    assert other.state is CLOSED


# --- orders that end --------------------------------------------------------------------------------------------------


def test_an_order_ends_by_itself_and_the_breaker_may_be_probed() -> None:
    breaker = breaker_of(rule_of())
    breaker.force("open", 1.0, "ann", 61.0)
    assert breaker.held_until == 61.0 and breaker.retry_at(60.5) == 61.0
    assert isinstance(breaker.acquire(60.9), Denied) and not breaker.can_probe(60.9)
    assert breaker.can_probe(61.0) and permitted(breaker, 61.0).probe
    assert breaker.held_until is None


@pytest.mark.parametrize("state", [CLOSED, OPEN])
def test_hold_leaves_it_as_it_is(state: State) -> None:
    breaker = breaker_of(rule_of(consecutive=2))
    if state is OPEN:
        feed(breaker, [F] * 2)
    assert breaker.force("hold", 3.0, "ann", 100.0) is None
    if state is CLOSED:
        feed(breaker, [F] * 5, 4.0)
    assert breaker.state is state and not breaker.can_probe(99.0)
    assert breaker.held_open == (state is OPEN)
    if state is CLOSED:
        breaker.expire(100.0)
        assert breaker.record(permitted(breaker, 100.0), F, 100.0, "x") is not None
    else:
        assert permitted(breaker, 100.0).probe


def test_holding_one_on_trial_opens_it_and_reset_ends_every_order() -> None:
    breaker, _ = half_open()
    moved = breaker.force("hold", 11.0, "ann")
    assert moved is not None and moved.new is OPEN and breaker.held_until == math.inf
    breaker.force("reset", 12.0, "ann")
    assert breaker.state is CLOSED and breaker.held_until is None


@pytest.mark.parametrize("ends", ["time", "another's record", "another's order", "ours"])
def test_where_the_mode_is_off_an_order_that_is_over_leaves_nothing_open(ends: str) -> None:
    roster = Roster()
    roster.resize(3, 0.34)
    breaker, library = breaker_of(rule_of(mode="off"), roster), Library()
    held_until = 61.0 if ends == "time" else math.inf
    assert breaker.adopt(agreed_on(OPEN, held_until=held_until, by="ann"), library, 1.0) is not None
    assert isinstance(breaker.acquire(60.0), Denied) and breaker.expire(60.0) is None
    match ends:
        case "time":
            assert not permitted(breaker, 61.0).probe and not breaker.can_probe(61.0), "nobody waits for the next tick"
            moved = breaker.expire(61.0)
            assert breaker.expire(62.0) is None
        case "another's record":
            moved = breaker.adopt(agreed_on(HALF_OPEN, version=2), library, 61.0)
        case "another's order":
            moved = breaker.adopt(agreed_on(CLOSED, version=2, by="bob"), library, 61.0)
        case _:
            moved = breaker.force("close", 61.0, "bob")
    assert moved is not None and (moved.old, moved.new) == (OPEN, CLOSED)
    assert (moved.why, moved.agreed) == ("mode_off", False) or ends in ("another's order", "ours")
    assert breaker.passes and breaker.held_until is None and not breaker.shared and not roster.not_closed
    assert record(breaker, F, 62.0) is None and not library.wanted


def test_every_state_reaches_every_other() -> None:
    edges: dict[State, set[State]] = {state: set() for state in State}
    for (old, event), new in TRANSITIONS.items():
        if event not in (Event.ORDERED_OPEN, Event.ORDERED_CLOSED):
            edges[old].add(new)
    assert all(edges.values()), "without an operator"
    for start in State:
        seen, todo = {start}, [start]
        while todo:
            for state in edges[todo.pop()] - seen:
                seen.add(state)
                todo.append(state)
        assert seen == set(State)


class Histories(RuleBasedStateMachine):
    """Any history: permits kept, lost and given back late, clocks that jump, orders and new rules in between."""

    @initialize(
        probes=st.integers(1, 3),
        successes=st.integers(1, 3),
        consecutive=st.integers(1, 3),
        ratio=st.sampled_from([0.0, 0.5]),
        mode=st.sampled_from(["enforce", "enforce", "shadow"]),
    )
    def start(self, probes: int, successes: int, consecutive: int, ratio: float, mode: Mode) -> None:
        self.rule = rule_of(
            probes=probes,
            successes=successes,
            consecutive=consecutive,
            failure_ratio=ratio,
            min_requests=4,
            mode=mode,
        )
        self.roster = Roster()
        self.roster.resize(1, 0.0)
        self.breaker = breaker_of(self.rule, self.roster)
        self.now = self.latest = 0.0
        self.held = False
        self.out: list[Permit] = []
        self.lent_until: dict[int, float] = {}
        self.generation = 0

    @rule(step=st.floats(0, 200))
    def later(self, step: float) -> None:
        self.now += step
        self.latest = max(self.latest, self.now)

    @rule(step=st.floats(0, 20))
    def the_clock_goes_back(self, step: float) -> None:
        self.now -= step

    @rule()
    def acquire(self) -> None:
        breaker, now = self.breaker, self.now
        before, could = breaker.state, breaker.can_probe(now)
        probe_at, passes, denied = breaker.probe_at(now), breaker.passes, breaker.shadow_denied
        assert could == (probe_at <= now)
        answer = breaker.acquire(now)
        if isinstance(answer, Denied):
            assert not passes and not could
            assert answer.retry_at > now
            assert breaker.retry_at(now) > now or self.held
            return
        assert passes or could
        assert answer.generation == breaker.generation
        assert answer.probe == could == (before is not CLOSED and breaker.shadow_denied == denied)
        if answer.probe:
            live = [n for n, until in self.lent_until.items() if until > self.latest]
            assert len(live) < self.rule.probes
            self.lent_until[answer.id] = now + LEASE_S
            assert (answer.moved is not None) == (before is OPEN)
            assert breaker.state is HALF_OPEN
        self.out.append(answer)

    @precondition(lambda self: self.out)
    @rule(data=st.data(), result=st.sampled_from(Result), keep=st.booleans())
    def record(self, data: st.DataObject, result: Result, keep: bool) -> None:
        number = data.draw(st.integers(0, len(self.out) - 1))
        permit = self.out[number] if keep else self.out.pop(number)
        stale = permit.generation != self.breaker.generation
        state, generation = self.breaker.state, self.breaker.generation
        found = self.breaker.record(permit, result, self.now, "x")
        if stale or result not in (S, F):
            assert found is None
        if found is None:
            assert (self.breaker.state, self.breaker.generation) == (state, generation)
        if not stale and permit.probe:
            self.lent_until.pop(permit.id, None)

    @rule(action=st.sampled_from(["open", "close", "reset"]))
    def force(self, action: Action) -> None:
        self.breaker.force(action, self.now, "ann")
        self.held = action == "open"
        assert self.breaker.state is (OPEN if self.held else CLOSED)

    @rule(probes=st.integers(1, 3), open_max=st.floats(1, 100), mode=st.sampled_from(["enforce", "shadow", "off"]))
    def new_rule(self, probes: int, open_max: float, mode: Mode) -> None:
        self.rule = msgspec.structs.replace(self.rule, probes=probes, open_max_s=Seconds(open_max), mode=mode)
        self.breaker.use_rule(self.rule, self.now, lease_s=LEASE_S)

    @invariant()
    def sane(self) -> None:
        if not hasattr(self, "breaker"):
            return
        breaker = self.breaker
        if breaker.generation != self.generation:
            assert breaker.generation > self.generation
            self.generation = breaker.generation
            self.lent_until = {
                permit.id: self.lent_until[permit.id]
                for permit in self.out
                if permit.probe and permit.generation == breaker.generation
            }
        assert (breaker.state is not CLOSED) == (breaker.key in self.roster.not_closed)
        assert breaker.passes == (breaker.state is CLOSED or (self.rule.mode != "enforce" and not self.held))
        if self.rule.mode == "off" and not self.held:
            assert breaker.state is CLOSED

    def teardown(self) -> None:
        """Whatever happened, waiting and success close it again."""
        if not hasattr(self, "breaker"):
            return
        if self.held:
            self.breaker.force("close", self.now, "ann")
        now = max(self.now, self.latest)
        for _ in range(self.rule.successes + 1):
            now = max(now, self.breaker.probe_at(now)) if self.breaker.state is not CLOSED else now
            permit = permitted(self.breaker, now)
            self.breaker.record(permit, S, now, "x")
        assert self.breaker.state is CLOSED


Histories.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestHistories = Histories.TestCase
