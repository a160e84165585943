"""A model update: one meaning of "the new model serves" for engines that mean different things by it; pure.

```
look -> load -> ready -> cache -> canary -> weights -> drain -> unload          one after the other; what fails, undoes:

   RUNNING --- the last step is done -------------> DONE
      |  \\____ what is past taking back failed ---> UNFINISHED   the new model serves, and why the old one is there yet
      |
      +------ a step failed ---> UNDOING --- done --> FAILED      the old model serves, and why
                                    +- one failed ---> STUCK      and what could not be undone; all else was
```

The steps: `look` what is there, before anything is touched, at all endpoints; `load` the model; it says itself that it
is `ready`; no answer of the old one can come out of a `cache`; a `canary`, a real request, is answered, and answered
rightly; the `weights` move, or the endpoint comes back into rotation; the old one `drain`s; it is `unload`ed. Where an
engine changes its model at its own address there are two more, before: `rest` takes the endpoint out of rotation for
all sidecars, and `drain` waits for its streams.

1. Endpoints that change in place go one at a time. If one fails, those before it go back as well, the last one first: a
   fleet that answers half with one model and half with the other is neither old nor new.
2. A step is done, or is tried again until its time is over, or fails. What was asked and not answered may have been
   done: it is undone like what was.
3. Undoing begins with the clients: the weights go back before anything else, and an endpoint whose old model is not
   certainly back stays out of rotation, for an operator to say what he wants. The others go back all the same.
4. Past taking back is what the engine itself has ended: Triton lets go of the old version as the new one is ready, and
   an old model that was told to unload is not to be sent clients again, whether it obeyed or not.
5. What was unloaded stays unloaded, if the next endpoint's turn fails: that was what was asked.
6. What is known is what engines said. The machine asks nobody and waits for nobody: `task` is what is to be done,
   `told` what came of it.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec

from sidecar.core.table import Plan, Stepped, Target
from sidecar.kernel.change import Again, Before, Done, Failed, Outcome

Action = Literal["load", "unload"]
Kind = Literal["repository", "adapter", "sleep", "version"]
"""How an engine changes its model. `repository`: Triton loads from its model repository. `adapter`: vLLM loads a LoRA
adapter. `sleep`: vLLM wakes up, or goes to sleep. `version`: the model has endpoints of its own, as a version of the
routing table."""

Step = Literal["look", "rest", "drain", "load", "ready", "cache", "canary", "weights", "revert", "unload"]
Phase = Literal["running", "undoing", "done", "unfinished", "failed", "stuck"]
Leaving = Literal["leave", "unload", "sleep", "terminate"]
"""What becomes of the old endpoints of a `version`: nothing; Triton unloads the model; vLLM goes to sleep; MII's
gateway ends its deployment."""

Rest = Literal["yes", "no", "cannot"]
"""Whether endpoints whose model changes are out of rotation meanwhile; `cannot`: nobody else may serve."""

LIVE: Final = frozenset({"running", "undoing"})

TRANSITIONS: Final[Mapping[Phase, frozenset[Phase]]] = {
    "running": frozenset({"undoing", "done", "unfinished", "failed"}),
    "undoing": frozenset({"failed", "stuck"}),
    "done": frozenset(),
    "unfinished": frozenset(),
    "failed": frozenset(),
    "stuck": frozenset(),
}
"""From `running` to `failed` at once: nothing had been touched."""

DEADLINES: Final[Mapping[Step, float]] = {
    "look": 10.0,
    "rest": 5.0,
    "drain": 630.0,
    "load": 600.0,
    "ready": 120.0,
    "cache": 30.0,
    "canary": 60.0,
    "weights": 15.0,
    "revert": 600.0,
    "unload": 120.0,
}
"""Seconds, unless the one who asks says otherwise. `drain`: longer than `deadlines.total` lets a stream live by
default; `canary`: a first request compiles; `weights`: without a plan, which takes its own time."""

MAX_DETAIL: Final = 300
MAX_WHY: Final = 1000
"""Characters, beyond which no further fault is added."""
MAX_STEPPED: Final = 64
"""Steps that are remembered, the newest."""


class Canary(msgspec.Struct, frozen=True):
    """The request that the new model must answer. `expect`: what its answer must contain; empty: anything."""

    prompt: str = "The capital of France is"
    max_tokens: int = 1
    expect: str = ""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """An update as it is to be done: of which everything is known that need not be looked up at an engine.

    `places`: the endpoints, by key, in their order. `old`: those of the versions that lose their traffic, of kind
    `version`. `anyway`: also if nobody else serves meanwhile. `targets`, and `engine` to `chat_template`: what is to be
    put into the routing table for the version first; none: it is there. `weight`: of the new version. `path`: an
    adapter's folder as the engine sees it. `config`: a Triton configuration as JSON; empty: the repository's.
    `model_version`: of the repository. `leaving`: what becomes of `old`. `level`: of the sleep. `salts`: requests may
    get another `cache_salt`. `deadlines`: seconds, of the steps that do not have their usual time.
    """

    service: str
    model: str
    action: Action
    kind: Kind
    places: tuple[str, ...]
    by: str = ""
    rest: Rest = "no"
    anyway: bool = False
    version: str = ""
    old: tuple[str, ...] = ()
    engine: str = ""
    front: str | None = None
    engine_model: str | None = None
    chat_template: str | None = None
    targets: tuple[Target, ...] = ()
    weight: float = 1.0
    plan: Plan | None = None
    path: str = ""
    config: str = ""
    model_version: str = ""
    leaving: Leaving = "leave"
    level: int = 1
    salts: bool = False
    canary: Canary = Canary()
    deadlines: Mapping[str, float] = {}


class Task(msgspec.Struct, frozen=True):
    """What is to be done now, at an endpoint ("": at none of its own). `undo`: towards the old model."""

    step: Step
    place: str = ""
    undo: bool = False


class HotUpdate:
    """One update on its way. Times are monotonic seconds.

    `task`: what is to be done, None once it is over. `why`: why it did not end as `done`. `steps`: what came of each
    task, oldest first.
    """

    __slots__ = (
        "_began",
        "_past",
        "_step_began",
        "_stuck",
        "_todo",
        "asked",
        "befores",
        "id",
        "phase",
        "steps",
        "why",
    )

    def __init__(self, asked: Asked, id: str, now: float) -> None:
        self.asked = asked
        self.id = id
        self.phase: Phase = "running"
        self.why = ""
        self.befores: dict[str, Before] = {}
        self.steps: list[Stepped] = []
        self._began = now
        self._step_began = now
        self._past: list[Task] = []
        self._stuck = False
        self._todo: list[Task] = [Task("look", place) for place in looked_at(asked)]
        if not self._todo:
            self._todo = list(tasks_of(asked, {}))

    @property
    def task(self) -> Task | None:
        """What is to be done now."""
        return self._todo[0] if self._todo and self.phase in LIVE else None

    @property
    def live(self) -> bool:
        """Whether it has not ended."""
        return self.phase in LIVE

    def left_s(self, now: float) -> float:
        """How long the task may take from now; infinite where a plan has its own time."""
        task = self.task
        return 0.0 if task is None else self._step_began + deadline_of(self.asked, task) - now

    def took_s(self, now: float) -> float:
        """Since its begin."""
        return now - self._began

    def told(self, outcome: Outcome, now: float) -> Stepped | None:
        """What came of `task`; None: it is to be tried again."""
        task = self.task
        assert task is not None
        if isinstance(outcome, Again):
            left = self.left_s(now)
            if left > 0.0:
                return None
            outcome = Failed(f"not within {deadline_of(self.asked, task):g} s: {outcome.why}")
        took_s = now - self._step_began
        self._step_began = now
        del self._todo[0]
        if isinstance(outcome, Done):
            stepped = _stepped(task, True, took_s, outcome.detail)
            if outcome.before is not None:
                self.befores[task.place] = outcome.before
            self._past.append(task)
            if not self._todo:
                self._ran_out(task)
        else:
            stepped = _stepped(task, False, took_s, outcome.why)
            self._fail(task, outcome)
        self.steps.append(stepped)
        del self.steps[:-MAX_STEPPED]
        return stepped

    def _ran_out(self, task: Task) -> None:
        if self.phase == "undoing":
            self._move("stuck" if self._stuck else "failed")
        elif task.step == "look":
            fault = fault_of(self.asked, self.befores)
            if fault:
                self.why = fault
                self._move("failed")
            else:
                self._todo = list(tasks_of(self.asked, self.befores))
        else:
            self._move("done")

    def _fail(self, task: Task, failed: Failed) -> None:
        where = f" at {task.place}" if task.place else ""
        why = _told(failed.why)
        if self.phase == "undoing":
            if len(self.why) < MAX_WHY:
                self.why = f"{self.why}; and {word_of(task)}{where} failed: {why}"
            self._stuck = True
            self._todo = [other for other in self._todo if other.place != task.place]
            if not self._todo:
                self._move("stuck")
            return
        self.why = f"{word_of(task)}{where} failed: {why}"
        if is_past_taking_back(self.asked, task):
            self._todo.clear()
            self._move("unfinished")
            return
        self._todo = list(undo_of(self.asked, self.befores, self._past, task, failed.doubted))
        self._move("undoing" if self._todo else "failed")

    def _move(self, phase: Phase) -> None:
        assert phase in TRANSITIONS[self.phase], (self.phase, phase)
        self.phase = phase


def looked_at(asked: Asked) -> tuple[str, ...]:
    """Whom to look at before anything is touched."""
    return () if asked.kind == "version" else asked.places


def tasks_of(asked: Asked, befores: Mapping[str, Before]) -> list[Task]:
    """All that is to be done once it is known what is there, in order."""
    if asked.kind == "version":
        return _of_version(asked)
    tasks: list[Task] = []
    for place in asked.places:
        before = befores.get(place, Before())
        steps: list[Step] = []
        if must_rest(asked, before):
            steps.append("rest")
            if must_drain(asked):
                steps.append("drain")
        if asked.action == "load":
            steps += ["load", "ready", "cache", "canary", "weights"]
            if asked.kind == "repository" and before.loaded:
                steps.append("drain")
        else:
            steps.append("unload")
        tasks += [Task(step, place) for step in steps]
    return tasks


def must_rest(asked: Asked, before: Before) -> bool:
    """Whether an endpoint is taken out of rotation: what is new there, and in nobody's way, needs no rest."""
    if asked.rest != "yes":
        return False
    return asked.kind == "sleep" or (asked.action == "load" and before.loaded)


