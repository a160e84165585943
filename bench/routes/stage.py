"""The processes of a measurement of routes: sidecars with their control port, and an engine with many addresses.

Beyond `bench.txlog.stage`, whose rules hold: a sidecar tells where release tools connect, and can be killed.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from bench.txlog.stage import LIMIT_S, Running, Tree, program, seconds_of
from sidecar.demo.engine import Engine
from sidecar.demo.script import Script


class Member:
    """A sidecar that serves release tools: `tests.outcomes.mishaps.Member`."""

    def __init__(self, running: Running, port: int, control: int, began: float, started: float) -> None:
        self.running = running
        self.port = port
        self.control = control
        self.began = began
        """When its process was made, Unix seconds."""
        self.started = started
        """When it said that it serves."""

    async def kill(self) -> None:
        """SIGKILL; it is gone when this returns."""
        self.running._made.kill()
        await self.running._made.wait()


@contextlib.asynccontextmanager
async def member(tree: Tree, redis: str, policy: Path, *more: str) -> AsyncIterator[Member]:
    """`sidecar run` over that server, on ports of the system's choice."""
    where = ("--listen", "127.0.0.1:0", "--admin", "off", "--control", "127.0.0.1:0")
    flags = (*where, "--log-format", "json", "--access-log", "off", "--redis", redis, "--policy", str(policy), *more)
    began = time.time()
    async with program(tree, "sidecar", "run", *flags) as running:
        async with asyncio.timeout(LIMIT_S):
            line = json.loads(await running.process.said(lambda line: '"event":"started"' in line))
        ports = [int(line[name].rpartition(":")[2]) for name in ("listen", "control")]
        yield Member(running, ports[0], ports[1], began, seconds_of(line["ts"]))


@contextlib.asynccontextmanager
async def members(count: int, tree: Tree, redis: str, policy: Path) -> AsyncIterator[list[Member]]:
    """As many of them, one after another: each start is a second of a core."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(member(tree, redis, policy)) for _ in range(count)]


@contextlib.asynccontextmanager
async def engine(script: Script, host: str = "0.0.0.0") -> AsyncIterator[int]:
    """An engine in this process, at every address of this machine; its port."""
    made = Engine(script)
    try:
        yield await made.start(host)
    finally:
        await made.stop()


def addresses(net: int, count: int, port: int) -> list[str]:
    """URLs of one engine that look like so many."""
    return [f"http://127.{net}.{place >> 8}.{(place & 255) + 1}:{port}" for place in range(count)]


def quantiles_ms(values_s: Sequence[float]) -> list[float]:
    """p50, p90, p99 and the most, in milliseconds."""
    found = sorted(values_s)
    return [round(1000 * found[min(len(found) - 1, int(len(found) * part))], 2) for part in (0.5, 0.9, 0.99, 1.0)]
