"""A thread that writes log lines, so that the loop never waits for whoever reads them.

A pipe whose reader stalls blocks its writer; on the loop that would stop every stream. Lines are handed over under a
lock that is held for a list append, gathered for `GATHER_S`, and written in one piece. What does not fit is dropped
and counted: a log that is too slow loses lines, never requests.
"""

import os
import select
import threading

LIMIT_BYTES = 4 << 20
"""Lines held for the writer: a few seconds of 1 KB lines at the highest load; as much again may be in its hands."""

GATHER_S = 0.05
"""One write per this long at most; short enough for a terminal to feel immediate."""


class LineWriter:
    """Takes whole lines from any thread, never waits, never raises. `dropped` counts the lines that were lost."""

    def __init__(self, fd: int, limit_bytes: int = LIMIT_BYTES, gather_s: float = GATHER_S) -> None:
        self.dropped = 0
        self._fd = fd
        self._limit_bytes = limit_bytes
        self._gather_s = gather_s
        self._lines: list[bytes] = []
        self._held_bytes = 0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)

    def start(self) -> None:
        """Begin to write; lines put before are kept."""
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Hand over a line, its newline included; dropped when more than the limit would be held."""
        with self._lock:
            held = self._held_bytes + len(line)
            if held > self._limit_bytes:
                self.dropped += 1
                return
            self._held_bytes = held
            first = not self._lines
            self._lines.append(line)
        if first:
            self._wake.set()

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what is held and stop; a reader that does not read is given up on after `timeout_s`."""
        self._closing.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._closing.wait(self._gather_s)
            # Before the lines are taken: a line that comes in between wakes us once too often, never once too few.
            self._wake.clear()
            closing = self._closing.is_set()
            with self._lock:
                lines, self._lines = self._lines, []
                self._held_bytes = 0
            if lines:
                self._write(lines)
            elif closing:
                return
            if closing:
                self._wake.set()

    def _write(self, lines: list[bytes]) -> None:
        rest = memoryview(b"".join(lines))
        try:
            while rest:
                try:
                    rest = rest[os.write(self._fd, rest) :]
                except BlockingIOError:
                    # Standard output may be a pipe that its other owner made non-blocking.
                    poll = select.poll()
                    poll.register(self._fd, select.POLLOUT)
                    poll.poll()
        except OSError:
            # Nobody is left to tell: the log itself is gone (closed pipe, full disk).
            with self._lock:
                self.dropped += len(lines)
