"""What is remembered of a service: its nodes, sessions and kinds of request, floors, zones and what it counted."""

import math
from typing import Literal

import msgspec
import pytest

from sidecar.core import evidence
from sidecar.core.breaker import FRESH, Denied, Permit, Scope, State
from sidecar.core.detection import Detection
from sidecar.core.fleet import Fleet
from sidecar.core.service import (
    MAX_COUNTED,
    MAX_REQUEST_BREAKERS,
    ServiceState,
    adaptive,
)
from sidecar.kernel.ids import EndpointKey, ServiceName, SessionId
from sidecar.kernel.outcome import Ending, Result
from sidecar.policy.schema import (
    Adaptive,
    Admission,
    Breakers,
    Endpoint,
    Mode,
    Overload,
    QosPolicy,
    Seconds,
    Service,
    ZoneDecay,
)
from tests.core.build import (
    RULE,
    SESSION_RULE,
    end,
    fleet_of,
    permitted,
    record,
    service_of,
    snapshot_of,
    trip,
    with_sessions,
)

S, F, I, O = Result.SUCCESS, Result.FAILURE, Result.IGNORED, Result.OVERLOADED  # noqa: E741
S1 = SessionId("s1")


# --- services and models --------------------------------------------------------------------------------------------


def keys(service: ServiceState, model: str, version: str | None = None) -> list[str]:
    return [node.key for node in service.pool(model, version).nodes]  # type: ignore[arg-type]


def test_a_node_serves_what_policy_and_engine_both_have() -> None:
    _, service = fleet_of(
        Service(
            name="chat",
            endpoints=(
                Endpoint(url="http://a:80", models=("base", "sql-*")),
                Endpoint(url="http://b:80"),
                Endpoint(url="http://c:80"),
            ),
        )
    )
    service.nodes[EndpointKey("a:80")].models = frozenset({"base", "sql-lora", "other"})
    service.nodes[EndpointKey("b:80")].models = frozenset({"base"})
    assert keys(service, "base") == ["a:80", "b:80", "c:80"]
    assert keys(service, "sql-lora") == ["a:80", "c:80"], "T20: b would answer with its base model"
    assert keys(service, "other") == ["c:80"]
    assert keys(service, "") == ["a:80", "b:80", "c:80"]
    service.nodes[EndpointKey("c:80")].models = frozenset({"base"})
    assert keys(service, "other") == []
    assert service.pool("other", None).unknown_model
    service.nodes[EndpointKey("b:80")].models = frozenset({"base", "other"})
    assert keys(service, "other") == ["b:80"]
    service.nodes[EndpointKey("c:80")].models = None
    assert keys(service, "other") == ["b:80", "c:80"]


def test_no_node_at_all_is_not_an_unknown_model() -> None:
    _, service = fleet_of(service_of(2))
    assert not service.pool("m", None).unknown_model
    assert keys(service, "m", "v9") == []
    assert not service.pool("m", "v9").unknown_model  # type: ignore[arg-type]


def test_names_that_rule_nobody_out_share_one_pool() -> None:
    _, service = fleet_of(service_of(3))
    assert service.pool("made-up-1", None) is service.pool("made-up-2", None)


def test_the_same_report_again_keeps_the_pools() -> None:
    _, service = fleet_of(service_of(3))
    node = service.nodes[EndpointKey("h1:80")]
    node.models = frozenset({"m"})
    pool = service.pool("m", None)
    node.models = frozenset({"m"})
    assert service.pool("m", None) is pool


# --- reloads --------------------------------------------------------------------------------------------------------


def test_overload_waits_as_asked_capped_and_the_later_wins() -> None:
    overload = Overload(retry_after_default_s=Seconds(2), retry_after_cap_s=Seconds(60))
    _, service = fleet_of(msgspec.structs.replace(service_of(1), overload=overload))
    node = service.nodes[EndpointKey("h1:80")]
    ends = []
    for asked in (None, 1.0, 30.0, 5.0, 3600.0, 0.0):
        service.overloaded(node, asked, 100.0)
        ends.append(node.overload_until)
    assert ends == [102.0, 102.0, 130.0, 130.0, 160.0, 160.0]


