"""Gauges of routing tables, read off the desk at every scrape; what is gone from a table is gone from the text.

Versions and zones come from release tools, by the rules of names and at most so many a service: as labels they are
bounded as those of a policy file are.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, get_args

from sidecar.core.desk import Desk, TableView
from sidecar.core.fleet import Fleet
from sidecar.core.service import ServiceState
from sidecar.core.table import PARTS, Phase
from sidecar.telemetry.series import header, label_text

PHASES: Final[tuple[str, ...]] = get_args(Phase)

Rows = Callable[[TableView], Iterator[tuple[tuple[str, ...], float]]]


def _versions(view: TableView) -> Iterator[tuple[tuple[str, ...], float]]:
    yield (), view.version


def _weights(view: TableView) -> Iterator[tuple[tuple[str, ...], float]]:
    for version in view.table.versions:
        yield (version.name,), version.weight / PARTS


def _steps(view: TableView) -> Iterator[tuple[tuple[str, ...], float]]:
    rollout = view.table.rollout
    if rollout is not None and rollout.live:
        yield (rollout.version,), min(rollout.step + 1, len(rollout.plan.steps))


def _phases(view: TableView) -> Iterator[tuple[tuple[str, ...], float]]:
    rollout = view.table.rollout
    if rollout is not None:
        for phase in PHASES:
            yield (phase,), int(rollout.phase == phase)


def _zones(view: TableView) -> Iterator[tuple[tuple[str, ...], float]]:
    for zone, decay in view.table.zones.items():
        yield (zone,), decay.share


TABLE_METRICS: Final[tuple[tuple[str, tuple[str, ...], str, Rows], ...]] = (
    ("sidecar_route_table_version", ("service",), "Version of the service's routing table; it only grows", _versions),
    (
        "sidecar_route_weight_ratio",
        ("service", "version"),
        "Share of new sessions that a version has by the table",
        _weights,
    ),
    ("sidecar_rollout_step", ("service", "version"), "Step of the canary under way, from 1", _steps),
    ("sidecar_rollout_phase", ("service", "phase"), "1 for the phase of the service's last canary", _phases),
    (
        "sidecar_zone_share_ratio",
        ("service", "zone"),
        "What the endpoints of a zone that was turned down get of what they would",
        _zones,
    ),
)


def pieces(desk: Desk | None, fleet: Fleet | None, now: float) -> Iterator[str]:
    """The text; may be suspended between pieces while tables change."""
    views: Sequence[TableView] = () if desk is None else desk.outlines()
    for name, labels, text, rows in TABLE_METRICS:
        yield header(name, text, "gauge")
        for view in views:
            yield "".join(
                f"{name}{{{label_text(labels, (view.table.service, *values))}}} {value!r}\n"
                for values, value in rows(view)
            )
    yield header(
        "sidecar_version_down", "1 while none of a version's endpoints may serve, and others have its share", "gauge"
    )
    for service in list(fleet.services.values()) if fleet is not None else ():
        yield _down(service, now)


def _down(service: ServiceState, now: float) -> str:
    able: dict[str, bool] = {}
    for node in service.nodes.values():
        well = node.breaker.passes and not node.draining and node.overload_until <= now
        able[node.version] = well or able.get(node.version, False)
    return "".join(
        f"sidecar_version_down{{{label_text(('service', 'version'), (service.name, version))}}}"
        f" {int(not able.get(version, False))}\n"
        for version, _ in service.split
    )
