"""A relay that gets it wrong: no back-pressure, no deadline, no breaker. What `--broken` runs in the sidecar's place.

A mark that this one passes proves nothing. It takes turns among the engines, byte for byte, one engine connection for
each client connection, and holds in memory whatever its client does not read.
"""

import asyncio
import signal
import sys
from itertools import cycle
from typing import cast


class Side(asyncio.Protocol):
    """One end; what it receives is written to the other, however much waits there already."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: Side | None = None
        self.early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        for data in self.early:
            self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        if self.other is None or self.other.transport is None:
            (self.early if self.other is None else self.other.early).append(data)
        else:
            self.other.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()


async def serve(ports: list[int]) -> None:
    """Serve until SIGTERM; one line on stdout tells the address."""
    loop = asyncio.get_running_loop()
    turns = cycle(ports)
    async with asyncio.TaskGroup() as tasks:

        def accept() -> Side:
            front, back = Side(), Side()
            front.other, back.other = back, front
            tasks.create_task(connect(front, back, next(turns)))
            return front

        async def connect(front: Side, back: Side, port: int) -> None:
            try:
                await loop.create_connection(lambda: back, "127.0.0.1", port)
            except OSError:
                front.connection_lost(None) if front.transport is None else front.transport.close()

        server = await loop.create_server(accept, "127.0.0.1", 0, backlog=4096)
        print(f"leaky relay listening on http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await stop.wait()
        server.close()


if __name__ == "__main__":
    asyncio.run(serve([int(port) for port in sys.argv[1:]]))
