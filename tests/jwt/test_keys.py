"""Key sets as providers publish them, and signatures held against their keys."""

import json
from typing import Any

import pytest
from joserfc.jwk import OctKey, RSAKey

from sidecar.jwt.keys import MAX_ALIKE, MAX_KEYS, BadKeys, Key, has_signed, read_keys
from sidecar.jwt.token import Token, read
from tests.jwt.issuing import Private, bearer, decoded, ec, encoded, jwks, okp, rsa, token

PAYLOAD = b'{"iss":"i"}'
RSA = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512"]
KINDS: list[tuple[Private, list[str]]] = [
    (rsa(), RSA),
    (ec(), ["ES256"]),
    (ec("ec384", "P-384"), ["ES384"]),
    (ec("ec521", "P-521"), ["ES512"]),
    (okp(), ["EdDSA"]),
    (okp("ed448", "Ed448"), ["EdDSA"]),
]
IDS = [str(key.kid) for key, _ in KINDS]


def parsed(value: bytes) -> Token:
    found = read(bearer(value))
    assert isinstance(found, Token), found
    return found


def only(text: bytes) -> Key:
    keys = read_keys(text)
    assert len(keys) == 1
    algorithm = next(iter(keys._keys[0].algorithms))
    chosen = keys.choose(None, algorithm)
    assert not isinstance(chosen, str)
    return chosen[0]


def text_of(*entries: object) -> bytes:
    return json.dumps({"keys": entries}).encode()


def entry(key: Private, **changed: object) -> dict[str, Any]:
    return {name: value for name, value in {**key.as_dict(private=False), **changed}.items() if value is not None}


@pytest.mark.parametrize(("key", "algorithms"), KINDS, ids=IDS)
def test_a_key_is_for_the_algorithms_of_its_kind_and_verifies_them(key: Private, algorithms: list[str]) -> None:
    known = only(jwks(key))
    assert known.algorithms == set(algorithms) and known.kid == key.kid
    for algorithm in algorithms:
        assert has_signed(known, parsed(token(key, algorithm)))


@pytest.mark.parametrize(("key", "algorithms"), KINDS, ids=IDS)
def test_no_other_signature_is_taken(key: Private, algorithms: list[str]) -> None:
    known, algorithm = only(jwks(key)), algorithms[0]
    good = token(key, algorithm)
    head, _, last = good.rpartition(b".")
    signature = decoded(last)
    forged = [
        b"",
        b"\0",
        bytes(len(signature)),
        b"\xff" * len(signature),
        signature[:-1],
        signature + b"\0",
        signature[::-1],
        bytes([signature[0] ^ 1]) + signature[1:],
        b"\x30\x06\x02\x01\x01\x02\x01\x01",
    ]
    for each in forged:
        assert not has_signed(known, parsed(head + b"." + encoded(each))), each
    claims = encoded(PAYLOAD)
    assert not has_signed(known, parsed(b".".join((head.partition(b".")[0], claims, last))))


def test_es256_by_a_key_of_another_curve_has_no_key() -> None:
    keys = read_keys(jwks(ec("other", "P-384")))
    assert keys.choose("other", "ES256") == "key_unfit"
    assert keys.choose("other", "RS256") == "key_unfit"
    assert not isinstance(keys.choose("other", "ES384"), str)


@pytest.mark.parametrize(
    ("kid", "algorithm", "found"),
    [
        ("rsa", "RS256", ["rsa"]),
        ("ec", "ES256", ["ec"]),
        ("rsa", "ES256", "key_unfit"),
        ("ec", "RS256", "key_unfit"),
        ("RSA", "RS256", "key_unknown"),
        ("unknown", "RS256", "key_unknown"),
        (None, "RS256", ["rsa"]),
        (None, "ES384", "key_unknown"),
        (None, "ES256", "key_unnamed"),
    ],
)
def test_which_key_a_token_may_be_of(kid: str | None, algorithm: str, found: list[str] | str) -> None:
    keys = read_keys(jwks(rsa(), ec(), ec("ec2")))
    chosen = keys.choose(kid, algorithm)
    assert (chosen if isinstance(chosen, str) else [key.kid for key in chosen]) == found


