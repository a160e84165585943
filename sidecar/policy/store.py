"""The snapshot in force: one reference, swapped whole.

Readers take `current` once per request and keep it, so a swap in the middle of a request changes nothing for it.
"""

from sidecar.policy.schema import Snapshot


class PolicyStore:
    """The last good snapshot, and what became of the attempts to replace it.

    `generation` counts swaps, `failed` counts refused loads; `last_error` is None again after a good load.
    """

    __slots__ = ("current", "failed", "generation", "last_error")

    def __init__(self, snapshot: Snapshot) -> None:
        self.current = snapshot
        self.generation = 0
        self.failed = 0
        self.last_error: str | None = None

    def swap(self, snapshot: Snapshot) -> None:
        """Put `snapshot` in force for every request that starts from now on."""
        self.current = snapshot
        self.generation += 1
        self.last_error = None

    def refuse(self, error: str) -> None:
        """Keep what is in force and remember why the newer one was not taken."""
        self.failed += 1
        self.last_error = error
