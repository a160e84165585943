"""One inference answer in the making: paced by the wheel, spoilt by at most one fault.

A `Reply` never waits: each step writes what is due and queues itself for when more is. Steps of an answer that is
over return at once, so nothing has to be cancelled when a client leaves.
"""

from typing import Protocol

from sidecar.demo.connection import Connection, Request
from sidecar.demo.dialect import JSON, SSE, Shape, Spec, whole_stream
from sidecar.demo.script import MID_STREAM, Fault, Kind, Script
from sidecar.demo.wheel import Wheel

BURST = 64
"""Tokens written at a time where they have no gap: keeps the loop turning between bursts of one stream."""

LAST_CHUNK = b"0\r\n\r\n"

PHRASES = {
    200: b"OK",
    400: b"Bad Request",
    401: b"Unauthorized",
    404: b"Not Found",
    405: b"Method Not Allowed",
    413: b"Content Too Large",
    422: b"Unprocessable Content",
    429: b"Too Many Requests",
    500: b"Internal Server Error",
    502: b"Bad Gateway",
    503: b"Service Unavailable",
    504: b"Gateway Timeout",
}


def head(request: Request, status: int, media: bytes, length: int | None, *, close: bool = False) -> bytes:
    """A response head. `length` None: chunked, or until the connection's end for HTTP/1.0 or `close`."""
    until_close = length is None and (close or request.http_10)
    return b"HTTP/1.1 %d %b\r\nserver: simulated\r\ncontent-type: %b\r\n%b%b%b\r\n" % (
        status,
        PHRASES.get(status, b"Error"),
        media,
        b"x-request-id: %b\r\n" % request.request_id.encode("latin-1") if request.request_id else b"",
        b"content-length: %d\r\n" % length if length is not None else b"" if until_close else CHUNKED,
        b"" if request.keep_alive and not until_close else b"connection: close\r\n",
    )


CHUNKED = b"transfer-encoding: chunked\r\n"


