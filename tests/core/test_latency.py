"""The line of a model: what it learns of a world whose law is known, and what it makes of nonsense."""

import random
from math import exp, inf, isfinite, log, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.core.breaker import Breaker, Scope
from sidecar.core.latency import (
    BLOCK_S,
    BLOCK_SAMPLES,
    FIRST_PER_S,
    LATER_PER_S,
    LEAST_SPREAD,
    MOST_BYTES,
    MOST_S,
    MOST_SPREAD,
    Line,
    Sample,
    log_s,
    seconds_of,
)
from sidecar.policy.schema import Adaptive, NodeBreaker, Seconds

RULE = Adaptive()
CLOSED = Breaker(Scope.NODE, "e1:80", "s", NodeBreaker(), 0.0, lease_s=60.0)
ODD = [nan, inf, -inf, 0.0, -1.0, -1e308, 1e-320, 1e308]


def world_s(size_bytes: float, in_flight: float) -> float:
    """A law within the line's reach: a power of the prompt, a factor per request in flight."""
    return 0.05 * exp(0.7 * log((size_bytes / 4 + 150) / 400) + 0.03 * in_flight)


def taught(
    rule: Adaptive = RULE, seconds: int = 150, noise: float = 0.2, seed: int = 1, per_s: int = FIRST_PER_S
) -> Line:
    """A line that saw that world for so long."""
    chance = random.Random(seed)
    line = Line(rule, 0.0)
    for second in range(seconds):
        for _ in range(min(per_s, line.per_tick)):
            size, load = int(2000 * exp(chance.gauss(0.0, 1.0))), float(chance.randrange(0, 20))
            took = log(world_s(min(size, MOST_BYTES), load)) + noise * chance.gauss(0.0, 1.0)
            line.pending.append(Sample(took, size, load, 0.0, CLOSED))
        line.learn(float(second + 1))
    return line


@pytest.mark.parametrize(
    ("size", "load"), [(400, 0), (400, 19), (2000, 5), (8000, 0), (8000, 19), (32_000, 10)], ids=str
)
def test_the_law_of_a_world_is_learnt(size: int, load: int) -> None:
    line = taught()
    assert line.expected(size, load) == pytest.approx(log(world_s(size, load)), abs=0.08)


def test_the_spread_is_that_of_the_noise() -> None:
    for noise in (0.1, 0.2, 0.4):
        assert taught(noise=noise).spread == pytest.approx(noise, rel=0.25)


def test_what_nobody_varied_is_worth_nothing() -> None:
    line = Line(RULE, 0.0)
    for second in range(100):
        line.pending.extend(Sample(log(0.3), 2000, 3.0, 0.0, CLOSED) for _ in range(line.per_tick))
        line.learn(float(second))
    for size, load in ((2000, 3), (2000, 12), (4000, 3)):
        assert line.expected(size, load) == pytest.approx(log(0.3), abs=0.4)


def test_without_covariates_there_is_one_time_for_all() -> None:
    line = taught(Adaptive(covariates=False))
    assert line.expected(1, 0) == line.expected(MOST_BYTES, 500)


def test_ready_once_enough_was_learnt() -> None:
    rule = Adaptive(min_samples=100)
    line = Line(rule, 0.0)
    for number in range(100):
        assert not line.ready
        line.pending.append(Sample(log(0.2), 2000, 1.0, 0.0, CLOSED))
        line.learn(number / 10)
    line.learn(11.0)
    assert line.ready


def test_fewer_samples_are_asked_for_once_much_is_known() -> None:
    assert taught(seconds=10).per_tick == FIRST_PER_S
    assert taught(seconds=100).per_tick == LATER_PER_S


