"""One Envoy's way to a snapshot: what it asked for, what it has, and what it is sent next; pure.

Both protocols (state of the world, and delta) differ in how a request and a push are written, which is `speech`'s
business, and in three rules here.

1. One push of a kind at a time: the next one is made after the answer to the last, from the snapshot of that moment.
   Who does not read, or does not answer, costs a push and no queue.
2. Make before break: what is new or changed goes out in the order of `Kind`, and what is no more is taken away after
   that, in the other order. Until then clusters that a newer snapshot lacks are repeated (state of the world) or left
   (delta). Listeners and routes wait for the answers to clusters and endpoints. Endpoints follow their clusters at
   once: Envoy does not answer to a cluster that changed before it has the cluster's endpoints (ClusterManagerImpl
   pauses CDS while clusters warm).
3. An answer counts by its nonce: another one than the last push's is of the past and says nothing.
4. What was refused is of unknown state, and so is sent again with the next snapshot. Of the one that was refused
   nothing more is sent.
5. State of the world: clusters and listeners are sent whole, endpoints and routes as far as they changed. Delta: all as
   far as they changed.
6. A cluster that changed waits for its endpoints, a listener for its routes: these are sent again behind it, changed or
   not.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from sidecar.control.xds.snapshot import Kind, Resource, Shelf, Snapshot

PUSH_BYTES: Final = 2 << 20
"""Where a push is cut that need not be whole: gRPC's own limit is 4 MiB, and one push is held for each Envoy."""

WHOLE: Final = (Kind.CLUSTERS, Kind.LISTENERS)
_PAIRS: Final = ((Kind.CLUSTERS, Kind.ENDPOINTS), (Kind.LISTENERS, Kind.ROUTES))
_UNSURE: Final = Resource("", b"", "?")
"""What an Envoy has of something that it refused: perhaps the new, perhaps the old, perhaps nothing."""


class Push(msgspec.Struct, frozen=True):
    """What is to be sent: `gone` are names (delta alone says them)."""

    kind: Kind
    nonce: str
    version: str
    sent: tuple[Resource, ...]
    gone: tuple[str, ...]
    snapshot: Snapshot


class Answer(msgspec.Struct, frozen=True):
    """What an Envoy said to a push. `error` empty: it has taken it."""

    push: Push
    error: str = ""


class _Channel:
    """One kind of resources on one stream."""

    __slots__ = ("again", "answered", "asked", "everything", "has", "names", "nonce", "pending", "settled")

    def __init__(self) -> None:
        self.asked = False
        self.answered = False
        self.everything = False
        self.names: set[str] = set()
        self.has: dict[str, Resource | None] = {}
        """By name; None: it was told that there is no such thing."""
        self.nonce = ""
        self.pending: Push | None = None
        self.settled: Shelf | None = None
        self.again: set[str] = set()
        """Names that are to be sent again though they are under way: what they wait for was sent behind them."""

    def wants(self, name: str) -> bool:
        return self.everything or name in self.names

    def forget(self, names: Iterable[str]) -> None:
        under_way = set() if self.pending is None else {each.name for each in self.pending.sent}
        for name in names:
            self.has.pop(name, None)
            if name in under_way:
                self.again.add(name)
        self.settled = None


