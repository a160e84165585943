"""Chat templates on disk: those that the policy and the routing tables name, read beside them, not on a request's way.

1. A path is a Jinja file, or a model folder as it comes from a hub; a file's special tokens are those of the tokenizer
   files beside it, if there are any.
2. Read again with each load of the policy (SIGHUP asks for one), and only what changed on disk: a tokenizer's file has
   tens of megabytes.
3. What cannot be read or is no template is a warning of the policy, and its endpoints take no chats; one that was good
   before stays as it was. Neither keeps a policy from being applied: the rest of its fleet is well.
4. The policy that is being replaced serves on until the next one is applied: until then its templates stay.
5. A routing table may name others; it is in force at once, and what was not read yet is read after (`run`). Until then
   its endpoints take no chats, which go to others: a table can wait for no disk.
6. What is read comes from other threads into the dictionary of what was found, a path at a time; the loop alone takes
   out of it.
"""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from msgspec.structs import replace

from sidecar.policy.schema import Endpoint, Snapshot

if TYPE_CHECKING:
    from sidecar.adapters.template import ChatTemplate

MAX_FILE_BYTES: Final = 256 << 20
"""The largest tokenizers of well-known models have 34 MB."""

_Marks = tuple[tuple[str, int, int, int], ...]


class _Found:
    """What is known of one path: the template, or why there is none; `marks` tell whether its files changed since."""

    __slots__ = ("marks", "template", "why")

    def __init__(self, template: "ChatTemplate | None", why: str, marks: _Marks | None) -> None:
        self.template = template
        self.why = why
        self.marks = marks


class Say(Protocol):
    """Logs an event; never waits, never raises."""

    def __call__(self, level: str, event: str, **fields: Any) -> None: ...


class Templates:
    """The chat templates by path as policies write it. `clock`: seconds since the epoch, for templates that say it.

    `read` may be called on any thread, all else is the loop's.
    """

    __slots__ = ("_asked", "_clock", "_found", "_in_force", "_named", "_say")

    def __init__(self, clock: Callable[[], float], say: Say) -> None:
        self._clock = clock
        self._say = say
        self._found: dict[str, _Found] = {}
        self._named: frozenset[str] = frozenset()
        self._in_force: frozenset[str] = frozenset()
        self._asked = asyncio.Event()

    def of(self, path: str) -> "ChatTemplate | None":
        """The template; None: there is none, or a bad one."""
        found = self._found.get(path)
        return None if found is None else found.template

    def why_not(self, path: str) -> str:
        """Why `of` gives None, in words for whoever asked for a chat: a client, who is told of no files."""
        if not path:
            return "its endpoint has no chat_template"
        if path in self._found:
            return "its chat_template cannot be used; the sidecar's log says why"
        return "its chat_template has not been read yet"

    def awaits(self, path: str) -> bool:
        """Whether it is in force, and being read."""
        return path in self._in_force and path not in self._found

    def read(self, snapshot: Snapshot) -> Snapshot:
        """Reads what its endpoints name, and anew what is in force; gives it back with warnings of what is bad.

        Waits for the disk. `keep_only` follows, once it is applied.
        """
        found = self._found
        self._named = named = _paths(endpoint for service in snapshot.services for endpoint in service.endpoints)
        for path in named | self._in_force:
            found[path] = self._look(path, found.get(path))
        bad = [f"chat_template {path}: {why}" for path in sorted(named) if (why := found[path].why)]
        return replace(snapshot, warnings=(*snapshot.warnings, *bad)) if bad else snapshot

    def keep_only(self, endpoints: Iterable[Endpoint]) -> None:
        """All endpoints that are in force; those of tables may name what was not read yet."""
        self._in_force = _paths(endpoints)
        for path in list(self._found):
            if path not in self._in_force and path not in self._named:
                del self._found[path]
        self._ask()

    def add(self, endpoints: Iterable[Endpoint]) -> None:
        """Endpoints that came into force beside the others."""
        paths = _paths(endpoints)
        if not paths <= self._in_force:
            self._in_force |= paths
            self._ask()

    async def run(self) -> None:
        """Reads what is in force and was not read, until cancelled."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            for path, why in await asyncio.to_thread(self._catch_up, self._in_force):
                self._say("warning", "chat_template_unusable", path=path, why=why)

    def _ask(self) -> None:
        if not self._found.keys() >= self._in_force:
            self._asked.set()

    def _catch_up(self, in_force: frozenset[str]) -> list[tuple[str, str]]:
        """Reads what was not; gives what is bad, and why."""
        bad = []
        for path in sorted(in_force):
            if path not in self._found:
                self._found[path] = new = self._look(path, None)
                if new.why:
                    bad.append((path, new.why))
        return bad

    def _look(self, path: str, known: _Found | None) -> _Found:
        # Imported where a policy has templates: most have none, and Jinja takes a while.
        from sidecar.adapters.template import template_of

        try:
            files = _files(Path(path))
            marks = _marks(files)  # first: a change while we read is found the next time
            if known is not None and known.marks == marks:
                return known
            template = template_of({name: _read(file) for name, file in files.items()}, clock=self._clock)
        except (OSError, ValueError) as exc:
            why = f"cannot be read: {exc.strerror or exc}" if isinstance(exc, OSError) else str(exc)
            last = None if known is None else known.template
            return _Found(last, f"{why}; the one that was read before stays" if last is not None else why, None)
        return _Found(template, "", marks)


def _paths(endpoints: Iterable[Endpoint]) -> frozenset[str]:
    return frozenset(endpoint.chat_template for endpoint in endpoints if endpoint.chat_template)


def _files(path: Path) -> dict[str, Path]:
    """The files that say it, by the name that a model folder gives each. Raises OSError where there are none."""
    from sidecar.adapters.template import FILES, TEMPLATE

    folder = path if path.is_dir() else path.parent
    files = {name: folder / name for name in FILES if (folder / name).exists()}
    if folder is not path:
        path.stat()
        files[TEMPLATE] = path
    return files


def _marks(files: dict[str, Path]) -> _Marks:
    stats = [(str(file), file.stat()) for file in files.values()]
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise OSError("not a file")  # a pipe or a device could keep us reading for ever
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"{path.name} exceeds {MAX_FILE_BYTES} bytes")
    return data
