"""An engine is killed in the middle of its streams: they are cut and told so, nobody else is, and it comes back.

SIGKILL, so nothing is said in farewell: the kernel resets what was open. The same engine listens again on the same port
a few seconds later; a probe must find out by itself.
"""

import msgspec

from loadtest.marks import Evidence, Mark, accounted, with_fault
from loadtest.scenario import Plan, Scenario
from loadtest.shapes import STEADY
from loadtest.sse_client import Ended
from loadtest.stage import BREAKERS_OFF, Setting, Stage
from loadtest.tally import count

_CUT = "upstream_truncated"
"""The sidecar's word for a stream that broke off (docs/outcomes.md). Attempts that broke before a token are no cut."""


def _fault(stage: Stage) -> None:
    stage.phase("before")
    stage.until(0.3)
    if not stage.simulated:
        return
    victim = stage.engines[0]
    stage.facts.victim = victim.key
    notes = stage.facts.notes
    if stage.admin is not None:
        notes["running there"] = stage.admin.in_flight(victim.key)
    victim.child.kill()
    stage.phase("dead")
    stage.until(0.5)
    victim.come_back()
    stage.phase("back")
    stage.until(0.98)
    if stage.admin is not None:
        notes["counted as cut"] = stage.admin.total("sidecar_requests_total", reason=_CUT)


def _marks(evidence: Evidence) -> list[Mark]:
    tally, facts = evidence.tally, evidence.facts
    broken = tally.broken()
    told = count(broken, lambda record: record.ended is Ended.TOLD)
    others = count(broken, lambda record: record.endpoint != facts.victim)
    back = count(tally.of(phase="back"), lambda r: r.ended is Ended.WHOLE and r.endpoint == facts.victim)
    states = [state for _, key, state in facts.changes if key == f"node {facts.victim}"]
    closed = facts.final_states.get(facts.victim) == "closed"
    admin = facts.has_admin and facts.faulted
    return [
        # Without one the kill struck nobody, and nothing was tested.
        Mark("streams cut and told in band", with_fault(facts, told), ">=", 1),
        Mark("streams broken in any other way", len(broken) - told, "==", 0),
        Mark("streams broken on the other engines", with_fault(facts, others), "==", 0),
        Mark("cut streams that the sidecar counted", facts.notes.get("counted as cut") if admin else None, "==", told),
        Mark("its breaker seen open", states.count("open") if admin else None, ">=", 1),
        Mark("its breaker closed in the end", int(closed) if admin else None, "==", 1),
        Mark("streams served by it once it was back", with_fault(facts, back), ">=", 1),
        Mark("goodput", tally.goodput(evidence.ttft_s), ">=", 0.99),
        accounted(evidence),
    ]


_SETTING = Setting(
    script={"first_token_s": 0.08, "token_gap_s": 0.02},
    service={"breakers": {"node": {"open": "2s", "open_max": "4s"}}},
)

SCENARIO = Scenario(
    name="kill",
    claim="an engine is killed amid its streams: they end with an error event, the others go on, it is taken back",
    shape=STEADY,
    users=45,
    seconds=30.0,
    plan=Plan(tokens=(8, 48)),
    # The default waits ten seconds before the first probe; half of this run is over by then.
    setting=_SETTING,
    fault=_fault,
    marks=_marks,
    broken="breakers off",
    broken_setting=msgspec.structs.replace(_SETTING, service={"breakers": BREAKERS_OFF}),
)
