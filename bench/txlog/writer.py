"""Transitions at a pace: sessions that open and close again, proposed in pieces of one round trip each.

    python -m bench.txlog.writer --redis unix:///run/v.sock --rate 2000 --keys 4000 --first 0

A line on standard input, `mark`, is answered with what was written since the last one. Every proposal must be taken:
one that is not ends the process.
"""

import argparse
import asyncio
import json
import secrets
import sys
import time

import uvloop

from bench.txlog.tail import SERVICE, session_key
from sidecar.txlog.codec import Code, Kind, decode, encode_body
from sidecar.txlog.server import RedisStore
from sidecar.txlog.store import Call, Propose, Verdict

STEP_S = 0.005


class Writer:
    """Some keys, one after the other."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._store = RedisStore(args.redis, args.prefix, timeout_s=10.0)
        self._keys = [session_key(args.first + number) for number in range(args.keys)]
        self._state = [(Code.CLOSED, 0, 0)] * args.keys
        self._rate = args.rate
        self._next = 0
        self.written = 0
        self.late_s = 0.0

    async def run(self) -> None:
        """For ever."""
        loop = asyncio.get_running_loop()
        await self._store.open()
        began, due = loop.time(), 0
        while True:
            due = int((loop.time() - began) * self._rate)
            some = min(due - self.written, 500)
            if some > 0:
                self.late_s = max(self.late_s, (due - self.written) / self._rate)
                await self._write(some)
            if due - self.written <= self._rate * STEP_S:
                await asyncio.sleep(STEP_S)

    async def _write(self, count: int) -> None:
        places = [(self._next + number) % len(self._keys) for number in range(count)]
        self._next += count
        calls: list[Call] = [self._propose(place) for place in places]
        for place, reply in zip(places, await self._store.call(calls), strict=True):
            if reply.verdict is not Verdict.OK:
                raise RuntimeError(f"{self._keys[place]}: {reply.verdict}")
            record = decode(reply.record)
            self._state[place] = Code(record.state), record.epoch, record.version
        self.written += count

    def _propose(self, place: int) -> Propose:
        key, (state, epoch, version) = self._keys[place], self._state[place]
        opens = state == Code.CLOSED
        evidence = "3 of the last 3 failed: context_length" if opens else ""
        return Propose(
            key=key,
            service=SERVICE,
            kind=Kind.TRANSITION,
            state=Code.OPEN if opens else Code.CLOSED,
            epoch=epoch,
            version=version,
            tx=secrets.token_bytes(16),
            body=encode_body(key, SERVICE, "writer", "consecutive" if opens else "proved", evidence),
            by="writer",
            wait_ms=30_000 if opens else 0,
            base_ms=30_000,
            max_ms=600_000,
        )


async def _run(args: argparse.Namespace) -> None:
    reader, writer = asyncio.StreamReader(), Writer(args)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with asyncio.TaskGroup() as tasks:
        writing = tasks.create_task(writer.run())
        began = (time.time(), time.process_time(), 0)
        while (await reader.readline()).strip() == b"mark":
            now = (time.time(), time.process_time(), writer.written)
            wall_s, cpu_s, written = (new - old for new, old in zip(now, began, strict=True))
            said = {"answer": "mark", "wall_s": wall_s, "cpu_s": cpu_s, "written": written, "late_s": writer.late_s}
            print(json.dumps(said), flush=True)
            began, writer.late_s = now, 0.0
        writing.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.txlog.writer", description=__doc__)
    parser.add_argument("--redis", required=True)
    parser.add_argument("--prefix", default="dtl")
    parser.add_argument("--rate", type=float, default=2000.0)
    parser.add_argument("--keys", type=int, default=4000)
    parser.add_argument("--first", type=int, default=0)
    uvloop.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()
