"""The rows as tables, on a terminal and as the generated parts of docs/qos.md, and the aims."""

from collections.abc import Iterable, Sequence
from math import ceil
from pathlib import Path
from statistics import fmean

import msgspec

from bench.breaker_ab.stats import markdown
from bench.qos.hunt import CASES, WARMUP_S, WINDOW_S, Hunted
from bench.qos.rows import EVERYWHERE, FLOODS, NOWHERE, OURS, POLICIES, PRODUCT, Row
from bench.qos.stage import Counted, jain
from bench.qos.traffic import KINDS, PARTS, TENANTS
from sidecar.policy.schema import Admission

KEPT_AIM, JAIN_AIM, LOST_AIM = 0.999, 0.98, 0.01
WITHIN_AIM, TURNS_AIM = 0.95, 3
PASSED_AIM = ceil(1.0 / Admission().reserve) - 1
BUSY_AIM = 0.99
SCARCE = 0.9
"""Of a class that got more of what it asked for, who ends just after the time that is counted decides the index."""


class Table:
    """Rows by what was run: policy, load, flood; each a run per seed."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows: dict[tuple[str, float, str], dict[int, Counted]] = {}
        for row in rows:
            task = row.task
            self._rows.setdefault((task.policy, task.load, task.flood), {})[task.seed] = row.counted
        self.policies = [name for name in POLICIES if any(key[0] == name for key in self._rows)]
        self.loads = sorted({key[1] for key in self._rows})

    def runs(self, policy: str, load: float, flood: str) -> list[Counted]:
        found = self._rows.get((policy, load, flood), {})
        return [found[seed] for seed in sorted(found)]

    def pairs(self, policy: str, load: float, flood: str) -> list[tuple[Counted, Counted]]:
        """Without the flood and with it, on one seed."""
        alone, flooded = self._rows.get((policy, load, NOWHERE), {}), self._rows.get((policy, load, flood), {})
        return [(alone[seed], flooded[seed]) for seed in sorted(alone) if seed in flooded]


def attained(counted: Counted, kind: int) -> float:
    """Of the victims' requests of a class, those served within its SLA."""
    return counted.victims[kind].attained


def kept(alone: Counted, flooded: Counted, kind: int) -> float | None:
    """Of the victims' requests that are served in time without the flood, how many are with it: counts, so that what
    some gain and others lose evens out. None where nearly nothing is (less than 1 %): there is nothing to keep."""
    was = alone.victims[kind]
    if was.met < 0.01 * was.asked or not was.met:
        return None
    return flooded.victims[kind].met / was.met


def lost(alone: Counted, flooded: Counted) -> float | None:
    """The part of the victims' goodput (tokens of answers within the SLA, all classes) that the flood costs."""
    was = sum(group.goodput for group in alone.victims)
    return 1.0 - sum(group.goodput for group in flooded.victims) / was if was else None


def parts_of(total: float, wanted: Sequence[float]) -> list[float]:
    """The max-min fair parts of a total: who wants less than an even part has that, the others share the rest alike."""
    found = [0.0] * len(wanted)
    left = total
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    for place, tenant in enumerate(order):
        found[tenant] = min(wanted[tenant], left / (len(order) - place))
        left -= found[tenant]
    return found


def index(counted: Counted, kind: int) -> float | None:
    """Jain's of what each tenant got of a class over its max-min fair part of it; None where all got what they asked
    for, so that there was nothing to share."""
    had, wanted = counted.tokens[kind], counted.wanted[kind]
    if not sum(had) or sum(had) > SCARCE * sum(wanted):
        return None
    fair = parts_of(sum(had), wanted)
    return jain([each / part for each, part in zip(had, fair, strict=True) if part > 0.0])


def parts(rows: Sequence[Row], hunted: Sequence[Hunted]) -> dict[str, str]:
    """All tables by name."""
    table = Table(rows)
    made: dict[str, str] = {}
    if rows:
        made |= {
            "promises": _promises(table),
            "aims": _aims(table, hunted),
            "attained": _attained(table),
            "flood": _flood(table),
            "fair": _fair(table),
            "waste": _waste(table),
            "rejected": _rejected(table),
        }
    if hunted:
        made["t26"] = _hunt(hunted)
    return made


