"""One endpoint as its detector knows it, and what one attempt on it should take.

State alone; `detection` writes it and has the rules.
"""

from math import inf
from typing import Final

from sidecar.core.breaker import Breaker, Permit, State
from sidecar.core.latency import Line
from sidecar.kernel.ids import SessionId

REMEMBERED: Final = 16  # bad answers of an endpoint, for who was charged and how many there were in a minute
MINUTE_S: Final = 60.0
SESSION_CHARGES: Final = 2
SESSION_S: Final = 30.0
FEWEST_FAILING: Final = 5.0  # answers
FAILING: Final = 0.25
MOST_OFFSET: Final = 1.5  # ln: fleets of mixed hardware differ by a factor of four
FEWEST_LEFT: Final = 3
NEWCOMER_OFFSET: Final = 0.5  # ln: how much slower an endpoint may be at first that came later: it may be cold
HEAD_START: Final = 0.3  # of the threshold, after a recovery

_CLOSED: Final = State.CLOSED


class Detector:
    """What is known of one endpoint. Written by its service's `Detection`."""

    __slots__ = (
        "_generation",
        "active",
        "backlog_until",
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
        "last_n",
        "last_sum",
        "late",
        "left_n",
        "left_sum",
        "line",
        "location",
        "location_at",
        "location_n",
        "location_sum",
        "model",
        "most_offset",
        "n",
        "offset",
        "opened_at",
        "panic_bad",
        "panic_n",
        "pooled",
        "recent_bad",
        "recent_n",
        "shared_errors",
        "shared_good",
        "shared_left",
        "shared_location",
        "shared_slow",
        "shared_timed",
        "since",
        "ticks",
        "trial",
        "trial_left",
        "trial_n",
        "tripped",
        "usual_load",
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
        self.usual_load = 0.0
        """At which its offset was learnt, in requests."""
        self.left_sum = 0.0
        self.left_n = 0
        self.last_sum = 0.0
        self.last_n = 0
        self.most_offset = NEWCOMER_OFFSET
        self.backlog_until = -inf
        self.ticks = 0
        self.recent_n = 0.0
        self.recent_bad = 0.0
        self.panic_n = 0.0
        self.panic_bad = 0.0
        self.common_n = 0.0
        self.common_sum = 0.0
        self.tripped = ""
        self.opened_at = inf
        self.shared_good = 0
        self.shared_errors = 0
        self.shared_slow = 0
        self.shared_location = 0.0
        self.shared_timed = 0
        self.shared_left = 0.0
        self._generation = breaker.generation
        # Lists, of at most REMEMBERED: an empty deque has room for 64, and a sidecar may know 100,000 endpoints.
        self.bad_at: list[float] = []
        self.bad_by: list[SessionId | None] = []
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
        self.pooled = 0
        self.since = 0.0
        self.location_n = 0
        self.location_sum = 0.0
        self.location_at = 0.0
        self.trial = 0.0
        self.trial_n = 0
        self.trial_left = 0.0
        self.bad_at.clear()
        self.bad_by.clear()

    def begin(self, threshold: float) -> None:
        """Begins anew if the breaker has moved since the last evidence."""
        breaker = self.breaker
        if self._generation == breaker.generation:
            return
        self._generation = breaker.generation
        if breaker.state is _CLOSED and breaker.why == "proved" and self.trial_n and self.trial > 0.0:
            # It was taken back as slow as it is.
            self.offset = min(MOST_OFFSET, self.offset + self.trial_left / self.trial_n)
        self._clear()
        self.recent_n = self.recent_bad = self.panic_n = self.panic_bad = self.common_n = self.common_sum = 0.0
        if breaker.state is _CLOSED and self.tripped:
            self.fast = self.gray = HEAD_START * threshold
            self.tripped = ""
            self.opened_at = inf

    def remember(self, now: float, session: SessionId | None) -> None:
        """A bad answer, and whose; the oldest of more than REMEMBERED is forgotten."""
        if len(self.bad_at) >= REMEMBERED:
            del self.bad_at[0], self.bad_by[0]
        self.bad_at.append(now)
        self.bad_by.append(session)

    def take_counts(self) -> tuple[int, int, int, float, int, float] | None:
        """What is to be told to other sidecars and was not yet; None: nothing."""
        if not (self.shared_good or self.shared_errors or self.shared_slow or self.shared_timed):
            return None
        counts = (
            self.shared_good,
            self.shared_errors,
            self.shared_slow,
            self.shared_location,
            self.shared_timed,
            self.shared_left,
        )
        self.shared_good = self.shared_errors = self.shared_slow = self.shared_timed = 0
        self.shared_location = self.shared_left = 0.0
        return counts

    @property
    def failing(self) -> bool:
        """Whether so many of the last seconds' answers were bad, by whichever sessions, that it explains one more."""
        return self.recent_n >= FEWEST_FAILING and self.recent_bad > FAILING * self.recent_n

    @property
    def slow(self) -> bool:
        """Whether what speaks against it is slowness more than failures."""
        return 2 * self.errors < self.bad

    @property
    def left(self) -> float | None:
        """What was left unexplained in this second, or the last, as a mean; None: too few first tokens in both."""
        if self.left_n >= FEWEST_LEFT:
            return self.left_sum / self.left_n
        return self.last_sum / self.last_n if self.last_n >= FEWEST_LEFT else None

    def halve(self) -> None:
        """Lets what was counted long ago fade."""
        self.errors //= 2
        self.late //= 2
        self.gaps //= 2
        self.pooled //= 2
        self.bad //= 2
        self.n //= 2

    def forgive(self) -> None:
        """Drops what slowness says: it was not the endpoint's own."""
        self.location = self.location_sum = 0.0
        self.location_n = 0
        if self.slow:
            self.fast = self.gray = 0.0

    def trips(self, why: str, now: float) -> None:
        """Notes what opens it, and since when it has been open but for its probes."""
        if not self.tripped:
            self.opened_at = now
        self.tripped = why

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

    def but_for_one(self) -> int:
        """How many of those that the evidence is made of are not of the session that had most of them."""
        sessions: dict[SessionId, int] = {}
        count = 0
        for at, by in zip(self.bad_at, self.bad_by, strict=True):
            if at >= self.since:
                count += 1
                if by is not None:
                    sessions[by] = sessions.get(by, 0) + 1
        return count - max(sessions.values(), default=1)


class Expectation:
    """What one attempt should take, and what it was called so far. Held by the attempt, to be handed back.

    `late_s` is after how many seconds its first token is late, `late_gap_s` how long a silence within it; infinity: too
    little is known. `expected` is ln of seconds, and so is `granted`: what is taken for well. `bad`: it was counted as
    bad already.
    """

    __slots__ = (
        "bad",
        "detector",
        "expected",
        "granted",
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
        granted: float,
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
        self.granted = granted
        self.load = load
        self.size_bytes = size_bytes
        self.late_s = late_s
        self.late_gap_s = late_gap_s
        self.session = session
        self.bad = False
