"""T02: a stream that was cut is a failure and never looks like an end, on every API and however it was cut."""

import contextlib

import msgspec
import pytest

from sidecar.core.breaker import State
from sidecar.policy.schema import Retry
from tests.harness import Gone, Peer, Script, chunked, one_by_one, request, says
from tests.under_test import (
    CHAT,
    COMPLETION,
    DONE,
    FINISH,
    JSON,
    NO_RETRY,
    ROLE,
    behind,
    chat,
    json_answer,
    node_breaker,
    refusal,
    relayed,
    session_breaker,
    stream_head,
    stream_of,
    token,
)

TOKENS = [ROLE, *(token(number) for number in range(40))]
RESPONSES = [
    b'event: response.created\ndata: {"type":"response.created","response":{"id":"r"}}\n\n',
    *[b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"hi"}\n\n'] * 40,
]
MESSAGES = [
    b'event: message_start\ndata: {"type":"message_start","message":{"id":"m","role":"assistant","content":[]}}\n\n',
    *[
        b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
        b'"delta":{"type":"text_delta","text":"hi"}}\n\n'
    ]
    * 40,
]
COMPLETIONS = [b'data: {"id":"c","choices":[{"index":0,"text":"hi","finish_reason":null}]}\n\n'] * 40
APIS = [
    pytest.param(CHAT, TOKENS, id="chat"),
    pytest.param(b"/v1/completions", COMPLETIONS, id="completions"),
    pytest.param(b"/v1/responses", RESPONSES, id="responses"),
    pytest.param(b"/v1/messages", MESSAGES, id="messages"),
]
WAYS = pytest.mark.parametrize("way", ["reset", "terminator", "fin", "close-framed"])


def cut(parts: list[bytes], way: str) -> Script:
    """A behaviour: the parts, then an end that is none."""

    async def behave(peer: Peer) -> None:
        if way == "close-framed":
            await peer.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + b"".join(parts))
        else:
            await peer.send(stream_head() + chunked(*parts, end=way == "terminator"))
        await peer.settled()
        if way == "reset":
            peer.reset()
        elif way != "terminator":
            peer.close()

    return behave


def asking(path: bytes, session: bytes = b"s1") -> bytes:
    body = b'{"model":"m","stream":true,"messages":[],"prompt":"x","input":"x"}'
    return request(path, method=b"POST", headers=[JSON, b"x-session-id: " + session], body=body)


def error_code(shown: bytes) -> object:
    """The code of the event that `shown` is."""
    assert shown.startswith(b"data: "), shown
    return msgspec.json.decode(shown[6:], type=dict[str, dict[str, object]])["error"]["code"]


@WAYS
@pytest.mark.parametrize(("path", "parts"), APIS)
async def test_cut_shows_as_an_error_and_charges_node_and_session(path: bytes, parts: list[bytes], way: str) -> None:
    for breakers, scope in ((node_breaker(1), "node"), (session_breaker(1), "session")):
        async with (
            behind(one_by_one(cut(parts, way)), breakers=breakers, retry=Retry()) as (upstream, proxy),
            proxy.client() as client,
        ):
            got = await client.ask(asking(path), b"POST")
            whole = b"".join(parts)
            assert got.status == 200 and got.body.startswith(whole)
            assert error_code(got.body[len(whole) :]) == "upstream_truncated"
            assert got.body.count(parts[-1]) == 40 if path != CHAT else got.body.count(token(39)) == 1
            for fabricated in (b"[DONE]", b'"stop"', b"message_stop", b"response.completed"):
                assert fabricated not in got.body
            assert await client.rest() == b""
            assert len(upstream.requests) == 1, "re-sent after bytes went to the client"
            assert proxy.state(scope, upstream.key if scope == "node" else "s1") is State.OPEN


@pytest.mark.parametrize("keep", [1, 6, 40, -1, -2], ids=lambda keep: f"at-{keep}")
async def test_cut_inside_an_event_still_ends_in_a_readable_error(keep: int) -> None:
    half = token(40)[:keep]
    async with relayed(one_by_one(cut([*TOKENS, half], "fin"))) as (_, _, client):
        got = await client.ask(chat(), b"POST")
        shown = [part for part in got.body.split(b"\n\n") if part]
        assert error_code(shown[-1].lstrip(b"\n")) == "upstream_truncated"
        # The half event stays by itself: no reader may take it for a part of the error, nor lose the error to it.
        assert b"".join(part + b"\n\n" for part in shown[: len(TOKENS)]) == b"".join(TOKENS)
        with contextlib.suppress(msgspec.DecodeError):
            for part in shown[len(TOKENS) : -1]:
                msgspec.json.decode(part.removeprefix(b"data: "))


