"""The load refuses every answer that is not whole, and the upstream gives what it was asked for."""

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bench.compare import load
from bench.compare.load import Window
from bench.compare.process import CPUCLOCK_SCHED, Process, free_port, spawn
from bench.setup import ROOT, native

JSON = b'{"choices": [{"message": {"content": "This is an answer in full."}}]}'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n"


def delta(number: int) -> bytes:
    content = b"@@%019d#%06d" % (time.monotonic_ns(), number)
    return b'data: {"choices": [{"delta": {"content": "%b"}, "finish_reason": null}]}\n\n' % content


FINISH = b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def stream(*events: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)
    return HEAD % b"text/event-stream" + b"transfer-encoding: chunked\r\n\r\n" + chunks + end


def whole(body: bytes = JSON, length: int | None = None) -> bytes:
    return HEAD % b"application/json" + b"content-length: %d\r\n\r\n%b" % (
        len(body) if length is None else length,
        body,
    )


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    native()


@pytest.fixture
def work(tmp_path: Path) -> Path:
    load.write_bodies(tmp_path)
    return tmp_path


def answer(work: Path, data: bytes, *, deltas: int = 0, pieces: int = 0) -> Window:
    """What the load makes of one answer, sent whole or in pieces of so many bytes."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        client, _ = server.accept()
        with client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.recv(65536)
            for at in range(0, len(data), pieces or len(data)):
                client.sendall(data[at : at + (pieces or len(data))])
                if pieces:
                    time.sleep(0.0005)
            time.sleep(0.05)

    thread = threading.Thread(target=serve)
    thread.start()
    port = server.getsockname()[1]
    options: load.Options = {"connections": 1, "once": True, "warm": 0.0, "seconds": 0.05}
    if deltas:
        options |= {"deltas": deltas, "interval_us": 1000}
    try:
        with subprocess.Popen(["true"]) as nothing:
            return load.client(Process("fake", nothing, port), work, options, stream=deltas > 0, of_proxy=False)
    finally:
        thread.join()
        server.close()


WELL = {
    "length": (whole(), 0),
    "chunked": (
        HEAD % b"application/json" + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(JSON), JSON),
        0,
    ),
    "stream": (stream(delta(0), delta(1), FINISH, DONE), 2),
    "stream with trailers": (stream(delta(0), FINISH, DONE, end=b"0\r\nx-a: b\r\n\r\n"), 1),
    "stream with comments": (stream(b": ping\n\n", delta(0), FINISH + DONE), 1),
}


@pytest.mark.parametrize("pieces", [0, 1, 7])
@pytest.mark.parametrize("case", WELL)
def test_whole_answers_are_taken_over_any_split(work: Path, case: str, pieces: int) -> None:
    data, deltas = WELL[case]
    window = answer(work, data, deltas=deltas, pieces=pieces)
    assert window.requests == 1
    assert window.streams == (1 if deltas else 0)


BAD = {
    "not 200": (whole().replace(b"200 OK", b"503 No"), 0, "not 200"),
    "cut": (whole()[:-5], 0, "closed within an answer"),
    "short": (whole(JSON[:-3]), 0, "not whole"),
    "another answer": (whole(b"{}"), 0, "not whole"),
    "no framing": (HEAD % b"application/json" + b"\r\n" + JSON, 0, "no framing"),
    "too long": (whole() + b"x", 0, "nobody asked for"),
    "delta lost": (stream(delta(0), delta(2), FINISH, DONE), 3, "lost, doubled or out of order"),
    "delta doubled": (stream(delta(0), delta(0), FINISH, DONE), 2, "lost, doubled or out of order"),
    "delta missing at the end": (stream(delta(0), FINISH, DONE), 2, "not whole"),
    "no finish reason": (stream(delta(0), DONE), 1, "not whole"),
    "no end marker": (stream(delta(0), FINISH), 1, "not whole"),
    "an event after the end marker": (stream(delta(0), FINISH, DONE, delta(1)), 1, "after [DONE]"),
    "stream cut": (stream(delta(0), FINISH, end=b""), 1, "closed within an answer"),
    "no stream": (whole(), 1, "no event stream"),
    "chunk longer than it said": (stream(delta(0), FINISH, DONE).replace(b"\n\n\r\n", b"\n\nx\r\n"), 1, "longer than"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_answer_that_is_not_whole_ends_the_load(work: Path, case: str) -> None:
    data, deltas, words = BAD[case]
    with pytest.raises(RuntimeError) as raised:
        answer(work, data, deltas=deltas)
    assert words in str(raised.value)


@pytest.fixture
def upstream(tmp_path: Path) -> Iterator[Process]:
    folder = tmp_path / "upstream"
    folder.mkdir()
    port = free_port()
    core = min(os.sched_getaffinity(0))
    process = spawn("upstream", core, port, [str(ROOT / "bin" / "upstream"), str(port)], folder)
    yield process
    process.end()


def test_the_upstream_streams_as_asked(upstream: Process, work: Path) -> None:
    load.shape_streams(upstream, deltas=5, interval_us=2000)
    options: load.Options = {"connections": 3, "once": True, "deltas": 5, "interval_us": 2000}
    window = load.client(upstream, work, {**options, "warm": 0.0, "seconds": 0.1}, stream=True, of_proxy=False)
    assert (window.streams, window.deltas) == (3, 15)
    assert window.times["first_us"].count == 3
    with pytest.raises(RuntimeError):
        load.client(upstream, work, {**options, "deltas": 6, "warm": 0.0, "seconds": 0.1}, stream=True, of_proxy=False)


def test_events_have_the_size_that_is_said_and_are_chat_chunks(upstream: Process) -> None:
    load.shape_streams(upstream, deltas=2, interval_us=0)
    with closing(socket.create_connection(("127.0.0.1", upstream.port))) as client:
        client.sendall(b'POST / HTTP/1.1\r\ncontent-length: 16\r\n\r\n{"stream": true}')
        said = b""
        while not said.endswith(b"0\r\n\r\n"):
            said += client.recv(65536)
    events = [part for part in said.split(b"\r\n") if part.startswith(b"data: ")]
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events[:-1]]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert [len(event) for event in events if b"@@" in event] == [load.EVENT_BYTES] * 2
    assert events[-1] == DONE


def test_the_pace_is_kept(upstream: Process, work: Path) -> None:
    window = load.client(
        upstream, work, {"connections": 4, "rate": 100, "warm": 0.1, "seconds": 1}, stream=False, of_proxy=False
    )
    assert 95 <= window.requests <= 105


def test_the_cpu_clock_is_what_proc_says() -> None:
    """Of this process, whose ticks we can wait for."""
    pid = os.getpid()
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    assert time.clock_gettime((~pid << 3) | CPUCLOCK_SCHED) == pytest.approx(ticks, abs=0.05)
