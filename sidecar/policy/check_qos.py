"""Rules between the fields that say who asks, of which class a request is, and how much who may use.

As in `check`: each rule gives its fault and the path it is at, and says what to write instead. What is legal and yet
not what it seems is a warning: most of it is a promise to somebody whom nothing names, or a name that anybody may take.
"""

from collections.abc import Callable, Iterator

from sidecar.policy.address import names_loopback, parse_page
from sidecar.policy.duration import format_seconds
from sidecar.policy.errors import Fault, Step
from sidecar.policy.schema import (
    DEFAULT_CLASS,
    QUOTA_BOUNDS,
    Admission,
    Identity,
    Jwt,
    JwtProvider,
    QosPolicy,
    Quota,
    Service,
    Source,
)

_OURS = "x-sidecar-"  # wire.headers.OURS, which nothing here may import

_SOURCES = (("session", "session"), ("tenant", "tenant"), ("class", "qos_class"))
"""As they are written, and as they are called here."""


def check_identity(identity: Identity) -> Iterator[Fault]:
    """Faults of the sources and of what is believed of tokens; steps start at the document's root."""
    for written, name in _SOURCES:
        sources: tuple[Source, ...] = getattr(identity, name)
        for index, source in enumerate(sources):
            at: tuple[Step, ...] = ("identity", written, index)
            given = _given(source, ("header", "jwt_claim", "body"))
            if len(given) != 1:
                what = f"has {' and '.join(given)}" if given else "is empty"
                yield Fault(at, f"{what}: give exactly one of header, jwt_claim, body")
            elif source.loopback and not source.header:
                yield Fault((*at, "loopback"), f"is of a header, and this is a {given[0]}: leave it out")
    yield from _check_jwt(identity.jwt)


def _check_jwt(jwt: Jwt) -> Iterator[Fault]:
    at = ("identity", "jwt")
    needs = ((*at, "verified_by"),)
    if jwt.verified_by == "sidecar":
        if not jwt.providers:
            said = "sidecar verifies by providers, and there are none: add one, or write mesh"
            yield Fault((*at, "verified_by"), said, ((*at, "providers"),))
        for name in ("issuers", "claims_header"):
            if getattr(jwt, name):
                said = "is of use with verified_by: mesh only: who verifies by providers believes nobody else"
                yield Fault((*at, name), said, needs)
    else:
        if jwt.providers:
            yield Fault((*at, "providers"), "are of use with verified_by: sidecar only: write that, too", needs)
        if jwt.required:
            said = "is of use with verified_by: sidecar only: what is in front of us refuses who has no token"
            yield Fault((*at, "required"), said, needs)
    issuers: dict[str, int] = {}
    for index, provider in enumerate(jwt.providers):
        place: tuple[Step, ...] = (*at, "providers", index)
        first = issuers.setdefault(provider.issuer, index)
        if first != index:
            said = f"is the issuer of providers[{first}] already: put all its keys into one set of keys"
            yield Fault((*place, "issuer"), said, ((*at, "providers", first, "issuer"),))
        yield from _check_provider(provider, place)


def _check_provider(provider: JwtProvider, at: tuple[Step, ...]) -> Iterator[Fault]:
    keys = _given(provider, ("jwks_file", "jwks_url"))
    if len(keys) != 1:
        what = "has both jwks_file and jwks_url" if keys else "has no keys"
        yield Fault(at, f"{what}: give exactly one of jwks_file, jwks_url", ((*at, "jwks_file"), (*at, "jwks_url")))
    if provider.jwks_url:
        try:
            parse_page(provider.jwks_url)
        except ValueError as exc:
            yield Fault((*at, "jwks_url"), f'"{provider.jwks_url[:100]}" {exc}')
    if provider.tls_ca and not provider.jwks_url.startswith("https:"):
        yield Fault((*at, "tls_ca"), "is of use with a jwks_url of https:// only", ((*at, "jwks_url"),))


def check_admission(admission: Admission) -> Iterator[Fault]:
    """Faults of a service's `admission`; steps start inside the service."""
    if admission.limit == "fixed":
        return  # it is `concurrency`, and nothing moves it
    at = ("admission",)
    if admission.min > admission.max:
        yield Fault((*at, "min"), f"{admission.min} is above max ({admission.max})", ((*at, "max"),))
    elif admission.concurrency < admission.min:
        said = f"{admission.concurrency} is below min ({admission.min}), and a learned limit starts between min and max"
        yield Fault((*at, "concurrency"), said, ((*at, "min"), (*at, "limit")))
    elif admission.concurrency > admission.max:
        said = f"{admission.concurrency} is above max ({admission.max}), and a learned limit starts between min and max"
        yield Fault((*at, "concurrency"), said, ((*at, "max"), (*at, "limit")))


