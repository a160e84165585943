"""The rules to beat open when their documentation says, not before, and recover; the tables count right."""

from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from bench.breaker_ab import report
from bench.breaker_ab.arms import ARMS
from bench.breaker_ab.guards import (
    CLOSED,
    HALF_OPEN,
    OPEN,
    Alarms,
    Ejection,
    Formula,
    Guard,
    Linkerd,
    Resilience4j,
    Sweep,
)
from bench.breaker_ab.pooled import Pooled
from bench.breaker_ab.rows import Row, Setting, Task, line, once, read
from bench.breaker_ab.scenarios import BEGIN_S, END_S, EVALUATION, QUIET, SCENARIOS, THIRTEEN, TUNING
from bench.breaker_ab.spot import Dspot, Spot, pareto
from bench.breaker_ab.stats import markdown, wilson
from sidecar.core.detection import Counts
from sidecar.simulate.ledger import Measures, Move, Tally
from sidecar.simulate.run import simulate

Moves = list[tuple[int, str, str, float]]


class Log:
    """What moved."""

    def __init__(self) -> None:
        self.moves: Moves = []

    def __call__(self, pod: int, old: str, new: str, at: float, why: str) -> None:
        self.moves.append((pod, old, new, at))


@pytest.fixture
def log() -> Log:
    return Log()


def call(guard: Guard, now: float, ok: bool = True, ttft_s: float | None = 0.1) -> bool:
    """One request that ends at once; False: not admitted."""
    if not guard.admits(now):
        return False
    permit = guard.sent(now)
    if ttft_s is not None:
        guard.first(permit, now, ttft_s)
    guard.ended(permit, now, ok, ttft_s, ttft_s or 0.0)
    return True


def test_no_rule_never_opens(log: Log) -> None:
    guard = Guard(0, log)
    for now in range(1000):
        assert call(guard, now, ok=False, ttft_s=None)
    assert not log.moves


def test_a_permit_of_before_the_trip_changes_nothing(log: Log) -> None:
    guard = Linkerd(0, log, Random(1), failures=1)
    late = guard.sent(0.0)
    call(guard, 0.0, ok=False)
    assert guard.state == OPEN
    guard.ended(late, 0.5, True, 0.1, 0.5)
    guard.ended(late, 0.5, False, None, 0.5)
    assert guard.state == OPEN and len(log.moves) == 1


# Linkerd


def test_linkerd_opens_at_the_seventh_in_a_row(log: Log) -> None:
    guard = Linkerd(0, log, Random(1))
    for _ in range(6):
        call(guard, 0.0, ok=False)
    call(guard, 0.0)
    for _ in range(6):
        call(guard, 0.0, ok=False)
    assert guard.state == CLOSED
    call(guard, 0.0, ok=False)
    assert guard.state == OPEN


def test_linkerd_lets_one_through_and_doubles_its_wait(log: Log) -> None:
    guard = Linkerd(0, log, Random(1), failures=1)
    call(guard, 0.0, ok=False)
    waits, now = [], 0.0
    for _ in range(9):
        waits.append(guard.until - now)
        assert not guard.admits(guard.until - 0.001)
        now = guard.until
        permit = guard.sent(now)
        assert guard.state == HALF_OPEN
        assert not guard.admits(now), "one trial at a time"
        guard.ended(permit, now, False, None, 1.0)
    for wait, least in zip(waits, (1, 2, 4, 8, 16, 32, 60, 60, 60), strict=True):
        assert least <= wait <= least * 1.5
    assert call(guard, guard.until)
    assert guard.state == CLOSED


def test_linkerd_counts_slow_ones_where_told(log: Log) -> None:
    guard, told = Linkerd(0, log, Random(1)), Linkerd(0, log, Random(1), slow_s=1.0)
    for _ in range(7):
        call(guard, 0.0, ttft_s=5.0)
        call(told, 0.0, ttft_s=5.0)
    assert (guard.state, told.state) == (CLOSED, OPEN)


# resilience4j


def test_resilience4j_waits_for_a_hundred_calls(log: Log) -> None:
    guard = Resilience4j(0, log)
    for _ in range(99):
        call(guard, 0.0, ok=False)
    assert guard.state == CLOSED
    call(guard, 0.0, ok=False)
    assert guard.state == OPEN


