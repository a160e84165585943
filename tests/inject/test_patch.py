"""A patch leads to what it was made for, by the shortest way that names allow."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.inject.patch import align, equal, identity, json_patch, keyed
from tests.inject.applying import applied

NAMED = st.fixed_dictionaries({"name": st.sampled_from("abcd")}, optional={"v": st.integers(0, 2)})
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(0, 3), st.sampled_from(["a", "~/", ""]), NAMED),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.sampled_from("ab/~"), inner, max_size=3)),
    max_leaves=12,
)


@given(VALUES, VALUES)
def test_a_patch_leads_from_one_to_the_other(before: Any, after: Any) -> None:
    assert equal(applied(before, json_patch(before, after)), after)


@given(VALUES)
def test_what_is_the_same_needs_none(value: Any) -> None:
    assert json_patch(value, value) == []


def test_what_is_put_before_others_changes_none_of_them() -> None:
    before = {"containers": [{"name": "a", "image": "1"}, {"name": "b"}]}
    after = {"containers": [{"name": "new"}, {"name": "a", "image": "2"}, {"name": "b"}]}
    assert json_patch(before, after) == [
        {"op": "add", "path": "/containers/0", "value": {"name": "new"}},
        {"op": "replace", "path": "/containers/1/image", "value": "2"},
    ]


def test_what_is_added_at_the_end_is_added_to_no_matter_how_many_equal_ones() -> None:
    before = ["a"] * 100_000
    assert json_patch(before, [*before, "b"]) == [{"op": "add", "path": "/100000", "value": "b"}]


@pytest.mark.timeout(20)
def test_what_is_put_before_any_number_of_the_same_name_costs_no_time() -> None:
    before = [{"name": "a", "n": n} for n in range(20_000)]
    assert json_patch(before, [{"name": "b"}, *before]) == [{"op": "add", "path": "/0", "value": {"name": "b"}}]


@pytest.mark.timeout(20)
def test_lists_that_are_too_long_to_compare_are_replaced() -> None:
    before, after = [*["a", "b"] * 2000, "z"], [*["b", "a"] * 2000, "z"]
    assert applied(before, json_patch(before, after)) == after


def test_keys_with_slashes_are_escaped() -> None:
    assert json_patch({}, {"a/b~": 1}) == [{"op": "add", "path": "/a~1b~0", "value": 1}]


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        ({"name": "a", "mountPath": "/m"}, "/m"),
        ({"name": "a", "containerPort": 80}, 80),
        ({"name": "a"}, "a"),
        ({"name": True}, None),
        ({"key": "a"}, None),
        ("a", None),
    ],
)
def test_entries_are_known_by_what_the_api_merges_them_by(entry: Any, name: Any) -> None:
    assert identity(entry) == name


def test_a_list_is_keyed_if_each_has_a_name_of_its_own() -> None:
    assert keyed([{"name": "a"}, {"name": "b"}]) and keyed([])
    assert not keyed([{"name": "a"}, {"name": "a"}]) and not keyed(["a"])


def test_objects_without_names_that_changed_are_the_same_ones() -> None:
    assert align([{"kind": "A", "n": 1}, {"kind": "B"}], [{"kind": "A", "n": 2}, {"kind": "B"}]) == [(0, 0), (1, 1)]
    assert align(["a"], ["b"]) == [(0, -1), (-1, 0)]


def test_one_is_neither_true_nor_a_half_more() -> None:
    assert not equal(1, True) and not equal({"a": 1}, {"a": 1.0}) and equal({"a": 1, "b": 2}, {"b": 2, "a": 1})
