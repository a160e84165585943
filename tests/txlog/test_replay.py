"""A recording judged again: by hand where the answer can be counted, and by the product's own pipeline."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from sidecar.core.detection import Counts
from sidecar.kernel.ids import EndpointKey
from sidecar.kernel.outcome import Ending
from sidecar.policy.schema import (
    Adaptive,
    Breakers,
    Endpoint,
    NodeBreaker,
    RequestBreaker,
    Seconds,
    Service,
    SessionBreaker,
    Shared,
    Snapshot,
)
from sidecar.simulate.fault import Fault, Kind
from sidecar.simulate.method import keys_of
from sidecar.simulate.workload import TENANT, Modifier
from sidecar.txlog.difference import Difference, KeyReport, Report
from sidecar.txlog.recording import End, Line, Seen, Skipped, Span
from sidecar.txlog.replay import MOST_OUTCOMES, Disorder, Replay
from tests.txlog.recorded import START_S, Hand, at_ms, in_order, openings, simulated

ONE, TWO, THREE = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"
WELL, BAD = Ending.COMPLETE, Ending.SERVER_ERROR


def policy(*keys: str, quorum: int = 1, name: str = "chat", **node: Any) -> Snapshot:
    """Fixed rules alone, and two failures in a row open, unless it says otherwise."""
    rule: dict[str, Any] = {
        "consecutive": 2,
        "failure_ratio": 0.0,
        "open_s": Seconds(10),
        "successes": 1,
        "min_closed_ratio": 0.0,
        "adaptive": False,
    }
    service = Service(
        name=name,
        endpoints=tuple(Endpoint(url=f"http://{key}") for key in keys),
        breakers=Breakers(
            node=NodeBreaker(**(rule | node)),
            session=SessionBreaker(consecutive=2, open_s=Seconds(10)),
            request=RequestBreaker(consecutive=2, open_s=Seconds(10), successes=1),
        ),
        shared=Shared(quorum=quorum),
    )
    return Snapshot(version=1, services=(service,))


def replayed(snapshot: Snapshot, lines: Sequence[Line], service: str = "") -> Report:
    replay = Replay(snapshot, service)
    for line in lines:
        replay.take(line)
    return replay.report()


def of(report: Report, key: str = ONE) -> KeyReport:
    (found,) = [each for each in report.keys if each.key == key]
    return found


def only(report: Report, key: str = ONE) -> Difference:
    (found,) = of(report, key).differences
    return found


def second_of(ms: int | None) -> float:
    assert ms is not None
    return round(ms / 1000 - START_S, 3)


def fault(**changes: Any) -> Hand:
    """Ten answers a second; all of ONE fail in the seconds that end at 11 to 30, and what was recorded opened at 20."""
    hand = Hand(**changes)
    for second in range(1, 61):
        failing = 11 <= second <= 20
        ended = {TWO: {WELL: 10}, THREE: {WELL: 10}}
        if second <= 20 or second > 31:
            ended[ONE] = {BAD if failing else WELL: 10}
        hand.second(second, ended)
        if second == 20:
            hand.moved(20.0, ONE, "open", "consecutive", evidence="90 failures in a row")
        elif second == 30:
            hand.moved(30.0, ONE, "half_open", "waited")
            hand.moved(31.0, ONE, "closed", "proved")
    return hand


def test_a_stricter_rule_opens_sooner_and_what_it_would_have_shed_is_counted() -> None:
    # Failures are at 10.05, 10.15, ...: the second one opens. Its wait ends at 20.15: the record has it open by then,
    # and its own probe, at 31, closes ours. From 10.15 to 20 there were 98 more attempts, all of them failed.
    report = replayed(policy(ONE, TWO, THREE), fault().lines)
    difference = only(report)
    assert difference.verdict == "sooner"
    assert difference.shift_s == pytest.approx(-9.85)
    assert difference.recorded is not None and difference.replayed is not None
    assert second_of(difference.recorded.opened_ms) == 20.0
    assert second_of(difference.replayed.opened_ms) == 10.15
    assert second_of(difference.replayed.closed_ms) == 31.0
    assert (difference.replayed.kept_away, difference.replayed.spared, difference.replayed.refused) == (98, 98, 0)
    assert difference.words == (
        f"with this file {ONE} would have opened at 02:33:30 instead of 02:33:40, 9.8 s sooner (consecutive), and "
        "closed at 02:33:51, as it did; 98 requests would have been shed, 98 of which failed or were late"
    )
    assert (report.totals.recorded_openings, report.totals.replayed_openings) == (1, 1)
    assert (report.totals.kept_away, report.totals.same, report.attempts) == (98, 0, 60 * 20 + 49 * 10)
    assert of(report, TWO).differences == []
    assert of(report).replayed_not_closed_s == pytest.approx(20.85)


def test_the_same_rule_opens_when_it_did() -> None:
    # The 96th failure in a row is at 19.55.
    difference = only(replayed(policy(ONE, TWO, THREE, consecutive=96), fault().lines))
    assert difference.verdict == "same"
    assert difference.shift_s == pytest.approx(-0.45)
    assert "as it did" in difference.words


def test_a_laxer_rule_would_not_have_opened() -> None:
    report = replayed(policy(ONE, TWO, THREE, consecutive=1000), fault().lines)
    difference = only(report)
    assert difference.verdict == "only_recorded"
    assert "would not have opened at 02:33:40 (consecutive)" in difference.words
    assert "not in the record" in difference.words
    assert any("what an open breaker kept away" in words for words in report.unsaid)


def test_what_never_opened_may_open() -> None:
    lines = [line for line in fault().lines if isinstance(line, Seen)]
    difference = only(replayed(policy(ONE, TWO, THREE, open_s=Seconds(15)), lines))
    assert difference.verdict == "only_replayed"
    assert difference.recorded is None and difference.replayed is not None
    # The wait ends at 25.15, and the record has nothing of it until 31: answers then prove it well.
    assert second_of(difference.replayed.closed_ms) == 31.05
    assert "which it did not" in difference.words


def test_probes_meet_what_the_record_met_and_waits_double() -> None:
    hand = Hand()
    for second in range(1, 41):
        hand.second(second, {ONE: {BAD if second < 25 else WELL: 10}, TWO: {WELL: 10}})
    difference = only(replayed(policy(ONE, TWO, open_s=Seconds(5), open_max_s=Seconds(60)), hand.lines))
    # Open at 0.15, probed at 5.15 (wait 10), 15.15 (wait 20), 35.15: well.
    assert difference.replayed is not None
    assert (second_of(difference.replayed.opened_ms), second_of(difference.replayed.closed_ms)) == (0.15, 35.15)
    assert difference.replayed.probes_failed == 2
    # Of 350 attempts until then, two opened it and three were its probes.
    assert difference.replayed.kept_away == 352 - 2 - 3
    assert difference.replayed.spared == 240 - 2 - 2


def test_the_floor_holds_in_a_replay_too_and_where_nobody_is_left_requests_are_refused() -> None:
    hand = Hand()
    for second in range(1, 11):
        hand.second(second, {ONE: {BAD: 10}, TWO: {BAD: 10}})
    floored = replayed(policy(ONE, TWO, min_closed_ratio=0.5), hand.lines)
    assert sorted(len(of(floored, key).differences) for key in (ONE, TWO)) == [0, 1]
    assert of(floored, ONE).held_closed + of(floored, TWO).held_closed > 0
    free = replayed(policy(ONE, TWO, open_s=Seconds(60)), hand.lines)
    first, last = only(free, ONE).replayed, only(free, TWO).replayed
    assert first is not None and last is not None
    assert (first.kept_away, last.kept_away) == (98, 98)
    assert free.totals.refused == 98 + 98


def test_failures_in_a_row_are_as_they_were_told() -> None:
    """Five of ten fail: evenly spread no two would be in a row; three were, across a second's border."""
    quiet, rows = Hand(), Hand()
    for hand, runs in ((quiet, None), (rows, ((0, 1, 1), (2, 2, 0)))):
        for second in (1, 2):
            hand.second(second, {ONE: {WELL: 5, BAD: 5}, TWO: {WELL: 10}})
            if runs is not None:
                line = hand.lines[-1]
                assert isinstance(line, Seen)
                failing = replace(line.endpoints[0], runs=runs[second - 1])
                hand.lines[-1] = replace(line, endpoints=(failing, line.endpoints[1]))
    assert of(replayed(policy(ONE, TWO, consecutive=3), quiet.lines)).differences == []
    difference = only(replayed(policy(ONE, TWO, consecutive=3), rows.lines))
    assert difference.replayed is not None
    assert second_of(difference.replayed.opened_ms) == 1.15


