"""Which node a request goes to: each rule by a case, all of them together against a plain reckoning."""

import random
from collections import Counter, deque
from math import sqrt

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sidecar.core.balance import Choice, Unavailable, bind, pick
from sidecar.core.breaker import VERDICT_WAIT_S, Action, Permit, State
from sidecar.core.fleet import Fleet
from sidecar.core.pool import Node
from sidecar.core.service import ServiceState, Session
from sidecar.kernel.errors import Reason
from sidecar.kernel.ids import EndpointKey, SessionId, VersionName
from sidecar.kernel.outcome import Result
from sidecar.policy.schema import Adaptive, Balance, Breakers, Endpoint, Mode, Seconds, Service, ZoneDecay
from tests.core.build import RULE, chosen, fleet_of, permitted, record, refused, service_of, snapshot_of, trip

S, F, I, O = Result.SUCCESS, Result.FAILURE, Result.IGNORED, Result.OVERLOADED  # noqa: E741
S1 = SessionId("s1")


def key(number: int) -> EndpointKey:
    return EndpointKey(f"h{number}:80")


def node(service: ServiceState, number: int) -> Node:
    return service.nodes[key(number)]


class Bench:
    """One service, and requests of the session `s1` or of none."""

    def __init__(self, policy: Service, seed: int = 1) -> None:
        self.fleet, self.service = fleet_of(policy, seed=seed)
        self.session: Session = self.service.session(S1, 0.0)

    def node(self, number: int) -> Node:
        return node(self.service, number)

    def pick(self, now: float, *tried: int, model: str = "m", version: str | None = None) -> Choice | Unavailable:
        asked = None if version is None else VersionName(version)
        return pick(self.service, None, asked, model, {key(n) for n in tried}, now, self.fleet.chance)

    def ask(self, now: float, *tried: int, version: str | None = None) -> Choice | Unavailable:
        """As the session, without binding it."""
        asked = None if version is None else VersionName(version)
        return pick(self.service, self.session, asked, "m", {key(n) for n in tried}, now, self.fleet.chance)

    def served(self, now: float, result: Result = S, *tried: int, version: str | None = None) -> tuple[str, str]:
        """A request of the session that is accepted and ends: (node, affinity)."""
        choice = chosen(self.ask(now, *tried, version=version))
        bind(self.session, choice, now)
        choice.node.breaker.record(choice.permit, result, now, "x")
        return choice.node.key, choice.affinity

    def bound(self, number: int) -> "Bench":
        self.session.node_key = key(number)
        self.session.version = self.node(number).version
        return self


# --- score ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["in_flight", "waiting"])
def test_of_two_the_less_loaded_is_taken(field: str) -> None:
    bench = Bench(service_of(2))
    setattr(bench.node(1), field, 1)
    assert {chosen(bench.pick(0.0)).node.key for _ in range(50)} == {"h2:80"}


def test_in_flight_and_waiting_add_up() -> None:
    bench = Bench(service_of(2))
    bench.node(1).in_flight, bench.node(1).waiting = 2, 3
    bench.node(2).in_flight, bench.node(2).waiting = 4, 0
    assert {chosen(bench.pick(0.0)).node.key for _ in range(50)} == {"h2:80"}


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9, 50])
def test_equals_get_equal_shares(count: int) -> None:
    bench = Bench(service_of(count))
    found = Counter(chosen(bench.pick(0.0)).node.key for _ in range(400 * count))
    assert len(found) == count
    assert max(found.values()) < 1.3 * 400 and min(found.values()) > 0.7 * 400


@pytest.mark.parametrize("count", [3, 20])
def test_load_evens_out(count: int) -> None:
    bench = Bench(service_of(count))
    for _ in range(count * 100):
        chosen(bench.pick(0.0)).node.in_flight += 1
    loads = [n.in_flight for n in bench.service.nodes.values()]
    assert max(loads) - min(loads) <= 8


@pytest.mark.parametrize("luck", [0.0, 0.5, 0.9999999999999999])
@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_chance_at_its_ends_finds_a_node(count: int, luck: float) -> None:
    bench = Bench(service_of(count))
    assert chosen(pick(bench.service, None, None, "m", (), 0.0, lambda: luck)).node.key in bench.service.nodes


def test_local_nodes_come_first_while_they_may_serve() -> None:
    policy = service_of(3, balance=Balance(local_first=True))
    first, *rest = policy.endpoints
    local = msgspec.structs.replace(first, local=True)
    bench = Bench(msgspec.structs.replace(policy, endpoints=(*rest, local)))
    bench.node(1).in_flight = 100
    assert {chosen(bench.pick(0.0)).node.key for _ in range(50)} == {"h1:80"}
    assert {chosen(bench.pick(0.0, 1)).node.key for _ in range(50)} == {"h2:80", "h3:80"}
    trip(bench.node(1).breaker, 0.0)
    assert {chosen(bench.pick(1.0)).node.key for _ in range(50)} == {"h2:80", "h3:80"}


def test_without_local_first_the_mark_means_nothing() -> None:
    policy = service_of(2)
    first, second = policy.endpoints
    bench = Bench(msgspec.structs.replace(policy, endpoints=(msgspec.structs.replace(first, local=True), second)))
    bench.node(1).in_flight = 1
    assert {chosen(bench.pick(0.0)).node.key for _ in range(50)} == {"h2:80"}


def test_the_one_that_may_serve_is_found_among_many_that_may_not() -> None:
    bench = Bench(service_of(500))
    for number in range(1, 500):
        bench.node(number).draining = True
    assert {chosen(bench.pick(0.0)).node.key for _ in range(20)} == {"h500:80"}


# --- filter and reasons ---------------------------------------------------------------------------------------------


def spoilt(bench: Bench, number: int, how: str) -> None:
    match how:
        case "full":
            bench.node(number).overload_until = 5.0
        case "fuller":
            bench.node(number).overload_until = 7.0
        case "open":
            trip(bench.node(number).breaker, 0.0)
        case "opened again":
            trip(bench.node(number).breaker, -10.0)
            record(bench.node(number).breaker, F, 0.0)
        case "on trial":
            trip(bench.node(number).breaker, -10.0)
            assert isinstance(bench.node(number).breaker.acquire(0.0), Permit)
        case "held open":
            bench.node(number).breaker.force("open", 0.0, "ann")
        case "draining":
            bench.node(number).draining = True
        case "open and full":
            trip(bench.node(number).breaker, 0.0)
            bench.node(number).overload_until = 15.0
        case "ready for a probe but full":
            trip(bench.node(number).breaker, -10.0)
            bench.node(number).overload_until = 6.0


