import json
import re
from typing import Any

import pytest
from msgspec import inspect

from sidecar.policy.document import documents
from sidecar.policy.errors import Faults, PolicyError, path_of
from sidecar.policy.load import PolicyErrors, load
from sidecar.policy.read import BAD, Reader, line_of
from sidecar.policy.schema import Deadlines, Endpoint, Seconds, Service
from tests.policy.build import faults_of
from tests.policy.fields import Place, durations, numbers, places

NUMBERS = pytest.mark.parametrize("place", [pytest.param(place, id=place.id) for place in numbers()])
DURATIONS = pytest.mark.parametrize("place", [pytest.param(place, id=place.id) for place in durations()])
EVERYWHERE = pytest.mark.parametrize("place", [pytest.param(place, id=place.id) for place in places()])


def at(place: Place, value: Any) -> list[str]:
    """The messages of faults at the place itself: rules between fields may have theirs elsewhere."""
    return [message for path, message in faults_of(place.write(value)) if path == path_of(place.path)]


def bounds(place: Place) -> tuple[float, float]:
    kind = place.kind
    assert isinstance(kind, inspect.IntType | inspect.FloatType)
    assert kind.ge is not None, "every number has a lower bound"
    assert kind.le is not None, "every number has an upper bound"
    return kind.ge, kind.le


def test_there_are_as_many_numbers_and_durations_as_the_policy_contract_has() -> None:
    assert len(numbers()) > 25
    assert len(durations()) > 20


@NUMBERS
def test_a_number_is_good_up_to_both_bounds_and_no_further(place: Place) -> None:
    low, high = bounds(place)
    step = 1 if isinstance(place.kind, inspect.IntType) else 1e-9 * max(1.0, high)
    between_fields = ("all parts are 0", "is below min", "is above max", "needs a version beside")
    for good in (low, high):
        assert [m for m in at(place, good) if not any(words in m for words in between_fields)] == []
    for wrong in (low - step, high + step):
        (message,) = at(place, wrong)
        assert "out of range" in message


@NUMBERS
@pytest.mark.parametrize("wrong", [None, True, "5", "", [], {}, [1], "1:30", "1e-3", ".inf"], ids=repr)
def test_a_number_is_nothing_else(place: Place, wrong: Any) -> None:
    if wrong is None and place.nullable:
        return  # it may be left out
    (message,) = at(place, wrong)
    assert message.startswith(("expected a number", "expected a whole number"))


@NUMBERS
@pytest.mark.parametrize("literal", [".inf", "-.inf", ".nan", "1e999", "-1e999", "9" * 5000, "0x" + "f" * 5000])
def test_a_number_that_no_bound_catches_is_refused(place: Place, literal: str) -> None:
    text = json.dumps(place.write("@")).replace('"@"', literal)
    errors = _load_raw(text)
    assert [error.path for error in errors] == [path_of(place.path)]
    assert "out of range" in errors[0].message or "not a number to work with" in errors[0].message
    assert len(errors[0].message) < 200


@pytest.mark.parametrize(("literal", "value"), [("3", 3), ("3.0", 3), ("3e0", 3), ("+3", 3), ("0x3", 3), ("0o3", 3)])
def test_a_whole_number_may_be_written_as_yaml_writes_it(literal: str, value: int) -> None:
    faults = Faults()
    (tree,) = documents("a", f"{{name: s, retry: {{attempts: {literal}}}}}".encode(), faults)
    service = Reader("a", faults).struct(tree, Service)
    assert service.retry.attempts == value
    assert isinstance(service.retry.attempts, int)


@pytest.mark.parametrize("literal", ["3.5", "010", "1_0", "1:30", "yes", "", "~", "'3'", "three"])
def test_a_whole_number_is_nothing_that_yaml_1_1_makes_of_it(literal: str) -> None:
    (error,) = _load_raw(
        f"apiVersion: sidecar/v1\nkind: Policy\nservices: [{{name: s, retry: {{attempts: {literal}}}}}]"
    )
    assert "whole number" in error.message


@DURATIONS
def test_a_duration_is_text_with_a_unit_from_a_millisecond_to_an_hour(place: Place) -> None:
    if place.path[-1] in ("open", "retry_after_default"):
        good = ["1ms", "1s"]
    elif place.path[-1] in ("open_max", "retry_after_cap"):
        good = ["1h", "60m"]
    else:
        good = ["1ms", "1h", "1.5s"]
    for text in good:
        assert faults_of(place.write(text)) == []
    for wrong in ("0s", "1.001h", "61m", "3601s", "1:30", "10", "", "1m30s", "infs"):
        (message,) = at(place, wrong)
        assert "duration" in message


@DURATIONS
@pytest.mark.parametrize("wrong", [10, 1.5, 1e-3, 0, True, None, [], {}], ids=repr)
def test_a_duration_without_a_unit_is_refused_with_what_to_write(place: Place, wrong: Any) -> None:
    (message,) = at(place, wrong)
    is_number = isinstance(wrong, int | float) and not isinstance(wrong, bool)
    assert ("has no unit: write" if is_number else "expected a duration") in message


@EVERYWHERE
@pytest.mark.parametrize("wrong", [[["x"]], {"x": {"y": 1}}], ids=["list", "mapping"])
def test_a_value_of_another_shape_is_told_at_its_place(place: Place, wrong: Any) -> None:
    messages = [message for _, message in faults_of(place.write(wrong))]
    assert messages
    assert all("expected" in message or "unknown key" in message for message in messages)