# --- sessions -------------------------------------------------------------------------------------------------------


def test_a_session_that_never_fails_has_no_breaker() -> None:
    _, service = fleet_of(with_sessions())
    session = service.session(S1, 0.0)
    for result in (S, I, O, S):
        assert end(service, session, result, 0.0) is FRESH
    assert session.breaker is None


def test_a_session_that_lived_its_failures_down_loses_its_breaker() -> None:
    _, service = fleet_of(with_sessions())
    session = service.session(S1, 0.0)
    had = []
    for result in (F, S, F, F):
        end(service, session, result, 0.0)
        had.append((session.breaker is not None, len(service._session_breakers)))
    assert had == [(True, 1), (False, 0), (True, 1), (True, 1)]
    assert isinstance(service.admit_session(session, 0.0), Permit)


def test_a_permit_of_before_the_breaker_counts_in_it() -> None:
    _, service = fleet_of(with_sessions())
    session = service.session(S1, 0.0)
    permits = [service.admit_session(session, 0.0) for _ in range(3)]
    for permit in permits:
        assert isinstance(permit, Permit)
        service.record_session(session, permit, F, 0.0, "x")
    assert session.breaker is not None and session.breaker.state is State.OPEN


def test_a_poisonous_session_is_refused_alone_probes_once_and_closes_again() -> None:
    """T27: context-length errors of one session; another session and the node are untouched."""
    _, service = fleet_of(with_sessions())
    s1, s2 = service.session(S1, 0.0), service.session(SessionId("s2"), 0.0)
    node = service.nodes[EndpointKey("h1:80")]
    for _ in range(3):
        end(service, s1, F, 0.0)
        record(node.breaker, I, 0.0)
    for _ in range(10):
        assert isinstance(end(service, s1, F, 1.0), Denied)
        assert end(service, s2, S, 1.0) is FRESH
        record(node.breaker, S, 1.0)
    assert service.admit_session(s1, 1.0) == Denied(30.0)
    assert node.breaker.state is State.CLOSED
    probes = [service.admit_session(s1, 30.0) for _ in range(10)]
    lent = [p for p in probes if isinstance(p, Permit)]
    assert len(lent) == 1
    found = service.record_session(s1, lent[0], S, 31.0)
    assert found is not None and (found.scope, found.key, found.new) == (Scope.SESSION, "s1", State.CLOSED)
    assert isinstance(end(service, s1, S, 31.0), Permit)
    assert s1.breaker is not None, "it tripped once: its next wait is longer"


def test_sessions_are_bounded_and_the_least_used_go_first() -> None:
    """T27: 100k ids in a minute."""
    _, service = fleet_of(with_sessions())
    kept = service.session(S1, 0.0)
    for number in range(5000):
        made = service.session(SessionId(f"n{number}"), number / 100)
        end(service, made, F, number / 100)
        assert service.session(S1, number / 100) is kept
        assert len(service.sessions) <= 100
        assert len(service._session_breakers) <= 100
    assert SessionId("n0") not in service.sessions and SessionId("n4999") in service.sessions


def test_idle_sessions_are_forgotten() -> None:
    _, service = fleet_of(with_sessions())
    old = [service.session(SessionId(f"old{number}"), 0.0) for number in range(50)]
    end(service, old[0], F, 0.0)
    for number in range(25):
        service.session(SessionId(f"new{number}"), 601.0)
    assert len(service.sessions) == 25
    assert not service._session_breakers
    assert service.session(old[0].id, 601.0) is not old[0]


def test_results_of_forgotten_sessions_leave_nothing_behind() -> None:
    _, service = fleet_of(with_sessions(msgspec.structs.replace(SESSION_RULE, max_sessions=1)))
    gone = service.session(S1, 0.0)
    permit = service.admit_session(gone, 0.0)
    assert isinstance(permit, Permit)
    service.session(SessionId("s2"), 0.0)
    assert service.record_session(gone, permit, F, 0.0) is None
    assert not service._session_breakers
    again = service.session(S1, 0.0)
    end(service, again, F, 0.0)
    assert service.record_session(gone, permit, F, 0.0) is None
    assert list(service._session_breakers) == ["s1"]
    assert service._session_breakers[S1] is again.breaker


