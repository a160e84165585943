from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import pytest

from sidecar.simulate.fault import COLD_S, RAMP_S, Fate, Fault, Kind

BEGIN, END = 100.0, 300.0
SERVE, HTTP500, RESET, REFUSE, STALL = Fate.SERVE, Fate.HTTP500, Fate.RESET, Fate.REFUSE, Fate.STALL


def fault_of(kind: Kind, strength: float = 5.0, share: float = 0.4) -> Fault:
    return Fault(kind, (1,), BEGIN, END, strength, share)


def grid(steps: int = 200) -> Iterator[tuple[float, float]]:
    """Every kind of luck there is, evenly."""
    for u in range(steps):
        for v in range(steps):
            yield (u + 0.5) / steps, (v + 0.5) / steps


FACTORS = [
    # kind, seconds after the begin, by which factor all is slower
    (Kind.STEP, 0.0, 5.0),
    (Kind.STEP, 199.0, 5.0),
    (Kind.RAMP, 0.0, 1.0),
    (Kind.RAMP, RAMP_S / 4, 2.0),
    (Kind.RAMP, RAMP_S, 5.0),
    (Kind.RAMP, RAMP_S + 100.0, 5.0),
    (Kind.COLD, 0.0, 5.0),
    (Kind.COLD, COLD_S / 2, 3.0),
    (Kind.COLD, COLD_S, 1.0),
    (Kind.COLD, COLD_S + 100.0, 1.0),
    (Kind.RELOAD, 0.0, 1.0),
    (Kind.RELOAD, END - BEGIN, 5.0),
    (Kind.RELOAD, END - BEGIN + COLD_S / 2, 3.0),
    (Kind.RELOAD, END - BEGIN + COLD_S, 1.0),
    *[
        (kind, after, 1.0)
        for kind in (Kind.ERRORS, Kind.STALL, Kind.GRAY, Kind.ZONE, Kind.MULTI, Kind.OUTAGE)
        for after in (0.0, 150.0)
    ],
]


@pytest.mark.parametrize(("kind", "after", "factor"), FACTORS, ids=[f"{row[0]}-{row[1]:g}" for row in FACTORS])
def test_how_much_slower_everything_is_at_which_time(kind: Kind, after: float, factor: float) -> None:
    assert fault_of(kind).slowness(BEGIN + after) == pytest.approx(factor)


def test_every_kind_has_its_row() -> None:
    assert {row[0] for row in FACTORS} == set(Kind)


@pytest.mark.parametrize("kind", list(Kind))
def test_nothing_is_ever_faster_than_usual_nor_slower_than_its_strength(kind: Kind) -> None:
    fault = fault_of(kind)
    for second in range(int(BEGIN), int(fault.until) + 1):
        assert 1.0 <= fault.slowness(float(second)) <= 5.0


def test_a_ramp_only_climbs_and_a_cold_engine_only_warms() -> None:
    seconds = [BEGIN + second for second in range(200)]
    ramp, cold = fault_of(Kind.RAMP), fault_of(Kind.COLD)
    assert all(ramp.slowness(one) <= ramp.slowness(next_) for one, next_ in pairwise(seconds))
    assert all(cold.slowness(one) >= cold.slowness(next_) for one, next_ in pairwise(seconds))


@pytest.mark.parametrize("kind", list(Kind))
def test_until_is_the_end_and_for_a_reload_the_end_of_the_cold_after_it(kind: Kind) -> None:
    assert fault_of(kind).until == (END + COLD_S if kind is Kind.RELOAD else END)


