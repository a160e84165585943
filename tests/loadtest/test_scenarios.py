"""Every mark of every scenario passes where all is well, and fails for the fault that it is there to see."""

from collections.abc import Callable
from math import nan
from typing import Any

import pytest

from loadtest import scenarios
from loadtest.marks import Evidence, Facts, Mark
from loadtest.scenarios import classes
from loadtest.sse_client import Ended, Stream
from loadtest.stage import policy_text
from loadtest.tally import CHAT, SLOW, Tally
from sidecar.policy.load import load

VICTIM = "a:1"
Spoil = Callable[[Evidence], None]


def add(evidence: Evidence, count: int = 1, phase: str = "before", kind: str = CHAT, **fields: object) -> None:
    tally = evidence.tally
    for _ in range(count):
        tally.phase = phase
        has: dict[str, object] = {
            "ended": Ended.WHOLE,
            "ttft_s": 0.1,
            "gaps_s": [0.01],
            "total_s": 1.0,
            "status": 200,
            "endpoint": "b:2",
            "version": "v1",
            **fields,
        }
        session = str(has.pop("session", "s"))
        stream = Stream(0.0)
        for name, value in has.items():
            setattr(stream, name, value)
        tally.end(kind, tally.begin(), session, stream)


def evidence() -> Evidence:
    return Evidence(Tally(), Facts(victim=VICTIM, final_states={VICTIM: "closed"}), 30.0, 1.0)


def good_surge() -> Evidence:
    found = evidence()
    for phase in ("before", "after"):
        add(found, 10, phase)
    add(found, 3, "surge", ended=Ended.REFUSED, status=429, reason="overloaded", retry_after_s=1.0)
    add(found, 1, "surge", ended=Ended.REFUSED, status=503, detail="The request queue is full")
    return found


def good_stall() -> Evidence:
    found = evidence()
    add(found, 1000)
    add(found, 500, "after")
    add(found, 8, ended=Ended.TOLD, endpoint=VICTIM)
    found.facts.notes["running there"] = 9.0
    found.facts.changes.append((11.0, f"node {VICTIM}", "open"))
    return found


def good_kill() -> Evidence:
    found = good_stall()
    found.facts.notes["counted as cut"] = 8.0
    add(found, 10, "back", endpoint=VICTIM)
    return found


def good_weights() -> Evidence:
    found = evidence()
    add(found, 1, session="across")
    for phase, v2 in (("before", 10), ("after", 70)):
        for number in range(100):
            add(found, 1, phase, session=f"{phase}-{number}", version="v2" if number < v2 else "v1")
    add(found, 1, "after", session="across")
    found.facts.notes["policy in force after s"] = 0.5
    return found


def good_slow() -> Evidence:
    found = evidence()
    add(found, 100, "alone")
    add(found, 100, "slow")
    add(found, 8, "slow", SLOW, ended=Ended.LEFT, total_s=21.0, size=80_000)
    found.facts.notes.update({"began slow": 9.0, "kernel's send buffer MB": 4.2})
    found.facts.rss_bytes.extend([(1.0, 50e6), (20.0, 51e6)])
    found.facts.lags_s.append((20.0, 0.001))
    return found


def good_classes() -> Evidence:
    found = evidence()
    for kind in (classes.VOICE, classes.VICTIM):
        add(found, 100, kind=kind)
    add(found, 100, kind=classes.FLOOD, ttft_s=2.0)
    add(found, 10, kind=classes.BATCH, ttft_s=9.0)
    add(found, 5, kind=classes.BATCH, ended=Ended.REFUSED, status=503, reason="preempted", retry_after_s=1.0)
    add(found, 30, kind=classes.SPENDER)
    add(found, 9, kind=classes.SPENDER, ended=Ended.REFUSED, status=429, reason="quota_exceeded", retry_after_s=12.0)
    return found


GOOD = {
    "surge": good_surge,
    "stall": good_stall,
    "kill": good_kill,
    "weights": good_weights,
    "slow": good_slow,
    "classes": good_classes,
}


def _lost(found: Evidence) -> None:
    found.tally.begin()


def _note(name: str, value: float) -> Spoil:
    return lambda found: found.facts.notes.update({name: value})


def _forget_changes(found: Evidence) -> None:
    found.facts.changes.clear()


