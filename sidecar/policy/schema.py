"""The structs that policy files become: frozen, strict, every number bounded on both sides.

Durations are strings with a unit in the file (`250ms`, `10s`, `5m`) and seconds (`*_s`) in the struct. The bounds here
are what `read` enforces and what the JSON Schema says; rules between fields are in `check`. Building a struct by hand
checks neither: files are the border, code behind it is trusted.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

from sidecar.policy.address import URL_PATTERN
from sidecar.policy.duration import format_seconds

Mode = Literal["enforce", "shadow", "off"]
Engine = Literal["vllm", "triton", "deepspeed"]
Front = Literal["", "openai", "generate", "api_server", "gateway"]
Ratio = Annotated[float, Meta(ge=0, le=1)]

# Names end up as metric labels, header values and URL segments: a few plain characters only.
NAME_PATTERN = r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"
NAME_WORDS = "letters and digits, with . _ - between them"
PATH = r'/[!-"$-~]*'
PATH_WORDS = "a path from / on, in ASCII, without white space and #"
TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]"  # noqa: S105 - what RFC 9110 calls the characters of a header's name
PRINTABLE = r"^[^\x00-\x1f\x7f]*$"  # as RE2 writes it, too: Kubernetes reads patterns with that
PRINTABLE_WORDS = "text without control characters"

DEFAULT_VERSION = "v1"
"""Of an endpoint that names none."""

Name = Annotated[str, Meta(min_length=1, max_length=63, pattern=NAME_PATTERN, description=NAME_WORDS)]
NameOrNone = Annotated[str, Meta(max_length=63, pattern=rf"^$|{NAME_PATTERN}", description=NAME_WORDS)]
Place = Annotated[
    str, Meta(max_length=253, pattern=r"^[A-Za-z0-9._:/-]*$", description="letters, digits and . _ : / -")
]
Text = Annotated[str, Meta(max_length=1024, pattern=PRINTABLE, description=PRINTABLE_WORDS)]
Glob = Annotated[str, Meta(min_length=1, max_length=256, pattern=PRINTABLE, description=PRINTABLE_WORDS)]
Globs = Annotated[tuple[Glob, ...], Meta(max_length=1000)]
HeaderName = Annotated[str, Meta(max_length=128, pattern=f"^{TOKEN}*$", description="the name of a header")]
RequestKey = Annotated[
    str, Meta(max_length=135, pattern=f"^(route|header:{TOKEN}+)$", description='"route" or "header:<name>"')
]
Part = Annotated[float, Meta(ge=0, le=1_000_000)]
# The loader says in words what is wrong with a URL (`address`); for the JSON Schema a pattern says nearly as much.
Url = Annotated[str, Meta(min_length=1, max_length=512, extra_json_schema={"pattern": URL_PATTERN})]


class Seconds(float):
    """A duration in seconds, 0.001-3600; written as a string with a unit in files."""

    __slots__ = ()


class LongSeconds(Seconds):
    """A duration in seconds, 60-604800, for what is kept; written as a string with a unit, days too, in files."""

    __slots__ = ()


class Span(Seconds):
    """A duration in seconds, 0.001-604800; written as a string with a unit, days too, in files."""

    __slots__ = ()


def encode_hook(value: object) -> object:
    """For msgspec encoders: policy structs go out as they are written in files."""
    if isinstance(value, Seconds):
        return format_seconds(value)
    raise NotImplementedError(f"{type(value).__name__} is not of a policy")


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A struct that refuses what it does not know."""


