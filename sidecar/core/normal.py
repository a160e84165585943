"""What is normal for the endpoints of a service together, weighed once a second: no answer is bad by itself.

1. `background` is the ratio of bad answers to be expected: that of the healthier half of the endpoints, over the last
   seconds or the last minutes, whichever is worse. A fault of all, such as a busy hour, raises it and trips nobody.
2. `common` is how much slower than their line all are now; each endpoint's `offset` is how much it always is, at
   its `usual_load`. `less` is how far all together have less to do: 1 with half of it.
3. `overload`: the load is beyond what was ever seen to work, or many fail everywhere, and yet something gets through.
   Slowness is no evidence then, and nothing is learnt. It speaks by the load at the 40th percentile: neither one
   endpoint that hangs nor half of them change it.
4. `load_most` is how many requests in flight one endpoint can carry at a guess, `rate_most` how many answers a second,
   taught by strain: those in use were twice too slow, or failed, while others were open, for `strained_s` by now.
5. `panic`: most answers of the healthier half fail. There is nowhere better to go; every breaker is to close.
"""

from math import exp, inf, log
from typing import Final

from sidecar.core.detector import MOST_OFFSET as MOST_OFFSET
from sidecar.core.detector import Detector
from sidecar.policy.schema import Adaptive

RECENT_S: Final = 10.0  # over which "now" is told from "usually"
LONG_S: Final = 600.0
PRIOR: Final = 500.0  # answers' worth of belief in the policy's background ratio
SMOOTH_S: Final = 5.0
CAP_TIMES: Final = 1.5  # the usual load: what an endpoint's own queue explains of its slowness, and no more
LOAD_S: Final = 120.0  # for a load to be known as normal
COMMON_S: Final = 3.0
PANIC_S: Final = 2.0
OFFSET_S: Final = 300.0
OFFSET_TICKS: Final = 20  # a new endpoint's first seconds count as a plain mean
MOST_COMMON: Final = 1.1  # ln 3
OVERLOAD_TIMES: Final = 1.4
CAPACITY_TIMES: Final = 3.0  # the load that was ever seen to work: to be tried, engines slow down long before they stop
STRAIN: Final = 0.6  # ln: twice as slow as prompt and load explain
STRAINED_S: Final = 3.0  # for which those in use must have been too slow before one more is taken back
STRAIN_TAUGHT: Final = 0.9  # of what they ended while strained: what one can carry, until it is forgotten
OVERLOAD_SLACK: Final = 4.0  # requests, for endpoints that are nearly idle
OVERLOAD_S: Final = 15.0
BACKLOG_S: Final = 45.0  # for which who had too much when all had may take to have worked it off
OVERLOAD_LEARNT_S: Final = 300.0
OVERLOAD_RATIO: Final = 0.1
SPAN_S: Final = 1.0  # for which slowness must have lasted: a hiccup delays many answers and is one event
RISING_SPAN_S: Final = 3.0  # the same while the load rises past what was seen: queues begin at one before the others
RISING_TIMES: Final = 1.2
RISING_SLACK: Final = 2.0
COMMON_RATIO: Final = 0.05
PANIC_RATIO: Final = 0.5
CALM_RATIO: Final = 0.2
FEWEST_IN_PANIC: Final = 5.0  # answers within PANIC_S
MOST_BACKGROUND: Final = 0.6  # beyond, no ratio would be telling
QUANTILE: Final = 0.4
IDLE: Final = 0.01  # answers, decayed, below which an endpoint is not looked at until it is heard of


