"""Who asks, of which class, with what budget: what cannot be, and what is not what it seems."""

from typing import Any

import pytest
from msgspec.structs import replace

from sidecar.policy.check_qos import (
    _OURS,
    check_class,
    check_identity,
    check_quota,
    is_gated,
    qos_warnings_of,
    reads_tokens,
)
from sidecar.policy.errors import Fault
from sidecar.policy.schema import (
    Admission,
    Deadlines,
    Identity,
    Jwt,
    JwtProvider,
    QosMatch,
    QosPolicy,
    Quota,
    Seconds,
    Service,
    Source,
)
from sidecar.wire.headers import OURS

ISSUER = "https://issuer"
PROVIDER = JwtProvider(issuer=ISSUER, jwks_file="/keys", audiences=("us",))
VERIFIED = Jwt(verified_by="sidecar", providers=(PROVIDER,))
BELIEVED = Jwt(issuers=(ISSUER,))
HEADER = (Source(header="x-class"),)
HERE = (Source(header="x-tenant-id", loopback=True),)


def voice(**fields: Any) -> QosPolicy:
    return QosPolicy(**{"name": "voice", "latency_sla_ms": 300, "match": (QosMatch(modality="voice"),), **fields})


def quota(**fields: Any) -> Quota:
    return Quota(**{"name": "q", "tokens_per_minute": 1000, **fields})


def service(**fields: Any) -> Service:
    return Service(**{"name": "s", **fields})


def told(faults: Any) -> list[tuple[tuple[str | int, ...], str]]:
    return [(fault.steps, fault.message) for fault in faults]


def of_jwt(jwt: Jwt) -> list[tuple[tuple[str | int, ...], str]]:
    return [(steps[2:], message) for steps, message in told(check_identity(Identity(jwt=jwt)))]


@pytest.mark.parametrize(("written", "field"), [("session", "session"), ("tenant", "tenant"), ("class", "qos_class")])
@pytest.mark.parametrize(
    ("source", "words"),
    [
        (Source(), "is empty"),
        (Source(header="a", jwt_claim="b"), "has header and jwt_claim"),
        (Source(header="a", body="user"), "has header and body"),
        (Source(header="a", jwt_claim="b", body="user"), "has header and jwt_claim and body"),
    ],
)
def test_a_source_is_exactly_one_thing(written: str, field: str, source: Source, words: str) -> None:
    identity = replace(Identity(), **{field: (Source(header="a"), source)})
    (fault,) = check_identity(identity)
    assert fault.steps == ("identity", written, 1)
    assert words in fault.message


@pytest.mark.parametrize("source", [Source(jwt_claim="a", loopback=True), Source(body="user", loopback=True)])
def test_only_a_header_comes_from_a_peer_of_this_machine(source: Source) -> None:
    (fault,) = check_identity(Identity(qos_class=(source,)))
    assert fault.steps == ("identity", "class", 0, "loopback")
    assert "is of a header, and this is a" in fault.message


def test_the_default_identity_has_no_fault() -> None:
    assert list(check_identity(Identity())) == []
    assert list(check_identity(Identity(tenant=HERE, qos_class=HEADER))) == []


@pytest.mark.parametrize(
    "jwt",
    [
        VERIFIED,
        BELIEVED,
        replace(VERIFIED, required=True),
        replace(BELIEVED, claims_header="x-claims"),
        replace(VERIFIED, providers=(PROVIDER, replace(PROVIDER, issuer="https://other"))),
        replace(VERIFIED, providers=(JwtProvider(issuer="i", jwks_url="https://a:8443/k?x=1", tls_ca="/ca"),)),
        replace(VERIFIED, providers=(JwtProvider(issuer="i", jwks_url="http://127.0.0.1/k"),)),
    ],
)
def test_tokens_that_can_be_verified_are_no_fault(jwt: Jwt) -> None:
    assert of_jwt(jwt) == []


