"""A span of the log comes out as lines in order of time, each of which reads back as what it was."""

import json
from pathlib import Path

import pytest
from hypothesis import given

from sidecar.core.breaker import Scope
from sidecar.core.detection import Counts
from sidecar.kernel.ids import EndpointKey
from sidecar.kernel.outcome import Ending, Result
from sidecar.txlog.codec import Code, Kind, Record, decode, encode_body, register_key, route_key
from sidecar.txlog.local import LocalStore
from sidecar.txlog.recording import (
    LINES,
    PAGE,
    BadLine,
    End,
    Line,
    Moved,
    Recorder,
    Seen,
    Skipped,
    Span,
    moved_of,
    read,
    seen_of,
    summary_of,
    write,
)
from sidecar.txlog.server import RedisStore
from sidecar.txlog.store import Propose, Reply, Share, Verdict
from sidecar.txlog.summary import EndpointSummary, Summary, encode
from tests.servers import valkey
from tests.txlog.test_summary import summaries, summary

BEGIN_MS = 1_764_470_000_000


class Log:
    """A log whose clock stands where it is put."""

    def __init__(self) -> None:
        self.ms = BEGIN_MS
        self.store = LocalStore(lambda: 1000 * self.ms)
        self.breaths = 0
        self.count = 0

    def share(self, at_s: float, service: str = "chat", seq: int = 1, blob: bytes | None = None) -> None:
        self.ms = BEGIN_MS + round(1000 * at_s)
        told = Summary("pod-a", seq, service, 1000, (EndpointSummary(EndpointKey("h:1"), "v1"),))
        self.store.do(Share(service=service, blob=encode(told) if blob is None else blob, keep_ms=3_600_000))

    def propose(self, at_s: float, key: str, state: Code, reply: Reply | None = None, **changes: object) -> Reply:
        self.ms = BEGIN_MS + round(1000 * at_s)
        self.count += 1
        register = None if reply is None else decode(reply.record)
        service = key.partition(":")[2].partition("/")[0]
        members = {
            "key": key,
            "service": service,
            "kind": Kind.TRANSITION,
            "state": state,
            "epoch": 0 if register is None else register.epoch,
            "version": 0 if register is None else register.version,
            "tx": self.count.to_bytes(16, "big"),
            "body": encode_body(key, service, "pod-a", "fast", "words"),
            "by": "pod-a",
        }
        answer = self.store.do(Propose(**members | changes))  # type: ignore[arg-type]
        assert answer.verdict is Verdict.OK, answer
        return answer

    async def breathe(self) -> None:
        self.breaths += 1

    async def read(self, since_s: float = 0.0, until_s: float = 3600.0, service: str = "") -> list[Line]:
        recorder = Recorder(
            self.store.history,
            BEGIN_MS + round(1000 * since_s),
            BEGIN_MS + round(1000 * until_s),
            service,
            self.breathe,
        )
        lines: list[Line] = []
        while some := await recorder.next():
            assert len(some) <= LINES + 100
            lines += [read(line) for line in some]
        assert await recorder.next() == []
        first, last = lines[0], lines[-1]
        assert isinstance(first, Span) and isinstance(last, End)
        assert last.lines == len(lines) - 1
        return lines[1:-1]


NODE = register_key(Scope.NODE, "chat", "h:1")


async def test_what_was_seen_and_what_moved_comes_in_order_of_time() -> None:
    log = Log()
    for second in range(1, 6):
        log.share(second, seq=second)
        log.share(second + 0.2, service="small", seq=second)
    opened = log.propose(10, NODE, Code.OPEN)
    log.propose(12, register_key(Scope.SESSION, "chat", "user-1"), Code.OPEN)
    log.propose(14, NODE, Code.CLOSED, opened, kind=Kind.OVERRIDE, order=True)
    lines = await log.read()
    times = [line.at_ms - BEGIN_MS for line in lines if isinstance(line, Seen | Moved)]
    assert times == sorted(times)
    assert len(times) == len(lines) == 13
    moved = [line for line in lines if isinstance(line, Moved)]
    assert [(line.scope, line.name, line.kind, line.state) for line in moved] == [
        ("node", "h:1", "transition", "open"),
        ("session", "user-1", "transition", "open"),
        ("node", "h:1", "override", "closed"),
    ]
    assert (moved[0].why, moved[0].evidence, moved[0].by, moved[0].before) == ("fast", "words", "pod-a", False)


async def test_a_service_alone_and_a_span_alone() -> None:
    log = Log()
    for second in range(1, 11):
        log.share(second, seq=second)
        log.share(second, service="small", seq=second)
    lines = await log.read(3.0, 7.0, "small")
    assert [(line.service, line.seq) for line in lines if isinstance(line, Seen)] == [
        ("small", second) for second in range(3, 8)
    ]
    assert len(lines) == 5


async def test_what_a_breaker_was_before_the_span_comes_first_and_once() -> None:
    log = Log()
    opened = log.propose(1, NODE, Code.OPEN)
    closed = log.propose(2, NODE, Code.CLOSED, opened, kind=Kind.OVERRIDE, order=True)
    log.propose(3, NODE, Code.OPEN, closed)
    other = log.propose(4, register_key(Scope.NODE, "chat", "h:2"), Code.OPEN)
    log.share(10)
    log.propose(11, register_key(Scope.NODE, "chat", "h:2"), Code.CLOSED, other, kind=Kind.OVERRIDE, order=True)
    lines = await log.read(5.0)
    assert [type(line).__name__ for line in lines] == ["Moved", "Moved", "Seen", "Moved"]
    before = [line for line in lines if isinstance(line, Moved) and line.before]
    assert [(line.name, line.state, line.at_ms - BEGIN_MS) for line in before] == [
        ("h:1", "open", 3000),
        ("h:2", "open", 4000),
    ]
    assert [line for line in await log.read(20.0) if isinstance(line, Moved) and not line.before] == []


