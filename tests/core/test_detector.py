"""One endpoint's state: whom it was charged by, what a move of its breaker leaves, and how little it takes."""

import sys
import tracemalloc
from math import inf

import pytest

from sidecar.core.breaker import Breaker, Scope, State
from sidecar.core.detector import HEAD_START, MINUTE_S, REMEMBERED, SESSION_CHARGES, SESSION_S, Detector, Expectation
from sidecar.kernel.ids import SessionId
from tests.core.build import RULE, permitted

THRESHOLD = 14.0
S, T = SessionId("s"), SessionId("t")


def detector_of() -> Detector:
    return Detector(Breaker(Scope.NODE, "a:80", "chat", RULE, 0.0, lease_s=60.0), "v1")


def charge(detector: Detector, at: float, by: SessionId | None) -> None:
    detector.remember(at, by)


@pytest.mark.parametrize(
    ("charges", "now", "charged"),
    [
        pytest.param([], 0.0, False, id="none"),
        pytest.param([(0.0, S)] * (SESSION_CHARGES - 1), 0.0, False, id="one too few"),
        pytest.param([(0.0, S)] * SESSION_CHARGES, 0.0, True, id="enough"),
        pytest.param([(0.0, S)] * SESSION_CHARGES, SESSION_S - 0.1, True, id="and for a while"),
        pytest.param([(0.0, S)] * SESSION_CHARGES, SESSION_S, False, id="and no longer"),
        pytest.param([(0.0, T)] * REMEMBERED, 0.0, False, id="another's"),
        pytest.param([(0.0, None)] * REMEMBERED, 0.0, False, id="nobody's"),
        pytest.param([(0.0, T), (0.0, S)] * SESSION_CHARGES, 0.0, True, id="among others"),
    ],
)
def test_a_session_charges_so_often(charges: list[tuple[float, SessionId | None]], now: float, charged: bool) -> None:
    detector = detector_of()
    for at, by in charges:
        charge(detector, at, by)
    assert detector.charged(S, now) is charged


def test_who_has_no_session_is_never_charged_out() -> None:
    detector = detector_of()
    for _ in range(REMEMBERED):
        charge(detector, 0.0, None)
    assert not detector.charged(None, 0.0)


def test_a_minute_is_a_minute_and_the_list_is_short() -> None:
    detector = detector_of()
    for second in range(0, 300, 10):
        charge(detector, float(second), None)
    assert detector.in_a_minute(290.0) == MINUTE_S / 10
    for _ in range(1000):
        charge(detector, 290.0, S)
    assert detector.in_a_minute(290.0) == len(detector.bad_by) == REMEMBERED


def dirty(detector: Detector) -> None:
    detector.fast = detector.gray = detector.location = 5.0
    detector.n, detector.bad, detector.errors, detector.late, detector.gaps = 9, 5, 1, 2, 2
    detector.location_n, detector.location_sum, detector.trial = 3, 1.0, 4.0
    detector.recent_n = detector.recent_bad = detector.panic_n = detector.panic_bad = 7.0
    detector.offset, detector.ticks = 0.25, 12
    charge(detector, 1.0, S)


def test_nothing_begins_anew_while_the_breaker_stays() -> None:
    detector = detector_of()
    dirty(detector)
    detector.begin(THRESHOLD)
    assert (detector.fast, detector.bad, detector.recent_n) == (5.0, 5, 7.0)


def test_with_a_move_of_the_breaker_the_evidence_is_gone_and_its_nature_stays() -> None:
    detector = detector_of()
    dirty(detector)
    detector.breaker.force("open", 1.0, "ann")
    detector.begin(THRESHOLD)
    assert (detector.fast, detector.gray, detector.location, detector.trial) == (0.0, 0.0, 0.0, 0.0)
    assert (detector.n, detector.bad, detector.errors, detector.late, detector.gaps) == (0, 0, 0, 0, 0)
    assert (detector.recent_n, detector.recent_bad, detector.panic_n, detector.panic_bad) == (0.0, 0.0, 0.0, 0.0)
    assert not detector.bad_at and not detector.bad_by
    assert (detector.offset, detector.ticks) == (0.25, 12)


@pytest.mark.parametrize("tripped", ["", "fast", "gray", "location"])
def test_a_recovery_of_what_the_detector_opened_leaves_a_head_start_once(tripped: str) -> None:
    detector = detector_of()
    detector.tripped = tripped
    detector.breaker.force("open", 1.0, "ann")
    detector.begin(THRESHOLD)
    assert (detector.fast, detector.tripped) == (0.0, tripped), "not before it closes"
    detector.breaker.force("close", 2.0, "ann")
    detector.begin(THRESHOLD)
    assert detector.fast == detector.gray == (HEAD_START * THRESHOLD if tripped else 0.0)
    assert detector.tripped == ""
    for action in ("open", "close"):
        detector.breaker.force("open" if action == "open" else "close", 3.0, "ann")
        detector.begin(THRESHOLD)
    assert detector.fast == 0.0 and detector.breaker.state is State.CLOSED


def test_an_endpoint_takes_little_memory() -> None:
    """16 KB at most, breaker and all; a tenth of it is taken."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        detectors = [detector_of() for _ in range(200)]
        for number, detector in enumerate(detectors):
            dirty(detector)
            for second in range(2 * REMEMBERED):
                charge(detector, 1000.0 + second + number, SessionId(f"{number:08x}-4b6e-4c1d-9d3e-{second:012x}"))
        each = (tracemalloc.get_traced_memory()[0] - before) / len(detectors)
    finally:
        tracemalloc.stop()
    assert each <= 16 * 1024


def test_an_attempt_takes_little_memory() -> None:
    detector = detector_of()
    permit = permitted(detector.breaker, 0.0)
    expectation = Expectation(detector, permit, "m", None, 0.0, 0.0, 0.0, 0, inf, inf, None)
    assert sys.getsizeof(expectation) <= 200
    assert not expectation.bad