@pytest.mark.parametrize(
    ("jwt", "steps", "words"),
    [
        (Jwt(verified_by="sidecar"), ("verified_by",), "there are none: add one, or write mesh"),
        (replace(VERIFIED, issuers=("i",)), ("issuers",), "is of use with verified_by: mesh only"),
        (replace(VERIFIED, claims_header="x"), ("claims_header",), "is of use with verified_by: mesh only"),
        (Jwt(providers=(PROVIDER,)), ("providers",), "are of use with verified_by: sidecar only: write that, too"),
        (Jwt(required=True), ("required",), "is of use with verified_by: sidecar only"),
        (
            replace(VERIFIED, providers=(PROVIDER, PROVIDER)),
            ("providers", 1, "issuer"),
            "issuer of providers[0] already",
        ),
        (replace(VERIFIED, providers=(JwtProvider(issuer="i"),)), ("providers", 0), "has no keys: give exactly one"),
        (
            replace(VERIFIED, providers=(JwtProvider(issuer="i", jwks_file="/k", jwks_url="https://a"),)),
            ("providers", 0),
            "has both jwks_file and jwks_url: give exactly one",
        ),
        *(
            (
                replace(VERIFIED, providers=(JwtProvider(issuer="i", jwks_url=url),)),
                ("providers", 0, "jwks_url"),
                words,
            )
            for url, words in (
                ("ftp://a/k", "is not one of http://host/path, https://host/path"),
                ("unix:///k", "is not one of http://host/path, https://host/path"),
                ("/k", "is not one of"),
                ("https://", "has no host"),
                ("https://me:pw@a/k", "has user information"),
                ("https://a:0/k", "has port 0"),
                ("https://a/k k", "contains white space"),
                ("https://a/k#k", "has a fragment"),
                ("https://[::1]x", "is not one of"),
            )
        ),
        (
            replace(VERIFIED, providers=(replace(PROVIDER, tls_ca="/ca"),)),
            ("providers", 0, "tls_ca"),
            "jwks_url of https:// only",
        ),
    ],
)
def test_tokens_that_cannot_be_verified_are_told_at_their_place(
    jwt: Jwt, steps: tuple[str | int, ...], words: str
) -> None:
    ((at, message),) = of_jwt(jwt)
    assert at == steps
    assert words in message


def test_a_rule_about_tokens_names_the_other_places_it_looked_at() -> None:
    (fault,) = check_identity(Identity(jwt=Jwt(required=True)))
    assert isinstance(fault, Fault)
    assert fault.needs == (("identity", "jwt", "verified_by"),)


@pytest.mark.parametrize(
    "match",
    [
        QosMatch(header="a"),
        QosMatch(header="a", value="b"),
        QosMatch(jwt_claim="a", value="b", path="c", model="d", tenant="e", modality="text"),
        QosMatch(path="*"),
        QosMatch(model="a"),
        QosMatch(tenant="a"),
        QosMatch(modality="code"),
    ],
)
def test_a_match_that_asks_for_something_is_no_fault(match: QosMatch) -> None:
    assert told(check_class(voice(match=(match, match)))) == []


@pytest.mark.parametrize(
    ("match", "steps", "words"),
    [
        (QosMatch(), (), "is empty: give one of header, jwt_claim, path, model, tenant, modality"),
        (QosMatch(value="a"), ("value",), "none is given: give one of header, jwt_claim"),
        (QosMatch(path="a", value="a"), ("value",), "is of a header or a claim"),
        (QosMatch(header="a", jwt_claim="b"), (), "has header and jwt_claim: make two matches of it"),
    ],
)
def test_a_match_that_asks_for_nothing_or_for_two_things_is_told(
    match: QosMatch, steps: tuple[str | int, ...], words: str
) -> None:
    ((at, message),) = told(check_class(voice(match=(QosMatch(path="a"), match))))
    assert at == ("match", 1, *steps)
    assert words in message


