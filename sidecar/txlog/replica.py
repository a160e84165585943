"""This sidecar's part in the log: what it tells, what it takes over, which probes it was lent. No I/O, nothing waits.

```
our breaker moved -> ring -> Propose -> the register, if nobody was faster -> log -> every sidecar's fold -> its breaker
an open breaker's wait is over -> Ask -> a probe in hand -> a request -> Report -> the register -> log -> ...
```

Whoever does the I/O (`log`) sends `jobs`, hands the answers to `replied` and what the log says to `entries`, and calls
`tick` when `next_at` has come.

1. A breaker that trips here opens here at once; the log is told afterwards. If another was faster, ours is dropped and
   the winner's state taken over. If too few would stay closed in the whole fleet, it closes again.
2. Evidence of too few observers is kept to ourselves (`Breaker.ours`): only we avoid the endpoint, the others only
   suspect it. Our own probe that fails afterwards is evidence enough. Whoever sees more than half of a service fail
   suspects itself, and tells nobody; what still stands is told again every `REMIND_S`.
3. What the detector, floor, capacity or panic closes is closed here alone: the fleet's view may be another.
4. With the log away every shared breaker is our own again, and waits a random part of what the fleet's probes would be
   apart, an endpoint's `open_max` at most: R sidecars that know nothing of each other make one probe per wait, about.
   A session or a kind of request is probed by whom it asks. What happens meanwhile waits in the ring, per key the
   latest. On return the shards are read first; what is later there wins, what is later here is restored, and then the
   ring is told.
5. The floor counts every open endpoint of a service in the log. Those that are none of ours (they left, or belong to
   another sidecar's policy) must not use up what of ours may open: they are added to the size that we tell.
6. A routing table is folded as any register and handed on once (`on_route`): what is routed is not ours to know. It is
   written by who changes it and not by the ring (`log.TransactionLog.put`), and restored like the rest.
7. A shard's records are numbered. A jump means that some were trimmed before we read them, a step back that the server
   lost some: both end in reading the shard whole.
"""

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from math import inf
from typing import Final

import msgspec

from sidecar.core.breaker import Action, Agreed, Breaker, Scope, State, Transition
from sidecar.core.fleet import Fleet
from sidecar.core.service import ServiceState
from sidecar.kernel.ids import ServiceName
from sidecar.kernel.outcome import Result
from sidecar.txlog.codec import (
    MAX_U32,
    SHARDS,
    TX_BYTES,
    Code,
    Kind,
    Record,
    Unreadable,
    decode,
    encode_body,
    parse_key,
    route_key,
    shard_of,
)
from sidecar.txlog.codec import register_key as key_of
from sidecar.txlog.fold import Fold, order_of
from sidecar.txlog.lease import ASK_AGAIN_S, KEEP_S, LEASE_MS, Lease, Leases
from sidecar.txlog.ring import Pending, Ring
from sidecar.txlog.store import (
    GONE_SLACK_MS,
    LOG_RECORDS,
    SUSPECT_MS,
    Ask,
    Call,
    Entry,
    Image,
    Propose,
    Release,
    Renew,
    Reply,
    Report,
    Restore,
    Share,
    Verdict,
)

BATCH: Final = 64  # calls of one round trip; a store in this process does them in some 4 ms
REMIND_S: Final = SUSPECT_MS / 2000
REFUSED_S: Final = 0.5  # how often what the floor refused is looked at again where there is no room for it
LOOK_S: Final = 1.0  # how often an open endpoint is looked at whose service nobody asks for anything
MAX_SHARES: Final = 256
MOST_DUE: Final = 200  # keys considered in one tick, about a millisecond; more have their turn with the next
MAX_EVIDENCE: Final = 512  # characters; it takes some hundred

_CODES: Final = {State.CLOSED: Code.CLOSED, State.OPEN: Code.OPEN, State.HALF_OPEN: Code.HALF_OPEN}
_STATES: Final = {int(code): state for state, code in _CODES.items()}
_LOCAL: Final = frozenset({"floor", "capacity", "panic", "mode_off"})
"""Why a breaker closes here alone."""
_SCOPES: Final = {scope.value: scope for scope in Scope}


