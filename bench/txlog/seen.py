"""An open that everybody takes over: how long after its record was written each of the others has it.

Twice: twenty sidecars, of which one sees an answer fail (`full`), and twenty tails, each its part in the log alone
(`tails`), where the record is proposed by this process. The first includes what twenty interpreters on two cores do to
each other. What is measured begins with the record's time, the server's clock, and ends with the log line of the
other's breaker, in which milliseconds are told, or with the moment of it in a tail.

Each open is another endpoint's: all of them are one engine, at as many addresses of this machine.
"""

import asyncio
import contextlib
import json
import random
import secrets
from pathlib import Path

import msgspec

from bench.txlog.stage import Client, Tree, program, seconds_of, share, sidecars, write_policy
from bench.txlog.tail import SERVICE, node_key, node_name
from sidecar.core.breaker import Scope
from sidecar.demo.engine import Engine
from sidecar.demo.script import Script
from sidecar.txlog.codec import Code, Kind, decode, encode_body, register_key, shard_of
from sidecar.txlog.server import RedisStore
from sidecar.txlog.store import Propose, Verdict

PAUSE_S = 0.06
SETTLE_S = 1.5
"""Until every sidecar has its connections, and the last line was written."""
FAULT = json.dumps({"kind": "status", "status": 500}, separators=(",", ":"))


class Seen(msgspec.Struct, frozen=True):
    """Milliseconds from a record to another's breaker, over `opens` times `others`; `missed` were never seen."""

    what: str
    opens: int
    others: int
    seen: int
    missed: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    local_p50_ms: float
    """From the line of the breaker that tripped to its record: asking the server. 0 where nobody trips."""


async def full(tree: Tree, url: str, work: Path, *, replicas: int, opens: int) -> Seen:
    """Sidecars, and requests that fail."""
    async with contextlib.AsyncExitStack() as stack:
        engine = Engine(Script(tokens=2, keep=0))
        port = await engine.start("0.0.0.0")
        stack.push_async_callback(engine.stop)
        rule = {"mode": "enforce", "consecutive": 1, "failure_ratio": 0, "open": "300s", "open_max": "300s"}
        rule |= {"min_closed_ratio": 0, "adaptive": False}
        service = {
            "name": "seen",
            "endpoints": [{"url": f"http://127.0.1.{number}:{port}"} for number in range(1, opens + 11)],
            "breakers": {"node": rule, "session": {"mode": "off"}, "request": {"mode": "off"}},
            "retry": {"attempts": 1},
            "shared": {"quorum": 1},
        }
        policy = write_policy(work / "seen.json", service)
        fleet = await stack.enter_async_context(sidecars(replicas, tree, url, policy))
        await asyncio.sleep(SETTLE_S)
        for each in fleet:
            each.running.take("breaker")
        chance = random.Random(1)
        for number in range(opens):
            client = Client(fleet[number % replicas].port)
            await client.ask(f"open-{number}", f"x-demo-fault: {FAULT}\r\n")
            client.close()
            await asyncio.sleep(PAUSE_S * (0.5 + chance.random()))
        await asyncio.sleep(SETTLE_S)
        lines = [line for each in fleet for line in each.running.take("breaker")]
        store = RedisStore(url)
        await store.open()
        stack.push_async_callback(store.close)
        shard = shard_of(register_key(Scope.NODE, "seen", "127.0.1.1"))
        records = [decode(each.data) for each in await store.history(shard, evidence=False, after="0", count=10_000)]
        begun = {
            record.key.rpartition("/")[2]: record.ts_us / 1e6
            for record in records
            if record.service == "seen" and record.state == Code.OPEN
        }
        agreed = [line for line in lines if line["new"] == "open" and line["agreed"]]
        own = [line for line in lines if line["new"] == "open" and not line["agreed"]]
        took = [seconds_of(line["ts"]) - begun[line["key"]] for line in agreed]
        asked = [begun[line["key"]] - seconds_of(line["ts"]) for line in own]
        return _seen("sidecars", len(begun), replicas - 1, took, asked)


async def tails(tree: Tree, url: str, *, count: int, opens: int) -> Seen:
    """Tails, and records that this process proposes."""
    async with contextlib.AsyncExitStack() as stack:
        words = ("bench.txlog.tail", "--redis", url, "--prefix", "tails", "--nodes", str(opens))
        readers = [
            await stack.enter_async_context(program(tree, *words, "--name", str(number))) for number in range(count)
        ]
        for reader in readers:
            await reader.ask("up")
        store = RedisStore(url, "tails")
        await store.open()
        stack.push_async_callback(store.close)
        begun: dict[str, float] = {}
        chance = random.Random(1)
        for number in range(opens):
            [reply] = await store.call([_opened(number)])
            if reply.verdict is not Verdict.OK:
                raise RuntimeError(f"{node_key(number)} was not opened: {reply.verdict}")
            begun[node_name(number)] = decode(reply.record).ts_us / 1e6
            await asyncio.sleep(PAUSE_S * (0.5 + chance.random()))
        await asyncio.sleep(0.5)
        told = [entry for reader in readers for entry in (await reader.ask("told"))["told"]]
        took = [at - begun[key] for key, new, at in told if new == "open"]
        return _seen("tails", len(begun), count, took, [])


def _opened(number: int) -> Propose:
    key = node_key(number)
    return Propose(
        key=key,
        service=SERVICE,
        kind=Kind.TRANSITION,
        state=Code.OPEN,
        epoch=0,
        version=0,
        tx=secrets.token_bytes(16),
        body=encode_body(key, SERVICE, "bench", "consecutive", "1 of the last 1 failed"),
        by="bench",
        wait_ms=300_000,
        base_ms=300_000,
        max_ms=300_000,
    )


def _seen(what: str, opens: int, others: int, took_s: list[float], asked_s: list[float]) -> Seen:
    if not took_s:
        raise RuntimeError(f"{what}: nobody saw anything open")
    p50, p90, p99, most = (round(1000 * share(took_s, part), 2) for part in (0.5, 0.9, 0.99, 1.0))
    asked = round(1000 * share(asked_s, 0.5), 2) if asked_s else 0.0
    return Seen(what, opens, others, len(took_s), opens * others - len(took_s), p50, p90, p99, most, asked)