def test_a_quota_that_bounds_nothing_is_told() -> None:
    for bound in ("tokens_per_minute", "tokens_per_day", "requests_per_minute", "requests_per_day", "concurrency"):
        assert list(check_quota(replace(Quota(name="q"), **{bound: 1}))) == []
    ((at, message),) = told(check_quota(Quota(name="q")))
    assert at == ()
    assert "bounds nothing: give at least one of tokens_per_minute" in message


@pytest.mark.parametrize(
    ("mode", "classes", "gated"),
    [
        ("auto", (), False),
        ("auto", (voice(),), True),
        ("enforce", (), True),
        ("shadow", (), True),
        ("off", (voice(),), False),
    ],
)
def test_admission_follows_the_classes_unless_it_is_told(
    mode: Any, classes: tuple[QosPolicy, ...], gated: bool
) -> None:
    assert is_gated(service(admission=Admission(mode=mode)), classes) is gated


def test_a_token_is_read_where_somebody_vouches_for_it() -> None:
    assert [reads_tokens(Identity(jwt=jwt)) for jwt in (Jwt(), BELIEVED, VERIFIED)] == [False, True, True]
    assert reads_tokens(Identity(jwt=Jwt(claims_header="x"))) is False


def warned(
    *classes: QosPolicy,
    services: tuple[Service, ...] = (),
    identity: Identity | None = None,
    quotas: tuple[Quota, ...] = (),
) -> list[str]:
    warnings: list[str] = []
    usual = Identity(tenant=HERE, qos_class=HEADER) if classes else Identity()
    qos_warnings_of(services, identity or usual, classes, quotas, warnings.append)
    return warnings


LATER = voice(name="batch", preemptible=True, priority=1, latency_sla_ms=10_000)


@pytest.mark.parametrize(
    ("classes", "services", "words"),
    [
        ([voice(match=(QosMatch(jwt_claim="a"),))], [], "qos policy voice: jwt_claim a is never read"),
        ([voice(match=(QosMatch(header="X-Sidecar-A"),))], [], "X-Sidecar-A counts with --trusted only"),
        ([voice(evict="streams")], [], "evict: streams evicts nothing: it is not preemptible"),
        ([LATER], [], "qos policy batch: preemptible: true makes room for nobody"),
        ([voice(budget_factor=1.5)], [service()], "budget_factor changes nothing: no service has request_tokens"),
        ([voice(max_wait_s=Seconds(0.2))], [service()], "max_wait 200ms is shorter than its SLA (300 ms)"),
        (
            [voice(latency_sla_ms=600_000, max_wait_s=Seconds(599))],
            [service(deadlines=Deadlines(total_s=Seconds(600)))],
            "latency_sla_ms 600000 is not shorter than deadlines.total of service s (10m)",
        ),
        (
            [voice()],
            [service(), service(name="t", deadlines=Deadlines(total_s=Seconds(30)))],
            "max_wait 30s is not shorter than deadlines.total of service t (30s): no time is left",
        ),
    ],
)
def test_a_class_that_is_not_what_it_seems_is_warned_of(
    classes: list[QosPolicy], services: list[Service], words: str
) -> None:
    (warning,) = warned(*classes, services=tuple(services))
    assert words in warning


@pytest.mark.parametrize(
    ("classes", "services"),
    [
        ([], []),
        ([], [service(admission=Admission(mode="enforce"))]),
        ([voice()], []),
        ([voice(), LATER], [service(), service(name="t", admission=Admission(mode="off"))]),
        ([voice(), replace(LATER, evict="streams")], [service(admission=Admission(mode="shadow"))]),
        ([voice(match=()), voice(name="default", match=())], [service()]),
        ([voice(late="reject")], [service()]),
        ([voice(match=(QosMatch(tenant="a"), QosMatch(header="a", value="b")))], [service()]),
        ([voice()], [service(admission=Admission(tenant_weights={"a": 2.0}), tokenizer="/t")]),
    ],
)
def test_classes_that_are_what_they_seem_are_not_warned_of(classes: list[QosPolicy], services: list[Service]) -> None:
    assert warned(*classes, services=tuple(services)) == []


