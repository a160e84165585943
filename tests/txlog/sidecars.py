"""Several sidecars and one server of the log, in virtual time: the real fleets and replicas, with a link that obeys.

Nothing runs by itself: `Network.turn` lets every sidecar that has a link write and read once, `passes` lets time go by
with a turn every so often. A link can be cut, and its answers lost; what is in between is not modelled here but by who
uses it (`test_invariants`).
"""

import random
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from msgspec.structs import replace

from sidecar.core.balance import Choice, Unavailable, pick
from sidecar.core.breaker import Breaker, Permit, Scope, State, Transition
from sidecar.core.fleet import Fleet
from sidecar.core.service import ServiceState
from sidecar.kernel.ids import EndpointKey
from sidecar.kernel.outcome import Result
from sidecar.policy.schema import Breakers, Endpoint, NodeBreaker, Seconds, Service, Shared, Snapshot
from sidecar.txlog.codec import register_key
from sidecar.txlog.fold import order_of
from sidecar.txlog.local import LocalStore
from sidecar.txlog.replica import Replica
from sidecar.txlog.store import Beat, StoreDown

Answer = TypeVar("Answer")

BEGIN_US = 1_700_000_000_000_000
RULE = NodeBreaker(
    consecutive=3,
    failure_ratio=0.0,
    open_s=Seconds(10),
    open_max_s=Seconds(100),
    probes=1,
    successes=2,
    min_closed_ratio=0.34,
    adaptive=False,
)


def policy_of(count: int = 3, rule: NodeBreaker = RULE, quorum: int = 1, name: str = "chat") -> Service:
    return Service(
        name=name,
        endpoints=tuple(Endpoint(url=f"http://h{number}:80") for number in range(1, count + 1)),
        breakers=Breakers(
            node=rule,
            session=replace(Breakers().session, consecutive=2, open_s=Seconds(5)),
            request=replace(Breakers().request, consecutive=2, open_s=Seconds(5)),
        ),
        shared=Shared(quorum=quorum),
    )


def at_once(work: Coroutine[Any, Any, Answer]) -> Answer:
    """What a coroutine gives that never waits."""
    try:
        work.send(None)
    except StopIteration as done:
        answer: Answer = done.value
        return answer
    raise AssertionError("it waited")


