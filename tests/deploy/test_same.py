"""There is one source of what a pod gets: `sidecar.inject`. The base has it written out, the webhook adds it."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from sidecar.inject.container import Sidecar, container, engine_mount, engine_pre_stop, get_probe, volumes
from sidecar.inject.names import PORT_NAMES
from sidecar.inject.pod import Defaults, Injected, inject
from tests.deploy import checks, references
from tests.deploy.objects import ISTIO, ROOT, Object, kustomize, one, read
from tests.deploy.test_kustomize import FOLDERS

DOCS = ROOT / "docs"
WRITTEN_OUT = [folder for folder in FOLDERS if folder not in ("overlays/ambient", "injection/webhook")]


def _template(folder: str, kind: str = "Deployment") -> Object:
    template: Object = one(kustomize(ISTIO / folder), kind, "vllm")["spec"]["template"]
    return template


def _normal(pod: Object) -> Object:
    """A pod's spec by names: neither the order of lists nor that of keys means anything here."""
    spec = {**pod["spec"]}
    for key in ("containers", "initContainers", "volumes"):
        spec[key] = {each["name"]: each for each in spec.get(key) or []}
    for each in spec["containers"].values():
        each["volumeMounts"] = {mount["mountPath"]: mount for mount in each.get("volumeMounts") or []}
    return spec


def test_the_base_has_what_is_injected() -> None:
    template = _template("base")
    spec = template["spec"]
    assert spec["initContainers"] == [container(Sidecar())]
    assert spec["terminationGracePeriodSeconds"] == Sidecar().grace_s
    (engine,) = spec["containers"]
    assert engine["lifecycle"] == {"preStop": engine_pre_stop(Sidecar())}
    assert engine_mount() in engine["volumeMounts"]
    for each in volumes(Sidecar()):
        assert each in spec["volumes"]
    for key in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = get_probe("http://127.0.0.1:8000/health", engine[key]["timeoutSeconds"], [])
        assert asked.items() <= engine[key].items()


@pytest.mark.parametrize("folder", [each for each in WRITTEN_OUT if each not in ("base", "overlays/prod")])
def test_overlays_leave_the_sidecar_as_it_is(folder: str) -> None:
    kind = "DaemonSet" if folder == "overlays/node" else "Deployment"
    assert _template(folder, kind)["spec"]["initContainers"] == [container(Sidecar())]


def test_production_changes_what_it_says_and_nothing_else() -> None:
    (ours,) = _template("overlays/prod")["spec"]["initContainers"]
    expected = container(Sidecar())
    redis = next(each for each in expected["env"] if each["name"] == "REDIS_URL")
    redis["valueFrom"]["secretKeyRef"]["optional"] = False
    expected["resources"] = {"requests": {"cpu": "1", "memory": "512Mi"}, "limits": {"memory": "1Gi"}}
    by_name = {each["name"]: each for each in ours["env"]}
    assert by_name == {each["name"]: each for each in expected["env"]}
    assert {**ours, "env": None} == {**expected, "env": None}


def test_the_webhook_makes_the_base_of_ambients_pod() -> None:
    done = inject(_template("overlays/ambient"), Defaults())
    assert isinstance(done, Injected)
    assert done.warnings == ()
    assert _normal(done.pod) == _normal(_template("base"))


def test_ambients_pod_is_without_fault_once_it_is_injected() -> None:
    objects = kustomize(ISTIO / "overlays/ambient")
    deployment = one(objects, "Deployment")
    done = inject(deployment["spec"]["template"], Defaults())
    assert isinstance(done, Injected)
    deployment["spec"]["template"] = done.pod
    del done.pod["metadata"]["labels"]["sidecar.infra.ai/inject"]  # so that nothing is excused any more
    assert checks.faults(objects) == []


def test_the_scripts_certificate_is_for_the_webhook() -> None:
    """What certificate.sh names is what the manifests do."""
    script = ISTIO / "injection" / "webhook" / "certificate.sh"
    assert subprocess.run(["sh", "-n", str(script)], check=False).returncode == 0
    said = dict(re.findall(r"^(\w+)=([\w-]+)$", script.read_text(encoding="utf-8"), re.MULTILINE))
    objects = kustomize(ISTIO / "injection" / "webhook")
    service, configuration = one(objects, "Service"), one(objects, "MutatingWebhookConfiguration")
    assert said == {"namespace": service["metadata"]["namespace"], "name": service["metadata"]["name"]}
    assert one(objects, "Certificate")["spec"]["secretName"] == f"{said['name']}-tls"
    assert f" {configuration['metadata']['name']} " in script.read_text(encoding="utf-8")


def test_names_of_ports_tell_istio_their_protocol() -> None:
    for each in kustomize(ISTIO / "base"):
        if each["kind"] == "Service":
            for port in each["spec"]["ports"]:
                assert port["name"].partition("-")[0] == port["appProtocol"]
    assert PORT_NAMES == {"http-llm": 9400, "http-admin": 9401, "grpc-control": 9402}


def test_components_fit_together(tmp_path: Path) -> None:
    """Those that do not replace each other, in one kustomization somewhere else."""
    there = os.path.relpath(ISTIO, tmp_path.resolve())
    text = f"resources: [{there}/base]\ncomponents: [{there}/components/session, {there}/components/request]\n"
    (tmp_path / "kustomization.yaml").write_text(text, encoding="utf-8")
    objects = kustomize(tmp_path.resolve())
    assert checks.faults(objects) == []
    assert set(one(objects, "ConfigMap")["data"]) == {"policy.yaml", "breaker-request.yaml", "breaker-session.yaml"}


_SPACES = re.findall(r"```yaml\n(namespace: chat\n.*?)```", (DOCS / "kubernetes.md").read_text(encoding="utf-8"), re.S)


@pytest.mark.parametrize(
    ("folder", "text"), [("overlays/prod", _SPACES[0]), ("overlays/ambient", _SPACES[1])], ids=["prod", "ambient"]
)
def test_what_the_docs_say_of_another_namespace_holds(tmp_path: Path, folder: str, text: str) -> None:
    there = os.path.relpath(ISTIO / folder, tmp_path.resolve())
    (tmp_path / "kustomization.yaml").write_text(f"resources: [{there}]\nnamespace: chat\n", encoding="utf-8")
    assert list(references.neighbours(kustomize(tmp_path.resolve()))), "kustomize alone does not know"
    told = tmp_path / "told"
    told.mkdir()
    (told / "kustomization.yaml").write_text(f"resources: [../{there}]\n{text}", encoding="utf-8")
    objects = kustomize(told.resolve())
    assert checks.faults(objects) == []
    assert one(objects, "ServiceAccount")["metadata"]["namespace"] == "chat"


@pytest.mark.parametrize("folder", FOLDERS)
def test_one_object_is_one_file(folder: str) -> None:
    """Certificate and issuer are one thing; all else is found by its file's name."""
    for path in sorted((ISTIO / folder).glob("*.yaml")):
        found = read(path.read_text(encoding="utf-8"))
        assert len(found) == 1 or path.name == "certificate.yaml", path.name


def test_a_pod_that_is_changed_is_no_longer_the_same() -> None:
    pod = _template("base")
    pod["spec"]["containers"][0]["volumeMounts"].pop()
    assert _normal(pod) != _normal(_template("base"))
