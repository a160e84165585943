"""What requests reserve and pay that try to pay less than they use, and what honest ones must not pay for."""

import pytest

from sidecar.kernel.errors import Reason
from sidecar.policy.schema import Admission, Quota, Retry
from sidecar.proxy.admission import UNREAD_TOKENS
from sidecar.proxy.request import Request
from tests.harness import request
from tests.proxy.bench import Bench, request_of, service
from tests.proxy.fakes import JSON, FakeClient, head_of
from tests.under_test import CHAT, request_breaker

COMPLETIONS = b"/v1/completions"
EMBEDDED = (
    b'{"object":"list","data":[{"object":"embedding","index":0,"embedding":[%b]}],"usage":{"prompt_tokens":8}}'
    % b",".join([b"0.123456789"] * 1536)
)


def asked(body: bytes, path: bytes = COMPLETIONS) -> Request:
    return request_of(request(path, method=b"POST", headers=[b"x-tenant-id: a"], body=body))


def metered(mode: str = "enforce", tenants: int = 1, **changes: object) -> Bench:
    quota = Quota(name="q", tokens_per_minute=100_000, requests_per_minute=50, mode=mode)  # type: ignore[arg-type]
    changes.setdefault("admission", Admission(mode="off"))
    return Bench(service(1, **changes), quotas=(quota,))


def served(bench: Bench, answer: bytes, status: int = 200) -> int:
    """What was paid for it."""
    bench.link.heads(head_of(status, JSON, len(answer))).says(answer).ends()
    assert not bench.held()
    return bench.ledger.counts["q"].settled_tokens


def told(prompt: int, answer: int) -> bytes:
    return b'{"choices":[{"text":"a","finish_reason":"stop"}],"usage":{"prompt_tokens":%d,"completion_tokens":%d}}' % (
        prompt,
        answer,
    )


def refused(client: FakeClient) -> Reason:
    assert client.refusal is not None
    return client.refusal.reason


def test_an_embedding_pays_its_prompt_and_not_its_numbers() -> None:
    bench = metered()
    for _ in range(25):
        bench.begin(asked(b'{"model":"m","input":"hello"}', b"/v1/embeddings"))
        served(bench, EMBEDDED)
    assert bench.ledger.counts["q"].settled_tokens == 25 * 8
    assert max(record.reserved_tokens for record in bench.recorder.requests) < 20
    assert bench.pipeline.answers.usual("default", "m") == 256


def test_what_an_engine_refuses_costs_no_tokens_and_teaches_nothing() -> None:
    bench = metered()
    for _ in range(25):
        bench.begin(asked(b'{"model":"m","prompt":"hello"}'))
        assert served(bench, b'{"error":{"message":"too long","code":400}}', 400) == 0
    assert bench.pipeline.answers.usual("default", "m") == 256
    (budget,) = bench.ledger.budgets("a", "m")
    assert [meter.own for meter in budget.meters] == [0, 25]


@pytest.mark.parametrize("said", [told(8, -5000), told(-5000, 3)], ids=["answer", "prompt"])
def test_what_an_engine_says_never_gives_tokens(said: bytes) -> None:
    bench = metered()
    bench.begin(asked(b'{"model":"m","prompt":"hello","max_tokens":9}'))
    assert 0 < served(bench, said) < 100


def test_no_bound_is_reserved_like_none_that_is_said() -> None:
    bench = metered()
    for bound in (b"", b',"max_tokens":-1'):
        bench.begin(asked(b'{"model":"m","prompt":"hello"%b}' % bound))
        served(bench, told(2, 3))
    none, minus = [record.reserved_tokens for record in bench.recorder.requests]
    assert minus == none > 256


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":"a","max_completion_tokens":1,"max_tokens":101}',
        b'{"prompt":"a","n":2,"max_tokens":51}',
        b'{"prompt":["a","b"],"max_tokens":51}',
        b'{"prompt":["a","b"],"max_tokens":51,"top_p":NaN}',
        b'{"prompt":[[1,2],[3,4]],"max_tokens":51}',
        b'{"prompt":"a","best_of":2,"max_tokens":51}',
    ],
)
def test_what_one_request_may_ask_for_is_all_that_it_asks_for(body: bytes) -> None:
    bench = metered(request_tokens=100)
    assert refused(bench.begin(asked(body))) is Reason.QUOTA_EXCEEDED and not bench.held()


def test_a_quota_in_shadow_refuses_nothing_however_much_is_asked_for() -> None:
    bench = metered("shadow", request_tokens=100)
    bench.begin(asked(b'{"prompt":"a","max_tokens":101}'))
    assert served(bench, told(2, 3)) == 5


