"""What was found out about tokens, by a digest of their bytes: a token comes with every request of its hour.

A digest and not the token: that is a credential, and 10,000 of them need not lie in memory. SHA-256 and not Python's
own hash: what two tokens share must not be anybody's to choose.

Two generations and no list in the order of use: what is looked up in the older one moves to the younger one, and when
that is full the older one goes. A token that is used lives on, at no write per look-up, and at most `most` are held.
"""

from hashlib import sha256
from typing import Final, Generic, TypeVar

Verdict = TypeVar("Verdict")

MAX_BYTES: Final = 16 << 20
"""Of the tokens together: what their claims take is some times as much."""


class Remembered(Generic[Verdict]):
    """Verdicts on up to `most` tokens, each for a time of its own."""

    __slots__ = ("_bytes", "_most", "_old", "_young")

    def __init__(self, most: int) -> None:
        self._most = most // 2
        self._young: dict[bytes, tuple[Verdict, float]] = {}
        self._old: dict[bytes, tuple[Verdict, float]] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, mark: bytes, now_wall: float) -> Verdict | None:
        """The verdict on the token with this `mark`, if there is one that holds at `now_wall`."""
        found = self._young.get(mark)
        if found is None:
            found = self._old.pop(mark, None)
            if found is None:
                return None
            self._keep(mark, found, 0)
        verdict, until = found
        if now_wall < until:
            return verdict
        del self._young[mark]
        return None

    def put(self, mark: bytes, verdict: Verdict, until: float, size: int) -> None:
        """Remember it until `until`, in seconds since the epoch; `size`: bytes of its token."""
        self._keep(mark, (verdict, until), size)

    def clear(self) -> None:
        """What they were found out with has changed."""
        self._young.clear()
        self._old.clear()
        self._bytes = 0

    def _keep(self, mark: bytes, entry: tuple[Verdict, float], size: int) -> None:
        self._bytes += size
        if len(self._young) >= self._most or self._bytes > MAX_BYTES // 2:
            self._old = self._young
            self._young = {}
            self._bytes = size
        self._young[mark] = entry


def mark_of(token: bytes) -> bytes:
    """What a token is remembered by."""
    return sha256(token).digest()
