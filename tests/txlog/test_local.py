"""The log's server in this process: the contract, and what is its own: that everything is bounded and nothing polls."""

import asyncio

import pytest

from sidecar.core.breaker import Scope
from sidecar.txlog import local
from sidecar.txlog.codec import SHARDS, Code, Kind, decode, register_key, route_key, shard_of
from sidecar.txlog.local import LocalStore, Stream
from sidecar.txlog.store import CLOSED_TTL_MS, LOG_RECORDS, OPEN_TTL_MS, PURGE, Share, Store, Verdict
from tests.txlog.contract import MAX_MS, NODE, SERVICE, Bench, StoreContract, asking, body, opening, order, renewing

START_US = 1_790_000_000_000_000


class Virtual:
    """A server's clock that goes when told."""

    virtual = True

    def __init__(self) -> None:
        self.now_us = START_US

    def __call__(self) -> int:
        return self.now_us

    async def passes(self, ms: float) -> None:
        self.now_us += int(ms * 1000)


@pytest.fixture
def clock() -> Virtual:
    return Virtual()


@pytest.fixture
def store(clock: Virtual) -> LocalStore:
    return LocalStore(clock)


class TestLocalStore(StoreContract):
    """The contract over `LocalStore`."""


# --- 8: what nobody needs is forgotten --------------------------------------------------------------------------------


async def writes(bench: Bench, some: int = 30) -> None:
    """So many writes to the shard of NODE."""
    for _ in range(some):
        await bench.do(order(Code.CLOSED, register_key(Scope.REQUEST, SERVICE, "/busy")))


async def keys(store: Store) -> set[str]:
    return {decode(data).key for data in (await store.image(shard_of(NODE))).registers} - {
        register_key(Scope.REQUEST, SERVICE, "/busy")
    }


def node(i: int) -> str:
    return register_key(Scope.NODE, SERVICE, f"n{i}:80")


@pytest.mark.parametrize(
    ("state", "ttl_ms"), [(Code.CLOSED, CLOSED_TTL_MS), (Code.OPEN, OPEN_TTL_MS + 2 * MAX_MS)], ids=["closed", "open"]
)
async def test_a_register_that_nobody_needs_is_forgotten(
    store: LocalStore, clock: Virtual, state: Code, ttl_ms: int
) -> None:
    bench = Bench(store)
    for i in range(3 * PURGE):
        await bench.do(order(state, node(i)))
    await clock.passes(ttl_ms - 1)
    await writes(bench)
    assert len(await keys(store)) == 3 * PURGE
    await clock.passes(1)
    await writes(bench, 1)
    assert len(await keys(store)) == 2 * PURGE
    await writes(bench)
    assert await keys(store) == set()


async def test_a_routing_table_is_never_forgotten(store: LocalStore, clock: Virtual) -> None:
    bench = Bench(store)
    key = route_key(SERVICE)
    table = opening(key, kind=Kind.ROUTE, state=Code.CLOSED, body=body(key=key))
    await bench.do(table)
    await clock.passes(100 * OPEN_TTL_MS)
    await writes(bench)
    assert await keys(store) == {key}
    assert (await bench.do(table)).verdict is Verdict.ALREADY


async def test_a_forgotten_register_fits_any_expectation_and_begins_a_later_epoch(
    store: LocalStore, clock: Virtual
) -> None:
    bench = Bench(store)
    seen = decode((await bench.do(order(Code.CLOSED))).record)
    await clock.passes(CLOSED_TTL_MS)
    await writes(bench)
    bench.known.pop(NODE)
    clock.now_us = START_US - 10_000_000
    reply = await bench.do(opening(epoch=seen.epoch, version=seen.version))
    assert reply.verdict is Verdict.OK
    assert (decode(reply.record).epoch, decode(reply.record).version) == (seen.epoch + 1, 1)


@pytest.mark.parametrize("state", [Code.CLOSED, Code.OPEN], ids=["closed", "open"])
async def test_what_an_order_holds_is_not_forgotten_until_it_ends(
    store: LocalStore, clock: Virtual, state: Code
) -> None:
    bench = Bench(store)
    ends_us = clock.now_us + 3 * OPEN_TTL_MS * 1000
    for i in range(2 * PURGE):
        await bench.do(order(state, node(i), held=True, expires_us=ends_us))
    await bench.do(order(state, NODE))
    await clock.passes(2 * OPEN_TTL_MS)
    await writes(bench)
    assert await keys(store) == {node(i) for i in range(2 * PURGE)}
    await clock.passes(2 * OPEN_TTL_MS)
    await writes(bench)
    assert await keys(store) == set()


