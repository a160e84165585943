"""Claims: what is usual of a baseline, what of the canary lies past it, and how alike a session's answers are."""

from random import Random

import pytest

from sidecar.core.claim import FIRST_TOKEN, KNOWN, REMEMBERED, Block, Claim, Past, claims_of, part_of
from sidecar.core.table import PARTS, Margins, Plan, Step
from sidecar.core.verdict import BUCKETS, CLASSES, GROUPS, MEASURES

PLACE = FIRST_TOKEN * CLASSES + 2


def key(bucket: int, *, canary: bool, size: int = 2, group: int = 0, measure: int = FIRST_TOKEN) -> int:
    return (((measure * 2 + canary) * CLASSES + size) * BUCKETS + bucket) * GROUPS + group


def block(base: dict[int, int], canary: dict[int, int] | None = None) -> Block:
    counts = {key(bucket, canary=False): n for bucket, n in base.items()}
    return Block(counts | {key(bucket, canary=True): n for bucket, n in (canary or {}).items()})


def half() -> Claim:
    return Claim("first tokens came late", FIRST_TOKEN, 1.0, tail=0.5, side=1, shift=2)


@pytest.mark.parametrize(
    ("buckets", "tail", "side", "edge"),
    [
        ({10: 50, 20: 50}, 0.5, 1, 11),
        ({10: 50, 20: 50}, 0.5, -1, 11),
        (dict.fromkeys(range(100), 1), 0.5, 1, 50),
        (dict.fromkeys(range(100), 1), 0.1, 1, 90),
        (dict.fromkeys(range(100), 1), 0.9, -1, 90),
        ({10: 100}, 0.1, 1, 11),
    ],
)
def test_an_edge_is_where_the_share_is_nearest(buckets: dict[int, int], tail: float, side: int, edge: int) -> None:
    past = Past()
    past.learn(block(buckets))
    assert past.edge(PLACE, tail, side) == edge
    assert past.known(PLACE) == sum(buckets.values())


def test_an_edge_is_looked_for_again_when_much_more_is_known() -> None:
    past = Past()
    past.learn(block({10: 100}))
    before = past.edge(PLACE, 0.5, 1)
    past.learn(block({50: 5}))
    assert past.edge(PLACE, 0.5, 1) == before
    past.learn(block({50: 300}))
    assert past.edge(PLACE, 0.5, 1) > 40


def test_what_is_usual_is_forgotten_by_halves() -> None:
    past = Past()
    for _ in range(3):
        past.learn(block({10: REMEMBERED}))
    assert past.known(PLACE) <= REMEMBERED
    past.learn(block({50: 2 * REMEMBERED}))
    assert past.edge(PLACE, 0.5, 1) == 50


def test_nothing_is_claimed_of_what_is_not_known() -> None:
    past, claim = Past(), half()
    past.learn(block({10: KNOWN - 1}))
    for _ in range(20):
        claim.settle(block({10: 20}, {99: 20}), past, True)
    assert claim.worth() == 0.0 and claim.beyond() == ""


def test_canary_past_the_margin_makes_capital_and_one_within_makes_none() -> None:
    usual = dict.fromkeys(range(20, 40), 2)
    for moved, worse in ((1, False), (2, False), (10, True)):
        past, claim = Past(), half()
        past.learn(block(dict.fromkeys(usual, 10)))
        for _ in range(15):
            claim.settle(block(usual, {bucket + moved: 1 for bucket in usual}), past, True)
        assert (claim.worth() > 1000) == worse
        assert bool(claim.beyond()) == worse
        assert worse or claim.worth() < 1


def test_times_before_it_is_warm_are_no_evidence() -> None:
    past, claim = Past(), half()
    past.learn(block({30: 100}))
    for _ in range(30):
        claim.settle(block({30: 20}, {90: 20}), past, False)
    assert claim.worth() == 0.0 and claim.beyond() == ""


def test_a_class_of_prompts_speaks_for_itself() -> None:
    claim, past = half(), Past()
    base = {key(30 + number % 5, canary=False, size=size): 4 for size in (2, 7) for number in range(5)}
    past.learn(Block(dict.fromkeys(base, 20)))
    for _ in range(40):
        canary = {key(31, canary=True, size=2): 20, key(90, canary=True, size=7): 2}
        claim.settle(Block(base | canary), past, True)
    assert claim.richest() == 7
    assert "of requests of 32 to 64 KiB" in claim.told(claim.richest())


def test_few_sessions_that_differ_are_alike_and_many_are_not() -> None:
    chance = Random(1)
    for alike in (False, True):
        claim, past = half(), Past()
        past.learn(block({30: 60, 31: 60}))
        for _ in range(40):
            counts: dict[int, int] = {}
            for _ in range(60):
                group = chance.randrange(GROUPS)
                late = group < GROUPS // 2 if alike else chance.random() < 0.5
                for canary in (False, True):
                    at = key(40 if late else 20, canary=canary, group=group)
                    counts[at] = counts.get(at, 0) + 1
            claim.settle(Block(counts), past, True)
        assert (claim.alike() > 20) == alike
        assert alike or claim.alike() < 1.5


def test_all_money_is_spent_once() -> None:
    claims = claims_of(Plan("v1", (Step(500, 1.0, 1),)))
    assert sum(claim.weight for claim in claims) == pytest.approx(1.0)
    assert {claim.measure for claim in claims} == set(range(MEASURES))


@pytest.mark.parametrize("count", range(1, 21))
@pytest.mark.parametrize("whole", [False, True])
def test_all_steps_together_have_one_false_alarm_rate(count: int, whole: bool) -> None:
    steps = tuple(Step(100 * (number + 1), 1.0, 1) for number in range(count))
    plan = Plan("v1", steps + ((Step(PARTS, 1.0, 1),) if whole else ()))
    assert sum(part_of(plan, step) for step in range(count)) == pytest.approx(1.0)


def test_margins_of_one_allow_nothing_and_are_legal() -> None:
    for claim in claims_of(Plan("v1", (Step(500, 1.0, 1),), margins=Margins(0.0, 1.0, 1.0, 0.0, 1.0, 0.0))):
        assert claim.shift == 0 and claim.margin == 0.0


def test_a_block_is_the_same_however_its_tallies_came() -> None:
    """They are sorted as they come: at its end the loop waits for what is left to do."""
    chance = Random(6)
    counts = {
        key(
            chance.randrange(BUCKETS),
            canary=chance.random() < 0.5,
            size=chance.randrange(CLASSES),
            group=chance.randrange(GROUPS),
            measure=chance.randrange(MEASURES),
        ): chance.randrange(1, 9)
        for _ in range(3000)
    }
    whole, parts = Block(counts), Block({})
    for each, number in counts.items():
        parts.add({each: 1})
        if number > 1:
            parts.add({each: number - 1})
    for arm, other in ((whole.base, parts.base), (whole.canary, parts.canary)):
        assert {at: (a.count, a.groups, a.rows) for at, a in arm.items()} == {
            at: (a.count, a.groups, a.rows) for at, a in other.items()
        }
    assert sum(a.count for arm in (whole.base, whole.canary) for a in arm.values()) == sum(counts.values())
    assert all(a.count == sum(a.groups) == sum(row[GROUPS] for row in a.rows.values()) for a in whole.base.values())
