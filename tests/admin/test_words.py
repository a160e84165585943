"""Names and time spans, as operators write them."""

import math

import pytest

from sidecar.admin.words import MAX_NAME, MAX_SPAN_S, OPERATOR, iso, parse_name, parse_span


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


@pytest.mark.parametrize(
    ("unix_s", "text"),
    [
        (0.0, "1970-01-01T00:00:00.000Z"),
        (1_700_000_000.1236, "2023-11-14T22:13:20.123Z"),
        (1e18, ""),
        (-1e18, ""),
        (math.nan, ""),
        (math.inf, ""),
    ],
)
def test_a_time_is_shown_and_what_is_none_is_not(unix_s: float, text: str) -> None:
    assert iso(unix_s) == text
