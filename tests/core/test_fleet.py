"""What is known of all services: which has a model, and what a reload, a put and an order make of them."""

import msgspec
import pytest

from sidecar.core.breaker import Denied, Permit, Scope, State
from sidecar.core.fleet import MAX_MODELS, Fleet
from sidecar.core.models import matches
from sidecar.core.service import (
    LEASE_SLACK_S,
    MAX_POOLS,
)
from sidecar.kernel.ids import EndpointKey, ServiceName, SessionId, VersionName
from sidecar.kernel.outcome import Result
from sidecar.policy.schema import (
    Breakers,
    Deadlines,
    Endpoint,
    Identity,
    NodeBreaker,
    QosPolicy,
    RequestBreaker,
    Retry,
    Seconds,
    Service,
    Snapshot,
    Source,
)
from sidecar.wire.headers import PASSED, Line
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


def named(name: str, *models: str) -> Service:
    return Service(name=name, models=models, endpoints=(Endpoint(url="http://h:80"),))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("llama-8b", "small"),
        ("llama-70b", "large"),
        ("llama-70B", "llamas"),
        ("qwen", "rest"),
        ("", "llamas"),
        ("x/y:z", "rest"),
    ],
)
def test_an_exact_name_wins_and_globs_are_tried_in_order(model: str, expected: str) -> None:
    fleet, _ = fleet_of(
        named("llamas", "llama-*"), named("small", "llama-8b"), named("large", "llama-70b"), named("rest", "*")
    )
    for _ in range(2):
        found = fleet.service_for(model)
        assert found is not None and found.name == expected


def test_a_model_that_nobody_has_is_unknown() -> None:
    fleet, _ = fleet_of(named("a", "a-*"))
    assert fleet.service_for("b") is None
    assert fleet.service_for("b") is None
    assert Fleet(lambda: 0.0).service_for("") is None


def test_a_reload_forgets_which_service_a_model_had() -> None:
    fleet, _ = fleet_of(named("a", "*"))
    assert fleet.service_for("m") is fleet.services[fleet.service_for("m").name]  # type: ignore[union-attr]
    fleet.apply(snapshot_of(named("b", "m"), named("a", "*")), 1.0)
    found = fleet.service_for("m")
    assert found is not None and found.name == "b"


def test_model_names_that_clients_make_up_are_not_kept_for_ever() -> None:
    fleet, service = fleet_of(named("a", "*"))
    for number in range(3 * MAX_MODELS):
        fleet.service_for(f"m{number}")
        service.pool(f"m{number}", None)
    assert len(fleet._by_model) <= MAX_MODELS
    assert len(service._pools) <= MAX_POOLS


@pytest.mark.parametrize(
    ("globs", "model", "expected"),
    [
        (("*",), "anything", True),
        (("*",), "", True),
        ((), "m", False),
        (("m",), "m", True),
        (("m",), "M", False),
        (("m?",), "m1", True),
        (("m?",), "m", False),
        (("[ab]-*",), "a-1", True),
        (("org/*",), "org/model/sub", True),
        (("m", "n"), "n", True),
    ],
)
def test_globs(globs: tuple[str, ...], model: str, expected: bool) -> None:
    assert matches(globs, model) is expected


# --- pools ----------------------------------------------------------------------------------------------------------


def test_endpoint_state_survives_a_reload() -> None:
    fleet, service = fleet_of(service_of(3))
    node = service.nodes[EndpointKey("h2:80")]
    trip(node.breaker, 0.0)
    node.in_flight, node.waiting, node.overload_until = 3, 4, 5.0
    node.models = frozenset({"m"})
    changed = msgspec.structs.replace(
        service_of(4), deadlines=Deadlines(total_s=Seconds(5)), retry=Retry(budget_min=0, budget_ratio=0.0)
    )
    assert fleet.apply(Snapshot(version=2, services=(changed,)), 1.0) == []
    assert fleet.service_for("m") is service
    assert service.nodes[EndpointKey("h2:80")] is node
    assert (node.breaker.state, node.in_flight, node.waiting, node.overload_until) == (State.OPEN, 3, 4, 5.0)
    assert node.models == {"m"}
    assert list(service.nodes) == ["h1:80", "h2:80", "h3:80", "h4:80"]
    assert not service.budget.take(1.0)
    assert service.lease_s == 5.0 + LEASE_SLACK_S


