"""What drawing on budgets costs the log's server: `python -m bench.txlog.draws`, 3 minutes; figures in docs/txlog.md.

Servers that nobody else uses. The server's own time is what it counts itself (`commandstats`, with the network's
left out), and its CPU what the system does; memory is `used_memory` beside that of an empty server. Draws come 128 in a
round trip, from one connection, and a few tenants are asked again and again, or each is asked once.
"""

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from sidecar.txlog.codec import budget_key
from sidecar.txlog.server import RedisStore
from sidecar.txlog.store import Draw, Unit, Window
from tests.servers import Server, redis62, valkey

MINUTE_MS, DAY_MS = 60_000, 86_400_000
WINDOWS = {
    "a minute of tokens": ((Unit.TOKENS, MINUTE_MS),),
    "a minute and a day of tokens": ((Unit.TOKENS, MINUTE_MS), (Unit.TOKENS, DAY_MS)),
    "four windows": tuple((unit, span_ms) for unit in Unit for span_ms in (MINUTE_MS, DAY_MS)),
}
BATCH = 128
CALLS = 30_000
TENANTS = 2000


def draws(kinds: tuple[tuple[Unit, int], ...], tenants: int, sidecars: int, slots: int) -> Iterator[Draw]:
    """Slices of a hundredth, some given back. Every sidecar on every tenant, in turn, for ever."""
    chance = random.Random(1)
    while True:
        for tenant in range(tenants):
            for sidecar in range(sidecars):
                windows = tuple(
                    Window(unit, span_ms, 10_000_000, 0, chance.randint(1, 900), chance.choice((0, 0, 0, 50)))
                    for unit, span_ms in kinds
                )
                key, by = budget_key("gold", f"tenant-{tenant:05}"), f"sidecar-{sidecar:03}.llm:8080"
                yield Draw(key=key, by=by, windows=windows, slots_limit=100 * bool(slots), slots_want=slots)


async def asked(store: RedisStore, calls: Iterator[Draw], count: int) -> None:
    left = count
    while left > 0:
        await store.call(list(islice(calls, min(BATCH, left))))
        left -= BATCH


async def facts(server: Server, section: str) -> dict[str, str]:
    text = await server.ask("INFO", section)
    assert isinstance(text, bytes)
    return dict(line.partition(":")[::2] for line in text.decode().splitlines() if ":" in line)


async def cost(server: Server, kinds: tuple[tuple[Unit, int], ...], slots: int) -> str:
    """One round of figures: microseconds of the server in the function, calls a second of its one core."""
    store = RedisStore(server.url, timeout_s=5.0)
    await server.ask("FLUSHALL")
    await store.open()
    calls = draws(kinds, 10, 10, slots)
    await asked(store, calls, 2000)
    await server.ask("CONFIG", "RESETSTAT")
    cpu = await facts(server, "cpu")
    began = time.perf_counter()
    await asked(store, calls, CALLS)
    wall_s = time.perf_counter() - began
    after = await facts(server, "cpu")
    stats = await facts(server, "commandstats")
    inside = next(line for name, line in stats.items() if name in ("cmdstat_fcall", "cmdstat_evalsha"))
    inside_us = float(dict(word.split("=") for word in inside.split(","))["usec_per_call"])
    cpu_s = sum(float(after[name]) - float(cpu[name]) for name in ("used_cpu_user", "used_cpu_sys"))
    await store.close()
    return f"{inside_us:5.1f} us in the function, {CALLS / cpu_s:7,.0f} calls a second of its CPU ({wall_s:.1f} s)"


async def memory(server: Server, kinds: tuple[tuple[Unit, int], ...], sidecars: int, rounds: int) -> str:
    """Bytes a tenant, after so many rounds, each in another part of the minute where there are several."""
    store = RedisStore(server.url, timeout_s=5.0)
    await server.ask("FLUSHALL")
    await store.open()
    await asked(store, draws(kinds, 1, 1, 1), 1000)
    await store.close()
    await server.ask("FLUSHALL")
    await asyncio.sleep(0.2)
    before = int((await facts(server, "memory"))["used_memory"])
    tenants = TENANTS if rounds == 1 else 20
    calls = draws(kinds, tenants, sidecars, 1)
    for turn in range(rounds):
        began = time.perf_counter()
        await asked(store, calls, tenants * sidecars)
        if turn < rounds - 1:
            await asyncio.sleep(max(0.0, 1.0 - (time.perf_counter() - began)))
    await store.close()
    await asyncio.sleep(0.2)  # what its connections took is given back
    after = int((await facts(server, "memory"))["used_memory"])
    return f"{(after - before) / tenants / 1024:5.1f} KB a tenant"


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with valkey(Path(folder) / "new") as server, redis62(Path(folder) / "old") as old:
            for name, each in (("Valkey", server), ("Redis 6.2", old)):
                for words, kinds in WINDOWS.items():
                    for slots in (0, 2):
                        found = await cost(each, kinds, slots)
                        print(f"{name}, {words}{', slots' if slots else ''}: {found}", flush=True)
            for words, kinds in WINDOWS.items():
                for sidecars in (1, 10, 100):
                    print(f"{words}, {sidecars} sidecars, once: {await memory(server, kinds, sidecars, 1)}", flush=True)
            if "--long" in sys.argv:
                for words, kinds in WINDOWS.items():
                    found = await memory(server, kinds, 10, 61)
                    print(f"{words}, 10 sidecars, each second of a minute: {found}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
