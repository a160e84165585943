"""The detector's laws: what opens an endpoint and how soon, what never does, and that no history breaks it."""

import math
import re
from math import exp, inf, isfinite, nan

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sidecar.core import evidence
from sidecar.core.breaker import Permit, State
from sidecar.core.detection import (
    MAX_LINES,
    MOST_PROOFS,
    Detection,
)
from sidecar.core.detector import REMEMBERED, SESSION_CHARGES, SESSION_S, Detector, Expectation
from sidecar.core.latency import BLOCK_SAMPLES, FIRST_PER_S, seconds_of
from sidecar.core.normal import MOST_BACKGROUND, MOST_COMMON, MOST_OFFSET, SPAN_S
from sidecar.kernel.ids import EndpointKey
from sidecar.kernel.outcome import Ending, Result
from sidecar.policy.schema import Adaptive
from tests.core.build import snapshot_of
from tests.core.detect import RATE, WELL, Answer, Pods, absorb, only, seen, usual_s

CLOSED, OPEN, HALF_OPEN = State.CLOSED, State.OPEN, State.HALF_OPEN
ODD = [nan, inf, -inf, 0.0, -1.0, 1e-9, 1e9, 1e308]

FAILS = Answer(failing=1.0)


# --- what opens, and how soon ---------------------------------------------------------------------------------------


def test_three_failures_in_a_row_open_and_two_do_not() -> None:
    pods = Pods(3).learnt()
    for _ in range(2):
        pods.fail()
    assert pods.state() is CLOSED
    pods.fail()
    assert pods.state() is OPEN
    [opened] = pods.opened(0)
    assert opened.why == "fast"
    assert opened.evidence.startswith("3 of 3 answers bad in 0.0 s (3 failed)")


@pytest.mark.parametrize(
    ("answer", "within_s"),
    [
        pytest.param(Answer(failing=1.0), 1.0, id="all fail"),
        pytest.param(Answer(failing=0.3), 6.0, id="30 % fail"),
        pytest.param(Answer(failing=0.1), 20.0, id="10 % fail"),
        pytest.param(Answer(failing=0.05), 60.0, id="5 % fail: gray"),
        pytest.param(Answer(slower=10.0), 3.0, id="ten times slower"),
        pytest.param(Answer(slower=3.0), 5.0, id="three times slower"),
    ],
)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_faulty_endpoint_opens_soon_and_nobody_else(answer: Answer, within_s: float, seed: int) -> None:
    pods = Pods(6, seed=seed).learnt()
    assert pods.until_open(only(0, answer), 60) <= within_s
    assert not [move for move in pods.opened() if move.key != pods.nodes[0].key]


def test_half_of_an_endpoints_answers_being_late_opens_it() -> None:
    pods = Pods(3).learnt()
    for _ in range(5):
        slow = [pods.chance.random() < 0.5 for _ in range(RATE)]
        pods.second(lambda pod, slow=slow: Answer(slower=20.0 if pod == 0 and slow.pop() else 1.0))  # type: ignore[misc]
        if pods.opened(0):
            break
    assert pods.opened(0)


def test_what_is_late_counts_before_it_ends() -> None:
    """An engine that hangs ends nothing."""
    pods = Pods(3).learnt()
    out = [asked for _ in range(5) if (asked := pods.ask(0)) is not None]
    assert len(out) == 5 and all(expectation.late_s < 10.0 for _, expectation in out)
    pods.now += out[0][1].late_s
    for _, expectation in out:
        pods.late(0, expectation)
        pods.now += SPAN_S / 2
    [opened] = pods.opened(0)
    assert "late" in opened.evidence
    for permit, expectation in out:
        pods.first_token(0, expectation, 30.0)
        pods.end(0, permit, expectation)
    assert pods.state() is OPEN and len(pods.opened()) == 1


def test_silence_within_streams_opens() -> None:
    pods = Pods(3).learnt()
    for _ in range(6):
        asked = pods.ask(0)
        if asked is None:
            break
        pods.first_token(0, asked[1], usual_s())
        pods.now += asked[1].late_gap_s
        pods.late(0, asked[1], silent=True)
        pods.end(0, *asked, Ending.TOKEN_GAP_TIMEOUT)
    [opened] = pods.opened(0)
    assert "silent" in opened.evidence


def test_lateness_counts_once_whatever_comes_after() -> None:
    pods = Pods(3).learnt()
    asked = pods.ask(0)
    assert asked is not None
    permit, expectation = asked
    pods.now += expectation.late_s
    for _ in range(10):
        pods.late(0, expectation)
        pods.late(0, expectation, silent=True)
    bad, location = pods.detector().bad, pods.detector().location
    assert bad == 1
    pods.first_token(0, expectation, 100.0)
    assert pods.detector().location == location
    pods.end(0, permit, expectation, Ending.TTFT_TIMEOUT)
    assert pods.detector().bad == 1 and pods.state() is CLOSED


def test_a_client_that_leaves_takes_no_lateness_back() -> None:
    pods = Pods(3).learnt()
    out = [asked for _ in range(6) if (asked := pods.ask(0)) is not None]
    pods.now += out[0][1].late_s
    for permit, expectation in out:
        pods.late(0, expectation)
        pods.end(0, permit, expectation, Ending.CLIENT_LEFT)
        pods.now += SPAN_S / 2
    assert pods.opened(0)


