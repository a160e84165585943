"""A span of the log as lines of JSON, in order of time: what was seen and what moved, for `sidecar log replay`.

```
{"is":"span","since_ms":...,"until_ms":...}                        first
{"is":"seen","at_ms":...,"observer":"pod-a","service":"chat","endpoints":[{"endpoint":...,"ended":{"complete":40}}]}
{"is":"moved","at_ms":...,"scope":"node","service":"chat","name":"10.0.0.1:8000","state":"open","why":"fast",...}
{"is":"skipped","at_ms":...,"id":"...","why":"schema 9 is not known here"}
{"is":"end","lines":...}                                           last: without it the rest was lost on the way
```

JSON and not the records' own bytes: a recording is kept for an incident's report, read with `jq` and cut by hand.

1. All times are the server's clock. A `seen` tells of the `took_ms` before its `at_ms`.
2. An outcome is its ending's word where the result is what the doctrine says, else `ending/result`.
3. A register's last move before the span comes with it (`before`): what it was when the span began.
4. Sixteen logs and their evidence are merged as they are read, a page of each at a time: nothing is held whole.
"""

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

import msgspec

from sidecar.core.breaker import Scope
from sidecar.core.detection import Counts
from sidecar.core.zone import Told
from sidecar.kernel.ids import EndpointKey
from sidecar.kernel.outcome import DOCTRINE, Ending, Result
from sidecar.txlog import codec, summary
from sidecar.txlog.codec import SHARDS, Kind, Unreadable
from sidecar.txlog.store import Entry
from sidecar.txlog.summary import EndpointSummary, Summary

PAGE: Final = 200
"""Entries asked for at a time, of each stream: some 20 KB."""
LINES: Final = 500
"""Lines given at a time: a few milliseconds."""
OTHER: Final = "other"


class Span(msgspec.Struct, frozen=True, tag_field="is", tag="span"):
    """What was asked for."""

    since_ms: int
    until_ms: int
    service: str = ""


class Evidence(msgspec.Struct, frozen=True):
    """A detector's counts, as in `core.detection.Counts`."""

    good: int
    errors: int
    slow: int
    location: float
    timed: int
    left: float


class SeenEndpoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """An endpoint within `Seen`."""

    endpoint: str
    version: str
    ended: dict[str, int] = {}
    copies: dict[str, int] = {}
    first_tokens: dict[int, int] = {}
    in_flight: int = 0
    evidence: Evidence | None = None
    runs: tuple[int, int, int] = (0, 0, 0)


class Seen(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="is", tag="seen"):
    """A summary; `trial` in base64. A replay judges breakers: zones and rollouts are there for who looks."""

    at_ms: int
    observer: str
    seq: int
    service: str
    took_ms: int
    endpoints: tuple[SeenEndpoint, ...] = ()
    kinds: dict[str, tuple[int, int]] = {}
    sessions: dict[str, tuple[int, int]] = {}
    common: float = 0.0
    excused: bool = False
    zones: dict[str, Told] = {}
    trial: bytes = b""


class Moved(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="is", tag="moved"):
    """A breaker's record. `kind` is `transition` or `override`, `by` is the sidecar that said so."""

    at_ms: int
    scope: str
    service: str
    name: str
    kind: str
    state: str
    epoch: int
    version: int
    why: str = ""
    evidence: str = ""
    by: str = ""
    trace: str = ""
    held: bool = False
    expires_ms: int = 0
    before: bool = False


class Skipped(msgspec.Struct, frozen=True, tag_field="is", tag="skipped"):
    """An entry that could not be read."""

    at_ms: int
    id: str
    why: str


class End(msgspec.Struct, frozen=True, tag_field="is", tag="end"):
    """So many lines came before this one."""

    lines: int


Line = Span | Seen | Moved | Skipped | End

_encoder: Final = msgspec.json.Encoder()
_decoder: Final = msgspec.json.Decoder(Line)


class BadLine(ValueError):
    """A line that is none of a recording's, in words."""


