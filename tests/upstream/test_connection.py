"""One engine connection between a transport of no socket and a sink that writes down what it hears.

How answers look on the wire is in the conformance tests; that no cut changes anything is a fuzz test. Here: what is
delivered in which order, when a connection may be lent again, and that a sink which lets go hears nothing more.
"""

import pytest

from sidecar.kernel.exchange import ResponseHead
from sidecar.upstream.connection import EngineConnection
from sidecar.wire.headers import MAX_HEAD_BYTES
from tests.fuzz.test_http import Heard
from tests.proxy.bench import garbage_of
from tests.transport import FakeTransport

ASK = b"GET / HTTP/1.1\r\nhost: h\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\n"
ANSWER = OK + b"content-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"


class Line:
    """A connection, its transport, and where it went."""

    def __init__(self, *, head_only: bool = False, upgrade: bool = False, sink: Heard | None = None) -> None:
        self.pool: list[EngineConnection] = []
        self.gone: list[bool] = []
        self.connection = EngineConnection(self.pool.append, lambda connection, poisoned: self.gone.append(poisoned))
        self.transport = FakeTransport(self.connection)
        self.connection.connection_made(self.transport)
        self.sink = sink or Heard()
        self.connection.send(self.sink, ASK, b"", head_only=head_only, upgrade=upgrade)

    def hears(self, *parts: bytes) -> list[str]:
        """The kinds of events after these bytes."""
        for part in parts:
            self.connection.data_received(part)
        return self.kinds

    @property
    def kinds(self) -> list[str]:
        return [str(event[0]) for event in self.sink.events]

    @property
    def head(self) -> ResponseHead:
        head = next(event[1] for event in self.sink.events if event[0] == "head")
        assert isinstance(head, ResponseHead)
        return head

    @property
    def lent_again(self) -> bool:
        return bool(self.pool) and not self.transport.is_closing()


# --- what is sent -----------------------------------------------------------------------------------------------------


def test_a_request_goes_out_in_one_write_and_makes_the_connection_used() -> None:
    line = Line()
    assert line.transport.written == ASK
    assert line.connection.used and not line.connection.received
    line.hears(b"H")
    assert line.connection.received


