"""What the gates say at the scrape: by service and class, and never by tenant."""

import msgspec

from sidecar.core.fleet import Fleet
from sidecar.core.gate.admit import Gate, Ticket, TurnedAway
from sidecar.core.service import ServiceState
from sidecar.kernel.ids import EndpointKey, ServiceName
from sidecar.policy.schema import Admission, QosPolicy
from sidecar.telemetry.metrics import Metrics
from tests.telemetry.records import NODE, request, scrape, snapshot, total, value

VOICE = QosPolicy(name="voice", latency_sla_ms=100, priority=9)
BATCH = QosPolicy(name="batch", latency_sla_ms=60_000, priority=1, preemptible=True)
ONE_AT_A_TIME = Admission(limit="fixed", concurrency=1, queue=2)


def gated(admission: Admission = ONE_AT_A_TIME, *policies: QosPolicy) -> Fleet:
    plain = snapshot(NODE)
    services = tuple(msgspec.structs.replace(each, admission=admission) for each in plain.services)
    fleet = Fleet(lambda: 0.5)
    fleet.apply(msgspec.structs.replace(plain, services=services, qos_policies=policies or (VOICE, BATCH)), 0.0)
    return fleet


def service_of(fleet: Fleet) -> ServiceState:
    return fleet.services[ServiceName("chat")]


def gate_of(fleet: Fleet) -> Gate:
    gate = service_of(fleet).gate
    assert gate is not None
    return gate


def enter(fleet: Fleet, qos: str, now: float, tenant: str = "") -> tuple[Ticket, bool | TurnedAway]:
    """As the request path does: what runs is in flight on the endpoint."""
    ticket = Ticket(None, fleet.classes.by_name[qos], tenant, "", 10, now)
    service = service_of(fleet)
    verdict = gate_of(fleet).enter(ticket, service.pool("", None), now)
    if verdict is True:
        service.nodes[EndpointKey(NODE)].in_flight += 1
    return ticket, verdict


def watching(fleet: Fleet, now: float) -> Metrics:
    metrics = Metrics()
    metrics.watch_fleet(fleet, lambda: now)
    return metrics


async def test_who_waits_and_who_runs_is_told_by_class() -> None:
    fleet = gated()
    assert enter(fleet, "batch", 1.0)[1] is True
    assert enter(fleet, "batch", 2.0)[1] is False
    assert enter(fleet, "voice", 2.5)[1] is False
    metrics = watching(fleet, 3.0)
    voice, batch = {"service": "chat", "qos": "voice"}, {"service": "chat", "qos": "batch"}
    assert await value(metrics, "sidecar_queued", **voice) == 1
    assert await value(metrics, "sidecar_queued", **batch) == 1
    assert await value(metrics, "sidecar_running", **batch) == 1
    assert await value(metrics, "sidecar_running", **voice) == 0
    assert await value(metrics, "sidecar_queue_oldest_seconds", **batch) == 1.0
    assert await value(metrics, "sidecar_queue_oldest_seconds", **voice) == 0.5
    assert await value(metrics, "sidecar_turns_total", **batch) == 1
    assert await value(metrics, "sidecar_queued", service="chat", qos="default") == 0


async def test_a_class_that_is_about_to_break_its_promise_is_told() -> None:
    fleet = gated()
    enter(fleet, "batch", 1.0)
    enter(fleet, "voice", 1.0)
    assert await value(watching(fleet, 1.0), "sidecar_sla_warning", service="chat", qos="voice") == 0
    assert await value(watching(fleet, 1.09), "sidecar_sla_warning", service="chat", qos="voice") == 1
    assert await value(watching(fleet, 1.09), "sidecar_sla_warning", service="chat", qos="batch") == 0


async def test_who_was_turned_away_is_counted_by_reason_and_mode() -> None:
    fleet = gated()
    running, _ = enter(fleet, "batch", 1.0)
    for _ in range(2):
        enter(fleet, "batch", 1.0)
    assert isinstance(enter(fleet, "batch", 1.0)[1], TurnedAway)
    away = gate_of(fleet).turned_away(40.0)
    assert [verdict.reason.value for _, verdict in away] == ["queue_timeout", "queue_timeout"]
    labels = {"service": "chat", "qos": "batch", "mode": "enforce"}
    metrics = watching(fleet, 40.0)
    assert await value(metrics, "sidecar_turned_away_total", reason="overloaded", **labels) == 1
    assert await value(metrics, "sidecar_turned_away_total", reason="queue_timeout", **labels) == 2
    assert await value(metrics, "sidecar_turned_away_total", reason="preempted", **labels) == 0
    enter(fleet, "voice", 41.0)
    assert [verdict.reason.value for ticket, verdict in gate_of(fleet).turned_away(41.09) if ticket is running] == [
        "preempted"
    ]
    assert await value(metrics, "sidecar_turned_away_total", reason="preempted", **labels) == 1


