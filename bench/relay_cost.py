"""What relaying costs: CPU per request and per SSE chunk, and memory per stream, of the sidecar and of its yardsticks.

    python -m bench.relay_cost                             sidecar against the plain pass-through
    python -m bench.relay_cost --envoy PATH                ... and Envoy, one worker, no access log
    python -m bench.relay_cost --arms passthrough,envoy    those only
    python -m bench.relay_cost --memory                    memory too

How it measures, and why:

1. CPU of the proxy process (user + system, all threads, from /proc) over a window of steady load, divided by what came
   through in that window. Not latency and not throughput: those say as much about the neighbours on the machine.
2. The proxy has core 0, load and engine share core 1. All proxies run all the time; only one has load.
3. Rounds are interleaved and their order rotates: A B, B A, ... A noisy minute then hits all arms, and what is
   reported is the median over rounds of the *ratio within a round*, with its spread.
4. The load checks status, length and event counts; a failure ends the run, it is no figure. A window in which the
   streams' pace was not kept (a starved load or engine) is void: reported, and left out of every figure.

Linux only. Needs two cores that nobody else uses; the figures of a busy machine are void.
"""

import argparse
import asyncio
import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import uvloop

from bench.load import Listener, Load, PacedPoster, Poster, chat_body

PROXY_CORE = 0
LOAD_CORE = 1
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
CONNECTIONS = 64
STREAMS = 200
CHUNKS_PER_S = 50
EVENT_BYTES = 220
BODY_BYTES = 1024
MEMORY_STREAMS = 1000
START_S = 15.0

SIDECAR_POLICY = """\
apiVersion: sidecar/v1
kind: Policy
services:
  - name: bench
    endpoints: [{{url: "http://127.0.0.1:{port}"}}]
identity:
  session: [{{header: x-session-id}}, {{body: user}}]
"""

ENVOY_CONFIG = """\
static_resources:
  listeners:
  - address: {{socket_address: {{address: 127.0.0.1, port_value: {listen}}}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: bench
          stream_idle_timeout: 0s
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes: [{{match: {{prefix: "/"}}, route: {{cluster: engine, timeout: 0s}}}}]
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
  clusters:
  - name: engine
    type: STATIC
    connect_timeout: 1s
    circuit_breakers: {{thresholds: [{{max_connections: 100000, max_requests: 100000, max_pending_requests: 100000}}]}}
    load_assignment:
      cluster_name: engine
      endpoints:
      - lb_endpoints:
        - endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {upstream}}}}}}}
"""