def test_a_hiccup_of_less_than_a_second_is_one_event() -> None:
    pods = Pods(3).learnt()
    out = [asked for _ in range(40) if (asked := pods.ask(0)) is not None]
    pods.now += out[0][1].late_s
    for _, expectation in out:
        pods.late(0, expectation)
        pods.now += 0.5 * SPAN_S / len(out)
    for permit, expectation in out:
        pods.first_token(0, expectation, out[0][1].late_s + 0.5)
        pods.end(0, permit, expectation)
    assert not pods.opened()


@pytest.mark.parametrize(
    ("statistics", "answer"),
    [
        pytest.param(("fast",), Answer(failing=1.0), id="fast"),
        pytest.param(("gray",), Answer(failing=0.05), id="gray"),
        pytest.param(("location",), Answer(slower=2.5), id="location"),
    ],
)
def test_each_statistic_opens_by_itself_and_none_opens_without(statistics: tuple[str, ...], answer: Answer) -> None:
    rule = msgspec.convert({"statistics": statistics}, Adaptive)
    pods = Pods(3, rule).learnt()
    pods.until_open(only(0, answer), 60)
    assert {move.why for move in pods.opened()} == set(statistics)
    without = Pods(3, Adaptive(statistics=())).learnt()
    without.seconds(20, only(0, answer))
    assert not without.opened()


def test_rare_requests_are_enough_to_be_sure() -> None:
    """One in two seconds and endpoint: what fails is found in as many answers, if not in as many seconds."""
    pods = Pods(3)
    pods.seconds(300, rate=1)
    assert pods.detection.ready
    asked = 0
    while pods.state() is CLOSED and asked < 6:
        pods.now += 2.0
        pods.fail()
        pods.tick()
        asked += 1
    assert pods.state() is OPEN and asked <= 4


# --- what never opens -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize("seed", [1, 2])
def test_healthy_endpoints_stay_closed(count: int, seed: int) -> None:
    pods = Pods(count, seed=seed)
    pods.seconds(120)
    assert not pods.opened(), [move.evidence for move in pods.opened()]


def test_usual_failures_are_usual() -> None:
    pods = Pods(6)
    pods.seconds(120, lambda pod: Answer(failing=0.003))
    assert not pods.opened(), [move.evidence for move in pods.opened()]


def test_long_prompts_are_no_fault() -> None:
    pods = Pods(3).learnt()
    for _ in range(20):
        for _ in range(RATE):
            pods.now += 1.0 / RATE
            for pod in range(3):
                pods.serve(pod, size_bytes=20_000 if pod == 0 else 2000)
        pods.tick()
    assert not pods.opened()


def test_while_it_learns_the_fixed_rules_serve() -> None:
    pods = Pods(3, consecutive=5)
    for _ in range(4):
        pods.fail()
    assert not pods.detection.ready and pods.state() is CLOSED
    asked = pods.ask(1)
    assert asked is not None and (asked[1].late_s, asked[1].late_gap_s) == (inf, inf)
    pods.fail()
    [opened] = pods.opened()
    assert opened.why == "consecutive"


def test_ready_after_so_many_answers_and_not_before() -> None:
    pods = Pods(2, Adaptive(min_samples=50))
    for number in range(50):
        assert not pods.detection.ready, number
        pods.serve(number % 2)
    assert pods.detection.ready


def test_the_fixed_rules_serve_beside_it() -> None:
    pods = Pods(3, Adaptive(statistics=()), consecutive=5).learnt()
    for _ in range(5):
        pods.fail()
    [opened] = pods.opened()
    assert opened.why == "consecutive"


def test_a_lone_endpoint_never_opens_for_slowness() -> None:
    pods = Pods(1).learnt()
    pods.seconds(30, only(0, Answer(slower=30.0)))
    assert not pods.opened(), [move.evidence for move in pods.opened()]


def test_but_for_failures() -> None:
    pods = Pods(1).learnt()
    assert pods.until_open(only(0, FAILS), 10) <= 3.0


def test_the_floor_holds() -> None:
    pods = Pods(3, floor=0.34).learnt()
    pods.seconds(30, lambda pod: FAILS if pod else WELL)
    assert sum(pods.state(pod) is CLOSED for pod in range(3)) >= 1
    assert pods.state(0) is CLOSED


@pytest.mark.parametrize("ending", [Ending.CLIENT_LEFT, Ending.CLIENT_ERROR, Ending.OVERLOADED])
def test_what_is_no_evidence_changes_nothing(ending: Ending) -> None:
    pods = Pods(3).learnt()
    before = _numbers(pods.detector())
    for _ in range(100):
        pods.fail(0, ending)
    assert _numbers(pods.detector()) == before and not pods.opened()


# --- sessions -------------------------------------------------------------------------------------------------------


def test_one_session_opens_nothing() -> None:
    """Poison goes from endpoint to endpoint: each is charged a little, none is taken."""
    pods = Pods(3).learnt()
    for second in range(60):
        pods.second()
        pods.fail(second % 3, session="s")
    assert not pods.opened()


def test_a_session_charges_so_often_in_so_long() -> None:
    pods = Pods(3).learnt()
    for _ in range(10):
        pods.fail(session="s")
    assert pods.detector().bad == SESSION_CHARGES and pods.state() is CLOSED
    pods.now += SESSION_S
    pods.fail(session="s")
    assert len(pods.detector().bad_at) == SESSION_CHARGES + 1


