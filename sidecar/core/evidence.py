"""What an attempt tells of its endpoint, from its start to its end: detector and breaker in one place.

Whoever forwards calls `expect` before, then `first_token`, `late` and `ended` as they happen, `zone_token` where zones
are watched, and hands the transitions on. `ended` gives the permit back and must come once for every permit; the others
may never come. An attempt that began before its endpoint left, or became one of another version, tells the detector
nothing: that one is no more.
"""

from typing import Final

from sidecar.core.breaker import Permit, Transition
from sidecar.core.detection import LATE, SILENT, Counts, Detection, Trip
from sidecar.core.detector import Expectation
from sidecar.core.latency import log_s
from sidecar.core.pool import Node
from sidecar.core.service import ServiceState
from sidecar.core.sketch import bucket_of
from sidecar.kernel.ids import SessionId
from sidecar.kernel.outcome import DOCTRINE, Ending, Result
from sidecar.policy.schema import Adaptive, Seconds

DEADLINES: Final = frozenset({Ending.HEAD_TIMEOUT, Ending.TTFT_TIMEOUT, Ending.TOKEN_GAP_TIMEOUT})
"""How an attempt ends that took too long: of an overloaded fleet no evidence against one endpoint."""

CUT: Final = frozenset({Ending.HEAD_TIMEOUT, Ending.TTFT_TIMEOUT, Ending.LATE})
"""How an attempt ends whose first token we no longer wait for: it would have taken longer still."""

FULL_S: Final = 10.0
"""After an endpoint's Retry-After its first tokens may be late: it said that it is full, and that is no fault."""

_AT_ONCE: Final = Seconds(0.001)
"""To the full share: the fixed rules know no ramp."""

_FAILURE: Final = Result.FAILURE
_IGNORED: Final = Result.IGNORED
_SUCCESS: Final = Result.SUCCESS


def expect(
    service: ServiceState, node: Node, permit: Permit, model: str, size_bytes: int, session: SessionId | None
) -> Expectation | None:
    """What an attempt on `node` should take; None where the fixed rules alone judge.

    `model` "": an answer without a first token to time. `size_bytes` of the body stands for the prompt's length.
    """
    detection, detector = service.detection, node.detector
    if detection is None or detector is None:
        return None
    return detection.expect(detector, permit, model, size_bytes, node.in_flight, session)


def first_token(
    service: ServiceState, node: Node, expectation: Expectation, took_s: float, now: float
) -> Transition | None:
    """The first token came, `took_s` after the request was sent."""
    detection = service.detection
    if detection is None or expectation.detector is not node.detector or now < node.overload_until + FULL_S:
        return None
    trip = detection.first_token(expectation, took_s, now)
    return None if trip is None else _trip(detection, node, trip, now)


def zone_token(service: ServiceState, node: Node, expectation: Expectation | None, took_s: float) -> None:
    """The first token came, or had not come after `took_s`: what that says of the endpoint's zone.

    For services whose `zone_seen` is not None. `expectation` None: nobody knows what it should have taken.
    """
    seen = service.zone_seen
    if seen is None:
        return
    line = None if expectation is None else expectation.line
    if expectation is None or line is None or not line.ready:
        seen.add(node.endpoint.zone, bucket_of(took_s))
    else:
        seen.add_timed(node.endpoint.zone, bucket_of(took_s), log_s(took_s) - expectation.expected)


def late(service: ServiceState, node: Node, expectation: Expectation, silent: bool, now: float) -> Transition | None:
    """No token came in time: no first one, or (`silent`) no next one."""
    detection = service.detection
    if detection is None or (not silent and now < node.overload_until + FULL_S):
        return None
    permit = expectation.permit
    if permit.probe and detection.lasting(expectation.detector, now):
        return None
    if permit.probe:
        expectation.bad = True
        return node.breaker.record(permit, _FAILURE, now, SILENT if silent else LATE)
    if expectation.detector is not node.detector:
        return None
    trip = detection.late(expectation, SILENT if silent else LATE, now)
    return None if trip is None else _trip(detection, node, trip, now)


def ended(
    service: ServiceState,
    node: Node,
    permit: Permit,
    expectation: Expectation | None,
    ending: Ending,
    result: Result,
    max_gap_s: float,
    now: float,
) -> Transition | None:
    """The attempt ended, with this result for its endpoint: gives the permit back."""
    detection = service.detection
    if detection is None or expectation is None or expectation.detector is not node.detector:
        return node.breaker.record(permit, result, now, ending)
    if permit.probe:
        proved = detection.verdict(expectation, result, now)
        return node.breaker.record(permit, proved, now, ending if proved is result else LATE)
    waited = ending in DEADLINES
    excused = waited and result is _FAILURE and detection.normal.overload
    moved = node.breaker.record(permit, _IGNORED if excused else result, now, ending)
    if moved is not None or (result is not _SUCCESS and result is not _FAILURE):
        return moved
    failed = result is _FAILURE
    if not failed and max_gap_s > 0.0 and expectation.line is not None:
        expectation.line.gap(max_gap_s)
    trip = detection.ended(expectation, failed, waited, DOCTRINE[ending].session is _FAILURE, now)
    return None if trip is None else _trip(detection, node, trip, now)


def session_result(service: ServiceState, node: Node | None, result: Result) -> Result:
    """What a request's result says of its session: nothing bad while much is bad everywhere, or its endpoint fails.

    What the endpoint explains says nothing about the session; one that takes endpoints down itself is known by its
    prompt, and by those that it failed on before they were.
    """
    detection = service.detection
    if result is not _FAILURE or detection is None:
        return result
    explained = node is not None and (node.breaker.failing or (node.detector is not None and node.detector.failing))
    return _IGNORED if explained or detection.normal.excuses else result


def share(service: ServiceState) -> list[Counts]:
    """What this sidecar saw of the service's endpoints since the last call, for the others."""
    return [] if service.detection is None else service.detection.share()


def absorb(service: ServiceState, seen: list[Counts], now: float) -> list[Transition]:
    """Adds what another sidecar saw; what it knows and we do not is left out."""
    moved: list[Transition] = []
    detection = service.detection
    if detection is None:
        return moved
    for counts in seen:
        node = service.nodes.get(counts.endpoint)
        if node is None or node.detector is None:
            continue
        trip = detection.absorb(node.detector, counts, now)
        transition = None if trip is None else _trip(detection, node, trip, now)
        if transition is not None:
            moved.append(transition)
    return moved


def distrust(service: ServiceState, node: Node, why: str, said: str, now: float) -> Transition | None:
    """A health check has evidence that the engine does not serve, and says so in words: opens, where the guards allow.

    It waits and proves itself as after any trip of the rule's or the detector's.
    """
    detection = service.detection
    if detection is not None:
        return node.breaker.trip(why, said, 0, detection.rule, now)
    rule = service.policy.breakers.node
    waits = Adaptive(open_s=rule.open_s, open_max_s=rule.open_max_s, ramp_s=_AT_ONCE)
    return node.breaker.trip(why, said, 0, waits, now)


def _trip(detection: Detection, node: Node, trip: Trip, now: float) -> Transition | None:
    return node.breaker.trip(trip.why, trip.evidence, trip.proofs, detection.rule, now)
