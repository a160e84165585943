"""Session and tenant from headers, the body's user and tokens."""

from base64 import urlsafe_b64encode

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.identify import (
    MAX_ID_BYTES,
    MAX_TOKEN_BYTES,
    NO_CLAIMS,
    NOBODY,
    Claims,
    Identifier,
    Who,
    authorization,
    claim_of,
)
from sidecar.kernel.exchange import Header
from sidecar.policy.schema import Identity, Jwt, QosMatch, QosPolicy, Source
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
        pytest.param([(b"x-session-id", b"a"), (b"x-session-id", b"a")], "", "a", id="twice the same"),
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


def who(identity: Identity, headers: list[Header], *, loopback: bool = False, claims: Claims | None = None) -> Who:
    return Identifier(identity).identify(lines(headers), "", loopback, claims)


# --- classes ----------------------------------------------------------------------------------------------------------


def test_the_class_is_read_as_the_others_are() -> None:
    named = who(Identity(), [(b"x-sidecar-priority", b"voice")])
    assert (named.session, named.tenant, named.qos) == (None, "", "voice")
    by_claim = Identity(jwt=Jwt(issuers=(ISSUER,)))
    assert who(by_claim, bearer(token(iss=ISSUER, **{"class": "batch"}))).qos == "batch"
    assert who(Identity(qos_class=()), [(b"x-sidecar-priority", b"voice")]) is NOBODY


# --- headers that say two things --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [b"x-session-id", b"x-tenant-id", b"x-sidecar-priority"])
@pytest.mark.parametrize("others", [[], [b"b"], [b"b", b"a"], [b"", b"a"], [b"a "], [b"A"], [b""]])
def test_a_header_that_says_two_things_is_a_conflict(name: bytes, others: list[bytes]) -> None:
    headers = [(name, b"a"), (b"host", b"h"), *[(name, other) for other in others]]
    found = who(Identity(), headers)
    assert (found.conflict == name.decode()) is bool(others)
    assert who(Identity(), headers[::-1]).conflict == found.conflict


@pytest.mark.parametrize("value", [b"acme ", b"acme\t", b"acme \t "])
def test_spaces_behind_a_name_make_nobody_else_of_it(value: bytes) -> None:
    identity = Identity(tenant=(Source(header="x-tenant-id"),))
    assert who(identity, [(b"x-tenant-id", value)]).tenant == "acme"
    assert who(identity, [(b"x-tenant-id", b" \t")]) is NOBODY


def test_twice_the_same_is_no_conflict_and_neither_is_what_nobody_reads() -> None:
    assert who(Identity(), [(b"x-tenant-id", b"a")] * 3).conflict == ""
    assert who(Identity(), [(b"accept", b"a"), (b"accept", b"b")]) is NOBODY
    assert who(Identity(tenant=()), [(b"x-tenant-id", b"a"), (b"x-tenant-id", b"b")]) is NOBODY


def test_a_conflict_counts_wherever_the_header_stands_in_the_order() -> None:
    identity = Identity(tenant=(Source(header="x-first"), Source(header="x-second")))
    headers = [(b"x-first", b"t"), (b"x-second", b"a"), (b"x-second", b"b")]
    assert who(identity, headers).conflict == "x-second"


def test_two_tokens_are_no_token() -> None:
    good = bearer(token(iss=ISSUER, tenant="a"))[1]
    assert who(BY_CLAIM, [good, (b"authorization", b"Bearer x")]).conflict == "authorization"
    assert who(BY_CLAIM, [good, good]).tenant == "a"


# --- headers of this machine ------------------------------------------------------------------------------------------

LOCAL = Identity(tenant=(Source(header="X-Team", loopback=True), Source(header="x-tenant-id")))


def test_a_loopback_header_is_believed_from_loopback_alone() -> None:
    headers = [(b"x-team", b"inner"), (b"x-tenant-id", b"outer")]
    assert who(LOCAL, headers, loopback=True).tenant == "inner"
    assert who(LOCAL, headers).tenant == "outer"
    assert who(LOCAL, [(b"x-team", b"a"), (b"x-team", b"b")]) is NOBODY, "what is not there is no conflict"
    assert who(LOCAL, [(b"x-team", b"a"), (b"x-team", b"b")], loopback=True).conflict == "x-team"


