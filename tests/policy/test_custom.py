from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.policy.check import check_service
from sidecar.policy.custom import concerns, mesh_fallback, split_of, with_mesh, with_mesh_fallbacks
from sidecar.policy.load import PolicyErrors, unlisted
from sidecar.policy.resources import LlmService, ServedVersion
from sidecar.policy.schema import (
    Adaptive,
    Breakers,
    Deadlines,
    Endpoint,
    HealthCheck,
    MeshBreaker,
    NodeBreaker,
    Quota,
    RequestBreaker,
    Seconds,
    Service,
    SessionBreaker,
)
from tests.policy.build import faults_of, llm_service, load_documents, mesh, policy, token_quota

A, B = {"name": "a"}, {"name": "b"}


def at(name: str, *urls: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "endpoints": [{"url": url} for url in urls], **fields}


# --- the mesh's breaker rules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "path", "message"),
    [
        (
            mesh(timeoutSeconds=31, maxTimeoutSeconds=30),
            "$.spec.maxTimeoutSeconds",
            "maxTimeoutSeconds must not be shorter than timeoutSeconds",
        ),
        (mesh("Session", minClosedRatio=0.5), "$.spec.minClosedRatio", "minClosedRatio is of scope Node only"),
        (mesh("Request", adaptive=False), "$.spec.adaptive", "adaptive is of scope Node only"),
        (mesh("Node", maxSessions=5), "$.spec.maxSessions", "maxSessions is of scope Session only"),
        (mesh("Node", key="route"), "$.spec.key", "key is of scope Request only"),
        (
            mesh(services=["a", "b"], fallbackService="b"),
            "$.spec.fallbackService",
            "fallbackService is one of services: nothing falls back to itself",
        ),
    ],
)
def test_a_breaker_rule_asks_for_what_its_scope_has(document: Any, path: str, message: str) -> None:
    assert faults_of(document) == [(path, message)]


def test_every_number_of_a_breaker_rule_reaches_its_breaker() -> None:
    common = {
        "mode": "Shadow",
        "failureThreshold": 7,
        "failureRatio": 0.25,
        "minRequests": 9,
        "windowSeconds": 3,
        "timeoutSeconds": 4,
        "maxTimeoutSeconds": 5,
        "probes": 6,
        "successes": 8,
    }
    (service,) = load_documents(
        policy({"name": "s"}),
        mesh("Node", name="n", minClosedRatio=0, adaptive=False, **common),
        mesh("Session", name="s", maxSessions=11, **common),
        mesh("Request", name="r", key="header:x-kind", **common),
    ).services
    rule: dict[str, Any] = {
        "mode": "shadow",
        "consecutive": 7,
        "failure_ratio": 0.25,
        "min_requests": 9,
        "window_s": Seconds(3),
        "open_s": Seconds(4),
        "open_max_s": Seconds(5),
        "probes": 6,
        "successes": 8,
    }
    assert service.breakers == Breakers(
        node=NodeBreaker(min_closed_ratio=0.0, adaptive=False, **rule),
        session=SessionBreaker(max_sessions=11, **rule),
        request=RequestBreaker(key="header:x-kind", **rule),
    )


def test_a_rule_that_says_nothing_leaves_every_breaker_as_it_is() -> None:
    service = Service(name="s", breakers=Breakers(node=NodeBreaker(adaptive=Adaptive(kappa=3), open_s=Seconds(9))))
    for rule in (MeshBreaker(scope="Node"), MeshBreaker(scope="Session"), MeshBreaker(scope="Request")):
        assert with_mesh(service, [rule]) == service


def test_the_detectors_own_numbers_outlive_a_rule_that_only_says_that_it_is_on() -> None:
    numbers = Service(name="s", breakers=Breakers(node=NodeBreaker(adaptive=Adaptive(kappa=3))))
    off = Service(name="s", breakers=Breakers(node=NodeBreaker(adaptive=False)))
    for service, says, then in ((numbers, True, Adaptive(kappa=3)), (numbers, False, False), (off, True, True)):
        assert with_mesh(service, [MeshBreaker(scope="Node", adaptive=says)]).breakers.node.adaptive == then


