"""The processes of a measurement: a Valkey, sidecars, the programs of this package; and what the kernel tells of them.

1. Every process is bound to this one's life and ended by its pid.
2. They run in a tree that may be another than this one: `build/compiled` has the request path as machine code.
3. Times of several processes are compared by the system's clock, which is one on one machine, and the server's, too.
"""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from bench.compare.process import CPUCLOCK_SCHED, PAGE_KIB
from tests.processes import Process

ROOT = Path(__file__).parents[2]
COMPILED = ROOT / "build" / "compiled"
LIMIT_S = 60.0
"""How long a process may take for anything: spent only where something is broken."""


class Spread(msgspec.Struct, frozen=True):
    """A figure over its repetitions."""

    median: float
    least: float
    most: float
    count: int


def spread(values: Sequence[float]) -> Spread:
    """Median and range, of one or more."""
    found = sorted(values)
    return Spread(share(found, 0.5), found[0], found[-1], len(found))


def share(values: Sequence[float], part: float) -> float:
    """The value that `part` of them do not exceed."""
    found = sorted(values)
    return found[min(len(found) - 1, int(len(found) * part))]


@dataclass(frozen=True)
class Tree:
    """Sources that processes run from, with their interpreter."""

    path: Path

    @property
    def python(self) -> str:
        return str(self.path / ".venv" / "bin" / "python")


class Running:
    """A program of ours, or a sidecar: its lines, its CPU, its memory."""

    def __init__(self, made: asyncio.subprocess.Process, process: Process) -> None:
        self._made = made
        self.process = process
        self.pid = made.pid

    @property
    def cpu_s(self) -> float:
        """User and system time so far, all threads."""
        return cpu_s(self.pid)

    @property
    def rss_kib(self) -> int:
        """Resident memory."""
        return rss_kib(self.pid)

    async def ask(self, word: str) -> dict[str, Any]:
        """Sends a line, returns what the program answers to it: its next line that is an answer."""
        assert self._made.stdin is not None
        self.process.lines = [line for line in self.process.lines if '"answer"' not in line]
        self._made.stdin.write(f"{word}\n".encode())
        async with asyncio.timeout(LIMIT_S):
            found: dict[str, Any] = json.loads(await self.process.said(lambda line: line.startswith('{"answer"')))
        return found

    def take(self, event: str) -> list[dict[str, Any]]:
        """The log lines of an event that came since the last call; all others go."""
        lines, self.process.lines = self.process.lines, []
        word = f'"event":"{event}"'
        return [json.loads(line) for line in lines if word in line]


def cpu_s(pid: int) -> float:
    """What the scheduler gave a process so far."""
    return time.clock_gettime((~pid << 3) | CPUCLOCK_SCHED)


def rss_kib(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_KIB


def seconds_of(stamp: str) -> float:
    """A log line's `ts` as Unix seconds; in the middle of the millisecond that it names."""
    return datetime.fromisoformat(stamp).timestamp() + 0.0005


@contextlib.asynccontextmanager
async def program(tree: Tree, *arguments: str) -> AsyncIterator[Running]:
    """`python -m ARGUMENTS` in a tree; killed at the end if it is still there."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SIDECAR_")}
    made = await asyncio.create_subprocess_exec(
        tree.python,
        *("-m", "soak.apart", *arguments),
        cwd=tree.path,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        limit=1 << 24,
        env=clean,
    )
    process = Process(made)
    listening = asyncio.create_task(process.listen())
    try:
        yield Running(made, process)
    finally:
        if made.returncode is None:
            made.kill()
            await made.wait()
        await listening


class Sidecar:
    """A sidecar that serves."""

    def __init__(self, running: Running, port: int, began: float, started: float) -> None:
        self.running = running
        self.port = port
        self.began = began
        """When its process was made, Unix seconds."""
        self.started = started
        """When it said that it serves."""


@contextlib.asynccontextmanager
async def sidecar(tree: Tree, redis: str, policy: Path, *more: str) -> AsyncIterator[Sidecar]:
    """`sidecar run` over that server with that policy, on a port of the system's choice."""
    flags = ["--listen", "127.0.0.1:0", "--admin", "off", "--control", "off"]
    flags += ["--log-format", "json", "--access-log", "off"]
    began = time.time()
    async with program(tree, "sidecar", "run", *flags, "--redis", redis, "--policy", str(policy), *more) as running:
        async with asyncio.timeout(LIMIT_S):
            line = json.loads(await running.process.said(lambda line: '"event":"started"' in line))
        yield Sidecar(running, int(line["listen"].rpartition(":")[2]), began, seconds_of(line["ts"]))


@contextlib.asynccontextmanager
async def sidecars(count: int, tree: Tree, redis: str, policy: Path) -> AsyncIterator[list[Sidecar]]:
    """As many of them, started a few at a time."""
    async with contextlib.AsyncExitStack() as stack:
        found: list[Sidecar] = []
        while len(found) < count:
            some = [sidecar(tree, redis, policy) for _ in range(min(4, count - len(found)))]
            found += [await stack.enter_async_context(each) for each in some]
        yield found


def write_policy(path: Path, *services: Mapping[str, Any]) -> Path:
    """A policy file of these services."""
    path.write_text(json.dumps({"apiVersion": "sidecar/v1", "kind": "Policy", "services": services}))
    return path


class Client:
    """One caller's connection to a sidecar, kept alive."""

    BODY = b'{"model":"demo","max_tokens":2,"messages":[{"role":"user","content":"%b"}]}'

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, name: str, headers: str = "") -> tuple[int, str]:
        """One request to its end: the status and the endpoint that answered, empty if none did."""
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        body = self.BODY % name.encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nx-request-id: {name}\r\n"
            f"content-type: application/json\r\n{headers}content-length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        async with asyncio.timeout(LIMIT_S):
            answer = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
            found = dict(line.split(": ", 1) for line in answer.split("\r\n")[1:] if line)
            await self._reader.readexactly(int(found["content-length"]))
        if found.get("connection") == "close":
            self.close()
        return int(answer[9:12]), found.get("x-sidecar-endpoint", "")

    def close(self) -> None:
        """Let go of the connection."""
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None
