"""Versions: rendezvous, stickiness, and what is never used."""

import random
from collections import Counter
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.balance import bind, pick
from sidecar.core.fleet import Fleet
from sidecar.core.service import ServiceState
from sidecar.core.split import pick_version, rendezvous, score_of
from sidecar.core.table import PARTS, Table, Version, parts_of, weighed
from sidecar.kernel.ids import SessionId, VersionName
from sidecar.policy.schema import Breakers, Endpoint, NodeBreaker, Seconds, Service, Snapshot
from tests.core.build import chosen, snapshot_of, trip

V1, V2, V3 = VersionName("v1"), VersionName("v2"), VersionName("v3")
SESSIONS = [SessionId(f"session-{number}") for number in range(2000)]


def policy(**parts: float) -> Service:
    """Two endpoints of each of three versions."""
    return Service(
        name="chat",
        endpoints=tuple(
            Endpoint(url=f"http://{version}-{number}:80", version=version)
            for version in ("v1", "v2", "v3")
            for number in (1, 2)
        ),
        split=parts,
        breakers=Breakers(node=NodeBreaker(min_closed_ratio=0.0, open_s=Seconds(10))),
    )


def fleet_of(**parts: float) -> tuple[Fleet, ServiceState]:
    fleet = Fleet(random.Random(1).random)
    fleet.apply(snapshot_of(policy(**parts)), 0.0)
    service = fleet.service_for("m")
    assert service is not None
    return fleet, service


def of_sessions(service: ServiceState) -> dict[SessionId, VersionName | None]:
    return {name: pick_version(service, service.session(name, 0.0), "", (), 0.0, lambda: 0.5) for name in SESSIONS}


def test_no_split_is_any_version() -> None:
    fleet, service = fleet_of()
    assert pick_version(service, None, "", (), 0.0, fleet.chance) is None
    assert pick_version(service, service.session(SESSIONS[0], 0.0), "", (), 0.0, fleet.chance) is None


def test_a_known_session_has_the_same_version_on_every_sidecar() -> None:
    # Frozen answers: another hash would move every session of every fleet at the upgrade.
    split = [(V1, 50.0), (V2, 50.0)]
    found = [rendezvous(split, SessionId(name)) for name in ("a", "b", "c", "d", "e", "f", "é", "\ud800")]
    assert found == [V2, V1, V2, V1, V1, V2, V1, V2]


@pytest.mark.parametrize("share", [1, 10, 50, 90, 99])
def test_sessions_spread_by_the_parts(share: int) -> None:
    _, service = fleet_of(v1=100.0 - share, v2=float(share))
    found = Counter(of_sessions(service).values())
    assert found[V2] / len(SESSIONS) == pytest.approx(share / 100, abs=0.03)
    assert set(found) <= {V1, V2}


@given(
    before=st.lists(st.floats(0.1, 100), min_size=2, max_size=5),
    which=st.integers(0, 4),
    growth=st.floats(1, 100),
    session=st.text(max_size=20),
)
def test_a_growing_part_moves_sessions_only_towards_it(
    before: list[float], which: int, growth: float, session: str
) -> None:
    grown = which % len(before)
    names = [VersionName(f"v{number}") for number in range(len(before))]
    after = [part + growth if number == grown else part for number, part in enumerate(before)]
    old = rendezvous(list(zip(names, before, strict=True)), SessionId(session))
    new = rendezvous(list(zip(names, after, strict=True)), SessionId(session))
    assert new in (old, names[grown])


@given(session=st.text(max_size=20), order=st.permutations([(V1, 1.0), (V2, 2.0), (V3, 3.0)]))
def test_the_order_of_versions_does_not_matter(session: str, order: list[tuple[VersionName, float]]) -> None:
    assert rendezvous(order, SessionId(session)) == rendezvous(sorted(order), SessionId(session))


def test_only_the_ratio_of_parts_matters() -> None:
    for name in SESSIONS[:200]:
        assert rendezvous([(V1, 9.0), (V2, 1.0)], name) == rendezvous([(V1, 90.0), (V2, 10.0)], name)


