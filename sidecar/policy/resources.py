"""The custom resources of Kubernetes that a sidecar reads as files: what may stand in them.

The same objects that `deploy/crds` defines for the API server, so that a ConfigMap of them needs no controller. Keys
are in Kubernetes' spelling, and every bound and default here is also the CRD's, by test; rules between fields are in
`custom`, in the words of the CRD's own rules. What the API server adds to an object is passed over: a file may be what
`kubectl get -o yaml` wrote.

1. A number of seconds is a number with the unit in its key (`timeoutSeconds: 30`), as Kubernetes writes them.
2. There is no selector of pods: nobody would resolve it. Endpoints are URLs, or come by the descriptor stream.
3. Patterns are RE2's as well as Python's: no look-ahead, no `\\u`.
"""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, field

from sidecar.policy.address import HOST_PORT_PATTERN
from sidecar.policy.schema import (
    NAME_PATTERN,
    NAME_WORDS,
    PATH,
    PATH_WORDS,
    PRINTABLE,
    PRINTABLE_WORDS,
    Engine,
    Glob,
    MeshBreaker,
    MeshMode,
    MeshSeconds,
    Name,
    NameOrNone,
    Place,
    Strict,
    Text,
    Tokens,
)

RESILIENCE_API = "resilience.example.com/v1"
INFRA_API = "infra.ai/v1"

ModelName = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=256,
        pattern=r"^[A-Za-z0-9._/:@+-]+$",
        description="a model's name: letters, digits and . _ / : @ + -",
    ),
]
EndpointUrl = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=512,
        pattern=HOST_PORT_PATTERN,
        description="http://host:port, https://host:port or unix:///path",
    ),
]
ModelFile = Annotated[str, Meta(min_length=1, max_length=1024, pattern=PRINTABLE, description=PRINTABLE_WORDS)]

FROM_THE_SERVER = frozenset(
    (
        "creationTimestamp",
        "deletionGracePeriodSeconds",
        "deletionTimestamp",
        "finalizers",
        "generateName",
        "generation",
        "managedFields",
        "ownerReferences",
        "resourceVersion",
        "selfLink",
        "uid",
    )
)
"""Keys of `metadata` that say nothing to us, whatever stands there."""


class Metadata(Strict, frozen=True, kw_only=True):
    """What Kubernetes puts beside a spec; only the name is read."""

    ignored: ClassVar[frozenset[str]] = FROM_THE_SERVER

    name: Annotated[str, Meta(min_length=1, max_length=253, pattern=NAME_PATTERN, description=NAME_WORDS)]
    namespace: Place = ""
    labels: dict[str, Text] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)


class NamedMetadata(Metadata, frozen=True, kw_only=True):
    """As `Metadata`, where the name goes on to metrics and headers."""

    name: Name


class Document(Strict, frozen=True, kw_only=True):
    """What a custom resource has beside `apiVersion`, `kind`, `metadata` and `spec` is its status: not for us."""

    ignored: ClassVar[frozenset[str]] = frozenset(("status",))


class MeshBreakerDocument(Document, frozen=True, kw_only=True):
    """A document of kind CircuitBreakerPolicy."""

    api_version: Literal["resilience.example.com/v1"] = field(name="apiVersion")
    kind: Literal["CircuitBreakerPolicy"]
    metadata: Metadata
    spec: MeshBreaker


class ServedEndpoint(Strict, frozen=True, kw_only=True, rename="camel"):
    """One engine's socket. One on this machine is taken for our own pod's. `metrics_url`: as of a policy's endpoint."""

    url: EndpointUrl
    zone: Place = ""
    node: Place = ""
    metrics_url: EndpointUrl | None = None