def test_what_says_nothing_of_an_endpoint_opens_nothing() -> None:
    hand = Hand()
    for second in range(1, 11):
        hand.second(second, {ONE: {Ending.CLIENT_LEFT: 10, Ending.CLIENT_ERROR: 5, Ending.OVERLOADED: 5}})
    assert of(replayed(policy(ONE), hand.lines)).differences == []


@pytest.mark.parametrize(
    ("quorum", "seconds"),
    [pytest.param(1, 0.25, id="one is enough"), pytest.param(2, 5.25, id="two"), pytest.param(3, None, id="three")],
)
def test_of_several_sidecars_a_quorum_must_have_seen_it(quorum: int, seconds: float | None) -> None:
    """pod-a sees ONE fail from the beginning, pod-b from the sixth second, pod-c never."""
    hands = Hand("pod-a"), Hand("pod-b"), Hand("pod-c")
    for second in range(1, 16):
        for hand, failing in zip(hands, (True, second > 5, False), strict=True):
            hand.second(second, {ONE: {BAD if failing else WELL: 2}, TWO: {WELL: 2}})
    lines = in_order(*(hand.lines for hand in hands))
    # Others have to be heard of before they can be asked: the first second is pod-a's alone.
    report = replayed(policy(ONE, TWO, quorum=quorum, open_s=Seconds(60)), lines)
    differences = of(report).differences
    if seconds is None:
        assert differences == []
        return
    (difference,) = differences
    assert difference.replayed is not None
    assert second_of(difference.replayed.opened_ms) == pytest.approx(seconds + 0.5, abs=0.5)
    if quorum > 1:
        assert "seen by 2 sidecars" in difference.replayed.evidence
    assert report.observers == ["pod-a", "pod-b", "pod-c"]


