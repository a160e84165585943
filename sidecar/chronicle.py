"""The verbs that read the log through a running sidecar: `log tail`, live, and `log show`, one breaker's history.

They ask the sidecar and not the log's server: who may look at a sidecar need not be given the server's password, and
what is shown is what this sidecar knows.

1. `tail` prints what was as a table, then a line for each record that comes; its columns only ever grow wider.
2. Ctrl-C is how one ends looking, and so is closing what the output goes to: both end well. A sidecar that ends, or
   falls silent for `SILENCE_S`, is a failure: who waits for news must learn that none will come.
"""

import argparse
import contextlib
import http.client
import os
import select
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Final
from urllib.parse import quote, urlencode

import msgspec

from sidecar.admin.words import parse_span
from sidecar.operate import (
    OK,
    Unanswered,
    admin_address,
    answering,
    connection_to,
    held_until,
    print_json,
    print_table,
    printable,
    refusal,
    unanswered,
    whole,
)
from sidecar.settings import Listen, UsageError

MOST_RECORDS: Final = 10_000
SILENCE_S: Final = 45.0
"""Three times the pause after which a sidecar that has nothing to tell says that it lives."""

MAX_LINE_BYTES: Final = 1 << 20
"""A record is some 500 bytes; where this much comes without a line's end, nobody tells records."""

TAIL_HEAD: Final = ("TIME", "KEY", "VERSION", "STATE", "BY", "WHY", "TRACE")
USUAL_WIDTHS: Final = (24, 24, 12, 9, 12, 13, 0)
"""The head may stand there long before the first record does."""

SHOW_HEAD: Final = ("TIME", "SERVICE", "VERSION", "STATE", "BY", "WHY", "TRACE")


class Record(msgspec.Struct, frozen=True):
    """A record of the log as `GET /log` tells it; or, with `lost`, that so many were not told."""

    ts: str = ""
    key: str = ""
    service: str = ""
    kind: str = ""
    state: str = ""
    epoch: int = 0
    version: int = 0
    why: str = ""
    evidence: str = ""
    by: str = ""
    trace: str = ""
    held: bool = False
    expires: str = ""
    wait_s: float = 0.0
    lost: int = 0


def read(arguments: argparse.Namespace) -> int:
    """Run the query that `arguments` name; the exit code. UsageError for flags without sense."""
    address = admin_address(arguments.admin, os.environ)
    query = _query(arguments.limit, arguments.since)
    try:
        if arguments.query == "key":
            place = quote(arguments.key, safe="")
            if arguments.scope is not None:
                place = f"{arguments.scope}/{place}"
            _show(address, f"/log/{place}?{query}", arguments.json)
        else:
            _tail(address, query, arguments)
    except KeyboardInterrupt:
        return OK
    except (Unanswered, msgspec.DecodeError) as exc:
        return unanswered(address, exc)
    return OK


def _query(limit: str, since: str | None) -> str:
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 6 and int(limit) <= MOST_RECORDS):
        raise UsageError(f'-n: "{limit[:40]}" is not a number from 0 to {MOST_RECORDS}')
    query = {"limit": limit}
    if since is not None:
        try:
            parse_span(since)
        except ValueError as exc:
            raise UsageError(f"--since: {exc}") from exc
        query["since"] = since
    return urlencode(query)


def _show(address: Listen, path: str, as_json: bool) -> None:
    body = whole(address, "GET", path)
    if as_json:
        print_json(body)
        return
    records = msgspec.json.decode(body, type=list[Record])
    print_table(SHOW_HEAD, [_cells(one, one.service) for one in records], [_notes(one) for one in records])


