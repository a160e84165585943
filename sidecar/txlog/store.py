"""The port to the log's server: a handful of calls, each atomic there, and a stream of records to read.

Two implementations keep the same contract (tests/txlog/contract.py): `server` runs the calls as functions in Redis or
Valkey, `local` runs them in this process. The rules below are the contract; both say them in their own language.

Registers. A shard holds a map from key to that key's latest record (its register), a log of all records, and for each
half-open register its probes. A call that changes a register writes it and appends the same bytes to the log at once.
`n` numbers a shard's records, so that a reader sees a gap; the first is numbered by the server's microseconds, so that
what begins anew after a loss is a gap, too. A new register has `epoch` = the server's seconds, or one
more than the caller's epoch if that is more, and version 1; each change adds 1 to the version. The server's clock is
the only one.

1. `Propose` moves a register from the version it names. Refused, the first that fits: ALREADY if the register's tx is
   the proposal's own (a repetition); STALE if the register has another (epoch, version) (a register that is not there
   counts as closed and fits any expectation); HELD while an order holds it; ILLEGAL if the edge is none: closed ->
   open, and open or half_open -> closed; FLOOR (2); SUSPECT (3). With `order` it is an operator's: any state, any
   version, no floor, no quorum, kind OVERRIDE.
2. Opening a node is refused (FLOOR) if of `size` nodes fewer than `minimum` would stay closed (0: no floor). Nodes that
   are not closed and were touched by nobody for 2 * max_ms + GONE_SLACK_MS are gone and do not count; one that an order
   holds is never gone. Touched: its record was written, a probe was lent, or a lease prolonged.
3. Opening needs `quorum` observers: with fewer in the last `SUSPECT_MS` the register stays, a SUSPECT record is
   appended (once per observer and `SUSPECT_MS`, with the register's state, epoch and version, or zeros), and the answer
   is SUSPECT. `overwhelming` needs nobody else. A register that opens has no suspects any more.
4. `Ask` is for one probe. CLOSED, HELD, WAIT (`ms` left) as they say, in this order. An open register whose wait is
   over becomes half_open (kind TRANSITION, `body`), and gives probe 1. Half-open, at most `concurrent` probes are lent
   at a time: `probes`, or, once one was good and more than `successes` are needed, MOST_PROBES if that is more; never
   more than are still needed (but one), never more than `TOTAL_PER_NEEDED * needed + TOTAL_SLACK` in all of one
   half-open. FULL otherwise, and then the lenders are told (`contended`). needed = max(successes, proofs * min(2, 1 +
   doublings)). A probe whose lease ran out has failed: the register opens again (`reopened`, REOPENED), as after a
   failure. If all that may be lent were lent and none is out, it opens with the wait as it was (REOPENED): nothing
   would come of it.
5. `Report` ends a probe: FENCED unless the register has that epoch and version, is half_open, and the probe's lease
   stands. False, or another probe was lost: open, doublings + 1 (to MAX_DOUBLINGS), wait = min(max_ms, base_ms <<
   doublings) (REOPENED). True: closed (CLOSED) once `needed` were good, or `successes` were and PATIENCE_MS went by
   since it is half_open; else PROVED, and with `again` the next probe at once, if rule 4 gives one (`seq` > 0). None:
   NEUTRAL, the probe's place is free. Before PROVED and NEUTRAL: if all that may be lent were lent and none is out,
   open with the wait as it was (REOPENED). A closed record loses the wait; the rest stays, the doublings for the next
   trip.
6. `Renew` prolongs a lease (OK, with `contended` if somebody was refused since this probe was lent) or is FENCED.
   `Release` gives back a probe that was not used (OK): the last one out, if none was good yet, makes the register
   open again, with no wait left (REOPENED); one that was lost is out until rule 4 or 5 finds it. What was good counts
   on for whoever asks next, or two sidecars with little traffic would never see two good ones in a row.
7. `Restore` merges a record that the server may have lost: a later one (epoch, version) is written as it is, but with
   the log's next `n` and `ts_us` at most now; of two with the same version and another tx the later by (state, tx) is
   written with version + 1; else KEPT. A half_open one is written as open with version + 1 and no wait left: its leases
   are lost. Written: OK. What is no record of a register: ILLEGAL. The answer has the register as it is then.
8. Every write may forget up to `PURGE` registers that nobody needs: closed for `CLOSED_TTL_MS`, not closed and not
   touched for `OPEN_TTL_MS` + 2 * max_ms; never one that an order holds, never a routing table. An expectation of a
   register that is forgotten fits (rule 1), and the new epoch is later.
9. `Beat` says that a sidecar lives and answers with how many do (`ms`): those heard of in the last MEMBER_TTL_MS.
10. `Share` appends to the shard's evidence, of which what is older than `keep_ms` may go, and the oldest of what is
    more than `EVIDENCE_BYTES`.
11. `Draw` draws on one tenant's budget, ahead of need. Time is cut into parts of 1/SPAN_PARTS of a window's span, and
    what was drawn in a part is in use until the part is a whole span old: never less than a span, nor longer than by
    one part. In each window by itself, in this order: `give_back` is taken off what this very sidecar drew until
    `give_back_us` (0: until now), `must` too, the newest first, for who uses the oldest first holds the newest; never
    more than it drew, and of what is in use no longer nothing. `must` was used already: it is counted, though it be
    over the limit. Of `want` as much is granted as there is room below the limit, if that is `least` or more. Slots:
    the sidecar has `slots_used`, or, where it wants more, up to `slots_want` as far as all have no more than
    `slots_limit`; what it had before does not count any more. Who has not drawn on this budget for MEMBER_TTL_MS has no
    slots, and for DRAWER_TTL_MS nothing to give back. A limit is of its call alone: nothing of it is kept, and two that
    differ spoil nothing. What was drawn at a time that the clock went back behind was drawn now. No part holds more
    than MOST_DRAWN. ILLEGAL, and nothing is done: more than MAX_WINDOWS windows, two of one unit and span, or a span
    below MIN_SPAN_MS or above MAX_SPAN_MS. A budget that nobody draws on is forgotten once nothing of it is in use; the
    answer has the time when it was made, so that whoever drew on it before knows that it was lost, and when this very
    sidecar drew on it before, so that one that did so later knows that the server is back with an older picture of
    itself. Neither the log nor a register sees any of this.

An order holds a register that is `held` until `expires_us`, or, if that is 0, until the next order. Positions in a log
are `ms-seq`, the server's clock and a number, and never go back; "0" is before all.

Every reply has the server's time; that of Draw has what `drawn` reads, those of Beat and Share have nothing, and all
others the register as it is after the call.
"""

