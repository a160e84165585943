"""A service in Envoy's words: a cluster for each version, its endpoints, and the route that splits among them; pure.

1. A version is the cluster `SERVICE|VERSION`. Its endpoints come by EDS; a version in which one goes by a name is
   resolved by the Envoy instead (EDS takes addresses only), and its endpoints stand in the cluster.
2. A version has a cluster while it has an endpoint, with traffic or without: a weight that rises from 0 is a route and
   nothing else. The share of one without endpoints goes to the others, as in a sidecar.
3. Weights are parts of `PARTS`, in an order in which a growing version takes from all others and none of them from each
   other (`layout`): with the session's hash choosing, sessions move to it alone.
4. A zone that is turned down is a locality of less weight; one that is turned off has none, unless all are.
5. Breakers are ours: no outlier detection, and limits that nobody meets. What was certainly not sent is sent again
   elsewhere; what an engine may have begun is not.
6. A stream may last as long as it likes and be silent as long as the policy's longest deadline.
7. TLS: authorities come in the message, since an Envoy has another disk than we. What cannot be said is left out, and
   told in words.
8. An endpoint whose requests are translated (`policy.schema.is_translated`) is nobody's who asks as clients do: it is
   left out as if the version had it not, and told in words, with what becomes of the version's share (rule 2).
"""

import ipaddress
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, Final

import msgspec

from sidecar.control.xds import protos
from sidecar.control.xds.snapshot import ROUTES_NAME, SERVICE_HEADER, Part, Resource, Untold, digest, resource
from sidecar.core.table import PARTS, Table, encode, parts_of, started
from sidecar.policy.address import Address, parse_url
from sidecar.policy.schema import Deadlines, Endpoint, Service, encode_hook, front_of, is_translated

SESSION_HEADER: Final = "x-session-id"
VERSION_HEADER: Final = "x-sidecar-version"

IDLE_S: Final = 4.0
"""Of a connection to an engine: uvicorn closes its own after 5 s, and a request may be under way to it."""
NO_LIMIT: Final = 1_000_000
RING: Final = (1024, 16_384)
"""Points of the ring that sessions are held against: Envoy's own least, and a most that zones of little weight need."""
HOST_TRIES: Final = 5

ReadCa = Callable[[str], str]
"""The PEM text of a file, or of the system's authorities for an empty name; OSError where it is not to be had."""


class Where(msgspec.Struct, frozen=True):
    """A place for a listener of the Envoys'."""

    host: str
    port: int


class _Tls(msgspec.Struct, frozen=True):
    """How to speak TLS to an endpoint; `host` only where it goes by an address, which no server name can carry."""

    ca: str
    verify: bool
    host: str

    @property
    def key(self) -> str:
        """What endpoints and transport sockets are matched by."""
        return digest((f"{self.ca}\0{self.verify}\0{self.host}".encode(),))


def build(service: Service, table: Table | None, table_version: int, read_ca: ReadCa, had: Part | None = None) -> Part:
    """A service as `Desk.effective` has it, with the zones and the rollout of its table. `had`: what it was before."""
    source = _source(service, table)
    if had is None or had.source != source:
        clusters, assignments, left_out = _endpoints(service, table, read_ca)
        untold = _untold(service)
    else:
        clusters, assignments, left_out, untold = had.clusters, had.assignments, had.left_out, had.untold
    host = by_header = by_default = b""
    notices: tuple[str, ...] = ()
    if service.split or service.endpoints:
        split = _split(service, [each.name.rpartition("|")[2] for each in clusters], table)
        notices = _notices(service, untold, split)
        action = _action(service, split, bool(untold))
        named = [{"name": SERVICE_HEADER, "string_match": {"exact": service.name}}]
        unnamed = [{"name": SERVICE_HEADER, "present_match": True, "invert_match": True}]
        domain = service.name.lower()
        host = _bytes(
            protos.VirtualHost(
                name=service.name, domains=[domain, f"{domain}.*"], routes=[{"match": {"prefix": "/"}, **action}]
            )
        )
        by_header = _bytes(protos.Route(match={"prefix": "/", "headers": named}, **action))
        by_default = _bytes(protos.Route(match={"prefix": "/", "headers": unnamed}, **action))
    return Part(
        service.name,
        b"" if table is None else encode(table),
        table_version,
        source,
        clusters,
        assignments,
        host,
        by_header,
        by_default,
        digest((*(each.version.encode() for each in (*clusters, *assignments)), host)),
        left_out,
        untold,
        notices,
    )