def must_drain(asked: Asked) -> bool:
    """Whether an endpoint's streams must have ended before its model changes.

    Triton keeps the old instance for them, and vLLM an adapter that is unloaded; an adapter that is loaded over another
    of its name changes under them, and who sleeps breaks them off.
    """
    return (asked.kind, asked.action) in (("sleep", "unload"), ("adapter", "load"))


def fault_of(asked: Asked, befores: Mapping[str, Before]) -> str:
    """Why it must not be done as it was asked, now that it is known what is there; empty: it may."""
    if asked.kind == "adapter" and asked.action == "load":
        for place, before in befores.items():
            if before.loaded and not (before.forgets or asked.salts):
                said = (
                    f"{asked.model} is loaded at {place}, which cannot reset its prefix cache (vLLM does in development"
                )
                return f"{said} mode) and answers could come out of the old one's: give the new one another name"
            if before.loaded and asked.rest == "cannot":
                said = (
                    f"{asked.model} is loaded at {place} from {before.path}, nobody else of {asked.service} may serve"
                )
                return f"{said} meanwhile, and its streams would change their model: say in_rotation if they may"
    return ""


def undo_of(
    asked: Asked, befores: Mapping[str, Before], past: Sequence[Task], failed: Task, doubted: bool
) -> list[Task]:
    """What leads back to the old model from `past`, which is done, and `failed`, which (`doubted`) may be done, too."""
    if asked.kind == "version":
        return _undo_of_version(asked, past, failed, doubted)
    tasks: list[Task] = []
    for place in reversed(asked.places):
        done = [task.step for task in past if task.place == place]
        before = befores.get(place, Before())
        if asked.action == "unload":
            if "rest" in done and "unload" not in done:
                # If it was told to sleep, and may do so, who comes back into rotation would hang.
                steps: list[Step] = ["ready", "weights"] if failed == Task("unload", place) else ["weights"]
                tasks += [Task(step, place, True) for step in steps]
            continue
        loaded = "load" in done or (doubted and failed == Task("load", place))
        if loaded:
            tasks += [Task(step, place, True) for step in _back(asked, before, resting="weights" not in done)]
        elif "rest" in done and not _slept(asked, before):
            tasks.append(Task("weights", place, True))
    return tasks


