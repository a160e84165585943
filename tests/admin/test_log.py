"""The pages of the log over real sockets: what was, what comes, and readers that are slow, many or gone."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from urllib.parse import quote

import aiohttp
import pytest
from yarl import URL

from sidecar.admin import log as pages
from sidecar.admin.app import STOP_S, serve_admin
from sidecar.admin.facts import LogRecord
from sidecar.admin.log import Asked, parse
from tests.admin.facts import A, B, FakeLog, StillFacts, log_record, service, snapshot
from tests.harness import awake

WALL = 1_700_000_000.0


class Door:
    """An admin server over a log, and a client of it."""

    def __init__(self, facts: StillFacts, log: FakeLog, port: int, client: aiohttp.ClientSession) -> None:
        self.facts = facts
        self.log = log
        self.port = port
        self.client = client

    def url(self, path: str) -> URL:
        return URL(f"http://127.0.0.1:{self.port}{path}", encoded=True)

    async def ask(self, path: str, method: str = "GET") -> tuple[int, str]:
        async with self.client.request(method, self.url(path)) as response:
            return response.status, await response.text()

    async def ids(self, path: str) -> list[str]:
        """The ids of an NDJSON answer, or of a JSON array."""
        status, text = await self.ask(path)
        assert status == 200
        lines = json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.splitlines()]
        return [line["id"] for line in lines]

    @contextlib.asynccontextmanager
    async def follow(self, query: str = "") -> AsyncIterator[aiohttp.StreamReader]:
        async with self.client.get(self.url(f"/log?follow=1{query}")) as response:
            assert response.status == 200
            assert response.content_type == "application/x-ndjson"
            yield response.content


@contextlib.asynccontextmanager
async def door(*records: LogRecord, most: int = 1000) -> AsyncIterator[Door]:
    facts, log = StillFacts(snapshot(service(A, B), service(A, name="other"))), FakeLog(records, most)
    facts.log = log
    async with asyncio.timeout(20), serve_admin(facts, "127.0.0.1", 0) as port, aiohttp.ClientSession() as client:
        yield Door(facts, log, port, client)


async def until(log: FakeLog, followers: int) -> None:
    while len(log.subscribed) != followers:
        await asyncio.sleep(0.005)


async def past(lines: aiohttp.StreamReader) -> list[str]:
    """The ids up to the blank line."""
    ids = []
    while (line := await lines.readline()) != b"\n":
        ids.append(json.loads(line)["id"])
    return ids


async def test_record_is_a_line_of_json() -> None:
    async with door(log_record(7, kind="override", held=True, expires_us=1_700_000_600_000_000)) as admin:
        status, text = await admin.ask("/log")
        assert status == 200
        assert text.endswith("}\n")
        assert json.loads(text) == {
            "id": "0-7",
            "ts": "2023-11-14T22:13:27.000Z",
            "key": f"node:chat/{A}",
            "scope": "node",
            "service": "chat",
            "name": A,
            "kind": "override",
            "state": "open",
            "epoch": 1_700_000_000,
            "version": 7,
            "why": "consecutive",
            "evidence": "5 failures in a row, the last: reset",
            "by": "pod-0",
            "tx": "0" * 31 + "7",
            "trace": "0" * 31 + "7",
            "held": True,
            "expires": "2023-11-14T22:23:20.000Z",
            "wait_s": 10.0,
        }


async def test_order_without_end_expires_never() -> None:
    async with door(log_record(1)) as admin:
        assert json.loads((await admin.ask("/log"))[1])["expires"] == ""


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ("", ["0-1", "0-2", "0-3", "0-4"]),
        ("?limit=2", ["0-3", "0-4"]),
        ("?limit=0", []),
        ("?since=98s", ["0-2", "0-3", "0-4"]),
        ("?since=98s&limit=1", ["0-4"]),
        (f"?key={quote(f'node:chat/{A}', safe='')}", ["0-1", "0-3"]),
        (f"?key={quote(A, safe='')}", ["0-1", "0-3"]),
        (f"?key=*:{A.split(':')[1]}", ["0-1", "0-3"]),
        ("?key=node:*1&limit=1", ["0-2"]),
        ("?key=session:*", ["0-4"]),
        ("?key=none", []),
        ("?follow=0", ["0-1", "0-2", "0-3", "0-4"]),
    ],
)
async def test_what_was_can_be_narrowed(query: str, ids: list[str]) -> None:
    session = log_record(4, "a[b", key="session:chat/a[b", scope="session")
    async with door(log_record(1), log_record(2, B), log_record(3), session) as admin:
        admin.facts.monotonic_s = 1100.0
        assert await admin.ids(f"/log{query}") == ids


async def test_name_with_brackets_means_itself() -> None:
    six = "[::1]:8000"
    asked = Asked(False, None, six, 10)
    assert asked.wants(log_record(1, six))
    assert not asked.wants(log_record(1))


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("since=10", "since: .* is not a duration"),
        ("since=", "since: "),
        ("limit=-1", "limit is a number from 0 to 10000"),
        ("limit=10001", "limit is"),
        ("limit=x", "limit is"),
        ("limit=", "limit is"),
        ("limit=%D9%A3", "limit is"),
        ("follow=yes", "follow is 1 or 0"),
        ("from=1", '"from" is no parameter here'),
        (f"key={'x' * 513}", "key: a pattern has at most 512"),
    ],
)
async def test_parameter_that_means_nothing_is_400_in_words(query: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse(URL(f"/?{query}", encoded=True).query, WALL)
    async with door() as admin:
        status, text = await admin.ask(f"/log?{query}")
        assert (status, json.loads(text)["error"]["code"]) == (400, "bad_request")


async def test_history_of_one_register() -> None:
    async with door(log_record(1), log_record(2, B), log_record(3)) as admin:
        key = quote(f"node:chat/{A}", safe="")
        for path in (f"/log/{key}", f"/log/node:chat/{A}"):
            assert await admin.ids(path) == ["0-1", "0-3"]
        assert await admin.ids(f"/log/{key}?limit=1") == ["0-3"]
        admin.facts.monotonic_s = 1100.0
        assert await admin.ids(f"/log/{key}?since=98s") == ["0-3"]


async def test_breaker_is_named_as_on_its_page_and_found_in_every_service() -> None:
    other = log_record(2, key=f"node:other/{A}", service="other")
    session = log_record(4, "a/b", key="session:other/a/b", scope="session")
    async with door(log_record(1), other, log_record(3), session) as admin:
        assert await admin.ids(f"/log/node/{A}") == ["0-1", "0-2", "0-3"]
        assert await admin.ids(f"/log/node/{A}?limit=2") == ["0-2", "0-3"]
        assert await admin.ids("/log/session/a%2Fb") == ["0-4"]


async def test_a_routing_table_is_named_by_its_service() -> None:
    moved = log_record(1, key="route:chat/", scope="route", name="", kind="route")
    async with door(moved) as admin:
        for path in ("/log/route/chat", "/log/route/chat/", "/log/route:chat/"):
            assert await admin.ids(path) == ["0-1"], path


@pytest.mark.parametrize(
    "path", ["/log/nothing", "/log/node:chat/10.9.9.9:1", "/log/node/10.9.9.9:1", "/log/session/x", "/log/route/"]
)
async def test_what_the_log_has_nothing_about_is_404(path: str) -> None:
    async with door(log_record(1)) as admin:
        status, text = await admin.ask(path)
        assert (status, json.loads(text)["error"]["code"]) == (404, "unknown_key")


@pytest.mark.parametrize("path", ["/log", "/log?follow=1", f"/log/node:chat/{A}", f"/log/node/{A}"])
async def test_log_that_is_away_or_not_kept_says_so(path: str) -> None:
    async with door(log_record(1)) as admin:
        admin.log.away = "connection refused"
        status, text = await admin.ask(path)
        assert (status, json.loads(text)["error"]["message"]) == (503, "the log is away: connection refused")
        assert admin.log.subscribed == []
        admin.facts.log = None
        status, text = await admin.ask(path)
        assert (status, json.loads(text)["error"]["code"]) == (404, "no_log")


@pytest.mark.parametrize("path", ["/log", "/log?follow=1", "/log/x"])
@pytest.mark.parametrize("method", ["HEAD", "POST"])
async def test_log_is_only_read(path: str, method: str) -> None:
    async with door() as admin:
        assert (await admin.ask(path, method))[0] == 405


async def test_follower_is_told_what_was_and_then_what_comes() -> None:
    async with door(log_record(1), log_record(2)) as admin, admin.follow("&limit=1") as lines:
        assert await past(lines) == ["0-2"]
        for n in (3, 4):
            admin.log.tell(log_record(n))
            assert json.loads(await lines.readline())["id"] == f"0-{n}"


async def test_follower_of_a_pattern_is_told_no_other() -> None:
    async with door() as admin, admin.follow(f"&key={B}") as lines:
        assert await past(lines) == []
        admin.log.tell(log_record(1))
        admin.log.tell(log_record(2, B))
        assert json.loads(await lines.readline())["id"] == "0-2"


async def test_record_between_subscription_and_history_is_told_once() -> None:
    class Busy(FakeLog):
        async def history(self, key: str | None, since_us: int | None, limit: int) -> list[LogRecord]:
            self.tell(log_record(2))
            return await super().history(key, since_us, limit)

    async with door() as admin:
        admin.facts.log = admin.log = Busy([log_record(1)])
        async with admin.follow() as lines:
            assert await past(lines) == ["0-1", "0-2"]
            admin.log.tell(log_record(3))
            assert json.loads(await lines.readline())["id"] == "0-3"


async def test_long_history_comes_whole_and_in_order() -> None:
    count = 3 * pages.SLICE + 1
    async with door(*(log_record(n) for n in range(count))) as admin, admin.follow() as lines:
        assert await past(lines) == [f"0-{n}" for n in range(count)]


async def test_silence_is_broken_by_blank_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "GLANCE_S", 0.01)
    monkeypatch.setattr(pages, "HEARTBEAT_S", 0.02)
    async with door() as admin, admin.follow() as lines:
        assert [await lines.readline() for _ in range(3)] == [b"\n"] * 3


async def test_what_is_not_wanted_breaks_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PAUSE_S", 0.001)
    monkeypatch.setattr(pages, "HEARTBEAT_S", 0.02)
    async with door() as admin, admin.follow("&key=none") as lines:
        assert await past(lines) == []
        beat = asyncio.ensure_future(lines.readline())
        while not beat.done():
            admin.log.tell(log_record(1))
            await asyncio.sleep(0.001)
        assert beat.result() == b"\n"


async def test_slow_reader_is_told_how_much_he_lost() -> None:
    async with door(most=2) as admin, admin.follow() as lines:
        assert await past(lines) == []
        for n in range(5):
            admin.log.tell(log_record(n))
        assert json.loads(await lines.readline()) == {"lost": 3}
        assert [json.loads(await lines.readline())["id"] for _ in range(2)] == ["0-3", "0-4"]
        admin.log.tell(log_record(5))
        assert json.loads(await lines.readline())["id"] == "0-5"


@contextlib.asynccontextmanager
async def raw(port: int, log: FakeLog) -> AsyncIterator[asyncio.StreamReader]:
    """A follower's connection, once he follows."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /log?follow=1 HTTP/1.1\r\nhost: x\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    await until(log, 1)
    yield reader
    writer.close()