def test_a_forgotten_session_takes_no_breaker_from_the_one_that_came_after_it() -> None:
    _, service = fleet_of(with_sessions(msgspec.structs.replace(SESSION_RULE, max_sessions=1)))
    gone = service.session(S1, 0.0)
    end(service, gone, F, 0.0)
    permit = service.admit_session(gone, 0.0)
    assert isinstance(permit, Permit)
    service.session(SessionId("s2"), 0.0)
    again = service.session(S1, 0.0)
    end(service, again, F, 0.0)
    service.record_session(gone, permit, S, 0.0)
    assert service._session_breakers == {S1: again.breaker}


def test_a_smaller_bound_trims_at_the_reload() -> None:
    fleet, service = fleet_of(with_sessions())
    for number in range(100):
        end(service, service.session(SessionId(f"n{number}"), 0.0), F, 0.0)
    fleet.apply(snapshot_of(with_sessions(msgspec.structs.replace(SESSION_RULE, max_sessions=10))), 0.0)
    assert list(service.sessions) == [f"n{number}" for number in range(90, 100)]
    assert len(service._session_breakers) == 10


@pytest.mark.parametrize(("mode", "refused"), [("enforce", True), ("shadow", False), ("off", False)])
def test_modes_of_the_session_breaker(mode: Mode, refused: bool) -> None:
    _, service = fleet_of(with_sessions(msgspec.structs.replace(SESSION_RULE, mode=mode)))
    session = service.session(S1, 0.0)
    answers = [end(service, session, F, 0.0) for _ in range(5)]
    assert isinstance(answers[-1], Denied) == refused
    assert (session.breaker is None) == (mode == "off")


def test_kinds_of_request_are_bounded_and_the_least_used_go_first() -> None:
    _, service = fleet_of(service_of(1))
    kept = service.request_breaker("POST /kept", 0.0)
    for number in range(3 * MAX_REQUEST_BREAKERS):
        service.request_breaker(f"POST /{number}", 0.0)
        assert service.request_breaker("POST /kept", 0.0) is kept
    assert len(service.request_breakers) == MAX_REQUEST_BREAKERS


def test_kinds_of_request_break_apart() -> None:
    _, service = fleet_of(service_of(1))
    for _ in range(10):
        record(service.request_breaker("POST /a", 0.0), F, 0.0)
    assert isinstance(service.request_breaker("POST /a", 0.0).acquire(0.0), Denied)
    assert isinstance(service.request_breaker("POST /b", 0.0).acquire(0.0), Permit)


# --- operators ------------------------------------------------------------------------------------------------------


def floored(count: int, ratio: float) -> Service:
    rule = msgspec.structs.replace(RULE, min_closed_ratio=ratio)
    return msgspec.structs.replace(service_of(count), breakers=Breakers(node=rule))


def test_a_floor_that_endpoints_left_is_restored_by_those_open_longest() -> None:
    fleet, service = fleet_of(floored(3, 0.34))
    first, second, _ = service.nodes.values()
    trip(first.breaker, 1.0)
    trip(second.breaker, 2.0)
    moved = fleet.apply(
        snapshot_of(msgspec.structs.replace(service.policy, endpoints=service.policy.endpoints[:2])), 3.0
    )
    assert [(each.key, each.why) for each in moved] == [(first.key, "floor")]
    assert (first.breaker.state, second.breaker.state) == (State.CLOSED, State.OPEN)


def test_a_floor_that_rose_is_met_and_an_operators_order_stands() -> None:
    fleet, service = fleet_of(floored(3, 0.0))
    nodes = list(service.nodes.values())
    for at, node in enumerate(nodes, 1):
        trip(node.breaker, float(at))
    nodes[0].breaker.force("open", 4.0, "somebody")
    fleet.apply(snapshot_of(floored(3, 0.9)), 5.0)
    assert [node.breaker.state for node in nodes] == [State.OPEN, State.CLOSED, State.CLOSED]