def test_resilience4j_opens_at_half_of_its_window(log: Log) -> None:
    guard = Resilience4j(0, log)
    for number in range(100):
        call(guard, 0.0, ok=number >= 49)
    assert guard.state == CLOSED
    for _ in range(200):
        call(guard, 0.0)
    for _ in range(49):
        call(guard, 0.0, ok=False)
    assert guard.state == CLOSED, "what left the window does not count"
    call(guard, 0.0, ok=False)
    assert guard.state == OPEN


@pytest.mark.parametrize(("failures", "state"), [(4, CLOSED), (5, OPEN)])
def test_resilience4j_judges_ten_trials(log: Log, failures: int, state: str) -> None:
    guard = Resilience4j(0, log, least=1)
    call(guard, 0.0, ok=False)
    assert not guard.admits(59.9)
    permits = []
    for _ in range(10):
        assert guard.admits(60.0)
        permits.append(guard.sent(60.0))
    assert not guard.admits(60.0)
    for number, permit in enumerate(permits):
        assert guard.state == HALF_OPEN
        guard.ended(permit, 61.0, number >= failures, 0.1, 1.0)
    assert guard.state == state


def test_resilience4j_slow_calls_have_a_rate_of_their_own(log: Log) -> None:
    guard = Resilience4j(0, log, window=20, least=10, slow_s=1.0, slow_ratio=0.5)
    for number in range(9):
        call(guard, 0.0, ttft_s=2.0 if number % 2 else 0.1)
    assert guard.state == CLOSED
    call(guard, 0.0, ttft_s=2.0)
    assert guard.state == OPEN


# Envoy


def run(sweep: Sweep, pod: int, now: float, good: int, bad: int) -> None:
    for _ in range(good):
        call(sweep.guards[pod], now)
    for _ in range(bad):
        call(sweep.guards[pod], now, ok=False)


def test_envoy_ejects_at_five_in_a_row_and_takes_back_at_a_sweep(log: Log) -> None:
    sweep = Sweep(10, log, Ejection())
    sweep.tick(0.0)
    run(sweep, 3, 1.0, 0, 4)
    assert not log.moves
    run(sweep, 3, 1.0, 0, 1)
    assert sweep.guards[3].state == OPEN and not sweep.guards[3].admits(2.0)
    for now in range(2, 31):
        sweep.tick(float(now))
        assert sweep.guards[3].state == OPEN
    for now in range(31, 41):
        sweep.tick(float(now))
    assert log.moves == [(3, CLOSED, OPEN, 1.0), (3, OPEN, CLOSED, 40.0)]


def test_envoy_ejects_longer_each_time_and_forgives(log: Log) -> None:
    sweep = Sweep(10, log, Ejection())
    host = sweep.hosts[0]
    for count in (1, 2, 3):
        run(sweep, 0, 0.0, 0, 5)
        assert host.until == 30.0 * count
        host.back(0.0)
    for now in range(31):
        sweep.tick(float(now))
    assert host.ejections == 0


def test_envoy_ejects_one_of_ten_at_most_by_default(log: Log) -> None:
    sweep = Sweep(9, log, Ejection())
    for pod in range(3):
        run(sweep, pod, 0.0, 0, 5)
    assert [guard.state for guard in sweep.guards[:3]] == [OPEN, CLOSED, CLOSED]


def test_envoy_panics_under_half(log: Log) -> None:
    sweep = Sweep(4, log, Ejection(max_ejection_ratio=1.0))
    run(sweep, 0, 0.0, 0, 5)
    run(sweep, 1, 0.0, 0, 5)
    assert not sweep.guards[0].admits(0.0)
    run(sweep, 2, 0.0, 0, 5)
    assert all(guard.admits(0.0) for guard in sweep.guards)


