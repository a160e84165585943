"""Versions that nobody of may serve: when it is said, once, and when it is over."""

import pytest

from sidecar.core.down import Downs
from sidecar.core.service import ServiceState
from sidecar.kernel.outcome import Result
from sidecar.policy.schema import Breakers, Endpoint, Service
from tests.core.build import RULE, fleet_of, record, snapshot_of, trip


def policy(**parts: float) -> Service:
    return Service(
        name="chat",
        endpoints=tuple(
            Endpoint(url=f"http://{version}-{number}:80", version=version)
            for version in ("v1", "v2")
            for number in "12"
        ),
        split=parts,
        breakers=Breakers(node=RULE),
    )


def fall(service: ServiceState, version: str, now: float) -> None:
    for node in service.nodes.values():
        if node.version == version:
            trip(node.breaker, now)


def said(downs: Downs, service: ServiceState, *moments: float) -> list[tuple[str, str]]:
    return [(told.kind, told.text) for now in moments for told in downs.look(service, now)]


def test_a_version_that_is_down_is_said_once_and_when_it_is_back() -> None:
    _, service = fleet_of(policy(v1=50, v2=50))
    downs = Downs()
    assert said(downs, service, 0.0, 1.0) == []
    fall(service, "v2", 1.5)
    assert said(downs, service, 2.0, 3.0) == []
    words = "no endpoint of v2 may serve (of its 2 endpoints 2 open): its share goes to the other versions"
    assert said(downs, service, 4.0, 5.0, 6.0) == [("version_down", words)]
    assert said(downs, service, 12.0) == [], "a probe that is due serves nobody else"
    node = next(node for node in service.nodes.values() if node.version == "v2")
    while not node.breaker.passes:
        record(node.breaker, Result.SUCCESS, 13.0)
    assert said(downs, service, 13.0, 14.0) == [("version_back", "v2 has its share again, after 11 s")]


def test_when_none_can_serve_it_says_so() -> None:
    _, service = fleet_of(policy(v1=50, v2=50))
    downs = Downs()
    fall(service, "v1", 0.0)
    fall(service, "v2", 0.0)
    found = said(downs, service, 0.0, 2.0)
    assert [kind for kind, _ in found] == ["version_down"] * 2
    assert all(text.endswith("no other version may serve either") for _, text in found)


def test_a_version_without_endpoints_or_full_is_down() -> None:
    _, service = fleet_of(policy(v1=50, v2=49, v3=1))
    for node in service.nodes.values():
        if node.version == "v2":
            node.overload_until = 100.0
    found = said(Downs(), service, 0.0, 1.0) + said(downs := Downs(), service, 0.0, 2.0)
    assert [text for _, text in found] == [
        "no endpoint of v2 may serve (of its 2 endpoints 2 full): its share goes to the other versions",
        "no endpoint of v3 may serve (it has no endpoint that takes requests): its share goes to the other versions",
    ]
    assert said(downs, service, 101.0) == [("version_back", "v2 has its share again, after 101 s")]


def test_full_for_a_second_is_no_news() -> None:
    _, service = fleet_of(policy(v1=50, v2=50))
    downs = Downs()
    for start in range(0, 20, 2):
        for node in service.nodes.values():
            node.overload_until = start + 1.0
        assert said(downs, service, float(start), start + 1.0) == []


@pytest.mark.parametrize("parts", [{"v1": 1.0}, {"v1": 1.0, "v2": 0.0}, {}])
def test_a_version_that_is_to_get_nothing_is_not_down(parts: dict[str, float]) -> None:
    fleet, service = fleet_of(policy(v1=50, v2=50))
    downs = Downs()
    fall(service, "v2", 0.0)
    assert [kind for kind, _ in said(downs, service, 0.0, 2.0)] == ["version_down"]
    fleet.apply(snapshot_of(policy(**parts)), 3.0)
    assert said(downs, service, 3.0, 4.0, 9.0) == [("version_back", "v2 is no longer to get requests")]


def test_a_service_where_nothing_moved_is_not_looked_at() -> None:
    fleet, service = fleet_of(policy(v1=50, v2=50))
    downs = Downs()
    downs.look(service, 0.0)
    service._pools.clear()
    downs.look(service, 1.0)
    assert not service._pools, "it made none anew"
    fleet.apply(snapshot_of(policy(v1=50, v2=50, v3=1)), 2.0)
    assert [kind for kind, _ in said(downs, service, 2.0, 4.0)] == ["version_down"]
