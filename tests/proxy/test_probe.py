"""A copy on its way, between fakes: when it is sent, how it is judged, and that nothing of it stays."""

import msgspec
import pytest

from sidecar.core.breaker import State
from sidecar.kernel.ids import EndpointKey
from sidecar.kernel.outcome import Ending, Result
from sidecar.policy.schema import Adaptive, Breakers, Endpoint, Poison, RequestBreaker, Seconds
from sidecar.proxy.ports import Sink
from sidecar.proxy.probe import COPIED, COPIED_BYTES, PROBE_S, may_copy
from sidecar.proxy.request import Request
from sidecar.wire.call import API_BY_PATH, Api, read_call
from tests.harness import request
from tests.proxy.bench import GAP_S, HEAD_S, TTFT_S, Bench, chat, garbage_of, request_of, service
from tests.proxy.fakes import JSON, FakeClient, FakeLink, head_of
from tests.under_test import COMPLETION, DONE, FINISH, ROLE, error_body, node_breaker, token

OPEN_S = 10.0


def breaker(**changes: object) -> Breakers:
    return node_breaker(1, open_s=Seconds(OPEN_S), successes=1, **changes)


def on_trial(**changes: object) -> tuple[Bench, FakeClient, FakeLink, FakeLink]:
    """A request whose copy is out: the bench, its client, the copy's link and the request's own."""
    bench = Bench(service(2, breakers=breaker(), **changes))
    bench.begin()
    bench.link.heads(head_of(500, JSON, len(error_body()))).says(error_body()).ends()
    assert sick(bench) is State.OPEN
    bench.clock.advance(OPEN_S)
    client = bench.begin()
    copy, own = bench.connector.links[-2:]
    assert sick(bench) is State.HALF_OPEN
    return bench, client, copy, own


def sick(bench: Bench) -> State:
    """The state of the endpoint on trial."""
    return bench.nodes[0].breaker.state


def went_to(bench: Bench, state: State, *, aborted: FakeLink | None = None) -> None:
    """The verdict is `state`, nothing is held, and the link was broken off, where that is asked."""
    assert sick(bench) is state
    assert aborted is None or aborted.aborted
    assert not bench.held()


def serves(link: FakeLink) -> None:
    link.heads().says(ROLE + token(0)).says(token(1)).says(FINISH + DONE).ends()


def last_attempt(bench: Bench) -> tuple[Ending, Result, bool]:
    record = bench.recorder.attempts[-1]
    return record.ending, record.result, record.copy


def test_copy_goes_first_and_is_the_request_byte_by_byte() -> None:
    bench, client, copy, own = on_trial()
    assert [opening.key for opening in bench.connector.openings[-2:]] == ["e1:80", "e2:80"]
    assert copy.head == own.head and copy.body == own.body != b""
    assert [node.in_flight for node in bench.nodes] == [1, 1]
    serves(copy)
    assert client.head is None and client.body == b"" and sick(bench) is State.CLOSED
    assert last_attempt(bench) == (Ending.COMPLETE, Result.SUCCESS, True)
    serves(own)
    assert client.ended and last_attempt(bench) == (Ending.COMPLETE, Result.SUCCESS, False)
    assert len(bench.recorder.requests) == 2 and bench.recorder.requests[-1].attempts == 1
    assert not bench.held()


def test_transition_that_the_copy_s_asking_made_is_told_once() -> None:
    bench, _, copy, own = on_trial()
    serves(copy)
    serves(own)
    assert [(moved.old, moved.new) for moved in bench.recorder.transitions] == [
        (State.CLOSED, State.OPEN),
        (State.OPEN, State.HALF_OPEN),
        (State.HALF_OPEN, State.CLOSED),
    ]


def test_client_that_leaves_ends_its_own_attempt_alone() -> None:
    bench, client, copy, own = on_trial()
    assert client.exchange is not None
    client.exchange.client_left()
    assert own.aborted and not copy.aborted and bench.pipeline.live == 0
    serves(copy)
    assert sick(bench) is State.CLOSED and not bench.held()


