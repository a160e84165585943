"""Many large services: what one update costs at 1 and at 1,000 of them, how soon a sidecar has all, and memory.

A service has 10 versions with 100 endpoints each, none of which answers. Their tables are written to the server as a
sidecar would (one record each). `core` is the work of a change without a log or a process, in this interpreter;
the rest is of real sidecars:

1. An update is timed from its sending to its ack, and in the CPU of the sidecar that takes it and of one that follows.
   Of the same service, whether the other 999 are there or not.
2. A start is timed from the making of the process until it serves, and until a release tool that connects at once was
   told every table.
3. Memory is resident memory after a start, over that of one without tables: idle, after a tool was told all tables,
   and after `ASKED` of the services were asked for once.
4. Who looks at everything (a tool that connects, a scrape, a page) shall hold up nobody: meanwhile a request that
   reaches no engine is asked again and again, and the longest wait of one is told.
"""

import asyncio
import contextlib
import gc
import json
import secrets
import statistics
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import msgspec

from bench.routes import envoys
from bench.routes.stage import Member, member
from bench.txlog.bulk import _memory
from bench.txlog.stage import Spread, Tree, cpu_s, rss_kib, spread
from sidecar.control.pb import control_pb2 as pb
from sidecar.core.fleet import Fleet
from sidecar.core.table import PARTS, Table, Target, Version, decode, effective, encode
from sidecar.kernel.ids import ServiceName
from sidecar.policy.schema import Service, Snapshot
from sidecar.txlog.codec import Code, Kind, encode_body, route_key
from sidecar.txlog.server import RedisStore
from sidecar.txlog.store import Propose, Verdict
from tests.control.xds.envoys import envoy
from tests.harness import connect, request
from tests.outcomes.release import Tool, nothing, releasing
from tests.servers import Server

VERSIONS, ENDPOINTS = 10, 100
BATCH = 50
SETTLE_S = 2.0
ASKED = 100
"""Services that are asked for: each costs what it costs, and nobody's sidecar serves a thousand."""
PING_S = 0.002
ENVOY_S = 120.0
XDS_PAUSE_S = 0.3


class Core(msgspec.Struct, frozen=True):
    """One table, in this process. Milliseconds of CPU, bytes."""

    endpoints: int
    record_bytes: int
    encode_ms: float
    decode_ms: float
    effective_ms: float
    use_ms: float
    new_ms: float
    state_bytes: int


class Updates(msgspec.Struct, frozen=True):
    """Updates of one service among `services`: milliseconds from sending to ack, CPU milliseconds a time (medians)."""

    services: int
    what: str
    count: int
    ack_ms: Spread
    writer_cpu_ms: float
    follower_cpu_ms: float


class Start(msgspec.Struct, frozen=True):
    """A start over `services` tables: seconds from the making of the process, resident bytes."""

    services: int
    serves_s: Spread
    told_s: Spread
    idle_bytes: int
    told_bytes: int
    asked: int
    asked_bytes: int
    asked_s: float


class Wait(msgspec.Struct, frozen=True):
    """What was done, how long it took, and the longest that a request waited meanwhile. Medians, ms."""

    what: str
    took_ms: float
    longest_ms: float


class Xds(msgspec.Struct, frozen=True):
    """`sidecar xds` with one Envoy, over `services` tables: seconds from the Envoy's start until it has all and
    listens; resident bytes then; CPU milliseconds an update, of the server and of the Envoy."""

    services: int
    has_all_s: float
    server_bytes: int
    envoy_bytes: int
    weights_ms: tuple[float, float]
    endpoints_ms: tuple[float, float]


class Growth(msgspec.Struct, frozen=True):
    """All of it."""

    versions: int
    endpoints: int
    core: Core
    updates: list[Updates]
    starts: list[Start]
    waits: list[Wait]
    server_bytes: dict[str, int]
    """`used_memory` by services."""
    xds: list[Xds]


