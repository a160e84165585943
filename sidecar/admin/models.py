"""The pages of model updates: `/models`, and what operators ask there."""

from collections.abc import Callable

import msgspec
from aiohttp import web

from sidecar.admin import answer
from sidecar.admin.facts import Facts
from sidecar.admin.model_document import parse_wanted
from sidecar.admin.routes import asker, refused
from sidecar.admin.words import iso
from sidecar.core.hot_plan import UpdateView
from sidecar.core.revise import Refused


class StepLine(msgspec.Struct, frozen=True):
    """A step that is over: `result` is `done` or `failed`."""

    step: str
    endpoint: str
    result: str
    took_s: float
    detail: str


class UpdateLine(msgspec.Struct, frozen=True):
    """A service's last model update. `phase`: as `core.hot_update` has it, or `interrupted`: its sidecar (`on`) is
    gone, and the model that endpoints have is the old one but where `step` and `steps` say otherwise.

    `step`, `endpoint`, `step_since`: what is done now; empty: nothing any more. `took_s`: from the begin to now, or to
    the end.
    """

    service: str
    id: str
    action: str
    kind: str
    model: str
    version: str
    phase: str
    live: bool
    step: str
    endpoint: str
    since: str
    step_since: str
    took_s: float
    by: str
    on: str
    why: str
    steps: list[StepLine]


class BegunPage(msgspec.Struct, frozen=True):
    """An update that has begun."""

    service: str
    id: str


class ModelPages:
    """The pages. `may_change` raises for whoever may only look."""

    def __init__(self, facts: Facts, may_change: Callable[[web.Request], None]) -> None:
        self._facts = facts
        self._may_change = may_change

    def register(self, app: web.Application) -> None:
        """Puts the pages into `app`."""
        app.router.add_get("/models", self.models)
        app.router.add_get("/models/{service}", self.model)
        app.router.add_post("/models", self.begin)

    async def models(self, request: web.Request) -> web.Response:
        """Every service's last model update."""
        return answer.page(self._lines())

    async def model(self, request: web.Request) -> web.Response:
        """One service's."""
        for line in self._lines():
            if line.service == request.match_info["service"]:
                return answer.page(line)
        return answer.error(404, "this service never had a model update", "not_found")

    async def begin(self, request: web.Request) -> web.Response:
        """A model update, as `sidecar.admin.model_document` reads it: 202 once it is under way."""
        self._may_change(request)
        updates = self._facts.models
        if updates is None:
            return answer.error(404, "this sidecar changes no models: it relays nothing", "no_models")
        try:
            wanted = parse_wanted(await request.read(), asker(request.query))
        except ValueError as exc:
            return answer.error(400, str(exc), "invalid")
        begun = await updates.begin(wanted)
        return refused(begun) if isinstance(begun, Refused) else answer.page(BegunPage(begun.service, begun.id), 202)

    def _lines(self) -> list[UpdateLine]:
        updates = self._facts.models
        return [] if updates is None else [update_line(view, self._facts.wall()) for view in updates.views()]


def update_line(view: UpdateView, now: float) -> UpdateLine:
    """An update as operators see it; `now` in Unix seconds."""
    progress = view.progress
    live = progress.until_us > 0 and not view.interrupted
    return UpdateLine(
        service=view.service,
        id=progress.id,
        action=progress.action,
        kind=progress.kind,
        model=progress.model,
        version=progress.version,
        phase="interrupted" if view.interrupted else progress.phase,
        live=live,
        step=progress.step,
        endpoint=progress.place,
        since=iso(progress.since_us / 1e6),
        step_since=iso(progress.step_us / 1e6),
        took_s=round(max(0.0, (now if live else progress.step_us / 1e6) - progress.since_us / 1e6), 3),
        by=progress.by,
        on=progress.on,
        why=progress.why,
        steps=[StepLine(each.step, each.place, each.result, each.took_s, each.detail) for each in progress.steps],
    )
