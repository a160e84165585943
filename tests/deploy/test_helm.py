"""The chart renders what kustomize builds, from values that are bounded, explained and refused with reason.

1. Base and overlays are compared object by object, after what `DIFFERENCES` takes away; each entry of it has a reason,
   and is needed.
2. That the comparison can fail is shown by templates that were changed.
"""

import copy
import functools
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from helm_python import Chart, HelmError, lint, package

from sidecar.inject.container import Resources, Sidecar, container, engine_mount, engine_pre_stop, volumes
from sidecar.inject.pod import Defaults, Injected, inject
from tests.deploy import checks
from tests.deploy.objects import DEPLOY, ISTIO, ROOT, Object, called, kustomize, of_kind, one, read

CHART = DEPLOY / "helm" / "llm-sidecar"
VALUES = sorted((CHART / "ci").glob("*.yaml"))
SETS = ["base", *(path.stem for path in VALUES)]
FOLDERS = {"base": ISTIO / "base", "webhook": ISTIO / "injection" / "webhook"}
WEBHOOK_SPACE = "llm-sidecar-system"


def values(name: str) -> Object:
    """A set's values: none are the defaults."""
    if name == "base":
        return {}
    (held,) = read((CHART / "ci" / f"{name}.yaml").read_text(encoding="utf-8"))
    return held


def space(name: str) -> str:
    """The namespace that a set is installed to."""
    return WEBHOOK_SPACE if name == "webhook" else "llm"


def made(told: Object, folder: Path = CHART, namespace: str = "llm") -> list[Object]:
    """What the chart in a folder makes of values."""
    with Chart.load(folder) as chart:
        files = chart.render(told, name="release", namespace=namespace)
    return [each for path in sorted(files) if path.endswith(".yaml") for each in read(files[path])]


@functools.cache
def _rendered(name: str) -> list[Object]:
    return made(values(name), namespace=space(name))


def rendered(name: str) -> list[Object]:
    """A set's objects; a fresh copy each time."""
    return copy.deepcopy(_rendered(name))


def notes(told: Object) -> str:
    with Chart.load(CHART) as chart:
        return str(chart.render(told, name="release", namespace="llm")["llm-sidecar/templates/NOTES.txt"])


class Difference(NamedTuple):
    """Something that is not compared, why, and what takes it away from a set's objects."""

    what: str
    reason: str
    without: Callable[[list[Object]], list[Object]]


def _without_chart_labels(objects: list[Object]) -> list[Object]:
    for each in objects:
        for label in ("helm.sh/chart", "app.kubernetes.io/managed-by"):
            each["metadata"].get("labels", {}).pop(label, None)
    return objects


def _without_comments(objects: list[Object]) -> list[Object]:
    for each in of_kind(objects, "ConfigMap"):
        each["data"] = {name: read(text) for name, text in each["data"].items()}
    return objects


def _without_order(objects: list[Object]) -> list[Object]:
    for each in of_kind(objects, "Deployment", "DaemonSet"):
        spec = each["spec"]["template"]["spec"]
        for held in (*spec.get("initContainers", []), *spec["containers"]):
            held.get("env", []).sort(key=lambda variable: str(variable["name"]))
    return objects


def _without_namespaces(objects: list[Object]) -> list[Object]:
    return [each for each in objects if each["kind"] != "Namespace"]


DIFFERENCES = (
    Difference(
        "metadata.labels: helm.sh/chart, app.kubernetes.io/managed-by",
        "Helm's custom, on objects alone: on pods or in selectors another chart would be a roll-out",
        _without_chart_labels,
    ),
    Difference(
        "ConfigMap: comments in the policy's files",
        "the chart writes these files from values; what they say is compared",
        _without_comments,
    ),
    Difference(
        "containers: the order of env",
        "a patch of kustomize's puts what it changes first; no variable here speaks of another, so order says nothing",
        _without_order,
    ),
    Difference(
        "the webhook's Namespace",
        "a release's namespace is there before it: helm install --create-namespace",
        _without_namespaces,
    ),
)


