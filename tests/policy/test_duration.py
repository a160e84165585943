import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.policy.duration import (
    LONG_PATTERN,
    PATTERN,
    SPAN_PATTERN,
    format_seconds,
    parse_long,
    parse_seconds,
    parse_span,
)

GOOD = {
    "1ms": 0.001,
    "250ms": 0.25,
    "3600000ms": 3600.0,
    "0.001s": 0.001,
    "0.5s": 0.5,
    "1s": 1.0,
    "1.5s": 1.5,
    "90s": 90.0,
    "3600s": 3600.0,
    "3600.000s": 3600.0,
    "1m": 60.0,
    "60m": 3600.0,
    "1h": 3600.0,
}
BAD = [
    *("", "s", "10", "10 s", " 10s", "10s ", "10s\n", "+1s", "-1s", "1,5s", ".5s", "1.s", "1e3s", "1_000s", "\u0661s"),
    *(
        "0s",
        "0ms",
        "0m",
        "0h",
        "0.0s",
        "0.000s",
        "0.0001s",
        "01s",
        "00.5s",
        "3600001ms",
        "3601s",
        "3600.001s",
        "61m",
        "2h",
    ),
    *("1:30", "1m30s", "10S", "10sec", "1d", "1.5m", "1.5ms", "0.5h", "inf", "infs", ".inf", "nans", "9" * 400 + "s"),
]


@pytest.mark.parametrize(("text", "seconds"), GOOD.items())
def test_a_duration_is_read_in_seconds(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", BAD)
def test_anything_else_is_refused_in_words_that_show_how(text: str) -> None:
    with pytest.raises(ValueError, match=r'"250ms"|"1ms" to "1h"'):
        parse_seconds(text)


@given(
    st.from_regex(r"[0-9]{1,8}(\.[0-9]{1,4})?(ms|s|m|h)", fullmatch=True)
    | st.builds(lambda n, unit: f"{n}{unit}", st.integers(0, 3_700_000), st.sampled_from(["ms", "s", "m", "h"]))
)
def test_the_pattern_of_the_json_schema_says_what_the_parser_says(text: str) -> None:
    try:
        seconds: float | None = parse_seconds(text)
    except ValueError:
        seconds = None
    assert (re.fullmatch(PATTERN, text) is not None) == (seconds is not None)
    if seconds is not None:
        assert 0.001 <= seconds <= 3600


@given(st.integers(1, 3_600_000))
def test_what_is_written_reads_back(ms: int) -> None:
    assert parse_seconds(format_seconds(ms / 1000)) == pytest.approx(ms / 1000, abs=1e-9)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.25, "250ms"), (1, "1s"), (1.5, "1.5s"), (60, "1m"), (90, "90s"), (600, "10m"), (3600, "1h"), (0.8, "800ms")],
)
def test_a_duration_is_written_as_operators_write_it(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    {
        "1m": 60.0,
        "90m": 5400.0,
        "9999m": 599_940.0,
        "10080m": 604_800.0,
        "1h": 3600.0,
        "168h": 604_800.0,
        "1d": 86_400.0,
        "7d": 604_800.0,
    }.items(),
)
def test_what_is_kept_may_be_kept_for_days(text: str, seconds: float) -> None:
    assert parse_long(text) == seconds
    assert parse_long(format_seconds(seconds)) == seconds
    assert re.search(LONG_PATTERN, text)


@pytest.mark.parametrize(
    "text",
    ["", "59s", "60s", "0m", "10081m", "99999m", "01h", "169h", "0d", "8d", "1.5d", "1w", "1D", "d", "\u0661d", "1d "],
)
def test_any_other_long_duration_is_refused_in_words(text: str) -> None:
    with pytest.raises(ValueError, match=r'"1m" to "7d"'):
        parse_long(text)
    assert not re.search(LONG_PATTERN, text)


@pytest.mark.parametrize(("text", "seconds"), [*GOOD.items(), ("90m", 5400.0), ("25h", 90_000.0), ("7d", 604_800.0)])
def test_a_span_is_a_short_or_a_long_duration(text: str, seconds: float) -> None:
    assert parse_span(text) == seconds
    assert re.search(SPAN_PATTERN, text)


@pytest.mark.parametrize("text", ["", "10", "0s", "8d", "1.5h", "3601s", "169h", "1d1h"])
def test_a_span_that_is_none_is_refused_in_words_that_show_how(text: str) -> None:
    with pytest.raises(ValueError, match=r'is not a duration from "1ms" to "7d"'):
        parse_span(text)
    assert not re.search(SPAN_PATTERN, text)
