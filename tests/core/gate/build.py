"""What the tests of the gate share: a service of a few endpoints whose limits are given, and who goes through its gate
as the pipeline does, on a clock that is set by hand."""

import msgspec

from sidecar.core.classes import Classes, QosClass
from sidecar.core.gate.admit import Gate, Ticket, TurnedAway
from sidecar.core.pool import Node
from sidecar.core.service import ServiceState
from sidecar.kernel.errors import Reason
from sidecar.policy.schema import Admission, QosPolicy, Service
from tests.core.build import RULE, fleet_of, service_of

VOICE = QosPolicy(name="voice", latency_sla_ms=200, priority=9)
TEXT = QosPolicy(name="text", latency_sla_ms=1000, priority=5)
BATCH = QosPolicy(name="batch", latency_sla_ms=4000, priority=3, preemptible=True)
POLICIES = (VOICE, TEXT, BATCH)


def service_with_models(*models: tuple[str, ...]) -> Service:
    """Endpoints that serve these globs each."""
    service = service_of(len(models), RULE)
    endpoints = tuple(
        msgspec.structs.replace(endpoint, models=globs)
        for endpoint, globs in zip(service.endpoints, models, strict=True)
    )
    return msgspec.structs.replace(service, endpoints=endpoints)


class World:
    """A gate, the endpoints behind it, and those who are there. `limits`: of the endpoints, one for each."""

    def __init__(
        self,
        *limits: int,
        policies: tuple[QosPolicy, ...] = POLICIES,
        admission: Admission | None = None,
        models: tuple[tuple[str, ...], ...] = (),
    ) -> None:
        service = service_with_models(*models) if models else service_of(len(limits), RULE)
        self.service: ServiceState
        self.fleet, self.service = fleet_of(service)
        self.nodes: list[Node] = list(self.service.nodes.values())
        for node, limit in zip(self.nodes, limits, strict=True):
            node.limit = limit
        self.now = 100.0
        self.admission = admission or Admission()
        self.classes = Classes(policies)
        self.gate = Gate(self.admission, self.classes, self.now)

    def put(self, policy: Service) -> None:
        """Another policy; new endpoints have a limit of 1."""
        before = {node.key: node.limit for node in self.nodes}
        self.fleet.put(policy, self.now)
        self.nodes = list(self.service.nodes.values())
        for node in self.nodes:
            node.limit = before.get(node.key, 1.0)

    def qos(self, name: str) -> QosClass:
        return self.classes.by_name[name]

    def ticket(self, qos: str, tenant: str = "a", tokens: int = 100, model: str = "m", streams: bool = True) -> Ticket:
        return Ticket(None, self.qos(qos), tenant, model, tokens, self.now, streams)

    def enter(self, ticket: Ticket) -> TurnedAway | bool:
        verdict = self.gate.enter(ticket, self.service.pool(ticket.model, ticket.version), self.now)
        if verdict is True:
            self.send(ticket)
        return verdict

    def come(self, qos: str, tenant: str = "a", tokens: int = 100, model: str = "m", streams: bool = True) -> Ticket:
        """One more, whatever becomes of it."""
        ticket = self.ticket(qos, tenant, tokens, model, streams)
        self.enter(ticket)
        return ticket

    def send(self, ticket: Ticket) -> None:
        """As `pick`: to the endpoint with the most room."""
        pool = self.service.pool(ticket.model, ticket.version)
        pool.refresh(self.now)
        if pool.ready.nodes:
            ticket.node = min(pool.ready.nodes, key=lambda node: node.in_flight - node.limit)
            ticket.node.in_flight += 1

    def turns(self, most: int = 1_000_000) -> list[Ticket]:
        """Those who get a turn now, in their order."""
        given: list[Ticket] = []
        while len(given) < most and (ticket := self.gate.take(self.service.pool, self.now)) is not None:
            self.send(ticket)
            given.append(ticket)
        return given

    def away(self) -> list[tuple[Ticket, TurnedAway]]:
        """Those who are turned away now."""
        return self.gate.turned_away(self.now)

    def leave(self, ticket: Ticket, tokens: int | None = None) -> None:
        if ticket.node is not None:
            ticket.node.in_flight -= 1
        self.gate.leave(ticket, ticket.tokens if tokens is None else tokens, self.now)
        ticket.node = None

    def serve(self, running: list[Ticket], tokens: int | None = None) -> list[Ticket]:
        """The one that runs longest leaves; those who get a turn by that."""
        self.leave(running.pop(0), tokens)
        given = self.turns()
        running.extend(given)
        return given


def full(world: World, qos: str = "text", tenant: str = "first") -> list[Ticket]:
    """As many as run at once."""
    running = []
    for _ in range(sum(int(node.limit) for node in world.nodes)):
        ticket = world.ticket(qos, tenant)
        assert world.enter(ticket) is True
        running.append(ticket)
    return running


def names(tickets: list[Ticket]) -> list[str]:
    return [ticket.qos.name for ticket in tickets]


def reason(verdict: TurnedAway | bool) -> Reason:
    assert isinstance(verdict, TurnedAway), verdict
    return verdict.reason
