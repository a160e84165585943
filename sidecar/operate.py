"""The verbs that ask a running sidecar: one HTTP exchange with its admin port, then a table or its JSON.

Those about routing tables and canaries are in `sidecar.release`.

What a sidecar says holds what its clients said (session ids, models), so nothing is printed before what could move a
terminal's cursor is made visible.
"""

import argparse
import contextlib
import http.client
import math
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote, urlencode

import msgspec

from sidecar.admin.words import OPERATOR, parse_name, parse_span
from sidecar.kernel.count import counted
from sidecar.policy.schema import PlanDocument
from sidecar.settings import DEFAULT_ADMIN, Listen, UsageError, parse_listen

OK, FAILED = 0, 1

# The pages are answered from memory; a sidecar that takes longer is stuck, which is an answer too.
TIMEOUT_S = 5.0
# 100,000 sessions that once tripped are some 30 MB.
MAX_BODY_BYTES = 64 << 20
# Of what a command sends: a service's schema may be long.
MAX_FILE_BYTES = 64 << 20

_PAGES = {"status": "/healthz", "breakers": "/breakers", "admission": "/admission"}
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - replaced, not listened on


class Detector(msgspec.Struct, frozen=True):
    """The detector within a line of `GET /breakers`."""

    learning: bool = False
    answers: int = 0
    min_samples: int = 0
    overload: bool = False
    panic: bool = False


class Breaker(msgspec.Struct, frozen=True):
    """A line of `GET /breakers`."""

    scope: str
    key: str
    state: str
    service: str = ""
    since: str = ""
    why: str = ""
    evidence: str = ""
    by: str = ""
    held: bool = False
    until: str = ""
    observer: str = ""
    registered: str = ""
    detector: Detector | None = None


class AwayLine(msgspec.Struct, frozen=True):
    """Those that were turned away, within a class of `GET /admission`."""

    overloaded: int = 0
    queue_timeout: int = 0
    preempted: int = 0


class ClassLine(msgspec.Struct, frozen=True):
    """A class within a line of `GET /admission`."""

    name: str
    queued: int = 0
    running: int = 0
    longest_wait_s: float = 0.0
    sla_s: float | None = None
    warning: bool = False
    turns: int = 0
    turned_away: AwayLine = AwayLine()
    sla_met: int = 0
    sla_missed: int = 0


class LimitLine(msgspec.Struct, frozen=True):
    """An endpoint within a line of `GET /admission`."""

    endpoint: str
    limit: float | None = None
    in_flight: int = 0
    waiting: int = 0


class AdmissionLine(msgspec.Struct, frozen=True):
    """A line of `GET /admission`."""

    service: str
    mode: str
    running: int = 0
    classes: list[ClassLine] = []
    endpoints: list[LimitLine] = []


class Part(msgspec.Struct, frozen=True):
    """A part within `GET /healthz`."""

    ok: bool
    detail: str = ""


class Health(msgspec.Struct, frozen=True):
    """`GET /healthz`."""

    status: str
    reason: str = ""
    parts: dict[str, Part] = {}


class Drained(msgspec.Struct, frozen=True):
    """`GET /drained`."""

    drained: bool = False
    live: int = 0


class ErrorDetail(msgspec.Struct, frozen=True):
    """The inside of an error answer."""

    message: str = ""


class ErrorAnswer(msgspec.Struct, frozen=True):
    """What the admin port says when it refuses."""

    error: ErrorDetail


class Unanswered(Exception):
    """No sidecar answered, in words for who asked."""


def ask(arguments: argparse.Namespace) -> int:
    """Run the query that `arguments` name; the exit code. UsageError for a bad address."""
    address = admin_address(arguments.admin, os.environ)
    try:
        return _drain(address, arguments) if arguments.query == "drain" else _page(address, arguments)
    except (Unanswered, msgspec.DecodeError) as exc:
        return unanswered(address, exc)


