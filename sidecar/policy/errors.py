"""What is wrong with policy files, told all at once and in place."""

import re
from collections.abc import Iterable, Sequence

import msgspec


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


Step = str | int
"""A key or an index on the way from a document's root."""


def path_of(steps: Iterable[Step]) -> str:
    """`$.services[0].name`."""
    return "$" + "".join(f"[{step}]" if isinstance(step, int) else f".{quote(step)}" for step in steps)


def quote(text: str) -> str:
    """Text of a file for a message: short, on one line, and quoted unless it is a plain word."""
    short = text if len(text) <= 60 else text[:57] + "..."
    return short if re.fullmatch(r"[A-Za-z0-9_-]+", short) else msgspec.json.encode(short).decode()
