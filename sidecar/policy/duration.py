"""Durations as operators write them (`250ms`, `10s`, `5m`, `1h`) and as code uses them (seconds).

A bare number is refused rather than taken for seconds: `timeout: 250` is off by a factor of a thousand for half of its
readers. Only seconds take a fraction, so that form and range together are one pattern, which the JSON Schema can hold.
What is kept, and not waited for, may be kept for days: those have a form of their own (`1m` to `7d`).
"""

import re

_SCALE = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_FORM = re.compile(r"([0-9]{1,9})(\.[0-9]{1,3})?(ms|s|m|h)")

PATTERN = (
    "^("
    r"([1-9][0-9]{0,5}|[12][0-9]{6}|3[0-5][0-9]{5}|3600000)ms"
    r"|0\.(?!0+s)[0-9]{1,3}s|([1-9][0-9]{0,2}|[12][0-9]{3}|3[0-5][0-9]{2})(\.[0-9]{1,3})?s|3600(\.0{1,3})?s"
    r"|([1-9]|[1-5][0-9]|60)m"
    r"|1h"
    ")$"
)
_VALID = re.compile(PATTERN)

LONG_PATTERN = r"^(([1-9][0-9]{0,3}|100[0-7][0-9]|10080)m|([1-9][0-9]?|1[0-5][0-9]|16[0-8])h|[1-7]d)$"
_LONG = re.compile(LONG_PATTERN)

SPAN_PATTERN = f"{PATTERN}|{LONG_PATTERN}"


def parse_seconds(text: str) -> float:
    """`text` in seconds, 0.001-3600. ValueError, in words for the operator, for any other form or range."""
    form = _FORM.fullmatch(text)
    if form is None:
        raise ValueError(
            f'"{text[:40]}" is not a duration: write a number with ms, s, m or h, such as "250ms" or "10s"'
        )
    number, fraction, unit = form.groups()
    if _VALID.fullmatch(text) is None:
        raise ValueError(
            f'"{text}" is not a duration from "1ms" to "1h"; only seconds take a fraction ("1.5s"), and no leading zero'
        )
    return float(number + (fraction or "")) * _SCALE[unit]


def parse_long(text: str) -> float:
    """`text` in seconds, 60-604800. ValueError, in words for the operator, for any other form or range."""
    if _LONG.fullmatch(text) is None:
        raise ValueError(
            f'"{text[:40]}" is not a duration from "1m" to "7d": write a whole number with m, h or d, such as "90m"'
        )
    return float(text[:-1]) * _SCALE[text[-1]]


def parse_span(text: str) -> float:
    """`text` in seconds, 0.001-604800: what `parse_seconds` or `parse_long` reads. ValueError in words otherwise."""
    try:
        return parse_long(text) if _LONG.fullmatch(text) is not None else parse_seconds(text)
    except ValueError:
        raise ValueError(
            f'"{text[:40]}" is not a duration from "1ms" to "7d": write a number with ms, s, m, h or d, such as "90s"'
        ) from None


def format_seconds(seconds: float) -> str:
    """The shortest form that `parse_seconds` reads back, rounded to the millisecond."""
    ms = round(seconds * 1000)
    for unit, factor in (("h", 3_600_000), ("m", 60_000)):
        if ms % factor == 0:
            return f"{ms // factor}{unit}"
    if ms < 1000:
        return f"{ms}ms"
    return f"{ms / 1000:.3f}".rstrip("0").rstrip(".") + "s"
