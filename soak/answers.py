"""One answer as a client reads it, strictly, and what it was: whole, cut in a lawful way, or wrong.

Its own reader, because the sidecar's is under test and a client library would cost more CPU than the sidecar has. Pure.
"""

import re
from enum import StrEnum

import msgspec

from sidecar.kernel.errors import STATUS, Reason
from soak.plan import STREAMS, Ask, Kind
from soak.requests import MALFORMED, id_of, whole

MAX_HEAD_BYTES = 64 << 10


class Got(StrEnum):
    """What a client got."""

    WHOLE = "whole"  # every byte as the engine had to send it
    MARRED = "marred"  # whole, with the malformed event that the engine put in
    ENGINE_ERROR = "engine_error"  # the engine's error object under 200
    ENGINE_STATUS = "engine_status"  # the engine's error answer
    CUT = "cut"  # a stream that the sidecar ended with an error event
    REFUSED = "refused"  # an answer of the sidecar's own
    BROKEN = "broken"  # the connection broke inside the answer
    LEFT = "left"  # the client left before the end
    NOTHING = "nothing"  # the connection ended without an answer
    WRONG = "wrong"  # anything else: bytes that nobody should have sent
    HUNG = "hung"  # no end within the time that every request has


class Answer:
    """Reads one answer. `feed` returns what is left over once it is `done`; `lost` tells that the connection ended.

    `status` is 0 while no final head came; `continued` that a 100 came; `bad` says what was no HTTP/1.1.
    """

    __slots__ = ("_buffer", "_head_only", "_http_10", "_length", "bad", "body", "closes", "continued", "done",
                 "headers", "status")  # fmt: skip

    def __init__(self, *, head_only: bool = False, http_10: bool = False) -> None:
        self._buffer = bytearray()
        self._head_only = head_only
        self._http_10 = http_10
        self._length: int | None = None
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = bytearray()
        self.continued = False
        self.closes = False
        self.done = False
        self.bad = ""

    def feed(self, data: bytes) -> bytes:
        """Read on."""
        self._buffer += data
        while not self.status and not self.bad:
            if not self._head():
                return b""
        if self.bad:
            return b""
        if self._length is not None:
            self._take(self._length - len(self.body))
            self.done = len(self.body) == self._length
        elif b"transfer-encoding" in self.headers:
            self._chunks()
        else:
            self._take(len(self._buffer))
        if not self.done:
            return b""
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest

    def lost(self) -> None:
        """The connection ended: the end of an answer that is framed by it, else of nothing."""
        if self.status and not self.bad and self._length is None and b"transfer-encoding" not in self.headers:
            self.done = True

    def _take(self, count: int) -> None:
        self.body += self._buffer[:count]
        del self._buffer[:count]

    def _head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                self.bad = "a head without end"
            return False
        start, *lines = bytes(self._buffer[:end]).split(b"\r\n")
        del self._buffer[: end + 4]
        if not re.fullmatch(rb"HTTP/1\.1 [1-5]\d\d [^\r\n]*", start):
            self.bad = f"a status line {start[:80]!r}"
            return False
        status = int(start[9:12])
        if status < 200:
            self.continued |= status == 100
            return True
        headers: dict[bytes, bytes] = {}
        for line in lines:
            name, colon, value = line.partition(b":")
            if not colon or not name or b" " in name or name.lower() in headers:
                self.bad = f"a header {line[:80]!r}"
                return False
            headers[name.lower()] = value.strip()
        self.headers = headers
        tokens = headers.get(b"connection", b"").lower()
        self.closes = b"close" in tokens or (self._http_10 and b"keep-alive" not in tokens)
        length = headers.get(b"content-length")
        if length is not None and b"transfer-encoding" in headers:
            self.bad = "two framings"
        elif self._head_only or status in (204, 304):
            self._length = 0
        elif length is not None:
            self._length = int(length)
        elif b"transfer-encoding" not in headers and not self._http_10:
            self.bad = "no framing"
        self.status = status
        return True

    def _chunks(self) -> None:
        buffer, at = self._buffer, 0
        while True:
            end = buffer.find(b"\r\n", at)
            if end < 0:
                break
            digits = bytes(buffer[at:end])
            if not re.fullmatch(rb"[0-9a-fA-F]{1,8}", digits):
                self.bad = f"a chunk size {digits[:40]!r}"
                break
            size = int(digits, 16)
            begin, after = end + 2, end + 2 + size
            if len(buffer) < after + 2:
                break
            if buffer[after : after + 2] != b"\r\n":
                self.bad = "a chunk that does not end where it says"
                break
            at = after + 2
            if not size:
                self.done = True
                break
            self.body += buffer[begin:after]
        del buffer[:at]


class Must(StrEnum):
    """How many lines the access log must have of a request."""

    ONE = "one"
    NONE = "none"
    MAYBE = "maybe"  # the client left so early that its request may never have been read


