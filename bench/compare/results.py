"""What was measured, as it is kept: plain records, written to and read from JSON, and the statistics over them.

A ratio is taken within a round, where both arms met the same minute of the machine; what is reported is the median over
rounds with the range. Void windows (a pace that was not kept) are kept and counted, and are in no figure.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from bench.compare.load import Window


@dataclass(frozen=True)
class Sample:
    """One window of one arm under one kind of load."""

    arm: str
    kind: str
    round: int
    window: Window
    unit: str
    """request or chunk: what the CPU is divided by."""
    void: str = ""
    others: float = 0.0
    """Share of the proxy's core that went elsewhere: to neighbours, and to the other proxies' idling."""

    @property
    def units(self) -> int:
        return self.window.deltas if self.unit == "chunk" else self.window.requests

    @property
    def us(self) -> float:
        return self.window.cpu_s / self.units * 1e6

    @property
    def per_s(self) -> float:
        return self.units / self.window.seconds

    @property
    def core_share(self) -> float:
        return self.window.cpu_s / self.window.seconds

    @property
    def per_s_at_full_core(self) -> float:
        """As if the proxy had the core to itself: an arm that the load cannot fill is not slower for it."""
        return self.per_s / self.core_share if self.core_share else self.per_s


@dataclass(frozen=True)
class Memory:
    """Resident memory of an arm that was just started, KiB; `warm` is before the idle streams, after a few requests."""

    arm: str
    streams: int
    idle_kib: int
    warm_kib: int
    held_kib: int

    @property
    def per_stream_kib(self) -> float:
        return (self.held_kib - self.warm_kib) / self.streams


@dataclass(frozen=True)
class Spread:
    """A figure over the rounds."""

    median: float
    least: float
    most: float
    rounds: int


@dataclass
class Results:
    """One run."""

    machine: dict[str, str]
    command: str
    rounds: int
    seconds: float
    arms: dict[str, str]
    """What each arm is."""
    versions: dict[str, str]
    missing: dict[str, str]
    """Arms that were asked for and left out, and why."""
    load: str
    """What saturated the proxies."""
    samples: list[Sample] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)

    def of(self, arm: str, kind: str) -> dict[int, Sample]:
        """By round, without void ones."""
        return {s.round: s for s in self.samples if s.arm == arm and s.kind == kind and not s.void}

    def spread(self, arm: str, kind: str, figure: Callable[[Sample], float]) -> Spread | None:
        return spread([figure(sample) for sample in self.of(arm, kind).values()])

    def paired(self, arm: str, base: str, kind: str, figure: Callable[[Sample, Sample], float | None]) -> Spread | None:
        """A figure of two arms within each round that has both."""
        mine, theirs = self.of(arm, kind), self.of(base, kind)
        values = [figure(mine[number], theirs[number]) for number in mine if number in theirs]
        return spread([value for value in values if value is not None])

    def ratio(self, arm: str, base: str, kind: str) -> Spread | None:
        """CPU per unit of `arm` over that of `base`."""
        return self.paired(arm, base, kind, lambda mine, theirs: mine.us / theirs.us)

    def added_us(self, arm: str, kind: str, time: str, share: str, base: str = "direct") -> Spread | None:
        """How much later than `base` the same share of answers or chunks came: p50 minus p50, p99 minus p99."""

        def added(mine: Sample, theirs: Sample) -> float | None:
            pair = mine.window.times.get(time), theirs.window.times.get(time)
            if pair[0] is None or pair[1] is None:
                return None
            found: float = getattr(pair[0], share) - getattr(pair[1], share)
            return found

        return self.paired(arm, base, kind, added)


def spread(values: list[float]) -> Spread | None:
    return Spread(statistics.median(values), min(values), max(values), len(values)) if values else None


def to_json(results: Results) -> bytes:
    """One line for each sample: a new run's differences can be read."""
    return msgspec.json.encode(results).replace(b'{"arm":', b'\n{"arm":') + b"\n"


def from_json(data: bytes) -> Results:
    return msgspec.json.decode(data, type=Results)
