"""Our custom resources as an API server has them: the definitions themselves, and objects that are good and bad.

Each bad object is refused with the very words that whoever applies it reads, and by the sidecar's loader, too; each
good one is taken by both, and means the same before and after the API server filled its defaults in.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import cel
import pytest

from sidecar.policy.load import PolicyErrors, load
from sidecar.policy.schema import Snapshot
from tests.deploy import crds, kubernetes
from tests.deploy.apply import Definition
from tests.deploy.objects import DEPLOY, ROOT, Object, kustomize, read

CRDS = kustomize(DEPLOY / "crds")
DEFINITIONS = {made.kind: made for made in map(Definition, CRDS)}
EACH = pytest.mark.parametrize("crd", CRDS, ids=[crd["spec"]["names"]["kind"] for crd in CRDS])


def made(kind: str, spec: Any, name: str = "x", **changes: Any) -> Object:
    head = {"apiVersion": DEFINITIONS[kind].api_version, "kind": kind, "metadata": {"name": name, "namespace": "llm"}}
    return {**head, "spec": spec, **changes}


def cbp(**spec: Any) -> Object:
    return made("CircuitBreakerPolicy", {"scope": "Session", **spec})


def llm(**spec: Any) -> Object:
    return made("LLMService", {"modelRef": "m", **spec})


def tq(**spec: Any) -> Object:
    return made("TokenQuota", {"tenant": "acme", **spec})


def answer(each: Object, old: Object | None = None) -> list[str]:
    return DEFINITIONS[each["kind"]].answer(each, old)


def loaded(each: Object) -> Snapshot:
    return load([("a.json", json.dumps(each).encode())], 1)


def refusals(each: Object) -> list[str]:
    try:
        loaded(each)
    except PolicyErrors as refused:
        return [error.message for error in refused.errors]
    return []


# --- the definitions ------------------------------------------------------------------------------------------------


def nodes(schema: Object, path: str = "") -> Iterator[tuple[str, Object]]:
    yield path, schema
    for name, each in schema.get("properties", {}).items():
        yield from nodes(each, f"{path}.{name}")
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")


def test_all_three_are_built_one_from_each_file() -> None:
    files = {path.stem for path in (DEPLOY / "crds").glob("*.yaml")} - {"kustomization"}
    assert {crd["spec"]["names"]["plural"] for crd in CRDS} == files
    assert set(DEFINITIONS) == {"CircuitBreakerPolicy", "LLMService", "TokenQuota"}


@pytest.mark.parametrize("release", kubernetes.RELEASES)
@EACH
def test_every_release_takes_the_definition(crd: Object, release: str) -> None:
    assert kubernetes.faults(crd, release) == []


@EACH
def test_the_schema_is_structural_and_bounded(crd: Object) -> None:
    known = {
        *("type", "description", "properties", "required", "items", "enum", "pattern", "format", "default"),
        *("minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems"),
        *("x-kubernetes-validations", "x-kubernetes-list-type", "x-kubernetes-list-map-keys"),
    }
    definition = DEFINITIONS[crd["spec"]["names"]["kind"]]
    for path, node in nodes(definition.schema):
        assert node.keys() <= known, path
        assert node["type"] in ("object", "array", "string", "integer", "number", "boolean"), path
        assert set(node.get("required", [])) <= set(node.get("properties", {})), path
        if path in (".apiVersion", ".kind", ".metadata"):
            continue
        match node["type"]:
            case "string":
                assert "enum" in node or "maxLength" in node, path
            case "integer" | "number":
                assert {"minimum", "maximum"} <= node.keys(), path
                assert node["type"] == "number" or node["format"] in ("int32", "int64"), path
                assert node.get("format") != "int32" or node["maximum"] < 1 << 31, path
            case "array":
                assert {"maxItems", "items"} <= node.keys(), path
                keys = node.get("x-kubernetes-list-map-keys", [])
                assert set(keys) <= set(node["items"].get("required", [])), path


@EACH
def test_names_columns_and_status_are_what_kubectl_asks_for(crd: Object) -> None:
    spec = crd["spec"]
    assert crd["metadata"]["name"] == f"{spec['names']['plural']}.{spec['group']}"
    assert spec["names"]["shortNames"] and spec["names"]["categories"] == ["llm"] and spec["scope"] == "Namespaced"
    (version,) = spec["versions"]
    assert version["served"] and version["storage"] and version["subresources"] == {"status": {}}
    paths = {path for path, _ in nodes(version["schema"]["openAPIV3Schema"])}
    columns = [column["jsonPath"] for column in version["additionalPrinterColumns"]]
    assert columns[-1] == ".metadata.creationTimestamp" and len(columns) >= 6
    for path in columns[:-1]:
        assert re.sub(r"\[\?\(@\.type==\"Accepted\"\)\]", "[]", path) in paths, path


def test_all_three_have_the_same_status() -> None:
    first, *others = [definition.schema["properties"]["status"] for definition in DEFINITIONS.values()]
    assert others == [first, first]
    assert set(first["properties"]["conditions"]["items"]["properties"]) == {
        *("type", "status", "reason", "message", "lastTransitionTime", "observedGeneration")
    }


@EACH
def test_patterns_are_ones_that_kubernetes_can_compile(crd: Object) -> None:
    program = cel.compile("'x'.matches(pattern)")
    found = [
        node["pattern"] for _, node in nodes(DEFINITIONS[crd["spec"]["names"]["kind"]].schema) if "pattern" in node
    ]
    assert found
    for pattern in found:
        program.execute({"pattern": pattern})
    with pytest.raises(Exception, match="look"):
        program.execute({"pattern": "^(?!x)"})


@EACH
def test_rules_are_short_of_cost_and_long_on_words(crd: Object) -> None:
    """CEL's cost is estimated from bounds, at most 10 million for a rule: none walks a list within a list."""
    rules = 0
    for path, node in nodes(DEFINITIONS[crd["spec"]["names"]["kind"]].schema):
        for rule in node.get("x-kubernetes-validations", []):
            rules += 1
            assert rule.keys() <= {"rule", "message", "messageExpression", "fieldPath"}, path
            assert 10 < len(rule["message"]) < 200 and "\n" not in rule["rule"], path
            walks = re.findall(r"\.(?:exists|all|exists_one|map|filter)\(", rule["rule"])
            assert len(walks) <= 1 or rule["rule"].count("||") + rule["rule"].count("&&") == 1, rule["rule"]
            field = rule.get("fieldPath", "").removeprefix(".").split(".")[0]
            assert not field or field in node["properties"], path
            optional = {
                name
                for name, each in node.get("properties", {}).items()
                if "default" not in each and name not in node.get("required", [])
            }
            for name in re.findall(r"\bself\.(\w+)", rule["rule"]):
                assert name in node["properties"], (path, name)
                assert name not in optional or f"has(self.{name})" in rule["rule"], (path, name)
    assert rules >= 4
    assert (
        crds.unknown_functions(
            rule["rule"]
            for definition in DEFINITIONS.values()
            for _, node in nodes(definition.schema)
            for rule in node.get("x-kubernetes-validations", [])
        )
        == set()
    )