def _page(address: Listen, arguments: argparse.Namespace) -> int:
    """One page, shown; an order is one, too."""
    method, path = "GET", _PAGES.get(arguments.query, "")
    if arguments.query == "status" and arguments.live:
        path = "/livez"
    if arguments.query == "override":
        method, path = "POST", _order(arguments)
    status, body = exchange(address, method, path)
    # /healthz says 503 and its page together; every other refusal is an error object.
    if status != 200 and not (status == 503 and arguments.query == "status"):
        raise Unanswered(refusal(status, body))
    if arguments.json:
        print_json(body)
    elif path == "/livez":
        print("live")
    else:
        _show(arguments.query, body)
    return OK if status == 200 else FAILED


def admin_address(flag: str | None, environ: Mapping[str, str]) -> Listen:
    """Where to ask: the flag, else the socket of `SIDECAR_OPERATORS`, which takes orders, too, else `SIDECAR_ADMIN`,
    else the default. UsageError where nobody can be asked."""
    operators = environ.get("SIDECAR_OPERATORS", "")
    if flag is None and operators.startswith("unix:"):
        return parse_listen(operators, "SIDECAR_OPERATORS")
    source = "--admin" if flag is not None else "SIDECAR_ADMIN"
    text = flag if flag is not None else environ.get(source) or DEFAULT_ADMIN
    if text == "off":
        raise UsageError(f"{source}: the admin port is off: there is nobody to ask")
    address = parse_listen(text, source)
    if not address.path and address.port == 0:
        raise UsageError(f"{source}: give the port that the sidecar told in its start line")
    return msgspec.structs.replace(address, host=_ANYWHERE.get(address.host, address.host))


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path
        self._timeout_s = timeout_s

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self._timeout_s)
        self.sock.connect(self._path)


