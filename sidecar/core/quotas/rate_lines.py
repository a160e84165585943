"""The header lines that tell a client how much of a limit is left, in OpenAI's words and forms.

When a sliding window is whole again if nothing more is used depends on when all of it was used, which no sidecar knows.
`reset` is told as OpenAI's bucket would refill, in proportion to what is used, and not before there is room at all.
"""

from math import ceil

from sidecar.core.quotas.meter import TOKENS, Meter


def rate_lines(meter: Meter, left: int, now: float) -> bytes:
    """x-ratelimit-{limit,remaining,reset}-{requests,tokens} of a window of which `left` is left."""
    reset_s = max(meter.retry_at - now, meter.span_s * min(1.0, (meter.limit - left) / meter.limit))
    unit = b"tokens" if meter.unit == TOKENS else b"requests"
    return b"x-ratelimit-limit-%b: %d\r\nx-ratelimit-remaining-%b: %d\r\nx-ratelimit-reset-%b: %b\r\n" % (
        unit,
        meter.limit,
        unit,
        left,
        unit,
        duration(reset_s),
    )


def duration(seconds: float) -> bytes:
    """As OpenAI writes it: `350ms`, `12s`, `6m0s`, `23h59m1s`; rounded up."""
    if seconds < 1.0:
        return b"%dms" % ceil(max(0.0, seconds) * 1000.0)
    whole = ceil(seconds)
    if whole < 60:
        return b"%ds" % whole
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return b"%dm%ds" % (minutes, rest)
    hours, minutes = divmod(minutes, 60)
    return b"%dh%dm%ds" % (hours, minutes, rest)
