"""The processes of a run and their faults: simulated engines, a sidecar in front, all children, all ended by pid.

Engines are processes and not objects, because the faults are a process's: frozen by SIGSTOP it still accepts
connections and says nothing, as an engine does whose core hangs; killed by SIGKILL it takes its streams with it.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from loadtest.marks import Facts
from loadtest.sse_client import Target
from loadtest.tally import Tally

READY_S = 20.0
"""How long a process may take to listen: generous, since it is spent only where a run fails."""
GONE_S = 10.0
POLL_S = 0.25
ADMIN_TIMEOUT_S = 5.0


BREAKERS_OFF = {scope: {"mode": "off"} for scope in ("node", "session", "request")}


class StageError(Exception):
    """The run could not be set up or kept up; says why."""


class Setting(msgspec.Struct, frozen=True):
    """What is put up. `script` is the simulated engines', `service` the policy's service without its endpoints.

    `policy` is what the policy says besides its service.
    """

    script: dict[str, Any] = {}
    service: dict[str, Any] = {}
    policy: dict[str, Any] = {}
    versions: tuple[str, ...] = ("v1", "v1", "v1")
    """One engine each."""
    leaky: bool = False
    """True: the relay without back-pressure of `leaky.py` stands in the sidecar's place."""
    spoiled: bool = False
    """True: the scenario does its own act wrong; what that means is the scenario's."""


class Child:
    """A process of ours, its output in a file."""

    def __init__(self, directory: Path, name: str, arguments: Sequence[str]) -> None:
        self.name = name
        self._output = directory / f"{name}.log"
        environ = {key: value for key, value in os.environ.items() if not key.startswith("SIDECAR_")}
        environ["SIDECAR_REDIS"] = "local"  # one sidecar: no server of the log beside it
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environ,
            )

    def said(self, word: str) -> str:
        """The first line with `word`, once it is there; StageError if it ends first, or takes READY_S."""
        until = time.monotonic() + READY_S
        while time.monotonic() < until:
            for line in self.output.splitlines(keepends=True):
                if word in line and line.endswith("\n"):
                    return line.strip()
            if self._process.poll() is not None:
                break
            time.sleep(0.02)
        raise StageError(f"{self.name} did not start:\n{self.output[-2000:]}")

    @property
    def output(self) -> str:
        """All that it wrote."""
        return self._output.read_text(encoding="utf-8", errors="replace")

    @property
    def alive(self) -> bool:
        """False once it has ended, by whatever."""
        return self._process.poll() is None

    @property
    def rss_bytes(self) -> int:
        """Resident memory."""
        pages = Path(f"/proc/{self._process.pid}/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGESIZE")

    def freeze(self) -> None:
        """SIGSTOP: connections are accepted by the kernel, and nothing is ever answered."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, also where it is frozen; returns when it is gone."""
        if self.alive:
            self._process.kill()
        self._process.wait(GONE_S)


class EngineProcess:
    """One simulated engine that can be killed and come back on its port."""

    def __init__(self, directory: Path, name: str, script: dict[str, Any]) -> None:
        self._directory, self._name, self._script = directory, name, script
        self._starts = 0
        self.port = 0
        self.child = self._start()

    @property
    def key(self) -> str:
        """What the sidecar calls it: `host:port`."""
        return f"127.0.0.1:{self.port}"

    def come_back(self) -> None:
        """Listen again on the same port, after `child.kill()`."""
        self.child = self._start()

    def _start(self) -> Child:
        self._starts += 1
        arguments = ["sidecar.demo.engine", "--port", str(self.port), "--script", json.dumps(self._script)]
        child = Child(self._directory, f"{self._name}-{self._starts}", arguments)
        try:
            self.port = int(child.said("engine listening on").split()[3].rpartition(":")[2])
        except StageError:
            child.kill()
            raise
        return child