def normal(objects: list[Object], differences: tuple[Difference, ...] = DIFFERENCES) -> dict[str, Object]:
    """Objects by `Kind/name`, without the differences."""
    for difference in differences:
        objects = difference.without(objects)
    named = {called(each): each for each in objects}
    assert len(named) == len(objects), "an object is there twice"
    return named


def built(name: str) -> list[Object]:
    """What kustomize builds of a set's folder."""
    return kustomize(FOLDERS.get(name, ISTIO / "overlays" / name))


def test_each_overlay_has_its_values() -> None:
    overlays = {path.parent.name for path in (ISTIO / "overlays").glob("*/kustomization.yaml")}
    assert {"base", "webhook"} | overlays == set(SETS)


@pytest.mark.parametrize("name", SETS)
def test_the_chart_renders_what_kustomize_builds(name: str) -> None:
    assert normal(rendered(name)) == normal(built(name))


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda each: each.what.split(":")[0])
def test_each_difference_is_one(difference: Difference) -> None:
    others = tuple(each for each in DIFFERENCES if each is not difference)
    assert any(normal(rendered(name), others) != normal(built(name), others) for name in SETS)


MUTATIONS = {
    "a probe's number": ("_container.tpl", "failureThreshold: 60", "failureThreshold: 61"),
    "a script": ("_container.tpl", 'ask("POST /drain")', 'ask("POST /drains")'),
    "the drain's length": ("_names.tpl", "{{ add 5 ", "{{ add 6 "),
    "a mount": ("_container.tpl", "mountPath: /etc/llm-sidecar/policy", "mountPath: /etc/policy"),
    "the engine's user": ("_workload.tpl", "runAsNonRoot: true", "runAsNonRoot: false"),
    "a label of pods": ("_workload.tpl", "        version: {{ .version |", "        versions: {{ .version |"),
    "a port": ("serving/service.yaml", "targetPort: 9400", "targetPort: 9401"),
    "a route": ("serving/virtual-service.yaml", "attempts: 0", "attempts: 2"),
    "who may call": ("serving/authorization-policy.yaml", 'paths: ["/v1/*"]', 'paths: ["/*"]'),
    "a policy's field": ("_policy.tpl", "claims_header: x-jwt-payload", "claims_header: x-jwt"),
    "an object less": ("serving/telemetry.yaml", ".Values.telemetry.enabled", "(not .Values.telemetry.enabled)"),
}


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS)
def test_a_changed_template_is_seen(tmp_path: Path, mutation: tuple[str, str, str]) -> None:
    path, old, new = mutation
    folder = tmp_path / "llm-sidecar"
    shutil.copytree(CHART, folder)
    template = folder / "templates" / path
    text = template.read_text(encoding="utf-8")
    assert old in text
    template.write_text(text.replace(old, new), encoding="utf-8")
    assert normal(made({}, folder)) != normal(built("base"))


@pytest.mark.parametrize("name", SETS)
def test_what_is_rendered_is_without_fault(name: str) -> None:
    assert checks.faults(rendered(name)) == []


