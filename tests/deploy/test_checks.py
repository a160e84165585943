"""Each check is shown a rendering with one thing wrong, and must say it; one that cannot fail is no check."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from tests.deploy import checks
from tests.deploy.objects import ISTIO, Object, kustomize, one, read

BASE = "base"
AMBIENT = "overlays/ambient"
CANARY = "overlays/canary"
PROD = "overlays/prod"
WEBHOOK = "injection/webhook"


class Fault(NamedTuple):
    """A rendering, what is done to it, which check must say something, and what is to be in its words."""

    check: str
    folder: str
    spoil: Callable[[list[Object]], Any]
    words: str


def _pod(objects: list[Object], name: str = "vllm") -> Object:
    spec: Object = one(objects, "Deployment", name)["spec"]["template"]["spec"]
    return spec


def _sidecar(objects: list[Object]) -> Object:
    container: Object = _pod(objects)["initContainers"][0]
    return container


def _engine(objects: list[Object]) -> Object:
    container: Object = _pod(objects)["containers"][0]
    return container


def _env(objects: list[Object], name: str, value: str) -> None:
    next(each for each in _sidecar(objects)["env"] if each["name"] == name)["value"] = value


def _spec(objects: list[Object], kind: str, name: str = "vllm") -> Object:
    spec: Object = one(objects, kind, name)["spec"]
    return spec


def _drop(objects: list[Object], kind: str, name: str) -> None:
    objects.remove(one(objects, kind, name))


def _policy(objects: list[Object], text: str) -> None:
    one(objects, "ConfigMap")["data"]["policy.yaml"] = text


def _terms(objects: list[Object]) -> list[Object]:
    needed = _pod(objects)["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    rules: list[Object] = needed["nodeSelectorTerms"][0]["matchExpressions"]
    return rules


SELECTING = {
    "PodDisruptionBudget": ("selector", "matchLabels"),
    "NetworkPolicy": ("podSelector", "matchLabels"),
    "PeerAuthentication": ("selector", "matchLabels"),
    "RequestAuthentication": ("selector", "matchLabels"),
    "AuthorizationPolicy": ("selector", "matchLabels"),
    "Telemetry": ("selector", "matchLabels"),
}


def _astray(kind: str, name: str = "vllm") -> Callable[[list[Object]], None]:
    """Has an object select others' pods."""

    def spoil(objects: list[Object]) -> None:
        key, inner = SELECTING.get(kind, ("workloadSelector", "labels"))
        _spec(objects, kind, name)[key][inner] = {"app.kubernetes.io/name": "another"}

    return spoil


ENVOY_FILTER = """\
apiVersion: networking.istio.io/v1alpha3
kind: EnvoyFilter
metadata: {name: a, namespace: llm}
spec: {workloadSelector: {labels: {app.kubernetes.io/name: vllm}}}
"""

DAY = {"name": "x", "image": "x:1", "securityContext": {}, "resources": {}}

