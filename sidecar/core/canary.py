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
2. Like with like: answers are compared within classes of prompt size and within blocks of time, and then added up. A
   fault of long prompts alone is looked for as well: a quarter of a claim's money lies on the classes by themselves.
3. One false alarm rate for everything: the wagers of all claims are of one sum of money, and a step has its part of the
   plan's `false_alarm` (`_part_of`). It fails when the sum has grown by one over that part.
4. What lies past the first 90 s (or 0.3 of the step, if it is short) is held against a canary's times, not what lies
   before: caches that fill, or a share that just grew, are no slowness.
5. An attempt that waited for its first token until it was given up is later than all that came: it counts by its rank,
   its deadline is no measured time.
6. A block's baseline says what the next is compared by: what is usual is never learnt from what is judged by it.
7. Sessions are sticky, so a canary has those that it has: a few that ask for long answers are no fault of its. How much
   more alike the answers of a session are than those of all (`Claim.alike`: by groups of sessions, as few answers of
   many groups are worth as many as there are groups) is measured in both arms, and evidence is as strong as that root
   of the capital.
"""

from math import ceil, exp, log, sqrt
from typing import Final
from zlib import crc32

from sidecar.core.table import PARTS, Plan
from sidecar.core.verdict import BUCKETS, CLASSES, GROUPS, MEASURES, MOST_KEYS, Tally, Verdict
from sidecar.core.wager import Spread, Wager, winnings
from sidecar.kernel.outcome import Ending, Result

__all__ = ["Tally", "Trial", "Verdict", "group_of"]

OUTCOME: Final = 0
FIRST_TOKEN: Final = 1
GAP: Final = 2
LENGTH: Final = 3
FINISH: Final = 4

PER_LN: Final = 20.19773057244527  # 14 / ln 2: a bucket is a twentieth wider than the one before
LENGTH_PER_LN: Final = 11.541560327111707  # 8 / ln 2
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
OTHER_FAILURE: Final = 16
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
WARM: Final = 0.3
KNOWN: Final = 30
"""Answers of a baseline, of a size, from which its shares are guessed."""
REMEMBERED: Final = 4000
"""Answers of a baseline, of a size and measure, before they are halved: what is usual follows the hours of a day."""
STALE: Final = 1.1
"""How much more must be known before a quantile is looked for again."""
TOGETHER: Final = 0.75
"""Of a claim's money, on all sizes of prompts together; the rest is evenly on each."""
EASY: Final = 0.4
"""How much more alike than others a session's answers may seem by chance (a standard error, of 32 groups)."""
SUSPECT: Final = 1.0
"""Standard errors past its margin at which a claim keeps a canary from passing: all answers together, ..."""
SUSPECT_ALONE: Final = 2.5
"""... and those of one of many classes."""

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
        "_in_block",
        "_judged",
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
        self._needed = 1.0 / (plan.false_alarm * _part_of(plan, step))
        self._block_ms = max(LEAST_BLOCK_MS, min(BLOCK_MS, min_ms / BLOCKS))
        self._warm_ms = min(WARM_MS, WARM * min_ms)
        self._claims = _claims(plan)
        self._past = _Past()
        self._block: dict[int, int] = {}
        self._blocks = 0
        self._begin_ms = -1
        self._open_ms = -1
        self._judged = [0, 0]
        self._in_block = [0, 0]
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
        nan, 0 tokens and "" are what is not known. `group` of its session; -1: it has none, and is like no other.
        Attempts on other versions are ignored."""
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
        self._seen = rest
        return Tally(self.rollout, self.step, seen)

    # Judging: what the log says.

    def add(self, tally: Tally, at_ms: int) -> None:
        """Takes any sidecar's tally in, this one's too, in the log's order. `at_ms`: when the log's server got it.

        One of another rollout or step, or one that cannot be a tally, is left out.
        """
        if tally.rollout != self.rollout or tally.step != self.step or not tally.valid():
            return
        if self._open_ms < 0:
            self._open_ms = at_ms
        elif at_ms - self._open_ms >= self._block_ms and self._in_block[0] and self._in_block[1]:
            self._close()
            self._open_ms = at_ms
        block, judged = self._block, self._judged
        for key, count in tally.counts.items():
            block[key] = block.get(key, 0) + count
            if key < _MEASURE:
                arm = 1 if key >= _CANARY else 0
                judged[arm] += count
                self._in_block[arm] += count
                if arm and self._begin_ms < 0:
                    self._begin_ms = at_ms

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
        if self._suspect:
            return Verdict("unclear", f"not enough to tell: {self._suspect}", canary, base)
        return Verdict("pass", f"nothing beyond its margin: {self._summary()}", canary, base)

    def _close(self) -> None:
        """A block is over: the wagers are settled, and the baseline is learnt from."""
        block = _Block(self._block)
        warm = self._begin_ms >= 0 and self._open_ms - self._begin_ms >= self._warm_ms
        for claim in self._claims:
            claim.settle(block, self._past, warm)
        self._past.learn(block)
        self._block = {}
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

    def _summary(self) -> str:
        return "; ".join(claim.brief() for claim in self._claims if claim.briefed)


class Claim:
    """That a share of the canary's answers is larger than the baseline's by more than a margin.

    Which answers: those whose bucket lies in [`low`, `high`); or, where `tail` is not 0, those beyond (`side` 1) or
    before (-1) where a share `tail` of the baseline's lies, and for the canary `shift` buckets past that.
    """

    __slots__ = (
        "_each",
        "_excess",
        "_groups",
        "_seen",
        "_spread",
        "_variance",
        "_whole",
        "briefed",
        "high",
        "low",
        "margin",
        "measure",
        "shift",
        "side",
        "tail",
        "weight",
        "words",
    )

    def __init__(
        self,
        words: str,
        measure: int,
        weight: float,
        *,
        margin: float = 0.0,
        low: int = 0,
        high: int = 0,
        tail: float = 0.0,
        side: int = 0,
        shift: int = 0,
        briefed: bool = False,
    ) -> None:
        self.words = words
        self.measure = measure
        self.weight = weight
        self.margin = margin
        self.low = low
        self.high = high
        self.tail = tail
        self.side = side
        self.shift = shift
        self.briefed = briefed
        self._whole = Wager()
        self._each = [Wager() for _ in range(CLASSES)] if measure < LENGTH else []
        self._spread = Spread()
        self._groups = [[0] * (2 * GROUPS), [0] * (2 * GROUPS)]
        self._seen = [[0, 0, 0, 0] for _ in range(CLASSES)]
        self._excess = [0.0] * CLASSES
        self._variance = [0.0] * CLASSES

    def settle(self, block: "_Block", past: "_Past", warm: bool) -> None:
        """A block is over. Until it is `warm`, times teach how they spread, and nothing else."""
        play = warm or self.measure not in (FIRST_TOKEN, GAP)
        spread = self._spread.factor
        all_won = [0.0, 0.0, 0.0]
        excess = variance = 0.0
        met = False
        for size in range(CLASSES):
            place = self.measure * CLASSES + size
            base, canary = block.base.get(place), block.canary.get(place)
            if base is None or canary is None or past.known(place) < KNOWN:
                continue
            edge = past.edge(place, self.tail, self.side) if self.tail else 0
            share = self._share(past, place, edge)
            n_base, bad_base = self._count(base, edge, self._groups[0] if play else None)
            moved = edge + self.shift * self.side
            n_canary, bad_canary = self._count(canary, moved, self._groups[1] if play else None)
            over = bad_canary - n_canary * (bad_base / n_base + self.margin)
            p_base = (bad_base + 0.5) / (n_base + 1.0)
            p_canary = (bad_canary + 0.5) / (n_canary + 1.0)
            noise = n_canary * p_canary * (1.0 - p_canary) + n_canary * n_canary / n_base * p_base * (1.0 - p_base)
            excess += over
            variance += noise
            met = True
            if not play:
                continue
            seen = self._seen[size]
            seen[0] += n_canary
            seen[1] += bad_canary
            seen[2] += n_base
            seen[3] += bad_base
            self._excess[size] += over
            self._variance[size] += noise
            won = winnings(n_canary, bad_canary, n_base, bad_base, share, self.margin)
            for number in range(3):
                all_won[number] += won[number]
            if self._each:
                self._each[size].play(won, spread)
        if met:
            self._spread.saw(excess, variance)
            if play:
                self._whole.play(all_won, spread)

    def worth(self) -> float:
        """What the capital of its wagers is as evidence, of all the money there was for all claims."""
        most = whole = self._whole.capital
        alone = [wager.capital for wager in self._each]
        if alone:
            most = max(most, max(alone))
        if most > 1.0:  # less is no evidence, however alike
            root = 1.0 / self.alike()
            whole = exp(log(whole) * root) if whole > 0.0 else 0.0
            alone = [exp(log(each) * root) if each > 0.0 else 0.0 for each in alone]
        if not alone:
            return self.weight * whole
        return self.weight * (TOGETHER * whole + (1.0 - TOGETHER) * sum(alone) / CLASSES)

    def alike(self) -> float:
        """How many answers of a session say as much as one that stands for itself; from 1.

        The variance of the groups' bad answers by what it would be of independent ones. Both arms' sessions are as
        large, so the arm where it is larger says it for both: a canary may have too few sessions to tell.
        """
        return max(1.0, _alike(self._groups[0]) - EASY, _alike(self._groups[1]) - EASY)

    def richest(self) -> int:
        """The class of prompts that says most; -1: all together."""
        best, most = -1, self._whole.capital * TOGETHER
        for size, wager in enumerate(self._each):
            if wager.capital * (1.0 - TOGETHER) / CLASSES > most:
                best, most = size, wager.capital * (1.0 - TOGETHER) / CLASSES
        return best

    def beyond(self) -> str:
        """What keeps it from passing: all answers together lie past the margin, or those of a class far past it."""
        spread = self._spread.factor
        alike = 0.0
        for size in range(-1, CLASSES if self._each else 0):
            if size < 0:
                excess, variance, limit = sum(self._excess), sum(self._variance), SUSPECT
            else:
                excess, variance, limit = self._excess[size], self._variance[size], SUSPECT_ALONE
            if excess > limit * sqrt(variance * spread):
                alike = alike or self.alike()
                if excess > limit * sqrt(variance * spread * alike):
                    return self.told(size)
        return ""

    def told(self, size: int) -> str:
        """For people: a class of prompts, or (-1) all."""
        n_canary, bad_canary, n_base, bad_base = self._sums(size)
        where = "" if size < 0 else f", of requests of {_bytes(size)}"
        past = " past that alone" if self.tail else ""
        return (
            f"{_percent(bad_canary, n_canary)} of {n_canary:,} {self.words}{where}; "
            f"of the baseline's {n_base:,}, {_percent(bad_base, n_base)}{past}"
        )

    def brief(self) -> str:
        """In a few words."""
        n_canary, bad_canary, n_base, bad_base = self._sums(-1)
        return f"{_percent(bad_canary, n_canary)} {self.words} ({_percent(bad_base, n_base)})"

    def _sums(self, size: int) -> tuple[int, int, int, int]:
        rows = self._seen if size < 0 else [self._seen[size]]
        return sum(r[0] for r in rows), sum(r[1] for r in rows), sum(r[2] for r in rows), sum(r[3] for r in rows)

    def _share(self, past: "_Past", place: int, edge: int) -> float:
        """What the baseline's share of bad answers is likely to be."""
        if not self.tail:
            bad = past.between(place, self.low, self.high)
        elif self.side > 0:
            bad = past.between(place, edge, BUCKETS)
        else:
            bad = past.between(place, 0, edge)
        return (bad + 0.1) / (past.known(place) + 0.2)

    def _count(self, answers: list[tuple[int, int]], edge: int, groups: list[int] | None) -> tuple[int, int]:
        """All, and the bad ones; by groups as well, if they are to be: all of each, then the bad of each."""
        if not self.tail:
            low, high = self.low, self.high
        elif self.side > 0:
            low, high = edge, BUCKETS
        else:
            low, high = 0, edge
        count = bad = 0
        for place, number in answers:
            count += number
            found = low <= place // GROUPS < high
            if found:
                bad += number
            if groups is not None:
                group = place % GROUPS
                groups[group] += number
                if found:
                    groups[GROUPS + group] += number
        return count, bad


