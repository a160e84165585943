"""The JSON Schema of policy documents, for editors and CRDs; `python -m sidecar.policy.json_schema` prints it.

Generated from the same types that the loader walks, by our own walk: `msgspec.json.schema` cannot say that a duration
is text. It accepts what `load` accepts and refuses what `load` refuses, but for what no schema can say: rules over
several places (names, endpoints and issuers given once, fallbacks without loops, `open` within `open_max`, a first
`concurrency` between `min` and `max`, parts for versions that exist, the rules between a custom resource's fields), and
what the pattern of a URL does not follow
(see `address.URL_PATTERN`).
"""

import inspect as python
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import NODEFAULT, inspect

from sidecar.policy.duration import LONG_PATTERN, PATTERN, SPAN_PATTERN
from sidecar.policy.resources import LlmServiceDocument, MeshBreakerDocument, TokenQuota, TokenQuotaDocument
from sidecar.policy.schema import (
    QUOTA_BOUNDS,
    Jwt,
    JwtProvider,
    LongSeconds,
    PolicyDocument,
    QosMatch,
    Quota,
    Seconds,
    Service,
    Source,
    Span,
    encode_hook,
)


def _given(kind: type[msgspec.Struct], names: Sequence[str]) -> list[dict[str, Any]]:
    """Each of `names` of a struct, as one that is given."""
    keys = {known.name: known.encode_name for known in msgspec.structs.fields(kind)}
    return [{"required": [keys[name]], "properties": {keys[name]: {"type": "integer"}}} for name in names]


# Rules within one object that the types do not carry; `check` has them for the loader.
_ALSO: dict[type, dict[str, Any]] = {
    Source: {
        "oneOf": [
            {"required": ["header"], "properties": {"header": {"minLength": 1}}},
            {"required": ["jwt_claim"], "properties": {"jwt_claim": {"minLength": 1}}},
            {"required": ["body"], "properties": {"body": {"const": "user"}}},
        ],
        "if": {"required": ["loopback"], "properties": {"loopback": {"const": True}}},
        "then": {"required": ["header"], "properties": {"header": {"minLength": 1}}},
    },
    JwtProvider: {
        "oneOf": [
            {"required": ["jwks_file"], "properties": {"jwks_file": {"minLength": 1}}},
            {"required": ["jwks_url"], "properties": {"jwks_url": {"minLength": 1}}},
        ],
        "if": {"required": ["tls_ca"], "properties": {"tls_ca": {"minLength": 1}}},
        "then": {"required": ["jwks_url"], "properties": {"jwks_url": {"pattern": "^https:"}}},
    },
    Jwt: {
        "if": {"required": ["verified_by"], "properties": {"verified_by": {"const": "sidecar"}}},
        "then": {
            "required": ["providers"],
            "properties": {
                "providers": {"minItems": 1},
                "issuers": {"maxItems": 0},
                "claims_header": {"maxLength": 0},
            },
        },
        "else": {"properties": {"providers": {"maxItems": 0}, "required": {"const": False}}},
    },
    QosMatch: {
        "anyOf": [
            {"required": [name], "properties": {name: {"minLength": 1}}}
            for name in ("header", "jwt_claim", "path", "model", "tenant", "modality")
        ],
        "not": {
            "required": ["header", "jwt_claim"],
            "properties": {"header": {"minLength": 1}, "jwt_claim": {"minLength": 1}},
        },
        "if": {"required": ["value"], "properties": {"value": {"not": {"const": "*"}}}},
        "then": {
            "anyOf": [{"required": [name], "properties": {name: {"minLength": 1}}} for name in ("header", "jwt_claim")]
        },
    },
    **{kind: {"anyOf": _given(kind, QUOTA_BOUNDS)} for kind in (Quota, TokenQuota)},
    Service: {
        "properties": {"split": {"not": {"minProperties": 1, "additionalProperties": {"const": 0}}}},
    },
}


DOCUMENTS = (PolicyDocument, MeshBreakerDocument, LlmServiceDocument, TokenQuotaDocument)
"""Each kind of document."""