# --- once a second --------------------------------------------------------------------------------------------------

WATCHED = msgspec.structs.replace(RULE, min_closed_ratio=0.34)


def watched(count: int = 3) -> tuple[Fleet, ServiceState, Detection]:
    fleet, service = fleet_of(service_of(count, WATCHED))
    assert service.detection is not None
    return fleet, service, service.detection


def fail(service: ServiceState, key: str, now: float, times: int = 1) -> None:
    """Attempts on an endpoint that fail at once, whatever its breaker says of it."""
    node = service.nodes[EndpointKey(key)]
    for _ in range(times):
        permit = node.breaker.acquire(now)
        if isinstance(permit, Permit):
            expectation = evidence.expect(service, node, permit, "m", 100, None)
            evidence.ended(service, node, permit, expectation, Ending.SERVER_ERROR, F, 0.0, now)


def test_services_without_a_detector_have_nothing_to_do() -> None:
    fleet, service = fleet_of(service_of(2, msgspec.structs.replace(RULE, adaptive=False)))
    trip(service.nodes[EndpointKey("h1:80")].breaker, 0.0)
    assert fleet.tick(1.0) == [] and service.detection is None
    assert all(node.detector is None for node in service.nodes.values())


def test_the_detector_hears_how_busy_each_endpoint_is() -> None:
    fleet, service, detection = watched()
    for number, node in enumerate(service.nodes.values(), 1):
        fail(service, node.key, 0.0)
        node.in_flight = number
    fleet.tick(1.0)
    assert [detector.in_flight for detector in detection.active] == [1, 2, 3]


def test_it_knows_how_many_there_are_and_how_many_must_stay_closed() -> None:
    fleet, service, detection = watched(9)
    assert (detection.size, detection.floor) == (9, service.roster.minimum)
    fleet.apply(snapshot_of(service_of(2, msgspec.structs.replace(WATCHED, min_closed_ratio=0.0))), 1.0)
    assert (detection.size, detection.floor) == (2, 0)


def test_panic_closes_all_but_what_an_operator_holds_open_and_nobody_opens_in_it() -> None:
    fleet, service, detection = watched(6)
    nodes = list(service.nodes.values())
    nodes[5].breaker.force("open", 0.0, "ann")
    for step in range(4):
        for node in nodes[:5]:
            fail(service, node.key, step / 10, 4)
    opened = [node.key for node in nodes[:5] if node.breaker.state is State.OPEN]
    assert opened
    moved = fleet.tick(1.0)
    assert detection.normal.panic and service.roster.panic
    assert sorted(move.key for move in moved) == sorted(opened)
    assert {(move.new, move.why) for move in moved} == {(State.CLOSED, "panic")}
    assert nodes[5].breaker.held_open
    for node in nodes[:5]:
        fail(service, node.key, 1.1, 20)
    assert all(node.breaker.state is State.CLOSED for node in nodes[:5])
    assert fleet.tick(2.0) == [], "told once"


def test_a_policy_without_a_detector_ends_its_panic() -> None:
    fleet, service, _ = watched()
    service.roster.panic = True
    fleet.apply(snapshot_of(service_of(3, msgspec.structs.replace(WATCHED, adaptive=False))), 1.0)
    assert service.detection is None and not service.roster.panic
    assert service.roster.may_open()


def test_a_policy_without_a_detector_forgets_what_the_others_could_carry() -> None:
    fleet, service = fleet_of(service_of(3, WATCHED))
    service.roster.load, service.roster.load_most = 100.0, 10.0
    fleet.apply(snapshot_of(service_of(3, msgspec.structs.replace(WATCHED, adaptive=False))), 1.0)
    trip(next(iter(service.nodes.values())).breaker, 1.0)


def test_a_breaker_that_is_off_has_no_detector() -> None:
    assert adaptive(msgspec.structs.replace(RULE, mode="off")) is None
    assert adaptive(msgspec.structs.replace(RULE, adaptive=False)) is None
    assert adaptive(RULE) == Adaptive()
    numbers = Adaptive(kappa=5.0)
    assert adaptive(msgspec.structs.replace(RULE, adaptive=numbers)) is numbers


