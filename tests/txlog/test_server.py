"""The log's server: the contract over Valkey, Redis 6.2 and scripts; then what only a server can do to us."""

import asyncio
import contextlib
import random
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from msgspec.structs import replace

from sidecar.core.breaker import Scope
from sidecar.txlog.codec import (
    MAX_TABLE_BYTES,
    SHARDS,
    Code,
    Kind,
    decode,
    encode,
    encode_body,
    register_key,
    route_key,
    shard_of,
)
from sidecar.txlog.functions import Packer, Shard, slot_of
from sidecar.txlog.local import LocalStore
from sidecar.txlog.server import IDLE, RedisStore
from sidecar.txlog.store import (
    CLOSED_TTL_MS,
    EVIDENCE_BYTES,
    GONE_SLACK_MS,
    LOG_BYTES,
    MEMBER_TTL_MS,
    OPEN_TTL_MS,
    PATIENCE_MS,
    PURGE,
    SUSPECT_MS,
    Beat,
    Call,
    Draw,
    Part,
    Reply,
    Restore,
    Share,
    StoreDown,
    StoreUnfit,
    Unit,
    Verdict,
    Window,
    drawn,
)
from tests.certificates import Certificates
from tests.harness import awake
from tests.servers import Cluster, Server, blackhole, cluster, redis62, refused, sentinel, tls, valkey
from tests.txlog.contract import (
    BUDGET,
    LONG_MS,
    MAX_MS,
    NODE,
    SERVICE,
    Bench,
    StoreContract,
    asking,
    opening,
    order,
    releasing,
    renewing,
    reporting,
    restoring,
)

_Running = TypeVar("_Running")


class Real:
    """The server's clock goes by itself."""

    virtual = False

    async def passes(self, ms: float) -> None:
        await asyncio.sleep((ms + 5) / 1000)  # a loop counts in milliseconds, and may be one short


@pytest.fixture
def clock() -> Real:
    return Real()