FAULTS = [
    Fault("ports", BASE, lambda o: _sidecar(o)["ports"][0].update(containerPort=15001), "15001 is istio-proxy's"),
    Fault("ports", BASE, lambda o: _sidecar(o)["ports"][0].update(hostPort=9400), "port of the host"),
    Fault("ports", BASE, lambda o: _spec(o, "Service")["ports"][0].update(targetPort=15006), "15006"),
    Fault("users", BASE, lambda o: _sidecar(o)["securityContext"].update(runAsUser=1337), "1337 is istio-proxy's"),
    Fault("users", BASE, lambda o: _engine(o)["securityContext"].update(runAsGroup=1337), "runAsGroup"),
    Fault("users", BASE, lambda o: _pod(o)["securityContext"].update(fsGroup=1337), "fsGroup"),
    Fault("users", BASE, lambda o: _pod(o)["securityContext"].update(supplementalGroups=[1337]), "supplemental"),
    Fault("users", BASE, lambda o: _engine(o)["securityContext"].update(runAsUser=0), "is root"),
    Fault("users", BASE, lambda o: _pod(o)["securityContext"].update(runAsNonRoot=False), "runAsNonRoot"),
    Fault("privileges", BASE, lambda o: _engine(o)["securityContext"].update(privileged=True), "privileged"),
    Fault("privileges", BASE, lambda o: _engine(o)["securityContext"].pop("allowPrivilegeEscalation"), "Escalation"),
    Fault("privileges", BASE, lambda o: _sidecar(o)["securityContext"].pop("readOnlyRootFilesystem"), "readOnlyRoot"),
    Fault("privileges", BASE, lambda o: _engine(o)["securityContext"]["capabilities"].update(add=["X"]), "dropped"),
    Fault("privileges", BASE, lambda o: _engine(o)["securityContext"].pop("capabilities"), "not all dropped"),
    Fault("privileges", BASE, lambda o: _pod(o)["securityContext"].pop("seccompProfile"), "seccompProfile"),
    Fault("privileges", BASE, lambda o: _pod(o).update(hostNetwork=True), "hostNetwork"),
    Fault("privileges", BASE, lambda o: _pod(o)["volumes"].append({"name": "a", "hostPath": {}}), "files of the host"),
    Fault("tokens", BASE, lambda o: _pod(o).pop("automountServiceAccountToken"), "automountServiceAccountToken"),
    Fault("tokens", BASE, lambda o: _pod(o).pop("enableServiceLinks"), "enableServiceLinks"),
    Fault(
        "tokens", BASE, lambda o: one(o, "ServiceAccount").pop("automountServiceAccountToken"), "ServiceAccount/vllm"
    ),
    Fault("images", BASE, lambda o: _engine(o).update(image="vllm/vllm-openai:latest"), "another one each day"),
    Fault("images", BASE, lambda o: _engine(o).update(image="registry:5000/vllm"), "another one each day"),
    Fault("resources", BASE, lambda o: _engine(o)["resources"]["requests"].pop("cpu"), "requests.cpu"),
    Fault("resources", BASE, lambda o: _sidecar(o)["resources"].pop("limits"), "limits.memory"),
    Fault("resources", BASE, lambda o: _engine(o)["resources"]["limits"].update({"nvidia.com/gpu": "2"}), "one card"),
    Fault(
        "resources",
        BASE,
        lambda o: _engine(o)["resources"]["limits"].update({"nvidia.com/mig-1g.10gb": "1"}),
        "a part of a card",
    ),
    Fault("resources", BASE, lambda o: _terms(o).pop(0), "(MIG)"),
    Fault("resources", BASE, lambda o: _terms(o).pop(1), "shared card"),
    Fault("probes", BASE, lambda o: _engine(o).pop("livenessProbe"), "is not there"),
    Fault(
        "probes",
        BASE,
        lambda o: _engine(o).update(readinessProbe={"httpGet": {"path": "/health", "port": 8000}}),
        "listens on loopback",
    ),
    Fault("probes", BASE, lambda o: _sidecar(o)["startupProbe"]["httpGet"].update(path="/readyz"), "must not wait"),
    Fault("probes", BASE, lambda o: _sidecar(o).pop("restartPolicy"), "no native sidecar"),
    Fault("loopback", BASE, lambda o: _engine(o).update(args=["--host=0.0.0.0"]), "the pod's address"),
    Fault("loopback", AMBIENT, lambda o: _engine(o).update(args=["--host=0.0.0.0"]), "the pod's address"),
    Fault("loopback", BASE, lambda o: _engine(o).update(ports=[{"containerPort": 8000}]), "nobody reaches them"),
    Fault("settings", BASE, lambda o: _env(o, "SIDECAR_DRAIN", "600"), "SIDECAR_DRAIN"),
    Fault(
        "settings",
        BASE,
        lambda o: _sidecar(o)["env"].append({"name": "SIDECAR_DRIAN", "value": "1s"}),
        "the sidecar reads no SIDECAR_DRIAN",
    ),
    Fault("settings", BASE, lambda o: _sidecar(o).update(args=["run", "--drian=1s"]), "no arguments of the sidecar's"),
    Fault(
        "settings",
        WEBHOOK,
        lambda o: _pod(o, "llm-sidecar-webhook")["containers"][0]["args"].append("--fast"),
        "no arguments of the sidecar's",
    ),
    Fault(
        "settings",
        BASE,
        lambda o: _sidecar(o)["lifecycle"]["preStop"]["exec"].update(command=["sidecar", "drian"]),
        "no command of the sidecar's",
    ),
    Fault(
        "words",
        AMBIENT,
        lambda o: one(o, "Deployment")["spec"]["template"]["metadata"]["labels"].update(
            {"sidecar.infra.ai/injet": "1"}
        ),
        "nobody reads sidecar.infra.ai/injet",
    ),
    Fault("policies", BASE, lambda o: _policy(o, "apiVersion: sidecar/v1\nkind: Policy\nservises: []\n"), "servises"),
    Fault("policies", BASE, lambda o: _env(o, "SIDECAR_UPSTREAM", ""), "has no endpoint"),
    Fault("grace", BASE, lambda o: _pod(o).update(terminationGracePeriodSeconds=600), "not longer than the drain"),
    Fault("grace", BASE, lambda o: _pod(o).pop("terminationGracePeriodSeconds"), "not longer than the drain"),
    Fault("grace", BASE, lambda o: _sidecar(o).pop("lifecycle"), "does not wait"),
    Fault(
        "grace", BASE, lambda o: _engine(o)["lifecycle"]["preStop"].update(exec={"command": ["sleep"]}), "does not wait"
    ),
    Fault("grace", BASE, lambda o: _env(o, "SIDECAR_DRAIN", "30m"), "not longer than the drain"),
    Fault(
        "hanging",
        BASE,
        lambda o: _sidecar(o)["livenessProbe"].pop("terminationGracePeriodSeconds"),
        "initContainers[0].livenessProbe: what hangs has",
    ),
    Fault(
        "hanging",
        AMBIENT,
        lambda o: _engine(o)["startupProbe"].update(terminationGracePeriodSeconds=600),
        "containers[0].startupProbe: what hangs has",
    ),
    Fault(
        "budgets",
        WEBHOOK,
        lambda o: _spec(o, "PodDisruptionBudget", "llm-sidecar-webhook").update(maxUnavailable=0),
        "its machine cannot be emptied",
    ),
    Fault(
        "neighbours",
        AMBIENT,
        lambda o: one(o, "AuthorizationPolicy", "vllm-only-by-waypoint")["metadata"].update(namespace="chat"),
        "lets in who is in llm, and is in chat",
    ),
    Fault(
        "plain_ports",
        BASE,
        lambda o: _spec(o, "PeerAuthentication").pop("portLevelMtls"),
        "callers speak TLS to 9401, where Deployment/vllm does not",
    ),
    Fault(
        "grace",
        BASE,
        lambda o: one(o, "Deployment")["spec"]["template"]["metadata"]["annotations"].pop("proxy.istio.io/config"),
        "drainDuration 45s",
    ),
    Fault("operators", BASE, lambda o: _env(o, "SIDECAR_OPERATORS", "loopback"), "are not taken at"),
    Fault("operators", BASE, lambda o: _engine(o)["volumeMounts"][3].pop("readOnly"), "another socket"),
    Fault("operators", BASE, lambda o: _engine(o)["securityContext"].update(runAsUser=65532), "is the sidecar's"),
    Fault("operators", BASE, lambda o: _pod(o)["volumes"][3].update(emptyDir={}), "not the pod's own"),
    Fault(
        "operators",
        BASE,
        lambda o: _pod(o)["containers"].append(
            {**DAY, "volumeMounts": [{"name": "llm-sidecar-run", "mountPath": "/run/llm-sidecar"}]}
        ),
        "is mounted by",
    ),
    Fault("order", BASE, lambda o: _pod(o)["initContainers"].insert(0, dict(DAY)), "starts before"),
    Fault("workloads", BASE, lambda o: _spec(o, "Deployment")["selector"]["matchLabels"].update(a="b"), "does not fit"),
    Fault(
        "workloads",
        CANARY,
        lambda o: one(o, "Deployment", "vllm")["spec"]["selector"]["matchLabels"].pop("version"),
        "another workload's",
    ),
    Fault("services", BASE, lambda o: _spec(o, "Service")["selector"].update(a="b"), "fits no pod"),
    Fault("services", BASE, lambda o: _spec(o, "Service")["ports"][0].update(targetPort=8000), "no port of its pods"),
    Fault("services", BASE, lambda o: _spec(o, "Service")["ports"][0].update(targetPort="http-llm"), "no number"),
    Fault("accounts", BASE, lambda o: _drop(o, "ServiceAccount", "vllm"), "there is no vllm"),
    Fault("configuration", BASE, lambda o: _drop(o, "ConfigMap", "llm-sidecar-policy"), "no ConfigMap"),
    Fault(
        "configuration",
        BASE,
        lambda o: _pod(o)["volumes"][4]["configMap"].update(items=[{"key": "rules.yaml", "path": "a"}]),
        "no key rules.yaml",
    ),
    Fault(
        "configuration",
        BASE,
        lambda o: _engine(o)["env"][2]["valueFrom"]["secretKeyRef"].pop("optional"),
        "is not optional",
    ),
    Fault("configuration", WEBHOOK, lambda o: _drop(o, "Certificate", "llm-sidecar-webhook"), "no Secret"),
    Fault("mounts", BASE, lambda o: _pod(o)["volumes"].pop(), "there is no volume llm-sidecar-policy"),
    Fault("mounts", BASE, lambda o: _engine(o)["volumeMounts"].pop(0), "nobody mounts data"),
    Fault("mounts", BASE, lambda o: _engine(o)["volumeMounts"][0].update(mountPath="/tmp"), "one path twice"),
    *[Fault("selectors", BASE, _astray(kind), f"{kind}/vllm") for kind in SELECTING],
    Fault(
        "selectors",
        "overlays/request",
        _astray("EnvoyFilter", "vllm-request-class"),
        "EnvoyFilter/vllm-request-class",
    ),
    Fault("selectors", AMBIENT, lambda o: _spec(o, "Telemetry")["targetRefs"][0].update(name="a"), "no Gateway a"),
    Fault(
        "closed_ports",
        BASE,
        lambda o: _spec(o, "AuthorizationPolicy")["rules"][0]["to"][0]["operation"].update(ports=["8000"]),
        "8000 is no port",
    ),
    Fault(
        "closed_ports", BASE, lambda o: _spec(o, "NetworkPolicy")["ingress"][0]["ports"][0].update(port=80), "80 is no"
    ),
    Fault(
        "closed_ports", AMBIENT, lambda o: _spec(o, "PeerAuthentication")["portLevelMtls"].update({"1": {}}), "1 is no"
    ),
    Fault("routes", BASE, lambda o: _http(o)[0].pop("retries"), "the sidecar retries"),
    Fault("routes", BASE, lambda o: _http(o)[0].update(timeout="5s"), "how long an answer"),
    Fault("routes", BASE, lambda o: _spec(o, "VirtualService").update(hosts=["vlm"]), "no Service vlm"),
    Fault("routes", BASE, lambda o: _http(o)[0]["route"][0]["destination"].update(host="vlm"), "no Service vlm"),
    Fault("routes", BASE, lambda o: _http(o)[0]["route"][0]["destination"].update(port={"number": 8}), "no such port"),
    Fault("routes", BASE, lambda o: _http(o)[0]["route"][0]["destination"].update(subset="v9"), "subset v9"),
    Fault("routes", BASE, lambda o: _http(o).pop(), "answered 404"),
    Fault("routes", CANARY, lambda o: _http(o)[0]["route"][0].update(weight=95), "not of 10000"),
    Fault("versions", BASE, lambda o: _spec(o, "DestinationRule").update(host="vlm"), "no Service vlm"),
    Fault("versions", CANARY, lambda o: _drop(o, "Deployment", "vllm-v2"), "fits no pod"),
    Fault(
        "scaling", PROD, lambda o: _spec(o, "HorizontalPodAutoscaler")["scaleTargetRef"].update(name="a"), "there is no"
    ),
    Fault("scaling", PROD, lambda o: _spec(o, "Deployment").update(replicas=2), "says how many"),
    Fault("scaling", PROD, lambda o: _metric(o).update(name="sidecar_requests_in_fight"), "has no sidecar_requests"),
    Fault("priorities", PROD, lambda o: _drop(o, "PriorityClass", "llm-serving"), "there is no llm-serving"),
    Fault("monitors", BASE, lambda o: _spec(o, "ServiceMonitor")["endpoints"][0].update(port="http"), "does not lead"),
    Fault(
        "monitors",
        BASE,
        lambda o: _spec(o, "ServiceMonitor")["selector"]["matchLabels"].pop("app.kubernetes.io/component"),
        "fits 2 Services",
    ),
    Fault(
        "webhooks", WEBHOOK, lambda o: one(o, "MutatingWebhookConfiguration")["metadata"].update(name="llm"), "behind"
    ),
    Fault("webhooks", WEBHOOK, lambda o: _client(o).update(name="a"), "there is no Service a"),
    Fault("webhooks", WEBHOOK, lambda o: _client(o).update(port=8443), "no port 8443"),
    Fault(
        "webhooks",
        WEBHOOK,
        lambda o: _spec(o, "Certificate", "llm-sidecar-webhook").update(dnsNames=["a"]),
        "no Certificate is for",
    ),
    Fault(
        "webhooks",
        WEBHOOK,
        lambda o: one(o, "MutatingWebhookConfiguration")["metadata"].pop("annotations"),
        "there is no Certificate",
    ),
    Fault(
        "providers", BASE, lambda o: _spec(o, "Telemetry")["tracing"][0].update(providers=[{"name": "a"}]), "provider a"
    ),
    Fault("waypoints", AMBIENT, lambda o: _drop(o, "Gateway", "waypoint"), "no waypoint waypoint"),
    Fault(
        "waypoints",
        AMBIENT,
        lambda o: one(o, "Gateway", "waypoint")["metadata"]["labels"].update({"app.kubernetes.io/name": "vllm"}),
        "Service/vllm takes the waypoint's pods",
    ),
    Fault("waypoints", AMBIENT, lambda o: o.extend(read(ENVOY_FILTER)), "waypoints take no EnvoyFilter"),
    Fault(
        "doors",
        AMBIENT,
        lambda o: _spec(o, "AuthorizationPolicy", "vllm-only-by-waypoint")["rules"][2].pop("from"),
        "rules[2].from: lets everybody in",
    ),
    Fault(
        "doors",
        BASE,
        lambda o: _spec(o, "AuthorizationPolicy")["rules"][0]["from"].append({}),
        "rules[0].from: lets everybody in",
    ),
    Fault("issuers", BASE, lambda o: _drop(o, "AuthorizationPolicy", "vllm"), "without a token"),
    Fault("issuers", BASE, lambda o: _spec(o, "RequestAuthentication")["jwtRules"][0].update(issuer="a"), "differ"),
    Fault("issuers", AMBIENT, lambda o: _spec(o, "RequestAuthentication")["jwtRules"][0].update(issuer="a"), "differ"),
    Fault("namespaces", BASE, lambda o: one(o, "Deployment")["metadata"].update(namespace="a"), "namespaces are"),
]