@pytest.mark.parametrize("share", [0, 10, 50, 100])
def test_without_a_session_chance_decides(share: int) -> None:
    fleet, service = fleet_of(v1=100.0 - share, v2=float(share))
    found = Counter(pick_version(service, None, "", (), 0.0, fleet.chance) for _ in range(2000))
    assert found[V2] / 2000 == pytest.approx(share / 100, abs=0.04)


@pytest.mark.parametrize("luck", [0.0, 0.5, 0.999999999999999])
def test_chance_at_its_ends_gives_a_version_that_has_a_part(luck: float) -> None:
    _, service = fleet_of(v1=0.0, v2=1.0, v3=1e-9)
    assert pick_version(service, None, "", (), 0.0, lambda: luck) in (V2, V3)


def bound_to(fleet: Fleet, service: ServiceState, name: SessionId, version: VersionName) -> None:
    session = service.session(name, 0.0)
    bind(session, chosen(pick(service, session, version, "m", (), 0.0, fleet.chance)), 0.0)
    assert session.version == version


def test_a_bound_session_stays_while_its_version_has_a_part() -> None:
    fleet, service = fleet_of(v1=1.0, v2=1.0)
    for name in SESSIONS[:100]:
        bound_to(fleet, service, name, V2)
    fleet.apply(snapshot_of(policy(v1=999.0, v2=1.0)), 1.0)
    for name in SESSIONS[:100]:
        assert pick_version(service, service.session(name, 1.0), "", (), 1.0, fleet.chance) == V2


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param({"v1": 100.0, "v2": 0.0}, id="part 0"),
        pytest.param({"v1": 100.0}, id="no longer named"),
        pytest.param({"v1": 1.0, "v3": 1.0, "v2": 0.0}, id="part 0 of three"),
    ],
)
def test_an_aborted_canary_is_never_used_whatever_a_session_remembers(parts: dict[str, float]) -> None:
    fleet, service = fleet_of(v1=1.0, v2=1.0)
    for name in SESSIONS[:100]:
        bound_to(fleet, service, name, V2)
    fleet.apply(snapshot_of(policy(**parts)), 1.0)
    for session in [*(service.session(name, 1.0) for name in SESSIONS[:100]), None]:
        version = pick_version(service, session, "", (), 1.0, fleet.chance)
        assert version in (V1, V3)
        choice = chosen(pick(service, session, version, "m", (), 1.0, fleet.chance))
        assert choice.node.version == version
        assert choice.affinity == ("" if session is None else "moved")


def test_a_version_that_cannot_serve_is_passed_over_and_gets_its_probe() -> None:
    fleet, service = fleet_of(v1=1.0, v2=1.0)
    on_v2 = [name for name, version in of_sessions(service).items() if version == V2]
    for node in list(service.nodes.values()):
        if node.version == V2:
            trip(node.breaker, 0.0)
    assert set(of_sessions(service).values()) == {V1}
    session = service.session(on_v2[0], 10.0)
    assert pick_version(service, session, "", (), 10.0, fleet.chance) == V2
    assert chosen(pick(service, session, V2, "m", (), 10.0, fleet.chance)).permit.probe


@pytest.mark.parametrize("how", ["draining", "full", "gone"])
def test_versions_without_a_usable_node_are_passed_over(how: str) -> None:
    fleet, service = fleet_of(v1=1.0, v2=1.0)
    bound_to(fleet, service, SESSIONS[0], V2)
    for node in service.nodes.values():
        if node.version == V2:
            if how == "draining":
                node.draining = True
            elif how == "full":
                node.overload_until = 5.0
    if how == "gone":
        kept = tuple(e for e in service.policy.endpoints if e.version != "v2")
        fleet.apply(
            Snapshot(version=2, services=(Service(name="chat", endpoints=kept, split={"v1": 1, "v2": 1}),)), 0.0
        )
    assert set(of_sessions(service).values()) == {V1}


def test_when_no_version_can_serve_one_is_chosen_all_the_same() -> None:
    _, service = fleet_of(v1=1.0, v2=1.0)
    for node in service.nodes.values():
        node.draining = True
    assert set(of_sessions(service).values()) == {V1, V2}


