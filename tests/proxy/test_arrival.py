"""Turns and budgets on a request's way: who waits, who is refused and how, and that nothing is held afterwards."""

from collections.abc import Callable
from typing import Literal

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sidecar.kernel.errors import STATUS, Reason
from sidecar.kernel.outcome import Result
from sidecar.policy.schema import Admission, Identity, QosMatch, QosPolicy, Quota, Retry, Seconds, Service, Source
from sidecar.proxy.admission import MOST_TOKENS
from sidecar.proxy.door import ROUND
from sidecar.proxy.ports import Counted, Unverified, Verified, Waiter
from sidecar.proxy.request import Request
from tests import under_test
from tests.harness import request
from tests.proxy.bench import Bench, chat, endpoints, get, request_of, service
from tests.proxy.fakes import JSON, FakeClient, FakeLink, head_of
from tests.under_test import CHAT, COMPLETION, DONE, FINISH, ROLE, node_breaker, token


def qos(name: str, sla_ms: int, **more: object) -> QosPolicy:
    """A class that the header `x-class` names."""
    return QosPolicy(name=name, latency_sla_ms=sla_ms, match=(QosMatch(header="x-class", value=name),), **more)  # type: ignore[arg-type]


VOICE = qos("voice", 300, priority=9)
TEXT = qos("text", 5000, priority=5)
BATCH = qos("batch", 20_000, priority=1, preemptible=True)
ONE = Admission(limit="fixed", concurrency=1)


def asked(
    name: str = "text", tenant: str = "a", *, stream: bool = True, max_tokens: int = 16, session: str = ""
) -> Request:
    body = b'{"model":"m","messages":[{"role":"user","content":"hello"}],"max_tokens":%d%b}' % (
        max_tokens,
        b',"stream":true' if stream else b"",
    )
    headers = [b"x-class: " + name.encode(), b"x-tenant-id: " + tenant.encode()]
    return request_of(request(CHAT, method=b"POST", headers=headers, body=body))


def gated(*quotas: Quota, **changes: object) -> Bench:
    changes.setdefault("admission", ONE)
    return Bench(service(1, **changes), qos_policies=(VOICE, TEXT, BATCH), quotas=quotas)


def serves(link: FakeLink) -> None:
    link.heads()
    for part in (ROLE + token(0), FINISH + DONE):
        link.says(part)
    link.ends()


def refused(client: FakeClient) -> tuple[Reason, int]:
    assert client.refusal is not None
    return client.refusal.reason, STATUS[client.refusal.reason]


def test_who_finds_no_room_waits_and_is_served_when_somebody_left() -> None:
    bench = gated()
    first = bench.begin(asked())
    second = bench.begin(asked())
    assert len(bench.connector.openings) == 1 and second.head is None and bench.pipeline.live == 2
    serves(bench.link)
    assert first.ended and len(bench.connector.openings) == 2
    serves(bench.link)
    assert second.ended and second.done == 1 and not bench.held()
    waits = [record.queued_s for record in bench.recorder.requests]
    assert waits == [None, 0.0] and [record.qos for record in bench.recorder.requests] == ["text", "text"]


@pytest.mark.parametrize("make", [gated, Bench], ids=["counted", "not counted"])
def test_a_body_is_not_held_once_it_is_known_what_it_asks_for(make: Callable[[], Bench]) -> None:
    bench = make()
    client = bench.begin(asked())
    assert client.exchange is not None and client.exchange._call is not None
    assert client.exchange._call.whole is None
    serves(bench.link)
    assert client.ended


def test_the_higher_class_goes_first() -> None:
    bench = gated()
    bench.begin(asked("batch"))
    order: list[str] = []
    for name in ("batch", "text", "voice"):
        client = FakeClient()
        client.on_write = lambda name=name: order.append(name) if name not in order else None
        bench.begin(asked(name), client)
    for _ in range(4):
        serves(bench.link)
    assert order == ["voice", "text", "batch"] and not bench.held()


