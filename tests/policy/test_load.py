import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from sidecar.policy.errors import MAX_ERRORS
from sidecar.policy.load import PolicyErrors, endpoint_key, load, single, unlisted, with_upstreams
from sidecar.policy.schema import (
    Deadlines,
    Endpoint,
    Identity,
    JwtProvider,
    MeshBreaker,
    NodeBreaker,
    QosMatch,
    QosPolicy,
    Quota,
    Seconds,
    Service,
    Snapshot,
    Source,
    ZoneDecay,
)
from tests.policy.build import faults, faults_of, load_documents, load_service, load_text, mesh, policy, text

# The two documents of the contract, as it prints them.
CONTRACT = """
apiVersion: sidecar/v1
kind: Policy
services:
  - name: chat                       # `--upstream URL` alone makes one service `default` with models ["*"]
    models: ["*"]                    # globs over the request's model name
    endpoints:                       # static ones; the descriptor stream adds and removes more
      - {url: "http://127.0.0.1:8000", engine: vllm, version: v1, zone: az-a, node: gpu-1}
    split: {v1: 100}                 # parts per version; the descriptor stream overrides it
    fallback: chat-small             # service that serves when nothing here can; absent: 503
    deadlines: {connect: 1s, head: 60s, first_token: 30s, token_gap: 10s, tool_gap: 30s, total: 10m, idle_client: 60s}
    retry: {attempts: 3, budget_ratio: 0.2, budget_min: 3, window: 10s}
    hedge: {mode: "off"}             # off | shadow | enforce
    breakers:
      node:    {mode: enforce, consecutive: 5, open: 10s, open_max: 5m, probes: 1, successes: 2, min_closed_ratio: 0.34, adaptive: true}
      session: {mode: enforce, consecutive: 3, open: 30s, open_max: 10m, probes: 1, successes: 1, max_sessions: 100000}
      request: {mode: enforce, consecutive: 10, open: 5s, open_max: 1m, probes: 1, successes: 2, key: route}
    overload: {retry_after_default: 1s, retry_after_cap: 60s}
    zone_decay: {latency: 800ms, weight: 0.1}        # a zone whose latency jumps past this is turned down to this share
    shared: {quorum: 2}                               # observers needed for a fleet-wide open
identity:
  session: [{header: x-session-id}, {jwt_claim: sid}, {body: user}]   # first that is present
  tenant:  [{jwt_claim: tenant}, {header: x-tenant-id}]
  jwt: {issuers: []}                                                  # none: no JWT is read
qos_policies:
  - {name: voice-realtime, latency_sla_ms: 50,   preemptible: false, priority: 9}
  - {name: code-batch,     latency_sla_ms: 2000, preemptible: true,  priority: 3}
"""  # noqa: E501 - verbatim
CONTRACT_MESH = """
apiVersion: resilience.example.com/v1
kind: CircuitBreakerPolicy
metadata: {name: session-level-cb}
spec: {scope: Session, failureThreshold: 3, timeoutSeconds: 30, fallbackService: fallback-svc}   # scope: Request | Session | Node
"""  # noqa: E501 - verbatim


def test_the_documents_of_the_contract_load_together_and_alone() -> None:
    expected = Service(
        name="chat",
        endpoints=(Endpoint(url="http://127.0.0.1:8000", zone="az-a", node="gpu-1"),),
        split={"v1": 100.0},
        zone_decay=ZoneDecay(),
    )
    qos = (
        QosPolicy(name="voice-realtime", latency_sla_ms=50, priority=9),
        QosPolicy(name="code-batch", latency_sla_ms=2000, preemptible=True, priority=3),
    )
    alone = load_text(CONTRACT, version=7)
    assert (alone.version, alone.services, alone.qos_policies, alone.identity) == (7, (expected,), qos, Identity())
    together = load_text(CONTRACT + "---\n" + CONTRACT_MESH)
    assert together.services == (expected,)  # the mesh says what is the default anyway
    assert load_text(CONTRACT_MESH).mesh_breakers == together.mesh_breakers != ()


