"""Slow clients: a few that read far slower than the engines write cost neither the others' pace nor our memory.

Each asks for an answer that would fill megabytes, and takes four kilobytes of it each second through a small receive
buffer. A proxy that reads on holds the difference in memory, once the kernel's send buffer is full (4 MB on most
machines, and none of the proxy's); one that stops reading its engine holds what fits its marks. The others' gaps are
compared with those of the same run before the slow ones came.
"""

from pathlib import Path

import msgspec

from loadtest.marks import Evidence, Mark, accounted, with_fault
from loadtest.scenario import Plan, Scenario
from loadtest.shapes import STEADY
from loadtest.sse_client import Ended
from loadtest.stage import Setting, Stage
from loadtest.tally import SLOW, count

_EVENT_BYTES, _GAP_S = 4096, 0.01
_READERS = 8
_GROWTH_MB = 8.0
"""For all slow streams: some hundred kilobytes each, and noise of the allocator."""
_SEND_BUFFER = Path("/proc/sys/net/ipv4/tcp_wmem")
_SLACK_S = 0.01
"""What gaps of ten milliseconds may grow by besides twice what they were, and besides what the load itself was late."""


def _fault(stage: Stage) -> None:
    stage.phase("alone")
    # The most that the kernel takes off a proxy's hands for each connection.
    stage.facts.notes["kernel's send buffer MB"] = int(_SEND_BUFFER.read_text(encoding="ascii").split()[2]) / 1e6
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
    hidden = len(slow) * facts.notes.get("kernel's send buffer MB", 0.0)
    alone = tally.gap_s(0.99, phase="alone")
    gap_limit_s = 2 * alone + _SLACK_S + evidence.lag_s(0.99, came)
    wrong = count(slow, lambda record: record.ended not in (Ended.LEFT, Ended.WHOLE))
    return [
        Mark("slow streams wrong or cut", wrong, "==", 0),
        # Less would fit the kernel's buffers and the mark below even if all of it were taken from the engines.
        Mark("what they left unread", with_fault(facts, written), ">=", hidden + 2 * _GROWTH_MB, "MB"),
        Mark("growth of the proxy's memory", growth, "<=", _GROWTH_MB, "MB"),
        Mark("the others' gaps, p99", tally.gap_s(0.99, phase="slow") * 1000, "<=", gap_limit_s * 1000, "ms"),
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
    claim="eight clients that read 4 KB/s of streams of 400 KB/s do not slow the others and are not held in memory",
    shape=STEADY,
    users=20,
    seconds=30.0,
    plan=Plan(tokens=(20, 100)),
    setting=_SETTING,
    fault=_fault,
    marks=_marks,
    broken="a relay without back-pressure in the sidecar's place",
    broken_setting=msgspec.structs.replace(_SETTING, leaky=True),
    slow_readers=_READERS,
)
