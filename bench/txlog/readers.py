"""Readers of the log that do nothing with it: the load that other sidecars' tails are to the server, and no more.

    python -m bench.txlog.readers --redis unix:///run/v.sock --count 33

Each has a connection, asks as a tail does (all streams, BLOCK, COUNT, a pause after a read that found something), and
remembers how far it read. A line on standard input, `mark`, is answered with what they read since the last one.
"""

import argparse
import asyncio
import json
import sys
import time
from functools import partial
from typing import cast

import hiredis
import uvloop

from sidecar.txlog.codec import SHARDS
from sidecar.txlog.functions import Shard
from sidecar.txlog.log import BLOCK_MS, COALESCE_S, COUNT


class Reader(asyncio.Protocol):
    """One tail's connection."""

    read = 0
    turns = 0

    def __init__(self, prefix: str) -> None:
        shards = [Shard(prefix, shard) for shard in range(SHARDS)]
        self._after = {name: b"$" for shard in shards for name in (shard.log, shard.evidence)}
        self._parser = hiredis.Reader()
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by name
        self._ask()

    def data_received(self, data: bytes) -> None:
        self._parser.feed(data)
        reply = self._parser.gets()
        if reply is False:
            return
        if isinstance(reply, Exception):
            raise reply
        for stream, found in reply or ():
            Reader.read += len(found)
            self._after[stream] = found[-1][0]
        Reader.turns += 1
        if reply:
            self._loop.call_later(COALESCE_S, self._ask)
        else:
            self._ask()

    def _ask(self) -> None:
        words = (b"XREAD", b"COUNT", b"%d" % COUNT, b"BLOCK", b"%d" % BLOCK_MS, b"STREAMS")
        self._transport.write(hiredis.pack_command((*words, *self._after, *self._after.values())))  # type: ignore[arg-type]


async def _run(args: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    for _ in range(args.count):
        await loop.create_unix_connection(partial(Reader, args.prefix), args.redis.removeprefix("unix://"))
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    began = (time.time(), time.process_time(), 0, 0)
    while (await reader.readline()).strip() == b"mark":
        now = (time.time(), time.process_time(), Reader.read, Reader.turns)
        wall_s, cpu_s, read, turns = (new - old for new, old in zip(now, began, strict=True))
        began = now
        print(
            json.dumps({"answer": "mark", "wall_s": wall_s, "cpu_s": cpu_s, "read": read, "turns": turns}), flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.txlog.readers", description=__doc__)
    parser.add_argument("--redis", required=True)
    parser.add_argument("--prefix", default="dtl")
    parser.add_argument("--count", type=int, default=33)
    uvloop.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()
