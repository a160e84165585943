"""Where pods are in the objects that people write: the kinds of Kubernetes that have one, and lists of them.

A Job's pods get a sidecar as any others: as a native sidecar it does not keep a Job from ending.
"""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from sidecar.inject.container import Object
from sidecar.inject.patch import Step

TEMPLATES: Final[dict[tuple[str, str], tuple[str, ...]]] = {
    ("v1", "Pod"): (),
    ("v1", "PodTemplate"): ("template",),
    ("v1", "ReplicationController"): ("spec", "template"),
    ("apps/v1", "Deployment"): ("spec", "template"),
    ("apps/v1", "StatefulSet"): ("spec", "template"),
    ("apps/v1", "DaemonSet"): ("spec", "template"),
    ("apps/v1", "ReplicaSet"): ("spec", "template"),
    ("batch/v1", "Job"): ("spec", "template"),
    ("batch/v1", "CronJob"): ("spec", "jobTemplate", "spec", "template"),
}


class Workload(msgspec.Struct, frozen=True):
    """An object with a pod in it: `Deployment/vllm`, where it is, and where its pod is from there."""

    title: str
    at: tuple[Step, ...]
    template: tuple[str, ...]
    pod: Any


def workloads(value: Any, at: tuple[Step, ...] = ()) -> Iterator[Workload]:
    """Those in a document; those of a `List` one by one. What is no pod, or has none, is passed over."""
    if not isinstance(value, dict):
        return
    version, kind = value.get("apiVersion"), value.get("kind")
    if (version, kind) == ("v1", "List"):
        items = value.get("items")
        for index, each in enumerate(items if isinstance(items, list) else ()):
            yield from workloads(each, (*at, "items", index))
        return
    template = TEMPLATES.get((version, kind)) if isinstance(version, str) and isinstance(kind, str) else None
    if template is not None:
        yield Workload(title(value), at, template, taken(value, template))


def title(value: Object) -> str:
    """`Service/vllm`."""
    metadata = value.get("metadata")
    name = metadata.get("name") or metadata.get("generateName") if isinstance(metadata, dict) else None
    return f"{value.get('kind')}/{name}" if isinstance(name, str) else str(value.get("kind"))


def taken(value: Any, path: tuple[Step, ...]) -> Any:
    """What is at a path of keys and indexes; None where nothing is."""
    for step in path:
        if isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int) and 0 <= step < len(value):
            value = value[step]
        else:
            return None
    return value


def put(value: Any, path: tuple[Step, ...], part: Any) -> Any:
    """`value` with `part` at a path that is there."""
    if not path:
        return part
    step, *rest = path
    if isinstance(value, list):
        assert isinstance(step, int)
        return [put(each, tuple(rest), part) if index == step else each for index, each in enumerate(value)]
    return {key: put(each, tuple(rest), part) if key == step else each for key, each in value.items()}


def dotted(path: tuple[Step, ...]) -> str:
    """A path as people write it: `items[2].spec.template`."""
    words = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return words.removeprefix(".")