def test_keys_of_one_name_are_all_tried_up_to_a_bound() -> None:
    several = [ec(f"alike{number}") for number in range(MAX_ALIKE + 2)]
    keys = read_keys(jwks(rsa(), *several, kid="same"))
    assert keys.choose("same", "RS256") != keys.choose("same", "ES256")
    chosen = keys.choose("same", "ES256")
    assert not isinstance(chosen, str)
    assert len(chosen) == MAX_ALIKE
    second = parsed(token(several[1], "ES256", header={"kid": "same"}))
    assert [has_signed(key, second) for key in chosen] == [False, True, False, False]


def test_what_a_key_says_of_itself_holds() -> None:
    assert only(text_of(entry(rsa(), alg="PS256"))).algorithms == {"PS256"}
    assert only(text_of(entry(rsa(), use=None, key_ops=["verify"]))).algorithms == set(RSA)


LEFT_OUT: list[tuple[str, object]] = [
    ("for encryption", entry(rsa(), use="enc")),
    ("for another algorithm", entry(rsa(), alg="RSA-OAEP")),
    ("for signing alone", entry(rsa(), use=None, key_ops=["sign"])),
    ("a shared secret", OctKey.generate_key(256, {"kid": "oct"}).as_dict(private=True)),
    ("a shared secret with a name of RSA", {"kty": "oct", "k": "c2VjcmV0", "kid": "rsa", "alg": "RS256"}),
    ("too short", {**RSAKey.import_key({"kty": "RSA", "n": entry(rsa())["n"], "e": "AQAB"}).as_dict(), "n": "AQAB"}),
    ("too long", entry(rsa(), n=encoded(b"\xff" * 2049).decode())),
    ("with a slow exponent", entry(rsa(), e=encoded(b"\xff" * 5).decode())),
    ("of no kind", {"kid": "x"}),
    ("of an unknown kind", {"kty": "AKP", "kid": "x", "pub": "AA"}),
    ("of a kind that is a list", {"kty": ["RSA"]}),
    ("for exchange", okp("x", "X25519").as_dict(private=False)),
    ("of an unknown curve", entry(ec(), crv="P-999")),
    ("of a curve that signs for coins", {"kty": "EC", "crv": "secp256k1", "x": "AA", "y": "AA"}),
    ("on no curve", entry(ec(), x=entry(ec("ec2"))["x"])),
    ("without its number", entry(rsa(), n=None)),
    ("with a number in a number", entry(rsa(), n=7)),
    ("with a number of no base64", entry(rsa(), n="é")),
    ("with a name that is a number", entry(rsa(), kid=7)),
    ("text", "rsa"),
    ("null", None),
]


@pytest.mark.parametrize("bad", [case[1] for case in LEFT_OUT], ids=[case[0] for case in LEFT_OUT])
@pytest.mark.filterwarnings("error")
def test_keys_that_cannot_be_used_are_left_out(bad: object) -> None:
    keys = read_keys(text_of(bad, entry(ec())))
    assert (len(keys), keys.left_out) == (1, 1)
    with pytest.raises(BadKeys, match="no key that could verify"):
        read_keys(text_of(bad))


def test_of_a_private_key_that_was_published_nothing_secret_is_kept() -> None:
    known = only(json.dumps({"keys": [rsa().as_dict(private=True)]}).encode())
    assert not known.public.is_private
    assert has_signed(known, parsed(token(rsa())))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "is no JSON"),
        (b"<html>Sign in</html>", "is no JSON"),
        (b"\xff", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b"[]", "is no JWK Set"),
        (b'{"keys":{}}', "is no JWK Set"),
        (b'{"error":"x"}', "is no JWK Set"),
        (b'{"keys":[]}', "no key that could verify"),
        (text_of(*[{}] * (MAX_KEYS + 1)), "more than 100"),
    ],
)
def test_what_is_no_set_of_keys(text: bytes, why: str) -> None:
    with pytest.raises(BadKeys, match=why):
        read_keys(text)


def test_marks_tell_a_rotation() -> None:
    one, two = read_keys(jwks(rsa(), ec())), read_keys(jwks(ec(), rsa()))
    assert one.marks == two.marks
    assert read_keys(jwks(rsa())).marks < one.marks
    assert read_keys(jwks(ec("ec2"), kid="ec")).marks != read_keys(jwks(ec())).marks
