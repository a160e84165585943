"""Bytes of one client connection in, `Request`s out, in order; refuses whatever two readers could read differently.

llhttp in strict mode refuses most of the smuggling family (CL with TE, duplicate or signed CL, bare LF, NUL, folded
headers, space before a colon, bad chunks); what it lets through is refused here: no Host or two, a transfer coding
other than `chunked`, any other protocol than HTTP/1, CONNECT, a target whose authority is not the Host, one of another
scheme than HTTP's, a path with a fragment. Engines read the last two as if they were not there, and %63 as c: whoever
wrote an inference path so would have gone past every budget and turn. So a path is known by what it means.

Two things llhttp does must be worked around. It parses on after a refusal, so the callbacks raise, which stops it,
and nothing is fed after that: a refused request's successor in the same packet must never be forwarded. And it stops
at any `Upgrade`, handing a POST body over as tunnel bytes (Java clients offer `h2c` with every POST): unless the
request can become a tunnel, a fresh parser reads the body under the same framing.

A callback per header is a fifth of what a request costs. So the plain kind (an inference POST whose head came in one
read, with a length and nothing unusual) is read off its lines, which C splits, while a second llhttp without callbacks
judges the same bytes and counts its body. Neither replaces the other: whatever the lines or that llhttp find odd is
read again, from its first byte, by callbacks, so there is one way of refusing; and a test cuts requests at every byte,
which both must read alike.
"""

from collections.abc import Callable
from typing import Final
from urllib.parse import unquote_to_bytes

import httptools

from sidecar.kernel.errors import Reason, Refusal
from sidecar.proxy.request import Request
from sidecar.wire.call import Api, api_of
from sidecar.wire.headers import (
    HOP_BY_HOP,
    MAX_HEAD_BYTES,
    MAX_KEPT_HEAD_BYTES,
    MAX_KNOWN_BYTES,
    OWN,
    PASSED,
    Line,
    Lines,
    connection_tokens,
)

# What a header is to us. Up to _TRACEPARENT: read and passed on; up to _FORWARDED_PROTO: read, and stated anew in the
# forwarded head; the rest is dropped.
_HOST: Final = 0
_TRACEPARENT: Final = 1
_LENGTH: Final = 2
_CODING: Final = 3
_CONNECTION: Final = 4
_UPGRADE: Final = 5
_EXPECT: Final = 6
_REQUEST_ID: Final = 7
_FORWARDED_FOR: Final = 8
_FORWARDED_PROTO: Final = 9
_DROPPED: Final = 10
_PROXY_CONNECTION: Final = 11  # dropped, too; llhttp heeds it as it does Connection

_KINDS: Final[dict[bytes, int]] = {
    b"host": _HOST,
    b"traceparent": _TRACEPARENT,
    b"content-length": _LENGTH,
    b"transfer-encoding": _CODING,
    b"connection": _CONNECTION,
    b"upgrade": _UPGRADE,
    b"expect": _EXPECT,
    b"x-request-id": _REQUEST_ID,
    b"x-forwarded-for": _FORWARDED_FOR,
    b"x-forwarded-proto": _FORWARDED_PROTO,
    b"proxy-connection": _PROXY_CONNECTION,
}
_KINDS.update({name: _DROPPED for name in HOP_BY_HOP if name not in _KINDS})

_LINES: Final = Lines(_KINDS, frozenset({b"traceparent", b"tracestate", b"x-request-id", b"x-forwarded-for"}))

_KEEP_ALIVE: Final = b"keep-alive"


_MAX_PLAIN: Final = 64
"""Plain requests taken of one read: each copies what follows it, and llhttp does not."""


class _Start:
    """A request line of an inference POST, read."""

    __slots__ = ("api", "path", "target")

    def __init__(self, target: bytes, path: bytes, api: Api) -> None:
        self.target = target
        self.path = path
        self.api = api


_STARTS: Final[dict[bytes, _Start]] = {}
_MAX_STARTS: Final = 256  # far more than there are paths of inference


