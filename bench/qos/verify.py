"""What a token costs a request on the event loop, by its algorithm: the first time, again, and where it is bad.

    python -m bench.qos.verify           microseconds, best of several runs

Also: reading a key set, which happens on another thread, and identifying a request with and without a token's claims.
"""

import argparse
import json
import time
from collections.abc import Callable

from joserfc.jwa import JWS_ALGORITHMS
from joserfc.jwk import ECKey, OKPKey, RSAKey

from sidecar.core.identify import Identifier, authorization
from sidecar.jwt.keys import MAX_KEYS, read_keys
from sidecar.jwt.source import Source
from sidecar.jwt.token import MAX_TOKEN_BYTES
from sidecar.jwt.verifier import TokenVerifier
from sidecar.policy.schema import Identity, Jwt, JwtProvider
from sidecar.proxy.ports import Verified
from sidecar.wire.headers import PASSED, Line
from tests.clock import Clock
from tests.jwt.issuing import encoded

FRESH_AIM_US = 200.0
AGAIN_AIM_US = 2.0
ISSUER = "https://login.example.com/realms/main"
NOW = 1_800_000_000.0
CLAIMS = {
    "iss": ISSUER,
    "aud": ["llm", "account"],
    "sub": "f:5b1f7f0e-8a1f-4c55-a7bb-2f6a9f6b5b1d:jdoe",
    "iat": NOW - 10,
    "exp": NOW + 600,
    "jti": "c1d3a0c2-0d0f-4d5c-8a4c-5b8f3c1b9a77",
    "azp": "chat-frontend",
    "scope": "openid profile email",
    "realm_access": {"roles": ["offline_access", "uma_authorization", "default-roles-main"]},
    "tenant": "acme",
    "sid": "0c5f8b0e-4cfa-4d8f-b7bd-3b8a5e3c1f42",
    "class": "voice-realtime",
    "preferred_username": "jdoe",
}
"""As Keycloak writes them."""


class Nobody:
    """Waits for nothing."""

    def woken(self) -> None:
        raise AssertionError


def token(key: RSAKey | ECKey | OKPKey, algorithm: str, **changed: object) -> bytes:
    """`Bearer` and a token."""
    head = encoded(json.dumps({"alg": algorithm, "typ": "JWT", "kid": key.kid}).encode())
    head += b"." + encoded(json.dumps({**CLAIMS, **changed}).encode())
    sign = next(each for each in JWS_ALGORITHMS if each.name == algorithm).sign
    return b"Bearer " + head + b"." + encoded(sign(head, key))


def best_us(act: Callable[[], object], times: int, runs: int = 60) -> float:
    """Of several short runs, the quickest: others use the machine, too."""
    best = float("inf")
    for _ in range(runs):
        began = time.perf_counter()
        for _ in range(times):
            act()
        best = min(best, (time.perf_counter() - began) / times)
    return best * 1e6


