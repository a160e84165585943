"""One wire attempt, event by event: its phases, its deadlines to the slot, what it holds and when it lets go."""

from collections.abc import Callable

import pytest

from sidecar.core.breaker import Permit
from sidecar.core.detector import Detector, Expectation
from sidecar.core.service import Times
from sidecar.kernel.exchange import ResponseHead
from sidecar.kernel.outcome import Ending
from sidecar.policy.schema import Deadlines
from sidecar.proxy.attempt import HELD_BYTES, STALE_S, TRANSITIONS, Attempt, Phase
from sidecar.proxy.request import Request
from sidecar.proxy.watchdog import GRACE_S, SLOT_S, Watchdog
from sidecar.wire.call import Call, read_call
from tests.clock import Clock
from tests.harness import request
from tests.proxy.bench import DEADLINES, GAP_S, HEAD_S, TOOL_S, TOTAL_S, TTFT_S, Bench, chat, get, request_of
from tests.proxy.fakes import JSON, FakeClient, FakeConnector, FakeLink, head_of
from tests.under_test import COMPLETION, DONE, FINISH, PING, ROLE, delta, error_body, event, token

TOOL = delta(b'"tool_calls":[{"index":0,"function":{"arguments":"{"}}]')


class Owner:
    """The exchange's part."""

    def __init__(self) -> None:
        self.accepted = 0
        self.late = 0
        self.done = 0

    def reply_lines(self, attempt: Attempt) -> bytes:
        return b"x-ours: 1\r\n"

    def attempt_accepted(self, attempt: Attempt) -> None:
        self.accepted += 1

    def attempt_late(self, attempt: Attempt) -> None:
        self.late += 1

    def attempt_done(self, attempt: Attempt) -> None:
        self.done += 1


class Stage:
    """One attempt between fakes."""

    def __init__(self, asked: Request | None = None, *, later: bool = False, used: bool = False) -> None:
        self.clock = Clock()
        self.watchdog = Watchdog(self.clock)
        self.client = FakeClient()
        self.connector = FakeConnector()
        self.connector.later = later
        self.connector.used = used
        self.owner = Owner()
        self.request = asked or chat()
        call: Call | None = None
        if self.request.api is not None:
            call = read_call(self.request.api, self.request.body)
        self.attempt = Attempt(
            self.owner,
            self.request,
            call,
            self.client,
            Bench().nodes[0],
            self.connector,
            self.clock.time,
            self.watchdog,
            Times(self.deadlines()),
            self.clock.now + TOTAL_S,
        )
        self.attempt.start(b"HEAD\r\n\r\n")

    def deadlines(self) -> Deadlines:
        return DEADLINES

    @property
    def link(self) -> FakeLink:
        return self.connector.link

    @property
    def ending(self) -> Ending | None:
        return self.attempt.ending

    def late(self) -> int:
        """How often it was called late."""
        return self.owner.late

    def over(self) -> bool:
        """Whether it ended."""
        return self.attempt.ending is not None

    def reads(self) -> bool:
        """Whether the engine is read."""
        return self.link.reading

    def uploads(self) -> bool:
        """Whether the client is read."""
        return not self.client.upload_paused

    def check_let_go(self) -> None:
        """Done, told once, and nothing is held."""
        assert self.attempt.phase is Phase.DONE
        assert self.owner.done == 1
        assert len(self.watchdog) == 0
        assert self.connector.pending == 0
        assert all(link.sink is None for link in self.connector.links)


def upload(*, whole: bool = False, expect: bool = False) -> Request:
    """A streamed upload of 10 bytes, of which 4 have come."""
    headers = [b"Content-Length: 10", *([b"Expect: 100-continue"] if expect else [])]
    data = request(b"/upload", method=b"PUT", headers=headers)
    return request_of(data + (b"0123456789" if whole else b"0123"))


# --- phases -----------------------------------------------------------------------------------------------------------


def connecting() -> Stage:
    return Stage(later=True)


def waiting() -> Stage:
    return Stage()


def waiting_stale() -> Stage:
    return Stage(used=True)


def waiting_plain() -> Stage:
    return Stage(get())


def holding() -> Stage:
    stage = Stage()
    stage.link.heads()
    return stage


def holding_json() -> Stage:
    stage = Stage(chat(stream=False))
    stage.link.heads(head_of(200, JSON))
    return stage


def flowing() -> Stage:
    stage = holding()
    stage.link.says(ROLE + token(0))
    return stage


def flowing_plain() -> Stage:
    stage = Stage(get())
    stage.link.heads(head_of(200, JSON))
    return stage


def tunnel() -> Stage:
    stage = Stage(
        request_of(request(b"/ws", headers=[b"Connection: Upgrade", b"Upgrade: websocket"])),
    )
    stage.link.tunnels(b"early")
    return stage


