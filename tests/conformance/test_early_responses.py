"""Answers that begin, or end, while the upload still runs; and uploads and answers that run side by side."""

import pytest

from tests.harness import Gone, Peer, chunked, eventually, request, response
from tests.under_test import relayed

UPLOAD = b"POST /upload HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


async def test_upload_and_answer_run_side_by_side(split: bool) -> None:
    async def echo(peer: Peer) -> None:
        while True:
            await peer.request_head()
            await peer.send(HEAD)
            while part := await peer.chunk():
                await peer.send(chunked(part, end=False))
            await peer.line()
            await peer.send(chunked())

    async with relayed(echo, split) as (_, _, client):
        await client.send(UPLOAD)
        assert (await client.response_head()).status == 200
        for number in range(5):
            await client.send(chunked(b"part %d" % number, end=False))
            got = b""
            while len(got) < 6:
                got += await client.chunk()
            assert got == b"part %d" % number
        await client.send(chunked())
        assert await client.chunk() == b"" and await client.line() == b""


@pytest.mark.parametrize("status", [b"200 OK", b"413 Too Large", b"500 Oh"], ids=lambda status: status[:3].decode())
async def test_whole_answer_before_the_uploads_end(status: bytes, split: bool) -> None:
    async def play(peer: Peer) -> None:
        head = await peer.request_head()
        await peer.chunk()
        await peer.send(response(b"early", status=status))
        while await peer.chunk():
            head.body += b"."
        await peer.line()

    async with relayed(play, split) as (_, proxy, client):
        await client.send(UPLOAD + chunked(b"first", end=False))
        got = await client.response()
        assert (got.start, got.body) == (b"HTTP/1.1 " + status, b"early")
        await client.send(chunked(b"second"))
        # Kept, with the upload read to its end, or closed: never is the rest of the upload taken for a request.
        if b"close" in b",".join(got.values(b"connection")).lower():
            assert await client.rest() == b""
        else:
            assert (await client.ask(UPLOAD + chunked(b"x"))).body == b"early"
        assert (await proxy.once(UPLOAD + chunked(b"x"))).body == b"early"


async def test_upstream_that_answers_early_and_closes_is_heard(split: bool) -> None:
    async def play(peer: Peer) -> None:
        await peer.request_head()
        await peer.chunk()
        await peer.send(response(b"enough", status=b"413 Too Large", headers=[b"Connection: close"]))
        peer.half_close()

    async with relayed(play, split) as (_, _, client):
        await client.send(UPLOAD + chunked(b"first", end=False))
        got = await client.response()
        assert (got.status, got.body) == (413, b"enough")
        for _ in range(20):
            await client.send(chunked(b"more" * 100, end=False), split=False)
            await client.settled(5)


async def test_connection_with_an_unfinished_upload_carries_no_other_request(split: bool) -> None:
    async def play(peer: Peer) -> None:
        head = await peer.request_head()
        if head.target == b"/upload":
            await peer.send(response(b"early"))
            await peer.settled(10)
            return
        await peer.send(response(b"other"))

    async with relayed(play, split) as (upstream, proxy, client):
        await client.send(UPLOAD + chunked(b"first", end=False))
        assert (await client.response()).body == b"early"
        got = await proxy.once(request(b"/other"), b"GET")
        assert got.body == b"other"
        assert upstream.connections[-1].requests[0].target == b"/other", "it went after half an upload"


async def test_answer_that_begins_early_is_passed_on_as_it_comes(split: bool) -> None:
    async def play(peer: Peer) -> None:
        await peer.request_head()
        await peer.chunk()
        await peer.send(HEAD + chunked(b"begun", end=False))
        while await peer.chunk():
            pass
        await peer.line()
        await peer.send(chunked(b" and done"))

    async with relayed(play, split) as (_, _, client):
        await client.send(UPLOAD + chunked(b"a", end=False))
        assert (await client.response_head()).status == 200
        got = b""
        while got != b"begun":
            got += await client.chunk()
        await client.send(chunked(b"b"))
        while part := await client.chunk():
            got += part
        assert got == b"begun and done"


async def test_upload_that_the_client_gives_up_ends_the_exchange(split: bool) -> None:
    async def play(peer: Peer) -> None:
        await peer.request_head()
        with pytest.raises(Gone):
            while await peer.chunk():
                pass
        await peer.gone()

    async with relayed(play, split) as (upstream, _, client):
        await client.send(UPLOAD + chunked(b"first", end=False))
        await client.settled()
        await eventually(lambda: bool(upstream.requests), "the head upstream")
        client.close()
        await upstream.connections[0].gone()
