"""A sketch says within a twentieth what a sorted list would have said."""

from math import inf, nan
from random import Random

import pytest

from sidecar.core.sketch import BUCKETS, ERROR, bucket_of, quantile, seconds_in


@pytest.mark.parametrize(
    ("seconds", "bucket"),
    [
        pytest.param(0.0, 0, id="nothing"),
        pytest.param(-1.0, 0, id="a clock that went back"),
        pytest.param(nan, 0, id="no number"),
        pytest.param(0.001, 0, id="the least"),
        pytest.param(0.0020001, 7, id="seven to a doubling"),
        pytest.param(0.0040001, 14, id="fourteen to two"),
        pytest.param(1e9, BUCKETS - 1, id="too long"),
        pytest.param(inf, BUCKETS - 1, id="for ever"),
    ],
)
def test_every_latency_has_a_bucket(seconds: float, bucket: int) -> None:
    assert bucket_of(seconds) == bucket


def test_a_bucket_stands_for_its_values_within_the_error() -> None:
    rng = Random(1)
    for _ in range(20_000):
        seconds = 0.0011 * 2.0 ** (rng.random() * 17.9)
        assert abs(seconds_in(bucket_of(seconds)) - seconds) <= (ERROR + 1e-4) * seconds


def test_buckets_rise() -> None:
    lasts = [seconds_in(bucket) for bucket in range(BUCKETS)]
    assert lasts == sorted(lasts)
    assert lasts[-1] > 280.0


@pytest.mark.parametrize("q", [0.0, 0.01, 0.5, 0.9, 0.99, 1.0])
def test_quantiles_are_those_of_the_values(q: float) -> None:
    rng = Random(2)
    values = sorted(rng.lognormvariate(-1.0, 1.0) for _ in range(5000))
    sketch: dict[int, int] = {}
    for value in values:
        bucket = bucket_of(value)
        sketch[bucket] = sketch.get(bucket, 0) + 1
    found = quantile(sketch, q)
    assert found is not None
    assert found == pytest.approx(values[round(q * (len(values) - 1))], rel=0.06)


def test_of_nothing_there_is_no_quantile() -> None:
    assert quantile({}, 0.5) is None
    assert quantile({3: 1}, 0.99) == seconds_in(3)
