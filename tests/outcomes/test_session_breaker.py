"""T27: one session's poison is its own affair: refused fast, without work upstream, and let back in by a probe."""

import asyncio

import pytest

from sidecar.core.breaker import State
from sidecar.policy.schema import (
    Breakers,
    Deadlines,
    Identity,
    NodeBreaker,
    Seconds,
    SessionBreaker,
    Source,
)
from tests.harness import Gone, Peer, Upstream, eventually, one_by_one, request, says
from tests.under_test import (
    CHAT,
    HOUR,
    JSON,
    NO_RETRY,
    REQUEST_OFF,
    Sidecar,
    behind,
    chat,
    error_body,
    json_answer,
    refusal,
    request_breaker,
    service,
    session_breaker,
    sidecar,
    stream_head,
    whole_stream,
)

TOO_LONG = json_answer(
    error_body(b"This model's maximum context length is 4096 tokens", b"400", b"BadRequestError"), b"400 Bad Request"
)
OPEN = Seconds(0.2)
NODE_TOO = Breakers(
    node=NodeBreaker(consecutive=3, failure_ratio=0.0, min_closed_ratio=0.0, open_s=HOUR, open_max_s=HOUR),
    session=SessionBreaker(consecutive=3, failure_ratio=0.0, open_s=OPEN, open_max_s=HOUR),
    request=REQUEST_OFF,
)


async def by_length(peer: Peer) -> None:
    """Refuses long prompts, serves short ones."""
    long = len(peer.requests[-1].body) > 2000
    await peer.send(TOO_LONG if long else whole_stream())


LONG = "x" * 4000


async def trip(proxy: Sidecar, session: str = "s1") -> None:
    for _ in range(3):
        assert (await proxy.once(chat(session=session, text=LONG))).status == 400
    assert proxy.state("session", session) is State.OPEN


async def test_poisonous_session_is_refused_alone_and_healed_by_one_probe() -> None:
    async with behind(one_by_one(by_length), breakers=NODE_TOO) as (upstream, proxy):
        await trip(proxy)
        count = len(upstream.requests)
        for _ in range(7):
            got = await proxy.once(chat(session="s1", text=LONG))
            assert refusal(got) == (503, "session_open", "session_open")
            assert int(got.header(b"retry-after")) >= 1
        assert len(upstream.requests) == count, "refused, and still sent upstream"
        assert proxy.state("node", upstream.key) is State.CLOSED
        assert (await proxy.once(chat(session="s2"))).status == 200
        assert (await proxy.once(chat())).status == 200, "no session, no session's breaker"
        await asyncio.sleep(OPEN + 0.03)
        assert (await proxy.once(chat(session="s1"))).status == 200
        assert proxy.state("session", "s1") is State.CLOSED
        assert (await proxy.once(chat(session="s1"))).status == 200


async def test_time_outs_of_one_session_trip_it_too() -> None:
    async def behave(peer: Peer) -> None:
        if len(peer.requests[-1].body) > 2000:
            await peer.send(stream_head())
            await peer.gone()
            raise Gone
        await peer.send(whole_stream())

    limits = Deadlines(head_s=HOUR, first_token_s=Seconds(0.06), token_gap_s=HOUR, tool_gap_s=HOUR, total_s=HOUR)
    plan = session_breaker(3)
    async with behind(one_by_one(behave), breakers=plan, deadlines=limits, retry=NO_RETRY) as (upstream, proxy):
        for _ in range(3):
            assert (await proxy.once(chat(session="s1", text=LONG))).status == 504
        count = len(upstream.requests)
        assert refusal(await proxy.once(chat(session="s1")))[1] == "session_open"
        assert len(upstream.requests) == count
        assert (await proxy.once(chat(session="s2"))).status == 200


async def test_exactly_one_probe_of_the_session_is_let_through() -> None:
    gate = asyncio.Event()

    async def held_back(peer: Peer) -> None:
        await gate.wait()
        await peer.send(whole_stream())

    script = one_by_one(*[by_length] * 3, held_back)
    async with behind(script, breakers=NODE_TOO) as (upstream, proxy), proxy.client() as probe:
        await trip(proxy)
        await asyncio.sleep(OPEN + 0.03)
        await probe.send(chat(session="s1"))
        await eventually(lambda: len(upstream.requests) == 4, "the probe")
        for _ in range(10):
            assert refusal(await proxy.once(chat(session="s1")))[1] == "session_open"
        assert len(upstream.requests) == 4
        gate.set()
        assert (await probe.response(b"POST")).status == 200
        assert proxy.state("session", "s1") is State.CLOSED


