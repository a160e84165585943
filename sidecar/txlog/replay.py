"""A recording judged again: the product's own breakers and detector, on the record's clock, under another policy.

```
lines, in order of time -> events on a heap -> HORIZON_S later, in order -> fleet: record, absorb, tick -> episodes
```

There is no second implementation of any rule here. What was recorded is fed to a fleet as the request path and the log
would have fed it; only where a request would have gone is not decided anew.

1. Outcomes of a summary are spread evenly over its interval, failures evenly among the rest, and always alike: their
   order within the second is not in the record.
2. The fixed rules judge each sidecar's own outcomes. With several, each has a witness of its own, and `shared.quorum`
   of them open the breaker of all; a lone one opens it by itself.
3. The detector takes what each sidecar's detector had counted (`evidence.absorb`), a piece at a time over the interval,
   and ticks once a second. What was late was decided when it happened, and is not decided again. Where an endpoint was
   open in the record, or a sidecar had no detector, its outcomes stand for the counts.
4. While the record has an endpoint closed, what happened there says what a probe would have met. While it has it open,
   only its own probes do: one that failed is one that fails, and one that closed it proves it well.
5. An operator's order in the record is an order here.
6. What the replay opens that the record had closed keeps attempts away: those are counted, and judge nothing.
"""

from collections.abc import Iterator
from heapq import heappop, heappush
from math import inf
from typing import Final

from msgspec.structs import replace

from sidecar.core import evidence
from sidecar.core.breaker import Breaker, Denied, Scope, State, Transition
from sidecar.core.detection import LATE, MOST_LEFT, Counts
from sidecar.core.detector import Expectation
from sidecar.core.fleet import Fleet
from sidecar.core.pool import Node
from sidecar.core.service import ServiceState
from sidecar.core.sketch import quantile
from sidecar.core.tally import Ended
from sidecar.kernel.count import counted
from sidecar.kernel.ids import EndpointKey, ServiceName, SessionId
from sidecar.kernel.outcome import Ending, Result
from sidecar.policy.schema import Adaptive, Endpoint, Seconds, Snapshot
from sidecar.txlog.difference import Episode, KeyReport, Report, Totals, clock, compare, iso
from sidecar.txlog.recording import End, Line, Moved, Seen, Skipped, Span, summary_of
from sidecar.txlog.summary import FORGOTTEN_MS, EndpointSummary, Summary

HORIZON_S: Final = 2.0
"""How long an event waits for those of other sidecars that came before it: a summary's interval, and its way."""
ACTIVE_S: Final = 15.0
"""A sidecar that told nothing for so long is gone, and counts for no quorum."""
SUSPECT_S: Final = 60.0
MOST_PIECES: Final = 8
MOST_OUTCOMES: Final = 20_000
"""Of one endpoint in one interval; of more, as many are left out of each kind alike."""
MOST_TICKS: Final = 300
"""Of a hole in the record: after so long a detector has forgotten what is forgotten in time."""
MOST_PROOFS: Final = 200
MOST_NAMED: Final = 20

_CLOSED: Final = State.CLOSED
_SUCCESS: Final = Result.SUCCESS
_FAILURE: Final = Result.FAILURE
_PROBE_LOST: Final = frozenset({"withdrawn", "inconclusive", "log_away", "restored"})
"""Why a half-open register opened again without a probe that failed."""


class Disorder(ValueError):
    """Lines that are not in order of time."""


class _Episode:
    """An episode that is not over."""

    __slots__ = ("at", "by", "evidence", "kept_away", "probes_failed", "refused", "spared", "why")

    def __init__(self, at: float, why: str, evidence_: str, by: str = "") -> None:
        self.at = at
        self.why = why
        self.evidence = evidence_
        self.by = by
        self.probes_failed = 0
        self.kept_away = 0
        self.spared = 0
        self.refused = 0

    def over(self, at: float | None) -> Episode:
        return Episode(
            round(self.at * 1000),
            None if at is None else round(at * 1000),
            self.why,
            self.evidence,
            self.by,
            self.probes_failed,
            self.kept_away,
            self.spared,
            self.refused,
        )


