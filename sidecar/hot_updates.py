"""Model updates on this sidecar: asks engines, moves weights, waits for streams, and writes down how far it is.

```
asked for -> planned (`core.hot_plan`) -> claimed in the service's routing table -> task by task (`core.hot_update`):
          an errand to an engine, an order on a breaker, an update of the routing table, a look at who is in flight
```

1. One sidecar leads an update: the one that was asked. It writes each step into the service's table, so that all know,
   and a second update of the service is refused, on whatever sidecar, with who is at it and since when.
2. The word of it is good for `LEASE_S` and renewed by `beat`. A table that says that an update is under way, and is
   older, tells of one that was interrupted: its sidecar died, or was stopped. Nobody takes it up: what an engine has
   done meanwhile only the operator who asked can want, and asking again does it again. So whoever leads one and could
   not renew its word takes no further step until he can; if another update was begun by then, he leaves it all there.
3. An endpoint rests by an operator's order on its breaker, which all sidecars obey and the log keeps: new requests go
   elsewhere, streams go on. The order has no end of its own. If the update dies, an endpoint whose model nobody has
   looked at stays out of rotation until somebody says what it is to do. Whom an operator holds out stays out.
4. Who is in flight: what this sidecar counts, and what the engine itself counts where it does (vLLM's gauges, which
   have other sidecars' requests, too). Where no engine counts, and there are other sidecars, their streams have ended
   when `deadlines.total` has passed.
5. What the log cannot take down now is taken down with the next step, as long as the word is good; what others must
   obey (weights, the claim) cannot be done without it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from math import inf
from typing import Any, Final, Protocol, assert_never

from msgspec.structs import replace

from sidecar.adapters import DIALECTS
from sidecar.adapters.errand import Answer, Errand, Request
from sidecar.adapters.models import Adapter, Apart, Changer, Repository, Sleep, forgets
from sidecar.adapters.question import Question, told_version
from sidecar.core.breaker import Action as OrderAction
from sidecar.core.desk import TableView
from sidecar.core.fleet import Fleet
from sidecar.core.hot_plan import Begun, UpdateView, Wanted, others_serve, planned
from sidecar.core.hot_update import LIVE, Asked, HotUpdate, Task
from sidecar.core.pool import Node
from sidecar.core.revise import Accepted, Refused, Update
from sidecar.core.right_answer import judged
from sidecar.core.service import ServiceState
from sidecar.core.table import PARTS, Progress, Stepped, Table, Target, started
from sidecar.kernel.change import Again, Before, Done, Failed, Outcome
from sidecar.kernel.count import counted
from sidecar.kernel.errors import SidecarError
from sidecar.kernel.ids import EndpointKey, ServiceName
from sidecar.policy.schema import Endpoint, front_of

PAUSE_S: Final = 0.25
"""Between two tries of a step: a model that is on disk is to be switched in less than two seconds."""
LOOK_S: Final = 5.0
"""How long an engine may take to answer what it has at hand."""
LEAST_S: Final = 1.0
"""That a request has, however little its step has left: the last answer is the one that is told."""
BEAT_S: Final = 20.0
LEASE_S: Final = 60.0
"""Three beats: two may be lost."""
SPREAD_S: Final = 1.0
"""Until other sidecars have heard that an endpoint gets nothing new, and what they had sent it by then has come."""
TELLINGS: Final = 120
"""How often an end is tried to be told: ten minutes of a log that is away."""
MAX_BY: Final = 64
UPDATE: Final = ", model update "
"""In who ordered it: so an endpoint that an update has out of rotation is told from one that an operator has."""


class Say(Protocol):
    """Logs an event; never waits, never raises."""

    def __call__(self, level: str, event: str, **fields: Any) -> None: ...


class Ask(Protocol):
    """`upstream.ask.ask` with the relay's connections: one request to an endpoint, and its whole answer."""

    def __call__(
        self, key: EndpointKey, endpoint: Endpoint, request: Request, timeout_s: float
    ) -> Awaitable[Answer]: ...


