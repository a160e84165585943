"""Which version a request goes to: weighted rendezvous hashing of its session, and chance for the rest.

Rendezvous and not `hash(session) % 100`: when a version's part grows, sessions move only towards it, and every sidecar
gives the same answer without having been told. (Weighted form: the highest of -part / ln(u), with u uniform from the
hash of session and version; Schindelhauer and Schomaker, SPAA 2005.)

1. A version whose part is 0, or that the policy no longer names, is never used, whatever a session remembers: an
   aborted canary stays aborted.
2. A session stays on the version that it was bound to while that one has a part and a node that may serve.
3. A version none of whose nodes may serve now (open, draining, full) is passed over. If that is true of all, one is
   chosen as if it were not, so that the answer is the reason why it cannot serve.
"""

from collections.abc import Callable, Collection
from hashlib import blake2b
from math import log

from sidecar.core.service import ServiceState, Session
from sidecar.kernel.ids import EndpointKey, SessionId, VersionName


def pick_version(
    service: ServiceState,
    session: Session | None,
    model: str,
    tried: Collection[EndpointKey],
    now: float,
    chance: Callable[[], float],
) -> VersionName | None:
    """The version to use; None where the policy splits nothing. `chance` is asked only without a session.

    A version is passed over while none of its nodes that have `model` may serve, or all were `tried` by this request.
    """
    split = service.split
    if not split:
        return None
    if session is not None and session.version is not None:
        for version, _ in split:
            if version == session.version and may_serve(service, version, model, tried, now):
                return version
    if len(split) == 1:
        return split[0][0]
    serving = [entry for entry in split if may_serve(service, entry[0], model, tried, now)] or list(split)
    return _by_chance(serving, chance) if session is None else rendezvous(serving, session.id)


def may_serve(
    service: ServiceState, version: VersionName, model: str, tried: Collection[EndpointKey], now: float
) -> bool:
    """Whether some node of a version that has `model` and was not `tried` could take a request now."""
    pool = service.pool(model, version)
    pool.refresh(now)
    return pool.may_serve(tried, now)


def may_move(service: ServiceState, model: str, tried: Collection[EndpointKey], now: float) -> bool:
    """Whether a request that is under way might do better on a node it has not `tried`: of a version that is used, and
    none that is on trial."""
    versions: list[VersionName | None] = [version for version, _ in service.split]
    for version in versions or [None]:
        pool = service.pool(model, version)
        pool.refresh(now)
        if pool.has_ready(tried):
            return True
    return False


def rendezvous(split: list[tuple[VersionName, float]], session: SessionId) -> VersionName:
    """The version that a session belongs to. `split` is not empty, its parts are positive."""
    best, best_score = split[0][0], -1.0
    for version, part in split:
        digest = blake2b(f"{version}\0{session}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
        score = score_of(part, int.from_bytes(digest) // 2048)
        if score > best_score:
            best, best_score = version, score
    return best


def score_of(part: float, number: int) -> float:
    """How strongly a version of this part asks for a session whose hash with it is `number`, of 2^53; the highest wins.

    Over all numbers a version wins in proportion to its part, to within what a double can say.
    """
    # Half a step up keeps u inside (0, 1): ln(0) and ln(1) have no score.
    return -part / log((number + 0.5) / (1 << 53))


def _by_chance(split: list[tuple[VersionName, float]], chance: Callable[[], float]) -> VersionName:
    left = chance() * sum(part for _, part in split)
    for version, part in split:
        left -= part
        if left < 0:
            return version
    return split[-1][0]
