"""Upgrades: a tunnel in both directions once the upstream says 101, and plain HTTP wherever it does not."""

import hashlib

import pytest

from tests.harness import Peer, answers, chunked, eventually, request, response
from tests.under_test import COMPLETION, chat, json_answer, relayed

HANDSHAKE = request(
    b"/ws?room=1",
    headers=[
        b"Connection: keep-alive, Upgrade",
        b"Upgrade: websocket",
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        b"Sec-WebSocket-Version: 13",
    ],
)
ACCEPT = (
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n"
)
NOT_HTTP = bytes(range(256)) + b"\r\n\r\nGET /evil HTTP/1.1\r\n\r\n0\r\n\r\n"


async def _echo(peer: Peer) -> None:
    await peer.request_head()
    await peer.send(ACCEPT)
    while True:
        data = await peer.exactly(1)
        data += await peer.exactly(len(peer.unread))
        await peer.send(data)


async def test_handshake_crosses_and_bytes_flow_both_ways(split: bool) -> None:
    async with relayed(_echo, split) as (upstream, _, client):
        got = await client.ask(HANDSHAKE)
        [sent] = upstream.requests
        assert sent.target == b"/ws?room=1"
        assert sent.header(b"upgrade").lower() == b"websocket"
        assert b"upgrade" in [each.strip() for each in sent.header(b"connection").lower().split(b",")]
        assert sent.header(b"sec-websocket-key") == b"dGhlIHNhbXBsZSBub25jZQ=="
        assert got.start == b"HTTP/1.1 101 Switching Protocols"
        assert got.header(b"upgrade").lower() == b"websocket"
        assert got.header(b"connection").lower() == b"upgrade"
        assert got.header(b"sec-websocket-accept") == b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
        assert got.values(b"transfer-encoding") == [] and got.values(b"content-length") == []
        for _ in range(3):
            await client.send(NOT_HTTP)
            assert await client.exactly(len(NOT_HTTP)) == NOT_HTTP


async def test_bytes_right_after_either_head_belong_to_the_tunnel(split: bool) -> None:
    async def play(peer: Peer) -> None:
        await peer.request_head()
        await peer.send(ACCEPT + b"\x81\x05hello")
        assert await peer.exactly(9) == b"\x81\x85early-b"
        await peer.send(b"\x81\x02ok")

    async with relayed(play, split) as (_, _, client):
        await client.send(HANDSHAKE + b"\x81\x85early-b")
        assert (await client.response()).status == 101
        assert await client.exactly(7) == b"\x81\x05hello"
        assert await client.exactly(4) == b"\x81\x02ok"


async def test_large_amounts_cross_a_tunnel_unchanged() -> None:
    big = NOT_HTTP * 8000
    got: list[bytes] = []

    async def play(peer: Peer) -> None:
        await peer.request_head()
        await peer.send(ACCEPT + big)
        got.append(hashlib.sha256(await peer.exactly(len(big))).digest())
        await peer.send(b"!")

    async with relayed(play) as (_, _, client):
        assert (await client.ask(HANDSHAKE)).status == 101
        await client.send(big)
        assert await client.exactly(len(big)) == big
        assert await client.exactly(1) == b"!"
        assert got == [hashlib.sha256(big).digest()]


async def test_upstreams_end_ends_the_tunnel(split: bool) -> None:
    async def play(peer: Peer) -> None:
        await peer.request_head()
        await peer.send(ACCEPT + b"bye")
        peer.close()

    async with relayed(play, split) as (_, _, client):
        assert (await client.ask(HANDSHAKE)).status == 101
        assert await client.rest() == b"bye"


@pytest.mark.parametrize("way", ["close", "half-close", "reset"])
async def test_clients_end_ends_the_tunnel(way: str, split: bool) -> None:
    async with relayed(_echo, split) as (upstream, _, client):
        assert (await client.ask(HANDSHAKE)).status == 101
        {"close": client.close, "half-close": client.half_close, "reset": client.reset}[way]()
        await upstream.connections[0].gone()


