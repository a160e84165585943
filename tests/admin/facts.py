"""A process as the admin pages see it, with clocks that stand still."""

from collections.abc import Sequence

import msgspec

from sidecar.admin.facts import Facts, Phase
from sidecar.core.breaker import Breaker, Permit, State, Transition
from sidecar.core.fleet import Fleet
from sidecar.core.poison import Condemned
from sidecar.kernel.errors import Reason
from sidecar.kernel.ids import EndpointKey, ServiceName
from sidecar.kernel.outcome import Result
from sidecar.policy.schema import Breakers, Endpoint, NodeBreaker, Service, Snapshot
from sidecar.policy.store import PolicyStore
from sidecar.proxy.ports import AttemptRecord, RequestRecord

A = EndpointKey("127.0.0.1:8000")
B = EndpointKey("127.0.0.1:8001")
CHAT = ServiceName("chat")
NO_FLOOR = Breakers(node=NodeBreaker(min_closed_ratio=0.0))


def service(*endpoints: Endpoint | str, name: str = CHAT, **changes: object) -> Service:
    """A service over `host:port`s or endpoints, of which all may open."""
    made = tuple(each if isinstance(each, Endpoint) else Endpoint(url=f"http://{each}") for each in endpoints)
    return msgspec.structs.replace(Service(name=name, endpoints=made, breakers=NO_FLOOR), **changes)


def snapshot(*services: Service, **changes: object) -> Snapshot:
    """A policy of these services."""
    return msgspec.structs.replace(Snapshot(version=7, services=services), **changes)


class Transitions:
    """A recorder that keeps transitions, and refuses to be told anything else."""

    def __init__(self) -> None:
        self.seen: list[Transition] = []

    def transition(self, transition: Transition) -> None:
        self.seen.append(transition)

    def attempt(self, record: AttemptRecord) -> None:
        raise NotImplementedError

    def request(self, record: RequestRecord) -> None:
        raise NotImplementedError

    def condemned(self, prompt: Condemned) -> None:
        raise NotImplementedError

    def refused(self, reason: Reason) -> None:
        raise NotImplementedError

    def malformed_upstream(self, endpoint: EndpointKey) -> None:
        raise NotImplementedError


class StillFacts:
    """`Facts` of a process at monotonic second 1000, which is Unix second 1,700,000,000."""

    def __init__(self, policy: Snapshot) -> None:
        self.fleet = Fleet(lambda: 0.5)
        self.fleet.apply(policy, 1000.0)
        self.store = PolicyStore(policy)
        self.recorder = Transitions()
        self.phase = Phase.SERVING
        self.monotonic_s = 1000.0
        self.drains = 0

    def now(self) -> float:
        return self.monotonic_s

    def wall(self) -> float:
        return 1_700_000_000.0 + self.monotonic_s - 1000.0

    def drain(self) -> None:
        self.drains += 1
        self.phase = Phase.DRAINING

    async def exposition(self) -> tuple[bytes, str]:
        return b"m 1\n", "text/plain; version=0.0.4; charset=utf-8"


def breaker(facts: Facts, key: EndpointKey = A, name: ServiceName = CHAT) -> Breaker:
    """A node's breaker."""
    return facts.fleet.services[name].nodes[key].breaker


def trip(breakers: Sequence[Breaker], now: float) -> None:
    """Open them on evidence."""
    for each in breakers:
        while each.state is State.CLOSED:
            permit = each.acquire(now)
            assert isinstance(permit, Permit)
            each.record(permit, Result.FAILURE, now, "reset")