OTHERS: dict[str, Object] = {
    "everything has another name": {
        "name": "chat",
        "image": {"repository": "registry.example:5000/llm/sidecar", "digest": "sha256:" + "a" * 64},
        "imagePullSecrets": [{"name": "registry"}],
        "serving": {
            "version": "blue",
            "tolerations": [{"key": "pool", "operator": "Exists"}],
            "podLabels": {"team": "a"},
            "podAnnotations": {"a.example/b": "true"},
        },
        "engine": {
            "port": 8123,
            "args": ["--max-model-len=8192"],
            "env": [{"name": "VLLM_LOGGING_LEVEL", "value": "INFO"}],
        },
        "policy": {"configMap": "chat-policy"},
        "tokens": {"issuer": "https://id.example/a", "jwksUri": "https://id.example/keys", "audiences": []},
    },
    "short drains": {"sidecar": {"drainSeconds": 30, "resources": {"cpuLimit": "2", "memoryLimit": "1Gi"}}},
    "a canary by sessions": {
        "candidate": {"enabled": True, "tag": "v0.32.1"},
        "breakers": {"session": {"enabled": True}},
    },
    "ambient with sessions": {
        "mesh": {"mode": "ambient"},
        "serving": {"injection": "webhook"},
        "breakers": {"session": {"enabled": True}},
    },
    "injected beside istio-proxy": {"serving": {"injection": "webhook"}, "sidecar": {"drainSeconds": 30}},
    "a volume for models": {"engine": {"storage": {"claim": "models"}}},
    "objects beside the policy": {
        "policy": {
            "files": {
                "quota.yaml": "apiVersion: infra.ai/v1\nkind: TokenQuota\nmetadata: {name: acme}\n"
                "spec: {tenant: acme, tokensPerMinute: 1000}\n"
            }
        }
    },
}


@pytest.mark.parametrize("told", OTHERS.values(), ids=OTHERS)
def test_other_values_are_without_fault_as_well(told: Object) -> None:
    assert checks.faults(made(told)) == []


def merged(*told: Object) -> Object:
    """Values of several files, as Helm takes them: the later one's go before."""
    whole: Object = {}
    for each in told:
        for key, held in each.items():
            both = isinstance(held, dict) and isinstance(whole.get(key), dict)
            whole[key] = merged(whole[key], held) if both else held
    return whole


@pytest.mark.parametrize(
    "names", [("prod", "canary"), ("prod", "request"), ("session", "node"), ("request", "node"), ("ambient", "canary")]
)
def test_several_files_of_values_go_together(names: tuple[str, ...]) -> None:
    objects = made(merged(*map(values, names)))
    assert checks.faults(objects) == []
    replicas = {each["metadata"]["name"]: each["spec"].get("replicas") for each in of_kind(objects, "Deployment")}
    assert replicas.get("vllm") == (2 if names[0] == "ambient" else None)
    assert replicas.get("vllm-v2") == (1 if "canary" in names else None)


def test_without_a_mesh_there_is_nothing_of_it() -> None:
    objects = made({"mesh": {"mode": "none"}})
    assert [each for each in objects if "istio" in each["apiVersion"]] == []
    # The check takes every pod for one of the mesh's.
    assert [fault for fault in checks.faults(objects) if "drainDuration" not in fault] == []
    (policy,) = read(one(objects, "ConfigMap")["data"]["policy.yaml"])
    assert policy["identity"]["jwt"]["verified_by"] == "sidecar"


@pytest.mark.parametrize("name", SETS)
def test_lint_has_nothing_to_say(name: str) -> None:
    report = lint(CHART, values(name), strict=True, namespace=space(name), kube_version="v1.33.0")
    assert report["errors"] == []
    assert [each["error"] for each in report["messages"]] == ["icon is recommended"]


