"""The rows as tables: all measures per arm, interception per fault, goodput per scenario, and the aims.

On a terminal all of them; in a document as its generated parts, between `<!-- generated: NAME -->` and `<!-- end: NAME
-->`: what is around them is written by people and left alone.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bench.breaker_ab.arms import ARMS
from bench.breaker_ab.rows import Row, Setting
from bench.breaker_ab.scenarios import QUIET, SCENARIOS, THIRTEEN
from bench.breaker_ab.stats import markdown, percent, seconds, wilson
from sidecar.simulate.ledger import Measures, Tally

KINDS = ("step", "ramp", "errors", "stall", "gray", "cold", "zone", "multi", "outage", "reload")
LARGE = 1000
"""Affected requests of an episode from which on I1 has an aim."""
REFERENCE = "none"
AIMED = ("ours", "ours+rescue")
PICTURES = """\
![false trips and goodput against interception, a dot per arm](breaker-arms.png)

![one run of each scenario: faults, breakers and failed requests per pod](breaker-incidents.png)
"""


def summed(rows: Iterable[Row]) -> Measures:
    return sum((row.measures for row in rows), Measures())


def settings(rows: Iterable[Row]) -> list[Setting]:
    return list(dict.fromkeys(row.task.setting for row in rows))


def text(rows: Sequence[Row]) -> str:
    """Everything, setting by setting."""
    parts = []
    for setting in settings(rows):
        ours = [row for row in rows if row.task.setting == setting]
        parts += [f"## {_title(setting)}\n", *_figures(ours)]
        parts += [f"Aims ({arm}):\n\n" + aims(ours, arm) for arm in AIMED if arm in _arms(ours)]
    return "\n".join(parts)


def write(rows: Sequence[Row], document: Path) -> None:
    """Fills the document's parts. ValueError if it has no place for one.

    The first setting is the one that has aims, and its tables come first.
    """
    said, found = document.read_text(), settings(rows)
    first = [row for row in rows if row.task.setting == found[0]]
    rest = []
    for setting in found[1:]:
        ours = [row for row in rows if row.task.setting == setting]
        rest += [f"### {_title(setting)}\n", *_figures(ours)]
    parts = {
        "aims": "\n".join(f"{_name(arm)}:\n\n" + aims(first, arm) for arm in AIMED if arm in _arms(first)),
        "figures": "\n".join([PICTURES, f"### {_title(found[0])}\n", *_figures(first)]),
        "settings": across(rows),
        "others": "\n".join(rest),
        "arms": markdown(["arm", "what"], [(_name(arm), ARMS[arm].what) for arm in _arms(rows)]),
    }
    for name, part in parts.items():
        begin, end = f"<!-- generated: {name} -->", f"<!-- end: {name} -->"
        before, began, after_begin = said.partition(begin)
        _, ended, after = after_begin.partition(end)
        if not began or not ended:
            raise ValueError(f"{document}: no place between {begin} and {end}")
        said = f"{before}{begin}\n\n{part.strip()}\n\n{end}{after}"
    document.write_text(said)


def summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """All seeds of an arm in a scenario as one object, for who draws their own table."""
    made = []
    for setting in settings(rows):
        for arm in _arms(rows):
            for scenario in SCENARIOS:
                some = [r for r in rows if (r.task.setting, r.task.arm, r.task.scenario) == (setting, arm, scenario)]
                if some:
                    m = summed(some)
                    seeds = sorted(row.task.seed for row in some)
                    i1 = {kind: None if tally.i1 is None else 100 * tally.i1 for kind, tally in m.kinds.items()}
                    what = {"arm": arm, "scenario": scenario, "seeds": seeds, "setting": msgspec.to_builtins(setting)}
                    made.append({**what, **m.row(), "i1_pct_by_fault": i1})
    return made


def across(rows: Sequence[Row]) -> str:
    """Ours in every setting, a line each."""
    header = ["traffic", "arm", "seeds", "D1 %", "D2 false / all", "D3 %", "I1 %", "I3 %", "detect s", "recover s"]
    header += ["goodput %", "less none's"]
    lines = []
    for setting in settings(rows):
        ours = [row for row in rows if row.task.setting == setting]
        reference = summed(row for row in ours if row.task.arm == REFERENCE).goodput
        for arm in [name for name in _arms(ours) if name in AIMED]:
            mine = [row for row in ours if row.task.arm == arm]
            m = summed(mine)
            every, good = m.all_kinds, m.goodput
            lines.append(
                (
                    str(setting),
                    arm,
                    _spans(sorted({row.task.seed for row in mine})),
                    percent(m.d1, 3),
                    f"{m.false_trips}/{m.trips}",
                    percent(m.d3, 3),
                    percent(every.i1, 2),
                    percent(every.i3, 2),
                    seconds(m.detect_median_s),
                    seconds(m.recover_median_s),
                    percent(good, 2),
                    "-" if good is None or reference is None else f"{100 * (good - reference):+.2f}",
                )
            )
    return markdown(header, lines)


def _figures(rows: Sequence[Row]) -> list[str]:
    """The tables of one setting."""
    scenarios = [name for name in SCENARIOS if any(row.task.scenario == name for row in rows)]
    seeds = _spans(sorted({row.task.seed for row in rows}))
    parts = [f"Seeds {seeds}; {len(rows)} runs, {sum(row.cpu_s for row in rows):.0f} s of CPU.\n"]
    parts += [overall(rows), "I1 by fault, in percent:\n", by_fault(rows)]
    parts += ["Goodput by scenario, in percent; all but `none` as the difference to it:\n", goodput(rows)]
    extra = [name for name in scenarios if name not in THIRTEEN]
    if extra and len(extra) < len(scenarios):
        parts.append(f"The first table is without {' and '.join(extra)}, the others are with them.\n")
    return parts


def overall(rows: Sequence[Row]) -> str:
    """The design's table, over its thirteen scenarios (or those of others, where none of these was run)."""
    header = ["arm", "runs", "D1 %", "D2 false / all", "D2 %, 95 % interval", "D3 %", "I1 %", "I2 %", "I3 %", "I4 %"]
    header += ["detect s", "recover s", "re-opens", "goodput %"]
    thirteen = [row for row in rows if row.task.scenario in THIRTEEN] or rows
    lines = []
    for arm in _arms(rows):
        mine = [row for row in thirteen if row.task.arm == arm]
        m = summed(mine)
        every = m.all_kinds
        low, high = wilson(m.false_trips, m.trips)
        lines.append(
            (
                _name(arm),
                str(len(mine)),
                percent(m.d1, 3),
                f"{m.false_trips}/{m.trips}",
                f"{percent(m.d2)} ({percent(low)}-{percent(high)})" if m.trips else "-",
                percent(m.d3, 3),
                percent(every.i1, 2),
                percent(every.i2, 2),
                percent(every.i3, 2),
                percent(every.i4),
                seconds(m.detect_median_s),
                seconds(m.recover_median_s),
                "-" if m.reopens is None else f"{m.reopens:.2f}",
                percent(m.goodput, 2),
            )
        )
    return markdown(header, lines)


