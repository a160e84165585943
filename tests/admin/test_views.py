"""What the pages show, read back from their JSON."""

import json
import math
from math import inf

import msgspec
import pytest

from sidecar.admin import views
from sidecar.admin.facts import ControlView, LogView, Phase
from sidecar.core import evidence
from sidecar.core.breaker import Action, Agreed, Breaker, Permit, Scope, State
from sidecar.core.pool import Node
from sidecar.core.service import ServiceState
from sidecar.kernel.ids import ServiceName, SessionId, VersionName
from sidecar.kernel.outcome import Ending, Result
from sidecar.policy.schema import Endpoint, NodeBreaker, Snapshot
from tests.admin.facts import (
    CHAT,
    NO_FLOOR,
    A,
    B,
    FakeDesk,
    FakeLog,
    Keys,
    StillFacts,
    breaker,
    rollout,
    service,
    snapshot,
    table,
    trip,
)

EPOCH = "2023-11-14T22:13:20.000Z"
"""The still clock's now."""


def read(page: object) -> object:
    return msgspec.json.decode(views.encode(page))


def test_breaker_line_has_the_contract_s_members() -> None:
    facts = StillFacts(snapshot(service(A)))
    trip([breaker(facts)], 990.0)
    assert read(list(views.breakers(facts))) == [
        {
            "scope": "node",
            "key": A,
            "service": "chat",
            "state": "open",
            "version": 1,
            "since": "2023-11-14T22:13:10.000Z",
            "why": "consecutive",
            "evidence": "5 failures in a row, the last: reset",
            "by": "",
            "held": False,
            "until": "",
            "observer": "",
            "registered": "",
            "detector": {
                "learning": True,
                "answers": 0,
                "min_samples": 200,
                "fast": 0.0,
                "gray": 0.0,
                "threshold": 13.82,
                "location": 0.0,
                "location_trip": 20.0,
                "offset": 0.0,
                "late_times": None,
                "background": 0.002,
                "overload": False,
                "panic": False,
            },
        }
    ]


def test_evidence_is_what_opened_a_breaker_until_it_closes_and_then_what_closed_it() -> None:
    facts = StillFacts(snapshot(service(A)))
    one = breaker(facts)
    assert [line.evidence for line in views.breakers(facts)] == [""]
    trip([one], 900.0)
    opened = "5 failures in a row, the last: reset"
    for state, now in (("open", 900.0), ("half_open", 910.0)):
        permit = one.acquire(now)
        (line,) = views.breakers(facts)
        assert (line.state, line.evidence) == (state, opened)
    assert isinstance(permit, Permit)
    one.record(permit, Result.FAILURE, 911.0, "late")
    (line,) = views.breakers(facts)
    assert (line.state, line.why, line.evidence) == ("open", "probe_failed", opened)
    facts.fleet.override(Scope.NODE, A, "close", 1000.0, "operator")
    (line,) = views.breakers(facts)
    assert (line.state, line.evidence) == ("closed", "close by operator")


def test_detector_shows_what_it_has_learnt_and_what_speaks_against_an_endpoint() -> None:
    facts = StillFacts(snapshot(service(A, B)))
    state = facts.fleet.services[CHAT]
    slow, turn = state.nodes[A], 0
    while slow.breaker.state is State.CLOSED and turn < 400:
        # At last every answer of A is late.
        took_s = 0.5 * (1 + turn % 5 / 10)
        now = 1000.0 + turn / 10
        _answers(state, slow, took_s if turn < 300 else 30.0, now)
        _answers(state, state.nodes[B], took_s, now)
        if turn % 10 == 9:
            facts.fleet.tick(now)
        turn += 1
        shown = next(views.breakers(facts, "node", A)).detector
        # What ends after its breaker moved counts for nothing.
        assert shown is not None and shown.answers == 2 * turn - (slow.breaker.state is not State.CLOSED)
        assert shown.learning == (turn < 100)
        assert shown.late_times is None or 3.0 <= shown.late_times <= 12.0
        assert turn <= 300 or max(shown.fast, shown.gray, shown.location) > 0.0
    (line,) = views.breakers(facts, "node", A)
    assert line.state == "open" and line.why in ("fast", "location")
    assert line.evidence == slow.breaker.evidence and "of" in line.evidence
    assert line.detector is not None and line.detector.late_times is not None