class ServedVersion(Strict, frozen=True, kw_only=True, rename="camel"):
    """One version of a service's model. Without endpoints: they come from `--upstream` or by the descriptor stream.

    `weight` None: 1, or of the canary what `canary_traffic_percent` says. `front`, `engine_model`, `chat_template`: as
    of a policy's endpoint; None: the usual front, the name that clients ask for, no chats.
    """

    name: Name
    weight: Annotated[int, Meta(ge=0, le=10_000)] | None = None
    engine: Engine = "vllm"
    front: Literal["openai", "generate", "api_server", "gateway"] | None = None
    engine_model: ModelFile | None = None
    chat_template: ModelFile | None = None
    endpoints: Annotated[tuple[ServedEndpoint, ...], Meta(max_length=64)] = ()


class HealthProbe(Strict, frozen=True, kw_only=True, rename="camel"):
    """`health_check` in mode `truth`. `path` empty: the engine's own pages alone."""

    path: Annotated[str, Meta(max_length=256, pattern=rf"^({PATH})?$", description=PATH_WORDS)] = ""
    timeout_s: MeshSeconds = field(name="timeoutSeconds", default=1.0)
    interval_s: MeshSeconds = field(name="intervalSeconds", default=1.0)


class ServedDeadlines(Strict, frozen=True, kw_only=True):
    """The `deadlines` that services differ in; the others are a policy's defaults."""

    head_s: MeshSeconds = field(name="headSeconds", default=60.0)
    first_token_s: MeshSeconds = field(name="firstTokenSeconds", default=30.0)
    token_gap_s: MeshSeconds = field(name="tokenGapSeconds", default=10.0)
    total_s: MeshSeconds = field(name="totalSeconds", default=600.0)


class LlmService(Strict, frozen=True, kw_only=True, rename="camel"):
    """A model, the versions that serve it and what each gets.

    `aliases`: other names that clients may ask for, as globs. `canary_traffic_percent` None: every version gets its
    `weight`; else the canary gets that much, and the others share the rest by theirs. `canary_version` None: the last
    of `versions`. `health_probe` None: nobody asks the engines anything.
    """

    model_ref: ModelName
    aliases: Annotated[tuple[Glob, ...], Meta(max_length=64)] = ()
    versions: Annotated[tuple[ServedVersion, ...], Meta(max_length=16)] = ()
    canary_traffic_percent: Annotated[int, Meta(ge=0, le=100)] | None = None
    canary_version: Name | None = None
    health_probe: HealthProbe | None = None
    deadlines: ServedDeadlines = ServedDeadlines()
    fallback_service: NameOrNone = ""


class LlmServiceDocument(Document, frozen=True, kw_only=True):
    """A document of kind LLMService."""

    api_version: Literal["infra.ai/v1"] = field(name="apiVersion")
    kind: Literal["LLMService"]
    metadata: NamedMetadata
    spec: LlmService


class TokenQuota(Strict, frozen=True, kw_only=True, rename="camel"):
    """A quota of a policy, whose name is the object's. `tenant` `*`: each tenant has a budget of its own."""

    tenant: Glob
    models: Annotated[tuple[Glob, ...], Meta(min_length=1, max_length=64)] = ("*",)
    tokens_per_minute: Tokens | None = None
    tokens_per_day: Tokens | None = None
    requests_per_minute: Tokens | None = None
    requests_per_day: Tokens | None = None
    concurrency: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    mode: MeshMode = "Enforce"
    when_log_away: Literal["Share", "Refuse"] = "Share"


class TokenQuotaDocument(Document, frozen=True, kw_only=True):
    """A document of kind TokenQuota."""

    api_version: Literal["infra.ai/v1"] = field(name="apiVersion")
    kind: Literal["TokenQuota"]
    metadata: NamedMetadata
    spec: TokenQuota


class ListDocument(Strict, frozen=True, kw_only=True):
    """What `kubectl get -o yaml` writes of several objects; each item is judged as a document of its own."""

    ignored: ClassVar[frozenset[str]] = frozenset(("items", "metadata"))

    api_version: Literal["v1"] = field(name="apiVersion")
    kind: Literal["List"]
