"""The transaction log of a process: which server it has, what is told to it once a second, what operators see of it.

Between `txlog`, which knows of no other package's rows, and those who use it: telemetry counts what ended, the fleet
decides, the admin pages show. `main` makes one and hands the pieces out.

Where no server can be had at the start (another sidecar's directory, no binary) the log is kept in this process, and a
line says so: traffic matters more than agreement.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

from sidecar.admin.facts import LogAway, LogRecord, LogView
from sidecar.core import evidence
from sidecar.core.breaker import Action, Scope, Transition
from sidecar.core.fleet import Fleet
from sidecar.core.service import ServiceState
from sidecar.kernel.ids import ServiceName
from sidecar.telemetry.logs import Logs
from sidecar.telemetry.tally import Tally
from sidecar.txlog import summary
from sidecar.txlog.codec import SHARDS, Record, Unreadable, parse_key
from sidecar.txlog.local import LocalStore
from sidecar.txlog.log import State, Subscription, TransactionLog
from sidecar.txlog.recording import Recorder
from sidecar.txlog.replica import Replica
from sidecar.txlog.store import Entry, Store, StoreDown
from sidecar.txlog.summary import Summary

START_S: Final = 2.0
"""How long a start waits to learn what all agree on; traffic then begins on local state, and the log is tried on."""

LEAVE_S: Final = 0.25
"""How long an end waits to give back what was lent to us: others would wait for its lease, and call it a failure."""


class Logbook:
    """The log of this sidecar, over `replica`. The admin pages' `LogFacts`."""

    def __init__(
        self,
        replica: Replica,
        tally: Tally,
        logs: Logs,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
        chance: Callable[[], float],
        tell: Callable[[Transition], None],
    ) -> None:
        self.replica = replica
        self.log: TransactionLog
        self.local = True
        self._tally = tally
        self._logs = logs
        self._clock = clock
        self._wall = wall
        self._chance = chance
        self._tell = tell
        self._teller = summary.Teller(replica.observer, int(wall() * 1000), clock())
        self._heard = summary.Heard(replica.observer)
        self.unreadable_summaries = 0
        self.on_summary: Callable[[Summary, int], None] = _nobody
        """Told of each summary that is read, once, ours too, with the server's milliseconds when it was appended."""

    @contextlib.asynccontextmanager
    async def kept(self, redis: str, prefix: str, data: Path, tasks: asyncio.TaskGroup) -> AsyncIterator["Logbook"]:
        """The log is followed while the context lasts; `redis` as `--redis` has it."""
        async with contextlib.AsyncExitStack() as stack:
            store = await self._store(redis, prefix, data, tasks, stack)
            self.log = TransactionLog(
                store, self.replica, clock=self._clock, wall=self._wall, chance=self._chance, say=self.say
            )
            self.replica.on_evidence = self._evidence
            following = tasks.create_task(self.log.run())
            try:
                try:
                    async with asyncio.timeout(START_S):
                        await self.log.ready.wait()
                except TimeoutError:
                    self.say("warning", "log_slow", waited_s=START_S, hint="serving on local state")
                yield self
            finally:
                with contextlib.suppress(TimeoutError, StoreDown):
                    async with asyncio.timeout(LEAVE_S):
                        await self.log.leave()
                self.log.end()
                following.cancel()

    async def _store(
        self, redis: str, prefix: str, data: Path, tasks: asyncio.TaskGroup, stack: contextlib.AsyncExitStack
    ) -> Store:
        if redis == "embedded":
            from sidecar.txlog import embedded

            try:
                redis = await stack.enter_async_context(embedded.running(data, tasks, self._say_embedded))
            except embedded.Unusable as exc:
                self.say("warning", "log_local", error=str(exc), hint="breakers are this sidecar's own, and forgotten")
                redis = "local"
        if redis == "local":
            return LocalStore(lambda: int(self._wall() * 1e6))
        # With its client, a tenth of a second of a start that does not need it.
        from sidecar.txlog.server import RedisStore

        self.local = False
        return RedisStore(redis, prefix)

    def say(self, level: str, event: str, **fields: Any) -> None:
        """An event of the log, in ours."""
        if self.local and event == "log_up":
            return  # there is nothing that could be away
        getattr(self._logs.event, level)(event, **fields)

    def _say_embedded(self, event: str, /, **fields: object) -> None:
        self.say("info" if event == "embedded_started" else "warning", event, **fields)

    def tick(self, fleet: Fleet, now: float) -> None:
        """Once a second: tells the others what was seen here."""
        for share in self._teller.tell(fleet, self._tally.take(), now):
            self.replica.share(share)

    def tell_trial(self, service: ServiceState, trial: bytes) -> None:
        """Tells the others what was seen of a service's rollout; `trial` as `summary.encode_trial` makes it."""
        self.replica.share(self._teller.tell_trial(service, trial), anyway=True)

    def _evidence(self, entry: Entry) -> None:
        try:
            seen = summary.decode(entry.data)
            at_ms = int(entry.id.partition("-")[0])
        except (Unreadable, ValueError):
            self.unreadable_summaries += 1
            return
        now = self._clock()
        if not self._heard.first(seen, at_ms, self.replica.server.now_us(now) // 1000):
            return
        self.on_summary(seen, at_ms)
        service = self.replica.fleet.services.get(ServiceName(seen.service))
        news = self._heard.news(seen)
        if service is not None and news:
            for transition in evidence.absorb(service, news, now):
                self._tell(transition)

    def order(self, scope: Scope, key: str, action: Action, by: str, for_s: float) -> None:
        """Tells all what an operator ordered here."""
        now = self._clock()
        for breaker in self.replica.fleet.find(scope, key, now):
            self.replica.order(breaker, action, by, for_s, now)

    # What operators see.

    def view(self) -> LogView:
        """How it stands."""
        log, replica = self.log, self.replica
        state = "local" if self.local and log.state is State.UP else log.state.value
        return LogView(
            state,
            log.since,
            log.last_error,
            log.lag_records,
            len(replica.ring),
            replica.ring.dropped,
            replica.members,
            max((replica.position(shard)[0] for shard in range(SHARDS)), key=_numbers),
        )

    async def history(self, key: str | None, since_us: int | None, limit: int) -> list[LogRecord]:
        """The newest records of one register, or of all."""
        try:
            found = await self.log.history(key, since_us, limit)
        except StoreDown as exc:
            raise LogAway(str(exc)) from exc
        return [_told(entry, record) for entry, record in found]

    def record(self, since_us: int, until_us: int, service: str) -> "Recording":
        """What was seen and what moved between two moments."""
        return Recording(Recorder(self.log.page, since_us // 1000, until_us // 1000, service, _breathe))

    def subscribe(self) -> "Live":
        """The records that are read from now on."""
        return Live(self.log.subscribe())


class Recording:
    """A span of the log, as operators read it."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    async def next(self) -> list[bytes]:
        """Its next lines; none: that was all."""
        try:
            return await self._recorder.next()
        except StoreDown as exc:
            raise LogAway(str(exc)) from exc


class Live:
    """One reader's live records, as operators see them."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription

    async def next(self) -> list[LogRecord]:
        """All that came since the last call; waits for the first."""
        return [_told(entry, record) for entry, record in await self._subscription.next()]

    @property
    def lost(self) -> int:
        """How many fell out so far."""
        return self._subscription.lost

    def close(self) -> None:
        """Nothing more is wanted."""
        self._subscription.close()


def _nobody(summary: Summary, at_ms: int) -> None:
    """Nobody wants them."""


async def _breathe() -> None:
    await asyncio.sleep(0)


def _told(entry: Entry, record: Record) -> LogRecord:
    scope, service, name = parse_key(record.key)
    return LogRecord(
        id=f"{entry.shard}:{entry.id}",
        ts_us=record.ts_us,
        key=record.key,
        scope=scope,
        service=service,
        name=name,
        kind=record.kind_word,
        state=record.state_word,
        epoch=record.epoch,
        version=record.version,
        why=record.why,
        evidence=record.evidence,
        by=record.by,
        tx=record.tx.hex(),
        trace=record.trace,
        held=record.held,
        expires_us=record.expires_us,
        wait_s=record.wait_ms / 1000,
    )


def _numbers(position: str) -> tuple[int, int]:
    ms, _, seq = position.partition("-")
    return int(ms or 0), int(seq or 0)
