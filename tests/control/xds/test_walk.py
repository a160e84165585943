"""One Envoy's way to a snapshot, without an Envoy: both protocols' rules, and any walk."""

import random
from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from sidecar.control.xds.build import build
from sidecar.control.xds.snapshot import Kind, Resource, Snapshot, compose, resource
from sidecar.control.xds.walk import PUSH_BYTES, WHOLE, Push, Walk, _within
from sidecar.core.table import Table, effective
from sidecar.policy.schema import Deadlines, Seconds
from tests.control.xds.desk import service, table

A, B, C, D = (f"http://127.0.0.1:{port}" for port in range(8001, 8005))
LISTENER = resource("sidecar", b"where")


def snapshot(*tables: Table, before: Snapshot | None = None) -> Snapshot:
    parts = [build(effective(service(each.service), each), each, 1, lambda _: "") for each in tables]
    return compose(parts, LISTENER, before)


ONE = snapshot(table("chat", v1=(9000, (A,)), v2=(1000, (B,))))
WEIGHED = snapshot(table("chat", v1=(5000, (A,)), v2=(5000, (B,))), before=ONE)
OTHER = snapshot(table("chat", v2=(5000, (B, D)), v3=(5000, (C,))), before=ONE)


class Client:
    """An Envoy that keeps what it is sent, applied as Envoy applies it; asks for what it needs."""

    def __init__(self, delta: bool) -> None:
        self.walk = Walk(delta)
        self.has: dict[Kind, dict[str, Resource]] = {kind: {} for kind in Kind}
        self.pushes: list[Push] = []
        self._nonces = dict.fromkeys(Kind, "")
        self._asked: set[Kind] = set()

    def names(self, kind: Kind) -> list[str]:
        if kind is Kind.ENDPOINTS:
            return sorted(self.has[Kind.CLUSTERS])
        return sorted(self.has[Kind.LISTENERS]) if kind is Kind.ROUTES else []

    def ask(self, kind: Kind, more: Iterable[str] = (), less: Iterable[str] = (), error: str = "") -> bool:
        """One request; whether it was taken as an answer."""
        first = kind not in self._asked
        self._asked.add(kind)
        if not self.walk.delta:
            return self.walk.ask(kind, self.names(kind), self._nonces[kind], error) is not None
        nonce = "" if first else self._nonces[kind]
        return self.walk.subscribe(kind, self.names(kind) if first else more, less, {}, nonce, error) is not None

    def take(self, push: Push, error: str = "") -> None:
        """Apply a push and answer it; then ask for what hangs on it."""
        self.pushes.append(push)
        self._nonces[push.kind] = push.nonce
        before = set(self.names(Kind(push.kind + 1))) if push.kind in WHOLE else set()
        if not error:
            has = self.has[push.kind]
            if not self.walk.delta and push.kind in WHOLE:
                has.clear()
            has.update({each.name: each for each in push.sent})
            for name in push.gone:
                has.pop(name, None)
        assert self.ask(push.kind, error=error)
        if push.kind in WHOLE and not error:
            behind = Kind(push.kind + 1)
            after = set(self.names(behind))
            if behind in self._asked or after:
                self.ask(behind, sorted(after - before), sorted(before - after))
            for name in before - after:
                self.has[behind].pop(name, None)

    def go(self, target: Snapshot) -> list[Push]:
        """Take all that comes for a target; what came."""
        start = len(self.pushes)
        if not self._asked:
            self.ask(Kind.CLUSTERS)
            self.ask(Kind.LISTENERS)
        while (push := self.walk.next(target)) is not None:
            self.take(push)
        return self.pushes[start:]

    def equals(self, target: Snapshot) -> bool:
        return all(self.has[kind] == target.shelves[kind].resources for kind in Kind)


@pytest.fixture(params=[False, True], ids=["world", "delta"])
def client(request: pytest.FixtureRequest) -> Client:
    return Client(request.param)


def test_all_comes_in_order(client: Client) -> None:
    kinds = [push.kind for push in client.go(ONE)]
    assert kinds == [Kind.CLUSTERS, Kind.ENDPOINTS, Kind.LISTENERS, Kind.ROUTES]
    assert client.equals(ONE)
    assert client.walk.has(ONE)


