"""Sidecars that tell each other, once a second, what they saw of each endpoint: counts, which add up like one's own.

Stands for the transaction log, with its delay. What arrives is weighed by the product's own `Detection.absorb`.
"""

from typing import Final

from sidecar.core.detection import Counts
from sidecar.simulate.product import Product

DELAY_S: Final = 0.1
"""From one sidecar's telling to the others' hearing it."""


class Pooled(Product):
    """One of several."""

    __slots__ = ()

    def tick(self, now: float) -> None:
        super().tick(now)
        detection = self._service.detection
        counts = detection.share() if detection is not None else []
        if not counts:
            return
        for peer in self.context.peers:
            if peer is not self and isinstance(peer, Pooled):
                self.context.clock.at(now + DELAY_S, peer.hear, counts)

    def hear(self, counts: list[Counts]) -> None:
        """What another saw. A trip that follows is this sidecar's own."""
        service, now = self._service, self.context.clock.now
        detection = service.detection
        if detection is None:
            return
        rule = detection.rule
        for each in counts:
            node = service.nodes.get(each.endpoint)
            if node is None or node.detector is None:
                continue
            trip = detection.absorb(node.detector, each, now)
            if trip is None:
                continue
            moved = node.breaker.trip(
                trip.why, trip.evidence, trip.proofs, float(rule.open_s), float(rule.open_max_s), now
            )
            if moved is not None:
                self._notes.transition(moved)