class Admin:
    """A sidecar's admin pages."""

    def __init__(self, url: str) -> None:
        if urlsplit(url).scheme not in ("http", "https"):
            raise StageError(f"{url!r} is no URL such as http://127.0.0.1:9401")
        self._url = url.rstrip("/")

    def page(self, path: str) -> Any:
        """A page's JSON; StageError where it cannot be had."""
        return json.loads(self._get(path))

    def states(self) -> dict[str, str]:
        """The state of each breaker by `scope key`; only nodes are listed before they moved."""
        return {f"{line['scope']} {line['key']}": line["state"] for line in self.page("/breakers")}

    def in_flight(self, key: str) -> int:
        """Attempts that run at an endpoint now."""
        endpoints = [endpoint for route in self.page("/routes") for endpoint in route["endpoints"]]
        return sum(endpoint["in_flight"] for endpoint in endpoints if endpoint["key"] == key)

    def samples(self) -> list[tuple[str, dict[str, str], float]]:
        """Every sample of /metrics: name, labels, value."""
        families = text_string_to_metric_families(self._get("/metrics"))
        return [(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        return sum(value for sample, has, value in self.samples() if sample == name and labels.items() <= has.items())

    def _get(self, path: str) -> str:
        try:
            with urlopen(self._url + path, timeout=ADMIN_TIMEOUT_S) as answer:
                return str(answer.read().decode())
        except OSError as exc:
            raise StageError(f"{self._url}{path} cannot be read: {exc}; is it the sidecar's admin address?") from exc


class Stage:
    """What a scenario acts on: time, engines, the policy file, the tally's phase, and a place for notes."""

    def __init__(self, setting: Setting, tally: Tally, target: Target, admin: Admin | None, seconds: float) -> None:
        self.setting = setting
        self.tally = tally
        self.target = target
        self.admin = admin
        self.seconds = seconds
        self.facts = Facts(has_admin=admin is not None)
        self.engines: list[EngineProcess] = []
        self.proxy: Child | None = None
        self.over = False
        self._policy: Path | None = None
        self._start_s = time.monotonic()
        self._opened = self._count_opened()

    @property
    def simulated(self) -> bool:
        """False against a real URL: then there is nothing to break."""
        return bool(self.engines)

    @property
    def elapsed_s(self) -> float:
        """Since the load began."""
        return time.monotonic() - self._start_s

    def start(self) -> None:
        """The load begins now."""
        self._start_s = time.monotonic()

    def until(self, part: float) -> None:
        """Wait for that part of the run (0-1)."""
        time.sleep(max(0.0, part * self.seconds - self.elapsed_s))

    def phase(self, name: str) -> None:
        """Streams that begin from now on belong to this phase."""
        self.tally.phase = name
        self.facts.notes[f"began {name}"] = self.elapsed_s

    def write_policy(self, service: dict[str, Any]) -> None:
        """Put a policy with this service in force, by an atomic swap of the file as a person's editor would do it."""
        if self._policy is None:
            raise StageError("there is no policy of ours to write: the sidecar is not ours")
        fresh = self._policy.with_suffix(".new")
        fresh.write_text(
            policy_text(service, [engine.key for engine in self.engines], self.setting.versions, self.setting.policy),
            encoding="utf-8",
        )
        fresh.replace(self._policy)

    def watch(self) -> None:
        """Poll the admin pages and the proxy's memory until `over`. Runs beside the load."""
        known: dict[str, str] = {}
        while not self.over:
            if self.admin is not None:
                for key, state in self.admin.states().items():
                    if known.get(key, "closed") != state:
                        self.facts.changes.append((self.elapsed_s, key, state))
                    known[key] = state
            if self.proxy is not None:
                self.facts.rss_bytes.append((self.elapsed_s, float(self.proxy.rss_bytes)))
            elif self.admin is not None:
                self.facts.rss_bytes.append((self.elapsed_s, self.admin.total("process_resident_memory_bytes")))
            time.sleep(POLL_S)

    def conclude(self) -> None:
        """Read what only the end can tell."""
        if self.proxy is not None and not self.proxy.alive:
            raise StageError(f"the proxy ended during the run:\n{self.proxy.output[-2000:]}")
        if self.admin is not None:
            self.facts.final_states = {
                key.removeprefix("node "): state for key, state in self.admin.states().items() if key.startswith("node")
            }
            self.facts.opened = round(self._count_opened() - self._opened)

    def _count_opened(self) -> float:
        return 0.0 if self.admin is None else self.admin.total("sidecar_breaker_transitions_total", new="open")


def policy_text(
    service: dict[str, Any], keys: Sequence[str], versions: Sequence[str], besides: dict[str, Any] | None = None
) -> str:
    """A policy file (JSON is YAML) with one service for the endpoints `keys` (`host:port`), and what else it says."""
    endpoints = [{"url": f"http://{key}", "version": version} for key, version in zip(keys, versions, strict=True)]
    services = [{"name": "load", "endpoints": endpoints, **service}]
    return json.dumps({"apiVersion": "sidecar/v1", "kind": "Policy", "services": services, **(besides or {})}, indent=1)


@contextlib.contextmanager
def simulated(setting: Setting, tally: Tally, seconds: float) -> Iterator[Stage]:
    """Three simulated engines and a sidecar with that policy; all gone when the context ends."""
    engines: list[EngineProcess] = []
    proxy: Child | None = None
    with tempfile.TemporaryDirectory(prefix="loadtest-") as name:
        directory = Path(name)
        try:
            for at in range(len(setting.versions)):
                engines.append(EngineProcess(directory, f"engine-{at + 1}", setting.script))
            policy = directory / "policy.yaml"
            policy.write_text(
                policy_text(setting.service, [engine.key for engine in engines], setting.versions, setting.policy),
                encoding="utf-8",
            )
            if setting.leaky:
                upstreams = [str(engine.port) for engine in engines]
                proxy = Child(directory, "leaky", ["loadtest.leaky", *upstreams])
                target = Target.of(proxy.said("listening on").split()[-1])
                admin = None
            else:
                flags = ["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--control", "off"]
                flags += ["--log-format", "json"]
                proxy = Child(
                    directory, "sidecar", ["sidecar", "run", *flags, "--access-log", "off", "--policy", str(policy)]
                )
                started = json.loads(proxy.said('"started"'))
                target = Target.of(f"http://{str(started['listen']).removeprefix('http://')}")
                admin = Admin(f"http://{str(started['admin']).removeprefix('http://')}")
            stage = Stage(setting, tally, target, admin, seconds)
            stage.engines, stage.proxy, stage._policy = engines, proxy, policy
            yield stage
        finally:
            for child in [*(engine.child for engine in engines), *([proxy] if proxy is not None else [])]:
                child.kill()


@contextlib.contextmanager
def remote(setting: Setting, tally: Tally, seconds: float, url: str, admin_url: str | None) -> Iterator[Stage]:
    """Whatever answers at `url`: load and marks, no fault. With `admin_url`, what its pages tell counts too."""
    stage = Stage(setting, tally, Target.of(url), Admin(admin_url) if admin_url else None, seconds)
    stage.facts.faulted = False
    yield stage
