"""Statistics, schedule and report over made-up samples."""

from pathlib import Path

import pytest

from bench.compare import tables
from bench.compare.aims import verdicts
from bench.compare.arms import arms
from bench.compare.kinds import KINDS
from bench.compare.load import Times, Window
from bench.compare.measure import Plan, schedule
from bench.compare.report import text, write
from bench.compare.results import Memory, Results, Sample, from_json, to_json


def sample(arm: str, kind: str, number: int, us: float, *, p99: float = 100.0, void: str = "") -> Sample:
    times = {name: Times(1000, p99 / 2, p99, p99, p99) for name in ("request_us", "first_us", "delta_us")}
    window = Window(1.0, 1000, 1000, us / 1000, streams=10, even_streams=10, times=times)
    return Sample(arm, kind, number, window, KINDS[kind].unit, void)


def results(*samples: Sample, memory: tuple[Memory, ...] = ()) -> Results:
    names = {s.arm: f"what {s.arm} is" for s in samples}
    return Results(
        {"CPU": "one"}, "make bench", 3, 1.0, names, {}, {"litellm": "did not install"}, "wrk", [*samples], [*memory]
    )


def test_ratios_are_taken_within_a_round() -> None:
    """A machine that halves its speed in the second round changes no ratio."""
    found = results(
        *(sample("sidecar", "requests", n, 50.0 * (n + 1)) for n in range(3)),
        *(sample("envoy", "requests", n, 100.0 * (n + 1)) for n in range(3)),
    ).ratio("sidecar", "envoy", "requests")
    assert found is not None
    assert (found.median, found.least, found.most, found.rounds) == pytest.approx((0.5, 0.5, 0.5, 3))


def test_void_windows_and_lone_rounds_are_in_no_ratio() -> None:
    made = results(
        sample("sidecar", "requests", 0, 50.0),
        sample("sidecar", "requests", 1, 500.0, void="starved"),
        sample("sidecar", "requests", 2, 900.0),
        sample("envoy", "requests", 0, 100.0),
        sample("envoy", "requests", 1, 100.0),
    )
    found = made.ratio("sidecar", "envoy", "requests")
    assert found is not None
    assert (found.median, found.rounds) == pytest.approx((0.5, 1))


def test_added_time_is_over_the_direct_line_of_the_round() -> None:
    made = results(
        sample("direct", "first", 0, 0.0, p99=40.0),
        sample("direct", "first", 1, 0.0, p99=100.0),
        sample("sidecar", "first", 0, 10.0, p99=240.0),
        sample("sidecar", "first", 1, 10.0, p99=300.0),
    )
    found = made.added_us("sidecar", "first", "first_us", "p99")
    assert found is not None
    assert (found.least, found.most) == (200.0, 200.0)


def test_aims_are_met_missed_or_not_measured() -> None:
    made = results(
        sample("sidecar", "requests", 0, 60.0),
        sample("envoy", "requests", 0, 100.0),
        sample("sidecar", "paced", 0, 90.0),
        sample("envoy", "paced", 0, 100.0),
        memory=(Memory("sidecar", 1000, 50 * 1024, 51 * 1024, 51 * 1024 + 20_000),),
    )
    met = {(v.what, v.met) for v in verdicts(made)}
    assert ("CPU per request / Envoy's, saturated", True) in met
    assert ("CPU per request / Envoy's, at 500 requests/s", False) in met
    assert ("CPU per chunk / nginx's", None) in met
    assert ("resident memory, idle", True) in met
    assert ("resident memory per idle stream", False) in met


def test_results_are_the_same_after_json() -> None:
    made = results(sample("sidecar", "streams", 0, 10.0), memory=(Memory("sidecar", 1, 2, 3, 4),))
    assert from_json(to_json(made)) == made


def test_every_kind_has_a_table_and_what_is_missing_is_told() -> None:
    samples = [sample(arm, kind, 0, 10.0) for kind in KINDS for arm in ("direct", "sidecar", "envoy", "nginx")]
    made = results(*samples, memory=(Memory("sidecar", 1, 2, 3, 4),))
    assert len(tables.figures(made)) == len(KINDS) + 1
    assert "did not install" in text(made)


def test_only_the_marked_parts_of_a_document_are_written(tmp_path: Path) -> None:
    document = tmp_path / "performance.md"
    made = results(sample("sidecar", "requests", 0, 10.0), sample("envoy", "requests", 0, 20.0))
    write(made, document)
    people = document.read_text() + "\n## What was tried\n\nMuch.\n"
    document.write_text(people)
    write(made, document)
    assert document.read_text() == people
    document.write_text("no places")
    with pytest.raises(ValueError, match="no place between"):
        write(made, document)


def test_every_arm_is_first_in_some_round_and_others_run_in_every_other() -> None:
    chosen = arms({"here": "python"})
    plan = Plan(chosen, list(KINDS), len(chosen), 1.0, 0, 1)
    windows = schedule(plan, list(chosen), list(KINDS))
    firsts = [
        next(arm for number, kind, arm in windows if (number, kind) == (n, "requests")) for n in range(plan.rounds)
    ]
    every_round = [name for name, arm in chosen.items() if arm.every_round]
    assert set(every_round) <= set(firsts)
    assert {number for number, _, arm in windows if arm == "litellm"} == set(range(0, plan.rounds, 2))
    assert {kind for _, kind, arm in windows if arm == "envoy-log"} == {"requests", "paced"}
