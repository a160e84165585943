import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sidecar.txlog import leash

LIMIT_S = 10.0

OWNER = """
import asyncio, sys
from pathlib import Path
from sidecar.txlog import leash

async def main():
    held = leash.start(["/bin/sh", "-c", "echo begun; exec sleep 600"], Path("/"))
    await held.output.readline()
    print(held.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def started(*words: str, directory: Path) -> AsyncIterator[leash.Leashed]:
    held = leash.start(words, directory)
    try:
        yield held
    finally:
        held.send(signal.SIGKILL)
        await held.wait()
        held.release()


def running(pid: int) -> bool:
    """Whether there is such a process, and it is no corpse that nobody looked at yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def gone(pid: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while running(pid):
            await asyncio.sleep(0.002)


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def text(held: leash.Leashed) -> str:
    async with asyncio.timeout(LIMIT_S):
        return (await held.output.read()).decode()


async def test_the_program_has_our_childs_pid_its_words_and_its_directory(tmp_path: Path) -> None:
    script = "import os, sys; print(os.getpid(), os.getcwd(), sys.argv[1:], repr(sys.stdin.read()), os.getsid(0))"
    words = ["a b", "$HOME", "'", ""]
    async with started(sys.executable, "-c", script, *words, directory=tmp_path) as held:
        pid = held.pid
        assert await text(held) == f"{pid} {tmp_path} {words!r} '' {pid}\n"
        assert await held.wait() == 0


async def test_the_program_has_no_files_of_ours_but_those_it_was_given(tmp_path: Path) -> None:
    script = "import os; print(sorted(int(fd) for fd in os.listdir('/proc/self/fd')))"
    given, other = os.pipe()
    held = leash.start([sys.executable, "-c", script], tmp_path, pass_fds=[given])
    listed = await text(held)
    await held.wait()
    held.release()
    os.close(given)
    os.close(other)
    # The last is the listing itself.
    assert [fd for fd in eval(listed) if fd > 2 and fd != given][1:] == []
    assert str(given) in listed


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
async def test_the_program_ends_when_its_owner_is_killed(number: signal.Signals) -> None:
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", OWNER, stdout=asyncio.subprocess.PIPE)
    assert owner.stdout is not None
    async with asyncio.timeout(LIMIT_S):
        pid = int(await owner.stdout.readline())
        watchers = children(pid)
        assert running(pid) and len(watchers) == 1
        owner.send_signal(number)
        await owner.wait()
    await gone(pid)
    await gone(watchers[0])


async def test_a_program_that_is_stopped_ends_with_its_owner_too() -> None:
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", OWNER, stdout=asyncio.subprocess.PIPE)
    assert owner.stdout is not None
    async with asyncio.timeout(LIMIT_S):
        pid = int(await owner.stdout.readline())
        os.kill(pid, signal.SIGSTOP)
        owner.kill()
        await owner.wait()
    await gone(pid)


async def test_a_release_ends_the_watcher(tmp_path: Path) -> None:
    async with started("/bin/sh", "-c", "echo begun; exec sleep 600", directory=tmp_path) as held:
        await held.output.readline()
        (watcher,) = children(held.pid)
        held.send(signal.SIGTERM)
        assert await held.wait() == -signal.SIGTERM
        held.release()
        held.release()
        await gone(watcher)


async def test_a_release_kills_what_still_runs(tmp_path: Path) -> None:
    held = leash.start(["/bin/sh", "-c", "echo begun; exec sleep 600"], tmp_path)
    await held.output.readline()
    held.release()
    assert await held.wait() == -signal.SIGKILL
    held.send(signal.SIGTERM)


async def test_a_watcher_that_was_killed_harms_nobody(tmp_path: Path) -> None:
    async with started("/bin/sh", "-c", "echo begun; exec sleep 600", directory=tmp_path) as held:
        await held.output.readline()
        (watcher,) = children(held.pid)
        os.kill(watcher, signal.SIGKILL)
        await gone(watcher)
        assert running(held.pid)


async def test_a_program_that_is_not_there_says_so(tmp_path: Path) -> None:
    async with started(str(tmp_path / "nothing"), directory=tmp_path) as held:
        assert "nothing" in await text(held)
        assert await held.wait() == 127


async def test_no_file_stays_open(tmp_path: Path) -> None:
    async def run() -> int:
        async with started("/bin/true", directory=tmp_path) as held:
            await held.wait()
        with pytest.raises(OSError):
            leash.start(["/bin/true"], tmp_path / "nowhere")
        return len(list(Path("/proc/self/fd").iterdir()))

    first = await run()  # the loop opens files of its own, once
    async with asyncio.timeout(LIMIT_S):
        while await run() > first:
            await asyncio.sleep(0.002)
