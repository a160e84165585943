"""What an attempt tells, to detector and breaker in one: in the right order, once, and with the permit given back."""

from math import exp, inf, log
from typing import Literal

import pytest
from msgspec.structs import replace

from sidecar.core import evidence
from sidecar.core.breaker import Permit, State, Transition
from sidecar.core.detection import Counts
from sidecar.core.evidence import FULL_S
from sidecar.core.pool import Node
from sidecar.core.service import ServiceState
from sidecar.core.sketch import bucket_of
from sidecar.kernel.ids import EndpointKey, SessionId
from sidecar.kernel.outcome import DOCTRINE, Ending, Result
from sidecar.policy.schema import Adaptive, NodeBreaker, Seconds, ZoneDecay
from tests.core.build import fleet_of, permitted, service_of
from tests.core.detect import Answer, Pods, only, seen

S, F, I, O = Result.SUCCESS, Result.FAILURE, Result.IGNORED, Result.OVERLOADED  # noqa: E741
CLOSED, OPEN, HALF_OPEN = State.CLOSED, State.OPEN, State.HALF_OPEN


def plain() -> tuple[ServiceState, Node]:
    """An endpoint under the fixed rules alone."""
    rule = NodeBreaker(consecutive=3, failure_ratio=0.0, open_s=Seconds(10), min_closed_ratio=0.0, adaptive=False)
    _, service = fleet_of(service_of(2, rule))
    return service, next(iter(service.nodes.values()))


def test_without_a_detector_the_breaker_alone_hears() -> None:
    service, node = plain()
    permit = permitted(node.breaker, 0.0)
    assert evidence.expect(service, node, permit, "m", 100, None) is None
    for _ in range(2):
        assert evidence.ended(service, node, permit, None, Ending.SERVER_ERROR, F, 0.0, 0.0) is None
    moved = evidence.ended(service, node, permit, None, Ending.SERVER_ERROR, F, 0.0, 0.0)
    assert moved is not None and (moved.new, moved.why) == (OPEN, "consecutive")
    assert evidence.session_result(service, None, F) is F


def test_an_answer_without_a_first_token_is_timed_by_nobody_and_judged_all_the_same() -> None:
    pods = Pods(3).learnt()
    for _ in range(3):
        asked = pods.ask(0, model="")
        assert asked is not None
        assert (asked[1].late_s, asked[1].late_gap_s, asked[1].line) == (inf, inf, None)
        pods.first_token(0, asked[1], 1000.0)
        pods.end(0, *asked, Ending.SERVER_ERROR)
    assert pods.state() is OPEN


def test_what_is_expected_grows_with_prompt_and_load() -> None:
    pods = Pods(3)
    for second in range(120):
        for node in pods.nodes:
            node.in_flight = second % 20
        pods.second()
    for node in pods.nodes:
        node.in_flight = 4
    pods.tick()
    small, large = pods.ask(0, size_bytes=1000), pods.ask(0, size_bytes=16_000)
    pods.nodes[0].in_flight = 10
    busy = pods.ask(0, size_bytes=1000)
    assert small is not None and large is not None and busy is not None
    assert small[1].expected + 0.3 < large[1].expected
    assert small[1].expected < busy[1].expected
    assert small[1].late_s <= busy[1].late_s <= large[1].late_s


def test_nothing_is_late_before_the_least_time_of_the_policy() -> None:
    pods = Pods(3, Adaptive(late_min_s=Seconds(60), gap_min_s=Seconds(50))).learnt()
    asked = pods.ask(0)
    assert asked is not None
    assert (asked[1].late_s, asked[1].late_gap_s) == (60.0, 50.0)
    pods.first_token(0, asked[1], 59.0)
    assert not asked[1].bad


@pytest.mark.parametrize("ending", list(Ending))
def test_every_ending_gives_the_permit_back_and_counts_as_the_doctrine_says(ending: Ending) -> None:
    pods = Pods(3).learnt()
    results, bad = pods.detection.results, pods.detector().bad
    asked = pods.ask(0)
    assert asked is not None
    pods.end(0, *asked, ending)
    counted = DOCTRINE[ending].node in (S, F)
    assert pods.detection.results == results + counted
    assert pods.detector().bad == bad + (DOCTRINE[ending].node is F)


@pytest.mark.parametrize("ending", list(Ending))
def test_every_ending_of_a_probe_gives_its_place_back(ending: Ending) -> None:
    pods = Pods(3).learnt()
    for _ in range(3):
        pods.fail()
    breaker = pods.nodes[0].breaker
    pods.now = breaker.retry_at(pods.now)
    asked = pods.ask(0)
    assert asked is not None and asked[0].probe and breaker.probes_out == 1
    pods.end(0, *asked, ending)
    assert breaker.probes_out == 0
    assert breaker.state is (OPEN if DOCTRINE[ending].node is F else HALF_OPEN)
    assert breaker.can_probe(pods.now) is (breaker.state is HALF_OPEN)


