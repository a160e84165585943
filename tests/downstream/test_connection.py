"""One client connection between a transport of no socket and the real pipeline, on a virtual clock.

What a client sees over sockets is in the conformance tests; here is what they cannot see or wait for: deadlines to the
second, back-pressure before a request, what is read ahead, and that nothing is left.
"""

import asyncio
import re
from collections.abc import Callable
from typing import cast

import pytest

from sidecar.downstream.connection import ClientConnection
from sidecar.kernel.errors import Reason
from sidecar.kernel.outcome import Ending, Result
from sidecar.policy.schema import Service
from sidecar.proxy.attempt import HELD_BYTES
from sidecar.proxy.watchdog import GRACE_S
from tests.clock import Clock
from tests.harness import request
from tests.proxy.bench import TOTAL_S, Bench, garbage_of, service
from tests.proxy.fakes import JSON, FakeLink, head_of
from tests.transport import HIGH_WATER_BYTES, FakeTransport
from tests.under_test import COMPLETION, DONE, FINISH, ROLE, chat, token

IDLE_S = 60.0
AHEAD_BYTES = 256 * 1024


class Desk:
    """One connected client and everything behind it."""

    def __init__(self, *services: Service, limit: int = 0) -> None:
        self.bench = Bench(*services)
        self.connections: set[ClientConnection] = set()
        self.connection = ClientConnection(
            self.bench.pipeline,
            cast(asyncio.AbstractEventLoop, self.bench.clock),
            self.connections,
            scheme=b"http",
            trusted=False,
        )
        self.transport = FakeTransport(self.connection)
        self.connection.connection_made(self.transport)

    @property
    def clock(self) -> Clock:
        return self.bench.clock

    @property
    def link(self) -> FakeLink:
        return self.bench.link

    @property
    def written(self) -> bytes:
        return self.transport.written

    def sends(self, data: bytes, step: int = 1 << 30) -> int:
        """The client sends, and we read while we want to; how many bytes were read."""
        at = 0
        while at < len(data) and self.transport.reading and not self.transport.is_closing():
            self.connection.data_received(data[at : at + step])
            at += step
        return min(at, len(data))

    def leaves(self, *, fin: bool = False) -> None:
        """The client's end is gone."""
        if fin and not self.connection.eof_received():
            self.transport.close()
        if not fin:
            self.transport.abort()
        self.connection.connection_lost(None)

    def check_let_go(self) -> None:
        assert self.bench.held() == []
        assert self.bench.crashes == []
        assert not self.connections
        assert self.clock.armed == [] or self.bench.pipeline.live == 0


def answers(link: FakeLink, body: bytes = b"{}") -> None:
    link.heads(head_of(200, JSON, len(body)))
    if body:
        link.says(body)
    link.ends()


