"""T23 (a, b, e): contended is 429, unable is 503, draining is 503; each with its own word and one shape."""

import asyncio

import msgspec
import pytest

from sidecar.core.breaker import State
from sidecar.policy.schema import Endpoint, Overload, Retry, Seconds
from sidecar.settings import Listen
from tests.harness import Gone, Message, Peer, Upstream, connect, one_by_one, request, says
from tests.under_test import (
    NO_RETRY,
    PATIENT,
    Sidecar,
    behind,
    chat,
    endpoint,
    error_body,
    json_answer,
    node_breaker,
    refusal,
    service,
    sidecar,
    stream_of,
    token,
    whole_stream,
)

BROKEN = says(json_answer(error_body(), b"500 Oh"))
OK = says(whole_stream())


def full(*headers: bytes, status: bytes = b"429 Slow") -> bytes:
    return json_answer(error_body(b"queue is full", b"429"), status, headers)


@pytest.mark.parametrize("status", [b"429 Slow", b"503 Busy", b"529 Full"], ids=lambda status: status[:3].decode())
async def test_all_nodes_full_is_429_until_the_earliest(status: bytes) -> None:
    async with (
        Upstream(one_by_one(says(full(b"Retry-After: 30", status=status)))) as one,
        Upstream(one_by_one(says(full(b"Retry-After: 7", status=status)))) as two,
        sidecar(service(one, two, breakers=node_breaker(1), retry=NO_RETRY)) as proxy,
    ):
        for _ in range(2):
            assert (await proxy.once(chat())).status == int(status[:3])
        got = await proxy.once(chat())
        assert refusal(got) == (429, "overloaded", "overloaded")
        assert 6 <= int(got.header(b"retry-after")) <= 7
        assert (len(one.requests), len(two.requests)) == (1, 1)
        assert proxy.state("node", one.key) is State.CLOSED, "healthy nodes that are full are no failures"


async def test_full_node_is_left_alone_and_the_other_serves() -> None:
    async with (
        Upstream(one_by_one(says(full(b"Retry-After: 30")))) as one,
        Upstream(one_by_one(OK)) as two,
        sidecar(service(endpoint(one, local=True), two, retry=Retry(budget_min=100))) as proxy,
    ):
        for _ in range(20):
            assert (await proxy.once(chat())).status == 200
        assert len(one.requests) <= 1


@pytest.mark.parametrize(
    ("headers", "low", "high"),
    [
        pytest.param([], 1, 2, id="default"),
        pytest.param([b"Retry-After: 5"], 4, 5, id="seconds"),
        pytest.param([b"retry-after-ms: 5000"], 4, 5, id="milliseconds"),
        pytest.param([b"Retry-After: 3", b"retry-after-ms: 9000"], 8, 9, id="later-of-both"),
        pytest.param([b"Retry-After: 100000"], 58, 60, id="capped"),
        pytest.param([b"Retry-After: soon"], 1, 2, id="nonsense"),
        pytest.param([b"Retry-After: -5"], 1, 2, id="negative"),
        pytest.param([b"Retry-After: Wed, 21 Oct 2065 07:28:00 GMT"], 58, 60, id="date-capped"),
        pytest.param([b"Retry-After: Wed, 21 Oct 2015 07:28:00 GMT"], 1, 2, id="date-past"),
    ],
)
async def test_retry_after_of_the_engine_is_obeyed(headers: list[bytes], low: int, high: int) -> None:
    plan = Overload(retry_after_default_s=Seconds(2), retry_after_cap_s=Seconds(60))
    async with behind(one_by_one(says(full(*headers))), retry=NO_RETRY, overload=plan) as (upstream, proxy):
        assert (await proxy.once(chat())).status == 429
        got = await proxy.once(chat())
        if (
            headers in ([b"Retry-After: Wed, 21 Oct 2015 07:28:00 GMT"], [b"Retry-After: -5"])
            and len(upstream.requests) == 2
        ):
            return  # no wait at all is a fair reading of a time that is past
        assert refusal(got) == (429, "overloaded", "overloaded")
        assert low <= int(got.header(b"retry-after")) <= high


async def test_no_healthy_node_is_503() -> None:
    async with behind(one_by_one(BROKEN), breakers=node_breaker(1), retry=NO_RETRY) as (_, proxy):
        assert (await proxy.once(chat())).status == 500
        got = await proxy.once(chat())
        assert refusal(got) == (503, "breaker_open", "breaker_open")
        assert int(got.header(b"retry-after")) >= 1


async def test_no_node_at_all_is_503() -> None:
    async with sidecar(service()) as proxy:
        got = await proxy.once(chat())
        assert refusal(got) == (503, "no_endpoint", "no_endpoint")


