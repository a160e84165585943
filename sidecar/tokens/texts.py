"""What of a prompt is text to the model, found in its JSON without building it, and cut into pieces to be counted.

1. Counted are contents, parts that are text, names, calls of tools and their results, and the definitions of tools as
   the JSON that they are; roles, types, ids and the JSON around them are not: what a template writes in their place is
   learnt from what the engine reports (`overhead`). Prompts of token ids are as long as they are.
2. Pictures and sound are no text. Each counts as MEDIA_TOKENS, and the prompt's count is then an estimate.
3. A prompt with more than MOST_OBJECTS objects, nested too deeply, or of a shape that is not known cannot be counted
   (`Uncountable`), and is estimated: building it would take the loop's time, or nobody knows what a model reads of it.
4. Pieces have at most PIECE_BYTES, so that whoever counts has its turn over soon. A text is cut before a space between
   words or after CJK punctuation, where all known tokenizers cut it themselves: the sum is the count of the whole.
   Where there is none of these in a piece's last quarter (one letter a million times) it is cut between two
   characters, and a token that lay across the cut is counted as the few that make it up: some in 10,000.
5. JSON that only Python reads (lone halves of surrogate pairs, NaN) is read as Python's engines do where it is short.
   A lone half is counted as U+FFFD, and so is what is no UTF-8.
"""

import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from sidecar.tokens import shapes
from sidecar.wire.lenient import python_json

PIECE_BYTES: Final = 32 * 1024
"""Of raw JSON. Some 8 ms of a thread; what holds the interpreter of it (decoding, freeing the result) is 0.3 ms."""

MOST_BYTES: Final = 4 << 20
"""A million tokens of English: few models have a longer context. Finding where its values end takes 1 ms."""

MOST_ESCAPES: Final = 250_000
"""Backslashes: each takes sixteen times as long as another byte."""

BREATHE: Final = 200
"""Messages or parts that are looked at in one go: 0.3 ms."""

MOST_OBJECTS: Final = 4000
"""Messages, parts, calls: what is built of them takes 2 ms."""

LENIENT_BYTES: Final = 64 * 1024
"""The most that is read as Python does, which takes half a millisecond."""

MOST_TEXTS_BYTES: Final = 1 << 20
"""Of several prompts in one request with more commas than that: they are built, in a millisecond."""

MEDIA_TOKENS: Final = 600
"""Of a picture: between the 256 and 1,500 of models that are common today. What a service really takes is learnt by
its estimator where the engine reports it."""

_MEDIA: Final = frozenset(
    {"image", "image_url", "input_image", "audio", "input_audio", "audio_url", "video", "video_url", "file", "document",
     "input_file"}
)  # fmt: skip
_STRINGS: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}]', re.DOTALL)
_LOW: Final = re.compile(rb"\\u[dD][c-fC-F]")
_CJK_STOPS: Final = ("\u3002".encode(), "\uff0c".encode(), "\u3001".encode())
_LETTERS: Final = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_NAMES: Final = ("messages", "prompt", "input", "system", "instructions", "tools", "functions")


class Uncountable(Exception):
    """A prompt that is estimated; says why."""


class Texts:
    """What is to be counted: raw JSON, a string each or a value that is text as it stands."""

    __slots__ = ("first", "ids", "media", "messages", "size", "texts")

    def __init__(self) -> None:
        self.texts: list[Any] = []
        self.messages = 0
        self.first = 0
        """How many of the texts are the first message's."""
        self.ids = 0
        self.media = 0
        self.size = 0
        """Bytes to be counted."""

    def add(self, text: Any) -> None:
        """A text, where there is one."""
        if text is shapes.ABSENT:
            return
        size = memoryview(text).nbytes
        if size and not (size == 4 and bytes(text) == b"null"):
            self.texts.append(text)
            self.size += size

    @property
    def guessed(self) -> int:
        """Tokens beside the texts'."""
        return self.ids + MEDIA_TOKENS * self.media