def test_the_fixed_rules_are_asked_first_and_one_trip_is_one() -> None:
    pods = Pods(3, consecutive=3).learnt()
    for _ in range(3):
        pods.fail()
    [opened] = pods.opened()
    assert opened.why == "consecutive"


def test_a_trip_waits_as_the_detectors_numbers_say() -> None:
    pods = Pods(3, Adaptive(open_s=Seconds(4), open_max_s=Seconds(7))).learnt()
    for _ in range(3):
        pods.fail()
    breaker = pods.nodes[0].breaker
    assert breaker.retry_at(pods.now) == pods.now + 4.0
    pods.now += 4.0
    asked = pods.ask(0)
    assert asked is not None
    pods.end(0, *asked, Ending.SERVER_ERROR)
    assert breaker.retry_at(pods.now) == pods.now + 7.0


def test_what_a_health_check_found_opens_and_waits_as_any_trip() -> None:
    service, node = plain()
    moved = evidence.distrust(service, node, "stalled", "it hangs", 5.0)
    assert moved is not None and (moved.new, moved.why, moved.evidence, moved.wait_s) == (
        OPEN,
        "stalled",
        "it hangs",
        10,
    )
    assert evidence.distrust(service, node, "stalled", "it hangs", 6.0) is None
    pods = Pods(3).learnt()
    service, node = pods.service, pods.nodes[0]
    moved = evidence.distrust(service, node, "canary", "no token", pods.now)
    assert moved is not None and (moved.why, moved.wait_s) == ("canary", Adaptive().open_s)
    assert service.detection is not None


def test_what_a_health_check_found_does_not_pass_the_floor() -> None:
    _, service = fleet_of(service_of(2, NodeBreaker(min_closed_ratio=0.5)))
    one, other = service.nodes.values()
    assert evidence.distrust(service, one, "stalled", "it hangs", 0.0) is not None
    assert evidence.distrust(service, other, "stalled", "it hangs", 0.0) is None
    assert (other.breaker.state, other.breaker.held_closed) == (CLOSED, 1)


def test_silences_of_good_answers_are_learnt_and_of_failed_ones_not() -> None:
    pods = Pods(3).learnt()
    asked = pods.ask(0)
    assert asked is not None and asked[1].line is not None
    line, before = asked[1].line, asked[1].line.late_gap_s
    pods.end(0, *asked, Ending.TOKEN_GAP_TIMEOUT, 600.0)
    assert line.late_gap_s == before
    for _ in range(200):
        pods.serve(1, gap_s=4.0)
    assert line.late_gap_s > before


# --- overload -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", sorted(evidence.DEADLINES))
def test_in_overload_a_deadline_is_excused_by_both(ending: Ending) -> None:
    pods = Pods(3, consecutive=3).learnt()
    pods.detection.normal.overload = True
    for _ in range(20):
        pods.fail(0, ending)
    assert pods.state() is CLOSED and pods.detector().bad == 0
    pods.detection.normal.overload = False
    for _ in range(3):
        pods.fail(0, ending)
    assert pods.state() is OPEN


def test_in_overload_an_error_is_an_error() -> None:
    pods = Pods(3, consecutive=3).learnt()
    pods.detection.normal.overload = True
    for _ in range(3):
        pods.fail(0)
    assert pods.state() is OPEN


@pytest.mark.parametrize("why", ["overload", "panic", "background"])
def test_while_much_is_bad_everywhere_no_session_is_to_blame(why: Literal["overload", "panic", "background"]) -> None:
    pods = Pods(3).learnt()
    assert [evidence.session_result(pods.service, pods.nodes[0], each) for each in (S, F, I, O)] == [S, F, I, O]
    if why == "background":
        pods.detection.normal.background = 0.2
    else:
        setattr(pods.detection.normal, why, True)
    assert [evidence.session_result(pods.service, pods.nodes[0], each) for each in (S, F, I, O)] == [S, I, I, O]


# --- probes ---------------------------------------------------------------------------------------------------------


def probing(answer: Answer) -> tuple[Pods, Permit, object]:
    pods = Pods(4).learnt()
    pods.until_open(only(0, answer), 60)
    pods.now = pods.nodes[0].breaker.retry_at(pods.now)
    asked = pods.ask(0)
    assert asked is not None and asked[0].probe
    return pods, *asked