def text(rows: Sequence[Row], hunted: Sequence[Hunted]) -> str:
    return "\n".join(f"## {name}\n\n{part}" for name, part in parts(rows, hunted).items())


def write(rows: Sequence[Row], hunted: Sequence[Hunted], document: Path) -> None:
    """Fills the document's parts. ValueError if it has no place for one."""
    said = document.read_text()
    for name, part in parts(rows, hunted).items():
        begin, end = f"<!-- generated: {name} -->", f"<!-- end: {name} -->"
        before, began, after_begin = said.partition(begin)
        _, ended, after = after_begin.partition(end)
        if not began or not ended:
            raise ValueError(f"{document}: no place between {begin} and {end}")
        said = f"{before}{begin}\n\n{part.strip()}\n\n{end}{after}"
    document.write_text(said)


def broken(rows: Sequence[Row], hunted: Sequence[Hunted]) -> list[str]:
    """The aims that are missed."""
    judged = _judged(Table(rows), hunted)
    return [f"{each.what}: {each.measured} (aim {each.aim})" for each in judged if not each.met]


class Judged(msgspec.Struct, frozen=True):
    """An aim, what was measured, and whether that meets it."""

    what: str
    aim: str
    measured: str
    met: bool


def spans(table: Table) -> list[tuple[str, list[float]]]:
    """Loads at which the others have enough without the flood, and those at which they have not."""
    enough = [load for load in table.loads if load * TENANTS / PARTS < 1.0]
    return [("enough", enough), ("too little", [load for load in table.loads if load not in enough])]


def _floods(table: Table) -> list[Judged]:
    """What the flood costs, at the worst load of each span, by policy and flood."""
    found = []
    for policy in OURS:
        for flood in FLOODS:
            for word, loads in spans(table):
                means: list[tuple[str, float]] = []
                for number, kind in enumerate(KINDS):
                    at = [_mean([kept(*pair, number) for pair in table.pairs(policy, load, flood)]) for load in loads]
                    told = [mean for mean in at if mean is not None]
                    if told:
                        means.append((kind.name, min(told)))
                costs = [_mean([lost(*pair) for pair in table.pairs(policy, load, flood)]) for load in loads]
                cost = max([each for each in costs if each is not None], default=None)
                what = f"{policy}, flood of {flood}, the others had {word}"
                for name, least in means:
                    met = least >= KEPT_AIM
                    found.append(Judged(f"{what}: {name} kept", ">= 99.9 %", f"{100 * least:.2f} %", met))
                if cost is not None:
                    found.append(Judged(f"{what}: goodput lost", "< 1 %", f"{100 * cost:.2f} %", cost < LOST_AIM))
    return found


def _judged(table: Table, hunted: Sequence[Hunted]) -> list[Judged]:
    found = _floods(table)
    for number, kind in enumerate(KINDS):
        seen = [
            (mean, load, flood)
            for flood in (NOWHERE, EVERYWHERE)
            for load in table.loads
            if (mean := _mean([index(counted, number) for counted in table.runs(PRODUCT, load, flood)])) is not None
        ]
        if seen:
            least, load, flood = min(seen)
            with_it = "with" if flood == EVERYWHERE else "without"
            what = f"Jain's index in {kind.name}, worst load ({load:g}, {with_it} the flood)"
            found.append(Judged(what, ">= 0.98", f"{least:.4f}", least >= JAIN_AIM))
    runs = [run for load in table.loads for flood in FLOODS for run in table.runs(PRODUCT, load, flood)]
    if runs:
        most = max(run.passed for run in runs)
        found.append(Judged("passed over, in a row", f"<= {PASSED_AIM}", f"{most}", most <= PASSED_AIM))
        busy, fullest = (
            fmean(run.busy for run in table.runs(policy, table.loads[-1], EVERYWHERE) or runs)
            for policy in (PRODUCT, "open")
        )
        what = f"slots in use at load {table.loads[-1]:g}, of those without a gate"
        found.append(Judged(what, ">= 99 %", f"{100 * busy / fullest:.1f} %", busy >= BUSY_AIM * fullest))
    for case in CASES:
        ours = [each for each in hunted if each.case == case.name]
        if not ours:
            continue
        within, turns = min(each.within for each in ours), max(each.turns for each in ours)
        if case.enough:
            found.append(
                Judged(f"T26, {case.name}: within 3 s", ">= 95 %", f"{100 * within:.1f} %", within >= WITHIN_AIM)
            )
        found.append(Judged(f"T26, {case.name}: turns of A's share", "<= 3", f"{turns}", turns <= TURNS_AIM))
        if not case.slow[1]:
            trips = sum(each.trips for each in ours)
            found.append(Judged(f"T26, {case.name}: breakers opened", "0", f"{trips}", trips == 0))
    return found