@pytest.mark.parametrize("sessions", [[None] * 3, ["a", "b", "c"]], ids=["none known", "three of them"])
def test_many_sessions_or_none_charge_in_full(sessions: list[str | None]) -> None:
    pods = Pods(3).learnt()
    for session in sessions:
        pods.fail(session=session)
    assert pods.state() is OPEN


def test_a_broken_connection_is_not_the_sessions_doing() -> None:
    pods = Pods(3).learnt()
    for _ in range(3):
        pods.fail(0, Ending.CONNECT_FAILED, session="s")
    assert pods.state() is OPEN


# --- censored -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [Ending.HEAD_TIMEOUT, Ending.TTFT_TIMEOUT, Ending.TOTAL_TIMEOUT, Ending.CLIENT_LEFT])
def test_what_was_cut_is_no_latency(ending: Ending) -> None:
    pods = Pods(3).learnt()
    asked = pods.ask(0)
    assert asked is not None
    permit, expectation = asked
    line = expectation.line
    assert line is not None
    before = (len(line.pending), line.learnt, pods.detector().left_n)
    pods.now += expectation.late_s
    pods.late(0, expectation)
    pods.now += 30.0
    pods.end(0, permit, expectation, ending)
    assert (len(line.pending), line.learnt, pods.detector().left_n) == before


def test_a_line_learns_no_faster_than_it_can() -> None:
    pods = Pods(3).learnt()
    asked = pods.ask(0)
    assert asked is not None and asked[1].line is not None
    for _ in range(1000):
        pods.serve()
    assert len(asked[1].line.pending) <= FIRST_PER_S


# --- recovery -------------------------------------------------------------------------------------------------------


def opened(answer: Answer, seed: int = 1) -> Pods:
    pods = Pods(4, seed=seed).learnt()
    pods.until_open(only(0, answer), 60)
    return pods


@pytest.mark.parametrize(
    "answer",
    [FAILS, Answer(failing=0.3), Answer(failing=0.05), Answer(slower=4.0)],
    ids=["all failed", "30 % failed", "gray", "slow"],
)
def test_what_is_well_again_closes_soon_and_stays_closed(answer: Answer) -> None:
    pods = opened(answer)
    pods.seconds(60)
    assert pods.state() is CLOSED
    assert len(pods.opened(0)) == 1


def test_what_is_still_slow_stays_open() -> None:
    pods = opened(Answer(slower=4.0))
    for _ in range(60):
        pods.second(only(0, Answer(slower=4.0)))
        assert pods.state() is not CLOSED


def test_what_still_fails_stays_open() -> None:
    pods = opened(FAILS)
    for _ in range(60):
        pods.second(only(0, FAILS))
        assert pods.state() is not CLOSED


def test_a_late_probe_reopens() -> None:
    pods = opened(FAILS)
    pods.now = pods.nodes[0].breaker.retry_at(pods.now)
    asked = pods.ask(0)
    assert asked is not None and asked[0].probe
    pods.now += 20.0
    pods.late(0, asked[1])
    assert pods.state() is OPEN and pods.moved[-1].why == "probe_failed"
    generation = pods.nodes[0].breaker.generation
    pods.first_token(0, asked[1], 20.0)
    pods.end(0, *asked)
    assert pods.nodes[0].breaker.generation == generation, "the probe was judged before"


def test_a_probe_whose_first_token_was_too_late_reopens_though_it_succeeded() -> None:
    pods = opened(FAILS)
    pods.now = pods.nodes[0].breaker.retry_at(pods.now)
    asked = pods.ask(0)
    assert asked is not None
    pods.now += 20.0
    pods.first_token(0, asked[1], 20.0)
    pods.end(0, *asked)
    assert pods.moved[-1].why == "probe_failed" and "late" in pods.moved[-1].evidence


def test_after_slowness_probes_must_lean_to_well_together() -> None:
    pods = opened(Answer(slower=4.0))
    detector = pods.detector()
    assert pods.opened(0)[0].why == "location"
    pods.now = pods.nodes[0].breaker.retry_at(pods.now)
    asked = pods.ask(0)
    assert asked is not None
    permit, expectation = asked
    for trial, proved in ((-1.0, Result.SUCCESS), (1.0, Result.IGNORED), (100.0, Result.FAILURE)):
        detector.trial = trial
        assert pods.detection.verdict(expectation, Result.SUCCESS, pods.now) is proved
        assert pods.detection.verdict(expectation, Result.FAILURE, pods.now) is Result.FAILURE
        assert pods.detection.verdict(expectation, Result.IGNORED, pods.now) is Result.IGNORED
    pods.end(0, permit, expectation)


def test_a_relapse_is_found_sooner() -> None:
    pods = opened(FAILS)
    while pods.state() is not CLOSED:
        pods.second()
    detector = pods.detector()
    pods.serve()
    assert 0.0 < detector.fast < pods.detection.threshold
    pods.fail()
    pods.fail()
    first = pods.state()
    pods.fail()
    assert pods.state() is OPEN and first in (CLOSED, OPEN)


def test_a_relapse_is_told_from_its_own_beginning_and_a_hiccup_is_none() -> None:
    pods = opened(FAILS)
    while pods.state() is not CLOSED:
        pods.second()
    out = [asked for _ in range(20) if (asked := pods.ask(0)) is not None]
    pods.now += out[0][1].late_s
    for _, expectation in out:
        pods.late(0, expectation)
    assert pods.state() is CLOSED, "all at once"
    for permit, expectation in out:
        pods.first_token(0, expectation, out[0][1].late_s + 0.1)
        pods.end(0, permit, expectation)
    pods.now += 2 * SPAN_S
    for _ in range(3):
        pods.fail()
    assert pods.state() is OPEN
    said = re.search(r"bad in ([0-9.]+) s", pods.opened(0)[-1].evidence)
    assert said is not None and float(said[1]) == pytest.approx(2 * SPAN_S, abs=0.1)


