"""Header names and what a proxy does with them: which end here, which pass, which are ours.

Names are compared in lower case and forwarded as they were written. Sources: RFC 9110 section 7.6.1 (hop-by-hop),
RFC 9112 section 6 (framing).
"""

from typing import Final

HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    }
)
"""Headers that speak of one connection only."""

FRAMING: Final = frozenset({b"content-length", b"host", b"expect"})
"""Headers that `Connection` may never name away: a peer could have its own request misframed or misrouted by it."""

STANDARD_TOKENS: Final = frozenset({b"close", b"keep-alive", b"upgrade"})
"""Words in `Connection` that name no header."""

OURS: Final = b"x-sidecar-"
"""Prefix of the headers that only we set."""

_SECRETS: Final = (b"auth", b"cookie", b"key", b"token", b"secret", b"credential", b"password")
"""Parts of names of headers whose values are credentials."""

PASSED: Final = -1
"""A line that goes on as it is."""

OWN: Final = -2
"""A line that only we may set."""

MAX_KNOWN: Final = 1024
MAX_KNOWN_BYTES: Final = 256
"""Lines remembered by each reader, and their longest: a megabyte at worst."""

MAX_KEPT_HEAD_BYTES: Final = 4096
"""Longest head whose lines a connection keeps for its next one."""

_X: Final = ord("x")
_SPACE: Final = 0x20
_TAB: Final = 0x09

MAX_HEAD_BYTES: Final = 64 * 1024
"""Start line and headers together, and likewise the trailers: what the engines behind us (uvicorn: 64 KiB) take."""


class Line:
    """One header line, read. `name` is in lower case, `text` is the whole line with its end, `raw` without.

    `kind` is what its reader makes of the name, `PASSED` or `OWN` where it makes nothing of it.
    """

    __slots__ = ("kind", "name", "raw", "text", "value")

    def __init__(self, name: bytes, value: bytes, kind: int, text: bytes, raw: bytes = b"") -> None:
        self.raw = raw
        self.name = name
        self.value = value
        self.kind = kind
        self.text = text


class Lines:
    """Reads header lines, and remembers those that come again: `Host`, `User-Agent`, `Content-Type`, `Date`.

    Reading a line costs ten times what looking it up does, and that ten times what comparing it does with the line that
    stood in its place in the last head of the connection. `kinds` says what to make of names. Lines with a name in
    `once` never come twice and are not remembered, nor are secrets, which must not outlive their connection.
    """

    __slots__ = ("_kinds", "_known", "_once")

    def __init__(self, kinds: dict[bytes, int], once: frozenset[bytes]) -> None:
        self._kinds = kinds
        self._once = once
        self._known: dict[bytes, Line] = {}

    def kind_of(self, name: bytes) -> int:
        """What to make of a name, in lower case."""
        kind = self._kinds.get(name)
        if kind is not None:
            return kind
        # Most start with another letter, which is cheaper to see.
        return OWN if name[0] == _X and name.startswith(OURS) else PASSED

    def read_all(self, raws: list[bytes], before: list[Line]) -> list[Line] | None:
        """Reads a head's lines but the first; `before` are those of the last head. None as from `read`, for any."""
        lines: list[Line] = []
        known = len(before)
        for number in range(1, len(raws)):
            raw = raws[number]
            line = before[number - 1] if number <= known else None
            if line is None or line.raw != raw:
                line = self.read(raw)
                if line is None:
                    return None
            lines.append(line)
        return lines

    def read(self, line: bytes) -> Line | None:
        """A line without its end; None unless it is `Name: value` with one blank and none around it.

        Says nothing of the characters in it: that is llhttp's to judge.
        """
        known = self._known.get(line)
        if known is not None:
            return known
        colon = line.find(b":")
        size = len(line)
        if colon < 1 or colon > size - 3 or line[colon + 1] != _SPACE:
            return None
        if line[colon + 2] in (_SPACE, _TAB) or line[size - 1] in (_SPACE, _TAB):
            return None
        name = line[:colon].lower()
        read = Line(name, line[colon + 2 :], self.kind_of(name), line + b"\r\n", line)
        if size <= MAX_KNOWN_BYTES and name not in self._once and not _is_secret(name):
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[line] = read
        return read


def _is_secret(name: bytes) -> bool:
    return any(part in name for part in _SECRETS)


def length_line(length: int) -> bytes:
    """`content-length: 17\\r\\n`."""
    return _formatted(_LENGTHS, b"content-length: %d\r\n", length)


def chunk_line(size: int) -> bytes:
    """What opens a chunk: `1f\\r\\n`."""
    return _formatted(_SIZES, b"%x\r\n", size)


_LENGTHS: Final[dict[int, bytes]] = {}
_SIZES: Final[dict[int, bytes]] = {}


def _formatted(known: dict[int, bytes], form: bytes, number: int) -> bytes:
    line = known.get(number)
    if line is None:
        line = form % number
        if len(known) < MAX_KNOWN:
            known[number] = line
    return line


def connection_tokens(value: bytes) -> list[bytes]:
    """The lower-case tokens of a `Connection` value; empty ones are left out."""
    return [token for part in value.split(b",") if (token := part.strip(b" \t").lower())]


def without_named(lines: list[bytes], named: list[bytes]) -> list[bytes]:
    """Header lines (`Name: value\\r\\n`) without those that `Connection` named, framing headers excepted."""
    drop = {token for token in named if token not in FRAMING}
    return [line for line in lines if line[: line.index(b":")].lower() not in drop]


def media_type(value: bytes) -> bytes:
    """`Text/HTML; charset=x` -> `text/html`."""
    return value.split(b";", 1)[0].strip(b" \t").lower()


def is_safe_id(value: bytes) -> bool:
    """Whether a client's request id may go into logs and headers: 1-128 bytes of visible ASCII."""
    return 0 < len(value) <= 128 and value.isascii() and value.decode("ascii").isprintable() and b" " not in value