def done() -> Stage:
    stage = flowing()
    stage.link.ends()
    return stage


MOVES: list[tuple[str, Callable[[], Stage], Callable[[Stage], object], Phase]] = [
    ("connected", connecting, lambda stage: stage.connector.connect(), Phase.WAITING),
    ("connect refused", connecting, lambda stage: stage.connector.refuse(), Phase.DONE),
    ("client leaves while connecting", connecting, lambda stage: stage.attempt.stop(Ending.CLIENT_LEFT), Phase.DONE),
    ("stale connection", waiting_stale, lambda stage: _stale(stage), Phase.CONNECTING),
    ("head of a stream", waiting, lambda stage: stage.link.heads(), Phase.HOLDING),
    ("head of an answer", waiting, lambda stage: stage.link.heads(head_of(200, JSON)), Phase.HOLDING),
    ("head of no inference", waiting_plain, lambda stage: stage.link.heads(), Phase.FLOWING),
    ("compressed head", waiting, lambda stage: stage.link.heads(head_of(encoded=True)), Phase.FLOWING),
    ("switching protocols", waiting_plain, lambda stage: stage.link.tunnels(), Phase.TUNNEL),
    ("lost before a head", waiting, lambda stage: stage.link.lost(), Phase.DONE),
    ("rubbish before a head", waiting, lambda stage: stage.link.talks_rubbish(), Phase.DONE),
    ("role", holding, lambda stage: stage.link.says(ROLE), Phase.HOLDING),
    ("first token", holding, lambda stage: stage.link.says(token(0)), Phase.FLOWING),
    ("64 KiB and no token", holding, lambda stage: stage.link.says(b":" * (HELD_BYTES + 1)), Phase.FLOWING),
    ("64 KiB of JSON", holding_json, lambda stage: stage.link.says(b" " * (HELD_BYTES + 1)), Phase.FLOWING),
    ("whole answer", holding_json, lambda stage: stage.link.says(COMPLETION).ends(), Phase.DONE),
    ("lost while held", holding, lambda stage: stage.link.lost(), Phase.DONE),
    ("rubbish while held", holding, lambda stage: stage.link.talks_rubbish(), Phase.DONE),
    ("token", flowing, lambda stage: stage.link.says(token(1)), Phase.FLOWING),
    ("end", flowing, lambda stage: stage.link.ends(), Phase.DONE),
    ("lost", flowing, lambda stage: stage.link.lost(), Phase.DONE),
    ("rubbish", flowing, lambda stage: stage.link.talks_rubbish(), Phase.DONE),
    ("plain body", flowing_plain, lambda stage: stage.link.says(b"{}"), Phase.FLOWING),
    ("plain end", flowing_plain, lambda stage: stage.link.ends(), Phase.DONE),
    ("tunnel data", tunnel, lambda stage: stage.link.tunnels_on(b"x"), Phase.TUNNEL),
    ("tunnel ends", tunnel, lambda stage: stage.link.ends(), Phase.DONE),
    ("tunnel lost", tunnel, lambda stage: stage.link.lost(), Phase.DONE),
    ("stop of what is done", done, lambda stage: stage.attempt.stop(Ending.CLIENT_LEFT), Phase.DONE),
]


def _stale(stage: Stage) -> None:
    stage.connector.later = True
    stage.link.lost()


@pytest.mark.parametrize(("before", "act", "phase"), [move[1:] for move in MOVES], ids=[move[0] for move in MOVES])
def test_every_event_leads_where_the_table_says(
    before: Callable[[], Stage], act: Callable[[Stage], object], phase: Phase
) -> None:
    stage = before()
    was = stage.attempt.phase
    act(stage)
    assert stage.attempt.phase is phase
    assert phase is was or phase in TRANSITIONS[was]
    if phase is Phase.DONE:
        stage.check_let_go()


def test_every_transition_of_the_table_is_walked() -> None:
    walked = set()
    for _, before, act, phase in MOVES:
        stage = before()
        was = stage.attempt.phase
        act(stage)
        if phase is not was:
            walked.add((was, phase))
    assert walked == {(old, new) for old, news in TRANSITIONS.items() for new in news}


@pytest.mark.parametrize("old", list(Phase), ids=lambda phase: phase.value)
@pytest.mark.parametrize("new", list(Phase), ids=lambda phase: phase.value)
def test_no_other_move_is_possible(old: Phase, new: Phase) -> None:
    stage = waiting()
    stage.attempt.phase = old
    if new in TRANSITIONS[old]:
        stage.attempt._move(new)
        assert stage.attempt.phase is new
    else:
        with pytest.raises(AssertionError):
            stage.attempt._move(new)


