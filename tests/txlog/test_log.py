"""The loops that carry the log: how they begin, end and begin again, what is said, and what operators read of them."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from sidecar.core.breaker import Scope, State, Transition
from sidecar.core.fleet import Fleet
from sidecar.policy.schema import Snapshot
from sidecar.txlog.codec import Code, Kind, Record, budget_key, encode, encode_body, route_key, shard_of
from sidecar.txlog.local import LocalStore
from sidecar.txlog.log import QUEUE, Subscription, TransactionLog
from sidecar.txlog.log import State as LogState
from sidecar.txlog.replica import BATCH, Replica
from sidecar.txlog.store import (
    Call,
    Draw,
    Entry,
    Image,
    Propose,
    Reply,
    StoreDown,
    StoreUnfit,
    Unit,
    Verdict,
    Window,
    drawn,
)
from tests.txlog.sidecars import policy_of

NODE = "node:chat/h1:80"
SHARD = shard_of(NODE)
LIMIT_S = 5.0


class Shaky(LocalStore):
    """A server that fails as it is told, wherever it is told."""

    def __init__(self, wall: Callable[[], float]) -> None:
        super().__init__(lambda: int(wall() * 1e6))
        self.faults: dict[str, BaseException] = {}
        self.opened = 0
        self.closed = 0
        self.strange: list[Entry] = []

    def fails(self, fault: BaseException, *where: str) -> None:
        for each in where or ("open", "call", "image", "counts", "read"):
            self.faults[each] = fault
        # Whoever waits for something to read shall find out.
        for future in self._readers:
            if not future.done():
                future.set_result(None)

    def heals(self) -> None:
        self.faults.clear()

    def _do(self, where: str) -> None:
        fault = self.faults.get(where)
        if fault is not None:
            raise fault

    async def open(self) -> None:
        self.opened += 1
        self._do("open")

    async def close(self) -> None:
        self.closed += 1

    async def call(self, calls: list[Call]) -> list[Reply]:
        self._do("call")
        return await super().call(calls)

    async def image(self, shard: int) -> Image:
        self._do("image")
        return await super().image(shard)

    async def counts(self) -> list[int]:
        self._do("counts")
        return await super().counts()

    async def read(self, lane: int, after: dict[int, tuple[str, str]], block_ms: int, count: int) -> list[Entry]:
        self._do("read")
        found = await super().read(lane, after, min(block_ms, 20), count)
        self._do("read")
        found, self.strange = [*found, *self.strange], []
        return found


class Bench:
    """A log over a shaky server, what it said, and the fleet that it serves."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        chance = random.Random(1)
        self.said: list[tuple[str, str, dict[str, Any]]] = []
        self.told: list[Transition] = []
        self.store = Shaky(lambda: 1_700_000_000.0 + loop.time())
        self.replica = Replica(
            "pod-1",
            clock=loop.time,
            chance=chance.random,
            new_tx=lambda: chance.randbytes(16),
            tell=self.told.append,
        )
        self.fleet = Fleet(chance.random, agreement=self.replica)
        self.replica.fleet = self.fleet
        self.fleet.apply(Snapshot(version=1, services=(policy_of(3),)), loop.time())
        self.log = TransactionLog(
            self.store, self.replica, clock=loop.time, wall=loop.time, chance=chance.random, say=self._say
        )

    def _say(self, level: str, event: str, **fields: Any) -> None:
        self.said.append((level, event, fields))

    def events(self, name: str = "") -> list[dict[str, Any]]:
        return [fields for _, event, fields in self.said if name in ("", event)]

    @property
    def names(self) -> list[str]:
        return [event for _, event, _ in self.said]

    async def order(self, action: str, by: str = "op") -> None:
        """An operator's order, and its record in the log."""
        now = asyncio.get_running_loop().time()
        before = self.replica.counts.appended
        for breaker in self.fleet.find(Scope.NODE, "h1:80", now):
            breaker.force(action, now, by)  # type: ignore[arg-type]
            self.replica.order(breaker, action, by, float("inf"), now)  # type: ignore[arg-type]
        await self.until(lambda: self.replica.counts.appended > before)

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not true():
                await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def running(*, fault: BaseException | None = None) -> AsyncIterator[Bench]:
    bench = Bench()
    if fault is not None:
        bench.store.fails(fault)
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(bench.log.run())
        try:
            async with asyncio.timeout(LIMIT_S):
                await bench.log.ready.wait()
            yield bench
        finally:
            following.cancel()
    assert bench.store.closed >= 1, "the server is let go of at the end"


