"""A real DeepSpeed deployment as two processes: the engine behind MII's gRPC protos, and one of MII's HTTP fronts.

Three fronts, all of them MII's own: "openai" (/v1/chat/completions, /v1/completions), "api" (/generate) and "rest"
(/mii/{name}). They know nothing of the engine but its port: kill it, and their health still says 200; start it again,
and they go on. The engine process is ours (deepspeed_servicer.py says why), the engine in it is DeepSpeed's.

A deployment cannot change its model: a new one is a second `DeepSpeed` on another address, the old one `terminate`d.

Signals go to named processes of ours only; each of the two leads a process group of its own (the gateway forks for
each request).
"""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Literal

import grpc

from tests.engines.client import answers, call
from tests.engines.engine import step_aside
from tests.engines.install_deepspeed import tiny_dir, venv_dir
from tests.servers import free_port

Front = Literal["openai", "api", "rest"]

START_TIMEOUT_S = 120  # 5 s on two free cores, the most of it importing
CALL_TIMEOUT_S = 5.0
POLL_S = 0.1
HERE = Path(__file__).resolve().parent
HEALTH: dict[Front, str] = {"openai": "/health", "api": "/health", "rest": "/healthz"}
MODULES: dict[Front, str] = {"openai": "mii.entrypoints.openai_api_server", "api": "mii.entrypoints.api_server"}