def listener(where: Where) -> Resource:
    """A listener that asks for the routes by name."""
    manager = protos.HttpConnectionManager(
        stat_prefix=ROUTES_NAME,
        rds={"route_config_name": ROUTES_NAME, "config_source": _ADS},
        # The route's own idle timeout holds.
        stream_idle_timeout={},
        http_filters=[{"name": "envoy.filters.http.router", "typed_config": protos.packed(protos.Router())}],
    )
    made = protos.Listener(
        name=ROUTES_NAME,
        address={"socket_address": {"address": where.host, "port_value": where.port}},
        filter_chains=[
            {
                "filters": [
                    {
                        "name": "envoy.filters.network.http_connection_manager",
                        "typed_config": protos.packed(manager),
                    }
                ]
            }
        ],
    )
    return resource(ROUTES_NAME, _bytes(made))


def layout(parts: Sequence[tuple[str, int]], moving: str) -> list[tuple[str, int]]:
    """The same parts in the order in which a hash is to meet them; `moving` is cut into a piece behind each other one.

    A hash chooses by where in the whole it falls. One after the other, a third version that grows would push the border
    between the first two along. So each of the others has its stretch of the whole, by its part of what the others have
    together, and the moving one has the end of each stretch: it grows, and no other border moves.
    """
    others = [(name, part) for name, part in parts if name != moving and part > 0]
    whole = sum(part for _, part in others)
    share = sum(part for name, part in parts if name == moving)
    if not whole:
        return [(moving, share)] if share > 0 else []
    order: list[tuple[str, int]] = []
    given = seen = 0
    for name, part in others:
        order.append((name, part))
        seen += part
        piece = share * seen // whole - given
        given += piece
        if piece:
            order.append((moving, piece))
    return order


class _Version:
    """One version: its cluster, and its endpoints where EDS can say them."""

    def __init__(
        self,
        name: str,
        service: Service,
        endpoints: Sequence[tuple[Endpoint, Address]],
        zones: dict[str, float],
        read_ca: ReadCa,
        left_out: list[str],
    ) -> None:
        self.cluster: Resource | None = None
        self.assignment: Resource | None = None
        resolved = any(not _is_address(address) for _, address in endpoints)
        sockets: dict[_Tls, dict[str, Any]] = {}
        by_zone: dict[str, list[dict[str, Any]]] = {}
        for endpoint, address in endpoints:
            if resolved and address.scheme == "unix":
                left_out.append(f"{endpoint.url}: a version has sockets or endpoints that go by a name, not both")
                continue
            tls = None
            if address.scheme == "https":
                tls = _Tls(endpoint.tls_ca, endpoint.tls_verify, address.host if _is_address(address) else "")
                if tls not in sockets:
                    try:
                        sockets[tls] = _socket(tls, read_ca)
                    except OSError as exc:
                        left_out.append(f"{endpoint.url}: {exc}")
                        continue
            by_zone.setdefault(endpoint.zone, []).append(_endpoint(address, tls))
        if not by_zone:
            return
        assignment = protos.ClusterLoadAssignment(cluster_name=name, endpoints=_localities(by_zone, zones))
        if resolved:
            kind = {"type": "STRICT_DNS", "load_assignment": assignment, "dns_lookup_family": "V4_PREFERRED"}
        else:
            kind = {"type": "EDS", "eds_cluster_config": {"eds_config": _ADS}}
            self.assignment = resource(name, _bytes(assignment))
        sticky = service.balance.affinity == "prefer"
        ring = {"minimum_ring_size": {"value": RING[0]}, "maximum_ring_size": {"value": RING[1]}}
        made = protos.Cluster(
            name=name,
            connect_timeout=_duration(service.deadlines.connect_s),
            lb_policy="RING_HASH" if sticky else "LEAST_REQUEST",
            ring_hash_lb_config=ring if sticky else None,
            # A zone's weight is told at once, not merged with others for a second.
            common_lb_config={"locality_weighted_lb_config": {}, "update_merge_window": {}},
            circuit_breakers=_NO_LIMITS,
            typed_extension_protocol_options={_HTTP_OPTIONS: _HTTP},
            transport_socket_matches=[sockets[tls] for tls in sorted(sockets, key=lambda tls: tls.key)],
            **kind,
        )
        self.cluster = resource(name, _bytes(made))


def _source(service: Service, table: Table | None) -> bytes:
    """What clusters and endpoints are made from, digested: weights change often, and endpoints are many."""
    made_from = (
        service.endpoints,
        service.deadlines.connect_s,
        service.balance.affinity,
        sorted(_zones(table).items()),
    )
    return blake2b(_encoder.encode(made_from), digest_size=16).digest()


