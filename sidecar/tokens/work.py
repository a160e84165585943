"""Counting one prompt: what of it is known, what is left to be counted, piece by piece, and what is known then.

A prompt is a list of messages or a text, and what stands beside it (`wire.prompt`): standing orders, definitions of
tools. Of the first the longest known prefix is taken and the rest counted; each of the others is the same from request
to request, and is known as a whole or not at all (`Beside`).

Runs on the loop where little is left, else on a thread: it touches nothing but itself, and reads `Beside`.
"""

import re
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Final

from sidecar.tokens import texts
from sidecar.tokens.prefixes import Known
from sidecar.tokens.tokenizer import Tokenizer

TURN_BYTES: Final = 8 * 1024
"""Of small texts that are counted between two turns."""

MOST_BESIDE: Final = 4096

GUESSED_RATIO: Final = 1 / 64
MOST_GUESSED_BYTES: Final = 4096
"""Of what is known: an end that is no longer is not counted, since a third more or less of it is half a hundredth of
the whole; and however much is known of however few tokens, it has no more bytes than that."""

_NO_TEXT: Final = re.compile(rb'"type"\s*:\s*"(?!(?:input_|output_)?text"|message"|function)')
_BLANK: Final = b" \t\r\n"


class Beside:
    """The counts of whole values: standing orders and tools, by the hash of their bytes."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: OrderedDict[int, int] = OrderedDict()

    def get(self, key: int) -> int | None:
        """Tokens; None: not known."""
        return self._counts.get(key)

    def add(self, key: int, tokens: int) -> None:
        """Of the loop alone."""
        self._counts[key] = tokens
        self._counts.move_to_end(key)
        if len(self._counts) > MOST_BESIDE:
            self._counts.popitem(last=False)

    def clear(self) -> None:
        """All is unknown again."""
        self._counts.clear()


class Work:
    """One prompt to be counted by one tokenizer.

    Once it ran: `tokens` of its texts, `messages` of the whole prompt, `media`: some are a guess, and what is to be
    remembered of it: `found` prefixes and what stands `found_beside`.
    """

    __slots__ = (
        "_beside",
        "_left",
        "_others",
        "_plain",
        "_values",
        "found",
        "found_beside",
        "known",
        "media",
        "messages",
        "prompt",
        "salt",
        "size",
        "tokenizers",
        "tokens",
    )

    def __init__(
        self, prompt: bytes, salt: int, known: Known | None, tokenizers: tuple[Tokenizer, ...], beside: Beside
    ) -> None:
        self.prompt = prompt
        self.salt = salt
        self.known = known
        self.tokenizers = tokenizers
        self.size = len(prompt) - (0 if known is None else known.end)
        self.tokens = 0 if known is None else known.tokens
        self.messages = 0 if known is None else known.messages
        self.media = known is not None and known.media
        self.found: list[Known] = []
        self.found_beside: list[tuple[int, int]] = []
        self._beside = beside
        self._left: texts.Texts | None = None
        self._others: list[tuple[int, texts.Texts]] = []
        self._plain = True
        self._values: list[Any] = []

    def guess(self) -> bool:
        """Has the prompt counted without a look at its end, where that is short messages beside what is known of them:
        by how many tokens those have. It is not remembered: with what comes next it may be long enough."""
        known = self.known
        if known is None or known.media or not known.messages:
            return False
        prompt = self.prompt
        end = prompt.find(b"]\n", known.end) + 1 or len(prompt)
        size = end - known.end
        if size > MOST_GUESSED_BYTES or size > GUESSED_RATIO * known.end:
            return False
        tail = prompt[known.end : end]
        if _NO_TEXT.search(tail) is not None:
            return False
        tokens = size * known.tokens // known.end
        if end < len(prompt):
            for value in prompt[end + 1 :].split(b"\n"):
                beside = self._beside.get(hash((self.salt, value)))
                if beside is None:
                    return False
                tokens += beside
        self.tokens += tokens
        self.messages += tail.count(b'"role"')
        return True

    def prepare(self) -> None:
        """Finds what is left: `size` bytes of it. Raises `Uncountable`."""
        for _ in self._prepare():
            pass

    def _prepare(self) -> Iterator[None]:
        tail = self._tail()
        yield from texts.check(tail)
        values, self._plain = texts.values_of(tail)
        yield
        left = texts.Texts()
        if self.known is None or self.known.messages:
            if values:
                yield from texts.read(values[0], left)
            self._values = values[1:]
        else:
            self._values = values
        size = left.size
        for value in self._values:
            key = hash((self.salt, bytes(value)))
            tokens = self._beside.get(key)
            if tokens is None:
                other = texts.Texts()
                yield from texts.read(value, other)
                self._others.append((key, other))
                size += other.size
            else:
                self.tokens += tokens
        self.size = size
        self._left = left

    def run(self, lane: int) -> Iterator[bool]:
        """Counts what is left, a turn at a time; a turn that held the interpreter all the while gives true.

        Raises `Uncountable`, and what the tokenizer raises.
        """
        if self._left is None:
            for _ in self._prepare():
                yield True
        left = self._left
        assert left is not None
        before = 0 if self.known is None else self.known.tokens
        count = self.tokenizers[lane].count
        first = head = 0
        counted = 0
        for number, raw in enumerate(left.texts):
            if number == left.first:
                first = head
            for piece in texts.pieces_of(raw):
                head += count(piece)
                counted += len(piece)
                if counted >= TURN_BYTES:
                    counted = 0
                    yield False
        head += left.guessed
        self.tokens += head
        for key, other in self._others:
            tokens = other.guessed
            for raw in other.texts:
                for piece in texts.pieces_of(raw):
                    tokens += count(piece)
                    counted += len(piece)
                    if counted >= TURN_BYTES:
                        counted = 0
                        yield False
            self.tokens += tokens
            self.found_beside.append((key, tokens))
            self.media = self.media or other.media > 0
        self.messages += left.messages
        self.media = self.media or left.media > 0
        if self._plain and not left.ids:
            self._remember(before + head, first if len(left.texts) > left.first > 0 and not left.media else 0)

    def _tail(self) -> bytes:
        """What is left, as JSON."""
        known = self.known
        if known is None:
            return self.prompt
        tail = self.prompt[known.end :]
        if not known.messages:
            return tail.lstrip()
        tail = tail.lstrip()
        return b"[" + (tail[1:] if tail[:1] == b"," else tail)

    def _remember(self, tokens: int, first: int) -> None:
        prompt = self.prompt
        end = len(prompt) - sum(memoryview(value).nbytes + 1 for value in self._values)
        while end > 0 and prompt[end - 1] in _BLANK:
            end -= 1
        if self.messages:
            if prompt[end - 1 : end] != b"]":
                return  # blanks where none are usual
            end -= 1
            while end > 0 and prompt[end - 1] in _BLANK:
                end -= 1
            if first and self.known is None:
                # What a service says first to everybody: a new conversation is counted from there.
                begins = texts.first_end(prompt)
                if begins:
                    self.found.append(Known(begins, first, 1, False))
        elif prompt[end - 1 : end] != b'"':
            return
        if self.known is None or self.known.end != end:
            self.found.append(Known(end, tokens, self.messages, self.media))
