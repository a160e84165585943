"""Log lines as bytes: JSON for machines, one short line for people; nothing a client sent can break out of either.

JSON strings escape what lies below 0x20; what else a terminal could act on (C1 controls, direction overrides, lone
surrogates) is escaped as well, on a slow path that ordinary lines never take. Long strings are clipped: a model's
name may be as long as its body.
"""

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from enum import Enum
from typing import Literal

import msgspec

Format = Literal["console", "json"]
Field = str | int | float | bool | None
Wall = Callable[[], float]

MAX_LINE_BYTES = 8192
"""Beyond this a line's strings are clipped; container runtimes split lines at 16 KiB."""

CLIP = 512
"""Characters kept of each string of a line that is too long."""

TEXTS = frozenset(("error", "exception"))
"""Members that may be a text of several lines: ours, never a client's."""

_ENCODER = msgspec.json.Encoder()


class Stamp:
    """ISO 8601 in UTC with milliseconds, off a clock in Unix seconds; what repeats is not formatted again."""

    __slots__ = ("_millisecond", "_second", "_seconds", "_text", "_wall")

    def __init__(self, wall: Wall) -> None:
        self._wall = wall
        self._millisecond = -1
        self._second = -1
        self._seconds = ""
        self._text = b""

    def __call__(self) -> bytes:
        millisecond = int(self._wall() * 1000)
        if millisecond != self._millisecond:
            self._millisecond = millisecond
            second, rest = divmod(millisecond, 1000)
            if second != self._second:
                self._second = second
                self._seconds = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")
            self._text = b"%s.%03dZ" % (self._seconds.encode(), rest)
        return self._text


def json_line(head: bytes, record: msgspec.Struct | Mapping[str, Field]) -> bytes:
    """`head` (the begun object's first members, comma included) and the record's members as one line."""
    try:
        line = head + _ENCODER.encode(record)[1:] + b"\n"
    except UnicodeEncodeError:
        line = b""
    if line.isascii() and 0 < len(line) <= MAX_LINE_BYTES:
        return line
    if line and len(line) <= MAX_LINE_BYTES and line[:-1].decode().isprintable():
        return line
    fields = {name: _clip(value) for name, value in _told(record).items()}
    return head + json.dumps(fields, separators=(",", ":"), default=str).encode()[1:] + b"\n"


def console_line(stamp: bytes, level: str, event: str, fields: Mapping[str, Field]) -> bytes:
    """`12:00:01.234 info  event key=value ...`; empty values are left out, texts of lines are indented below."""
    words = [stamp[11:-1].decode(), f"{level:<7}", printable(event)]
    below = ""
    for name, value in fields.items():
        if value is None or value == "":
            continue
        if name in TEXTS and "\n" in str(value):
            below += "".join(f"\n    {printable(line)}" for line in str(value).splitlines())
        else:
            words.append(f"{name}={_word(value)}")
    return f"{' '.join(words)}{below}\n".encode(errors="backslashreplace")


def fields_of(record: msgspec.Struct | Mapping[str, Field]) -> dict[str, Field]:
    """The members of a record, enums by their word."""
    if isinstance(record, msgspec.Struct):
        pairs = ((name, getattr(record, name)) for name in record.__struct_fields__)
        return {name: value.value if isinstance(value, Enum) else value for name, value in pairs}
    return dict(record)


def _told(record: msgspec.Struct | Mapping[str, Field]) -> dict[str, Field]:
    """What the encoder would have told of a record: its defaults are left out where it says so."""
    fields = fields_of(record)
    if isinstance(record, msgspec.Struct) and record.__struct_config__.omit_defaults:
        left_out = record.__struct_fields__[-len(record.__struct_defaults__) :]
        defaults = dict(zip(left_out, record.__struct_defaults__, strict=True))
        return {name: value for name, value in fields.items() if name not in defaults or value != defaults[name]}
    return fields


def printable(text: str) -> str:
    """`text`, clipped, with everything that is not printable as a backslash escape."""
    if len(text) > CLIP:
        text = text[:CLIP] + "..."
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def _word(value: Field) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, int):
        return str(value)
    text = printable(str(value))
    if " " in text or "=" in text or '"' in text:
        text = '"' + text.replace('"', '\\"') + '"'
    return text


def _clip(value: Field) -> Field:
    return value[:CLIP] + "..." if isinstance(value, str) and len(value) > CLIP else value
