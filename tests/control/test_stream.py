"""One stream over callables: what a socket would blur stands still here."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from sidecar.control import stream as module
from sidecar.control.convert import Encoder
from sidecar.control.pb import control_pb2 as pb
from sidecar.control.stream import WISHES, Counts, Stream, Wish, wish_of
from sidecar.control.writers import Caller, Writers
from sidecar.core.table import Table, Version
from tests.control.client import Line, put
from tests.control.desk import FakeDesk
from tests.harness import LIMIT_S, awake, eventually


class Script:
    """A client's two directions: what it says is queued, what it is told is kept, and it may stop reading."""

    def __init__(self, desk: FakeDesk, caller: Caller = Caller("127.0.0.1")) -> None:  # noqa: B008 - frozen
        self.said: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.told: list[pb.DescriptorEvent] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.writing = 0
        self.answers: list[str] = []
        self.lines: list[Line] = []
        self.counts = Counts(self.answers.append)
        self.stream = Stream(
            desk,
            Writers("", None),
            caller,
            Encoder(),
            self.counts,
            lambda level, event, **fields: self.lines.append((level, event, fields)),
            read=self.said.get,
            write=self._write,
            breathe=lambda: asyncio.sleep(0),
        )

    async def _write(self, data: bytes) -> None:
        assert self.writing == 0, "two writes at once"
        self.writing += 1
        try:
            await self.reads.wait()
            self.told.append(pb.DescriptorEvent.FromString(data))
            await asyncio.sleep(0)
        finally:
            self.writing -= 1

    def say(self, update: pb.DescriptorUpdate | None) -> None:
        self.said.put_nowait(None if update is None else update.SerializeToString())

    def subscribe(self, *services: str, answers_only: bool = False) -> None:
        self.say(pb.DescriptorUpdate(subscribe=pb.Subscribe(services=services, answers_only=answers_only)))

    def kinds(self) -> list[str]:
        return [str(event.WhichOneof("event")) for event in self.told]

    async def hears(self, *kinds: str) -> None:
        await eventually(lambda: self.kinds() == list(kinds), f"{kinds}; it was told {self.told}")


@contextlib.asynccontextmanager
async def running(script: Script) -> AsyncIterator["asyncio.Task[bool]"]:
    """The stream, cancelled at the end, as gRPC does when its client is gone."""
    task = asyncio.create_task(script.stream.run())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert script.counts.streams == 0


async def ends(task: "asyncio.Task[bool]") -> bool:
    async with asyncio.timeout(LIMIT_S):
        return await task


async def test_a_first_wish_is_waited_for_and_heard() -> None:
    desk = FakeDesk()
    script = Script(desk)
    async with running(script):
        for _ in range(10):
            await asyncio.sleep(0)
        assert script.told == []
        script.subscribe("a")
        await script.hears("snapshot")
        assert len(desk.feeds) == 1


async def test_an_update_begins_when_the_snapshot_was_taken_and_its_change_is_an_event() -> None:
    script = Script(FakeDesk())
    async with running(script):
        script.say(put(1.0))
        await eventually(lambda: len(script.told) == 3, "all three")
        assert sorted(script.kinds()) == ["ack", "snapshot", "table"]
        (snapshot,) = [event.snapshot for event in script.told if event.HasField("snapshot")]
        assert snapshot.complete and not snapshot.tables


async def test_an_update_waits_for_a_client_that_does_not_read() -> None:
    desk = FakeDesk()
    script = Script(desk)
    async with running(script):
        script.reads.clear()
        script.say(put(1.0, update_id="a"))
        script.say(put(1.0, update_id="b"))
        await eventually(lambda: len(desk.submitted) == 1, "the first")
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(desk.submitted) == 1
        script.reads.set()
        await eventually(lambda: script.kinds().count("ack") == 2, "both answers")


async def test_a_change_of_mind_reaches_who_waits_for_news() -> None:
    desk = FakeDesk()
    script = Script(desk)
    async with running(script):
        script.subscribe("a")
        await script.hears("snapshot")
        script.subscribe(answers_only=True)
        await eventually(lambda: desk.feeds == [], "the feed's end")
        desk.put(Table("a"), "me", "update")
        script.subscribe("a")
        await script.hears("snapshot", "snapshot")
        assert [table.service_name for table in script.told[1].snapshot.tables] == ["a"]


@pytest.mark.parametrize("turns", range(4))
async def test_two_changes_of_mind_at_once(turns: int) -> None:
    desk = FakeDesk()
    script = Script(desk)
    async with running(script) as task:
        script.subscribe("a")
        await script.hears("snapshot")
        script.subscribe("b")
        for _ in range(turns):
            await asyncio.sleep(0)
        script.subscribe("c")
        desk.put(Table("c"), "me", "update")
        await eventually(lambda: [each.service_name for each in script.told[-1].snapshot.tables] == ["c"], "the last")
        assert not task.done()


async def test_a_change_of_mind_ends_the_snapshot_under_way() -> None:
    desk = FakeDesk()
    big = (Version("v1", 10_000, signature={"a": "x" * 900_000}),)
    for number in range(8):
        desk.put(Table(f"s-{number}", big), "me", "update")
    script = Script(desk)
    async with running(script):
        script.reads.clear()
        script.subscribe()
        await eventually(lambda: script.writing == 1, "the first piece")
        script.subscribe("s-3")
        for _ in range(5):
            await asyncio.sleep(0)
        script.reads.set()
        await script.hears("snapshot", "snapshot")
        first, second = (event.snapshot for event in script.told)
        assert not first.complete and second.complete
        assert [table.service_name for table in second.tables] == ["s-3"]


