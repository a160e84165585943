"""Requests for engines that speak otherwise: over real sockets, with engines that answer as the real ones did."""

import asyncio

import msgspec
import pytest

from sidecar.adapters import TRANSLATORS
from sidecar.adapters.ask import MOST_BYTES
from sidecar.core.breaker import State
from sidecar.core.revise import Accepted, Update
from sidecar.core.table import Target
from sidecar.policy.schema import FRONTS, Endpoint, Retry, Seconds, is_translated
from sidecar.wire.call import API_BY_PATH, Api
from tests.harness import Peer, Script, Upstream, answers, chunked, one_by_one, request, says
from tests.under_test import (
    DONE,
    JSON,
    PATIENT,
    chat,
    endpoint,
    error_body,
    event,
    json_answer,
    node_breaker,
    refusal,
    service,
    sidecar,
    stream_head,
)

CHAT = b"/v1/chat/completions"
COMPLETIONS = b"/v1/completions"


def completion(*, stream: bool, **more: object) -> bytes:
    """A text completion request."""
    body: dict[str, object] = {"model": "m", "stream": stream, "prompt": "hi", "max_tokens": 8}
    return request(COMPLETIONS, method=b"POST", headers=[JSON], body=msgspec.json.encode(body | more))


def said(text: bytes) -> bytes:
    """An event of Triton's generate_stream."""
    return event(b'{"model_name":"m","model_version":"1","text_output":"%b"}' % text)


WORDS = [said(b" tok%d" % number) for number in range(3)]


def triton(upstream: Upstream, **changes: object) -> Endpoint:
    return endpoint(upstream, engine="triton", **changes)


def texts(body: bytes) -> list[str]:
    """The texts of a completions stream."""
    found: list[str] = []
    for block in body.split(b"\n\n"):
        data = block.removeprefix(b"data: ")
        if data and data != b"[DONE]":
            found.extend(choice["text"] for choice in msgspec.json.decode(data)["choices"])
    return found


def plays(*reads: bytes, end: bool = True) -> Script:
    """An engine that streams these events to each request, one HTTP chunk each."""
    return answers(stream_head() + chunked(*reads, end=end))


@pytest.fixture(params=[False, True], ids=["whole", "split"])
def split(request: pytest.FixtureRequest) -> bool:
    """Whether both ends send byte by byte."""
    return bool(request.param)


@pytest.mark.parametrize("engine", ["vllm", "triton", "deepspeed"])
def test_every_front_has_a_translator_or_needs_none(engine: str) -> None:
    for front in FRONTS[engine]:  # type: ignore[index]
        translated = is_translated(Endpoint(url="http://a:1", engine=engine, front=front))  # type: ignore[arg-type]
        assert ((engine, front) in TRANSLATORS) == translated


async def test_a_stream_is_asked_in_the_engines_words_and_answered_in_ours(split: bool) -> None:
    async with (
        Upstream(plays(*WORDS), split=split) as upstream,
        sidecar(service(triton(upstream))) as proxy,
        proxy.client(split=split) as client,
    ):
        got = await client.ask(completion(stream=True))
        sent = upstream.requests[0]
    assert sent.start == b"POST /v2/models/m/generate_stream HTTP/1.1"
    assert msgspec.json.decode(sent.body)["text_input"] == "hi"
    assert (got.status, got.header(b"content-type")) == (200, b"text/event-stream; charset=utf-8")
    assert texts(got.body) == [" tok0", " tok1", " tok2", ""]
    assert got.body.endswith(DONE)
    assert got.header(b"x-sidecar-endpoint") == upstream.key.encode()


async def test_a_client_that_does_not_stream_gets_what_was_streamed_as_one_answer(split: bool) -> None:
    async with (
        Upstream(plays(*WORDS), split=split) as upstream,
        sidecar(service(triton(upstream))) as proxy,
        proxy.client(split=split) as client,
    ):
        got = await client.ask(completion(stream=False))
        again = await client.ask(completion(stream=False))
        assert upstream.requests[0].start == b"POST /v2/models/m/generate_stream HTTP/1.1"
        assert len(upstream.connections) == 1
    assert (got.status, got.header(b"content-type")) == (200, b"application/json")
    assert msgspec.json.decode(got.body)["choices"][0]["text"] == " tok0 tok1 tok2"
    assert got.framing == again.framing == "length"


