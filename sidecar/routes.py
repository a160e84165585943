"""The desk: the routing tables of all services, in the log and on this sidecar.

```
asked for -> held against the rules -> a record under the version it was made for -> the log -> every sidecar's fold
          -> `effective`: the policy file's service with the table over it -> the fleet, in one assignment
```

1. What stands is what the log says, and nothing else: a table that we asked for reaches our fleet the way others' do,
   with the answer to our call or before it. So the answer to an update is also a promise about this sidecar.
2. A record is written under the version that it was made for (CAS). Who was slower works it out anew from what stands
   now, `TRIES` times at most, unless the asker named the version.
3. While the log is away nothing is changed, and nobody waits longer than `PATIENCE_S`: the asker keeps the update. A
   write whose answer is lost is repeated as the same record (`tx`); if another came in between, the log's history says
   whether ours was there.
4. A table that cannot be used here, or not be read, is counted and said once, and the one before it stays in the fleet.
   What cannot be read is not written over: a later release may have written it. So nothing is written that could not
   be read.
5. A service that no file names gets the defaults, the mesh's rules, and its table's models. As many as `EAGER`
   endpoints of those are made at once; the rest sleep until somebody asks for their models (`core.fleet`), and of long
   tables that sleep only the record is kept. Where the table names no endpoint either (it turns a zone down, or weighs
   the versions of others' files), there is no such service here: it must not take a model from one that has it.
6. Whose table stands: of two sidecars whose files differ, the first update of a service begins with what the writer's
   files say (`table.started`). Endpoints that only a file names stay that sidecar's own.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

from msgspec.structs import replace

from sidecar.core import rollout
from sidecar.core.desk import Action, Event, Notice, TableView, outline
from sidecar.core.revise import Accepted, Refused, Update
from sidecar.core.rules import revise
from sidecar.core.table import (
    PARTS,
    WRITABLE_BYTES,
    BadTable,
    Table,
    decode,
    effective,
    encode,
    reweighed,
    strangers,
    table_version,
)
from sidecar.kernel.count import counted
from sidecar.kernel.ids import ServiceName
from sidecar.policy.check import check_service
from sidecar.policy.errors import path_of
from sidecar.policy.load import unlisted
from sidecar.policy.schema import Service, Snapshot
from sidecar.txlog.codec import MAX_RECORD_BYTES, MAX_TABLE_BYTES, TX_BYTES, Code, Kind, Record, encode_body, route_key
from sidecar.txlog.codec import decode as read
from sidecar.txlog.replica import MAX_EVIDENCE, Replica
from sidecar.txlog.store import Entry, Propose, Reply, StoreDown, Verdict

TRIES: Final = 32
"""Of one update that others are always faster than: more than there are sidecars who would write at the same moment."""
PATIENCE_S: Final = 2.0
"""How long an asker waits for a log that is away, or for a version that we have not read yet."""
PAUSE_S: Final = 0.05  # between two tries of a log that is away
TURN_S: Final = 0.25  # that an update has at least that waited so long for those before it
QUEUE: Final = 256
"""Events that one subscriber may be behind."""
EAGER: Final = 10_000
"""Endpoints of services that no file names which are made before anybody asks: 35 MB."""
LONG: Final = 100
"""Endpoints of a table that is kept decoded though nobody asks for its service."""
MAX_BY: Final = 128
HISTORY: Final = 64  # records of one table, among which one of ours is looked for

Decide = Callable[[Table | None, int], Table | Refused | Accepted]
"""What becomes of the table that stands, and its version: asked again whenever another was faster."""


class Log(Protocol):
    """The log, as tables are written to it."""

    async def put(self, call: Propose) -> Reply:
        """One call; StoreDown: it may have been done."""

    async def history(self, key: str | None, since_us: int | None, limit: int) -> list[tuple[Entry, Record]]:
        """The newest records of a register; StoreDown."""


class Say(Protocol):
    """Logs an event; never waits, never raises."""

    def __call__(self, level: str, event: str, **fields: Any) -> None: ...


class Routes:
    """`core.desk.Desk` over the log. Made before the log is followed, so that no table is missed; `log` comes then.

    `use` puts one service's policy in force here. `clock` gives monotonic seconds, `new_id` fresh random bytes. Not for
    more than one thread.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        use: Callable[[Service], None],
        clock: Callable[[], float],
        new_id: Callable[[], bytes],
        say: Say,
    ) -> None:
        self.log: Log | None = None
        self.unusable = 0
        """Tables that came and were not taken."""
        self.crashes = 0
        self._replica = replica
        self._use = use
        self._clock = clock
        self._new_id = new_id
        self._say = say
        self._snapshot = Snapshot(version=0, services=())
        self._files: dict[str, Service] = {}
        self._orders: dict[str, tuple[int, int, int, bytes]] = {}
        self._views: dict[str, TableView] = {}
        self._outlines: dict[str, TableView] = {}
        self._unreadable: dict[str, str] = {}
        self._used: dict[str, tuple[Service, Table, Service]] = {}
        self._eager: dict[str, int] = {}
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}
        self._feeds: list[_Feed] = []
        self._changed = asyncio.Event()
        replica.on_route = self.heard
        replica.fleet.wake = self._wake

    # What is asked.

    def tables(self) -> list[TableView]:
        """See `Desk`."""
        return [view for name in sorted(self._orders) if (view := self.standing(name)) is not None]

    def outlines(self) -> list[TableView]:
        """See `Desk`."""
        return [self._outlines[name] for name in sorted(self._outlines)]

    def standing(self, service: str) -> TableView | None:
        """See `Desk`."""
        view = self._views.get(service)
        if view is not None or service not in self._orders:
            return view
        record = self._replica.route(service)
        try:
            return None if record is None else _view(record)
        except BadTable:
            return None

    def effective(self) -> list[Service]:
        """See `Desk`."""
        return [service for name in self.names() if (service := self.service(name)) is not None]

    def names(self) -> list[str]:
        """Every service, in the order of `effective`; which of them can be used, `service` says. For who takes them one
        by one."""
        services = self._replica.fleet.services
        return [*services, *sorted(self._orders.keys() - services.keys())]

    def service(self, name: str) -> Service | None:
        """A service as this sidecar routes it, made anew where nobody asked for it yet; None: there is none."""
        known = self._replica.fleet.services.get(ServiceName(name))
        if known is not None:
            return known.policy
        view = self.standing(name)
        if view is None or not _size(view.table):
            return None
        try:
            return effective(unlisted(name, view.table.models, self._snapshot), view.table)
        except ValueError:  # said when it was tried; nobody is served by it
            return None

    async def submit(self, update: Update) -> Accepted | Refused:
        """See `Desk`."""

        def decide(table: Table | None, number: int) -> Table | Refused | Accepted:
            return revise(table, self._files.get(update.service), number, update, self._now_us(), self._new_name)

        return await self._write(update.service, decide, update.by, "update", _asked(update), update.expected)

    async def change(
        self,
        service: str,
        revise: Callable[[Table], Table | Refused],
        by: str,
        why: str,
        evidence: str = "",
        *,
        begin: bool = False,
        expected: int = 0,
    ) -> Accepted | Refused:
        """Make another table of the one that stands; as `submit`. `revise` may be asked again, with a later table,
        unless `expected` says which it is for.

        What it gives back unchanged is not written (`repeated`). `begin`: where there is none, it gets an empty one.
        """

        def decide(table: Table | None, number: int) -> Table | Refused | Accepted:
            if table is None and begin:
                table = Table(service)
            if table is None:
                return Refused("not_found", f"{service} has no routing table")
            if expected and expected != number:
                return Refused("stale", f"the table is at version {number}, and not at {expected}", number)
            made = revise(table)
            if isinstance(made, Refused):
                return replace(made, version=number)
            return Accepted(table, number, repeated=True) if made == table else made

        return await self._write(service, decide, by, why, evidence, expected)

    async def order(self, service: str, action: Action, by: str) -> Accepted | Refused:
        """See `Desk`."""
        ready = self.ready(service)

        def obey(table: Table) -> Table | Refused:
            return rollout.order(table, action, by, self._now_us(), ready)

        return await self.change(service, obey, by, action, f"{action} by {by}" if by else "")

    async def restore(self, service: str, table: Table, by: str, why: str, over: int = 0) -> Accepted | Refused:
        """See `Desk`."""

        def back(current: Table) -> Table:
            over = rollout.superseded(current, by, self._now_us())
            return replace(over, versions=table.versions, zones=table.zones, models=table.models)

        return await self.change(service, back, by, why, "an earlier table was put back", expected=over)

    def ready(self, service: str) -> Callable[[str], float]:
        """Which part of a version's endpoints may serve here now."""
        name = ServiceName(service)
        if name not in self._replica.fleet.services:
            self._wake(name)

        def part(version: str) -> float:
            state = self._replica.fleet.services.get(name)
            return 0.0 if state is None else state.ready(version)

        return part

    def subscribe(self) -> "_Feed":
        """See `Desk`."""
        feed = _Feed(self._feeds)
        self._feeds.append(feed)
        return feed

    def notice(self, notice: Notice) -> None:
        """See `Desk`."""
        level = "info" if notice.kind == "version_back" else "warning"
        self._say(level, notice.kind, service=notice.service, text=notice.text)
        self._tell(notice)

    # What the files say.

    def files(self, snapshot: Snapshot) -> tuple[Snapshot, list[Service]]:
        """A new policy with the tables over it, and the services that no file of it names, for `Fleet.apply`."""
        self._snapshot = snapshot
        self._files = {service.name: service for service in snapshot.services}
        for name in self._used.keys() - self._files.keys() - self._orders.keys():
            del self._used[name]
        listed = tuple(self._over(service) for service in snapshot.services)
        for name in self._files.keys() & self._eager.keys():
            del self._eager[name]
        made = []
        for name in sorted(self._orders.keys() - self._files.keys()):
            if ServiceName(name) in self._replica.fleet.services:
                view = self.standing(name)
                if view is not None and _size(view.table):
                    self._views[name] = view
                    made.append(self._over(unlisted(name, view.table.models, snapshot)))
        return replace(snapshot, services=listed), made

    def _over(self, policy: Service) -> Service:
        """A policy with its table over it; without, where there is none, or none that can be used."""
        view = self.standing(policy.name)
        if view is None:
            self._used.pop(policy.name, None)
            return policy
        self._views[policy.name] = view
        used = self._used.get(policy.name)
        try:
            return self._made(policy, view.table)
        except BadTable as exc:
            self._cannot(policy.name, view.version, str(exc))
        try:
            return policy if used is None else self._made(policy, used[1])
        except BadTable:
            return policy

    # What the log says.

    def heard(self, record: Record) -> None:
        """A table that is later than all before. Never raises: the log goes on."""
        try:
            self._heard(record)
        except Exception as exc:  # noqa: BLE001 - a fault of ours costs this table, and not the log
            self.crashes += 1
            self._say("error", "route_crashed", error=repr(exc), exc_info=exc)

    def _heard(self, record: Record) -> None:
        name = record.service
        if record.key != route_key(name) or record.order <= self._orders.get(name, (0, 0, 0, b"")):
            return
        self._orders[name] = record.order
        try:
            view = _view(record)
        except BadTable as exc:
            self._unreadable[name] = str(exc)
            self._cannot(name, table_version(record.epoch, record.version), str(exc))
            return
        finally:
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
        self._unreadable.pop(name, None)
        self._outlines[name] = outline(view)
        self._adopt(view)
        self._tell(view)

    def _adopt(self, view: TableView) -> None:
        table = view.table
        name = table.service
        policy = self._files.get(name)
        fleet = self._replica.fleet
        awake = policy is not None or ServiceName(name) in fleet.services
        endpoints = _size(table)
        if not awake:
            others = sum(self._eager.values()) - self._eager.get(name, 0)
            awake = others + endpoints <= EAGER
        if awake or endpoints <= LONG:
            self._views[name] = view
        else:
            self._views.pop(name, None)
        if policy is None and not endpoints:
            self._eager.pop(name, None)
            if awake:
                self._put(view, policy)  # its endpoints go as any do
            fleet.drop(ServiceName(name))
            return
        if policy is None and awake:
            self._eager[name] = endpoints
        if awake:
            self._put(view, policy)
        else:
            fleet.sleep(ServiceName(name), table.models or (name,))

    def _wake(self, name: ServiceName) -> None:
        """Somebody asks for a service that sleeps."""
        view = self.standing(name)
        policy = self._files.get(name)
        if view is not None and (policy is not None or _size(view.table)):
            self._views[name] = view
            self._eager[name] = _size(view.table)
            self._put(view, policy)

    def _put(self, view: TableView, policy: Service | None) -> None:
        table = view.table
        try:
            service = self._made(policy or unlisted(table.service, table.models, self._snapshot), table)
        except BadTable as exc:
            self._cannot(table.service, view.version, str(exc))
            return
        self._use(service)
        self._turn(view)

    def turn(self) -> None:
        """Gives all services what their tables say beside their policy: after a policy's services were made."""
        for view in self._views.values():
            self._turn(view)

    def _turn(self, view: TableView) -> None:
        state = self._replica.fleet.services.get(ServiceName(view.table.service))
        if state is not None:
            state.turn({zone: decay.share for zone, decay in view.table.zones.items()})
            state.salt_generation = view.table.salt_generation

    def _made(self, policy: Service, table: Table) -> Service:
        """The policy with the table over it; BadTable."""
        used = self._used.get(policy.name)
        service: Service | None = None
        if used is not None and (used[0] is policy or used[0] == policy):
            service = reweighed(policy, used[2], used[1], table)
        if service is None:
            try:
                service = effective(policy, table)
            except ValueError as exc:
                raise BadTable(f"an endpoint in it {exc}") from exc
            for fault in check_service(service):
                if fault.steps[0] != "split":  # endpoints that others' files name are theirs
                    raise BadTable(f"{path_of(fault.steps)}: {fault.message}")
        if (unnamed := strangers(service, table)) and (used is None or strangers(used[2], used[1]) != unnamed):
            self._say("warning", "route_strange", service=policy.name, versions=unnamed)
        self._used[policy.name] = policy, table, service
        return service

    def _cannot(self, service: str, version: int, error: str) -> None:
        self.unusable += 1
        self._say("error", "route_refused", service=service, version=version, error=error)

    def _tell(self, event: Event) -> None:
        for feed in self._feeds:
            feed.put(event)

    # Writing.

    async def _write(
        self, service: str, decide: Decide, by: str, why: str, evidence: str, expected: int = 0
    ) -> Accepted | Refused:
        """What `submit` and the others share: one at a time of each service, in the order they were asked."""
        until = self._clock() + PATIENCE_S
        lock, waiting = self._locks.get(service) or (asyncio.Lock(), 0)
        self._locks[service] = lock, waiting + 1
        try:
            await self._read_up_to(service, expected)
            async with lock:
                return await self._written(service, decide, by, why, evidence, max(until, self._clock() + TURN_S))
        except Exception as exc:  # noqa: BLE001 - an asker must hear of it, and no other asker suffer
            self.crashes += 1
            self._say("error", "route_crashed", error=repr(exc), exc_info=exc)
            return Refused("unavailable", f"a fault of this sidecar: {exc!r}")
        finally:
            lock, waiting = self._locks[service]
            if waiting == 1:
                del self._locks[service]
            else:
                self._locks[service] = lock, waiting - 1

    async def _written(
        self, service: str, decide: Decide, by: str, why: str, evidence: str, until: float
    ) -> Accepted | Refused:
        # What no UTF-8 can say must not fail at the last step.
        by = by[:MAX_BY].encode("utf-8", "replace").decode()
        who = f"{by} at {self._replica.observer}" if by else self._replica.observer
        number = 0
        for _ in range(TRIES):
            number = self._number(service)
            if service in self._unreadable:
                said = f"the table of {service} cannot be read here ({self._unreadable[service]}): a later release"
                return Refused("conflict", f"{said} may have written it, and must change it", number)
            view = self.standing(service)
            made = decide(None if view is None else view.table, number)
            if not isinstance(made, Table):
                return made
            call = self._call(service, made, who, why, evidence)
            if isinstance(call, str):
                return Refused("exhausted", f"the table of {service} {call}", number)
            since_us = self._now_us()
            reply, doubted = await self._put_until(call, until)
            if reply is None:
                said = "the log is away: nothing is lost; send it again with the same update id"
                if doubted:
                    said = "the log did not answer: it may have been done; with the same update id it may be sent again"
                return Refused("unavailable", said, number)
            if reply.verdict in (Verdict.OK, Verdict.ALREADY):
                ours = read(reply.record)
                return Accepted(made, table_version(ours.epoch, ours.version))
            if doubted and (done := await self._found(call, since_us)) is not None:
                return Accepted(made, table_version(done.epoch, done.version))
            if reply.verdict is not Verdict.STALE:
                return Refused("conflict", f"the log refuses it: {reply.verdict.value}", number)
            if self._replica.fold.version(call.key) == (call.epoch, call.version):
                # The server has less than we know, and is being told.
                await asyncio.sleep(PAUSE_S)
        return Refused("unavailable", f"others keep changing {service}: send it again", number)

    def _call(self, service: str, table: Table, who: str, why: str, evidence: str) -> Propose | str:
        """A table as a proposal; words where it is more than one may be: nobody could read it, or ever change it."""
        blob = encode(table)
        if len(blob) > MAX_TABLE_BYTES - MAX_RECORD_BYTES:
            return f"would have more than {MAX_TABLE_BYTES >> 10} KiB"
        try:
            decode(blob, WRITABLE_BYTES)
        except BadTable as exc:
            return f"could not be told to those who follow it: {exc}"
        key = route_key(service)
        epoch, version = self._replica.fold.version(key)
        return Propose(
            key=key,
            service=service,
            kind=Kind.ROUTE,
            state=Code.CLOSED,
            epoch=epoch,
            version=version,
            tx=self._new_id()[:TX_BYTES],
            body=encode_body(key, service, who, why, evidence[:MAX_EVIDENCE], blob),
            by=self._replica.observer,
        )

    async def _put_until(self, call: Propose, until: float) -> tuple[Reply | None, bool]:
        """The answer, None where there was none in time; and whether an earlier try may have been done."""
        doubted = False
        while True:
            try:
                if self.log is not None:
                    async with asyncio.timeout(max(0.0, until - self._clock())):
                        return await self.log.put(call), doubted
            except StoreDown as exc:
                doubted = doubted or exc.word != "away"
            except TimeoutError:
                doubted = True
            if self._clock() + PAUSE_S >= until:
                return None, doubted
            await asyncio.sleep(PAUSE_S)

    async def _found(self, call: Propose, since_us: int) -> Record | None:
        """Our record, if it was written and then written over."""
        if self.log is None:
            return None
        try:
            found = await self.log.history(call.key, since_us - 60_000_000, HISTORY)
        except StoreDown:
            return None
        return next((record for _, record in found if record.tx == call.tx), None)

    async def _read_up_to(self, service: str, expected: int) -> None:
        """Waits until a version was read here that another sidecar has made, if there is one."""
        until = self._clock() + PATIENCE_S / 2
        while self._number(service) < expected and self._clock() < until:
            try:
                async with asyncio.timeout(until - self._clock()):
                    await self._changed.wait()
            except TimeoutError:
                return

    def _number(self, service: str) -> int:
        order = self._orders.get(service)
        return 0 if order is None else table_version(order[0], order[1])

    def _now_us(self) -> int:
        return self._replica.server.now_us(self._clock())

    def _new_name(self) -> str:
        return self._new_id()[:8].hex()


