"""One connection to an engine: sends a request, reads one answer at a time, tells its sink.

llhttp's callbacks only collect; what one read brought is delivered after it, in order, so that a sink may drop the
connection at any point. An engine's socket is never half-closed (engines take that for a hang-up) and never reused
after anything odd: bytes beyond an answer's end, an upload that was not finished, a framing we could not read.

Framing worked around: llhttp waits for a body after HEAD and cannot be told otherwise, so the answer ends at its head
and the parser is replaced. A transfer coding other than `chunked` has no length we could know: refused.

As with requests (see `downstream.parser`), the plain kind of answer is read off its lines while an llhttp without
callbacks judges it; whatever is odd is read by callbacks, from its first byte.
"""

import asyncio
from collections.abc import Callable
from typing import Final, cast

import httptools

from sidecar.kernel.exchange import Header, ResponseHead
from sidecar.proxy.ports import Sink
from sidecar.wire.headers import (
    HOP_BY_HOP,
    MAX_HEAD_BYTES,
    MAX_KEPT_HEAD_BYTES,
    OWN,
    PASSED,
    STANDARD_TOKENS,
    Line,
    Lines,
    connection_tokens,
    media_type,
    without_named,
)

# What is done with a header: read and passed on, read and not passed on, or dropped.
_READ: Final = 0
_KEPT: Final = 1
_DROPPED: Final = 2
_TYPE: Final = 3  # read and passed on, as _READ
_LENGTH: Final = 4  # read and not passed on, as _KEPT
_KINDS: Final = {
    b"content-type": _TYPE,
    b"content-encoding": _READ,
    b"retry-after": _READ,
    b"retry-after-ms": _READ,
    b"content-length": _LENGTH,
    b"transfer-encoding": _KEPT,
    b"connection": _KEPT,
    b"upgrade": _KEPT,
    b"proxy-connection": _KEPT,  # llhttp heeds it as it does Connection
    b"x-request-id": _DROPPED,
}
_KINDS.update({name: _DROPPED for name in HOP_BY_HOP if name not in _KINDS})
_LINES: Final = Lines(_KINDS, frozenset({b"x-request-id"}))

_JSON: Final = b"application/json"
_BODILESS: Final = frozenset({204, 304})