def by_fault(rows: Sequence[Row]) -> str:
    """I1 of each kind of fault, each in its own scenario: where several pods are bad, there may be nowhere to go."""
    alone = [row for row in rows if row.task.scenario in KINDS]
    sums = {arm: summed(row for row in alone if row.task.arm == arm).kinds for arm in _arms(rows)}
    kinds = [kind for kind in KINDS if any(kind in found for found in sums.values())]
    lines = [(_name(arm), *(percent(found.get(kind, Tally()).i1) for kind in kinds)) for arm, found in sums.items()]
    return markdown(["arm", *kinds], lines)


def goodput(rows: Sequence[Row]) -> str:
    """Per scenario; the reference's as it is, the others' less the reference's where that was run."""
    names = [name for name in SCENARIOS if any(row.task.scenario == name for row in rows)]
    found = {arm: {name: _goodput(rows, arm, name) for name in names} for arm in _arms(rows)}
    base = found.get(REFERENCE, {})

    def cell(arm: str, name: str) -> str:
        value, reference = found[arm][name], base.get(name)
        if value is None or arm == REFERENCE or reference is None:
            return percent(value, 2)
        return f"{100 * (value - reference):+.2f}"

    return markdown(["arm", *names], [(_name(arm), *(cell(arm, name) for name in names)) for arm in found])


@dataclass(frozen=True)
class Verdict:
    """One aim. `met` None: nothing was run that tells."""

    what: str
    aim: str
    found: str
    met: bool | None