def chunk(data: bytes) -> bytes:
    """`data`, not empty, as one HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class House(Protocol):
    """What a reply needs of its engine."""

    wheel: Wheel

    def now(self) -> float:
        """Loop time, s."""

    def begun(self, prompt_tokens: int) -> None:
        """A prompt is being read, and takes its place in the cache: what hangs or fails at once never does."""

    def token_sent(self, tokens: int) -> None:
        """Count tokens that went out."""

    def ended(self, reply: "Reply", how: str) -> None:
        """The reply is over: `completed`, `struck` (by its fault) or `aborted` (the client left)."""


class Reply:
    """`start` it once; from then on it ends by itself, by `gone`, or never (some faults are silence)."""

    __slots__ = (
        "_at",
        "_connection",
        "_due",
        "_fault",
        "_framed",
        "_gap",
        "_house",
        "_left",
        "_limit",
        "_opened",
        "_over",
        "_parked",
        "_request",
        "_script",
        "_shape",
        "_spec",
        "_stream",
        "cached",
        "running",
    )

    def __init__(
        self,
        house: House,
        connection: Connection,
        request: Request,
        shape: Shape,
        spec: Spec,
        script: Script,
        fault: Fault | None,
        *,
        stream: bool,
    ) -> None:
        self._house = house
        self._connection = connection
        self._request = request
        self._shape = shape
        self._spec = spec
        self._script = script
        self._fault = fault
        self._stream = stream
        self._framed = not (request.http_10 or script.close_framed)
        self._gap = script.token_gap_s
        self._at = 0
        self._due = 0.0
        self._left = b""
        self._limit = spec.tokens
        self._opened = False
        self._over = False
        self._parked = False
        self.running = False
        self.cached = False

    def start(self, now: float, delay_s: float) -> None:
        """Begin; the first token is due `delay_s` from now."""
        if self._over:
            return
        fault = self._fault
        if fault is not None and self._struck_at_start(fault, now):
            return
        self.cached = True
        self._house.begun(self._spec.prompt_tokens)
        if fault is not None and fault.kind is Kind.SLOW:
            delay_s *= fault.factor
            self._gap *= fault.factor
        if not self._stream:
            whole = delay_s + self._gap * max(0, self._spec.tokens - 1)
            if whole > 0.0:
                self._house.wheel.at(now + whole, self._plain)
            else:
                self._plain(now)
            return
        self._write_head()
        if fault is not None and fault.kind in MID_STREAM:
            self._limit = min(fault.after, self._limit)
        self._due = now + delay_s
        if delay_s > 0.0:
            self._house.wheel.at(self._due, self._step)
        else:
            self._step(now)

    def gone(self) -> None:
        """The client left."""
        self._end("aborted")

    def resume(self) -> None:
        """The client reads again."""
        if self._parked:
            self._parked = False
            self._house.wheel.at(self._house.now(), self._step)

    # A stream, token by token.

    def _step(self, now: float) -> None:
        if self._over:
            return
        if self._connection.paused:
            self._parked = True
            return
        if not self._opened:
            self._opened = True
            opening = self._shape.opening()
            if opening:
                self._write(opening)
            if self._fault is not None and self._fault.kind is Kind.ROLE_ONLY:
                return
        at = self._at
        if at >= self._limit:
            self._last(now)
            return
        gap = self._gap
        if gap > 0.0:
            self._write(self._shape.token(at))
            self._at = at + 1
            self._house.token_sent(1)
            # From when it was due, not from now: a late step must not slow the stream down.
            self._due = max(self._due + gap, now)
            self._house.wheel.at(self._due, self._step)
            return
        upto = min(at + BURST, self._limit)
        events = [self._shape.token(index) for index in range(at, upto)]
        self._connection.write(b"".join(map(chunk, events) if self._framed else events))
        self._at = upto
        self._house.token_sent(upto - at)
        if upto < self._limit:
            self._house.wheel.at(now, self._step)
        else:
            self._last(now)

    def _last(self, now: float) -> None:
        fault = self._fault
        if fault is not None and fault.kind in MID_STREAM:
            if fault.kind is Kind.MALFORMED_EVENT:
                self._fault = None
                self._limit = self._spec.tokens
                self._write(fault.body.encode() or b'data: {"id":"chatcmpl-broken","choices":[{"index":0,"del\n\n')
                self._house.wheel.at(now, self._step)
                return
            if fault.torn:
                event = self._shape.token(self._at)
                if self._framed and fault.kind in (Kind.CUT_RST, Kind.CUT_FIN):
                    framed = chunk(event)
                    self._connection.write(framed[: len(framed) // 2])
                else:
                    self._write(event[: len(event) // 2])
            # A tick later, for a reset throws away what the kernel has not sent yet.
            self._house.wheel.at(now, self._strike)
            return
        closing = self._shape.closing()
        self._connection.write(chunk(closing) + LAST_CHUNK if self._framed else closing)
        self._complete(now)

    def _strike(self, now: float) -> None:
        fault = self._fault
        if self._over or fault is None:
            return
        match fault.kind:
            case Kind.CUT_RST:
                self._end("struck")
                self._connection.reset()
            case Kind.CUT_FIN:
                self._end("struck")
                self._connection.close()
            case Kind.CUT_NO_TERMINATOR:
                self._finish_body()
            case Kind.IN_BAND_ERROR:
                self._write(b"data: %b\n\n%b" % (self._error(fault), self._shape.done))
                self._finish_body()
            case _:  # a stall: nothing more, ever
                return

    # A plain answer.

    def _plain(self, now: float) -> None:
        if self._over:
            return
        body = self._shape.plain()
        fault = self._fault
        if fault is not None and fault.kind in MID_STREAM:
            half = body[: len(body) // 2]
            match fault.kind:
                case Kind.IN_BAND_ERROR:
                    self._answer(200, JSON, self._error(fault))
                case Kind.CUT_NO_TERMINATOR | Kind.MALFORMED_EVENT:
                    self._answer(200, JSON, half)
                case _:
                    self._connection.write(head(self._request, 200, JSON, len(body)) + half)
                    self._house.wheel.at(now, self._strike)
            return
        self._house.token_sent(self._spec.tokens)
        self._connection.write(head(self._request, 200, JSON, len(body)) + body)
        self._complete(now)

    # Faults that show before the first token.

    def _struck_at_start(self, fault: Fault, now: float) -> bool:
        match fault.kind:
            case Kind.HANG:
                return True
            case Kind.FIN_BEFORE_HEAD:
                self._end("struck")
                self._connection.close()
            case Kind.RST_BEFORE_HEAD:
                self._end("struck")
                self._connection.reset()
            case Kind.BAD_HTTP:
                self._end("struck")
                self._connection.write(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
                self._connection.close()
            case Kind.STATUS:
                self._answer(fault.status, JSON, self._error(fault, fault.status), fault.retry_after)
            case Kind.EMPTY:
                self._answer(200, SSE if self._stream else JSON, b"", chunked=self._stream)
            case Kind.WRONG_MEDIA_TYPE:
                self._answer(200, b"text/html", b"<!doctype html><title>Welcome</title><h1>It works!</h1>\n")
            case Kind.SLOW_DRIP:
                self._left = self._whole()
                self._house.wheel.at(now, self._drip)
            case Kind.COMMENTS_ONLY if self._stream:
                self._write_head()
                self._house.wheel.at(now, self._comment)
            case Kind.HEADERS_ONLY:
                self._write_head()
            case Kind.ROLE_ONLY | Kind.COMMENTS_ONLY if not self._stream:
                self._write_head()
            case _:
                return False
        return True

    def _whole(self) -> bytes:
        if not self._stream:
            body = self._shape.plain()
            return head(self._request, 200, JSON, len(body)) + body
        body = whole_stream(self._shape, self._spec.tokens)
        return self._head() + (chunk(body) + LAST_CHUNK if self._framed else body)

    def _drip(self, now: float) -> None:
        fault = self._fault
        if self._over or fault is None:
            return
        self._connection.write(self._left[: fault.size])
        self._left = self._left[fault.size :]
        if self._left:
            self._house.wheel.at(now + fault.period_s, self._drip)
        else:
            self._complete(now)

    def _comment(self, now: float) -> None:
        if self._over or self._fault is None:
            return
        self._write(b": keep-alive\n\n")
        self._house.wheel.at(now + self._fault.period_s, self._comment)

    # Small change.

    def _head(self) -> bytes:
        if self._stream:
            return head(self._request, 200, SSE, None, close=not self._framed)
        return head(self._request, 200, JSON, len(self._shape.plain()))

    def _write_head(self) -> None:
        self._connection.write(self._head())

    def _write(self, data: bytes) -> None:
        self._connection.write(b"%x\r\n%b\r\n" % (len(data), data) if self._framed else data)

    def _answer(self, status: int, media: bytes, body: bytes, retry_after: str = "", *, chunked: bool = False) -> None:
        answer = head(self._request, status, media, None if chunked else len(body))
        if retry_after:
            answer = b"%bretry-after: %b\r\n\r\n" % (answer[:-2], retry_after.encode("latin-1"))
        if not chunked:
            answer += body
        elif not self._request.http_10:
            answer += LAST_CHUNK
        else:
            self._framed = False
        self._end("struck")
        self._connection.write(answer)
        self._connection.done(self._request.keep_alive and self._framed)

    def _finish_body(self) -> None:
        if self._stream and self._framed:
            self._connection.write(LAST_CHUNK)
        self._end("struck")
        self._connection.done(self._request.keep_alive and self._framed)

    def _complete(self, now: float) -> None:
        fault = self._fault
        self._end("completed")
        if fault is not None and fault.kind is Kind.EXTRA_BYTES:
            self._connection.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nextra")
        keep_alive = self._request.keep_alive and (self._framed or not self._stream)
        if fault is not None and fault.kind is Kind.STALE:
            keep_alive = False
        self._connection.done(keep_alive)

    def _end(self, how: str) -> None:
        if not self._over:
            self._over = True
            self._house.ended(self, how)

    def _error(self, fault: Fault, status: int = 500) -> bytes:
        if fault.body:
            return fault.body.encode()
        return self._shape.error(status, fault.message or "simulated fault", fault.type, fault.code)
