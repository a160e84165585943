"""What an operator reads of a simulated trace: how the clients fared, what opened and why, who carried how much."""

from collections.abc import Sequence

import msgspec

from sidecar.kernel.count import counted
from sidecar.simulate.ledger import CLOSED, OPEN, Measures
from sidecar.simulate.trace import Extent


class EndpointLine(msgspec.Struct, frozen=True):
    """One endpoint. `share` is of all attempts (0-1), `not_closed_s` how long its breaker was open or half open."""

    key: str
    zone: str
    attempts: int
    share: float
    trips: int
    not_closed_s: float


class Trip(msgspec.Struct, frozen=True):
    """A breaker of an endpoint opened, `at` seconds after the first request; `fault`: one was there."""

    at: float
    endpoint: str
    why: str
    evidence: str
    fault: bool


class Harm(msgspec.Struct, frozen=True):
    """What a kind of fault did. Shares (0-1) are of the requests it would have bitten without any sidecar.

    `kept_away`: those that never met it. `saved`: those, and the ones that were answered in time all the same.
    """

    kind: str
    affected: int
    kept_away: float | None
    saved: float | None
    episodes: int
    tripped: int
    detect_s: tuple[float, ...]


class Report(msgspec.Struct, frozen=True):
    """All of it. Seconds are simulated; `goodput` is a share (0-1), `ttft_s` has quantiles of what was served."""

    service: str
    seed: int
    scale: float
    requests: int
    left_out: int
    seconds: float
    goodput: float | None
    served: int
    retried: int
    attempts: int
    ttft_s: dict[str, float | None]
    failed: dict[str, int]
    refused: dict[str, int]
    endpoints: tuple[EndpointLine, ...]
    trips: tuple[Trip, ...]
    others_tripped: dict[str, int]
    faults: tuple[Harm, ...]


QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}


def report_of(
    measures: Measures, extent: Extent, *, service: str, endpoints: Sequence[tuple[str, str]], seed: int, scale: float
) -> Report:
    """`endpoints`: key and zone of each engine, in the world's order."""
    seconds = (extent.end - extent.begin) / scale
    per_pod = measures.per_pod or (0,) * len(endpoints)
    lines = tuple(
        EndpointLine(
            key,
            zone,
            per_pod[index],
            round(per_pod[index] / max(1, measures.attempts), 6),
            sum(1 for move in measures.moves if move.pod == index and _is_trip(move.old, move.new)),
            _not_closed_s(measures, index, seconds),
        )
        for index, (key, zone) in enumerate(endpoints)
    )
    trips = tuple(
        Trip(move.at, endpoints[move.pod][0], move.why, move.evidence, not move.false)
        for move in measures.moves
        if _is_trip(move.old, move.new)
    )
    faults = tuple(
        Harm(kind, tally.affected, tally.i1, tally.i3, tally.episodes, tally.tripped, tally.detect_s)
        for kind, tally in measures.kinds.items()
    )
    return Report(
        service=service,
        seed=seed,
        scale=scale,
        requests=measures.requests,
        left_out=extent.left_out,
        seconds=round(seconds, 3),
        goodput=measures.goodput,
        served=measures.served,
        retried=measures.retried,
        attempts=measures.attempts,
        ttft_s={name: _rounded(measures.ttft_s(quantile)) for name, quantile in QUANTILES.items()},
        failed=measures.failed,
        refused=measures.rejected,
        endpoints=lines,
        trips=trips,
        others_tripped=measures.others_tripped,
        faults=faults,
    )


def summary(report: Report) -> list[tuple[str, str]]:
    """Its measures, in words."""
    ttft = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in report.ttft_s.items())
    rows = [
        ("requests", f"{report.requests} in {report.seconds:g} s"),
        ("answered in time", f"{_percent(report.goodput)} (first token within 1 s + 3x reading the prompt, no error)"),
        ("answered", f"{report.served}"),
        ("first token", ttft),
        ("failed", _counts(report.failed)),
        ("refused", _counts(report.refused)),
        ("tried again", f"{report.retried}"),
        ("endpoint breakers opened", f"{len(report.trips)}"),
        ("other breakers opened", _counts(report.others_tripped)),
    ]
    for harm in report.faults:
        rows.append(
            (
                f"fault {harm.kind}",
                f"{counted(harm.affected, 'request')} would have met it: {_percent(harm.kept_away)} kept away, "
                f"{_percent(harm.saved)} kept away or answered in time",
            )
        )
    return rows


def _is_trip(old: str, new: str) -> bool:
    return old == CLOSED and new == OPEN


def _not_closed_s(measures: Measures, pod: int, end: float) -> float:
    total, since = 0.0, -1.0
    for move in measures.moves:
        if move.pod == pod:
            if move.new == CLOSED:
                total += max(0.0, move.at - since) if since >= 0 else 0.0
                since = -1.0
            elif since < 0:
                since = move.at
    return round(total + (max(0.0, end - since) if since >= 0 else 0.0), 3)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.0f} ms"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"


def _counts(counts: dict[str, int]) -> str:
    total = sum(counts.values())
    if not total:
        return "0"
    return f"{total}: " + ", ".join(f"{why} {count}" for why, count in counts.items())
