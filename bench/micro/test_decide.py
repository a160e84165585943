"""Deciding: breakers, windows, who a request is of, which service, version and endpoint. Budgets in ns per unit.

They are half as much again as what it took when they were set, so that noise passes and a mistake does not.
"""

import random

import pytest
from msgspec.structs import replace

from bench.micro.conftest import Budgeted
from sidecar.core.balance import Choice, pick
from sidecar.core.breaker import Breaker, Permit, Scope
from sidecar.core.budget import RetryBudget
from sidecar.core.classes import Classes
from sidecar.core.fleet import Fleet
from sidecar.core.identify import Identifier
from sidecar.core.service import ServiceState
from sidecar.core.split import pick_version
from sidecar.core.window import Window
from sidecar.kernel.ids import SessionId
from sidecar.kernel.outcome import Result
from sidecar.policy.schema import (
    Endpoint,
    Identity,
    NodeBreaker,
    QosMatch,
    QosPolicy,
    Service,
    Snapshot,
    ZoneDecay,
)
from sidecar.wire.headers import PASSED, Line

ACQUIRE_RECORD_NS = 450
WINDOW_COUNT_NS = 160
RETRY_BUDGET_NS = 190
IDENTIFY_NS = 1250
CLASSIFY_NS = 1000
SERVICE_FOR_NS = 100
SESSION_NS = 190
PICK_NS = {1: 1500, 100: 1500, 10_000: 2600}
PICK_BOUND_NS = 800
PICK_SPARED_NS = 1500
PICK_VERSION_NS = 550

UNITS = 200
HEADERS = [
    Line(name, value, PASSED, b"")
    for name, value in (
        (b"host", b"127.0.0.1:9400"),
        (b"user-agent", b"python-httpx/0.28.1"),
        (b"accept", b"*/*"),
        (b"content-type", b"application/json"),
        (b"authorization", b"Bearer x"),
        (b"x-session-id", b"0123abcd-4b6e-4c1d-9d3e-5b1f0a2c7e88"),
        (b"content-length", b"1024"),
    )
]


def fleet_of(*services: Service) -> Fleet:
    fleet = Fleet(random.Random(1).random)
    fleet.apply(Snapshot(version=1, services=services), 0.0)
    return fleet


def service_of(count: int, name: str = "chat", models: tuple[str, ...] = ("*",), split: bool = False) -> Service:
    endpoints = tuple(
        Endpoint(url=f"http://h{number}:80", version="v2" if split and number % 10 == 1 else "v1")
        for number in range(count)
    )
    parts = {"v1": 95.0, "v2": 5.0} if split else {}
    return Service(name=name, models=models, endpoints=endpoints, split=parts)


def state_of(service: Service) -> tuple[Fleet, ServiceState]:
    fleet = fleet_of(service)
    return fleet, next(iter(fleet.services.values()))


def test_breaker_acquire_and_record(budget: Budgeted) -> None:
    breaker = Breaker(Scope.NODE, "h:80", "chat", NodeBreaker(), 0.0, lease_s=600.0)

    def run() -> None:
        for _ in range(UNITS):
            permit = breaker.acquire(1.0)
            assert isinstance(permit, Permit)
            breaker.record(permit, Result.SUCCESS, 1.0)

    budget(ACQUIRE_RECORD_NS, run, UNITS)


def test_window_count(budget: Budgeted) -> None:
    window, moments = Window(10.0, 0.0), [number / 100 for number in range(UNITS)]

    def run() -> None:
        for now in moments:
            window.count(now, False)

    budget(WINDOW_COUNT_NS, run, UNITS)


def test_retry_budget_request(budget: Budgeted) -> None:
    retries, moments = RetryBudget(0.2, 3, 10.0), [number / 100 for number in range(UNITS)]

    def run() -> None:
        for now in moments:
            retries.request(now)

    budget(RETRY_BUDGET_NS, run, UNITS)


