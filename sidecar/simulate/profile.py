"""What an engine and its traffic are like when nothing is wrong: the constants of the simulated world.

They are those of the breaker's experiment: a decode step grows with the batch, a prompt is read at a fixed pace that
the batch slows down, and there is noise, a few stragglers, a few errors and a few pauses that mean nothing.
"""

from math import log2
from typing import Final

import msgspec


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic and engine. Medians in tokens, sigmas of the logarithm, rates as shares of requests."""

    name: str
    prompt_median: float
    prompt_sigma: float
    prompt_max: int
    output_median: float
    output_sigma: float
    output_max: int
    prefill_tokens_per_ms: float = 10.0
    prefill_batch: float = 64.0
    noise_sigma: float = 0.22
    speed_sigma: float = 0.08
    slots: int = 96
    stragglers: float = 0.003
    errors: float = 0.001
    pauses: float = 0.002
    pause_median_s: float = 1.2
    pause_sigma: float = 0.7

    def step_s(self, batch: int) -> float:
        """How long one token of each of `batch` answers takes."""
        return (6.0 + 0.25 * batch + 3.2 * log2(batch + 1)) / 1000.0

    def ttft_s(self, prompt_tokens: int, batch: int) -> float:
        """How long a prompt takes to its first token, on an engine of ordinary speed and without luck."""
        prefill_ms = prompt_tokens / self.prefill_tokens_per_ms
        return self.step_s(batch) + prefill_ms * (1.0 + batch / self.prefill_batch) / 1000.0


CHAT: Final = Profile(
    name="chat",
    prompt_median=512.0,
    prompt_sigma=1.0,
    prompt_max=8192,
    output_median=40.0,
    output_sigma=0.7,
    output_max=400,
)

SHORT: Final = Profile(
    name="short",
    prompt_median=40.0,
    prompt_sigma=0.8,
    prompt_max=1024,
    output_median=12.0,
    output_sigma=0.6,
    output_max=100,
)
"""Where a fixed threshold of 200 ms is sane: TTFT is 18 ms at the median and 47 ms at the 99th percentile."""

PROFILES: Final = {profile.name: profile for profile in (CHAT, SHORT)}


def slo_s(prompt_tokens: int) -> float:
    """The first token is owed within this: a second, and three times what reading the prompt takes."""
    return 1.0 + 3.0 * prompt_tokens / 10_000.0
