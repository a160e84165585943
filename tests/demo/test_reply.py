import asyncio
import json

import msgspec
import pytest

from sidecar.demo.dialect import DONE, Chat, whole_stream
from sidecar.demo.engine import Engine
from sidecar.demo.script import Fault, Kind, Script
from tests.demo.requests import CHAT, ask, begun_for, engine_and_client, plain_for, post, spec_for, stream_for, talk
from tests.harness import Client, connect

PATHS = [CHAT, b"/v1/completions", b"/v1/messages", b"/v1/responses"]
STREAM = ask(5, stream=True)
PLAIN = ask(5, stream=False)


async def quiet(client: Client) -> bytes:
    """What is unread after a while in which more would have come: 30 ticks of the wheel."""
    await asyncio.sleep(0.03)
    assert not client.ended
    return client.unread


def payload(raw: bytes) -> bytes:
    """The chunks' payloads; a chunk that is cut gives what there is of it."""
    parts, at = [], 0
    while at < len(raw):
        end = raw.index(b"\r\n", at)
        count = int(raw[at:end], 16)
        parts.append(raw[end + 2 : end + 2 + count])
        at = end + 4 + count
    return b"".join(parts)


async def body_until_end(client: Client) -> bytes:
    """The chunks' payloads up to the end of the connection; the end itself is the caller's to check."""
    return payload(await client.rest())


# --- right answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("gap_s", [0.0, 0.002], ids=["burst", "paced"])
async def test_stream_is_exactly_what_the_dialect_says(path: bytes, gap_s: float) -> None:
    async with engine_and_client(Script(token_gap_s=gap_s)) as (engine, client):
        answer = await client.ask(post(STREAM, path), b"POST")
        assert answer.status == 200
        assert answer.framing == "chunked"
        assert answer.header(b"content-type") == b"text/event-stream; charset=utf-8"
        assert answer.header(b"x-request-id") == b"r1"
        assert answer.body == stream_for(STREAM, 5, path)
        # Kept alive: the second answer on the same connection is the same.
        assert (await client.ask(post(STREAM, path), b"POST")).body == answer.body
        assert engine.counters.accepted == 1
        assert engine.counters.completed == 2 and engine.counters.live == 0
        assert engine.counters.tokens == 10


@pytest.mark.parametrize("path", [*PATHS, b"/v1/embeddings"])
async def test_plain_answer_is_exactly_what_the_dialect_says(path: bytes) -> None:
    async with talk() as client:
        answer = await client.ask(post(PLAIN, path), b"POST")
        assert (answer.status, answer.framing) == (200, "length")
        assert answer.header(b"content-type") == b"application/json"
        assert answer.body == plain_for(PLAIN, 5, path)


async def test_usage_and_choices_are_streamed_as_asked() -> None:
    body = ask(3, stream=True, n=2, stream_options={"include_usage": True})
    async with talk() as client:
        answer = await client.ask(post(body), b"POST")
        assert answer.body == stream_for(body, 3, usage=True, choices=2)


async def test_request_without_a_limit_gets_the_scripts_tokens_and_stops_by_itself() -> None:
    async with talk(Script(tokens=7)) as client:
        answer = await client.ask(post(b'{"model":"demo","stream":true}'), b"POST")
        assert b"t6 " in answer.body and b"t7 " not in answer.body
        assert b'"finish_reason":"stop"' in answer.body


async def test_stream_of_more_than_one_burst_is_whole() -> None:
    body = ask(1000, stream=True)
    async with talk() as client:
        answer = await client.ask(post(body), b"POST")
        assert answer.body == stream_for(body, 1000)


async def test_head_comes_before_the_first_token_and_tokens_one_by_one() -> None:
    async with talk(Script(first_token_s=0.03, token_gap_s=0.01)) as client:
        clock = asyncio.get_running_loop()
        await client.send(post(STREAM))
        await client.response_head()
        headed = clock.time()
        assert client.unread == b""
        times = []
        # Role and first token come together, then four tokens, then the closing.
        for _ in range(7):
            assert await client.chunk()
            times.append(clock.time())
        assert times[0] - headed >= 0.02
        assert times[5] - times[1] >= 0.03
        assert times[1] - times[0] < 0.01