def test_the_webhook_is_told_what_is_not_its_default() -> None:
    told = {"image": {"repository": "r.example/s"}, "policy": {"configMap": "chat"}, "sidecar": {"drainSeconds": 30}}
    alone = made({**told, "serving": {"enabled": False}, "webhook": {"enabled": True}}, namespace=WEBHOOK_SPACE)
    (webhook,) = one(alone, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert webhook["args"][-3:] == ["--image=r.example/s:0.1.0", "--policy=chat", "--drain=30s"]
    injected = made({**told, "serving": {"injection": "webhook"}})
    annotations = one(injected, "Deployment")["spec"]["template"]["metadata"]["annotations"]
    assert {key: held for key, held in annotations.items() if key.startswith("sidecar.infra.ai/")} == {
        "sidecar.infra.ai/image": "r.example/s:0.1.0",
        "sidecar.infra.ai/policy": "chat",
        "sidecar.infra.ai/drain-seconds": "30",
    }


INJECTED: dict[str, Object] = {
    "defaults": {},
    "simulated": values("dev"),
    "other values": {
        "image": {"repository": "r.example/s", "tag": "2"},
        "engine": {"port": 8123, "image": {"repository": "r.example/own", "tag": "5"}},
        "policy": {"configMap": "chat"},
        "sidecar": {
            "drainSeconds": 30,
            "resources": {"cpu": "2", "memory": "1Gi", "cpuLimit": "4", "memoryLimit": "2Gi"},
        },
    },
}


def _pod(objects: list[Object]) -> Object:
    """The pod's spec by names: neither the order of lists nor that of keys means anything here."""
    spec: Object = one(objects, "Deployment")["spec"]["template"]["spec"]
    lists = {key: {each["name"]: each for each in spec[key]} for key in ("initContainers", "containers", "volumes")}
    for each in lists["containers"].values():
        each["volumeMounts"] = {mount["mountPath"]: mount for mount in each["volumeMounts"]}
    return {**spec, **lists}


@pytest.mark.parametrize("told", INJECTED.values(), ids=INJECTED)
def test_what_the_webhook_makes_of_a_pod_is_the_manifest_s(told: Object) -> None:
    webhook = made({**told, "serving": {**told.get("serving", {}), "injection": "webhook"}})
    deployment = one(webhook, "Deployment")
    done = inject(deployment["spec"]["template"], Defaults())
    assert isinstance(done, Injected)
    # It cannot know that simulated engines are told to listen on loopback.
    assert [each for each in done.warnings if "command line that cannot be lengthened" not in each.message] == []
    deployment["spec"]["template"] = done.pod
    assert _pod(webhook) == _pod(made(told))


def test_a_certificate_of_one_s_own() -> None:
    told = {
        "serving": {"enabled": False},
        "webhook": {"enabled": True, "certificate": {"certManager": False, "caBundle": "YQ=="}},
    }
    objects = made(told, namespace=WEBHOOK_SPACE)
    assert of_kind(objects, "Issuer", "Certificate") == []
    (webhook,) = one(objects, "MutatingWebhookConfiguration")["webhooks"]
    assert webhook["clientConfig"]["caBundle"] == "YQ=="


PARENT = """\
{{- $sidecar := index .Subcharts "llm-sidecar" }}
apiVersion: v1
kind: Pod
metadata:
  name: own
spec:
  terminationGracePeriodSeconds: {{ include "llm-sidecar.graceSeconds" $sidecar }}
  initContainers:
    -
      {{- include "llm-sidecar.container" $sidecar | nindent 6 }}
  containers:
    - name: own
      lifecycle:
        preStop:
          {{- include "llm-sidecar.enginePreStop" $sidecar | nindent 10 }}
      volumeMounts:
        -
          {{- include "llm-sidecar.engineMount" $sidecar | nindent 10 }}
  volumes:
    {{- include "llm-sidecar.volumes" $sidecar | nindent 4 }}
"""


def test_a_chart_of_one_s_own_gets_the_block_alone(tmp_path: Path) -> None:
    (tmp_path / "templates").mkdir()
    (tmp_path / "Chart.yaml").write_text(
        "apiVersion: v2\nname: own\nversion: 1.0.0\ndependencies:\n  - {name: llm-sidecar, version: 0.1.0}\n",
        encoding="utf-8",
    )
    (tmp_path / "templates" / "pod.yaml").write_text(PARENT, encoding="utf-8")
    shutil.copytree(CHART, tmp_path / "charts" / "llm-sidecar")
    resources = {"cpu": "2", "memory": "1Gi", "cpuLimit": "4", "memoryLimit": ""}
    told = {
        "serving": {"enabled": False},
        "image": {"repository": "r/x", "tag": "2"},
        "sidecar": {"drainSeconds": 60, "resources": resources},
        "engine": {"port": 8100},
        "policy": {"configMap": "chat"},
    }
    (pod,) = made({"llm-sidecar": told}, tmp_path)
    sidecar = Sidecar(
        image="r/x:2",
        policy="chat",
        upstream="http://127.0.0.1:8100",
        drain_s=60,
        resources=Resources(cpu="2", memory="1Gi", cpu_limit="4", memory_limit=""),
    )
    assert pod["spec"] == {
        "terminationGracePeriodSeconds": sidecar.grace_s,
        "initContainers": [container(sidecar)],
        "containers": [
            {"name": "own", "lifecycle": {"preStop": engine_pre_stop(sidecar)}, "volumeMounts": [engine_mount()]}
        ],
        "volumes": volumes(sidecar),
    }


def test_the_default_block_is_injection_s() -> None:
    spec = one(rendered("base"), "Deployment")["spec"]["template"]["spec"]
    assert spec["initContainers"] == [container(Sidecar())]
    assert spec["volumes"][-2:] == volumes(Sidecar())


# Each with what the message says of it.
BAD: dict[str, tuple[Object, str]] = {
    "a name that is none": ({"replicas": 2}, "additional properties 'replicas' not allowed"),
    "a name below that is none": ({"serving": {"replica": 2}}, "/serving': additional properties 'replica' not"),
    "fewer than none": ({"serving": {"replicas": -1}}, "/serving/replicas': minimum: got -1, want 0"),
    "another kind": ({"serving": {"kind": "StatefulSet"}}, "must be one of 'Deployment', 'DaemonSet'"),
    "a time with a unit": ({"sidecar": {"drainSeconds": "10m"}}, "/sidecar/drainSeconds': got string, want integer"),
    "more than sidecars take": ({"sidecar": {"drainSeconds": 3591}}, "maximum: got 3,591, want 3,590"),
    "a quantity that is a number": ({"engine": {"resources": {"cpu": 2}}}, "/engine/resources/cpu': got number"),
    "bytes without a unit": ({"engine": {"storage": {"data": "96"}}}, "/engine/storage/data': '96' does not match"),
    "more than all": ({"serving": {"maxSurge": "200%"}}, "/serving/maxSurge': '200%' does not match"),
    "a port of Istio's": ({"engine": {"port": 15001}}, "/engine/port': maximum: got 15,001, want 14,999"),
    "a port of the sidecar's": ({"engine": {"port": 9401}}, "/engine/port': maximum: got 9,401, want 9,399"),
    "root": ({"engine": {"user": 0}}, "/engine/user': minimum: got 0, want 1"),
    "istio-proxy's user": ({"engine": {"user": 1337}}, "/engine/user': maximum: got 1,337, want 1,336"),
    "parts above the whole": ({"candidate": {"parts": 10001}}, "/candidate/parts': maximum: got 10,001, want 10,000"),
    "a name with capitals": ({"name": "vLLM"}, "/name': 'vLLM' does not match pattern"),
    "an issuer without a scheme": ({"tokens": {"issuer": "login"}}, "/tokens/issuer': 'login' does not match"),
    "a switch that is a word": ({"tokens": {"enabled": "yes"}}, "/tokens/enabled': got string, want boolean"),
    "a digest that is none": ({"image": {"digest": "abc"}}, "/image/digest': 'abc' does not match"),
    "a breaker of another scope": (
        {"breakers": {"node": {"spec": {"scope": "Session"}}}},
        "/breakers/node/spec/scope': value must be 'Node'",
    ),
    "a variable without value": ({"engine": {"env": [{"name": "A"}]}}, "/engine/env/0': 'oneOf' failed"),
    "the webhook beside its pods": ({"webhook": {"enabled": True}}, "install it as a release of its own"),
    "a webhook that nobody trusts": (
        {"serving": {"enabled": False}, "webhook": {"enabled": True, "certificate": {"certManager": False}}},
        "told by caBundle whom to trust",
    ),
    "no way to roll out": ({"serving": {"maxUnavailable": "0%"}}, "are both 0: no roll-out could begin"),
    "ambient with a manifest": ({"mesh": {"mode": "ambient"}}, "serving.injection has to be webhook"),
    "classes in ambient": (
        {"mesh": {"mode": "ambient"}, "serving": {"injection": "webhook"}, "breakers": {"request": {"enabled": True}}},
        "an EnvoyFilter, which only mesh.mode sidecar takes",
    ),
    "sessions that anybody makes up": (
        {"tokens": {"enabled": False}, "breakers": {"session": {"enabled": True}}},
        "without tokens the session is what a client says",
    ),
    "a canary beside a DaemonSet": (
        {"serving": {"kind": "DaemonSet"}, "candidate": {"enabled": True}},
        "there is none for a second version",
    ),
    "a canary of the same version": ({"candidate": {"enabled": True, "version": "v1"}}, "could not tell them apart"),
    "a canary that nobody splits for": ({"candidate": {"enabled": True}, "mesh": {"mode": "none"}}, "mesh splits"),
    "a scaled DaemonSet": ({"serving": {"kind": "DaemonSet"}, "autoscaling": {"enabled": True}}, "as many as there"),
    "more at least than at most": ({"autoscaling": {"enabled": True, "minReplicas": 13}}, "more than autoscaling.max"),
    "a class without a name": ({"serving": {"priorityClass": {"create": True}}}, "priorityClass.name is empty"),
    "latest": ({"engine": {"image": {"tag": "latest"}}}, "another image tomorrow"),
    "a setting twice": (
        {"sidecar": {"env": [{"name": "SIDECAR_DRAIN", "value": "1s"}]}},
        "the chart itself says what SIDECAR_DRAIN is",
    ),
    "settings that the webhook cannot know": (
        {"serving": {"injection": "webhook"}, "sidecar": {"redis": {"required": True}}},
        "the webhook knows nothing of sidecar.env and sidecar.redis",
    ),
    "the engine's home": ({"engine": {"env": [{"name": "HOME", "value": "/"}]}}, "the chart itself says what HOME is"),
    "a label twice": ({"serving": {"podLabels": {"version": "v9"}}}, "the chart itself says what version is"),
    "a DaemonSet that stays": ({"serving": {"kind": "DaemonSet", "maxUnavailable": 0}}, "has no spare card"),
    "a policy's kind": ({"policy": {"settings": {"kind": "Policy"}}}, "apiVersion and kind are written by the chart"),
    "null": ({"name": None}, "missing property 'name'"),
    "null for many": ({"sidecar": None}, "missing property 'sidecar'"),
    "null below": ({"engine": {"resources": {"cpu": None}}}, "at '/engine/resources': missing property 'cpu'"),
    "a selector's value": (
        {"serving": {"nodeSelector": {"pool": "a b"}}},
        "nodeSelector/pool': 'a b' does not",
    ),
    "a label's name": ({"serving": {"podLabels": {"a b": "c"}}}, "invalid propertyName 'a b'"),
    "a toleration's field": ({"serving": {"tolerations": [{"kye": "a"}]}}, "additional properties 'kye' not allowed"),
    "a Secret's name": ({"sidecar": {"redis": {"secret": "a..b"}}}, "/sidecar/redis/secret': 'a..b' does not match"),
    "the sidecar's user": ({"engine": {"user": 65532}}, "/engine/user': maximum: got 65,532, want 65,531"),
    "a file that kubelet hides": ({"policy": {"files": {"..data.yaml": ""}}}, "invalid propertyName '..data.yaml'"),
    "a file that is no YAML": (
        {"policy": {"files": {"a.yaml": "a: ["}}},
        "policy.files: a.yaml: error converting",
    ),
    "files that no ConfigMap holds": (
        {"policy": {"files": {f"{name}.yaml": "#" * 250_000 for name in "abcd"}}},
        "policy.files: 1000000 bytes, and a ConfigMap has a million at most",
    ),
    "more memory than there may be": (
        {"sidecar": {"resources": {"memory": "1Gi"}}},
        "sidecar.resources.memory is",
    ),
    "more cores than there may be": (
        {"sidecar": {"resources": {"cpuLimit": "499m"}}},
        "sidecar.resources.cpu is more than its limit, 499m",
    ),
    "more of the engine's memory": (
        {"engine": {"resources": {"memoryLimit": "32G"}}},
        "engine.resources.memory is",
    ),
    "a roll-out that fails while it loads": ({"engine": {"startSeconds": 3600}}, "while the model is loaded"),
    "machines that stay": ({"podDisruptionBudget": {"maxUnavailable": 0}}, "no machine could be emptied"),
    "reads longer than their interval": ({"serviceMonitor": {"timeoutSeconds": 16}}, "more than intervalSeconds"),
    "a monitor's own label": (
        {"serviceMonitor": {"labels": {"helm.sh/chart": "x"}}},
        "the chart itself says what helm.sh/chart is",
    ),
    "an engine at a socket": (
        {"engine": {"args": ["--uds=/x"]}},
        "with --uds=/x the sidecar does not",
    ),
    "a candidate with TLS": (
        {"candidate": {"args": ["--ssl-keyfile=/k"]}},
        "with --ssl-keyfile=/k the sidecar",
    ),
    "an annotation that values say": (
        {"serving": {"injection": "webhook", "podAnnotations": {"sidecar.infra.ai/image": "x"}}},
        "values say what sidecar.infra.ai/image is",
    ),
    "the sidecar twice": (
        {"serving": {"podAnnotations": {"inject.istio.io/templates": "sidecar,llm-sidecar"}}},
        "would add the sidecar a second time",
    ),
    "a policy's file twice": ({"policy": {"files": {"policy.yaml": ""}}}, "policy.yaml is written by the chart"),
}


@pytest.mark.parametrize(("told", "words"), BAD.values(), ids=BAD)
def test_bad_values_are_refused_with_reason(told: Object, words: str) -> None:
    with pytest.raises(HelmError) as caught:
        made(told)
    assert words in str(caught.value)


def test_no_value_can_be_taken_away() -> None:
    found = list(_closed(schema()))
    assert len(found) > 20
    for path, part in found:
        assert set(part["required"]) == set(part["properties"]) - {"global"}, path


def _closed(part: Object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Object]]:
    if "properties" in part and part.get("additionalProperties") is False:
        yield path, part
        for name, each in part["properties"].items():
            yield from _closed(each, (*path, name))


