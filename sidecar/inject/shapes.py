"""What is read of a pod: a typed view of it. What it does not name is nobody's business here and passes unseen.

Everything may be missing or null, as hand-written manifests like to have it; names alone must be there.
"""

from typing import Any

import msgspec


class Get(msgspec.Struct, rename="camel"):
    """`httpGet` of a probe or a hook."""

    port: int | str
    path: str | None = None
    host: str | None = None
    scheme: str | None = None
    http_headers: list[dict[str, str]] | None = None


class Socket(msgspec.Struct):
    """`tcpSocket`."""

    port: int | str
    host: str | None = None


class Command(msgspec.Struct):
    """`exec`."""

    command: list[str] | None = None


class Sleep(msgspec.Struct):
    """`sleep`."""

    seconds: int


class Probe(msgspec.Struct, rename="camel"):
    """A container's probe."""

    http_get: Get | None = None
    tcp_socket: Socket | None = None
    grpc: dict[str, Any] | None = None
    timeout_seconds: int | None = None
    termination_grace_period_seconds: int | None = None


class Hook(msgspec.Struct, rename="camel"):
    """What is done at a container's start or end."""

    exec: Command | None = None
    http_get: Get | None = None
    sleep: Sleep | None = None


class Lifecycle(msgspec.Struct, rename="camel"):
    """A container's hooks."""

    pre_stop: Hook | None = None


class Port(msgspec.Struct, rename="camel"):
    """A port that a container says it has."""

    container_port: int
    name: str | None = None
    host_port: int | None = None
    protocol: str | None = None


class Mount(msgspec.Struct, rename="camel"):
    """Where a volume is mounted."""

    name: str
    mount_path: str


class User(msgspec.Struct, rename="camel"):
    """Who a container, or all of them, run as."""

    run_as_user: int | None = None
    run_as_group: int | None = None


class Needs(msgspec.Struct):
    """Resources: quantities are text or numbers; `claims` are of devices."""

    requests: dict[str, str | int | float] | None = None
    limits: dict[str, str | int | float] | None = None
    claims: list[dict[str, Any]] | None = None


class Variable(msgspec.Struct):
    """A variable; without `value` it comes from somewhere else."""

    name: str
    value: str | None = None


class Container(msgspec.Struct, rename="camel"):
    """A container, of either kind."""

    name: str
    image: str | None = None
    command: list[str] | None = None
    args: list[str] | None = None
    env: list[Variable] | None = None
    ports: list[Port] | None = None
    volume_mounts: list[Mount] | None = None
    resources: Needs | None = None
    lifecycle: Lifecycle | None = None
    startup_probe: Probe | None = None
    liveness_probe: Probe | None = None
    readiness_probe: Probe | None = None
    security_context: User | None = None
    restart_policy: str | None = None


class Volume(msgspec.Struct):
    """A pod's volume."""

    name: str


class System(msgspec.Struct):
    """A pod's operating system."""

    name: str | None = None


class Spec(msgspec.Struct, rename="camel"):
    """A pod's specification."""

    containers: list[Container] | None = None
    init_containers: list[Container] | None = None
    volumes: list[Volume] | None = None
    host_network: bool | None = None
    host_pid: bool | None = msgspec.field(default=None, name="hostPID")
    share_process_namespace: bool | None = None
    os: System | None = None
    node_selector: dict[str, str] | None = None
    resources: Needs | None = None
    termination_grace_period_seconds: int | None = None
    security_context: User | None = None


class Metadata(msgspec.Struct):
    """A pod's metadata."""

    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class Pod(msgspec.Struct):
    """A pod, or the template of one."""

    spec: Spec | None = None
    metadata: Metadata | None = None

    @property
    def labels(self) -> dict[str, str]:
        """Its labels."""
        return (self.metadata.labels if self.metadata else None) or {}

    @property
    def annotations(self) -> dict[str, str]:
        """Its annotations."""
        return (self.metadata.annotations if self.metadata else None) or {}
