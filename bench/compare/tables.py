"""The figures as tables: which columns each kind of load has, arm by arm."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.compare.aims import shown, verdicts
from bench.compare.kinds import KINDS
from bench.compare.results import Results, Sample, Spread, spread


@dataclass(frozen=True)
class Table:
    """`notes` are sentences that belong under it."""

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    notes: list[str] = field(default_factory=list)


def aims(results: Results) -> Table:
    words = {True: "met", False: "MISSED", None: "-"}
    rows = [(v.what, v.aim, v.found, words[v.met]) for v in verdicts(results)]
    return Table("The aims", ("figure, everything on", "aim", "measured", ""), rows)


def figures(results: Results) -> list[Table]:
    """One for each kind of load that was run, then memory."""
    made = [_requests(results), _paced(results), _first(results)]
    made += [_streams(results, kind) for kind in ("streams", "batch", "suite")]
    made.append(_memory(results))
    return [table for table in made if table.rows]


def run(results: Results) -> Table:
    """What was run on what."""
    rows = [*results.machine.items(), ("command", results.command)]
    rows.append(("load", results.load))
    rows.append(("rounds", f"{results.rounds}, of windows of {results.seconds:g} s"))
    others = spread([100 * sample.others for sample in results.samples])
    if others:
        rows.append(("others on the proxy's core", f"median {others.median:.0f}%, most {others.most:.0f}%"))
    void = [sample for sample in results.samples if sample.void]
    rows.append(("void windows", f"{len(void)} of {len(results.samples)}"))
    notes = [f"Void: {s.arm}, {s.kind}, round {s.round}: {s.void}." for s in void]
    return Table("The run", ("", ""), rows, notes)


def arms(results: Results) -> Table:
    rows = [(name, what, results.versions.get(name, "")) for name, what in results.arms.items()]
    rows += [(name, "left out", why) for name, why in results.missing.items()]
    return Table("The arms", ("arm", "what", "version"), rows)


Column = Callable[[str], str]


def _table(results: Results, kind: str, columns: dict[str, Column], notes: list[str] | None = None) -> Table:
    rows = [(arm, *(make(arm) for make in columns.values())) for arm in results.arms if results.of(arm, kind)]
    return Table(KINDS[kind].what, ("arm", *columns), rows, notes or [])


def _requests(results: Results) -> Table:
    kind = "requests"
    columns = {
        "CPU us/request": _cpu(results, kind),
        "/ Envoy's": _of_envoy(results, kind),
        "requests/s": _figure(results, kind, lambda s: s.per_s, 0),
        "of its core": _figure(results, kind, lambda s: 100 * s.core_share, 0, "%"),
    }
    return _table(results, kind, columns, _headroom(results))


def _headroom(results: Results) -> list[str]:
    """That the load and the upstream are not what limits the proxies."""
    rates = {
        arm: rate.median
        for arm in results.arms
        if (rate := results.spread(arm, "requests", lambda s: s.per_s)) is not None
    }
    line = rates.pop("direct", None)
    if line is None or not rates:
        return []
    fastest = max(rates, key=lambda arm: rates[arm])
    return [
        f"Load and upstream alone, on their one core, make {line:.0f} requests/s: {line / rates[fastest]:.1f} times"
        f" what the fastest proxy, {fastest}, served."
    ]


def _paced(results: Results) -> Table:
    kind = "paced"
    columns = {"CPU us/request": _cpu(results, kind), "/ Envoy's": _of_envoy(results, kind)}
    return _table(results, kind, {**columns, **_added(results, kind, "request_us", "")})


def _first(results: Results) -> Table:
    kind = "first"
    columns = {"CPU us/stream": _cpu(results, kind), "/ Envoy's": _of_envoy(results, kind)}
    return _table(results, kind, {**columns, **_added(results, kind, "first_us", "TTFT ")})


def _streams(results: Results, kind: str) -> Table:
    columns: dict[str, Column] = {
        "CPU us/chunk": _cpu(results, kind),
        "/ Envoy's": _of_envoy(results, kind),
        "/ nginx's": lambda arm: _cell(results.ratio(arm, "nginx", kind) if arm != "direct" else None, 2),
        **_added(results, kind, "first_us", "TTFT "),
        **_added(results, kind, "delta_us", "chunk "),
        "no gap > 10x": _figure(results, kind, _even, 1, "%"),
    }
    return _table(results, kind, columns)


def _even(sample: Sample) -> float:
    return 100 * sample.window.even_streams / sample.window.streams if sample.window.streams else 0.0


def _memory(results: Results) -> Table:
    rows = [
        (m.arm, f"{m.idle_kib / 1024:.1f}", f"{m.warm_kib / 1024:.1f}", f"{m.per_stream_kib:.1f}", str(m.streams))
        for m in results.memory
    ]
    header = ("arm", "idle, just started, MB", "after a second of requests, MB", "per idle stream, KB", "of streams")
    return Table("Resident memory", header, rows)


def _cpu(results: Results, kind: str) -> Column:
    return lambda arm: _cell(None if arm == "direct" else results.spread(arm, kind, lambda s: s.us), 1)


def _of_envoy(results: Results, kind: str) -> Column:
    """With an access log, of Envoy with its own."""

    def column(arm: str) -> str:
        base = "envoy-log" if arm.endswith("-log") else "envoy"
        return _cell(None if arm == "direct" else results.ratio(arm, base, kind), 2)

    return column


def _figure(results: Results, kind: str, figure: Callable[[Sample], float], digits: int, unit: str = "") -> Column:
    def column(arm: str) -> str:
        found = results.spread(arm, kind, figure)
        return "-" if found is None else f"{found.median:.{digits}f}{unit}"

    return column


def _added(results: Results, kind: str, time: str, what: str) -> dict[str, Column]:
    """p50 and p99 over the direct line's; the line's own are its times themselves."""

    def column(share: str) -> Column:
        def cell(arm: str) -> str:
            if arm == "direct":
                own = results.spread(arm, kind, lambda s: float(getattr(s.window.times[time], share)))
                return "-" if own is None else f"[{own.median:.0f}]"
            return _cell(results.added_us(arm, kind, time, share), 0)

        return cell

    return {f"added {what}{share}, us": column(share) for share in ("p50", "p99")}


def _cell(spread: Spread | None, digits: int) -> str:
    return "-" if spread is None else shown(spread, digits)
