"""What one request was given: paid for once, given back once, whatever is called twice."""

import pytest

from sidecar.core.classes import Classes
from sidecar.core.gate.admit import Ticket
from sidecar.core.quotas.quota import Reservation
from sidecar.policy.schema import Admission as AdmissionRule
from sidecar.policy.schema import QosPolicy, Quota
from sidecar.proxy.admission import Admission
from tests.proxy.bench import Bench, service

DEFAULT = Classes(()).default
QUOTA = Quota(name="q", tokens_per_minute=1000, requests_per_minute=2)


def held(bench: Bench, tokens: int) -> Admission:
    admission = Admission(DEFAULT, bench.ledger.budgets("t", "m"))
    reservation = bench.ledger.reserve(admission.budgets, tokens, bench.clock.now)
    assert isinstance(reservation, Reservation)
    admission.reservation = reservation
    return admission


@pytest.mark.parametrize(("asked", "paid", "requests"), [(True, 30, 1), (False, 0, 0)], ids=["asked", "never asked"])
def test_it_is_paid_for_once_and_only_what_an_engine_was_asked(asked: bool, paid: int, requests: int) -> None:
    bench = Bench(service(1), quotas=(QUOTA,))
    admission = held(bench, 100)
    for _ in range(2):
        admission.settle(bench.ledger, paid, bench.clock.now, asked=asked)
    assert bench.ledger.counts["q"].settled_tokens == paid
    assert f"x-ratelimit-remaining-requests: {2 - requests}".encode() in bench.ledger.headers(
        admission.budgets, bench.clock.now
    )


def test_its_place_is_given_to_others_once() -> None:
    rule = AdmissionRule(limit="fixed", concurrency=1)
    bench = Bench(service(1, admission=rule), qos_policies=(QosPolicy(name="default", latency_sla_ms=1000),))
    gate = bench.state.gate
    assert gate is not None
    admission = Admission(bench.fleet.classes.default, ())
    admission.door = bench.pipeline.doors.door(bench.state, gate)
    admission.ticket = Ticket(object(), admission.qos, "t", "m", 10, bench.clock.now, True)
    assert admission.door.enter(admission.ticket, bench.clock.now) is True and gate.running == 1
    for _ in range(2):
        admission.leave(10, bench.clock.now)
    assert gate.running == 0 and admission.ticket is None


def test_what_it_waited_adds_up_over_all_its_waits() -> None:
    admission = Admission(DEFAULT, ())
    admission.let_in(5.0)
    assert admission.queued_s is None  # it did not wait
    for began, ended in ((10.0, 11.5), (20.0, 20.5)):
        admission.queued_at = began
        admission.let_in(ended)
    assert admission.queued_s == 2.0
