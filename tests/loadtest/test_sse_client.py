"""The client against the simulated engine, whose faults are known, and against bytes written here."""

import asyncio
import socket
import time
from typing import Any

import pytest

from loadtest.sse_client import Answer, Ask, Client, Ended, Pace, Stream, Target, report
from sidecar.demo.engine import Engine
from sidecar.demo.script import Fault, Kind, Script

ASK = Ask(tokens=6, session="s1", checked=True)
CALM = Script(token_gap_s=0.002)


async def asked(engine: Engine, ask: Ask = ASK, patience_s: float = 5.0, pace: Pace | None = None) -> Stream:
    client = Client(Target.of(engine.url), patience_s)
    try:
        return await asyncio.to_thread(client.stream, ask, pace)
    finally:
        client.close()


async def test_a_whole_stream_has_all_its_tokens_and_times() -> None:
    async with Engine(CALM) as engine:
        stream = await asked(engine)
    assert (stream.ended, stream.tokens, stream.status, len(stream.gaps_s)) == (Ended.WHOLE, 6, 200, 5)
    assert stream.ttft_s is not None
    assert 0 < stream.ttft_s < stream.total_s
    assert sum(stream.gaps_s) == pytest.approx(stream.total_s - stream.ttft_s, abs=0.1)


async def test_the_session_goes_along() -> None:
    async with Engine(CALM) as engine:
        await asked(engine)
        assert [(name, value) for name, value in engine.received[0].headers if name == b"x-session-id"] == [
            (b"x-session-id", b"s1")
        ]


@pytest.mark.parametrize(
    ("fault", "ended"),
    [
        (Fault(Kind.CUT_RST, after=3), Ended.SILENT),
        (Fault(Kind.CUT_FIN, after=3), Ended.SILENT),
        (Fault(Kind.CUT_NO_TERMINATOR, after=3), Ended.SILENT),
        (Fault(Kind.IN_BAND_ERROR, after=3), Ended.TOLD),
        (Fault(Kind.STALL, after=3), Ended.WAITED),
        (Fault(Kind.HANG), Ended.WAITED),
        (Fault(Kind.FIN_BEFORE_HEAD), Ended.UNREACHED),
        (Fault(Kind.BAD_HTTP), Ended.UNREACHED),
        (Fault(Kind.EMPTY), Ended.SILENT),
        (Fault(Kind.STATUS, status=503, retry_after="2", message="full"), Ended.REFUSED),
    ],
    ids=lambda value: value.kind if isinstance(value, Fault) else None,
)
async def test_every_bad_end_has_its_name(fault: Fault, ended: Ended) -> None:
    async with Engine(Script(token_gap_s=0.002, fault=fault)) as engine:
        stream = await asked(engine, patience_s=0.3)
    assert stream.ended is ended, stream.detail
    assert stream.retry_after_s == (2.0 if ended is Ended.REFUSED else 0.0)


async def test_a_port_that_nobody_has_is_unreached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        target = Target("127.0.0.1", gone.getsockname()[1])
    stream = await asyncio.to_thread(Client(target).stream, ASK)
    assert stream.ended is Ended.UNREACHED


async def test_a_good_connection_is_kept_and_a_closed_one_is_noticed() -> None:
    async with Engine(CALM) as engine:
        client = Client(Target.of(engine.url))
        for _ in range(2):
            assert (await asyncio.to_thread(client.stream, ASK)).ended is Ended.WHOLE
        assert engine.counters.accepted == 1
        engine.fail(Fault(Kind.STALE))
        for _ in range(2):
            assert (await asyncio.to_thread(client.stream, ASK)).ended is Ended.WHOLE
            await asyncio.sleep(0.05)
        assert engine.counters.accepted == 2
        client.close()


async def test_a_connection_is_not_kept_after_a_bad_end() -> None:
    async with Engine(Script(fault=Fault(Kind.IN_BAND_ERROR, after=1, times=1))) as engine:
        client = Client(Target.of(engine.url))
        ends = [(await asyncio.to_thread(client.stream, ASK)).ended for _ in range(2)]
        assert (ends, engine.counters.accepted) == ([Ended.TOLD, Ended.WHOLE], 2)
        client.close()


