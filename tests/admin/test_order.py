"""Orders from their URLs."""

from math import inf
from typing import get_args

import pytest

from sidecar.admin.order import ACTIONS, LASTING, Order, parse_order
from sidecar.admin.words import OPERATOR
from sidecar.core.breaker import Action


def test_actions_are_those_of_the_breakers() -> None:
    assert list(ACTIONS) == list(ACTIONS.values())
    assert set(ACTIONS) == set(get_args(Action))


@pytest.mark.parametrize("action", list(ACTIONS.values()))
def test_order_has_an_author_and_may_have_an_end(action: Action) -> None:
    assert parse_order(action, {}) == Order(action, OPERATOR, inf)
    assert parse_order(action, {"by": "ann"}) == Order(action, "ann", inf)
    if action in LASTING:
        assert parse_order(action, {"for": "10m", "by": "ann"}) == Order(action, "ann", 600.0)
    else:
        with pytest.raises(ValueError, match=f"for: {action} is done once; open and hold last"):
            parse_order(action, {"for": "10m"})


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"for": "10"}, "for: .* is not a duration"),
        ({"for": ""}, "for: "),
        ({"by": ""}, "by: a name has 1-64"),
        ({"until": "10m"}, '"until" is no parameter of an order: there are by and for'),
    ],
)
def test_order_that_means_nothing_is_refused_in_words(query: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_order("open", query)