def service_name(number: int) -> str:
    """A service's name, which is its model's as well."""
    return f"svc-{number}"


def table(number: int) -> Table:
    """A service as a cluster would have it: pods of many subnets, three zones, machines with generated names.

    The addresses are this machine's, and nobody listens: who asks is refused at once.
    """

    def target(version: int, place: int) -> Target:
        at = (number * 7919 + version * 104729 + place * 1299709) & 0xFFFFFF
        url = f"http://127.{1 + (at >> 16) % 250}.{at >> 8 & 255}.{at & 255}:{10 + version}"
        return Target(url, f"eu-west-1{'abc'[place % 3]}", f"gke-gpu-{(at * 2654435761) & 0xFFFFFFFF:08x}")

    versions = tuple(
        Version(
            f"v{version}",
            PARTS // VERSIONS,
            "vllm",
            tuple(target(version, place) for place in range(ENDPOINTS)),
            f"{number * VERSIONS + version // VERSIONS:064x}",
        )
        for version in range(VERSIONS)
    )
    name = service_name(number)
    return Table(name, versions, (name,))


def core() -> Core:
    """The parts of one change, and what a service's state takes."""
    one = table(0)
    blob = encode(one)
    policy = Service(name=one.service, models=one.models)
    routed = effective(policy, one)
    fleet = Fleet(lambda: 0.5)
    fleet.apply(Snapshot(version=1, services=(routed,)), 0.0)
    state = fleet.services[ServiceName(one.service)]
    fleets: list[Fleet] = []

    def new() -> None:
        made = Fleet(lambda: 0.5)
        made.apply(Snapshot(version=1, services=(routed,)), 0.0)
        fleets.append(made)

    new_ms = _cpu_ms(new, 10)
    gc.collect()
    tracemalloc.start(1)
    new()
    state_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return Core(
        VERSIONS * ENDPOINTS,
        len(blob),
        _cpu_ms(lambda: encode(one), 50),
        _cpu_ms(lambda: decode(blob), 50),
        _cpu_ms(lambda: effective(policy, one), 20),
        _cpu_ms(lambda: state.use(routed, 0.0), 20),
        new_ms,
        state_bytes,
    )


def _cpu_ms(work: Callable[[], object], count: int) -> float:
    took = []
    for _ in range(count):
        began = time.process_time()
        work()
        took.append(time.process_time() - began)
    return round(1000 * statistics.median(took), 3)


async def measure(
    tree: Tree, server: Server, work: Path, *, services: int, updates: int, rounds: int, say: Callable[[str], None]
) -> Growth:
    """At 0 (starts only), 1 and `services` services, over an empty server."""
    made, starts, updated, xds = core(), [], [], []
    policy = nothing(work / "policy.json")
    memory: dict[str, int] = {}
    for count in (0, 1, services):
        await server.ask("FLUSHALL")
        await fill(server.url, count)
        memory[str(count)] = await _memory(server, "used_memory")
        say(f"growth: {count} services")
        starts.append(await _starts(tree, server, policy, count, rounds))
        if count:
            updated += await _updates(tree, server, policy, count, updates)
            xds.append(await _xds(tree, server, policy, work, count, min(updates, 20)))
    say("growth: who waits")
    waits = await _waits(tree, server, policy, services, rounds)
    return Growth(VERSIONS, ENDPOINTS, made, updated, starts, waits, memory, xds)


async def fill(url: str, count: int) -> None:
    """Tables of so many services, into an empty log."""
    store = RedisStore(url, timeout_s=10.0)
    await store.open()
    try:
        for begin in range(0, count, BATCH):
            calls = [_put(number) for number in range(begin, min(begin + BATCH, count))]
            replies = await store.call(list(calls))
            if wrong := [reply.verdict for reply in replies if reply.verdict is not Verdict.OK]:
                raise RuntimeError(f"a table was not written: {wrong[0]}")
    finally:
        await store.close()


