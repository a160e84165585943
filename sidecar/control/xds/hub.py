"""All Envoys of this server together: which snapshot they are to have, and back to the last good one when one refuses.

xDS promises a snapshot to each Envoy by itself. That all have it, or none, is made here:

```
              tables change                    every Envoy that was there has taken it
   target = good ---------> target on trial ------------------------------------------> good = target
                                   |        \\-- or ACK_WAIT_S passed, some did and none refused --^
                                   | one refuses
                                   v
                            target = good, at once; what differs is barred, and its tables are restored
```

1. A refusal counts if it is of who may write (`control.writers`: it changes tables), who has taken a whole snapshot on
   this stream before, and of the snapshot on trial. One that refuses all that it is told (it is too old, or lacks an
   extension) takes nothing back for others, and one that refuses a snapshot which is past gets the present one.
2. Barred is a service as it was refused, not the snapshot: others change on, and it is barred until it changes. So a
   bad endpoint in a policy file, which nobody can restore, stops nothing else. Which services it was about, the refusal
   says (`_meant`); what else is on trial stays so.
3. The tables that made the difference are restored in the log, so that sidecars go where Envoys are. A table that has
   moved on meanwhile is left alone.
4. Who has said nothing for `ACK_WAIT_S` though there was something to answer is told, and holds nobody back until it
   is heard again, however fast changes follow each other.
5. While nobody is there whose refusals count (and nothing is barred), nothing is good: the first such Envoy proves the
   present anew.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec

from sidecar.control.xds.build import ReadCa, build
from sidecar.control.xds.snapshot import Kind, Part, Resource, Snapshot, compose
from sidecar.core.desk import Desk, Feed, Notice, TableView
from sidecar.core.revise import Refused
from sidecar.core.table import Table, decode
from sidecar.policy.schema import Service

ACK_WAIT_S: Final = 10.0
"""How long an Envoy may take to answer before the others' word is enough: its own limit for a first answer is 15 s."""
RESTORE_AGAIN_S: Final = 1.0
RESTORE_TRIES: Final = 60
"""A log that is away is tried for a minute; the service stays barred in any case."""
BY: Final = "xds"
WHY: Final = "xds_nack"
LEFT_OUT: Final = "xds_left_out"
_LATENCIES: Final = 1000
_MESSAGE_CHARACTERS: Final = 500

Say = Callable[..., None]
"""`say(level, event, **fields)`: a line in the log."""


class Source(Desk, Protocol):
    """The desk, as it is asked for one service at a time: there may be thousands, and one has changed."""

    def names(self) -> list[str]:
        """Every service, in the order of `effective`."""

    def service(self, name: str) -> Service | None:
        """One of them as `effective` has it."""

    def standing(self, service: str) -> TableView | None:
        """Its table as it stands; None: it has none."""


class Envoy(Protocol):
    """One stream, as the hub knows it."""

    name: str
    proven: bool
    why_not: str
    """Why its refusals take nothing back for others; empty: they do."""

    def wake(self) -> None:
        """There is another target."""


class Counts(msgspec.Struct):
    """Since the start; `ack_s` of the last `_LATENCIES` snapshots that all took: from the change to the last answer."""

    pushes: int = 0
    acks: int = 0
    nacks: int = 0
    rollbacks: int = 0
    ack_s: deque[float] = msgspec.field(default_factory=lambda: deque(maxlen=_LATENCIES))