STARTS = {
    "connecting": connecting,
    "waiting": waiting,
    "holding": holding,
    "holding JSON": holding_json,
    "flowing": flowing,
    "plain": flowing_plain,
    "tunnel": tunnel,
}


@pytest.mark.parametrize("ending", [Ending.CLIENT_LEFT, Ending.CLIENT_SLOW, Ending.ABANDONED, Ending.CLIENT_MALFORMED])
@pytest.mark.parametrize("start", list(STARTS.values()), ids=list(STARTS))
def test_stopping_at_any_point_lets_everything_go_and_tells_once(start: Callable[[], Stage], ending: Ending) -> None:
    stage = start()
    stage.attempt.stop(ending)
    stage.attempt.stop(Ending.COMPLETE)
    assert stage.ending is ending
    stage.check_let_go()
    assert all(link.aborted for link in stage.connector.links)
    written = stage.client.body
    for link in stage.connector.links:
        link.says(token(5))
        link.ends()
    stage.clock.advance(TOTAL_S * 2)
    assert stage.client.body == written
    assert stage.owner.done == 1


# --- deadlines --------------------------------------------------------------------------------------------------------


def _head_then_first_body(stage: Stage) -> None:
    stage.link.heads(head_of(200, JSON))
    stage.link.says(b" " * (HELD_BYTES + 1))


def _tokens(stage: Stage) -> None:
    stage.link.says(token(1))


DEADLINED: list[tuple[str, Callable[[], Stage], Callable[[Stage], object], float, Ending]] = [
    # name, where it begins, what happens at time 0, the deadline counted from there, how it ends
    ("no head to a stream", waiting, lambda stage: None, TTFT_S, Ending.TTFT_TIMEOUT),
    ("no head to an answer", lambda: Stage(chat(stream=False)), lambda stage: None, HEAD_S, Ending.HEAD_TIMEOUT),
    ("no head to no inference", waiting_plain, lambda stage: None, HEAD_S, Ending.HEAD_TIMEOUT),
    ("an answer that is not whole", holding_json, lambda stage: stage.link.says(b"{"), HEAD_S, Ending.HEAD_TIMEOUT),
    ("no first token", waiting, lambda stage: stage.link.heads(), TTFT_S, Ending.TTFT_TIMEOUT),
    ("a role is no token", waiting, lambda stage: stage.link.heads().says(ROLE), TTFT_S,
     Ending.TTFT_TIMEOUT),
    ("a comment is no token", waiting, lambda stage: stage.link.heads().says(PING), TTFT_S,
     Ending.TTFT_TIMEOUT),
    ("no second token", holding, lambda stage: stage.link.says(token(0)), GAP_S, Ending.TOKEN_GAP_TIMEOUT),
    ("no third token", flowing, _tokens, GAP_S, Ending.TOKEN_GAP_TIMEOUT),
    ("a tool call may think longer", flowing, lambda stage: stage.link.says(TOOL), TOOL_S, Ending.TOKEN_GAP_TIMEOUT),
    ("a large answer stops", lambda: Stage(chat(stream=False)), _head_then_first_body, GAP_S,
     Ending.TOKEN_GAP_TIMEOUT),
    ("no inference flows", waiting_plain, lambda stage: stage.link.heads(), TOTAL_S, Ending.TOTAL_TIMEOUT),
    ("an upload that goes on", lambda: Stage(upload()), lambda stage: None, TOTAL_S, Ending.TOTAL_TIMEOUT),
]  # fmt: skip


@pytest.mark.parametrize(
    ("start", "act", "after_s", "ending"),
    [case[1:] for case in DEADLINED],
    ids=[case[0] for case in DEADLINED],
)
def test_a_deadline_ends_the_attempt_within_a_slot_and_not_before(
    start: Callable[[], Stage], act: Callable[[Stage], object], after_s: float, ending: Ending
) -> None:
    stage = start()
    act(stage)
    stage.clock.advance(after_s - 1e-6)
    assert not stage.over()
    stage.clock.advance(SLOT_S + 1e-6)
    assert stage.ending is ending
    stage.check_let_go()
    assert stage.link.aborted


ALIVE: list[tuple[str, Callable[[], Stage], Callable[[Stage], object], float]] = [
    # what must have happened just before a deadline for it not to hold
    ("head of no inference", waiting_plain, lambda stage: stage.link.heads(), HEAD_S),
    ("first token", holding, lambda stage: stage.link.says(token(0)), TTFT_S),
    ("next token", flowing, lambda stage: stage.link.says(token(1)), GAP_S),
    ("whole answer", holding_json, lambda stage: stage.link.says(COMPLETION).ends(), HEAD_S),
    ("more of an upload's answer", lambda: Stage(upload(whole=True)), lambda stage: stage.link.heads(), HEAD_S),
]


