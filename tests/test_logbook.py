"""The log of a process: which server it has, what it says, and what operators see of it."""

import asyncio
import contextlib
import json
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sidecar.admin.facts import LogAway, LogRecord
from sidecar.core.breaker import Scope, State, Transition
from sidecar.core.fleet import Fleet
from sidecar.kernel.ids import EndpointKey
from sidecar.logbook import Logbook
from sidecar.policy.schema import Snapshot
from sidecar.telemetry.logs import Logs
from sidecar.telemetry.metrics import Metrics
from sidecar.telemetry.tally import Tally
from sidecar.telemetry.writer import LineWriter
from sidecar.txlog.replica import Replica
from sidecar.txlog.store import Entry
from tests.harness import awake
from tests.servers import blackhole, refused, valkey
from tests.txlog.sidecars import policy_of

NODE = "node:chat/h1:80"
FOREVER = float("inf")


class Book:
    """A logbook, and the lines that it wrote."""

    def __init__(self, logbook: Logbook, fleet: Fleet, told: list[Transition], lines: Path) -> None:
        self.logbook = logbook
        self.fleet = fleet
        self.told = told
        self._lines = lines

    async def events(self, *names: str) -> list[dict[str, object]]:
        """Written by a thread that gathers for a twentieth of a second."""
        await asyncio.sleep(0.1)
        lines = [json.loads(line) for line in self._lines.read_text().splitlines()]
        return [line for line in lines if line["event"] in names]

    def order(self, action: str = "open", for_s: float = FOREVER) -> None:
        now = asyncio.get_running_loop().time()
        self.fleet.override(Scope.NODE, "h1:80", action, now, "op", for_s)  # type: ignore[arg-type]
        self.logbook.order(Scope.NODE, "h1:80", action, "op", for_s)  # type: ignore[arg-type]

    async def records(self, count: int) -> list[LogRecord]:
        async with asyncio.timeout(5):
            while len(found := await self.logbook.history(None, None, 100)) < count:
                await asyncio.sleep(0.002)
        return found


@contextlib.asynccontextmanager
async def kept(redis: str, directory: Path, observer: str = "pod-1") -> AsyncIterator[Book]:
    loop = asyncio.get_running_loop()
    lines = directory / f"{observer}.log"
    fd = os.open(lines, os.O_WRONLY | os.O_CREAT)
    logs = Logs(LineWriter(fd), loop.time)
    told: list[Transition] = []
    replica = Replica(
        observer, clock=loop.time, chance=random.random, new_tx=lambda: random.randbytes(16), tell=told.append
    )
    replica.fleet = fleet = Fleet(random.random, agreement=replica)
    fleet.apply(Snapshot(version=1, services=(policy_of(3),)), loop.time())
    logbook = Logbook(
        replica,
        Tally(Metrics()),
        logs,
        clock=loop.time,
        wall=lambda: 1_700_000_000.0 + loop.time(),
        chance=random.random,
        tell=told.append,
    )
    failure: BaseException | None = None
    try:
        with logs:
            async with asyncio.TaskGroup() as tasks:
                try:
                    async with logbook.kept(redis, "dtl", directory / "data", tasks):
                        yield Book(logbook, fleet, told, lines)
                except BaseException as exc:  # noqa: BLE001 - raised again below, as it was
                    failure = exc
    finally:
        os.close(fd)
    if failure is not None:
        raise failure


async def test_without_a_server_it_is_kept_here_and_nothing_is_said_of_it(tmp_path: Path) -> None:
    async with kept("local", tmp_path) as book:
        view = book.logbook.view()
        assert (view.state, view.members, view.ring, view.last_error, view.position) == ("local", 1, 0, "", "0-0")
        book.order()
        (record,) = await book.records(1)
        assert (record.key, record.scope, record.service, record.name) == (NODE, "node", "chat", "h1:80")
        assert (record.kind, record.state, record.held, record.version) == ("override", "open", True, 1)
        assert record.by == "op at pod-1" and len(record.tx) == 32 and record.expires_us == 0
        assert book.logbook.view().position.endswith("-0")
        assert await book.events("log_up", "log_away", "log_local") == []


async def test_with_a_server_it_is_up_and_two_see_the_same(tmp_path: Path) -> None:
    async with valkey(tmp_path / "s") as server, kept(server.url, tmp_path) as one:
        async with kept(server.url, tmp_path, "pod-2") as two:
            assert [book.logbook.view().state for book in (one, two)] == ["up", "up"]
            assert two.logbook.view().members == 2
            follower = two.logbook.subscribe()
            one.order(for_s=60.0)
            async with asyncio.timeout(5):
                (live,) = await follower.next()
            assert (live.by, live.held) == ("op at pod-1", True) and live.expires_us - live.ts_us == pytest.approx(
                6e7, abs=2e6
            )
            assert await two.records(1) == await one.records(1) == [live], "live and past are told apart by nothing"
            assert follower.lost == 0
            follower.close()
            node = two.fleet.services[next(iter(two.fleet.services))].nodes[EndpointKey("h1:80")]
            assert node.breaker.state is State.OPEN and [each.by for each in two.told] == ["op at pod-1"]
        (event,) = await one.events("log_up")
        assert event["members"] == 1


@pytest.mark.parametrize("kind", ["silent", "refused"])
async def test_a_server_that_is_away_holds_up_nobody_and_its_history_cannot_be_had(tmp_path: Path, kind: str) -> None:
    async with awake() as ran, blackhole() as hole, kept(hole if kind == "silent" else refused(), tmp_path) as book:
        assert ran() < 1.5
        view = book.logbook.view()
        assert view.state == "away" and view.last_error
        with pytest.raises(LogAway):
            await book.logbook.history(None, None, 10)
        with pytest.raises(ValueError, match="SCOPE"):
            await book.logbook.history("nonsense", None, 10)
        book.order()
        assert book.logbook.view().ring == 1
        assert len(await book.events("log_away")) == 1


async def test_its_own_server_that_cannot_be_had_is_one_line_and_a_log_in_this_process(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file is no directory")
    async with kept("embedded", tmp_path) as book:
        assert book.logbook.local and book.logbook.view().state == "local"
        (event,) = await book.events("log_local")
        assert "--data DIR" in str(event["error"]) and event["level"] == "warning"
        book.order()
        assert len(await book.records(1)) == 1


async def test_its_own_server_keeps_the_log(tmp_path: Path) -> None:
    async with kept("embedded", tmp_path) as book:
        assert book.logbook.view().state == "up"
        (started,) = await book.events("embedded_started")
        assert started["level"] == "info"
        book.order()
        first = await book.records(1)
    async with kept("embedded", tmp_path, "pod-2") as book:
        assert await book.logbook.history(NODE, None, 10) == first


async def test_summaries_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    async with kept("local", tmp_path) as book:
        for id_, data in (("1-0", b"\xff"), ("nonsense", b""), ("2-0", b"")):
            book.logbook.replica.on_evidence(Entry(0, True, id_, data))
        assert book.logbook.unreadable_summaries == 3 and book.told == []
        book.logbook.tick(book.fleet, asyncio.get_running_loop().time())
        assert book.logbook.replica.jobs(0.0) == [], "of nothing that was seen nothing is told"
