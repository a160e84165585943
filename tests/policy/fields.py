"""Every field of every policy struct, with a way to write a document that sets it."""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

from sidecar.policy.schema import MeshBreakerDocument, PolicyDocument, Seconds
from tests.policy.build import mesh, policy


class Place(msgspec.Struct, frozen=True):
    """A field; `path` leads from the document's root to it, `kind` is its type without annotations."""

    document: str
    path: tuple[str | int, ...]
    kind: inspect.Type

    @property
    def id(self) -> str:
        return f"{self.document}.{'.'.join(map(str, self.path))}"

    def write(self, value: Any) -> dict[str, Any]:
        """A document that is good but for `value` at the place."""
        root = policy({"name": "s"}) if self.document == "Policy" else mesh()
        node: Any = root
        for step, following in zip(self.path, (*self.path[1:], None), strict=True):
            if isinstance(step, int):
                if len(node) <= step:
                    node.append(value if following is None else _start(self.path))
                node = node[step]
            elif following is None:
                node[step] = value
            else:
                node = node.setdefault(step, [] if isinstance(following, int) else {})
        return root


def _start(path: tuple[str | int, ...]) -> dict[str, Any]:
    """What an item of a list needs besides the field under test."""
    if "endpoints" in path:
        return {"url": "http://a"}
    if "qos_policies" in path:
        return {"name": "q", "latency_sla_ms": 1}
    return {}


def places() -> list[Place]:
    """All of them, in both kinds of document."""
    return [
        *_walk("Policy", inspect.type_info(PolicyDocument), ()),
        *_walk("CircuitBreakerPolicy", inspect.type_info(MeshBreakerDocument), ()),
    ]


def numbers() -> list[Place]:
    return [place for place in places() if isinstance(place.kind, inspect.IntType | inspect.FloatType)]


def durations() -> list[Place]:
    return [place for place in places() if isinstance(place.kind, inspect.CustomType) and place.kind.cls is Seconds]


def _walk(document: str, kind: inspect.Type, path: tuple[str | int, ...]) -> Iterator[Place]:
    match kind:
        case inspect.Metadata(type=inner):
            yield from _walk(document, inner, path)
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
            yield from _walk(document, next(t for t in types if not isinstance(t, inspect.NoneType)), path)
        case _:
            yield Place(document, path, kind)