async def stall(log: FakeLog) -> None:
    """Tells so much that nothing more fits on the way to one who does not read, or until he is cut off."""
    (subscription,) = log.subscribed
    long = log_record(1, evidence="x" * 100_000)
    while subscription.lost < 10 and log.subscribed:
        log.tell(long)
        await asyncio.sleep(0.002)


async def test_reader_that_takes_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "STALLED_S", 0.1)
    monkeypatch.setattr(pages, "PAUSE_S", 0.0)
    async with door(most=3) as admin, raw(admin.port, admin.log):
        await stall(admin.log)
        await until(admin.log, 0)


async def test_follower_that_leaves_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "GLANCE_S", 0.01)
    async with door() as admin:
        async with admin.follow() as lines:
            assert await past(lines) == []
            assert len(admin.log.subscribed) == 1
        await until(admin.log, 0)


async def test_no_more_read_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "READERS", 2)
    monkeypatch.setattr(pages, "GLANCE_S", 0.01)
    async with door(log_record(1)) as admin:
        async with admin.follow() as one, admin.follow() as two:
            assert await past(one) == await past(two) == ["0-1"]
            for path in ("/log?follow=1", "/log", f"/log/node/{A}"):
                status, text = await admin.ask(path)
                assert (status, json.loads(text)["error"]["code"]) == (503, "too_many_readers")
        await until(admin.log, 0)
        assert (await admin.ask("/log"))[0] == 200


@pytest.mark.parametrize("reads", [True, False], ids=["reading", "stalled"])
async def test_stop_waits_for_no_follower(reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PAUSE_S", 0.0)
    facts, log = StillFacts(snapshot(service(A))), FakeLog(most=3)
    facts.log = log
    async with asyncio.timeout(20), contextlib.AsyncExitStack() as stack:
        port = await stack.enter_async_context(serve_admin(facts, "127.0.0.1", 0))
        async with raw(port, log) as reader:
            if not reads:
                await stall(log)
            async with awake() as ran:
                await stack.aclose()
                took_s = ran()
            assert log.subscribed == []
            if reads:
                assert (await reader.read()).endswith(b"\r\n0\r\n\r\n")
                assert took_s < STOP_S / 2
            else:
                assert took_s < 2 * STOP_S