def test_the_contract_s_documents_warn_of_what_they_do_not_get() -> None:
    warnings = load_text(CONTRACT, CONTRACT_MESH).warnings
    for words in ("chat-small", "zone_decay", "only x-sidecar-priority names it", "fallback-svc"):
        assert sum(words in warning for warning in warnings) == 1
    assert len(warnings) == 4


def test_a_service_of_a_name_alone_has_every_default() -> None:
    assert load_service() == Service(name="s")


def test_every_fault_of_every_file_is_told_at_once_with_file_line_and_path() -> None:
    first = """\
apiVersion: sidecar/v2
kind: Policy
services:
  - {models: x}
  - name: a
    fallback: a
    endpoints:
      - {engine: vllm}
      - {url: "http://a/v1"}
      - {url: "http://b:80"}
      - {url: "http://B"}
    deadlines: {connect: 1:30, head: 5, hed: 1s}
    breakers:
      node: {consecutive: 0, open: 1h, probes: .inf}
      session: {open: 1h, open_max: nope}
    split: {v1: 0, v3: 0}
    split: {}
  - name: a
identity: {session: [{header: a, body: user}, {}]}
---
kind: Foo
---
- 1
---
apiVersion: sidecar/v1
"""
    second = """\
apiVersion: resilience.example.com/v1
kind: CircuitBreakerPolicy
spec: {scope: Pod, failureThreshold: 0}
---
apiVersion: sidecar/v1
kind: Policy
services: [{name: a}]
---
a: [
"""
    places = [line.split(": ", 2)[:2] for line in faults(first, second)]
    assert places == [
        ["a.yaml:1", "$.apiVersion"],
        ["a.yaml:4", "$.services[0].models"],
        ["a.yaml:4", "$.services[0].name"],
        ["a.yaml:6", "$.services[1].fallback"],
        ["a.yaml:8", "$.services[1].endpoints[0].url"],
        ["a.yaml:9", "$.services[1].endpoints[1].url"],
        ["a.yaml:11", "$.services[1].endpoints[3].url"],
        ["a.yaml:12", "$.services[1].deadlines.connect"],
        ["a.yaml:12", "$.services[1].deadlines.head"],
        ["a.yaml:12", "$.services[1].deadlines.hed"],
        ["a.yaml:14", "$.services[1].breakers.node.consecutive"],
        ["a.yaml:14", "$.services[1].breakers.node.probes"],
        ["a.yaml:14", "$.services[1].breakers.node.open"],
        ["a.yaml:15", "$.services[1].breakers.session.open_max"],
        ["a.yaml:16", "$.services[1].split"],
        ["a.yaml:17", "$.services[1].split"],
        ["a.yaml:18", "$.services[2].name"],
        ["a.yaml:19", "$.identity.session[0]"],
        ["a.yaml:19", "$.identity.session[1]"],
        ["a.yaml:21", "$.kind"],
        ["a.yaml:23", "$"],
        ["a.yaml:25", "$.kind"],
        ["b.yaml:1", "$.metadata"],
        ["b.yaml:3", "$.spec.scope"],
        ["b.yaml:3", "$.spec.failureThreshold"],
        ["b.yaml:7", "$.services[0].name"],
        ["b.yaml:10", "$"],
    ]


@pytest.mark.parametrize(
    ("service", "silent"),
    [
        ({"breakers": {"node": {"open": "10m", "open_max": "nope"}}}, "open_max"),
        ({"endpoints": [{"url": 5}], "split": {"v2": 1}}, "no endpoint"),
        ({"endpoints": [{"url": "http://a", "versoin": "v2"}], "split": {"v2": 1}}, "no endpoint"),
        ({"endpoints": "http://a", "split": {"v2": 1}}, "no endpoint"),
        ({"split": {"v1": "much"}}, "at least one"),
        ({"overload": {"retry_after_default": "2m", "retry_after_cap": 5}}, "longer"),
    ],
)
def test_a_rule_is_silent_about_what_could_not_be_read(service: dict[str, Any], silent: str) -> None:
    ((_, message),) = faults_of(policy({"name": "s", **service}))
    assert silent not in message