async def test_first_token_is_later_the_more_are_alive() -> None:
    script = Script(first_token_per_live_s=30.0)
    async with Engine(script) as engine, connect(engine.port) as first, connect(engine.port) as second:
        assert (await first.ask(post(STREAM), b"POST")).body == stream_for(STREAM, 5)
        await first.send(post(STREAM, CHAT, b'x-demo-fault: {"kind":"hang"}'))
        await first.settled()
        await second.send(post(STREAM))
        await second.response_head()
        assert await quiet(second) == b""


async def test_close_framed_stream_ends_with_its_connection() -> None:
    async with talk(Script(close_framed=True)) as client:
        answer = await client.ask(post(STREAM), b"POST")
        assert answer.framing == "close"
        assert answer.header(b"connection") == b"close"
        assert answer.body == stream_for(STREAM, 5)
        assert client.error is None


async def test_http_10_client_gets_no_chunks() -> None:
    async with talk() as client:
        answer = await client.ask(post(STREAM, version=b"1.0"), b"POST")
        assert answer.framing == "close"
        assert answer.body == stream_for(STREAM, 5)


async def test_client_that_does_not_read_holds_the_stream_back_and_gets_it_whole() -> None:
    # Sixteen megabytes: more than the kernel's buffers of both ends can take.
    tokens, event_bytes = 4000, 4000
    body = ask(tokens, stream=True)
    async with engine_and_client(Script(event_bytes=event_bytes)) as (engine, client):
        client.transport.pause_reading()
        await client.send(post(body))
        before = -1
        async with asyncio.timeout(4):
            while engine.counters.tokens != before:
                before = engine.counters.tokens
                await asyncio.sleep(0.03)
        assert 0 < before < tokens
        client.transport.resume_reading()
        await client.response_head()
        await client.until(lambda: client.received.endswith(b"\r\n0\r\n\r\n"), "the last chunk")
        spec = msgspec.structs.replace(spec_for(body, tokens), event_bytes=event_bytes)
        assert payload(client.unread) == whole_stream(Chat(spec), tokens)


@pytest.mark.parametrize("body", [STREAM, PLAIN], ids=["stream", "plain"])
async def test_client_that_leaves_counts_as_aborted_and_frees_its_place(body: bytes) -> None:
    async with Engine(Script(first_token_s=60.0)) as engine:
        async with connect(engine.port) as client:
            await client.send(post(body))
            await client.settled()
            assert engine.counters.live == 1
        async with asyncio.timeout(2):
            while engine.counters.live:
                await asyncio.sleep(0)
        assert (engine.counters.aborted, engine.counters.completed, engine.counters.open) == (1, 0, 0)