def test_sessions_and_kinds_of_request_are_judged_too() -> None:
    hand = Hand()
    for second in range(1, 11):
        bad = second in (3, 4)
        hand.second(
            second,
            {ONE: {WELL: 1}},
            kinds={"POST /v1/chat/completions": (0, 2) if bad else (2, 0)},
            sessions={"user-1": (0, 1) if bad else (3, 0)},
        )
    report = replayed(policy(ONE), hand.lines)
    kind, session = of(report, "POST /v1/chat/completions"), of(report, "user-1")
    assert (kind.scope, session.scope) == ("request", "session")
    for found, opened in ((kind, 2.75), (session, 3.5)):
        (difference,) = found.differences
        assert difference.replayed is not None
        assert second_of(difference.replayed.opened_ms) == opened
        assert difference.replayed.refused == difference.replayed.kept_away > 0
        assert difference.words.startswith(f"with this file {found.scope} {found.key} would have opened")


def test_an_order_in_the_record_is_an_order() -> None:
    hand = Hand()
    for second in range(1, 31):
        hand.second(second, {ONE: {WELL: 10}, TWO: {WELL: 10}})
        if second == 10:
            hand.moved(10.0, ONE, "open", "operator", kind="override", held=True, by="pod-a")
        elif second == 20:
            hand.moved(20.0, ONE, "closed", "operator", kind="override", by="pod-a")
    difference = only(replayed(policy(ONE, TWO), hand.lines))
    assert difference.verdict == "same"
    assert difference.replayed is not None
    assert (second_of(difference.replayed.opened_ms), second_of(difference.replayed.closed_ms)) == (10.0, 20.0)
    assert difference.replayed.why == "operator"


