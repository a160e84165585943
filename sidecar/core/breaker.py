"""The breaker: one machine for endpoints, sessions and kinds of request; two steps, acquire before and record after.

```
                 evidence (unless the floor forbids)
        CLOSED ----------------------------------------> OPEN <---+
           ^                                               |      | a probe failed: the wait doubles
           | `successes` probes succeeded                  | the wait is over and somebody asks
           +------------------- HALF_OPEN <----------------+------+
```

Two steps with a permit between them, and not a wrapper around a call: an LLM attempt lasts minutes, and its result
must count for the state that admitted it.

1. A permit carries the generation of the state that gave it. A result of an older generation changes nothing.
2. Half-open lends exactly `probes` permits at a time, each with a lease: a probe whose owner vanished frees its slot
   when the lease ends, and a result after that counts for nothing.
3. Three results and overload: only SUCCESS and FAILURE are evidence. A probe that ends otherwise frees its slot.
4. Closed opens on `consecutive` failures in a row, or when `failure_ratio` of at least `min_requests` results of the
   last `window` failed. Only a failure opens: a success that completes the minimum does not.
5. Open waits `open` * 2^k, at most `open_max`. k grows with every failed probe, and with a trip that comes before the
   breaker has stayed closed for as long as it last waited; after that long it starts again at 0.
6. A detector (`detection`) opens it by `trip`, with evidence of its own and so many probes in a row as outweigh it,
   twice as many once one failed. One probe is lent until the first is good, then up to `MOST_PROBES` at a time: sixty
   one by one would take minutes. After `PATIENCE_S`, `successes` of them are enough: where traffic is thin the rest may
   never come.
7. `shadow` runs the whole machine and refuses nobody (`shadow_denied` counts whom it would have refused); `off` judges
   nothing. An operator's `open` is no evidence but an order: it refuses in every mode, passes the floor, and lets no
   probe through until the next order, or its end (then, if it is `off`, it closes). `hold` leaves the state as it is,
   whatever is observed.
8. Where sidecars share it, what they agreed on comes in by `adopt`, and probes are lent by all of them together
   (`Lender`): this machine then moves neither by its wait nor by a probe's result, but asks and tells. What it trips
   by itself is its own, and probed by its own, until the others agree. Without the log (`lost`) it is all its own.

The machine returns what happened and calls nobody. A `Roster` is shared state, not a listener: it knows which breakers
of a service are not closed, and whose endpoint changed, so that the floor and the pools need not visit every one.
"""

from enum import Enum, StrEnum
from math import ceil, floor, inf
from types import MappingProxyType
from typing import Final, Literal, Protocol

import msgspec

from sidecar.core.window import Window
from sidecar.kernel.count import counted
from sidecar.kernel.outcome import Ending, Result
from sidecar.policy.schema import Adaptive, BreakerRule

VERDICT_WAIT_S: Final = 1.0  # what a refused client waits while all probes are out: their verdict is due soon
MAX_DOUBLINGS: Final = 32  # 1 ms doubled 32 times is past every `open_max`; bounds the shift
MOST_PROBES: Final = 8  # at a time, of an endpoint that must prove itself by many: a few per cent of what it can carry
LEAST_SHARE: Final = 0.1
MOST_TIMES: Final = 2  # how often the proofs that a trip asks for, after failed probes
PATIENCE_S: Final = 60.0
FEWEST_REMEMBERED: Final = 512  # changes whose node a roster knows; of a large service as many as it has endpoints
FEW: Final = 5  # up to this many endpoints the floor rounds down: with ceil, of 2 none could open at a ratio above 0.5

Action = Literal["open", "close", "reset", "hold"]


class Scope(StrEnum):
    """Whose breaker it is."""

    NODE = "node"
    SESSION = "session"
    REQUEST = "request"


