"""Slow clients: a few that read far slower than the engines write cost neither the others' pace nor our memory.

Each asks for an answer that would fill megabytes, and takes four kilobytes of it each second through a small receive
buffer. A proxy that reads on holds the difference in memory; one that stops reading its engine holds what fits its
marks. The others' gaps are compared with those of the same run before the slow ones came.
"""

import msgspec

from loadtest.marks import Evidence, Mark, accounted, with_fault
from loadtest.scenario import Plan, Scenario
from loadtest.shapes import STEADY
from loadtest.sse_client import Ended
from loadtest.stage import Setting, Stage
from loadtest.tally import SLOW, count

_EVENT_BYTES, _GAP_S = 1024, 0.01
_GROWTH_MB = 8.0
"""For a dozen slow streams: twenty times the kilobytes that a stream may hold, and noise of the allocator."""
_SLACK_S = 0.01
"""What gaps of ten milliseconds may grow by, besides twice what they were: two readings on a shared machine differ."""


def _fault(stage: Stage) -> None:
    stage.phase("alone")
    stage.until(0.3)
    stage.phase("slow")


def _marks(evidence: Evidence) -> list[Mark]:
    tally, facts = evidence.tally, evidence.facts
    slow = tally.of(SLOW)
    came = facts.notes.get("began slow", 0.0)
    before = [value for at, value in facts.rss_bytes if at < came]
    after = [value for at, value in facts.rss_bytes if at >= came]
    growth = (max(after) - max(before)) / 1e6 if before and after else None
    written = sum(record.total_s / _GAP_S * _EVENT_BYTES - record.size for record in slow) / 1e6
    alone = tally.gap_s(0.99, phase="alone")
    wrong = count(slow, lambda record: record.ended not in (Ended.LEFT, Ended.WHOLE))
    return [
        Mark("slow streams wrong or cut", wrong, "==", 0),
        # Less would fit the mark below even if all of it were held.
        Mark("what they left unread", with_fault(facts, written), ">=", 2 * _GROWTH_MB, "MB"),
        Mark("growth of the proxy's memory", growth, "<=", _GROWTH_MB, "MB"),
        Mark(
            "the others' gaps, p99", tally.gap_s(0.99, phase="slow") * 1000, "<=", (2 * alone + _SLACK_S) * 1000, "ms"
        ),
        Mark("the others' streams broken", len(tally.broken()), "==", 0),
        Mark("the others' goodput", tally.goodput(evidence.ttft_s, phase="slow"), ">=", 0.999),
        accounted(evidence),
    ]


_SETTING = Setting(
    script={"first_token_s": 0.03, "token_gap_s": _GAP_S, "event_bytes": _EVENT_BYTES},
    service={},
)

SCENARIO = Scenario(
    name="slow",
    claim="twelve clients that read 4 KB/s of streams of 100 KB/s do not slow the others and are not held in memory",
    shape=STEADY,
    users=20,
    seconds=30.0,
    plan=Plan(tokens=(20, 100)),
    setting=_SETTING,
    fault=_fault,
    marks=_marks,
    broken="a relay without back-pressure in the sidecar's place",
    broken_setting=msgspec.structs.replace(_SETTING, leaky=True),
    slow_readers=12,
)
