"""The pages of routing tables and canaries: `/routes` and `/canary`, and what operators say to them.

What is asked goes through the one way in that release tools use (`core.desk`): the same rules, the same record in the
log, the same answer. A refusal changes nothing, is told with the word for why as the error's `code`, and names the
table's version that stands.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
from aiohttp import web

from sidecar.admin import answer, tables, views
from sidecar.admin.facts import Facts
from sidecar.admin.update import parse_update
from sidecar.admin.words import OPERATOR, parse_name
from sidecar.core.desk import Action
from sidecar.core.revise import Code, Refused
from sidecar.core.table import Table

STATUS: Final[Mapping[Code, int]] = {
    "invalid": 400,
    "exhausted": 400,
    "denied": 403,
    "not_found": 404,
    "stale": 409,
    "conflict": 409,
    "unavailable": 503,
}

ORDERS: Final[Mapping[str, Action]] = {
    "promote": "promote",
    "promote_full": "promote_full",
    "abort": "abort",
    "hold": "hold",
    "resume": "resume",
}

SLICE: Final = 200
"""Endpoints of a service shown before the loop may go on: about a millisecond."""

MAX_SERVICE: Final = 63


class RoutePages:
    """The pages. `may_change` raises for whoever may only look."""

    def __init__(self, facts: Facts, may_change: Callable[[web.Request], None]) -> None:
        self._facts = facts
        self._may_change = may_change

    def register(self, app: web.Application) -> None:
        """Puts the pages into `app`."""
        app.router.add_get("/routes", self.routes)
        app.router.add_post("/routes/{service}", self.update)
        app.router.add_get("/canary", self.canaries)
        app.router.add_get("/canary/{service}", self.canary)
        app.router.add_post("/canary/{service}/{action}", self.order)

    async def routes(self, request: web.Request) -> web.Response:
        """Every service, or the one that `?service=` names, with its table where it has one."""
        only = request.query.get("service", "")
        lines = []
        for line in views.routes(self._facts, SLICE, only):
            if line is not None:
                lines.append(line)
            await asyncio.sleep(0)
        if only and not lines:
            return answer.error(404, "no such service", "not_found")
        return answer.page(lines)

    async def update(self, request: web.Request) -> web.Response:
        """An update, as `sidecar.admin.update` reads it."""
        self._may_change(request)
        desk = self._facts.routes
        if desk is None:
            return _no_tables()
        service = request.match_info["service"]
        try:
            update = parse_update(service, await request.read(), asker(request.query))
        except ValueError as exc:
            return answer.error(400, str(exc), "invalid")
        told = await desk.submit(update)
        if isinstance(told, Refused):
            self._facts.updated(told.code)
            return refused(told)
        self._facts.updated("repeated" if told.repeated else "accepted")
        return answer.page(tables.update_page(self._facts, told.table, told.version, told.repeated))

    async def canaries(self, request: web.Request) -> web.Response:
        """Every service's last rollout."""
        desk = self._facts.routes
        lines = [] if desk is None else [self._line(view.table, view.version) for view in desk.outlines()]
        return answer.page([line for line in lines if line is not None])

    async def canary(self, request: web.Request) -> web.Response:
        """One service's."""
        desk = self._facts.routes
        view = None if desk is None else desk.standing(request.match_info["service"])
        line = None if view is None else self._line(view.table, view.version)
        return answer.error(404, "this service has no canary", "not_found") if line is None else answer.page(line)

    async def order(self, request: web.Request) -> web.Response:
        """What an operator says of a canary."""
        self._may_change(request)
        desk = self._facts.routes
        if desk is None:
            return _no_tables()
        action = ORDERS.get(request.match_info["action"])
        if action is None:
            return answer.error(404, f"actions are {', '.join(ORDERS)}", "unknown_action")
        try:
            by = asker(request.query)
        except ValueError as exc:
            return answer.error(400, str(exc), "invalid")
        told = await desk.order(request.match_info["service"], action, by)
        if isinstance(told, Refused):
            return refused(told)
        line = self._line(told.table, told.version)
        return answer.error(404, "this service has no canary", "not_found") if line is None else answer.page(line)

    def _line(self, table: Table, version: int) -> tables.RolloutLine | None:
        return tables.rollout_line(self._facts, table, version)


class RefusedDetail(msgspec.Struct, frozen=True):
    """The inside of a refusal: as of every error, and the version of the table that stands (0: there is none)."""

    message: str
    code: str
    table_version: int
    type: str = "invalid_request_error"
    param: None = None


class RefusedPage(msgspec.Struct, frozen=True):
    """A refusal of the desk's."""

    error: RefusedDetail


def refused(told: Refused) -> web.Response:
    """A refusal as a page."""
    return answer.page(RefusedPage(RefusedDetail(told.message, told.code, told.version)), STATUS[told.code])


def _no_tables() -> web.Response:
    return answer.error(404, "this sidecar keeps no routing tables", "no_tables")


def asker(query: Mapping[str, str]) -> str:
    """Who asks. ValueError in words for him, for any other parameter as well."""
    for name in query:
        if name != "by":
            raise ValueError(f'"{name[:40]}" is no parameter here: there is by')
    try:
        return parse_name(query.get("by", OPERATOR))
    except ValueError as exc:
        raise ValueError(f"by: {exc}") from exc