def _put(number: int) -> Propose:
    made = table(number)
    key = route_key(made.service)
    body = encode_body(key, made.service, "bench", "update", "", encode(made))
    return Propose(
        key=key,
        service=made.service,
        kind=Kind.ROUTE,
        state=Code.CLOSED,
        epoch=0,
        version=0,
        tx=secrets.token_bytes(16),
        body=body,
        by="bench",
    )


async def _starts(tree: Tree, server: Server, policy: Path, count: int, rounds: int) -> Start:
    serves, told, idle, after, asked, asked_s = [], [], [], [], [], []
    for _ in range(rounds):
        async with member(tree, server.url, policy) as each:
            serves.append(round(each.started - each.began, 3))
            async with releasing(each.control) as tool:
                await _told(tool, count)
                told.append(round(time.time() - each.began, 3))
        async with member(tree, server.url, policy) as each:
            await asyncio.sleep(SETTLE_S)
            idle.append(each.running.rss_kib * 1024)
            async with releasing(each.control) as tool:
                await _told(tool, count)
            await asyncio.sleep(0.5)
            after.append(each.running.rss_kib * 1024)
            began = time.perf_counter()
            await _ask_all(each, min(count, ASKED))
            asked_s.append(time.perf_counter() - began)
            asked.append(each.running.rss_kib * 1024)
    middle = len(idle) // 2
    return Start(
        count,
        spread(serves),
        spread(told),
        sorted(idle)[middle],
        sorted(after)[middle],
        min(count, ASKED),
        sorted(asked)[middle],
        round(statistics.median(asked_s), 3),
    )


async def _told(tool: Tool, count: int) -> None:
    async with asyncio.timeout(60.0):
        while len(tool.tables) < count:
            await asyncio.sleep(0.005)


async def _ask_all(each: Member, count: int) -> None:
    """One question for each service: whoever is asked makes what it takes to route it, and finds nobody there."""
    async with connect(each.port) as client:
        for number in range(count):
            answer = await client.ask(_asking(service_name(number)), b"POST")
            assert answer.status in (502, 503), answer.start


def _asking(model: str) -> bytes:
    body = b'{"model":"%b","messages":[],"max_tokens":1}' % model.encode()
    headers = [b"Content-Type: application/json"]
    return request(b"/v1/chat/completions", method=b"POST", headers=headers, body=body)


async def _xds(tree: Tree, server: Server, policy: Path, work: Path, services: int, count: int) -> Xds:
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        running, port = await enter(envoys.server(tree, server.url, policy))
        await asyncio.sleep(SETTLE_S)
        began = time.perf_counter()
        edge = await enter(envoy(work / f"growth-{services}", port))
        await edge.listening(ENVOY_S)
        has_all_s = time.perf_counter() - began
        await asyncio.sleep(SETTLE_S)
        resident = running.rss_kib * 1024, rss_kib(edge.process.pid) * 1024
        tool = await enter(releasing((await enter(member(tree, server.url, policy))).control))
        await _told(tool, services)
        await asyncio.sleep(SETTLE_S)
        spent: list[tuple[float, float]] = []
        for what in ("weights", "endpoints"):
            before = running.cpu_s, cpu_s(edge.process.pid)
            for number in range(count):
                answer = await tool.push(_update(what, number))
                assert answer.ack is not None, answer.nack
                await asyncio.sleep(XDS_PAUSE_S)  # else several would be one push
            await asyncio.sleep(SETTLE_S)
            after = running.cpu_s, cpu_s(edge.process.pid)
            each = [round(1000 * (late - early) / count, 1) for early, late in zip(before, after, strict=True)]
            spent.append((each[0], each[1]))
        return Xds(services, round(has_all_s, 2), *resident, *spent)


