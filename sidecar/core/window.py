"""A sliding count over the last seconds: a ring of buckets with running sums.

Buckets and not a deque of timestamps: memory stays the same at any rate, and the usual call touches two integers.
The price is that the window's old edge moves in steps: it covers between (n-1)/n and all of its span.
"""

from typing import Final

BUCKETS: Final = 10  # the oldest tenth falls out at once: coarse enough to be cheap, fine enough that no rule notices


class Window:
    """Counts events, and how many of them are marked (a failure, a retry), over the last `span_s` seconds.

    `span_s` > 0. A clock that goes backwards adds to the newest bucket; nothing is lost and nothing raises.
    """

    __slots__ = ("_edge", "_marked", "_newest", "_total", "_width", "marked", "span_s", "total")

    def __init__(self, span_s: float, now: float) -> None:
        self.span_s = span_s
        self._width = span_s / BUCKETS
        self.clear(now)

    def clear(self, now: float) -> None:
        """Forgets everything."""
        self.total = 0
        self.marked = 0
        self._total = [0] * BUCKETS
        self._marked = [0] * BUCKETS
        self._newest = int(now / self._width)
        self._edge = (self._newest + 1) * self._width

    def count(self, now: float, marked: bool) -> None:
        """Adds one event at `now`."""
        if now >= self._edge:
            self.advance(now)
        slot = self._newest % BUCKETS
        self._total[slot] += 1
        self.total += 1
        if marked:
            self._marked[slot] += 1
            self.marked += 1

    def advance(self, now: float) -> None:
        """Drops what is older than the span; `total` and `marked` are right for `now` afterwards."""
        if now < self._edge:
            return
        newest = int(now / self._width)
        if newest - self._newest >= BUCKETS:
            self.clear(now)
            return
        for number in range(self._newest + 1, newest + 1):
            slot = number % BUCKETS
            self.total -= self._total[slot]
            self.marked -= self._marked[slot]
            self._total[slot] = 0
            self._marked[slot] = 0
        # Division may round a moment at the very edge down into the old bucket: the ring never turns back.
        self._newest = max(newest, self._newest)
        self._edge = (self._newest + 1) * self._width