def test_nothing_comes_twice(client: Client) -> None:
    client.go(ONE)
    assert client.go(ONE) == []


def test_new_weights_are_one_push_of_routes(client: Client) -> None:
    client.go(ONE)
    assert [push.kind for push in client.go(WEIGHED)] == [Kind.ROUTES]
    assert client.walk.has(WEIGHED)
    assert not client.walk.has(ONE)


def test_new_clusters_come_before_the_routes_and_old_ones_go_after(client: Client) -> None:
    client.go(ONE)
    pushes = client.go(OTHER)
    kinds = [push.kind for push in pushes]
    assert client.equals(OTHER)
    routes = kinds.index(Kind.ROUTES)
    assert kinds[0] is Kind.CLUSTERS
    clusters = [push for push in pushes if push.kind is Kind.CLUSTERS]
    assert routes < kinds.index(Kind.CLUSTERS, 1)
    assert len(clusters) == 2
    assert {each.name for each in clusters[0].sent} >= {"chat|v3"}
    if client.walk.delta:
        assert not clusters[0].gone
        assert clusters[1].gone == ("chat|v1",)
    else:
        assert {each.name for each in clusters[0].sent} == {"chat|v1", "chat|v2", "chat|v3"}
        assert {each.name for each in clusters[1].sent} == {"chat|v2", "chat|v3"}


def test_at_no_moment_does_a_route_lead_to_a_cluster_that_is_not_there(client: Client) -> None:
    client.go(ONE)
    for target in (OTHER, ONE, WEIGHED, OTHER):
        while (push := client.walk.next(target)) is not None:
            client.take(push)
            routed = client.has[Kind.ROUTES]["sidecar"].body
            for name in (b"chat|v1", b"chat|v2", b"chat|v3"):
                assert name not in routed or name.decode() in client.has[Kind.CLUSTERS]


def test_routes_wait_for_the_answers_to_clusters_and_endpoints(client: Client) -> None:
    client.go(ONE)
    clusters = client.walk.next(OTHER)
    assert clusters is not None
    endpoints = client.walk.next(OTHER)
    assert endpoints is not None
    assert (clusters.kind, endpoints.kind) == (Kind.CLUSTERS, Kind.ENDPOINTS)
    assert client.walk.next(OTHER) is None
    client.take(clusters)
    assert client.walk.next(OTHER) is None
    client.take(endpoints)
    following = client.walk.next(OTHER)
    assert following is not None
    # The new cluster was subscribed to in between, so its endpoints are next.
    assert following.kind is Kind.ENDPOINTS
    client.take(following)
    assert client.go(OTHER)[0].kind is Kind.ROUTES


def test_who_does_not_answer_is_sent_nothing_more(client: Client) -> None:
    client.go(ONE)
    assert client.walk.next(WEIGHED) is not None
    for target in (ONE, WEIGHED, OTHER):
        push = client.walk.next(target)
        assert push is None or push.kind in (Kind.CLUSTERS, Kind.ENDPOINTS)


def test_the_latest_wins(client: Client) -> None:
    client.go(ONE)
    first = client.walk.next(WEIGHED)
    assert first is not None
    client.take(first)
    client.go(OTHER)
    assert client.equals(OTHER)


def test_an_answer_of_the_past_is_none(client: Client) -> None:
    client.go(ONE)
    push = client.walk.next(WEIGHED)
    assert push is not None
    if client.walk.delta:
        assert client.walk.subscribe(Kind.ROUTES, (), (), {}, "0", "") is None
    else:
        assert client.walk.ask(Kind.ROUTES, ["sidecar"], "0", "") is None
    assert not client.walk.has(WEIGHED)
    client.take(push)
    assert client.walk.next(WEIGHED) is None
    assert client.walk.has(WEIGHED)


def test_what_was_refused_is_not_sent_again_and_the_last_good_is(client: Client) -> None:
    client.go(ONE)
    push = client.walk.next(OTHER)
    assert push is not None
    client.take(push, error="no")
    assert client.walk.next(OTHER) is None
    assert not client.walk.has(OTHER)
    assert client.go(ONE)[0].kind is Kind.CLUSTERS
    assert client.equals(ONE)
    assert client.walk.has(ONE)


