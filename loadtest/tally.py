"""What the streams of a run came to: one record each, by phase, and the figures that pass marks are made of.

Records and not counters, since a scenario asks after the fact who was cut, by which endpoint, in which session. A run
makes some thousands of them.
"""

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from math import nan

import msgspec

from loadtest.sse_client import BROKEN, Ended, Stream

CHAT = "chat"
SLOW = "slow reader"
ALL = ""


class Record(msgspec.Struct, frozen=True):
    """One stream that ended. `phase` is the one that it began in; times in s since the run's start."""

    kind: str
    phase: str
    session: str
    began_s: float
    ended: Ended
    ttft_s: float | None
    longest_gap_s: float
    total_s: float
    size: int
    status: int
    reason: str
    endpoint: str
    version: str
    retry_after_s: float
    detail: str


class Tally:
    """Filled by users while a run lasts. `phase` is set by the scenario; `begun` counts streams that were asked for."""

    def __init__(self) -> None:
        self.phase = "load"
        self.begun = 0
        self.records: list[Record] = []
        self._gaps: defaultdict[tuple[str, str], array[float]] = defaultdict(lambda: array("d"))
        self._start_s = 0.0

    def start(self, now: float) -> None:
        """The moment from which `began_s` counts, on the clients' clock."""
        self._start_s = now

    def begin(self) -> str:
        """Count a stream; its phase, for `end`."""
        self.begun += 1
        return self.phase

    def end(self, kind: str, phase: str, session: str, stream: Stream) -> None:
        """Record a stream that ended."""
        self._gaps[kind, phase].extend(stream.gaps_s)
        self.records.append(
            Record(
                kind,
                phase,
                session,
                stream.began_s - self._start_s,
                stream.ended,
                stream.ttft_s,
                stream.longest_gap_s,
                stream.total_s,
                stream.size,
                stream.status,
                stream.reason,
                stream.endpoint,
                stream.version,
                stream.retry_after_s,
                stream.detail,
            )
        )

    @property
    def unaccounted(self) -> int:
        """Streams that were begun and of which nobody knows what became."""
        return self.begun - len(self.records)

    def of(self, kind: str = CHAT, phase: str = "") -> list[Record]:
        """The records of a kind or of `ALL`, of one phase or of all."""
        return [rec for rec in self.records if kind in (ALL, rec.kind) and phase in ("", rec.phase)]

    def goodput(self, ttft_s: float, kind: str = CHAT, phase: str = "") -> float:
        """Share of streams that came whole, first token in time, of those not left by their user; nan of none."""
        records = [record for record in self.of(kind, phase) if record.ended is not Ended.LEFT]
        return sum(is_good(record, ttft_s) for record in records) / len(records) if records else nan

    def broken(self, kind: str = CHAT, phase: str = "") -> list[Record]:
        """Those that ended neither well nor with an honest refusal."""
        return [record for record in self.of(kind, phase) if record.ended in BROKEN]

    def gap_s(self, at: float, kind: str = CHAT, phase: str = "") -> float:
        """The quantile `at` (0-1) of all gaps between tokens, s; nan where there were none."""
        gaps = array("d")
        for (of, during), values in self._gaps.items():
            if of == kind and phase in ("", during):
                gaps.extend(values)
        return quantile(gaps, at)

    def ttft_s(self, at: float, kind: str = CHAT, phase: str = "") -> float:
        """The quantile `at` (0-1) of the times to the first token, s; nan where there were none."""
        return quantile((record.ttft_s for record in self.of(kind, phase) if record.ttft_s is not None), at)

    def endings(self) -> dict[str, int]:
        """How many streams ended how, the most frequent first; refusals with their reason."""
        return dict(Counter(_named(record) for record in self.records).most_common())


def is_good(record: Record, ttft_s: float) -> bool:
    """Whether its user was served: whole, and the first token in time."""
    return record.ended is Ended.WHOLE and record.ttft_s is not None and record.ttft_s <= ttft_s


def quantile(values: Iterable[float], at: float) -> float:
    """The nearest-rank quantile `at` (0-1); nan of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(at * len(ordered)))] if ordered else nan


def count(records: Iterable[Record], which: Callable[[Record], bool]) -> int:
    """How many are such."""
    return sum(1 for record in records if which(record))


def _named(record: Record) -> str:
    if record.ended is Ended.REFUSED:
        return f"refused: {record.status} {record.reason}".rstrip()
    return str(record.ended)