@pytest.mark.parametrize("silent", [False, True])
def test_a_late_probe_fails_at_once_and_only_once(silent: bool) -> None:
    pods = Pods(4).learnt()
    for _ in range(3):
        pods.fail()
    pods.now = pods.nodes[0].breaker.retry_at(pods.now)
    asked = pods.ask(0)
    assert asked is not None
    pods.late(0, asked[1], silent=silent)
    assert pods.moved[-1].why == "probe_failed"
    assert pods.moved[-1].evidence.endswith("silent" if silent else "late")
    moved = len(pods.moved)
    pods.late(0, asked[1], silent=silent)
    pods.first_token(0, asked[1], 0.1)
    pods.end(0, *asked)
    assert len(pods.moved) == moved and pods.state() is OPEN


def test_who_said_that_it_is_full_may_be_late_for_a_while_and_may_not_fail() -> None:
    """T26: an engine that sheds is pressed, and is to be left alone, not opened for being slow."""
    slow = only(0, Answer(slower=8.0))
    pods = Pods(4).learnt()
    for _ in range(30):
        pods.service.overloaded(pods.nodes[0], 1.0, pods.now)
        asked = pods.ask(0)
        assert asked is not None
        pods.late(0, asked[1])
        pods.end(0, *asked)
        pods.second(slow)
    assert pods.state() is CLOSED and not pods.opened()
    asked = pods.ask(0)
    assert asked is not None
    pods.late(0, asked[1], silent=True)  # within a stream: that is no queue
    assert asked[1].bad
    pods.now += 1.0 + FULL_S
    assert pods.until_open(slow, 60) > 0.0


def test_who_said_that_it_is_full_and_fails_is_opened() -> None:
    pods = Pods(4).learnt()
    for _ in range(20):
        pods.service.overloaded(pods.nodes[0], 1.0, pods.now)
        pods.fail()
        pods.second(only(0, Answer(failing=1.0)))
    assert pods.state() is OPEN


def test_probes_that_are_slow_together_do_not_close_it() -> None:
    """Each is under the threshold of what is late, all of them are three times what is usual."""
    pods, permit, _ = probing(Answer(slower=4.0))
    pods.end(0, permit, None, Ending.CLIENT_LEFT)
    for _ in range(40):
        pods.second(only(0, Answer(slower=2.7)))
        assert pods.state() is not CLOSED


def test_a_permit_of_nobody_tells_nothing() -> None:
    pods = Pods(3).learnt()
    node = pods.nodes[0]
    outsider = Permit(-1)
    expectation = evidence.expect(pods.service, node, outsider, "m", 100, SessionId("s"))
    assert expectation is not None
    results = pods.detection.results
    for _ in range(20):
        pods.late(0, expectation)
        pods.first_token(0, expectation, 100.0)
        pods.end(0, outsider, expectation, Ending.SERVER_ERROR)
    assert pods.state() is CLOSED and pods.detector().bad == 0 and pods.detection.results == results


# --- the other sidecars ---------------------------------------------------------------------------------------------

LASTING_S = 4.0  # longer than slowness has to last; what others saw is not known to be anything else


def absorbed(taker: Pods, seen: list[Counts]) -> list[Transition]:
    moved = evidence.absorb(taker.service, seen, taker.now)
    taker.moved.extend(moved)
    return moved


def sidecars(count: int = 2) -> list[Pods]:
    """Sidecars of one service, which have said all that they learnt."""
    made = [Pods(3, seed=number).learnt() for number in range(count)]
    for each in made:
        evidence.share(each.service)
    return made


def test_failures_that_one_saw_open_the_breaker_of_one_that_saw_nothing_and_it_says_so() -> None:
    one, other = sidecars()
    for _ in range(3):
        one.fail(1)
    [moved] = absorbed(other, evidence.share(one.service))
    assert (moved.key, moved.old, moved.new, moved.why) == (other.nodes[1].key, CLOSED, OPEN, "fast")
    assert "(3 failed, 3 of them seen by other sidecars)" in moved.evidence
    assert [other.state(pod) for pod in range(3)] == [CLOSED, OPEN, CLOSED]


def test_slowness_that_others_saw_has_to_last_as_ours_has() -> None:
    (pods,) = sidecars(1)
    slow = Counts(pods.nodes[1].key, 0, 0, 5, 0.0, 0, 0.0)
    assert absorbed(pods, [slow]) == [], "a moment's word may be of one event"
    pods.now += LASTING_S
    [moved] = absorbed(pods, [slow])
    assert "late" in moved.evidence and "seen by other sidecars" in moved.evidence


