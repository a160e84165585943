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
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_SHELL: Final = "/bin/sh"
# A shell gives /dev/null to what runs in the background, so the pipe has another number first.
_SCRIPT: Final = """
exec 3<&0
(read -r _ <&3 || kill -KILL $$) >/dev/null 2>&1 &
exec "$@" 3<&- </dev/null
"""


class Leashed:
    """A program that was started. `output`: what it writes to both its outputs."""

    __slots__ = ("_ended", "_hold", "_loop", "_pidfd", "_popen", "_transport", "output")

    def __init__(self, popen: "subprocess.Popen[bytes]", hold: int, loop: asyncio.AbstractEventLoop) -> None:
        self._popen = popen
        self._hold = hold
        self._loop = loop
        self._ended = asyncio.Event()
        self._transport: asyncio.ReadTransport | None = None
        self.output = asyncio.StreamReader(loop=loop)
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
            self._popen.wait()  # it cannot refuse
            self._on_end()
        if self._transport is not None:
            self._transport.close()
        hold, self._hold = self._hold, -1
        if hold >= 0:
            try:
                os.write(hold, b"\n")
            except BrokenPipeError:
                pass  # the watcher is gone: somebody killed it
            finally:
                os.close(hold)

    async def read(self) -> None:
        """Connect `output`; for `start`."""
        protocol = asyncio.StreamReaderProtocol(self.output, loop=self._loop)
        self._transport, _ = await self._loop.connect_read_pipe(lambda: protocol, self._popen.stdout)

    def _on_end(self) -> None:
        if self._pidfd >= 0 and self._popen.poll() is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
            self._ended.set()


async def start(words: Sequence[str], directory: Path, *, pass_fds: Sequence[int] = ()) -> Leashed:
    """Run a program in a directory. One that is not there ends with 127 and says so in its output. OSError: there is no
    such directory, no shell, or no process to be had."""
    watched, hold = os.pipe()
    try:
        popen = subprocess.Popen(  # noqa: ASYNC220, S603 - it waits for the exec, a millisecond; the words are ours
            [_SHELL, "-c", _SCRIPT, _SHELL, *words],
            cwd=directory,
            stdin=watched,
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
    leashed = Leashed(popen, hold, asyncio.get_running_loop())
    try:
        await leashed.read()
    except BaseException:
        leashed.release()
        raise
    return leashed
