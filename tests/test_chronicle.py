"""`sidecar log`: against scripted answers, and against the real admin pages in processes of their own."""

import asyncio
import contextlib
import json
import os
import pty
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import IO, Any

import msgspec
import pytest

from sidecar import chronicle
from sidecar.admin import views
from sidecar.admin.app import serve_admin
from sidecar.cli import main
from tests.admin.facts import A, B, FakeLog, StillFacts, log_record, service, snapshot
from tests.processes import sidecar

CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def told(n: int, name: str = A, **changes: object) -> bytes:
    """A record as the page tells it."""
    return views.encode(views.record(log_record(n, name, **changes))) + b"\n"


class Scripted:
    """An admin port that says what it was given, whoever asks, and closes; without an end: it keeps silent."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.script = b""
        self.ends = True
        self.address = ""
        self.over = threading.Event()

    def says(self, *lines: bytes, end: bytes = b"0\r\n\r\n") -> None:
        self.script = CHUNKED + b"".join(chunk(line) for line in lines) + end

    def answers(self, body: bytes, status: int = 200) -> None:
        self.script = b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


@pytest.fixture
def admin() -> Iterator[Scripted]:
    scripted = Scripted()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            scripted.seen.append(self.rfile.readline().split()[1].decode())
            while self.rfile.readline() not in (b"\r\n", b""):
                pass
            self.wfile.write(scripted.script)
            if not scripted.ends:
                scripted.over.wait(20)

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    scripted.address = f"127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield scripted
    finally:
        scripted.over.set()
        server.shutdown()
        server.server_close()
        thread.join()


ESCAPED = r"pod-\x1b[2J"
Output = pytest.CaptureFixture[str]


def test_tail_is_a_table_with_what_was_concluded_underneath(admin: Scripted, capsys: Output) -> None:
    order: dict[str, Any] = {"kind": "override", "by": "ann", "why": "operator", "evidence": "hold by ann"}
    order |= {"held": True, "wait_s": 0.0}
    admin.says(
        told(1),
        told(2, B, **order, expires_us=1_700_000_600_000_000),
        told(3, **order, trace=""),
        told(4, kind="suspect", state="closed", by="pod-\x1b[2J"),
        told(5, kind="route", key="route:chat/", state="closed", why="", evidence="", wait_s=0.0),
    )
    assert main(["log", "tail", "--admin", admin.address]) == 0
    assert admin.seen == ["/log?limit=20"]
    shown = capsys.readouterr().out.splitlines()
    rows = [line for line in shown if line[0] != " "]
    assert [row.split() for row in rows] == [
        ["TIME", "KEY", "VERSION", "STATE", "BY", "WHY", "TRACE"],
        ["2023-11-14T22:13:21.000Z", f"node:chat/{A}", "1700000000.1", "open", "pod-0", "consecutive", f"{1:032x}"],
        ["2023-11-14T22:13:22.000Z", f"node:chat/{B}", "1700000000.2", "open", "ann", "operator", f"{2:032x}"],
        ["2023-11-14T22:13:23.000Z", f"node:chat/{A}", "1700000000.3", "open", "ann", "operator", "-"],
        ["2023-11-14T22:13:24.000Z", f"node:chat/{A}", "1700000000.4", "suspect", ESCAPED, "consecutive", f"{4:032x}"],
        ["2023-11-14T22:13:25.000Z", "route:chat/", "1700000000.5", "route", "pod-0", "-", f"{5:032x}"],
    ]
    assert {row.index("17" if row[0] == "2" else "VERSION") for row in rows} == {rows[0].index("VERSION")}
    assert [line for line in shown if line[0] == " "] == [
        "    evidence: 5 failures in a row, the last: reset",
        "    waits 10 s",
        "    evidence: hold by ann",
        "    held until 2023-11-14T22:23:20.000Z",
        "    evidence: hold by ann",
        "    held until the next order",
        "    evidence: 5 failures in a row, the last: reset",
        "    one sidecar's word, too little to open it for all: it stayed as it was",
    ]


def test_columns_of_what_comes_only_grow(admin: Scripted, capsys: Output) -> None:
    plain: dict[str, Any] = {"evidence": "", "wait_s": 0.0}
    admin.says(told(1, **plain), b"\n", told(2, "x" * 40, **plain), b"\n", told(3, **plain), b'{"lost":12}\n')
    assert main(["log", "tail", "--follow", "--admin", admin.address]) == 1
    assert admin.seen == ["/log?limit=20&follow=1"]
    captured = capsys.readouterr()
    head, one, two, three, lost, words = captured.out.splitlines()
    assert head.index("VERSION") == one.index(" 1700000000.1") + 1
    assert two.index("1700000000.2") == three.index("1700000000.3") > one.index("1700000000.1")
    assert lost.split() == ["-", "-", "-", "lost", "-", "-", "-"]
    assert words == "    12 records were not told: they came faster than they were taken"
    assert captured.err == f"sidecar: {admin.address}: the sidecar has gone\n"


@pytest.mark.parametrize("follow", [True, False])
def test_tail_s_json_is_a_line_each_as_the_sidecar_said(admin: Scripted, capsys: Output, follow: bool) -> None:
    border = [b"\n"] if follow else []
    admin.says(told(1), *border, b'{"lost":12}\n', *border, b'{"unknown":1}\n')
    flag = "--follow" if follow else "--no-follow"
    assert main(["log", "tail", "--json", flag, "--admin", admin.address]) == follow
    assert capsys.readouterr().out.encode() == told(1) + b'{"lost":12}\n{"unknown":1}\n'


def test_tail_asks_for_what_it_was_told_to(admin: Scripted) -> None:
    admin.says()
    flags = ["--key", "node:*/[::1]:8000 &", "--since", "10m", "-n", "5", "--follow"]
    main(["log", "tail", *flags, "--admin", admin.address])
    assert admin.seen == ["/log?limit=5&since=10m&key=node%3A%2A%2F%5B%3A%3A1%5D%3A8000+%26&follow=1"]


@pytest.mark.parametrize(
    ("words", "path"),
    [
        (["node", "127.0.0.1:8000"], "/log/node/127.0.0.1%3A8000"),
        (["node:chat/127.0.0.1:8000"], "/log/node%3Achat%2F127.0.0.1%3A8000"),
        (["request", "POST /v1/completions"], "/log/request/POST%20%2Fv1%2Fcompletions"),
        (["session", "--", "-x"], "/log/session/-x"),
    ],
)
def test_show_names_its_breaker_exactly(admin: Scripted, words: list[str], path: str) -> None:
    admin.answers(b"[]")
    assert main(["log", "show", "--admin", admin.address, "-n", "7", "--since", "2h", *words]) == 0
    assert admin.seen == [f"{path}?limit=7&since=2h"]


def test_show_is_a_table_or_the_sidecar_s_json(admin: Scripted, capsys: Output) -> None:
    admin.answers(b"[" + told(1) + b"," + told(2, service="other", state="half_open", wait_s=0.0) + b"]")
    assert main(["log", "show", "node", A, "--admin", admin.address]) == 0
    assert [line.split()[:6] for line in capsys.readouterr().out.splitlines() if line[0] != " "] == [
        ["TIME", "SERVICE", "VERSION", "STATE", "BY", "WHY"],
        ["2023-11-14T22:13:21.000Z", "chat", "1700000000.1", "open", "pod-0", "consecutive"],
        ["2023-11-14T22:13:22.000Z", "other", "1700000000.2", "half_open", "pod-0", "consecutive"],
    ]
    assert main(["log", "show", "node", A, "--json", "--admin", admin.address]) == 0
    assert [line["id"] for line in json.loads(capsys.readouterr().out)] == ["0-1", "0-2"]


REFUSAL = b'{"error":{"message":"the log is away: refused","code":"log_away"}}'


@pytest.mark.parametrize("verb", [["tail"], ["tail", "--follow"], ["show", "node", A]])
@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (503, REFUSAL, "refused with 503: the log is away: refused"),
        (404, b"<html>", "refused with 404"),
        (200, b"<html>\n", "not the admin port of a sidecar"),
        (200, b"<html>", "not the admin port of a sidecar"),
    ],
)
def test_a_refusal_is_told_in_its_words_and_fails(
    admin: Scripted, capsys: Output, verb: list[str], status: int, body: bytes, words: str
) -> None:
    admin.answers(body, status)
    assert main(["log", *verb, "--admin", admin.address]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"sidecar: {admin.address}: ")
    assert words in captured.err


@pytest.mark.parametrize("end", [b"", b"5\r\nab", b"0\r\n\r\n"], ids=["between records", "within one", "in good order"])
def test_a_sidecar_that_leaves_while_it_is_followed_is_a_failure_and_what_it_said_is_shown(
    admin: Scripted, capsys: Output, end: bytes
) -> None:
    admin.says(told(1), b"\n", told(2), end=end)
    assert main(["log", "tail", "--follow", "--admin", admin.address]) == 1
    captured = capsys.readouterr()
    assert captured.out.count("consecutive") == 2
    assert "the sidecar has gone" in captured.err


def test_a_sidecar_that_falls_silent_is_given_up_on(
    admin: Scripted, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chronicle, "SILENCE_S", 0.05)
    admin.says(told(1), b"\n", end=b"")
    admin.ends = False
    assert main(["log", "tail", "--follow", "--admin", admin.address]) == 1
    assert "nothing was heard for 0.05 s" in capsys.readouterr().err


def test_a_line_without_end_is_cut_off(admin: Scripted, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chronicle, "MAX_LINE_BYTES", 100)
    admin.says(b"x" * 101)
    assert main(["log", "tail", "--follow", "--admin", admin.address]) == 1
    assert "not the admin port of a sidecar" in capsys.readouterr().err


def test_what_is_shown_is_what_the_admin_pages_have() -> None:
    names = {field.encode_name for field in msgspec.structs.fields(views.LogLine)}
    asked = {field.encode_name for field in msgspec.structs.fields(chronicle.Record)}
    assert asked - {"lost"} <= names


@pytest.mark.parametrize("verb", [["tail"], ["tail", "--follow"], ["show", "node", A]])
def test_nobody_there_is_told_and_fails(capsys: Output, verb: list[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert main(["log", *verb, "--admin", f"127.0.0.1:{free.getsockname()[1]}"]) == 1
    assert "no sidecar answers: Connection refused" in capsys.readouterr().err


# With the real pages, in processes of their own.


@contextlib.contextmanager
def pages(facts: StillFacts) -> Iterator[tuple[str, Callable[[Callable[[], None]], object]]]:
    """The admin pages on a loop of their own: their address, and a way to do something there."""
    ready, stop = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []
    address: list[str] = []

    async def serve() -> None:
        async with serve_admin(facts, "127.0.0.1", 0) as port:
            loops.append(asyncio.get_running_loop())
            address.append(f"127.0.0.1:{port}")
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(10)
    try:
        yield address[0], loops[0].call_soon_threadsafe
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join()


@contextlib.contextmanager
def following(address: str, *flags: str, stdout: int = subprocess.PIPE) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "sidecar", "log", "tail", "--follow", "--admin", address, *flags]
    with subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def output_of(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


def test_records_are_shown_as_they_come_until_ctrl_c() -> None:
    facts, log = StillFacts(snapshot(service(A))), FakeLog([log_record(1)])
    facts.log = log
    with pages(facts) as (address, do), following(address) as process:
        output = output_of(process)
        assert output.readline().startswith("TIME")
        assert f"node:chat/{A}" in output.readline()
        assert [output.readline() for _ in range(2)][1] == "    waits 10 s\n"
        do(lambda: log.tell(log_record(2, B)))
        assert f"node:chat/{B}" in output.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_a_terminal_is_shown_what_comes_unless_it_is_told_not_to() -> None:
    facts, log = StillFacts(snapshot(service(A))), FakeLog([log_record(1)])
    facts.log = log
    with pages(facts) as (address, do):
        command = [sys.executable, "-m", "sidecar", "log", "tail", "--admin", address]
        for flags, follows in (((), True), (("--no-follow",), False)):
            ours, its = pty.openpty()
            with open(ours, "rb", buffering=0) as terminal, subprocess.Popen([*command, *flags], stdout=its) as process:
                os.close(its)
                shown = b""
                while b"waits 10 s" not in shown:
                    shown += terminal.read(1000)
                if follows:
                    do(lambda: log.tell(log_record(2, B)))
                    while B.encode() not in shown:
                        shown += terminal.read(1000)
                    process.send_signal(signal.SIGINT)
                assert process.wait(10) == 0


@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["table", "json"])
def test_a_closed_pipe_ends_it_well(flags: tuple[str, ...]) -> None:
    facts, log = StillFacts(snapshot(service(A))), FakeLog([log_record(1)])
    facts.log = log
    with pages(facts) as (address, do):
        reader, writer = os.pipe()
        with following(address, *flags, stdout=writer) as process:
            os.close(writer)
            assert os.read(reader, 10)
            os.close(reader)
            do(lambda: log.tell(log_record(2)))
            assert process.wait(10) == 0
            assert process.stderr is not None
            assert process.stderr.read() == ""


def test_a_closed_pipe_is_noticed_without_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidecar.admin.log.GLANCE_S", 0.02)
    monkeypatch.setattr("sidecar.admin.log.HEARTBEAT_S", 0.04)
    facts = StillFacts(snapshot(service(A)))
    facts.log = FakeLog([log_record(1)])
    with pages(facts) as (address, _):
        reader, writer = os.pipe()
        with following(address, stdout=writer) as process:
            os.close(writer)
            assert os.read(reader, 10)
            os.close(reader)
            assert process.wait(10) == 0


@pytest.mark.parametrize("words", [["node", A], [f"node:chat/{A}"]])
def test_history_of_a_breaker_is_the_real_pages_one(words: list[str], capsys: Output) -> None:
    facts = StillFacts(snapshot(service(A)))
    facts.log = FakeLog([log_record(1), log_record(2, B), log_record(3, state="closed", wait_s=0.0)])
    with pages(facts) as (address, _):
        assert main(["log", "show", *words, "--admin", address]) == 0
        assert [line.split()[3] for line in capsys.readouterr().out.splitlines() if line[0] == "2"] == [
            "open",
            "closed",
        ]
        assert main(["log", "show", "node", "10.9.9.9:1", "--admin", address]) == 1
        assert "refused with 404: the log has nothing about it" in capsys.readouterr().err


async def test_an_order_is_in_the_log_of_a_real_sidecar(capsys: Output) -> None:
    """Order, state, history and health, of one process that nothing is faked in."""

    async def said(code: int, *argv: str) -> Any:
        assert await asyncio.to_thread(main, [*argv, "--json", "--admin", f"127.0.0.1:{proxy.admin}"]) == code
        return json.loads(capsys.readouterr().out)

    async with sidecar("--upstream", f"http://{A}", "--redis", "local") as proxy:
        (ordered,) = await said(0, "breakers", "open", "node", A, "--for", "10m", "--by", "ann")
        assert (ordered["state"], ordered["by"], ordered["held"]) == ("open", "ann", True)
        assert await asyncio.to_thread(main, ["log", "show", "node", "x", "--admin", f"127.0.0.1:{proxy.admin}"]) == 1
        records: list[dict[str, Any]] = []
        async with asyncio.timeout(10):
            while not records:
                text = await asyncio.to_thread(_output, capsys, "log", "tail", "--json", "--admin", proxy.admin)
                records = [json.loads(line) for line in text.splitlines()]
        (record,) = records
        assert (record["kind"], record["state"], record["why"]) == ("override", "open", "operator")
        assert record["by"].startswith("ann at ")
        assert record["held"]
        assert record["expires"] > record["ts"]
        (shown,) = await said(0, "log", "show", "node", A)
        assert shown == record
        (line,) = await said(0, "breakers", "list")
        assert line["registered"] == f"{record['epoch']}.{record['version']}"
        assert (line["by"], line["held"]) == (record["by"], True)  # as every other sidecar has it
        ends = [datetime.fromisoformat(text) for text in (line["until"], record["expires"])]
        assert abs(ends[0] - ends[1]) < timedelta(seconds=1)
        health = await said(1, "status")
        assert health["parts"]["log"]["ok"]
        assert health["log"]["state"] == "local"


def _output(capsys: Output, *argv: object) -> str:
    port = argv[-1]
    assert main([*(str(word) for word in argv[:-1]), f"127.0.0.1:{port}"]) == 0
    return capsys.readouterr().out
