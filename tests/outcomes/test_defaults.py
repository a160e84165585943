"""Breakers as they are by default, all three at once: whose failures open what."""

import pytest

from sidecar.core.breaker import State
from sidecar.policy.schema import Breakers, NodeBreaker, RequestBreaker, Retry, Seconds, SessionBreaker
from tests.harness import Upstream, answers, one_by_one, request, response, says
from tests.under_test import JSON, chat, error_body, json_answer, refusal, service, sidecar, whole_stream

BROKEN = says(json_answer(error_body(), b"500 Oh", [b"connection: close"]))
BATCH = request(b"/v1/completions", method=b"POST", headers=[JSON], body=b'{"model":"m","prompt":"x"}')


async def test_lone_endpoint_that_fails_opens_no_kind_of_request_and_serves_again_at_once() -> None:
    async with (
        Upstream(one_by_one(*[BROKEN] * 30, says(whole_stream()))) as upstream,
        sidecar(service(upstream, breakers=Breakers(), retry=Retry(attempts=1))) as proxy,
    ):
        for _ in range(30):
            assert (await proxy.once(chat())).status == 500
        assert proxy.state("node", upstream.key) is State.CLOSED
        assert (await proxy.once(chat())).status == 200


async def test_endpoints_that_cannot_be_reached_open_no_kind_of_request() -> None:
    async with Upstream(answers(response())) as upstream:
        upstream.stop_listening()
        async with sidecar(service(upstream, breakers=Breakers(), retry=Retry(attempts=1))) as proxy:
            for _ in range(15):
                assert refusal(await proxy.once(chat()))[1] == "upstream_connect"


async def test_kind_of_request_that_fails_beside_others_that_do_not_is_opened() -> None:
    bad = json_answer(error_body(), b"500 Oh")
    good = whole_stream()

    async def play(peer: object) -> None:
        while True:
            asked = await peer.request()  # type: ignore[attr-defined]
            await peer.send(bad if asked.target == b"/v1/completions" else good)  # type: ignore[attr-defined]

    async with (
        Upstream(play) as upstream,
        sidecar(service(upstream, breakers=Breakers(), retry=Retry(attempts=1))) as proxy,
    ):
        for _ in range(10):
            assert (await proxy.once(BATCH)).status == 500
            assert (await proxy.once(chat())).status == 200
        assert refusal(await proxy.once(BATCH))[1] == "request_open"
        assert (await proxy.once(chat())).status == 200


@pytest.mark.parametrize("rule", ["node", "session", "request"])
async def test_fallback_serves_what_an_open_breaker_refuses(rule: str) -> None:
    breakers = Breakers(
        node=NodeBreaker(mode="enforce" if rule == "node" else "off", consecutive=1, min_closed_ratio=0.0),
        session=SessionBreaker(mode="enforce" if rule == "session" else "off", consecutive=1, open_s=Seconds(60)),
        request=RequestBreaker(mode="enforce" if rule == "request" else "off", consecutive=1, open_s=Seconds(5)),
    )
    async with Upstream(one_by_one(BROKEN)) as bad, Upstream(one_by_one(says(whole_stream()))) as good:
        main = service(bad, name="chat", models=("*",), fallback="small", breakers=breakers, retry=Retry(attempts=1))
        small = service(good, name="small", models=())
        async with sidecar(main, small) as proxy:
            assert (await proxy.once(chat(session="s1"))).status == 500
            got = await proxy.once(chat(session="s1"))
            assert (got.status, got.header(b"x-sidecar-endpoint")) == (200, good.key.encode())
            assert len(bad.requests) == 1


async def test_fallback_serves_while_the_only_endpoint_is_down_and_held_closed() -> None:
    async with Upstream(answers(response())) as bad, Upstream(one_by_one(says(whole_stream()))) as good:
        bad.stop_listening()
        main = service(bad, name="chat", models=("*",), fallback="small", breakers=Breakers(), retry=Retry())
        small = service(good, name="small", models=())
        async with sidecar(main, small) as proxy:
            assert [(await proxy.once(chat())).status for _ in range(20)] == [200] * 20


async def test_what_is_no_inference_opens_nothing_however_often_it_fails() -> None:
    breakers = Breakers(node=NodeBreaker(consecutive=1, min_closed_ratio=0.0))
    async with (
        Upstream(answers(response())) as upstream,
        sidecar(service(upstream, breakers=breakers, retry=Retry(attempts=1))) as proxy,
    ):
        upstream.stop_listening()
        for _ in range(5):
            assert (await proxy.once(request(b"/some/page"))).status == 502
        assert proxy.state("node", upstream.key) is State.CLOSED
        assert (await proxy.once(chat())).status == 502
        assert proxy.state("node", upstream.key) is State.OPEN


async def test_request_without_the_header_that_names_its_kind_is_of_no_kind() -> None:
    breakers = Breakers(
        node=NodeBreaker(mode="off"),
        session=SessionBreaker(mode="off"),
        request=RequestBreaker(consecutive=1, key="header:x-job"),
    )
    async with (
        Upstream(one_by_one(BROKEN)) as upstream,
        sidecar(service(upstream, breakers=breakers, retry=Retry(attempts=1))) as proxy,
    ):
        for _ in range(3):
            assert (await proxy.once(chat())).status == 500
        assert (await proxy.once(chat(headers=[b"x-job: a"]))).status == 500
        assert refusal(await proxy.once(chat(headers=[b"x-job: a"])))[1] == "request_open"
        assert (await proxy.once(chat(headers=[b"x-job: b"]))).status == 500
