"""A desk in memory, and lines that were said: what the hub and its server are tested over."""

import asyncio
from typing import Any

from msgspec.structs import replace

from sidecar.core.desk import Action, Event, Notice, TableView, outline
from sidecar.core.revise import Accepted, Refused, Update
from sidecar.core.table import Table, Target, Version, effective
from sidecar.policy.schema import Endpoint, Service


class Feed:
    """One subscriber's events."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.lagged = False
        self._news = asyncio.Event()

    def add(self, event: Event) -> None:
        self.events.append(event)
        self._news.set()

    async def next(self) -> list[Event]:
        await self._news.wait()
        self._news.clear()
        taken, self.events = self.events, []
        return taken

    def close(self) -> None: ...


class Desk:
    """Services of policy files, with tables over them; `refuse` is what restores are answered while it is not empty."""

    def __init__(self, *services: Service) -> None:
        self.files = {service.name: service for service in services}
        self.views: dict[str, TableView] = {}
        self.notices: list[Notice] = []
        self.restored: list[tuple[str, Table, str, str]] = []
        self.refuse: list[Refused] = []
        self._feeds: list[Feed] = []
        self._version = 0

    def put(self, table: Table, by: str = "test", why: str = "update") -> TableView:
        """A table that now stands in the log."""
        self._version += 1
        view = TableView(table, self._version, 0, by, why)
        self.views[table.service] = view
        for feed in self._feeds:
            feed.add(view)
        return view

    def weigh(self, service: str, **weights: int) -> TableView:
        """Other weights, in parts, in the table that stands."""
        table = self.views[service].table
        versions = tuple(replace(each, weight=weights.get(each.name, each.weight)) for each in table.versions)
        return self.put(replace(table, versions=versions))

    def tables(self) -> list[TableView]:
        return [self.views[name] for name in sorted(self.views)]

    def outlines(self) -> list[TableView]:
        return [outline(view) for view in self.tables()]

    def effective(self) -> list[Service]:
        return [service for name in self.names() if (service := self.service(name)) is not None]

    def names(self) -> list[str]:
        return [*self.files, *sorted(self.views.keys() - self.files.keys())]

    def service(self, name: str) -> Service | None:
        if name not in self.files and name not in self.views:
            return None
        policy = self.files.get(name) or Service(name=name)
        return effective(policy, self.views[name].table) if name in self.views else policy

    def standing(self, service: str) -> TableView | None:
        return self.views.get(service)

    async def submit(self, update: Update) -> Accepted | Refused:
        raise NotImplementedError

    async def order(self, service: str, action: Action, by: str) -> Accepted | Refused:
        raise NotImplementedError

    async def restore(self, service: str, table: Table, by: str, why: str, over: int = 0) -> Accepted | Refused:
        if self.refuse:
            return self.refuse.pop(0)
        if self.views[service].version != over:
            return Refused("stale", "others were faster", self.views[service].version)
        self.restored.append((service, table, by, why))
        return Accepted(table, self.put(table, by, why).version)

    def subscribe(self) -> Feed:
        feed = Feed()
        self._feeds.append(feed)
        return feed

    def notice(self, notice: Notice) -> None:
        self.notices.append(notice)


class Said:
    """Events that were logged."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, dict[str, Any]]] = []

    def __call__(self, level: str, event: str, **fields: Any) -> None:
        self.lines.append((level, event, fields))

    def of(self, event: str) -> list[dict[str, Any]]:
        return [fields for _, name, fields in self.lines if name == event]


def service(name: str, *endpoints: Endpoint, **rest: Any) -> Service:
    return Service(name=name, endpoints=endpoints, **rest)


def at(url: str, version: str = "v1", **rest: Any) -> Endpoint:
    return Endpoint(url=url, version=version, **rest)


def table(name: str, **versions: tuple[int, tuple[str, ...]]) -> Table:
    """`table("chat", v1=(9000, ("http://127.0.0.1:1",)))`: weights in parts, and endpoints."""
    made = (
        Version(each, weight, endpoints=tuple(Target(url) for url in urls)) for each, (weight, urls) in versions.items()
    )
    return Table(name, tuple(made))