async def test_what_falls_out_while_a_snapshot_is_told_is_told_anew() -> None:
    desk = FakeDesk(limit=2)
    script = Script(desk)
    async with running(script):
        script.reads.clear()
        script.subscribe()
        await eventually(lambda: script.writing == 1, "the snapshot")
        for _ in range(5):
            desk.put(Table("a"), "me", "update")
        script.reads.set()
        await script.hears("snapshot", "snapshot")
        assert [table.table_version for table in script.told[1].snapshot.tables] == [5]
        assert script.counts.lagged == 1
        desk.put(Table("a"), "me", "update")
        await script.hears("snapshot", "snapshot", "table")


async def test_what_a_snapshot_already_had_is_not_taken_back() -> None:
    desk = FakeDesk()
    for number in range(8):
        desk.put(Table(f"s-{number}", (Version("v1", 10_000, signature={"a": "x" * 900_000}),)), "me", "update")
    script = Script(desk)
    async with running(script):
        script.reads.clear()
        script.subscribe()
        await eventually(lambda: script.writing == 1, "the first piece")
        for weight in (1, 2):
            desk.put(Table("s-7", (Version("v1", weight),)), "me", "update")
        desk.put(Table("s-0"), "me", "update")
        script.reads.set()
        await eventually(lambda: script.kinds().count("table") == 2, "both events")
    snapshots = [event.snapshot for event in script.told if event.HasField("snapshot")]
    tables = [table for piece in snapshots for table in piece.tables]
    assert [table.table_version for table in tables] == [1] * 7 + [3]
    events = [event.table for event in script.told if event.HasField("table")]
    assert [(table.service_name, table.table_version) for table in events] == [("s-7", 3), ("s-0", 2)]


async def test_only_who_may_writes_and_the_log_says_so_once() -> None:
    script = Script(FakeDesk(), Caller("10.0.0.9"))
    async with running(script):
        for _ in range(3):
            script.say(put(1.0))
        script.say(pb.DescriptorUpdate())
        await eventually(lambda: script.kinds().count("nack") == 4, "all answers")
    assert script.answers == ["denied"] * 4
    assert [event for _, event, _ in script.lines] == ["control_denied"]


async def test_the_end_of_what_it_says_ends_only_who_wants_answers() -> None:
    for answers_only in (True, False):
        script = Script(FakeDesk())
        async with running(script) as task:
            script.subscribe(answers_only=answers_only)
            script.say(put(1.0))
            script.say(None)
            await eventually(lambda: "ack" in script.kinds(), "the answer")  # noqa: B023 - of this round
            if answers_only:
                assert await ends(task) is False
                assert script.kinds() == ["ack"]
            else:
                await eventually(lambda: "table" in script.kinds(), "the event")  # noqa: B023
                assert not task.done()


async def test_a_drain_ends_who_waits_at_once() -> None:
    script = Script(FakeDesk())
    async with running(script) as task:
        script.subscribe()
        await script.hears("snapshot")
        script.stream.drain()
        assert await ends(task) is True
        assert script.kinds() == ["snapshot", "notice"]
        assert script.told[-1].notice.kind == "draining"


async def test_a_drain_before_the_first_word_ends_it_too() -> None:
    script = Script(FakeDesk())
    script.stream.drain()
    async with running(script) as task:
        assert await ends(task) is True
        assert script.kinds() == ["notice"]


async def test_a_drain_answers_the_update_under_way_and_no_other() -> None:
    desk = FakeDesk()
    script = Script(desk)
    async with running(script) as task:
        desk.gate.clear()
        script.say(put(1.0, update_id="a"))
        script.say(put(1.0, update_id="b"))
        await eventually(lambda: len(desk.submitted) == 1, "the update")
        script.stream.drain()
        for _ in range(5):
            await asyncio.sleep(0)
        desk.gate.set()
        assert await ends(task) is True
        assert [event.ack.update_id for event in script.told if event.HasField("ack")] == ["a"]
        assert script.kinds()[-1] == "notice"
        assert len(desk.submitted) == 1


async def test_a_drain_waits_for_nobody_for_long() -> None:
    desk = FakeDesk()
    for stuck in ("log", "client"):
        script = Script(desk)
        async with running(script) as task:
            script.subscribe()
            await script.hears("snapshot")
            if stuck == "log":
                desk.gate.clear()
                script.say(put(1.0))
                await eventually(lambda: len(desk.submitted) == 1, "the update")
            else:
                script.reads.clear()
                desk.put(Table("a"), "me", "update")
                await eventually(lambda: script.writing == 1, "the event")  # noqa: B023 - of this round
            async with awake() as ran:
                script.stream.drain()
                assert await ends(task) is True
                assert ran() < module.ANSWER_S + module.LAST_S + 0.3
        desk.gate.set()


@pytest.mark.parametrize("turns", range(12))
async def test_wherever_it_is_cancelled_nothing_is_held(turns: int) -> None:
    desk = FakeDesk()
    script = Script(desk)
    async with running(script):
        script.say(put(1.0, update_id="a"))
        script.subscribe("chat")
        script.say(put(1.0, update_id="b"))
        for _ in range(turns):
            await asyncio.sleep(0)
    assert desk.feeds == [] and script.writing == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_a_wish_wants_its_services_and_what_is_about_none() -> None:
    assert Wish().wants("a") and Wish(frozenset({"a"})).wants("a") and Wish(frozenset({"b"})).wants("")
    assert not Wish(frozenset({"b"})).wants("a")


def test_who_names_too_many_services_hears_of_all() -> None:
    many = [f"s-{number}" for number in range(WISHES + 1)]
    assert wish_of(pb.Subscribe(services=many[1:])).wants("s-1")
    assert not wish_of(pb.Subscribe(services=many[1:])).wants("other")
    assert wish_of(pb.Subscribe(services=many, answers_only=True)) == Wish(answers_only=True)
