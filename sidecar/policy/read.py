"""Trees to structs, by the structs' own types: every fault is told, none stops the reading.

`msgspec.convert` stops at the first fault, and knows no lines. This reader walks the same type information, checks the
same bounds, and goes on with the default where a value was wrong, so that the rest is judged as well. What it builds
is of use only if it reported nothing.
"""

import difflib
import math
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import msgspec
from msgspec import inspect

from sidecar.policy.document import Mapping, Node, Scalar
from sidecar.policy.document import Sequence as ListNode
from sidecar.policy.duration import parse_long, parse_seconds, parse_span
from sidecar.policy.errors import Faults, PolicyError, Step, path_of, quote
from sidecar.policy.schema import LongSeconds, Seconds, Span

_DURATIONS: Final = {
    Seconds: (parse_seconds, "10s", "s", "ms"),
    LongSeconds: (parse_long, "1h", "h", "m"),
    Span: (parse_span, "90s", "s", "m"),
}
"""Each kind of duration: what reads it, how one looks, and two units for one that was written without."""


class Bad:
    """The type of BAD: no value could be read."""


BAD: Final = Bad()


class Reader:
    """Reads the tree of one document; `wrong` are the paths of the faults it told."""

    __slots__ = ("_dropped", "_faults", "_file", "wrong")

    def __init__(self, file: str, faults: Faults) -> None:
        self._file = file
        self._faults = faults
        self.wrong: set[str] = set()
        self._dropped: dict[str, list[int]] = {}

    def struct(self, node: Node, kind: type[msgspec.Struct], path: str = "$") -> Any:
        """An instance of `kind`, or BAD where a required field is missing or wrong."""
        values = self.fields(node, kind, path)
        required = (known.name for known in _struct_info(kind).values() if known.required)
        return kind(**values) if all(name in values for name in required) else BAD

    def fields(self, node: Node, kind: type[msgspec.Struct], path: str = "$") -> dict[str, Any]:
        """What could be read of `kind`'s fields, by their names in Python."""
        info = _struct_info(kind)
        ignored: frozenset[str] = getattr(kind, "ignored", frozenset())
        if not isinstance(node, Mapping):
            self._wrong(node, path, f"expected a mapping, got {_describe(node)}")
            return {}
        values: dict[str, Any] = {}
        for name, (key, child) in node.entries.items():
            known = info.get(name)
            if known is None and name in ignored:
                continue
            if known is None:
                self.error(key.line, f"{path}.{quote(name)}", _unknown(name, info))
                continue
            value = self._value(child, known.type, f"{path}.{name}")
            if value is not BAD:
                values[known.name] = value
        for name, known in info.items():
            if known.required and name not in node.entries:
                self.error(node.line, f"{path}.{name}", "missing")
        return values

    def written(self, steps: Sequence[Step]) -> tuple[Step, ...]:
        """`steps` into what was read as steps into what was written: items that were wrong are not among the read."""
        written: list[Step] = []
        for step in steps:
            kept = self._dropped.get(path_of(written)) if isinstance(step, int) else None
            written.append(kept[step] if kept is not None and isinstance(step, int) else step)
        return tuple(written)

    def error(self, line: int, path: str, message: str) -> None:
        """Report a fault at `path`."""
        self.wrong.add(path)
        self._faults.add(PolicyError(self._file, line, path, message))

    def _wrong(self, node: Node, path: str, message: str) -> Bad:
        self.error(node.line, path, message)
        return BAD

    def _value(self, node: Node, kind: inspect.Type, path: str, words: str = "") -> Any:
        """`words`: what the type is called in its annotation, for messages."""
        match kind:
            case inspect.Metadata(type=inner, extra_json_schema=extra):
                return self._value(node, inner, path, (extra or {}).get("description", ""))
            case inspect.CustomType(cls=cls) if cls in _DURATIONS:
                return self._seconds(node, cls, path)
            case inspect.StrType():
                return self._text(node, kind, path, words)
            case inspect.BoolType():
                return self._bool(node, path)
            case inspect.IntType() | inspect.FloatType():
                return self._number(node, kind, path)
            case inspect.LiteralType(values=values):
                return self._choice(node, values, path)
            case inspect.StructType(cls=cls):
                return self.struct(node, cls, path)
            case inspect.VarTupleType():
                return self._tuple(node, kind, path)
            case inspect.DictType():
                return self._dict(node, kind, path)
            case inspect.UnionType(types=types):
                if isinstance(node, Scalar) and node.kind == "null":
                    return None
                return self._value(node, _member(node, types), path)
            case _:
                raise TypeError(f"{path}: policies have no fields of type {kind}")

    def _seconds(self, node: Node, kind: type[Seconds], path: str) -> Any:
        parse, like, first, second = _DURATIONS[kind]
        if not isinstance(node, Scalar) or node.kind in ("null", "bool"):
            return self._wrong(node, path, f'expected a duration such as "{like}", got {_describe(node)}')
        if node.kind == "number":
            number = node.value[:40]
            return self._wrong(node, path, f'{number} has no unit: write "{number}{first}" or "{number}{second}"')
        try:
            return kind(parse(node.value))
        except ValueError as exc:
            return self._wrong(node, path, str(exc))

    def _text(self, node: Node, kind: inspect.StrType, path: str, words: str) -> Any:
        if not isinstance(node, Scalar):
            return self._wrong(node, path, f"expected text, got {_describe(node)}")
        if node.kind != "text":
            hint = "" if node.kind == "null" else f": write '{node.value[:40]}' in quotes"
            return self._wrong(node, path, f"expected text, got {_describe(node)}{hint}")
        return self._checked_text(node.value, kind, node.line, path, words)

    def _checked_text(self, value: str, kind: inspect.Type, line: int, path: str, words: str = "") -> Any:
        if isinstance(kind, inspect.Metadata):
            return self._checked_text(
                value, kind.type, line, path, (kind.extra_json_schema or {}).get("description", "")
            )
        if not isinstance(kind, inspect.StrType):
            return value
        if kind.min_length is not None and len(value) < kind.min_length:
            self.error(line, path, "must not be empty")
        elif kind.max_length is not None and len(value) > kind.max_length:
            self.error(line, path, f"longer than {kind.max_length} characters")
        elif kind.pattern is not None and _compiled(kind.pattern).fullmatch(value) is None:
            self.error(line, path, f"{quote(value)} is not {words or kind.pattern}")
        else:
            return value
        return BAD

    def _bool(self, node: Node, path: str) -> Any:
        if isinstance(node, Scalar) and node.kind == "bool":
            return node.value.lower() == "true"
        return self._wrong(node, path, f"expected true or false, got {_describe(node)}")

    def _number(self, node: Node, kind: inspect.IntType | inspect.FloatType, path: str) -> Any:
        whole = isinstance(kind, inspect.IntType)
        wanted = "a whole number" if whole else "a number"
        if not (isinstance(node, Scalar) and node.kind == "number"):
            return self._wrong(node, path, f"expected {wanted}, got {_describe(node)}")
        number = _number(node.value)
        if not math.isfinite(number):
            return self._wrong(node, path, f"{node.value[:40]} is not a number to work with")
        if whole and number != int(number):
            return self._wrong(node, path, f"expected a whole number, got {node.value[:40]}")
        low, high = kind.ge, kind.le
        if (low is not None and number < low) or (high is not None and number > high):
            return self._wrong(node, path, f"{node.value[:40]} is out of range {_plain(low)}-{_plain(high)}")
        return int(number) if whole else float(number)

    def _choice(self, node: Node, values: tuple[str | int | bool | None, ...], path: str) -> Any:
        if isinstance(node, Scalar) and node.kind == "text" and node.value in values:
            return node.value
        shown = ", ".join(sorted(str(value) or '""' for value in values))
        return self._wrong(node, path, f"expected {'one of ' if len(values) > 1 else ''}{shown}, got {_describe(node)}")

    def _tuple(self, node: Node, kind: inspect.VarTupleType, path: str) -> Any:
        if not isinstance(node, ListNode):
            return self._wrong(node, path, f"expected a list, got {_describe(node)}")
        if kind.max_length is not None and len(node.items) > kind.max_length:
            return self._wrong(node, path, f"{len(node.items)} items; at most {kind.max_length}")
        if kind.min_length is not None and len(node.items) < kind.min_length:
            return self._wrong(node, path, "must not be empty")
        values = [self._value(item, kind.item_type, f"{path}[{index}]") for index, item in enumerate(node.items)]
        kept = tuple(value for value in values if value is not BAD)
        if len(kept) < len(values):
            self._dropped[path] = [index for index, value in enumerate(values) if value is not BAD]
        return kept

    def _dict(self, node: Node, kind: inspect.DictType, path: str) -> Any:
        if not isinstance(node, Mapping):
            return self._wrong(node, path, f"expected a mapping, got {_describe(node)}")
        if kind.max_length is not None and len(node.entries) > kind.max_length:
            return self._wrong(node, path, f"{len(node.entries)} keys; at most {kind.max_length}")
        values: dict[str, Any] = {}
        for name, (key, child) in node.entries.items():
            place = f"{path}.{quote(name)}"
            value = self._value(child, kind.value_type, place)
            good = self._checked_text(name, kind.key_type, key.line, place) is not BAD
            if good and value is not BAD:
                values[name] = value
        return values


