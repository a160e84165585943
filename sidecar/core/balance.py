"""Which endpoint a request goes to: filter, score, rank; and a session's preference for where its cache is.

Filter: serves the model, has the version, is not draining, was not tried by this request, is outside its Retry-After,
and its breaker lets it; a pool (`pool`) keeps those that are left at hand. Score: in-flight plus the engine's own
queue. Rank: the better of two random ones, and not the best of all: everybody's best is the same node, and a herd
follows it before its numbers change. Two at random also look at two nodes and not ten thousand. All are visited only
to say why nobody can serve, and of many that is said again for a moment without looking.

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
from typing import Final, Literal

from sidecar.core.breaker import OUTSIDER, Permit
from sidecar.core.fleet import Node, Pool, ServiceState, Session
from sidecar.core.pool import Unavailable as Unavailable
from sidecar.kernel.errors import Reason
from sidecar.kernel.ids import EndpointKey, VersionName

FEW: Final = 8  # up to this many nodes, visiting all costs less than drawing again
DRAWS: Final = 10  # pairs drawn of more than that: a request has tried a few at most

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
    pool.refresh(now)
    if not service.sticky:
        session = None
    if pool.due and may_probe and not tried:
        node = pool.probe(tried, now)
        if node is not None:
            return _choose(service, session, node, version, now)
    if session is not None and session.node_key is not None:
        choice = _preferred(service, session, pool, tried, now, chance)
        if choice is not None:
            return choice
    node = _draw(pool.local.nodes, tried, now, chance) if service.local_first else None
    # Who is alone is drawn whatever its share: it has nobody to leave a request to but those that are not local.
    if node is None or (len(pool.local.nodes) == 1 < len(pool.ready.nodes) and _yields(node, now, chance)):
        node = _draw(pool.ready.nodes, tried, now, chance)
    if node is None and not may_probe:
        for waited in pool.nodes:
            if waited.breaker.waited(now) and waited.overload_until <= now and waited.key not in tried:
                return Choice(waited, OUTSIDER)
    elif node is None and tried:
        node = pool.probe(tried, now)
    if node is None:
        return pool.refusal(tried, now)
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


def _preferred(
    service: ServiceState,
    session: Session,
    pool: Pool,
    tried: Collection[EndpointKey],
    now: float,
    chance: Callable[[], float],
) -> Choice | None:
    """The session's home if it is time to return, else the node it is bound to, if that may serve."""
    if session.home_key is not None and service.return_home:
        home = pool.ready.get(session.home_key)
        if home is not None and home.key not in tried and not _yields(home, now, chance):
            permit = home.breaker.acquire(now)
            if isinstance(permit, Permit):
                return Choice(home, permit, "returned")
    key = session.node_key
    bound = None if key is None else pool.ready.get(key)
    if bound is None or key in tried or _yields(bound, now, chance):
        return None
    permit = bound.breaker.acquire(now)
    return Choice(bound, permit, "bound") if isinstance(permit, Permit) else None


def _yields(node: Node, now: float, chance: Callable[[], float]) -> bool:
    """Whether an endpoint that has just recovered leaves this request to another."""
    breaker = node.breaker
    return now < breaker.ramp_until and chance() >= breaker.share(now)


def _draw(nodes: list[Node], tried: Collection[EndpointKey], now: float, chance: Callable[[], float]) -> Node | None:
    """The less loaded of two of `nodes` at random; None if all were tried."""
    count = len(nodes)
    if count > 1:
        for _ in range(DRAWS if count > FEW else 1):
            first = int(chance() * count)
            second = int(chance() * (count - 1))
            if second >= first:
                second += 1
            one, other = nodes[first], nodes[second]
            if not tried or (one.key not in tried and other.key not in tried):
                if other.in_flight + other.waiting < one.in_flight + one.waiting:
                    return one if _yields(other, now, chance) else other
                return other if _yields(one, now, chance) else one
    rest = [node for node in nodes if node.key not in tried] if tried else nodes
    if len(rest) < 2:
        return rest[0] if rest else None
    one, other = rest[int(chance() * len(rest))], rest[int(chance() * len(rest))]
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