class ServerClock:
    """The server's clock, as far as answers tell: the quickest of the last ones is the closest."""

    __slots__ = ("_offset_us", "_quality", "_until")

    def __init__(self) -> None:
        self._offset_us = 0.0
        self._quality = inf
        self._until = -inf

    def told(self, now_us: int, sent: float, received: float) -> None:
        """An answer said `now_us`; it was asked for and came at these monotonic seconds."""
        took = received - sent
        if took <= self._quality or received >= self._until:
            self._offset_us = now_us - (sent + received) * 5e5
            self._quality = took
            self._until = received + 10.0

    def now_us(self, now: float) -> int:
        """What the server's clock says at `now`."""
        return max(0, int(self._offset_us + now * 1e6))

    def when(self, ts_us: int) -> float:
        """The monotonic second of a server's time."""
        return (ts_us - self._offset_us) / 1e6


class Counts:
    """What happened, since the start; metrics read it."""

    __slots__ = ("appended", "applied", "cas_losses", "dropped_shares", "fenced", "floor", "resyncs", "suspected")

    def __init__(self) -> None:
        self.appended = 0
        self.applied = 0
        self.cas_losses = 0
        self.dropped_shares = 0
        self.fenced = 0
        self.floor = 0
        self.resyncs = 0
        self.suspected = 0


class Job(msgspec.Struct, frozen=True):
    """A call to be made, and what it was about."""

    call: Call
    pending: Pending | None = None
    lease: Lease | None = None


