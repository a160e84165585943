"""SPOT and DSPOT: streaming peaks over threshold, after the published algorithm.

A. Siffer, P.-A. Fouque, A. Termier, C. Largouet, "Anomaly Detection in Streams with Extreme Value Theory", KDD 2017.
What exceeds a high quantile t follows a generalised Pareto distribution (gamma, sigma); fitted to the excesses (by
Grimshaw's reduction of the likelihood to one unknown), it gives the value z that is exceeded with probability q:
z = t + sigma/gamma * ((q n / N)^-gamma - 1). A value above z is an alarm and is not learnt from.
"""

from collections import deque
from math import inf, log

from bench.breaker_ab.guards import Detector

LEVEL = 0.98
"""Which quantile t is: the paper's 98 %."""
PEAKS = 200
"""Excesses that are kept, as in libspot (`max_excess`)."""
STEPS, HALVINGS = 8, 25


class Spot(Detector):
    """`q`: probability of an alarm; `calibration`: values learnt from before the first alarm."""

    def __init__(self, q: float = 1e-4, calibration: int = 500) -> None:
        self.q = q
        self._start: list[float] | None = []
        self._calibration = calibration
        self._level = 0.0
        self._peaks: deque[float] = deque(maxlen=PEAKS)
        self._count = self._exceeded = 0

    def extreme(self, value: float) -> bool:
        start = self._start
        if start is not None:
            start.append(value)
            if len(start) >= self._calibration:
                self._calibrate(sorted(start))
            return False
        if value > self.limit:
            return True
        self._count += 1
        if value > self._level:
            self._exceeded += 1
            self._peaks.append(value - self._level)
            self._fit()
        return False

    def _calibrate(self, ordered: list[float]) -> None:
        self._start = None
        self._count = len(ordered)
        self._level = ordered[int(LEVEL * self._count)]
        above = [value - self._level for value in ordered if value > self._level]
        self._peaks.extend(above)
        self._exceeded = len(above)
        self._fit()

    def _fit(self) -> None:
        gamma, sigma = pareto([*self._peaks])
        ratio = self.q * self._count / max(1, self._exceeded)
        over = -sigma * log(ratio) if abs(gamma) < 1e-9 else sigma / gamma * (ratio**-gamma - 1)
        self.limit = self._level + over


class Dspot(Detector):
    """SPOT on what a value is above the mean of the last `depth` that were no alarm."""

    def __init__(self, q: float = 1e-4, calibration: int = 500, depth: int = 100) -> None:
        self._spot = Spot(q, calibration)
        self._last: deque[float] = deque(maxlen=depth)
        self._sum = 0.0

    def extreme(self, value: float) -> bool:
        last = self._last
        full = len(last) == last.maxlen
        if full and self._spot.extreme(value - self._sum / len(last)):
            return True
        if full:
            self._sum -= last[0]
        last.append(value)
        self._sum += value
        self.limit = self._sum / len(last) + self._spot.limit
        return False


def pareto(peaks: list[float]) -> tuple[float, float]:
    """gamma and sigma of the generalised Pareto distribution that is likeliest for `peaks` (all > 0, not empty)."""
    if not peaks:
        return 0.0, 1e-9
    mean, most, least = sum(peaks) / len(peaks), max(peaks), max(min(peaks), 1e-9)
    best = (0.0, mean)
    likeliest = _likelihood(peaks, *best)
    near = 1e-6 / mean
    for low, high in ((-1 / most + near, -near), (near, max(2 * near, 2 * (mean - least) / least**2))):
        for root in _roots(peaks, low, high):
            gamma = sum(log(1 + root * peak) for peak in peaks) / len(peaks)
            sigma = gamma / root
            if sigma > 0 and (found := _likelihood(peaks, gamma, sigma)) > likeliest:
                best, likeliest = (gamma, sigma), found
    return best


def _roots(peaks: list[float], low: float, high: float) -> list[float]:
    """Where Grimshaw's function changes its sign: a coarse walk, then halving. The walk is geometric above zero."""
    if low >= high:
        return []
    if low > 0:
        points = [low * (high / low) ** (step / STEPS) for step in range(STEPS + 1)]
    else:
        points = [low + (high - low) * step / STEPS for step in range(STEPS + 1)]
    values = [_grimshaw(peaks, point) for point in points]
    found = []
    for a, b, at_a, at_b in zip(points, points[1:], values, values[1:], strict=False):
        if at_a == 0.0:
            found.append(a)
        elif at_a * at_b < 0:
            for _ in range(HALVINGS):
                middle = (a + b) / 2
                at = _grimshaw(peaks, middle)
                if at * at_a > 0:
                    a = middle
                else:
                    b = middle
            found.append((a + b) / 2)
    return found


def _grimshaw(peaks: list[float], theta: float) -> float:
    count = len(peaks)
    scaled = [1 + theta * peak for peak in peaks]
    if min(scaled) <= 0:
        return inf
    return (sum(1 / s for s in scaled) / count) * (1 + sum(map(log, scaled)) / count) - 1


def _likelihood(peaks: list[float], gamma: float, sigma: float) -> float:
    count = len(peaks)
    if abs(gamma) < 1e-9:
        return -count * log(sigma) - sum(peaks) / sigma
    scaled = [1 + gamma / sigma * peak for peak in peaks]
    if min(scaled) <= 0:
        return -inf
    return -count * log(sigma) - (1 + 1 / gamma) * sum(map(log, scaled))
