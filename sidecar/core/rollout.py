"""A rollout's steps: what begins it, what moves it on, what ends it; pure, and every sidecar works it out alike.

```
           passed, promote                  hold
          +------------+            +------------------+
          v            |            v                  |
   -----> RUNNING -----+         HELD <----------- RUNNING
            |  the last step passed, promote_full        |
            +---------------------------> PROMOTED <-----+ (from HELD by an order alone)
            |  failed ------------------> FAILED
            |  abort -------------------> ABORTED  <----- HELD
            +- a weight said by hand ---> SUPERSEDED <--- HELD
```

1. A plan's steps rise. The canary has a step's weight until the step is passed: by the analysis, for as long as it was
   to last and with as many answers; or by an operator's word. What the last step says is what the canary ends with. A
   step of the whole weight ends the rollout as it is reached: there would be no baseline left to hold it against.
2. What fails goes back to 0, whatever the step has lasted. What is unclear stays where it is.
3. Held is observed and not moved: evidence counts on, and so does the step's time.
4. What a canary gives back goes to the other versions in the proportions they have, as it was taken from them, but to
   none of whose endpoints fewer than `min_ready` may serve. If that is none of them, the canary keeps its share until
   it is: half of the answers of a bad canary are better than no answers of a version that is down. Its own breakers
   keep requests from its endpoints meanwhile (`core.split` passes over a version that cannot serve). It is led on by
   the same rule: to more weight only while enough of its own endpoints may serve.
5. A rollout that ended is kept, for who asks how it went. Another of the same version takes its place at once; of
   another version while one is under way none begins: nobody would lead the first one on.
"""

from collections.abc import Callable
from math import isfinite
from typing import Final

from msgspec.structs import replace

from sidecar.core.desk import Action
from sidecar.core.revise import Refused
from sidecar.core.table import MAX_STEPS, PARTS, Phase, Plan, Rollout, Table, parts_of, weighed
from sidecar.core.verdict import Verdict

MOST_STEP_S: Final = 30 * 86_400.0
MOST_SAMPLES: Final = 10_000_000
MOST_FALSE_ALARM: Final = 0.2
MOST_TIMES: Final = 100.0
"""How many times slower, or longer, a canary may be at most: more is no margin."""
MAX_ID: Final = 128  # characters


Ready = Callable[[str], float]
"""Which part of a version's endpoints may serve now, 0-1."""

TRANSITIONS: Final[dict[Phase, frozenset[Phase]]] = {
    "running": frozenset({"running", "held", "promoted", "failed", "aborted", "superseded"}),
    "held": frozenset({"running", "promoted", "aborted", "superseded"}),
    "promoted": frozenset(),
    "failed": frozenset(),
    "aborted": frozenset(),
    "superseded": frozenset(),
}
"""From `running` to itself: the next step."""


def begin(table: Table, version: str, plan: Plan, id: str, now_us: int, by: str) -> Table | Refused:
    """`table` with a rollout of `version` at its first step. Refused where the plan makes no sense, or not here."""
    wrong = _wrong(plan)
    if not 0 < len(id) <= MAX_ID:
        wrong = wrong or f"a rollout's id has 1 to {MAX_ID} characters"
    if wrong:
        return Refused("invalid", wrong)
    if table.version(version) is None:
        return Refused("not_found", f"{table.service} has no version {version!r}")
    baseline = table.version(plan.baseline)
    if baseline is None:
        return Refused("not_found", f"{table.service} has no version {plan.baseline!r} to hold {version!r} against")
    if plan.baseline == version:
        return Refused("invalid", f"{version!r} cannot be held against itself: name another version as the baseline")
    under_way = table.rollout
    if under_way is not None and under_way.live and under_way.version != version:
        return Refused("conflict", f"a rollout of {under_way.version!r} is under way: promote or abort it first")
    first = weighed(table, version, plan.steps[0].weight)
    shared = None if first is None else first.version(plan.baseline)
    if first is None or shared is None or not baseline.weight or not shared.weight:
        return Refused("conflict", f"{plan.baseline!r} has no traffic: nothing to hold {version!r} against")
    return replace(first, rollout=Rollout(id, version, plan, since_us=now_us, why="begun", by=by))


