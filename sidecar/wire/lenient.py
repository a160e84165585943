"""JSON as Python reads it, for what the fast decoder refuses.

Python's engines write and read more than JSON: a BOM, UTF-16, NaN and Infinity, lone halves of a surrogate pair (a
client or a token cut an emoji in two). A sidecar that is stricter than both its peers breaks what works, so whatever
fails to decode is looked at once more, this way: slow, rare, and never for bytes that are good.
"""

import json
from typing import TypeVar

import msgspec

SECOND_LOOK_BYTES = 4 * 1024 * 1024
SECOND_LOOK_VALUES = 100_000
"""The most that is read this way, in bytes and in commas and brackets: some 20 ms of the loop's time at worst.

Every value is built, and values are what costs: without a bound one NaN at the end of a large body buys a client a
second. More than that stays refused; a prompt of prose keeps far below it (a comma in fifty characters).
"""

_Shape = TypeVar("_Shape", bound=msgspec.Struct)


def python_json(data: bytes) -> object:
    """Any JSON value; NaN and Infinity read as null.

    Raises ValueError or RecursionError on what is none even so, and ValueError on more than a second look is worth.
    """
    if len(data) > SECOND_LOOK_BYTES or data.count(b",") + data.count(b"[") + data.count(b"{") > SECOND_LOOK_VALUES:
        raise ValueError("too much for a second look")
    return json.loads(data, parse_constant=_null)


def read_as(data: bytes, shape: type[_Shape]) -> _Shape:
    """As `python_json`, then converted to `shape`; raises `msgspec.ValidationError` too (a ValueError).

    Members that `shape` keeps raw are written out anew: their size is near, not equal, to what was sent.
    """
    parsed = python_json(data)
    if isinstance(parsed, dict):
        for field in msgspec.structs.fields(shape):
            if field.type is msgspec.Raw and field.encode_name in parsed:
                parsed[field.encode_name] = msgspec.Raw(json.dumps(parsed[field.encode_name]).encode())
    return msgspec.convert(parsed, shape)


def _null(_: str) -> None:
    return None