async def test_what_the_client_says_of_its_body_and_of_answers_stays_here() -> None:
    headers = [JSON, b"Accept-Encoding: gzip", b"Accept: text/event-stream", b"Authorization: Bearer x", b"X-A: b"]
    body = msgspec.json.encode({"model": "m", "prompt": "hi", "stream": True})
    async with Upstream(plays(*WORDS)) as upstream, sidecar(service(triton(upstream))) as proxy:
        await proxy.once(request(COMPLETIONS, method=b"POST", headers=headers, body=body))
        sent = upstream.requests[0]
    assert not [name for name, _ in sent.headers if name.lower() in (b"accept", b"accept-encoding")]
    assert [value for name, value in sent.headers if name.lower() == b"content-type"] == [b"application/json"]
    assert sent.header(b"Authorization") == b"Bearer x"
    assert sent.header(b"X-A") == b"b"
    assert int(sent.header(b"content-length")) == len(sent.body)


async def test_the_engines_own_paths_go_by_untouched() -> None:
    body = b'{"text_input":"hi","whatever":1}'
    async with (
        Upstream(answers(json_answer(b'{"text_output":"x"}'))) as upstream,
        sidecar(service(triton(upstream))) as proxy,
    ):
        got = await proxy.once(request(b"/v2/models/m/generate", method=b"POST", headers=[JSON], body=body))
        assert upstream.requests[0].body == body
    assert (got.status, got.body) == (200, b'{"text_output":"x"}')


async def test_an_error_under_a_lying_status_is_told_with_the_right_one() -> None:
    dead = json_answer(b"""{"error":"Stub process 'm_0_0' is not healthy."}""", b"400 Bad Request")
    async with (
        Upstream(answers(dead)) as upstream,
        sidecar(service(triton(upstream), breakers=node_breaker())) as proxy,
    ):
        got = await proxy.once(completion(stream=False))
        assert got.status == 500
        assert b"not healthy" in got.body
        assert msgspec.json.decode(got.body)["error"]["code"] == 500
        assert refusal(await proxy.once(completion(stream=False)))[1] == "breaker_open"


@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_before_the_first_token_goes_elsewhere(stream: bool) -> None:
    broken = event(b'{"error":"engine exploded mid-stream"}')
    async with (
        Upstream(answers(stream_head(b"400 Bad Request") + chunked(broken))) as bad,
        Upstream(plays(*WORDS)) as good,
        sidecar(
            service(triton(bad, version="a"), triton(good, version="b"), retry=Retry(attempts=2, budget_min=100))
        ) as proxy,
    ):
        for _ in range(64):  # a version is drawn by lot
            got = await proxy.once(completion(stream=stream))
            assert got.status == 200
            if bad.requests:
                break
        assert bad.requests
    assert b"tok2" in got.body


async def test_an_error_in_the_middle_ends_the_stream_without_a_good_end() -> None:
    async with (
        Upstream(plays(*WORDS, event(b'{"error":"engine exploded mid-stream"}'))) as upstream,
        sidecar(service(triton(upstream), breakers=node_breaker())) as proxy,
    ):
        got = await proxy.once(completion(stream=True))
        assert got.status == 200
        assert b"engine exploded" in got.body
        assert DONE not in got.body
        assert refusal(await proxy.once(completion(stream=True)))[1] == "breaker_open"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stream_that_breaks_off_is_no_answer(stream: bool) -> None:
    async def breaks(peer: Peer) -> None:
        await peer.request()
        await peer.send(stream_head() + chunked(*WORDS, end=False))
        await peer.settled()
        peer.reset()

    async with Upstream(breaks) as upstream, sidecar(service(triton(upstream), breakers=node_breaker())) as proxy:
        got = await proxy.once(completion(stream=stream))
        assert got.status == (200 if stream else 502)
        assert b"upstream_truncated" in got.body
        assert DONE not in got.body
        assert refusal(await proxy.once(completion(stream=stream)))[1] == "breaker_open"