def check(prompt: bytes) -> Iterator[None]:
    """Raises `Uncountable` for what takes too long to read; yields where others may have a turn, as all here does."""
    if len(prompt) > MOST_BYTES:
        raise Uncountable("too large")
    if len(prompt) > MOST_ESCAPES and prompt.count(b"\\") > MOST_ESCAPES:
        raise Uncountable("too many escapes")
    yield
    if prompt.count(b"{") > MOST_OBJECTS:
        # In a text no quote follows a brace, but a backslash.
        objects = 0
        for opening in (b'{"', b"{}", b"{ ", b"{\n", b"{\r", b"{\t"):
            yield
            objects += prompt.count(opening)
            if objects > MOST_OBJECTS:
                raise Uncountable("too many objects")
    yield


def values_of(prompt: bytes) -> tuple[list[Any], bool]:
    """The JSON values of a prompt that was checked, raw, and whether they are its own bytes. Raises `Uncountable`.

    They are not where only Python reads it: a whole body then, of which the texts are written anew.
    """
    try:
        values: list[Any] = shapes.decode_values(prompt)
    except (msgspec.DecodeError, RecursionError):
        return _lenient(prompt), False
    if values and first_byte(values[0]) == b"{":
        return _lenient(prompt), False  # a whole body, in which no field of ours was found
    return values, True


def read(value: Any, found: Texts) -> Iterator[None]:
    """Adds to `found` what of a value is text. Raises `Uncountable`."""
    try:
        yield from _read(value, found)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise Uncountable("of an unknown shape") from exc


def first_byte(value: Any) -> bytes:
    """The first byte of a value, b"" of none."""
    if value is shapes.ABSENT:
        return b""
    return bytes(memoryview(value)[:1])


def first_end(prompt: bytes) -> int:
    """Where the first message of an array ends; 0 where that is hard to say."""
    depth = 0
    for count, found in enumerate(_STRINGS.finditer(prompt, 1)):
        if count > 64:
            break
        what = prompt[found.start()]
        if what == 0x7B:
            depth += 1
        elif what == 0x7D:
            depth -= 1
            if depth == 0:
                return found.end()
    return 0


def pieces_of(raw: Any) -> Iterator[str]:
    """A raw value as texts of at most PIECE_BYTES of its JSON (rule 4)."""
    data = bytes(raw)
    if data[:1] == b'"':
        start, end = 1, len(data) - 1
        while start < end:
            stop = cut(data, start, end)
            yield _decoded(data[start:stop])
            start = stop
    else:
        start, end = 0, len(data)
        while start < end:
            stop = cut(data, start, end)
            yield data[start:stop].decode("utf-8", "replace")
            start = stop


def cut(data: bytes, start: int, end: int) -> int:
    """Where the piece of a JSON text that begins at `start` ends: never inside an escape or a character."""
    if end - start <= PIECE_BYTES:
        return end
    limit = start + PIECE_BYTES
    least = limit - PIECE_BYTES // 4
    at = limit
    for _ in range(16):
        at = data.rfind(b" ", least, at)
        if at < 0:
            break
        if data[at - 1] in _LETTERS and data[at + 1] in _LETTERS:
            return at
    stop = max(data.rfind(mark, least, limit) for mark in _CJK_STOPS)
    if stop >= 0:
        return stop + 3
    # Before the last run of backslashes, or two characters on from an escape that is far enough back.
    at = limit
    for _ in range(3):
        if data[at] & 0xC0 != 0x80:
            break
        at -= 1
    escape = data.rfind(b"\\", at - 12, at)
    if escape < 0:
        return at
    run = start + len(data[start : escape + 1].rstrip(b"\\"))
    if run > start:
        # The second half of a pair goes with the first.
        if run - 6 > start and _LOW.match(data, run) and data[run - 6 : run - 4] == b"\\u":
            return run - 6
        return run
    return start + (escape - start) // 2 * 2