def test_what_neither_could_tell_alone_both_can_tell_together() -> None:
    one, other = sidecars()
    for each in (one, other):
        for _ in range(2):
            each.fail(0)
        assert each.state() is CLOSED
    [moved] = absorbed(other, evidence.share(one.service))
    assert moved.new is OPEN
    assert "3 failed, 1 of them seen by other sidecars" in moved.evidence
    assert absorbed(one, evidence.share(other.service))[0].new is OPEN


def test_some_that_are_a_little_bad_everywhere_open_as_gray() -> None:
    """Each of eight sees one answer in twelve fail; it takes all of them to know soon."""
    few = sidecars(8)
    taker = few[0]
    for _ in range(20):
        for each in few:
            each.now += 1.0
            each.fail(2)
            for _ in range(11):
                each.serve(2)
        for each in few[1:]:
            absorbed(taker, evidence.share(each.service))
    (opened, *_) = taker.opened(2)
    assert opened.why in ("gray", "fast")
    assert "seen by other sidecars" in opened.evidence
    assert not taker.opened(0) and not taker.opened(1)


def test_good_answers_of_others_speak_for_an_endpoint() -> None:
    one, other = sidecars()
    for _ in range(2):
        other.fail(0)
    against = other.detector().fast, other.detector().gray
    for _ in range(50):
        one.serve(0)
    assert absorbed(other, evidence.share(one.service)) == []
    assert other.detector().fast < against[0] and other.detector().gray < against[1]


def test_a_healthy_fleet_s_counts_open_nothing() -> None:
    few = sidecars(4)
    for _ in range(30):
        for each in few:
            each.second()
        said = [evidence.share(each.service) for each in few]
        for number, each in enumerate(few):
            for sender, told in enumerate(said):
                if sender != number:
                    assert absorbed(each, told) == []


def test_what_was_heard_is_not_told_again() -> None:
    one, other = sidecars()
    for _ in range(2):
        one.fail(0)
    absorbed(other, evidence.share(one.service))
    assert other.detector().bad == 2
    assert evidence.share(other.service) == []
    assert evidence.share(one.service) == [], "nor what was said"


def test_all_that_was_seen_is_told_of_each_endpoint_on_its_own() -> None:
    one, _ = sidecars()
    for _ in range(7):
        one.serve(0)
    for _ in range(2):
        one.fail(1)
    told = {counts.endpoint: (counts.good, counts.errors + counts.slow) for counts in evidence.share(one.service)}
    assert told == {one.nodes[0].key: (7, 0), one.nodes[1].key: (0, 2)}


def test_an_endpoint_that_only_others_know_is_left_out_and_the_rest_is_taken() -> None:
    (pods,) = sidecars(1)
    results = pods.detection.results
    nobody, known = EndpointKey("nobody:80"), pods.nodes[1].key
    assert absorbed(pods, [seen(nobody, 0, 5, 0.0), seen(known, 0, 2, 0.0)]) == []
    pods.now += LASTING_S
    moved = absorbed(pods, [seen(nobody, 5, 50, 9.0), seen(known, 0, 5, 0.0), seen(nobody, 0, 5, 0.0)])
    assert [each.key for each in moved] == [known]
    assert pods.detection.results == results + 7
    assert nobody not in pods.service.nodes


def test_a_service_without_a_detector_says_nothing_and_hears_nothing() -> None:
    service, node = plain()
    for _ in range(2):
        permit = permitted(node.breaker, 0.0)
        evidence.ended(service, node, permit, None, Ending.SERVER_ERROR, F, 0.0, 0.0)
    assert evidence.share(service) == []
    assert evidence.absorb(service, [seen(node.key, 0, 1000, 1000.0)], 0.0) == []
    assert node.breaker.state is CLOSED


def test_a_breaker_that_is_open_hears_nothing_until_it_is_closed_again() -> None:
    (pods,) = sidecars(1)
    for _ in range(3):
        pods.fail(0)
    assert pods.state() is OPEN
    results, generation = pods.detection.results, pods.nodes[0].breaker.generation
    assert absorbed(pods, [seen(pods.nodes[0].key, 10, 1000, 100.0)]) == []
    pods.now = pods.nodes[0].breaker.retry_at(pods.now)
    asked = pods.ask(0)
    assert asked is not None and pods.state() is HALF_OPEN
    assert absorbed(pods, [seen(pods.nodes[0].key, 10, 1000, 100.0)]) == []
    assert pods.detection.results == results
    assert pods.nodes[0].breaker.generation == generation + 1, "its probe is as good as before"
    pods.end(0, *asked)


