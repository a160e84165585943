"""The second look at JSON, which takes what Python writes."""

import msgspec
import pytest

from sidecar.wire.lenient import SECOND_LOOK_BYTES, SECOND_LOOK_VALUES, python_json, read_as


class Shape(msgspec.Struct, rename={"kind": "object"}):
    number: float | None = None
    kind: msgspec.Raw = msgspec.Raw()


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b'\xef\xbb\xbf{"a":1}', {"a": 1}),
        ('{"a":"ö"}'.encode("utf-16"), {"a": "ö"}),
        (b"[NaN,Infinity,-Infinity]", [None, None, None]),
        (b'"\\ud83d"', "\ud83d"),
    ],
    ids=["bom", "utf-16", "nan", "lone surrogate"],
)
def test_pythons_json_is_read(data: bytes, value: object) -> None:
    assert python_json(data) == value


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"{'a':1}", b"[1,]", b"9" * 10_000])
def test_what_python_does_not_read_either_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        python_json(data)


def test_a_second_look_is_bounded() -> None:
    assert python_json(b" " * (SECOND_LOOK_BYTES - 2) + b"{}") == {}
    with pytest.raises(ValueError, match="too much"):
        python_json(b" " * (SECOND_LOOK_BYTES - 1) + b"{}")
    assert python_json(b"[" + b"1," * (SECOND_LOOK_VALUES - 1) + b"1]") == [1] * SECOND_LOOK_VALUES
    for value in (b"1,", b"[],", b"{},"):
        with pytest.raises(ValueError, match="too much"):
            python_json(b"[" + value * SECOND_LOOK_VALUES + b"1]")


def test_a_shape_is_filled_with_its_raw_members() -> None:
    shape = read_as(b'{"number":NaN,"object":["\\ud83d",1.0],"more":7}', Shape)
    assert shape.number is None
    assert bytes(shape.kind) == b'["\\ud83d", 1.0]'


@pytest.mark.parametrize("data", [b"[]", b"7", b'{"number":"x"}'])
def test_another_shape_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        read_as(data, Shape)
