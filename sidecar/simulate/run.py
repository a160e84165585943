"""One run: a scenario, a seed, a method; the same in all three is the same to the last bit."""

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Final

from sidecar.kernel.ids import EndpointKey
from sidecar.simulate.clock import VirtualClock
from sidecar.simulate.fault import Fault
from sidecar.simulate.ledger import Ledger, Measures
from sidecar.simulate.method import Context, Factory, Method, keys_of
from sidecar.simulate.profile import CHAT, Profile
from sidecar.simulate.workload import Arrival, Modifier, rng_of, synthetic
from sidecar.simulate.world import World

WARMUP_S: Final = 120.0
SECONDS: Final = 600.0
DRAIN_S: Final = 60.0  # the last requests end: deadlines are 10 and 15 s, and each may be tried again

Draw = Callable[[Random, int], list[Fault]]
Bend = Callable[[Random], list[Modifier]]


class Scenario:
    """What happens: `faults` (chance, number of engines) and `modifiers` (chance) draw it; times are the clock's.

    Measured are `seconds` after the warm-up, so nothing should be wrong before `WARMUP_S`.
    """

    __slots__ = ("faults", "modifiers", "name", "seconds")

    def __init__(
        self, name: str, faults: Draw | None = None, modifiers: Bend | None = None, seconds: float = SECONDS
    ) -> None:
        self.name = name
        self.faults = faults
        self.modifiers = modifiers
        self.seconds = seconds

    def __repr__(self) -> str:
        return f"Scenario({self.name!r})"


def simulate(
    factory: Factory,
    scenario: Scenario,
    seed: int,
    *,
    pods: int = 9,
    sidecars: int = 1,
    rate: float = 10.0,
    profile: Profile = CHAT,
    warmup_s: float = WARMUP_S,
) -> Measures:
    """Runs one scenario on `pods` engines, each with `rate` requests a second at the mean, seen by all `sidecars`."""
    rng = rng_of(seed, scenario.name)
    faults = scenario.faults(rng, pods) if scenario.faults is not None else []
    modifiers = scenario.modifiers(rng) if scenario.modifiers is not None else []
    end = warmup_s + scenario.seconds
    arrivals = synthetic(profile, rate, pods, end, seed, modifiers, sidecars=sidecars)
    clock = VirtualClock()
    world = World(clock, profile, pods, faults, seed)
    return run(factory, arrivals, world, seed, begin=warmup_s, end=end, keys=keys_of(pods), sidecars=sidecars)


def run(
    factory: Factory,
    arrivals: Iterable[Arrival],
    world: World,
    seed: int,
    *,
    begin: float,
    end: float,
    keys: Sequence[EndpointKey],
    sidecars: int = 1,
    drain_s: float = DRAIN_S,
    progress: Callable[[float, int], None] | None = None,
) -> Measures:
    """Sends `arrivals` (in order of time) through one method per sidecar; measures what arrives after `begin`.

    `progress` is told the time and the requests so far, once per simulated second.
    """
    clock = world.clock
    ledger = Ledger(world, sidecars, begin, end)
    methods: list[Method] = []
    for number in range(sidecars):
        methods.append(factory(Context(clock, world, ledger, keys, seed, number, methods)))
        _tick_at(clock, methods[number], clock.now + 1.0 + number / sidecars, end + drain_s)
    told_at = clock.now
    for count, arrival in enumerate(arrivals, 1):
        at = arrival.at
        clock.run_until(at)
        ledger.arrived(arrival)
        methods[arrival.sidecar].start(arrival)
        if progress is not None and at >= told_at + 1.0:
            told_at = at
            progress(at, count)
    clock.run_until(end + drain_s)
    for method in methods:
        method.close()
    return ledger.measures()


def _tick_at(clock: VirtualClock, method: Method, when: float, end: float) -> None:
    if when <= end:
        clock.at(when, _tick, clock, method, when, end)


def _tick(clock: VirtualClock, method: Method, when: float, end: float) -> None:
    method.tick(when)
    _tick_at(clock, method, when + 1.0, end)