def _answers(state: ServiceState, node: Node, took_s: float, now: float) -> None:
    """One stream on `node`, from its request to its end."""
    permit = node.breaker.acquire(now)
    assert isinstance(permit, Permit)
    expectation = evidence.expect(state, node, permit, "m", 400, None)
    assert expectation is not None
    evidence.first_token(state, node, expectation, took_s, now)
    evidence.ended(state, node, permit, expectation, Ending.COMPLETE, Result.SUCCESS, 0.0, now)


@pytest.mark.parametrize("scope", ["node", "session", "request"])
def test_only_endpoints_have_a_detector_and_only_where_the_policy_has_one(scope: str) -> None:
    fixed = msgspec.structs.replace(NO_FLOOR, node=NodeBreaker(adaptive=False))
    for breakers, learns in ((NO_FLOOR, scope == "node"), (fixed, False)):
        facts = StillFacts(snapshot(service(A, breakers=breakers)))
        facts.fleet.services[CHAT].session(SessionId(A), 1000.0)
        facts.fleet.services[CHAT].request_breaker(A, 1000.0)
        facts.fleet.override(Scope(scope), A, "open", 1000.0, "operator")
        (line,) = views.breakers(facts, scope, A)
        assert (line.detector is not None) == learns


def test_same_endpoint_in_two_services_is_two_lines() -> None:
    facts = StillFacts(snapshot(service(A), service(A, name="other")))
    assert [(line.service, line.key) for line in views.breakers(facts)] == [("chat", A), ("other", A)]


def test_one_breaker_can_be_asked_for() -> None:
    facts = StillFacts(snapshot(service(A, B), service(A, name="other")))
    facts.fleet.services[CHAT].session(SessionId(A), 1000.0)
    facts.fleet.override(Scope.SESSION, A, "open", 1000.0, "operator")
    asked = [(line.scope, line.service, line.key) for line in views.breakers(facts, "node", A)]
    assert asked == [("node", "chat", A), ("node", "other", A)]


def test_operator_s_order_names_him() -> None:
    facts = StillFacts(snapshot(service(A)))
    facts.fleet.override(Scope.NODE, A, "open", 1000.0, "operator")
    (line,) = views.breakers(facts)
    assert (line.state, line.by, line.since) == ("open", "operator", EPOCH)


@pytest.mark.parametrize(
    ("action", "for_s", "held", "until"),
    [
        ("open", inf, True, ""),
        ("open", 600.0, True, "2023-11-14T22:23:20.000Z"),
        ("hold", 86_400.0, True, "2023-11-15T22:13:20.000Z"),
        ("close", inf, False, ""),
        ("reset", inf, False, ""),
    ],
)
def test_order_says_whether_it_lasts_and_until_when(action: Action, for_s: float, held: bool, until: str) -> None:
    facts = StillFacts(snapshot(service(A)))
    facts.fleet.override(Scope.NODE, A, action, 1000.0, "ann", for_s)
    (line,) = views.breakers(facts)
    assert (line.by, line.held, line.until) == ("ann", held, until)
    facts.monotonic_s += 86_401.0
    facts.fleet.tick(facts.now())
    (line,) = views.breakers(facts)
    assert line.held == (held and not until)
    assert line.until == ""


def test_what_came_from_the_log_says_whose_word_it_is_and_its_version_there() -> None:
    facts = StillFacts(snapshot(service(A)))
    agreed = Agreed(State.OPEN, 1_700_000_000, 3, 990.0, 1010.0, "fast", "3 of 4 answers bad", "", "pod-3")
    breaker(facts).adopt(agreed, NoProbes(), 1000.0)
    (line,) = views.breakers(facts)
    assert (line.state, line.observer, line.registered) == ("open", "pod-3", "1700000000.3")
    assert (line.by, line.held, line.until) == ("", False, "")


