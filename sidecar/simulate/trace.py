"""Recorded traffic: who came when, with how many tokens; in our own form and in those of two public traces.

A trace is read twice, once to be judged and once to be played: a fault in its last line is told before anything was
simulated, and a trace of millions of requests is never in memory. All faults of a file are told together, up to
`MAX_FAULTS`, each with its line.

Decided here:
1. Time is counted from the first request. A trace that goes back in time is at fault: sorting it would need all of it.
2. A row without an answer (no token generated) is left out and counted: both public traces hold failed requests so, and
   what an engine would have made of them is not in the trace.
3. Columns are found by name, in any order; columns that are not named here are not read.
"""

import csv
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Final, Literal, TextIO, get_args
from zlib import crc32

import msgspec

from sidecar.simulate.profile import Profile
from sidecar.simulate.workload import Arrival, rng_of

MAX_FAULTS: Final = 20
MOST_TOKENS: Final = 100_000_000
"""No model reads or writes so many; what is more is another column."""
MAX_SESSION: Final = 256
LONGEST_DAYS: Final = 400
"""BurstGPT is 121 days. What is longer has its time in milliseconds, or counts from another year in one line."""
MOST_S: Final = 1e12

_DAY_S: Final = 86_400.0

Form = Literal["jsonl", "azure", "burstgpt"]
FORMS: Final[tuple[Form, ...]] = get_args(Form)


