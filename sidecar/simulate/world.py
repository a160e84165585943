"""The engines: slots, queues, speeds and faults, and one flight for each attempt that was sent to one.

1. A flight waits for one of the engine's slots, first come, first served; reads its prompt; then decodes, at the pace
   that the batch of the moment allows. It tells its sink at the first token, then at least every `TELL_S` of decoding,
   and not per token: a longer silence is a true one.
2. What a fault does to a flight is settled when it is sent, by the luck of the attempt. `hit` says whether it does
   anything that matters: fails it, stalls it, makes it twice as slow or `LATE_S` later than it would have been.
   Congestion that a fault leaves behind is not counted.
3. `affected` asks the same of the engine that a random balancer would have chosen. Both take the batch to be
   `USUAL_BATCH`, so that the answer does not depend on where the method under test sends the others.
"""

from collections import deque
from collections.abc import Sequence
from math import exp
from typing import Final, Protocol

from sidecar.simulate.clock import VirtualClock
from sidecar.simulate.fault import Fate, Fault, Kind
from sidecar.simulate.profile import Profile
from sidecar.simulate.workload import Arrival, Luck, luck_of, rng_of

TELL_S: Final = 0.5
LATE_S: Final = 0.8
SLOW: Final = 2.0
USUAL_BATCH: Final = 8
REFUSED_S: Final = 0.001  # a refused connect takes a round trip
QUICK_ERROR_S: Final = 0.09  # an engine that fails at once does so within this

_WAITING: Final = 0
_RUNNING: Final = 1
_FAILING: Final = 2
_DONE: Final = 3

_SERVE: Final = Fate.SERVE
_HTTP500: Final = Fate.HTTP500
_RESET: Final = Fate.RESET
_REFUSE: Final = Fate.REFUSE
_STALL: Final = Fate.STALL


class Sink(Protocol):
    """Who hears of a flight; called by the clock, never from within `send` or `abort`."""

    def first(self, flight: "Flight") -> None:
        """The first token came."""

    def token(self, flight: "Flight") -> None:
        """Decoding went on."""

    def end(self, flight: "Flight") -> None:
        """The answer is whole."""

    def error(self, flight: "Flight", kind: str) -> None:
        """It failed: `refused`, `reset`, `http500`, or `full`: it says so and has no time for it."""


class Pod:
    """One engine. `speed` is a factor on every duration."""

    __slots__ = ("active", "in_flight", "index", "queue", "running", "speed", "zone")

    def __init__(self, index: int, zone: str, speed: float) -> None:
        self.index = index
        self.zone = zone
        self.speed = speed
        self.in_flight = 0
        self.running = 0
        self.queue: deque[Flight] = deque()
        self.active: list[Fault] = []

    def slowness(self, now: float) -> float:
        """By which factor the faults of the moment slow everything."""
        factor = 1.0
        for fault in self.active:
            factor *= fault.slowness(now)
        return factor


class Flight:
    """One attempt at one engine."""

    __slots__ = (
        "_burst",
        "_factor",
        "_fate",
        "_later_s",
        "_left",
        "_luck",
        "_pause_left",
        "_stall_left",
        "_state",
        "_world",
        "arrival",
        "attempt",
        "hit",
        "pod",
        "sent_at",
        "sink",
    )

    def __init__(self, world: "World", pod: Pod, arrival: Arrival, attempt: int, luck: Luck, sink: Sink) -> None:
        self._world = world
        self._luck = luck
        self._fate = _SERVE
        self._factor = 1.0
        self._later_s = 0.0
        self._left = arrival.output_tokens
        self._burst = 0
        self._pause_left = -1
        self._stall_left = -1
        self._state = _WAITING
        self.pod = pod
        self.arrival = arrival
        self.attempt = attempt
        self.sink = sink
        self.sent_at = world.clock.now
        self.hit = False

    @property
    def refused(self) -> bool:
        """Nobody listens: the error follows."""
        return self._fate is _REFUSE

    def abort(self) -> None:
        """Gives it up; its slot is free at once, and its sink hears no more."""
        state = self._state
        self._state = _DONE
        if state == _RUNNING:
            self._world.leave(self.pod)
        elif state == _WAITING:
            self.pod.in_flight -= 1
            self.pod.queue.remove(self)
        elif state == _FAILING:
            self.pod.in_flight -= 1

    def _start(self) -> None:
        """A slot is free."""
        world, pod, luck, arrival = self._world, self.pod, self._luck, self.arrival
        clock, profile = world.clock, world.profile
        self._state = _RUNNING
        pod.running += 1
        if self._fate is _STALL and luck.fault_v < 0.5:
            return
        batch = pod.running
        prefill_ms = arrival.prompt_tokens / profile.prefill_tokens_per_ms
        factor = pod.speed * self._factor * exp(profile.noise_sigma * luck.noise)
        if pod.active:
            factor *= pod.slowness(clock.now)
        if luck.straggler:
            factor *= luck.straggler
        took_s = factor * (world.steps_s[batch] + prefill_ms * (1.0 + batch / profile.prefill_batch) / 1000.0)
        clock.at(clock.now + took_s + self._later_s, self._first)

    def _first(self) -> None:
        if self._state != _RUNNING:
            return
        if self._fate is _RESET:
            self._fail("reset")
            return
        luck = self._luck
        if self._fate is _STALL:
            self._stall_left = int((1.0 - (2.0 * luck.fault_v - 1.0)) * self._left)
        if luck.pause_s:
            self._pause_left = int((1.0 - luck.pause_at) * self._left)
        self._left -= 1
        if self._left <= 0 and self._stall_left < 0:
            # The sink hears of the first token, and of the end in the same moment.
            self.sink.first(self)
            if self._state == _RUNNING:
                self._end()
            return
        self.sink.first(self)
        if self._state == _RUNNING:
            self._decode()

    def _decode(self) -> None:
        """Until the sink is told again."""
        world, pod = self._world, self.pod
        clock = world.clock
        step_s = world.steps_s[pod.running] * pod.speed * self._factor
        if pod.active:
            step_s *= pod.slowness(clock.now)
        left = self._left
        burst = int(TELL_S / step_s) or 1
        if burst > left:
            burst = left
        wait_s = 0.0
        if self._stall_left >= 0:
            if left <= self._stall_left or left <= 0:
                return  # for ever
            burst = min(burst, left - self._stall_left)
        if self._pause_left >= 0:
            if left <= self._pause_left:
                wait_s = self._luck.pause_s
                self._pause_left = -1
            else:
                burst = min(burst, left - self._pause_left)
        self._burst = burst
        clock.at(clock.now + burst * step_s + wait_s, self._next)

    def _next(self) -> None:
        if self._state != _RUNNING:
            return
        self._left -= self._burst
        if self._left <= 0 and self._stall_left < 0:
            self._end()
            return
        self.sink.token(self)
        if self._state == _RUNNING:
            self._decode()

    def _end(self) -> None:
        self._state = _DONE
        self._world.leave(self.pod)
        self.sink.end(self)

    def _fail(self, kind: str) -> None:
        if self._state == _DONE:
            return
        if self._state == _RUNNING:
            self._world.leave(self.pod)
        else:
            self.pod.in_flight -= 1
        self._state = _DONE
        self.sink.error(self, kind)