# Good names that YAML takes for something else where they are not quoted.
WORDS: dict[str, Object] = {
    "words": {
        "name": "on",
        "serving": {"version": "true", "priorityClass": {"name": "null"}, "nodeSelector": {"a": "1", "b": "no"}},
        "candidate": {"enabled": True, "version": "no", "model": "m:", "tag": "1.10"},
        "engine": {"model": "a:", "tokenSecret": {"name": "off", "key": "y"}, "storage": {"claim": "false"}},
        "policy": {"configMap": "yes"},
        "sidecar": {"redis": {"secret": "n", "key": "null"}},
        "telemetry": {"traces": "true", "logs": "null"},
        "networkPolicy": {"monitoringNamespace": "on"},
    },
    "numbers": {
        "serving": {"version": "1", "injection": "webhook", "podLabels": {"team": "0x10"}},
        "candidate": {"enabled": True, "version": "2"},
        "engine": {"tokenSecret": {"name": "1e3", "key": "1"}, "storage": {"claim": "007"}},
        "policy": {"configMap": "1.5"},
        "mesh": {"mode": "ambient", "waypoint": "8"},
        "networkPolicy": {"monitoringNamespace": "9"},
    },
}


def test_the_monitor_has_the_labels_that_prometheus_looks_for() -> None:
    labels = one(made({"serviceMonitor": {"labels": {"release": "stack"}}}), "ServiceMonitor")["metadata"]["labels"]
    assert labels["release"] == "stack" and labels["app.kubernetes.io/name"] == "vllm"


