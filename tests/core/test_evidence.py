"""What an attempt tells, to detector and breaker in one: in the right order, once, and with the permit given back."""

from math import inf
from typing import Literal

import pytest

from sidecar.core import evidence
from sidecar.core.breaker import Permit, State
from sidecar.core.fleet import ServiceState
from sidecar.core.pool import Node
from sidecar.kernel.ids import SessionId
from sidecar.kernel.outcome import DOCTRINE, Ending, Result
from sidecar.policy.schema import Adaptive, NodeBreaker, Seconds
from tests.core.build import fleet_of, permitted, service_of
from tests.core.detect import Answer, Pods, only

S, F, I, O = Result.SUCCESS, Result.FAILURE, Result.IGNORED, Result.OVERLOADED  # noqa: E741
CLOSED, OPEN, HALF_OPEN = State.CLOSED, State.OPEN, State.HALF_OPEN


def plain() -> tuple[ServiceState, Node]:
    """An endpoint under the fixed rules alone."""
    rule = NodeBreaker(consecutive=3, failure_ratio=0.0, open_s=Seconds(10), min_closed_ratio=0.0, adaptive=False)
    _, service = fleet_of(service_of(2, rule))
    return service, next(iter(service.nodes.values()))


def test_without_a_detector_the_breaker_alone_hears() -> None:
    service, node = plain()
    permit = permitted(node.breaker, 0.0)
    assert evidence.expect(service, node, permit, "m", 100, None) is None
    for _ in range(2):
        assert evidence.ended(service, node, permit, None, Ending.SERVER_ERROR, F, 0.0, 0.0) is None
    moved = evidence.ended(service, node, permit, None, Ending.SERVER_ERROR, F, 0.0, 0.0)
    assert moved is not None and (moved.new, moved.why) == (OPEN, "consecutive")
    assert evidence.session_result(service, F) is F


def test_an_answer_without_a_first_token_is_timed_by_nobody_and_judged_all_the_same() -> None:
    pods = Pods(3).learnt()
    for _ in range(3):
        asked = pods.ask(0, model="")
        assert asked is not None
        assert (asked[1].late_s, asked[1].late_gap_s, asked[1].line) == (inf, inf, None)
        pods.first_token(0, asked[1], 1000.0)
        pods.end(0, *asked, Ending.SERVER_ERROR)
    assert pods.state() is OPEN


def test_what_is_expected_grows_with_prompt_and_load() -> None:
    pods = Pods(3)
    for second in range(120):
        for node in pods.nodes:
            node.in_flight = second % 20
        pods.second()
    for node in pods.nodes:
        node.in_flight = 4
    pods.tick()
    small, large = pods.ask(0, size_bytes=1000), pods.ask(0, size_bytes=16_000)
    pods.nodes[0].in_flight = 10
    busy = pods.ask(0, size_bytes=1000)
    assert small is not None and large is not None and busy is not None
    assert small[1].expected + 0.3 < large[1].expected
    assert small[1].expected < busy[1].expected
    assert small[1].late_s <= busy[1].late_s <= large[1].late_s


def test_nothing_is_late_before_the_least_time_of_the_policy() -> None:
    pods = Pods(3, Adaptive(late_min_s=Seconds(60), gap_min_s=Seconds(50))).learnt()
    asked = pods.ask(0)
    assert asked is not None
    assert (asked[1].late_s, asked[1].late_gap_s) == (60.0, 50.0)
    pods.first_token(0, asked[1], 59.0)
    assert not asked[1].bad


@pytest.mark.parametrize("ending", list(Ending))
def test_every_ending_gives_the_permit_back_and_counts_as_the_doctrine_says(ending: Ending) -> None:
    pods = Pods(3).learnt()
    results, bad = pods.detection.results, pods.detector().bad
    asked = pods.ask(0)
    assert asked is not None
    pods.end(0, *asked, ending)
    counted = DOCTRINE[ending].node in (S, F)
    assert pods.detection.results == results + counted
    assert pods.detector().bad == bad + (DOCTRINE[ending].node is F)


@pytest.mark.parametrize("ending", list(Ending))
def test_every_ending_of_a_probe_gives_its_place_back(ending: Ending) -> None:
    pods = Pods(3).learnt()
    for _ in range(3):
        pods.fail()
    breaker = pods.nodes[0].breaker
    pods.now = breaker.retry_at(pods.now)
    asked = pods.ask(0)
    assert asked is not None and asked[0].probe and breaker.probes_out == 1
    pods.end(0, *asked, ending)
    assert breaker.probes_out == 0
    assert breaker.state is (OPEN if DOCTRINE[ending].node is F else HALF_OPEN)
    assert breaker.can_probe(pods.now) is (breaker.state is HALF_OPEN)


