"""How soon the requests of a class usually get their first token, once it is their turn.

A quantile of what was seen lately and no mean: one prompt of 100,000 tokens is an hour of an average, and a class
promises to nearly all of its requests. It is read from a histogram (`sketch`) in which what is old counts less: memory
stays the same, and a figure is there from the first request on.
"""

from typing import Final

from sidecar.core.sketch import BUCKETS, bucket_of, seconds_in

KEPT: Final = 200.0  # the older half of so many counts half: at 1 request/s the last minutes, at 100 the last seconds
EVERY: Final = 8  # new ones after which the quantiles are read again
LIKELY: Final = 0.5  # late is only who would be late even so
FADES_S: Final = 10.0  # without any, after which half of what is reckoned with is left
CAREFUL: Final = 0.9  # who promises reckons with a slow one


class Usual:
    """Quantiles of recent times, in seconds; 0.0 while there are none."""

    __slots__ = ("_counts", "_faded_at", "_fresh", "_total", "careful_s", "likely_s", "seen")

    def __init__(self) -> None:
        self.likely_s = 0.0
        self.careful_s = 0.0
        self.seen = 0
        self._counts = [0.0] * BUCKETS
        self._total = 0.0
        self._fresh = 0
        self._faded_at = 0.0

    def add(self, seconds: float, now: float) -> None:
        """One more."""
        self._faded_at = now
        self._counts[bucket_of(seconds)] += 1.0
        self._total += 1.0
        self.seen += 1
        self._fresh += 1
        if self._fresh >= EVERY or self.seen < EVERY:
            self._fresh = 0
            self._read()

    def fade(self, now: float) -> None:
        """Believes old figures less: who is refused for being slow has no chance to be faster."""
        if now - self._faded_at >= FADES_S:
            self._faded_at = now
            self.likely_s *= 0.5
            self.careful_s *= 0.5

    def _read(self) -> None:
        counts = self._counts
        if self._total >= KEPT:
            for bucket in range(BUCKETS):
                counts[bucket] *= 0.5
            self._total *= 0.5
        below, likely, careful = 0.0, LIKELY * self._total, CAREFUL * self._total
        self.likely_s = 0.0
        for bucket in range(BUCKETS):
            count = counts[bucket]
            if count == 0.0:
                continue
            below += count
            if self.likely_s == 0.0 and below >= likely:
                self.likely_s = seconds_in(bucket)
            if below >= careful:
                self.careful_s = seconds_in(bucket)
                return
