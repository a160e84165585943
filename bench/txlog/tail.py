"""One sidecar's part in the log without the sidecar: `TransactionLog`, `Replica` and `Fleet` in a process of their own.

    python -m bench.txlog.tail --redis unix:///run/v.sock --nodes 64 --known 1000

A line on standard input asks: `up` is answered once it follows the log, `mark` with what happened since the last mark,
`told` with every transition that its breakers took over since, by key, with the time. The service is `bench`; its
endpoints are `node_key(0)` and so on, its sessions `session_key(0)` and so on, of which `--known` were met here.
"""

import argparse
import asyncio
import gc
import json
import random
import secrets
import struct
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import uvloop

from sidecar.core.breaker import Scope, Transition
from sidecar.core.fleet import Fleet
from sidecar.kernel.ids import ServiceName, SessionId
from sidecar.policy.schema import Breakers, Endpoint, NodeBreaker, Service, SessionBreaker, Snapshot
from sidecar.txlog.codec import HEAD, SHARDS, register_key
from sidecar.txlog.log import State, TransactionLog
from sidecar.txlog.replica import Replica
from sidecar.txlog.server import RedisStore
from sidecar.txlog.store import Entry

SERVICE: Final = "bench"
_TS: Final = struct.Struct(">27xQ")
MOST: Final = 1_000_000  # lags kept between two marks


def node_name(number: int) -> str:
    """An endpoint of `SERVICE`."""
    return f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}:8000"


def session_name(number: int) -> str:
    """A session of `SERVICE`; as long as a UUID."""
    return f"{number:08x}-4b6e-4c1d-9d3e-5b1f0a2c7e88"


def node_key(number: int, service: str = SERVICE) -> str:
    """Its register's key."""
    return register_key(Scope.NODE, service, node_name(number))


def session_key(number: int) -> str:
    """Its register's key."""
    return register_key(Scope.SESSION, SERVICE, session_name(number))


class Timed(Replica):
    """Notes how old each record was when it had been taken over."""

    lags_us: list[float]
    entries_us: list[float]

    def entries(self, entries: Iterable[Entry], now: float) -> None:
        some = list(entries)
        began = time.perf_counter()
        super().entries(some, now)
        self.entries_us.append((time.perf_counter() - began) * 1e6)
        at_us = time.time() * 1e6
        for entry in some:
            if not entry.evidence and len(entry.data) > HEAD.size and len(self.lags_us) < MOST:
                self.lags_us.append(at_us - _TS.unpack_from(entry.data)[0])


class Tail:
    """The process."""

    def __init__(self, args: argparse.Namespace) -> None:
        loop = asyncio.get_running_loop()
        self.told: list[tuple[str, str, float]] = []
        self.lines: asyncio.Queue[str] = asyncio.Queue()
        self.replica = Timed(
            f"tail-{args.name}",
            clock=loop.time,
            chance=random.random,
            new_tx=lambda: secrets.token_bytes(16),
            tell=self._tell,
        )
        self.replica.lags_us, self.replica.entries_us = [], []
        self.fleet = self.replica.fleet = Fleet(random.random, secrets.token_bytes(32), self.replica)
        rules = Breakers(node=NodeBreaker(min_closed_ratio=0.0), session=SessionBreaker())
        endpoints = tuple(Endpoint(url=f"http://{node_name(number)}") for number in range(args.nodes))
        service = Service(name=SERVICE, endpoints=endpoints, breakers=rules)
        self.fleet.apply(Snapshot(version=1, services=(service,)), loop.time())
        state = self.fleet.services[ServiceName(SERVICE)]
        for number in range(args.known):
            state.session(SessionId(session_name(number)), loop.time())
        self.log = TransactionLog(
            RedisStore(args.redis, args.prefix),
            self.replica,
            clock=loop.time,
            wall=time.time,
            chance=random.random,
            say=_say,
        )
        self.blocked_s = 0.0
        self._pulse_s = args.pulse_ms / 1000
        self._loop = loop
        self._began = (time.time(), time.process_time(), 0, 0)

    async def run(self) -> None:
        """Until standard input ends."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 50, 50)  # as `sidecar run` does
        reader = asyncio.StreamReader()
        await self._loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        if self._pulse_s:
            self._pulse(self._loop.time())
        rss_kib, began = _rss_kib(), time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(self.log.run())
            await self.log.ready.wait()
            ready_s = time.perf_counter() - began
            while line := (await reader.readline()).decode().strip():
                if line == "up":
                    while self.log.state is not State.UP:
                        await asyncio.sleep(0.01)
                    up = {"ready_s": ready_s, "rss_before_kib": rss_kib, "rss_kib": _rss_kib()}
                    _answer(line, **up, registers=len(self.replica.fold), blocked_s=self.blocked_s)
                elif line == "mark":
                    self._mark()
                elif line == "told":
                    told, self.told = self.told, []
                    _answer(line, told=told)
            following.cancel()

    def _mark(self) -> None:
        counts, lags = self.replica.counts, sorted(self.replica.lags_us)
        wall, cpu, applied, resyncs = self._began
        self._began = (time.time(), time.process_time(), counts.applied, counts.resyncs)
        turns = self.replica.entries_us
        self.replica.lags_us, self.replica.entries_us = [], []
        blocked_s, self.blocked_s = self.blocked_s, 0.0
        _answer(
            "mark",
            wall_s=self._began[0] - wall,
            cpu_s=self._began[1] - cpu,
            records=len(lags),
            applied=counts.applied - applied,
            resyncs=counts.resyncs - resyncs,
            lag_ms=[round(_share(lags, part) / 1000, 3) for part in (0.5, 0.99, 1.0)],
            turns=len(turns),
            entries_ms=round(sum(turns) / 1000, 3),
            longest_turn_ms=round(max(turns, default=0.0) / 1000, 3),
            blocked_s=blocked_s,
            registers=len(self.replica.fold),
            read=sum(self.replica._n[shard] or 0 for shard in range(SHARDS)),
        )

    def _tell(self, transition: Transition) -> None:
        if transition.agreed and transition.scope is Scope.NODE:
            self.told.append((transition.key, transition.new.value, time.time()))

    def _pulse(self, due: float) -> None:
        now = self._loop.time()
        self.blocked_s = max(self.blocked_s, now - due)
        self._loop.call_at(now + self._pulse_s, self._pulse, now + self._pulse_s)


def _say(level: str, event: str, **fields: Any) -> None:
    print(json.dumps({"level": level, "event": event, **{name: str(value) for name, value in fields.items()}}))


def _answer(word: str, **fields: Any) -> None:
    print(json.dumps({"answer": word, **fields}), flush=True)


def _share(found: list[float], part: float) -> float:
    return found[min(len(found) - 1, int(len(found) * part))] if found else 0.0


def _rss_kib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.txlog.tail", description=__doc__)
    parser.add_argument("--redis", required=True)
    parser.add_argument("--prefix", default="dtl")
    parser.add_argument("--name", default="1")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--known", type=int, default=0)
    parser.add_argument("--pulse-ms", type=float, default=0.0, help="how often to look whether the loop was held up")
    parser.add_argument("--profile", action="store_true", help="where its time goes, at the end")
    args = parser.parse_args()
    uvloop.run(_run(args))


async def _run(args: argparse.Namespace) -> None:
    tail = Tail(args)
    if not args.profile:
        return await tail.run()
    import cProfile
    import pstats

    profile = cProfile.Profile()
    profile.enable()
    try:
        await tail.run()
    finally:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(35)


if __name__ == "__main__":
    main()
