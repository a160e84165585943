"""`sidecar log replay`: what another policy would have made of what the log remembers.

The recording comes from a running sidecar, which reads it off the log, or from a file that an earlier call saved. It is
judged as it arrives, and never held whole. What came up to `LEAD_S` before the span is asked for, too: it only teaches,
as traffic would have.

1. A policy that is none, a recording that is none and a sidecar that does not answer are failures, each with its words.
2. What cannot be said is said last, and is part of the answer: a recording lacks what an open breaker kept away.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import IO, Final
from urllib.parse import urlencode

import msgspec

from sidecar.admin.words import parse_span
from sidecar.kernel.count import counted
from sidecar.operate import (
    FAILED,
    OK,
    Unanswered,
    admin_address,
    answering,
    connection_to,
    print_json,
    print_table,
    printable,
    refusal,
)
from sidecar.policy.errors import PolicyErrors
from sidecar.policy.schema import Snapshot
from sidecar.settings import Listen, UsageError
from sidecar.txlog.difference import KeyReport, Report, clock, span
from sidecar.txlog.recording import BadLine, Line, Seen, Span, read
from sidecar.txlog.replay import Disorder, Replay
from sidecar.watch import read_policy

LEAD_S: Final = 300.0
"""Enough answers for a detector to judge, mostly, and ten times what it takes to know an endpoint's own pace."""
LONG: Final = 20_000
"""Lines beyond which it takes more than a moment, and progress is told: some seconds."""
SILENCE_S: Final = 45.0
MAX_LINE_BYTES: Final = 4 << 20
"""A summary of 500 endpoints, at most some 300 KB; where this much comes without a line's end, nobody tells any."""
MOST_QUIET: Final = 20
"""Endpoints of which nothing is to be told, in the table: the rest are counted."""


class Unusable(Exception):
    """The recording cannot be used, in words."""


def replay(arguments: argparse.Namespace) -> int:
    """Run what `arguments` (from `sidecar.verbs`) ask for and print what came of it; the exit code."""
    since_s, until_s = _span("--since", arguments.since), _span("--until", arguments.until)
    if since_s is not None and until_s is not None and until_s >= since_s:
        raise UsageError("--until: it is as long ago as --since, or longer: the span would be empty")
    if arguments.file is not None and (arguments.admin is not None or arguments.save is not None):
        raise UsageError("--from reads a file: --admin and --save are for a running sidecar's log")
    try:
        snapshot = read_policy(Path(arguments.policy))
    except PolicyErrors as exc:
        print("\n".join(str(error) for error in exc.errors), file=sys.stderr)
        return FAILED
    names = [each.name for each in snapshot.services]
    service = arguments.service or ""
    if service and service not in names:
        raise UsageError(f'--service: "{service}" is not in {arguments.policy}: there are {", ".join(names) or "none"}')
    address = admin_address(arguments.admin, os.environ) if arguments.file is None else None
    source = str(address) if address is not None else arguments.file
    try:
        with contextlib.ExitStack() as stack:
            if address is not None:
                query = _query(since_s, until_s, service)
                lines: Iterator[bytes] = stack.enter_context(contextlib.closing(_asked(address, query)))
                if arguments.save is not None:
                    lines = _saved(lines, stack.enter_context(_file(Path(arguments.save))))
                report = _judged(snapshot, lines, service, since_s or 3600.0, until_s)
            else:
                report = _of_file(snapshot, Path(arguments.file), service, since_s, until_s)
    except KeyboardInterrupt:
        return FAILED
    except Unanswered as exc:
        print(f"sidecar: {source}: {exc}", file=sys.stderr)
        return FAILED
    except (Unusable, Disorder) as exc:
        print(f"sidecar: {source}: {printable(str(exc))}", file=sys.stderr)
        return FAILED
    except OSError as exc:
        print(f"sidecar: {exc.filename or source}: {exc.strerror or exc}", file=sys.stderr)
        return FAILED
    if arguments.json:
        print_json(msgspec.json.encode(report))
    else:
        _show(report, arguments.policy, source)
    return OK