@pytest.mark.parametrize(
    ("timeout_s", "max_timeout_s", "expected"),
    [
        (None, None, (10.0, 300.0)),
        (20.0, None, (20.0, 300.0)),
        (400.0, None, (400.0, 400.0)),
        (None, 60.0, (10.0, 60.0)),
        (None, 5.0, (5.0, 5.0)),
        (20.0, 20.0, (20.0, 20.0)),
        (400.0, 500.0, (400.0, 500.0)),
    ],
)
def test_the_two_waits_of_a_breaker_stay_in_order(
    timeout_s: float | None, max_timeout_s: float | None, expected: tuple[float, float]
) -> None:
    rule = MeshBreaker(scope="Node", timeout_s=timeout_s, max_timeout_s=max_timeout_s)
    node = with_mesh(Service(name="s"), [rule]).breakers.node
    assert (node.open_s, node.open_max_s) == expected


def test_the_nearer_rule_wins_key_by_key_in_any_order() -> None:
    rules = (
        MeshBreaker(scope="Node", failure_threshold=2, probes=3),
        MeshBreaker(scope="Node", services=("a",), failure_threshold=9),
        MeshBreaker(scope="Node", services=("b", "c"), probes=7),
    )
    for order in permutations(rules):
        assert [
            (node.consecutive, node.probes)
            for name in "abcd"
            for node in (with_mesh(Service(name=name), order).breakers.node,)
        ] == [(9, 3), (2, 7), (2, 7), (2, 3)]


def test_a_rule_is_of_the_services_it_names_or_of_all() -> None:
    assert concerns(MeshBreaker(scope="Node"), "a")
    assert concerns(MeshBreaker(scope="Node", services=("a",)), "a")
    assert not concerns(MeshBreaker(scope="Node", services=("a",)), "b")


def test_a_scope_has_one_rule_for_all_and_one_for_each_service() -> None:
    ruled = [mesh("Node", "all"), mesh("Node", "one", services=["a"]), mesh("Session", "two", services=["a"])]
    assert faults_of(policy(A), *ruled) == []
    assert faults_of(*ruled, mesh("Node", "more")) == [
        ("$.spec.scope", "the CircuitBreakerPolicy for scope Node is defined already, at a.yaml:1")
    ]
    assert faults_of(*ruled, mesh("Node", "more", services=["b", "a"])) == [
        (
            "$.spec.services[1]",
            "the CircuitBreakerPolicy of service a for scope Node is defined already, at a.yaml:3",
        )
    ]
    assert [path for path, _ in faults_of(mesh("Node", services=["a", "a"]))] == ["$.spec.services[1]"]


def test_names_that_no_service_has_are_warnings() -> None:
    snapshot = load_documents(policy(A), mesh("Node", "cb", services=["a", "x", "y"], fallbackService="z"))
    assert snapshot.warnings == (
        "CircuitBreakerPolicy cb: there is no service z to fall back to",
        "CircuitBreakerPolicy cb: there is no service x, y; it holds once a routing table makes one",
    )
    assert unlisted("x", (), snapshot).breakers == Breakers()
    ruled = load_documents(policy(A), mesh("Node", services=["x"], failureThreshold=9, fallbackService="a"))
    assert (unlisted("x", (), ruled).breakers.node.consecutive, unlisted("x", (), ruled).fallback) == (9, "a")
    assert (unlisted("w", (), ruled).breakers, unlisted("w", (), ruled).fallback) == (Breakers(), "")


def test_a_fallback_is_for_those_that_the_rule_names_and_the_nearer_one_comes_first() -> None:
    services = [Service(name=name) for name in "abcd"]
    rules = [MeshBreaker(scope="Node", fallback_service="d")]
    rules.append(MeshBreaker(scope="Session", services=("a", "c"), fallback_service="b"))
    for order in (rules, rules[::-1]):
        assert [each.fallback for each in with_mesh_fallbacks(services, order)] == ["b", "d", "b", ""]
        assert mesh_fallback("a", services, order) == "b"
        assert mesh_fallback("z", services, order) == "d"
    assert mesh_fallback("a", [], rules) == ""


# --- services -------------------------------------------------------------------------------------------------------


def test_the_smallest_service_has_all_by_default() -> None:
    (service,) = load_documents(llm_service("chat", modelRef="meta-llama/Llama-3.1-8B")).services
    assert service == Service(name="chat", models=("meta-llama/Llama-3.1-8B",))


