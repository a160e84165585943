"""Kubernetes objects as tests have them: read strictly from YAML, built by kustomize, walked with their paths.

1. A key that is there twice is an error: kubectl takes the last one, and the reader of a file may see the other.
2. Scalars are read as the API server reads them (YAML 1.1 with booleans), since that is who reads these files.
3. A fault is one line: `Kind/name: path: what is wrong`. No fault is an empty list.
"""

import functools
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
ISTIO = DEPLOY / "istio"

NO_KUBECTL = (
    "kubectl is not there, and `kubectl kustomize` builds the overlays: https://kubernetes.io/docs/tasks/tools/ says"
    " how to get it; any release from 1.30 on will do"
)


class _Loader(yaml.CSafeLoader):
    """CSafeLoader that refuses repeated keys."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> Object:
    seen: set[str] = set()
    for key, _ in node.value:
        name = str(loader.construct_object(key, deep=True))
        if name in seen:
            raise yaml.constructor.ConstructorError(None, None, f'"{name}" is there twice', key.start_mark)
        seen.add(name)
    return {str(key): held for key, held in loader.construct_mapping(node, deep=True).items()}


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read(text: str) -> list[Object]:
    """All objects of a text of several documents, in order; empty documents are none."""
    return [each for each in yaml.load_all(text, _Loader) if each is not None]


@functools.cache
def _built(folder: Path) -> str:
    kubectl = shutil.which("kubectl")
    assert kubectl, NO_KUBECTL
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"kubectl kustomize {folder}: {done.stderr}"
    assert not done.stderr, f"kubectl kustomize {folder} warns: {done.stderr}"
    return done.stdout


def kustomize(folder: Path) -> list[Object]:
    """What `kubectl kustomize` makes of a folder; a fresh copy each time. A warning of its is a failure."""
    return read(_built(folder))


def called(each: Object) -> str:
    """`Kind/name`, as faults begin."""
    return f"{each.get('kind')}/{each.get('metadata', {}).get('name')}"


def of_kind(objects: Iterable[Object], *kinds: str) -> list[Object]:
    """Those of some kinds, in order."""
    return [each for each in objects if each.get("kind") in kinds]


def one(objects: Iterable[Object], kind: str, name: str | None = None) -> Object:
    """The only one of a kind, or of a kind and name."""
    found = [each for each in of_kind(objects, kind) if name is None or each["metadata"]["name"] == name]
    assert len(found) == 1, f"{kind}/{name or '*'}: {len(found)} of them"
    return found[0]


WORKLOADS = ("Deployment", "DaemonSet", "StatefulSet", "Job", "Pod")


def pods(objects: Iterable[Object]) -> Iterator[tuple[Object, Object]]:
    """Each workload with its pod's template (of a Pod: itself)."""
    for each in of_kind(objects, *WORKLOADS):
        yield each, each if each["kind"] == "Pod" else each["spec"]["template"]


def containers(pod: Object) -> Iterator[tuple[str, Object]]:
    """Containers of a template with their paths: those that start first come first."""
    for key in ("initContainers", "containers"):
        for index, each in enumerate(pod["spec"].get(key) or []):
            yield f"spec.{key}[{index}]", each


def seconds(text: str) -> float:
    """Durations as Go and we write them (`600s`, `10m`, `1h`, `250ms`)."""
    units = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|s|m|h)", text)
    assert parts and "".join(n + u for n, u in parts) == text, f'"{text}" is no duration'
    return sum(float(number) * units[unit] for number, unit in parts)