@pytest.mark.parametrize(
    ("chunked", "trailers", "wire"),
    [
        (False, [], b"abcde"),
        (True, [], b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"),
        (True, [b"x-t: 1\r\n"], b"3\r\nabc\r\n2\r\nde\r\n0\r\nx-t: 1\r\n\r\n"),
    ],
    ids=["by length", "chunked", "trailers"],
)
def test_an_upload_is_framed_as_announced(chunked: bool, trailers: list[bytes], wire: bytes) -> None:
    line = Line()
    line.connection.open_upload(chunked=chunked)
    line.connection.upload(b"abc")
    line.connection.upload(b"de")
    line.connection.end_upload(trailers)
    assert line.transport.written == ASK + wire


def test_nothing_is_written_to_a_connection_that_is_gone() -> None:
    line = Line()
    line.connection.open_upload(chunked=True)
    line.transport.abort()
    line.connection.upload(b"abc")
    line.connection.end_upload([])
    line.connection.send_tunnel(b"x")
    line.connection.pause()
    assert line.transport.written == ASK and line.transport.reading


# --- what is heard ----------------------------------------------------------------------------------------------------

ORDER: list[tuple[str, list[bytes], list[str]]] = [
    ("whole", [ANSWER], ["head", "body", "end"]),
    ("head, then body", [ANSWER[:-2], b"{", b"}"], ["head", "body", "end"]),
    ("interim ones first", [b"HTTP/1.1 103 Early\r\n\r\n" * 2 + ANSWER],
     ["informational", "informational", "head", "body", "end"]),
    ("no body", [OK + b"content-length: 0\r\n\r\n"], ["head", "end"]),
    ("204", [b"HTTP/1.1 204 No Content\r\n\r\n"], ["head", "end"]),
    ("304 with a length", [b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n"], ["head", "end"]),
    ("chunked", [CHUNKED + b"2\r\n{}\r\n0\r\n\r\n"], ["head", "body", "end"]),
    ("framed by close", [OK + b"\r\nbody"], ["head", "body"]),
    ("no HTTP", [b"\x16\x03\x01"], ["bad"]),
    ("bad chunk", [CHUNKED + b"zz\r\n"], ["head", "bad"]),
    ("two framings", [OK + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n"], ["bad"]),
    ("another coding", [OK + b"transfer-encoding: gzip\r\n\r\n"], ["bad"]),
    ("gzip, chunked", [OK + b"transfer-encoding: gzip, chunked\r\n\r\n"], ["bad"]),
    ("101 nobody asked for", [b"HTTP/1.1 101 X\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n"], ["bad"]),
    ("status 600", [b"HTTP/1.1 600 X\r\n\r\n"], ["bad"]),
    ("HTTP/2", [b"HTTP/2.0 200 OK\r\n\r\n"], ["bad"]),
]  # fmt: skip


@pytest.mark.parametrize(("parts", "kinds"), [case[1:] for case in ORDER], ids=[case[0] for case in ORDER])
def test_answers_are_told_in_order_and_bad_ones_break_the_connection(parts: list[bytes], kinds: list[str]) -> None:
    line = Line()
    assert line.hears(*parts) == kinds
    assert line.transport.aborted is ("bad" in kinds)
    assert line.pool == [] or "end" in kinds


def test_a_head_is_read_once_and_passed_on_without_what_speaks_of_one_connection() -> None:
    line = Line()
    line.hears(
        b"HTTP/1.1 429 Slow Down\r\nContent-Type: Application/JSON; charset=x\r\nRetry-After: 3\r\n"
        b"retry-after-ms: 2500\r\nX-Case: \xe9\r\nConnection: x-hop\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\n"
        b"X-Request-Id: theirs\r\nX-Sidecar-Reason: forged\r\nContent-Encoding: identity\r\nContent-Length: 0\r\n\r\n"
    )
    head = line.head
    assert (head.status, head.phrase, head.content_type) == (429, b"Slow Down", b"application/json")
    assert head.content_length == 0 and not head.encoded
    assert head.retry_after == ((b"retry-after", b"3"), (b"retry-after-ms", b"2500"))
    assert head.lines == [
        b"Content-Type: Application/JSON; charset=x\r\n",
        b"Retry-After: 3\r\n",
        b"retry-after-ms: 2500\r\n",
        b"X-Case: \xe9\r\n",
        b"Content-Encoding: identity\r\n",
    ]


@pytest.mark.parametrize(("coding", "encoded"), [(b"gzip", True), (b"BR", True), (b"Identity", False), (b"", False)])
def test_a_compressed_body_is_told(coding: bytes, encoded: bool) -> None:
    line = Line()
    line.hears(OK + b"Content-Encoding: " + coding + b"\r\ncontent-length: 0\r\n\r\n")
    assert line.head.encoded is encoded


def test_trailers_that_frame_are_dropped() -> None:
    line = Line()
    line.hears(CHUNKED + b"0\r\nX-Sum: 1\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
    assert line.sink.events[-1] in (("end", [b"X-Sum: 1\r\n"]), ("bad",))


@pytest.mark.parametrize("step", [1, 4096, 1 << 20])
@pytest.mark.parametrize(
    "data",
    [
        OK + b"x-a: 0123456789\r\n" * (MAX_HEAD_BYTES // 15),
        OK + b"x-a: " + b"x" * (3 * MAX_HEAD_BYTES),
        b"HTTP/1.1 200 " + b"x" * (3 * MAX_HEAD_BYTES),
        CHUNKED + b"0\r\n" + b"x-t: 0123456789\r\n" * (MAX_HEAD_BYTES // 15),
    ],
    ids=["many headers", "one header", "phrase", "trailers"],
)
def test_heads_and_trailers_without_end_are_bad(data: bytes, step: int) -> None:
    line = Line()
    for at in range(0, len(data), step):
        if line.transport.is_closing():
            break
        line.connection.data_received(data[at : at + step])
    assert line.kinds[-1:] == ["bad"] and line.transport.aborted


# --- when it may be lent again ----------------------------------------------------------------------------------------

AGAIN: list[tuple[str, list[bytes], bool]] = [
    ("length", [ANSWER], True),
    ("chunked", [CHUNKED + b"0\r\n\r\n"], True),
    ("204", [b"HTTP/1.1 204 No Content\r\n\r\n"], True),
    ("connection: close", [OK + b"connection: close\r\ncontent-length: 0\r\n\r\n"], False),
    ("HTTP/1.0", [b"HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n"], False),
    ("1.0 keep-alive", [b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 0\r\n\r\n"], True),
    ("bytes behind it", [ANSWER + b"x"], False),
    ("an answer behind it", [ANSWER + ANSWER], False),
    ("bytes after it", [ANSWER, b"x"], False),
    ("a body beside 204", [b"HTTP/1.1 204 No Content\r\ncontent-length: 4\r\n\r\nevil"], False),
]


@pytest.mark.parametrize(("parts", "again"), [case[1:] for case in AGAIN], ids=[case[0] for case in AGAIN])
def test_only_a_connection_that_is_as_good_as_new_is_lent_again(parts: list[bytes], again: bool) -> None:
    line = Line()
    line.hears(*parts)
    assert line.kinds.count("end") == 1 and line.kinds.count("head") == 1
    assert line.lent_again is again
    assert line.transport.aborted is not again


@pytest.mark.parametrize(
    ("parts", "again"),
    [
        ([ANSWER[:-2]], True),
        ([ANSWER], False),
        ([CHUNKED], True),
        ([CHUNKED + b"4\r\n"], False),
        ([CHUNKED, b"4\r\nevil\r\n"], False),
        ([OK + b"connection: close\r\n\r\n"], False),
        ([OK + b"\r\n"], True),
        ([b"HTTP/1.1 103 Early\r\n\r\n" + ANSWER[:-2]], True),
    ],
    ids=["length", "body", "chunked", "a chunk's size", "a chunk", "close", "nothing said", "after 103"],
)
def test_an_answer_to_head_ends_with_its_head(parts: list[bytes], again: bool) -> None:
    line = Line(head_only=True)
    line.hears(*parts)
    assert line.kinds[-2:] == ["head", "end"]
    assert line.lent_again is again


def test_an_answer_to_head_poisons_no_later_one() -> None:
    line = Line(head_only=True)
    line.hears(ANSWER[:-2])
    second = Heard()
    line.pool.pop().send(second, ASK, b"", head_only=False, upgrade=False)
    line.connection.data_received(ANSWER)
    assert [event[0] for event in second.events] == ["head", "body", "end"]


def test_an_answer_before_the_upload_ended_costs_the_connection() -> None:
    line = Line()
    line.connection.open_upload(chunked=False)
    line.hears(ANSWER)
    assert line.kinds == ["head", "body", "end"]
    assert not line.lent_again and line.transport.aborted


def test_a_paused_connection_is_read_again_when_it_is_idle() -> None:
    line = Line()
    line.connection.pause()
    assert not line.transport.reading
    line.hears(ANSWER)
    assert line.lent_again and line.transport.reading


# --- how it ends ------------------------------------------------------------------------------------------------------

ENDS: list[tuple[str, list[bytes], Exception | None, list[str]]] = [
    ("before a byte", [], None, ["lost"]),
    ("in the head", [b"HTTP/1.1 2"], None, ["lost"]),
    ("in a body by length", [ANSWER[:-1]], None, ["head", "body", "lost"]),
    ("in a chunked body", [CHUNKED + b"1\r\nx\r\n"], None, ["head", "body", "lost"]),
    ("of a body framed by close", [OK + b"\r\nx"], None, ["head", "body", "end"]),
    ("by reset, of a body framed by close", [OK + b"\r\nx"], ConnectionResetError(), ["head", "body", "lost"]),
    ("after the answer", [ANSWER], None, ["head", "body", "end"]),
]


@pytest.mark.parametrize(("parts", "error", "kinds"), [case[1:] for case in ENDS], ids=[case[0] for case in ENDS])
def test_the_end_of_a_connection_is_told_by_where_it_came(
    parts: list[bytes], error: Exception | None, kinds: list[str]
) -> None:
    line = Line()
    line.hears(*parts)
    assert line.connection.eof_received() is False
    line.connection.connection_lost(error)
    assert line.kinds == kinds
    assert line.gone == [False]


def test_bytes_on_an_idle_connection_are_told_to_the_pool() -> None:
    line = Line()
    line.hears(ANSWER, b"HTTP/1.1 200 OK\r\n")
    line.connection.connection_lost(None)
    assert line.transport.aborted and line.gone == [True]


class LettingGo(Heard):
    """A sink that breaks the connection at an event."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at
        self.line: Line | None = None

    def _note(self, *event: object) -> None:
        super()._note(*event)
        if event[0] == self.at and self.line is not None:
            self.line.connection.abort()


@pytest.mark.parametrize(("at", "kinds"), [("head", ["head"]), ("body", ["head", "body"])])
def test_a_sink_that_lets_go_hears_nothing_more(at: str, kinds: list[str]) -> None:
    sink = LettingGo(at)
    line = Line(sink=sink)
    sink.line = line
    line.hears(ANSWER)
    line.connection.connection_lost(None)
    assert line.kinds == kinds
    assert line.pool == [] and line.transport.aborted


def test_a_paused_upload_is_told_and_an_idle_connection_tells_nobody() -> None:
    told: list[str] = []

    class Uploading(Heard):
        def on_upload_paused(self) -> None:
            told.append("paused")

        def on_upload_resumed(self) -> None:
            told.append("resumed")

    line = Line(sink=Uploading())
    line.connection.pause_writing()
    line.connection.resume_writing()
    line.hears(ANSWER)
    line.connection.pause_writing()
    assert told == ["paused", "resumed"]


# --- tunnels ----------------------------------------------------------------------------------------------------------

SWITCH = b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"


@pytest.mark.parametrize("parts", [[SWITCH + b"ab"], [SWITCH, b"ab"], [SWITCH[:20], SWITCH[20:] + b"a", b"b"]])
def test_a_tunnel_passes_what_follows_the_head_unread(parts: list[bytes]) -> None:
    line = Line(upgrade=True)
    line.hears(*parts)
    assert line.sink.events == [("tunnel", 101), ("body", b"ab")]
    line.connection.send_tunnel(b"up")
    assert line.transport.written == ASK + b"up"
    line.connection.connection_lost(None)
    assert line.kinds[-1] in ("lost", "end")


def test_an_upgrade_that_is_refused_is_an_answer() -> None:
    line = Line(upgrade=True)
    assert line.hears(ANSWER) == ["head", "body", "end"]
    assert line.lent_again


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [ANSWER, ANSWER[:-1], b"HTTP/1.1 103 X\r\n\r\n"], ids=["whole", "half", "interim"])
def test_a_connection_that_is_gone_needs_no_garbage_collector(data: bytes) -> None:
    def once() -> None:
        pool: list[EngineConnection] = []
        connection = EngineConnection(pool.append, lambda connection, poisoned: None)
        transport = FakeTransport(connection)
        connection.connection_made(transport)
        connection.send(Heard(), ASK, b"", head_only=False, upgrade=False)
        connection.data_received(data)
        connection.connection_lost(None)
        transport._protocol = None  # as event loops do
        pool.clear()

    assert garbage_of(once) == 0