def test_everything_that_a_service_says_is_a_policy_s() -> None:
    (small, service) = load_documents(
        llm_service("small", modelRef="s"),
        llm_service(
            "chat",
            aliases=["llama-*"],
            versions=[
                at("v1", "http://127.0.0.1:8000", weight=3),
                {
                    "name": "v2",
                    "engine": "triton",
                    "front": "generate",
                    "engineModel": "ensemble",
                    "chatTemplate": "/models/llama",
                    "endpoints": [
                        {"url": "unix:///run/t", "zone": "az-a", "node": "n1", "metricsUrl": "http://t:8002"},
                        {"url": "http://t:8000"},
                    ],
                },
            ],
            healthProbe={"path": "/health", "timeoutSeconds": 5, "intervalSeconds": 0.5},
            deadlines={"headSeconds": 300, "firstTokenSeconds": 20, "tokenGapSeconds": 2, "totalSeconds": 900},
            fallbackService="small",
        ),
    ).services
    assert small.name == "small"
    triton: dict[str, Any] = {
        "engine": "triton",
        "front": "generate",
        "engine_model": "ensemble",
        "chat_template": "/models/llama",
        "version": "v2",
    }
    assert service == Service(
        name="chat",
        models=("m", "llama-*"),
        endpoints=(
            Endpoint(url="http://127.0.0.1:8000", version="v1", local=True),
            Endpoint(url="unix:///run/t", zone="az-a", node="n1", metrics_url="http://t:8002", local=True, **triton),
            Endpoint(url="http://t:8000", **triton),
        ),
        split={"v1": 3.0, "v2": 1.0},
        fallback="small",
        deadlines=Deadlines(
            head_s=Seconds(300), first_token_s=Seconds(20), token_gap_s=Seconds(2), total_s=Seconds(900)
        ),
        health_check=HealthCheck(mode="truth", path="/health", timeout_s=Seconds(5), interval_s=Seconds(0.5)),
    )


@pytest.mark.parametrize(
    ("spec", "split"),
    [
        ({}, {}),
        ({"versions": [A]}, {"a": 1}),
        ({"versions": [A, B]}, {"a": 1, "b": 1}),
        ({"versions": [{**A, "weight": 9}, {**B, "weight": 0}]}, {"a": 9, "b": 0}),
        ({"versions": [A, B], "canaryTrafficPercent": 10}, {"a": 90, "b": 10}),
        ({"versions": [A, B], "canaryTrafficPercent": 10, "canaryVersion": "a"}, {"a": 10, "b": 90}),
        ({"versions": [A, B], "canaryTrafficPercent": 0}, {"a": 100, "b": 0}),
        ({"versions": [{**A, "weight": 0}, B], "canaryTrafficPercent": 100}, {"a": 0, "b": 100}),
        (
            {"versions": [{**A, "weight": 3}, {"name": "c"}, B], "canaryTrafficPercent": 20},
            {"a": 60, "c": 20, "b": 20},
        ),
        ({"versions": [A], "canaryTrafficPercent": 0}, {"a": 1}),
        ({"canaryTrafficPercent": 0}, {}),
    ],
)
def test_versions_get_their_weights_or_what_the_canary_leaves(spec: Any, split: dict[str, float]) -> None:
    (service,) = load_documents(llm_service(**spec)).services
    assert service.split == split


BESIDE = "canaryTrafficPercent needs a version beside the canary: list both in versions"
WEIGHTS = "all weights are 0: at least one must be positive"
CANARY_WEIGHT = "the canary's weight is canaryTrafficPercent: leave its own out"
TRANSLATED = "is of use where requests are translated; start the engine with the name that clients ask for"
A0, B0 = {**A, "weight": 0}, {**B, "weight": 0}


