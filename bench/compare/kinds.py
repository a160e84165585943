"""The kinds of load: how much, how long, how the upstream's streams look, and what a second of it must have.

`streams` are spread evenly, so that hardly two chunks can be read or sent together: the dearest way to relay them.
`batch` are the same in step, as the streams of one engine's batch come. `suite` has the shape of public stream suites:
streams begin and end all the time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.compare import load
from bench.compare.arms import Arm
from bench.compare.load import Window
from bench.compare.process import Process

CHUNKS_PER_S = 50
STREAMS_RAMP_S = 0.51
"""200 starts 2.55 ms apart: at 50 chunks/s no two streams tick together, as they would 2.5 ms apart."""
SUITE_DELTAS = 64
SUITE_INTERVAL_US = 20_000
SUITE_RAMP_S = 1.27
"""As long as such a stream, about, and no two tick together."""
FIRST_DELTAS = 8
FIRST_INTERVAL_US = 5_000


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


def _at_rate(arm: Arm) -> float:
    return arm.scale.rate


def _of_streams(arm: Arm) -> float:
    return arm.scale.streams * CHUNKS_PER_S


KINDS: dict[str, Kind] = {
    "requests": Kind(
        "1 KB chat requests over 64 connections, as fast as they are answered", "request", Bench.requests, lambda _: 0.0
    ),
    "paced": Kind("1 KB chat requests at 500/s", "request", Bench.paced, _at_rate),
    "first": Kind(f"streams of {FIRST_DELTAS} deltas begun at 500/s", "request", Bench.first, _at_rate),
    "streams": Kind("200 streams of 50 chunks/s of 200 bytes, evenly spread", "chunk", Bench.streams, _of_streams),
    "batch": Kind(
        "200 streams of 50 chunks/s in step, as an engine's batch gives them",
        "chunk",
        partial(Bench.streams, in_step=True),
        _of_streams,
        every_round=False,
    ),
    "suite": Kind(
        f"200 streams at a time, one after the other, each of {SUITE_DELTAS} deltas 20 ms apart",
        "chunk",
        Bench.suite,
        _of_streams,
        every_round=False,
    ),
}
"""By the name that --kinds takes."""
MEMORY = "memory"
"""No load, but asked for beside them."""