# --- faults within a stream -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1, 3, 5, 99])
@pytest.mark.parametrize("gap_s", [0.0, 0.002], ids=["burst", "paced"])
class TestWithinAStream:
    """Each fault after no, some, all and more tokens than there are."""

    async def test_stall_sends_its_tokens_and_then_nothing(self, after: int, gap_s: float) -> None:
        async with engine_and_client(Script(token_gap_s=gap_s, fault=Fault(Kind.STALL, after=after))) as (
            engine,
            client,
        ):
            await client.send(post(STREAM))
            await client.response_head()
            begun = begun_for(STREAM, 5, min(after, 5))
            got = b""
            while len(got) < len(begun):
                got += await client.chunk()
            assert got == begun
            assert await quiet(client) == b""
            assert engine.counters.live == 1

    async def test_reset_ends_the_stream_with_rst_after_its_tokens(self, after: int, gap_s: float) -> None:
        async with engine_and_client(Script(token_gap_s=gap_s, fault=Fault(Kind.CUT_RST, after=after))) as (
            engine,
            client,
        ):
            await client.send(post(STREAM))
            await client.response_head()
            assert await body_until_end(client) == begun_for(STREAM, 5, min(after, 5))
            assert isinstance(client.error, ConnectionResetError) and not client.fin
            assert engine.counters.struck == 1 and engine.counters.live == 0

    async def test_fin_ends_the_stream_without_the_last_chunk(self, after: int, gap_s: float) -> None:
        async with talk(Script(token_gap_s=gap_s, fault=Fault(Kind.CUT_FIN, after=after))) as client:
            await client.send(post(STREAM))
            await client.response_head()
            assert await body_until_end(client) == begun_for(STREAM, 5, min(after, 5))
            assert client.fin and client.error is None
            assert not client.received.endswith(b"0\r\n\r\n")

    async def test_no_terminator_is_a_clean_end_of_http_alone(self, after: int, gap_s: float) -> None:
        async with engine_and_client(Script(token_gap_s=gap_s, fault=Fault(Kind.CUT_NO_TERMINATOR, after=after))) as (
            engine,
            client,
        ):
            answer = await client.ask(post(STREAM), b"POST")
            assert answer.body == begun_for(STREAM, 5, min(after, 5))
            engine.heal()
            assert (await client.ask(post(STREAM), b"POST")).body == stream_for(STREAM, 5)

    async def test_in_band_error_comes_with_done_and_a_clean_end(self, after: int, gap_s: float) -> None:
        async with talk(Script(token_gap_s=gap_s, fault=Fault(Kind.IN_BAND_ERROR, after=after))) as client:
            answer = await client.ask(post(STREAM), b"POST")
            assert answer.status == 200
            begun = begun_for(STREAM, 5, min(after, 5))
            assert answer.body.startswith(begun) and answer.body.endswith(DONE)
            said = answer.body[len(begun) : -len(DONE)]
            assert said.startswith(b"data: ") and said.endswith(b"\n\n")
            assert json.loads(said[6:])["error"]["code"] == 500

    async def test_malformed_event_comes_once_and_the_stream_goes_on(self, after: int, gap_s: float) -> None:
        async with engine_and_client(Script(token_gap_s=gap_s, fault=Fault(Kind.MALFORMED_EVENT, after=after))) as (
            engine,
            client,
        ):
            answer = await client.ask(post(STREAM), b"POST")
            begun, right = begun_for(STREAM, 5, min(after, 5)), stream_for(STREAM, 5)
            assert answer.body.startswith(begun)
            extra = len(answer.body) - len(right)
            bad = answer.body[len(begun) : len(begun) + extra]
            assert answer.body == begun + bad + right[len(begun) :]
            assert bad.startswith(b"data: ") and bad.endswith(b"\n\n")
            with pytest.raises(json.JSONDecodeError):
                json.loads(bad[6:])
            assert engine.counters.completed == 1


