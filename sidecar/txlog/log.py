"""The log at work: connects, reads, writes, and starts again when the server went away. Nobody waits for it.

```
AWAY --open, Beat, every shard read--> UP --StoreDown--> AWAY
```

`Replica` decides; here are the loops that carry calls and entries between it and a `Store`. One loop writes, one per
lane reads, one tells that we live and asks how many records there are. Whatever fails in one of them ends all, the
replica is told that the server is away, and after a pause the whole is begun again: there is one way up.

A change between AWAY and UP is said once, a request that is served meanwhile says nothing. A server that a person must
change (`StoreUnfit`) is said once, too, and tried on: a password can be mended while we run.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from math import inf
from typing import Any, Final, Protocol

from sidecar.txlog.codec import SHARDS, Record, Unreadable, decode, parse_key, shard_of
from sidecar.txlog.fold import order_of
from sidecar.txlog.replica import Job, Replica
from sidecar.txlog.store import Beat, Call, Entry, Propose, Reply, Store, StoreDown, StoreUnfit

BLOCK_MS: Final = 500  # a read that finds nothing ends after this: how soon a shard that must be read whole is
COUNT: Final = 200  # entries of one stream in one read: about 2 ms of the loop
COALESCE_S: Final = 0.004
"""After a read that found something: a busy log is read 250 times a second and not once per record."""
SLICE: Final = 200  # registers taken over before the loop may go on
BEAT_S: Final = 1.0
IDLE_S: Final = 0.5  # how often the leases are looked at when nothing else is to be done
PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 0.5
"""Between two tries to connect: a tenth of a second each from a hundred sidecars is nothing to a server, and all shall
agree within a second after it is back."""
STEADY_S: Final = 10.0  # so long up, and the next end is a new matter
FALLS: Final = 3  # in a row, each sooner than that: a server that is restarted twice is not meant
FALLING_PAUSE_S: Final = 5.0
QUEUE: Final = 1000  # records that a slow reader of `subscribe` may be behind
SAID_S: Final = 1.0  # unreadable records are named at most this often; all are counted
PAGE: Final = 200


class Say(Protocol):
    """Logs an event; never waits, never raises."""

    def __call__(self, level: str, event: str, **fields: Any) -> None: ...


class State(StrEnum):
    """How it stands with the server."""

    STARTING = "starting"
    UP = "up"
    AWAY = "away"


class Subscription:
    """One reader's records from now on: a bounded queue, of which the oldest fall out."""

    def __init__(self, close: Callable[["Subscription"], None]) -> None:
        self._queue: deque[tuple[Entry, Record]] = deque()
        self._news = asyncio.Event()
        self._close = close
        self.lost = 0

    def put(self, entry: Entry, record: Record) -> None:
        """A record was read."""
        self._queue.append((entry, record))
        if len(self._queue) > QUEUE:
            self._queue.popleft()
            self.lost += 1
        self._news.set()

    async def next(self) -> list[tuple[Entry, Record]]:
        """All that came since the last call; waits for the first."""
        await self._news.wait()
        self._news.clear()
        some = list(self._queue)
        self._queue.clear()
        return some

    def close(self) -> None:
        """Nothing more is wanted."""
        self._close(self)