def test_classes_that_no_service_heeds_are_warned_of() -> None:
    off = service(admission=Admission(mode="off"))
    (warning,) = warned(voice(), services=(off, off), identity=Identity(qos_class=HEADER))
    assert warning == "qos_policies order nothing: admission.mode is off in every service"


def test_a_class_that_nothing_names_is_warned_of() -> None:
    quiet = voice(match=())
    assert warned(quiet, identity=Identity(qos_class=(Source(jwt_claim="c"),), jwt=VERIFIED)) == []
    (warning,) = warned(quiet, identity=Identity(qos_class=()))
    assert warning == ("qos policy voice: no request is of it: it has no match, and identity.class names nothing")
    (warning, never) = warned(quiet, identity=Identity(qos_class=(Source(jwt_claim="c"),)))
    assert "identity.class: jwt_claim c is never read" in warning
    assert "no request is of it" in never
    (warning,) = warned(*(voice(name=f"c{n}", match=()) for n in range(7)), identity=Identity())
    assert "qos policy c0, c1, c2, c3, c4 and 2 more: only x-sidecar-priority names it" in warning
    assert "--trusted" in warning
    assert warned(voice(name="default", match=()), identity=Identity(qos_class=())) == []


def test_identity_that_does_nothing_is_warned_of() -> None:
    (warning,) = warned(identity=Identity(tenant=()))
    assert "identity.tenant is read for nobody" in warning
    for used in (
        {"services": (service(cache_salt="tenant"),)},
        {"services": (service(admission=Admission(mode="shadow")),)},
        {"quotas": (quota(tenant="a"),)},
    ):
        assert warned(identity=Identity(tenant=HERE), **used) == []
    (warning,) = warned(identity=Identity(qos_class=HEADER))
    assert "identity.class names nothing: there are no qos_policies" in warning
    (warning,) = warned(identity=Identity(jwt=Jwt(claims_header="x-claims")))
    assert "identity.jwt.claims_header is never read" in warning
    claims = Identity(session=(Source(jwt_claim="sub"),))
    (warning,) = warned(identity=claims)
    assert "identity.session: jwt_claim sub is never read while identity.jwt.issuers is empty" in warning
    assert warned(identity=replace(claims, jwt=BELIEVED)) == warned(identity=replace(claims, jwt=VERIFIED)) == []


def test_caches_of_nobody_are_warned_of() -> None:
    apart = (service(cache_salt="tenant"),)
    assert warned(services=apart) == []
    (warning,) = warned(services=apart, identity=Identity(tenant=()))
    assert "all are one tenant" in warning
    claims = Identity(tenant=(Source(jwt_claim="org"),))
    (warning,) = warned(services=apart, identity=claims)
    assert "identity.tenant: jwt_claim org is never read" in warning
    assert warned(services=apart, identity=replace(claims, jwt=BELIEVED)) == []


def test_keys_that_somebody_else_could_have_written_are_warned_of() -> None:
    open_ = JwtProvider(issuer="i", jwks_url="http://keys.internal/k", audiences=("us",))
    (warning,) = warned(identity=Identity(jwt=replace(VERIFIED, providers=(open_,))))
    assert "identity.jwt.providers[0]: the keys of i come over http://" in warning
    for url in ("http://localhost/k", "http://[::1]:80/k", "http://127.0.0.9/k", "https://keys.internal/k"):
        assert warned(identity=Identity(jwt=replace(VERIFIED, providers=(replace(open_, jwks_url=url),)))) == []
    anybody = replace(PROVIDER, audiences=())
    (warning,) = warned(identity=Identity(jwt=replace(VERIFIED, providers=(PROVIDER, anybody))))
    assert "identity.jwt.providers[1]: audiences is empty" in warning


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (quota(tokens_per_minute=10, tokens_per_day=9), "tokens_per_minute is more than tokens_per_day"),
        (quota(requests_per_minute=10, requests_per_day=9), "requests_per_minute is more than requests_per_day"),
        (quota(models=()), "quota q: is of no request: models is empty"),
    ],
)
def test_a_quota_that_is_not_what_it_seems_is_warned_of(one: Quota, words: str) -> None:
    (warning,) = warned(quotas=(one,), identity=Identity(tenant=HERE))
    assert words in warning