def read(text: bytes) -> Line:
    """One line. `BadLine` if it is none."""
    try:
        return _decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise BadLine(str(exc)) from exc


def write(line: Line) -> bytes:
    """As it stands in a file, with its end."""
    return _encoder.encode(line) + b"\n"


def seen_of(told: Summary, at_ms: int) -> Seen:
    """A summary as a line."""
    return Seen(
        at_ms,
        told.observer,
        told.seq,
        told.service,
        told.took_ms,
        tuple([_endpoint_of(each) for each in told.endpoints]),
        told.kinds,
        told.sessions,
        told.common,
        told.excused,
        told.zones,
        told.trial,
    )


def summary_of(seen: Seen) -> Summary:
    """The inverse. Words that are not known here count as other endings, and for nobody."""
    return Summary(
        seen.observer,
        seen.seq,
        seen.service,
        seen.took_ms,
        tuple([_seen_endpoint(each) for each in seen.endpoints]),
        seen.kinds,
        seen.sessions,
        seen.common,
        seen.excused,
        seen.zones,
        seen.trial,
    )


def moved_of(record: codec.Record, at_ms: int, *, before: bool = False) -> Moved | None:
    """A breaker's record as a line; None for what moves none: a suspicion, a routing table, a key that is none."""
    try:
        scope, service, name = codec.parse_key(record.key)
    except ValueError:
        return None
    if record.kind not in (Kind.TRANSITION, Kind.OVERRIDE) or scope not in set(Scope):
        return None
    return Moved(
        at_ms,
        scope,
        service,
        name,
        record.kind_word,
        record.state_word,
        record.epoch,
        record.version,
        record.why,
        record.evidence,
        record.by,
        record.trace,
        record.held,
        record.expires_us // 1000,
        before,
    )


def _endpoint_of(each: EndpointSummary) -> SeenEndpoint:
    counts = each.counts
    return SeenEndpoint(
        each.endpoint,
        each.version,
        {_word_of(ending, result): number for (ending, result), number in each.ended.items()},
        {result.value: number for result, number in each.copies.items()},
        each.first_tokens,
        each.in_flight,
        None
        if counts is None
        else Evidence(counts.good, counts.errors, counts.slow, counts.location, counts.timed, counts.left),
        each.runs,
    )


def _seen_endpoint(each: SeenEndpoint) -> EndpointSummary:
    key = EndpointKey(each.endpoint)
    ended: dict[tuple[Ending | None, Result], int] = {}
    for word, number in each.ended.items():
        outcome = _outcome_of(word)
        ended[outcome] = ended.get(outcome, 0) + number
    copies = {_RESULTS[word]: number for word, number in each.copies.items() if word in _RESULTS}
    saw = each.evidence
    counts = None if saw is None else Counts(key, saw.good, saw.errors, saw.slow, saw.location, saw.timed, saw.left)
    return EndpointSummary(key, each.version, ended, copies, each.first_tokens, each.in_flight, counts, each.runs)


_RESULTS: Final = {result.value: result for result in Result}
_ENDINGS: Final = {ending.value: ending for ending in Ending}


def _word_of(ending: Ending | None, result: Result) -> str:
    if ending is None:
        return f"{OTHER}/{result.value}"
    return ending.value if DOCTRINE[ending].node is result else f"{ending.value}/{result.value}"


def _outcome_of(word: str) -> tuple[Ending | None, Result]:
    name, slash, said = word.partition("/")
    ending = _ENDINGS.get(name)
    if slash:
        return ending, _RESULTS.get(said, Result.IGNORED)
    return ending, Result.IGNORED if ending is None else DOCTRINE[ending].node


class Pages(Protocol):
    """Where entries are read: `Store.history`, or the same of a log that is followed."""

    async def __call__(self, shard: int, *, evidence: bool, after: str, count: int) -> list[Entry]:
        """Entries after a position (exclusive; "0" is the first), at most `count`. StoreDown."""