def test_evidence_of_an_older_generation_is_dropped() -> None:
    pods = Pods(3).learnt()
    out = [asked for _ in range(8) if (asked := pods.ask(0)) is not None]
    pods.tell(pods.nodes[0].breaker.force("open", pods.now, "ann"))
    pods.tell(pods.nodes[0].breaker.force("close", pods.now, "ann"))
    pods.serve()
    detector = pods.detector()
    before = _numbers(detector)
    for number, (permit, expectation) in enumerate(out):
        pods.now += 5.0
        pods.late(0, expectation, silent=number % 2 == 0)
        pods.first_token(0, expectation, 100.0)
        pods.end(0, permit, expectation, Ending.SERVER_ERROR)
    assert _numbers(detector) == before and pods.state() is CLOSED


# --- several sidecars -----------------------------------------------------------------------------------------------


def eight(answer: Answer, seconds: int, sidecars: int = 8) -> tuple[list[Pods], Pods]:
    """Sidecars that each see a part of the traffic and tell each other, beside one that sees all of it."""
    parts = [Pods(3, seed=1) for _ in range(sidecars)]
    whole = Pods(3, seed=1)
    for pods in [*parts, whole]:
        pods.learnt(40)
    for each in parts:
        each.detection.share()
    for _ in range(seconds):
        for number in range(sidecars * 2):
            mine = parts[number % sidecars]
            for pods in (mine, whole):
                pods.now += 0.5 if pods is mine else 0.5 / sidecars
            for pod in range(3):
                failing = pod == 0 and answer.failing > 0 and mine.chance.random() < answer.failing
                for pods in (mine, whole):
                    if failing:
                        pods.fail(pod)
                    else:
                        pods.serve(pod, answer.slower if pod == 0 else 1.0)
        for pods in [*parts, whole]:
            pods.now = whole.now
        for sender in parts:
            for counts in sender.detection.share():
                pod = [node.key for node in sender.nodes].index(counts.endpoint)
                for taker in parts:
                    if taker is not sender:
                        absorb(taker, counts, pod)
        for pods in [*parts, whole]:
            pods.tick()
    return parts, whole


def test_eight_that_tell_each_other_find_what_none_of_them_sees_alone() -> None:
    parts, whole = eight(Answer(failing=1.0), 2)
    assert whole.opened(0)
    for pods in parts:
        assert [move.key for move in pods.opened()] == [pods.nodes[0].key]


def test_what_others_saw_adds_up_to_what_one_would_have_seen() -> None:
    pods, whole = Pods(3).learnt(), Pods(3).learnt()
    for _ in range(2):
        whole.fail(0)
    for _ in range(30):
        whole.serve(0)
    absorb(pods, seen(EndpointKey(pods.nodes[0].key), 0, 2, 0.0))
    absorb(pods, seen(EndpointKey(pods.nodes[0].key), 30, 0, 0.0))
    mine, theirs = pods.detector(), whole.detector()
    for name in ("fast", "gray", "bad", "recent_n", "recent_bad", "panic_n", "panic_bad"):
        assert getattr(mine, name) == pytest.approx(getattr(theirs, name), abs=1e-9), name


@pytest.mark.parametrize("location", [inf, 1e308, 1e3, -inf, nan])
def test_what_others_say_is_bounded(location: float) -> None:
    pods = Pods(3).learnt()
    absorb(pods, seen(EndpointKey(pods.nodes[0].key), 0, 0, location))
    assert 0.0 <= pods.detector().location <= 2.0 * pods.detection.rule.location_trip
    pods.seconds(20)
    assert pods.state() is CLOSED and len(pods.opened()) <= 1


def test_what_is_shared_is_shared_once_and_is_all_of_it() -> None:
    pods = Pods(3).learnt()
    pods.detection.share()
    for _ in range(5):
        pods.serve(0)
    pods.fail(0)
    pods.fail(0, session="s")
    [counts] = pods.detection.share()
    assert (counts.endpoint, counts.good, counts.errors + counts.slow) == (pods.nodes[0].key, 5, 2)
    assert isfinite(counts.location)
    assert pods.detection.share() == []


def test_what_one_session_did_is_not_shared() -> None:
    pods = Pods(3).learnt()
    pods.detection.share()
    for _ in range(20):
        pods.fail(0, session="s")
    [counts] = pods.detection.share()
    assert counts.errors + counts.slow == SESSION_CHARGES


def test_an_open_endpoint_takes_nothing_in() -> None:
    pods = opened(FAILS)
    before = _numbers(pods.detector())
    absorb(pods, seen(EndpointKey(pods.nodes[0].key), 100, 100, 100.0))
    assert _numbers(pods.detector()) == before


# --- what is granted at less load -----------------------------------------------------------------------------------

MANY, FEW = 80, 8


def unmoved(pods: Pods, slower: float = 1.0) -> Answer:
    """How the second endpoint answers that takes what it takes, whatever its load: as the others with `MANY`."""
    return Answer(slower=slower * (1.0 + MANY / 20.0) / (1.0 + pods.nodes[1].in_flight / 20.0))


