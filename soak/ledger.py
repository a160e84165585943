"""The accounts: what clients saw against what the sidecar's log says, request by request, and both against its metrics.

Each request has two entries, its client's and its line. They are compared when the second comes, and forgotten; what
is left at the end is missing. Pure.
"""

from collections import Counter

import msgspec

from sidecar.kernel.outcome import Result
from soak.answers import Got, Must, Seen
from soak.plan import INFERENCE, Ask
from soak.requests import body_of, id_of, method_of, path_of

MAX_TOLD = 50
"""Breaches told with their evidence; more are counted."""

PREFIX = "soak-"


class Line(msgspec.Struct, frozen=True):
    """What is read of an access-log line."""

    request_id: str
    method: str
    path: str
    service: str
    version: str
    session: str
    status: int
    reason: str | None
    flag: str
    result: str
    attempts: int
    bytes_in: int
    bytes_out: int
    tokens: int


class Breach(msgspec.Struct, frozen=True):
    """One thing that must not be. `rule` is what was broken, `evidence` what shows it."""

    rule: str
    what: str
    evidence: tuple[str, ...] = ()


Series = tuple[str, str, str, str, str]
"""service, version, outcome, status, reason: labels of `sidecar_requests_total` but the model."""


class Totals(msgspec.Struct):
    """Sums over all lines of the log."""

    lines: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    retries: int = 0
    tokens: int = 0
    series: Counter[Series] = msgspec.field(default_factory=Counter)


class Ledger:
    """`saw` what clients got, `read` what the log says, `close` at the end; `breaches` says what did not fit."""

    def __init__(self) -> None:
        self.breaches: list[Breach] = []
        self.broken: Counter[str] = Counter()
        self.totals = Totals()
        self.got: Counter[Got] = Counter()
        self.words: Counter[str] = Counter()
        self.requests = 0
        self.aborted = 0
        self.refused_heads = 0
        self.expected_lines = 0
        self.possible_lines = 0
        self._seen: dict[int, tuple[Ask, Seen]] = {}
        self._lines: dict[int, tuple[Line, str]] = {}
        self._settled = bytearray()

    @property
    def open(self) -> int:
        """Requests with one entry that still wait for the other."""
        return len(self._seen) + len(self._lines)

    @property
    def lines_due(self) -> int:
        """Requests whose client has ended and whose line must still come."""
        return sum(seen.must is Must.ONE for _, seen in self._seen.values())

    def breach(self, rule: str, what: str, *evidence: str) -> None:
        """Something that must not be."""
        self.broken[rule] += 1
        if len(self.breaches) < MAX_TOLD:
            self.breaches.append(Breach(rule, what, evidence))

    def saw(self, ask: Ask, seen: Seen) -> None:
        """The client's entry: once for every request that was begun."""
        self.requests += 1
        self.got[seen.got] += 1
        if seen.word:
            self.words[seen.word] += 1
        self.aborted += seen.left
        if seen.got in (Got.WRONG, Got.NOTHING, Got.HUNG):
            what = f"{id_of(ask)}, {ask.kind.value}: {seen.got.value} {seen.detail}"
            self.breach("what clients get is lawful", what, *self._evidence(ask.number))
        if seen.must is Must.ONE:
            self.expected_lines += 1
        elif seen.must is Must.MAYBE:
            self.possible_lines += 1
        found = self._lines.pop(ask.number, None)
        if found is not None:
            self._settle(ask, seen, *found)
        elif seen.must is Must.NONE:
            self._mark(ask.number)  # a line would be its second
        else:
            self._seen[ask.number] = (ask, seen)

    def read(self, line: Line, raw: str) -> None:
        """The log's entry; `raw` as it was written."""
        totals = self.totals
        totals.lines += 1
        totals.bytes_in += line.bytes_in
        totals.bytes_out += line.bytes_out
        totals.retries += max(0, line.attempts - 1)
        totals.tokens += line.tokens
        totals.series[line.service, line.version, line.result, str(line.status), line.reason or ""] += 1
        digits = line.request_id.removeprefix(PREFIX)
        if digits == line.request_id or not digits.isdigit():
            self.breach("every line is of a request", f"nobody asked {line.request_id}", raw)
            return
        number = int(digits)
        if number in self._lines or self._is_settled(number):
            self.breach("no request has two lines, and what is no request has none", line.request_id, raw)
            return
        entry = self._seen.pop(number, None)
        if entry is None:
            self._lines[number] = (line, raw)
        else:
            self._settle(*entry, line, raw)

    def close(self) -> None:
        """No more entries will come."""
        for ask, seen in self._seen.values():
            if seen.must is Must.ONE:
                what = f"{id_of(ask)}, {ask.kind.value}: {seen.got.value} {seen.status}"
                self.breach("every request has its line", what)
        for line, raw in self._lines.values():
            self.breach("every line is of a request", f"no client ended {line.request_id}", raw)
        self._seen.clear()
        self._lines.clear()

    def _settle(self, ask: Ask, seen: Seen, line: Line, raw: str) -> None:
        self._mark(ask.number)
        if seen.must is Must.NONE:
            self.breach(
                "no request has two lines, and what is no request has none", f"{id_of(ask)}, {ask.kind.value}", raw
            )
        for word in disagreements(ask, seen, line):
            what = f"{id_of(ask)}, {ask.kind.value}: {word}; the client: {seen.got.value} {seen.status} {seen.word}"
            self.breach("client and log agree", what, raw)

    def _mark(self, number: int) -> None:
        if number >= len(self._settled):
            self._settled.extend(bytes(number + 4096 - len(self._settled)))
        self._settled[number] = 1

    def _is_settled(self, number: int) -> bool:
        return number < len(self._settled) and self._settled[number] == 1

    def _evidence(self, number: int) -> tuple[str, ...]:
        found = self._lines.get(number)
        return () if found is None else (found[1],)


