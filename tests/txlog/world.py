"""A few sidecars, one server and everything that may go wrong between them, in virtual time and in one thread.

The sidecars are real: a `Replica` with its `Fleet`, driven as `TransactionLog` drives it; the server is a `LocalStore`
that an `Oracle` watches. Between them calls are lost, done though nobody hears of it, done much later or twice; what is
read comes in part, twice or out of order; the server is flushed, its log is trimmed, it fails over and loses the last
records; its clock steps, sidecars sleep. Nothing here is random: whoever drives the world chooses.
"""

import random
from collections.abc import Callable, Coroutine, Iterable
from math import inf
from typing import Any, Literal, TypeVar

from msgspec.structs import replace

from sidecar.core.breaker import Action, Breaker, Permit, Scope, State, Transition, min_closed
from sidecar.core.fleet import Fleet
from sidecar.core.service import ServiceState
from sidecar.kernel.ids import EndpointKey, ServiceName, SessionId
from sidecar.kernel.outcome import Result
from sidecar.policy.schema import (
    Adaptive,
    Breakers,
    Endpoint,
    NodeBreaker,
    RequestBreaker,
    Seconds,
    Service,
    SessionBreaker,
    Shared,
    Snapshot,
)
from sidecar.txlog.codec import (
    SHARDS,
    Code,
    Kind,
    Record,
    decode,
    encode,
    encode_body,
    parse_key,
    register_key,
    shard_of,
)
from sidecar.txlog.fold import order_of
from sidecar.txlog.lease import LEASE_MS
from sidecar.txlog.local import LocalStore
from sidecar.txlog.replica import REFUSED_S, Job, Replica
from sidecar.txlog.store import Ask, Beat, Call, Entry, Propose, Renew, Reply, Report, Restore, Share, StoreDown
from tests.txlog import linear
from tests.txlog.oracle import Op, Oracle

SERVICE = "chat"
NODES = 4
NAMES = ("one", "two", "three")
KEYS = tuple(
    [register_key(Scope.NODE, SERVICE, f"h{i}:80") for i in range(NODES)]
    + [register_key(Scope.SESSION, SERVICE, "s"), register_key(Scope.REQUEST, SERVICE, "/r")]
)
START_US = 1_790_000_000_000_000
MOST_PERMITS = 8  # requests in flight at a sidecar
COUNT = 50
ROUNDS = 60  # in which all must agree: of 10 ms, so within a second
SKEW_MS = 2000  # by which the clocks of two servers may differ

T = TypeVar("T")

Fate = Literal["done", "lost", "unheard", "half", "late"]
"""What becomes of calls: done and heard of; never done; done, and the answer lost; half of them; done much later."""
Strange = Literal["fits", "stale", "again", "ahead", "result", "lease", "tie"]
"""A proposal that fits, of an old version, with the register's own tx, of a later epoch; a result or a lease of a probe
that may be anybody's; another record of the register's version."""
Reload = Literal["as it was", "fewer", "floor", "off"]
"""A policy as at the start; without the last endpoint; with a floor of all but one; with endpoints' breakers off."""
Reading = Literal["whole", "part", "twice", "reversed", "hole"]
"""How entries come: all; the first few; all and again; in reverse; without one."""


class Clock:
    """Seconds that go when told."""

    def __init__(self) -> None:
        self.us = 0
        self.skew_us = 0

    def server_us(self) -> int:
        return START_US + self.us + self.skew_us


