"""Envoy's messages, made from their descriptors: those in `envoy.pb`, in a pool of their own.

The packages that have them as modules install `envoy`, `google`, `opentelemetry` and `xds` at the top, over files that
others own, and break them (docs/dependencies.md). A pool of our own meets nobody. What is in `envoy.pb` and where it
comes from: `proto/envoy_descriptors.py`.

Messages are of no static type: whoever makes one stays in this package, and hands on bytes.
"""

from importlib.resources import files
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

TYPE_PREFIX: Final = "type.googleapis.com/"
SERVICE: Final = "envoy.service.discovery.v3.AggregatedDiscoveryService"

_pool: Final = descriptor_pool.DescriptorPool()
for _file in descriptor_pb2.FileDescriptorSet.FromString(files(__package__).joinpath("envoy.pb").read_bytes()).file:
    _pool.Add(_file)


def message(name: str) -> Any:
    """The class of a message; KeyError for a name that `envoy.pb` lacks."""
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(name))


def packed(made: Any) -> dict[str, Any]:
    """A message as the fields of an Any; the same message always gives the same bytes."""
    url = TYPE_PREFIX + made.DESCRIPTOR.full_name
    return {"type_url": url, "value": made.SerializeToString(deterministic=True)}


Cluster: Final = message("envoy.config.cluster.v3.Cluster")
ClusterLoadAssignment: Final = message("envoy.config.endpoint.v3.ClusterLoadAssignment")
Listener: Final = message("envoy.config.listener.v3.Listener")
RouteConfiguration: Final = message("envoy.config.route.v3.RouteConfiguration")
VirtualHost: Final = message("envoy.config.route.v3.VirtualHost")
Route: Final = message("envoy.config.route.v3.Route")
HttpConnectionManager: Final = message(
    "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
)
Router: Final = message("envoy.extensions.filters.http.router.v3.Router")
PreviousHosts: Final = message("envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate")
UpstreamTlsContext: Final = message("envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext")
HttpProtocolOptions: Final = message("envoy.extensions.upstreams.http.v3.HttpProtocolOptions")
DiscoveryRequest: Final = message("envoy.service.discovery.v3.DiscoveryRequest")
DiscoveryResponse: Final = message("envoy.service.discovery.v3.DiscoveryResponse")
DeltaDiscoveryRequest: Final = message("envoy.service.discovery.v3.DeltaDiscoveryRequest")
DeltaDiscoveryResponse: Final = message("envoy.service.discovery.v3.DeltaDiscoveryResponse")