def _aims(table: Table, hunted: Sequence[Hunted]) -> str:
    judged = [each for each in _judged(table, hunted) if "flood of" not in each.what]
    rows = [(each.what, each.aim, each.measured, "met" if each.met else "MISSED") for each in judged]
    return markdown(["figure", "aim", "measured", ""], rows)


def _promises(table: Table) -> str:
    """The aims about the flood, one row per policy and flood."""
    judged = {each.what: each for each in _floods(table)}
    rows = []
    for policy in OURS:
        for flood in FLOODS:
            cells = []
            for word, _ in spans(table):
                for name in [*(f"{kind.name} kept" for kind in KINDS), "goodput lost"]:
                    each = judged.get(f"{policy}, flood of {flood}, the others had {word}: {name}")
                    cells.append("-" if each is None else each.measured if each.met else f"{each.measured} **missed**")
            if any(cell != "-" for cell in cells):
                rows.append((policy, flood, *cells))
    names = [*(kind.name for kind in KINDS), "goodput lost"]
    return markdown(["policy", "flood of", *(f"{name}, {word}" for word, _ in spans(table) for name in names)], rows)


def _attained(table: Table) -> str:
    rows = []
    for load in table.loads:
        for policy in table.policies:
            runs = table.runs(policy, load, EVERYWHERE)
            if runs:
                cells = [_spread([100 * attained(each, number) for each in runs]) for number in range(len(KINDS))]
                rows.append((f"{load:g}", policy, *cells))
    return markdown(["load", "policy", *(f"{kind.name} %" for kind in KINDS)], rows)


def _flood(table: Table) -> str:
    rows = []
    for load in table.loads:
        for policy in table.policies:
            for flood in FLOODS:
                pairs = table.pairs(policy, load, flood)
                if not pairs:
                    continue
                cells = [_percents([kept(*pair, number) for pair in pairs]) for number in range(len(KINDS))]
                costs = _percents([lost(*pair) for pair in pairs])
                rows.append((f"{load:g}", f"{load * TENANTS / PARTS:.2f}", policy, flood, *cells, costs))
    heads = ["load", "without the flood", "policy", "flood of", *(f"{kind.name} kept %" for kind in KINDS)]
    return markdown([*heads, "goodput lost %"], rows)


def _fair(table: Table) -> str:
    rows = []
    for load in table.loads:
        for policy in table.policies:
            for flood in (NOWHERE, EVERYWHERE):
                runs = table.runs(policy, load, flood)
                cells = []
                for number in range(len(KINDS)):
                    told = [found for each in runs if (found := index(each, number)) is not None]
                    cells.append(f"{fmean(told):.4f} ({min(told):.4f})" if told else "-")
                if any(cell != "-" for cell in cells):
                    rows.append((f"{load:g}", policy, "no" if flood == NOWHERE else "yes", *cells))
    return markdown(["load", "policy", "flood", *(kind.name for kind in KINDS)], rows)


def _waste(table: Table) -> str:
    rows = []
    last = len(KINDS) - 1
    for load in table.loads:
        usual = _mean([each.output_tokens for each in table.runs("open", load, EVERYWHERE)])
        for policy in table.policies:
            runs = table.runs(policy, load, EVERYWHERE)
            if not runs:
                continue
            tokens = fmean(each.output_tokens for each in runs)
            goodput = fmean(sum(group.goodput for group in (*each.victims, *each.flooder)) for each in runs)
            longest = max(max(each.victims[last].longest_s, each.flooder[last].longest_s) for each in runs)
            share = f"{100 * tokens / usual:.0f}" if usual else "-"
            good = f"{100 * goodput / usual:.0f}" if usual else "-"
            busy = f"{100 * fmean(each.busy for each in runs):.0f}"
            passed = f"{max(each.passed for each in runs)}"
            rows.append((f"{load:g}", policy, busy, share, good, f"{longest:.1f}", passed))
    heads = ["load", "policy", "slots in use %", "tokens of answers, `open` = 100", "of those in time"]
    return markdown([*heads, f"longest wait of `{KINDS[last].name}`, s", "passed over"], rows)


