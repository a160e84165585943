import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from sidecar.policy.json_schema import json_schema, text
from tests.policy.build import API, faults_of, llm_service, mesh, policy, token_quota
from tests.policy.fields import Place, places

FILE = Path(__file__).parents[2] / "policies" / "schema.json"
VALIDATOR = jsonschema.Draft202012Validator(json_schema())


def valid(document: Any) -> bool:
    return bool(VALIDATOR.is_valid(document))


def loads(document: Any) -> bool:
    return faults_of(document) == []


def service(**fields: Any) -> dict[str, Any]:
    return policy({"name": "s", **fields})


def test_the_file_beside_the_policies_is_what_the_types_say() -> None:
    assert FILE.read_text() == text(), "python -m sidecar.policy.json_schema > policies/schema.json"


def test_the_module_prints_the_schema() -> None:
    command = [sys.executable, "-m", "sidecar.policy.json_schema"]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == text()


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(json.loads(text()))


def provided(keys: dict[str, Any], **jwt: Any) -> dict[str, Any]:
    return {"verified_by": "sidecar", "providers": [{"issuer": "https://i", **keys}], **jwt}


def classed(*matches: dict[str, Any]) -> dict[str, Any]:
    return policy(qos_policies=[{"name": "q", "latency_sla_ms": 1, "match": list(matches)}])