async def test_tunnels_connection_is_never_used_again(split: bool) -> None:
    async def play(peer: Peer) -> None:
        head = await peer.request_head()
        await peer.send(ACCEPT if head.target.startswith(b"/ws") else response(b"plain"))

    async with relayed(play, split) as (upstream, proxy, client):
        assert (await client.ask(HANDSHAKE)).status == 101
        client.close()
        await eventually(lambda: upstream.connections[0].ended, "the tunnel's end")
        assert (await proxy.once(request(b"/x"), b"GET")).body == b"plain"
        assert len(upstream.connections) == 2


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(response(b"no websocket here", status=b"400 Bad Request"), id="400"),
        pytest.param(response(b"", status=b"426 Upgrade Required", headers=[b"X-A: 1"]), id="426"),
        pytest.param(response(b"plain"), id="200"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunked(b"pla", b"in"), id="200-chunked"
        ),
    ],
)
async def test_refused_upgrade_is_an_ordinary_answer(answer: bytes, split: bool) -> None:
    async with relayed(answers(answer, response(b"next")), split) as (upstream, _, client):
        got = await client.ask(HANDSHAKE)
        assert got.start == answer.split(b"\r\n")[0]
        assert got.body in answer.replace(b"\r\n2\r\n", b"") or got.body == b"plain"
        if b"close" not in b",".join(got.values(b"connection")).lower():
            assert (await client.ask(request(b"/next"))).body == b"next"
        assert upstream.requests[0].header(b"upgrade").lower() == b"websocket"


H2C = [b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA"]


@pytest.mark.parametrize(
    ("asked", "body"),
    [
        pytest.param(request(headers=H2C), b"", id="get"),
        pytest.param(request(method=b"POST", headers=H2C, body=b"a body"), b"a body", id="post-length"),
        pytest.param(
            request(method=b"POST", headers=[*H2C, b"Transfer-Encoding: chunked"]) + chunked(b"a ", b"body"),
            b"a body",
            id="post-chunked",
        ),
        pytest.param(chat(stream=False, headers=H2C), chat(stream=False).partition(b"\r\n\r\n")[2], id="inference"),
    ],
)
async def test_h2c_upgrade_is_just_a_request(asked: bytes, body: bytes, split: bool) -> None:
    async with relayed(answers(json_answer(COMPLETION)), split) as (upstream, _, client):
        for _ in range(2):
            got = await client.ask(asked, asked.split(b" ")[0])
            assert (got.status, got.body) == (200, COMPLETION)
        for sent in upstream.requests:
            assert sent.body == body
            assert sent.values(b"upgrade") == [] and sent.values(b"http2-settings") == []


async def test_upgrade_without_connection_is_just_a_request(split: bool) -> None:
    async with relayed(answers(response(b"plain")), split) as (upstream, _, client):
        for _ in range(2):
            assert (await client.ask(request(headers=[b"Upgrade: websocket"]))).body == b"plain"
        assert upstream.requests[0].values(b"upgrade") == []


async def test_101_that_nobody_asked_for_is_no_tunnel(split: bool) -> None:
    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.send(ACCEPT + b"tunnel bytes")

    async with relayed(play, split) as (upstream, _, client):
        got = await client.ask(request())
        assert (got.status, got.header(b"x-sidecar-reason")) == (502, b"upstream_protocol")
        await upstream.connections[0].gone()


async def test_upgrade_in_a_request_with_a_body_is_just_a_request(split: bool) -> None:
    asked = request(b"/ws", method=b"POST", headers=[b"Connection: Upgrade", b"Upgrade: spdy/3.1"], body=b"init")
    async with relayed(answers(response(b"plain")), split) as (upstream, _, client):
        for _ in range(2):
            assert (await client.ask(asked, b"POST")).body == b"plain"
        assert [(sent.body, sent.values(b"upgrade")) for sent in upstream.requests] == [(b"init", [])] * 2
