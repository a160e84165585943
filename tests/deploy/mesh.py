"""What istiod would tell Envoys of the objects in deploy/istio, as far as a pod's life depends on it.

1. Inbound: tokens are verified and claims become headers as the RequestAuthentication says, the header of a claim is
   taken from whoever else sends it, and the connection to our port comes from 127.0.0.6.
2. Outbound: routes and weights as the VirtualService says, to one pod for each subset.
"""

import json
from typing import Any

from sidecar.inject.names import PROXY_PORT
from tests.control.xds.envoys import NETWORK
from tests.deploy.objects import Object
from tests.deploy.pod import ENVOY_ADMIN, INBOUND

FILTERS = "type.googleapis.com/envoy.extensions.filters.http"
PASSTHROUGH = "127.0.0.6"


def inbound(address: str, authentication: Object, keys: bytes) -> str:
    """A pod's own Envoy at its `address`. `keys`: what the issuer publishes."""
    providers: dict[str, Any] = {}
    for number, rule in enumerate(authentication["spec"]["jwtRules"]):
        providers[f"origins-{number}"] = {
            "issuer": rule["issuer"],
            "audiences": rule["audiences"],
            "local_jwks": {"inline_string": keys.decode()},
            "forward": rule["forwardOriginalToken"],
            "forward_payload_header": rule["outputPayloadToHeader"],
            "payload_in_metadata": rule["issuer"],
            "claim_to_headers": [
                {"header_name": each["header"], "claim_name": each["claim"]}
                for each in rule.get("outputClaimToHeaders", [])
            ],
        }
    one_of = [{"provider_name": name} for name in providers]
    # What RequestAuthentication is alone: who has no token passes.
    needs = {"requires_any": {"requirements": [*one_of, {"allow_missing": {}}]}}
    verified = {
        "@type": f"{FILTERS}.jwt_authn.v3.JwtAuthentication",
        "providers": providers,
        "rules": [{"match": {"prefix": "/"}, "requires": needs}],
    }
    routes = [{"match": {"prefix": "/"}, "route": {"cluster": "inbound", "timeout": "0s"}}]
    return _envoy(address, routes, {"inbound": [(address, PROXY_PORT)]}, verified, PASSTHROUGH)


def outbound(address: str, service: Object, subsets: dict[str, str]) -> str:
    """A client's Envoy that listens at `address`. `subsets`: each one's pod."""
    routes = []
    for http in service["spec"]["http"]:
        clusters = [{"name": to["destination"]["subset"], "weight": to["weight"]} for to in http["route"]]
        for match in http.get("match", [{}]):
            path = match.get("uri", {})
            found: Object = {"path": path["exact"]} if "exact" in path else {"prefix": "/"}
            if "method" in match:
                found["headers"] = [{"name": ":method", "string_match": match["method"]}]
            routes.append({"match": found, "route": {"weighted_clusters": {"clusters": clusters}, "timeout": "0s"}})
    return _envoy(address, routes, {name: [(pod, INBOUND)] for name, pod in subsets.items()})


def _envoy(
    address: str,
    routes: list[Object],
    clusters: dict[str, list[tuple[str, int]]],
    authentication: Object | None = None,
    source: str = "",
) -> str:
    filters = [] if authentication is None else [("jwt_authn", authentication)]
    filters.append(("router", {"@type": f"{FILTERS}.router.v3.Router"}))
    manager = {
        "@type": f"{NETWORK}.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "stream_idle_timeout": "0s",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
        "http_filters": [{"name": f"envoy.filters.http.{name}", "typed_config": config} for name, config in filters],
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    listener = {
        "name": "virtualInbound",
        "traffic_direction": "INBOUND",
        "address": _address(address, INBOUND),
        "filter_chains": [chain],
    }
    made = [
        {
            "name": name,
            "type": "STATIC",
            "connect_timeout": "1s",
            **({"upstream_bind_config": {"source_address": _address(source, 0)["socket_address"]}} if source else {}),
            "load_assignment": {
                "cluster_name": name,
                "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(*each)}} for each in endpoints]}],
            },
        }
        for name, endpoints in clusters.items()
    ]
    return json.dumps(
        {
            "admin": {"address": _address("127.0.0.1", ENVOY_ADMIN)},
            "static_resources": {"listeners": [listener], "clusters": made},
        }
    )


def _address(host: str, port: int) -> Object:
    return {"socket_address": {"address": host, "port_value": port}}