@WAYS
async def test_http_10_client_sees_the_error_too(way: str) -> None:
    async with relayed(one_by_one(cut(TOKENS, way))) as (_, _, client):
        body = b'{"model":"m","stream":true}'
        await client.send(b"POST %b HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (CHAT, len(body), body))
        await client.head()
        plain = await client.rest()
        assert plain.startswith(b"".join(TOKENS))
        assert error_code(plain[len(b"".join(TOKENS)) :]) == "upstream_truncated"


@WAYS
@pytest.mark.parametrize("before", [[], [ROLE], [b": ping\n\n", ROLE]], ids=["nothing", "role", "comment-and-role"])
async def test_cut_before_the_first_token_is_an_honest_error(before: list[bytes], way: str) -> None:
    async with behind(one_by_one(cut(before, way)), retry=NO_RETRY, breakers=node_breaker(1)) as (upstream, proxy):
        status, reason, _ = refusal(await proxy.once(chat()))
        assert status == 502
        assert reason in ("upstream_truncated", "empty_response", "upstream_reset")
        assert proxy.state("node", upstream.key) is State.OPEN


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        pytest.param(CHAT, [*TOKENS, FINISH, DONE], id="chat"),
        pytest.param(CHAT, [*TOKENS, FINISH], id="chat-finish-reason"),
        pytest.param(CHAT, [*TOKENS, DONE], id="chat-done-alone"),
        pytest.param(
            b"/v1/responses",
            [*RESPONSES, b'event: response.completed\ndata: {"type":"response.completed","response":{}}\n\n'],
            id="responses",
        ),
        pytest.param(
            b"/v1/responses",
            [*RESPONSES, b'event: response.incomplete\ndata: {"type":"response.incomplete","response":{}}\n\n'],
            id="responses-incomplete",
        ),
        pytest.param(
            b"/v1/messages", [*MESSAGES, b'event: message_stop\ndata: {"type":"message_stop"}\n\n'], id="messages"
        ),
    ],
)
async def test_real_end_is_a_success(path: bytes, parts: list[bytes]) -> None:
    async with behind(one_by_one(says(stream_of(*parts))), breakers=node_breaker(1)) as (upstream, proxy):
        assert (await proxy.once(asking(path))).body == b"".join(parts)
        assert proxy.state("node", upstream.key) is State.CLOSED


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        pytest.param(b"/v1/responses", [*RESPONSES, DONE], id="done-is-not-of-responses"),
        pytest.param(b"/v1/messages", [*MESSAGES, DONE], id="done-is-not-of-messages"),
        pytest.param(
            CHAT, [*TOKENS, b'event: message_stop\ndata: {"type":"message_stop"}\n\n'], id="message-stop-is-not-of-chat"
        ),
    ],
)
async def test_end_marker_of_another_api_is_no_end(path: bytes, parts: list[bytes]) -> None:
    async with behind(one_by_one(says(stream_of(*parts))), breakers=node_breaker(1)) as (upstream, proxy):
        assert b'"upstream_truncated"' in (await proxy.once(asking(path))).body
        assert proxy.state("node", upstream.key) is State.OPEN


async def test_every_choice_must_finish() -> None:
    one = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
    two = b'data: {"choices":[{"index":1,"delta":{"content":"b"},"finish_reason":null}]}\n\n'
    async with behind(one_by_one(says(stream_of(one, two, FINISH))), breakers=node_breaker(1)) as (upstream, proxy):
        assert b'"upstream_truncated"' in (await proxy.once(chat())).body
        assert proxy.state("node", upstream.key) is State.OPEN


@pytest.mark.parametrize("way", ["fin", "reset"])
async def test_finish_reason_without_a_clean_end_is_a_failure(way: str) -> None:
    async with behind(one_by_one(cut([*TOKENS, FINISH], way)), breakers=node_breaker(1)) as (upstream, proxy):
        await proxy.once(chat())
        assert proxy.state("node", upstream.key) is State.OPEN


@pytest.mark.parametrize("way", ["fin", "reset"])
async def test_large_plain_answer_that_is_cut_is_cut_for_the_client(way: str) -> None:
    big = COMPLETION[:-1] + b',"pad":"' + b"x" * 400_000 + b'"}'
    head = json_answer(big)[: -len(big)]

    async def behave(peer: Peer) -> None:
        await peer.send(head + big[:300_000])
        await peer.settled(200)
        if way == "fin":
            peer.close()
        else:
            peer.reset()

    async with behind(one_by_one(behave), breakers=node_breaker(1)) as (upstream, proxy), proxy.client() as client:
        with pytest.raises(Gone):
            got = await client.ask(chat(stream=False), b"POST")
            if got.status == 502:
                raise Gone
        assert proxy.state("node", upstream.key) is State.OPEN