@pytest.mark.parametrize(
    ("ways", "reason", "retry_at"),
    [
        pytest.param(["open", "open"], Reason.BREAKER_OPEN, 10.0, id="all open: the earliest probe"),
        pytest.param(["open", "opened again"], Reason.BREAKER_OPEN, 10.0, id="the earlier of two"),
        pytest.param(["opened again", "opened again"], Reason.BREAKER_OPEN, 20.0, id="both for longer"),
        pytest.param(["on trial"], Reason.BREAKER_OPEN, VERDICT_WAIT_S, id="on trial: soon"),
        pytest.param(["held open"], Reason.BREAKER_OPEN, 10.0, id="held open: ask again"),
        pytest.param(["open and full"], Reason.BREAKER_OPEN, 15.0, id="open, and full for longer"),
        pytest.param(["full", "fuller"], Reason.OVERLOADED, 5.0, id="all full: the earliest"),
        pytest.param(["fuller", "open"], Reason.OVERLOADED, 7.0, id="who could serve is full"),
        pytest.param(["ready for a probe but full"], Reason.OVERLOADED, 6.0, id="a probe could go, but it is full"),
        pytest.param(["draining", "draining"], Reason.NO_ENDPOINT, None, id="all draining"),
        pytest.param(["draining", "open"], Reason.BREAKER_OPEN, 10.0, id="draining does not count"),
        pytest.param(["draining", "full"], Reason.OVERLOADED, 5.0, id="nor here"),
    ],
)
def test_when_nobody_can_serve_the_answer_says_why_and_when(
    ways: list[str], reason: Reason, retry_at: float | None
) -> None:
    for order in (ways, ways[::-1]):
        bench = Bench(service_of(len(order)))
        for number, how in enumerate(order, 1):
            spoilt(bench, number, how)
        for _ in range(3):
            assert bench.pick(0.0) == Unavailable(reason, retry_at)


def test_no_endpoints_at_all() -> None:
    assert Bench(service_of(0)).pick(0.0) == Unavailable(Reason.NO_ENDPOINT, None)


def test_no_endpoint_of_the_version() -> None:
    assert Bench(service_of(2)).pick(0.0, version="v9") == Unavailable(Reason.NO_ENDPOINT, None)


def test_a_model_that_no_engine_reports_is_unknown() -> None:
    bench = Bench(service_of(2))
    for number in (1, 2):
        bench.node(number).models = frozenset({"base"})
    assert bench.pick(0.0, model="sql-lora") == Unavailable(Reason.UNKNOWN_MODEL, None)
    bench.node(2).models = frozenset({"base", "sql-lora"})
    assert {chosen(bench.pick(0.0, model="sql-lora")).node.key for _ in range(20)} == {"h2:80"}


def test_the_reason_speaks_of_the_nodes_not_tried() -> None:
    bench = Bench(service_of(3))
    trip(bench.node(2).breaker, 0.0)
    bench.node(3).overload_until = 5.0
    assert chosen(bench.pick(1.0)).node.key == "h1:80"
    assert bench.pick(1.0, 1) == Unavailable(Reason.OVERLOADED, 5.0)
    assert bench.pick(1.0, 1, 3) == Unavailable(Reason.BREAKER_OPEN, 10.0)
    assert bench.pick(1.0, 1, 2) == Unavailable(Reason.OVERLOADED, 5.0)
    assert bench.pick(1.0, 1, 2, 3) == Unavailable(Reason.NO_ENDPOINT, None)


def test_what_a_request_tried_spoils_no_other_request() -> None:
    bench = Bench(service_of(2))
    trip(bench.node(2).breaker, 0.0)
    assert bench.pick(1.0, 1) == Unavailable(Reason.BREAKER_OPEN, 10.0)
    assert chosen(bench.pick(1.0)).node.key == "h1:80"


# --- probes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probes", [1, 2, 5])
@pytest.mark.parametrize("healthy", [0, 1, 3])
def test_fifty_at_once_give_the_node_on_trial_exactly_its_probes(probes: int, healthy: int) -> None:
    """T01."""
    rule = msgspec.structs.replace(RULE, probes=probes, successes=probes)
    bench = Bench(service_of(1 + healthy, rule))
    trip(bench.node(1).breaker, 0.0)
    found = [bench.pick(10.0) for _ in range(50)]
    on_trial = [c for c in found if isinstance(c, Choice) and c.node.key == "h1:80"]
    assert len(on_trial) == probes
    assert found[:probes] == on_trial, "the first ones: no score can starve the trial"
    assert all(c.permit.probe for c in on_trial)
    rest = found[probes:]
    if healthy:
        assert all(not chosen(c).permit.probe for c in rest)
    else:
        assert all(refused(c) == Unavailable(Reason.BREAKER_OPEN, 10.0 + VERDICT_WAIT_S) for c in rest)
    for choice in on_trial:
        choice.node.breaker.record(choice.permit, S, 11.0)
    assert bench.node(1).breaker.state is State.CLOSED


def test_the_load_of_a_node_on_trial_does_not_matter() -> None:
    bench = Bench(service_of(2))
    trip(bench.node(1).breaker, 0.0)
    bench.node(1).in_flight = bench.node(1).waiting = 1000
    assert chosen(bench.pick(10.0)).node.key == "h1:80"


@pytest.mark.parametrize("result", [I, O])
def test_after_an_inconclusive_probe_the_next_request_probes_again(result: Result) -> None:
    bench = Bench(service_of(2))
    trip(bench.node(1).breaker, 0.0)
    for _ in range(10):
        choice = chosen(bench.pick(10.0))
        assert choice.node.key == "h1:80" and choice.permit.probe
        assert not chosen(bench.pick(10.0)).permit.probe
        choice.node.breaker.record(choice.permit, result, 10.0)


