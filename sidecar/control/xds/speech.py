"""The two protocols' messages: requests into `Walk`'s words, pushes into bytes; pure.

One stream speaks one of them: the state of the world says all names that are wanted with each request, and gets
resources; delta says what changed in that, and gets names and versions with them.
"""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from sidecar.control.xds import protos
from sidecar.control.xds.snapshot import KINDS, TYPE_URLS
from sidecar.control.xds.walk import Answer, Push, Walk

NAMES: Final = 30_000
"""Of one kind that a stream may ask for: three times the clusters of a thousand services with ten versions."""
_NAME_CHARACTERS: Final = 200


class Heard(msgspec.Struct, frozen=True):
    """What a request said. `node`: who speaks, in the first request of a stream alone; `answer`: to our last push."""

    node: str
    answer: Answer | None


class BadRequest(ValueError):
    """Bytes that are no request, or one that asks for too much."""


def hear(walk: Walk, data: bytes) -> Heard:
    """Tell `walk` what a request says. A kind that is not served is not answered: Envoy asks for what it is told to.

    BadRequest for bytes that are none.
    """
    request = protos.DeltaDiscoveryRequest() if walk.delta else protos.DiscoveryRequest()
    try:
        request.ParseFromString(data)
    except Exception as exc:
        raise BadRequest(f"no discovery request: {exc}") from exc
    node = ""
    if request.HasField("node"):
        node = f"{request.node.cluster}/{request.node.id}"[:_NAME_CHARACTERS]
    kind = KINDS.get(request.type_url)
    if kind is None:
        return Heard(node, None)
    error = ""
    if request.HasField("error_detail"):
        error = request.error_detail.message or f"code {request.error_detail.code}"
    named = (
        (request.resource_names_subscribe, request.resource_names_unsubscribe, request.initial_resource_versions)
        if walk.delta
        else (request.resource_names,)
    )
    if walk.names(kind) + sum(map(len, named)) > 2 * NAMES or any(len(names) > NAMES for names in named):
        raise BadRequest(f"more than {NAMES} names of one kind")
    if not walk.delta:
        return Heard(node, walk.ask(kind, request.resource_names, request.response_nonce, error))
    answer = walk.subscribe(
        kind,
        request.resource_names_subscribe,
        request.resource_names_unsubscribe,
        dict(request.initial_resource_versions),
        request.response_nonce,
        error,
    )
    return Heard(node, answer)


def write(push: Push, delta: bool) -> bytes:
    """A push as it goes out."""
    url = TYPE_URLS[push.kind]
    if not delta:
        made = protos.DiscoveryResponse(
            version_info=push.version, type_url=url, nonce=push.nonce, resources=list(_anys(push, url))
        )
        return bytes(made.SerializeToString())
    made = protos.DeltaDiscoveryResponse(
        system_version_info=push.version,
        type_url=url,
        nonce=push.nonce,
        resources=[
            {"name": each.name, "version": each.version, "resource": {"type_url": url, "value": each.body}}
            for each in push.sent
        ],
        removed_resources=push.gone,
    )
    return bytes(made.SerializeToString())


def _anys(push: Push, url: str) -> Iterator[dict[str, Any]]:
    for each in push.sent:
        yield {"type_url": url, "value": each.body}
