"""Summaries: what one sidecar saw of one service in one interval, a second mostly, as it goes to the log.

Two read them. The other sidecars take the detector's counts out (`Heard`), so that a fault that each of them sees a
little of is found as if one had seen all. `sidecar log replay` takes the rest: how attempts ended, so that the same
span can be judged again under another policy. One blob for both: what is there twice is written twice.

```
schema u8 | msgpack array: observer, seq, service, took_ms, endpoints, kinds, sessions, common, excused, zones, trial
endpoint: array of key, version, {outcome: n}, {result: n of copies}, {bucket: n}, in flight, counts, runs
counts:   array of good, errors, slow, location, timed, left; nil: the detector had nothing to say
runs:     array of failures in a row: before the first success, at most, after the last; nil: none failed
zones:    {zone: array of {bucket: n}, timed, left}, as in `core.zone.Told`; of services that watch them
trial:    msgpack array: part, tally (`core.verdict`), whole; empty: none
```

1. Nothing is here that the request path has to count anew: outcomes are the difference of metrics (`telemetry.tally`),
   counts are the detector's own (`evidence.share`).
2. `seq` rises by one per blob of an observer and service: services lie in shards, which are read in any order. It
   begins at the observer's clock's milliseconds, so that a restart goes on above it. What comes again, or late, is
   dropped by whoever reads: sums must not be added twice.
3. Numbers of an ending or a result never change and are never given anew. A number that is not known here, of a later
   release, is kept as "other" (None): it counts, and speaks for or against nobody.
4. Fractions go in thousandths: what a detector makes of them is coarser by far.
5. A body may grow at its end: what is not known is ignored, what is missing has its default.
6. What was seen of a rollout is bytes within the body, read by whoever follows that rollout. A tally of a later release
   must not hide what the rest of a summary says of endpoints.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec.structs import replace

from sidecar.core import evidence
from sidecar.core.breaker import Scope
from sidecar.core.detection import Counts
from sidecar.core.fleet import Fleet
from sidecar.core.service import ServiceState
from sidecar.core.tally import Ended, EndpointTally, ServiceTally
from sidecar.core.verdict import Tally
from sidecar.core.zone import Told
from sidecar.kernel.ids import EndpointKey
from sidecar.kernel.outcome import Ending, Result
from sidecar.txlog.codec import Unreadable
from sidecar.txlog.store import Share

SCHEMA: Final = 1
MAX_SUMMARY_BYTES: Final = 1 << 20
MOST_ENDPOINTS: Final = 500
"""In one blob; of more, several are made. With addresses as long as a policy allows they still fit."""
MOST_SESSIONS: Final = 200
"""Of one service in one interval; of more, the first to fail."""
MOST_NAME: Final = 256
"""Characters of a session's or kind's name: longer ones are not told."""
MOST_COUNTED: Final = 10_000_000
"""Of anything in one interval: more is no count of ours."""
OLD_MS: Final = 10_000
"""Evidence that comes this late is about another state. It stays in the record, for replays."""
FORGOTTEN_MS: Final = 120_000
"""An observer that was silent for so long may begin anew, wherever its clock stands now."""
MOST_OBSERVERS: Final = 4096
"""Times the services that each tells of."""

ENDINGS: Final[dict[Ending, int]] = {
    Ending.COMPLETE: 0,
    Ending.CONNECT_FAILED: 1,
    Ending.RESET_BEFORE_HEAD: 2,
    Ending.BAD_BYTES: 3,
    Ending.SERVER_ERROR: 4,
    Ending.OVERLOADED: 5,
    Ending.CLIENT_ERROR: 6,
    Ending.CONTEXT_LENGTH: 7,
    Ending.HEAD_TIMEOUT: 8,
    Ending.TTFT_TIMEOUT: 9,
    Ending.TOKEN_GAP_TIMEOUT: 10,
    Ending.TOTAL_TIMEOUT: 11,
    Ending.LATE: 12,
    Ending.TRUNCATED: 13,
    Ending.ERROR_IN_BAND: 14,
    Ending.CLIENT_ERROR_IN_BAND: 15,
    Ending.CONTEXT_LENGTH_IN_BAND: 16,
    Ending.OVERLOADED_IN_BAND: 17,
    Ending.EMPTY: 18,
    Ending.ABORTED: 19,
    Ending.CLIENT_LEFT: 20,
    Ending.CLIENT_SLOW: 21,
    Ending.CLIENT_MALFORMED: 22,
    Ending.ABANDONED: 23,
    Ending.PREEMPTED: 24,
}
RESULTS: Final[dict[Result, int]] = {Result.SUCCESS: 0, Result.FAILURE: 1, Result.IGNORED: 2, Result.OVERLOADED: 3}

_ENDING_OF: Final = {number: ending for ending, number in ENDINGS.items()}
_RESULT_OF: Final = {number: result for result, number in RESULTS.items()}
_SPREAD: Final = 64  # an outcome's number is 64 * result + ending: those that matter are one byte
_THOUSAND: Final = 1000.0


class EndpointSummary(msgspec.Struct, frozen=True):
    """One endpoint in one interval.

    `ended`: attempts by how they ended and what that said of the endpoint; `copies` of them were probes by copy.
    `first_tokens` is a sketch (`core.sketch`). `in_flight` at the interval's end. `counts` is the detector's. `runs` of
    failures are as in `core.tally.EndpointTally`.
    """

    endpoint: EndpointKey
    version: str
    ended: Ended = {}
    copies: dict[Result, int] = {}
    first_tokens: dict[int, int] = {}
    in_flight: int = 0
    counts: Counts | None = None
    runs: tuple[int, int, int] = (0, 0, 0)


class Summary(msgspec.Struct, frozen=True):
    """What `observer` saw of `service` in `took_ms` by its own clock. When that ended, the stream's entry tells.

    `kinds` (of request) and `sessions` have successes and failures; of sessions only those that failed, or had to live
    a failure down. `common` is how much slower all endpoints were than usual, ln; `excused`: so much was bad everywhere
    that slowness was no evidence. `zones`: the first tokens that came, when they came.
    `trial`: `encode_trial`'s, empty where no rollout was observed.
    """

    observer: str
    seq: int
    service: str
    took_ms: int
    endpoints: tuple[EndpointSummary, ...] = ()
    kinds: dict[str, tuple[int, int]] = {}
    sessions: dict[str, tuple[int, int]] = {}
    common: float = 0.0
    excused: bool = False
    zones: dict[str, Told] = {}
    trial: bytes = b""


class _Endpoint(msgspec.Struct, frozen=True, array_like=True):
    endpoint: str
    version: str
    ended: dict[int, int] = {}
    copies: dict[int, int] = {}
    first_tokens: dict[int, int] = {}
    in_flight: int = 0
    counts: tuple[int, int, int, int, int, int] | None = None
    runs: tuple[int, int, int] | None = None


class _Body(msgspec.Struct, frozen=True, array_like=True):
    observer: str
    seq: int
    service: str
    took_ms: int
    endpoints: list[_Endpoint] = []
    kinds: dict[str, tuple[int, int]] = {}
    sessions: dict[str, tuple[int, int]] = {}
    common: int = 0
    excused: bool = False
    zones: dict[str, Told] = {}
    trial: bytes = b""


class Observed(msgspec.Struct, frozen=True, array_like=True):
    """An observer's tally of a rollout's step, the `part`-th that it tells of it, from 0.

    `whole`: it has read all that was told of the step, as far as it knows, and so may conclude.
    """

    part: int
    tally: Tally
    whole: bool = True


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(_Body)
_trial_decoder: Final = msgspec.msgpack.Decoder(Observed)


def encode(summary: Summary) -> bytes:
    """A summary as bytes. What is "other" in it does not go out again: we do not know what it was."""
    body = _Body(
        summary.observer,
        summary.seq,
        summary.service,
        summary.took_ms,
        [_packed(each) for each in summary.endpoints],
        summary.kinds,
        summary.sessions,
        round(summary.common * _THOUSAND),
        summary.excused,
        summary.zones,
        summary.trial,
    )
    return bytes((SCHEMA,)) + _encoder.encode(body)


def decode(data: bytes) -> Summary:
    """A summary from its bytes. `Unreadable` for all that is none, or none of this schema."""
    if not data or data[0] != SCHEMA:
        raise Unreadable(f"schema {data[0]} of a summary is not known here" if data else "an empty summary")
    if len(data) > MAX_SUMMARY_BYTES:
        raise Unreadable(f"{len(data)} bytes are too many for a summary")
    try:
        body = _decoder.decode(memoryview(data)[1:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise Unreadable(f"no summary: {exc}") from exc
    counted: list[Iterable[int]] = [*body.kinds.values(), *body.sessions.values(), (body.took_ms,)]
    for each in body.endpoints:
        counted += [each.ended.values(), each.copies.values(), each.first_tokens.values(), (each.in_flight,)]
        if each.runs is not None:
            counted.append(each.runs)
        if each.counts is not None:
            good, errors, slow, _, timed, _ = each.counts
            counted.append((good, errors, slow, timed))
    for sketch, timed, _ in body.zones.values():
        counted += [sketch.values(), (timed,)]
    if any(not 0 <= number <= MOST_COUNTED for numbers in counted for number in numbers):
        raise Unreadable("no summary: a count in it is none")
    return Summary(
        body.observer,
        body.seq,
        body.service,
        body.took_ms,
        tuple([_unpacked(each) for each in body.endpoints]),
        body.kinds,
        body.sessions,
        body.common / _THOUSAND,
        body.excused,
        body.zones,
        body.trial,
    )


def encode_trial(told: Observed) -> bytes:
    """For `Summary.trial`."""
    return _encoder.encode(told)


def decode_trial(data: bytes) -> Observed:
    """The inverse. `Unreadable` for what is none of ours."""
    try:
        told = _trial_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise Unreadable(f"no tally of a rollout: {exc}") from exc
    if told.part < 0 or not told.tally.valid():
        raise Unreadable("no tally of a rollout: a number in it is none")
    return told


def _packed(each: EndpointSummary) -> _Endpoint:
    counts = each.counts
    return _Endpoint(
        each.endpoint,
        each.version,
        {
            _SPREAD * RESULTS[result] + ENDINGS[ending]: number
            for (ending, result), number in each.ended.items()
            if ending is not None
        },
        {RESULTS[result]: number for result, number in each.copies.items()},
        each.first_tokens,
        each.in_flight,
        None
        if counts is None
        else (
            counts.good,
            counts.errors,
            counts.slow,
            round(counts.location * _THOUSAND),
            counts.timed,
            round(counts.left * _THOUSAND),
        ),
        each.runs if any(each.runs) else None,
    )


def _unpacked(each: _Endpoint) -> EndpointSummary:
    key = EndpointKey(each.endpoint)
    ended: Ended = {}
    for number, count in each.ended.items():
        outcome = _ENDING_OF.get(number % _SPREAD), _RESULT_OF.get(number // _SPREAD, Result.IGNORED)
        ended[outcome] = ended.get(outcome, 0) + count
    copies: dict[Result, int] = {}
    for number, count in each.copies.items():
        result = _RESULT_OF.get(number, Result.IGNORED)
        copies[result] = copies.get(result, 0) + count
    counts: Counts | None = None
    if each.counts is not None:
        good, errors, slow, location, timed, left = each.counts
        counts = Counts(key, good, errors, slow, location / _THOUSAND, timed, left / _THOUSAND)
    runs = each.runs or (0, 0, 0)
    return EndpointSummary(key, each.version, ended, copies, each.first_tokens, each.in_flight, counts, runs)


class Teller:
    """Makes this sidecar's summaries. `seq` is each service's first number: milliseconds since the epoch."""

    __slots__ = ("_observer", "_seq", "_seqs", "_told_at")

    def __init__(self, observer: str, seq: int, now: float) -> None:
        self._observer = observer
        self._seq = seq
        self._seqs: dict[str, int] = {}
        self._told_at = now

    def tell(self, fleet: Fleet, tallies: list[ServiceTally], now: float) -> list[Share]:
        """What was seen since the last call, of the services where anything was; monotonic seconds.

        Takes the detectors' counts (`evidence.share`): nobody else may.
        """
        took_ms = min(MOST_COUNTED, max(0, round(_THOUSAND * (now - self._told_at))))
        self._told_at = now
        tallied = {tally.service: tally.endpoints for tally in tallies}
        shares: list[Share] = []
        for name, service in fleet.services.items():
            counts = evidence.share(service)
            ended = tallied.get(name, [])
            kinds, sessions = _counted(service)
            zones = {} if service.zone_seen is None else service.zone_seen.take()
            if not counts and not ended and not kinds and not sessions and not zones:
                continue
            endpoints = _merged(service, ended, counts)
            keep_ms = round(_THOUSAND * float(service.policy.shared.retention_s))
            for begin in range(0, max(1, len(endpoints)), MOST_ENDPOINTS):
                told = self._summary(service, took_ms, tuple(endpoints[begin : begin + MOST_ENDPOINTS]))
                if not begin:
                    told = replace(told, kinds=kinds, sessions=sessions, zones=zones)
                shares.append(Share(service=name, blob=encode(told), keep_ms=keep_ms))
        return shares

    def tell_trial(self, service: ServiceState, trial: bytes) -> Share:
        """What was seen of a service's rollout, for itself: that is told as often as its steps are short."""
        told = replace(self._summary(service, 0, ()), trial=trial)
        keep_ms = round(_THOUSAND * float(service.policy.shared.retention_s))
        return Share(service=service.name, blob=encode(told), keep_ms=keep_ms)

    def _summary(self, service: ServiceState, took_ms: int, endpoints: tuple[EndpointSummary, ...]) -> Summary:
        detection = service.detection
        common = 0.0 if detection is None else detection.normal.common
        excused = detection is not None and (detection.normal.overload or detection.normal.panic)
        seq = self._seqs.get(service.name, self._seq)
        self._seqs[service.name] = seq + 1
        return Summary(self._observer, seq, service.name, took_ms, endpoints, common=common, excused=excused)