async def test_what_breaks_after_the_engines_end_marker_takes_nothing_away() -> None:
    said_all = [
        event(b'{"id":"c","choices":[{"index":0,"delta":{"content":"Hello"},"finish_reason":null}]}'),
        event(b'{"id":"c","choices":[{"index":0,"delta":{"content":""},"finish_reason":"stop"}]}'),
        event(b"[DONE]"),
    ]

    async def breaks(peer: Peer) -> None:
        await peer.request()
        await peer.send(stream_head() + chunked(*said_all, end=False))
        await peer.settled()
        peer.reset()

    async with (
        Upstream(breaks) as upstream,
        sidecar(service(endpoint(upstream, engine="deepspeed"), breakers=node_breaker())) as proxy,
    ):
        for _ in range(3):
            got = await proxy.once(chat())
            assert got.status == 200
            assert got.body.endswith(DONE)
            assert b'"finish_reason":"stop"' in got.body


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_the_engines_stream(stream: bool) -> None:
    gone = asyncio.Event()

    async def goes_on(peer: Peer) -> None:
        await peer.request()
        await peer.send(stream_head() + chunked(WORDS[0], end=False))
        await peer.gone()
        gone.set()

    async with Upstream(goes_on) as upstream, sidecar(service(triton(upstream))) as proxy:
        async with proxy.client() as client:
            await client.send(completion(stream=stream))
            await upstream_asked(upstream)
            if stream:
                await client.seen(b"tok0")
        await asyncio.wait_for(gone.wait(), 5)


async def upstream_asked(upstream: Upstream) -> None:
    while not upstream.requests:
        await asyncio.sleep(0.002)


async def test_an_answer_that_is_collected_may_take_as_long_as_its_tokens_come() -> None:
    deadlines = msgspec.structs.replace(PATIENT, head_s=Seconds(0.3), token_gap_s=Seconds(5))

    async def slow(peer: Peer) -> None:
        await peer.request()
        await peer.send(stream_head())
        for word in WORDS:
            await peer.send(chunked(word, end=False))
            await asyncio.sleep(0.2)
        await peer.send(b"0\r\n\r\n")

    async with Upstream(slow) as upstream, sidecar(service(triton(upstream), deadlines=deadlines)) as proxy:
        assert (await proxy.once(completion(stream=False))).status == 200


async def test_an_answer_that_is_collected_and_stops_is_given_up() -> None:
    deadlines = msgspec.structs.replace(PATIENT, token_gap_s=Seconds(0.1))

    async def stalls(peer: Peer) -> None:
        await peer.request()
        await peer.send(stream_head() + chunked(WORDS[0], end=False))
        await peer.gone()

    async with Upstream(stalls) as upstream, sidecar(service(triton(upstream), deadlines=deadlines)) as proxy:
        assert refusal(await proxy.once(completion(stream=False)))[:2] == (504, "head_timeout")


@pytest.mark.parametrize("words", [0, 3])
async def test_an_error_among_what_is_collected_is_not_waited_for_the_end_of(words: int) -> None:
    # With HEAD_TIMEOUT its prompt would be taken for one that engines hang on.
    failing = plays(*WORDS[:words], event(b'{"error":"no"}'), end=False)
    async with Upstream(failing, eager=True) as upstream, Upstream(plays(*WORDS)) as other:
        both = service(triton(upstream), triton(other), retry=Retry(attempts=2), breakers=node_breaker())
        async with sidecar(both) as proxy:
            while not upstream.requests:
                got = await proxy.once(completion(stream=False))
                assert (got.status, got.header(b"x-sidecar-endpoint")) == (200, other.key.encode())
            assert proxy.state("node", upstream.key) is State.OPEN
        async with sidecar(service(triton(upstream))) as proxy:
            got = await proxy.once(completion(stream=False))
    assert (got.status, got.framing) == (500, "length")
    assert msgspec.json.decode(got.body)["error"]["message"] == "no"