@pytest.mark.parametrize("told", WORDS.values(), ids=WORDS)
def test_names_stay_names_whatever_yaml_takes_them_for(told: Object) -> None:
    found = [fault for each in made(told, namespace="12") for fault in checks.schema_faults(each)]
    assert found == []


def schema() -> Object:
    with Chart.load(CHART) as chart:
        held: Object | None = chart.schema
    assert held
    return held


def leaves(part: Object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Object]]:
    """Values that the schema knows, each with its path; what `$ref` names is looked up by the caller."""
    if "properties" in part and part.get("additionalProperties") is False:
        for name, each in part["properties"].items():
            yield from leaves(each, (*path, name))
    else:
        yield path, part


def test_every_value_is_there_and_has_a_comment() -> None:
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    lines = text.splitlines()
    keys: dict[tuple[str, ...], int] = {}

    def walk(node: yaml.Node, path: tuple[str, ...]) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, held in node.value:
                keys[(*path, key.value)] = key.start_mark.line
                walk(held, (*path, key.value))

    root = yaml.compose(text, yaml.SafeLoader)
    assert root is not None
    walk(root, ())
    known = {path for path, _ in leaves(schema()) if path != ("global",)}
    assert known - set(keys) == set()
    assert [path for path in known if not lines[keys[path] - 1].lstrip().startswith("# ")] == []


