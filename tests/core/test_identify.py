"""Session and tenant from headers, the body's user and tokens."""

from base64 import urlsafe_b64encode

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.identify import MAX_ID_BYTES, MAX_TOKEN_BYTES, NOBODY, Identifier
from sidecar.kernel.exchange import Header
from sidecar.policy.schema import Identity, Jwt, Source
from sidecar.wire.headers import PASSED, Line

ISSUER = "https://issuer.test"
BY_CLAIM = Identity(
    session=(Source(jwt_claim="sid"), Source(header="x-session-id"), Source(body="user")),
    tenant=(Source(jwt_claim="tenant"), Source(header="x-tenant-id")),
    jwt=Jwt(issuers=(ISSUER,)),
)


def encoded(part: bytes) -> bytes:
    return urlsafe_b64encode(part).rstrip(b"=")


def token(**claims: object) -> bytes:
    return b".".join((encoded(b'{"alg":"RS256"}'), encoded(msgspec.json.encode(claims)), encoded(b"signature")))


def bearer(value: bytes, scheme: bytes = b"Bearer ") -> list[Header]:
    return [(b"host", b"h"), (b"authorization", scheme + value)]


def lines(headers: list[Header]) -> list[Line]:
    return [Line(name, value, PASSED, b"") for name, value in headers]


def session(identity: Identity, headers: list[Header], user: str = "") -> str | None:
    return Identifier(identity).identify(lines(headers), user).session


@pytest.mark.parametrize(
    ("headers", "user", "expected"),
    [
        pytest.param([], "", None, id="nothing"),
        pytest.param([(b"x-session-id", b"s1")], "", "s1", id="header"),
        pytest.param([], "u1", "u1", id="user"),
        pytest.param([(b"x-session-id", b"s1")], "u1", "s1", id="first source wins"),
        pytest.param([(b"x-session-id", b"")], "u1", "u1", id="an empty header is absent"),
        pytest.param([(b"x-session-id", b"a"), (b"x-session-id", b"b")], "", "a", id="first of two"),
        pytest.param([(b"x-session-id2", b"a"), (b"x-session-i", b"b")], "", None, id="other names"),
        pytest.param([(b"x-session-id", "sé".encode())], "", "sé", id="utf-8"),
        pytest.param([(b"x-session-id", b"s\xe9")], "", "sé", id="latin-1"),
    ],
)
def test_default_sources(headers: list[Header], user: str, expected: str | None) -> None:
    assert session(Identity(), headers, user) == expected


def test_header_names_of_the_policy_may_have_any_case() -> None:
    assert session(Identity(session=(Source(header="X-My-ID"),)), [(b"x-my-id", b"s")]) == "s"


def test_no_source_is_nobody() -> None:
    who = Identifier(Identity(session=(), tenant=())).identify(
        lines([(b"x-session-id", b"s"), (b"x-tenant-id", b"t")]), "u"
    )
    assert who is NOBODY


def test_tenant_beside_session() -> None:
    who = Identifier(Identity()).identify(lines([(b"x-tenant-id", b"t"), (b"x-session-id", b"s")]), "")
    assert (who.session, who.tenant) == ("s", "t")
    assert Identifier(Identity()).identify(lines([(b"x-tenant-id", b"t")]), "").session is None


@pytest.mark.parametrize("source", ["header", "user", "claim"])
@pytest.mark.parametrize("length", [MAX_ID_BYTES, MAX_ID_BYTES + 1, 8000])
def test_long_ids_are_hashed_to_a_bounded_and_distinct_id(source: str, length: int) -> None:
    def found(value: str) -> str | None:
        match source:
            case "header":
                return session(Identity(), [(b"x-session-id", value.encode())])
            case "user":
                return session(Identity(), [], value)
            case _:
                return session(BY_CLAIM, bearer(token(iss=ISSUER, sid=value)))

    one, other = found("a" * length), found("a" * (length - 1) + "b")
    assert one is not None and other is not None and one != other
    assert len(one) <= MAX_ID_BYTES
    assert (one == "a" * length) == (length <= MAX_ID_BYTES)