def test_envoy_success_rate_wants_five_hosts_with_a_hundred(log: Log) -> None:
    sweep = Sweep(6, log, Ejection(consecutive_5xx=1000))
    sweep.tick(0.0)
    for pod in range(6):
        run(sweep, pod, 1.0, 80 if pod == 0 else 99, 20 if pod == 0 else 0)
    sweep.tick(10.0)
    assert not log.moves, "99 are not enough, and one host with 100 is none to compare"
    for pod in range(6):
        run(sweep, pod, 11.0, 80 if pod == 0 else 100, 20 if pod == 0 else 0)
    sweep.tick(20.0)
    assert log.moves == [(0, CLOSED, OPEN, 20.0)]


def test_envoy_failure_percentage(log: Log) -> None:
    never = 1_000_000
    sweep = Sweep(5, log, Ejection(never, success_rate_minimum_hosts=never, failure_ratio=0.3))
    sweep.tick(0.0)
    for pod in range(5):
        run(sweep, pod, 1.0, 71 if pod else 70, 29 if pod else 30)
    sweep.tick(10.0)
    assert log.moves == [(0, CLOSED, OPEN, 10.0)]


# The formula


def minute(guard: Formula, begin: int, seconds: int, ttft_s: float, *, bad: int = 0) -> None:
    for now in range(begin, begin + seconds):
        for number in range(10):
            if guard.admits(now):
                call(guard, now, ok=number >= bad, ttft_s=ttft_s)
        guard.tick(now)


def test_the_fixed_threshold_wants_slowness_and_failures(log: Log) -> None:
    guard = Formula(0, log, fixed_s=0.2)
    minute(guard, 0, 60, 5.0)
    assert not log.moves, "slow, but nothing failed"
    minute(guard, 60, 120, 0.1, bad=5)
    assert log.moves[:1] == [(0, CLOSED, OPEN, 60.0)], "what was slow is remembered, and four failed in that second"
    other = Formula(0, log, fixed_s=0.2)
    log.moves.clear()
    minute(other, 0, 60, 0.1, bad=5)
    assert not log.moves, "failing, but not slow"


def test_slow_ones_count_where_told(log: Log) -> None:
    guard = Formula(0, log, fixed_s=0.2, slow_counts=True)
    minute(guard, 0, 1, 0.21)
    assert log.moves == [(0, CLOSED, OPEN, 0.0)]


def test_the_formula_learns_its_line_before_it_trips(log: Log) -> None:
    guard = Formula(0, log, kappa=1.82, slow_counts=True)
    minute(guard, 0, 29, 0.1)
    call(guard, 29.0, ttft_s=9.0)
    guard.tick(29.0)
    assert not log.moves, "the thirtieth value is judged by the others only from then on"
    guard = Formula(0, log, kappa=1.82)
    chance = Random(1)
    for now in range(100):
        minute(guard, now, 1, 0.1 + 0.01 * chance.random())
    assert not log.moves
    minute(guard, 100, 1, 5.0, bad=4)
    assert log.moves == [(0, CLOSED, OPEN, 100.0)]


def test_the_formula_recovers_by_more_than_95_of_100(log: Log) -> None:
    guard = Formula(0, log, fixed_s=0.2, slow_counts=True)
    minute(guard, 0, 1, 1.0)
    assert not guard.admits(29.9)
    for _ in range(19):
        assert call(guard, 30.0)
    assert guard.state == HALF_OPEN
    call(guard, 30.0)
    assert guard.state == CLOSED
    minute(guard, 31, 1, 1.0)
    for number in range(20):
        call(guard, 61.0, ok=number > 0)
    assert guard.state == OPEN, "19 of 20 is not more than 0.95"


# Extremes


def test_pareto_finds_what_made_the_peaks() -> None:
    chance = Random(7)
    for gamma, sigma in ((0.3, 2.0), (0.0, 1.0), (-0.2, 1.0)):
        peaks = []
        for _ in range(4000):
            u = chance.random()
            peaks.append(sigma / gamma * (u**-gamma - 1) if gamma else chance.expovariate(1 / sigma))
        found = pareto(peaks)
        assert found == pytest.approx((gamma, sigma), abs=0.1)


