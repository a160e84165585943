"""What is put to the test in the simulated world: a way to send each request somewhere, or to refuse it."""

from collections.abc import Callable, Sequence
from typing import Protocol

from sidecar.kernel.ids import EndpointKey
from sidecar.simulate.clock import VirtualClock
from sidecar.simulate.ledger import Ledger
from sidecar.simulate.workload import Arrival
from sidecar.simulate.world import World


class Method(Protocol):
    """One sidecar's way. It tells the ledger of every attempt, every end and every breaker that moved."""

    def start(self, arrival: Arrival) -> None:
        """A request came, now."""

    def tick(self, now: float) -> None:
        """A second went by."""

    def close(self) -> None:
        """It is over; nothing more will happen."""


class Context:
    """What a method is given.

    `pods` are the engines' keys by index, `number` is this sidecar's, `peers` fills with every sidecar's method.
    """

    __slots__ = ("clock", "ledger", "number", "peers", "pods", "seed", "world")

    def __init__(
        self,
        clock: VirtualClock,
        world: World,
        ledger: Ledger,
        pods: Sequence[EndpointKey],
        seed: int,
        number: int,
        peers: list[Method],
    ) -> None:
        self.clock = clock
        self.world = world
        self.ledger = ledger
        self.pods = tuple(pods)
        self.seed = seed
        self.number = number
        self.peers = peers


Factory = Callable[[Context], Method]


def keys_of(pods: int) -> tuple[EndpointKey, ...]:
    """What engines are called that have no address."""
    return tuple(EndpointKey(f"pod-{index}:8000") for index in range(pods))