def test_services_of_several_documents_and_files_make_one_policy() -> None:
    one, two, three = (
        "\n".join(["apiVersion: sidecar/v1", "kind: Policy", f"services: [{{name: {n}}}]"]) for n in "abc"
    )
    snapshot = load_text(one + "\n---\n" + two, three + "\nready_when: always")
    assert [service.name for service in snapshot.services] == ["a", "b", "c"]
    assert snapshot.ready_when == "always"


@pytest.mark.parametrize(
    ("first", "second", "path"),
    [
        (policy({"name": "a"}), policy({"name": "a"}), "$.services[0].name"),
        (policy(identity={}), policy(identity={}), "$.identity"),
        (policy(ready_when="any"), policy(ready_when="any"), "$.ready_when"),
        (
            policy(qos_policies=[{"name": "q", "latency_sla_ms": 1}]),
            policy(qos_policies=[{"name": "q", "latency_sla_ms": 2}]),
            "$.qos_policies[0].name",
        ),
        (mesh("Node", name="x"), mesh("Session", name="x"), "$.metadata.name"),
        (mesh("Node", name="x"), mesh("Node", name="y"), "$.spec.scope"),
    ],
    ids=["service", "identity", "ready_when", "qos", "mesh name", "mesh scope"],
)
def test_a_later_document_may_not_redefine_a_name(first: Any, second: Any, path: str) -> None:
    for files in ([text(first), text(second)], [text(first, second)]):
        (fault,) = faults(*files)
        assert f": {path}: " in fault
        assert "defined already, at a.yaml:1" in fault


def test_the_same_document_twice_is_one_fault() -> None:
    (fault,) = faults_of(mesh("Node"), mesh("Node"))
    assert fault[0] == "$.metadata.name"


def test_a_name_is_defined_once_within_a_document_too() -> None:
    ((path, message),) = faults_of(policy({"name": "a"}, {"name": "b"}, {"name": "a"}))
    assert path == "$.services[2].name"
    assert "service a is defined already" in message


@pytest.mark.parametrize(
    ("scope", "field"), [("Node", "node"), ("Session", "session"), ("Request", "request")], ids=str
)
def test_the_mesh_s_breaker_holds_for_every_service_at_its_scope(scope: str, field: str) -> None:
    services = ({"name": "a"}, {"name": "b", "breakers": {field: {"consecutive": 77, "probes": 9}}})
    for documents in ((policy(*services), mesh(scope, failureThreshold=4, timeoutSeconds=2.5)),):
        for order in (documents, documents[::-1]):
            snapshot = load_documents(*order)
            for service in snapshot.services:
                for each in ("node", "session", "request"):
                    rule = getattr(service.breakers, each)
                    default = getattr(Service(name="x").breakers, each)
                    assert (rule.open_s == 2.5) == (each == field)
                    assert rule.consecutive == (4 if each == field else default.consecutive)
    assert getattr(snapshot.services[1].breakers, field).probes == 9


def test_a_mesh_breaker_without_a_number_leaves_it_as_it_is() -> None:
    service = {"name": "a", "breakers": {"node": {"consecutive": 77, "open": "3s"}}}
    (one,) = load_documents(policy(service), mesh("Node", failureThreshold=None)).services
    assert one.breakers.node == NodeBreaker(consecutive=77, open_s=Seconds(3))


def test_a_mesh_timeout_longer_than_open_max_raises_it() -> None:
    (one,) = load_documents(policy({"name": "a"}), mesh("Node", timeoutSeconds=3600)).services
    assert one.breakers.node == NodeBreaker(open_s=Seconds(3600), open_max_s=Seconds(3600))


def test_a_service_that_no_file_names_has_the_defaults_and_the_meshs_rules() -> None:
    snapshot = load_documents(policy({"name": "a"}), mesh("Node", failureThreshold=4, fallbackService="a"))
    made = unlisted("b", ("m", "n-*"), snapshot)
    assert (made.name, made.models, made.fallback, made.endpoints) == ("b", ("m", "n-*"), "a", ())
    assert made.breakers.node.consecutive == 4 and made.breakers.session == Service(name="x").breakers.session
    plain = unlisted("b", (), load_documents(policy(), mesh("Node", fallbackService="a")))
    assert (plain.models, plain.fallback) == (("b",), "")


