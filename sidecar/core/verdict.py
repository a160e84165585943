"""What sidecars tell each other of a canary's answers, and what is concluded from all of it: the shapes alone.

Apart from who counts and judges (`core.canary`), which is compiled: these are read by msgspec from their annotations.
"""

from typing import Final, Literal

import msgspec

MEASURES: Final = 5
"""Outcome, time to the first token, gap, length, finish reason."""
CLASSES: Final = 12
"""Of prompts, by the bytes of their request: below 512, then each twice the one before, the last from 512 KiB."""
BUCKETS: Final = 256
GROUPS: Final = 32
"""Of sessions, by a hash."""
KEYS: Final = MEASURES * 2 * CLASSES * BUCKETS * GROUPS
MOST_KEYS: Final = 8192
"""Of one tally: a second of two thousand answers. What is more goes with the next."""
MOST_COUNTED: Final = 1_000_000
"""Of anything in one tally: more is no count of ours."""
MOST_ID: Final = 256


class Tally(msgspec.Struct, array_like=True, frozen=True):
    """What one sidecar saw of a rollout's step since it last told.

    `counts`: how many answers by (((measure * 2 + arm) * CLASSES + size class) * BUCKETS + bucket) * GROUPS + group,
    arm 0 the baseline and 1 the canary. Tallies add up by adding counts. The numbers never change their meaning: a
    later release that counts otherwise counts under new measures.
    """

    rollout: str
    step: int
    counts: dict[int, int]

    def valid(self) -> bool:
        """Whether it can be one of ours: what is not must not be added."""
        if len(self.rollout) > MOST_ID or self.step < 0 or len(self.counts) > MOST_KEYS:
            return False
        return all(0 <= key < KEYS and 0 < count <= MOST_COUNTED for key, count in self.counts.items())


Word = Literal["pass", "fail", "unclear"]


class Verdict(msgspec.Struct, frozen=True):
    """What may be concluded now; `evidence` says from what, in a sentence.

    `pass`: nothing speaks against the canary, and enough was seen (docs/canary.md says what that proves). `fail`: it is
    worse than its margins allow. `unclear`: neither. `canary`, `baseline`: how many answers of each were judged.
    """

    word: Word
    evidence: str
    canary: int
    baseline: int
