"""The pages of token budgets: `/quotas` and `/quotas/<tenant>`, as this sidecar knows them. Looking asks no server."""

from itertools import islice
from typing import Final

import msgspec
from aiohttp import web

from sidecar.admin import answer
from sidecar.admin.facts import Facts
from sidecar.core.quotas.meter import NEVER, Meter
from sidecar.core.quotas.quota import Budget, Counts, Ledger
from sidecar.policy.schema import Quota

USUAL: Final = 100
MOST: Final = 1000
"""Tenants in one answer, a few milliseconds: there may be 100,000."""


class CountsLine(msgspec.Struct, frozen=True):
    """Of one quota on this sidecar, since it started. `refused`: by window; `shadow_refused`: would have been."""

    reserved_tokens: int
    settled_tokens: int
    credit_tokens: int
    debt_tokens: int
    refused: dict[str, int]
    shadow_refused: dict[str, int]
    draws: int
    draw_failures: int


class QuotaLine(msgspec.Struct, frozen=True):
    """A quota of the policy; its limits as the policy file has them."""

    quota: Quota
    counts: CountsLine


class WindowLine(msgspec.Struct, frozen=True):
    """A window of a tenant's budget. `used`: by all sidecars in the span, as the log said `age_s` seconds ago.

    `age_s` null: it was not asked yet, and `used` is what this sidecar used. `left` takes off what this sidecar owes
    and what the others will have used since. `held`: drawn and not used here; `owed`: used here and not told yet.
    `room_s`: seconds until what was last wanted fits, null: it did. `used_here`: in the span. `refused`: requests that
    found too little here, so far; in shadow mode those that would have been refused.
    """

    window: str
    limit: int
    used: int
    age_s: float | None
    left: int
    held: int
    owed: int
    used_here: int
    room_s: float | None
    refused: int


class SlotsLine(msgspec.Struct, frozen=True):
    """Requests under way: here, those that may be here, and all there may be and are, as of `age_s` seconds ago.

    `refused`: as in windows, and those that were because the log was away.
    """

    limit: int
    here: int
    may_be_here: int
    in_use: int
    age_s: float | None
    refused: int


class BudgetLine(msgspec.Struct, frozen=True):
    """One quota for one tenant. `seen` false: this sidecar has had no request of the tenant's that it fits.

    `reserved`: tokens that requests under way here hold; `refused`: here so far, by all windows and slots together.
    """

    tenant: str
    quota: str
    mode: str
    models: tuple[str, ...]
    when_log_away: str
    seen: bool
    windows: list[WindowLine]
    slots: SlotsLine | None
    reserved: int
    refused: int


class QuotasPage(msgspec.Struct, frozen=True):
    """`log` is up, away, or settling (it was away). `tenants` are known here; `budgets` are of those seen last."""

    log: str
    members: int
    tenants: int
    quotas: list[QuotaLine]
    budgets: list[BudgetLine]


class TenantPage(msgspec.Struct, frozen=True):
    """What fits a tenant, in the policy's order; empty: nothing does."""

    tenant: str
    log: str
    members: int
    seen: bool
    budgets: list[BudgetLine]