# --- good objects ---------------------------------------------------------------------------------------------------

AT_X, AT_Y = [{"url": "http://x:8000"}], [{"url": "https://y", "zone": "az-a", "node": "n", "metricsUrl": "http://y:2"}]
AS_STORED: Object = {
    "creationTimestamp": "2026-11-30T15:00:00Z",
    "generation": 3,
    "labels": {"app.kubernetes.io/name": "vllm"},
    "annotations": {"kubectl.kubernetes.io/last-applied-configuration": '{"kind":"TokenQuota"}\n'},
    "managedFields": [{"manager": "kubectl", "fieldsV1": {"f:spec": {".": {}}}}],
    "name": "stored",
    "namespace": "llm",
    "resourceVersion": "12345",
    "uid": "1b4e28ba-2fa1-11d2-883f-0016d3cca427",
}
CONDITION: Object = {
    "type": "Accepted",
    "status": "True",
    "reason": "Valid",
    "message": "",
    "lastTransitionTime": "2026-11-30T15:00:00Z",
    "observedGeneration": 3,
}
GOOD: list[Object] = [
    cbp(),
    cbp(failureThreshold=3, timeoutSeconds=30, fallbackService="fallback-svc"),
    cbp(scope="Node", services=["a", "b"], mode="Shadow", minClosedRatio=0, adaptive=False, maxTimeoutSeconds=1),
    cbp(scope="Request", key="header:x-kind", failureRatio=0.5, minRequests=5, windowSeconds=0.5),
    cbp(timeoutSeconds=0.5, maxTimeoutSeconds=0.5, probes=2, successes=3, maxSessions=10),
    llm(),
    llm(modelRef="meta-llama/Llama-3.1-8B-Instruct", aliases=["llama-*", "Ünï*"], fallbackService="small"),
    llm(canaryTrafficPercent=0),
    llm(versions=[{"name": "a"}], canaryTrafficPercent=0),
    llm(versions=[{"name": "a"}, {"name": "b"}], canaryTrafficPercent=100, canaryVersion="a"),
    llm(versions=[{"name": "a", "weight": 0}, {"name": "b"}], canaryTrafficPercent=100),
    llm(versions=[{"name": "a", "endpoints": AT_X, "weight": 5}, {"name": "b", "endpoints": AT_Y}]),
    llm(versions=[{"name": "a", "engine": "triton", "engineModel": "e/versions/2", "chatTemplate": "/t"}]),
    llm(versions=[{"name": "a", "engine": "deepspeed", "front": "gateway", "chatTemplate": "/t", "engineModel": "e"}]),
    *(
        llm(versions=[{"name": "a", "endpoints": [{"url": url}]}])
        for url in ("http://127.0.0.1:8000", "http://[::1]:8", "unix:///run/a.sock", "https://a-b.llm.svc:65535/")
    ),
    llm(healthProbe={"path": "/health", "timeoutSeconds": 5}, deadlines={"headSeconds": 300}),
    llm(healthProbe={}),
    tq(tokensPerMinute=1),
    tq(tokensPerMinute=5, tokensPerDay=5, requestsPerMinute=1, requestsPerDay=2, concurrency=3, mode="Disabled"),
    tq(concurrency=1, models=["a", "b*"], whenLogAway="Refuse"),
    tq(tokensPerDay=1_000_000_000_000) | {"metadata": AS_STORED, "status": {"conditions": [CONDITION]}},
    *(each for each in read((ROOT / "policies" / "kubernetes.yaml").read_text()) if each["kind"] != "Policy"),
]