class Hub:
    """The target of all streams. `clock`: monotonic seconds. Not for more than one thread."""

    def __init__(
        self,
        desk: Source,
        tasks: asyncio.TaskGroup,
        *,
        clock: Callable[[], float],
        say: Say,
        read_ca: ReadCa,
        listener: Resource | None = None,
    ) -> None:
        self.counts = Counts()
        self.envoys: set[Envoy] = set()
        self.target = compose((), listener)
        self.good: Snapshot | None = None
        self.ready = asyncio.Event()
        """Set once the target says what the desk does; until then nobody is told that there is nothing."""
        self._desk = desk
        self._tasks = tasks
        self._clock = clock
        self._say = say
        self._read_ca = read_ca
        self._listener = listener
        self._parts: dict[str, Part] = {}
        self._barred: dict[str, str] = {}
        """Fingerprints of parts that were refused, by service."""
        self._dead = ""
        """A whole snapshot that was refused though no part of it could be barred."""
        self._voters: set[Envoy] = set()
        self._waiting: set[Envoy] = set()
        self._owing: dict[Envoy, float] = {}
        """Since when nothing was heard of an Envoy that has something to answer."""
        self._silent: set[Envoy] = set()
        self._timed = False
        self._took = 0
        self._since = clock()
        self._timer: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()
        self._every = True
        self._changed: set[str] = set()

    # The tables.

    async def run(self, begin: asyncio.Event | None = None) -> None:
        """Follow the desk until cancelled. `begin`: not before that is set, since the desk does not know yet what
        stands, and Envoys may have it from an earlier server."""
        if begin is not None:
            await begin.wait()
        feed = self._desk.subscribe()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow(feed))
                while True:
                    every, some = self._every, self._changed
                    self._every, self._changed = False, set()
                    self._news.clear()
                    await self._rebuild(None if every else some)
                    self.ready.set()
                    await self._news.wait()
        finally:
            feed.close()
            self._stop_timer()

    def changed(self) -> None:
        """The policy files changed: look at every service again."""
        self._every = True
        self._news.set()

    async def _follow(self, feed: Feed) -> None:
        while True:
            events = await feed.next()
            if feed.lagged:
                self.changed()
            for event in events:
                if isinstance(event, TableView):
                    self._changed.add(event.table.service)
                    self._news.set()

    async def _rebuild(self, some: set[str] | None) -> None:
        """Take what the desk says now for the target; None: of all services. Waits between services, since requests may
        share the loop."""
        if some is None:
            names = self._desk.names()
        else:
            names = list(some)
        for name in names:
            try:
                made = self._look(name, some is None)
            except Exception as exc:  # noqa: BLE001 - one service stays as it was; the others, and traffic, go on
                self._say("error", "xds_crashed", service=name, exc_info=exc)
                continue
            if made:
                await asyncio.sleep(0)
        if some is None or not some <= self._parts.keys():
            # Their order says whose requests are those that name none.
            self._parts = {name: self._parts[name] for name in self._desk.names() if name in self._parts}
        self._aim()

    def _look(self, name: str, every: bool) -> bool:
        """Make a service's part, unless its table is the one that it was made from; whether it was made."""
        service, view = self._desk.service(name), self._desk.standing(name)
        had = self._parts.get(name)
        if service is None:
            return self._parts.pop(name, None) is not None
        table, version = (None, 0) if view is None else (view.table, view.version)
        if had is not None and version and had.table_version == version and not every:
            return False
        part = build(service, table, version, self._read_ca, had)
        if had is None or had.left_out != part.left_out:
            for words in part.left_out:
                self._say("warning", LEFT_OUT, service=name, why=words)
        for words in part.notices:
            if had is None or words not in had.notices:
                self._desk.notice(Notice(name, LEFT_OUT, words))
        self._parts[name] = part
        return True

    def _aim(self) -> None:
        """The target that is due: the present parts, but for those that are barred."""
        parts: list[Part] = []
        for name, part in self._parts.items():
            if self._barred.get(name) != part.fingerprint:
                self._barred.pop(name, None)
                parts.append(part)
            elif self.good is not None and name in self.good.parts:
                parts.append(self.good.parts[name])
        for name in self._barred.keys() - self._parts.keys():
            del self._barred[name]
        snapshot = compose(parts, self._listener, self.target)
        if snapshot.fingerprint == self._dead and self.good is not None:
            snapshot = self.good
        else:
            self._dead = ""
        if self.good is not None and snapshot.fingerprint == self.good.fingerprint:
            # The same, with the tables of today.
            good = msgspec.structs.replace(self.good, parts=snapshot.parts)
            if self.target is self.good:
                self.good = self.target = good
                return
            self.good = good
            self._use(good)
        elif snapshot.fingerprint != self.target.fingerprint:
            self._use(snapshot)
        else:
            self.target = msgspec.structs.replace(self.target, parts=snapshot.parts)

    def _use(self, snapshot: Snapshot) -> None:
        self.target = snapshot
        self._waiting = self.envoys - self._silent
        self._took = 0
        self._timed = self._is_trial
        self._since = self._clock()
        for envoy in self._waiting:
            self._owing.setdefault(envoy, self._since)
        self.counts.pushes += 1
        self._set_timer()
        for envoy in tuple(self.envoys):
            envoy.wake()

    # The Envoys.

    def joined(self, envoy: Envoy) -> None:
        """A stream began."""
        self.envoys.add(envoy)
        if not envoy.why_not:
            self._voters.add(envoy)

    def left(self, envoy: Envoy) -> None:
        """A stream ended."""
        for some in (self.envoys, self._voters, self._waiting, self._silent):
            some.discard(envoy)
        self._owing.pop(envoy, None)
        if not self._voters and not self._barred:
            self.good = None
        else:
            self._judge()

    def accepted(self, envoy: Envoy, snapshot: Snapshot) -> None:
        """An Envoy has all of a snapshot."""
        envoy.proven = True
        self._heard(envoy)
        if snapshot.fingerprint != self.target.fingerprint:
            return
        self._owing.pop(envoy, None)
        if envoy in self._waiting:
            self._waiting.discard(envoy)
            if not self._waiting and self._timed:
                self._tell_taken()
        self._took += not envoy.why_not
        self._judge()

    def acked(self, envoy: Envoy) -> None:
        """An Envoy has taken a push."""
        self.counts.acks += 1
        self._heard(envoy)

    def refused(self, envoy: Envoy, snapshot: Snapshot, kind: Kind, message: str) -> None:
        """An Envoy has refused a push of this snapshot."""
        self.counts.nacks += 1
        self._heard(envoy)
        message = message[:_MESSAGE_CHARACTERS]
        counts = envoy.proven and self._is_trial and snapshot.fingerprint == self.target.fingerprint
        back = counts and self.good is not None and not envoy.why_not
        said = {"unheeded": envoy.why_not} if envoy.why_not else {}
        self._say("warning", "xds_nack", envoy=envoy.name, kind=kind.word, error=message, taken_back=back, **said)
        if back:
            self._take_back(envoy, kind, message)

    def _heard(self, envoy: Envoy) -> None:
        """It is there, and speaks."""
        self._silent.discard(envoy)
        if envoy in self._owing:
            self._owing[envoy] = self._clock()

    @property
    def _is_trial(self) -> bool:
        return self.good is None or self.good.fingerprint != self.target.fingerprint

    def _judge(self) -> None:
        """Whether the target is good now: all that were there have taken it."""
        if self._is_trial and self._took and self._waiting.isdisjoint(self._voters):
            self._promote()

    def _promote(self) -> None:
        self.good = self.target

    def _tell_taken(self) -> None:
        took_s = self._clock() - self._since
        self.counts.ack_s.append(took_s)
        self._say("info", "xds_accepted", envoys=len(self.envoys), took_ms=round(took_s * 1000, 1))

    def _late(self) -> None:
        """Some have not answered in time: those that did are enough, if any did."""
        self._timer = None
        since = self._clock() - ACK_WAIT_S
        silent = {envoy for envoy in self._waiting if self._owing.get(envoy, since) <= since}
        if silent:
            names = sorted(envoy.name for envoy in silent)
            self._say("warning", "xds_silent", envoys=names[:20], of=len(self.envoys), waited_s=ACK_WAIT_S)
            self._silent |= silent
            self._waiting -= silent
            self._judge()
        self._set_timer()

    def _take_back(self, envoy: Envoy, kind: Kind, message: str) -> None:
        """All go back to what was good of the services that were meant, now; the tables follow."""
        good, bad = self.good, self.target
        if good is None:
            return
        self.counts.rollbacks += 1
        differing: list[tuple[Part, Part | None]] = []
        for name, part in bad.parts.items():
            before = good.parts.get(name)
            if before is None or before.fingerprint != part.fingerprint:
                differing.append((part, before))
        differing = _meant(differing, kind, message)
        for part, _ in differing:
            self._barred[part.name] = part.fingerprint
        if not differing:
            self._dead = bad.fingerprint
        self._aim()
        for part, before in differing:
            name = part.name
            self._desk.notice(Notice(name, WHY, f"{envoy.name} refused it: {message}"))
            table = _before(part, before)
            if table is not None:
                self._tasks.create_task(self._restore(part, table))

    async def _restore(self, bad: Part, table: Table) -> None:
        """Put a service's table back, as long as it is the one that was refused."""
        name = bad.name
        for _ in range(RESTORE_TRIES):
            view = self._desk.standing(name)
            if view is None or view.version != bad.table_version:
                return
            answer = await self._desk.restore(name, table, BY, WHY, bad.table_version)
            if not isinstance(answer, Refused) or answer.code == "stale":
                return
            self._say("warning", "xds_not_restored", service=name, code=answer.code, error=answer.message)
            if answer.code != "unavailable":
                return
            await asyncio.sleep(RESTORE_AGAIN_S)

    def _set_timer(self) -> None:
        """For the one of whom nothing was heard for longest."""
        self._stop_timer()
        if self._waiting:
            first = min(self._owing.get(envoy, self._since) for envoy in self._waiting)
            wait_s = max(0.001, first + ACK_WAIT_S - self._clock())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def left_out(self) -> int:
        """Endpoints that Envoys are not told."""
        return sum(
            len(part.left_out) + sum(each.endpoints for each in part.untold)
            for part in self._parts.values()
            if part.left_out or part.untold
        )

    def view(self) -> dict[str, Any]:
        """How it stands, for operators."""
        return {
            "envoys": sorted(envoy.name for envoy in self.envoys),
            "waiting": sorted(envoy.name for envoy in self._waiting) if self._is_trial else [],
            "barred": sorted(self._barred),
            "snapshot": self.target.fingerprint,
        }


def _meant(differing: list[tuple[Part, Part | None]], kind: Kind, message: str) -> list[tuple[Part, Part | None]]:
    """Those of them that a refusal is about: whose clusters Envoy's words name; else what differs in the refused kind;
    else all."""
    named = [(part, before) for part, before in differing if f"{part.name}|" in message]
    if named:
        return named
    of_kind = [
        (part, before) for part, before in differing if before is None or _said(part, kind) != _said(before, kind)
    ]
    return of_kind or differing


def _said(part: Part, kind: Kind) -> object:
    return (part.clusters, part.assignments, (), part.host)[kind]


def _before(bad: Part, good: Part | None) -> Table | None:
    """The table to restore; None: it was no table that changed."""
    if not bad.table or (good is not None and bad.table == good.table):
        return None
    # A table without versions says what the policy files say; and of a service that they do not name, nothing.
    return Table(bad.name) if good is None or not good.table else decode(good.table)