async def test_a_slow_reader_takes_little_and_leaves_when_it_is_told() -> None:
    async with Engine(Script(event_bytes=1024)) as engine:
        over = time.monotonic() + 0.3
        pace = Pace(over=lambda: time.monotonic() > over, size=1000, period_s=0.05)
        stream = await asked(engine, Ask(tokens=5000, checked=True), pace=pace)
    assert stream.ended is Ended.LEFT
    assert 0 < stream.size <= 10 * 1000


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nx-sidecar-endpoint: a:1\r\nx-sidecar-version: v2\r\n\r\n"
FINISH = b'{"choices":[{"delta":{},"finish_reason":"stop"}]}'


def token(text: str) -> bytes:
    return b'{"choices":[{"delta":{"content":"%b"},"finish_reason":null}]}' % text.encode()


def body(*events: bytes, end: bytes = b"0\r\n\r\n", newline: bytes = b"\n") -> bytes:
    data = b"".join(b"data: " + event + newline * 2 for event in events)
    return HEAD + b"%x\r\n%b\r\n" % (len(data), data) + end


@pytest.mark.parametrize(
    ("sent", "ended"),
    [
        (body(token("t0 "), token("t1 "), FINISH, b"[DONE]"), Ended.WHOLE),
        (body(token("t0 "), token("t1 "), FINISH, b"[DONE]", newline=b"\r\n"), Ended.WHOLE),
        (body(token("t0 "), FINISH, b"[DONE]"), Ended.WRONG),
        (body(token("t0 "), token("t0 "), FINISH, b"[DONE]"), Ended.WRONG),
        (body(token("t1 "), token("t0 "), FINISH, b"[DONE]"), Ended.WRONG),
        (body(token("t0 "), token("t1 "), b"{}{", FINISH, b"[DONE]"), Ended.WRONG),
        (body(token("t0 "), token("t1 "), b"[DONE]"), Ended.SILENT),
        (body(token("t0 "), token("t1 "), FINISH), Ended.SILENT),
        (body(token("t0 "), b'{"error":{"message":"no"}}', b"[DONE]"), Ended.TOLD),
    ],
    ids=["whole", "crlf", "lost", "doubled", "swapped", "garbage", "no finish", "no marker", "error"],
)
@pytest.mark.parametrize("step", [1, 7, 100_000])
def test_what_was_sent_is_judged_alike_however_it_arrives(sent: bytes, ended: Ended, step: int) -> None:
    stream = Stream(0.0, gaps_s=[])
    answer = Answer(stream, Ask(tokens=2, checked=True))
    for at in range(0, len(sent), step):
        answer.feed(sent[at : at + step], 1.0 + at)
    assert answer.over
    assert (stream.ended, stream.endpoint, stream.version) == (ended, "a:1", "v2")
    assert answer.keep == (ended is Ended.WHOLE)


def test_a_real_engine_may_stop_earlier_and_say_what_it_likes() -> None:
    stream = Stream(0.0, gaps_s=[])
    answer = Answer(stream, Ask(tokens=9))
    answer.feed(body(token("Well"), FINISH, b"[DONE]"), 1.0)
    assert stream.ended is Ended.WHOLE


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://10.0.0.7:9400", Target("10.0.0.7", 9400)),
        ("https://llm.internal/v1/", Target("llm.internal", 443, "", tls=True)),
        ("http://[::1]:80/models/a", Target("::1", 80, "/models/a")),
    ],
)
def test_urls(url: str, target: Target) -> None:
    assert Target.of(url) == target


@pytest.mark.parametrize("url", ["10.0.0.7:9400", "ftp://a", "http://"])
def test_what_is_no_url_is_told(url: str) -> None:
    with pytest.raises(ValueError, match="is no URL such as"):
        Target.of(url)


def test_locust_is_told_of_a_stream_its_first_token_and_its_longest_gap() -> None:
    fired: list[dict[str, Any]] = []
    report(
        lambda **event: fired.append(event),
        Stream(0.0, Ended.TOLD, total_s=2.0, ttft_s=0.1, gaps_s=[0.2, 0.5], size=9),
        "chat",
    )
    assert [(event["request_type"], event["response_time"], event["exception"] is None) for event in fired] == [
        ("stream", 2000.0, False),
        ("first token", 100.0, True),
        ("longest gap", 500.0, True),
    ]
