"""A clock that goes only when told, with the timers that hang on it: the part of an event loop that deadlines need."""

import asyncio
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

START_S = 1000.0


class Timer(asyncio.TimerHandle):
    """A handle that no loop owns."""

    def __init__(self, when: float, callback: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._at = when
        self.callback = callback
        self.args = args
        self.off = False

    def cancel(self) -> None:
        self.off = True
        self.callback, self.args = _nothing, ()

    def cancelled(self) -> bool:
        return self.off

    def when(self) -> float:
        return self._at


def _nothing() -> None: ...


class Clock:
    """Virtual time. `advance` runs what falls due on the way, in order; `early_s` makes every timer come that early."""

    def __init__(self, early_s: float = 0.0) -> None:
        self.now = START_S
        self.early_s = early_s
        self._timers: list[tuple[float, int, Timer]] = []
        self._count = 0

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[..., None], *args: Any) -> asyncio.TimerHandle:
        timer = Timer(when, callback, args)
        self._count += 1
        heappush(self._timers, (when - self.early_s, self._count, timer))
        return timer

    def call_later(self, delay: float, callback: Callable[..., None], *args: Any) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback, *args)

    @property
    def armed(self) -> list[float]:
        """When timers will fire that were not cancelled."""
        return sorted(timer.when() for _, _, timer in self._timers if not timer.off)

    def forget(self) -> None:
        """Drop timers that were cancelled, as loops do in time."""
        self._timers = [entry for entry in self._timers if not entry[2].off]
        heapify(self._timers)

    def advance(self, seconds: float) -> None:
        """Let time go by."""
        self.advance_to(self.now + seconds)

    def advance_to(self, end: float) -> None:
        """Let time come to `end`."""
        fired = 0
        while self._timers and self._timers[0][0] <= end:
            at, _, timer = heappop(self._timers)
            self.now = max(self.now, at)
            if not timer.off:
                timer.off = True
                timer.callback(*timer.args)
                fired += 1
                assert fired < 100_000, "timers that set themselves again without end"
        self.now = max(self.now, end)