def disagreements(ask: Ask, seen: Seen, line: Line) -> list[str]:
    """In what the log's line says other than the client saw; empty where they agree."""
    out = []
    if line.method != method_of(ask).decode() or line.path != path_of(ask).decode():
        out.append(f"the line is of {line.method} {line.path}")
    if line.session not in ("", ask.session):
        out.append(f"the line's session is {line.session}, not {ask.session}")
    left = line.flag == "DC" and line.reason is None
    if left and not seen.left:
        out.append("the log says that the client left")
    if line.reason == "client_timeout" and not seen.slow:
        out.append("the log says that the client was slow")
    if seen.status and line.status != seen.status:
        out.append(f"the log's status is {line.status}")
    if not seen.status and not seen.left and not seen.slow:
        out.append("the client got no head")
    if not seen.word and not line.reason and seen.status and line.bytes_out < seen.body_bytes:
        out.append(f"the client has {seen.body_bytes} bytes, the log {line.bytes_out}")
    out.extend(_ending(ask, seen, line))
    return out


def _ending(ask: Ask, seen: Seen, line: Line) -> list[str]:
    """Whether line and client tell of the same end."""
    out = []
    good = line.result == Result.SUCCESS.value
    match seen.got:
        case Got.WHOLE | Got.MARRED:
            if good is not (seen.status < 400) or line.reason is not None:
                out.append(f"the log says {line.result} {line.reason}")
            if line.bytes_out != seen.body_bytes:
                out.append(f"the log has {line.bytes_out} bytes out, the client {seen.body_bytes}")
            if ask.kind in INFERENCE and line.bytes_in != len(body_of(ask)):
                out.append(f"the log has {line.bytes_in} bytes in, the client sent {len(body_of(ask))}")
        case Got.ENGINE_ERROR | Got.ENGINE_STATUS:
            if good or line.reason is not None:
                out.append(f"the log says {line.result} {line.reason}")
        case Got.CUT | Got.REFUSED:
            if good or line.reason != seen.word:
                out.append(f"the log says {line.result} {line.reason}")
        case Got.BROKEN:
            if good or line.reason is None:
                out.append(f"the log says {line.result} {line.reason}")
        case _:
            pass  # who left, or got what nobody should get, has no end to compare
    return out
