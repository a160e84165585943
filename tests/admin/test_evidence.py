"""The page of a span of the log over real sockets: all of it, or an answer that does not look whole."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp
import pytest

from sidecar.admin import evidence
from sidecar.admin.app import serve_admin
from sidecar.admin.evidence import Asked, parse
from tests.admin.facts import A, FakeLog, FakeRecording, StillFacts, service, snapshot

WALL = 1_700_000_000.0


@contextlib.asynccontextmanager
async def door(log: FakeLog | None) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    facts = StillFacts(snapshot(service(A)))
    facts.log = log
    async with asyncio.timeout(20), serve_admin(facts, "127.0.0.1", 0) as port, aiohttp.ClientSession() as client:
        yield client, f"http://127.0.0.1:{port}/log/evidence"


async def ask(client: aiohttp.ClientSession, url: str) -> tuple[int, str]:
    async with client.get(url) as response:
        return response.status, await response.text()


async def test_pages_come_as_one_answer() -> None:
    log = FakeLog()
    log.pages = [[b"one\n", b"two\n"], [b"three\n"]]
    async with door(log) as (client, url), client.get(f"{url}?since=2h&until=30m&service=chat") as response:
        assert response.status == 200
        assert response.content_type == "application/x-ndjson"
        assert await response.read() == b"one\ntwo\nthree\n"
    begin, end = (int((WALL - ago) * 1e6) for ago in (7200, 1800))
    assert log.asked == [(begin, end, "chat")]


async def test_without_a_log_there_is_none() -> None:
    async with door(None) as (client, url):
        status, text = await ask(client, url)
    assert status == 404
    assert "keeps no log" in text


async def test_a_log_that_is_away_says_so() -> None:
    log = FakeLog()
    log.away = "timeout"
    async with door(log) as (client, url):
        status, text = await ask(client, url)
    assert status == 503
    assert "the log is away: timeout" in text


async def test_what_breaks_off_does_not_look_whole() -> None:
    log = FakeLog()
    log.pages, log.away = [[b"one\n"]], "gone"
    async with door(log) as (client, url), client.get(url) as response:
        with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ClientConnectionError)):
            await response.read()


async def test_only_few_may_read_at_once() -> None:
    class Slow(FakeRecording):
        async def next(self) -> list[bytes]:
            await go_on.wait()
            return await super().next()

    class SlowLog(FakeLog):
        def record(self, since_us: int, until_us: int, service: str) -> FakeRecording:
            self.asked.append((since_us, until_us, service))
            return Slow([[b"one\n"]], "")

    go_on = asyncio.Event()
    log = SlowLog()
    async with door(log) as (client, url), asyncio.TaskGroup() as tasks:
        reading = [tasks.create_task(ask(client, url)) for _ in range(evidence.READERS)]
        while len(log.asked) < evidence.READERS:
            await asyncio.sleep(0.005)
        status, text = await ask(client, url)
        assert (status, "read the evidence already" in text) == (503, True)
        go_on.set()
        assert [await each for each in reading] == [(200, "one\n")] * evidence.READERS
        assert await ask(client, url) == (200, "one\n")


async def test_who_takes_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "STALLED_S", 0.1)
    log = FakeLog()
    log.pages = [[b"x" * 65_536 + b"\n"]] * 400
    async with door(log) as (client, url):
        async with client.get(url):
            await asyncio.sleep(1.0)
        # The place is free again, whoever read.
        log.pages = [[b"one\n"]]
        assert await ask(client, url) == (200, "one\n")


@pytest.mark.parametrize(
    ("query", "asked"),
    [
        pytest.param({}, Asked(int((WALL - 3600) * 1e6), int(WALL * 1e6), ""), id="the last hour"),
        pytest.param(
            {"since": "90m", "until": "30s", "service": "chat"},
            Asked(int((WALL - 5400) * 1e6), int((WALL - 30) * 1e6), "chat"),
            id="all said",
        ),
    ],
)
def test_what_is_asked(query: dict[str, str], asked: Asked) -> None:
    assert parse(query, WALL) == asked


@pytest.mark.parametrize(
    ("query", "words"),
    [
        pytest.param({"key": "x"}, '"key" is no parameter here', id="unknown"),
        pytest.param({"since": "soon"}, "since: ", id="no time"),
        pytest.param({"since": "31d"}, "since: ", id="too long"),
        pytest.param({"until": "1h"}, "would be empty", id="empty"),
        pytest.param({"service": "s" * 64}, "at most 63", id="long name"),
    ],
)
async def test_what_means_nothing_is_refused_in_words(query: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse(query, WALL)
    async with door(FakeLog()) as (client, url), client.get(url, params=query) as response:
        assert response.status == 400
