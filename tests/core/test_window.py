"""The sliding count, against a plain list of moments."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.window import BUCKETS, Window

STEPS = st.lists(st.tuples(st.floats(0, 30), st.booleans()), max_size=60)


@given(span_s=st.floats(0.001, 100), start=st.floats(0, 1e6), steps=STEPS)
def test_counts_all_of_the_newest_and_nothing_older_than_the_span(
    span_s: float, start: float, steps: list[tuple[float, bool]]
) -> None:
    window = Window(span_s, start)
    moments = list(accumulate((step for step, _ in steps), initial=start))[1:]
    for now, (_, marked) in zip(moments, steps, strict=True):
        window.count(now, marked)
    now = moments[-1] if moments else start
    slack = 1e-6 * max(1.0, now)
    newest = span_s * (BUCKETS - 1) / BUCKETS - slack
    marks = [marked for _, marked in steps]
    for counted, wanted in ((window.total, [True] * len(marks)), (window.marked, marks)):
        surely = sum(w for moment, w in zip(moments, wanted, strict=True) if now - moment < newest)
        at_most = sum(w for moment, w in zip(moments, wanted, strict=True) if now - moment <= span_s + slack)
        assert surely <= counted <= at_most


@given(moments=st.lists(st.tuples(st.floats(-1e6, 1e6), st.booleans()), max_size=60))
def test_sums_match_the_ring_whatever_the_clock_does(moments: list[tuple[float, bool]]) -> None:
    window = Window(10.0, 0.0)
    for now, marked in moments:
        window.count(now, marked)
        assert 0 <= window.marked <= window.total
        assert window.total == sum(window._total)
        assert window.marked == sum(window._marked)


def test_clock_that_goes_back_loses_nothing() -> None:
    window = Window(10.0, 100.0)
    for now in (100.0, 50.0, 100.0, 0.0):
        window.count(now, True)
    assert (window.total, window.marked) == (4, 4)


@pytest.mark.parametrize("later", [10.0, 11.0, 1e9], ids=["a span", "more", "ages"])
def test_all_is_forgotten_after_a_span(later: float) -> None:
    window = Window(10.0, 0.0)
    window.count(0.0, True)
    window.advance(later)
    assert (window.total, window.marked) == (0, 0)


def test_advance_alone_keeps_what_is_inside() -> None:
    window = Window(10.0, 0.0)
    window.count(0.0, True)
    window.count(5.0, False)
    window.advance(9.0)
    assert (window.total, window.marked) == (2, 1)
    window.advance(12.0)
    assert (window.total, window.marked) == (1, 0)


def test_clear_forgets_everything() -> None:
    window = Window(10.0, 0.0)
    window.count(1.0, True)
    window.clear(1.0)
    window.advance(1.0)
    assert (window.total, window.marked) == (0, 0)


def test_moments_at_bucket_edges_never_turn_the_ring_back() -> None:
    window = Window(0.3, 0.0)
    for number in range(1000):
        window.count(number * 0.03, True)
        assert window.total <= BUCKETS + 1
