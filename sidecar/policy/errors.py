"""What is wrong with policy files, told all at once and in place."""

import re
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

# Nobody reads more at once, and a file of a million wrong keys must not cost a gigabyte.
MAX_ERRORS: Final = 1000


class PolicyError(msgspec.Struct, frozen=True):
    """One fault: `line` counts from 1 (0: the file as a whole), `path` starts at `$`, the document's root."""

    file: str
    line: int
    path: str
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.path}: {self.message}"


class PolicyErrors(Exception):
    """Every fault of every file, in the order of the files."""

    def __init__(self, errors: Sequence[PolicyError]) -> None:
        super().__init__("\n".join(str(error) for error in errors))
        self.errors = tuple(errors)


class Faults:
    """Collects errors, up to `MAX_ERRORS`."""

    __slots__ = ("errors",)

    def __init__(self) -> None:
        self.errors: list[PolicyError] = []

    def add(self, error: PolicyError) -> None:
        """TooManyFaults when the last one fits that is told."""
        self.errors.append(error)
        if len(self.errors) >= MAX_ERRORS:
            raise TooManyFaults


class Within(Faults):
    """Hands errors on to `faults`, as those of what is at `place` there: their paths begin at it."""

    __slots__ = ("_faults", "_place")

    def __init__(self, faults: Faults, place: str) -> None:
        super().__init__()
        self._faults = faults
        self._place = place

    def add(self, error: PolicyError) -> None:
        """As `faults` does."""
        self._faults.add(msgspec.structs.replace(error, path=self._place + error.path.removeprefix("$")))


class TooManyFaults(Exception):
    """Nothing more is read; what was found so far is told."""


Step = str | int
"""A key or an index on the way from a document's root."""


class Fault(msgspec.Struct, frozen=True):
    """A fault at the steps from the document's root. `needs`: other places it was concluded from."""

    steps: tuple[Step, ...]
    message: str
    needs: tuple[tuple[Step, ...], ...] = ()


def path_of(steps: Iterable[Step]) -> str:
    """`$.services[0].name`."""
    return "$" + "".join(f"[{step}]" if isinstance(step, int) else f".{quote(step)}" for step in steps)


def quote(text: str) -> str:
    """Text of a file for a message: short, on one line, and quoted unless it is a plain word."""
    short = text if len(text) <= 60 else text[:57] + "..."
    return short if re.fullmatch(r"[A-Za-z0-9_-]+", short) else msgspec.json.encode(short).decode()
