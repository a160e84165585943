"""What the log on a server adds to a sidecar, in instructions: callgrind counts them alike on a busy machine.

Time is no measure where neighbours take the core; what a process executes is. A window without traffic gives what a
second costs, a slow one what a second with traffic adds (the second's summary), a quick one what each request costs:

    idle = quiet                 busy = slow - idle - r * request            request = (quick - slow) / (more requests)

Of these three a sidecar's instructions at any rate follow. Under callgrind a sidecar is some fifty times slower, which
changes nothing that is counted, as long as it keeps up with the quick window: its requests are counted as they end.
"""

import asyncio
import contextlib
import re
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from bench.txlog.path import BASE, RATE, SHARED, _writer
from bench.txlog.stage import LIMIT_S, Client, Running, Tree, program, write_policy
from bench.txlog.tail import SERVICE
from tests.servers import valkey

SLOW, QUICK = 2.0, 30.0  # requests a second
SETTLE_S = 8.0
AT = (100.0, 500.0, 2000.0)
"""Rates that the sums are told for."""
JUDGED_AT = 500.0

_ANSWER = (
    b'{"id":"x","object":"chat.completion","choices":[{"index":0,"finish_reason":"stop","message":'
    b'{"role":"assistant","content":"yes"}}],"usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10}}'
)
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(_ANSWER)
_SUMMARY = re.compile(r"^(?:summary|totals): (\d+)$", re.MULTILINE)


class Counted(msgspec.Struct, frozen=True):
    """One arm: instructions of a second without traffic, of what traffic adds to a second, of a request."""

    arm: str
    idle_per_s: int
    busy_per_s: int
    request: int

    def at(self, rate: float) -> float:
        """Instructions a second at so many requests a second."""
        return self.idle_per_s + self.busy_per_s + rate * self.request


async def measure(tree: Tree, work: Path, *, seconds: float) -> list[Counted]:
    """Both arms, one after the other; four minutes."""
    if shutil.which("valgrind") is None:
        raise RuntimeError("valgrind is not installed: its callgrind counts")
    work.mkdir()
    async with valkey(work / "valkey") as server, _writer(tree, server.url, RATE, 0) as writer, _engine() as port:
        service = {"name": SERVICE, "endpoints": [{"url": f"http://127.0.0.1:{port}"}]}
        policy = write_policy(work / "counted.json", service)
        found = [
            await _arm(tree, work, policy, name, url, seconds) for name, url in ((BASE, "local"), (SHARED, server.url))
        ]
        await writer.ask("mark")  # it lives
    return found


async def _arm(tree: Tree, work: Path, policy: Path, name: str, redis: str, seconds: float) -> Counted:
    dumps = work / f"callgrind.{name}"
    flags = ["--listen", "127.0.0.1:0", "--admin", "off", "--control", "off"]
    flags += ["--log-format", "json", "--access-log", "off"]
    under = Tree(_under_callgrind(tree, work, dumps))
    run = program(under, "sidecar", "run", *flags, "--redis", redis, "--policy", str(policy))
    async with run as running:
        started: list[dict[str, str]] = []
        async with asyncio.timeout(4 * LIMIT_S):  # a start is half a minute
            while not (started := running.take("started")):
                await asyncio.sleep(0.2)
        client = Client(int(started[0]["listen"].rpartition(":")[2]))
        for number in range(20):
            await client.ask(f"warm-{number}")
        await asyncio.sleep(SETTLE_S)
        await _dump(running, dumps)
        windows = []
        for rate in (0.0, SLOW, QUICK):
            began, done = time.monotonic(), 0
            while (now := time.monotonic()) < began + seconds:
                if rate and done < (now - began) * rate:
                    status, _ = await client.ask(f"r-{rate:g}-{done}")
                    if status != 200:
                        raise RuntimeError(f"the sidecar answered {status}")
                    done += 1
                else:
                    await asyncio.sleep(0.005)
            took_s = time.monotonic() - began
            windows.append(((await _dump(running, dumps)) / took_s, done / took_s))
    (idle, _), (slow, slow_rate), (quick, quick_rate) = windows
    request = (quick - slow) / (quick_rate - slow_rate)
    return Counted(name, round(idle), round(slow - idle - slow_rate * request), round(request))


def _under_callgrind(tree: Tree, work: Path, dumps: Path) -> Path:
    """A tree whose interpreter is the same one, counted."""
    place = work / f"tree-{dumps.name}"
    (place / ".venv" / "bin").mkdir(parents=True)
    for each in tree.path.iterdir():
        if each.name != ".venv":
            (place / each.name).symlink_to(each)
    python = place / ".venv" / "bin" / "python"
    python.write_text(
        f'#!/bin/sh\nexec valgrind --quiet --tool=callgrind --callgrind-out-file={dumps} {tree.python} "$@"\n'
    )
    python.chmod(0o755)
    return place


async def _dump(running: Running, dumps: Path) -> int:
    """Instructions since the last dump."""
    before = set(dumps.parent.glob(f"{dumps.name}*"))
    # The sidecar may be a child of the one that was started: callgrind's own control finds it by its pid file.
    made = await asyncio.create_subprocess_exec(
        "callgrind_control", "-d", stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    await made.wait()
    async with asyncio.timeout(LIMIT_S):
        while True:
            for path in set(dumps.parent.glob(f"{dumps.name}*")) - before:
                text = path.read_text()
                if (found := _SUMMARY.search(text)) is not None:
                    with contextlib.suppress(FileNotFoundError):
                        path.unlink()
                    return int(found[1])
            await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def _engine() -> AsyncIterator[int]:
    """An engine that answers each request with the same bytes; its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
                await reader.readexactly(int(length[1]) if length else 0)
                writer.write(_HEAD + _ANSWER)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
