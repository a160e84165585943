"""Connections: kept, reused, pipelined, closed when asked; a stale one never shows to a client that can be served."""

import asyncio
import contextlib

import pytest

from tests.harness import Client, Peer, Upstream, answers, eventually, request, response, turns
from tests.under_test import COMPLETION, chat, json_answer, node_breaker, relayed, service, sidecar, whole_stream


async def by_target(peer: Peer) -> None:
    """Answers each request with its own target; those for /slow only after the loop has turned a good while."""
    while True:
        asked = await peer.request()
        if asked.target == b"/slow":
            await asyncio.sleep(0.02)
        if asked.method == b"POST":
            await peer.send(json_answer(COMPLETION, headers=[b"x-len: %d" % len(asked.body)]))
        elif asked.method == b"HEAD":
            await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n")
        else:
            await peer.send(response(asked.target))


async def test_one_connection_each_side_serves_many_requests(split: bool) -> None:
    async with relayed(by_target, split) as (upstream, _, client):
        for number in range(5):
            got = await client.ask(request(b"/%d" % number))
            assert got.body == b"/%d" % number
        assert len(upstream.connections) == 1


async def test_clients_share_upstream_connections() -> None:
    async with Upstream(by_target) as upstream, sidecar(upstream) as proxy:
        for number in range(20):
            got = await proxy.once(request(b"/%d" % number), b"GET")
            assert got.body == b"/%d" % number
        for _ in range(20):
            assert (await proxy.once(chat(stream=False))).status == 200
        assert len(upstream.connections) == 1, "upstream connections are not reused"


async def test_streams_give_their_connection_back() -> None:
    async with Upstream(answers(whole_stream())) as upstream, sidecar(upstream) as proxy, proxy.client() as client:
        for _ in range(5):
            assert (await client.ask(chat(), b"POST")).body.endswith(b"data: [DONE]\n\n")
        assert len(upstream.connections) == 1


async def test_requests_at_once_use_as_many_connections_as_they_are() -> None:
    together = asyncio.Barrier(8)

    async def play(peer: Peer) -> None:
        while True:
            asked = await peer.request()
            await together.wait()
            await peer.send(response(asked.target))

    async with Upstream(play) as upstream, sidecar(upstream) as proxy, contextlib.AsyncExitStack() as stack:
        clients: list[Client] = [await stack.enter_async_context(proxy.client()) for _ in range(8)]
        for _ in range(2):
            for client in clients:
                await client.send(request(b"/x"))
            for client in clients:
                assert (await client.response()).body == b"/x"
        assert len(upstream.connections) == 8


@pytest.mark.parametrize(
    "line", [b"Connection: close", b"connection: Close", b"Connection: x, close"], ids=["plain", "case", "list"]
)
async def test_close_by_the_client_closes_its_connection_alone(line: bytes, split: bool) -> None:
    async with relayed(by_target, split) as (upstream, proxy, client):
        got = await client.ask(request(b"/1", headers=[line]))
        assert got.body == b"/1"
        assert b"close" in got.header(b"connection").lower()
        assert await client.rest() == b"" and client.error is None
        assert (await proxy.once(request(b"/2"), b"GET")).body == b"/2"
        assert len(upstream.connections) == 1


async def test_close_by_the_upstream_closes_its_connection_alone(split: bool) -> None:
    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.send(response(b"ok", headers=[b"Connection: close"]))
        await peer.settled()
        peer.close()

    async with relayed(play, split) as (upstream, _, client):
        for turn in range(1, 4):
            got = await client.ask(request())
            assert got.body == b"ok"
            assert b"close" not in b"".join(got.values(b"connection")).lower()
            assert len(upstream.connections) == turn


async def test_upstream_that_says_close_is_not_asked_again_though_it_stays_open(split: bool) -> None:
    async with relayed(answers(response(b"ok", headers=[b"Connection: close"])), split) as (upstream, _, client):
        for turn in range(1, 4):
            assert (await client.ask(request())).body == b"ok"
            assert len(upstream.connections) == turn


@pytest.mark.parametrize(
    "targets",
    [
        pytest.param([b"/1", b"/2", b"/3"], id="three"),
        pytest.param([b"/slow", b"/2", b"/3"], id="first-is-slow"),
        pytest.param([b"/1", b"/slow", b"/3", b"/slow", b"/5"], id="some-are-slow"),
        pytest.param([b"/%d" % number for number in range(30)], id="thirty"),
    ],
)
async def test_pipelined_requests_are_answered_in_order(targets: list[bytes], split: bool) -> None:
    async with relayed(by_target, split) as (upstream, _, client):
        await client.send(b"".join(request(target) for target in targets))
        assert [(await client.response()).body for _ in targets] == targets
        assert sorted(sent.target for sent in upstream.requests) == sorted(targets)


async def test_pipelined_bodies_are_told_apart(split: bool) -> None:
    async with relayed(by_target, split) as (_, _, client):
        await client.send(
            chat(stream=False, text="x" * 10)
            + request(b"/2")
            + request(b"/p", method=b"POST", body=b"GET /evil HTTP/1.1\r\n\r\n")
            + b"POST /c HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n"
            + request(b"/5", method=b"HEAD")
            + request(b"/6")
        )
        got = [await client.response(method) for method in [b"POST", b"GET", b"POST", b"POST"]]
        assert [len(each.body) for each in got] == [len(COMPLETION), 2, len(COMPLETION), len(COMPLETION)]
        assert [each.header(b"x-len") for each in got[2:]] == [b"22", b"5"]
        assert (await client.response(b"HEAD")).body == b""
        assert (await client.response()).body == b"/6"


