"""What a canary may be worse in: each claim a share of its answers, held against its baseline's, block by block.

Times and lengths are shares as well: of answers past a quantile of the baseline's, which for the canary lies a margin
further. So one wager (`core.wager`) fits all, a heavy tail is one answer, and no mean of two distributions is compared.

1. Answers are compared within classes of prompt size, and then added up; for a fault of long prompts alone a quarter of
   a claim's money lies on the classes by themselves.
2. A block's baseline says what the next is compared by: what is usual is never learnt from what is judged by it.
3. Sessions are sticky, so a canary has those that it has: a few that ask for long answers are no fault of its. How much
   more alike the answers of a session are than those of all (`Claim.alike`) is measured in both arms by groups of
   sessions, and evidence is that root of the capital.
"""

from math import ceil, exp, log, sqrt
from typing import Final

from sidecar.core.table import PARTS, Plan
from sidecar.core.verdict import BUCKETS, CLASSES, GROUPS, MEASURES
from sidecar.core.wager import Spread, Wager, winnings

OUTCOME: Final = 0
FIRST_TOKEN: Final = 1
GAP: Final = 2
LENGTH: Final = 3
FINISH: Final = 4

PER_LN: Final = 20.19773057244527  # 14 / ln 2: a bucket is a twentieth wider than the one before
LENGTH_PER_LN: Final = 11.541560327111707  # 8 / ln 2
OTHER_FAILURE: Final = 16
"""The first number of a failure that is none in the stream."""

KNOWN: Final = 30
"""Answers of a baseline, of a size, from which its quantiles and its reasons to end are guessed. That an answer fails
is rare anywhere: failures are held against each other from the first one on."""
RARE: Final = 0.01
RARELY: Final = 10.0
"""The share of failures that is guessed of a baseline, and how many answers of it weigh as much as the guess."""
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

_SIZE: Final = BUCKETS * GROUPS


class Claim:
    """That a share of the canary's answers is larger than the baseline's by more than a margin.

    Which answers: those whose bucket lies in [`low`, `high`); or, where `tail` is not 0, those beyond (`side` 1) or
    before (-1) where a share `tail` of the baseline's lies, and for the canary `shift` buckets past that.
    """

    __slots__ = (
        "_each",
        "_excess",
        "_groups",
        "_least",
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
        self._least = 0 if measure == OUTCOME else KNOWN
        self._whole = Wager()
        self._each = [Wager() for _ in range(CLASSES)] if measure < LENGTH else []
        self._spread = Spread()
        self._groups = [[0] * (2 * GROUPS), [0] * (2 * GROUPS)]
        self._seen = [[0, 0, 0, 0] for _ in range(CLASSES)]
        self._excess = [0.0] * CLASSES
        self._variance = [0.0] * CLASSES

    def settle(self, block: "Block", past: "Past", warm: bool) -> None:
        """A block is over. Until it is `warm`, times teach how they spread, and nothing else."""
        play = warm or self.measure not in (FIRST_TOKEN, GAP)
        spread = self._spread.factor
        all_won = [0.0, 0.0, 0.0]
        excess = variance = 0.0
        met = False
        for size in range(CLASSES):
            place = self.measure * CLASSES + size
            base, canary = block.base.get(place), block.canary.get(place)
            if base is None or canary is None or past.known(place) < self._least:
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

    @property
    def compared(self) -> int:
        """How many answers of the canary were held against some of the baseline."""
        return self._sums(-1)[0]

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

    def _share(self, past: "Past", place: int, edge: int) -> float:
        """What the baseline's share of bad answers is likely to be."""
        if self.measure == OUTCOME:
            bad = past.between(place, self.low, self.high)
            return (bad + RARE * RARELY) / (past.known(place) + RARELY)
        if not self.tail:
            bad = past.between(place, self.low, self.high)
        elif self.side > 0:
            bad = past.between(place, edge, BUCKETS)
        else:
            bad = past.between(place, 0, edge)
        return (bad + 0.1) / (past.known(place) + 0.2)

    def _count(self, answers: "Answers", edge: int, groups: list[int] | None) -> tuple[int, int]:
        """All, and the bad ones; by groups as well, if they are to be: all of each, then the bad of each."""
        if not self.tail:
            low, high = self.low, self.high
        elif self.side > 0:
            low, high = edge, BUCKETS
        else:
            low, high = 0, edge
        if groups is not None:
            _add(groups, 0, answers.groups)
        bad = 0
        for bucket, row in answers.rows.items():
            if low <= bucket < high:
                bad += row[GROUPS]
                if groups is not None:
                    _add(groups, GROUPS, row)
        return answers.count, bad


class Answers:
    """Of one arm, measure and class of size: all, all by group, and a bucket's by group with their sum at the end."""

    __slots__ = ("count", "groups", "rows")

    def __init__(self) -> None:
        self.count = 0
        self.groups = [0] * GROUPS
        self.rows: dict[int, list[int]] = {}

    def add(self, bucket: int, group: int, number: int) -> None:
        """So many more."""
        row = self.rows.get(bucket)
        if row is None:
            row = self.rows[bucket] = [0] * (GROUPS + 1)
        row[group] += number
        row[GROUPS] += number
        self.groups[group] += number
        self.count += number


class Block:
    """A block's answers, by measure and class of size. Lengths and finish reasons are of one class.

    They are sorted as they come: at its end a busy block has a hundred thousand numbers, and the loop waits.
    """

    __slots__ = ("base", "canary")

    def __init__(self, counts: dict[int, int]) -> None:
        self.base: dict[int, Answers] = {}
        self.canary: dict[int, Answers] = {}
        self.add(counts)

    def add(self, counts: dict[int, int]) -> None:
        """Takes a tally's numbers in."""
        for key, number in counts.items():
            place = key // _SIZE
            measure, rest = place // (2 * CLASSES), place % (2 * CLASSES)
            arm = self.canary if rest >= CLASSES else self.base
            size = rest % CLASSES if measure < LENGTH else 0
            at = measure * CLASSES + size
            answers = arm.get(at)
            if answers is None:
                answers = arm[at] = Answers()
            answers.add(key % _SIZE // GROUPS, key % GROUPS, number)


class Past:
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

    def learn(self, block: Block) -> None:
        """What a block's baseline was."""
        for place, answers in block.base.items():
            buckets = self._buckets[place]
            for bucket, row in answers.rows.items():
                buckets[bucket] += row[GROUPS]
            self._known[place] += answers.count
            while self._known[place] > REMEMBERED:
                buckets[:] = [number // 2 for number in buckets]
                self._known[place] = sum(buckets)


def part_of(plan: Plan, step: int) -> float:
    """A step's part of the false alarm rate: half is the first one's, where most faults are met; the others share the
    rest. A step of the whole weight is not judged."""
    judged = sum(each.weight < PARTS for each in plan.steps)
    if judged <= 1:
        return 1.0
    return 0.5 if step == 0 else 0.5 / (judged - 1)


def claims_of(plan: Plan) -> list[Claim]:
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


def _add(groups: list[int], at: int, more: list[int]) -> None:
    """Adds each group's number to what lies from `at` on."""
    for group in range(GROUPS):
        groups[at + group] += more[group]


def _percent(part: int, whole: int) -> str:
    return f"{100.0 * part / whole:.1f} %" if whole else "none"


def _bytes(size: int) -> str:
    """A class of sizes, for people."""
    if size == 0:
        return "less than 512 B"
    if size == CLASSES - 1:
        return "512 KiB and more"
    return "512 B to 1 KiB" if size == 1 else f"{1 << (size - 2)} to {1 << (size - 1)} KiB"
