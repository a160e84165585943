"""What is read at the scrape: the fleet's state as it is then."""

from typing import get_args

import msgspec
import pytest

from sidecar.core.breaker import Agreed, Breaker, Permit, Scope, State
from sidecar.core.fleet import Fleet
from sidecar.kernel.ids import EndpointKey, ServiceName, SessionId
from sidecar.kernel.outcome import Result
from sidecar.policy.schema import Breakers, NodeBreaker
from sidecar.telemetry.live import STATE_NUMBER, WATCHED, Watched
from sidecar.telemetry.metrics import SLICE, Metrics
from tests.telemetry.records import NODE, fleet_of, scrape, snapshot, value

OTHER_NODE = EndpointKey("10.0.0.2:8000")
CHAT = ServiceName("chat")


def watching(fleet: Fleet, now: float = 0.0) -> Metrics:
    metrics = Metrics("1.2.3")
    metrics.watch_fleet(fleet, lambda: now)
    return metrics


@pytest.mark.parametrize("state", list(State))
def test_every_state_has_a_number(state: State) -> None:
    assert {State.CLOSED: 0, State.OPEN: 1, State.HALF_OPEN: 2}[state] == STATE_NUMBER[state]


async def test_breaker_state_follows_the_breaker() -> None:
    fleet = fleet_of(NODE, OTHER_NODE)
    metrics = watching(fleet)
    breaker = fleet.services[CHAT].nodes[NODE].breaker
    labels = {"service": "chat", "endpoint": NODE}
    assert await value(metrics, "sidecar_breaker_state", **labels) == 0
    for _ in range(5):
        permit = breaker.acquire(0.0)
        assert isinstance(permit, Permit)
        breaker.record(permit, Result.FAILURE, 0.0, "reset")
    assert await value(metrics, "sidecar_breaker_state", **labels) == 1
    assert isinstance(breaker.acquire(1000.0), Permit)
    assert await value(metrics, "sidecar_breaker_state", **labels) == 2
    assert await value(metrics, "sidecar_breaker_state", service="chat", endpoint=OTHER_NODE) == 0
    assert await value(metrics, "sidecar_breakers_not_closed", service="chat", scope="node") == 1


class _Lender:
    """Lends nothing, hears nothing."""

    def wants(self, breaker: Breaker) -> None:
        pass

    def ended(self, breaker: Breaker, seq: int, result: Result, why: str) -> None:
        pass


def agreed(state: State, version: int) -> Agreed:
    return Agreed(state, 1, version, 0.0, 10.0, "fast", "6 of 9 answers bad", "", "pod-1", wait_s=10.0)


async def test_part_in_a_breaker_is_told() -> None:
    fleet = fleet_of(NODE, OTHER_NODE)
    metrics = watching(fleet, now=20.0)
    breaker = fleet.services[CHAT].nodes[NODE].breaker

    async def told() -> float | None:
        return await value(metrics, "sidecar_breaker_role", service="chat", endpoint=NODE)

    assert await told() == 0
    for _ in range(5):
        permit = breaker.acquire(0.0)
        assert isinstance(permit, Permit)
        breaker.record(permit, Result.FAILURE, 0.0, "reset")
    assert await told() == 1, "open on what was seen here alone"
    breaker.adopt(agreed(State.OPEN, 1), _Lender(), 1.0)
    assert await told() == 0, "open for all"
    breaker.adopt(agreed(State.HALF_OPEN, 2), _Lender(), 12.0)
    assert await told() == 0, "another has the probe"
    assert breaker.lend(1)
    assert await told() == 2, "a probe in hand"
    probe = breaker.acquire(13.0)
    assert isinstance(probe, Permit)
    assert await told() == 2, "a probe out"
    breaker.record(probe, Result.SUCCESS, 14.0)
    assert await told() == 0
    breaker.lost(5.0, 15.0)
    assert await told() == 1, "the log is away"
    breaker.adopt(agreed(State.CLOSED, 3), _Lender(), 16.0)
    assert await told() == 0
    assert await value(metrics, "sidecar_breaker_role", service="chat", endpoint=OTHER_NODE) == 0


async def test_load_is_as_it_is_now() -> None:
    fleet = fleet_of(NODE)
    node = fleet.services[CHAT].nodes[NODE]
    metrics = watching(fleet, now=10.0)
    labels = {"service": "chat", "endpoint": NODE}
    for name in ("in_flight", "waiting", "overloaded"):
        assert await value(metrics, f"sidecar_endpoint_{name}", **labels) == 0
    assert await value(metrics, "sidecar_endpoint_healthy", **labels) == 1
    node.in_flight, node.waiting, node.overload_until, node.healthy = 3, 7, 10.5, False
    assert await value(metrics, "sidecar_endpoint_in_flight", **labels) == 3
    assert await value(metrics, "sidecar_endpoint_waiting", **labels) == 7
    assert await value(metrics, "sidecar_endpoint_overloaded", **labels) == 1
    assert await value(metrics, "sidecar_endpoint_healthy", **labels) == 0
    node.overload_until = 10.0
    assert await value(metrics, "sidecar_endpoint_overloaded", **labels) == 0


