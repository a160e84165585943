"""Between the protocol's messages and the routing tables' shapes; what cannot be said in those shapes is refused here.

1. Numbers are looked at before anything else is: a share that is none (NaN, an infinity, below 0, above 1) never gets
   as far as a rule that would compare it.
2. A plan's shares become parts of `table.PARTS` here, since a `Step` holds parts; a share that would round to nothing
   is refused. The shares of an update stay as they are said: `core/revise` has the rules for them.
3. How much there is of anything is looked at before any of it is read: a message has room for a million weights, and
   requests share the loop.
4. What is sent is encoded here, once for all streams: the last event is kept, since every stream is told it next.
"""

import math
from collections.abc import Callable, Sized
from typing import Final

from google.protobuf.message import DecodeError

from sidecar.control.pb import control_pb2 as pb
from sidecar.control.writers import Caller
from sidecar.core.desk import Event, Notice, TableView
from sidecar.core.revise import Accepted, Code, Refused, Update
from sidecar.core.rules import MAX_HASHES, MAX_MODELS, MAX_SIGNATURE
from sidecar.core.table import (
    MAX_ENDPOINTS,
    MAX_STEPS,
    MAX_VERSIONS,
    PARTS,
    Margins,
    Phase,
    Plan,
    Rollout,
    Step,
    Target,
)
from sidecar.policy.schema import PlanStep

PIECE_BYTES: Final = 1 << 20
"""Of a snapshot at most, or one table that is longer: clients' default limit is 4 MiB a message, and a table has less
than `WRITABLE_BYTES`."""

CODES: Final[dict[Code, pb.Nack.Code]] = {
    "invalid": pb.Nack.INVALID,
    "stale": pb.Nack.STALE,
    "conflict": pb.Nack.CONFLICT,
    "unavailable": pb.Nack.UNAVAILABLE,
    "denied": pb.Nack.DENIED,
    "not_found": pb.Nack.NOT_FOUND,
    "exhausted": pb.Nack.EXHAUSTED,
}
PHASES: Final[dict[Phase, pb.Rollout.Phase]] = {
    "running": pb.Rollout.RUNNING,
    "held": pb.Rollout.HELD,
    "promoted": pb.Rollout.PROMOTED,
    "failed": pb.Rollout.FAILED,
    "aborted": pb.Rollout.ABORTED,
    "superseded": pb.Rollout.SUPERSEDED,
}


_STEP: Final = PlanStep(weight=1.0)
"""What a step says that does not say it, by whatever door a plan comes."""


class Unusable(ValueError):
    """A message that no update can be made of; says why, for who wrote it."""


def message_of(data: bytes) -> pb.DescriptorUpdate:
    """A message from its bytes. Unusable for bytes that are none."""
    try:
        return pb.DescriptorUpdate.FromString(data)
    except DecodeError as exc:
        raise Unusable("the message is no DescriptorUpdate: it cannot be decoded") from exc


def update_of(message: pb.DescriptorUpdate, caller: Caller) -> Update:
    """The update that a message asks for. Unusable for what makes none."""
    if not message.service_name:
        raise Unusable("service_name is missing")
    _few(message.endpoints, MAX_ENDPOINTS, "endpoints")
    _few(message.weights, MAX_VERSIONS, "weights")
    _few(message.compatible_schema_hashes, MAX_HASHES, "compatible hashes")
    _few(message.models, MAX_MODELS, "models")
    _few(message.signature, MAX_SIGNATURE, "signature's fields")
    _few(message.plan.steps, MAX_STEPS, "steps of a plan")
    weight = _share(message.canary_weight, "canary_weight") if message.HasField("canary_weight") else None
    weights = {name: _share(value, f"weights[{_shown(name)}]") for name, value in sorted(message.weights.items())}
    if weight is not None and weights:
        raise Unusable("canary_weight and weights say the same thing twice: give one of them")
    if message.clear_endpoints and message.endpoints:
        raise Unusable("clear_endpoints and endpoints contradict each other: give one of them")
    endpoints = None
    if message.endpoints or message.clear_endpoints:
        endpoints = tuple(Target(each.url, each.zone, each.node) for each in message.endpoints)
    return Update(
        service=message.service_name,
        version=message.version,
        update_id=message.update_id,
        expected=message.expected_table_version,
        weight=weight,
        weights=weights,
        engine=message.engine,
        endpoints=endpoints,
        zone=message.zone,
        schema_hash=_hash(message.schema_hash, "schema_hash"),
        compatible=tuple(_hash(each, "compatible_schema_hashes") for each in message.compatible_schema_hashes),
        signature=dict(sorted(message.signature.items())),
        models=tuple(message.models),
        plan=_plan(message.plan) if message.HasField("plan") else None,
        by=caller.says(message.by),
        front=message.front if message.HasField("front") else None,
        engine_model=message.engine_model if message.HasField("engine_model") else None,
        chat_template=message.chat_template if message.HasField("chat_template") else None,
    )


