"""The writer thread, over real pipes: lines come whole and in order, or are counted as lost; nobody waits."""

import os
import select
import threading
import time
from collections.abc import Iterator

import pytest

from sidecar.telemetry.writer import LineWriter


class Pipe:
    """Both ends of a pipe; the read end is closed at most once."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        self.open = True

    def read_all(self) -> bytes:
        """Everything up to the end; closes the write end first."""
        os.close(self.writer)
        with os.fdopen(self.reader, "rb") as stream:
            self.open = False
            return stream.read()

    def hang_up(self) -> None:
        os.close(self.reader)
        self.reader = -1

    def close(self) -> None:
        if self.open:
            os.close(self.writer)
            if self.reader >= 0:
                os.close(self.reader)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


def test_lines_come_whole_and_in_order(pipe: Pipe) -> None:
    writer = LineWriter(pipe.writer, gather_s=0.001)
    writer.put(b"before the start\n")
    writer.start()
    lines = [b"line %d\n" % number for number in range(5000)]
    got: list[bytes] = []

    def read() -> None:
        with os.fdopen(pipe.reader, "rb") as stream:
            got.append(stream.read())

    reading = threading.Thread(target=read)
    reading.start()
    for line in lines:
        writer.put(line)
    writer.close()
    os.close(pipe.writer)
    reading.join()
    pipe.open = False
    assert got == [b"before the start\n" + b"".join(lines)]
    assert writer.dropped == 0


def test_line_is_written_without_waiting_for_the_next(pipe: Pipe) -> None:
    writer = LineWriter(pipe.writer, gather_s=0.001)
    writer.start()
    for line in (b"first\n", b"second\n"):
        writer.put(line)
        assert os.read(pipe.reader, 100) == line
    writer.close()


def test_many_threads_lose_nothing(pipe: Pipe) -> None:
    writer = LineWriter(pipe.writer, gather_s=0.0)
    writer.start()

    def talk(name: bytes) -> None:
        for number in range(500):
            writer.put(b"%s%d\n" % (name, number))

    threads = [threading.Thread(target=talk, args=(name,)) for name in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    lines = pipe.read_all().split()
    assert sorted(lines) == sorted(b"%s%d" % (name, n) for name in (b"a", b"b", b"c") for n in range(500))


def test_reader_that_stalls_costs_lines_not_time(pipe: Pipe) -> None:
    line = b"x" * 999 + b"\n"
    writer = LineWriter(pipe.writer, limit_bytes=100_000, gather_s=0.0)
    writer.start()
    begun = time.perf_counter()
    for _ in range(5000):
        writer.put(line)
    assert time.perf_counter() - begun < 2.0
    # In the pipe, in the thread's hands, and held.
    assert 5000 - writer.dropped <= 65 + 100 + 100
    begun = time.perf_counter()
    writer.close(timeout_s=0.05)
    assert time.perf_counter() - begun < 2.0
    pipe.hang_up()
    writer.close()


def test_what_the_limit_drops_is_counted_and_what_fits_is_kept(pipe: Pipe) -> None:
    writer = LineWriter(pipe.writer, limit_bytes=10, gather_s=0.0)
    for line in (b"1234\n", b"5678\n", b"!\n"):
        writer.put(line)
    assert writer.dropped == 1
    writer.start()
    writer.close()
    assert pipe.read_all() == b"1234\n5678\n"


def test_what_was_written_is_held_no_more(pipe: Pipe) -> None:
    writer = LineWriter(pipe.writer, limit_bytes=10, gather_s=0.0)
    writer.start()
    for _ in range(10):
        writer.put(b"12345678\n")
        assert os.read(pipe.reader, 100) == b"12345678\n"
    writer.close()
    assert writer.dropped == 0


def test_lines_are_gathered_until_the_end_is_asked_for(pipe: Pipe) -> None:
    writer = LineWriter(pipe.writer, gather_s=60.0)
    writer.start()
    writer.put(b"one\n")
    assert select.select([pipe.reader], [], [], 0.05) == ([], [], [])
    writer.put(b"two\n")
    writer.close()
    assert os.read(pipe.reader, 100) == b"one\ntwo\n"


def test_log_that_nobody_reads_any_more_raises_nothing(pipe: Pipe) -> None:
    pipe.hang_up()
    writer = LineWriter(pipe.writer, gather_s=0.0)
    writer.put(b"one\n")
    writer.put(b"two\n")
    writer.start()
    writer.close()
    assert writer.dropped == 2


def test_non_blocking_pipe_that_is_full_is_waited_for(pipe: Pipe) -> None:
    os.set_blocking(pipe.writer, False)
    line = b"x" * 999 + b"\n"
    writer = LineWriter(pipe.writer, gather_s=0.0)
    for _ in range(200):
        writer.put(line)
    writer.start()
    got = b""
    while len(got) < 200 * len(line):
        got += os.read(pipe.reader, 4096)
    writer.close()
    assert got == line * 200
    assert writer.dropped == 0


def test_close_without_start_returns(pipe: Pipe) -> None:
    LineWriter(pipe.writer).close()