@pytest.mark.parametrize("size", [1, 30_000])
async def test_an_answer_that_was_collected_to_its_end_marker_is_one(size: int) -> None:
    text = b"a" * size
    pieces = [event(b'{"text":["%b"]}' % text)] * 3
    script = plays(*pieces, event(b'{"text":[""]}'), event(b"[DONE]"), end=False)
    async with (
        Upstream(script) as upstream,
        sidecar(service(endpoint(upstream, engine="deepspeed", front="api_server"))) as proxy,
    ):
        got = await proxy.once(completion(stream=False))
    assert (got.status, got.framing) == (200, "length")
    assert msgspec.json.decode(got.body)["choices"][0]["text"] == text.decode() * 3


async def test_a_compressed_answer_is_none() -> None:
    zipped = json_answer(b"\x1f\x8b123", headers=[b"content-encoding: gzip"])
    async with Upstream(answers(zipped)) as upstream, sidecar(service(triton(upstream))) as proxy:
        assert refusal(await proxy.once(completion(stream=False)))[:2] == (502, "upstream_protocol")


# --- what an engine cannot do -----------------------------------------------------------------------------------------


LACKED = [
    pytest.param({"n": 2}, "n", id="n"),
    pytest.param({"logprobs": 1}, "logprobs", id="logprobs"),
    pytest.param({"response_format": {"type": "json_object"}}, "response_format", id="response_format"),
    pytest.param({"prompt": ["a", "b"]}, "prompt", id="prompts"),
    pytest.param({"prompt": [1, 2]}, "prompt", id="token-ids"),
    pytest.param({"echo": True}, "echo", id="echo"),
    pytest.param({"logit_bias": {"1": 2}}, "logit_bias", id="logit_bias"),
]


@pytest.mark.parametrize(("field", "param"), LACKED)
async def test_what_no_engine_can_do_is_a_clear_400(field: dict[str, object], param: str) -> None:
    async with Upstream(plays(*WORDS)) as upstream, sidecar(service(triton(upstream))) as proxy:
        got = await proxy.once(completion(stream=False, **field))
        assert refusal(got) == (400, "unsupported", "unsupported")
        error = msgspec.json.decode(got.body)["error"]
        assert error["param"] == param
        assert error["message"].startswith(f"Triton's generate API cannot do `{param}`: ")
        assert upstream.connections == []


@pytest.mark.parametrize(("field", "param"), LACKED)
async def test_what_no_engine_of_a_model_can_do_is_a_400_whatever_others_can(
    field: dict[str, object], param: str
) -> None:
    async with (
        Upstream(plays(*WORDS)) as lacks,
        Upstream(plays(*WORDS)) as other,
        Upstream(answers(json_answer(b'{"choices":[{"text":"x","finish_reason":"stop"}]}'))) as can,
        sidecar(
            service(
                triton(lacks, models=("m",)),
                endpoint(other, engine="deepspeed", models=("x",)),
                endpoint(can, models=("x",)),
            )
        ) as proxy,
    ):
        got = await proxy.once(completion(stream=False, **field))
        assert refusal(got) == (400, "unsupported", "unsupported")
        error = msgspec.json.decode(got.body)["error"]
        assert error["param"] == param
        assert "Triton" in error["message"]
        got = await proxy.once(completion(stream=False, model="y", **field))
        assert refusal(got)[:2] == (404, "unknown_model")
        assert not lacks.connections + other.connections + can.connections


async def test_a_body_that_is_too_large_to_be_translated_goes_where_none_is() -> None:
    large = completion(stream=False, prompt="a" * MOST_BYTES)
    async with (
        Upstream(plays(*WORDS)) as lacks,
        Upstream(answers(json_answer(b'{"choices":[{"text":"x","finish_reason":"stop"}]}'))) as can,
    ):
        async with sidecar(service(triton(lacks), endpoint(can))) as proxy:
            assert (await proxy.once(large)).header(b"x-sidecar-endpoint") == can.key.encode()
        async with sidecar(service(triton(lacks))) as proxy:
            assert refusal(await proxy.once(large))[:2] == (413, "too_large")
        assert lacks.connections == []