SHARES = [
    # kind, share, what becomes of which share of requests; the rest is served
    (Kind.STEP, 1.0, {}),
    (Kind.RAMP, 1.0, {}),
    (Kind.COLD, 1.0, {}),
    (Kind.ZONE, 1.0, {}),
    (Kind.ERRORS, 0.6, {HTTP500: 0.4, RESET: 0.2}),
    (Kind.MULTI, 0.9, {HTTP500: 0.6, RESET: 0.3}),
    (Kind.STALL, 0.4, {STALL: 0.4}),
    (Kind.GRAY, 0.3, {HTTP500: 0.1, RESET: 0.05}),
    (Kind.OUTAGE, 0.1, {REFUSE: 1.0}),
    (Kind.RELOAD, 0.1, {REFUSE: 1.0}),
]


@pytest.mark.parametrize(("kind", "share", "wanted"), SHARES, ids=[str(row[0]) for row in SHARES])
def test_which_share_meets_which_fate(kind: Kind, share: float, wanted: dict[Fate, float]) -> None:
    fault = fault_of(kind, share=share)
    found = Counter(fault.fate(u, v, BEGIN + 10.0) for u, v in grid())
    shares = {fate: count / found.total() for fate, count in found.items()}
    assert shares.pop(SERVE, 0.0) == pytest.approx(1.0 - sum(wanted.values()), abs=0.01)
    assert shares == pytest.approx(wanted, abs=0.01)


def test_every_kind_has_its_share() -> None:
    assert {row[0] for row in SHARES} == set(Kind)


BITTEN = [
    # kind, u, v, fate, own slowness: at the borders of luck
    (Kind.ERRORS, 0.0, 0.0, HTTP500, 1.0),
    (Kind.ERRORS, 0.39, 0.66, HTTP500, 1.0),
    (Kind.ERRORS, 0.39, 0.67, RESET, 1.0),
    (Kind.ERRORS, 0.4, 0.0, SERVE, 1.0),
    (Kind.MULTI, 0.39, 0.999, RESET, 1.0),
    (Kind.MULTI, 0.4, 0.999, SERVE, 1.0),
    (Kind.STALL, 0.39, 0.999, STALL, 1.0),
    (Kind.STALL, 0.4, 0.0, SERVE, 1.0),
    (Kind.GRAY, 0.39, 0.0, SERVE, 8.0),
    (Kind.GRAY, 0.39, 0.25, SERVE, 14.0),
    (Kind.GRAY, 0.39, 0.5, HTTP500, 1.0),
    (Kind.GRAY, 0.39, 0.84, RESET, 1.0),
    (Kind.GRAY, 0.4, 0.25, SERVE, 1.0),
    (Kind.STEP, 0.0, 0.0, SERVE, 1.0),
]


@pytest.mark.parametrize(
    ("kind", "u", "v", "fate", "own"), BITTEN, ids=[f"{row[0]}-{row[1]}-{row[2]}" for row in BITTEN]
)
def test_who_is_bitten_is_a_matter_of_its_luck(kind: Kind, u: float, v: float, fate: Fate, own: float) -> None:
    fault = fault_of(kind)
    assert fault.fate(u, v, BEGIN) is fate
    assert fault.own_slowness(u, v) == pytest.approx(own)


def test_what_gray_does_not_fail_it_slows_eight_to_twenty_times() -> None:
    fault = fault_of(Kind.GRAY)
    slow, failed = [], 0
    for u, v in grid():
        if u < fault.share:
            own, fate = fault.own_slowness(u, v), fault.fate(u, v, BEGIN)
            assert (own > 1.0) is (fate is SERVE)
            failed += fate is not SERVE
            if own > 1.0:
                slow.append(own)
    assert min(slow) >= 8.0 and max(slow) < 20.0
    assert len(slow) == failed


def test_a_reload_refuses_until_its_end_and_serves_slowly_from_then_on() -> None:
    fault = fault_of(Kind.RELOAD)
    assert [fault.fate(0.0, 0.0, at) for at in (BEGIN, END - 0.001, END, fault.until)] == [REFUSE, REFUSE, SERVE, SERVE]
    assert [round(fault.slowness(at), 3) for at in (END - 0.001, END, fault.until)] == [1.0, 5.0, 1.0]
