"""Routing tables and rollouts as the admin pages show them: weights as ratios, times as ISO 8601 in UTC."""

import msgspec

from sidecar.admin.facts import Facts
from sidecar.admin.ready import usable
from sidecar.admin.words import iso
from sidecar.core.desk import TableView
from sidecar.core.service import ServiceState
from sidecar.core.table import PARTS, Plan, Rollout, Table
from sidecar.kernel.ids import ServiceName


class VersionLine(msgspec.Struct, frozen=True):
    """A version in a table. `weight` is 0-1; `endpoints` counts those that this sidecar has for it, from files and from
    the table, `usable` those of them that a request may reach now. `front`, `engine_model`, `chat_template`: how those
    that the table names are spoken to, empty: as usual."""

    name: str
    weight: float
    engine: str
    endpoints: int
    usable: int
    schema_hash: str
    compatible: tuple[str, ...]
    signature: dict[str, str]
    front: str
    engine_model: str
    chat_template: str


class ZoneLine(msgspec.Struct, frozen=True):
    """A zone that is turned down to `share` (0-1) of what it would get."""

    zone: str
    share: float
    since: str
    why: str


class StepLine(msgspec.Struct, frozen=True):
    """A step of a plan."""

    weight: float
    min_s: float
    min_samples: int


class VerdictLine(msgspec.Struct, frozen=True):
    """What the analysis would conclude now (docs/canary.md) from `canary` and `baseline` answers in this step."""

    word: str
    evidence: str
    canary: int
    baseline: int


class RolloutLine(msgspec.Struct, frozen=True):
    """A service's last rollout, under way or over. `table_version` is that of the table which says so.

    `step` counts from 1, of `steps`; `weight` is what the canary has now. `since` is when this step or phase began,
    `why`, `evidence` and `by` say what the last change was concluded from and by whom. `verdict` null: this sidecar
    does not judge it, because it is over, or not yet.
    """

    service: str
    table_version: int
    id: str
    version: str
    baseline: str
    phase: str
    live: bool
    step: int
    weight: float
    steps: list[StepLine]
    since: str
    why: str
    evidence: str
    by: str
    verdict: VerdictLine | None


class TableLine(msgspec.Struct, frozen=True):
    """A service's table, as the log has it. `at`, `by`, `why`, `evidence`: of its last change."""

    version: int
    at: str
    by: str
    why: str
    evidence: str
    versions: list[VersionLine]
    zones: list[ZoneLine]
    rollout: RolloutLine | None


class UpdatePage(msgspec.Struct, frozen=True):
    """An update that was taken. `repeated`: it was taken before, and nothing was done again."""

    service: str
    version: int
    repeated: bool
    weights: dict[str, float]
    rollout: RolloutLine | None


def table_line(facts: Facts, view: TableView) -> TableLine:
    """A table with what this sidecar knows of its endpoints."""
    table = view.table
    endpoints, able = _counted(facts.fleet.services.get(ServiceName(table.service)), facts.now())
    return TableLine(
        version=view.version,
        at=iso(view.at_us / 1e6),
        by=view.by,
        why=view.why,
        evidence=view.evidence,
        versions=[
            VersionLine(
                name=version.name,
                weight=version.weight / PARTS,
                engine=version.engine,
                endpoints=endpoints.get(version.name, 0),
                usable=able.get(version.name, 0),
                schema_hash=version.schema_hash,
                compatible=version.compatible,
                signature=version.signature,
                front=version.front,
                engine_model=version.engine_model,
                chat_template=version.chat_template,
            )
            for version in table.versions
        ],
        zones=[
            ZoneLine(zone, decay.share, iso(decay.since_us / 1e6), decay.why) for zone, decay in table.zones.items()
        ],
        rollout=rollout_line(facts, table, view.version),
    )


def rollout_line(facts: Facts, table: Table, version: int) -> RolloutLine | None:
    """The rollout in a table of this version; None where there never was one."""
    rollout = table.rollout
    if rollout is None:
        return None
    return RolloutLine(
        service=table.service,
        table_version=version,
        id=rollout.id,
        version=rollout.version,
        baseline=rollout.plan.baseline,
        phase=rollout.phase,
        live=rollout.live,
        step=_number(rollout),
        weight=table.weights.get(rollout.version, 0) / PARTS,
        steps=_steps(rollout.plan),
        since=iso(rollout.since_us / 1e6),
        why=rollout.why,
        evidence=rollout.evidence,
        by=rollout.by,
        verdict=_verdict(facts.fleet.services.get(ServiceName(table.service)), rollout),
    )


def update_page(facts: Facts, table: Table, version: int, repeated: bool) -> UpdatePage:
    """What an update made."""
    weights = {name: parts / PARTS for name, parts in table.weights.items()}
    return UpdatePage(table.service, version, repeated, weights, rollout_line(facts, table, version))


def _number(rollout: Rollout) -> int:
    return min(rollout.step + 1, len(rollout.plan.steps))


def _steps(plan: Plan) -> list[StepLine]:
    return [StepLine(step.weight / PARTS, step.min_s, step.min_samples) for step in plan.steps]


def _verdict(service: ServiceState | None, rollout: Rollout) -> VerdictLine | None:
    trial = None if service is None else service.trial
    if trial is None or not rollout.live or (trial.rollout, trial.step) != (rollout.id, rollout.step):
        return None
    verdict = trial.verdict()
    return VerdictLine(verdict.word, verdict.evidence, verdict.canary, verdict.baseline)


def _counted(service: ServiceState | None, now: float) -> tuple[dict[str, int], dict[str, int]]:
    """How many endpoints each version has here, and how many of them a request may reach."""
    endpoints: dict[str, int] = {}
    able: dict[str, int] = {}
    for node in list(service.nodes.values()) if service is not None else ():
        endpoints[node.version] = endpoints.get(node.version, 0) + 1
        able[node.version] = able.get(node.version, 0) + usable(node, now)
    return endpoints, able
