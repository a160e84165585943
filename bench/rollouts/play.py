"""One rollout played to its end: five sidecars count, their tallies go through a log, and a verdict moves the table.

What is under test is the product: `core.canary` counts and judges, `core.rollout` begins, moves and ends.
"""

from collections.abc import Sequence

import msgspec

from bench.rollouts.kinds import Fault, World
from bench.rollouts.world import RESULTS, Traffic
from sidecar.core import rollout
from sidecar.core.canary import Trial
from sidecar.core.revise import Refused
from sidecar.core.table import PARTS, Plan, Step, Table, Version
from sidecar.core.verdict import GROUPS

SIDECARS = 5
PATIENCE = 3.0
"""A rollout that takes so many times as long as its steps want at least is left to people: held."""
PLAN = Plan("v1", (Step(500, 300.0, 600), Step(2000, 300.0, 1000), Step(5000, 300.0, 2000), Step(PARTS, 0.0, 1)))
FEW = Plan("v1", (Step(100, 300.0, 100), Step(1000, 300.0, 300), Step(PARTS, 0.0, 1)))
"""For little traffic: from one part in a hundred."""
MINUTE = Plan("v1", (Step(1000, 60.0, 200), Step(5000, 60.0, 200), Step(PARTS, 0.0, 1)))
HURRY = Plan("v1", (Step(1000, 30.0, 100), Step(5000, 30.0, 100), Step(PARTS, 0.0, 1)))
"""For who cannot wait: caches fill for as long as a step."""
ALONE = Plan("v1", (Step(500, 300.0, 600), Step(1000, 300.0, 1000), Step(PARTS, 0.0, 1)))
"""For a canary on one engine of ten: never more than a tenth."""


class Scenario(msgspec.Struct, frozen=True):
    """A kind of rollout."""

    name: str
    what: str
    fault: Fault = Fault()
    world: World = World()
    plan: Plan = PLAN

    @property
    def bad(self) -> bool:
        return self.fault != Fault()


class Played(msgspec.Struct, frozen=True):
    """How a rollout went: its end (`promoted`, `failed`, `held`), in which step, after how many seconds, answers of the
    canary in that step, and answers that its fault made worse; `unclear`: seconds that a due step was held."""

    scenario: str
    seed: int
    end: str
    step: int
    took_s: float
    samples: int
    harmed: int
    unclear: int
    why: str = ""


def play(scenario: Scenario, seed: int, sidecars: int = SIDECARS) -> Played:
    """Plays it."""
    plan = scenario.plan
    started = Table("chat", (Version("v1", PARTS), Version("v2", 0)))
    table = rollout.begin(started, "v2", plan, "r-1", 0, "bench")
    if isinstance(table, Refused):
        raise ValueError(table.message)
    traffic = Traffic(scenario.world, scenario.fault, seed)
    patience_s = PATIENCE * sum(
        max(step.min_s, step.min_samples / (traffic.rate * step.weight / PARTS))
        for step in plan.steps
        if step.weight < PARTS
    )
    step, unclear = -1, 0
    trials: Sequence[Trial] = ()
    while traffic.now < patience_s:
        led = table.rollout
        assert led is not None
        if not led.live:
            break
        if led.step != step:
            step = led.step
            trials = [Trial(led.id, step, "v2", "v1", plan) for _ in range(sidecars)]
            traffic.turn(table.weights["v2"] / PARTS)
        chance = traffic.chance.random
        for canary, size, ending, first_s, gap_s, tokens, finish, who in traffic.second():
            trial = trials[int(chance() * sidecars)]
            trial.observe(
                "v2" if canary else "v1",
                size,
                ending,
                RESULTS[ending],
                first_s,
                gap_s,
                tokens,
                finish,
                who % GROUPS if who >= 0 else -1,
            )
        judge = trials[0]
        for trial in trials:
            tally = trial.take()
            if tally is not None:
                judge.add(tally, int(traffic.now * 1000))
        verdict = judge.verdict()
        if verdict.word == "unclear" and rollout.due(led, verdict, int(traffic.now * 1e6)):
            unclear += 1
        moved = rollout.judged(table, verdict, int(traffic.now * 1e6), lambda _: 1.0)
        if moved is not None:
            table = moved[0]
    led = table.rollout
    assert led is not None
    end = "held" if led.live else led.phase
    verdict = trials[0].verdict()
    return Played(
        scenario.name,
        seed,
        end,
        step,
        traffic.now,
        verdict.canary,
        traffic.harmed,
        unclear,
        verdict.evidence if end != "promoted" else "",
    )
