"""The log's server inside this process: the contract of `store` in Python, for one sidecar, and for every test.

With `--redis local` the same calls are made and the same records are read as with a server, so that nothing above this
module knows whether there is one. Nothing here waits except a reader, and nothing is kept beyond the process.

1. What the contract asks, in its order; whatever the functions in the server keep in a key of their own has a field
   here: a shard's registers, its log, its evidence, who suspects whom, which nodes are not closed. What tenants drew is
   `budgets`' business.
2. Everything is bounded. The logs have `LOG_RECORDS` and `STREAM_BYTES`, the evidence `EVIDENCE_RECORDS` and the same
   bytes; of more than `MAX_REGISTERS` in a shard those that are closed longest are forgotten before their time.
3. A body is passed on as it came: this release must not drop what a later one wrote into it.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from itertools import islice, takewhile
from typing import Final, assert_never

from msgspec.structs import replace

from sidecar.core.breaker import Scope
from sidecar.txlog import codec
from sidecar.txlog.codec import HEAD, SHARDS, Code, Kind, Record, Unreadable, parse_key, route_key, shard_of
from sidecar.txlog.draws import Budgets
from sidecar.txlog.store import (
    CLOSED_TTL_MS,
    GONE_SLACK_MS,
    LOG_RECORDS,
    MAX_DOUBLINGS,
    MEMBER_TTL_MS,
    MOST_PROBES,
    OPEN_TTL_MS,
    PATIENCE_MS,
    PURGE,
    SUSPECT_MS,
    TOTAL_PER_NEEDED,
    TOTAL_SLACK,
    Ask,
    Beat,
    Call,
    Draw,
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

EVIDENCE_RECORDS: Final = 20_000
"""A shard's evidence, at most: five hours of one service, told each second."""
STREAM_BYTES: Final = 16 << 20
"""Of one log or evidence: ten thousand records are 2 MB, unless they are routing tables."""
MAX_REGISTERS: Final = 1 << 16
"""In one shard: sixteen of them are a million sessions."""


