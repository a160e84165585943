"""Rules between fields, which no type says: is every name known, can this configuration do what it asks for?

Each rule gives its fault and the path it is at. A rule is silent about what was already found wrong with its inputs:
the reader goes on with defaults, and a fault of a default would be one that nobody wrote.
"""

from collections.abc import Callable, Iterator, Mapping

from sidecar.kernel.ids import EndpointKey
from sidecar.policy.address import endpoint_key
from sidecar.policy.check_qos import check_admission
from sidecar.policy.duration import format_seconds
from sidecar.policy.errors import Fault, Step
from sidecar.policy.schema import FRONTS, BreakerRule, Endpoint, Service, front_of, is_translated


def check_service(service: Service) -> Iterator[Fault]:
    """Faults within one service; steps start inside it."""
    yield from _check_endpoints(service)
    yield from _check_split(service)
    for scope in ("node", "session", "request"):
        rule: BreakerRule = getattr(service.breakers, scope)
        if rule.open_s > rule.open_max_s:
            at = ("breakers", scope)
            yield Fault(
                (*at, "open"),
                f"{format_seconds(rule.open_s)} is longer than open_max ({format_seconds(rule.open_max_s)})",
                ((*at, "open_max"),),
            )
    overload = service.overload
    if overload.retry_after_default_s > overload.retry_after_cap_s:
        yield Fault(
            ("overload", "retry_after_default"),
            f"{format_seconds(overload.retry_after_default_s)} is longer than retry_after_cap "
            f"({format_seconds(overload.retry_after_cap_s)})",
            (("overload", "retry_after_cap"),),
        )
    yield from check_admission(service.admission)


def _check_endpoints(service: Service) -> Iterator[Fault]:
    seen: set[EndpointKey] = set()
    for index, endpoint in enumerate(service.endpoints):
        try:
            key = endpoint_key(endpoint.url)
        except ValueError as exc:
            yield Fault(("endpoints", index, "url"), f'"{endpoint.url}" {exc}')
            continue
        if key in seen:
            yield Fault(("endpoints", index, "url"), f"{key} is an endpoint of this service already")
        seen.add(key)
        if endpoint.tls_ca and not endpoint.url.startswith("https:"):
            yield Fault(("endpoints", index, "tls_ca"), "is of use with https:// only")
        if endpoint.metrics_url:
            try:
                endpoint_key(endpoint.metrics_url)
            except ValueError as exc:
                yield Fault(("endpoints", index, "metrics_url"), f'"{endpoint.metrics_url}" {exc}')
        yield from check_front(endpoint, ("endpoints", index))


def check_front(endpoint: Endpoint, at: tuple[Step, ...] = ()) -> Iterator[Fault]:
    """Faults between an endpoint's engine and how it is spoken to; steps start with `at`."""
    fronts = FRONTS[endpoint.engine]
    if endpoint.front and endpoint.front not in fronts:
        said = f"{endpoint.engine} has no front {endpoint.front}; it has {', '.join(fronts)}"
        yield Fault((*at, "front"), said, ((*at, "engine"),))
        return
    if endpoint.engine_model and not is_translated(endpoint):
        said = "is of use where requests are translated; start the engine with the name that clients ask for"
        yield Fault((*at, "engine_model"), said, ((*at, "engine"),))
    name, slash, version = endpoint.engine_model.partition("/versions/")
    if endpoint.engine == "triton" and ("/" in name + version or bool(slash) != bool(version) or (slash and not name)):
        said = f'"{endpoint.engine_model}" is of no use: Triton calls a model name or name/versions/version'
        yield Fault((*at, "engine_model"), said, ((*at, "engine"),))
    if endpoint.chat_template and front_of(endpoint) == "openai":
        yield Fault((*at, "chat_template"), "is of no use: this front applies its own", ((*at, "engine"),))


