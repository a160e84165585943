"""What is known of all services, and outlives every policy reload.

Keyed by endpoint and not by the policy's objects: a reload that changes a deadline must not forget that an engine is
down, and one that drops an endpoint must not keep what it knew (if it comes back, it starts afresh and is judged
anew). The same endpoint in two services is two nodes: the services' rules differ, and a model that breaks one engine's
embedding path says nothing about its chat path.

1. Nothing here does I/O or waits, so nothing needs a lock.
2. A service whose routes change is changed alone (`put`), at a cost that does not know how many others there are. One
   that only its routing table names may sleep: its models are known, and it is made when somebody asks for one.
"""

from collections.abc import Callable, Iterable, Iterator
from math import inf
from typing import Final

import msgspec

from sidecar.core.breaker import (
    Action,
    Breaker,
    Scope,
    State,
    Transition,
)
from sidecar.core.classes import Classes
from sidecar.core.identify import Identifier
from sidecar.core.models import MAX_MODEL_NAME, ModelTable
from sidecar.core.models import matches as matches
from sidecar.core.pool import Node as Node
from sidecar.core.pool import Pool as Pool
from sidecar.core.service import Agreement, ServiceState
from sidecar.kernel.ids import ServiceName
from sidecar.policy.schema import Identity, QosPolicy, Service, Snapshot

MAX_MODELS: Final = 1024  # model names remembered as belonging to a service; clients make names up


class BreakerView(msgspec.Struct, frozen=True):
    """A breaker as operators see it. Times are monotonic seconds; `version` grows with every change.

    `retry_at` is when a refused client should ask again: now, if none is refused. `evidence` is what the last change
    was concluded from, of one that is not closed what opened it; empty if it never moved. `held_until` is when an
    operator's order ends, infinity for with the next one, None where there is none. `observer` is the sidecar that said
    the last change, empty where that is this one; `registered` the log's version, (0, 0) where it knows none.
    """

    scope: Scope
    key: str
    service: str
    state: State
    version: int
    since: float
    why: str
    by: str
    retry_at: float
    evidence: str
    held_until: float | None = None
    observer: str = ""
    registered: tuple[int, int] = (0, 0)


class Sleeper:
    """A service that is known by its models alone."""

    __slots__ = ("models", "name")

    def __init__(self, name: ServiceName, models: tuple[str, ...]) -> None:
        self.name = name
        self.models = models


