"""The words both sides of an HTTP exchange share."""

Header = tuple[bytes, bytes]
"""Lower-case name and value."""


class ResponseHead:
    """A status line and headers off an engine's wire.

    `lines` are the header lines that may go on (`Name: value\\r\\n`, as written, framing headers left out).
    `content_length` None: the body is chunked, or ends with the connection, or there is none.
    `encoded`: the body is compressed, so nobody on the way can read it. `retry_after` has `retry-after` and
    `retry-after-ms` as they came.
    """

    __slots__ = (
        "content_length",
        "content_type",
        "encoded",
        "lines",
        "phrase",
        "retry_after",
        "status",
        "upgrade",
    )

    def __init__(
        self,
        status: int,
        phrase: bytes,
        lines: list[bytes],
        content_type: bytes,
        content_length: int | None,
        encoded: bool,
        upgrade: bytes,
        retry_after: tuple[Header, ...] = (),
    ) -> None:
        self.status = status
        self.phrase = phrase
        self.lines = lines
        self.content_type = content_type
        self.content_length = content_length
        self.encoded = encoded
        self.upgrade = upgrade
        self.retry_after = retry_after