# One document per rule that both know: what it is, and whether it is good.
DOCUMENTS: list[tuple[Any, bool]] = [
    (policy(), True),
    (service(), True),
    (mesh(), True),
    (mesh("Node", failureThreshold=5, timeoutSeconds=0.5, fallbackService="x"), True),
    (mesh("Node", failureThreshold=None, timeoutSeconds=None), True),
    ({**mesh(), "metadata": {"name": "x", "namespace": "y"}}, True),
    ({**mesh(), "metadata": {"name": "x", "labels": {"a/b": "c"}, "annotations": {"d": "e\nf"}}}, True),
    (policy(ready_when="local", identity={"session": [], "tenant": []}, qos_policies=[]), True),
    (policy(identity={"jwt": {"issuers": ["https://issuer"], "verified_by": "mesh"}}), True),
    (service(split={"v1": 1, "v2": 0}, zone_decay=None), True),
    (service(split={}, zone_decay={}), True),
    (service(retry={"attempts": 3.0}), True),
    *(
        (service(endpoints=[{"url": url}]), True)
        for url in ("http://a", "https://a.b:1/", "unix:///x", "http://[::1]:8")
    ),
    *((service(breakers={"request": {"key": key}}), True) for key in ("route", "header:x-kind")),
    (policy(identity={"session": [{"header": "a"}, {"jwt_claim": "b"}, {"body": "user"}]}), True),
    (policy(identity={"session": [{"header": "a", "body": ""}]}), True),
    ({}, False),
    ([], False),
    ("Policy", False),
    ({"apiVersion": API}, False),
    ({"kind": "Policy"}, False),
    ({"apiVersion": API, "kind": "CircuitBreakerPolicy"}, False),
    ({**policy(), "nope": 1}, False),
    ({**mesh(), "status": {"conditions": [1]}}, True),
    ({**mesh(), "metadata": {"name": "x", "managedFields": [{"a": {"b": 1}}], "uid": None}}, True),
    ({**mesh(), "state": {}}, False),
    ({**mesh(), "metadata": {"name": "x", "managed": []}}, False),
    (mesh("Node", services=["a"], mode="Shadow", minClosedRatio=0, adaptive=False, maxTimeoutSeconds=60), True),
    (mesh("Node", mode="Off"), False),
    (mesh("Node", mode=False), False),
    (mesh("Node", services=["a b"]), False),
    (mesh("Request", key="header:x-kind"), True),
    (mesh("Request", key="header:"), False),
    (llm_service(), True),
    (llm_service("x" * 64), False),
    ({**llm_service(), "apiVersion": "infra.ai/v1beta1"}, False),
    (llm_service(modelRef="a b"), False),
    (llm_service(versions=[{"name": "a", "weight": 3}, {"name": "b", "endpoints": []}]), True),
    (llm_service(versions=[{"weight": 3}]), False),
    (llm_service(versions=[{"name": "a", "endpoints": [{"url": "http://a.b:1/"}]}]), True),
    *(
        (llm_service(versions=[{"name": "a", "endpoints": [{"url": url}]}]), False)
        for url in ("", "a", "http://a/v1", "http://a:0", "unix://a", "http://1.2.3", "http://a.1")
    ),
    (llm_service(healthProbe={}), True),
    (llm_service(healthProbe={"path": "health"}), False),
    (llm_service(healthProbe={"timeoutSeconds": "5s"}), False),
    (token_quota(tokensPerMinute=1), True),
    (token_quota(), False),
    (token_quota(tokensPerMinute=None), False),
    (token_quota(concurrency=1, models=[]), False),
    (token_quota(concurrency=1, whenLogAway="share"), False),
    (mesh("Pod"), False),
    (policy({}), False),
    (policy({"name": "a b"}), False),
    (policy({"name": ""}), False),
    (service(endpoints=[{}]), False),
    (service(split={"v1": 0}), False),
    (service(split={"v1": 0.0, "v2": 0}), False),
    (service(split={"a b": 1}), False),
    (service(split={"v1": "1"}), False),
    *(
        (service(endpoints=[{"url": url}]), False)
        for url in ("", "a", "http://", "http://a/v1", "http://a:0", "unix://a")
    ),
    *((service(breakers={"request": {"key": key}}), False) for key in ("", "model", "header:", "header:a b")),
    (policy(identity={"session": [{}]}), False),
    (policy(identity={"session": [{"header": ""}]}), False),
    (policy(identity={"session": [{"header": "a", "body": "user"}]}), False),
    (policy(identity={"tenant": [{"body": "model"}]}), False),
    (policy(identity={"jwt": {"verified_by": "us"}}), False),
    (policy(identity={"jwt": {"issuers": [""]}}), False),
    (policy(identity={"tenant": [{"header": "a", "loopback": True}]}), True),
    (policy(identity={"class": [{"jwt_claim": "tier", "loopback": False}]}), True),
    (policy(identity={"session": [{"jwt_claim": "a", "loopback": True}]}), False),
    (policy(identity={"jwt": provided({"jwks_file": "/k"})}), True),
    (policy(identity={"jwt": provided({"jwks_url": "http://a/k"}, required=True)}), True),
    (policy(identity={"jwt": provided({"jwks_url": "https://a/k", "tls_ca": "/ca"}, issuers=[])}), True),
    (policy(identity={"jwt": provided({})}), False),
    (policy(identity={"jwt": provided({"jwks_file": "/k", "jwks_url": "http://a/k"})}), False),
    (policy(identity={"jwt": provided({"jwks_url": "http://a/k", "tls_ca": "/ca"})}), False),
    (policy(identity={"jwt": provided({"jwks_file": "/k", "tls_ca": "/ca"})}), False),
    (policy(identity={"jwt": provided({"jwks_file": "/k", "algorithms": []})}), False),
    (policy(identity={"jwt": provided({"jwks_file": "/k", "algorithms": ["none"]})}), False),
    (policy(identity={"jwt": provided({"jwks_file": "/k", "algorithms": ["HS256"]})}), False),
    (policy(identity={"jwt": provided({"jwks_file": "/k"}, verified_by="mesh")}), False),
    (policy(identity={"jwt": provided({"jwks_file": "/k"}, issuers=["i"])}), False),
    (policy(identity={"jwt": provided({"jwks_file": "/k"}, claims_header="x-claims")}), False),
    (policy(identity={"jwt": {"verified_by": "sidecar"}}), False),
    (policy(identity={"jwt": {"required": True}}), False),
    (policy(identity={"jwt": {"required": False, "providers": [], "claims_header": "x-claims"}}), True),
    *((classed({key: "x"}), True) for key in ("header", "jwt_claim", "path", "model", "tenant")),
    (classed({"modality": "voice"}), True),
    (classed({"header": "a", "value": "b*", "model": "c", "path": ""}), True),
    (classed({"path": "a"}, {"header": "a"}), True),
    (classed({}), False),
    (classed({"value": "a"}), False),
    (classed({"value": "*"}), False),
    (classed({"header": ""}), False),
    (classed({"path": "a", "value": "a"}), False),
    (classed({"header": "a", "jwt_claim": "b"}), False),
    (classed({"header": "a"}, {}), False),
    (classed({"modality": "video"}), False),
    (policy(quotas=[{"name": "q", "concurrency": 1}]), True),
    (policy(quotas=[{"name": "q", "tokens_per_day": 1, "concurrency": None}]), True),
    (policy(quotas=[{"name": "q"}]), False),
    (policy(quotas=[{"name": "q", "concurrency": None}]), False),
    (service(deadlines=None), False),
    (service(models="*"), False),
]


