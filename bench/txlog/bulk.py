"""A full log, 100,000 sessions and 10,000 endpoints: memory on the server and in a sidecar, how soon one starts.

The registers are written by proposals, as sidecars would. Then a sidecar starts over the full log, and again over an
empty one beside it; and a tail (`bench.txlog.tail`) whose pulse tells for how long its loop was held up.
"""

import asyncio
import contextlib
import secrets
import time
from pathlib import Path

import msgspec

from bench.txlog.stage import Tree, program, seconds_of, share, sidecar, write_policy
from bench.txlog.tail import SERVICE, node_key, session_key
from sidecar.txlog.codec import Code, Kind, encode_body
from sidecar.txlog.server import RedisStore
from sidecar.txlog.store import Call, Propose, Verdict
from tests.servers import Server

BATCH = 500
SETTLE_S = 3.0
PULSE_MS = 1.0
SERVICES = 100
"""That have the endpoints: 100 each."""
EMPTY = "empty"
"""The prefix of a log in which nothing is."""


class Bulk(msgspec.Struct, frozen=True):
    """Times in seconds, memory in bytes.

    `ready_s`: from a tail's first step, connecting included, until it had all. `sidecar_log_s`, `sidecar_s`: from the
    making of a sidecar's process until it had all, and until it served; `empty_sidecar_s` over an empty log.
    """

    sessions: int
    nodes: int
    fill_s: float
    server_empty_bytes: int
    server_bytes: int
    server_rss_bytes: int
    tail_ready_s: list[float]
    tail_blocked_s: list[float]
    tail_bytes: int
    sidecar_log_s: list[float]
    sidecar_s: list[float]
    empty_sidecar_s: list[float]
    sidecar_rss_bytes: int
    empty_sidecar_rss_bytes: int


async def measure(tree: Tree, server: Server, work: Path, *, sessions: int, nodes: int, rounds: int) -> Bulk:
    """Fills the server, which is empty, and looks `rounds` times."""
    url = server.url
    empty_bytes = await _memory(server, "used_memory")
    began = time.perf_counter()
    await _fill(url, sessions, nodes)
    fill_s = time.perf_counter() - began
    service = {"name": SERVICE, "endpoints": [{"url": "http://127.0.0.1:9"}]}
    policy = write_policy(work / "bulk.json", service)
    ready, blocked, grew, log_s, served, served_empty, rss, rss_empty = ([] for _ in range(8))
    for _ in range(rounds):
        words = ("bench.txlog.tail", "--redis", url, "--nodes", str(nodes // SERVICES), "--pulse-ms", str(PULSE_MS))
        async with program(tree, *words) as tail:
            up = await tail.ask("up")
            if up["registers"] < sessions + nodes:
                raise RuntimeError(f"{up['registers']} registers were read of {sessions + nodes}")
            ready.append(round(up["ready_s"], 3))
            blocked.append(round(up["blocked_s"], 4))
            grew.append((up["rss_kib"] - up["rss_before_kib"]) * 1024)
        for prefix in ("dtl", EMPTY):
            async with sidecar(tree, url, policy, "--redis-prefix", prefix) as each:
                async with asyncio.timeout(60.0):
                    line = msgspec.json.decode(await each.running.process.said(lambda line: '"event":"log_up"' in line))
                await asyncio.sleep(SETTLE_S)
                if prefix == EMPTY:
                    served_empty.append(round(each.started - each.began, 3))
                    rss_empty.append(each.running.rss_kib * 1024)
                else:
                    log_s.append(round(seconds_of(line["ts"]) - each.began, 3))
                    served.append(round(each.started - each.began, 3))
                    rss.append(each.running.rss_kib * 1024)
    return Bulk(
        sessions,
        nodes,
        round(fill_s, 2),
        empty_bytes,
        await _memory(server, "used_memory"),
        await _memory(server, "used_memory_rss"),
        ready,
        blocked,
        int(share(grew, 0.5)),
        log_s,
        served,
        served_empty,
        int(share(rss, 0.5)),
        int(share(rss_empty, 0.5)),
    )


async def _fill(url: str, sessions: int, nodes: int) -> None:
    async with contextlib.AsyncExitStack() as stack:
        store = RedisStore(url, timeout_s=10.0)
        await store.open()
        stack.push_async_callback(store.close)
        calls: list[Call] = []
        for number in range(sessions):
            calls.append(_opened(session_key(number), SERVICE))
            if len(calls) == BATCH:
                await _all(store, calls)
                calls = []
        for number in range(nodes):
            service = SERVICE if number < nodes // SERVICES else f"{SERVICE}-{number * SERVICES // nodes}"
            calls.append(_opened(node_key(number, service), service))
            if len(calls) == BATCH:
                await _all(store, calls)
                calls = []
        await _all(store, calls)


async def _all(store: RedisStore, calls: list[Call]) -> None:
    replies = await store.call(calls) if calls else []
    if wrong := [reply.verdict for reply in replies if reply.verdict is not Verdict.OK]:
        raise RuntimeError(f"a register was not written: {wrong[0]}")


def _opened(key: str, service: str) -> Propose:
    return Propose(
        key=key,
        service=service,
        kind=Kind.TRANSITION,
        state=Code.OPEN,
        epoch=0,
        version=0,
        tx=secrets.token_bytes(16),
        body=encode_body(key, service, "bench-7c9d:9400", "consecutive", "3 of the last 3 failed: context_length"),
        by="bench-7c9d:9400",
        wait_ms=600_000,
        base_ms=600_000,
        max_ms=600_000,
    )


async def _memory(server: Server, what: str) -> int:
    text = await server.ask("INFO", "memory")
    assert isinstance(text, bytes)
    return next(int(line[len(what) + 1 :]) for line in text.decode().splitlines() if line.startswith(f"{what}:"))
