"""Probes that were lent to this sidecar: which are in hand, which are out with a request, and when to ask for one.

A request never waits for a lease, so one has to be in hand before it comes. Whoever may want it asks when an open
breaker's wait is over: for an endpoint, every sidecar whose service is asked for something; for a session or a kind of
request, whoever opened it and whoever refuses it. One of them gets it.

1. A lease is `LEASE_MS` long and prolonged while its probe runs, for a probe may take minutes and a dead holder must be
   found in seconds.
2. One in hand that no request uses is given back: after `IDLE_S` where others were refused since, after `KEEP_S` where
   nobody wanted it for so long.
3. A request whose end nobody heard of holds its probe no longer than any may take: then it is not prolonged.
"""

from math import inf
from typing import Final

from sidecar.core.breaker import Breaker

LEASE_MS: Final = 5_000
RENEW_S: Final = 1.5
IDLE_S: Final = 1.0
KEEP_S: Final = 30.0
ASK_AGAIN_S: Final = 0.5
"""After FULL, while somebody here wants one: the verdict of others is due, and the log tells it first."""


class Lease:
    """One probe of one half-open register."""

    __slots__ = ("breaker", "contended", "epoch", "lent_at", "renewed_at", "seq", "used_at", "version")

    def __init__(self, breaker: Breaker, epoch: int, version: int, seq: int, now: float) -> None:
        self.breaker = breaker
        self.epoch = epoch
        self.version = version
        self.seq = seq
        self.lent_at = now
        self.renewed_at = now
        self.used_at: float | None = None
        """When a request took it; None while it is in hand."""
        self.contended = False


class Leases:
    """By register key; all of a key are of one version. `now` is monotonic seconds."""

    __slots__ = ("_by_key", "_pruned_at", "_wanted")

    def __init__(self) -> None:
        self._by_key: dict[str, list[Lease]] = {}
        self._wanted: dict[str, float] = {}
        self._pruned_at = -inf

    def want(self, key: str, now: float) -> None:
        """Somebody would use a probe of this key."""
        self._wanted[key] = now

    def wanted(self, key: str, now: float) -> bool:
        """Whether somebody wanted one lately."""
        return now - self._wanted.get(key, -KEEP_S) < KEEP_S

    def held(self, key: str) -> list[Lease]:
        """Those of a key."""
        return self._by_key.get(key, [])

    def add(self, key: str, lease: Lease) -> None:
        """One that was granted. Those of another version are void."""
        leases = [each for each in self.held(key) if (each.epoch, each.version) == (lease.epoch, lease.version)]
        self._by_key[key] = [*leases, lease]

    def remove(self, key: str, seq: int) -> Lease | None:
        """One that ended."""
        leases = self.held(key)
        found = next((lease for lease in leases if lease.seq == seq), None)
        if found is not None:
            leases.remove(found)
            if not leases:
                self._by_key.pop(key, None)
        return found

    def void(self, key: str) -> None:
        """The register moved: none of its probes counts."""
        self._by_key.pop(key, None)

    def moved(self, key: str, epoch: int, version: int, closed: bool) -> None:
        """The register has this version now: others' probes are void, and of a closed one nobody wants any."""
        leases = self.held(key)
        if leases and (leases[0].epoch, leases[0].version) != (epoch, version):
            self.void(key)
        if closed:
            self._wanted.pop(key, None)

    def clear(self) -> None:
        """The log is away."""
        self._by_key.clear()

    def keys(self) -> list[str]:
        """Whose probes are here."""
        return list(self._by_key)

    def unused(self) -> list[tuple[str, Lease]]:
        """Those in hand."""
        return [
            (key, lease) for key, leases in self._by_key.items() for lease in leases if lease.breaker.holds(lease.seq)
        ]

    def due(self, now: float) -> tuple[list[tuple[str, Lease]], list[tuple[str, Lease]]]:
        """Those to be prolonged, and those in hand to be given back, which are taken from their breakers already."""
        renew: list[tuple[str, Lease]] = []
        release: list[tuple[str, Lease]] = []
        for key, leases in list(self._by_key.items()):
            wanted = self.wanted(key, now)
            for lease in list(leases):
                if not lease.breaker.holds(lease.seq):
                    if not lease.breaker.out(lease.seq):  # it moved here alone: nothing will come of this probe
                        self.remove(key, lease.seq)
                        release.append((key, lease))
                        continue
                    if lease.used_at is None:
                        lease.used_at = now
                if lease.used_at is None:
                    idle_s = now - lease.lent_at
                    idle = (idle_s >= KEEP_S and not wanted) or (idle_s >= IDLE_S and lease.contended)
                    if idle and lease.breaker.take_back(lease.seq):
                        self.remove(key, lease.seq)
                        self._wanted.pop(key, None)  # so that it is not asked for again before others have it
                        release.append((key, lease))
                        continue
                elif now - lease.used_at >= lease.breaker.lease_s:
                    self.remove(key, lease.seq)
                    continue
                if now - lease.renewed_at >= RENEW_S:
                    lease.renewed_at = now
                    renew.append((key, lease))
        if now - self._pruned_at >= 1.0:  # there may be 100,000
            self._pruned_at = now
            for key in [key for key, at in self._wanted.items() if now - at >= KEEP_S and key not in self._by_key]:
                del self._wanted[key]
        return renew, release
