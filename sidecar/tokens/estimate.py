"""How many tokens a prompt probably has, from a look at its bytes: learnt from what engines say of others.

1. What is looked at: up to SAMPLE_BYTES of the raw JSON, all over it. Bytes are put into classes (consonants and rare
   letters, capitals, digits, marks, leading bytes of CJK, ...), and classes, pairs and runs of them are counted: words'
   beginnings, marks after spaces, runs of digits and what else makes a tokenizer begin a token, and five consonants in
   a row, which few words have. C does it, 80 us for any size: a class is a bit in each byte of a number as long as the
   text, and a pair of classes is where one number and the other, shifted, have theirs.
2. An estimate is a weighted sum of these counts. Weights are learnt for each model, and in it for each script (English
   and its like, code, CJK, others), since a merge that is common in one is rare in another; a script of which little
   was seen is estimated by the model's weights, a model of which little was seen by those that fit two tokenizers of
   today (`PRIOR`, bench.qos.tokens): within 15 % of most.
3. Learning is a Kalman filter over the weights: each prompt moves them as far as its surprise, in relation to its
   size, exceeds what was to be expected. It forgets slowly, so that it follows what people write.
4. Engines lie, and models are switched. A surprise beyond SURPRISE deviations moves weights no further than that many
   would; SWITCH of them in a row is another model, and all is learnt anew from where it stands. Numbers that no
   tokenizer gives (more tokens than bytes, fewer than one in 64) are not looked at. Whoever's errors stay beyond
   TRUST is not believed: the estimates are the prior's until it does better. Whatever was learnt, an estimate is
   within BOUND times the prior's.
5. Its own error is kept, of each estimate before it is learnt from.

Pictures and sound in a prompt are left out of the look, and each counts as what one takes (`texts.MEDIA_TOKENS`).
"""

from typing import Final

from sidecar.tokens.texts import MEDIA_TOKENS

SAMPLE_BYTES: Final = 4096
"""More is more exact, and takes longer: of 128 KB the error is 1-2 % in the median, half of it the sample's."""

SAMPLE_STEP: Final = 64
"""Many short looks: text is more like its neighbours than like the rest."""

CONST: Final = 0
CONTINUATION: Final = 1
DIGITS: Final = 3
MARKS: Final = 7
HAN: Final = 17
FEATURES: Final[tuple[str, ...]] = (
    "continuation bytes", "mark after a space", "digits", "backslashes", "capitals", "word after a space", "marks",
    "letter after an escape", "five consonants", "space after an escape", "escape after a mark", "four marks",
    "two digits", "rare letters", "leading bytes EE and EF", "letter after a mark", "leading bytes E4 to E9",
    "mark after an escape", "two marks", "two spaces", "small letters", "four spaces", "mark after a backslash",
    "leading bytes E0 to E3",
)  # fmt: skip
"""Chosen one by one by how much each takes off the errors of two tokenizers on English, Chinese and code."""

WIDTH: Final = 25

PRIOR: Final[tuple[float, ...]] = (
    8.0, 0.4, 0.454, 1.803, 0.236, 0.213, 0.637, 0.132, 1.577, 1.183, 1.192, 0.646, 0.418,
    -1.02, 0.388, 0.043, 1.186, -0.212, 1.438, -0.428, 0.186, 0.068, -0.177, -0.986, -0.018,
)  # fmt: skip

SCRIPTS: Final[tuple[str, ...]] = ("latin", "code", "cjk", "other")

START_SD: Final = 0.5
"""How far a weight may be from the prior's: tokens per occurrence."""

NOISE: Final = 0.05 * 0.05
"""What is left of the error when all weights are right, as a ratio, squared."""

SHORT_NOISE: Final = 6.0
"""The same of short prompts, in tokens, squared: a name more or less."""

DRIFT: Final = 1e-7
SURPRISE: Final = 4.0
SWITCH: Final = 8
BOUND: Final = 3.0
TRUST: Final = 0.35