def _zones(table: Table | None) -> dict[str, float]:
    return {} if table is None else {zone: decay.share for zone, decay in table.zones.items() if decay.share < 1}


def _endpoints(
    service: Service, table: Table | None, read_ca: ReadCa
) -> tuple[tuple[Resource, ...], tuple[Resource, ...], tuple[str, ...]]:
    """The clusters, what EDS says of them, and what was left out."""
    zones = _zones(table)
    by_version: dict[str, list[tuple[Endpoint, Address]]] = {}
    for endpoint in service.endpoints:
        if _is_told(endpoint):
            by_version.setdefault(endpoint.version, []).append((endpoint, parse_url(endpoint.url)))
    clusters: list[Resource] = []
    assignments: list[Resource] = []
    left_out: list[str] = []
    for version, endpoints in by_version.items():
        made = _Version(f"{service.name}|{version}", service, endpoints, zones, read_ca, left_out)
        if made.cluster is not None:
            clusters.append(made.cluster)
        if made.assignment is not None:
            assignments.append(made.assignment)
    return tuple(clusters), tuple(assignments), tuple(left_out)


def _split(service: Service, served: Sequence[str], table: Table | None) -> list[tuple[str, int]]:
    """The parts of the versions that have an endpoint, as they are laid out; empty: nobody gets anything."""
    if service.split:
        shares = {name: float(share) for name, share in service.split.items() if name in served}
    else:  # any endpoint serves: a version's share is how many it has
        shares = {name: float(sum(e.version == name and _is_told(e) for e in service.endpoints)) for name in served}
    parts = parts_of(shares)
    if not parts:
        return []
    moving = next(reversed(parts))
    if table is not None and table.rollout is not None:
        moving = table.rollout.version
    return layout(list(parts.items()), moving)


def _is_told(endpoint: Endpoint) -> bool:
    return bool(endpoint.models) and not is_translated(endpoint)


def _untold(service: Service) -> tuple[Untold, ...]:
    """The versions that have endpoints which need a sidecar."""
    found: dict[str, list[str]] = {}
    for endpoint in service.endpoints:
        if endpoint.models and is_translated(endpoint):
            found.setdefault(endpoint.version, []).append(f"{endpoint.engine}/{front_of(endpoint)}")
    if not found:
        return ()
    totals = dict.fromkeys(found, 0)
    for endpoint in service.endpoints:
        if endpoint.models and endpoint.version in totals:
            totals[endpoint.version] += 1
    return tuple(
        Untold(version, len(speak), totals[version], ", ".join(sorted(set(speak)))) for version, speak in found.items()
    )