def test_stream_is_listened_to_for_so_long_and_tokens_until_then_are_good() -> None:
    bench, _, copy, own = on_trial()
    serves(own)
    copy.heads().says(ROLE)
    for number in range(int((TTFT_S + PROBE_S) / (GAP_S / 2)) - 1):
        bench.clock.advance(GAP_S / 2)
        copy.says(token(number))
    assert copy.sink is not None
    bench.clock.advance(GAP_S / 2 + 1.0)
    went_to(bench, State.CLOSED, aborted=copy)
    assert last_attempt(bench) == (Ending.TOTAL_TIMEOUT, Result.SUCCESS, True)


@pytest.mark.parametrize("stream", [True, False])
def test_copy_that_is_never_answered_fails_by_the_deadline_of_its_kind(stream: bool) -> None:
    bench = Bench(service(2, breakers=breaker()))
    bench.begin()
    bench.link.lost()
    bench.clock.advance(OPEN_S)
    bench.begin(chat(stream=stream))
    copy, own = bench.connector.links[-2:]
    own.heads(head_of(200, JSON, len(COMPLETION))).says(COMPLETION).ends()
    deadline_s, ending = (TTFT_S, Ending.TTFT_TIMEOUT) if stream else (HEAD_S, Ending.HEAD_TIMEOUT)
    bench.clock.advance(deadline_s - 1.0)
    assert copy.sink is not None and sick(bench) is State.HALF_OPEN
    bench.clock.advance(2.0)
    went_to(bench, State.OPEN, aborted=copy)
    assert last_attempt(bench) == (ending, Result.FAILURE, True)


def test_answer_that_is_no_stream_may_take_as_long_as_any() -> None:
    bench = Bench(service(2, breakers=breaker()))
    bench.begin()
    bench.link.lost()
    bench.clock.advance(OPEN_S)
    bench.begin(chat(stream=False))
    copy, own = bench.connector.links[-2:]
    own.heads(head_of(200, JSON, len(COMPLETION))).says(COMPLETION).ends()
    bench.clock.advance(TTFT_S + PROBE_S + 5.0)
    copy.heads(head_of(200, JSON, len(COMPLETION))).says(COMPLETION).ends()
    assert sick(bench) is State.CLOSED and not bench.held()


def test_compressed_stream_that_runs_on_proves_nothing() -> None:
    bench, _, copy, own = on_trial()
    serves(own)
    copy.heads(head_of(encoded=True))
    for _ in range(int((TTFT_S + PROBE_S) / (GAP_S / 2)) + 1):
        copy.says(b"\x1f\x8b")
        bench.clock.advance(GAP_S / 2)
    assert copy.aborted and sick(bench) is State.HALF_OPEN and not bench.held()
    assert last_attempt(bench) == (Ending.TOTAL_TIMEOUT, Result.IGNORED, True)


def test_copy_without_a_connection_fails() -> None:
    bench = Bench(service(2, breakers=breaker()))
    bench.begin()
    bench.link.lost()
    bench.clock.advance(OPEN_S)
    bench.connector.later = True
    client = bench.begin()
    copying = bench.connector.openings[-2]
    serves(bench.connector.connect())
    assert client.ended and copying.sink is not None
    copying.sink.on_connect_failed("nobody listens")
    copying.sink = None
    assert bench.nodes[0].breaker.why == "probe_failed" and not bench.held()


def test_late_copy_fails_when_it_is_late_and_is_let_go() -> None:
    bench = Bench(service(2, breakers=breaker(adaptive=Adaptive(min_samples=30))))
    for _ in range(60):
        # Half a second each, from either endpoint.
        bench.begin()
        bench.clock.advance(0.5)
        serves(bench.link)
        bench.fleet.tick(bench.clock.now)
    bench.begin()
    bench.link.lost()
    where = next(node for node in bench.nodes if node.breaker.state is State.OPEN)
    bench.clock.advance(OPEN_S)
    bench.begin()
    copy, own = bench.connector.links[-2:]
    serves(own)
    bench.clock.advance(TTFT_S / 2)
    assert copy.aborted and where.breaker.state is State.OPEN and where.breaker.why == "probe_failed"
    assert bench.recorder.transitions[-1].evidence == "a probe failed: late" and where.late == 1
    assert last_attempt(bench) == (Ending.LATE, Result.FAILURE, True)
    assert not bench.held()


