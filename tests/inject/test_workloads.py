"""Where pods are."""

from typing import Any

import pytest

from sidecar.inject.workloads import TEMPLATES, dotted, put, taken, title, workloads

POD: dict[str, Any] = {"spec": {"containers": []}}


@pytest.mark.parametrize(("kind", "path"), TEMPLATES.items(), ids=lambda each: "/".join(each))
def test_each_kind_has_its_pod(kind: tuple[str, str], path: tuple[str, ...]) -> None:
    value: Any = {} if path else dict(POD)
    inner = value
    for step in path:
        inner[step] = dict(POD) if step == path[-1] else {}
        inner = inner[step]
    value = {"apiVersion": kind[0], "kind": kind[1], "metadata": {"name": "x"}, **value}
    (found,) = workloads(value)
    assert (found.title, found.at, found.template) == (f"{kind[1]}/x", (), path)
    assert found.pod == (taken(value, path)) and found.pod["spec"] == POD["spec"]
    assert taken(put(value, path, 1), path) == 1


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