@pytest.mark.parametrize(("field", "param"), LACKED)
async def test_what_one_engine_cannot_do_another_does(field: dict[str, object], param: str) -> None:
    async with (
        Upstream(plays(*WORDS)) as lacks,
        Upstream(answers(json_answer(b'{"choices":[{"text":"x","finish_reason":"stop"}]}'))) as can,
        sidecar(service(triton(lacks), endpoint(can))) as proxy,
    ):
        for _ in range(6):
            got = await proxy.once(completion(stream=False, **field))
            assert (got.status, got.header(b"x-sidecar-endpoint")) == (200, can.key.encode())
        assert lacks.connections == []


async def test_a_value_that_no_engine_takes_is_no_attempt_and_takes_no_probe() -> None:
    async with (
        Upstream(
            one_by_one(says(json_answer(b'{"error":"x"}', b"500 x")), *[says(stream_head() + chunked(*WORDS))] * 9)
        ) as upstream,
        sidecar(service(triton(upstream), breakers=node_breaker(open_s=Seconds(0.05)))) as proxy,
    ):
        assert (await proxy.once(completion(stream=False))).status == 500
        assert proxy.state("node", upstream.key) is State.OPEN
        await asyncio.sleep(0.06)
        for _ in range(3):
            got = await proxy.once(completion(stream=False, temperature=-1))
            assert refusal(got)[:2] == (400, "bad_request")
            assert not got.values(b"x-sidecar-attempts")
        assert len(upstream.requests) == 1
        while proxy.state("node", upstream.key) is not State.CLOSED:
            assert (await proxy.once(completion(stream=False))).status == 200


@pytest.mark.parametrize("path", [b"/v1/embeddings", b"/v1/responses", b"/v1/messages"])
async def test_an_api_that_no_engine_speaks_is_a_clear_400(path: bytes) -> None:
    body = b'{"model":"m","input":"x"}'
    async with Upstream(plays(*WORDS)) as upstream, sidecar(service(triton(upstream))) as proxy:
        got = await proxy.once(request(path, method=b"POST", headers=[JSON], body=body))
        assert refusal(got)[:2] == (400, "unsupported")
        error = msgspec.json.decode(got.body)["error"]
        assert error["param"] is None, "no field of the body is at fault"
        assert error["message"].startswith("Triton's generate API cannot do this: it has no ")
        assert upstream.connections == []


OTHER_PATHS = [path for path, api in API_BY_PATH.items() if api is Api.OTHER]


@pytest.mark.parametrize("path", OTHER_PATHS)
async def test_vllms_other_paths_are_asked_of_those_who_may_have_them(path: bytes) -> None:
    asked = request(path, method=b"POST", headers=[JSON], body=b'{"model":"m","query":"x"}')
    async with (
        Upstream(answers(json_answer(b"{}"))) as lacks,
        Upstream(answers(json_answer(b"{}"))) as mii,
        Upstream(answers(json_answer(b"{}"))) as can,
    ):
        others = triton(lacks), endpoint(mii, engine="deepspeed", front="api_server")
        async with sidecar(service(*others, endpoint(can))) as proxy:
            for _ in range(6):
                assert (await proxy.once(asked)).status == 200
        async with sidecar(service(*others)) as proxy:
            got = await proxy.once(asked)
        if path == b"/generate":
            assert got.header(b"x-sidecar-endpoint") == mii.key.encode()
        else:
            assert refusal(got)[:2] == (400, "unsupported")
            assert mii.connections == []
        assert lacks.connections == []
        assert {each.body for each in [*mii.requests, *can.requests]} == {b'{"model":"m","query":"x"}'}


async def test_a_chat_needs_a_template_where_the_front_has_none() -> None:
    async with Upstream(plays(*WORDS)) as upstream, sidecar(service(triton(upstream))) as proxy:
        got = await proxy.once(chat(stream=False))
        assert refusal(got)[:2] == (400, "unsupported")
        assert b"chat_template" in got.body


class OnDisk:
    """Templates of which one is being read."""

    def __init__(self) -> None:
        self.reading = True

    def of(self, path: str) -> None:
        return None

    def why_not(self, path: str) -> str:
        return "its chat_template has not been read yet" if path else "its endpoint has no chat_template"

    def awaits(self, path: str) -> bool:
        return self.reading and path == "/t"


