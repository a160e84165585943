"""The real vLLM as a process: started on a free port of the loopback, watched by its own metrics, stopped for good.

An engine takes half a minute and more to start, so one serves test after test as long as it lives and is idle;
`VllmKeeper` starts the next one when a test has killed it.

It is set to be as awkward as a real one may be: it closes idle connections after a second (its own default is five),
and it sends keep-alive comments into a stream that stalls.

Signals go to named processes of ours only. vLLM is three: the API process (which we started), under it the EngineCore
(which schedules and, on a CPU, starts a worker), found by the names that they give themselves in /proc.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from tests.engines.client import answers, call
from tests.engines.install_vllm import model_dir, venv_dir

START_TIMEOUT_S = 240  # 36-119 s measured on two cores, the most of it importing
POLL_S = 0.1
KEEP_ALIVE_S = 1


class Vllm:
    """One engine process tree. `address` is `host:port`; log lines of the engine go to `log`."""

    def __init__(self, address: str, log: Path, flags: str = "", **settings: str) -> None:
        """Starts the process and returns at once; `wait_ready` waits for it. `settings` are environment variables."""
        binary = venv_dir() / "bin" / "vllm"
        assert binary.exists(), f"no engine in {venv_dir()}: run `python tests/engines/install_vllm.py`"
        self.address = address
        self.log = log
        self._scratch = tempfile.TemporaryDirectory(prefix="vllm-")  # a short path: its unix sockets lie there
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [str(binary), "serve", str(model_dir()), *self._flags(), *flags.split()],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=_environment() | settings | {"TMPDIR": self._scratch.name},
                start_new_session=True,
                preexec_fn=step_aside,
            )

    def _flags(self) -> list[str]:
        host, _, port = self.address.partition(":")
        flags = f"--host {host} --port {port} --served-model-name tiny --dtype float32 --max-model-len 32768"
        return [*flags.split(), "--enforce-eager", "--disable-uvicorn-access-log", "--sse-keep-alive-interval", "1"]

    def wait_ready(self) -> None:
        """Returns when /health says 200; an engine that exits or takes longer than START_TIMEOUT_S fails the test."""
        give_up = time.monotonic() + START_TIMEOUT_S
        while not (answers(self.address) and self.health() == 200):
            assert self.alive(), f"vLLM exited: {self.tail()}"
            assert time.monotonic() < give_up, f"vLLM is not ready after {START_TIMEOUT_S} s: {self.tail()}"
            time.sleep(POLL_S)

    def alive(self) -> bool:
        """Whether the API process runs."""
        return self._process.poll() is None

    def health(self) -> int:
        """The status of GET /health, asked from the engine itself."""
        return call(self.address, "GET", "/health", timeout_s=5).status

    def running(self) -> float:
        """Requests that the engine holds: running and waiting."""
        return self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting")

    def metric(self, name: str) -> float:
        """The sum of a metric's series; 0 where it has none."""
        text = call(self.address, "GET", "/metrics", timeout_s=5).body.decode()
        return sum(float(value) for value in re.findall(rf"^{re.escape(name)}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE))

    def wait_running(self, wanted: float, within_s: float) -> float:
        """The seconds until exactly so many requests are held; more than `within_s` fail the test."""
        started = time.monotonic()
        while (held := self.running()) != wanted:
            waited = time.monotonic() - started
            assert waited < within_s, f"the engine holds {held} requests after {waited:.1f} s, not {wanted}"
            time.sleep(POLL_S)
        return time.monotonic() - started

    def core_pid(self) -> int:
        """The process id of the EngineCore."""
        (core,) = [pid for pid in descendants(self._process.pid) if "EngineCore" in title(pid)]
        return core

    def signal_api(self, number: signal.Signals) -> None:
        """Sends a signal to the API process alone."""
        self._process.send_signal(number)

    def wait_exit(self, within_s: float) -> None:
        """Returns when the API process has gone by itself."""
        self._process.wait(within_s)

    def stop(self) -> None:
        """Ends every process of this engine, a stopped one too: by SIGTERM, and what is left after 10 s by SIGKILL."""
        for number in (signal.SIGCONT, signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            if number is signal.SIGTERM:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(10)
        self._process.wait(30)
        self._scratch.cleanup()

    def tail(self) -> str:
        """The end of the engine's log."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-2000:]


class VllmKeeper:
    """Hands out a ready engine, a new one when the last has died or kept requests; all at one address, as in a pod."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.address = f"127.0.0.1:{free_port()}"
        self._started = 0
        self._vllm: Vllm | None = None

    def ready(self) -> Vllm:
        """An engine that answers, holds no request and has spoken its first words."""
        if self._vllm is not None and not (self._vllm.alive() and self._idle(self._vllm)):
            self.stop()
        if self._vllm is None:
            self._started += 1
            self._vllm = Vllm(self.address, self._folder / f"vllm-{self._started}.log")
            self._vllm.wait_ready()
            call(self._vllm.address, "POST", "/v1/completions", b'{"model":"tiny","prompt":"import","max_tokens":2}')
        return self._vllm

    def stop(self) -> None:
        """Ends the engine, if there is one."""
        if self._vllm is not None:
            self._vllm.stop()
        self._vllm = None

    def _idle(self, vllm: Vllm) -> bool:
        try:
            vllm.wait_running(0, within_s=5)
        except (OSError, AssertionError):
            return False
        return True


def step_aside() -> None:
    """Leaves the other cores to the sidecar and the tests: an engine that takes all of a small machine's time makes
    every deadline late, and what is late then says nothing about the sidecar."""
    os.nice(10)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def _environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    return inherited | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the tiny model needs 1 KiB a token
        "OMP_NUM_THREADS": "1",  # more threads only wait for each other on so small a model
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_S),
    }


def free_port() -> int:
    """A TCP port of the loopback that nothing has."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def descendants(root: int) -> list[int]:
    """The process ids below one, nearest first."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
        except OSError:  # gone between the listing and the reading
            continue
        parents[int(stat.parent.name)] = int(after_name.split()[1])
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def title(pid: int) -> str:
    """The command line of a process, words parted by blanks; OSError once it has gone."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