ENOUGH: Final = 40
"""Prompts of a script after which its own weights are better than the model's."""

FEW: Final = 8
"""Prompts of a model after which it is believed at all."""

RATE: Final = 0.05
"""Of the errors' moving mean: the last 20 or so."""


def _classes() -> tuple[bytes, bytes]:
    """For each byte a letter that says what it is, and bits that say it: letters are counted singly, bits in pairs."""
    kinds, bits = bytearray(b"-" * 256), bytearray(256)
    for first, last, name in ((0x80, 0xBF, "c"), (0xE0, 0xE3, "u"), (0xE4, 0xE9, "3"), (0xEE, 0xEF, "f")):
        for byte in range(first, last + 1):
            kinds[byte] = ord(name)
    for byte in range(0x20, 0x7F):
        letter = chr(byte)
        if letter.isalpha():
            kinds[byte] = ord("A" if letter.isupper() else "a")
            bits[byte] = 1
            if letter.lower() in "jkqvwxyzbg":
                bits[byte] |= 32
            if letter.lower() not in "aeiou":
                bits[byte] |= 64
        elif letter.isdigit():
            kinds[byte], bits[byte] = ord("0"), 4
        elif letter == " ":
            bits[byte] = 2
        elif letter == "\\":
            kinds[byte], bits[byte] = ord("e"), 16
        else:
            kinds[byte], bits[byte] = ord("."), 8
    return bytes(kinds), bytes(bits)


KINDS, BITS = _classes()


def _ones(size: int) -> int:
    """The lowest bit of so many bytes."""
    return int.from_bytes(b"\1" * size, "little")


_SAMPLE_ONES: Final = _ones(SAMPLE_BYTES)


class Look:
    """What was seen of a prompt: counts by feature, for the whole of it; `extra` tokens that no text is of."""

    __slots__ = ("counts", "extra", "script", "size")

    def __init__(self, counts: list[float], extra: int, script: int, size: int) -> None:
        self.counts = counts
        self.extra = extra
        self.script = script
        self.size = size


def look(prompt: bytes) -> Look:
    """Looks at a prompt."""
    size = len(prompt)
    seen = _sample(prompt)
    kinds = seen.translate(KINDS)
    extra = 0
    if 16 * kinds.count(b"A") > len(seen) and 50 * kinds.count(b"0") > len(seen):
        for mark in _MEDIA_MARKS:
            if mark in prompt:
                prompt, media = _without_media(prompt, mark)
                extra += media * MEDIA_TOKENS
        if extra:
            seen = _sample(prompt)
            kinds = seen.translate(KINDS)
    plain = seen
    if b"\\u" in seen:
        # Escaped characters, as Python's json writes them: what they stand for is looked at.
        if 20 * seen.count(b"\\u") > len(seen) and size > SAMPLE_BYTES:
            seen = _escaped_sample(prompt)
        plain = seen.decode("raw_unicode_escape", "ignore").encode("utf-8", "surrogatepass")
        kinds = plain.translate(KINDS)
    counts = _counts(plain, kinds, len(prompt) / (len(seen) or 1))
    length = len(plain) * len(prompt) / (len(seen) or 1)
    if 3.0 * counts[HAN] > 0.25 * length:
        script = 2
    elif counts[CONTINUATION] > 0.25 * length:
        script = 3
    elif counts[DIGITS] + counts[MARKS] > 0.08 * length:
        script = 1
    else:
        script = 0
    return Look(counts, extra, script, size)


