"""Twenty sidecars, five callers each, one endpoint that is half-open: who reaches it.

The endpoint's engine runs here and notes when a request came and how many others it had then; the log says between
which moments the endpoint was half-open. A round: it fails until it is open for all, is well, and is probed under the
traffic of all callers until it is closed. Another endpoint is well all the time.
"""

import asyncio
import contextlib
import random
import time
from pathlib import Path

import msgspec

from bench.txlog.stage import Client, Tree, sidecars, write_policy
from sidecar.core.breaker import Scope
from sidecar.demo.connection import Connection, Request
from sidecar.demo.engine import Engine
from sidecar.demo.script import Fault, Kind, Script
from sidecar.txlog.codec import Code, Record, decode, register_key, shard_of
from sidecar.txlog.server import RedisStore

PAUSE_S = 0.1
"""Of a caller between two requests, at the mean."""
PROBES, SUCCESSES = 1, 5
POLL_S = 0.02
ROUND_S = 60.0
"""What a round takes at most."""
SCRIPT = Script(tokens=2, first_token_s=0.02)


class Round(msgspec.Struct, frozen=True):
    """One endpoint's way from closed to closed.

    `probes` reached it while it was half-open, `at_once` at most; `late` before that though it was open, until
    `late_ms` after its record: those were on their way, or their sidecar had not heard. `open_s`, `half_open_s`: how
    long it was so; `half_opens`: how often.
    """

    probes: int
    at_once: int
    late: int
    late_ms: float
    open_s: float
    half_open_s: float
    half_opens: int


class Node(Engine):
    """An engine that notes its requests: Unix seconds, and how many it had with this one."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.came: list[tuple[float, int]] = []

    def serve(self, connection: Connection, request: Request) -> None:
        at = time.time()
        super().serve(connection, request)
        self.came.append((at, self.counters.live))


async def measure(tree: Tree, url: str, work: Path, *, replicas: int, callers: int, rounds: int) -> list[Round]:
    """Each round as it went. RuntimeError if one does not come to its end."""
    node = Node(SCRIPT)
    async with node, Engine(SCRIPT) as other, contextlib.AsyncExitStack() as stack:
        rule = {"mode": "enforce", "consecutive": 2, "failure_ratio": 0, "open": "1s", "open_max": "10s"}
        rule |= {"probes": PROBES, "successes": SUCCESSES, "min_closed_ratio": 0, "adaptive": False}
        service = {
            "name": "probed",
            "endpoints": [{"url": node.url}, {"url": other.url}],
            "breakers": {"node": rule, "session": {"mode": "off"}, "request": {"mode": "off"}},
            "retry": {"attempts": 1},
            "shared": {"quorum": 2},
        }
        policy = write_policy(work / "probes.json", service)
        store = RedisStore(url)
        await store.open()
        stack.push_async_callback(store.close)
        fleet = await stack.enter_async_context(sidecars(replicas, tree, url, policy))
        key = register_key(Scope.NODE, "probed", node.url.removeprefix("http://"))
        found: list[Round] = []
        async with asyncio.TaskGroup() as group:
            chance = random.Random(1)
            tasks = [
                group.create_task(_call(each.port, f"{number}-{caller}", random.Random(chance.random())))
                for number, each in enumerate(fleet)
                for caller in range(callers)
            ]
            for _ in range(rounds):
                found.append(await _round(node, store, key))
            for task in tasks:
                task.cancel()
        return found


async def _round(node: Node, store: RedisStore, key: str) -> Round:
    before = await _last(store, key)
    node.came.clear()
    node.fail(Fault(Kind.STATUS, status=500))
    async with asyncio.timeout(ROUND_S):
        while (opened := await _last(store, key)) is None or opened.state != Code.OPEN:
            await asyncio.sleep(POLL_S)
        node.heal()
        while (last := await _last(store, key)) is None or last.state != Code.CLOSED:
            await asyncio.sleep(POLL_S)
    await asyncio.sleep(0.5)
    records = [each for each in await _records(store, key) if before is None or each.order > before.order]
    opens = [each for each in records if each.state == Code.OPEN]
    halves = [each for each in records if each.state == Code.HALF_OPEN]
    if not opens or not halves:
        raise RuntimeError(f"{key} was not opened and probed: {[each.state for each in records]}")
    first, half, closed = opens[0].ts_us / 1e6, halves[0].ts_us / 1e6, records[-1].ts_us / 1e6
    late = [at for at, _ in node.came if first <= at < half]
    probing = [live for at, live in node.came if half <= at < closed]
    return Round(
        len(probing),
        max(probing, default=0),
        len(late),
        round(1000 * (max(late) - first), 1) if late else 0.0,
        round(half - first, 3),
        round(closed - half, 3),
        len(halves),
    )


async def _call(port: int, name: str, chance: random.Random) -> None:
    """One caller, for ever."""
    client, number = Client(port), 0
    try:
        while True:
            await asyncio.sleep(2 * PAUSE_S * chance.random())
            number += 1
            await client.ask(f"{name}-{number}")
    finally:
        client.close()


async def _records(store: RedisStore, key: str) -> list[Record]:
    found = await store.history(shard_of(key), evidence=False, after="0", count=10_000)
    records = [decode(each.data) for each in found]
    return [each for each in records if each.key == key and each.kind == 1]


async def _last(store: RedisStore, key: str) -> Record | None:
    records = await _records(store, key)
    return records[-1] if records else None
