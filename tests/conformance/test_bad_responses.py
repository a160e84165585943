"""Engines that speak bad HTTP: a clear answer for this client, and not a byte of it for the next one."""

import pytest

from tests.harness import Gone, Malformed, Peer, Script, answers, chunked, request, response, turns
from tests.under_test import COMPLETION, chat, json_answer, relayed

OK = b"HTTP/1.1 200 OK\r\n"
OK_CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
POISON = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\npoison"

HEADS = {
    "garbage": b"\x00\x01\x02garbage\r\n\r\n",
    "request": b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n",
    "smtp": b"220 mail.test ESMTP\r\n",
    "version": b"HTTP/2.0 200 OK\r\n\r\n",
    "h2-settings": bytes(3) + b"\x04" + bytes(5),
    "status-letters": b"HTTP/1.1 2x0 OK\r\n\r\n",
    "status-short": b"HTTP/1.1 20 OK\r\ncontent-length: 0\r\n\r\n",
    "status-long": b"HTTP/1.1 2000 OK\r\ncontent-length: 0\r\n\r\n",
    "cl-signed": OK + b"content-length: +5\r\n\r\nhello",
    "cl-minus": OK + b"content-length: -5\r\n\r\nhello",
    "cl-letters": OK + b"content-length: five\r\n\r\nhello",
    "cl-twice": OK + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello!",
    "cl-list": OK + b"content-length: 5, 6\r\n\r\nhello!",
    "cl-overflow": OK + b"content-length: 18446744073709551621\r\n\r\nhello",
    "space-before-colon": OK + b"content-length : 5\r\n\r\nhello",
    "nul-in-value": OK + b"x-a: \x00\r\ncontent-length: 0\r\n\r\n",
    "nul-in-name": OK + b"x\x00a: b\r\ncontent-length: 0\r\n\r\n",
    "no-colon": OK + b"nonsense\r\ncontent-length: 0\r\n\r\n",
    "cr-in-value": OK + b"x-a: a\rb\r\ncontent-length: 0\r\n\r\n",
    "fold": OK + b"x-a: a\r\n b\r\ncontent-length: 0\r\n\r\n",
}


@pytest.mark.parametrize("bad", [pytest.param(data, id=name) for name, data in HEADS.items()])
@pytest.mark.parametrize("inference", [False, True], ids=["streamed", "inference"])
async def test_bad_head_is_a_bad_gateway_and_its_connection_ends(bad: bytes, inference: bool, split: bool) -> None:
    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.send(bad)
        await peer.gone()

    async with relayed(turns(play, answers(json_answer(COMPLETION))), split) as (upstream, _, client):
        got = await client.ask(chat(stream=False) if inference else request(), b"POST" if inference else b"GET")
        assert (got.status, got.header(b"x-sidecar-reason")) == (502, b"upstream_protocol")
        assert (await client.ask(request())).body == COMPLETION
        assert len(upstream.connections) == 2


# What a reader might forgive: relayed unambiguously or refused, never twice framed, and the next one untouched.
DOUBTFUL = {
    "cl-te": OK + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n" + chunked(b"hello"),
    "te-cl": OK + b"transfer-encoding: chunked\r\ncontent-length: 100\r\n\r\n" + chunked(b"hello"),
    "cl-te-poison": OK + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n" + chunked(b"hello") + POISON,
    "cl-0-te": OK + b"content-length: 0\r\ntransfer-encoding: chunked\r\n\r\n" + chunked(b"hello"),
    "te-twice": OK + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n" + chunked(b"hello"),
    "te-unknown": OK + b"transfer-encoding: xchunked\r\n\r\n" + chunked(b"hello"),
    "te-gzip": OK + b"transfer-encoding: gzip, chunked\r\n\r\n" + chunked(b"hello"),
    "te-http-10": b"HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunked(b"hello"),
    "cl-twice-same": OK + b"content-length: 5\r\ncontent-length: 5\r\n\r\nhello",
    "bare-lf": b"HTTP/1.1 200 OK\ncontent-length: 5\n\nhello",
    "bare-lf-header": OK + b"x-a: b\ncontent-length: 5\r\n\r\nhello",
}


@pytest.mark.parametrize("bad", [pytest.param(data, id=name) for name, data in DOUBTFUL.items()])
async def test_doubtful_framing_poisons_nothing(bad: bytes, split: bool) -> None:
    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.send(bad)
        await peer.settled(30)
        peer.half_close()

    async with relayed(turns(play, answers(response(b"clean"))), split) as (upstream, proxy, client):
        try:
            # The strict reader of the harness refuses a head with two framings.
            got = await client.ask(request())
        except Gone:
            got = None
        if got is not None:
            assert got.status == 502 or got.body in (b"hello", b"") or got.body == bad.partition(b"\r\n\r\n")[2]
        async with proxy.client(split=split) as other:
            for _ in range(2):
                assert (await other.ask(request())).body == b"clean"
        assert len(upstream.connections) == 2


