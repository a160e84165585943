"""What waits to be told to the others: per key the latest of ours, bounded; the oldest falls out and is counted.

Per key and not in a row: while the log is away a breaker may open, be probed and open again many times, and what the
others need when it is back is what it came to. So a return tells each key once.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

import msgspec

from sidecar.core.breaker import Scope, Transition

CAPACITY: Final = 4096


class Pending(msgspec.Struct, frozen=True):
    """What to tell of a key: our breaker's last transition. `order`: an operator's, for `for_s` (infinity: no end)."""

    key: str
    transition: Transition
    tx: bytes
    trace: str = ""
    order: str = ""
    for_s: float = 0.0

    @property
    def scope(self) -> Scope:
        """Whose breaker it is."""
        return self.transition.scope


class Ring:
    """Pending by key, oldest first."""

    __slots__ = ("_pending", "dropped")

    def __init__(self) -> None:
        self._pending: OrderedDict[str, Pending] = OrderedDict()
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, key: str) -> bool:
        return key in self._pending

    def put(self, pending: Pending) -> None:
        """Takes one in, in place of what was there for its key; the oldest falls out if there are too many."""
        self._pending.pop(pending.key, None)
        self._pending[pending.key] = pending
        if len(self._pending) > CAPACITY:
            self._pending.popitem(last=False)
            self.dropped += 1

    def get(self, key: str) -> Pending | None:
        """What waits for a key."""
        return self._pending.get(key)

    def drop(self, key: str, tx: bytes | None = None) -> None:
        """Forgets what waits for a key, or (`tx`) that one alone: a later one may have taken its place."""
        pending = self._pending.get(key)
        if pending is not None and (tx is None or pending.tx == tx):
            del self._pending[key]

    def first(self, count: int) -> Iterator[Pending]:
        """The oldest `count`, left where they are."""
        for number, pending in enumerate(list(self._pending.values())):
            if number == count:
                return
            yield pending
