"""The processes of a soak: the simulated engines, which can be frozen, killed and scripted, and the sidecar.

What the sidecar holds is read from outside: its descriptors and sockets from /proc, its gauges from its admin port, and
the rest by the signal that `soak.observed` hears.
"""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec

from sidecar.demo.script import Fault, Script
from soak.observed import TELL, Told
from tests.processes import Process, process

LIMIT_S = 10.0
"""How long a page of the sidecar's or an engine's may take."""

TICKS = os.sysconf("SC_CLK_TCK")

Sample = tuple[str, tuple[tuple[str, str], ...]]
"""A metric's name and its labels, sorted."""

_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class EngineProcess:
    """One simulated engine on a port that outlives its process."""

    def __init__(self, script: Script) -> None:
        self.port = 0
        self.busy = asyncio.Lock()
        """Held by what befalls it: on a busy machine one trouble may last into the time of the next."""
        self._script = script
        self._stack = AsyncExitStack()
        self._process: Process | None = None

    async def start(self) -> None:
        """Begin, or begin again on the same port."""
        arguments = ("--port", str(self.port), "--script", msgspec.json.encode(self._script).decode())
        running = await self._stack.enter_async_context(process("soak.apart", "sidecar.demo.engine", *arguments))
        line = await running.said(lambda line: line.startswith("engine listening on "))
        self.port = int(line.split()[3].rpartition(":")[2])
        self._process = running

    async def kill(self) -> None:
        """SIGKILL; harmless where it is not running."""
        self._process = None
        await self._stack.aclose()

    def freeze(self) -> None:
        """SIGSTOP: the kernel goes on taking connections for it."""
        if self._process is not None:
            self._process.send(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        if self._process is not None:
            self._process.send(signal.SIGCONT)

    async def script(self, fault: Fault | None) -> None:
        """Let every answer from now on have this fault; None heals. An engine that cannot be told stays as it is."""
        body = msgspec.json.encode(fault) if fault is not None else b""
        method = b"POST" if fault is not None else b"DELETE"
        await _page(self.port, b"/_fault", method, body)


class SidecarProcess:
    """The sidecar under test."""

    def __init__(self, running: Process, port: int, admin: int, told: Path) -> None:
        self.port = port
        self.admin = admin
        self.pid = 0
        self._running = running
        self._told = told
        self._serial = 0

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._running.alive

    @property
    def rss_bytes(self) -> int:
        """Resident memory."""
        return self._running.rss_bytes

    @property
    def cpu_s(self) -> float:
        """CPU time so far, all threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    @property
    def threads(self) -> int:
        """Its threads."""
        return len(list(Path(f"/proc/{self.pid}/task").iterdir()))

    def descriptors(self) -> dict[int, str]:
        """Its open descriptors and what each is."""
        found = {}
        for entry in Path(f"/proc/{self.pid}/fd").iterdir():
            try:
                found[int(entry.name)] = str(entry.readlink())
            except FileNotFoundError:
                continue
        return found

    def established(self) -> list[str]:
        """Its TCP sockets that are not listening, as /proc/net/tcp tells them: state, ports."""
        inodes = {name[8:-1] for name in self.descriptors().values() if name.startswith("socket:[")}
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return [
            f"state {row[3]} local {int(row[1][9:], 16)} remote {int(row[2][9:], 16)}"
            for row in rows
            if row[9] in inodes and row[3] != "0A"
        ]

    def take_lines(self) -> list[str]:
        """What it wrote since the last call."""
        lines, self._running.lines = self._running.lines, []
        return lines

    def hang_up(self) -> None:
        """SIGHUP: look at the policy now."""
        self._running.send(signal.SIGHUP)

    async def metrics(self) -> dict[Sample, float]:
        """All its metrics."""
        return samples((await _page(self.admin, b"/metrics")).decode())

    async def page(self, path: bytes) -> bytes:
        """One of its admin pages."""
        return await _page(self.admin, path)

    async def tell(self) -> Told:
        """What it says that it holds; blocks it for a moment."""
        self._serial += 1
        self._running.send(signal.SIGUSR1)
        async with asyncio.timeout(LIMIT_S):
            while True:
                if self._told.exists():
                    told = msgspec.json.decode(self._told.read_bytes(), type=Told)
                    if told.serial == self._serial:
                        return told
                await asyncio.sleep(0.02)

    async def stop(self) -> int:
        """SIGTERM; its exit code."""
        self._running.send(signal.SIGTERM)
        return await self._running.ended()


@asynccontextmanager
async def sidecar(policy: Path, program: str) -> AsyncIterator[SidecarProcess]:
    """The sidecar as a process of its own, with every line of its log; `program` is `soak.observed`, or wraps it."""
    told = policy.parent / "told.json"
    flags = ["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--control", "off"]
    flags += ["--log-format", "json", "--policy", str(policy)]
    flags += ["--settle", "0s", "--drain", "5s"]
    async with process("soak.apart", program, "run", *flags, **{TELL: str(told)}) as running:
        started = await running.event("started")
        port, admin = (int(str(started[name]).rpartition(":")[2]) for name in ("listen", "admin"))
        proxy = SidecarProcess(running, port, admin, told)
        proxy.pid = (await proxy.tell()).pid
        yield proxy


def samples(text: str) -> dict[Sample, float]:
    """A Prometheus exposition as numbers."""
    return {
        (name, tuple(sorted((key, value) for key, value in _LABEL.findall(labels)))): float(value)
        for name, labels, value in _SAMPLE.findall(text)
    }


async def _page(port: int, path: bytes, method: bytes = b"GET", body: bytes = b"") -> bytes:
    """The body of a page on this machine; OSError or TimeoutError where it cannot be had."""
    async with asyncio.timeout(LIMIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(
                b"%b %b HTTP/1.1\r\nhost: 127.0.0.1:%d\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
                % (method, path, port, len(body), body)
            )
            head, _, answer = (await reader.read(-1)).partition(b"\r\n\r\n")
        finally:
            writer.close()
    if b"transfer-encoding: chunked" in head.lower():
        raise OSError(f"{path!r} is chunked")
    if head[9:12] != b"200":
        raise OSError(f"{path!r} answered {head[:40]!r}")
    return answer
