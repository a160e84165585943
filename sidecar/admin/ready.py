"""Whether this sidecar can serve, for `/readyz`, and why, for `/healthz`.

1. Ready means serving (neither starting nor draining) and usable endpoints as `ready_when` asks: `local`: one that is
   marked local; `any`: one; `always`: none.
2. An endpoint is usable while its breaker is closed, half-open, not enforced, **or open with its wait over**: the next
   request is the probe that may close it, and a sidecar that is not ready is sent none.
3. Where health checks are on, one that has never answered any is not usable yet: an engine that loads its model for
   minutes is nobody's to be asked, and in a pod it starts after us. Once it has, silence is for breakers to judge.
4. Overload makes no endpoint unusable: a whole fleet that turned unready at its peak would have nowhere to send it.
"""

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
    local = snapshot.ready_when == "local"
    why = "no endpoint is marked local" if local else "no endpoint is usable"
    for service in fleet.services.values():
        checked = service.policy.health_check.mode != "off"
        for node in service.nodes.values():
            if local and not node.endpoint.local:
                continue
            if checked and not node.heard:
                why = "no endpoint has answered a health check yet"
            elif usable(node, now):
                return READY
            elif local:
                why = "no local endpoint is usable"
    return Readiness(False, why)


def usable(node: Node, now: float) -> bool:
    """Whether a request may reach the node, be it as a probe."""
    breaker = node.breaker
    return not node.draining and (breaker.passes or breaker.state is State.HALF_OPEN or breaker.can_probe(now))
