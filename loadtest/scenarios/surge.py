"""A surge without a fault: engines run full and say so, and no breaker takes that for sickness.

The engines serve few at a time, queue few more, and refuse the rest as vLLM's front does when its queue is full. Four
times the users come within a second, more than all three can hold. What is refused then must be refused honestly (429
with a Retry-After, or the engine's own words), what is served must be whole, and when the surge is over everything must
be as before at once.
"""

import msgspec

from loadtest.marks import Evidence, Mark, accounted, with_admin, with_fault
from loadtest.scenario import Plan, Scenario
from loadtest.shapes import SURGE
from loadtest.sse_client import Ended
from loadtest.stage import Setting, Stage
from loadtest.tally import Record, count

_CALM_AGAIN = 0.7
"""A tenth of the run after the surge's end (`shapes.SURGE`), for what was queued by then."""


def _fault(stage: Stage) -> None:
    stage.phase("before")
    stage.until(0.25)
    stage.phase("surge")
    stage.until(_CALM_AGAIN)
    stage.phase("after")


def _marks(evidence: Evidence) -> list[Mark]:
    tally, facts = evidence.tally, evidence.facts
    refused = [record for record in tally.of() if record.ended is Ended.REFUSED]
    moved = sum(1 for _, _, state in facts.changes if state != "closed")
    return [
        Mark("breakers that opened, any scope", with_admin(facts, facts.opened), "==", 0),
        Mark("breakers seen other than closed", with_admin(facts, moved), "==", 0),
        Mark("streams broken", len(tally.broken()), "==", 0),
        # Without it the surge was none, and the marks above prove nothing.
        Mark("refusals in the surge (it was one)", with_fault(facts, len(refused)), ">=", 1),
        Mark("refusals that say anything but full", count(refused, lambda r: not _says_full(r)), "==", 0),
        Mark("goodput before", tally.goodput(evidence.ttft_s, phase="before"), ">=", 0.999),
        Mark("goodput after", tally.goodput(evidence.ttft_s, phase="after"), ">=", 0.999),
        accounted(evidence),
    ]


def _says_full(record: Record) -> bool:
    """Ours with its Retry-After, or the engine's own, which is passed on where no other engine had room either."""
    if record.status == 429:
        return record.reason == "overloaded" and record.retry_after_s > 0
    return record.status == 503 and not record.reason and "queue is full" in record.detail


_SETTING = Setting(
    script={"first_token_s": 0.05, "first_token_per_live_s": 0.002, "token_gap_s": 0.02, "slots": 16, "queue": 8},
    service={},
)

SCENARIO = Scenario(
    name="surge",
    claim="four times the users within a second, more than the engines can hold, open no breaker",
    shape=SURGE,
    users=120,
    seconds=30.0,
    plan=Plan(tokens=(16, 48)),
    setting=_SETTING,
    fault=_fault,
    marks=_marks,
    broken="a first-token deadline of 150 ms, shorter than the queue of a surge",
    broken_setting=msgspec.structs.replace(_SETTING, service={"deadlines": {"first_token": "150ms"}}),
)
