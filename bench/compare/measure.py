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
from dataclasses import dataclass, replace
from pathlib import Path

from bench.compare import load
from bench.compare.arms import Arm, Place
from bench.compare.kinds import KINDS, MEMORY, Bench
from bench.compare.process import NotStarted, Process, core_busy_s, free_port, spawn
from bench.compare.results import Memory, Results, Sample
from bench.setup import ROOT

VOID_BELOW = 0.95
"""Of what was due."""
NOISY = 0.1
"""Of the proxy's core: more than that of it taken by others is told at once."""


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
                windows = schedule(plan, list(proxies), kinds)
                for done, (number, kind, name) in enumerate(windows, start=1):
                    sample = _sample(bench, plan, number, kind, proxies[name])
                    results.samples.append(sample)
                    say(f"{done:>4} of {len(windows)}  {_line(sample)}")
    finally:
        upstream.end()


def schedule(plan: Plan, arms: Sequence[str], kinds: Sequence[str]) -> list[tuple[int, str, str]]:
    """Every window in its order: round, kind of load, arm."""
    windows = []
    for number in range(plan.rounds):
        turn = [*arms[number % len(arms) :], *arms[: number % len(arms)]]
        for kind in kinds:
            for name in turn:
                arm = plan.arms[name]
                if arm.takes(kind) and (number % 2 == 0 or (arm.every_round and KINDS[kind].every_round)):
                    windows.append((number, kind, name))
    return windows


def _sample(bench: Bench, plan: Plan, number: int, name: str, proxy: Process) -> Sample:
    arm, kind = plan.arms[proxy.name], KINDS[name]
    began, busy = time.monotonic(), core_busy_s(plan.proxy_core) - _used(bench, proxy)
    window = kind.run(bench, arm, proxy, plan.seconds)
    busy = core_busy_s(plan.proxy_core) - _used(bench, proxy) - busy
    others = max(0.0, busy / (time.monotonic() - began))
    sample = Sample(arm.name, name, number, window, kind.unit, others=others)
    # One less where few are due: which side of the window's edge a unit falls on is chance.
    due = kind.due_per_s(arm) * window.seconds
    if sample.units < max(1, VOID_BELOW * due - 1):
        return replace(sample, void=f"{sample.units} came where {due:.0f} were due")
    return sample


def _used(bench: Bench, proxy: Process) -> float:
    """CPU of the proxy's core that is the proxy's; the direct line has none there."""
    return 0.0 if proxy is bench.upstream else proxy.cpu_s()


def _spawn_upstream(plan: Plan, work: Path) -> Process:
    port = free_port()
    folder = work / "upstream"
    folder.mkdir()
    return spawn("direct", plan.load_core, port, [str(ROOT / "bin" / "upstream"), str(port)], folder)


def _start(plan: Plan, arm: Arm, upstream: Process, folder: Path) -> Process:
    folder.mkdir()
    if arm.beside is None:
        return _start_at(plan, arm, Place(free_port(), upstream.port, folder))
    place = Place(free_port(), upstream.port, folder, free_port())
    work = folder / "beside"
    work.mkdir()
    beside = spawn(f"{arm.name}'s server", plan.load_core, place.beside, arm.beside(place), work)
    try:
        process = _start_at(plan, arm, place)
    except NotStarted:
        beside.end()
        raise
    process.beside = beside
    return process


def _start_at(plan: Plan, arm: Arm, place: Place) -> Process:
    command = arm.command(place)
    return spawn(arm.name, plan.proxy_core, place.listen, command, place.work, env=arm.env, within_s=arm.start_s)


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
def _fleet(bench: Bench, plan: Plan, results: Results, say: Callable[[str], None]) -> Iterator[dict[str, Process]]:
    """All arms, running and warm: imports, code paths and pools are there before the first window."""
    proxies: dict[str, Process] = {}
    try:
        for arm in plan.arms.values():
            if arm.name == "direct":
                proxies[arm.name] = bench.upstream
            elif arm.name not in results.missing:
                say(f"starting {arm.name}")
                with _or_left_out(arm, results, say):
                    proxies[arm.name] = _start(plan, arm, bench.upstream, bench.work / arm.name)
                    _warm(bench, arm, proxies[arm.name])
        yield proxies
    finally:
        for process in proxies.values():
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
    if sample.others > NOISY:
        said += f"  others {sample.others:.0%}"
    return said + (f"  VOID: {sample.void}" if sample.void else "")


def _memory_line(memory: Memory) -> str:
    return (
        f"memory {memory.arm:<14} idle {memory.idle_kib / 1024:.1f} MB, warm {memory.warm_kib / 1024:.1f} MB,"
        f" {memory.streams} idle streams {memory.held_kib / 1024:.1f} MB = {memory.per_stream_kib:.1f} KB each"
    )
