"""The smuggling family: one request that two readers could read differently is refused, and nothing of it forwarded."""

import pytest

from tests.harness import Peer, answers, request, response
from tests.under_test import CHAT, COMPLETION, JSON, json_answer, relayed

HOST = b"Host: engine.test\r\n"
TE = b"Transfer-Encoding: chunked\r\n"
TAIL = b"GET /smuggled HTTP/1.1\r\nHost: engine.test\r\n\r\n"


def post(lines: bytes, body: bytes = b"") -> bytes:
    return b"POST /x HTTP/1.1\r\n" + HOST + lines + b"\r\n" + body


HEADS = {
    # both framings, or one of them twice
    "cl-te": post(b"Content-Length: 5\r\n" + TE, b"0\r\n\r\n"),
    "te-cl": post(TE + b"Content-Length: 5\r\n", b"0\r\n\r\n"),
    "cl-twice-same": post(b"Content-Length: 5\r\nContent-Length: 5\r\n", b"hello"),
    "cl-twice": post(b"Content-Length: 5\r\nContent-Length: 6\r\n", b"hello!"),
    "cl-twice-cases": post(b"Content-Length: 5\r\ncontent-length: 0\r\n", b"hello"),
    "cl-list-same": post(b"Content-Length: 5, 5\r\n", b"hello"),
    "cl-list": post(b"Content-Length: 5, 6\r\n", b"hello!"),
    # lengths that are none
    "cl-plus": post(b"Content-Length: +5\r\n", b"hello"),
    "cl-minus": post(b"Content-Length: -5\r\n", b"hello"),
    "cl-minus-0": post(b"Content-Length: -0\r\n"),
    "cl-hex": post(b"Content-Length: 0x5\r\n", b"hello"),
    "cl-space-inside": post(b"Content-Length: 5 5\r\n", b"hello"),
    "cl-underscore": post(b"Content-Length: 1_0\r\n", b"0123456789"),
    "cl-letters": post(b"Content-Length: five\r\n", b"hello"),
    "cl-empty": post(b"Content-Length:\r\n"),
    "cl-fraction": post(b"Content-Length: 5.0\r\n", b"hello"),
    "cl-overflow": post(b"Content-Length: 18446744073709551621\r\n", b"hello"),
    "cl-quoted": post(b'Content-Length: "5"\r\n', b"hello"),
    # codings that are none
    "te-unknown": post(b"Transfer-Encoding: xchunked\r\n", b"0\r\n\r\n"),
    "te-identity": post(b"Transfer-Encoding: identity\r\n"),
    "te-chunked-identity": post(b"Transfer-Encoding: chunked, identity\r\n", b"0\r\n\r\n"),
    "te-chunked-twice": post(b"Transfer-Encoding: chunked, chunked\r\n", b"0\r\n\r\n"),
    "te-headers-twice": post(TE + b"Transfer-Encoding: identity\r\n", b"0\r\n\r\n"),
    "te-headers-chunked-twice": post(TE + TE, b"0\r\n\r\n"),
    "te-quoted": post(b'Transfer-Encoding: "chunked"\r\n', b"0\r\n\r\n"),
    "te-parameter": post(b"Transfer-Encoding: chunked;a=b\r\n", b"0\r\n\r\n"),
    "te-vertical-tab": post(b"Transfer-Encoding: \x0bchunked\r\n", b"0\r\n\r\n"),
    "te-form-feed": post(b"Transfer-Encoding: chunked\x0c\r\n", b"0\r\n\r\n"),
    "te-empty": post(b"Transfer-Encoding:\r\n"),
    "te-space-before-colon": post(b"Transfer-Encoding : chunked\r\n", b"0\r\n\r\n"),
    "te-tab-before-colon": post(b"Transfer-Encoding\t: chunked\r\n", b"0\r\n\r\n"),
    "te-folded": post(b"Transfer-Encoding:\r\n chunked\r\n", b"0\r\n\r\n"),
    "te-nul": post(b"Transfer-Encoding: chunked\x00\r\n", b"0\r\n\r\n"),
    "te-on-http-10": b"POST /x HTTP/1.0\r\n" + HOST + TE + b"\r\n0\r\n\r\n",
    "te-on-get-beside-cl": b"GET /x HTTP/1.1\r\n" + HOST + TE + b"Content-Length: 3\r\n\r\n0\r\n\r\n",
    # line ends
    "lf-after-request-line": b"GET /x HTTP/1.1\n" + HOST + b"\r\n",
    "lf-after-header": b"GET /x HTTP/1.1\r\nHost: engine.test\nX-A: b\r\n\r\n",
    "lf-only": b"GET /x HTTP/1.1\nHost: engine.test\n\n",
    "lf-at-the-end": b"GET /x HTTP/1.1\r\n" + HOST + b"\n",
    "lf-in-value": b"GET /x HTTP/1.1\r\n" + HOST + b"X-A: a\nContent-Length: 5\r\n\r\n",
    "cr-in-value": b"GET /x HTTP/1.1\r\n" + HOST + b"X-A: a\rb\r\n\r\n",
    "cr-only": b"GET /x HTTP/1.1\rHost: engine.test\r\r",
    "cr-cr-lf": b"GET /x HTTP/1.1\r\n" + HOST + b"X-A: a\r\r\n\r\n",
    # bytes that belong nowhere
    "nul-in-value": b"GET /x HTTP/1.1\r\n" + HOST + b"X-A: a\x00b\r\n\r\n",
    "nul-in-name": b"GET /x HTTP/1.1\r\n" + HOST + b"X\x00A: b\r\n\r\n",
    "nul-in-target": b"GET /x\x00y HTTP/1.1\r\n" + HOST + b"\r\n",
    "nul-in-method": b"G\x00T /x HTTP/1.1\r\n" + HOST + b"\r\n",
    "space-before-colon": b"GET /x HTTP/1.1\r\n" + HOST + b"X-A : b\r\n\r\n",
    "space-in-name": b"GET /x HTTP/1.1\r\n" + HOST + b"X A: b\r\n\r\n",
    "name-empty": b"GET /x HTTP/1.1\r\n" + HOST + b": b\r\n\r\n",
    "name-not-token": b"GET /x HTTP/1.1\r\n" + HOST + b"X(A): b\r\n\r\n",
    "name-latin": b"GET /x HTTP/1.1\r\n" + HOST + b"X-\xe9: b\r\n\r\n",
    "header-without-colon": b"GET /x HTTP/1.1\r\n" + HOST + b"nonsense\r\n\r\n",
    "fold-space": b"GET /x HTTP/1.1\r\n" + HOST + b"X-A: a\r\n b\r\n\r\n",
    "fold-tab": b"GET /x HTTP/1.1\r\n" + HOST + b"X-A: a\r\n\tb\r\n\r\n",
    "fold-first": b"GET /x HTTP/1.1\r\n Host: engine.test\r\n\r\n",
    "fold-empty": b"GET /x HTTP/1.1\r\n" + HOST + b"X-A: a\r\n \r\n\r\n",
    # hosts
    "host-twice": b"GET /x HTTP/1.1\r\n" + HOST + b"Host: other.test\r\n\r\n",
    "host-twice-same": b"GET /x HTTP/1.1\r\n" + HOST + b"host: engine.test\r\n\r\n",
    "host-missing": b"GET /x HTTP/1.1\r\nX-A: b\r\n\r\n",
    "host-missing-and-no-header": b"GET /x HTTP/1.1\r\n\r\n",
    # request lines
    "line-no-version": b"GET /x\r\n" + HOST + b"\r\n",
    "line-space-at-end": b"GET /x HTTP/1.1 \r\n" + HOST + b"\r\n",
    "line-space-in-target": b"GET /x y HTTP/1.1\r\n" + HOST + b"\r\n",
    "line-tab": b"GET\t/x\tHTTP/1.1\r\n" + HOST + b"\r\n",
    "line-no-target": b"GET HTTP/1.1\r\n" + HOST + b"\r\n",
    "line-version-odd": b"GET /x HTTP/1.10\r\n" + HOST + b"\r\n",
    "line-version-short": b"GET /x HTTP/11\r\n" + HOST + b"\r\n",
    "line-version-case": b"GET /x http/1.1\r\n" + HOST + b"\r\n",
    "line-version-rtsp": b"GET /x RTSP/1.1\r\n" + HOST + b"\r\n",
    "line-version-ice": b"SOURCE /x ICE/1.0\r\n" + HOST + b"\r\n",
    "line-space-before": b" GET /x HTTP/1.1\r\n" + HOST + b"\r\n",
    "line-method-not-token": b"GE(T /x HTTP/1.1\r\n" + HOST + b"\r\n",
    "http-09": b"GET /x\r\n",
    "tls-hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(60),
}
VERSIONS = {
    "version-2.0": b"GET /x HTTP/2.0\r\n" + HOST + b"\r\n",
    "version-1.2": b"GET /x HTTP/1.2\r\n" + HOST + b"\r\n",
    "version-0.9": b"GET /x HTTP/0.9\r\n" + HOST + b"\r\n",
    "version-3.0": b"GET /x HTTP/3.0\r\n" + HOST + b"\r\n",
    "h2-preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
}
CODINGS = {
    "te-gzip": post(b"Transfer-Encoding: gzip\r\n", b"0\r\n\r\n"),
    "te-gzip-chunked": post(b"Transfer-Encoding: gzip, chunked\r\n", b"0\r\n\r\n"),
}
CHUNKS = {
    "size-letters": b"xyz\r\nhello\r\n0\r\n\r\n",
    "size-0x": b"0x5\r\nhello\r\n0\r\n\r\n",
    "size-minus": b"-5\r\nhello\r\n0\r\n\r\n",
    "size-plus": b"+5\r\nhello\r\n0\r\n\r\n",
    "size-space-before": b" 5\r\nhello\r\n0\r\n\r\n",
    "size-space-after": b"5 \r\nhello\r\n0\r\n\r\n",
    "size-empty": b"\r\nhello\r\n0\r\n\r\n",
    "size-overflow": b"FFFFFFFFFFFFFFFFF5\r\nhello\r\n0\r\n\r\n",
    "size-underscore": b"0_5\r\nhello\r\n0\r\n\r\n",
    "size-lf": b"5\nhello\r\n0\r\n\r\n",
    "size-cr": b"5\rhello\r\n0\r\n\r\n",
    "data-too-long": b"5\r\nhello!\r\n0\r\n\r\n",
    "data-too-short": b"5\r\nhell\r\n0\r\n\r\n\r\n",
    "data-lf": b"5\r\nhello\n0\r\n\r\n",
    "data-no-crlf": b"5\r\nhello0\r\n\r\n",
    "extension-lf": b"5;a\nb\r\nhello\r\n0\r\n\r\n",
    "extension-lf-ended": b"5;a=b\nhello\r\n0\r\n\r\n",
    "extension-cr": b"5;a\rb\r\nhello\r\n0\r\n\r\n",
    "extension-nul": b"5;a\x00\r\nhello\r\n0\r\n\r\n",
    "extension-no-semicolon": b"5 a=b\r\nhello\r\n0\r\n\r\n",
    "last-lf": b"5\r\nhello\r\n0\n\n",
    "trailer-lf": b"5\r\nhello\r\n0\r\nX-A: b\n\r\n",
    "trailer-folded": b"5\r\nhello\r\n0\r\nX-A: b\r\n c\r\n\r\n",
    "trailer-space-before-colon": b"5\r\nhello\r\n0\r\nX-A : b\r\n\r\n",
    "trailer-nul": b"5\r\nhello\r\n0\r\nX-A: b\x00\r\n\r\n",
    "trailer-without-colon": b"5\r\nhello\r\n0\r\nnonsense\r\n\r\n",
}