def test_copy_that_meets_overload_lets_the_endpoint_rest() -> None:
    bench, _, copy, own = on_trial()
    serves(own)
    copy.heads(head_of(429, JSON, 2)).says(b"{}").ends()
    assert sick(bench) is State.HALF_OPEN and bench.nodes[0].overload_until > bench.clock.now
    assert last_attempt(bench)[1] is Result.OVERLOADED and not bench.held()


def test_copy_and_request_leave_no_cycle_behind() -> None:
    bench = Bench(service(2, breakers=breaker()))
    requests = [chat() for _ in range(4)]

    def once() -> None:
        bench.begin(requests.pop())
        bench.link.lost()
        bench.clock.advance(400.0)
        bench.begin(requests.pop())
        for link in bench.connector.links[-2:]:
            serves(link)
        bench.connector.openings.clear()
        assert sick(bench) is State.CLOSED and not bench.held()

    assert garbage_of(once) == 0


@pytest.mark.parametrize("path", sorted(API_BY_PATH))
def test_only_what_leaves_no_trace_is_copied(path: bytes) -> None:
    asked = request_of(request(path, method=b"POST", body=b'{"model":"m"}'))
    call = read_call(API_BY_PATH[path], asked.body)
    assert may_copy(asked, call) == (call.api in COPIED)
    assert (call.api in COPIED) == (call.api not in (Api.RESPONSES, Api.OTHER))


@pytest.mark.parametrize(("size", "copied"), [(COPIED_BYTES, True), (COPIED_BYTES + 1, False)])
def test_large_bodies_are_not_sent_twice(size: int, copied: bool) -> None:
    asked: Request = chat()
    call = read_call(Api.CHAT, asked.body)
    asked.body = b" " * size
    assert may_copy(asked, call) == copied


def test_copy_that_could_not_be_sent_gives_back_what_was_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(service(2, breakers=breaker()))
    bench.begin()
    bench.link.lost()
    bench.clock.advance(OPEN_S)
    opened = bench.connector.open

    def open_but_one(
        key: EndpointKey, endpoint: Endpoint, connect_s: float, sink: Sink, *, fresh: bool = False
    ) -> None:
        if key == "e1:80":
            raise RuntimeError("a bug")
        opened(key, endpoint, connect_s, sink, fresh=fresh)

    monkeypatch.setattr(bench.connector, "open", open_but_one)
    bench.begin()
    assert [str(each) for each in bench.crashes] == ["a bug"]
    assert sick(bench) is State.HALF_OPEN and not bench.held()


def test_prompt_that_an_endpoint_died_of_is_not_copied() -> None:
    poison = RequestBreaker(mode="off", poison=Poison())
    bench = Bench(service(3, breakers=msgspec.structs.replace(breaker(), request=poison)))
    bench.begin()
    bench.link.lost()
    bench.clock.advance(OPEN_S)
    links = len(bench.connector.links)
    bench.begin()
    assert len(bench.connector.links) == links + 1, "the request itself is the probe"
    bench.link.lost()
    bench.clock.advance(2 * OPEN_S)
    links = len(bench.connector.links)
    bench.begin(request_of(request(b"/v1/completions", method=b"POST", body=b'{"model":"m","prompt":"another"}')))
    assert len(bench.connector.links) == links + 2
    for link in bench.connector.links[links:]:
        link.heads(head_of(200, JSON, len(COMPLETION))).says(COMPLETION).ends()
    assert sick(bench) is State.CLOSED and not bench.held()


def test_shadow_sends_no_copies() -> None:
    bench = Bench(service(2, breakers=breaker(mode="shadow")))
    bench.begin()
    bench.link.lost()
    assert sick(bench) is State.OPEN
    bench.clock.advance(OPEN_S)
    links = len(bench.connector.links)
    client = bench.begin()
    assert len(bench.connector.links) == links + 1
    serves(bench.link)
    assert client.ended and sick(bench) is State.CLOSED and not bench.held()


def test_policy_may_want_requests_themselves_as_probes() -> None:
    for adaptive in (Adaptive(probe="request"), False):
        bench = Bench(service(2, breakers=breaker(adaptive=adaptive)))
        bench.begin()
        bench.link.lost()
        bench.clock.advance(OPEN_S)
        links = len(bench.connector.links)
        client = bench.begin()
        assert len(bench.connector.links) == links + 1
        serves(bench.link)
        assert client.ended and sick(bench) is State.CLOSED and not bench.held()