def _rejected(table: Table) -> str:
    rows = []
    for load in table.loads:
        for policy in table.policies:
            runs = table.runs(policy, load, EVERYWHERE)
            if not runs:
                continue
            cells = []
            for number in range(len(KINDS)):
                groups = [group for each in runs for group in (each.victims[number], each.flooder[number])]
                asked = sum(group.asked for group in groups)
                words: dict[str, int] = {}
                for group in groups:
                    for word, many in group.away.items():
                        words[word] = words.get(word, 0) + many
                told = [f"{word} {100 * many / asked:.1f}" for word, many in sorted(words.items()) if many]
                cells.append(", ".join(told) or "-")
            if any(cell != "-" for cell in cells):
                rows.append((f"{load:g}", policy, *cells))
    return markdown(["load", "policy", *(f"{kind.name} %" for kind in KINDS)], rows)


def _hunt(hunted: Sequence[Hunted]) -> str:
    rows = []
    for case in CASES:
        ours = [each for each in hunted if each.case == case.name]
        if not ours:
            continue
        settled = [
            share
            for each in ours
            for share in each.shares[int(WARMUP_S / WINDOW_S) : int(270 / WINDOW_S)]
            if share >= 0
        ]
        shed = sum(sum(each.shed.values()) for each in ours) / sum(each.requests for each in ours)
        failed = sum(sum(each.failed.values()) for each in ours)
        rows.append(
            (
                case.what,
                _spread([100 * each.within for each in ours]),
                f"{max(each.turns for each in ours)}",
                f"{100 * fmean(settled):.1f} ({100 * min(settled):.0f}-{100 * max(settled):.0f})",
                f"{100 * shed:.2f}",
                f"{failed}",
                f"{fmean(each.said_full for each in ours):.0f}",
                f"{sum(each.trips for each in ours)}",
            )
        )
    heads = ["case", "within 3 s %", "turns of A's share", "A's share %, 60-270 s", "shed with 429 %", "failed"]
    return markdown([*heads, "503 of engines", "breakers opened"], rows)


def _mean(values: Iterable[float | None]) -> float | None:
    told = [value for value in values if value is not None]
    return fmean(told) if told else None


def _percents(values: Iterable[float | None]) -> str:
    return _spread([100 * value for value in values if value is not None])


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return f"{fmean(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def figures(rows: Sequence[Row], hunted: Sequence[Hunted]) -> list[dict[str, object]]:
    """Every run as an object, for who draws tables of their own."""
    made: list[dict[str, object]] = []
    for row in rows:
        counted = row.counted
        made.append(
            {
                "policy": row.task.policy,
                "load": row.task.load,
                "flood": row.task.flood,
                "seed": row.task.seed,
                "seconds": row.task.seconds,
                "slots_in_use": round(counted.busy, 4),
                "answer_tokens": counted.output_tokens,
                "passed_over": counted.passed,
                "classes": {
                    kind.name: {
                        "victims": _group(counted, number, flooder=False),
                        "flooder": _group(counted, number, flooder=True),
                        "jain": index(counted, number),
                    }
                    for number, kind in enumerate(KINDS)
                },
            }
        )
    made += [
        {
            "case": each.case,
            "seed": each.seed,
            "requests": each.requests,
            "within": round(each.within, 4),
            "turns": each.turns,
            "share": round(each.share, 4),
            "shares": each.shares,
            "shed": each.shed,
            "failed": each.failed,
            "said_full": each.said_full,
            "trips": each.trips,
        }
        for each in hunted
    ]
    return made


def _group(counted: Counted, number: int, *, flooder: bool) -> dict[str, object]:
    group = (counted.flooder if flooder else counted.victims)[number]
    return {
        "asked": group.asked,
        "met": group.met,
        "served": group.served,
        "goodput_tokens": group.goodput,
        "longest_wait_s": round(group.longest_s, 3),
        "ttft_p50_s": round(group.ttft_p50_s, 4),
        "ttft_p99_s": round(group.ttft_p99_s, 4),
        "evicted": group.evicted,
        "turned_away": dict(sorted(group.away.items())),
    }