def test_a_client_that_leaves_its_place_in_the_queue_holds_nothing() -> None:
    bench = gated()
    bench.begin(asked())
    left, waits = FakeClient(), FakeClient()
    bench.begin(asked(), left)
    bench.begin(asked(), waits)
    assert left.exchange is not None
    bench.clock.advance(2.0)
    left.exchange.client_left()
    assert left.done == 1 and left.refusal is None
    serves(bench.link)
    assert len(bench.connector.openings) == 2
    serves(bench.link)
    assert waits.ended and not bench.held()
    record = bench.recorder.requests[0]
    assert (record.status, record.flag, record.result) == (499, "DC", Result.IGNORED)
    assert record.queued_s == pytest.approx(2.0)


def test_a_drain_that_runs_out_of_time_tells_those_who_wait() -> None:
    bench = gated()
    bench.begin(asked())
    waits = bench.begin(asked())
    assert waits.exchange is not None
    waits.exchange.cut(Reason.DRAINING)
    assert refused(waits) == (Reason.DRAINING, 503)
    serves(bench.link)
    assert not bench.held()


# T23: 429 or 503, and why.


def test_all_slots_busy_and_the_queue_full_is_429_overloaded() -> None:
    bench = gated(admission=Admission(limit="fixed", concurrency=1, queue=1))
    bench.begin(asked())
    bench.begin(asked())
    client = bench.begin(asked())
    assert refused(client) == (Reason.OVERLOADED, 429)
    assert client.refusal is not None and client.refusal.retry_after_s is not None and client.refusal.retry_after_s >= 1
    assert bench.recorder.requests[0].flag == "SH"


def test_no_healthy_node_is_503_at_once_for_those_who_wait_and_those_who_come() -> None:
    bench = gated(breakers=node_breaker(consecutive=1))
    first = bench.begin(asked())
    waits = bench.begin(asked())
    bench.link.heads(head_of(500, JSON, 2)).says(b"{}").ends()
    assert first.ended and refused(waits) == (Reason.BREAKER_OPEN, 503)
    assert refused(bench.begin(asked())) == (Reason.BREAKER_OPEN, 503)
    assert waits.refusal is not None and waits.refusal.retry_after_s and not bench.held()


def test_a_tenants_budget_used_up_is_429_with_its_numbers() -> None:
    bench = gated(Quota(name="q", tokens_per_minute=1000), admission=Admission(mode="off"))
    first = bench.begin(asked(max_tokens=900))
    second = bench.begin(asked(max_tokens=900))
    assert refused(second) == (Reason.QUOTA_EXCEEDED, 429)
    assert b"x-ratelimit-limit-tokens: 1000\r\n" in second.extra
    assert b"x-ratelimit-remaining-tokens: " in second.extra and b"x-ratelimit-reset-tokens: " in second.extra
    assert second.refusal is not None and (second.refusal.retry_after_s or 0) > 0
    assert bench.recorder.requests[-1].flag == "RL"
    other = bench.begin(asked(tenant="b", max_tokens=900))
    serves(bench.connector.links[0])
    serves(bench.connector.links[1])
    assert first.ended and b"x-ratelimit-limit-tokens: 1000\r\n" in first.extra
    assert other.ended and not bench.held()


def test_evicted_before_its_first_byte_is_503_preempted_and_come_back_in_a_second() -> None:
    bench = gated()
    batch = bench.begin(asked("batch"))
    voice = bench.begin(asked("voice"))
    assert len(bench.connector.openings) == 1
    bench.clock.advance(0.3)
    assert refused(batch) == (Reason.PREEMPTED, 503)
    assert batch.refusal is not None and batch.refusal.retry_after_s == 1.0
    assert bench.connector.links[0].aborted and len(bench.connector.openings) == 2
    serves(bench.link)
    assert voice.ended and not bench.held()
    attempt = bench.recorder.attempts[0]
    assert (attempt.ending, attempt.result) == ("preempted", Result.IGNORED)


def test_a_stream_that_has_begun_is_not_evicted_unless_its_class_says_so() -> None:
    bench = gated()
    batch = bench.begin(asked("batch"))
    bench.link.heads().says(ROLE + token(0))
    bench.begin(asked("voice"))
    bench.clock.advance(1.0)
    assert batch.head is not None and not batch.ended and len(bench.connector.openings) == 1