@pytest.mark.parametrize(
    ("spec", "path", "message"),
    [
        ({"canaryTrafficPercent": 1}, "canaryTrafficPercent", BESIDE),
        ({"canaryTrafficPercent": 1, "versions": [A]}, "canaryTrafficPercent", BESIDE),
        ({"versions": [A, B], "canaryVersion": "a"}, "canaryVersion", "canaryVersion is of use with canaryTraffic"),
        (
            {"versions": [A, B], "canaryVersion": "c", "canaryTrafficPercent": 1},
            "canaryVersion",
            "canaryVersion is not one of versions",
        ),
        ({"versions": [A, {**B, "weight": 5}], "canaryTrafficPercent": 1}, "versions", CANARY_WEIGHT),
        (
            {"versions": [{**A, "weight": 5}, B], "canaryTrafficPercent": 1, "canaryVersion": "a"},
            "versions",
            CANARY_WEIGHT,
        ),
        ({"versions": [A0]}, "versions", WEIGHTS),
        ({"versions": [A0, B0]}, "versions", WEIGHTS),
        ({"versions": [A0, B], "canaryTrafficPercent": 99}, "versions", WEIGHTS),
        ({"versions": [at("a", "http://x"), B]}, "versions", "either every version lists endpoints, or none does"),
        ({"versions": [A, B, A]}, "versions[2].name", "a is a version of this service already"),
        (
            {"versions": [at("a", "http://x"), at("b", "http://y", "http://x:80/")]},
            "versions[1].endpoints[1].url",
            "x:80 is an endpoint of this service already",
        ),
        (
            {"versions": [at("a", "http://[1.2.3.4]:80")]},
            "versions[0].endpoints[0].url",
            '"http://[1.2.3.4]:80" has a host that is not an IPv6 address',
        ),
        (
            {"versions": [{**A, "endpoints": [{"url": "http://x", "metricsUrl": "http://[:]"}]}]},
            "versions[0].endpoints[0].metricsUrl",
            '"http://[:]" has a host that is not an IPv6 address',
        ),
        (
            {"versions": [A, {**B, "front": "gateway"}]},
            "versions[1].front",
            "vllm has no front gateway; it has openai",
        ),
        ({"versions": [{**A, "engineModel": "x"}]}, "versions[0].engineModel", TRANSLATED),
        (
            {"versions": [{**A, "engine": "triton", "engineModel": "a/b"}]},
            "versions[0].engineModel",
            '"a/b" is of no use: Triton calls a model name or name/versions/version',
        ),
        (
            {"versions": [{**A, "engine": "deepspeed", "chatTemplate": "/t"}]},
            "versions[0].chatTemplate",
            "is of no use: this front applies its own",
        ),
        ({"fallbackService": "llm"}, "fallbackService", "a service cannot be its own fallback"),
    ],
)
def test_a_service_that_cannot_do_what_it_says_is_refused_where_it_says_so(spec: Any, path: str, message: str) -> None:
    ((found, words),) = faults_of(llm_service(**spec))
    assert found == f"$.spec.{path}"
    assert words.startswith(message)


def test_fallbacks_of_objects_and_of_policies_are_one_net() -> None:
    faults = faults_of(llm_service("a", modelRef="a", fallbackService="b"), policy({"name": "b", "fallback": "a"}))
    assert faults == [
        ("$.spec.fallbackService", "goes round in a loop: a -> b -> a"),
        ("$.services[0].fallback", "goes round in a loop: b -> a -> b"),
    ]
    assert faults_of(llm_service("a"), policy({"name": "a"})) == [
        ("$.services[0].name", "service a is defined already, at a.yaml:1")
    ]


_VERSION = st.fixed_dictionaries(
    {"name": st.sampled_from(["a", "b", "c"])},
    optional={
        "weight": st.integers(-1, 3),
        "engine": st.sampled_from(["vllm", "triton", "deepspeed"]),
        "front": st.sampled_from(["openai", "generate", "gateway"]),
        "engineModel": st.sampled_from(["m", "m/versions/1", "a/b"]),
        "chatTemplate": st.just("/t"),
        "endpoints": st.lists(
            st.fixed_dictionaries({"url": st.sampled_from(["http://a", "http://a:80", "http://b", "unix:///c"])}),
            max_size=2,
        ),
    },
)
_SPEC = st.fixed_dictionaries(
    {},
    optional={
        "versions": st.lists(_VERSION, max_size=3),
        "canaryTrafficPercent": st.sampled_from([0, 1, 50, 100]),
        "canaryVersion": st.sampled_from(["a", "b"]),
    },
)


@settings(deadline=None)
@given(_SPEC)
def test_a_service_that_is_taken_is_sound(spec: dict[str, Any]) -> None:
    try:
        (service,) = load_documents(llm_service(**spec)).services
    except PolicyErrors as errors:
        assert all(error.line > 0 and error.path.startswith("$.spec") for error in errors.errors)
        return
    assert list(check_service(service)) == []
    parts = sum(service.split.values())
    assert not service.split or parts > 0
    if "canaryTrafficPercent" in spec and len(service.split) > 1:
        canary = spec.get("canaryVersion", [*service.split][-1])
        assert parts == pytest.approx(100) and service.split[canary] == spec["canaryTrafficPercent"]


def test_parts_of_many_versions_add_up() -> None:
    versions = tuple(ServedVersion(name=f"v{n}", weight=n) for n in range(1, 15))
    spec = LlmService(model_ref="m", versions=(*versions, ServedVersion(name="c")), canary_traffic_percent=7)
    split = split_of(spec)
    assert sum(split.values()) == pytest.approx(100)
    assert split["v14"] == pytest.approx(14 * split["v1"])


# --- quotas ---------------------------------------------------------------------------------------------------------


