from collections.abc import Iterable

import msgspec
import pytest

from sidecar.simulate.fault import GRACE_S, Fault, Kind
from sidecar.simulate.ledger import Ledger, Measures, Tally
from sidecar.simulate.world import World
from tests.simulate.build import Heard, arrival_of, world_of

STEP = Fault(Kind.STEP, (1,), 100.0, 200.0, 5.0)
END = 400.0


def ledger_of(*faults: Fault, sidecars: int = 1, begin: float = 0.0) -> tuple[World, Ledger]:
    world = world_of(*faults)
    return world, Ledger(world, sidecars, begin, END)


def come(world: World, ledger: Ledger, number: int, *, pod: int, to: int | None, ttft_s: float | None) -> None:
    """A request that a random balancer would send to `pod`, and a method sends `to`; `ttft_s` None: it fails."""
    arrival = arrival_of(number, world.clock.now, pod=pod)
    ledger.arrived(arrival)
    if to is None:
        ledger.rejected(arrival, "open")
        return
    flight = world.send(to, arrival, 1, Heard(world))
    ledger.touched(arrival, flight)
    flight.abort()
    if ttft_s is None:
        ledger.failed(arrival, "reset")
    else:
        ledger.served(arrival, ttft_s)


def test_affected_requests_are_those_of_the_random_balancer_whoever_met_the_fault() -> None:
    world, ledger = ledger_of(STEP)
    world.clock.run_until(150.0)
    come(world, ledger, 1, pod=1, to=1, ttft_s=9.0)  # met it, late
    come(world, ledger, 2, pod=1, to=1, ttft_s=0.5)  # met it, in time
    come(world, ledger, 3, pod=1, to=0, ttft_s=0.1)  # kept away
    come(world, ledger, 4, pod=1, to=None, ttft_s=None)  # kept away, by refusing
    come(world, ledger, 5, pod=0, to=1, ttft_s=9.0)  # sent there by us: not affected
    measures = ledger.measures()
    every = measures.all_kinds
    assert (every.affected, every.untouched, every.saved) == (4, 2, 3)
    assert (every.i1, every.i3) == (0.5, 0.75)
    assert (measures.owed, measures.within_slo, measures.goodput) == (5, 2, 0.4)
    assert list(measures.kinds) == ["step"]


def test_a_request_that_met_the_fault_and_was_tried_again_was_touched_and_may_be_saved() -> None:
    world, ledger = ledger_of(STEP)
    world.clock.run_until(150.0)
    arrival = arrival_of(pod=1)
    ledger.arrived(arrival)
    for attempt, pod in ((1, 1), (2, 0)):
        ledger.touched(arrival, world.send(pod, arrival, attempt, Heard(world)))
    ledger.served(arrival, 0.5)
    measures = ledger.measures()
    assert (measures.all_kinds.i1, measures.all_kinds.i3) == (0.0, 1.0)
    assert (measures.attempts, measures.retried, measures.per_pod) == (2, 1, (1, 1, 0))


def test_good_is_what_would_not_have_failed_on_its_own() -> None:
    world, ledger = ledger_of(Fault(Kind.ERRORS, (1,), 100.0, 200.0, 1.0, 1.0))
    world.profile = msgspec.structs.replace(world.profile, errors=0.001)
    world.clock.run_until(150.0)
    for number, arrival in enumerate(
        (
            arrival_of(1, 150.0, pod=0),
            arrival_of(2, 150.0, pod=0, poisoned=True),
            arrival_of(3, 150.0, pod=0, error_u=0.0005),
            arrival_of(4, 150.0, pod=1),
        )
    ):
        ledger.arrived(arrival)
        ledger.rejected(arrival, "open" if number else "full")
    measures = ledger.measures()
    assert (measures.good, measures.good_rejected, measures.d3) == (1, 1, 1.0)
    assert (measures.owed, measures.requests) == (3, 4), "what is poisoned is owed nothing"
    assert measures.rejected == {"full": 1, "open": 3}


TRIPS = [
    # engine and time of the trip, and whether it is false
    ((1, 99.0), True),
    ((1, 100.0), False),
    ((1, 150.0), False),
    ((1, 200.0 + GRACE_S), False),
    ((1, 200.1 + GRACE_S), True),
    ((0, 150.0), True),
]


@pytest.mark.parametrize(("where", "false"), TRIPS, ids=str)
def test_a_trip_is_false_where_no_fault_is_or_was_shortly_before(where: tuple[int, float], false: bool) -> None:
    _, ledger = ledger_of(STEP)
    pod, at = where
    ledger.moved(pod, "closed", "open", at, "fast", "words")
    measures = ledger.measures()
    assert (measures.trips, measures.false_trips) == (1, int(false))
    assert measures.d2 == float(false)
    assert measures.windows_opened == int(false)
    assert measures.moves[0].evidence == "words"


def test_a_cold_tail_counts_as_fault_until_it_has_decayed() -> None:
    _, ledger = ledger_of(Fault(Kind.RELOAD, (1,), 100.0, 120.0, 10.0))
    for at in (150.0, 194.0, 214.9, 215.1):
        ledger.moved(1, "closed", "open", at)
        ledger.moved(1, "open", "closed", at + 0.01)
    assert ledger.measures().false_trips == 1


def test_healthy_windows_are_those_without_a_fault_and_its_grace_for_each_sidecar() -> None:
    _, ledger = ledger_of(STEP, sidecars=2)
    # 40 windows of 10 s on each of three engines, less those from 100 to 220 s (where the grace ends, within a window).
    assert ledger.measures().healthy_windows == 2 * (3 * 40 - 13)