def check_class(policy: QosPolicy) -> Iterator[Fault]:
    """Faults of a class; steps start inside it."""
    for index, match in enumerate(policy.match):
        at: tuple[Step, ...] = ("match", index)
        given = _given(match, ("header", "jwt_claim", "path", "model", "tenant", "modality"))
        named = _given(match, ("header", "jwt_claim"))
        if not given and match.value == "*":
            yield Fault(at, "is empty: give one of header, jwt_claim, path, model, tenant, modality")
        elif len(named) > 1:
            yield Fault(at, "has header and jwt_claim: make two matches of it, of which any will do")
        elif match.value != "*" and not named:
            said = "is of a header or a claim, and none is given: give one of header, jwt_claim"
            yield Fault((*at, "value"), said, ((*at, "header"), (*at, "jwt_claim")))


def check_quota(quota: Quota) -> Iterator[Fault]:
    """Faults of a quota; steps start inside it."""
    if all(getattr(quota, bound) is None for bound in QUOTA_BOUNDS):
        needs = tuple((bound,) for bound in QUOTA_BOUNDS)
        yield Fault((), f"bounds nothing: give at least one of {', '.join(QUOTA_BOUNDS)}", needs)


def is_gated(service: Service, classes: tuple[QosPolicy, ...]) -> bool:
    """Whether requests of the service are judged by `admission`, in shadow or in earnest."""
    mode = service.admission.mode
    return bool(classes) if mode == "auto" else mode != "off"


def reads_tokens(identity: Identity) -> bool:
    """Whether there is any token whose claims are read."""
    return bool(identity.jwt.issuers) or identity.jwt.verified_by == "sidecar"


def qos_warnings_of(
    services: tuple[Service, ...],
    identity: Identity,
    classes: tuple[QosPolicy, ...],
    quotas: tuple[Quota, ...],
    add: Callable[[str], None],
) -> None:
    """Tell `add` what is legal and yet not what it seems, of all but a service's endpoints and breakers."""
    _identity_warnings(services, identity, classes, quotas, add)
    _class_warnings(services, identity, classes, add)
    gated = [service for service in services if is_gated(service, classes)]
    for service in services:
        where = f"service {service.name}: "
        if service.admission.tenant_weights:
            if service not in gated:
                add(f"{where}admission.tenant_weights weigh nothing: admission is off")
            elif not identity.tenant:
                add(f"{where}admission.tenant_weights weigh nothing: identity.tenant is empty")
        if service.tokenizer and service not in gated and not quotas:
            add(f"{where}tokenizer counts nothing: there are no quotas, and admission is off")
        if service.request_tokens and not any(quota.mode == "enforce" for quota in quotas):
            add(f"{where}request_tokens refuses nobody: there is no quota with mode: enforce")
    for quota in quotas:
        _quota_warnings(quota, identity, add)
    strangers = _strangers(identity)
    if strangers and any(quota.mode != "off" for quota in quotas):
        add(
            f"quotas: identity.tenant believes {strangers} from anybody: who takes another name has another budget. "
            "Take tenants from a token, or the header from peers on this machine only (loopback: true)"
        )


def _identity_warnings(
    services: tuple[Service, ...],
    identity: Identity,
    classes: tuple[QosPolicy, ...],
    quotas: tuple[Quota, ...],
    add: Callable[[str], None],
) -> None:
    usual = Identity()
    jwt = identity.jwt
    salted = any(service.cache_salt != "off" for service in services)
    matched = any(match.tenant for policy in classes for match in policy.match)
    gated = any(is_gated(service, classes) for service in services) or (bool(classes) and not services)
    tenants = salted or matched or gated or bool(quotas)
    if salted and not identity.tenant:
        add("cache_salt keeps nothing apart: identity.tenant is empty, so all are one tenant")
    elif not tenants and identity.tenant != usual.tenant:
        add("identity.tenant is read for nobody: there is no cache_salt, no quota and no admission")
    if not classes and identity.qos_class != usual.qos_class:
        add("identity.class names nothing: there are no qos_policies")
    if jwt.claims_header and not jwt.issuers:
        add("identity.jwt.claims_header is never read while identity.jwt.issuers is empty")
    read = {"session": True, "tenant": tenants, "class": bool(classes)}
    for written, name in _SOURCES:
        sources: tuple[Source, ...] = getattr(identity, name)
        claims = [source.jwt_claim for source in sources if source.jwt_claim]
        if read[written] and sources != getattr(usual, name) and claims and not reads_tokens(identity):
            add(f"identity.{written}: jwt_claim {claims[0]} is never read while identity.jwt.issuers is empty")
    for index, provider in enumerate(jwt.providers):
        if provider.jwks_url.startswith("http:") and not names_loopback(parse_page(provider.jwks_url).host):
            add(
                f"identity.jwt.providers[{index}]: the keys of {provider.issuer} come over http://: whoever is on the "
                "way can put in his own, and make tokens"
            )
        if not provider.audiences:
            add(
                f"identity.jwt.providers[{index}]: audiences is empty: any token of {provider.issuer} is good here, "
                "also one that was made for somebody else"
            )


