"""What injection makes of pods, as API servers take it: by the command, and by Istio's template rendered by Go."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import Chart, HelmRenderError

from sidecar.inject.container import Resources, Sidecar, container, engine_mount, engine_pre_stop, volumes
from sidecar.inject.template import overlay
from tests.deploy.kubernetes import RELEASES, faults, known
from tests.deploy.objects import Object
from tests.inject.goldens import SPECS, golden


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_injected_manifests_are_such_as_api_servers_take(path: Path) -> None:
    for each in filter(None, yaml.safe_load_all(golden(path)[0].read_text(encoding="utf-8"))):
        for one in each["items"] if each["kind"] == "List" else [each]:
            assert known(one)
            for release in RELEASES:
                assert faults(one, release) == []


POD: Object = {
    "ObjectMeta": {"Annotations": {}},
    "Spec": {
        "TerminationGracePeriodSeconds": 30,
        "Containers": [{"Name": "vllm", "Lifecycle": None}, {"Name": "other", "Lifecycle": None}],
    },
}


def rendered(folder: Path, pod: Object) -> Object:
    """What Go's templates and sprig make of the template for a pod as Istio shows it: fields by their names in Go."""
    (folder / "templates").mkdir()
    (folder / "Chart.yaml").write_text("apiVersion: v2\nname: injection\nversion: 0.1.0\n", encoding="utf-8")
    text = f'{{{{- define "overlay" }}}}\n{overlay()}{{{{- end }}}}\n{{{{- include "overlay" .Values.pod }}}}\n'
    (folder / "templates" / "overlay.yaml").write_text(text, encoding="utf-8")
    (made,) = Chart.load(folder).render({"pod": pod}).values()
    spec: Object = yaml.safe_load(made)["spec"]
    return spec


def annotated(**said: str) -> Object:
    return {
        **POD,
        "ObjectMeta": {"Annotations": {f"sidecar.infra.ai/{key.replace('_', '-')}": said[key] for key in said}},
    }


def test_the_template_adds_the_block(tmp_path: Path) -> None:
    sidecar = Sidecar()
    assert rendered(tmp_path, POD) == {
        "terminationGracePeriodSeconds": sidecar.grace_s,
        "initContainers": [container(sidecar)],
        "containers": [
            {"name": "vllm", "volumeMounts": [engine_mount()], "lifecycle": {"preStop": engine_pre_stop(sidecar)}}
        ],
        "volumes": volumes(sidecar),
    }


def test_annotations_say_what_they_say_to_the_command(tmp_path: Path) -> None:
    said = {
        "image": "r/x:2",
        "policy": "chat",
        "drain_seconds": "60",
        "engine_port": "8100",
        "engine_container": "other",
    }
    needs = {"cpu": "2", "cpu_limit": "4", "memory": "1Gi", "memory_limit": "2Gi"}
    spec = rendered(tmp_path, annotated(**said, **needs))
    sidecar = Sidecar(
        image="r/x:2", policy="chat", upstream="http://127.0.0.1:8100", drain_s=60, resources=Resources(**needs)
    )
    assert spec["initContainers"] == [container(sidecar)]
    assert spec["volumes"] == volumes(sidecar)
    assert spec["containers"][0]["name"] == "other"
    assert spec["containers"][0]["lifecycle"] == {"preStop": engine_pre_stop(sidecar)}
    assert spec["terminationGracePeriodSeconds"] == 100


def test_other_engines_are_the_policy_s(tmp_path: Path) -> None:
    spec = rendered(tmp_path, annotated(engine="triton"))
    sidecar = Sidecar(upstream="")
    assert spec["initContainers"] == [container(sidecar)]
    assert spec["volumes"] == volumes(sidecar)


def test_a_hook_of_the_engine_s_own_and_a_longer_grace_stay(tmp_path: Path) -> None:
    hook: dict[str, Any] = {"PreStop": {"Sleep": {"Seconds": 5}}}
    own = {**POD["Spec"], "TerminationGracePeriodSeconds": 3600, "Containers": [{"Name": "vllm", "Lifecycle": hook}]}
    spec = rendered(tmp_path, {**POD, "Spec": own})
    assert "lifecycle" not in spec["containers"][0] and "terminationGracePeriodSeconds" not in spec


def test_a_mistake_would_be_seen(tmp_path: Path) -> None:
    with pytest.raises(HelmRenderError):
        rendered(tmp_path, {**POD, "Spec": {"Containers": []}})