def test_the_fixed_rules_are_asked_first_and_one_trip_is_one() -> None:
    pods = Pods(3, consecutive=3).learnt()
    for _ in range(3):
        pods.fail()
    [opened] = pods.opened()
    assert opened.why == "consecutive"


def test_a_trip_waits_as_the_detectors_numbers_say() -> None:
    pods = Pods(3, Adaptive(open_s=Seconds(4), open_max_s=Seconds(7))).learnt()
    for _ in range(3):
        pods.fail()
    breaker = pods.nodes[0].breaker
    assert breaker.retry_at(pods.now) == pods.now + 4.0
    pods.now += 4.0
    asked = pods.ask(0)
    assert asked is not None
    pods.end(0, *asked, Ending.SERVER_ERROR)
    assert breaker.retry_at(pods.now) == pods.now + 7.0


def test_silences_of_good_answers_are_learnt_and_of_failed_ones_not() -> None:
    pods = Pods(3).learnt()
    asked = pods.ask(0)
    assert asked is not None and asked[1].line is not None
    line, before = asked[1].line, asked[1].line.late_gap_s
    pods.end(0, *asked, Ending.TOKEN_GAP_TIMEOUT, 600.0)
    assert line.late_gap_s == before
    for _ in range(200):
        pods.serve(1, gap_s=4.0)
    assert line.late_gap_s > before


# --- overload -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", sorted(evidence.DEADLINES))
def test_in_overload_a_deadline_is_excused_by_both(ending: Ending) -> None:
    pods = Pods(3, consecutive=3).learnt()
    pods.detection.normal.overload = True
    for _ in range(20):
        pods.fail(0, ending)
    assert pods.state() is CLOSED and pods.detector().bad == 0
    pods.detection.normal.overload = False
    for _ in range(3):
        pods.fail(0, ending)
    assert pods.state() is OPEN


def test_in_overload_an_error_is_an_error() -> None:
    pods = Pods(3, consecutive=3).learnt()
    pods.detection.normal.overload = True
    for _ in range(3):
        pods.fail(0)
    assert pods.state() is OPEN


@pytest.mark.parametrize("why", ["overload", "panic", "background"])
def test_while_much_is_bad_everywhere_no_session_is_to_blame(why: Literal["overload", "panic", "background"]) -> None:
    pods = Pods(3).learnt()
    assert [evidence.session_result(pods.service, each) for each in (S, F, I, O)] == [S, F, I, O]
    if why == "background":
        pods.detection.normal.background = 0.2
    else:
        setattr(pods.detection.normal, why, True)
    assert [evidence.session_result(pods.service, each) for each in (S, F, I, O)] == [S, I, I, O]


# --- probes ---------------------------------------------------------------------------------------------------------


def probing(answer: Answer) -> tuple[Pods, Permit, object]:
    pods = Pods(4).learnt()
    pods.until_open(only(0, answer), 60)
    pods.now = pods.nodes[0].breaker.retry_at(pods.now)
    asked = pods.ask(0)
    assert asked is not None and asked[0].probe
    return pods, *asked


@pytest.mark.parametrize("silent", [False, True])
def test_a_late_probe_fails_at_once_and_only_once(silent: bool) -> None:
    pods = Pods(4).learnt()
    for _ in range(3):
        pods.fail()
    pods.now = pods.nodes[0].breaker.retry_at(pods.now)
    asked = pods.ask(0)
    assert asked is not None
    pods.late(0, asked[1], silent=silent)
    assert pods.moved[-1].why == "probe_failed"
    assert pods.moved[-1].evidence.endswith("silent" if silent else "late")
    moved = len(pods.moved)
    pods.late(0, asked[1], silent=silent)
    pods.first_token(0, asked[1], 0.1)
    pods.end(0, *asked)
    assert len(pods.moved) == moved and pods.state() is OPEN


def test_probes_that_are_slow_together_do_not_close_it() -> None:
    """Each is under the threshold of what is late, all of them are three times what is usual."""
    pods, permit, _ = probing(Answer(slower=4.0))
    pods.end(0, permit, None, Ending.CLIENT_LEFT)
    for _ in range(40):
        pods.second(only(0, Answer(slower=2.7)))
        assert pods.state() is not CLOSED


def test_a_permit_of_nobody_tells_nothing() -> None:
    pods = Pods(3).learnt()
    node = pods.nodes[0]
    outsider = Permit(-1)
    expectation = evidence.expect(pods.service, node, outsider, "m", 100, SessionId("s"))
    assert expectation is not None
    results = pods.detection.results
    for _ in range(20):
        pods.late(0, expectation)
        pods.first_token(0, expectation, 100.0)
        pods.end(0, outsider, expectation, Ending.SERVER_ERROR)
    assert pods.state() is CLOSED and pods.detector().bad == 0 and pods.detection.results == results