def test_a_reload_gives_running_breakers_their_new_rules() -> None:
    fleet, service = fleet_of(with_sessions())
    node = service.nodes[EndpointKey("h1:80")]
    record(node.breaker, F, 0.0)
    session = service.session(S1, 0.0)
    end(service, session, F, 0.0)
    record(service.request_breaker("POST /x", 0.0), F, 0.0)
    rules = Breakers(
        node=msgspec.structs.replace(RULE, consecutive=2),
        session=msgspec.structs.replace(SESSION_RULE, consecutive=2),
        request=RequestBreaker(consecutive=2),
    )
    fleet.apply(snapshot_of(msgspec.structs.replace(service_of(2), breakers=rules)), 0.0)
    record(node.breaker, F, 0.0)
    end(service, session, F, 0.0)
    record(service.request_breaker("POST /x", 0.0), F, 0.0)
    assert session.breaker is not None
    assert [b.state for b in (node.breaker, session.breaker, service.request_breaker("POST /x", 0.0))] == [
        State.OPEN
    ] * 3


def test_a_reload_that_turns_breakers_off_says_which_it_closed() -> None:
    fleet, service = fleet_of(service_of(2))
    trip(service.nodes[EndpointKey("h1:80")].breaker, 0.0)
    off = Breakers(node=NodeBreaker(mode="off"))
    closed = fleet.apply(snapshot_of(msgspec.structs.replace(service_of(2), breakers=off)), 1.0)
    assert [(t.key, t.old, t.new, t.why) for t in closed] == [("h1:80", State.OPEN, State.CLOSED, "mode_off")]


def test_a_longer_deadline_lengthens_the_lease_of_probes() -> None:
    fleet, service = fleet_of(msgspec.structs.replace(service_of(1), deadlines=Deadlines(total_s=Seconds(10))))
    fleet.apply(snapshot_of(msgspec.structs.replace(service_of(1), deadlines=Deadlines(total_s=Seconds(100)))), 0.0)
    breaker = service.nodes[EndpointKey("h1:80")].breaker
    trip(breaker, 0.0)
    permitted(breaker, 10.0)
    assert breaker.probe_at(10.0) == 10.0 + 100.0 + LEASE_SLACK_S


def test_a_dropped_endpoint_is_forgotten_and_counts_in_no_floor() -> None:
    fleet, service = fleet_of(service_of(4, msgspec.structs.replace(RULE, min_closed_ratio=0.5)))
    gone = service.nodes[EndpointKey("h4:80")]
    trip(gone.breaker, 0.0)
    fleet.apply(snapshot_of(service_of(3, msgspec.structs.replace(RULE, min_closed_ratio=0.5))), 1.0)
    assert gone.draining
    assert not service.roster.not_closed
    assert (service.roster.size, service.roster.minimum) == (3, 1)
    record(gone.breaker, F, 100.0)
    assert not service.roster.not_closed
    fleet.apply(snapshot_of(service_of(4)), 2.0)
    back = service.nodes[EndpointKey("h4:80")]
    assert back is not gone and back.breaker.state is State.CLOSED and not back.draining


def test_services_come_and_go() -> None:
    fleet, service = fleet_of(named("a", "a"), named("b", "b"))
    gone = next(iter(fleet.services["b"].nodes.values()))  # type: ignore[index]
    fleet.apply(snapshot_of(named("c", "c"), named("a", "a")), 1.0)
    assert list(fleet.services) == ["c", "a"]
    assert fleet.service_for("a") is service
    assert gone.draining


def waking(fleet: Fleet, model: str) -> None:
    """Whoever is woken has this model."""

    def wake(name: ServiceName) -> None:
        fleet.put(named(name, model), 1.0)

    fleet.wake = wake


def test_one_service_is_put_and_the_others_stay() -> None:
    fleet, service = fleet_of(named("a", "a"), named("b", "b"))
    other = fleet.services[ServiceName("b")]
    services = fleet.services
    node = service.nodes[EndpointKey("h:80")]
    assert fleet.put(msgspec.structs.replace(named("a", "a"), split={"v1": 1.0}), 1.0) == []
    assert fleet.services is services and service.split == (("v1", 1.0),)
    assert service.nodes[EndpointKey("h:80")] is node and fleet.services[ServiceName("b")] is other
    assert fleet.service_for("m") is None
    fleet.put(named("a", "m"), 2.0)
    assert fleet.service_for("m") is service and fleet.service_for("a") is None


def test_new_weights_alone_leave_pools_and_endpoints_as_they_are() -> None:
    policy = service_of(4, v1=9.0, v2=1.0)
    fleet, service = fleet_of(policy)
    pool, nodes = service.pool("", VersionName("v1")), service.nodes
    fleet.put(msgspec.structs.replace(policy, split={"v1": 5.0, "v2": 5.0, "v3": 0.0}), 1.0)
    assert service.split == (("v1", 5.0), ("v2", 5.0))
    assert service.nodes is nodes and service.pool("", VersionName("v1")) is pool
    assert service.policy.split == {"v1": 5.0, "v2": 5.0, "v3": 0.0}
    # Anything else beside them is read.
    fleet.put(msgspec.structs.replace(policy, split={"v1": 1.0}, retry=Retry(attempts=7)), 2.0)
    assert service.attempts == 7 and dict(service.split) == {"v1": 1.0}