def test_a_lost_probe_is_replaced_when_its_lease_ends() -> None:
    bench = Bench(service_of(2))
    trip(bench.node(1).breaker, 0.0)
    chosen(bench.pick(10.0))
    end = 10.0 + bench.service.lease_s
    assert not chosen(bench.pick(end - 0.001)).permit.probe
    assert chosen(bench.pick(end)).permit.probe


def test_sent_again_a_request_probes_only_if_nothing_else_is_left() -> None:
    bench = Bench(service_of(3))
    trip(bench.node(1).breaker, 0.0)
    assert chosen(bench.pick(10.0, 2)).node.key == "h3:80"
    probe = chosen(bench.pick(10.0, 2, 3))
    assert probe.node.key == "h1:80" and probe.permit.probe
    probe.node.breaker.record(probe.permit, I, 10.0)
    assert bench.pick(10.0, 1, 2, 3) == Unavailable(Reason.NO_ENDPOINT, None)
    assert chosen(bench.pick(10.0)).permit.probe


@pytest.mark.parametrize("how", ["draining", "full", "another version", "another model"])
def test_a_node_that_may_not_serve_this_request_gets_no_probe_from_it(how: str) -> None:
    bench = Bench(service_of(2, v1=1, v2=1))
    trip(bench.node(1).breaker, 0.0)
    match how:
        case "draining":
            bench.node(1).draining = True
        case "full":
            bench.node(1).overload_until = 12.0
        case "another model":
            bench.node(1).models = frozenset({"other"})
        case _:
            pass
    for _ in range(10):
        assert chosen(bench.pick(10.0, version="v2" if how == "another version" else None)).node.key == "h2:80"
    if how == "full":
        assert chosen(bench.pick(12.0)).permit.probe
    if how == "another model":
        assert chosen(bench.pick(10.0, model="other")).permit.probe
    if how == "another version":
        assert chosen(bench.pick(10.0, version="v1")).permit.probe


def test_a_node_that_is_no_longer_draining_is_probed_at_once() -> None:
    bench = Bench(service_of(2))
    trip(bench.node(1).breaker, 0.0)
    bench.node(1).draining = True
    assert not chosen(bench.pick(10.0)).permit.probe
    bench.node(1).draining = False
    assert chosen(bench.pick(10.0)).permit.probe


@pytest.mark.parametrize("count", [1, 3, 12])
def test_all_open_answers_at_once_then_probes_each_once_and_recovers(count: int) -> None:
    """T17."""
    bench = Bench(service_of(count))
    for number in range(1, count + 1):
        trip(bench.node(number).breaker, 0.0)
    generations = [n.breaker.generation for n in bench.service.nodes.values()]
    for tick in range(100):
        assert bench.pick(tick / 10) == Unavailable(Reason.BREAKER_OPEN, 10.0)
    assert [n.breaker.generation for n in bench.service.nodes.values()] == generations
    for _ in range(2):
        probes = [chosen(bench.pick(10.0)) for _ in range(count)]
        assert {c.node.key for c in probes} == set(bench.service.nodes)
        for _ in range(100):
            assert refused(bench.pick(10.0)).reason is Reason.BREAKER_OPEN
        for choice in probes:
            choice.node.breaker.record(choice.permit, S, 10.0)
    assert all(n.breaker.state is State.CLOSED for n in bench.service.nodes.values())
    assert not chosen(bench.pick(10.0)).permit.probe


@pytest.mark.parametrize("mode", ["shadow", "off"])
def test_modes_that_do_not_enforce_change_no_choice(mode: Mode) -> None:
    bench = Bench(service_of(2, msgspec.structs.replace(RULE, mode=mode)))
    for _ in range(20):
        record(bench.node(1).breaker, F, 0.0)
    for busy, idle in ((1, 2), (2, 1)):
        bench.node(busy).in_flight, bench.node(idle).in_flight = 1, 0
        for now in (1.0, 20.0):
            assert {chosen(bench.pick(now)).node.key for _ in range(20)} == {key(idle)}


def test_aborted_canaries_that_are_open_are_not_looked_at_by_those_who_cannot_go_there() -> None:
    bench = Bench(service_of(10, v1=1, v2=0))
    for number in range(2, 11, 2):
        trip(bench.node(number).breaker, 0.0)
    for tick in range(1000):
        assert chosen(bench.pick(20.0 + tick, version="v1")).node.version == "v1"
    assert not bench.service.pool("m", VersionName("v1")).due
    assert all(bench.node(number).breaker.state is State.OPEN for number in range(2, 11, 2))


def test_one_that_is_full_and_whose_wait_ends_meanwhile_is_full() -> None:
    bench = Bench(service_of(1))
    trip(bench.node(1).breaker, 0.0)
    bench.node(1).overload_until = 20.0
    assert bench.pick(1.0) == Unavailable(Reason.BREAKER_OPEN, 20.0)
    assert bench.pick(11.0) == Unavailable(Reason.OVERLOADED, 20.0)
    assert chosen(bench.pick(20.0)).permit.probe


def test_of_many_the_reason_is_told_again_for_a_moment_and_never_keeps_anybody_out() -> None:
    bench = Bench(service_of(100))
    for number in range(1, 101):
        trip(bench.node(number).breaker, 0.0)
    assert bench.pick(1.0) == Unavailable(Reason.BREAKER_OPEN, 10.0)
    bench.node(7).breaker.force("open", 1.0, "ann")
    assert bench.pick(1.05) == Unavailable(Reason.BREAKER_OPEN, 10.0)
    for number in range(1, 101):
        bench.node(number).breaker.force("open", 1.1, "ann")
    assert bench.pick(1.2) == Unavailable(Reason.BREAKER_OPEN, 11.2)
    bench.node(9).breaker.force("close", 1.21, "ann")
    assert chosen(bench.pick(1.21)).node.key == key(9)
    assert bench.pick(1.21, 9) == Unavailable(Reason.BREAKER_OPEN, 11.21), "another question"


# --- affinity -------------------------------------------------------------------------------------------------------