def test_the_same_endpoint_twice_in_what_is_heard_opens_once() -> None:
    (pods,) = sidecars(1)
    counts = seen(pods.nodes[0].key, 0, 5, 0.0)
    assert len(absorbed(pods, [counts, counts, counts])) == 1
    assert absorbed(pods, [counts]) == []


def test_what_is_heard_twice_counts_twice() -> None:
    """Counts are sums without a number of their own: whoever delivers them does so once."""
    (pods,) = sidecars(1)
    counts = seen(pods.nodes[0].key, 0, 2, 0.0)
    assert absorbed(pods, [counts]) == []
    pods.now += LASTING_S
    assert len(absorbed(pods, [counts])) == 1


def test_of_nothing_nothing_is_said_and_nothing_follows() -> None:
    fresh = Pods(3)
    assert evidence.share(fresh.service) == []
    assert evidence.absorb(fresh.service, [], 0.0) == []
    (pods,) = sidecars(1)
    results = pods.detection.results
    assert absorbed(pods, [seen(node.key, 0, 0, 0.0) for node in pods.nodes]) == []
    assert (pods.detection.results, pods.detector().bad, pods.detector().location) == (results, 0, 0.0)


def test_who_knows_too_little_opens_nothing_by_hearsay() -> None:
    fresh = Pods(3)
    assert absorbed(fresh, [seen(fresh.nodes[0].key, 0, 16, 1000.0)]) == []
    assert fresh.state() is CLOSED


def test_first_tokens_that_others_timed_open_for_location_where_ours_are_not_slow_everywhere() -> None:
    (pods,) = sidecars(1)
    for _ in range(25):
        pods.second()
    assert absorbed(pods, [seen(pods.nodes[0].key, 0, 0, 15.0)]) == []
    pods.now += LASTING_S
    [moved] = absorbed(pods, [seen(pods.nodes[0].key, 0, 0, 15.0)])
    assert (moved.key, moved.why) == (pods.nodes[0].key, "location")


def test_a_floor_holds_against_hearsay_too() -> None:
    pods = Pods(3, floor=1.0).learnt()
    assert absorbed(pods, [seen(node.key, 0, 5, 0.0) for node in pods.nodes]) == []
    assert [pods.state(pod) for pod in range(3)] == [CLOSED] * 3


def test_what_an_endpoint_explains_is_not_charged_to_a_session() -> None:
    pods = Pods(4).learnt()
    well, sick = pods.nodes[0], pods.nodes[1]
    for number in range(30):
        pods.serve(1) if number % 2 else pods.fail(1, session=f"s{number}")
    assert evidence.session_result(pods.service, sick, F) is I
    assert evidence.session_result(pods.service, well, F) is F
    assert evidence.session_result(pods.service, None, F) is F


def test_a_session_that_fails_everything_is_not_excused_by_what_it_did_itself() -> None:
    pods = Pods(4).learnt()
    for _ in range(10):
        pods.fail(0, session="poisoned")
        for _ in range(2):
            pods.serve(0)
    assert evidence.session_result(pods.service, pods.nodes[0], F) is F


# Zones.


def zoned(adaptive: bool = True, zone_decay: ZoneDecay | None = None) -> ServiceState:
    rule = NodeBreaker(min_closed_ratio=0.0, adaptive=adaptive)
    one = replace(service_of(2, rule), zone_decay=zone_decay)
    return fleet_of(replace(one, endpoints=tuple(replace(each, zone="a") for each in one.endpoints)))[1]


def test_first_tokens_are_counted_by_zone_where_the_policy_asks_for_it() -> None:
    service = zoned(zone_decay=ZoneDecay())
    node = next(iter(service.nodes.values()))
    evidence.zone_token(service, node, None, 0.5)
    evidence.zone_token(service, node, None, 0.5)
    assert service.zone_seen is not None
    assert service.zone_seen.take() == {"a": ({bucket_of(0.5): 2}, 0, 0)}
    silent = zoned()
    assert silent.zone_seen is None
    evidence.zone_token(silent, node, None, 0.5)


def test_a_zone_is_told_how_much_longer_it_took_than_prompt_and_load_explain() -> None:
    pods = Pods(3).learnt()
    asked = pods.ask(0)
    assert asked is not None and asked[1].line is not None and asked[1].line.ready
    service = zoned(zone_decay=ZoneDecay())
    node = next(iter(service.nodes.values()))
    evidence.zone_token(service, node, asked[1], 2.0 * exp(asked[1].expected))
    assert service.zone_seen is not None
    ((_, timed, left),) = service.zone_seen.take().values()
    assert timed == 1 and left == pytest.approx(1000 * log(2.0), abs=1)
