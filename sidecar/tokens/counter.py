"""Counts prompts in the time that a request has: from what is known, at once, on a thread, or by an estimate.

1. A service without a tokenizer is estimated. So is one whose file is bad or not read yet: `tokenizer_unusable` says
   why and what to do, no request fails for it.
2. With one, the longest prefix that was counted before is looked up. What is left is not counted where it is next to
   nothing beside it (`Work.guess`); where it is little (INLINE_S of counting, by the speed that was measured) it is
   counted on the spot. Else, if the threads will be through in `time_s`, the request
   waits for them; if not, it is estimated, and counted all the same while the threads have nothing better to do: its
   next turn is then known.
3. A request that was woken by its time is estimated; the count goes on for the next one. One that left is dropped.
4. What an engine reports teaches the estimates of its model, and what its chat template adds (`overhead`). A report
   that is far from what its prompt's texts have is not believed (`lies`); where many are, the file is not that of the
   model that answers, which `tokenizer_disagrees` says once.
5. Counts are of texts, and a text is a key that tells nothing of who sent it: who sends the same conversation gets the
   same number, and nobody gets another's (`prefixes`, rule 2).
6. Bounded: models (each has estimates of 30 KB), prefixes, jobs by their bytes.

What M reads of it: `counts` by how; `late`, `failed`, `uncountable`, `refused`, `left`, `lies`; `counted_bytes`,
`counting_s`, `pending_bytes`, `prefixes`; `models()` for the estimates' errors.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Protocol

from sidecar.policy.schema import Service
from sidecar.proxy.ports import Counted, Waiter
from sidecar.tokens.estimate import Estimator
from sidecar.tokens.overhead import Overhead
from sidecar.tokens.pool import NICE_BYTES, Job, Threads
from sidecar.tokens.prefixes import Prefixes
from sidecar.tokens.texts import MOST_BYTES, Uncountable
from sidecar.tokens.tokenizer import Tokenizer, marks_of, read
from sidecar.tokens.work import Beside, Work

INLINE_S: Final = 0.0003
"""What the loop counts itself: some 1,500 bytes. To give that away and take it back costs a third of it, and waits."""

PREPARE_BYTES: Final = 64 * 1024
"""Of what is left of a known prompt: as much is looked into, since most of it may be tools that are known."""

START_S_PER_BYTE: Final = 5e-7
"""Until it was measured: twice what one core of today takes."""

CREEP: Final = 1.05
"""By which the least time that a byte took grows with each job, so that a slower tokenizer is found out."""

HANDOVER_S: Final = 0.0005
"""To a thread and back."""

CAUTION: Final = 1.5
"""How much longer than predicted counting may take: to wait in vain costs the time and gives an estimate."""

MOST_MODELS: Final = 500
MOST_NAME: Final = 256
"""Characters of a model's name that tell it from others: clients choose it, and a body is a megabyte."""
LEARN_ALL: Final = 100
LEARN_EACH: Final = 8
"""Reports that are learnt from: all of the first, then one in that many. Each takes 0.1 ms."""

LIES_IN_ROW: Final = 8
EXACT: Final = "exact"
CACHED: Final = "cached"
ESTIMATED: Final = "estimated"


class Handle(Protocol):
    """What cancels a call."""

    def cancel(self) -> None: ...


class Loop(Protocol):
    """What is asked of the event loop."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], None]) -> Handle: ...

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any) -> object: ...


class Say(Protocol):
    """Logs an event; never waits, never raises."""

    def __call__(self, level: str, event: str, **fields: Any) -> None: ...


class _File:
    """A tokenizer's file, as a policy names it: one tokenizer for each thread, once they are read."""

    __slots__ = ("beside", "least_s_per_byte", "s_per_byte", "salt", "tokenizers", "why")

    def __init__(self) -> None:
        self.tokenizers: tuple[Tokenizer, ...] = ()
        self.salt = 0
        self.beside = Beside()
        # As threads take for it beside all else, and what it takes of a core.
        self.s_per_byte = START_S_PER_BYTE
        self.least_s_per_byte = START_S_PER_BYTE
        self.why = ""