class Fleet:
    """All services of this sidecar. `chance` gives numbers in [0, 1); it is kept here for those who pick.

    `poison_key` is the secret of the fingerprints of prompts, <= 64 bytes; empty: anyone can compute them.
    """

    __slots__ = (
        "_asleep",
        "_by_model",
        "_first",
        "_made",
        "_models",
        "_poison_key",
        "_qos_policies",
        "agreement",
        "chance",
        "classes",
        "generation",
        "identifier",
        "services",
        "wake",
    )

    def __init__(
        self, chance: Callable[[], float], poison_key: bytes = b"", agreement: Agreement | None = None
    ) -> None:
        self.chance = chance
        self._poison_key = poison_key
        self.agreement = agreement
        """What is agreed on with other sidecars; None: this one decides alone."""
        self.services: dict[ServiceName, ServiceState] = {}
        """Replaced, and never changed, when one comes or goes: who goes through them may wait in between."""
        self.generation = 0
        """Grows whenever an endpoint may have come, changed or gone."""
        self.identifier = Identifier(Identity())
        self.classes = Classes(())
        self._qos_policies: tuple[QosPolicy, ...] = ()
        self.wake: Callable[[ServiceName], None] = _stay_asleep
        """Is to `put` a service that sleeps: somebody asks for it."""
        self._made: set[ServiceName] = set()
        self._asleep: dict[ServiceName, Sleeper] = {}
        self._models: ModelTable[ServiceState | Sleeper] | None = None
        """None: to be made anew."""
        self._first: ServiceState | Sleeper | None = None
        self._by_model: dict[str, ServiceState | None] = {}

    def apply(self, snapshot: Snapshot, now: float, made: Iterable[Service] = ()) -> list[Transition]:
        """Takes a new policy. Returns the breakers that it closed (their mode is now `off`).

        `made`: services that no file names; those that sleep and are in neither sleep on.
        """
        moved: list[Transition] = []
        services: dict[ServiceName, ServiceState] = {}
        added = tuple(made)
        if snapshot.qos_policies != self._qos_policies:
            self._qos_policies = snapshot.qos_policies
            self.classes = Classes(snapshot.qos_policies)
        for policy in (*snapshot.services, *added):
            name = ServiceName(policy.name)
            service = self.services.get(name) or ServiceState(policy, now, self._poison_key, self.agreement)
            moved.extend(service.use(policy, now))
            service.govern(self.classes, bool(self._qos_policies), now)
            services[name] = service
        for name, gone in self.services.items():
            if name not in services:
                for node in gone.nodes.values():
                    node.draining = True
        self.services = services
        self.generation += 1
        self._made = {ServiceName(policy.name) for policy in added}
        for name in services:
            self._asleep.pop(name, None)
        self._forget_models()
        self.identifier = Identifier(snapshot.identity, snapshot.qos_policies)
        return moved

    def put(self, policy: Service, now: float) -> list[Transition]:
        """Takes the policy of one service; one that is new comes after those of the files. Returns as `apply`."""
        name = ServiceName(policy.name)
        service = self.services.get(name)
        if service is None or policy.endpoints is not service.policy.endpoints:
            self.generation += 1
        if service is not None:
            if policy.models != service.policy.models:
                self._forget_models()
            moved = service.use(policy, now)
            service.govern(self.classes, bool(self._qos_policies), now)
            return moved
        service = ServiceState(policy, now, self._poison_key, self.agreement)
        moved = service.use(policy, now)
        service.govern(self.classes, bool(self._qos_policies), now)
        self.services = {**self.services, name: service}
        self._made.add(name)
        self._asleep.pop(name, None)
        self._forget_models()
        return moved

    def sleep(self, name: ServiceName, models: tuple[str, ...]) -> None:
        """A service that is there once it is asked for (`wake`). One that is awake stays so."""
        known = self._asleep.get(name)
        if name not in self.services and (known is None or known.models != models):
            self._asleep[name] = Sleeper(name, models)
            self._forget_models()

    def drop(self, name: ServiceName) -> None:
        """Forgets a service that no file names, asleep or awake; harmless where there is none."""
        gone = self.services.get(name) if name in self._made else None
        if gone is not None:
            for node in gone.nodes.values():
                node.draining = True
            self.services = {key: service for key, service in self.services.items() if key != name}
            self._made.discard(name)
            self.generation += 1
        if self._asleep.pop(name, None) is not None or gone is not None:
            self._forget_models()

    def _forget_models(self) -> None:
        self._models = None
        self._by_model.clear()

    def _find(self, model: str) -> ServiceState | None:
        """As `service_for`, of a name that is not remembered."""
        models = self._models
        if models is None:
            # Those of the files in their order, then the others in one that all sidecars have.
            listed: list[ServiceState | Sleeper] = [
                service for name, service in self.services.items() if name not in self._made
            ]
            others: list[tuple[str, ServiceState | Sleeper]] = [(name, self.services[name]) for name in self._made]
            others += self._asleep.items()
            ordered = listed + [each for _, each in sorted(others, key=_by_name)]
            entries: list[tuple[tuple[str, ...], ServiceState | Sleeper]] = [
                (each.models if isinstance(each, Sleeper) else each.policy.models, each) for each in ordered
            ]
            models = self._models = ModelTable(entries)
            self._first = ordered[0] if ordered else None
        found = models.find(model) if model else self._first
        if not isinstance(found, Sleeper):
            return found
        name = found.name
        self.wake(name)
        awake = self.services.get(name)
        if awake is None:  # its table is of no use here: whoever comes next has the model
            self._asleep.pop(name, None)
            self._forget_models()
            return self._find(model)
        return awake

    def tick(self, now: float) -> list[Transition]:
        """To be called once a second: learning, and what else time does beside the requests' path."""
        moved: list[Transition] = []
        for service in self.services.values():
            moved.extend(service.tick(now))
        return moved

    def service_for(self, model: str) -> ServiceState | None:
        """The service of a model: an exact name first, else the first glob in the policy's order; None: unknown.

        A request that names no model ("") belongs to the first service.
        """
        try:
            return self._by_model[model]
        except KeyError:
            pass
        found = self._find(model)
        if len(model) <= MAX_MODEL_NAME:
            if len(self._by_model) >= MAX_MODELS:
                self._by_model.clear()
            self._by_model[model] = found
        return found

    def views(self, now: float) -> Iterator[BreakerView]:
        """Every breaker worth showing: all nodes', and those of sessions and requests that ever moved.

        One at a time, as it is when its turn comes; the fleet may change in between.
        """
        for service in list(self.services.values()):
            for b in service.breakers():
                yield BreakerView(
                    b.scope,
                    b.key,
                    b.service,
                    b.state,
                    b.generation,
                    b.since,
                    b.why,
                    b.by,
                    b.retry_at(now),
                    b.evidence,
                    b.held_until,
                    b.observer,
                    (b.epoch, b.version),
                )

    def find(self, scope: Scope, key: str, now: float) -> list[Breaker]:
        """The breakers that an operator means: one of every service that knows `key`."""
        return [b for service in self.services.values() if (b := service.find(scope, key, now)) is not None]

    def override(
        self, scope: Scope, key: str, action: Action, now: float, by: str, for_s: float = inf
    ) -> list[Transition] | None:
        """Obeys an operator for so long, in every service that knows `key`; None if none does."""
        found = self.find(scope, key, now)
        if not found:
            return None
        forced = [breaker.force(action, now, by, now + for_s) for breaker in found]
        return [transition for transition in forced if transition is not None]


def _stay_asleep(name: ServiceName) -> None:
    pass


def _by_name(named: tuple[str, ServiceState | Sleeper]) -> str:
    return named[0]