class _Track:
    """One breaker in the record and in the replay."""

    __slots__ = (
        "attempts",
        "failed",
        "first_tokens",
        "opened_at",
        "order",
        "recorded",
        "recorded_now",
        "recorded_state",
        "replayed",
        "replayed_now",
        "suspected",
        "witnesses",
    )

    def __init__(self) -> None:
        self.recorded: list[Episode] = []
        self.replayed: list[Episode] = []
        self.recorded_now: _Episode | None = None
        self.replayed_now: _Episode | None = None
        self.recorded_state = "closed"
        self.opened_at = -inf
        """When the record opened it last, as far as was read."""
        self.order = (0, 0)
        self.attempts = 0
        self.failed = 0
        self.first_tokens: dict[int, int] = {}
        self.witnesses: dict[str, Breaker] = {}
        self.suspected: dict[str, float] = {}


class _Whose:
    """Whose outcomes: of one endpoint, session or kind of request in one summary.

    `step` is what its first tokens added to the location statistic, each. `speaks`: the sidecar has a detector;
    `counted`: which counted these.
    """

    __slots__ = ("counted", "name", "observer", "scope", "service", "speaks", "step")

    def __init__(
        self,
        scope: Scope,
        service: str,
        name: str,
        observer: str,
        *,
        step: float = 0.0,
        speaks: bool = False,
        counted: bool = False,
    ) -> None:
        self.scope = scope
        self.service = service
        self.name = name
        self.observer = observer
        self.step = step
        self.speaks = speaks
        self.counted = counted


class _Outcome:
    """One attempt that ended, or one request of a session or kind (`ending` None)."""

    __slots__ = ("ending", "late", "of", "result")

    def __init__(self, of: _Whose, ending: Ending | None, result: Result, late: bool) -> None:
        self.of = of
        self.ending = ending
        self.result = result
        self.late = late


class _Piece:
    """A part of what a detector had counted."""

    __slots__ = ("common", "counts", "service")

    def __init__(self, service: str, counts: Counts, common: float) -> None:
        self.service = service
        self.counts = counts
        self.common = common


class _Load:
    """How many attempts a sidecar had on an endpoint."""

    __slots__ = ("endpoint", "in_flight", "observer", "service")

    def __init__(self, service: str, endpoint: EndpointKey, observer: str, in_flight: int) -> None:
        self.service = service
        self.endpoint = endpoint
        self.observer = observer
        self.in_flight = in_flight


_Event = _Outcome | _Piece | _Load | Moved


