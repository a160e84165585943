"""What is normal for all together: the background, the offsets, overload and panic, by traffic and by the second."""

from collections.abc import Callable
from math import inf, log

import pytest

from sidecar.core.breaker import State
from sidecar.core.normal import MOST_BACKGROUND, MOST_COMMON, MOST_OFFSET, Normal
from sidecar.policy.schema import Adaptive
from tests.core.detect import WELL, Answer, Pods, only

CLOSED, OPEN = State.CLOSED, State.OPEN
DEAF = Adaptive(statistics=())  # learns and weighs, and opens nothing


def normal(pods: Pods) -> Normal:
    return pods.detection.normal


def loaded(pods: Pods, loads: Callable[[int], int], seconds: int) -> Pods:
    """Seconds in which each endpoint has so many requests under way, and answers accordingly."""
    for _ in range(seconds):
        for pod, node in enumerate(pods.nodes):
            node.in_flight = loads(pod)
        pods.second()
    return pods


# --- the background -------------------------------------------------------------------------------------------------


def test_what_nobody_saw_yet_is_as_the_policy_says() -> None:
    rule = Adaptive(background=0.01)
    assert Normal(rule).background == 0.01


def test_a_busy_hour_raises_it_for_all() -> None:
    pods = Pods(6, DEAF).learnt()
    before = normal(pods).background
    pods.seconds(60, lambda pod: Answer(failing=0.1))
    assert before < 0.01 and 0.05 < normal(pods).background < 0.2
    pods.seconds(60)
    assert normal(pods).background < 0.05


def test_the_fault_of_one_or_of_half_is_not_the_background() -> None:
    for faulty in (1, 3):
        pods = Pods(6, DEAF).learnt()
        pods.seconds(60, lambda pod, faulty=faulty: Answer(failing=0.5) if pod < faulty else WELL)  # type: ignore[misc]
        assert normal(pods).background < 0.01, faulty


def test_it_has_bounds_and_so_has_what_one_answer_adds() -> None:
    pods = Pods(4, DEAF).learnt()
    pods.seconds(60, lambda pod: Answer(failing=1.0))
    what = normal(pods)
    assert what.background == MOST_BACKGROUND
    assert what.bad_fast > 0.0 > what.good_fast and what.bad_gray > 0.0 > what.good_gray


def test_a_lone_endpoints_failures_excuse_themselves_only_in_the_long_run() -> None:
    pods = Pods(1, DEAF).learnt()
    pods.seconds(5, only(0, Answer(failing=1.0)))
    assert normal(pods).background < 0.1


# --- what all have in common, and each of its own -------------------------------------------------------------------


def test_all_slower_alike_is_common() -> None:
    pods = Pods(6, DEAF).learnt()
    assert normal(pods).common == pytest.approx(0.0, abs=0.15)
    pods.seconds(8, lambda pod: Answer(slower=2.0))
    assert normal(pods).common == pytest.approx(log(2.0), abs=0.25)
    pods.seconds(20)
    assert normal(pods).common == pytest.approx(0.0, abs=0.25)


def test_the_slowness_of_a_few_is_not() -> None:
    pods = Pods(6, DEAF).learnt()
    pods.seconds(20, lambda pod: Answer(slower=5.0) if pod < 2 else WELL)
    assert abs(normal(pods).common) < 0.25


def test_a_lone_endpoint_has_nothing_in_common_with_anybody() -> None:
    pods = Pods(1, DEAF).learnt()
    pods.seconds(20, lambda pod: Answer(slower=2.0))
    assert normal(pods).common == 0.0


def test_common_and_offsets_have_bounds() -> None:
    pods = Pods(3, DEAF).learnt()
    for slower in (50.0, 0.01, 50.0):
        pods.seconds(20, lambda pod, slower=slower: Answer(slower=slower))  # type: ignore[misc]
        assert abs(normal(pods).common) <= MOST_COMMON
        assert all(abs(pods.detector(pod).offset) <= MOST_OFFSET * 1.5 for pod in range(3))


def test_an_endpoint_that_is_always_a_little_slower_is_known_for_it() -> None:
    pods = Pods(4)
    pods.seconds(120, only(0, Answer(slower=1.3)))
    assert not pods.opened()
    offsets = [pods.detector(pod).offset for pod in range(4)]
    assert offsets[0] == max(offsets)
    assert offsets[0] - sum(offsets[1:]) / 3 == pytest.approx(log(1.3), abs=0.12)


# --- load -----------------------------------------------------------------------------------------------------------