def test_what_was_open_before_the_span_is_open_here_until_the_record_proves_it() -> None:
    hand = Hand()
    hand.moved(-100.0, ONE, "open", "fast", before=True)
    for second in range(1, 21):
        hand.second(second, {TWO: {WELL: 10}} | ({ONE: {WELL: 10}} if second > 11 else {}))
        if second == 10:
            hand.moved(10.0, ONE, "half_open", "waited")
            hand.moved(11.0, ONE, "closed", "proved")
    lines: list[Line] = [Span(at_ms(0), at_ms(20)), *hand.lines, End(25)]
    report = replayed(policy(ONE, TWO), lines)
    difference = only(report)
    assert difference.verdict == "same"
    assert difference.replayed is not None
    assert second_of(difference.replayed.closed_ms) == 11.0
    assert not any("breaks off" in words for words in report.unsaid)


def test_a_failed_probe_of_the_record_fails_here() -> None:
    hand = fault()
    lines = [line for line in hand.lines if getattr(line, "at_ms", 0) <= at_ms(30) and isinstance(line, Seen)]
    moved = Hand()
    moved.moved(20.0, ONE, "open", "consecutive")
    moved.moved(21.0, ONE, "half_open", "waited")
    moved.moved(22.0, ONE, "open", "probe_failed")
    moved.moved(25.0, ONE, "half_open", "waited")
    moved.moved(26.0, ONE, "open", "withdrawn")
    difference = only(replayed(policy(ONE, TWO, THREE, open_s=Seconds(1)), in_order(lines, moved.lines)))
    assert difference.recorded is not None and difference.replayed is not None
    assert difference.recorded.probes_failed == 1
    assert difference.replayed.closed_ms is None
    # Open at 10.15; probed after 1, 2, 4 s, and then, the next wait being over, by the record's own at 22.
    assert difference.replayed.probes_failed == 3


def test_the_detector_opens_on_the_counts_that_were_told() -> None:
    """Three of ten answers fail: no fixed rule sees it, the detector does; four bad ones weigh 4 x 5.3 - 10 x 0.5."""
    hand = Hand()
    for second in range(1, 61):
        bad = 3 if second > 40 else 0
        counts = [
            Counts(EndpointKey(key), 10 - (bad if key == ONE else 0), bad if key == ONE else 0, 0, 0.0, 0, 0.0)
            for key in (ONE, TWO, THREE)
        ]
        ended = {key: {WELL: 10} for key in (TWO, THREE)} | {ONE: {WELL: 10 - bad, BAD: bad}}
        hand.second(second, ended, counts)
    snapshot = policy(ONE, TWO, THREE, consecutive=1000, adaptive=True)
    report = replayed(snapshot, hand.lines)
    (difference, *_) = of(report).differences
    assert difference.replayed is not None
    assert difference.replayed.why == "fast"
    assert 40.0 < second_of(difference.replayed.opened_ms) <= 42.0
    assert "of them seen by other sidecars" in difference.replayed.evidence
    stricter = policy(ONE, TWO, THREE, consecutive=1000, adaptive=Adaptive(false_alarm=1e-15, statistics=("fast",)))
    (later, *_) = of(replayed(stricter, hand.lines)).differences
    assert later.replayed is not None
    assert later.replayed.opened_ms > difference.replayed.opened_ms
    assert of(replayed(policy(ONE, TWO, THREE, consecutive=1000), hand.lines)).differences == []