class Replay:
    """`take` every line, in order; then `report`. `service` "": every service of the policy."""

    def __init__(self, snapshot: Snapshot, service: str = "") -> None:
        self._snapshot = snapshot
        self._only = service
        self._open = {each.name for each in snapshot.services if not each.endpoints}
        """Services whose endpoints are told by others than the policy: those of the record are theirs."""
        self._fleet = Fleet(lambda: 0.5)
        self._tracks: dict[tuple[Scope, str, str], _Track] = {}
        self._events: list[tuple[float, int, _Event]] = []
        self._count = 0
        self._begun: float | None = None
        self._at = -inf
        self._done_at = -inf
        self._tick_at = inf
        self._since_ms: int | None = None
        self._until_ms: int | None = None
        self._ended = False
        self._heard: dict[tuple[str, str], tuple[int, float]] = {}
        self._speaks: set[tuple[str, str]] = set()
        self._in_flight: dict[tuple[str, EndpointKey], dict[str, int]] = {}
        self._unknown: set[str] = set()
        self._foreign: dict[str, int] = {}
        self._ready_at: dict[str, float] = {}
        self._excused: dict[str, list[float]] = {}
        self._summaries = self._attempts = self._skipped = self._missing = self._left_out = 0

    def take(self, line: Line) -> None:
        """The next line. `Disorder` if it is from before the last."""
        match line:
            case Span():
                self._since_ms, self._until_ms = line.since_ms, line.until_ms
            case Seen() | Moved():
                if isinstance(line, Moved) and line.before:
                    self._before(line)
                    return
                self._advance(line.at_ms / 1000)
                if self._only not in ("", line.service):
                    return
                if isinstance(line, Seen):
                    self._seen(summary_of(line), line.at_ms / 1000)
                elif line.scope in set(Scope):
                    if line.state == "open":
                        self._track(Scope(line.scope), line.service, line.name).opened_at = line.at_ms / 1000
                    self._push(line.at_ms / 1000, line)
            case Skipped():
                self._skipped += 1
            case End():
                self._ended = True

    def report(self, since_ms: int | None = None, until_ms: int | None = None) -> Report:
        """What came of it, from then on (None: from the beginning) until then; what came before only taught."""
        begun = self._begun or 0.0
        self._flush(inf)
        end_ms = round(1000 * max(self._done_at, self._at, begun))
        if since_ms is None:
            since_ms = self._since_ms if self._since_ms is not None else round(1000 * begun)
        if until_ms is None:
            until_ms = self._until_ms
        if until_ms is not None:
            end_ms = max(end_ms, until_ms)
        keys = [
            self._key_report(*key, track, since_ms, end_ms) for key, track in self._tracks.items() if self._has(*key)
        ]
        found = [each for report in keys for each in report.differences]
        keys.sort(key=lambda each: (not each.differences, each.scope, each.service, each.key))
        replayed = [each.replayed for each in found if each.replayed is not None]
        return Report(
            since=iso(since_ms),
            until=iso(end_ms),
            seconds=(end_ms - since_ms) / 1000,
            observers=sorted({observer for observer, _ in self._heard}),
            summaries=self._summaries,
            attempts=self._attempts,
            totals=Totals(
                recorded_openings=sum(1 for each in found if each.recorded is not None),
                replayed_openings=len(replayed),
                same=sum(1 for each in found if each.verdict == "same"),
                kept_away=sum(each.kept_away for each in replayed),
                spared=sum(each.spared for each in replayed),
                refused=sum(each.refused for each in replayed),
            ),
            keys=[each for each in keys if each.differences or each.scope == Scope.NODE],
            unknown_endpoints=sorted(self._unknown),
            unsaid=self._unsaid(since_ms),
        )

    # What a line holds, as events.

    def _advance(self, at: float) -> None:
        if self._begun is None:
            self._begin(at)
        if at < self._at - HORIZON_S:
            raise Disorder(f"a line of {clock(round(1000 * at))} comes after one of {clock(round(1000 * self._at))}")
        if at > self._at:
            self._at = at
            self._flush(at - HORIZON_S)

    def _begin(self, at: float) -> None:
        self._begun = at
        self._done_at = at - HORIZON_S - 1.0
        self._tick_at = self._done_at + 1.0
        for moved in self._fleet.apply(self._snapshot, self._done_at):
            self._note(moved)

    def _push(self, at: float, event: _Event) -> None:
        self._count += 1
        heappush(self._events, (max(at, self._done_at), self._count, event))

    def _seen(self, told: Summary, at: float) -> None:
        teller = told.observer, told.service
        last, heard_at = self._heard.get(teller, (-1, at))
        if told.seq <= last and at - heard_at < FORGOTTEN_MS / 1000:
            return
        between = told.seq - last - 1
        # More than can have been told meanwhile: it began anew.
        if last >= 0 and 0 < between <= 2.0 * (at - heard_at) + 2.0:
            self._missing += between
        self._heard[teller] = told.seq, at
        self._summaries += 1
        service = self._fleet.services.get(ServiceName(told.service))
        if service is None:
            self._foreign[told.service] = self._foreign.get(told.service, 0) + 1
            return
        if told.excused:
            excused = self._excused.setdefault(told.service, [at, at])
            excused[1] = at
        began = max(at - told.took_ms / 1000, at - HORIZON_S, self._done_at)
        if any(each.counts is not None for each in told.endpoints):
            self._speaks.add((told.service, told.observer))
        for each in told.endpoints:
            if self._known(service, each.endpoint, each.version):
                self._seen_endpoint(told, each, began, at)
        for scope, ended_of in ((Scope.REQUEST, told.kinds), (Scope.SESSION, told.sessions)):
            for name, (good, bad) in ended_of.items():
                ended: Ended = {(None, _SUCCESS): good, (None, _FAILURE): bad}
                whose = _Whose(scope, told.service, name, told.observer)
                self._spread(whose, ended, (0, 0, 0), 0, began, at)

    def _seen_endpoint(self, told: Summary, each: EndpointSummary, began: float, at: float) -> None:
        track = self._track(Scope.NODE, told.service, each.endpoint)
        attempts = sum(each.ended.values())
        self._attempts += attempts
        track.attempts += attempts
        track.failed += sum(number for (_, result), number in each.ended.items() if result is _FAILURE)
        for bucket, number in each.first_tokens.items():
            track.first_tokens[bucket] = track.first_tokens.get(bucket, 0) + number
        counts = each.counts
        slow, step = 0, 0.0
        if counts is not None:
            slow = counts.slow
            step = counts.location / counts.timed if counts.timed else 0.0
            pieces = max(1, min(MOST_PIECES, counts.errors + counts.slow))
            # A detector counts while its breaker is closed: all of it was before that opened.
            until = track.opened_at if began < track.opened_at < at else at
            # The first bad one at the interval's beginning, the last at its end: what must have lasted did.
            for number, piece in enumerate(_pieces(counts, pieces)):
                when = began + (number / (pieces - 1) if pieces > 1 else 1.0) * (until - began)
                self._push(when, _Piece(told.service, piece, told.common))
        speaks = (told.service, told.observer) in self._speaks
        whose = _Whose(
            Scope.NODE,
            told.service,
            each.endpoint,
            told.observer,
            step=step,
            speaks=speaks,
            counted=counts is not None,
        )
        self._spread(whose, each.ended, each.runs, slow, began, at)
        self._push(at, _Load(told.service, each.endpoint, told.observer, each.in_flight))

    def _spread(
        self, whose: _Whose, ended: Ended, runs: tuple[int, int, int], slow: int, began: float, at: float
    ) -> None:
        outcomes = [(ending, result, False, number) for (ending, result), number in ended.items()]
        if slow:
            outcomes = _with_late(outcomes, slow)
        total = sum(number for *_, number in outcomes)
        if total > MOST_OUTCOMES:
            outcomes = [
                (ending, result, late, number * MOST_OUTCOMES // total) for ending, result, late, number in outcomes
            ]
            self._left_out += total - sum(number for *_, number in outcomes)
        ordered = _in_runs(list(_interleaved(outcomes)), runs)
        for place, (ending, result, late) in enumerate(ordered):
            when = began + (place + 0.5) / len(ordered) * (at - began)
            self._push(when, _Outcome(whose, ending, result, late))

    def _known(self, service: ServiceState, key: EndpointKey, version: str) -> bool:
        """Whether the policy has the endpoint; where it has none at all, it has those of the record."""
        if key in service.nodes:
            return True
        if service.name not in self._open:
            self._unknown.add(key)
            return False
        url = f"unix://{key}" if key.startswith("/") else f"http://{key}"
        endpoint = Endpoint(url=url, version=version)
        policy = replace(service.policy, endpoints=(*service.policy.endpoints, endpoint))
        for moved in service.use(policy, self._done_at):
            self._note(moved)
        return True

    # Events, in order.

    def _flush(self, until: float) -> None:
        events = self._events
        while events and events[0][0] <= until:
            at, _, event = heappop(events)
            self._ticks(at)
            self._done_at = max(self._done_at, at)
            match event:
                case _Outcome():
                    self._outcome(event, at)
                case _Piece():
                    self._absorb(event, at)
                case _Load():
                    self._load(event)
                case Moved():
                    self._moved(event, at)
        if until < inf:
            self._ticks(until)
            self._done_at = max(self._done_at, until)

    def _ticks(self, at: float) -> None:
        if at - self._tick_at > MOST_TICKS:
            self._tick_at = at - MOST_TICKS
        while self._tick_at <= at:
            for moved in self._fleet.tick(self._tick_at):
                self._note(moved)
            for name, service in self._fleet.services.items():
                detection = service.detection
                if detection is not None and detection.ready and name not in self._ready_at:
                    self._ready_at[name] = self._tick_at
            self._tick_at += 1.0

    def _outcome(self, it: _Outcome, at: float) -> None:
        service = self._fleet.services[ServiceName(it.of.service)]
        track = self._track(it.of.scope, it.of.service, it.of.name)
        if it.of.scope is Scope.NODE:
            node = service.nodes.get(EndpointKey(it.of.name))
            if node is not None:
                self._attempt(service, node, track, it, at)
            return
        if track.recorded_state != "closed":
            return
        if it.of.scope is Scope.SESSION:
            session = service.session(SessionId(it.of.name), at)
            permit = service.admit_session(session, at)
            if isinstance(permit, Denied):
                self._keep_away(track, service, it)
            else:
                self._note(permit.moved)
                self._note(service.record_session(session, permit, it.result, at, "failed"))
            return
        breaker = service.request_breaker(it.of.name, at)
        permit = breaker.acquire(at)
        if isinstance(permit, Denied):
            self._keep_away(track, service, it)
        else:
            self._note(permit.moved)
            self._note(breaker.record(permit, it.result, at, "failed"))

    def _attempt(self, service: ServiceState, node: Node, track: _Track, it: _Outcome, at: float) -> None:
        judged = it.result is _SUCCESS or it.result is _FAILURE
        recorded_closed = track.recorded_state == "closed"
        breaker = node.breaker
        if breaker.state is not _CLOSED:
            if recorded_closed and not (judged and self._probe(service, node, it, at)) and not breaker.passes:
                self._keep_away(track, service, it)
            return
        if not judged:
            return
        if not (it.of.counted or (it.of.speaks and recorded_closed)) and node.detector is not None:
            good, bad = (1, 0) if it.result is _SUCCESS else (0, 1)
            for moved in evidence.absorb(service, [Counts(node.key, good, bad, 0, 0.0, 0, 0.0)], at):
                self._note(moved)
        if breaker.state is _CLOSED:
            self._fixed(service, node, track, it, at)

    def _fixed(self, service: ServiceState, node: Node, track: _Track, it: _Outcome, at: float) -> None:
        """What the fixed rules say."""
        why = it.ending or "failed"
        observers = self._observers(service.name, at)
        if observers < 2:
            permit = node.breaker.acquire(at)
            if not isinstance(permit, Denied):
                self._note(node.breaker.record(permit, it.result, at, why))
            return
        witness = track.witnesses.get(it.of.observer)
        rule = service.policy.breakers.node
        if witness is None:
            witness = Breaker(Scope.NODE, node.key, service.name, rule, at, lease_s=service.lease_s)
            track.witnesses[it.of.observer] = witness
        permit = witness.acquire(at)
        if isinstance(permit, Denied):
            return
        moved = witness.record(permit, it.result, at, why)
        if moved is None or moved.new is not State.OPEN:
            return
        track.suspected[it.of.observer] = at
        sure = [observer for observer, when in track.suspected.items() if at - when < SUSPECT_S]
        if len(sure) < min(service.policy.shared.quorum, observers):
            return
        # The fixed rules wait as their own rule says, and know no ramp.
        waits = Adaptive(open_s=rule.open_s, open_max_s=rule.open_max_s, ramp_s=Seconds(0))
        words = moved.evidence if len(sure) < 2 else f"{moved.evidence}; seen by {len(sure)} sidecars"
        self._note(node.breaker.trip(moved.why, words, 0, waits, at))

    def _probe(self, service: ServiceState, node: Node, it: _Outcome, at: float) -> bool:
        """Tries the endpoint with an attempt of the record; False if it may not be tried now."""
        permit = node.breaker.acquire(at)
        if isinstance(permit, Denied):
            return False
        if not permit.probe:
            return False
        self._note(permit.moved)
        detection, detector = service.detection, node.detector
        expectation: Expectation | None = None
        if detection is not None and detector is not None:
            detector.begin(detection.threshold)
            detector.trial_n += 1
            detector.trial += it.of.step
            expectation = Expectation(detector, permit, "", None, 0.0, 0.0, 0.0, 0, inf, inf, None)
            expectation.model = it.of.name if it.of.step else ""
            expectation.bad = it.late
        ending = it.ending or Ending.COMPLETE
        self._note(evidence.ended(service, node, permit, expectation, ending, it.result, 0.0, at))
        return True

    def _keep_away(self, track: _Track, service: ServiceState, it: _Outcome) -> None:
        episode = track.replayed_now
        if episode is None:
            return
        episode.kept_away += 1
        if it.result is _FAILURE or it.late:
            episode.spared += 1
        if it.of.scope is not Scope.NODE or not any(node.breaker.passes for node in service.nodes.values()):
            episode.refused += 1

    def _absorb(self, it: _Piece, at: float) -> None:
        service = self._fleet.services[ServiceName(it.service)]
        detection = service.detection
        node = service.nodes.get(it.counts.endpoint)
        if detection is None or node is None or node.detector is None:
            return
        counts = it.counts
        if counts.timed:
            # What is common to all was taken off by the record's detector; here ours is.
            left = counts.left + counts.timed * (it.common - detection.normal.common)
            most = MOST_LEFT * counts.timed
            left = min(most, max(-most, left))
            if node.breaker.state is _CLOSED:
                node.detector.left_n += counts.timed
                node.detector.left_sum += left
            counts = replace(counts, left=left)
        for moved in evidence.absorb(service, [counts], at):
            self._note(moved)

    def _load(self, it: _Load) -> None:
        loads = self._in_flight.setdefault((it.service, it.endpoint), {})
        loads[it.observer] = it.in_flight
        node = self._fleet.services[ServiceName(it.service)].nodes.get(it.endpoint)
        if node is not None:
            node.in_flight = sum(loads.values())

    # What the record's breakers did.

    def _before(self, line: Moved) -> None:
        if self._only not in ("", line.service) or line.scope not in set(Scope):
            return
        if self._begun is None:
            self._begin((line.at_ms if self._since_ms is None else self._since_ms) / 1000)
        self._count += 1
        heappush(self._events, (line.at_ms / 1000, self._count, line))

    def _moved(self, line: Moved, at: float) -> None:
        scope = Scope(line.scope)
        service = self._fleet.services.get(ServiceName(line.service))
        track = self._track(scope, line.service, line.name)
        order = line.epoch, line.version
        if order <= track.order:
            return
        track.order = order
        was, track.recorded_state = track.recorded_state, line.state
        self._note_recorded(track, line, was)
        if service is None or (scope is Scope.NODE and not self._known(service, EndpointKey(line.name), "v1")):
            return
        breaker = self._breaker(service, scope, line.name, at)
        if breaker is None:
            return
        if line.kind == "override":
            self._order(breaker, line, at)
        elif line.before and line.state != "closed":
            if scope is Scope.NODE:
                waits = Adaptive(open_s=Seconds(0.001), open_max_s=Seconds(0.001), ramp_s=Seconds(0))
                self._note(breaker.trip(line.why, line.evidence, 0, waits, at))
        elif was == "half_open" and line.state == "closed":
            self._prove(service, breaker, at)
        elif was == "half_open" and line.state == "open" and line.why not in _PROBE_LOST:
            permit = breaker.acquire(at) if breaker.can_probe(at) else None
            if permit is not None and not isinstance(permit, Denied):
                self._note(permit.moved)
                self._note(breaker.record(permit, _FAILURE, at, line.evidence or LATE))

    def _order(self, breaker: Breaker, line: Moved, at: float) -> None:
        until = line.expires_ms / 1000 if line.expires_ms else inf
        if not line.held:
            self._note(breaker.force("close", at, line.by))
        elif line.state == "closed":
            self._note(breaker.force("close", at, line.by))
            self._note(breaker.force("hold", at, line.by, until))
        else:
            self._note(breaker.force("open", at, line.by, until))

    def _prove(self, service: ServiceState, breaker: Breaker, at: float) -> None:
        """The record's probes found it well: so would ours have, as many as are needed."""
        for _ in range(MOST_PROOFS):
            if not breaker.can_probe(at):
                return
            permit = breaker.acquire(at)
            if isinstance(permit, Denied) or not permit.probe:
                return
            self._note(permit.moved)
            self._note(breaker.record(permit, _SUCCESS, at))

    def _note_recorded(self, track: _Track, line: Moved, was: str) -> None:
        at = line.at_ms / 1000
        if line.state == "closed":
            if track.recorded_now is not None:
                track.recorded.append(track.recorded_now.over(at))
                track.recorded_now = None
            return
        if track.recorded_now is None:
            track.recorded_now = _Episode(at, line.why, line.evidence, line.by)
        elif was == "half_open" and line.state == "open" and line.why not in _PROBE_LOST:
            track.recorded_now.probes_failed += 1

    # The replay's own.

    def _note(self, moved: Transition | None) -> None:
        if moved is None:
            return
        track = self._track(moved.scope, moved.service, moved.key)
        track.witnesses.clear()
        track.suspected.clear()
        if moved.new is _CLOSED:
            if track.replayed_now is not None:
                track.replayed.append(track.replayed_now.over(moved.at))
                track.replayed_now = None
        elif track.replayed_now is None:
            track.replayed_now = _Episode(moved.at, moved.why, moved.evidence, moved.by)
        elif moved.old is State.HALF_OPEN:
            track.replayed_now.probes_failed += 1

    def _track(self, scope: Scope, service: str, name: str) -> _Track:
        key = scope, service, name
        track = self._tracks.get(key)
        if track is None:
            track = self._tracks[key] = _Track()
        return track

    def _breaker(self, service: ServiceState, scope: Scope, name: str, at: float) -> Breaker | None:
        if scope is Scope.REQUEST:
            return service.request_breaker(name, at)
        if scope is Scope.SESSION:
            service.session(SessionId(name), at)
        return service.find(scope, name, at)

    def _has(self, scope: Scope, service: str, name: str) -> bool:
        state = self._fleet.services.get(ServiceName(service))
        return state is not None and (scope is not Scope.NODE or name in state.nodes)

    def _observers(self, service: str, at: float) -> int:
        heard = [when for (_, name), (_, when) in self._heard.items() if name == service]
        return sum(1 for when in heard if at - when < ACTIVE_S)

    def _key_report(
        self, scope: Scope, service: str, name: str, track: _Track, since_ms: int, end_ms: int
    ) -> KeyReport:
        recorded, replayed = list(track.recorded), list(track.replayed)
        if track.recorded_now is not None:
            recorded.append(track.recorded_now.over(None))
        if track.replayed_now is not None:
            replayed.append(track.replayed_now.over(None))
        recorded = [each for each in recorded if _ends(each, end_ms) >= since_ms]
        replayed = [each for each in replayed if _ends(each, end_ms) >= since_ms]
        state = self._fleet.services.get(ServiceName(service))
        known = None if state is None or scope is Scope.SESSION else state.find(scope, name, self._done_at)
        label = name if scope is Scope.NODE else f"{scope.value} {name}"
        return KeyReport(
            scope.value,
            service,
            name,
            track.attempts,
            track.failed,
            quantile(track.first_tokens, 0.5),
            quantile(track.first_tokens, 0.99),
            _not_closed_s(recorded, since_ms, end_ms),
            _not_closed_s(replayed, since_ms, end_ms),
            0 if known is None else known.held_closed,
            compare(label, recorded, replayed, end_ms),
        )

    def _unsaid(self, since_ms: int) -> list[str]:
        """What cannot be said, in words."""
        words = [
            "the order of what ended within a second is not in the record: it was spread evenly",
            "where requests would have gone instead is not played: every attempt stays where it was",
        ]
        if any(track.recorded or track.recorded_now is not None for track in self._tracks.values()):
            words.append(
                "what an open breaker kept away is not in the record: until it closed there, only its probes tell, and "
                "a breaker that closes here earlier than there closes when those say so"
            )
        fleet = self._fleet.services.items()
        judging = [name for name, service in fleet if service.detection is not None and self._heard]
        if judging:
            words.append(
                "what was late was decided when it happened: kappa, tau_min, tau_max, late_min, gap_min and covariates "
                "of this file change nothing here"
            )
        for name in judging:
            if not any(service == name for service, _ in self._speaks):
                words.append(f"service {name}: no detector was on in the record, so nothing is known to have been slow")
            ready_at = self._ready_at.get(name)
            if ready_at is None:
                words.append(f"service {name}: too few answers for the detector to judge; the fixed rules did alone")
            elif 1000 * ready_at > since_ms + 1000:
                words.append(f"service {name}: the detector had learnt enough at {clock(round(1000 * ready_at))}")
        for service, excused in self._excused.items():
            first, last = (clock(round(1000 * at)) for at in excused)
            words.append(
                f"service {service}: of slowness between {first} and {last} not all is told: all were overloaded"
            )
        words += self._lost_words()
        return words

    def _lost_words(self) -> Iterator[str]:
        if len({observer for observer, _ in self._heard}) > 1:
            yield "the detector judges what all sidecars saw together, as if each had heard the others at once"
        for service, count in self._foreign.items():
            yield f"service {service} is not in this file: {counted(count, 'summary', 'summaries')} left out"
        if self._unknown:
            named = sorted(self._unknown)
            more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
            yield f"not in this file, and left out: {', '.join(named[:MOST_NAMED])}{more}"
        if self._missing:
            yield f"{counted(self._missing, 'summary', 'summaries')} missing"
        if self._skipped:
            yield f"not to be read: {counted(self._skipped, 'entry', 'entries')} of the log"
        if self._left_out:
            yield f"{counted(self._left_out, 'attempt')} left out, beyond {MOST_OUTCOMES} of one endpoint and second"
        if self._since_ms is not None and not self._ended:
            yield "the recording breaks off: its last line is missing"


def _pieces(counts: Counts, number: int) -> Iterator[Counts]:
    """`counts` in so many parts that add up to it."""
    whole = (counts.good, counts.errors, counts.slow, counts.timed)
    for place in range(number):
        good, errors, slow, timed = (total * (place + 1) // number - total * place // number for total in whole)
        share = timed / counts.timed if counts.timed else 0.0
        yield Counts(counts.endpoint, good, errors, slow, counts.location * share, timed, counts.left * share)


def _with_late(
    outcomes: list[tuple[Ending | None, Result, bool, int]], slow: int
) -> list[tuple[Ending | None, Result, bool, int]]:
    """As many of the successes as there were late ones are late."""
    marked: list[tuple[Ending | None, Result, bool, int]] = []
    for ending, result, _, number in outcomes:
        late = min(slow, number) if result is _SUCCESS else 0
        slow -= late
        marked += [(ending, result, False, number - late), (ending, result, True, late)]
    return marked


def _interleaved(
    outcomes: list[tuple[Ending | None, Result, bool, int]],
) -> Iterator[tuple[Ending | None, Result, bool]]:
    """Each of them as often as it says, as evenly as can be; the same order each time."""
    due: list[tuple[float, int]] = []
    for index, (*_, number) in enumerate(outcomes):
        if number:
            heappush(due, (0.5 / number, index))
    while due:
        at, index = heappop(due)
        ending, result, late, number = outcomes[index]
        yield ending, result, late
        if at + 1.0 / number < 1.0:
            heappush(due, (at + 1.0 / number, index))


def _in_runs(
    outcomes: list[tuple[Ending | None, Result, bool]], runs: tuple[int, int, int]
) -> list[tuple[Ending | None, Result, bool]]:
    """The same, with as many failures in a row at the beginning, in the middle and at the end as there were."""
    first, longest, last = runs
    failures = [each for each in outcomes if each[1] is _FAILURE]
    if not failures or not any(each[1] is _SUCCESS for each in outcomes):
        return outcomes
    first = min(first, len(failures))
    last = min(last, len(failures) - first)
    middle = 0 if longest in (first, last) else min(longest, len(failures) - first - last)
    rest = failures[first + middle : len(failures) - last]
    well = [each for each in outcomes if each[1] is not _FAILURE]
    places = [((place + 0.5) / len(some), each) for some in (well, rest) for place, each in enumerate(some)]
    others = [each for _, each in sorted(places, key=lambda placed: placed[0])]
    half = len(others) // 2
    return [
        *failures[:first],
        *others[:half],
        *failures[first : first + middle],
        *others[half:],
        *failures[len(failures) - last :],
    ]


def _ends(episode: Episode, end_ms: int) -> int:
    return end_ms if episode.closed_ms is None else episode.closed_ms


def _not_closed_s(episodes: list[Episode], since_ms: int, end_ms: int) -> float:
    return sum(max(0, _ends(each, end_ms) - max(since_ms, each.opened_ms)) for each in episodes) / 1000
