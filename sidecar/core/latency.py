"""What a first token's time should be: a line over what explains it, and how far off is too far.

One line per model and version, learnt by all endpoints together: a line per endpoint would learn a slow endpoint's
slowness as its nature. Least squares over five terms, because prompt and load explain most of a first token's spread,
and what they explain is no evidence (docs/breaker.md has the formula and where it comes from).

1. `sample` only appends; all arithmetic of learning is in `learn`, once a second and off the request's path. At most
   `FIRST_PER_S`, later `LATER_PER_S`, samples are kept of a second: a line needs no more. They wait a second before
   they are learnt from: those of an endpoint that has opened by then, and may have been at fault, are dropped.
2. Samples are answers that came. What a deadline cut was longer than the deadline, nobody knows by how much, and never
   enters; so the line is a little low, which the threshold's own learning makes up for.
3. The line is kept as sums that are forgotten slowly and solved anew each second, and not as a recursive inverse: sums
   cannot wind up, and a ridge keeps terms that never varied at nothing.
4. What is left unexplained is clipped at 3 spreads before it teaches: one endpoint's fault shall not become the line.
5. The threshold tau is not a P99.9 of the last minute, whose spread is a factor of two, but mu + kappa * sigma of the
   last 20 of them, between two bounds. It says what one late answer is; how many are too many is the detector's.
"""

from collections import deque
from math import exp, isfinite, log, sqrt
from typing import Final

from sidecar.core.breaker import Breaker, State
from sidecar.policy.schema import Adaptive

TERMS: Final = 5
FORGET: Final = 0.9998  # per sample: five thousand samples' memory
RIDGE: Final = 1.0  # as if one sample had said that a slope is 0
FIRST_SAMPLES: Final = 3000  # learnt from quickly, then at a quarter of the pace
FIRST_PER_S: Final = 64
LATER_PER_S: Final = 16
CLIP: Final = 3.0  # spreads
LEAST_SPREAD: Final = 0.05  # of ln seconds: clocks and event loops differ by that much
MOST_SPREAD: Final = 1.0
BLOCK_SAMPLES: Final = 1000  # one P99.9 takes so many samples ...
BLOCK_S: Final = 30.0  # ... or so many seconds
LEAST_BLOCK: Final = 10  # samples, below which a block goes on
BLOCKS: Final = 20
GAP_TIMES: Final = 3.0  # a silence is late at so many times the longest usual one
MOST_BYTES: Final = 131_072  # of a body: longer ones are images, whose bytes say nothing about tokens
BYTES_PER_TOKEN: Final = 4.0
LEAST_S: Final = 1e-4  # no engine answers faster; ln must not see 0
MOST_S: Final = 3600.0

_CLOSED: Final = State.CLOSED