class _Stream:
    """One stream of one shard, read a page at a time."""

    __slots__ = ("_after", "_pages", "_whole", "evidence", "page", "shard")

    def __init__(self, pages: Pages, shard: int, after: str, *, evidence: bool) -> None:
        self._pages = pages
        self._after = after
        self._whole = False
        self.shard = shard
        self.evidence = evidence
        self.page: deque[tuple[int, int, Entry]] = deque()

    async def fill(self) -> bool:
        """Whether there is a next entry."""
        if not self.page and not self._whole:
            found = await self._pages(self.shard, evidence=self.evidence, after=self._after, count=PAGE)
            self._whole = not found
            for entry in found:
                ms, _, rank = entry.id.partition("-")
                self.page.append((int(ms), int(rank or 0), entry))
            if found:
                self._after = found[-1].id
        return bool(self.page)


class Recorder:
    """Reads a span off the log: `next` until it gives nothing. StoreDown ends it; what was given is good.

    `service` "": all of them. `breathe` is awaited between pages, so that who serves may serve.
    """

    __slots__ = ("_before", "_begun", "_breathe", "_done", "_lines", "_service", "_since_ms", "_streams", "_until_ms")

    def __init__(
        self, pages: Pages, since_ms: int, until_ms: int, service: str, breathe: Callable[[], Awaitable[None]]
    ) -> None:
        self._since_ms = since_ms
        self._until_ms = until_ms
        self._service = service
        self._breathe = breathe
        self._begun = self._done = False
        self._lines = 0
        self._before: dict[str, Moved] = {}
        # No id of a stream is below its first millisecond's; nothing of the one before is wanted.
        after = f"{max(0, since_ms - 1)}-{(1 << 53) - 1}" if since_ms > 0 else "0"
        shards = range(SHARDS)
        told = [codec.shard_of(codec.route_key(service))] if service else shards
        self._streams = [
            *(_Stream(pages, shard, "0", evidence=False) for shard in shards),
            *(_Stream(pages, shard, after, evidence=True) for shard in told),
        ]

    async def next(self) -> list[bytes]:
        """The next lines, LINES at most or a few more; none: that was all."""
        lines: list[bytes] = []
        if self._done:
            return lines
        if not self._begun:
            self._begun = True
            lines.append(write(Span(self._since_ms, self._until_ms, self._service)))
        while len(lines) < LINES:
            entry = await self._first()
            if entry is None:
                lines += self._told_before()
                self._lines += len(lines)
                lines.append(write(End(self._lines)))
                self._done = True
                return lines
            at_ms = entry[0]
            if at_ms >= self._since_ms:
                lines += self._told_before()
            line = self._line(entry[1], at_ms)
            if line is not None:
                lines.append(write(line))
        self._lines += len(lines)
        return lines

    async def _first(self) -> tuple[int, Entry] | None:
        """Takes the oldest entry that is left, within the span's end."""
        first: _Stream | None = None
        for stream in list(self._streams):
            if not stream.page:
                if not await stream.fill():
                    self._streams.remove(stream)
                    continue
                await self._breathe()
            if first is None or stream.page[0][:2] < first.page[0][:2]:
                first = stream
        if first is None or first.page[0][0] > self._until_ms:
            return None
        ms, _, entry = first.page.popleft()
        return ms, entry

    def _told_before(self) -> list[bytes]:
        before, self._before = self._before, {}
        return [write(moved) for moved in before.values()]

    def _line(self, entry: Entry, at_ms: int) -> Line | None:
        try:
            if entry.evidence:
                told = summary.decode(entry.data)
                return seen_of(told, at_ms) if self._service in ("", told.service) else None
            record = codec.decode(entry.data)
        except Unreadable as exc:
            return Skipped(at_ms, entry.id, str(exc)) if at_ms >= self._since_ms else None
        moved = moved_of(record, at_ms, before=at_ms < self._since_ms)
        if moved is None or self._service not in ("", moved.service):
            return None
        if moved.before:
            self._before[record.key] = moved
            return None
        return moved