@pytest.mark.parametrize("slower", [0.05, 20.0], ids=["a twentieth", "twenty times"])
def test_the_faults_of_a_few_do_not_become_the_line(slower: float) -> None:
    line = taught()
    before = line.expected(2000, 5)
    for second in range(60):
        for number in range(line.per_tick):
            took = log(world_s(2000, 5)) + (log(slower) if number % 10 == 0 else 0.0)
            line.pending.append(Sample(took, 2000, 5.0, 0.0, CLOSED))
        line.learn(200.0 + second)
    assert line.expected(2000, 5) == pytest.approx(before, abs=0.1)


def test_an_endpoints_known_offset_is_not_learnt_again() -> None:
    line = taught()
    before = line.expected(2000, 5)
    for second in range(60):
        line.pending.extend(Sample(log(world_s(2000, 5)) + 0.5, 2000, 5.0, 0.5, CLOSED) for _ in range(line.per_tick))
        line.learn(200.0 + second)
    assert line.expected(2000, 5) == pytest.approx(before, abs=0.05)


# --- the threshold --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("noise", "low", "high"),
    [
        pytest.param(0.05, 3.0, 3.0, id="quiet: the lower bound"),
        pytest.param(0.2, 3.0, 4.0, id="usual"),
        pytest.param(0.6, 3.0, 12.0, id="noisy"),
        pytest.param(2.0, 12.0, 12.0, id="wild: the upper bound"),
    ],
)
def test_tau_is_the_tail_between_its_bounds(noise: float, low: float, high: float) -> None:
    line = taught(noise=noise)
    assert low <= exp(line.tau) * 1.000001 and exp(line.tau) <= high * 1.000001


def test_tau_is_beyond_almost_all_that_is_normal() -> None:
    rule = Adaptive(tau_min=1.1, tau_max=1000)
    chance = random.Random(5)
    line = taught(rule, seconds=400, noise=0.3)
    over = sum(0.3 * chance.gauss(0.0, 1.0) > line.tau for _ in range(20_000))
    assert over <= 40, "two in a thousand"
    assert line.tau < 0.3 * 6, "and yet it finds something"


def test_before_the_first_block_tau_is_at_its_upper_bound() -> None:
    line = Line(RULE, 0.0)
    assert exp(line.tau) == pytest.approx(RULE.tau_max)
    line.pending.extend(Sample(log(0.2), 2000, 1.0, 0.0, CLOSED) for _ in range(FIRST_PER_S))
    line.learn(1.0)
    assert exp(line.tau) == pytest.approx(RULE.tau_max)


def test_tau_follows_the_bounds_of_a_new_policy_and_the_line_stays() -> None:
    line = taught()
    before, learnt = line.expected(2000, 5), line.learnt
    line.use(Adaptive(tau_min=6.0, tau_max=8.0))
    assert exp(line.tau) == pytest.approx(6.0)
    assert (line.expected(2000, 5), line.learnt) == (before, learnt)
    line.use(Adaptive(tau_min=1.1, tau_max=1.2))
    assert exp(line.tau) == pytest.approx(1.2)


# --- silences -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("usual_s", [0.01, 0.5, 5.0, 60.0])
def test_a_silence_is_late_beyond_the_longest_usual_one(usual_s: float) -> None:
    line, chance = Line(RULE, 0.0), random.Random(3)
    for _ in range(20_000):
        line.gap(usual_s * chance.uniform(0.2, 1.0))
    assert line.late_gap_s >= max(usual_s, float(RULE.gap_min_s))
    assert line.late_gap_s <= max(float(RULE.gap_min_s), 5.0 * usual_s)


def test_one_long_silence_is_not_the_usual_one() -> None:
    line = Line(RULE, 0.0)
    for _ in range(2000):
        line.gap(1.0)
    before = line.late_gap_s
    line.gap(3000.0)
    for _ in range(20):
        line.gap(1.0)
    # A thousand times longer, it is taken for the new order of size at most once; then it is forgotten, slowly.
    assert before == pytest.approx(3.0, rel=0.1)
    assert line.late_gap_s <= 3000.0


