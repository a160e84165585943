"""What is compared: how each proxy is started, with which configuration, and what it must not be asked.

An arm relays 127.0.0.1:listen to 127.0.0.1:upstream. `direct` is the line without a proxy: what the load and the
upstream can do, and what every added time counts from.
"""

import os
import re
import string
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench.compare.process import free_port
from bench.setup import ROOT, debian_program, missing
from tests.servers import valkey_binary

CONFIG = Path(__file__).parent / "config"
BENCH = Path(__file__).parents[1]

VERSION = r"\d+\.\d+\.\d+\S*?(?=/|\s|$)"
LOG_FILE = "access.log"
ENVOY_LOG = (
    '{{name: envoy.access_loggers.file, typed_config: {{"@type": '
    "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog, path: {path}}}}}"
)


@dataclass(frozen=True)
class Place:
    """Where an arm runs: its port, the upstream's, a folder of its own, the port of what runs beside it."""

    listen: int
    upstream: int
    work: Path
    beside: int = 0

    def config(self, name: str, **more: str) -> str:
        """A configuration of `config/` with its places filled in; the path."""
        text = string.Template((CONFIG / name).read_text())
        path = self.work / name
        path.write_text(
            text.substitute(listen=str(self.listen), upstream=str(self.upstream), work=str(self.work), **more)
        )
        return str(path)


@dataclass(frozen=True)
class Scale:
    """How much load an arm can take; the figures per request and per chunk are per unit."""

    connections: int = 64
    rate: float = 500.0
    streams: int = 200
    idle_streams: int = 1000


@dataclass(frozen=True)
class Arm:
    """One proxy in one configuration."""

    name: str
    what: str
    command: Callable[[Place], list[str]]
    version: Callable[[], str]
    part: str = ""
    """Of bench.setup; empty: nothing to install."""
    env: dict[str, str] = field(default_factory=dict)
    scale: Scale = Scale()
    kinds: frozenset[str] = frozenset()
    """Of load, and memory; empty: all."""
    every_round: bool = True
    """False: every other round, where its figure needs no more."""
    start_s: float = 15.0
    beside: Callable[[Place], list[str]] | None = None
    """A program that it needs and whose CPU is not its own: it runs on the load's core, at the port `beside`."""

    def missing(self) -> str:
        """Why it is not there, empty if it is."""
        return missing(self.part)

    def takes(self, kind: str) -> bool:
        return not self.kinds or kind in self.kinds


