"""What a chat template adds to the texts of a prompt: so much for each message, so much for all.

Learnt from what the engine reports, less what the texts have: the median slope over pairs of prompts and the median of
what is left (Theil 1950, Sen 1968), so that not even a third of nonsense moves it. Where the reports scatter by more
than a twentieth of the texts themselves, tokenizer and model are not a pair, or the engine lies: nothing is learnt, and
`disagrees` says so.
"""

from collections import deque
from collections.abc import Iterable
from typing import Final

KEPT: Final = 24
"""Prompts that are looked at: the last ones."""

ENOUGH: Final = 6
"""Prompts before anything is believed."""

PER_MESSAGE: Final = 4.0
PER_REQUEST: Final = 4.0
"""Of ChatML and its like, until something was learnt: a mark, a role, a line's end, a mark."""

MOST_PER_MESSAGE: Final = 64.0
MOST_PER_REQUEST: Final = 20_000.0
"""A template may have a standing order of its own; it was never seen to have a book."""

SCATTER_RATIO: Final = 0.05
SCATTER_TOKENS: Final = 8.0


class Overhead:
    """Of one model of one service."""

    __slots__ = ("_seen", "disagrees", "learnt", "per_message", "per_request")

    def __init__(self) -> None:
        self._seen: deque[tuple[int, int, int]] = deque(maxlen=KEPT)
        self.per_message = PER_MESSAGE
        self.per_request = PER_REQUEST
        self.learnt = 0
        self.disagrees = False

    def of(self, messages: int) -> int:
        """Tokens beside the texts' own; a prompt without messages has what begins every prompt."""
        if not messages:
            return 0
        return round(self.per_message * messages + self.per_request)

    def learn(self, text_tokens: int, messages: int, reported: int) -> None:
        """A prompt of `messages` > 0, whose texts have `text_tokens`."""
        self._seen.append((messages, text_tokens, reported - text_tokens))
        self.learnt += 1
        if self.learnt < ENOUGH or (self.learnt > KEPT and self.learnt % 4):
            return
        seen = list(self._seen)
        slopes = [
            (other[2] - one[2]) / (other[0] - one[0])
            for at, one in enumerate(seen)
            for other in seen[at + 1 :]
            if other[0] != one[0]
        ]
        slope = _median(slopes) if len(slopes) >= ENOUGH else self.per_message
        slope = min(max(slope, 0.0), MOST_PER_MESSAGE)
        left = [extra - slope * messages for messages, _, extra in seen]
        base = _median(left)
        scatter = _median(abs(each - base) for each in left)
        usual = _median(texts for _, texts, _ in seen)
        self.disagrees = scatter > SCATTER_TOKENS + SCATTER_RATIO * usual or not -16.0 <= base <= MOST_PER_REQUEST
        if not self.disagrees:
            self.per_message = slope
            self.per_request = base


def _median(values: Iterable[float]) -> float:
    # The library's is imported with random, decimal and fractions: 15 ms of every start.
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