def _check_split(service: Service) -> Iterator[Fault]:
    if not service.split:
        return
    if not sum(service.split.values()) > 0:
        yield Fault(("split",), "all parts are 0: at least one must be positive")
    if not service.endpoints:
        return  # they come later, from the command line or the descriptor stream
    versions = {endpoint.version for endpoint in service.endpoints}
    for version in service.split:
        if version not in versions:
            yield Fault(
                ("split", version),
                f"no endpoint has this version; there are {', '.join(sorted(versions))}",
                (("endpoints",),),
            )


def check_fallbacks(services: Mapping[str, Service]) -> Iterator[tuple[str, str]]:
    """Names of services whose fallback leads back to them, and the way it goes."""
    for name, service in services.items():
        if service.fallback == name:
            yield name, "a service cannot be its own fallback"
        elif (loop := _loop(name, services)) is not None:
            yield name, f"goes round in a loop: {' -> '.join(loop)}"


def _loop(start: str, services: Mapping[str, Service]) -> list[str] | None:
    """The names from `start` back to it, or None: a loop that `start` only leads into is told where it closes."""
    trail = {start: None}  # a dict for its order
    name = start
    while (service := services.get(name)) is not None and service.fallback:
        name = service.fallback
        if name in trail:
            return [*trail, start] if name == start else None
        trail[name] = None
    return None


def warnings_of(services: tuple[Service, ...], add: Callable[[str], None]) -> None:
    """Tell `add` what is legal and yet not what it seems, of endpoints, breakers and the like."""
    taken: dict[str, str] = {}
    fallbacks = {service.fallback for service in services}
    for service in services:
        where = f"service {service.name}: "
        if service.hedge.mode != "off":
            node = service.breakers.node
            if node.adaptive is False or node.mode == "off":
                add(f"{where}hedge.mode {service.hedge.mode} moves nothing: adaptive alone knows what is late")
            elif service.retry.attempts == 1:
                add(f"{where}hedge.mode {service.hedge.mode} moves nothing: retry.attempts is 1")
        if service.health_check.mode == "truth" and service.breakers.node.mode == "off":
            add(f"{where}health_check.mode truth opens nothing: breakers.node.mode is off")
        if service.health_check.mode == "off" and service.health_check.path:
            add(f"{where}health_check.path is asked for by nobody: health_check.mode is off")
        if service.zone_decay is not None and len({endpoint.zone for endpoint in service.endpoints}) == 1:
            add(f"{where}zone_decay turns nothing down: its endpoints name no zones, or all the same one")
        if service.deadlines.tool_gap_s < service.deadlines.token_gap_s:
            add(f"{where}deadlines.tool_gap is shorter than token_gap: tool calls get less time than text")
        if service.deadlines.total_s < min(service.deadlines.head_s, service.deadlines.first_token_s):
            add(
                f"{where}deadlines.total ends requests before head or first_token can: an endpoint that hangs is "
                "charged with nothing"
            )
        silent = [each.url for each in service.endpoints if front_of(each) != "openai" and not each.chat_template]
        if len(silent) < len(service.endpoints):
            for url in silent:
                add(f"{where}{url} takes no chats, and others do: its front makes none without chat_template")
        poison = service.breakers.request.poison
        if poison.mode != "off" and 1 < len(service.endpoints) < poison.nodes:
            add(f"{where}breakers.request.poison.nodes is more than there are endpoints: no prompt is ever refused")
        idle = {endpoint.version for endpoint in service.endpoints} - set(service.split)
        if service.split and idle:
            add(f"{where}endpoints of {', '.join(sorted(idle))} get no traffic: split gives that version no part")
        hidden = [taken[glob] for glob in service.models if glob in taken]
        if service.models and len(hidden) == len(service.models) and service.name not in fallbacks:
            add(f"{where}is never chosen: {', '.join(sorted(set(hidden)))} comes before it for all its models")
        if not service.models and service.name not in fallbacks:
            add(f"{where}is never chosen: it has no models and is no fallback")
        for glob in service.models:
            taken.setdefault(glob, service.name)
    for service in services:
        engines = {endpoint.engine for endpoint in service.endpoints}
        if service.cache_salt != "off" and engines and "vllm" not in engines:
            add(f"service {service.name}: cache_salt keeps nothing apart: no endpoint is a vLLM")