@pytest.mark.parametrize("templates", [("/t", ""), ("", "/t")], ids=["first", "last"])
async def test_a_chat_whose_template_is_being_read_may_come_again(templates: tuple[str, str]) -> None:
    async with (
        Upstream(plays(*WORDS)) as one,
        Upstream(plays(*WORDS)) as other,
        sidecar(
            service(*(triton(each, chat_template=t) for each, t in zip((one, other), templates, strict=True)))
        ) as proxy,
    ):
        found = proxy.running.pipeline.templates = OnDisk()
        got = await proxy.once(chat(stream=False))
        assert refusal(got)[:2] == (503, "no_endpoint")
        assert b"has not been read yet" in got.body
        assert got.header(b"retry-after") == b"1"
        assert (await proxy.once(completion(stream=False))).status == 200
        assert refusal(await proxy.once(completion(stream=False, n=2)))[:2] == (400, "unsupported")
        found.reading = False
        assert refusal(await proxy.once(chat(stream=False)))[:2] == (400, "unsupported")


@pytest.mark.parametrize("body", [b'{"model":"m"}', b'{"model":"m","messages":[]}', b'{"model":"m","messages":null}'])
async def test_a_chat_of_nothing_is_a_bad_request(body: bytes) -> None:
    async with Upstream(plays(*WORDS)) as upstream, sidecar(service(triton(upstream))) as proxy:
        got = await proxy.once(request(CHAT, method=b"POST", headers=[JSON], body=body))
        assert refusal(got)[:2] == (400, "bad_request")
        assert b"messages" in got.body
        assert upstream.connections == []


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","prompt":"x","stop":[1]}',
        b'{"model":"m","prompt":{}}',
        b'{"model":"m","prompt":3}',
        b'{"model":"m"}',
    ],
)
async def test_a_body_that_cannot_be_read_is_a_bad_request_unless_an_engine_may_judge_it(body: bytes) -> None:
    asked = request(COMPLETIONS, method=b"POST", headers=[JSON], body=body)
    refused = json_answer(error_body(b"bad", b"400", b"BadRequestError"), b"400 Bad Request")
    async with (
        Upstream(plays(*WORDS)) as translated,
        Upstream(answers(refused)) as judge,
        sidecar(
            service(triton(translated), name="t", models=("m",)), service(endpoint(judge), name="v", models=("v",))
        ) as proxy,
    ):
        got = await proxy.once(asked)
        assert refusal(got)[:2] == (400, "bad_request")
        assert translated.connections == []
    async with (
        Upstream(plays(*WORDS)) as translated,
        Upstream(answers(refused)) as judge,
        sidecar(service(triton(translated), endpoint(judge))) as proxy,
    ):
        assert (await proxy.once(asked)).header(b"x-sidecar-endpoint") == judge.key.encode()


async def test_a_session_comes_back_to_the_version_that_could_not_do_one_request() -> None:
    """A version on Triton, one on vLLM: what Triton lacks is a detour, and no move."""
    whole = answers(json_answer(b'{"choices":[{"text":"x","finish_reason":"stop"}]}'))
    async with (
        Upstream(plays(*WORDS)) as lacks,
        Upstream(plays(*WORDS)) as twin,
        Upstream(whole) as can,
        Upstream(whole) as other,
        sidecar(
            service(
                triton(lacks, version="v2"),
                triton(twin, version="v2"),
                endpoint(can, version="v1"),
                endpoint(other, version="v1"),
                split={"v1": 0.5, "v2": 0.5},
            )
        ) as proxy,
    ):

        async def asked(session: int, **field: object) -> bytes:
            body = msgspec.json.encode({"model": "m", "prompt": "hi", "stream": False} | field)
            head = [JSON, b"x-session-id: s%d" % session]
            got = await proxy.once(request(COMPLETIONS, method=b"POST", headers=head, body=body))
            assert got.status == 200
            return got.header(b"x-sidecar-endpoint")

        bound = {session: await asked(session) for session in range(12)}
        tritons, vllms = {lacks.key.encode(), twin.key.encode()}, {can.key.encode(), other.key.encode()}
        assert set(bound.values()) & tritons and set(bound.values()) & vllms
        for session, place in bound.items():
            detour = await asked(session, n=2)
            assert detour in vllms
            assert detour == place or place in tritons
            assert await asked(session) == place
        # Who begins with it stays where it was served.
        first = await asked(99, n=2)
        assert first in vllms
        assert [await asked(99), await asked(99, n=2)] == [first, first]


