"""What was measured, as it is kept; the budgets, and whether they are met; the tables.

A budget is judged on the median of its windows, but for what must never be: there it is the worst.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from bench.txlog.bulk import Bulk
from bench.txlog.instructions import AT, JUDGED_AT, Counted
from bench.txlog.path import BASE, SHARED, Idle, Path
from bench.txlog.probes import PROBES, SUCCESSES, Round
from bench.txlog.seen import Seen
from bench.txlog.stage import Spread, spread
from bench.txlog.stream import Stream


@dataclass
class Results:
    """One run."""

    machine: dict[str, str]
    command: str
    tree: str
    probes: list[Round] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    stream: list[Stream] = field(default_factory=list)
    bulk: Bulk | None = None
    path: list[Path] = field(default_factory=list)
    idle: list[Idle] = field(default_factory=list)
    counted: list[Counted] = field(default_factory=list)


class Budget(msgspec.Struct, frozen=True):
    """One of them. `met` None: not measured."""

    what: str
    aim: str
    found: str
    met: bool | None


def budgets(results: Results) -> list[Budget]:
    """All of them."""
    rounds, most = results.probes, max((each.tails for each in results.stream), default=0)
    full = [each for each in results.seen if each.what == "sidecars"]
    busy = [each for each in results.stream if each.tails == most]
    bulk = results.bulk
    return [
        _exactly("requests that reached a half-open endpoint", SUCCESSES, [r.probes for r in rounds]),
        _exactly("of them at once at most", PROBES, [r.at_once for r in rounds]),
        _exactly("opens that a sidecar never saw", 0, [each.missed for each in results.seen]),
        _at_most("an open in another sidecar, p99", 50.0, [each.p99_ms for each in full], "ms"),
        _at_most(f"a tail at 2,000/s, {most} tails", 0.20, [each.tail_share for each in busy], "of a core", 3),
        _exactly("resyncs of that tail", 0, [each.resyncs for each in busy]),
        _at_most("a full log in a tail, connecting included", 2.0, bulk.tail_ready_s if bulk else [], "s", 2),
        _at_most("a full log in a sidecar, starting included", 2.0, bulk.sidecar_log_s if bulk else [], "s", 2),
        *(
            _at_most(f"CPU per {each.unit}, {each.kind}, over --redis local", 1.05, each.ratios, "", 3)
            for each in results.path
            if each.arm == SHARED
        ),
        _at_most(f"instructions at {JUDGED_AT:g} requests/s, over --redis local", 1.05, _over(results.counted), "", 3),
    ]


def _over(counted: Sequence[Counted]) -> list[float]:
    """What a server makes of a second's instructions at `JUDGED_AT`."""
    at = {each.arm: each.at(JUDGED_AT) for each in counted}
    return [at[SHARED] / at[BASE]] if len(at) == 2 else []


def _at_most(what: str, limit: float, values: Sequence[float], unit: str, digits: int = 1) -> Budget:
    if not values:
        return Budget(what, f"<= {limit:g} {unit}".rstrip(), "not measured", None)
    found = spread(values)
    return Budget(what, f"<= {limit:g} {unit}".rstrip(), shown(found, digits, unit), found.median <= limit)


def _exactly(what: str, limit: int, values: Sequence[int]) -> Budget:
    if not values:
        return Budget(what, f"{limit}", "not measured", None)
    said = ", ".join(str(each) for each in sorted(set(values)))
    return Budget(what, f"{limit}", f"{said} in {len(values)} rounds", set(values) == {limit})


def shown(found: Spread, digits: int, unit: str = "") -> str:
    """Median and range."""
    span = f" ({found.least:.{digits}f} to {found.most:.{digits}f}, {found.count})" if found.count > 1 else ""
    return f"{found.median:.{digits}f}{' ' if unit else ''}{unit}{span}"


def text(results: Results) -> str:
    """The budgets, then the figures that they were judged on and those that have none."""
    parts = [
        *judged(results.machine, results.tree, budgets(results), "median (range, count)"),
        *([_of_probes(results.probes)] if results.probes else []),
        *([_of_seen(results.seen)] if results.seen else []),
        *([_of_stream(results.stream)] if results.stream else []),
        *([_of_bulk(results.bulk)] if results.bulk else []),
        *([_of_path(results.path)] if results.path else []),
        *([_of_idle(results.idle)] if results.idle else []),
        *([_of_counted(results.counted)] if results.counted else []),
    ]
    return "\n".join(parts)


def judged(machine: Mapping[str, str], tree: str, budgets: Sequence[Budget], column: str) -> list[str]:
    """Where it was measured, and a table of the budgets, whose figures stand under `column`."""
    words = {True: "met", False: "MISSED", None: "-"}
    rows = [[each.what, each.aim, each.found, words[each.met]] for each in budgets]
    return [
        f"{machine.get('CPU')}, {machine.get('cores')} cores, {machine.get('day')}, commit {machine.get('commit')},"
        f" load {machine.get('load average before')} before, sidecars from {tree}\n",
        table(["budget", "aim", column, ""], rows),
    ]