def test_a_mesh_fallback_is_for_services_that_name_none_and_not_for_itself() -> None:
    services = ({"name": "a"}, {"name": "b", "models": ["b"], "fallback": "c"}, {"name": "c"})
    snapshot = load_documents(policy(*services), mesh(fallbackService="c"))
    assert [service.fallback for service in snapshot.services] == ["c", "c", ""]
    assert snapshot.warnings == ()


def test_a_mesh_fallback_never_closes_a_loop() -> None:
    """`c` leads to `b` by its own word; the mesh sends everybody to `c`, and so `b` too would lead to `c`."""
    services = ({"name": "a"}, {"name": "b"}, {"name": "c", "fallback": "b"})
    snapshot = load_documents(policy(*services), mesh(fallbackService="c"))
    fallbacks = {service.name: service.fallback for service in snapshot.services}
    for start in fallbacks:
        seen, at = [start], fallbacks[start]
        while at:
            assert at not in seen
            seen.append(at)
            at = fallbacks[at]


def test_a_fallback_that_is_not_defined_is_a_warning_and_none() -> None:
    snapshot = load_documents(policy({"name": "a", "fallback": "b"}))
    assert snapshot.services[0].fallback == ""
    assert snapshot.warnings == ("service a: there is no service b to fall back to",)


def test_a_policy_without_services_is_legal() -> None:
    assert load([("a.yaml", b"{apiVersion: sidecar/v1, kind: Policy}")], 3) == Snapshot(version=3, services=())
    assert load([], 3) == Snapshot(version=3, services=())


@pytest.mark.parametrize("content", [b"", b"# nothing\n", b"---\n---\n", b"null"])
def test_files_without_any_document_are_a_fault(content: bytes) -> None:
    assert faults(content, content) == ["a.yaml: $: no policy: there is no document here"]
    assert faults(content, text(policy())) == []


@pytest.mark.parametrize(
    ("document", "path"),
    [
        (5, "$"),
        ([], "$"),
        ("Policy", "$"),
        ({}, "$.kind"),
        ({"kind": None}, "$.kind"),
        ({"kind": []}, "$.kind"),
        ({"kind": "policy", "apiVersion": "sidecar/v1"}, "$.kind"),
        ({"kind": "Policy"}, "$.apiVersion"),
        ({"kind": "Policy", "apiVersion": "sidecar/v1beta1"}, "$.apiVersion"),
        ({"kind": "Policy", "apiVersion": "resilience.example.com/v1"}, "$.apiVersion"),
        ({**mesh(), "apiVersion": "sidecar/v1"}, "$.apiVersion"),
        ({**mesh(), "state": {}}, "$.state"),
        ({**mesh(), "metadata": {}}, "$.metadata.name"),
        (mesh("session"), "$.spec.scope"),
        (mesh(timeoutSeconds=0), "$.spec.timeoutSeconds"),
        (mesh(timeoutSeconds="30s"), "$.spec.timeoutSeconds"),
        (mesh(failureThreshold=1001), "$.spec.failureThreshold"),
    ],
)
def test_a_document_of_another_kind_is_refused(document: Any, path: str) -> None:
    assert [at for at, _ in faults_of(document)] == [path]


def test_what_kubernetes_puts_into_metadata_is_accepted() -> None:
    document = mesh("Node", timeoutSeconds=1)
    document["metadata"] |= {"namespace": "ai", "labels": {"app": "x"}, "annotations": {"note": "two\nlines"}}
    document["metadata"] |= {"uid": "1", "generation": 2, "managedFields": [{"fieldsV1": {"f:spec": {}}}]}
    document["metadata"] |= {"creationTimestamp": None, "resourceVersion": "7", "ownerReferences": []}
    document["status"] = {"conditions": [{"type": "Accepted"}]}
    assert load_documents(document).mesh_breakers == (MeshBreaker(scope="Node", timeout_s=1.0),)


