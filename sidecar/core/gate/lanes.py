"""The lanes of a gate with their classes and tenants, and what becomes of them when policies and endpoints change.

1. A lane is found by what its endpoints serve and not by who they are (`Pool.kinds`): they come and go, and who waits
   keeps his place. Where other endpoints have a model now, those who ask for it follow (`follow`).
2. A class is found by its name: it keeps what is known of it. Those of a class that is gone wait on in `default`.
3. Memory is bounded: tenants of whom nobody waits or runs are an LRU, over all classes and lanes; lanes in which nobody
   does are forgotten when there are too many.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from sidecar.core.classes import Classes
from sidecar.core.gate.parts import Parts
from sidecar.core.gate.turns import Group, Lane, LaneKey, Share, Standing, Ticket
from sidecar.core.pool import Pool, Without
from sidecar.kernel.ids import VersionName
from sidecar.policy.schema import DEFAULT_CLASS, Admission

MAX_TENANTS: Final = 100_000  # remembered while they are idle
MAX_LANES: Final = 256  # remembered while nobody waits or runs in them

PoolOf = Callable[[str, VersionName | None, Without], Pool]
"""The pool of a model and version without some engines, as `ServiceState.pool` gives it."""


class Lanes:
    """All lanes of one gate. `standings`: of the classes, in their order; `busy`: the lanes in which somebody waits;
    `tenants`: how many are remembered, each once for a class and lane. `parts` None: each class is shared for itself.
    """

    __slots__ = ("_by_pool", "_idle", "_weights", "busy", "lanes", "parts", "standings", "tenants")

    def __init__(self) -> None:
        self.standings: list[Standing] = []
        self.lanes: dict[LaneKey, Lane] = {}
        self.busy: dict[Lane, None] = {}
        self.tenants = 0
        self.parts: Parts | None = None
        self._weights: dict[str, float] = {}
        self._by_pool: dict[Pool, Lane] = {}
        self._idle: OrderedDict[Share, None] = OrderedDict()
        """Tenants of whom nobody waits or runs, the longest first."""

    def use(self, policy: Admission, classes: Classes, now: float) -> None:
        """Takes a new policy."""
        if policy.tenant_weights != self._weights:
            self._weights = dict(policy.tenant_weights)
            for lane in self.lanes.values():
                for group in lane.groups:
                    for share in group.shares.values():
                        share.weight = self._weights.get(share.tenant, 1.0)
            if self.parts is not None:
                self.parts.weigh(self._weights)
        if [standing.qos for standing in self.standings] != list(classes.all):
            self._reclass(classes, now)
        if (policy.fairness == "service") is not (self.parts is not None):
            self._repart(Parts(now) if policy.fairness == "service" else None, now)

    def lane_of(self, pool: Pool, version: VersionName | None, without: Without, now: float) -> Lane:
        """Where those wait who wait for these endpoints."""
        lane = self._by_pool.get(pool)
        if lane is not None:
            return lane
        key = version, without, pool.kinds
        lane = self.lanes.get(key)
        if lane is None:
            if len(self.lanes) >= MAX_LANES:
                self._forget_lanes(now)
            lane = self.lanes[key] = Lane(key, pool, self.standings, now)
        else:
            self._by_pool.pop(lane.pool, None)
            lane.pool = pool
        self._by_pool[pool] = lane
        return lane

    def group_of(self, ticket: Ticket, lane: Lane) -> Group:
        """The ticket's class there, as it is now: it may have been looked up before a reload."""
        groups, index = lane.groups, ticket.qos.index
        if index < len(groups) and groups[index].qos is ticket.qos:
            return groups[index]
        found = groups[0]
        for group in groups:
            if group.qos.name == ticket.qos.name:
                found = group
                break
            if group.qos.name == DEFAULT_CLASS:
                found = group
        ticket.qos = found.qos
        return found

    def share_of(self, group: Group, tenant: str, now: float) -> Share:
        """The tenant's share of a class there, made if need be; the one idle longest of too many is forgotten."""
        share = group.shares.get(tenant)
        if share is not None:
            return share
        share = group.shares[tenant] = Share(tenant, self._weights.get(tenant, 1.0), group)
        if self.parts is not None:
            share.payer = self.parts.of(tenant, share.weight)
        self._idle[share] = None
        self.tenants += 1
        while self.tenants > MAX_TENANTS and len(self._idle) > 1:
            oldest, _ = self._idle.popitem(last=False)
            del oldest.group.shares[oldest.tenant]
            self.tenants -= 1
            if self.parts is not None and oldest.payer is not None:
                self.parts.forget(oldest.payer)
        return share

    def wakes(self, share: Share) -> None:
        """Something of it waits or runs from now on, if nothing did."""
        if share in self._idle:
            del self._idle[share]
            if self.parts is not None and share.payer is not None:
                self.parts.comes(share.payer)

    def rests(self, share: Share, now: float) -> None:
        """If nothing of it waits or runs any more."""
        if share.running or share.queued or share.group.gone or share in self._idle:
            return
        self._idle[share] = None
        if self.parts is not None and share.payer is not None:
            self.parts.goes(share.payer, now)

    def follow(self, lane: Lane, pool: Pool, pool_of: PoolOf, now: float) -> None:
        """The pool was made anew. Where other endpoints have these models now, the tickets go where they belong."""
        version, without, kinds = lane.key
        if pool.kinds == kinds:
            self.lane_of(pool, version, without, now)
            return
        for ticket in emptied(lane):
            index, share = ticket.qos.index, ticket.share
            assert share is not None
            self.rests(share, now)
            version, without = ticket.version, ticket.without
            there = self.lane_of(pool_of(ticket.model, version, without), version, without, now)
            self._put_back(there.groups[index], ticket, now)
        if not lane.queued:
            self.busy.pop(lane, None)

    def sort(self, now: float) -> None:
        """Puts those in their place who went behind, or came back."""
        parts = self.parts
        if parts is None:
            return
        parts.look(now)
        for payer in parts.turned:
            for lane in self.busy:
                for group in lane.groups:
                    share = group.shares.get(payer.tenant)
                    if share is not None and share.queued:
                        group.offer(share)
        parts.turned.clear()

    def _forget_lanes(self, now: float) -> None:
        """Those in which nobody waits or runs."""
        for lane in list(self.lanes.values()):
            if not lane.queued and not lane.running:
                del self.lanes[lane.key]
                self._by_pool.pop(lane.pool, None)
                for group in lane.groups:
                    self._forget_group(group, now)

    def _forget_group(self, group: Group, now: float) -> None:
        group.gone = True
        self.tenants -= len(group.shares)
        for share in group.shares.values():
            rested = share in self._idle
            self._idle.pop(share, None)
            if self.parts is not None and share.payer is not None:
                if not rested:
                    self.parts.goes(share.payer, now)
                self.parts.forget(share.payer)
                share.payer = None
        group.shares = {}

    def _put_back(self, group: Group, ticket: Ticket, now: float) -> None:
        """It waits on, in another lane or class."""
        share = self.share_of(group, ticket.tenant, now)
        self.wakes(share)
        if not group.lane.queued:
            group.lane.model = ticket.model
        self.busy[group.lane] = None
        group.push(ticket, share)

    def _repart(self, parts: Parts | None, now: float) -> None:
        """From now on tenants have a part of the service, or none."""
        self.parts = parts
        for lane in self.lanes.values():
            for group in lane.groups:
                for share in group.shares.values():
                    share.payer = None
                    if parts is not None:
                        share.payer = parts.of(share.tenant, share.weight)
                        if share not in self._idle:
                            parts.comes(share.payer)
                    if share.queued:
                        group.offer(share)

    def _reclass(self, classes: Classes, now: float) -> None:
        """The classes are others: each takes over what is known of the one of its name, `default` of those gone."""
        known = {standing.qos.name: standing for standing in self.standings}
        standings: list[Standing] = []
        for qos in classes.all:
            standing = known.pop(qos.name, None)
            if standing is None:
                standing = Standing(qos)
            standing.qos = qos
            standings.append(standing)
        for standing in standings:
            others = [each for each in standings if each.qos.priority == standing.qos.priority]
            standing.rivals = len(others) > 1
        heir = standings[classes.default.index]
        for gone in known.values():
            gone.heir = heir
            heir.running += gone.running
            gone.evictable.clear()
        self.standings = standings
        for lane in self.lanes.values():
            self._reclass_lane(lane, now)

    def _reclass_lane(self, lane: Lane, now: float) -> None:
        waiting = emptied(lane)
        before = {group.standing: group for group in lane.groups}
        groups: list[Group] = []
        for standing in self.standings:
            group = before.pop(standing, None)
            if group is None:
                group = Group(standing, lane)
            group.qos = standing.qos
            groups.append(group)
        lane.groups = groups
        # What each had was among other rivals: they begin anew, all alike.
        lane.starts = [0.0] * len(lane.starts)
        for group in groups:
            group.counter = 0.0
        for gone in before.values():
            self._forget_group(gone, now)
        for ticket in waiting:
            share = ticket.share
            assert share is not None
            standing = heir_of(share.group.standing)
            self.rests(share, now)
            ticket.qos = standing.qos
            self._put_back(groups[standing.qos.index], ticket, now)
        if not lane.queued:
            self.busy.pop(lane, None)


def emptied(lane: Lane) -> list[Ticket]:
    """All that wait in the lane, in the order in which they came; they keep their share, and are in no queue."""
    waiting: list[Ticket] = []
    for group in lane.groups:
        while (head := group.head) is not None and (share := head.share) is not None:
            group.remove(head, share)
            waiting.append(head)
    waiting.sort(key=number_of)
    return waiting


def heir_of(standing: Standing) -> Standing:
    """Who has its place, after reloads without it."""
    while (heir := standing.heir) is not None:
        standing = heir
    return standing


def number_of(ticket: Ticket) -> int:
    """The order in which they came."""
    return ticket.number
