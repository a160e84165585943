"""A bearer token, taken apart and held against its provider's rules, before its signature is looked at.

Not by the library, which reads tokens of its own making well and is lenient with others: what two readers could read
differently is no token here. A name that is there twice, base64 with a stray or a superfluous character, another
character set than UTF-8, a number that is none: each is refused. The library is left what it alone can do, keys and
signatures.

1. What does not begin as a token of three parts (a JSON object in base64url, and a dot) is opaque: an API key, say. It
   passes where no token is required, and says nothing of anybody.
2. Only these words of a token's head count: `alg`, `kid`, `crit` and `b64` (refused), `cty` (a token in a token is
   refused). Where it says that its key could be found (`jku`, `jwk`, `x5u`, `x5c`) is not read: that is for the policy
   to say.
3. Everything that costs no signature is judged first, since the order changes no verdict: a flood of expired tokens is
   to cost as little as it can.

RFC 7515 (JWS), RFC 7519 (JWT), RFC 8725 (their best practices).
"""

import json
from base64 import b64encode
from binascii import Error as Base64Error
from binascii import a2b_base64
from collections.abc import Mapping
from typing import Any, Final, TypeGuard

import msgspec

from sidecar.policy.schema import JwtProvider

MAX_TOKEN_BYTES: Final = 16 * 1024  # as `core.identify`: larger ones do not pass common proxies either
MAX_DEPTH: Final = 16  # of objects and lists; what is deeper than 4 was not made for anybody to read
MAX_TIME: Final = 1e12  # the year 33658; some providers write one of 10,000 for ever
MAX_KEY_ID: Final = 512  # a URL, as some providers name their keys

SAID: Final = {
    "missing": "a bearer token is required",
    "opaque": "the bearer token is no JWT, and one is required",
    "ambiguous": "the authorization header is there twice, or holds more than one token",
    "too_large": f"the token exceeds {MAX_TOKEN_BYTES} bytes",
    "malformed": "the token is no well-formed JWT: three parts in base64url, two of them objects, nothing named twice",
    "encrypted": "the token is encrypted, and only signed ones are read",
    "nested": "the token holds another token, which is not read",
    "critical": "the token's header demands what is not understood (crit, b64)",
    "issuer": "nobody who is trusted issued the token (iss)",
    "algorithm": "the token's algorithm (alg) is none of those that its issuer may sign with",
    "key_unknown": "the token's key (kid) is none of its issuer's",
    "key_unfit": "the token's key (kid) is not one for its algorithm (alg)",
    "key_unnamed": "the token names no key (kid), and its issuer has several that it could be",
    "signature": "the token's signature is not its issuer's",
    "expired": "the token has expired (exp)",
    "early": "the token is not valid yet (nbf)",
    "future": "the token was issued in the future (iat): one of two clocks is wrong",
    "old": "the token was issued too long ago (iat)",
    "times": "the token's times (exp, nbf, iat) are not all numbers, or one that is needed is missing",
    "audience": "the token is not meant for this service (aud)",
}
"""What is wrong with a token, by the word that metrics and events have for it, as its client is told."""

_URLSAFE: Final = bytes.maketrans(b"+/", b"-_")
_STANDARD: Final = bytes.maketrans(b"-_", b"+/")
_PLAIN: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~+/="
"""What a bearer token is of (RFC 6750, 2.1)."""

_decode: Final = msgspec.json.Decoder(dict[str, Any]).decode


class Token:
    """One that is well-formed. Nothing of it is true yet. `kid` None: it names no key."""

    __slots__ = ("algorithm", "claims", "issuer", "kid", "signature", "signed")

    def __init__(
        self, algorithm: str, kid: str | None, issuer: str, claims: dict[str, Any], signed: bytes, signature: bytes
    ) -> None:
        self.algorithm = algorithm
        self.kid = kid
        self.issuer = issuer
        self.claims = claims
        self.signed = signed
        self.signature = signature