@pytest.mark.parametrize(("start", "act", "after_s"), [case[1:] for case in ALIVE], ids=[case[0] for case in ALIVE])
def test_what_comes_just_in_time_moves_the_deadline(
    start: Callable[[], Stage], act: Callable[[Stage], object], after_s: float
) -> None:
    stage = start()
    stage.clock.advance(after_s - 0.001)
    act(stage)
    stage.clock.advance(0.001 + 2 * SLOT_S)
    assert stage.ending in (None, Ending.COMPLETE)


@pytest.mark.parametrize(("start", "act", "after_s"), [case[1:] for case in ALIVE], ids=[case[0] for case in ALIVE])
def test_what_was_in_the_socket_when_the_loop_stood_still_is_in_time(
    start: Callable[[], Stage], act: Callable[[Stage], object], after_s: float
) -> None:
    stage = start()
    stage.clock.now += after_s + 5.0
    stage.clock.advance(0.0)
    act(stage)
    stage.clock.advance(2 * SLOT_S)
    assert stage.ending in (None, Ending.COMPLETE)


@pytest.mark.parametrize(
    ("start", "act", "after_s", "ending"),
    [case[1:] for case in DEADLINED],
    ids=[case[0] for case in DEADLINED],
)
def test_a_silence_that_goes_on_after_the_loop_stood_still_ends_the_attempt(
    start: Callable[[], Stage], act: Callable[[Stage], object], after_s: float, ending: Ending
) -> None:
    stage = start()
    act(stage)
    stage.clock.now += after_s + 5.0
    stage.clock.advance(0.0)
    assert not stage.over()
    stage.clock.advance(GRACE_S + SLOT_S)
    assert stage.over()
    stage.check_let_go()


def test_roles_and_comments_do_not_move_the_first_token_deadline() -> None:
    stage = holding()
    for _ in range(int(TTFT_S) - 1):
        stage.clock.advance(1.0)
        stage.link.says(ROLE + PING)
    stage.clock.advance(1.0 + SLOT_S)
    assert stage.ending is Ending.TTFT_TIMEOUT
    assert stage.client.head is None


def test_comments_do_not_move_the_gap() -> None:
    stage = flowing()
    stage.clock.advance(GAP_S - 0.5)
    stage.link.says(PING)
    stage.clock.advance(0.5 + SLOT_S)
    assert stage.ending is Ending.TOKEN_GAP_TIMEOUT


def test_after_a_tool_call_text_has_the_shorter_gap_again() -> None:
    stage = flowing()
    stage.link.says(TOOL)
    stage.link.says(token(1))
    stage.clock.advance(GAP_S + SLOT_S)
    assert stage.ending is Ending.TOKEN_GAP_TIMEOUT


def test_tokens_without_end_meet_the_total_deadline() -> None:
    stage = flowing()
    began = stage.clock.now
    while not stage.over():
        stage.clock.advance(1.0)
        stage.link.says(token(1))
    assert stage.ending is Ending.TOTAL_TIMEOUT
    assert TOTAL_S <= stage.clock.now - began <= TOTAL_S + 1.0
    stage.check_let_go()


def test_a_deadline_past_the_total_one_is_the_total_one() -> None:
    stage = flowing()
    stage.clock.advance(1.0)
    for _ in range(int(TOTAL_S) - 5):
        stage.link.says(token(1))
        stage.clock.advance(1.0)
    stage.clock.advance(5.0)
    assert stage.ending is Ending.TOTAL_TIMEOUT


def test_the_head_clock_of_a_streamed_upload_starts_when_the_upload_ended() -> None:
    stage = Stage(upload())
    stage.clock.advance(HEAD_S * 2)
    assert not stage.over()
    stage.request.pieces.append(b"456789")
    stage.request.complete = True
    stage.attempt.push_upload()
    stage.clock.advance(HEAD_S - 0.001)
    assert not stage.over()
    stage.clock.advance(SLOT_S + 0.002)
    assert stage.ending is Ending.HEAD_TIMEOUT


def test_a_stream_whose_end_marker_came_is_complete_even_if_nobody_ends_it() -> None:
    stage = flowing()
    stage.link.says(FINISH + DONE)
    stage.clock.advance(GAP_S + SLOT_S)
    assert stage.ending is Ending.COMPLETE
    assert stage.attempt.whole
    stage.check_let_go()


# --- a client that does not read --------------------------------------------------------------------------------------


def test_a_paused_client_stops_the_engine_and_the_gap_clock() -> None:
    stage = flowing()
    stage.attempt.pause()
    assert stage.reads() is False
    stage.clock.advance(GAP_S * 5)
    assert not stage.over()
    stage.attempt.resume()
    assert stage.reads() is True
    stage.clock.advance(GAP_S - 0.001)
    assert not stage.over()
    stage.clock.advance(SLOT_S + 0.002)
    assert stage.ending is Ending.TOKEN_GAP_TIMEOUT