def test_a_loopback_header_is_one_for_every_source() -> None:
    identity = Identity(
        tenant=(Source(header="x-team", loopback=True),),
        session=(Source(header="x-team"),),
        qos_class=(Source(header="X-TEAM"),),
    )
    assert who(identity, [(b"x-team", b"t")]) is NOBODY
    found = who(identity, [(b"x-team", b"t")], loopback=True)
    assert (found.session, found.tenant, found.qos) == ("t", "t", "t")


@pytest.mark.parametrize(
    ("identity", "names"),
    [
        (Identity(), set()),
        (LOCAL, {b"x-team"}),
        (Identity(jwt=Jwt(issuers=(ISSUER,), claims_header="X-Claims")), {b"x-claims"}),
        (Identity(jwt=Jwt(claims_header="X-Claims", verified_by="sidecar")), {b"x-claims"}),
        (Identity(qos_class=(Source(jwt_claim="c", loopback=True),)), set()),
    ],
)
def test_names_of_headers_that_go_no_further(identity: Identity, names: set[bytes]) -> None:
    assert Identifier(identity).loopback_headers == names


def test_names_of_all_headers_that_are_read() -> None:
    assert Identifier(Identity()).names == {b"x-session-id", b"x-tenant-id", b"x-sidecar-priority"}
    assert Identifier(BY_HEADER).names >= {b"x-jwt-payload"}
    assert Identifier(BY_CLAIM).names >= {b"authorization"}
    assert Identifier(Identity(session=(), tenant=(), qos_class=())).names == set()


# --- claims in a header -----------------------------------------------------------------------------------------------

BY_HEADER = Identity(jwt=Jwt(issuers=(ISSUER,), claims_header="X-Jwt-Payload"))


def payload(*, padded: bool = False, **claims: object) -> tuple[bytes, bytes]:
    text = urlsafe_b64encode(msgspec.json.encode(claims))
    return b"x-jwt-payload", text if padded else text.rstrip(b"=")


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("length", range(1, 5))
def test_claims_are_read_from_the_mesh_s_header(padded: bool, length: int) -> None:
    header = payload(padded=padded, iss=ISSUER, sid="s" * length, tenant="?" * length, **{"class": "c"})
    found = who(BY_HEADER, [header], loopback=True)
    assert (found.session, found.tenant, found.qos) == ("s" * length, "?" * length, "c")
    assert found.claims["iss"] == ISSUER


def test_claims_in_a_header_are_believed_from_loopback_and_of_listed_issuers_alone() -> None:
    assert who(BY_HEADER, [payload(iss=ISSUER, tenant="t")]) is NOBODY
    assert who(BY_HEADER, [payload(iss="https://evil.test", tenant="t")], loopback=True) is NOBODY
    assert who(BY_HEADER, [payload(tenant="t")], loopback=True) is NOBODY


@pytest.mark.parametrize("value", [b"", b"{}", b"e30", b"!!", b"W10", b"x", b"\xff", b"e" * 20_000])
def test_what_is_no_claims_is_absent(value: bytes) -> None:
    found = who(BY_HEADER, [(b"x-jwt-payload", value), (b"x-tenant-id", b"t")], loopback=True)
    assert (found.tenant, found.claims) == ("t", NO_CLAIMS)


def test_where_claims_have_a_header_the_token_is_not_read() -> None:
    assert who(BY_HEADER, bearer(token(iss=ISSUER, tenant="t")), loopback=True) is NOBODY


def test_two_headers_of_claims_are_a_conflict() -> None:
    headers = [payload(iss=ISSUER, tenant="a"), payload(iss=ISSUER, tenant="b")]
    assert who(BY_HEADER, headers, loopback=True).conflict == "x-jwt-payload"


# --- claims that we verified ------------------------------------------------------------------------------------------

VERIFIED = Identity(jwt=Jwt(verified_by="sidecar"))