class State(Enum):
    """OPEN refuses."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Event(Enum):
    """What moves a breaker."""

    TRIPPED = "tripped"
    WAITED = "waited"
    PROVED = "proved"
    PROBE_FAILED = "probe_failed"
    ORDERED_OPEN = "ordered_open"
    ORDERED_CLOSED = "ordered_closed"
    AGREED_CLOSED = "agreed_closed"
    AGREED_OPEN = "agreed_open"
    AGREED_HALF_OPEN = "agreed_half_open"


TRANSITIONS = MappingProxyType(
    {
        (State.CLOSED, Event.TRIPPED): State.OPEN,
        (State.OPEN, Event.WAITED): State.HALF_OPEN,
        (State.HALF_OPEN, Event.PROVED): State.CLOSED,
        (State.HALF_OPEN, Event.PROBE_FAILED): State.OPEN,
        (State.CLOSED, Event.ORDERED_OPEN): State.OPEN,
        (State.OPEN, Event.ORDERED_OPEN): State.OPEN,
        (State.HALF_OPEN, Event.ORDERED_OPEN): State.OPEN,
        (State.CLOSED, Event.ORDERED_CLOSED): State.CLOSED,
        (State.OPEN, Event.ORDERED_CLOSED): State.CLOSED,
        (State.HALF_OPEN, Event.ORDERED_CLOSED): State.CLOSED,
        **{(state, Event.AGREED_CLOSED): State.CLOSED for state in State},
        **{(state, Event.AGREED_OPEN): State.OPEN for state in State},
        **{(state, Event.AGREED_HALF_OPEN): State.HALF_OPEN for state in State},
    }
)

_CLOSED: Final = State.CLOSED
_OPEN: Final = State.OPEN
_HALF_OPEN: Final = State.HALF_OPEN
_SUCCESS: Final = Result.SUCCESS
_FAILURE: Final = Result.FAILURE
_REOPENED: Final = frozenset({"probe_failed", "lease_expired", "inconclusive", "withdrawn", "log_away"})
_AGREED: Final = {
    State.CLOSED: Event.AGREED_CLOSED,
    State.OPEN: Event.AGREED_OPEN,
    State.HALF_OPEN: Event.AGREED_HALF_OPEN,
}


class Transition(msgspec.Struct, frozen=True):
    """A change of state, as it is logged and shared.

    `at` is monotonic seconds. `why` is one word of a bounded set (`consecutive`, `failure_ratio`, `fast`, `gray`,
    `location`, `stalled`, `canary`, `waited`, `probe_failed`, `proved`, `operator`, `mode_off`, `floor`, `capacity`,
    `panic`, and of what other sidecars did `lease_expired`, `inconclusive`, `withdrawn`, `log_away`); `evidence` says
    it in words. `generation` is the new one. `agreed`: it came from the log, and must not go there again. The rest is
    of an open breaker, for those who shall wait and prove as long as this one: how long it waits, what its shortest and
    longest wait are, how often it doubled, how many probes outweigh its evidence, how long it takes to its full share.
    """

    scope: Scope
    key: str
    service: str
    old: State
    new: State
    at: float
    why: str
    evidence: str
    generation: int
    by: str = ""
    agreed: bool = False
    wait_s: float = 0.0
    base_s: float = 0.0
    max_s: float = 0.0
    doublings: int = 0
    proofs: int = 0
    ramp_s: float = 0.0


class Lender(Protocol):
    """Who lends probes for all sidecars together; nothing here waits or raises."""

    def wants(self, breaker: "Breaker") -> None:
        """A request would be a probe, and none is lent to us."""

    def ended(self, breaker: "Breaker", seq: int, result: Result, why: str) -> None:
        """Probe `seq` came to this."""


class Agreed(msgspec.Struct, frozen=True):
    """What all sidecars agree on about one breaker. Times are monotonic seconds of this process.

    `epoch` and `version` are the register's. `until` is when an open one may be probed, `ramp_until` when a closed one
    has its full share, `held_until` when an order ends (infinity: with the next; -infinity: there is none). `by` is who
    ordered it, `observer` which sidecar said so.
    """

    state: State
    epoch: int
    version: int
    since: float
    until: float
    why: str
    evidence: str
    by: str
    observer: str
    held_until: float = -inf
    wait_s: float = 0.0
    base_s: float = 0.0
    max_s: float = 0.0
    doublings: int = 0
    proofs: int = 0
    ramp_s: float = 0.0
    ramp_until: float = -inf


class Permit:
    """Leave to try once. `moved` is set on the probe whose asking turned the breaker half-open."""

    __slots__ = ("generation", "id", "moved", "probe")

    def __init__(
        self,
        generation: int,
        probe: bool = False,
        id: int = 0,
        moved: Transition | None = None,
    ) -> None:
        self.generation = generation
        self.probe = probe
        self.id = id
        self.moved = moved


class Denied(msgspec.Struct, frozen=True):
    """No leave before `retry_at` (monotonic seconds); there is no promise of one then."""

    retry_at: float


OUTSIDER: Final = Permit(-1)
"""The permit of a request that proves nothing: of no generation, so whatever comes of it changes nothing."""

FRESH: Final = Permit(0)
"""The permit of a breaker that never moved: what a session has that never failed and so has no breaker yet."""


class Roster:
    """The breakers of one service that are not closed, and how many must be.

    `stirs` grows with everything but time that may change who refuses: what was found out about them all stays true
    while it stands, and but for those `since` names when it moved on.
    """

    __slots__ = (
        "_stirred",
        "load",
        "load_most",
        "minimum",
        "not_closed",
        "panic",
        "rate",
        "rate_most",
        "size",
        "stirs",
    )

    def __init__(self) -> None:
        self.not_closed: dict[str, Breaker] = {}
        self.stirs = 0
        self._stirred: list[str] = []
        self.size = 0
        self.minimum = 0
        self.panic = False
        """Nobody may open: there is nowhere better to go."""
        self.load = 0.0
        self.load_most = inf
        """Requests in flight on those that are closed, and how many one of them can carry."""
        self.rate = 0.0
        self.rate_most = inf
        """The same of answers a second."""

    def resize(self, size: int, min_closed_ratio: float) -> None:
        """Sets how many breakers there are and which share of them must stay closed; 0: none."""
        self.size = size
        self.minimum = min_closed(size, min_closed_ratio)

    def unlearn(self) -> None:
        """Drops what the detector said of all of them: it is gone."""
        self.panic = False
        self.load = 0.0
        self.load_most = inf
        self.rate = 0.0
        self.rate_most = inf

    def stir(self, key: str) -> None:
        """Something of `key` changed: its breaker, or another thing that decides whether it may serve."""
        self.stirs += 1
        stirred = self._stirred
        stirred.append(key)
        if len(stirred) > 2 * max(self.size, FEWEST_REMEMBERED):
            del stirred[: len(stirred) // 2]

    def since(self, stirs: int) -> list[str] | None:
        """Whose changes came after `stirs`, repeats included; None where that is no longer known."""
        count = self.stirs - stirs
        if count > len(self._stirred):
            return None
        return self._stirred[-count:] if count > 0 else []

    @property
    def missing(self) -> int:
        """How many more would have to be closed; positive after the floor rose or endpoints left."""
        return max(0, self.minimum - (self.size - len(self.not_closed)))

    def may_open(self, *, carries: bool = True) -> bool:
        """Whether one more may leave the closed state: enough stay, and can take over what it `carries`, if it does."""
        left = self.size - len(self.not_closed) - 1
        if self.panic:
            return False
        if carries and self.minimum and (self.load > self.load_most * left or self.rate > self.rate_most * left):
            return False
        return left >= self.minimum or self.minimum == 0


class Breaker:
    """One breaker. `now` is monotonic seconds everywhere; a clock that goes backwards only makes waits longer.

    `lease_s` is how long a probe may take: longer than any attempt, so that only lost probes reach it.
    """

    __slots__ = (
        "_consecutive",
        "_denied",
        "_doublings",
        "_enforced",
        "_held",
        "_held_until",
        "_lease_s",
        "_lender",
        "_lent",
        "_needed",
        "_off",
        "_open_max_s",
        "_open_s",
        "_permit",
        "_probe_id",
        "_probes",
        "_proofs",
        "_ramp_s",
        "_roster",
        "_rule",
        "_until",
        "_wait_s",
        "_window",
        "bad",
        "by",
        "cause",
        "epoch",
        "evidence",
        "generation",
        "good",
        "held_closed",
        "key",
        "observer",
        "ours",
        "passes",
        "ramp_until",
        "scope",
        "service",
        "shadow_denied",
        "since",
        "state",
        "version",
        "why",
    )

    def __init__(
        self,
        scope: Scope,
        key: str,
        service: str,
        rule: BreakerRule,
        now: float,
        *,
        lease_s: float,
        roster: Roster | None = None,
    ) -> None:
        self.scope = scope
        self.key = key
        self.service = service
        self.state = _CLOSED
        self.generation = 0
        self.since = now
        self.why = ""
        self.evidence = ""
        """What the last change was concluded from; of an open breaker what opened it."""
        self.cause = ""
        """The same in a word: the `why` of the change that the evidence came with."""
        self.by = ""
        self.observer = ""
        """Which sidecar said the last change, of one that came from the log."""
        self.epoch = 0
        self.version = 0
        """Of the log's register, as far as it is known here; 0: none."""
        self.ours = False
        """It is open on what we saw ourselves, and not, or not yet, by what all agreed on."""
        self.passes = True
        """Everybody gets a permit: closed, or nothing is enforced."""
        self.held_closed = 0
        """Trips that the floor forbade."""
        self.shadow_denied = 0
        """Requests that enforcing would have refused."""
        self.good = 0
        self.bad = 0
        """Of a session or a kind of request: its results since they were last told to the log (`fleet` counts)."""
        self._roster = roster
        self._permit = FRESH
        self._denied = Denied(now)
        self._consecutive = 0
        self._window: Window | None = None
        self._until = now
        self._wait_s = 0.0
        self._doublings = 0
        self._held = False
        self._held_until = inf
        self._lender: Lender | None = None
        self._lent: list[int] = []
        self._probes: dict[int, float] = {}
        self._probe_id = 0
        self._proofs = 0
        self._needed = 0
        self._open_s = 0.0
        self._open_max_s = 0.0
        self._ramp_s = 0.0
        self.ramp_until = -inf
        """Until then it gets a growing share of what it would get: it has just proved itself, with few at a time. Past
        where nothing is enforced, and after any other change."""
        self._off = False
        self._enforced = True
        self._lease_s = lease_s
        self._rule = rule
        self.use_rule(rule, now, lease_s=lease_s)

    @property
    def unblemished(self) -> bool:
        """Closed, and nothing in its memory speaks against it: a new breaker would judge the same."""
        return self.state is _CLOSED and self._consecutive == 0 and (self._window is None or self._window.marked == 0)

    @property
    def probes_out(self) -> int:
        """How many probes are lent, lost ones included until somebody asks for their slot."""
        return len(self._probes)

    def acquire(self, now: float) -> Permit | Denied:
        """Asks for one attempt. Every permit must come back through `record`, with whatever result."""
        if self.state is _CLOSED:
            return self._permit
        if self._holds(now):
            return Denied(self.retry_at(now))
        if self._off:
            return self._permit  # an order was all that kept it open, and is over
        if self._lender is not None:
            return self._borrow(self._lender, now)
        moved: Transition | None = None
        if self.state is _OPEN:
            if now < self._until:
                return self._denied if self._enforced else self._shadowed()
            moved = self._move(Event.WAITED, now, "waited", f"open for {self._wait_s:g} s", "")
        elif not self._slot_free(now):
            return Denied(self.retry_at(now)) if self._enforced else self._shadowed()
        self._probe_id += 1
        self._probes[self._probe_id] = now + self._lease_s
        return Permit(self.generation, True, self._probe_id, moved)

    def probe(self, now: float) -> Permit | None:
        """A probe of somebody who is no client and whom nothing refuses: as `acquire`, or nothing."""
        denied = self.shadow_denied
        permit = self.acquire(now)
        self.shadow_denied = denied
        return permit if isinstance(permit, Permit) and permit.probe else None

    def record(self, permit: Permit, result: Result, now: float, why: str = "") -> Transition | None:
        """Gives a permit back with what came of it; `why` names the ending for the evidence."""
        if permit.generation != self.generation or self._off:
            return None
        if self.state is _CLOSED:
            if result is _SUCCESS:
                self._consecutive = 0
                if self._window is not None:
                    self._window.count(now, False)
                return None
            return self._failed(now, why) if result is _FAILURE else None
        return self._probed(permit, result, now, why) if permit.probe else None

    def trip(self, why: str, evidence: str, proofs: int, rule: Adaptive, now: float) -> Transition | None:
        """Opens on a detector's evidence: `proofs` good probes in a row close it. Waits and ramp are `rule`'s.

        None where it is not closed, judges nothing, or too few others are closed.
        """
        if self.state is not _CLOSED or self._off or not self._may_open(now):
            return None
        self._needed = proofs
        self._open_s = float(rule.open_s)
        self._open_max_s = float(rule.open_max_s)
        self._ramp_s = float(rule.ramp_s)
        return self._open(why, evidence, now)

    def can_probe(self, now: float) -> bool:
        """Whether `acquire` would give a probe."""
        if self.state is _CLOSED or self._holds(now) or self._off:
            return False
        if self._lender is not None:
            return bool(self._lent)
        return now >= self._until if self.state is _OPEN else self._slot_free(now)

    def waited(self, now: float) -> bool:
        """Whether it is open no longer by order or by its wait: some request may try, as a probe or beside one."""
        return not self._holds(now) and (self.state is _HALF_OPEN or (self.state is _OPEN and now >= self._until))

    def share(self, now: float) -> float:
        """Which share of its requests it is to get, 0.1-1, rising until `ramp_until`."""
        left_s = self.ramp_until - now
        return 1.0 if left_s <= 0.0 else max(LEAST_SHARE, 1.0 - left_s / self._ramp_s)

    @property
    def failing(self) -> bool:
        """Not closed, or closed only because the floor forbids it to open: failures have their explanation here."""
        return self.state is not _CLOSED or self._consecutive >= self._rule.consecutive

    def probe_at(self, now: float) -> float:
        """When a probe may be had if nothing else happens: `now` at the earliest, infinity if never."""
        if self.state is _CLOSED:
            return inf
        if self._holds(now):
            return self._held_until
        if self._lender is not None:
            if self._lent:
                return now
            return max(self._until, now + VERDICT_WAIT_S) if self.state is _OPEN else now + VERDICT_WAIT_S
        if self.state is _OPEN:
            return max(now, self._until)
        return now if self._slot_free(now) else min(self._probes.values())

    def retry_at(self, now: float) -> float:
        """When a refused client should ask again (monotonic seconds); `now` if it need not wait."""
        if self.passes:
            return now
        if self._holds(now):
            return min(now + self._rule.open_s, self._held_until)
        return min(self.probe_at(now), now + VERDICT_WAIT_S) if self.state is _HALF_OPEN else max(now, self._until)

    def force(self, action: Action, now: float, by: str, until: float = inf) -> Transition | None:
        """Obeys an operator. None if the state was that already (an order to hold it still holds).

        `open` refuses until the next order, or `until`; from then it may be probed. `close` closes, and remembers how
        often it tripped; `reset` forgets all. `hold` leaves it closed or open until then, one on trial open.
        """
        opens = action == "open" or (action == "hold" and self.state is not _CLOSED)
        self._needed = 0
        if action == "reset":
            self._wait_s = 0.0
            self._doublings = 0
        self._held = action in ("open", "hold")
        self._held_until = until
        self._lender = None
        self.ours = False
        transition = self._move(
            Event.ORDERED_OPEN if opens else Event.ORDERED_CLOSED, now, "operator", f"{action} by {by}", by
        )
        return transition if transition.old is not transition.new else None

    def expire(self, now: float) -> Transition | None:
        """Ends an order whose time is over: an open one may be probed now, or closes where the policy says `off`."""
        self._end_order(now)
        return self._turn_off(now) if self._off and not self._held and self.state is not _CLOSED else None

    # What all sidecars agree on.

    def adopt(self, agreed: Agreed, lender: Lender, now: float) -> Transition | None:
        """Takes over what all agree on. None if the state was that already, or nothing may open here.

        Refused are, unless ordered: what would leave too few closed of those that are known here, and anything where
        the policy says `off`.
        """
        known = agreed.epoch == self.epoch and agreed.version == self.version
        self.epoch = agreed.epoch
        self.version = agreed.version
        state = agreed.state
        held, was_held = agreed.held_until > now, self._held
        if not held:
            self._held = False  # an order that stood here is over
            if self._off and self.state is _CLOSED:
                return None
            if self._off and state is not _CLOSED:
                return self._turn_off(now)
        if state is not _CLOSED and self.state is _CLOSED and not held and not self._may_open(now, carries=False):
            return None
        self.observer = agreed.observer
        self.ours = False
        # Another half-open lends other probes.
        same = state is self.state and held == was_held and (state is not _HALF_OPEN or known)
        moved: Transition | None = None
        if not same:
            moved = self._move(_AGREED[state], now, agreed.why, agreed.evidence, agreed.by, agreed=True)
        elif held:
            self.by = agreed.by  # an order in the place of another
        self.since = agreed.since
        self._held = held
        self._held_until = agreed.held_until
        self._wait_s = agreed.wait_s
        self._doublings = agreed.doublings
        self._needed = agreed.proofs
        self._open_s = agreed.base_s
        self._open_max_s = agreed.max_s
        self._ramp_s = agreed.ramp_s
        self._lender = None if state is _CLOSED else lender
        if state is _OPEN:
            self._until = agreed.until
            self._denied = Denied(agreed.until)
        elif state is _CLOSED and self._enforced and agreed.ramp_until > now:
            self.ramp_until = agreed.ramp_until
        self._set_passes()
        self.stir()
        return moved if moved is not None and moved.old is not moved.new else None

    def lend(self, seq: int) -> bool:
        """A probe of this half-open for the next request; False if that is over."""
        if self.state is not _HALF_OPEN or self._lender is None:
            return False
        self._lent.append(seq)
        self.stir()
        return True

    def holds(self, seq: int) -> bool:
        """Whether a probe that was lent is still in hand: no request has used it."""
        return seq in self._lent

    def out(self, seq: int) -> bool:
        """Whether a request has this probe."""
        return seq in self._probes

    def take_back(self, seq: int) -> bool:
        """Takes back a probe that no request has used; False if one did."""
        if seq not in self._lent:
            return False
        self._lent.remove(seq)
        self.stir()
        return True

    def lost(self, wait_s: float, now: float) -> Transition | None:
        """The log is away: from now on this breaker is our own. It may be probed `wait_s` later than it might have.

        One on trial opens, unless the probe is ours: who else tries it is not known any more.
        """
        if self._lender is None:
            return None
        self._lender = None
        self._lent.clear()
        moved: Transition | None = None
        if self.state is _HALF_OPEN and not self._probes:
            moved = self._move(Event.AGREED_OPEN, now, "log_away", self.evidence, "", agreed=True)
            self._until = now
        if self.state is _OPEN:
            self._until = max(now, self._until) + wait_s
            self._denied = Denied(self._until)
        self.stir()
        return moved

    def suspect(self) -> None:
        """Another sidecar has evidence, not enough for all: half of what opens is enough now, until a success."""
        if self.state is _CLOSED and not self._off:
            self._consecutive = max(self._consecutive, self._rule.consecutive // 2)

    @property
    def shared(self) -> bool:
        """Whether its present state is what all agreed on, and the log lends its probes."""
        return self._lender is not None

    @property
    def probes(self) -> int:
        """Of a rule: how many may be out at a time, until the first is good."""
        return self._rule.probes

    @property
    def successes(self) -> int:
        """Of a rule: how many good ones close it at least."""
        return self._rule.successes

    @property
    def wait_s(self) -> float:
        """How long it waits, or last waited, before a probe."""
        return self._wait_s

    @property
    def open_s(self) -> float:
        """The shortest wait of what opened it."""
        return self._open_s or float(self._rule.open_s)

    @property
    def open_max_s(self) -> float:
        """The longest."""
        return self._longest_s()

    @property
    def doublings(self) -> int:
        """How often its wait has doubled."""
        return self._doublings

    @property
    def lease_s(self) -> float:
        """How long a probe may take."""
        return self._lease_s

    def close_for_floor(self, now: float) -> Transition:
        """Closes because too few are: others left, or the floor rose. The back-off is remembered."""
        return self._move(Event.ORDERED_CLOSED, now, "floor", "too few endpoints were left in use", "")

    def close_for_load(self, now: float) -> Transition:
        """Closes because the others cannot carry its load. The back-off is remembered."""
        return self._move(Event.ORDERED_CLOSED, now, "capacity", "those that are closed cannot carry the load", "")

    def close_in_panic(self, now: float) -> Transition:
        """Closes because most answers of the endpoints in use fail as well: there is nowhere better to go."""
        return self._move(Event.ORDERED_CLOSED, now, "panic", "most answers fail everywhere", "")

    @property
    def held_open(self) -> bool:
        """Open by an operator's order."""
        return self._held and self.state is not _CLOSED

    @property
    def held_until(self) -> float | None:
        """When the operator's order ends, infinity where only the next one ends it; None where there is none."""
        return self._held_until if self._held else None

    def use_rule(self, rule: BreakerRule, now: float, *, lease_s: float) -> Transition | None:
        """Takes a new rule (policy reload): the state and its evidence stay, unless the mode is now `off`."""
        self._rule = rule
        self._lease_s = lease_s
        self._off = rule.mode == "off"
        self._enforced = rule.mode == "enforce"
        if not self._enforced:
            self.ramp_until = -inf
        if rule.failure_ratio <= 0 or self._off:
            self._window = None
        elif self._window is None or self._window.span_s != rule.window_s:
            self._window = Window(float(rule.window_s), now)
        transition: Transition | None = None
        if self.state is not _CLOSED:
            if self._off and not self.held_open:
                transition = self._turn_off(now)
            else:
                self._until = min(self._until, self.since + self._longest_s())
                self._denied = Denied(self._until)
        self._set_passes()
        self.stir()
        return transition

    def forget(self) -> None:
        """Leaves its roster: the thing it judged is gone."""
        if self._roster is not None:
            self._roster.not_closed.pop(self.key, None)
            self.stir()
            self._roster = None

    def stir(self) -> None:
        """Tells the roster that something changed by which this breaker's node may serve or not."""
        if self._roster is not None:
            self._roster.stir(self.key)

    def _failed(self, now: float, why: str) -> Transition | None:
        self._consecutive += 1
        window = self._window
        if window is not None:
            window.count(now, True)
        rule = self._rule
        if self._consecutive >= rule.consecutive:
            word = "consecutive"
            evidence = f"{counted(self._consecutive, 'failure')} in a row, the last: {why}"
        elif (
            window is not None
            and window.total >= rule.min_requests
            and window.marked >= rule.failure_ratio * window.total
        ):
            word = "failure_ratio"
            evidence = f"{window.marked} of {window.total} failed in {window.span_s:g} s, the last: {why}"
        else:
            return None
        # Slow is better than none; where nobody listens nothing is carried that others would have to.
        if not self._may_open(now, carries=why != Ending.CONNECT_FAILED):
            return None
        self._needed = 0
        self._open_s = self._open_max_s = self._ramp_s = 0.0
        return self._open(word, evidence, now)

    def _holds(self, now: float) -> bool:
        self._end_order(now)
        return self._held

    def _end_order(self, now: float) -> None:
        if self._held and now >= self._held_until:
            self._held = False
            if self.state is _OPEN:
                self._until = now
                self._denied = Denied(now)
            self._set_passes()
            self.stir()

    def _turn_off(self, now: float) -> Transition:
        return self._move(Event.ORDERED_CLOSED, now, "mode_off", "the policy turned this breaker off", "")

    def _borrow(self, lender: Lender, now: float) -> Permit | Denied:
        if self._lent:
            seq = self._lent.pop()
            self._probes[seq] = now + self._lease_s
            self._probe_id = max(self._probe_id, seq)  # none of our own, later, has its number
            return Permit(self.generation, True, seq)
        if self.state is _HALF_OPEN or now >= self._until:
            lender.wants(self)
            if self._lender is None:  # the log is away
                return self.acquire(now)
        return Denied(self.retry_at(now)) if self._enforced else self._shadowed()

    def _may_open(self, now: float, *, carries: bool = True) -> bool:
        if self._holds(now):
            self.held_closed += 1
            return False
        if self._roster is None or self._roster.may_open(carries=carries):
            return True
        self.held_closed += 1
        return False

    def _open(self, why: str, evidence: str, now: float) -> Transition:
        recovered = self._wait_s == 0.0 or now - self.since >= self._wait_s
        self._back_off(0 if recovered else self._doublings + 1, now)
        self.ours = True
        return self._move(Event.TRIPPED, now, why, evidence, "")

    def _probed(self, permit: Permit, result: Result, now: float, why: str) -> Transition | None:
        lease = self._probes.pop(permit.id, None)
        if lease is None:
            return None
        self.stir()
        if lease <= now:
            return None
        if self._lender is not None:
            self._lender.ended(self, permit.id, result, why)
            return None
        if result is _FAILURE:
            self._back_off(self._doublings + 1, now)
            return self._move(Event.PROBE_FAILED, now, "probe_failed", f"a probe failed: {why}", "")
        if result is _SUCCESS:
            self._proofs += 1
            if self._proofs >= self._rule.successes and (
                self._proofs >= self._proofs_needed() or now - self.since >= PATIENCE_S
            ):
                moved = self._move(Event.PROVED, now, "proved", f"{counted(self._proofs, 'probe')} succeeded", "")
                if self._enforced:
                    self.ramp_until = now + self._ramp_s
                return moved
        return None

    def _slot_free(self, now: float) -> bool:
        probes = self._probes
        most = self._rule.probes
        if self._proofs and self._needed > self._rule.successes:
            most = max(most, min(MOST_PROBES, self._proofs_needed() - self._proofs))
        if len(probes) < most:
            return True
        for lost in [number for number, lease in probes.items() if lease <= now]:
            del probes[lost]
        return len(probes) < most

    def _shadowed(self) -> Permit:
        self.shadow_denied += 1
        return self._permit

    def _back_off(self, doublings: int, now: float) -> None:
        self._doublings = min(doublings, MAX_DOUBLINGS)
        open_s = self._open_s or float(self._rule.open_s)
        self._wait_s = min(self._longest_s(), open_s * float(1 << self._doublings))
        self._until = now + self._wait_s
        self._denied = Denied(self._until)

    def _proofs_needed(self) -> int:
        """The more often it failed since it opened, the more there is to prove."""
        return self._needed * min(MOST_TIMES, 1 + self._doublings)

    def _longest_s(self) -> float:
        return self._open_max_s or float(self._rule.open_max_s)

    def _set_passes(self) -> None:
        self.passes = self.state is _CLOSED or not (self._enforced or self._held)

    def _move(self, event: Event, now: float, why: str, evidence: str, by: str, *, agreed: bool = False) -> Transition:
        old, new = self.state, TRANSITIONS[self.state, event]
        self.state = new
        self.generation += 1
        self.since = now
        self.why = why
        self.by = by
        # What a probe came to is not what opened it.
        if new is not _HALF_OPEN and (new is _CLOSED or old is _CLOSED or why not in _REOPENED or not self.evidence):
            self.evidence = evidence
            self.cause = why
        self._permit = Permit(self.generation)
        if new is _CLOSED:
            self._lender = None
            self.ours = False
        if not agreed:
            self.observer = ""
        self._lent.clear()
        self._probes.clear()
        self._proofs = 0
        self._consecutive = 0
        self.ramp_until = -inf
        if self._window is not None:
            self._window.clear(now)
        self._set_passes()
        if self._roster is not None:
            if new is _CLOSED:
                self._roster.not_closed.pop(self.key, None)
            else:
                self._roster.not_closed[self.key] = self
            self.stir()
        return Transition(
            self.scope,
            self.key,
            self.service,
            old,
            new,
            now,
            why,
            evidence,
            self.generation,
            by,
            agreed,
            self._wait_s,
            self._open_s or float(self._rule.open_s),
            self._longest_s(),
            self._doublings,
            self._needed,
            self._ramp_s,
        )


def min_closed(size: int, ratio: float) -> int:
    """How many of `size` endpoints must stay closed: ceil(ratio * size); of few, at least 1 and rounded down.

    A ratio of 0 means none, and so does a `size` of 0.
    """
    if ratio <= 0 or size <= 0:
        return 0
    return max(1, floor(ratio * size)) if size <= FEW else ceil(ratio * size)