@pytest.mark.parametrize("kind", [Kind.CUT_RST, Kind.CUT_FIN])
async def test_torn_cut_leaves_half_a_chunk(kind: Kind) -> None:
    async with talk(fault=Fault(kind, after=2, torn=True)) as client:
        await client.send(post(STREAM))
        await client.response_head()
        raw = await client.rest()
        whole = begun_for(STREAM, 5, 3)
        last = whole[len(begun_for(STREAM, 5, 2)) :]
        framed = b"%x\r\n%b\r\n" % (len(last), last)
        assert raw.endswith(framed[: len(framed) // 2])


@pytest.mark.parametrize("kind", [Kind.STALL, Kind.CUT_NO_TERMINATOR])
async def test_torn_stall_and_clean_end_leave_half_an_event(kind: Kind) -> None:
    async with talk(fault=Fault(kind, after=2, torn=True)) as client:
        await client.send(post(STREAM))
        await client.response_head()
        begun = begun_for(STREAM, 5, 2)
        torn = begun_for(STREAM, 5, 3)[len(begun) :]
        want = begun + torn[: len(torn) // 2]
        got = b""
        while len(got) < len(want):
            got += await client.chunk()
        assert got == want


async def test_error_object_of_a_fault_says_what_it_is_told() -> None:
    fault = Fault(Kind.IN_BAND_ERROR, message="too long", type="BadRequestError", code=400)
    async with talk(fault=fault) as client:
        answer = await client.ask(post(STREAM), b"POST")
        said = b'{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}'
        assert b"data: %b\n\n" % said in answer.body


async def test_body_of_a_fault_stands_verbatim() -> None:
    async with talk(fault=Fault(Kind.IN_BAND_ERROR, body='{"error":"text"}')) as client:
        answer = await client.ask(post(STREAM), b"POST")
        assert b'data: {"error":"text"}\n\n' in answer.body


# --- faults before the first token ----------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [STREAM, PLAIN], ids=["stream", "plain"])
class TestBeforeTheFirstToken:
    """Each fault for both kinds of request."""

    async def test_hang_answers_nothing(self, body: bytes) -> None:
        async with engine_and_client(fault=Fault(Kind.HANG)) as (engine, client):
            await client.send(post(body))
            assert await quiet(client) == b""
            assert engine.counters.live == 1

    async def test_headers_only_is_a_head_and_nothing(self, body: bytes) -> None:
        async with talk(fault=Fault(Kind.HEADERS_ONLY)) as client:
            await client.send(post(body))
            assert (await client.response_head()).status == 200
            assert await quiet(client) == b""

    async def test_fin_before_head_closes_without_a_byte(self, body: bytes) -> None:
        async with talk(fault=Fault(Kind.FIN_BEFORE_HEAD)) as client:
            await client.send(post(body))
            assert await client.rest() == b""
            assert client.fin and client.error is None

    async def test_rst_before_head_resets_without_a_byte(self, body: bytes) -> None:
        async with talk(fault=Fault(Kind.RST_BEFORE_HEAD)) as client:
            await client.send(post(body))
            assert await client.rest() == b""
            assert isinstance(client.error, ConnectionResetError)

    async def test_bad_http_is_not_http(self, body: bytes) -> None:
        async with talk(fault=Fault(Kind.BAD_HTTP)) as client:
            await client.send(post(body))
            assert not (await client.rest()).startswith(b"HTTP/")

    async def test_status_is_plain_json_with_its_retry_after(self, body: bytes) -> None:
        fault = Fault(Kind.STATUS, status=429, retry_after="7", message="slow down")
        async with engine_and_client(fault=fault) as (engine, client):
            answer = await client.ask(post(body), b"POST")
            assert (answer.status, answer.framing) == (429, "length")
            assert answer.header(b"retry-after") == b"7"
            assert answer.header(b"content-type") == b"application/json"
            assert json.loads(answer.body)["error"] == {
                "message": "slow down",
                "type": "RateLimitError",
                "param": None,
                "code": 429,
            }
            engine.heal()
            assert (await client.ask(post(body), b"POST")).status == 200
            assert engine.counters.accepted == 1

    async def test_empty_is_200_and_no_byte_of_body(self, body: bytes) -> None:
        async with talk(fault=Fault(Kind.EMPTY)) as client:
            answer = await client.ask(post(body), b"POST")
            assert (answer.status, answer.body) == (200, b"")
            assert answer.framing == ("chunked" if body is STREAM else "length")

    async def test_wrong_media_type_is_a_page(self, body: bytes) -> None:
        async with talk(fault=Fault(Kind.WRONG_MEDIA_TYPE)) as client:
            answer = await client.ask(post(body), b"POST")
            assert (answer.status, answer.header(b"content-type")) == (200, b"text/html")
            assert answer.body.startswith(b"<!doctype html>")

    async def test_slow_is_the_right_answer_that_much_later(self, body: bytes) -> None:
        script = Script(first_token_s=0.004, token_gap_s=0.002, fault=Fault(Kind.SLOW, factor=4.0))
        async with engine_and_client(script) as (engine, client):
            loop = asyncio.get_running_loop()
            began = loop.time()
            answer = await client.ask(post(body), b"POST")
            assert answer.body == (stream_for(STREAM, 5) if body is STREAM else plain_for(PLAIN, 5))
            assert loop.time() - began >= 4.0 * (0.004 + 4 * 0.002) - 0.001
            assert engine.counters.completed == 1

    async def test_slow_drip_is_the_right_answer_in_small_pieces(self, body: bytes) -> None:
        fault = Fault(Kind.SLOW_DRIP, period_s=0.001, size=100)
        async with engine_and_client(fault=fault) as (engine, client):
            answer = await client.ask(post(body), b"POST")
            assert answer.body == (stream_for(STREAM, 5) if body is STREAM else plain_for(PLAIN, 5))
            assert max(client.reads[:3]) <= 200
            assert engine.counters.completed == 1

    async def test_extra_bytes_follow_a_right_answer(self, body: bytes) -> None:
        async with talk(fault=Fault(Kind.EXTRA_BYTES)) as client:
            answer = await client.ask(post(body), b"POST")
            assert answer.body == (stream_for(STREAM, 5) if body is STREAM else plain_for(PLAIN, 5))
            assert (await client.response()).body == b"extra"

    async def test_stale_closes_a_connection_it_promised_to_keep(self, body: bytes) -> None:
        async with talk(fault=Fault(Kind.STALE)) as client:
            answer = await client.ask(post(body), b"POST")
            assert answer.body == (stream_for(STREAM, 5) if body is STREAM else plain_for(PLAIN, 5))
            assert answer.values(b"connection") == []
            assert await client.rest() == b"" and client.fin


async def test_role_only_is_head_and_role_and_nothing() -> None:
    async with talk(fault=Fault(Kind.ROLE_ONLY)) as client:
        await client.send(post(STREAM))
        await client.response_head()
        assert await client.chunk() == begun_for(STREAM, 5, 0)
        assert await quiet(client) == b""


async def test_comments_only_is_a_heartbeat_without_a_token() -> None:
    fault = Fault(Kind.COMMENTS_ONLY, period_s=0.002)
    async with engine_and_client(fault=fault) as (engine, client):
        await client.send(post(STREAM))
        await client.response_head()
        assert [await client.chunk() for _ in range(5)] == [b": keep-alive\n\n"] * 5
        assert engine.counters.tokens == 0


# --- faults of plain answers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Kind.ROLE_ONLY, Kind.COMMENTS_ONLY])
async def test_plain_answer_that_cannot_have_the_fault_hangs_after_its_head(kind: Kind) -> None:
    async with talk(fault=Fault(kind)) as client:
        await client.send(post(PLAIN))
        assert int((await client.response_head()).header(b"content-length")) == len(plain_for(PLAIN, 5))
        assert await quiet(client) == b""


@pytest.mark.parametrize("kind", [Kind.CUT_RST, Kind.CUT_FIN, Kind.STALL])
async def test_cut_plain_answer_is_half_of_its_announced_body(kind: Kind) -> None:
    async with talk(fault=Fault(kind)) as client:
        await client.send(post(PLAIN))
        whole = plain_for(PLAIN, 5)
        assert int((await client.response_head()).header(b"content-length")) == len(whole)
        if kind is Kind.STALL:
            assert await client.exactly(len(whole) // 2) == whole[: len(whole) // 2]
            assert await quiet(client) == b""
        else:
            assert await client.rest() == whole[: len(whole) // 2]
            assert isinstance(client.error, ConnectionResetError) == (kind is Kind.CUT_RST)


async def test_plain_in_band_error_is_200_with_an_error_object() -> None:
    async with talk(fault=Fault(Kind.IN_BAND_ERROR)) as client:
        answer = await client.ask(post(PLAIN), b"POST")
        assert answer.status == 200 and json.loads(answer.body)["error"]["code"] == 500


@pytest.mark.parametrize("kind", [Kind.CUT_NO_TERMINATOR, Kind.MALFORMED_EVENT])
async def test_plain_answer_cut_inside_http_is_broken_json(kind: Kind) -> None:
    async with talk(fault=Fault(kind)) as client:
        answer = await client.ask(post(PLAIN), b"POST")
        whole = plain_for(PLAIN, 5)
        assert (answer.status, answer.body) == (200, whole[: len(whole) // 2])


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.DIE])
@pytest.mark.parametrize("body", [STREAM, PLAIN], ids=["stream", "plain"])
async def test_client_that_leaves_a_faulty_answer_leaves_nothing_behind(kind: Kind, body: bytes) -> None:
    async with Engine(Script(token_gap_s=0.001, fault=Fault(kind, after=2, period_s=0.001))) as engine:
        async with connect(engine.port) as client:
            await client.send(post(body))
            await asyncio.sleep(0.004)
        async with asyncio.timeout(2):
            while engine.counters.open:
                await asyncio.sleep(0)
        counters = engine.counters
        assert counters.live == counters.waiting == 0
        assert counters.completed + counters.struck + counters.aborted == counters.seen == 1