class Normal:
    """Written by `tick` alone. Times are monotonic seconds; `common` is of ln seconds.

    `bad_fast`, `good_fast`, `bad_gray` and `good_gray` are what one answer adds to a statistic.
    """

    __slots__ = (
        "_failing",
        "_load",
        "_load_max",
        "_load_s",
        "_long_bad",
        "_long_n",
        "_overload_until",
        "_rule",
        "background",
        "bad_fast",
        "bad_gray",
        "closed_load",
        "common",
        "good_fast",
        "good_gray",
        "less",
        "load_cap",
        "load_most",
        "overload",
        "panic",
        "rate",
        "rate_most",
        "slowness",
        "span_s",
        "strained_s",
        "strange",
    )

    def __init__(self, rule: Adaptive) -> None:
        self._load = 0.0
        self._load_max = 0.0
        self._load_s = 0.0
        self._long_n = 0.0
        self._long_bad = 0.0
        self._overload_until = -inf
        self.load_cap = inf
        self.less = 0.0
        self.rate = 0.0
        self.rate_most = inf
        self.load_most = inf
        self.slowness = 0.0
        self.strange = False
        self.span_s = SPAN_S
        self._failing = 0.0
        self.closed_load = 0.0
        self.strained_s = 0.0
        self.common = 0.0
        self.overload = False
        self.panic = False
        self.use(rule)

    def use(self, rule: Adaptive) -> None:
        """Takes new numbers; what was learnt stays."""
        self._rule = rule
        self._weigh(rule.background)

    @property
    def excuses(self) -> bool:
        """Whether so much is bad everywhere that no session is to blame for more of it."""
        return self.overload or self.panic or self.background > COMMON_RATIO

    def tick(
        self,
        active: list[Detector],
        closed: list[Detector],
        ready: bool,
        opened: int,
        floor: int,
        ended: int,
        now: float,
        elapsed_s: float,
    ) -> bool:
        """Weighs what `active` endpoints, `closed` of them, showed since the last time; True if panic began.

        `ready`: enough answers were counted. `opened`: how many breakers are open, `floor`: how many must stay closed;
        0: panic has no use. `ended`: how many answers.
        """
        self._learn_offsets(closed, ready, elapsed_s)
        half = _healthier_half(closed)
        self._weigh_background(half, len(closed), elapsed_s)
        self._weigh_load(closed, ready, opened, ended, now, elapsed_s)
        began = self._watch_for_panic(half, len(closed), floor)
        recent, common, panic = exp(-elapsed_s / RECENT_S), exp(-elapsed_s / COMMON_S), exp(-elapsed_s / PANIC_S)
        for detector in active:
            if self.overload:
                detector.forgive()
                if detector.in_flight > self.load_cap:
                    detector.backlog_until = now + BACKLOG_S
            detector.recent_n *= recent
            detector.recent_bad *= recent
            detector.common_n *= common
            detector.common_sum *= common
            detector.panic_n *= panic
            detector.panic_bad *= panic
            if detector.recent_n < IDLE and detector.common_n < IDLE:
                detector.active = False
        return began

    def _weigh(self, background: float) -> None:
        p = min(MOST_BACKGROUND, max(self._rule.background, background))
        self.background = p
        fast = min(0.95, max(self._rule.fast_ratio, 3.0 * p))
        gray = min(0.9, max(self._rule.gray_ratio, 6.0 * p))
        self.bad_fast = log(fast / p)
        self.good_fast = log((1.0 - fast) / (1.0 - p))
        self.bad_gray = log(gray / p)
        self.good_gray = log((1.0 - gray) / (1.0 - p))

    def _learn_offsets(self, closed: list[Detector], ready: bool, elapsed_s: float) -> None:
        """What each is slower than its line, and what all are together; their sum is what `left` leaves out."""
        means: list[float] = []
        centre = load = usual = 0.0
        for detector in closed:
            centre += detector.offset
            load += detector.in_flight
            usual += detector.usual_load
        self.less = max(0.0, min(1.0, 2.0 * (1.0 - load / usual))) if usual > 0.0 else 0.0
        if closed:
            # Only what the line does not say already: together they are on the line.
            centre *= min(1.0, elapsed_s / COMMON_S) / len(closed)
        for detector in closed:
            detector.offset -= centre
            count = detector.left_n
            detector.last_n = count
            detector.last_sum = detector.left_sum
            if count:
                left = detector.left_sum / count
                if not detector.ticks and not ready:
                    detector.most_offset = MOST_OFFSET  # what is there from the beginning is normal, whatever it is
                detector.left_n = 0
                detector.left_sum = 0.0
                detector.common_n += count
                detector.common_sum += count * (left + self.common)
                if not self.overload:
                    self._offset(detector, left, elapsed_s)
            if detector.common_n >= 1.0:
                means.append(detector.common_sum / detector.common_n)
        means.sort()
        self.slowness = means[int(QUANTILE * (len(means) - 1))] if means else 0.0
        # What a lone endpoint has in common is its own.
        self.common = min(MOST_COMMON, max(-MOST_COMMON, self.slowness)) if len(means) >= 2 else 0.0

    def _offset(self, detector: Detector, left: float, elapsed_s: float) -> None:
        detector.ticks += 1
        young = detector.ticks < OFFSET_TICKS
        pace = 1.0 / (detector.ticks + 1) if young else min(1.0, elapsed_s / OFFSET_S)
        most = detector.most_offset if young else MOST_OFFSET
        detector.offset = min(most, max(-most, detector.offset + pace * left))
        detector.usual_load += pace * (min(float(detector.in_flight), self.load_cap) - detector.usual_load)

    def _weigh_background(self, half: list[Detector], closed: int, elapsed_s: float) -> None:
        n = sum([detector.recent_n for detector in half])
        bad = sum([detector.recent_bad for detector in half])
        # What was counted over RECENT_S is taken in over as long.
        share = elapsed_s / RECENT_S
        keep = exp(-elapsed_s / LONG_S)
        if not self.overload:
            self._long_n = self._long_n * keep + n * share
            self._long_bad = self._long_bad * keep + bad * share
        usual = (self._long_bad + PRIOR * self._rule.background) / (self._long_n + PRIOR)
        # A lone endpoint is its own better half: its failing would excuse itself.
        current = bad / n if n >= 5.0 and closed >= 2 else 0.0
        self._weigh(max(usual, current))

    def _weigh_load(
        self, closed: list[Detector], ready: bool, opened: int, ended: int, now: float, elapsed_s: float
    ) -> None:
        if not closed:
            return
        loads = sorted([float(detector.in_flight) for detector in closed])
        count = len(loads)
        load = loads[round(QUANTILE * (count - 1))]
        # Of two the lower is as often the one that is well as the one that has just come.
        usual = load if count != 2 else 0.5 * (loads[0] + loads[1])
        seen = OVERLOAD_TIMES * self._load_max + OVERLOAD_SLACK
        if count >= 2:
            self.load_cap = CAP_TIMES * usual + OVERLOAD_SLACK
        else:
            self.load_cap = seen if opened else inf
        self._load_s += elapsed_s
        self._load += min(1.0, elapsed_s / SMOOTH_S) * (load - self._load)
        known = self._load_s >= LOAD_S
        ratios = sorted([_recent_ratio(detector) for detector in closed])
        self._failing = ratios[int(QUANTILE * (count - 1))]
        if self._rule.guards and ready and count >= 2:
            # What we keep from those that are open the others carry: that is no overload that came from outside.
            much = known and self._load > seen * (count + opened) / count
            if much or self._failing > OVERLOAD_RATIO or (known and self.slowness > STRAIN):
                self._overload_until = now + OVERLOAD_S
            # Where nothing gets through it is no mere overload, and what fails shall open if there is a fallback.
            self.overload = now < self._overload_until and self._failing < PANIC_RATIO
        else:
            self.overload = False
        rising = known and load > RISING_TIMES * self._load_max + RISING_SLACK
        self.span_s = RISING_SPAN_S if rising else SPAN_S
        self.strange = self.overload or (known and self._load > seen)
        if self._load <= self._load_max:
            self._load_max += (self._load - self._load_max) * min(1.0, elapsed_s / (6.0 * LONG_S))
        elif not known:
            self._load_max = self._load
        elif not opened:
            # What lasts becomes normal, slowly.
            lasting_s = OVERLOAD_LEARNT_S if self.overload else LOAD_S
            self._load_max += (self._load - self._load_max) * min(1.0, elapsed_s / lasting_s)
        self._weigh_capacity(sum(loads) / count, count, opened, ended, elapsed_s)

    def _weigh_capacity(self, load: float, count: int, opened: int, ended: int, elapsed_s: float) -> None:
        """How much one endpoint can carry: the `count` closed ones carry `load` each, and `ended` so many."""
        self.closed_load = min(load, self.load_cap) * count
        if elapsed_s > 0.0:
            self.rate += min(1.0, elapsed_s / SMOOTH_S) * (ended / elapsed_s - self.rate)
        if opened and (self.slowness > STRAIN or self._failing > OVERLOAD_RATIO):
            self.strained_s += elapsed_s
            if self.strained_s >= STRAINED_S:
                self.rate_most = min(self.rate_most, STRAIN_TAUGHT * self.rate / count)
        else:
            self.strained_s = 0.0
            self.rate_most *= exp(elapsed_s / LONG_S)
        if self._rule.guards:
            self.load_most = CAPACITY_TIMES * self._load_max + OVERLOAD_SLACK
        else:
            self.load_most = self.rate_most = inf

    def _watch_for_panic(self, half: list[Detector], closed: int, floor: int) -> bool:
        n = sum([detector.panic_n for detector in half])
        bad = sum([detector.panic_bad for detector in half])
        ratio = bad / n if n > 0.0 else 0.0
        before = self.panic
        if not self._rule.guards or floor == 0:
            self.panic = False
        elif before:
            self.panic = ratio > CALM_RATIO
        else:
            self.panic = closed > 0 and n >= FEWEST_IN_PANIC and ratio > PANIC_RATIO
        return self.panic and not before


def _healthier_half(closed: list[Detector]) -> list[Detector]:
    detectors = [detector for detector in closed if detector.recent_n > 0.0]
    if len(detectors) < 2:
        return detectors
    ranked = sorted(detectors, key=_recent_ratio)
    return ranked[: len(ranked) // 2]


def _recent_ratio(detector: Detector) -> float:
    return detector.recent_bad / detector.recent_n if detector.recent_n > 0.0 else 0.0