@pytest.mark.parametrize("path", [b"/v1/audio/transcriptions", b"/completion", b"/api/chat"])
@pytest.mark.parametrize("mode", ["off", "enforce"])
def test_what_streams_through_unread_is_paid_for(path: bytes, mode: str) -> None:
    bench = metered(admission=Admission(mode=mode, limit="fixed", concurrency=1))  # type: ignore[arg-type]
    bench.begin(asked(b"sound", path))
    assert served(bench, b"{}") == UNREAD_TOKENS
    (budget,) = bench.ledger.budgets("a", "")
    assert [meter.own for meter in budget.meters] == [UNREAD_TOKENS, 1]


def test_what_is_no_work_for_engines_takes_no_turn() -> None:
    bench = metered(admission=Admission(limit="fixed", concurrency=1))
    bench.begin(asked(b'{"model":"m","messages":[]}', CHAT))
    bench.begin(asked(b"{}", b"/tokenize"))
    assert len(bench.connector.openings) == 2


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"choices":[{"index":0,"delta":{"content":"%b"},"finish_reason":null}]}\n\n',
        b'data: {"choices":[{"index":0,"text":"%b","finish_reason":null}]}\n\n',
    ],
    ids=["chat", "completions"],
)
@pytest.mark.parametrize(("text", "least"), [(b" and", 20), (b" the quick brown fox jumps over the lazy dog", 140)])
def test_a_stream_that_does_not_say_its_usage_pays_for_its_text(event: bytes, text: bytes, least: int) -> None:
    path = CHAT if b"delta" in event else COMPLETIONS
    bench = metered()
    bench.begin(asked(b'{"model":"m","prompt":"hello","messages":[],"stream":true,"max_tokens":500}', path))
    bench.link.heads()
    for _ in range(20):
        bench.link.says(event % text)
    bench.link.says(event.replace(b"null", b'"stop"') % b"" + b"data: [DONE]\n\n").ends()
    paid = bench.ledger.counts["q"].settled_tokens
    assert least <= paid <= least + 10 and not bench.held()


@pytest.mark.parametrize(
    ("path", "event", "paid"),
    [
        (b"/invocations", b'{"choices":[],"usage":{"prompt_tokens":8,"completion_tokens":500}}', 508),
        (b"/generate", b'{"text":"all of it","meta_info":{"prompt_tokens":8,"completion_tokens":30}}', 38),
        (CHAT, b'{"choices":[{"delta":{"tool_calls":[{"function":{"arguments":"%b"}}]}}]}' % (b"x" * 600), 100 + 1),
    ],
    ids=["another path of the same API", "SGLang", "arguments of a tool"],
)
def test_a_stream_pays_what_its_events_tell(path: bytes, event: bytes, paid: int) -> None:
    bench = metered()
    bench.begin(asked(b'{"model":"m","prompt":"a","stream":true,"max_tokens":500}', path))
    bench.link.heads().says(b"data: " + event + b"\n\n")
    bench.link.says(
        b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n' * (path == CHAT) + b"data: [DONE]\n\n"
    ).ends()
    settled = bench.ledger.counts["q"].settled_tokens
    assert paid <= settled <= paid + 2 and not bench.held()


@pytest.mark.parametrize(
    ("path", "prompts", "answers"),
    [
        (COMPLETIONS, b'"prompt":["a","b","c","d"]', 4),
        (COMPLETIONS, b'"prompt":["a","b"],"n":3', 6),
        (COMPLETIONS, b'"prompt":[1,2,3,4]', 1),
        (b"/v1/chat/completions/batch", b'"messages":[[{"role":"user"}],[{"role":"user"}]]', 2),
        (CHAT, b'"messages":[{"role":"user"},{"role":"user"}]', 1),
    ],
)
def test_each_prompt_of_a_list_has_an_answer_of_its_own(path: bytes, prompts: bytes, answers: int) -> None:
    bench = metered()
    for _ in range(25):
        bench.begin(asked(b'{"model":"m","max_tokens":500,%b}' % prompts, path))
        served(bench, told(8, 30 * answers))
    assert 0 <= bench.recorder.requests[0].reserved_tokens - 500 * answers < 60
    assert 30 <= bench.pipeline.answers.usual("default", "m") < 40


def test_what_was_told_before_the_end_of_a_stream_is_not_all_that_was_got() -> None:
    bench = metered()
    client = bench.begin(asked(b'{"model":"m","messages":[],"stream":true,"max_tokens":500}', b"/v1/messages"))
    bench.link.heads().says(
        b"event: message_start\n"
        b'data: {"type":"message_start","message":{"usage":{"input_tokens":8,"output_tokens":1}}}\n\n'
    )
    for _ in range(300):
        bench.link.says(
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"text":" and"}}\n\n'
        )
    assert client.exchange is not None
    client.exchange.client_left()
    assert bench.ledger.counts["q"].settled_tokens == 308 and not bench.held()


