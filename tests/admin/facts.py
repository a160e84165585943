"""A process as the admin pages see it, with clocks that stand still."""

import asyncio
from collections import deque
from collections.abc import Sequence

import msgspec

from sidecar.admin.facts import ControlView, Facts, LogAway, LogFacts, LogRecord, LogView, Phase
from sidecar.core.breaker import Action, Breaker, Permit, Scope, State, Transition
from sidecar.core.desk import Action as RolloutAction
from sidecar.core.desk import Desk, Event, Notice, TableView, outline
from sidecar.core.fleet import Fleet
from sidecar.core.hot_plan import Updates
from sidecar.core.quotas.quota import Ledger
from sidecar.core.revise import Accepted, Refused, Update
from sidecar.core.table import Plan, Rollout, Step, Table, Version
from sidecar.kernel.ids import EndpointKey, ServiceName
from sidecar.kernel.outcome import Result
from sidecar.policy.schema import Breakers, Endpoint, NodeBreaker, Service, Snapshot
from sidecar.policy.store import PolicyStore

A = EndpointKey("127.0.0.1:8000")
B = EndpointKey("127.0.0.1:8001")
CHAT = ServiceName("chat")
NO_FLOOR = Breakers(node=NodeBreaker(min_closed_ratio=0.0))


def service(*endpoints: Endpoint | str, name: str = CHAT, **changes: object) -> Service:
    """A service over `host:port`s or endpoints, of which all may open."""
    made = tuple(each if isinstance(each, Endpoint) else Endpoint(url=f"http://{each}") for each in endpoints)
    return msgspec.structs.replace(Service(name=name, endpoints=made, breakers=NO_FLOOR), **changes)


def snapshot(*services: Service, **changes: object) -> Snapshot:
    """A policy of these services."""
    return msgspec.structs.replace(Snapshot(version=7, services=services), **changes)


def log_record(n: int, name: str = A, **changes: object) -> LogRecord:
    """The `n`th record: that a node opened, `n` seconds after Unix second 1,700,000,000."""
    record = LogRecord(
        id=f"0-{n}",
        ts_us=(1_700_000_000 + n) * 1_000_000,
        key=f"node:chat/{name}",
        scope="node",
        service="chat",
        name=name,
        kind="transition",
        state="open",
        epoch=1_700_000_000,
        version=n,
        why="consecutive",
        evidence="5 failures in a row, the last: reset",
        by="pod-0",
        tx=f"{n:032x}",
        trace=f"{n:032x}",
        wait_s=10.0,
    )
    return msgspec.structs.replace(record, **changes)


class FakeSubscription:
    """A reader's queue of at most `most` records."""

    def __init__(self, log: "FakeLog", most: int) -> None:
        self.lost = 0
        self._log = log
        self._waiting: deque[LogRecord] = deque(maxlen=most)
        self._some = asyncio.Event()
        log.subscribed.append(self)

    def put(self, record: LogRecord) -> None:
        self.lost += len(self._waiting) == self._waiting.maxlen
        self._waiting.append(record)
        self._some.set()

    async def next(self) -> list[LogRecord]:
        await self._some.wait()
        self._some.clear()
        records = list(self._waiting)
        self._waiting.clear()
        return records

    def close(self) -> None:
        if self in self._log.subscribed:
            self._log.subscribed.remove(self)


class FakeLog:
    """A log in memory; `away` is what its server's absence is called."""

    def __init__(self, records: Sequence[LogRecord] = (), most: int = 1000) -> None:
        self.records = list(records)
        self.most = most
        self.away = ""
        self.stood = LogView("up", 1_699_999_000.0, members=3, position="0-7")
        self.subscribed: list[FakeSubscription] = []
        self.pages: list[list[bytes]] = []
        self.asked: list[tuple[int, int, str]] = []

    def tell(self, record: LogRecord) -> None:
        self.records.append(record)
        for each in self.subscribed:
            each.put(record)

    def view(self) -> LogView:
        return self.stood

    async def history(self, key: str | None, since_us: int | None, limit: int) -> list[LogRecord]:
        if self.away:
            raise LogAway(self.away)
        if key is not None and "/" not in key:
            raise ValueError(f"{key!r} is not SCOPE:SERVICE/NAME")
        found = [one for one in self.records if key in (None, one.key) and one.ts_us >= (since_us or 0)]
        return found[-limit:]

    def subscribe(self) -> FakeSubscription:
        return FakeSubscription(self, self.most)

    def record(self, since_us: int, until_us: int, service: str) -> "FakeRecording":
        self.asked.append((since_us, until_us, service))
        return FakeRecording(self.pages, self.away)


class FakeRecording:
    """Pages of lines, one a call; `away` after them, if it is said."""

    def __init__(self, pages: Sequence[list[bytes]], away: str) -> None:
        self._pages = deque(pages)
        self._away = away

    async def next(self) -> list[bytes]:
        await asyncio.sleep(0)
        if self._pages:
            return self._pages.popleft()
        if self._away:
            raise LogAway(self._away)
        return []


PLAN = Plan("v1", (Step(500, 60.0, 100), Step(5000, 600.0, 1000)))


