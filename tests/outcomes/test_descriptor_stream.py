"""T15: weights change under live streams, through a real gRPC client; and what befalls updates on their way.

At full size and with twenty sidecars it is `python -m bench.routes`.
"""

import contextlib
import math
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest

from sidecar.demo.engine import Engine
from sidecar.demo.script import Script
from tests.outcomes.mishaps import first, killed_writers, server_away
from tests.outcomes.release import nothing, policy, releasing, weights_under_live_streams
from tests.processes import Process, process
from tests.servers import valkey

STREAMS = 100
TOKENS = 120
GAP_S = 0.02
FOLLOWS_S = 1.0


class Member:
    """A sidecar that serves streams of releases."""

    def __init__(self, running: Process, port: int, control: int) -> None:
        self.process = running
        self.port = port
        self.control = control

    async def kill(self) -> None:
        self.process.send(signal.SIGKILL)
        await self.process.ended()


@contextlib.asynccontextmanager
async def member(redis: str, *more: str) -> AsyncIterator[Member]:
    """`sidecar run` with its log there, on ports of the system's choice."""
    where = ("--listen", "127.0.0.1:0", "--admin", "off", "--control", "127.0.0.1:0")
    flags = (*where, "--redis", redis, "--log-format", "json", "--access-log", "errors", *more)
    async with process("sidecar", "run", *flags) as running:
        started = await running.event("started")
        ports = (int(str(started[name]).rpartition(":")[2]) for name in ("listen", "control"))
        yield Member(running, *ports)


@contextlib.asynccontextmanager
async def engine(script: Script, host: str = "127.0.0.1") -> AsyncIterator[int]:
    made = Engine(script)
    try:
        yield await made.start(host)
    finally:
        await made.stop()


async def test_weights_change_under_live_streams_and_bad_updates_change_nothing(tmp_path: Path) -> None:
    script = Script(token_gap_s=GAP_S, keep=0)
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        server = await enter(valkey(tmp_path / "server"))
        urls = {version: [f"http://127.0.0.1:{await enter(engine(script))}"] for version in ("v1", "v2")}
        # A lone endpoint that may open warns of nothing.
        rule = {"breakers": {"node": {"min_closed_ratio": 0}}}
        path = policy(tmp_path / "policy.json", urls, {"v1": 90, "v2": 10}, **rule)
        two = [await enter(member(server.url, "--policy", str(path))) for _ in range(2)]
        story = await weights_under_live_streams(
            two[0].control, [each.port for each in two], streams=STREAMS, tokens=TOKENS, pause_s=0.3
        )
        streams = story.streams
        assert streams.whole == STREAMS and not streams.broken, streams.broken[:3]
        expected, sigma = 0.1 * STREAMS, math.sqrt(0.1 * 0.9 * STREAMS)
        assert abs(streams.versions["v2"] - expected) <= 4 * sigma, streams.versions
        assert max(story.followed_s()) < FOLLOWS_S
        assert set(story.asking.statuses) == {200}
        assert len(story.nacks) >= 15


@pytest.mark.timeout(120)
async def test_a_writer_that_is_killed_leaves_the_old_table_or_the_new_one(tmp_path: Path) -> None:
    async with valkey(tmp_path / "server") as server, engine(Script(keep=0), "0.0.0.0") as port:
        flags = ("--policy", str(nothing(tmp_path / "policy.json")))
        fates = await killed_writers(
            server, lambda: member(server.url, *flags), port, rounds=4, within_s=0.006, chance=Random(1)
        )
        assert fates.rounds == 4


async def test_an_update_while_the_server_is_away_is_refused_and_may_be_sent_again(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        server = await enter(valkey(tmp_path / "server"))
        port = await enter(engine(Script(keep=0), "0.0.0.0"))
        flags = ("--policy", str(nothing(tmp_path / "policy.json")))
        two = [await enter(member(server.url, *flags)) for _ in range(2)]
        tools = [await enter(releasing(each.control)) for each in two]
        version = (await tools[0].push(first(port))).accepted.table_version
        for tool in tools:
            await tool.until("chat", version)
        for number, how in enumerate(("frozen", "killed")):
            await server_away(server, two, tools, port, number, how)