@pytest.mark.parametrize(("tenant", "words"), [("*", "all share one budget"), ("acme", "tenant acme is nobody")])
def test_a_quota_without_tenants_is_warned_of(tenant: str, words: str) -> None:
    (warning,) = warned(quotas=(quota(tenant=tenant),), identity=Identity(tenant=()))
    assert words in warning


@pytest.mark.parametrize(
    ("sources", "name"),
    [
        ((Source(header="x-tenant-id"),), "x-tenant-id"),
        ((Source(jwt_claim="tenant"), Source(header="x-tenant-id")), "x-tenant-id"),
        ((Source(body="user"),), "a body's user"),
        (HERE, ""),
        ((Source(jwt_claim="tenant"),), ""),
        ((Source(header="x-sidecar-tenant"),), ""),
    ],
)
def test_a_tenant_that_anybody_may_be_is_warned_of_beside_quotas(sources: tuple[Source, ...], name: str) -> None:
    identity = Identity(tenant=sources, jwt=VERIFIED)
    warnings = warned(quotas=(quota(), quota(name="r")), identity=identity)
    assert len(warnings) == (1 if name else 0)
    assert all(f"quotas: identity.tenant believes {name} from anybody" in warning for warning in warnings)
    assert warned(quotas=(quota(mode="off"),), identity=identity) == []
    assert warned(identity=replace(identity, tenant=Identity().tenant)) == []


def test_weights_and_tokenizers_of_no_use_are_warned_of() -> None:
    weights = Admission(tenant_weights={"a": 2.0})
    (warning,) = warned(services=(service(admission=weights),))
    assert warning == "service s: admission.tenant_weights weigh nothing: admission is off"
    (warning,) = warned(voice(), services=(service(admission=weights),), identity=Identity(tenant=(), qos_class=HEADER))
    assert warning == "service s: admission.tenant_weights weigh nothing: identity.tenant is empty"
    # Of one tenant, all is its part.
    assert warned(services=(service(admission=Admission(mode="enforce")),), identity=Identity(tenant=())) == []
    (warning,) = warned(services=(service(tokenizer="/t"),))
    assert warning == "service s: tokenizer counts nothing: there are no quotas, and admission is off"
    assert warned(services=(service(tokenizer="/t"),), quotas=(quota(),), identity=Identity(tenant=HERE)) == []


def test_a_bound_on_answers_that_no_quota_has_held_is_warned_of() -> None:
    bound = (service(request_tokens=100),)
    (warning,) = warned(services=bound)
    assert warning == "service s: request_tokens refuses nobody: there is no quota with mode: enforce"
    assert warned(services=bound, quotas=(quota(mode="shadow"),), identity=Identity(tenant=HERE)) == [warning]
    assert warned(services=bound, quotas=(quota(),), identity=Identity(tenant=HERE)) == []
    assert warned(voice(budget_factor=1.5), services=bound, quotas=(quota(),)) == []


def test_a_match_on_a_tenant_of_nobody_is_warned_of() -> None:
    nobody = Identity(tenant=(), qos_class=HEADER)
    (warning,) = warned(voice(match=(QosMatch(tenant="acme"),)), identity=nobody)
    assert warning == "qos policy voice: tenant acme is nobody: identity.tenant is empty"


def test_our_headers_begin_as_the_wire_says() -> None:
    assert OURS.decode() == _OURS