def test_a_version_without_the_model_is_passed_over() -> None:
    fleet = Fleet(random.Random(1).random)
    has = Endpoint(url="http://a:80", models=("base", "lora"))
    lacks = Endpoint(url="http://b:80", version="v2", models=("base",))
    fleet.apply(snapshot_of(Service(name="chat", endpoints=(has, lacks), split={"v1": 1, "v2": 99})), 0.0)
    service = fleet.service_for("lora")
    assert service is not None
    assert {pick_version(service, None, "lora", (), 0.0, fleet.chance) for _ in range(50)} == {V1}
    assert {pick_version(service, service.session(name, 0.0), "lora", (), 0.0, fleet.chance) for name in SESSIONS} == {
        V1
    }


def test_a_version_whose_nodes_were_all_tried_is_passed_over() -> None:
    fleet, service = fleet_of(v1=50, v2=50)
    tried = [node.key for node in service.nodes.values() if node.version == V1]
    session = service.session(SESSIONS[0], 0.0)
    session.version = V1
    assert pick_version(service, session, "m", tried[:1], 0.0, fleet.chance) == V1
    assert pick_version(service, session, "m", tried, 0.0, fleet.chance) == V2


# Exactness.

NUMBERS = 1 << 53


def below(part: float, score: float) -> float:
    """The ratio of all numbers with which a version of this part has less than a score."""
    low, high = -1, NUMBERS
    while high - low > 1:
        middle = (low + high) // 2
        if score_of(part, middle) < score:
            low = middle
        else:
            high = middle
    return high / NUMBERS


def share_of(parts: list[int], which: int, points: int = 40) -> float:
    """How much of the hash's whole space a version wins: an integral over its own number, exact in the others'.

    The points lie where the integrand is flat: u = q^(part of the whole), which has q's density in the result.
    """
    whole = parts[which] / sum(parts)
    total = 0.0
    for point in range(points):
        q = (point + 0.5) / points
        score = score_of(parts[which], min(NUMBERS - 1, int(q**whole * NUMBERS)))
        won = 1.0
        for other, part in enumerate(parts):
            if other != which:
                won *= below(part, score)
        total += won * whole * q ** (whole - 1.0)
    return total / points


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([5000, 5000], id="halves"),
        pytest.param([9000, 1000], id="a tenth"),
        pytest.param([9999, 1], id="one part"),
        pytest.param([8500, 1000, 500], id="three"),
        pytest.param([3333, 3333, 3334], id="thirds"),
        pytest.param([5000, 2500, 1500, 999, 1], id="five"),
    ],
)
def test_the_split_has_no_bias_of_its_own(parts: list[int]) -> None:
    for which, part in enumerate(parts):
        assert share_of(parts, which) == pytest.approx(part / PARTS, abs=1e-8)


@pytest.mark.parametrize("parts", [[9000, 1000], [7000, 2000, 1000]], ids=["two", "three"])
def test_a_hundred_thousand_sessions_split_as_well_as_chance_allows(parts: list[int]) -> None:
    split = [(VersionName(f"v{number}"), float(part)) for number, part in enumerate(parts)]
    found = Counter(rendezvous(split, SessionId(f"{number:08x}-4b6e-4c1d")) for number in range(100_000))
    for version, part in split:
        p = part / PARTS
        assert abs(found[version] / 100_000 - p) < 3 * sqrt(p * (1 - p) / 100_000)


tables = st.lists(st.integers(1, 3000), min_size=2, max_size=5).map(
    lambda shares: Table(
        "chat",
        tuple(
            Version(name, part) for name, part in parts_of({f"v{n}": float(s) for n, s in enumerate(shares)}).items()
        ),
    )
)


def versions_of(table: Table) -> list[VersionName]:
    split = [(VersionName(version.name), float(version.weight)) for version in table.versions if version.weight]
    return [rendezvous(split, session) for session in SESSIONS[:300]]


@given(table=tables, weight=st.integers(0, PARTS))
def test_a_weight_that_is_changed_moves_sessions_only_to_it_or_only_from_it(table: Table, weight: int) -> None:
    """Of the others' sessions none comes back from it; between the others rounding moves one in thousands at most."""
    changed = table.versions[0]
    made = weighed(table, changed.name, weight)
    if made is None:
        return
    grown = made.weights[changed.name] >= changed.weight
    between = 0
    for before, after in zip(versions_of(table), versions_of(made), strict=True):
        if before != after:
            between += changed.name not in (before, after)
            assert (before if grown else after) != changed.name
    assert between <= 3
