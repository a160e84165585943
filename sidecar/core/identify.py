"""Who a request belongs to: its session and its tenant, from the first source that is present.

A token is read, not verified: the mesh in front verified it, and we hold no keys. So claims are taken only from tokens
of issuers that the policy names; with none named no token is even looked at. What cannot be read is absent and no
error: identity here steers, it does not authorise.
"""

from base64 import urlsafe_b64decode
from binascii import Error as Base64Error
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

import msgspec

from sidecar.kernel.ids import SessionId
from sidecar.policy.schema import Identity, Source
from sidecar.wire.headers import Line

MAX_ID_BYTES: Final = 256  # longer ids are hashed: they are dictionary keys, 100,000 of them
MAX_TOKEN_BYTES: Final = 16 * 1024  # of one header; larger tokens do not pass common proxies either

_CLAIMS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_CLAIM: Final = msgspec.json.Decoder(str | int)


class Who:
    """`session` None: none was named, so nothing is bound or broken by session. `tenant` "": none was named."""

    __slots__ = ("session", "tenant")

    def __init__(
        self,
        session: SessionId | None,
        tenant: str,
    ) -> None:
        self.session = session
        self.tenant = tenant


NOBODY: Final = Who(None, "")


class Identifier:
    """The identity rules of one policy, made ready for the request path."""

    __slots__ = ("_issuers", "_session", "_tenant", "_token")

    def __init__(self, identity: Identity) -> None:
        self._issuers = frozenset(identity.jwt.issuers)
        self._session = tuple(_ready(source) for source in identity.session)
        self._tenant = tuple(_ready(source) for source in identity.tenant)
        self._token = bool(self._issuers) and any(s.jwt_claim for s in (*identity.session, *identity.tenant))

    def identify(self, headers: Sequence[Line], user: str) -> Who:
        """Reads session and tenant; `user` is the body's field of that name, "" if absent."""
        claims = _claims(headers, self._issuers) if self._token else None
        session = self._first(self._session, headers, user, claims)
        tenant = self._first(self._tenant, headers, user, claims)
        if not session and not tenant:
            return NOBODY
        return Who(SessionId(session) if session else None, tenant)

    def _first(
        self,
        sources: tuple[tuple[bytes, str], ...],
        headers: Sequence[Line],
        user: str,
        claims: dict[str, msgspec.Raw] | None,
    ) -> str:
        for name, claim in sources:
            if name:
                value = _header(headers, name)
                found = _bounded(value) if value else ""
            elif claim:
                found = _claim(claims, claim) if claims else ""
            else:
                found = _bounded(user.encode("utf-8", "replace")) if user else ""
            if found:
                return found
        return ""


def _ready(source: Source) -> tuple[bytes, str]:
    return source.header.lower().encode("latin-1", "replace"), source.jwt_claim


def _header(headers: Sequence[Line], wanted: bytes) -> bytes:
    for line in headers:
        if line.name == wanted:
            return line.value
    return b""


def _bounded(value: bytes) -> str:
    if len(value) > MAX_ID_BYTES:
        return "blake2b:" + blake2b(value, digest_size=16).hexdigest()
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _claim(claims: dict[str, msgspec.Raw], name: str) -> str:
    raw = claims.get(name)
    if raw is None:
        return ""
    try:
        return _bounded(str(_CLAIM.decode(raw)).encode("utf-8", "replace"))
    except (msgspec.MsgspecError, RecursionError):
        return ""


def _claims(headers: Sequence[Line], issuers: frozenset[str]) -> dict[str, msgspec.Raw] | None:
    """The claims of the bearer token, if one of `issuers` made it."""
    value = _header(headers, b"authorization")
    if not value or len(value) > MAX_TOKEN_BYTES:
        return None
    scheme, _, token = value.partition(b" ")
    parts = token.strip().split(b".")
    if len(parts) != 3 or scheme.lower() != b"bearer":
        return None
    payload = parts[1]
    try:
        claims = _CLAIMS.decode(urlsafe_b64decode(payload + b"=" * (-len(payload) % 4)))
    except (msgspec.MsgspecError, Base64Error, ValueError, RecursionError):
        return None
    return claims if _claim(claims, "iss") in issuers else None
