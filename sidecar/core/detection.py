"""The detector: how much what an endpoint does speaks against it, and when that is enough to open its breaker.

```
first token -> e = ln seconds - expected -> z = e / spread      -> location   (every answer is a little slower)
answer's end, or its lateness while it runs -> good | bad       -> fast       (many are bad, all at once)
                                                                -> gray       (some are bad, for long)
```

Each statistic is a CUSUM: it grows by the logarithm of how much likelier an observation is if the endpoint is faulty,
falls by as much where it is not, and never below 0. It trips at ln(1 / false_alarm). A window's ratio or quantile would
have to be both long enough to be sure and short enough to be quick; a sum of evidence is as quick as the evidence is
strong. (Page 1954; Lorden 1971 for its optimality.)

1. An answer is bad if the endpoint failed it, or if it is late: its first token after `exp(expected + tau)`, or a
   silence within it longer than usual. Lateness counts when it happens and not when the answer ends: an engine that
   hangs ends nothing. It counts once, whatever comes after, a client's leaving too.
2. How many bad answers are normal is learnt (`normal`), and so is how long a first token should take: the model's line
   (`latency`), plus the endpoint's own slow offset, plus what all have in common now.
3. What a first token adds to `location` is bounded on both sides, so that no single answer opens or excuses anything.
4. Nothing is judged until `min_samples` answers ended: the breaker's fixed rules serve meanwhile, and always beside.
5. Guards, each there because a run failed without it: overload, capacity and panic (`normal`). Where most of the
   evidence is slowness it must have lasted for `SPAN_S` (`normal`), too: a hiccup delays many answers and is one event.
6. One session charges an endpoint with at most `SESSION_CHARGES` bad answers in `SESSION_S`: a poisoned session must
   not take endpoint after endpoint.
7. A detector belongs to one generation of its breaker: evidence of an older one is dropped, and the first of a new one
   begins at nothing; after a recovery at a share of the threshold, so that a relapse is found sooner (Lucas and
   Crosier 1982, fast initial response).
8. What is expected at its load is learnt from all, and an endpoint's offset at the load that it usually has. At less,
   nobody knows that it is faster: it is granted what it takes at its usual load, for engines that refuse what is too
   much need not be. But only as far as all have less to do: alone, it has less because it is slow, and its balancer
   saw that. A probe is not: an endpoint that is slow by half has nothing else to do, and would seem well.
9. What other sidecars saw comes in as counts (`absorb`) and adds up like our own. `share` gives ours.
"""

from math import ceil, exp, inf, log
from typing import Final

import msgspec

from sidecar.core.breaker import Permit, State
from sidecar.core.detector import REMEMBERED, Detector, Expectation
from sidecar.core.latency import Line, Sample, log_s, seconds_of
from sidecar.core.normal import OFFSET_TICKS, QUANTILE, Normal
from sidecar.kernel.ids import EndpointKey, SessionId
from sidecar.kernel.outcome import Result
from sidecar.policy.schema import Adaptive

MAX_LINES: Final = 64  # models and versions with a line of their own; clients make names up
MAX_ACTIVE: Final = 512  # endpoints looked at each second; of more, the others' turn comes with the next
MOST_LEFT: Final = 1.5  # one answer's part in an offset
TRIAL_BAD: Final = 6.0  # the location statistic of the probes, from which they speak against the endpoint
ZONE: Final = 1 / 3  # of the others: where more than a zone of them slows down at once, it is the load
FEWEST_OTHERS: Final = 2  # bad answers beside one session's: what it fails and a straggler are no endpoint's fault
FEWEST_LOCATED: Final = 3  # endpoints: of two that differ a little, either may be the one that is as it should be
LASTING_S: Final = 600.0
SUSPECTED: Final = 0.25  # of the location statistic's trip, from which an endpoint teaches the line nothing
LEAST_SLOW: Final = 0.6  # ln: what is less than about twice as slow has other reasons than a fault, and harms nobody
MOST_COUNTED: Final = 64  # bad answers, before older ones count for less in what the evidence is made of
MOST_ASKED: Final = 64  # endpoints, about how slow they are, before one of them opens for slowness
Z_LOW: Final = -3.0
Z_HIGH: Final = 3.5
LEAST_DELTA: Final = 1.0
LN2: Final = 0.6931471805599453
SURE: Final = 3.0  # ln of how much likelier "well" must be before a breaker closes
MOST_PROOFS: Final = 80
LOCATION_PROOFS: Final = 5

LATE: Final = "late"
SILENT: Final = "silent"
ERROR: Final = "error"
LOCATION: Final = "location"
_CLOSED: Final = State.CLOSED
_SUCCESS: Final = Result.SUCCESS
_FAILURE: Final = Result.FAILURE
_IGNORED: Final = Result.IGNORED