class _Reading:
    """Reads a file on each thread; what did not change stays."""

    __slots__ = ("file", "left", "path", "read", "why")

    def __init__(self, path: str, file: _File, threads: int) -> None:
        self.path = path
        self.file = file
        self.left = threads
        self.read: dict[int, Tokenizer] = {}
        self.why = ""

    def run(self, lane: int) -> Iterator[bool]:
        """One thread's part."""
        had = self.file.tokenizers
        try:
            if had and had[lane].marks == marks_of(self.path):
                self.read[lane] = had[lane]
            else:
                self.read[lane] = read(self.path)
        except OSError as exc:
            self.why = f"cannot be read: {exc.strerror or exc}"
        except ValueError as exc:
            self.why = str(exc)
        yield True


class _Wait:
    """A request that waits for its count."""

    __slots__ = ("counted", "job", "timer", "waiter", "woken")

    def __init__(self, waiter: Waiter, job: Job) -> None:
        self.waiter = waiter
        self.job = job
        self.timer: Handle | None = None
        self.counted: Counted | None = None
        self.woken = False


class Model:
    """What is known of one model of one service. `reports`: prompts that its engine told the tokens of."""

    __slots__ = ("estimator", "lies", "lies_in_row", "model", "overhead", "reports", "service")

    def __init__(self, service: str, model: str) -> None:
        self.service = service
        self.model = model
        self.estimator = Estimator()
        self.overhead = Overhead()
        self.reports = 0
        self.lies = 0
        self.lies_in_row = 0