async def test_it_is_up_once_every_shard_was_read() -> None:
    async with running() as bench:
        assert bench.log.state is LogState.UP and bench.replica.stale == [] and bench.replica.up
        assert bench.said == [("info", "log_up", {"members": 1, "to_tell": 0, "away_s": None})]


async def test_a_server_that_is_not_there_is_said_once_however_often_it_is_tried() -> None:
    async with running(fault=StoreDown("refused", "nobody listens")) as bench:
        await bench.until(lambda: bench.store.opened > 3)
        (event,) = bench.events()
        assert (event["cause"], event["error"]) == ("refused", "nobody listens")
        assert (bench.log.state, bench.log.last_error) == (LogState.AWAY, "nobody listens")
        bench.store.heals()
        await bench.until(lambda: bench.log.state is LogState.UP)
        assert bench.names == ["log_away", "log_up"] and bench.events("log_up")[0]["away_s"] > 0


@pytest.mark.parametrize("where", ["call", "read", "counts", "image"])
async def test_whatever_fails_ends_all_and_all_begins_again(where: str) -> None:
    async with running() as bench:
        await bench.order("open")
        bench.store.fails(StoreDown("timeout", "silent"), where)
        if where == "image":
            bench.replica._resync(SHARD)
        await bench.until(lambda: bench.log.state is LogState.AWAY)
        assert not bench.replica.up and len(bench.replica.stale) == 16
        bench.store.heals()
        await bench.until(lambda: bench.log.state is LogState.UP)
        assert bench.names == ["log_up", "log_away", "log_up"]
        assert bench.log.crashes == 0


async def test_a_fault_of_ours_is_counted_shown_and_survived() -> None:
    async with running() as bench:
        bench.store.fails(ZeroDivisionError("ours"), "read")
        await bench.until(lambda: bench.log.crashes > 0)
        bench.store.heals()
        await bench.until(lambda: bench.log.state is LogState.UP)
        crash = bench.events("log_crashed")[0]
        assert "ZeroDivisionError" in crash["error"] and crash["exc_info"] is not None
        (away,) = bench.events("log_away")
        assert away["cause"] == "crashed"
        await bench.order("open")


async def test_what_a_person_must_change_is_said_once_though_the_server_is_silent_in_between() -> None:
    async with running(fault=StoreUnfit("noauth", "a wrong password")) as bench:
        for _ in range(3):
            bench.store.fails(StoreDown("timeout", "silent"))
            await bench.until(lambda: bench.log.last_error == "silent")
            bench.store.fails(StoreUnfit("noauth", "a wrong password"))
            await bench.until(lambda: bench.log.last_error == "a wrong password")
        assert [event["cause"] for event in bench.events()] == ["noauth"]
        bench.store.fails(StoreUnfit("version", "too old"))
        await bench.until(lambda: len(bench.said) == 2)
        bench.store.heals()
        await bench.until(lambda: bench.log.state is LogState.UP)
        bench.store.fails(StoreUnfit("version", "too old"))
        await bench.until(lambda: bench.log.state is LogState.AWAY)
        assert bench.names == ["log_away", "log_away", "log_up", "log_away"], "after it was up it is news again"


async def test_what_a_person_must_change_comes_before_what_else_failed() -> None:
    async with running() as bench:
        both = ExceptionGroup("", [StoreDown("reset", "gone"), StoreUnfit("noperm", "not permitted")])
        bench.store.fails(both, "read")
        await bench.until(lambda: bench.log.state is LogState.AWAY)
        assert bench.events("log_away")[0]["cause"] == "noperm"


async def test_its_end_leaves_no_task_behind() -> None:
    before = asyncio.all_tasks()
    async with running() as bench:
        assert len(asyncio.all_tasks()) > len(before)
    assert asyncio.all_tasks() == before
    assert bench.log.state is LogState.UP, "an end is no trouble"


