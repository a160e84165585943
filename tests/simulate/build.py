"""Worlds and requests with nothing left to chance."""

from sidecar.simulate.clock import VirtualClock
from sidecar.simulate.fault import Fault
from sidecar.simulate.profile import Profile
from sidecar.simulate.workload import Arrival
from sidecar.simulate.world import Flight, World

EVEN = Profile(
    name="even",
    prompt_median=100.0,
    prompt_sigma=0.0,
    prompt_max=8192,
    output_median=10.0,
    output_sigma=0.0,
    output_max=400,
    noise_sigma=0.0,
    speed_sigma=0.0,
    slots=2,
    stragglers=0.0,
    errors=0.0,
    pauses=0.0,
)
"""No noise, engines of one speed, two slots each."""


def world_of(*faults: Fault, pods: int = 3, profile: Profile = EVEN) -> World:
    return World(VirtualClock(), profile, pods, faults, 1)


def arrival_of(
    number: int = 1,
    at: float = 0.0,
    *,
    prompt: int = 100,
    output: int = 10,
    pod: int = 0,
    u: float = 0.5,
    v: float = 0.5,
    session: str | None = None,
    poisoned: bool = False,
    error_u: float = 0.5,
) -> Arrival:
    arrival = Arrival(number, at, prompt, output, session, pod, 0, poisoned)
    arrival.noise = arrival.straggler = arrival.pause_s = 0.0
    arrival.pause_at = 0.5
    arrival.error_u, arrival.fault_u, arrival.fault_v = error_u, u, v
    return arrival


class Heard:
    """A sink that writes down what it hears; with `abort_at`, it aborts when it hears that."""

    def __init__(self, world: World, abort_at: str = "") -> None:
        self._clock = world.clock
        self._abort_at = abort_at
        self.words: list[str] = []
        self.times: list[float] = []

    def first(self, flight: Flight) -> None:
        self._hear("first", flight)

    def token(self, flight: Flight) -> None:
        self._hear("token", flight)

    def end(self, flight: Flight) -> None:
        self._hear("end", flight)

    def error(self, flight: Flight, kind: str) -> None:
        self._hear(kind, flight)

    def _hear(self, word: str, flight: Flight) -> None:
        self.words.append(word)
        self.times.append(self._clock.now)
        if word == self._abort_at:
            flight.abort()
