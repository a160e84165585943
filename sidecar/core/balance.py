"""Which endpoint a request goes to: filter, score, rank; and a session's preference for where its cache is.

Filter: serves the model, has the version, is not draining, was not tried by this request, is outside its Retry-After,
and its breaker lets it; a pool (`pool`) keeps those that are left at hand. Score: in-flight plus the engine's own
queue. Rank: the better of two random ones, and not the best of all: everybody's best is the same node, and a herd
follows it before its numbers change. Two at random also look at two nodes and not ten thousand. All are visited only
to say why nobody can serve, and of many that is said again for a moment without looking.

1. A node that may be probed gets the next request, before any score, whatever that request's session is: otherwise
   the nodes that are well keep everything and no open breaker would ever close. Re-sent requests are spared: they
   probe only if nothing else is left. (Nodes that cannot do what it asks make no request a re-sent one.)
2. Affinity is a preference. A bound session goes to its node while that node may serve. If the node's breaker
   refuses, or it drains, is gone, or has a version that was not chosen, the session *moves* at once. If the node is
   merely full, was tried by this request (or cannot do what it asks, which counts as tried), or lacks this request's
   model, the request goes elsewhere, to another version too, and the binding stays: those pass, and a move costs the
   cache twice.
3. With `return_home` a moved session goes back as soon as the node it left may serve again. It leaves only what
   refuses and returns only to what does not, so it moves once per trip and once per recovery: no ping-pong. Without
   `return_home` it stays where it moved to.
4. `pick` writes nothing but the node's permit. `bind` writes the binding, once the node has accepted. A probe binds
   nobody: what is on trial may refuse the session's next request.
5. Endpoints of a zone that is turned down get their `share` of what they would: each is drawn by its share, and
   compared with none of another share, for the lighter load of those that are spared would win every comparison. Of
   the sessions bound there as many stay, always the same ones; the others move as if it were open, and return as the
   share grows. Local ones that a request leaves so are left for endpoints with more. Nobody leaves who has nowhere
   better to go, and probes come first as ever.
6. Who is at its limit (`limit`) is passed over while another is not: drawn and full, the next one with room serves. A
   bound session goes elsewhere meanwhile, and its binding stays. If all are full the limits are ignored: who may enter
   was decided before (`admit`). In shadow they are, too: nobody goes elsewhere for what is not in force.
7. When nobody can serve, the reason speaks of the nodes that this request has not tried: all open, `breaker_open` and
   the earliest probe; any of them only full, `overloaded` and the earliest of all; none left, `no_endpoint`.
"""

from collections.abc import Callable, Collection
from hashlib import blake2b
from typing import Final, Literal

from sidecar.core.breaker import OUTSIDER, Permit
from sidecar.core.pool import Node, Pool
from sidecar.core.pool import Unavailable as Unavailable
from sidecar.core.service import ServiceState, Session
from sidecar.kernel.errors import Reason
from sidecar.kernel.ids import EndpointKey, SessionId, VersionName

FEW: Final = 8  # up to this many nodes, visiting all costs less than drawing again
DRAWS: Final = 10  # pairs drawn of more than that: a request has tried a few at most
SHARE_DRAWS: Final = 16  # of one by its share, before all are looked at
PARTNER_DRAWS: Final = 4  # of another of the same share: with most zones as they were, the first is one nearly always
NOBODY: Final = -1.0  # a share that all are above

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
    barred: int = 0,
) -> Choice | Unavailable:
    """Chooses a node and takes its permit. `version` None: any. Writes nothing else.

    `may_probe` False: the request's end proves nothing (it is no inference). It takes no probe's place; if nobody else
    is left, it goes to a node whose wait is over, beside the probes. `barred`: so many of `tried` were never asked.
    """
    pool = service.pool(model, version)
    pool.refresh(now)
    if not service.sticky:
        session = None
    if pool.due and may_probe and len(tried) <= barred:
        due = pool.probe(tried, now)
        if due is not None:
            return _choose(service, session, due, version, tried, now)
    if session is not None and session.node_key is not None:
        choice = _preferred(service, session, pool, tried, now, chance)
        if choice is not None:
            return choice
    if service.turned:
        node = _turned(service, session, pool, tried, now, chance)
    else:
        node = _draw(pool.local.nodes, tried, now, chance) if service.local_first else None
        # Who is alone is drawn whatever its share: it has nobody to leave a request to but those that are not local.
        if node is None or (len(pool.local.nodes) == 1 < len(pool.ready.nodes) and _yields(node, now, chance)):
            node = _draw(pool.ready.nodes, tried, now, chance)
    if node is not None and node.in_flight >= node.limit:
        node = _with_room(service, pool, tried, chance) or node
    if node is None and not may_probe:
        for waited in pool.nodes:
            if waited.breaker.waited(now) and waited.overload_until <= now and waited.key not in tried:
                return Choice(waited, OUTSIDER)
    elif node is None and tried:
        node = pool.probe(tried, now)
    if node is None:
        return pool.refusal(tried, now)
    return _choose(service, session, node, version, tried, now)