@pytest.mark.parametrize("make", [Spot, Dspot])
def test_alarms_are_as_rare_as_asked(make: type[Spot] | type[Dspot]) -> None:
    chance = Random(3)
    detector = make(q=1e-3)
    alarms = sum(detector.extreme(chance.lognormvariate(0, 0.5)) for _ in range(20_000))
    assert 5 <= alarms <= 80, "20 by the letter; calibrated on 500 values it is a few times that"
    assert detector.extreme(100.0)


def test_only_the_one_with_drift_follows_a_drift() -> None:
    chance, found = Random(3), []
    for detector in (Spot(), Dspot()):
        found.append(sum(detector.extreme(1 + n / 2000 + 0.1 * chance.gauss(0, 1)) for n in range(10_000)))
    assert found[0] > 1000 > 50 > found[1]


def test_alarms_open_when_they_come_together(log: Log) -> None:
    guard = Alarms(0, log, Spot(), needed=2)
    call(guard, 0.0, ok=False, ttft_s=None)
    for _ in range(19):
        call(guard, 0.0)
    assert guard.state == CLOSED
    call(guard, 0.0, ok=False, ttft_s=None)
    assert guard.state == CLOSED, "the first has left the window"
    call(guard, 0.0, ok=False, ttft_s=None)
    assert guard.state == OPEN and not guard.admits(9.9)
    for _ in range(3):
        assert call(guard, 10.0)
    assert guard.state == CLOSED


# Scenarios


@pytest.mark.parametrize("pods", [1, 3, 9])
@pytest.mark.parametrize("name", SCENARIOS)
def test_faults_are_within_the_measured_time_and_do_not_meet_on_a_pod(name: str, pods: int) -> None:
    scenario = SCENARIOS[name]
    for seed in range(20):
        chance = Random(seed)
        faults = scenario.faults(chance, pods) if scenario.faults is not None else []
        assert bool(faults) == (name not in QUIET)
        for fault in faults:
            assert BEGIN_S < fault.begin < fault.end <= fault.until < END_S
            assert fault.pods and set(fault.pods) <= set(range(pods))
        for pod in range(pods):
            ours = sorted((fault for fault in faults if pod in fault.pods), key=lambda fault: fault.begin)
            for one, other in pairwise(ours):
                assert one.until + 30 <= other.begin, "time to recover, or the second is no episode of its own"
        for bent in scenario.modifiers(chance) if scenario.modifiers is not None else []:
            assert BEGIN_S < bent.begin < bent.end <= END_S


def test_seeds_for_tuning_and_for_evaluation_are_apart() -> None:
    assert not set(TUNING) & set(EVALUATION)
    assert len(THIRTEEN) == 13


# Arms


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_settles_every_request_and_the_same_ones(name: str) -> None:
    """20 s of three pods, short: that it runs at all, and counts."""
    scenario = type(SCENARIOS["healthy"])("brief", seconds=20.0)
    m = simulate(ARMS[name].factory({}), scenario, 7, pods=3, rate=4.0, warmup_s=5.0)
    reference = simulate(ARMS["none"].factory({}), scenario, 7, pods=3, rate=4.0, warmup_s=5.0)
    assert m.requests == reference.requests > 0
    assert m.served + sum(m.failed.values()) + sum(m.rejected.values()) == m.requests
    assert m.good == reference.good


def test_pooled_sidecars_hear_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    heard, hear = set(), Pooled.hear

    def noted(self: Pooled, counts: list[Counts]) -> None:
        heard.add(self.context.number)
        hear(self, counts)

    monkeypatch.setattr(Pooled, "hear", noted)
    scenario = type(SCENARIOS["healthy"])("brief", seconds=20.0)
    simulate(ARMS["ours"].factory({}, pooled=True), scenario, 7, pods=3, sidecars=3, warmup_s=5.0)
    assert heard == {0, 1, 2}


def test_the_same_task_gives_the_same_bytes() -> None:
    task = Task("linkerd", "step", 3, Setting(rate=1.0, pods=3))
    first, second = once(task, {}), once(task, {})
    assert first.measures == second.measures


# Statistics and tables


@pytest.mark.parametrize(
    ("hits", "count", "low", "high"),
    [(0, 96, 0.0, 0.0385), (1, 96, 0.0018, 0.0567), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0), (0, 0, 0.0, 1.0)],
)
def test_wilson(hits: int, count: int, low: float, high: float) -> None:
    assert wilson(hits, count) == pytest.approx((low, high), abs=1e-4)