async def test_who_is_open_is_probed_though_no_request_can_go_everywhere() -> None:
    """What one endpoint cannot do makes no request a re-sent one, which would probe nobody while others serve."""
    fine, broken = json_answer(b'{"choices":[{"text":"x","finish_reason":"stop"}]}'), json_answer(error_body())
    sick = [broken]

    async def recovers(peer: Peer) -> None:
        while await peer.request():
            await peer.send(sick[0] if sick else fine)

    async with (
        Upstream(plays(*WORDS)) as lacks,
        Upstream(answers(fine)) as well,
        Upstream(recovers) as ill,
        sidecar(
            service(
                triton(lacks),
                endpoint(well),
                endpoint(ill),
                breakers=node_breaker(open_s=Seconds(0.05)),
                retry=Retry(attempts=3, budget_min=100),
            )
        ) as proxy,
    ):

        async def asked() -> int:
            assert (await proxy.once(completion(stream=False, n=2))).status == 200
            return len(ill.requests)

        while not await asked():
            pass
        sick.clear()
        while await asked() < 2:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("field", "status"), [({}, 200), ({"n": 2}, 500)])
async def test_an_endpoint_that_became_another_engines_meanwhile_is_asked_as_that(
    field: dict[str, object], status: int
) -> None:
    """The policy was changed while the first attempt was under way; the second is at an endpoint of the new one."""
    asked, goes_on = asyncio.Event(), asyncio.Event()

    async def fails(peer: Peer) -> None:
        while await peer.request():
            asked.set()
            await goes_on.wait()
            await peer.send(json_answer(error_body(), b"500 x"))

    async with Upstream(fails) as first, Upstream(plays(*WORDS), eager=True) as second:
        before = service(endpoint(first), retry=Retry(attempts=2, budget_min=9))
        async with sidecar(before) as proxy, proxy.client() as client:
            await client.send(completion(stream=False, **field))
            await asked.wait()
            after = msgspec.structs.replace(before, endpoints=(endpoint(first), triton(second)))
            proxy.running.apply(msgspec.structs.replace(proxy.running.store.current, services=(after,), version=2))
            goes_on.set()
            assert (await client.response()).status == status
    starts = [each.start for each in second.requests]
    assert starts == ([b"POST /v2/models/m/generate_stream HTTP/1.1"] if status == 200 else [])


async def test_a_version_of_a_routing_table_is_asked_as_the_table_says() -> None:
    said = json_answer(b'[{"generated_text":"x","prompt_length":1,"generated_length":1,"finish_reason":"stop"}]')
    async with Upstream(answers(said)) as upstream, sidecar(service(name="s")) as proxy:
        update = Update(
            service="s",
            version="v1",
            engine="deepspeed",
            front="gateway",
            engine_model="llama",
            endpoints=(Target(upstream.url),),
        )
        assert isinstance(await proxy.running.routes.submit(update), Accepted)
        got = await proxy.once(completion(stream=False))
        assert (got.status, got.header(b"x-sidecar-version")) == (200, b"v1")
    assert upstream.requests[0].start == b"POST /mii/llama HTTP/1.1"
    assert msgspec.json.decode(got.body)["choices"][0]["text"] == "x"


# --- moving between engines -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_moves_from_one_kind_of_engine_to_another(stream: bool) -> None:
    async def dies(peer: Peer) -> None:
        await peer.request()
        peer.reset()

    async with (
        Upstream(dies) as first,
        Upstream(plays(*WORDS)) as second,
        sidecar(service(endpoint(first), triton(second), retry=Retry(attempts=3, budget_min=100))) as proxy,
    ):
        for _ in range(64):  # who is asked is drawn by lot
            got = await proxy.once(completion(stream=stream))
            assert got.status == 200
            assert got.body.count(b"tok2") == 1
            if first.requests:
                break
        assert first.requests