class Endpoint(Strict, frozen=True, kw_only=True):
    """One engine's socket.

    `url`: http://host[:port], https://host[:port] or unix:///path, without a path of requests. `models` empty: serves
    none. `local`: in our own pod. `tls_ca` empty: the system's authorities.

    `front`: which of its engine's HTTP servers it is; empty: the usual one (vLLM `openai`, Triton `generate`, DeepSpeed
    `openai`). `engine_model`: what the engine calls its model, or MII its deployment, whatever clients call it; empty:
    what the client asks for. `chat_template`: file or model folder with the Jinja template that makes chats prompts,
    for fronts that have none (`generate`, `api_server`, `gateway`); empty: these take no chats. `metrics_url`: where
    its metrics are, if not at `url` (Triton's are on another port); empty: there, or nowhere for Triton.
    """

    url: Url
    engine: Engine = "vllm"
    front: Front = ""
    engine_model: Text = ""
    chat_template: Text = ""
    metrics_url: Annotated[str, Meta(max_length=512, extra_json_schema={"pattern": f"^$|{URL_PATTERN}"})] = ""
    version: Name = DEFAULT_VERSION
    zone: Place = ""
    node: Place = ""
    models: Globs = ("*",)
    local: bool = False
    tls_ca: Text = ""
    tls_verify: bool = True


FRONTS: dict[Engine, tuple[Front, ...]] = {
    "vllm": ("openai",),
    "triton": ("generate", "openai"),
    "deepspeed": ("openai", "api_server", "gateway"),
}
"""Each engine's HTTP servers, the usual one first."""


def front_of(endpoint: Endpoint) -> Front:
    """Which server it is, the default filled in."""
    return endpoint.front or FRONTS[endpoint.engine][0]


def is_translated(endpoint: Endpoint) -> bool:
    """Whether what it speaks is not what clients speak: vLLM's words, which Triton's OpenAI front speaks, too."""
    return endpoint.engine == "deepspeed" or (endpoint.engine == "triton" and front_of(endpoint) != "openai")


class Deadlines(Strict, frozen=True, kw_only=True):
    """How long each phase of an attempt may take."""

    connect_s: Seconds = field(name="connect", default=Seconds(1))
    head_s: Seconds = field(name="head", default=Seconds(60))
    first_token_s: Seconds = field(name="first_token", default=Seconds(30))
    token_gap_s: Seconds = field(name="token_gap", default=Seconds(10))
    tool_gap_s: Seconds = field(name="tool_gap", default=Seconds(30))
    total_s: Seconds = field(name="total", default=Seconds(600))
    idle_client_s: Seconds = field(name="idle_client", default=Seconds(60))


class Retry(Strict, frozen=True, kw_only=True):
    """Re-sending before the first byte went downstream. `attempts` counts the first one: 1 is no retry."""

    attempts: Annotated[int, Meta(ge=1, le=10)] = 3
    budget_ratio: Ratio = 0.2
    budget_min: Annotated[int, Meta(ge=0, le=1000)] = 3
    window_s: Seconds = field(name="window", default=Seconds(10))


class Hedge(Strict, frozen=True, kw_only=True):
    """Whether a request whose first token is late moves to another endpoint; `shadow` counts who would have."""

    mode: Mode = "off"


class BreakerRule(Strict, frozen=True, kw_only=True):
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


class Adaptive(Strict, frozen=True, kw_only=True):
    """The detector: what is late, and how much evidence opens an endpoint's breaker (docs/breaker.md).

    A first token is late at `exp(expected + tau)`, tau being mu + `kappa` sigma of the P99.9s of what is left
    unexplained, between ln `tau_min` and ln `tau_max`, and never before `late_min`. `gap_min`: the shortest silence
    within a stream that is late. The fast and the gray statistic trip at ln(1 / `false_alarm`), with `min_bad` bad
    answers in a minute; the location statistic at `location_trip`. Latency is judged once `min_samples` were learnt.
    `background`: the lowest ratio of bad answers that is taken for normal. `open`, `open_max`: the waits of what these
    statistics opened; `ramp`: how long one that closed again takes to its full share. `probe`: `copy` tries an open
    endpoint with a copy of a request that another one answers, `request` with the request itself. `statistics` may be
    any of the three; `covariates` false: prompt and load explain nothing; `in_flight` false: what is late counts at its
    end only; `guards` false: overload stops nothing.
    """

    false_alarm: Annotated[float, Meta(ge=1e-15, le=0.1)] = 1e-6
    kappa: Annotated[float, Meta(ge=0, le=100)] = 1.82
    tau_min: Annotated[float, Meta(ge=1.1, le=1000)] = 3.0
    tau_max: Annotated[float, Meta(ge=1.1, le=1000)] = 12.0
    late_min_s: Seconds = field(name="late_min", default=Seconds(0.25))
    gap_min_s: Seconds = field(name="gap_min", default=Seconds(2))
    fast_ratio: Annotated[float, Meta(ge=0.01, le=0.95)] = 0.4
    gray_ratio: Annotated[float, Meta(ge=0.005, le=0.9)] = 0.04
    background: Annotated[float, Meta(ge=1e-5, le=0.1)] = 0.002
    location_trip: Annotated[float, Meta(ge=5, le=1000)] = 20.0
    min_bad: Annotated[int, Meta(ge=2, le=100)] = 3
    min_samples: Annotated[int, Meta(ge=30, le=100_000)] = 200
    open_s: Seconds = field(name="open", default=Seconds(3))
    open_max_s: Seconds = field(name="open_max", default=Seconds(10))
    ramp_s: Seconds = field(name="ramp", default=Seconds(5))
    probe: Literal["copy", "request"] = "copy"
    statistics: Annotated[tuple[Literal["fast", "gray", "location"], ...], Meta(max_length=3)] = (
        "fast",
        "gray",
        "location",
    )
    covariates: bool = True
    in_flight: bool = True
    guards: bool = True