def cases(table: dict[str, bytes]) -> list[object]:
    return [pytest.param(data, id=name) for name, data in table.items()]


async def answer_any(peer: Peer) -> None:
    while True:
        asked = await peer.request()
        await peer.send(response(asked.target))


@pytest.mark.parametrize("bad", cases(HEADS))
async def test_ambiguous_heads_are_refused_alone_and_pipelined(bad: bytes, split: bool) -> None:
    async with relayed(answer_any, split) as (upstream, proxy, client):
        await client.send(bad + TAIL)
        await refused(client.response, client.rest)
        assert upstream.connections == [], "something was forwarded"
        async with proxy.client(split=split) as second:
            await second.send(request(b"/good") + bad + TAIL)
            assert (await second.response()).body == b"/good"
            await refused(second.response, second.rest)
        assert [sent.target for sent in upstream.requests] == [b"/good"]
        [peer] = upstream.connections
        assert bytes(peer.received) == upstream.requests[0].raw, "something was forwarded after the good one"
        assert (await proxy.once(request(b"/after"), b"GET")).body == b"/after"


async def refused(response: object, rest: object, statuses: tuple[int, ...] = (400,)) -> None:
    """Reads a refusal and the close after it."""
    assert callable(response) and callable(rest)
    got = await response()
    assert got.status in statuses, got.start
    assert got.header(b"connection").lower() == b"close"
    assert got.header(b"x-sidecar-reason") == b"bad_request"
    assert b'"code":"bad_request"' in got.body.replace(b" ", b"")
    assert await rest() == b""


