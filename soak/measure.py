"""Figures over time, and whether memory is flat. Pure.

Resident memory climbs while tables fill and allocators find their size, so the first part is left out; after that it
goes in steps of whole arenas. So two bounds are kept: on the line through all samples, and on how far it rises in all.
A leak of 20 bytes a request is a megabyte a minute at 1,000 requests a second.
"""

from collections.abc import Sequence

import msgspec

WARM_UP = 0.25
"""The part of a soak that memory has for finding its size, at least `MIN_WARM_UP_S`."""

MIN_WARM_UP_S = 30.0

MAX_SLOPE_BYTES = 512 << 10
"""Bytes a minute that the line through all samples after the warm-up may rise."""

MAX_RISE_BYTES = 4 << 20
"""Bytes that it may rise in all. Where little time is left after the warm-up, this alone is asked."""

SLOPE_FROM_S = 180.0
"""A slope over less time tells of the allocator's steps and not of a leak."""


class Sampled(msgspec.Struct, frozen=True):
    """What was seen at one moment. `cpu_ratio`: of one core since the sample before; `sessions` of each service."""

    at_s: float
    rss_bytes: int
    cpu_ratio: float
    descriptors: int
    live: int
    in_flight: int
    upstream: int
    requests: int
    sessions: dict[str, int]


class Memory(msgspec.Struct, frozen=True):
    """Whether memory was flat: `measured_s` after the warm-up, `slope_bytes` a minute, `minutes` the least of each."""

    measured_s: float
    slope_bytes: float
    rise_bytes: float
    minutes: tuple[int, ...]
    flat: bool


def memory(sampled: Sequence[Sampled]) -> Memory:
    """Judges the samples' resident memory; too few to judge are flat."""
    duration_s = sampled[-1].at_s if sampled else 0.0
    warm_s = max(MIN_WARM_UP_S, WARM_UP * duration_s)
    late = [sample for sample in sampled if sample.at_s >= warm_s]
    by_minute: dict[int, int] = {}
    for sample in sampled:
        minute = int(sample.at_s // 60)
        by_minute[minute] = min(by_minute.get(minute, sample.rss_bytes), sample.rss_bytes)
    minutes = tuple(by_minute.values())
    if len(late) < 4:
        return Memory(0.0, 0.0, 0.0, minutes, True)
    slope_s = _slope([sample.at_s for sample in late], [float(sample.rss_bytes) for sample in late])
    measured_s = late[-1].at_s - late[0].at_s
    rise = slope_s * measured_s
    flat = rise <= MAX_RISE_BYTES and (measured_s < SLOPE_FROM_S or slope_s * 60.0 <= MAX_SLOPE_BYTES)
    return Memory(measured_s, slope_s * 60.0, rise, minutes, flat)


def _slope(times: Sequence[float], values: Sequence[float]) -> float:
    """The least-squares line's."""
    count = len(times)
    mean_t, mean_v = sum(times) / count, sum(values) / count
    spread = sum((at - mean_t) ** 2 for at in times)
    return sum((at - mean_t) * (value - mean_v) for at, value in zip(times, values, strict=True)) / spread


class Pace:
    """Turns a second, following the sidecar's CPU towards a share of one core."""

    def __init__(self, cpu_ratio: float, rate: float = 200.0) -> None:
        self._wanted = cpu_ratio
        self.rate = rate

    def saw(self, cpu_ratio: float, *, full: bool) -> None:
        """What the sidecar took of a core lately; `full`: no more turns fit in, so a higher rate would only pile up."""
        change = self._wanted / max(cpu_ratio, 0.01)
        self.rate = min(MAX_RATE, max(MIN_RATE, self.rate * min(1.0 if full else 1.3, max(0.7, change))))


MIN_RATE, MAX_RATE = 5.0, 2000.0