def test_a_put_that_turns_breakers_off_says_which_it_closed() -> None:
    fleet, service = fleet_of(service_of(2))
    trip(service.nodes[EndpointKey("h1:80")].breaker, 0.0)
    off = msgspec.structs.replace(service_of(2), breakers=Breakers(node=msgspec.structs.replace(RULE, mode="off")))
    assert [transition.key for transition in fleet.put(off, 1.0)] == ["h1:80"]


def test_a_new_service_comes_after_the_files_and_among_the_new_by_name() -> None:
    fleet, service = fleet_of(named("z", "z", "*-x"))
    before = fleet.services
    for name in ("c", "b"):
        fleet.put(named(name, "m*", "*"), 1.0)
    assert "b" not in before  # who goes through them goes on
    assert fleet.service_for("m1") is fleet.services[ServiceName("b")]
    assert fleet.service_for("m-x") is service and fleet.service_for("") is service
    made = (named("b", "m*"), named("d", "d"))
    fleet.apply(snapshot_of(named("c", "c")), 2.0, made)
    assert list(fleet.services) == ["c", "b", "d"]
    assert fleet.service_for("m1") is fleet.services[ServiceName("b")]
    assert fleet.service_for("") is fleet.services[ServiceName("c")]


def test_a_service_sleeps_until_its_model_is_asked_for() -> None:
    fleet, service = fleet_of(named("a", "a"))
    woken: list[str] = []

    def wake(name: ServiceName) -> None:
        woken.append(name)
        fleet.put(named(name, "m*"), 1.0)

    fleet.wake = wake
    fleet.sleep(ServiceName("b"), ("m*",))
    fleet.sleep(ServiceName("a"), ("x",))  # is awake
    assert list(fleet.services) == ["a"] and fleet.service_for("x") is None and not woken
    found = fleet.service_for("m1")
    assert found is fleet.services[ServiceName("b")] and fleet.service_for("m2") is found and woken == ["b"]
    fleet.sleep(ServiceName("b"), ("m*",))
    assert fleet.service_for("m3") is found and woken == ["b"]
    fleet.sleep(ServiceName("c"), ("c",))
    fleet.apply(snapshot_of(named("a", "a"), named("c", "c")), 2.0)
    assert fleet.service_for("c") is fleet.services[ServiceName("c")] and woken == ["b"]
    assert fleet.service_for("a") is service


def test_a_sleeper_whose_models_change_is_found_by_the_new_ones() -> None:
    fleet, _ = fleet_of(named("a", "a"))
    waking(fleet, "n")
    fleet.sleep(ServiceName("b"), ("m",))
    fleet.sleep(ServiceName("b"), ("n",))
    assert fleet.service_for("m") is None
    assert fleet.service_for("n") is fleet.services[ServiceName("b")]


def test_a_service_that_no_file_names_may_be_dropped() -> None:
    fleet, _ = fleet_of(Service(name="listed"))
    fleet.put(Service(name="made", models=("m",), endpoints=(Endpoint(url="http://a:80"),)), 0.0)
    fleet.sleep(ServiceName("asleep"), ("s",))
    made = fleet.services[ServiceName("made")]
    for name in ("listed", "made", "asleep", "unknown", "made"):
        fleet.drop(ServiceName(name))
    assert list(fleet.services) == ["listed"], "what a file names stays"
    assert all(node.draining for node in made.nodes.values())
    for model in ("m", "s"):
        found = fleet.service_for(model)
        assert found is not None and found.name == "listed"


def test_a_sleeper_that_cannot_be_made_leaves_its_models_to_the_next() -> None:
    fleet = Fleet(lambda: 0.5)
    fleet.sleep(ServiceName("b"), ("m",))
    fleet.sleep(ServiceName("c"), ("m",))
    assert fleet.service_for("m") is None and fleet.service_for("") is None
    waking(fleet, "m")
    assert fleet.service_for("m") is None  # remembered
    fleet.sleep(ServiceName("b"), ("m",))
    assert fleet.service_for("m") is fleet.services[ServiceName("b")]


def test_the_same_endpoint_in_two_services_is_two_nodes() -> None:
    fleet, a = fleet_of(named("a", "a"), named("b", "b"))
    b = fleet.service_for("b")
    assert b is not None
    a.nodes[EndpointKey("h:80")].breaker.force("open", 0.0, "ann")
    assert b.nodes[EndpointKey("h:80")].breaker.state is State.CLOSED