def _counts(text: bytes, kinds: bytes, scale: float) -> list[float]:
    """How often each feature is there, times `scale`. Pairs are counted in whole numbers as long as the text, a byte
    for a byte: shifted, one has the next byte where the other has its own."""
    ones = _SAMPLE_ONES if len(text) == SAMPLE_BYTES else _ones(len(text))
    bits = int.from_bytes(text.translate(BITS), "little")
    letter, space, digit, mark = bits & ones, (bits >> 1) & ones, (bits >> 2) & ones, (bits >> 3) & ones
    backslash, rare, consonant = (bits >> 4) & ones, (bits >> 5) & ones, (bits >> 6) & ones
    then_letter, then_space, then_mark = letter >> 8, space >> 8, mark >> 8
    two_consonants = consonant & (consonant >> 8)
    four_consonants = two_consonants & (two_consonants >> 16)
    two_marks = mark & then_mark
    two_spaces = space & then_space
    return [
        1.0,
        kinds.count(b"c") * scale,
        (space & then_mark).bit_count() * scale,
        kinds.count(b"0") * scale,
        kinds.count(b"e") * scale,
        kinds.count(b"A") * scale,
        (space & then_letter).bit_count() * scale,
        kinds.count(b".") * scale,
        (backslash & (then_letter >> 8)).bit_count() * scale,
        (four_consonants & (consonant >> 32)).bit_count() * scale,
        (backslash & (then_space >> 8)).bit_count() * scale,
        (mark & (backslash >> 8)).bit_count() * scale,
        (two_marks & (two_marks >> 16)).bit_count() * scale,
        (digit & (digit >> 8)).bit_count() * scale,
        rare.bit_count() * scale,
        kinds.count(b"f") * scale,
        (mark & then_letter).bit_count() * scale,
        kinds.count(b"3") * scale,
        (backslash & (then_mark >> 8)).bit_count() * scale,
        two_marks.bit_count() * scale,
        two_spaces.bit_count() * scale,
        kinds.count(b"a") * scale,
        (two_spaces & (two_spaces >> 16)).bit_count() * scale,
        (backslash & then_mark).bit_count() * scale,
        kinds.count(b"u") * scale,
    ]


