"""A child process that dies with us, however we die.

A server that we started must not stay when we are killed: it would hold its directory, and nobody would end it. What
asks the kernel for that (`prctl(PR_SET_PDEATHSIG)`) needs code of ours between fork and exec, in a process that has
threads, and it goes by the death of a thread, not of the process. Here a shell puts a watcher beside the program, then
becomes the program: the watcher reads from a pipe whose other end only we hold.

1. We end in any way: the pipe ends, and the watcher kills the program at once. Nothing of ours runs.
2. We let go (`release`): a line tells the watcher to go and to kill nobody. That is for when the program has ended,
   since its pid may be another's by then.
3. The program has our child's pid, nothing on its standard input, and a session of its own: a Ctrl-C at the terminal is
   for us, and we end the program when we are done with it.

The program comes from `subprocess`, not from the loop: uvloop leaves the ends of its pipes open in the child, so the
watcher would hold the program's output. Its end comes by a pidfd. Starting blocks the loop until the shell runs, about
a millisecond; the watcher costs some 200 KiB.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_SHELL: Final = "/bin/sh"
_READ_BYTES: Final = 65536
_KILLED_S: Final = 1.0  # only what waits for a broken disk takes longer, and that cannot be waited for
# A shell gives /dev/null to what runs in the background, so the pipe has another number first.
_SCRIPT: Final = """
exec 3<&0
(read -r _ <&3 || kill -KILL $$) >/dev/null 2>&1 &
exec "$@" 3<&- </dev/null
"""


class Leashed:
    """A program that was started. `output`: what it writes to both its outputs; whoever starts it reads on, or memory
    grows."""

    __slots__ = ("_ended", "_hold", "_loop", "_pidfd", "_pipe", "_popen", "output")

    def __init__(self, popen: "subprocess.Popen[bytes]", hold: int, loop: asyncio.AbstractEventLoop) -> None:
        self._popen = popen
        self._hold = hold
        self._loop = loop
        self._ended = asyncio.Event()
        self.output = asyncio.StreamReader(loop=loop)
        self._pipe = popen.stdout
        if self._pipe is not None:
            os.set_blocking(self._pipe.fileno(), False)
            loop.add_reader(self._pipe, self._on_output)
        self._pidfd = os.pidfd_open(popen.pid)
        loop.add_reader(self._pidfd, self._on_end)

    @property
    def pid(self) -> int:
        """The program's."""
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, or the signal's number, negative, that ended it; None while it runs."""
        return self._popen.returncode

    def send(self, number: signal.Signals) -> None:
        """A signal for the program; one that has ended gets none."""
        if self._popen.returncode is None:
            self._popen.send_signal(number)

    async def wait(self) -> int:
        """Its exit code, once it has ended. It may never end: the deadline is the caller's."""
        await self._ended.wait()
        return self._popen.returncode

    def release(self) -> None:
        """Let go of everything, once the program has ended; again is harmless. One that still runs is killed."""
        if self._popen.returncode is None:
            self._popen.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(_KILLED_S)
            self._on_end()
        self._close_output()
        hold, self._hold = self._hold, -1
        if hold >= 0:
            try:
                if self._popen.returncode is not None:
                    os.write(hold, b"\n")
            except BrokenPipeError:
                pass  # the watcher is gone: somebody killed it
            finally:
                os.close(hold)

    def _on_output(self) -> None:
        try:
            data = self._pipe.read(_READ_BYTES) if self._pipe is not None else b""
        except OSError:
            data = b""
        if data:
            self.output.feed_data(data)
        elif data is not None:  # None: nothing there, after all
            self._close_output()

    def _close_output(self) -> None:
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            self._loop.remove_reader(pipe)
            pipe.close()
            self.output.feed_eof()

    def _on_end(self) -> None:
        if self._pidfd >= 0 and self._popen.poll() is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
            self._ended.set()


def start(words: Sequence[str], directory: Path, *, pass_fds: Sequence[int] = ()) -> Leashed:
    """Run a program in a directory. One that is not there ends with 127 and says so in its output. OSError: there is no
    such directory, no shell, or no process to be had."""
    watched, hold = os.pipe()
    try:
        popen = subprocess.Popen(  # noqa: S603 - the words are ours
            [_SHELL, "-c", _SCRIPT, _SHELL, *words],
            cwd=directory,
            stdin=watched,
            bufsize=0,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=pass_fds,
            start_new_session=True,
        )
    except BaseException:
        os.close(hold)
        raise
    finally:
        os.close(watched)
    return Leashed(popen, hold, asyncio.get_running_loop())
