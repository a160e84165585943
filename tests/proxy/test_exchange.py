"""The way of a request: who is asked, what is re-sent, what the client gets, what is recorded, what is let go."""

from collections.abc import Callable

import msgspec
import pytest

from sidecar.core.breaker import State
from sidecar.kernel.errors import STATUS, Reason
from sidecar.kernel.exchange import ResponseHead
from sidecar.kernel.outcome import Ending, Result
from sidecar.policy.schema import (
    Adaptive,
    Breakers,
    Hedge,
    Limits,
    NodeBreaker,
    Overload,
    RequestBreaker,
    Retry,
    Seconds,
    SessionBreaker,
)
from sidecar.proxy.attempt import STALE_S
from sidecar.proxy.exchange import Exchange
from sidecar.proxy.request import Request
from sidecar.proxy.watchdog import SLOT_S
from sidecar.wire.refusal import error_event
from tests import under_test
from tests.harness import request
from tests.proxy.bench import (
    GAP_S,
    HEAD_S,
    TOTAL_S,
    TTFT_S,
    Bench,
    chat,
    endpoints,
    garbage_of,
    get,
    request_of,
    service,
)
from tests.proxy.fakes import JSON, FakeClient, FakeLink, head_of
from tests.under_test import COMPLETION, DONE, FINISH, ROLE, error_body, event, node_breaker, token

RETRY = Retry(attempts=3, budget_ratio=1.0, budget_min=10)
STREAM = [ROLE + token(0), token(1), FINISH + DONE]


def serves(link: FakeLink) -> FakeLink:
    """A whole stream."""
    link.heads()
    for part in STREAM:
        link.says(part)
    return link.ends()


def in_order(*behaviours: Callable[[FakeLink], object]) -> Callable[[FakeLink], None]:
    """Each new link behaves as the next of these; the last one goes on."""
    left = list(behaviours)

    def behave(link: FakeLink) -> None:
        (left.pop(0) if len(left) > 1 else left[0])(link)

    return behave


def answers(status: int, body: bytes = b"{}", **head: object) -> Callable[[FakeLink], object]:
    return lambda link: link.heads(head_of(status, JSON, len(body), **head)).says(body).ends()  # type: ignore[arg-type]


def resets(link: FakeLink) -> None:
    link.lost()


def fails(link: FakeLink) -> None:
    answers(500, error_body())(link)


# --- one attempt ------------------------------------------------------------------------------------------------------


def test_a_stream_goes_through_and_is_recorded_once_as_a_success() -> None:
    bench = Bench()
    client = bench.begin()
    assert bench.nodes[0].in_flight == 1 and bench.pipeline.live == 1
    serves(bench.link)
    assert client.body == b"".join(STREAM) and client.ended and client.done == 1
    (attempt,), (record,) = bench.recorder.attempts, bench.recorder.requests
    assert (attempt.ending, attempt.result, attempt.status) == (Ending.COMPLETE, Result.SUCCESS, 200)
    assert (record.status, record.result, record.reason, record.flag) == (200, Result.SUCCESS, None, "")
    assert (record.tokens, record.finish_reason, record.stream, record.attempts) == (2, "stop", True, 1)
    assert (record.model, record.service, record.endpoint) == ("m", "default", "e1:80")
    assert record.bytes_out == len(client.body)
    assert bench.held() == []


def test_an_answer_that_came_whole_keeps_its_length() -> None:
    bench = Bench()
    client = bench.begin(chat(stream=False))
    bench.link.heads(head_of(200, JSON, len(COMPLETION))).says(COMPLETION).ends()
    assert client.head is not None and client.head.content_length == len(COMPLETION)
    assert client.body == COMPLETION and client.ended
    (record,) = bench.recorder.requests
    assert (record.prompt_tokens, record.completion_tokens) == (3, 1)
    assert bench.held() == []


def test_the_answer_names_request_endpoint_version_and_attempts() -> None:
    bench = Bench()
    client = bench.begin()
    serves(bench.link)
    lines = client.extra.split(b"\r\n")
    assert set(lines) == {
        b"x-request-id: id-of-ours",
        b"x-sidecar-endpoint: e1:80",
        b"x-sidecar-version: v1",
        b"x-sidecar-attempts: 1",
        b"",
    }


@pytest.mark.parametrize(
    ("given", "kept"), [(b"abc-1", True), (b"with space", False), (b"", False), (b"x" * 129, False)],
    ids=["safe", "space", "empty", "long"],
)  # fmt: skip
def test_a_clients_request_id_is_kept_if_it_is_safe(given: bytes, kept: bool) -> None:
    bench = Bench()
    bench.begin(request_of(under_test.chat(headers=[b"x-request-id: " + given])))
    wanted = given if kept else b"id-of-ours"
    assert b"x-request-id: %b\r\n" % wanted in bench.link.head
    serves(bench.link)
    assert bench.recorder.requests[0].request_id == wanted.decode()


