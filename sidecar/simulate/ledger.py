"""What came of every request and every trip, and the measures of the experiment that follow.

The definitions are those that the breaker's experiment is judged by:

1. Affected: a fault would have bitten the request on the engine that a random balancer chose (`World.affected`).
   Touched: a fault did bite an attempt that served the client.
2. D1: healthy engine x 10 s windows in which a breaker opened. D2: trips with no fault on that engine, nor within
   `GRACE_S` after one. A trip is closed to open; half open to open is a probe that failed. D3: good requests rejected.
3. I1: affected requests that were not touched. I2: the same after the breaker of that engine had opened. I3: I1 and
   those that were served within the SLO after all. I4: fault episodes that tripped. A fault of every engine at once has
   its own figures only (`kinds`): there is no way around it, and keeping clients from it would be no merit.
4. Good: would not have failed on its own, that is neither poisoned, nor affected, nor the engine's background error.
   Goodput is the share of the requests that are not poisoned that were served within the SLO.
5. An episode is a fault on one engine as one sidecar sees it. Detection is from its begin to the first trip; recovery
   from its end to the breaker's being closed, 0 if it was. Opening again, closed to open, within one is flapping.

Nothing of the warm-up is measured, nor a trip in it.
"""

from collections.abc import Sequence
from math import floor, log
from statistics import median
from typing import Final

import msgspec

from sidecar.simulate.fault import GRACE_S, Fault
from sidecar.simulate.profile import slo_s
from sidecar.simulate.workload import Arrival
from sidecar.simulate.world import Flight, World

WINDOW_S: Final = 10.0
STEP: Final = 1.02
"""TTFT is kept in bins, each this factor wider than the one before: quantiles are right to 2 %, and runs add up."""

_PER_STEP: Final = 1.0 / log(STEP)

OPEN: Final = "open"
CLOSED: Final = "closed"


class Move(msgspec.Struct, frozen=True):
    """A breaker of an engine that moved. `at` is seconds since the measured time began, `false`: no fault was there."""

    sidecar: int
    pod: int
    at: float
    old: str
    new: str
    why: str
    evidence: str
    false: bool


class Tally(msgspec.Struct, frozen=True):
    """Affected requests of one kind of fault, how many were not touched or served all the same; and its episodes."""

    affected: int = 0
    untouched: int = 0
    saved: int = 0
    after_open: int = 0
    after_open_untouched: int = 0
    episodes: int = 0
    tripped: int = 0
    detect_s: tuple[float, ...] = ()

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(*(getattr(self, name) + getattr(other, name) for name in Tally.__struct_fields__))

    @property
    def i1(self) -> float | None:
        """Affected requests that never touched the fault, as a share."""
        return _ratio(self.untouched, self.affected)

    @property
    def i2(self) -> float | None:
        """The same after the first opening."""
        return _ratio(self.after_open_untouched, self.after_open)

    @property
    def i3(self) -> float | None:
        """I1, and served within the SLO after all."""
        return _ratio(self.saved, self.affected)

    @property
    def i4(self) -> float | None:
        """Episodes that tripped."""
        return _ratio(self.tripped, self.episodes)


