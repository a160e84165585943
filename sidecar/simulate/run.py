"""One run: a scenario, a seed, a method; the same in all three is the same to the last bit."""

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Final

from sidecar.kernel.ids import EndpointKey
from sidecar.simulate.clock import VirtualClock
from sidecar.simulate.fault import COLD_S, RELOAD_S, Fault, Kind
from sidecar.simulate.ledger import Ledger, Measures
from sidecar.simulate.method import Context, Factory, Method, keys_of
from sidecar.simulate.profile import CHAT, Profile
from sidecar.simulate.workload import TENANT_SHARE, Arrival, Modifier, rng_of, synthetic
from sidecar.simulate.world import World

WARMUP_S: Final = 120.0
SECONDS: Final = 600.0
DRAIN_S: Final = 60.0  # the last requests end: deadlines are 10 and 15 s, and each may be tried again
ZONES: Final = 3

Draw = Callable[[Random, int, float], list[Fault]]
Bend = Callable[[Random, float], list[Modifier]]


class Scenario:
    """What happens. `faults` and `modifiers` draw from the seed's numbers; the float is when measuring begins."""

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
    faults = scenario.faults(rng, pods, warmup_s) if scenario.faults is not None else []
    modifiers = scenario.modifiers(rng, warmup_s) if scenario.modifiers is not None else []
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
        _tick_at(clock, methods[number], clock.now + 1.0 + number / sidecars, end + DRAIN_S)
    told_at = clock.now
    for count, arrival in enumerate(arrivals, 1):
        at = arrival.at
        clock.run_until(at)
        ledger.arrived(arrival)
        methods[arrival.sidecar].start(arrival)
        if progress is not None and at >= told_at + 1.0:
            told_at = at
            progress(at, count)
    clock.run_until(end + DRAIN_S)
    for method in methods:
        method.close()
    return ledger.measures()


def _tick_at(clock: VirtualClock, method: Method, when: float, end: float) -> None:
    if when <= end:
        clock.at(when, _tick, clock, method, when, end)


def _tick(clock: VirtualClock, method: Method, when: float, end: float) -> None:
    method.tick(when)
    _tick_at(clock, method, when + 1.0, end)


# The thirteen scenarios of the experiment, and a reload. Four of them are no faults.


def _span(rng: Random, begin: float) -> tuple[float, float]:
    start = begin + rng.uniform(60.0, 150.0)
    return start, start + rng.uniform(150.0, 210.0)


def _on_one(kind: Kind, strength: tuple[float, float], share: tuple[float, float] = (1.0, 1.0)) -> Draw:
    def draw(rng: Random, pods: int, begin: float) -> list[Fault]:
        start, end = _span(rng, begin)
        if kind is Kind.COLD:
            end = start + COLD_S
        elif kind is Kind.RELOAD:
            end = start + RELOAD_S
        return [Fault(kind, (rng.randrange(pods),), start, end, rng.uniform(*strength), rng.uniform(*share))]

    return draw


def _zone(rng: Random, pods: int, begin: float) -> list[Fault]:
    zone = rng.randrange(min(ZONES, pods))
    hit = tuple(index for index in range(pods) if index % ZONES == zone)
    return [Fault(Kind.ZONE, hit, *_span(rng, begin), rng.uniform(0.85, 1.5))]


def _multi(rng: Random, pods: int, begin: float) -> list[Fault]:
    hit = tuple(sorted(rng.sample(range(pods), max(1, round(pods * 5 / 9)))))
    return [Fault(Kind.MULTI, hit, *_span(rng, begin), 1.0, 0.8)]


def _outage(rng: Random, pods: int, begin: float) -> list[Fault]:
    start, _ = _span(rng, begin)
    return [Fault(Kind.OUTAGE, tuple(range(pods)), start, start + 45.0)]


def _bent(kind: str, least: float, most: float) -> Bend:
    def bend(rng: Random, begin: float) -> list[Modifier]:
        start, end = _span(rng, begin)
        strength = rng.uniform(least, most)
        return [Modifier("surge" if kind == "surge" else "mix", start, end, strength)]

    return bend


def _tenant(rng: Random, begin: float) -> list[Modifier]:
    return [Modifier("tenant", *_span(rng, begin), TENANT_SHARE)]


SCENARIOS: Final = (
    Scenario("healthy"),
    Scenario("surge", modifiers=_bent("surge", 2.0, 2.6)),
    Scenario("mix", modifiers=_bent("mix", 3.0, 5.0)),
    Scenario("tenant", modifiers=_tenant),
    Scenario("step", _on_one(Kind.STEP, (3.0, 10.0))),
    Scenario("ramp", _on_one(Kind.RAMP, (4.0, 10.0))),
    Scenario("errors", _on_one(Kind.ERRORS, (1.0, 1.0), (0.3, 1.0))),
    Scenario("stall", _on_one(Kind.STALL, (1.0, 1.0), (0.2, 0.6))),
    Scenario("gray", _on_one(Kind.GRAY, (1.0, 1.0), (0.03, 0.08))),
    Scenario("cold", _on_one(Kind.COLD, (8.0, 15.0))),
    Scenario("zone", _zone),
    Scenario("multi", _multi),
    Scenario("outage", _outage),
)
RELOAD: Final = Scenario("reload", _on_one(Kind.RELOAD, (8.0, 15.0)))
BY_NAME: Final = {scenario.name: scenario for scenario in (*SCENARIOS, RELOAD)}