class NodeBreaker(BreakerRule, frozen=True, kw_only=True):
    """The endpoint's breaker. `min_closed_ratio` 0: no floor, all may open.

    `adaptive` true: the detector with its defaults; false: the fixed rules alone.
    """

    min_closed_ratio: Ratio = 0.34
    adaptive: bool | Adaptive = True


class SessionBreaker(BreakerRule, frozen=True, kw_only=True):
    """One breaker per session; the oldest of more than `max_sessions` are forgotten."""

    consecutive: Annotated[int, Meta(ge=1, le=1000)] = 3
    failure_ratio: Ratio = 0.0
    open_s: Seconds = field(name="open", default=Seconds(30))
    open_max_s: Seconds = field(name="open_max", default=Seconds(600))
    successes: Annotated[int, Meta(ge=1, le=100)] = 1
    max_sessions: Annotated[int, Meta(ge=1, le=10_000_000)] = 100_000
    idle_s: Seconds = field(name="idle", default=Seconds(3600))


class Poison(Strict, frozen=True, kw_only=True):
    """Prompts that crashed or hung `nodes` endpoints are not sent to one more until `ttl` after the last one.

    The oldest of more than `max` suspects are forgotten. `off`: nothing is remembered.
    """

    mode: Mode = "enforce"
    nodes: Annotated[int, Meta(ge=1, le=10)] = 2
    ttl_s: Seconds = field(name="ttl", default=Seconds(300))
    max: Annotated[int, Meta(ge=1, le=100_000)] = 1000


class RequestBreaker(BreakerRule, frozen=True, kw_only=True):
    """One breaker per kind of request; `key` is `route` (method and path) or `header:<name>`."""

    consecutive: Annotated[int, Meta(ge=1, le=1000)] = 10
    failure_ratio: Ratio = 0.0
    open_s: Seconds = field(name="open", default=Seconds(5))
    open_max_s: Seconds = field(name="open_max", default=Seconds(60))
    key: RequestKey = "route"
    poison: Poison = Poison()


class Breakers(Strict, frozen=True, kw_only=True):
    """The three scopes."""

    node: NodeBreaker = NodeBreaker()
    session: SessionBreaker = SessionBreaker()
    request: RequestBreaker = RequestBreaker()


class Overload(Strict, frozen=True, kw_only=True):
    """How long an endpoint that says it is full is left alone."""

    retry_after_default_s: Seconds = field(name="retry_after_default", default=Seconds(1))
    retry_after_cap_s: Seconds = field(name="retry_after_cap", default=Seconds(60))


class ZoneDecay(Strict, frozen=True, kw_only=True):
    """A zone whose first tokens jump past `latency` at the median is turned down to `weight` of what it would get
    (docs/zones.md)."""

    latency_s: Seconds = field(name="latency", default=Seconds(0.8))
    weight: Ratio = 0.1


