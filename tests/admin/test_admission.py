"""The page of who waits: what it says, and that it names no tenant."""

from typing import Any

import msgspec

from sidecar.admin import views
from sidecar.admin.admission import admission
from sidecar.core.gate.admit import Gate, Ticket
from sidecar.core.service import ServiceState
from sidecar.policy.schema import Admission, QosPolicy
from tests.admin.facts import CHAT, A, B, StillFacts, service, snapshot
from tests.admin.test_app import door

VOICE = QosPolicy(name="voice", latency_sla_ms=100, priority=9)
BATCH = QosPolicy(name="batch", latency_sla_ms=60_000, priority=1, preemptible=True)
ONE = Admission(limit="fixed", concurrency=1, queue=2)


def facts(admission: Admission = ONE, *more: Any) -> StillFacts:
    return StillFacts(snapshot(service(A, admission=admission), *more, qos_policies=(VOICE, BATCH)))


def state(still: StillFacts) -> ServiceState:
    return still.fleet.services[CHAT]


def gate(still: StillFacts) -> Gate:
    found = state(still).gate
    assert found is not None
    return found


def enter(still: StillFacts, qos: str, tenant: str = "", before_s: float = 0.0) -> Ticket:
    """A request that came `before_s` ago and is told apart by nothing but these."""
    now = still.now() - before_s
    ticket = Ticket(None, still.fleet.classes.by_name[qos], tenant, "", 10, now)
    if gate(still).enter(ticket, state(still).pool("", None), now) is True:
        state(still).nodes[A].in_flight += 1
    return ticket


def read(line: object) -> Any:
    return msgspec.json.decode(views.encode(line))


def test_a_service_says_who_waits_by_class_the_highest_first() -> None:
    still = facts()
    enter(still, "batch", "nightly", before_s=2.0)
    enter(still, "batch", "nightly", before_s=1.5)
    enter(still, "voice", "phone", before_s=0.09)
    (line,) = read([line for line in admission(still) if line is not None])
    assert (line["service"], line["mode"], line["queued"], line["running"]) == ("chat", "enforce", 2, 1)
    assert line["tenants"] == 2
    assert [each["name"] for each in line["classes"]] == ["voice", "default", "batch"]
    voice, default, batch = line["classes"]
    assert (voice["queued"], voice["longest_wait_s"], voice["sla_s"], voice["warning"]) == (1, 0.09, 0.1, True)
    assert (batch["queued"], batch["running"], batch["longest_wait_s"], batch["turns"]) == (1, 1, 1.5, 1)
    assert (batch["warning"], batch["preemptible"], default["sla_s"]) == (False, True, None)
    assert batch["turned_away"] == {"overloaded": 0, "queue_timeout": 0, "preempted": 0}
    assert line["endpoints"] == [{"endpoint": A, "limit": 1.0, "in_flight": 1, "waiting": 0, "first_token_ratio": None}]


def test_no_tenant_is_named() -> None:
    still = facts(Admission(limit="fixed", concurrency=1, queue=50))
    for number in range(9):
        enter(still, "batch", f"secret-{number}")
    said = views.encode([line for line in admission(still) if line is not None])
    assert b"secret" not in said
    assert b'"tenants":9' in said


def test_a_service_where_nobody_waits_says_so_and_what_runs() -> None:
    still = facts(Admission(mode="off"))
    state(still).nodes[A].in_flight = 3
    (line,) = [line for line in admission(still) if line is not None]
    assert (line.mode, line.running, line.classes, line.endpoints[0].limit) == ("off", 3, [], None)


def test_many_endpoints_let_streams_run_in_between() -> None:
    still = StillFacts(snapshot(service(*(f"10.0.0.{number}:80" for number in range(9)))))
    lines = list(admission(still, size=4))
    assert [line is None for line in lines] == [True, True, False]
    assert lines[-1] is not None and len(lines[-1].endpoints) == 9


async def test_the_page_over_a_socket() -> None:
    async with door(facts(ONE, service(B, name="code"))) as admin:
        answer = await admin.ask("GET", "/admission")
        assert answer.status == 200
        lines = answer.json()
        assert isinstance(lines, list)
        assert [line["service"] for line in lines] == ["chat", "code"]
        assert (await admin.ask("GET", "/admission?service=code")).json() == lines[1:]
        missing = await admin.ask("GET", "/admission?service=nobody")
        assert (missing.status, missing.error_code()) == (404, "not_found")


def test_health_tells_of_services_that_queue_and_of_no_others() -> None:
    still = facts()
    enter(still, "batch", before_s=2.0)
    assert "queue chat" not in views.health(still).parts
    enter(still, "batch", before_s=1.5)
    part = views.health(still).parts["queue chat"]
    assert (part.ok, part.detail) == (True, "1 waiting (batch 1), 1.5 s at most, 1 running")
    enter(still, "voice", before_s=0.09)
    health = views.health(still)
    part = health.parts["queue chat"]
    assert (part.ok, health.status) == (False, "ready")
    assert part.detail == "2 waiting (voice 1, batch 1), 1.5 s at most, 1 running, SLA in danger: voice"


def test_health_stays_short_however_many_services_queue() -> None:
    names = [f"s{number}" for number in range(views.MANY + 2)]
    still = StillFacts(snapshot(*(service(A, name=name, admission=ONE) for name in names), qos_policies=(BATCH,)))
    for each in still.fleet.services.values():
        assert each.gate is not None
        for _ in range(2):
            ticket = Ticket(None, still.fleet.classes.by_name["batch"], "", "", 10, still.now())
            if each.gate.enter(ticket, each.pool("", None), still.now()) is True:
                each.nodes[A].in_flight += 1
    parts = [name for name in views.health(still).parts if name.startswith("queue")]
    assert len(parts) == views.MANY + 1
    assert parts[-1] == "queues"