def _counted(service: ServiceState) -> tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int]]]:
    """Results of kinds of request, and of sessions that had failures to live down."""
    kinds: dict[str, tuple[int, int]] = {}
    sessions: dict[str, tuple[int, int]] = {}
    for scope, name, good, bad in service.take_counted():
        if len(name) > MOST_NAME:
            continue
        if scope is Scope.REQUEST:
            kinds[name] = good, bad
        elif len(sessions) < MOST_SESSIONS:
            sessions[name] = good, bad
    return kinds, sessions


def _merged(service: ServiceState, ended: list[EndpointTally], counts: list[Counts]) -> list[EndpointSummary]:
    seen = {each.endpoint: each for each in counts}
    merged: list[EndpointSummary] = []
    for tally in ended:
        node = service.nodes.get(tally.endpoint)
        in_flight = 0 if node is None else node.in_flight
        merged.append(
            EndpointSummary(
                tally.endpoint,
                tally.version,
                tally.ended,
                tally.copies,
                tally.first_tokens,
                in_flight,
                # An endpoint that changed its version in this interval is there twice, what was seen of it once.
                seen.pop(tally.endpoint, None),
                tally.runs,
            )
        )
    for key, each in seen.items():
        node = service.nodes.get(key)
        if node is not None:
            merged.append(EndpointSummary(key, node.version, in_flight=node.in_flight, counts=each))
    return merged


