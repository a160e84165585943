"""A desk in memory: the rules of the real one, without a log; and what can be done to it."""

import asyncio
from collections import deque

from msgspec.structs import replace

from sidecar.core.desk import Action, Event, Notice, TableView, outline
from sidecar.core.revise import Accepted, Refused, Update
from sidecar.core.rules import revise
from sidecar.core.table import Table, effective
from sidecar.policy.schema import Endpoint, Service

FILE = Service(name="chat", models=("chat",), endpoints=(Endpoint(url="http://10.0.0.1:8000", version="v1"),))
"""What a policy file says of the one service that it names."""


class FakeFeed:
    """`core.desk.Feed` with a queue of `limit`."""

    def __init__(self, desk: "FakeDesk", limit: int) -> None:
        self._desk = desk
        self._events: deque[Event] = deque(maxlen=limit)
        self._limit = limit
        self._news = asyncio.Event()
        self.lagged = False

    def put(self, event: Event) -> None:
        self.lagged = self.lagged or len(self._events) == self._limit
        self._events.append(event)
        self._news.set()

    async def next(self) -> list[Event]:
        await self._news.wait()
        self._news.clear()
        some = list(self._events)
        self._events.clear()
        return some

    def close(self) -> None:
        if self in self._desk.feeds:
            self._desk.feeds.remove(self)


class FakeDesk:
    """`core.desk.Desk`. While `gate` is clear no update is done; `submitted` has all that were begun."""

    def __init__(self, *files: Service, limit: int = 64) -> None:
        self._files = {service.name: service for service in files or (FILE,)}
        self._views: dict[str, TableView] = {}
        self._limit = limit
        self.feeds: list[FakeFeed] = []
        self.submitted: list[Update] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.away = False
        self.broken: Exception | None = None

    def tables(self) -> list[TableView]:
        return [self._views[name] for name in sorted(self._views)]

    def outlines(self) -> list[TableView]:
        return [outline(view) for view in self.tables()]

    def standing(self, service: str) -> TableView | None:
        return self._views.get(service)

    def effective(self) -> list[Service]:
        return [
            effective(policy, self._views[name].table) if name in self._views else policy
            for name, policy in self._files.items()
        ]

    async def submit(self, update: Update) -> Accepted | Refused:
        self.submitted.append(update)
        await self.gate.wait()
        if self.broken is not None:
            raise self.broken
        view = self._views.get(update.service)
        number = view.version if view else 0
        if self.away:
            return Refused("unavailable", "the log is away", number)
        made = revise(view.table if view else None, self._files.get(update.service), number, update, 0, lambda: "r-1")
        if not isinstance(made, Table):
            return made
        return self.put(made, update.by, "update")

    async def order(self, service: str, action: Action, by: str) -> Accepted | Refused:
        return Refused("not_found", f"{service} has no rollout for {by} to {action}")

    async def restore(self, service: str, table: Table, by: str, why: str, over: int = 0) -> Accepted | Refused:
        return self.put(replace(table, service=service), by, why)

    def put(self, table: Table, by: str, why: str, evidence: str = "") -> Accepted:
        """A table stands, whoever made it."""
        before = self._views.get(table.service)
        view = TableView(table, before.version + 1 if before else 1, 1_000_000, by, why, evidence)
        self._views[table.service] = view
        self._tell(view)
        return Accepted(table, view.version)

    def subscribe(self) -> FakeFeed:
        feed = FakeFeed(self, self._limit)
        self.feeds.append(feed)
        return feed

    def notice(self, notice: Notice) -> None:
        self._tell(notice)

    def _tell(self, event: Event) -> None:
        for feed in self.feeds:
            feed.put(event)