import struct
from enum import IntEnum, StrEnum
from typing import Final, Protocol

import msgspec

SUSPECT_MS: Final = 60_000
MOST_PROBES: Final = 8
PATIENCE_MS: Final = 60_000
TOTAL_PER_NEEDED: Final = 4
TOTAL_SLACK: Final = 16
MAX_DOUBLINGS: Final = 32
CLOSED_TTL_MS: Final = 3_600_000
OPEN_TTL_MS: Final = 86_400_000
MEMBER_TTL_MS: Final = 15_000
PURGE: Final = 4
GONE_SLACK_MS: Final = 60_000
EVIDENCE_BYTES: Final = 32 << 20
"""Of a shard's evidence, about: the log must not fill a server that others use. An hour of five sidecars with twenty
busy endpoints each is a shard's 28 MB."""
EVIDENCE_OVERHEAD: Final = 30  # bytes that an entry takes in the server beside its blob
LOG_RECORDS: Final = 10_000
"""Records that a shard's log keeps, about: for readers that were away, and for `sidecar log show`."""
LOG_BYTES: Final = 32 << 20
"""Of a shard's log, about: as many records as there would be if all were as long as the last. Ten thousand routing
tables of 1,000 endpoints each would be 180 MB."""
SPAN_PARTS: Final = 60
"""Of a budget's window: seconds of a minute, 24 minutes of a day."""
DRAWER_TTL_MS: Final = 600_000
"""As long as a request may take, of which what it did not use comes back; and no longer, or the names of all sidecars
of a day would lie in each budget."""
MOST_DRAWN: Final = 1 << 46
"""Of one part, and of each number of a call: 70 times the largest limit of a policy, and the sum of a window's parts is
a double's exact number still."""
MAX_WINDOWS: Final = 4  # tokens and requests, of a minute and a day
MIN_SPAN_MS: Final = 60  # the clock counts in milliseconds, and a part is one of them at least
MAX_SPAN_MS: Final = 31 * 86_400_000


