"""What is counted when records end, read back through Prometheus' own reader."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from sidecar.core.breaker import Scope
from sidecar.kernel.errors import Reason
from sidecar.kernel.ids import EndpointKey
from sidecar.kernel.outcome import DOCTRINE, Ending, Result
from sidecar.telemetry.labels import OTHER
from sidecar.telemetry.live import NODE_METRICS
from sidecar.telemetry.metrics import CONTENT_TYPE, INFERENCE_PATHS, SLICE, Metrics
from tests.telemetry.records import NODE, attempt, fleet_of, request, scrape, snapshot, total, transition, value

CHAT = {"service": "chat", "model": "llama", "version": "v1"}
GEN_AI = {"service": "chat", "gen_ai_request_model": "llama", "version": "v1"}
ON_NODE = {"service": "chat", "version": "v1", "endpoint": NODE}


async def test_request_is_counted_by_what_the_client_got() -> None:
    metrics = Metrics()
    metrics.request(request())
    metrics.request(request())
    metrics.request(request(status=504, result=Result.FAILURE, reason=Reason.TTFT_TIMEOUT))
    name = "sidecar_requests_total"
    assert await value(metrics, name, **CHAT, outcome="success", status="200", reason="") == 2
    assert await value(metrics, name, **CHAT, outcome="failure", status="504", reason="ttft_timeout") == 1
    assert await total(metrics, name) == 3


@pytest.mark.parametrize("reason", list(Reason))
async def test_every_reason_is_counted_under_its_word(reason: Reason) -> None:
    metrics = Metrics()
    metrics.request(request(reason=reason, result=Result.FAILURE))
    assert await total(metrics, "sidecar_requests_total", reason=reason.value) == 1


async def test_stream_gives_its_times_bytes_and_tokens() -> None:
    metrics = Metrics()
    metrics.request(request())
    samples = {
        "gen_ai_server_request_duration_seconds_sum": ({**GEN_AI, "outcome": "success"}, 2.0),
        "gen_ai_server_time_to_first_token_seconds_sum": (GEN_AI, 0.5),
        "gen_ai_server_time_per_output_token_seconds_sum": (GEN_AI, 0.5),
        "sidecar_token_gap_max_seconds_sum": (CHAT, 0.7),
        "sidecar_stream_tokens_total": (CHAT, 4),
    }
    for name, (labels, expected) in samples.items():
        assert await value(metrics, name, **labels) == expected, name
    for kind, tokens in (("input", 10), ("output", 4)):
        assert await value(metrics, "gen_ai_client_token_usage_sum", **GEN_AI, gen_ai_token_type=kind) == tokens
    for direction, size in (("in", 100), ("out", 2000)):
        assert await value(metrics, "sidecar_downstream_bytes_total", **CHAT, direction=direction) == size


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        pytest.param({"ttft_s": None}, "gen_ai_server_time_to_first_token_seconds", id="no token came"),
        pytest.param({"tokens": 1}, "gen_ai_server_time_per_output_token_seconds", id="one token has no further"),
        pytest.param(
            {"result": Result.FAILURE}, "gen_ai_server_time_per_output_token_seconds", id="cut stream has no pace"
        ),
        pytest.param({"max_gap_s": None}, "sidecar_token_gap_max_seconds", id="no gap"),
        pytest.param({"path": "/v1/models"}, "gen_ai_server_request_duration_seconds", id="no inference"),
    ],
)
async def test_what_did_not_happen_is_not_observed(changes: dict[str, object], family: str) -> None:
    metrics = Metrics()
    metrics.request(request(**changes))
    assert await total(metrics, f"{family}_count") == 0
    metrics.request(request())
    assert await total(metrics, f"{family}_count") == 1


async def test_usage_that_no_engine_reported_is_not_observed() -> None:
    metrics = Metrics()
    metrics.request(request(prompt_tokens=None, completion_tokens=None))
    assert await total(metrics, "gen_ai_client_token_usage_count") == 0


async def test_latencies_of_failures_stand_apart() -> None:
    metrics = Metrics()
    metrics.request(request(duration_s=0.1))
    metrics.request(request(duration_s=30.0, result=Result.FAILURE))
    name = "gen_ai_server_request_duration_seconds_sum"
    assert await value(metrics, name, **GEN_AI, outcome="success") == 0.1
    assert await value(metrics, name, **GEN_AI, outcome="failure") == 30.0


@pytest.mark.parametrize(("attempts", "retries"), [(0, 0), (1, 0), (2, 1), (3, 2)])
async def test_retries_are_the_attempts_beyond_the_first(attempts: int, retries: int) -> None:
    metrics = Metrics()
    metrics.request(request(attempts=attempts))
    assert await value(metrics, "sidecar_retries_total", **CHAT) == retries


async def test_a_canary_is_counted_apart_and_is_nobody_s_attempt() -> None:
    metrics = Metrics()
    metrics.canary("chat", "v1", "10.0.0.5:8000", Ending.COMPLETE, Result.SUCCESS)
    metrics.canary("chat", "v1", "10.0.0.5:8000", Ending.HEAD_TIMEOUT, Result.FAILURE)
    assert await total(metrics, "sidecar_health_canaries_total") == 2
    assert await total(metrics, "sidecar_health_canaries_total", ending="complete", outcome="success") == 1
    assert await total(metrics, "sidecar_attempts_total") == 0
    metrics.retain(fleet_of("10.0.0.9:8000"))
    assert await total(metrics, "sidecar_health_canaries_total") == 0


def test_successes_of_an_endpoint_are_those_of_its_attempts() -> None:
    metrics = Metrics()
    assert metrics.successes("chat", "v1", "10.0.0.5:8000") == 0
    for result in (Result.SUCCESS, Result.FAILURE, Result.IGNORED, Result.SUCCESS):
        metrics.attempt(attempt(result=result, endpoint=EndpointKey("10.0.0.5:8000"), service="chat", version="v1"))
    assert metrics.successes("chat", "v1", "10.0.0.5:8000") == 2
    assert metrics.successes("chat", "v2", "10.0.0.5:8000") == 0


async def test_made_up_models_share_a_label() -> None:
    metrics = Metrics()
    for number in range(500):
        metrics.request(request(model=f"made-up-{number}", result=Result.IGNORED, status=404))
    metrics.request(request())
    samples = await scrape(metrics)
    assert len({dict(labels).get("model") for name, labels in samples if name == "sidecar_requests_total"}) < 30
    assert await total(metrics, "sidecar_requests_total", model=OTHER) > 400
    assert await total(metrics, "sidecar_requests_total", model="llama") == 1


@pytest.mark.parametrize("ending", list(Ending))
async def test_every_ending_of_an_attempt_is_counted(ending: Ending) -> None:
    metrics = Metrics()
    result = DOCTRINE[ending].node
    metrics.attempt(attempt(ending=ending, result=result))
    assert await value(metrics, "sidecar_attempts_total", **ON_NODE, ending=ending.value, outcome=result.value) == 1


async def test_same_ending_with_another_result_is_another_series() -> None:
    """A client that leaves after the deadline charged the node counts as a failure."""
    metrics = Metrics()
    metrics.attempt(attempt(ending=Ending.CLIENT_LEFT, result=Result.IGNORED))
    metrics.attempt(attempt(ending=Ending.CLIENT_LEFT, result=Result.FAILURE))
    for outcome in ("ignored", "failure"):
        assert await total(metrics, "sidecar_attempts_total", ending="client_left", outcome=outcome) == 1


async def test_copy_is_an_attempt_and_counted_apart() -> None:
    metrics = Metrics()
    metrics.attempt(attempt())
    metrics.attempt(attempt(copy=True, ending=Ending.TTFT_TIMEOUT, result=Result.FAILURE))
    metrics.attempt(attempt(copy=True))
    assert await total(metrics, "sidecar_attempts_total") == 3
    for outcome in ("failure", "success"):
        assert await value(metrics, "sidecar_probe_copies_total", **ON_NODE, outcome=outcome) == 1
    metrics.retain(fleet_of("10.0.0.9:8000"))
    assert await total(metrics, "sidecar_probe_copies_total") == 0


async def test_attempt_gives_its_times_its_connection_and_its_malformed_events() -> None:
    metrics = Metrics()
    metrics.attempt(attempt(malformed_events=3))
    metrics.attempt(attempt(reused_connection=False, ttft_s=None))
    assert await value(metrics, "sidecar_attempt_duration_seconds_count", **ON_NODE) == 2
    assert await value(metrics, "sidecar_attempt_time_to_first_token_seconds_count", **ON_NODE) == 1
    assert await value(metrics, "sidecar_malformed_events_total", **ON_NODE) == 3
    for kind in ("new", "reused"):
        assert await value(metrics, "sidecar_attempt_connections_total", **ON_NODE, kind=kind) == 1


@pytest.mark.parametrize("scope", list(Scope))
async def test_transition_is_counted_and_only_a_node_is_named(scope: Scope) -> None:
    metrics = Metrics()
    metrics.transition(transition(scope, key="secret-session" if scope is not Scope.NODE else NODE))
    labels = {"scope": scope.value, "service": "chat", "old": "closed", "new": "open", "why": "consecutive"}
    endpoint = NODE if scope is Scope.NODE else ""
    assert await value(metrics, "sidecar_breaker_transitions_total", **labels, endpoint=endpoint) == 1


async def test_sessions_and_requests_never_become_labels() -> None:
    metrics = Metrics()
    metrics.request(request(session="secret-session", request_id="secret-request", client="secret-client"))
    metrics.transition(transition(Scope.SESSION, key="secret-session"))
    assert b"secret" not in (await metrics.render())[0]


async def test_refused_heads_and_broken_answers_are_counted() -> None:
    metrics = Metrics()
    metrics.refused(Reason.BAD_REQUEST)
    metrics.malformed_upstream(NODE)
    assert await value(metrics, "sidecar_refused_heads_total", reason="bad_request") == 1
    assert await value(metrics, "sidecar_malformed_upstream_total", endpoint=NODE) == 1


async def test_policy_loads_are_there_before_the_first_one() -> None:
    metrics = Metrics()
    assert await value(metrics, "sidecar_policy_loads_total", outcome="refused") == 0
    metrics.policy_load(True)
    metrics.policy_load(False)
    for outcome in ("applied", "refused"):
        assert await value(metrics, "sidecar_policy_loads_total", outcome=outcome) == 1


async def test_series_of_what_left_the_policy_are_forgotten_and_the_rest_counts_on() -> None:
    metrics = Metrics()
    gone = EndpointKey("10.0.0.2:8000")
    for key in (NODE, gone):
        metrics.attempt(attempt(endpoint=key))
        metrics.transition(transition(key=key))
        metrics.malformed_upstream(key)
    metrics.request(request())
    metrics.request(request(service="old"))
    metrics.transition(transition(Scope.SESSION, key="s", service="old"))
    metrics.retain(fleet_of(NODE))
    body = (await metrics.render())[0].decode()
    assert gone not in body
    assert 'service="old"' not in body
    metrics.request(request())
    metrics.attempt(attempt())
    assert await total(metrics, "sidecar_requests_total") == 2
    assert await value(metrics, "sidecar_attempts_total", **ON_NODE, ending="complete", outcome="success") == 2
    assert await total(metrics, "sidecar_breaker_transitions_total", endpoint=NODE) == 1


async def test_of_one_service_the_series_of_endpoints_that_left_are_forgotten() -> None:
    metrics = Metrics()
    gone = EndpointKey("10.0.0.2:8000")
    for service in ("chat", "other"):
        for key in (NODE, gone):
            metrics.attempt(attempt(endpoint=key, service=service))
            metrics.transition(transition(key=key, service=service))
    metrics.transition(transition(Scope.SESSION, key="s"))
    metrics.retain(fleet_of(NODE), {"chat", "unheard-of"})
    for family in ("sidecar_attempts_total", "sidecar_breaker_transitions_total"):
        assert await total(metrics, family, service="chat", endpoint=gone) == 0
        assert await total(metrics, family, service="chat", endpoint=NODE) == 1
        assert await total(metrics, family, service="other", endpoint=gone) == 1
    assert await total(metrics, "sidecar_breaker_transitions_total", scope="session") == 1
    metrics.attempt(attempt())
    metrics.attempt(attempt(endpoint=gone))
    assert await total(metrics, "sidecar_attempts_total", service="chat", endpoint=NODE) == 2
    assert await total(metrics, "sidecar_attempts_total", service="chat", endpoint=gone) == 1


async def test_what_returns_to_the_policy_counts_from_nought() -> None:
    metrics = Metrics()
    fleet = fleet_of(NODE)
    metrics.attempt(attempt())
    metrics.request(request())
    fleet.apply(snapshot("10.0.0.9:8000", service="other"), 1.0)
    metrics.retain(fleet)
    for family in ("sidecar_attempts_total", "sidecar_requests_total"):
        assert await total(metrics, family) == 0
    metrics.attempt(attempt())
    metrics.request(request())
    for family in ("sidecar_attempts_total", "sidecar_requests_total"):
        assert await total(metrics, family) == 1


async def test_requests_that_no_service_took_survive_a_reload() -> None:
    metrics = Metrics()
    metrics.request(request(service="", model="nobody", result=Result.IGNORED, reason=Reason.UNKNOWN_MODEL))
    metrics.retain(fleet_of(NODE))
    assert await total(metrics, "sidecar_requests_total", reason="unknown_model") == 1


async def test_process_figures_are_there() -> None:
    assert (await total(Metrics(), "process_resident_memory_bytes")) > 1_000_000


async def test_names_follow_the_conventions() -> None:
    metrics = Metrics("0.1.0")
    metrics.watch_fleet(fleet_of(NODE), lambda: 0.0)
    metrics.request(request())
    metrics.attempt(attempt())
    body, content_type = await metrics.render()
    assert content_type == CONTENT_TYPE
    families = [
        family
        for family in text_string_to_metric_families(body.decode())
        if not family.name.startswith(("process_", "python_"))
    ]
    assert len(families) > 20
    for family in families:
        assert family.name.startswith(("sidecar_", "gen_ai_")), family.name
        assert family.documentation, family.name
        if family.type == "histogram" and family.name != "gen_ai_client_token_usage":
            assert family.name.endswith("_seconds"), family.name


async def test_loop_goes_on_during_a_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics()
    keys = [f"10.0.{number // 250}.{number % 250}:8000" for number in range(3 * SLICE)]
    metrics.watch_fleet(fleet_of(*keys), lambda: 0.0)
    turns = 0
    turns_before_the_thread = 0
    done = False

    def process(registry: CollectorRegistry) -> bytes:
        nonlocal turns_before_the_thread
        turns_before_the_thread = turns
        return b""

    async def other() -> None:
        nonlocal turns
        while not done:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr("sidecar.telemetry.metrics.generate_latest", process)
    async with asyncio.TaskGroup() as group:
        group.create_task(other())
        await asyncio.sleep(0)
        turns = 0
        body, _ = await metrics.render()
        done = True
    # Three slices of endpoints, and as many of lines for each of their figures.
    assert turns_before_the_thread >= 3 * (1 + len(NODE_METRICS))
    assert sum(line.startswith(b"sidecar_breaker_state{") for line in body.splitlines()) == len(keys)


async def test_scrapes_at_once_each_get_everything() -> None:
    metrics = Metrics()
    metrics.request(request())
    async with asyncio.TaskGroup() as group:
        scrapes = [group.create_task(scrape(metrics)) for _ in range(3)]
    names = [{key for key in each.result() if key[0].startswith("sidecar")} for each in scrapes]
    assert names[0] == names[1] == names[2]


def test_inference_paths_are_those_of_the_wire() -> None:
    assert "/v1/chat/completions" in INFERENCE_PATHS
    assert "/v1/models" not in INFERENCE_PATHS
