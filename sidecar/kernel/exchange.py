"""The words both sides of an HTTP exchange share."""

import msgspec

Header = tuple[bytes, bytes]
"""Lower-case name and value."""


class ResponseHead(msgspec.Struct, frozen=True, gc=False):
    """A status line and headers off an engine's wire.

    `lines` are the header lines that may go on (`Name: value\\r\\n`, as written, framing headers left out).
    `content_length` None: the body is chunked, or ends with the connection, or there is none.
    `encoded`: the body is compressed, so nobody on the way can read it. `retry_after` has `retry-after` and
    `retry-after-ms` as they came.
    """

    status: int
    phrase: bytes
    lines: list[bytes]
    content_type: bytes
    content_length: int | None
    encoded: bool
    upgrade: bytes
    retry_after: tuple[Header, ...] = ()