class TraceError(Exception):
    """What is wrong with a trace, one fault per line of text."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


class Row(msgspec.Struct, frozen=True, gc=False):
    """One request. `at` is seconds, from wherever the trace counts. `session` "": none is known."""

    at: float
    prompt_tokens: int
    output_tokens: int
    session: str = ""


class Extent(msgspec.Struct, frozen=True):
    """What a trace holds. `begin` and `end` are its first and last moment, as it counts."""

    requests: int
    left_out: int
    begin: float
    end: float


class Trace:
    """A file in one of the forms; at most its first `limit` requests, 0 for all."""

    __slots__ = ("_form", "_limit", "_path", "extent")

    def __init__(self, path: Path, form: Form, limit: int = 0) -> None:
        """Reads all of it once. TraceError with everything that is wrong."""
        self._path = path
        self._form = form
        self._limit = limit
        self.extent = self._judge()

    def rows(self) -> Iterator[Row]:
        """The requests that have an answer."""
        played = (row for row in self._read() if isinstance(row, Row) and row.output_tokens)
        return islice(played, self._limit or None)

    def arrivals(self, profile: Profile, pods: int, scale: float, seed: int) -> Iterator[Arrival]:
        """The requests as they come, `scale` times as many a second; a random balancer's choice among `pods` for each.

        All requests of a session have the same engine there, as a session has that lives on one.
        """
        rng = rng_of(seed, "trace")
        begin = self.extent.begin
        for number, row in enumerate(self.rows(), 1):
            at, prompt, session = (row.at - begin) / scale, max(1, row.prompt_tokens), row.session
            pod = int(rng.random() * pods)
            if session:
                pod = crc32(session.encode("utf-8", "replace")) % pods
            arrival = Arrival(number, at, prompt, row.output_tokens, session or None, pod)
            arrival.draw(rng, profile)
            yield arrival

    def _judge(self) -> Extent:
        faults: list[str] = []
        requests = left_out = 0
        begin = end = 0.0
        try:
            for row in self._read():
                if isinstance(row, str):
                    faults.append(row)
                    if len(faults) == MAX_FAULTS:
                        faults.append(f"{self._path}: more faults are not told")
                        break
                elif not row.output_tokens:
                    left_out += 1
                else:
                    begin = begin if requests else row.at
                    end = row.at
                    requests += 1
                    if requests == self._limit:
                        break
        except OSError as exc:
            raise TraceError([f"{self._path}: {exc.strerror or exc}"]) from exc
        except UnicodeDecodeError as exc:
            raise TraceError([*faults, f"{self._path}: not UTF-8 text: {exc.reason}"]) from exc
        if end - begin > LONGEST_DAYS * _DAY_S:
            faults.append(f"{self._path}: spans {(end - begin) / _DAY_S:.0f} days: is its time in seconds?")
        if not faults and not requests:
            faults.append(f"{self._path}: holds no request that was answered")
        if faults:
            raise TraceError(faults)
        return Extent(requests, left_out, begin, end)

    def _read(self) -> Iterator[Row | str]:
        """Each line: what it says, or what is wrong with it."""
        with self._path.open(encoding="utf-8-sig", newline="") as file:
            last = -float("inf")
            for line, row in _lines(file, self._form):
                if isinstance(row, Row) and row.at < last:
                    row = f"goes back in time, from {last:g} to {row.at:g} s: sort the trace by arrival"
                if isinstance(row, str):
                    yield f"{self._path}:{line}: {row}"
                else:
                    last = row.at
                    yield row


class _Line(msgspec.Struct, frozen=True):
    """A line of our own form."""

    arrival: float
    prompt_tokens: int
    output_tokens: int
    session: str | None = None


_decode_line = msgspec.json.Decoder(_Line).decode


def _lines(file: TextIO, form: Form) -> Iterator[tuple[int, Row | str]]:
    if form == "jsonl":
        for number, line in enumerate(file, 1):
            if not line.isspace():
                yield number, _row_of_json(line)
        return
    columns = _COLUMNS[form]
    reader = csv.reader(file)
    try:
        head = [name.strip() for name in next(reader, [])]
        missing = [name for name in columns.names if name not in head]
        if missing:
            yield 1, f"no column {_quoted(missing)}: the columns are {_quoted(head)}"
            return
        places = [head.index(name) for name in columns.names]
        session = head.index(columns.session) if columns.session in head else -1
        for cells in reader:
            if cells:
                yield reader.line_num, _row_of_cells(cells, places, session, columns, len(head))
    except csv.Error as exc:
        yield reader.line_num, f"not CSV: {exc}"


def _row_of_json(line: str) -> Row | str:
    try:
        said = _decode_line(line)
    except msgspec.ValidationError as exc:
        return str(exc)
    except (msgspec.DecodeError, UnicodeEncodeError) as exc:
        return f"not JSON: {str(exc).removeprefix('JSON is malformed: ')}"
    session = said.session or ""
    if len(session) > MAX_SESSION:
        return f"session: longer than {MAX_SESSION} characters"
    return _row(said.arrival, said.prompt_tokens, said.output_tokens, session, "prompt_tokens", "output_tokens")


class _Columns(msgspec.Struct, frozen=True):
    """A form of CSV: its columns (time, prompt, output), the column that may name a session, how to read a time."""

    names: tuple[str, str, str]
    session: str
    time: Callable[[str], float]


def _row_of_cells(cells: list[str], places: list[int], session: int, columns: _Columns, width: int) -> Row | str:
    if len(cells) != width:
        return f"{len(cells)} cells under {width} columns"
    at_name, prompt_name, output_name = columns.names
    at_cell, prompt_cell, output_cell = (cells[place].strip() for place in places)
    try:
        at = columns.time(at_cell)
    except (ValueError, OverflowError):
        return f'{at_name}: "{at_cell[:40]}" is not a time'
    prompt, output = _count(prompt_cell), _count(output_cell)
    if prompt is None:
        return f'{prompt_name}: "{prompt_cell[:40]}" is not a number of tokens'
    if output is None:
        return f'{output_name}: "{output_cell[:40]}" is not a number of tokens'
    named = cells[session].strip()[:MAX_SESSION] if session >= 0 else ""
    return _row(at, prompt, output, named, prompt_name, output_name)


def _row(at: float, prompt: int, output: int, session: str, prompt_name: str, output_name: str) -> Row | str:
    if not -MOST_S < at < MOST_S:
        return f"{at:g} is not a time"
    for name, count in ((prompt_name, prompt), (output_name, output)):
        if not 0 <= count <= MOST_TOKENS:
            return f"{name}: {count} is not from 0 to {MOST_TOKENS}"
    return Row(at, prompt, output, session)


def _count(cell: str) -> int | None:
    """Whole numbers, also as tables write them that had a gap somewhere (`12.0`)."""
    digits = cell.removesuffix(".0")
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 16 else None


def _moment(cell: str) -> float:
    """Unix seconds of a date and time; without a zone they are taken for UTC."""
    moment = datetime.fromisoformat(cell)
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


def _quoted(names: list[str]) -> str:
    return ", ".join(json.dumps(name) for name in names)


_COLUMNS: Final = {
    "azure": _Columns(("TIMESTAMP", "ContextTokens", "GeneratedTokens"), "", _moment),
    "burstgpt": _Columns(("Timestamp", "Request tokens", "Response tokens"), "Session ID", float),
}
