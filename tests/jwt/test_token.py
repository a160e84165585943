"""Tokens taken apart: what two readers could read differently is none, and nothing that is said of keys is followed."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.jwt.token import MAX_DEPTH, MAX_KEY_ID, MAX_TOKEN_BYTES, SAID, Token, good_until, objection, read
from sidecar.policy.schema import JwtProvider, Seconds, Span
from tests.checks.drift import ROOT
from tests.jwt.issuing import AUDIENCE, ISSUER, NOW, bearer, claims, encoded, provider, rsa, token

HEADER = b'{"alg":"RS256","kid":"rsa"}'
PAYLOAD = json.dumps(claims()).encode()
SIGNATURE = encoded(b"s" * 256)


def made(header: bytes = HEADER, payload: bytes = PAYLOAD, signature: bytes = SIGNATURE) -> bytes:
    return bearer(encoded(header) + b"." + encoded(payload) + b"." + signature)


def nested(depth: int) -> bytes:
    return PAYLOAD[:-1] + b',"deep":' + b"[" * depth + b"]" * depth + b"}"


def changed(text: bytes, **members: object) -> bytes:
    return json.dumps({**json.loads(text), **members}).encode()


def test_a_token_is_read_as_it_was_made() -> None:
    made_of = token(rsa())
    found = read(bearer(made_of))
    assert isinstance(found, Token)
    assert (found.algorithm, found.kid, found.issuer) == ("RS256", "rsa", ISSUER)
    assert found.claims == claims()
    assert found.signed + b"." + encoded(found.signature) == made_of


WRONG = [
    ("no header", b"", "missing"),
    ("another scheme", b"Basic " + token(), "missing"),
    ("no scheme", token(), "missing"),
    ("a scheme alone", b"Bearer", "missing"),
    ("no token", b"Bearer  ", "missing"),
    ("an API key", bearer(b"sk-12345"), "opaque"),
    ("an API key with dots", bearer(b"sk.live.12345"), "opaque"),
    ("broken at its beginning", bearer(token()[1:]), "opaque"),
    ("two tokens in two lines", bearer(token()) + b", " + bearer(token()), "ambiguous"),
    ("a token and a key in two lines", bearer(token()) + b", Bearer sk-1", "ambiguous"),
    ("two tokens in a line", bearer(token()) + b" " + token(), "ambiguous"),
    ("a comma", bearer(token()) + b",", "ambiguous"),
    ("a quoted token", b'Bearer "' + token() + b'"', "malformed"),
    ("no ASCII", bearer(token()) + b"\xff", "malformed"),
    ("an API key of no ASCII", bearer(b"sk-\xc3\xa9"), "malformed"),
    ("huge", bearer(token(pad="x" * MAX_TOKEN_BYTES)), "too_large"),
    ("a huge header", made(header=changed(HEADER, pad="x" * MAX_TOKEN_BYTES)), "too_large"),
    ("truncated: no signature", bearer(token().rpartition(b".")[0]), "malformed"),
    ("truncated: an empty signature is none of RSA", bearer(token().rpartition(b".")[0] + b"."), "signed"),
    ("truncated: within the payload", bearer(token()[:80]), "malformed"),
    ("a header alone", bearer(token().partition(b".")[0] + b"."), "malformed"),
    ("four parts", bearer(token() + b".x"), "malformed"),
    ("six parts", bearer(token() + b".x.y.z"), "malformed"),
    ("an extra dot", bearer(token() + b"."), "malformed"),
    ("dots alone", bearer(b".."), "opaque"),
    ("five parts: encrypted", bearer(encoded(b'{"alg":"RSA-OAEP","enc":"A256GCM"}') + b".a.a.a.a"), "encrypted"),
    ("encrypted, in three parts", made(header=changed(HEADER, enc="A256GCM")), "encrypted"),
    ("nested", made(header=changed(HEADER, cty="JWT")), "nested"),
    ("nested, in small letters", made(header=changed(HEADER, cty="jwt")), "nested"),
    ("nested, by a media type", made(header=changed(HEADER, cty="application/JWT")), "nested"),
    ("a content type that is none", made(header=changed(HEADER, cty=["JWT"])), "nested"),
    ("a token for a payload", made(payload=token()), "malformed"),
    ("critical", made(header=changed(HEADER, crit=["exp"])), "critical"),
    ("critical and known", made(header=changed(HEADER, crit=["b64"], b64=True)), "critical"),
    ("critical of nothing", made(header=changed(HEADER, crit=[])), "critical"),
    ("unencoded payload", made(header=changed(HEADER, b64=False, crit=["b64"])), "critical"),
    ("unencoded payload, not critical", made(header=changed(HEADER, b64=False)), "critical"),
    ("b64 of zero", made(header=changed(HEADER, b64=0)), "critical"),
    ("b64 true", made(header=changed(HEADER, b64=True)), "signed"),
    ("no algorithm", made(header=b'{"kid":"rsa"}'), "malformed"),
    ("an algorithm that is a list", made(header=changed(HEADER, alg=["RS256"])), "malformed"),
    ("an algorithm that is null", made(header=changed(HEADER, alg=None)), "malformed"),
    ("a header that is a list", made(header=b'["RS256"]'), "opaque"),
    ("a header that is text", made(header=b'"RS256"'), "opaque"),
    ("a header with an algorithm twice", made(header=b'{"alg":"RS256","kid":"rsa","alg":"none"}'), "malformed"),
    ("a header with an algorithm twice, in escapes", made(header=b'{"alg":"RS256","\\u0061lg":"none"}'), "malformed"),
    ("a header in UTF-16", made(header=HEADER.decode().encode("utf-16")), "opaque"),
    ("a header with a byte order mark", made(header=b"\xef\xbb\xbf" + HEADER), "opaque"),
    ("a key that is a number", made(header=changed(HEADER, kid=7)), "malformed"),
    ("a key without a name", made(header=changed(HEADER, kid="")), "malformed"),
    ("a key with a long name", made(header=changed(HEADER, kid="k" * (MAX_KEY_ID + 1))), "malformed"),
    ("no key", made(header=b'{"alg":"RS256"}'), "signed"),
    ("claims that are no JSON", made(payload=b"{"), "malformed"),
    ("claims that are a list", made(payload=b"[1]"), "malformed"),
    ("claims that are no text", made(payload=b"\xff\xfe"), "malformed"),
    ("claims in UTF-16", made(payload=PAYLOAD.decode().encode("utf-16-le")), "malformed"),
    ("claims with NaN", made(payload=PAYLOAD[:-1] + b',"exp2":NaN}'), "malformed"),
    ("claims with half a surrogate", made(payload=PAYLOAD[:-1] + b',"n":"\\ud800"}'), "malformed"),
    ("claims with a tenant twice", made(payload=PAYLOAD[:-1] + b',"tenant":"other"}'), "malformed"),
    ("claims with a tenant twice, in escapes", made(payload=PAYLOAD[:-1] + b',"\\u0074enant":"b"}'), "malformed"),
    ("claims with an object with a name twice", made(payload=PAYLOAD[:-1] + b',"o":[{"a":1,"a":2}]}'), "malformed"),
    ("claims and something behind", made(payload=PAYLOAD + b"{}"), "malformed"),
    ("claims with digits without end", made(payload=PAYLOAD[:-1] + b',"n":' + b"9" * 5000 + b"}"), "malformed"),
    ("deep", made(payload=nested(MAX_DEPTH)), "malformed"),
    ("not quite as deep", made(payload=nested(MAX_DEPTH - 1)), "signed"),
    ("without end", made(payload=b'{"a":' + b"[" * 5000), "malformed"),
    ("as deep as its size allows", made(payload=nested(5000)), "malformed"),
    ("unicode claims", made(payload=changed(PAYLOAD, tenant="größe ✓ 组织 \U0001f600")), "signed"),
    ("no issuer", made(payload=json.dumps(claims(iss=None)).encode()), "issuer"),
    ("an issuer that is a list", made(payload=changed(PAYLOAD, iss=[ISSUER])), "issuer"),
    ("base64 with padding", bearer(token() + b"=="), "malformed"),
    ("base64 of the other alphabet", made(signature=b"+/8"), "malformed"),
    ("base64 with bits left over", made(signature=b"AB"), "malformed"),
    ("base64 of no length", made(signature=b"A"), "malformed"),
    ("base64 with a stray character", made(signature=b"AA~A"), "malformed"),
    ("where its keys are is not read", made(header=changed(HEADER, jku=7, jwk="x", x5u=[], x5c={})), "signed"),
]  # fmt: skip


@pytest.mark.parametrize(("authorization", "word"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_what_is_read(authorization: bytes, word: str) -> None:
    found = read(authorization)
    assert (found if isinstance(found, str) else "signed") == word
    assert word == "signed" or SAID[word]


@pytest.mark.parametrize("scheme", [b"Bearer ", b"bearer ", b"BEARER   "])
def test_the_scheme_has_any_case(scheme: bytes) -> None:
    assert isinstance(read(scheme + token() + b" \t"), Token)


@given(st.binary(max_size=300))
def test_no_bytes_raise(data: bytes) -> None:
    for authorization in (data, bearer(data), made(header=data), made(payload=data), made(signature=data)):
        read(authorization)


@given(at=st.integers(0, len(bearer(token())) - 1), value=st.integers(0, 255))
def test_one_byte_changed_is_another_token_or_none(at: int, value: int) -> None:
    whole = bearer(token())
    found = read(whole[:at] + bytes([value]) + whole[at + 1 :])
    if isinstance(found, Token) and at >= len(b"Bearer "):
        again = b"Bearer " + found.signed + b"." + encoded(found.signature)
        assert again.strip() == (whole[:at] + bytes([value]) + whole[at + 1 :]).strip()


def judged(rules: JwtProvider | None = None, now: float = NOW, algorithm: str = "RS256", **members: Any) -> str:
    rules = rules or provider()
    found = read(made(header=b'{"alg":"%b"}' % algorithm.encode(), payload=json.dumps(claims(**members)).encode()))
    assert isinstance(found, Token)
    word = objection(found, rules, frozenset(rules.audiences), now)
    assert bool(word) == (word in SAID)
    return word


LEEWAY = 30
OLD = provider(max_age_s=Span(3600))
ANY = provider(audiences=())
CLAIMS: list[tuple[str, dict[str, Any], JwtProvider | None, str]] = [
    ("good", {}, None, ""),
    ("expired", {"exp": NOW - LEEWAY}, None, "expired"),
    ("hardly expired, by a clock that is off", {"exp": NOW - LEEWAY + 0.1}, None, ""),
    ("no expiry", {"exp": None}, None, "times"),
    ("expiry is text", {"exp": "2030-01-01"}, None, "times"),
    ("expiry is a number in text", {"exp": str(NOW + 60)}, None, "times"),
    ("expiry is true", {"exp": True}, None, "times"),
    ("expiry is a list", {"exp": [NOW + 60]}, None, "times"),
    ("expiry beyond all clocks", {"exp": 10**30}, None, "times"),
    ("expiry beyond all floats", {"exp": 10**400}, None, "times"),
    ("expiry is negative", {"exp": -1}, None, "expired"),
    ("expiry is a fraction", {"exp": NOW + 0.5}, None, ""),
    ("not yet", {"nbf": NOW + LEEWAY + 1}, None, "early"),
    ("hardly not yet", {"nbf": NOW + LEEWAY}, None, ""),
    ("not before some text", {"nbf": "now"}, None, "times"),
    ("issued in the future", {"iat": NOW + LEEWAY + 1}, None, "future"),
    ("issued hardly in the future", {"iat": NOW + LEEWAY}, None, ""),
    ("issued at some text", {"iat": "now"}, None, "times"),
    ("not said when issued", {"iat": None}, None, ""),
    ("too old", {"iat": NOW - 3600 - LEEWAY}, OLD, "old"),
    ("hardly too old", {"iat": NOW - 3600}, OLD, ""),
    ("nobody knows how old", {"iat": None}, OLD, "times"),
    ("another audience", {"aud": "other"}, None, "audience"),
    ("nearly the audience", {"aud": AUDIENCE + "/"}, None, "audience"),
    ("no audience", {"aud": None}, None, "audience"),
    ("one of its audiences", {"aud": ["other", AUDIENCE]}, None, ""),
    ("none of its audiences", {"aud": ["other", "another"]}, None, "audience"),
    ("an empty list of audiences", {"aud": []}, None, "audience"),
    ("audiences in an object", {"aud": {AUDIENCE: AUDIENCE}}, None, "audience"),
    ("audiences that are no text", {"aud": [[AUDIENCE], 1, None]}, None, "audience"),
    ("no audience asked for, none named", {"aud": None}, ANY, ""),
    ("no audience asked for, another named", {"aud": "other"}, ANY, ""),
]


@pytest.mark.parametrize(("members", "rules", "word"), [case[1:] for case in CLAIMS], ids=[case[0] for case in CLAIMS])
def test_claims(members: dict[str, Any], rules: JwtProvider | None, word: str) -> None:
    assert judged(rules, **members) == word


@pytest.mark.parametrize(
    "algorithm", ["none", "None", "NONE", "nOnE", "HS256", "HS512", "rs256", "RS384", "ES256K", "", "RS256 ", "Ed25519"]
)
def test_only_the_algorithms_that_the_policy_names(algorithm: str) -> None:
    assert judged(algorithm=algorithm) == "algorithm"


@pytest.mark.parametrize("members", [{}, {"iat": NOW - 3000}])
def test_it_is_good_until_its_expiry_or_its_age(members: dict[str, Any]) -> None:
    for rules in (provider(), OLD, provider(leeway_s=Seconds(1))):
        found = read(made(payload=json.dumps(claims(**members)).encode()))
        assert isinstance(found, Token)
        until = good_until(found, rules)
        for at, good in ((until - 0.001, True), (until, False)):
            assert (objection(found, rules, frozenset(rules.audiences), at) == "") is good


def test_every_word_is_explained_as_clients_are_told_it() -> None:
    lines = (ROOT / "docs" / "identity.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| `")]
    said = {row[0].strip("`"): row[1] for row in rows if len(row) == 3}
    for word, message in SAID.items():
        plain = re.sub(r" \([a-z]+(, [a-z0-9]+)*\)", "", message)
        assert plain.startswith(said[word]), word
