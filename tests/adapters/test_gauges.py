"""Gauges by name and by label; what pages look like is tested with the dialects that read them."""

import pytest

from sidecar.adapters.gauges import total

PAGE = b"""# TYPE requests gauge
requests{model="a",kind="waiting"} 3
requests{model="a",kind="active"} 5
requests{model="b",kind="waiting"} 4.0 1796000000000
requests_total{kind="waiting"} 99
idle 0
"""

CASES = {
    "all label sets": (b"requests", b"", 12),
    "those with a label": (b"requests", b'kind="waiting"', 7),
    "a label nobody has": (b"requests", b'kind="max"', None),
    "a name that is the beginning of another": (b"request", b"", None),
    "no labels": (b"idle", b"", 0),
    "a label where there are none": (b"idle", b'kind="waiting"', None),
    "another name": (b"queue", b"", None),
}


@pytest.mark.parametrize(("name", "label", "expected"), CASES.values(), ids=CASES.keys())
def test_a_gauge_is_summed(name: bytes, label: bytes, expected: int | None) -> None:
    assert total(PAGE, name, label) == expected


@pytest.mark.parametrize("value", [b"NaN", b"+Inf", b"-1", b"", b"many"])
def test_what_counts_nothing_is_none(value: bytes) -> None:
    assert total(b'requests{a="b"} ' + value, b"requests") is None


def test_a_value_is_none_of_the_labels() -> None:
    assert total(b'requests{a="b"} kind="waiting"\n', b"requests", b'kind="waiting"') is None
