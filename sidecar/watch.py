"""Policy files on disk: reading them, and noticing that they changed.

Polling, and not inotify: a ConfigMap is swapped by a symlink two directories up, network file systems tell nothing, and
a second's delay is nobody's outage.

1. A directory is its `*.yaml`, `*.yml` and `*.json` files in name order, not its subdirectories. Names that begin with
   a dot are Kubernetes' and editors' own; `schema.json` is the generated JSON Schema, which lives beside policies.
2. A change is a change of content. Attributes only save reading: every `READ_ANYWAY`th poll reads in any case, since a
   file can change twice within one tick of its clock.
3. A change counts once it was read twice alike: `cp` truncates a file before it fills it, and the front half of a
   policy is often a policy too, with fewer services. What still changes after `SETTLE_ROUNDS` is taken as it is.
4. A policy that was refused is not judged again, nor told again, until the files change or SIGHUP asks for it.
5. A directory without files is no policy, which is a fault, unless `--upstream` says whom to serve: a pod's ConfigMap
   may be optional. Once a policy was in force it is a fault there, too: what was promised to somebody (tokens, quotas)
   does not end because a directory was emptied for a moment, or by mistake.
"""

import asyncio
import hashlib
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from sidecar.policy.document import MAX_FILE_BYTES
from sidecar.policy.errors import PolicyError, PolicyErrors
from sidecar.policy.load import load, with_upstreams
from sidecar.policy.schema import Snapshot
from sidecar.policy.store import PolicyStore

SUFFIXES = frozenset((".yaml", ".yml", ".json"))
NOT_POLICIES = frozenset(("schema.json",))
NO_FILES = "no policy in this directory: no *.yaml, *.yml or *.json file"

# At one poll a second, the longest that a change within one clock tick stays unseen.
READ_ANYWAY = 10
# Writers that keep on longer than this many looks, each after `settle_s`, are not writing one file.
SETTLE_ROUNDS = 10

_Attributes = tuple[tuple[str, int, int, int, int, int], ...]