class Server:
    """A store that is watched; `journal` is what it did, to be done again up to where a failover lost the rest."""

    def __init__(self, clock: Clock, make: Callable[[Callable[[], int]], LocalStore]) -> None:
        self.clock = clock
        self.make = make
        self.at_us: int | None = None
        self.begin([])

    def begin(self, journal: list[tuple[int, Call]]) -> None:
        """A server that did this, and nothing else."""
        self.store = self.make(self._now_us)
        self.oracle = Oracle()
        self.journal: list[tuple[int, Call]] = []
        self.positions = ["0"] * SHARDS
        self.trimmed = False
        for at_us, call in journal:
            self.at_us = at_us
            self.do(call)
        self.at_us = None

    def do(self, call: Call) -> Reply:
        """One call, held against the rules."""
        self.journal.append((self._now_us(), call))
        (reply,) = run(self.store.call([call]))
        appended: list[bytes] = []
        if not isinstance(call, Beat | Share):
            shard = shard_of(call.key)
            entries = run(self.store.history(shard, evidence=False, after=self.positions[shard], count=99))
            if entries:
                self.positions[shard] = entries[-1].id
            appended = [entry.data for entry in entries]
        self.oracle.saw(call, reply, appended)
        return reply

    def trim(self, shard: int, keep: int) -> None:
        """Drops all but the last records of a shard's log."""
        entries = self.store._shards[shard].log._entries
        while len(entries) > keep:
            entries.popleft()
            self.trimmed = True

    def registers(self) -> dict[str, bytes]:
        images = [run(self.store.image(shard)) for shard in range(SHARDS)]
        return {decode(data).key: data for image in images for data in image.registers}

    def _now_us(self) -> int:
        return self.clock.server_us() if self.at_us is None else self.at_us


class Sidecar:
    """One sidecar: its fleet, its part in the log, and the requests it has in flight."""

    def __init__(self, name: str, policy: Service, clock: Clock, seed: int) -> None:
        self.name = name
        self.clock = clock
        self.slept_us = 0
        self._policy = policy
        self._chance = random.Random(seed)
        self.cut_off = False
        self.broken = False
        self.start()

    def start(self) -> None:
        """A new process: it knows nothing."""
        chance = self._chance
        self.replica = Replica(
            self.name, clock=self.now, chance=chance.random, new_tx=lambda: chance.randbytes(16), tell=self._told
        )
        fleet = Fleet(chance.random, b"", self.replica)
        self.replica.fleet = fleet
        fleet.apply(Snapshot(version=1, services=(self._policy,)), self.now())
        self.permits: list[tuple[Breaker, Permit]] = []
        self.orders: dict[str, tuple[int, int, int, bytes]] = {}

    def now(self) -> float:
        return 1000.0 + (self.clock.us + self.slept_us) / 1e6

    @property
    def service(self) -> ServiceState:
        return self.replica.fleet.services[ServiceName(SERVICE)]

    def knows(self, key: str) -> bool:
        """Whether a request could meet it here: an endpoint may have left."""
        scope, _, name = parse_key(key)
        return scope != Scope.NODE or EndpointKey(name) in self.service.nodes

    def breaker(self, key: str) -> Breaker:
        scope, _, name = parse_key(key)
        service, now = self.service, self.now()
        if scope == Scope.NODE:
            return service.nodes[EndpointKey(name)].breaker
        if scope == Scope.REQUEST:
            return service.request_breaker(name, now)
        service.session(SessionId(name), now)
        found = service.find(Scope.SESSION, name, now)
        assert found is not None
        return found

    def use(self, policy: Service) -> None:
        """A reload."""
        for transition in self.replica.fleet.apply(Snapshot(version=2, services=(policy,)), self.now()):
            self.moved(transition)

    def moved(self, transition: Transition | None) -> None:
        """What the request path does with a transition."""
        if transition is not None:
            self.replica.transition(transition, "t" * 32)

    def _told(self, transition: Transition) -> None:
        assert transition.agreed or transition.why in ("floor", "mode_off"), transition

    def known(self) -> dict[str, bytes]:
        """The registers as it knows them."""
        return {key: data for shard in range(SHARDS) for key, data in self.replica.fold.shard(shard)}

    def went_away(self) -> None:
        self.replica.went_away(self.now())

    def never_back(self) -> None:
        """6: no register that was known gets earlier."""
        for key, data in self.known().items():
            order = order_of(data)
            assert order >= self.orders.get(key, order), f"6: {self.name} went back in {key}"
            self.orders[key] = order


