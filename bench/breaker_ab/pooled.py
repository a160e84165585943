"""Sidecars that tell each other, once a second, what they saw of each endpoint: counts, which add up like one's own.

Stands for the transaction log, with its delay. What arrives is weighed by the product's own `evidence.absorb`.
"""

from typing import Final

from sidecar.core import evidence
from sidecar.core.detection import Counts
from sidecar.simulate.product import Product

DELAY_S: Final = 0.1
"""From one sidecar's telling to the others' hearing it."""


class Pooled(Product):
    """One of several."""

    __slots__ = ()

    def tick(self, now: float) -> None:
        super().tick(now)
        seen = evidence.share(self._service)
        if not seen:
            return
        for peer in self.context.peers:
            if peer is not self and isinstance(peer, Pooled):
                self.context.clock.at(now + DELAY_S, peer.hear, seen)

    def hear(self, seen: list[Counts]) -> None:
        """What another saw. A trip that follows is this sidecar's own."""
        for transition in evidence.absorb(self._service, seen, self.context.clock.now):
            self._notes.transition(transition)