def _notices(service: Service, untold: Sequence[Untold], split: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """In words: who is left out, and who has its share."""
    if not untold:
        return ()
    has = dict.fromkeys((version for version, _ in split), 0)
    for version, part in split:
        has[version] += part
    wants = started(service).weights
    return tuple(_notice(each, wants.get(each.version, 0) / PARTS, has) for each in untold)


def _notice(untold: Untold, share: float, has: dict[str, int]) -> str:
    who = f"version {untold.version}: {untold.endpoints} of {untold.total} endpoints speak {untold.speaks}"
    if untold.endpoints < untold.total and has.get(untold.version):
        becomes = f"the others of it have its {share:.2%}"
    elif not share:
        becomes = "it has no weight now"
    elif any(has.values()):
        rest = ", ".join(f"{version} {part / PARTS:.2%}" for version, part in sorted(has.items()) if part)
        becomes = f"its {share:.2%} are the others', which have {rest}"
    else:
        becomes = f"nobody is left for its {share:.2%}, and Envoys answer 503"
    return f"{who}, which no Envoy can translate: {becomes}"


def _action(service: Service, split: Sequence[tuple[str, int]], some_untold: bool) -> dict[str, Any]:
    """What a route does: the weighted clusters, or a refusal where no version has both a weight and an endpoint."""
    if not split:
        text = f"no version of {service.name} has a weight and an endpoint"
        if some_untold:
            text += " that can be asked without a sidecar"
        return {"direct_response": {"status": 503, "body": {"inline_string": text}}}
    route: dict[str, Any] = {
        "weighted_clusters": {
            "clusters": [_weighted(service.name, version, part) for version, part in split],
            "use_hash_policy": {"value": True},
        },
        "hash_policy": [{"header": {"header_name": SESSION_HEADER}}],
        "timeout": {},
        "idle_timeout": _duration(_longest_silence(service.deadlines)),
    }
    if service.retry.attempts > 1:
        route["retry_policy"] = {
            "retry_on": "connect-failure,refused-stream,reset-before-request",
            "num_retries": {"value": service.retry.attempts - 1},
            "retry_host_predicate": [_NOT_AGAIN],
            "host_selection_retry_max_attempts": HOST_TRIES,
        }
    return {"route": route}


def _weighted(service: str, version: str, part: int) -> dict[str, Any]:
    return {
        "name": f"{service}|{version}",
        "weight": {"value": part},
        "response_headers_to_add": [
            {
                # In a header's value % begins a command.
                "header": {"key": VERSION_HEADER, "value": version.replace("%", "%%")},
                "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
            }
        ],
    }


def _localities(by_zone: dict[str, list[dict[str, Any]]], zones: dict[str, float]) -> list[dict[str, Any]]:
    # A locality's weight is what its endpoints together would get; the smallest that can be said is 1.
    weights: dict[str, int] = {}
    for zone, endpoints in by_zone.items():
        share = zones.get(zone, 1.0)
        weights[zone] = max(1, round(len(endpoints) * share * PARTS)) if share > 0 else 0
    if not any(weights.values()):
        weights = {zone: len(endpoints) for zone, endpoints in by_zone.items()}
    return [
        {
            "locality": {"zone": zone},
            "lb_endpoints": by_zone[zone],
            # Without a weight a locality gets nothing.
            "load_balancing_weight": {"value": weights[zone]} if weights[zone] else None,
        }
        for zone in sorted(by_zone)
    ]


def _endpoint(address: Address, tls: _Tls | None) -> dict[str, Any]:
    if address.scheme == "unix":
        return {"endpoint": {"address": {"pipe": {"path": address.path}}}}
    socket = {"socket_address": {"address": address.host, "port_value": address.port}}
    endpoint: dict[str, Any] = {"endpoint": {"address": socket, "hostname": address.host}}
    if tls is not None:
        match = protos.message("google.protobuf.Struct")(fields={"tls": {"string_value": tls.key}})
        endpoint["metadata"] = {"filter_metadata": {"envoy.transport_socket_match": match}}
    return endpoint


def _socket(tls: _Tls, read_ca: ReadCa) -> dict[str, Any]:
    """The transport socket for the endpoints that are matched by the key of `tls`."""
    common: dict[str, Any] = {"alpn_protocols": ["http/1.1"]}
    by_name = not tls.host
    if tls.verify:
        context: dict[str, Any] = {"trusted_ca": {"inline_string": read_ca(tls.ca)}}
        if not by_name:
            matcher = {"exact": tls.host}
            context["match_typed_subject_alt_names"] = [{"san_type": "IP_ADDRESS", "matcher": matcher}]
        common["validation_context"] = context
    made = protos.UpstreamTlsContext(
        common_tls_context=common, auto_host_sni=by_name, auto_sni_san_validation=by_name and tls.verify
    )
    return {
        "name": tls.key,
        "match": protos.message("google.protobuf.Struct")(fields={"tls": {"string_value": tls.key}}),
        "transport_socket": {"name": "envoy.transport_sockets.tls", "typed_config": protos.packed(made)},
    }


def _longest_silence(deadlines: Deadlines) -> float:
    return max(deadlines.head_s, deadlines.first_token_s, deadlines.token_gap_s, deadlines.tool_gap_s)


def _is_address(address: Address) -> bool:
    if address.scheme == "unix":
        return True
    try:
        ipaddress.ip_address(address.host)
    except ValueError:
        return False
    return True


def _duration(seconds: float) -> dict[str, int]:
    nanos = round(seconds * 1e9)
    return {"seconds": nanos // 1_000_000_000, "nanos": nanos % 1_000_000_000}


def _bytes(made: Any) -> bytes:
    return bytes(made.SerializeToString(deterministic=True))


_encoder: Final = msgspec.msgpack.Encoder(enc_hook=encode_hook)
_ADS: Final[dict[str, Any]] = {"ads": {}, "resource_api_version": "V3"}
_LIMITS: Final = {
    f"max_{what}": {"value": NO_LIMIT} for what in ("connections", "pending_requests", "requests", "retries")
}
_NO_LIMITS: Final = {"thresholds": [_LIMITS, {"priority": "HIGH", **_LIMITS}]}
_HTTP_OPTIONS: Final = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_HTTP: Final = protos.message("google.protobuf.Any")(
    **protos.packed(
        protos.HttpProtocolOptions(
            common_http_protocol_options={"idle_timeout": _duration(IDLE_S)},
            explicit_http_config={"http_protocol_options": {}},
        )
    )
)
_NOT_AGAIN: Final = {
    "name": "envoy.retry_host_predicates.previous_hosts",
    "typed_config": protos.packed(protos.PreviousHosts()),
}
