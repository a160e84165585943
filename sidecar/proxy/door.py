"""Who waits for a turn: between a service's gate, which decides, and the exchanges that wait.

The gate (`core.gate.admit`) calls nobody: it gives out tickets. Here they are taken from it, in one place, whenever
something may have made room: a request left, or the time came that the gate asked for.

1. Whoever gets its turn runs at once, and may be over at once, which makes room again: that is noticed by whoever is
   giving turns already, and never by a call within a call.
2. A thousand may wait, and all be refused in one breath when the last breaker opens, or let through when a reload turns
   the gate off: after `ROUND` of them the loop may go on first.
3. A reload may turn a gate off, or give a service another one. Who waits at the old one is let through.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from math import inf
from typing import Final, Protocol, cast

from sidecar.core.gate.admit import Gate, Ticket, TurnedAway
from sidecar.core.service import ServiceState
from sidecar.kernel.ids import ServiceName
from sidecar.proxy.watchdog import Timers

ROUND: Final = 64
"""Turns given before the loop may go on: a few milliseconds."""

LEAST_S: Final = 0.001
"""Between two looks at a gate that has nothing to give."""


class Guest(Protocol):
    """Whose ticket it is: an exchange."""

    def turn_came(self) -> None:
        """It runs from now on."""

    def turned_away(self, away: TurnedAway) -> None:
        """It must not wait any longer; or, if it runs, it must make room."""


class Doors:
    """The doors of all services. One per pipeline."""

    __slots__ = ("_doors", "_on_crash", "_timers")

    def __init__(self, timers: Timers, on_crash: Callable[[BaseException], None]) -> None:
        self._timers = timers
        self._on_crash = on_crash
        self._doors: dict[ServiceName, Door] = {}

    def door(self, service: ServiceState, gate: Gate) -> "Door":
        """Where the service's requests go in."""
        door = self._doors.get(service.name)
        if door is None or door.gate is not gate or door.service is not service:
            self._renew(door)
            door = self._doors[service.name] = Door(service, gate, self._timers, self._on_crash)
        return door

    def policy_changed(self, services: Mapping[ServiceName, ServiceState]) -> None:
        """Let those through who wait where nobody is kept any more, and the others as far as there is more room now."""
        for name, door in list(self._doors.items()):
            if services.get(name) is not door.service or door.service.gate is not door.gate:
                del self._doors[name]
                self._renew(door)
            else:
                door.turn()

    def _renew(self, door: "Door | None") -> None:
        if door is not None:
            door.close()


class Door:
    """A service's gate with those who wait at it."""

    __slots__ = ("_again", "_due", "_let_go", "_on_crash", "_timer", "_timers", "_turning", "gate", "service")

    def __init__(
        self, service: ServiceState, gate: Gate, timers: Timers, on_crash: Callable[[BaseException], None]
    ) -> None:
        self.service = service
        self.gate = gate
        self._timers = timers
        self._on_crash = on_crash
        self._timer: asyncio.TimerHandle | None = None
        self._due = inf
        self._turning = False
        self._again = False
        self._let_go: deque[Ticket] = deque()
        """Of a gate that is gone, and to be told so."""

    def enter(self, ticket: Ticket, now: float) -> TurnedAway | bool:
        """As `Gate.enter`: True, it runs; False, `turn_came` or `turned_away` follows, never from within this call."""
        verdict = self.gate.enter(ticket, self.service.pool(ticket.model, ticket.version, ticket.without), now)
        if verdict is False:
            self._arm()
        return verdict

    def left(self, ticket: Ticket, tokens: int, now: float) -> None:
        """As `Gate.leave`; then whoever has room now gets its turn."""
        self.gate.leave(ticket, tokens, now)
        if self.gate.queued:
            self.turn()

    def turn(self) -> None:
        """Give turns to those for whom there is room, and an answer to those whose time is over."""
        if self._turning:
            self._again = True
            return
        self._turning = True
        left = ROUND
        try:
            while left > 0:
                self._again = False
                left = self._round(left)
                if not self._again:
                    break
        except Exception as exc:  # noqa: BLE001 - called by clocks and by others' ends: who waits must not be forgotten
            self._on_crash(exc)
        finally:
            self._turning = False
            self._arm(at_once=left <= 0)

    def close(self) -> None:
        """The gate is gone: all that wait go through."""
        if self._timer is not None:
            self._timer.cancel()
        self._let_go.extend(self.gate.abandon(self._timers.time()))
        self._let_through()

    def _let_through(self) -> None:
        self._timer = None
        for _ in range(min(ROUND, len(self._let_go))):
            cast("Guest", self._let_go.popleft().waiter).turn_came()
        if self._let_go:
            self._timer = self._timers.call_at(self._timers.time(), self._let_through)

    def _round(self, left: int) -> int:
        gate, now = self.gate, self._timers.time()
        for ticket, away in gate.turned_away(now):
            cast("Guest", ticket.waiter).turned_away(away)
            left -= 1
        while left > 0 and gate.queued:
            following = gate.take(self.service.pool, now)
            if following is None:
                break
            cast("Guest", following.waiter).turn_came()
            left -= 1
        return left

    def _arm(self, *, at_once: bool = False) -> None:
        """Have the clock call us when the gate wants it."""
        if self._turning or self._let_go:
            return
        now = self._timers.time()
        due = now if at_once else max(self.gate.due(now), now + LEAST_S)
        if self._timer is not None:
            if self._due <= due:
                return
            self._timer.cancel()
            self._timer = None
        if due < inf:
            self._due = due
            self._timer = self._timers.call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._due = inf
        self.turn()