def _span(flag: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return parse_span(text)
    except ValueError as exc:
        raise UsageError(f"{flag}: {exc}") from exc


# Where the lines come from.


def _query(since_s: float | None, until_s: float | None, service: str) -> str:
    asked = {"since": f"{round((since_s or 3600.0) + LEAD_S)}s"}
    if until_s is not None:
        asked["until"] = f"{round(until_s)}s"
    if service:
        asked["service"] = service
    return urlencode(asked)


def _asked(address: Listen, query: str) -> Generator[bytes]:
    """The recording of a running sidecar, line by line."""
    connection = connection_to(address)
    try:
        with answering():
            connection.connect()
            sock = connection.sock
            connection.request("GET", f"/log/evidence?{query}", headers={"accept": "application/x-ndjson"})
            # The first page is read off the log's server before the answer begins.
            sock.settimeout(SILENCE_S)
            answer = connection.getresponse()
            if answer.status != 200:
                raise Unanswered(refusal(answer.status, answer.read(MAX_LINE_BYTES)))
            line = last = b""
            while line := answer.readline(MAX_LINE_BYTES):
                yield line
                last = line
            # Whether an answer ended or was cut off is not told here: its last line tells.
            if last and not last.startswith(b'{"is":"end"'):
                raise Unanswered("what it told breaks off: the sidecar, or the log's server, has gone")
    finally:
        connection.close()


@contextlib.contextmanager
def _file(path: Path) -> Iterator[IO[bytes]]:
    """A file that is there once it is whole."""
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _saved(lines: Iterator[bytes], file: IO[bytes]) -> Iterator[bytes]:
    for line in lines:
        file.write(line)
        yield line


def _of_file(snapshot: Snapshot, path: Path, service: str, since_s: float | None, until_s: float | None) -> Report:
    """Of a file, spans are counted back from its own end."""
    end_ms = 0
    if since_s is not None or until_s is not None:
        with path.open("rb") as file:
            for line in _lines(file):
                end_ms = max(end_ms, line.until_ms if isinstance(line, Span) else getattr(line, "at_ms", 0))
    since_ms = None if since_s is None else end_ms - round(1000 * since_s)
    until_ms = None if until_s is None else end_ms - round(1000 * until_s)
    with path.open("rb") as file:
        return _fold(snapshot, file, service, since_ms, until_ms)


def _judged(snapshot: Snapshot, lines: Iterator[bytes], service: str, since_s: float, until_s: float | None) -> Report:
    """What a running sidecar told; its first line says which moments were meant."""
    first = next(lines, b"")
    if not first.startswith(b'{"is":"span"'):
        raise Unusable("what answers there is not the admin port of a sidecar that keeps a log")
    head = _line(first, 1)
    assert isinstance(head, Span)
    now_ms = head.until_ms + round(1000 * (until_s or 0.0))
    return _fold(snapshot, _again(first, lines), service, now_ms - round(1000 * since_s), None)


def _again(first: bytes, lines: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from lines


def _fold(
    snapshot: Snapshot, lines: Iterator[bytes], service: str, since_ms: int | None, until_ms: int | None
) -> Report:
    judge = Replay(snapshot, service)
    progress = _Progress()
    count = 0
    for line in _lines(lines):
        count += 1
        at_ms = getattr(line, "at_ms", 0)
        if until_ms is not None and at_ms > until_ms:
            continue
        if since_ms is not None and at_ms and at_ms < since_ms - 1000 * LEAD_S and isinstance(line, Seen):
            continue
        judge.take(line)
        progress.told(count, line)
    if not count:
        raise Unusable("there is nothing in it")
    return judge.report(since_ms, until_ms)


def _lines(lines: Iterator[bytes]) -> Iterator[Line]:
    for number, text in enumerate(lines, 1):
        if text.strip():
            if not text.endswith(b"\n"):
                return  # cut off in the middle; that the last line is missing is said by the replay
            yield _line(text, number)


def _line(text: bytes, number: int) -> Line:
    try:
        return read(text)
    except BadLine as exc:
        raise Unusable(f"line {number} is not of a recording: {exc}") from exc


class _Progress:
    """A line on standard error now and then, of a long recording."""

    __slots__ = ("_since_ms", "_told", "_until_ms")

    def __init__(self) -> None:
        self._since_ms = self._until_ms = 0
        self._told = 0

    def told(self, count: int, line: Line) -> None:
        """So many lines were read, this the last."""
        if isinstance(line, Span):
            self._since_ms, self._until_ms = line.since_ms, line.until_ms
        at_ms = getattr(line, "at_ms", 0)
        if count % LONG or not at_ms:
            return
        length = self._until_ms - self._since_ms
        share = f"{max(0, min(100, 100 * (at_ms - self._since_ms) // length))} %, " if length > 0 else ""
        print(f"sidecar log replay: {share}{count} lines, up to {clock(at_ms)}", file=sys.stderr, flush=True)


# What is printed.


def _show(report: Report, policy: str, source: str) -> None:
    print(
        f"policy {policy}; record {source}, {report.since} to {report.until}: {counted(report.attempts, 'attempt')}, "
        f"{counted(report.summaries, 'summary', 'summaries')} of {counted(len(report.observers), 'sidecar')}"
    )
    print()
    told = [key for key in report.keys if key.differences]
    quiet = [key for key in report.keys if not key.differences]
    if report.keys:
        rows = [_row(key) for key in (*told, *quiet[:MOST_QUIET])]
        heads = ("SCOPE", "KEY", "SERVICE", "ATTEMPTS", "FAILED", "TTFT_P50", "TTFT_P99", "OPENED", "WOULD", "SHED")
        print_table(heads, rows)
        if len(quiet) > MOST_QUIET:
            print(f"and {len(quiet) - MOST_QUIET} more that neither opened nor would have")
        print()
    for key in told:
        for difference in key.differences:
            print(printable(difference.words))
            episode = difference.replayed
            if episode is not None and episode.evidence:
                print(f"    evidence: {printable(episode.evidence)}")
    totals = report.totals
    print(
        f"{totals.recorded_openings} opened in the record, {totals.replayed_openings} with this file, {totals.same} of "
        f"them at the same time; {counted(totals.kept_away, 'request')} would have been shed ({totals.spared} of them "
        f"failed or were late, {totals.refused} had nowhere else to go)"
    )
    print()
    print("What cannot be said:")
    for words in report.unsaid:
        print(f"  - {printable(words)}")


def _row(key: KeyReport) -> tuple[str, ...]:
    replayed = [each.replayed for each in key.differences if each.replayed is not None]
    recorded = [each.recorded for each in key.differences if each.recorded is not None]
    first = ["" if seconds is None else f"{seconds:.3g}s" for seconds in (key.first_token_p50_s, key.first_token_p99_s)]
    return (
        key.scope,
        key.key,
        key.service,
        str(key.attempts),
        str(key.failed),
        *first,
        _opened(len(recorded), key.recorded_not_closed_s),
        _opened(len(replayed), key.replayed_not_closed_s),
        str(sum(each.kept_away for each in replayed)),
    )


def _opened(times: int, seconds: float) -> str:
    return f"{times}x {span(seconds)}".replace(" ", "_") if times else ""