def test_refused_routes_are_said_again_as_they_were(client: Client) -> None:
    client.go(ONE)
    push = client.walk.next(WEIGHED)
    assert push is not None
    client.take(push, error="no")
    assert [push.kind for push in client.go(ONE)] == [Kind.ROUTES]
    assert client.walk.has(ONE)


@pytest.mark.parametrize("target", [WEIGHED, OTHER], ids=["weights", "clusters"])
@pytest.mark.parametrize("taken", range(1, 6))
def test_back_in_the_middle_is_back(client: Client, target: Snapshot, taken: int) -> None:
    """The target returns to what all had, after some pushes of another one were taken."""
    client.go(ONE)
    for _ in range(taken):
        push = client.walk.next(target)
        if push is not None:
            client.take(push)
    client.go(ONE)
    assert client.equals(ONE)
    assert client.walk.has(ONE)


def test_who_refuses_the_good_one_too_is_left_alone(client: Client) -> None:
    client.go(ONE)
    for target in (WEIGHED, ONE):
        push = client.walk.next(target)
        assert push is not None
        client.take(push, error="no")
    assert client.walk.next(ONE) is None


def test_an_envoy_without_anything_to_have_is_answered(client: Client) -> None:
    nothing = snapshot()
    client.go(nothing)
    assert client.pushes[0].kind is Kind.CLUSTERS
    assert client.has[Kind.CLUSTERS] == {}
    assert client.walk.has(nothing)


def test_endpoints_come_again_behind_a_cluster_that_changed(client: Client) -> None:
    client.go(ONE)
    files = service("chat")
    over = table("chat", v1=(9000, (A,)), v2=(1000, (B,)))
    slower = effective(files, over)
    slower = replace(slower, deadlines=Deadlines(connect_s=Seconds(3)))
    target = compose([build(slower, over, 1, lambda _: "")], LISTENER, ONE)
    assert target.shelves[Kind.ENDPOINTS] is ONE.shelves[Kind.ENDPOINTS]
    pushes = client.go(target)
    assert [push.kind for push in pushes][:2] == [Kind.CLUSTERS, Kind.ENDPOINTS]
    assert {each.name for each in pushes[1].sent} == {"chat|v1", "chat|v2"}


def test_endpoints_under_way_come_again_behind_a_cluster_that_changed(client: Client) -> None:
    """The answer to endpoints that were sent before the cluster says nothing of what it waits for."""
    client.go(ONE)
    over = table("chat", v1=(9000, (A, C)), v2=(1000, (B,)))
    more = snapshot(over, before=ONE)
    endpoints = client.walk.next(more)
    assert endpoints is not None
    slower = replace(effective(service("chat"), over), deadlines=Deadlines(connect_s=Seconds(3)))
    target = compose([build(slower, over, 1, lambda _: "")], LISTENER, more)
    clusters = client.walk.next(target)
    assert clusters is not None
    assert client.walk.next(target) is None
    client.take(endpoints)
    again = client.walk.next(target)
    assert again is not None
    assert (endpoints.kind, clusters.kind, again.kind) == (Kind.ENDPOINTS, Kind.CLUSTERS, Kind.ENDPOINTS)
    assert {each.name for each in again.sent} == {"chat|v1", "chat|v2"}


def test_delta_tells_of_a_name_that_does_not_exist_once() -> None:
    walk = Walk(delta=True)
    assert walk.subscribe(Kind.ENDPOINTS, ["chat|v9"], (), {}, "", "") is None
    push = walk.next(ONE)
    assert push is not None
    assert (push.sent, push.gone) == ((), ("chat|v9",))
    assert walk.subscribe(Kind.ENDPOINTS, (), (), {}, push.nonce, "") is not None
    assert walk.next(ONE) is None
    assert walk.has(ONE)