@EVERYWHERE
def test_an_unknown_key_is_told_beside_every_field(place: Place) -> None:
    if isinstance(place.path[-1], int) or place.path[-2:-1] in (
        ("split",),
        ("labels",),
        ("annotations",),
        ("tenant_weights",),
    ):
        return  # items of lists, and mappings whose keys are the operator's own
    sibling = Place(place.document, (*place.path[:-1], place.path[-1] + "x"), place.kind)
    assert any("unknown key" in message for _, message in faults_of(sibling.write(1)))


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [("conecutive", "did you mean consecutive?"), ("openMax", "did you mean open_max?"), ("zzz", "known are mode")],
)
def test_an_unknown_key_comes_with_a_hint(wrong: str, hint: str) -> None:
    document = Place("Policy", ("services", 0, "breakers", "node", wrong), inspect.StrType()).write(1)
    document["services"][0]["name"] = "s"
    ((path, message),) = faults_of(document)
    assert path == f"$.services[0].breakers.node.{wrong}"
    assert hint in message


def test_everything_else_is_read_although_something_is_wrong() -> None:
    faults = Faults()
    text = (
        b"{name: s, nope: 1, deadlines: {connect: 5, head: 2s}, endpoints: [{url: 'http://a'}, {}, {url: 'http://b'}]}"
    )
    (tree,) = documents("a.yaml", text, faults)
    reader = Reader("a.yaml", faults)
    service = reader.struct(tree, Service)
    assert service.deadlines == Deadlines(head_s=Seconds(2))
    assert service.endpoints == (Endpoint(url="http://a"), Endpoint(url="http://b"))
    assert [error.path for error in faults.errors] == ["$.nope", "$.deadlines.connect", "$.endpoints[1].url"]
    assert reader.written(("endpoints", 1, "url")) == ("endpoints", 2, "url")


def test_a_struct_without_a_required_field_is_bad() -> None:
    faults = Faults()
    (tree,) = documents("a.yaml", b"\nengine: vllm", faults)
    assert Reader("a.yaml", faults).struct(tree, Endpoint) is BAD
    assert faults.errors == [PolicyError("a.yaml", 2, "$.url", "missing")]


def test_lines_are_found_by_path_and_end_at_the_last_thing_there() -> None:
    (tree,) = documents("a.yaml", b"a:\n  b:\n  - c: 1\n  -\n    d: 2\n", Faults())
    assert line_of(tree) == 1
    assert line_of(tree, "a", "b", 0, "c") == 3
    assert line_of(tree, "a", "b", 1, "d") == 5
    assert line_of(tree, "a", "b", 9, "d") == 2
    assert line_of(tree, "a", "x") == 1


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("services", 0, "name"), "a/b", "a/b.* is not letters and digits"),
        (("services", 0, "name"), "", "must not be empty"),
        (("services", 0, "name"), "a\n", "is not letters and digits"),
        (("services", 0, "name"), "x" * 64, "longer than 63"),
        (("services", 0, "name"), 5, "expected text, got 5: write '5' in quotes"),
        (("services", 0, "name"), None, "expected text, got nothing"),
        (("services", 0, "split", "a b"), 1, "is not letters and digits"),
        (("services", 0, "models"), ["a\x1b"], "is not text without control characters"),
        (("services", 0, "hedge", "mode"), False, "expected one of enforce, off, shadow, got false"),
        (("services", 0, "hedge", "mode"), "on", "expected one of enforce, off, shadow, got the text on"),
        (("services", 0, "balance", "local_first"), "yes", "expected true or false, got the text yes"),
        (("services", 0, "balance", "local_first"), 1, "expected true or false, got 1"),
        (("services", 0, "breakers", "request", "key"), "header:", 'is not "route" or "header:<name>"'),
        (("services", 0, "breakers", "request", "key"), "header:a b", 'is not "route" or "header:<name>"'),
        (("services", 0, "breakers", "request", "key"), "model", 'is not "route" or "header:<name>"'),
        (("services", 0, "models"), ["m"] * 1001, "1001 items; at most 1000"),
        (("services", 0, "split"), {f"v{n}": 1 for n in range(101)}, "101 keys; at most 100"),
        (("services", 0, "endpoints"), "http://a", 'expected a list, got the text "http://a"'),
        (("services", 0, "deadlines"), None, "expected a mapping, got nothing"),
    ],
)
def test_a_message_says_what_was_expected_and_what_came(path: tuple[str | int, ...], value: Any, words: str) -> None:
    document = Place("Policy", path, inspect.StrType()).write(value)
    document["services"][0].setdefault("name", "s")
    messages = [message for _, message in faults_of(document)]
    assert len(messages) == 1
    assert re.search(words, messages[0])


def _load_raw(text: str) -> list[PolicyError]:
    with pytest.raises(PolicyErrors) as caught:
        load([("a.yaml", text.encode())], 1)
    return list(caught.value.errors)


RETENTION = """apiVersion: sidecar/v1
kind: Policy
services:
  - {name: chat, endpoints: [{url: "http://10.0.0.1"}], shared: {retention: %s}}
"""


@pytest.mark.parametrize(("written", "seconds"), [("1m", 60.0), ("36h", 129_600.0), ("7d", 604_800.0)])
def test_a_retention_may_be_days(written: str, seconds: float) -> None:
    (service,) = load([("p.yaml", (RETENTION % written).encode())], 1).services
    assert service.shared.retention_s == seconds


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("30s", 'not a duration from "1m" to "7d"'),
        ("8d", 'not a duration from "1m" to "7d"'),
        ("60", 'write "60h" or "60m"'),
        ("true", 'such as "1h"'),
    ],
)
def test_a_retention_that_is_none_is_refused_in_words(written: str, words: str) -> None:
    with pytest.raises(PolicyErrors) as caught:
        load([("p.yaml", (RETENTION % written).encode())], 1)
    assert words in str(caught.value)
    assert "$.services[0].shared.retention" in str(caught.value)
