"""What the ledger counted, at the scrape: by quota, and never by tenant."""

from sidecar.core.quotas.quota import Exceeded, Ledger
from sidecar.policy.schema import Quota
from sidecar.telemetry.metrics import Metrics
from tests.telemetry.records import scrape, value


def ledger(*quotas: Quota) -> Ledger:
    made = Ledger()
    made.use(quotas, 0.0)
    return made


def watching(made: Ledger) -> Metrics:
    metrics = Metrics()
    metrics.watch_ledger(made)
    return metrics


async def test_what_was_reserved_used_and_refused_is_told_by_quota() -> None:
    made = ledger(Quota(name="small", tokens_per_minute=100), Quota(name="other", tenant="else"))
    metrics = watching(made)
    budgets = made.budgets("secret", "m")
    assert isinstance(made.reserve(budgets, 101, 1.0), Exceeded)
    first = made.reserve(budgets, 60, 1.0)
    assert not isinstance(first, Exceeded)
    made.settle(first, 70, 2.0)
    assert await value(metrics, "sidecar_quota_reserved_tokens_total", quota="small") == 60
    assert await value(metrics, "sidecar_quota_settled_tokens_total", quota="small") == 70
    assert await value(metrics, "sidecar_quota_debt_tokens_total", quota="small") == 10
    assert await value(metrics, "sidecar_quota_credit_tokens_total", quota="small") == 60
    refused = {"quota": "small", "window": "tokens_per_minute", "mode": "enforce"}
    assert await value(metrics, "sidecar_quota_refused_total", **refused) == 1
    assert await value(metrics, "sidecar_quota_reserved_tokens_total", quota="other") == 0
    assert b"secret" not in (await metrics.render())[0]


async def test_a_shadow_s_refusals_say_so() -> None:
    made = ledger(Quota(name="small", requests_per_minute=1, mode="shadow"))
    budgets = made.budgets("t", "m")
    for _ in range(3):
        assert not isinstance(made.reserve(budgets, 10, 1.0), Exceeded)
    labels = {"quota": "small", "window": "requests_per_minute"}
    assert (await value(watching(made), "sidecar_quota_refused_total", mode="shadow", **labels) or 0) >= 1
    assert await value(watching(made), "sidecar_quota_refused_total", mode="enforce", **labels) is None


async def test_a_quota_that_is_off_or_gone_is_not_told() -> None:
    made = ledger(Quota(name="off", mode="off"), Quota(name="on"))
    metrics = watching(made)
    said = {dict(labels)["quota"] for name, labels in await scrape(metrics) if name.startswith("sidecar_quota_draws")}
    assert said == {"on"}
    made.use((), 1.0)
    assert not [name for name, _ in await scrape(metrics) if name.startswith("sidecar_quota")]


async def test_draws_are_counted_by_whether_the_log_answered() -> None:
    made = ledger(Quota(name="small", tokens_per_minute=100))
    made.counts["small"].draws, made.counts["small"].draw_failures = 5, 2
    metrics = watching(made)
    assert await value(metrics, "sidecar_quota_draws_total", quota="small") == 5
    assert await value(metrics, "sidecar_quota_draw_failures_total", quota="small") == 2
