"""What an engine is told of how to choose: numbers and stop strings, in range or refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.adapters.ask import Body, read_body
from sidecar.adapters.sampling import numbers_of, stops_of
from sidecar.kernel.errors import Reason, SidecarError
from tests.adapters.answers import asked

GOOD: dict[str, dict[str, object]] = {
    "nothing named": {},
    "the least": {
        "temperature": 0,
        "top_p": 0.0001,
        "top_k": -1,
        "min_p": 0,
        "seed": -(2**63),
        "presence_penalty": -2,
        "frequency_penalty": -2,
        "repetition_penalty": 0.1,
        "min_tokens": 0,
    },
    "the most": {
        "temperature": 2.0,
        "top_p": 1,
        "top_k": 2**31 - 1,
        "min_p": 1,
        "seed": 2**63 - 1,
        "presence_penalty": 2,
        "frequency_penalty": 2.0,
        "repetition_penalty": 2,
        "min_tokens": 2**31 - 1,
    },
}


@pytest.mark.parametrize("body", GOOD.values(), ids=GOOD.keys())
def test_numbers_in_range_are_told(body: dict[str, object]) -> None:
    numbers = numbers_of(asked(body=read_body(json.dumps(body).encode())))
    assert numbers == body
    for name in ("top_k", "seed", "min_tokens"):
        assert isinstance(numbers.get(name, 0), int)


def test_numbers_are_read_as_engines_read_them() -> None:
    body = Body(temperature="0.5", top_k="5", seed=7.0, min_tokens="3", top_p=None)
    assert numbers_of(asked(body=body, max_tokens=9)) == {
        "temperature": 0.5,
        "top_k": 5,
        "seed": 7,
        "min_tokens": 3,
        "max_tokens": 9,
    }


BAD: dict[str, tuple[dict[str, object], str]] = {
    "below": ({"temperature": -0.1}, "temperature: -0.1 is out of range, from 0 to 1,000,000"),
    "none of it": ({"top_p": 0}, "top_p: 0.0 is out of range, above 0 to 1"),
    "above": ({"top_p": 1.1}, "top_p: 1.1 is out of range, above 0 to 1"),
    "no repetition": ({"repetition_penalty": 0}, "repetition_penalty: 0.0 is out of range, above 0 to 1,000,000"),
    "penalty": ({"presence_penalty": 2.5}, "presence_penalty: 2.5 is out of range, from -2 to 2"),
    "top_k": ({"top_k": -2}, "top_k: -2 is out of range, from -1 to 2,147,483,647"),
    "a half": ({"top_k": 1.5}, "top_k: expected an integer"),
    "a text": ({"temperature": "warm"}, "temperature: expected a number"),
    "no integer": ({"seed": "1.5"}, "seed: expected a number"),
    "more than a float": ({"temperature": "1e999"}, "temperature: inf is out of range, from 0 to 1,000,000"),
    "not a number": ({"temperature": "nan"}, "temperature: nan is out of range, from 0 to 1,000,000"),
    "more than an integer": ({"seed": 2**63}, "seed: 9223372036854775808 is out of range, "),
    "fewer than none": ({"min_tokens": -1}, "min_tokens: -1 is out of range, from 0 to 2,147,483,647"),
}


@pytest.mark.parametrize(("body", "detail"), BAD.values(), ids=BAD.keys())
def test_a_number_out_of_range_is_the_clients_fault(body: dict[str, object], detail: str) -> None:
    with pytest.raises(SidecarError) as refused:
        numbers_of(asked(body=read_body(json.dumps(body).encode())))
    assert refused.value.reason is Reason.BAD_REQUEST
    assert refused.value.detail.startswith(detail)


@pytest.mark.parametrize("max_tokens", [0, -1, 2**31])
def test_a_ceiling_is_a_positive_number(max_tokens: int) -> None:
    with pytest.raises(SidecarError, match="max_tokens: "):
        numbers_of(asked(max_tokens=max_tokens))


@given(
    st.dictionaries(
        st.sampled_from(["temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "min_tokens"]),
        st.one_of(st.integers(), st.floats(), st.text(max_size=5), st.integers().map(str), st.floats().map(str)),
    )
)
def test_whatever_is_named_is_told_or_refused_by_its_name(body: dict[str, int | float | str]) -> None:
    try:
        numbers = numbers_of(asked(body=Body(**body)))  # type: ignore[arg-type]
    except SidecarError as refused:
        assert refused.detail.partition(":")[0] in body
    else:
        assert set(numbers) == set(body)


STOPS: dict[str, tuple[str | list[str] | None, list[str]]] = {
    "none": (None, []),
    "one": ("\n", ["\n"]),
    "several": (["a", "b"], ["a", "b"]),
    "no one": ([], []),
}


@pytest.mark.parametrize(("stop", "expected"), STOPS.values(), ids=STOPS.keys())
def test_stop_strings_are_a_list(stop: str | list[str] | None, expected: list[str]) -> None:
    assert stops_of(asked(body=Body(stop=stop))) == expected


@pytest.mark.parametrize("stop", ["", ["a", ""]])
def test_an_empty_stop_string_stops_nothing_and_is_refused(stop: str | list[str]) -> None:
    with pytest.raises(SidecarError, match="stop: "):
        stops_of(asked(body=Body(stop=stop)))
