"""Bodies and their framing in both directions: every byte of the payload, every trailer, no byte too many."""

import pytest

from tests.harness import Framing, Peer, answers, chunked, request, response
from tests.under_test import CHAT, COMPLETION, JSON, json_answer, relayed, token, whole_stream

CHUNKED = b"Transfer-Encoding: chunked"
BODY = b'{"model":"m","messages":[]}'
ALL_BYTES = bytes(range(256))
CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("target", [b"/x", CHAT], ids=["streamed", "inference"])
@pytest.mark.parametrize(
    ("framed", "body"),
    [
        pytest.param(b"Content-Length: 27\r\n\r\n" + BODY, BODY, id="length"),
        pytest.param(b"Content-Length: 0027\r\n\r\n" + BODY, BODY, id="length-with-zeros"),
        pytest.param(CHUNKED + b"\r\n\r\n" + chunked(BODY), BODY, id="one-chunk"),
        pytest.param(CHUNKED + b"\r\n\r\n" + chunked(BODY[:3], BODY[3:4], BODY[4:]), BODY, id="chunks"),
        pytest.param(b"transfer-ENCODING: Chunked\r\n\r\n" + chunked(BODY), BODY, id="case"),
        pytest.param(CHUNKED + b"\r\n\r\n001B\r\n" + BODY + b"\r\n00\r\n\r\n", BODY, id="hex-with-zeros"),
        pytest.param(CHUNKED + b'\r\n\r\n1b;a=b;c="d"\r\n' + BODY + b"\r\n0;e\r\n\r\n", BODY, id="extensions"),
    ],
)
async def test_request_bodies_cross(target: bytes, framed: bytes, body: bytes, split: bool) -> None:
    head = b"POST %b HTTP/1.1\r\nHost: engine.test\r\n%b\r\n" % (target, JSON)
    async with relayed(answers(json_answer(COMPLETION)), split) as (upstream, _, client):
        for _ in range(2):
            assert (await client.ask(head + framed, b"POST")).status == 200
        assert [sent.body for sent in upstream.requests] == [body, body]
        assert len(upstream.connections) == 1
        if target != CHAT:
            framing: Framing = "length" if framed.startswith(b"Content-Length") else "chunked"
            assert {sent.framing for sent in upstream.requests} == {framing}


@pytest.mark.parametrize(
    ("framed", "framing"),
    [
        pytest.param(b"\r\n", "none", id="none"),
        pytest.param(b"Content-Length: 0\r\n\r\n", "length", id="length-0"),
        pytest.param(CHUNKED + b"\r\n\r\n0\r\n\r\n", "chunked", id="no-chunk"),
    ],
)
async def test_empty_request_bodies_cross(framed: bytes, framing: Framing, split: bool) -> None:
    async with relayed(answers(response()), split) as (upstream, _, client):
        for _ in range(2):
            got = await client.ask(b"PUT /x HTTP/1.1\r\nHost: a\r\n" + framed, b"PUT")
            assert got.status == 200
        assert [(sent.body, sent.framing) for sent in upstream.requests] == [(b"", framing)] * 2


async def test_any_byte_may_stand_in_a_body(split: bool) -> None:
    async with relayed(answers(response(ALL_BYTES)), split) as (upstream, _, client):
        got = await client.ask(request(method=b"POST", body=ALL_BYTES), b"POST")
        assert got.body == upstream.requests[0].body == ALL_BYTES


async def test_large_bodies_cross_whole() -> None:
    big = ALL_BYTES * 4096 * 4
    async with relayed(answers(response(big))) as (upstream, _, client):
        got = await client.ask(request(method=b"POST", body=big), b"POST")
        assert got.status == 200, got
        assert upstream.requests[0].body == big
        assert got.body == big


async def test_request_trailers_reach_the_upstream(split: bool) -> None:
    data = b"POST /x HTTP/1.1\r\nHost: a\r\nTrailer: x-sum, X-Two\r\n" + CHUNKED + b"\r\n\r\n"
    data += chunked(b"abc", trailers=[b"x-sum: \xe91", b"X-Two: 2"])
    async with relayed(answers(response()), split) as (upstream, _, client):
        for _ in range(2):
            assert (await client.ask(data, b"POST")).status == 200
        for sent in upstream.requests:
            assert (sent.body, sent.trailers) == (b"abc", [(b"x-sum", b"\xe91"), (b"X-Two", b"2")])


async def test_trailers_of_a_held_body_do_no_harm(split: bool) -> None:
    data = b"POST " + CHAT + b" HTTP/1.1\r\nHost: a\r\n" + CHUNKED + b"\r\n\r\n"
    data += chunked(BODY, trailers=[b"Host: other.test", b"X-Late: 2"])
    async with relayed(answers(json_answer(COMPLETION)), split) as (upstream, _, client):
        for _ in range(2):
            assert (await client.ask(data, b"POST")).status == 200
        assert [sent.body for sent in upstream.requests] == [BODY, BODY]
        assert all(sent.values(b"x-late") == [] for sent in upstream.requests), "a trailer became a header"


