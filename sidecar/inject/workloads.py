"""Where pods are in the objects that people write: the kinds of Kubernetes that have one, and lists of them.

1. A Job's pods get a sidecar as any others: as a native sidecar it does not keep a Job from ending.
2. Kinds of others' are here where their pod is a template as Kubernetes has it, and theirs to make: of a group that
   answers as one (LeaderWorkerSet) the leader's. What makes pods of something else, and merges into them what it likes
   (KServe, Ray), is told and left: the webhook sees its pods as they are made.
"""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from sidecar.inject.container import Object
from sidecar.inject.patch import Step

_USUAL: Final = (("spec", "template"),)
_LEADER: Final = ("spec", "leaderWorkerTemplate", "leaderTemplate")
_WORKER: Final = ("spec", "leaderWorkerTemplate", "workerTemplate")

TEMPLATES: Final[dict[tuple[str, str], tuple[tuple[str, ...], ...]]] = {
    ("v1", "Pod"): ((),),
    ("v1", "PodTemplate"): (("template",),),
    ("v1", "ReplicationController"): _USUAL,
    ("apps/v1", "Deployment"): _USUAL,
    ("apps/v1", "StatefulSet"): _USUAL,
    ("apps/v1", "DaemonSet"): _USUAL,
    ("apps/v1", "ReplicaSet"): _USUAL,
    ("batch/v1", "Job"): _USUAL,
    ("batch/v1", "CronJob"): (("spec", "jobTemplate", "spec", "template"),),
    ("argoproj.io/v1alpha1", "Rollout"): _USUAL,
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): (_LEADER, _WORKER),
}
"""Where a kind's pod is; of several places the first that is there."""


class Workload(msgspec.Struct, frozen=True):
    """An object with a pod in it: `Deployment/vllm`, where it is, and where its pod is from there."""

    title: str
    at: tuple[Step, ...]
    template: tuple[str, ...]
    pod: Any


def objects(value: Any, at: tuple[Step, ...] = ()) -> Iterator[tuple[Object, tuple[Step, ...]]]:
    """The objects of a document, and where they are: itself, or those of a list, which may leave their kind to it."""
    if not isinstance(value, dict):
        return
    kind, items = value.get("kind"), value.get("items")
    if not (isinstance(kind, str) and kind.endswith("List") and isinstance(items, list)):
        yield value, at
        return
    named = {} if kind == "List" else {"apiVersion": value.get("apiVersion"), "kind": kind.removesuffix("List")}
    for index, each in enumerate(items):
        yield from objects({**named, **each} if isinstance(each, dict) else each, (*at, "items", index))


def workloads(value: Any) -> Iterator[Workload]:
    """Those in a document; those of a list one by one. What is no pod, or has none, is passed over."""
    for each, at in objects(value):
        places = _places(each)
        if places:
            template = next((place for place in places if taken(each, place) is not None), places[0])
            yield Workload(title(each), at, template, taken(value, (*at, *template)))


def strangers(value: Any) -> Iterator[tuple[str, tuple[Step, ...]]]:
    """Objects of kinds that are not known here and have containers: what they are called, and where they are."""
    for each, at in objects(value):
        if not _places(each) and each.get("kind") not in _NO_PODS and _has_containers(each):
            yield title(each), at


_NO_PODS: Final = frozenset({"CustomResourceDefinition", "ValidatingAdmissionPolicy"})


def _places(value: Object) -> tuple[tuple[str, ...], ...]:
    version, kind = value.get("apiVersion"), value.get("kind")
    if not isinstance(version, str) or not isinstance(kind, str):
        return ()
    if taken(value, ("spec", "workloadRef")) is not None:
        return ()  # a Rollout whose pod is another object's
    return TEMPLATES.get((version, kind), ())


def _has_containers(value: Any) -> bool:
    """Whether there is a list of containers, with images, anywhere."""
    if isinstance(value, list):
        return any(map(_has_containers, value))
    if not isinstance(value, dict):
        return False
    listed = value.get("containers")
    if isinstance(listed, list) and any(isinstance(each, dict) and "image" in each for each in listed):
        return True
    return any(map(_has_containers, value.values()))


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
