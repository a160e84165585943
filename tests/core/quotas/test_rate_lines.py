"""How much of a limit is left, in a client's headers."""

import pytest

from sidecar.core.quotas.meter import REQUESTS, Meter
from sidecar.core.quotas.rate_lines import duration, rate_lines


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0.0, b"0ms"),
        (0.0001, b"1ms"),
        (0.35, b"350ms"),
        (0.9999, b"1000ms"),
        (1.0, b"1s"),
        (59.1, b"1m0s"),
        (360.0, b"6m0s"),
        (86399.5, b"24h0m0s"),
        (3661.0, b"1h1m1s"),
    ],
)
def test_a_reset_is_told_as_openai_does(seconds: float, told: bytes) -> None:
    assert duration(seconds) == told


def test_a_window_that_is_full_is_not_reset_before_there_is_room() -> None:
    meter = Meter(REQUESTS, 60.0, 100, "requests per minute")
    meter.retry_at = 190.0
    assert rate_lines(meter, 0, 100.0) == (
        b"x-ratelimit-limit-requests: 100\r\nx-ratelimit-remaining-requests: 0\r\nx-ratelimit-reset-requests: 1m30s\r\n"
    )
