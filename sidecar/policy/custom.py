"""What custom resources mean: the rules between their fields, and the policy that they become.

The API server judges an object by the CRD's rules before anybody reads it; a file has only us. So each rule of
`deploy/crds` is here as well, in the same words, and what one refuses the other does. Two things the CRD cannot say and
we do: a socket that two endpoints share, and the inside of an IPv6 address.

1. A breaker rule of the mesh is laid over what the services say: first the rules for everybody, then those that name
   the service, so that the nearer word wins, key by key.
2. `maxTimeoutSeconds` alone caps `open`, too; `timeoutSeconds` alone raises `open_max` where that would be shorter.
3. A canary gets its part of a hundred; the others share the rest by their weights. Without a canary parts are weights.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from sidecar.kernel.ids import EndpointKey
from sidecar.policy.address import endpoint_key, is_local
from sidecar.policy.check import check_front
from sidecar.policy.errors import Fault, Step
from sidecar.policy.resources import LlmService, LlmServiceDocument, ServedVersion, TokenQuota, TokenQuotaDocument
from sidecar.policy.schema import (
    QUOTA_BOUNDS,
    BreakerRule,
    Deadlines,
    Endpoint,
    HealthCheck,
    MeshBreaker,
    Mode,
    Quota,
    Seconds,
    Service,
)

MODES: Final[Mapping[str, Mode]] = {"Enforce": "enforce", "Shadow": "shadow", "Disabled": "off"}

_SCOPED: Final = {
    "min_closed_ratio": "Node",
    "adaptive": "Node",
    "max_sessions": "Session",
    "key": "Request",
}
"""Fields of a breaker rule that one scope alone has."""

_TAKEN: Final = {
    "failure_threshold": "consecutive",
    **{name: name for name in ("failure_ratio", "min_requests", "probes", "successes", "min_closed_ratio")},
    "max_sessions": "max_sessions",
    "key": "key",
}
"""Fields of a breaker rule that are one of a breaker's, as they are."""

_WRITTEN: Final = {"engine_model": "engineModel", "chat_template": "chatTemplate"}
"""An endpoint's fields in a version of an LLMService, where they are called something else there."""


def check_breaker(rule: MeshBreaker) -> Iterator[Fault]:
    """Faults of a CircuitBreakerPolicy's spec; steps start there."""
    if rule.timeout_s is not None and rule.max_timeout_s is not None and rule.timeout_s > rule.max_timeout_s:
        said = "maxTimeoutSeconds must not be shorter than timeoutSeconds"
        yield Fault(("maxTimeoutSeconds",), said, (("timeoutSeconds",),))
    for name, scope in _SCOPED.items():
        if getattr(rule, name) is not None and rule.scope != scope:
            yield Fault((_camel(name),), f"{_camel(name)} is of scope {scope} only", (("scope",),))
    if rule.fallback_service in rule.services:
        said = "fallbackService is one of services: nothing falls back to itself"
        yield Fault(("fallbackService",), said, (("services",),))


def check_llm_service(spec: LlmService) -> Iterator[Fault]:
    """Faults of an LLMService's spec; steps start there."""
    yield from _check_traffic(spec)
    listing = [bool(version.endpoints) for version in spec.versions]
    if any(listing) and not all(listing):
        said = "either every version lists endpoints, or none does"
        yield Fault(("versions",), said, tuple(("versions", at, "endpoints") for at in range(len(listing))))
    names: set[str] = set()
    for index, version in enumerate(spec.versions):
        place: tuple[Step, ...] = ("versions", index)
        if version.name in names:
            yield Fault((*place, "name"), f"{version.name} is a version of this service already")
        names.add(version.name)
        for fault in check_front(_endpoint(version, "")):
            yield Fault(_placed(place, fault.steps), fault.message, tuple(_placed(place, need) for need in fault.needs))
    yield from _check_sockets(spec)