def test_without_a_detector_in_the_record_outcomes_stand_for_its_counts() -> None:
    hand = Hand()
    for second in range(1, 61):
        bad = 4 if second > 40 else 0
        hand.second(second, {ONE: {WELL: 10 - bad, BAD: bad}, TWO: {WELL: 10}, THREE: {WELL: 10}})
    report = replayed(policy(ONE, TWO, THREE, consecutive=1000, adaptive=True), hand.lines)
    assert any("no detector was on in the record" in words for words in report.unsaid)
    (difference, *_) = of(report).differences
    assert difference.replayed is not None
    assert difference.replayed.why == "fast"


def test_shadow_refuses_nobody_and_off_judges_nothing() -> None:
    lines = [line for line in fault().lines if isinstance(line, Seen)]
    shadow = only(replayed(policy(ONE, TWO, THREE, mode="shadow"), lines))
    assert shadow.replayed is not None
    assert shadow.replayed.kept_away == 0
    assert of(replayed(policy(ONE, TWO, THREE, mode="off"), lines)).differences == []


# What is not as it should be.


def test_endpoints_that_the_file_lacks_are_left_out_and_named() -> None:
    report = replayed(policy(TWO, THREE), fault().lines)
    assert report.unknown_endpoints == [ONE]
    assert [each.key for each in report.keys] == [TWO, THREE]
    assert any(ONE in words for words in report.unsaid)


def test_a_service_without_endpoints_has_those_of_the_record() -> None:
    report = replayed(policy(), fault().lines)
    assert report.unknown_endpoints == []
    assert only(report).verdict == "sooner"


def test_other_services_are_left_out_and_named() -> None:
    report = replayed(policy(ONE, TWO, THREE, name="other"), fault().lines)
    assert report.attempts == 0
    assert "service chat is not in this file: 60 summaries left out" in report.unsaid
    assert replayed(policy(ONE, TWO, THREE), fault().lines, service="other").attempts == 0


def test_what_is_told_twice_counts_once_and_what_is_missing_is_said() -> None:
    lines = fault().lines
    twice = [line for each in lines for line in (each, each)]
    assert replayed(policy(ONE, TWO, THREE), twice) == replayed(policy(ONE, TWO, THREE), lines)
    holes = [line for number, line in enumerate(lines) if number not in (3, 4)]
    assert "2 summaries missing" in replayed(policy(ONE, TWO, THREE), holes).unsaid


def test_a_restart_of_a_sidecar_is_no_hole() -> None:
    before, after = Hand(), Hand()
    after._seq = 50_000
    for second in range(1, 6):
        before.second(second, {ONE: {WELL: 1}})
        after.second(second + 5, {ONE: {WELL: 1}})
    report = replayed(policy(ONE), in_order(before.lines, after.lines))
    assert report.summaries == 10
    assert not any("missing" in words for words in report.unsaid)


def test_lines_out_of_order_are_refused() -> None:
    replay = Replay(policy(ONE))
    hand = Hand()
    hand.second(10, {ONE: {WELL: 1}})
    hand.second(1, {ONE: {WELL: 1}})
    replay.take(hand.lines[0])
    with pytest.raises(Disorder, match="02:33:21 comes after one of 02:33:30"):
        replay.take(hand.lines[1])


def test_what_could_not_be_read_or_is_cut_off_is_said() -> None:
    lines: list[Line] = [Span(at_ms(0), at_ms(100)), Skipped(at_ms(1), "1-0", "schema 9"), *fault().lines]
    said = replayed(policy(ONE, TWO, THREE), lines).unsaid
    assert "not to be read: 1 entry of the log" in said
    assert "the recording breaks off: its last line is missing" in said