class EngineConnection:
    """The protocol object of one engine socket; `on_idle` and `on_gone` belong to the pool."""

    __slots__ = (
        "_bad",
        "_chunked_upload",
        "_close_framed",
        "_content_length",
        "_content_type",
        "_encoded",
        "_ended",
        "_given_up",
        "_head",
        "_head_bytes",
        "_head_only",
        "_head_read",
        "_in_head",
        "_informational",
        "_judge",
        "_keep_alive",
        "_left",
        "_lines",
        "_named",
        "_on_gone",
        "_on_idle",
        "_parser",
        "_phrase",
        "_pieces",
        "_poisoned",
        "_reading",
        "_retry_after",
        "_seen",
        "_sink",
        "_te",
        "_trailers",
        "_transport",
        "_tunnel",
        "_upgrade",
        "_upload_open",
        "_wants_upgrade",
        "idle_since",
        "received",
        "served",
    )

    def __init__(
        self,
        on_idle: Callable[["EngineConnection"], None],
        on_gone: Callable[["EngineConnection", bool], None],
    ) -> None:
        self._on_idle = on_idle
        self._on_gone = on_gone
        # Made with the first request: it refers back to us, and a connect that is given up never ends us.
        self._parser: httptools.HttpResponseParser = None  # type: ignore[assignment]
        self._seen: list[Line] = []
        self._judge: httptools.HttpResponseParser | None = None
        self._transport: asyncio.Transport = None  # type: ignore[assignment]  # set before any other callback
        self._sink: Sink | None = None
        self._reading = True
        self._poisoned = False
        self._given_up = False
        self._tunnel = False
        self.served = 0
        self.received = False
        self.idle_since = 0.0
        self._reset()

    def _reset(self) -> None:
        self._head: ResponseHead | None = None
        self._informational: list[ResponseHead] = []
        self._pieces: list[bytes] = []
        self._trailers: list[bytes] = []
        self._ended = False
        self._bad = ""
        self._close_framed = False
        self._keep_alive = False
        self._head_only = False
        self._left = 0  # bytes of a plain answer's body that are still to come
        self._upload_open = False
        self._chunked_upload = False
        self._wants_upgrade = False
        self._head_read = 0  # bytes of the reads that brought no final head
        self._begin_head()

    def _begin_head(self) -> None:
        self._in_head = True
        self._head_bytes = 0  # of the phrase and the finished fields of this head, or of the trailers
        self._phrase = b""
        self._lines: list[bytes] = []
        self._named: list[bytes] = []
        self._content_type = b""
        self._content_length: int | None = None
        self._encoded = False
        self._te = b""
        self._upgrade = b""
        self._retry_after: tuple[Header, ...] = ()

    # What an attempt calls.

    @property
    def used(self) -> bool:
        """Whether this connection has served a request before the next one."""
        return self.served > 0

    @property
    def closing(self) -> bool:
        """Whether the socket is gone, or about to be."""
        return self._transport.is_closing()

    def send(self, sink: Sink, head: bytes, body: bytes, *, head_only: bool, upgrade: bool) -> None:
        """Send a whole request; its answer goes to `sink`."""
        self._sink = sink
        if self.served == 0:
            self._parser = httptools.HttpResponseParser(self)
        self.served += 1
        self.received = False
        self._head_only = head_only
        self._wants_upgrade = upgrade
        self._transport.write(head + body if body else head)

    def open_upload(self, *, chunked: bool) -> None:
        """The body of the request just sent is still to come."""
        self._upload_open = True
        self._chunked_upload = chunked

    def upload(self, data: bytes) -> None:
        """More of the request's body; never empty."""
        if not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked_upload else data)

    def end_upload(self, trailers: list[bytes]) -> None:
        """The request's body is complete."""
        self._upload_open = False
        if self._chunked_upload and not self._transport.is_closing():
            self._transport.write(b"0\r\n%b\r\n" % b"".join(trailers))

    def send_tunnel(self, data: bytes) -> None:
        """Bytes of a tunnel."""
        if not self._transport.is_closing():
            self._transport.write(data)

    def pause(self) -> None:
        """Stop reading: the client does not keep up."""
        if self._reading and not self._transport.is_closing():
            self._reading = False
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if not self._reading and not self._transport.is_closing():
            self._reading = True
            self._transport.resume_reading()

    def abort(self) -> None:
        """Break the connection, at once and in both directions. Its sink hears nothing more."""
        self._sink = None
        self._transport.abort()

    def close(self) -> None:
        """Close a tunnel: what was written still goes out. Its sink hears nothing more."""
        self._sink = None
        self._transport.close()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance

    def give_up(self) -> None:
        """The connect was given up: part from a transport that it may have made, which never ends and refers to us."""
        self._given_up = True
        self._transport = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        sink = self._sink
        if sink is None:
            # Bytes while idle: an answer to nothing, which must not become the next request's.
            self._poisoned = True
            self._transport.abort()
            return
        self.received = True
        if self._tunnel:
            sink.on_tunnel_data(data)
            return
        rest = b""
        try:
            if self._left:
                self._read_plain_body(data)
            elif self._head_only:
                self._read_head_only(data)
            elif not self._in_head or self._head_read or not self._take_plain(data):
                self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            rest = data[stop.args[0] :]
        except httptools.HttpParserCallbackError as exc:
            if not isinstance(exc.__context__, _BadBytes):
                raise
            if not self._ended:
                self._bad = str(exc.__context__)
        except httptools.HttpParserError as exc:
            if self._ended:
                self._poisoned = True
            else:
                self._bad = str(exc)
        if self._in_head and not self._ended:
            # A field that never ends, interim answers for ever: no callback sees them.
            self._head_read += len(data)
            if self._head_read > 2 * MAX_HEAD_BYTES:
                self._bad = "the head exceeds 64 KiB"
        self._deliver(sink, rest)

    def _take_plain(self, data: bytes) -> bool:
        """An answer whose head came in one read, with a length and nothing unusual; False for any other, untaken."""
        end = data.find(b"\r\n\r\n") if data.startswith(b"HTTP/1.1 200 ") else 0
        if not 0 < end < MAX_HEAD_BYTES:
            return False
        raws = data[:end].split(b"\r\n")
        lines = _LINES.read_all(raws, self._seen)
        if lines is None:
            return False
        self._seen = lines if end <= MAX_KEPT_HEAD_BYTES else []
        phrase = raws[0][13:]
        kept: list[bytes] = []
        content_type = b""
        length = 0
        for line in lines:
            kind = line.kind
            if kind == PASSED:
                kept.append(line.text)
            elif kind == _TYPE:
                value = line.value
                content_type = value if value == _JSON else media_type(value)
                kept.append(line.text)
            elif kind == _LENGTH:
                value = line.value
                if length or len(value) > 18 or not value.isdigit():
                    return False
                length = int(value)
            elif kind != _DROPPED and kind != OWN:
                return False
        if not length:
            return False
        begin = end + 4
        end = begin + length
        judge = self._judge
        if judge is None:
            judge = self._judge = httptools.HttpResponseParser(None)
        try:
            judge.feed_data(data if len(data) <= end else data[:end])
        except httptools.HttpParserError:
            self._judge = None
            return False
        self._head = ResponseHead(200, phrase, kept, content_type, length, False, b"")
        self._in_head = False
        self._keep_alive = True
        self._left = end - begin
        self._read_plain_body(data[begin:], judged=True)
        return True

    def _read_plain_body(self, data: bytes, *, judged: bool = False) -> None:
        size = len(data)
        if size > self._left:
            # Line ends behind an answer are forgiven, as llhttp does.
            self._poisoned = bool(data[self._left :].strip(b"\r\n"))
            data = data[: self._left]
            size = self._left
        if not judged and self._judge is not None:
            self._judge.feed_data(data)
        self._left -= size
        if data:
            self._pieces.append(data)
        if not self._left:
            self._ended = True

    def _read_head_only(self, data: bytes) -> None:
        # Line by line: llhttp tells nothing of a chunk's size, and what follows the head could become the next answer.
        lines = data.splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            self._parser.feed_data(line)
            if self._ended:
                self._poisoned = number < len(lines)
                return

    def _deliver(self, sink: Sink, rest: bytes) -> None:
        if self._informational:
            for informational in self._informational:
                sink.on_informational(informational)
            self._informational.clear()
        head = self._head
        if head is not None:
            self._head = None
            if head.status == 101:
                self._tunnel = True
                sink.on_tunnel(head, rest)
                return
            sink.on_head(head)
            if self._sink is not sink:
                return
        pieces = self._pieces
        if pieces:
            data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            sink.on_body(data)
            if self._sink is not sink:
                return
        if self._bad:
            self._sink = None
            self._transport.abort()
            sink.on_bad_bytes(self._bad)
        elif self._ended:
            self._finish(sink)

    def _finish(self, sink: Sink) -> None:
        self._sink = None
        # Lent again only after its sink has judged what it brought.
        try:
            good = sink.on_end(self._trailers) and self._keep_alive and not self._poisoned and not self._upload_open
        except Exception:
            # A crash of ours is told by whoever called us; the attempt must not wait for its deadline.
            self._transport.abort()
            sink.on_lost()
            raise
        if good and not self._transport.is_closing():
            if self._head_only:
                self._parser = httptools.HttpResponseParser(self)
            self._reset()
            self.resume()
            self._on_idle(self)
        else:
            self._transport.abort()
        sink.on_released()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self._given_up:
            return
        sink, self._sink = self._sink, None
        self._parser = None  # type: ignore[assignment]  # it refers back to us, and nothing is fed any more
        self._on_gone(self, self._poisoned)
        if sink is None:
            return
        if self._close_framed and exc is None:
            sink.on_end([])
            sink.on_released()
        else:
            sink.on_lost()

    def pause_writing(self) -> None:
        if self._sink is not None:
            self._sink.on_upload_paused()

    def resume_writing(self) -> None:
        if self._sink is not None:
            self._sink.on_upload_resumed()

    # llhttp's callbacks, in their order.

    def on_message_begin(self) -> None:
        if self._ended:
            self._poisoned = True
            raise _BadBytes("bytes after the answer's end")

    def on_status(self, phrase: bytes) -> None:
        if not self._ended:
            self._count(len(phrase))
            self._phrase += phrase

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._ended:
            return
        self._count(len(name) + len(value) + 4)
        lower = name.lower()
        kind = _LINES.kind_of(lower)
        if kind in (PASSED, _READ, _TYPE):
            (self._lines if self._in_head else self._trailers).append(b"%b: %b\r\n" % (name, value))
        if self._in_head and kind not in (PASSED, OWN, _DROPPED):
            self._read(lower, value)

    def on_headers_complete(self) -> None:
        if self._ended:
            return
        status = self._parser.get_status_code()
        if self._parser.get_http_version() not in ("1.1", "1.0"):
            raise _BadBytes(f"HTTP/{self._parser.get_http_version()}")
        named = [token for token in self._named if token not in STANDARD_TOKENS]
        lines = without_named(self._lines, named) if named else self._lines
        head = ResponseHead(
            status,
            self._phrase,
            lines,
            self._content_type,
            self._content_length,
            self._encoded,
            self._upgrade,
            self._retry_after,
        )
        if 100 <= status < 200:
            if status == 101:
                if not self._wants_upgrade:
                    raise _BadBytes("101 to a request that asked for no upgrade")
                self._head = head
                return
            self._informational.append(head)
            self._begin_head()
            return
        if status < 200 or status > 599:
            raise _BadBytes(f"status {status}")
        if self._te not in (b"", b"chunked"):
            raise _BadBytes("a transfer coding other than chunked")
        self._head = head
        self._in_head = False
        self._head_bytes = 0
        self._keep_alive = self._parser.should_keep_alive()
        if self._head_only:
            # should_keep_alive takes a missing length for close-framing; after HEAD there is no body to frame.
            self._keep_alive = b"close" not in self._named and self._parser.get_http_version() == "1.1"
            self._ended = True
        elif status not in _BODILESS and self._content_length is None and not self._te:
            self._close_framed = True

    def on_body(self, body: bytes) -> None:
        if self._ended:
            self._poisoned = True
        else:
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        if not self._in_head:
            self._ended = True

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _BadBytes("the head or the trailers exceed 64 KiB")

    def _read(self, name: bytes, value: bytes) -> None:
        match name:
            case b"content-type":
                self._content_type = media_type(value)
            case b"content-length":
                self._content_length = int(value)
            case b"content-encoding":
                self._encoded = value.strip(b" \t").lower() not in (b"", b"identity")
            case b"transfer-encoding":
                self._te = value.strip(b" \t").lower()
            case b"connection":
                self._named += connection_tokens(value)
            case b"upgrade":
                self._upgrade = value
            case b"retry-after" | b"retry-after-ms":
                self._retry_after += ((name, value),)


class _BadBytes(Exception):
    """The engine's bytes are not an HTTP/1.1 answer we can pass on."""