class Replica:
    """`core.fleet.Agreement` over a fold. `tell` takes a transition that came from the log, `wake` asks for I/O.

    `clock` gives monotonic seconds, `chance` numbers in [0, 1), `new_tx` 16 fresh random bytes. `observer` is who we
    are. Not for more than one thread.
    """

    def __init__(
        self,
        observer: str,
        *,
        clock: Callable[[], float],
        chance: Callable[[], float],
        new_tx: Callable[[], bytes],
        tell: Callable[[Transition], None],
    ) -> None:
        self.observer = observer
        self.fleet = Fleet(chance)
        """To be replaced by the one that shall agree."""
        self.up = False
        self.members = 1
        self.fold = Fold()
        self.ring = Ring()
        self.leases = Leases()
        self.server = ServerClock()
        self.counts = Counts()
        self.wake: Callable[[], None] = _nothing
        self.on_record: Callable[[Entry, Record], None] = _no_record
        self.on_unreadable: Callable[[Entry, str], None] = _no_unreadable
        self.on_evidence: Callable[[Entry], None] = _no_evidence
        self.on_route: Callable[[Record], None] = _no_route
        """A routing table that is later than all known ones. Must not raise."""
        self._clock = clock
        self._chance = chance
        self._new_tx = new_tx
        self._tell = tell
        self._reports: list[Job] = []
        self._asks: dict[str, Breaker] = {}
        self._restores: list[Job] = []
        self._shares: list[Share] = []
        self._open_nodes: dict[str, set[str]] = {}
        self._due: list[tuple[float, str]] = []
        self._scheduled: dict[str, float] = {}
        self._remind_at = inf
        self._n: list[int | None] = [None] * SHARDS
        self._most: list[int] = [0] * SHARDS
        self._told: list[int] = [0] * SHARDS
        self._told_first: list[int] = [0] * SHARDS
        self._refused: dict[str, dict[str, None]] = {}  # by service, who was refused first first
        self._refused_at = -inf
        self._positions: dict[int, tuple[str, str]] = {}
        self._stale: set[int] = set(range(SHARDS))

    # What the fleet asks and tells.

    def wants(self, breaker: Breaker) -> None:
        """A request would be a probe, and none is in hand."""
        now = self._clock()
        if not self.up:
            self._lose(breaker, now)
            return
        key = _key(breaker)
        self.leases.want(key, now)
        if key not in self._scheduled and key not in self._asks and not self.leases.held(key):
            self._schedule(key, now)
            self.wake()

    def ended(self, breaker: Breaker, seq: int, result: Result, why: str) -> None:
        """Probe `seq` came to this."""
        key, now = _key(breaker), self._clock()
        lease = self.leases.remove(key, seq)
        if lease is None:
            return
        self.leases.want(key, now)
        ok = True if result is Result.SUCCESS else False if result is Result.FAILURE else None
        if ok is False:
            word, said = "probe_failed", f"a probe failed: {why}"
        elif ok is None:
            word, said = "inconclusive", f"all probes were used, and said nothing; the last: {why}"
        else:
            word, said = "lease_expired", "another probe's lease ran out: who held it is gone"
        call = Report(
            key=key,
            service=breaker.service,
            by=self.observer,
            epoch=lease.epoch,
            version=lease.version,
            seq=seq,
            ok=ok,
            again=self._demanded(key, breaker, now),
            lease_ms=LEASE_MS,
            probes=breaker.probes,
            successes=breaker.successes,
            tx=self._new_tx(),
            closed_body=self._body(breaker, "proved", "its probes succeeded"),
            reopened_body=self._body(breaker, word, said),
        )
        self._reports.append(Job(call, lease=lease))
        self.wake()

    def recall(self, scope: Scope, service: str, key: str, now: float) -> Agreed | None:
        """What all agree on about a breaker that was just made; None where it is closed."""
        record = self.fold.get(key_of(scope, service, key))
        if record is None or (record.state == Code.CLOSED and not record.held):
            return None
        agreed = self._agreed(record)
        if scope is Scope.NODE:
            self._refused.setdefault(service, {})[record.key] = None  # perhaps: the next tick sees
        if self.up:
            at = agreed.until if record.state == Code.OPEN else now + ASK_AGAIN_S
            self._schedule(record.key, max(now, at))
        return agreed

    def transition(self, transition: Transition, trace: str = "") -> None:
        """One of our breakers moved; `trace` is the trace id of the request that did it, in hex."""
        if transition.agreed or transition.by:
            return
        key = key_of(transition.scope, transition.service, transition.key)
        opened = transition.new is State.OPEN
        if transition.new is State.HALF_OPEN:
            return
        if not opened and (transition.why in _LOCAL or self.fold.state(key) == Code.CLOSED):
            self.ring.drop(key)
            return
        self.ring.put(Pending(key, transition, self._new_tx(), trace))
        self.wake()

    def route(self, service: str) -> Record | None:
        """A service's routing table as the log has it; None where it has none."""
        return self.fold.get(route_key(service))

    def order(self, breaker: Breaker, action: Action, author: str, for_s: float, now: float) -> None:
        """An operator's order, which `breaker` has obeyed."""
        said = Transition(
            breaker.scope,
            breaker.key,
            breaker.service,
            breaker.state,
            breaker.state,
            now,
            "operator",
            breaker.evidence or f"{action} by {author}",
            breaker.generation,
            author,
            base_s=breaker.open_s,
            max_s=breaker.open_max_s,
            doublings=breaker.doublings,
        )
        key = _key(breaker)
        self.leases.void(key)
        self.ring.put(Pending(key, said, self._new_tx(), "", action, for_s))
        self.wake()

    def share(self, share: Share, *, anyway: bool = False) -> None:
        """What was seen in the last second, for all; not if it may be us who sees wrong, or `anyway`."""
        service = self._service(share.service)
        if service is None or (_suspects_itself(service) and not anyway):
            return
        self._shares.append(share)
        if len(self._shares) > MAX_SHARES:
            del self._shares[0]
            self.counts.dropped_shares += 1
        self.wake()

    # What the I/O asks and tells.

    def went_up(self, now: float) -> None:
        """The server answers: what it has is taken over as it is read, and probes are lent by all again."""
        self.up = True
        self._remind_at = now

    def went_away(self, now: float) -> None:
        """The server is gone: what is shared is ours, and the positions are void."""
        self.up = False
        self._positions.clear()
        self._stale.update(range(SHARDS))
        self._reports.clear()
        self._asks.clear()
        self._restores.clear()
        self._due.clear()
        self._scheduled.clear()
        self.leases.clear()
        # A session's breaker, of which there may be 100,000, learns it when it next wants a probe.
        for service in self.fleet.services.values():
            for breaker in [*_open(service), *service.request_breakers.values()]:
                self._lose(breaker, now)

    def leave(self, now: float) -> None:
        """We are about to end: what was lent and not used goes back now, and not when its lease is over."""
        for key, lease in self.leases.unused():
            if lease.breaker.take_back(lease.seq):
                self.leases.remove(key, lease.seq)
                self._reports.append(self._release(key, lease.breaker.service, lease.epoch, lease.version, lease.seq))

    def jobs(self, now: float) -> list[Job]:
        """What to send next, at most BATCH; their answers go to `replied`, in their order. Nothing is lost if not."""
        jobs = self._reports[:BATCH]
        self._reports = self._reports[BATCH:]
        renew, release = self.leases.due(now)
        for key, lease in release:
            jobs.append(self._release(key, lease.breaker.service, lease.epoch, lease.version, lease.seq))
        for key, lease in renew:
            call = Renew(
                key=key,
                service=lease.breaker.service,
                epoch=lease.epoch,
                version=lease.version,
                seq=lease.seq,
                lease_ms=LEASE_MS,
            )
            jobs.append(Job(call, lease=lease))
        for key, breaker in list(self._asks.items())[:BATCH]:
            del self._asks[key]
            jobs.append(Job(self._ask(key, breaker)))
        jobs += self._restores[:BATCH]
        self._restores = self._restores[BATCH:]
        for pending in self.ring.first(0 if self._restores else BATCH):
            try:
                proposal = self._propose(pending, now)
            except BaseException:
                self.ring.drop(pending.key)  # a fault of ours costs this one, and not all that come after
                raise
            if proposal is not None:
                jobs.append(Job(proposal, pending))
        jobs += [Job(share) for share in self._shares[:BATCH]]
        self._shares = self._shares[BATCH:]
        return jobs

    def replied(self, job: Job, reply: Reply, now: float) -> None:
        """What came of a job."""
        call = job.call
        if isinstance(call, Share):
            return
        record = self._read(reply.record)
        news = False
        if record is not None:
            shard = shard_of(record.key)
            self._told[shard] = max(self._told[shard], record.n)
            self._told_first[shard] = self._told_first[shard] or record.n
            news = self._take(record, reply.record, now)
            # The server has less than we know: a loss, or somebody restored what the rest of us had outlived.
            latest = self.fold.raw(record.key)
            if latest and order_of(latest) > record.order and not isinstance(call, Restore):
                self._restores.append(Job(Restore(key=record.key, service=record.service, record=latest)))
                if isinstance(call, Propose) and reply.verdict is Verdict.STALE and job.pending is not None:
                    return  # told again, once the server has what it lost
        # What is news was adopted with it; of the rest a breaker of ours may have moved away since the log told it.
        known = None if news else record
        match call:
            case Propose() if call.kind == Kind.ROUTE:
                self.counts.appended += reply.verdict is Verdict.OK
                self.counts.cas_losses += reply.verdict is Verdict.STALE
            case Propose():
                self._proposed(call, job.pending, reply, known, now)
            case Ask():
                self._asked(call, reply, record, now)
            case Report():
                self._reported(call, job, reply, record, now)
            case Renew():
                if job.lease is not None and reply.verdict is Verdict.FENCED:
                    self.counts.fenced += 1
                    self.leases.remove(call.key, call.seq)
                    job.lease.breaker.take_back(call.seq)
                elif job.lease is not None:
                    job.lease.contended = reply.contended
            case Release():
                self._schedule(call.key, now + 2 * ASK_AGAIN_S)
            case Restore():
                if known is not None and call.key not in self.ring:
                    self._adopt(known, now)
            case _:
                pass

    def entries(self, entries: Iterable[Entry], now: float) -> None:
        """What the log and the evidence say next, in each stream's order."""
        for entry in entries:
            log, evidence = self._positions.get(entry.shard, ("0", "0"))
            if entry.evidence:
                self._positions[entry.shard] = (log, entry.id)
                self.on_evidence(entry)
                continue
            self._positions[entry.shard] = (entry.id, evidence)
            try:
                record = decode(entry.data)
            except Unreadable as exc:
                self.on_unreadable(entry, str(exc))
                continue
            self._follows(entry.shard, record)
            self.on_record(entry, record)
            self._take(record, entry.data, now)

    def begin_image(self, image: Image) -> None:
        """A shard was read whole; its registers come by `registers`, and then `end_image`."""
        self._positions[image.shard] = (image.position, image.evidence_position)
        self._n[image.shard] = None
        self._most[image.shard] = self._told[image.shard] = self._told_first[image.shard] = image.n

    def registers(self, some: list[bytes], now: float) -> list[tuple[str, bytes]]:
        """Some of a shard's registers; those that could be read, with their keys."""
        keys = []
        for data in some:
            record = self._read(data)
            if record is None:
                continue
            keys.append((record.key, data))
            known = self.fold.raw(record.key)
            # Not the bytes: what was restored is the same record with another number.
            if not known or order_of(known) != order_of(data):
                self._take(record, data, now)
            elif record.state != Code.CLOSED and self.up and record.key not in self.ring:
                self._adopt(record, now)
        return keys

    def end_image(self, shard: int, there: dict[str, tuple[int, int, int, bytes]]) -> None:
        """What the server has less of than we (`there`: the order of each of its keys) is restored."""
        self._stale.discard(shard)
        for key, data in self.fold.shard(shard):
            known = there.get(key)
            # What is closed, too: another sidecar may restore an older record, which is open.
            if known is None or order_of(data) > known:
                service = parse_key(key)[1]
                self._restores.append(Job(Restore(key=key, service=service, record=data)))

    @property
    def stale(self) -> list[int]:
        """Shards to be read whole before their log can be followed."""
        return sorted(self._stale)

    def position(self, shard: int) -> tuple[str, str]:
        """After which entries of its log and its evidence to read on."""
        return self._positions.get(shard, ("0", "0"))

    def counted(self, counts: list[int]) -> int:
        """The server has so many records in each shard; how many of them we have yet to read."""
        lag = 0
        for shard, n in enumerate(counts):
            read = self._n[shard]
            known = self._most[shard] if read is None else read
            # What an answer told of may not have been read yet.
            if n < max(known, self._told[shard]) and shard not in self._stale:
                self._resync(shard)
            lag += min(LOG_RECORDS, max(0, n - known)) if known else int(n > 0)
        return lag

    def tick(self, now: float) -> None:
        """What time does: asks for probes, reminds the others of what we alone avoid."""
        again = now >= self._refused_at
        if again:
            self._refused_at = now + REFUSED_S
        for name in list(self._refused):
            self._try_again(name, again, now)
        due = self._due
        for _ in range(MOST_DUE):
            if not due or due[0][0] > now:
                break
            at, key = heappop(due)
            if self._scheduled.get(key) == at:
                del self._scheduled[key]
                self._consider(key, now)
        if self.up and now >= self._remind_at:
            self._remind_at = now + REMIND_S
            for service in self.fleet.services.values():
                for breaker in _open(service):
                    if breaker.ours and _key(breaker) not in self.ring:
                        self._remind(breaker, now)
        if not self.up:
            for service in self.fleet.services.values():
                for breaker in _open(service):
                    self._lose(breaker, now)
        if self._asks or self._reports or self._restores or self._shares or len(self.ring):
            self.wake()

    def _try_again(self, name: str, all_: bool, now: float) -> None:
        """Adopts what the floor refused of a service, as far as there is room; `all_`: what needs none, too."""
        service = self._service(name)
        for key in list(self._refused[name]):
            if service is not None and not all_ and not service.roster.may_open(carries=False):
                return
            record, breaker = self.fold.get(key), self._breaker(key)
            if service is None or breaker is None or breaker.shared or record is None or record.state == Code.CLOSED:
                self._admit(name, key)
            elif service.policy.breakers.node.mode == "off" and not record.held:
                self._admit(name, key)  # a reload recalls it
            elif key not in self.ring and (
                record.held or breaker.state is not State.CLOSED or service.roster.may_open(carries=False)
            ):
                self._adopt(record, now)

    def _admit(self, name: str, key: str) -> None:
        """The floor refuses it no more."""
        refused = self._refused.get(name)
        if refused is not None and key in refused:
            del refused[key]
            if not refused:
                del self._refused[name]

    def next_at(self) -> float:
        """When `tick` has something to do; infinity if nothing is known."""
        return self._due[0][0] if self._due else inf

    # Ours.

    def _propose(self, pending: Pending, now: float) -> Propose | None:
        t, key = pending.transition, pending.key
        service = self._service(t.service)
        if service is None:
            self.ring.drop(key)
            return None
        epoch, version = self.fold.version(key)
        if pending.order:
            held = pending.order in ("open", "hold")
            # From when it was given: it may have waited here for the log to come back.
            expires = self.server.now_us(t.at) + int(pending.for_s * 1e6) if held and pending.for_s < inf else 0
            if 0 < expires <= self.server.now_us(now):
                self.ring.drop(key)
                known = self.fold.get(key)
                if known is not None:
                    self._adopt(known, now)
                return None
            return Propose(
                key=key,
                service=t.service,
                kind=Kind.OVERRIDE,
                state=_CODES[t.new],
                epoch=epoch,
                version=version,
                tx=pending.tx,
                body=encode_body(key, t.service, f"{t.by} at {self.observer}", t.why, t.evidence[:MAX_EVIDENCE]),
                by=self.observer,
                order=True,
                held=held,
                expires_us=expires,
                doublings=t.doublings,
                base_ms=_ms(t.base_s),
                max_ms=_ms(t.max_s),
            )
        opens = t.new is State.OPEN
        if opens and self.fold.state(key) != Code.CLOSED:
            # It is open for all already.
            self.ring.drop(key)
            record = self.fold.get(key)
            if record is not None:
                self._adopt(record, now)
            return None
        node = t.scope is Scope.NODE
        if node and opens and _suspects_itself(service):
            self.ring.drop(key)
            return None
        roster = service.roster
        return Propose(
            key=key,
            service=t.service,
            kind=Kind.TRANSITION,
            state=_CODES[t.new],
            epoch=epoch,
            version=version,
            tx=pending.tx,
            body=encode_body(key, t.service, self.observer, t.why, t.evidence[:MAX_EVIDENCE], b"", pending.trace),
            by=self.observer,
            doublings=t.doublings,
            proofs=t.proofs,
            wait_ms=_ms(t.wait_s) if opens else 0,
            base_ms=_ms(t.base_s),
            max_ms=_ms(t.max_s),
            ramp_ms=_ms(t.ramp_s),
            size=roster.size + self._foreign(service, now) if node and opens else 0,
            minimum=roster.minimum if node and opens else 0,
            quorum=min(service.policy.shared.quorum, self.members) if node and opens else 1,
            overwhelming=t.why == "probe_failed",
            suspect_tx=self._new_tx() if node and opens else bytes(TX_BYTES),
        )

    def _proposed(
        self, call: Propose, pending: Pending | None, reply: Reply, record: Record | None, now: float
    ) -> None:
        # Else what the log said has come before the answer, and decided it.
        open_still = pending is not None and self.ring.get(call.key) is pending
        if pending is not None:
            self.ring.drop(call.key, pending.tx)
        match reply.verdict:
            case Verdict.OK:
                self.counts.appended += 1
            case Verdict.SUSPECT:
                self.counts.suspected += 1
                return
            case Verdict.FLOOR:
                self.counts.floor += 1
                breaker = self._breaker(call.key)
                if breaker is not None and breaker.ours:
                    self._tell(breaker.close_for_floor(now))
                return
            case Verdict.STALE | Verdict.HELD | Verdict.ILLEGAL:
                self.counts.cas_losses += open_still
            case _:
                pass
        if record is not None and call.key not in self.ring:
            self._adopt(record, now)

    def _ask(self, key: str, breaker: Breaker) -> Ask:
        return Ask(
            key=key,
            service=breaker.service,
            by=self.observer,
            lease_ms=LEASE_MS,
            probes=breaker.probes,
            successes=breaker.successes,
            tx=self._new_tx(),
            body=self._body(breaker, "waited", "its wait is over"),
            reopened_tx=self._new_tx(),
            reopened_body=self._body(breaker, "lease_expired", "a probe's lease ran out: who held it is gone"),
        )

    def _asked(self, call: Ask, reply: Reply, record: Record | None, now: float) -> None:
        match reply.verdict:
            case Verdict.GRANTED:
                self._granted(call.key, reply.seq, record, now)
            case Verdict.WAIT:
                self._schedule(call.key, now + reply.ms / 1000)
            case Verdict.FULL:
                self._schedule(call.key, now + ASK_AGAIN_S)
            case Verdict.HELD if record is not None:
                self._adopt(record, now)
            case Verdict.CLOSED if record is not None:
                self._adopt(record, now)
            case Verdict.CLOSED:
                self._forgotten(call.key, call.service, now)
            case _:
                pass

    def _forgotten(self, key: str, service: str, now: float) -> None:
        """The server has no such register: nobody touched it for a day. What we know of it, it is told again."""
        data, breaker = self.fold.raw(key), self._breaker(key)
        if data and data[2] != Code.CLOSED:
            self._restores.append(Job(Restore(key=key, service=service, record=data)))
        elif breaker is not None:
            self._lose(breaker, now)

    def _granted(self, key: str, seq: int, record: Record | None, now: float) -> None:
        if record is None:
            return
        breaker = self._breaker(key)
        if breaker is not None and breaker.lend(seq):
            self.leases.add(key, Lease(breaker, record.epoch, record.version, seq, now))
            if len(self.leases.held(key)) < breaker.probes:
                self._asks[key] = breaker
            else:
                # More may be lent at a time once one was good.
                self._schedule(key, now + ASK_AGAIN_S)
        else:
            self._reports.append(self._release(key, record.service, record.epoch, record.version, seq))

    def _reported(self, call: Report, job: Job, reply: Reply, record: Record | None, now: float) -> None:
        if reply.verdict is Verdict.FENCED:
            self.counts.fenced += 1
        if reply.seq and record is not None:
            self._granted(call.key, reply.seq, record, now)
            if job.lease is not None and record.proofs > call.successes:
                self._asks[call.key] = job.lease.breaker
        elif reply.verdict in (Verdict.PROVED, Verdict.NEUTRAL):
            self._schedule(call.key, now, anew=True)

    def _release(self, key: str, service: str, epoch: int, version: int, seq: int) -> Job:
        said = "nobody asked for anything that could be a probe"
        body = encode_body(key, service, self.observer, "withdrawn", said)
        return Job(
            Release(key=key, service=service, epoch=epoch, version=version, seq=seq, tx=self._new_tx(), body=body)
        )

    def _take(self, record: Record, data: bytes, now: float) -> bool:
        """Folds a record in; True if it was news, and then our breaker follows it."""
        if record.kind == Kind.SUSPECT:
            if record.by != self.observer:
                scope, service, name = parse_key(record.key)
                state = self._service(service)
                if state is not None and scope == Scope.NODE:
                    state.suspect(name, now)
            return False
        if not self.fold.take(record, data):
            return False
        pending = self.ring.get(record.key)
        if pending is not None and pending.tx == record.tx:
            self.ring.drop(record.key)
        elif pending is not None and pending.order:
            return True  # what is ordered here comes after it
        elif pending is not None:
            # Another was faster.
            self.counts.cas_losses += 1
            self.ring.drop(record.key)
        self._adopt(record, now)
        return True

    def _foreign(self, service: ServiceState, now: float) -> int:
        """How many endpoints the log has open of a service that are not in it; at most as many as the server counts."""
        now_us = self.server.now_us(now)
        foreign = 0
        for name in self._open_nodes.get(service.name, ()):
            if name not in service.nodes:
                record = self.fold.get(key_of(Scope.NODE, service.name, name))
                if record is not None and record.ts_us + (2 * record.max_ms + GONE_SLACK_MS) * 1000 > now_us:
                    foreign += 1
        return foreign

    def _adopt(self, record: Record, now: float) -> None:
        latest = self.fold.raw(record.key)
        if latest and order_of(latest) > record.order:
            record = decode(latest)  # the server has lost it, and will be told
        word, name, key = parse_key(record.key)
        if record.kind == Kind.ROUTE:
            self.counts.applied += 1
            self.on_route(record)
            return
        scope = _SCOPES.get(word)
        self.leases.moved(record.key, record.epoch, record.version, record.state == Code.CLOSED)
        if scope is None:
            return
        if scope is Scope.NODE:
            names = self._open_nodes.setdefault(name, set())
            (names.discard if record.state == Code.CLOSED else names.add)(key)
        service = self._service(name)
        if service is None or not service.knows(scope, key):
            return  # who meets it later recalls it
        self.counts.applied += 1
        agreed = self._agreed(record)
        transition = service.adopt(scope, key, agreed, now)
        if transition is not None:
            self._tell(transition)
        self._admit(name, record.key)
        if scope is Scope.NODE and record.state != Code.CLOSED:
            refused = service.known(scope, key)
            if refused is not None and refused.state is State.CLOSED:
                self._refused.setdefault(name, {})[record.key] = None  # by the floor as it is now
        if not self.up:
            breaker = service.known(scope, key)
            if breaker is not None:
                self._lose(breaker, now)
        elif record.state == Code.OPEN:
            at = max(now, agreed.until)
            if record.by == self.observer and record.why == "withdrawn":
                at += 2 * ASK_AGAIN_S  # given back for those who were refused
            elif record.by == self.observer and scope is not Scope.NODE:
                self.leases.want(record.key, at)
            self._schedule(record.key, at, anew=True)
        elif record.state == Code.HALF_OPEN:
            self._schedule(record.key, now + ASK_AGAIN_S, anew=True)

    def _agreed(self, record: Record) -> Agreed:
        since = self.server.when(record.ts_us)
        held_until = -inf
        if record.held:
            held_until = self.server.when(record.expires_us) if record.expires_us else inf
        ramp_s = record.ramp_ms / 1000
        until = since + record.wait_ms / 1000
        return Agreed(
            _STATES[record.state],
            record.epoch,
            record.version,
            since,
            max(until, held_until) if held_until < inf else until,
            record.why,
            record.evidence,
            record.by if record.kind == Kind.OVERRIDE else "",
            record.by,
            held_until,
            record.wait_ms / 1000,
            record.base_ms / 1000,
            record.max_ms / 1000,
            record.doublings,
            record.proofs,
            ramp_s,
            since + ramp_s if record.kind == Kind.TRANSITION else -inf,
        )

    def _consider(self, key: str, now: float) -> None:
        """An open breaker's wait is over, or others' probes are out: ask, if somebody here would use one."""
        breaker = self._breaker(key)
        if breaker is None:
            return
        closed = breaker.expire(now)
        if closed is not None:
            self._tell(closed)
        if not self.up or not breaker.shared or breaker.held_open:
            return
        if any(lease.used_at is None for lease in self.leases.held(key)):
            self._schedule(key, now + ASK_AGAIN_S)
        elif self._demanded(key, breaker, now):
            self._asks[key] = breaker
        elif breaker.scope is Scope.NODE:
            self._schedule(key, now + LOOK_S)

    def _demanded(self, key: str, breaker: Breaker, now: float) -> bool:
        if breaker.scope is Scope.NODE:
            service = self._service(breaker.service)
            if service is not None and now - service.asked_at < KEEP_S:
                return True
        return self.leases.wanted(key, now)  # of an endpoint: by a health check

    def _remind(self, breaker: Breaker, now: float) -> None:
        t = Transition(
            breaker.scope,
            breaker.key,
            breaker.service,
            State.CLOSED,
            State.OPEN,
            now,
            breaker.why,
            breaker.evidence,
            breaker.generation,
            wait_s=max(0.0, breaker.retry_at(now) - now),
            base_s=breaker.open_s,
            max_s=breaker.open_max_s,
        )
        self.ring.put(Pending(_key(breaker), t, self._new_tx()))
        self.wake()

    def _lose(self, breaker: Breaker, now: float) -> None:
        if breaker.shared:
            wait_s = 0.0  # of a session or kind of request nobody else is trying for us
            if breaker.scope is Scope.NODE:
                wait_s = min(breaker.open_max_s, self._chance() * (self.members - 1) * breaker.wait_s)
            transition = breaker.lost(wait_s, now)
            if transition is not None:
                self._tell(transition)

    def _schedule(self, key: str, at: float, *, anew: bool = False) -> None:
        """To be considered then, or earlier if it is to be already; `anew`: then, whatever was."""
        scheduled = self._scheduled.get(key, inf)
        if at != scheduled if anew else at < scheduled:
            self._scheduled[key] = at
            heappush(self._due, (at, key))

    def _service(self, name: str) -> ServiceState | None:
        return self.fleet.services.get(ServiceName(name))

    def _breaker(self, key: str) -> Breaker | None:
        scope, service, name = parse_key(key)
        state = self._service(service)
        known = _SCOPES.get(scope)
        return None if state is None or known is None else state.known(known, name)

    def _body(self, breaker: Breaker, why: str, evidence: str) -> bytes:
        return encode_body(_key(breaker), breaker.service, self.observer, why, evidence)

    def _read(self, data: bytes) -> Record | None:
        """A register; None where there is none, or none that we understand: a later release's, or garbage."""
        if not data:
            return None
        try:
            return decode(data)
        except Unreadable as exc:
            self.on_unreadable(Entry(-1, False, "register", data), str(exc))
            return None

    def _follows(self, shard: int, record: Record) -> None:
        n, read = record.n, self._n[shard]
        self._n[shard] = n
        if read is None:
            # The first after the shard was read whole: what came while it was read is numbered up to `_most`.
            last = self._most[shard]
            # The first of a shard that was empty is numbered by the time at which it was written.
            begins = not last and n == record.ts_us and not 0 < self._told_first[shard] < n
            if n > last + 1 and not begins:
                self._resync(shard)
        elif n != read + 1:
            self._resync(shard)

    def _resync(self, shard: int) -> None:
        self._stale.add(shard)
        self.counts.resyncs += 1


def _key(breaker: Breaker) -> str:
    return key_of(breaker.scope, breaker.service, breaker.key)


def _open(service: ServiceState) -> list[Breaker]:
    return list(service.roster.not_closed.values())


def _suspects_itself(service: ServiceState) -> bool:
    """Whether we see more than half of a service's endpoints fail: then it may be us."""
    size = service.roster.size
    return size > 1 and 2 * sum(breaker.ours for breaker in _open(service)) > size


def _ms(seconds: float) -> int:
    return min(MAX_U32, max(0, round(seconds * 1000)))


def _nothing() -> None:
    pass


def _no_record(entry: Entry, record: Record) -> None:
    pass


def _no_unreadable(entry: Entry, why: str) -> None:
    pass


def _no_evidence(entry: Entry) -> None:
    pass


def _no_route(record: Record) -> None:
    pass