def test_a_session_stays_with_its_node_even_if_that_is_busier() -> None:
    bench = Bench(service_of(3))
    first, affinity = bench.served(0.0)
    assert affinity == ""
    bench.service.nodes[EndpointKey(first)].in_flight = 100
    assert [bench.served(1.0) for _ in range(20)] == [(first, "bound")] * 20


@pytest.mark.parametrize("why", ["open", "held open", "on trial", "draining", "gone"])
def test_a_session_moves_at_once_when_its_node_refuses(why: str) -> None:
    """T13."""
    bench = Bench(service_of(2)).bound(1)
    if why == "gone":
        policy = service_of(2)
        bench.fleet.apply(snapshot_of(msgspec.structs.replace(policy, endpoints=policy.endpoints[1:])), 0.0)
    else:
        spoilt(bench, 1, why)
    assert bench.served(0.0) == ("h2:80", "moved")
    assert bench.served(0.0) == ("h2:80", "bound")


@pytest.mark.parametrize("why", ["full", "tried", "another model"])
def test_a_passing_obstacle_is_a_detour_and_the_binding_stays(why: str) -> None:
    bench = Bench(service_of(3)).bound(1)
    tried: tuple[int, ...] = ()
    if why == "full":
        bench.node(1).overload_until = 5.0
    elif why == "tried":
        tried = (1,)
    else:
        bench.node(1).models = frozenset({"other"})
    found, affinity = bench.served(0.0, S, *tried)
    assert found != "h1:80" and affinity == ""
    assert (bench.session.node_key, bench.session.home_key) == ("h1:80", None)
    bench.node(1).models = None
    assert bench.served(5.0) == ("h1:80", "bound")


def test_it_returns_once_when_its_home_recovers() -> None:
    """T13: one move per trip, one return per recovery, no ping-pong."""
    bench = Bench(service_of(2)).bound(1)
    now = 0.0
    for _ in range(5):
        trip(bench.node(1).breaker, now)
        assert bench.served(now) == ("h2:80", "moved")
        assert [bench.served(now) for _ in range(3)] == [("h2:80", "bound")] * 3
        now = bench.node(1).breaker.retry_at(now)
        for _ in range(2):
            assert chosen(bench.pick(now)).node.key == "h1:80"
            probe = Permit(bench.node(1).breaker.generation, True, bench.node(1).breaker._probe_id)
            assert bench.served(now) == ("h2:80", "bound"), "on trial is not recovered"
            bench.node(1).breaker.record(probe, S, now)
        assert bench.served(now) == ("h1:80", "returned")
        assert [bench.served(now) for _ in range(3)] == [("h1:80", "bound")] * 3
        now += 1000.0


def test_without_return_home_it_stays_where_it_moved() -> None:
    bench = Bench(service_of(2, balance=Balance(return_home=False))).bound(1)
    trip(bench.node(1).breaker, 0.0)
    assert bench.served(0.0) == ("h2:80", "moved")
    record(bench.node(1).breaker, S, 10.0, times=2)
    assert [bench.served(10.0) for _ in range(5)] == [("h2:80", "bound")] * 5
    trip(bench.node(2).breaker, 11.0)
    assert bench.served(11.0) == ("h1:80", "moved")
    assert bench.session.home_key is None


def test_its_own_request_may_be_the_probe_of_its_home_and_moves_nothing() -> None:
    bench = Bench(service_of(2)).bound(1)
    trip(bench.node(1).breaker, 0.0)
    bench.served(0.0)
    assert bench.served(10.0) == ("h1:80", "")
    assert (bench.session.node_key, bench.session.home_key) == ("h2:80", "h1:80")
    assert bench.served(10.0) == ("h1:80", "")
    assert bench.node(1).breaker.state is State.CLOSED
    assert bench.served(10.0) == ("h1:80", "returned")


def test_a_bound_session_may_be_the_probe_of_its_own_node() -> None:
    bench = Bench(service_of(2)).bound(1)
    trip(bench.node(1).breaker, 0.0)
    assert bench.served(10.0) == ("h1:80", "bound")


@pytest.mark.parametrize("why", ["full", "tried"])
def test_it_does_not_return_to_a_home_that_cannot_take_this_request(why: str) -> None:
    bench = Bench(service_of(2)).bound(1)
    trip(bench.node(1).breaker, 0.0)
    bench.served(0.0)
    record(bench.node(1).breaker, S, 10.0, times=2)
    if why == "full":
        bench.node(1).overload_until = 20.0
    assert bench.served(10.0, S, *((1,) if why == "tried" else ())) == ("h2:80", "bound")
    assert bench.served(20.0) == ("h1:80", "returned")


def test_a_probe_elsewhere_moves_no_session() -> None:
    bench = Bench(service_of(2)).bound(1)
    trip(bench.node(2).breaker, 0.0)
    assert bench.served(10.0) == ("h2:80", "")
    trip(bench.node(1).breaker, 10.0)
    assert bench.served(10.0) == ("h2:80", "")
    assert bench.session.node_key == "h1:80"


def test_a_session_that_had_to_move_twice_returns_to_its_first_home() -> None:
    bench = Bench(service_of(3)).bound(1)
    trip(bench.node(1).breaker, 0.0)
    second, affinity = bench.served(0.0)
    assert affinity == "moved"
    trip(bench.service.nodes[EndpointKey(second)].breaker, 0.0)
    third, affinity = bench.served(0.0)
    assert affinity == "moved" and third not in (second, "h1:80")
    record(bench.node(1).breaker, S, 10.0, times=2)
    record(bench.service.nodes[EndpointKey(second)].breaker, S, 10.0, times=2)
    assert bench.served(10.0) == ("h1:80", "returned")
    assert bench.served(10.0) == ("h1:80", "bound")


def test_the_binding_is_written_only_after_the_node_accepted() -> None:
    """T13: the connect to b fails while the session is being moved."""
    bench = Bench(service_of(3)).bound(1)
    trip(bench.node(1).breaker, 0.0)
    failed = chosen(bench.ask(0.0))
    assert failed.affinity == "moved"
    assert (bench.session.node_key, bench.session.home_key) == ("h1:80", None)
    again = chosen(pick(bench.service, bench.session, None, "m", {failed.node.key}, 0.0, bench.fleet.chance))
    assert again.affinity == "moved" and again.node is not failed.node
    bind(bench.session, again, 0.0)
    assert (bench.session.node_key, bench.session.home_key) == (again.node.key, "h1:80")


