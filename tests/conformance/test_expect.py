"""`Expect: 100-continue`: end to end on streamed uploads, refusal included; answered by us on held bodies."""

import pytest

from sidecar.policy.schema import Limits
from tests.harness import Peer, Upstream, chunked, request, response
from tests.under_test import CHAT, COMPLETION, JSON, json_answer, refusal, relayed, service, sidecar

EXPECT = b"Expect: 100-continue"
UPLOAD = b"POST /upload HTTP/1.1\r\nHost: a\r\nExpect: 100-Continue\r\n"
FRAMED = [
    pytest.param(UPLOAD + b"Content-Length: 5\r\n\r\n", b"hello", id="length"),
    pytest.param(UPLOAD + b"Transfer-Encoding: chunked\r\n\r\n", chunked(b"hel", b"lo"), id="chunked"),
]


async def _continues(peer: Peer) -> None:
    while True:
        head = await peer.request_head()
        assert head.header(b"expect").lower() == b"100-continue"
        await peer.settled(30)
        assert peer.unread == b"", "the body came before the upstream asked for it"
        await peer.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        await peer.request_body(head)
        await peer.send(response(b"got " + head.body))


@pytest.mark.parametrize(("head", "body"), FRAMED)
async def test_continue_comes_from_the_upstream(head: bytes, body: bytes, split: bool) -> None:
    async with relayed(_continues, split) as (upstream, _, client):
        for _ in range(2):
            await client.send(head)
            early = await client.response_head()
            assert early.start == b"HTTP/1.1 100 Continue"
            await client.send(body)
            got = await client.response()
            assert (got.status, got.body, got.interim) == (200, b"got hello", [])
        assert len(upstream.connections) == 1


@pytest.mark.parametrize(("head", "body"), FRAMED)
async def test_client_need_not_wait_for_the_continue(head: bytes, body: bytes, split: bool) -> None:
    async def play(peer: Peer) -> None:
        while True:
            asked = await peer.request_head()
            await peer.send(b"HTTP/1.1 100 Continue\r\n\r\n")
            await peer.request_body(asked)
            await peer.send(response(b"got " + asked.body))

    async with relayed(play, split) as (_, _, client):
        for _ in range(2):
            await client.send(head + body)
            got = await client.response()
            assert (got.status, got.body) == (200, b"got hello")
            assert [each.status for each in got.interim] in ([], [100])


@pytest.mark.parametrize("status", [b"417 Expectation Failed", b"401 Unauthorized", b"413 Too Large"])
@pytest.mark.parametrize(("head", "body"), FRAMED)
async def test_refusal_comes_from_the_upstream(head: bytes, body: bytes, status: bytes, split: bool) -> None:
    del body

    async def play(peer: Peer) -> None:
        await peer.request_head()
        await peer.send(response(b"no", status=status))
        await peer.settled(50)
        assert peer.unread == b"", "a body was sent that was refused"

    async with relayed(play, split) as (_, proxy, client):
        await client.send(head)
        got = await client.response()
        assert (got.start, got.body, got.interim) == (b"HTTP/1.1 " + status, b"no", [])
        # What follows on either connection would be taken for the body or for a request: both must end.
        if b"close" in b",".join(got.values(b"connection")).lower():
            assert await client.rest() == b""
        async with proxy.client() as other:
            await other.send(head)
            assert (await other.response()).start == b"HTTP/1.1 " + status


async def test_refused_connection_carries_no_other_request(split: bool) -> None:
    async def play(peer: Peer) -> None:
        while True:
            head = await peer.request_head()
            if head.target == b"/upload":
                await peer.send(response(b"no", status=b"417 No"))
            else:
                await peer.send(response(head.target))

    async with relayed(play, split) as (upstream, proxy, client):
        await client.send(UPLOAD + b"Content-Length: 5\r\n\r\n")
        assert (await client.response()).status == 417
        got = await proxy.once(request(b"/other"), b"GET")
        assert got.body == b"/other"
        assert [head.target for head in upstream.connections[0].requests] == [b"/upload"], "half a request went before"


@pytest.mark.parametrize(("head", "body"), FRAMED)
async def test_upstream_that_never_says_continue_gets_the_impatient_body(head: bytes, body: bytes, split: bool) -> None:
    async def play(peer: Peer) -> None:
        while True:
            asked = await peer.request()
            await peer.send(response(asked.body))

    async with relayed(play, split) as (_, _, client):
        for _ in range(2):
            await client.send(head)
            await client.settled(50)
            await client.send(body)
            got = await client.response()
            assert (got.body, got.interim) == (b"hello", [])


BODY = b'{"model":"m"}'
HELD = b"POST " + CHAT + b" HTTP/1.1\r\nHost: a\r\n" + JSON + b"\r\n" + EXPECT + b"\r\n"
HELD_FRAMED = [
    pytest.param(HELD + b"Content-Length: 13\r\n\r\n", BODY, id="length"),
    pytest.param(HELD + b"Transfer-Encoding: chunked\r\n\r\n", chunked(BODY[:4], BODY[4:]), id="chunked"),
]


@pytest.mark.parametrize(("head", "body"), HELD_FRAMED)
async def test_held_body_is_asked_for_by_us(head: bytes, body: bytes, split: bool) -> None:
    async def play(peer: Peer) -> None:
        while True:
            asked = await peer.request()
            assert asked.body == BODY
            assert asked.values(b"expect") == [], "nothing is left to expect"
            await peer.send(json_answer(COMPLETION))

    async with relayed(play, split) as (upstream, _, client):
        for turn in range(2):
            await client.send(head)
            assert (await client.response_head()).start == b"HTTP/1.1 100 Continue"
            assert len(upstream.requests) == turn, "forwarded before its body was whole"
            await client.send(body)
            got = await client.response(b"POST")
            assert (got.status, got.interim) == (200, [])


@pytest.mark.parametrize(("head", "body"), HELD_FRAMED)
async def test_held_body_may_come_unasked(head: bytes, body: bytes, split: bool) -> None:
    async def play(peer: Peer) -> None:
        while True:
            assert (await peer.request()).body == BODY
            await peer.send(json_answer(COMPLETION))

    async with relayed(play, split) as (_, _, client):
        for _ in range(2):
            await client.send(head + body)
            got = await client.response(b"POST")
            assert got.status == 200
            assert [each.status for each in got.interim] in ([], [100])


async def test_held_body_that_announces_too_much_is_refused_unasked(split: bool) -> None:
    async with (
        Upstream(_continues, split=split) as upstream,
        sidecar(service(upstream, limits=Limits(body_bytes=1024))) as proxy,
        proxy.client(split=split) as client,
    ):
        await client.send(HELD + b"Content-Length: 1025\r\n\r\n")
        got = await client.response(b"POST")
        assert got.interim == [], "100 was said to a body that will be refused"
        assert refusal(got) == (413, "too_large", "too_large")
        assert await client.rest() == b""
        assert upstream.requests == []


async def test_unknown_expectation_is_the_upstreams_to_judge(split: bool) -> None:
    async def play(peer: Peer) -> None:
        await peer.request_head()
        await peer.send(response(status=b"417 Expectation Failed"))

    async with relayed(play, split) as (_, _, client):
        got = await client.ask(request(headers=[b"Expect: a-pony"]))
        assert got.status == 417