def test_each_service_has_a_detector_of_its_own() -> None:
    one, two = service_of(2, WATCHED), msgspec.structs.replace(service_of(2, WATCHED), name="other")
    fleet, service = fleet_of(one, two)
    other = fleet.services[ServiceName("other")]
    fail(service, "h1:80", 0.0, 3)
    fleet.tick(1.0)
    assert service.detection is not None and other.detection is not None
    assert (service.detection.results, other.detection.results) == (3, 0)


def test_those_in_use_that_are_strained_are_helped_by_the_one_that_has_been_open_longest() -> None:
    fleet, service, detection = watched(4)
    nodes = list(service.nodes.values())
    for now, node in ((1.0, nodes[1]), (2.0, nodes[0])):
        trip(node.breaker, now)
    nodes[2].breaker.force("open", 0.0, "ann")
    detection.normal.strained_s = 1e9
    [moved] = fleet.tick(3.0)
    assert (moved.key, moved.new, moved.why) == ("h2:80", State.CLOSED, "capacity")
    assert nodes[2].breaker.held_open


@pytest.mark.parametrize(("floor", "opens"), [(0.34, False), (0.0, True)], ids=["floor", "no floor"])
def test_nobody_opens_whose_load_the_others_cannot_carry(floor: float, opens: bool) -> None:
    _, service = fleet_of(service_of(4, msgspec.structs.replace(WATCHED, min_closed_ratio=floor)))
    service.roster.load, service.roster.load_most = 100.0, 30.0
    breaker = next(iter(service.nodes.values())).breaker
    record(breaker, F, 0.0, 5)
    assert (breaker.state is State.OPEN) is opens
    if not opens:
        service.roster.load = 80.0
        record(breaker, F, 0.0)
        assert breaker.state is State.OPEN


def test_who_refuses_connections_opens_whatever_the_others_can_carry_but_not_past_the_floor() -> None:
    _, service = fleet_of(service_of(2, msgspec.structs.replace(WATCHED, min_closed_ratio=0.34)))
    service.roster.load, service.roster.load_most = 100.0, 30.0
    dead, other = [node.breaker for node in service.nodes.values()]
    for breaker in (dead, other):
        for _ in range(RULE.consecutive):
            breaker.record(permitted(breaker, 0.0), F, 0.0, Ending.CONNECT_FAILED)
    assert dead.state is State.OPEN and other.state is State.CLOSED


# What is told to the log.


def test_results_of_kinds_and_of_sessions_that_failed_are_counted_and_told_once() -> None:
    _, service = fleet_of(service_of(1))
    well, ill = service.session(SessionId("well"), 0.0), service.session(SessionId("ill"), 0.0)
    kind = service.request_breaker("POST /v1/completions", 0.0)
    for result in (Result.SUCCESS, Result.FAILURE, Result.IGNORED, Result.SUCCESS, Result.OVERLOADED):
        service.record_request(kind, permitted(kind, 0.0), result, 0.0)
        permit = service.admit_session(ill, 0.0)
        assert isinstance(permit, Permit)
        service.record_session(ill, permit, result, 0.0)
        service.record_session(well, FRESH, Result.SUCCESS, 0.0)
    assert service.take_counted() == [
        (Scope.REQUEST, "POST /v1/completions", 2, 1),
        # Its first success was before there was anything to live down.
        (Scope.SESSION, "ill", 1, 1),
    ]
    assert service.take_counted() == []
    service.record_request(kind, permitted(kind, 0.0), Result.FAILURE, 0.0)
    assert service.take_counted() == [(Scope.REQUEST, "POST /v1/completions", 0, 1)]


def test_what_nobody_takes_is_bounded() -> None:
    _, service = fleet_of(service_of(1))
    for number in range(2 * MAX_COUNTED):
        session = service.session(SessionId(f"s-{number}"), 0.0)
        service.record_session(session, FRESH, Result.FAILURE, 0.0)
    assert len(service.take_counted()) == MAX_COUNTED