@pytest.mark.parametrize("each", GOOD, ids=[json.dumps(each["spec"])[:70] for each in GOOD])
def test_a_good_object_is_taken_by_both_and_means_the_same_with_its_defaults(each: Object) -> None:
    assert answer(each) == answer(each, each) == []
    stored = DEFINITIONS[each["kind"]].defaulted(each)
    assert loaded(stored) == loaded(each)
    assert stored["spec"].keys() >= each["spec"].keys()


def test_the_objects_of_our_own_manifests_are_good() -> None:
    """Files of a ConfigMap, which no API server would judge."""
    found = []
    for path in sorted(DEPLOY.rglob("policy/*.yaml")):
        for each in read(path.read_text(encoding="utf-8")):
            assert loaded(each), path
            if each["kind"] in DEFINITIONS:
                found.append(each)
                assert answer(each) == [], path
    assert len(found) >= 3


# --- bad objects ----------------------------------------------------------------------------------------------------

NAME = "'^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$'"
SPEC = 'spec: Invalid value: "object"'
TWO = [{"name": "a"}, {"name": "b"}]

BAD: list[tuple[Object, str]] = [
    # CircuitBreakerPolicy, by its schema
    (made("CircuitBreakerPolicy", {}), "spec.scope: Required value"),
    (cbp(scope="Pod"), 'spec.scope: Unsupported value: "Pod": supported values: "Request", "Session", "Node"'),
    (cbp(failureTreshold=3), 'strict decoding error: unknown field "spec.failureTreshold"'),
    (
        cbp(failureThreshold=0),
        "spec.failureThreshold: Invalid value: 0: spec.failureThreshold in body should be greater than or equal to 1",
    ),
    (
        cbp(failureThreshold=1001),
        "spec.failureThreshold: Invalid value: 1001: spec.failureThreshold in body should be less than or equal to "
        "1000",
    ),
    (
        cbp(timeoutSeconds="30s"),
        'spec.timeoutSeconds: Invalid value: "string": spec.timeoutSeconds in body must be of type number: "string"',
    ),
    (
        cbp(timeoutSeconds=3601),
        "spec.timeoutSeconds: Invalid value: 3601: spec.timeoutSeconds in body should be less than or equal to 3600",
    ),
    (
        cbp(mode=False),  # what kubectl makes of `mode: Off`
        'spec.mode: Invalid value: "boolean": spec.mode in body must be of type string: "boolean"\n'
        'spec.mode: Unsupported value: false: supported values: "Enforce", "Shadow", "Disabled"',
    ),
    (cbp(services=[f"s{n}" for n in range(65)]), "spec.services: Too many: 65: must have at most 64 items"),
    (cbp(services=["a", "a"]), 'spec.services[1]: Duplicate value: "a"'),
    (
        cbp(scope="Request", key="header:"),
        'spec.key: Invalid value: "header:": spec.key in body should match '
        "'^(route|header:[!#$%&'*+.^_`|~0-9A-Za-z-]+)$'",
    ),
    # and by its rules
    (
        cbp(timeoutSeconds=30, maxTimeoutSeconds=10),
        'spec.maxTimeoutSeconds: Invalid value: "object": maxTimeoutSeconds must not be shorter than timeoutSeconds',
    ),
    (cbp(minClosedRatio=0.5), 'spec.minClosedRatio: Invalid value: "object": minClosedRatio is of scope Node only'),
    (cbp(scope="Request", adaptive=True), 'spec.adaptive: Invalid value: "object": adaptive is of scope Node only'),
    (
        cbp(scope="Node", maxSessions=9),
        'spec.maxSessions: Invalid value: "object": maxSessions is of scope Session only',
    ),
    (cbp(key="route"), 'spec.key: Invalid value: "object": key is of scope Request only'),
    (
        cbp(services=["a", "b"], fallbackService="b"),
        'spec.fallbackService: Invalid value: "object": fallbackService is one of services: nothing falls back to '
        "itself",
    ),
    # LLMService, by its schema
    (made("LLMService", {}), "spec.modelRef: Required value"),
    (made("LLMService", {"modelRef": "m"}, name="x" * 64), "metadata.name: Too long: may not be more than 63 bytes"),
    (
        llm(modelRef="two words"),
        "spec.modelRef: Invalid value: \"two words\": spec.modelRef in body should match '^[A-Za-z0-9._/:@+-]+$'",
    ),
    (
        llm(versions=TWO, canaryTrafficPercent=101),
        "spec.canaryTrafficPercent: Invalid value: 101: spec.canaryTrafficPercent in body should be less than or equal "
        "to 100",
    ),
    (
        llm(versions=TWO, canaryTrafficPercent=0.5),
        'spec.canaryTrafficPercent: Invalid value: "number": spec.canaryTrafficPercent in body must be of type '
        'integer: "number"',
    ),
    (llm(versions=[{"weight": 1}]), "spec.versions[0].name: Required value"),
    (llm(versions=[*TWO, *TWO[:1]]), 'spec.versions[2]: Duplicate value: map[string]interface {}{"name":"a"}'),
    (
        llm(versions=[{"name": "a", "engine": "tgi"}]),
        'spec.versions[0].engine: Unsupported value: "tgi": supported values: "vllm", "triton", "deepspeed"',
    ),
    (llm(versions=[{"name": "a", "selector": {}}]), 'strict decoding error: unknown field "spec.versions[0].selector"'),
    (
        llm(versions=[{"name": "-a"}]),
        f'spec.versions[0].name: Invalid value: "-a": spec.versions[0].name in body should match {NAME}',
    ),
    (
        llm(healthProbe={"path": "health"}),
        'spec.healthProbe.path: Invalid value: "health": spec.healthProbe.path in body should match '
        "'^(/[!-\"$-~]*)?$'",
    ),
    (
        llm(healthProbe={"timeoutSeconds": 0}),
        "spec.healthProbe.timeoutSeconds: Invalid value: 0: spec.healthProbe.timeoutSeconds in body should be greater "
        "than or equal to 0.001",
    ),
    # and by its rules
    (
        llm(versions=[{"name": "a"}], canaryTrafficPercent=5),
        'spec.canaryTrafficPercent: Invalid value: "object": canaryTrafficPercent needs a version beside the canary: '
        "list both in versions",
    ),
    (
        llm(versions=TWO, canaryVersion="a"),
        'spec.canaryVersion: Invalid value: "object": canaryVersion is of use with canaryTrafficPercent only',
    ),
    (
        llm(versions=TWO, canaryTrafficPercent=5, canaryVersion="c"),
        'spec.canaryVersion: Invalid value: "object": canaryVersion is not one of versions',
    ),
    (
        llm(versions=[{"name": "a"}, {"name": "b", "weight": 5}], canaryTrafficPercent=5),
        'spec.versions: Invalid value: "object": the canary\'s weight is canaryTrafficPercent: leave its own out',
    ),
    (
        llm(versions=[{"name": "a", "weight": 0}]),
        'spec.versions: Invalid value: "object": all weights are 0: at least one must be positive',
    ),
    (
        llm(versions=[{"name": "a", "weight": 0}, {"name": "b"}], canaryTrafficPercent=99),
        'spec.versions: Invalid value: "object": all weights are 0: at least one must be positive',
    ),
    (
        llm(versions=[{"name": "a", "endpoints": AT_X}, {"name": "b"}]),
        'spec.versions: Invalid value: "object": either every version lists endpoints, or none does',
    ),
    (
        llm(versions=[{"name": "a", "engine": "triton", "front": "gateway"}]),
        'spec.versions[0].front: Invalid value: "object": triton has no front gateway; it has generate, openai',
    ),
    (
        llm(versions=[{"name": "a", "engineModel": "e"}]),
        'spec.versions[0].engineModel: Invalid value: "object": is of use where requests are translated; start the '
        "engine with the name that clients ask for",
    ),
    (
        llm(versions=[{"name": "a", "engine": "triton", "engineModel": "a/b"}]),
        'spec.versions[0].engineModel: Invalid value: "object": is of no use: Triton calls a model name or '
        "name/versions/version",
    ),
    (
        llm(versions=[{"name": "a", "engine": "deepspeed", "chatTemplate": "/t"}]),
        'spec.versions[0].chatTemplate: Invalid value: "object": is of no use: this front applies its own',
    ),
    (
        llm(fallbackService="x"),
        'spec.fallbackService: Invalid value: "object": a service cannot be its own fallback',
    ),
    # TokenQuota, by its schema
    (made("TokenQuota", {"concurrency": 1}), "spec.tenant: Required value"),
    (
        tq(tenant="", concurrency=1),
        'spec.tenant: Invalid value: "": spec.tenant in body should be at least 1 chars long',
    ),
    (tq(concurrency=1, models=[]), "spec.models: Invalid value: 0: spec.models in body should have at least 1 items"),
    (
        tq(tokensPerMinute="1k"),
        'spec.tokensPerMinute: Invalid value: "string": spec.tokensPerMinute in body must be of type integer: "string"',
    ),
    (
        tq(tokensPerMinute=1_000_000_000_001),
        "spec.tokensPerMinute: Invalid value: 1000000000001: spec.tokensPerMinute in body should be less than or equal "
        "to 1000000000000",
    ),
    (
        tq(concurrency=1, whenLogAway="share"),
        'spec.whenLogAway: Unsupported value: "share": supported values: "Share", "Refuse"',
    ),
    (tq(concurrency=1, tenants=[]), 'strict decoding error: unknown field "spec.tenants"'),
    (
        made("TokenQuota", {"tenant": "a", "concurrency": 1}, name="q" * 64),
        "metadata.name: Too long: may not be more than 63 bytes",
    ),
    # and by its rules
    (
        tq(),
        f"{SPEC}: bounds nothing: give at least one of tokensPerMinute, tokensPerDay, requestsPerMinute, "
        "requestsPerDay, concurrency",
    ),
    (
        tq(tokensPerMinute=10, tokensPerDay=9),
        'spec.tokensPerDay: Invalid value: "object": tokensPerDay must not be below tokensPerMinute',
    ),
    (
        tq(requestsPerMinute=10, requestsPerDay=9),
        'spec.requestsPerDay: Invalid value: "object": requestsPerDay must not be below requestsPerMinute',
    ),
]