def _few(things: Sized, most: int, what: str) -> None:
    if len(things) > most:
        raise Unusable(f"{len(things)} {what} are too many: {most} at most")


def _plan(message: pb.CanaryPlan) -> Plan:
    steps = []
    for number, step in enumerate(message.steps):
        where = f"plan.steps[{number}]"
        share = _share(step.weight, f"{where}.weight")
        parts = round(share * PARTS)
        if share > 0 and parts == 0:
            raise Unusable(f"{where}.weight is less than {1 / PARTS:g}, the smallest share there is")
        min_s = _number(step.min_s, f"{where}.min_s") if step.HasField("min_s") else float(_STEP.min_s)
        steps.append(Step(parts, min_s, step.min_samples if step.HasField("min_samples") else _STEP.min_samples))
    default = Plan("", ())
    return Plan(
        baseline=message.baseline,
        steps=tuple(steps),
        false_alarm=_said(message, "false_alarm", _share, "plan", default.false_alarm),
        margins=_margins(message.margins),
        min_ready=_said(message, "min_ready", _share, "plan", default.min_ready),
    )


def _margins(message: pb.Margins) -> Margins:
    default, where = Margins(), "plan.margins"
    return Margins(
        success=_said(message, "success", _share, where, default.success),
        first_token=_said(message, "first_token", _factor, where, default.first_token),
        token_gap=_said(message, "token_gap", _factor, where, default.token_gap),
        errors=_said(message, "errors", _share, where, default.errors),
        length=_said(message, "length", _factor, where, default.length),
        finish=_said(message, "finish", _share, where, default.finish),
    )


def _said(
    message: pb.CanaryPlan | pb.Margins, field: str, read: Callable[[float, str], float], where: str, default: float
) -> float:
    return read(getattr(message, field), f"{where}.{field}") if message.HasField(field) else default


def _number(value: float, what: str) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise Unusable(f"{what} is {value:g}: it is to be a number from 0")
    return value


def _factor(value: float, what: str) -> float:
    if not (math.isfinite(value) and value >= 1):
        raise Unusable(f"{what} is {value:g}: it is to be a number from 1")
    return value


def _share(value: float, what: str) -> float:
    if not 0 <= value <= 1:  # false for NaN as well
        raise Unusable(f"{what} is {value:g}: it is to be a share from 0 to 1")
    return value + 0.0  # -0.0 becomes 0.0


def _hash(text: str, what: str) -> str:
    """A hash as tables have it: bare, in lower case."""
    if not text:
        return ""
    bare = text.removeprefix("sha256:").lower()
    if len(bare) != 64 or not set(bare) <= set("0123456789abcdef"):
        raise Unusable(f"{what} is to be a SHA-256 in hex, 64 digits")
    return bare


def _shown(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text[:60])


# What is sent, in bytes.


def ack(message: pb.DescriptorUpdate, number: int, done: Accepted) -> bytes:
    """The answer to an update that was taken."""
    said = pb.Ack(
        update_id=message.update_id,
        service_name=message.service_name,
        table_version=done.version,
        repeated=done.repeated,
        number=number,
        weights={name: parts / PARTS for name, parts in done.table.weights.items()},
    )
    return pb.DescriptorEvent(ack=said).SerializeToString()