class StoreDown(Exception):
    """The server did not do what was asked: refused, gone, silent for too long, read-only, out of memory, loading.

    Whether it was done is not known. `word` is one of a bounded set, for metrics; the text says it for people.
    """

    def __init__(self, word: str, text: str) -> None:
        super().__init__(text)
        self.word = word


class StoreUnfit(StoreDown):
    """The server will not do without a change by a person: a wrong password, too old a version, no permission."""


class Verdict(StrEnum):
    """What came of a call."""

    OK = "ok"
    ALREADY = "already"
    STALE = "stale"
    ILLEGAL = "illegal"
    HELD = "held"
    FLOOR = "floor"
    SUSPECT = "suspect"
    GRANTED = "granted"
    CLOSED = "closed"
    WAIT = "wait"
    FULL = "full"
    REOPENED = "reopened"
    PROVED = "proved"
    NEUTRAL = "neutral"
    FENCED = "fenced"
    KEPT = "kept"


class Propose(msgspec.Struct, frozen=True, kw_only=True):
    """Rule 1-3. `state` is a `codec.Code`, `kind` TRANSITION, OVERRIDE or ROUTE (a ROUTE's state is CLOSED, its edges
    are free, its version is checked). `expires_us`: of an order, 0 for never."""

    key: str
    service: str
    kind: int
    state: int
    epoch: int
    version: int
    tx: bytes
    body: bytes
    by: str
    order: bool = False
    held: bool = False
    expires_us: int = 0
    doublings: int = 0
    proofs: int = 0
    wait_ms: int = 0
    base_ms: int = 0
    max_ms: int = 0
    ramp_ms: int = 0
    size: int = 0
    minimum: int = 0
    quorum: int = 1
    overwhelming: bool = False
    suspect_tx: bytes = b"\0" * 16


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """Rule 4. `body`/`tx` of the half_open record, `reopened_body`/`reopened_tx` of the one after a lost probe."""

    key: str
    service: str
    by: str
    lease_ms: int
    probes: int
    successes: int
    tx: bytes
    body: bytes
    reopened_tx: bytes
    reopened_body: bytes


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Rule 5. `ok` True, False, or None for neutral. Bodies as of `Ask`."""

    key: str
    service: str
    by: str
    epoch: int
    version: int
    seq: int
    ok: bool | None
    again: bool
    lease_ms: int
    probes: int
    successes: int
    tx: bytes
    closed_body: bytes
    reopened_body: bytes


class Renew(msgspec.Struct, frozen=True, kw_only=True):
    """Rule 6."""

    key: str
    service: str
    epoch: int
    version: int
    seq: int
    lease_ms: int


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """Rule 6. `tx`, `body`: of the open record, should it be the last."""

    key: str
    service: str
    epoch: int
    version: int
    seq: int
    tx: bytes
    body: bytes


class Restore(msgspec.Struct, frozen=True, kw_only=True):
    """Rule 7. `record` as `codec.encode` makes it."""

    key: str
    service: str
    record: bytes


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """Rule 9."""

    by: str


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """Rule 10. `blob` is `evidence`'s business."""

    service: str
    blob: bytes
    keep_ms: int


class Unit(IntEnum):
    """What a window counts."""

    TOKENS = 0
    REQUESTS = 1


class Window(msgspec.Struct, frozen=True, gc=False):
    """Rule 11: one window of a budget, known by `unit` and `span_ms`. All other numbers are cut to 0..MOST_DRAWN.

    `give_back_us`: of what was drawn until this time of the server, as the reply said that granted it or was told of it
    by `must`.
    """

    unit: Unit
    span_ms: int
    limit: int
    must: int = 0
    want: int = 0
    give_back: int = 0
    least: int = 0
    give_back_us: int = 0


