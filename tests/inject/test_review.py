"""AdmissionReviews in, answers out."""

from base64 import b64decode
from typing import Any

import msgspec
import pytest

from sidecar.inject.pod import Defaults, Injected, inject
from sidecar.inject.review import MOST_WARNINGS, REFUSAL_CHARACTERS, Rules, Verdict, question, reviewed
from tests.inject.applying import applied

ASKING = {"sidecar.infra.ai/inject": "enabled"}
POD: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"generateName": "vllm-7d4-", "labels": {"app": "vllm", **ASKING}},
    "spec": {"containers": [{"name": "vllm", "image": "vllm/vllm-openai:v1", "args": ["--model", "m"]}]},
}


def review(pod: Any, **request: Any) -> bytes:
    """What an API server sends."""
    asked = {
        "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "name": "",
        "namespace": "llm",
        "operation": "CREATE",
        "userInfo": {"username": "system:serviceaccount:kube-system:replicaset-controller", "groups": []},
        "object": pod,
        "oldObject": None,
        "dryRun": False,
        "options": {"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1"},
        **request,
    }
    return msgspec.json.encode({"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": asked})


def verdict(pod: Any, rules: Rules | None = None, **request: Any) -> Verdict:
    found = reviewed(question(review(pod, **request)), rules or Rules())
    assert found.answer["kind"] == "AdmissionReview" and found.answer["apiVersion"] == "admission.k8s.io/v1"
    assert found.answer["response"]["uid"] == "705ab4f5-6393-11e8-b7cc-42010a800002"
    return found


def less(**change: Any) -> dict[str, Any]:
    return {**POD, **change}


def test_the_patch_makes_the_pod_what_the_command_makes_it() -> None:
    found = verdict(POD)
    response = found.answer["response"]
    assert response["allowed"] and response["patchType"] == "JSONPatch" and "warnings" not in response
    expected = inject(POD, Defaults())
    assert isinstance(expected, Injected)
    assert applied(POD, msgspec.json.decode(b64decode(response["patch"]))) == expected.pod
    assert (found.result, found.pod) == ("injected", "llm/vllm-7d4-*")


# What an API server has put into a pod before it asks: its defaults.
DEFAULTED: dict[str, Any] = {
    **POD,
    "spec": {
        "containers": [
            {
                **POD["spec"]["containers"][0],
                "ports": [{"containerPort": 8000, "protocol": "TCP"}],
                "resources": {},
                "livenessProbe": {
                    "httpGet": {"path": "/health", "port": 8000, "scheme": "HTTP"},
                    "timeoutSeconds": 1,
                    "periodSeconds": 10,
                    "successThreshold": 1,
                    "failureThreshold": 3,
                },
                "terminationMessagePath": "/dev/termination-log",
                "terminationMessagePolicy": "File",
                "imagePullPolicy": "IfNotPresent",
            }
        ],
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 30,
        "dnsPolicy": "ClusterFirst",
        "serviceAccountName": "default",
        "securityContext": {},
        "schedulerName": "default-scheduler",
        "enableServiceLinks": True,
    },
}


def test_what_an_api_server_wrote_is_not_taken_for_somebody_s_will() -> None:
    patch = msgspec.json.decode(b64decode(verdict(DEFAULTED).answer["response"]["patch"]))
    spec = applied(DEFAULTED, patch)["spec"]
    probe = spec["containers"][0]["livenessProbe"]
    assert (probe["timeoutSeconds"], probe["exec"]["command"][-1]) == (5, "5"), "a process has to start first"
    assert (probe["terminationGracePeriodSeconds"], spec["terminationGracePeriodSeconds"]) == (30, 640)
    assert (probe["periodSeconds"], probe["failureThreshold"]) == (10, 3)


def test_an_injected_pod_needs_no_patch_and_an_older_one_a_new_one() -> None:
    once = inject(POD, Defaults())
    assert isinstance(once, Injected)
    assert "patch" not in verdict(once.pod).answer["response"]
    newer = verdict(once.pod, Rules(Defaults(version="0.2.0", image="llm-sidecar:0.2.0"))).answer["response"]
    made = applied(once.pod, msgspec.json.decode(b64decode(newer["patch"])))
    assert made["spec"]["initContainers"][0]["image"] == "llm-sidecar:0.2.0"