def test_ids_are_bounded_in_bytes_not_characters() -> None:
    found = session(Identity(), [], "é" * 200)
    assert found is not None and found.startswith("blake2b:")


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        pytest.param(bearer(token(iss=ISSUER, sid="s9")), "s9", id="believed"),
        pytest.param(bearer(token(iss=ISSUER, sid="s9"), b"bearer  "), "s9", id="scheme in any case"),
        pytest.param(bearer(token(iss=ISSUER, sid=42)), "42", id="a number"),
        pytest.param(bearer(token(iss="https://evil.test", sid="s9")), None, id="another issuer"),
        pytest.param(bearer(token(iss=ISSUER + "/", sid="s9")), None, id="nearly the issuer"),
        pytest.param(bearer(token(iss=[ISSUER], sid="s9")), None, id="a list of issuers"),
        pytest.param(bearer(token(sid="s9")), None, id="no issuer"),
        pytest.param(bearer(token(iss=ISSUER)), None, id="no claim"),
        pytest.param(bearer(token(iss=ISSUER, sid="")), None, id="empty claim"),
        pytest.param(bearer(token(iss=ISSUER, sid=None)), None, id="null claim"),
        pytest.param(bearer(token(iss=ISSUER, sid={"a": 1})), None, id="object claim"),
        pytest.param(bearer(token(iss=ISSUER, sid=True)), None, id="true"),
        pytest.param(bearer(token(iss=ISSUER, sid="s9"), b"Basic "), None, id="another scheme"),
        pytest.param(bearer(token(iss=ISSUER, sid="s9"), b""), None, id="no scheme"),
        pytest.param(bearer(b"sk-12345"), None, id="an API key"),
        pytest.param(bearer(b"a.b"), None, id="two parts"),
        pytest.param(bearer(token(iss=ISSUER, sid="s9") + b".x"), None, id="four parts"),
        pytest.param(bearer(b"a." + encoded(b"[1]") + b".c"), None, id="claims are a list"),
        pytest.param(bearer(b"a." + encoded(b"\xff\xfe") + b".c"), None, id="claims are no text"),
        pytest.param(bearer(b"a.!!!.c"), None, id="no base64"),
        pytest.param(bearer(b"a.A.c"), None, id="base64 of no length"),
        pytest.param(bearer(b"a.\xff\xff\xff\xff.c"), None, id="no ASCII"),
        pytest.param(bearer(token(iss=ISSUER, sid="s9", pad="x" * MAX_TOKEN_BYTES)), None, id="too large"),
    ],
)
def test_claims_of_tokens(headers: list[Header], expected: str | None) -> None:
    assert session(BY_CLAIM, headers) == expected


def test_every_padding_of_a_token_is_read() -> None:
    for length in range(1, 9):
        assert session(BY_CLAIM, bearer(token(iss=ISSUER, sid="s" * length))) == "s" * length


def test_unreadable_token_falls_through_to_the_next_source() -> None:
    assert session(BY_CLAIM, [*bearer(b"a.b.c"), (b"x-session-id", b"s1")]) == "s1"


def test_a_token_without_end_is_none() -> None:
    for start in (b"[", b'{"iss":"x","a":'):
        deep = start + b"[" * 5000
        assert session(BY_CLAIM, bearer(b"a." + encoded(deep) + b".c")) is None
    claim = b'{"iss":"%b","sid":%b}' % (ISSUER.encode(), b"[" * 900 + b"]" * 900)
    assert session(BY_CLAIM, bearer(b"a." + encoded(claim) + b".c")) is None


def test_without_issuers_no_token_is_read() -> None:
    identity = Identity(session=(Source(jwt_claim="sid"),), tenant=(), jwt=Jwt())
    assert session(identity, bearer(token(iss=ISSUER, sid="s9"))) is None
    assert session(identity, bearer(token(iss="", sid="s9"))) is None


def test_tenant_from_a_claim() -> None:
    assert Identifier(BY_CLAIM).identify(lines(bearer(token(iss=ISSUER, tenant="t"))), "").tenant == "t"


@given(headers=st.lists(st.tuples(st.sampled_from([b"authorization", b"x-session-id"]), st.binary())), user=st.text())
def test_no_input_raises_and_ids_are_bounded(headers: list[Header], user: str) -> None:
    for identity in (Identity(), BY_CLAIM):
        who = Identifier(identity).identify(lines(headers), user)
        assert who.session is None or 0 < len(who.session) <= MAX_ID_BYTES


@given(payload=st.binary())
def test_no_token_raises(payload: bytes) -> None:
    Identifier(BY_CLAIM).identify(lines(bearer(b"a." + encoded(payload) + b".c")), "")
