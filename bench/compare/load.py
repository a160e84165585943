"""The load: wrk for requests as fast as they are answered, bench/native/client.c for all that is paced or streamed."""

import http.client
import json
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from bench.compare.process import Process
from bench.setup import ROOT, debian_program, missing

Options = dict[str, float | bool]
BODY_BYTES = 1024
EVENT_BYTES = 200
LIMIT_S = 180

WRK_SCRIPT = """\
local file = assert(io.open("{body}", "rb"))
local body = file:read("*a")
file:close()
local requests, count, at = {{}}, {connections}, 0
function init(args)
  for i = 1, count do
    requests[i] = wrk.format("POST", "/v1/chat/completions", {{
      ["Host"] = "engine:8000", ["user-agent"] = "bench/1", ["accept"] = "*/*", ["content-type"] = "application/json",
      ["authorization"] = "Bearer sk-bench", ["x-request-id"] = "b" .. i, ["x-session-id"] = "s" .. i,
    }}, body)
  end
end
function request()
  at = at % count + 1
  return requests[at]
end
function done(summary, latency, requests)
  local e = summary.errors
  io.write(string.format("FIGURES %d %d %d\\n", summary.requests, summary.duration,
    e.connect + e.read + e.write + e.status + e.timeout))
end
"""


@dataclass(frozen=True)
class Times:
    """Of one window, us."""

    count: int
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True)
class Window:
    """What came through in a window, and the proxy's CPU in it."""

    seconds: float
    requests: int
    deltas: int
    cpu_s: float
    load_cpu_s: float = 0.0
    streams: int = 0
    even_streams: int = 0
    """Those without a gap of more than ten intervals."""
    times: dict[str, Times] = field(default_factory=dict)
    """request_us, first_us (to the first delta), delta_us (a delta's way from the upstream to the load)."""


def write_bodies(work: Path) -> None:
    """The chat requests that are sent, with and without "stream": true, BODY_BYTES long."""
    for stream in (False, True):
        ask: dict[str, object] = {"model": "demo", "stream": stream, "max_tokens": 16, "user": "u1"}
        ask["messages"] = [{"role": "user", "content": ""}]
        fill = BODY_BYTES - len(json.dumps(ask))
        ask["messages"] = [{"role": "user", "content": ("lorem ipsum " * (fill // 12 + 1))[:fill]}]
        _body(work, stream=stream).write_text(json.dumps(ask))


def shape_streams(upstream: Process, *, deltas: int, interval_us: int, in_step: bool = False) -> None:
    """How the upstream's streams look from now on; `in_step`: all tick together, as those of an engine's batch do."""
    connection = http.client.HTTPConnection("127.0.0.1", upstream.port, timeout=5)
    knobs = f"deltas={deltas}&interval_us={interval_us}&event_bytes={EVENT_BYTES}&in_step={in_step:d}"
    connection.request("POST", f"/_bench?{knobs}", body=b"")
    status = connection.getresponse().status
    connection.close()
    if status != 200:
        raise RuntimeError(f"the upstream answered {status} to its knobs")


def wrk(proxy: Process, work: Path, *, connections: int, seconds: float, of_proxy: bool = True) -> Window:
    """Requests as fast as they are answered. wrk wants whole seconds, and its CPU window is its whole run.

    Raises RuntimeError if one request failed.
    """
    script = work / "wrk.lua"
    script.write_text(WRK_SCRIPT.format(body=_body(work, stream=False), connections=connections))
    program, env = debian_program("wrk")
    command = [program, "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "-s", str(script)]
    cpu_s = proxy.cpu_s() if of_proxy else 0.0
    said = _run([*command, f"http://127.0.0.1:{proxy.port}"], env)
    cpu_s = proxy.cpu_s() - cpu_s if of_proxy else 0.0
    found = re.search(r"^FIGURES (\d+) (\d+) (\d+)$", said, re.MULTILINE)
    if found is None or int(found[3]) or not int(found[1]):
        raise RuntimeError(f"wrk against {proxy.name}: {said.strip()[-800:]}")
    return Window(seconds=int(found[2]) / 1e6, requests=int(found[1]), deltas=0, cpu_s=cpu_s)


def wrk_missing() -> str:
    """Why there is no wrk, empty if there is."""
    return missing("debian")


def load_version() -> str:
    """What saturates."""
    if wrk_missing():
        return "bench/native/client.c, since wrk did not install"
    program, env = debian_program("wrk")
    said = subprocess.run([program, "-v"], capture_output=True, text=True, timeout=10, check=False, env=env).stdout
    found = re.search(r"^wrk \S+", said)
    return f"{found[0] if found else 'wrk'}; all else bench/native/client.c"


def client(proxy: Process, work: Path, options: Options, *, stream: bool, of_proxy: bool = True) -> Window:
    """One run of the C load; `options` are its own, by name. `of_proxy`: false for the direct line, which has no CPU.

    Raises RuntimeError, with what was wrong, if an answer was not what the upstream sent.
    """
    command = _client(proxy, work, options, stream=stream)
    if of_proxy:
        command += ["--cpu-of", ",".join(str(pid) for pid in proxy.pids())]
    figures = json.loads(_run(command))
    times = {name: Times(**figures.pop(name)) for name in ("request_us", "first_us", "delta_us") if name in figures}
    return Window(**figures, times=times)


class Held:
    """Streams that have begun and stay open; a context."""

    def __init__(self, proxy: Process, work: Path, *, streams: int, ramp_s: float) -> None:
        options: Options = {"hold": True, "connections": streams, "ramp": ramp_s, "deltas": 1_000_000}
        command = _client(proxy, work, options, stream=True)
        self._popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def __enter__(self) -> None:
        out = self._popen.stdout
        if out is None or out.readline() != b"held\n":
            raise RuntimeError(self._end() or "the streams did not begin")

    def __exit__(self, *exc: object) -> None:
        said = self._end()
        if said:
            raise RuntimeError(said)

    def _end(self) -> str:
        return self._popen.communicate(timeout=LIMIT_S)[1].decode(errors="replace").strip()


def _body(work: Path, *, stream: bool) -> Path:
    return work / ("stream.json" if stream else "post.json")


def _client(proxy: Process, work: Path, options: Options, *, stream: bool) -> list[str]:
    command = [str(ROOT / "bin" / "client"), "--port", str(proxy.port), "--body", str(_body(work, stream=stream))]
    for name, value in options.items():
        if value is not False:
            command.append(f"--{name.replace('_', '-')}")
            if value is not True:
                command.append(str(value))
    return command


def _run(command: list[str], env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=env)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name}: {(done.stderr or done.stdout).strip()[-800:]}")
    return done.stdout