def test_a_paused_client_does_not_stop_the_total_clock() -> None:
    stage = flowing()
    stage.attempt.pause()
    stage.clock.advance(TOTAL_S + SLOT_S)
    assert stage.ending is Ending.TOTAL_TIMEOUT
    stage.check_let_go()


def test_a_pause_is_no_gap_of_the_engine() -> None:
    stage = flowing()
    stage.clock.advance(1.0)
    stage.link.says(token(1))
    stage.attempt.pause()
    stage.clock.advance(300.0)
    stage.attempt.resume()
    stage.clock.advance(2.0)
    stage.link.says(token(2))
    assert stage.attempt.max_gap_s == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("start", "after_s", "ending"),
    [
        (waiting, TTFT_S, Ending.TTFT_TIMEOUT),
        (waiting_plain, HEAD_S, Ending.HEAD_TIMEOUT),
        (holding, TTFT_S, Ending.TTFT_TIMEOUT),
        (holding_json, HEAD_S, Ending.HEAD_TIMEOUT),
    ],
    ids=["waiting for a stream", "waiting for a head", "waiting for a token", "waiting for the rest"],
)
def test_after_a_pause_a_silent_engine_still_meets_its_deadline(
    start: Callable[[], Stage], after_s: float, ending: Ending
) -> None:
    stage = start()
    stage.attempt.pause()
    stage.clock.advance(after_s * 2)
    assert not stage.over()
    stage.attempt.resume()
    stage.clock.advance(after_s + 2 * SLOT_S)
    assert stage.ending is ending


def test_a_pause_before_the_first_token_leaves_the_time_to_first_token_known() -> None:
    stage = holding()
    stage.link.says(b":" * HELD_BYTES + b":\n\n")
    stage.attempt.pause()
    stage.attempt.resume()
    stage.clock.advance(1.0)
    stage.link.says(token(0))
    assert stage.attempt.first_token_at == stage.clock.now


def test_a_connection_made_while_the_client_is_paused_is_not_read() -> None:
    stage = connecting()
    stage.attempt.pause()
    stage.connector.connect()
    assert stage.reads() is False
    stage.attempt.resume()
    assert stage.reads() is True


def test_a_pause_within_the_first_write_holds_the_engine() -> None:
    stage = holding()
    stage.client.on_write = stage.attempt.pause
    stage.link.says(token(0))
    assert not stage.link.reading
    stage.clock.advance(GAP_S * 3)
    assert not stage.over()


# --- late -------------------------------------------------------------------------------------------------------------

LATE_S, LATE_GAP_S = 2.0, 3.0


def expecting() -> Stage:
    """A stream was asked for whose first token is late after LATE_S, and each next one after LATE_GAP_S."""
    stage = Stage(later=True)
    permit = Permit(0)
    detector = Detector(stage.attempt.node.breaker, "v1")
    stage.attempt.expectation = Expectation(detector, permit, "m", None, 0.0, 0.0, 0.0, 0, LATE_S, LATE_GAP_S, None)
    stage.connector.connect()
    return stage


def test_a_silence_is_late_once_and_the_attempt_goes_on() -> None:
    stage = expecting()
    stage.clock.advance(LATE_S - 0.001)
    assert stage.late() == 0
    stage.clock.advance(SLOT_S + 0.002)
    assert stage.late() == 1
    stage.clock.advance(LATE_S * 3)
    stage.link.heads().says(token(0))
    stage.clock.advance(LATE_GAP_S + SLOT_S)
    assert stage.late() == 2 and not stage.over()


@pytest.mark.parametrize(
    "head",
    [head_of(encoded=True), head_of(200, JSON), head_of(500, JSON)],
    ids=["compressed", "no stream", "an error"],
)
def test_what_has_no_tokens_that_we_see_is_never_late(head: ResponseHead) -> None:
    stage = expecting()
    stage.link.heads(head)
    for _ in range(10):
        stage.link.says(b" ")
        stage.clock.advance(LATE_GAP_S - 1.0)
    assert stage.late() == 0 and not stage.over()


@pytest.mark.parametrize("was_read", [True, False])
def test_a_loop_that_stood_still_reads_before_it_calls_anything_late(was_read: bool) -> None:
    stage = expecting()
    stage.clock.now += LATE_S + 1.0
    stage.clock.advance(0.0)
    assert stage.late() == 0
    if was_read:
        stage.link.heads().says(token(0))
    stage.clock.advance(GRACE_S + SLOT_S)
    assert stage.late() == (0 if was_read else 1)


