"""Deadlines of all attempts on one timer of the event loop.

A timer of the loop costs a request more than a breaker does, and nearly all are cancelled unused. Here a deadline is
an entry in a set, one set per `SLOT_S` of time, and the loop has one timer, for the earliest set. A deadline may be
seen up to `SLOT_S` late, never early.

A process that was not run for a while (a cgroup out of its CPU time, a machine that is moved, SIGSTOP) heard nobody
meanwhile, and its loop comes to its timers before it reads: the silence was its own. What is due then is looked at
only after as much time again as it was not run, `GRACE_S` at most: then all is read that came meanwhile, and an engine
that stood still together with it has had its turn.
"""

import asyncio
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Final, Protocol

SLOT_S: Final = 0.02
"""Deadlines are tens of milliseconds at the very least, and 50 wake-ups a second cost nothing."""

HELD_S: Final = SLOT_S
"""A timer that comes so much too late: our loop stood still."""

GRACE_S: Final = 1.0

_PER_S: Final = 1 / SLOT_S


def grace_s(late_s: float) -> float:
    """How long to listen before anything that came due is believed, by how late its timer is: 0.0 for a loop that ran.

    To be asked for once per deadline: a loop that never keeps its time would otherwise wait for ever.
    """
    return min(late_s, GRACE_S) if late_s >= HELD_S else 0.0


class Timers(Protocol):
    """The part of an event loop that is needed here. Times are its monotonic seconds."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle: ...


class Watched(Protocol):
    """What has a deadline."""

    def look(self, now: float) -> None:
        """A deadline set earlier has come; it may have been moved since, and then is to be set again."""


class Watchdog:
    """Who is to be looked at, and when."""

    __slots__ = ("_grace_slot", "_looked", "_order", "_slots", "_timer", "_timer_at", "_timer_slot", "_timers")

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._slots: dict[int, set[Watched]] = {}
        self._order: list[int] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_slot = 0
        self._timer_at = 0.0  # when it can come, which is later than its slot for what was late when it was set
        self._grace_slot = -1  # where a grace ends, or ended
        self._looked = 0

    def __len__(self) -> int:
        return sum(len(watched) for watched in self._slots.values())

    def add(self, watched: Watched, due: float) -> int:
        """Have `watched` looked at once, at `due` or up to SLOT_S later. The slot, for `remove`."""
        slot = int(due * _PER_S) + 1
        if slot <= self._looked:
            # A slot that is being looked at must not fill up again, or looking would never end.
            slot = self._looked + 1
        there = self._slots.get(slot)
        if there is None:
            self._slots[slot] = {watched}
            heappush(self._order, slot)
            if self._timer is None or (slot < self._timer_slot and self._timer_slot != self._grace_slot):
                self._arm(slot)
        else:
            there.add(watched)
        return slot

    def remove(self, watched: Watched, slot: int) -> None:
        """Forget it; it may have been looked at already."""
        there = self._slots.get(slot)
        if there is not None:
            there.discard(watched)

    def _arm(self, slot: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_slot = slot
        self._timer_at = max(slot / _PER_S, self._timers.time())
        self._timer = self._timers.call_at(slot / _PER_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        # The loop's timers count whole milliseconds and may come that much early: it is the slot's time all the same.
        now = max(self._timers.time(), self._timer_slot / _PER_S)
        grace = grace_s(now - self._timer_at)
        if grace > 0.0 and self._timer_slot != self._grace_slot:
            self._grace_slot = int((now + grace) * _PER_S) + 1
            self._arm(self._grace_slot)
            return
        self._looked = current = max(int(now * _PER_S), self._timer_slot)
        order = self._order
        try:
            while order and order[0] <= current:
                there = self._slots[order[0]]
                while there:
                    there.pop().look(now)
                del self._slots[heappop(order)]
        finally:
            # Whatever a look has armed, there may be an earlier one; and one that crashed takes none but its own along.
            if order:
                self._arm(order[0])
