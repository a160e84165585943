"""The words of an operator's order, as they stand in a URL or at a prompt: who gave it, and for how long.

The command reads them by the same functions as the pages, so that a wrong word is told before anybody is asked.
"""

import re
from collections.abc import Mapping
from math import inf
from typing import Final

import msgspec

from sidecar.core.breaker import Action

OPERATOR: Final = "operator"
"""Who gave an order that names nobody."""

ACTIONS: Final[Mapping[str, Action]] = {"open": "open", "close": "close", "reset": "reset", "hold": "hold"}
"""`open` refuses, `hold` leaves it as it is: both last. `close` and `reset` are done once, and it judges on."""

LASTING: Final = ("open", "hold")
MAX_NAME: Final = 64
MIN_SPAN_S: Final = 1.0
MAX_SPAN_S: Final = 30 * 86_400.0
"""What shall stand for longer than a month belongs into the policy."""

_SCALE: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_FORM: Final = re.compile(r"([0-9]{1,7})([smhd])", re.ASCII)


class Order(msgspec.Struct, frozen=True):
    """An order: by whom, and for how long; infinity: until the next."""

    action: Action
    by: str = OPERATOR
    for_s: float = inf


def parse_order(action: Action, query: Mapping[str, str]) -> Order:
    """An order from its URL's parameters `by` and `for`. ValueError in words for the operator."""
    for name in query:
        if name not in ("by", "for"):
            raise ValueError(f'"{name[:40]}" is no parameter of an order: there are by and for')
    for_s = inf
    if "for" in query:
        if action not in LASTING:
            raise ValueError(f"for: {action} is done once; {' and '.join(LASTING)} last")
        try:
            for_s = parse_span(query["for"])
        except ValueError as exc:
            raise ValueError(f"for: {exc}") from exc
    try:
        return Order(action, parse_name(query.get("by", OPERATOR)), for_s)
    except ValueError as exc:
        raise ValueError(f"by: {exc}") from exc


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