def test_a_stream_of_a_class_that_says_so_is_cut_in_band() -> None:
    streams = qos("batch", 20_000, priority=1, preemptible=True, evict="streams")
    bench = Bench(service(1, admission=ONE), qos_policies=(VOICE, streams))
    batch = bench.begin(asked("batch"))
    bench.link.heads().says(ROLE + token(0))
    bench.begin(asked("voice"))
    bench.clock.advance(1.0)
    assert batch.ended and b'"code":"preempted"' in batch.body and b"[DONE]" not in batch.body
    assert len(bench.connector.openings) == 2


def test_a_draining_sidecar_takes_nobody_in() -> None:
    bench = gated()
    bench.pipeline.draining = True
    assert refused(bench.begin(asked())) == (Reason.DRAINING, 503)


@pytest.mark.parametrize("late", ["serve", "reject"])
def test_a_turn_that_does_not_come_in_time_is_408(late: str) -> None:
    text = qos("text", 5000, priority=5, max_wait_s=Seconds(2), late=late)
    bench = Bench(service(1, admission=ONE), qos_policies=(text,))
    bench.begin(asked())
    waits = bench.begin(asked())
    bench.clock.advance(6.0)
    assert refused(waits) == (Reason.QUEUE_TIMEOUT, 408)
    assert waits.refusal is not None and (waits.refusal.retry_after_s or 0) >= 1


def test_shedding_opens_no_breaker() -> None:
    bench = gated(breakers=node_breaker(consecutive=1), admission=Admission(limit="fixed", concurrency=1, queue=0))
    bench.begin(asked())
    for _ in range(100):
        assert refused(bench.begin(asked())) == (Reason.OVERLOADED, 429)
    assert not bench.recorder.transitions and not bench.recorder.attempts


# Shadow.


def test_in_shadow_nobody_waits_and_all_is_told() -> None:
    bench = gated(admission=Admission(mode="shadow", limit="fixed", concurrency=1, queue=0))
    bench.begin(asked())
    bench.begin(asked())
    assert len(bench.connector.openings) == 2
    for link in bench.connector.links:
        serves(link)
    assert [record.shadowed for record in bench.recorder.requests] == ["", "overloaded"] and not bench.held()


@pytest.mark.parametrize(("mode", "there"), [("shadow", 3), ("enforce", 2)])
def test_in_shadow_a_session_stays_where_it_is(mode: Literal["shadow", "enforce"], there: int) -> None:
    bench = Bench(service(2, admission=Admission(mode=mode, limit="fixed", concurrency=1)), qos_policies=(TEXT,))
    bench.begin(chat(session="s"))
    serves(bench.link)
    for _ in range(2):
        bench.begin(chat(session="s"))
    assert [opening.key for opening in bench.connector.openings].count(bench.connector.openings[0].key) == there


def test_who_was_turned_away_and_who_would_have_been_are_not_one_count() -> None:
    bench = gated(admission=Admission(limit="fixed", concurrency=1, queue=0))
    bench.begin(asked())
    bench.begin(asked())
    assert bench.state.gate is not None
    counts = [sum(seen.overloaded for seen in bench.state.gate.view(bench.clock.now).classes)]
    bench.apply(service(1, admission=Admission(mode="shadow", limit="fixed", concurrency=1, queue=0)))
    counts.append(sum(seen.overloaded for seen in bench.state.gate.view(bench.clock.now).classes))
    assert counts == [1, 0]


# Fallbacks.


def test_a_fallback_serves_who_finds_no_turn() -> None:
    home = service(1, admission=Admission(limit="fixed", concurrency=1, queue=0), fallback="small")
    small = under_test.service(endpoints(2)[1], name="small", models=(), admission=Admission(mode="off"))
    bench = Bench(home, small, qos_policies=(TEXT,))
    bench.begin(asked())
    bench.begin(asked())
    assert [opening.key for opening in bench.connector.openings] == ["e1:80", "e2:80"]


# Settling.


def served(bench: Bench, client: FakeClient) -> None:
    bench.link.heads(head_of(200, JSON, len(COMPLETION))).says(COMPLETION).ends()


def failed(bench: Bench, client: FakeClient) -> None:
    bench.link.heads(head_of(500, JSON, 2)).says(b"{}").ends()


def left_waiting(bench: Bench, client: FakeClient) -> None:
    assert client.exchange is not None
    client.exchange.client_left()


def left_midway(bench: Bench, client: FakeClient) -> None:
    bench.link.heads().says(ROLE + token(0)).says(token(1))
    left_waiting(bench, client)