@pytest.mark.parametrize(
    ("method", "answer", "body", "framing"),
    [
        pytest.param(b"GET", response(b"hello"), b"hello", "length", id="length"),
        pytest.param(b"GET", response(b""), b"", "length", id="length-0"),
        pytest.param(
            b"GET",
            CHUNKED_HEAD + chunked(b"he", b"llo"),
            b"hello",
            "chunked",
            id="chunked",
        ),
        pytest.param(
            b"GET",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: CHUNKED\r\n\r\n" + b"00A;x=y\r\n0123456789\r\n000\r\n\r\n",
            b"0123456789",
            "chunked",
            id="chunked-odd",
        ),
        pytest.param(b"GET", CHUNKED_HEAD + chunked(), b"", "chunked", id="0"),
        pytest.param(b"DELETE", b"HTTP/1.1 204 No Content\r\n\r\n", b"", "none", id="204"),
        pytest.param(b"GET", b"HTTP/1.1 304 Not Modified\r\netag: a\r\n\r\n", b"", "none", id="304"),
        pytest.param(b"GET", b"HTTP/1.1 304 Not Modified\r\ncontent-length: 42\r\n\r\n", b"", "none", id="304-length"),
        pytest.param(b"HEAD", b"HTTP/1.1 200 OK\r\ncontent-length: 42\r\n\r\n", b"", "none", id="head-length"),
        pytest.param(b"HEAD", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"", "none", id="head-chunked"),
        pytest.param(b"HEAD", b"HTTP/1.1 200 OK\r\n\r\n", b"", "none", id="head-bare"),
        pytest.param(b"HEAD", b"HTTP/1.1 404 Not Found\r\ncontent-length: 9\r\n\r\n", b"", "none", id="head-404"),
        pytest.param(b"GET", b"HTTP/1.1 205 Reset\r\ncontent-length: 0\r\n\r\n", b"", "length", id="205"),
    ],
)
async def test_responses_cross_and_both_connections_live_on(
    method: bytes, answer: bytes, body: bytes, framing: Framing, split: bool
) -> None:
    async with relayed(answers(answer, answer, response(b"next")), split) as (upstream, _, client):
        for _ in range(2):
            got = await client.ask(request(method=method), method)
            assert got.start == answer.split(b"\r\n")[0]
            assert (got.body, got.framing) == (body, framing)
            assert b"close" not in b"".join(got.values(b"connection"))
        if framing == "none" and b"content-length: 42" in answer:
            assert got.header(b"content-length") == b"42", "a length that tells of a body not sent is kept"
        assert (await client.ask(request())).body == b"next"
        assert len(upstream.connections) == 1


async def test_204_and_304_get_no_framing_that_they_did_not_have(split: bool) -> None:
    async with relayed(answers(b"HTTP/1.1 204 No Content\r\n\r\n", b"HTTP/1.1 304 X\r\n\r\n"), split) as (_, _, client):
        for _ in range(2):
            got = await client.ask(request())
            assert got.values(b"content-length") == [] and got.values(b"transfer-encoding") == []


async def test_response_trailers_reach_the_client(split: bool) -> None:
    answer = response(headers=[b"transfer-encoding: chunked", b"Trailer: x-sum"], length=False)
    answer += chunked(b"abc", b"d", trailers=[b"x-sum: \xff1", b"X-Two: 2"])
    async with relayed(answers(answer), split) as (_, _, client):
        for _ in range(2):
            got = await client.ask(request(headers=[b"TE: trailers"]))
            assert (got.body, got.trailers) == (b"abcd", [(b"x-sum", b"\xff1"), (b"X-Two", b"2")])


async def test_trailers_of_a_stream_reach_the_client(split: bool) -> None:
    answer = whole_stream().removesuffix(b"\r\n") + b"x-sum: 1\r\n\r\n"
    async with relayed(answers(answer), split) as (_, _, client):
        body = b'{"model":"m","stream":true}'
        got = await client.ask(request(CHAT, method=b"POST", headers=[JSON], body=body), b"POST")
        assert token(2) in got.body
        assert got.trailers == [(b"x-sum", b"1")]


@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"], ids=["upstream-1.1", "upstream-1.0"])
@pytest.mark.parametrize("body", [b"", b"until the end"], ids=["empty", "some"])
async def test_close_framed_responses_end_cleanly(version: bytes, body: bytes, split: bool) -> None:
    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.send(version + b" 200 OK\r\nx-a: 1\r\n\r\n" + body)
        peer.close()

    async with relayed(play, split) as (upstream, _, client):
        for turn in range(1, 3):
            got = await client.ask(request())
            assert (got.status, got.body) == (200, body)
            assert got.framing == "chunked", "a client of HTTP/1.1 is told where it ends"
            assert len(upstream.connections) == turn


