"""This sidecar's part of token budgets: what is reserved, refused, settled, drawn and given back."""

import pytest

from sidecar.core.quota import Exceeded, Ledger, Reservation, allowance
from sidecar.policy.schema import Quota


def made(*quotas: Quota) -> Ledger:
    ledger = Ledger()
    ledger.use(quotas, 0.0)
    return ledger


def test_a_sidecar_that_is_alone_admits_the_limit_in_each_minute() -> None:
    ledger = made(Quota(name="q", tokens_per_minute=1000))
    budgets = ledger.budgets("ann", "m")
    held = [ledger.reserve(budgets, 300, 1.0) for _ in range(4)]
    assert [isinstance(each, Reservation) for each in held] == [True, True, True, False]
    refused = held[3]
    assert isinstance(refused, Exceeded)
    assert (refused.window, refused.budget) == ("tokens per minute", budgets[0])
    assert refused.detail == "quota q: 1000 tokens per minute, 100 left, 300 wanted"
    assert isinstance(ledger.reserve(budgets, 300, 62.1), Reservation)


def test_a_request_larger_than_the_limit_is_told_that_waiting_does_not_help() -> None:
    ledger = made(Quota(name="q", tokens_per_minute=1000))
    refused = ledger.reserve(ledger.budgets("ann", "m"), 1001, 1.0)
    assert isinstance(refused, Exceeded)
    assert refused.retry_after_s is None


@pytest.mark.parametrize(
    ("tokens", "stream", "factor", "allowed"), [(0, True, 1.5, 0), (1000, False, 1.0, 1000), (1000, True, 1.5, 1800)]
)
def test_a_request_may_take_what_its_service_shape_and_class_allow(
    tokens: int, stream: bool, factor: float, allowed: int
) -> None:
    assert allowance(tokens, stream, factor) == allowed
