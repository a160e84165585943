"""A canary held against its baseline: what ended of each, and what may be concluded from it at any time.

Every sidecar counts what it sees (`Trial.observe`), tells it now and then (`take`), and reads what all have told from
the log (`add`): all that read the same log come to the same verdict, and whoever sees it first may act on it. So
nothing here depends on who counted, or on any clock but the log's.

Why no p-value at the end of a step: a canary that fails half its answers shall not wait for the end, and a p-value that
is looked at every second finds a fault in every canary. `core.wager` has what may be looked at always.

1. Six judgements (`table.Margins`), each a claim about shares, or several: of the judged answers (`kernel.outcome`: an
   answer that says something about the client, or nothing, is none) that failed; that broke within their stream; of the
   first tokens and mean token gaps, that came later than the margin allows past the baseline's median and its 90th
   percentile; of the whole answers, that were longer or shorter than the margin allows past the median, or past where a
   tenth is; that ended for each reason.
2. Like with like: answers are compared within classes of prompt size and within blocks of time, and then added up
   (`core.claim`).
3. One false alarm rate for everything: the wagers of all claims are of one sum of money, and a step has its part of the
   plan's `false_alarm` (`core.claim.part_of`). It fails when the sum has grown by one over that part.
4. What lies past the first 90 s (or half of the step, if it is short) is held against a canary's times, not what lies
   before: caches that fill, or a share that just grew, are no slowness.
5. An attempt that waited for its first token until it was given up is later than all that came: it counts by its rank,
   its deadline is no measured time. Where the client left first, how long it waited is what is known: of a canary that
   hangs nothing else may ever be seen.
6. What could not be held against anything proves nothing: a canary whose answers had none of the baseline's beside
   them, to prompts as large and at the same time, does not pass; nor one that fails plainly more often, all together.
"""

from math import log, sqrt
from typing import Final
from zlib import crc32

from sidecar.core.claim import (
    FINISH,
    FIRST_TOKEN,
    GAP,
    LENGTH,
    LENGTH_PER_LN,
    OTHER_FAILURE,
    PER_LN,
    SUSPECT_ALONE,
    Block,
    Claim,
    Past,
    claims_of,
    part_of,
)
from sidecar.core.table import Plan
from sidecar.core.verdict import BUCKETS, CLASSES, GROUPS, MOST_COUNTED, MOST_KEYS, Tally, Verdict
from sidecar.kernel.outcome import Ending, Result

__all__ = ["Tally", "Trial", "Verdict", "group_of"]

LEAST_FIRST_S: Final = 0.001  # the buckets end at 5 minutes
LEAST_GAP_S: Final = 0.0001

IN_STREAM: Final[dict[Ending, int]] = {
    Ending.TRUNCATED: 1,
    Ending.ERROR_IN_BAND: 2,
    Ending.TOKEN_GAP_TIMEOUT: 3,
    Ending.EMPTY: 4,
    Ending.ABORTED: 5,
}
"""Failures under a good head, which only who reads the stream can see; by their numbers in a tally."""
FAILED: Final[dict[Ending, int]] = {
    **IN_STREAM,
    Ending.CONNECT_FAILED: 17,
    Ending.RESET_BEFORE_HEAD: 18,
    Ending.BAD_BYTES: 19,
    Ending.SERVER_ERROR: 20,
    Ending.HEAD_TIMEOUT: 21,
    Ending.TTFT_TIMEOUT: 22,
}
FINISHES: Final[dict[str, int]] = {"stop": 0, "length": 1, "tool_calls": 2, "function_call": 2}
OTHER_FINISH: Final = 3

BLOCK_MS: Final = 10_000.0
"""Longer than what makes answers alike lasts mostly: a batch, a burst, an engine that stalls."""
LEAST_BLOCK_MS: Final = 100.0
BLOCKS: Final = 30
"""In a step's least time, at least: a step of 10 s has blocks of a third of a second."""
LEAST_BLOCKS: Final = 5
"""Before anything passes: so many it takes to fail (`wager.MOST`)."""
WARM_MS: Final = 90_000.0
WARM: Final = 0.5
_SUCCESS: Final = Result.SUCCESS
_FAILURE: Final = Result.FAILURE
_COMPLETE: Final = Ending.COMPLETE
_BUCKET: Final = GROUPS
_SIZE: Final = BUCKETS * _BUCKET
_ARM: Final = CLASSES * _SIZE
_MEASURE: Final = 2 * _ARM
_CANARY: Final = _ARM
_FIRST: Final = FIRST_TOKEN * _MEASURE
_GAP: Final = GAP * _MEASURE
_LENGTH: Final = LENGTH * _MEASURE
_FINISH: Final = FINISH * _MEASURE
_LAST: Final = BUCKETS - 1
_WAITED: Final = frozenset({Ending.HEAD_TIMEOUT, Ending.TTFT_TIMEOUT, Ending.LATE})