class Line:
    """The line of one model and version. Latencies in seconds, their logarithms natural; sizes in bytes."""

    __slots__ = (
        "_block",
        "_block_at",
        "_covariates",
        "_rule",
        "_sums",
        "_tails",
        "_targets",
        "_usual_gap_s",
        "_w0",
        "_w1",
        "_w2",
        "_w3",
        "_w4",
        "_waiting",
        "learnt",
        "pending",
        "per_tick",
        "spread",
        "tau",
        "taught_at",
    )

    def __init__(self, rule: Adaptive, now: float) -> None:
        self._rule = rule
        self._covariates = rule.covariates
        self._sums = [[0.0] * TERMS for _ in range(TERMS)]
        self._targets = [0.0] * TERMS
        self._w0 = self._w1 = self._w2 = self._w3 = self._w4 = 0.0
        self._block: list[float] = []
        self._block_at = now
        self._tails: deque[float] = deque(maxlen=BLOCKS)
        self._usual_gap_s = 0.0
        self._waiting: list[Sample] = []
        self.taught_at = now
        self.learnt = 0
        self.per_tick = FIRST_PER_S
        self.pending: list[Sample] = []
        self.spread = MOST_SPREAD
        self.tau = log(rule.tau_max)

    def use(self, rule: Adaptive) -> None:
        """Takes new numbers; what was learnt stays."""
        self._rule = rule
        self._covariates = rule.covariates
        self._settle()

    @property
    def ready(self) -> bool:
        """Whether enough was learnt to call an answer late."""
        return self.learnt >= self._rule.min_samples

    def expected(self, size_bytes: float, in_flight: float) -> float:
        """ln of the seconds that the first token should take."""
        if not self._covariates:
            return self._w0
        tokens = min(size_bytes, MOST_BYTES) / BYTES_PER_TOKEN
        return (
            self._w0
            + self._w1 * (log(tokens + 150.0) - 6.0)
            + self._w2 * (log(in_flight + 1.0) * 0.28853900817779268)  # log2(b + 1) / 5
            + self._w3 * (tokens * 0.00025)
            + self._w4 * (in_flight * 0.02)
        )

    def learn(self, now: float) -> None:
        """Takes in what was sampled since the last time."""
        if self.pending:
            self.taught_at = now
        pending = self._waiting
        self._waiting = self.pending
        self.pending = []
        if pending:
            self.per_tick = FIRST_PER_S if self.learnt < FIRST_SAMPLES else LATER_PER_S
            for sample in pending:
                if sample.breaker.state is _CLOSED:
                    self._take(sample)
            self._solve()
        block = self._block
        count = len(block)
        if count >= BLOCK_SAMPLES or (count >= LEAST_BLOCK and now - self._block_at >= BLOCK_S):
            block.sort()
            self._tails.append(block[count - 1 - count // 1000])
            self._block = []
            self._block_at = now
            self._settle()

    def gap(self, gap_s: float) -> None:
        """A stream ended well whose longest silence was this."""
        if not 0.0 < gap_s < MOST_S:
            return
        # The P99.9 by steps: up by 999 where 1 goes down, and in proportion, so that it finds any order of size.
        if gap_s > self._usual_gap_s:
            self._usual_gap_s = self._usual_gap_s * 1.05 if self._usual_gap_s > 0.0 else gap_s
            if self._usual_gap_s * 4.0 < gap_s:
                self._usual_gap_s = gap_s / 4.0
        else:
            self._usual_gap_s *= 0.99995

    @property
    def late_gap_s(self) -> float:
        """A silence within a stream that is late, in seconds."""
        return max(float(self._rule.gap_min_s), GAP_TIMES * self._usual_gap_s)

    def _take(self, sample: "Sample") -> None:
        x = (1.0, 0.0, 0.0, 0.0, 0.0)
        if self._covariates:
            tokens = min(sample.size_bytes, MOST_BYTES) / BYTES_PER_TOKEN
            b = sample.in_flight
            x = (
                1.0,
                log(tokens + 150.0) - 6.0,
                log(b + 1.0) * 0.28853900817779268,
                tokens * 0.00025,
                b * 0.02,
            )
        before = self._w0 * x[0] + self._w1 * x[1] + self._w2 * x[2] + self._w3 * x[3] + self._w4 * x[4]
        left = sample.took - sample.offset - before
        self.learnt += 1
        if self.learnt > self._rule.min_samples:
            self._block.append(left)
            bound = CLIP * self.spread
            left = min(bound, max(-bound, left))
        elif self.learnt > 30:
            left = min(CLIP, max(-CLIP, left))
        target = before + left
        sums, targets = self._sums, self._targets
        for row in range(TERMS):
            mine = sums[row]
            targets[row] = targets[row] * FORGET + x[row] * target
            for column in range(row + 1):
                mine[column] = mine[column] * FORGET + x[row] * x[column]
        pace = max(0.002, 1.0 / self.learnt)
        self.spread += pace * (1.2533 * abs(left) - self.spread)  # of a normal, E|e| is sigma / 1.2533
        self.spread = min(MOST_SPREAD, max(LEAST_SPREAD, self.spread))

    def _solve(self) -> None:
        """Cholesky of the sums, which a ridge makes positive."""
        sums, targets = self._sums, self._targets
        lower = [[0.0] * TERMS for _ in range(TERMS)]
        for row in range(TERMS):
            for column in range(row + 1):
                value = sums[row][column]
                if row == column:
                    value += RIDGE if row else 1e-9
                for each in range(column):
                    value -= lower[row][each] * lower[column][each]
                if row == column:
                    if value <= 1e-12:
                        return
                    lower[row][row] = sqrt(value)
                else:
                    lower[row][column] = value / lower[column][column]
        half = [0.0] * TERMS
        for row in range(TERMS):
            value = targets[row]
            for each in range(row):
                value -= lower[row][each] * half[each]
            half[row] = value / lower[row][row]
        w = [0.0] * TERMS
        for row in range(TERMS - 1, -1, -1):
            value = half[row]
            for each in range(row + 1, TERMS):
                value -= lower[each][row] * w[each]
            w[row] = value / lower[row][row]
        if isfinite(sum(w)):
            self._w0, self._w1, self._w2, self._w3, self._w4 = w

    def _settle(self) -> None:
        tails = self._tails
        count = len(tails)
        if not count:
            self.tau = log(self._rule.tau_max)
            return
        mu = sum(tails) / count
        sigma = sqrt(sum([(tail - mu) * (tail - mu) for tail in tails]) / count)
        self.tau = min(log(self._rule.tau_max), max(log(self._rule.tau_min), mu + self._rule.kappa * sigma))


class Sample:
    """One first token: ln of the seconds it `took`, what explains it, its endpoint's known offset and its breaker."""

    __slots__ = ("breaker", "in_flight", "offset", "size_bytes", "took")

    def __init__(self, took: float, size_bytes: float, in_flight: float, offset: float, breaker: Breaker) -> None:
        self.breaker = breaker
        self.took = took
        self.size_bytes = size_bytes
        self.in_flight = in_flight
        self.offset = offset


def log_s(seconds: float) -> float:
    """ln of a latency, whatever a clock made of it."""
    return log(min(MOST_S, max(LEAST_S, seconds))) if seconds == seconds else log(MOST_S)


def seconds_of(log_seconds: float) -> float:
    """The inverse, bounded alike."""
    return exp(min(8.2, max(-9.3, log_seconds)))
