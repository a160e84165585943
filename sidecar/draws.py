"""Token budgets on this sidecar: carries what the ledger wants and gives back to the log's server. No request waits.

```
a request reserves, settles -> the ledger's wake -> draws, many in one round trip -> replies -> slices for the next ones
```

A tenant that is busy here is asked for at most every 50 ms, and one round trip is made at a time, with whatever is due
by then, up to `BATCH` budgets each `PAUSE_S`: however many tenants there are, requests keep most of the loop. A failed
one tells the ledger that the log is away, before the log itself may have noticed; until the log says that it is there
again, nothing is asked. A server that has lost all counts the sidecars anew as they come: for `REJOIN_S` fewer than
there were are not believed, or the first to come would take the part of all. Whoever ends gives back what it holds, or
the others would have to do without it until the window is over.

A server that answers and refuses does so for one budget's sake: keys that are another program's, or broken. That one is
said, goes without, and is tried again after `REFUSED_S`; the others of its round trip are asked one by one. Where
nothing went well for `REFUSED_S` it is the server, and the log is away.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final, Protocol

from sidecar.core.quotas import quota as ledgers
from sidecar.core.quotas.meter import REQUESTS
from sidecar.core.quotas.quota import Ledger
from sidecar.txlog.codec import budget_key
from sidecar.txlog.log import State
from sidecar.txlog.store import Call, Draw, Reply, StoreDown, Unit, Window, drawn

AWAY_LOOK_S: Final = 0.05
"""How often it is looked whether the log is back: a budget that is shared out is used too little meanwhile."""
LOOK_S: Final = 0.25
"""How often it is looked whether the log is there while nothing is to be asked."""
PAUSE_S: Final = 0.02
REJOIN_S: Final = 5.0
LEAVE_S: Final = 0.25
CRASHED_S: Final = 1.0
REFUSED_S: Final = 5.0
SAID_S: Final = 60.0
"""Budgets that are refused are said at most so often, and how many more there were."""
_OF_ONE: Final = frozenset({"foreign", "server"})
"""What a server says of a call's keys, and not of itself (`StoreDown.word`)."""


class Say(Protocol):
    """Logs an event; never waits, never raises."""

    def __call__(self, level: str, event: str, **fields: Any) -> None: ...


class Log(Protocol):
    """`TransactionLog`, as far as budgets go."""

    @property
    def state(self) -> State: ...

    async def ask(self, calls: list[Call]) -> list[Reply]: ...


