"""How many requests an endpoint takes at once before they only wait inside it, learnt from its first tokens.

What an engine takes depends on the model, the cards and the prompts, and changes with them, so it is found out: while
first tokens come about as fast as they do on a quiet engine, there is room for more; once they take `tolerance` times
as long, there is not (a gradient of latency, as in Netflix's concurrency-limits and Envoy's adaptive concurrency; the
cuts and steps are AIMD, Jacobson 1988).

1. Each first token is held against the baseline of prompts of its size (by doublings of the body's bytes), and what is
   judged is the median of those ratios. A mean over mixed lengths would follow the mix and not the load.
2. A baseline goes down when a second's median is below it. It goes up only by tokens that came while no more than `min`
   ran here, when load cannot be the reason: forgetting in any other way would, on an engine that is always full, make
   slow the new normal and let the limit grow without end. An engine that became slower for good is so cut down to
   `min`, where its new baseline is learnt, and grows from there.
3. A request sent before the last change tells of the limit before it, and is not judged: else one overload would cut
   once for each second that its requests take to come back.
4. An engine that has requests waiting in a queue of its own, or says that it is full, is full whatever its tokens say.
   What waits there tells how much too many they were: the limit is what did not wait.
5. Where it was cut is its ceiling (CUBIC's last maximum, Ha et al. 2008): it grows up to it and rests there for
   `RESTS_S`, and passes it in steps of one: without that it would find out every few seconds anew.
6. What is `tolerance` times a baseline may be later than anybody is owed, more so where a baseline was learnt in a
   crowd. So it is full, too, where first tokens take `IN_TIME` of the longest SLA, though no SLA makes less than
   `TIGHTEST` baselines of it. The longest: while some are served in time it is worth having.
7. It grows only if what there was has been used, and only on evidence: `MIN_SAMPLES` first tokens. Without any (no
   streams) it goes no further than back to where it began.
"""

from math import exp, inf, log
from typing import Final

from sidecar.policy.schema import Admission

MIN_SAMPLES: Final = 10  # fewer say nothing of a median
MAX_SAMPLES: Final = 512  # in one judgement: more do not move a median
USED: Final = 0.8  # of the limit: with less in flight nothing is known of more
CUT: Final = 0.7  # the most that is cut at once, 0.9 the least: halving would empty the engine
LEAST_CUT: Final = 0.9
CALM: Final = 0.8  # of the tolerance's logarithm: above it nothing grows, so that it does not swing about the edge
IN_TIME: Final = 0.8  # of the longest SLA: the rest is for the gate, and for those that take longer than the median
TIGHTEST: Final = log(2.0)  # what no SLA goes below: one that cannot be kept would leave the engine the least
STEP: Final = 0.05  # of the limit, or 1 if that is more
DOWN: Final = 0.5  # of what a second's median is below the baseline
LEARNS: Final = 0.1  # of a quiet token's distance, downwards thrice as fast: about a lower quartile
FAR: Final = 1.0  # a logarithm beyond which a distance counts no more
STALE_S: Final = 30.0  # samples that are too few for so long are thrown away
LEAST_S: Final = 0.0001  # of a first token: what is less is the clock's step
APART_S: Final = 1.0  # between two cuts because it said that it is full
HEARD_S: Final = 3.0  # between two cuts for the same queue: it is asked for once a second, and takes a while to go
RESTS_S: Final = 30.0  # at the ceiling, after the last cut
PASSED: Final = 8.0  # beyond the ceiling it is no ceiling any more
RECOVERS_S: Final = 10.0  # between two steps back to where it began, without evidence
BUCKETS: Final = 40  # doublings of a body's bytes: a terabyte