@dataclass
class Process:
    """A child on one core, its port, and what /proc tells of it."""

    name: str
    popen: subprocess.Popen[bytes]
    port: int

    def cpu_s(self) -> float:
        """User and system time so far, all threads, s; steps of a clock tick."""
        stat = Path(f"/proc/{self.popen.pid}/stat").read_text()
        fields = stat[stat.rindex(")") + 2 :].split()
        return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS

    def rss_kib(self) -> int:
        """Resident memory, KiB."""
        for line in Path(f"/proc/{self.popen.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1])
        raise RuntimeError(f"{self.name} is gone")


@dataclass
class Sample:
    """One measured window of one arm."""

    arm: str
    kind: str
    round: int
    units: int
    seconds: float
    cpu_s: float
    void: str = ""

    @property
    def us(self) -> float:
        """CPU per unit, us."""
        return self.cpu_s / self.units * 1e6


@dataclass
class Memory:
    """Resident memory of one arm, KiB: before, with the idle streams, after they ended."""

    arm: str
    streams: int
    idle_kib: int
    held_kib: int
    after_kib: int

    @property
    def per_stream_kib(self) -> float:
        return (self.held_kib - self.idle_kib) / self.streams


@dataclass
class Report:
    """Everything that was measured."""

    cores: int
    seconds: float
    rounds: int
    samples: list[Sample] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    load: tuple[float, float, float] = (0.0, 0.0, 0.0)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


async def spawn(name: str, core: int, port: int, command: Sequence[str], log: Path) -> Process:
    """Start a child pinned to `core`; returns when its port answers. Its output goes to `log`."""
    mine = os.sched_getaffinity(0)
    with log.open("wb") as out:
        # A child inherits it. Not by preexec_fn: code between fork and exec may hang where threads hold locks.
        os.sched_setaffinity(0, {core})
        try:
            popen = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        finally:
            os.sched_setaffinity(0, mine)
    process = Process(name, popen, port)
    deadline = asyncio.get_running_loop().time() + START_S
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError as exc:
            late = asyncio.get_running_loop().time() > deadline
            if late or popen.poll() is not None:
                code = popen.poll()
                end(process)
                how = f"ended with {code}" if code is not None else f"did not listen within {START_S:g} s"
                raise SystemExit(f"{name} {how}: {log.read_text(errors='replace')[-2000:]}") from exc
            await asyncio.sleep(0.05)
        else:
            writer.close()
            return process


def end(process: Process) -> None:
    """SIGTERM, then SIGKILL after a while."""
    if process.popen.poll() is None:
        process.popen.send_signal(signal.SIGTERM)
        try:
            process.popen.wait(5)
        except subprocess.TimeoutExpired:
            process.popen.kill()
            process.popen.wait()


@contextlib.asynccontextmanager
async def fleet(arms: Sequence[str], envoy: str | None, work: Path) -> AsyncIterator[tuple[Process, list[Process]]]:
    """The engine and the proxies, running."""
    processes: list[Process] = []
    try:
        port = free_port()
        script = {"keep": 0, "tokens": 16, "event_bytes": EVENT_BYTES}
        command = [sys.executable, "-m", "sidecar.demo.engine", "--port", str(port), "--script", json.dumps(script)]
        engine = await spawn("engine", LOAD_CORE, port, command, work / "engine.log")
        processes.append(engine)
        proxies = []
        for arm in arms:
            listen = free_port()
            command = command_of(arm, listen, engine.port, envoy, work)
            process = await spawn(arm, PROXY_CORE, listen, command, work / f"{arm}.log")
            processes.append(process)
            proxies.append(process)
        yield engine, proxies
    finally:
        for process in reversed(processes):
            end(process)


def command_of(arm: str, listen: int, upstream: int, envoy: str | None, work: Path) -> list[str]:
    """How an arm is started. `sidecar` runs as in service: breakers, observation, metrics and the access log on;
    `sidecar-quiet` the same without the log."""
    if arm == "passthrough":
        return [sys.executable, "-m", "bench.passthrough", "--port", str(listen), "--upstream", str(upstream)]
    if arm in ("sidecar", "sidecar-quiet"):
        policy = work / "policy.yaml"
        policy.write_text(SIDECAR_POLICY.format(port=upstream))
        log = "off" if arm == "sidecar-quiet" else "all"
        options = ["--admin", "127.0.0.1:0", "--policy", str(policy), "--log-format", "json", "--access-log", log]
        quick = ["--drain", "0s", "--settle", "0s"]
        return [sys.executable, "-m", "sidecar", "run", "--listen", f"127.0.0.1:{listen}", *options, *quick]
    if arm == "envoy":
        if envoy is None:
            raise SystemExit("the arm envoy needs --envoy PATH")
        config = work / "envoy.yaml"
        config.write_text(ENVOY_CONFIG.format(listen=listen, upstream=upstream))
        fixed = ["--concurrency", "1", "--base-id", str(os.getpid() % 30000 + 1), "--log-level", "error"]
        return [envoy, "-c", str(config), *fixed]
    raise SystemExit(f"unknown arm {arm}: passthrough, sidecar, sidecar-quiet, envoy")


async def set_pace(engine: Process, **script: float) -> None:
    """Change the engine's script."""
    body = json.dumps(script).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
    writer.write(
        b"POST /_script HTTP/1.1\r\nhost: e\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    )
    answer = await reader.read(-1)
    writer.close()
    if not answer.startswith(b"HTTP/1.1 200 "):
        raise RuntimeError(repr(answer))


async def window(proxy: Process, count: Callable[[], int], seconds: float) -> tuple[int, float, float]:
    """Units, seconds and CPU seconds of a window of steady load."""
    loop = asyncio.get_running_loop()
    cpu, units, began = proxy.cpu_s(), count(), loop.time()
    await asyncio.sleep(seconds)
    return count() - units, loop.time() - began, proxy.cpu_s() - cpu


async def posts(engine: Process, proxy: Process, round_: int, seconds: float, *, paced: bool = False) -> Sample:
    """Kept-alive connections that post as fast as they are answered, or 500 times a second in all."""
    await set_pace(engine, token_gap_s=0.0)
    load = Load(proxy.port, PacedPoster if paced else Poster, chat_body(stream=False, max_tokens=16, size=BODY_BYTES))
    try:
        await load.open(CONNECTIONS, over_s=PacedPoster.period_s if paced else 0.0)
        await asyncio.sleep(0.5)
        units, took, cpu = await window(proxy, lambda: load.tally.requests, seconds)
    finally:
        await load.close()
    wanted = CONNECTIONS / PacedPoster.period_s * took if paced else 0.0
    void = f"{units} requests where {wanted:.0f} were due" if units < 0.95 * wanted else ""
    return checked(load, Sample(proxy.name, "paced" if paced else "request", round_, units, took, cpu, void))


async def chunks(engine: Process, proxy: Process, round_: int, seconds: float) -> Sample:
    """Paced streams."""
    await set_pace(engine, token_gap_s=1.0 / CHUNKS_PER_S)
    load = Load(proxy.port, Listener, chat_body(stream=True, max_tokens=1_000_000, size=BODY_BYTES))
    try:
        await load.open(STREAMS, over_s=1.0)
        await started(load, STREAMS)
        await asyncio.sleep(0.5)
        units, took, cpu = await window(proxy, lambda: load.tally.events, seconds)
    finally:
        await load.close()
    wanted = STREAMS * CHUNKS_PER_S * took
    void = f"{units} events where {wanted:.0f} were due" if units < 0.95 * wanted else ""
    return checked(load, Sample(proxy.name, "chunk", round_, units, took, cpu, void))


async def started(load: Load, streams: int) -> None:
    """Wait until every stream has begun."""
    deadline = asyncio.get_running_loop().time() + START_S
    while load.tally.started < streams:
        if asyncio.get_running_loop().time() > deadline or load.tally.bad:
            raise SystemExit(f"{load.tally.started} of {streams} streams began; {load.tally.failures}")
        await asyncio.sleep(0.05)


def checked(load: Load, sample: Sample) -> Sample:
    if load.tally.bad or not sample.units:
        told = f"{load.tally.bad} failures, {load.tally.failures}" if load.tally.bad else "nothing came through"
        raise SystemExit(f"{sample.arm} {sample.kind}: {told}; --keep-logs DIR keeps what it said")
    return sample


async def memory(engine: Process, proxy: Process, streams: int) -> Memory:
    """Streams that have begun and then say next to nothing: one token in five seconds, within every deadline."""
    await set_pace(engine, token_gap_s=5.0)
    load = Load(proxy.port, Listener, chat_body(stream=True, max_tokens=1_000_000, size=BODY_BYTES))
    idle = proxy.rss_kib()
    try:
        await load.open(streams, over_s=2.0)
        await started(load, streams)
        await asyncio.sleep(2.0)
        held = proxy.rss_kib()
    finally:
        await load.close()
    await asyncio.sleep(3.0)
    checked(load, Sample(proxy.name, "memory", 0, 1, 0.0, 0.0))
    return Memory(proxy.name, streams, idle, held, proxy.rss_kib())


async def measure(args: argparse.Namespace, arms: Sequence[str], work: Path, say: Callable[[str], None]) -> Report:
    report = Report(os.cpu_count() or 0, args.seconds, args.rounds)
    async with fleet(arms, args.envoy, work) as (engine, proxies):
        for proxy in proxies:
            # Once unmeasured: imports, code paths and pools are warm from the first round on.
            await posts(engine, proxy, -1, 0.5)
        if args.memory:
            # First, while heaps are small: later streams would find the room of earlier load and look free.
            for proxy in proxies:
                report.memory.append(await memory(engine, proxy, MEMORY_STREAMS))
        for round_ in range(args.rounds):
            turn = proxies[round_ % len(proxies) :] + proxies[: round_ % len(proxies)]
            for kind in args.kinds.split(","):
                for proxy in turn:
                    report.samples.append(await KINDS[kind](engine, proxy, round_, args.seconds))
                    say(line(report.samples[-1]))
    report.load = os.getloadavg()
    return report


KINDS: dict[str, Callable[[Process, Process, int, float], Coroutine[None, None, Sample]]] = {
    "request": posts,
    "paced": partial(posts, paced=True),
    "chunk": chunks,
}


def line(sample: Sample) -> str:
    rate = sample.units / sample.seconds
    share = sample.cpu_s / sample.seconds
    return (
        f"round {sample.round} {sample.arm:<14} {sample.us:7.1f} us/{sample.kind:<8}"
        f"{rate:9.0f}/s  {share:5.0%} of a core{'  VOID: ' + sample.void if sample.void else ''}"
    )


def ratios(report: Report, kind: str, arm: str, base: str) -> list[float]:
    """CPU per unit of `arm` over that of `base`, round by round."""
    of = {(s.round, s.arm): s.us for s in report.samples if s.kind == kind and not s.void}
    return [of[r, arm] / of[r, base] for r in range(report.rounds) if (r, arm) in of and (r, base) in of]


def table(report: Report, arms: Sequence[str]) -> str:
    """The figures as text."""
    lines = [f"{'arm':<14} {'kind':<8} {'us':>8} {'min':>8} {'max':>8} {'per s':>9}"]
    for kind in KINDS:
        for arm in arms:
            mine = [s for s in report.samples if s.kind == kind and s.arm == arm and not s.void]
            if mine:
                us = [s.us for s in mine]
                rate = statistics.median(s.units / s.seconds for s in mine)
                lines.append(
                    f"{arm:<14} {kind:<8} {statistics.median(us):8.1f} {min(us):8.1f} {max(us):8.1f} {rate:9.0f}"
                )
    lines.append("")
    for base in [name for name in ("passthrough", "envoy") if name in arms]:
        for arm in [name for name in arms if name != base]:
            for kind in KINDS:
                found = ratios(report, kind, arm, base)
                if found:
                    lines.append(
                        f"{arm} / {base}, CPU per {kind}: {statistics.median(found):.2f}"
                        f"  (rounds {min(found):.2f} to {max(found):.2f})"
                    )
    for held in report.memory:
        lines.append(
            f"{held.arm:<14} RSS {held.idle_kib / 1024:.1f} MB, with {held.streams} idle streams"
            f" {held.held_kib / 1024:.1f} MB = {held.per_stream_kib:.1f} KB each, after {held.after_kib / 1024:.1f} MB"
        )
    void = sum(1 for sample in report.samples if sample.void)
    lines.append(f"{void} of {len(report.samples)} windows void")
    lines.append(f"load average {report.load[0]:.2f} on {report.cores} cores, windows of {report.seconds:g} s")
    return "\n".join(lines)


def as_json(report: Report, arms: Sequence[str]) -> str:
    """Everything, with the ratios worked out."""
    said: dict[str, object] = asdict(report)
    said["ratios"] = [
        {"arm": arm, "base": base, "kind": kind, "rounds": found, "median": statistics.median(found)}
        for base in ("passthrough", "envoy")
        for arm in arms
        for kind in KINDS
        if arm != base and (found := ratios(report, kind, arm, base))
    ]
    return json.dumps(said, indent=1)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.relay_cost", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", default="", help="default passthrough,sidecar and, with --envoy, envoy")
    parser.add_argument("--envoy", metavar="PATH", help="an Envoy binary: the third arm")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of load, default %(default)s")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measured window")
    parser.add_argument("--memory", action="store_true", help=f"{MEMORY_STREAMS} idle streams too")
    parser.add_argument("--json", action="store_true", help="figures as JSON on stdout, progress on stderr")
    parser.add_argument("--keep-logs", metavar="DIR", help="where the children's output goes")
    args = parser.parse_args(argv)
    arms = [arm for arm in args.arms.split(",") if arm] or [
        "passthrough",
        "sidecar",
        *(["envoy"] if args.envoy else []),
    ]
    if unknown := set(args.kinds.split(",")) - set(KINDS):
        parser.error(f"unknown kinds of load: {', '.join(sorted(unknown))}")
    if not {PROXY_CORE, LOAD_CORE} <= os.sched_getaffinity(0):
        parser.error(f"needs cores {PROXY_CORE} and {LOAD_CORE}")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
    os.sched_setaffinity(0, {LOAD_CORE})
    work = Path(tempfile.mkdtemp(prefix="relay-cost-"))
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            report = runner.run(measure(args, arms, work, lambda text: print(text, file=sys.stderr, flush=True)))
    finally:
        if args.keep_logs:
            shutil.copytree(work, args.keep_logs, dirs_exist_ok=True)
        shutil.rmtree(work)
    print(as_json(report, arms) if args.json else table(report, arms))
    return 0


if __name__ == "__main__":
    sys.exit(main())
