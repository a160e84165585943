"""A wager that one share is larger than another by more than a margin: what it wins is evidence, whenever one looks.

Who believes that a canary is as good as its baseline sells bets, block by block, whose price is fair if it is; the
buyer reinvests. If the seller is right, the buyer's capital, 1 at the start, ever reaches 1 / alpha with a chance of
at most alpha (Ville 1939): looking every second and stopping at will costs nothing, where a p-value would find a
fault in every canary by being looked at often enough ("peeking": Johari, Koomen, Pekelis and Walsh 2017). Capital is
an e-process (Howard, Ramdas, McAuliffe and Sekhon 2021; Waudby-Smith and Ramdas 2024, "betting"; Ramdas, Grunwald,
Vovk and Shafer 2023 for the whole of it).

1. The bet. Of `n` answers of each arm in a block, `bad` were bad; the seller says: canary's share <= baseline's +
   margin, whatever the baseline's is. The bet is a ratio of likelihoods: a canary worse by `ODDS` against the point
   of the seller's border that lies nearest by Kullback-Leibler. Its expectation is then <= 1 for all that the seller
   may mean (Turner, Ly and Grunwald 2024, "generic e-variables for k-sample tests", theorem 1: their border is a
   convex set, and so is this one). So the baseline is estimated as well, and a guess of its share that is off costs
   power and no truth.
2. Both arms lie in the same block, so what comes over both (a day's hours, a surge) is no evidence.
3. Answers of a block are no independent ones: a batch is slow together, an engine's streams break together. How much
   more the arms' difference jumps between blocks than independent answers would (`Spread`), is measured, and the bet's
   logarithm is divided by that: a root of a fair price is fair (Jensen).
4. No block multiplies capital by more than e^`MOST`, however bad it was: one incident convicts nobody. What is cut off
   the top of a fair price leaves it fair.
5. A part of the money begins at each block (`begins`), so that a canary that turns bad late finds a buyer who has not
   lost all before (Shin, Ramdas and Rinaldo 2024, "e-detectors"). All parts together are 1.
"""

from math import exp, log, sqrt
from typing import Final

ODDS: Final = (0.5, 1.2, 2.4)
"""How much worse a canary is bet to be, in ln odds over the border: what is between or beyond is found by its neighbour
a little later. The money is spread over them evenly."""
MOST: Final = 2.0
RICHEST: Final = 1e250
"""Of which a root may be all that counts (`core.claim`): the roots of what is infinite would all convict."""
SEEN: Final = 4.0
"""So many blocks of `USUAL` spread are taken for seen at the start."""
USUAL: Final = 1.5
KEEPS: Final = 0.97
"""A block's weight in the spread after one more: it is that of the last half hundred."""
JUMP: Final = 64.0
"""The most that one block says of the spread: a single incident shall not blind the judge for long."""
BATCH: Final = 4
"""Blocks that are also looked at together: what lasts longer than a block spreads their sums more than it does them."""


def begins(block: int) -> float:
    """Which part of the money begins at a block, the first being 0."""
    return 1.0 / ((block + 1.0) * (block + 2.0))


def winnings(n_canary: int, bad_canary: int, n_base: int, bad_base: int, share: float, margin: float) -> list[float]:
    """By how much a bet on each of `ODDS` multiplies capital, as logarithms; zeros where there is nothing to bet on.

    `share`: what the baseline's is likely to be, from what came before this block.
    """
    won = [0.0, 0.0, 0.0]
    border = share + margin
    if n_canary <= 0 or n_base <= 0 or not 0.0 < share < 1.0 or border >= 0.995:
        return won
    variance = border * (1.0 - border)
    ratio = n_canary / n_base
    room = 0.8 * variance / (ratio * (1.0 - share))
    odds = log(border / (1.0 - border))
    good_canary = n_canary - bad_canary
    good_base = n_base - bad_base
    for number in range(3):
        over = min(room, 1.0 / (1.0 + exp(-odds - ODDS[number])) - border)
        step = ratio * over / variance
        won[number] = (
            bad_canary * log(1.0 + over / border)
            + good_canary * log(1.0 - over / (1.0 - border))
            + bad_base * log(1.0 - step * (1.0 - share))
            + good_base * log(1.0 + step * share)
        )
    return won


class Wager:
    """The capital of the bets on one claim."""

    __slots__ = ("_blocks", "_capital")

    def __init__(self) -> None:
        self._blocks = 0
        self._capital = [0.0, 0.0, 0.0]

    def play(self, won: list[float], spread: float) -> None:
        """Takes a block's `winnings` in."""
        capital = self._capital
        fresh = begins(self._blocks)
        self._blocks += 1
        for number in range(3):
            capital[number] = min(RICHEST, (capital[number] + fresh) * exp(min(MOST, won[number] / spread)))

    @property
    def capital(self) -> float:
        """How much there is of each 1 that was there."""
        return (self._capital[0] + self._capital[1] + self._capital[2]) / 3.0


class Spread:
    """How much more the difference of the arms varies between blocks than it would if answers were independent; from 1.

    About its own mean, so that a canary that is always worse by the same does not blind its judge.
    """

    __slots__ = ("_batch", "_batches", "_blocks", "_in_batch")

    def __init__(self) -> None:
        self._blocks = _Moments()
        self._batches = _Moments()
        self._batch = 0.0
        self._in_batch = 0

    def saw(self, excess: float, variance: float) -> None:
        """A block's difference, and its variance among independent answers."""
        if variance <= 0.0:
            return
        z = excess / sqrt(variance)
        self._blocks.saw(z)
        self._batch += z
        self._in_batch += 1
        if self._in_batch == BATCH:
            self._batches.saw(self._batch / sqrt(BATCH))
            self._batch = 0.0
            self._in_batch = 0

    @property
    def factor(self) -> float:
        """A variance by a variance."""
        return max(1.0, self._blocks.variance, self._batches.variance)


class _Moments:
    """Mean and variance that forget."""

    __slots__ = ("_mean", "_squares", "_weight")

    def __init__(self) -> None:
        self._weight = 0.0
        self._mean = 0.0
        self._squares = 0.0

    def saw(self, value: float) -> None:
        weight = self._weight * KEEPS + 1.0
        before = value - self._mean
        mean = self._mean + before / weight
        self._squares = self._squares * KEEPS + max(-JUMP, min(JUMP, before * (value - mean)))
        self._mean = mean
        self._weight = weight

    @property
    def variance(self) -> float:
        """Of what was seen, and of `SEEN` blocks of the usual spread; one degree of freedom is the mean's."""
        return (SEEN * USUAL + self._squares) / (SEEN + max(0.0, self._weight - 1.0))
