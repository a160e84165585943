"""Wagers: fair prices for all that the seller may mean, and capital that grows when he is wrong."""

from itertools import product
from math import comb, exp
from random import Random

import pytest

from sidecar.core.wager import MOST, Spread, Wager, begins, winnings


def chance(n: int, k: int, p: float) -> float:
    return comb(n, k) * p**k * (1 - p) ** (n - k)


@pytest.mark.parametrize("margin", [0.0, 0.005, 0.05])
@pytest.mark.parametrize(("n_canary", "n_base"), [(1, 1), (3, 8), (8, 3), (1, 20)])
@pytest.mark.parametrize("guessed", [0.002, 0.1, 0.5, 0.9])
def test_the_price_is_fair_for_all_that_the_seller_may_mean(
    guessed: float, n_canary: int, n_base: int, margin: float
) -> None:
    """Summed over all that may happen, for shares on the border and inside, whatever was guessed."""
    for actual, inside in product((0.0, 0.01, 0.1, 0.3, 0.5, 0.8, 0.94), (0.0, 0.3)):
        worst = max(0.0, actual + margin - inside)
        expected = [0.0, 0.0, 0.0]
        for bad_canary, bad_base in product(range(n_canary + 1), range(n_base + 1)):
            likely = chance(n_canary, bad_canary, worst) * chance(n_base, bad_base, actual)
            won = winnings(n_canary, bad_canary, n_base, bad_base, guessed, margin)
            for number in range(3):
                expected[number] += likely * exp(won[number])
        assert max(expected) <= 1 + 1e-9


def test_nothing_is_bet_where_there_is_nothing_to_compare() -> None:
    for answers in ((0, 0, 5, 1), (5, 1, 0, 0)):
        assert winnings(*answers, 0.1, 0.0) == [0.0, 0.0, 0.0]
    assert winnings(5, 1, 5, 1, 0.99, 0.01) == [0.0, 0.0, 0.0], "past this border nothing fits"


def test_the_money_is_spent_once() -> None:
    assert sum(begins(block) for block in range(100_000)) == pytest.approx(1.0, abs=1e-4)


def test_no_block_wins_more_than_is_allowed() -> None:
    wager = Wager()
    wager.play([1e9, 1e9, 1e9], 1.0)
    assert wager.capital == pytest.approx(0.5 * exp(MOST))


def test_a_canary_that_turns_bad_late_finds_a_buyer() -> None:
    wager = Wager()
    for _ in range(300):
        wager.play([-1.0, -1.0, -1.0], 1.0)
    assert wager.capital < 1e-4
    blocks = 0
    while wager.capital < 1000:
        wager.play([1.0, 1.0, 1.0], 1.0)
        blocks += 1
    assert blocks < 25


def test_looking_always_finds_a_fault_in_hardly_any_good_canary() -> None:
    """As good as the margin allows: of 400 that are looked at 60 times each, at most a tenth may ever seem bad."""
    chance, seemed = Random(1), 0
    for _ in range(400):
        wager = Wager()
        for _ in range(60):
            bad = sum(chance.random() < 0.06 for _ in range(10))
            base = sum(chance.random() < 0.05 for _ in range(40))
            wager.play(winnings(10, bad, 40, base, 0.05, 0.01), 1.0)
            if wager.capital >= 10:
                seemed += 1
                break
    assert seemed <= 40


def test_spread_is_that_of_independent_answers_or_what_it_was_seen_to_be() -> None:
    chance, calm, wild, slow = Random(2), Spread(), Spread(), Spread()
    level = 0.0
    for number in range(400):
        calm.saw(chance.gauss(5.0, 1.0), 1.0)
        wild.saw(chance.gauss(0.0, 3.0), 1.0)
        if number % 8 == 0:
            level = chance.gauss(0.0, 2.0)
        slow.saw(level + chance.gauss(0.0, 0.5), 1.0)
    assert calm.factor < 2.5, "a difference that stays is no spread"
    assert 5.0 < wild.factor < 15.0
    assert slow.factor > 8.0, "what lasts longer than a block spreads sums more than blocks"
    calm.saw(1.0, 0.0)


def test_one_incident_does_not_blind_the_judge() -> None:
    spread = Spread()
    for _ in range(20):
        spread.saw(0.0, 1.0)
    spread.saw(1000.0, 1.0)
    assert spread.factor < 5.0


def test_capital_has_an_end_that_its_root_can_be_taken_of() -> None:
    wager = Wager()
    for _ in range(1000):
        wager.play([9.0, 9.0, 9.0], 1.0)
    assert 1e200 < wager.capital < 1e300
