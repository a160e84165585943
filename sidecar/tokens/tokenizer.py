"""A model's own tokenizer, by Hugging Face's `tokenizers`: the one module that imports it, where a policy names a file.

What was measured of 0.23 decides how it is called (docs/tokens.md): `encode` holds the interpreter all the while, 0.4 s
for a megabyte; `encode_batch_fast` lets it go, and keeps it only to take the text and to free the result, 0.3 ms for
32 KB. Its counts are the same. A batch of one in the caller's thread: the library's own threads stay unused.

Reading a file holds the interpreter: 80 ms for a vocabulary of 49,000, 200 ms for one of 129,000. Nothing in the
library reads without: so a file is read once, when it changed, and at the start before anybody is served.

A tokenizer may be used by several threads at once: nothing waits in it (its cache of words is left out for a moment
where another thread writes).
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import tokenizers

NAME: Final = "tokenizer.json"

MAX_FILE_BYTES: Final = 256 << 20
"""The largest of well-known models have 34 MB."""

Marks = tuple[str, int, int, int]


class Tokenizer:
    """Counts texts; `marks` tell whether its file changed since."""

    __slots__ = ("_encode", "marks")

    def __init__(self, tokenizer: "tokenizers.Tokenizer", marks: Marks) -> None:
        # What a file may ask for, and no count is of: texts cut or filled up to a length.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._encode = tokenizer.encode_batch_fast
        self.marks = marks

    def count(self, text: str) -> int:
        """Tokens of a text, without those that begin or end one. Raises what the library raises."""
        return len(self._encode([text], add_special_tokens=False)[0])


def file_of(path: str) -> Path:
    """The file of a path as policies write it: itself, or the one in its folder."""
    there = Path(path)
    return there / NAME if there.is_dir() else there


def marks_of(path: str) -> Marks:
    """What changes when the file does. Raises OSError."""
    file = file_of(path)
    stat = file.stat()
    return str(file.resolve()), stat.st_ino, stat.st_size, stat.st_mtime_ns


def read(path: str) -> Tokenizer:
    """Reads a file. Raises OSError, and ValueError with what to do for what is no tokenizer."""
    marks = marks_of(path)
    file = file_of(path)
    if not file.is_file():
        raise OSError("not a file")  # a pipe or a device could keep us reading for ever
    if marks[2] > MAX_FILE_BYTES:
        raise ValueError(f"{file.name} exceeds {MAX_FILE_BYTES} bytes")
    # Its own threads would compete with the loop for the cores. The variable is its only switch.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        import tokenizers
    except ModuleNotFoundError as exc:
        raise ValueError("the package `tokenizers` is not installed: pip install 'llm-sidecar[tokens]'") from exc
    try:
        return Tokenizer(tokenizers.Tokenizer.from_buffer(file.read_bytes()), marks)
    except OSError:
        raise
    except BaseException as exc:  # a panic of the library is no Exception
        if isinstance(exc, (KeyboardInterrupt, SystemExit)):
            raise
        raise ValueError(f"{file.name} is no tokenizer that `tokenizers` reads: {exc}") from exc