def test_the_trace_id_is_read_from_traceparent() -> None:
    bench = Bench()
    bench.begin(request_of(under_test.chat(headers=[b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7-01"])))
    serves(bench.link)
    assert bench.recorder.requests[0].trace_id == "0af7651916cd43dd8448eb211c80319c"


def test_no_inference_counts_neither_for_nor_against_its_node() -> None:
    bench = Bench(service(breakers=node_breaker(1)))
    bench.begin(get())
    bench.link.heads(head_of(500, JSON)).ends()
    bench.begin(get())
    bench.link.heads(head_of(200, JSON)).ends()
    assert [record.result for record in bench.recorder.attempts] == [Result.IGNORED] * 2
    assert bench.nodes[0].breaker.state is State.CLOSED


def test_no_inference_has_no_session_and_no_request_breaker() -> None:
    bench = Bench()
    bench.begin(request_of(request(b"/v1/models", headers=[b"x-session-id: s"])))
    bench.link.heads(head_of(200, JSON)).ends()
    assert not bench.state.sessions and not bench.state.request_breakers
    assert bench.recorder.requests[0].session == ""


# --- refusals ---------------------------------------------------------------------------------------------------------


def _busy(bench: Bench) -> None:
    bench.nodes[0].overload_until = bench.clock.now + 7.0


def _open(bench: Bench) -> None:
    bench.nodes[0].breaker.force("open", bench.clock.now, "test")


def _draining(bench: Bench) -> None:
    bench.pipeline.draining = True


def _small(bench: Bench) -> None:
    bench.state.use(msgspec.structs.replace(bench.state.policy, limits=Limits(body_bytes=1024)), 0.0)


REFUSED: list[tuple[str, Callable[[Bench], None], Callable[[], Request], Reason, bool]] = [
    ("draining", _draining, chat, Reason.DRAINING, True),
    ("full", _busy, chat, Reason.OVERLOADED, True),
    ("open", _open, chat, Reason.BREAKER_OPEN, True),
    ("unknown model", lambda bench: None, lambda: chat(model="other"), Reason.UNKNOWN_MODEL, False),
    ("no JSON", lambda bench: None, lambda: request_of(_raw(b"{")), Reason.BAD_REQUEST, False),
    ("no object", lambda bench: None, lambda: request_of(_raw(b"[]")), Reason.BAD_REQUEST, False),
    ("too large for its service", _small, lambda: request_of(under_test.chat(text="x" * 2000)),
     Reason.TOO_LARGE, False),
]  # fmt: skip


def _raw(body: bytes) -> bytes:
    return request(under_test.CHAT, method=b"POST", body=body)


@pytest.mark.parametrize(
    ("prepare", "asked", "reason", "waits"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_a_refusal_reaches_no_engine_counts_for_nobody_and_holds_nothing(
    prepare: Callable[[Bench], None], asked: Callable[[], Request], reason: Reason, waits: bool
) -> None:
    bench = Bench(service(models=("m",), breakers=Breakers()))
    prepare(bench)
    client = bench.begin(asked())
    assert client.refusal is not None and client.refusal.reason is reason and client.refusal.message
    assert (client.refusal.retry_after_s is not None) is waits
    assert bench.connector.openings == [] and bench.recorder.attempts == []
    (record,) = bench.recorder.requests
    assert (record.status, record.reason, record.attempts) == (STATUS[reason], reason, 0)
    assert client.done == 1 and bench.held() == []


def test_a_wait_is_told_to_the_second() -> None:
    bench = Bench()
    _busy(bench)
    client = bench.begin()
    assert client.refusal is not None
    assert client.refusal.retry_after_s == pytest.approx(7.0)


def test_a_draining_sidecar_still_finishes_what_it_began() -> None:
    bench = Bench()
    client = bench.begin()
    bench.pipeline.draining = True
    serves(bench.link)
    assert client.ended and client.body == b"".join(STREAM)


def test_an_open_request_breaker_refuses_its_kind_only() -> None:
    rule = RequestBreaker(consecutive=1, open_s=Seconds(5))
    bench = Bench(service(breakers=msgspec.structs.replace(under_test.BREAKERS_OFF, request=rule)))
    bench.connector.on_open = fails
    bench.begin()
    client = bench.begin()
    assert client.refusal is not None and client.refusal.reason is Reason.REQUEST_OPEN
    assert client.refusal.retry_after_s == pytest.approx(5.0)
    other = bench.begin(request_of(request(b"/v1/embeddings", method=b"POST", body=b'{"model":"m","input":"x"}')))
    assert other.refusal is None and other.head is not None and other.head.status == 500


def test_a_request_breaker_may_go_by_a_header() -> None:
    rule = RequestBreaker(consecutive=1, key="header:x-tenant")
    bench = Bench(service(breakers=msgspec.structs.replace(under_test.BREAKERS_OFF, request=rule)))
    bench.connector.on_open = fails

    def of(tenant: bytes) -> Request:
        return request_of(under_test.chat(headers=[b"X-Tenant: " + tenant]))

    bench.begin(of(b"a"))
    assert bench.begin(of(b"a")).refusal is not None
    assert bench.begin(of(b"b")).refusal is None


def test_an_open_session_is_refused_and_others_are_not() -> None:
    rule = SessionBreaker(consecutive=2, open_s=Seconds(30))
    bench = Bench(service(breakers=msgspec.structs.replace(under_test.BREAKERS_OFF, session=rule)))
    bench.connector.on_open = fails
    for _ in range(2):
        bench.begin(chat(session="s"))
    client = bench.begin(chat(session="s"))
    assert client.refusal is not None and client.refusal.reason is Reason.SESSION_OPEN
    assert bench.begin(chat(session="t")).refusal is None
    assert bench.begin().refusal is None


def test_a_session_counts_once_for_all_attempts_of_a_request() -> None:
    rule = SessionBreaker(consecutive=2)
    bench = Bench(service(3, retry=RETRY, breakers=msgspec.structs.replace(under_test.BREAKERS_OFF, session=rule)))
    bench.connector.on_open = fails
    bench.begin(chat(session="s"))
    assert len(bench.recorder.attempts) == 3
    assert bench.state.sessions and all(
        session.breaker is not None and session.breaker.state is State.CLOSED
        for session in bench.state.sessions.values()
    )


# --- retries ----------------------------------------------------------------------------------------------------------


def _waits_in_vain(bench: Bench) -> None:
    bench.connector.connect()
    bench.clock.advance(TTFT_S + SLOT_S)


RESENT: list[tuple[str, Callable[[Bench], object], Ending]] = [
    ("connect refused", lambda bench: bench.connector.refuse(), Ending.CONNECT_FAILED),
    ("reset", lambda bench: bench.connector.connect().lost(), Ending.RESET_BEFORE_HEAD),
    ("rubbish", lambda bench: bench.connector.connect().talks_rubbish(), Ending.BAD_BYTES),
    ("500", lambda bench: answers(500)(bench.connector.connect()), Ending.SERVER_ERROR),
    ("429", lambda bench: answers(429)(bench.connector.connect()), Ending.OVERLOADED),
    ("head and no event", lambda bench: bench.connector.connect().heads().ends(), Ending.EMPTY),
    ("role and loss", lambda bench: bench.connector.connect().heads().says(ROLE).lost(), Ending.TRUNCATED),
    ("in-band error first", lambda bench: bench.connector.connect().heads().says(event(error_body())).ends(),
     Ending.ERROR_IN_BAND),
    ("no head", _waits_in_vain, Ending.TTFT_TIMEOUT),
]  # fmt: skip


@pytest.mark.parametrize(("act", "ending"), [case[1:] for case in RESENT], ids=[case[0] for case in RESENT])
def test_what_failed_before_the_first_byte_is_sent_again_elsewhere(
    act: Callable[[Bench], None], ending: Ending
) -> None:
    bench = Bench(service(2, retry=RETRY))
    bench.connector.later = True
    client = bench.begin()
    first = bench.connector.openings[-1].key
    act(bench)
    assert bench.connector.openings[-1].key != first
    serves(bench.connector.connect())
    assert client.body == b"".join(STREAM) and client.ended
    assert b"x-sidecar-attempts: 2\r\n" in client.extra
    assert [record.ending for record in bench.recorder.attempts] == [ending, Ending.COMPLETE]
    (record,) = bench.recorder.requests
    assert (record.result, record.attempts) == (Result.SUCCESS, 2)
    assert bench.held() == []


def test_a_resent_request_is_the_same_to_the_byte() -> None:
    bench = Bench(service(2, retry=RETRY))
    bench.connector.on_open = in_order(fails, serves)
    bench.begin()
    first, second = bench.connector.links
    assert (first.head, first.body) == (second.head, second.body)
    assert first.body.startswith(b"{")


@pytest.mark.parametrize("attempts", [1, 2, 3, 5])
def test_attempts_are_counted_as_policy_says_and_the_last_answer_is_the_clients(attempts: int) -> None:
    bench = Bench(service(2, retry=Retry(attempts=attempts, budget_ratio=1.0, budget_min=10)))
    count = iter(range(1, 10))
    bench.connector.on_open = lambda link: answers(500, b'{"error":"%d"}' % next(count))(link)
    client = bench.begin()
    assert len(bench.recorder.attempts) == attempts
    assert client.head is not None and client.head.status == 500
    assert client.body == b'{"error":"%d"}' % attempts and client.ended
    assert bench.held() == []


@pytest.mark.parametrize(
    ("retry", "resent"),
    [
        (Retry(attempts=2, budget_ratio=0.0, budget_min=0), 0),
        (Retry(attempts=2, budget_ratio=0.0, budget_min=3), 3),
        (Retry(attempts=2, budget_ratio=0.2, budget_min=0), 4),
        (Retry(attempts=2, budget_ratio=0.2, budget_min=10), 10),
    ],
    ids=["none", "three at least", "a fifth", "the larger"],
)
def test_retries_stay_within_their_budget(retry: Retry, resent: int) -> None:
    bench = Bench(service(2, retry=retry))
    bench.connector.on_open = fails
    for _ in range(20):
        bench.begin()
    assert len(bench.recorder.attempts) - 20 == resent
    assert bench.held() == []


def test_the_budget_comes_back_with_time() -> None:
    bench = Bench(service(2, retry=Retry(attempts=2, budget_ratio=0.0, budget_min=1, window_s=Seconds(10))))
    bench.connector.on_open = fails
    bench.begin()
    bench.begin()
    assert len(bench.recorder.attempts) == 3
    bench.clock.advance(11.0)
    bench.begin()
    assert len(bench.recorder.attempts) == 5


NEVER_RESENT: list[tuple[str, Callable[[], Request], Callable[[FakeLink], object], Ending]] = [
    ("400", chat, answers(400), Ending.CLIENT_ERROR),
    ("413", chat, answers(413), Ending.CONTEXT_LENGTH),
    ("a token came", chat, lambda link: link.heads().says(token(0)).lost(), Ending.TRUNCATED),
    ("64 KiB came", chat, lambda link: link.heads().says(b":" * 70_000).lost(), Ending.TRUNCATED),
    ("reset of a PATCH", lambda: get(method=b"PATCH"), resets, Ending.RESET_BEFORE_HEAD),
    ("500 to an upload", lambda: request_of(request(b"/up", method=b"PUT", body=b"x")), resets,
     Ending.RESET_BEFORE_HEAD),
]  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "act", "ending"), [case[1:] for case in NEVER_RESENT], ids=[case[0] for case in NEVER_RESENT]
)
def test_what_may_not_be_sent_twice_is_not(
    asked: Callable[[], Request], act: Callable[[FakeLink], object], ending: Ending
) -> None:
    bench = Bench(service(3, retry=RETRY))
    bench.connector.on_open = act
    bench.begin(asked())
    assert [record.ending for record in bench.recorder.attempts] == [ending]
    assert bench.held() == []


def test_a_bodiless_get_and_an_unsent_upload_may_be_sent_again() -> None:
    bench = Bench(service(2, retry=RETRY))
    bench.connector.on_open = in_order(resets, answers(200))
    client = bench.begin(get())
    assert client.head is not None and client.head.status == 200
    bench.connector.later = True
    client = bench.begin(request_of(request(b"/up", method=b"POST", body=b"data")))
    bench.connector.refuse()
    bench.connector.connect()
    assert bench.link.uploaded == b"data" and bench.link.upload_ended


def test_an_endpoint_that_was_slow_or_full_is_not_asked_again_by_the_same_request() -> None:
    bench = Bench(service(1, retry=RETRY))
    client = bench.begin()
    bench.clock.advance(TTFT_S + SLOT_S)
    assert len(bench.recorder.attempts) == 1
    assert client.refusal is not None and client.refusal.reason is Reason.TTFT_TIMEOUT
    bench.connector.on_open = answers(429, b'{"error":"full"}')
    client = bench.begin()
    assert client.head is not None and client.head.status == 429 and client.body == b'{"error":"full"}'
    assert len(bench.recorder.attempts) == 2


def test_an_only_endpoint_that_failed_at_once_is_asked_again() -> None:
    bench = Bench(service(1, retry=RETRY))
    bench.connector.on_open = in_order(fails, resets, serves)
    client = bench.begin()
    assert client.ended and client.body == b"".join(STREAM)
    assert len(bench.recorder.attempts) == 3


def test_nothing_is_sent_again_after_the_total_deadline() -> None:
    bench = Bench(service(2, retry=RETRY))
    client = bench.begin(get())
    link = bench.link
    bench.clock.now += TOTAL_S  # the watchdog has not looked yet
    link.lost()
    assert len(bench.recorder.attempts) == 1
    assert client.refusal is not None
    assert bench.held() == []


def test_a_stale_connection_costs_no_attempt_and_no_budget() -> None:
    bench = Bench(service(1))
    bench.connector.used = True
    client = bench.begin()
    bench.clock.advance(STALE_S / 2)
    bench.link.lost()
    serves(bench.link)
    assert client.ended
    (attempt,) = bench.recorder.attempts
    assert attempt.ending is Ending.COMPLETE and not attempt.reused_connection
    assert b"x-sidecar-attempts: 1\r\n" in client.extra


def test_an_overloaded_endpoint_is_left_alone_as_long_as_it_asked() -> None:
    bench = Bench(service(1, overload=Overload(retry_after_cap_s=Seconds(60))))
    bench.connector.on_open = answers(429, retry_after=((b"retry-after", b"20"),))
    bench.begin()
    assert bench.nodes[0].overload_until == pytest.approx(bench.clock.now + 20.0)
    bench.clock.advance(19.9)
    refused = bench.begin()
    assert refused.refusal is not None and refused.refusal.reason is Reason.OVERLOADED
    bench.clock.advance(0.2)
    bench.connector.on_open = serves
    assert bench.begin().ended


# --- fallback ---------------------------------------------------------------------------------------------------------


def with_fallback(attempts: int = 1) -> Bench:
    retry = Retry(attempts=attempts, budget_min=100)
    first = service(1, name="big", fallback="small", breakers=node_breaker(1), retry=retry)
    second = msgspec.structs.replace(
        service(1, name="small", models=()), endpoints=endpoints(2)[1:], breakers=node_breaker(1)
    )
    return Bench(first, second)


def test_the_fallback_serves_while_nothing_here_can() -> None:
    bench = with_fallback()
    bench.connector.on_open = in_order(fails, serves)
    bench.begin()
    assert bench.nodes[0].breaker.state is State.OPEN
    client = bench.begin(chat(session="s"))
    assert client.ended and b"x-sidecar-endpoint: e2:80\r\n" in client.extra
    assert bench.recorder.attempts[-1].service == "small"
    # The detour does not bind the session.
    (session,) = bench.service("big").sessions.values()
    assert session.node_key is None
    assert bench.held() == []


def test_a_fallback_that_cannot_serve_either_says_why() -> None:
    bench = with_fallback()
    for node in bench.nodes:
        node.breaker.force("open", bench.clock.now, "test")
    client = bench.begin()
    assert client.refusal is not None and client.refusal.reason is Reason.BREAKER_OPEN


@pytest.mark.parametrize(("attempts", "asked"), [(1, ["e1:80"]), (2, ["e1:80", "e2:80"])], ids=["no retry", "retry"])
def test_what_failed_here_goes_to_the_fallback_if_it_may_be_sent_again(attempts: int, asked: list[str]) -> None:
    bench = with_fallback(attempts)
    bench.connector.on_open = fails
    client = bench.begin()
    assert client.head is not None and client.head.status == 500
    assert [record.endpoint for record in bench.recorder.attempts] == asked


# --- cut streams ------------------------------------------------------------------------------------------------------

Step = Callable[[Bench, FakeClient], object]


def _running(client: FakeClient) -> Exchange:
    assert client.exchange is not None
    return client.exchange


def _drains(bench: Bench, client: FakeClient) -> None:
    _running(client).cut(Reason.DRAINING)


def _falls_silent(bench: Bench, client: FakeClient) -> None:
    bench.clock.advance(GAP_S + SLOT_S)


CUTS: list[tuple[str, Step, Reason]] = [
    ("lost", lambda bench, client: bench.link.lost(), Reason.UPSTREAM_TRUNCATED),
    ("clean end without a marker", lambda bench, client: bench.link.ends(), Reason.UPSTREAM_TRUNCATED),
    ("rubbish", lambda bench, client: bench.link.talks_rubbish(), Reason.UPSTREAM_TRUNCATED),
    ("silence", _falls_silent, Reason.TOKEN_GAP_TIMEOUT),
    ("drain", _drains, Reason.DRAINING),
]


@pytest.mark.parametrize("half", [False, True], ids=["between events", "half an event pending"])
@pytest.mark.parametrize(("act", "reason"), [case[1:] for case in CUTS], ids=[case[0] for case in CUTS])
def test_a_cut_stream_ends_with_one_error_event_and_no_done(act: Step, reason: Reason, half: bool) -> None:
    bench = Bench()
    client = bench.begin()
    sent = ROLE + token(0) + (b'data: {"id":' if half else b"")
    bench.link.heads().says(ROLE + token(0))
    if half:
        bench.link.says(b'data: {"id":')
    act(bench, client)
    assert client.body.startswith(sent)
    tail = client.body[len(sent) :]
    assert tail.startswith(b"\n\ndata: ") is half
    kind, _, payload = tail.strip().partition(b" ")
    assert kind == b"data:"
    told = msgspec.json.decode(payload, type=dict[str, dict[str, str | None]])["error"]
    assert told["code"] == reason and set(told) == {"message", "type", "param", "code"} and told["message"]
    assert b"[DONE]" not in client.body
    assert client.ended and client.closes and not client.is_cut
    (record,) = bench.recorder.requests
    assert (record.reason, record.status) == (reason, 200)
    assert bench.held() == []


def test_our_event_is_the_one_that_error_event_makes() -> None:
    bench = Bench()
    client = bench.begin()
    bench.link.heads().says(token(0)).ends()
    assert client.body.endswith(error_event(Reason.UPSTREAM_TRUNCATED, "the stream ended without its end marker"))


@pytest.mark.parametrize(
    ("asked", "head", "body"),
    [
        (chat, head_of(length=5000), token(0)),
        (lambda: chat(stream=False), head_of(200, JSON), b" " * 70_000),
        (get, head_of(200, JSON), b"{"),
    ],
    ids=["a length was promised", "JSON", "no inference"],
)
def test_what_cannot_be_ended_in_band_is_broken(asked: Callable[[], Request], head: ResponseHead, body: bytes) -> None:
    bench = Bench()
    client = bench.begin(asked())
    bench.link.heads(head).says(body).lost()
    assert client.is_cut and not client.ended and client.body == body
    assert client.done == 1 and bench.held() == []


def test_an_in_band_error_of_the_engine_passes_unchanged_and_counts() -> None:
    bench = Bench(service(breakers=node_breaker(1)))
    client = bench.begin()
    told = event(error_body(b"engine died")) + DONE
    bench.link.heads().says(token(0)).says(told).ends()
    assert client.body == token(0) + told and client.ended and not client.is_cut
    assert bench.nodes[0].breaker.state is State.OPEN


@pytest.mark.parametrize(
    ("reason", "ending", "result"),
    [
        (Reason.DRAINING, Ending.ABANDONED, Result.IGNORED),
        (Reason.CLIENT_TIMEOUT, Ending.CLIENT_SLOW, Result.IGNORED),
        (Reason.BAD_REQUEST, Ending.CLIENT_MALFORMED, Result.IGNORED),
        (Reason.TOO_LARGE, Ending.CLIENT_MALFORMED, Result.IGNORED),
    ],
    ids=lambda value: str(value.value),
)
def test_what_we_cut_is_nobodys_fault_and_told_before_the_head(reason: Reason, ending: Ending, result: Result) -> None:
    bench = Bench(service(retry=RETRY, breakers=node_breaker(1)))
    client = bench.begin()
    assert client.exchange is not None
    client.exchange.cut(reason, "because")
    assert client.refusal is not None and client.refusal.reason is reason
    (attempt,) = bench.recorder.attempts
    assert (attempt.ending, attempt.result) == (ending, result)
    assert bench.recorder.requests[0].status == STATUS[reason]
    assert bench.held() == []


# --- probes and floors ------------------------------------------------------------------------------------------------


def open_node(bench: Bench) -> None:
    """The first node has failed and may be probed."""
    bench.connector.on_open = fails
    bench.begin()
    assert bench.nodes[0].breaker.state is State.OPEN
    bench.connector.on_open = None
    bench.clock.advance(10.0)


def probing(**changes: object) -> Bench:
    return Bench(service(1, breakers=node_breaker(1, open_s=Seconds(10), **changes)))


def test_only_as_many_probes_as_configured_reach_an_engine() -> None:
    bench = probing(probes=2)
    open_node(bench)
    clients = [bench.begin() for _ in range(5)]
    assert [client.refusal is None for client in clients] == [True, True, False, False, False]
    assert bench.nodes[0].breaker.probes_out == 2
    for link in bench.connector.links[-2:]:
        serves(link)
    assert bench.nodes[0].breaker.state is State.CLOSED
    assert bench.held() == []


@pytest.mark.parametrize("after", ["left", "slow", "400", "drain"])
def test_a_probe_that_says_nothing_gives_its_slot_back(after: str) -> None:
    bench = probing()
    open_node(bench)
    client = bench.begin()
    assert client.exchange is not None
    match after:
        case "left":
            client.exchange.client_left()
        case "slow":
            client.exchange.client_slow()
        case "drain":
            client.exchange.cut(Reason.DRAINING)
        case _:
            answers(400)(bench.link)
    assert bench.nodes[0].breaker.state is State.HALF_OPEN
    assert bench.held() == []
    assert bench.begin().refusal is None


@pytest.mark.parametrize(
    ("last", "ending", "state"),
    [
        (FINISH + DONE, Ending.COMPLETE, State.CLOSED),
        (b"data: " + error_body() + b"\n\n", Ending.ERROR_IN_BAND, State.OPEN),
        (FINISH, Ending.CLIENT_LEFT, State.HALF_OPEN),
        (token(1), Ending.CLIENT_LEFT, State.HALF_OPEN),
    ],
    ids=["done", "error", "finish", "token"],
)
def test_a_client_that_leaves_once_it_was_told_the_end_takes_no_verdict_along(
    last: bytes, ending: Ending, state: State
) -> None:
    bench = probing(successes=1)
    open_node(bench)
    client = bench.begin()
    bench.link.heads().says(ROLE + token(0)).says(last)
    assert client.exchange is not None
    client.exchange.client_left()  # OpenAI's clients do, before the engine's framing ended
    assert bench.recorder.attempts[-1].ending is ending
    assert bench.nodes[0].breaker.state is state
    assert client.done == 1
    assert bench.held() == []


def test_breaker_moves_are_recorded_in_order() -> None:
    bench = probing(successes=1)
    open_node(bench)
    bench.connector.on_open = serves
    bench.begin()
    assert [(move.old, move.new) for move in bench.recorder.transitions] == [
        (State.CLOSED, State.OPEN),
        (State.OPEN, State.HALF_OPEN),
        (State.HALF_OPEN, State.CLOSED),
    ]


# --- sessions ---------------------------------------------------------------------------------------------------------


def test_a_session_is_bound_where_it_was_accepted_and_not_before() -> None:
    bench = Bench(service(2))
    bench.begin(chat(session="s"))
    (session,) = bench.state.sessions.values()
    assert session.node_key is None
    bench.link.heads().says(token(0))
    assert session.node_key == "e1:80"


def test_an_error_binds_no_session() -> None:
    bench = Bench(service(2))
    bench.connector.on_open = fails
    bench.begin(chat(session="s"))
    (session,) = bench.state.sessions.values()
    assert session.node_key is None


def test_a_moved_session_is_told_so_once() -> None:
    bench = Bench(service(2, breakers=node_breaker(1), retry=RETRY))
    bench.connector.on_open = serves
    bench.begin(chat(session="s"))
    bench.nodes[0].breaker.force("open", bench.clock.now, "test")
    moved, bound = bench.begin(chat(session="s")), bench.begin(chat(session="s"))
    assert b"x-sidecar-session: moved\r\n" in moved.extra
    assert b"x-sidecar-session" not in bound.extra


# --- late requests ----------------------------------------------------------------------------------------------------


def learnt(**changes: object) -> Bench:
    """Two endpoints that answered in half a second so far; late requests move."""
    adaptive = Adaptive(min_samples=30)
    rule = node_breaker(1, open_s=Seconds(10), successes=1, adaptive=adaptive)
    bench = Bench(service(2, breakers=rule, retry=RETRY, hedge=Hedge(mode="enforce"), **changes))
    for _ in range(60):
        bench.begin()
        bench.clock.advance(0.5)
        serves(bench.link)
        bench.fleet.tick(bench.clock.now)
    assert bench.held() == []
    return bench


LATE_S = 10.0
"""Late by any measure, and long before a deadline."""


def test_a_late_request_moves_to_who_is_well() -> None:
    bench = learnt()
    client = bench.begin()
    silent = bench.link
    bench.clock.advance(LATE_S)
    assert silent.aborted and bench.link is not silent and bench.recorder.attempts[-1].ending is Ending.LATE
    serves(bench.link)
    assert client.ended and bench.recorder.requests[-1].attempts == 2 and bench.held() == []


def test_a_late_request_stays_where_only_a_version_without_a_part_is_left() -> None:
    one, other = endpoints(2)
    two = (one, msgspec.structs.replace(other, version="v2"))
    bench = learnt(endpoints=two, split={"v1": 1.0, "v2": 0.0})
    client = bench.begin()
    bench.clock.advance(LATE_S)
    assert bench.state.nodes[bench.nodes[0].key].late == 1 and not bench.link.aborted
    serves(bench.link)
    assert client.ended and bench.recorder.requests[-1].attempts == 1 and bench.held() == []


def test_a_late_request_is_no_probe_of_who_is_on_trial() -> None:
    bench = learnt()
    bench.begin()
    bench.link.lost()
    serves(bench.link)
    bench.clock.advance(9.9)
    client = bench.begin()
    bench.clock.advance(LATE_S)
    assert bench.nodes[0].breaker.can_probe(bench.clock.now) and bench.nodes[1].late == 1
    assert not bench.link.aborted
    serves(bench.link)
    assert client.ended and bench.recorder.requests[-1].attempts == 1 and bench.held() == []


def test_a_crash_of_ours_over_a_late_request_leaves_it_its_deadlines() -> None:
    bench = learnt()
    client, other = bench.begin(), bench.begin()
    clock = bench.pipeline.clock
    bench.pipeline.clock = no_time  # compiled, no function can be replaced
    bench.clock.advance(LATE_S)
    bench.pipeline.clock = clock
    assert [str(each) for each in bench.crashes] == ["a bug"] * 2
    bench.clock.advance(TOTAL_S)
    assert client.refusal is not None and other.refusal is not None
    assert bench.held() == []


# --- leaving at every point -------------------------------------------------------------------------------------------


def later(count: int = 1, **changes: object) -> Callable[[], Bench]:
    def make() -> Bench:
        bench = Bench(service(count, **changes))
        bench.connector.later = True
        return bench

    return make


def probe_bench() -> Bench:
    bench = probing()
    open_node(bench)
    bench.connector.later = True
    return bench


def connect(bench: Bench, client: FakeClient) -> object:
    return bench.connector.connect()


def connect_used(bench: Bench, client: FakeClient) -> object:
    return bench.connector.connect(used=True)


def upload_more(bench: Bench, client: FakeClient) -> None:
    exchange = _running(client)
    exchange._request.pieces.append(b"45")
    exchange.upload()


def upload_rest(bench: Bench, client: FakeClient) -> None:
    exchange = _running(client)
    exchange._request.pieces.append(b"6789")
    exchange._request.complete = True
    exchange.upload()


def pause(bench: Bench, client: FakeClient) -> None:
    _running(client).client_paused()


def resume(bench: Bench, client: FakeClient) -> None:
    _running(client).client_resumed()


def _say(data: bytes) -> Step:
    return lambda bench, client: bench.link.says(data)


def _head(bench: Bench, client: FakeClient) -> object:
    return bench.link.heads()


def _json_head(bench: Bench, client: FakeClient) -> object:
    return bench.link.heads(head_of(200, JSON))


def _informs(bench: Bench, client: FakeClient) -> object:
    return bench.link.informs()


def _loses(bench: Bench, client: FakeClient) -> object:
    return bench.link.lost()


def _fails(bench: Bench, client: FakeClient) -> None:
    fails(bench.link)


def half_uploaded() -> Request:
    return request_of(request(b"/up", method=b"PUT", headers=[b"Content-Length: 10"]) + b"0123")


def websocket() -> Request:
    return request_of(request(b"/ws", headers=[b"Connection: Upgrade", b"Upgrade: websocket"]))


WALKS: list[tuple[str, Callable[[], Bench], Callable[[], Request], list[Step]]] = [
    ("stream", later(), chat, [connect, _informs, _head, _say(ROLE), _say(token(0)), _say(b"data: {"), pause, resume]),
    ("session", later(2, breakers=Breakers()), lambda: chat(session="s"), [connect, _head, _say(token(0))]),
    ("answer", later(), lambda: chat(stream=False), [connect, _json_head, _say(b"{"), _say(b" " * 70_000)]),
    ("retry", later(2, retry=RETRY), chat, [connect, _fails, connect, _loses, connect, _head, _say(token(0))]),
    ("stale", later(), chat, [connect_used, _loses, connect, _head, _say(token(0))]),
    ("upload", later(), half_uploaded, [connect, upload_more, _json_head, _say(b"x"), upload_rest, _say(b"y")]),
    ("paused from the start", later(), chat, [pause, connect, resume, _head, _say(ROLE)]),
    ("tunnel", later(), websocket, [connect, lambda bench, client: bench.link.tunnels(b"x"), pause]),
    ("probe", probe_bench, chat, [connect, _head, _say(token(0))]),
    ("plain", later(), get, [connect, _json_head, _say(b"{")]),
]


def _leaves(bench: Bench, client: FakeClient) -> None:
    _running(client).client_left()


def _reads_no_more(bench: Bench, client: FakeClient) -> None:
    _running(client).client_slow()


def _breaks_the_upload(bench: Bench, client: FakeClient) -> None:
    _running(client).cut(Reason.BAD_REQUEST)


LEAVING: dict[str, Step] = {
    "client leaves": _leaves,
    "client is slow": _reads_no_more,
    "drain": _drains,
    "bad upload": _breaks_the_upload,
}

POINTS = [
    pytest.param(*walk[1:3], walk[3][:count], id=f"{walk[0]} after {count}")
    for walk in WALKS
    for count in range(len(walk[3]) + 1)
]


@pytest.mark.parametrize("leave", list(LEAVING.values()), ids=list(LEAVING))
@pytest.mark.parametrize(("make", "asked", "steps"), POINTS)
def test_ending_it_at_any_point_leaves_nothing_held(
    make: Callable[[], Bench], asked: Callable[[], Request], steps: list[Step], leave: Step
) -> None:
    bench = make()
    records = len(bench.recorder.requests)
    client = bench.begin(asked())
    for step in steps:
        step(bench, client)
    before = len(bench.recorder.attempts)
    leave(bench, client)
    assert bench.held() == []
    assert client.done == 1
    assert all(link.aborted or link.sink is None for link in bench.connector.links)
    (last,) = bench.recorder.attempts[before:]
    assert last.result is Result.IGNORED
    assert len(bench.recorder.requests) == records + 1
    assert bench.crashes == []
    # Nothing of it stirs later.
    bench.clock.advance(TOTAL_S * 2)
    assert len(bench.recorder.requests) == records + 1 and client.done == 1


@pytest.mark.parametrize(("make", "asked", "steps"), POINTS)
def test_silence_at_any_point_ends_by_a_deadline_and_leaves_nothing_held(
    make: Callable[[], Bench], asked: Callable[[], Request], steps: list[Step]
) -> None:
    bench = make()
    client = bench.begin(asked())
    for step in steps:
        step(bench, client)
    if not bench.connector.links or bench.connector.openings[-1].sink is not None:
        bench.connector.refuse()  # connecting has its deadline in the pool
    if client.exchange is not None and client.tunnel is None:
        for _ in range(4):  # a retry may have to connect, too
            bench.clock.advance(max(HEAD_S, TTFT_S, TOTAL_S) + SLOT_S)
            if bench.connector.pending:
                bench.connector.refuse()
    elif client.exchange is not None:
        client.exchange.client_left()  # a tunnel has no deadline
    assert client.done == 1
    assert bench.held() == []


@pytest.mark.parametrize(("make", "asked", "steps"), POINTS)
def test_no_request_leaves_a_cycle_behind(
    make: Callable[[], Bench], asked: Callable[[], Request], steps: list[Step]
) -> None:
    bench = make()
    # Parsers hold on to themselves; they are not looked at here.
    requests = [asked(), asked()]

    def once() -> None:
        client = bench.begin(requests.pop())
        for step in steps:
            step(bench, client)
        if client.exchange is not None:
            client.exchange.client_left()
        bench.connector.openings.clear()

    assert garbage_of(once) == 0


def test_a_request_that_went_well_leaves_no_cycle_behind() -> None:
    bench = Bench(service(2, retry=RETRY))
    requests = [chat(session="s"), request_of(_raw(b"{")), chat(session="s"), request_of(_raw(b"{"))]

    def once() -> None:
        bench.connector.on_open = in_order(fails, serves)
        bench.begin(requests.pop())
        bench.begin(requests.pop())
        bench.connector.openings.clear()
        bench.connector.on_open = None

    assert garbage_of(once) == 0


# --- crashes ----------------------------------------------------------------------------------------------------------


def no_time() -> float:
    raise RuntimeError("a bug")


def crash(*_: object, **__: object) -> None:
    raise RuntimeError("a bug")


@pytest.mark.parametrize("where", ["open", "scheme", "attempt", "request"])
def test_a_crash_of_ours_breaks_its_own_request_alone(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = probing()
    open_node(bench)
    with monkeypatch.context() as patch:
        match where:
            case "open":
                patch.setattr(bench.connector, "open", crash)
            case "scheme":  # read while the engine's head is made
                patch.setattr(FakeClient, "scheme", property(crash))
            case _:
                patch.setattr(bench.recorder, where, crash)
        links = len(bench.connector.links)
        client = bench.begin()
        for link in bench.connector.links[links:]:
            serves(link)
    assert [str(each) for each in bench.crashes] == ["a bug"]
    told = client.refusal is not None and client.refusal.reason is Reason.INTERNAL
    assert (client.is_cut or told) and client.done == 1
    if told and bench.recorder.requests:
        record = bench.recorder.requests[-1]
        assert (record.status, record.reason) == (500, Reason.INTERNAL)
    assert bench.held() == []
    bench.connector.on_open = serves
    assert bench.begin().ended


def test_a_crash_within_a_read_of_the_engine_ends_the_request_when_the_connection_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    client = bench.begin()
    monkeypatch.setattr(client, "send_head", crash)
    bench.link.heads()
    with pytest.raises(RuntimeError):
        bench.link.says(token(0))
    monkeypatch.undo()
    client.head = head_of()
    bench.link.lost()  # what the event loop does with a connection whose protocol raised
    assert client.done == 1
    assert bench.held() == []


# --- what policy changes ----------------------------------------------------------------------------------------------


def test_connections_learn_the_largest_limits_of_all_services() -> None:
    small = service(1, name="a", models=("a",), limits=Limits(body_bytes=2048))
    large = service(1, name="b", models=("b",), limits=Limits(body_bytes=4096))
    bench = Bench(small, large)
    assert bench.pipeline.body_limit() == 4096
    assert bench.pipeline.idle_client_s() == 60.0
    bench.fleet.apply(msgspec.structs.replace(bench.pipeline.store.current, services=(small,)), bench.clock.now)
    assert bench.pipeline.body_limit() == 4096
    bench.pipeline.policy_changed()
    assert bench.pipeline.body_limit() == 2048


def test_a_request_keeps_the_deadlines_it_began_with() -> None:
    bench = Bench()
    client = bench.begin()
    snapshot = bench.pipeline.store.current
    patient = service(deadlines=under_test.PATIENT)
    bench.pipeline.store.swap(msgspec.structs.replace(snapshot, services=(patient,)))
    bench.fleet.apply(bench.pipeline.store.current, bench.clock.now)
    bench.clock.advance(TTFT_S + SLOT_S)
    assert client.refusal is not None and client.refusal.reason is Reason.TTFT_TIMEOUT


def test_an_endpoint_taken_away_mid_request_still_gets_its_request_back() -> None:
    bench = Bench(service(2))
    client = bench.begin()
    node = bench.nodes[0]
    bench.fleet.apply(msgspec.structs.replace(bench.pipeline.store.current, services=()), bench.clock.now)
    serves(bench.link)
    assert client.ended and node.in_flight == 0


def test_a_shadowed_breaker_refuses_nobody() -> None:
    rule = NodeBreaker(mode="shadow", consecutive=1, min_closed_ratio=0.0)
    bench = Bench(service(breakers=msgspec.structs.replace(under_test.BREAKERS_OFF, node=rule)))
    bench.connector.on_open = in_order(fails, serves)
    bench.begin()
    assert bench.nodes[0].breaker.state is State.OPEN
    assert bench.begin().ended