async def _waits(tree: Tree, server: Server, policy: Path, services: int, rounds: int) -> list[Wait]:
    found: dict[str, list[tuple[float, float]]] = {}
    async with member(tree, server.url, policy, "--admin", "127.0.0.1:0") as each:
        line = json.loads(next(line for line in each.running.process.lines if '"event":"started"' in line))
        admin = int(line["admin"].rpartition(":")[2])
        await asyncio.sleep(SETTLE_S)

        async def told() -> None:
            async with releasing(each.control) as tool:
                await _told(tool, services)

        async def woken(number: int) -> None:
            async with connect(each.port) as client:
                await client.ask(_asking(service_name(number)), b"POST")

        for number in range(rounds):
            work: dict[str, Callable[[], Awaitable[None]]] = {
                "nothing": partial(asyncio.sleep, 1.0),
                "a tool that is told all tables": told,
                **{f"GET {path}": partial(_page, admin, path) for path in ("/metrics", "/routes", "/healthz")},
                "the first request of a service": partial(woken, services - 1 - number),
            }
            for what, do in work.items():
                found.setdefault(what, []).append(await _meanwhile(each.port, do))
    return [
        Wait(what, *(round(1000 * statistics.median(values), 1) for values in zip(*times, strict=True)))
        for what, times in found.items()
    ]


async def _page(port: int, path: str) -> None:
    async with connect(port) as client:
        answer = await client.ask(request(path.encode(), headers=[b"Connection: close"]))
        assert answer.status in (200, 503), answer.start


async def _meanwhile(port: int, do: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    """How long it took, and the longest that a request waited from just before until just after."""
    stop = asyncio.Event()
    waits: list[float] = []

    async def ping() -> None:
        async with connect(port) as client:
            while not stop.is_set():
                began = time.perf_counter()
                assert (await client.ask(_asking("nobodys"), b"POST")).status == 404
                waits.append(time.perf_counter() - began)
                await asyncio.sleep(PING_S)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ping())
        await asyncio.sleep(0.1)
        began = time.perf_counter()
        await do()
        took = time.perf_counter() - began
        await asyncio.sleep(0.1)
        stop.set()
    return took, max(waits)


async def _updates(tree: Tree, server: Server, policy: Path, services: int, count: int) -> list[Updates]:
    found = []
    async with contextlib.AsyncExitStack() as stack:
        writer = await stack.enter_async_context(member(tree, server.url, policy))
        follower = await stack.enter_async_context(member(tree, server.url, policy))
        tool = await stack.enter_async_context(releasing(writer.control))
        await _told(tool, services)
        for each in (writer, follower):
            await _ask_all(each, 1)  # the one that is updated is in use
        await asyncio.sleep(SETTLE_S)
        for what in ("weights", "endpoints"):
            took: list[float] = []
            spent: list[tuple[float, float]] = []
            for number in range(count + 2):
                cpu = writer.running.cpu_s, follower.running.cpu_s
                answer = await tool.push(_update(what, number))
                assert answer.ack is not None, answer.nack
                await asyncio.sleep(0.05)
                if number >= 2:  # the first ones make what is made once
                    took.append(round(1000 * (answer.at - answer.sent), 3))
                    spent.append((writer.running.cpu_s - cpu[0], follower.running.cpu_s - cpu[1]))
            medians = [round(1000 * statistics.median(values), 2) for values in zip(*spent, strict=True)]
            found.append(Updates(services, what, count, spread(took), *medians))
    return found


def _update(what: str, number: int) -> pb.DescriptorUpdate:
    name = service_name(0)
    if what == "weights":
        shares = {f"v{version}": 0.1 for version in range(2, VERSIONS)}
        step = 0.01 * (number % 10)
        return pb.DescriptorUpdate(
            service_name=name, version="v0", weights=shares | {"v0": 0.05 + step, "v1": 0.15 - step}
        )
    targets = table(number + 1).versions[1].endpoints
    endpoints = [pb.Endpoint(url=each.url, zone=each.zone, node=each.node) for each in targets]
    return pb.DescriptorUpdate(service_name=name, version="v1", endpoints=endpoints)
