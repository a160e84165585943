"""Server-sent events through the proxy: the engine's bytes, in the engine's order, each as soon as it came."""

import pytest

from tests.harness import Client, Peer, Script, answers, chunked, request
from tests.under_test import (
    COMPLETION,
    DONE,
    FINISH,
    JSON,
    PING,
    ROLE,
    chat,
    events,
    json_answer,
    relayed,
    stream_head,
    stream_of,
    token,
)


def asking(path: bytes, stream: bool = True) -> bytes:
    body = b'{"model":"m","stream":%b,"messages":[],"prompt":"x","input":"x"}' % (b"true" if stream else b"false")
    return request(path, method=b"POST", headers=[JSON], body=body)


RESPONSES = [
    b'event: response.created\ndata: {"type":"response.created","response":{"id":"r","status":"in_progress"}}\n\n',
    b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"hi"}\n\n',
    b'event: response.completed\ndata: {"type":"response.completed","response":{"id":"r","status":"completed"}}\n\n',
]
MESSAGES = [
    b'event: message_start\ndata: {"type":"message_start","message":{"id":"m","role":"assistant","content":[]}}\n\n',
    b'event: ping\ndata: {"type":"ping"}\n\n',
    b'event: content_block_start\ndata: {"type":"content_block_start","index":0,'
    b'"content_block":{"type":"text","text":""}}\n\n',
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
    b'"delta":{"type":"text_delta","text":"hi"}}\n\n',
    b'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n',
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"}}\n\n',
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
]
COMPLETIONS = [
    b'data: {"id":"c","object":"text_completion","choices":[{"index":0,"text":"hi","finish_reason":null}]}\n\n',
    b'data: {"id":"c","object":"text_completion","choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\n',
    DONE,
]
CRLF = [each.replace(b"\n", b"\r\n") for each in events(2)]
MULTI = [each.replace(b'","choices"', b'",\ndata: "choices"') for each in events(2)]
TOOL = [
    ROLE,
    b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"x","function":{"name":"f"}}]},'
    b'"finish_reason":null}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"tool_calls"}]}\n\n',
    DONE,
]
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}\n\n'
HUGE = b'data: {"choices":[{"index":0,"delta":{"content":"' + b"x" * (1 << 20) + b'"},"finish_reason":null}]}\n\n'
CHAT_PATH = b"/v1/chat/completions"

STREAMS = [
    pytest.param(CHAT_PATH, events(3), id="chat"),
    pytest.param(CHAT_PATH, [ROLE, token(0), FINISH, USAGE, DONE], id="chat-usage"),
    pytest.param(CHAT_PATH, TOOL, id="chat-tools"),
    pytest.param(CHAT_PATH, [PING, ROLE, PING, token(0), PING, FINISH, DONE], id="chat-comments"),
    pytest.param(CHAT_PATH, CRLF, id="chat-crlf"),
    pytest.param(CHAT_PATH, MULTI, id="chat-multi-line"),
    pytest.param(CHAT_PATH, [b"\xef\xbb\xbf" + ROLE, *events(2)[1:]], id="chat-bom"),
    pytest.param(CHAT_PATH, [b"id: 1\nretry: 5\n" + ROLE, *events(2)[1:]], id="chat-other-fields"),
    pytest.param(CHAT_PATH, [ROLE, b"data: not json\n\n", *events(2)[1:]], id="chat-malformed-event"),
    pytest.param(CHAT_PATH, [ROLE, token(0), FINISH], id="chat-no-done-but-finished"),
    pytest.param(b"/v1/completions", COMPLETIONS, id="completions"),
    pytest.param(b"/v1/responses", RESPONSES, id="responses"),
    pytest.param(b"/v1/messages", MESSAGES, id="messages"),
]


@pytest.mark.parametrize(("path", "parts"), STREAMS)
@pytest.mark.parametrize("cut", ["per-event", "one-chunk", "odd-chunks"])
async def test_stream_bytes_are_the_engines(path: bytes, parts: list[bytes], cut: str, split: bool) -> None:
    whole = b"".join(parts)
    pieces = {
        "per-event": parts,
        "one-chunk": [whole],
        "odd-chunks": [whole[at : at + 7] for at in range(0, len(whole), 7)],
    }[cut]
    async with relayed(answers(stream_of(*pieces)), split) as (upstream, _, client):
        for _ in range(2):
            got = await client.ask(asking(path), b"POST")
            assert (got.status, got.framing) == (200, "chunked")
            assert got.header(b"content-type") == b"text/event-stream; charset=utf-8"
            assert got.body == whole
        assert len(upstream.connections) == 1