def bind(session: Session, choice: Choice, now: float) -> None:
    """Writes where the session is, after the node accepted. A choice that another request overtook changes nothing."""
    key = choice.node.key
    if choice.permit.probe:
        return
    share = choice.node.share
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
        share = 1.0  # it was bound there before the zone was turned down
    elif session.node_key is None:
        session.node_key = key
    else:
        return
    session.share = share
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
        if (
            home is not None
            and home.key not in tried
            and (home.share >= 1.0 or position(session.id) < home.share)
            and not _yields(home, now, chance)
            and (home.in_flight < home.limit or _in_shadow(service))
        ):
            permit = home.breaker.acquire(now)
            if isinstance(permit, Permit):
                return Choice(home, permit, "returned")
    key = session.node_key
    bound = None if key is None else pool.ready.get(key)
    if bound is None or key in tried or _yields(bound, now, chance) or (bound.share < 1.0 and _leaves(session, bound)):
        return None
    if bound.in_flight >= bound.limit and _with_room(service, pool, tried, chance) is not None:
        return None
    permit = bound.breaker.acquire(now)
    return Choice(bound, permit, "bound") if isinstance(permit, Permit) else None


def _yields(node: Node, now: float, chance: Callable[[], float]) -> bool:
    """Whether an endpoint that has just recovered leaves this request to another."""
    breaker = node.breaker
    return now < breaker.ramp_until and chance() >= breaker.share(now)


def position(session: SessionId) -> float:
    """Where a session stands among all, 0-1, the same on every sidecar: those below a zone's share stay in it."""
    digest = blake2b(f"zone\0{session}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest) // 2048) / (1 << 53)


def _leaves(session: Session, bound: Node) -> bool:
    """Whether a session bound to an endpoint that is turned down is one of those that move: as many stay as its share
    has become less since the session was bound."""
    return position(session.id) * session.share >= bound.share


def _turned(
    service: ServiceState,
    session: Session | None,
    pool: Pool,
    tried: Collection[EndpointKey],
    now: float,
    chance: Callable[[], float],
) -> Node | None:
    """`pick`'s draw while a zone is turned down."""
    bound: Node | None = None
    if session is not None and session.node_key is not None and session.node_key not in tried:
        bound = pool.ready.get(session.node_key)
        if bound is not None and bound.share >= 1.0:
            bound = None
    above = NOBODY if bound is None else bound.share
    if service.local_first and bound is None:
        local = _draw(pool.local.nodes, tried, now, chance)
        if local is not None and (local.share >= 1.0 or chance() < local.share):
            if not (len(pool.local.nodes) == 1 < len(pool.ready.nodes) and _yields(local, now, chance)):
                return local
        elif local is not None:
            above = local.share
    node = _draw_by_share(pool.ready.nodes, tried, now, chance, above)
    return bound if bound is not None and node is not None and node.share <= bound.share else node


def _draw_by_share(
    nodes: list[Node], tried: Collection[EndpointKey], now: float, chance: Callable[[], float], above: float
) -> Node | None:
    """One of `nodes` by their shares, or one less loaded of the same share; those `above` a share, if there are any."""
    count = len(nodes)
    first: Node | None = None
    for _ in range(SHARE_DRAWS if count else 0):
        node = nodes[int(chance() * count)]
        if node.share > above and (node.share >= 1.0 or chance() < node.share) and node.key not in tried:
            first = node
            break
    if first is None:
        first = _by_share(nodes, tried, chance, above)
        if first is None:
            return None
    for _ in range(PARTNER_DRAWS):
        other = nodes[int(chance() * count)]
        if other is not first and other.share == first.share and other.key not in tried:
            if other.in_flight + other.waiting < first.in_flight + first.waiting:
                return first if _yields(other, now, chance) else other
            return other if _yields(first, now, chance) else first
    return first


def _by_share(
    nodes: list[Node], tried: Collection[EndpointKey], chance: Callable[[], float], above: float
) -> Node | None:
    """The same by looking at all of them."""
    rest = [node for node in nodes if node.key not in tried]
    among = [node for node in rest if node.share > above] or rest
    total = 0.0
    for node in among:
        total += node.share
    if total <= 0.0:
        return among[int(chance() * len(among))] if among else None
    left = chance() * total
    for node in among:
        left -= node.share
        if left < 0.0:
            return node
    return among[-1]


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


def _with_room(
    service: ServiceState, pool: Pool, tried: Collection[EndpointKey], chance: Callable[[], float]
) -> Node | None:
    """The first one below its limit from a random place on, a local one if those come first; None: there is none, or
    limits are not in force."""
    if _in_shadow(service):
        return None
    for nodes in (pool.local.nodes, pool.ready.nodes) if service.local_first else (pool.ready.nodes,):
        count = len(nodes)
        at = int(chance() * count)
        for _ in range(count):
            node = nodes[at]
            if node.in_flight < node.limit and node.key not in tried:
                return node
            at = at + 1 if at + 1 < count else 0
    return None


def _in_shadow(service: ServiceState) -> bool:
    gate = service.gate
    return gate is not None and gate.mode == "shadow"


def _choose(
    service: ServiceState,
    session: Session | None,
    node: Node,
    version: VersionName | None,
    tried: Collection[EndpointKey],
    now: float,
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
    if bound.share < 1.0 and node.share > bound.share and _leaves(session, bound):
        return Choice(node, permit, "moved", key)
    if version is not None and bound.version != version and bound.overload_until <= now and key not in tried:
        return Choice(node, permit, "moved", key)
    return Choice(node, permit)