def test_a_token_quota_is_a_quota_of_the_policy() -> None:
    spec = {
        "models": ["m-*"],
        "tokensPerMinute": 1,
        "tokensPerDay": 2,
        "requestsPerMinute": 3,
        "requestsPerDay": 4,
        "concurrency": 5,
        "mode": "Shadow",
        "whenLogAway": "Refuse",
    }
    whole, small = load_documents(token_quota("q", **spec), token_quota("r", concurrency=1, mode="Disabled")).quotas
    assert whole == Quota(
        name="q",
        tenant="acme",
        models=("m-*",),
        tokens_per_minute=1,
        tokens_per_day=2,
        requests_per_minute=3,
        requests_per_day=4,
        concurrency=5,
        mode="shadow",
        when_log_away="refuse",
    )
    assert small == Quota(name="r", tenant="acme", concurrency=1, mode="off")


@pytest.mark.parametrize(
    ("spec", "path", "message"),
    [
        (
            {},
            "$.spec",
            "bounds nothing: give at least one of tokensPerMinute, tokensPerDay, requestsPerMinute, requestsPerDay, "
            "concurrency",
        ),
        (
            {"tokensPerMinute": 2, "tokensPerDay": 1},
            "$.spec.tokensPerDay",
            "tokensPerDay must not be below tokensPerMinute",
        ),
        (
            {"requestsPerMinute": 2, "requestsPerDay": 1},
            "$.spec.requestsPerDay",
            "requestsPerDay must not be below requestsPerMinute",
        ),
    ],
)
def test_a_token_quota_bounds_something_that_can_be_reached(spec: Any, path: str, message: str) -> None:
    assert faults_of(token_quota(**spec)) == [(path, message)]


def test_a_quota_s_name_is_defined_once_however_it_is_written() -> None:
    quota = {"name": "q", "concurrency": 1}
    assert faults_of(policy(quotas=[quota]), token_quota("q", concurrency=1)) == [
        ("$.metadata.name", "quota q is defined already, at a.yaml:1")
    ]


# --- what all three have in common ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "version"),
    [
        (mesh(timeoutSeconds=2, maxTimeoutSeconds=1), "resilience.example.com/v1"),
        (llm_service(canaryTrafficPercent=1), "infra.ai/v1"),
        (token_quota(), "infra.ai/v1"),
    ],
)
def test_a_wrong_version_of_the_api_is_told_and_the_rest_judged_all_the_same(document: Any, version: str) -> None:
    faults = faults_of({**document, "apiVersion": f"{version}beta1"})
    assert faults[0] == ("$.apiVersion", f'expected {version}, got the text "{version}beta1"')
    assert faults[1:] == faults_of(document) != []


@pytest.mark.parametrize("document", [mesh(), llm_service(), token_quota(concurrency=1)])
def test_an_object_without_metadata_or_spec_says_so(document: Any) -> None:
    for key in ("metadata", "spec", "apiVersion"):
        assert faults_of({name: value for name, value in document.items() if name != key}) == [(f"$.{key}", "missing")]


def listed(*items: Any) -> Any:
    """As `kubectl get -o json` writes several objects."""
    return {"apiVersion": "v1", "kind": "List", "metadata": {"resourceVersion": ""}, "items": list(items)}


def test_a_list_of_objects_is_its_items() -> None:
    objects = (llm_service("a"), mesh("Node", services=["a"]), token_quota(concurrency=1), policy(B))
    assert load_documents(listed(*objects)) == load_documents(*objects)
    assert load_documents(listed()) == load_documents(policy())


def test_a_fault_in_a_list_is_told_where_it_is() -> None:
    assert faults_of(
        listed(
            llm_service("a"), llm_service("a", canaryTrafficPercent=1), mesh("Node", key="route"), {"kind": "Pod"}, 5
        )
    ) == [
        ("$.items[1].spec.canaryTrafficPercent", BESIDE),
        ("$.items[1].metadata.name", "service a is defined already, at a.yaml:1"),
        ("$.items[2].spec.key", "key is of scope Request only"),
        ("$.items[3].kind", "expected one of CircuitBreakerPolicy, LLMService, Policy, TokenQuota, got Pod"),
        ("$.items[4]", "expected a mapping with apiVersion and kind"),
    ]
    assert faults_of(listed(listed())) == [
        ("$.items[0].kind", "expected one of CircuitBreakerPolicy, LLMService, Policy, TokenQuota, got List")
    ]
    assert faults_of({**listed(), "apiVersion": "v2", "spec": 1}) == [
        ("$.apiVersion", "expected v1, got the text v2"),
        ("$.spec", "unknown key; known are apiVersion, kind"),
    ]
    assert faults_of({**listed(), "items": {}}) == [("$.items", "expected a list")]
    assert faults_of({"apiVersion": "v1", "kind": "List"}) == [("$.items", "expected a list")]
