"""Sizes: an inference body by policy, a head by 64 KiB, an engine's head; refused as soon as the fact is known."""

import pytest

from sidecar.policy.schema import Limits
from tests.harness import Client, Peer, Upstream, answers, chunked, request, response
from tests.under_test import CHAT, COMPLETION, JSON, json_answer, refusal, relayed, service, sidecar

LIMIT = 1024
HEAD_LIMIT = 64 << 10
CHUNKED = b"Transfer-Encoding: chunked"


def held(lines: bytes, body: bytes = b"") -> bytes:
    return b"POST " + CHAT + b" HTTP/1.1\r\nHost: a\r\n" + JSON + b"\r\n" + lines + b"\r\n\r\n" + body


def body_of(size: int) -> bytes:
    return b'{"model":"m","pad":"' + b"x" * (size - 22) + b'"}'


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(held(b"Content-Length: 1025"), id="announced"),
        pytest.param(held(b"Content-Length: 1025", body_of(1025)), id="announced-and-sent"),
        pytest.param(held(b"Content-Length: 99999999999999"), id="announced-huge"),
        pytest.param(held(CHUNKED, chunked(body_of(1025))), id="one-chunk"),
        pytest.param(held(CHUNKED, chunked(*[b"x" * 100] * 11, end=False)), id="chunks"),
        pytest.param(held(CHUNKED, b"7fffffff\r\n" + b"x" * 1025), id="huge-chunk-announced"),
    ],
)
async def test_held_body_over_the_limit_is_refused(data: bytes, split: bool) -> None:
    async with (
        Upstream(answers(json_answer(COMPLETION)), split=split) as upstream,
        sidecar(service(upstream, limits=Limits(body_bytes=LIMIT))) as proxy,
        proxy.client(split=split) as client,
    ):
        await client.send(data)
        got = await client.response(b"POST")
        assert refusal(got) == (413, "too_large", "too_large")
        assert got.header(b"connection").lower() == b"close"
        assert await client.rest() == b""
        assert upstream.connections == []


async def test_refused_body_is_no_request_even_if_it_looks_like_one() -> None:
    async with (
        Upstream(answers(json_answer(COMPLETION))) as upstream,
        sidecar(service(upstream, limits=Limits(body_bytes=LIMIT))) as proxy,
        proxy.client() as client,
    ):
        await client.send(held(b"Content-Length: 5000", request(b"/smuggled") * 40))
        assert (await client.response(b"POST")).status == 413
        assert await client.rest() == b""
        assert upstream.connections == []


async def test_client_that_goes_on_sending_still_reads_its_413() -> None:
    async with (
        Upstream(answers(json_answer(COMPLETION))) as upstream,
        sidecar(service(upstream, limits=Limits(body_bytes=LIMIT))) as proxy,
        proxy.client() as client,
    ):
        # A close with bytes unread becomes RST, and RST destroys the answer on its way to a client that still sends.
        await client.send(held(b"Content-Length: 400000"))
        for _ in range(40):
            await client.send(b"x" * 10_000)
            await client.settled(2)
        assert (await client.response(b"POST")).status == 413


@pytest.mark.parametrize("size", [LIMIT - 1, LIMIT])
@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_held_body_up_to_the_limit_is_relayed(size: int, framing: str, split: bool) -> None:
    body = body_of(size)
    assert len(body) == size
    data = held(CHUNKED, chunked(body[:500], body[500:]))
    if framing == "length":
        data = held(b"Content-Length: %d" % size, body)
    async with (
        Upstream(answers(json_answer(COMPLETION)), split=split) as upstream,
        sidecar(service(upstream, limits=Limits(body_bytes=LIMIT))) as proxy,
        proxy.client(split=split) as client,
    ):
        for _ in range(2):
            assert (await client.ask(data, b"POST")).status == 200
        assert [sent.body for sent in upstream.requests] == [body, body]


async def test_limit_is_not_for_streamed_uploads() -> None:
    big = b"x" * (LIMIT * 3000)
    async with (
        Upstream(answers(response(b"ok"))) as upstream,
        sidecar(service(upstream, limits=Limits(body_bytes=LIMIT))) as proxy,
    ):
        for framed in (request(method=b"POST", body=big), request(method=b"POST", headers=[CHUNKED]) + chunked(big)):
            assert (await proxy.once(framed)).status == 200
        assert [len(sent.body) for sent in upstream.requests] == [len(big)] * 2


async def send_mostly_whole(client: Client, data: bytes, split: bool) -> None:
    """The last 600 bytes up to the head limit and past it one by one: more would take long and show no more."""
    cut = max(0, min(len(data), HEAD_LIMIT) - 300)
    await client.send(data[:cut], split=False)
    await client.settled()
    await client.send(data[cut : cut + 600], split=split)
    await client.send(data[cut + 600 :], split=False)


HEADS_TOO_LARGE = {
    "one-value": request(headers=[b"X-Big: " + b"x" * HEAD_LIMIT]),
    "many-headers": request(headers=[b"X-Some-%d: %b" % (number, b"x" * 30) for number in range(2000)]),
    "many-tiny-headers": request(headers=[b"X:"] * 20_000),
    "one-name": request(headers=[b"X" * HEAD_LIMIT + b": 1"]),
    "target": request(b"/" + b"x" * HEAD_LIMIT),
    "never-ending-target": b"GET /" + b"x" * (HEAD_LIMIT + 1000),
    "never-ending-value": b"GET /x HTTP/1.1\r\nHost: a\r\nX-A: " + b"x" * (HEAD_LIMIT + 1000),
    "never-ending-name": b"GET /x HTTP/1.1\r\nHost: a\r\n" + b"x" * (HEAD_LIMIT + 1000),
    "spaces": b"GET /x HTTP/1.1\r\nHost: a\r\nX-A:" + b" " * (HEAD_LIMIT + 1000),
}