async def test_a_shadow_s_counts_say_so() -> None:
    fleet = gated(Admission(limit="fixed", concurrency=1, queue=0, mode="shadow"))
    assert enter(fleet, "batch", 1.0)[1] is True
    assert enter(fleet, "batch", 1.0)[1] is True
    metrics = watching(fleet, 1.0)
    assert await total(metrics, "sidecar_turned_away_total", mode="shadow", reason="overloaded") == 1
    assert await total(metrics, "sidecar_turned_away_total", mode="enforce") == 0


async def test_promises_kept_and_broken_are_counted() -> None:
    fleet = gated(Admission(limit="fixed", concurrency=9))
    for took in (0.05, 0.05, 0.2):
        ticket, _ = enter(fleet, "voice", 1.0)
        gate_of(fleet).spoke(ticket, 1.0 + took)
    metrics = watching(fleet, 2.0)
    assert await value(metrics, "sidecar_sla_total", service="chat", qos="voice", result="met") == 2
    assert await value(metrics, "sidecar_sla_total", service="chat", qos="voice", result="missed") == 1


async def test_tenants_are_counted_and_not_named() -> None:
    fleet = gated(Admission(limit="fixed", concurrency=1, queue=50))
    for number in range(5):
        enter(fleet, "batch", 1.0, f"secret-{number}")
    metrics = watching(fleet, 1.0)
    assert await value(metrics, "sidecar_admission_tenants", service="chat") == 5
    assert b"secret" not in (await metrics.render())[0]


async def test_endpoints_tell_what_they_may_have() -> None:
    labels = {"service": "chat", "endpoint": NODE}
    fixed = gated(Admission(limit="fixed", concurrency=7))
    assert await value(watching(fixed, 1.0), "sidecar_endpoint_limit", **labels) == 7
    assert await value(watching(fixed, 1.0), "sidecar_endpoint_first_token_ratio", **labels) in (None, 0.0)
    learnt = gated(Admission(concurrency=20))
    node = service_of(learnt).nodes[EndpointKey(NODE)]
    metrics = watching(learnt, 1.0)
    assert await value(metrics, "sidecar_endpoint_limit", **labels) == 20
    assert await value(metrics, "sidecar_endpoint_limit_cuts_total", **labels) == 0
    assert node.limiter is not None
    node.limiter.pushed_back(1.0)
    node.limit = node.limiter.tick(5, 20, 2.0)
    assert await value(metrics, "sidecar_endpoint_limit", **labels) == node.limit < 20
    assert await value(metrics, "sidecar_endpoint_limit_cuts_total", **labels) == 1


async def test_where_nobody_is_kept_there_is_nothing_to_tell() -> None:
    fleet = gated(Admission(mode="off"))
    assert service_of(fleet).gate is None
    names = {name for name, _ in await scrape(watching(fleet, 1.0))}
    assert not names & {"sidecar_queued", "sidecar_turned_away_total", "sidecar_sla_total", "sidecar_endpoint_limit"}


async def test_waits_of_those_who_waited_are_a_histogram() -> None:
    metrics = Metrics()
    for queued_s in (0.02, 0.3, None):
        metrics.request(request(queued_s=queued_s, qos="voice"))
    assert await value(metrics, "sidecar_queue_wait_seconds_count", service="chat", qos="voice") == 2
    assert await value(metrics, "sidecar_queue_wait_seconds_bucket", service="chat", qos="voice", le="0.025") == 1


async def test_waits_of_a_class_that_is_gone_are_forgotten() -> None:
    metrics = Metrics()
    for qos in ("voice", "gone"):
        metrics.request(request(queued_s=0.1, qos=qos))
    metrics.retain(gated())
    assert await value(metrics, "sidecar_queue_wait_seconds_count", service="chat", qos="voice") == 1
    assert await value(metrics, "sidecar_queue_wait_seconds_count", service="chat", qos="gone") is None
    metrics.request(request(queued_s=0.1, qos="voice"))
    assert await value(metrics, "sidecar_queue_wait_seconds_count", service="chat", qos="voice") == 2
