"""The custom resources in Kubernetes' definitions are those that the loader reads: keys, types, bounds and defaults."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import yaml
from msgspec import NODEFAULT, inspect

from sidecar.policy.load import load
from sidecar.policy.resources import (
    INFRA_API,
    RESILIENCE_API,
    Document,
    LlmServiceDocument,
    MeshBreakerDocument,
    TokenQuotaDocument,
)
from sidecar.policy.schema import Service

ROOT = Path(__file__).parents[2]
KINDS: Final[dict[str, type[Document]]] = {
    "circuitbreakerpolicies": MeshBreakerDocument,
    "llmservices": LlmServiceDocument,
    "tokenquotas": TokenQuotaDocument,
}
CRDS = pytest.mark.parametrize(("plural", "document"), KINDS.items(), ids=KINDS)


def definition(plural: str) -> dict[str, Any]:
    crd: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "crds" / f"{plural}.yaml").read_text())
    return crd


def schema(plural: str) -> dict[str, Any]:
    (version,) = definition(plural)["spec"]["versions"]
    found: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return found


def field_of(kind: type[msgspec.Struct], name: str) -> inspect.Type:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    (found,) = [field.type for field in info.fields if field.name == name]
    return found


def described(kind: inspect.Type) -> dict[str, Any]:
    """What a type says, in the words of an OpenAPI schema, without its fields and items."""
    match kind:
        case inspect.Metadata(type=inner):
            return described(inner)
        case inspect.UnionType(types=types):
            (inner,) = [each for each in types if not isinstance(each, inspect.NoneType)]
            return described(inner)
        case inspect.StrType():
            said = {"minLength": kind.min_length, "maxLength": kind.max_length, "pattern": kind.pattern}
            return {"type": "string", **said}
        case inspect.IntType() | inspect.FloatType():
            name = "integer" if isinstance(kind, inspect.IntType) else "number"
            return {"type": name, "minimum": kind.ge, "maximum": kind.le}
        case inspect.BoolType():
            return {"type": "boolean"}
        case inspect.LiteralType(values=values):
            return {"type": "string", "enum": sorted(map(str, values))}
        case inspect.VarTupleType():
            return {"type": "array", "minItems": kind.min_length, "maxItems": kind.max_length}
        case inspect.StructType(fields=fields):
            required = sorted(field.encode_name for field in fields if field.required)
            return {"type": "object", "required": required or None}
        case _:
            raise AssertionError(kind)


def inside(kind: inspect.Type) -> inspect.Type:
    """Without annotations and None."""
    match kind:
        case inspect.Metadata(type=inner):
            return inside(inner)
        case inspect.UnionType(types=types):
            return inside(next(each for each in types if not isinstance(each, inspect.NoneType)))
        case _:
            return kind


COMPARED = (
    "type",
    "minLength",
    "maxLength",
    "pattern",
    "minimum",
    "maximum",
    "enum",
    "minItems",
    "maxItems",
    "required",
)


def differences(kind: inspect.Type, node: dict[str, Any], path: str) -> Iterator[str]:
    ours = described(kind)
    theirs = {**node, "enum": sorted(node["enum"]) if "enum" in node else None}
    for key in COMPARED:
        if ours.get(key) != theirs.get(key):
            yield f"{path}: {key} is {ours.get(key)!r} for the loader and {theirs.get(key)!r} for Kubernetes"
    match inside(kind):
        case inspect.StructType(fields=fields):
            known = {field.encode_name: field for field in fields}
            properties = node.get("properties", {})
            if known.keys() != properties.keys():
                yield f"{path}: keys differ: {sorted(known.keys() ^ properties.keys())}"
            for name in known.keys() & properties.keys():
                yield from differences(known[name].type, properties[name], f"{path}.{name}")
                yield from _defaults(known[name], properties[name], f"{path}.{name}")
        case inspect.VarTupleType(item_type=item):
            yield from differences(item, node["items"], f"{path}[]")


def _defaults(field: inspect.Field, node: dict[str, Any], path: str) -> Iterator[str]:
    """None is no default there: the key is left out. A struct's is an empty object, which its fields' fill."""
    value = None if field.default is NODEFAULT else msgspec.json.decode(msgspec.json.encode(field.default))
    if isinstance(field.default, msgspec.Struct):
        value = {}
    if value != node.get("default"):
        yield f"{path}: the default is {value!r} for the loader and {node.get('default')!r} for Kubernetes"


@CRDS
def test_keys_bounds_and_defaults_are_the_same_in_the_loader_and_in_kubernetes(
    plural: str, document: type[Document]
) -> None:
    assert list(differences(field_of(document, "spec"), schema(plural)["properties"]["spec"], "spec")) == []


def test_a_difference_is_found() -> None:
    """So that the test above cannot pass by looking at nothing."""
    kind = field_of(LlmServiceDocument, "spec")
    node = schema("llmservices")["properties"]["spec"]
    endpoint = node["properties"]["versions"]["items"]["properties"]["endpoints"]
    endpoint["maxItems"] = 65
    endpoint["items"]["properties"]["url"]["pattern"] = "^x$"
    endpoint["items"]["required"] = []
    node["properties"]["deadlines"]["properties"]["headSeconds"]["default"] = 61
    del node["properties"]["aliases"]
    node["properties"]["canaryTrafficPercent"]["maximum"] = 99
    found = list(differences(kind, node, "spec"))
    assert len(found) == 6
    assert "spec.deadlines.headSeconds: the default is 60.0 for the loader and 61 for Kubernetes" in found


@CRDS
def test_the_name_of_an_object_may_be_as_long_as_what_it_names(plural: str, document: type[Document]) -> None:
    metadata = field_of(document, "metadata")
    assert isinstance(metadata, inspect.StructType)
    name = described(field_of(metadata.cls, "name"))
    said = schema(plural)["properties"]["metadata"].get("properties", {}).get("name", {"maxLength": 253})
    assert said["maxLength"] == name["maxLength"]  # 253 is Kubernetes' own


@CRDS
def test_group_version_and_kind_are_those_that_the_loader_asks_for(plural: str, document: type[Document]) -> None:
    crd = definition(plural)["spec"]
    api, kind = field_of(document, "api_version"), field_of(document, "kind")
    assert isinstance(api, inspect.LiteralType) and isinstance(kind, inspect.LiteralType)
    assert [f"{crd['group']}/{version['name']}" for version in crd["versions"]] == list(api.values)
    assert [crd["names"]["kind"]] == list(kind.values)
    assert {*api.values} <= {INFRA_API, RESILIENCE_API}


def test_there_is_a_definition_of_every_custom_resource() -> None:
    assert {path.stem for path in (ROOT / "deploy" / "crds").glob("*.yaml")} - {"kustomization"} == {*KINDS}
    assert {*KINDS.values()} == {*Document.__subclasses__()}


def test_the_example_loads_without_a_warning_and_is_what_its_comments_say() -> None:
    file = ROOT / "policies" / "kubernetes.yaml"
    snapshot = load([(file.name, file.read_bytes())], 1)
    assert snapshot.warnings == ()
    llama, small = snapshot.services
    assert llama.split == {"stable": 95.0, "canary": 5.0}
    assert (llama.fallback, small.fallback) == ("llama-small", "")
    assert llama.endpoints[0].local and llama.health_check.path == "/health"
    assert (llama.breakers.node.min_closed_ratio, small.breakers.node) == (0.0, Service(name="x").breakers.node)
    assert llama.breakers.request.key == small.breakers.request.key == "header:x-kind"
    (quota,) = snapshot.quotas
    assert (quota.name, quota.tenant, quota.tokens_per_minute) == ("acme", "acme", 100_000)
