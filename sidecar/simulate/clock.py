"""Virtual time: what is to happen when, in order; ties in the order in which they were asked for.

Most events of a simulation are never cancelled, so they are plain tuples on a heap (`at`). Only who must be able to
take an event back gets a handle (`call_at`), as an event loop gives one.
"""

import asyncio
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Callback = Callable[..., None]


class Timer(asyncio.TimerHandle):
    """A handle that no loop owns."""

    def __init__(self, when: float, callback: Callback) -> None:
        self._at = when
        self._does: Callback | None = callback

    def cancel(self) -> None:
        """It will not happen; again is harmless."""
        self._does = None

    def cancelled(self) -> bool:
        """Whether it was taken back, or has happened."""
        return self._does is None

    def when(self) -> float:
        """When it happens, in the clock's seconds."""
        return self._at

    def fire(self) -> None:
        """Its time has come."""
        does, self._does = self._does, None
        if does is not None:
            does()


class VirtualClock:
    """Time that goes on only in `run_until`. Seconds; what is asked for in the past happens next."""

    __slots__ = ("_count", "_heap", "now")

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._heap: list[tuple[float, int, Callback, tuple[Any, ...]]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    def time(self) -> float:
        """Now."""
        return self.now

    def at(self, when: float, callback: Callback, *args: Any) -> None:
        """Calls `callback(*args)` at `when`; it cannot be taken back."""
        self._count = count = self._count + 1
        heappush(self._heap, (when if when > self.now else self.now, count, callback, args))

    def call_at(self, when: float, callback: Callback) -> asyncio.TimerHandle:
        """Calls `callback()` at `when`, unless the handle is cancelled before."""
        timer = Timer(when, callback)
        self.at(when, timer.fire)
        return timer

    def run_until(self, end: float) -> None:
        """Lets time come to `end` (not before now) and everything happen that is due by then."""
        heap = self._heap
        while heap and heap[0][0] <= end:
            self.now, _, callback, args = heappop(heap)
            callback(*args)
        if end > self.now:
            self.now = end