def _sample(prompt: bytes) -> bytes:
    size = len(prompt)
    if size <= SAMPLE_BYTES:
        return prompt
    step = (size - SAMPLE_STEP) // (SAMPLE_BYTES // SAMPLE_STEP - 1)
    found = []
    at = 0
    for _ in range(SAMPLE_BYTES // SAMPLE_STEP):
        found.append(prompt[at : at + SAMPLE_STEP])
        at += step
    return b"".join(found)


def _escaped_sample(prompt: bytes) -> bytes:
    """As `_sample`, of whole escapes: halves at the ends of a look would be lost."""
    length = 4 * SAMPLE_STEP
    step = (len(prompt) - length) // (SAMPLE_BYTES // length - 1)
    found = []
    at = 0
    for _ in range(SAMPLE_BYTES // length):
        part = prompt[at : at + length]
        found.append(part[part.find(b"\\u") : part.rfind(b"\\u")])
        at += step
    return b"".join(found)


_MEDIA_MARKS: Final = (b";base64,", b'"data":"', b'"data": "')
"""Behind which pictures and sound stand: in their URL, or by themselves, as Messages and `input_audio` have them."""
_LEAST_MEDIA: Final = 256
_MOST_MEDIA: Final = 64


def _without_media(prompt: bytes, mark: bytes) -> tuple[bytes, int]:
    kept: list[bytes] = []
    at = begin = 0
    while len(kept) < _MOST_MEDIA:
        begin = prompt.find(mark, begin)
        end = prompt.find(b'"', begin + len(mark)) if begin >= 0 else -1
        if end < 0:
            break
        if end - begin > _LEAST_MEDIA:
            kept.append(prompt[at : begin + len(mark)])
            at = end
        begin = end
    kept.append(prompt[at:])
    return b"".join(kept), len(kept) - 1


class Weights:
    """What is learnt of one script of one model, or of the whole model."""

    __slots__ = ("_spread", "_surprises", "learnt", "weights")

    def __init__(self) -> None:
        self.weights: list[float] = list(PRIOR)
        self.learnt = 0
        self._surprises = 0
        self._spread: list[list[float]] = []
        self._open()

    def _open(self) -> None:
        self._spread = []
        for row in range(WIDTH):
            line = [0.0] * WIDTH
            # The constant is what a template adds, which may be a thousand tokens as well as none.
            line[row] = START_SD * START_SD if row != CONST else 30.0 * 30.0
            self._spread.append(line)

    def guess(self, counts: list[float]) -> float:
        """Tokens."""
        total = 0.0
        weights = self.weights
        for index in range(WIDTH):
            total += weights[index] * counts[index]
        return total

    def learn(self, counts: list[float], tokens: float) -> None:
        """What a prompt really had, >= 1."""
        spread = self._spread
        scaled = [count / tokens for count in counts]
        gains: list[float] = []
        variance = NOISE + SHORT_NOISE / (tokens * tokens)
        for row in range(WIDTH):
            line = spread[row]
            total = 0.0
            for column in range(WIDTH):
                total += line[column] * scaled[column]
            gains.append(total)
            variance += total * scaled[row]
        error = 1.0 - self.guess(scaled)
        most = SURPRISE * float(variance**0.5)
        if error > most or error < -most:
            self._surprises += 1
            if self._surprises >= SWITCH:
                self._surprises = 0
                self._open()
                return
            error = most if error > 0.0 else -most
        else:
            self._surprises = 0
        weights = self.weights
        for row in range(WIDTH):
            gain = gains[row] / variance
            weights[row] += gain * error
            line = spread[row]
            for column in range(WIDTH):
                line[column] -= gain * gains[column]
            if scaled[row] != 0.0 and row != CONST and line[row] < START_SD * START_SD:
                line[row] += DRIFT
        self.learnt += 1


class Estimator:
    """The estimates of one model of one service."""

    __slots__ = ("_all", "_scripts", "error_ratio", "error_ratio_sum", "errors", "learnt", "nonsense")

    def __init__(self) -> None:
        self._all = Weights()
        self._scripts: list[Weights | None] = [None] * len(SCRIPTS)
        self.learnt = 0
        self.nonsense = 0
        self.errors = 0
        self.error_ratio_sum = 0.0
        self.error_ratio = 0.0

    def estimate(self, prompt: bytes) -> int:
        """Tokens, >= 1."""
        return self.of(look(prompt))

    def of(self, seen: Look) -> int:
        """The same, of what was looked at already."""
        prior = 0.0
        for index in range(WIDTH):
            prior += PRIOR[index] * seen.counts[index]
        prior = min(max(prior, 1.0), seen.size + PRIOR[CONST])  # no text has more tokens than bytes
        guess = prior
        if self.learnt >= FEW and self.error_ratio <= TRUST:
            own = self._scripts[seen.script]
            weights = own if own is not None and own.learnt >= ENOUGH else self._all
            guess = weights.guess(seen.counts)
            guess = min(max(guess, prior / BOUND), prior * BOUND + 2.0 * weights.weights[CONST])
        return max(1, int(guess + 0.5) + seen.extra)

    def learn(self, prompt: bytes, tokens: int) -> None:
        """What a prompt had, by whoever knows."""
        if tokens < 1 or tokens > len(prompt) + 2000 or tokens * 64 < len(prompt) - 4096:
            self.nonsense += 1
            return
        seen = look(prompt)
        if seen.extra:
            return  # what a picture takes is another matter
        error = self.of(seen) / tokens - 1.0
        error = min(abs(error), 2.0)
        self.errors += 1
        self.error_ratio_sum += error
        own_error = min(abs(self._believed(seen) / tokens - 1.0), 2.0)
        self._all.learn(seen.counts, float(tokens))
        own = self._scripts[seen.script]
        if own is None:
            own = self._scripts[seen.script] = Weights()
        own.learn(seen.counts, float(tokens))
        self.learnt += 1
        if self.learnt > FEW:
            self.error_ratio += RATE * (own_error - self.error_ratio)

    def _believed(self, seen: Look) -> float:
        own = self._scripts[seen.script]
        weights = own if own is not None and own.learnt >= ENOUGH else self._all
        return weights.guess(seen.counts)
