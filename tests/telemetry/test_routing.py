"""Gauges of routing tables, as Prometheus reads them."""

import msgspec
import pytest

from sidecar.core.breaker import Permit
from sidecar.core.fleet import Fleet
from sidecar.core.table import Decay, Table
from sidecar.kernel.ids import EndpointKey, ServiceName
from sidecar.kernel.outcome import Result
from sidecar.policy.schema import Breakers, Endpoint, NodeBreaker, Service, Snapshot
from sidecar.telemetry.metrics import Metrics
from sidecar.telemetry.routing import PHASES
from tests.admin.facts import FakeDesk, rollout, table, table_view
from tests.telemetry.records import scrape, value

HOSTS = (("a", "v1"), ("b", "v2"), ("c", "v2"))


def watching(*tables: Table) -> tuple[Metrics, FakeDesk]:
    metrics, desk = Metrics("1"), FakeDesk(*tables)
    metrics.watch_desk(desk)
    return metrics, desk


async def samples(metrics: Metrics, name: str) -> dict[tuple[str, ...], float]:
    told = ((dict(labels), value) for (metric, labels), value in (await scrape(metrics)).items() if metric == name)
    # The service first, as they are written.
    return {tuple(said.pop(key) for key in sorted(said, key="service".__ne__)): value for said, value in told}


async def test_tables_are_told_by_version_and_weight() -> None:
    metrics, desk = watching(table(), table("b", v1=10_000))
    assert await samples(metrics, "sidecar_route_table_version") == {("chat",): 1 << 20, ("b",): 1 << 20}
    assert await samples(metrics, "sidecar_route_weight_ratio") == {
        ("chat", "v1"): 0.95,
        ("chat", "v2"): 0.05,
        ("b", "v1"): 1.0,
    }
    desk.stood = [table_view(table("b", v3=10_000), (1 << 53) - 1)]
    assert await samples(metrics, "sidecar_route_table_version") == {("b",): (1 << 53) - 1}
    assert await samples(metrics, "sidecar_route_weight_ratio") == {("b", "v3"): 1.0}


@pytest.mark.parametrize(("phase", "live"), [(phase, phase in ("running", "held")) for phase in PHASES])
async def test_a_canary_s_phase_is_told_and_its_step_while_it_is_under_way(phase: str, live: bool) -> None:
    metrics, _ = watching(table("chat", rollout(phase, 1)), table("b"))
    told = await samples(metrics, "sidecar_rollout_phase")
    assert told == {("chat", each): float(each == phase) for each in PHASES}
    assert await samples(metrics, "sidecar_rollout_step") == ({("chat", "v2"): 2.0} if live else {})


async def test_zones_that_are_turned_down_are_told_until_they_are_not() -> None:
    zoned = msgspec.structs.replace(table(), zones={"a": Decay(0.1, 0)})
    metrics, desk = watching(zoned)
    assert await samples(metrics, "sidecar_zone_share_ratio") == {("chat", "a"): 0.1}
    desk.stood = [table_view(table())]
    assert await samples(metrics, "sidecar_zone_share_ratio") == {}


async def test_a_version_is_down_while_none_of_its_endpoints_may_serve() -> None:
    first, second = EndpointKey("a:80"), EndpointKey("b:80")
    service = Service(
        name="chat",
        endpoints=(
            Endpoint(url="http://a"),
            Endpoint(url="http://b", version="v2"),
            Endpoint(url="http://c", version="v2"),
        ),
        split={"v1": 0.9, "v2": 0.1, "v3": 0.0, "v4": 0.1},
        breakers=Breakers(node=NodeBreaker(min_closed_ratio=0.0)),
    )
    fleet = Fleet(lambda: 0.5)
    fleet.apply(Snapshot(version=1, services=(service,)), 0.0)
    metrics = Metrics("1")
    metrics.watch_fleet(fleet, lambda: 0.0)
    nodes = fleet.services[ServiceName("chat")].nodes
    for key in (first, second):
        while isinstance(permit := nodes[key].breaker.acquire(0.0), Permit):
            nodes[key].breaker.record(permit, Result.FAILURE, 0.0, "reset")
    assert await samples(metrics, "sidecar_version_down") == {("chat", "v1"): 1, ("chat", "v2"): 0, ("chat", "v4"): 1}
    nodes[EndpointKey("c:80")].overload_until = 1.0
    assert await value(metrics, "sidecar_version_down", service="chat", version="v2") == 1


async def test_what_is_asked_and_what_moves_is_counted() -> None:
    metrics = Metrics("1")
    for result in ("accepted", "accepted", "stale"):
        metrics.route_update(result)
    metrics.rollout_moved("chat", "failed")
    metrics.rollout_moved("gone", "step")
    metrics.xds_push("rds")
    assert await samples(metrics, "sidecar_route_updates_total") == {("accepted",): 2, ("stale",): 1}
    assert await samples(metrics, "sidecar_xds_pushes_total") == {("rds",): 1}
    fleet = Fleet(lambda: 0.5)
    fleet.apply(Snapshot(version=1, services=(Service(name="chat"),)), 0.0)
    metrics.retain(fleet)
    assert await samples(metrics, "sidecar_rollout_transitions_total") == {("chat", "failed"): 1}
