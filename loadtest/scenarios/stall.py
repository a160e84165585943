"""One of three engines stalls: its users are served by the others.

SIGSTOP freezes the engine for half of the run: the kernel goes on accepting its connections, streams stay open and
silent. What runs there at that moment is lost, since no proxy can continue another engine's stream; everything that
has not got its first token yet must be served elsewhere, and soon nobody must be sent there at all.

The deadlines are what an operator would set for engines that answer within a tenth of a second and write fifty tokens a
second: a second without a token is a fault there. All else is the default policy.
"""

import msgspec

from loadtest.marks import Evidence, Mark, accounted, with_admin, with_fault
from loadtest.scenario import Plan, Scenario
from loadtest.shapes import STEADY
from loadtest.sse_client import Ended
from loadtest.stage import BREAKERS_OFF, Setting, Stage
from loadtest.tally import count

_MARGIN = 3
"""Streams that may begin between the look at what is running and the stall."""


def _fault(stage: Stage) -> None:
    stage.phase("before")
    stage.until(0.25)
    if not stage.simulated:
        return
    victim = stage.engines[0]
    stage.facts.victim = victim.key
    if stage.admin is not None:
        stage.facts.notes["running there"] = stage.admin.in_flight(victim.key)
    victim.child.freeze()
    stage.phase("stalled")
    stage.until(0.75)
    victim.child.thaw()
    stage.phase("after")


def _marks(evidence: Evidence) -> list[Mark]:
    tally, facts = evidence.tally, evidence.facts
    broken = tally.broken()
    opened = sum(1 for _, key, state in facts.changes if key == f"node {facts.victim}" and state == "open")
    others = count(broken, lambda record: record.endpoint != facts.victim)
    told = count(broken, lambda record: record.ended is Ended.TOLD)
    running = facts.notes.get("running there", 0.0)
    return [
        Mark("goodput", tally.goodput(evidence.ttft_s), ">=", 0.99),
        Mark("streams cut beyond those running there", with_fault(facts, len(broken) - running), "<=", _MARGIN),
        Mark("streams cut on the other engines", with_fault(facts, others), "==", 0),
        Mark("streams cut without being told", len(broken) - told, "==", 0),
        Mark("its breaker seen open", with_admin(facts, opened) if facts.faulted else None, ">=", 1),
        Mark("goodput after", with_fault(facts, tally.goodput(evidence.ttft_s, phase="after")), ">=", 0.99),
        accounted(evidence),
    ]


_SETTING = Setting(
    script={"first_token_s": 0.08, "token_gap_s": 0.02},
    service={"deadlines": {"first_token": "2s", "token_gap": "1s"}},
)

SCENARIO = Scenario(
    name="stall",
    claim="one of three engines freezes for half of the run; 99 % of all streams come whole and in time",
    shape=STEADY,
    users=60,
    seconds=40.0,
    plan=Plan(tokens=(8, 40)),
    setting=_SETTING,
    fault=_fault,
    marks=_marks,
    broken="breakers off",
    broken_setting=msgspec.structs.replace(_SETTING, service={**_SETTING.service, "breakers": BREAKERS_OFF}),
)
