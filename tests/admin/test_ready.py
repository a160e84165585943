"""Readiness: whether requests should come, from phase, policy and breakers alone."""

from collections.abc import Callable
from typing import Literal

import msgspec
import pytest

from sidecar.admin.facts import Phase
from sidecar.admin.ready import Readiness, readiness, usable
from sidecar.core.breaker import Permit, State
from sidecar.core.pool import Node
from sidecar.policy.schema import Breakers, Endpoint, HealthCheck, NodeBreaker, Seconds
from tests.admin.facts import CHAT, A, B, StillFacts, breaker, service, snapshot, trip

ReadyWhen = Literal["local", "any", "always"]

OPEN_S = 10.0


def asked(facts: StillFacts) -> Readiness:
    return readiness(facts.phase, facts.store.current, facts.fleet, facts.now())


def node(facts: StillFacts) -> Node:
    return facts.fleet.services[CHAT].nodes[A]


@pytest.mark.parametrize("ready_when", ["local", "any", "always"])
@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.DRAINING])
def test_only_a_serving_process_is_ready(phase: Phase, ready_when: ReadyWhen) -> None:
    facts = StillFacts(snapshot(service(Endpoint(url=f"http://{A}", local=True)), ready_when=ready_when))
    assert asked(facts).ready
    facts.phase = phase
    assert asked(facts) == Readiness(False, phase.value)


@pytest.mark.parametrize(
    ("ready_when", "endpoints", "tripped", "reason"),
    [
        pytest.param("always", (), (), "", id="always, without endpoints"),
        pytest.param("always", (A,), (A,), "", id="always, all open"),
        pytest.param("any", (A, B), (), "", id="any, all closed"),
        pytest.param("any", (A, B), (A,), "", id="any, one closed"),
        pytest.param("any", (A, B), (A, B), "no endpoint is usable", id="any, all open"),
        pytest.param("any", (), (), "no endpoint is usable", id="any, without endpoints"),
        pytest.param("local", (A, B), (), "no endpoint is marked local", id="local, none marked"),
    ],
)
def test_ready_when(ready_when: ReadyWhen, endpoints: tuple[str, ...], tripped: tuple[str, ...], reason: str) -> None:
    facts = StillFacts(snapshot(service(*endpoints), ready_when=ready_when))
    trip([breaker(facts, key) for key in (A, B) if key in tripped], 1000.0)
    assert asked(facts) == Readiness(not reason, reason)


@pytest.mark.parametrize(("tripped", "ready"), [(A, False), (B, True)], ids=["local open", "other open"])
def test_only_the_local_endpoint_counts_where_policy_says_so(tripped: str, ready: bool) -> None:
    local, other = Endpoint(url=f"http://{A}", local=True), Endpoint(url=f"http://{B}")
    facts = StillFacts(snapshot(service(local, other), ready_when="local"))
    trip([breaker(facts, A if tripped == A else B)], 1000.0)
    assert asked(facts) == Readiness(ready, "" if ready else "no local endpoint is usable")


def test_endpoint_of_any_service_makes_ready() -> None:
    facts = StillFacts(snapshot(service(A), service(B, name="other")))
    trip([breaker(facts, A)], 1000.0)
    assert asked(facts).ready


def opened(facts: StillFacts) -> None:
    trip([breaker(facts)], facts.now())


def waited(facts: StillFacts) -> None:
    opened(facts)
    facts.monotonic_s += OPEN_S


def all_probes_out(facts: StillFacts) -> None:
    waited(facts)
    assert isinstance(breaker(facts).acquire(facts.now()), Permit)
    assert breaker(facts).state is State.HALF_OPEN
    assert not breaker(facts).can_probe(facts.now())


def held_open(facts: StillFacts) -> None:
    breaker(facts).force("open", facts.now(), "operator")
    facts.monotonic_s += 10 * OPEN_S


def ordered_to_stay_closed(facts: StillFacts) -> None:
    breaker(facts).force("hold", facts.now(), "operator")


def ordered_to_stay_open(facts: StillFacts) -> None:
    waited(facts)
    breaker(facts).force("hold", facts.now(), "operator")


def order_over(facts: StillFacts) -> None:
    breaker(facts).force("open", facts.now(), "operator", facts.now() + 60.0)
    facts.monotonic_s += 61.0


def leaving(facts: StillFacts) -> None:
    node(facts).draining = True


def overloaded(facts: StillFacts) -> None:
    node(facts).overload_until = facts.now() + 60


def unhealthy(facts: StillFacts) -> None:
    node(facts).healthy = False


def nothing(facts: StillFacts) -> None:
    pass


@pytest.mark.parametrize(
    ("happened", "expected"),
    [
        pytest.param(nothing, True, id="closed"),
        pytest.param(opened, False, id="open"),
        pytest.param(waited, True, id="open with its wait over: the next request is its probe"),
        pytest.param(all_probes_out, True, id="half-open with its probes out"),
        pytest.param(held_open, False, id="held open by an operator"),
        pytest.param(ordered_to_stay_closed, True, id="held as it was, closed"),
        pytest.param(ordered_to_stay_open, False, id="held as it was, open with its wait over"),
        pytest.param(order_over, True, id="held open for a minute that is over"),
        pytest.param(leaving, False, id="leaving the policy"),
        pytest.param(overloaded, True, id="overloaded"),
        pytest.param(unhealthy, True, id="health check failed: no evidence"),
    ],
)
def test_usable(happened: Callable[[StillFacts], None], expected: bool) -> None:
    facts = StillFacts(snapshot(service(A)))
    happened(facts)
    assert usable(node(facts), facts.now()) is expected
    assert asked(facts).ready is expected


def test_shadow_breaker_makes_nothing_unusable() -> None:
    rule = NodeBreaker(mode="shadow", min_closed_ratio=0.0, open_s=Seconds(OPEN_S))
    plain = service(A)
    facts = StillFacts(snapshot(msgspec.structs.replace(plain, breakers=Breakers(node=rule))))
    opened(facts)
    assert breaker(facts).state is State.OPEN
    assert asked(facts).ready


@pytest.mark.parametrize("ready_when", ["local", "any"])
def test_an_engine_that_has_never_answered_a_health_check_is_not_ready_yet(ready_when: ReadyWhen) -> None:
    checked = msgspec.structs.replace(
        service(Endpoint(url=f"http://{A}", local=True)), health_check=HealthCheck(mode="load")
    )
    facts = StillFacts(snapshot(checked, ready_when=ready_when))
    assert asked(facts) == Readiness(False, "no endpoint has answered a health check yet")
    node(facts).heard = True
    assert asked(facts).ready
    node(facts).healthy = False  # it fell silent: that is for its breaker to judge
    assert asked(facts).ready
