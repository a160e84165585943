"""Threads that count: away from the loop, the most urgent job first, a piece of it at a time.

1. The loop gives jobs over a queue that no one waits for (`SimpleQueue`), and hears of their end by
   `call_soon_threadsafe`. Each thread has a queue, jobs and tokenizers of its own: no locks. One thread is usual, it
   counts a million tokens a second; a second one takes a core.
2. Between two pieces a thread takes up whatever became more urgent: a megabyte that may wait does not keep a short
   prompt from being counted in its time.
3. A job is dropped between two pieces once nobody wants it (`unwanted`).
4. The interpreter is let go for as long as a piece is counted. What holds it in between (cutting, decoding) is short
   because pieces are; after a piece that held it all the while the thread sleeps for a moment (BREATH_S): to let it go
   and take it back at once would leave the loop without, which gets it only after 5 ms if nobody gives it up.
5. What counting raises ends its job and nothing else; a panic of the library is such a thing, too.
"""

import heapq
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, Final, Protocol

MOST_BYTES: Final = 16 << 20
"""Of jobs that were given and have not ended: 4 s of a thread. More is not taken."""

BREATH_S: Final = 0.0001
"""For a thread that waits to wake up and take the interpreter: 50 us here."""

NICE_BYTES: Final = 1 << 20
"""While more than that is to be counted, nothing is counted that nobody waits for."""


class Counting(Protocol):
    """What a job does."""

    def run(self, lane: int) -> Iterator[bool]:
        """Counts piece by piece, on thread `lane`. Sees to its own result. True: that piece held the interpreter."""


class Job:
    """One piece of work. `deadline`: the clock's time at which somebody stops waiting; inf: nobody waits.

    `unwanted` is set by the loop and read by the thread. `done` is called on the loop, with the seconds it took of the
    thread and what was raised, once, unless it was unwanted.
    """

    __slots__ = ("counting", "deadline", "done", "failed", "lane", "size", "spent_s", "unwanted")

    def __init__(self, counting: Counting, size: int, deadline: float, done: "Callable[[Job], None]") -> None:
        self.counting = counting
        self.size = size
        self.deadline = deadline
        self.done = done
        self.unwanted = False
        self.failed: BaseException | None = None
        self.spent_s = 0.0
        self.lane = 0


class Threads:
    """`call_soon`: the loop's `call_soon_threadsafe`. `clock`: any thread's, seconds. They start with the first job."""

    __slots__ = ("_call_soon", "_clock", "_closed", "_lanes", "_pending", "_threads", "pending")

    def __init__(self, count: int, call_soon: Callable[..., Any], clock: Callable[[], float]) -> None:
        self._call_soon = call_soon
        self._clock = clock
        self._lanes: list[SimpleQueue[Job | None]] = [SimpleQueue() for _ in range(count)]
        self._pending = [0] * count
        self._threads: list[threading.Thread] = []
        self._closed = False
        self.pending = 0
        """Bytes to be counted, of all jobs that were given."""

    def __len__(self) -> int:
        return len(self._lanes)

    def ahead(self) -> int:
        """Bytes that a job has before it if all others are more urgent."""
        return min(self._pending)

    def give(self, job: Job) -> bool:
        """Takes a job; false: there are too many."""
        if self._closed or (self.pending and self.pending + job.size > MOST_BYTES):
            return False
        job.lane = self._pending.index(min(self._pending))
        self._pending[job.lane] += job.size
        self.pending += job.size
        if not self._threads:
            self._start()
        self._lanes[job.lane].put(job)
        return True

    def give_each(self, make: Callable[[int], Job]) -> None:
        """A job for every thread, whatever it has to do."""
        if self._closed:
            return
        if not self._threads:
            self._start()
        for lane, queue in enumerate(self._lanes):
            job = make(lane)
            job.lane = lane
            queue.put(job)

    def close(self) -> None:
        """Ends the threads after the piece that they are at; whoever waits is told nothing more."""
        self._closed = True
        for queue in self._lanes:
            queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """Waits for them to end, off the loop."""
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _start(self) -> None:
        self._threads = [
            threading.Thread(target=self._work, args=(lane,), name=f"tokens-{lane}", daemon=True)
            for lane in range(len(self._lanes))
        ]
        for thread in self._threads:
            thread.start()

    def _work(self, lane: int) -> None:
        queue = self._lanes[lane]
        waiting: list[tuple[float, int, Job, Iterator[bool]]] = []
        given = 0
        while True:
            while not waiting or not queue.empty():
                job = queue.get()
                if job is None:
                    return
                given += 1
                heapq.heappush(waiting, (job.deadline, given, job, job.counting.run(lane)))
            _, number, job, pieces = heapq.heappop(waiting)
            began = self._clock()
            over = job.unwanted
            try:
                if not over and next(pieces):
                    time.sleep(BREATH_S)
            except StopIteration:
                over = True
            except BaseException as exc:  # noqa: BLE001 - rule 5
                job.failed = exc
                over = True
            job.spent_s += self._clock() - began
            if over:
                self._tell(job)
            else:
                # Its deadline may have gone meanwhile: what nobody waits for any more is less urgent than the rest.
                heapq.heappush(waiting, (job.deadline, number, job, pieces))

    def _tell(self, job: Job) -> None:
        if self._closed:
            return
        try:
            self._call_soon(self._ended, job)
        except RuntimeError:
            return  # the loop is closed: nobody is there any more

    def _ended(self, job: Job) -> None:
        if job.size:
            self._pending[job.lane] -= job.size
            self.pending -= job.size
        if not job.unwanted:
            job.done(job)