async def test_http_10_upstream_with_length_is_not_kept(split: bool) -> None:
    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok")
        peer.close()

    async with relayed(play, split) as (upstream, _, client):
        for turn in range(1, 4):
            assert (await client.ask(request())).body == b"ok"
            assert len(upstream.connections) == turn


OLD = b"GET /x HTTP/1.0\r\nHost: engine.test\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        pytest.param(response(b"hello"), b"hello", id="length"),
        pytest.param(
            CHUNKED_HEAD + chunked(b"he", b"llo", trailers=[b"a: b"]),
            b"hello",
            id="chunked",
        ),
        pytest.param(CHUNKED_HEAD + chunked(), b"", id="chunked-0"),
        pytest.param(b"HTTP/1.1 200 OK\r\n\r\nhello", b"hello", id="close"),
        pytest.param(b"HTTP/1.1 103 Early\r\nlink: a\r\n\r\n" + response(b"hello"), b"hello", id="early-hints"),
        pytest.param(b"HTTP/1.1 204 No Content\r\n\r\n", b"", id="204"),
    ],
)
@pytest.mark.parametrize("host", [True, False], ids=["host", "no-host"])
async def test_http_10_clients_get_a_plain_body_and_a_close(
    answer: bytes, body: bytes, host: bool, split: bool
) -> None:
    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.send(answer)
        if b"content-length" not in answer and b"chunked" not in answer and b"204" not in answer:
            peer.close()

    async with relayed(play, split) as (_, _, client):
        await client.send(OLD if host else b"GET /x HTTP/1.0\r\n\r\n")
        got = await client.head()
        assert got.start.split(b" ")[1] in (b"200", b"204"), "no interim response for HTTP/1.0"
        assert got.values(b"transfer-encoding") == []
        assert await client.rest() == body
        assert client.fin and client.error is None


async def test_http_10_client_gets_a_stream_raw(split: bool) -> None:
    async with relayed(answers(whole_stream()), split) as (upstream, _, client):
        body = b'{"model":"m","stream":true}'
        await client.send(b"POST %b HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (CHAT, len(body), body))
        head = await client.head()
        assert head.values(b"transfer-encoding") == []
        plain = await client.rest()
        assert plain.endswith(b"data: [DONE]\n\n") and plain.count(b"data: ") == 6
        assert upstream.requests[0].body == body


async def test_http_10_keep_alive_works_if_it_is_promised(split: bool) -> None:
    async with relayed(answers(response(b"a"), response(b"b")), split) as (_, _, client):
        data = b"GET /x HTTP/1.0\r\nHost: a\r\nConnection: keep-alive\r\n\r\n"
        await client.send(data)
        got = await client.head()
        promised = b"keep-alive" in b",".join(got.values(b"connection")).lower()
        assert await client.exactly(1) == b"a"
        if promised:
            await client.send(data)
            await client.head()
            assert await client.exactly(1) == b"b"
        else:
            assert await client.rest() == b""


@pytest.mark.parametrize(
    "early",
    [
        pytest.param([b"103 Early Hints\r\nLink: </a>; rel=preload\r\nX-Latin: \xe9"], id="103"),
        pytest.param([b"103 Early Hints\r\nlink: a", b"103 Early Hints\r\nlink: b"], id="103-twice"),
        pytest.param([b"102 Processing"], id="102"),
        pytest.param([b"100 Continue"], id="100-unsolicited"),
        pytest.param([b"100 Continue", b"103 Early Hints\r\nlink: b"], id="100-103"),
    ],
)
async def test_interim_responses_cross(early: list[bytes], split: bool) -> None:
    answer = b"".join(b"HTTP/1.1 " + each + b"\r\n\r\n" for each in early) + response(b"last")
    async with relayed(answers(answer), split) as (upstream, _, client):
        for _ in range(2):
            got = await client.ask(request())
            assert (got.status, got.body) == (200, b"last")
            wanted = [b"HTTP/1.1 " + each.split(b"\r\n")[0] for each in early]
            # A client that expected no 100 discards it, so keeping one back is as good as passing it on.
            asked_for = [each for each in wanted if b" 100 " not in each]
            assert [each.start for each in got.interim] in (wanted, asked_for)
            links = [value for each in got.interim for value in each.values(b"link")]
            assert links == [line[6:] for each in early for line in each.split(b"\r\n") if line[:5].lower() == b"link:"]
        assert len(upstream.connections) == 1


async def test_interim_response_is_not_held_back_until_the_final_one(split: bool) -> None:
    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n")
        await peer.request()
        raise AssertionError("unreachable")

    async with relayed(play, split) as (_, _, client):
        await client.send(request())
        assert (await client.response_head()).status == 103


async def test_interim_response_before_a_held_answer_does_no_harm(split: bool) -> None:
    answer = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n" + json_answer(COMPLETION)
    async with relayed(answers(answer), split) as (_, _, client):
        for _ in range(2):
            got = await client.ask(request(CHAT, method=b"POST", headers=[JSON], body=BODY), b"POST")
            assert (got.status, got.body) == (200, COMPLETION)
