"""Issuers of tokens, with real keys: what providers publish and sign, and what those who are none make of it."""

import hashlib
import hmac
import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from functools import cache
from typing import Any

from joserfc.jwa import JWS_ALGORITHMS
from joserfc.jwk import ECKey, OKPKey, RSAKey

from sidecar.policy.schema import Jwt, JwtProvider, Seconds

ISSUER = "https://issuer.test/realms/main"
AUDIENCE = "llm"
NOW = 1_800_000_000.0

Private = RSAKey | ECKey | OKPKey


def encoded(part: bytes) -> bytes:
    return urlsafe_b64encode(part).rstrip(b"=")


def decoded(part: bytes) -> bytes:
    return urlsafe_b64decode(part + b"==")


@cache
def rsa(name: str = "rsa", bits: int = 2048) -> RSAKey:
    """A key, made once per run: a large prime takes a tenth of a second."""
    return RSAKey.generate_key(bits, {"kid": name, "use": "sig"})


@cache
def ec(name: str = "ec", curve: str = "P-256") -> ECKey:
    return ECKey.generate_key(curve, {"kid": name, "use": "sig"})


@cache
def okp(name: str = "ed", curve: str = "Ed25519") -> OKPKey:
    return OKPKey.generate_key(curve, {"kid": name})  # type: ignore[arg-type]


def jwks(*keys: Private, **more: object) -> bytes:
    """What a provider publishes of its keys; `more` members go into each."""
    return json.dumps({"keys": [{**key.as_dict(private=False), **more} for key in keys]}).encode()


def claims(**changed: object) -> dict[str, Any]:
    """A good token's; None takes one away."""
    made = {"iss": ISSUER, "aud": AUDIENCE, "sub": "u1", "iat": NOW - 10, "exp": NOW + 600, "tenant": "acme", **changed}
    return {name: value for name, value in made.items() if value is not None}


def signing(algorithm: str, signed: bytes, key: Private) -> bytes:
    """The signature, whatever the algorithm is called in the header."""
    return next(each for each in JWS_ALGORITHMS if each.name == algorithm).sign(signed, key)


def signed(header: bytes, payload: bytes, key: Private, algorithm: str = "RS256") -> bytes:
    """A token of any two parts."""
    head = encoded(header) + b"." + encoded(payload)
    return head + b"." + encoded(signing(algorithm, head, key))


def token(
    key: Private | None = None, algorithm: str = "RS256", *, header: dict[str, Any] | None = None, **changed: object
) -> bytes:
    """A good token; `header` changes its header's members (None takes one away), `changed` its claims."""
    key = key or rsa()
    head: dict[str, Any] = {"alg": algorithm, "typ": "JWT", "kid": key.kid, **(header or {})}
    head = {name: value for name, value in head.items() if value is not None}
    return signed(json.dumps(head).encode(), json.dumps(claims(**changed)).encode(), key, algorithm)


def with_secret(secret: bytes, **header: object) -> bytes:
    """What is made by taking a published key for a shared secret."""
    head = encoded(json.dumps({"alg": "HS256", "kid": "rsa", **header}).encode())
    head += b"." + encoded(json.dumps(claims()).encode())
    return head + b"." + encoded(hmac.new(secret, head, hashlib.sha256).digest())


def bearer(value: bytes) -> bytes:
    return b"Bearer " + value


def provider(**changed: Any) -> JwtProvider:
    return JwtProvider(
        **{
            "issuer": ISSUER,
            "audiences": (AUDIENCE,),
            "jwks_url": "https://issuer.test/keys",
            "leeway_s": Seconds(30),
            **changed,
        }
    )


def policy(*providers: JwtProvider, required: bool = True) -> Jwt:
    return Jwt(verified_by="sidecar", providers=providers or (provider(),), required=required)