async def test_floor_and_shadow_are_counted() -> None:
    fleet = fleet_of(NODE)
    breaker = fleet.services[CHAT].nodes[NODE].breaker
    breaker.held_closed, breaker.shadow_denied = 2, 5
    metrics = watching(fleet)
    labels = {"service": "chat", "endpoint": NODE}
    assert await value(metrics, "sidecar_breaker_held_closed_total", **labels) == 2
    assert await value(metrics, "sidecar_breaker_shadow_denied_total", **labels) == 5


async def test_late_attempts_and_requests_that_would_have_moved_are_counted() -> None:
    fleet = fleet_of(NODE)
    metrics = watching(fleet)
    service = fleet.services[CHAT]
    service.nodes[NODE].late, service.hedge_shadowed = 3, 2
    assert await value(metrics, "sidecar_late_attempts_total", service="chat", endpoint=NODE) == 3
    assert await value(metrics, "sidecar_hedge_shadowed_total", service="chat") == 2


async def test_detector_s_state_is_told_where_there_is_one() -> None:
    fleet = fleet_of(NODE)
    metrics = watching(fleet)
    detection = fleet.services[CHAT].detection
    assert detection is not None
    names = ("ready", "background_ratio", "overload", "panic")

    async def told() -> list[float | None]:
        return [await value(metrics, f"sidecar_detector_{name}", service="chat") for name in names]

    assert await told() == [0, 0.002, 0, 0]
    detection.results = detection.rule.min_samples
    detection.normal.background, detection.normal.overload, detection.normal.panic = 0.25, True, True
    assert await told() == [1, 0.25, 1, 1]
    fixed = msgspec.structs.replace(snapshot(NODE).services[0], breakers=Breakers(node=NodeBreaker(adaptive=False)))
    fleet.apply(snapshot(NODE, services=(fixed,)), 1.0)
    assert await told() == [None] * 4


async def test_sessions_are_counted_not_named() -> None:
    fleet = fleet_of(NODE)
    service = fleet.services[CHAT]
    metrics = watching(fleet)
    for number in range(3):
        service.session(SessionId(f"secret-{number}"), 0.0)
    fleet.override(Scope.SESSION, "secret-1", "open", 0.0, "test")
    assert await value(metrics, "sidecar_sessions", service="chat") == 3
    assert await value(metrics, "sidecar_breakers_not_closed", service="chat", scope="session") == 1
    assert await value(metrics, "sidecar_breakers_not_closed", service="chat", scope="request") == 0
    assert b"secret" not in (await metrics.render())[0]


async def test_endpoint_that_left_is_not_shown() -> None:
    fleet = fleet_of(NODE, OTHER_NODE)
    metrics = watching(fleet)
    fleet.apply(snapshot(OTHER_NODE), 1.0)
    assert await value(metrics, "sidecar_breaker_state", service="chat", endpoint=NODE) is None
    assert await value(metrics, "sidecar_breaker_state", service="chat", endpoint=OTHER_NODE) == 0


@pytest.mark.parametrize("size", [1, SLICE - 1, SLICE, SLICE + 1, 5 * SLICE])
async def test_no_endpoint_is_lost_between_slices(size: int) -> None:
    keys = [f"10.0.{number // 250}.{number % 250}:8000" for number in range(size)]
    samples = await scrape(watching(fleet_of(*keys)))
    assert {dict(labels)["endpoint"] for name, labels in samples if name == "sidecar_breaker_state"} == set(keys)


@pytest.mark.parametrize("watched", get_args(Watched))
async def test_watched_is_asked_at_every_scrape(watched: Watched) -> None:
    metrics = Metrics()
    answers = iter([1, 2])
    metrics.watch(watched, lambda: next(answers))
    name, kind, _ = WATCHED[watched]
    assert name.endswith("_total") == (kind == "counter")
    assert await value(metrics, name) == 1
    assert await value(metrics, name) == 2


@pytest.mark.parametrize("answer", [True, False])
async def test_yes_and_no_are_numbers(answer: bool) -> None:
    metrics = Metrics()
    metrics.watch("ready", lambda: answer)
    assert await value(metrics, "sidecar_ready") == int(answer)


async def test_build_is_told() -> None:
    assert await value(Metrics("1.2.3"), "sidecar_build_info", version="1.2.3") == 1