class Counter:
    """Implements `ports.TokenCounter`; all of it is the loop's. `clock`: seconds, for any thread.

    `salt`: a number that nobody outside knows. `threads` >= 1.
    """

    __slots__ = (
        "_clock",
        "_files",
        "_generation",
        "_loop",
        "_models",
        "_paths",
        "_salt",
        "_say",
        "_threads",
        "_waits",
        "counted_bytes",
        "counting_s",
        "counts",
        "failed",
        "late",
        "left",
        "lies",
        "prefixes",
        "refused",
        "uncountable",
    )

    def __init__(self, loop: Loop, clock: Callable[[], float], say: Say, *, salt: int, threads: int = 1) -> None:
        self._loop = loop
        self._clock = clock
        self._say = say
        self._salt = salt
        self._generation = 0
        self._threads = Threads(threads, loop.call_soon_threadsafe, clock)
        self._paths: dict[str, str] = {}
        self._files: dict[str, _File] = {}
        self._models: OrderedDict[tuple[str, str], Model] = OrderedDict()
        self._waits: dict[Waiter, _Wait] = {}
        self.prefixes = Prefixes()
        self.counts = {EXACT: 0, CACHED: 0, ESTIMATED: 0}
        self.counted_bytes = 0
        self.counting_s = 0.0
        self.failed = 0
        self.late = 0
        self.left = 0
        self.lies = 0
        self.refused = 0
        self.uncountable = 0

    @property
    def pending_bytes(self) -> int:
        """Bytes that threads are to count, or are counting."""
        return self._threads.pending

    def models(self) -> Iterable[Model]:
        """What is known of each model that was asked for."""
        return self._models.values()

    def why_not(self, service: str) -> str:
        """Why a service's prompts are not counted exactly; empty: they are."""
        path = self._paths.get(service, "")
        if not path:
            return "it has no tokenizer"
        file = self._files[path]
        if file.tokenizers:
            return file.why
        return file.why or "its tokenizer has not been read yet"

    # --- what policies say --------------------------------------------------------------------------------------------

    def use(self, services: Iterable[Service], done: Callable[[], None] | None = None) -> None:
        """The services in force: reads their tokenizers' files, if they changed, on the threads.

        `done` is called when all are read, at once if there are none. What was good stays where its file went bad.
        """
        self._paths = {service.name: service.tokenizer for service in services if service.tokenizer}
        named = set(self._paths.values())
        for path in self._files.keys() - named:
            del self._files[path]
        if not named:
            self.prefixes.clear()
            if done is not None:
                done()
            return
        left = [len(named) * len(self._threads)]
        for path in sorted(named):
            file = self._files.get(path)
            if file is None:
                file = self._files[path] = _File()
            reading = _Reading(path, file, len(self._threads))
            self._threads.give_each(lambda _, reading=reading: self._reading(reading, left, done))  # type: ignore[misc]

    def _reading(self, reading: _Reading, left: list[int], done: Callable[[], None] | None) -> Job:
        def ended(_: Job) -> None:
            reading.left -= 1
            if not reading.left:
                self._was_read(reading)
            left[0] -= 1
            if not left[0] and done is not None:
                done()

        return Job(reading, 0, float("-inf"), ended)

    def _was_read(self, reading: _Reading) -> None:
        file = reading.file
        if self._files.get(reading.path) is not file:
            return  # no policy names it any more
        lanes = len(self._threads)
        if reading.why or len(reading.read) < lanes:
            kept = "; the one that was read before stays" if file.tokenizers else "; prompts are estimated"
            file.why = (reading.why or "cannot be read") + kept
            self._say("warning", "tokenizer_unusable", path=reading.path, why=file.why)
            return
        file.why = ""
        new = tuple(reading.read[lane] for lane in range(lanes))
        if not file.tokenizers or new[0].marks != file.tokenizers[0].marks:
            self._generation += 1
            file.salt = hash((self._salt, self._generation))
            file.beside = Beside()
            self._say("info", "tokenizer_read", path=reading.path)
        file.tokenizers = new

    # --- counting -----------------------------------------------------------------------------------------------------

    def count(self, service: str, model: str, prompt: bytes, time_s: float, waiter: Waiter) -> Counted | None:
        """As the port says."""
        wait = self._waits.pop(waiter, None) if self._waits else None
        if wait is not None:
            return self._answered(wait, service, model, prompt)
        path = self._paths.get(service)
        file = None if path is None else self._files[path]
        if file is None or not file.tokenizers or len(prompt) > MOST_BYTES:
            return self._estimated(service, model, prompt)
        known = self.prefixes.find(prompt, file.salt)
        work = Work(prompt, file.salt, known, file.tokenizers, file.beside)
        of = self._model(service, model)
        try:
            if work.guess():
                return self._counted(work, of)
            if work.size * file.least_s_per_byte > INLINE_S:
                if known is None or work.size > PREPARE_BYTES:
                    return self._wait(work, file, of, time_s, waiter)
                work.prepare()
                if work.size * file.least_s_per_byte > INLINE_S:
                    return self._wait(work, file, of, time_s, waiter)
            for _ in work.run(0):
                pass
        except Uncountable:
            self.uncountable += 1
            return self._estimated(service, model, prompt)
        except BaseException as exc:  # a panic of the library is no Exception
            if isinstance(exc, (KeyboardInterrupt, SystemExit)):
                raise
            self._raised(of, exc)
            return self._estimated(service, model, prompt)
        self._remember(work, file)
        return self._counted(work, of)

    def forget(self, waiter: Waiter) -> None:
        """As the port says."""
        wait = self._waits.pop(waiter, None)
        if wait is not None:
            self.left += 1
            self._drop(wait)

    def reported(self, service: str, model: str, prompt: bytes, tokens: int) -> None:
        """As the port says."""
        of = self._model(service, model)
        of.reports += 1
        if of.reports > LEARN_ALL and of.reports % LEARN_EACH:
            return
        path = self._paths.get(service)
        file = None if path is None else self._files[path]
        if file is not None and file.tokenizers:
            work = self._known(prompt, file)
            if work is not None and work.messages:
                if self._lies(of, work, tokens):
                    return
                if not work.media:
                    of.overhead.learn(work.tokens, work.messages, tokens)
        of.estimator.learn(prompt, tokens)

    def close(self) -> None:
        """Ends the threads; who waits is not woken any more."""
        for wait in self._waits.values():
            self._drop(wait)
        self._waits.clear()
        self._threads.close()

    def join(self, timeout_s: float) -> bool:
        """Waits until they ended, off the loop; false: one is still at a piece."""
        return self._threads.join(timeout_s)

    def _model(self, service: str, model: str) -> Model:
        model = model[:MOST_NAME]
        key = (service, model)
        found = self._models.get(key)
        if found is None:
            found = self._models[key] = Model(service, model)
            if len(self._models) > MOST_MODELS:
                self._models.popitem(last=False)
        else:
            self._models.move_to_end(key)
        return found

    def _estimated(self, service: str, model: str, prompt: bytes) -> Counted:
        self.counts[ESTIMATED] += 1
        return Counted(self._model(service, model).estimator.estimate(prompt), ESTIMATED)

    def _counted(self, work: Work, of: Model) -> Counted:
        tokens = max(1, work.tokens + of.overhead.of(work.messages))
        how = ESTIMATED if work.media else EXACT if work.known is None else CACHED
        self.counts[how] += 1
        return Counted(tokens, how)

    def _wait(self, work: Work, file: _File, of: Model, time_s: float, waiter: Waiter) -> Counted | None:
        threads = self._threads
        needs_s = (threads.ahead() + work.size) * file.s_per_byte * CAUTION + HANDOVER_S
        now = self._loop.time()
        if needs_s < time_s and work.size <= MOST_BYTES:
            wait: _Wait

            def done(job: Job) -> None:
                self._ended(job, work, file, of, wait)

            # The clocks of loop and thread need not be one: among deadlines only their order counts.
            job = Job(work, work.size, now + time_s, done)
            if threads.give(job):
                self._waits[waiter] = wait = _Wait(waiter, job)
                wait.timer = self._loop.call_at(now + time_s, lambda: self._is_late(wait))
                return None
            self.refused += 1
        elif threads.pending + work.size <= NICE_BYTES:
            threads.give(Job(work, work.size, float("inf"), lambda job: self._ended(job, work, file, of, None)))
        return self._estimated(of.service, of.model, work.prompt)

    def _ended(self, job: Job, work: Work, file: _File, of: Model, wait: _Wait | None) -> None:
        self.counting_s += job.spent_s
        waits = wait is not None and self._waits.get(wait.waiter) is wait
        if job.failed is None:
            self.counted_bytes += job.size
            if job.size >= 1024:
                took = job.spent_s / job.size
                file.s_per_byte += 0.1 * (took - file.s_per_byte)
                file.least_s_per_byte = min(took, file.least_s_per_byte * CREEP)
            self._remember(work, file)
            if not of.reports and not work.media and of.estimator.learnt < LEARN_ALL:
                # Nobody reports yet: the estimates learn from what is counted.
                of.estimator.learn(work.prompt, work.tokens + of.overhead.of(work.messages))
            if wait is not None and waits:
                wait.counted = self._counted(work, of)
        elif isinstance(job.failed, Uncountable):
            self.uncountable += 1
        else:
            self._raised(of, job.failed)
        if wait is not None and waits:
            self._wake(wait)

    def _is_late(self, wait: _Wait) -> None:
        wait.timer = None
        self.late += 1
        wait.job.deadline = float("inf")  # it goes on, for the conversation's next turn
        self._wake(wait)

    def _wake(self, wait: _Wait) -> None:
        if wait.timer is not None:
            wait.timer.cancel()
            wait.timer = None
        if not wait.woken:
            wait.woken = True
            wait.waiter.woken()

    def _answered(self, wait: _Wait, service: str, model: str, prompt: bytes) -> Counted:
        if wait.counted is not None:
            return wait.counted
        if not wait.woken:
            self._drop(wait)
        return self._estimated(service, model, prompt)

    def _drop(self, wait: _Wait) -> None:
        wait.job.unwanted = True
        if wait.timer is not None:
            wait.timer.cancel()
            wait.timer = None

    def _remember(self, work: Work, file: _File) -> None:
        if work.salt != file.salt:
            return  # the file was read anew meanwhile
        for found in work.found:
            self.prefixes.add(work.prompt, work.salt, found)
        for key, tokens in work.found_beside:
            file.beside.add(key, tokens)

    def _known(self, prompt: bytes, file: _File) -> Work | None:
        """The count of a prompt of which all is known."""
        known = self.prefixes.find(prompt, file.salt)
        if known is None or len(prompt) - known.end > PREPARE_BYTES:
            return None
        work = Work(prompt, file.salt, known, file.tokenizers, file.beside)
        try:
            work.prepare()
        except Uncountable:
            return None
        return None if work.size else work

    def _lies(self, of: Model, work: Work, tokens: int) -> bool:
        """Whether a report is far from what the prompt's texts have, and says so once many are."""
        least = 0.8 * work.tokens - 16
        most = 1.25 * work.tokens + 64 * work.messages + 4000
        if work.media or least <= tokens <= most:
            of.lies_in_row = 0
            return False
        of.lies += 1
        self.lies += 1
        of.lies_in_row += 1
        if of.lies_in_row == LIES_IN_ROW:
            self._say(
                "warning",
                "tokenizer_disagrees",
                service=of.service,
                model=of.model,
                counted=work.tokens,
                reported=tokens,
                why="the engine reports another number of prompt tokens: is the service's tokenizer its model's?",
            )
        return True

    def _raised(self, of: Model, exc: BaseException) -> None:
        self.failed += 1
        if self.failed & (self.failed - 1) == 0:  # the 1st, 2nd, 4th, ...: it may be each request
            why = f"{type(exc).__name__}: {exc}"[:200]
            self._say("error", "tokenizer_failed", service=of.service, why=why, times=self.failed)
