"""Which endpoint a request goes to: filter, score, rank; and a session's preference for where its cache is.

Filter: serves the model, has the version, is not draining, was not tried by this request, is outside its Retry-After,
and its breaker lets it. Score: in-flight plus the engine's own queue. Rank: the better of two random ones, and not the
best of all: everybody's best is the same node, and a herd follows it before its numbers change. Two at random also
look at two nodes and not ten thousand; all are visited only when several draws found nobody, and that nobody can
serve is remembered until a breaker moves.

1. A node that may be probed gets the next request, before any score, whatever that request's session is: otherwise
   the nodes that are well keep everything and no open breaker would ever close. Re-sent requests are spared: they
   probe only if nothing else is left.
2. Affinity is a preference. A bound session goes to its node while that node may serve. If the node's breaker
   refuses, or it drains, is gone, or has a version that was not chosen, the session *moves* at once. If the node is
   merely full, was tried by this request, or lacks this request's model, the request goes elsewhere and the binding
   stays: those pass, and a move costs the cache twice.
3. With `return_home` a moved session goes back as soon as the node it left may serve again. It leaves only what
   refuses and returns only to what does not, so it moves once per trip and once per recovery: no ping-pong. Without
   `return_home` it stays where it moved to.
4. `pick` writes nothing but the node's permit. `bind` writes the binding, once the node has accepted. A probe binds
   nobody: what is on trial may refuse the session's next request.
5. When nobody can serve, the reason speaks of the nodes that this request has not tried: all open, `breaker_open` and
   the earliest probe; any of them only full, `overloaded` and the earliest of all; none left, `no_endpoint`.
"""

from collections.abc import Callable, Collection
from math import inf
from typing import Final, Literal

import msgspec

from sidecar.core.breaker import OUTSIDER, Permit
from sidecar.core.fleet import Node, Pool, ServiceState, Session
from sidecar.kernel.errors import Reason
from sidecar.kernel.ids import EndpointKey, VersionName

FEW: Final = 8  # up to this many nodes, visiting all costs less than drawing again
DRAWS: Final = 10  # pairs drawn of more than that: with two nodes of three open, 1 request in 3,000 visits all

Affinity = Literal["", "bound", "moved", "returned"]


class Choice:
    """A node, its breaker's permit (to be given back through `node.breaker.record`), and what it means to the session.

    `affinity` "" is a first binding, or a detour that leaves the binding as it is. `left` is the node that a moved
    session leaves, for `bind`.
    """

    __slots__ = ("affinity", "left", "node", "permit")

    def __init__(
        self,
        node: Node,
        permit: Permit,
        affinity: Affinity = "",
        left: EndpointKey | None = None,
    ) -> None:
        self.node = node
        self.permit = permit
        self.affinity = affinity
        self.left = left


class Unavailable(msgspec.Struct, frozen=True):
    """Nobody can serve: `breaker_open`, `overloaded`, `unknown_model` or `no_endpoint`.

    `retry_at` is monotonic seconds, or None where waiting does not help.
    """

    reason: Reason
    retry_at: float | None


def pick(
    service: ServiceState,
    session: Session | None,
    version: VersionName | None,
    model: str,
    tried: Collection[EndpointKey],
    now: float,
    chance: Callable[[], float],
    *,
    may_probe: bool = True,
) -> Choice | Unavailable:
    """Chooses a node and takes its permit. `version` None: any. Writes nothing else.

    `may_probe` False: the request's end proves nothing (it is no inference). It takes no probe's place; if nobody else
    is left, it goes to a node whose wait is over, beside the probes.
    """
    pool = service.pool(model, version)
    if not service.sticky:
        session = None
    if not tried:
        if now >= pool.probe_at or service.roster.stirs != pool.stirs:
            node = _probe(service, pool, tried, now) if may_probe else None
            if node is not None:
                return _choose(service, session, node, version, now)
        elif may_probe and now < pool.refused_until:
            return Unavailable(Reason.BREAKER_OPEN, pool.refused_until)
    if session is not None and session.node_key is not None:
        choice = _preferred(service, session, pool, tried, now)
        if choice is not None:
            return choice
    node = _draw(pool.local, tried, now, chance) if pool.local and service.local_first else None
    if node is None:
        node = _draw(pool.nodes, tried, now, chance)
    if node is None and not may_probe:
        for waited in pool.nodes:
            if waited.breaker.waited(now) and waited.overload_until <= now and waited.key not in tried:
                return Choice(waited, OUTSIDER)
    elif node is None and tried:
        node = _probe(service, pool, tried, now)
    if node is None:
        return _unavailable(pool, tried, now)
    return _choose(service, session, node, version, now)