def verdicts(rows: Sequence[Row], arm: str = "ours") -> list[Verdict]:
    """What must be shown, as far as these rows (of one setting) go; over the thirteen, goodput in every scenario."""
    ours = [row for row in rows if row.task.arm == arm and row.task.scenario in THIRTEEN]
    m = summed(ours)
    low, high = wilson(m.false_trips, m.trips)
    large = sum((tally for row in ours for tally in row.measures.kinds.values() if _large(tally)), Tally())
    gray = m.kinds.get("gray", Tally())
    worst = {name: _behind(rows, arm, name) for name in SCENARIOS}
    quiet = {name: worst[name] for name in QUIET}
    return [
        _most("D1", m.d1, 0.0003, 3),
        _most("D2", m.d2, 0.013),
        _most("width of D2's interval", high - low if m.trips else None, 0.02),
        _most("D3", m.d3, 0.0002, 3),
        _least(f"I1 where an episode has >= {LARGE} affected", large.i1, 0.988, 2),
        _least("I3", m.all_kinds.i3, 0.999, 2),
        _least("I1, gray", gray.i1, 0.85),
        _behind_most("goodput under `none`, quiet scenarios", quiet, 0.001),
        _behind_most("goodput under `none`, any scenario", worst, 0.002),
        _at_most("recovery, median s", m.recover_median_s, 15.0),
        _at_most("re-opens per episode", m.reopens, 1.0),
    ]


def aims(rows: Sequence[Row], arm: str) -> str:
    words = {True: "met", False: "MISSED", None: "-"}
    return markdown(
        ["figure", "aim", "measured", ""], [(v.what, v.aim, v.found, words[v.met]) for v in verdicts(rows, arm)]
    )


def gate(rows: Sequence[Row], arm: str = "ours") -> list[str]:
    """What the small run must not break: no false trip, I1 >= 97 % on step, goodput >= none - 0.2 points."""
    ours = [row for row in rows if row.task.arm == arm]
    m = summed(ours)
    broken = [f"{move.why}: {move.evidence}" for move in m.moves]
    if m.false_trips:
        broken.insert(0, f"{m.false_trips} false trips")
    step = m.kinds.get("step", Tally())
    if step.i1 is not None and step.i1 < 0.97:
        broken.append(f"I1 on step is {percent(step.i1)} %, at least 97 is wanted")
    for name in SCENARIOS:
        behind = _behind(rows, arm, name)
        if behind is not None and behind > 0.002:
            broken.append(f"goodput in {name} is {100 * behind:.2f} points under no breaker")
    return broken


def _large(tally: Tally) -> bool:
    return tally.episodes > 0 and tally.affected >= LARGE * tally.episodes


def _goodput(rows: Iterable[Row], arm: str, scenario: str) -> float | None:
    return summed(row for row in rows if row.task.arm == arm and row.task.scenario == scenario).goodput


def _behind(rows: Sequence[Row], arm: str, scenario: str) -> float | None:
    """How far under the reference, on the runs that both have made; negative: above."""
    both = [row for row in rows if row.task.scenario == scenario]
    seeds = {row.task.seed for row in both if row.task.arm == arm}
    seeds &= {row.task.seed for row in both if row.task.arm == REFERENCE}
    fair = [row for row in both if row.task.seed in seeds]
    mine, reference = _goodput(fair, arm, scenario), _goodput(fair, REFERENCE, scenario)
    return None if mine is None or reference is None else reference - mine


def _most(what: str, value: float | None, aim: float, digits: int = 1) -> Verdict:
    aimed = f"<= {100 * aim:g} %"
    return Verdict(what, aimed, percent(value, digits) + " %" * (value is not None), _met(value, lambda v: v <= aim))


def _least(what: str, value: float | None, aim: float, digits: int = 1) -> Verdict:
    aimed = f">= {100 * aim:g} %"
    return Verdict(what, aimed, percent(value, digits) + " %" * (value is not None), _met(value, lambda v: v >= aim))


def _at_most(what: str, value: float | None, aim: float) -> Verdict:
    return Verdict(what, f"<= {aim:g}", "-" if value is None else f"{value:.2f}", _met(value, lambda v: v <= aim))


def _behind_most(what: str, behind: dict[str, float | None], aim: float) -> Verdict:
    known = {name: value for name, value in behind.items() if value is not None}
    aimed = f"<= {100 * aim:g} points"
    if not known:
        return Verdict(what, aimed, "-", None)
    name = max(known, key=known.__getitem__)
    return Verdict(what, aimed, f"{100 * known[name]:.2f} ({name})", known[name] <= aim)


def _met(value: float | None, fits: Callable[[float], bool]) -> bool | None:
    return None if value is None else fits(value)


def _arms(rows: Sequence[Row]) -> list[str]:
    run = {row.task.arm for row in rows}
    return [name for name in ARMS if name in run]


def _name(arm: str) -> str:
    return f"**{arm}**" if ARMS[arm].ours else arm


def _title(setting: Setting) -> str:
    said = str(setting)
    return said[0].upper() + said[1:]


def _spans(seeds: Sequence[int]) -> str:
    """101-105, 107."""
    spans: list[list[int]] = []
    for seed in seeds:
        if spans and seed == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], seed]
        else:
            spans.append([seed])
    return ", ".join("-".join(map(str, span)) for span in spans)