class QuotaPages:
    """The pages."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    def register(self, app: web.Application) -> None:
        """Puts the pages into `app`. A tenant is whatever a client says it is, and may be nothing."""
        app.router.add_get("/quotas", self.quotas)
        app.router.add_get(r"/quotas/{tenant:(?s:.*)}", self.tenant)

    async def quotas(self, request: web.Request) -> web.Response:
        """All quotas, and the budgets of the tenants seen last: `?limit=`, of one `?quota=`."""
        ledger = self._facts.ledger
        if ledger is None:
            return _no_ledger()
        try:
            limit = int(request.query.get("limit", str(USUAL)))
        except ValueError:
            limit = 0
        if not 1 <= limit <= MOST:
            return answer.error(400, f"limit is a number from 1 to {MOST}", "bad_request")
        only = request.query.get("quota", "")
        if only and only not in ledger.counts:
            return answer.error(404, "no such quota", "not_found")
        return answer.page(quotas(self._facts, ledger, only, limit))

    async def tenant(self, request: web.Request) -> web.Response:
        """What fits one tenant."""
        ledger = self._facts.ledger
        if ledger is None:
            return _no_ledger()
        return answer.page(tenant(self._facts, ledger, request.match_info["tenant"]))


def quotas(facts: Facts, ledger: Ledger, only: str = "", limit: int = USUAL) -> QuotasPage:
    """The quotas that are in force, or `only` one, and up to `limit` budgets."""
    now = facts.now()
    known = ledger.tenants
    lines = (
        _budget(budget.rule.quota, budget, name, now)
        for name in reversed(known)
        for budget in ledger.known(name)
        if only in ("", budget.rule.name)
    )
    return QuotasPage(
        log=ledger.state,
        members=ledger.members,
        tenants=len(known),
        quotas=[
            QuotaLine(quota, _counts(ledger.counts[quota.name]))
            for quota in facts.store.current.quotas
            if quota.name in ledger.counts and only in ("", quota.name)
        ],
        budgets=list(islice(lines, limit)),
    )


def tenant(facts: Facts, ledger: Ledger, name: str) -> TenantPage:
    """What fits a tenant; what is not in use here as it would begin."""
    now = facts.now()
    known = {budget.rule.name: budget for budget in ledger.known(name)}
    lines = [_budget(quota, known.get(quota.name), name, now) for quota in ledger.fitting(name)]
    return TenantPage(name, ledger.state, ledger.members, bool(known), lines)


def _budget(quota: Quota, budget: Budget | None, name: str, now: float) -> BudgetLine:
    return BudgetLine(
        tenant=name,
        quota=quota.name,
        mode=quota.mode,
        models=quota.models,
        when_log_away=quota.when_log_away,
        seen=budget is not None,
        windows=_unused(quota) if budget is None else [_window(meter, now) for meter in budget.meters],
        slots=_slots(quota, budget, now),
        reserved=0 if budget is None else budget.reserved,
        refused=0 if budget is None else budget.refused + sum(meter.refused for meter in budget.meters),
    )


def _window(meter: Meter, now: float) -> WindowLine:
    meter.advance(now)
    asked = meter.answered_at > NEVER and now - meter.answered_at < meter.span_s
    return WindowLine(
        window=meter.word,
        limit=meter.limit,
        used=meter.used if asked else meter.own,
        age_s=round(now - meter.answered_at, 3) if asked else None,
        left=max(0, meter.room(now)),
        held=meter.held,
        owed=meter.debt + meter.told,
        used_here=meter.own,
        room_s=round(meter.retry_at - now, 3) if meter.retry_at > now else None,
        refused=meter.refused,
    )


def _unused(quota: Quota) -> list[WindowLine]:
    return [
        WindowLine(word.replace("_", " "), limit, 0, None, limit, 0, 0, 0, None, 0)
        for word, limit in (
            ("tokens_per_minute", quota.tokens_per_minute),
            ("tokens_per_day", quota.tokens_per_day),
            ("requests_per_minute", quota.requests_per_minute),
            ("requests_per_day", quota.requests_per_day),
        )
        if limit is not None
    ]


def _slots(quota: Quota, budget: Budget | None, now: float) -> SlotsLine | None:
    if quota.concurrency is None:
        return None
    if budget is None:
        return SlotsLine(quota.concurrency, 0, 0, 0, None, 0)
    age_s = round(now - budget.slots_at, 3) if budget.slots_at > NEVER else None
    return SlotsLine(quota.concurrency, budget.in_flight, budget.slots, budget.slots_in_use, age_s, budget.refused)


def _counts(counts: Counts) -> CountsLine:
    return CountsLine(
        reserved_tokens=counts.reserved_tokens,
        settled_tokens=counts.settled_tokens,
        credit_tokens=counts.credit_tokens,
        debt_tokens=counts.debt_tokens,
        refused=dict(counts.refused),
        shadow_refused=dict(counts.shadow_refused),
        draws=counts.draws,
        draw_failures=counts.draw_failures,
    )


def _no_ledger() -> web.Response:
    return answer.error(404, "this sidecar relays nothing, and has no quotas", "not_found")