async def test_failed_probe_reopens_and_a_later_one_heals() -> None:
    async with behind(one_by_one(by_length), breakers=NODE_TOO) as (_, proxy):
        await trip(proxy)
        await asyncio.sleep(OPEN + 0.03)
        assert (await proxy.once(chat(session="s1", text=LONG))).status == 400
        assert proxy.state("session", "s1") is State.OPEN
        assert (await proxy.once(chat(session="s1"))).status == 503
        await asyncio.sleep(2 * OPEN + 0.05)
        assert (await proxy.once(chat(session="s1"))).status == 200, "no permanent latch"
        assert proxy.state("session", "s1") is State.CLOSED


async def test_requests_without_a_session_are_never_tripped() -> None:
    async with behind(one_by_one(by_length), breakers=NODE_TOO) as (upstream, proxy):
        for _ in range(10):
            assert (await proxy.once(chat(text=LONG))).status == 400
        assert (await proxy.once(chat())).status == 200
        assert len(upstream.requests) == 11


def by_user(user: str, text: str, session: str) -> bytes:
    body = b'{"model":"m","stream":true,"user":"%b","messages":[{"role":"user","content":"%b"}]}'
    lines = [JSON, b"x-session-id: " + session.encode()] if session else [JSON]
    return request(CHAT, method=b"POST", headers=lines, body=body % (user.encode(), text.encode()))


async def test_rotating_session_ids_are_caught_by_the_user_where_policy_says_so() -> None:
    async with Upstream(one_by_one(by_length)) as upstream:
        identity = Identity(session=(Source(body="user"), Source(header="x-session-id")))
        async with sidecar(service(upstream, breakers=NODE_TOO), identity=identity) as proxy:
            for number in range(3):
                assert (await proxy.once(by_user("u1", LONG, f"rotating-{number}"))).status == 400
            assert refusal(await proxy.once(by_user("u1", "short", "rotating-9")))[1] == "session_open"
            assert (await proxy.once(by_user("u2", "short", "rotating-9"))).status == 200


async def test_user_is_the_session_where_no_header_is() -> None:
    async with behind(one_by_one(by_length), breakers=NODE_TOO) as (_, proxy):
        for _ in range(3):
            assert (await proxy.once(by_user("u1", LONG, ""))).status == 400
        assert refusal(await proxy.once(by_user("u1", "short", "")))[1] == "session_open"
        assert (await proxy.once(by_user("u1", "short", "has-one"))).status == 200


async def test_memory_for_sessions_is_bounded_and_they_are_no_label() -> None:
    plan = session_breaker(3, max_sessions=100)
    async with behind(one_by_one(by_length), breakers=plan) as (_, proxy), proxy.client() as client:
        for number in range(600):
            assert (await client.ask(chat(session=f"many-{number}"), b"POST")).status == 200
        state = proxy.running.fleet.services["default"]  # type: ignore[index]
        assert len(state.sessions) <= 100
        for number in range(150):
            assert (await client.ask(chat(session=f"bad-{number}", text=LONG), b"POST")).status == 400
        assert len(state.sessions) <= 100 and len(list(state.breakers())) <= 101
        text, _ = await proxy.running.exposition()
        assert b"many-" not in text and b"bad-" not in text


@pytest.mark.parametrize("session", ["x" * 2000, "caf\u00e9", "a b;c", "../../etc", "%00"])
async def test_odd_session_ids_are_sessions_like_any_other(session: str) -> None:
    async with behind(one_by_one(by_length), breakers=NODE_TOO) as (_, proxy):
        for _ in range(3):
            assert (await proxy.once(chat(session=session, text=LONG))).status == 400
        assert refusal(await proxy.once(chat(session=session)))[1] == "session_open"
        assert (await proxy.once(chat(session=session + "x"))).status == 200


async def test_request_breaker_refuses_a_kind_of_request_alone() -> None:
    broken = says(json_answer(error_body(), b"500 Oh"))
    script = one_by_one(broken, broken, says(whole_stream()))
    async with behind(script, breakers=request_breaker(2), retry=NO_RETRY) as (upstream, proxy):
        for _ in range(2):
            assert (await proxy.once(chat())).status == 500
        assert refusal(await proxy.once(chat())) == (503, "request_open", "request_open")
        assert len(upstream.requests) == 2
        other = request(b"/v1/completions", method=b"POST", headers=[JSON], body=b'{"model":"m","prompt":"x"}')
        await proxy.once(other)
        assert len(upstream.requests) == 3, "another route was refused with it"


async def test_request_breaker_may_go_by_a_header() -> None:
    broken = says(json_answer(error_body(), b"500 Oh"))
    script = one_by_one(broken, broken, says(whole_stream()))
    async with behind(script, breakers=request_breaker(2, key="header:x-kind"), retry=NO_RETRY) as (_, proxy):
        for _ in range(2):
            assert (await proxy.once(chat(headers=[b"X-Kind: a"]))).status == 500
        assert refusal(await proxy.once(chat(headers=[b"x-kind: a"])))[1] == "request_open"
        assert (await proxy.once(chat(headers=[b"X-Kind: b"]))).status == 200
        assert (await proxy.once(chat())).status == 200