def used_to_many(count: int = 2) -> Pods:
    """The others are slower the more they have, which all have learnt; the second has `MANY`, and they have not."""
    pods = Pods(count, seed=4)
    for _ in range(150):
        for pod, node in enumerate(pods.nodes):
            node.in_flight = pods.chance.randrange(MANY - 10, MANY + 11) if pod == 1 else pods.chance.randrange(5, 31)
        pods.second(lambda pod: unmoved(pods) if pod == 1 else WELL)
    assert pods.detection.ready and not pods.opened(), pods.opened()
    for node in pods.nodes:
        node.in_flight = FEW
    pods.second(lambda pod: unmoved(pods) if pod == 1 else WELL, 1)
    return pods


@pytest.mark.parametrize("count", [2, 3])
def test_who_takes_no_less_for_having_less_to_do_is_not_at_fault(count: int) -> None:
    pods = used_to_many(count)
    permit, expectation = pods.ask(1) or (None, None)
    assert permit is not None and expectation is not None
    assert expectation.granted > expectation.expected + 0.5
    pods.end(1, permit, expectation)
    for _ in range(900):
        pods.second(lambda pod: unmoved(pods) if pod == 1 else WELL, 5)
    assert not pods.opened(), pods.opened()
    assert pods.detector(1).usual_load < 2 * FEW, "by now it is known what it takes with few"


