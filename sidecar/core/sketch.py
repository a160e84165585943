"""A latency sketch: how many values fell into each of 128 buckets, each a tenth wider than the one before.

Sparse counts and not a list of bounds: a second's answers of one endpoint fall into a handful of buckets, sketches of
different sidecars and seconds add up by adding counts, and a bucket's number below 128 is one byte in msgpack. A
quantile read back is within `ERROR` of the value that stood there (Masson, Rim and Lee 2019, DDSketch), as long as that
lies between 1 ms and 5 minutes; what lies outside is in the first or the last bucket.
"""

from collections.abc import Mapping
from math import exp, log
from typing import Final

BUCKETS: Final = 128
LEAST_S: Final = 0.001
PER_LN: Final = 10.098865286222745  # 7 / ln 2: seven buckets to each doubling
ERROR: Final = 0.0495  # of the true value: half a bucket

_WIDTH: Final = exp(1.0 / PER_LN)
_OFFSET: Final = 69.76048999263462  # buckets from LEAST_S to a second
_MOST_S: Final = 319.5  # the last bucket's end


def bucket_of(seconds: float) -> int:
    """Which bucket a latency falls into, 0-127; whatever a clock made of it."""
    if LEAST_S < seconds < _MOST_S:
        return int(log(seconds) * PER_LN + _OFFSET)
    return BUCKETS - 1 if seconds >= _MOST_S else 0


def seconds_in(bucket: int) -> float:
    """The latency that stands for a bucket: no value in it is further from it than `ERROR`."""
    return LEAST_S * exp(bucket / PER_LN) * 2.0 * _WIDTH / (1.0 + _WIDTH)


def quantile(sketch: Mapping[int, int], q: float) -> float | None:
    """The value at `q` (0-1) of the way through all of them, in seconds; None: there are none."""
    total = sum(sketch.values())
    if total <= 0:
        return None
    rank = q * (total - 1)
    below = 0
    bucket = 0
    for bucket in sorted(sketch):
        below += sketch[bucket]
        if below > rank:
            break
    return seconds_in(bucket)
