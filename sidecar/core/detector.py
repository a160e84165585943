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
2. What is normal is learnt: the ratio of bad answers from the healthier half of the endpoints, over the last seconds
   and over the last minutes, whichever is worse. A fault of all, such as a busy hour, raises it and trips nobody.
3. `expected` is the model's line (`latency`), plus the endpoint's own slow offset, plus what all have in common now.
4. Nothing is judged until `min_samples` answers ended: the breaker's fixed rules serve meanwhile, and always beside.
5. Guards, each there because a run failed without it. Overload: while the endpoints' load is beyond what was ever seen
   to work, or many are bad everywhere, only errors are evidence, and nothing is learnt. Capacity: no trip for slowness
   where the others could not carry the load. Panic: where most answers of the healthier half fail, there is nowhere
   better to go; every breaker closes and none opens.
6. One session charges an endpoint with at most `SESSION_CHARGES` bad answers in `SESSION_S`: a poisoned session must
   not take endpoint after endpoint.
7. A detector belongs to one generation of its breaker: evidence of an older one is dropped, and the first of a new one
   begins at nothing; after a recovery at a share of the threshold, so that a relapse is found sooner (Lucas and
   Crosier 1982, fast initial response).
8. What other sidecars saw comes in as counts (`absorb`) and adds up like our own. `share` gives ours.
"""

from collections import deque
from math import ceil, exp, inf, log
from typing import Final

import msgspec

from sidecar.core.breaker import Breaker, Permit, State
from sidecar.core.latency import Line, Sample, log_s, seconds_of
from sidecar.kernel.ids import EndpointKey, SessionId
from sidecar.kernel.outcome import Result
from sidecar.policy.schema import Adaptive

MAX_LINES: Final = 64  # models and versions with a line of their own; clients make names up
MAX_ACTIVE: Final = 512  # endpoints looked at each second; of more, the others' turn comes with the next
REMEMBERED: Final = 16  # bad answers of an endpoint, for who was charged and how many there were in a minute
MINUTE_S: Final = 60.0
SESSION_CHARGES: Final = 2
SESSION_S: Final = 30.0
RECENT_S: Final = 10.0  # over which "now" is told from "usually"
LONG_S: Final = 600.0
PRIOR: Final = 500.0  # answers' worth of belief in the policy's background ratio
LOAD_S: Final = 120.0
COMMON_S: Final = 3.0
SPAN_S: Final = 1.0  # slowness must have lasted for as long: what one hiccup delays is many answers and one event
PANIC_S: Final = 2.0
OFFSET_S: Final = 300.0
OFFSET_TICKS: Final = 20  # a new endpoint's first seconds count as a plain mean
MOST_OFFSET: Final = 0.5
MOST_COMMON: Final = 1.1  # ln 3
MOST_LEFT: Final = 1.5  # one answer's part in an offset
TRIAL_BAD: Final = 6.0  # the location statistic of the probes, from which they speak against the endpoint
Z_LOW: Final = -3.0
Z_HIGH: Final = 3.5
LEAST_DELTA: Final = 1.0
LN2: Final = 0.6931471805599453
OVERLOAD_TIMES: Final = 1.4
OVERLOAD_SLACK: Final = 4.0  # requests, for endpoints that are nearly idle
OVERLOAD_S: Final = 15.0
OVERLOAD_RATIO: Final = 0.1
COMMON_RATIO: Final = 0.05
PANIC_RATIO: Final = 0.5
CALM_RATIO: Final = 0.2
FEWEST_IN_PANIC: Final = 5.0  # answers within PANIC_S
MOST_BACKGROUND: Final = 0.6  # beyond, no ratio would be telling
HEAD_START: Final = 0.3  # of the threshold, after a recovery
SURE: Final = 3.0  # ln of how much likelier "well" must be before a breaker closes
MOST_PROOFS: Final = 80
LOCATION_PROOFS: Final = 5
QUANTILE: Final = 0.4


class Trip(msgspec.Struct, frozen=True):
    """Enough evidence. `why` is `fast`, `gray` or `location`; so many good `proofs` in a row would outweigh it."""

    why: str
    evidence: str
    proofs: int


class Counts(msgspec.Struct, frozen=True):
    """What one sidecar saw of one endpoint since it last said so; sums, so that they may be added in any order.

    `location` is the sum of the location statistic's steps. `generation` is that of the sender's breaker.
    """

    endpoint: EndpointKey
    good: int
    bad: int
    location: float


class Detector:
    """What is known of one endpoint. Written by its service's `Detection`."""

    __slots__ = (
        "_generation",
        "active",
        "bad",
        "bad_at",
        "bad_by",
        "breaker",
        "common_n",
        "common_sum",
        "errors",
        "fast",
        "gaps",
        "gray",
        "in_flight",
        "late",
        "left_n",
        "left_sum",
        "line",
        "location",
        "location_at",
        "location_n",
        "location_sum",
        "model",
        "n",
        "offset",
        "panic_bad",
        "panic_n",
        "recent_bad",
        "recent_n",
        "shared_bad",
        "shared_good",
        "shared_location",
        "since",
        "ticks",
        "trial",
        "tripped",
        "version",
    )

    def __init__(self, breaker: Breaker, version: str) -> None:
        self.breaker = breaker
        self.version = version
        self.active = False
        self.model = ""
        self.line: Line | None = None
        self.in_flight = 0
        self.offset = 0.0
        self.left_sum = 0.0
        self.left_n = 0
        self.ticks = 0
        self.recent_n = 0.0
        self.recent_bad = 0.0
        self.panic_n = 0.0
        self.panic_bad = 0.0
        self.common_n = 0.0
        self.common_sum = 0.0
        self.tripped = ""
        self.shared_good = 0
        self.shared_bad = 0
        self.shared_location = 0.0
        self._generation = breaker.generation
        self.bad_at: deque[float] = deque(maxlen=REMEMBERED)
        self.bad_by: deque[SessionId | None] = deque(maxlen=REMEMBERED)
        self._clear()

    def _clear(self) -> None:
        self.fast = 0.0
        self.gray = 0.0
        self.location = 0.0
        self.n = 0
        self.bad = 0
        self.errors = 0
        self.late = 0
        self.gaps = 0
        self.since = 0.0
        self.location_n = 0
        self.location_sum = 0.0
        self.location_at = 0.0
        self.trial = 0.0
        self.bad_at.clear()
        self.bad_by.clear()

    def begin(self, threshold: float) -> None:
        """Begins anew if the breaker has moved since the last evidence."""
        breaker = self.breaker
        if self._generation == breaker.generation:
            return
        self._generation = breaker.generation
        self._clear()
        self.recent_n = self.recent_bad = self.panic_n = self.panic_bad = self.common_n = self.common_sum = 0.0
        if breaker.state is _CLOSED and self.tripped:
            self.fast = self.gray = HEAD_START * threshold
            self.tripped = ""

    def charged(self, session: SessionId | None, now: float) -> bool:
        """Whether `session` has charged this endpoint as often as one may."""
        if session is None:
            return False
        times = 0
        for at, by in zip(self.bad_at, self.bad_by, strict=True):
            if by == session and now - at < SESSION_S:
                times += 1
        return times >= SESSION_CHARGES

    def in_a_minute(self, now: float) -> int:
        """How many bad answers the last minute had, REMEMBERED at most."""
        return len([at for at in self.bad_at if now - at < MINUTE_S])