def test_a_pause_makes_nothing_late_and_after_it_a_silence_is() -> None:
    stage = expecting()
    stage.link.heads().says(token(0))
    stage.clock.advance(1.0)
    stage.attempt.pause()
    stage.clock.advance(LATE_GAP_S - 1.1)
    stage.attempt.resume()
    stage.clock.advance(LATE_GAP_S - 0.1)
    assert stage.late() == 0
    stage.clock.advance(0.1 + SLOT_S)
    assert stage.late() == 1


# --- what is held, and when it is committed ---------------------------------------------------------------------------


def test_a_stream_is_committed_at_its_first_token_with_all_that_came_before_in_one_write() -> None:
    stage = holding()
    writes = []
    stage.client.on_write = lambda: writes.append(stage.client.body)
    stage.link.says(PING)
    stage.link.says(ROLE)
    assert stage.client.head is None and stage.owner.accepted == 0
    stage.link.says(token(0))
    assert writes == [PING + ROLE + token(0)]
    assert stage.attempt.committed and stage.owner.accepted == 1
    assert stage.client.extra == b"x-ours: 1\r\n"
    assert stage.request.body == b""  # what cannot be re-sent need not be kept


@pytest.mark.parametrize("size", [HELD_BYTES - 1, HELD_BYTES, HELD_BYTES + 1], ids=["below", "at", "above"])
@pytest.mark.parametrize("json", [False, True], ids=["comments", "JSON"])
def test_64_kib_are_held_and_no_byte_more(size: int, json: bool) -> None:
    stage = holding_json() if json else holding()
    half = size // 2
    stage.link.says(b":" * half)
    stage.link.says(b":" * (size - half))
    assert stage.attempt.committed is (size > HELD_BYTES)
    assert len(stage.client.body) == (size if size > HELD_BYTES else 0)


def test_each_read_of_a_flowing_stream_is_passed_on_as_it_came() -> None:
    stage = flowing()
    before = stage.client.body
    for data in (b"data: {", b'"choices":[]}\n', b"\n", token(1) + token(2)):
        stage.link.says(data)
        before += data
        assert stage.client.body == before
    assert stage.attempt.bytes_out == len(before)


def test_an_answer_that_is_whole_is_delivered_with_its_trailers() -> None:
    stage = holding_json()
    stage.link.says(COMPLETION)
    stage.link.ends(b"x-sum: 1\r\n")
    assert stage.ending is Ending.COMPLETE and not stage.attempt.committed
    stage.attempt.deliver()
    assert stage.client.body == COMPLETION
    assert stage.attempt.whole and stage.attempt.trailers == [b"x-sum: 1\r\n"]


def test_times_of_tokens_are_measured_from_the_sending() -> None:
    stage = connecting()
    stage.clock.advance(0.5)
    stage.connector.connect()
    sent = stage.clock.now
    stage.clock.advance(2.0)
    stage.link.heads()
    stage.link.says(ROLE)
    stage.clock.advance(1.0)
    stage.link.says(token(0))
    stage.clock.advance(3.0)
    stage.link.says(token(1))
    stage.clock.advance(1.0)
    stage.link.says(token(2))
    attempt = stage.attempt
    assert attempt.sent_at == sent
    assert attempt.first_token_at - sent == pytest.approx(3.0)
    assert attempt.max_gap_s == pytest.approx(3.0)
    assert attempt.last_token_at == stage.clock.now


# --- endings ----------------------------------------------------------------------------------------------------------

WAIT = ((b"retry-after", b"3"),)
STREAM_ERROR = event(error_body(b"boom"))