def _open_for_good(found: Evidence) -> None:
    found.facts.final_states[VICTIM] = "open"


def _count_one_opened(found: Evidence) -> None:
    found.facts.opened = 1


def _see_one_half_open(found: Evidence) -> None:
    found.facts.changes.append((5.0, "session s", "half_open"))


def _only(kind: Ended) -> Spoil:
    def spoil(found: Evidence) -> None:
        found.tally.records[:] = [record for record in found.tally.records if record.ended is not kind]
        found.tally.begun = len(found.tally.records)

    return spoil


def _without(kind: str, ended: Ended) -> Spoil:
    def spoil(found: Evidence) -> None:
        found.tally.records[:] = [rec for rec in found.tally.records if (rec.kind, rec.ended) != (kind, ended)]
        found.tally.begun = len(found.tally.records)

    return spoil


def _drop(phase: str) -> Spoil:
    def spoil(found: Evidence) -> None:
        found.tally.records[:] = [record for record in found.tally.records if record.phase != phase]
        found.tally.begun = len(found.tally.records)

    return spoil


def _add(count: int = 1, phase: str = "before", kind: str = CHAT, **fields: object) -> Spoil:
    return lambda found: add(found, count, phase, kind, **fields)


def _forget_policy(found: Evidence) -> None:
    del found.facts.notes["policy in force after s"]


def _grow(found: Evidence) -> None:
    found.facts.rss_bytes.append((25.0, 80e6))


CUT: dict[str, Any] = {"ended": Ended.SILENT, "endpoint": VICTIM}
ELSEWHERE: dict[str, Any] = {"ended": Ended.TOLD, "endpoint": "b:2"}


def _refused(**fields: Any) -> Spoil:
    return _add(kind=classes.BATCH, ended=Ended.REFUSED, **fields)


SPOILED: list[tuple[str, str, Spoil]] = [
    ("surge", "breakers that opened, any scope", _count_one_opened),
    ("surge", "breakers seen other than closed", _see_one_half_open),
    ("surge", "streams broken", _add(ended=Ended.SILENT)),
    ("surge", "refusals in the surge (it was one)", _only(Ended.REFUSED)),
    ("surge", "refusals that say anything but full", _add(ended=Ended.REFUSED, status=503, reason="breaker_open")),
    ("surge", "refusals that say anything but full", _add(ended=Ended.REFUSED, status=429, reason="overloaded")),
    ("surge", "refusals that say anything but full", _add(ended=Ended.REFUSED, status=503, detail="no such luck")),
    ("surge", "goodput before", _add(ttft_s=3.0)),
    ("surge", "goodput after", _drop("after")),
    ("surge", "streams unaccounted for", _lost),
    ("stall", "goodput", _add(30, ttft_s=2.1)),
    ("stall", "streams cut beyond those running there", _add(5, ended=Ended.TOLD, endpoint=VICTIM)),
    ("stall", "streams cut on the other engines", _add(**ELSEWHERE)),
    ("stall", "streams cut without being told", _add(**CUT)),
    ("stall", "its breaker seen open", _forget_changes),
    ("stall", "goodput after", _add(10, "after", ttft_s=2.1)),
    ("stall", "streams unaccounted for", _lost),
    ("kill", "streams cut and told in band", _only(Ended.TOLD)),
    ("kill", "streams broken in any other way", _add(**CUT)),
    ("kill", "streams broken on the other engines", _add(**ELSEWHERE)),
    ("kill", "cut streams that the sidecar counted", _note("counted as cut", 7.0)),
    ("kill", "its breaker seen open", _forget_changes),
    ("kill", "its breaker closed in the end", _open_for_good),
    ("kill", "streams served by it once it was back", _drop("back")),
    ("kill", "goodput", _add(30, ended=Ended.REFUSED, status=502)),
    ("kill", "streams unaccounted for", _lost),
    ("weights", "streams broken", _add(ended=Ended.SILENT)),
    ("weights", "goodput", _add(ttft_s=3.0)),
    ("weights", "sessions whose version changed", _add(phase="after", session="across", version="v2")),
    ("weights", "sessions that were there before and after", _drop("before")),
    ("weights", "new policy in force", _forget_policy),
    ("weights", "new sessions before: v2 off its 10%", _drop("before")),
    ("weights", "new sessions after: v2 off its 70%", _drop("after")),
    ("weights", "streams unaccounted for", _lost),
    ("slow", "slow streams wrong or cut", _add(kind=SLOW, ended=Ended.TOLD)),
    ("slow", "what they left unread", _only(Ended.LEFT)),
    ("slow", "growth of the proxy's memory", _grow),
    ("slow", "the others' gaps, p99", _add(5, "slow", gaps_s=[0.4])),
    ("slow", "the others' streams broken", _add(ended=Ended.SILENT)),
    ("slow", "the others' goodput", _add(phase="slow", ttft_s=3.0)),
    ("slow", "streams unaccounted for", _lost),
    ("classes", "goodput of voice, first token in 500 ms", _add(5, kind=classes.VOICE, ttft_s=0.6)),
    ("classes", "goodput of voice, first token in 500 ms", _add(5, kind=classes.VOICE, ended=Ended.REFUSED)),
    ("classes", "goodput of the flood's victim", _add(5, kind=classes.VICTIM, ttft_s=1.1)),
    ("classes", "first token of the flood over its victim's", _add(200, kind=classes.FLOOD, ttft_s=0.2)),
    ("classes", "batch streams that came whole", _without(classes.BATCH, Ended.WHOLE)),
    ("classes", "refusals without a reason or a time", _refused(status=429, reason="overloaded")),
    ("classes", "refusals without a reason or a time", _refused(status=503, reason="no_endpoint", retry_after_s=1.0)),
    ("classes", "requests refused for the quota", _without(classes.SPENDER, Ended.REFUSED)),
    ("classes", "requests served above the quota", _add(40, kind=classes.SPENDER)),
    ("classes", "streams broken", _add(kind=classes.BATCH, ended=Ended.SILENT)),
    ("classes", "streams unaccounted for", _lost),
]