def test_delta_sends_what_came_to_be() -> None:
    walk = Walk(delta=True)
    walk.subscribe(Kind.ENDPOINTS, ["chat|v3"], (), {}, "", "")
    push = walk.next(ONE)
    assert push is not None
    walk.subscribe(Kind.ENDPOINTS, (), (), {}, push.nonce, "")
    push = walk.next(OTHER)
    assert push is not None
    assert [each.name for each in push.sent] == ["chat|v3"]


def test_delta_comes_back_with_what_it_holds() -> None:
    walk = Walk(delta=True)
    held = {each.name: each.version for each in ONE.shelves[Kind.CLUSTERS].resources.values()}
    walk.subscribe(Kind.CLUSTERS, ["*"], (), held | {"chat|v0": "old"}, "", "")
    push = walk.next(ONE)
    assert push is not None
    assert (push.sent, push.gone) == ((), ("chat|v0",))


def test_delta_is_sent_again_what_it_asks_for_again() -> None:
    walk = Walk(delta=True)
    walk.subscribe(Kind.ENDPOINTS, ["chat|v1"], (), {}, "", "")
    push = walk.next(ONE)
    assert push is not None
    walk.subscribe(Kind.ENDPOINTS, (), (), {}, push.nonce, "")
    assert walk.next(ONE) is None
    walk.subscribe(Kind.ENDPOINTS, ["chat|v1"], (), {}, "", "")
    assert walk.next(ONE) is not None


def test_delta_may_want_all_and_then_no_more() -> None:
    walk = Walk(delta=True)
    walk.subscribe(Kind.CLUSTERS, ["*", "chat|v1"], (), {}, "", "")
    push = walk.next(ONE)
    assert push is not None
    assert len(push.sent) == 2
    walk.subscribe(Kind.CLUSTERS, (), ["*"], {}, push.nonce, "")
    push = walk.next(OTHER)
    assert push is not None
    assert push.gone == ("chat|v1",)


def test_the_world_by_names_is_those_names() -> None:
    walk = Walk(delta=False)
    walk.ask(Kind.CLUSTERS, ["chat|v2"], "", "")
    push = walk.next(ONE)
    assert push is not None
    assert [each.name for each in push.sent] == ["chat|v2"]


def test_the_world_stays_a_wildcard_with_later_empty_requests() -> None:
    walk = Walk(delta=False)
    walk.ask(Kind.CLUSTERS, [], "", "")
    push = walk.next(ONE)
    assert push is not None
    assert walk.ask(Kind.CLUSTERS, [], push.nonce, "") is not None
    push = walk.next(OTHER)
    assert push is not None
    assert len(push.sent) == 3


def test_a_push_is_cut_where_it_need_not_be_whole() -> None:
    large = [Resource(str(number), bytes(PUSH_BYTES // 2), "1") for number in range(5)]
    assert len(_within(large)) == 1
    assert len(_within([Resource("a", bytes(2 * PUSH_BYTES), "1"), *large])) == 1
    small = [Resource(str(number), bytes(10), "1") for number in range(5)]
    assert len(_within(small)) == 5


@pytest.mark.parametrize("seed", range(20))
def test_any_walk_ends_where_it_should(client: Client, seed: int) -> None:
    """Targets that change at any moment, and pushes that are refused: in the end an Envoy has the last target, with
    routes to clusters that it has at every moment."""
    chance = random.Random(seed)
    targets = [ONE]
    for _ in range(12):
        versions = {
            f"v{number}": (chance.choice([0, 100, 5000]), tuple(chance.sample([A, B, C], chance.randint(1, 3))))
            for number in chance.sample(range(5), chance.randint(1, 4))
        }
        targets.append(snapshot(table("chat", **versions), before=targets[-1]))
    client.go(ONE)
    for target in targets:
        refused = False
        for _ in range(chance.randint(0, 6)):
            push = client.walk.next(target)
            if push is None:
                break
            client.take(push, error="no" if not refused and chance.random() < 0.2 else "")
        if chance.random() < 0.3:
            client.go(chance.choice(targets))
    last = chance.choice(targets)
    client.go(targets[0] if last.fingerprint == client.walk._refused else last)
    client.go(last)
    assert client.equals(last)
    assert client.walk.has(last)