def test_of_nothing_nothing_is_said() -> None:
    report = replayed(policy(ONE), [Span(at_ms(0), at_ms(60)), End(1)])
    assert (report.keys, report.summaries, report.seconds) == ([], 0, 60.0)


def test_an_absurd_number_of_attempts_takes_no_absurd_time() -> None:
    hand = Hand()
    hand.second(1, {ONE: {WELL: 9_000_000, BAD: 900_000}})
    report = replayed(policy(ONE), hand.lines)
    assert report.attempts == 9_900_000
    assert any(f"beyond {MOST_OUTCOMES}" in words for words in report.unsaid)


def test_a_hole_of_a_week_takes_no_week() -> None:
    hand = Hand()
    hand.second(1, {ONE: {WELL: 1}})
    hand.second(7 * 86_400, {ONE: {WELL: 1}})
    assert replayed(policy(ONE, adaptive=True), hand.lines).attempts == 2


def test_only_what_was_asked_for_is_told_what_came_before_taught() -> None:
    replay = Replay(policy(ONE, TWO, THREE))
    for line in fault().lines:
        replay.take(line)
    report = replay.report(at_ms(40))
    assert of(report).differences == []
    assert (report.since, report.until) == ("2025-11-30T02:34:00Z", "2025-11-30T02:34:20Z")


# The real pipeline.


def policy_of(service: Service, breakers: Breakers) -> Snapshot:
    endpoints = tuple(Endpoint(url=f"http://{key}") for key in keys_of(5))
    return Snapshot(version=1, services=(replace(service, endpoints=endpoints, breakers=breakers),))


REAL = [
    pytest.param(Fault(Kind.ERRORS, (1,), 200.0, 240.0, share=0.8), True, id="errors, detector"),
    pytest.param(Fault(Kind.ERRORS, (1,), 200.0, 240.0, share=0.8), False, id="errors, fixed rules"),
    pytest.param(Fault(Kind.STALL, (1,), 200.0, 240.0, share=0.4), True, id="stall, detector"),
    pytest.param(Fault(Kind.STALL, (1,), 200.0, 240.0, share=0.8), False, id="stall, fixed rules"),
    pytest.param(Fault(Kind.STEP, (1,), 200.0, 240.0, 6.0), True, id="slow, detector"),
    pytest.param(Fault(Kind.GRAY, (1,), 200.0, 260.0, share=0.1), True, id="gray, detector"),
    pytest.param(Fault(Kind.OUTAGE, (1,), 200.0, 240.0), True, id="outage, detector"),
    pytest.param(Fault(Kind.OUTAGE, (1,), 200.0, 240.0), False, id="outage, fixed rules"),
]


@pytest.mark.parametrize(("harm", "detector"), REAL)
def test_the_policy_that_was_in_force_opens_when_it_did(harm: Fault, detector: bool) -> None:
    rule = NodeBreaker(adaptive=detector)
    service = Service(name="chat", breakers=Breakers(node=rule, session=SessionBreaker(mode="off")))
    lines = simulated(service, [harm], seconds=220.0, seed=3)
    opened = openings(lines)
    assert [key for key, _ in opened] == ["pod-1:8000"]
    endpoints = tuple(Endpoint(url=f"http://{key}") for key in keys_of(5))
    report = replayed(Snapshot(version=1, services=(replace(service, endpoints=endpoints),)), lines)
    found = [(each.key, difference) for each in report.keys for difference in each.differences]
    ((key, difference),) = found
    assert (key, difference.verdict) == ("pod-1:8000", "same")
    assert abs(difference.shift_s) <= 1.0
    recorded, ours = difference.recorded, difference.replayed
    assert recorded is not None and ours is not None
    assert second_of(recorded.opened_ms) == pytest.approx(opened[0][1], abs=0.002)
    # Which of the two is there first depends on the order within the second.
    assert recorded.why == ours.why or {recorded.why, ours.why} == {"fast", "gray"}
    assert recorded.closed_ms is not None and ours.closed_ms is not None
    assert abs(recorded.closed_ms - ours.closed_ms) <= 1000