def json_schema() -> dict[str, Any]:
    """A schema (draft 2020-12) of one document."""
    kinds: dict[str, Any] = {}
    either = [_of(inspect.type_info(kind), kinds) for kind in DOCUMENTS]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A policy document of llm-sidecar",
        "oneOf": either,
        "$defs": dict(sorted(kinds.items())),
    }


def text() -> str:
    """`json_schema` as the file that is kept in `policies/`."""
    return msgspec.json.format(msgspec.json.encode(json_schema()), indent=2).decode() + "\n"


def _of(kind: inspect.Type, kinds: dict[str, Any]) -> dict[str, Any]:
    match kind:
        case inspect.Metadata(type=inner, extra_json_schema=extra):
            return {**_of(inner, kinds), **(extra or {})}
        case inspect.CustomType(cls=cls) if cls is Seconds:
            return {"type": "string", "pattern": PATTERN}
        case inspect.CustomType(cls=cls) if cls is LongSeconds:
            return {"type": "string", "pattern": LONG_PATTERN}
        case inspect.CustomType(cls=cls) if cls is Span:
            return {"type": "string", "pattern": SPAN_PATTERN}
        case inspect.StrType():
            return _with({"type": "string"}, minLength=kind.min_length, maxLength=kind.max_length, pattern=kind.pattern)
        case inspect.BoolType():
            return {"type": "boolean"}
        case inspect.IntType():
            return _with({"type": "integer"}, minimum=kind.ge, maximum=kind.le)
        case inspect.FloatType():
            return _with({"type": "number"}, minimum=kind.ge, maximum=kind.le)
        case inspect.LiteralType(values=values):
            return {"enum": sorted(values, key=str)}
        case inspect.VarTupleType():
            items = {"type": "array", "items": _of(kind.item_type, kinds)}
            return _with(items, minItems=kind.min_length, maxItems=kind.max_length)
        case inspect.DictType():
            keys = {key: value for key, value in _of(kind.key_type, kinds).items() if key != "type"}
            entries = {"type": "object", "additionalProperties": _of(kind.value_type, kinds)}
            return _with(entries, maxProperties=kind.max_length, propertyNames=keys or None)
        case inspect.UnionType(types=types):
            others = [each for each in types if not isinstance(each, inspect.NoneType)]
            nothing = [{"type": "null"}] if len(others) < len(types) else []
            return {"anyOf": [*(_of(each, kinds) for each in others), *nothing]}
        case inspect.StructType(cls=cls):
            if cls.__name__ not in kinds:
                kinds[cls.__name__] = {}  # holds the place while its fields are walked
                kinds[cls.__name__] = _object(kind, kinds)
            return {"$ref": f"#/$defs/{cls.__name__}"}
        case _:
            raise TypeError(f"policies have no fields of type {kind}")


def _object(kind: inspect.StructType, kinds: dict[str, Any]) -> dict[str, Any]:
    also = _ALSO.get(kind.cls, {})
    properties: dict[str, Any] = {}
    for known in kind.fields:
        field = _of(known.type, kinds) | also.get("properties", {}).get(known.encode_name, {})
        if known.default is not NODEFAULT:
            field["default"] = msgspec.to_builtins(known.default, enc_hook=encode_hook)
        elif known.default_factory is not NODEFAULT:
            field["default"] = known.default_factory()
        properties[known.encode_name] = field
    for name in sorted(getattr(kind.cls, "ignored", ())):
        properties[name] = {}
    described = {
        "type": "object",
        "description": (python.getdoc(kind.cls) or "").partition("\n\n")[0],
        "additionalProperties": False,
        "properties": properties,
        "required": [known.encode_name for known in kind.fields if known.required],
    }
    return described | {key: value for key, value in also.items() if key != "properties"}


def _with(schema: dict[str, Any], **rules: object) -> dict[str, Any]:
    return schema | {name: rule for name, rule in rules.items() if rule is not None}


if __name__ == "__main__":
    print(text(), end="")