def _said(*command: str, env: dict[str, str] | None = None, part: str = ".*") -> str:
    """The first line that a command says, stderr as good as stdout; of it what the pattern `part` finds."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **(env or {})}
    )
    lines = (done.stdout + done.stderr).strip().splitlines()
    found = re.search(part, lines[0]) if lines else None
    return found[0] if found else "unknown"


def _of_pypi(part: str, package: str) -> Callable[[], str]:
    code = f"import importlib.metadata as m; print(m.version('{package}'))"
    return lambda: f"{package} {_said(str(ROOT / part / 'bin' / 'python'), '-c', code)}"


def _direct(place: Place) -> list[str]:
    raise ValueError("the direct line starts nothing")


def sidecar(python: str, access_log: str = "off", redis: str = "local") -> Callable[[Place], list[str]]:
    """As in service: breakers, observation, metrics, admin pages, a policy; `access_log` is off or all, `redis` where
    the transaction log is, in which `{beside}` is the port of what runs beside it."""

    def command(place: Place) -> list[str]:
        options = ["--policy", place.config("sidecar.yaml"), "--admin", "127.0.0.1:0", "--control", "off"]
        options += ["--log-format", "json"]
        quick = ["--redis", redis.format(beside=place.beside), "--drain", "0s", "--settle", "0s"]
        listen = ["--listen", f"127.0.0.1:{place.listen}"]
        return [python, "-m", "sidecar", "run", *listen, *options, "--access-log", access_log, *quick]

    return command


def _shared(python: str) -> Arm:
    """The transaction log is on a Valkey of its own; nothing else happens in it."""
    return Arm(
        "sidecar-shared",
        "the same as sidecar, its transaction log on a server",
        sidecar(python, redis="redis://127.0.0.1:{beside}"),
        lambda: _said(str(valkey_binary()), "--version"),
        kinds=_SHARED,
        beside=lambda place: [str(valkey_binary()), "--port", str(place.beside), "--save", "", "--bind", "127.0.0.1"],
    )


def _sidecar_version(python: str) -> Callable[[], str]:
    """Of the package that this interpreter has, not of the sources in the folder that we are in."""
    code = (
        "import platform, importlib.metadata as m, sidecar.proxy.pipeline as p;"
        "built = 'interpreted' if p.__file__.endswith('.py') else 'compiled';"
        "print('llm-sidecar', m.version('llm-sidecar'), built, 'Python', platform.python_version())"
    )
    return lambda: _said(python, "-P", "-c", code)


def _envoy(place: Place, access_log: str = "") -> list[str]:
    config = place.config("envoy.yaml", access_log=access_log)
    fixed = ["--concurrency", "1", "--base-id", str(place.listen % 30000), "--log-level", "error"]
    return [str(_envoy_program()), "-c", config, *fixed]


def _envoy_program() -> Path:
    """The program in the package: its script in bin/ starts it as a child of an interpreter."""
    found = sorted((ROOT / "envoy").glob("lib/python3*/site-packages/envoy/_bin/envoy"))
    return found[0] if found else ROOT / "envoy" / "bin" / "envoy"


def _envoy_version() -> str:
    return f"Envoy {_said(str(_envoy_program()), '--version', part=VERSION)}"


def _envoy_log(place: Place) -> list[str]:
    return _envoy(place, ENVOY_LOG.format(path=place.work / LOG_FILE))


def _nginx(place: Place) -> list[str]:
    return [debian_program("nginx")[0], "-e", "stderr", "-p", str(place.work), "-c", place.config("nginx.conf")]


def _haproxy(place: Place) -> list[str]:
    return [debian_program("haproxy")[0], "-db", "-f", place.config("haproxy.cfg")]


def _ours(script: str) -> Callable[[Place], list[str]]:
    path = str(BENCH / script)
    return lambda place: [sys.executable, path, "--port", str(place.listen), "--upstream", str(place.upstream)]


def _python_with(package: str) -> Callable[[], str]:
    code = (
        f"import platform, importlib.metadata as m; print(m.version('{package}'), 'Python', platform.python_version())"
    )
    return lambda: f"{package} {_said(sys.executable, '-c', code)}"


def _sglang(place: Place) -> list[str]:
    ports = ["--host", "127.0.0.1", "--port", str(place.listen), "--prometheus-port", str(free_port())]
    upstream = ["--worker-urls", f"http://127.0.0.1:{place.upstream}", "--policy", "round_robin"]
    python = str(ROOT / "sglang" / "bin" / "python")
    return [python, "-m", "sglang_router.launch_router", *ports, *upstream, "--log-level", "error"]


def _litellm(place: Place) -> list[str]:
    config = place.config("litellm.yaml")
    command = [str(ROOT / "litellm" / "bin" / "litellm"), "--config", config]
    return [*command, "--host", "127.0.0.1", "--port", str(place.listen), "--num_workers", "1", "--telemetry", "False"]


_LIBRARIES = debian_program("nginx")[1]
_LOGGED = frozenset(("requests", "paced"))
_SHARED = frozenset(("requests", "paced", "streams", "memory"))
_WIDELY_USED = frozenset(("requests", "paced", "first", "streams", "memory"))

OTHERS = (
    Arm("envoy", "Envoy, one worker, plain router", _envoy, _envoy_version, "envoy"),
    Arm(
        "envoy-log",
        "the same with its text access log to a file",
        _envoy_log,
        lambda: "as envoy",
        "envoy",
        kinds=_LOGGED,
    ),
    Arm(
        "nginx",
        "nginx, one worker, no buffering of answers, no access log",
        _nginx,
        lambda: f"nginx {_said(debian_program('nginx')[0], '-v', env=_LIBRARIES, part=VERSION)}",
        "debian",
        env=_LIBRARIES,
    ),
    Arm(
        "haproxy",
        "haproxy, one thread, no log",
        _haproxy,
        lambda: f"haproxy {_said(debian_program('haproxy')[0], '-v', env=_LIBRARIES, part=VERSION)}",
        "debian",
        env=_LIBRARIES,
    ),
    Arm(
        "passthrough",
        "a relay of our design that decides nothing (bench/passthrough.py)",
        _ours("passthrough.py"),
        _python_with("uvloop"),
        kinds=_WIDELY_USED,
        every_round=False,
    ),
    Arm(
        "aiohttp",
        "aiohttp end to end, tuned (bench/aiohttp_relay.py)",
        _ours("aiohttp_relay.py"),
        _python_with("aiohttp"),
        kinds=_WIDELY_USED,
        every_round=False,
    ),
    Arm(
        "sglang-router",
        "SGLang's router (Rust), round robin, one worker",
        _sglang,
        _of_pypi("sglang", "sglang-router"),
        "sglang",
        kinds=_WIDELY_USED,
        every_round=False,
        start_s=40.0,
    ),
    Arm(
        "litellm",
        "LiteLLM's proxy, one worker, no database",
        _litellm,
        _of_pypi("litellm", "litellm"),
        "litellm",
        env={"LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1"},
        # Its core is full at some 50 requests/s, so there is no figure at 500.
        kinds=frozenset(("requests", "streams", "memory")),
        scale=Scale(connections=4, streams=4, idle_streams=50),
        every_round=False,
        start_s=90.0,
    ),
)

DIRECT = Arm("direct", "no proxy: the load at the upstream", _direct, lambda: "")


def arms(pythons: dict[str, str]) -> dict[str, Arm]:
    """All arms by name. `pythons` are the interpreters that have the sidecar: the first one's arms are `sidecar` and
    `sidecar-log`, any other's `sidecar-NAME`."""
    found = [DIRECT]
    for number, (name, python) in enumerate(pythons.items()):
        arm = "sidecar" if number == 0 else f"sidecar-{name}"
        version = _sidecar_version(python)
        what = "the sidecar, everything on, access log off"
        found.append(Arm(arm, what, sidecar(python, "off"), version))
        if number == 0:
            what = "the same with its JSON line per request, to a file"
            found.append(Arm("sidecar-log", what, sidecar(python, "all"), lambda: "as sidecar", kinds=_LOGGED))
            found.append(_shared(python))
    return {arm.name: arm for arm in (*found, *OTHERS)}