def test_a_failed_probe_is_no_trip_but_a_healthy_window_with_an_opening_all_the_same() -> None:
    _, ledger = ledger_of()
    ledger.moved(0, "closed", "open", 11.0)
    ledger.moved(0, "open", "half_open", 25.0)
    ledger.moved(0, "half_open", "open", 26.0)
    measures = ledger.measures()
    assert (measures.trips, measures.windows_opened, measures.d1) == (1, 2, 2 / 120)


def episode(moves: Iterable[tuple[str, str, float]]) -> Measures:
    _, ledger = ledger_of(STEP)
    for old, new, at in moves:
        ledger.moved(1, old, new, at)
    return ledger.measures()


def test_detection_is_from_the_begin_and_recovery_from_the_end() -> None:
    measures = episode(
        [
            ("closed", "open", 107.0),
            ("open", "half_open", 130.0),
            ("half_open", "open", 131.0),
            ("open", "half_open", 205.0),
            ("half_open", "closed", 212.0),
        ]
    )
    assert (measures.detect_median_s, measures.recover_median_s) == (7.0, 12.0)
    assert (measures.all_kinds.i4, measures.reopens, measures.probes_failed) == (1.0, 0.0, 1)


def test_a_breaker_that_closed_before_the_end_has_nothing_to_recover_from() -> None:
    assert episode([("closed", "open", 107.0), ("open", "closed", 150.0)]).recover_median_s == 0.0


def test_one_that_never_closes_is_told_apart_and_counts_until_the_end() -> None:
    measures = episode([("closed", "open", 107.0)])
    assert (measures.recover_median_s, measures.never_closed) == (END - 200.0, 1)


def test_opening_again_within_an_episode_is_flapping() -> None:
    moves = [("closed", "open", 107.0), ("open", "closed", 120.0)] * 3
    assert episode(moves).reopens == 2.0


def test_an_episode_without_a_trip_is_not_found() -> None:
    measures = episode([])
    assert (measures.all_kinds.i4, measures.detect_median_s, measures.recover_median_s) == (0.0, None, None)
    assert measures.reopens is None


def test_i2_counts_from_the_first_opening_of_that_engine_s_breaker() -> None:
    world, ledger = ledger_of(STEP)
    world.clock.run_until(120.0)
    come(world, ledger, 1, pod=1, to=1, ttft_s=9.0)
    ledger.moved(1, "closed", "open", 121.0)
    world.clock.run_until(130.0)
    come(world, ledger, 2, pod=1, to=0, ttft_s=0.1)
    come(world, ledger, 3, pod=1, to=1, ttft_s=9.0)  # a probe
    every = ledger.measures().all_kinds
    assert (every.i1, every.i2) == (1 / 3, 1 / 2)


def test_a_fault_of_every_engine_at_once_has_its_own_figures_only() -> None:
    world, ledger = ledger_of(STEP, Fault(Kind.OUTAGE, (0, 1, 2), 300.0, 345.0))
    world.clock.run_until(150.0)
    come(world, ledger, 1, pod=1, to=0, ttft_s=0.1)
    world.clock.run_until(310.0)
    come(world, ledger, 2, pod=1, to=0, ttft_s=None)
    ledger.moved(0, "closed", "open", 311.0)
    measures = ledger.measures()
    assert (measures.all_kinds.affected, measures.all_kinds.i1) == (1, 1.0)
    assert (measures.every_kind.affected, measures.kinds["outage"].i1) == (2, 0.0)
    assert (measures.everywhere, measures.detect_median_s) == ({"outage": 1}, 11.0)
    assert (measures + measures).all_kinds.affected == 2


def test_sidecars_have_episodes_of_their_own() -> None:
    _, ledger = ledger_of(STEP, sidecars=2)
    ledger.moved(1, "closed", "open", 110.0, sidecar=1)
    measures = ledger.measures()
    assert (measures.all_kinds.episodes, measures.all_kinds.tripped, measures.all_kinds.i4) == (2, 1, 0.5)


def test_nothing_of_the_warm_up_is_measured() -> None:
    world, ledger = ledger_of(STEP, begin=90.0)
    world.clock.run_until(50.0)
    come(world, ledger, 1, pod=0, to=0, ttft_s=9.0)
    ledger.moved(0, "closed", "open", 50.0)
    ledger.tripped("session")
    measures = ledger.measures()
    assert (measures.requests, measures.trips, measures.attempts, measures.others_tripped) == (0, 0, 0, {})
    assert measures.goodput is None


def test_runs_add_up() -> None:
    one = episode([("closed", "open", 107.0), ("open", "closed", 150.0)])
    both = one + one
    assert (both.trips, both.all_kinds.episodes, both.all_kinds.detect_s) == (2, 2, (7.0, 7.0))
    assert both.healthy_windows == 2 * one.healthy_windows
    assert both.kinds["step"] == one.kinds["step"] + one.kinds["step"]
    assert one + Measures() == one
    assert Measures() + Measures() == Measures()
    assert sum([one.kinds["step"]], Tally()) == one.kinds["step"]


def test_quantiles_of_the_first_token_are_right_to_two_percent() -> None:
    world, ledger = ledger_of()
    for number in range(1, 1001):
        come(world, ledger, number, pod=0, to=0, ttft_s=number / 1000)
    measures = ledger.measures()
    for quantile in (0.1, 0.5, 0.99):
        assert measures.ttft_s(quantile) == pytest.approx(quantile, rel=0.02)
    assert Measures().ttft_s(0.5) is None


def test_a_row_names_every_column() -> None:
    row = episode([("closed", "open", 107.0)]).row()
    assert row["trips"] == 1
    assert row["i4_pct"] == 100.0
    assert set(row) >= {"d1_pct", "d3_pct", "i1_pct", "i2_pct", "i3_pct", "detect_s", "recover_s", "goodput_pct"}
