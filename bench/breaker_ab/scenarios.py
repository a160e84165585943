"""What goes wrong, and what only looks like it: the 13 scenarios of the design, a model's reload, and several bad pods.

A run is 120 s to learn in and 600 s that are measured. Each fault takes 150-210 s (a cold start what it takes, an
outage of all 45 s); where one pod is struck, a second is in the same run's second half, so that a run has two episodes.
Not faults: healthy, surge, mix, tenant. Seeds for tuning and seeds for evaluation are apart, and no number of the
product or of an arm was chosen by looking at the latter.
"""

from collections.abc import Callable
from random import Random

from sidecar.simulate.fault import COLD_S, RELOAD_S, Fault, Kind
from sidecar.simulate.run import Scenario
from sidecar.simulate.workload import Modifier

TUNING, EVALUATION = range(1, 100), range(101, 1000)
BEGIN_S, END_S = 120.0, 720.0
FIRST_S, SECOND_S, LATEST_S = 150.0, 440.0, 40.0
"""A fault begins up to `LATEST_S` after the first or the second moment: between two there is time to recover."""
OUTAGE_S = 45.0
BAD_OF_NINE = 5 / 9

Make = Callable[[Random, tuple[int, ...], float], Fault]
"""chance, pods, begin."""


def _lasting(chance: Random) -> float:
    return chance.uniform(150.0, 210.0)


def _step(chance: Random, pods: tuple[int, ...], begin: float) -> Fault:
    return Fault(Kind.STEP, pods, begin, begin + _lasting(chance), chance.uniform(3.0, 10.0))


def _ramp(chance: Random, pods: tuple[int, ...], begin: float) -> Fault:
    return Fault(Kind.RAMP, pods, begin, begin + _lasting(chance), chance.uniform(4.0, 10.0))


def _errors(chance: Random, pods: tuple[int, ...], begin: float) -> Fault:
    return Fault(Kind.ERRORS, pods, begin, begin + _lasting(chance), share=chance.uniform(0.3, 1.0))


def _stall(chance: Random, pods: tuple[int, ...], begin: float) -> Fault:
    return Fault(Kind.STALL, pods, begin, begin + _lasting(chance), share=chance.uniform(0.2, 0.6))


def _gray(chance: Random, pods: tuple[int, ...], begin: float) -> Fault:
    return Fault(Kind.GRAY, pods, begin, begin + _lasting(chance), share=chance.uniform(0.03, 0.08))


def _cold(chance: Random, pods: tuple[int, ...], begin: float) -> Fault:
    return Fault(Kind.COLD, pods, begin, begin + COLD_S, chance.uniform(8.0, 15.0))


def _reload(chance: Random, pods: tuple[int, ...], begin: float) -> Fault:
    return Fault(Kind.RELOAD, pods, begin, begin + RELOAD_S, chance.uniform(8.0, 15.0))


def _pair(make: Make) -> Callable[[Random, int], list[Fault]]:
    """Two pods, one after the other; the only one twice."""

    def faults(chance: Random, pods: int) -> list[Fault]:
        struck = chance.sample(range(pods), 2) if pods > 1 else [0, 0]
        begins = [moment + chance.uniform(0.0, LATEST_S) for moment in (FIRST_S, SECOND_S)]
        return [make(chance, (pod,), begin) for pod, begin in zip(struck, begins, strict=True)]

    return faults


def _zone(chance: Random, pods: int) -> list[Fault]:
    """The pods of one of the three zones, 850-1500 ms later."""
    zone, begin = chance.randrange(min(3, pods)), FIRST_S + chance.uniform(0.0, LATEST_S)
    struck = tuple(range(zone, pods, 3))
    return [Fault(Kind.ZONE, struck, begin, begin + _lasting(chance), chance.uniform(0.85, 1.5))]


def _multi(chance: Random, pods: int) -> list[Fault]:
    """5 of 9 fail 80 %."""
    struck = tuple(sorted(chance.sample(range(pods), max(1, round(BAD_OF_NINE * pods)))))
    begin = FIRST_S + chance.uniform(0.0, LATEST_S)
    return [Fault(Kind.MULTI, struck, begin, begin + _lasting(chance), share=0.8)]


def _outage(chance: Random, pods: int) -> list[Fault]:
    begin = FIRST_S + chance.uniform(0.0, LATEST_S)
    return [Fault(Kind.OUTAGE, tuple(range(pods)), begin, begin + OUTAGE_S)]


def _several(chance: Random, pods: int) -> list[Fault]:
    """All pods but one (of three: two), one slow and the others failing, at nearly the same time."""
    struck = chance.sample(range(pods), max(1, pods - 1))
    begin = FIRST_S + chance.uniform(0.0, LATEST_S)
    made = [_step(chance, (struck[0],), begin)]
    return made + [_errors(chance, (pod,), begin + chance.uniform(0.0, 10.0)) for pod in struck[1:]]


def _surge(chance: Random) -> list[Modifier]:
    begin = FIRST_S + chance.uniform(0.0, LATEST_S)
    return [Modifier("surge", begin, begin + _lasting(chance), chance.uniform(2.0, 2.6))]


def _mix(chance: Random) -> list[Modifier]:
    begin = FIRST_S + chance.uniform(0.0, LATEST_S)
    return [Modifier("mix", begin, begin + _lasting(chance), chance.uniform(3.0, 5.0))]


def _tenant(chance: Random) -> list[Modifier]:
    return [Modifier("tenant", FIRST_S, END_S, 0.04)]


_MADE = (
    Scenario("step", _pair(_step)),
    Scenario("ramp", _pair(_ramp)),
    Scenario("errors", _pair(_errors)),
    Scenario("stall", _pair(_stall)),
    Scenario("gray", _pair(_gray)),
    Scenario("cold", _pair(_cold)),
    Scenario("zone", _zone),
    Scenario("multi", _multi),
    Scenario("outage", _outage),
    Scenario("healthy"),
    Scenario("surge", modifiers=_surge),
    Scenario("mix", modifiers=_mix),
    Scenario("tenant", modifiers=_tenant),
    Scenario("reload", _pair(_reload)),
    Scenario("several", _several),
)
SCENARIOS = {scenario.name: scenario for scenario in _MADE}
THIRTEEN = tuple(SCENARIOS)[:13]
"""The design's own; the table over all of them is compared with its table."""
QUIET = ("healthy", "surge", "mix", "tenant")
"""Nothing is wrong in these."""
