"""Plain objects as YAML in the style of the text around them, or as JSON.

Strings are written plain only where no reader of any version of YAML takes them for something else.
"""

import re
from typing import Any, Final

import msgspec

_PLAIN: Final = re.compile(r"(?:--?)?[A-Za-z/](?:[A-Za-z0-9_./=-]|:(?=[A-Za-z0-9/]))*")
_MEASURE: Final = re.compile(r"[0-9]+(?:m|s|[KMG]i)|[0-9]+\.[0-9]+\.[0-9]+\.[0-9]+")
"""What begins with a digit and is still no number to anybody: 500m, 256Mi, 600s, 127.0.0.1."""
_WORDS: Final = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"})
# Less the two that break lines.
_QUOTABLE: Final = re.compile(r"[ -~\u00a0-\u2027\u202a-\ud7ff]*")
_LITERAL: Final = re.compile(r"[!-~][ -~\u00a0-\u2027\u202a-\ud7ff]*(?:\n[ -~\u00a0-\u2027\u202a-\ud7ff]*)*")
_UNREADABLE: Final = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
"""What JSON may hold as it is and YAML may not, or takes for the end of a line."""


class Style(msgspec.Struct, frozen=True):
    """How a text is written. `step`: by how much a mapping in a mapping is indented, `dash`: a list in a mapping."""

    step: int = 2
    dash: int = 0


def block(value: Any, style: Style) -> list[str]:
    """The lines of a mapping or list that is not empty, from column 0."""
    lines: list[str] = []
    if isinstance(value, dict):
        for key, each in value.items():
            lines.extend(entry(key, each, style))
        return lines
    for each in value:
        lines.extend(item(each, style))
    return lines


def entry(key: str, value: Any, style: Style) -> list[str]:
    """The lines of a mapping's entry."""
    first, more = below(value, style)
    return [f"{scalar(key)}:{first}", *more]


def below(value: Any, style: Style) -> tuple[str, list[str]]:
    """A value behind its key: what stands on the key's line, a space before it, and the lines below."""
    if isinstance(value, dict | list) and value:
        indent = " " * (style.step if isinstance(value, dict) else style.dash)
        return "", [f"{indent}{line}" for line in block(value, style)]
    if (text := _literal(value)) is not None:
        return f" {text[0]}", [f"{' ' * style.step}{line}".rstrip() for line in text[1:]]
    return f" {scalar(value)}", []


def item(value: Any, style: Style) -> list[str]:
    """The lines of a list's entry."""
    if isinstance(value, dict | list) and value:
        first, *more = block(value, style)
    elif (text := _literal(value)) is not None:
        first, *more = text
    else:
        return [f"- {scalar(value)}"]
    return [f"- {first}", *(f"  {line}".rstrip() for line in more)]


def _literal(value: Any) -> list[str] | None:
    """A text of several lines as a literal, if it can be one."""
    if not isinstance(value, str) or "\n" not in value or not _LITERAL.fullmatch(value) or value.endswith("\n\n"):
        return None
    lines = value.removesuffix("\n").split("\n")
    if any(line != line.rstrip() for line in lines):
        return None
    return ["|" if value.endswith("\n") else "|-", *lines]


def scalar(value: Any) -> str:
    """A scalar, or an empty collection, on one line."""
    if not isinstance(value, str):
        return json(value)
    if (_PLAIN.fullmatch(value) and value.lower() not in _WORDS) or _MEASURE.fullmatch(value):
        return value
    if value and _QUOTABLE.fullmatch(value):
        return "'" + value.replace("'", "''") + "'"
    return json(value)


def flow(value: Any) -> str:
    """A value in brackets, on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{scalar(key)}: {flow(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(flow, value)) + "]"
    return json(value) if isinstance(value, str) and ":" in value else scalar(value)


def json(value: Any) -> str:
    """A value on one line, as JSON."""
    return _readable(msgspec.json.encode(value))


def several_lines(value: Any) -> bool:
    """Whether there is a text of several lines in it."""
    if isinstance(value, dict | list):
        return any(map(several_lines, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and "\n" in value


def pretty(value: Any, step: int, indent: int) -> str:
    """A value as JSON over several lines, all but the first `indent` columns in."""
    text = _readable(msgspec.json.format(msgspec.json.encode(value), indent=step))
    return text.replace("\n", "\n" + " " * indent)


def _readable(data: bytes) -> str:
    return _UNREADABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", data.decode())