class Limiter:
    """The limit of one endpoint. `ratio`: the median of its first tokens over their baseline, when last judged; 0.0:
    not yet. `baseline_s`: of the size of prompts seen last; 0.0: of none. `cuts` and `grown` count changes. While
    nothing runs there and nothing was `heard`, `tick` may be left out."""

    __slots__ = (
        "_based",
        "_bases",
        "_ceiling",
        "_changed_at",
        "_crowded_at",
        "_cut_at",
        "_edge",
        "_max",
        "_min",
        "_owed",
        "_peak",
        "_ratios",
        "_sized",
        "_start",
        "_waits_since",
        "baseline_s",
        "cuts",
        "grown",
        "heard",
        "limit",
        "ratio",
    )

    def __init__(self, policy: Admission, owed_s: float = inf) -> None:
        self.limit = inf
        self.ratio = 0.0
        self.baseline_s = 0.0
        self.cuts = 0
        self.grown = 0
        self.heard = False
        """Whether there is something to judge."""
        self._bases: dict[int, float] = {}
        """By size, in logarithms of seconds."""
        self._based = 0.0
        """The baselines that the ratios were held against, summed."""
        self._sized: set[int] = set()
        """Sizes among the ratios."""
        self._ratios: list[float] = []
        """Logarithms."""
        self._waits_since = inf
        """When the first of the ratios came."""
        self._changed_at = -inf
        self._ceiling = inf
        self._cut_at = -inf
        self._crowded_at = -inf
        """When more than `min` were last seen to run."""
        self._peak = 0
        self.use(policy, owed_s)

    def use(self, policy: Admission, owed_s: float = inf) -> None:
        """Takes new bounds; what was learnt stays. `owed_s`: the longest SLA of all classes, inf: one has none."""
        self._min = float(policy.min)
        self._max = float(max(policy.min, policy.max))
        self._start = min(self._max, max(self._min, float(policy.concurrency)))
        self._edge = log(policy.tolerance)
        self._owed = log(IN_TIME * owed_s) if owed_s < inf else inf
        self.limit = self._start if self.limit == inf else min(self._max, max(self._min, self.limit))

    def sample(self, ttft_s: float, size_bytes: int, in_flight: int, now: float) -> None:
        """A first token, so long after its request was sent; `in_flight` run there now."""
        size = min(max(0, size_bytes).bit_length(), BUCKETS - 1)
        seconds = log(max(ttft_s, LEAST_S))
        self._peak = max(self._peak, in_flight)
        self.heard = True
        base = self._bases.get(size)
        if base is None:
            # A size that is new while there is load: what it would be without.
            base = seconds - (max(0.0, log(self.ratio)) if self.ratio > 0.0 else 0.0)
        far = seconds - base
        sent_at = now - ttft_s
        if in_flight > self._min:
            self._crowded_at = now
        elif sent_at >= self._crowded_at:
            base += LEARNS * (min(far, FAR) if far > 0.0 else 3.0 * max(far, -FAR))
        self._bases[size] = base
        self.baseline_s = exp(base)
        if sent_at >= self._changed_at and len(self._ratios) < MAX_SAMPLES:
            if not self._ratios:
                self._waits_since = now
            self._ratios.append(far)
            self._based += base
            self._sized.add(size)

    def pushed_back(self, now: float) -> None:
        """It said that it is full. Of many that say so at once, one counts."""
        if now - self._changed_at >= APART_S:
            self._cut(CUT * self.limit, self.limit, now)

    def tick(self, waiting: int, in_flight: int, now: float) -> float:
        """Once a second: the limit from now on. `waiting`: requests in the engine's own queue, 0 also if unknown."""
        peak = max(self._peak, in_flight)
        self._peak = in_flight
        if in_flight > self._min:
            self._crowded_at = now
        judged, over, edge = len(self._ratios) >= MIN_SAMPLES, 0.0, self._edge
        if judged:
            edge = min(edge, max(TIGHTEST, self._owed - self._based / len(self._ratios)))
            over = self._judge()
        elif now - self._waits_since >= STALE_S:
            self._forget()
        used = peak >= USED * self.limit
        if waiting > 0:
            if now - self._cut_at >= HEARD_S:
                fits = max(CUT * self.limit, float(peak - waiting))
                self._cut(fits, fits, now)
        elif judged and over > edge:
            cut = min(LEAST_CUT, max(CUT, exp(edge - over)))
            self._cut(cut * min(self.limit, peak / USED), min(self.limit, peak / USED), now)
        elif judged:
            if used and over < CALM * edge:
                self._grow(self._max, now)
        elif used and not self._ratios and self.limit < self._start and now - self._changed_at >= RECOVERS_S:
            self._grow(self._start, now)
        return self.limit

    def _judge(self) -> float:
        """The median of the ratios, as a logarithm; baselines above it come down."""
        ratios = sorted(self._ratios)
        over = ratios[len(ratios) // 2]
        if over < 0.0:
            for size in self._sized:
                self._bases[size] += DOWN * over
        self.ratio = exp(over)
        self._forget()
        return over

    def _forget(self) -> None:
        self._ratios = []
        self._based = 0.0
        self._waits_since = inf
        self._sized.clear()
        self.heard = False

    def _cut(self, to: float, ceiling: float, now: float) -> None:
        to = max(self._min, to)
        if to < self.limit:
            self.limit = to
            self.cuts += 1
            self._ceiling = max(self._min, ceiling)
            self._cut_at = self._changed_at = now
            self._forget()

    def _grow(self, most: float, now: float) -> None:
        step = max(1.0, STEP * self.limit)
        if self.limit < self._ceiling:
            most = min(most, self._ceiling)
        elif self.limit < self._ceiling + PASSED:
            if now - self._cut_at < RESTS_S:
                return
            step = 1.0
        to = min(most, self.limit + step)
        if to > self.limit:
            self.limit = to
            self.grown += 1
            self._changed_at = now
            self._forget()