@pytest.mark.parametrize(
    ("pod", "request_"),
    [
        (less(metadata={"name": "x"}), {}),
        (less(metadata={"labels": {"sidecar.infra.ai/inject": "disabled"}}), {}),
        (POD, {"operation": "UPDATE"}),
        (POD, {"operation": "DELETE", "object": None}),
        (POD, {"kind": {"group": "apps", "version": "v1", "kind": "Deployment"}}),
        ([], {}),
        (less(metadata=[]), {}),
    ],
)
def test_what_does_not_ask_passes_unseen(pod: Any, request_: Any) -> None:
    found = verdict(pod, **request_)
    assert found.result == "unchanged"
    assert found.answer["response"] == {"uid": "705ab4f5-6393-11e8-b7cc-42010a800002", "allowed": True}


def test_where_a_namespace_asks_a_label_need_not() -> None:
    rules = Rules(unlabelled=True)
    assert verdict(less(metadata={"name": "x"}), rules).result == "injected"
    assert verdict(less(metadata={"labels": {"sidecar.infra.ai/inject": "disabled"}}), rules).result == "unchanged"
    redis = less(metadata={"name": "redis"}, spec={"containers": [{"name": "redis", "image": "redis"}]})
    found = verdict(redis, rules)
    assert found.result == "declined" and found.answer["response"]["allowed"]
    assert "left as it is" in found.answer["response"]["warnings"][0]


BAD = less(spec={**POD["spec"], "volumes": [{"name": "llm-sidecar-run"}]})


def test_what_cannot_be_injected_passes_with_a_warning() -> None:
    response = verdict(BAD).answer["response"]
    assert response["allowed"] and "patch" not in response
    assert response["warnings"] == [
        "llm-sidecar: no sidecar: spec.volumes[0]: the volume's name \"llm-sidecar-run\" is the sidecar's"
    ]


def test_with_strict_it_is_refused_in_the_same_words() -> None:
    found = verdict(BAD, Rules(strict=True))
    response = found.answer["response"]
    assert not response["allowed"] and found.result == "refused"
    assert response["status"]["code"] == 422
    assert response["status"]["message"].startswith("llm-sidecar: spec.volumes[0]: the volume's name")


@pytest.mark.parametrize("spec", [None, 7, {"containers": "x"}, {"containers": [{"name": 1}]}, {"containers": []}])
def test_a_pod_of_no_shape_is_no_fault_of_ours(spec: Any) -> None:
    assert verdict(less(spec=spec)).result == "refused"


def test_warnings_are_few_and_short_enough_for_an_api_server() -> None:
    ports = [{"containerPort": 9400, "name": "x" * 300} for _ in range(50)]
    many = less(spec={"containers": [{**POD["spec"]["containers"][0], "ports": ports}]})
    warnings = verdict(many).answer["response"]["warnings"]
    assert len(warnings) == MOST_WARNINGS and max(map(len, warnings)) <= 256


@pytest.mark.parametrize(("strict", "allowed"), [(False, True), (True, False)])
def test_a_pod_that_is_no_person_s_is_not_looked_into(strict: bool, allowed: bool) -> None:
    many = less(spec={**POD["spec"], "volumes": [{"name": f"v{at}"} for at in range(40_000)]})
    body = review(many)
    found = reviewed(question(body), Rules(strict=strict), len(body))
    response = found.answer["response"]
    assert (found.result, response["allowed"], "patch" in response) == ("refused", allowed, False)
    assert found.words == ("the pod is larger than 512 KiB",)
    plain = {**many, "metadata": {}}
    assert reviewed(question(review(plain)), Rules(), len(body)).result == "unchanged", "who did not ask is let pass"


def test_a_refusal_is_no_longer_than_one_reads() -> None:
    many = less(spec={"containers": [{"name": f"c{at}", "image": "vllm/vllm-openai:v1"} for at in range(1000)]})
    message = verdict(many, Rules(strict=True)).answer["response"]["status"]["message"]
    assert 100 < len(message) <= REFUSAL_CHARACTERS + 20


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b'{"kind":"AdmissionReview","apiVersion":"admission.k8s.io/v1"}',
        b'{"kind":"AdmissionReview","apiVersion":"admission.k8s.io/v1","request":{}}',
        b'{"kind":"AdmissionReview","apiVersion":"admission.k8s.io/v1beta1","request":{"uid":"1"}}',
    ],
)
def test_what_is_no_review_is_told(body: bytes) -> None:
    with pytest.raises(ValueError):
        question(body)