def bind(session: Session, choice: Choice, now: float) -> None:
    """Writes where the session is, after the node accepted. A choice that another request overtook changes nothing."""
    key = choice.node.key
    if choice.permit.probe:
        return
    if choice.affinity == "moved":
        if session.node_key != choice.left:
            return
        # The first home counts: a session that had to move twice still returns to where its cache is.
        if session.home_key is None:
            session.home_key = choice.left
        elif session.home_key == key:
            session.home_key = None
        session.node_key = key
    elif choice.affinity == "returned":
        session.node_key = key
        session.home_key = None
    elif session.node_key is None:
        session.node_key = key
    else:
        return
    session.version = choice.node.version
    session.seen_at = now


def _usable(node: Node, tried: Collection[EndpointKey], now: float) -> bool:
    return node.breaker.passes and node.overload_until <= now and node.key not in tried


def _probe(service: ServiceState, pool: Pool, tried: Collection[EndpointKey], now: float) -> Node | None:
    """A node of `pool` whose breaker would lend a probe now."""
    earliest = inf
    for key, breaker in service.roster.not_closed.items():
        node = service.nodes.get(EndpointKey(key))
        if node is None or breaker.passes or node not in pool.members or key in tried:
            continue
        at = max(breaker.probe_at(now), node.overload_until)
        if at <= now:
            return node
        earliest = min(earliest, at)
    if not tried:
        pool.stirs = service.roster.stirs
        pool.probe_at = earliest
        pool.refused_until = -inf
    return None


def _preferred(
    service: ServiceState,
    session: Session,
    pool: Pool,
    tried: Collection[EndpointKey],
    now: float,
) -> Choice | None:
    """The session's home if it is time to return, else the node it is bound to, if that may serve."""
    if session.home_key is not None and service.return_home:
        home = service.nodes.get(session.home_key)
        if home is not None and _usable(home, tried, now) and home in pool.members:
            permit = home.breaker.acquire(now)
            if isinstance(permit, Permit):
                return Choice(home, permit, "returned")
    key = session.node_key
    bound = None if key is None else service.nodes.get(key)
    if bound is None or not _usable(bound, tried, now) or bound not in pool.members:
        return None
    permit = bound.breaker.acquire(now)
    return Choice(bound, permit, "bound") if isinstance(permit, Permit) else None


def _draw(
    nodes: tuple[Node, ...], tried: Collection[EndpointKey], now: float, chance: Callable[[], float]
) -> Node | None:
    """The less loaded of two usable nodes at random; None if there is no usable one."""
    count = len(nodes)
    if count > 1:
        for _ in range(DRAWS if count > FEW else 1):
            first = int(chance() * count)
            second = int(chance() * (count - 1))
            if second >= first:
                second += 1
            one, other = nodes[first], nodes[second]
            if _usable(one, tried, now):
                if _usable(other, tried, now):
                    return other if other.in_flight + other.waiting < one.in_flight + one.waiting else one
                return one
            if _usable(other, tried, now):
                return other
    usable = [node for node in nodes if _usable(node, tried, now)]
    if not usable:
        return None
    first = int(chance() * len(usable))
    second = int(chance() * len(usable))
    one, other = usable[first], usable[second]
    return other if other.in_flight + other.waiting < one.in_flight + one.waiting else one


def _choose(
    service: ServiceState, session: Session | None, node: Node, version: VersionName | None, now: float
) -> Choice | Unavailable:
    permit = node.breaker.acquire(now)
    if not isinstance(permit, Permit):
        return Unavailable(Reason.BREAKER_OPEN, permit.retry_at)
    if session is None or session.node_key is None:
        return Choice(node, permit)
    key = session.node_key
    if node.key == key:
        return Choice(node, permit, "bound")
    if permit.probe:
        return Choice(node, permit)
    bound = service.nodes.get(key)
    if bound is None or bound.draining or not bound.breaker.passes:
        return Choice(node, permit, "moved", key)
    if version is not None and bound.version != version and bound.overload_until <= now:
        return Choice(node, permit, "moved", key)
    return Choice(node, permit)


def _unavailable(pool: Pool, tried: Collection[EndpointKey], now: float) -> Unavailable:
    if pool.unknown_model:
        return Unavailable(Reason.UNKNOWN_MODEL, None)
    earliest = inf
    overloaded = False
    for node in pool.nodes:
        if node.key in tried:
            continue
        if node.breaker.passes or node.breaker.can_probe(now):
            overloaded = True
            earliest = min(earliest, node.overload_until)
        else:
            earliest = min(earliest, max(node.overload_until, node.breaker.retry_at(now)))
    if earliest == inf:
        return Unavailable(Reason.NO_ENDPOINT, None)
    if overloaded:
        return Unavailable(Reason.OVERLOADED, earliest)
    if not tried:
        pool.refused_until = earliest
    return Unavailable(Reason.BREAKER_OPEN, earliest)