class Sidecar:
    """One sidecar: its fleet, its replica, its link to the server, and what its fleet was told."""

    def __init__(self, name: str, network: "Network", policy: Service, seed: int) -> None:
        self.name = name
        self.network = network
        self.linked = False
        self.down = False
        """The link is cut."""
        self.skew_s = 0.0
        chance = random.Random(seed)
        self.told: list[Transition] = []
        self.replica = Replica(
            name,
            clock=self.now,
            chance=chance.random,
            new_tx=lambda: chance.randbytes(16),
            tell=self.told.append,
        )
        self.fleet = Fleet(chance.random, agreement=self.replica)
        self.replica.fleet = self.fleet
        self.use(policy)

    def use(self, *policies: Service) -> None:
        for transition in self.fleet.apply(Snapshot(version=1, services=policies), self.now()):
            self.replica.transition(transition)

    def now(self) -> float:
        return self.network.now + self.skew_s

    @property
    def service(self) -> ServiceState:
        return next(iter(self.fleet.services.values()))

    def breaker(self, number: int = 1) -> Breaker:
        return self.service.nodes[EndpointKey(f"h{number}:80")].breaker

    def fails(self, number: int = 1, times: int = 3) -> None:
        """Requests that fail on an endpoint, as long as it takes any."""
        for _ in range(times):
            self.ends(self.breaker(number), Result.FAILURE)

    def ends(self, breaker: Breaker, result: Result) -> bool:
        """A request that ends at once; False if its breaker refused it."""
        permit = breaker.acquire(self.now())
        if not isinstance(permit, Permit):
            return False
        self.tells(permit.moved)
        self.tells(breaker.record(permit, result, self.now(), "server_error"))
        return True

    def tells(self, transition: Transition | None, trace: str = "") -> None:
        if transition is not None:
            self.replica.transition(transition, trace)

    def asks(self) -> Choice | Unavailable:
        """A request for an endpoint, as the pipeline asks."""
        self.service.asked_at = self.now()
        return pick(self.service, None, None, "", (), self.now(), self.fleet.chance)

    # Its link.

    def connect(self) -> None:
        """As `TransactionLog` begins."""
        store, replica = self.network.store, self.replica
        (reply,) = at_once(store.call([Beat(by=self.name)]))
        replica.server.told(reply.now_us, self.now(), self.now())
        replica.members = reply.ms
        replica.went_up(self.now())
        self.linked = True
        self.read_whole()

    def read_whole(self) -> None:
        replica = self.replica
        for shard in replica.stale:
            image = at_once(self.network.store.image(shard))
            replica.begin_image(image)
            there = {key: order_of(data) for key, data in replica.registers(image.registers, self.now())}
            replica.end_image(shard, there)

    def disconnect(self) -> None:
        if self.linked:
            self.linked = False
            self.replica.went_away(self.now())

    def write(self, *, lose_answers: bool = False) -> int:
        """Sends what there is; how much that was. Lost answers end the link, as a timeout does."""
        self.replica.tick(self.now())
        jobs = self.replica.jobs(self.now())
        if not jobs:
            return 0
        replies = at_once(self.network.store.call([job.call for job in jobs]))
        if lose_answers:
            self.disconnect()
            return len(jobs)
        for job, reply in zip(jobs, replies, strict=True):
            self.replica.server.told(reply.now_us, self.now(), self.now())
            self.replica.replied(job, reply, self.now())
        return len(jobs)

    def read(self) -> int:
        """Reads what there is; how much that was."""
        whole = len(self.replica.stale)
        self.read_whole()
        store = self.network.store
        after = {shard: self.replica.position(shard) for shard in range(16)}
        entries = at_once(store.read(0, after, 0, 1000))
        self.replica.entries(entries, self.now())
        return whole + len(entries)

    def beat(self) -> None:
        store = self.network.store
        (reply,) = at_once(store.call([Beat(by=self.name)]))
        self.replica.members = reply.ms
        self.replica.counted(at_once(store.counts()))

    def turn(self) -> int:
        """One round of its loops; how much there was to do."""
        if self.down:
            self.disconnect()
            self.replica.tick(self.now())
            return 0
        if not self.linked:
            self.connect()
        try:
            return self.write() + self.read()
        except StoreDown:
            self.disconnect()
            return 0


class Network:
    """The server, the sidecars, and the time."""

    def __init__(self, count: int, policy: Service | None = None, store: LocalStore | None = None) -> None:
        self.now = 1000.0
        self.server_skew_us = 0
        self.store = store or LocalStore(self.now_us)
        self.policy = policy or policy_of()
        self.sidecars = [Sidecar(f"pod-{number}", self, self.policy, number) for number in range(1, count + 1)]
        self.turn()
        for sidecar in self.sidecars:
            sidecar.beat()

    def now_us(self) -> int:
        return BEGIN_US + int(self.now * 1e6) + self.server_skew_us

    def turn(self, rounds: int = 50) -> None:
        """Everybody writes and reads until nobody has anything to do."""
        for _ in range(rounds):
            if not sum(sidecar.turn() for sidecar in self.sidecars):
                return
        raise AssertionError("they never come to rest")

    def passes(self, seconds: float, step_s: float = 0.25, asking: Iterable[Sidecar] = ()) -> None:
        """Time goes by, with a turn at every step; those `asking` have traffic all the while."""
        until = self.now + seconds
        while self.now < until - 1e-9:
            self.now = min(until, self.now + step_s)
            for sidecar in asking:
                sidecar.service.asked_at = sidecar.now()
            self.turn()

    def loses_all(self) -> None:
        """The server is flushed; nobody's link notices."""
        self.store = LocalStore(self.now_us)

    def states(self, number: int = 1) -> list[State]:
        """What each sidecar holds an endpoint for."""
        return [sidecar.breaker(number).state for sidecar in self.sidecars]

    def register(self, number: int = 1) -> str:
        return register_key(Scope.NODE, self.policy.name, f"h{number}:80")