class Trip(msgspec.Struct, frozen=True):
    """Enough evidence. `why` is `fast`, `gray` or `location`; so many good `proofs` in a row would outweigh it."""

    why: str
    evidence: str
    proofs: int


class Counts(msgspec.Struct, frozen=True):
    """What one sidecar saw of one endpoint since it last said so; sums, so that they may be added in any order.

    `slow` were late or fell silent. `location` is the sum of the location statistic's steps, over `timed` first tokens
    that left `left` (ln of seconds, summed) unexplained.
    """

    endpoint: EndpointKey
    good: int
    errors: int
    slow: int
    location: float
    timed: int
    left: float


class Detection:
    """The detectors of one service, and what they have in common. Times are monotonic seconds.

    `expect`, `first_token`, `late` and `ended` are on the request's path, in this order; `tick` is to be called once a
    second. `size` is how many endpoints the service has, `floor` how many of them must stay closed, `active` who was
    heard of lately.
    """

    __slots__ = (
        "_fast",
        "_gray",
        "_in_flight",
        "_late_min_s",
        "_lines",
        "_location",
        "_ticked_at",
        "_ticked_results",
        "active",
        "floor",
        "normal",
        "results",
        "rule",
        "size",
        "threshold",
    )

    def __init__(self, rule: Adaptive, now: float) -> None:
        self._lines: dict[tuple[str, str], Line] = {}
        self.active: list[Detector] = []
        self.normal = Normal(rule)
        self.results = 0
        self._ticked_at = now
        self._ticked_results = 0
        self.size = 0
        self.floor = 0
        self.use(rule)

    def use(self, rule: Adaptive) -> None:
        """Takes new numbers; what was learnt stays."""
        self.rule = rule
        self.threshold = -log(rule.false_alarm)
        self._fast = "fast" in rule.statistics
        self._gray = "gray" in rule.statistics
        self._location = "location" in rule.statistics
        self._in_flight = rule.in_flight
        self._late_min_s = float(rule.late_min_s)
        for line in self._lines.values():
            line.use(rule)
        self.normal.use(rule)

    @property
    def ready(self) -> bool:
        """Whether enough answers ended for the detector to judge; the fixed rules do until then."""
        return self.results >= self.rule.min_samples

    # On the request's path.

    def expect(
        self,
        detector: Detector,
        permit: Permit,
        model: str,
        size_bytes: int,
        in_flight: int,
        session: SessionId | None,
    ) -> "Expectation":
        """What the next attempt on an endpoint should take. `model` "": its answer has no first token to time."""
        if not model:
            return Expectation(detector, permit, "", None, 0.0, 0.0, 0.0, 0, inf, inf, session)
        # An endpoint's own queue explains its latency only as far as the others' does.
        load = float(in_flight)
        if load > self.normal.load_cap:
            load = self.normal.load_cap
        line = detector.line
        if line is None or model != detector.model:
            line = self._lines.get((model, detector.version))
            if line is None:
                return Expectation(detector, permit, model, None, 0.0, 0.0, load, size_bytes, inf, inf, session)
            detector.model = model
            detector.line = line
        by_itself = detector.offset + self.normal.common
        expected = granted = line.expected(size_bytes, load) + by_itself
        if load < detector.usual_load and not permit.probe:
            usual = load + self.normal.less * (detector.usual_load - load)
            granted = max(expected, line.expected(size_bytes, usual) + by_itself)
        if not line.ready or not self._in_flight:
            return Expectation(detector, permit, model, line, expected, granted, load, size_bytes, inf, inf, session)
        late_s = seconds_of(granted + line.tau)
        if late_s < self._late_min_s:
            late_s = self._late_min_s
        return Expectation(
            detector, permit, model, line, expected, granted, load, size_bytes, late_s, line.late_gap_s, session
        )

    def first_token(self, expectation: "Expectation", took_s: float, now: float) -> Trip | None:
        """A first token came, `took_s` after the request was sent. `expectation.bad` is set if that is too late."""
        detector = expectation.detector
        breaker = detector.breaker
        if expectation.permit.generation != breaker.generation or not expectation.model:
            return None
        detector.begin(self.threshold)
        took = log_s(took_s)
        line = expectation.line
        if line is None:
            line = self._new_line(expectation.model, detector.version, now)
            if line is None:
                return None
            expectation.expected = expectation.granted = line.expected(expectation.size_bytes, expectation.load)
        left = took - expectation.expected
        beyond = took - expectation.granted
        late = line.ready and beyond > line.tau and took_s > self._late_min_s
        if breaker.state is not _CLOSED:
            if line.ready:
                detector.trial_n += 1
                detector.trial_left += min(MOST_LEFT, max(-MOST_LEFT, left))
                detector.trial += _location_step(line.spread, left)
                expectation.bad = expectation.bad or late
            return None
        if not detector.active:
            self._activate(detector)
        suspected = detector.location >= SUSPECTED * self.rule.location_trip
        if len(line.pending) < line.per_tick and not self.normal.strange and not suspected:
            line.pending.append(Sample(took, expectation.size_bytes, expectation.load, detector.offset, breaker))
        bounded = left
        if bounded > MOST_LEFT:
            bounded = MOST_LEFT
        elif not bounded >= -MOST_LEFT:
            bounded = -MOST_LEFT
        detector.left_n += 1
        detector.left_sum += bounded
        if not line.ready or expectation.bad or self.normal.overload:
            return None
        trip = self._locate(detector, line, beyond, now) if self._location else None
        if late:
            expectation.bad = True
            return trip or self._bad(detector, LATE, expectation.session, now)
        return trip

    def late(self, expectation: "Expectation", word: str, now: float) -> Trip | None:
        """An attempt that still runs is late: LATE, no first token yet, or SILENT, no next one. Sets `bad`."""
        detector = expectation.detector
        breaker = detector.breaker
        if expectation.permit.generation != breaker.generation or expectation.bad:
            return None
        if breaker.state is not _CLOSED:
            expectation.bad = True
            return None
        if self.normal.overload:
            return None
        detector.begin(self.threshold)
        if not detector.active:
            self._activate(detector)
        expectation.bad = True
        trip: Trip | None = None
        line = expectation.line
        if word == LATE and self._location and line is not None:
            trip = self._locate(detector, line, Z_HIGH * line.spread, now)
        return trip or self._bad(detector, word, expectation.session, now)

    def ended(self, expectation: "Expectation", failed: bool, waited: bool, theirs: bool, now: float) -> Trip | None:
        """An attempt succeeded or failed.

        `waited`: it failed by a deadline, and overload excuses that. `theirs`: it may have been the session's doing.
        """
        detector = expectation.detector
        breaker = detector.breaker
        if expectation.permit.generation != breaker.generation or breaker.state is not _CLOSED:
            return None
        self.results += 1
        if expectation.bad:
            return None
        detector.begin(self.threshold)
        if not detector.active:
            self._activate(detector)
        if failed:
            if waited and self.normal.overload:
                detector.recent_n += 1.0
                detector.recent_bad += 1.0
                return None
            return self._bad(detector, ERROR, expectation.session if theirs else None, now)
        detector.recent_n += 1.0
        detector.panic_n += 1.0
        detector.shared_good += 1
        fast = detector.fast
        if fast > 0.0:
            fast += self.normal.good_fast
            detector.fast = fast if fast > 0.0 else 0.0
        gray = detector.gray
        if gray > 0.0:
            gray += self.normal.good_gray
            detector.gray = gray if gray > 0.0 else 0.0
            detector.n += 1
        return None

    def lasting(self, detector: Detector, now: float) -> bool:
        """Whether it has been open for so long that being slow is no longer a fault, but how it is."""
        return now - detector.opened_at >= LASTING_S

    def verdict(self, expectation: "Expectation", result: Result, now: float) -> Result:
        """What a probe proves that ended as `result`: a success that was late is none.

        One that is well only by itself proves nothing yet: how long the first tokens of all of them took must lean to
        well, too.
        """
        if result is not _SUCCESS or self.lasting(expectation.detector, now):
            return result
        if expectation.bad:
            return _FAILURE
        detector = expectation.detector
        if expectation.model:
            if detector.trial > TRIAL_BAD:
                return _FAILURE
            if detector.trial > 0.0:
                return _IGNORED
        return result

    # The other sidecars.

    def share(self) -> list[Counts]:
        """What was seen since the last call, of every endpoint of which something was."""
        said: list[Counts] = []
        for detector in self.active:
            counts = detector.take_counts()
            if counts is not None:
                said.append(Counts(EndpointKey(detector.breaker.key), *counts))
        return said

    def absorb(self, detector: Detector, counts: Counts, now: float) -> Trip | None:
        """Adds what another sidecar saw. Its sessions are its own affair: it has left out what one session did."""
        if detector.breaker.state is not _CLOSED:
            return None
        detector.begin(self.threshold)
        if not detector.active:
            self._activate(detector)
        bad = counts.errors + counts.slow
        detector.recent_n += counts.good + bad
        detector.recent_bad += bad
        detector.panic_n += counts.good + bad
        detector.panic_bad += bad
        self.results += counts.good + bad
        detector.fast = max(0.0, detector.fast + counts.good * self.normal.good_fast)
        detector.gray = max(0.0, detector.gray + counts.good * self.normal.good_gray)
        if detector.gray > 0.0:
            detector.n += counts.good
        trip: Trip | None = None
        if self._location and counts.timed and not self.normal.overload:
            most = MOST_LEFT * counts.timed
            left = counts.left if -most <= counts.left <= most else most
            trip = self._add_location(detector, counts.location, counts.timed, left, now)
        for word, count in ((ERROR, counts.errors), (LATE, 0 if self.normal.overload else counts.slow)):
            for _ in range(min(count, REMEMBERED)):
                trip = trip or self._counted_bad(detector, word, None, now, pooled=True)
        return trip

    def suspect(self, detector: Detector) -> None:
        """Another sidecar has evidence, not enough for all: half of what trips is there now, until it is outlived."""
        if detector.breaker.state is not _CLOSED:
            return
        detector.begin(self.threshold)
        if not detector.active:
            self._activate(detector)
        half = 0.5 * self.threshold
        detector.fast = max(detector.fast, half)
        detector.gray = max(detector.gray, half)

    # Once a second.

    def tick(self, opened: int, now: float) -> bool:
        """Learns, and weighs what is normal, `opened` breakers being open; True if panic began: all are to close."""
        elapsed_s = min(60.0, max(0.0, now - self._ticked_at))
        self._ticked_at = now
        for line in self._lines.values():
            line.learn(now)
        active = self.active[:MAX_ACTIVE]
        rest = self.active[MAX_ACTIVE:]
        closed = [detector for detector in active if detector.breaker.state is _CLOSED]
        began = self.normal.tick(
            active, closed, self.ready, opened, self.floor, self.results - self._ticked_results, now, elapsed_s
        )
        self._ticked_results = self.results
        self.active = rest + [detector for detector in active if detector.active]
        return began

    def keep(self, detectors: list[Detector]) -> None:
        """Forgets the endpoints that are not among these, and the lines of versions that none of these has."""
        versions = {detector.version for detector in detectors}
        for known in [known for known in self._lines if known[1] not in versions]:
            del self._lines[known]
        kept = {id(detector) for detector in detectors}
        self.active = [detector for detector in self.active if id(detector) in kept]

    # Our own.

    def _activate(self, detector: Detector) -> None:
        detector.active = True
        self.active.append(detector)

    def _new_line(self, model: str, version: str, now: float) -> Line | None:
        if len(model) > 256:
            return None
        line = self._lines.get((model, version))
        if line is None:
            if len(self._lines) >= MAX_LINES:
                self._drop_line()
            line = self._lines[model, version] = Line(self.rule, now)
        return line

    def _drop_line(self) -> None:
        """Forgets the line that was taught longest ago."""
        oldest = min(self._lines, key=lambda known: self._lines[known].taught_at)
        line = self._lines.pop(oldest)
        for detector in self.active:
            if detector.line is line:
                detector.line = None

    def _bad(self, detector: Detector, word: str, session: SessionId | None, now: float) -> Trip | None:
        if detector.charged(session, now):
            return None
        detector.recent_n += 1.0
        detector.recent_bad += 1.0
        detector.panic_n += 1.0
        detector.panic_bad += 1.0
        if word == ERROR:
            detector.shared_errors += 1
        else:
            detector.shared_slow += 1
        return self._counted_bad(detector, word, session, now)

    def _counted_bad(
        self, detector: Detector, word: str, session: SessionId | None, now: float, pooled: bool = False
    ) -> Trip | None:
        if detector.gray == 0.0:
            detector.since = now
            detector.n = detector.bad = detector.errors = detector.late = detector.gaps = detector.pooled = 0
        elif not detector.bad:
            detector.since = now  # after a head start
        detector.n += 1
        detector.bad += 1
        if pooled:
            detector.pooled += 1
        if word == ERROR:
            detector.errors += 1
        elif word == LATE:
            detector.late += 1
        elif word == SILENT:
            detector.gaps += 1
        if detector.bad > MOST_COUNTED:
            detector.halve()
        detector.remember(now, session)
        threshold = self.threshold
        detector.fast = min(2.0 * threshold, detector.fast + self.normal.bad_fast)
        detector.gray = min(2.0 * threshold, detector.gray + self.normal.bad_gray)
        fast = self._fast and detector.fast >= threshold
        if not fast and not (self._gray and detector.gray >= threshold):
            return None
        if not self.ready or detector.in_a_minute(now) < self.rule.min_bad or detector.but_for_one() < FEWEST_OTHERS:
            return None
        if detector.slow and (self.normal.overload or now - detector.since < self.normal.span_s or self.size < 2):
            return None
        if detector.slow and not self._apart(detector, LN2, now):
            return None
        return self._tripped(detector, "fast" if fast else "gray", now)

    def _apart(self, detector: Detector, left: float, now: float) -> bool:
        """Whether it is slow by itself, and slow enough to matter: at least twice as slow, and the others are not.

        `common` tells of the others a second later, and that may be late.
        """
        if left < LEAST_SLOW or now < detector.backlog_until:
            return False
        common = self.normal.common
        others: list[float] = []
        asked = slowing = 0
        for other in self.active:
            if other is not detector and other.breaker.state is _CLOSED:
                asked += 1
                if other.location >= 0.5 * self.rule.location_trip:
                    slowing += 1
                mean = other.left
                if mean is not None:
                    others.append(mean)
            if asked >= MOST_ASKED:
                break
        if slowing > max(1.0, ZONE * asked):
            return False
        if not others:
            return True
        others.sort()
        return others[round(QUANTILE * (len(others) - 1))] + common <= 0.5 * (left + common)

    def _locate(self, detector: Detector, line: Line, left: float, now: float) -> Trip | None:
        if not self._location:
            return None
        step = _location_step(line.spread, left)
        detector.shared_location += step
        detector.shared_timed += 1
        detector.shared_left += left
        return self._add_location(detector, step, 1, left, now)

    def _add_location(self, detector: Detector, step: float, timed: int, left: float, now: float) -> Trip | None:
        location = detector.location + step
        if not location > 0.0:
            detector.location = 0.0
            detector.location_n = 0
            detector.location_sum = 0.0
            return None
        if not detector.location_n:
            detector.location_at = now
        detector.location = min(location, 2.0 * self.rule.location_trip)
        detector.location_n += timed
        detector.location_sum += left
        return self._located(detector, now) if location >= self.rule.location_trip else None

    def _located(self, detector: Detector, now: float) -> Trip | None:
        if not self.ready or now - detector.location_at < self.normal.span_s or self.size < FEWEST_LOCATED:
            return None
        if detector.ticks < OFFSET_TICKS:  # how slow it always is, is not known yet
            return None
        count = max(1, detector.location_n)
        left = detector.location_sum / count
        if not self._apart(detector, max(left, detector.left or left), now):
            return None
        detector.trips(LOCATION, now)
        evidence = (
            f"first tokens took {exp(min(8.0, detector.location_sum / count)):.1f} times what was expected over the "
            f"last {count} answers in {max(0.0, now - detector.location_at):.1f} s; location {detector.location:.1f} "
            f"of {self.rule.location_trip:g}"
        )
        return Trip(LOCATION, evidence, LOCATION_PROOFS)

    def _tripped(self, detector: Detector, why: str, now: float) -> Trip:
        detector.trips(why, now)
        n, bad = max(1, detector.n), detector.bad
        parts = [
            f"{count} {word}"
            for count, word in (
                (detector.errors, "failed"),
                (detector.late, "late"),
                (detector.gaps, "silent"),
                (detector.pooled, "of them seen by other sidecars"),
            )
            if count > 0
        ]
        value = detector.fast if why == "fast" else detector.gray
        evidence = (
            f"{bad} of {n} answers bad in {max(0.0, now - detector.since):.1f} s ({', '.join(parts)}), "
            f"{100 * self.normal.background:.2g} % expected; {why} {value:.1f} of {self.threshold:.1f}, "
            f"a false alarm in {1 / self.rule.false_alarm:.0e} answers"
        )
        ratio = 0.5 * bad / n if why == "fast" else 0.05
        return Trip(why, evidence, self._proofs(max(0.05, ratio)))

    def _proofs(self, ratio: float) -> int:
        """How many good answers in a row make `background` likelier than `ratio` by e^SURE (Wald's test)."""
        ratio = min(0.95, max(ratio, 2.0 * self.normal.background))
        return min(MOST_PROOFS, max(1, ceil(SURE / log((1.0 - self.normal.background) / (1.0 - ratio)))))


def _location_step(spread: float, left: float) -> float:
    """What one first token adds to the location statistic, or to that of the probes: bounded on both sides."""
    delta = LN2 / spread
    if delta < LEAST_DELTA:
        delta = LEAST_DELTA
    z = left / spread
    if z > Z_HIGH:
        z = Z_HIGH
    elif not z >= Z_LOW:
        z = Z_LOW
    return delta * (z - 0.5 * delta)