def test_zones_that_are_turned_down_hold_for_endpoints_that_come_and_over_a_reload() -> None:
    def policy(count: int, zone_decay: ZoneDecay | None) -> Service:
        endpoints = tuple(Endpoint(url=f"http://z{number}:80", zone="ab"[number % 2]) for number in range(count))
        return Service(name="chat", endpoints=(*endpoints, Endpoint(url="http://none:80")), zone_decay=zone_decay)

    def shares() -> tuple[bool, list[float]]:
        return service.turned, [node.share for node in service.nodes.values()]

    fleet, service = fleet_of(policy(2, ZoneDecay()))
    service.turn({"a": 0.1, "": 0.2, "b": 1.0, "gone": 0.3})
    assert shares() == (True, [0.1, 1.0, 1.0])
    fleet.apply(snapshot_of(policy(4, ZoneDecay())), 1.0)
    assert shares() == (True, [0.1, 1.0, 0.1, 1.0, 1.0])
    fleet.apply(snapshot_of(policy(4, None)), 2.0)
    assert shares() == (False, [1.0] * 5), "a policy that does not ask for it is obeyed at once"
    fleet.apply(snapshot_of(policy(4, ZoneDecay())), 3.0)
    assert shares() == (True, [0.1, 1.0, 0.1, 1.0, 1.0])
    service.turn({})
    assert shares() == (False, [1.0] * 5)


def test_a_zone_s_endpoints_that_may_serve_are_counted() -> None:
    endpoints = tuple(Endpoint(url=f"http://z{number}:80", zone="ab"[number % 2]) for number in range(6))
    _, service = fleet_of(Service(name="chat", endpoints=endpoints, breakers=Breakers(node=RULE)))
    first, second, third, *_ = service.nodes.values()
    trip(first.breaker, 0.0)
    second.overload_until = 5.0
    third.draining = True
    assert service.ready_zones(1.0) == {"a": 1, "b": 2}
    assert service.ready_zones(5.0) == {"a": 1, "b": 3}


def test_an_endpoint_that_changes_version_keeps_its_state_and_changes_pool() -> None:
    fleet, service = fleet_of(service_of(2))
    assert keys(service, "m", "v1") == ["h1:80", "h2:80"]
    moved = (Endpoint(url="http://h1:80"), Endpoint(url="http://h2:80", version="v2"))
    fleet.apply(snapshot_of(msgspec.structs.replace(service_of(2), endpoints=moved)), 1.0)
    assert (keys(service, "m", "v1"), keys(service, "m", "v2")) == (["h1:80"], ["h2:80"])


# --- limits and the gate --------------------------------------------------------------------------------------------


AdmissionMode = Literal["auto", "enforce", "shadow", "off"]


def governed(admission: Admission, *classes: QosPolicy, count: int = 2) -> tuple[Fleet, ServiceState]:
    fleet, _ = fleet_of(service_of(count))
    policy = msgspec.structs.replace(service_of(count), admission=admission)
    fleet.apply(msgspec.structs.replace(snapshot_of(policy), qos_policies=classes), 0.0)
    return fleet, next(iter(fleet.services.values()))


VOICE = QosPolicy(name="voice", latency_sla_ms=50, priority=9)


@pytest.mark.parametrize(
    ("mode", "classes", "expected"),
    [
        ("auto", (), None),
        ("auto", (VOICE,), "enforce"),
        ("enforce", (), "enforce"),
        ("shadow", (VOICE,), "shadow"),
        ("off", (VOICE,), None),
    ],
)
def test_there_is_a_gate_where_the_policy_has_classes_or_asks_for_one(
    mode: AdmissionMode, classes: tuple[QosPolicy, ...], expected: str | None
) -> None:
    _, service = governed(Admission(mode=mode), *classes)
    assert (None if service.gate is None else service.gate.mode) == expected
    limits = {node.limit for node in service.nodes.values()}
    assert limits == ({math.inf} if expected is None else {64.0})
    assert all((node.limiter is None) is (expected is None) for node in service.nodes.values())