def test_identify(budget: Budgeted) -> None:
    identifier = Identifier(Identity())
    assert identifier.identify(HEADERS, "").session

    def run() -> None:
        for _ in range(UNITS):
            identifier.identify(HEADERS, "u1")

    budget(IDENTIFY_NS, run, UNITS)


def test_classify(budget: Budgeted) -> None:
    matches = {"voice": QosMatch(header="x-kind", value="voice"), "gold": QosMatch(tenant="acme")}
    matches["batch"] = QosMatch(model="*-batch")
    classes = Classes(tuple(QosPolicy(name=name, latency_sla_ms=300, match=(m,)) for name, m in matches.items()))

    def run() -> None:
        for _ in range(UNITS):
            classes.classify("", HEADERS, {}, b"/v1/chat/completions", "llama-3", "t1", "")

    assert classes.classify("", HEADERS, {}, b"/v1/chat/completions", "llama-3", "t1", "") is classes.default
    budget(CLASSIFY_NS, run, UNITS)


@pytest.mark.parametrize("count", [1, 1000])
def test_service_for(budget: Budgeted, count: int) -> None:
    fleet = fleet_of(*(service_of(1, f"s{number}", (f"model-{number}",)) for number in range(count)))
    models = [f"model-{number % count}" for number in range(UNITS)]
    for model in models:
        assert fleet.service_for(model) is not None

    def run() -> None:
        for model in models:
            fleet.service_for(model)

    budget(SERVICE_FOR_NS, run, UNITS)


@pytest.mark.parametrize("count", [1, 100_000])
def test_session(budget: Budgeted, count: int) -> None:
    _, state = state_of(service_of(1))
    names = [SessionId(f"session-{number}") for number in range(count)]
    for name in names:
        state.session(name, 0.0)
    chance = random.Random(1)
    asked = [chance.choice(names) for _ in range(UNITS)]

    def run() -> None:
        for name in asked:
            state.session(name, 1.0)

    budget(SESSION_NS, run, UNITS)


@pytest.mark.parametrize("count", [1, 100, 10_000])
def test_pick(budget: Budgeted, count: int) -> None:
    fleet, state = state_of(service_of(count))

    def run() -> None:
        for _ in range(UNITS):
            pick(state, None, None, "m", (), 1.0, fleet.chance)

    assert isinstance(pick(state, None, None, "m", (), 1.0, fleet.chance), Choice)
    budget(PICK_NS[count], run, UNITS)


@pytest.mark.parametrize("count", [100, 10_000])
def test_pick_of_a_bound_session(budget: Budgeted, count: int) -> None:
    fleet, state = state_of(service_of(count))
    session = state.session(SessionId("s"), 0.0)
    session.node_key = next(iter(state.nodes))
    found = pick(state, session, None, "m", (), 1.0, fleet.chance)
    assert isinstance(found, Choice) and found.affinity == "bound"

    def run() -> None:
        for _ in range(UNITS):
            pick(state, session, None, "m", (), 1.0, fleet.chance)

    budget(PICK_BOUND_NS, run, UNITS)


@pytest.mark.parametrize("count", [100, 10_000])
def test_pick_while_a_zone_is_turned_down(budget: Budgeted, count: int) -> None:
    service = service_of(count)
    zoned = tuple(replace(each, zone="abc"[number % 3]) for number, each in enumerate(service.endpoints))
    fleet, state = state_of(replace(service, endpoints=zoned, zone_decay=ZoneDecay()))
    state.turn({"a": 0.1})
    assert state.turned

    def run() -> None:
        for _ in range(UNITS):
            pick(state, None, None, "m", (), 1.0, fleet.chance)

    budget(PICK_SPARED_NS, run, UNITS)


def test_pick_version_of_a_bound_session(budget: Budgeted) -> None:
    fleet, state = state_of(service_of(100, split=True))
    session = state.session(SessionId("s"), 0.0)
    session.version = pick_version(state, session, "m", (), 1.0, fleet.chance)
    assert session.version is not None

    def run() -> None:
        for _ in range(UNITS):
            pick_version(state, session, "m", (), 1.0, fleet.chance)

    budget(PICK_VERSION_NS, run, UNITS)