def statuses(written: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 ([0-9]{3}) ", written)]


# --- replies ----------------------------------------------------------------------------------------------------------


def test_a_stream_is_chunked_and_the_connection_stays() -> None:
    desk = Desk()
    desk.sends(chat())
    first = ROLE + token(0)
    desk.link.heads().says(first).says(FINISH + DONE).ends(b"x-t: 1\r\n")
    head, _, body = desk.written.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n") and b"transfer-encoding: chunked" in head
    rest = FINISH + DONE
    assert body == b"%x\r\n%b\r\n%x\r\n%b\r\n0\r\nx-t: 1\r\n\r\n" % (len(first), first, len(rest), rest)
    assert not desk.transport.is_closing() and desk.connection.idle
    desk.leaves()
    desk.check_let_go()


@pytest.mark.parametrize(
    ("asked", "head", "framing", "body"),
    [
        (request(), head_of(200, JSON, 2), b"content-length: 2", b"{}"),
        (request(), head_of(200, JSON), b"transfer-encoding: chunked", b"2\r\n{}\r\n0\r\n\r\n"),
        (request(method=b"HEAD"), head_of(200, JSON, 2), b"content-length: 2", b""),
        (request(), head_of(304, b"", 9), b"content-length: 9", b""),
        (request(), head_of(204, b""), b"", b""),
        (request(version=b"HTTP/1.0"), head_of(200, JSON), b"connection: close", b"{}"),
        (request(version=b"HTTP/1.0", headers=[b"Connection: keep-alive"]), head_of(200, JSON, 2),
         b"connection: keep-alive", b"{}"),
        (request(headers=[b"Connection: close"]), head_of(200, JSON, 2), b"connection: close", b"{}"),
    ],
    ids=["length", "chunked", "HEAD", "304", "204", "1.0", "1.0 keep-alive", "close"],
)  # fmt: skip
def test_framing_suits_request_and_answer(asked: bytes, head: object, framing: bytes, body: bytes) -> None:
    desk = Desk()
    desk.sends(asked)
    desk.link.heads(head)  # type: ignore[arg-type]
    if body:
        desk.link.says(b"{}")
    desk.link.ends()
    written_head, _, written_body = desk.written.partition(b"\r\n\r\n")
    assert framing in written_head and written_body == body
    assert desk.transport.closed is (b"connection: close" in written_head)


def test_pipelined_requests_are_served_one_by_one_in_order() -> None:
    desk = Desk()
    desk.sends(request(b"/1") + request(b"/2") + request(b"/3"))
    for number in (1, 2, 3):
        assert len(desk.bench.connector.openings) == number
        assert b"GET /%d " % number in desk.link.head
        answers(desk.link, b"%d" % number)
    assert statuses(desk.written) == [200] * 3


def test_a_bad_request_is_answered_after_those_before_it_and_ends_the_connection() -> None:
    desk = Desk()
    desk.sends(request(b"/1") + b"GET / HTTP/1.1\r\n\r\n")
    assert desk.written == b""
    answers(desk.link)
    assert statuses(desk.written) == [200, 400]
    assert desk.transport.eof
    assert desk.bench.recorder.refusals == [Reason.BAD_REQUEST]
    desk.leaves()
    desk.check_let_go()


def test_an_engine_refuses_an_upgrade_and_http_goes_on() -> None:
    desk = Desk()
    desk.sends(request(b"/ws", headers=[b"Connection: Upgrade", b"Upgrade: websocket"]) + request(b"/next"))
    answers(desk.link)
    assert b"GET /next " in desk.link.head
    answers(desk.link)
    assert statuses(desk.written) == [200, 200]


def test_a_tunnel_passes_bytes_both_ways() -> None:
    desk = Desk()
    desk.sends(request(b"/ws", headers=[b"Connection: Upgrade", b"Upgrade: websocket"]) + b"early")
    desk.link.tunnels(b"hello")
    desk.sends(b"more")
    desk.link.tunnels_on(b"down")
    assert desk.link.tunnelled == b"earlymore"
    assert desk.written.endswith(b"\r\n\r\nhellodown") and desk.written.startswith(b"HTTP/1.1 101 ")
    desk.link.ends()
    assert desk.transport.closed


# --- deadlines of clients ---------------------------------------------------------------------------------------------


def test_an_idle_connection_is_closed_without_a_word() -> None:
    desk = Desk()
    desk.clock.advance(IDLE_S - 0.01)
    assert not desk.transport.is_closing()
    desk.clock.advance(0.02)
    assert desk.transport.closed and desk.written == b""


def test_idleness_counts_from_the_last_byte() -> None:
    desk = Desk()
    desk.clock.advance(IDLE_S - 1)
    desk.sends(request())
    answers(desk.link)
    desk.clock.advance(IDLE_S - 1)
    assert not desk.transport.is_closing()
    desk.clock.advance(2.0)
    assert desk.transport.closed


def test_a_head_that_drips_is_answered_with_408_an_idle_time_after_its_first_byte() -> None:
    desk = Desk()
    data = request(b"/" + b"x" * 100)
    for at in range(int(IDLE_S) - 1):
        desk.sends(data[at : at + 1])
        desk.clock.advance(1.0)
    desk.clock.advance(1.5)
    assert statuses(desk.written) == [408]
    assert desk.bench.recorder.refusals == [Reason.CLIENT_TIMEOUT]


def test_a_held_body_that_stops_coming_is_answered_with_408() -> None:
    desk = Desk()
    desk.sends(chat()[:-1])
    desk.clock.advance(IDLE_S + 0.01)
    assert statuses(desk.written) == [408]
    desk.leaves()
    desk.check_let_go()


@pytest.mark.parametrize("began", [b"", request()[:-1], chat()[:-1]], ids=["idle", "half a head", "half a body"])
def test_what_a_client_said_while_the_loop_stood_still_is_heard(began: bytes) -> None:
    desk = Desk()
    desk.sends(began)
    desk.clock.now += IDLE_S + 5.0
    desk.clock.advance(0.0)
    assert not desk.transport.is_closing() and desk.written == b""
    whole = chat() if began and chat().startswith(began) else request()
    desk.sends(whole[len(began) :])
    answers(desk.link)
    assert statuses(desk.written) == [200]


class Curt:
    """As uvloop is with what is due within the millisecond: its handle can be cancelled and tells nothing."""

    def __init__(self, timer: asyncio.TimerHandle) -> None:
        self.cancel = timer.cancel


class CurtLoop:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.time = clock.time

    def call_at(self, when: float, callback: Callable[[], None]) -> Curt:
        return Curt(self._clock.call_at(when, callback))

    def call_later(self, delay: float, callback: Callable[[], None]) -> Curt:
        return self.call_at(self._clock.now + delay, callback)


def test_a_deadline_needs_nothing_of_its_timer_but_that_it_comes() -> None:
    desk = Desk()
    other = ClientConnection(
        desk.bench.pipeline,
        cast(asyncio.AbstractEventLoop, CurtLoop(desk.clock)),
        desk.connections,
        scheme=b"http",
        trusted=False,
    )
    transport = FakeTransport(other)
    other.connection_made(transport)
    other.data_received(request()[:-1])
    desk.clock.now += IDLE_S + 5.0
    desk.clock.advance(GRACE_S + 0.01)
    assert statuses(transport.written) == [408]


@pytest.mark.parametrize("began", [b"", request()[:-1], chat()[:-1]], ids=["idle", "half a head", "half a body"])
@pytest.mark.parametrize("holds", [1, 2, 3])
def test_a_client_silent_after_the_loop_stood_still_is_out_of_time(began: bytes, holds: int) -> None:
    desk = Desk()
    desk.sends(began)
    for _ in range(holds):
        desk.clock.now += IDLE_S + 5.0
        desk.clock.advance(0.0)
    desk.clock.advance(GRACE_S + 0.01)
    assert statuses(desk.written) == ([] if began == b"" else [408])
    assert desk.transport.closed or began != b""


def test_an_upload_that_stops_coming_is_cut_and_its_node_is_not_charged() -> None:
    desk = Desk()
    desk.sends(request(b"/up", method=b"PUT", headers=[b"Content-Length: 10"]) + b"012")
    desk.clock.advance(IDLE_S / 2)
    desk.sends(b"3")
    desk.clock.advance(IDLE_S - 0.01)
    assert desk.written == b""
    desk.clock.advance(0.02)
    assert statuses(desk.written) == [408]
    (attempt,) = desk.bench.recorder.attempts
    assert (attempt.ending, attempt.result) == (Ending.CLIENT_SLOW, Result.IGNORED)
    desk.leaves()
    desk.check_let_go()


def test_a_client_that_waits_for_its_answer_is_never_idle() -> None:
    desk = Desk(service(deadlines=service().deadlines))
    desk.sends(request(b"/ws", headers=[b"Connection: Upgrade", b"Upgrade: websocket"]))
    desk.link.tunnels()
    desk.clock.advance(TOTAL_S * 10)
    assert not desk.transport.is_closing()
    desk.leaves()
    desk.check_let_go()


def stream_until_stuck(desk: Desk) -> None:
    """A stream to a client that reads nothing, until we stop reading the engine."""
    desk.sends(chat())
    desk.transport.stuck = True
    desk.link.heads()
    while desk.link.reading:
        desk.link.says(token(1) * 50)


def test_a_client_that_reads_nothing_stops_the_engine_and_is_cut_after_an_idle_time() -> None:
    desk = Desk()
    desk.clock.advance(10.0)
    stream_until_stuck(desk)
    assert desk.transport.buffered < HIGH_WATER_BYTES + 20_000
    desk.clock.advance(IDLE_S * 2 + 0.1)
    assert desk.transport.aborted
    (attempt,) = desk.bench.recorder.attempts
    assert (attempt.ending, attempt.result) == (Ending.CLIENT_SLOW, Result.IGNORED)
    desk.connection.connection_lost(None)
    desk.check_let_go()


def test_a_client_that_reads_slowly_is_not_cut() -> None:
    desk = Desk()
    stream_until_stuck(desk)
    for _ in range(5):
        desk.clock.advance(IDLE_S - 1)
        desk.transport.buffered -= 100
    assert not desk.transport.is_closing()


def test_a_client_that_reads_again_gets_the_rest() -> None:
    desk = Desk()
    stream_until_stuck(desk)
    desk.transport.drains()
    desk.link.says(FINISH + DONE).ends()
    assert desk.written.endswith(b"0\r\n\r\n")
    assert not desk.transport.is_closing()


# --- back-pressure between requests -----------------------------------------------------------------------------------


FULL = COMPLETION.ljust(HELD_BYTES)
"""An answer that is held until it is whole and then fills the client's buffer with one write."""


def fill(desk: Desk) -> None:
    """A reply that ended, and that the client does not read."""
    desk.sends(chat(stream=False))
    desk.transport.stuck = True
    answers(desk.link, FULL)
    assert desk.bench.recorder.requests and desk.transport.buffered > HIGH_WATER_BYTES


def test_a_reply_that_was_not_read_keeps_the_next_request_from_being_served() -> None:
    desk = Desk()
    fill(desk)
    before = desk.transport.buffered
    desk.sends(request(b"/2"))
    for link in desk.bench.connector.links:
        # Nothing of an answer may pile up here.
        link.heads(head_of(200, JSON))
        for _ in range(100):
            link.says(b"y" * 65536)
    assert desk.transport.buffered == before
    desk.transport.drains()
    answers(desk.link, b"2")
    assert desk.written.endswith(b"\r\n\r\n2")


def test_a_client_that_reads_no_reply_and_asks_on_is_cut_after_an_idle_time() -> None:
    desk = Desk()
    fill(desk)
    for _ in range(2 * int(IDLE_S)):
        desk.sends(request(b"/2"))
        desk.clock.advance(1.0)
    assert desk.transport.aborted
    desk.connection.connection_lost(None)
    desk.check_let_go()


def test_a_client_that_reads_no_reply_sends_ahead_no_more_than_another() -> None:
    desk = Desk()
    fill(desk)
    assert desk.sends(request(b"/2") * 100_000, 16_384) < 2 * AHEAD_BYTES


@pytest.mark.parametrize("closing", [False, True], ids=["kept alive", "to be closed"])
def test_a_last_reply_that_is_never_read_holds_its_connection_for_no_more_than_two_idle_times(closing: bool) -> None:
    desk = Desk()
    desk.sends(request(headers=[b"Connection: close"] if closing else []))
    desk.transport.stuck = True
    answers(desk.link)
    desk.clock.advance(2 * IDLE_S + 0.1)
    assert desk.transport.aborted
    desk.connection.connection_lost(None)
    desk.check_let_go()
    assert desk.clock.armed == []


def test_what_a_client_sends_ahead_of_its_turn_is_bounded() -> None:
    desk = Desk()
    one = request(b"/x" + b"y" * 1000)
    flood = one * 2000
    read = desk.sends(flood, 16_384)
    for _ in range(100):
        answers(desk.link)
        read += desk.sends(flood[read:], 16_384)
        behind = read - len(one) * len(desk.bench.recorder.requests)
        assert behind < 2 * AHEAD_BYTES
    while read < len(flood):
        answers(desk.link)
        read += desk.sends(flood[read:], 16_384)
    while desk.bench.pipeline.live:
        answers(desk.link)
    assert len(desk.bench.recorder.requests) == 2000


@pytest.mark.parametrize("asked", [request(b"/1"), chat()], ids=["plain", "held"])
def test_a_large_request_sent_ahead_is_read_whole_once_its_turn_comes(asked: bytes) -> None:
    desk = Desk()
    large = chat(text="x" * (2 * AHEAD_BYTES))
    read = desk.sends(asked + large + request(b"/3"), 16_384)
    assert read < 2 * AHEAD_BYTES
    answers(desk.link, COMPLETION)
    desk.sends((asked + large + request(b"/3"))[read:], 16_384)
    assert desk.link.body.endswith(b'"max_tokens":8}') and len(desk.link.body) > 2 * AHEAD_BYTES
    answers(desk.link, COMPLETION)
    answers(desk.link)
    assert statuses(desk.written) == [200] * 3


def test_an_upload_the_engine_does_not_take_stops_the_client() -> None:
    desk = Desk()
    desk.sends(request(b"/up", method=b"PUT", headers=[b"Content-Length: 10"]) + b"012")
    desk.link.blocks_upload()
    reads = [desk.transport.reading]
    desk.link.takes_upload()
    reads.append(desk.transport.reading)
    assert reads == [False, True]


# --- leaving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fin", [False, True], ids=["reset", "FIN"])
@pytest.mark.parametrize("steps", range(6))
def test_a_client_that_leaves_at_any_point_is_forgotten(steps: int, fin: bool) -> None:
    desk = Desk()
    data = chat()
    acts: list[Callable[[], object]] = [
        lambda: desk.sends(data[:30]),
        lambda: desk.sends(data[30:-5]),
        lambda: desk.sends(data[-5:] + request(b"/next")),
        lambda: desk.link.heads(),
        lambda: desk.link.says(ROLE + token(0)),
        lambda: desk.link.says(FINISH + DONE).ends(),
    ]
    for act in acts[:steps]:
        act()
    desk.leaves(fin=fin)
    desk.check_let_go()
    desk.clock.advance(TOTAL_S)
    assert desk.clock.armed == []
    endings = [record.ending for record in desk.bench.recorder.attempts]
    assert endings == ([Ending.CLIENT_LEFT] if steps > 2 else [])


# --- drain ------------------------------------------------------------------------------------------------------------


def test_draining_closes_an_idle_connection_and_ends_a_busy_one_after_its_reply() -> None:
    desk, busy = Desk(), Desk()
    desk.connection.close_if_idle()
    assert desk.transport.closed
    busy.sends(request(b"/1") + request(b"/2"))
    busy.bench.pipeline.draining = True
    busy.connection.close_if_idle()
    assert not busy.transport.is_closing()
    answers(busy.link)
    assert b"connection: close" in busy.written and statuses(busy.written) == [200]
    assert busy.transport.is_closing() or busy.transport.eof


def test_a_request_during_drain_is_refused_and_its_connection_ends() -> None:
    desk = Desk()
    desk.bench.pipeline.draining = True
    desk.sends(request())
    assert statuses(desk.written) == [503]
    assert b"connection: close" in desk.written and b"x-sidecar-reason: draining" in desk.written
    assert desk.transport.closed


def test_cutting_a_stream_ends_it_in_band_and_closes() -> None:
    desk = Desk()
    desk.sends(chat())
    desk.link.heads().says(token(0))
    desk.connection.cut_exchange(Reason.DRAINING)
    assert b'"code":"draining"' in desk.written and desk.written.endswith(b"0\r\n\r\n")
    assert b"[DONE]" not in desk.written
    assert desk.transport.closed and not desk.transport.aborted
    desk.connection.connection_lost(None)
    desk.check_let_go()


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_connection_that_is_gone_needs_no_garbage_collector() -> None:
    desk = Desk()

    def once() -> None:
        connection = ClientConnection(
            desk.bench.pipeline,
            cast(asyncio.AbstractEventLoop, desk.clock),
            desk.connections,
            scheme=b"http",
            trusted=False,
        )
        transport = FakeTransport(connection)
        connection.connection_made(transport)
        connection.data_received(request() + b"GET / HT")
        answers(desk.link)
        connection.connection_lost(None)
        transport._protocol = None  # as event loops do
        desk.clock.forget()
        desk.bench.connector.openings.clear()

    assert garbage_of(once) == 0
