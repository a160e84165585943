"""What all Envoys are to have at one moment: every resource, by kind and name; frozen, and shared by all streams.

1. A resource's version is a digest of its bytes, and a shelf's of its resources' versions. So nothing moves that did
   not change: new weights are new routes, and clusters and endpoints keep their versions. And two servers that say the
   same, or one before and after its restart, say it under the same version.
2. A snapshot is put together from one `Part` for each service, which is made when that service changes and kept while
   it does not. A shelf in which no part changed is the very shelf of the snapshot before.
3. The routes of all services are one resource, as Envoys want it: its bytes are the parts' bytes, one after the other,
   which is what a repeated field is on the wire.
"""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from hashlib import blake2b
from typing import Final

import msgspec

from sidecar.control.xds import protos

ROUTES_NAME: Final = "sidecar"
"""Of the RouteConfiguration, and of the listener where one is asked for."""
SERVICE_HEADER: Final = "x-sidecar-service"


class Kind(IntEnum):
    """The four types of resources, in the order in which they are sent."""

    CLUSTERS = 0
    ENDPOINTS = 1
    LISTENERS = 2
    ROUTES = 3

    @property
    def word(self) -> str:
        """What Envoy's own counters call it."""
        return ("cds", "eds", "lds", "rds")[self]


TYPE_URLS: Final = (
    protos.TYPE_PREFIX + "envoy.config.cluster.v3.Cluster",
    protos.TYPE_PREFIX + "envoy.config.endpoint.v3.ClusterLoadAssignment",
    protos.TYPE_PREFIX + "envoy.config.listener.v3.Listener",
    protos.TYPE_PREFIX + "envoy.config.route.v3.RouteConfiguration",
)
KINDS: Final = {url: Kind(number) for number, url in enumerate(TYPE_URLS)}


class Resource(msgspec.Struct, frozen=True):
    """One resource as it is sent: the message's bytes, and a digest of them."""

    name: str
    body: bytes
    version: str


class Shelf(msgspec.Struct, frozen=True):
    """All resources of one kind."""

    version: str
    resources: dict[str, Resource]


class Untold(msgspec.Struct, frozen=True):
    """A version of which Envoys are not told `endpoints` of its `total`: they speak what an Envoy cannot, `speaks`."""

    version: str
    endpoints: int
    total: int
    speaks: str


class Part(msgspec.Struct, frozen=True):
    """One service in Envoy's words, and what they were made from, as short as it can be kept: there may be thousands.

    `table` is its record, empty where it has none; `source` a digest of what clusters and endpoints depend on.
    `host` is its virtual host, empty for a service without versions; `by_header` its route for those who name it in
    `SERVICE_HEADER`, and `by_default` for those who name nobody. `left_out`: what an Envoy cannot be told, in words.
    `untold`: those who need a sidecar, and `notices` what becomes of their share, in words.
    """

    name: str
    table: bytes
    table_version: int
    source: bytes
    clusters: tuple[Resource, ...]
    assignments: tuple[Resource, ...]
    host: bytes
    by_header: bytes
    by_default: bytes
    fingerprint: str
    left_out: tuple[str, ...] = ()
    untold: tuple[Untold, ...] = ()
    notices: tuple[str, ...] = ()


class Snapshot(msgspec.Struct, frozen=True):
    """All of it. `fingerprint`: two that say the same have the same."""

    parts: dict[str, Part]
    shelves: tuple[Shelf, Shelf, Shelf, Shelf]
    fingerprint: str


def resource(name: str, body: bytes) -> Resource:
    """A resource under the digest of its bytes."""
    return Resource(name, body, digest((body,)))


def digest(pieces: Iterable[bytes]) -> str:
    """Sixteen hex digits that stand for these bytes in this order."""
    total = blake2b(digest_size=8)
    for piece in pieces:
        total.update(piece)
    return total.hexdigest()


def compose(parts: Sequence[Part], listener: Resource | None, before: Snapshot | None = None) -> Snapshot:
    """The snapshot of these services. The first is the one that requests go to which name none."""
    clusters = _shelf(_merged(part.clusters for part in parts), before, Kind.CLUSTERS)
    assignments = _shelf(_merged(part.assignments for part in parts), before, Kind.ENDPOINTS)
    listeners = _shelf({} if listener is None else {listener.name: listener}, before, Kind.LISTENERS)
    body = _routes(parts)
    had = None if before is None else before.shelves[Kind.ROUTES].resources[ROUTES_NAME]
    if had is None or had.body != body:
        had = resource(ROUTES_NAME, body)
    shelves = (clusters, assignments, listeners, _shelf({ROUTES_NAME: had}, before, Kind.ROUTES))
    fingerprint = digest(shelf.version.encode() for shelf in shelves)
    return Snapshot({part.name: part for part in parts}, shelves, fingerprint)


def _merged(all_of: Iterable[tuple[Resource, ...]]) -> dict[str, Resource]:
    return {each.name: each for some in all_of for each in some}


def _shelf(resources: dict[str, Resource], before: Snapshot | None, kind: Kind) -> Shelf:
    had = None if before is None else before.shelves[kind]
    if had is not None and had.resources == resources:
        return had
    pieces = (f"{name}\0{resources[name].version}\0".encode() for name in sorted(resources))
    return Shelf(digest(pieces), resources)


def _routes(parts: Sequence[Part]) -> bytes:
    pieces = [_ROUTES_HEAD]
    domains: set[str] = set()
    default: list[bytes] = [_EVERYBODY_HEAD]
    reachable = [part for part in parts if part.host]
    if reachable:
        default.append(_field(_ROUTES_OF_HOST, reachable[0].by_default))
    for part in reachable:
        default.append(_field(_ROUTES_OF_HOST, part.by_header))
        # Hosts are compared in lower case: a second service of that name is reached by the header alone.
        domain = part.name.lower()
        if domain not in domains:
            domains.add(domain)
            pieces.append(_field(_HOSTS, part.host))
    pieces.append(_field(_HOSTS, b"".join(default)))
    return b"".join(pieces)


def _field(number: int, message: bytes) -> bytes:
    """A message as a field of another one: what Protobuf's encoding has for it (wire type 2)."""
    head = bytearray((number << 3 | 2,))
    length = len(message)
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return bytes(head) + message


def _number(name: str, field: str) -> int:
    return int(protos.message(name).DESCRIPTOR.fields_by_name[field].number)


_HOSTS: Final = _number("envoy.config.route.v3.RouteConfiguration", "virtual_hosts")
_ROUTES_OF_HOST: Final = _number("envoy.config.route.v3.VirtualHost", "routes")
_ROUTES_HEAD: Final = bytes(
    # Without `validate_clusters` a route to a cluster that is not there is taken, and its requests fail.
    protos.RouteConfiguration(
        name=ROUTES_NAME, validate_clusters={"value": True}, ignore_port_in_host_matching=True
    ).SerializeToString()
)
_EVERYBODY_HEAD: Final = bytes(protos.VirtualHost(name="*", domains=["*"]).SerializeToString())