@pytest.mark.parametrize(("document", "good"), DOCUMENTS, ids=[json.dumps(document)[:90] for document, _ in DOCUMENTS])
def test_schema_and_loader_agree_about_a_document(document: Any, good: bool) -> None:
    assert (valid(document), loads(document)) == (good, good)


BETWEEN = (
    "is longer than",
    "is of use w",
    "is of no use",
    "has no front",
    "is defined already",
    "is below min",
    "is above max",
    "is of scope",
    "is not one of versions",
    "needs a version beside",
    "all weights are 0",
)
"""Words of rules over several places."""

VALUES = [
    None,
    True,
    False,
    0,
    1,
    2,
    -1,
    0.5,
    3.5,
    10**9,
    1e300,
    "",
    "x",
    "10s",
    "0s",
    "2h",
    "a b",
    "off",
    [],
    {},
    [1],
    {"a": 1},
]


@pytest.mark.parametrize("place", [pytest.param(place, id=place.id) for place in places()])
def test_schema_and_loader_agree_about_every_field(place: Place) -> None:
    for value in VALUES:
        document = place.write(value)
        if valid(document) != loads(document):
            messages = [message for _, message in faults_of(document)]
            assert all(any(words in message for words in BETWEEN) for message in messages), (value, messages)


def test_what_only_the_loader_knows_is_what_the_docstring_says() -> None:
    only = [
        policy({"name": "a"}, {"name": "a"}),
        service(endpoints=[{"url": "http://a"}, {"url": "http://a:80"}]),
        policy({"name": "a", "fallback": "b"}, {"name": "b", "fallback": "a"}),
        service(breakers={"node": {"open": "10m"}}),
        service(endpoints=[{"url": "http://a"}], split={"v2": 1}),
        service(endpoints=[{"url": "http://[1.2.3.4]"}]),
        service(admission={"concurrency": 2}),
        policy(
            identity={
                "jwt": {"verified_by": "sidecar", "providers": [{"issuer": "i", "jwks_file": "/k"}] * 2},
            }
        ),
        policy(identity={"jwt": provided({"jwks_url": "http://me@a/k"})}),
        mesh("Session", adaptive=True),
        llm_service(canaryTrafficPercent=5),
        llm_service(versions=[{"name": "a", "endpoints": [{"url": "http://[1.2.3.4]"}]}]),
        token_quota(tokensPerMinute=2, tokensPerDay=1),
    ]
    assert [(valid(document), loads(document)) for document in only] == [(True, False)] * len(only)


def test_every_object_is_closed_and_described() -> None:
    kinds = json_schema()["$defs"]
    assert len(kinds) > 20
    for name, kind in kinds.items():
        assert kind["additionalProperties"] is False, name
        assert kind["description"], name