class Torn(Shaky):
    """A server whose readers lose their connection as they are cancelled."""

    async def read(self, lane: int, after: dict[int, tuple[str, str]], block_ms: int, count: int) -> list[Entry]:
        try:
            return await super().read(lane, after, block_ms, count)
        except asyncio.CancelledError as exc:
            raise StoreDown("closed", "the connection was let go of") from exc


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "is only cancelled"])
async def test_an_end_that_meets_a_lost_connection_is_an_end(ends: bool) -> None:
    bench = Bench()
    wall = asyncio.get_running_loop().time
    log = TransactionLog(
        Torn(wall), bench.replica, clock=wall, wall=wall, chance=lambda: 0.5, say=lambda *_, **__: None
    )
    following = asyncio.create_task(log.run())
    await bench.until(lambda: log.state is LogState.UP)
    if ends:
        log.end()
    following.cancel()
    done, _ = await asyncio.wait({following}, timeout=0.2)
    assert bool(done) is ends  # without its word it begins again, as after any fault
    log.end()
    following.cancel()
    await asyncio.wait({following}, timeout=LIMIT_S)
    assert following.done()


async def test_a_goodbye_tells_what_is_left_and_of_an_absent_server_nothing_is_asked() -> None:
    async with running() as bench:
        now = asyncio.get_running_loop().time()
        for breaker in bench.fleet.find(Scope.NODE, "h1:80", now):
            bench.replica.order(breaker, "open", "op", float("inf"), now)
        await bench.log.leave()
        assert len(await bench.store.history(SHARD, evidence=False, after="0", count=9)) == 1
        bench.store.fails(StoreDown("timeout", "silent"))
        await bench.until(lambda: bench.log.state is LogState.AWAY)
        await bench.log.leave()


# --- what is none of ours ---------------------------------------------------------------------------------------------


async def test_what_cannot_be_read_is_skipped_counted_and_named_once_a_second() -> None:
    async with running() as bench:
        bench.store.strange = [Entry(3, False, f"{number}-0", b"\xff") for number in range(1, 6)]
        await bench.until(lambda: bench.log.unreadable == 5)
        (event,) = bench.events("log_unreadable")
        assert (event["shard"], event["id"], event["skipped"]) == (3, "1-0", 1)
        assert event["error"] == "schema 255 is not known here"
        assert bench.log.state is LogState.UP
        await bench.order("open")


# --- operators --------------------------------------------------------------------------------------------------------


async def test_whoever_follows_gets_what_is_read_from_then_on() -> None:
    async with running() as bench:
        await bench.order("open")
        await bench.until(lambda: not bench.replica.stale)
        reader = bench.log.subscribe()
        for action in ("close", "open"):
            await bench.order(action)
        found: list[tuple[Entry, Record]] = []
        async with asyncio.timeout(LIMIT_S):
            while len(found) < 2:
                found += await reader.next()
        assert [record.state for _, record in found] == [Code.CLOSED, Code.OPEN]
        assert all(entry.shard == SHARD for entry, _ in found)
        reader.close()
        reader.close()
        await bench.order("close")
        assert reader.lost == 0


async def test_a_reader_that_is_slow_loses_the_oldest_and_knows_how_many() -> None:
    closed: list[Subscription] = []
    reader = Subscription(closed.append)
    record = Record(Kind.TRANSITION, Code.OPEN, 7, 1, b"t" * 16, NODE, "chat", "pod-1")
    for number in range(QUEUE + 7):
        reader.put(Entry(SHARD, False, f"{number}-0", b""), record)
    found = await reader.next()
    assert len(found) == QUEUE and reader.lost == 7 and found[0][0].id == "7-0"
    waiting = asyncio.ensure_future(reader.next())
    await asyncio.sleep(0)
    assert not waiting.done()
    reader.put(Entry(SHARD, False, "x-0", b""), record)
    assert [entry.id for entry, _ in await waiting] == ["x-0"]
    reader.close()
    assert closed == [reader]


