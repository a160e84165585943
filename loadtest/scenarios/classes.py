"""Voice, text and batch together ask for three times what the engines hold: who was promised something gets it.

One tenant of the text class floods it with five times the users of another; a batch class takes what is left; a fifth
tenant has a quota of thirty requests a minute and asks for far more. The engines would take everybody and let all wait
in one line, as engines do: whoever is spared the line was let in first by the sidecar.

The limit is a fixed one, so that what is judged is who goes first, and not how soon the limit was learnt.
"""

import msgspec

from loadtest.marks import Evidence, Mark, accounted, with_fault
from loadtest.scenario import Crowd, Plan, Scenario
from loadtest.shapes import STEADY
from loadtest.sse_client import Ended
from loadtest.stage import Setting, Stage
from loadtest.tally import ALL, Record, count

VOICE, VICTIM, FLOOD, BATCH, SPENDER = "voice", "victim", "flood", "batch", "spender"

_VOICE_SLA_S = 0.5
_SLOTS = 8
_QUOTA = 30
"""Requests a minute: two users without a thought in between ask for more in the first seconds."""

_HONEST = frozenset({"preempted", "queue_timeout", "overloaded"})


def _fault(stage: Stage) -> None:
    stage.phase("load")
    stage.until(1.0)


def _marks(evidence: Evidence) -> list[Mark]:
    tally, facts = evidence.tally, evidence.facts
    spent = [record for record in tally.of(SPENDER) if record.ended is Ended.REFUSED]
    waited = tally.ttft_s(0.5, FLOOD) / tally.ttft_s(0.5, VICTIM)
    above = _whole(tally.of(SPENDER)) - _QUOTA * (1 + evidence.seconds / 60)
    return [
        Mark("goodput of voice, first token in 500 ms", tally.goodput(_VOICE_SLA_S, VOICE), ">=", 0.99),
        Mark("goodput of the flood's victim", tally.goodput(evidence.ttft_s, VICTIM), ">=", 0.99),
        # Without it nobody had to wait, and the marks above prove nothing.
        Mark("first token of the flood over its victim's", with_fault(facts, waited), ">=", 3, "times"),
        Mark("batch streams that came whole", _whole(tally.of(BATCH)), ">=", 1),
        Mark("refusals without a reason or a time", count(tally.of(ALL), _says_nothing), "==", 0),
        Mark("requests refused for the quota", with_fault(facts, count(spent, _over_quota)), ">=", 1),
        Mark("requests served above the quota", with_fault(facts, above), "<=", 0),
        Mark("streams broken", len(tally.broken(ALL)), "==", 0),
        accounted(evidence),
    ]


def _whole(records: list[Record]) -> int:
    return count(records, lambda record: record.ended is Ended.WHOLE)


def _over_quota(record: Record) -> bool:
    return record.status == 429 and record.reason == "quota_exceeded" and record.retry_after_s > 0


def _says_nothing(record: Record) -> bool:
    if record.ended is not Ended.REFUSED:
        return False
    return not _over_quota(record) and (record.reason not in _HONEST or not record.retry_after_s)


_SETTING = Setting(
    script={"first_token_s": 0.04, "token_gap_s": 0.02, "slots": _SLOTS, "queue": 1000},
    service={
        "admission": {"limit": "fixed", "concurrency": _SLOTS, "queue": 500},
        # An engine that lets its users wait, as with --broken, is not sick for that.
        "deadlines": {"first_token": "60s", "head": "60s"},
    },
    policy={
        "identity": {"tenant": [{"header": "x-tenant-id"}], "class": [{"header": "x-class"}]},
        "qos_policies": [
            {"name": "voice", "latency_sla_ms": 500, "priority": 9},
            {"name": "text", "latency_sla_ms": 1000, "priority": 5},
            {"name": "batch", "latency_sla_ms": 10000, "priority": 1, "preemptible": True},
        ],
        "quotas": [{"name": "spender", "tenant": "spender", "requests_per_minute": _QUOTA}],
    },
)


def _crowd(kind: str, parts: int, qos: str, tokens: tuple[int, int]) -> Crowd:
    return Crowd(kind, parts, (("x-class", qos), ("x-tenant-id", kind)), tokens)


SCENARIO = Scenario(
    name="classes",
    claim="voice and the victim of a flood get their first tokens in time while three times what fits is asked for",
    shape=STEADY,
    users=80,
    seconds=30.0,
    plan=Plan(
        patience_s=30.0,
        crowds=(
            _crowd(VOICE, 2, "voice", (8, 24)),
            _crowd(VICTIM, 2, "text", (8, 40)),
            _crowd(FLOOD, 10, "text", (8, 40)),
            _crowd(BATCH, 5, "batch", (32, 64)),
            _crowd(SPENDER, 1, "text", (4, 8)),
        ),
    ),
    setting=_SETTING,
    fault=_fault,
    marks=_marks,
    broken="admission off: everybody waits in the engines' own queues",
    broken_setting=msgspec.structs.replace(
        _SETTING, service={**_SETTING.service, "admission": {**_SETTING.service["admission"], "mode": "off"}}
    ),
)