def order(table: Table, action: Action, by: str, now_us: int, ready: Ready) -> Table | Refused:
    """`table` after an operator's word about its rollout."""
    rollout = table.rollout
    if rollout is None or not rollout.live:
        return Refused("not_found", f"no rollout of {table.service} is under way")
    if action == "hold":
        if rollout.phase == "held":
            return Refused("conflict", f"the rollout of {rollout.version!r} is held already")
        return _turned(table, "held", "hold", by)
    if action == "resume":
        if rollout.phase != "held":
            return Refused("conflict", f"the rollout of {rollout.version!r} is not held")
        return _turned(table, "running", "resume", by)
    said = f"by {by}" if by else "by an operator"
    if action == "abort":
        back = _given_back(table, rollout, ready)
        if back is None:
            return Refused("conflict", f"{blocked(table, ready)}; say the weights yourself to send it there anyway")
        return _moved(back, "aborted", rollout.step, now_us, "abort", said, by)
    if fault := fault_of(rollout):
        return Refused(
            "conflict", f"this rollout cannot be led on here: {fault}; abort it, or say the weights yourself"
        )
    if _short_of(rollout, rollout.version, ready):
        return Refused("conflict", f"too few of its endpoints may serve: {_readiness(rollout.version, ready)}")
    if action == "promote_full":
        whole = weighed(table, rollout.version, PARTS)
        assert whole is not None  # PARTS leaves no rest that could go to nobody
        return _moved(whole, "promoted", len(rollout.plan.steps) - 1, now_us, "promote_full", said, by)
    ahead = _ahead(table, rollout)
    if ahead is None:
        return Refused("conflict", f"no other version of {table.service} has traffic: say the weights yourself")
    further, step, phase = ahead
    return _moved(further, phase, step, now_us, "promote", said, by)


def judged(table: Table, verdict: Verdict, now_us: int, ready: Ready, by: str = "") -> tuple[Table, str, str] | None:
    """What a verdict of the step under way makes of the table, with why and the evidence; None: it stays as it is."""
    rollout = table.rollout
    if rollout is None or rollout.phase != "running" or fault_of(rollout):
        return None
    if verdict.word == "fail":
        back = _given_back(table, rollout, ready)
        if back is None:
            return None
        return _moved(back, "failed", rollout.step, now_us, "failed", verdict.evidence, by), "failed", verdict.evidence
    if verdict.word != "pass" or not due(rollout, verdict, now_us) or _short_of(rollout, rollout.version, ready):
        return None
    ahead = _ahead(table, rollout)
    if ahead is None:
        return None
    further, step, phase = ahead
    why = "promoted" if phase == "promoted" else "step"
    return _moved(further, phase, step, now_us, why, verdict.evidence, by), why, verdict.evidence


def fault_of(rollout: Rollout) -> str:
    """Why a rollout that a table holds cannot be led here; empty: it can. The log may have anybody's tables, and those
    of a release with other limits."""
    if not 0 <= rollout.step < len(rollout.plan.steps):
        return f"it is at step {rollout.step + 1} of {len(rollout.plan.steps)}"
    return _wrong(rollout.plan)


def due(rollout: Rollout, verdict: Verdict, now_us: int) -> bool:
    """Whether a step lasted as long as it was to, and has as many answers: what is still unclear then may stay so."""
    step = rollout.plan.steps[rollout.step]
    return now_us - rollout.since_us >= step.min_s * 1e6 and verdict.canary >= step.min_samples


def blocked(table: Table, ready: Ready) -> str:
    """Why the canary's share cannot be given back now, for people; empty where it can, or no rollout is under way."""
    rollout = table.rollout
    if rollout is None or not rollout.live or _given_back(table, rollout, ready) is not None:
        return ""
    others = [version.name for version in table.versions if version.weight and version.name != rollout.version]
    if not others:
        return f"no other version of {table.service} has traffic"
    said = ", ".join(_readiness(name, ready) for name in others)
    return f"{rollout.version!r} keeps its share: too few endpoints of the others may serve ({said})"


def superseded(table: Table, by: str, now_us: int) -> Table:
    """`table` whose weights are said by hand: a rollout under way is over."""
    rollout = table.rollout
    if rollout is None or not rollout.live:
        return table
    return _moved(table, "superseded", rollout.step, now_us, "superseded", "its weights were said by hand", by)