def row(arm: str, scenario: str, seed: int = 101, **counted: object) -> Row:
    return Row(Task(arm, scenario, seed, Setting()), 1.0, Measures(**counted))  # type: ignore[arg-type]


def test_the_table_adds_runs_up_and_leaves_out_what_is_not_of_the_thirteen() -> None:
    step = {"step": Tally(affected=1000, untouched=990, saved=999, episodes=1, tripped=1, detect_s=(2.0,))}
    rows = [
        row("ours", "step", 101, trips=3, false_trips=1, kinds=step, owed=100, within_slo=99),
        row("ours", "step", 102, trips=1, false_trips=0, kinds=step, owed=100, within_slo=97),
        row("ours", "several", 101, trips=5, false_trips=5, owed=100, within_slo=0),
    ]
    told = report.overall(rows)
    assert "| 1/4 | 25.0 (4.6-69.9) |" in told
    assert "| 99.00 |" in told and "| 99.90 |" in told and "| 98.00 |" in told
    assert "1, 102" not in report.text(rows) and "Seeds 101-102" in report.text(rows)


def test_goodput_is_compared_on_the_seeds_that_both_have() -> None:
    rows = [
        row("none", "surge", 101, owed=100, within_slo=90),
        row("none", "surge", 102, owed=100, within_slo=10),
        row("ours", "surge", 101, owed=100, within_slo=80),
    ]
    found = {verdict.what: verdict for verdict in report.verdicts(rows)}
    quiet = found["goodput under `none`, quiet scenarios"]
    assert quiet.found == "10.00 (surge)" and quiet.met is False


def test_the_gate_says_what_is_broken() -> None:
    good = {"step": Tally(affected=100, untouched=98, episodes=1, tripped=1)}
    bad = {"step": Tally(affected=100, untouched=96, episodes=1, tripped=1)}
    move = Move(0, 3, 10.0, "closed", "open", "fast", "5 of 9 bad", True)
    fine = [row("none", "step", owed=1000, within_slo=900), row("ours", "step", kinds=good, owed=1000, within_slo=899)]
    assert report.gate(fine) == []
    broken = [
        row("none", "step", owed=1000, within_slo=900),
        row("ours", "step", kinds=bad, owed=1000, within_slo=897, false_trips=1, trips=1, moves=(move,)),
    ]
    assert [why.split()[0] for why in report.gate(broken)] == ["1", "fast:", "I1", "goodput"]


def test_the_document_has_a_place_for_every_part(tmp_path: Path) -> None:
    document = tmp_path / "breaker.md"
    document.write_text((Path(__file__).parents[2] / "docs" / "breaker.md").read_text())
    other = Row(Task("ours", "step", 101, Setting(pods=3)), 1.0, Measures(owed=10, within_slo=9))
    rows = [row("none", "step", owed=10, within_slo=8), row("ours", "step", owed=10, within_slo=10), other]
    for _ in range(2):
        report.write(rows, document)
    said = document.read_text()
    assert said.count("### Chat, 10 requests/s and pod, 9 pods, 1 sidecar") == 1
    assert said.count("| **ours** | +20.00 |") == 1
    assert "3 pods, 1 sidecar | ours | 101 |" in said
    assert [each["goodput_pct"] for each in report.summary(rows)] == [80.0, 100.0, 90.0]
    document.write_text("nothing")
    with pytest.raises(ValueError, match="no place"):
        report.write(rows, document)


def test_rows_are_read_as_they_were_written_but_for_a_broken_last_line(tmp_path: Path) -> None:
    rows = [row("ours", "step", recover_s=(1.5,), kinds={"step": Tally(1, detect_s=(0.5,))}), row("none", "step")]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(map(line, rows)) + line(rows[0])[:-30])
    assert [*read(path)] == rows
    assert [*read(tmp_path / "none")] == []


def test_markdown() -> None:
    assert markdown(["a", "b"], [("1", "2")]) == "| a | b |\n|---|---|\n| 1 | 2 |\n"