class World:
    """Engines `0` to `pods - 1` in three zones, and the faults that will come over them."""

    __slots__ = ("clock", "faults", "pods", "profile", "seed", "steps_s")

    def __init__(
        self,
        clock: VirtualClock,
        profile: Profile,
        pods: int,
        faults: Sequence[Fault],
        seed: int,
        *,
        zones: Sequence[str] = (),
    ) -> None:
        self.clock = clock
        self.profile = profile
        self.seed = seed
        self.faults = tuple(faults)
        self.steps_s = [profile.step_s(batch) for batch in range(profile.slots + 1)]
        rng = rng_of(seed, "speeds")
        names = zones or [f"zone-{index % 3}" for index in range(pods)]
        self.pods = [Pod(index, names[index], exp(profile.speed_sigma * rng.gauss(0.0, 1.0))) for index in range(pods)]
        for fault in self.faults:
            for index in fault.pods:
                clock.at(fault.begin, self.pods[index].active.append, fault)
                clock.at(fault.until, self.pods[index].active.remove, fault)

    def send(self, pod_index: int, arrival: Arrival, attempt: int, sink: Sink) -> Flight:
        """Sends an attempt (1: the first) to an engine."""
        clock, pod = self.clock, self.pods[pod_index]
        luck = arrival if attempt <= 1 else luck_of(self.seed, arrival.id, attempt, self.profile)
        flight = Flight(self, pod, arrival, attempt, luck, sink)
        pod.in_flight += 1
        if pod.active:
            flight._fate, flight._factor, flight._later_s, flight.hit = self._bite(pod, arrival, luck)
        fate = flight._fate
        if arrival.poisoned and fate is not _REFUSE:
            fate = _HTTP500
        elif fate is _SERVE and luck.error_u < self.profile.errors:
            fate = _HTTP500 if luck.error_u < self.profile.errors * 2 / 3 else _RESET
        flight._fate = fate
        if fate is _HTTP500:
            flight._state = _FAILING
            clock.at(clock.now + QUICK_ERROR_S * (0.1 + 0.9 * luck.pause_at), flight._fail, "http500")
        elif fate is _REFUSE:
            flight._state = _FAILING
            clock.at(clock.now + REFUSED_S, flight._fail, "refused")
        elif pod.running < self.profile.slots:
            flight._start()
        else:
            pod.queue.append(flight)
        return flight

    def affected(self, arrival: Arrival) -> bool:
        """Whether a fault would bite it, now, on the engine that a random balancer chose."""
        pod = self.pods[arrival.user_pod]
        return bool(pod.active) and not arrival.poisoned and self._bite(pod, arrival, arrival)[3]

    def fault_on(self, pod_index: int) -> Fault | None:
        """The fault of the moment; of several the first."""
        active = self.pods[pod_index].active
        return active[0] if active else None

    def leave(self, pod: Pod) -> None:
        """A slot is free; the next in the queue takes it."""
        pod.in_flight -= 1
        pod.running -= 1
        if pod.queue and pod.running < self.profile.slots:
            pod.queue.popleft()._start()

    def _bite(self, pod: Pod, arrival: Arrival, luck: Luck) -> tuple[Fate, float, float, bool]:
        """What the faults of the moment make of an attempt: fate, slowness of its own, delay, and whether it is hit."""
        now, u, v = self.clock.now, luck.fault_u, luck.fault_v
        fate = _SERVE
        own = whole = 1.0
        later_s = 0.0
        for fault in pod.active:
            if fate is _SERVE:
                fate = fault.fate(u, v, now)
            own *= fault.own_slowness(u, v)
            whole *= fault.slowness(now)
            if fault.kind is Kind.ZONE:
                later_s += fault.strength
        usual_s = pod.speed * self.profile.ttft_s(arrival.prompt_tokens, USUAL_BATCH)
        slower = own * whole
        hit = fate is not _SERVE or slower >= SLOW or usual_s * (slower - 1.0) + later_s >= LATE_S
        return fate, own, later_s, hit
