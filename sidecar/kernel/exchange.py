"""The two heads of an HTTP exchange, as bytes off the wire."""

import msgspec

Header = tuple[bytes, bytes]
"""Name as it was sent (case kept) and value without surrounding white space."""


class RequestHead(msgspec.Struct, frozen=True, gc=False):
    """A request line and its headers. `target` is verbatim; `path` is it without the query."""

    method: bytes
    target: bytes
    path: bytes
    http_10: bool
    headers: list[Header]


class ResponseHead(msgspec.Struct, frozen=True, gc=False):
    """A status line and its headers."""

    status: int
    phrase: bytes
    headers: list[Header]
