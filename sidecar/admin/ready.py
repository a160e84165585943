"""Whether this sidecar can serve, for `/readyz`, and why, for `/healthz`.

1. Ready means serving (neither starting nor draining) and usable endpoints as `ready_when` asks: `local`: one that is
   marked local; `any`: one; `always`: none.
2. An endpoint is usable while its breaker is closed, half-open, not enforced, **or open with its wait over**: the next
   request is the probe that may close it, and a sidecar that is not ready is sent none.
3. Overload makes no endpoint unusable: a whole fleet that turned unready at its peak would have nowhere to send it.
"""

from itertools import chain

import msgspec

from sidecar.admin.facts import Phase
from sidecar.core.breaker import State
from sidecar.core.fleet import Fleet
from sidecar.core.pool import Node
from sidecar.policy.schema import Snapshot


class Readiness(msgspec.Struct, frozen=True):
    """`reason` is empty when ready, else words for an operator."""

    ready: bool
    reason: str


READY = Readiness(True, "")


def readiness(phase: Phase, snapshot: Snapshot, fleet: Fleet, now: float) -> Readiness:
    """Whether requests should come. `now`: monotonic seconds."""
    if phase is not Phase.SERVING:
        return Readiness(False, phase.value)
    if snapshot.ready_when == "always":
        return READY
    nodes = chain.from_iterable(service.nodes.values() for service in fleet.services.values())
    if snapshot.ready_when == "any":
        return READY if any(usable(node, now) for node in nodes) else Readiness(False, "no endpoint is usable")
    marked = False
    for node in nodes:
        if node.endpoint.local:
            marked = True
            if usable(node, now):
                return READY
    return Readiness(False, "no local endpoint is usable" if marked else "no endpoint is marked local")


def usable(node: Node, now: float) -> bool:
    """Whether a request may reach the node, be it as a probe."""
    breaker = node.breaker
    return not node.draining and (breaker.passes or breaker.state is State.HALF_OPEN or breaker.can_probe(now))