class _Feed:
    """`core.desk.Feed`: `QUEUE` events at most, of which the oldest fall out."""

    def __init__(self, feeds: list["_Feed"]) -> None:
        self._feeds = feeds
        self._events: deque[Event] = deque(maxlen=QUEUE)
        self._news = asyncio.Event()
        self._lost = False
        self._lost_before = False

    def put(self, event: Event) -> None:
        """Something happened."""
        self._lost = self._lost or len(self._events) == QUEUE
        self._events.append(event)
        self._news.set()

    async def next(self) -> list[Event]:
        """See `Feed`."""
        await self._news.wait()
        self._news.clear()
        some = list(self._events)
        self._events.clear()
        self._lost_before, self._lost = self._lost, False
        return some

    @property
    def lagged(self) -> bool:
        """Whether events fell out before those that `next` gave last, or since."""
        return self._lost_before or self._lost

    def close(self) -> None:
        """See `Feed`."""
        if self in self._feeds:
            self._feeds.remove(self)


def _view(record: Record) -> TableView:
    """A record as a table that stands; BadTable."""
    table = decode(record.blob)
    if table.service != record.service:
        raise BadTable(f"a table of {table.service[:80]!r} under the key of {record.service[:80]!r}")
    number = table_version(record.epoch, record.version)
    return TableView(table, number, record.ts_us, record.by, record.why, record.evidence)


def _size(table: Table) -> int:
    """How many endpoints it names."""
    return sum(len(version.endpoints) for version in table.versions)


def _asked(update: Update) -> str:
    """What an update asks, for people."""
    said = []
    if update.plan is not None and update.plan.steps:
        share = min(max(update.plan.steps[0].weight, 0), PARTS) / PARTS  # it may be any number still
        said.append(f"{update.version} {share:.2%}, as a canary of {update.plan.baseline}")
    elif update.weights:
        said.append(", ".join(f"{name} {weight:.2%}" for name, weight in update.weights.items()))
    elif update.weight is not None:
        said.append(f"{update.version} {update.weight:.2%}")
    else:
        said.append(update.version)
    if update.endpoints is not None:
        said.append(counted(len(update.endpoints), "endpoint"))
    if update.update_id:
        said.append(f"update {update.update_id}")
    return "; ".join(said)