def _start_of(line: bytes) -> _Start | None:
    words = line.split(b" ")
    if len(words) != 3 or words[2] != b"HTTP/1.1":
        return None
    path = words[1].partition(b"?")[0]
    api = api_of(b"POST", path)
    if api is None:
        return None
    start = _Start(words[1], path, api)
    if len(line) <= MAX_KNOWN_BYTES and path == words[1]:  # a query may hold a credential
        if len(_STARTS) >= _MAX_STARTS:
            _STARTS.clear()
        _STARTS[line] = start
    return start


class Refused(Exception):
    """The connection's bytes cannot be read further. `refusal` is the answer, after those already owed."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class RequestParser:
    """One connection's parser. `body_limit` gives the largest inference body in bytes, now.

    `feed` appends to `requests` once a head is complete (the last of them may still be receiving) and raises
    `Refused` once for bytes that must not be read on. After an upgrade request `tunnel` holds what followed it;
    nothing more may be fed until `resume` says that no tunnel came of it.
    """

    __slots__ = (
        "_accounted",
        "_begun",
        "_body_limit",
        "_counted",
        "_earlier",
        "_excess",
        "_in_head",
        "_in_trailers",
        "_judge",
        "_left",
        "_lines",
        "_parser",
        "_read_now",
        "_request",
        "_searched",
        "_trusted",
        "requests",
        "tunnel",
    )

    def __init__(self, body_limit: Callable[[], int], trusted: bool) -> None:
        self._body_limit = body_limit
        self._trusted = trusted
        self._parser = httptools.HttpRequestParser(self)
        self._judge = httptools.HttpRequestParser(None)
        self._lines: list[Line] = []
        self._left = 0  # bytes of a plain request's body that are still to come
        self._request = Request()
        self._request.complete = True
        self._in_head = False
        self._in_trailers = False
        self._counted = 0  # bytes of this head's, or these trailers', finished fields
        self._excess = 0  # bytes of this message that came to nothing
        self._accounted = 0  # bytes that this read may have, for what came of it
        self._begun = 0  # messages that this read began
        self._read_now = b""
        self._searched = 0  # how far `_read_now` has been searched for request lines
        self._earlier = b""  # earlier reads of the head under way
        self.requests: list[Request] = []
        self.tunnel: bytes | None = None

    @property
    def in_head(self) -> bool:
        """Whether a request has begun and its head is not complete."""
        return self._in_head

    def feed(self, data: bytes) -> None:
        """Read on. Raises `Refused`."""
        if self.tunnel is not None:
            self.tunnel += data
            return
        plain = _MAX_PLAIN
        while True:
            if self._left:
                data = self._feed_body(data)
            elif (
                plain
                and data.startswith(b"POST ")
                and self._request.complete
                and self._request.keep_alive
                and not self._in_head
            ):
                plain -= 1
                end = data.find(b"\r\n\r\n")
                request = self._read_plain(data[:end]) if 0 < end < MAX_HEAD_BYTES else None
                if request is None or not self._take_plain(request, data, end + 4):
                    break
                data = data[end + 4 + request.body_size :]
            else:
                break
            if not data:
                return
        self._feed_any(data)

    def _read_plain(self, head: bytes) -> Request | None:
        """The request of a head (without its blank line); None if it is not of the plain kind, or anything is odd."""
        raws = head.split(b"\r\n")
        start = _STARTS.get(raws[0]) or _start_of(raws[0])
        lines = _LINES.read_all(raws, self._lines) if start is not None else None
        if start is None or lines is None:
            return None
        request = Request()
        request.headers = lines
        self._lines = lines if len(head) <= MAX_KEPT_HEAD_BYTES else []
        for line in lines:
            kind = line.kind
            if kind == OWN and not self._trusted:
                # Nobody may look one up that a stranger sent: it would name its own class.
                request.headers = [each for each in lines if each.kind != OWN]
            if kind in (_CODING, _UPGRADE, _EXPECT, _PROXY_CONNECTION) or (kind == _HOST and request.host):
                return None
            if kind == _LENGTH:
                value = line.value
                if request.content_length is not None or len(value) > 18 or not value.isdigit():
                    return None
            self._take_header(request, line)
        length = request.content_length
        if not length or not request.host or length > self._body_limit() or b"close" in request.named:
            return None
        request.method = b"POST"
        request.target = start.target
        request.path = start.path
        request.api = start.api
        request.held = True
        return request

    def _take_header(self, request: Request, line: Line) -> None:
        """What a header does to a request. Raises `Refused`."""
        kind = line.kind
        if kind == PASSED or (kind == OWN and self._trusted):
            request.lines.append(line.text)
        elif kind not in (OWN, _DROPPED):
            _read(request, kind, line.value)
            if kind <= _TRACEPARENT:
                request.lines.append(line.text)

    def _take_plain(self, request: Request, data: bytes, begin: int) -> bool:
        """Have llhttp judge the head and count the body; False if it refuses, and then nothing was taken."""
        length = request.content_length
        assert length is not None
        end = begin + length
        try:
            self._judge.feed_data(data if len(data) <= end else data[:end])
        except httptools.HttpParserError:
            self._judge = httptools.HttpRequestParser(None)
            return False
        body = data[begin:end]
        request.body_size = len(body)
        if request.body_size == length:
            request.body = body
            request.complete = True
        else:
            request.pieces.append(body)
            self._left = length - request.body_size
        self._request = request
        self._excess = 0
        self.requests.append(request)
        return True

    def _feed_body(self, data: bytes) -> bytes:
        """More of a plain request's body; what follows it."""
        request = self._request
        piece = data[: self._left]
        self._judge.feed_data(piece)
        request.pieces.append(piece)
        request.body_size += len(piece)
        self._left -= len(piece)
        if not self._left:
            request.body = b"".join(request.pieces)
            request.pieces.clear()
            request.complete = True
        return data[len(piece) :]

    def _feed_any(self, data: bytes) -> None:
        # Of the fields finished in this read, the part that earlier reads brought was held against them.
        self._accounted = -self._counted
        self._begun = 0
        between = self._request.complete
        self._read_now = data
        self._searched = 0
        stopped_at = -1
        refusal: Refusal | None = None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            stopped_at = stop.args[0]
        except httptools.HttpParserCallbackError as exc:
            cause = exc.__context__ or exc.__cause__
            if not isinstance(cause, Refused):
                raise
            refusal = cause.refusal
            del cause
        except httptools.HttpParserError as exc:
            refusal = Refusal(Reason.BAD_REQUEST, f"malformed HTTP: {exc}")
        self._read_now = b""
        if refusal is not None:
            # Raised out here, an exception holds no other one, whose frames would hold us and what was read.
            raise Refused(refusal)
        if stopped_at >= 0:
            # Not within the `except`: what is raised there would hide the refusal that a callback of ours raises next.
            self._stopped_at_upgrade(data[stopped_at:])
            return
        if self._in_head:
            self._earlier += data
        if self._begun > 1 or (self._begun and not between):
            self._excess = 0  # whose the bytes are cannot be told; the next read counts on
            return
        # A field that never ends, a chunk's extension, a zero before its size: no callback sees them.
        self._excess = max(0, self._excess + len(data) - self._accounted - self._counted)
        if self._excess > MAX_HEAD_BYTES:
            raise Refused(_head_too_large())

    def close(self) -> None:
        """Nothing is fed any more: part from llhttp's object, which refers back to us, without the collector's help."""
        self._parser = None  # type: ignore[assignment]

    def resume(self) -> None:
        """The engine refused the upgrade: what followed the request is HTTP after all. Raises `Refused`."""
        rest, self.tunnel = self.tunnel, None
        self._parser = httptools.HttpRequestParser(self)
        if rest:
            self.feed(rest)

    def _stopped_at_upgrade(self, rest: bytes) -> None:
        request = self._request
        if request.upgrade:
            self.tunnel = rest
            return
        # llhttp called the message complete before its body: read the body under the same framing.
        replay = _Replay(self)
        self._parser = replay.parser
        if request.has_body:
            length = request.content_length or 0
            framing = b"transfer-encoding: chunked" if request.chunked else b"content-length: %d" % length
            replay.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n\r\n" % framing)
        replay.over = True
        if rest:
            self.feed(rest)

    # llhttp's callbacks, in their order.

    def on_message_begin(self) -> None:
        self._request = Request()
        self._in_head = True
        self._in_trailers = False
        self._counted = 0
        self._excess = 0
        self._begun += 1

    def on_url(self, url: bytes) -> None:
        # httptools may hand a target over in parts.
        self._request.target += url
        self._counted += len(url)
        if self._counted > MAX_HEAD_BYTES:
            raise Refused(_head_too_large())

    def on_header(self, name: bytes, value: bytes) -> None:
        self._counted += len(name) + len(value) + 4
        if self._counted > MAX_HEAD_BYTES:
            raise Refused(_head_too_large())
        request = self._request
        lower = name.lower()
        line = Line(lower, value, _LINES.kind_of(lower), b"%b: %b\r\n" % (name, value))
        if self._in_trailers:
            if line.kind == PASSED:
                request.trailers.append(line.text)
            return
        if line.kind != OWN or self._trusted:
            request.headers.append(line)
        self._take_header(request, line)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._in_trailers = True
        self._accounted += self._counted
        self._counted = 0
        request = self._request
        parser = self._parser
        request.method = method = parser.get_method()
        # Heads are found in their order, so that one read with many is searched once.
        line = b"%b %b HTTP/1." % (method, request.target)
        read = self._earlier + self._read_now if self._earlier else self._read_now
        found = read.find(line, 0 if self._earlier else self._searched)
        self._searched = max(0, found + len(line) - len(self._earlier))
        self._earlier = b""
        if found < 0:
            # llhttp also takes RTSP and ICE for a protocol, and several spaces for one.
            raise Refused(Refusal(Reason.BAD_REQUEST, "the request line is not METHOD target HTTP/1.1"))
        request.keep_alive = parser.should_keep_alive()
        version = parser.get_http_version()
        if version != "1.1":
            if version != "1.0":
                raise Refused(Refusal(Reason.BAD_REQUEST, f"HTTP/{version} is not spoken here; use HTTP/1.1"))
            request.http_10 = True
            if request.chunked:
                raise Refused(Refusal(Reason.BAD_REQUEST, "HTTP/1.0 has no Transfer-Encoding"))
        elif not request.host:
            raise Refused(Refusal(Reason.BAD_REQUEST, "HTTP/1.1 needs one Host header"))
        if request.method == b"CONNECT":
            raise Refused(Refusal(Reason.BAD_REQUEST, "CONNECT is not served: this is no forward proxy"))
        request.path = _path(request)
        if not (parser.should_upgrade() and _may_tunnel(request)):
            request.upgrade = b""
        request.api = api_of(request.method, request.path)
        request.held = request.api is not None
        if request.held and (request.content_length or 0) > self._body_limit():
            raise Refused(_body_too_large(self._body_limit()))
        self.requests.append(request)

    def on_body(self, body: bytes) -> None:
        request = self._request
        size = len(body)
        # As much again for a chunk's frame as Go's reader allows: 16 bytes, and the data's size twice over.
        self._accounted += 3 * size + 16
        request.body_size += size
        if request.held and request.body_size > self._body_limit():
            raise Refused(_body_too_large(self._body_limit()))
        request.pieces.append(body)

    def on_message_complete(self) -> None:
        request = self._request
        if request.has_body and self._parser.should_upgrade() and not request.upgrade and not request.body_size:
            return  # the body is still to come: see _stopped_at_upgrade
        self._in_trailers = False
        request.complete = True
        if request.held:
            request.body = b"".join(request.pieces)
            request.pieces.clear()