def test_of_two_requests_that_move_a_session_at_once_the_first_to_be_accepted_decides() -> None:
    bench = Bench(service_of(3)).bound(1)
    trip(bench.node(1).breaker, 0.0)
    one = chosen(bench.ask(0.0))
    other = chosen(pick(bench.service, bench.session, None, "m", {one.node.key}, 0.0, bench.fleet.chance))
    bind(bench.session, other, 0.0)
    bind(bench.session, one, 0.0)
    assert (bench.session.node_key, bench.session.home_key) == (other.node.key, "h1:80")


def test_of_two_first_requests_the_first_to_be_accepted_binds() -> None:
    bench = Bench(service_of(2))
    one = chosen(bench.ask(0.0))
    other = chosen(bench.ask(0.0, int(one.node.key[1])))
    bind(bench.session, other, 0.0)
    bind(bench.session, one, 0.0)
    assert bench.session.node_key == other.node.key


def test_a_return_that_another_request_overtook_changes_nothing() -> None:
    bench = Bench(service_of(2)).bound(1)
    trip(bench.node(1).breaker, 0.0)
    bench.served(0.0)
    record(bench.node(1).breaker, S, 10.0, times=2)
    one, other = chosen(bench.ask(10.0)), chosen(bench.ask(10.0))
    assert one.affinity == other.affinity == "returned"
    bind(bench.session, one, 10.0)
    trip(bench.node(1).breaker, 50.0)
    bench.served(50.0)
    assert bench.session.node_key == "h2:80"
    bind(bench.session, one, 50.0)
    assert bench.session.node_key == "h1:80"
    bind(bench.session, other, 50.0)
    assert (bench.session.node_key, bench.session.home_key) == ("h1:80", None)


def test_a_probe_binds_no_new_session() -> None:
    bench = Bench(service_of(1))
    trip(bench.node(1).breaker, 0.0)
    assert bench.served(10.0) == ("h1:80", "")
    assert bench.session.node_key is None


def test_affinity_off_forgets() -> None:
    bench = Bench(service_of(2, balance=Balance(affinity="off"))).bound(1)
    bench.node(1).in_flight = 1
    assert [bench.served(0.0) for _ in range(5)] == [("h2:80", "")] * 5


def test_a_session_leaves_the_node_of_a_version_that_was_not_chosen() -> None:
    """T13: bound to canary v2, canary aborted."""
    bench = Bench(service_of(4, v1=1, v2=1)).bound(2)
    found, affinity = bench.served(0.0, version="v1")
    assert found in ("h1:80", "h3:80") and affinity == "moved"
    assert bench.session.version == "v1"
    assert bench.served(0.0, version="v1") == (found, "bound")
    assert bench.served(0.0, version="v2") == ("h2:80", "returned")


def test_a_full_node_of_another_version_is_a_detour_too() -> None:
    bench = Bench(service_of(4, v1=1, v2=1)).bound(2)
    bench.node(2).overload_until = 5.0
    _, affinity = bench.served(0.0, version="v1")
    assert affinity == "" and bench.session.node_key == "h2:80"


def test_a_node_that_cannot_do_it_keeps_its_session_while_another_version_serves() -> None:
    bench = Bench(service_of(4, v1=1, v2=1)).bound(2)
    for _ in range(3):
        found, affinity = bench.served(0.0, S, 2, 4, version="v1")
        assert found in ("h1:80", "h3:80") and affinity == ""
        assert (bench.session.node_key, bench.session.version) == ("h2:80", "v2")
    assert bench.served(0.0, version="v2") == ("h2:80", "bound")


def test_a_request_that_some_cannot_serve_probes_as_any_other() -> None:
    bench = Bench(service_of(3))
    trip(bench.node(1).breaker, 0.0)
    tried, chance = [key(2)], bench.fleet.chance
    assert chosen(pick(bench.service, None, None, "m", tried, 10.0, chance)).node.key == "h3:80"  # it was re-sent
    choice = chosen(pick(bench.service, None, None, "m", tried, 10.0, chance, barred=1))
    assert (choice.node.key, choice.permit.probe) == ("h1:80", True)


def test_all_open_refuses_a_bound_session_as_everybody() -> None:
    bench = Bench(service_of(2)).bound(1)
    for number in (1, 2):
        trip(bench.node(number).breaker, 0.0)
    for _ in range(3):
        assert bench.ask(1.0) == Unavailable(Reason.BREAKER_OPEN, 10.0)
    assert bench.session.node_key == "h1:80"


# --- the crowd ------------------------------------------------------------------------------------------------------


def test_load_dependent_slowness_does_not_make_the_share_hunt() -> None:
    """T26, the balancer's part: a gets slower with load, b is slow always; the share of a settles."""
    bench = Bench(service_of(2), seed=5)
    ends: list[tuple[float, Node]] = []
    shares = []
    luck = random.Random(3)
    now, to_a, asked = 0.0, 0, 0
    for _ in range(40 * 120):
        now += luck.expovariate(40)
        for end, busy in ends:
            if end <= now:
                busy.in_flight -= 1
        ends = [(end, busy) for end, busy in ends if end > now]
        taken = chosen(bench.pick(now)).node
        taken.in_flight += 1
        ends.append((now + (0.5 + 0.1 * taken.in_flight if taken.key == "h1:80" else 2.0), taken))
        to_a += taken.key == "h1:80"
        asked += 1
        if asked == 400:
            shares.append(to_a / asked)
            to_a = asked = 0
    settled = shares[2:]
    assert max(settled) - min(settled) < 0.15, settled


