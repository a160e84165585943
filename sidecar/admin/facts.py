"""What the admin pages need to know and may set going; `main` implements it."""

from enum import StrEnum
from typing import Protocol

from sidecar.core.fleet import Fleet
from sidecar.policy.store import PolicyStore
from sidecar.proxy.ports import Recorder


class Phase(StrEnum):
    """Where the process is in its life. Only SERVING can be ready."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


class Facts(Protocol):
    """Read at every request, on the loop; nothing here may wait, except the metrics."""

    @property
    def fleet(self) -> Fleet: ...

    @property
    def store(self) -> PolicyStore: ...

    @property
    def recorder(self) -> Recorder:
        """Takes the transitions that an operator's override causes."""

    @property
    def phase(self) -> Phase: ...

    def now(self) -> float:
        """Monotonic seconds, the clock of the fleet."""

    def wall(self) -> float:
        """Unix seconds."""

    def drain(self) -> None:
        """Begin to drain; again is harmless."""

    async def exposition(self) -> tuple[bytes, str]:
        """The metrics and their content type."""