@pytest.mark.parametrize(("each", "words"), BAD, ids=[words[:60] for _, words in BAD])
def test_a_bad_object_is_refused_by_both_in_words(each: Object, words: str) -> None:
    assert "\n".join(answer(each)) == words
    said = refusals(each)
    assert said
    ours = words.partition('Invalid value: "object": ')[2]
    assert not ours or any(ours in message for message in said), said


def test_bad_objects_are_spread_over_the_kinds_and_meet_every_rule() -> None:
    counts = {kind: sum(each["kind"] == kind for each, _ in BAD) for kind in DEFINITIONS}
    assert sum(counts.values()) >= 25 and min(counts.values()) >= 8, counts
    told = " ".join([words for _, words in BAD] + [words for *_, words in CHANGES])
    for definition in DEFINITIONS.values():
        for _, node in nodes(definition.schema):
            for rule in node.get("x-kubernetes-validations", []):
                assert rule["message"] in told or "messageExpression" in rule, rule["message"]


# --- changes --------------------------------------------------------------------------------------------------------

CHANGES: list[tuple[Object, Object, str]] = [
    (
        cbp(scope="Node"),
        cbp(scope="Session"),
        'spec.scope: Invalid value: "string": scope is immutable: delete this object and make another',
    ),
    (
        llm(modelRef="a"),
        llm(modelRef="b"),
        'spec.modelRef: Invalid value: "string": modelRef is immutable: make another LLMService, and move clients to '
        "it",
    ),
    (
        tq(tenant="a", concurrency=1),
        tq(tenant="b", concurrency=1),
        'spec.tenant: Invalid value: "string": tenant is immutable: delete this object and make another',
    ),
]


