"""Transitions at a pace through one server: what following them costs a sidecar, how far behind it is, and the server.

One tail is real (`bench.txlog.tail`) and knows some of the sessions; the others only read, in as few processes as keep
up. What the machine's two cores leave to each is in the figures: who is late because another had the core is late.
"""

import asyncio
import contextlib
from typing import Any

import msgspec

from bench.txlog.stage import Running, Tree, cpu_s, program
from tests.servers import Server

KEYS, KNOWN = 4000, 1000
READERS_EACH = 50
WARM_S = 2.0


class Stream(msgspec.Struct, frozen=True):
    """One window. Shares are of one core; `lag_ms` of the real tail: median, p99, most."""

    tails: int
    rate: float
    seconds: float
    written_per_s: float
    writer_late_ms: float
    tail_share: float
    tail_us_per_record: float
    tail_records_per_s: float
    tail_turns_per_s: float
    tail_longest_turn_ms: float
    lag_ms: list[float]
    resyncs: int
    server_share: float
    readers_share: float
    readers_read_per_s: float


async def measure(tree: Tree, server: Server, *, tails: int, rate: float, seconds: float, rounds: int) -> list[Stream]:
    """Windows, one after the other, while all of them run."""
    async with contextlib.AsyncExitStack() as stack:
        url = server.url
        tail = await stack.enter_async_context(program(tree, "bench.txlog.tail", "--redis", url, "--known", str(KNOWN)))
        await tail.ask("up")
        readers: list[Running] = []
        left = tails - 1
        while left > 0:
            some = min(left, READERS_EACH)
            words = ("bench.txlog.readers", "--redis", url, "--count", str(some))
            readers.append(await stack.enter_async_context(program(tree, *words)))
            left -= some
        pace = ("--rate", f"{rate:g}", "--keys", str(KEYS))
        writer = await stack.enter_async_context(program(tree, "bench.txlog.writer", "--redis", url, *pace))
        await asyncio.sleep(WARM_S)
        found = []
        await _marks(tail, writer, *readers)
        for _ in range(rounds):
            began = cpu_s(server.pid)
            await asyncio.sleep(seconds)
            used = cpu_s(server.pid) - began
            tailed, written, *read = await _marks(tail, writer, *readers)
            wall_s = float(tailed["wall_s"])
            found.append(
                Stream(
                    tails,
                    rate,
                    round(wall_s, 2),
                    round(written["written"] / written["wall_s"], 1),
                    round(written["late_s"] * 1000, 1),
                    round(tailed["cpu_s"] / wall_s, 4),
                    round(tailed["cpu_s"] / max(1, tailed["records"]) * 1e6, 1),
                    round(tailed["records"] / wall_s, 1),
                    round(tailed["turns"] / wall_s, 1),
                    tailed["longest_turn_ms"],
                    tailed["lag_ms"],
                    tailed["resyncs"],
                    round(used / wall_s, 4),
                    round(sum(each["cpu_s"] / each["wall_s"] for each in read), 4),
                    round(sum(each["read"] / each["wall_s"] for each in read), 1),
                )
            )
        return found


async def _marks(*programs: Running) -> list[dict[str, Any]]:
    return [await each.ask("mark") for each in programs]