class Quotas:
    """Draws for one ledger. `clock` gives monotonic seconds, `server_us` the log server's microseconds at one."""

    def __init__(
        self,
        ledger: Ledger,
        log: Log,
        *,
        observer: str,
        members: Callable[[], int],
        clock: Callable[[], float],
        server_us: Callable[[float], int],
        say: Say,
    ) -> None:
        self.ledger = ledger
        self._log = log
        self._observer = observer
        self._members = members
        self._clock = clock
        self._server_us = server_us
        self._say = say
        self._wake = asyncio.Event()
        self._up = True
        self._rejoined_at = -REJOIN_S
        self._went_well_at = -REFUSED_S
        self._refused = 0
        self._may_say_at = 0.0
        ledger.wake = self._wake.set

    async def run(self) -> None:
        """Draw whenever something is wanted, until cancelled; what is under way then counts as failed."""
        while True:
            try:
                await self.turn()
            except Exception as exc:  # noqa: BLE001 - requests go on by what is held and on credit
                self._say("error", "quotas_crashed", exc_info=exc)
                await asyncio.sleep(CRASHED_S)

    async def turn(self) -> None:
        """Ask once, or wait until something is to be asked, at most `LOOK_S`."""
        ledger, now = self.ledger, self._clock()
        if self._log.state is not State.UP:
            self._lose(now)
            await asyncio.sleep(AWAY_LOOK_S)
            return
        if not self._up:
            self._up = True
            self._rejoined_at = now
            ledger.came_back(now)
        members = self._members()
        ledger.members = max(members, ledger.members) if now - self._rejoined_at < REJOIN_S else members
        self._wake.clear()
        draws = ledger.wants(now)
        if draws:
            await self._ask(draws)
            if len(draws) == ledgers.BATCH:
                await asyncio.sleep(PAUSE_S)
            return
        wait_s = ledger.next_at() - self._clock()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(LOOK_S, max(0.0, wait_s))):
                await self._wake.wait()

    async def leave(self) -> None:
        """Give back all that is held, before the end: once, for at most `LEAVE_S`. `run` has been cancelled."""
        await asyncio.sleep(0)  # what it had under way has failed by now
        if self._log.state is not State.UP:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                draws = self.ledger.leave(self._clock())
                while draws:
                    await self._ask(draws[: ledgers.BATCH])
                    del draws[: ledgers.BATCH]

    def _lose(self, now: float) -> None:
        self._up = False
        self.ledger.went_away(max(self._members(), self.ledger.members), now)

    async def _ask(self, draws: list[ledgers.Draw]) -> None:
        ledger = self.ledger
        replies: list[Reply | None] = []
        try:
            replies = await self._replies(draws)
        finally:
            now = self._clock()
            for place, draw in enumerate(draws):
                reply = replies[place] if place < len(replies) else None
                if reply is not None and reply.record:
                    ledger.drawn(draw, drawn_of(reply), now)
                else:
                    ledger.undrawn(draw, now, REFUSED_S if place < len(replies) else ledgers.ASK_S)
        await asyncio.sleep(0)  # a store in this process answers without waiting

    async def _replies(self, draws: list[ledgers.Draw]) -> list[Reply | None]:
        """What the server answers, as far as it does; None: that one it refuses."""
        calls: list[Call] = [call_of(draw, self._observer, self._server_us) for draw in draws]
        replies: list[Reply | None] = []
        try:
            replies += await self._log.ask(calls)
        except StoreDown as exc:
            if exc.word not in _OF_ONE:
                self._lose(self._clock())
                return []
            for draw, call in zip(draws, calls, strict=True):
                try:
                    replies += await self._log.ask([call])
                except StoreDown as why:
                    if why.word not in _OF_ONE:
                        self._lose(self._clock())
                        return replies
                    replies.append(None)
                    self._tell(draw, why)
        now = self._clock()
        if any(replies):
            self._went_well_at = now
        elif now - self._went_well_at >= REFUSED_S:
            self._lose(now)
        return replies

    def _tell(self, draw: ledgers.Draw, why: StoreDown) -> None:
        self._refused += 1
        now = self._clock()
        if now >= self._may_say_at:
            self._may_say_at = now + SAID_S
            self._say("warning", "quota_unreadable", quota=draw.budget.rule.name, error=str(why), refused=self._refused)
            self._refused = 0


def call_of(draw: ledgers.Draw, observer: str, server_us: Callable[[float], int]) -> Draw:
    """A draw in the server's words."""
    return Draw(
        key=budget_key(draw.budget.rule.name, draw.budget.tenant),
        by=observer,
        windows=tuple(
            Window(
                Unit.REQUESTS if portion.meter.unit == REQUESTS else Unit.TOKENS,
                round(portion.meter.span_s * 1000),
                portion.meter.limit,
                must=portion.must,
                want=portion.want,
                give_back=portion.back,
                least=portion.least,
                give_back_us=server_us(portion.back_at) if portion.back_at else 0,
            )
            for portion in draw.portions
        ),
        slots_limit=draw.slots_limit,
        slots_used=draw.slots_used,
        slots_want=draw.slots_want,
    )


def drawn_of(reply: Reply) -> ledgers.Drawn:
    """Its answer in the ledger's."""
    told = drawn(reply)
    return ledgers.Drawn(
        [part.granted for part in told.parts],
        [part.used for part in told.parts],
        [part.ms / 1000 for part in told.parts],
        told.slots,
        told.slots_in_use,
        told.born_us,
        told.before_us,
        reply.now_us,
    )
