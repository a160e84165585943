"""The keys of one provider, read from a JWK Set (RFC 7517), and signatures held against them.

1. Public keys of RSA, elliptic curves and Edwards curves. A secret key (`oct`) is none: whoever can check with it can
   sign with it. Of a private key that somebody published the public part is taken and nothing else is kept.
2. A key that is not for signatures, is too short, or of a kind that we do not know, is left out, and others count on:
   sets grow kinds before their readers do. A set of which nothing is left is a fault.
3. Which algorithms a key is for is settled here, by its kind and curve and by what it says itself; a token's `alg`
   chooses among those and never decides what a key is taken for.
4. A token names its key. One that does not is checked with the only key that it could be; where there are several, with
   none: trying all of them would make each forgery cost as many signatures.
"""

import json
from base64 import urlsafe_b64decode
from typing import Any, Final

from joserfc.errors import JoseError
from joserfc.jwa import JWS_ALGORITHMS, JWSAlgModel
from joserfc.jwk import ECKey, OKPKey, RSAKey

from sidecar.jwt.token import Token

MAX_KEYS: Final = 100
"""Of a set; large providers have ten."""

MIN_RSA_BITS: Final = 2048
"""NIST SP 800-131A; the library only warns."""

MAX_RSA_BITS: Final = 8192
"""Beyond it one signature takes milliseconds of the event loop."""

MAX_RSA_EXPONENT_BITS: Final = 33
"""Everybody has 65537; the time grows with it."""

MAX_ALIKE: Final = 4
"""Keys of one name that are tried: a name is to be unique, and is not while a provider has one for two kinds."""

_KINDS: Final[dict[str, type[RSAKey | ECKey | OKPKey]]] = {"RSA": RSAKey, "EC": ECKey, "OKP": OKPKey}
_SIGNING_CURVES: Final = ("Ed25519", "Ed448")
_PUBLIC: Final = ("kty", "kid", "use", "key_ops", "alg", "n", "e", "crv", "x", "y")
_NAMES: Final = (
    *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    *("ES256", "ES384", "ES512", "EdDSA"),
)
_ALGORITHMS: Final[dict[str, JWSAlgModel]] = {each.name: each for each in JWS_ALGORITHMS if each.name in _NAMES}


class BadKeys(Exception):
    """What should be a JWK Set is none that can be used; its text says why."""


class Key:
    """A public key, what it is called (None: nothing) and what it may be used for."""

    __slots__ = ("algorithms", "kid", "mark", "public")

    def __init__(self, kid: str | None, public: RSAKey | ECKey | OKPKey, algorithms: frozenset[str]) -> None:
        self.kid = kid
        self.public = public
        self.algorithms = algorithms
        self.mark = public.thumbprint()


class Keys:
    """A set. `left_out`: keys in it that cannot be used. `marks`: what its keys are, whatever they are called."""

    __slots__ = ("_keys", "left_out", "marks")

    def __init__(self, keys: list[Key], left_out: int) -> None:
        self._keys = keys
        self.left_out = left_out
        self.marks = frozenset((key.kid, key.mark) for key in keys)

    def __len__(self) -> int:
        return len(self._keys)

    def choose(self, kid: str | None, algorithm: str) -> list[Key] | str:
        """The keys that may have signed; a word of `token.SAID` where there are none, or too many to say."""
        named = [key for key in self._keys if key.kid == kid] if kid is not None else self._keys
        fit = [key for key in named if algorithm in key.algorithms]
        if kid is None and len(fit) > 1:
            return "key_unnamed"
        if not fit:
            return "key_unfit" if named and kid is not None else "key_unknown"
        return fit[:MAX_ALIKE]


def has_signed(key: Key, token: Token) -> bool:
    """Whether the token's signature is this key's. 30 to 200 us."""
    try:
        return _ALGORITHMS[token.algorithm].verify(token.signed, token.signature, key.public)
    except (JoseError, ValueError):  # a signature that is no such thing
        return False


def read_keys(text: bytes) -> Keys:
    """The set in a JWKS document. Raises `BadKeys`. A hundred keys take some 10 ms."""
    try:
        document = json.loads(text.decode())
    except (ValueError, RecursionError):
        raise BadKeys("is no JSON") from None
    listed = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        raise BadKeys("is no JWK Set: it has no list of keys")
    if len(listed) > MAX_KEYS:
        raise BadKeys(f"has {len(listed)} keys, more than {MAX_KEYS}")
    keys = [key for entry in listed if (key := _key(entry)) is not None]
    if not keys:
        raise BadKeys(f"has no key that could verify a signature, of {len(listed)}")
    return Keys(keys, len(listed) - len(keys))


def _key(entry: object) -> Key | None:
    if not isinstance(entry, dict):
        return None
    said: dict[str, Any] = {name: entry[name] for name in _PUBLIC if name in entry}
    kind = _KINDS.get(str(said.get("kty")))
    kid = said.get("kid")
    if kind is None or said.get("use", "sig") != "sig" or not isinstance(kid, str | None):
        return None
    try:
        if kind is RSAKey and not _is_measured(said):
            return None
        public = kind.import_key(said)
        algorithms = frozenset(name for name in _ALGORITHMS if _fits(_ALGORITHMS[name], public))
    except (JoseError, ValueError, TypeError, KeyError):  # as many ways to be wrong as there are members
        return None
    return Key(kid, public, algorithms) if algorithms else None


def _is_measured(said: dict[str, Any]) -> bool:
    """Whether an RSA key is of a size that we take. Before it is made: a large one takes time, and of a small one the
    library warns where nobody reads it."""
    modulus, exponent = (int.from_bytes(urlsafe_b64decode(said[name] + "==")) for name in ("n", "e"))
    return MIN_RSA_BITS <= modulus.bit_length() <= MAX_RSA_BITS and exponent.bit_length() <= MAX_RSA_EXPONENT_BITS


def _fits(algorithm: JWSAlgModel, public: RSAKey | ECKey | OKPKey) -> bool:
    try:
        algorithm.check_key(public)
        public.check_key_op("verify")
    except JoseError:
        return False
    return not isinstance(public, OKPKey) or public.curve_name in _SIGNING_CURVES