class Seen(msgspec.Struct, frozen=True):
    """One request as its client saw it. `status` 0: no head came; `word`: the reason that the client was told, else
    empty; `slow`: it did not read for a while; `left`: it ended the connection itself."""

    got: Got
    status: int
    word: str
    body_bytes: int
    must: Must
    slow: bool = False
    left: bool = False
    detail: str = ""


BROKEN_EVENT = b'data: {"id":"chatcmpl-broken","choices":[{"index":0,"del\n\n'
_OUR_EVENT = re.compile(rb'data: \{"error":\{"message":"[^\n]*","type":"[^"\n]*","param":null,"code":"(\w+)"\}\}\n\n$')
_ENGINE_EVENT = re.compile(rb'data: \{"error":\{"message":"[^\n]*\n\n(data: \[DONE\]\n\n)?$')
_REASONS = frozenset(reason.value for reason in Reason)


def what_it_was(ask: Ask, answer: Answer) -> tuple[Got, str, str]:
    """What a client got that stayed: with the reason that it was told, and what was wrong in words."""
    if answer.bad:
        return Got.WRONG, "", answer.bad
    if not answer.status:
        return Got.NOTHING, "", ""
    body = bytes(answer.body)
    told = answer.headers.get(b"x-sidecar-reason", b"").decode("latin-1")
    if told:
        return _refused(ask, answer, told)
    if answer.headers.get(b"x-request-id") != id_of(ask).encode():
        return Got.WRONG, "", f"x-request-id {answer.headers.get(b'x-request-id')!r}"
    status, expected = whole(ask)
    if not answer.done:
        lawful = answer.status != 200 or _may_begin(body, expected)
        return (Got.BROKEN, "", "") if lawful else (Got.WRONG, "", _difference(body, expected))
    if answer.status == status and body == expected:
        return Got.WHOLE, "", ""
    if answer.status >= 400:
        return Got.ENGINE_STATUS, "", ""
    if ask.kind not in STREAMS:
        if body.startswith(b'{"error":'):
            return Got.ENGINE_ERROR, "", ""
        return Got.WRONG, "", _difference(body, expected)
    return _stream(body, expected)


def is_lawful_part(ask: Ask, answer: Answer) -> bool:
    """Whether what a client had when it left could have become a lawful answer."""
    if answer.bad:
        return False
    if answer.status != 200:
        return True
    return _may_begin(bytes(answer.body), whole(ask)[1])


def _refused(ask: Ask, answer: Answer, told: str) -> tuple[Got, str, str]:
    if told not in _REASONS or STATUS[Reason(told)] != answer.status:
        return Got.WRONG, told, f"refused with {answer.status} {told}"
    if ask.kind is Kind.MALFORMED and answer.status != MALFORMED[ask.variant % len(MALFORMED)][1]:
        return Got.WRONG, told, f"a malformed head was refused with {answer.status}"
    if not answer.done:
        return Got.BROKEN, told, ""
    if ask.kind is not Kind.MODELS_HEAD and b'"code":"%b"' % told.encode() not in answer.body:
        return Got.WRONG, told, f"a refusal without its code: {bytes(answer.body[:200])!r}"
    return Got.REFUSED, told, ""


def _stream(body: bytes, expected: bytes) -> tuple[Got, str, str]:
    if body.replace(BROKEN_EVENT, b"", 1) == expected:
        return Got.MARRED, "", ""
    ours = _OUR_EVENT.search(body)
    word = ours.group(1).decode() if ours else ""
    if ours is not None and word in _REASONS:
        if _is_part(body[: ours.start()], expected):
            return Got.CUT, word, ""
        return Got.WRONG, word, _difference(body, expected)
    theirs = _ENGINE_EVENT.search(body)
    if theirs is not None and _is_part(body[: theirs.start()], expected):
        return Got.ENGINE_ERROR, "", ""
    return Got.WRONG, "", _difference(body, expected)


def _is_part(body: bytes, expected: bytes) -> bool:
    """Whether this is the beginning of what was to come; an event that was torn is closed with an empty line."""
    part = body.replace(BROKEN_EVENT, b"", 1)
    if part and not part.endswith(b"\n\n"):
        return False  # what follows would have become a part of a torn event
    return expected.startswith((part, part.removesuffix(b"\n\n")))


def _may_begin(body: bytes, expected: bytes) -> bool:
    # What stands from an error or from a broken event on was not the answer's.
    return expected.startswith(body) or b'data: {"error"' in body or b"chatcmpl-broken" in body


def _difference(body: bytes, expected: bytes) -> str:
    shorter = min(len(body), len(expected))
    at = next((at for at in range(shorter) if body[at] != expected[at]), shorter)
    return (
        f"{len(body)} bytes where {len(expected)} were to come; at {at}: {body[at : at + 120]!r}, "
        f"not {expected[at : at + 120]!r}"
    )
