"""Gauges that nobody counts: they are read off the fleet, and off whom `main` names, at every scrape."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Literal

from sidecar.core.breaker import Breaker, Scope, State
from sidecar.core.desk import Desk
from sidecar.core.detection import Detection
from sidecar.core.fleet import Fleet
from sidecar.core.poison import Suspects
from sidecar.core.pool import Node
from sidecar.core.quotas.quota import Ledger
from sidecar.telemetry import admission, jwt, quotas, routing, tokens
from sidecar.telemetry.series import Kind, header, label_text

Source = Callable[[], float]

Watched = Literal[
    "requests_in_flight",
    "downstream_connections",
    "downstream_rejected",
    "upstream_connections",
    "ready",
    "draining",
    "policy_version",
    "log_lines_dropped",
    "log_up",
    "log_local",
    "log_read_age",
    "log_lag",
    "log_members",
    "log_registers",
    "log_to_tell",
    "log_to_tell_dropped",
    "log_shares_dropped",
    "log_appended",
    "log_applied",
    "log_cas_losses",
    "log_fenced",
    "log_floor_refusals",
    "log_suspected",
    "log_resyncs",
    "log_unreadable",
    "log_crashes",
    "control_streams",
    "control_lagged",
    "xds_clients",
    "xds_acks",
    "xds_nacks",
    "xds_left_out",
]
"""What other parts own and the scrape reads."""

WATCHED: Mapping[Watched, tuple[str, Kind, str]] = MappingProxyType(
    {
        "requests_in_flight": ("sidecar_requests_in_flight", "gauge", "Requests that have begun and not ended"),
        "downstream_connections": ("sidecar_downstream_connections", "gauge", "Open connections from clients"),
        "downstream_rejected": (
            "sidecar_downstream_connections_rejected_total",
            "counter",
            "Client connections closed at once: too many were open",
        ),
        "upstream_connections": ("sidecar_upstream_connections", "gauge", "Open connections to engines, idle included"),
        "ready": ("sidecar_ready", "gauge", "1 while /readyz answers 200"),
        "draining": ("sidecar_draining", "gauge", "1 from the beginning of the drain"),
        "policy_version": ("sidecar_policy_version", "gauge", "Version of the policy snapshot in force"),
        "log_lines_dropped": ("sidecar_log_lines_dropped_total", "counter", "Log lines lost to a slow reader"),
        "log_up": ("sidecar_log_up", "gauge", "1 while the transaction log answers: what is shared is agreed on"),
        "log_local": ("sidecar_log_local", "gauge", "1 where the log is kept in this process: nothing is shared"),
        "log_read_age": ("sidecar_log_read_age_seconds", "gauge", "Since the log last answered a read"),
        "log_lag": ("sidecar_log_lag_records", "gauge", "Records in the log that were not read yet, a second ago"),
        "log_members": ("sidecar_log_members", "gauge", "Sidecars that the log heard of lately, this one included"),
        "log_registers": ("sidecar_log_registers", "gauge", "Registers known here: breakers and routes in the log"),
        "log_to_tell": ("sidecar_log_to_tell", "gauge", "Changes of ours that the log was not told yet"),
        "log_to_tell_dropped": (
            "sidecar_log_to_tell_dropped_total",
            "counter",
            "Changes of ours that the log was never told: too many waited",
        ),
        "log_shares_dropped": (
            "sidecar_log_shares_dropped_total",
            "counter",
            "Summaries of what was seen here that were never told: too many waited",
        ),
        "log_appended": ("sidecar_log_appended_total", "counter", "Changes and orders of ours that became records"),
        "log_applied": ("sidecar_log_applied_total", "counter", "Registers that a breaker here was told to follow"),
        "log_cas_losses": (
            "sidecar_log_cas_losses_total",
            "counter",
            "Changes of ours that were dropped: another sidecar's came first",
        ),
        "log_fenced": (
            "sidecar_log_fenced_total",
            "counter",
            "Probes of ours that no longer counted when their result or their lease came",
        ),
        "log_floor_refusals": (
            "sidecar_log_floor_refusals_total",
            "counter",
            "Trips of ours that would have left too few endpoints closed in the whole fleet",
        ),
        "log_suspected": (
            "sidecar_log_suspected_total",
            "counter",
            "Trips of ours that were too little evidence to open for all",
        ),
        "log_resyncs": ("sidecar_log_resyncs_total", "counter", "Shards read whole: records were missed, or lost"),
        "log_unreadable": ("sidecar_log_unreadable_total", "counter", "Records skipped: another schema, or not ours"),
        "log_crashes": ("sidecar_log_crashes_total", "counter", "Faults of ours while following the log"),
        "control_streams": ("sidecar_control_streams", "gauge", "Descriptor streams that are open"),
        "control_lagged": (
            "sidecar_control_lagged_total",
            "counter",
            "Times that a descriptor stream was too slow for its events, and was told a snapshot instead",
        ),
        "xds_clients": ("sidecar_xds_clients", "gauge", "Envoys that are connected"),
        "xds_acks": ("sidecar_xds_acks_total", "counter", "Pushes that an Envoy took"),
        "xds_nacks": ("sidecar_xds_nacks_total", "counter", "Pushes that an Envoy refused"),
        "xds_left_out": (
            "sidecar_xds_left_out_endpoints",
            "gauge",
            "Endpoints that Envoys are not told, since they speak otherwise or cannot be said",
        ),
    }
)

STATE_NUMBER: Mapping[State, int] = MappingProxyType({State.CLOSED: 0, State.OPEN: 1, State.HALF_OPEN: 2})

FOLLOWS, ALONE, PROBING = 0, 1, 2


def role(breaker: Breaker, now: float) -> int:
    """What this sidecar is to a breaker: it follows what all agree on, avoids alone, or probes for all."""
    if breaker.shared and (breaker.probes_out or breaker.can_probe(now)):
        return PROBING
    return ALONE if breaker.state is not State.CLOSED and not breaker.shared else FOLLOWS


NODE_METRICS: tuple[tuple[str, Kind, str, Callable[[Node, float], float]], ...] = (
    (
        "sidecar_breaker_state",
        "gauge",
        "Endpoint's breaker: 0 closed, 1 open, 2 half-open",
        lambda node, now: STATE_NUMBER[node.breaker.state],
    ),
    (
        "sidecar_breaker_role",
        "gauge",
        "The sidecar's part in the endpoint's breaker: 0 follows the log, 1 not closed by itself alone, 2 probes",
        lambda node, now: role(node.breaker, now),
    ),
    (
        "sidecar_breaker_shadow_denied_total",
        "counter",
        "Requests that the endpoint's breaker would have refused, were it enforced",
        lambda node, now: node.breaker.shadow_denied,
    ),
    (
        "sidecar_breaker_held_closed_total",
        "counter",
        "Trips of the endpoint's breaker refused to keep the share of closed endpoints",
        lambda node, now: node.breaker.held_closed,
    ),
    (
        "sidecar_late_attempts_total",
        "counter",
        "Attempts whose first or next token was late while they ran",
        lambda node, now: node.late,
    ),
    (
        "sidecar_endpoint_in_flight",
        "gauge",
        "Attempts running on the endpoint",
        lambda node, now: node.in_flight,
    ),
    (
        "sidecar_endpoint_waiting",
        "gauge",
        "Requests queued in the engine, as it last reported",
        lambda node, now: node.waiting,
    ),
    (
        "sidecar_endpoint_healthy",
        "gauge",
        "1 while the engine answers its health check; a stalled engine does",
        lambda node, now: int(node.healthy),
    ),
    (
        "sidecar_endpoint_overloaded",
        "gauge",
        "1 while the endpoint's Retry-After runs",
        lambda node, now: int(node.overload_until > now),
    ),
)

POISON_METRICS: tuple[tuple[str, Kind, str, Callable[[Suspects], int]], ...] = (
    (
        "sidecar_poison_suspects",
        "gauge",
        "Prompts remembered because an endpoint crashed or hung with them on it",
        len,
    ),
    (
        "sidecar_poison_condemned_total",
        "counter",
        "Prompts that crashed or hung too many endpoints and were refused from then on, or would have been",
        lambda suspects: suspects.condemnations,
    ),
    (
        "sidecar_poison_shadow_refused_total",
        "counter",
        "Times that a request would have been refused or not sent again for its prompt, were that enforced",
        lambda suspects: suspects.shadow_refused,
    ),
)

DETECTOR_METRICS: tuple[tuple[str, Kind, str, Callable[[Detection], float]], ...] = (
    (
        "sidecar_detector_ready",
        "gauge",
        "1 once enough answers ended for the detector to judge; the fixed rules do until then",
        lambda detection: int(detection.ready),
    ),
    (
        "sidecar_detector_background_ratio",
        "gauge",
        "Ratio of bad answers that the detector takes for normal now",
        lambda detection: detection.normal.background,
    ),
    (
        "sidecar_detector_overload",
        "gauge",
        "1 while slowness is no evidence: the load is beyond what was seen to work, or much fails everywhere",
        lambda detection: int(detection.normal.overload),
    ),
    (
        "sidecar_detector_panic",
        "gauge",
        "1 while no breaker opens: most answers fail everywhere",
        lambda detection: int(detection.normal.panic),
    ),
)

COUNTED = 20
"""Breakers counted per piece: some microseconds, and a scrape renders many pieces before the loop may go on."""


class LiveGauges:
    """Set the attributes, then ask for `pieces` at every scrape. `now`: the fleet's clock, monotonic seconds."""

    __slots__ = ("build", "counter", "desk", "fleet", "ledger", "now", "sources", "tokens")

    def __init__(self, build: str) -> None:
        self.build = build
        self.sources: dict[Watched, Source] = {}
        self.fleet: Fleet | None = None
        self.desk: Desk | None = None
        self.ledger: Ledger | None = None
        self.tokens: jwt.Tokens | None = None
        self.counter: tokens.Counter | None = None
        self.now: Source = float

    def pieces(self) -> Iterator[str]:
        """The text; may be suspended between pieces while the fleet changes."""
        yield header("sidecar_build_info", "The running build", "gauge")
        yield f"sidecar_build_info{{{label_text(('version',), (self.build,))}}} 1\n"
        for watched, source in list(self.sources.items()):
            name, kind, text = WATCHED[watched]
            # A source may say True; Prometheus reads numbers.
            yield f"{header(name, text, kind)}{name} {source() + 0}\n"
        if self.fleet is not None:
            yield from self._services(self.fleet)
            yield from self._nodes(self.fleet)
            yield from admission.pieces(self.fleet, self.now())
        if self.ledger is not None:
            yield from quotas.pieces(self.ledger)
        if self.tokens is not None:
            yield from jwt.pieces(self.tokens)
        if self.counter is not None:
            yield from tokens.pieces(self.counter, self.fleet)
        yield from routing.pieces(self.desk, self.fleet, self.now())

    def _services(self, fleet: Fleet) -> Iterator[str]:
        services = list(fleet.services.items())
        yield header("sidecar_sessions", "Sessions remembered", "gauge")
        for name, service in services:
            yield f"sidecar_sessions{{{label_text(('service',), (name,))}}} {len(service.sessions)}\n"
        for metric, kind, text, read in POISON_METRICS:
            yield header(metric, text, kind)
            for name, service in services:
                yield f"{metric}{{{label_text(('service',), (name,))}}} {read(service.suspects)}\n"
        yield header(
            "sidecar_hedge_shadowed_total", "Late requests that would have been moved, were that enforced", "counter"
        )
        for name, service in services:
            yield f"sidecar_hedge_shadowed_total{{{label_text(('service',), (name,))}}} {service.hedge_shadowed}\n"
        for metric, kind, text, judge in DETECTOR_METRICS:
            yield header(metric, text, kind)
            for name, service in services:
                detection = service.detection
                if detection is not None:
                    yield f"{metric}{{{label_text(('service',), (name,))}}} {judge(detection)}\n"
        yield header("sidecar_breakers_not_closed", "Breakers open or half-open", "gauge")
        for name, service in services:
            # Sessions and kinds of request are no labels, so they are counted.
            count = Counter[Scope]()
            for number, breaker in enumerate(service.breakers()):
                if breaker.state is not State.CLOSED:
                    count[breaker.scope] += 1
                if number % COUNTED == 0:
                    # There may be 100,000 sessions': the loop may go on here.
                    yield ""
            for scope in Scope:
                labels = label_text(("scope", "service"), (scope, name))
                yield f"sidecar_breakers_not_closed{{{labels}}} {count[scope]}\n"

    def _nodes(self, fleet: Fleet) -> Iterator[str]:
        now = self.now()
        lines: list[list[str]] = [[header(name, text, kind)] for name, kind, text, _ in NODE_METRICS]
        for service, state in list(fleet.services.items()):
            for node in list(state.nodes.values()):
                labels = label_text(("service", "endpoint"), (service, node.key))
                for (name, _, _, read), into in zip(NODE_METRICS, lines, strict=True):
                    into.append(f"{name}{{{labels}}} {read(node, now)}\n")
                # Lines of a metric must stand together, so nothing is given yet, but the loop may go on here.
                yield ""
        for into in lines:
            yield from into