def connection_to(address: Listen, timeout_s: float = TIMEOUT_S) -> http.client.HTTPConnection:
    """A connection that is not made yet; it waits so long for whatever is asked of it."""
    if address.path:
        return _UnixConnection(address.path, timeout_s)
    return http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Whatever goes wrong with a connection is Unanswered, in words."""
    try:
        yield
    except OSError as exc:
        raise Unanswered(f"no sidecar answers: {exc.strerror or exc}") from exc
    except http.client.HTTPException as exc:
        raise Unanswered("what answers there does not speak HTTP") from exc


def exchange(
    address: Listen, method: str, path: str, told: bytes | None = None, timeout_s: float = TIMEOUT_S
) -> tuple[int, bytes]:
    """Asks once, with `told` as JSON: the status and the body. Unanswered where there is none, or one too long."""
    connection = connection_to(address, timeout_s)
    try:
        with answering():
            connection.request(method, path, told, {"accept": "application/json", "content-type": "application/json"})
            answer = connection.getresponse()
            body = answer.read(MAX_BODY_BYTES + 1)
        if len(body) > MAX_BODY_BYTES:
            raise Unanswered(f"the answer is longer than {MAX_BODY_BYTES} bytes")
        return answer.status, body
    finally:
        connection.close()


def whole(address: Listen, method: str, path: str, told: bytes | None = None, *, expected: int = 200) -> bytes:
    """As `exchange`, the body alone. Unanswered, too, where the status is not the expected one."""
    status, body = exchange(address, method, path, told)
    if status != expected:
        raise Unanswered(refusal(status, body))
    return body


def unanswered(address: Listen, exc: Unanswered | msgspec.DecodeError) -> int:
    """Tells why there is no answer, or none that can be read; the exit code."""
    words = str(exc) if isinstance(exc, Unanswered) else "what answers there is not the admin port of a sidecar"
    print(f"sidecar: {address}: {words}", file=sys.stderr)
    return FAILED


def refusal(status: int, body: bytes) -> str:
    """A refusal in its own words, if it has any."""
    try:
        words = msgspec.json.decode(body, type=ErrorAnswer).error.message
    except msgspec.DecodeError:
        words = ""
    return f"refused with {status}: {printable(words)}" if words else f"refused with {status}"


def _drain(address: Listen, arguments: argparse.Namespace) -> int:
    """Has a sidecar drain, and waits until it has, or is gone. UsageError for a time that means nothing."""
    try:
        wait_s = parse_span(arguments.wait) if arguments.wait is not None else 0.0
    except ValueError as exc:
        raise UsageError(f"--wait: {exc}") from exc
    whole(address, "POST", "/drain", expected=202)
    drained = Drained()
    if wait_s:
        try:
            status, body = exchange(address, "GET", f"/drained?wait={wait_s:.3f}s", timeout_s=wait_s + TIMEOUT_S)
        except Unanswered as exc:
            if isinstance(exc.__cause__, TimeoutError):
                raise
            drained = Drained(drained=True)  # it said that it drains, and is gone
        else:
            if status != 200:
                raise Unanswered(refusal(status, body))
            drained = msgspec.json.decode(body, type=Drained)
    if arguments.json:
        print(msgspec.json.encode(drained).decode())
    elif not wait_s:
        print("draining")
    elif drained.drained:
        print("drained")
    else:
        print(f"{counted(drained.live, 'request')} {'is' if drained.live == 1 else 'are'} still under way")
    return OK if drained.drained or not wait_s else FAILED


def _order(arguments: argparse.Namespace) -> str:
    """The path of an order. UsageError for a name or a time that means nothing."""
    query = {"by": author(arguments.by)}
    if arguments.duration is not None:
        try:
            parse_span(arguments.duration)
        except ValueError as exc:
            raise UsageError(f"--for: {exc}") from exc
        query["for"] = arguments.duration
    return f"/breakers/{arguments.scope}/{quote(arguments.key, safe='')}/{arguments.action}?{urlencode(query)}"


def author(by: str | None) -> str:
    """Who orders something: `--by`, else who is at the prompt. UsageError for a name that is none."""
    if by is None:
        return login()
    try:
        return parse_name(by)
    except ValueError as exc:
        raise UsageError(f"--by: {exc}") from exc


def login() -> str:
    """Who is at the prompt, as the environment or the system calls him."""
    import getpass

    try:
        return parse_name(getpass.getuser())
    except (OSError, KeyError, ImportError, ValueError):
        return OPERATOR  # a user id without a name, as in many a container


def ratio_from(flag: str, text: str) -> float:
    """A weight as it is written; whether it is one is the sidecar's to say, but for what JSON cannot carry."""
    try:
        ratio = float(text)
    except ValueError:
        ratio = math.nan
    if not math.isfinite(ratio):
        raise UsageError(f'{flag}: "{text[:40]}" is not a number from 0 to 1')
    return ratio


def plan_from(file: str) -> PlanDocument:
    """A canary's plan: a file, or what stands at our input (`-`). UsageError."""
    from sidecar.policy.errors import PolicyErrors
    from sidecar.policy.plan import read_plan

    try:
        return read_plan(file, sys.stdin.buffer.read(MAX_FILE_BYTES) if file == "-" else read_file("--plan", file))
    except PolicyErrors as exc:
        raise UsageError(f"--plan: {exc}") from exc


def read_file(flag: str, file: str, most: int = MAX_FILE_BYTES) -> bytes:
    """A whole file of up to `most` bytes. UsageError."""
    try:
        with Path(file).open("rb") as stream:
            data = stream.read(most + 1)
    except OSError as exc:
        raise UsageError(f"{flag}: {file}: {exc.strerror or exc}") from exc
    if len(data) > most:
        raise UsageError(f"{flag}: {file} is longer than {most} bytes")
    return data


def _show(query: str, body: bytes) -> None:
    match query:
        case "status":
            _show_health(body)
        case "admission":
            _show_admission(body)
        case _:
            _show_breakers(body)


def _show_health(body: bytes) -> None:
    page = msgspec.json.decode(body, type=Health)
    print(printable(f"{page.status}: {page.reason}" if page.reason else page.status))
    rows = [(name, "ok" if part.ok else "not ok", part.detail) for name, part in page.parts.items()]
    print_table(("PART", "STATE", "DETAIL"), rows)


