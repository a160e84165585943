"""What the tests of decisions share: policies of a few endpoints, and breakers brought into a state."""

import random

import msgspec

from sidecar.core.balance import Choice, Unavailable
from sidecar.core.breaker import Breaker, Denied, Permit, State, Transition
from sidecar.core.fleet import Fleet
from sidecar.core.service import ServiceState, Session
from sidecar.kernel.outcome import Result
from sidecar.policy.schema import Balance, Breakers, Endpoint, NodeBreaker, Seconds, Service, SessionBreaker, Snapshot

RULE = NodeBreaker(consecutive=5, failure_ratio=0.0, open_s=Seconds(10), open_max_s=Seconds(100), min_closed_ratio=0.0)
SESSION_RULE = SessionBreaker(consecutive=3, open_s=Seconds(30), max_sessions=100, idle_s=Seconds(600))


def snapshot_of(*services: Service) -> Snapshot:
    return Snapshot(version=1, services=services)


def service_of(count: int, rule: NodeBreaker = RULE, balance: Balance | None = None, **split: float) -> Service:
    """Endpoints `h1:80`, `h2:80`, ...; with a split, their versions take turns."""
    versions = list(split) or ["v1"]
    return Service(
        name="chat",
        endpoints=tuple(
            Endpoint(url=f"http://h{number}:80", version=versions[(number - 1) % len(versions)])
            for number in range(1, count + 1)
        ),
        split=split,
        breakers=Breakers(node=rule),
        balance=balance or Balance(),
    )


def fleet_of(*services: Service, seed: int = 1, now: float = 0.0) -> tuple[Fleet, ServiceState]:
    """A fleet, and its first service."""
    fleet = Fleet(random.Random(seed).random)
    fleet.apply(snapshot_of(*services), now)
    return fleet, next(iter(fleet.services.values()))


def chosen(result: Choice | Unavailable) -> Choice:
    assert isinstance(result, Choice), result
    return result


def refused(result: Choice | Unavailable) -> Unavailable:
    assert isinstance(result, Unavailable), result
    return result


def permitted(breaker: Breaker, now: float) -> Permit:
    permit = breaker.acquire(now)
    assert isinstance(permit, Permit), permit
    return permit


def record(breaker: Breaker, result: Result, now: float, times: int = 1) -> Transition | None:
    """Attempts that end at once; what the last of them did."""
    transition = None
    for _ in range(times):
        transition = breaker.record(permitted(breaker, now), result, now, "server_error")
    return transition


def trip(breaker: Breaker, now: float) -> None:
    """Failures until it is open."""
    for _ in range(1000):
        if breaker.state is State.OPEN:
            return
        record(breaker, Result.FAILURE, now)
    raise AssertionError("it never opened")


def with_sessions(rule: SessionBreaker = SESSION_RULE, count: int = 2) -> Service:
    return msgspec.structs.replace(service_of(count), breakers=Breakers(node=RULE, session=rule))


def end(service: ServiceState, session: Session, result: Result, now: float) -> Permit | Denied:
    """One request of a session that ends at once; what its breaker had said."""
    answer = service.admit_session(session, now)
    if isinstance(answer, Permit):
        service.record_session(session, answer, result, now, "x")
    return answer