@pytest.mark.parametrize("local", [False, True])
def test_who_has_just_recovered_gets_a_growing_share(local: bool) -> None:
    policy = service_of(2, balance=Balance(local_first=local))
    first, other = policy.endpoints
    bench = Bench(msgspec.structs.replace(policy, endpoints=(msgspec.structs.replace(first, local=local), other)))
    breaker = bench.node(1).breaker
    assert breaker.trip("fast", "x", 1, Adaptive(ramp_s=Seconds(10)), 0.0) is not None
    for _ in range(2):
        breaker.record(permitted(breaker, 20.0), S, 20.0)
    assert breaker.ramp_until == 30.0
    shares = []
    for now in (20.0, 25.0, 29.0, 30.0):
        asked = [chosen(bench.pick(now)).node.key for _ in range(1000)]
        shares.append(asked.count(EndpointKey("h1:80")) / 1000)
    assert shares == sorted(shares) and shares[0] < 0.25 and shares[-1] > (0.99 if local else 0.4)


class Choices(RuleBasedStateMachine):
    """Any history of one service; after each step every kind of request is chosen for as plain reckoning says.

    This is what holds the short cuts (pools, probes not looked for, refusals remembered) to the rules.
    """

    MODELS = ("m", "lora")
    VERSIONS = (None, VersionName("v1"), VersionName("v2"))

    @initialize(count=st.integers(1, 10), seed=st.integers(0, 99), probes=st.integers(1, 2))
    def start(self, count: int, seed: int, probes: int) -> None:
        self.rule = msgspec.structs.replace(
            RULE, consecutive=1, open_s=Seconds(5), open_max_s=Seconds(20), successes=1, probes=probes
        )
        self.fleet = Fleet(random.Random(seed).random)
        self.now = 0.0
        self.out: list[tuple[Node, Permit]] = []
        self.count = count
        self.apply()

    def apply(self) -> None:
        self.fleet.apply(snapshot_of(service_of(self.count, self.rule, v1=1, v2=1)), self.now)
        self.service = next(iter(self.fleet.services.values()))

    def some(self, data: st.DataObject) -> Node:
        return data.draw(st.sampled_from(list(self.service.nodes.values())))

    @rule(step=st.floats(0, 12))
    def later(self, step: float) -> None:
        self.now += step

    @rule(data=st.data())
    def fails(self, data: st.DataObject) -> None:
        breaker = self.some(data).breaker
        permit = breaker.acquire(self.now)
        if isinstance(permit, Permit):
            breaker.record(permit, F, self.now, "x")

    @rule()
    def all_fail(self) -> None:
        for each in self.service.nodes.values():
            permit = each.breaker.acquire(self.now)
            if isinstance(permit, Permit):
                each.breaker.record(permit, F, self.now, "x")

    @rule(data=st.data(), wait_s=st.floats(0, 10))
    def is_full(self, data: st.DataObject, wait_s: float) -> None:
        self.service.overloaded(self.some(data), wait_s, self.now)

    @rule(data=st.data(), draining=st.booleans())
    def drains(self, data: st.DataObject, draining: bool) -> None:
        self.some(data).draining = draining

    @rule(data=st.data(), models=st.sampled_from([None, frozenset({"m"}), frozenset({"lora"}), frozenset[str]()]))
    def reports(self, data: st.DataObject, models: frozenset[str] | None) -> None:
        self.some(data).models = models

    @rule(data=st.data(), action=st.sampled_from(["open", "close", "reset"]))
    def is_ordered(self, data: st.DataObject, action: Action) -> None:
        self.some(data).breaker.force(action, self.now, "ann")

    @rule(
        count=st.integers(1, 10),
        mode=st.sampled_from(["enforce", "enforce", "shadow", "off"]),
        probes=st.integers(1, 2),
    )
    def reloads(self, count: int, mode: Mode, probes: int) -> None:
        self.count = count
        self.rule = msgspec.structs.replace(self.rule, mode=mode, probes=probes)
        self.apply()

    @rule(data=st.data(), result=st.sampled_from(Result))
    def ends(self, data: st.DataObject, result: Result) -> None:
        if self.out:
            taken, permit = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
            taken.breaker.record(permit, result, self.now, "x")

    @rule(data=st.data(), model=st.sampled_from(["", *MODELS]), version=st.sampled_from(VERSIONS), some=st.booleans())
    def asks(self, data: st.DataObject, model: str, version: VersionName | None, some: bool) -> None:
        tried = frozenset[EndpointKey]()
        if some:
            tried = data.draw(st.frozensets(st.sampled_from([*self.service.nodes])))
        found = self.check(model, version, tried)
        if isinstance(found, Choice):
            self.out.append((found.node, found.permit))

    def check(self, model: str, version: VersionName | None, tried: frozenset[EndpointKey]) -> Choice | Unavailable:
        """Picks, having reckoned what may come of it."""
        now, enforced = self.now, self.rule.mode == "enforce"
        of_version = [n for n in self.service.nodes.values() if not n.draining and version in (None, n.version)]
        serving = [n for n in of_version if not model or n.models is None or model in n.models]
        rest = [n for n in serving if n.key not in tried]
        calm = [n for n in rest if n.overload_until <= now]
        usable = [n for n in calm if n.breaker.passes]
        probing = [n for n in calm if not n.breaker.passes and n.breaker.can_probe(now)]
        could = [n for n in rest if n.breaker.passes or n.breaker.can_probe(now)]
        retries = [max(n.overload_until, n.breaker.retry_at(now)) for n in rest]
        found = pick(self.service, None, version, model, tried, now, self.fleet.chance)
        if isinstance(found, Choice):
            assert found.node in (probing if probing and not tried else usable or probing)
            assert found.affinity == ""
            if enforced:
                assert found.permit.probe == (found.node in probing)
            return found
        assert not usable and not probing
        if of_version and not serving and all(n.models for n in of_version):
            assert found == Unavailable(Reason.UNKNOWN_MODEL, None)
        elif not rest:
            assert found == Unavailable(Reason.NO_ENDPOINT, None)
        elif could:
            assert found == Unavailable(Reason.OVERLOADED, min(retries))
        else:
            # A hint that was right when first given stands until it is due.
            assert found.reason is Reason.BREAKER_OPEN and found.retry_at is not None
            assert now < found.retry_at <= min(retries)
        return found

    @invariant()
    def everybody_is_chosen_for_by_the_rules(self) -> None:
        if not hasattr(self, "service"):
            return
        for model in self.MODELS:
            for version in self.VERSIONS:
                found = self.check(model, version, frozenset())
                if isinstance(found, Choice):
                    found.node.breaker.record(found.permit, I, self.now, "x")
        assert all(n.breaker.probes_out <= 2 for n in self.service.nodes.values())


