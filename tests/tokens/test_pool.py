"""Threads that count: what is most urgent first, dropped when nobody wants it, bounded."""

import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from sidecar.tokens import pool
from sidecar.tokens.pool import Job, Threads


class Calls:
    """The loop's side: what threads call is called here."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]]] = SimpleQueue()

    def soon(self, callback: Callable[..., object], *args: Any) -> None:
        self.queue.put((callback, args))

    def run(self, count: int = 1) -> None:
        for _ in range(count):
            callback, args = self.queue.get(timeout=10)
            callback(*args)


class Steps:
    """Work of some steps, each let go by the test; `log` says whose turn it was."""

    def __init__(self, name: str, steps: int, log: list[str], gate: threading.Semaphore | None = None) -> None:
        self.name = name
        self.steps = steps
        self.log = log
        self.gate = gate
        self.began = threading.Event()

    def run(self, lane: int) -> Iterator[bool]:
        for _ in range(self.steps):
            self.began.set()
            if self.gate is not None:
                self.gate.acquire(timeout=10)
            self.log.append(self.name)
            yield False


class Fails:
    def __init__(self, exc: BaseException) -> None:
        self.exc = exc

    def run(self, lane: int) -> Iterator[bool]:
        yield True
        raise self.exc


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def threads(calls: Calls) -> Iterator[Threads]:
    made = Threads(1, calls.soon, time.perf_counter)
    yield made
    made.close()
    assert made.join(10)


def test_a_job_is_done_and_told_once(threads: Threads, calls: Calls) -> None:
    done: list[Job] = []
    job = Job(Steps("a", 3, []), 100, 1.0, done.append)
    assert threads.give(job) and threads.pending == 100
    calls.run()
    assert done == [job] and job.failed is None and job.spent_s > 0.0 and threads.pending == 0
    assert calls.queue.empty()


def test_the_most_urgent_goes_first_and_takes_over_between_two_pieces(threads: Threads, calls: Calls) -> None:
    log: list[str] = []
    gate = threading.Semaphore(0)
    slow = Steps("slow", 3, log, gate)
    threads.give(Job(slow, 1, 30.0, lambda _: None))
    assert slow.began.wait(10)
    threads.give(Job(Steps("nobody", 1, log), 1, float("inf"), lambda _: None))
    threads.give(Job(Steps("soon", 2, log), 1, 10.0, lambda _: None))
    gate.release(3)
    calls.run(3)
    assert log == ["slow", "soon", "soon", "slow", "slow", "nobody"]


def test_what_nobody_wants_is_dropped_between_two_pieces(threads: Threads, calls: Calls) -> None:
    log: list[str] = []
    gate = threading.Semaphore(0)
    work = Steps("a", 5, log, gate)
    job = Job(work, 50, 1.0, lambda _: log.append("told"))
    threads.give(job)
    assert work.began.wait(10)
    job.unwanted = True
    gate.release()
    calls.run()
    assert log == ["a"] and threads.pending == 0


class Panic(BaseException):
    """As the library's are."""


@pytest.mark.parametrize("exc", [ValueError("no"), MemoryError(), Panic("overflow")])
def test_what_a_job_raises_is_its_own(threads: Threads, calls: Calls, exc: BaseException) -> None:
    done: list[BaseException | None] = []
    threads.give(Job(Fails(exc), 1, 1.0, lambda job: done.append(job.failed)))
    threads.give(Job(Steps("a", 1, []), 1, 2.0, lambda job: done.append(job.failed)))
    calls.run(2)
    assert done == [exc, None]


def test_no_more_is_taken_than_can_wait(threads: Threads, calls: Calls) -> None:
    gate = threading.Semaphore(0)
    assert threads.give(Job(Steps("a", 1, [], gate), pool.MOST_BYTES, 1.0, lambda _: None))
    assert not threads.give(Job(Steps("b", 1, []), 1, 1.0, lambda _: None))
    assert threads.ahead() == pool.MOST_BYTES
    gate.release()
    calls.run()
    assert threads.give(Job(Steps("c", 1, []), 2 * pool.MOST_BYTES, 1.0, lambda _: None)), "one alone is always taken"
    calls.run()


def test_each_thread_has_jobs_of_its_own(calls: Calls) -> None:
    two = Threads(2, calls.soon, time.perf_counter)
    lanes: list[int] = []

    class Lane:
        def run(self, lane: int) -> Iterator[bool]:
            lanes.append(lane)
            yield True

    two.give_each(lambda _: Job(Lane(), 0, 0.0, lambda _: None))
    calls.run(2)
    gate = threading.Semaphore(0)
    for _ in range(2):
        two.give(Job(Steps("a", 1, [], gate), 10, 1.0, lambda _: None))
    assert two.ahead() == 10 and len(two) == 2
    gate.release(2)
    calls.run(2)
    assert sorted(lanes) == [0, 1]
    two.close()
    assert two.join(10)


def test_closed_it_takes_and_tells_nothing(calls: Calls) -> None:
    threads = Threads(1, calls.soon, time.perf_counter)
    gate = threading.Semaphore(0)
    work = Steps("a", 1, [], gate)
    threads.give(Job(work, 1, 1.0, lambda _: None))
    assert work.began.wait(10)
    threads.close()
    gate.release()
    assert threads.join(10) and calls.queue.empty()
    assert not threads.give(Job(Steps("b", 1, []), 1, 1.0, lambda _: None))


def test_a_loop_that_is_gone_is_told_nothing() -> None:
    ended = threading.Event()

    def gone(*_: Any) -> None:
        ended.set()
        raise RuntimeError("Event loop is closed")

    threads = Threads(1, gone, time.perf_counter)
    threads.give(Job(Steps("a", 1, []), 1, 1.0, lambda _: None))
    assert ended.wait(10)
    threads.close()
    assert threads.join(10)