class Shared(Strict, frozen=True, kw_only=True):
    """What sidecars agree on: `quorum` of them must see a fault, summaries are kept for `retention`."""

    quorum: Annotated[int, Meta(ge=1, le=100)] = 2
    retention_s: LongSeconds = field(name="retention", default=LongSeconds(3600))


class Balance(Strict, frozen=True, kw_only=True):
    """Choosing among endpoints.

    `local_first`: an endpoint marked `local` wins while it may serve. `affinity`: `prefer` keeps a session where its
    cache is, `off` forgets. `return_home`: a session that was moved goes back once when its endpoint recovers.
    """

    local_first: bool = False
    affinity: Literal["prefer", "off"] = "prefer"
    return_home: bool = True


class Limits(Strict, frozen=True, kw_only=True):
    """Sizes. `body_bytes` bounds an inference body, which is held for routing and re-sending."""

    body_bytes: Annotated[int, Meta(ge=1024, le=1 << 30)] = 32 << 20


class HealthCheck(Strict, frozen=True, kw_only=True):
    """Asking each engine for its queue (every `interval`) and its models; `timeout` for each answer.

    Off by default: one sidecar's own counts tell how busy an engine is that it alone feeds. `load` is for fleets that
    share engines, at the price of a scrape per second, sidecar and endpoint; it opens no breaker. `truth` opens the
    breaker of an engine that says that it sleeps, or that it has work and got nowhere with it for `stalled`; and asks
    one that nobody asked anything for `canary_interval` for a token, which it must give as any client's: two failures
    in a row open, too (docs/engines.md#health). `path`: a page of the engine's address that has to be there as well,
    with a status of 2xx or 3xx; empty: its own pages will do.
    """

    mode: Literal["off", "load", "truth"] = "off"
    path: Annotated[str, Meta(max_length=256, pattern=rf"^({PATH})?$", description=PATH_WORDS)] = ""
    interval_s: Seconds = field(name="interval", default=Seconds(1))
    timeout_s: Seconds = field(name="timeout", default=Seconds(1))
    stalled_s: Seconds = field(name="stalled", default=Seconds(10))
    canary_interval_s: Seconds = field(name="canary_interval", default=Seconds(30))


MeshMode = Literal["Enforce", "Shadow", "Disabled"]
"""A mode in the mesh's words, and without `Off`, which kubectl takes for a boolean."""

MeshSeconds = Annotated[float, Meta(ge=0.001, le=3600)]
"""The mesh writes seconds as a number, with the unit in the key."""

Weight = Annotated[float, Meta(ge=0.001, le=1000)]
Tokens = Annotated[int, Meta(ge=1, le=1_000_000_000_000)]


class Admission(Strict, frozen=True, kw_only=True):
    """Who may run now, who waits and who is told to come back (docs/qos.md).

    `mode` `auto`: `enforce` where the policy has `qos_policies`, else `off`; `shadow`: all is judged and counted,
    nobody waits or is refused. `limit` `learned`: requests in flight per endpoint, learnt from its first tokens and its
    queue, from `concurrency` on, between `min` and `max`, one that is slower than `tolerance` times its own baseline,
    or than 0.8 of the longest SLA where every class has one, is full; `fixed`: `concurrency`. `queue`: requests of the
    service that may wait; 0: none. `warning_ratio` of its SLA used up, those that are preemptible make room for a class
    that is not. `reserve`: the part of all turns that goes to the classes whose requests have waited past their own
    SLA, whatever their priority; 0: strict. `fairness` `class`: tenants share the tokens of each class; `service`: and
    those of all classes, so that one which had far more than its part goes behind those who had not, whatever its
    class. `tenant_weights`: their parts; 1 where not named.
    """

    mode: Literal["auto", "enforce", "shadow", "off"] = "auto"
    limit: Literal["learned", "fixed"] = "learned"
    concurrency: Annotated[int, Meta(ge=1, le=100_000)] = 64
    min: Annotated[int, Meta(ge=1, le=100_000)] = 4
    max: Annotated[int, Meta(ge=1, le=100_000)] = 1024
    tolerance: Annotated[float, Meta(ge=1.1, le=100)] = 4.0
    queue: Annotated[int, Meta(ge=0, le=100_000)] = 1000
    warning_ratio: Annotated[float, Meta(ge=0.1, le=1)] = 0.8
    reserve: Annotated[float, Meta(ge=0, le=0.5)] = 0.05
    fairness: Literal["class", "service"] = "service"
    tenant_weights: Annotated[dict[Text, Weight], Meta(max_length=10_000)] = {}


