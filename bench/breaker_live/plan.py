"""What is run: engines, traffic, the faults and their times, the policies; the same for every arm.

Traffic and luck are the simulator's, drawn from the seed: who comes when, how long prompts and answers are, whom a
fault strikes. The last by the request's id (`sidecar.demo.script.luck`), which engine and clients can both tell.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import cos, pi
from typing import Any

from bench.breaker_ab.arms import GAP_S, TTFT_S
from sidecar.demo import script as demo
from sidecar.simulate.clock import VirtualClock
from sidecar.simulate.fault import Fate, Fault, Kind
from sidecar.simulate.profile import Profile
from sidecar.simulate.workload import DAY_S, SWING, Arrival, rng_of, synthetic
from sidecar.simulate.world import SLOW, World

MODEL = "live"
PODS = 6
RATE = 36.0  # requests a second in all: half of a core for the sidecar, so that two do for everything
SECONDS = 180.0
SESSIONS_PER_POD = 25
STALL_AFTER = 3  # tokens: later than a late first token, so that only the silence tells
FACTOR, SHARE = 5.0, 0.5

PROFILE = Profile(
    name="live",
    prompt_median=512.0,
    prompt_sigma=1.0,
    prompt_max=8192,
    output_median=20.0,
    output_sigma=0.4,
    output_max=60,
    stragglers=0.0,
    errors=0.0,
    pauses=0.0,
)
"""No luck but the faults': stragglers and pauses are the machine's own here."""

SCRIPT = demo.Script(
    first_token_s=0.2,
    first_token_per_live_s=0.002,
    first_token_per_prompt_token_s=0.0001,
    spread=PROFILE.noise_sigma,
    token_gap_s=0.025,
    models=(MODEL,),
    keep=0,
)
"""Ten prompt tokens a millisecond, as in the simulator; the rest slow enough that five times as slow misses the SLO."""


@dataclass(frozen=True)
class Timeline:
    """A sixth to learn, then each fault for a fifth, and some time after it to recover: 30 s, 36 s and 14 s of 180."""

    seconds: float

    @property
    def warmup_s(self) -> float:
        return self.seconds / 6

    def faults(self, seed: int) -> list[Fault]:
        """Slow, stalling, failing, each on an engine of its own."""
        step, slow, stalling, failing = self.seconds * 5 / 18, *rng_of(seed, "live faults").sample(range(PODS), 3)
        faults = []
        for number, (kind, pod) in enumerate([(Kind.STEP, slow), (Kind.STALL, stalling), (Kind.ERRORS, failing)]):
            begin = self.warmup_s + number * step
            strength, share = (FACTOR, 1.0) if kind is Kind.STEP else (1.0, SHARE)
            faults.append(Fault(kind, (pod,), begin, begin + self.seconds / 5, strength, share))
        return faults


def world(timeline: Timeline, seed: int) -> World:
    """The simulator's, for what it knows of faults: nothing is sent there. Its clock is towed by the wall's."""
    return World(VirtualClock(), PROFILE, PODS, timeline.faults(seed), seed)


def arrivals(timeline: Timeline, rate: float, seed: int) -> Iterator[Arrival]:
    """All requests of a run, `rate` a second in all, at the mean of the run: it is a part of the simulator's day."""
    turn = 2.0 * pi * timeline.seconds / DAY_S
    busier = 1.0 + SWING * (1.0 - cos(turn)) / turn
    for arrival in synthetic(PROFILE, rate / busier / PODS, PODS, timeline.seconds, seed):
        arrival.fault_u = demo.luck(request_id(seed, arrival), "fault")
        yield arrival


def request_id(seed: int, arrival: Arrival) -> str:
    return f"live-{seed}-{arrival.id}"


def struck_on(world: World, arrival: Arrival) -> set[int]:
    """The engines whose fault would bite the request if it were sent there now."""
    now, u, v = world.clock.now, arrival.fault_u, arrival.fault_v
    return {
        pod.index
        for pod in world.pods
        for fault in pod.active
        if fault.fate(u, v, now) is not Fate.SERVE or fault.slowness(now) >= SLOW
    }


def engines_fault(fault: Fault) -> demo.Fault:
    """What the simulated engine is told."""
    match fault.kind:
        case Kind.STEP:
            return demo.Fault(demo.Kind.SLOW, factor=fault.strength, share=fault.share)
        case Kind.STALL:
            return demo.Fault(demo.Kind.STALL, after=STALL_AFTER, share=fault.share)
        case Kind.ERRORS:
            return demo.Fault(demo.Kind.STATUS, status=500, share=fault.share)
        case _:
            raise ValueError(f"no engine here can do {fault.kind}")


@dataclass(frozen=True)
class Arm:
    """A policy: members of its service beside endpoints and deadlines. Nothing is sent twice unless it says so."""

    name: str
    what: str
    service: Mapping[str, Any] = field(default_factory=dict)

    def policy(self, keys: Sequence[str]) -> str:
        """The file, for engines at `keys` (`host:port`). JSON is YAML."""
        service = {
            "name": MODEL,
            "endpoints": [{"url": f"http://{key}"} for key in keys],
            "deadlines": {"head": f"{TTFT_S:g}s", "first_token": f"{TTFT_S:g}s", "token_gap": f"{GAP_S:g}s"},
            "retry": {"attempts": 1},
            "hedge": {"mode": "off"},
            **self.service,
        }
        return json.dumps({"apiVersion": "sidecar/v1", "kind": "Policy", "services": [service]}, indent=1)


_OFF = {"node": {"mode": "off"}, "session": {"mode": "off"}, "request": {"mode": "off", "poison": {"mode": "off"}}}

ARMS = {
    arm.name: arm
    for arm in (
        Arm("ours", "the product's adaptive breaker, nothing sent twice"),
        Arm("none", "the same sidecar, all breakers off", {"breakers": _OFF}),
        Arm("none+retry", "breakers off, three attempts", {"breakers": _OFF, "retry": {"attempts": 3}}),
        Arm("ours-fixed", "the product's fixed rules alone", {"breakers": {"node": {"adaptive": False}}}),
        Arm(
            "ours+rescue",
            "ours, with retries and hedges before the first byte",
            {"retry": {"attempts": 3}, "hedge": {"mode": "enforce"}},
        ),
    )
}
