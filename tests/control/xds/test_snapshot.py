"""A snapshot from parts: what changes moves its own version, and nothing else."""

import pytest

from sidecar.control.xds import protos
from sidecar.control.xds.build import build
from sidecar.control.xds.snapshot import ROUTES_NAME, Kind, Part, Snapshot, compose, resource
from sidecar.core.table import effective
from tests.control.xds.desk import at, service, table

LISTENER = resource("sidecar", b"where")


def part(name: str, heavy: int = 9000, *urls: str, version: int = 1) -> Part:
    made = table(name, v1=(heavy, urls or ("http://127.0.0.1:1",)), v2=(10_000 - heavy, ("http://127.0.0.1:2",)))
    return build(effective(service(name), made), made, version, lambda _: "")


def moved(before: Snapshot, after: Snapshot) -> set[Kind]:
    return {kind for kind in Kind if before.shelves[kind] is not after.shelves[kind]}


def hosts(snapshot: Snapshot) -> dict[str, list[str]]:
    made = protos.RouteConfiguration.FromString(snapshot.shelves[Kind.ROUTES].resources[ROUTES_NAME].body)
    assert made.validate_clusters.value
    return {host.name: list(host.domains) for host in made.virtual_hosts}


def test_new_weights_are_new_routes_and_nothing_else() -> None:
    before = compose([part("chat"), part("embed")], LISTENER)
    after = compose([part("chat", 5000), part("embed")], LISTENER, before)
    assert moved(before, after) == {Kind.ROUTES}
    assert after.fingerprint != before.fingerprint


def test_a_new_endpoint_is_new_endpoints_and_nothing_else() -> None:
    before = compose([part("chat")], None)
    after = compose([part("chat", 9000, "http://127.0.0.1:1", "http://127.0.0.1:3")], None, before)
    assert moved(before, after) == {Kind.ENDPOINTS}


def test_a_new_service_is_new_clusters_endpoints_and_routes() -> None:
    before = compose([part("chat")], LISTENER)
    after = compose([part("chat"), part("embed")], LISTENER, before)
    assert moved(before, after) == {Kind.CLUSTERS, Kind.ENDPOINTS, Kind.ROUTES}


def test_the_same_again_is_the_same_shelves() -> None:
    before = compose([part("chat")], LISTENER)
    after = compose([part("chat", version=7)], LISTENER, before)
    assert not moved(before, after)
    assert after.parts["chat"].table_version == 7


def test_two_servers_say_the_same_under_the_same_version() -> None:
    one, other = compose([part("chat")], None), compose([part("chat")], None)
    assert one.fingerprint == other.fingerprint
    assert [shelf.version for shelf in one.shelves] == [shelf.version for shelf in other.shelves]


def test_a_service_is_reached_by_its_name_and_the_first_by_all() -> None:
    snapshot = compose([part("chat"), part("embed")], None)
    assert hosts(snapshot) == {"chat": ["chat", "chat.*"], "embed": ["embed", "embed.*"], "*": ["*"]}


def test_names_that_differ_in_case_alone_are_one_host() -> None:
    assert hosts(compose([part("chat"), part("Chat")], None)) == {"chat": ["chat", "chat.*"], "*": ["*"]}


def test_without_services_nothing_is_routed() -> None:
    assert hosts(compose([], None)) == {"*": ["*"]}


@pytest.mark.parametrize("size", [1, 127, 128, 20_000])
def test_bodies_of_any_length_are_put_together_right(size: int) -> None:
    urls = [f"http://127.0.0.1:{1 + number}" for number in range(3)]
    name = "a" * min(size, 63)
    files = service(name, *(at(url, f"v{number % 2}{'x' * min(60, size)}") for number, url in enumerate(urls)))
    parts = [build(files, None, 0, lambda _: "")] * max(1, size // 100)
    made = protos.RouteConfiguration.FromString(compose(parts, None).shelves[Kind.ROUTES].resources[ROUTES_NAME].body)
    assert len(made.virtual_hosts[-1].routes) == 1 + len(parts)