@contextlib.contextmanager
def kept(running: contextlib.AbstractAsyncContextManager[_Running]) -> Iterator[_Running]:
    """Servers for all tests of a module, each of which has a loop of its own."""
    with asyncio.Runner() as runner:
        servers = runner.run(running.__aenter__())
        try:
            yield servers
        finally:
            runner.run(running.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with kept(valkey(tmp_path_factory.mktemp("valkey"))) as server:
        yield server


@pytest.fixture(scope="module")
def redis62_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with kept(redis62(tmp_path_factory.mktemp("redis"))) as server:
        yield server


@contextlib.asynccontextmanager
async def opened(server: Server, *, scripts_only: bool = False) -> AsyncIterator[RedisStore]:
    """A store over an empty server."""
    await server.ask("FLUSHALL")
    store = RedisStore(server.url, timeout_s=5.0, scripts_only=scripts_only)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


class TestValkey(StoreContract):
    """Functions."""

    @pytest.fixture
    async def store(self, valkey_server: Server) -> AsyncIterator[RedisStore]:
        async with opened(valkey_server) as store:
            yield store


class TestValkeyScripts(StoreContract):
    """A server that has functions, which we may not use."""

    @pytest.fixture
    async def store(self, valkey_server: Server) -> AsyncIterator[RedisStore]:
        async with opened(valkey_server, scripts_only=True) as store:
            yield store


class TestRedis62(StoreContract):
    """A server that has none."""

    @pytest.fixture
    async def store(self, redis62_server: Server) -> AsyncIterator[RedisStore]:
        async with opened(redis62_server) as store:
            yield store


@pytest.fixture
async def store(valkey_server: Server) -> AsyncIterator[RedisStore]:
    """For what follows: Valkey, with a timeout as in service."""
    async with opened(valkey_server) as store:
        yield store


@pytest.fixture
def bench(store: RedisStore) -> Bench:
    return Bench(store)


# --- what takes minutes: the times that the server keeps are made older -----------------------------------------------


async def age(server: Server, ms: int) -> None:
    """Whatever the server has a time for happened so much earlier. Records, which say when they were made, excepted."""
    keys = await server.ask("KEYS", "{dtl:*")
    assert isinstance(keys, list)
    for key in keys:
        assert isinstance(key, bytes)
        if await server.ask("TYPE", key) == b"zset":
            await server.ask("EVAL", AGE, 1, key, ms * 1000)


AGE = """
local all = redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')
for i = 1, #all, 2 do redis.call('ZINCRBY', KEYS[1], '-' .. ARGV[1], all[i]) end
"""
MARGIN_MS = 5000


@pytest.mark.parametrize(
    ("state", "ttl_ms"), [(Code.CLOSED, CLOSED_TTL_MS), (Code.OPEN, OPEN_TTL_MS + 2 * MAX_MS)], ids=["closed", "open"]
)
async def test_a_register_that_nobody_needs_is_forgotten(
    bench: Bench, valkey_server: Server, state: Code, ttl_ms: int
) -> None:
    nodes = [register_key(Scope.NODE, SERVICE, f"n{i}:80") for i in range(2 * PURGE)]
    busy = register_key(Scope.REQUEST, SERVICE, "/busy")

    async def remembered() -> int:
        await bench.do(order(Code.CLOSED, busy))
        return len((await bench.store.image(shard_of(NODE))).registers) - 1

    for node in nodes:
        await bench.do(order(state, node))
    await age(valkey_server, ttl_ms - MARGIN_MS)
    assert await remembered() == 2 * PURGE
    await age(valkey_server, MARGIN_MS)
    assert [await remembered() for _ in range(3)] == [PURGE, 0, 0]
    bench.known.clear()
    anew = decode((await bench.do(opening(nodes[0], epoch=2_000_000_000, version=9))).record)
    assert (anew.epoch, anew.version) == (2_000_000_001, 1)


async def test_what_an_order_holds_and_a_routing_table_are_never_forgotten(bench: Bench, valkey_server: Server) -> None:
    table = opening(
        route_key(SERVICE), kind=Kind.ROUTE, state=Code.CLOSED, body=encode_body(route_key(SERVICE), SERVICE, "one")
    )
    await bench.do(table)
    for held, state in enumerate((Code.CLOSED, Code.OPEN)):
        await bench.do(order(state, register_key(Scope.NODE, SERVICE, f"held{held}"), held=True))
    await age(valkey_server, 100 * OPEN_TTL_MS)
    await bench.do(order(Code.CLOSED))
    assert len((await bench.store.image(shard_of(NODE))).registers) == 4
    assert (await bench.do(opening(size=3, minimum=3))).verdict is Verdict.STALE
    assert (await bench.do(opening(register_key(Scope.NODE, SERVICE, "x"), size=3, minimum=2))).verdict is Verdict.FLOOR


async def test_nodes_that_are_gone_do_not_count(bench: Bench, valkey_server: Server) -> None:
    gone, other = (opening(register_key(Scope.NODE, SERVICE, name), size=2, minimum=1) for name in ("gone", "other"))
    await bench.do(gone)
    assert (await bench.do(other)).verdict is Verdict.FLOOR
    await age(valkey_server, 2 * MAX_MS + GONE_SLACK_MS - MARGIN_MS)
    assert (await bench.do(other)).verdict is Verdict.FLOOR
    await age(valkey_server, MARGIN_MS)
    assert (await bench.do(other)).verdict is Verdict.OK


async def test_a_node_whose_lease_is_prolonged_is_not_gone(bench: Bench, valkey_server: Server) -> None:
    probe = await bench.half_open(register_key(Scope.NODE, SERVICE, "there"))
    for _ in range(10):
        await age(valkey_server, LONG_MS - MARGIN_MS)
        assert (await bench.do(renewing(probe))).verdict is Verdict.OK
    assert (await bench.do(opening(size=2, minimum=1))).verdict is Verdict.FLOOR


async def test_a_suspicion_lasts_a_minute(bench: Bench, valkey_server: Server) -> None:
    one, two = (opening(by=by, quorum=2) for by in ("one", "two"))
    await bench.do(one)
    await age(valkey_server, SUSPECT_MS)
    assert (await bench.do(two)).verdict is Verdict.SUSPECT
    await age(valkey_server, SUSPECT_MS - MARGIN_MS)
    assert (await bench.do(two)).verdict is Verdict.SUSPECT
    assert [record.kind for record in bench.logs[shard_of(NODE)]] == [Kind.SUSPECT] * 2
    assert (await bench.do(one)).verdict is Verdict.OK


async def test_where_traffic_is_thin_fewer_proofs_are_enough_after_a_minute(
    bench: Bench, valkey_server: Server
) -> None:
    ask = asking(successes=2)
    probe = await bench.half_open(ask=ask, proofs=40)
    for verdict in (Verdict.PROVED, Verdict.PROVED):
        assert (await bench.do(reporting(probe, True, successes=2))).verdict is verdict
        probe = await bench.do(ask)
    since = decode(probe.record)
    older = encode(replace(since, ts_us=since.ts_us - PATIENCE_MS * 1000))
    await valkey_server.ask("HSET", Shard("dtl", shard_of(NODE)).registers, NODE, older)
    assert (await bench.do(reporting(probe, True, successes=2))).verdict is Verdict.CLOSED


async def test_whoever_was_not_heard_of_is_no_member(store: RedisStore, valkey_server: Server) -> None:
    await store.call([Beat(by="one"), Beat(by="two")])
    await age(valkey_server, MEMBER_TTL_MS - MARGIN_MS)
    assert [reply.ms for reply in await store.call([Beat(by="two")])] == [2]
    await age(valkey_server, MARGIN_MS)
    assert [reply.ms for reply in await store.call([Beat(by="two")])] == [1]


async def test_a_budget_that_nobody_draws_on_is_forgotten(store: RedisStore, valkey_server: Server) -> None:
    """Its keys expire when nothing of it is in use, and none of them sooner than another that needs it."""

    async def ttls() -> list[int]:
        keys = await valkey_server.ask("KEYS", "{dtl:*")
        assert isinstance(keys, list)
        found = [await valkey_server.ask("PTTL", key) for key in keys if isinstance(key, bytes)]
        return [ttl for ttl in found if isinstance(ttl, int)]

    minute, day = (Window(Unit.TOKENS, span_ms, 10, want=1) for span_ms in (60_000, 86_400_000))
    await store.call([Draw(key=BUDGET, by="one", windows=(minute,), slots_limit=1, slots_want=1)])
    assert [61_000 < ttl <= 61_000 + MEMBER_TTL_MS for ttl in await ttls()] == [True] * 3
    await store.call([Draw(key=BUDGET, by="two", windows=(day,))])
    await store.call([Draw(key=BUDGET, by="two", windows=(minute,))])
    assert [ttl > 86_400_000 for ttl in await ttls()] == [True] * 3


async def test_a_budget_that_was_lost_is_another_one(store: RedisStore, valkey_server: Server) -> None:
    call = Draw(key=BUDGET, by="one", windows=(Window(Unit.TOKENS, 60_000, 10, want=7),))
    first, second = [drawn(reply) for reply in await store.call([call, call])]
    assert (first.born_us, second.parts[0].granted) == (second.born_us, 3)
    await valkey_server.ask("FLUSHALL")
    [anew] = [drawn(reply) for reply in await store.call([call])]
    assert anew.born_us > first.born_us and anew.parts[0].granted == 7


@pytest.mark.parametrize("data", [b"", b"\1", b"\1\0\0\0\7", b"\2" + bytes(1000), b"\xff" * 1000], ids=ascii)
async def test_what_is_no_budget_counts_as_none(store: RedisStore, valkey_server: Server, data: bytes) -> None:
    """Another release's, or a stranger's: what can be told from ours."""
    window = Window(Unit.TOKENS, 60_000, 100, want=70)
    call = Draw(key=BUDGET, by="one", windows=(window,), slots_limit=4, slots_want=3)
    await store.call([call])
    key = Packer("dtl", functions=True).pack(call)[1][3]
    fields = await valkey_server.ask("HKEYS", key)
    assert isinstance(fields, list) and len(fields) == 4
    for field in fields:
        assert isinstance(field, bytes)
        await valkey_server.ask("HSET", key, field, data)
    [reply] = await store.call([call])
    assert (drawn(reply).parts, drawn(reply).slots) == ((Part(70, 70, 0),), 3)
    [reply] = await store.call([replace(call, windows=(replace(window, want=0, give_back=99),))])
    assert drawn(reply).parts == (Part(0, 0, 0),)


# --- a server that forgets, and strangers on it -----------------------------------------------------------------------


@pytest.mark.parametrize("scripts_only", [False, True], ids=["functions", "scripts"])
@pytest.mark.parametrize("command", [("FUNCTION", "FLUSH"), ("SCRIPT", "FLUSH"), ("FLUSHALL",)], ids=" ".join)
async def test_functions_that_were_flushed_are_loaded_again(
    valkey_server: Server, command: tuple[str, ...], scripts_only: bool
) -> None:
    async with opened(valkey_server, scripts_only=scripts_only) as store:
        await store.call([opening()])
        await valkey_server.ask(*command)
        last = order(Code.CLOSED)
        assert [reply.verdict for reply in await store.call([order(Code.OPEN), last, Beat(by="one")])] == [
            Verdict.OK
        ] * 3
        assert decode((await store.image(shard_of(NODE))).registers[0]).tx == last.tx


async def test_flushed_in_the_midst_of_a_list_all_is_done_once_and_in_order(
    store: RedisStore, valkey_server: Server
) -> None:
    async with asyncio.TaskGroup() as both:

        async def flushes() -> None:
            for _ in range(20):
                await valkey_server.ask("FUNCTION", "FLUSH")

        flushing = both.create_task(flushes())
        expected = 0
        while not flushing.done():
            calls: list[Call] = [order(Code.OPEN) for _ in range(20)]
            try:
                replies = await store.call(calls)
            except StoreDown as exc:  # flushed twice within one list
                assert exc.word == "server"
                expected = decode((await store.image(shard_of(NODE))).registers[0]).version
                continue
            versions = [decode(reply.record).version for reply in replies]
            assert sorted(versions) == list(range(expected + 1, expected + 21))
            expected += 20


async def test_strangers_in_the_streams_come_out_by_their_ids(store: RedisStore, valkey_server: Server) -> None:
    shard = Shard("dtl", shard_of(NODE))
    await store.call([opening()])
    ids = [
        await valkey_server.ask("XADD", shard.log, "*", *fields)
        for fields in (("foo", "bar"), ("r", "", "s", ""), ("r", b"\xff garbage"), ("r", ""))
    ]
    other = await valkey_server.ask("XADD", shard.evidence, "*", "x", "1")
    await store.call([order(Code.CLOSED)])
    found = await store.read(0, {shard_of(NODE): ("0", "0")}, 0, 100)
    strangers = [(entry.id.encode(), entry.data) for entry in found if not entry.evidence][1:-1]
    assert strangers == list(zip(ids, (b"", b"", b"\xff garbage", b""), strict=True))
    assert [(entry.id.encode(), entry.data) for entry in found if entry.evidence] == [(other, b"")]
    history = await store.history(shard_of(NODE), evidence=False, after="0", count=100)
    assert history == [entry for entry in found if not entry.evidence]


@pytest.mark.parametrize("data", [b"", b"x", b"\x02" + b"\0" * 100, b"\xff" * 300], ids=["empty", "x", "schema", "ff"])
async def test_a_register_that_is_none_counts_as_none(store: RedisStore, valkey_server: Server, data: bytes) -> None:
    registers = Shard("dtl", shard_of(NODE)).registers
    await valkey_server.ask("HSET", registers, NODE, data)
    assert (await store.image(shard_of(NODE))).registers == [data]
    (asked,) = await store.call([asking()])
    assert (asked.verdict, asked.record) == (Verdict.CLOSED, b"")
    (opened_anew,) = await store.call([opening(epoch=3, version=4)])
    assert (opened_anew.verdict, decode(opened_anew.record).version) == (Verdict.OK, 1)


@pytest.mark.parametrize("name", ["registers", "log", "n", "age"])
async def test_another_programs_keys_are_a_persons_to_mend(store: RedisStore, valkey_server: Server, name: str) -> None:
    await valkey_server.ask("RPUSH", getattr(Shard("dtl", shard_of(NODE)), name), "other")
    with pytest.raises(StoreUnfit, match="another prefix") as raised:
        await store.call([opening()])
    assert raised.value.word == "foreign"


async def test_a_counter_that_is_no_number_is_a_persons_to_mend(store: RedisStore, valkey_server: Server) -> None:
    await valkey_server.ask("SET", Shard("dtl", 0).n, "seven")
    with pytest.raises(StoreUnfit, match="another program's keys"):
        await store.counts()
    with pytest.raises(StoreUnfit):
        await store.image(0)


async def test_two_prefixes_are_two_logs(store: RedisStore, valkey_server: Server) -> None:
    other = RedisStore(valkey_server.url, "other", 5.0)
    await other.open()
    await store.call([opening()])
    assert (await other.image(shard_of(NODE))).registers == []
    assert sum(await other.counts()) == 0
    await other.close()


async def test_of_two_records_with_one_version_the_later_by_bytes_is_kept(bench: Bench) -> None:
    """Lua compares strings by the server's locale, and stops at a zero byte."""
    first = decode((await bench.do(opening(tx=b"\0" * 8 + b"a" * 8))).record)
    for tx, verdict in (
        (b"\0" * 8 + b"B" * 8, Verdict.KEPT),
        (b"\0" * 8 + b"b" * 8, Verdict.OK),
        (b"\xff" + b"\0" * 15, Verdict.OK),
        (b"\x7f" * 16, Verdict.KEPT),
        (b"\xff" + b"\0" * 14 + b"\x01", Verdict.OK),
    ):
        reply = await bench.do(restoring(replace(first, tx=tx)))
        assert reply.verdict is verdict
        first = replace(first, version=decode(reply.record).version)


async def test_a_large_shard_is_read_in_pieces(store: RedisStore, valkey_server: Server) -> None:
    registers = Shard("dtl", 3).registers
    words = [word for i in range(2500) for word in (f"k{i}", f"v{i}")]
    await valkey_server.ask("HSET", registers, *words)
    assert sorted((await store.image(3)).registers) == sorted(word.encode() for word in words[1::2])


async def test_a_position_is_known_where_the_log_was_trimmed_away(store: RedisStore, valkey_server: Server) -> None:
    (reply,) = await store.call([opening()])
    (entry,) = await store.history(shard_of(NODE), evidence=False, after="0", count=9)
    await valkey_server.ask("XTRIM", Shard("dtl", shard_of(NODE)).log, "MAXLEN", 0)
    image = await store.image(shard_of(NODE))
    assert (image.position, image.evidence_position, image.n) == (entry.id, "0-0", decode(reply.record).n)


async def test_evidence_that_is_too_old_goes(store: RedisStore, valkey_server: Server) -> None:
    stream = Shard("dtl", shard_of(route_key(SERVICE))).evidence
    for i in range(1, 301):
        await valkey_server.ask("XADD", stream, f"{i}-0", "r", "old")
    await store.call([Share(service=SERVICE, blob=b"new", keep_ms=LONG_MS)])
    count = await valkey_server.ask("XLEN", stream)
    assert isinstance(count, int)
    assert count <= 101  # the server trims whole nodes of a hundred


# --- a server in trouble ----------------------------------------------------------------------------------------------


async def works(store: RedisStore) -> bool:
    """Everything that the port has does what it is for."""
    draw = Draw(key=BUDGET, by="one", windows=(Window(Unit.TOKENS, 60_000, 1, want=9),), slots_limit=1, slots_want=1)
    reply, _, given = await store.call([order(Code.OPEN), Beat(by="one"), draw])
    await store.call([replace(draw, slots_want=0)])
    image = await store.image(shard_of(NODE))
    log, evidence = image.position, image.evidence_position
    found = await store.read(0 if len(store.lanes) == 1 else shard_of(NODE), {shard_of(NODE): ("0", "0")}, 0, 10_000)
    await store.history(shard_of(NODE), evidence=True, after=evidence, count=1)
    return (
        reply.record in image.registers
        and drawn(given).parts[0].used == 1
        and found[-1].id == log
        and (await store.counts())[shard_of(NODE)] == decode(reply.record).n
    )


@contextlib.contextmanager
def impatient(store: RedisStore, timeout_s: float = 0.1) -> Iterator[None]:
    """While its server is silent: one that is sound may take its time, on a slow machine."""
    patient, store._timeout_s = store._timeout_s, timeout_s
    try:
        yield
    finally:
        store._timeout_s = patient


EVERYTHING: dict[str, Callable[[RedisStore], Awaitable[object]]] = {
    "call": lambda store: store.call([opening()]),
    "image": lambda store: store.image(0),
    "counts": lambda store: store.counts(),
    "read": lambda store: store.read(0, {0: ("0", "0")}, 0, 10),
    "history": lambda store: store.history(0, evidence=False, after="0", count=1),
    "open": lambda store: store.open(),
}


@pytest.mark.parametrize("what", EVERYTHING)
async def test_a_server_that_is_silent_costs_the_timeout_and_no_more(tmp_path: Path, what: str) -> None:
    async with valkey(tmp_path) as server:
        store = RedisStore(server.url, timeout_s=5.0)
        await store.open()
        server.freeze()
        async with awake() as ran:
            with impatient(store), pytest.raises(StoreDown) as raised:
                await EVERYTHING[what](store)
            assert raised.value.word == "timeout"
            assert ran() < 2.0  # not seconds, on however slow a machine
        server.thaw()
        await server.ready()
        assert await works(store)
        await store.close()


async def test_a_blocking_read_has_its_wait_and_the_timeout(tmp_path: Path) -> None:
    async with valkey(tmp_path) as server:
        store = RedisStore(server.url, timeout_s=5.0)
        await store.open()
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert await store.read(0, {0: ("0", "0")}, 200, 10) == []
        assert loop.time() - began >= 0.19
        server.freeze()
        began = loop.time()
        async with awake() as ran:
            with impatient(store), pytest.raises(StoreDown) as raised:
                await store.read(0, {0: ("0", "0")}, 200, 10)
            assert raised.value.word == "timeout"
            assert loop.time() - began >= 0.29 and ran() < 2.0
        await store.close()


@pytest.mark.parametrize("what", EVERYTHING)
async def test_a_server_that_is_gone_and_back_needs_nobody(tmp_path: Path, what: str) -> None:
    """Its functions went with it: nothing was kept over the restart."""
    async with valkey(tmp_path) as server:
        store = RedisStore(server.url, timeout_s=5.0)
        await store.open()
        assert await works(store)
        await server.kill()
        with pytest.raises(StoreDown) as raised:
            await EVERYTHING[what](store)
        assert raised.value.word in ("refused", "reset")
        await server.start()
        assert await works(store)
        await store.close()


async def test_a_restart_between_two_calls_is_not_noticed(tmp_path: Path) -> None:
    async with valkey(tmp_path, "appendonly", "yes", "appendfsync", "always") as server:
        store = RedisStore(server.url, timeout_s=5.0)
        await store.open()
        await store.call([opening()])
        await server.kill()
        await server.start()
        await asyncio.sleep(0)
        assert await works(store)
        await store.close()


@pytest.mark.parametrize(
    ("trouble", "relief", "word"),
    [
        (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE"), "readonly"),
        (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0"), "oom"),
        (("CONFIG", "SET", "min-replicas-to-write", "1"), ("CONFIG", "SET", "min-replicas-to-write", "0"), "misconf"),
        (("CLIENT", "PAUSE", "100000", "WRITE"), ("CLIENT", "UNPAUSE"), "timeout"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("kind", ["functions", "scripts", "redis 6.2"])
async def test_a_server_that_does_not_write_has_a_word(
    tmp_path: Path, trouble: tuple[str, ...], relief: tuple[str, ...], word: str, kind: str
) -> None:
    running = redis62(tmp_path) if kind == "redis 6.2" else valkey(tmp_path)
    async with running as server:
        if kind == "redis 6.2" and trouble[0] == "CLIENT":
            pytest.skip("it ends a pause by time alone")
        store = RedisStore(server.url, timeout_s=5.0, scripts_only=kind == "scripts")
        await store.open()
        before = (await store.call([opening()]))[0].record
        await server.ask(*trouble)
        with impatient(store, 0.2 if word == "timeout" else 5.0), pytest.raises(StoreDown) as raised:
            await store.call([order(Code.CLOSED)])
        assert (raised.value.word, type(raised.value)) == (word, StoreDown)
        assert (await store.image(shard_of(NODE))).registers == [before]
        await server.ask(*relief)
        assert await works(store)
        await store.close()


async def test_a_server_that_loads_its_data_has_a_word(tmp_path: Path) -> None:
    info = "redis_version:7.2.0\r\nloading:1\r\n"
    async with saying(tmp_path / "s", f"${len(info)}\r\n{info}\r\n".encode(), b"-LOADING busy\r\n") as url:
        store = RedisStore(url)
        with pytest.raises(StoreDown) as raised:
            await store.open()
        assert (raised.value.word, type(raised.value)) == ("loading", StoreDown)
        await store.close()


@pytest.mark.parametrize("what", ["call", "open", "read"])
async def test_a_black_hole_costs_the_timeout(what: str) -> None:
    async with blackhole() as url:
        store = RedisStore(url, timeout_s=0.1)
        async with awake() as ran:
            with pytest.raises(StoreDown) as raised:
                await EVERYTHING[what](store)
            assert raised.value.word == "timeout"
            assert ran() < 2.0  # not seconds, on however slow a machine
        await store.close()


async def test_a_name_without_an_address_has_a_word() -> None:
    store = RedisStore("redis://no-such-host.invalid", timeout_s=5.0)
    with pytest.raises(StoreDown) as raised:
        await store.open()
    assert raised.value.word == "unresolved"
    await store.close()


# --- what a person must mend ------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def saying(path: Path, *answers: bytes) -> AsyncIterator[str]:
    """A server that says one thing after another, to all connections together, whatever it is asked; its URL."""
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while left and await reader.read(65536):
                writer.write(left.pop(0))
        writer.close()

    async with await asyncio.start_unix_server(serve, path):
        yield f"unix://{path}"


@pytest.mark.parametrize(
    ("info", "says"),
    [
        ("redis_version:5.0.14\r\n", "is Redis 5.0.14: Redis 6.2 or Valkey 7.2 is the oldest"),
        ("redis_version:6.0.20\r\n", "is Redis 6.0.20"),
        ("redis_version:7.2.4\r\nvalkey_version:7.0.0\r\n", "is Valkey 7.0.0"),
        ("redis_version:\r\n", "does not say its version"),
        ("hello:you\r\n", "does not say its version"),
        ("redis_version:7.2.4\r\nredis_mode:sentinel\r\n", "is a sentinel: the URL is redis\\+sentinel://"),
    ],
)
async def test_a_server_that_will_not_do_says_why(tmp_path: Path, info: str, says: str) -> None:
    async with saying(tmp_path / "s", f"${len(info)}\r\n{info}\r\n".encode()) as url:
        store = RedisStore(url)
        with pytest.raises(StoreUnfit, match=says) as raised:
            await store.open()
        assert "\n" not in str(raised.value)
        await store.close()


@pytest.mark.parametrize("version", ["redis_version:6.2.0", "redis_version:255.255.255", "valkey_version:7.2.0"])
async def test_a_server_that_will_do_is_asked_on(tmp_path: Path, version: str) -> None:
    info = f"{version}\r\n"
    async with saying(tmp_path / "s", f"${len(info)}\r\n{info}\r\n".encode(), b"-LOADING\r\n" * 8) as url:
        store = RedisStore(url)
        with pytest.raises(StoreDown) as raised:
            await store.open()
        assert raised.value.word == "loading"
        await store.close()


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"220 mail.example ESMTP\r\n"])
async def test_what_is_no_redis_is_named(tmp_path: Path, said: bytes) -> None:
    async with saying(tmp_path / "s", said) as url:
        store = RedisStore(url)
        with pytest.raises(StoreUnfit, match="does not speak Redis's protocol"):
            await store.open()
        await store.close()


@pytest.mark.parametrize("user", ["", "someone"])
@pytest.mark.parametrize("way", ["socket", "port"])
async def test_a_wrong_password_is_one_clear_line_without_it(tmp_path: Path, user: str, way: str) -> None:
    async with valkey(tmp_path, port=0) as server:
        await server.ask("CONFIG", "SET", "requirepass", "right")
        url = (server.url if way == "socket" else server.tcp_url).replace("://", f"://{user}:s3cret@")
        store = RedisStore(url, timeout_s=5.0)
        with pytest.raises(StoreUnfit, match="refuses the user or the password") as raised:
            await store.open()
        assert raised.value.word == "noauth"
        shown = f"{raised.value!r} {raised.value} {store!r} {''.join(traceback.format_exception(raised.value))}"
        assert "s3cret" not in shown
        await store.close()


async def test_no_password_where_one_is_wanted_is_said_so(tmp_path: Path) -> None:
    async with valkey(tmp_path) as server:
        await server.ask("CONFIG", "SET", "requirepass", "right")
        store = RedisStore(server.url, timeout_s=5.0)
        with pytest.raises(StoreUnfit, match="set them in the URL"):
            await store.open()
        right = RedisStore(server.url.replace("://", "://:right@"), timeout_s=5.0)
        await right.open()
        assert await works(right)
        await right.close()


async def test_a_server_that_repeats_the_password_is_not_quoted(tmp_path: Path) -> None:
    said = b"-ERR unknown command 'AUTH', with args beginning with: 's3cret'\r\n"
    async with saying(tmp_path / "s", said) as url:
        store = RedisStore(url.replace("://", "://:s3cret@"))
        with pytest.raises(StoreDown, match="refuses to sign us in") as raised:
            await store.open()
        assert "s3cret" not in "".join(traceback.format_exception(raised.value))
        await store.close()


GRANTS = "+info +xread +xrange +xinfo +hscan +get +cluster"


@pytest.mark.parametrize(
    ("grants", "works_by"),
    [
        ("+fcall +function", "functions"),
        ("+evalsha +script", "scripts"),
        ("+evalsha +script +fcall", "scripts"),
        ("+fcall", ""),
        ("", ""),
    ],
)
async def test_a_user_with_few_rights_is_served_or_told(tmp_path: Path, grants: str, works_by: str) -> None:
    """What functions do is judged by the user's rights as well: all that they call must be granted."""
    inner = "+time +hget +hset +hmget +hdel +zadd +zrem +zcount +zcard +zscore +zrevrange +zrangebyscore"
    inner += " +zremrangebyscore +incr +set +xadd +del +pexpire +pexpireat +persist"
    async with valkey(tmp_path) as server:
        words = f"ACL SETUSER me on >s3cret ~{{dtl:* {GRANTS} {inner} {grants}".split()
        await server.ask(*words)
        store = RedisStore(server.url.replace("://", "://me:s3cret@"), timeout_s=5.0)
        if works_by:
            await store.open()
            assert await works(store)
            libraries = await server.ask("FUNCTION", "LIST")
            assert bool(libraries) == (works_by == "functions")
        else:
            with pytest.raises(StoreUnfit, match="grant the user") as raised:
                await store.open()
            assert raised.value.word == "noperm"
        await store.close()


@pytest.mark.parametrize("kind", ["functions", "scripts", "redis 6.2"])
async def test_the_rights_that_the_error_names_are_enough(tmp_path: Path, kind: str) -> None:
    running = redis62(tmp_path) if kind == "redis 6.2" else valkey(tmp_path)
    async with running as server:
        await server.ask("ACL", "SETUSER", "me", "on", ">s3cret")
        store = RedisStore(server.url.replace("://", "://me:s3cret@"), timeout_s=5.0, scripts_only=kind == "scripts")
        with pytest.raises(StoreUnfit) as raised:
            await store.open()
        _, _, grants = str(raised.value).replace("PREFIX", "dtl").partition("grant the user ")
        await server.ask("ACL", "SETUSER", "me", *grants.split())
        await store.open()
        assert await works(store)
        for right, what in (("-time", "call"), ("-xread", "read"), ("-hscan", "image"), ("-get", "counts")):
            await server.ask("ACL", "SETUSER", "me", right)
            with pytest.raises(StoreUnfit, match="grant the user") as raised:
                await EVERYTHING[what](store)
            assert raised.value.word == "noperm"
            await server.ask("ACL", "SETUSER", "me", right.replace("-", "+"))
        assert await works(store)
        await store.close()


# --- TLS, several at once, cancelled, closed --------------------------------------------------------------------------


async def test_over_tls(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    async with valkey(tmp_path / "server") as server, tls(server, certificates) as url:
        store = RedisStore(url, timeout_s=5.0)
        await store.open()
        assert await works(store)
        await store.close()
        stranger = RedisStore(url.partition("?")[0], timeout_s=5.0)
        with pytest.raises(StoreUnfit, match=r"TLS failed .*certificate") as raised:
            await stranger.open()
        assert raised.value.word == "tls"
        await stranger.close()


@pytest.mark.parametrize("option", ["ssl_ca_certs", "ssl_certfile"])
@pytest.mark.parametrize("there", [False, True], ids=["no file", "no certificate"])
async def test_a_file_for_tls_that_will_not_do_is_named(tmp_path: Path, option: str, there: bool) -> None:
    file = tmp_path / "file.pem"
    if there:
        file.write_text("nothing of the kind")
    store = RedisStore(f"{refused().replace('redis://', 'rediss://')}?{option}={file}")
    with pytest.raises(StoreUnfit, match="the files for TLS cannot be used") as raised:
        await store.open()
    assert raised.value.word == "tls"
    await store.close()


async def test_a_server_without_tls_is_named(tmp_path: Path) -> None:
    async with valkey(tmp_path, port=0) as server:
        store = RedisStore(server.tcp_url.replace("redis://", "rediss://"), timeout_s=1.0)
        with pytest.raises(StoreDown) as raised:
            await store.open()
        assert raised.value.word in ("tls", "reset", "timeout")
        await store.close()


async def clients(server: Server) -> int:
    listed = await server.ask("CLIENT", "LIST")
    assert isinstance(listed, bytes)
    return len(listed.splitlines()) - 1


async def test_many_at_once_each_get_their_own_answers(store: RedisStore, valkey_server: Server) -> None:
    async def one(name: str) -> None:
        key = register_key(Scope.SESSION, SERVICE, name)
        for _ in range(20):
            replies = await store.call([order(Code.OPEN, key), Beat(by=name), order(Code.CLOSED, key)])
            assert [decode(reply.record).key for reply in replies[::2]] == [key, key]

    async with asyncio.TaskGroup() as tasks:
        for i in range(10):
            tasks.create_task(one(f"s{i}"))
    assert await clients(valkey_server) <= IDLE


async def test_a_cancelled_read_or_call_leaves_the_next_one_sound(store: RedisStore) -> None:

    def blocked() -> Coroutine[object, object, object]:
        return store.read(0, {0: ("0", "0")}, 10_000, 10)

    def many() -> Coroutine[object, object, object]:
        return store.call([order(Code.OPEN) for _ in range(200)])

    for what in (blocked, many):
        for turns in range(8):
            task = asyncio.get_running_loop().create_task(what())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            assert await works(store)


async def test_closed_it_has_no_connection(valkey_server: Server) -> None:
    before = await clients(valkey_server)
    async with opened(valkey_server) as store:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(3):
                tasks.create_task(store.call([Beat(by="one")]))
            tasks.create_task(store.read(0, {0: ("0", "0")}, 10, 10))
        assert await clients(valkey_server) > before
    await until_async(lambda: clients(valkey_server), before)


async def until_async(what: Callable[[], Awaitable[int]], expected: int) -> None:
    async with asyncio.timeout(5):
        while await what() != expected:
            await asyncio.sleep(0.005)


async def test_readers_do_not_wait_for_each_other(store: RedisStore) -> None:
    """A call is not behind a blocking read."""
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(store.read(0, {shard_of(NODE): ("0", "0")}, 5000, 10))
        await asyncio.sleep(0.02)
        (reply,) = await store.call([opening()])
        found = await reading
    assert [entry.data for entry in found] == [reply.record]


# --- sentinels --------------------------------------------------------------------------------------------------------


async def again(store: RedisStore, limit_s: float = 20.0) -> int:
    """Until it works; how often it was down."""
    downs = 0
    async with asyncio.timeout(limit_s):
        while True:
            try:
                assert await works(store)
            except StoreDown:
                downs += 1
                await asyncio.sleep(0.01)
            else:
                return downs


async def test_a_failover_is_followed_and_a_lost_write_restored(tmp_path: Path) -> None:
    async with sentinel(tmp_path) as servers:
        store = RedisStore(servers.url, timeout_s=5.0)
        await store.open()
        assert await works(store)
        kept = await store.image(shard_of(NODE))
        await servers.cut()
        (lost,) = await store.call([order(Code.OPEN)])
        await servers.failover()
        assert await again(store) <= 1
        image = await store.image(shard_of(NODE))
        assert image.n == kept.n + 1  # `works` wrote where the lost one was
        restored = replace(decode(lost.record), version=decode(lost.record).version + 1)
        (reply,) = await store.call([restoring(restored)])
        assert (reply.verdict, decode(reply.record).tx) == (Verdict.OK, decode(lost.record).tx)
        await store.close()


async def test_a_sentinel_that_is_silent_is_passed_over(tmp_path: Path) -> None:
    async with sentinel(tmp_path) as servers, blackhole() as hole:
        url = servers.url.replace("://", f"://{hole.removeprefix('redis://')},{refused().removeprefix('redis://')},")
        store = RedisStore(url, timeout_s=3.0)
        await store.open()
        assert await works(store)
        await store.close()


async def test_a_master_that_no_sentinel_knows_is_a_persons_to_mend(tmp_path: Path) -> None:
    async with sentinel(tmp_path) as servers:
        store = RedisStore(servers.url.replace("/mymaster", "/other"), timeout_s=5.0)
        with pytest.raises(StoreUnfit, match="knows no master 'other'"):
            await store.open()
        await store.close()


async def test_no_sentinel_there_is_down() -> None:
    store = RedisStore(refused().replace("redis://", "redis+sentinel://") + "/mymaster", timeout_s=5.0)
    with pytest.raises(StoreDown) as raised:
        await store.open()
    assert (raised.value.word, type(raised.value)) == ("refused", StoreDown)
    await store.close()


# --- a cluster --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def three_masters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with kept(cluster(tmp_path_factory.mktemp("cluster"), 3)) as masters:
        yield masters


@contextlib.asynccontextmanager
async def clustered(masters: Cluster, timeout_s: float = 5.0) -> AsyncIterator[RedisStore]:
    for master in masters.masters:
        await master.ask("FLUSHALL")
    store = RedisStore(masters.url, timeout_s=timeout_s)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


class TestCluster(StoreContract):
    """Three masters, found by one of them."""

    @pytest.fixture
    async def store(self, three_masters: Cluster) -> AsyncIterator[RedisStore]:
        async with clustered(three_masters) as store:
            yield store


async def test_a_cluster_has_a_lane_of_each_shard(three_masters: Cluster) -> None:
    async with clustered(three_masters) as store:
        assert store.lanes == tuple((shard,) for shard in range(SHARDS))
        owners = {(await three_masters.owner_of(slot_of(Shard("dtl", shard).tag))).port for shard in range(SHARDS)}
        assert len(owners) == 3
        orders = [order(Code.OPEN, register_key(Scope.SESSION, SERVICE, f"s{i}")) for i in range(100)]
        replies = await store.call([*orders])
        assert [decode(reply.record).tx for reply in replies] == [call.tx for call in orders]
        counts = await store.counts()
        logs = [await store.read(shard, {shard: ("0", "0")}, 0, 100) for shard in range(SHARDS)]
        assert sum(len(log) for log in logs) == 100
        assert [decode(log[-1].data).n for log in logs] == counts


async def test_a_slot_that_moves_under_load_loses_nothing(three_masters: Cluster) -> None:
    """Calls and a blocking reader while the shard's slot moves twice: contiguous versions, every record read once."""
    shard = shard_of(NODE)
    slot = slot_of(Shard("dtl", shard).tag)
    async with clustered(three_masters) as store:
        seen: list[str] = []
        downs: list[str] = []

        async def tail() -> None:
            position = "0"
            while True:
                try:
                    for entry in await store.read(shard, {shard: (position, "0")}, 100, 100):
                        seen.append(entry.id)
                        position = entry.id
                except StoreDown as exc:
                    downs.append(exc.word)
                    await asyncio.sleep(0.001)

        async def load() -> None:
            while True:
                try:
                    await store.call([order(Code.OPEN)])
                except StoreDown as exc:
                    downs.append(exc.word)
                await asyncio.sleep(0.001)

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(tail()), tasks.create_task(load())]
            for _ in range(2):
                await asyncio.sleep(0.05)
                source = await three_masters.owner_of(slot)
                to = next(master for master in three_masters.masters if master is not source)
                await three_masters.move_slot(slot, to)
            await asyncio.sleep(0.05)
            running[1].cancel()
            await asyncio.sleep(0.15)
            running[0].cancel()
        assert await works(store)
        log = await store.history(shard, evidence=False, after="0", count=10_000)
        assert [decode(entry.data).version for entry in log] == list(range(1, len(log) + 1))
        assert [entry.id for entry in log][:-1] == seen
        assert set(downs) <= {"moved"}


async def test_a_slot_half_way_is_read_where_its_keys_are_and_written_when_it_is_there(three_masters: Cluster) -> None:
    """All keys are there already, the slot is not: the old owner says ASK. A call names keys that are not there yet or
    not any more, and which of both no server can say: TRYAGAIN, as long as it takes."""
    shard = shard_of(NODE)
    slot = slot_of(Shard("dtl", shard).tag)
    async with clustered(three_masters) as store:
        assert await works(store)
        before = await store.image(shard)
        source = await three_masters.owner_of(slot)
        to = next(master for master in three_masters.masters if master is not source)
        await three_masters.begin_move(slot, to)
        while keys := await source.ask("CLUSTER", "GETKEYSINSLOT", slot, 100):
            assert isinstance(keys, list)
            names = [key for key in keys if isinstance(key, bytes)]
            await source.ask("MIGRATE", "127.0.0.1", to.port, "", 0, 5000, "KEYS", *names)
        await to.ask("FUNCTION", "FLUSH")  # a server that is new to the cluster has none
        try:
            image = await store.image(shard)
            assert (image.registers, image.n, image.position) == (before.registers, before.n, before.position)
            assert len(await store.history(shard, evidence=False, after="0", count=10)) == 1
            with pytest.raises(StoreDown) as raised:
                await store.call([opening(), opening()])
            assert raised.value.word in ("moved", "server")
        finally:
            await three_masters.end_move(slot, source, to)
        assert await again(store) == 0


async def test_a_cluster_is_found_without_the_server_that_the_url_names(tmp_path: Path) -> None:
    async with cluster(tmp_path, 3) as masters, clustered(masters, 2.0) as store:
        named, other, _ = masters.masters
        for shard in range(SHARDS):
            slot = slot_of(Shard("dtl", shard).tag)
            if await masters.owner_of(slot) is named:
                await masters.move_slot(slot, other)
        await again(store)
        await store.counts()  # whoever moved says so: all are known now
        await named.kill()
        await store.open()
        assert await works(store)


async def test_a_masters_death_is_survived_by_the_rest(tmp_path: Path) -> None:
    async with cluster(tmp_path, 3) as masters, clustered(masters, 1.0) as store:
        slots = {shard: slot_of(Shard("dtl", shard).tag) for shard in range(SHARDS)}
        dead = masters.masters[0]  # the one that the URL names
        owned = {shard for shard, slot in slots.items() if await masters.owner_of(slot) is dead}
        await dead.kill()
        for shard in range(SHARDS):
            if shard in owned:
                with pytest.raises(StoreDown) as raised:
                    await store.image(shard)
                assert raised.value.word in ("refused", "reset", "clusterdown", "timeout")
        alive = next(shard for shard in range(SHARDS) if shard not in owned)
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(StoreDown):
                    assert (await store.image(alive)).registers == []
                    break
        await dead.start()
        await again(store)


# --- two implementations of one contract ------------------------------------------------------------------------------


class Twins:
    """Random calls, made on a server and then in this process at the time that the server said it was."""

    def __init__(self, store: RedisStore, seed: int) -> None:
        self.random = random.Random(seed)
        self.store = store
        self.now_us = 0
        self.local = LocalStore(lambda: self.now_us)
        self.keys = [register_key(Scope.NODE, SERVICE, f"{i}") for i in range(4)]
        self.keys += [register_key(Scope.SESSION, SERVICE, "s"), register_key(Scope.REQUEST, SERVICE, "/r")]
        self.probes: list[Reply] = []
        self.records: list[bytes] = []
        self.calls: list[Call] = []

    async def run(self, steps: int) -> None:
        for _ in range(steps):
            call = self.some_call()
            (reply,) = await self.store.call([call])
            self.now_us = reply.now_us
            twin = self.local.do(call)
            assert twin == reply, f"{call}\n{twin}\n{reply}"
            self.calls.append(call)
            if reply.seq:
                self.probes.append(reply)
            if reply.record and not isinstance(call, Draw):
                self.records.append(reply.record)
            if self.random.random() < 0.05:
                await asyncio.sleep(0.003)

    def some_call(self) -> Call:
        pick = self.random.choice
        if self.calls and self.random.random() < 0.05:
            return pick(self.calls[-20:])
        tx = self.random.choice((self.random.randbytes(16), bytes(15) + self.random.randbytes(1)))
        key = pick(self.keys)
        expected = decode(pick(self.records[-30:])) if self.records and self.random.random() < 0.9 else None
        if expected is not None and self.random.random() < 0.8:
            key = expected.key
        probe = pick(self.probes[-6:]) if self.probes else None
        what = pick(("propose",) * 4 + ("order", "ask", "ask", "ask", "report", "report", "report", "renew", "release"))
        if self.random.random() < 0.06:
            what = pick(("restore", "restore", "beat", "share", "route", "draw"))
        rule = {"probes": pick((1, 2)), "successes": pick((1, 2, 3)), "lease_ms": pick((1, 3, 1000, 1000))}
        if probe is not None:
            if what == "report":
                return reporting(probe, pick((True, True, True, False, None)), again=pick((True, False)), tx=tx, **rule)
            if what == "renew":
                return renewing(probe, lease_ms=rule["lease_ms"])
            if what == "release":
                return releasing(probe, tx=tx)
        numbers = {"base_ms": pick((1, 2)), "max_ms": pick((0, 3, 9)), "wait_ms": pick((0, 0, 1, 4))}
        numbers |= {"doublings": pick((0, 0, 1, 31, 40)), "proofs": pick((0, 0, 2, 9)), "ramp_ms": pick((0, 500))}
        seen = {} if expected is None else {"epoch": expected.epoch, "version": expected.version}
        if what == "ask":
            return asking(key, tx=tx, reopened_tx=self.random.randbytes(16), **rule)
        if what == "order":
            lasting = pick((0, self.now_us + pick((0, 2000, 10_000_000))))
            return order(pick(list(Code)), key, tx=tx, held=pick((True, False)), expires_us=lasting)
        if what == "beat":
            return Beat(by=pick(("one", "two", "three")))
        if what == "draw":
            return self.some_draw()
        if what == "share":
            return Share(service=SERVICE, blob=tx, keep_ms=LONG_MS)
        if what == "route":
            return opening(route_key(SERVICE), kind=Kind.ROUTE, state=Code.CLOSED, tx=tx, **seen)
        if what == "restore" and expected is not None:
            later = {
                "version": expected.version + pick((0, 0, 0, 1, -1)),
                "epoch": expected.epoch + pick((0, 0, 1, -1)),
            }
            later |= {"state": pick(list(Code)), "ts_us": expected.ts_us + pick((0, 10**9))}
            changed = replace(expected, tx=pick((tx, expected.tx)), **later)
            record = pick((encode(changed), encode(changed), b"", b"\x01nothing", encode(replace(changed, kind=3))))
            return Restore(key=changed.key, service=SERVICE, record=record)
        quorum = {"quorum": pick((0, 1, 2, 3)), "by": pick(("one", "two", "three")), "suspect_tx": tx[::-1]}
        floor = {"size": pick((3, 4)), "minimum": pick((0, 1, 2)), "overwhelming": pick((True, False, False))}
        state = pick((Code.OPEN, Code.OPEN, Code.OPEN, Code.CLOSED, Code.HALF_OPEN))
        return opening(key, state=state, tx=tx, **seen, **numbers, **quorum, **floor)

    def some_draw(self) -> Draw:
        """Of one budget; `test_budgets` draws on more, with a clock that goes when told."""
        pick = self.random.choice
        numbers = {"must": pick((0, 0, 7)), "want": pick((0, 30)), "give_back": pick((0, 0, 20, 99))}
        windows = tuple(Window(Unit.TOKENS, span_ms, 100, **numbers) for span_ms in pick(((60,), (60, 86_400_000))))
        return Draw(key=BUDGET, by=pick(("one", "two")), windows=windows, slots_limit=5, slots_want=pick((0, 3)))

    async def compare(self) -> None:
        """What is there in the end, and what was told on the way."""
        for shard in range(SHARDS):
            here, there = await self.local.image(shard), await self.store.image(shard)
            assert sorted(here.registers) == sorted(there.registers)
            assert here.n == there.n
            for evidence in (False, True):
                logs = [
                    await it.history(shard, evidence=evidence, after="0", count=9999) for it in (self.local, self.store)
                ]
                assert [entry.data for entry in logs[0]] == [entry.data for entry in logs[1]]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", ["functions", "scripts", "redis 6.2"])
async def test_a_server_answers_byte_for_byte_as_the_local_store_does(
    valkey_server: Server, redis62_server: Server, kind: str, seed: int
) -> None:
    server = redis62_server if kind == "redis 6.2" else valkey_server
    async with opened(server, scripts_only=kind == "scripts") as store:
        twins = Twins(store, seed)
        await twins.run(600)
        await twins.compare()


async def test_evidence_is_bounded_by_bytes_too(store: RedisStore) -> None:
    """Long ones make it short: what the server keeps is about EVIDENCE_BYTES, whatever `keep_ms` says."""
    blob = b"x" * (EVIDENCE_BYTES // 300)
    shares: list[Call] = [Share(service=SERVICE, blob=blob, keep_ms=LONG_MS) for _ in range(50)]
    for _ in range(20):
        await store.call(shares)
    shard = shard_of(route_key(SERVICE))
    kept = 0
    position = "0"
    while page := await store.history(shard, evidence=True, after=position, count=50):
        kept += sum(len(entry.data) for entry in page)
        position = page[-1].id
    assert EVIDENCE_BYTES // 2 < kept < 2 * EVIDENCE_BYTES


async def test_the_log_is_bounded_by_bytes_too(store: RedisStore) -> None:
    """As many records as there would be if all were as long as the last."""
    key = route_key(SERVICE)
    table = encode_body(key, SERVICE, "one", blob=b"x" * (MAX_TABLE_BYTES - 4096))
    reply: Reply | None = None
    for _ in range(50):
        stands = None if reply is None else decode(reply.record)
        seen = {} if stands is None else {"epoch": stands.epoch, "version": stands.version}
        call = opening(key, kind=Kind.ROUTE, state=Code.CLOSED, body=table, **seen)
        [reply] = await store.call([call])
        assert reply.verdict is Verdict.OK
    kept = await store.history(shard_of(key), evidence=False, after="0", count=100)
    assert LOG_BYTES // 2 < sum(len(entry.data) for entry in kept) < 2 * LOG_BYTES and len(kept) < 50