class Measures(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one run, or of several added up; the shares are properties, None where there is nothing to share.

    `kinds` is by kind of fault, `everywhere` counts the faults of each kind that struck every engine.
    """

    requests: int = 0
    good: int = 0
    good_rejected: int = 0
    owed: int = 0
    within_slo: int = 0
    served: int = 0
    attempts: int = 0
    retried: int = 0
    healthy_windows: int = 0
    windows_opened: int = 0
    trips: int = 0
    false_trips: int = 0
    reopened: int = 0
    probes_failed: int = 0
    recover_s: tuple[float, ...] = ()
    never_closed: int = 0
    kinds: dict[str, Tally] = {}
    everywhere: dict[str, int] = {}
    failed: dict[str, int] = {}
    rejected: dict[str, int] = {}
    others_tripped: dict[str, int] = {}
    ttft_bins: dict[int, int] = {}
    per_pod: tuple[int, ...] = ()
    moves: tuple[Move, ...] = ()

    def __add__(self, other: "Measures") -> "Measures":
        """Both runs together. `per_pod` stays only where both have as many engines."""
        both: dict[str, object] = {}
        for name in Measures.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if name == "kinds":
                both[name] = {
                    kind: mine.get(kind, Tally()) + theirs.get(kind, Tally()) for kind in sorted({*mine, *theirs})
                }
            elif isinstance(mine, dict):
                both[name] = {key: mine.get(key, 0) + theirs.get(key, 0) for key in sorted({*mine, *theirs})}
            elif name == "per_pod":
                longer = mine or theirs
                both[name] = longer if not (mine and theirs) else _added(mine, theirs)
            else:
                both[name] = mine + theirs
        return msgspec.convert(both, Measures, from_attributes=True)

    @property
    def all_kinds(self) -> Tally:
        """All faults together that one can be kept away from: not those of every engine at once."""
        return sum((tally for kind, tally in self.kinds.items() if kind not in self.everywhere), Tally())

    @property
    def every_kind(self) -> Tally:
        """All faults together."""
        return sum(self.kinds.values(), Tally())

    @property
    def d1(self) -> float | None:
        """Healthy windows in which a breaker opened, as a share."""
        return _ratio(self.windows_opened, self.healthy_windows)

    @property
    def d2(self) -> float | None:
        """False trips of all trips."""
        return _ratio(self.false_trips, self.trips)

    @property
    def d3(self) -> float | None:
        """Good requests that were rejected."""
        return _ratio(self.good_rejected, self.good)

    @property
    def goodput(self) -> float | None:
        """Requests served within the SLO, of those that are not poisoned."""
        return _ratio(self.within_slo, self.owed)

    @property
    def goodput_of_all(self) -> float | None:
        """Requests served within the SLO, of all; what is poisoned fails whatever is done."""
        return _ratio(self.within_slo, self.requests)

    def ttft_s(self, quantile: float) -> float | None:
        """The quantile (0-1) of the time to the first token, of those that were served."""
        wanted = quantile * self.served
        seen = 0
        for number in sorted(self.ttft_bins):
            seen += self.ttft_bins[number]
            if seen >= wanted:
                return float(STEP ** (number + 0.5))
        return None

    @property
    def detect_median_s(self) -> float | None:
        """From a fault's begin to the first trip."""
        seconds = self.every_kind.detect_s
        return median(seconds) if seconds else None

    @property
    def recover_median_s(self) -> float | None:
        """From a fault's end to its breaker's being closed."""
        return median(self.recover_s) if self.recover_s else None

    @property
    def reopens(self) -> float | None:
        """How often a breaker that had closed opened again, per episode that tripped."""
        return _ratio(self.reopened, self.every_kind.tripped)

    def row(self) -> dict[str, float | int | None]:
        """The columns of the experiment's table; shares in percent, durations in seconds."""
        every = self.all_kinds
        return {
            "requests": self.requests,
            "d1_pct": _percent(self.d1),
            "false_trips": self.false_trips,
            "trips": self.trips,
            "d3_pct": _percent(self.d3),
            "affected": every.affected,
            "i1_pct": _percent(every.i1),
            "i2_pct": _percent(every.i2),
            "i3_pct": _percent(every.i3),
            "i4_pct": _percent(every.i4),
            "detect_s": self.detect_median_s,
            "recover_s": self.recover_median_s,
            "reopens": self.reopens,
            "goodput_pct": _percent(self.goodput),
        }


class Episode:
    """One fault on one engine, as one sidecar's breaker saw it."""

    __slots__ = ("closed_at", "first_trip", "open", "probes_failed", "trips")

    def __init__(self) -> None:
        self.first_trip = -1.0
        self.trips = 0
        self.probes_failed = 0
        self.open = False
        self.closed_at = -1.0


class Ledger:
    """Takes what a method reports. What is measured is `begin` to `end` (clock); nothing before is kept."""

    __slots__ = (
        "_affected",
        "_begin",
        "_current",
        "_end",
        "_episodes",
        "_failed",
        "_kinds",
        "_moves",
        "_opened_windows",
        "_others",
        "_rejected",
        "_sidecars",
        "_ttft_bins",
        "_world",
        "attempts",
        "good",
        "good_rejected",
        "owed",
        "per_pod",
        "requests",
        "retried",
        "served_requests",
        "settled",
        "within_slo",
    )

    def __init__(self, world: World, sidecars: int, begin: float, end: float) -> None:
        self._world = world
        self._sidecars = sidecars
        self._begin = begin
        self._end = end
        self._kinds: dict[str, list[int]] = {}
        self._affected: dict[int, str] = {}
        self._episodes: dict[tuple[int, int, int], Episode] = {
            (number, sidecar, pod): Episode()
            for number, fault in enumerate(world.faults)
            for sidecar in range(sidecars)
            for pod in fault.pods
        }
        self._current: dict[tuple[int, int], tuple[Fault, Episode]] = {}
        self._opened_windows: set[tuple[int, int, int]] = set()
        self._moves: list[Move] = []
        self._failed: dict[str, int] = {}
        self._rejected: dict[str, int] = {}
        self._others: dict[str, int] = {}
        self._ttft_bins: dict[int, int] = {}
        self.retried = 0
        self.requests = 0
        self.settled = 0
        self.attempts = 0
        self.good = 0
        self.good_rejected = 0
        self.owed = 0
        self.within_slo = 0
        self.served_requests = 0
        self.per_pod = [0] * len(world.pods)

    # What the run tells.

    def arrived(self, arrival: Arrival) -> None:
        """A request comes, now; before any method sees it."""
        arrival.affected = arrival.after_open = arrival.touched = False
        arrival.flights = 0
        if not self._measured(arrival):
            return
        self.requests += 1
        if arrival.poisoned:
            return
        self.owed += 1
        world, pod = self._world, arrival.user_pod
        fault = world.fault_on(pod)
        if fault is not None and world.affected(arrival):
            arrival.affected = True
            current = self._current.get((arrival.sidecar, pod))
            arrival.after_open = current is not None and current[0] is fault and current[1].first_trip >= 0
            self._affected[arrival.id] = fault.kind
        elif arrival.error_u >= world.profile.errors:
            self.good += 1

    # What a method tells.

    def touched(self, arrival: Arrival, flight: Flight) -> None:
        """An attempt that serves the client was sent."""
        arrival.flights += 1
        if flight.hit:
            arrival.touched = True
        if self._measured(arrival):
            self.attempts += 1
            self.retried += arrival.flights == 2
            self.per_pod[flight.pod.index] += 1

    def served(self, arrival: Arrival, ttft_s: float) -> None:
        """The client got its whole answer; `ttft_s` is from its arrival to the first token."""
        if self._measured(arrival):
            self.served_requests += 1
            number = floor(log(max(ttft_s, 1e-6)) * _PER_STEP)
            self._ttft_bins[number] = self._ttft_bins.get(number, 0) + 1
            in_time = ttft_s <= slo_s(arrival.prompt_tokens)
            if in_time and not arrival.poisoned:
                self.within_slo += 1
            self._settle(arrival, in_time)

    def failed(self, arrival: Arrival, why: str) -> None:
        """The client got an error, a broken answer or none, after an attempt was made."""
        if self._measured(arrival):
            self._failed[why] = self._failed.get(why, 0) + 1
            self._settle(arrival, False)

    def rejected(self, arrival: Arrival, why: str) -> None:
        """The client was refused before any attempt was made."""
        if self._measured(arrival):
            self._rejected[why] = self._rejected.get(why, 0) + 1
            if not arrival.poisoned and not arrival.affected and arrival.error_u >= self._world.profile.errors:
                self.good_rejected += 1
            self._settle(arrival, False)

    def moved(
        self, pod: int, old: str, new: str, at: float, why: str = "", evidence: str = "", sidecar: int = 0
    ) -> None:
        """The breaker of an engine moved, at `at` (clock): `closed`, `open`, `half_open`."""
        if not self._begin <= at:
            return
        number, fault = self._fault_near(pod, at)
        if at <= self._end:
            false = new == OPEN and old == CLOSED and fault is None
            self._moves.append(Move(sidecar, pod, round(at - self._begin, 6), old, new, why, evidence, false))
            if new == OPEN and fault is None:
                self._opened_windows.add((sidecar, pod, int((at - self._begin) / WINDOW_S)))
        key = (sidecar, pod)
        if new == OPEN and fault is not None and (old == CLOSED or key not in self._current):
            episode = self._episodes[number, sidecar, pod]
            if episode.first_trip < 0:
                episode.first_trip = max(at, fault.begin)
            episode.trips += 1
            episode.open = True
            self._current[key] = (fault, episode)
        elif new == OPEN and old != CLOSED and key in self._current:
            self._current[key][1].probes_failed += 1
        elif new == CLOSED and key in self._current:
            episode = self._current[key][1]
            if episode.open:
                episode.open = False
                episode.closed_at = at

    def tripped(self, scope: str) -> None:
        """A breaker that is no engine's opened: a session's, a kind of request's."""
        if self._begin <= self._world.clock.now <= self._end:
            self._others[scope] = self._others.get(scope, 0) + 1

    # What follows.

    def measures(self) -> Measures:
        """Everything, as it stands."""
        trips = [move for move in self._moves if move.new == OPEN and move.old == CLOSED]
        recover_s: list[float] = []
        never_closed = 0
        per_kind: dict[str, tuple[int, int, tuple[float, ...]]] = {}
        for (number, _, _), episode in self._episodes.items():
            fault = self._world.faults[number]
            episodes, tripped, detect_s = per_kind.get(fault.kind, (0, 0, ()))
            if episode.first_trip >= 0:
                tripped += 1
                detect_s = (*detect_s, round(episode.first_trip - fault.begin, 6))
                if episode.open:
                    never_closed += 1
                    recover_s.append(round(max(0.0, self._end - fault.until), 6))
                else:
                    recover_s.append(round(max(0.0, episode.closed_at - fault.until), 6))
            per_kind[fault.kind] = (episodes + 1, tripped, detect_s)
        every = self._episodes.values()
        everywhere: dict[str, int] = {}
        for fault in self._world.faults:
            if len({*fault.pods}) == len(self._world.pods):
                everywhere[fault.kind] = everywhere.get(fault.kind, 0) + 1
        return Measures(
            requests=self.requests,
            good=self.good,
            good_rejected=self.good_rejected,
            owed=self.owed,
            within_slo=self.within_slo,
            served=self.served_requests,
            attempts=self.attempts,
            retried=self.retried,
            healthy_windows=self._healthy_windows(),
            windows_opened=len(self._opened_windows),
            trips=len(trips),
            false_trips=sum(move.false for move in trips),
            reopened=sum(max(0, episode.trips - 1) for episode in every),
            probes_failed=sum(episode.probes_failed for episode in every),
            recover_s=tuple(recover_s),
            never_closed=never_closed,
            kinds={kind: _tally(self._kinds.get(kind), *per_kind[kind]) for kind in sorted(per_kind)},
            everywhere=dict(sorted(everywhere.items())),
            failed=dict(sorted(self._failed.items())),
            rejected=dict(sorted(self._rejected.items())),
            others_tripped=dict(sorted(self._others.items())),
            ttft_bins=dict(sorted(self._ttft_bins.items())),
            per_pod=tuple(self.per_pod),
            moves=tuple(self._moves),
        )

    def _measured(self, arrival: Arrival) -> bool:
        return arrival.at >= self._begin

    def _settle(self, arrival: Arrival, in_time: bool) -> None:
        """An affected request has its end."""
        self.settled += 1
        if not arrival.affected:
            return
        tally = self._kinds.setdefault(self._affected.pop(arrival.id), [0, 0, 0, 0, 0])
        untouched = not arrival.touched
        tally[0] += 1
        tally[1] += untouched
        tally[2] += untouched or in_time
        tally[3] += arrival.after_open
        tally[4] += arrival.after_open and untouched

    def _fault_near(self, pod: int, at: float) -> tuple[int, Fault | None]:
        """The fault on an engine at this time or shortly after it; of several the last to begin."""
        found: tuple[int, Fault | None] = (-1, None)
        for number, fault in enumerate(self._world.faults):
            if pod in fault.pods and fault.begin <= at <= fault.until + GRACE_S:
                found = (number, fault)
        return found

    def _healthy_windows(self) -> int:
        count = 0
        for pod in range(len(self._world.pods)):
            ours = [fault for fault in self._world.faults if pod in fault.pods]
            begin = self._begin
            while begin + WINDOW_S <= self._end + 1e-9:
                if not _overlaps(ours, begin, begin + WINDOW_S):
                    count += 1
                begin += WINDOW_S
        return count * self._sidecars


def _overlaps(faults: Sequence[Fault], begin: float, end: float) -> bool:
    return any(fault.begin < end and begin <= fault.until + GRACE_S for fault in faults)


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _percent(ratio: float | None) -> float | None:
    return None if ratio is None else 100.0 * ratio


def _tally(counts: list[int] | None, episodes: int, tripped: int, detect_s: tuple[float, ...]) -> Tally:
    affected, untouched, saved, after_open, after_open_untouched = counts or (0, 0, 0, 0, 0)
    return Tally(affected, untouched, saved, after_open, after_open_untouched, episodes, tripped, detect_s)


def _added(some: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(one + other for one, other in zip(some, others, strict=True)) if len(some) == len(others) else ()
