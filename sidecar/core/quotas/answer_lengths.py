"""How long answers usually are, by service and model: what is reserved for one that says nothing of its length.

The P95 and not the mean: what was reserved too much comes back when the request ends, what was reserved too little is
debt, and others have used that room by then. Counted in bins of an eighth of a doubling, old answers weigh half as much
after every `HALVE_AT`, so that a new model's habits are learnt within that many.
"""

from math import exp2, log2
from typing import Final

FIRST: Final = 256
QUANTILE: Final = 0.95
LEAST: Final = 20
"""Answers before the learnt is believed."""
HALVE_AT: Final = 1024
AGAIN: Final = 16
"""Answers after which the quantile is looked up anew."""
PER_DOUBLING: Final = 8
BINS: Final = 24 * PER_DOUBLING
MODELS: Final = 1000
NAME: Final = 256
"""Models that are remembered, and characters of each: clients choose the names."""


class _Lengths:
    __slots__ = ("bins", "count", "fresh", "usual")

    def __init__(self) -> None:
        self.bins = [0] * BINS
        self.count = 0
        self.fresh = 0
        self.usual = FIRST


class AnswerLengths:
    """Learns from what engines report."""

    __slots__ = ("_by_model",)

    def __init__(self) -> None:
        self._by_model: dict[str, _Lengths] = {}

    def usual(self, service: str, model: str) -> int:
        """Tokens that 95 of 100 answers do not exceed; `FIRST` until enough were seen."""
        known = self._by_model.get(service + "\n" + model[:NAME])
        return FIRST if known is None else known.usual

    def heard(self, service: str, model: str, tokens: int) -> None:
        """An answer ended by itself and had so many tokens."""
        key = service + "\n" + model[:NAME]
        known = self._by_model.get(key)
        if known is None:
            known = _Lengths()
            while len(self._by_model) >= MODELS:
                del self._by_model[next(iter(self._by_model))]
            self._by_model[key] = known
        place = min(BINS - 1, int(log2(tokens) * PER_DOUBLING)) if tokens > 1 else 0
        known.bins[place] += 1
        known.count += 1
        known.fresh += 1
        if known.fresh >= AGAIN or known.count == LEAST:
            known.fresh = 0
            _learn(known)


def _learn(known: _Lengths) -> None:
    if known.count < LEAST:
        return
    wanted = QUANTILE * known.count
    seen = 0
    for place, count in enumerate(known.bins):
        seen += count
        if seen >= wanted:
            known.usual = max(1, int(exp2((place + 1) / PER_DOUBLING)))
            break
    if known.count >= HALVE_AT:
        known.bins = [count // 2 for count in known.bins]
        known.count = sum(known.bins)