@pytest.mark.parametrize("data", [pytest.param(data, id=name) for name, data in HEADS_TOO_LARGE.items()])
async def test_head_over_64_kib_is_refused(data: bytes, split: bool) -> None:
    async with relayed(answers(response())) as (upstream, proxy, client):
        await send_mostly_whole(client, data, split)
        got = await client.response()
        assert refusal(got) == (431, "head_too_large", "head_too_large")
        assert got.header(b"connection").lower() == b"close"
        assert await client.rest() == b""
        async with proxy.client() as second:
            await second.send(request(b"/good"))
            assert (await second.response()).status == 200
            await send_mostly_whole(second, data, split)
            assert (await second.response()).status == 431
        assert [sent.target for sent in upstream.requests] == [b"/good"]


async def test_head_of_almost_64_kib_is_relayed(split: bool) -> None:
    empty = len(request(headers=[b"X-Big: "]))
    # What we add may not push it over a limit that is the client's alone.
    data = request(headers=[b"X-Big: " + b"x" * (HEAD_LIMIT - empty - 16)])
    async with relayed(answers(response(b"ok"))) as (upstream, _, client):
        for _ in range(2):
            await send_mostly_whole(client, data, split)
            assert (await client.response()).status == 200
        assert len(upstream.requests[0].header(b"x-big")) == HEAD_LIMIT - empty - 16


async def test_body_bytes_count_against_no_head() -> None:
    body = b"x" * (HEAD_LIMIT - 200)
    async with relayed(answers(response(b"ok"))) as (upstream, _, client):
        for _ in range(3):
            await client.send(request(method=b"POST", body=body) * 2)
            for _ in range(2):
                assert (await client.response()).status == 200
        assert [len(sent.body) for sent in upstream.requests] == [len(body)] * 6


async def _reads_on(peer: Peer) -> None:
    while await peer.request():
        raise AssertionError("a body that should have been refused was ended as if it were good")


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(b"5;" + b"x" * (2 * HEAD_LIMIT) + b"\r\nhello\r\n0\r\n\r\n", id="extension"),
        pytest.param(b"5\r\nhello\r\n0\r\nX-A: " + b"x" * (2 * HEAD_LIMIT) + b"\r\n\r\n", id="trailer"),
        pytest.param(b"5\r\nhello\r\n0\r\n" + b"X-A: b\r\n" * 20_000 + b"\r\n", id="trailers"),
        pytest.param(b"0" * (2 * HEAD_LIMIT) + b"5\r\nhello\r\n0\r\n\r\n", id="zeros-before-size"),
    ],
)
@pytest.mark.parametrize("target", [b"/x", CHAT], ids=["streamed", "inference"])
async def test_chunk_lines_and_trailers_are_bounded_too(lines: bytes, target: bytes) -> None:
    async with relayed(_reads_on) as (upstream, _, client):
        await client.send(b"POST " + target + b" HTTP/1.1\r\nHost: a\r\n" + CHUNKED + b"\r\n\r\n" + lines)
        got = await client.response(b"POST")
        assert got.status in (400, 413, 431)
        assert await client.rest() == b""
        if target == CHAT:
            assert upstream.connections == []
        for peer in upstream.connections:
            await peer.gone()


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(b"HTTP/1.1 200 OK\r\nX-Big: " + b"x" * (4 * HEAD_LIMIT) + b"\r\n\r\n", id="value"),
        pytest.param(b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 40_000 + b"\r\n", id="many"),
        pytest.param(b"HTTP/1.1 200 " + b"x" * (4 * HEAD_LIMIT) + b"\r\n\r\n", id="phrase"),
        pytest.param(b"HTTP/1.1 200 OK\r\nX-Big: " + b"x" * (4 * HEAD_LIMIT), id="never-ending"),
        pytest.param(b"HTTP/1.1 103 Early\r\nX-A: b\r\n\r\n" * 20_000, id="interim-for-ever"),
    ],
)
@pytest.mark.parametrize("cut", [1 << 20, 120_000, 5_000], ids=["at-once", "late", "early"])
@pytest.mark.parametrize("piece", [1 << 20, 5_000], ids=["in-two", "in-many"])
async def test_engine_head_over_the_limit_is_a_bad_gateway(head: bytes, cut: int, piece: int) -> None:
    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.send(head[:cut])
        await peer.settled(4)
        await _in_pieces(peer, head[cut:], piece)
        await peer.gone()

    async with relayed(play) as (upstream, _, client):
        got = await client.ask(request())
        assert (got.status, got.header(b"x-sidecar-reason")) == (502, b"upstream_protocol")
        await upstream.connections[0].gone()


@pytest.mark.parametrize("size", [20_000, 40_000, HEAD_LIMIT - 200])
@pytest.mark.parametrize("piece", [1 << 20, 39_000, 5_000], ids=["at-once", "in-some", "in-many"])
async def test_engine_head_up_to_the_limit_is_relayed_however_it_is_split(size: int, piece: int) -> None:
    fields = [b"X-Pad%d: " % i + b"x" * 990 for i in range(size // 1000)]
    whole = response(b"ok", headers=fields)

    async def play(peer: Peer) -> None:
        await peer.request()
        await _in_pieces(peer, whole, piece)

    async with relayed(play) as (_, _, client):
        got = await client.ask(request())
        assert (got.status, got.body) == (200, b"ok")
        assert len([name for name, _ in got.headers if name.startswith(b"X-Pad")]) == len(fields)


async def _in_pieces(peer: Peer, data: bytes, piece: int) -> None:
    for at in range(0, len(data), piece):
        await peer.send(data[at : at + piece])
        await peer.settled(4)