async def test_pipelined_request_after_close_is_not_served(split: bool) -> None:
    async with relayed(by_target, split) as (upstream, _, client):
        await client.send(request(b"/1", headers=[b"Connection: close"]) + request(b"/2"))
        assert (await client.response()).body == b"/1"
        assert await client.rest() == b""
        assert [sent.target for sent in upstream.requests] == [b"/1"]


async def test_pipelined_streams_do_not_mix(split: bool) -> None:
    async with relayed(answers(whole_stream(3), whole_stream(1), whole_stream(2)), split) as (_, _, client):
        await client.send(chat() * 3)
        counts = [(await client.response(b"POST")).body.count(b'"content":"t') for _ in range(3)]
        assert counts == [3, 1, 2]


async def test_empty_lines_between_requests_are_skipped(split: bool) -> None:
    async with relayed(by_target, split) as (_, _, client):
        await client.send(b"\r\n" + request(b"/1") + b"\r\n\r\n" + request(b"/2"))
        assert [(await client.response()).body for _ in range(2)] == [b"/1", b"/2"]


# --- stale connections ---------------------------------------------------------------------------------------------


async def _closes_on_second(peer: Peer) -> None:
    await peer.request()
    await peer.send(json_answer(COMPLETION))
    # The second request is being written now: the close crosses it.
    await peer.exactly(1)
    peer.close()


async def _resets_on_second(peer: Peer) -> None:
    await peer.request()
    await peer.send(json_answer(COMPLETION))
    await peer.exactly(1)
    peer.reset()


async def _takes_the_second_whole_and_closes(peer: Peer) -> None:
    await peer.request()
    await peer.send(json_answer(COMPLETION))
    await peer.request()
    peer.close()


RESENDABLE = [
    pytest.param(request(), b"GET", id="get"),
    pytest.param(request(method=b"HEAD"), b"HEAD", id="head"),
    pytest.param(chat(stream=False), b"POST", id="chat"),
]


@pytest.mark.parametrize(("asked", "method"), RESENDABLE)
@pytest.mark.parametrize("stale", [_closes_on_second, _resets_on_second, _takes_the_second_whole_and_closes])
async def test_stale_connection_is_invisible(stale: object, asked: bytes, method: bytes, split: bool) -> None:
    assert callable(stale)
    answer = answers(json_answer(COMPLETION) if method != b"HEAD" else b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n")
    async with (
        Upstream(turns(stale, answer), split=split) as upstream,
        sidecar(service(upstream, breakers=node_breaker(1))) as proxy,
        proxy.client(split=split) as client,
    ):
        assert (await client.ask(chat(stream=False), b"POST")).status == 200
        got = await client.ask(asked, method)
        assert got.status == 200
        assert len(upstream.connections) == 2
        # An idle connection that closes is nobody's fault.
        assert (await client.ask(asked, method)).status == 200


@pytest.mark.parametrize("way", ["fin", "reset"])
async def test_connection_closed_while_idle_is_not_used(way: str, split: bool) -> None:
    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.send(response(b"ok"))
        await peer.settled(50)
        if way == "fin":
            peer.close()
        else:
            peer.reset()

    async with relayed(play, split) as (upstream, _, client):
        for turn in range(1, 4):
            assert (await client.ask(request())).body == b"ok"
            await eventually(lambda: upstream.connections[-1].lost, "the idle connection's end")
            assert len(upstream.connections) == turn


async def test_close_in_the_same_turn_as_the_next_request_is_invisible() -> None:
    async with relayed(answers(response(b"ok"))) as (upstream, _, client):
        for _ in range(30):
            assert (await client.ask(request())).body == b"ok"
            upstream.connections[-1].close()
            # No turn of the loop between: the FIN and the request pass each other.


async def test_many_stale_connections_at_once_are_invisible() -> None:
    together = asyncio.Barrier(6)

    async def stale(peer: Peer) -> None:
        await peer.request()
        await together.wait()
        await peer.send(response(b"ok"))
        await peer.exactly(1)
        peer.reset()

    script = turns(*[stale] * 6, answers(response(b"fresh")))
    async with Upstream(script) as upstream, sidecar(upstream) as proxy, contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(proxy.client()) for _ in range(6)]
        for client in clients:
            await client.send(request())
        for client in clients:
            assert (await client.response()).body == b"ok"
        assert len(upstream.connections) == 6
        assert (await clients[0].ask(request())).body == b"fresh"


async def test_upload_on_a_fresh_connection_is_never_run_twice(split: bool) -> None:
    async def play(peer: Peer) -> None:
        await peer.request()
        peer.close()

    async with relayed(play, split) as (upstream, _, client):
        got = await client.ask(request(method=b"POST", body=b"pay once"), b"POST")
        assert got.status == 502
        assert got.header(b"x-sidecar-reason") == b"upstream_reset"
        assert len(upstream.requests) == 1


async def test_upload_on_a_stale_connection_is_never_run_twice(split: bool) -> None:
    ran: list[bytes] = []

    async def stale(peer: Peer) -> None:
        await peer.request()
        await peer.send(response(b"ok"))
        ran.append((await peer.request()).body)
        peer.close()

    async def fresh(peer: Peer) -> None:
        while True:
            ran.append((await peer.request()).body)
            await peer.send(response(b"ok"))

    async with relayed(turns(stale, fresh), split) as (_, _, client):
        assert (await client.ask(request())).status == 200
        got = await client.ask(request(method=b"POST", body=b"pay once"), b"POST")
        assert got.status == 502
        assert ran == [b"pay once"]
