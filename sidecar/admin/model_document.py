"""A model update as JSON: what `POST /models` takes and `sidecar model` sends. Strict, as an update of a table is."""

import json
from typing import Literal

import msgspec

from sidecar.admin.update import once, plan_of, read_span, write_span
from sidecar.core.hot_plan import Wanted
from sidecar.core.hot_update import Action, Canary, Kind, Leaving
from sidecar.policy.schema import PlanDocument, Span

CANARY_TOKENS = 16
"""Of an answer that is to contain something, unless it is said."""


class CanaryDocument(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """As `core.hot_update.Canary`. `prompt` empty: the usual one. `max_tokens` 0: 1, or 16 where `expect` is said."""

    prompt: str = ""
    max_tokens: int = 0
    expect: str = ""


class ModelDocument(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """As `core.hot_plan.Wanted`, without who asks: that stands in the URL."""

    model: str
    action: Action
    kind: Kind
    service: str = ""
    endpoints: tuple[str, ...] = ()
    version: str = ""
    engine: Literal["", "vllm", "triton", "deepspeed"] = ""
    front: str | None = None
    engine_model: str | None = None
    chat_template: str | None = None
    weight: float = 1.0
    plan: PlanDocument | None = None
    path: str = ""
    config: str = ""
    model_version: str = ""
    leaving: Leaving = "leave"
    level: int = 1
    rest: bool | None = None
    anyway: bool = False
    canary: CanaryDocument = CanaryDocument()
    deadlines: dict[str, Span] = {}


def parse_wanted(body: bytes, by: str) -> Wanted:
    """The update in a request's body. ValueError in words for who wrote it."""
    try:
        document = _DECODER.decode(body)
        json.loads(body, object_pairs_hook=once)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise ValueError(f"no model update: {exc}") from exc
    if document.plan is not None and not document.plan.steps:
        raise ValueError("a plan has at least one step - at `$.plan.steps`")
    return wanted_of(document, by)


def encode_wanted(document: ModelDocument) -> bytes:
    """A body that `parse_wanted` reads."""
    return _ENCODER.encode(document)


def wanted_of(document: ModelDocument, by: str) -> Wanted:
    """What a document asks."""
    usual = Canary()
    canary = document.canary
    return Wanted(
        model=document.model,
        action=document.action,
        kind=document.kind,
        service=document.service,
        endpoints=document.endpoints,
        version=document.version,
        engine=document.engine,
        front=document.front,
        engine_model=document.engine_model,
        chat_template=document.chat_template,
        weight=document.weight,
        plan=None if document.plan is None else plan_of(document.plan),
        path=document.path,
        config=document.config,
        model_version=document.model_version,
        leaving=document.leaving,
        level=document.level,
        rest=document.rest,
        anyway=document.anyway,
        canary=Canary(
            canary.prompt or usual.prompt,
            canary.max_tokens or (CANARY_TOKENS if canary.expect else usual.max_tokens),
            canary.expect,
        ),
        deadlines={step: float(seconds) for step, seconds in document.deadlines.items()},
        by=by,
    )


_DECODER = msgspec.json.Decoder(ModelDocument, dec_hook=read_span)
_ENCODER = msgspec.json.Encoder(enc_hook=write_span)