class World:
    """All of it. Every operation leaves the invariants as they must be, or raises AssertionError."""

    def __init__(
        self,
        make: Callable[[Callable[[], int]], LocalStore] = LocalStore,
        *,
        quorum: int = 1,
        probes: int = 1,
        successes: int = 2,
        seed: int = 0,
        sidecar: type[Sidecar] = Sidecar,
    ) -> None:
        self.clock = Clock()
        self.server = Server(self.clock, make)
        self.policy = policy_of(quorum, probes, successes)
        self.sidecars = [sidecar(name, self.policy, self.clock, seed + i) for i, name in enumerate(NAMES)]
        self.late: list[list[Op]] = []
        self.ops: list[Op] = []
        self.there: list[bytes] = []
        self.forgets = False
        self.photograph: tuple[int, str, int, dict[str, bytes]] | None = None
        self._numbers = 0
        self._turn = 0

    # --- what sidecars do ---------------------------------------------------------------------------------------------

    def fail(self, i: int, key: str, proofs: int = 0) -> None:
        """A breaker sees what opens it: failures, or (`proofs`) a detector's evidence."""
        sidecar = self.sidecars[i]
        if not sidecar.knows(key):
            return
        breaker, now = sidecar.breaker(key), sidecar.now()
        if proofs:
            sidecar.moved(breaker.trip("gray", "late", proofs, Adaptive(), now))
            return
        if breaker.state is State.CLOSED:
            permit = breaker.acquire(now)
            assert isinstance(permit, Permit)
            sidecar.moved(breaker.record(permit, Result.FAILURE, now, "server_error"))

    def request(self, i: int, key: str) -> None:
        """A request asks a breaker for leave."""
        sidecar = self.sidecars[i]
        if not sidecar.knows(key):
            return
        breaker, now = sidecar.breaker(key), sidecar.now()
        sidecar.service.asked_at = now
        if len(sidecar.permits) < MOST_PERMITS:
            permit = breaker.acquire(now)
            if isinstance(permit, Permit):
                sidecar.moved(permit.moved)
                sidecar.permits.append((breaker, permit))

    def end(self, i: int, which: int, result: Result) -> None:
        """A request ends."""
        sidecar = self.sidecars[i]
        if sidecar.permits:
            breaker, permit = sidecar.permits.pop(which % len(sidecar.permits))
            sidecar.moved(breaker.record(permit, result, sidecar.now(), "server_error"))

    def order(self, i: int, key: str, action: Action, for_s: float = inf) -> None:
        """An operator speaks."""
        sidecar = self.sidecars[i]
        if not sidecar.knows(key):
            return
        breaker, now = sidecar.breaker(key), sidecar.now()
        breaker.force(action, now, "ops", now + for_s)
        sidecar.replica.order(breaker, action, "ops", for_s, now)

    def share(self, i: int) -> None:
        self.sidecars[i].replica.share(Share(service=SERVICE, blob=b"summary", keep_ms=10_000))

    def sleep(self, i: int, ms: int) -> None:
        """A sidecar's process stood still, and its clock did not: to itself it is later."""
        self.sidecars[i].slept_us += ms * 1000

    def reload(self, i: int, how: Reload) -> None:
        """A sidecar's policy changes, and the others' does not, or not yet."""
        self.sidecars[i].use(changed(self.policy, how))

    def die(self, i: int) -> None:
        """A sidecar is killed, and started again."""
        self.sidecars[i].start()

    # --- what their logs do -------------------------------------------------------------------------------------------

    def write(self, i: int, fate: Fate = "done") -> bool:
        """One round of what is to be told; whether there was anything."""
        sidecar = self.sidecars[i]
        replica = sidecar.replica
        if not replica.up:
            return False
        replica.tick(sidecar.now())
        jobs = replica.jobs(sidecar.now())
        if jobs:
            self._guarded(sidecar, lambda: self._write(sidecar, jobs, fate))
        return bool(jobs)

    def read(self, i: int, reading: Reading = "whole") -> bool:
        """One round of reading; whether there was anything."""
        sidecar = self.sidecars[i]
        return sidecar.replica.up and bool(self._guarded(sidecar, lambda: self._read(sidecar, reading)))

    def beat(self, i: int, fate: Fate = "done") -> None:
        """What is done once a second, here and with the log."""
        sidecar = self.sidecars[i]
        for transition in sidecar.replica.fleet.tick(sidecar.now()):
            sidecar.moved(transition)
        if sidecar.replica.up:
            self._guarded(sidecar, lambda: self._beat(sidecar, fate))

    def come_up(self, i: int, fate: Fate = "done") -> None:
        """One try to reach the server."""
        sidecar = self.sidecars[i]
        if not sidecar.replica.up:
            self._guarded(sidecar, lambda: self._begin(sidecar, fate))

    def _guarded(self, sidecar: Sidecar, do: Callable[[], object]) -> object:
        try:
            return do()
        except StoreDown:
            sidecar.went_away()
            return True

    def _begin(self, sidecar: Sidecar, fate: Fate) -> None:
        sidecar.broken = False
        (reply,) = self._exchange(sidecar, [Beat(by=sidecar.name)], fate)
        sidecar.replica.server.told(reply.now_us, sidecar.now(), sidecar.now())
        sidecar.replica.members = max(1, reply.ms)
        sidecar.replica.went_up(sidecar.now())
        for shard in sidecar.replica.stale:
            self._read_whole(sidecar, shard)

    def _write(self, sidecar: Sidecar, jobs: list[Job], fate: Fate) -> None:
        replica = sidecar.replica
        replies = self._exchange(sidecar, [job.call for job in jobs], fate)
        replica.server.told(replies[-1].now_us, sidecar.now(), sidecar.now())
        for job, reply in zip(jobs, replies, strict=True):
            replica.replied(job, reply, sidecar.now())

    def _read(self, sidecar: Sidecar, reading: Reading) -> bool:
        self._reachable(sidecar)
        replica = sidecar.replica
        stale = replica.stale
        for shard in stale:
            self._read_whole(sidecar, shard)
        after = {shard: replica.position(shard) for shard in range(SHARDS)}
        entries = _as(reading, run(self.server.store.read(0, after, 0, COUNT)))
        replica.entries(entries, sidecar.now())
        return bool(entries or stale)

    def _read_whole(self, sidecar: Sidecar, shard: int) -> None:
        self._reachable(sidecar)
        image = run(self.server.store.image(shard))
        replica = sidecar.replica
        replica.begin_image(image)
        known = replica.registers(image.registers, sidecar.now())
        replica.end_image(shard, {key: order_of(data) for key, data in known})

    def _beat(self, sidecar: Sidecar, fate: Fate) -> None:
        replica = sidecar.replica
        (reply,) = self._exchange(sidecar, [Beat(by=sidecar.name)], fate)
        replica.server.told(reply.now_us, sidecar.now(), sidecar.now())
        replica.members = max(1, reply.ms)
        replica.counted(run(self.server.store.counts()))
        for shard in range(SHARDS):
            replica.fold.forget(shard, replica.server.now_us(sidecar.now()))

    def _reachable(self, sidecar: Sidecar) -> None:
        if sidecar.cut_off or sidecar.broken:
            raise StoreDown("timeout", "no answer")

    def _exchange(self, sidecar: Sidecar, calls: list[Call], fate: Fate) -> list[Reply]:
        """Carries calls to the server and answers back, or not."""
        self._reachable(sidecar)
        self._turn += 1
        ops = [Op(self._turn, call) for call in calls]
        if fate == "late":
            self.late.append(ops)
            self.ops += ops
            raise StoreDown("timeout", "no answer")
        if fate == "lost":
            raise StoreDown("refused", "nobody listens")
        self.ops += ops
        done = ops if fate != "half" else ops[: (len(ops) + 1) // 2]
        replies = [self.server.do(op.call) for op in done]
        if fate != "done":
            raise StoreDown("reset", "the connection was reset")
        self._turn += 1
        for op, reply in zip(ops, replies, strict=True):
            op.ended, op.reply = self._turn, reply
        return replies

    # --- what goes wrong ----------------------------------------------------------------------------------------------

    def deliver(self) -> None:
        """What was under way for long arrives."""
        for ops in self.late[:1]:
            for op in ops:
                self.server.do(op.call)
        del self.late[:1]

    def repeat(self, back: int) -> None:
        """A call that was done is done once more, if its caller might send it twice."""
        if self.server.journal:
            _, call = self.server.journal[-1 - back % len(self.server.journal)]
            if not isinstance(call, Ask) and not (isinstance(call, Propose) and (call.order or call.quorum > 1)):
                self._turn += 1
                op = Op(self._turn, call)
                self.ops.append(op)
                op.reply = self.server.do(call)
                self._turn += 1
                op.ended = self._turn

    def stranger(self, what: Strange, key: str, number: int) -> None:
        """Somebody calls who is none of our sidecars, and sees the register as it is or as it is not."""
        seen = self.server.registers().get(key)
        record = decode(seen) if seen else Record(Kind.TRANSITION, Code.CLOSED, 0, 0, bytes(16), key, SERVICE, "")
        opens = record.state == Code.CLOSED
        call: Call = Propose(
            key=key,
            service=SERVICE,
            kind=Kind.TRANSITION,
            state=Code.OPEN if opens else Code.CLOSED,
            epoch=record.epoch,
            version=record.version - (what == "stale"),
            tx=record.tx if seen and what == "again" else self._tx(),
            body=encode_body(key, SERVICE, "stranger"),
            by="stranger",
            wait_ms=1000 if opens else 0,
            base_ms=1000,
            max_ms=8000,
            size=NODES if opens else 0,
            minimum=min_closed(NODES, self.policy.breakers.node.min_closed_ratio) if opens else 0,
        )
        if what == "ahead" and isinstance(call, Propose):
            if seen:
                return
            call = replace(call, epoch=self.clock.server_us() // 1_000_000 + number)
        elif what == "result":
            call = Report(
                key=key,
                service=SERVICE,
                by="stranger",
                epoch=record.epoch,
                version=record.version - number % 2,
                seq=number,
                ok=number % 3 == 0,
                again=False,
                lease_ms=LEASE_MS,
                probes=self.policy.breakers.node.probes,
                successes=self.policy.breakers.node.successes,
                tx=self._tx(),
                closed_body=encode_body(key, SERVICE, "stranger"),
                reopened_body=encode_body(key, SERVICE, "stranger"),
            )
        elif what == "lease":
            call = Renew(
                key=key, service=SERVICE, epoch=record.epoch, version=record.version, seq=number, lease_ms=LEASE_MS
            )
        elif what == "tie":
            if not seen:
                return
            tx = (b"\xff" if number % 2 else b"\0") + self._tx()[1:]
            state = (record.state + number) % 3
            wait_ms = 1000 if state == Code.OPEN else 0
            call = Restore(
                key=key, service=SERVICE, record=encode(replace(record, tx=tx, state=state, wait_ms=wait_ms))
            )
        self._turn += 2
        op = Op(self._turn - 1, call)
        self.ops.append(op)
        op.reply = self.server.do(call)
        op.ended = self._turn

    def _tx(self) -> bytes:
        self._numbers += 1
        return b"stranger" + self._numbers.to_bytes(8, "big")

    def cut(self, i: int, off: bool) -> None:
        """A partition of one sidecar begins or ends."""
        self.sidecars[i].cut_off = off

    def flush(self) -> None:
        """All is gone, and nobody's connection breaks. It takes longer than clocks differ by: positions are times."""
        self._another_server([])
        self.clock.us += (2 * SKEW_MS + 1) * 1000

    def failover(self, lost: int, skew_ms: int) -> None:
        """Another server goes on, without the last calls and with a clock of its own; connections break."""
        self.clock.skew_us = skew_ms * 1000
        journal = self.server.journal
        self._another_server(journal[: max(0, len(journal) - lost)])
        for sidecar in self.sidecars:
            sidecar.broken = True

    def trim(self, shard: int, keep: int) -> None:
        self.server.trim(shard, keep)

    def passes(self, ms: int) -> None:
        """Time goes by."""
        self.clock.us += ms * 1000
        self.forgets = self.forgets or ms >= 3_600_000

    def snapshot(self, key: str) -> None:
        """A shard is read whole, to be held against its log later (10)."""
        image = run(self.server.store.image(shard_of(key)))
        registers = {decode(data).key: data for data in image.registers}
        self.photograph = image.shard, image.position, image.n, registers

    def _another_server(self, journal: list[tuple[int, Call]]) -> None:
        self.linear()
        self.server.begin(journal)
        self.ops = []
        self.late = []
        self.photograph = None
        self.there = list(self.server.registers().values())

    # --- what must hold -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """After every step: no sidecar went back (6). The rest is held by the oracle as it happens."""
        for sidecar in self.sidecars:
            sidecar.never_back()

    def linear(self) -> None:
        """What callers were told can have been told by one register per key."""
        linear.check(self.ops, self.there, self.forgets)

    def heal(self) -> None:
        """All faults end; within a second all agree with the server (7), nothing waits (8), the log says it (10)."""
        for sidecar in self.sidecars:
            sidecar.cut_off = False
        while self.late:
            self.deliver()
        for i in range(len(self.sidecars)):
            self.beat(i)
        self._settles()
        # What the floor refused is looked at again.
        self.clock.us += round(REFUSED_S * 1_000_000) + 1
        self._settles()
        self._agreed()
        self._replayed()
        self.check()
        self.linear()

    def _settles(self) -> None:
        """Everybody talks until nobody has anything to say."""
        for _ in range(ROUNDS):
            busy = False
            for i, sidecar in enumerate(self.sidecars):
                if not sidecar.replica.up:
                    self.come_up(i)
                    busy = True
                busy |= self.write(i) | self.read(i)
            if not busy:
                break
            self.clock.us += 10_000
        else:
            raise AssertionError("7: they find no end")

    def _agreed(self) -> None:
        registers = self.server.registers()
        for sidecar in self.sidecars:
            assert not len(sidecar.replica.ring), f"8: {sidecar.name} has yet to tell what it knows"
            folded = sidecar.known()
            for key in {*registers, *folded}:
                known, there = folded.get(key, b""), registers.get(key, b"")
                if not there:
                    assert known[2] == Code.CLOSED, f"7: {sidecar.name} knows {key}, and the server does not"
                    continue
                theirs = order_of(there)
                if not known:
                    assert theirs[2] == Code.CLOSED, f"7: {sidecar.name} does not know {key}"
                    continue
                assert order_of(known) == theirs, f"7: {sidecar.name} has {order_of(known)} of {key}, not {theirs}"
                self._obeyed(sidecar, key, decode(there))

    def _obeyed(self, sidecar: Sidecar, key: str, register: Record) -> None:
        """The breaker is what the register says, unless it may not or knows more."""
        scope, _, name = parse_key(key)
        breaker = sidecar.service.known(Scope(scope), name)
        if breaker is None or breaker.ours:
            return
        lent = register.state != Code.CLOSED and not register.held and breaker.state is not State.CLOSED
        assert breaker.shared or not lent, f"7: {sidecar.name} probes {key} on its own"
        if scope == Scope.NODE and sidecar.service.policy.breakers.node.mode == "off":
            # Nothing but an order keeps it open; one that is over may stand until the next beat.
            over = not register.held or 0 < register.expires_us <= self.clock.server_us()
            obeys = over or register.state == Code.CLOSED if breaker.state is State.CLOSED else register.held
            assert obeys, f"7: {sidecar.name}: {key} is {breaker.state} where it is off, the register {register}"
            return
        states = {Code.CLOSED: State.CLOSED, Code.OPEN: State.OPEN, Code.HALF_OPEN: State.HALF_OPEN}
        if breaker.state is states[Code(register.state)]:
            return
        floor = breaker.state is State.CLOSED and scope == Scope.NODE and not sidecar.service.roster.may_open()
        closed_here = breaker.state is State.CLOSED and breaker.why in ("floor", "capacity", "panic")
        assert floor or closed_here, f"7: {sidecar.name}: {key} is {breaker.state}, the register {register}"

    def _replayed(self) -> None:
        """10: a snapshot and what came after it are the registers."""
        if self.photograph is None:
            return
        shard, position, n, registers = self.photograph
        entries = run(self.server.store.history(shard, evidence=False, after=position, count=100_000))
        records = [(decode(entry.data), entry.data) for entry in entries]
        if records and (records[0][0].n != n + 1 if n else self.server.trimmed):
            assert self.server.trimmed, "11: records are missing that nobody trimmed"
            return
        for record, data in records:
            if record.kind != Kind.SUSPECT:
                registers[record.key] = data
        there = {key: data for key, data in self.server.registers().items() if shard_of(key) == shard}
        for key, data in registers.items():
            assert there.get(key, data) == data, f"10: {key} is not what its log says"
        assert not set(there) - set(registers), "10: registers that no record tells of"
        self.photograph = None

    def close(self) -> None:
        """The end: all heals, and then every holder of a probe dies; no register stays half-open (5)."""
        self.heal()
        self.clock.us += (LEASE_MS + 2 * SKEW_MS) * 1000
        for key, data in self.server.registers().items():
            record = decode(data)
            if record.state == Code.HALF_OPEN and not record.held:
                after = decode(self.server.do(self._ask(key)).record)
                if after.version == record.version:
                    # None was out, and who asked was lent one: he dies with it, too.
                    self.clock.us += (LEASE_MS + 1) * 1000
                    after = decode(self.server.do(self._ask(key)).record)
                assert (after.state, after.version) != (Code.HALF_OPEN, record.version), f"5: {key} is half-open still"

    def _ask(self, key: str) -> Ask:
        rule = self.policy.breakers.node
        tx = self._tx()
        return Ask(
            key=key,
            service=SERVICE,
            by="heir",
            lease_ms=LEASE_MS,
            probes=rule.probes,
            successes=rule.successes,
            tx=tx,
            body=b"\x93\xa0\xa0\xa0",
            reopened_tx=tx[::-1],
            reopened_body=encode(decode(self.server.registers()[key]))[75:],
        )


def policy_of(quorum: int, probes: int, successes: int) -> Service:
    """Four endpoints that open at the first failure, for a second."""
    rule: dict[str, Any] = {
        "consecutive": 1,
        "failure_ratio": 0.0,
        "open_s": Seconds(1),
        "open_max_s": Seconds(8),
        "probes": probes,
        "successes": successes,
    }
    return Service(
        name=SERVICE,
        endpoints=tuple(Endpoint(url=f"http://h{i}:80") for i in range(NODES)),
        breakers=Breakers(
            node=NodeBreaker(**rule, adaptive=False), session=SessionBreaker(**rule), request=RequestBreaker(**rule)
        ),
        shared=Shared(quorum=quorum),
    )


def changed(policy: Service, how: Reload) -> Service:
    node = policy.breakers.node
    match how:
        case "as it was":
            return policy
        case "fewer":
            return replace(policy, endpoints=policy.endpoints[:-1])
        case "floor":
            node = replace(node, min_closed_ratio=(NODES - 1) / NODES)
        case _:
            node = replace(node, mode="off")
    return replace(policy, breakers=replace(policy.breakers, node=node))


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        value: T = stop.value
        return value
    raise AssertionError("it waits")


def _as(reading: Reading, entries: list[Entry]) -> Iterable[Entry]:
    match reading:
        case "part":
            return entries[: (len(entries) + 1) // 2]
        case "twice":
            return entries + entries
        case "reversed":
            return entries[::-1]
        case "hole":
            return entries[:1] + entries[2:]
        case _:
            return entries