def _tail(address: Listen, query: str, arguments: argparse.Namespace) -> None:
    follow = sys.stdout.isatty() if arguments.follow is None else arguments.follow
    if arguments.key is not None:
        query += f"&{urlencode({'key': arguments.key})}"
    if not follow:
        lines = whole(address, "GET", f"/log?{query}").splitlines()
        if arguments.json:
            for line in lines:
                print(line.decode())
        else:
            _Table().print([msgspec.json.decode(line, type=Record) for line in lines])
        return
    with contextlib.closing(_live(address, f"/log?{query}&follow=1")) as live:
        try:
            _print_live(live, arguments.json)
        except BrokenPipeError:
            # Also for the interpreter's own flush at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_live(live: Iterator[bytes], as_json: bool) -> None:
    """What comes, as it comes; returns when nobody reads it any more."""
    table = _Table()
    past: list[Record] | None = None if as_json else []
    for line in live:
        if line == b"\n":
            if past is not None:
                table.print(past)
                past = None
            elif _nobody_reads():
                return
        elif as_json:
            print(line.decode(), end="")
        elif past is not None:
            past.append(msgspec.json.decode(line, type=Record))
        else:
            table.print([msgspec.json.decode(line, type=Record)])
        if past is None:
            sys.stdout.flush()


def _live(address: Listen, path: str) -> Generator[bytes]:
    """The lines of an answer as they come, without end. Unanswered where none come any more."""
    connection = connection_to(address)
    try:
        with answering():
            connection.connect()
            sock = connection.sock
            connection.request("GET", path, headers={"accept": "application/x-ndjson"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise Unanswered(refusal(answer.status, answer.read(MAX_LINE_BYTES)))
            sock.settimeout(SILENCE_S)
        while True:
            try:
                line = answer.readline(MAX_LINE_BYTES)
            except TimeoutError as exc:
                raise Unanswered(f"nothing was heard for {SILENCE_S:g} s") from exc
            except (OSError, http.client.HTTPException) as exc:
                raise Unanswered("the sidecar has gone") from exc
            if not line:
                # Whether it ended its answer or was cut off between two lines is not told here.
                raise Unanswered("the sidecar has gone")
            if not line.endswith(b"\n"):
                raise Unanswered("what answers there is not the admin port of a sidecar")
            yield line
    finally:
        connection.close()


class _Table:
    """Rows that come one by one: the columns are as wide as the widest cell so far."""

    def __init__(self) -> None:
        self._widths = list(USUAL_WIDTHS)
        self._begun = False

    def print(self, records: Sequence[Record]) -> None:
        """The rows of these, under the head if they are the first; their notes are indented."""
        rows = [[printable(cell) or "-" for cell in _cells(one, one.key)] for one in records]
        if not self._begun:
            rows.insert(0, list(TAIL_HEAD))
        for row in rows:
            self._widths = [max(width, len(cell)) for width, cell in zip(self._widths, row, strict=True)]
        notes = [_notes(one) for one in records]
        if not self._begun:
            notes.insert(0, [])
        self._begun = True
        for row, under in zip(rows, notes, strict=True):
            print("  ".join(cell.ljust(width) for cell, width in zip(row, self._widths, strict=True)).rstrip())
            for note in under:
                print(f"    {printable(note)}")


_STATES: Final[Mapping[str, str]] = {"suspect": "suspect", "route": "route"}
"""What is told of a record that moves no breaker, in place of a state."""


def _cells(record: Record, place: str) -> tuple[str, ...]:
    if record.lost:
        return ("-", "-", "-", "lost", "-", "-", "-")
    state = _STATES.get(record.kind, record.state)
    return record.ts, place, f"{record.epoch}.{record.version}", state, record.by, record.why, record.trace


def _notes(record: Record) -> list[str]:
    """What stands under a row, in words."""
    if record.lost:
        return [f"{record.lost} records were not told: they came faster than they were taken"]
    notes = [f"evidence: {record.evidence}"] if record.evidence else []
    if record.kind == "suspect":
        notes.append("one sidecar's word, too little to open it for all: it stayed as it was")
    if record.held:
        notes.append(held_until(record.expires))
    elif record.wait_s and record.kind != "suspect":
        notes.append(f"waits {record.wait_s:g} s")
    return notes


def _nobody_reads() -> bool:
    """Whether the output goes to a pipe or a terminal that was closed: `tail | head` shall not wait for a record."""
    try:
        output = sys.stdout.fileno()
    except (OSError, ValueError):
        return False
    poll = select.poll()
    poll.register(output, 0)
    return bool(poll.poll(0))
