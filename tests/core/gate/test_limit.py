"""The limit of an endpoint, learnt from its first tokens."""

import heapq
import math
import random
from collections.abc import Callable

import pytest

from sidecar.core.gate.limit import MIN_SAMPLES, Limiter
from sidecar.policy.schema import Admission

Slow = Callable[[int, float], float]


class Engine:
    """An endpoint whose first tokens take `slow(in flight, size)` seconds, and the rest of an answer `rest_s` more."""

    def __init__(self, policy: Admission, slow: Slow, rest_s: float = 0.0, noise: float = 0.0, seed: int = 1) -> None:
        self.limiter = Limiter(policy)
        self.slow = slow
        self.rest_s = rest_s
        self.noise = noise
        self.random = random.Random(seed)
        self.now = 0.0
        self.in_flight = 0
        self.waits = 0.0
        self.waiting = 0
        self.served: list[tuple[float, float]] = []
        """When, and how long its first token took."""
        self.limits: list[float] = []

    def run(self, seconds: float, rate: float, sizes: tuple[int, ...] = (1000,), queue: int = 200) -> None:
        """Requests that come at `rate` a second and wait outside while the limit is reached."""
        events: list[tuple[float, int, str, float, int]] = []
        number = 0
        end = self.now + seconds
        heapq.heappush(events, (self.now, number, "comes", 0.0, 0))
        heapq.heappush(events, (self.now + 1.0, number, "tick", 0.0, 0))
        outside: list[int] = []
        while events[0][0] < end:
            self.now, _, kind, took, size = heapq.heappop(events)
            number += 1
            if kind == "comes":
                if len(outside) < queue:
                    outside.append(self.random.choice(sizes))
                heapq.heappush(events, (self.now + self.random.expovariate(rate), number, "comes", 0.0, 0))
            elif kind == "tick":
                self.limits.append(self.limiter.tick(self.waiting, self.in_flight, self.now))
                heapq.heappush(events, (self.now + 1.0, number, "tick", 0.0, 0))
            elif kind == "speaks":
                self.limiter.sample(took, size, self.in_flight, self.now)
                self.served.append((self.now, took))
                heapq.heappush(events, (self.now + self.rest_s, number, "ends", 0.0, 0))
            else:
                self.in_flight -= 1
            while outside and self.in_flight < self.limiter.limit:
                size = outside.pop(0)
                self.in_flight += 1
                takes = self.slow(self.in_flight, size) * self.random.lognormvariate(0.0, self.noise)
                number += 1
                heapq.heappush(events, (self.now + takes, number, "speaks", takes, size))
        while events:  # what runs ends; nobody comes any more
            self.now, _, kind, _, _ = heapq.heappop(events)
            if kind in ("speaks", "ends"):
                self.in_flight -= 1


def linear(in_flight: int, size: float) -> float:
    """T26's A."""
    return 0.5 + 0.1 * in_flight


@pytest.mark.parametrize("noise", [0.0, 0.3], ids=["exact", "noisy"])
@pytest.mark.parametrize("rate", [12.0, 40.0])
def test_t26_the_limit_settles_where_first_tokens_take_twice_their_baseline(rate: float, noise: float) -> None:
    engine = Engine(Admission(tolerance=2.0), linear, noise=noise)
    engine.run(600.0, rate)
    settled = engine.limits[60:]
    assert min(settled) >= 4.0 and max(settled) <= 12.0, (min(settled), max(settled))
    late = [took for at, took in engine.served if at > 60.0]
    assert sum(took <= 3.0 for took in late) / len(late) >= 0.95
    triples = zip(settled, settled[1:], settled[2:], strict=False)
    turns = sum((after - before) * (before - first) < 0 for first, before, after in triples)
    assert turns <= len(settled) / 8