class NoProbes:
    """Lends none."""

    def wants(self, breaker: Breaker) -> None:
        pass

    def ended(self, breaker: Breaker, seq: int, result: Result, why: str) -> None:
        pass


def test_route_shows_where_its_models_go() -> None:
    one = Endpoint(url=f"http://{A}", version="v1", zone="az-a", local=True)
    two = Endpoint(url="unix:///run/vllm.sock", version="v2")
    facts = StillFacts(
        snapshot(service(one, two, models=("llama*",), split={"v1": 90.0, "v2": 10.0}, fallback="small"))
    )
    state = facts.fleet.services[CHAT]
    state.session(SessionId("s"), 1000.0)
    node = state.nodes[A]
    node.in_flight, node.waiting, node.models, node.overload_until = 2, 5, frozenset({"b", "a"}), 1002.5
    (route,) = read_routes(facts)
    assert (route.service, route.models, route.split, route.fallback, route.sessions) == (
        "chat",
        ("llama*",),
        {"v1": 90.0, "v2": 10.0},
        "small",
        1,
    )
    first, second = route.endpoints
    assert read(first) == {
        "key": A,
        "url": f"http://{A}",
        "version": "v1",
        "engine": "vllm",
        "front": "openai",
        "engine_model": "",
        "zone": "az-a",
        "local": True,
        "state": "closed",
        "usable": True,
        "in_flight": 2,
        "waiting": 5,
        "draining": False,
        "overloaded_s": 2.5,
        "models": ["a", "b"],
    }
    assert (second.key, second.models, second.overloaded_s) == ("/run/vllm.sock", None, 0.0)


@pytest.mark.parametrize(
    ("endpoint", "spoken"),
    [
        (Endpoint(url=f"http://{A}", engine="triton", engine_model="m"), ("triton", "generate", "m")),
        (Endpoint(url=f"http://{A}", engine="deepspeed", front="gateway"), ("deepspeed", "gateway", "")),
    ],
)
def test_an_endpoint_says_how_it_is_spoken_to(endpoint: Endpoint, spoken: tuple[str, str, str]) -> None:
    (route,) = read_routes(StillFacts(snapshot(service(endpoint))))
    (line,) = route.endpoints
    assert (line.engine, line.front, line.engine_model) == spoken