def check_token_quota(spec: TokenQuota) -> Iterator[Fault]:
    """Faults of a TokenQuota's spec; steps start there."""
    bounds = [_camel(bound) for bound in QUOTA_BOUNDS]
    if all(getattr(spec, bound) is None for bound in QUOTA_BOUNDS):
        yield Fault((), f"bounds nothing: give at least one of {', '.join(bounds)}", tuple((name,) for name in bounds))
    for what in ("tokens", "requests"):
        minute: int | None = getattr(spec, f"{what}_per_minute")
        day: int | None = getattr(spec, f"{what}_per_day")
        if minute is not None and day is not None and minute > day:
            said = f"{what}PerDay must not be below {what}PerMinute"
            yield Fault((f"{what}PerDay",), said, ((f"{what}PerMinute",),))


def service_of(document: LlmServiceDocument) -> Service:
    """The service that it describes; without faults if it had none."""
    spec, probe, deadlines = document.spec, document.spec.health_probe, document.spec.deadlines
    health_check = HealthCheck()
    if probe is not None:
        health_check = HealthCheck(
            mode="truth",
            path=probe.path,
            timeout_s=Seconds(probe.timeout_s),
            interval_s=Seconds(probe.interval_s),
        )
    return Service(
        name=document.metadata.name,
        models=(spec.model_ref, *spec.aliases),
        endpoints=tuple(
            replace(
                _endpoint(version, each.url),
                zone=each.zone,
                node=each.node,
                metrics_url=each.metrics_url or "",
                local=is_local(each.url),
            )
            for version in spec.versions
            for each in version.endpoints
        ),
        split=split_of(spec),
        fallback=spec.fallback_service,
        deadlines=Deadlines(
            head_s=Seconds(deadlines.head_s),
            first_token_s=Seconds(deadlines.first_token_s),
            token_gap_s=Seconds(deadlines.token_gap_s),
            total_s=Seconds(deadlines.total_s),
        ),
        health_check=health_check,
    )


def split_of(spec: LlmService) -> dict[str, float]:
    """Parts per version; empty: there are no versions."""
    canary = _canary(spec)
    weights = {version.name: 1 if version.weight is None else version.weight for version in spec.versions}
    if canary is None or spec.canary_traffic_percent is None:
        return {name: float(weight) for name, weight in weights.items()}
    share = spec.canary_traffic_percent
    rest = sum(weight for name, weight in weights.items() if name != canary) or 1
    return {name: float(share) if name == canary else (100 - share) * weight / rest for name, weight in weights.items()}


def quota_of(document: TokenQuotaDocument) -> Quota:
    """The quota that it describes; without faults if it had none."""
    spec = document.spec
    return Quota(
        name=document.metadata.name,
        tenant=spec.tenant,
        models=spec.models,
        tokens_per_minute=spec.tokens_per_minute,
        tokens_per_day=spec.tokens_per_day,
        requests_per_minute=spec.requests_per_minute,
        requests_per_day=spec.requests_per_day,
        concurrency=spec.concurrency,
        mode=MODES[spec.mode],
        when_log_away="share" if spec.when_log_away == "Share" else "refuse",
    )


def with_mesh(service: Service, mesh: Sequence[MeshBreaker]) -> Service:
    """`service` under the mesh's numbers."""
    for rule in sorted(mesh, key=_nearness):
        if concerns(rule, service.name):
            scope = rule.scope.lower()
            breaker: BreakerRule = getattr(service.breakers, scope)
            service = replace(service, breakers=replace(service.breakers, **{scope: _ruled(breaker, rule)}))
    return service


def with_mesh_fallbacks(services: Sequence[Service], mesh: Sequence[MeshBreaker]) -> list[Service]:
    """`services` with the mesh's fallback where they name none, unless it leads back to them by what others name."""
    fallbacks = {service.name: service.fallback for service in services}
    for rule in sorted(mesh, key=_nearness, reverse=True):
        for name, fallback in fallbacks.items():
            if (
                not fallback
                and concerns(rule, name)
                and rule.fallback_service in fallbacks
                and name not in _trail(rule.fallback_service, fallbacks)
            ):
                fallbacks[name] = rule.fallback_service
    return [replace(service, fallback=fallbacks[service.name]) for service in services]


def mesh_fallback(name: str, services: Sequence[Service], mesh: Sequence[MeshBreaker]) -> str:
    """Where a service falls back to that no file names; empty: nowhere.

    What the files name falls back to none that they do not: there is no way back to this one.
    """
    known = {service.name for service in services}
    for rule in sorted(mesh, key=_nearness, reverse=True):
        if concerns(rule, name) and rule.fallback_service in known:
            return rule.fallback_service
    return ""


