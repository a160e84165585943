"""The list of models where engines differ: `GET /v1/models`, which Triton answers 404 and MII with a folder's path.

A service whose endpoints all speak OpenAI's API passes the question on. Where requests are translated nobody behind has
the answer: it is made of the names that the policy spells out, and of those that engines report where they are asked
(`health_check`). A name is listed if a request for it would find an endpoint that serves it, well or not: who is open
now is no less a model's endpoint. What only a glob covers has no name until an engine reports one.
"""

import re
from typing import Final

import msgspec

from sidecar.core.models import matches
from sidecar.core.service import ServiceState
from sidecar.kernel.exchange import ResponseHead

PATH: Final = b"/v1/models"

_GLOB: Final = re.compile(r"[*?\[]")


class _Card(msgspec.Struct, frozen=True):
    """vLLM's, without what only an engine knows."""

    id: str
    created: int
    root: str
    object: str = "model"
    owned_by: str = "sidecar"
    parent: None = None


class _List(msgspec.Struct, frozen=True):
    data: tuple[_Card, ...]
    object: str = "list"


def names_of(service: ServiceState) -> list[str]:
    """The models of a service that have a name: the policy's, in its order, then those that engines report."""
    policy = service.policy
    kinds = {(node.kind, node.endpoint.engine_model) for node in service.nodes.values() if not node.draining}
    named: dict[str, None] = dict.fromkeys(name for name in policy.models if _GLOB.search(name) is None)
    for endpoint in policy.endpoints:
        named.update(dict.fromkeys(name for name in endpoint.models if _GLOB.search(name) is None))
    reported = {name for (_, told), engine_model in kinds for name in (*(told or ()), engine_model) if name}
    named.update(dict.fromkeys(sorted(reported)))
    return [
        name
        for name in named
        if matches(policy.models or ("*",), name)
        and any(matches(globs, name) and (told is None or name in told) for (globs, told), _ in kinds)
    ]


def model_list(service: ServiceState, created: int) -> tuple[ResponseHead, bytes]:
    """The answer, in vLLM's shape. `created`: seconds since the epoch; vLLM, too, says when it was asked."""
    cards = tuple(_Card(name, created, name) for name in names_of(service))
    body = msgspec.json.encode(_List(cards))
    lines = [b"content-type: application/json\r\n"]
    return ResponseHead(200, b"OK", lines, b"application/json", len(body), False, b""), body
