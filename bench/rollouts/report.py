"""The rows as tables, on a terminal and as the generated parts of docs/canary.md, and what must hold."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.breaker_ab.stats import markdown, wilson
from bench.rollouts.kinds import World
from bench.rollouts.play import Played, Scenario
from bench.rollouts.scenarios import SCENARIOS

MOST_FALSE = 0.01
LEAST_CAUGHT = 0.99
MUST_CATCH = ("slow2x", "errors5")
ORDINARY = World()


def text(rows: Sequence[Played]) -> str:
    """All tables."""
    return "\n".join(f"## {name}\n\n{part}" for name, part in parts(rows).items())


def parts(rows: Sequence[Played]) -> dict[str, str]:
    """Bad canaries, good ones in the ordinary world, and in others."""
    by = {name: [row for row in rows if row.scenario == name] for name in SCENARIOS}
    there = {name: found for name, found in by.items() if found}
    return {
        "ordinary": _table(there, (name for name in there if "/" not in name)),
        "others": _table(there, (name for name in there if "/" in name)),
        "aims": _aims(there),
    }


def write(rows: Sequence[Played], document: Path) -> None:
    """Fills the document's parts. ValueError if it has no place for one."""
    said = document.read_text()
    for name, part in parts(rows).items():
        begin, end = f"<!-- generated: {name} -->", f"<!-- end: {name} -->"
        before, began, after_begin = said.partition(begin)
        _, ended, after = after_begin.partition(end)
        if not began or not ended:
            raise ValueError(f"{document}: no place between {begin} and {end}")
        said = f"{before}{begin}\n\n{part.strip()}\n\n{end}{after}"
    document.write_text(said)


def summary(rows: Sequence[Played]) -> list[dict[str, object]]:
    """A scenario's rollouts as one object, for who draws their own table."""
    made: list[dict[str, object]] = []
    for name in SCENARIOS:
        found = [row for row in rows if row.scenario == name]
        if not found:
            continue
        seeds = [row.seed for row in found]
        failed = sorted(row.samples for row in found if row.end == "failed" and row.step == 0)
        made.append(
            {
                "scenario": name,
                "what": SCENARIOS[name].what,
                "rollouts": len(found),
                "seeds": [min(seeds), max(seeds)],
                "failed": sum(row.end == "failed" for row in found),
                "failed_in_first_step": len(failed),
                "failed_within_its_samples": sum(_in_time(row) for row in found),
                "promoted": sum(row.end == "promoted" for row in found),
                "held": sum(row.end == "held" for row in found),
                "samples_to_fail": {q: _at(failed, int(q) / 100) for q in ("50", "90", "99")},
                "harmed": {q: _at(sorted(row.harmed for row in found), int(q) / 100) for q in ("50", "95")},
                "took_s": {q: _at(sorted(row.took_s for row in found), int(q) / 100) for q in ("50", "95")},
                "unclear_s": sum(row.unclear for row in found) / len(found),
            }
        )
    return made


def broken(rows: Sequence[Played]) -> list[str]:
    """Why a look at few rollouts says that something is wrong: for a gate."""
    found = []
    for name, scenario in SCENARIOS.items():
        ours = [row for row in rows if row.scenario == name]
        failed = sum(row.end == "failed" for row in ours)
        if ours and not scenario.bad and wilson(failed, len(ours))[0] > MOST_FALSE:
            found.append(f"{name}: {failed} of {len(ours)} good canaries were taken back")
        caught = sum(row.end == "failed" and row.step == 0 for row in ours)
        if ours and name in MUST_CATCH and wilson(caught, len(ours))[1] < LEAST_CAUGHT:
            found.append(f"{name}: {caught} of {len(ours)} were caught in the first step")
    return found


def _table(there: dict[str, list[Played]], names: Iterable[str]) -> str:
    rows = []
    for name in names:
        scenario, found = SCENARIOS[name], there[name]
        count = len(found)
        failed = [row for row in found if row.end == "failed"]
        first = [row for row in failed if row.step == 0]
        low, high = wilson(len(failed), count)
        harmed = sorted(row.harmed for row in found)
        samples = sorted(row.samples for row in failed)
        rows.append(
            (
                scenario.what,
                f"{count:,}",
                f"{100 * len(failed) / count:.1f} ({100 * low:.1f}-{100 * high:.1f})",
                f"{100 * len(first) / count:.1f}",
                _percent(sum(row.end == "promoted" for row in found), count),
                _percent(sum(row.end == "held" for row in found), count),
                f"{_at(samples, 0.5):,.0f} / {_at(samples, 0.95):,.0f}" if scenario.bad and samples else "-",
                f"{_at(harmed, 0.5):,.0f} / {_at(harmed, 0.95):,.0f}" if scenario.bad else "-",
            )
        )
    heads = [
        "canary",
        "rollouts",
        "taken back %",
        "in the first step %",
        "promoted %",
        "left to people %",
        "its answers until then, 50 / 95 %",
        "harmed, 50 / 95 %",
    ]
    return markdown(heads, rows)


def _aims(there: dict[str, list[Played]]) -> str:
    rows = []
    for name, found in there.items():
        failed = sum(row.end == "failed" for row in found)
        if not SCENARIOS[name].bad and SCENARIOS[name].world == ORDINARY:
            rate = failed / len(found)
            rows.append(
                (f"false rollbacks: {SCENARIOS[name].what}", "<= 1 %", f"{100 * rate:.2f} %", _met(rate <= MOST_FALSE))
            )
        if name in MUST_CATCH:
            rate = sum(_in_time(row) for row in found) / len(found)
            rows.append(
                (
                    f"caught within the first step's samples: {SCENARIOS[name].what}",
                    ">= 99 %",
                    f"{100 * rate:.2f} %",
                    _met(rate >= LEAST_CAUGHT),
                )
            )
    return markdown(["figure", "aim", "measured", ""], rows)


def _in_time(row: Played) -> bool:
    """Caught before a step of its length, or of its samples, would have been over, whichever is later."""
    scenario: Scenario = SCENARIOS[row.scenario]
    first = scenario.plan.steps[0]
    return row.end == "failed" and row.step == 0 and (row.samples <= first.min_samples or row.took_s <= first.min_s)


def _met(met: bool) -> str:
    return "met" if met else "MISSED"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}"


def _at(values: Sequence[float], q: float) -> float:
    return values[min(len(values) - 1, int(q * len(values)))] if values else 0.0
