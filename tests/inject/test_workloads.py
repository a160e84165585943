"""Where pods are."""

from typing import Any

import pytest

from sidecar.inject.workloads import TEMPLATES, dotted, put, strangers, taken, title, workloads

POD: dict[str, Any] = {"spec": {"containers": []}}


PLACES = [(kind, path) for kind, paths in TEMPLATES.items() for path in paths]


def _object(kind: tuple[str, str], *paths: tuple[str, ...]) -> dict[str, Any]:
    value: dict[str, Any] = {"apiVersion": kind[0], "kind": kind[1], "metadata": {"name": "x"}}
    for path in paths:
        inner = value
        for step in path[:-1]:
            inner = inner.setdefault(step, {})
        if path:
            inner[path[-1]] = dict(POD)
        else:
            value |= POD
    return value


@pytest.mark.parametrize(("kind", "path"), PLACES, ids=[f"{kind[1]}-{path[-1:]}" for kind, path in PLACES])
def test_each_kind_has_its_pod(kind: tuple[str, str], path: tuple[str, ...]) -> None:
    value = _object(kind, path)
    (found,) = workloads(value)
    assert (found.title, found.at, found.template) == (f"{kind[1]}/x", (), path)
    assert found.pod == (taken(value, path)) and found.pod["spec"] == POD["spec"]
    assert taken(put(value, path, 1), path) == 1
    assert list(strangers(value)) == []


def test_of_a_group_it_is_the_leader_that_answers() -> None:
    kind = ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
    (found,) = workloads(_object(kind, *TEMPLATES[kind]))
    assert found.template[-1] == "leaderTemplate"


def test_a_rollout_of_another_object_s_pod_has_none() -> None:
    rollout = _object(("argoproj.io/v1alpha1", "Rollout"))
    assert list(workloads({**rollout, "spec": {"workloadRef": {"kind": "Deployment", "name": "x"}}})) == []


SERVED = {"predictor": {"containers": [{"name": "kserve-container", "image": "vllm/vllm-openai:v1"}]}}


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"apiVersion": "serving.kserve.io/v1beta1", "kind": "InferenceService", "spec": SERVED}, 1),
        ({"apiVersion": "apps/v1beta9", "kind": "Deployment", "spec": SERVED}, 1),
        ({"apiVersion": "v1", "kind": "List", "items": [{"apiVersion": "a/v1", "kind": "B", "spec": [SERVED]}]}, 1),
        ({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "spec": SERVED}, 0),
        ({"apiVersion": "v1", "kind": "ConfigMap", "data": {"containers": "x"}}, 0),
        ({"apiVersion": "a/v1", "kind": "B", "spec": {"containers": ["main"]}}, 0),
        (None, 0),
    ],
)
def test_what_has_containers_and_is_of_no_known_kind_is_told(value: Any, told: int) -> None:
    assert len(list(strangers(value))) == told
    assert list(workloads(value)) == []


def test_a_list_of_one_kind_names_it_for_all() -> None:
    found = list(workloads({"apiVersion": "v1", "kind": "PodList", "items": [dict(POD), "x"]}))
    assert [(each.title, each.at) for each in found] == [("Pod", ("items", 0))]


def test_those_of_lists_are_found_one_by_one() -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", **POD}
    inner = {"apiVersion": "v1", "kind": "List", "items": [{"kind": "Service"}, pod]}
    found = list(workloads({"apiVersion": "v1", "kind": "List", "items": [pod, inner]}))
    assert [each.at for each in found] == [("items", 0), ("items", 1, "items", 1)]
    assert dotted(found[1].at) == "items[1].items[1]"


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        "Pod",
        {"kind": "Pod"},
        {"apiVersion": "v1", "kind": ["Pod"]},
        {"apiVersion": "example.com/v1", "kind": "Deployment", "spec": {"template": POD}},
        {"apiVersion": "v1", "kind": "List", "items": {"kind": "Pod"}},
    ],
)
def test_what_is_no_pod_is_passed_over(value: Any) -> None:
    assert list(workloads(value)) == []


def test_titles_say_what_there_is_to_say() -> None:
    assert title({"kind": "Pod", "metadata": {"generateName": "a-"}}) == "Pod/a-"
    assert title({"kind": "Pod", "metadata": []}) == title({"kind": "Pod", "metadata": {"name": 1}}) == "Pod"