def _metric(objects: list[Object]) -> Object:
    metric: Object = _spec(objects, "HorizontalPodAutoscaler")["metrics"][0]["pods"]["metric"]
    return metric


def _http(objects: list[Object]) -> list[Object]:
    routes: list[Object] = _spec(objects, "VirtualService")["http"]
    return routes


def _client(objects: list[Object]) -> Object:
    service: Object = one(objects, "MutatingWebhookConfiguration")["webhooks"][0]["clientConfig"]["service"]
    return service


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.check}: {fault.words}")
def test_a_check_says_what_is_wrong(fault: Fault) -> None:
    (check,) = [each for each in checks.CHECKS if each.__name__ == fault.check]
    objects = kustomize(ISTIO / fault.folder)
    assert list(check(objects)) == []
    fault.spoil(objects)
    assert any(fault.words in each for each in check(objects)), list(check(objects))


def test_every_check_was_shown_a_fault() -> None:
    assert {each.__name__ for each in checks.CHECKS} == {fault.check for fault in FAULTS}


def test_all_of_it_is_asked() -> None:
    objects = kustomize(ISTIO / BASE)
    _pod(objects).pop("enableServiceLinks")
    assert checks.faults(objects) == ["Deployment/vllm: spec.enableServiceLinks: is not false"]
    _spec(objects, "Service")["ports"][0]["targetport"] = 1
    assert all("targetport" in each for each in checks.faults(objects))


@pytest.mark.parametrize(
    ("folder", "kind", "name"),
    [
        (BASE, "ServiceMonitor", "vllm"),
        (AMBIENT, "Gateway", "waypoint"),
        (WEBHOOK, "Certificate", "llm-sidecar-webhook"),
        (WEBHOOK, "Issuer", "llm-sidecar-webhook"),
        (BASE, "VirtualService", "vllm"),
        (WEBHOOK, "MutatingWebhookConfiguration", "infra-llm-sidecar"),
    ],
)
def test_an_unknown_field_is_refused_whoever_owns_the_kind(folder: str, kind: str, name: str) -> None:
    each = one(kustomize(ISTIO / folder), kind, name)
    assert checks.schema_faults(each) == []
    each.setdefault("spec", {})["colour"] = "red"
    assert any("colour" in fault or "spec" in fault for fault in checks.schema_faults(each))


def test_a_kind_that_nobody_knows_is_refused() -> None:
    each: Object = {"apiVersion": "example.com/v1", "kind": "Thing", "metadata": {"name": "a"}}
    assert checks.schema_faults(each) == ["Thing/a: nobody knows Thing of example.com/v1"]
