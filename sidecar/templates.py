"""Chat templates on disk: those that the policy in force names, read when it is read and never on a request's way.

1. A path is a Jinja file, or a model folder as it comes from a hub; a file's special tokens are those of the tokenizer
   files beside it, if there are any.
2. Read again with each load of the policy (SIGHUP asks for one), and only what changed on disk: a tokenizer's file has
   tens of megabytes.
3. What cannot be read or is no template is a warning of the policy, and its endpoints take no chats; one that was good
   before stays as it was. Neither keeps a policy from being applied: the rest of its fleet is well.
4. The policy that is being replaced serves on until the next one is applied: its templates stay one reading longer.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from sidecar.policy.schema import Snapshot

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


class Templates:
    """The chat templates by path as policies write it. `clock`: seconds since the epoch, for templates that say it."""

    __slots__ = ("_clock", "_found", "_named")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._found: dict[str, _Found] = {}
        self._named: frozenset[str] = frozenset()

    def of(self, path: str) -> "ChatTemplate | None":
        """The template; None: there is none, or a bad one."""
        found = self._found.get(path)
        return None if found is None else found.template

    def why_not(self, path: str) -> str:
        """Why `of` gives None, in words for whoever asked for a chat."""
        found = self._found.get(path)
        if found is not None and found.why:
            return f"its chat_template {path}: {found.why}"
        return f"its chat_template {path} has not been read" if path else "its endpoint has no chat_template"

    def read(self, snapshot: Snapshot) -> Snapshot:
        """Reads what its endpoints name, and gives it back with warnings of what is bad.

        Waits for the disk; may be called on another thread than the requests', one call at a time.
        """
        named = frozenset(
            endpoint.chat_template
            for service in snapshot.services
            for endpoint in service.endpoints
            if endpoint.chat_template
        )
        found = {path: known for path, known in self._found.items() if path in self._named or path in named}
        for path in named:
            found[path] = self._look(path, found.get(path))
        self._found, self._named = found, named
        bad = [f"chat_template {path}: {found[path].why}" for path in sorted(named) if found[path].why]
        return replace(snapshot, warnings=(*snapshot.warnings, *bad)) if bad else snapshot

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
