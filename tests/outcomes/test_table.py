"""The doctrine's table, row by row through real sockets: what the client got, what breakers counted, what was re-sent.

How an attempt counted is read off a breaker from outside: after one failure, with a threshold of two, a second failure
opens it at once; else a third attempt that fails opens it if the one between was not counted, and does not if that was
a success. A node that is being left alone after an overload refuses the third.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import pytest

from sidecar.core.breaker import State
from sidecar.kernel.outcome import Result
from sidecar.policy.schema import Balance, Breakers, Deadlines, Overload, Retry, Seconds, Service
from tests.harness import Client, Gone, Message, Peer, Script, Upstream, chunked, eventually, one_by_one, says
from tests.under_test import (
    COMPLETION,
    DONE,
    FINISH,
    HOUR,
    NO_RETRY,
    PATIENT,
    PING,
    ROLE,
    Sidecar,
    chat,
    endpoint,
    error_body,
    event,
    events,
    held,
    json_answer,
    node_breaker,
    refusal,
    service,
    session_breaker,
    sidecar,
    stream_head,
    stream_of,
    token,
    whole_stream,
)

SOON = Seconds(0.12)
OK = says(whole_stream())
BROKEN = says(json_answer(error_body(), b"500 Internal Server Error", [b"connection: close"]))
CONTEXT = b"This model's maximum context length is 512 tokens. However, your prompt contains at least 513 input tokens"
SUCCESS, FAILURE, IGNORED, OVERLOADED = Result.SUCCESS, Result.FAILURE, Result.IGNORED, Result.OVERLOADED


def then(data: bytes, way: str) -> Script:
    """A behaviour: sends, then ends the connection by `fin`, `reset` or not at all (`silence`)."""

    async def behave(peer: Peer) -> None:
        await peer.send(data)
        await peer.settled()
        if way == "fin":
            peer.close()
        elif way == "reset":
            peer.reset()
        await peer.gone()
        raise Gone

    return behave


def deadlines(**changes: Seconds) -> Deadlines:
    base = {name: getattr(PATIENT, name) for name in PATIENT.__struct_fields__}
    return Deadlines(**(base | changes))


@dataclass(frozen=True)
class Row:
    """One thing that may happen, and what it must mean.

    `status` and `reason` are what the client gets when nothing else worked; `reason` "" where that is the upstream's
    own answer. `code` is that of the in-band event which ends a stream that had begun; `passed` are bytes that must
    have reached the client unchanged. `leaves`: the client goes away instead of reading to the end.
    """

    name: str
    does: Script
    node: Result
    session: Result
    resent: bool
    status: int = 200
    reason: str = ""
    code: str = ""
    passed: bytes = b""
    stream: bool = True
    deadlines: Deadlines = field(default=PATIENT)
    connects: bool = True
    leaves: str = ""


def status_row(status: bytes, node: Result, session: Result, resent: bool, body: bytes, *headers: bytes) -> list[Row]:
    """The same answer to a streaming and a plain request."""
    return [
        Row(
            f"{status[:3].decode()}{'-' + name if name else ''}{''.join('-' + h.decode() for h in headers)}"
            f"-{'stream' if stream else 'plain'}",
            says(json_answer(body, status, headers)),
            node,
            session,
            resent,
            status=int(status[:3]),
            passed=body,
            stream=stream,
        )
        for stream in (True, False)
        for name in [NAMES.get(body, "")]
    ]


QUEUE_FULL = error_body(b"Request queue is full", b"503", b"Service Unavailable")
CONTEXT_BODY = error_body(CONTEXT, b"400", b"BadRequestError")
CONTEXT_CODE = error_body(b"too long", b'"context_length_exceeded"', b"invalid_request_error")
PLAIN_400 = error_body(b"temperature must be non-negative", b"400", b"BadRequestError")
IN_BAND_500 = error_body(b"EngineCore encountered an issue", b"500")
IN_BAND_400 = error_body(b"bad temperature", b"400", b"BadRequestError")
IN_BAND_CONTEXT = error_body(CONTEXT, b"400", b"BadRequestError")
IN_BAND_ODD = b'{"error":{"message":"something"}}'
IN_BAND_TEXT = b'{"error":"engine exploded"}'
FLAT_500 = b'{"object":"error","message":"boom","type":"InternalServerError","param":null,"code":500}'
NAMES = {QUEUE_FULL: "queue-full", CONTEXT_BODY: "context", CONTEXT_CODE: "context-code"}


def in_band(error: bytes, name: str, node: Result, session: Result, resent: bool) -> list[Row]:
    """An error under 200: as the first event, after tokens (committed, so never re-sent), and as a plain body."""
    early = stream_of(event(error), DONE)
    late = stream_of(ROLE, token(0), event(error), DONE)
    return [
        Row(f"in-band-{name}-first", says(early), node, session, resent, passed=event(error)),
        Row(f"in-band-{name}-late", says(late), node, session, False, passed=token(0) + event(error) + DONE),
        Row(f"in-band-{name}-plain", says(json_answer(error)), node, session, resent, passed=error, stream=False),
    ]


CUTS = {
    "reset": then(stream_of(*events(3)[:3], end=False), "reset"),
    "terminator": says(stream_of(*events(3)[:3])),
    "fin": then(stream_of(*events(3)[:3], end=False), "fin"),
}
EARLY_CUTS = {
    "reset": then(stream_of(ROLE, end=False), "reset"),
    "terminator": says(stream_of(ROLE)),
    "fin": then(stream_of(ROLE, end=False), "fin"),
}
HTML = b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 15\r\n\r\n<html>hi</html>"
HALF_JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n" + COMPLETION[:40]

ROWS = [
    Row("connect-refused", OK, FAILURE, IGNORED, True, 502, "upstream_connect", connects=False),
    *(
        Row(
            f"{way}-before-head-{'stream' if stream else 'plain'}",
            then(begun, way),
            FAILURE,
            FAILURE,
            True,
            502,
            "upstream_reset",
            stream=stream,
        )
        for way in ("reset", "fin")
        for begun in (b"",)
        for stream in (True, False)
    ),
    *status_row(b"500 Oh", FAILURE, FAILURE, True, error_body()),
    *status_row(b"502 Bad", FAILURE, FAILURE, True, b"<html>nginx</html>"),
    *status_row(b"503 No", FAILURE, FAILURE, True, error_body(b"engine is dead", b"503")),
    *status_row(b"504 Late", FAILURE, FAILURE, True, error_body(b"late", b"504")),
    *status_row(b"429 Slow", OVERLOADED, IGNORED, True, error_body(b"slow down", b"429")),
    *status_row(b"429 Slow", OVERLOADED, IGNORED, True, error_body(b"slow down", b"429"), b"Retry-After: 1"),
    *status_row(b"529 Full", OVERLOADED, IGNORED, True, error_body(b"overloaded", b"529")),
    *status_row(b"503 Busy", OVERLOADED, IGNORED, True, error_body(b"busy", b"503"), b"Retry-After: 1"),
    *status_row(b"503 Busy", OVERLOADED, IGNORED, True, QUEUE_FULL),
    *status_row(b"400 Bad", IGNORED, IGNORED, False, PLAIN_400),
    *status_row(b"401 Who", IGNORED, IGNORED, False, b'{"error":"Unauthorized"}'),
    *status_row(b"403 No", IGNORED, IGNORED, False, error_body(b"no", b"403")),
    *status_row(b"404 None", IGNORED, IGNORED, False, error_body(b"no model", b"404", b"NotFoundError")),
    *status_row(b"409 Busy", IGNORED, IGNORED, False, b"{}"),
    *status_row(b"422 Odd", IGNORED, IGNORED, False, b'{"detail":[{"msg":"field required"}]}'),
    *status_row(b"400 Bad", IGNORED, FAILURE, False, CONTEXT_BODY),
    *status_row(b"400 Bad", IGNORED, FAILURE, False, CONTEXT_CODE),
    *status_row(b"413 Large", IGNORED, FAILURE, False, error_body(b"too large", b"413")),
    Row(
        "head-deadline-stream",
        then(b"", "silence"),
        FAILURE,
        FAILURE,
        True,
        504,
        "head_timeout",
        deadlines=deadlines(head_s=SOON),
    ),
    Row(
        "head-deadline-plain",
        then(b"", "silence"),
        FAILURE,
        FAILURE,
        True,
        504,
        "head_timeout",
        stream=False,
        deadlines=deadlines(head_s=SOON),
    ),
    Row(
        "head-deadline-half-a-head",
        then(b"HTTP/1.1 200 OK\r\n", "silence"),
        FAILURE,
        FAILURE,
        True,
        504,
        "head_timeout",
        deadlines=deadlines(head_s=SOON),
    ),
    Row(
        "first-token-deadline-head",
        then(stream_head(), "silence"),
        FAILURE,
        FAILURE,
        True,
        504,
        "ttft_timeout",
        deadlines=deadlines(first_token_s=SOON),
    ),
    Row(
        "first-token-deadline-role",
        then(stream_of(PING, ROLE, PING, end=False), "silence"),
        FAILURE,
        FAILURE,
        True,
        504,
        "ttft_timeout",
        deadlines=deadlines(first_token_s=SOON),
    ),
    Row(
        "stall",
        then(stream_of(*events(3)[:3], end=False), "silence"),
        FAILURE,
        FAILURE,
        False,
        code="token_gap_timeout",
        passed=ROLE + token(0) + token(1),
        deadlines=deadlines(token_gap_s=SOON),
    ),
    Row(
        "total-deadline",
        then(stream_of(*events(3)[:3], end=False), "silence"),
        IGNORED,
        IGNORED,
        False,
        code="total_timeout",
        passed=ROLE + token(0) + token(1),
        deadlines=deadlines(total_s=SOON),
    ),
    *(
        Row(f"cut-{way}", does, FAILURE, FAILURE, False, code="upstream_truncated", passed=ROLE + token(0) + token(1))
        for way, does in CUTS.items()
    ),
    *(
        Row(f"cut-before-a-token-{way}", does, FAILURE, FAILURE, True, 502, "upstream_truncated")
        for way, does in EARLY_CUTS.items()
    ),
    *(
        Row(f"cut-body-{way}", then(HALF_JSON, way), FAILURE, FAILURE, True, 502, "upstream_truncated", stream=False)
        for way in ("fin", "reset")
    ),
    *in_band(IN_BAND_500, "500", FAILURE, FAILURE, True),
    *in_band(IN_BAND_ODD, "unclassified", FAILURE, FAILURE, True),
    *in_band(IN_BAND_TEXT, "text", FAILURE, FAILURE, True),
    *in_band(FLAT_500, "flat", FAILURE, FAILURE, True),
    *in_band(IN_BAND_400, "400", IGNORED, IGNORED, False),
    *in_band(IN_BAND_CONTEXT, "context", IGNORED, FAILURE, False),
    Row("nothing-no-event", says(stream_of()), FAILURE, FAILURE, True, 502, "empty_response"),
    Row("nothing-comments", says(stream_of(PING, PING)), FAILURE, FAILURE, True, 502, "empty_response"),
    Row(
        "nothing-no-body-stream",
        says(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"),
        FAILURE,
        FAILURE,
        True,
        502,
        "empty_response",
    ),
    Row("nothing-empty-json", says(json_answer(b"")), FAILURE, FAILURE, True, 502, "empty_response", stream=False),
    Row(
        "nothing-html",
        says(HTML),
        FAILURE,
        FAILURE,
        True,
        502,
        "empty_response",
        stream=False,
    ),
    Row(
        "nothing-html-stream",
        says(HTML),
        FAILURE,
        FAILURE,
        True,
        502,
        "empty_response",
    ),
    Row(
        "malformed-event",
        says(stream_of(ROLE, token(0), b"data: {oops\n\n", *events(2)[2:])),
        SUCCESS,
        SUCCESS,
        False,
        passed=ROLE + token(0) + b"data: {oops\n\n" + token(1) + FINISH + DONE,
    ),
    Row("left-before-head", then(b"", "silence"), IGNORED, IGNORED, False, leaves="before-head"),
    Row(
        "left-after-tokens",
        then(stream_of(*events(3)[:3], end=False), "silence"),
        IGNORED,
        IGNORED,
        False,
        leaves="after-token",
    ),
    Row("left-plain", then(b"", "silence"), IGNORED, IGNORED, False, leaves="before-head", stream=False),
    Row("complete-stream", OK, SUCCESS, SUCCESS, False, passed=b"".join(events(3))),
    Row(
        "complete-finish-reason-and-clean-end",
        says(stream_of(ROLE, token(0), FINISH)),
        SUCCESS,
        SUCCESS,
        False,
        passed=ROLE + token(0) + FINISH,
    ),
    Row("complete-plain", says(json_answer(COMPLETION)), SUCCESS, SUCCESS, False, passed=COMPLETION, stream=False),
]
each_row = pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in ROWS])


async def drive(client: Client, row: Row, asked: bytes, begun: Callable[[], bool]) -> Message | None:
    """Asks, and reads to the end or leaves; None where there was no whole answer."""
    await client.send(asked)
    if row.leaves:
        await eventually(begun, "the request upstream")
        if row.leaves == "after-token":
            await client.seen(token(1))
        await client.settled()
        client.reset()
        return None
    return await client.response(b"POST")


async def measured(row: Row, breakers: Breakers, look: Callable[[Sidecar, Upstream], State]) -> Result:
    """How the row's attempt counted, by the scheme in the module's docstring."""
    async with Upstream(one_by_one(BROKEN, row.does, BROKEN) if row.connects else one_by_one(BROKEN)) as upstream:
        plan = service(
            upstream,
            breakers=breakers,
            retry=NO_RETRY,
            deadlines=row.deadlines,
            overload=Overload(retry_after_default_s=HOUR, retry_after_cap_s=HOUR)
            if breakers.node.mode == "enforce"
            else Overload(retry_after_default_s=Seconds(0.001), retry_after_cap_s=Seconds(0.001)),
        )
        async with sidecar(plan) as proxy:
            asked = chat(stream=row.stream, session="s1")
            assert (await proxy.once(asked)).status == 500
            assert look(proxy, upstream) is State.CLOSED
            if not row.connects:
                upstream.stop_listening()
            async with proxy.client() as client:
                await drive(client, row, asked, lambda: len(upstream.requests) == 2)
            await eventually(lambda: not held(proxy.running), "the attempt's end")
            if look(proxy, upstream) is State.OPEN:
                return FAILURE
            if not row.connects:
                await upstream.listen_again()
            await asyncio.sleep(0.005)  # past the shortest overload wait
            third = await proxy.once(asked)
            if third.status == 429:
                assert refusal(third)[1] == "overloaded"
                return OVERLOADED
            assert third.status == 500
            return IGNORED if look(proxy, upstream) is State.OPEN else SUCCESS


@each_row
async def test_node_counts(row: Row) -> None:
    def look(proxy: Sidecar, upstream: Upstream) -> State:
        return proxy.state("node", upstream.key)

    assert await measured(row, node_breaker(2), look) is row.node


@each_row
async def test_session_counts(row: Row) -> None:
    def look(proxy: Sidecar, upstream: Upstream) -> State:
        return proxy.state("session", "s1")

    assert await measured(row, session_breaker(2), look) is row.session


def two(first: Upstream, second: Upstream, row: Row) -> Service:
    """A service that asks `first` first."""
    return service(
        endpoint(first, local=True),
        second,
        balance=Balance(local_first=True),
        retry=Retry(attempts=2, budget_min=10),
        deadlines=row.deadlines,
    )


@each_row
async def test_resent_elsewhere_only_where_the_table_says(row: Row) -> None:
    elsewhere = whole_stream(7) if row.stream else json_answer(COMPLETION, headers=[b"x-else: 1"])
    async with Upstream(one_by_one(row.does)) as first, Upstream(one_by_one(says(elsewhere))) as second:
        if not row.connects:
            first.stop_listening()
        async with sidecar(two(first, second, row)) as proxy, proxy.client() as client:
            got = await drive(client, row, chat(stream=row.stream), lambda: len(first.requests) == 1)
            await eventually(lambda: not held(proxy.running), "the request's end")
            assert len(second.requests) == (1 if row.resent else 0)
            assert len(first.requests) == (1 if row.connects else 0)
            if row.resent:
                assert got is not None and got.status == 200
                assert got.body == (b"".join(events(7)) if row.stream else COMPLETION)
                assert got.header(b"x-sidecar-endpoint") == second.key.encode()
                assert got.header(b"x-sidecar-attempts") == b"2"


@each_row
async def test_client_gets(row: Row) -> None:
    async with Upstream(one_by_one(row.does)) as upstream:
        plan = service(upstream, retry=NO_RETRY, deadlines=row.deadlines)
        async with sidecar(plan) as proxy, proxy.client() as client:
            if not row.connects:
                upstream.stop_listening()
            got = await drive(client, row, chat(stream=row.stream), lambda: len(upstream.requests) == 1)
            if got is None:
                return
            assert got.status == row.status
            if row.reason:
                assert refusal(got) == (row.status, row.reason, row.reason)
            elif row.code:
                assert got.body.startswith(row.passed)
                check_cut(got.body[len(row.passed) :], row.code)
                assert await client.rest() == b"", "a cut stream ends with a close"
            elif row.stream and row.status == 200:
                assert got.body.endswith(row.passed) or row.passed in got.body
            else:
                assert got.body == row.passed


def check_cut(tail: bytes, code: str) -> None:
    """The end of a stream that was cut: one error event of ours and nothing that looks like an end."""

    assert tail.startswith(b"data: ") and tail.endswith(b"\n\n") and tail.count(b"\n\n") == 1
    decoded = msgspec.json.decode(tail[6:], type=dict[str, dict[str, object]])
    assert set(decoded) == {"error"}
    error = decoded["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["param"] is None
    assert error["code"] == code
    assert b"[DONE]" not in tail and b"finish_reason" not in tail


# --- rows with a course of their own ----------------------------------------------------------------------------------


async def test_client_that_left_after_a_deadline_charged_the_node_changes_nothing() -> None:
    async with (
        Upstream(one_by_one(then(stream_head(), "silence"))) as first,
        Upstream(one_by_one(then(b"", "silence"))) as second,
    ):
        plan = service(
            endpoint(first, local=True),
            second,
            balance=Balance(local_first=True),
            breakers=node_breaker(1),
            deadlines=deadlines(first_token_s=SOON),
            retry=Retry(),
        )
        async with sidecar(plan) as proxy, proxy.client() as client:
            await client.send(chat())
            await eventually(lambda: len(second.requests) == 1, "the second attempt")
            await client.settled()
            client.reset()
            await eventually(lambda: not held(proxy.running), "the request's end")
            assert proxy.state("node", first.key) is State.OPEN
            assert proxy.state("node", second.key) is State.CLOSED


@pytest.mark.parametrize("scope", ["node", "session"])
async def test_client_that_does_not_read_is_cut_and_charges_nobody(scope: str) -> None:
    flood = stream_head() + chunked(ROLE, *[token(number) for number in range(100)] * 1000, end=False)

    async def behave(peer: Peer) -> None:
        await peer.send(flood)
        await peer.gone()
        raise Gone

    breakers = node_breaker(1) if scope == "node" else session_breaker(1)
    async with Upstream(one_by_one(behave), sndbuf=8192) as upstream:
        plan = service(upstream, breakers=breakers, deadlines=deadlines(idle_client_s=Seconds(0.3)))
        async with sidecar(plan) as proxy, proxy.client(rcvbuf=8192) as client:
            await client.send(chat(session="s1"))
            await client.seen(b"t1")
            client.transport.pause_reading()
            await upstream.connections[0].gone()
            await eventually(lambda: not held(proxy.running), "the request's end")
            assert proxy.state(scope, upstream.key if scope == "node" else "s1") is State.CLOSED


async def test_slow_client_that_reads_is_not_cut() -> None:
    async def behave(peer: Peer) -> None:
        await peer.send(stream_head() + chunked(ROLE, *[token(number) for number in range(2000)], FINISH, DONE))

    async with Upstream(one_by_one(behave), sndbuf=8192) as upstream:
        plan = service(upstream, deadlines=deadlines(idle_client_s=Seconds(0.5)))
        async with sidecar(plan) as proxy, proxy.client(rcvbuf=4096) as client:
            await client.send(chat())
            # It reads a little at a time, and for longer than the deadline in all.
            for _ in range(12):
                client.transport.pause_reading()
                await asyncio.sleep(0.06)
                client.transport.resume_reading()
                await asyncio.sleep(0.001)
            assert (await client.response(b"POST")).body.endswith(DONE)


async def test_unresolvable_name_is_a_connect_failure() -> None:
    async with Upstream(one_by_one(OK)) as upstream:
        plan = service(
            endpoint(upstream, url="http://no-such-engine.invalid:8000"),
            breakers=node_breaker(1),
            retry=NO_RETRY,
            deadlines=deadlines(connect_s=Seconds(2)),
        )
        async with sidecar(plan) as proxy:
            assert refusal(await proxy.once(chat())) == (502, "upstream_connect", "upstream_connect")
            assert proxy.state("node", "no-such-engine.invalid:8000") is State.OPEN


async def test_stall_in_the_middle_of_an_event_ends_in_a_readable_error() -> None:
    half = token(2)[:-9]
    stall = then(stream_of(*events(3)[:3], half, end=False), "silence")
    async with Upstream(one_by_one(stall)) as upstream:
        plan = service(upstream, retry=NO_RETRY, deadlines=deadlines(token_gap_s=SOON))
        async with sidecar(plan) as proxy, proxy.client() as client:
            got = await client.ask(chat(), b"POST")
            shown = [part for part in got.body.split(b"\n\n") if part]
            check_cut(shown[-1] + b"\n\n", "token_gap_timeout")


@pytest.mark.parametrize(
    "keeps_busy",
    [pytest.param(PING, id="comments"), pytest.param(ROLE, id="role-chunks"), pytest.param(b"\n", id="blank-lines")],
)
async def test_what_is_no_token_does_not_feed_the_gap_deadline(keeps_busy: bytes) -> None:
    async def behave(peer: Peer) -> None:
        await peer.send(stream_of(*events(3)[:3], end=False))
        while not peer.ended:
            await peer.send(chunked(keeps_busy, end=False))
            await asyncio.sleep(0.02)
        raise Gone

    async with Upstream(one_by_one(behave)) as upstream:
        plan = service(upstream, retry=NO_RETRY, deadlines=deadlines(token_gap_s=SOON))
        async with sidecar(plan) as proxy, proxy.client() as client:
            got = await client.ask(chat(), b"POST")
            assert b'"token_gap_timeout"' in got.body


async def test_tool_calls_may_take_longer() -> None:
    call = (
        b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"x","function":{"name":"f",'
        b'"arguments":""}}]},"finish_reason":null}]}\n\n'
    )
    end = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"tool_calls"}]}\n\n'

    async def behave(peer: Peer) -> None:
        await peer.send(stream_of(ROLE, call, end=False))
        await asyncio.sleep(0.3)
        await peer.send(chunked(end, DONE))

    async with Upstream(one_by_one(behave)) as upstream:
        plan = service(upstream, retry=NO_RETRY, deadlines=deadlines(token_gap_s=SOON, tool_gap_s=Seconds(5)))
        async with sidecar(plan) as proxy, proxy.client() as client:
            assert (await client.ask(chat(), b"POST")).body == ROLE + call + end + DONE