class TransactionLog:
    """The log of one sidecar. `clock`: monotonic seconds; `wall`: Unix seconds; `chance`: numbers in [0, 1)."""

    def __init__(
        self,
        store: Store,
        replica: Replica,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
        chance: Callable[[], float],
        say: Say,
    ) -> None:
        self._store = store
        self._replica = replica
        self._clock = clock
        self._wall = wall
        self._chance = chance
        self._say = say
        self._wake = asyncio.Event()
        self._readers: list[Subscription] = []
        self._silenced = 0
        self._may_say_at = 0.0
        self._unfit = ""  # what a person was told to change since it was last up
        self.state = State.STARTING
        self.since = wall()
        self.last_error = ""
        self.read_at = clock()
        self.lag_records = 0
        self.unreadable = 0
        self.crashes = 0
        self._crashed = ""
        self._ended = False
        self.ready = asyncio.Event()
        """Set once it is known how it stands: the shards were read, or the server did not answer."""
        self.learnt = asyncio.Event()
        """Set once the shards were read."""
        replica.wake = self._wake.set
        replica.on_record = self._heard
        replica.on_unreadable = self._unreadable

    @property
    def replica(self) -> Replica:
        """What this sidecar knows and tells."""
        return self._replica

    def end(self) -> None:
        """To be called before `run` is cancelled for good.

        Being cancelled is not enough: where one of its loops meets a fault as it is cancelled (a connection that
        another one let go of), a TaskGroup tells the fault and not the rest, and the log would begin again.
        """
        self._ended = True

    async def run(self) -> None:
        """Follow the log until cancelled (`end`)."""
        tries = falls = 0
        try:
            while True:
                down: StoreDown | None = None
                up_at = inf
                try:
                    await self._begin()
                    up_at = self._clock()
                    await self._follow()
                except* StoreDown as group:
                    down = _first(group)
                except* Exception as group:  # noqa: BLE001 - where the log begins: a fault of ours must not end the relay
                    self.crashes += 1
                    down = StoreDown("crashed", f"a fault of this sidecar: {group.exceptions[0]!r}")
                    fault = repr(group.exceptions[0])
                    if fault != self._crashed:  # a lasting one is said once
                        self._crashed = fault
                        self._say("error", "log_crashed", error=fault, exc_info=group)
                try:
                    await self._store.close()
                    self._went_away(down or StoreDown("closed", "the server ended the connection"))
                except Exception as exc:  # noqa: BLE001 - as above
                    self.crashes += 1
                    self._say("error", "log_crashed", error=repr(exc), exc_info=exc)
                if self._ended:
                    return
                lasted_s = self._clock() - up_at
                was_up = lasted_s >= 0.0
                tries = 0 if was_up else tries + 1
                if was_up:
                    falls = 0 if lasted_s >= STEADY_S else falls + 1
                pause_s = min(LONGEST_PAUSE_S, PAUSE_S * (1 << min(tries, 8)))
                if was_up and falls > FALLS:
                    # What fails as soon as it is up reads every shard whole at each try.
                    pause_s = min(FALLING_PAUSE_S, LONGEST_PAUSE_S * (1 << min(falls - FALLS - 1, 8)))
                await asyncio.sleep(pause_s * (0.5 + 0.5 * self._chance()))
        finally:
            await self._store.close()

    async def leave(self) -> None:
        """Tell what is left to tell, once, before the end; StoreDown."""
        if self.state is not State.UP:
            return
        now = self._clock()
        self._replica.leave(now)
        while jobs := self._replica.jobs(now):
            for job, reply in zip(jobs, await self._store.call([job.call for job in jobs]), strict=True):
                self._replica.replied(job, reply, now)

    async def put(self, call: Propose) -> Reply:
        """One call beside the ring, whose answer the fold has when it is here. StoreDown: it may have been done."""
        if self.state is not State.UP:
            raise StoreDown("away", self.last_error or "the log has not been reached yet")
        (reply,) = await self._store.call([call])
        self._replica.replied(Job(call), reply, self._clock())
        self._wake.set()  # what it found lost is to be restored
        return reply

    async def ask(self, calls: list[Call]) -> list[Reply]:
        """Calls that are no register's, beside the ring, in one round trip; the replies in their order.

        StoreDown: each of them may have been done. Some BATCH of them are a few milliseconds of the server's.
        """
        if self.state is not State.UP:
            raise StoreDown("away", self.last_error or "the log has not been reached yet")
        return await self._store.call(calls)

    async def _begin(self) -> None:
        store, replica = self._store, self._replica
        await store.open()
        # Also a proof that it takes writes: a replica or a full server answers, too.
        await self._beat()
        replica.went_up(self._clock())
        for shard in replica.stale:
            await self._read_whole(shard)
        if self.state is not State.UP:
            away_s = round(self._wall() - self.since, 3) if self.state is State.AWAY else None
            self._turn(State.UP)
            waiting = len(replica.ring)
            self._say("info", "log_up", members=replica.members, to_tell=waiting, away_s=away_s)
        self.ready.set()
        self.learnt.set()

    async def _follow(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._write())
            tasks.create_task(self._beats())
            for lane in range(len(self._store.lanes)):
                tasks.create_task(self._read(lane))

    async def _write(self) -> None:
        replica = self._replica
        while True:
            self._wake.clear()
            now = self._clock()
            replica.tick(now)
            jobs = replica.jobs(now)
            if jobs:
                sent = self._clock()
                replies = await self._store.call([job.call for job in jobs])
                received = self._clock()
                replica.server.told(replies[-1].now_us, sent, received)
                for job, reply in zip(jobs, replies, strict=True):
                    replica.replied(job, reply, received)
                await asyncio.sleep(0)  # a store in this process answers without waiting
                continue
            try:
                async with asyncio.timeout(min(IDLE_S, max(0.0, replica.next_at() - now))):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _read(self, lane: int) -> None:
        store, replica = self._store, self._replica
        shards = store.lanes[lane]
        while True:
            for shard in replica.stale:
                if shard in shards:
                    await self._read_whole(shard)
            after = {shard: replica.position(shard) for shard in shards}
            entries = await store.read(lane, after, BLOCK_MS, COUNT)
            self.read_at = self._clock()
            if entries:
                replica.entries(entries, self.read_at)
                await asyncio.sleep(COALESCE_S)

    async def _read_whole(self, shard: int) -> None:
        replica = self._replica
        image = await self._store.image(shard)
        replica.begin_image(image)
        there: dict[str, tuple[int, int, int, bytes]] = {}
        for first in range(0, len(image.registers), SLICE):
            some = image.registers[first : first + SLICE]
            for key, data in replica.registers(some, self._clock()):
                there[key] = order_of(data)
            await asyncio.sleep(0)
        replica.end_image(shard, there)
        self._wake.set()

    async def _beats(self) -> None:
        turn = 0
        while True:
            await asyncio.sleep(BEAT_S)
            await self._beat()
            counts = await self._store.counts()
            self.lag_records = self._replica.counted(counts)
            self._replica.fold.forget(turn % SHARDS, self._replica.server.now_us(self._clock()))
            turn += 1

    async def _beat(self) -> None:
        sent = self._clock()
        (reply,) = await self._store.call([Beat(by=self._replica.observer)])
        self._replica.server.told(reply.now_us, sent, self._clock())
        self._replica.members = max(1, reply.ms)

    def _went_away(self, down: StoreDown) -> None:
        self._replica.went_away(self._clock())
        changed = self.state is not State.AWAY
        self.last_error = str(down)
        if isinstance(down, StoreUnfit) and self.last_error != self._unfit:
            self._unfit, changed = self.last_error, True
        if self.state is not State.AWAY:
            self._turn(State.AWAY)
        if changed:
            hint = "traffic goes on; breakers are this sidecar's own until the log is back"
            self._say("warning", "log_away", cause=down.word, error=str(down), hint=hint)
        self.ready.set()

    def _turn(self, state: State) -> None:
        self.state = state
        self.since = self._wall()
        if state is State.UP:
            self._unfit = ""

    # For operators.

    def subscribe(self) -> Subscription:
        """The records that are read from now on."""
        reader = Subscription(self._unsubscribe)
        self._readers.append(reader)
        return reader

    async def history(self, key: str | None, since_us: int | None, limit: int) -> list[tuple[Entry, Record]]:
        """The newest `limit` records of one register, or of all, since then; oldest first. StoreDown, ValueError."""
        shards = range(SHARDS)
        if key is not None:
            parse_key(key)
            shards = range(shard_of(key), shard_of(key) + 1)
        found: list[tuple[Entry, Record]] = []
        for shard in shards:
            newest: list[tuple[Entry, Record]] = []
            before, over = "", False
            # Backwards, and of all keys no more than may be wanted.
            count = PAGE if key is not None else min(PAGE, limit)
            while not over and len(newest) < limit:
                page = await self._store.newest(shard, before=before, count=count)
                for entry in page:
                    record = _read(entry)
                    if record is not None and since_us is not None and record.ts_us < since_us:
                        over = True
                        break
                    if record is not None and key in (None, record.key):
                        newest.append((entry, record))
                if len(page) < count:
                    break
                before = page[-1].id
                await asyncio.sleep(0)
            found.extend(newest[:limit])
        found.sort(key=lambda each: (each[1].ts_us, each[0].shard, each[1].n))
        return found[-limit:]

    async def page(self, shard: int, *, evidence: bool, after: str, count: int) -> list[Entry]:
        """A piece of a shard's log or evidence, as it is. StoreDown."""
        return await self._store.history(shard, evidence=evidence, after=after, count=count)

    def _unsubscribe(self, reader: Subscription) -> None:
        if reader in self._readers:
            self._readers.remove(reader)

    def _heard(self, entry: Entry, record: Record) -> None:
        for reader in self._readers:
            reader.put(entry, record)

    def _unreadable(self, entry: Entry, why: str) -> None:
        self.unreadable += 1
        self._silenced += 1
        now = self._clock()
        if now >= self._may_say_at:
            self._may_say_at = now + SAID_S
            self._say("warning", "log_unreadable", shard=entry.shard, id=entry.id, error=why, skipped=self._silenced)
            self._silenced = 0


def _read(entry: Entry) -> Record | None:
    try:
        return decode(entry.data)
    except Unreadable:
        return None


def _first(group: BaseExceptionGroup[StoreDown]) -> StoreDown:
    """The first of them that says most: what a person must change."""
    downs: list[StoreDown] = []
    pending: list[BaseException] = [group]
    while pending:
        each = pending.pop()
        if isinstance(each, BaseExceptionGroup):
            pending.extend(each.exceptions)
        elif isinstance(each, StoreDown):
            downs.append(each)
    return next((down for down in downs if isinstance(down, StoreUnfit)), downs[0])
