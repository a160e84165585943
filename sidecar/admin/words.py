"""What an operator writes in a URL or at a prompt, who he is and time spans, and how he is shown a time.

The command reads them by the same functions as the pages, so that a wrong word is told before anybody is asked. Nothing
is imported here that would keep it waiting.
"""

import re
from datetime import UTC, datetime
from typing import Final

OPERATOR: Final = "operator"
"""Who gave an order that names nobody."""

MAX_NAME: Final = 64
MIN_SPAN_S: Final = 1.0
MAX_SPAN_S: Final = 30 * 86_400.0
"""What shall stand for longer than a month belongs into the policy."""

_SCALE: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_FORM: Final = re.compile(r"([0-9]{1,7})([smhd])", re.ASCII)


def parse_span(text: str) -> float:
    """A time span in seconds, `1s` to `30d`. ValueError, in words for the operator, for any other form or range."""
    form = _FORM.fullmatch(text)
    if form is None:
        raise ValueError(f'"{text[:40]}" is not a duration: write a whole number with s, m, h or d, such as "10m"')
    seconds = float(form[1]) * _SCALE[form[2]]
    if not MIN_SPAN_S <= seconds <= MAX_SPAN_S:
        raise ValueError(f'"{text}" is not a duration from "1s" to "30d"')
    return seconds


def parse_name(text: str) -> str:
    """Who gives an order: 1-64 printable characters. ValueError in words for the operator."""
    if not text.strip() or len(text) > MAX_NAME or not text.isprintable():
        raise ValueError(f"a name has 1-{MAX_NAME} printable characters")
    return text


def iso(unix_s: float) -> str:
    """ISO 8601 in UTC, milliseconds; empty for what is no time: a record of the log may say anything."""
    try:
        return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (OverflowError, OSError, ValueError):
        return ""
