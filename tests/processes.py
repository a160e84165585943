"""`sidecar run` and the simulated engine as processes of their own, and what they say.

Output is read all the time, so that no pipe fills up; a process that is still there at the end is killed, and its
output stands in the failure.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

LIMIT_S = 20.0
"""How long a process may take for anything: generous, since it is spent only where a test fails."""


class Process:
    """A running process and the lines it wrote."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._news = asyncio.Event()
        self.lines: list[str] = []

    async def listen(self) -> None:
        """Collect what it writes, until it ends."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            self.lines.append(line.decode(errors="replace").rstrip("\n"))
            self._news.set()
        await self._process.wait()  # or who waits for a line sees no end and waits on
        self._news.set()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    async def said(self, ready: Callable[[str], bool]) -> str:
        """The first line that is `ready`, once it is there; its end without one fails the test."""
        seen = 0
        async with asyncio.timeout(LIMIT_S):
            while True:
                for line in self.lines[seen:]:
                    if ready(line):
                        return line
                seen = len(self.lines)
                assert self._process.returncode is None, f"it ended with {self._process.returncode}: {self.output}"
                self._news.clear()
                await self._news.wait()

    async def event(self, name: str) -> dict[str, object]:
        """The first log line of that event (JSON log)."""
        line = await self.said(lambda line: f'"event":"{name}"' in line.replace('": "', '":"'))
        decoded = json.loads(line)
        assert isinstance(decoded, dict)
        return decoded

    def events(self) -> list[str]:
        """The names of all logged events so far."""
        return [json.loads(line)["event"] for line in self.lines if line.startswith("{")]

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def ended(self) -> int:
        """Its exit code, once it has ended."""
        async with asyncio.timeout(LIMIT_S):
            return await self._process.wait()

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    @property
    def maps(self) -> str:
        """What is mapped into its memory: the libraries that it loaded."""
        return Path(f"/proc/{self._process.pid}/maps").read_text()

    @property
    def rss_bytes(self) -> int:
        """Resident memory, from /proc."""
        pages = Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGESIZE")


@contextlib.asynccontextmanager
async def process(*arguments: str, **environ: str) -> AsyncIterator[Process]:
    """`python -m ...`, killed at the end if it is still there. Unless told otherwise it starts no server of the log
    and serves no descriptor stream."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SIDECAR_")}
    clean |= {"SIDECAR_REDIS": "local", "SIDECAR_CONTROL": "off"}
    made = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=clean | environ,
    )
    running = Process(made)
    listening = asyncio.create_task(running.listen())
    try:
        yield running
    finally:
        if made.returncode is None:
            made.kill()
            await made.wait()
        await listening


@contextlib.asynccontextmanager
async def engine(**script: object) -> AsyncIterator[tuple[Process, int]]:
    """A simulated engine; the process and its port."""
    async with process("sidecar.demo.engine", "--port", "0", "--script", json.dumps(script)) as running:
        line = await running.said(lambda line: line.startswith("engine listening on "))
        yield running, int(line.split()[3].rpartition(":")[2])


class Sidecar:
    """A sidecar process that serves."""

    def __init__(self, running: Process, port: int, admin: int) -> None:
        self.process = running
        self.port = port
        self.admin = admin


@contextlib.asynccontextmanager
async def sidecar(*arguments: str, admin: bool = True) -> AsyncIterator[Sidecar]:
    """`sidecar run` on ports of the system's choice, with a JSON log."""
    where = "127.0.0.1:0" if admin else "off"
    flags = ["--listen", "127.0.0.1:0", "--admin", where, "--log-format", "json", *arguments]
    async with process("sidecar", "run", *flags) as running:
        started = await running.event("started")
        admin_port = int(str(started["admin"]).rpartition(":")[2]) if admin else 0
        yield Sidecar(running, int(str(started["listen"]).rpartition(":")[2]), admin_port)