def concerns(rule: MeshBreaker, service: str) -> bool:
    """Whether a breaker rule of the mesh holds for a service."""
    return not rule.services or service in rule.services


def _nearness(rule: MeshBreaker) -> bool:
    return bool(rule.services)


def _ruled(breaker: BreakerRule, rule: MeshBreaker) -> BreakerRule:
    changes: dict[str, object] = {
        theirs: value for ours, theirs in _TAKEN.items() if (value := getattr(rule, ours)) is not None
    }
    if rule.mode is not None:
        changes["mode"] = MODES[rule.mode]
    if rule.window_s is not None:
        changes["window_s"] = Seconds(rule.window_s)
    if rule.adaptive is not None and rule.adaptive is not bool(getattr(breaker, "adaptive", False)):
        changes["adaptive"] = rule.adaptive  # true leaves the service's own numbers
    open_s = breaker.open_s if rule.timeout_s is None else Seconds(rule.timeout_s)
    if rule.max_timeout_s is None:
        open_max_s = max(open_s, breaker.open_max_s)
    else:
        open_max_s = Seconds(rule.max_timeout_s)
        open_s = min(open_s, open_max_s)
    return replace(breaker, **changes, open_s=open_s, open_max_s=open_max_s)


def _trail(name: str, fallbacks: Mapping[str, str]) -> Iterator[str]:
    """`name`, and where it falls back to in turn; `fallbacks` has no loop."""
    while name:
        yield name
        name = fallbacks[name]


def _check_traffic(spec: LlmService) -> Iterator[Fault]:
    share, named = spec.canary_traffic_percent, spec.canary_version
    versions: tuple[Step, ...] = ("versions",)
    if share and len(spec.versions) < 2:
        said = "canaryTrafficPercent needs a version beside the canary: list both in versions"
        yield Fault(("canaryTrafficPercent",), said, (versions,))
    if named is not None and share is None:
        said = "canaryVersion is of use with canaryTrafficPercent only"
        yield Fault(("canaryVersion",), said, (("canaryTrafficPercent",),))
    if named is not None and all(version.name != named for version in spec.versions):
        yield Fault(("canaryVersion",), "canaryVersion is not one of versions", (versions,))
        return
    canary = _canary(spec)
    if any(version.name == canary and version.weight is not None for version in spec.versions):
        said = "the canary's weight is canaryTrafficPercent: leave its own out"
        yield Fault(versions, said, (("canaryTrafficPercent",), ("canaryVersion",)))
    others = [version for version in spec.versions if version.name != canary]
    if others and all(version.weight == 0 for version in others) and (canary is None or share != 100):
        yield Fault(versions, "all weights are 0: at least one must be positive", (("canaryTrafficPercent",),))


def _check_sockets(spec: LlmService) -> Iterator[Fault]:
    seen: set[EndpointKey] = set()
    for index, version in enumerate(spec.versions):
        for number, endpoint in enumerate(version.endpoints):
            place: tuple[Step, ...] = ("versions", index, "endpoints", number)
            for name, url in (("metricsUrl", endpoint.metrics_url), ("url", endpoint.url)):
                if url is None:
                    continue
                try:
                    key = endpoint_key(url)
                except ValueError as exc:
                    yield Fault((*place, name), f'"{url}" {exc}')
                    continue
                if name == "url" and key in seen:
                    yield Fault((*place, name), f"{key} is an endpoint of this service already")
                if name == "url":
                    seen.add(key)


def _canary(spec: LlmService) -> str | None:
    """The version that `canary_traffic_percent` is of; None: there is no canary, or nothing beside it."""
    if spec.canary_traffic_percent is None or len(spec.versions) < 2:
        return None
    return spec.canary_version or spec.versions[-1].name


def _endpoint(version: ServedVersion, url: str) -> Endpoint:
    return Endpoint(
        url=url,
        version=version.name,
        engine=version.engine,
        front=version.front or "",
        engine_model=version.engine_model or "",
        chat_template=version.chat_template or "",
    )


def _placed(place: tuple[Step, ...], steps: Sequence[Step]) -> tuple[Step, ...]:
    return (*place, *(_WRITTEN.get(str(step), step) for step in steps))


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)