class Heard:
    """Which summaries were read already: what is left is news. `observer` is us."""

    __slots__ = ("_last", "_observer", "dropped")

    def __init__(self, observer: str) -> None:
        self._observer = observer
        self._last: OrderedDict[tuple[str, str], tuple[int, int]] = OrderedDict()
        self.dropped = 0
        """Summaries that came again, or too late."""

    def first(self, summary: Summary, at_ms: int, now_ms: int) -> bool:
        """Whether it is read for the first time, and not too old.

        `at_ms`: when it was appended, `now_ms`: now; both by the server's clock.
        """
        teller = summary.observer, summary.service
        last, heard_ms = self._last.get(teller, (-1, now_ms))
        if (summary.seq <= last and now_ms - heard_ms < FORGOTTEN_MS) or now_ms - at_ms > OLD_MS:
            self.dropped += 1
            return False
        self._last[teller] = summary.seq, now_ms
        self._last.move_to_end(teller)
        if len(self._last) > MOST_OBSERVERS:
            self._last.popitem(last=False)
        return True

    def news(self, summary: Summary) -> list[Counts]:
        """What one that is read for the first time says of each endpoint, for `evidence.absorb`; nothing if it is ours,
        for we know."""
        if summary.observer == self._observer:
            return []
        return [each.counts for each in summary.endpoints if each.counts is not None]
