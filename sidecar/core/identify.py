"""Who a request belongs to: its session, its tenant and the class it names, from the first source that is present.

1. Claims are of a token that was verified. Either we did (`jwt.verified_by: sidecar`; `sidecar/jwt`), and they are
   handed in; or the mesh in front did, and we hold no keys: then they are taken only from tokens of issuers that the
   policy names, or from the header in which the mesh hands them on. With no issuer named no token is even looked at.
2. What cannot be read is absent and no error: the next source is asked.
3. A header says it once. Two lines of one name that say different things are a conflict, to be refused: which of them
   counts is for each reader to guess, and a client could be one tenant here and another at the engine. Lines that say
   the same are as good as one: a second proxy may have added what the first one did.
4. A header that only this machine's peers may send (`loopback`, and the claims') is not there when another sends it,
   for whichever source; and it goes no further (`loopback_headers`).
5. A claim is found by its whole name first (URLs are common names, and have dots), then as a way through objects
   (`realm.tenant`). Text and whole numbers are ids, and a list of one of them is that one; of more nobody could say
   which, and true, fractions and objects are none.
"""

from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Final

import msgspec

from sidecar.kernel.ids import SessionId
from sidecar.policy.schema import Identity, QosPolicy, Source
from sidecar.wire.headers import Line

Claims = Mapping[str, object]
"""A token's claims by name, as JSON has them."""

NO_CLAIMS: Final[Claims] = MappingProxyType({})

MAX_ID_BYTES: Final = 256  # longer ids are hashed: they are dictionary keys, 100,000 of them
MAX_TOKEN_BYTES: Final = 16 * 1024  # of one header; larger tokens do not pass common proxies either
MAX_ID_INTEGER: Final = 1 << 64  # beyond it are no ids, and Python refuses to write those of 4300 digits

AUTHORIZATION: Final = b"authorization"

_CLAIMS: Final = msgspec.json.Decoder(dict[str, Any])
_STANDARD: Final = bytes.maketrans(b"-_", b"+/")
_SPACE: Final = ord(" ")


class Who:
    """`session` None: none was named, so nothing is bound or broken by session. `tenant`, `qos` "": none was named.

    `claims` are the token's, for what else is chosen by them. `conflict`: the header that says two things, "" if none
    does; whoever sent that is not served.
    """

    __slots__ = ("claims", "conflict", "qos", "session", "tenant")

    def __init__(
        self,
        session: SessionId | None,
        tenant: str,
        qos: str = "",
        claims: Claims = NO_CLAIMS,
        conflict: str = "",
    ) -> None:
        self.session = session
        self.tenant = tenant
        self.qos = qos
        self.claims = claims
        self.conflict = conflict


NOBODY: Final = Who(None, "")


class _Ready:
    """A source: the place of its header among those looked for, or a claim's name and the way that its dots make, or
    neither: the body's user."""

    __slots__ = ("claim", "path", "slot")

    def __init__(self, slot: int, claim: str) -> None:
        self.slot = slot
        self.claim = claim
        self.path = tuple(claim.split(".")) if "." in claim else ()