def test_shared_settings_by_anchor_are_read_per_service() -> None:
    snapshot = load_text(
        "apiVersion: sidecar/v1\nkind: Policy\nservices:\n"
        "- &base {name: a, deadlines: &slow {total: 1h}, endpoints: [{url: 'http://a'}]}\n"
        "- {<<: *base, name: b}\n"
        "- {name: c, models: [c], deadlines: {<<: *slow, connect: 2s}}\n"
    )
    assert [service.deadlines.total_s for service in snapshot.services] == [Seconds(3600)] * 3
    assert snapshot.services[2].deadlines == Deadlines(total_s=Seconds(3600), connect_s=Seconds(2))
    assert snapshot.services[1].endpoints == snapshot.services[0].endpoints


def test_upstreams_alone_make_the_service_default() -> None:
    snapshot = single(["http://127.0.0.1:8000", "unix:///run/a.sock", "https://engine:8443"])
    (service,) = snapshot.services
    assert (snapshot.version, service.name, service.models) == (1, "default", ("*",))
    assert [endpoint.url for endpoint in service.endpoints] == [
        "http://127.0.0.1:8000",
        "unix:///run/a.sock",
        "https://engine:8443",
    ]
    assert [endpoint.local for endpoint in service.endpoints] == [True, True, False]
    assert snapshot.identity == Identity()


@pytest.mark.parametrize(
    ("upstreams", "words"),
    [
        (["nope"], "is not one of http://"),
        (["http://a/v1"], "has a path"),
        (["http://a", "http://A:80"], "already"),
    ],
)
def test_a_bad_upstream_is_an_error_that_names_the_flag(upstreams: list[str], words: str) -> None:
    with pytest.raises(PolicyErrors, match=words) as caught:
        single(upstreams)
    assert {error.file for error in caught.value.errors} == {"--upstream"}


def test_upstreams_beside_a_policy_go_to_its_only_service() -> None:
    snapshot = load_documents(policy({"name": "chat", "endpoints": [{"url": "http://a"}], "retry": {"attempts": 1}}))
    changed = with_upstreams(snapshot, ["http://b"])
    assert [endpoint.url for endpoint in changed.services[0].endpoints] == ["http://a", "http://b"]
    assert changed.services[0].retry.attempts == 1
    assert with_upstreams(snapshot, []) is snapshot


def test_upstreams_that_get_no_traffic_are_warned_of() -> None:
    endpoint = {"url": "http://a", "version": "v2"}
    changed = with_upstreams(
        load_documents(policy({"name": "a", "endpoints": [endpoint], "split": {"v2": 1}})), ["http://b"]
    )
    assert changed.warnings == ("service a: endpoints of v1 get no traffic: split gives that version no part",)


def test_upstreams_beside_several_services_are_an_error_that_says_so() -> None:
    snapshot = load_documents(policy({"name": "a"}, {"name": "b"}))
    with pytest.raises(PolicyErrors, match=r"http://b is for the only service.*several \(a, b\): list it in one"):
        with_upstreams(snapshot, ["http://b"])


def test_an_upstream_that_a_service_lists_already_adds_nothing() -> None:
    one = load_documents(policy({"name": "a", "endpoints": [{"url": "http://b"}]}))
    assert with_upstreams(one, ["http://B:80/"]) is one
    assert [each.url for each in with_upstreams(one, ["http://b", "http://c"]).services[0].endpoints] == [
        "http://b",
        "http://c",
    ]
    several = load_documents(policy({"name": "a"}, {"name": "b", "endpoints": [{"url": "http://b"}]}))
    assert with_upstreams(several, ["http://b"]) is several
    with pytest.raises(PolicyErrors, match="http://c is for the only service"):
        with_upstreams(several, ["http://b", "http://c"])


@pytest.mark.parametrize(("split", "version"), [({}, "v1"), ({"v7": 1}, "v7"), ({"v7": 0.5}, "v7")])
def test_an_upstream_has_the_only_version_that_anything_goes_to(split: dict[str, float], version: str) -> None:
    (service,) = with_upstreams(load_documents(policy({"name": "a", "split": split})), ["http://b"]).services
    assert [endpoint.version for endpoint in service.endpoints] == [version]


