"""A service's endpoints as the request path asks for them: who serves a model and version, and who of them may now.

Ten thousand endpoints cannot be visited for each request, and when most of them are open or full no draw finds the
rest. So a pool keeps its nodes sorted by what may be done with them, and looks again only at those that changed:

1. `ready`: any request may go there. `due`: a probe may. All others wait, in a heap by the moment at which time alone
   changes their place (an open breaker's wait, a probe's lease, a Retry-After); who waits for an order is not in it.
2. What moves a node for any other reason stirs the roster, and the roster remembers whom: `refresh` places those anew.
   A pool that was not asked for so long that the roster forgot looks at all of its nodes, once.
3. A probe that was lent may leave its node in `due`: whoever takes a node from there asks its breaker first.
4. Why nobody can serve is found out by looking at all, and of many told again for a moment without looking. That
   keeps nobody out: only who found nobody asks.
"""

from collections.abc import Collection
from heapq import heapify, heappop, heappush
from math import inf
from typing import Final

import msgspec

from sidecar.core.breaker import Breaker, Roster
from sidecar.core.detector import Detector
from sidecar.core.gate.limit import Limiter
from sidecar.core.models import matches
from sidecar.kernel.errors import Reason
from sidecar.kernel.ids import EndpointKey, ServiceName, VersionName
from sidecar.policy.schema import Endpoint, Engine, Front, is_translated

MAX_PARTS: Final = 128  # sets of nodes remembered for the models that only some have
MANY: Final = 32  # up to this many nodes, finding out anew why nobody can serve costs less than the answer
RETOLD_S: Final = 0.1  # how old the reason and the hint when to come back may be where there are more
LOOKS: Final = 256  # nodes looked at for one with room, 2 us compiled: with more, who finds none asks again soon
SLACK: Final = 64  # entries of a heap that may be out of date, beyond one per node

Kind = tuple[tuple[str, ...], frozenset[str] | None]
"""What decides which models a node serves: the policy's globs, and what its engine reports (None: unknown)."""

Foreign = tuple[Engine, Front, str]
"""Engines that are asked in other words: which, by which front, with which chat template."""

Without = tuple[Foreign, ...]
"""The foreign ones that a request leaves out, since they cannot do what it asks; mostly there are none."""

_NONE: Final = frozenset[str]()
_LATER: Final[tuple[Kind, ...]] = ((("",), _NONE),)
"""Served by nobody, and no unknown model for that: an engine that it belongs to says that it has none ready now."""


class Unavailable(msgspec.Struct, frozen=True):
    """Nobody can serve: `breaker_open`, `overloaded`, `unknown_model` or `no_endpoint`.

    `retry_at` is monotonic seconds, or None where waiting does not help.
    """

    reason: Reason
    retry_at: float | None


class Node:
    """One endpoint of one service. `reply_lines` are the header lines that name it on an answer.

    `detector` watches what its attempts tell; None where the fixed rules alone judge. `late` counts attempts that were
    late while they ran. `in_flight` is ours (whoever
    forwards counts), `waiting` the engine's own queue as it last reported. `healthy` is
    what the last health check said: shown, never filtered on, for a stalled engine still answers its health check.
    `heard`: it has answered one, ever.
    `limit` is how many of ours it takes at once, inf for any number; `limiter` is who finds that out, None where it is
    given. `translated`: it does not speak the clients' API. `share` (0-1) is what it gets of what it would: less than 1
    while its zone is turned down (`zone`).
    """

    __slots__ = (
        "_draining",
        "_models",
        "_overload_until",
        "_pools",
        "breaker",
        "detector",
        "endpoint",
        "healthy",
        "heard",
        "in_flight",
        "key",
        "late",
        "limit",
        "limiter",
        "reply_lines",
        "service",
        "share",
        "translated",
        "version",
        "waiting",
    )

    def __init__(
        self,
        key: EndpointKey,
        service: ServiceName,
        endpoint: Endpoint,
        breaker: Breaker,
        pools: dict[tuple[str, VersionName | None, Without], "Pool"],
    ) -> None:
        self.key = key
        self.service = service
        self.breaker = breaker
        self.detector: Detector | None = None
        self.use(endpoint)
        self.in_flight = 0
        self.share = 1.0
        self.limit = inf
        self.limiter: Limiter | None = None
        self.late = 0
        self.waiting = 0
        self._overload_until = -inf
        self._draining = False
        self.healthy = True
        self.heard = False
        self._models: frozenset[str] | None = None
        self._pools = pools

    def use(self, endpoint: Endpoint) -> None:
        """Take what the policy says of the endpoint."""
        self.endpoint = endpoint
        self.translated = is_translated(endpoint)
        self.version = VersionName(endpoint.version)
        self.reply_lines = b"x-sidecar-endpoint: %b\r\nx-sidecar-version: %b\r\n" % (
            self.key.encode(),
            self.version.encode(),
        )

    @property
    def overload_until(self) -> float:
        """It said that it is full, and is left alone until then (monotonic seconds)."""
        return self._overload_until

    @overload_until.setter
    def overload_until(self, until: float) -> None:
        self._overload_until = until
        self.breaker.stir()

    @property
    def draining(self) -> bool:
        """It gets no new requests: it is about to go, or has left the policy."""
        return self._draining

    @draining.setter
    def draining(self, draining: bool) -> None:
        if draining != self._draining:
            self._draining = draining
            self._pools.clear()

    @property
    def models(self) -> frozenset[str] | None:
        """The models that the engine reports; None: not known, so all that the policy says."""
        return self._models

    @models.setter
    def models(self, models: frozenset[str] | None) -> None:
        if models != self._models:
            self._models = models
            self._pools.clear()

    @property
    def kind(self) -> Kind:
        """Nodes of a kind serve the same models."""
        return self.endpoint.models, self._models


