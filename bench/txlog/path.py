"""What the log on a server adds to a request and to a chunk: a sidecar's CPU, against one with `--redis local`.

`bench.compare`'s machinery: all run all the time on one core, load, upstream and the log's server on the other, and
windows are paired within a round, whose order rotates. A third arm, local as well, says what the machine's noise makes
of a ratio. Meanwhile others' transitions come in over the log, `RATE` a second, which the one with the server reads.
"""

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path as FilePath

import msgspec

from bench import setup
from bench.compare.arms import Arm, sidecar
from bench.compare.kinds import KINDS
from bench.compare.measure import Plan
from bench.compare.measure import measure as compare
from bench.compare.results import Results as Compared
from bench.txlog.stage import Running, Tree, program, write_policy
from bench.txlog.stage import sidecar as sidecar_of
from bench.txlog.tail import SERVICE
from tests.servers import valkey

RATE = 5.0
"""Transitions a second: in a hundred sidecars, one of a session or an endpoint every twenty seconds each."""
IDLE_RATES = (0.0, RATE, 20.0)
BASE, CONTROL, SHARED = "local", "local again", "server"
KEYS = 1000
SETTLE_S = 1.5
LOADS = ("requests", "paced", "streams")


class Idle(msgspec.Struct, frozen=True):
    """A sidecar that nobody asks for anything: CPU in ms per second, by window; `away`: how often it lost the log."""

    log: str
    transitions_per_s: float
    ms_per_s: list[float]
    away: int


class Path(msgspec.Struct, frozen=True):
    """One arm under one kind of load: CPU in us per unit by round, and where there are two, over the other's."""

    kind: str
    unit: str
    arm: str
    base: str
    us: list[float]
    ratios: list[float]


async def measure(tree: Tree, work: FilePath, *, rounds: int, seconds: float, say: Callable[[str], None]) -> list[Path]:
    """Every kind and arm."""
    work.mkdir()
    setup.prepare(["native", "debian"])
    proxy_core, load_core = sorted(os.sched_getaffinity(0))[:2]
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {load_core})
    try:
        async with valkey(work / "valkey") as server, _writer(tree, server.url, RATE, 0) as writer:
            arms = {
                name: Arm(name, where, sidecar(tree.python, redis=where), lambda: "")
                for name, where in ((BASE, "local"), (CONTROL, "local"), (SHARED, server.url))
            }
            plan = Plan(arms, LOADS, rounds, seconds, proxy_core, load_core)
            found = Compared({}, "", rounds, seconds, {}, {}, {}, "")
            with tempfile.TemporaryDirectory(prefix="bench-log-path-") as folder:
                await asyncio.to_thread(compare, plan, found, FilePath(folder), say)
            await writer.ask("mark")  # it lives
    finally:
        os.sched_setaffinity(0, mine)
    return [_path(found, kind, name) for kind in LOADS for name in arms]


def _writer(tree: Tree, url: str, rate: float, first: int) -> AbstractAsyncContextManager[Running]:
    pace = ("--rate", f"{rate:g}", "--keys", str(KEYS), "--first", str(first))
    return program(tree, "bench.txlog.writer", "--redis", url, *pace)


def _path(found: Compared, kind: str, name: str) -> Path:
    mine, base = found.of(name, kind), found.of(BASE, kind)
    both = sorted(mine.keys() & base.keys()) if name != BASE else []
    return Path(
        kind,
        KINDS[kind].unit,
        name,
        BASE if both else "",
        [round(sample.us, 3) for sample in mine.values()],
        [round(mine[number].us / base[number].us, 4) for number in both],
    )


async def idle(tree: Tree, work: FilePath, *, rounds: int, seconds: float) -> list[Idle]:
    """What the log takes of a sidecar without traffic: in its process, on a server, on one where others are busy."""
    work.mkdir()
    service = {"name": SERVICE, "endpoints": [{"url": "http://127.0.0.1:9"}]}
    policy = write_policy(work / "idle.json", service)
    found, first = [], 0
    async with valkey(work / "valkey") as server:
        for log, rate in (("local", 0.0), *((server.url, rate) for rate in IDLE_RATES)):
            async with contextlib.AsyncExitStack() as stack:
                each = await stack.enter_async_context(sidecar_of(tree, log, policy))
                writer = None
                if rate:
                    first += KEYS  # the registers of the one before are not where this one begins
                    writer = await stack.enter_async_context(_writer(tree, server.url, rate, first))
                await asyncio.sleep(SETTLE_S)
                windows = []
                for _ in range(rounds):
                    began = each.running.cpu_s
                    await asyncio.sleep(seconds)
                    windows.append(round(1000 * (each.running.cpu_s - began) / seconds, 3))
                if writer is not None:
                    await writer.ask("mark")  # it lives
                found.append(
                    Idle(BASE if log == "local" else SHARED, rate, windows, len(each.running.take("log_away")))
                )
    return found
