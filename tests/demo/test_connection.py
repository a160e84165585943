import asyncio

import pytest

from sidecar.demo.engine import Engine
from sidecar.demo.script import Fault, Kind, Script
from tests.demo.requests import CHAT, ask, engine_and_client, get, plain_for, post, stream_for, talk
from tests.harness import connect

STREAM = ask(3, stream=True)
PLAIN = ask(3, stream=False)


@pytest.mark.parametrize("split", [False, True], ids=["whole", "byte by byte"])
async def test_pipelined_requests_are_answered_in_turn(split: bool) -> None:
    async with Engine(Script(token_gap_s=0.001)) as engine, connect(engine.port, split=split) as client:
        await client.send(post(STREAM) + get(b"/health") + post(PLAIN))
        assert (await client.response(b"POST")).body == stream_for(STREAM, 3)
        assert (await client.response()).body == b""
        assert (await client.response(b"POST")).body == plain_for(PLAIN, 3)


async def test_two_thousand_pipelined_requests_do_not_pile_up_calls() -> None:
    async with talk() as client:
        await client.send(get(b"/health") * 2000)
        for _ in range(2000):
            assert (await client.response()).status == 200


async def test_chunked_upload_comes_back_whole() -> None:
    async with talk() as client:
        head = b"POST /_echo HTTP/1.1\r\nhost: engine\r\ntransfer-encoding: chunked\r\n\r\n"
        answer = await client.ask(head + b"5\r\nhello\r\n7;x=y\r\n, world\r\n0\r\nt: 1\r\n\r\n", b"POST")
        assert answer.body == b"hello, world"


async def test_large_upload_comes_back_whole() -> None:
    body = bytes(range(256)) * 4096
    async with talk() as client:
        assert (await client.ask(post(body, b"/_echo"), b"POST")).body == body


async def test_expect_is_answered_before_the_body() -> None:
    async with talk() as client:
        request = post(PLAIN, CHAT, b"expect: 100-continue")
        head, body = request[: -len(PLAIN)], request[-len(PLAIN) :]
        await client.send(head)
        assert (await client.response_head()).status == 100
        await client.send(body)
        assert (await client.response(b"POST")).body == plain_for(PLAIN, 3)


async def test_expect_can_be_refused_before_the_body() -> None:
    async with talk() as client:
        request = post(PLAIN, b"/_echo", b"expect: 100-continue", b'x-demo-fault: {"kind":"status","status":413}')
        await client.send(request[: -len(PLAIN)])
        answer = await client.response(b"POST")
        assert (answer.status, answer.header(b"connection")) == (413, b"close")
        assert await client.rest() == b""


async def test_connection_close_is_kept() -> None:
    async with talk() as client:
        answer = await client.ask(post(PLAIN, CHAT, b"connection: close"), b"POST")
        assert answer.header(b"connection") == b"close"
        assert await client.rest() == b"" and client.fin


async def test_head_has_the_length_and_no_body() -> None:
    async with talk() as client:
        answer = await client.ask(get(b"/v1/models", b"HEAD"), b"HEAD")
        assert int(answer.header(b"content-length")) > 0
        assert client.unread == b""


BAD = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


@pytest.mark.parametrize(
    "junk",
    [
        pytest.param(b"\x16\x03\x01\x02\x00", id="TLS"),
        pytest.param(b"POST /x HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", id="CL+TE"),
        pytest.param(b"GET /\x00 HTTP/1.1\r\nhost: a\r\n\r\n", id="NUL"),
    ],
)
async def test_what_is_not_http_gets_400_and_a_close(junk: bytes) -> None:
    async with engine_and_client() as (engine, client):
        await client.send(junk + post(PLAIN))
        assert await client.rest() == BAD
        assert engine.counters.seen == 0


async def test_upgrade_is_answered_and_then_refused() -> None:
    async with talk() as client:
        await client.send(b"GET /health HTTP/1.1\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n")
        assert (await client.response()).status == 200
        assert await client.rest() == BAD


async def test_half_close_is_a_disconnect() -> None:
    async with engine_and_client(Script(first_token_s=60.0)) as (engine, client):
        await client.send(post(STREAM))
        await client.response_head()
        client.half_close()
        await client.until(lambda: client.ended, "the close")
        assert engine.counters.aborted == 1


async def test_received_requests_are_kept_as_they_came_with_their_connection() -> None:
    async with Engine() as engine, connect(engine.port) as first, connect(engine.port) as second:
        for client, name in ((first, b"X-One"), (first, b"x-TWO"), (second, b"x-three")):
            assert (await client.ask(post(PLAIN, CHAT + b"?a=b", name + b": v\xe9"), b"POST")).status == 200
        assert [(request.headers[-1], request.connection) for request in engine.received] == [
            ((b"X-One", b"v\xe9"), 1),
            ((b"x-TWO", b"v\xe9"), 1),
            ((b"x-three", b"v\xe9"), 2),
        ]
        assert {request.target for request in engine.received} == {CHAT + b"?a=b"}
        assert {request.path for request in engine.received} == {CHAT}
        assert {request.body for request in engine.received} == {PLAIN}


async def test_pipelined_request_behind_a_cut_is_never_served() -> None:
    async with engine_and_client(fault=Fault(Kind.CUT_RST, after=1)) as (engine, client):
        await client.send(post(STREAM) + post(STREAM))
        await client.rest()
        await asyncio.sleep(0.01)
        assert engine.counters.seen == 1
