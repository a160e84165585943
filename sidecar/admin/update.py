"""An update of a routing table as JSON: what `POST /routes/<service>` takes and `sidecar routes set` sends.

Strict, as a policy file is: what is not known, what is there twice and what has another type is refused with its place,
and nothing is done. What an update means for the table that it meets is judged where it is taken (`core.revise`), in
the same words for whoever asks by whichever door.
"""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from sidecar.core.revise import Update
from sidecar.core.table import PARTS, Margins, Plan, Step, Target
from sidecar.policy.duration import format_seconds, parse_span
from sidecar.policy.schema import PlanDocument, Seconds, Span


class TargetDocument(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One endpoint, as `core.table.Target`."""

    url: str
    zone: str = ""
    node: str = ""


class UpdateDocument(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """As `core.revise.Update`, without the service and who asks: those stand in the URL."""

    version: str
    update_id: str = ""
    expected: int = 0
    weight: float | None = None
    weights: dict[str, float] = {}
    engine: str = ""
    endpoints: tuple[TargetDocument, ...] | None = None
    zone: str = ""
    schema_hash: str = ""
    compatible: tuple[str, ...] = ()
    signature: dict[str, str] = {}
    models: tuple[str, ...] = ()
    plan: PlanDocument | None = None
    front: str | None = None
    engine_model: str | None = None
    chat_template: str | None = None


def parse_update(service: str, body: bytes, by: str) -> Update:
    """The update in a request's body. ValueError in words for who wrote it."""
    try:
        document = _DECODER.decode(body)
        json.loads(body, object_pairs_hook=once)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise ValueError(f"no update: {exc}") from exc
    if document.plan is not None and not document.plan.steps:
        raise ValueError("a plan has at least one step - at `$.plan.steps`")
    return update_of(service, document, by)


def encode_update(document: UpdateDocument) -> bytes:
    """A body that `parse_update` reads."""
    return _ENCODER.encode(document)


def update_of(service: str, document: UpdateDocument, by: str) -> Update:
    """What a document asks of a service."""
    endpoints = document.endpoints
    return Update(
        service=service,
        version=document.version,
        update_id=document.update_id,
        expected=document.expected,
        weight=document.weight,
        weights=document.weights,
        engine=document.engine,
        endpoints=None if endpoints is None else tuple(Target(each.url, each.zone, each.node) for each in endpoints),
        zone=document.zone,
        schema_hash=document.schema_hash,
        compatible=document.compatible,
        signature=document.signature,
        models=document.models,
        plan=None if document.plan is None else plan_of(document.plan),
        by=by,
        front=document.front,
        engine_model=document.engine_model,
        chat_template=document.chat_template,
    )


def plan_of(document: PlanDocument) -> Plan:
    """A plan as a table holds it: weights in parts, at least one for any that is not 0."""
    margins = document.margins
    return Plan(
        baseline=document.baseline,
        steps=tuple(
            Step(max(1, round(step.weight * PARTS)), float(step.min_s), step.min_samples) for step in document.steps
        ),
        false_alarm=document.false_alarm,
        margins=Margins(
            success=margins.success,
            first_token=margins.first_token,
            token_gap=margins.token_gap,
            errors=margins.errors,
            length=margins.length,
            finish=margins.finish,
        ),
        min_ready=document.min_ready,
    )


def once(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    """An object's members; ValueError where one is there twice: either might be meant."""
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f'no update: "{twice[:40]}" is there twice')
    return members


def read_span(kind: type, value: object) -> Any:
    """For msgspec decoders: a duration as it is written."""
    if kind is Span and isinstance(value, str):
        return Span(parse_span(value))
    raise ValueError("expected a duration such as 90s")


def write_span(value: object) -> str:
    """For msgspec encoders, likewise."""
    if isinstance(value, Seconds):
        return format_seconds(value)
    raise NotImplementedError(f"no JSON for {type(value)}")


_DECODER = msgspec.json.Decoder(UpdateDocument, dec_hook=read_span)
_ENCODER = msgspec.json.Encoder(enc_hook=write_span)