def _slept(asked: Asked, before: Before) -> bool:
    """Whether an endpoint was asleep before: it is to stay out of rotation."""
    return asked.kind == "sleep" and asked.action == "load" and not before.loaded


def _back(asked: Asked, before: Before, resting: bool) -> list[Step]:
    steps: list[Step] = []
    rest = must_rest(asked, before)
    if rest and not resting:
        steps.append("rest")
        if must_drain(asked):
            steps.append("drain")
    steps.append("revert")
    if _slept(asked, before):
        return steps
    if before.loaded:
        steps += ["ready", "cache"]
    if rest:
        steps.append("weights")
    return steps


def _of_version(asked: Asked) -> list[Task]:
    tasks: list[Task] = []
    if asked.action == "load":
        if asked.targets:
            tasks.append(Task("load"))
        for step in ("ready", "cache", "canary"):
            tasks += [Task(step, place) for place in asked.places]
    tasks.append(Task("weights"))
    leaving = asked.old if asked.action == "load" else asked.places
    if leaving:
        tasks.append(Task("drain"))
        if asked.leaving != "leave":
            tasks += [Task("unload", place) for place in leaving]
    return tasks


def _undo_of_version(asked: Asked, past: Sequence[Task], failed: Task, doubted: bool) -> list[Task]:
    steps = [task.step for task in past]
    tasks: list[Task] = []
    if "weights" in steps or failed.step == "weights":
        tasks.append(Task("weights", undo=True))
    if "load" in steps or (doubted and failed.step == "load"):
        tasks.append(Task("revert", undo=True))
    return tasks


def is_past_taking_back(asked: Asked, task: Task) -> bool:
    """Whether the update stands when this fails: the new model serves, or the old one was told to go."""
    if asked.kind == "version":
        return task.step == "unload"
    return asked.kind == "repository" and asked.action == "load" and task.step == "drain"


def deadline_of(asked: Asked, task: Task) -> float:
    """How long a task may take, in seconds."""
    said = asked.deadlines.get(task.step)
    if said is not None:
        return said
    if task.step == "weights" and asked.plan is not None and not task.undo:
        return float("inf")
    if task.step == "revert":
        # It is a load.
        return asked.deadlines.get("load", DEADLINES["revert"])
    return DEADLINES[task.step]


def word_of(task: Task) -> str:
    """A task's name for people and for metrics."""
    return f"undo_{task.step}" if task.undo and task.step != "revert" else task.step


def _stepped(task: Task, done: bool, took_s: float, detail: str) -> Stepped:
    return Stepped(word_of(task), task.place, "done" if done else "failed", round(took_s, 3), _told(detail))


def _told(words: str) -> str:
    """What engines said, as a record takes it: of some length, and what UTF-8 can say."""
    return words[:MAX_DETAIL].encode("utf-8", "replace").decode()
