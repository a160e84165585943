"""Sidecars that share token budgets through a log's server that is a round trip away, in virtual time.

The ledgers, the loop's words to the server (`sidecar.draws`) and the server's rules (`txlog.draws`) are the real
ones; between them there is a clock. What was admitted when, and what it came to use, is kept for who judges it.
"""

from collections.abc import Callable
from typing import Any

from sidecar.core.quotas.quota import Budget, Exceeded, Ledger, Reservation
from sidecar.draws import call_of, drawn_of
from sidecar.policy.schema import Quota
from sidecar.simulate.clock import VirtualClock
from sidecar.txlog.codec import budget_key
from sidecar.txlog.draws import Budgets
from sidecar.txlog.store import Draw, Unit, Window, drawn

BEGIN_US = 1_700_000_000_000_000


class Server:
    """The log's server; what is asked while it is down fails."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.budgets = Budgets()
        self.up = True
        self.mute = False
        """It does what it is asked, and the answer is lost."""
        self.calls = 0

    def now_us(self, at: float) -> int:
        return BEGIN_US + int(at * 1e6)

    def told(self, quota: str, tenant: str) -> list[int]:
        """What is in use of a budget's tokens of a minute and requests of a day, as everybody would be told."""
        windows = (Window(Unit.TOKENS, 60_000, 1), Window(Unit.REQUESTS, 86_400_000, 1))
        call = Draw(key=budget_key(quota, tenant), by="nobody", windows=windows)
        return [part.used for part in drawn(self.budgets.draw(call, self.now_us(self._clock.now))).parts]

    def restart(self) -> None:
        """It is there again, and knows nothing."""
        self.budgets = Budgets()
        self.up = True


class Sidecar:
    """One ledger and its loop. `round_trip_s` there and back."""

    def __init__(self, name: str, world: "World", round_trip_s: float) -> None:
        self.name = name
        self.world = world
        self.ledger = Ledger()
        self.ledger.wake = self._turn_soon
        self._trip_s = round_trip_s
        self._asking = False
        self._turn_at = float("inf")

    def sees(self, up: bool) -> None:
        """The log is there, or is not: as the log itself finds out."""
        if up:
            self.ledger.members = len(self.world.sidecars)
            self.ledger.came_back(self.world.now)
            self._turn_soon()
        else:
            self.ledger.went_away(len(self.world.sidecars), self.world.now)

    def leave(self) -> None:
        """It ends."""
        server = self.world.server
        for draw in self.ledger.leave(self.world.now):
            server.budgets.draw(call_of(draw, self.name, server.now_us), server.now_us(self.world.now))
        self.ledger = Ledger()

    def look(self) -> None:
        """The log finds out how it stands."""
        self.sees(self.world.server.up)

    def _turn_soon(self) -> None:
        self._turn_by(self.world.now)

    def _turn_by(self, at: float) -> None:
        if at < self._turn_at:
            self._turn_at = at
            self.world.clock.at(at, self._turn, at)

    def _turn(self, at: float) -> None:
        if at != self._turn_at:
            return
        self._turn_at = float("inf")
        if self._asking:
            return
        now, server = self.world.now, self.world.server
        draws = self.ledger.wants(now)
        if draws:
            self._asking = True
            calls = [call_of(draw, self.name, server.now_us) for draw in draws]
            self.world.clock.at(now + self._trip_s / 2, self._reach, draws, calls)
        else:
            self._turn_by(max(self.ledger.next_at(), now + 0.001))

    def _reach(self, draws: Any, calls: Any) -> None:
        now, server = self.world.now, self.world.server
        replies = [server.budgets.draw(call, server.now_us(now)) for call in calls] if server.up else []
        server.calls += len(calls)
        self.world.clock.at(now + self._trip_s / 2, self._return, draws, [] if server.mute else replies)

    def _return(self, draws: Any, replies: Any) -> None:
        self._asking = False
        now = self.world.now
        if not replies:
            self.ledger.went_away(len(self.world.sidecars), now)
            self.world.clock.at(now + 0.05, self.look)
        for place, draw in enumerate(draws):
            if replies:
                self.ledger.drawn(draw, drawn_of(replies[place]), now)
            else:
                self.ledger.undrawn(draw, now)
        self._turn_soon()


class World:
    """`count` sidecars with one policy and one server."""

    def __init__(self, count: int, *quotas: Quota, round_trip_s: float = 0.002) -> None:
        self.clock = VirtualClock(1000.0)
        self.server = Server(self.clock)
        self.sidecars: list[Sidecar] = []
        self.sidecars += [Sidecar(f"pod-{number}", self, round_trip_s) for number in range(count)]
        for sidecar in self.sidecars:
            sidecar.ledger.use(quotas, self.now)
            sidecar.ledger.members = count
        self.admitted: list[tuple[float, int]] = []
        """When, and how many tokens it used in the end."""
        self.refused: list[tuple[float, Exceeded]] = []

    @property
    def now(self) -> float:
        return self.clock.now

    def budgets(self, tenant: str) -> list[Budget]:
        """A tenant's, on all sidecars."""
        return [budget for sidecar in self.sidecars for budget in sidecar.ledger.known(tenant)]

    def ask(
        self,
        sidecar: Sidecar,
        tenant: str,
        tokens: int,
        used: int | None = None,
        lasts_s: float = 1.0,
        model: str = "m",
    ) -> Reservation | Exceeded:
        """A request of `tokens` by its estimate, that uses `used` (None: as many) and lasts so long."""
        ledger = sidecar.ledger
        held = ledger.reserve(ledger.budgets(tenant, model), tokens, self.now)
        if isinstance(held, Exceeded):
            self.refused.append((self.now, held))
            return held
        spent = tokens if used is None else used
        self.admitted.append((self.now, spent))
        self.clock.at(self.now + lasts_s, lambda: ledger.settle(held, spent, self.now))
        return held

    def every(self, gap: Callable[[], float], until: float, does: Callable[[], None]) -> None:
        """Does something again and again, `gap()` apart."""

        def again() -> None:
            if self.now < until:
                does()
                self.clock.at(self.now + gap(), again)

        self.clock.at(self.now + gap(), again)

    def run(self, seconds: float) -> None:
        self.clock.run_until(self.now + seconds)

    def lose(self, seen_after_s: float = 0.05) -> None:
        """The server is gone; the sidecars' logs find out."""
        self.server.up = False
        for sidecar in self.sidecars:
            self.clock.at(self.now + seen_after_s, sidecar.look)

    def find(self, forgot: bool, within_s: float = 0.5) -> None:
        """The server is there again, with what it knew or without; the sidecars find out one after the other."""
        if forgot:
            self.server.restart()
        self.server.up = True
        for place, sidecar in enumerate(self.sidecars):
            self.clock.at(self.now + within_s * (place + 1) / len(self.sidecars), sidecar.look)


def most_in_a_span(admitted: list[tuple[float, int]], span_s: float = 60.0, step_s: float = 0.0) -> int:
    """The most that was used in any `span_s`; with `step_s` only spans that begin at a multiple of it."""
    most = total = first = 0
    if step_s:
        sums: dict[int, int] = {}
        for at, used in admitted:
            sums[int(at / step_s)] = sums.get(int(at / step_s), 0) + used
        return max(sums.values(), default=0)
    for at, used in admitted:
        total += used
        while admitted[first][0] <= at - span_s:
            total -= admitted[first][1]
            first += 1
        most = max(most, total)
    return most
