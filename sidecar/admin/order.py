"""An operator's order to a breaker, as it stands in a URL: what, who says so, and for how long."""

from collections.abc import Mapping
from math import inf
from typing import Final

import msgspec

from sidecar.admin.words import OPERATOR, parse_name, parse_span
from sidecar.core.breaker import Action

ACTIONS: Final[Mapping[str, Action]] = {"open": "open", "close": "close", "reset": "reset", "hold": "hold"}
"""`open` refuses, `hold` leaves it as it is: both last. `close` and `reset` are done once, and it judges on."""

LASTING: Final = ("open", "hold")


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
