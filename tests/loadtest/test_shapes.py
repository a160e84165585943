import pytest

from loadtest.shapes import SHAPES, SPIKE, SURGE, Shape


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_shape_fills_its_run_and_reaches_its_peak(shape: Shape) -> None:
    ends = [row.until for row in shape.rows]
    assert ends == sorted(set(ends))
    assert ends[-1] == pytest.approx(1.0)
    seen = [shape.users_at(at / 10, 60.0, 40) for at in range(600)]
    assert max(users for users in seen if users is not None) == 40
    assert None not in seen
    assert shape.users_at(60.0, 60.0, 40) is None


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_somebody_is_always_there(shape: Shape) -> None:
    assert min(shape.users_at(at / 10, 60.0, 1) or 0 for at in range(600)) == 1


def test_a_surge_is_four_times_the_load_at_once() -> None:
    assert (SURGE.users_at(7.4, 30.0, 120), SURGE.users_at(7.6, 30.0, 120)) == (30, 120)


def test_a_shape_keeps_its_form_however_long_the_run() -> None:
    short = [SPIKE.users_at((at + 0.5) / 100, 1.0, 100) for at in range(100)]
    assert short == [SPIKE.users_at((at + 0.5) * 36.0, 3600.0, 100) for at in range(100)]