def _class_warnings(
    services: tuple[Service, ...],
    identity: Identity,
    classes: tuple[QosPolicy, ...],
    add: Callable[[str], None],
) -> None:
    if not classes:
        return
    if services and not any(is_gated(service, classes) for service in services):
        add("qos_policies order nothing: admission.mode is off in every service")
    named_by = [source for source in identity.qos_class if source.header or source.body or reads_tokens(identity)]
    only_ours = bool(named_by) and all(_is_ours(source.header) for source in named_by)
    unmatched = [policy.name for policy in classes if not policy.match and policy.name != DEFAULT_CLASS]
    if unmatched and not named_by:
        add(f"qos policy {_listed(unmatched)}: no request is of it: it has no match, and identity.class names nothing")
    elif unmatched and only_ours:
        add(
            f"qos policy {_listed(unmatched)}: only {named_by[0].header} names it, which counts with --trusted only: "
            "without, give it a match, or identity.class another header or a claim"
        )
    promised = any(not policy.preemptible for policy in classes)
    for policy in classes:
        where = f"qos policy {policy.name}: "
        for match in policy.match:
            if match.jwt_claim and not reads_tokens(identity):
                add(f"{where}jwt_claim {match.jwt_claim} is never read while identity.jwt.issuers is empty")
            if _is_ours(match.header):
                add(f"{where}{match.header} counts with --trusted only, as all x-sidecar-* headers")
            if match.tenant not in ("", "*") and not identity.tenant:
                add(f"{where}tenant {match.tenant} is nobody: identity.tenant is empty")
        if policy.evict == "streams" and not policy.preemptible:
            add(f"{where}evict: streams evicts nothing: it is not preemptible")
        if policy.preemptible and not promised:
            add(f"{where}preemptible: true makes room for nobody: every class is preemptible")
        if policy.budget_factor != 1.0 and services and not any(service.request_tokens for service in services):
            add(f"{where}budget_factor changes nothing: no service has request_tokens")
        _wait_warnings(policy, services, add)


def _wait_warnings(policy: QosPolicy, services: tuple[Service, ...], add: Callable[[str], None]) -> None:
    """What a class promises against what its services allow, told of the strictest."""
    if not services:
        return
    where = f"qos policy {policy.name}: "
    sla_s = policy.latency_sla_ms / 1000
    strict = min(services, key=lambda service: service.deadlines.total_s)
    total = f"deadlines.total of service {strict.name} ({format_seconds(strict.deadlines.total_s)})"
    if sla_s >= strict.deadlines.total_s:
        add(f"{where}latency_sla_ms {policy.latency_sla_ms} is not shorter than {total}, which ends requests first")
    elif policy.max_wait_s < sla_s:
        add(
            f"{where}max_wait {format_seconds(policy.max_wait_s)} is shorter than its SLA "
            f"({policy.latency_sla_ms} ms): what could still be in time is refused"
        )
    if policy.max_wait_s >= strict.deadlines.total_s:
        add(
            f"{where}max_wait {format_seconds(policy.max_wait_s)} is not shorter than {total}: no time is left to serve"
        )


def _quota_warnings(quota: Quota, identity: Identity, add: Callable[[str], None]) -> None:
    where = f"quota {quota.name}: "
    for what in ("tokens", "requests"):
        minute: int | None = getattr(quota, f"{what}_per_minute")
        day: int | None = getattr(quota, f"{what}_per_day")
        if minute is not None and day is not None and minute > day:
            add(f"{where}{what}_per_minute is more than {what}_per_day: a minute may use up the day")
    if not quota.models:
        add(f"{where}is of no request: models is empty")
    if not identity.tenant:
        if quota.tenant == "*":
            add(f"{where}all share one budget: identity.tenant is empty")
        else:
            add(f"{where}tenant {quota.tenant} is nobody: identity.tenant is empty")


def _strangers(identity: Identity) -> str:
    """What anybody may write that makes him a tenant, "" if nothing does."""
    for source in identity.tenant:
        if source.header and not source.loopback and not _is_ours(source.header):
            return source.header
        if source.body:
            return "a body's user"
    return ""


def _is_ours(header: str) -> bool:
    return header.lower().startswith(_OURS)


def _given(what: object, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if getattr(what, name)]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
