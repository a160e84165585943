"""The contract of `sidecar.txlog.store`, as tests over any `Store`: every rule, every verdict, twice, late and foreign.

A test module subclasses `StoreContract` and says what `store` (opened, and empty) and `clock` are. A clock is virtual,
and time goes by when told, or real, and then it takes as long. What takes minutes is tested where it costs nothing.
"""

import asyncio
import inspect
from collections.abc import Callable
from itertools import count
from typing import Any, Protocol

import pytest
from msgspec.structs import replace

from sidecar.core.breaker import Scope
from sidecar.txlog.codec import (
    MAX_TABLE_BYTES,
    SHARDS,
    Code,
    Kind,
    Record,
    budget_key,
    budget_shard,
    decode,
    encode,
    encode_body,
    register_key,
    route_key,
    shard_of,
)
from sidecar.txlog.store import (
    GONE_SLACK_MS,
    MAX_DOUBLINGS,
    MEMBER_TTL_MS,
    MIN_SPAN_MS,
    MOST_PROBES,
    PATIENCE_MS,
    SUSPECT_MS,
    TOTAL_PER_NEEDED,
    TOTAL_SLACK,
    Ask,
    Beat,
    Call,
    Draw,
    Drawn,
    Entry,
    Part,
    Propose,
    Release,
    Renew,
    Reply,
    Report,
    Restore,
    Share,
    Store,
    Unit,
    Verdict,
    Window,
    drawn,
)

CLOSED, HALF_OPEN, OPEN = Code.CLOSED, Code.HALF_OPEN, Code.OPEN

BUDGET = budget_key("gold", "acme")

LONG_MS = 60_000  # longer than any test with a real clock
SHORT_MS = 30  # and what such a test waits for
MAX_MS = 100_000

SERVICE = "chat"
NODE = register_key(Scope.NODE, SERVICE, "a:80")
KEYS = {
    "node": NODE,
    "session": register_key(Scope.SESSION, SERVICE, "s-1"),
    "request": register_key(Scope.REQUEST, SERVICE, "/v1/chat/completions"),
}

RECORD = Record(
    kind=Kind.TRANSITION,
    state=OPEN,
    epoch=500,
    version=5,
    tx=b"m" * 16,
    key=NODE,
    service=SERVICE,
    by="two",
    ts_us=1_000_000,
    wait_ms=50,
    base_ms=50,
    max_ms=MAX_MS,
    doublings=3,
    ramp_ms=9,
)
"""What a server lost."""

STATES = ("absent", "closed", "open", "half_open")
_numbers = count(1)


class Clock(Protocol):
    """`virtual`: minutes cost nothing."""

    virtual: bool

    async def passes(self, ms: float) -> None:
        """At least so much time goes by on the server."""


def new_tx() -> bytes:
    """One that nothing else has."""
    return next(_numbers).to_bytes(16, "big")


def body(by: str = "one", why: str = "", key: str = NODE) -> bytes:
    return encode_body(key, SERVICE, by, why)


def opening(key: str = NODE, /, **changes: object) -> Propose:
    """A proposal to open, of one observer, with a wait that no test outlives."""
    plain = Propose(
        key=key,
        service=SERVICE,
        kind=Kind.TRANSITION,
        state=OPEN,
        epoch=0,
        version=0,
        tx=new_tx(),
        body=body(key=key),
        by="one",
        wait_ms=LONG_MS,
        base_ms=LONG_MS,
        max_ms=MAX_MS,
    )
    return replace(plain, **changes)


def order(state: int, key: str = NODE, /, **changes: object) -> Propose:
    """An operator's order."""
    return opening(key, kind=Kind.OVERRIDE, state=state, order=True, wait_ms=0, **changes)


def asking(key: str = NODE, /, **changes: object) -> Ask:
    plain = Ask(
        key=key,
        service=SERVICE,
        by="one",
        lease_ms=LONG_MS,
        probes=1,
        successes=1,
        tx=new_tx(),
        body=body(why="waited", key=key),
        reopened_tx=new_tx(),
        reopened_body=body(why="lost", key=key),
    )
    return replace(plain, **changes)


def reporting(probe: Reply, ok: bool | None, **changes: object) -> Report:
    """The result of a probe that was given."""
    record = decode(probe.record)
    plain = Report(
        key=record.key,
        service=SERVICE,
        by="one",
        epoch=record.epoch,
        version=record.version,
        seq=probe.seq,
        ok=ok,
        again=False,
        lease_ms=LONG_MS,
        probes=1,
        successes=1,
        tx=new_tx(),
        closed_body=body(why="proved", key=record.key),
        reopened_body=body(why="failed", key=record.key),
    )
    return replace(plain, **changes)


def renewing(probe: Reply, **changes: object) -> Renew:
    record = decode(probe.record)
    plain = Renew(
        key=record.key,
        service=SERVICE,
        epoch=record.epoch,
        version=record.version,
        seq=probe.seq,
        lease_ms=LONG_MS,
    )
    return replace(plain, **changes)


def releasing(probe: Reply, **changes: object) -> Release:
    record = decode(probe.record)
    plain = Release(
        key=record.key,
        service=SERVICE,
        epoch=record.epoch,
        version=record.version,
        seq=probe.seq,
        tx=new_tx(),
        body=body(why="unused", key=record.key),
    )
    return replace(plain, **changes)


def restoring(record: Record) -> Restore:
    return Restore(key=record.key, service=record.service, record=encode(record))


class Bench:
    """A store whose every answer is held against the log: what changed was appended, as it is, and nothing else was."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.known: dict[str, bytes] = {}
        self.logs: dict[int, list[Record]] = {}
        self.positions: dict[int, str] = {}

    async def do(self, call: Propose | Ask | Report | Renew | Release | Restore) -> Reply:
        """One call."""
        (reply,) = await self.store.call([call])
        before = self.known.get(call.key, b"")
        added = await self.added(shard_of(call.key))
        if reply.record != before:
            assert added == [reply.record], f"{reply.verdict}: what was written is not what was appended"
            self._follows(before, reply, isinstance(call, Restore))
        elif reply.verdict is Verdict.SUSPECT:
            assert [decode(data).kind for data in added] in ([], [Kind.SUSPECT])
        else:
            assert added == [], f"{reply.verdict} appended and changed nothing"
        self.known[call.key] = reply.record
        return reply

    async def added(self, shard: int) -> list[bytes]:
        """What the shard's log got since the last time; `n` counts it."""
        entries = await self.store.history(shard, evidence=False, after=self.positions.get(shard, "0"), count=1000)
        if entries:
            self.positions[shard] = entries[-1].id
        log = self.logs.setdefault(shard, [])
        log += [decode(entry.data) for entry in entries]
        assert [record.n - log[0].n for record in log] == list(range(len(log)))
        return [entry.data for entry in entries]

    def _follows(self, before: bytes, reply: Reply, restored: bool) -> None:
        after = decode(reply.record)
        if not restored:
            assert after.ts_us == reply.now_us
        if not before:
            assert restored or after.version == 1
            return
        previous = decode(before)
        assert (after.epoch, after.version) > (previous.epoch, previous.version)
        if not restored:
            assert (after.epoch, after.version) == (previous.epoch, previous.version + 1)

    async def stand(self, state: str, key: str = NODE, /, **changes: Any) -> Record | None:
        """Bring a register into a state; what is there then. `changes` are of what opens it."""
        if state == "absent":
            return None
        if state == "closed":
            return decode((await self.do(order(CLOSED, key))).record)
        if state == "open":
            return decode((await self.do(opening(key, **changes))).record)
        return decode((await self.half_open(key, **changes)).record)

    async def half_open(self, key: str = NODE, /, *, ask: Ask | None = None, **changes: Any) -> Reply:
        """Open a key without a wait and get its first probe."""
        opened = await self.do(opening(key, **({"wait_ms": 0} | changes)))
        assert opened.verdict is Verdict.OK
        probe = await self.do(ask or asking(key))
        assert (probe.verdict, probe.seq) == (Verdict.GRANTED, 1)
        return probe