def nack(message: pb.DescriptorUpdate, number: int, refused: Refused) -> bytes:
    """The answer to an update that was not."""
    said = pb.Nack(
        update_id=message.update_id,
        service_name=message.service_name,
        code=CODES[refused.code],
        message=refused.message,
        last_good_version=refused.version,
        number=number,
    )
    return pb.DescriptorEvent(nack=said).SerializeToString()


class Pieces:
    """A snapshot in the making: tables go in, and pieces come out as they are full."""

    def __init__(self) -> None:
        self._piece = pb.Snapshot()
        self._size = 0

    def add(self, view: TableView) -> bytes | None:
        """A piece that is full without it, or None."""
        full = None
        table = _table(view)
        size = table.ByteSize()
        if self._size and self._size + size > PIECE_BYTES:
            full = pb.DescriptorEvent(snapshot=self._piece).SerializeToString()
            self._piece = pb.Snapshot()
            self._size = 0
        self._size += size
        self._piece.tables.append(table)
        return full

    def last(self) -> bytes:
        """The last piece, marked; perhaps with nothing in it."""
        self._piece.complete = True
        return pb.DescriptorEvent(snapshot=self._piece).SerializeToString()


class Encoder:
    """Events as bytes, for all streams of a server."""

    def __init__(self) -> None:
        self._last: Event | None = None
        self._bytes = b""

    def event(self, event: Event) -> bytes:
        """A change or a notice."""
        if event is not self._last:
            self._bytes = _event(event)
            self._last = event
        return self._bytes


def _event(event: Event) -> bytes:
    if isinstance(event, Notice):
        said = pb.Notice(service_name=event.service, kind=event.kind, text=event.text)
        return pb.DescriptorEvent(notice=said).SerializeToString()
    return pb.DescriptorEvent(table=_table(event)).SerializeToString()


def _table(view: TableView) -> pb.Table:
    table = view.table
    said = pb.Table(
        service_name=table.service,
        table_version=view.version,
        at_us=view.at_us,
        by=view.by,
        why=view.why,
        evidence=view.evidence,
        models=table.models,
    )
    for version in table.versions:
        made = said.versions.add(
            name=version.name,
            weight=version.weight / PARTS,
            engine=version.engine,
            schema_hash=version.schema_hash,
            compatible_schema_hashes=version.compatible,
            signature=version.signature,
            front=version.front,
            engine_model=version.engine_model,
            chat_template=version.chat_template,
        )
        for target in version.endpoints:
            made.endpoints.add(url=target.url, zone=target.zone, node=target.node)
    for zone, decay in table.zones.items():
        said.zones[zone].share = decay.share
        said.zones[zone].since_us = decay.since_us
        said.zones[zone].why = decay.why
    if table.rollout is not None:
        said.rollout.CopyFrom(_rollout(table.rollout))
    return said


def _rollout(rollout: Rollout) -> pb.Rollout:
    plan, margins = rollout.plan, rollout.plan.margins
    said = pb.CanaryPlan(
        baseline=plan.baseline,
        steps=[
            pb.CanaryPlan.Step(weight=s.weight / PARTS, min_s=s.min_s, min_samples=s.min_samples) for s in plan.steps
        ],
        false_alarm=plan.false_alarm,
        min_ready=plan.min_ready,
        margins=pb.Margins(
            success=margins.success,
            first_token=margins.first_token,
            token_gap=margins.token_gap,
            errors=margins.errors,
            length=margins.length,
            finish=margins.finish,
        ),
    )
    return pb.Rollout(
        id=rollout.id,
        version=rollout.version,
        plan=said,
        step=rollout.step,
        phase=PHASES[rollout.phase],
        since_us=rollout.since_us,
        why=rollout.why,
        evidence=rollout.evidence,
        by=rollout.by,
    )