def crowded(policy: Admission, owed_s: float) -> Limiter:
    """That of T26's A, to which 40 came at once: the first token told that it takes 1.2 s."""
    engine = Engine(policy, linear, noise=0.05)
    engine.limiter = Limiter(policy, owed_s)
    engine.in_flight = 7
    engine.run(300.0, 40.0)
    assert engine.limiter.baseline_s > 1.1
    return engine.limiter


def test_what_is_owed_is_kept_where_the_baseline_was_learnt_in_a_crowd() -> None:
    """Four times 1.2 s is late for all; 0.8 of 3 s is what 19 requests take."""
    policy = Admission()
    assert crowded(policy, math.inf).limit > 30.0
    assert 14.0 <= crowded(policy, 3.0).limit <= 20.0
    assert crowded(policy, 30.0).limit == crowded(policy, math.inf).limit


def test_what_cannot_be_kept_does_not_strangle() -> None:
    """Half a second is owed, which it takes idle: full is where it takes twice its baseline, as with `tolerance: 2`."""
    assert crowded(Admission(), 0.5).limit == crowded(Admission(tolerance=2.0), math.inf).limit > 14.0
    assert crowded(Admission(tolerance=1.5), 0.5).limit == crowded(Admission(tolerance=1.5), math.inf).limit


def test_an_engine_that_batches_well_gets_all_that_it_takes() -> None:
    engine = Engine(Admission(), lambda in_flight, size: 0.2 + 0.0002 * in_flight, rest_s=5.0)
    engine.run(600.0, 60.0)
    assert engine.limiter.limit >= 250.0


def test_the_limit_grows_only_when_it_is_used() -> None:
    engine = Engine(Admission(), lambda in_flight, size: 0.2, rest_s=1.0)
    engine.run(300.0, 10.0)
    assert engine.limiter.limit == 64.0


def test_a_mix_of_sizes_is_not_load() -> None:
    engine = Engine(Admission(), lambda in_flight, size: size / 10_000, rest_s=2.0, noise=0.2)
    engine.run(120.0, 25.0, sizes=(1_000,))
    engine.run(120.0, 25.0, sizes=(1_000, 100_000))
    engine.run(120.0, 25.0, sizes=(100_000,))
    assert engine.limiter.limit >= 64.0 and engine.limiter.cuts == 0


def test_a_size_that_first_comes_under_load_is_judged_by_the_load() -> None:
    limiter = Limiter(Admission())
    now = 0.0
    for in_flight, ttft_s in ((1, 0.1), (50, 0.18)):
        for _ in range(40):
            now += 0.25
            limiter.sample(ttft_s, 1000, in_flight, now)
        limiter.tick(0, in_flight, now)
    assert limiter.ratio == pytest.approx(1.8, rel=0.05)
    limiter.sample(1.8, 1_000_000, 50, now)
    assert limiter.baseline_s == pytest.approx(1.0, rel=0.1)


def test_an_engine_that_became_slower_for_good_is_not_held_at_the_least() -> None:
    engine = Engine(Admission(), lambda in_flight, size: 0.2 + 0.002 * in_flight, rest_s=1.0, noise=0.1)
    engine.run(120.0, 60.0)
    before = engine.limiter.limit
    engine.slow = lambda in_flight, size: 1.0 + 0.002 * in_flight  # another model, another card
    engine.run(60.0, 60.0)
    assert engine.limiter.cuts > 0
    engine.run(600.0, 60.0)
    assert before > 50.0 and engine.limiter.limit > 40.0


def test_an_engine_that_became_faster_lowers_its_baseline() -> None:
    engine = Engine(Admission(), lambda in_flight, size: 2.0, rest_s=1.0)
    engine.run(60.0, 10.0)
    engine.slow = lambda in_flight, size: 0.2
    engine.run(60.0, 10.0)
    assert engine.limiter.baseline_s == pytest.approx(0.2, rel=0.1)


def test_an_engine_that_is_always_full_does_not_make_slow_the_new_normal() -> None:
    engine = Engine(Admission(tolerance=2.0), linear)
    engine.run(30.0, 2.0)
    engine.run(3600.0, 40.0)
    assert max(engine.limits[-600:]) <= 12.0


