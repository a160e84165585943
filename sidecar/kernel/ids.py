"""Names for the strings that must not be mixed up."""

from typing import NewType

EndpointKey = NewType("EndpointKey", str)
"""`host:port`, or the path of a unix socket: what breakers, metrics and `x-sidecar-endpoint` call an endpoint."""

ServiceName = NewType("ServiceName", str)
VersionName = NewType("VersionName", str)
SessionId = NewType("SessionId", str)