class Service(Strict, frozen=True, kw_only=True):
    """One set of endpoints behind one set of model names.

    `models` empty: reached as a fallback only. `split`: parts per version, empty: any version. `fallback` empty: none.
    `cache_salt` `tenant`: a vLLM's prefix cache is shared within a tenant only (docs/engines.md). `tokenizer`: file
    `tokenizer.json`, or the folder it is in, to count prompts with; empty: they are estimated. `request_tokens`: what
    one request may ask for as its answer, times 1.2 for a stream and its class's `budget_factor`; 0: as much as it
    likes.
    """

    name: Name
    models: Globs = ("*",)
    endpoints: Annotated[tuple[Endpoint, ...], Meta(max_length=100_000)] = ()
    split: Annotated[dict[Name, Part], Meta(max_length=100)] = {}
    fallback: NameOrNone = ""
    deadlines: Deadlines = Deadlines()
    retry: Retry = Retry()
    hedge: Hedge = Hedge()
    breakers: Breakers = Breakers()
    overload: Overload = Overload()
    zone_decay: ZoneDecay | None = None
    shared: Shared = Shared()
    balance: Balance = Balance()
    cache_salt: Literal["off", "tenant"] = "off"
    limits: Limits = Limits()
    health_check: HealthCheck = HealthCheck()
    admission: Admission = Admission()
    tokenizer: Text = ""
    request_tokens: Annotated[int, Meta(ge=0, le=100_000_000)] = 0


class Source(Strict, frozen=True, kw_only=True):
    """Where a session, tenant or class is read: exactly one of header, jwt_claim and body.

    `loopback`: a header that is believed from peers on this machine only; from others it goes no further.
    """

    header: HeaderName = ""
    jwt_claim: Annotated[str, Meta(max_length=128, pattern=PRINTABLE, description=PRINTABLE_WORDS)] = ""
    body: Literal["", "user"] = ""
    loopback: bool = False


JwtAlgorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
"""Signatures by a private key alone: with a shared secret whoever checks a token could make one."""

Claim = Annotated[str, Meta(min_length=1, max_length=512, pattern=PRINTABLE, description=PRINTABLE_WORDS)]


class JwtProvider(Strict, frozen=True, kw_only=True):
    """Who makes tokens, and how its signatures are checked. Exactly one of `jwks_file` and `jwks_url`.

    `audiences` empty: any. The keys of a URL are read again every `refresh`, and at a key id that they do not have;
    while they cannot be, the last ones serve for `stale`. `leeway`: how far its clock may be off. `max_age`: how old
    (`iat`) a token may be; None: as old as its `exp` lets it. `tls_ca` empty: the system's authorities.
    """

    issuer: Claim
    audiences: Annotated[tuple[Claim, ...], Meta(max_length=100)] = ()
    jwks_file: Text = ""
    jwks_url: Annotated[str, Meta(max_length=1024, extra_json_schema={"pattern": "^$|^https?://"})] = ""
    tls_ca: Text = ""
    algorithms: Annotated[tuple[JwtAlgorithm, ...], Meta(min_length=1, max_length=10)] = ("RS256", "ES256")
    refresh_s: LongSeconds = field(name="refresh", default=LongSeconds(300))
    stale_s: LongSeconds = field(name="stale", default=LongSeconds(86400))
    leeway_s: Seconds = field(name="leeway", default=Seconds(30))
    max_age_s: Span | None = field(name="max_age", default=None)


class Jwt(Strict, frozen=True, kw_only=True):
    """Whose tokens are believed; no issuer and no provider: no token is read.

    `verified_by` `mesh`: what is in front of us verified the signature, we read claims of tokens whose `iss` is listed
    in `issuers`; with `claims_header` they are read from that header instead (base64url JSON, as Istio's
    `outputPayloadToHeader` writes it), from peers on this machine only. `sidecar`: we verify, by `providers`; a token
    that is not good is refused, and with `required` so is a request that has none.
    """

    issuers: Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=512)], ...], Meta(max_length=100)] = ()
    verified_by: Literal["mesh", "sidecar"] = "mesh"
    claims_header: HeaderName = ""
    providers: Annotated[tuple[JwtProvider, ...], Meta(max_length=20)] = ()
    required: bool = False