Choices.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestChoices = Choices.TestCase


def test_breakers_of_the_policy_reach_the_nodes() -> None:
    policy = Service(
        name="a",
        endpoints=(Endpoint(url="http://h1:80"), Endpoint(url="http://h2:80")),
        breakers=Breakers(node=msgspec.structs.replace(RULE, consecutive=2, min_closed_ratio=0.5)),
    )
    bench = Bench(policy)
    for number in (1, 2):
        for _ in range(5):
            permit = bench.node(number).breaker.acquire(0.0)
            if isinstance(permit, Permit):
                bench.node(number).breaker.record(permit, F, 0.0, "x")
    assert [bench.node(n).breaker.state for n in (1, 2)] == [State.OPEN, State.CLOSED]


# --- what is no inference -------------------------------------------------------------------------------------------


def other(bench: Bench, now: float) -> Choice | Unavailable:
    return pick(bench.service, None, None, "", (), now, bench.fleet.chance, may_probe=False)


def test_what_proves_nothing_leaves_the_probes_place_to_others() -> None:
    bench = Bench(service_of(2))
    trip(bench.node(1).breaker, 0.0)
    waited = RULE.open_s + 1.0
    assert {chosen(other(bench, waited)).node.key for _ in range(20)} == {key(2)}
    assert bench.node(1).breaker.state is State.OPEN
    assert chosen(bench.pick(waited)).node.key == key(1)


def test_what_proves_nothing_goes_beside_the_probes_when_nobody_else_is_left() -> None:
    bench = Bench(service_of(1))
    breaker = bench.node(1).breaker
    trip(breaker, 0.0)
    assert refused(other(bench, 0.1)).reason is Reason.BREAKER_OPEN
    waited = RULE.open_s + 1.0
    choice = chosen(other(bench, waited))
    assert not choice.permit.probe and breaker.can_probe(waited)
    assert breaker.record(choice.permit, F, waited, "x") is None
    probe = chosen(bench.pick(waited))
    assert probe.permit.probe
    assert chosen(other(bench, waited)).node.key == key(1), "while the probe is out"
    breaker.force("open", waited, "somebody")
    assert refused(other(bench, waited)).reason is Reason.BREAKER_OPEN


# Zones that are turned down.


def zoned(per_zone: int, decayed: float, balance: Balance | None = None, local: str = "") -> ServiceState:
    """Zones a, b and c; a gets `decayed` of what it would."""
    endpoints = tuple(
        Endpoint(url=f"http://{zone}{number}:80", zone=zone, local=zone == local)
        for zone in "abc"
        for number in range(per_zone)
    )
    service = Service(
        name="chat",
        endpoints=endpoints,
        zone_decay=ZoneDecay(),
        breakers=Breakers(node=RULE),
        balance=balance or Balance(),
    )
    state = fleet_of(service)[1]
    state.turn({"a": decayed, "gone": 0.5})
    return state


def share_of_a(state: ServiceState, n: int, *, busy: bool = False, sessions: bool = False) -> float:
    """Requests that go to zone a, of `n`. `busy`: each stays in flight until twenty more came."""
    chance, flying, found = random.Random(7).random, deque[Node](), 0
    for number in range(n):
        session = state.session(SessionId(f"s{number}"), 0.0) if sessions else None
        choice = chosen(pick(state, session, None, "m", (), 0.0, chance))
        if session is not None:
            bind(session, choice, 0.0)
        found += choice.node.endpoint.zone == "a"
        if busy:
            choice.node.in_flight += 1
            flying.append(choice.node)
            if len(flying) > 20:
                flying.popleft().in_flight -= 1
    return found / n


def within(share: float, expected: float, n: int) -> bool:
    """Three sigma."""
    return abs(share - expected) <= 3 * sqrt(expected * (1 - expected) / n)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("per_zone", [1, 3, 100])
@pytest.mark.parametrize("decayed", [0.0, 0.1, 0.5])
def test_a_zone_that_is_turned_down_gets_its_share(per_zone: int, decayed: float, busy: bool) -> None:
    state = zoned(per_zone, decayed)
    assert within(share_of_a(state, 20_000, busy=busy), decayed / (2 + decayed), 20_000)


def test_the_share_holds_where_nearly_all_are_turned_down() -> None:
    state = zoned(2, 1.0)
    state.turn({"a": 0.1, "b": 0.1})
    assert within(share_of_a(state, 20_000), 0.1 / 1.2, 20_000)
    one = Endpoint(url="http://d:80", zone="d")
    many = tuple(Endpoint(url=f"http://a{number}:80", zone="a") for number in range(200))
    state = fleet_of(Service(name="chat", endpoints=(one, *many), zone_decay=ZoneDecay()))[1]
    state.turn({"a": 0.1})
    assert within(share_of_a(state, 20_000), 20 / 21, 20_000)


def test_new_sessions_follow_the_share_and_stay_where_they_are() -> None:
    state = zoned(3, 0.1)
    assert within(share_of_a(state, 20_000, sessions=True), 0.1 / 2.1, 20_000)
    for _ in range(3):
        assert all(
            chosen(pick(state, session, None, "m", (), 0.0, random.Random(1).random)).affinity == "bound"
            for session in state.sessions.values()
        )


def test_where_all_are_turned_down_they_share_as_ever() -> None:
    state = zoned(3, 0.1)
    state.turn({"a": 0.1, "b": 0.1, "c": 0.1})
    assert within(share_of_a(state, 20_000, sessions=True), 1 / 3, 20_000)
    state.turn({"a": 0.0, "b": 0.0, "c": 0.0})
    assert within(share_of_a(state, 20_000), 1 / 3, 20_000)
    session = state.session(SessionId("s1"), 0.0)
    assert chosen(pick(state, session, None, "m", (), 0.0, lambda: 0.5)).affinity == "bound", "nowhere better to go"


