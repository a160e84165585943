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

MAX_HEAD_BYTES: Final = 64 * 1024
"""Start line and headers together, and likewise the trailers: what the engines behind us (uvicorn: 64 KiB) take."""


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