def cut_midway(bench: Bench, client: FakeClient) -> None:
    bench.link.heads().says(ROLE + token(0)).lost()


@pytest.mark.parametrize(
    ("end", "stream", "paid"),
    [
        (served, False, "usage"),  # as the engine says
        (left_waiting, True, "prompt"),  # the engine was reading it
        (left_midway, True, "prompt + 2"),  # what it got
        (cut_midway, True, "prompt + 1"),
        (failed, True, "nothing"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_is_paid(end: Callable[[Bench, FakeClient], None], stream: bool, paid: str) -> None:
    bench = gated(Quota(name="q", tokens_per_minute=100_000), admission=Admission(mode="off"))
    client = bench.begin(asked(stream=stream, max_tokens=5000))
    end(bench, client)
    prompt = bench.recorder.requests[0].reserved_tokens - 5000
    usage = msgspec.json.decode(COMPLETION)["usage"]
    wanted = {
        "usage": usage["prompt_tokens"] + usage["completion_tokens"],
        "prompt": prompt,
        "prompt + 1": prompt + 1,
        "prompt + 2": prompt + 2,
        "nothing": 0,
    }
    assert bench.ledger.counts["q"].settled_tokens == wanted[paid] and not bench.held()


def test_who_finds_no_turn_pays_nothing_and_was_no_request() -> None:
    quota = Quota(name="q", tokens_per_minute=100_000, requests_per_minute=2)
    bench = gated(quota, admission=Admission(limit="fixed", concurrency=1, queue=0))
    bench.begin(asked())
    for _ in range(5):
        assert refused(bench.begin(asked())) == (Reason.OVERLOADED, 429)


def test_more_than_one_request_may_ask_for_is_refused_for_good() -> None:
    bench = gated(Quota(name="q", tokens_per_minute=100_000), admission=Admission(mode="off"), request_tokens=100)
    assert bench.begin(asked(max_tokens=120)).refusal is None  # a stream may ask for a fifth more
    client = bench.begin(asked(max_tokens=121))
    assert refused(client) == (Reason.QUOTA_EXCEEDED, 429)
    assert client.refusal is not None and client.refusal.final and client.refusal.param == "max_tokens"
    assert refused(bench.begin(asked(stream=False, max_tokens=101))) == (Reason.QUOTA_EXCEEDED, 429)


HUGE = b"9" * 300


@pytest.mark.parametrize(("limit", "answers"), [(HUGE, HUGE), (HUGE, b"1"), (b"1", HUGE), (b"-" + HUGE, HUGE)])
def test_a_request_that_asks_for_more_than_there_can_be_spoils_nobodys_turn(limit: bytes, answers: bytes) -> None:
    bench = gated(Quota(name="q", tokens_per_minute=1 << 40))
    body = b'{"model":"m","stream":true,"max_tokens":"%b","n":"%b"}' % (limit, answers)
    absurd = request_of(request(CHAT, method=b"POST", headers=[b"x-class: text", b"x-tenant-id: b"], body=body))
    clients = [bench.begin(asked()), bench.begin(absurd), bench.begin(asked(tenant="c"))]
    for _ in clients:
        serves(bench.link)
    assert all(client.ended for client in clients) and not bench.crashes and not bench.held()


@pytest.mark.parametrize("said", [10**18, -(10**18)])
def test_an_engine_that_says_it_used_more_than_there_can_be_is_not_believed(said: int) -> None:
    bench = gated(Quota(name="q", tokens_per_minute=1 << 40))
    client = bench.begin(asked(stream=False))
    body = COMPLETION.replace(b'"completion_tokens":', b'"completion_tokens":%d,"was":' % said)
    assert body != COMPLETION
    bench.link.heads(head_of(200, JSON, len(body))).says(body).ends()
    assert client.ended and 0 <= bench.ledger.counts["q"].settled_tokens <= MOST_TOKENS and not bench.held()


# Counting.


class Slow:
    """A counter that finishes when it is told to."""

    def __init__(self) -> None:
        self.waiters: list[Waiter] = []
        self.known = 0
        self.asked: list[float] = []

    def count(self, service: str, model: str, prompt: bytes, time_s: float, waiter: Waiter) -> Counted | None:
        self.asked.append(time_s)
        if self.known:
            return Counted(self.known, "exact")
        if time_s <= 0.0:
            return Counted(1, "estimated")
        self.waiters.append(waiter)
        return None

    def forget(self, waiter: Waiter) -> None:
        if waiter in self.waiters:
            self.waiters.remove(waiter)

    def reported(self, service: str, model: str, prompt: bytes, tokens: int) -> None: ...


def counting() -> tuple[Bench, Slow]:
    counter = Slow()
    quota = Quota(name="q", tokens_per_minute=100_000)
    return Bench(service(1), qos_policies=(TEXT,), quotas=(quota,), counter=counter), counter


def test_a_request_waits_for_its_count_and_goes_on() -> None:
    bench, counter = counting()
    client = bench.begin(asked(max_tokens=10))
    assert not bench.connector.openings and counter.asked == [1.0]
    counter.known = 50
    counter.waiters.pop().woken()
    serves(bench.link)
    assert client.ended and not bench.held()
    record = bench.recorder.requests[0]
    assert (record.counted, record.reserved_tokens) == ("exact", 60)


def test_a_count_that_does_not_come_is_estimated() -> None:
    bench, counter = counting()
    bench.begin(asked())
    bench.clock.advance(1.1)
    assert len(bench.connector.openings) == 1 and not counter.waiters and counter.asked[-1] == 0.0
    serves(bench.link)
    assert bench.recorder.requests[0].counted == "estimated" and not bench.held()


def test_a_client_that_leaves_while_it_is_counted_is_forgotten() -> None:
    bench, counter = counting()
    client = bench.begin(asked())
    left_waiting(bench, client)
    assert client.done == 1 and not counter.waiters and not bench.connector.openings and not bench.held()


# Identity.


class Keys:
    """A verifier with one answer, or none yet."""

    def __init__(self, answer: Verified | Unverified | None) -> None:
        self.answer = answer
        self.waiters: list[Waiter] = []
        self.seen: list[bytes] = []

    @property
    def required(self) -> bool:
        return True

    def verify(self, authorization: bytes, now_wall: float, waiter: Waiter) -> Verified | Unverified | None:
        self.seen.append(authorization)
        if self.answer is None:
            self.waiters.append(waiter)
        return self.answer

    def forget(self, waiter: Waiter) -> None:
        if waiter in self.waiters:
            self.waiters.remove(waiter)


@pytest.mark.parametrize("reason", [Reason.UNAUTHORIZED, Reason.KEYS_UNAVAILABLE])
def test_a_token_that_is_not_good_is_refused_before_all_else(reason: Reason) -> None:
    bench = gated()
    bench.pipeline.verifier = keys = Keys(Unverified(reason, "the token is expired", why="expired"))
    for asks in (asked(), get()):
        client = bench.begin(asks)
        assert refused(client)[0] is reason and client.refusal is not None
        assert client.refusal.message == "the token is expired"
        assert bench.recorder.requests[-1].why == "expired"
    assert keys.seen == [b"", b""] and not bench.connector.openings and not bench.held()


def test_a_request_waits_for_the_keys_of_its_token() -> None:
    bench = gated()
    bench.pipeline.verifier = keys = Keys(None)
    client = bench.begin(asked())
    assert not bench.connector.openings
    keys.answer = Verified({"tenant": "acme"})
    keys.waiters.pop().woken()
    serves(bench.link)
    assert client.ended and bench.recorder.requests[0].tenant == "acme" and not bench.held()


def test_keys_that_do_not_come_are_503() -> None:
    bench = gated()
    bench.pipeline.verifier = keys = Keys(None)
    client = bench.begin(asked())
    bench.clock.advance(3.0)
    assert refused(client) == (Reason.KEYS_UNAVAILABLE, 503) and not keys.waiters and not bench.held()


def test_a_client_that_leaves_while_keys_are_fetched_is_forgotten() -> None:
    bench = gated()
    bench.pipeline.verifier = keys = Keys(None)
    client = bench.begin(asked())
    left_waiting(bench, client)
    assert client.done == 1 and not keys.waiters and not bench.held()


def test_a_header_for_this_machine_alone_goes_no_further_from_elsewhere() -> None:
    identity = Identity(tenant=(Source(header="x-tenant-id", loopback=True),))
    bench = Bench(service(1), identity=identity)
    bench.begin(asked(tenant="forged"))
    bench.begin(asked(tenant="meant"), FakeClient("127.0.0.1", loopback=True))
    heads = [link.head for link in bench.connector.links]
    assert b"forged" not in heads[0] and b"x-class: text" in heads[0] and b"x-tenant-id: meant" in heads[1]
    for link in bench.connector.links:
        serves(link)
    assert [record.tenant for record in bench.recorder.requests] == ["", "meant"]


def test_a_header_that_says_two_things_is_refused() -> None:
    bench = gated()
    headers = [b"x-tenant-id: a", b"X-Tenant-Id: b"]
    client = bench.begin(request_of(request(CHAT, method=b"POST", headers=headers, body=b'{"model":"m"}')))
    assert refused(client) == (Reason.BAD_REQUEST, 400) and not bench.connector.openings and not bench.held()


@pytest.mark.parametrize("name", [b"x-tenant-id", b"X-Session-ID", b"keep-alive, x-tenant-id"])
def test_a_header_that_says_whose_it_is_must_not_end_here(name: bytes) -> None:
    bench = Bench(service(1))
    headers = [b"x-tenant-id: a", b"x-session-id: s", b"Connection: " + name]
    client = bench.begin(request_of(request(CHAT, method=b"POST", headers=headers, body=b'{"model":"m"}')))
    assert refused(client) == (Reason.BAD_REQUEST, 400) and not bench.connector.openings and not bench.held()


# Engines that cannot do what is asked.


def test_who_cannot_be_served_by_an_engine_that_has_room_waits_for_one_that_can() -> None:
    plain, triton = endpoints(2)
    mixed = under_test.service(plain, msgspec.structs.replace(triton, engine="triton"), admission=ONE)
    bench = Bench(mixed, qos_policies=(VOICE, TEXT, BATCH))
    tools = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}],"tools":[{"type":"function"}]}'
    asks = request_of(request(CHAT, method=b"POST", headers=[b"x-class: text"], body=tools))
    clients = [bench.begin(asks.copy()) for _ in range(3)]
    assert [node.in_flight for node in bench.nodes] == [1, 0]
    for _ in clients:
        serves(bench.link)
    assert all(client.ended for client in clients) and not bench.held() and not bench.crashes


