"""How soon a class usually speaks."""

import random

import pytest

from sidecar.core.gate.usual import FADES_S, KEPT, Usual
from sidecar.core.sketch import ERROR


def test_nothing_seen_is_no_time() -> None:
    usual = Usual()
    assert (usual.likely_s, usual.careful_s, usual.seen) == (0.0, 0.0, 0)


def test_one_is_enough_to_begin_with() -> None:
    usual = Usual()
    usual.add(0.25, 1.0)
    assert usual.likely_s == usual.careful_s == pytest.approx(0.25, rel=ERROR)


def test_a_few_long_prompts_move_neither_figure_as_they_move_a_mean() -> None:
    usual = Usual()
    for number in range(100):
        usual.add(30.0 if number % 20 == 0 else 0.1, 1.0)
    assert usual.likely_s == usual.careful_s == pytest.approx(0.1, rel=ERROR)


def test_the_careful_figure_is_that_of_the_slow() -> None:
    draw, usual = random.Random(1), Usual()
    seen = [draw.uniform(0.1, 1.1) for _ in range(int(KEPT))]
    for each in seen:
        usual.add(each, 1.0)
    assert usual.likely_s == pytest.approx(sorted(seen)[100], rel=0.15)
    assert usual.careful_s == pytest.approx(sorted(seen)[180], rel=0.15)


def test_what_is_old_counts_less() -> None:
    usual = Usual()
    for _ in range(10_000):
        usual.add(5.0, 1.0)
    for _ in range(int(KEPT)):
        usual.add(0.1, 1.0)
    assert usual.likely_s == pytest.approx(0.1, rel=ERROR)


@pytest.mark.parametrize("strange", [-1.0, 0.0, 1e9])
def test_whatever_a_clock_makes_of_it_is_a_time(strange: float) -> None:
    usual = Usual()
    usual.add(strange, 1.0)
    assert 0.0 < usual.likely_s < 400.0


def test_without_new_ones_it_is_believed_less_and_less() -> None:
    usual = Usual()
    usual.add(8.0, 1.0)
    usual.fade(FADES_S)
    assert usual.likely_s == pytest.approx(8.0, rel=ERROR)
    for step in range(1, 4):
        usual.fade(1.0 + step * FADES_S)
        assert usual.careful_s == pytest.approx(8.0 / 2**step, rel=ERROR)
    usual.add(8.0, 50.0)
    assert usual.likely_s == pytest.approx(8.0, rel=ERROR)
