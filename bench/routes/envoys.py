"""Real Envoys that follow the tables: one `sidecar xds` over the same log, each Envoy with its own listener."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

from bench.txlog.stage import LIMIT_S, Running, Tree, program
from tests.control.xds.envoys import envoy
from tests.harness import connect
from tests.outcomes.release import asked


@contextlib.asynccontextmanager
async def server(tree: Tree, redis: str, policy: Path) -> AsyncIterator[tuple[Running, int]]:
    """`sidecar xds` over that log; its port."""
    flags = ("--xds", "127.0.0.1:0", "--admin", "off", "--redis", redis, "--policy", str(policy))
    async with program(tree, "sidecar", "xds", *flags, "--log-format", "json") as running:
        async with asyncio.timeout(LIMIT_S):
            line = json.loads(await running.process.said(lambda line: '"event":"started"' in line))
        yield running, int(line["xds"].rpartition(":")[2])


@contextlib.asynccontextmanager
async def envoys(count: int, tree: Tree, redis: str, policy: Path, work: Path) -> AsyncIterator[list[int]]:
    """So many; the ports where they take requests, once each answers."""
    async with contextlib.AsyncExitStack() as stack:
        _, xds = await stack.enter_async_context(server(tree, redis, policy))
        ports = []
        for number in range(count):
            made = await stack.enter_async_context(envoy(work / "envoys", xds, f"envoy-{number}", delta=number == 0))
            await made.listening()
            await _answers(made.port)
            ports.append(made.port)
        yield ports


async def _answers(port: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while True:
            with contextlib.suppress(OSError, EOFError, AssertionError):
                async with connect(port) as client:
                    if (await client.ask(asked(0, 1, stream=False), b"POST")).status == 200:
                        return
            await asyncio.sleep(0.05)