# Speech that streams through.


def test_an_upload_of_speech_takes_its_turn() -> None:
    speech = QosPolicy(name="speech", latency_sla_ms=1000, priority=9, match=(QosMatch(path="/v1/audio/*"),))
    bench = Bench(service(1, admission=ONE), qos_policies=(speech, BATCH))
    bench.begin(asked("batch"))
    asks = request_of(request(b"/v1/audio/transcriptions", method=b"POST", body=b"sound"))
    client = bench.begin(asks)
    assert len(bench.connector.openings) == 1
    serves(bench.link)
    assert len(bench.connector.openings) == 2 and bench.link.uploaded == b"sound"
    bench.link.heads(head_of(200, JSON, 2)).says(b"{}").ends()
    assert client.ended and bench.recorder.requests[1].qos == "speech" and not bench.held()


SPEAKS = request(b"/v1/audio/speech", method=b"POST", headers=[b"content-length: 10"]) + b"some"


@pytest.mark.parametrize("waits_for", ["its turn", "its keys"])
def test_an_upload_that_waits_is_not_taken_in_meanwhile(waits_for: str) -> None:
    bench = gated()
    first = bench.begin(asked())
    keys = Keys(None)
    if waits_for == "its keys":
        bench.pipeline.verifier = keys
        serves(bench.link)
    client = bench.begin(request_of(SPEAKS))
    held_up = [client.upload_paused]
    assert len(bench.connector.openings) == 1
    if waits_for == "its keys":
        keys.answer = Verified({})
        keys.waiters.pop().woken()
    else:
        serves(bench.link)
    held_up.append(client.upload_paused)
    assert first.ended and held_up == [True, False] and bench.link.uploaded == b"some"


