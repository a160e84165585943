"""What the annotation remembers is all that there is to undo."""

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.inject.names import STATUS
from sidecar.inject.patch import equal
from sidecar.inject.status import (
    MOST_CHANGES,
    MOST_CHARACTERS,
    Status,
    Text,
    Undo,
    digest,
    encode,
    read,
    remember,
    undone,
    with_texts,
)

LEAVES = st.one_of(st.none(), st.integers(0, 3), st.sampled_from(["a", "b"]))
NAMED = st.lists(
    st.fixed_dictionaries({"name": st.sampled_from("abcd")}, optional={"v": LEAVES}),
    unique_by=lambda each: each["name"],
)
VALUES = st.recursive(
    st.one_of(LEAVES, NAMED, st.lists(st.sampled_from("xy"), max_size=3)),
    lambda inner: st.dictionaries(st.sampled_from("pqrs"), inner, max_size=3),
    max_leaves=10,
)


def remembered(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return remember(before, {**after, "metadata": {"annotations": {STATUS: ""}}}, "1")


def restored(pod: dict[str, Any]) -> dict[str, Any]:
    status = read(pod)
    assert status is not None
    tree, kept = undone(pod, status)
    assert kept == ()
    return tree


@given(VALUES, VALUES)
def test_any_change_is_undone(before: Any, after: Any) -> None:
    first = {"spec": before}
    made = remembered(first, {"spec": after})
    untouched = deepcopy(made)
    assert equal(restored(made), first)
    assert made == untouched, "who asks for what was keeps what is"


@given(st.dictionaries(st.sampled_from("pqrst"), LEAVES), st.dictionaries(st.sampled_from("pqrst"), LEAVES))
def test_keys_come_back_in_their_order(before: dict[str, Any], after: dict[str, Any]) -> None:
    after = {**{key: value for key, value in before.items() if key in after}, **after}
    back = restored(remembered({"spec": before}, {"spec": after}))["spec"]
    assert list(back) == list(before)


BEFORE = {"spec": {"grace": 30, "args": ["a"], "list": [{"name": "a"}], "probe": {"get": 1, "every": 5}}}
AFTER = {
    "spec": {
        "grace": 640,
        "args": ["a", "--host", "x"],
        "list": [{"name": "ours"}, {"name": "a"}],
        "probe": {"exec": {"command": ["x"]}, "every": 5},
        "made": {"hook": 1},
    }
}


@pytest.mark.parametrize(
    ("change", "path", "left"),
    [
        ({"grace": 700}, ("spec", "grace"), {"grace": 700}),
        ({"args": ["a", "--host", "x", "b"]}, ("spec", "args"), {"args": ["a", "--host", "x", "b"]}),
    ],
)
def test_what_was_changed_since_stays_and_is_named(change: Any, path: Any, left: Any) -> None:
    made = remembered(BEFORE, AFTER)
    made["spec"] = {**made["spec"], **change}
    status = read(made)
    assert status is not None
    tree, kept = undone(made, status)
    assert kept == (path,)
    assert tree["spec"] == {**BEFORE["spec"], **left}


@pytest.mark.parametrize(
    ("change", "left"),
    [
        ({"list": [{"name": "ours", "v": 1}, {"name": "b"}]}, {"list": [{"name": "b"}]}),
        ({"made": {"hook": 2, "theirs": 1}}, {"made": {"theirs": 1}}),
        ({"list": [{"name": "a"}]}, {}),
        ({"probe": {"get": 2, "exec": {"command": ["y"]}}}, {"probe": {"get": 2}}),
    ],
)
def test_what_is_ours_goes_and_what_came_since_stays(change: Any, left: Any) -> None:
    made = remembered(BEFORE, AFTER)
    made["spec"] = {**made["spec"], **change}
    assert restored(made)["spec"] == {**BEFORE["spec"], **left}


def test_a_pod_that_lost_what_was_changed_is_no_error() -> None:
    made = remembered(BEFORE, AFTER)
    made["spec"] = {}
    assert restored(made) == {"spec": {}}
    made["spec"] = {"list": 1, "probe": []}
    assert restored(made)["spec"] == {"list": 1, "probe": []}


def test_texts_are_kept_beside() -> None:
    made = with_texts(remembered(BEFORE, AFTER), (Text(("spec", "grace"), "grace:   30"),))
    status = read(made)
    assert status is not None and status.texts[0].text == "grace:   30"
    assert restored(made) == BEFORE


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"version":1}', '{"version":"1","undo":[{"at":"spec"}]}', '{"version":"1","undo":[{"at":[]}]}'],
)
def test_what_somebody_else_wrote_there_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="is not what `sidecar inject` writes"):
        read({"metadata": {"annotations": {STATUS: text}}})


@pytest.mark.parametrize(
    "status",
    [
        Status("1", (Undo(("spec", "x")),) * (MOST_CHANGES + 1)),
        Status("1", (Undo(("spec", "x"), of=("a",) * (MOST_CHANGES + 1)),)),
        Status("1", (Undo(("x",) * 33),)),
        Status("1", texts=(Text(("x",), "y" * MOST_CHARACTERS),)),
    ],
    ids=["changes", "names", "deep", "long"],
)
def test_more_than_an_injection_does_is_not_read(status: Status) -> None:
    with pytest.raises(ValueError, match=r"is longer than|is not what"):
        read({"metadata": {"annotations": {STATUS: encode(status)}}})


def test_there_may_be_none() -> None:
    assert read({}) is None and read({"metadata": {"annotations": None}}) is None
    assert encode(Status("1")) == '{"version":"1"}'
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 1})