def test_who_gets_slower_with_less_to_do_is() -> None:
    pods = used_to_many()
    assert pods.until_open(lambda pod: unmoved(pods, 10.0) if pod == 1 else WELL, 60, pod=1) < 10.0


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_who_alone_has_less_to_do_because_it_is_slow_is_granted_nothing(seed: int) -> None:
    """A balancer sends it less: what it takes then is not more than it took with as much as the others."""
    pods, often = Pods(9, seed=seed), 40
    for loads in ([often] * 9, [often + 2, often // 2] + [often + 2] * 7):
        for _ in range(120 if loads[1] == often else 1):
            for node, load in zip(pods.nodes, loads, strict=True):
                node.in_flight = pods.chance.randrange(load - 6, load + 7)
            pods.second(lambda pod: WELL)
    assert not pods.opened(), pods.opened()
    _, expectation = pods.ask(1) or (None, None)
    assert expectation is not None and pods.detector(1).usual_load > 30
    assert expectation.granted == pytest.approx(expectation.expected, abs=0.05)
    assert pods.until_open(lambda pod: Answer(slower=2.0) if pod == 1 else WELL, 30, pod=1) < 10.0


def test_a_probe_is_held_against_what_is_expected_of_who_has_nothing_to_do() -> None:
    pods = used_to_many()
    for _ in range(5):
        pods.fail(1)
    assert pods.state(1) is OPEN
    pods.now += 11.0
    permit, expectation = pods.ask(1) or (None, None)
    assert permit is not None and permit.probe and expectation is not None
    assert pods.detector(1).usual_load > MANY / 2 and expectation.granted == expectation.expected


# --- a new policy ---------------------------------------------------------------------------------------------------


def reload(pods: Pods, adaptive: Adaptive | bool, version: str = "v1", count: int | None = None) -> None:
    old = pods.service.policy
    endpoints = tuple(msgspec.structs.replace(each, version=version) for each in old.endpoints[:count])
    breakers = msgspec.structs.replace(old.breakers, node=msgspec.structs.replace(pods.rule, adaptive=adaptive))
    pods.moved.extend(
        pods.fleet.apply(snapshot_of(msgspec.structs.replace(old, endpoints=endpoints, breakers=breakers)), pods.now)
    )


def test_new_numbers_keep_what_was_learnt() -> None:
    pods = Pods(3).learnt()
    detection, detector = pods.detection, pods.detector()
    expected = pods.ask(0)
    reload(pods, Adaptive(false_alarm=1e-3, min_samples=100))
    assert pods.detection is detection and pods.detector() is detector and detection.ready
    assert detection.threshold == pytest.approx(-math.log(1e-3))
    after = pods.ask(0)
    assert expected is not None and after is not None
    assert after[1].expected == expected[1].expected and after[1].late_s < inf
    for _ in range(3):
        pods.fail()
    assert pods.state() is OPEN


def test_switched_off_it_is_forgotten_and_attempts_under_way_end_well() -> None:
    pods = Pods(3).learnt()
    asked = pods.ask(0)
    assert asked is not None
    reload(pods, False)
    assert pods.service.detection is None and pods.nodes[0].detector is None
    pods.first_token(0, asked[1], 1.0)
    pods.late(0, asked[1])
    pods.end(0, *asked, Ending.SERVER_ERROR)
    assert not pods.opened()
    reload(pods, True)
    assert not pods.detection.ready


def test_an_endpoint_of_another_version_is_another_endpoint() -> None:
    pods = Pods(3).learnt()
    for _ in range(2):
        pods.fail()
    detector = pods.detector()
    out = [asked for _ in range(5) if (asked := pods.ask(0)) is not None]
    reload(pods, True, "v2")
    assert pods.detector() is not detector and pods.detector().fast == 0.0
    for permit, expectation in out:
        pods.late(0, expectation)
        pods.first_token(0, expectation, 60.0)
        pods.end(0, permit, expectation, Ending.SERVER_ERROR)
    assert pods.state() is CLOSED and pods.detection.active == []
    after = pods.ask(0)
    assert after is not None and after[1].late_s == inf, "its line is a new one"


def test_endpoints_that_left_are_forgotten_and_what_is_under_way_ends_well() -> None:
    pods = Pods(6).learnt()
    gone, node = pods.detector(5), pods.nodes[5]
    permit, expectation = pods.ask(5) or (None, None)
    assert permit is not None and expectation is not None
    reload(pods, True, count=2)
    assert evidence.first_token(pods.service, node, expectation, 60.0, pods.now) is None
    ended = (expectation, Ending.SERVER_ERROR, Result.FAILURE, 0.0, pods.now)
    assert evidence.ended(pods.service, node, permit, *ended) is None
    pods.tick()
    assert gone not in pods.detection.active and pods.detection.size == 2


# --- what is kept ---------------------------------------------------------------------------------------------------


def test_names_that_clients_make_up_take_no_memory() -> None:
    pods = Pods(2)
    for number in range(3 * MAX_LINES):
        asked = pods.ask(0, model=f"model-{number}")
        assert asked is not None
        pods.first_token(0, asked[1], 0.2)
        pods.end(0, *asked)
    asked = pods.ask(0, model="x" * 10_000)
    assert asked is not None
    pods.first_token(0, asked[1], 0.2)
    assert len(_lines(pods.detection)) <= MAX_LINES
    assert not [name for name, _ in _lines(pods.detection) if len(name) > 256]


def test_each_model_has_a_line_of_its_own() -> None:
    pods = Pods(2)
    for _ in range(60):
        for _ in range(RATE):
            pods.now += 1.0 / RATE
            for model, took_s in (("small", 0.1), ("large", 2.0)):
                for pod in range(2):
                    asked = pods.ask(pod, model=model)
                    assert asked is not None
                    pods.first_token(pod, asked[1], took_s * exp(0.1 * pods.chance.gauss(0.0, 1.0)))
                    pods.end(pod, *asked)
        pods.tick()
    small, large = pods.ask(0, model="small"), pods.ask(0, model="large")
    assert small is not None and large is not None
    assert exp(small[1].expected) == pytest.approx(0.1, rel=0.2)
    assert exp(large[1].expected) == pytest.approx(2.0, rel=0.2)
    assert not pods.opened()


def test_quiet_endpoints_are_not_looked_at_until_they_are_heard_of() -> None:
    pods = Pods(3).learnt()
    pods.detection.share()
    for _ in range(300):
        pods.now += 1.0
        pods.serve(0)
        pods.detection.share()
        pods.tick()
    assert pods.detection.active == [pods.detector(0)]
    pods.serve(2)
    assert pods.detector(2) in pods.detection.active


# --- any history ----------------------------------------------------------------------------------------------------


def _lines(detection: Detection) -> dict[tuple[str, str], object]:
    lines: dict[tuple[str, str], object] = detection._lines  # type: ignore[assignment]
    return lines


def _numbers(detector: Detector) -> tuple[float, ...]:
    return (
        detector.fast,
        detector.gray,
        detector.location,
        detector.n,
        detector.bad,
        detector.errors,
        detector.late,
        detector.gaps,
        len(detector.bad_at),
    )


def check(pods: Pods) -> None:
    """What holds at any time."""
    detection = pods.detection
    rule, threshold = detection.rule, detection.threshold
    normal = detection.normal
    for pod in range(len(pods.nodes)):
        detector = pods.detector(pod)
        assert 0.0 <= detector.fast <= 2.0 * threshold + 1e-9
        assert 0.0 <= detector.gray <= 2.0 * threshold + 1e-9
        assert 0.0 <= detector.location <= 2.0 * rule.location_trip
        assert abs(detector.offset) <= MOST_OFFSET + 2.0
        assert detector.n >= 0 and 0 <= detector.bad <= detector.n
        for number in (detector.trial, detector.left_sum, detector.common_sum, detector.location_sum):
            assert isfinite(number)
        for number in (detector.recent_n, detector.recent_bad, detector.panic_n, detector.panic_bad):
            assert isfinite(number) and number >= 0.0
        assert detector.recent_bad <= detector.recent_n + 1e-6
        assert len(detector.bad_at) == len(detector.bad_by) <= REMEMBERED
    assert abs(normal.common) <= MOST_COMMON
    assert rule.background <= normal.background <= MOST_BACKGROUND
    assert normal.bad_fast > 0.0 > normal.good_fast and normal.bad_gray > 0.0 > normal.good_gray
    assert normal.load_cap >= 4.0
    assert len(detection.active) <= len(pods.nodes)
    assert len(_lines(detection)) <= MAX_LINES
    for line in detection._lines.values():
        assert len(line.pending) <= FIRST_PER_S and len(line._block) <= BLOCK_SAMPLES + FIRST_PER_S
    for move in pods.moved:
        assert len(move.evidence) < 300
        assert not re.search(r"\b(nan|inf)\b", move.evidence), move.evidence


WORDS = ("fast", "gray", "waited", "probe_failed", "proved", "panic", "operator", "mode_off", "floor", "capacity")
SECONDS = st.one_of(st.sampled_from(ODD), st.floats(0.01, 20.0))
COUNTS = st.one_of(st.just(0), st.integers(0, 5), st.just(10**9))


class Histories(RuleBasedStateMachine):
    """Attempts whose words come in any order, twice or never; clocks that jump; orders, reloads and other sidecars."""

    @initialize(
        count=st.integers(1, 3),
        warm=st.booleans(),
        floor=st.sampled_from([0.0, 0.34]),
        in_flight=st.booleans(),
        guards=st.booleans(),
        seed=st.integers(0, 3),
    )
    def start(self, count: int, warm: bool, floor: float, in_flight: bool, guards: bool, seed: int) -> None:
        rule = Adaptive(min_samples=30, in_flight=in_flight, guards=guards)
        self.pods = Pods(count, rule, floor=floor, seed=seed)
        self.out: list[tuple[int, Permit, Expectation]] = []
        self.seen = 0
        self.bad: dict[str, int] = {}
        self.held = False
        if warm:
            self.pods.seconds(10)

    @property
    def busy(self) -> bool:
        return bool(self.out)

    def choose(self, data: st.DataObject) -> tuple[int, Permit, Expectation]:
        return self.out[data.draw(st.integers(0, len(self.out) - 1))]

    def judge(self, pod: int) -> None:
        """What opened, opened on evidence."""
        pods = self.pods
        for move in pods.moved[self.seen :]:
            if move.new is OPEN and move.old is CLOSED and move.why in ("fast", "gray"):
                assert self.bad.get(move.key, 0) >= pods.detection.rule.min_bad, move
            elif move.new is OPEN and move.why == "location":
                assert pods.detector(pod).location >= pods.detection.rule.location_trip, move
            else:
                assert move.why in WORDS, move
            if move.new is not HALF_OPEN:
                self.bad[move.key] = 0
        self.seen = len(pods.moved)

    def count_bad(self, pod: int, times: int = 1) -> None:
        key = self.pods.nodes[pod].key
        self.bad[key] = self.bad.get(key, 0) + times

    @rule(
        data=st.data(),
        size=st.one_of(st.sampled_from([0, 1, 2**40]), st.integers(0, 10**6)),
        load=st.one_of(st.sampled_from([0, 10**6]), st.integers(0, 50)),
        session=st.sampled_from([None, "a", "b"]),
        model=st.sampled_from(["m", "m", "other", ""]),
    )
    def ask(self, data: st.DataObject, size: int, load: int, session: str | None, model: str) -> None:
        pod = data.draw(st.integers(0, len(self.pods.nodes) - 1))
        self.pods.nodes[pod].in_flight = load
        asked = self.pods.ask(pod, size_bytes=size, session=session, model=model)
        if asked is not None:
            permit, expectation = asked
            assert expectation.late_s > 0.0 and expectation.late_gap_s > 0.0
            assert isfinite(expectation.expected)
            self.out.append((pod, permit, expectation))

    @precondition(lambda self: self.busy)
    @rule(data=st.data(), took_s=SECONDS)
    def first_token(self, data: st.DataObject, took_s: float) -> None:
        pod, _, expectation = self.choose(data)
        before = expectation.bad
        self.pods.first_token(pod, expectation, took_s)
        self.count_bad(pod, int(expectation.bad and not before))
        self.judge(pod)

    @precondition(lambda self: self.busy)
    @rule(data=st.data(), silent=st.booleans())
    def late(self, data: st.DataObject, silent: bool) -> None:
        pod, _, expectation = self.choose(data)
        before = expectation.bad
        self.count_bad(pod, int(not before))
        self.pods.late(pod, expectation, silent=silent)
        self.judge(pod)

    @precondition(lambda self: self.busy)
    @rule(data=st.data(), ending=st.sampled_from(Ending), gap_s=SECONDS, keep=st.booleans())
    def end(self, data: st.DataObject, ending: Ending, gap_s: float, keep: bool) -> None:
        chosen = self.choose(data)
        pod, permit, expectation = chosen
        if not keep:
            self.out.remove(chosen)
        generation, stale = self.pods.nodes[pod].breaker.generation, False
        stale = permit.generation != generation
        before = _numbers(self.pods.detector(pod))
        self.count_bad(pod)
        self.pods.end(pod, permit, expectation, ending, gap_s)
        if stale:
            assert self.pods.nodes[pod].breaker.generation == generation
            assert _numbers(self.pods.detector(pod)) == before
        self.judge(pod)

    @rule(data=st.data(), good=COUNTS, bad=COUNTS, location=st.one_of(st.sampled_from(ODD), st.floats(-50, 50)))
    def absorb(self, data: st.DataObject, good: int, bad: int, location: float) -> None:
        pod = data.draw(st.integers(0, len(self.pods.nodes) - 1))
        self.count_bad(pod, bad)
        absorb(self.pods, seen(EndpointKey(self.pods.nodes[pod].key), good, bad, location), pod)
        self.judge(pod)

    @rule()
    def share(self) -> None:
        for counts in self.pods.detection.share():
            assert counts.good >= 0 and counts.errors + counts.slow >= 0 and isfinite(counts.location)

    @rule(seconds=st.one_of(st.floats(0, 5), st.sampled_from([3600.0, 86_400.0])))
    def later(self, seconds: float) -> None:
        self.pods.now += seconds

    @rule(seconds=st.one_of(st.floats(0, 5), st.sampled_from([3600.0, 86_400.0])))
    def the_clock_goes_back(self, seconds: float) -> None:
        self.pods.now -= seconds

    @rule()
    def tick(self) -> None:
        self.pods.tick()
        self.judge(0)

    @rule(seconds=st.integers(1, 3), failing=st.sampled_from([0.0, 0.3, 1.0]), slower=st.sampled_from([1.0, 4.0]))
    def traffic(self, seconds: int, failing: float, slower: float) -> None:
        # Whoever opens here was given reason to.
        for pod in range(len(self.pods.nodes)):
            self.count_bad(pod, 10**6)
        seen = len(self.pods.moved)
        self.pods.seconds(seconds, only(0, Answer(slower, failing)), rate=5)
        for move in self.pods.moved[seen:]:
            self.bad[move.key] = 0
        self.seen = len(self.pods.moved)

    @rule(action=st.sampled_from(["open", "close", "reset"]), data=st.data())
    def order(self, action: str, data: st.DataObject) -> None:
        pod = data.draw(st.integers(0, len(self.pods.nodes) - 1))
        breaker = self.pods.nodes[pod].breaker
        assert action in ("open", "close", "reset")
        self.pods.tell(breaker.force(action, self.pods.now, "ann"))  # type: ignore[arg-type]
        self.judge(pod)

    @rule(false_alarm=st.sampled_from([1e-6, 1e-3, 1e-12]), trip=st.sampled_from([20.0, 50.0]))
    def new_numbers(self, false_alarm: float, trip: float) -> None:
        # A smaller threshold is met by evidence that was not enough before; so the bounds are those of the larger.
        rule = msgspec.structs.replace(self.pods.detection.rule, false_alarm=false_alarm, location_trip=trip)
        reload(self.pods, rule)
        for pod in range(len(self.pods.nodes)):
            detector = self.pods.detector(pod)
            detector.fast = min(detector.fast, self.pods.detection.threshold)
            detector.gray = min(detector.gray, self.pods.detection.threshold)
            detector.location = min(detector.location, trip)

    @invariant()
    def sane(self) -> None:
        if hasattr(self, "pods"):
            check(self.pods)

    def teardown(self) -> None:
        """Whatever happened, good answers close it again, in bounded time and number."""
        if not hasattr(self, "pods"):
            return
        pods = self.pods
        for pod, node in enumerate(pods.nodes):
            if node.breaker.held_open:
                pods.tell(node.breaker.force("close", pods.now, "ann"))
            node.in_flight = 0
            breaker = node.breaker
            pods.now = max(pods.now, breaker.since)
            probes = 0
            # Left alone it waits for the first who asks.
            if breaker.state is not CLOSED:
                pods.now = max(pods.now, breaker.probe_at(pods.now)) + 100_000.0
                assert breaker.can_probe(pods.now)
            while breaker.state is not CLOSED and probes < 3 * MOST_PROOFS:
                pods.now = max(pods.now, breaker.probe_at(pods.now))
                asked = pods.ask(pod)
                assert asked is not None
                pods.now += 0.1
                pods.first_token(pod, asked[1], 0.5 * seconds_of(asked[1].expected))
                pods.end(pod, *asked)
                probes += 1
            assert breaker.state is CLOSED, (breaker.why, probes, pods.detector(pod).trial)
            check(pods)


Histories.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestHistories = Histories.TestCase


@given(
    slower=st.lists(st.floats(0.1, 1.2), min_size=1, max_size=100),
    steps=st.lists(st.sampled_from([0.0, 0.1, 5.0, -3600.0, 3600.0]), min_size=1, max_size=10),
    warm=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_good_answers_in_time_never_open(slower: list[float], steps: list[float], warm: bool) -> None:
    pods = Pods(2, Adaptive(min_samples=30))
    if warm:
        pods.seconds(10)
    for number, factor in enumerate(slower):
        pods.now += steps[number % len(steps)]
        asked = pods.ask(0)
        assert asked is not None
        pods.first_token(0, asked[1], usual_s() * factor)
        pods.end(0, *asked)
        if number % 10 == 0:
            pods.tick()
        assert pods.state() is CLOSED, pods.moved


def test_all_slower_alike_is_nobodys_fault() -> None:
    pods = Pods(6).learnt()
    pods.seconds(60, lambda pod: Answer(slower=2.0))
    assert not pods.opened(), [move.evidence for move in pods.opened()]


def test_what_a_fault_took_before_its_trip_teaches_nothing() -> None:
    pods = Pods(4).learnt()
    line = pods.detector(0).line
    assert line is not None
    before = line.tau
    pods.seconds(120, only(0, Answer(slower=6.0)))
    assert pods.opened()
    assert line.tau <= before + 0.2


def test_an_endpoint_that_became_slower_for_good_is_taken_back_and_stays() -> None:
    pods = Pods(4).learnt()
    slower = only(0, Answer(slower=3.0))
    pods.seconds(300, slower)
    assert pods.opened(0) and pods.state(0) is not CLOSED
    pods.seconds(900, slower)
    assert pods.state(0) is CLOSED
    opened = len(pods.opened(0))
    pods.seconds(600, slower)
    assert len(pods.opened(0)) <= opened + 1 and pods.state(0) is CLOSED


def test_of_too_many_models_the_one_heard_of_longest_ago_makes_room() -> None:
    pods = Pods(2).learnt()
    detection, detector = pods.detection, pods.detector(0)
    for number in range(MAX_LINES + 5):
        line = detection._new_line(f"m{number}", detector.version, pods.now)
        assert line is not None
        line.taught_at = pods.now + number
    assert len(detection._lines) == MAX_LINES
    assert ("m0", detector.version) not in detection._lines


def test_one_session_s_failures_and_a_straggler_open_nothing() -> None:
    pods = Pods(4).learnt()
    for _ in range(10):
        pods.fail(0, session="poisoned")
    pods.fail(0, session="unlucky")
    assert pods.state() is CLOSED
    pods.fail(0, session="another")
    assert pods.state() is OPEN
