"""The words both sides of an HTTP exchange share."""

import msgspec

Header = tuple[bytes, bytes]
"""Lower-case name and value."""


class ResponseHead(msgspec.Struct, frozen=True, gc=False):
    """A status line and headers off an engine's wire.

    `lines` are the header lines that may go on (`Name: value\\r\\n`, as written, framing headers left out).
    `content_length` None: the body is chunked, or ends with the connection, or there is none.
    `retry_after` has the values of `retry-after` and `retry-after-ms` (as `("retry-after-ms", value)` pairs).
    """

    status: int
    phrase: bytes
    lines: list[bytes]
    content_type: bytes
    content_length: int | None
    upgrade: bytes
    retry_after: tuple[Header, ...] = ()