@pytest.mark.parametrize(
    ("method", "answer", "body"),
    [
        pytest.param(b"GET", response(b"hello"), b"hello", id="length"),
        pytest.param(b"GET", response(b""), b"", id="length-0"),
        pytest.param(b"GET", OK_CHUNKED + chunked(b"hello"), b"hello", id="chunked"),
        pytest.param(b"HEAD", OK + b"content-length: 5\r\n\r\n", b"", id="head"),
        pytest.param(b"GET", b"HTTP/1.1 204 No Content\r\n\r\n", b"", id="204"),
        pytest.param(b"GET", b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n", b"", id="304"),
        pytest.param(b"POST", json_answer(COMPLETION), COMPLETION, id="inference"),
    ],
)
@pytest.mark.parametrize("extra", [POISON, b"hello", b"\r\n", b"x"], ids=["response", "body", "crlf", "byte"])
@pytest.mark.parametrize("late", [False, True], ids=["at-once", "later"])
async def test_bytes_after_the_end_poison_no_later_request(
    method: bytes, answer: bytes, body: bytes, extra: bytes, late: bool, split: bool
) -> None:
    async def play(peer: Peer) -> None:
        await peer.request()
        if late:
            await peer.send(answer)
            await peer.settled(40)
            await peer.send(extra)
        else:
            await peer.send(answer + extra)
        while True:
            await peer.request()
            await peer.send(response(b"clean"))

    asked = chat(stream=False) if method == b"POST" else request(method=method)
    async with relayed(turns(play, answers(response(b"clean"))), split) as (upstream, _, client):
        got = await client.ask(asked, method)
        assert (got.status, got.body) == (int(answer.split(b" ")[1]), body)
        if late:
            await client.settled(60)
        for _ in range(2):
            assert (await client.ask(request(b"/next"))).body == b"clean"
        if extra != b"\r\n":
            assert len(upstream.connections) == 2, "a connection with bytes left over was used again"


async def test_answer_to_a_request_not_yet_made_is_not_given_to_it() -> None:
    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.send(response(b"first"))
        await peer.settled(40)
        await peer.send(POISON)

    async with relayed(turns(play, answers(response(b"clean")))) as (_, proxy, client):
        assert (await client.ask(request())).body == b"first"
        await client.settled(100)
        for _ in range(3):
            assert (await proxy.once(request(), b"GET")).body == b"clean"


CUT = {
    "length": OK + b"content-length: 100\r\n\r\nhello",
    "chunk": OK + b"transfer-encoding: chunked\r\n\r\n64\r\nhello",
    "between-chunks": OK_CHUNKED + chunked(b"hello", end=False),
    "before-last-crlf": OK_CHUNKED + chunked(b"hello", end=False) + b"0\r\n",
    "in-trailers": OK_CHUNKED + chunked(b"hello", end=False) + b"0\r\nx-a: b\r\n",
}
BAD_BODY = {
    "bad-chunk-size": OK_CHUNKED + chunked(b"hello", end=False) + b"xyz\r\n",
    "bad-chunk-end": OK + b"transfer-encoding: chunked\r\n\r\n5\r\nhello!!\r\n0\r\n\r\n",
    "chunk-overflow": OK_CHUNKED + chunked(b"hello", end=False) + b"f" * 17 + b"\r\n",
    "bad-trailer": OK
    + b"transfer-encoding: chunked\r\n\r\n"
    + chunked(b"hello", end=False)
    + b"0\r\nx a\x00: b\r\n\r\n",
}


@pytest.mark.parametrize("way", ["fin", "reset"])
@pytest.mark.parametrize("cut", [pytest.param(data, id=name) for name, data in CUT.items()])
async def test_cut_body_never_looks_whole(cut: bytes, way: str, split: bool) -> None:
    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.send(cut)
        await peer.settled(30)
        if way == "fin":
            peer.close()
        else:
            peer.reset()

    async with relayed(turns(play, answers(response(b"clean"))), split) as (_, proxy, client):
        with pytest.raises(Gone):
            got = await client.ask(request())
            if got.status == 502:
                raise Gone  # it was still held: an honest error is as good as a cut
        assert b"0\r\n\r\n" not in client.received
        assert (await proxy.once(request(), b"GET")).body == b"clean"


@pytest.mark.parametrize("bad", [pytest.param(data, id=name) for name, data in BAD_BODY.items()])
async def test_bad_body_never_looks_whole(bad: bytes, split: bool) -> None:
    async with relayed(turns(_plays_and_waits(bad), answers(response(b"clean"))), split) as (upstream, proxy, client):
        with pytest.raises((Gone, Malformed)):
            got = await client.ask(request())
            if got.status == 502:
                raise Gone
        assert b"0\r\n\r\n" not in client.received
        await upstream.connections[0].gone()
        assert (await proxy.once(request(), b"GET")).body == b"clean"


def _plays_and_waits(data: bytes) -> Script:
    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.send(data)
        await peer.gone()

    return play


@pytest.mark.parametrize("way", ["fin", "reset"])
@pytest.mark.parametrize("begun", [b"", b"HT", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nx-a: b\r\n"])
async def test_end_before_the_head_is_a_bad_gateway(way: str, begun: bytes, split: bool) -> None:
    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.send(begun)
        await peer.settled()
        if way == "fin":
            peer.close()
        else:
            peer.reset()

    async with relayed(turns(play, answers(response(b"clean"))), split) as (_, _, client):
        got = await client.ask(request())
        assert got.status == 502
        assert got.header(b"x-sidecar-reason") in (b"upstream_reset", b"upstream_protocol")
        assert (await client.ask(request())).body == b"clean"


async def test_interim_then_nothing_is_a_bad_gateway(split: bool) -> None:
    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n")
        await peer.settled()
        peer.close()

    async with relayed(play, split) as (_, _, client):
        got = await client.ask(request())
        assert (got.status, [each.status for each in got.interim]) == (502, [103])


async def test_nobody_listening_is_a_bad_gateway(split: bool) -> None:
    async with relayed(answers(response()), split) as (upstream, _, client):
        upstream.die()
        for asked, method in ((request(), b"GET"), (chat(), b"POST"), (chat(stream=False), b"POST")):
            got = await client.ask(asked, method)
            assert (got.status, got.header(b"x-sidecar-reason")) == (502, b"upstream_connect")