def _decoded(inner: bytes) -> str:
    try:
        return shapes.decode_text(b'"%b"' % inner)
    except msgspec.DecodeError:
        pass
    try:
        text = python_json(b'"%b"' % inner.decode("utf-8", "replace").encode())
    except (ValueError, RecursionError):
        return inner.decode("utf-8", "replace")
    return str(text).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _lenient(prompt: bytes) -> list[Any]:
    if len(prompt) > LENIENT_BYTES:
        raise Uncountable("no JSON that is read fast")
    try:
        body = python_json(prompt)
    except (ValueError, RecursionError) as exc:
        raise Uncountable("no JSON") from exc
    if not isinstance(body, dict):
        raise Uncountable("no JSON object")
    found = [shapes.encode(_mended(body[name], 0)) for name in _NAMES if body.get(name)]
    if not found:
        raise Uncountable("of an unknown API")
    return found


def _mended(value: object, depth: int) -> object:
    if depth > 40:
        raise Uncountable("nested too deeply")
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_mended(each, depth + 1) for each in value]
    if isinstance(value, dict):
        return {str(_mended(name, depth)): _mended(each, depth + 1) for name, each in value.items()}
    return value


def _read(value: Any, found: Texts) -> Iterator[None]:
    first = first_byte(value)
    if first == b"[":
        yield from _read_array(value, found)
    elif first in (b'"', b"{"):
        found.add(value)


def _read_array(data: Any, found: Texts) -> Iterator[None]:
    inside = bytes(memoryview(data)[1:64]).lstrip()
    opening = inside[:1]
    if opening == b"[":
        opening = inside[1:].lstrip()[:1]
        if opening not in _DIGITS:
            raise Uncountable("of an unknown shape")
    if opening in _DIGITS:
        found.ids += bytes(data).count(b",") + 1
    elif opening == b"{":
        messages = shapes.decode_messages(data)
        for number, message in enumerate(messages):
            if _is_plain(message):
                found.messages += 1
                found.add(message.content)
            else:
                yield from _read_message(message, found)
            if number == 0 and found.messages:
                found.first = len(found.texts)
            if number % BREATHE == 0:
                yield
    elif opening == b'"':
        if bytes(data).count(b",") <= MOST_OBJECTS:
            for raw in shapes.decode_raws(data):
                found.add(raw)
        elif memoryview(data).nbytes <= MOST_TEXTS_BYTES:
            for text in shapes.decode_texts(data):
                found.add(shapes.encode(text))
        else:
            raise Uncountable("too many texts")


_DIGITS: Final = tuple(bytes((digit,)) for digit in b"0123456789")


def _is_plain(message: shapes.Message) -> bool:
    """Whether its content is all its text, as of most."""
    absent = shapes.ABSENT
    return (
        message.tool_calls is absent
        and message.name is absent
        and message.description is absent
        and message.reasoning_content is absent
        and message.function_call is absent
        and message.arguments is absent
        and message.output is absent
        and message.function is absent
        and message.parameters is absent
        and message.input_schema is absent
        and first_byte(message.content) == b'"'
    )


def _read_message(message: shapes.Message, found: Texts) -> Iterator[None]:
    is_tool = False
    for defined in (message.function, message.parameters, message.input_schema):
        if defined is not shapes.ABSENT:  # a tool's definition: its name and description are in it, or beside it
            found.add(defined)
            is_tool = True
    found.messages += not is_tool
    found.add(message.name)
    found.add(message.description)
    found.add(message.reasoning_content)
    found.add(message.arguments)
    yield from _read_content(message.content, found, 0)
    yield from _read_content(message.output, found, 0)
    if first_byte(message.tool_calls) == b"[":
        for call in shapes.decode_tool_calls(message.tool_calls):
            found.add(call.function.name)
            found.add(call.function.arguments)
    if first_byte(message.function_call) == b"{":
        function = shapes.decode_function(message.function_call)
        found.add(function.name)
        found.add(function.arguments)


def _read_content(content: Any, found: Texts, depth: int) -> Iterator[None]:
    if first_byte(content) != b"[":
        found.add(content)
        return
    if depth > 3:
        raise Uncountable("nested too deeply")
    for number, part in enumerate(shapes.decode_parts(content), 1):
        if part.type in _MEDIA:
            found.media += 1
        else:
            for each in (part.text, part.refusal, part.thinking, part.name, part.input):
                found.add(each)
            yield from _read_content(part.content, found, depth + 1)
        if number % BREATHE == 0:
            yield