class Walk:
    """What one stream needs. `delta`: which of the two protocols it speaks."""

    def __init__(self, delta: bool) -> None:
        self.delta = delta
        self._channels = {kind: _Channel() for kind in Kind}
        self._refused = ""
        self._pushes = 0

    def ask(self, kind: Kind, names: Iterable[str], nonce: str, error: str) -> Answer | None:
        """A request of the state-of-the-world protocol: an answer, and all names that are wanted from now on."""
        channel = self._channels[kind]
        if nonce != channel.nonce:
            return None
        answer = self._answered(kind, nonce, error)
        wanted = set(names)
        everything = "*" in wanted or (kind in WHOLE and not wanted and (channel.everything or not channel.asked))
        wanted.discard("*")
        if not channel.asked or wanted != channel.names or everything != channel.everything:
            channel.forget(channel.names - wanted)
            channel.names, channel.everything, channel.asked = wanted, everything, True
        return answer

    def subscribe(
        self,
        kind: Kind,
        more: Iterable[str],
        less: Iterable[str],
        held: Mapping[str, str],
        nonce: str,
        error: str,
    ) -> Answer | None:
        """A request of the delta protocol: an answer, names that are wanted and no longer wanted, and what is `held`
        from an earlier stream, by version."""
        channel = self._channels[kind]
        answer = self._answered(kind, nonce, error) if nonce else None
        names = set(more)
        if not channel.asked:
            channel.everything = not names and kind in WHOLE
            for name, version in held.items():
                channel.has[name] = Resource(name, b"", version)
            channel.answered = bool(held)
        elif names:
            # Asked for again, it is wanted again, whatever was sent before.
            channel.forget(names)
        gone = set(less)
        if "*" in names:
            channel.everything = True
        if "*" in gone:
            channel.everything = False
        channel.names |= names - {"*"}
        channel.names -= gone
        channel.forget(gone)
        channel.asked = True
        return answer

    def names(self, kind: Kind) -> int:
        """How many of a kind are asked for by name."""
        return len(self._channels[kind].names)

    def next(self, snapshot: Snapshot) -> Push | None:
        """What to send now; None: nothing, until an answer or a request or another snapshot comes."""
        if self._refused == snapshot.fingerprint:
            return None
        self._refused = ""
        for pair in _PAIRS:
            for kind in pair:
                push = self._new(kind, snapshot)
                if push is not None:
                    return self._sent(push)
            if any(self._channels[kind].pending is not None for kind in pair):
                return None
        for kind in reversed(Kind):
            push = self._gone(kind, snapshot)
            if push is not None:
                return self._sent(push)
        return None

    def has(self, snapshot: Snapshot) -> bool:
        """Whether all that was asked for so far is there as `snapshot` has it: nothing is under way or refused, and
        `next` had nothing to send."""
        if self._refused == snapshot.fingerprint:
            return False
        asked = [(kind, channel) for kind, channel in self._channels.items() if channel.asked]
        return bool(asked) and all(
            channel.pending is None and channel.settled is snapshot.shelves[kind] for kind, channel in asked
        )

    def _answered(self, kind: Kind, nonce: str, error: str) -> Answer | None:
        channel = self._channels[kind]
        push = channel.pending
        if push is None or push.nonce != nonce:
            return None
        channel.pending = None
        again, channel.again = channel.again, set()
        if error:
            self._refused = push.snapshot.fingerprint
            for name in (*(each.name for each in push.sent), *push.gone):
                channel.has[name] = _UNSURE
            channel.settled = None
            return Answer(push, error)
        for each in push.sent:
            if each.name not in again:
                channel.has[each.name] = each
        for name in push.gone:
            if name in channel.names:
                channel.has[name] = None
            else:
                channel.has.pop(name, None)
        if not self.delta and kind in WHOLE:
            told = {each.name for each in push.sent}
            channel.has = {name: each for name, each in channel.has.items() if name in told}
        return Answer(push)

    def _sent(self, push: Push) -> Push:
        channel = self._channels[push.kind]
        channel.pending = push
        channel.settled = None
        channel.nonce = push.nonce
        channel.answered = True
        if push.kind in WHOLE:
            changed = [each.name for each in push.sent if _version(channel.has.get(each.name)) != each.version]
            behind = self._channels[Kind(push.kind + 1)]
            if push.kind is Kind.CLUSTERS:
                behind.forget(changed)
            elif changed:
                behind.forget(list(behind.has))
        return push

    def _new(self, kind: Kind, snapshot: Snapshot) -> Push | None:
        channel, shelf = self._channels[kind], snapshot.shelves[kind]
        if not channel.asked or channel.pending is not None or channel.settled is shelf:
            return None
        if channel.everything:
            wanted = list(shelf.resources.values())
        else:
            wanted = [shelf.resources[name] for name in sorted(channel.names) if name in shelf.resources]
        has = channel.has
        changed = [each for each in wanted if _version(has.get(each.name)) != each.version]
        whole = kind in WHOLE and not self.delta
        first = not channel.answered and kind in WHOLE
        if not changed and not first:
            if not self._lacking(channel, shelf):
                channel.settled = shelf
            return None
        if whole:
            kept = [
                each for name, each in has.items() if name not in shelf.resources and each is not None and each.body
            ]
            return self._push(kind, snapshot, (*wanted, *kept), ())
        return self._push(kind, snapshot, _within(changed), ())

    def _gone(self, kind: Kind, snapshot: Snapshot) -> Push | None:
        channel, shelf = self._channels[kind], snapshot.shelves[kind]
        if not channel.asked or channel.settled is shelf:
            return None
        lacking = self._lacking(channel, shelf)
        if self.delta:
            if lacking:
                return self._push(kind, snapshot, (), tuple(lacking))
        elif kind in WHOLE:
            if lacking:
                return self._push(
                    kind, snapshot, tuple(r for r in shelf.resources.values() if channel.wants(r.name)), ()
                )
        else:  # of endpoints and routes the protocol cannot say that they are gone: their clusters and listeners are
            channel.forget(lacking)
        channel.settled = shelf
        return None

    def _lacking(self, channel: _Channel, shelf: Shelf) -> list[str]:
        """Names that it has, or waits for, and that are no more."""
        lacking = [name for name, each in channel.has.items() if each is not None and name not in shelf.resources]
        if self.delta:
            lacking += [name for name in channel.names if name not in shelf.resources and name not in channel.has]
        return sorted(lacking)

    def _push(self, kind: Kind, snapshot: Snapshot, sent: tuple[Resource, ...], gone: tuple[str, ...]) -> Push:
        self._pushes += 1
        return Push(kind, str(self._pushes), snapshot.shelves[kind].version, sent, gone, snapshot)


def _version(resource: Resource | None) -> str:
    return "" if resource is None else resource.version


def _within(resources: list[Resource]) -> tuple[Resource, ...]:
    """As many as a push holds, and at least one."""
    total = 0
    for count, each in enumerate(resources):
        total += len(each.body) + len(each.name) + 100
        if total > PUSH_BYTES and count:
            return tuple(resources[:count])
    return tuple(resources)