def line_of(node: Node, *steps: str | int) -> int:
    """The line of what `steps` lead to from `node`, or of the last thing on the way that is there."""
    line = node.line
    for step in steps:
        match node:
            case Mapping(entries=entries) if step in entries:
                key, node = entries[str(step)]
                line = key.line
            case ListNode(items=items) if isinstance(step, int) and step < len(items):
                node = items[step]
                line = node.line
            case _:
                return line
    return line


@cache
def _struct_info(kind: type[msgspec.Struct]) -> dict[str, inspect.Field]:
    info = inspect.type_info(kind)
    if not isinstance(info, inspect.StructType):
        raise TypeError(f"{kind.__name__} is not a struct")
    return {known.encode_name: known for known in info.fields}


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def _number(text: str) -> float:
    digits = text.lower()
    if digits.startswith("0x"):
        return float(int(digits[2:18], 16)) if len(digits) <= 18 else math.inf
    if digits.startswith("0o"):
        return float(int(digits[2:24], 8)) if len(digits) <= 24 else math.inf
    return float(digits.replace(".inf", "inf").replace(".nan", "nan"))


def _plain(bound: float | None) -> str:
    return "" if bound is None else f"{bound:.15g}"


def _member(node: Node, types: Sequence[inspect.Type]) -> inspect.Type:
    """Which of a union `node` means to be: a mapping is the struct, anything else what is no struct."""
    others = [each for each in types if not isinstance(each, inspect.NoneType)]
    wanted = [each for each in others if isinstance(each, inspect.StructType) is isinstance(node, Mapping)]
    return (wanted or others)[0]


def _describe(node: Node) -> str:
    match node:
        case Mapping():
            return "a mapping"
        case ListNode():
            return "a list"
        case Scalar(kind="null"):
            return "nothing"
        case Scalar(kind="text"):
            return f"the text {quote(node.value)}"
        case Scalar():
            return node.value[:40]


def _unknown(name: str, known: dict[str, inspect.Field]) -> str:
    close = difflib.get_close_matches(name[:60], known, n=1)
    return f"unknown key; did you mean {close[0]}?" if close else f"unknown key; known are {', '.join(known)}"