async def test_what_cannot_be_read_is_named_and_what_moves_nothing_is_left_out() -> None:
    log = Log()
    log.share(1, blob=b"\x09 of a later release")
    log.share(2, blob=b"")
    log.propose(3, route_key("chat"), Code.CLOSED, kind=Kind.ROUTE)
    log.propose(4, NODE, Code.OPEN)
    lines = await log.read()
    skipped = [line for line in lines if isinstance(line, Skipped)]
    assert [line.why for line in skipped] == ["schema 9 of a summary is not known here", "an empty summary"]
    assert all(line.id.startswith(str(line.at_ms)) for line in skipped)
    assert len(lines) == 3


async def test_many_pages_are_merged_and_the_loop_may_go_on_between_them() -> None:
    log = Log()
    count = 3 * PAGE + 7
    for number in range(count):
        log.share(number / 10, seq=number)
        log.share(number / 10 + 0.05, service="small", seq=number)
    lines = await log.read()
    times = [line.at_ms for line in lines if isinstance(line, Seen)]
    assert times == sorted(times)
    assert len(times) == 2 * count
    assert log.breaths >= 8


async def test_an_empty_log_is_a_span_and_its_end() -> None:
    assert await Log().read() == []


@given(summaries)
def test_a_summary_reads_back_from_its_line(told: Summary) -> None:
    line = read(write(seen_of(told, 5)))
    assert isinstance(line, Seen)
    assert summary_of(line) == told


def test_a_line_is_for_people() -> None:
    page = json.loads(write(seen_of(summary(), BEGIN_MS)))
    assert page["is"] == "seen"
    assert page["endpoints"][0]["ended"] == {"complete": 40, "server_error": 2}
    assert page["endpoints"][0]["evidence"] == {
        "good": 40,
        "errors": 2,
        "slow": 1,
        "location": -3.5,
        "timed": 41,
        "left": 0.125,
    }


def test_an_outcome_that_is_not_the_doctrines_says_so() -> None:
    ended = {(Ending.LATE, Result.FAILURE): 1, (Ending.LATE, Result.IGNORED): 2, (None, Result.SUCCESS): 3}
    told = Summary("a", 1, "chat", 1, (EndpointSummary(EndpointKey("h:1"), "v1", ended),))
    line = seen_of(told, 1)
    assert line.endpoints[0].ended == {"late/failure": 1, "late": 2, "other/success": 3}
    assert summary_of(line) == told


def test_words_of_a_later_release_count_for_nobody() -> None:
    text = (
        b'{"is":"seen","at_ms":1,"observer":"a","seq":1,"service":"chat","took_ms":1,"more":1,"endpoints":'
        b'[{"endpoint":"h:1","version":"v1","ended":{"melted":3,"late/boiled":2},"copies":{"boiled":1}}]}'
    )
    line = read(text)
    assert isinstance(line, Seen)
    (each,) = summary_of(line).endpoints
    assert each.ended == {(None, Result.IGNORED): 3, (Ending.LATE, Result.IGNORED): 2}
    assert each.copies == {}
    assert each.counts is None


@pytest.mark.parametrize(
    "text",
    [b"", b"\n", b"hello", b"[]", b"{}", b'{"is":"else"}', b'{"is":"seen"}', b'{"is":"end","lines":"x"}', b"\xff"],
)
def test_any_other_line_is_refused(text: bytes) -> None:
    with pytest.raises(BadLine):
        read(text)


def test_counts_keep_their_endpoint() -> None:
    line = seen_of(summary(), 1)
    (each,) = summary_of(line).endpoints
    assert each.counts == Counts(EndpointKey("10.0.0.1:8000"), 40, 2, 1, -3.5, 41, 0.125)


def test_a_key_that_is_none_moves_nothing() -> None:
    record = Record(Kind.TRANSITION, Code.OPEN, 1, 1, bytes(16), "nonsense", "chat", "pod-a")
    assert moved_of(record, 1) is None


async def test_a_real_servers_log_is_recorded_alike(tmp_path: Path) -> None:
    async with valkey(tmp_path) as server:
        store = RedisStore(server.url, "dtl")
        await store.open()
        try:
            for number in range(PAGE + 50):
                for service in ("chat", "small"):
                    blob = encode(Summary("pod-a", number, service, 1000))
                    (reply,) = await store.call([Share(service=service, blob=blob, keep_ms=3_600_000)])
            now_ms = reply.now_us // 1000
            lines: list[Line] = []
            recorder = Recorder(store.history, now_ms - 60_000, now_ms, "", Log().breathe)
            while some := await recorder.next():
                lines += [read(line) for line in some]
        finally:
            await store.close()
    seen = [line for line in lines if isinstance(line, Seen)]
    assert [line.at_ms for line in seen] == sorted(line.at_ms for line in seen)
    for service in ("chat", "small"):
        assert [line.seq for line in seen if line.service == service] == list(range(PAGE + 50))
    assert lines[-1] == End(len(seen) + 1)
