"""What a soak says at its end: each rule with its verdict, the figures, and the evidence of every breach. Pure."""

from collections.abc import Sequence

import msgspec

from soak.audit import Baseline, Figures
from soak.ledger import Breach, Ledger
from soak.measure import MAX_RISE_BYTES, MAX_SLOPE_BYTES, SLOPE_FROM_S, Memory, Sampled

RULES = (
    "the sidecar runs",
    "the sidecar accepts connections",
    "every request ends",
    "what clients get is lawful",
    "nobody answers what was not asked",
    "client and log agree",
    "every request has its line",
    "every line is of a request",
    "no request has two lines, and what is no request has none",
    "metrics and log agree",
    "nothing odd is logged",
    "breakers close once all is well",
    "no breaker stays half-open",
    "nothing is held",
    "no connection is left",
    "no task is left",
    "no thread is left",
    "no object of a request is left",
    "no object of a request waits for the collector",
    "sessions keep their bound",
    "memory is flat",
    "SIGTERM ends it",
)
"""All that is checked, in the order of the report."""


class Report(msgspec.Struct, frozen=True):
    """One soak's result. `breaches` holds the first ones with their evidence; `broken` counts all, by rule."""

    ok: bool
    interrupted: bool
    seed: int
    minutes: float
    cpu_ratio: float
    requests: int
    connections: int
    aborted: int
    stale: int
    got: dict[str, int]
    reasons: dict[str, int]
    troubles: list[str]
    log_lines: int
    baseline: Baseline
    figures: Figures | None
    memory: Memory
    sampled: list[Sampled]
    rules: dict[str, int]
    breaches: list[Breach]


def mean_cpu(sampled: Sequence[Sampled]) -> float:
    """Of one core, over all samples."""
    return sum(sample.cpu_ratio for sample in sampled) / len(sampled) if sampled else 0.0


def rules_of(ledger: Ledger) -> dict[str, int]:
    """Every rule with how often it was broken. KeyError where a rule is not in the table."""
    unknown = ledger.broken.keys() - set(RULES)
    if unknown:
        raise KeyError(f"rules that the report does not know: {sorted(unknown)}")
    return {rule: ledger.broken[rule] for rule in RULES}


def text(report: Report) -> str:
    """The report for a reader."""
    figures = report.figures
    lines = [
        "",
        f"soak of {report.minutes:.1f} minutes, seed {report.seed}{', interrupted' if report.interrupted else ''}",
        f"  {report.requests} requests on {report.connections} connections, {report.aborted} left by their clients, "
        f"{report.stale} asked anew on a fresh connection",
        f"  the sidecar took {report.cpu_ratio:.2f} of a core; {len(report.troubles)} faults and policies",
        "  clients got: " + _counts(report.got),
        "  reasons told: " + _counts(report.reasons),
        f"  log lines: {report.log_lines}",
        "  memory: " + _memory(report),
    ]
    if figures is not None:
        lines.append(
            f"  left: {figures.descriptors} descriptors ({report.baseline.descriptors} at the start), "
            f"{figures.tasks} tasks ({report.baseline.told.tasks}), {figures.threads} threads "
            f"({report.baseline.threads}), sessions {_counts(figures.sessions)}, "
            f"{figures.session_breakers} session breakers"
        )
    lines.append("")
    lines += [f"  {'ok  ' if not count else 'FAIL'}  {rule}{_times(count)}" for rule, count in report.rules.items()]
    for breach in report.breaches:
        lines += ["", f"{breach.rule}: {breach.what}", *(f"    {each}" for each in breach.evidence)]
    told, total = len(report.breaches), sum(report.rules.values())
    if total > told:
        lines += ["", f"and {total - told} more"]
    lines += ["", "PASSED" if report.ok else f"FAILED: {total} breaches"]
    return "\n".join(lines)


def _memory(report: Report) -> str:
    memory = report.memory
    minutes = ", ".join(f"{each / 1e6:.1f}" for each in memory.minutes)
    slope = f"{memory.slope_bytes / 1024:+.0f} KiB/min (bound {MAX_SLOPE_BYTES / 1024:.0f}"
    if memory.measured_s < SLOPE_FROM_S:
        slope += f" from {SLOPE_FROM_S:.0f} s on"
    return (
        f"{report.baseline.rss_bytes / 1e6:.1f} MB at the start, least of each minute {minutes} MB; after the warm-up "
        f"{slope}), {memory.rise_bytes / 1024:+.0f} KiB in {memory.measured_s:.0f} s "
        f"(bound {MAX_RISE_BYTES / 1024:.0f})"
    )


def _counts(counts: dict[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {count}" for name, count in ordered) or "none"


def _times(count: int) -> str:
    return f": {count} times" if count else ""
