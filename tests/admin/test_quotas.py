"""The pages of token budgets: what fits a tenant, what is known of it, and that looking changes nothing."""

from typing import Any
from urllib.parse import quote

import pytest

from sidecar.core.quotas.quota import Drawn, Ledger, Reservation
from sidecar.policy.schema import Quota
from tests.admin.facts import A, StillFacts, service, snapshot
from tests.admin.test_app import door

FREE = Quota(name="free", tokens_per_minute=1000, concurrency=2)
BIG = Quota(name="big", tenant="acme*", models=("m-*",), requests_per_day=10, mode="shadow")


def facts(*quotas: Quota) -> StillFacts:
    still = StillFacts(snapshot(service(A), quotas=quotas))
    still.ledger = Ledger()
    still.ledger.use(quotas, still.now())
    return still


def used(still: StillFacts, tenant: str, tokens: int) -> Reservation:
    """A request is under way, and the server was told of it."""
    ledger = still.ledger
    assert ledger is not None
    held = ledger.reserve(ledger.budgets(tenant, "m"), tokens, still.now())
    assert isinstance(held, Reservation)
    for draw in ledger.wants(still.now()):
        windows = len(draw.portions)
        ledger.drawn(draw, Drawn([0] * windows, [tokens + 100] * windows, [0.0] * windows, 1, 1, 1), still.now())
    return held


async def ask(still: StillFacts, path: str, status: int = 200) -> Any:
    async with door(still) as admin:
        answer = await admin.ask("GET", path)
        assert answer.status == status
        return answer.json()


async def test_a_tenant_is_told_with_what_all_sidecars_used() -> None:
    still = facts(FREE, BIG)
    used(still, "ann", 300)
    still.monotonic_s += 0.5
    page = await ask(still, "/quotas/ann")
    assert (page["tenant"], page["log"], page["members"], page["seen"]) == ("ann", "up", 1, True)
    (line,) = page["budgets"]
    assert (line["quota"], line["mode"], line["reserved"], line["refused"]) == ("free", "enforce", 300, 0)
    (window,) = line["windows"]
    assert window == {
        "window": "tokens per minute",
        "limit": 1000,
        "used": 400,
        "age_s": 0.5,
        "left": 600,
        "held": 0,
        "owed": 0,
        "used_here": 300,
        "room_s": None,
        "refused": 0,
    }
    assert line["slots"] == {"limit": 2, "here": 1, "may_be_here": 1, "in_use": 1, "age_s": 0.5, "refused": 0}


async def test_a_tenant_that_was_not_seen_is_told_what_would_hold_it_and_stays_unknown() -> None:
    still = facts(FREE, BIG)
    page = await ask(still, "/quotas/acme-1")
    assert [(line["quota"], line["seen"]) for line in page["budgets"]] == [("free", False), ("big", False)]
    assert page["budgets"][0]["windows"][0]["left"] == 1000
    assert still.ledger is not None
    assert still.ledger.tenants == []
    assert (await ask(facts(BIG), "/quotas/bob"))["budgets"] == []


@pytest.mark.parametrize("tenant", ["", "a/b", "free/ann", "a\nb", "ä\u202e", "x" * 256, "%2F"])
async def test_whatever_a_client_calls_itself_has_a_page(tenant: str) -> None:
    still = facts(FREE)
    used(still, tenant, 300)
    page = await ask(still, f"/quotas/{quote(tenant, safe='')}")
    assert (page["tenant"], page["seen"], page["budgets"][0]["reserved"]) == (tenant, True, 300)


async def test_the_list_has_all_quotas_and_those_tenants_that_were_seen_last() -> None:
    still = facts(FREE, BIG)
    for number in range(5):
        used(still, f"acme-{number}", 10)
    page = await ask(still, "/quotas?limit=3")
    assert [line["quota"]["name"] for line in page["quotas"]] == ["free", "big"]
    assert page["quotas"][0]["counts"]["reserved_tokens"] == 50
    assert page["tenants"] == 5
    assert [line["tenant"] for line in page["budgets"]] == ["acme-4", "acme-3", "acme-2"]
    page = await ask(still, "/quotas?quota=big")
    assert ([line["quota"]["name"] for line in page["quotas"]], page["budgets"]) == (["big"], [])


@pytest.mark.parametrize(
    ("query", "status"), [("limit=0", 400), ("limit=1001", 400), ("limit=x", 400), ("quota=none", 404)]
)
async def test_a_list_that_cannot_be_is_refused(query: str, status: int) -> None:
    await ask(facts(FREE), f"/quotas?{query}", status)


@pytest.mark.parametrize("path", ["/quotas", "/quotas/ann"])
async def test_who_relays_nothing_has_no_quotas(path: str) -> None:
    await ask(StillFacts(snapshot(service(A))), path, 404)