async def test_history_is_the_newest_of_a_key_or_of_all_oldest_first() -> None:
    async with running() as bench:
        for number in range(6):
            await bench.order("open" if number % 2 == 0 else "close", f"op-{number}")
            # A record's time has milliseconds: `since` tells no two of one apart.
            await asyncio.sleep(0.002)
        everything = await bench.log.history(None, None, 100)
        assert [record.by.split()[0] for _, record in everything] == [f"op-{number}" for number in range(6)]
        last = await bench.log.history(NODE, None, 2)
        assert last == everything[-2:]
        since = everything[3][1].ts_us
        assert await bench.log.history(NODE, since, 100) == everything[3:]
        assert await bench.log.history("session:chat/s1", None, 5) == []
        with pytest.raises(ValueError, match="SCOPE:SERVICE/NAME"):
            await bench.log.history("nonsense", None, 5)
        assert [entry.id for entry in await bench.log.page(SHARD, evidence=False, after="0", count=2)] == [
            entry.id for entry, _ in everything[:2]
        ]


async def test_a_breaker_follows_what_another_wrote() -> None:
    async with running() as bench:
        ours = Record(Kind.TRANSITION, Code.OPEN, 7, 1, b"t" * 16, NODE, "chat", "pod-2", n=1, wait_ms=9000)
        bench.store.strange = [Entry(SHARD, False, "1-0", encode(ours))]
        service = next(iter(bench.fleet.services.values()))
        (node,) = [node for key, node in service.nodes.items() if key == "h1:80"]
        await bench.until(lambda: node.breaker.state is State.OPEN)
        assert node.breaker.observer == "pod-2" and [each.agreed for each in bench.told] == [True]


async def test_what_fails_as_soon_as_it_is_up_is_tried_ever_more_slowly() -> None:
    """Each try reads every shard whole: a server that is too slow for it must not be asked 25 times a second."""
    async with running() as bench:
        bench.store.fails(StoreDown("server", "no right to read"), "read")
        await asyncio.sleep(1.5)
        assert 3 <= bench.store.opened <= 10


async def test_a_store_that_answers_at_once_lets_the_loop_go_on() -> None:
    async with running() as bench:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for number in range(2000):
            key = f"s-{number}"
            moved = Transition(Scope.SESSION, key, "chat", State.CLOSED, State.OPEN, now, "consecutive", "", 1)
            bench.replica.transition(moved)
        turns = 0
        while len(bench.replica.ring):
            await asyncio.sleep(0)
            turns += 1
        assert turns >= 2000 / BATCH


async def test_a_call_beside_the_ring_is_folded_with_its_answer() -> None:
    async with running() as bench:
        key = route_key("chat")
        heard: list[bytes] = []
        bench.replica.on_route = lambda record: heard.append(record.blob)
        body = encode_body(key, "chat", "ann", "update", "", b"table")
        call = Propose(
            key=key, service="chat", kind=Kind.ROUTE, state=0, epoch=0, version=0, tx=b"t" * 16, body=body, by="pod-1"
        )
        reply = await bench.log.put(call)
        assert reply.verdict is Verdict.OK and heard == [b"table"]
        bench.store.fails(StoreDown("timeout", "it is silent"))
        with pytest.raises(StoreDown, match="silent"):
            await bench.log.put(call)
        await bench.until(lambda: bench.log.state is LogState.AWAY)
        bench.store.fails(AssertionError("not asked"), "call")
        with pytest.raises(StoreDown, match="silent"):
            await bench.log.put(call)


async def test_budgets_are_drawn_on_beside_the_ring_and_only_while_the_log_is_up() -> None:
    window = Window(Unit.TOKENS, 60_000, 10, want=7)
    calls: list[Call] = [Draw(key=budget_key("gold", tenant), by="pod-1", windows=(window,)) for tenant in "aba"]
    async with running() as bench:
        replies = await bench.log.ask(calls)
        assert [drawn(reply).parts[0].granted for reply in replies] == [7, 7, 3]
        assert await bench.log.ask([]) == []
        assert bench.replica.counts.appended == 0 and bench.names == ["log_up"]
        bench.store.fails(StoreDown("timeout", "silent"))
        with pytest.raises(StoreDown, match="silent"):
            await bench.log.ask(calls)
        await bench.until(lambda: bench.log.state is LogState.AWAY)
        with pytest.raises(StoreDown, match="silent") as raised:
            await bench.log.ask(calls)
        assert raised.value.word == "away"
        bench.store.heals()
        await bench.until(lambda: bench.log.state is LogState.UP)
        assert [drawn(reply).parts[0].granted for reply in await bench.log.ask(calls)] == [0, 3, 0]