def test_verified_claims_are_taken_and_tokens_are_not() -> None:
    found = who(VERIFIED, bearer(token(iss=ISSUER, tenant="forged")), claims={"tenant": "acme", "sid": 7})
    assert (found.session, found.tenant) == ("7", "acme")
    assert found.claims == {"tenant": "acme", "sid": 7}
    assert who(VERIFIED, bearer(token(iss=ISSUER, tenant="forged"))) is NOBODY
    assert who(VERIFIED, bearer(token(iss=ISSUER, tenant="forged")), claims={}) is NOBODY
    both = Identity(jwt=Jwt(verified_by="sidecar", issuers=(ISSUER,)))
    assert who(both, bearer(token(iss=ISSUER, tenant="forged"))) is NOBODY


def test_claims_that_name_nobody_are_kept_for_what_else_is_chosen_by_them() -> None:
    assert who(VERIFIED, [], claims={"sub": "u"}).claims == {"sub": "u"}


def test_a_mesh_s_token_is_read_where_only_a_class_asks_for_a_claim() -> None:
    identity = Identity(session=(), tenant=(), qos_class=(), jwt=Jwt(issuers=(ISSUER,)))
    value = lines(bearer(token(iss=ISSUER, plan="gold")))
    classes = (QosPolicy(name="gold", latency_sla_ms=1, match=(QosMatch(jwt_claim="plan", value="gold"),)),)
    assert Identifier(identity).identify(value, "") is NOBODY
    assert Identifier(identity, classes).identify(value, "").claims["plan"] == "gold"


@pytest.mark.parametrize(
    ("claims", "name", "expected"),
    [
        pytest.param({"a": "x"}, "a", "x", id="text"),
        pytest.param({"a": 7}, "a", "7", id="a number"),
        pytest.param({"a": 0}, "a", "0", id="zero"),
        pytest.param({"a": -7}, "a", "-7", id="a negative number"),
        pytest.param({"a": 7.0}, "a", "", id="a fraction"),
        pytest.param({"a": 10**30}, "a", "", id="a number that is no id"),
        pytest.param({"a": 10**5000}, "a", "", id="a number without end"),
        pytest.param({"a": True}, "a", "", id="true"),
        pytest.param({"a": None}, "a", "", id="null"),
        pytest.param({"a": ["x"]}, "a", "x", id="a list of one"),
        pytest.param({"a": [7]}, "a", "7", id="a list of one number"),
        pytest.param({"a": [["x"]]}, "a", "", id="a list of a list"),
        pytest.param({"a": ["x", "y"]}, "a", "", id="a list of two"),
        pytest.param({"a": []}, "a", "", id="an empty list"),
        pytest.param({"a": {"b": "x"}}, "a", "", id="an object"),
        pytest.param({"a": {"b": "x"}}, "a.b", "x", id="a way"),
        pytest.param({"a": {"b": {"c": ["x"]}}}, "a.b.c", "x", id="a longer way"),
        pytest.param({"a.b": "whole", "a": {"b": "way"}}, "a.b", "whole", id="the whole name first"),
        pytest.param({"https://x.test/t": "x"}, "https://x.test/t", "x", id="a URL"),
        pytest.param({"a": {"b.c": "x"}}, "a.b.c", "", id="no ways with names that have dots"),
        pytest.param({"a": "x"}, "a.b", "", id="a way through text"),
        pytest.param({"a": [{"b": "x"}]}, "a.b", "", id="a way through a list"),
        pytest.param({"": {"": "x"}}, ".", "x", id="names that are empty"),
        pytest.param({"a": "größe \U0001f600"}, "a", "größe \U0001f600", id="unicode"),
        pytest.param({}, "a", "", id="nothing"),
    ],
)
def test_a_claim_as_an_id(claims: dict[str, object], name: str, expected: str) -> None:
    identity = Identity(tenant=(Source(jwt_claim=name),), jwt=Jwt(verified_by="sidecar"))
    assert who(identity, [], claims=claims).tenant == expected
    assert claim_of(claims, name) == expected


# --- credentials ------------------------------------------------------------------------------------------------------


def test_several_lines_of_credentials_are_one_value() -> None:
    assert authorization(lines([])) == b""
    assert authorization(lines(bearer(b"t"))) == b"Bearer t"
    assert authorization(lines([*bearer(b"t"), *bearer(b"u")])) == b"Bearer t, Bearer u"
    assert authorization(lines([(b"authorization", b""), *bearer(b"u")])) == b"Bearer u"