@pytest.mark.parametrize(("old", "new", "words"), CHANGES, ids=[old["kind"] for old, *_ in CHANGES])
def test_what_an_object_is_about_stays(old: Object, new: Object, words: str) -> None:
    assert answer(new, old) == [words]
    assert answer(new) == answer(old) == answer(old, old) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (cbp(failureThreshold=3), cbp(failureThreshold=5, services=["a"])),
        (llm(), llm(versions=TWO, canaryTrafficPercent=5)),
        (llm(versions=TWO, canaryTrafficPercent=5), llm(versions=TWO[1:])),
        (tq(concurrency=1), tq(tokensPerMinute=1, mode="Shadow")),
    ],
)
def test_all_else_may_change(old: Object, new: Object) -> None:
    assert answer(new, old) == []


# --- status ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DEFINITIONS)
def test_a_status_has_conditions_as_kubernetes_has_them(kind: str) -> None:
    spec = {"CircuitBreakerPolicy": {"scope": "Node"}, "LLMService": {"modelRef": "m"}}.get(
        kind, {"tenant": "a", "concurrency": 1}
    )

    def said(*conditions: Object) -> list[str]:
        each = made(kind, spec, status={"observedGeneration": 1, "conditions": list(conditions)})
        assert loaded(each) == loaded(made(kind, spec))  # whatever it says
        return answer(each)

    assert said(CONDITION, {**CONDITION, "type": "Ready"}) == []
    assert said(CONDITION, CONDITION) == [
        'status.conditions[1]: Duplicate value: map[string]interface {}{"type":"Accepted"}'
    ]
    assert said({name: value for name, value in CONDITION.items() if name != "reason"}) == [
        "status.conditions[0].reason: Required value"
    ]
    assert said({**CONDITION, "status": "true"}) == [
        'status.conditions[0].status: Unsupported value: "true": supported values: "True", "False", "Unknown"'
    ]