class PolicyFiles:
    """A file or a directory of policies, and what was last read of it. Its methods wait for the disk."""

    __slots__ = ("_attributes", "_digest", "_had_files", "_looks", "_upstreams", "path")

    def __init__(self, path: Path, upstreams: Sequence[str] = ()) -> None:
        self.path = path
        self._upstreams = tuple(upstreams)
        self._attributes: _Attributes | None = None
        self._digest = b""
        self._had_files = False
        self._looks = 0

    def load(self, version: int) -> Snapshot:
        """What the files say now, with the upstreams added. PolicyErrors: all that is wrong with them."""
        # Attributes first: a change while we read is then found by the next poll.
        self._attributes = self._look()
        self._looks = 1
        try:
            files = _read(self.path)
        except PolicyErrors as unreadable:
            self._digest = _digest([(str(self.path), str(unreadable).encode())])
            raise
        self._digest = _digest(files)
        if not files and (self._had_files or not self._upstreams):
            raise PolicyErrors([PolicyError(str(self.path), 0, "$", NO_FILES)])
        snapshot = with_upstreams(load(files, version), self._upstreams)
        self._had_files = bool(files)
        if not snapshot.services:
            nothing = "there is no service: every request is answered 404"
            snapshot = replace(snapshot, warnings=(*snapshot.warnings, nothing))
        return snapshot

    def changed(self) -> bytes | None:
        """A digest of the content, if that is another than at the last `load`."""
        attributes = self._look()
        if attributes == self._attributes and self._looks % READ_ANYWAY:
            self._looks += 1
            return None
        try:
            digest = _digest(_read(self.path))
        except PolicyErrors as unreadable:
            digest = _digest([(str(self.path), str(unreadable).encode())])
        if digest != self._digest:
            self._looks = 0  # the next look reads, too
            return digest
        self._looks = 1
        self._attributes = attributes
        return None

    def _look(self) -> _Attributes | None:
        """What `stat` says of each file, links followed; None where something cannot be looked at."""
        try:
            found = []
            for path in _paths(self.path):
                stat = path.stat()
                found.append((str(path), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
        except OSError:
            return None
        return tuple(found)


class PolicyWatcher:
    """Tells of every new policy in files, given the one in force.

    `on_change` is called on the loop with each new snapshot, which it has to put into `store`; `on_refused` with what
    is wrong with files that cannot be taken. Both must not raise. What reads the same as what is in force (a comment
    was edited) is no change, unless it was asked for or something was refused in between. `prepare` is given each
    snapshot that was read, on the thread that read it, and gives back what is to be applied; None: as it was read.
    """

    def __init__(
        self,
        path: Path,
        store: PolicyStore,
        on_change: Callable[[Snapshot], None],
        on_refused: Callable[[str], None],
        *,
        upstreams: Sequence[str] = (),
        interval_s: float = 1.0,
        settle_s: float = 0.1,
        prepare: Callable[[Snapshot], Snapshot] | None = None,
    ) -> None:
        self._files = PolicyFiles(path, upstreams)
        self._store = store
        self._on_change = on_change
        self._on_refused = on_refused
        self._interval_s = interval_s
        self._settle_s = settle_s
        self._prepare = prepare
        self._asked = asyncio.Event()

    async def run(self) -> None:
        """Poll until cancelled; SIGHUP loads at once, changed or not. Signals are only heard on the main thread."""
        loop = asyncio.get_running_loop()
        # Off the main thread (tests, embedding) the loop refuses: polling alone serves there.
        with suppress(NotImplementedError, ValueError, RuntimeError):
            loop.add_signal_handler(signal.SIGHUP, self.reload)
        try:
            while True:
                await self.check()
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._interval_s):
                        await self._asked.wait()
        finally:
            with suppress(NotImplementedError, ValueError, RuntimeError):
                loop.remove_signal_handler(signal.SIGHUP)

    def reload(self) -> None:
        """Load at the next turn of `run`, whether the files changed or not."""
        self._asked.set()

    async def check(self) -> None:
        """One poll. Reading and judging happen on another thread: a large policy takes longer than a token may wait."""
        asked = self._asked.is_set()
        self._asked.clear()
        if not asked and not await self._settled():
            return
        current = self._store.current
        try:
            snapshot = await asyncio.to_thread(self._load, current.version + 1)
        except PolicyErrors as refused:
            self._on_refused(str(refused))
            return
        same = replace(snapshot, version=current.version) == current and self._store.last_error is None
        if asked or not same:
            self._on_change(snapshot)

    def _load(self, version: int) -> Snapshot:
        snapshot = self._files.load(version)
        return snapshot if self._prepare is None else self._prepare(snapshot)

    async def _settled(self) -> bool:
        """Whether there is a change to load: one that two looks in a row found alike."""
        seen = await asyncio.to_thread(self._files.changed)
        for _ in range(SETTLE_ROUNDS):
            if seen is None:
                return False
            await asyncio.sleep(self._settle_s)
            again = await asyncio.to_thread(self._files.changed)
            if again == seen:
                return True
            seen = again
        return seen is not None


def read_policy(path: Path, version: int = 1, upstreams: Sequence[str] = ()) -> Snapshot:
    """The snapshot of a file or directory, once, with `upstreams` added. PolicyErrors: all that is wrong with it."""
    return PolicyFiles(path, upstreams).load(version)


def _paths(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(
        entry
        for entry in path.iterdir()
        if entry.suffix in SUFFIXES
        and not entry.name.startswith(".")
        and entry.name not in NOT_POLICIES
        and not entry.is_dir()
    )


def _read(path: Path) -> list[tuple[str, bytes]]:
    try:
        paths = _paths(path)
    except OSError as exc:
        raise PolicyErrors([_unreadable(path, exc)]) from exc
    files: list[tuple[str, bytes]] = []
    errors: list[PolicyError] = []
    for each in paths:
        try:
            if each.exists() and not each.is_file():
                raise OSError("not a file")  # a pipe or a device could keep us reading for ever
            with each.open("rb") as file:
                files.append((str(each), file.read(MAX_FILE_BYTES + 1)))
        except OSError as exc:
            errors.append(_unreadable(each, exc))
    if errors:
        raise PolicyErrors(errors)
    return files


def _unreadable(path: Path, error: OSError) -> PolicyError:
    return PolicyError(str(path), 0, "$", f"cannot be read: {error.strerror or error}")


def _digest(files: Sequence[tuple[str, bytes]]) -> bytes:
    total = hashlib.blake2b(digest_size=16)
    for name, data in files:
        total.update(f"{len(name)}:{name}:{len(data)}:".encode(errors="surrogateescape"))
        total.update(data)
    return total.digest()