class Identifier:
    """The identity rules of one policy, made ready for the request path.

    `loopback_headers`: the names, in lower case, of headers that only peers on this machine may send. `names`: of all
    that are read here; a client that has one of them end here (`Connection` names it) is somebody else at the engine.
    """

    __slots__ = (
        "_claims_slot",
        "_class",
        "_issuers",
        "_none",
        "_session",
        "_slots",
        "_tenant",
        "_token_slot",
        "loopback_headers",
        "names",
    )

    def __init__(self, identity: Identity, classes: Sequence[QosPolicy] = ()) -> None:
        jwt = identity.jwt
        sources = (*identity.session, *identity.tenant, *identity.qos_class)
        only_here = [_lower(source.header) for source in sources if source.loopback and source.header]
        if jwt.claims_header:
            only_here.append(_lower(jwt.claims_header))
        self.loopback_headers: frozenset[bytes] = frozenset(only_here)
        self._slots: dict[bytes, int] = {}
        self._session = tuple([self._ready(source) for source in identity.session])
        self._tenant = tuple([self._ready(source) for source in identity.tenant])
        self._class = tuple([self._ready(source) for source in identity.qos_class])
        self._issuers = frozenset(jwt.issuers) if jwt.verified_by == "mesh" else frozenset()
        self._claims_slot = -1
        self._token_slot = -1
        wanted = [source.jwt_claim for source in sources if source.jwt_claim]
        for policy in classes:
            wanted += [match.jwt_claim for match in policy.match if match.jwt_claim]
        if wanted and self._issuers:
            if jwt.claims_header:
                self._claims_slot = self._slot(_lower(jwt.claims_header))
            else:
                self._token_slot = self._slot(AUTHORIZATION)
        self._none: list[bytes | None] = [None] * len(self._slots)
        self.names: frozenset[bytes] = frozenset(self._slots)

    def identify(self, headers: Sequence[Line], user: str, loopback: bool = False, claims: Claims | None = None) -> Who:
        """Reads session, tenant and class; `user` is the body's field of that name, "" if absent.

        `loopback`: the peer is on this machine. `claims` are those that we verified, None where there are none.
        """
        values = self._none
        conflict = ""
        slots = self._slots
        for line in headers:
            slot = slots.get(line.name, -1)
            if slot < 0 or (not loopback and line.name in self.loopback_headers):
                continue
            if values is self._none:
                values = values.copy()
            known = values[slot]
            if known is None:
                values[slot] = line.value
            elif known != line.value:
                conflict = line.name.decode("latin-1")
        if claims is None:
            claims = NO_CLAIMS
            if self._token_slot >= 0:
                claims = self._of_issuer(_payload(values[self._token_slot]))
            elif self._claims_slot >= 0:
                claims = self._of_issuer(values[self._claims_slot])
        session = _first(self._session, values, user, claims)
        tenant = _first(self._tenant, values, user, claims)
        qos = _first(self._class, values, user, claims)
        if not session and not tenant and not qos and not claims and not conflict:
            return NOBODY
        return Who(SessionId(session) if session else None, tenant, qos, claims, conflict)

    def _ready(self, source: Source) -> _Ready:
        return _Ready(self._slot(_lower(source.header)) if source.header else -1, source.jwt_claim)

    def _slot(self, name: bytes) -> int:
        return self._slots.setdefault(name, len(self._slots))

    def _of_issuer(self, encoded: bytes | None) -> Claims:
        """The claims of a token's middle part, if one of the issuers made it."""
        if not encoded or len(encoded) > MAX_TOKEN_BYTES:
            return NO_CLAIMS
        try:
            text = b64decode(encoded.translate(_STANDARD) + b"=" * (-len(encoded) % 4), validate=True)
            claims: dict[str, Any] = _CLAIMS.decode(text)
        except (msgspec.MsgspecError, Base64Error, ValueError, RecursionError):
            return NO_CLAIMS
        issuer = claims.get("iss")
        return claims if isinstance(issuer, str) and issuer in self._issuers else NO_CLAIMS


def authorization(headers: Sequence[Line]) -> bytes:
    """The request's credentials: the header's value, b"" if absent. Several lines are one value (RFC 9110, 5.3), which
    is then none that anybody could verify."""
    found = b""
    for line in headers:
        if line.name == AUTHORIZATION:
            found = found + b", " + line.value if found else line.value
    return found


def claim_of(claims: Claims, name: str) -> str:
    """A claim as an id, as rule 5 has it; "" if there is none. Not bounded."""
    return _text(claims.get(name)) or _along(claims, tuple(name.split(".")) if "." in name else ())


def _first(sources: tuple[_Ready, ...], values: list[bytes | None], user: str, claims: Claims) -> str:
    for source in sources:
        if source.slot >= 0:
            value = values[source.slot]
            if value and value[-1] <= _SPACE:  # no part of it (RFC 9112, 5.1), and to engines neither
                value = value.rstrip(b" \t")
            found = _bounded(value) if value else ""
        elif source.claim:
            found = ""
            if claims:
                text = _text(claims.get(source.claim)) or _along(claims, source.path)
                found = _bounded(text.encode("utf-8", "replace")) if text else ""
        else:
            found = _bounded(user.encode("utf-8", "replace")) if user else ""
        if found:
            return found
    return ""


def _along(claims: Claims, path: tuple[str, ...]) -> str:
    found: object = claims if path else None
    for name in path:
        if not isinstance(found, Mapping):
            return ""
        found = found.get(name)
    return _text(found)


def _text(value: object) -> str:
    if isinstance(value, list):
        if len(value) != 1:
            return ""
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int) or not -MAX_ID_INTEGER < value < MAX_ID_INTEGER:
        return ""
    return str(value)


def _lower(name: str) -> bytes:
    return name.lower().encode("latin-1", "replace")


def _bounded(value: bytes) -> str:
    if len(value) > MAX_ID_BYTES:
        return "blake2b:" + blake2b(value, digest_size=16).hexdigest()
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _payload(value: bytes | None) -> bytes | None:
    """The middle part of a bearer token, still encoded."""
    if not value or len(value) > MAX_TOKEN_BYTES:
        return None
    scheme, _, token = value.partition(b" ")
    parts = token.strip().split(b".")
    if len(parts) != 3 or scheme.lower() != b"bearer":
        return None
    return parts[1]
