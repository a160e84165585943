"""The page of who waits for a turn: `/admission`. Tenants are counted here; who they are is in the log's lines."""

import asyncio
from collections.abc import Iterator
from math import inf
from typing import Final

import msgspec
from aiohttp import web

from sidecar.admin import answer
from sidecar.admin.facts import Facts
from sidecar.core.gate.admit import ClassView
from sidecar.core.pool import Node
from sidecar.core.service import ServiceState

SLICE: Final = 200
"""Endpoints shown before the loop may go on: about a millisecond."""


class AwayLine(msgspec.Struct, frozen=True):
    """How many were told to come back, by reason; in shadow mode, would have been."""

    overloaded: int
    queue_timeout: int
    preempted: int


class ClassLine(msgspec.Struct, frozen=True):
    """A class at one service. `sla_s` null: nothing is promised.

    `longest_wait_s` is that of those who wait now. `warning`: some are about to break the SLA, and requests of classes
    that are preemptible make room. `usual_first_token_s`: from a turn to its first token, as the slower ones take, 0
    while it is unknown.
    """

    name: str
    priority: int
    preemptible: bool
    sla_s: float | None
    queued: int
    running: int
    longest_wait_s: float
    warning: bool
    usual_first_token_s: float
    turns: int
    turned_away: AwayLine
    sla_met: int
    sla_missed: int


class LimitLine(msgspec.Struct, frozen=True):
    """An endpoint's room. `limit` null: it has none. `waiting` is the engine's own queue, as it last reported.

    `first_token_ratio`: its first tokens over what they take while it is not busy, null while that is unknown.
    """

    endpoint: str
    limit: float | None
    in_flight: int
    waiting: int
    first_token_ratio: float | None


class AdmissionLine(msgspec.Struct, frozen=True):
    """A service: highest class first. `mode` `off`: nobody waits here, and there is nothing to tell of classes."""

    service: str
    mode: str
    queued: int
    running: int
    tenants: int
    classes: list[ClassLine]
    endpoints: list[LimitLine]


class AdmissionPage:
    """The page."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    def register(self, app: web.Application) -> None:
        """Puts the page into `app`."""
        app.router.add_get("/admission", self.admission)

    async def admission(self, request: web.Request) -> web.Response:
        """Every service, or the one that `?service=` names."""
        only = request.query.get("service", "")
        lines = []
        for line in admission(self._facts, only):
            if line is not None:
                lines.append(line)
            await asyncio.sleep(0)
        if only and not lines:
            return answer.error(404, "no such service", "not_found")
        return answer.page(lines)


def admission(facts: Facts, only: str = "", size: int = SLICE) -> Iterator[AdmissionLine | None]:
    """Every service, or `only` that one; None after each `size` endpoints: streams run in between."""
    now = facts.now()
    for name, service in list(facts.fleet.services.items()):
        if only not in ("", name):
            continue
        endpoints = []
        for number, node in enumerate(list(service.nodes.values()), 1):
            endpoints.append(_limit(node))
            if number % size == 0:
                yield None
        yield _line(str(name), service, endpoints, now)


def _line(name: str, service: ServiceState, endpoints: list[LimitLine], now: float) -> AdmissionLine:
    gate = service.gate
    if gate is None:
        running = sum(line.in_flight for line in endpoints)
        return AdmissionLine(name, "off", 0, running, 0, [], endpoints)
    view = gate.view(now)
    classes = [_class(each) for each in view.classes]
    return AdmissionLine(name, view.mode, view.queued, view.running, view.tenants, classes, endpoints)


def _class(view: ClassView) -> ClassLine:
    return ClassLine(
        name=view.name,
        priority=view.priority,
        preemptible=view.preemptible,
        sla_s=view.sla_s if view.sla_s < inf else None,
        queued=view.queued,
        running=view.running,
        longest_wait_s=round(view.waiting_s, 3),
        warning=view.warning,
        usual_first_token_s=round(view.usual_s, 3),
        turns=view.turns,
        turned_away=AwayLine(view.overloaded, view.queue_timeout, view.preempted),
        sla_met=view.met,
        sla_missed=view.missed,
    )


def _limit(node: Node) -> LimitLine:
    ratio = node.limiter.ratio if node.limiter is not None else 0.0
    return LimitLine(
        endpoint=node.key,
        limit=round(node.limit, 1) if node.limit < inf else None,
        in_flight=node.in_flight,
        waiting=node.waiting,
        first_token_ratio=round(ratio, 2) if ratio > 0.0 else None,
    )