def test_a_real_sessions_breaker_opens_when_it_did() -> None:
    """One tenant whose every request fails, wherever it is sent, for half a minute."""
    service = Service(name="chat")
    lines = simulated(service, [], modifiers=[Modifier("tenant", 200.0, 230.0, 0.05)], seconds=180.0)
    endpoints = tuple(Endpoint(url=f"http://{key}") for key in keys_of(5))
    tried = Snapshot(version=1, services=(replace(service, endpoints=endpoints),))
    found = [(each.scope, each.key, way) for each in replayed(tried, lines).keys for way in each.differences]
    ((scope, key, difference),) = found
    assert (scope, key, difference.verdict) == ("session", TENANT, "same")
    assert abs(difference.shift_s) <= 1.0
    laxer = Breakers(session=SessionBreaker(consecutive=1000))
    (never,) = of(replayed(policy_of(service, laxer), lines), TENANT).differences
    assert never.verdict == "only_recorded"


@pytest.mark.parametrize("seed", [3, 4])
def test_several_real_sidecars_open_when_they_did(seed: int) -> None:
    """Three, each with breakers of its own and a third of the traffic: here they hear each other, and are sooner."""
    service = Service(name="chat", breakers=Breakers(session=SessionBreaker(mode="off")), shared=Shared(quorum=2))
    harm = Fault(Kind.ERRORS, (1,), 200.0, 240.0, share=0.8)
    lines = simulated(service, [harm], seconds=220.0, seed=seed, sidecars=3)
    opened = min(at for _, at in openings(lines))
    report = replayed(policy_of(service, service.breakers), lines)
    assert report.observers == ["pod-0", "pod-1", "pod-2"]
    first = of(report, "pod-1:8000").differences[0]
    assert first.replayed is not None
    assert 200.0 <= second_of(first.replayed.opened_ms) <= opened + 1.0
    assert {key.key for key in report.keys if key.differences} == {"pod-1:8000"}


def test_a_quiet_record_stays_quiet() -> None:
    service = Service(name="chat", breakers=Breakers(session=SessionBreaker(mode="off")))
    lines = simulated(service, [], seconds=180.0, seed=5)
    assert openings(lines) == []
    endpoints = tuple(Endpoint(url=f"http://{key}") for key in keys_of(5))
    report = replayed(Snapshot(version=1, services=(replace(service, endpoints=endpoints),)), lines)
    assert report.totals.replayed_openings == 0
    assert report.attempts > 10_000
    assert all(0.05 < (each.first_token_p50_s or 0) < 0.5 for each in report.keys)


def test_a_stricter_policy_finds_a_real_fault_sooner() -> None:
    fixed = NodeBreaker(consecutive=50, failure_ratio=0.9, min_requests=100, adaptive=False)
    service = Service(name="chat", breakers=Breakers(node=fixed, session=SessionBreaker(mode="off")))
    lines = simulated(service, [Fault(Kind.ERRORS, (1,), 200.0, 260.0, share=0.8)], seconds=180.0, seed=3)
    assert openings(lines) == []
    endpoints = tuple(Endpoint(url=f"http://{key}") for key in keys_of(5))
    tried = replace(service, endpoints=endpoints, breakers=Breakers(session=SessionBreaker(mode="off")))
    report = replayed(Snapshot(version=1, services=(tried,)), lines)
    difference = of(report, "pod-1:8000").differences[0]
    assert difference.verdict == "only_replayed"
    assert difference.replayed is not None
    assert 200.0 < second_of(difference.replayed.opened_ms) < 202.0
    assert difference.replayed.kept_away > 100
    assert difference.replayed.spared > 0.6 * difference.replayed.kept_away
    assert {key.key for key in report.keys if key.differences} == {"pod-1:8000"}