def _unbounded(part: Any, path: str) -> Iterator[str]:
    if isinstance(part, dict):
        kind = part.get("type")
        if kind in ("integer", "number") and not {"minimum", "maximum"} <= part.keys():
            yield f"{path}: a number without bounds"
        if kind == "array" and not {"items", "maxItems"} <= part.keys():
            yield f"{path}: an array without bounds"
        closed = "properties" not in part or part.get("additionalProperties") is False
        if kind == "object" and not closed and not part.get("description", "").startswith("spec of a"):
            yield f"{path}: unknown names are taken"
        for key, held in part.items():
            yield from _unbounded(held, f"{path}.{key}")
    elif isinstance(part, list):
        for index, held in enumerate(part):
            yield from _unbounded(held, f"{path}[{index}]")


def test_the_schema_has_bounds_and_refuses_what_it_does_not_know() -> None:
    assert list(_unbounded(schema(), "$")) == []


def test_the_chart_has_the_package_s_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    with Chart.load(CHART) as chart:
        assert (chart.version, chart.metadata["appVersion"]) == (version, version)


def test_the_chart_has_the_custom_resources() -> None:
    ours = {
        path.name: path.read_bytes() for path in (DEPLOY / "crds").glob("*.yaml") if path.name != "kustomization.yaml"
    }
    assert {path.name: path.read_bytes() for path in (CHART / "crds").iterdir()} == ours
    with Chart.load(CHART) as chart:
        assert len(chart.crds) == len(ours) == 3


def test_a_packed_chart_renders_the_same(tmp_path: Path) -> None:
    archive = package(CHART, destination=tmp_path)
    assert Path(archive).name == "llm-sidecar-0.1.0.tgz"
    assert made({}, Path(archive)) == rendered("base")


@pytest.mark.parametrize("name", SETS)
def test_the_notes_speak_of_what_is_there(name: str) -> None:
    words = notes(values(name))
    workloads = [called(each).lower() for each in of_kind(rendered(name), "Deployment", "DaemonSet")]
    assert any(f"rollout status {each}" in words for each in workloads)
    assert "<no value>" not in words and "%!" not in words
    assert ("no token is good until it is yours" in words) == (name not in ("dev", "webhook"))
    assert ("istio-injection=enabled" in words) == (name not in ("ambient", "webhook"))
    assert ("istio.io/dataplane-mode=ambient" in words) == (name == "ambient")
    assert ("Bearer" in words) == (name == "ambient")


def test_nothing_is_made_where_nothing_is_enabled() -> None:
    assert made({"serving": {"enabled": False}}) == []
    assert "Nothing was made" in notes({"serving": {"enabled": False}})