ENDINGS: list[tuple[str, Callable[[], Stage], Callable[[Stage], object], Ending]] = [
    ("marker and end", flowing, lambda stage: stage.link.says(FINISH + DONE).ends(), Ending.COMPLETE),
    ("finish reason and clean end", flowing, lambda stage: stage.link.says(FINISH).ends(),
     Ending.COMPLETE),
    ("marker and loss", flowing, lambda stage: stage.link.says(FINISH + DONE).lost(), Ending.COMPLETE),
    ("marker and rubbish", flowing, lambda stage: stage.link.says(FINISH + DONE).talks_rubbish(),
     Ending.COMPLETE),
    ("finish reason and loss", flowing, lambda stage: stage.link.says(FINISH).lost(), Ending.TRUNCATED),
    ("clean end without a marker", flowing, lambda stage: stage.link.ends(), Ending.TRUNCATED),
    ("half an event at the end", flowing, lambda stage: stage.link.says(b"data: {").ends(),
     Ending.TRUNCATED),
    ("loss in mid stream", flowing, lambda stage: stage.link.lost(), Ending.TRUNCATED),
    ("rubbish in mid stream", flowing, lambda stage: stage.link.talks_rubbish(), Ending.TRUNCATED),
    ("error, then marker", flowing, lambda stage: stage.link.says(STREAM_ERROR + DONE).ends(),
     Ending.ERROR_IN_BAND),
    ("error, then loss", flowing, lambda stage: stage.link.says(STREAM_ERROR).lost(),
     Ending.ERROR_IN_BAND),
    ("head and no event", holding, lambda stage: stage.link.ends(), Ending.EMPTY),
    ("head and comments", holding, lambda stage: stage.link.says(PING).ends(), Ending.EMPTY),
    ("role alone", holding, lambda stage: stage.link.says(ROLE).ends(), Ending.TRUNCATED),
    ("loss after a stream's head", holding, lambda stage: stage.link.lost(), Ending.TRUNCATED),
    ("rubbish after a stream's head", holding, lambda stage: stage.link.talks_rubbish(), Ending.BAD_BYTES),
    ("error before any token", holding, lambda stage: stage.link.says(STREAM_ERROR).ends(),
     Ending.ERROR_IN_BAND),
    ("whole answer", holding_json, lambda stage: stage.link.says(COMPLETION).ends(), Ending.COMPLETE),
    ("empty answer", holding_json, lambda stage: stage.link.ends(), Ending.EMPTY),
    ("answer that broke off", holding_json, lambda stage: stage.link.says(b"{").lost(),
     Ending.TRUNCATED),
    ("error under 200", holding_json, lambda stage: stage.link.says(error_body()).ends(),
     Ending.ERROR_IN_BAND),
    ("another media type", waiting, lambda stage:
     stage.link.heads(head_of(200, b"text/html")).says(b"x").ends(), Ending.EMPTY),
    ("500", waiting, lambda stage: stage.link.heads(head_of(500, JSON)).ends(), Ending.SERVER_ERROR),
    ("429", waiting, lambda stage: stage.link.heads(head_of(429, JSON)).ends(), Ending.OVERLOADED),
    ("503", waiting, lambda stage: stage.link.heads(head_of(503, JSON)).ends(), Ending.SERVER_ERROR),
    ("503 with Retry-After", waiting, lambda stage: stage.link.heads(head_of(503, JSON, retry_after=WAIT)).ends(),
     Ending.OVERLOADED),
    ("400", waiting, lambda stage: stage.link.heads(head_of(400, JSON)).ends(), Ending.CLIENT_ERROR),
    ("413", waiting, lambda stage: stage.link.heads(head_of(413, JSON)).ends(), Ending.CONTEXT_LENGTH),
    ("204", waiting, lambda stage: stage.link.heads(head_of(204, b"")).ends(), Ending.COMPLETE),
    ("302", waiting, lambda stage: stage.link.heads(head_of(302, b"")).ends(), Ending.COMPLETE),
    ("connect refused", connecting, lambda stage: stage.connector.refuse(), Ending.CONNECT_FAILED),
    ("loss before the head", waiting, lambda stage: stage.link.lost(), Ending.RESET_BEFORE_HEAD),
    ("rubbish before the head", waiting, lambda stage: stage.link.talks_rubbish(), Ending.BAD_BYTES),
    ("plain answer", flowing_plain, lambda stage: stage.link.ends(), Ending.COMPLETE),
    ("plain answer broke off", flowing_plain, lambda stage: stage.link.lost(), Ending.TRUNCATED),
    ("tunnel ended", tunnel, lambda stage: stage.link.lost(), Ending.COMPLETE),
]  # fmt: skip


@pytest.mark.parametrize(("start", "act", "ending"), [case[1:] for case in ENDINGS], ids=[case[0] for case in ENDINGS])
def test_an_attempt_comes_to(start: Callable[[], Stage], act: Callable[[Stage], object], ending: Ending) -> None:
    stage = start()
    act(stage)
    assert stage.ending is ending
    stage.check_let_go()


# --- stale connections ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after_s", [0.0, STALE_S / 2, STALE_S - 0.001])
def test_a_reused_connection_that_was_closed_already_is_replaced_unseen(after_s: float) -> None:
    stage = waiting_stale()
    stage.clock.advance(after_s)
    stage.link.lost()
    first, second = stage.connector.openings
    assert (first.fresh, second.fresh) == (False, True)
    assert not stage.over() and stage.attempt.phase is Phase.WAITING
    assert stage.link.head == b"HEAD\r\n\r\n" and stage.link.body == stage.request.body
    assert not stage.attempt.reused_connection
    assert len(stage.watchdog) == 1


def _stale_twice(stage: Stage) -> None:
    stage.link.lost()
    stage.link.used = stage.attempt.reused_connection = True


NOT_STALE: list[tuple[str, Callable[[], Stage], Callable[[Stage], object]]] = [
    ("a connection of our own", lambda: Stage(), lambda stage: None),
    ("too late", waiting_stale, lambda stage: stage.clock.advance(STALE_S)),
    ("bytes came", waiting_stale, lambda stage: stage.link.informs()),
    ("twice", waiting_stale, _stale_twice),
    ("not to be sent twice", lambda: Stage(upload(whole=True), used=True), lambda stage: None),
    ("a method that may act", lambda: Stage(get(method=b"PATCH"), used=True), lambda stage: None),
]