def _of_probes(rounds: Sequence[Round]) -> str:
    head = ["probes", "at once", "half-opens", "open s", "half-open s", "late", "until ms"]
    rows = [
        [
            f"{each.probes}",
            f"{each.at_once}",
            f"{each.half_opens}",
            f"{each.open_s:.2f}",
            f"{each.half_open_s:.2f}",
            f"{each.late}",
            f"{each.late_ms:.1f}",
        ]
        for each in rounds
    ]
    return table(head, rows)


def _of_seen(seen: Sequence[Seen]) -> str:
    head = ["seen by", "opens x others", "p50 ms", "p90", "p99", "max", "trip to record", "missed"]
    rows = [
        [
            each.what,
            f"{each.opens} x {each.others}",
            *(f"{ms:.2f}" for ms in (each.p50_ms, each.p90_ms, each.p99_ms, each.max_ms)),
            f"{each.local_p50_ms:.2f}" if each.local_p50_ms else "-",
            f"{each.missed}",
        ]
        for each in seen
    ]
    return table(head, rows)


def _of_stream(windows: Sequence[Stream]) -> str:
    head = ["tails", "written/s", "a tail's CPU", "us/record", "reads/s", "lag ms, p50, p99, max", "server", "others"]
    rows = [
        [
            f"{each.tails}",
            f"{each.written_per_s:.0f}",
            f"{each.tail_share:.1%}",
            f"{each.tail_us_per_record:.0f}",
            f"{each.tail_turns_per_s:.0f}",
            ", ".join(f"{ms:.1f}" for ms in each.lag_ms),
            f"{each.server_share:.0%}",
            f"{each.readers_share:.0%}",
        ]
        for each in windows
    ]
    return table(head, rows)


def _of_bulk(bulk: Bulk) -> str:
    registers = bulk.sessions + bulk.nodes
    each = (bulk.server_bytes - bulk.server_empty_bytes) / registers
    grew = (bulk.sidecar_rss_bytes - bulk.empty_sidecar_rss_bytes) / registers
    empty = f"{bulk.empty_sidecar_rss_bytes / 1e6:.1f} MB over an empty log"
    rows = [
        ["registers", f"{bulk.sessions:,} sessions, {bulk.nodes:,} endpoints, written in {bulk.fill_s:.1f} s"],
        ["server, used_memory", f"{bulk.server_bytes / 1e6:.1f} MB: {each:.0f} B a register, its log record included"],
        ["server, RSS", f"{bulk.server_rss_bytes / 1e6:.1f} MB"],
        ["sidecar, RSS", f"{bulk.sidecar_rss_bytes / 1e6:.1f} MB, {empty}: {grew:.0f} B a register"],
        ["tail, from its first step until it has all", shown(spread(bulk.tail_ready_s), 2, "s")],
        ["its loop held up, at most", shown(spread([1000 * each for each in bulk.tail_blocked_s]), 1, "ms")],
        ["sidecar, process made until it has all", shown(spread(bulk.sidecar_log_s), 2, "s")],
        ["sidecar, process made until it serves", shown(spread(bulk.sidecar_s), 2, "s")],
        ["the same over an empty log", shown(spread(bulk.empty_sidecar_s), 2, "s")],
    ]
    return table(["a full log", ""], rows)


def _of_path(path: Sequence[Path]) -> str:
    head = ["load", "log", "CPU us", "per", "over local, paired"]
    rows = [
        [
            each.kind,
            each.arm,
            shown(spread(each.us), 1),
            each.unit,
            shown(spread(each.ratios), 3) if each.ratios else "",
        ]
        for each in path
        if each.us
    ]
    return table(head, rows)


def _of_idle(idle: Sequence[Idle]) -> str:
    head = ["no traffic, log", "transitions/s of others", "CPU ms per s", "log lost"]
    rows = [[each.log, f"{each.transitions_per_s:g}", shown(spread(each.ms_per_s), 2), f"{each.away}"] for each in idle]
    return table(head, rows)


def _of_counted(counted: Sequence[Counted]) -> str:
    head = ["thousands of instructions, log", "idle second", "second with traffic", "request"]
    head += [f"second at {rate:g}/s" for rate in AT]
    rows = [
        [
            each.arm,
            *(f"{value / 1000:,.0f}" for value in (each.idle_per_s, each.busy_per_s)),
            f"{each.request / 1000:,.1f}",
        ]
        + [f"{each.at(rate) / 1000:,.0f}" for rate in AT]
        for each in counted
    ]
    return table(head, rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, padded so that it can be read as it is."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in (head, *rows)]
    lines.insert(1, ["-" * width for width in widths])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
