"""Token budgets: what a request pays for reserving and settling, whoever else has one. Budgets in ns per unit.

They are half as much again as what it took when they were set, so that noise passes and a mistake does not.
"""

import pytest

from bench.micro.conftest import Budgeted
from sidecar.core.quotas.quota import Ledger, Reservation
from sidecar.policy.schema import Quota

RESERVE_SETTLE_NS = {10: 3000, 10_000: 3000, 100_000: 3000}
ALL_WINDOWS_NS = 4700
BUDGETS_NS = {10: 330, 100_000: 350}
HEADERS_NS = 170
REFUSED_NS = 2200

UNITS = 200
BIG = 10**12
MINUTE = Quota(name="q", tokens_per_minute=BIG)
ALL = Quota(name="q", tokens_per_minute=BIG, tokens_per_day=BIG, requests_per_minute=BIG)
NOW = 100.0


def made(quota: Quota, tenants: int) -> tuple[Ledger, list[str]]:
    """A ledger that knows so many tenants, and some of them in no order."""
    ledger = Ledger()
    ledger.use((quota,), 0.0)
    for number in range(tenants):
        ledger.budgets(f"tenant-{number}", "m")
    return ledger, [f"tenant-{number * 7919 % tenants}" for number in range(UNITS)]


def spend(budget: Budgeted, quota: Quota, tenants: int, budget_ns: float) -> None:
    ledger, names = made(quota, tenants)
    theirs = [ledger.budgets(name, "m") for name in names]
    for budgets in theirs:
        for meter in budgets[0].meters:
            meter.held = BIG

    def run() -> None:
        for budgets in theirs:
            held = ledger.reserve(budgets, 300, NOW)
            assert isinstance(held, Reservation)
            ledger.settle(held, 250, NOW)

    budget(budget_ns, run, UNITS)


@pytest.mark.parametrize("tenants", list(RESERVE_SETTLE_NS))
def test_reserve_and_settle(budget: Budgeted, tenants: int) -> None:
    spend(budget, MINUTE, tenants, RESERVE_SETTLE_NS[tenants])


def test_reserve_and_settle_of_three_windows(budget: Budgeted) -> None:
    spend(budget, ALL, 10, ALL_WINDOWS_NS)


@pytest.mark.parametrize("tenants", list(BUDGETS_NS))
def test_find_a_tenants_budgets(budget: Budgeted, tenants: int) -> None:
    ledger, names = made(MINUTE, tenants)

    def run() -> None:
        for name in names:
            ledger.budgets(name, "m")

    budget(BUDGETS_NS[tenants], run, UNITS)


def test_headers_that_are_as_before(budget: Budgeted) -> None:
    ledger, _ = made(ALL, 10)
    budgets = ledger.budgets("tenant-0", "m")

    def run() -> None:
        for _ in range(UNITS):
            ledger.headers(budgets, NOW)

    budget(HEADERS_NS, run, UNITS)


def test_refuse(budget: Budgeted) -> None:
    ledger, _ = made(Quota(name="q", tokens_per_minute=1000), 1)
    budgets = ledger.budgets("tenant-0", "m")
    ledger.reserve(budgets, 1000, NOW)

    def run() -> None:
        for _ in range(UNITS):
            ledger.reserve(budgets, 300, NOW)

    budget(REFUSED_NS, run, UNITS)