class _Block:
    """A block's answers: (bucket * GROUPS + group, number) by measure and class of size.

    Lengths and finish reasons are of one class.
    """

    __slots__ = ("base", "canary")

    def __init__(self, counts: dict[int, int]) -> None:
        self.base: dict[int, list[tuple[int, int]]] = {}
        self.canary: dict[int, list[tuple[int, int]]] = {}
        for key, number in counts.items():
            place = key // _SIZE
            measure, rest = place // (2 * CLASSES), place % (2 * CLASSES)
            arm = self.canary if rest >= CLASSES else self.base
            size = rest % CLASSES if measure < LENGTH else 0
            at = measure * CLASSES + size
            if at not in arm:
                arm[at] = []
            arm[at].append((key % _SIZE, number))


class _Past:
    """What was usual of the baseline, by measure and class of size."""

    __slots__ = ("_buckets", "_edges", "_known")

    def __init__(self) -> None:
        places = MEASURES * CLASSES
        self._buckets: list[list[int]] = [[0] * BUCKETS for _ in range(places)]
        self._known = [0] * places
        self._edges: dict[tuple[int, float, int], tuple[int, int]] = {}

    def known(self, place: int) -> int:
        """How many answers."""
        return self._known[place]

    def between(self, place: int, low: int, high: int) -> int:
        """How many of them in these buckets."""
        return sum(self._buckets[place][low:high])

    def edge(self, place: int, tail: float, side: int) -> int:
        """The bucket from which on (`side` 1) a share of about `tail` lies, or (-1) before which."""
        known = self._known[place]
        found = self._edges.get((place, tail, side))
        if found is not None and known / STALE < found[1] < known * STALE:
            return found[0]
        wanted = known * ((1.0 - tail) if side > 0 else tail)
        below = 0
        edge = 0
        for number in self._buckets[place]:
            # The edge whose share is nearest: this bucket's lower one, or the next.
            if below + number / 2.0 >= wanted:
                break
            below += number
            edge += 1
        self._edges[(place, tail, side)] = (edge, known)
        return edge

    def learn(self, block: _Block) -> None:
        """What a block's baseline was."""
        for place, answers in block.base.items():
            buckets = self._buckets[place]
            for bucket, number in answers:
                buckets[bucket // GROUPS] += number
                self._known[place] += number
            while self._known[place] > REMEMBERED:
                buckets[:] = [number // 2 for number in buckets]
                self._known[place] = sum(buckets)


def group_of(session: str) -> int:
    """Of a session's id: the same on every sidecar."""
    return crc32(session.encode("utf-8", "surrogatepass")) % GROUPS


def _alike(groups: list[int]) -> float:
    """By how much the shares of bad answers of groups vary more than independent answers would; 0: not known."""
    count = bad = 0
    squares = 0.0
    for group in range(GROUPS):
        count += groups[group]
        bad += groups[GROUPS + group]
        squares += groups[group] * groups[group]
    if not 0 < bad < count:
        return 0.0
    share = bad / count
    apart = 0.0
    for group in range(GROUPS):
        off = groups[GROUPS + group] - groups[group] * share
        apart += off * off
    # As many groups as there would be, were they equally large; one is what the mean takes.
    equal = count * count / squares
    return apart / (count * share * (1.0 - share)) * (equal / (equal - 1.0) if equal > 1.5 else 1.0)


def _part_of(plan: Plan, step: int) -> float:
    """A step's part of the false alarm rate: half is the first one's, where most faults are met; the others share the
    rest. A step of the whole weight is not judged."""
    judged = sum(each.weight < PARTS for each in plan.steps)
    if judged <= 1:
        return 1.0
    return 0.5 if step == 0 else 0.5 / (judged - 1)


def _claims(plan: Plan) -> list[Claim]:
    """A plan's judgements: failures and first tokens have a quarter of the money each, the others an eighth."""
    margins = plan.margins
    quarter, part = 0.25, 0.125
    broke = "answers broke in their stream"
    claims = [
        Claim("answers failed", OUTCOME, quarter, margin=margins.success, low=1, high=BUCKETS, briefed=True),
        Claim(broke, OUTCOME, part, margin=margins.errors, low=1, high=OTHER_FAILURE, briefed=True),
    ]
    for tail, usual in ((0.5, "the baseline's median"), (0.1, "what nine of ten of the baseline take")):
        for measure, what, limit, money in (
            (FIRST_TOKEN, "first tokens came", margins.first_token, quarter),
            (GAP, "mean gaps were", margins.token_gap, part),
        ):
            words = f"{what} past {limit:g} times {usual}"
            shift = _shift(limit, PER_LN)
            claims.append(Claim(words, measure, money / 2.0, tail=tail, side=1, shift=shift, briefed=tail == 0.5))
    shift = _shift(margins.length, LENGTH_PER_LN)
    for side, than in ((1, f"past {margins.length:g} times"), (-1, f"under 1/{margins.length:g} of")):
        for tail, usual in ((0.5, "median"), (0.1 if side > 0 else 0.9, "longest tenth's least")):
            words = f"answers had a length {than} the baseline's {usual}"
            claims.append(Claim(words, LENGTH, part / 4.0, tail=tail, side=side, shift=shift))
    for number, word in enumerate(("stop", "length", "tool_calls", "another reason")):
        words = f"answers ended for {word}"
        claims.append(Claim(words, FINISH, part / 4.0, margin=margins.finish, low=number, high=number + 1))
    return claims


def _shift(limit: float, per_ln: float) -> int:
    """A factor in buckets, rounded up."""
    return max(0, ceil(log(limit) * per_ln - 1e-9)) if limit > 1.0 else 0


def _bucket(ratio: float) -> int:
    """Of a time, in its least."""
    if ratio <= 1.0:
        return 0
    return min(_LAST, int(log(min(ratio, 1e12)) * PER_LN))


def _percent(part: int, whole: int) -> str:
    return f"{100.0 * part / whole:.1f} %" if whole else "none"


def _bytes(size: int) -> str:
    """A class of sizes, for people."""
    if size == 0:
        return "less than 512 B"
    if size == CLASSES - 1:
        return "512 KiB and more"
    return "512 B to 1 KiB" if size == 1 else f"{1 << (size - 2)} to {1 << (size - 1)} KiB"