@pytest.mark.parametrize(
    ("path", "event"),
    [
        (b"/v1/messages", b'{"type":"content_block_delta","index":0,"delta":{"text":"%b"}}'),
        (b"/v1/messages", b'{"type":"content_block_delta","index":0,"delta":{"thinking":"%b"}}'),
        (b"/v1/messages", b'{"type":"content_block_delta","index":0,"delta":{"partial_json":"%b"}}'),
        (b"/v1/responses", b'{"type":"response.output_text.delta","delta":"%b"}'),
    ],
)
def test_who_leaves_just_before_the_usage_pays_for_all_of_the_text(path: bytes, event: bytes) -> None:
    bench = metered()
    client = bench.begin(asked(b'{"model":"m","messages":[],"input":"a","stream":true,"max_tokens":500}', path))
    bench.link.heads()
    for _ in range(3):
        bench.link.says(b"data: " + event % (b"word " * 120) + b"\n\n")
    assert client.exchange is not None
    client.exchange.client_left()
    assert 300 <= bench.ledger.counts["q"].settled_tokens < 320 and not bench.held()


def test_a_response_that_goes_on_in_the_background_pays_what_it_reserved() -> None:
    bench = metered()
    for status, paid in ((b"queued", 500), (b"completed", 0)):
        before = bench.ledger.counts["q"].settled_tokens
        body = b'{"model":"m","input":"hello","background":true,"max_output_tokens":500}'
        bench.begin(asked(body, b"/v1/responses"))
        served(bench, b'{"id":"r","object":"response","status":"%b","output":[],"usage":null}' % status)
        assert paid <= bench.ledger.counts["q"].settled_tokens - before < paid + 60
    assert bench.pipeline.answers.usual("default", "m") == 256


@pytest.mark.parametrize("model", [b"", b'"model":"",', b'"model":null,', b'"model":"llama-3",'])
def test_who_names_no_model_escapes_no_quota_of_one(model: bytes) -> None:
    quota = Quota(name="q", models=("llama*",), tokens_per_minute=10)
    bench = Bench(service(1, models=("llama-3",)), quotas=(quota,))
    client = bench.begin(asked(b'{%b"prompt":"hello","max_tokens":100}' % model))
    assert refused(client) is Reason.QUOTA_EXCEEDED


def test_what_is_for_no_model_is_held_by_no_quota_of_one() -> None:
    quota = Quota(name="q", models=("llama*",), tokens_per_minute=10)
    bench = Bench(service(1), quotas=(quota,))
    assert bench.begin(asked(b"sound", b"/v1/audio/transcriptions")).refusal is None


def test_what_reached_no_engine_was_no_request() -> None:
    bench = metered()
    bench.connector.later = True
    for _ in range(60):  # more than the quota has
        client = bench.begin(asked(b'{"model":"m","prompt":"hello"}'))
        bench.connector.refuse()
        assert refused(client) is not Reason.QUOTA_EXCEEDED
    (budget,) = bench.ledger.budgets("a", "m")
    assert [meter.own for meter in budget.meters] == [0, 0] and not bench.held()


def test_what_reached_one_engine_was_a_request_though_the_next_was_not_there() -> None:
    quota = Quota(name="q", tokens_per_minute=100_000, requests_per_minute=50)
    bench = Bench(service(2, retry=Retry(attempts=2)), quotas=(quota,))
    bench.connector.later = True
    client = bench.begin(asked(b'{"model":"m","prompt":"hello"}'))
    bench.connector.connect().heads(head_of(500, JSON, 2)).says(b"{}").ends()
    bench.connector.refuse()
    assert refused(client) is Reason.UPSTREAM_CONNECT
    (budget,) = bench.ledger.budgets("a", "m")
    assert [meter.own for meter in budget.meters] == [0, 1] and not bench.held()


def test_who_is_refused_before_anything_is_counted_is_told_what_is_left() -> None:
    bench = metered(breakers=request_breaker(1))
    bench.begin(asked(b'{"model":"m","prompt":"hello"}'))
    bench.link.heads(head_of(500, JSON, 2)).says(b"{}").ends()
    client = bench.begin(asked(b'{"model":"m","prompt":"hello"}'))
    assert refused(client) is Reason.REQUEST_OPEN
    assert b"x-ratelimit-remaining-requests: 49\r\n" in client.extra