# Reloads.


def test_a_reload_that_turns_the_gate_off_lets_all_through() -> None:
    bench = gated()
    bench.begin(asked())
    bench.begin(asked())
    bench.apply(service(1, admission=Admission(mode="off")))
    assert len(bench.connector.openings) == 2
    for link in bench.connector.links:
        serves(link)
    assert not bench.held()


def test_a_reload_lets_a_thousand_through_a_few_at_a_time_and_forgets_those_who_left() -> None:
    bench = gated()
    waiting = [bench.begin(asked()) for _ in range(200)]
    bench.apply(service(1, admission=Admission(mode="off")))
    assert len(bench.connector.openings) == 1 + ROUND
    left_waiting(bench, waiting[-1])
    bench.apply(service(1, admission=ONE))  # whoever was let go stays so
    bench.clock.advance(0.001)
    assert len(bench.connector.openings) == 199
    for link in bench.connector.links:
        serves(link)
    assert all(client.done == 1 for client in waiting) and not bench.held() and not bench.crashes


def test_a_reload_that_raises_the_limit_gives_turns() -> None:
    bench = gated()
    bench.begin(asked())
    bench.begin(asked())
    bench.apply(service(1, admission=Admission(limit="fixed", concurrency=2)))
    assert len(bench.connector.openings) == 2


