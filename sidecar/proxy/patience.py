"""How long we wait for somebody's answer: `asyncio.timeout`, but for what our own standing still takes of it.

A process that was not run for a while comes to its timers before it reads, and what it waited for may lie there. The
watchdog forgives that to requests' deadlines; this is the same for what a coroutine waits for and is nobody's request:
the log's server, an issuer's keys, an engine that loads a model.
"""

import asyncio
from types import TracebackType
from typing import Final

from sidecar.proxy.watchdog import GRACE_S, Timers

READ_S: Final = 0.001
"""A timer so far ahead lets the loop read what is there; one of now does not."""


class Patience:
    """`async with Patience(seconds):` TimeoutError as of `asyncio.timeout`, `seconds` from the entry on.

    When they are over, what came meanwhile is read first: for as long again as the timer came late, `GRACE_S` at most,
    since whom we wait for may have stood still together with us. `timers`: None is the loop's.
    """

    __slots__ = ("_due", "_limit", "_seconds", "_timer", "_timers")

    def __init__(self, seconds: float, timers: Timers | None = None) -> None:
        self._seconds: Final = seconds
        self._timers = timers
        self._limit: Final = asyncio.timeout(None)
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()
        timers = self._timers or asyncio.get_running_loop()
        self._due = timers.time() + self._seconds
        self._timer = timers.call_at(self._due, lambda: self._on_timer(timers))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._limit.__aexit__(kind, error, trace)

    def _on_timer(self, timers: Timers) -> None:
        now = timers.time()
        self._timer = timers.call_at(now + min(max(now - self._due, READ_S), GRACE_S), self._end)

    def _end(self) -> None:
        self._limit.reschedule(asyncio.get_running_loop().time())