def expectation(record: Record | None) -> dict[str, int]:
    """What a proposal names that saw this."""
    return {} if record is None else {"epoch": record.epoch, "version": record.version}


def needs_minutes(clock: Clock) -> None:
    if not clock.virtual:
        pytest.skip("takes minutes, which only a virtual clock has")


class StoreContract:
    """The tests. Fixtures to give: `store`, `clock`."""

    @pytest.fixture
    def bench(self, store: Store) -> Bench:
        return Bench(store)

    # --- 1: proposals -------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
    @pytest.mark.parametrize("state", STATES)
    @pytest.mark.parametrize("to", [CLOSED, HALF_OPEN, OPEN], ids=["close", "half_open", "open"])
    async def test_only_legal_edges_are_taken(self, bench: Bench, key: str, state: str, to: int) -> None:
        stands = await bench.stand(state, key)
        legal = (state in ("absent", "closed") and to == OPEN) or (state in ("open", "half_open") and to == CLOSED)
        reply = await bench.do(opening(key, state=to, **expectation(stands)))
        assert reply.verdict is (Verdict.OK if legal else Verdict.ILLEGAL)
        if legal:
            assert decode(reply.record).state == to

    @pytest.mark.parametrize("state", STATES)
    @pytest.mark.parametrize(
        ("epoch", "version"),
        [(0, 1), (0, -1), (1, 0), (-1, 0), (1, -1), (-1, 1)],
        ids=["later", "earlier", "later epoch", "earlier epoch", "later epoch, earlier", "earlier epoch, later"],
    )
    async def test_another_version_is_stale(self, bench: Bench, state: str, epoch: int, version: int) -> None:
        stands = await bench.stand(state)
        seen = (1_000_000, 7) if stands is None else (stands.epoch, stands.version)
        to = CLOSED if state in ("open", "half_open") else OPEN
        wrong = opening(state=to, epoch=seen[0] + epoch, version=seen[1] + version)
        assert (await bench.do(wrong)).verdict is (Verdict.OK if stands is None else Verdict.STALE)

    async def test_of_two_with_one_expectation_one_wins(self, bench: Bench) -> None:
        closed = await bench.stand("closed")
        first, second = (opening(by=by, **expectation(closed)) for by in ("one", "two"))
        assert (await bench.do(first)).verdict is Verdict.OK
        late = await bench.do(second)
        assert late.verdict is Verdict.STALE
        assert decode(late.record).tx == first.tx

    @pytest.mark.parametrize("state", ["absent", "closed"])
    async def test_a_repetition_is_already_done(self, bench: Bench, state: str) -> None:
        call = opening(**expectation(await bench.stand(state)))
        done = await bench.do(call)
        again = await bench.do(call)
        assert (done.verdict, again.verdict) == (Verdict.OK, Verdict.ALREADY)
        assert again.record == done.record

    async def test_a_repetition_after_somebody_elses_change_is_stale(self, bench: Bench) -> None:
        call = opening()
        opened = decode((await bench.do(call)).record)
        await bench.do(opening(state=CLOSED, **expectation(opened)))
        assert (await bench.do(call)).verdict is Verdict.STALE

    async def test_a_repeated_order_is_already_done(self, bench: Bench) -> None:
        call = order(OPEN, held=True)
        assert [(await bench.do(call)).verdict for _ in range(2)] == [Verdict.OK, Verdict.ALREADY]

    @pytest.mark.parametrize("state", STATES)
    @pytest.mark.parametrize("to", [CLOSED, HALF_OPEN, OPEN], ids=["close", "half_open", "open"])
    async def test_an_order_goes_anywhere_from_any_version(self, bench: Bench, state: str, to: int) -> None:
        await bench.stand(state)
        reply = await bench.do(order(to, epoch=0, version=999, size=1, minimum=1, quorum=9))
        assert reply.verdict is Verdict.OK
        assert (decode(reply.record).state, decode(reply.record).kind) == (to, Kind.OVERRIDE)

    @pytest.mark.parametrize("held", [CLOSED, HALF_OPEN, OPEN], ids=["closed", "half_open", "open"])
    @pytest.mark.parametrize("to", [CLOSED, HALF_OPEN, OPEN], ids=["close", "half_open", "open"])
    async def test_what_an_order_holds_only_an_order_moves(self, bench: Bench, held: int, to: int) -> None:
        stands = decode((await bench.do(order(held, held=True))).record)
        assert (await bench.do(opening(state=to, **expectation(stands)))).verdict is Verdict.HELD
        assert (await bench.do(opening(state=to, epoch=stands.epoch, version=9))).verdict is Verdict.STALE
        moved = await bench.do(order(to))
        assert moved.verdict is Verdict.OK
        assert not decode(moved.record).held

    async def test_a_hold_ends(self, bench: Bench, clock: Clock) -> None:
        first = await bench.do(order(CLOSED))
        until = first.now_us + (LONG_MS + SHORT_MS) * 1000
        stands = decode((await bench.do(order(CLOSED, held=True, expires_us=until))).record)
        assert stands.expires_us == until
        assert (await bench.do(opening(**expectation(stands)))).verdict is Verdict.HELD
        again = decode((await bench.do(order(CLOSED, held=True, expires_us=first.now_us + 1))).record)
        await clock.passes(SHORT_MS)
        assert (await bench.do(opening(**expectation(again)))).verdict is Verdict.OK

    async def test_a_new_register_has_the_servers_seconds_as_its_epoch(self, bench: Bench) -> None:
        reply = await bench.do(opening())
        record = decode(reply.record)
        assert (record.epoch, record.version) == (reply.now_us // 1_000_000, 1)

    async def test_a_new_register_is_later_than_what_its_maker_saw(self, bench: Bench) -> None:
        far = 4_000_000_000
        record = decode((await bench.do(opening(epoch=far, version=17))).record)
        assert (record.epoch, record.version) == (far + 1, 1)

    async def test_a_record_says_what_was_proposed(self, bench: Bench) -> None:
        words = encode_body(NODE, SERVICE, "one", "why", "evidence", b"blob")
        call = opening(body=words, doublings=3, proofs=400, wait_ms=1, base_ms=2, max_ms=4_000_000_000, ramp_ms=5)
        reply = await bench.do(call)
        record = decode(reply.record)
        assert reply.record.endswith(words)
        assert record == Record(
            kind=Kind.TRANSITION,
            state=OPEN,
            epoch=record.epoch,
            version=1,
            tx=call.tx,
            key=NODE,
            service=SERVICE,
            by="one",
            why="why",
            evidence="evidence",
            blob=b"blob",
            n=reply.now_us,
            ts_us=reply.now_us,
            doublings=3,
            proofs=400,
            wait_ms=1,
            base_ms=2,
            max_ms=4_000_000_000,
            ramp_ms=5,
        )

    async def test_a_body_of_a_later_release_is_passed_on_whole(self, bench: Bench) -> None:
        later = b"\x99" + body()[1:] + b"\xc0" * (9 - (body()[0] & 0x0F))
        probe = await bench.half_open(ask=asking(body=later))
        assert probe.record.endswith(later)
        assert decode(probe.record).key == NODE

    async def test_a_routing_table_is_checked_by_version_alone(self, bench: Bench) -> None:
        key = route_key(SERVICE)
        table = encode_body(key, SERVICE, "one", blob=b"x" * (MAX_TABLE_BYTES // 2))
        first = opening(key, kind=Kind.ROUTE, state=CLOSED, body=table, size=1, minimum=1, quorum=9)
        one = await bench.do(first)
        stands = decode(one.record)
        assert (one.verdict, stands.kind, stands.state) == (Verdict.OK, Kind.ROUTE, CLOSED)
        assert stands.blob == b"x" * (MAX_TABLE_BYTES // 2)
        assert (await bench.do(first)).verdict is Verdict.ALREADY
        second = replace(first, tx=new_tx(), body=body(key=key), **expectation(stands))
        assert (await bench.do(second)).verdict is Verdict.OK
        assert (await bench.do(replace(second, tx=new_tx()))).verdict is Verdict.STALE

    # --- 2: the floor -------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("size", "minimum", "opened"),
        [(3, 2, 1), (3, 0, 3), (3, 3, 0), (3, 1, 2), (1, 1, 0), (1, 0, 1), (2, 1, 1), (5, 2, 3), (0, 1, 0)],
    )
    async def test_the_floor_stays_closed(self, bench: Bench, size: int, minimum: int, opened: int) -> None:
        verdicts = [(await bench.do(self.node(i, size=size, minimum=minimum))).verdict for i in range(max(size, 1))]
        assert verdicts == [Verdict.OK] * opened + [Verdict.FLOOR] * (max(size, 1) - opened)

    @staticmethod
    def node(i: int, service: str = SERVICE, **changes: object) -> Propose:
        return opening(register_key(Scope.NODE, service, f"n{i}:80"), service=service, **changes)

    async def test_two_that_open_two_nodes_at_once_do_not_pass_the_floor(self, store: Store) -> None:
        calls: list[Call] = [self.node(i, size=3, minimum=2) for i in range(3)]
        verdicts = [reply.verdict for reply in await store.call(calls)]
        assert verdicts == [Verdict.OK, Verdict.FLOOR, Verdict.FLOOR]

    @pytest.mark.parametrize("scope", ["session", "request"])
    async def test_only_nodes_have_a_floor(self, bench: Bench, scope: str) -> None:
        assert (await bench.do(opening(KEYS[scope], size=1, minimum=1))).verdict is Verdict.OK
        assert (await bench.do(self.node(0, size=3, minimum=2))).verdict is Verdict.OK

    async def test_nodes_of_another_service_in_the_shard_do_not_count(self, bench: Bench) -> None:
        shard = shard_of(self.node(0).key)
        other = next(name for name in (f"s{i}" for i in count()) if shard_of(self.node(0, name).key) == shard)
        assert (await bench.do(self.node(0, other, size=3, minimum=2))).verdict is Verdict.OK
        assert (await bench.do(self.node(0, size=3, minimum=2))).verdict is Verdict.OK
        assert (await bench.do(self.node(1, size=3, minimum=2))).verdict is Verdict.FLOOR

    async def test_half_open_and_ordered_and_restored_nodes_count(self, bench: Bench) -> None:
        await bench.half_open(self.node(0).key)
        await bench.do(order(OPEN, self.node(1).key))
        await bench.do(restoring(self.record(key=self.node(2).key)))
        assert (await bench.do(self.node(3, size=5, minimum=2))).verdict is Verdict.FLOOR
        assert (await bench.do(self.node(3, size=5, minimum=1))).verdict is Verdict.OK

    async def test_a_node_that_closed_counts_no_more(self, bench: Bench) -> None:
        first, second, third = (self.node(i).key for i in range(3))
        stands = await bench.stand("open", first)
        probe = await bench.half_open(second)
        await bench.do(opening(first, state=CLOSED, **expectation(stands)))
        await bench.do(reporting(probe, True))
        assert (await bench.do(opening(third, size=3, minimum=2))).verdict is Verdict.OK

    async def test_a_node_that_moves_counts_once(self, bench: Bench) -> None:
        probe = await bench.half_open(self.node(0).key)
        await bench.do(reporting(probe, False))
        await bench.do(order(OPEN, self.node(0).key))
        assert (await bench.do(self.node(1, size=3, minimum=1))).verdict is Verdict.OK

    @pytest.mark.parametrize(("after_ms", "verdict"), [(-1, Verdict.FLOOR), (1, Verdict.OK)], ids=["here", "gone"])
    async def test_a_node_that_nobody_touched_is_gone(
        self, bench: Bench, clock: Clock, after_ms: int, verdict: Verdict
    ) -> None:
        needs_minutes(clock)
        await bench.do(self.node(0, size=2, minimum=1))
        await clock.passes(2 * MAX_MS + GONE_SLACK_MS + after_ms)
        assert (await bench.do(self.node(1, size=2, minimum=1))).verdict is verdict

    async def test_a_node_whose_lease_is_prolonged_is_not_gone(self, bench: Bench, clock: Clock) -> None:
        needs_minutes(clock)
        probe = await bench.half_open(self.node(0).key)
        for _ in range(20):
            assert (await bench.do(renewing(probe))).verdict is Verdict.OK
            await clock.passes(LONG_MS - 1)
        assert (await bench.do(self.node(1, size=2, minimum=1))).verdict is Verdict.FLOOR

    async def test_a_node_that_an_order_holds_is_never_gone(self, bench: Bench, clock: Clock) -> None:
        needs_minutes(clock)
        await bench.do(order(OPEN, self.node(0).key, held=True))
        await clock.passes(100 * MAX_MS)
        assert (await bench.do(self.node(1, size=2, minimum=1))).verdict is Verdict.FLOOR

    # --- 3: the quorum ------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("quorum", "observers", "verdicts", "told"),
        [
            (1, "a", "o", 0),
            (0, "a", "o", 0),
            (2, "ab", "so", 1),
            (2, "aab", "sso", 1),
            (2, "aaaa", "ssss", 1),
            (3, "abc", "sso", 2),
            (3, "ababc", "sssso", 2),
        ],
    )
    async def test_opening_takes_so_many_observers(
        self, bench: Bench, quorum: int, observers: str, verdicts: str, told: int
    ) -> None:
        said = [(await bench.do(opening(by=by, quorum=quorum))).verdict for by in observers]
        assert said == [{"s": Verdict.SUSPECT, "o": Verdict.OK}[letter] for letter in verdicts]
        kinds = [record.kind for record in bench.logs[shard_of(NODE)]]
        assert kinds.count(Kind.SUSPECT) == told

    @pytest.mark.parametrize("state", ["absent", "closed"])
    async def test_a_suspicion_leaves_the_register(self, bench: Bench, state: str) -> None:
        stands = await bench.stand(state)
        call = opening(quorum=2, suspect_tx=new_tx(), body=body(why="half of them failed"), **expectation(stands))
        reply = await bench.do(call)
        told = bench.logs[shard_of(NODE)][-1]
        assert reply.verdict is Verdict.SUSPECT
        assert reply.record == (b"" if stands is None else encode(stands))
        assert (told.kind, told.state, told.tx, told.why) == (
            Kind.SUSPECT,
            CLOSED,
            call.suspect_tx,
            "half of them failed",
        )
        assert (told.epoch, told.version) == ((0, 0) if stands is None else (stands.epoch, stands.version))
        assert (told.key, told.by, told.ts_us) == (NODE, "one", reply.now_us)

    async def test_overwhelming_evidence_needs_nobody_else(self, bench: Bench) -> None:
        assert (await bench.do(opening(quorum=5, overwhelming=True))).verdict is Verdict.OK

    async def test_suspicions_of_another_key_do_not_count(self, bench: Bench) -> None:
        await bench.do(opening(KEYS["request"], by="two", quorum=2))
        assert (await bench.do(opening(by="one", quorum=2))).verdict is Verdict.SUSPECT

    async def test_a_register_that_opened_has_no_suspects_any_more(self, bench: Bench) -> None:
        await bench.do(opening(by="one", quorum=2))
        opened = decode((await bench.do(opening(by="two", quorum=2))).record)
        closed = decode((await bench.do(opening(state=CLOSED, **expectation(opened)))).record)
        assert (await bench.do(opening(by="two", quorum=2, **expectation(closed)))).verdict is Verdict.SUSPECT
        assert bench.logs[shard_of(NODE)][-1].kind == Kind.SUSPECT

    async def test_what_the_floor_refuses_is_no_suspicion(self, bench: Bench) -> None:
        assert (await bench.do(opening(size=1, minimum=1, quorum=2))).verdict is Verdict.FLOOR
        assert not bench.logs[shard_of(NODE)]

    @pytest.mark.parametrize(
        ("after_ms", "verdict", "told"),
        [(-1, Verdict.OK, 1), (1, Verdict.SUSPECT, 2)],
        ids=["in time", "too late"],
    )
    async def test_a_suspicion_counts_for_a_minute(
        self, bench: Bench, clock: Clock, after_ms: int, verdict: Verdict, told: int
    ) -> None:
        needs_minutes(clock)
        await bench.do(opening(by="one", quorum=2))
        await clock.passes(SUSPECT_MS // 2)
        await bench.do(opening(by="one", quorum=2))
        await clock.passes(SUSPECT_MS // 2 + after_ms)
        assert (await bench.do(opening(by="two", quorum=2))).verdict is verdict
        assert [record.kind for record in bench.logs[shard_of(NODE)]].count(Kind.SUSPECT) == told

    async def test_an_observer_is_heard_again_after_a_minute(self, bench: Bench, clock: Clock) -> None:
        needs_minutes(clock)
        await bench.do(opening(quorum=2))
        await clock.passes(SUSPECT_MS + 1)
        await bench.do(opening(quorum=2))
        assert [record.kind for record in bench.logs[shard_of(NODE)]] == [Kind.SUSPECT] * 2

    # --- 4: probes ----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
    @pytest.mark.parametrize("state", ["absent", "closed"])
    async def test_a_closed_register_needs_no_probe(self, bench: Bench, key: str, state: str) -> None:
        await bench.stand(state, key)
        assert (await bench.do(asking(key))).verdict is Verdict.CLOSED

    async def test_a_closed_register_that_is_held_is_closed(self, bench: Bench) -> None:
        await bench.do(order(CLOSED, held=True))
        assert (await bench.do(asking())).verdict is Verdict.CLOSED

    @pytest.mark.parametrize("state", [OPEN, HALF_OPEN], ids=["open", "half_open"])
    async def test_nobody_probes_what_an_order_holds(self, bench: Bench, clock: Clock, state: int) -> None:
        now_us = (await bench.do(order(state, held=True))).now_us
        assert (await bench.do(asking())).verdict is Verdict.HELD
        await bench.do(order(state, held=True, expires_us=now_us + 1000))
        await clock.passes(SHORT_MS)
        assert (await bench.do(asking())).verdict is Verdict.GRANTED

    async def test_an_open_register_lets_nobody_probe_before_its_wait_is_over(self, bench: Bench) -> None:
        opened = await bench.do(opening())
        reply = await bench.do(asking())
        assert reply.verdict is Verdict.WAIT
        left_ms = LONG_MS - (reply.now_us - opened.now_us) / 1000
        assert left_ms <= reply.ms <= left_ms + 1

    @pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
    async def test_who_asks_after_the_wait_gets_the_first_probe(self, bench: Bench, clock: Clock, key: str) -> None:
        opened = decode((await bench.do(opening(key, wait_ms=SHORT_MS, doublings=2, proofs=7, ramp_ms=9))).record)
        await clock.passes(SHORT_MS)
        call = asking(key)
        reply = await bench.do(call)
        record = decode(reply.record)
        assert (reply.verdict, reply.seq) == (Verdict.GRANTED, 1)
        assert record == replace(
            opened,
            state=HALF_OPEN,
            version=2,
            tx=call.tx,
            why="waited",
            n=record.n,
            ts_us=reply.now_us,
        )

    async def test_a_hold_that_ended_is_not_in_the_half_open_record(self, bench: Bench, clock: Clock) -> None:
        now_us = (await bench.do(order(CLOSED))).now_us
        await bench.do(order(OPEN, held=True, expires_us=now_us + 1))
        await clock.passes(SHORT_MS)
        record = decode((await bench.do(asking())).record)
        assert (record.kind, record.state, record.held, record.expires_us) == (Kind.TRANSITION, HALF_OPEN, False, 0)

    @pytest.mark.parametrize(
        ("probes", "successes", "proofs", "doublings", "good", "lent"),
        [
            pytest.param(1, 1, 0, 0, 0, 1, id="one"),
            pytest.param(3, 5, 0, 0, 0, 3, id="as many as are lent at a time"),
            pytest.param(3, 2, 0, 0, 0, 2, id="no more than are needed"),
            pytest.param(3, 5, 0, 0, 4, 1, id="no more than are still needed"),
            pytest.param(1, 2, 30, 0, 0, 1, id="one until one was good"),
            pytest.param(1, 2, 30, 0, 1, MOST_PROBES, id="many once one was good"),
            pytest.param(1, 2, 30, 0, 25, 5, id="many, but no more than are still needed"),
            pytest.param(20, 2, 30, 0, 1, 20, id="more than many"),
            pytest.param(1, 30, 30, 0, 1, 1, id="one if no more than successes are needed"),
            pytest.param(1, 2, 5, 1, 3, 7, id="twice the proofs after a failed probe"),
            pytest.param(1, 2, 5, 9, 3, 7, id="twice the proofs at most"),
        ],
    )
    async def test_so_many_probes_are_lent_at_a_time(
        self, bench: Bench, probes: int, successes: int, proofs: int, doublings: int, good: int, lent: int
    ) -> None:
        ask = asking(probes=probes, successes=successes)
        probe = await bench.half_open(ask=ask, proofs=proofs, doublings=doublings)
        for _ in range(good):
            proved = await bench.do(reporting(probe, True, probes=probes, successes=successes))
            assert proved.verdict is Verdict.PROVED
            probe = await bench.do(ask)
            assert probe.verdict is Verdict.GRANTED
        given = [probe.seq]
        while (probe := await bench.do(ask)).verdict is Verdict.GRANTED:
            given.append(probe.seq)
        assert probe.verdict is Verdict.FULL
        assert given == list(range(good + 1, good + 1 + lent))

    @pytest.mark.parametrize(("successes", "proofs"), [(1, 0), (3, 0), (1, 5)])
    async def test_so_many_probes_are_lent_in_all(self, bench: Bench, successes: int, proofs: int) -> None:
        ask = asking(successes=successes)
        total = TOTAL_PER_NEEDED * max(successes, proofs) + TOTAL_SLACK
        probe = await bench.half_open(ask=ask, proofs=proofs, doublings=0)
        opened = decode(probe.record)
        for _ in range(total - 1):
            assert (await bench.do(reporting(probe, None, successes=successes))).verdict is Verdict.NEUTRAL
            probe = await bench.do(ask)
            assert probe.verdict is Verdict.GRANTED
        last = reporting(probe, None, successes=successes)
        reply = await bench.do(last)
        record = decode(reply.record)
        assert (reply.verdict, probe.seq) == (Verdict.REOPENED, total)
        assert (record.state, record.doublings, record.wait_ms) == (OPEN, opened.doublings, opened.wait_ms)
        assert (record.tx, record.why) == (last.tx, "failed")

    async def test_a_last_good_probe_that_is_not_enough_opens_too(self, bench: Bench) -> None:
        ask = asking(successes=2)
        probe = await bench.half_open(ask=ask)
        for _ in range(TOTAL_PER_NEEDED * 2 + TOTAL_SLACK - 1):
            await bench.do(reporting(probe, None, successes=2))
            probe = await bench.do(ask)
        assert (await bench.do(reporting(probe, True, successes=2))).verdict is Verdict.REOPENED

    async def test_who_needs_fewer_than_were_good_gets_a_probe_that_closes(self, bench: Bench) -> None:
        probe = await bench.half_open(ask=asking(successes=9))
        for _ in range(3):
            probe = await bench.do(reporting(probe, True, successes=9, again=True))
        await bench.do(reporting(probe, None, successes=9))
        probe = await bench.do(asking(successes=1))
        assert probe.verdict is Verdict.GRANTED
        assert (await bench.do(asking(successes=1))).verdict is Verdict.FULL
        assert (await bench.do(reporting(probe, True, successes=1))).verdict is Verdict.CLOSED

    async def test_who_lends_fewer_than_were_lent_opens(self, bench: Bench) -> None:
        """Two policies ask: by the second's everything was used up, and the first never comes back."""
        ask = asking(successes=9)
        probe = await bench.half_open(ask=ask)
        for _ in range(TOTAL_PER_NEEDED + TOTAL_SLACK):
            await bench.do(reporting(probe, None, successes=9))
            probe = await bench.do(ask)
        await bench.do(reporting(probe, None, successes=9))
        call = asking(successes=1)
        reply = await bench.do(call)
        assert reply.verdict is Verdict.REOPENED
        assert (decode(reply.record).tx, decode(reply.record).doublings) == (call.reopened_tx, 0)

    async def test_a_lost_probe_reopens(self, bench: Bench, clock: Clock) -> None:
        await bench.half_open(ask=asking(lease_ms=SHORT_MS), base_ms=1000, max_ms=MAX_MS)
        await clock.passes(SHORT_MS)
        call = asking()
        reply = await bench.do(call)
        record = decode(reply.record)
        assert (reply.verdict, reply.seq) == (Verdict.REOPENED, 0)
        assert (record.kind, record.state, record.tx, record.why) == (
            Kind.TRANSITION,
            OPEN,
            call.reopened_tx,
            "lost",
        )
        assert (record.doublings, record.wait_ms) == (1, 2000)

    async def test_one_lost_probe_of_several_reopens(self, bench: Bench, clock: Clock) -> None:
        await bench.half_open(ask=asking(probes=3, successes=3))
        assert (await bench.do(asking(probes=3, successes=3, lease_ms=SHORT_MS))).seq == 2
        await clock.passes(SHORT_MS)
        assert (await bench.do(asking(probes=3, successes=3))).verdict is Verdict.REOPENED

    async def test_probes_of_one_half_open_are_not_those_of_the_next(self, bench: Bench) -> None:
        first = await bench.half_open(base_ms=0, max_ms=0)
        await bench.do(reporting(first, False))
        second = await bench.do(asking())
        assert (second.verdict, second.seq) == (Verdict.GRANTED, 1)
        assert (await bench.do(reporting(first, True))).verdict is Verdict.FENCED
        assert (await bench.do(reporting(second, True))).verdict is Verdict.CLOSED

    # --- 5: results ---------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("ok", [True, False, None], ids=["good", "failed", "neutral"])
    @pytest.mark.parametrize(
        "changes",
        [{"epoch": 1}, {"epoch": -1}, {"version": 1}, {"version": -1}, {"seq": 1}, {"seq": -1}],
        ids=lambda changes: "{}{:+}".format(*next(iter(changes.items()))),
    )
    async def test_a_foreign_result_changes_nothing(
        self, bench: Bench, ok: bool | None, changes: dict[str, int]
    ) -> None:
        call = reporting(await bench.half_open(), ok)
        foreign = replace(call, **{name: getattr(call, name) + by for name, by in changes.items()})
        reply = await bench.do(foreign)
        assert reply.verdict is Verdict.FENCED
        assert decode(reply.record).state == HALF_OPEN
        assert (await bench.do(call)).verdict is not Verdict.FENCED

    @pytest.mark.parametrize("ok", [True, False, None], ids=["good", "failed", "neutral"])
    async def test_a_late_result_changes_nothing(self, bench: Bench, clock: Clock, ok: bool | None) -> None:
        probe = await bench.half_open(ask=asking(lease_ms=SHORT_MS))
        await clock.passes(SHORT_MS)
        assert (await bench.do(reporting(probe, ok))).verdict is Verdict.FENCED
        assert (await bench.do(asking())).verdict is Verdict.REOPENED
        assert (await bench.do(reporting(probe, ok))).verdict is Verdict.FENCED

    @pytest.mark.parametrize("ok", [True, False, None], ids=["good", "failed", "neutral"])
    async def test_a_result_counts_once(self, bench: Bench, ok: bool | None) -> None:
        call = reporting(await bench.half_open(ask=asking(successes=3)), ok, successes=3)
        assert (await bench.do(call)).verdict in (Verdict.PROVED, Verdict.REOPENED, Verdict.NEUTRAL)
        assert (await bench.do(call)).verdict is Verdict.FENCED

    @pytest.mark.parametrize("state", ["absent", "closed", "open", "ordered"])
    async def test_a_result_for_what_is_not_half_open_changes_nothing(self, bench: Bench, state: str) -> None:
        other = await bench.half_open(KEYS["request"])
        stands = decode((await bench.do(order(OPEN))).record) if state == "ordered" else await bench.stand(state)
        call = reporting(other, False, key=NODE, **(expectation(stands) or {"epoch": 1, "version": 1}))
        assert (await bench.do(call)).verdict is Verdict.FENCED

    async def test_an_order_fences_the_probes_that_are_out(self, bench: Bench) -> None:
        probe = await bench.half_open()
        await bench.do(order(OPEN, held=True))
        assert (await bench.do(reporting(probe, True))).verdict is Verdict.FENCED

    async def test_enough_good_probes_close(self, bench: Bench) -> None:
        probe = await bench.half_open(ask=asking(successes=3), doublings=2, proofs=1, ramp_ms=77)
        for _ in range(2):
            reply = await bench.do(reporting(probe, True, successes=3))
            assert (reply.verdict, reply.seq) == (Verdict.PROVED, 0)
            probe = await bench.do(asking(successes=3))
        half_open = decode(probe.record)
        call = reporting(probe, True, successes=3)
        reply = await bench.do(call)
        record = decode(reply.record)
        assert reply.verdict is Verdict.CLOSED
        assert record == replace(
            half_open,
            state=CLOSED,
            version=half_open.version + 1,
            tx=call.tx,
            why="proved",
            n=record.n,
            ts_us=reply.now_us,
            wait_ms=0,
        )
        assert (record.doublings, record.ramp_ms) == (2, 77)
        assert (await bench.do(asking())).verdict is Verdict.CLOSED

    @pytest.mark.parametrize(
        ("after_ms", "good", "verdict"),
        [
            (PATIENCE_MS - LONG_MS // 2, 2, Verdict.PROVED),
            (PATIENCE_MS, 1, Verdict.PROVED),
            (PATIENCE_MS, 2, Verdict.CLOSED),
        ],
        ids=["too early", "too few", "patient"],
    )
    async def test_where_traffic_is_thin_fewer_are_enough(
        self, bench: Bench, clock: Clock, after_ms: int, good: int, verdict: Verdict
    ) -> None:
        needs_minutes(clock)
        ask = asking(successes=2, lease_ms=10 * LONG_MS)
        probe = await bench.half_open(ask=ask, proofs=40)
        for _ in range(good - 1):
            await bench.do(reporting(probe, True, successes=2))
            probe = await bench.do(ask)
        await clock.passes(after_ms)
        assert (await bench.do(reporting(probe, True, successes=2))).verdict is verdict

    @pytest.mark.parametrize(
        ("base_ms", "max_ms", "doublings", "wait_ms"),
        [
            (1000, 100_000, 0, 2000),
            (1000, 100_000, 3, 16_000),
            (1000, 100_000, 6, 100_000),
            (1000, 500, 0, 500),
            (0, 100_000, 0, 0),
            (1, 4_294_967_295, 30, 2_147_483_648),
            (4_294_967_295, 4_294_967_295, MAX_DOUBLINGS, 4_294_967_295),
        ],
    )
    async def test_a_failed_probe_doubles_the_wait(
        self, bench: Bench, base_ms: int, max_ms: int, doublings: int, wait_ms: int
    ) -> None:
        probe = await bench.half_open(base_ms=base_ms, max_ms=max_ms, doublings=doublings, ramp_ms=77, proofs=3)
        call = reporting(probe, False)
        reply = await bench.do(call)
        half_open, record = decode(probe.record), decode(reply.record)
        assert reply.verdict is Verdict.REOPENED
        assert record == replace(
            half_open,
            state=OPEN,
            version=half_open.version + 1,
            tx=call.tx,
            why="failed",
            n=record.n,
            ts_us=reply.now_us,
            doublings=min(doublings + 1, MAX_DOUBLINGS),
            wait_ms=wait_ms,
        )

    async def test_a_neutral_result_frees_the_place(self, bench: Bench) -> None:
        probe = await bench.half_open()
        assert (await bench.do(asking())).verdict is Verdict.FULL
        reply = await bench.do(reporting(probe, None))
        assert (reply.verdict, reply.seq) == (Verdict.NEUTRAL, 0)
        assert (await bench.do(asking())).seq == 2

    @pytest.mark.parametrize(
        ("again", "others", "seq"),
        [(False, 0, 0), (True, 0, 2), (True, 2, 0)],
        ids=["not asked for", "given", "all are lent"],
    )
    async def test_who_proved_gets_the_next_probe_if_there_is_one(
        self, bench: Bench, again: bool, others: int, seq: int
    ) -> None:
        probe = await bench.half_open(ask=asking(probes=3, successes=3))
        for _ in range(others):
            await bench.do(asking(probes=3, successes=3))
        reply = await bench.do(reporting(probe, True, probes=3, successes=3, again=again))
        assert (reply.verdict, reply.seq) == (Verdict.PROVED, seq)
        if seq:
            assert (await bench.do(reporting(reply, True, successes=2))).verdict is Verdict.CLOSED

    @pytest.mark.parametrize("ok", [True, None], ids=["good", "neutral"])
    async def test_a_result_beside_a_lost_probe_reopens(self, bench: Bench, clock: Clock, ok: bool | None) -> None:
        probe = await bench.half_open(ask=asking(probes=2, successes=2), base_ms=1000)
        assert (await bench.do(asking(probes=2, successes=2, lease_ms=SHORT_MS))).seq == 2
        await clock.passes(SHORT_MS)
        reply = await bench.do(reporting(probe, ok))
        assert reply.verdict is Verdict.REOPENED
        assert (decode(reply.record).doublings, decode(reply.record).wait_ms) == (1, 2000)

    # --- 6: leases ----------------------------------------------------------------------------------------------------

    async def test_a_lease_that_is_prolonged_stands(self, bench: Bench, clock: Clock) -> None:
        probe = await bench.half_open(ask=asking(lease_ms=10 * SHORT_MS))
        reply = await bench.do(renewing(probe, lease_ms=LONG_MS))
        assert (reply.verdict, reply.contended) == (Verdict.OK, False)
        await clock.passes(10 * SHORT_MS)
        assert (await bench.do(reporting(probe, True))).verdict is Verdict.CLOSED

    @pytest.mark.parametrize("call", [renewing, releasing], ids=["renew", "release"])
    @pytest.mark.parametrize("changes", [{"epoch": 1}, {"version": -1}, {"version": 1}, {"seq": 1}, {"seq": -1}])
    async def test_a_foreign_lease_is_fenced(
        self, bench: Bench, call: Callable[[Reply], Renew | Release], changes: dict[str, int]
    ) -> None:
        probe = await bench.half_open()
        given = call(probe)
        foreign = replace(given, **{name: getattr(given, name) + by for name, by in changes.items()})
        assert (await bench.do(foreign)).verdict is Verdict.FENCED
        assert (await bench.do(asking())).verdict is Verdict.FULL

    async def test_a_lease_that_ran_out_is_not_prolonged_and_not_given_back(self, bench: Bench, clock: Clock) -> None:
        probe = await bench.half_open(ask=asking(lease_ms=SHORT_MS))
        await clock.passes(SHORT_MS)
        assert (await bench.do(renewing(probe))).verdict is Verdict.FENCED
        assert (await bench.do(releasing(probe))).verdict is Verdict.FENCED
        assert (await bench.do(asking())).verdict is Verdict.REOPENED

    async def test_lenders_are_told_that_others_were_refused_since(self, bench: Bench) -> None:
        ask = asking(probes=2, successes=3)
        first = await bench.half_open(ask=ask)
        assert not (await bench.do(renewing(first))).contended
        second = await bench.do(ask)
        assert (await bench.do(ask)).verdict is Verdict.FULL
        assert [(await bench.do(renewing(probe))).contended for probe in (first, second, first)] == [True] * 3
        await bench.do(reporting(second, True, successes=3))
        third = await bench.do(ask)
        assert not (await bench.do(renewing(third))).contended

    async def test_a_probe_that_is_given_back_frees_its_place(self, bench: Bench) -> None:
        ask = asking(probes=2, successes=2)
        first = await bench.half_open(ask=ask)
        second = await bench.do(ask)
        call = releasing(second)
        assert (await bench.do(call)).verdict is Verdict.OK
        assert (await bench.do(call)).verdict is Verdict.FENCED
        assert (await bench.do(reporting(second, False))).verdict is Verdict.FENCED
        assert (await bench.do(ask)).seq == 3
        assert (await bench.do(reporting(first, True, successes=2))).verdict is Verdict.PROVED

    async def test_the_last_probe_given_back_opens_without_a_wait(self, bench: Bench) -> None:
        probe = await bench.half_open(doublings=2)
        call = releasing(probe)
        reply = await bench.do(call)
        record = decode(reply.record)
        assert reply.verdict is Verdict.REOPENED
        assert (record.state, record.wait_ms, record.doublings) == (OPEN, 0, 2)
        assert (record.tx, record.why) == (call.tx, "unused")
        assert (await bench.do(asking())).verdict is Verdict.GRANTED

    async def test_what_was_good_counts_on_when_the_last_probe_is_given_back(self, bench: Bench) -> None:
        first = await bench.half_open()
        proved = await bench.do(reporting(first, True, successes=2, again=True))
        assert (proved.verdict, proved.seq) == (Verdict.PROVED, 2)
        assert (await bench.do(releasing(proved))).verdict is Verdict.OK
        third = await bench.do(asking(successes=2))
        assert (third.verdict, third.seq) == (Verdict.GRANTED, 3)
        assert (await bench.do(reporting(third, True, successes=2))).verdict is Verdict.CLOSED

    # --- 7: what a server lost ----------------------------------------------------------------------------------------

    @staticmethod
    def record(**changes: object) -> Record:
        return replace(RECORD, **changes)

    @pytest.mark.parametrize("state", [CLOSED, OPEN], ids=["closed", "open"])
    @pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
    async def test_a_record_that_the_server_lost_is_written_as_it_was(self, bench: Bench, state: int, key: str) -> None:
        lost = self.record(state=state, key=key, n=77)
        reply = await bench.do(restoring(lost))
        assert reply.verdict is Verdict.OK
        assert decode(reply.record) == replace(lost, n=reply.now_us)
        assert (await bench.do(restoring(lost))).verdict is Verdict.KEPT

    @pytest.mark.parametrize(
        ("stands", "lost", "verdict", "version"),
        [
            pytest.param({}, {"version": 6}, Verdict.OK, (500, 6), id="later"),
            pytest.param({}, {"version": 1, "epoch": 501}, Verdict.OK, (501, 1), id="a later epoch"),
            pytest.param({}, {"version": 4}, Verdict.KEPT, (500, 5), id="earlier"),
            pytest.param({}, {"version": 9, "epoch": 499}, Verdict.KEPT, (500, 5), id="an earlier epoch"),
            pytest.param({}, {}, Verdict.KEPT, (500, 5), id="the same"),
            pytest.param({}, {"tx": b"n" * 16}, Verdict.OK, (500, 6), id="a greater tx"),
            pytest.param({}, {"tx": b"l" * 16}, Verdict.KEPT, (500, 5), id="a lesser tx"),
            pytest.param({"state": CLOSED}, {"tx": b"l" * 16}, Verdict.OK, (500, 6), id="more severe"),
            pytest.param({}, {"tx": b"n" * 16, "state": CLOSED}, Verdict.KEPT, (500, 5), id="less severe"),
            pytest.param(
                {"state": CLOSED}, {"tx": b"l" * 16, "state": HALF_OPEN}, Verdict.OK, (500, 6), id="half open wins"
            ),
            pytest.param({}, {"tx": b"n" * 16, "state": HALF_OPEN}, Verdict.KEPT, (500, 5), id="half open loses"),
            pytest.param({}, {"version": 6, "state": HALF_OPEN}, Verdict.OK, (500, 7), id="half open is later"),
        ],
    )
    async def test_the_later_of_two_records_is_kept(
        self,
        bench: Bench,
        stands: dict[str, object],
        lost: dict[str, object],
        verdict: Verdict,
        version: tuple[int, int],
    ) -> None:
        await bench.do(restoring(self.record(**stands)))
        reply = await bench.do(restoring(self.record(**lost)))
        record = decode(reply.record)
        assert (reply.verdict, (record.epoch, record.version)) == (verdict, version)
        assert record.tx == self.record(**(lost if verdict is Verdict.OK else stands)).tx

    async def test_both_orders_of_restoring_end_alike(self, bench: Bench) -> None:
        one, two = self.record(tx=b"1" * 16), self.record(tx=b"2" * 16)
        seen = []
        for key, first, second in ((NODE, one, two), (KEYS["request"], two, one)):
            await bench.do(restoring(replace(first, key=key)))
            await bench.do(restoring(replace(second, key=key)))
            reply = await bench.do(restoring(replace(first, key=key)))
            seen.append(decode(reply.record).tx)
        assert seen == [b"2" * 16] * 2

    async def test_a_half_open_record_is_restored_as_open_without_a_wait(self, bench: Bench) -> None:
        lost = self.record(state=HALF_OPEN)
        reply = await bench.do(restoring(lost))
        assert decode(reply.record) == replace(lost, state=OPEN, version=6, wait_ms=0, n=reply.now_us)
        assert (await bench.do(restoring(lost))).verdict is Verdict.KEPT
        assert (await bench.do(asking())).verdict is Verdict.GRANTED

    async def test_a_restored_record_fences_the_probes_that_are_out(self, bench: Bench) -> None:
        probe = await bench.half_open()
        half_open = decode(probe.record)
        await bench.do(restoring(self.record(epoch=half_open.epoch, version=half_open.version + 3)))
        assert (await bench.do(reporting(probe, True))).verdict is Verdict.FENCED

    async def test_a_restored_order_still_holds(self, bench: Bench) -> None:
        lost = self.record(kind=Kind.OVERRIDE, held=True)
        await bench.do(restoring(lost))
        assert (await bench.do(asking())).verdict is Verdict.HELD
        assert (await bench.do(opening(state=CLOSED, **expectation(lost)))).verdict is Verdict.HELD

    async def test_a_restored_wait_does_not_begin_in_the_future(self, bench: Bench) -> None:
        reply = await bench.do(restoring(self.record(ts_us=1 << 52, wait_ms=0)))
        assert decode(reply.record).ts_us == reply.now_us
        assert (await bench.do(asking())).verdict is Verdict.GRANTED

    async def test_the_next_change_follows_the_restored(self, bench: Bench) -> None:
        lost = self.record()
        await bench.do(restoring(lost))
        reply = await bench.do(opening(state=CLOSED, **expectation(lost)))
        assert (reply.verdict, decode(reply.record).version) == (Verdict.OK, 6)

    @pytest.mark.parametrize(
        "data",
        [b"", b"\x01", b"\x02" + encode(RECORD)[1:], encode(replace(RECORD, kind=Kind.SUSPECT)), b"hello" * 50],
        ids=["empty", "short", "unknown schema", "a suspicion", "foreign"],
    )
    async def test_what_is_no_record_of_a_register_is_not_restored(self, bench: Bench, data: bytes) -> None:
        reply = await bench.do(Restore(key=NODE, service=SERVICE, record=data))
        assert (reply.verdict, reply.record) == (Verdict.ILLEGAL, b"")

    # --- 9, 10: beats and evidence ------------------------------------------------------------------------------------

    async def test_every_sidecar_that_was_heard_of_counts_once(self, store: Store) -> None:
        beats: list[Call] = [Beat(by=by) for by in ("one", "two", "one", "three")]
        assert [(reply.verdict, reply.ms) for reply in await store.call(beats)] == [
            (Verdict.OK, 1),
            (Verdict.OK, 2),
            (Verdict.OK, 2),
            (Verdict.OK, 3),
        ]

    async def test_who_is_silent_counts_no_more(self, store: Store, clock: Clock) -> None:
        needs_minutes(clock)
        await store.call([Beat(by="one"), Beat(by="two")])
        await clock.passes(MEMBER_TTL_MS - 1)
        assert (await store.call([Beat(by="two")]))[0].ms == 2
        await clock.passes(2)
        assert (await store.call([Beat(by="two")]))[0].ms == 1

    async def test_evidence_is_kept_in_order_beside_the_log(self, store: Store) -> None:
        shares: list[Call] = [Share(service=SERVICE, blob=b"%d" % i, keep_ms=LONG_MS) for i in range(5)]
        replies = await store.call([*shares, Share(service="other", blob=b"x", keep_ms=LONG_MS)])
        assert {reply.verdict for reply in replies} == {Verdict.OK}
        shard = shard_of(route_key(SERVICE))
        found = await store.history(shard, evidence=True, after="0", count=100)
        assert [entry.data for entry in found if entry.data != b"x"] == [b"0", b"1", b"2", b"3", b"4"]
        assert await store.history(shard, evidence=False, after="0", count=100) == []
        assert await store.counts() == [0] * SHARDS

    # --- 11: budgets; the whole of it is in `drawing`, with a clock that goes when told -------------------------------

    async def test_a_budget_is_drawn_and_room_comes_back(self, store: Store, clock: Clock) -> None:
        window = Window(Unit.TOKENS, MIN_SPAN_MS, 100, want=70)
        draws: list[Call] = [Draw(key=BUDGET, by=by, windows=(window,)) for by in ("one", "two", "one")]
        replies = await store.call(draws)
        assert {reply.verdict for reply in replies} == {Verdict.OK}
        parts = [drawn(reply).parts[0] for reply in replies]
        spent_ms = (replies[-1].now_us - replies[0].now_us) // 1000
        if spent_ms < MIN_SPAN_MS:  # or the machine stood still
            assert [(part.granted, part.used) for part in parts] == [(70, 70), (30, 100), (0, 100)]
            assert 0 < parts[1].ms <= MIN_SPAN_MS + 1
        await clock.passes(MIN_SPAN_MS + 1)
        (reply,) = await store.call([Draw(key=BUDGET, by="two", windows=(replace(window, want=100),))])
        assert drawn(reply).parts == (Part(100, 100, 0),)

    async def test_draws_of_many_tenants_go_beside_other_calls(self, store: Store) -> None:
        """In one list, whatever their shards; what is illegal is no other's harm; the log and its registers are as
        they were but for what was proposed."""
        window = Window(Unit.REQUESTS, LONG_MS, 5, must=1, want=99)
        keys = [budget_key("gold", f"tenant {i}") for i in range(2 * SHARDS)]
        assert len({budget_shard(key) for key in keys}) > SHARDS // 2
        calls: list[Call] = [Draw(key=key, by="one", windows=(window,), slots_limit=3, slots_want=2) for key in keys]
        calls += [opening(), Draw(key=keys[0], by="one", windows=(window, window)), calls[0]]
        replies = await store.call(calls)
        *some, opened, illegal, last = replies
        found = [drawn(reply) for reply in some]
        assert all(each == Drawn((Part(4, 5, LONG_MS),), 2, 2, each.born_us) for each in found)
        assert all(reply.now_us >= each.born_us > 0 for reply, each in zip(some, found, strict=True))
        assert (opened.verdict, illegal.verdict, illegal.record) == (Verdict.OK, Verdict.ILLEGAL, b"")
        assert drawn(last).parts[0].used == 6
        assert sum(await store.counts()) == decode(opened.record).n
        images = [await store.image(shard) for shard in range(SHARDS)]
        assert [data for image in images for data in image.registers] == [opened.record]

    # --- calls and readers --------------------------------------------------------------------------------------------

    async def test_calls_are_answered_in_their_order(self, store: Store) -> None:
        calls: list[Call] = [opening(register_key(Scope.SESSION, SERVICE, f"s{i}")) for i in range(200)]
        replies = await store.call(calls)
        assert [decode(reply.record).tx for reply in replies] == [
            call.tx for call in calls if isinstance(call, Propose)
        ]
        assert await store.call([]) == []
        first: dict[int, int] = {}
        for reply in replies:
            record = decode(reply.record)
            first.setdefault(shard_of(record.key), record.n)
        counts = await store.counts()
        assert sum(counts[shard] - n + 1 for shard, n in first.items()) == 200

    async def test_a_history_is_read_in_pieces(self, store: Store, bench: Bench) -> None:
        for i in range(10):
            await bench.do(order(OPEN if i % 2 else CLOSED))
        shard = shard_of(NODE)
        found: list[Entry] = []
        after = "0"
        while piece := await store.history(shard, evidence=False, after=after, count=3):
            assert len(piece) <= 3
            found += piece
            after = piece[-1].id
        assert [decode(entry.data).version for entry in found] == list(range(1, 11))
        assert {(entry.shard, entry.evidence) for entry in found} == {(shard, False)}
        assert sorted(found, key=lambda entry: tuple(map(int, entry.id.split("-")))) == found
        others = [await store.history(i, evidence=False, after="0", count=3) for i in range(SHARDS) if i != shard]
        assert others == [[]] * (SHARDS - 1)

    @pytest.mark.parametrize("count", [1, 3, 4, 100])
    async def test_the_log_is_read_backwards_piece_by_piece(self, store: Store, bench: Bench, count: int) -> None:
        shard = shard_of(NODE)
        assert await store.newest(shard, before="", count=count) == []
        for i in range(8):
            await bench.do(order(OPEN if i % 2 else CLOSED))
        await store.call([Share(service=SERVICE, blob=b"no record", keep_ms=LONG_MS)])
        found: list[Entry] = []
        while page := await store.newest(shard, before=found[-1].id if found else "", count=count):
            assert len(page) == min(count, 8 - len(found))
            found += page
        assert found[::-1] == await store.history(shard, evidence=False, after="0", count=100)

    async def test_lanes_have_every_shard_once(self, store: Store) -> None:
        assert sorted(shard for lane in store.lanes for shard in lane) == list(range(SHARDS))

    async def test_an_image_and_what_comes_after_it_are_the_whole(self, store: Store, bench: Bench) -> None:
        shard = shard_of(NODE)
        empty = await store.image(shard)
        assert (empty.shard, empty.n, empty.registers) == (shard, 0, [])
        for i in range(4):
            await bench.do(self.node(i))
        await bench.do(opening(by="one", quorum=2))
        await store.call([Share(service=SERVICE, blob=b"before", keep_ms=LONG_MS)])
        image = await store.image(shard)
        first = decode(bench.known[self.node(0).key]).n
        assert image.n == first + 4
        assert sorted(image.registers) == sorted(bench.known[self.node(i).key] for i in range(4))
        await bench.do(order(CLOSED, self.node(0).key))
        await store.call([Share(service=SERVICE, blob=b"after", keep_ms=LONG_MS)])
        for start in (image, empty):
            tail = await self.tail(store, shard, start.position, start.evidence_position)
            logged = [entry.data for entry in tail if not entry.evidence]
            registers = {decode(data).key: data for data in start.registers}
            registers |= {decode(data).key: data for data in logged if decode(data).kind != Kind.SUSPECT}
            assert registers == {key: data for key, data in bench.known.items() if data}
            shared = [entry.data for entry in tail if entry.evidence]
            assert shared == [b"after"] if start is image else [b"before", b"after"]

    @staticmethod
    async def tail(store: Store, shard: int, log: str, evidence: str, count: int = 100) -> list[Entry]:
        (lane,) = (number for number, shards in enumerate(store.lanes) if shard in shards)
        positions = dict.fromkeys(store.lanes[lane], ("0", "0")) | {shard: (log, evidence)}
        return await store.read(lane, positions, 0, count)

    async def test_a_reader_gets_at_most_so_many_of_each(self, store: Store, bench: Bench) -> None:
        shard = shard_of(NODE)
        for i in range(5):
            await bench.do(order(OPEN if i % 2 else CLOSED))
        await store.call([Share(service=SERVICE, blob=b"%d" % i, keep_ms=LONG_MS) for i in range(5)])
        found = await self.tail(store, shard, "0", "0", 3)
        assert [decode(entry.data).version for entry in found if not entry.evidence] == [1, 2, 3]
        assert [entry.data for entry in found if entry.evidence] == [b"0", b"1", b"2"]

    async def test_a_reader_without_news_comes_back_empty(self, store: Store) -> None:
        positions = dict.fromkeys(store.lanes[0], ("0", "0"))
        assert await store.read(0, positions, 0, 100) == []
        assert await store.read(0, positions, SHORT_MS, 100) == []

    @pytest.mark.parametrize("evidence", [False, True], ids=["log", "evidence"])
    async def test_a_reader_wakes_at_once(self, store: Store, evidence: bool) -> None:
        (lane,) = (number for number, shards in enumerate(store.lanes) if shard_of(NODE) in shards)
        positions = dict.fromkeys(store.lanes[lane], ("0", "0"))
        call: Call = Share(service=SERVICE, blob=b"x", keep_ms=LONG_MS) if evidence else opening()
        async with asyncio.timeout(LONG_MS / 2000), asyncio.TaskGroup() as group:
            readers = [group.create_task(store.read(lane, positions, LONG_MS, 100)) for _ in range(3)]
            await asyncio.sleep(0.01)
            await store.call([call])
        for reader in readers:
            assert [(entry.shard, entry.evidence) for entry in reader.result()] == [(shard_of(NODE), evidence)]

    async def test_a_reader_that_is_cancelled_leaves_the_others(self, store: Store) -> None:
        (lane,) = (number for number, shards in enumerate(store.lanes) if shard_of(NODE) in shards)
        positions = dict.fromkeys(store.lanes[lane], ("0", "0"))
        async with asyncio.timeout(LONG_MS / 2000), asyncio.TaskGroup() as group:
            gone, stays = (group.create_task(store.read(lane, positions, LONG_MS, 100)) for _ in range(2))
            await asyncio.sleep(0.01)
            gone.cancel()
            await asyncio.sleep(0.01)
            await store.call([opening()])
        assert len(stays.result()) == 1

    async def test_every_verdict_is_met_here(self) -> None:
        """Whoever adds one adds its tests."""
        assert _verdicts_named() == set(Verdict)

    async def test_many_writers_make_contiguous_versions(self, store: Store) -> None:
        """Everybody moves what he last saw: of each version there is one, and nobody's edge is illegal."""

        async def writer(name: str) -> int:
            won, epoch, version, state = 0, 0, 0, CLOSED
            for _ in range(20):
                to = CLOSED if state == OPEN else OPEN
                (reply,) = await store.call([opening(by=name, state=to, epoch=epoch, version=version, tx=new_tx())])
                assert reply.verdict in (Verdict.OK, Verdict.STALE, Verdict.ILLEGAL), reply.verdict
                seen = decode(reply.record)
                epoch, version, state = seen.epoch, seen.version, Code(seen.state)
                won += reply.verdict is Verdict.OK
                await asyncio.sleep(0)
            return won

        async with asyncio.TaskGroup() as group:
            writers = [group.create_task(writer(f"w{i}")) for i in range(8)]
        found = await store.history(shard_of(NODE), evidence=False, after="0", count=1000)
        versions = [decode(entry.data).version for entry in found]
        assert versions == list(range(1, sum(task.result() for task in writers) + 1))


def _verdicts_named() -> set[Verdict]:
    source = inspect.getsource(StoreContract)
    return {verdict for verdict in Verdict if f"Verdict.{verdict.name}" in source}
