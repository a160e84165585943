"""Whatever a peer sends, both HTTP parsers read it the same however it is cut, and raise nothing.

What our request parser takes is compared with a second, strict reading of the same bytes, written from RFC 9112 and not
from the parser: it may take less, never more, and never otherwise.
"""

import re
from collections.abc import Sequence
from itertools import cycle

from hypothesis import example, given, settings
from hypothesis import strategies as st

from sidecar.downstream.parser import Refused, RequestParser
from sidecar.kernel.errors import STATUS, Reason
from sidecar.kernel.exchange import ResponseHead
from sidecar.proxy.ports import Link
from sidecar.proxy.request import Request
from sidecar.upstream.connection import EngineConnection
from tests.facts import facts
from tests.transport import FakeTransport

FUZZ = settings(max_examples=300, deadline=None)

BODY_LIMIT = 2000

# --- what is sent -----------------------------------------------------------------------------------------------------

TARGETS = st.sampled_from([b"/", b"/x?q=1", b"/v1/chat/completions", b"*", b"http://h/y", b"/a%00b"])
METHODS = st.sampled_from([b"GET", b"POST", b"PUT", b"HEAD", b"DELETE", b"OPTIONS", b"PATCH"])
FIELDS = st.sampled_from(
    [
        *(b"Host: h", b"Accept: */*", b"X-A: \xff\tb", b"Connection: close", b"Connection: keep-alive"),
        *(b"Connection: upgrade", b"Upgrade: websocket", b"Upgrade: h2c", b"Expect: 100-continue", b"X-Empty:"),
    ]
)
BODIES = st.binary(max_size=12) | st.sampled_from([b"0\r\n\r\n", b"GET /evil HTTP/1.1\r\nHost: h\r\n\r\n", b"\r\n"])


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """One good request."""
    lines = [b"%b %b HTTP/1.1" % (draw(METHODS), draw(TARGETS)), b"Host: h", *draw(st.lists(FIELDS, max_size=2))]
    body = draw(BODIES)
    match draw(st.sampled_from(["none", "length", "chunked", "trailers"])):
        case "length":
            lines.append(b"Content-Length: %d" % len(body))
        case "chunked" | "trailers" as framing:
            lines.append(b"Transfer-Encoding: chunked")
            trailers = b"X-T: 1\r\n" if framing == "trailers" else b""
            body = (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + b"0\r\n" + trailers + b"\r\n"
        case _:
            body = b""
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


NOISE = st.sampled_from(
    [
        *(b"\r", b"\n", b"\r\n", b"\r\n\r\n", b"\0", b" ", b"\t", b":", b";", b",", b"0", b"\xff", b"\x7f", b"-", b"+"),
        *(b"Content-Length: 5\r\n", b"Content-Length: 0\r\n", b"Transfer-Encoding: chunked\r\n", b"0\r\n\r\n"),
        *(
            b"Transfer-Encoding : chunked\r\n",
            b"Transfer-Encoding: gzip, chunked\r\n",
            b"Host: other\r\n",
            b"5;x=y\r\n",
        ),
        *(b"Host: other\r\n", b"Transfer-Encoding:\x0bchunked\r\n", b" folded\r\n", b"GET /evil HTTP/1.1\r\n"),
        *(b"HTTP/1.0", b"HTTP/2.0"),
    ]
)


@st.composite
def mutants(draw: st.DrawFn, good: st.SearchStrategy[bytes], count: int = 3) -> bytes:
    """Good messages in a row, with a few bytes put in, taken out or replaced."""
    data = b"".join(draw(st.lists(good, min_size=1, max_size=3)))
    for _ in range(draw(st.integers(0, count))):
        at = draw(st.integers(0, len(data)))
        cut = draw(st.integers(0, 3))
        data = data[:at] + draw(NOISE | st.just(b"")) + data[at + cut :]
    return data


CUTS = st.lists(st.integers(1, 30), min_size=1, max_size=4) | st.just([1])
"""Sizes of reads, again and again; `[1]` is byte by byte."""


def pieces(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    """`data` in parts of these sizes."""
    parts = []
    sizes = cycle(cuts)
    while data:
        size = next(sizes)
        parts.append(data[:size])
        data = data[size:]
    return parts


# --- requests ---------------------------------------------------------------------------------------------------------

Reading = tuple[list[tuple[object, ...]], Reason | None, bytes | None]


def read(parts: Sequence[bytes], limit: int = BODY_LIMIT) -> Reading:
    """What the parser makes of it: requests, why it stopped, what it leaves to a tunnel."""
    parser = RequestParser(lambda: limit, False)
    reason = None
    for part in parts:
        try:
            parser.feed(part)
        except Refused as refused:
            reason = refused.refusal.reason
            assert STATUS[reason] in (400, 413, 431)
            assert refused.refusal.message
            break
    return [summary(request) for request in parser.requests], reason, parser.tunnel


def summary(request: Request) -> tuple[object, ...]:
    body = request.body if request.held else b"".join(request.pieces)
    framing = (request.chunked, request.content_length, request.keep_alive, request.upgrade, request.expect_continue)
    # Of trailers, those are known that are followed by something; nobody is told before the end.
    trailers = request.trailers if request.complete else []
    return (request.method, request.target, request.complete, body, request.lines, trailers, *framing)


class Strict:
    """RFC 9112 to the letter, with what a recipient may forgive: empty lines before a request line."""

    LINE = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+) +([!-~]+) +(?:HTTP|RTSP|ICE)/1\.([01])")
    FIELD = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([\t -~\x80-\xff]*?)[ \t]*")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def read(self) -> list[tuple[bytes, bytes, bytes]]:
        """Whole requests, as (method, target, body), up to the first fault or the end."""
        found = []
        try:
            while True:
                method, target, body, last = self._request()
                found.append((method, target, body))
                if last:
                    break
        except ValueError:
            pass
        return found

    def _line(self) -> bytes:
        end = self._data.index(b"\r\n", self._at)
        line = self._data[self._at : end]
        if b"\n" in line or b"\r" in line or b"\0" in line:
            raise ValueError("bare line end")
        self._at = end + 2
        return line

    def _take(self, size: int) -> bytes:
        data = self._data[self._at : self._at + size]
        if len(data) < size:
            raise ValueError("not whole")
        self._at += size
        return data

    def _request(self) -> tuple[bytes, bytes, bytes, bool]:
        while self._data[self._at : self._at + 1] in (b"\r", b"\n"):
            self._at += 1
        line = self.LINE.fullmatch(self._line())
        if line is None:
            raise ValueError("no request line")
        fields = self._fields()
        hosts = [value for name, value in fields if name == b"host"]
        if len(hosts) != 1 and line[3] == b"1":
            raise ValueError("not one Host")
        lengths = [value for name, value in fields if name == b"content-length"]
        codings = [value.lower() for name, value in fields if name == b"transfer-encoding"]
        if (lengths and codings) or len(lengths) > 1 or len(codings) > 1:
            raise ValueError("two framings")
        body = b""
        if codings:
            if codings != [b"chunked"]:
                raise ValueError("not chunked")
            body = self._chunks()
        elif lengths:
            if not lengths[0].isdigit():
                raise ValueError("not a length")
            body = self._take(int(lengths[0]))
        named = b",".join(value.lower() for name, value in fields if name == b"connection")
        tokens = {token.strip(b" \t") for token in named.split(b",")}
        last = b"close" in tokens or (line[3] == b"0" and b"keep-alive" not in tokens)
        return line[1], line[2], body, last

    def _fields(self) -> list[tuple[bytes, bytes]]:
        fields = []
        while line := self._line():
            field = self.FIELD.fullmatch(line)
            if field is None:
                raise ValueError("no field")
            fields.append((field[1].lower(), field[2]))
        return fields

    def _chunks(self) -> bytes:
        body = b""
        while True:
            size, _, _ = self._line().partition(b";")
            if re.fullmatch(rb"[0-9a-fA-F]+[ \t]*", size) is None:
                raise ValueError("no chunk size")
            count = int(size, 16)
            if not count:
                self._fields()
                return body
            body += self._take(count)
            if self._take(2) != b"\r\n":
                raise ValueError("no end of chunk")


def check_against_strict(data: bytes) -> None:
    taken, _, tunnel = read([data])
    whole = [(method, target, body) for method, target, complete, body, *_ in taken if complete]
    wanted = Strict(data).read()
    # An absolute target is made relative; the strict reading keeps it.
    shown = [(method, target.removeprefix(b"http://h") or b"/", body) for method, target, body in wanted]
    if tunnel is not None:
        shown = shown[: len(whole)]
    assert whole == shown[: len(whole)], (whole, shown)


@FUZZ
@given(st.binary(max_size=200), CUTS)
@example(b"\r\n" * 20 + b"GET / HTTP/1.1\r\nHost: h\r\n\r\n", [1])
def test_any_bytes_are_read_alike_however_they_are_cut(data: bytes, cuts: list[int]) -> None:
    assert read(pieces(data, cuts)) == read([data])
    check_against_strict(data)


@FUZZ
@given(mutants(requests(), 0), CUTS)
def test_good_requests_are_all_read_however_they_are_cut(data: bytes, cuts: list[int]) -> None:
    assert read(pieces(data, cuts)) == read([data])
    check_against_strict(data)


@settings(max_examples=600, deadline=None)
@given(mutants(requests()), CUTS)
@example(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /", [1])
@example(b"POST /x HTTP/1.1\r\nHost: h\r\nUpgrade: h2c\r\nConnection: upgrade\r\nContent-Length: 3\r\n\r\nabc", [80, 1])
def test_damaged_requests_are_refused_or_read_alike_and_as_a_strict_reader_would(data: bytes, cuts: list[int]) -> None:
    assert read(pieces(data, cuts)) == read([data])
    check_against_strict(data)


@FUZZ
@given(st.integers(0, 4000), CUTS)
def test_a_body_above_the_limit_is_refused_and_one_below_is_not(size: int, cuts: list[int]) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\n"
    by_length = head + b"Content-Length: %d\r\n\r\n" % size + b"x" * size
    chunks = (b"%x\r\n" % size + b"x" * size + b"\r\n") if size else b""
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    for data in (by_length, chunked):
        _, reason, _ = read(pieces(data, cuts))
        assert reason is (Reason.TOO_LARGE if size > BODY_LIMIT else None)


# --- answers ----------------------------------------------------------------------------------------------------------

STATUS_LINES = st.sampled_from(
    [b"200 OK", b"404 Not Found", b"204 No Content", b"304 Not Modified", b"500 ", b"429 Slow"]
)
ANSWER_FIELDS = st.sampled_from(
    [
        *(b"Content-Type: application/json", b"X-B: \xe9", b"Connection: close", b"Connection: x-b", b"Retry-After: 3"),
        *(b"Content-Encoding: gzip", b"Keep-Alive: timeout=5", b"Server: u"),
    ]
)


@st.composite
def answers(draw: st.DrawFn) -> bytes:
    """One good answer, perhaps after interim ones."""
    interim = draw(
        st.sampled_from([b"", b"", b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"])
    )
    lines = [b"HTTP/1.1 " + draw(STATUS_LINES), *draw(st.lists(ANSWER_FIELDS, max_size=2))]
    body = draw(BODIES)
    match draw(st.sampled_from(["length", "chunked", "trailers", "close"])):
        case "length":
            lines.append(b"Content-Length: %d" % len(body))
        case "chunked" | "trailers" as framing:
            lines.append(b"Transfer-Encoding: chunked")
            trailers = b"X-T: 1\r\n" if framing == "trailers" else b""
            body = (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + b"0\r\n" + trailers + b"\r\n"
    return interim + b"\r\n".join(lines) + b"\r\n\r\n" + body


class Heard:
    """A sink that writes down what it hears; bodies are joined."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []
        self.over = False

    def _note(self, *event: object) -> None:
        assert not self.over, f"{event} after the end"
        self.events.append(event)

    def on_connected(self, link: Link) -> None:
        raise AssertionError("not of a connection")

    def on_connect_failed(self, detail: str) -> None:
        raise AssertionError("not of a connection")

    def on_informational(self, head: ResponseHead) -> None:
        self._note("informational", head.status, head.lines)

    def on_head(self, head: ResponseHead) -> None:
        self._note("head", head)

    def on_body(self, data: bytes) -> None:
        assert data
        if self.events and self.events[-1][0] == "body":
            self.events[-1] = ("body", bytes(self.events[-1][1]) + data)  # type: ignore[call-overload]
        else:
            self._note("body", data)

    def on_end(self, trailers: list[bytes]) -> bool:
        self._note("end", trailers)
        self.over = True
        return True

    def on_released(self) -> None: ...

    def on_lost(self) -> None:
        self._note("lost")
        self.over = True

    def on_bad_bytes(self, detail: str) -> None:
        assert detail
        self._note("bad")
        self.over = True

    def on_tunnel(self, head: ResponseHead, data: bytes) -> None:
        self._note("tunnel", head.status)
        if data:
            self.on_tunnel_data(data)

    def on_tunnel_data(self, data: bytes) -> None:
        self.on_body(data)

    def on_upload_paused(self) -> None: ...

    def on_upload_resumed(self) -> None: ...


GOOD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


def hear(parts: Sequence[bytes], *, head_only: bool, upgrade: bool) -> tuple[list[tuple[object, ...]], bool]:
    """What a sink hears of an engine that says this and leaves, and whether the connection was lent again before.

    A connection in the pool must be as good as new: the next answer on it is its own.
    """
    pool: list[EngineConnection] = []
    gone: list[bool] = []

    def on_gone(connection: EngineConnection, poisoned: bool) -> None:
        gone.append(poisoned)
        if connection in pool:
            pool.remove(connection)

    connection = EngineConnection(pool.append, on_gone)
    transport = FakeTransport(connection)
    connection.connection_made(transport)
    sink = Heard()
    connection.send(sink, b"GET / HTTP/1.1\r\n\r\n", b"", head_only=head_only, upgrade=upgrade)
    for part in parts:
        if transport.is_closing():
            break
        connection.data_received(part)
    reusable = bool(pool) and not transport.is_closing()
    if reusable:
        second = Heard()
        pool.pop().send(second, b"GET / HTTP/1.1\r\n\r\n", b"", head_only=False, upgrade=False)
        connection.data_received(GOOD)
        assert [event[0] for event in second.events] == ["head", "body", "end"]
        assert second.events[1] == ("body", b"ok")
        transport.abort()
    connection.connection_lost(None)
    assert len(gone) == 1 and not pool
    assert sink.over, "nobody was told of the end"
    # Heads as tuples: they are compared.
    told = [tuple(facts(part) if isinstance(part, ResponseHead) else part for part in event) for event in sink.events]
    return told, reusable


KINDS = st.sampled_from([(False, False), (True, False), (False, True)])


def check_answers(data: bytes, cuts: list[int], kind: tuple[bool, bool]) -> None:
    head_only, upgrade = kind
    whole, whole_reusable = hear([data], head_only=head_only, upgrade=upgrade)
    cut, cut_reusable = hear(pieces(data, cuts), head_only=head_only, upgrade=upgrade)
    assert cut == whole
    # Line ends after an answer are forgiven within a read; on their own they cost the connection.
    assert cut_reusable == whole_reusable or (whole_reusable and data[-1:] in b"\r\n")


@FUZZ
@given(st.binary(max_size=200), CUTS, KINDS)
def test_any_bytes_of_an_engine_are_heard_alike_and_raise_nothing(
    data: bytes, cuts: list[int], kind: tuple[bool, bool]
) -> None:
    check_answers(data, cuts, kind)


@FUZZ
@given(answers(), CUTS, KINDS)
def test_good_answers_are_heard_alike_however_they_are_cut(
    data: bytes, cuts: list[int], kind: tuple[bool, bool]
) -> None:
    check_answers(data, cuts, kind)


@settings(max_examples=600, deadline=None)
@given(mutants(answers()), CUTS, KINDS)
@example(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", [1], (False, False))
@example(b"HTTP/1.1 101 X\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\nbytes", [60, 3], (False, True))
def test_damaged_answers_are_heard_alike_and_never_lent_again(
    data: bytes, cuts: list[int], kind: tuple[bool, bool]
) -> None:
    check_answers(data, cuts, kind)


def test_the_strict_reading_reads_what_it_should() -> None:
    chunked = b"POST /b HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"
    data = b"\r\nGET /a HTTP/1.1\r\nHost: h\r\n\r\n" + chunked
    assert Strict(data).read() == [(b"GET", b"/a", b""), (b"POST", b"/b", b"ab")]
    assert Strict(data.replace(b"\r\nHost", b"\nHost")).read() == []