Sources = Annotated[tuple[Source, ...], Meta(max_length=16)]


class Identity(Strict, frozen=True, kw_only=True):
    """Where session, tenant and class are read: the first source that is present. Empty: nothing is read."""

    session: Sources = (Source(header="x-session-id"), Source(jwt_claim="sid"), Source(body="user"))
    tenant: Sources = (Source(jwt_claim="tenant"), Source(header="x-tenant-id"))
    qos_class: Sources = field(name="class", default=(Source(header="x-sidecar-priority"), Source(jwt_claim="class")))
    jwt: Jwt = Jwt()


Modality = Literal["", "text", "voice", "code"]


class QosMatch(Strict, frozen=True, kw_only=True):
    """What a request must be: all that is given holds. `value` is a glob over the header's or the claim's value."""

    header: HeaderName = ""
    jwt_claim: Annotated[str, Meta(max_length=128, pattern=PRINTABLE, description=PRINTABLE_WORDS)] = ""
    value: Glob = "*"
    path: Annotated[str, Meta(max_length=256, pattern=PRINTABLE, description=PRINTABLE_WORDS)] = ""
    model: Annotated[str, Meta(max_length=256, pattern=PRINTABLE, description=PRINTABLE_WORDS)] = ""
    tenant: Annotated[str, Meta(max_length=256, pattern=PRINTABLE, description=PRINTABLE_WORDS)] = ""
    modality: Modality = ""


DEFAULT_CLASS = "default"
"""The class of requests that no class names or matches; a policy may define it."""


class QosPolicy(Strict, frozen=True, kw_only=True):
    """A class of requests. The higher `priority` goes first, those of one priority by `weight`.

    `latency_sla_ms`: from a request's arrival to its first token, or, of an answer that is no stream, until it is sent
    to an engine. `preemptible`: it waits, and is evicted before its first byte, for a class that is not and is about to
    break its SLA; with `evict` `streams` also after it. `late` `reject`: what can no longer meet the SLA is refused.
    `max_wait`: the longest wait for a turn. `budget_factor`: of a request's own token budget. `match`: any of these
    makes a request of this class, unless `identity.class` names one; empty: only what names it.
    """

    name: Name
    latency_sla_ms: Annotated[int, Meta(ge=1, le=3_600_000)]
    preemptible: bool = False
    priority: Annotated[int, Meta(ge=0, le=9)] = 5
    weight: Weight = 1.0
    late: Literal["serve", "reject"] = "serve"
    evict: Literal["waiting", "streams"] = "waiting"
    max_wait_s: Seconds = field(name="max_wait", default=Seconds(30))
    budget_factor: Annotated[float, Meta(ge=0.1, le=10)] = 1.0
    match: Annotated[tuple[QosMatch, ...], Meta(max_length=100)] = ()


class Quota(Strict, frozen=True, kw_only=True):
    """What each tenant that `tenant` (a glob) fits may use of `models` (globs), over all sidecars. None: no bound.

    A minute and a day are sliding. `concurrency`: requests under way. `when_log_away` `share`: while the transaction
    log cannot be reached, each sidecar goes on within its part, the limit over as many sidecars as there last were;
    `refuse`: nothing is admitted. Every quota that fits holds; `off` holds nothing.
    """

    name: Name
    tenant: Glob = "*"
    models: Globs = ("*",)
    tokens_per_minute: Tokens | None = None
    tokens_per_day: Tokens | None = None
    requests_per_minute: Tokens | None = None
    requests_per_day: Tokens | None = None
    concurrency: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    mode: Mode = "enforce"
    when_log_away: Literal["share", "refuse"] = "share"


QUOTA_BOUNDS = ("tokens_per_minute", "tokens_per_day", "requests_per_minute", "requests_per_day", "concurrency")
"""What a quota may bound; it bounds at least one of them."""