# Whatever happens in whatever order.

DEEDS = st.sampled_from(
    ["voice", "text", "batch", "serve", "speak", "fail", "lose", "leave", "cut", "time", "off", "one", "two", "shadow"]
)
ADMISSIONS = {
    "off": Admission(mode="off"),
    "one": Admission(limit="fixed", concurrency=1, queue=3),
    "two": Admission(limit="fixed", concurrency=2, queue=3, reserve=0.2),
    "shadow": Admission(mode="shadow", limit="fixed", concurrency=1, queue=1),
}


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(DEEDS, st.integers(0, 5)), min_size=5, max_size=60))
# Turned out of a full queue, and before it was told the gate was gone.
@example([("text", 5), ("batch", 4), ("voice", 1), ("text", 3), ("voice", 5), ("voice", 0), ("off", 5)])
def test_everybody_is_told_once_and_nothing_is_held_whatever_happens(deeds: list[tuple[str, int]]) -> None:
    quota = Quota(name="q", tokens_per_minute=3000, concurrency=4, tenant="a")
    streams = qos("batch", 2000, priority=1, preemptible=True, evict="streams", max_wait_s=Seconds(5))
    rules = node_breaker(consecutive=2, open_s=Seconds(1))

    def made(word: str) -> Service:
        return service(2, admission=ADMISSIONS[word], breakers=rules, retry=Retry(attempts=2))

    bench = Bench(made("one"), qos_policies=(VOICE, TEXT, streams), quotas=(quota,))
    clients: list[FakeClient] = []
    for deed, number in deeds:
        under_way = [link for link in bench.connector.links if link.sink is not None]
        waiting = [client for client in clients if client.exchange is not None]
        if deed in ("voice", "text", "batch"):
            clients.append(bench.begin(asked(deed, tenant="ab"[number % 2], stream=number % 3 > 0, max_tokens=100)))
        elif deed == "time":
            bench.clock.advance((0.05, 0.3, 1.0, 2.0, 6.0, 40.0)[number])
        elif deed in ADMISSIONS:
            bench.apply(made(deed))
        elif deed in ("leave", "cut") and waiting:
            exchange = waiting[number % len(waiting)].exchange
            assert exchange is not None
            if deed == "leave":
                exchange.client_left()
            else:
                exchange.cut(Reason.DRAINING)
        elif under_way:
            link = under_way[number % len(under_way)]
            if deed == "lose":
                link.lost()
            elif deed == "speak" and not link.received:
                link.heads().says(ROLE + token(0))
            elif not link.received:
                serves(link) if deed == "serve" else link.heads(head_of(500, JSON, 2)).says(b"{}").ends()
            elif deed == "serve":
                link.says(FINISH + DONE).ends()
    for _ in range(200):
        under_way = [link for link in bench.connector.links if link.sink is not None]
        for link in under_way:
            link.lost()
        bench.clock.advance(1.0)
        if not bench.pipeline.live:
            break
    assert not bench.crashes, bench.crashes
    assert [client.done for client in clients] == [1] * len(clients)
    assert len(bench.recorder.requests) == len(clients) and not bench.held()
    for tenant in "ab":
        assert all(budget.in_flight == 0 for budget in bench.ledger.budgets(tenant, "m"))