def read(authorization: bytes) -> Token | str:
    """What the header of that name holds: a token, or a word. `missing` and `opaque` are faults only where one is
    required, all other words are."""
    scheme, _, rest = authorization.partition(b" ")
    if scheme.lower() != b"bearer":
        return "missing"
    token = rest.strip(b" \t")
    if not token:
        return "missing"
    if len(token) > MAX_TOKEN_BYTES:
        return "too_large"
    if token.translate(None, _PLAIN):
        return "ambiguous" if b" " in token or b"," in token else "malformed"
    first, dot, others = token.partition(b".")
    if not dot:
        return "opaque"
    header = _object(first)
    if header is None:
        # A token that is broken right at its beginning is none: nobody could tell it from an API key.
        return "opaque"
    parts = others.split(b".")
    if len(parts) == 4 or "enc" in header:
        return "encrypted"
    if len(parts) != 2:
        return "malformed"
    algorithm, kid, content = header.get("alg"), header.get("kid"), header.get("cty")
    if not isinstance(algorithm, str) or _repeats(first):
        return "malformed"
    if kid is not None and (not isinstance(kid, str) or not 0 < len(kid) <= MAX_KEY_ID):
        return "malformed"
    if "crit" in header or header.get("b64", True) is not True:
        return "critical"
    if content is not None and (not isinstance(content, str) or "jwt" in content.lower()):
        return "nested"
    claims, signature = _object(parts[0]), _unbase64(parts[1])
    if claims is None or signature is None or _repeats(parts[0]):
        return "malformed"
    issuer = claims.get("iss")
    if not isinstance(issuer, str):
        return "issuer"
    return Token(algorithm, kid, issuer, claims, token[: -len(parts[1]) - 1], signature)


def objection(token: Token, provider: JwtProvider, audiences: frozenset[str], now_wall: float) -> str:
    """What speaks against a token of this provider's but for its signature: a word, "" for nothing.

    `audiences` are the provider's, empty: any. Lists of a token are long where an attacker wrote them.
    """
    if token.algorithm not in provider.algorithms:
        return "algorithm"
    claims, leeway = token.claims, float(provider.leeway_s)
    expires, begins, issued = claims.get("exp"), claims.get("nbf", 0), claims.get("iat")
    if issued is None and provider.max_age_s is None:
        issued = 0
    if not _is_time(expires) or not _is_time(begins) or not _is_time(issued):
        return "times"
    if expires <= now_wall - leeway:
        return "expired"
    if begins > now_wall + leeway:
        return "early"
    if issued > now_wall + leeway:
        return "future"
    if provider.max_age_s is not None and issued + provider.max_age_s <= now_wall - leeway:
        return "old"
    if audiences:
        named = claims.get("aud")
        if isinstance(named, str):
            named = [named]
        if not isinstance(named, list) or audiences.isdisjoint([each for each in named if isinstance(each, str)]):
            return "audience"
    return ""


def good_until(token: Token, provider: JwtProvider) -> float:
    """When time alone makes it a bad one, in seconds since the epoch; of one that has no objection against it."""
    until = float(token.claims["exp"])
    if provider.max_age_s is not None:
        until = min(until, token.claims["iat"] + provider.max_age_s)
    return until + float(provider.leeway_s)


def _object(part: bytes) -> dict[str, Any] | None:
    """The JSON object in a part; None: there is none, or it is too deep."""
    text = _unbase64(part)
    if text is None:
        return None
    try:
        found: dict[str, Any] = _decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return None
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH and not _is_shallow(found, MAX_DEPTH):
        return None
    return found


def _repeats(part: bytes) -> bool:
    """Whether an object in a part that was read has a name twice: each reader may take another."""
    try:
        json.loads(a2b_base64(part.translate(_STANDARD) + b"=="), object_pairs_hook=_once)
    except (ValueError, RecursionError):
        return True
    return False


def _once(pairs: list[tuple[str, Any]]) -> None:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("a name is there twice")


def _is_shallow(value: object, depth: int) -> bool:
    if isinstance(value, Mapping):
        return depth > 0 and all(_is_shallow(each, depth - 1) for each in value.values())
    if isinstance(value, list):
        return depth > 0 and all(_is_shallow(each, depth - 1) for each in value)
    return True


def _unbase64(part: bytes) -> bytes | None:
    """Base64url without padding, in the one way to write it (RFC 7515, 2); None: it is not that."""
    try:
        data = a2b_base64(part.translate(_STANDARD) + b"=" * (-len(part) % 4))
    except Base64Error:
        return None
    return data if b64encode(data).translate(_URLSAFE).rstrip(b"=") == part else None


def _is_time(value: object) -> TypeGuard[int | float]:
    """Whether it is a NumericDate: a number, and neither a truth value nor one that no clock will ever show."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -MAX_TIME < value < MAX_TIME