class Ready:
    """A set of nodes, by key and as a list to draw from."""

    __slots__ = ("_places", "nodes")

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._places: dict[EndpointKey, int] = {}

    def get(self, key: EndpointKey) -> Node | None:
        """The node of `key`; None if it is not in."""
        place = self._places.get(key)
        return None if place is None else self.nodes[place]

    def place(self, node: Node) -> int | None:
        """Where in `nodes` it is; None if it is not in."""
        return self._places.get(node.key)

    def add(self, node: Node) -> None:
        """Put it in; again is harmless."""
        if node.key not in self._places:
            self._places[node.key] = len(self.nodes)
            self.nodes.append(node)

    def discard(self, node: Node) -> None:
        """Take it out, if it is in."""
        place = self._places.pop(node.key, None)
        if place is None:
            return
        last = self.nodes.pop()
        if last is not node:
            self.nodes[place] = last
            self._places[last.key] = place


class Pool:
    """The nodes that serve one model and version and do not drain, whoever may now.

    `ready` (`local`: of those the ones marked so) and what `probe`, `may_serve` and `has_ready` say is right after
    `refresh`.
    """

    __slots__ = (
        "_by_key",
        "_heap",
        "_kinds",
        "_parts",
        "_refusal",
        "_retold_for",
        "_retold_until",
        "_roomy",
        "_roster",
        "_seen",
        "_wakes",
        "due",
        "kinds",
        "local",
        "nodes",
        "ready",
        "unknown_model",
    )

    def __init__(self, nodes: tuple[Node, ...], unknown_model: bool, roster: Roster) -> None:
        self.nodes = nodes
        self.ready = Ready()
        self.local = Ready()
        self.due: dict[EndpointKey, Node] = {}
        self.unknown_model = unknown_model
        self._by_key = {node.key: node for node in nodes}
        self._roster = roster
        self._seen = -1
        self._heap: list[tuple[float, EndpointKey]] = []
        self._wakes: dict[EndpointKey, float] = {}
        self._kinds: tuple[Kind, ...] = tuple(dict.fromkeys([node.kind for node in nodes]))
        self.kinds: frozenset[Kind] = frozenset(self._kinds)
        """Pools of a service and a version with the same kinds of nodes have the same nodes."""
        self._roomy = 0
        self._parts: dict[tuple[Kind, ...], Pool] = {}
        self._refusal: Unavailable | None = None
        self._retold_for: tuple[EndpointKey, ...] = ()
        self._retold_until = -inf

    def serving(self, model: str) -> "Pool":
        """Those that serve `model`, which is not empty; this pool where all do, for clients make names up."""
        kinds = self._kinds
        served = tuple([kind for kind in kinds if _serves(kind, model)])
        if len(served) == len(kinds):
            return self
        if not served and any(reported == _NONE and matches(globs, model) for globs, reported in kinds):
            served = _LATER
        part = self._parts.get(served)
        if part is None:
            among = frozenset(served)
            nodes = tuple([node for node in self.nodes if node.kind in among])
            part = Pool(nodes, not served, self._roster)
            if len(self._parts) >= MAX_PARTS:
                self._parts.clear()
            self._parts[served] = part
        return part

    def refresh(self, now: float) -> None:
        """Places anew whose breaker or Retry-After moved, and whose time has come."""
        stirs = self._roster.stirs
        if stirs != self._seen:
            self._catch_up(stirs, now)
        heap = self._heap
        while heap and heap[0][0] <= now:
            at, key = heappop(heap)
            if self._wakes.get(key) == at:  # else it was placed anew since
                self._place(self._by_key[key], now)

    def probe(self, tried: Collection[EndpointKey], now: float) -> Node | None:
        """A node that would lend a probe now, not among `tried`; None if there is none."""
        found: Node | None = None
        lent: list[Node] = []
        for node in self.due.values():
            if node.key in tried:
                continue
            if node.breaker.can_probe(now):
                found = node
                break
            lent.append(node)
        for node in lent:
            self._place(node, now)
        return found

    def may_serve(self, tried: Collection[EndpointKey], now: float) -> bool:
        """Whether a node that was not `tried` could take a request now, as a probe or otherwise."""
        return self.has_ready(tried) or (bool(self.due) and self.probe(tried, now) is not None)

    def has_ready(self, tried: Collection[EndpointKey]) -> bool:
        """Whether a node that was not `tried` takes any request, and not a probe alone."""
        ready = self.ready.nodes
        if len(ready) > len(tried):
            return True
        return any(node.key not in tried for node in ready)

    def has(self, node: Node) -> bool:
        """Whether the node is in it, whatever may be done with it."""
        return self._by_key.get(node.key) is node

    def left(self, node: Node) -> None:
        """One request less runs there: of very many, `has_room` looks at this one first."""
        place = self.ready.place(node)
        if place is not None:
            self._roomy = place

    def has_room(self, now: float) -> bool:
        """Whether a node is below its limit, or would lend a probe. Of very many it looks at a part, each time the
        next one, and first at the one that had room last."""
        nodes = self.ready.nodes
        count = len(nodes)
        at = self._roomy
        for _ in range(min(count, LOOKS)):
            if at >= count:
                at = 0
            node = nodes[at]
            if node.in_flight < node.limit:
                self._roomy = at
                return True
            at += 1
        self._roomy = at
        return bool(self.due) and self.probe((), now) is not None

    def refusal(self, tried: Collection[EndpointKey], now: float) -> Unavailable:
        """Why none that was not `tried` can serve."""
        if len(self.nodes) <= MANY:
            return self._look(tried, now)
        asked = tuple(tried)
        refusal = self._refusal
        if refusal is None or now >= self._retold_until or asked != self._retold_for:
            refusal = self._refusal = self._look(tried, now)
            self._retold_for = asked
            self._retold_until = now + RETOLD_S
            if refusal.retry_at is not None:
                self._retold_until = min(self._retold_until, refusal.retry_at)
        return refusal

    def _catch_up(self, stirs: int, now: float) -> None:
        # More changes than nodes: looking at each node once is less.
        moved = self._roster.since(self._seen) if stirs - self._seen <= len(self.nodes) else None
        self._seen = stirs
        if moved is None:
            for node in self.nodes:
                self._place(node, now)
            return
        for key in moved:
            found = self._by_key.get(EndpointKey(key))
            if found is not None:
                self._place(found, now)

    def _place(self, node: Node, now: float) -> None:
        key, at = node.key, node.overload_until
        passes = node.breaker.passes
        if not passes:
            at = max(at, node.breaker.probe_at(now))
        if passes and at <= now:
            self.ready.add(node)
            if node.endpoint.local:
                self.local.add(node)
        else:
            self.ready.discard(node)
            self.local.discard(node)
        if not passes and at <= now:
            self.due[key] = node
        else:
            self.due.pop(key, None)
        if not now < at < inf:
            self._wakes.pop(key, None)
        elif self._wakes.get(key) != at:
            self._wakes[key] = at
            heappush(self._heap, (at, key))
            if len(self._heap) > 2 * len(self.nodes) + SLACK:
                self._heap = [(when, name) for name, when in self._wakes.items()]
                heapify(self._heap)

    def _look(self, tried: Collection[EndpointKey], now: float) -> Unavailable:
        if self.unknown_model:
            return Unavailable(Reason.UNKNOWN_MODEL, None)
        earliest = inf
        overloaded = False
        for node in self.nodes:
            if node.key in tried:
                continue
            if node.breaker.passes or node.breaker.can_probe(now):
                overloaded = True
                earliest = min(earliest, node.overload_until)
            else:
                earliest = min(earliest, max(node.overload_until, node.breaker.retry_at(now)))
        if earliest == inf:
            return Unavailable(Reason.NO_ENDPOINT, None)
        return Unavailable(Reason.OVERLOADED if overloaded else Reason.BREAKER_OPEN, earliest)


def _serves(kind: Kind, model: str) -> bool:
    """Whether policy and engine both have `model`."""
    globs, reported = kind
    return (reported is None or model in reported) and matches(globs, model)
