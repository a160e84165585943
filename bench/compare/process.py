"""Children on one core each, and what the kernel tells of them: CPU, memory."""

import os
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024
CPUCLOCK_SCHED = 2
"""Of <linux/posix-timers.h>: the clock of what the scheduler gave a process. clock_getcpuclockid(3) makes the same id;
Python has it for threads only."""


class NotStarted(RuntimeError):
    """A child ended at once, or did not listen in time; its message ends with what it said."""


@dataclass
class Process:
    """A child and its own children; the port it listens on."""

    name: str
    popen: subprocess.Popen[bytes]
    port: int
    beside: "Process | None" = None
    """What it needs, and what ends with it; not of its tree."""

    def pids(self) -> list[int]:
        """Of the whole tree, this one first: nginx's work, for one, is its worker's."""
        found = [self.popen.pid]
        for pid in found:
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                found.extend(int(child) for child in children.read_text().split())
        return found

    def rss_kib(self) -> int:
        """Resident memory, of the tree. Pages that parent and child share count twice."""
        return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.pids()) * PAGE_KIB

    def cpu_s(self) -> float:
        """User and system time so far, all threads of the tree: the sum of /proc/<pid>/stat, without its ticks."""
        return sum(time.clock_gettime((~pid << 3) | CPUCLOCK_SCHED) for pid in self.pids())

    def end(self) -> None:
        """SIGTERM, then SIGKILL after a while."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
            try:
                self.popen.wait(5)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait()
        if self.beside is not None:
            self.beside.end()


def allow_files() -> None:
    """As many open files as we may have: 1,000 streams are 2,000 sockets of a proxy."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))


def core_busy_s(core: int) -> float:
    """How long a core has been busy so far, with whatever, time that a hypervisor took included; in ticks."""
    for line in Path("/proc/stat").read_text().splitlines():
        name, *ticks = line.split()
        if name == f"cpu{core}":
            user, nice, system, _idle, _iowait, irq, softirq, steal = (int(each) for each in ticks[:8])
            return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    raise ValueError(f"no core {core}")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def spawn(
    name: str,
    core: int,
    port: int,
    command: Sequence[str],
    work: Path,
    *,
    env: Mapping[str, str] | None = None,
    within_s: float = 15.0,
) -> Process:
    """Start a child pinned to `core` in the folder `work`; returns when its port answers. Its output goes to files in
    there.

    Raises NotStarted if it ends, or does not listen in time.
    """
    mine = os.sched_getaffinity(0)
    with (work / "stdout").open("wb") as out, (work / "stderr").open("wb") as err:
        # A child inherits it. Not by preexec_fn: code between fork and exec may hang where threads hold locks.
        os.sched_setaffinity(0, {core})
        try:
            popen = subprocess.Popen(command, stdout=out, stderr=err, cwd=work, env={**os.environ, **(env or {})})
        finally:
            os.sched_setaffinity(0, mine)
    process = Process(name, popen, port)
    deadline = time.monotonic() + within_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            return process
        except OSError as exc:
            code = popen.poll()
            if code is not None or time.monotonic() > deadline:
                process.end()
                how = f"ended with {code}" if code is not None else f"did not listen within {within_s:g} s"
                raise NotStarted(f"{name} {how}: {_last_words(work)}") from exc
            time.sleep(0.05)


def _last_words(work: Path) -> str:
    said = "".join((work / each).read_text(errors="replace") for each in ("stdout", "stderr"))
    return said[-1500:].strip() or "it said nothing"