def _ahead(table: Table, rollout: Rollout) -> tuple[Table, int, Phase] | None:
    """The weights, the step and the phase that follow a step that was passed."""
    steps, step = rollout.plan.steps, rollout.step + 1
    if step >= len(steps):
        return table, rollout.step, "promoted"
    further = weighed(table, rollout.version, steps[step].weight)
    if further is None:
        return None
    return further, step, "promoted" if steps[step].weight == PARTS else "running"


def _given_back(table: Table, rollout: Rollout, ready: Ready) -> Table | None:
    """`table` with the canary at 0 and its share with those who may have it; None where that is nobody."""
    canary = table.version(rollout.version)
    if canary is None or not canary.weight:
        return table
    takers = {
        version.name: float(version.weight)
        for version in table.versions
        if version.weight and version.name != canary.name and not _short_of(rollout, version.name, ready)
    }
    if not takers:
        return None
    total = sum(takers.values())
    shares = {version.name: float(version.weight) for version in table.versions}
    for name, weight in takers.items():
        shares[name] += weight / total * canary.weight
    shares[canary.name] = 0.0
    parts = parts_of(shares)
    return replace(table, versions=tuple(replace(each, weight=parts[each.name]) for each in table.versions))


def _short_of(rollout: Rollout, version: str, ready: Ready) -> bool:
    part = ready(version)
    return not (part > 0.0 and part >= rollout.plan.min_ready)


def _readiness(version: str, ready: Ready) -> str:
    return f"{100 * ready(version):.0f} % of {version!r}"


def _moved(table: Table, phase: Phase, step: int, now_us: int, why: str, evidence: str, by: str) -> Table:
    rollout = table.rollout
    assert rollout is not None and phase in TRANSITIONS[rollout.phase], (rollout, phase)
    ahead = replace(rollout, phase=phase, step=step, since_us=now_us, why=why, evidence=evidence, by=by)
    return replace(table, rollout=ahead)


def _turned(table: Table, phase: Phase, why: str, by: str) -> Table:
    """Held, or no longer: the step and its time go on."""
    rollout = table.rollout
    assert rollout is not None and phase in TRANSITIONS[rollout.phase], (rollout, phase)
    return replace(table, rollout=replace(rollout, phase=phase, why=why, evidence="", by=by))


def _wrong(plan: Plan) -> str:
    """What is wrong with a plan by itself; empty: nothing."""
    steps, margins = plan.steps, plan.margins
    if not 1 <= len(steps) <= MAX_STEPS:
        return f"a plan has 1 to {MAX_STEPS} steps, this one {len(steps)}"
    before = 0
    for number, step in enumerate(steps, 1):
        if not before < step.weight <= PARTS:
            return f"the weights of a plan's steps rise, up to the whole: step {number} does not"
        if not 0.0 <= step.min_s <= MOST_STEP_S:
            return f"step {number} is to last {step.min_s:g} s: no time up to 30 days"
        if not 1 <= step.min_samples <= MOST_SAMPLES:
            return f"step {number} is to have {step.min_samples} answers: from 1 to {MOST_SAMPLES}"
        before = step.weight
    if steps[0].weight == PARTS:
        return "a first step of the whole weight leaves no baseline: say the weight without a plan"
    if not 0.0 < plan.false_alarm <= MOST_FALSE_ALARM:
        return f"a false alarm rate of {plan.false_alarm:g}: above 0, up to {MOST_FALSE_ALARM:g}"
    if not 0.0 <= plan.min_ready <= 1.0:
        return f"min_ready is a part of the endpoints, 0-1, and not {plan.min_ready:g}"
    for name, part in (("success", margins.success), ("errors", margins.errors), ("finish", margins.finish)):
        if not 0.0 <= part < 1.0:
            return f"the margin of {name} is a part of all answers, from 0 to below 1, and not {part:g}"
    for name, times in (
        ("first_token", margins.first_token),
        ("token_gap", margins.token_gap),
        ("length", margins.length),
    ):
        if not (isfinite(times) and 1.0 <= times <= MOST_TIMES):
            return f"the margin of {name} is how many times, from 1 to {MOST_TIMES:g}, and not {times:g}"
    return ""