async def test_model_that_nobody_serves_is_404() -> None:
    async with behind(one_by_one(OK), models=("known*",)) as (upstream, proxy):
        assert refusal(await proxy.once(chat(model="other"))) == (404, "unknown_model", "unknown_model")
        assert (await proxy.once(chat(model="known-1"))).status == 200
        assert len(upstream.requests) == 1


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"{", id="cut"),
        pytest.param(b"[]", id="array"),
        pytest.param(b"null", id="null"),
        pytest.param(b"", id="empty"),
        pytest.param(b'{"model":5}', id="model-number"),
        pytest.param(b'{"model":"m","stream":{}}', id="stream-object"),
        pytest.param(b"\xff\xfe{}", id="utf-16"),
    ],
)
async def test_body_that_cannot_be_read_is_400(body: bytes) -> None:
    async with behind(one_by_one(OK)) as (upstream, proxy):
        got = await proxy.once(request(b"/v1/chat/completions", method=b"POST", body=body))
        assert refusal(got) == (400, "bad_request", "bad_request")
        assert upstream.connections == []
        assert (await proxy.once(chat())).status == 200


async def admin(proxy: Sidecar, path: bytes) -> Message:
    assert proxy.running.admin_port is not None
    async with connect(proxy.running.admin_port) as client:
        return await client.ask(request(path, headers=[b"Connection: close"]))


async def test_draining_refuses_new_requests_and_finishes_old_ones() -> None:
    gate = asyncio.Event()

    async def slow(peer: Peer) -> None:
        await peer.send(stream_of(token(0), end=False))
        await gate.wait()
        await peer.send(whole_stream().partition(b"\r\n\r\n")[2])

    async with (
        Upstream(one_by_one(slow)) as upstream,
        sidecar(service(upstream), admin=Listen("127.0.0.1", 0)) as proxy,
        proxy.client() as live,
    ):
        assert (await admin(proxy, b"/readyz")).status == 200
        await live.send(chat())
        await live.seen(b"t0")
        async with proxy.client() as idle:
            proxy.running.drain()
            drained = asyncio.get_running_loop().create_task(proxy.running.listener.drain(0.1, 5.0))
            got = await admin(proxy, b"/readyz")
            assert got.status == 503
            assert (await admin(proxy, b"/livez")).status == 200
            await asyncio.sleep(0.15)
            assert not drained.done(), "a live stream was left behind"
            try:
                got = await idle.ask(chat(), b"POST")
            except Gone:
                pass  # an idle connection may be closed instead
            else:
                assert refusal(got) == (503, "draining", "draining")
                assert int(got.header(b"retry-after")) >= 1
                assert got.header(b"connection").lower() == b"close"
        gate.set()
        assert (await live.response(b"POST")).body.endswith(b"data: [DONE]\n\n")
        await drained
        assert len(upstream.requests) == 1


async def test_stream_that_outlives_the_grace_ends_in_an_error_event() -> None:
    async def endless(peer: Peer) -> None:
        await peer.send(stream_of(token(0), end=False))
        await peer.gone()
        raise Gone

    async with behind(one_by_one(endless), breakers=node_breaker(1)) as (upstream, proxy), proxy.client() as live:
        await live.send(chat())
        await live.seen(b"t0")
        proxy.running.drain()
        await proxy.running.listener.drain(0.0, 0.1)
        got = await live.response(b"POST")
        assert b'"draining"' in got.body and b"[DONE]" not in got.body
        assert await live.rest() == b""
        await upstream.connections[0].gone()
        assert proxy.state("node", upstream.key) is State.CLOSED, "nobody's fault"


async def test_every_refusal_has_the_same_shape_and_another_word() -> None:
    seen: dict[str, set[str]] = {}

    def note(got: Message) -> None:
        decoded = msgspec.json.decode(got.body, type=dict[str, dict[str, object]])
        seen[refusal(got)[1]] = set(decoded["error"])

    async with (
        Upstream(one_by_one(says(full(b"Retry-After: 9")))) as one,
        sidecar(service(one, retry=NO_RETRY, models=("m",))) as proxy,
    ):
        await proxy.once(chat())
        note(await proxy.once(chat()))
        note(await proxy.once(chat(model="other")))
    async with behind(one_by_one(BROKEN), breakers=node_breaker(1), retry=NO_RETRY) as (_, proxy):
        await proxy.once(chat())
        note(await proxy.once(chat()))
    async with sidecar(service(Endpoint(url="http://127.0.0.1:9"), retry=NO_RETRY, deadlines=PATIENT)) as proxy:
        note(await proxy.once(chat()))
    assert set(seen) == {"overloaded", "unknown_model", "breaker_open", "upstream_connect"}
    assert set(map(frozenset, seen.values())) == {frozenset({"message", "type", "param", "code"})}