class _Replay:
    """The callbacks of a parser that must first be brought to where another one stopped; from then on, the owner's."""

    def __init__(self, owner: RequestParser) -> None:
        self.over = False
        self._owner = owner
        self.on_body = owner.on_body
        self.on_message_complete = owner.on_message_complete
        self.parser = httptools.HttpRequestParser(self)

    def on_message_begin(self) -> None:
        if self.over:
            self._owner.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self.over:
            self._owner.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.over:
            self._owner.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.over:
            self._owner.on_headers_complete()


def _read(request: Request, kind: int, value: bytes) -> None:
    if kind == _HOST:
        if request.host:
            raise Refused(Refusal(Reason.BAD_REQUEST, "two Host headers"))
        request.host = value.strip(b" \t")
        if not request.host:
            raise Refused(Refusal(Reason.BAD_REQUEST, "empty Host header"))
    elif kind == _LENGTH:
        request.content_length = int(value)
    elif kind == _CONNECTION:
        if value == _KEEP_ALIVE:
            request.named.append(_KEEP_ALIVE)
        else:
            request.named += connection_tokens(value)
    elif kind == _REQUEST_ID:
        request.request_id = value.strip(b" \t")
    elif kind == _TRACEPARENT:
        request.traceparent = value
    elif kind == _FORWARDED_FOR:
        request.forwarded_for = b"%b, %b" % (request.forwarded_for, value) if request.forwarded_for else value
    elif kind == _FORWARDED_PROTO:
        request.forwarded_proto = value
    elif kind == _CODING:
        if value.strip(b" \t").lower() != b"chunked":
            raise Refused(Refusal(Reason.BAD_REQUEST, "the only transfer coding taken is chunked"))
        request.chunked = True
    elif kind == _UPGRADE:
        request.upgrade = value.strip(b" \t")
    elif kind == _EXPECT:
        if value.strip(b" \t").lower() == b"100-continue":
            request.expect_continue = True
        else:
            request.lines.append(b"expect: %b\r\n" % value)  # the engine's to judge