class DeepSpeed:
    """One deployment. `address` is the front's `host:port`; the front's lines go to `log`, the engine's beside it.

    `name` is what the model is called: the `model` of OpenAI bodies, the deployment in the gateway's path.
    """

    def __init__(
        self,
        front: Front,
        address: str,
        log: Path,
        *,
        model: Path | None = None,
        name: str = "tiny",
        pace_ms: float = 0,
    ) -> None:
        """Starts both processes and returns at once; `wait_ready` waits for them.

        `model` is a Hugging Face folder, None the tiny one; `pace_ms` is the least time between two tokens.
        """
        assert venv_dir().is_dir(), f"no engine in {venv_dir()}: run `python tests/engines/install_deepspeed.py`"
        self.front: Front = front
        self.address = address
        self.log = log
        self.name = name
        self._engine_log = log.with_suffix(".engine.log")
        self._servicer_port = free_port()
        self._pace_ms = pace_ms
        self._scratch = tempfile.TemporaryDirectory(prefix="deepspeed-")
        # The OpenAI front calls the model by the folder that it was given: a name, seen from the folder it runs in.
        (Path(self._scratch.name) / name).symlink_to((model or tiny_dir()).absolute())
        log.write_bytes(b"")
        self._engine_log.write_bytes(b"")
        self._servicer = self._start_servicer()
        self._front = self._start(log, self._front_command())

    def wait_ready(self) -> None:
        """Returns when the front's health says 200 and the engine has its model; an exit of either fails the test."""
        give_up = time.monotonic() + START_TIMEOUT_S
        while not (self.serving() and answers(self.address) and self.health() == 200):
            assert self._front.poll() is None, f"the {self.front} front exited: {self.tail()}"
            assert self._servicer.poll() is None, f"DeepSpeed exited: {self.tail()}"
            assert time.monotonic() < give_up, f"DeepSpeed is not ready after {START_TIMEOUT_S} s: {self.tail()}"
            time.sleep(POLL_S)

    @property
    def servicer_pid(self) -> int:
        """The process that holds the model."""
        return self._servicer.pid

    @property
    def front_pid(self) -> int:
        """The process that speaks HTTP; the gateway's requests are forks of it."""
        return self._front.pid

    def health(self) -> int:
        """The status of the front's health, which knows nothing of the engine."""
        return call(self.address, "GET", HEALTH[self.front], timeout_s=CALL_TIMEOUT_S).status

    def serving(self) -> bool:
        """Whether the engine itself answers: the truth that the front's health is not."""
        try:
            self.running()
        except grpc.RpcError:
            return False
        return True

    def running(self) -> int:
        """The prompts that the engine holds, running and waiting, told by the engine itself."""
        return int(self._ask("/sidecar.tests.Engine/Held"))

    def wait_running(self, wanted: int, within_s: float) -> float:
        """The seconds until exactly so many prompts are held; more than `within_s` fail the test."""
        started = time.monotonic()
        while (held := self.running()) != wanted:
            waited = time.monotonic() - started
            assert waited < within_s, f"the engine holds {held} prompts after {waited:.1f} s, not {wanted}"
            time.sleep(POLL_S)
        return time.monotonic() - started

    def signal_servicer(self, number: signal.Signals) -> None:
        """Sends a signal to the engine's process alone."""
        self._servicer.send_signal(number)

    def signal_front(self, number: signal.Signals) -> None:
        """Sends a signal to the front's process alone, not to the forks of a gateway."""
        self._front.send_signal(number)

    def restart_servicer(self) -> None:
        """Starts the engine again under the front that went on without it; `wait_ready` waits for it.

        The one before is ended first, if it has not ended.
        """
        _end(self._servicer)
        self._servicer = self._start_servicer()

    def terminate(self) -> None:
        """Asks the engine to end as MII's client does: running calls have 10 s. The front stays (`stop` ends it)."""
        self._ask("/modelresponse.ModelResponse/Terminate")

    def wait_exit(self, within_s: float) -> None:
        """Returns when the engine's process has gone by itself."""
        self._servicer.wait(within_s)

    def stop(self) -> None:
        """Ends every process of this deployment, stopped ones too; once they have ended, does nothing."""
        _end(self._front)
        _end(self._servicer)
        self._scratch.cleanup()

    def tail(self) -> str:
        """The end of both logs."""
        texts = [log.read_text(encoding="utf-8", errors="replace")[-2000:] for log in (self.log, self._engine_log)]
        return "\n--- engine:\n".join(texts)

    def _ask(self, method: str) -> bytes:
        with grpc.insecure_channel(f"127.0.0.1:{self._servicer_port}") as channel:
            ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
            return ask(b"", timeout=CALL_TIMEOUT_S)

    def _front_command(self) -> list[str]:
        host, _, port = self.address.partition(":")
        servicer = str(self._servicer_port)
        if self.front == "rest":
            return [str(HERE / "deepspeed_gateway.py"), self.name, self.name, servicer, port]
        flags = f"--model {self.name} --load-balancer 127.0.0.1:{servicer} --host {host} --port {port}"
        return ["-m", MODULES[self.front], *flags.split()]

    def _start_servicer(self) -> "subprocess.Popen[bytes]":
        script = str(HERE / "deepspeed_servicer.py")
        return self._start(self._engine_log, [script, self.name, str(self._servicer_port), str(self._pace_ms)])

    def _start(self, log: Path, arguments: list[str]) -> "subprocess.Popen[bytes]":
        with log.open("ab") as output:
            return subprocess.Popen(
                [str(venv_dir() / "bin" / "python"), "-P", *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=self._scratch.name,
                env=_environment(Path(self._scratch.name)),
                start_new_session=True,
                preexec_fn=step_aside,
            )


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends a process and what it forked: by SIGTERM, which all of them end at, and what is left by SIGKILL."""
    for number in (signal.SIGCONT, signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        if number is signal.SIGTERM:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(3)  # uvicorn waits for its streams; nobody here does
    process.wait(30)


def _environment(scratch: Path) -> dict[str, str]:
    unwanted = {"PYTHONPATH", "VIRTUAL_ENV"}
    return {name: value for name, value in os.environ.items() if name not in unwanted} | {
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        "MII_CACHE_PATH": str(scratch / "mii-cache"),
        "OMP_NUM_THREADS": "1",  # more threads only wait for each other on so small a model
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TMPDIR": str(scratch),
        "TORCH_EXTENSIONS_DIR": str(scratch / "extensions"),  # a killed build leaves a lock that waits for ever
    }
