"""Who waits, runs and is turned away, by service and class, and what each endpoint may have: read off the gates.

The gates count for themselves; nothing is looked up on a request's way. Tenants are counted and never named.
"""

from collections.abc import Callable, Iterator
from math import inf
from typing import Final

from sidecar.core.fleet import Fleet
from sidecar.core.gate.admit import ClassView
from sidecar.core.pool import Node
from sidecar.telemetry.series import Kind, header, label_text

CLASS_METRICS: Final[tuple[tuple[str, Kind, str, Callable[[ClassView], float]], ...]] = (
    ("sidecar_queued", "gauge", "Requests that wait for their turn", lambda view: view.queued),
    ("sidecar_running", "gauge", "Requests that had their turn and have not ended", lambda view: view.running),
    (
        "sidecar_queue_oldest_seconds",
        "gauge",
        "How long the one that waits longest has waited",
        lambda view: view.waiting_s,
    ),
    (
        "sidecar_turns_total",
        "counter",
        "Requests that had their turn, at once or after a wait",
        lambda view: view.turns,
    ),
    (
        "sidecar_sla_warning",
        "gauge",
        "1 while requests of the class wait that are about to break its SLA: those that are preemptible make room",
        lambda view: int(view.warning),
    ),
    (
        "sidecar_first_token_usual_seconds",
        "gauge",
        "From its turn to its first token, as the slower ones of the class take",
        lambda view: view.usual_s,
    ),
)

AWAY: Final[tuple[tuple[str, Callable[[ClassView], int]], ...]] = (
    ("overloaded", lambda view: view.overloaded),
    ("queue_timeout", lambda view: view.queue_timeout),
    ("preempted", lambda view: view.preempted),
)
"""Why the gate turns requests away, as in `x-sidecar-reason`."""

SLA: Final[tuple[tuple[str, Callable[[ClassView], int]], ...]] = (
    ("met", lambda view: view.met),
    ("missed", lambda view: view.missed),
)

_AWAY: Final = len(CLASS_METRICS)
_SLA: Final = _AWAY + 1
_TENANTS: Final = _AWAY + 2


def pieces(fleet: Fleet, now: float) -> Iterator[str]:
    """The text; may be suspended between pieces while the fleet changes."""
    lines: list[list[str]] = [[header(name, text, kind)] for name, kind, text, _ in CLASS_METRICS]
    lines.append(
        [
            header(
                "sidecar_turned_away_total",
                "Requests that were told to come back, or, in shadow mode, would have been",
                "counter",
            )
        ]
    )
    lines.append([header("sidecar_sla_total", "First tokens by whether they came within the class's SLA", "counter")])
    lines.append(
        [header("sidecar_admission_tenants", "Tenants that share the service's turns, as remembered", "gauge")]
    )
    for name, service in list(fleet.services.items()):
        gate = service.gate
        if gate is None:
            continue
        view = gate.view(now)
        lines[_TENANTS].append(f"sidecar_admission_tenants{{{label_text(('service',), (name,))}}} {view.tenants}\n")
        for each in view.classes:
            labels = label_text(("service", "qos"), (name, each.name))
            for (metric, _, _, read), into in zip(CLASS_METRICS, lines, strict=False):
                into.append(f"{metric}{{{labels}}} {read(each)}\n")
            for reason, count in AWAY:
                more = f'reason="{reason}",mode="{view.mode}"'
                lines[_AWAY].append(f"sidecar_turned_away_total{{{labels},{more}}} {count(each)}\n")
            for result, count in SLA:
                lines[_SLA].append(f'sidecar_sla_total{{{labels},result="{result}"}} {count(each)}\n')
            # Lines of a metric must stand together, so nothing is given yet, but the loop may go on here.
            yield ""
    for into in lines:
        yield from into
    yield from _limits(fleet)


LIMIT_METRICS: Final[tuple[tuple[str, Kind, str, Callable[[Node], float | None]], ...]] = (
    (
        "sidecar_endpoint_limit",
        "gauge",
        "Requests that the endpoint may have at once",
        lambda node: node.limit if node.limit < inf else None,
    ),
    (
        "sidecar_endpoint_limit_cuts_total",
        "counter",
        "Times that the endpoint's limit was taken down: it was slower than it is alone, had a queue, or said so",
        lambda node: None if node.limiter is None else node.limiter.cuts,
    ),
    (
        "sidecar_endpoint_first_token_ratio",
        "gauge",
        "The endpoint's first tokens over what they take while it is not busy, for prompts of their size; 0: unknown",
        lambda node: None if node.limiter is None else node.limiter.ratio,
    ),
)


def _limits(fleet: Fleet) -> Iterator[str]:
    lines: list[list[str]] = [[header(name, text, kind)] for name, kind, text, _ in LIMIT_METRICS]
    for service, state in list(fleet.services.items()):
        if state.gate is None:
            continue
        for node in list(state.nodes.values()):
            labels = label_text(("service", "endpoint"), (service, node.key))
            for (name, _, _, read), into in zip(LIMIT_METRICS, lines, strict=True):
                value = read(node)
                if value is not None:
                    into.append(f"{name}{{{labels}}} {value}\n")
            yield ""
    for into in lines:
        yield from into