async def test_a_register_whose_lease_is_prolonged_is_not_forgotten(store: LocalStore, clock: Virtual) -> None:
    bench = Bench(store)
    probe = await bench.half_open(ask=asking(lease_ms=OPEN_TTL_MS))
    for _ in range(5):
        await clock.passes(OPEN_TTL_MS - 1)
        assert (await bench.do(renewing(probe, lease_ms=OPEN_TTL_MS))).verdict is Verdict.OK
        await writes(bench)
    assert await keys(store) == {NODE}


async def test_a_forgotten_node_counts_for_no_floor(store: LocalStore, clock: Virtual) -> None:
    bench = Bench(store)
    await bench.do(opening(node(0)))
    await clock.passes(OPEN_TTL_MS + 2 * MAX_MS)
    await writes(bench)
    assert (await bench.do(opening(node(1), size=2, minimum=1))).verdict is Verdict.OK


# --- everything is bounded --------------------------------------------------------------------------------------------


async def test_the_oldest_records_fall_out(store: LocalStore) -> None:
    begin = decode(store.do(order(Code.CLOSED)).record).n
    for i in range(1, LOG_RECORDS + 500):
        store.do(order(Code.OPEN if i % 2 else Code.CLOSED))
    shard = shard_of(NODE)
    (first,) = await store.history(shard, evidence=False, after="0", count=1)
    assert decode(first.data).n == begin + 500
    assert (await store.image(shard)).n == begin + LOG_RECORDS + 499


async def test_of_too_many_registers_those_closed_longest_go(
    store: LocalStore, clock: Virtual, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "MAX_REGISTERS", 5)
    for i in range(4):
        store.do(opening(node(i)))
    for i in range(4, 8):
        store.do(order(Code.CLOSED, node(i)))
    assert await keys(store) == {node(i) for i in (0, 1, 2, 3, 7)}


async def test_suspicions_that_are_over_are_forgotten(store: LocalStore, clock: Virtual) -> None:
    for i in range(1000):
        store.do(opening(register_key(Scope.REQUEST, SERVICE, f"/{i}"), quorum=2))
        await clock.passes(1000)
    kept = store._shards[shard_of(NODE)].suspects
    assert len(kept) <= 61


def test_a_stream_is_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "STREAM_BYTES", 100)
    stream = Stream(50)
    for _ in range(20):
        stream.append(b"x" * 30, START_US)
    assert len(stream.after("0", 99)) == 3
    stream.append(b"x" * 1000, START_US)
    assert [len(data) for _, data in stream.after("0", 99)] == [1000]


async def test_old_evidence_goes(store: LocalStore, clock: Virtual) -> None:
    for i in range(10):
        store.do(Share(service=SERVICE, blob=b"%d" % i, keep_ms=3000))
        await clock.passes(1000)
    found = await store.history(shard_of(NODE), evidence=True, after="0", count=99)
    assert [entry.data for entry in found] == [b"6", b"7", b"8", b"9"]


async def test_positions_never_go_back(store: LocalStore, clock: Virtual) -> None:
    for i in range(10):
        store.do(order(Code.OPEN if i % 2 else Code.CLOSED))
        clock.now_us += 1500 if i < 4 else -700_000
    found = await store.history(shard_of(NODE), evidence=False, after="0", count=99)
    ids = [tuple(map(int, entry.id.split("-"))) for entry in found]
    assert ids == sorted(set(ids))
    assert [decode(entry.data).version for entry in found] == list(range(1, 11))


# --- nothing polls ----------------------------------------------------------------------------------------------------


async def test_a_reader_that_is_gone_leaves_nothing(store: LocalStore) -> None:
    positions = dict.fromkeys(range(SHARDS), ("0-0", "0-0"))
    async with asyncio.TaskGroup() as group:
        reader = group.create_task(store.read(0, positions, 60_000, 9))
        await asyncio.sleep(0)
        assert len(store._readers) == 1
        reader.cancel()
    assert not store._readers
    assert await store.read(0, positions, 1, 9) == []
    assert not store._readers


async def test_a_reader_sleeps_through_what_it_did_not_ask_for(store: LocalStore) -> None:
    shard = shard_of(NODE)
    positions = {each: ("0", "0") for each in range(SHARDS) if each != shard}
    async with asyncio.TaskGroup() as group:
        reader = group.create_task(store.read(0, positions, 40, 9))
        await asyncio.sleep(0)
        store.do(opening())
    assert reader.result() == []


async def test_opening_and_closing_keep_what_there_is(store: LocalStore) -> None:
    await store.open()
    store.do(opening())
    await store.close()
    assert await keys(store) == {NODE}
