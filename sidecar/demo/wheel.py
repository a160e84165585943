"""One timer for thousands of paced streams.

A timer per stream and token costs a heap operation and a loop wake-up for each; here everything due within the same
millisecond shares one wake-up, and a stream is queued by one list append. Nothing is cancelled: what is no longer
wanted returns at once when it is called.
"""

import asyncio
import heapq
from collections.abc import Callable

TICK_S = 0.001
"""Streams run at tens of milliseconds a token; a millisecond of lateness is below what loops and kernels add."""


class Wheel:
    """Calls `step(now)` at or up to one tick after the asked time, in the order of asking within a tick."""

    __slots__ = ("_armed", "_buckets", "_loop", "_ticks", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._buckets: dict[int, list[Callable[[float], None]]] = {}
        self._ticks: list[int] = []
        self._armed = 0
        self._timer: asyncio.TimerHandle | None = None

    def at(self, when: float, step: Callable[[float], None]) -> None:
        """Queue `step` for loop time `when`; a time in the past means the next tick, never within this call."""
        tick = int(when / TICK_S) + 1
        bucket = self._buckets.get(tick)
        if bucket is not None:
            bucket.append(step)
            return
        self._buckets[tick] = [step]
        heapq.heappush(self._ticks, tick)
        if self._timer is None or tick < self._armed:
            self._arm()

    def stop(self) -> None:
        """Forget everything queued."""
        self._buckets.clear()
        self._ticks.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ticks:
            self._armed = self._ticks[0]
            self._timer = self._loop.call_at(self._armed * TICK_S, self._turn)

    def _turn(self) -> None:
        now = self._loop.time()
        # Timers may fire a hair early; without the half tick that would turn once more for nothing.
        last = int(now / TICK_S + 0.5)
        self._armed = -1  # nothing arms while we turn: one arming at the end serves all that was queued
        due = []
        while self._ticks and self._ticks[0] <= last:
            due.append(self._buckets.pop(heapq.heappop(self._ticks)))
        try:
            for bucket in due:
                for step in bucket:
                    step(now)
        finally:
            self._arm()