def test_upstreams_that_may_be_of_several_versions_are_of_none_that_the_split_knows() -> None:
    with pytest.raises(PolicyErrors, match=r"no endpoint has this version; there are v1 \(\$\.split\.v7\)"):
        with_upstreams(load_documents(policy({"name": "a", "split": {"v1": 1, "v7": 1}})), ["http://b"])


def test_upstreams_beside_the_mesh_s_breaker_alone_get_its_rules() -> None:
    snapshot = with_upstreams(load_documents(mesh("Node", failureThreshold=2)), ["http://a"])
    (service,) = snapshot.services
    assert service.name == "default"
    assert service.breakers.node == NodeBreaker(consecutive=2)


def test_the_key_of_an_endpoint_is_the_loader_s_too() -> None:
    assert endpoint_key("http://Host") == "host:80"


def test_identity_sources_keep_their_order() -> None:
    snapshot = load_documents(policy(identity={"session": [{"body": "user"}, {"header": "X-Chat"}]}))
    assert snapshot.identity.session == (Source(body="user"), Source(header="X-Chat"))


def test_ten_thousand_endpoints_are_a_policy_too() -> None:
    lines = ["apiVersion: sidecar/v1", "kind: Policy", "services:", "- name: s", "  endpoints:"]
    lines += [f'  - {{url: "http://10.{n >> 8}.{n & 255}.1:8000", version: v{n % 3}, zone: z}}' for n in range(10_000)]
    began = time.process_time()
    assert len(load_text("\n".join(lines)).services[0].endpoints) == 10_000
    assert time.process_time() - began < 20  # some 0.5 s; quadratic would take minutes


def test_a_file_of_a_million_faults_is_told_in_part_and_soon() -> None:
    wrong = "\n".join(f"  k{n}: 1" for n in range(300_000))
    began = time.process_time()
    told = faults(f"apiVersion: sidecar/v1\nkind: Policy\nservices:\n- name: s\n{wrong}\n")
    assert time.process_time() - began < 30  # some 3 s
    assert len(told) == MAX_ERRORS


def test_a_long_chain_of_fallbacks_is_judged_soon() -> None:
    services = [{"name": f"s{n}", "fallback": f"s{n + 1}"} for n in range(999)]
    began = time.process_time()
    ((path, message),) = faults_of(policy(*services, {"name": "s999", "fallback": "s999"}))
    assert time.process_time() - began < 20  # some 0.5 s
    assert (path, message) == ("$.services[999].fallback", "a service cannot be its own fallback")


def test_the_default_file_says_exactly_the_defaults_and_warns_of_nothing() -> None:
    content = (Path(__file__).parents[2] / "policies" / "default.yaml").read_bytes()
    endpoint = Endpoint(url="http://127.0.0.1:8000")
    expected = Snapshot(version=1, services=(Service(name="default", endpoints=(endpoint,)),))
    assert load([("default.yaml", content)], 1) == expected


_SECONDS = st.sampled_from(["1ms", "250ms", "1s", "1.5s", "2m", "1h"])
_RULE = st.fixed_dictionaries(
    {},
    optional={
        "mode": st.sampled_from(["enforce", "shadow", "off"]),
        "consecutive": st.integers(0, 1001),
        "failure_ratio": st.floats(-0.5, 1.5),
        "open": _SECONDS,
        "open_max": _SECONDS,
        "probes": st.integers(0, 101),
    },
)
_SERVICE = st.fixed_dictionaries(
    {"name": st.sampled_from(["a", "b", "c", "d"])},
    optional={
        "fallback": st.sampled_from(["", "a", "b", "c", "d"]),
        "models": st.lists(st.sampled_from(["*", "m", "n-*"]), max_size=3),
        "endpoints": st.lists(
            st.fixed_dictionaries(
                {"url": st.sampled_from(["http://a", "http://b", "https://c:1", "unix:///d"])},
                optional={"version": st.sampled_from(["v1", "v2"])},
            ),
            max_size=3,
        ),
        "split": st.dictionaries(st.sampled_from(["v1", "v2"]), st.integers(-1, 5)),
        "breakers": st.fixed_dictionaries({}, optional={"node": _RULE, "session": _RULE, "request": _RULE}),
        "deadlines": st.dictionaries(st.sampled_from(["connect", "head", "total"]), _SECONDS),
    },
)