class Draw(msgspec.Struct, frozen=True, kw_only=True):
    """Rule 11. `key` as `codec.budget_key` makes it.

    `slots_used` and `slots_want` are how many it has and how many it wants in all, each time anew; cut as a window's
    numbers are. It is no call to repeat: where it is not known whether it was done, `must` is to be told again and
    `give_back` is not, and what was granted is lost. All three are the safe side.
    """

    key: str
    by: str
    windows: tuple[Window, ...]
    slots_limit: int = 0
    slots_used: int = 0
    slots_want: int = 0


Call = Propose | Ask | Report | Renew | Release | Restore | Beat | Share | Draw


class Reply(msgspec.Struct, frozen=True):
    """What came of a call. `record`: the register after it, empty if there is none."""

    verdict: Verdict
    now_us: int
    record: bytes = b""
    seq: int = 0
    ms: int = 0
    contended: bool = False


class Part(msgspec.Struct, frozen=True, gc=False):
    """What a window gave: `granted` of `want`; what is in `used` after it, by all.

    `ms`: 0 if all of `want` was granted, else how long until the rest would fit, if nobody else draws: the whole span
    if it never would.
    """

    granted: int
    used: int
    ms: int


class Drawn(msgspec.Struct, frozen=True, gc=False):
    """What a budget gave: its windows in the call's order, and how many slots this sidecar and all have now.

    `born_us`: when the server made this budget. Later than before: it had lost it, or nothing of it was in use.
    `before_us`: when this sidecar drew on it before, to the millisecond below; 0: never, or not for long. Earlier than
    a draw that was answered: the server has lost that one, and all that came after `before_us`.
    """

    parts: tuple[Part, ...] = ()
    slots: int = 0
    slots_in_use: int = 0
    born_us: int = 0
    before_us: int = 0


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One entry of a shard's log or evidence, as it was found; `data` may be anybody's bytes."""

    shard: int
    evidence: bool
    id: str
    data: bytes


class Image(msgspec.Struct, frozen=True):
    """A shard's registers. What is not in them and has an `n` above this comes after `position` in the log."""

    shard: int
    n: int
    position: str
    evidence_position: str
    registers: list[bytes]


class Store(Protocol):
    """The server. Whatever is asked may raise `StoreDown`; a call that was cancelled may have been done."""

    async def open(self) -> None:
        """Connect, check the version, load the functions. `StoreUnfit` says what a person must change."""

    async def close(self) -> None:
        """Let go of every connection; nothing is raised."""

    async def call(self, calls: list[Call]) -> list[Reply]:
        """Do all of them, in one round trip where the server is one; the replies in their order."""

    async def image(self, shard: int) -> Image:
        """Read a shard whole."""

    async def counts(self) -> list[int]:
        """How many records each shard's log has had, by shard."""

    @property
    def lanes(self) -> tuple[tuple[int, ...], ...]:
        """Shards that can be read together: one lane on one server, sixteen in a cluster."""

    async def read(self, lane: int, after: dict[int, tuple[str, str]], block_ms: int, count: int) -> list[Entry]:
        """What came after these positions (log, evidence) by shard of a lane; empty after `block_ms` without any.

        `block_ms` 0 does not wait. At most `count` entries of each stream. In the order of each stream.
        """

    async def history(self, shard: int, *, evidence: bool, after: str, count: int) -> list[Entry]:
        """Entries after a position (exclusive; "0" is the first), at most `count`. Empty: there are no more."""

    async def newest(self, shard: int, *, before: str, count: int) -> list[Entry]:
        """The last `count` entries of a shard's log before a position (exclusive; "": its end), the newest first."""


def cut(number: int) -> int:
    """A number of a `Draw` as it counts."""
    return min(max(number, 0), MOST_DRAWN)


SLOTS: Final = struct.Struct(">QQQQ")
PART: Final = struct.Struct(">QQI")
"""Of a reply to `Draw`: this sidecar's slots, all's, when the budget was made, when this sidecar drew on it before;
then each window's part."""


def drawn(reply: Reply) -> Drawn:
    """What a budget gave; nothing if the call was ILLEGAL."""
    if not reply.record:
        return Drawn()
    slots, in_use, born_us, before_us = SLOTS.unpack_from(reply.record)
    parts = tuple([Part(*numbers) for numbers in PART.iter_unpack(memoryview(reply.record)[SLOTS.size :])])
    return Drawn(parts, slots, in_use, born_us, before_us)