def main() -> None:
    """Measure and print."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    kinds: list[tuple[str, RSAKey | ECKey | OKPKey]] = [
        ("RS256", RSAKey.generate_key(2048, {"kid": "rsa2048"})),
        ("PS256", RSAKey.generate_key(2048, {"kid": "pss2048"})),
        ("RS256", RSAKey.generate_key(4096, {"kid": "rsa4096"})),
        ("ES256", ECKey.generate_key("P-256", {"kid": "p256"})),
        ("ES384", ECKey.generate_key("P-384", {"kid": "p384"})),
        ("ES512", ECKey.generate_key("P-521", {"kid": "p521"})),
        ("EdDSA", OKPKey.generate_key("Ed25519", {"kid": "ed25519"})),
    ]
    text = json.dumps({"keys": [key.as_dict(private=False) for _, key in kinds]}).encode()
    provider = JwtProvider(
        issuer=ISSUER,
        audiences=("llm",),
        jwks_url="https://login.example.com/keys",
        algorithms=("RS256", "PS256", "ES256", "ES384", "ES512", "EdDSA"),
    )
    verifier = TokenVerifier(Clock(), lambda: 0.5, lambda level, event, **fields: None)
    verifier.use(Jwt(verified_by="sidecar", providers=(provider,)))
    source: Source = verifier._issuers[ISSUER].source
    source.take(read_keys(text), verifier._timers.time(), 0.0)
    nobody = Nobody()

    def verify(value: bytes) -> object:
        return verifier.verify(value, NOW, nobody)

    def fresh(value: bytes) -> object:
        verifier._forget_verdicts()
        return verify(value)

    print(f"{'token':<26}{'bytes':>7}{'first us':>10}{'again us':>10}{'forged us':>11}")
    for algorithm, key in kinds:
        value = token(key, algorithm)
        forged = token(key, algorithm, tenant="b").rpartition(b".")[0] + b"." + value.rpartition(b".")[2]
        if not isinstance(verify(value), Verified) or isinstance(verify(forged), Verified):
            raise AssertionError("a good token is refused, or a forged one taken")
        first, again = (
            best_us(lambda value=value: fresh(value), 20),
            best_us(lambda value=value: verify(value), 1000),
        )
        bad = best_us(lambda forged=forged: fresh(forged), 20)
        print(f"{f'{algorithm} {key.kid}':<26}{len(value):>7}{first:>10.1f}{again:>10.2f}{bad:>11.1f}")
    key = kinds[0][1]
    large = token(key, "RS256", groups=[f"group-{number:06}" for number in range(700)])
    others = [
        ("expired", token(key, "RS256", exp=NOW - 100)),
        ("another issuer", token(key, "RS256", iss="https://evil.test")),
        ("another audience", token(key, "RS256", aud="other")),
        ("an API key", b"Bearer sk-0123456789abcdef0123456789abcdef"),
        ("16 KiB of claims", large),
        ("16 KiB of brackets", b"Bearer " + encoded(b'{"alg":"RS256"}') + b"." + encoded(b"[" * 12_000) + b".AA"),
        ("16 KiB of audiences", token(key, "RS256", aud=["x"] * 2300)),
        ("64 KiB", b"Bearer " + b"e" * 65_000),
    ]
    for name, value in others:
        if len(value) > MAX_TOKEN_BYTES + 7 and not name.startswith("64"):
            raise AssertionError(f"{name} has {len(value)} bytes")
        first = best_us(lambda value=value: fresh(value), 20)
        again = best_us(lambda value=value: verify(value), 500)
        print(f"{name:<26}{len(value):>7}{first:>10.1f}{again:>10.2f}")

    lines = [Line(b"x-header-%d" % number, b"value", PASSED, b"") for number in range(9)]
    lines.append(Line(b"authorization", token(key, "RS256"), PASSED, b""))
    plain, verified = (
        Identifier(Identity()),
        Identifier(Identity(jwt=Jwt(verified_by="sidecar", providers=(provider,)))),
    )
    print(f"{'authorization()':<33}{best_us(lambda: authorization(lines), 1000):>10.2f}")
    print(f"{'identify, nobody':<33}{best_us(lambda: plain.identify(lines, ''), 1000):>10.2f}")
    named = [*lines, Line(b"x-session-id", b"s", PASSED, b""), Line(b"x-tenant-id", b"t", PASSED, b"")]
    print(f"{'identify, by headers':<33}{best_us(lambda: plain.identify(named, ''), 1000):>10.2f}")
    print(f"{'identify, by claims':<33}{best_us(lambda: verified.identify(lines, '', False, CLAIMS), 1000):>10.2f}")
    full = json.dumps(
        {"keys": [{**kinds[3][1].as_dict(private=False), "kid": f"k{n}"} for n in range(MAX_KEYS)]}
    ).encode()
    print(f"{'a set of 100 keys, off the loop':<33}{best_us(lambda: read_keys(full), 1, 5):>10.0f}")


if __name__ == "__main__":
    main()