class Order(Protocol):
    """An operator's order on an endpoint's breaker, for all sidecars; False: nobody knows it."""

    def __call__(self, key: str, action: OrderAction, by: str, for_s: float) -> bool: ...


class Desk(Protocol):
    """What is asked of `sidecar.routes`."""

    def outlines(self) -> list[TableView]: ...

    def standing(self, service: str) -> TableView | None: ...

    async def submit(self, update: Update) -> Accepted | Refused: ...

    async def change(
        self,
        service: str,
        revise: Callable[[Table], Table | Refused],
        by: str,
        why: str,
        evidence: str = "",
        *,
        begin: bool = False,
    ) -> Accepted | Refused: ...


class HotUpdates:
    """The model updates of one sidecar. `clock` gives monotonic seconds, `server_us` the log server's microseconds at
    one, `wall` seconds since the epoch; `members` is how many sidecars live, `sleep` is asyncio's.

    `stepped` is told of each step that ended: its word, `done` or `failed`, and how many seconds it took.
    """

    def __init__(
        self,
        fleet: Fleet,
        desk: Desk,
        *,
        ask: Ask,
        order: Order,
        tasks: asyncio.TaskGroup,
        observer: str,
        clock: Callable[[], float],
        server_us: Callable[[float], int],
        wall: Callable[[], float],
        members: Callable[[], int],
        new_id: Callable[[], str],
        say: Say,
        stepped: Callable[[str, str, float], None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._fleet = fleet
        self._desk = desk
        self._ask = ask
        self._order = order
        self._tasks = tasks
        self._observer = observer
        self._clock = clock
        self._server_us = server_us
        self._wall = wall
        self._members = members
        self._new_id = new_id
        self._say = say
        self._stepped = stepped
        self._sleep = sleep
        self._running: dict[str, _Running] = {}

    async def run(self) -> None:
        """Keep the word of what is under way good, until cancelled."""
        while True:
            await self._sleep(BEAT_S)
            await self.beat()

    def stop(self) -> None:
        """Leave what is under way where it is: soon all say that it was interrupted."""
        for running in self._running.values():
            if running.task is not None and running.task.cancel():
                asked = running.update.asked
                self._say(
                    "warning", "model_update_interrupted", service=asked.service, id=running.update.id, **_told(asked)
                )

    async def beat(self) -> None:
        """Renews the word of every update under way here."""
        for running in list(self._running.values()):
            await self._write(running)

    def views(self) -> list[UpdateView]:
        """See `core.hot_plan.Updates`."""
        found = []
        for view in self._desk.outlines():
            progress = view.table.update
            if progress is not None:
                found.append(UpdateView(view.table.service, progress, self._is_interrupted(progress)))
        return found

    def _is_interrupted(self, progress: Progress) -> bool:
        if progress.phase not in LIVE:
            return False
        if progress.on == self._observer:
            # Of our own name, and not ours: of the process that was here before.
            return all(running.update.id != progress.id for running in self._running.values())
        return self._now_us() > progress.until_us

    async def begin(self, wanted: Wanted) -> Begun | Refused:
        """See `core.hot_plan.Updates`."""
        service = self._service_of(wanted)
        if service is None:
            what = f"service {wanted.service!r}" if wanted.service else f"service that serves {wanted.model[:80]!r}"
            return Refused("not_found", f"there is no {what}")
        view = self._desk.standing(service.name)
        table = None if view is None else view.table
        asked = planned(wanted, service, table, self._clock())
        if isinstance(asked, Refused):
            return asked
        running = _Running(HotUpdate(asked, self._new_id(), self._clock()), service, self._clock(), self._now_us())
        refused = await self._claim(running)
        if refused is not None:
            return refused
        self._say("info", "model_update", service=service.name, **_told(asked), id=running.update.id, by=asked.by)
        running.task = self._tasks.create_task(self._lead(running))
        return Begun(service.name, running.update.id)

    def _service_of(self, wanted: Wanted) -> ServiceState | None:
        if wanted.service:
            name = ServiceName(wanted.service)
            if name not in self._fleet.services:
                self._fleet.wake(name)
            return self._fleet.services.get(name)
        return self._fleet.service_for(wanted.model)

    # How far it is.

    async def _claim(self, running: "_Running") -> Refused | None:
        """Writes that it is under way; the refusal, where another is."""
        progress = self._progress(running)

        def claim(table: Table) -> Table | Refused:
            other = table.update
            if other is not None and other.phase in LIVE and not self._is_interrupted(other):
                since_s = max(0.0, (self._now_us() - other.since_us) / 1e6)
                said = f"{other.by} is at it: {other.action} of {other.model}, since {since_s:.0f} s, on {other.on}"
                return Refused("conflict", f"{said}, step {other.step}")
            return replace(table, update=progress)

        # Before the log has answered: two who ask at once see each other.
        name = running.service.name
        if name in self._running:
            other = self._running[name].update
            return Refused("conflict", f"{other.asked.by} is at it: {other.asked.action} of {other.asked.model}")
        self._running[name] = running
        try:
            made = await self._desk.change(
                name, claim, running.update.asked.by, "model_update", _words(running.update), begin=True
            )
        except BaseException:
            del self._running[name]
            raise
        if isinstance(made, Refused):
            del self._running[name]
            return made
        running.until_us = progress.until_us
        return None

    def _progress(self, running: "_Running") -> Progress:
        update, asked = running.update, running.update.asked
        task = update.task
        now_us = self._now_us()
        step = "" if task is None else task.step
        place = "" if task is None else task.place
        if (step, place) != (running.step, running.place):
            running.step, running.place, running.step_us = step, place, now_us
        return Progress(
            id=update.id,
            action=asked.action,
            kind=asked.kind,
            model=asked.model,
            by=asked.by,
            on=self._observer,
            since_us=running.since_us,
            step=step,
            step_us=running.step_us,
            until_us=now_us + int(LEASE_S * 1e6) if update.live else 0,
            place=place,
            phase=update.phase,
            why=update.why,
            version=asked.version,
            steps=tuple(update.steps),
        )

    async def _write(self, running: "_Running") -> bool:
        """Tells all how far it is; False: the log does not take it now."""
        progress = self._progress(running)

        def tell(table: Table) -> Table | Refused:
            other = table.update
            if other is not None and other.id != progress.id:
                running.superseded = True
                return Refused("conflict", "another model update has begun")
            return replace(table, update=progress)

        made = await self._desk.change(
            running.service.name, tell, "", "model_update", _words(running.update), begin=True
        )
        if isinstance(made, Refused):
            self._say("warning", "model_update_untold", service=running.service.name, error=made.message)
            return False
        running.until_us = max(running.until_us, progress.until_us)
        return True

    # Leading it.

    async def _lead(self, running: "_Running") -> None:
        update = running.update
        try:
            while (task := update.task) is not None:
                if not await self._leads(running):
                    self._say("error", "model_update_superseded", service=running.service.name, id=update.id)
                    return
                outcome = await self._tried(running, task)
                stepped = update.told(outcome, self._clock())
                if stepped is None:
                    await self._sleep(PAUSE_S)
                    continue
                running.since = self._clock()
                self._tell_step(running, stepped)
                if update.live:
                    await self._write(running)
            self._tell_end(running)
            for _ in range(TELLINGS):
                if await self._write(running) or running.superseded:
                    break
                await self._sleep(LOOK_S)
        except Exception as exc:  # noqa: BLE001 - what is written of it will say that it was interrupted
            self._say("error", "model_update_crashed", service=running.service.name, exc_info=exc)
        finally:
            del self._running[running.service.name]

    async def _leads(self, running: "_Running") -> bool:
        """Whether the update is still led here: waits until its word is good. False: another was begun in its place."""
        while not running.superseded and self._now_us() >= running.until_us and not await self._write(running):
            if not running.superseded:
                await self._sleep(LOOK_S)
        return not running.superseded

    async def _tried(self, running: "_Running", task: Task) -> Outcome:
        try:
            return await self._do(running, task)
        except Exception as exc:  # noqa: BLE001 - a fault of ours ends this update, which undoes what it did
            self._say("error", "model_update_crashed", service=running.service.name, step=task.step, exc_info=exc)
            return Failed(f"a fault of this sidecar: {exc!r}", doubted=True)

    def _tell_step(self, running: "_Running", stepped: Stepped) -> None:
        self._stepped(stepped.step, stepped.result, stepped.took_s)
        self._say(
            "info" if stepped.result == "done" else "warning",
            "model_update_step",
            service=running.service.name,
            id=running.update.id,
            step=stepped.step,
            result=stepped.result,
            took_s=stepped.took_s,
            endpoint=stepped.place,
            detail=stepped.detail,
        )

    def _tell_end(self, running: "_Running") -> None:
        update = running.update
        took_s = round(update.took_s(self._clock()), 3)
        self._stepped("all", update.phase, took_s)
        self._say(
            "info" if update.phase == "done" else "error",
            f"model_update_{update.phase}",
            service=running.service.name,
            id=update.id,
            **_told(update.asked),
            took_s=took_s,
            why=update.why,
        )

    async def _do(self, running: "_Running", task: Task) -> Outcome:
        """One try of a task."""
        if task.step == "weights" and not task.place:
            return await self._moved(running, task.undo)
        if task.step == "drain" and not task.place:
            return await self._all_drained(running)
        if task.step in ("load", "revert") and not task.place:
            return await self._listed(running, task.step == "load")
        # It may have gone with its routing table, and come again.
        running.service = self._fleet.services.get(running.service.name, running.service)
        node = running.service.nodes.get(EndpointKey(task.place))
        if node is None:
            return Failed(f"{task.place} is no endpoint of {running.service.name} any more")
        match task.step:
            case "rest":
                return self._rested(running, node)
            case "weights":
                return self._back(running, node)
            case "drain" if running.update.asked.kind != "repository":
                return await self._drained(running, node)
            case "cache":
                return await self._forgotten(running, node)
            case "canary":
                return await self._answered(running, node)
            case "look" | "drain" | "load" | "ready" | "revert" | "unload":
                return await self._errand(running, node, task)
            case _:
                assert_never(task.step)

    # Engines.

    async def _errand(self, running: "_Running", node: Node, task: Task) -> Outcome:
        asked = running.update.asked
        before = running.update.befores.get(node.key, Before())
        if asked.kind == "version":
            apart = Apart(node.endpoint, asked.model)
            errand: Errand | Done | Failed = (
                apart.ready() if task.step == "ready" else apart.leave(asked.leaving, asked.level)
            )
        else:
            changer = _changer(asked)
            match task.step:
                case "look":
                    errand = changer.look()
                case "load":
                    errand = changer.load(before)
                case "ready" if task.undo and asked.action == "load":
                    errand = changer.restored(before)
                case "ready":
                    errand = changer.ready()
                case "drain":
                    errand = changer.drained(before)
                case "revert":
                    errand = changer.revert(before)
                case _:
                    errand = changer.unload()
        if not isinstance(errand, Errand):
            return errand
        outcome = await self._sent(running, node, errand)
        if isinstance(outcome, Done) and node.models is not None and asked.kind in ("repository", "adapter"):
            # Sooner than it is asked for its models the next time.
            if node.endpoint.engine_model:
                # Clients have other names for it: it serves what the policy says, or nothing.
                if task.step == "ready" and not task.undo and node.endpoint.engine_model == asked.model:
                    node.models = None
            elif task.step == "ready" and not task.undo:
                node.models = node.models | {asked.model}
            elif task.step == "unload" or (task.step == "revert" and not before.loaded):
                node.models = node.models - {asked.model}
        return outcome

    async def _sent(self, running: "_Running", node: Node, errand: Errand) -> Outcome:
        while True:
            answers: list[Answer] = []
            for number, request in enumerate(errand.requests):
                acts = errand.acts and number == 0
                left_s = max(LEAST_S, running.update.left_s(self._clock()))
                answer = await self._ask(node.key, node.endpoint, request, left_s if acts else min(LOOK_S, left_s))
                answers.append(answer)
                if answer.status:
                    continue
                if not acts:
                    return Again(answer.detail)
                if answer.reached:
                    return Failed(answer.detail, doubted=True)
                break
            outcome = errand.read(answers)
            if isinstance(outcome, Failed) and not answers[-1].reached and self._may_wait(running):
                return Again(outcome.why)
            if not isinstance(outcome, Errand):
                return outcome
            errand = outcome

    def _may_wait(self, running: "_Running") -> bool:
        """Whether an engine that is away is waited for: not where it can be left as it is."""
        task = running.update.task
        return task is not None and (task.undo or task.step == "cache")

    async def _forgotten(self, running: "_Running", node: Node) -> Outcome:
        asked = running.update.asked
        if asked.kind == "version":
            return Done("an endpoint of its own has a cache of its own")
        before = running.update.befores.get(node.key, Before())
        if asked.kind == "adapter" and not before.loaded:
            return Done("nothing of that name was cached")
        streams = asked.rest != "yes"
        errand = forgets(node.endpoint, streams)
        if isinstance(errand, Done):
            return errand
        outcome: Outcome = Failed("its streams have a part of its cache")
        if not (streams and asked.salts):
            outcome = await self._sent(running, node, errand)
        if not isinstance(outcome, Failed) or outcome.doubted or not asked.salts:
            return outcome
        # For each endpoint anew: those whose turn comes have computed with the last one what the old model says.
        made = await self._desk.change(
            running.service.name,
            lambda table: replace(table, salt_generation=table.salt_generation + 1),
            asked.by,
            "cache_salt",
            f"of before the {asked.action} of {asked.model} no cache may serve",
            begin=True,
        )
        if isinstance(made, Refused):
            return Again(made.message)
        return Done("it cannot reset its cache; requests have another cache_salt from now on")

    async def _answered(self, running: "_Running", node: Node) -> Outcome:
        asked, canary = running.update.asked, running.update.asked.canary
        model = (node.endpoint.engine_model if asked.kind in ("version", "sleep") else "") or asked.model
        if asked.model_version:
            model = f"{model}/versions/{asked.model_version}"
        try:
            question = Question(
                node.endpoint,
                model,
                canary.prompt,
                canary.max_tokens,
                running.update.id,
                int(self._wall()),
                salted=asked.salts,
            )
        except SidecarError as exc:
            return Failed(f"it cannot be asked: {exc}")
        left_s = max(LEAST_S, running.update.left_s(self._clock()))
        raw = await self._ask(node.key, node.endpoint, question.request, left_s)
        if not raw.status:
            return Failed(raw.detail) if raw.reached else Again(raw.detail)
        answer = question.read(raw)
        told = told_version(raw.body)
        if asked.model_version and told and told != asked.model_version:
            return Failed(f"wrong answer: version {told} answered, and not {asked.model_version}")
        outcome = judged(canary, model, answer.status, answer.body)
        if told and isinstance(outcome, Done):
            return Done(f"{outcome.detail}, version {told}")
        return outcome

    # Rotation.

    def _rested(self, running: "_Running", node: Node) -> Outcome:
        asked = running.update.asked
        if node.breaker.held_open and not _is_ours(node):
            return Done(f"out of rotation by {node.breaker.by}")
        wakes = asked.kind == "sleep" and asked.action == "load"
        if not (asked.anyway or wakes):
            # An order is about the address: it rests for all services that have it.
            for service in self._fleet.services.values():
                shared = service.nodes.get(node.key)
                model = asked.model if service is running.service else ""
                if shared is None or shared.draining or not shared.breaker.passes:
                    continue
                if not others_serve(service, model, (node.key,), self._clock()):
                    return Again(f"nobody else of {service.name} may serve")
        self._order(node.key, "open", _by(running.update), inf)
        return Done("out of rotation")

    def _back(self, running: "_Running", node: Node) -> Outcome:
        if not node.breaker.held_open:
            return Done("it keeps its place in rotation")
        if not _is_ours(node):
            return Done(f"it stays out of rotation by {node.breaker.by}")
        self._order(node.key, "close", _by(running.update), inf)
        return Done("back in rotation")

    async def _drained(self, running: "_Running", node: Node) -> Outcome:
        """Whether nobody is in flight at an endpoint that gets nothing new."""
        if node.in_flight:
            return Again(f"{node.in_flight} of its requests are under way")
        waited_s = self._clock() - running.since
        if self._members() > 1 and waited_s < SPREAD_S:
            return Again("other sidecars may not have heard of it")
        endpoint = node.endpoint
        dialect = DIALECTS.get((endpoint.engine, front_of(endpoint)))
        query = None if dialect is None or dialect.load_apart else dialect.load
        if dialect is not None and query is not None and not query.body:
            answer = await self._ask(node.key, endpoint, Request(b"GET", query.path), LOOK_S)
            load = dialect.read_load(answer.body) if answer.status == 200 else None
            if load is not None:
                if load.running or load.waiting:
                    return Again(f"the engine has {load.running} running and {load.waiting} waiting")
                return Done("nobody is in flight, the engine says")
        longest_s = float(running.service.policy.deadlines.total_s)
        if self._members() > 1 and waited_s < longest_s:
            return Again("nobody tells what other sidecars have in flight there; their streams end in time")
        return Done("nobody is in flight")

    async def _all_drained(self, running: "_Running") -> Outcome:
        asked = running.update.asked
        for place in asked.old if asked.action == "load" else asked.places:
            node = running.service.nodes.get(EndpointKey(place))
            outcome = Done() if node is None else await self._drained(running, node)
            if not isinstance(outcome, Done):
                return Again(f"{place}: {outcome.why}")
        return Done("nobody is in flight")

    # The routing table.

    async def _listed(self, running: "_Running", new: bool) -> Outcome:
        """The version's endpoints into the table, or as they were."""
        asked = running.update.asked
        ours = {target.url for target in asked.targets}
        endpoints = tuple(target for target in self._targets(running) if target.url not in ours)
        if new:
            endpoints = (*endpoints, *asked.targets)
        elif (table := self._table(running)) is not None and table.weights.get(asked.version):
            return Done("somebody has given it traffic: its endpoints stay")
        update = Update(
            service=asked.service,
            version=asked.version,
            update_id="" if not new else f"{running.update.id}-endpoints",
            engine=asked.engine,
            front=asked.front if new else None,
            engine_model=asked.engine_model if new else None,
            chat_template=asked.chat_template if new else None,
            endpoints=endpoints,
            by=_by(running.update),
        )
        outcome = _of(await self._desk.submit(update), f"{counted(len(endpoints), 'endpoint')} in the routing table")
        if isinstance(outcome, Failed):
            # An earlier try, whose answer was lost, may have been done.
            return Failed(outcome.why, any(target.url in ours for target in self._targets(running)))
        return outcome

    def _targets(self, running: "_Running") -> tuple[Target, ...]:
        """What the table has of the version that is loaded."""
        table = self._table(running)
        version = None if table is None else table.version(running.update.asked.version)
        return () if version is None else version.endpoints

    async def _moved(self, running: "_Running", back: bool) -> Outcome:
        """The weights to the new version, or back."""
        asked, update = running.update.asked, running.update
        by = _by(update)
        if back:
            if not running.weights:
                return Done("they had not moved")
            table = self._table(running)
            stand = {} if table is None else _moving(table.weights)
            if stand == _moving(running.weights):
                return Done("the weights are as they were")
            if running.made and stand != running.made:
                return Done("somebody has moved them since: they stay as they are")
            weights = {name: parts / PARTS for name, parts in running.weights.items()}
            made = await self._desk.submit(Update(service=asked.service, version=asked.version, weights=weights, by=by))
            return _of(made, "the weights are as they were")
        table = self._table(running)
        if not running.weights:
            known = table if table is not None and table.versions else started(running.service.policy)
            running.weights = {**known.weights}
        if asked.plan is not None and running.moved:
            return self._led(table, asked)
        weight = 0.0 if asked.action == "unload" else asked.weight
        made = await self._desk.submit(
            Update(
                service=asked.service,
                version=asked.version,
                update_id=f"{update.id}-weights",
                weight=None if asked.plan is not None else weight,
                plan=asked.plan,
                by=by,
            )
        )
        if isinstance(made, Accepted) and asked.plan is None:
            running.made = _moving(made.table.weights)
        outcome = _of(made, f"{asked.version} has {weight:.2%} of new sessions")
        if isinstance(outcome, Done) and asked.plan is not None:
            running.moved = True
            return Again("its canary is led to its weight")
        return outcome

    def _led(self, table: Table | None, asked: Asked) -> Outcome:
        """How it stands with the rollout that the update's plan began."""
        rollout = None if table is None else table.rollout
        if rollout is None or rollout.version != asked.version:
            return Failed("another rollout took its place")
        if rollout.live:
            return Again(f"its rollout is {rollout.phase}, step {rollout.step + 1} of {len(rollout.plan.steps)}")
        if rollout.phase == "promoted":
            return Done(f"promoted: {rollout.evidence}")
        return Failed(f"its rollout is {rollout.phase}: {rollout.evidence}")

    def _table(self, running: "_Running") -> Table | None:
        view = self._desk.standing(running.service.name)
        return None if view is None else view.table

    def _now_us(self) -> int:
        return self._server_us(self._clock())


class _Running:
    """An update that is led here."""

    __slots__ = (
        "made",
        "moved",
        "place",
        "service",
        "since",
        "since_us",
        "step",
        "step_us",
        "superseded",
        "task",
        "until_us",
        "update",
        "weights",
    )

    def __init__(self, update: HotUpdate, service: ServiceState, now: float, now_us: int) -> None:
        self.update = update
        self.service = service
        self.since_us = now_us
        self.since = now
        """When the task under way began, in monotonic seconds."""
        self.step = ""
        self.place = ""
        self.step_us = now_us
        self.until_us = 0
        """Until when the word of it that is in the log is good."""
        self.superseded = False
        """Another update of the service has begun."""
        self.weights: dict[str, int] = {}
        """Before they moved."""
        self.made: dict[str, int] = {}
        """As they were moved, where no plan moves them."""
        self.moved = False
        self.task: asyncio.Task[None] | None = None


def _changer(asked: Asked) -> Changer:
    match asked.kind:
        case "repository":
            return Repository(asked.model, asked.config, asked.model_version)
        case "adapter":
            return Adapter(asked.model, asked.path)
        case "sleep":
            return Sleep(asked.level)
        case "version":
            raise ValueError("a version has no engine that changes it")
        case _:
            assert_never(asked.kind)


def _of(made: Accepted | Refused, detail: str) -> Outcome:
    """What the desk's answer means for a step."""
    if isinstance(made, Accepted):
        return Done(detail)
    # The log is away, or others were faster: with the same update id it may be asked again.
    return Again(made.message) if made.code == "unavailable" else Failed(f"{made.code}: {made.message}")


def _moving(weights: dict[str, int]) -> dict[str, int]:
    """Those that get traffic."""
    return {name: weight for name, weight in weights.items() if weight}


def _is_ours(node: Node) -> bool:
    """Whether a model update has it out of rotation, this or one that was interrupted, and no operator."""
    return UPDATE in node.breaker.by


def _by(update: HotUpdate) -> str:
    """Who orders it: the operator, by this update."""
    by = f"{UPDATE}{update.id}"
    return (update.asked.by or "operator")[: MAX_BY - len(by)] + by


def _told(asked: Asked) -> dict[str, str]:
    return {"action": asked.action, "kind": asked.kind, "model": asked.model, "version": asked.version}


def _words(update: HotUpdate) -> str:
    """How far it is, in a sentence for the log."""
    task, asked = update.task, update.asked
    where = f" at {task.place}" if task is not None and task.place else ""
    how = f"step {task.step}{where}" if task is not None else update.phase
    return f"{asked.action} of {asked.model}: {how}" + (f": {update.why}" if update.why else "")