@pytest.mark.parametrize(("start", "act"), [case[1:] for case in NOT_STALE], ids=[case[0] for case in NOT_STALE])
def test_a_loss_that_a_stale_connection_does_not_explain_is_a_failure(
    start: Callable[[], Stage], act: Callable[[Stage], object]
) -> None:
    stage = start()
    act(stage)
    stage.link.lost()
    assert stage.ending is Ending.RESET_BEFORE_HEAD
    stage.check_let_go()


def test_the_clock_of_a_replaced_connection_starts_anew() -> None:
    stage = waiting_stale()
    stage.clock.advance(0.9)
    stage.link.lost()
    stage.clock.advance(TTFT_S - 0.001)
    assert not stage.over()
    stage.clock.advance(SLOT_S + 0.002)
    assert stage.ending is Ending.TTFT_TIMEOUT


def test_a_client_that_leaves_while_a_stale_connection_is_replaced_leaves_nothing() -> None:
    stage = waiting_stale()
    _stale(stage)
    stage.attempt.stop(Ending.CLIENT_LEFT)
    stage.check_let_go()


# --- uploads ----------------------------------------------------------------------------------------------------------


def test_a_streamed_upload_waits_for_the_connection_and_then_flows() -> None:
    stage = Stage(upload(), later=True)
    assert stage.uploads() is False
    link = stage.connector.connect()
    assert stage.uploads() is True
    assert link.chunked_upload is False and link.uploaded == b"0123"
    stage.request.pieces += [b"45", b"6789"]
    stage.request.complete = True
    stage.attempt.push_upload()
    assert link.uploaded == b"0123456789" and link.upload_ended
    assert stage.request.pieces == []


def test_an_upload_s_end_is_told_once() -> None:
    stage = Stage(upload(whole=True))
    assert stage.link.upload_ended
    stage.link.upload_ended = False
    stage.attempt.push_upload()
    assert not stage.link.upload_ended


def test_an_engine_that_does_not_take_the_upload_stops_the_client() -> None:
    stage = Stage(upload())
    stage.link.blocks_upload()
    assert stage.uploads() is False
    stage.link.takes_upload()
    assert stage.uploads() is True


def test_an_early_answer_is_passed_on_while_the_upload_runs() -> None:
    stage = Stage(upload())
    stage.link.heads(head_of(200, JSON))
    stage.link.says(b"early")
    assert stage.client.body == b"early"
    stage.request.pieces.append(b"456789")
    stage.request.complete = True
    stage.attempt.push_upload()
    assert stage.link.uploaded == b"0123456789"
    stage.link.ends()
    assert stage.ending is Ending.COMPLETE
    stage.check_let_go()


def test_upload_bytes_after_the_end_go_nowhere() -> None:
    stage = Stage(upload())
    link = stage.link
    link.heads(head_of(413, JSON))
    link.ends()
    stage.request.pieces.append(b"456789")
    stage.attempt.push_upload()
    assert link.uploaded == b"0123"


@pytest.mark.parametrize(
    ("asked", "status", "passed"),
    [
        (lambda: Stage(), 103, True),
        (lambda: Stage(), 100, False),
        (lambda: Stage(upload(expect=True)), 100, True),
        (lambda: Stage(upload()), 100, True),
    ],
    ids=["103", "100 to a held body", "100 end to end", "100 nobody asked for"],
)
def test_interim_answers_pass_but_100_where_we_said_it(asked: Callable[[], Stage], status: int, passed: bool) -> None:
    stage = asked()
    stage.link.informs(status)
    assert stage.client.informational == ([status] if passed else [])


# --- tunnels ----------------------------------------------------------------------------------------------------------


def test_a_tunnel_passes_bytes_both_ways_without_a_deadline() -> None:
    stage = tunnel()
    assert stage.client.tunnel is not None and stage.client.body == b"early"
    stage.attempt.push_tunnel(b"up")
    stage.link.tunnels_on(b"down")
    assert stage.link.tunnelled == b"up" and stage.client.body == b"earlydown"
    assert stage.attempt.bytes_out == len(b"down")
    stage.clock.advance(TOTAL_S * 10)
    assert not stage.over()
    stage.link.ends()
    assert stage.ending is Ending.COMPLETE
    stage.check_let_go()


def test_tunnel_bytes_after_its_end_go_nowhere() -> None:
    stage = tunnel()
    link = stage.link
    link.lost()
    stage.attempt.push_tunnel(b"late")
    assert link.tunnelled == b""