@settings(deadline=None)
@given(st.lists(_SERVICE, max_size=4), st.lists(st.sampled_from(["Node", "Session", "Request"]), max_size=2))
def test_what_loads_is_sound_and_what_does_not_says_why(services: list[dict[str, Any]], scopes: list[str]) -> None:
    meshes = [mesh(scope, name=f"m{n}", timeoutSeconds=5, fallbackService="a") for n, scope in enumerate(scopes)]
    try:
        snapshot = load_documents(policy(*services), *meshes)
    except PolicyErrors as errors:
        assert errors.errors
        assert all(error.line > 0 and error.path.startswith("$") and error.message for error in errors.errors)
        return
    names = {service.name: service for service in snapshot.services}
    assert len(names) == len(services)
    for service in snapshot.services:
        seen = {service.name}
        step = service
        while step.fallback:
            assert step.fallback in names
            assert step.fallback not in seen
            seen.add(step.fallback)
            step = names[step.fallback]
        for rule in (service.breakers.node, service.breakers.session, service.breakers.request):
            assert 0.001 <= rule.open_s <= rule.open_max_s <= 3600
            assert 1 <= rule.consecutive <= 1000
        assert not service.split or sum(service.split.values()) > 0
        keys = [endpoint_key(endpoint.url) for endpoint in service.endpoints]
        assert len(keys) == len(set(keys))


def test_an_entry_of_each_list_is_in_the_default_file_with_its_defaults() -> None:
    content = (Path(__file__).parents[2] / "policies" / "default.yaml").read_text()
    shown = content.partition("One entry of each, with every key:\n")[2]
    lines = [line.removeprefix("#").removeprefix(" ") for line in shown.splitlines()]
    head, _, rest = "\n".join(lines).partition("qos_policies:")
    jwt = "identity:\n  jwt:\n    verified_by: sidecar\n" + "\n".join(f"  {line}" for line in head.splitlines())
    rest = "\n".join(line.removeprefix("  ") for line in f"  qos_policies:{rest}".splitlines())
    snapshot = load_text(f"apiVersion: sidecar/v1\nkind: Policy\n{jwt.rstrip()}\n{rest}\n")
    (provider,) = snapshot.identity.jwt.providers
    assert provider == JwtProvider(issuer="https://login.example.com", jwks_file="/etc/sidecar/jwks.json")
    match = (QosMatch(header="x-kind"),)
    assert snapshot.qos_policies == (QosPolicy(name="voice", latency_sla_ms=300, match=match),)
    assert snapshot.quotas == (Quota(name="team", requests_per_minute=600),)
    for kind, name in ((JwtProvider, "providers"), (QosPolicy, "qos_policies"), (QosMatch, "match"), (Quota, "quotas")):
        for field in structs.fields(kind):
            assert f"{field.encode_name}: " in shown or f"{field.encode_name}:\n" in shown, (name, field.name)


def test_the_example_of_classes_and_quotas_loads_without_a_warning_and_does_what_its_comments_say() -> None:
    content = (Path(__file__).parents[2] / "policies" / "qos.yaml").read_bytes()
    snapshot = load([("qos.yaml", content)], 1)
    assert snapshot.warnings == ()
    assert [(each.name, each.priority, each.preemptible) for each in snapshot.qos_policies] == [
        ("voice", 9, False),
        ("default", 5, False),
        ("batch", 1, True),
    ]
    assert [(each.name, each.tenant, each.mode) for each in snapshot.quotas] == [
        ("acme", "acme", "enforce"),
        ("globex", "globex", "enforce"),
        ("fair-use", "*", "shadow"),
    ]