ReadyWhen = Literal["local", "any", "always"]


class PolicyDocument(Strict, frozen=True, kw_only=True):
    """A document of kind Policy."""

    api_version: Literal["sidecar/v1"] = field(name="apiVersion")
    kind: Literal["Policy"]
    services: Annotated[tuple[Service, ...], Meta(max_length=1000)] = ()
    identity: Identity = Identity()
    qos_policies: Annotated[tuple[QosPolicy, ...], Meta(max_length=100)] = ()
    quotas: Annotated[tuple[Quota, ...], Meta(max_length=1000)] = ()
    ready_when: ReadyWhen = "any"


class MeshBreaker(Strict, frozen=True, kw_only=True, rename="camel"):
    """A breaker rule of the mesh at one scope, over what the services say. None, and an empty fallback, leave that.

    `services`: whose; empty: everybody's, under what rules say that name a service. `max_timeout_s` None: no shorter
    than `timeout_s`. `min_closed_ratio` and `adaptive` are of scope Node, `max_sessions` of Session, `key` of Request.
    """

    scope: Literal["Request", "Session", "Node"]
    services: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()
    mode: MeshMode | None = None
    failure_threshold: Annotated[int, Meta(ge=1, le=1000)] | None = None
    failure_ratio: Ratio | None = None
    min_requests: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    window_s: MeshSeconds | None = field(name="windowSeconds", default=None)
    timeout_s: MeshSeconds | None = field(name="timeoutSeconds", default=None)
    max_timeout_s: MeshSeconds | None = field(name="maxTimeoutSeconds", default=None)
    probes: Annotated[int, Meta(ge=1, le=100)] | None = None
    successes: Annotated[int, Meta(ge=1, le=100)] | None = None
    min_closed_ratio: Ratio | None = None
    adaptive: bool | None = None
    max_sessions: Annotated[int, Meta(ge=1, le=10_000_000)] | None = None
    key: RequestKey | None = None
    fallback_service: NameOrNone = ""


MAX_STEPS = 20
"""Of a canary's plan."""


class PlanStep(Strict, frozen=True, kw_only=True):
    """The canary has `weight` of all traffic for at least `min` and `min_samples` answers."""

    weight: Annotated[float, Meta(ge=0.0001, le=1)]
    min_s: Span = field(name="min", default=Span(300))
    min_samples: Annotated[int, Meta(ge=1, le=10_000_000)] = 600


class PlanMargins(Strict, frozen=True, kw_only=True):
    """How much worse than its baseline a canary may be and still pass (docs/canary.md)."""

    success: Ratio = 0.005
    first_token: Annotated[float, Meta(ge=1, le=100)] = 1.10
    token_gap: Annotated[float, Meta(ge=1, le=100)] = 1.10
    errors: Ratio = 0.005
    length: Annotated[float, Meta(ge=1, le=100)] = 1.25
    finish: Ratio = 0.05


class PlanDocument(Strict, frozen=True, kw_only=True):
    """How a canary is led to its full weight.

    `false_alarm`: how likely one as good as its baseline is taken back, over the whole rollout. `min_ready`: a rollback
    sends its share only to versions of whose endpoints at least this part may serve; 0: to any.
    """

    baseline: Name
    steps: Annotated[tuple[PlanStep, ...], Meta(max_length=MAX_STEPS)]
    false_alarm: Annotated[float, Meta(ge=1e-6, le=0.2)] = 0.01
    margins: PlanMargins = PlanMargins()
    min_ready: Ratio = 0.5


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All policy files together, at one version. Replaced whole, never edited.

    `services` have the mesh's breaker rules applied; `mesh_breakers` keeps them for services that are added later.
    `warnings` are for the operator: what is legal and yet not what it seems.
    """

    version: int
    services: tuple[Service, ...]
    identity: Identity = Identity()
    qos_policies: tuple[QosPolicy, ...] = ()
    quotas: tuple[Quota, ...] = ()
    ready_when: ReadyWhen = "any"
    mesh_breakers: tuple[MeshBreaker, ...] = ()
    warnings: tuple[str, ...] = ()