def test_a_queue_explains_slowness_as_far_as_the_others_have_one() -> None:
    pods = loaded(Pods(5, DEAF), lambda pod: 10, 30)
    usual = normal(pods).load_cap
    assert 10.0 <= usual < inf
    loaded(pods, lambda pod: 1000 if pod == 0 else 10, 5)
    assert normal(pods).load_cap == usual


def test_a_lone_endpoints_queue_explains_all() -> None:
    assert normal(loaded(Pods(1, DEAF), lambda pod: 10, 30)).load_cap == inf


def overloaded(rule: Adaptive | None = None) -> Pods:
    """Five usual requests on each of four for minutes, then sixty."""
    pods = loaded(Pods(4, rule), lambda pod: 5, 150)
    assert not normal(pods).overload
    return loaded(pods, lambda pod: 60, 6)


def test_far_more_load_than_ever_is_overload_until_a_while_after() -> None:
    pods = overloaded()
    assert normal(pods).overload and normal(pods).excuses
    loaded(pods, lambda pod: 5, 60)
    assert not normal(pods).overload and not pods.opened()


def test_not_without_guards() -> None:
    assert not normal(overloaded(Adaptive(guards=False, statistics=()))).overload


def test_in_overload_slowness_is_no_evidence_and_teaches_nothing_but_failures_are() -> None:
    pods = overloaded()
    line = pods.detector().line
    assert line is not None
    learnt = line.learnt
    for _ in range(5):
        for node in pods.nodes:
            node.in_flight = 60
        pods.second(only(0, Answer(slower=10.0)))
    assert normal(pods).overload and not pods.opened()
    assert line.learnt == learnt and not line.pending
    for _ in range(5):
        for node in pods.nodes:
            node.in_flight = 60
        pods.second(only(0, Answer(failing=0.9)))
    assert pods.opened(0)


def test_one_endpoint_that_hangs_is_no_overload() -> None:
    pods = loaded(Pods(5), lambda pod: 5, 150)
    loaded(pods, lambda pod: 500 if pod == 0 else 5, 10)
    assert not normal(pods).overload


@pytest.mark.parametrize("answer", [Answer(slower=10.0), Answer(failing=1.0)], ids=["slow", "failing"])
def test_where_the_others_could_not_carry_it_nobody_opens(answer: Answer) -> None:
    pods = loaded(Pods(2, floor=0.34), lambda pod: 5, 130)
    for node in pods.nodes:
        node.in_flight = 1000
    pods.tick()
    assert pods.service.roster.load > pods.service.roster.load_most
    pods.detection.normal.overload = False
    for _ in range(30):
        pods.now += 0.1
        if answer.failing:
            pods.fail(0)
        else:
            pods.serve(0, answer.slower)
    assert not pods.opened()


# --- panic ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("floor", "guards", "panic"),
    [
        pytest.param(0.34, True, True, id="floor"),
        pytest.param(0.0, True, False, id="no floor: no use"),
        pytest.param(0.34, False, False, id="no guards"),
    ],
)
def test_where_most_fail_everywhere_all_are_closed(floor: float, guards: bool, panic: bool) -> None:
    pods = Pods(6, Adaptive(guards=guards), floor=floor).learnt()
    seen = False
    for _ in range(20):
        pods.second(lambda pod: Answer(failing=1.0))
        seen = seen or normal(pods).panic
        if normal(pods).panic:
            assert pods.service.roster.panic
            assert all(pods.state(pod) is CLOSED for pod in range(6))
    assert seen is panic
    assert bool([move for move in pods.moved if move.why == "panic"]) is panic


def test_panic_ends_with_what_began_it() -> None:
    pods = Pods(6, floor=0.34).learnt()
    pods.seconds(10, lambda pod: Answer(failing=1.0))
    assert normal(pods).panic
    pods.seconds(30)
    assert not normal(pods).panic and not pods.service.roster.panic
    assert all(pods.state(pod) is CLOSED for pod in range(6))


def test_the_failing_of_some_is_no_panic() -> None:
    pods = Pods(6, floor=0.34).learnt()
    pods.seconds(30, lambda pod: Answer(failing=1.0) if pod < 2 else WELL)
    assert not [move for move in pods.moved if move.why == "panic"]
    assert pods.state(0) is not CLOSED


# --- time -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0.0, -86_400.0, 86_400.0, 1e12, -1e12])
def test_a_clock_that_jumps_between_two_ticks_leaves_everything_within_bounds(step: float) -> None:
    pods = Pods(4, DEAF).learnt()
    before = normal(pods).background
    pods.now += step
    pods.tick()
    what = normal(pods)
    assert what.background == pytest.approx(before, rel=0.5)
    assert not what.overload and not what.panic
    pods.seconds(20)
    assert not what.overload and not what.panic and abs(what.common) < 0.3