@pytest.mark.parametrize("bad", cases(VERSIONS))
async def test_other_versions_are_refused(bad: bytes, split: bool) -> None:
    async with relayed(answer_any, split) as (upstream, _, client):
        await client.send(bad + TAIL)
        await refused(client.response, client.rest, (400, 505))
        assert upstream.connections == []


@pytest.mark.parametrize("bad", cases(CODINGS))
async def test_other_codings_are_refused(bad: bytes, split: bool) -> None:
    async with relayed(answer_any, split) as (upstream, _, client):
        await client.send(bad + TAIL)
        await refused(client.response, client.rest, (400, 501))
        assert upstream.connections == []


@pytest.mark.parametrize("bad", cases(CHUNKS))
async def test_bad_chunks_of_a_held_body_are_refused(bad: bytes, split: bool) -> None:
    head = b"POST " + CHAT + b" HTTP/1.1\r\n" + HOST + JSON + b"\r\n" + TE + b"\r\n"
    async with relayed(answer_any, split) as (upstream, proxy, client):
        await client.send(head + bad + TAIL)
        await refused(client.response, client.rest)
        assert upstream.connections == []
        async with proxy.client(split=split) as second:
            await second.send(request(b"/good") + head + bad + TAIL)
            assert (await second.response()).body == b"/good"
            await refused(second.response, second.rest)
        assert [sent.target for sent in upstream.requests] == [b"/good"]