@pytest.mark.parametrize("gap_s", [*ODD, MOST_S])
def test_nonsense_is_no_silence(gap_s: float) -> None:
    line = Line(RULE, 0.0)
    before = line.late_gap_s
    line.gap(gap_s)
    assert line.late_gap_s == before


# --- bounds ---------------------------------------------------------------------------------------------------------


def test_memory_is_bounded_where_nothing_ever_ends_a_block() -> None:
    line = Line(RULE, 1e9)  # the clock went back: no block is ever old enough
    for second in range(200):
        line.pending.extend(Sample(log(0.2), 2000, 1.0, 0.0, CLOSED) for _ in range(line.per_tick))
        line.learn(float(second))
        assert len(line._block) <= BLOCK_SAMPLES + FIRST_PER_S
        assert not line.pending
    assert line._tails and len(line._tails) <= 20


def test_a_block_of_few_samples_waits_for_more() -> None:
    line = taught(seconds=30)
    line.learn(1000.0)
    tails = len(line._tails)
    line.pending.append(Sample(log(0.2), 2000, 1.0, 0.0, CLOSED))
    line.learn(1000.0 + 2 * BLOCK_S)
    assert len(line._tails) == tails


@pytest.mark.parametrize("seconds", [*ODD, 1.0])
def test_a_latency_has_a_logarithm_whatever_the_clock_did(seconds: float) -> None:
    assert isfinite(log_s(seconds))
    assert 0.0 < seconds_of(log_s(seconds)) <= 2 * MOST_S


@pytest.mark.parametrize("value", [nan, inf, -inf, 1e308, -1e308, 0.0])
def test_and_a_logarithm_is_a_latency(value: float) -> None:
    assert 0.0 < seconds_of(value) <= 2 * MOST_S


SAMPLES = st.lists(
    st.tuples(
        st.one_of(st.sampled_from(ODD), st.floats(1e-3, 100.0)),
        st.one_of(st.sampled_from([0, 1, 2**40, 2**63]), st.integers(0, 10**6)),
        st.one_of(st.sampled_from([0, 1, 10**6]), st.integers(0, 200)),
        st.floats(-0.5, 0.5),
    ),
    max_size=80,
)


@given(
    rounds=st.lists(st.tuples(SAMPLES, st.one_of(st.sampled_from(ODD), st.floats(-1e5, 1e5))), max_size=12),
    covariates=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_no_sample_and_no_clock_makes_a_line_senseless(
    rounds: list[tuple[list[tuple[float, int, int, float]], float]], covariates: bool
) -> None:
    rule = Adaptive(min_samples=30, covariates=covariates, gap_min_s=Seconds(2))
    line = Line(rule, 0.0)
    for samples, now in rounds:
        for took_s, size, load, offset in samples:
            line.pending.append(Sample(log_s(took_s), size, float(load), offset, CLOSED))
            line.gap(took_s)
        line.learn(now)
        assert LEAST_SPREAD <= line.spread <= MOST_SPREAD
        assert rule.tau_min * 0.999 <= exp(line.tau) <= rule.tau_max * 1.001
        assert isfinite(line.late_gap_s) and line.late_gap_s >= 2.0
        for size, load in ((0, 0), (2000, 5), (MOST_BYTES, 200), (2**63, 10**6)):
            assert isfinite(line.expected(size, float(load)))


def test_samples_of_an_endpoint_that_opened_since_teach_nothing() -> None:
    line = taught()
    line.learn(999.0)
    opened = Breaker(Scope.NODE, "e2:80", "s", NodeBreaker(), 0.0, lease_s=60.0)
    opened.force("open", 0.0, "ann")
    learnt, expected = line.learnt, line.expected(2000, 5.0)
    line.pending.extend(Sample(log(9.0), 2000, 5.0, 0.0, opened) for _ in range(line.per_tick))
    line.learn(1000.0)
    line.learn(1001.0)
    assert line.learnt == learnt
    assert line.expected(2000, 5.0) == pytest.approx(expected)
