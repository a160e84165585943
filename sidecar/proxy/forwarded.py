"""The request head as an engine gets it, and the header lines that we add to answers: bytes from structs."""

from sidecar.proxy.request import Request
from sidecar.wire.headers import STANDARD_TOKENS, length_line, without_named


def engine_head(request: Request, request_id: bytes, peer: str, scheme: bytes, host: str) -> bytes:
    """The head that goes to an engine: what the client wrote, less what ends here, plus who forwarded it.

    `host` stands in where an HTTP/1.0 client sent none; `peer` is empty for clients of a unix socket. Every
    attempt of a request sends the same.
    """
    lines = request.lines
    if request.named and not STANDARD_TOKENS.issuperset(request.named):
        lines = without_named(lines, [token for token in request.named if token not in STANDARD_TOKENS])
    parts = [b"%b %b HTTP/1.1\r\n" % (request.method, request.target), *lines]
    if not request.host:
        parts.append(b"host: %b\r\n" % host.encode())
    if request.held:
        if request.trailers:
            parts.append(b"transfer-encoding: chunked\r\n")
        else:
            parts.append(length_line(len(request.body)))
    elif request.chunked:
        parts.append(b"transfer-encoding: chunked\r\n")
    elif request.content_length is not None:
        parts.append(b"content-length: %d\r\n" % request.content_length)
    if request.expect_continue and not request.held:
        parts.append(b"expect: 100-continue\r\n")
    if request.upgrade:
        parts.append(b"connection: upgrade\r\nupgrade: %b\r\n" % request.upgrade)
    forwarded_for = request.forwarded_for
    if peer:
        address = peer.encode()
        forwarded_for = b"%b, %b" % (forwarded_for, address) if forwarded_for else address
    if forwarded_for:
        parts.append(b"x-forwarded-for: %b\r\n" % forwarded_for)
    parts.append(b"x-forwarded-proto: %b\r\nx-request-id: %b\r\n\r\n" % (request.forwarded_proto or scheme, request_id))
    return b"".join(parts)


def held_body(request: Request) -> bytes:
    """A held body as it goes on the wire: bare, or as one chunk where trailers must follow it."""
    body = request.body
    if not request.trailers:
        return body
    chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
    return b"%b0\r\n%b\r\n" % (chunk, b"".join(request.trailers))