def test_endpoint_that_never_was_overloaded_is_json() -> None:
    """The fleet says minus infinity, which JSON cannot."""
    facts = StillFacts(snapshot(service(A)))
    assert facts.fleet.services[CHAT].nodes[A].overload_until == -math.inf
    assert read_routes(facts)[0].endpoints[0].overloaded_s == 0.0


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize("counts", [(), (0,), (3,), (1, 0, 2)])
def test_routes_are_the_same_in_slices_of_any_size(counts: tuple[int, ...], size: int) -> None:
    services = [
        service(*(f"10.0.{number}.{host}:80" for host in range(count)), name=f"s{number}")
        for number, count in enumerate(counts)
    ]
    facts = StillFacts(snapshot(*services))
    assert [(route.service, len(route.endpoints)) for route in read_routes(facts, size)] == [
        (f"s{number}", count) for number, count in enumerate(counts)
    ]
    assert list(views.routes(facts, size)).count(None) == sum(count // size for count in counts)


def read_routes(facts: StillFacts, size: int = 2) -> list[views.RouteLine]:
    return [line for line in views.routes(facts, size) if line is not None]


def test_session_shows_where_it_is_and_looking_keeps_nothing_alive() -> None:
    facts = StillFacts(snapshot(service(A, B)))
    session = facts.fleet.services[CHAT].session(SessionId("s"), 995.0)
    session.node_key, session.home_key, session.version = B, A, VersionName("v1")
    expected = {
        "service": "chat",
        "id": "s",
        "state": "closed",
        "version": "v1",
        "endpoint": B,
        "home": A,
        "seen": "2023-11-14T22:13:15.000Z",
    }
    assert read(views.sessions(facts, "s")) == [expected]
    assert session.seen_at == 995.0


def test_session_that_never_served_has_empty_members() -> None:
    facts = StillFacts(snapshot(service(A)))
    facts.fleet.services[CHAT].session(SessionId("s"), 1000.0)
    (line,) = views.sessions(facts, "s")
    assert (line.version, line.endpoint, line.home) == ("", "", "")


def test_session_is_shown_with_its_breaker_in_every_service_that_knows_it() -> None:
    facts = StillFacts(snapshot(service(A), service(B, name="other"), service(B, name="third")))
    for name in ("chat", "other"):
        facts.fleet.services[ServiceName(name)].session(SessionId("s"), 1000.0)
    facts.fleet.override(Scope.SESSION, "s", "open", 1000.0, "operator")
    assert [(line.service, line.state) for line in views.sessions(facts, "s")] == [("chat", "open"), ("other", "open")]
    assert views.sessions(facts, "unknown") == []


def test_policy_is_shown_as_it_is_written() -> None:
    """Durations as strings with a unit, keys as in files."""
    facts = StillFacts(snapshot(service(A), warnings=("hedge is not enforced",)))
    page = read(views.policy(facts))
    assert isinstance(page, dict)
    assert page["version"] == 7
    assert page["warnings"] == ["hedge is not enforced"]
    (chat,) = page["policy"]["services"]
    assert chat["deadlines"]["first_token"] == "30s"
    assert chat["breakers"]["node"]["open_max"] == "5m"


def test_refused_policy_is_told_beside_the_one_in_force() -> None:
    facts = StillFacts(snapshot(service(A)))
    facts.store.refuse("a.yaml:3: $.services: duplicate key")
    page = views.policy(facts)
    assert (page.version, page.failed, page.last_error) == (7, 1, "a.yaml:3: $.services: duplicate key")
    assert read(views.health(facts).parts["policy"]) == {"ok": False, "detail": "a.yaml:3: $.services: duplicate key"}
    assert views.health(facts).status == "ready"


def test_health_tells_of_keys_that_cannot_be_read() -> None:
    facts = StillFacts(snapshot(service(A)))
    assert "keys" not in views.health(facts).parts
    facts.keys = [Keys("https://a"), Keys("https://b")]
    assert views.health(facts).parts["keys"] == views.Part(True, "of 2 issuers")
    facts.keys = [Keys("https://a", 0), Keys("https://b", stale_s=600.2, why="503"), Keys("https://c", 0, why="gone")]
    health = views.health(facts)
    assert (health.status, health.parts["keys"].ok) == ("ready", False)
    assert health.parts["keys"].detail == (
        "none of https://a: not read yet; those of https://b could not be read for 600 s: 503; none of https://c: gone"
    )


def test_health_tells_of_tokenizers_that_cannot_be_used() -> None:
    names = [f"s{number}" for number in range(views.MANY + 2)]
    facts = StillFacts(snapshot(service(A), *(service(A, name=name, tokenizer="/m/t.json") for name in names)))
    facts.uncounted = {CHAT: "it has no tokenizer"}
    assert list(views.health(facts).parts) == ["policy", "endpoints"]
    facts.uncounted["s1"] = "cannot be read: No such file or directory; prompts are estimated"
    assert views.health(facts).parts["tokenizer s1"] == views.Part(False, facts.uncounted["s1"])
    facts.uncounted = dict.fromkeys(names, "bad")
    assert len(views.health(facts).parts) == 2 + views.MANY


def test_health_names_its_parts() -> None:
    facts = StillFacts(snapshot(service(A, B)))
    trip([breaker(facts, A)], 1000.0)
    assert read(views.health(facts)) == {
        "status": "ready",
        "reason": "",
        "phase": "serving",
        "parts": {
            "policy": {"ok": True, "detail": "version 7"},
            "endpoints": {"ok": True, "detail": "1 of 2 usable"},
        },
        "log": None,
    }
    trip([breaker(facts, B)], 1000.0)
    page = views.health(facts)
    assert (page.status, page.reason, page.parts["endpoints"].ok) == ("not_ready", "no endpoint is usable", False)
    facts.phase = Phase.DRAINING
    assert views.health(facts).reason == "draining"


@pytest.mark.parametrize(
    ("view", "ok", "detail"),
    [
        (LogView("up", 1_699_999_000.0, members=3), True, "up since 2023-11-14T21:56:40.000Z, 3 sidecars"),
        (
            LogView("away", 1_700_000_000.0, "connection refused", ring=7, dropped=1, members=3),
            False,
            f"away since {EPOCH}, connection refused, 3 sidecars, 7 waiting to be written, 1 lost unwritten",
        ),
        (
            LogView("up", 1_700_000_000.0, "timed out", lag_records=5, members=3),
            True,
            f"up since {EPOCH}, 3 sidecars, 5 records behind",
        ),
        (LogView("local", 1_700_000_000.0, members=1), True, f"local since {EPOCH}"),
    ],
    ids=["up", "away", "behind", "local"],
)
def test_health_says_how_it_stands_with_the_log_and_is_ready_without(view: LogView, ok: bool, detail: str) -> None:
    facts, log = StillFacts(snapshot(service(A))), FakeLog()
    facts.log, log.stood = log, view
    page = views.health(facts)
    assert page.status == "ready"
    assert page.parts["log"] == views.Part(ok, detail)
    assert page.log is not None
    numbers = ("state", "last_error", "lag_records", "ring", "dropped", "members", "position")
    assert [getattr(page.log, name) for name in numbers] == [getattr(view, name) for name in numbers]


def test_only_durations_are_taught_to_the_encoder() -> None:
    with pytest.raises(NotImplementedError, match="object"):
        views.encode({"x": object()})


def test_name_that_is_no_text_breaks_no_page() -> None:
    facts = StillFacts(snapshot(service(A)))
    facts.fleet.services[CHAT].session(SessionId("\ud800"), 1000.0)
    facts.fleet.override(Scope.SESSION, "\ud800", "open", 1000.0, "operator")
    lines = json.loads(views.encode(list(views.breakers(facts))))
    assert [line["key"] for line in lines] == [A, "\ud800"]


def test_any_default_policy_encodes() -> None:
    assert read(Snapshot(version=1, services=())) != {}


def test_health_tells_of_tables_and_canaries_under_way() -> None:
    facts = StillFacts(snapshot(service(A)))
    assert "routes" not in views.health(facts).parts
    facts.routes = FakeDesk(table(), table("b", rollout("held")), table("c", rollout("failed")))
    assert read(views.health(facts).parts["routes"]) == {"ok": True, "detail": "3 tables, b v2 held"}
    facts.routes = FakeDesk(*(table(f"s{n}", rollout()) for n in range(12)))
    assert views.health(facts).parts["routes"].detail.endswith("s8 v2 running, ...")


def test_health_tells_of_the_ports_that_are_on() -> None:
    facts = StillFacts(snapshot(service(A)))
    facts.control, facts.xds = ControlView("127.0.0.1:9402", 1), ControlView("127.0.0.1:9403", 0)
    parts = views.health(facts).parts
    assert (parts["control"].detail, parts["xds"].detail) == ("127.0.0.1:9402, 1 stream", "127.0.0.1:9403, 0 streams")


def test_a_table_of_a_service_that_is_not_made_here_is_a_route_without_endpoints() -> None:
    facts = StillFacts(snapshot(service(A)))
    facts.routes = FakeDesk(table("other"))
    first, other = read_routes(facts)
    assert (first.service, first.table) == ("chat", None)
    assert (other.service, other.models, other.endpoints) == ("other", ("other",), [])
    assert other.table is not None and [each.weight for each in other.table.versions] == [0.95, 0.05]
