"""Which prefix cache of a vLLM a request may use: its tenant's, by `cache_salt` in the request's body.

vLLM keeps the prompts it has worked through, and who asks for one that is kept gets its first token sooner. So one
tenant could find out, prompt by prompt, what another one asks. vLLM shares what it kept only among requests with the
same salt; here each tenant gets one:

1. A salt is a keyed hash (HMAC-SHA256) of service, tenant and generation. Whoever finds a way to an engine around the
   sidecar can send a salt of its own, and without the key cannot know anybody's.
2. A new generation is a new cache for everybody: what was kept is not found again, and vLLM drops it in time.
3. The salt is appended to the body, as its last member. Engines take the last of several members of one name, so a
   client that sends a salt gets its tenant's all the same. Nothing else of the body is touched, or even read.
4. Where the result is JSON, the salt is a member of the outermost object: what we append ends with the brace that ended
   the body, and begins with a comma, after which a text that was left open would end in front of a bare word.
"""

from hmac import digest
from json import detect_encoding
from typing import Final

from sidecar.kernel.errors import Reason, SidecarError

MIN_KEY: Final = 16
"""Bytes of a key: what nobody guesses."""

_MEMBER: Final = b'"cache_salt":"%b"}'
_OPENS, _CLOSES, _SPACE = ord("{"), ord("}"), b" \t\r\n"
_SALT: Final = 16  # bytes, as 32 hex digits; vLLM takes 128 characters


def salt_of(key: bytes, service: str, tenant: str, generation: int) -> bytes:
    """A tenant's salt in hex; an empty `tenant` is the one of all who named none."""
    # Lengths first: no two tenants of two services may read as one text.
    names = [name.encode("utf-8", "surrogatepass") for name in (service, tenant)]
    text = b"".join(b"%d:%b" % (len(name), name) for name in names)
    return digest(key, b"%b%d" % (text, generation), "sha256")[:_SALT].hex().encode()


def salted(body: bytes, salt: bytes) -> bytes:
    """The body of an inference request with the salt.

    Raises `SidecarError` (`BAD_REQUEST`) for what cannot be a JSON object, which `wire.call` refuses before.
    """
    if 0 in body[:4]:
        # JSON in UTF-16 or UTF-32, as Python reads it: what we append is neither.
        body = body.decode(detect_encoding(body), "surrogatepass").encode("utf-8", "surrogatepass")
    end = _trimmed(body, len(body)) - 1
    if end < 0 or body[end] != _CLOSES:
        raise SidecarError(Reason.BAD_REQUEST, "downstream", "the body must be a JSON object")
    last = _trimmed(body, end) - 1
    comma = b"" if last >= 0 and body[last] == _OPENS else b","
    return body[:end] + comma + _MEMBER % salt


def _trimmed(body: bytes, end: int) -> int:
    """Where `body[:end]` ends without the space after it."""
    while end and body[end - 1] in _SPACE:
        end -= 1
    return end
