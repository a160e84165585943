"""How many retries a service may add."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sidecar.core.budget import RetryBudget


@pytest.mark.parametrize(
    ("ratio", "minimum", "requests", "granted"),
    [
        pytest.param(0.2, 3, 0, 3, id="a quiet service has the minimum"),
        pytest.param(0.2, 3, 10, 3, id="the share is under the minimum"),
        pytest.param(0.2, 3, 100, 20, id="a fifth of a hundred"),
        pytest.param(0.0, 3, 100, 3, id="ratio 0 leaves the minimum"),
        pytest.param(0.2, 0, 0, 0, id="minimum 0 and no requests: never"),
        pytest.param(0.0, 0, 100, 0, id="both 0: never"),
        pytest.param(1.0, 0, 7, 7, id="ratio 1: one each"),
        pytest.param(0.25, 0, 1, 1, id="a fraction of a retry rounds up"),
    ],
)
def test_grants_the_share_or_the_minimum(ratio: float, minimum: int, requests: int, granted: int) -> None:
    budget = RetryBudget(ratio, minimum, 10.0, 0.0)
    for _ in range(requests):
        budget.request(0.0)
    assert sum(budget.take(0.0) for _ in range(requests + 10)) == granted


def test_spent_retries_come_back_after_the_window() -> None:
    budget = RetryBudget(0.0, 2, 10.0, 0.0)
    assert [budget.take(0.0) for _ in range(3)] == [True, True, False]
    assert not budget.take(8.9)
    assert [budget.take(10.0) for _ in range(3)] == [True, True, False]


def test_retries_earn_no_retries() -> None:
    budget = RetryBudget(0.5, 0, 10.0, 0.0)
    for _ in range(10):
        budget.request(0.0)
    assert sum(budget.take(0.0) for _ in range(100)) == 5


@example(ratio=2.2e-309, minimum=0, steps=[(True, 0.0), (False, 0.0)])
@given(
    ratio=st.floats(0, 1),
    minimum=st.integers(0, 20),
    steps=st.lists(st.tuples(st.booleans(), st.floats(0, 3)), max_size=200),
)
def test_never_more_than_the_share_of_all_that_was_asked(
    ratio: float, minimum: int, steps: list[tuple[bool, float]]
) -> None:
    budget = RetryBudget(ratio, minimum, 1e6, 0.0)
    now, requests, granted = 0.0, 0, 0
    for is_request, step in steps:
        now += step
        if is_request:
            budget.request(now)
            requests += 1
        else:
            granted += budget.take(now)
        # One is taken away from whole numbers: added to a tiny share it would swallow it.
        assert granted == 0 or granted - 1 < max(minimum, ratio * requests)


def test_new_limits_keep_what_was_counted() -> None:
    budget = RetryBudget(0.0, 5, 10.0, 0.0)
    assert [budget.take(0.0) for _ in range(3)] == [True] * 3
    budget.use(0.0, 4, 10.0, 0.0)
    assert [budget.take(0.0) for _ in range(2)] == [True, False]


def test_another_window_counts_from_zero() -> None:
    budget = RetryBudget(0.0, 1, 10.0, 0.0)
    assert budget.take(0.0)
    budget.use(0.0, 1, 20.0, 0.0)
    assert [budget.take(0.0), budget.take(19.0), budget.take(21.0)] == [True, False, True]
