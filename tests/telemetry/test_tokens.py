"""What is told of counting at the scrape."""

import msgspec

from sidecar.core.fleet import Fleet
from sidecar.telemetry.metrics import Metrics
from sidecar.telemetry.tokens import Counter
from tests.telemetry.records import NODE, snapshot, value


class Estimates:
    def __init__(self, errors: int, error_ratio: float) -> None:
        self.errors = errors
        self.error_ratio = error_ratio


class Model:
    def __init__(self, service: str, errors: int, error_ratio: float) -> None:
        self.service = service
        self.estimator = Estimates(errors, error_ratio)


class Counts:
    def __init__(self, *models: Model) -> None:
        self.counts = {"exact": 5, "cached": 90, "estimated": 7}
        self.late, self.refused, self.uncountable, self.failed, self.left = 1, 2, 3, 4, 5
        self.lies = 6
        self.counted_bytes = 123_456
        self.counting_s = 0.75
        self.pending_bytes = 2048
        self.prefixes = [1, 2, 3]
        self._models = models

    def models(self) -> tuple[Model, ...]:
        return self._models

    def why_not(self, service: str) -> str:
        return "" if service == "chat" else "its tokenizer has not been read yet"


def watching(counter: Counter, fleet: Fleet | None = None) -> Metrics:
    metrics = Metrics()
    metrics.watch_counter(counter)
    if fleet is not None:
        metrics.watch_fleet(fleet, lambda: 0.0)
    return metrics


async def test_prompts_are_told_by_how_they_were_counted() -> None:
    metrics = watching(Counts())
    assert await value(metrics, "sidecar_prompts_counted_total", how="exact") == 5
    assert await value(metrics, "sidecar_prompts_counted_total", how="cached") == 90
    assert await value(metrics, "sidecar_prompts_counted_total", how="estimated") == 7


async def test_counts_that_did_not_come_are_told_by_why() -> None:
    metrics = watching(Counts())
    for number, why in enumerate(("late", "refused", "uncountable", "failed", "left"), 1):
        assert await value(metrics, "sidecar_token_counts_lost_total", why=why) == number
    assert await value(metrics, "sidecar_token_reports_disbelieved_total") == 6


async def test_what_threads_do_is_told() -> None:
    metrics = watching(Counts())
    assert await value(metrics, "sidecar_token_counted_bytes_total") == 123_456
    assert await value(metrics, "sidecar_token_counting_seconds_total") == 0.75
    assert await value(metrics, "sidecar_token_pending_bytes") == 2048
    assert await value(metrics, "sidecar_token_prefixes") == 3


async def test_errors_of_a_service_s_models_weigh_by_how_often_they_are_asked_for() -> None:
    secret = Model("chat", 0, 9.0)
    metrics = watching(Counts(Model("chat", 30, 0.02), Model("chat", 10, 0.10), secret, Model("code", 1, 0.5)))
    assert await value(metrics, "sidecar_token_estimate_error_ratio", service="chat") == (30 * 0.02 + 1.0) / 40
    assert await value(metrics, "sidecar_token_estimate_error_ratio", service="code") == 0.5


async def test_services_with_a_tokenizer_tell_whether_it_is_used() -> None:
    (plain,) = snapshot(NODE).services
    services = tuple(
        msgspec.structs.replace(plain, name=name, tokenizer=path)
        for name, path in (("chat", "/models/a"), ("code", "/models/b"), ("plain", ""))
    )
    fleet = Fleet(lambda: 0.5)
    fleet.apply(snapshot(NODE, services=services), 0.0)
    metrics = watching(Counts(), fleet)
    assert await value(metrics, "sidecar_tokenizer_ready", service="chat") == 1
    assert await value(metrics, "sidecar_tokenizer_ready", service="code") == 0
    assert await value(metrics, "sidecar_tokenizer_ready", service="plain") is None