def _may_tunnel(request: Request) -> bool:
    # A body before the tunnel, or h2c (which we do not speak further on), makes it an ordinary request.
    return not request.has_body and not request.http_10 and request.upgrade.lower() != b"h2c"


def _path(request: Request) -> bytes:
    """The target's path as engines read it, decoded once; the target itself goes on as it was sent.

    An absolute-form target becomes origin-form, as RFC 9112 section 3.2.2 asks of a gateway.
    """
    target = request.target
    if target[:1] != b"/":
        scheme, sep, rest = target.partition(b"://")
        if sep and scheme.lower() in (b"http", b"https"):
            authority, slash, path = rest.partition(b"/")
            if not slash:
                authority, mark, query = rest.partition(b"?")
                path = mark + query
            if authority.lower() != request.host.lower():
                raise Refused(Refusal(Reason.BAD_REQUEST, "the target's authority is not the Host header's"))
            request.target = target = b"/" + path
        elif target != b"*":
            raise Refused(Refusal(Reason.BAD_REQUEST, "the target is neither a path nor a URL of http or https"))
    found = target.partition(b"?")[0]
    if b"#" in found:
        raise Refused(Refusal(Reason.BAD_REQUEST, "the target has a fragment (#), which is never sent"))
    return unquote_to_bytes(found) if b"%" in found else found


def _head_too_large() -> Refusal:
    return Refusal(Reason.HEAD_TOO_LARGE, f"request line and headers exceed {MAX_HEAD_BYTES} bytes")


def _body_too_large(limit: int) -> Refusal:
    return Refusal(Reason.TOO_LARGE, f"the body exceeds {limit} bytes (policy: limits.body_bytes)")