@pytest.mark.parametrize("limit", [64.0, 67.2, 200.0])
def test_what_waits_inside_the_engine_is_what_was_too_many(limit: float) -> None:
    """An engine with 40 slots: the limit finds them, and tries for more every half minute, by one."""
    limiter = Limiter(Admission())
    limiter.limit = limit
    seen = []
    for second in range(300):
        running = math.ceil(limiter.limit)
        for _ in range(MIN_SAMPLES):
            limiter.sample(0.1, 1000, running, float(second))
        limiter.tick(max(0, running - 40), running, second + 0.5)
        seen.append(limiter.limit)
    assert seen[30:].count(40.0) >= 0.9 * len(seen[30:]) and max(seen[30:]) <= 45.0


def test_a_queue_that_is_heard_of_late_cuts_once() -> None:
    limiter, cuts = Limiter(Admission()), []
    for second in range(3):  # the same answer, and who runs is fewer already
        limiter.tick(10, 64 - 5 * second, float(second))
        cuts.append(limiter.limit)
    assert cuts == [54.0, 54.0, 54.0]


def test_who_says_that_it_is_full_is_cut_once_for_all_who_hear_it() -> None:
    limiter = Limiter(Admission())
    for _ in range(50):
        limiter.pushed_back(10.0)
    assert limiter.limit == pytest.approx(64 * 0.7) and limiter.cuts == 1
    for second in range(60):
        limiter.pushed_back(20.0 + second)
    assert limiter.limit == 4.0


def test_without_first_tokens_it_goes_back_to_where_it_began_and_no_further() -> None:
    limiter = Limiter(Admission(concurrency=20))
    for second in range(5):
        limiter.pushed_back(float(second))
    assert limiter.limit < 5.0
    for second in range(5, 600):
        limiter.tick(0, math.ceil(limiter.limit), float(second))
    assert limiter.limit == 20.0


def test_too_few_first_tokens_decide_nothing() -> None:
    limiter = Limiter(Admission())
    for second in range(600):
        if second % 60 == 0:
            limiter.sample(9.0 if second else 0.1, 1000, 1, float(second))
        limiter.tick(0, 1, float(second))
    assert limiter.cuts == limiter.grown == 0


def test_one_overload_cuts_once() -> None:
    """Those sent before a cut come back late for as long as they take, and say nothing of what it did."""
    limiter = Limiter(Admission())
    now = 0.0
    for _ in range(100):
        now += 0.1
        limiter.sample(0.1, 1000, 2, now)
    limiter.tick(0, 2, now)
    for _ in range(10):
        for _ in range(MIN_SAMPLES):
            limiter.sample(10.0, 1000, 40, now + 0.5)
        now += 1.0
        limiter.tick(0, 40, now)
    assert limiter.cuts == 1


def test_new_bounds_hold_at_once_and_what_was_learnt_stays() -> None:
    limiter = Limiter(Admission())
    limiter.sample(0.5, 1000, 1, 1.0)
    limiter.use(Admission(max=10))
    assert limiter.limit == 10.0 and limiter.baseline_s == pytest.approx(0.5)
    limiter.use(Admission(min=30))
    assert limiter.limit == 30.0
    limiter.use(Admission(min=50, max=20, concurrency=7))
    assert limiter.limit == 50.0


@pytest.mark.parametrize("ttft_s", [0.0, -5.0, 1e12])
@pytest.mark.parametrize("size", [0, -1, 1 << 200])
def test_whatever_comes_the_limit_stays_within_its_bounds(ttft_s: float, size: int) -> None:
    limiter = Limiter(Admission())
    for second in range(50):
        for _ in range(MIN_SAMPLES):
            limiter.sample(ttft_s, size, second, float(second))
        limiter.tick(0, 64, float(second))
        assert 4.0 <= limiter.limit <= 1024.0
