"""Every field of every policy struct, with a way to write a document that sets it."""

from collections.abc import Iterator
from typing import Any, Final

import msgspec
from msgspec import inspect

from sidecar.policy.json_schema import DOCUMENTS
from sidecar.policy.schema import Seconds
from tests.policy.build import llm_service, mesh, policy, token_quota


class Place(msgspec.Struct, frozen=True):
    """A field; `path` leads from the document's root to it, `kind` is its type without annotations and None."""

    document: str
    path: tuple[str | int, ...]
    kind: inspect.Type
    nullable: bool = False

    @property
    def id(self) -> str:
        return f"{self.document}.{'.'.join(map(str, self.path))}"

    def write(self, value: Any) -> dict[str, Any]:
        """A document that is good but for `value` at the place."""
        root = _root(self.document, self.path[-1])
        node: Any = root
        for index, (step, following) in enumerate(zip(self.path, (*self.path[1:], None), strict=True)):
            if isinstance(step, int):
                if len(node) <= step:
                    node.append(value if following is None else self._start(index))
                node = node[step]
            elif following is None:
                node[step] = value
            else:
                node = node.setdefault(step, [] if isinstance(following, int) else {})
        if "providers" in self.path:
            root["identity"]["jwt"]["verified_by"] = "sidecar"
        return root

    def _start(self, index: int) -> dict[str, Any]:
        """What the item at a step of the path needs besides the field under test."""
        field = self.path[-1]
        return {**(_BESIDE.get((self.path[index - 1], field)) or _ITEMS.get(self.path[index - 1], {}))}


def _root(document: str, field: str | int) -> dict[str, Any]:
    """What `field` may be written into: rules between fields ask for more, or for something else."""
    match document:
        case "MeshBreaker":
            return mesh({"minClosedRatio": "Node", "adaptive": "Node", "key": "Request"}.get(str(field), "Session"))
        case "LlmService":
            return llm_service()
        case "TokenQuota":
            return token_quota(concurrency=1)
        case _:
            return policy({"name": "s"})


_ITEMS: Final[dict[str | int, dict[str, Any]]] = {
    "endpoints": {"url": "http://a"},
    "versions": {"name": "v"},
    "providers": {"issuer": "i", "jwks_file": "/keys"},
    "qos_policies": {"name": "q", "latency_sla_ms": 1},
    "match": {"path": "/v1/*"},
    "quotas": {"name": "q", "tokens_per_minute": 1},
}

_BESIDE: Final[dict[tuple[str | int, str | int], dict[str, Any]]] = {
    **{(name, "loopback"): {"header": "x-a"} for name in ("session", "tenant", "class")},
    ("providers", "jwks_url"): {"issuer": "i"},
    ("providers", "tls_ca"): {"issuer": "i", "jwks_url": "https://a/keys"},
    ("match", "value"): {"header": "x-a"},
    ("versions", "engineModel"): {"name": "v", "engine": "deepspeed"},
    ("versions", "chatTemplate"): {"name": "v", "engine": "triton"},
}
"""Where a rule within the item asks for more, or for something else."""


def places() -> list[Place]:
    """All of them, in every kind of document."""
    return [
        place
        for document in DOCUMENTS
        for place in _walk(document.__name__.removesuffix("Document"), inspect.type_info(document), ())
    ]


def numbers() -> list[Place]:
    return [place for place in places() if isinstance(place.kind, inspect.IntType | inspect.FloatType)]


def durations() -> list[Place]:
    return [place for place in places() if isinstance(place.kind, inspect.CustomType) and place.kind.cls is Seconds]


def _walk(document: str, kind: inspect.Type, path: tuple[str | int, ...], nullable: bool = False) -> Iterator[Place]:
    match kind:
        case inspect.Metadata(type=inner):
            yield from _walk(document, inner, path, nullable)
        case inspect.StructType(fields=fields):
            for field in fields:
                yield from _walk(document, field.type, (*path, field.encode_name))
        case inspect.VarTupleType(item_type=item):
            yield Place(document, path, kind)
            yield from _walk(document, item, (*path, 0))
        case inspect.DictType(value_type=inner):
            yield Place(document, path, kind)
            yield from _walk(document, inner, (*path, "v1"))
        case inspect.UnionType(types=types):
            others = [each for each in types if not isinstance(each, inspect.NoneType)]
            yield from _walk(document, others[0], path, len(others) < len(types))
        case _:
            yield Place(document, path, kind, nullable)
