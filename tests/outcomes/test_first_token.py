"""T06: headers and then silence is a failure at the first-token deadline, and another node serves in time."""

import asyncio

import pytest

from sidecar.core.breaker import State
from sidecar.policy.schema import Balance, Deadlines, Retry, Seconds
from tests.harness import Gone, Peer, Script, Upstream, awake, chunked, one_by_one, request, says
from tests.under_test import (
    HOUR,
    JSON,
    NO_RETRY,
    PING,
    ROLE,
    behind,
    chat,
    endpoint,
    events,
    node_breaker,
    refusal,
    service,
    sidecar,
    stream_head,
    stream_of,
    token,
    whole_stream,
)

FIRST = Seconds(0.25)
LIMITS = Deadlines(head_s=HOUR, first_token_s=FIRST, token_gap_s=HOUR, tool_gap_s=HOUR, total_s=HOUR)


def silent_after(*parts: bytes, again: bytes = b"") -> Script:
    """A behaviour: a head and parts, then nothing, or `again` every 20 ms, until the proxy goes."""

    async def behave(peer: Peer) -> None:
        await peer.send(stream_head() + chunked(*parts, end=False))
        while again and not peer.ended:
            await peer.send(chunked(again, end=False))
            await asyncio.sleep(0.02)
        await peer.gone()
        raise Gone

    return behave


SILENT = [
    pytest.param(silent_after(), id="head"),
    pytest.param(silent_after(again=PING), id="comments"),
    pytest.param(silent_after(ROLE), id="role"),
    pytest.param(silent_after(ROLE, again=ROLE), id="role-again-and-again"),
    pytest.param(silent_after(PING, ROLE, again=PING), id="role-and-comments"),
    pytest.param(silent_after(token(0)[:-3]), id="half-a-token"),
]


@pytest.mark.parametrize("silent", SILENT)
async def test_other_node_serves_and_the_silent_one_is_charged(silent: Script) -> None:
    async with Upstream(one_by_one(silent)) as first, Upstream(one_by_one(says(whole_stream(5)))) as second:
        plan = service(
            endpoint(first, local=True),
            second,
            balance=Balance(local_first=True),
            breakers=node_breaker(1),
            deadlines=LIMITS,
            retry=Retry(attempts=2, budget_min=10),
        )
        async with sidecar(plan) as proxy, proxy.client() as client:
            start = proxy.running.now()
            async with awake() as ran:
                got = await client.ask(chat(), b"POST")
                assert ran() < FIRST + 1
            assert got.status == 200 and got.body == b"".join(events(5)), "one stream, from its start"
            assert proxy.running.now() - start >= FIRST * 0.9
            assert got.header(b"x-sidecar-attempts") == b"2"
            await first.connections[0].gone()
            assert proxy.state("node", first.key) is State.OPEN
            assert proxy.state("node", second.key) is State.CLOSED


@pytest.mark.parametrize("silent", SILENT)
async def test_without_another_node_the_answer_is_504(silent: Script) -> None:
    async with behind(one_by_one(silent), breakers=node_breaker(1), deadlines=LIMITS, retry=NO_RETRY) as (
        upstream,
        proxy,
    ):
        assert refusal(await proxy.once(chat())) == (504, "ttft_timeout", "ttft_timeout")
        assert proxy.state("node", upstream.key) is State.OPEN


@pytest.mark.parametrize(
    ("path", "not_tokens"),
    [
        pytest.param(
            b"/v1/responses",
            b'event: response.created\ndata: {"type":"response.created","response":{"id":"r"}}\n\n',
            id="responses",
        ),
        pytest.param(
            b"/v1/messages",
            b'event: message_start\ndata: {"type":"message_start","message":{"id":"m"}}\n\n'
            b'event: ping\ndata: {"type":"ping"}\n\n'
            b'event: content_block_start\ndata: {"type":"content_block_start","index":0,'
            b'"content_block":{"type":"text","text":""}}\n\n',
            id="messages",
        ),
        pytest.param(b"/v1/completions", PING, id="completions"),
    ],
)
async def test_first_token_is_told_on_every_api(path: bytes, not_tokens: bytes) -> None:
    body = b'{"model":"m","stream":true,"messages":[],"prompt":"x","input":"x"}'
    script = one_by_one(silent_after(not_tokens))
    async with behind(script, deadlines=LIMITS, retry=NO_RETRY) as (_, proxy):
        got = await proxy.once(request(path, method=b"POST", headers=[JSON], body=body))
        assert refusal(got) == (504, "ttft_timeout", "ttft_timeout")


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(b'data: {"choices":[{"index":0,"delta":{"reasoning_content":"h"}}]}\n\n', id="reasoning"),
        pytest.param(
            b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"name":"f"}}]}}]}\n\n',
            id="tool-call",
        ),
        pytest.param(b'data: {"choices":[{"index":0,"delta":{"refusal":"no"}}]}\n\n', id="refusal"),
        pytest.param(token(0), id="content"),
    ],
)
async def test_every_kind_of_token_meets_the_deadline(first: bytes) -> None:
    async def behave(peer: Peer) -> None:
        await peer.send(stream_of(ROLE, first, end=False))
        await asyncio.sleep(FIRST * 1.6)
        await peer.send(chunked(*events(1)[1:]))

    async with behind(one_by_one(behave), deadlines=LIMITS, retry=NO_RETRY) as (_, proxy):
        got = await proxy.once(chat())
        assert (got.status, got.body) == (200, ROLE + first + b"".join(events(1)[1:]))


async def test_deadlines_of_the_first_attempt_are_not_the_seconds() -> None:
    async def late(peer: Peer) -> None:
        await asyncio.sleep(FIRST * 0.6)
        await peer.send(whole_stream())

    async with Upstream(one_by_one(silent_after())) as first, Upstream(one_by_one(late)) as second:
        plan = service(
            endpoint(first, local=True),
            second,
            balance=Balance(local_first=True),
            deadlines=LIMITS,
            retry=Retry(attempts=2, budget_min=10),
        )
        async with sidecar(plan) as proxy:
            assert (await proxy.once(chat())).status == 200