def _show_breakers(body: bytes) -> None:
    lines = msgspec.json.decode(body, type=list[Breaker])
    rows = [(line.scope, line.key, line.service, line.state, line.since, line.by, line.why) for line in lines]
    notes = [_notes(line) for line in lines]
    print_table(("SCOPE", "KEY", "SERVICE", "STATE", "SINCE", "BY", "WHY"), rows, notes)
    # What a detector is short of is its service's and the same on all of its endpoints.
    for service, detector in {line.service: line.detector for line in lines if line.detector is not None}.items():
        for words in _explained(detector):
            print(f"    service {printable(service)}: {words}")


def _show_admission(body: bytes) -> None:
    lines = msgspec.json.decode(body, type=list[AdmissionLine])
    head = ("SERVICE", "MODE", "CLASS", "WAIT", "RUN", "LONGEST", "SLA", "MET", "MISSED", "TURNS", "AWAY")
    rows: list[tuple[str, ...]] = []
    notes: list[list[str]] = []
    for line in lines:
        for each in line.classes:
            rows.append((line.service, line.mode, each.name, str(each.queued), str(each.running), *_waited(each)))
            notes.append(_noted(each))
        if not line.classes:
            rows.append((line.service, line.mode, "", "", str(line.running), *([""] * 6)))
            notes.append([])
    print_table(head, rows, notes)
    print()
    print_table(
        ("SERVICE", "ENDPOINT", "LIMIT", "RUN", "ITS QUEUE"),
        [
            (line.service, each.endpoint, "" if each.limit is None else f"{each.limit:g}", *_load(each))
            for line in lines
            for each in line.endpoints
        ],
    )


def _waited(line: ClassLine) -> tuple[str, ...]:
    away = line.turned_away
    return (
        f"{line.longest_wait_s:.1f}s" if line.queued else "",
        "" if line.sla_s is None else f"{line.sla_s:g}s",
        str(line.sla_met),
        str(line.sla_missed),
        str(line.turns),
        str(away.overloaded + away.queue_timeout + away.preempted),
    )


def _noted(line: ClassLine) -> list[str]:
    told = [f"{count} {reason}" for reason, count in msgspec.structs.asdict(line.turned_away).items() if count]
    notes = ["about to break its SLA: preemptible classes make room"] if line.warning else []
    return [*notes, f"turned away: {', '.join(told)}"] if told else notes


def _load(line: LimitLine) -> tuple[str, str]:
    return str(line.in_flight), str(line.waiting)


def _notes(line: Breaker) -> list[str]:
    notes = [f"evidence: {line.evidence}"] if line.evidence else []
    if line.held:
        notes.append(held_until(line.until))
    if line.observer:
        notes.append(f"said by {line.observer}, version {line.registered} of the log")
    return notes


def held_until(until: str) -> str:
    """When an order ends, in words; `until` empty: it has no end of its own."""
    return f"held until {until or 'the next order'}"


def _explained(detector: Detector) -> list[str]:
    """What keeps a detector from judging as it would, in words; nothing, mostly."""
    words = []
    if detector.learning:
        words.append(f"learning: {detector.answers} of {detector.min_samples} answers; the fixed rules judge alone")
    if detector.panic:
        words.append("panic: most answers fail everywhere; no breaker opens")
    elif detector.overload:
        words.append("overload: slowness is no evidence now, only errors are")
    return words


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[Sequence[str]] = ()) -> None:
    """Columns as wide as their widest cell; an empty cell is a dash, so that `awk` can count columns.

    `notes` are further lines under each row, indented, so that `grep -v '^ '` leaves the rows; none: no further lines.
    """
    table = [list(head), *([printable(cell) or "-" for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    for row, under in zip(table, [(), *(notes or [()] * len(rows))], strict=True):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        for note in under:
            print(f"    {printable(note)}")


def print_json(page: bytes) -> None:
    """JSON, laid out so that it can be read."""
    print(msgspec.json.format(page, indent=2).decode())


def printable(text: str) -> str:
    """`text` with everything escaped that a terminal would act on."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