def test_identity_rules_follow_the_snapshot() -> None:
    fleet, _ = fleet_of(service_of(1))
    assert fleet.identifier.identify([Line(b"x-session-id", b"s", PASSED, b"")], "").session == "s"
    identity = Identity(session=(Source(header="x-other"),))
    fleet.apply(Snapshot(version=2, services=(service_of(1),), identity=identity), 1.0)
    assert fleet.identifier.identify([Line(b"x-session-id", b"s", PASSED, b"")], "").session is None
    assert fleet.identifier.identify([Line(b"x-other", b"s", PASSED, b"")], "").session == "s"


# --- overload -------------------------------------------------------------------------------------------------------


def test_views_show_every_node_and_what_else_ever_moved() -> None:
    fleet, service = fleet_of(with_sessions())
    end(service, service.session(SessionId("failed once"), 0.0), F, 0.0)
    for _ in range(3):
        end(service, service.session(S1, 5.0), F, 5.0)
    service.request_breaker("POST /fine", 0.0)
    fleet.override(Scope.REQUEST, "POST /fine", "close", 6.0, "ann")
    trip(service.nodes[EndpointKey("h1:80")].breaker, 7.0)
    views = {(v.scope, v.key): v for v in fleet.views(8.0)}
    assert set(views) == {("node", "h1:80"), ("node", "h2:80"), ("session", "s1"), ("request", "POST /fine")}
    session = views[Scope.SESSION, "s1"]
    assert (session.state, session.version, session.since, session.why, session.by, session.retry_at) == (
        State.OPEN,
        1,
        5.0,
        "consecutive",
        "",
        35.0,
    )
    assert views[Scope.REQUEST, "POST /fine"].by == "ann"
    assert views[Scope.NODE, "h1:80"].service == "chat"
    assert [views[Scope.NODE, key].retry_at for key in ("h1:80", "h2:80")] == [17.0, 8.0]


def test_orders_reach_every_scope_and_say_when_nobody_knows_the_key() -> None:
    fleet, service = fleet_of(with_sessions())
    service.session(S1, 0.0)
    service.request_breaker("POST /a", 0.0)
    for scope, key in ((Scope.NODE, "h1:80"), (Scope.SESSION, "s1"), (Scope.REQUEST, "POST /a")):
        moved = fleet.override(scope, key, "open", 0.0, "ann")
        assert moved is not None and [(t.scope, t.key, t.new) for t in moved] == [(scope, key, State.OPEN)]
        assert fleet.override(scope, key, "open", 0.0, "ann") == []
        assert fleet.override(scope, key + "x", "open", 0.0, "ann") is None
    assert isinstance(service.admit_session(service.session(S1, 1.0), 1.0), Denied)
    assert isinstance(service.request_breaker("POST /a", 1.0).acquire(1.0), Denied)
    fleet.override(Scope.SESSION, "s1", "reset", 1.0, "ann")
    assert isinstance(service.admit_session(service.session(S1, 1.0), 1.0), Permit)


def test_an_order_on_an_endpoint_holds_in_every_service_that_has_it() -> None:
    fleet, _ = fleet_of(named("a", "a"), named("b", "b"))
    moved = fleet.override(Scope.NODE, "h:80", "open", 0.0, "ann")
    assert moved is not None and [t.service for t in moved] == ["a", "b"]


# --- the floor after a reload ---------------------------------------------------------------------------------------


def test_the_same_session_in_two_services_is_two_sessions() -> None:
    fleet, a = fleet_of(named("a", "a"), named("b", "b"))
    b = fleet.service_for("b")
    assert b is not None
    assert a.session(S1, 0.0) is not b.session(S1, 0.0)


# --- kinds of request -----------------------------------------------------------------------------------------------


def test_classes_follow_the_snapshot_and_are_the_same_while_it_says_the_same() -> None:
    fleet, service = fleet_of(service_of(1))
    assert ([each.name for each in fleet.classes.all], service.gate) == (["default"], None)
    voice = QosPolicy(name="voice", latency_sla_ms=50, priority=9)
    fleet.apply(msgspec.structs.replace(snapshot_of(service_of(1)), qos_policies=(voice,)), 0.0)
    classes = fleet.classes
    assert [each.name for each in classes.all] == ["voice", "default"]
    fleet.apply(msgspec.structs.replace(snapshot_of(service_of(2)), qos_policies=(voice,)), 1.0)
    assert fleet.classes is classes
    fleet.put(msgspec.structs.replace(service_of(1), name="other"), 2.0)
    assert all(each.gate is not None for each in fleet.services.values())
    fleet.apply(snapshot_of(service_of(2)), 3.0)
    assert service.gate is None