def test_a_gate_and_its_limits_outlive_a_reload_and_go_when_it_is_turned_off() -> None:
    fleet, service = governed(Admission(), VOICE)
    gate, node = service.gate, service.nodes[EndpointKey("h1:80")]
    limiter = node.limiter
    assert gate is not None and limiter is not None
    limiter.pushed_back(10.0)
    service.tick(11.0)
    assert node.limit == pytest.approx(64 * 0.7)
    fleet.put(msgspec.structs.replace(service.policy, admission=Admission(max=20)), 12.0)
    assert (service.gate, node.limiter, node.limit) == (gate, limiter, 20.0)
    fleet.put(msgspec.structs.replace(service.policy, admission=Admission(limit="fixed", concurrency=7)), 13.0)
    assert (service.gate, node.limiter, node.limit) == (gate, None, 7.0)
    fleet.put(msgspec.structs.replace(service.policy, admission=Admission(mode="off")), 14.0)
    assert (service.gate, node.limit) == (None, math.inf)


def test_an_endpoint_that_comes_back_has_the_limit_that_it_had() -> None:
    fleet, service = governed(Admission(), VOICE)
    policy, node = service.policy, service.nodes[EndpointKey("h2:80")]
    assert node.limiter is not None
    node.limiter.pushed_back(1.0)
    fleet.put(msgspec.structs.replace(policy, endpoints=policy.endpoints[:1]), 2.0)
    fleet.put(policy, 3.0)
    again = service.nodes[EndpointKey("h2:80")]
    assert again is not node and again.limit == pytest.approx(64 * 0.7)
    changed = msgspec.structs.replace(policy.endpoints[1], version="v2")
    fleet.put(msgspec.structs.replace(policy, endpoints=policy.endpoints[:1]), 4.0)
    fleet.put(msgspec.structs.replace(policy, endpoints=(policy.endpoints[0], changed)), 5.0)
    assert service.nodes[EndpointKey("h2:80")].limit == 64.0, "another version is another engine"


@pytest.mark.parametrize(
    ("classes", "limit"),
    [
        pytest.param((VOICE,), 64.0, id="the class default is promised nothing"),
        pytest.param((VOICE, QosPolicy(name="default", latency_sla_ms=3000)), 48.0, id="all are promised something"),
        pytest.param((VOICE, QosPolicy(name="default", latency_sla_ms=60_000)), 64.0, id="the longest counts"),
    ],
)
def test_a_limit_knows_what_the_most_patient_class_is_owed(classes: tuple[QosPolicy, ...], limit: float) -> None:
    _, service = governed(Admission(), *classes)
    node = service.nodes[EndpointKey("h1:80")]
    assert node.limiter is not None
    node.limiter.sample(1.0, 1000, 1, 2.0)
    for _ in range(20):
        node.limiter.sample(3.2, 1000, 64, 6.0)
    node.in_flight = 64
    service.tick(6.0)
    assert node.limiter.limit == pytest.approx(limit)


def test_an_endpoint_takes_less_while_its_zone_is_turned_down() -> None:
    fleet, service = governed(Admission(limit="fixed", concurrency=10), VOICE)
    policy = service.policy
    endpoints = (msgspec.structs.replace(policy.endpoints[0], zone="a"), policy.endpoints[1])
    fleet.put(msgspec.structs.replace(policy, endpoints=endpoints, zone_decay=ZoneDecay()), 0.0)
    service.turn({"a": 0.2})
    service.tick(1.0)
    assert [node.limit for node in service.nodes.values()] == [2.0, 10.0]
    service.turn({"a": 0.0})
    service.tick(2.0)
    assert [node.limit for node in service.nodes.values()] == [1.0, 10.0]


def test_an_endpoint_that_has_just_recovered_takes_less_at_first() -> None:
    _, service = governed(Admission(limit="fixed", concurrency=10), VOICE)
    node = service.nodes[EndpointKey("h1:80")]
    node.breaker.trip("slow", "", 1, Adaptive(ramp_s=Seconds(10)), 0.0)
    now = node.breaker.probe_at(0.0)
    record(node.breaker, S, now, times=2)
    assert node.breaker.ramp_until == now + 10.0
    service.tick(now + 5.0)
    assert node.limit == pytest.approx(5.0)
    service.tick(now + 10.0)
    assert node.limit == 10.0
