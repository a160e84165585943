"""The words of orders: names and time spans."""

from math import inf
from typing import get_args

import pytest

from sidecar.admin.order import (
    ACTIONS,
    LASTING,
    MAX_NAME,
    MAX_SPAN_S,
    OPERATOR,
    Order,
    parse_name,
    parse_order,
    parse_span,
)
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


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1s", 1.0), ("90s", 90.0), ("10m", 600.0), ("2h", 7200.0), ("30d", MAX_SPAN_S), ("2592000s", MAX_SPAN_S)],
)
def test_spans(text: str, seconds: float) -> None:
    assert parse_span(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "10", "m", "0s", "0d", "31d", "721h", "2592001s", "1.5h", "-1s", "1 h", "1w", "1ms", "٣s", "1h30m", "9" * 99],
)
def test_other_spans_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_span(text)


@pytest.mark.parametrize("text", [OPERATOR, "ann", "Ann Ö. <ann@example.org>", "x" * MAX_NAME])
def test_names(text: str) -> None:
    assert parse_name(text) == text


@pytest.mark.parametrize("text", ["", " ", "a\nb", "a\x1b[2J", "x" * (MAX_NAME + 1), "\ud800", "a\u202eb"])
def test_what_nobody_is_called_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="1-64 printable characters"):
        parse_name(text)