def table(service: str = CHAT, rollout: Rollout | None = None, **weights: int) -> Table:
    """A table with these parts; without any, v1 has nineteen twentieths and v2 the rest."""
    parts = weights or {"v1": 9500, "v2": 500}
    return Table(service, tuple(Version(name, weight) for name, weight in parts.items()), rollout=rollout)


def table_view(stood: Table, version: int = 1 << 20) -> TableView:
    """That table as ann wrote it at Unix second 1,700,000,000."""
    return TableView(stood, version, 1_700_000_000_000_000, "ann at pod-0", "update", "v2 has 0.05")


def rollout(phase: str = "running", step: int = 0, **changes: object) -> Rollout:
    """A canary of v2 against v1, of two steps, since Unix second 1,700,000,000."""
    made = Rollout("r1", "v2", PLAN, step, since_us=1_700_000_000_000_000, by="ann at pod-0")
    return msgspec.structs.replace(made, phase=phase, **changes)


class FakeFeed:
    """Nobody tells anything."""

    lagged = False

    async def next(self) -> list[Event]:
        await asyncio.Event().wait()
        return []

    def close(self) -> None:
        pass


class FakeDesk:
    """A desk that answers `says` whatever it is asked, and remembers what that was."""

    def __init__(self, *tables: Table, says: Accepted | Refused | None = None) -> None:
        self.stood = [table_view(each) for each in tables]
        self.says: Accepted | Refused = says or Accepted(tables[0] if tables else table(), (1 << 20) + 1)
        self.updates: list[Update] = []
        self.orders: list[tuple[str, RolloutAction, str]] = []

    def tables(self) -> list[TableView]:
        return self.stood

    def outlines(self) -> list[TableView]:
        return [outline(view) for view in self.stood]

    def standing(self, service: str) -> TableView | None:
        return next((view for view in self.stood if view.table.service == service), None)

    def effective(self) -> list[Service]:
        return []

    async def submit(self, update: Update) -> Accepted | Refused:
        await asyncio.sleep(0)
        self.updates.append(update)
        return self.says

    async def order(self, service: str, action: RolloutAction, by: str) -> Accepted | Refused:
        await asyncio.sleep(0)
        self.orders.append((service, action, by))
        return self.says

    async def restore(self, service: str, table: Table, by: str, why: str, over: int = 0) -> Accepted | Refused:
        return self.says

    def subscribe(self) -> FakeFeed:
        return FakeFeed()

    def notice(self, notice: Notice) -> None:
        pass


class Keys:
    """An issuer's keys."""

    def __init__(self, issuer: str, keys: int = 2, stale_s: float = -1.0, why: str = "") -> None:
        self.issuer = issuer
        self.keys = keys
        self.stale_s = stale_s
        self.why = why


class StillFacts:
    """`Facts` of a process at monotonic second 1000, which is Unix second 1,700,000,000."""

    def __init__(self, policy: Snapshot) -> None:
        self.fleet = Fleet(lambda: 0.5)
        self.fleet.apply(policy, 1000.0)
        self.store = PolicyStore(policy)
        self.transitions: list[Transition] = []
        self.orders: list[tuple[Scope, str, Action, str, float]] = []
        self.phase = Phase.SERVING
        self.monotonic_s = 1000.0
        self.drains = 0
        self.log: LogFacts | None = None
        self.routes: Desk | None = None
        self.models: Updates | None = None
        self.results: list[str] = []
        self.ledger: Ledger | None = None
        self.keys: list[Keys] = []
        self.uncounted: dict[str, str] = {}
        self.control: ControlView | None = None
        self.xds: ControlView | None = None

    def why_not_counted(self, service: str) -> str:
        return self.uncounted.get(service, "")

    def now(self) -> float:
        return self.monotonic_s

    def wall(self) -> float:
        return 1_700_000_000.0 + self.monotonic_s - 1000.0

    def override(self, scope: Scope, key: str, action: Action, by: str, for_s: float) -> bool:
        moved = self.fleet.override(scope, key, action, self.now(), by, for_s)
        if moved is None:
            return False
        self.orders.append((scope, key, action, by, for_s))
        self.transitions.extend(moved)
        return True

    def updated(self, result: str) -> None:
        self.results.append(result)

    live = 0

    @property
    def drained(self) -> bool:
        return self.phase is Phase.DRAINING and not self.live

    def drain(self) -> None:
        self.drains += 1
        self.phase = Phase.DRAINING

    async def exposition(self) -> tuple[bytes, str]:
        return b"m 1\n", "text/plain; version=0.0.4; charset=utf-8"


def breaker(facts: Facts, key: EndpointKey = A, name: ServiceName = CHAT) -> Breaker:
    """A node's breaker."""
    return facts.fleet.services[name].nodes[key].breaker


def trip(breakers: Sequence[Breaker], now: float) -> None:
    """Open them on evidence."""
    for each in breakers:
        while each.state is State.CLOSED:
            permit = each.acquire(now)
            assert isinstance(permit, Permit)
            each.record(permit, Result.FAILURE, now, "reset")