def test_bound_sessions_leave_all_but_the_share_and_come_home_as_it_grows() -> None:
    state, chance = zoned(3, 1.0), random.Random(3).random
    share_of_a(state, 6000, sessions=True)
    at_home = [session for session in state.sessions.values() if (session.node_key or "").startswith("a")]
    assert 1800 < len(at_home) < 2200

    def asked() -> dict[SessionId, str]:
        said: dict[SessionId, str] = {}
        for session in at_home:
            choice = chosen(pick(state, session, None, "m", (), 0.0, chance))
            bind(session, choice, 0.0)
            said[session.id] = choice.affinity
        return said

    def there() -> set[SessionId]:
        return {session.id for session in at_home if (session.node_key or "").startswith("a")}

    assert set(asked().values()) == {"bound"}
    before = there()
    for share in (0.5, 0.1):
        state.turn({"a": share})
        assert set(asked().values()) == {"bound", "moved"}
        assert there() < before, "the same ones stay"
        before = there()
        assert within(len(before) / len(at_home), share, len(at_home))
        assert set(asked().values()) == {"bound"}, "no ping-pong"
    for share in (0.25, 0.5, 1.0):
        state.turn({"a": share})
        assert set(asked().values()) == {"bound", "returned"}
        assert there() > before
        before = there()
        assert within(len(before) / len(at_home), share, len(at_home)) or share == 1.0
        assert set(asked().values()) == {"bound"}
    assert len(before) == len(at_home)


def test_local_endpoints_that_are_turned_down_keep_their_share_and_leave_the_rest_to_other_zones() -> None:
    state = zoned(3, 0.1, Balance(local_first=True), local="a")
    assert within(share_of_a(state, 20_000), 0.1, 20_000)
    state.turn({"b": 0.1})
    assert share_of_a(state, 1000) == 1.0


def test_a_zone_that_is_turned_down_has_its_probes() -> None:
    state = zoned(1, 0.0)
    slow = next(node for node in state.nodes.values() if node.endpoint.zone == "a")
    trip(slow.breaker, 0.0)
    choice = chosen(pick(state, None, None, "m", (), 20.0, lambda: 0.5))
    assert choice.node is slow and choice.permit.probe


def test_a_request_that_was_tried_in_the_other_zones_gets_the_one_that_is_turned_down() -> None:
    state = zoned(1, 0.0)
    tried = [node.key for node in state.nodes.values() if node.endpoint.zone != "a"]
    assert chosen(pick(state, None, None, "m", tried, 0.0, lambda: 0.5)).node.endpoint.zone == "a"
    assert refused(pick(state, None, None, "m", list(state.nodes), 0.0, lambda: 0.5)).reason is Reason.NO_ENDPOINT


def test_what_a_session_was_bound_at_is_its_whole() -> None:
    state, chance = zoned(3, 0.5), random.Random(3).random
    share_of_a(state, 6000, sessions=True)
    there = [session for session in state.sessions.values() if (session.node_key or "").startswith("a")]
    state.turn({"a": 0.25})
    stay = sum(chosen(pick(state, session, None, "m", (), 0.0, chance)).affinity == "bound" for session in there)
    assert within(stay / len(there), 0.5, len(there))


# --- limits ---------------------------------------------------------------------------------------------------------


def limited(*room: int, balance: Balance | None = None) -> ServiceState:
    """Endpoints with so much room each, all of them at the same load."""
    _, service = fleet_of(service_of(len(room), balance=balance))
    for node, free in zip(service.nodes.values(), room, strict=True):
        node.in_flight = 10
        node.limit = 10 + free
    return service


@pytest.mark.parametrize("count", [2, 3, 8, 9, 50])
def test_the_one_with_room_is_found_among_those_at_their_limits(count: int) -> None:
    service = limited(*[0] * (count - 1), 1)
    for seed in range(20):
        choice = chosen(pick(service, None, None, "m", (), 0.0, random.Random(seed).random))
        assert choice.node.key == f"h{count}:80"


def test_where_all_are_at_their_limits_the_limits_are_ignored() -> None:
    service = limited(0, 0, 0)
    picked = Counter(
        chosen(pick(service, None, None, "m", (), 0.0, random.Random(seed).random)).node.key for seed in range(300)
    )
    assert len(picked) == 3


def test_a_session_whose_node_is_at_its_limit_makes_a_detour_and_the_binding_stays() -> None:
    service, chance = limited(0, 1), random.Random(1).random
    session = service.session(SessionId("s"), 0.0)
    session.node_key = EndpointKey("h1:80")
    detour = chosen(pick(service, session, None, "m", (), 0.0, chance))
    assert detour.node.key == "h2:80" and detour.affinity == ""
    bind(session, detour, 0.0)
    assert session.node_key == "h1:80"
    service.nodes[EndpointKey("h2:80")].limit = 10
    assert chosen(pick(service, session, None, "m", (), 0.0, chance)).affinity == "bound"
    service.nodes[EndpointKey("h2:80")].limit = 11
    tried = [EndpointKey("h2:80")]
    assert chosen(pick(service, session, None, "m", tried, 0.0, chance)).node.key == "h1:80"


def test_nobody_returns_home_to_a_node_at_its_limit() -> None:
    service, chance = limited(0, 1), random.Random(1).random
    session = service.session(SessionId("s"), 0.0)
    session.node_key, session.home_key = EndpointKey("h2:80"), EndpointKey("h1:80")
    assert chosen(pick(service, session, None, "m", (), 0.0, chance)).affinity == "bound"
    service.nodes[EndpointKey("h1:80")].limit = 11
    assert chosen(pick(service, session, None, "m", (), 0.0, chance)).affinity == "returned"


def test_local_ones_with_room_come_before_others_with_room() -> None:
    policy = service_of(4, balance=Balance(local_first=True))
    endpoints = tuple(
        msgspec.structs.replace(endpoint, local=place < 2) for place, endpoint in enumerate(policy.endpoints)
    )
    _, service = fleet_of(msgspec.structs.replace(policy, endpoints=endpoints))
    nodes = list(service.nodes.values())
    nodes[0].limit = 0
    for seed in range(30):
        assert chosen(pick(service, None, None, "m", (), 0.0, random.Random(seed).random)).node is nodes[1]
    nodes[1].limit = 0
    for seed in range(30):
        assert chosen(pick(service, None, None, "m", (), 0.0, random.Random(seed).random)).node in nodes[2:]
