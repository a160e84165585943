"""What was counted before, by the bytes it came in: of a conversation that grows only the end is counted.

1. A prompt's bytes are hashed in blocks, each with what came before it, so that a block's hash says all up to its end.
   What is known is kept under the last block that lies before its end, with its length and the hash of what is left:
   a prompt is looked up by one walk over its blocks, however it goes on.
2. Hashes are Python's own of bytes: SipHash with a key of this process, 4 GB/s. Who does not know the key finds no two
   texts of one hash, so nobody can have another's prompt counted as his own was; xxHash would be five times as fast
   and holds against nobody, BLAKE2 holds and takes 130 us for 128 KB. 64 bits: with 100,000 entries one in a billion
   look-ups of a prompt that is not there finds one.
3. The walk begins with a salt: which tokenizer it was, and which reading of its file. Another is another cache.
4. Bounded: MOST_BLOCKS of blocks, MOST_ENDS in each; what was not asked for longest goes first. An entry has 300 bytes,
   a prompt's bytes are not kept.
"""

from collections import OrderedDict
from typing import Final

BLOCK: Final = 4096
FIRST: Final = (256, 1024)
"""Ends of the first blocks: short prompts are many, and differ in what stands in front."""

MOST_BLOCKS: Final = 16_384
MOST_ENDS: Final = 16
"""Together 80 MB at the very worst, which takes 262,144 prompts; 5 MB for one end a block, as conversations have."""


class Known:
    """A prefix that was counted: its text's tokens, the messages in it, and where it ends.

    `messages` 0: it is no list of messages, but all of a text. `media`: some of the tokens are a guess.
    """

    __slots__ = ("end", "media", "messages", "tokens")

    def __init__(self, end: int, tokens: int, messages: int, media: bool) -> None:
        self.end = end
        self.media = media
        self.messages = messages
        self.tokens = tokens


class Prefixes:
    """The counts of one process. `salt` is a number that tells tokenizers apart."""

    __slots__ = ("_blocks", "_walked", "_walked_prompt", "_walked_salt", "entries")

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, dict[tuple[int, int], Known]] = OrderedDict()
        self.entries = 0
        # The last walk: who looks a prompt up adds what is new of it next.
        self._walked_prompt = b""
        self._walked_salt = 0
        self._walked: list[int] = []

    def __len__(self) -> int:
        return self.entries

    def find(self, prompt: bytes, salt: int) -> Known | None:
        """The longest prefix that is known."""
        walked = _walk(prompt, salt, len(prompt))
        self._walked_prompt, self._walked_salt, self._walked = prompt, salt, walked
        blocks = self._blocks
        for index in range(len(walked) - 1, -1, -1):
            at = walked[index]
            ends = blocks.get(at)
            if ends is None:
                continue
            begin = begin_of(index)
            best: tuple[int, int] | None = None
            hashes: dict[int, int] = {}
            for key in ends:
                end, left = key
                if end > len(prompt) or (best is not None and end < best[0]):
                    continue
                if end not in hashes:
                    hashes[end] = hash(prompt[begin:end])
                if hashes[end] == left:
                    best = key
            if best is not None:
                blocks.move_to_end(at)
                known = ends[best] = ends.pop(best)  # asked for last
                return known
        return None

    def add(self, prompt: bytes, salt: int, known: Known) -> None:
        """What is known of the first `known.end` >= 1 bytes."""
        end = known.end
        if prompt is self._walked_prompt and salt == self._walked_salt:
            index = index_of(end)
            at = self._walked[index]
        else:
            walked = _walk(prompt, salt, end)
            index = len(walked) - 1
            at = walked[index]
        ends = self._blocks.get(at)
        if ends is None:
            ends = self._blocks[at] = {}
            while len(self._blocks) > MOST_BLOCKS:
                _, gone = self._blocks.popitem(last=False)
                self.entries -= len(gone)
        else:
            self._blocks.move_to_end(at)
        key = (end, hash(prompt[begin_of(index) : end]))
        if ends.pop(key, None) is None:
            self.entries += 1
        ends[key] = known
        if len(ends) > MOST_ENDS:
            del ends[next(iter(ends))]
            self.entries -= 1

    def clear(self) -> None:
        """All is unknown again."""
        self._blocks.clear()
        self.entries = 0
        self._walked_prompt, self._walked = b"", []


def begin_of(index: int) -> int:
    """Where the block begins that has `index` blocks before it."""
    if index <= len(FIRST):
        return FIRST[index - 1] if index else 0
    return (index - len(FIRST)) * BLOCK


def index_of(end: int) -> int:
    """How many blocks lie before the one in which a prefix of `end` >= 1 bytes ends."""
    if end <= BLOCK:
        return sum(end > stop for stop in FIRST)
    return len(FIRST) + (end - 1) // BLOCK


def _walk(prompt: bytes, salt: int, end: int) -> list[int]:
    """The hash of all before each block that begins before `end`."""
    at = hash((salt,))
    walked = [at]
    begin = 0
    for stop in FIRST:
        if stop >= end:
            return walked
        at = hash((at, prompt[begin:stop]))
        walked.append(at)
        begin = stop
    stop = BLOCK
    while stop < end:
        at = hash((at, prompt[begin:stop]))
        walked.append(at)
        begin = stop
        stop += BLOCK
    return walked
