"""The structs that policy files become: frozen, strict, every number bounded on both sides.

Durations are strings with a unit in the file (`250ms`, `10s`, `5m`) and seconds (`*_s`) in the struct.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

Mode = Literal["enforce", "shadow", "off"]
Engine = Literal["vllm", "triton", "deepspeed"]
Ratio = Annotated[float, Meta(ge=0, le=1)]


class Seconds(float):
    """A duration in seconds, 0.001-3600; written as a string with a unit in files."""

    __slots__ = ()


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A struct that refuses what it does not know."""


class Endpoint(Strict):
    """One engine's socket."""

    url: str
    engine: Engine = "vllm"
    version: str = "v1"
    zone: str = ""
    node: str = ""
    models: tuple[str, ...] = ("*",)
    local: bool = False
    tls_ca: str = ""
    tls_verify: bool = True


class Deadlines(Strict):
    """How long each phase of an attempt may take."""

    connect_s: Seconds = field(name="connect", default=Seconds(1))
    head_s: Seconds = field(name="head", default=Seconds(60))
    first_token_s: Seconds = field(name="first_token", default=Seconds(30))
    token_gap_s: Seconds = field(name="token_gap", default=Seconds(10))
    tool_gap_s: Seconds = field(name="tool_gap", default=Seconds(30))
    total_s: Seconds = field(name="total", default=Seconds(600))
    idle_client_s: Seconds = field(name="idle_client", default=Seconds(60))


class Retry(Strict):
    """Re-sending before the first byte went downstream. `attempts` counts the first one: 1 is no retry."""

    attempts: Annotated[int, Meta(ge=1, le=10)] = 3
    budget_ratio: Ratio = 0.2
    budget_min: Annotated[int, Meta(ge=0, le=1000)] = 3
    window_s: Seconds = field(name="window", default=Seconds(10))


class Hedge(Strict):
    """Second copies of late requests."""

    mode: Mode = "off"


class BreakerRule(Strict):
    """What the three breakers share.

    `failure_ratio` 0 turns the ratio rule off; it judges the last `window` once at least `min_requests` ended in it.
    """

    mode: Mode = "enforce"
    consecutive: Annotated[int, Meta(ge=1, le=1000)] = 5
    failure_ratio: Ratio = 0.5
    min_requests: Annotated[int, Meta(ge=1, le=100_000)] = 20
    window_s: Seconds = field(name="window", default=Seconds(10))
    open_s: Seconds = field(name="open", default=Seconds(10))
    open_max_s: Seconds = field(name="open_max", default=Seconds(300))
    probes: Annotated[int, Meta(ge=1, le=100)] = 1
    successes: Annotated[int, Meta(ge=1, le=100)] = 2


class NodeBreaker(BreakerRule):
    """The endpoint's breaker. `min_closed_ratio` 0: no floor, all may open."""

    min_closed_ratio: Ratio = 0.34
    adaptive: bool = True


class SessionBreaker(BreakerRule):
    """One breaker per session; the oldest of more than `max_sessions` are forgotten."""

    consecutive: Annotated[int, Meta(ge=1, le=1000)] = 3
    failure_ratio: Ratio = 0.0
    open_s: Seconds = field(name="open", default=Seconds(30))
    open_max_s: Seconds = field(name="open_max", default=Seconds(600))
    successes: Annotated[int, Meta(ge=1, le=100)] = 1
    max_sessions: Annotated[int, Meta(ge=1, le=10_000_000)] = 100_000
    idle_s: Seconds = field(name="idle", default=Seconds(3600))


class RequestBreaker(BreakerRule):
    """One breaker per kind of request; `key` is `route` (method and path) or `header:<name>`."""

    consecutive: Annotated[int, Meta(ge=1, le=1000)] = 10
    failure_ratio: Ratio = 0.0
    open_s: Seconds = field(name="open", default=Seconds(5))
    open_max_s: Seconds = field(name="open_max", default=Seconds(60))
    key: str = "route"


class Breakers(Strict):
    """The three scopes."""

    node: NodeBreaker = NodeBreaker()
    session: SessionBreaker = SessionBreaker()
    request: RequestBreaker = RequestBreaker()


class Overload(Strict):
    """How long an endpoint that says it is full is left alone."""

    retry_after_default_s: Seconds = field(name="retry_after_default", default=Seconds(1))
    retry_after_cap_s: Seconds = field(name="retry_after_cap", default=Seconds(60))


class ZoneDecay(Strict):
    """A zone whose latency jumps past `latency` is turned down to `weight`."""

    latency_s: Seconds = field(name="latency", default=Seconds(0.8))
    weight: Ratio = 0.1


class Shared(Strict):
    """What sidecars agree on."""

    quorum: Annotated[int, Meta(ge=1, le=100)] = 2


class Balance(Strict):
    """Choosing among endpoints.

    `local_first`: an endpoint marked `local` wins while it may serve. `affinity`: `prefer` keeps a session where its
    cache is, `off` forgets. `return_home`: a session that was moved goes back once when its endpoint recovers.
    """

    local_first: bool = False
    affinity: Literal["prefer", "off"] = "prefer"
    return_home: bool = True


class Limits(Strict):
    """Sizes. `body_bytes` bounds an inference body, which is held for routing and re-sending."""

    body_bytes: Annotated[int, Meta(ge=1024, le=1 << 30)] = 32 << 20


class HealthCheck(Strict):
    """Asking the engine for its load and models every `interval`."""

    interval_s: Seconds = field(name="interval", default=Seconds(1))
    timeout_s: Seconds = field(name="timeout", default=Seconds(1))


class Service(Strict):
    """One set of endpoints behind one set of model names."""

    name: str
    models: tuple[str, ...] = ("*",)
    endpoints: tuple[Endpoint, ...] = ()
    split: dict[str, float] = {}
    fallback: str = ""
    deadlines: Deadlines = Deadlines()
    retry: Retry = Retry()
    hedge: Hedge = Hedge()
    breakers: Breakers = Breakers()
    overload: Overload = Overload()
    zone_decay: ZoneDecay | None = None
    shared: Shared = Shared()
    balance: Balance = Balance()
    limits: Limits = Limits()
    health_check: HealthCheck = HealthCheck()


class Source(Strict):
    """Where a session or tenant is read: exactly one of the three."""

    header: str = ""
    jwt_claim: str = ""
    body: Literal["", "user"] = ""


class Jwt(Strict):
    """Whose tokens are believed; no issuer: no token is read."""

    issuers: tuple[str, ...] = ()


class Identity(Strict):
    """Where session and tenant are read: the first source that is present."""

    session: tuple[Source, ...] = (Source(header="x-session-id"), Source(body="user"))
    tenant: tuple[Source, ...] = (Source(header="x-tenant-id"),)
    jwt: Jwt = Jwt()


class QosPolicy(Strict):
    """A class of requests."""

    name: str
    latency_sla_ms: Annotated[int, Meta(ge=1, le=3_600_000)]
    preemptible: bool = False
    priority: Annotated[int, Meta(ge=0, le=9)] = 5


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All policy files together, at one version. Replaced whole, never edited."""

    version: int
    services: tuple[Service, ...]
    identity: Identity = Identity()
    qos_policies: tuple[QosPolicy, ...] = ()
    ready_when: Literal["local", "any", "always"] = "any"
    warnings: tuple[str, ...] = ()