async def test_event_of_a_megabyte_crosses_unchanged() -> None:
    parts = [ROLE, HUGE, token(1), FINISH, DONE]
    async with relayed(answers(stream_of(*parts))) as (_, _, client):
        assert (await client.ask(chat(), b"POST")).body == b"".join(parts)


def in_lockstep(parts: list[bytes], steps: list[bytes]) -> tuple[Script, list[bytes]]:
    """A script that sends one part per byte string that the test asks for by appending to `steps`."""

    async def play(peer: Peer) -> None:
        await peer.request()
        for number, part in enumerate(parts):
            while len(steps) <= number:
                await peer.settled(1)
            await peer.send(part)

    return play, steps


async def shown(client: Client, body: bytes) -> bytes:
    """Reads chunks until they amount to `body`, and no further."""
    got = b""
    while len(got) < len(body):
        got += await client.chunk()
    return got


async def test_first_token_and_every_byte_after_it_are_passed_on_at_once(split: bool) -> None:
    half = b'data: {"choices":[{"ind'
    rest = b'ex":0,"delta":{"content":"late"},"finish_reason":null}]}\n\n'
    bodies = [ROLE + token(0), token(1), PING, half, rest, FINISH + DONE]
    parts = [chunked(body, end=False) for body in bodies]
    play, steps = in_lockstep([stream_head() + parts[0], *parts[1:], chunked()], [])
    async with relayed(play, split) as (_, _, client):
        await client.send(chat())
        for number, body in enumerate(bodies):
            # The engine sends nothing more until the client has all of this: whatever is kept back shows as a hang.
            steps.append(body)
            if number == 0:
                assert (await client.response_head()).status == 200
            assert await shown(client, body) == body
        steps.append(b"")
        assert await client.chunk() == b""


async def test_part_of_a_chunk_is_passed_on_before_its_end(split: bool) -> None:
    first = ROLE + token(0)
    parts = [stream_head() + chunked(first, end=False), b"%x\r\n" % len(PING) + PING[:3], PING[3:] + b"\r\n"]
    play, steps = in_lockstep(parts, [])
    async with relayed(play, split) as (_, _, client):
        await client.send(chat())
        for number, body in enumerate([first, PING[:3], PING[3:]]):
            steps.append(body)
            if number == 0:
                await client.response_head()
            assert await shown(client, body) == body


@pytest.mark.parametrize("path", [b"/x", b"/v1/models/m", b"/events"])
async def test_answers_that_are_no_inference_are_passed_on_at_once(path: bytes, split: bool) -> None:
    parts = [stream_head(), chunked(PING, end=False), chunked(b"data: x\n\n")]
    play, steps = in_lockstep(parts, [])
    async with relayed(play, split) as (_, _, client):
        await client.send(request(path))
        steps.append(b"")
        await client.response_head()
        for body in (PING, b"data: x\n\n"):
            steps.append(b"")
            assert await shown(client, body) == body
        assert await client.chunk() == b""


@pytest.mark.parametrize("path", [CHAT_PATH, b"/v1/completions", b"/v1/responses", b"/v1/messages", b"/v1/embeddings"])
@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_json_answers_cross_unchanged(path: bytes, framing: str, split: bool) -> None:
    answer = json_answer(COMPLETION)
    if framing == "chunked":
        answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        answer += chunked(COMPLETION[:9], COMPLETION[9:])
    async with relayed(answers(answer), split) as (_, _, client):
        for _ in range(2):
            got = await client.ask(asking(path, stream=False), b"POST")
            assert (got.status, got.body) == (200, COMPLETION)
            assert got.header(b"content-type") == b"application/json"


async def test_large_json_answer_crosses_unchanged() -> None:
    big = b'{"object":"list","data":[' + b'"%b",' % (b"x" * 1000) * 500 + b'""]}'
    async with relayed(answers(json_answer(big))) as (_, _, client):
        for _ in range(2):
            assert (await client.ask(asking(b"/v1/embeddings", stream=False), b"POST")).body == big


async def test_compressed_answers_cross_unread(split: bool) -> None:
    packed = b"\x1f\x8b\x08" + bytes(range(256))
    answer = json_answer(packed, headers=[b"content-encoding: gzip"])
    async with relayed(answers(answer), split) as (_, _, client):
        got = await client.ask(chat(stream=False, headers=[b"Accept-Encoding: gzip"]), b"POST")
        assert (got.status, got.body, got.header(b"content-encoding")) == (200, packed, b"gzip")
