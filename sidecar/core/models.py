"""Which of many has a model: exact names first, else the first glob, without asking each of a thousand services.

Names that the policy spells out are found by dictionary. Globs are filed under what stands before their first special
character, and a name is only held against those that its own beginning finds. Globs that begin with one (`*`, `*-7b`)
are held against every name that no dictionary knows.
"""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from re import compile as pattern
from typing import Final, Generic, TypeVar

_T = TypeVar("_T")

MAX_MODEL_NAME: Final = 256  # longer ones are looked up each time: what is kept must not be as long as a client likes

MAX_TEXT: Final = 1024  # a megabyte against a glob with three stars takes 24 ms

_SPECIAL: Final = pattern(r"[*?\[]")


class ModelTable(Generic[_T]):
    """`entries` (globs, owner) in the policy's order: where several match, the first wins."""

    __slots__ = ("_exact", "_globs", "_lengths")

    def __init__(self, entries: Iterable[tuple[tuple[str, ...], _T]]) -> None:
        self._exact: dict[str, _T] = {}
        self._globs: dict[str, list[tuple[int, str, _T]]] = {}
        for order, (globs, owner) in enumerate(entries):
            for glob in globs:
                self._exact.setdefault(glob, owner)
                special = _SPECIAL.search(glob)
                if special is not None:
                    self._globs.setdefault(glob[: special.start()], []).append((order, glob, owner))
        self._lengths = sorted({len(start) for start in self._globs})

    def find(self, model: str) -> _T | None:
        """The owner of `model`; None if none has it."""
        exact = self._exact.get(model)
        if exact is not None:
            return exact
        found: tuple[int, _T] | None = None
        for length in self._lengths:
            if length > len(model):
                break
            for order, glob, owner in self._globs.get(model[:length], ()):
                if found is not None and order >= found[0]:
                    break
                if matches((glob,), model):
                    found = order, owner
        return None if found is None else found[1]


def matches(globs: tuple[str, ...], model: str) -> bool:
    """Whether a model name is among globs (`*`, `?`, `[...]`; case counts). One beyond `MAX_TEXT` fits `*` alone."""
    return any(glob == "*" or glob == model or (len(model) <= MAX_TEXT and fnmatchcase(model, glob)) for glob in globs)