class Detection:
    """The detectors of one service, and what they have in common. Times are monotonic seconds.

    `expect`, `first_token`, `late` and `ended` are on the request's path, in this order; `tick` is to be called once a
    second. `size` is how many endpoints the service has, `floor` how many must stay closed, `background` the ratio of bad answers that is normal now,
    `active` who was heard of lately.
    """

    __slots__ = (
        "_bad_fast",
        "_bad_gray",
        "_capacity",
        "_fast",
        "_good_fast",
        "_good_gray",
        "_gray",
        "_in_flight",
        "_late_min_s",
        "_lines",
        "_load",
        "_load_cap",
        "_load_max",
        "_location",
        "_long_bad",
        "_long_n",
        "_overload_until",
        "_ticked_at",
        "active",
        "background",
        "common",
        "floor",
        "overload",
        "panic",
        "results",
        "rule",
        "size",
        "threshold",
    )

    def __init__(self, rule: Adaptive, now: float) -> None:
        self._lines: dict[tuple[str, str], Line] = {}
        self.active: list[Detector] = []
        self._load = 0.0
        self._load_cap = inf
        self._load_max = 0.0
        self._long_n = 0.0
        self._long_bad = 0.0
        self._overload_until = -inf
        self._capacity = True
        self.results = 0
        self._ticked_at = now
        self.size = 0
        self.floor = 0
        self.background = rule.background
        self.common = 0.0
        self.overload = False
        self.panic = False
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
        self._weigh(rule.background)

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
            return Expectation(detector, permit, "", None, 0.0, 0.0, 0, inf, inf, session)
        # An endpoint's own queue explains its latency only as far as the others' does.
        load = float(in_flight)
        if load > self._load_cap:
            load = self._load_cap
        line = detector.line
        if line is None or model != detector.model:
            line = self._lines.get((model, detector.version))
            if line is None:
                return Expectation(detector, permit, model, None, 0.0, load, size_bytes, inf, inf, session)
            detector.model = model
            detector.line = line
        expected = line.expected(size_bytes, load) + detector.offset + self.common
        if not line.ready or not self._in_flight:
            return Expectation(detector, permit, model, line, expected, load, size_bytes, inf, inf, session)
        late_s = seconds_of(expected + line.tau)
        if late_s < self._late_min_s:
            late_s = self._late_min_s
        return Expectation(detector, permit, model, line, expected, load, size_bytes, late_s, line.late_gap_s, session)

    @property
    def excuses(self) -> bool:
        """Whether so much is bad everywhere that no session and no deadline is to blame for more of it."""
        return self.overload or self.panic or self.background > COMMON_RATIO

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
            expectation.expected = line.expected(expectation.size_bytes, expectation.load)
        left = took - expectation.expected
        late = line.ready and left > line.tau and took_s > self._late_min_s
        if breaker.state is not _CLOSED:
            if line.ready:
                spread = line.spread
                delta = max(LEAST_DELTA, LN2 / spread)
                detector.trial += delta * (min(Z_HIGH, max(Z_LOW, left / spread)) - 0.5 * delta)
                expectation.bad = expectation.bad or late
            return None
        if self.overload:
            return None
        if not detector.active:
            self._activate(detector)
        if len(line.pending) < line.per_tick:
            line.pending.append(Sample(took, expectation.size_bytes, expectation.load, detector.offset))
        bounded = left
        if bounded > MOST_LEFT:
            bounded = MOST_LEFT
        elif not bounded >= -MOST_LEFT:
            bounded = -MOST_LEFT
        detector.left_n += 1
        detector.left_sum += bounded
        if not line.ready or expectation.bad:
            return None
        trip = self._locate(detector, line, left, now) if self._location else None
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
        if self.overload:
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
            if waited and self.overload:
                detector.recent_n += 1.0
                detector.recent_bad += 1.0
                return None
            return self._bad(detector, ERROR, expectation.session if theirs else None, now)
        detector.recent_n += 1.0
        detector.panic_n += 1.0
        detector.shared_good += 1
        fast = detector.fast
        if fast > 0.0:
            fast += self._good_fast
            detector.fast = fast if fast > 0.0 else 0.0
        gray = detector.gray
        if gray > 0.0:
            gray += self._good_gray
            detector.gray = gray if gray > 0.0 else 0.0
            detector.n += 1
        return None

    def verdict(self, expectation: "Expectation", result: Result) -> Result:
        """What a probe proves that ended as `result`: a success that was late is none.

        After a trip for location one that is well only by itself proves nothing yet: all of them together must lean to
        well.
        """
        if result is not _SUCCESS:
            return result
        if expectation.bad:
            return _FAILURE
        detector = expectation.detector
        if detector.tripped == LOCATION and expectation.model:
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
            if detector.shared_good or detector.shared_bad or detector.shared_location != 0.0:
                said.append(
                    Counts(
                        EndpointKey(detector.breaker.key),
                        detector.shared_good,
                        detector.shared_bad,
                        detector.shared_location,
                    )
                )
                detector.shared_good = detector.shared_bad = 0
                detector.shared_location = 0.0
        return said

    def absorb(self, detector: Detector, counts: Counts, now: float) -> Trip | None:
        """Adds what another sidecar saw. Its sessions are its own affair: it has left out what one session did."""
        if detector.breaker.state is not _CLOSED:
            return None
        detector.begin(self.threshold)
        if not detector.active:
            self._activate(detector)
        detector.recent_n += counts.good + counts.bad
        detector.panic_n += counts.good + counts.bad
        self.results += counts.good + counts.bad
        detector.fast = max(0.0, detector.fast + counts.good * self._good_fast)
        detector.gray = max(0.0, detector.gray + counts.good * self._good_gray)
        if detector.gray > 0.0:
            detector.n += counts.good
        trip: Trip | None = None
        if self._location and counts.location != 0.0 and not self.overload:
            detector.location = max(0.0, detector.location + counts.location)
            if detector.location >= self.rule.location_trip:
                trip = self._located(detector, now)
        for _ in range(min(counts.bad, REMEMBERED)):
            trip = trip or self._counted_bad(detector, POOLED, None, now)
        return trip

    # Once a second.

    def tick(self, now: float) -> bool:
        """Learns, and weighs what is normal; True if panic began: every breaker is to close."""
        elapsed_s = min(60.0, max(0.0, now - self._ticked_at))
        self._ticked_at = now
        for line in self._lines.values():
            line.learn(now)
        active = self.active[:MAX_ACTIVE]
        closed = [detector for detector in active if detector.breaker.state is _CLOSED]
        self._learn_offsets(closed, elapsed_s)
        half = self._healthier_half(closed)
        self._weigh_background(half, len(closed), elapsed_s)
        self._weigh_load(closed, now, elapsed_s)
        began = self._watch_for_panic(half, len(closed))
        self._decay(active, elapsed_s)
        if len(self.active) > MAX_ACTIVE:
            self.active = self.active[MAX_ACTIVE:] + active
        return began

    def keep(self, detectors: list[Detector]) -> None:
        """Forgets the endpoints that are not among these."""
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
                return None
            line = self._lines[model, version] = Line(self.rule, now)
        return line

    def _bad(self, detector: Detector, word: str, session: SessionId | None, now: float) -> Trip | None:
        detector.recent_n += 1.0
        detector.recent_bad += 1.0
        detector.panic_n += 1.0
        detector.panic_bad += 1.0
        if detector.charged(session, now):
            return None
        detector.shared_bad += 1
        return self._counted_bad(detector, word, session, now)

    def _counted_bad(self, detector: Detector, word: str, session: SessionId | None, now: float) -> Trip | None:
        if detector.gray == 0.0:
            detector.since = now
            detector.n = detector.bad = detector.errors = detector.late = detector.gaps = 0
        detector.n += 1
        detector.bad += 1
        if word == ERROR:
            detector.errors += 1
        elif word == LATE:
            detector.late += 1
        elif word == SILENT:
            detector.gaps += 1
        detector.bad_at.append(now)
        detector.bad_by.append(session)
        threshold = self.threshold
        detector.fast = min(2.0 * threshold, detector.fast + self._bad_fast)
        detector.gray = min(2.0 * threshold, detector.gray + self._bad_gray)
        fast = self._fast and detector.fast >= threshold
        if not fast and not (self._gray and detector.gray >= threshold):
            return None
        if not self.ready or detector.in_a_minute(now) < self.rule.min_bad:
            return None
        if not detector.errors and (now - detector.since < SPAN_S or not self._may_slow()):
            return None
        return self._tripped(detector, "fast" if fast else "gray", now)

    def _may_slow(self) -> bool:
        """Whether slowness may open: there are others to be slower than, and they could carry the load."""
        return self.size >= 2 and (self._capacity or not self.rule.guards)

    def _locate(self, detector: Detector, line: Line, left: float, now: float) -> Trip | None:
        if not self._location:
            return None
        spread = line.spread
        delta = LN2 / spread
        if delta < LEAST_DELTA:
            delta = LEAST_DELTA
        z = left / spread
        if z > Z_HIGH:
            z = Z_HIGH
        elif not z >= Z_LOW:
            z = Z_LOW
        step = delta * (z - 0.5 * delta)
        detector.shared_location += step
        location = detector.location + step
        if location <= 0.0:
            detector.location = 0.0
            detector.location_n = 0
            detector.location_sum = 0.0
            return None
        if not detector.location_n:
            detector.location_at = now
        detector.location = min(location, 2.0 * self.rule.location_trip)
        detector.location_n += 1
        detector.location_sum += left
        if location < self.rule.location_trip:
            return None
        return self._located(detector, now)

    def _located(self, detector: Detector, now: float) -> Trip | None:
        if not self.ready or now - detector.location_at < SPAN_S or not self._may_slow():
            return None
        detector.tripped = LOCATION
        count = max(1, detector.location_n)
        evidence = (
            f"first tokens took {exp(min(8.0, detector.location_sum / count)):.1f} times what was expected over the "
            f"last {count} answers in {max(0.0, now - detector.location_at):.1f} s; location {detector.location:.1f} "
            f"of {self.rule.location_trip:g}"
        )
        return Trip(LOCATION, evidence, LOCATION_PROOFS)

    def _tripped(self, detector: Detector, why: str, now: float) -> Trip:
        detector.tripped = why
        n, bad = max(1, detector.n), detector.bad
        parts = [
            f"{count} {word}"
            for count, word in (
                (detector.errors, "failed"),
                (detector.late, "late"),
                (detector.gaps, "silent"),
                (bad - detector.errors - detector.late - detector.gaps, "seen by other sidecars"),
            )
            if count > 0
        ]
        value = detector.fast if why == "fast" else detector.gray
        evidence = (
            f"{bad} of {n} answers bad in {max(0.0, now - detector.since):.1f} s ({', '.join(parts)}), "
            f"{100 * self.background:.2g} % expected; {why} {value:.1f} of {self.threshold:.1f}, "
            f"a false alarm in {1 / self.rule.false_alarm:.0e} answers"
        )
        ratio = 0.5 * bad / n if why == "fast" else 0.05
        return Trip(why, evidence, self._proofs(max(0.05, ratio)))

    def _proofs(self, ratio: float) -> int:
        """How many good answers in a row make `background` likelier than `ratio` by e^SURE (Wald's test)."""
        ratio = min(0.95, max(ratio, 2.0 * self.background))
        return min(MOST_PROOFS, max(1, ceil(SURE / log((1.0 - self.background) / (1.0 - ratio)))))

    def _weigh(self, background: float) -> None:
        p = min(MOST_BACKGROUND, max(self.rule.background, background))
        self.background = p
        fast = min(0.95, max(self.rule.fast_ratio, 3.0 * p))
        gray = min(0.9, max(self.rule.gray_ratio, 6.0 * p))
        self._bad_fast = log(fast / p)
        self._good_fast = log((1.0 - fast) / (1.0 - p))
        self._bad_gray = log(gray / p)
        self._good_gray = log((1.0 - gray) / (1.0 - p))

    def _learn_offsets(self, closed: list[Detector], elapsed_s: float) -> None:
        """What each is slower than its line, and what all are together; their sum is what `left` leaves out."""
        means: list[float] = []
        centre = 0.0
        for detector in closed:
            centre += detector.offset
        if closed:
            # Only what the line does not say already: together they are on the line.
            centre *= min(1.0, elapsed_s / COMMON_S) / len(closed)
        for detector in closed:
            detector.offset -= centre
            count = detector.left_n
            if count:
                left = detector.left_sum / count
                detector.left_n = 0
                detector.left_sum = 0.0
                detector.common_n += count
                detector.common_sum += count * (left + self.common)
                detector.ticks += 1
                pace = 1.0 / (detector.ticks + 1) if detector.ticks < OFFSET_TICKS else min(1.0, elapsed_s / OFFSET_S)
                moved = detector.offset + pace * left
                detector.offset = min(MOST_OFFSET, max(-MOST_OFFSET, moved))
            if detector.common_n >= 1.0:
                means.append(detector.common_sum / detector.common_n)
        if len(means) >= 2:
            means.sort()
            common = means[int(QUANTILE * (len(means) - 1))]
            self.common = min(MOST_COMMON, max(-MOST_COMMON, common))
        else:
            self.common = 0.0

    def _healthier_half(self, closed: list[Detector]) -> list[Detector]:
        detectors = [detector for detector in closed if detector.recent_n > 0.0]
        if len(detectors) < 2:
            return detectors
        ranked = sorted(detectors, key=_recent_ratio)
        return ranked[: len(ranked) // 2]

    def _weigh_background(self, half: list[Detector], closed: int, elapsed_s: float) -> None:
        n = sum([detector.recent_n for detector in half])
        bad = sum([detector.recent_bad for detector in half])
        # What was counted over RECENT_S is taken in over as long.
        share = elapsed_s / RECENT_S
        keep = exp(-elapsed_s / LONG_S)
        if not self.overload:
            self._long_n = self._long_n * keep + n * share
            self._long_bad = self._long_bad * keep + bad * share
        usual = (self._long_bad + PRIOR * self.rule.background) / (self._long_n + PRIOR)
        # A lone endpoint is its own better half: its failing would excuse itself.
        current = bad / n if n >= 5.0 and closed >= 2 else 0.0
        self._weigh(max(usual, current))

    def _weigh_load(self, closed: list[Detector], now: float, elapsed_s: float) -> None:
        if not closed:
            return
        loads = sorted([float(detector.in_flight) for detector in closed])
        load = loads[int(QUANTILE * (len(loads) - 1))]
        self._load_cap = 1.5 * load + 4.0 if len(loads) >= 2 else inf
        pace = min(1.0, elapsed_s / 5.0)
        self._load += pace * (load - self._load)
        ratios = sorted([_recent_ratio(detector) for detector in closed])
        most = OVERLOAD_TIMES * self._load_max + OVERLOAD_SLACK
        failing = ratios[int(QUANTILE * (len(ratios) - 1))]
        if self.rule.guards and self.ready and len(closed) >= 2:
            if self._load > most or failing > OVERLOAD_RATIO:
                self._overload_until = now + OVERLOAD_S
            # Where nothing gets through it is no mere overload, and what fails shall open if there is a fallback.
            self.overload = now < self._overload_until and failing < PANIC_RATIO
        else:
            self.overload = False
        if self._load > self._load_max:
            # What lasts becomes normal, slowly.
            pace = min(1.0, elapsed_s / (LOAD_S if not self.overload else LONG_S)) if self.ready else 1.0
            self._load_max += pace * (self._load - self._load_max)
        else:
            self._load_max += (self._load - self._load_max) * min(1.0, elapsed_s / (6.0 * LONG_S))
        count = len(closed)
        mean = sum(loads) / count
        self._capacity = count >= 2 and min(mean, self._load_cap) * count / (count - 1) <= most

    def _watch_for_panic(self, half: list[Detector], closed: int) -> bool:
        n = sum([detector.panic_n for detector in half])
        bad = sum([detector.panic_bad for detector in half])
        ratio = bad / n if n > 0.0 else 0.0
        before = self.panic
        if not self.rule.guards or self.floor == 0:
            self.panic = False
        elif before:
            self.panic = ratio > CALM_RATIO
        else:
            self.panic = closed > 0 and n >= FEWEST_IN_PANIC and ratio > PANIC_RATIO
        return self.panic and not before

    def _decay(self, active: list[Detector], elapsed_s: float) -> None:
        recent, common, panic = exp(-elapsed_s / RECENT_S), exp(-elapsed_s / COMMON_S), exp(-elapsed_s / PANIC_S)
        idle = False
        for detector in active:
            detector.recent_n *= recent
            detector.recent_bad *= recent
            detector.common_n *= common
            detector.common_sum *= common
            detector.panic_n *= panic
            detector.panic_bad *= panic
            if (
                detector.recent_n < 0.01
                and detector.common_n < 0.01
                and not detector.shared_good
                and not detector.shared_bad
            ):
                detector.active = False
                idle = True
        if idle:
            self.active = [detector for detector in self.active if detector.active]


class Expectation:
    """What one attempt should take, and what it was called so far. Held by the attempt, to be handed back.

    `late_s` is after how many seconds its first token is late, `late_gap_s` how long a silence within it; infinity: too
    little is known. `expected` is ln of seconds. `bad`: it was counted as bad already.
    """

    __slots__ = (
        "bad",
        "detector",
        "expected",
        "late_gap_s",
        "late_s",
        "line",
        "load",
        "model",
        "permit",
        "session",
        "size_bytes",
    )

    def __init__(
        self,
        detector: Detector,
        permit: Permit,
        model: str,
        line: Line | None,
        expected: float,
        load: float,
        size_bytes: int,
        late_s: float,
        late_gap_s: float,
        session: SessionId | None,
    ) -> None:
        self.detector = detector
        self.permit = permit
        self.model = model
        self.line = line
        self.expected = expected
        self.load = load
        self.size_bytes = size_bytes
        self.late_s = late_s
        self.late_gap_s = late_gap_s
        self.session = session
        self.bad = False


LATE: Final = "late"
SILENT: Final = "silent"
ERROR: Final = "error"
POOLED: Final = "pooled"
LOCATION: Final = "location"
_CLOSED: Final = State.CLOSED
_SUCCESS: Final = Result.SUCCESS
_FAILURE: Final = Result.FAILURE
_IGNORED: Final = Result.IGNORED


def _recent_ratio(detector: Detector) -> float:
    return detector.recent_bad / detector.recent_n if detector.recent_n > 0.0 else 0.0