@pytest.mark.parametrize("bad", cases(CHUNKS))
async def test_bad_chunks_of_a_streamed_body_end_the_request(bad: bytes, split: bool) -> None:
    whole: list[bytes] = []

    async def play(peer: Peer) -> None:
        while True:
            asked = await peer.request()
            whole.append(asked.target)
            await peer.send(response(asked.target))

    async with relayed(play, split) as (upstream, proxy, client):
        await client.send(post(TE, bad) + TAIL)
        await refused(client.response, client.rest)
        assert whole == [], "a bad body was ended for the upstream as if it were good"
        for peer in upstream.connections:
            await peer.gone()
        assert (await proxy.once(request(b"/after"), b"GET")).body == b"/after"
        assert whole == [b"/after"]


@pytest.mark.parametrize(
    "rest",
    [
        pytest.param(b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"[:20], id="half-a-request"),
        pytest.param(b"\x00\x01\x02\r\n\r\n", id="garbage"),
    ],
)
async def test_bytes_after_a_request_are_not_its_body(rest: bytes, split: bool) -> None:
    async with relayed(answers(response(b"ok")), split) as (upstream, _, client):
        await client.send(request(method=b"POST", body=b"12345") + rest)
        assert (await client.response()).body == b"ok"
        await client.settled()
        assert [sent.body for sent in upstream.requests] == [b"12345"]


async def test_spaces_between_method_and_target_are_refused_or_made_one(split: bool) -> None:
    async with relayed(answers(response(b"ok")), split) as (upstream, _, client):
        got = await client.ask(b"GET  /x HTTP/1.1\r\n" + HOST + b"\r\n")
        assert got.status in (200, 400)
        assert [sent.start for sent in upstream.requests] == [b"GET /x HTTP/1.1"] * (got.status == 200)


async def test_names_that_only_resemble_framing_frame_nothing(split: bool) -> None:
    lines = [b"Content_Length: 100", b"Transfer_Encoding: chunked", b"X-Content-Length: 7", b"Content-Lengthy: 9"]
    async with relayed(answers(json_answer(COMPLETION)), split) as (upstream, _, client):
        for _ in range(2):
            assert (await client.ask(request(method=b"PUT", headers=lines, body=b"12345"), b"PUT")).status == 200
        assert [sent.body for sent in upstream.requests] == [b"12345"] * 2
