"""Numbers on a Prometheus page; what vLLM's pages make of them is tested there."""

import pytest

from sidecar.adapters.page import count, total

PAGE = b"""# HELP up Whether it is.
# TYPE up gauge
up 1.0
queue{model="a",version="1"} 2
queue{model="b",version="1"} 0.5
queue_bucket{model="a",le="1"} 9
other{name="queue"} 7
"""


@pytest.mark.parametrize(
    ("name", "having", "expected"),
    [
        (b"up", b"", 1.0),
        (b"queue", b"", 2.5),
        (b"queue", b'model="a"', 2.0),
        (b"queue", b'model="c"', None),
        (b"missing", b"", None),
        (b"name", b"", None),
    ],
)
def test_a_metric_is_summed_over_the_samples_that_are_meant(name: bytes, having: bytes, expected: float | None) -> None:
    assert total(PAGE, name, having) == expected


@pytest.mark.parametrize("value", [b"NaN", b"-1", b"+Inf", b"", b"x"])
def test_what_counts_nothing_is_none(value: bytes) -> None:
    assert total(b"queue 0\nqueue " + value, b"queue") is None


def test_counts_are_whole() -> None:
    assert count(PAGE, b"queue") == 2
    assert count(PAGE, b"missing") is None
