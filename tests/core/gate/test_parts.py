"""Who has used more than its part of a service lately."""

import math
import random

import pytest

from sidecar.core.gate.parts import LOOKED, MORE, SLACK, SPAN_S, SPANS, Parts, Payer


def known(parts: Parts, *tenants: str, weight: float = 1.0) -> list[Payer]:
    payers = [parts.of(tenant, weight) for tenant in tenants]
    for payer in payers:
        parts.comes(payer)
    return payers


def is_behind(payer: Payer) -> bool:
    return payer.behind


def test_who_uses_more_than_its_part_goes_behind_and_comes_back_when_the_others_caught_up() -> None:
    parts = Parts(0.0)
    flood, other = known(parts, "flood", "other")
    parts.use(flood, 1000, 0.0)
    assert parts.turned == [flood] and is_behind(flood)
    parts.turned.clear()
    parts.use(other, 950, 0.0)
    parts.look(0.0)
    assert is_behind(flood)
    parts.use(other, 50, 0.0)
    parts.look(0.0)
    assert parts.turned == [flood] and not is_behind(flood)


def test_who_is_alone_has_all_of_it() -> None:
    parts = Parts(0.0)
    (alone,) = known(parts, "alone")
    for second in range(100):
        parts.use(alone, 1000, float(second))
        assert not alone.behind


@pytest.mark.parametrize("weight", [0.01, 0.3, 7.0, 1000.0])
def test_who_is_alone_has_all_of_it_whatever_its_weight(weight: float) -> None:
    parts = Parts(0.0)
    (alone,) = known(parts, "alone", weight=weight)
    for step in range(2000):
        parts.use(alone, 137 + step % 91, step * 0.7)
        assert not alone.behind


def test_what_one_gets_back_late_is_what_it_gave_and_is_not_taken_from_the_others() -> None:
    parts = Parts(0.0)
    late, *others = known(parts, *"abcdefgh")
    for other in others:
        parts.use(other, 1000, 0.0)
    for _ in range(10):
        parts.use(late, 1000, 0.0)
    for other in others:
        parts.use(other, 10, 2 * SPAN_S)
    for _ in range(10):
        parts.settle(late, -900, 0.0)
    counts = math.exp(2.0)
    assert late.used == pytest.approx(1000.0)
    assert [other.used for other in others] == pytest.approx([1000.0 + 10.0 * counts] * 7)
    parts.settle(late, -100_000, 0.0)
    assert late.used == 0.0
    assert parts._total == pytest.approx(7 * (1000.0 + 10.0 * counts))
    assert not any(parts.floods(other) for other in others)


def test_where_all_were_idle_for_long_nobody_floods() -> None:
    parts = Parts(0.0)
    flood, other = known(parts, "flood", "other")
    parts.use(flood, 1000, 0.0)
    parts.goes(flood, 0.0)
    parts.goes(other, SPAN_S + 1.0)  # the flood counts no more
    assert flood.behind and not parts.floods(other)
    parts.forget(other)
    assert flood.behind and not parts.floods(flood)


def test_what_was_used_fades_for_all_alike() -> None:
    parts = Parts(0.0)
    early, late = known(parts, "early", "late")
    parts.use(early, 1000, 0.0)
    parts.use(late, 1000, 3 * SPAN_S)
    parts.look(3 * SPAN_S)
    assert late.behind and not early.behind


def test_a_part_is_by_weight() -> None:
    parts = Parts(0.0)
    (heavy,) = known(parts, "heavy", weight=3.0)
    light, other = known(parts, "light", "other")
    parts.use(other, 1000, 0.0)
    parts.use(light, 1000, 0.0)
    parts.use(heavy, 3000, 0.0)
    parts.look(0.0)
    assert not (is_behind(heavy) or is_behind(light))
    parts.use(light, 2000, 0.0)
    assert is_behind(light)
    parts.weigh({"heavy": 3.0, "light": 3.0})
    parts.look(0.0)
    assert not is_behind(light)


def test_who_was_not_here_for_a_while_counts_no_more() -> None:
    parts = Parts(0.0)
    one, two, gone = known(parts, "one", "two", "gone")
    parts.goes(gone, 0.0)
    parts.use(one, 1000, 1.0)
    parts.use(two, 1200, 1.0)
    parts.look(SPAN_S - 1.0)
    assert one.behind  # of three, it has more than a third
    parts.look(SPAN_S)
    assert not one.behind  # of two, less than a half


def test_of_very_many_a_few_are_looked_at_in_one_call_and_all_in_time() -> None:
    parts = Parts(0.0)
    payers = known(parts, *[str(number) for number in range(10 * LOOKED)])
    for payer in payers:
        parts.use(payer, 100, 0.0)  # each is the first, and so has used more than its part
        parts.goes(payer, 0.0)
    assert any(map(is_behind, payers))
    parts.turned.clear()
    for _ in range(12):
        parts.look(SPAN_S + 1.0)
        assert len(parts.turned) <= LOOKED
        parts.turned.clear()
    assert not any(map(is_behind, payers))


def test_a_refund_brings_back() -> None:
    parts = Parts(0.0)
    one, two = known(parts, "one", "two")
    parts.use(two, 100, 0.0)
    parts.use(one, 5000, 0.0)
    assert one.behind
    parts.settle(one, -4900, 0.0)
    parts.look(1.0)
    assert not one.behind


def test_others_that_come_make_a_part_less() -> None:
    parts = Parts(0.0)
    (one,) = known(parts, "one")
    parts.use(one, 1000, 0.0)
    known(parts, "two", "three")
    parts.judge(one)
    assert one.behind


def test_the_forgotten_leave_nothing() -> None:
    parts = Parts(0.0)
    for number in range(1000):
        payers = known(parts, "steady", f"t{number}")
        for payer in payers:
            parts.use(payer, 100, float(number))
            parts.goes(payer, float(number))
        for payer in payers:
            parts.forget(payer)
        parts.look(float(number))
        parts.turned.clear()
    assert not parts._payers and not parts._idle and parts._behind == 0
    assert parts._weight == pytest.approx(0.0) and len(parts._ahead) <= SLACK + 1


@pytest.mark.parametrize(
    "seed, now",
    [*[pytest.param(seed, 0.0, id=str(seed)) for seed in range(4)], pytest.param(4, SPANS * SPAN_S - 700.0, id="anew")],
)
def test_whoever_is_behind_has_more_than_its_part_and_nobody_else_has_much_more(seed: int, now: float) -> None:
    """Also where what counts begins anew in between."""
    draw, parts = random.Random(seed), Parts(0.0)
    payers = known(parts, *"abcdefgh")
    used = dict.fromkeys(payers, 0.0)
    for _ in range(3000):
        step = draw.expovariate(2.0)
        now += step
        for payer in payers:
            used[payer] *= math.exp(-step / SPAN_S)
        payer = draw.choice(payers[: draw.randrange(1, 9)])
        tokens = draw.randrange(1, 2000)
        parts.use(payer, tokens, now)
        used[payer] += tokens
        parts.look(now)
        part = sum(used.values()) / len(payers)
        for each in payers:
            if each.behind:
                assert used[each] >= part * 0.999
        assert payer.behind or used[payer] <= (1.0 + MORE * (1.0 - 1.0 / len(payers))) * part * 1.001
