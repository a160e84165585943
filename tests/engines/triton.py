"""The real Triton as a process: started on free ports of the loopback, its models under explicit control.

Its repository is a folder of the test's own: a model of `triton_models/` is put there version by version
(`publish`, `withdraw`), and is what the next `load` finds. `load` and `unload` speak to the server itself, past any
sidecar.

Signals go to named processes of ours only. Triton is one server process (which we started), under it a stub a model
version, found by the model's folder in its command line. Stubs share memory with the server in /dev/shm, where a killed
server leaves it: it has a name of its own here, and `stop` clears it.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tests.engines.client import Answer, answers, call
from tests.engines.engine import descendants, free_port, step_aside, title
from tests.engines.install_triton import libraries, server_dir, venv_dir
from tests.engines.make_smollm2 import smollm2_dir

START_TIMEOUT_S = 60
LOAD_TIMEOUT_S = 60
POLL_S = 0.05
MODELS = Path(__file__).resolve().parent / "triton_models"
SHARED_MEMORY = Path("/dev/shm")


class Triton:
    """One server and its stubs. `address` (HTTP), `grpc`, `metrics_address` are `host:port`; log lines go to `log`."""

    def __init__(
        self,
        address: str,
        log: Path,
        models: tuple[str, ...] = ("toy_llm",),
        grpc: str = "",
        source: str = "",
        metrics: str = "",
    ) -> None:
        """Starts the process with version 1 of each model and returns at once; `wait_ready` waits for it.

        `source` is as for `publish`.
        """
        binary = server_dir() / "bin" / "tritonserver"
        assert binary.exists(), f"no engine in {venv_dir()}: run `python tests/engines/install_triton.py`"
        self.address = address
        self.grpc = grpc or f"127.0.0.1:{free_port()}"
        self.metrics_address = metrics or f"127.0.0.1:{free_port()}"
        self.log = log
        self._models = models
        self._scratch = tempfile.TemporaryDirectory(prefix="triton-")
        self._running = tempfile.TemporaryDirectory(prefix="running-")
        self._repository = Path(self._scratch.name)
        for model in models:
            self.publish(model, 1, source)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [str(binary), *self._flags()],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=_environment(),
                start_new_session=True,
                preexec_fn=step_aside,
            )

    def _flags(self) -> list[str]:
        flags = [f"--model-repository={self._repository}", f"--backend-directory={server_dir() / 'backends'}"]
        for name, address in (("http", self.address), ("grpc", self.grpc), ("metrics", self.metrics_address)):
            host, _, port = address.rpartition(":")
            flags += [f"--{name}-address={host}", f"--{name}-port={port}"]
        flags += ["--model-control-mode=explicit", *(f"--load-model={model}" for model in self._models)]
        flags += ["--exit-timeout-secs=2", f"--backend-config=python,shm-region-prefix-name={self._repository.name}"]
        return [*flags, "--allow-gpu-metrics=false"]

    def publish(self, model: str, version: int, source: str = "", **settings: object) -> None:
        """Puts a version of a model into the repository, or puts it there anew; Triton sees it at the next `load`.

        `source` is the folder of `triton_models/` that it comes from; empty: the one of the model's name. Settings of
        any model: `load_s`, `load_error`; of toy_llm: `says`, `delay_ms`.
        """
        code = MODELS / (source or model)
        folder = self._repository / model
        folder.mkdir(exist_ok=True)
        shutil.copy(code / "config.pbtxt", folder)
        self.withdraw(model, version)
        (folder / str(version)).mkdir()
        for file in (code / "model.py", MODELS / "generation.py"):
            shutil.copy(file, folder / str(version))
        settings = {"model_dir": str(smollm2_dir()), "running_dir": self._running.name} | settings
        (folder / str(version) / "settings.json").write_text(json.dumps(settings), encoding="utf-8")

    def withdraw(self, model: str, version: int) -> None:
        """Takes a version out of the repository, if it is there; Triton lets it go at the next `load`."""
        shutil.rmtree(self._repository / model / str(version), ignore_errors=True)

    def wait_ready(self) -> None:
        """Returns when every model that it was started with is ready; longer than START_TIMEOUT_S fails the test."""
        give_up = time.monotonic() + START_TIMEOUT_S
        while not (answers(self.address) and all(self.ready(model) for model in self._models)):
            assert self.alive(), f"Triton exited: {self.tail()}"
            assert time.monotonic() < give_up, f"Triton is not ready after {START_TIMEOUT_S} s: {self.tail()}"
            time.sleep(POLL_S)

    def alive(self) -> bool:
        """Whether the server process runs."""
        return self._process.poll() is None

    def ready(self, model: str = "", version: int = 0) -> bool:
        """What the server says of a model, of one version of it, or, with no name, of itself and all that it has."""
        path = f"/v2/models/{model}" if model else "/v2/health"
        path += f"/versions/{version}" if version else ""
        return call(self.address, "GET", f"{path}/ready", timeout_s=5).status == 200

    def load(self, model: str, config: Mapping[str, object] | None = None) -> Answer:
        """Loads what the repository has of a model; `config` stands for its config.pbtxt, until the files change.

        Returns when Triton is done, whatever it says: 200, or 400 with the reason. What is loaded and unchanged since
        is left as it is, with 200.
        """
        parameters = {} if config is None else {"config": json.dumps(config)}
        body = json.dumps({"parameters": parameters}).encode()
        return call(self.address, "POST", f"/v2/repository/models/{model}/load", body, timeout_s=LOAD_TIMEOUT_S)

    def unload(self, model: str) -> Answer:
        """Unloads a model; Triton says 200 at once, and keeps it until its streams have ended."""
        return call(self.address, "POST", f"/v2/repository/models/{model}/unload", b"{}")

    def states(self, model: str) -> dict[str, str]:
        """A model's versions and their states in Triton's index; none that was never loaded or has gone."""
        index = json.loads(call(self.address, "POST", "/v2/repository/index", b"{}").body)
        return {row["version"]: row["state"] for row in index if row["name"] == model and "state" in row}

    def wait_states(self, model: str, wanted: dict[str, str], within_s: float) -> float:
        """The seconds until the index says exactly that of a model; more than `within_s` fail the test."""
        started = time.monotonic()
        while (states := self.states(model)) != wanted:
            waited = time.monotonic() - started
            assert waited < within_s, f"{model} is {states} after {waited:.1f} s, not {wanted}: {self.tail()}"
            time.sleep(POLL_S)
        return time.monotonic() - started

    def metric(self, name: str, model: str) -> float:
        """The sum of a metric's series of a model; 0 where it has none."""
        text = call(self.metrics_address, "GET", "/metrics", timeout_s=5).body.decode()
        found = re.findall(
            rf'^{re.escape(name)}\{{[^}}]*model="{re.escape(model)}"[^}}]*\}} (\S+)$', text, re.MULTILINE
        )
        return sum(float(value) for value in found)

    def running(self) -> float:
        """Requests that the models hold, told by those of their processes that live."""
        alive = {str(pid) for pid in descendants(self._process.pid)}
        told = [file.read_text() for file in Path(self._running.name).iterdir() if file.name in alive]
        return sum(int(count or 0) for count in told)

    def wait_running(self, wanted: float, within_s: float) -> float:
        """The seconds until exactly so many requests are held; more than `within_s` fail the test."""
        started = time.monotonic()
        while (held := self.running()) != wanted:
            waited = time.monotonic() - started
            assert waited < within_s, f"the models hold {held} requests after {waited:.1f} s, not {wanted}"
            time.sleep(POLL_S)
        return time.monotonic() - started

    def server_pid(self) -> int:
        """The process id of the server."""
        return self._process.pid

    def stub_pid(self, model: str, version: int = 1) -> int:
        """The process id of the stub that runs a version of a model: after a load anew, of the newest of them."""
        folder = f"{self._repository}/{model}/{version}/"
        return max((pid for pid in descendants(self._process.pid) if folder in title(pid)), key=_started)

    def signal_server(self, number: signal.Signals) -> None:
        """Sends a signal to the server process alone."""
        self._process.send_signal(number)

    def wait_exit(self, within_s: float) -> None:
        """Returns when the server process has gone by itself."""
        self._process.wait(within_s)

    def wait_log(self, text: str, within_s: float) -> None:
        """Returns when the log has that text; later than `within_s` fails the test."""
        give_up = time.monotonic() + within_s
        while text not in self.log.read_text(encoding="utf-8", errors="replace"):
            assert time.monotonic() < give_up, f"no {text!r} after {within_s} s: {self.tail()}"
            time.sleep(POLL_S)

    def rss_bytes(self) -> dict[str, int]:
        """Resident memory of the server and of each stub, by what it is."""
        names = {self._process.pid: "server"}
        for pid in descendants(self._process.pid):
            names[pid] = title(pid).partition(f"{self._repository}/")[2].partition("/model.py")[0]
        pages = {name: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid, name in names.items()}
        return {name: count * os.sysconf("SC_PAGESIZE") for name, count in pages.items()}

    def stop(self) -> None:
        """Ends every process of this engine, a stopped one too: by SIGTERM, and what is left after 10 s by SIGKILL."""
        for number in (signal.SIGCONT, signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            if number is signal.SIGTERM:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(10)
        self._process.wait(30)
        for left in SHARED_MEMORY.glob(f"{self._repository.name}*"):
            left.unlink(missing_ok=True)
        self._scratch.cleanup()
        self._running.cleanup()

    def tail(self) -> str:
        """The end of the server's log, the models' lines among it."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-2000:]


def _started(pid: int) -> int:
    """When a process began, in clock ticks since the machine's start (proc(5), field 22)."""
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])


def _environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    return inherited | {
        "PATH": f"{venv_dir() / 'bin'}:{os.environ.get('PATH', os.defpath)}",  # whose python3 has the stub's packages
        "LD_LIBRARY_PATH": ":".join(str(folder) for folder in libraries()),
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",  # a stub's byte code in the repository would be a change that a load sees
        "OMP_NUM_THREADS": "1",
    }