def failed(name: str, found: Evidence) -> set[str]:
    return {mark.name for mark in scenarios.scenario(name).marks(found) if not mark.ok}


def test_every_scenario_is_tested_here() -> None:
    assert set(GOOD) == set(scenarios.names())


@pytest.mark.parametrize("name", scenarios.names())
def test_all_marks_pass_where_all_is_well(name: str) -> None:
    assert failed(name, GOOD[name]()) == set()


@pytest.mark.parametrize(("name", "mark", "spoil"), SPOILED, ids=[f"{name}: {mark}" for name, mark, _ in SPOILED])
def test_a_mark_fails_for_its_fault(name: str, mark: str, spoil: Spoil) -> None:
    found = GOOD[name]()
    spoil(found)
    assert mark in failed(name, found)


@pytest.mark.parametrize("name", scenarios.names())
def test_there_is_no_mark_that_cannot_fail(name: str) -> None:
    marks = {mark.name for mark in scenarios.scenario(name).marks(GOOD[name]())}
    assert marks == {mark for scenario, mark, _ in SPOILED if scenario == name}


@pytest.mark.parametrize("name", scenarios.names())
def test_against_a_real_url_what_was_not_done_is_not_judged(name: str) -> None:
    found = evidence()
    found.facts.faulted = found.facts.has_admin = False
    add(found, 10)
    judged = {mark.name for mark in scenarios.scenario(name).marks(found) if mark.ok is not None}
    assert "streams unaccounted for" in judged
    assert not [mark for mark in judged if "breaker" in mark or "policy" in mark]


@pytest.mark.parametrize("name", scenarios.names())
@pytest.mark.parametrize("broken", [False, True], ids=["as it is", "broken"])
def test_policies_are_good_ones(name: str, broken: bool) -> None:
    found = scenarios.scenario(name)
    setting = found.broken_setting if broken else found.setting
    keys = [f"127.0.0.1:{8000 + at}" for at in range(len(setting.versions))]
    snapshot = load([("load.yaml", policy_text(setting.service, keys, setting.versions, setting.policy).encode())], 1)
    assert len(snapshot.services[0].endpoints) == len(setting.versions)
    assert found.broken_setting != found.setting


def test_nothing_to_measure_is_a_fail_and_not_measured_is_none() -> None:
    assert Mark("m", nan, ">=", 0.0).ok is False
    assert Mark("m", None, ">=", 0.0).ok is None
