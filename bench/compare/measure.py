"""The run: every arm under every kind of load, round by round.

1. The proxy has one core, load and upstream share another. All proxies run all the time; only one has load.
2. Rounds are interleaved and their order rotates: A B C, B C A, ... A noisy minute then hits all arms alike.
3. CPU is the proxy's alone, user and system, all its threads and children, over a window of steady load.
4. Memory comes first, each arm started anew for it: heaps that earlier load has grown would make streams look free.
5. Every answer is checked to its last byte; one that is not whole ends the run, it is no figure. A window in which the
   pace was not kept is void.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.compare import load
from bench.compare.arms import Arm, Place
from bench.compare.load import Window
from bench.compare.process import NotStarted, Process, free_port, spawn
from bench.compare.results import Memory, Results, Sample
from bench.setup import ROOT

CHUNKS_PER_S = 50
STREAMS_RAMP_S = 0.51
"""200 starts 2.55 ms apart: at 50 chunks/s no two streams tick together, as they would 2.5 ms apart."""
SUITE_DELTAS = 64
SUITE_INTERVAL_US = 20_000
SUITE_RAMP_S = 1.27
"""As long as such a stream, about, and no two tick together."""
FIRST_DELTAS = 8
FIRST_INTERVAL_US = 5_000
VOID_BELOW = 0.95
"""Of what was due."""


@dataclass(frozen=True)
class Kind:
    """A kind of load."""

    what: str
    unit: str
    run: Callable[["Bench", Arm, Process, float], Window]
    due_per_s: Callable[[Arm], float]
    """Units that a second must have; 0: as many as come."""
    every_round: bool = True


@dataclass
class Bench:
    """What all windows share."""

    upstream: Process
    work: Path
    with_wrk: bool

    def requests(self, arm: Arm, proxy: Process, seconds: float) -> Window:
        if self.with_wrk:
            return load.wrk(
                proxy, self.work, connections=arm.scale.connections, seconds=seconds, of_proxy=self._has_cpu(proxy)
            )
        return self._client(proxy, {"connections": arm.scale.connections, "seconds": seconds})

    def paced(self, arm: Arm, proxy: Process, seconds: float) -> Window:
        options = {"connections": arm.scale.connections, "rate": arm.scale.rate, "seconds": seconds}
        return self._client(proxy, options)

    def first(self, arm: Arm, proxy: Process, seconds: float) -> Window:
        load.shape_streams(self.upstream, deltas=FIRST_DELTAS, interval_us=FIRST_INTERVAL_US)
        options: load.Options = {"deltas": FIRST_DELTAS, "interval_us": FIRST_INTERVAL_US, "rate": arm.scale.rate}
        options |= {"connections": arm.scale.connections, "seconds": seconds}
        return self._client(proxy, options)

    def streams(self, arm: Arm, proxy: Process, seconds: float, *, in_step: bool = False) -> Window:
        """Each stream lasts from the ramp to beyond the window, so that all of them are in all of it."""
        warm = STREAMS_RAMP_S + 0.4
        deltas, interval_us = round(CHUNKS_PER_S * (warm + seconds + 0.2)), 1_000_000 // CHUNKS_PER_S
        load.shape_streams(self.upstream, deltas=deltas, interval_us=interval_us, in_step=in_step)
        options: load.Options = {"deltas": deltas, "interval_us": interval_us, "warm": warm, "ramp": STREAMS_RAMP_S}
        options |= {"once": True, "connections": arm.scale.streams, "seconds": seconds}
        return self._client(proxy, options)

    def suite(self, arm: Arm, proxy: Process, seconds: float) -> Window:
        """Streams that follow one another, spread so that none begins with another."""
        load.shape_streams(self.upstream, deltas=SUITE_DELTAS, interval_us=SUITE_INTERVAL_US)
        options: load.Options = {"deltas": SUITE_DELTAS, "interval_us": SUITE_INTERVAL_US, "ramp": SUITE_RAMP_S}
        options |= {"warm": SUITE_RAMP_S + 0.1, "connections": arm.scale.streams, "seconds": seconds}
        return self._client(proxy, options)

    def _client(self, proxy: Process, options: load.Options) -> Window:
        return load.client(proxy, self.work, options, stream="deltas" in options, of_proxy=self._has_cpu(proxy))

    def _has_cpu(self, proxy: Process) -> bool:
        """The direct line's would be the upstream's."""
        return proxy is not self.upstream


KINDS: dict[str, Kind] = {
    "requests": Kind("1 KB chat requests, 64 connections, as fast as answered", "request", Bench.requests, lambda _: 0),
    "paced": Kind("the same at 500 requests/s", "request", Bench.paced, lambda arm: arm.scale.rate),
    "first": Kind(
        f"streams of {FIRST_DELTAS} deltas begun at 500/s", "request", Bench.first, lambda arm: arm.scale.rate
    ),
    "streams": Kind(
        "200 streams of 50 chunks/s, 200 bytes each",
        "chunk",
        Bench.streams,
        lambda arm: arm.scale.streams * CHUNKS_PER_S,
    ),
    "batch": Kind(
        "the same streams in step, as an engine's batch gives them",
        "chunk",
        partial(Bench.streams, in_step=True),
        lambda arm: arm.scale.streams * CHUNKS_PER_S,
        every_round=False,
    ),
    "suite": Kind(
        f"200 streams at a time of {SUITE_DELTAS} deltas, one each 20 ms",
        "chunk",
        Bench.suite,
        lambda arm: arm.scale.streams * 1e6 / SUITE_INTERVAL_US,
        every_round=False,
    ),
}
MEMORY = "memory"


@dataclass
class Plan:
    """What to run."""

    arms: Mapping[str, Arm]
    kinds: Sequence[str]
    rounds: int
    seconds: float
    proxy_core: int
    load_core: int


def measure(plan: Plan, results: Results, work: Path, say: Callable[[str], None]) -> None:
    """Fills `results` as it goes. RuntimeError ends the run: an answer was not what the upstream sent, or an arm did
    not start; what was measured before stays in `results`."""
    load.write_bodies(work)
    os.sched_setaffinity(0, {plan.load_core})
    upstream = _spawn_upstream(plan, work)
    try:
        bench = Bench(upstream, work, with_wrk=not load.wrk_missing())
        if MEMORY in plan.kinds:
            for arm in plan.arms.values():
                if arm.name != "direct" and arm.takes(MEMORY):
                    with _or_left_out(arm, results, say):
                        results.memory.append(_memory(bench, plan, arm))
                        say(_memory_line(results.memory[-1]))
        kinds = [kind for kind in KINDS if kind in plan.kinds]
        if kinds:
            with _fleet(bench, plan, results, say) as proxies:
                _rounds(bench, plan, proxies, kinds, results, say)
    finally:
        upstream.end()


def _rounds(
    bench: Bench,
    plan: Plan,
    proxies: list[Process],
    kinds: Sequence[str],
    results: Results,
    say: Callable[[str], None],
) -> None:
    for number in range(plan.rounds):
        turn = proxies[number % len(proxies) :] + proxies[: number % len(proxies)]
        for name in kinds:
            kind = KINDS[name]
            for proxy in turn:
                arm = plan.arms[proxy.name]
                if not arm.takes(name) or not (number % 2 == 0 or (arm.every_round and kind.every_round)):
                    continue
                window = kind.run(bench, arm, proxy, plan.seconds)
                results.samples.append(_sample(arm, name, number, window))
                say(_line(results.samples[-1]))


def _sample(arm: Arm, kind: str, number: int, window: Window) -> Sample:
    sample = Sample(arm.name, kind, number, window, KINDS[kind].unit)
    due = KINDS[kind].due_per_s(arm) * window.seconds
    # One less where few are due: which side of the window's edge a unit falls on is chance.
    if sample.units < max(1, VOID_BELOW * due - 1):
        return Sample(arm.name, kind, number, window, sample.unit, f"{sample.units} came where {due:.0f} were due")
    return sample


def _spawn_upstream(plan: Plan, work: Path) -> Process:
    port = free_port()
    folder = work / "upstream"
    folder.mkdir()
    return spawn("direct", plan.load_core, port, [str(ROOT / "bin" / "upstream"), str(port)], folder)


def _start(plan: Plan, arm: Arm, upstream: Process, folder: Path) -> Process:
    folder.mkdir()
    place = Place(free_port(), upstream.port, folder)
    command = arm.command(place)
    return spawn(arm.name, plan.proxy_core, place.listen, command, folder, env=arm.env, within_s=arm.start_s)


@contextlib.contextmanager
def _or_left_out(arm: Arm, results: Results, say: Callable[[str], None]) -> Iterator[None]:
    """What others made may not run here: then its arm is left out, with the reason. Ours must."""
    try:
        yield
    except NotStarted as exc:
        if not arm.part:
            raise
        results.missing[arm.name] = f"did not start: {str(exc).splitlines()[0]}"
        results.arms.pop(arm.name, None)
        say(str(exc))


@contextlib.contextmanager
def _fleet(bench: Bench, plan: Plan, results: Results, say: Callable[[str], None]) -> Iterator[list[Process]]:
    """All arms, running and warm: imports, code paths and pools are there before the first window."""
    proxies: list[Process] = []
    try:
        for arm in plan.arms.values():
            if arm.name == "direct":
                proxies.append(bench.upstream)
            elif arm.name not in results.missing:
                say(f"starting {arm.name}")
                with _or_left_out(arm, results, say):
                    proxies.append(_start(plan, arm, bench.upstream, bench.work / arm.name))
                    _warm(bench, arm, proxies[-1])
        yield proxies
    finally:
        for process in proxies:
            if process is not bench.upstream:
                process.end()


def _warm(bench: Bench, arm: Arm, proxy: Process) -> None:
    """Requests and streams, unmeasured, until the first was answered: a router may know its workers only in a while."""
    deadline = time.monotonic() + arm.start_s
    load.shape_streams(bench.upstream, deltas=4, interval_us=1000)
    once: load.Options = {"connections": min(arm.scale.connections, 16), "warm": 0.0, "once": True, "seconds": 0.1}
    while True:
        try:
            load.client(proxy, bench.work, once, stream=False)
            break
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
    load.client(proxy, bench.work, {**once, "deltas": 4, "interval_us": 1000}, stream=True)
    load.client(proxy, bench.work, {"connections": arm.scale.connections, "seconds": 0.5}, stream=False)


def _memory(bench: Bench, plan: Plan, arm: Arm) -> Memory:
    """Streams that have begun and then say next to nothing: a delta in five seconds, within every deadline."""
    proxy = _start(plan, arm, bench.upstream, bench.work / f"{arm.name}-memory")
    try:
        time.sleep(1.0)
        idle = proxy.rss_kib()
        _warm(bench, arm, proxy)
        load.shape_streams(bench.upstream, deltas=999_999, interval_us=5_000_000)
        time.sleep(0.5)
        warm = proxy.rss_kib()
        streams = arm.scale.idle_streams
        with load.Held(proxy, bench.work, streams=streams, ramp_s=max(1.0, streams / 1000)):
            time.sleep(1.0)
            held = proxy.rss_kib()
    finally:
        proxy.end()
    return Memory(arm.name, streams, idle, warm, held)


def _line(sample: Sample) -> str:
    said = f"round {sample.round} {sample.kind:<9}{sample.arm:<14}"
    if sample.window.cpu_s:
        said += f"{sample.us:8.1f} us/{sample.unit:<8}{sample.core_share:5.0%} of a core"
    else:
        said += f"{'':8}   {'':<8}{'':15}"
    said += f"{sample.per_s:9.0f}/s"
    for name, times in sample.window.times.items():
        said += f"  {name.removesuffix('_us')} {times.p50:.0f}/{times.p99:.0f} us"
    return said + (f"  VOID: {sample.void}" if sample.void else "")


def _memory_line(memory: Memory) -> str:
    return (
        f"memory {memory.arm:<14} idle {memory.idle_kib / 1024:.1f} MB, warm {memory.warm_kib / 1024:.1f} MB,"
        f" {memory.streams} idle streams {memory.held_kib / 1024:.1f} MB = {memory.per_stream_kib:.1f} KB each"
    )