class Trial:
    """One step of a rollout: what this sidecar saw of it, and what all of them did."""

    __slots__ = (
        "_baseline",
        "_begin_ms",
        "_block",
        "_block_ms",
        "_blocks",
        "_canary",
        "_claims",
        "_failed",
        "_failures",
        "_in_block",
        "_judged",
        "_margin",
        "_mixed",
        "_needed",
        "_open_ms",
        "_past",
        "_samples",
        "_seen",
        "_suspect",
        "_warm_ms",
        "rollout",
        "step",
    )

    def __init__(self, rollout: str, step: int, canary: str, baseline: str, plan: Plan) -> None:
        self.rollout = rollout
        self.step = step
        self._canary = canary
        self._baseline = baseline
        self._seen: dict[int, int] = {}
        self._mixed = 0

        steps = plan.steps
        min_ms = steps[step].min_s * 1000.0 if step < len(steps) else 0.0
        self._samples = steps[step].min_samples if step < len(steps) else 0
        self._needed = 1.0 / (plan.false_alarm * part_of(plan, step))
        self._block_ms = max(LEAST_BLOCK_MS, min(BLOCK_MS, min_ms / BLOCKS))
        self._warm_ms = min(WARM_MS, WARM * min_ms)
        self._claims = claims_of(plan)
        self._past = Past()
        self._block = Block({})
        self._blocks = 0
        self._begin_ms = -1
        self._open_ms = -1
        self._judged = [0, 0]
        self._in_block = [0, 0]
        self._failures = [0, 0]
        self._margin = plan.margins.success
        self._failed = ""
        self._suspect = ""

    # Counting: on the request path.

    def observe(
        self,
        version: str,
        size_bytes: int,
        ending: Ending,
        result: Result,
        first_token_s: float,
        gap_s: float,
        tokens: int,
        finish: str,
        group: int = -1,
    ) -> None:
        """An attempt ended. `size_bytes` of the body stands for the prompt; `gap_s` is the mean after the first token;
        nan, 0 tokens and "" are what is not known; of a client that left before it, `first_token_s` is how long that
        one waited. `group` of its session; -1: it has none, and is like no other. Attempts on other versions are
        ignored."""
        if version == self._canary:
            arm = _CANARY
        elif version == self._baseline:
            arm = 0
        else:
            return
        if group < 0:
            # By turns would line up with a balancer that goes by turns; the upper bits of an LCG do not.
            mixed = self._mixed = (self._mixed * 25173 + 13849) & 0xFFFF
            group = mixed >> 11
        seen = self._seen
        key = arm + min(CLASSES - 1, (size_bytes >> 9).bit_length()) * _SIZE + group
        if result is _SUCCESS:
            seen[key] = seen.get(key, 0) + 1
        elif result is _FAILURE:
            failed = key + FAILED.get(ending, OTHER_FAILURE) * _BUCKET
            seen[failed] = seen.get(failed, 0) + 1
        if first_token_s == first_token_s:
            first = key + _FIRST + _bucket(first_token_s / LEAST_FIRST_S) * _BUCKET
            seen[first] = seen.get(first, 0) + 1
        elif ending in _WAITED:
            first = key + _FIRST + _LAST * _BUCKET
            seen[first] = seen.get(first, 0) + 1
        if gap_s == gap_s:
            gap = key + _GAP + _bucket(gap_s / LEAST_GAP_S) * _BUCKET
            seen[gap] = seen.get(gap, 0) + 1
        if ending is _COMPLETE:
            if tokens > 0:
                length = key + _LENGTH + min(_LAST, int(log(tokens) * LENGTH_PER_LN)) * _BUCKET
                seen[length] = seen.get(length, 0) + 1
            if finish:
                ended = key + _FINISH + FINISHES.get(finish, OTHER_FINISH) * _BUCKET
                seen[ended] = seen.get(ended, 0) + 1

    def take(self) -> Tally | None:
        """What was observed since the last call; None: nothing."""
        if not self._seen:
            return None
        seen, rest = self._seen, {}
        if len(seen) > MOST_KEYS:
            kept = list(seen.items())
            seen, rest = dict(kept[:MOST_KEYS]), dict(kept[MOST_KEYS:])
        for key, count in seen.items():
            if count > MOST_COUNTED:
                seen[key] = MOST_COUNTED
                rest[key] = count - MOST_COUNTED
        self._seen = rest
        return Tally(self.rollout, self.step, seen)

    # Judging: what the log says.

    def add(self, tally: Tally, at_ms: int) -> None:
        """Takes any sidecar's tally in, this one's too, in the log's order. `at_ms`: when the log's server got it.

        One of another rollout or step, or one that cannot be a tally, is left out.
        """
        if tally.rollout != self.rollout or tally.step != self.step or not tally.valid():
            return
        if self._open_ms < 0 or at_ms < self._open_ms:
            self._open_ms = at_ms  # the log's server may be another now, whose clock is behind
            self._begin_ms = min(self._begin_ms, at_ms)
        elif at_ms - self._open_ms >= self._block_ms and self._in_block[0] and self._in_block[1]:
            self._close()
            self._open_ms = at_ms
        self._block.add(tally.counts)
        judged = self._judged
        for key, count in tally.counts.items():
            if key < _GAP:
                arm = 1 if key % _MEASURE >= _CANARY else 0
                self._in_block[arm] += count
                if arm and self._begin_ms < 0:
                    self._begin_ms = at_ms
                if key < _MEASURE:
                    judged[arm] += count
                    if key % _SIZE >= _BUCKET:
                        self._failures[arm] += count

    def verdict(self) -> Verdict:
        """What may be concluded from all that was added; once `fail`, always `fail`."""
        base, canary = self._judged
        if self._failed:
            return Verdict("fail", self._failed, canary, base)
        if canary < self._samples:
            return Verdict("unclear", f"{canary} of {self._samples} answers that the step asks for", canary, base)
        if self._blocks < LEAST_BLOCKS:
            told = "no answers of the baseline beside it" if not base else "too short a time to tell"
            return Verdict("unclear", told, canary, base)
        suspect = self._suspect or self._plainly()
        if suspect:
            return Verdict("unclear", f"not enough to tell: {suspect}", canary, base)
        compared = self._claims[0].compared
        if 2 * compared < self._samples:
            told = f"only {compared} of {canary} answers had any of the baseline beside them, to prompts as large"
            return Verdict("unclear", told, canary, base)
        return Verdict("pass", f"nothing beyond its margin: {self._summary()}", canary, base)

    def _close(self) -> None:
        """A block is over: the wagers are settled, and the baseline is learnt from."""
        block = self._block
        warm = self._begin_ms >= 0 and self._open_ms - self._begin_ms >= self._warm_ms
        for claim in self._claims:
            claim.settle(block, self._past, warm)
        self._past.learn(block)
        self._block = Block({})
        self._in_block = [0, 0]
        self._blocks += 1
        if not self._failed:
            self._conclude()

    def _conclude(self) -> None:
        capital, most = 0.0, 0.0
        first: Claim | None = None
        for claim in self._claims:
            worth = claim.worth()
            capital += worth
            if first is None or worth > most:
                first, most = claim, worth
        self._suspect = ""
        if first is None:
            return
        if capital >= self._needed:
            self._failed = f"{first.told(first.richest())} (odds of {capital:,.0f} to 1 against chance)"
        elif capital * capital >= self._needed:
            self._suspect = first.told(first.richest())
        else:
            for claim in self._claims:
                self._suspect = claim.beyond()
                if self._suspect:
                    break

    def _plainly(self) -> str:
        """Whether more failed than of the baseline's, all sizes and times together: no proof, and no pass either."""
        base, canary = self._judged
        if not base or not canary:
            return ""
        p_base, p_canary = self._failures[0] / base, self._failures[1] / canary
        noise = (p_canary * (1.0 - p_canary) + 0.25 / canary) / canary + (p_base * (1.0 - p_base) + 0.25 / base) / base
        if p_canary - p_base - self._margin <= SUSPECT_ALONE * sqrt(noise):
            return ""
        of_base = f"of the baseline's {base:,}, {100.0 * p_base:.1f} %"
        return f"{100.0 * p_canary:.1f} % of all {canary:,} answers failed; {of_base}"

    def _summary(self) -> str:
        return "; ".join(claim.brief() for claim in self._claims if claim.briefed)


def group_of(session: str) -> int:
    """Of a session's id: the same on every sidecar."""
    return crc32(session.encode("utf-8", "surrogatepass")) % GROUPS


def _bucket(ratio: float) -> int:
    """Of a time, in its least."""
    if ratio <= 1.0:
        return 0
    return min(_LAST, int(log(min(ratio, 1e12)) * PER_LN))
