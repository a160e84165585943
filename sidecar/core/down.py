"""Versions none of whose endpoints may serve: their share goes to the others (`split`), and somebody should know.

Looked for once a second, and not by each request that is affected: there may be thousands, or none that would ask. A
version counts as down while every one of its endpoints is open, draining or full, or it has none; a probe that one of
them is due does not change that. It is said when it was so at two looks in a row: an endpoint that is full for a second
is no news.
"""

from typing import Final, Literal

import msgspec

from sidecar.core.pool import Node
from sidecar.core.service import ServiceState
from sidecar.kernel.count import counted
from sidecar.kernel.ids import EndpointKey, VersionName

SAID_S: Final = 1.5
"""More than one second's look, less than two."""


class Down:
    """Since when a version is down (monotonic seconds), and whether that was said."""

    __slots__ = ("said", "since")

    def __init__(self, since: float) -> None:
        self.since = since
        self.said = False


class Told(msgspec.Struct, frozen=True):
    """What is to be said of a version."""

    kind: Literal["version_down", "version_back"]
    version: VersionName
    text: str


class Downs:
    """One service's versions that are down."""

    __slots__ = ("_down", "_nodes", "_split", "_stirs")

    def __init__(self) -> None:
        self._down: dict[VersionName, Down] = {}
        self._stirs = -1
        self._split: tuple[tuple[VersionName, float], ...] = ()
        self._nodes: dict[EndpointKey, Node] = {}

    def look(self, service: ServiceState, now: float) -> list[Told]:
        """What is news, to be asked once a second. Free where no endpoint has moved and none is down."""
        down, stirs = self._down, service.roster.stirs
        if not down and stirs == self._stirs and service.split is self._split and service.nodes is self._nodes:
            return []
        self._stirs, self._split, self._nodes = stirs, service.split, service.nodes
        told: list[Told] = []
        used = {version for version, _ in service.split}
        for version in [version for version in down if version not in used]:
            # Nobody is to get anything from it any more: that is no longer missing.
            if down.pop(version).said:
                told.append(Told("version_back", version, f"{version} is no longer to get requests"))
        lost: list[VersionName] = []
        for version, _ in service.split:
            pool = service.pool("", version)
            pool.refresh(now)
            if not pool.has_ready(()):
                lost.append(version)
                continue
            back = down.pop(version, None)
            if back is not None and back.said:
                told.append(
                    Told("version_back", version, f"{version} has its share again, after {now - back.since:.0f} s")
                )
        for version in lost:
            known = down.setdefault(version, Down(now))
            if not known.said and now - known.since >= SAID_S:
                known.said = True
                told.append(Told("version_down", version, _words(service, version, len(used) - len(lost), now)))
        return told


def _words(service: ServiceState, version: VersionName, others: int, now: float) -> str:
    nodes = service.pool("", version).nodes
    if not nodes:
        what = "it has no endpoint that takes requests"
    else:
        full = sum(node.breaker.passes and node.overload_until > now for node in nodes)
        parts = [(len(nodes) - full, "open"), (full, "full")]
        those = ", ".join(f"{count} {word}" for count, word in parts if count)
        what = f"of its {counted(len(nodes), 'endpoint')} {those}"
    where = "its share goes to the other versions" if others else "no other version may serve either"
    return f"no endpoint of {version} may serve ({what}): {where}"