class Stream:
    """An append-only list of bytes, the oldest of which fall out; ids are `ms-seq` and never go back."""

    __slots__ = ("_bytes", "_entries", "_last", "_limit")

    def __init__(self, limit: int) -> None:
        self._entries: deque[tuple[tuple[int, int], bytes]] = deque()
        self._last = (0, 0)
        self._limit = limit
        self._bytes = 0

    @property
    def position(self) -> str:
        """The last id that was ever given; `0-0` before."""
        return _written(self._last)

    def append(self, data: bytes, now_us: int, keep_ms: int = 0) -> None:
        """`keep_ms`: what is older goes (0: by number and bytes alone)."""
        now = (now_us // 1000, 0)
        self._last = now if now > self._last else (self._last[0], self._last[1] + 1)
        self._entries.append((self._last, data))
        self._bytes += len(data)
        while len(self._entries) > 1 and (
            len(self._entries) > self._limit
            or self._bytes > STREAM_BYTES
            or (keep_ms and self._entries[0][0][0] < now[0] - keep_ms)
        ):
            self._bytes -= len(self._entries.popleft()[1])

    def after(self, position: str, count: int) -> list[tuple[str, bytes]]:
        """At most `count` entries after a position, the oldest first. ValueError if it is none."""
        known = _read(position)
        found = list(takewhile(lambda entry: entry[0] > known, reversed(self._entries)))
        found.reverse()
        return [(_written(id_), data) for id_, data in found[:count]]

    def before(self, position: str, count: int) -> list[tuple[str, bytes]]:
        """At most `count` entries before a position ("": the end), the newest first. ValueError if it is none."""
        end = _read(position) if position else None
        found = (entry for entry in reversed(self._entries) if end is None or entry[0] < end)
        return [(_written(id_), data) for id_, data in islice(found, count)]


class _Probes:
    """What a half-open register has lent: `leases` maps a probe to the time when it is lost."""

    __slots__ = ("good", "granted", "leases", "refused", "since_us")

    def __init__(self, since_us: int) -> None:
        self.since_us = since_us
        self.granted = 0
        self.good = 0
        self.refused = 0
        self.leases: dict[int, int] = {}


class _Register:
    """A key's latest record: its numbers, its bytes, when it was last touched, and its probes while it is half-open."""

    __slots__ = ("data", "head", "probes", "touched_us")

    def __init__(self, head: Record, data: bytes, probes: _Probes) -> None:
        self.head = head
        self.data = data
        self.probes = probes
        self.touched_us = probes.since_us

    def held(self, now_us: int) -> bool:
        """Whether an order holds it now."""
        return self.head.held and (not self.head.expires_us or now_us < self.head.expires_us)

    def gone_us(self) -> int:
        """From when on a node that is not closed counts as gone (rule 2), unless it is held."""
        return self.touched_us + (2 * self.head.max_ms + GONE_SLACK_MS) * 1000

    def forget_us(self) -> int:
        """From when on nobody needs it (rule 8), unless it is held."""
        ttl_ms = CLOSED_TTL_MS if self.head.state == Code.CLOSED else OPEN_TTL_MS + 2 * self.head.max_ms
        return self.touched_us + ttl_ms * 1000


class _Shard:
    """A shard. `closed` and `unclosed` hold its keys, those first that were not touched for longest."""

    __slots__ = ("closed", "evidence", "log", "n", "nodes", "registers", "suspects", "unclosed")

    def __init__(self) -> None:
        self.registers: dict[str, _Register] = {}
        self.closed: dict[str, None] = {}
        self.unclosed: dict[str, None] = {}
        self.nodes: dict[str, set[str]] = {}
        self.suspects: dict[str, dict[str, int]] = {}
        self.n = 0
        self.log = Stream(LOG_RECORDS)
        self.evidence = Stream(EVIDENCE_RECORDS)


class LocalStore:
    """`Store` in this process. `now_us`: microseconds since the epoch; may jump, as a server's clock may."""

    def __init__(self, now_us: Callable[[], int]) -> None:
        self._now_us = now_us
        self._shards = [_Shard() for _ in range(SHARDS)]
        self._budgets = Budgets()
        self._members: dict[str, int] = {}
        self._readers: list[asyncio.Future[None]] = []

    async def open(self) -> None:
        """Nothing to connect to."""

    async def close(self) -> None:
        """Nothing to let go of."""

    async def call(self, calls: list[Call]) -> list[Reply]:
        """Do all, one after another; never waits."""
        return [self.do(call) for call in calls]

    async def image(self, shard: int) -> Image:
        """A shard's registers, as they are now."""
        it = self._shards[shard]
        registers = [register.data for register in it.registers.values()]
        return Image(shard, it.n, it.log.position, it.evidence.position, registers)

    async def counts(self) -> list[int]:
        """How many records each shard's log has had."""
        return [shard.n for shard in self._shards]

    @property
    def lanes(self) -> tuple[tuple[int, ...], ...]:
        """One, of all shards."""
        return (tuple(range(SHARDS)),)

    async def read(self, lane: int, after: dict[int, tuple[str, str]], block_ms: int, count: int) -> list[Entry]:
        """See `Store`. Wakes when something is appended; may be cancelled."""
        del lane
        if (found := self._after(after, count)) or not block_ms:
            return found
        try:
            async with asyncio.timeout(block_ms / 1000):
                while not (found := self._after(after, count)):
                    reader = asyncio.get_running_loop().create_future()
                    self._readers.append(reader)
                    try:
                        await reader
                    finally:
                        if reader in self._readers:
                            self._readers.remove(reader)
        except TimeoutError:
            return []
        return found

    async def history(self, shard: int, *, evidence: bool, after: str, count: int) -> list[Entry]:
        """See `Store`."""
        it = self._shards[shard]
        stream = it.evidence if evidence else it.log
        return [Entry(shard, evidence, id_, data) for id_, data in stream.after(after, count)]

    async def newest(self, shard: int, *, before: str, count: int) -> list[Entry]:
        """See `Store`."""
        return [Entry(shard, False, id_, data) for id_, data in self._shards[shard].log.before(before, count)]

    def do(self, call: Call) -> Reply:
        """One call, at once."""
        now = self._now_us()
        match call:
            case Propose():
                return self._propose(call, now)
            case Ask():
                return self._ask(call, now)
            case Report():
                return self._report(call, now)
            case Renew():
                return self._renew(call, now)
            case Release():
                return self._release(call, now)
            case Restore():
                return self._restore(call, now)
            case Beat():
                return self._beat(call, now)
            case Share():
                self._shards[shard_of(route_key(call.service))].evidence.append(call.blob, now, call.keep_ms)
                self._wake()
                return Reply(Verdict.OK, now)
            case Draw():
                return self._budgets.draw(call, now)
            case _:
                assert_never(call)

    # --- rules 1-3 ----------------------------------------------------------------------------------------------------

    def _propose(self, call: Propose, now: int) -> Reply:
        shard = self._shards[shard_of(call.key)]
        register = shard.registers.get(call.key)
        refused = self._refused(shard, register, call, now)
        if refused is not None:
            if refused is Verdict.SUSPECT:
                self._suspect(shard, register, call, now)
            return _reply(refused, now, register)
        epoch, version = (register.head.epoch, register.head.version) if register else (0, 0)
        head = Record(
            kind=call.kind,
            state=call.state,
            epoch=epoch if register else max(now // 1_000_000, call.epoch + 1),
            version=version + 1,
            tx=call.tx,
            key=call.key,
            service=call.service,
            by=call.by,
            ts_us=now,
            held=call.held,
            doublings=call.doublings,
            proofs=call.proofs,
            wait_ms=call.wait_ms,
            base_ms=call.base_ms,
            max_ms=call.max_ms,
            ramp_ms=call.ramp_ms,
            expires_us=call.expires_us,
        )
        return _reply(Verdict.OK, now, self._write(shard, head, call.body, now))

    def _refused(self, shard: _Shard, register: _Register | None, call: Propose, now: int) -> Verdict | None:
        """Why a proposal is not done; None if it is."""
        state = Code.CLOSED if register is None else register.head.state
        if register is not None and register.head.tx == call.tx:
            return Verdict.ALREADY
        if call.order:
            return None
        if register is not None and (register.head.epoch, register.head.version) != (call.epoch, call.version):
            return Verdict.STALE
        if register is not None and register.held(now):
            return Verdict.HELD
        if call.kind == Kind.ROUTE:
            return None
        if (state == Code.CLOSED) != (call.state == Code.OPEN) or call.state == Code.HALF_OPEN:
            return Verdict.ILLEGAL
        if call.state != Code.OPEN:
            return None
        if self._on_the_floor(shard, call, now):
            return Verdict.FLOOR
        if not call.overwhelming and self._observers(shard, call, now) < call.quorum:
            return Verdict.SUSPECT
        return None

    def _on_the_floor(self, shard: _Shard, call: Propose, now: int) -> bool:
        """Whether opening this node would leave too few closed."""
        if not call.minimum or parse_key(call.key)[0] != Scope.NODE:
            return False
        nodes = shard.nodes.get(call.service, set())
        away = sum(1 for key in nodes if key != call.key and _counts(shard.registers[key], now))
        return call.size - away - 1 < call.minimum

    def _observers(self, shard: _Shard, call: Propose, now: int) -> int:
        """How many saw it, the caller among them."""
        seen = shard.suspects.get(call.key, {})
        return 1 + sum(1 for by, at in seen.items() if by != call.by and now - at < SUSPECT_MS * 1000)

    def _suspect(self, shard: _Shard, register: _Register | None, call: Propose, now: int) -> None:
        seen = shard.suspects.pop(call.key, {})
        seen = shard.suspects[call.key] = {by: at for by, at in seen.items() if now - at < SUSPECT_MS * 1000}
        for key in list(shard.suspects)[:PURGE]:
            if all(now - at >= SUSPECT_MS * 1000 for at in shard.suspects[key].values()) and key != call.key:
                del shard.suspects[key]
        if call.by in seen:
            return
        seen[call.by] = now
        head = Record(
            kind=Kind.SUSPECT,
            state=Code.CLOSED if register is None else register.head.state,
            epoch=0 if register is None else register.head.epoch,
            version=0 if register is None else register.head.version,
            tx=call.suspect_tx,
            key=call.key,
            service=call.service,
            by=call.by,
            ts_us=now,
        )
        self._append(shard, head, call.body, now)

    # --- rules 4-6 ----------------------------------------------------------------------------------------------------

    def _ask(self, call: Ask, now: int) -> Reply:
        shard = self._shards[shard_of(call.key)]
        register = shard.registers.get(call.key)
        if register is None or register.head.state == Code.CLOSED:
            return _reply(Verdict.CLOSED, now, register)
        if register.held(now):
            return _reply(Verdict.HELD, now, register)
        head = register.head
        if head.state == Code.OPEN:
            left_us = head.ts_us + head.wait_ms * 1000 - now
            if left_us > 0:
                return _reply(Verdict.WAIT, now, register, ms=-(-left_us // 1000))
            half_open = replace(head, kind=Kind.TRANSITION, state=Code.HALF_OPEN, tx=call.tx, held=False, expires_us=0)
            register = self._move(shard, half_open, call.body, now)
        elif self._lost(register, now):
            return self._failed(shard, register, call.reopened_tx, call.reopened_body, now)
        elif self._used_up(register, call.successes):
            return self._reopen(shard, register, call.reopened_tx, call.reopened_body, now, head.wait_ms)
        seq = self._lend(register, call.probes, call.successes, call.lease_ms, now)
        if not seq:
            register.probes.refused = register.probes.granted
        return _reply(Verdict.GRANTED if seq else Verdict.FULL, now, register, seq=seq)

    def _lend(self, register: _Register, probes: int, successes: int, lease_ms: int, now: int) -> int:
        """The next probe's number; 0 if there is none to lend."""
        lent = register.probes
        needed = _needed(register.head, successes)
        concurrent = max(probes, MOST_PROBES) if lent.good and needed > successes else probes
        if len(lent.leases) >= min(concurrent, max(1, needed - lent.good)) or lent.granted >= _total(needed):
            return 0
        lent.granted += 1
        lent.leases[lent.granted] = now + lease_ms * 1000
        self._touch(register, now)
        return lent.granted

    def _report(self, call: Report, now: int) -> Reply:
        shard = self._shards[shard_of(call.key)]
        register = self._lender(shard, call, now)
        if register is None:
            return _reply(Verdict.FENCED, now, shard.registers.get(call.key))
        lent = register.probes
        if call.ok is False or self._lost(register, now):
            return self._failed(shard, register, call.tx, call.reopened_body, now)
        del lent.leases[call.seq]
        if call.ok:
            lent.good += 1
            patient = now - lent.since_us >= PATIENCE_MS * 1000
            if lent.good >= (call.successes if patient else _needed(register.head, call.successes)):
                closed = replace(register.head, kind=Kind.TRANSITION, state=Code.CLOSED, tx=call.tx, wait_ms=0)
                return _reply(Verdict.CLOSED, now, self._move(shard, closed, call.closed_body, now))
        if self._used_up(register, call.successes):
            return self._reopen(shard, register, call.tx, call.reopened_body, now, register.head.wait_ms)
        if not call.ok:
            return _reply(Verdict.NEUTRAL, now, register)
        seq = self._lend(register, call.probes, call.successes, call.lease_ms, now) if call.again else 0
        return _reply(Verdict.PROVED, now, register, seq=seq)

    def _renew(self, call: Renew, now: int) -> Reply:
        shard = self._shards[shard_of(call.key)]
        register = self._lender(shard, call, now)
        if register is None:
            return _reply(Verdict.FENCED, now, shard.registers.get(call.key))
        register.probes.leases[call.seq] = now + call.lease_ms * 1000
        self._touch(register, now)
        return _reply(Verdict.OK, now, register, contended=register.probes.refused >= call.seq)

    def _release(self, call: Release, now: int) -> Reply:
        shard = self._shards[shard_of(call.key)]
        register = self._lender(shard, call, now)
        if register is None:
            return _reply(Verdict.FENCED, now, shard.registers.get(call.key))
        del register.probes.leases[call.seq]
        if register.probes.leases or register.probes.good:
            return _reply(Verdict.OK, now, register)
        return self._reopen(shard, register, call.tx, call.body, now, 0)

    def _lender(self, shard: _Shard, call: Report | Renew | Release, now: int) -> _Register | None:
        """The register, if the caller's probe is one of its."""
        register = shard.registers.get(call.key)
        if register is None or register.head.state != Code.HALF_OPEN:
            return None
        if (register.head.epoch, register.head.version) != (call.epoch, call.version):
            return None
        return register if register.probes.leases.get(call.seq, 0) > now else None

    def _lost(self, register: _Register, now: int) -> bool:
        """Whether a probe's lease ran out."""
        return any(expires_us <= now for expires_us in register.probes.leases.values())

    def _used_up(self, register: _Register, successes: int) -> bool:
        """Whether all that may be lent were lent and none is out: nothing would ever come of it."""
        lent = register.probes
        return not lent.leases and lent.granted >= _total(_needed(register.head, successes))

    def _failed(self, shard: _Shard, register: _Register, tx: bytes, body: bytes, now: int) -> Reply:
        head = register.head
        doublings = min(head.doublings + 1, MAX_DOUBLINGS)
        wait_ms = min(head.max_ms, head.base_ms << doublings)
        register.head = replace(head, doublings=doublings)
        return self._reopen(shard, register, tx, body, now, wait_ms)

    def _reopen(self, shard: _Shard, register: _Register, tx: bytes, body: bytes, now: int, wait_ms: int) -> Reply:
        opened = replace(register.head, kind=Kind.TRANSITION, state=Code.OPEN, tx=tx, wait_ms=wait_ms)
        return _reply(Verdict.REOPENED, now, self._move(shard, opened, body, now))

    # --- rules 7-9 ----------------------------------------------------------------------------------------------------

    def _restore(self, call: Restore, now: int) -> Reply:
        shard = self._shards[shard_of(call.key)]
        register = shard.registers.get(call.key)
        try:
            record = codec.decode(call.record)
        except Unreadable:
            return _reply(Verdict.ILLEGAL, now, register)
        if record.kind == Kind.SUSPECT:
            return _reply(Verdict.ILLEGAL, now, register)
        version = record.version
        if register is not None and (record.epoch, version) <= (register.head.epoch, register.head.version):
            if record.order <= register.head.order or record.tx == register.head.tx:
                return _reply(Verdict.KEPT, now, register)
            version += 1
        restored = replace(record, key=call.key, version=version, ts_us=min(record.ts_us, now))
        if record.state == Code.HALF_OPEN:
            restored = replace(restored, state=Code.OPEN, version=record.version + 1, wait_ms=0)
        return _reply(Verdict.OK, now, self._write(shard, restored, call.record[HEAD.size :], now))

    def _beat(self, call: Beat, now: int) -> Reply:
        self._members[call.by] = now
        self._members = {by: at for by, at in self._members.items() if now - at < MEMBER_TTL_MS * 1000}
        return Reply(Verdict.OK, now, ms=len(self._members))

    def _move(self, shard: _Shard, head: Record, body: bytes, now: int) -> _Register:
        """Write the register's next version, now."""
        return self._write(shard, replace(head, version=head.version + 1, ts_us=now), body, now)

    def _write(self, shard: _Shard, head: Record, body: bytes, now: int) -> _Register:
        """Write a register and append it. What was lent is lent no more."""
        key = head.key
        scope, service, _ = parse_key(key)
        data = self._append(shard, head, body, now)
        register = shard.registers[key] = _Register(head, data, _Probes(now))
        shard.closed.pop(key, None)
        shard.unclosed.pop(key, None)
        if head.state == Code.CLOSED:
            self._not_a_node(shard, key, service)
        else:
            shard.suspects.pop(key, None)
            if scope == Scope.NODE:
                shard.nodes.setdefault(service, set()).add(key)
        if key != route_key(service):  # a routing table that never changes is needed all the same
            (shard.closed if head.state == Code.CLOSED else shard.unclosed)[key] = None
        self._purge(shard, now)
        return register

    def _append(self, shard: _Shard, head: Record, body: bytes, now: int) -> bytes:
        shard.n = shard.n + 1 if shard.n else now
        data = codec.encode_head(replace(head, n=shard.n)) + body
        shard.log.append(data, now)
        self._wake()
        return data

    def _touch(self, register: _Register, now: int) -> None:
        register.touched_us = now

    def _purge(self, shard: _Shard, now: int) -> None:
        """Forget a few that nobody needs, of those that were written first."""
        for keys in (shard.closed, shard.unclosed):
            for key in [key for key, _ in zip(keys, range(PURGE), strict=False)]:
                register = shard.registers[key]
                if not register.held(now) and register.forget_us() <= now:
                    self._forget(shard, key)
                elif register.held(now) or register.touched_us > register.probes.since_us:
                    keys[key] = keys.pop(key)
        while len(shard.registers) > MAX_REGISTERS and shard.closed:
            self._forget(shard, next(iter(shard.closed)))

    def _forget(self, shard: _Shard, key: str) -> None:
        del shard.registers[key]
        shard.closed.pop(key, None)
        shard.unclosed.pop(key, None)
        self._not_a_node(shard, key, parse_key(key)[1])

    def _not_a_node(self, shard: _Shard, key: str, service: str) -> None:
        nodes = shard.nodes.get(service)
        if nodes is not None:
            nodes.discard(key)
            if not nodes:
                del shard.nodes[service]

    # --- readers ------------------------------------------------------------------------------------------------------

    def _after(self, after: dict[int, tuple[str, str]], count: int) -> list[Entry]:
        found: list[Entry] = []
        for shard, (log, evidence) in after.items():
            it = self._shards[shard]
            found += [Entry(shard, False, id_, data) for id_, data in it.log.after(log, count)]
            found += [Entry(shard, True, id_, data) for id_, data in it.evidence.after(evidence, count)]
        return found

    def _wake(self) -> None:
        readers, self._readers = self._readers, []
        for reader in readers:
            if not reader.done():
                reader.set_result(None)


def _counts(register: _Register, now_us: int) -> bool:
    """Whether a node that is not closed counts as one, or is gone."""
    return register.held(now_us) or register.gone_us() > now_us


def _needed(head: Record, successes: int) -> int:
    return max(successes, head.proofs * min(2, 1 + head.doublings))


def _total(needed: int) -> int:
    return TOTAL_PER_NEEDED * needed + TOTAL_SLACK


def _reply(
    verdict: Verdict, now: int, register: _Register | None, seq: int = 0, ms: int = 0, contended: bool = False
) -> Reply:
    return Reply(verdict, now, b"" if register is None else register.data, seq, ms, contended)


def _written(id_: tuple[int, int]) -> str:
    return f"{id_[0]}-{id_[1]}"


def _read(position: str) -> tuple[int, int]:
    ms, _, seq = position.partition("-")
    return int(ms), int(seq or 0)
