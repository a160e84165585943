"""The split between versions is changed under load: no stream breaks, no session moves, new sessions follow.

The policy file is swapped while streams run, as an operator would. Sessions that began before it must stay with their
version, streams under way must not notice, and sessions that begin after it was taken must fall as the new split says,
within three standard deviations of a fair draw.
"""

import time
from collections import defaultdict
from math import sqrt

import msgspec

from loadtest.marks import Evidence, Mark, accounted, with_admin, with_fault
from loadtest.scenario import Plan, Scenario
from loadtest.shapes import STEADY
from loadtest.stage import Setting, Stage
from loadtest.tally import Record, count

_BEFORE, _AFTER = {"v1": 90, "v2": 10}, {"v1": 30, "v2": 70}
_LOAD_S = 10.0
"""How long a changed file may take to be in force; it is looked at once a second."""


def _fault(stage: Stage) -> None:
    stage.phase("before")
    stage.until(0.4)
    if not stage.simulated:
        return
    key = "spilt" if stage.setting.spoiled else "split"
    began = stage.elapsed_s
    stage.write_policy({**stage.setting.service, key: _AFTER})
    stage.phase("changing")
    while stage.elapsed_s < began + _LOAD_S and not stage.over:
        if stage.admin is not None and stage.admin.page("/policy")["generation"] > 1:
            stage.facts.notes["policy in force after s"] = stage.elapsed_s - began
            break
        time.sleep(0.05)
    stage.phase("after")


def _sessions(records: list[Record]) -> dict[str, list[Record]]:
    found: defaultdict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.version:
            found[record.session].append(record)
    return found


def _marks(evidence: Evidence) -> list[Mark]:
    tally, facts = evidence.tally, evidence.facts
    sessions = _sessions(tally.of())
    moved = sum(1 for records in sessions.values() if len({record.version for record in records}) > 1)
    across = sum(1 for records in sessions.values() if len({record.phase for record in records}) > 1)
    marks = [
        Mark("streams broken", len(tally.broken()), "==", 0),
        Mark("goodput", tally.goodput(evidence.ttft_s), ">=", 0.999),
        Mark("sessions whose version changed", moved, "==", 0),
        # Without them nothing was there that could have moved.
        Mark("sessions that were there before and after", with_fault(facts, across), ">=", 1),
        Mark("new policy in force", with_admin(facts, int("policy in force after s" in facts.notes)), "==", 1),
    ]
    for phase, split in (("before", _BEFORE), ("after", _AFTER)):
        firsts = [records[0] for records in sessions.values() if records[0].phase == phase]
        share = split["v2"] / 100
        got = count(firsts, lambda record: record.version == "v2") / len(firsts) if firsts else float("nan")
        tolerance = 3 * sqrt(share * (1 - share) / len(firsts)) if firsts else 0.0
        facts.notes[f"sessions begun {phase}"] = len(firsts)
        facts.notes[f"share of v2 {phase}"] = got
        marks.append(
            Mark(f"new sessions {phase}: v2 off its {share:.0%}", with_fault(facts, abs(got - share)), "<=", tolerance)
        )
    return [*marks, accounted(evidence)]


_SETTING = Setting(
    script={"first_token_s": 0.03, "token_gap_s": 0.02},
    service={"split": _BEFORE},
    versions=("v1", "v1", "v2"),
)

SCENARIO = Scenario(
    name="weights",
    claim="the split goes from 90/10 to 30/70 under load: no stream breaks, no session moves, new ones follow",
    shape=STEADY,
    users=40,
    seconds=25.0,
    plan=Plan(tokens=(4, 12), session_requests=(2, 5)),
    setting=_SETTING,
    fault=_fault,
    marks=_marks,
    broken="a misspelt key in the new policy, which is refused",
    broken_setting=msgspec.structs.replace(_SETTING, spoiled=True),
)
