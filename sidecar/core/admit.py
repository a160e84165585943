"""The gate of a service: who may run now, who waits for a turn, and who is told to come back or to go.

A pod has so many tokens a second to give. Beyond what its endpoints take at once (`Node.limit`, see `limit`) a request
either waits here or inside the engine, and an engine serves whoever came first: there, a voice stands behind a thousand
batches. So the queue is here, where classes, tenants and deadlines are known. The gate is pure: it is told what happens
and gives back tickets; whoever holds them calls nothing of it from inside.

1. A request whose endpoints have room, and before which nobody waits for the same endpoints, runs at once.
2. Else it waits, if there is a place. The higher priority goes first; classes of one priority share by their weights,
   tenants of a class by theirs, by tokens (`turns`).
3. Starvation is bounded: while the oldest request of some class is overdue (it has waited for its SLA, or half its
   longest wait if that is sooner), one in every ceil(1 / `reserve`) turns goes to the class whose oldest is overdue
   longest. So a class gets at least that part of the turns, once the requests that were overdue before its own had
   theirs, however many of a higher one wait; and who had such a turn is not evicted.
4. A full queue turns away the newest, but not the humblest first come: a request of a higher class takes the place of
   one of the lowest class that waits, and within a class the tenant that has most waiting gives way to one that has
   fewer. A flood fills the queue with its own, and is refused its own.
5. A class that is not preemptible is in its warning zone when its oldest request has waited so long that, with the
   time its first tokens usually take, `warning_ratio` of the SLA will be gone. Then preemptible ones get no turn beside
   it, and if nothing is free, as many of those that run and have not spoken are told to go: of the lowest priority
   first, of the tenant that runs most, and its newest. They run until they leave.
6. Waiting ends with `max_wait`; with `late: reject` also where the SLA cannot be met any more.
7. Where nobody can serve at all (breakers, no endpoint) nobody waits: each goes on and hears why. An endpoint that said
   it is full is waited for if it wants to be left alone for no longer than `HOLD_S`.
8. Requests whose endpoints differ do not wait for each other (`Lane`).
9. In shadow everybody runs. The queue is played: a request that would have waited stands in it without knowing, gets
   its turn when another leaves, and carries away what enforcing would have done with it.

Being turned away here is nobody's failure: no breaker hears of it.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from math import ceil, inf
from typing import Final

from sidecar.core.classes import Classes
from sidecar.core.pool import Pool
from sidecar.core.turns import (
    EVICTED,
    LEFT,
    OUT,
    QUEUED,
    RUNNING,
    Group,
    Lane,
    Lanes,
    Share,
    Standing,
)
from sidecar.core.turns import Ticket as Ticket
from sidecar.kernel.errors import Reason
from sidecar.kernel.ids import VersionName
from sidecar.policy.schema import DEFAULT_CLASS, Admission

MAX_TENANTS: Final = 100_000  # remembered while they are idle
MAX_LANES: Final = 256  # remembered while nobody waits or runs in them
MAX_TOLD: Final = 64  # turned away in one call: the event loop has other things to do as well
CANDIDATES: Final = 256  # of the newest that run, those who are looked at when some have to go
POLL_S: Final = 0.05  # room comes back without a word, too: a limit grows, a breaker closes
HOLD_S: Final = 5.0  # a Retry-After that ends within it is waited for
RETRY_LEAST_S: Final = 1.0
RETRY_MOST_S: Final = 60.0
RETRY_UNKNOWN_S: Final = 5.0  # while nobody has left yet
EVICTED_RETRY_S: Final = 1.0
_WHOLE: Final = 1.0 - 1e-9  # a turn: twenty times a twentieth must make one

_OVERLOADED: Final = Reason.OVERLOADED
_QUEUE_TIMEOUT: Final = Reason.QUEUE_TIMEOUT
_PREEMPTED: Final = Reason.PREEMPTED

PoolOf = Callable[[str, VersionName | None], Pool]
"""The pool of a model and version, as `ServiceState.pool` gives it."""


class TurnedAway:
    """No turn, or no longer: `overloaded`, `queue_timeout` or `preempted`. `retry_after_s` is an estimate."""

    __slots__ = ("detail", "reason", "retry_after_s")

    def __init__(self, reason: Reason, detail: str, retry_after_s: float) -> None:
        self.reason = reason
        self.detail = detail
        self.retry_after_s = retry_after_s


class ClassView:
    """A class as operators see it. `waiting_s`: its oldest request; `usual_s`: the time to a first token that it
    reckons with; `met` and `missed` are of its SLA."""

    __slots__ = (
        "met",
        "missed",
        "name",
        "overloaded",
        "preempted",
        "preemptible",
        "priority",
        "queue_timeout",
        "queued",
        "running",
        "sla_s",
        "turns",
        "usual_s",
        "waiting_s",
        "warning",
    )

    def __init__(self, standing: Standing) -> None:
        qos = standing.qos
        self.name = qos.name
        self.priority = qos.priority
        self.sla_s = qos.sla_s
        self.preemptible = qos.preemptible
        self.queued = standing.queued
        self.running = standing.running
        self.waiting_s = 0.0
        self.turns = standing.turns
        self.overloaded = standing.overloaded
        self.queue_timeout = standing.queue_timeout
        self.preempted = standing.preempted
        self.met = standing.met
        self.missed = standing.missed
        self.warning = False
        self.usual_s = standing.usual.careful_s


class GateView:
    """A gate as operators see it. `tenants`: those that are remembered, once for each class and set of endpoints."""

    __slots__ = ("classes", "mode", "queued", "running", "tenants", "turns")

    def __init__(self, gate: "Gate", classes: list[ClassView]) -> None:
        self.mode = gate.mode
        self.queued = gate.queued
        self.running = gate.running
        self.tenants = gate.tenants
        self.turns = gate.turns
        self.classes = classes


class Gate:
    """Who runs, who waits and who does neither. `queued`, `running`: requests; in shadow as if it were enforced.

    `mode` is `enforce` or `shadow`. A request's ticket is entered once and leaves once, from wherever it got to.
    """

    __slots__ = (
        "_busy",
        "_by_pool",
        "_credit",
        "_idle",
        "_lanes",
        "_leaving",
        "_number",
        "_owed",
        "_places",
        "_reserve",
        "_shed",
        "_standings",
        "_stirred",
        "_warning_ratio",
        "_weights",
        "mode",
        "queued",
        "running",
        "tenants",
        "turns",
    )

    def __init__(self, policy: Admission, classes: Classes, now: float) -> None:
        self.mode = "enforce"
        self.queued = 0
        self.running = 0
        self.tenants = 0
        self.turns = 0
        self._places = 0
        self._reserve = 0.0
        self._warning_ratio = 1.0
        self._weights: dict[str, float] = {}
        self._standings: list[Standing] = []
        self._lanes: dict[Lanes, Lane] = {}
        self._by_pool: dict[Pool, Lane] = {}
        self._busy: dict[Lane, None] = {}
        """Where somebody waits."""
        self._idle: OrderedDict[Share, None] = OrderedDict()
        """Tenants of whom nobody waits or runs, the longest first."""
        self._leaving: dict[int, Ticket] = {}
        """Told to go."""
        self._shed: deque[tuple[Ticket, TurnedAway]] = deque()
        """Out of the queue, and not told yet."""
        self._owed: deque[Ticket] = deque()
        """They have their turn, and `take` is to give them out: a reload ended their waiting."""
        self._number = 0
        self._stirred = False
        self._credit = 0.0
        """How much of a turn the overdue have earned."""
        self.use(policy, classes, now)

    def use(self, policy: Admission, classes: Classes, now: float) -> None:
        """Takes a new policy; whoever waits keeps his place, in `default` if his class is gone."""
        mode = "shadow" if policy.mode == "shadow" else "enforce"
        self._places = policy.queue
        self._reserve = policy.reserve
        self._warning_ratio = policy.warning_ratio
        if policy.tenant_weights != self._weights:
            self._weights = dict(policy.tenant_weights)
            for lane in self._lanes.values():
                for group in lane.groups:
                    for share in group.shares.values():
                        share.weight = self._weights.get(share.tenant, 1.0)
        if [standing.qos for standing in self._standings] != list(classes.all):
            self._reclass(classes)
        if mode != self.mode:
            self.mode = mode
            self._release(now)

    def enter(self, ticket: Ticket, pool: Pool, now: float) -> TurnedAway | bool:
        """True: it runs, and is to be sent before anything else is asked of the gate. False: it waits for `take`."""
        pool.refresh(now)
        lane = self._by_pool.get(pool)
        if lane is None:
            lane = self._lane_of(pool, ticket.version, now)
        index = ticket.qos.index
        group = lane.groups[index] if index < len(lane.groups) else None
        if group is None or group.qos is not ticket.qos:
            group = self._reclassed(ticket, lane)
        share = group.shares.get(ticket.tenant)
        if share is None:
            share = self._share(group, ticket.tenant)
        self._number += 1
        ticket.number = self._number
        ticket.queued_at = now
        room = pool.has_room(now)
        in_vain = not room and _nobody_can(pool, now)
        if self.mode == "shadow":
            if room or in_vain:
                while lane.queued:
                    self._give(lane, now)
            else:
                self._play(ticket, group, share, now)
                return True
        if in_vain or (room and not lane.queued):
            self._start(ticket, group, share, now)
            return True
        verdict = self._queue(ticket, group, share, now)
        return False if verdict is None else verdict

    def take(self, pool_of: PoolOf, now: float) -> Ticket | None:
        """Whose turn it is: it runs, and is to be sent before this is called again. None: nobody's."""
        while self._owed:
            owed = self._owed.popleft()
            self.queued -= 1
            if owed.state != LEFT:
                return owed
        self._stirred = False
        if not self.queued or self.mode == "shadow":
            return None
        for lane in list(self._busy):
            pool = pool_of(lane.model, lane.key[0])
            if pool is not lane.pool:
                self._follow(lane, pool, pool_of, now)
        roomy: list[Lane] = []
        for lane in self._busy:
            lane.pool.refresh(now)
            if lane.pool.has_room(now) or _nobody_can(lane.pool, now):
                roomy.append(lane)
        while roomy:
            group = self._next(roomy, now)
            ticket = self._head(group)
            if not group.qos.late_reject or now < self._ends_at(group, ticket):
                self._begin(group, ticket, roomy, now)
                return ticket
            self._late(group, ticket, now)
            if not group.lane.queued:
                roomy.remove(group.lane)
        return None

    def turned_away(self, now: float) -> list[tuple[Ticket, TurnedAway]]:
        """Who shall wait no longer, and who of those that run shall go; a part of them, if they are many."""
        for lane in list(self._busy):
            for group in lane.groups:
                while (head := group.head) is not None and now >= self._ends_at(group, head):
                    self._late(group, head, now)
        told: list[tuple[Ticket, TurnedAway]] = []
        shed = self._shed
        while shed and len(told) < MAX_TOLD:
            entry = shed.popleft()
            if entry[0].state == OUT:  # else it left before it was told
                told.append(entry)
        for lane in list(self._busy):
            self._evict(lane, told, now)
        return told

    def spoke(self, ticket: Ticket, now: float) -> None:
        """Its first byte goes to the client. It stays, unless its class has streams evicted as well."""
        if ticket.spoken:
            return
        ticket.spoken = True
        share = ticket.share
        if share is None:
            return
        standing = _heir(share.group.standing)
        if not ticket.qos.evict_streams:
            standing.evictable.pop(ticket.number, None)
        if ticket.streams:
            if ticket.state >= RUNNING and ticket.state != OUT:
                standing.usual.add(now - ticket.started_at)
            if now - ticket.arrived_at <= ticket.qos.sla_s:
                standing.met += 1
            else:
                standing.missed += 1

    def leave(self, ticket: Ticket, tokens: int, now: float) -> None:
        """It is over, and used so many tokens. From any state; again is harmless."""
        state, share = ticket.state, ticket.share
        ticket.state = LEFT
        if share is None:
            return
        group = share.group
        lane = group.lane
        if state == QUEUED:
            self._unqueue(group, ticket, share)
        else:
            standing = _heir(group.standing)
            standing.running -= 1
            share.running -= 1
            lane.running -= 1
            self.running -= 1
            if tokens != ticket.tokens:
                group.settle(share, tokens - ticket.tokens)
            if ticket.qos.preemptible:
                standing.evictable.pop(ticket.number, None)
                if state == EVICTED:
                    self._leaving.pop(ticket.number, None)
            if lane.queued:
                lane.left(now)
                if self.mode == "shadow":
                    self._give(lane, now)
        ticket.share = None
        if not share.running and not share.queued and not group.gone:
            self._idle[share] = None

    def due(self, now: float) -> float:
        """When to ask `take` and `turned_away` again though nothing happens, in monotonic seconds; inf: no need."""
        if self._shed:
            return now
        if not self.queued:
            return inf
        if self._stirred or self._owed:
            return now
        at = now + POLL_S
        for lane in self._busy:
            for group in lane.groups:
                head = group.head
                if head is None:
                    continue
                at = min(at, self._ends_at(group, head))
                warned_at = self._warned_at(group, head)
                if warned_at > now:
                    at = min(at, warned_at)
        return at

    def abandon(self, now: float) -> list[Ticket]:
        """All that wait, in the order in which they came: the gate is no more, and keeps none of them."""
        left = [ticket for ticket in self._owed if ticket.state != LEFT]
        self._owed.clear()
        for lane in self._busy:
            for ticket in _emptied(lane):
                ticket.share = None
                ticket.state = LEFT
                left.append(ticket)
        self._busy.clear()
        left.extend([ticket for ticket, _ in self._shed if ticket.state == OUT])  # not told yet: they wait still
        self._shed.clear()
        self.queued = 0
        left.sort(key=_number)
        return left

    def view(self, now: float) -> GateView:
        """How things stand."""
        classes = [ClassView(standing) for standing in self._standings]
        for lane in self._busy:
            for index, group in enumerate(lane.groups):
                head = group.head
                if head is not None:
                    seen = classes[index]
                    seen.waiting_s = max(seen.waiting_s, now - head.queued_at)
                    seen.warning = seen.warning or now >= self._warned_at(group, head)
        return GateView(self, classes)

    # Turns.

    def _start(self, ticket: Ticket, group: Group, share: Share, now: float) -> None:
        """Its turn begins; if it waited, it stands in the queue no more."""
        waited = ticket.state == QUEUED
        standing, qos = group.standing, ticket.qos
        group.charge(share, ticket.tokens)
        if waited:
            self._unqueue(group, ticket, share)
        elif not share.running and not share.queued:
            self._idle.pop(share, None)
        ticket.state = RUNNING
        ticket.share = share
        ticket.started_at = now
        share.running += 1
        group.lane.running += 1
        standing.running += 1
        standing.turns += 1
        self.running += 1
        self.turns += 1
        if qos.preemptible and not ticket.spoken:
            standing.evictable[ticket.number] = ticket
        if not ticket.streams:
            if now - ticket.arrived_at <= qos.sla_s:
                standing.met += 1
            else:
                standing.missed += 1

    def _head(self, group: Group) -> Ticket:
        ticket = group.first().head
        assert ticket is not None
        return ticket

    def _give(self, lane: Lane, now: float) -> None:
        """In shadow: a turn to whoever would have it."""
        lanes = [lane]
        group = self._next(lanes, now)
        self._begin(group, self._head(group), lanes, now)

    def _begin(self, group: Group, ticket: Ticket, lanes: list[Lane], now: float) -> None:
        """A turn given; what the overdue earn by it or spend is reckoned here."""
        overdue = _overdue(lanes, now)
        if overdue is not None:
            earned = self._credit + self._reserve
            if overdue is not group:
                self._credit = earned
            elif earned >= _WHOLE:
                self._credit = earned - 1.0
        share = ticket.share
        assert share is not None
        self._start(ticket, group, share, now)
        if overdue is group:
            # Its turn was owed: evicted, it would starve with turns instead of without.
            group.standing.evictable.pop(ticket.number, None)

    def _next(self, lanes: list[Lane], now: float) -> Group:
        """The class whose turn it is, of those that wait in `lanes`: somebody does in each."""
        if self._credit + self._reserve >= _WHOLE:
            overdue = _overdue(lanes, now)
            if overdue is not None:
                return overdue
        chosen: Group | None = None
        for lane in lanes:
            warned = self._warned(lane, now)
            for group in lane.groups:
                if group.head is None or (warned and group.qos.preemptible):
                    continue
                if chosen is None or _before(group, chosen):
                    chosen = group
        assert chosen is not None
        return chosen

    # The queue.

    def _queue(self, ticket: Ticket, group: Group, share: Share, now: float) -> TurnedAway | None:
        """It waits, if that makes sense and there is a place."""
        lane, qos = group.lane, ticket.qos
        if qos.late_reject and now + self._wait_s(group, share) >= self._ends_at(group, ticket):
            group.standing.overloaded += 1
            return TurnedAway(
                _OVERLOADED,
                f"its turn would come too late for class {qos.name}: {self.queued} requests wait",
                self._retry_s(group),
            )
        if self.queued >= self._places and not self._make_place(group, share, now):
            group.standing.overloaded += 1
            return TurnedAway(
                _OVERLOADED,
                f"every endpoint that could serve this is at its limit, and {self.queued} requests wait",
                self._retry_s(group),
            )
        if not share.running and not share.queued:
            self._idle.pop(share, None)
        if not lane.queued:
            lane.fills(now)
            lane.model = ticket.model
            self._busy[lane] = None
        group.push(ticket, share)
        self.queued += 1
        self._stirred = True
        return None

    def _play(self, ticket: Ticket, group: Group, share: Share, now: float) -> None:
        """In shadow: as `_queue`, and it runs."""
        verdict = self._queue(ticket, group, share, now)
        if verdict is None:
            ticket.shadowed = "queued"
        else:
            ticket.shadowed = verdict.reason
            ticket.state = OUT

    def _unqueue(self, group: Group, ticket: Ticket, share: Share) -> None:
        group.remove(ticket, share)
        self.queued -= 1
        if not group.lane.queued:
            self._busy.pop(group.lane, None)

    def _shed_one(self, group: Group, ticket: Ticket, away: TurnedAway) -> None:
        """Out of the queue, to be told."""
        share = ticket.share
        assert share is not None
        self._unqueue(group, ticket, share)
        ticket.share = None
        ticket.state = OUT
        if not share.running and not share.queued:
            self._idle[share] = None
        if self.mode == "shadow":
            ticket.shadowed = away.reason
        else:
            self._shed.append((ticket, away))

    def _late(self, group: Group, ticket: Ticket, now: float) -> None:
        group.standing.queue_timeout += 1
        waited = f"it waited {now - ticket.queued_at:.1f} s for its turn"
        if now >= ticket.queued_at + group.qos.max_wait_s:
            why = f"{waited}, the longest that class {group.qos.name} waits"
        else:
            why = f"{waited}, and can no longer be served within what class {group.qos.name} promises"
        self._shed_one(group, ticket, TurnedAway(_QUEUE_TIMEOUT, why, self._retry_s(group)))

    def _make_place(self, group: Group, share: Share, now: float) -> bool:
        """Turn the right one away for a newcomer of a full queue; False: that is the newcomer itself."""
        lowest: Standing | None = None
        for standing in self._standings:
            if standing.queued and (lowest is None or not _outweighs(lowest, standing)):
                lowest = standing
        if lowest is None or lowest.qos.priority > group.qos.priority:
            return False
        fullest: Group | None = None
        for lane in self._busy:
            for each in lane.groups:
                if each.standing is lowest and each.queued and (fullest is None or each.queued > fullest.queued):
                    fullest = each
        assert fullest is not None
        longest = fullest.longest()
        if lowest is group.standing:
            gives_way = longest.queued / longest.weight > (share.queued + 1) / share.weight
        elif lowest.qos.priority == group.qos.priority:
            gives_way = lowest.queued / lowest.qos.weight > (group.standing.queued + 1) / group.qos.weight
        else:
            gives_way = True
        if not gives_way:
            return False
        newest = longest.tail
        assert newest is not None
        lowest.overloaded += 1
        away = TurnedAway(
            _OVERLOADED,
            f"every endpoint is at its limit, {self.queued} requests wait, and this one gave its place to another",
            self._retry_s(fullest),
        )
        self._shed_one(fullest, newest, away)
        return True

    def _wait_s(self, group: Group, share: Share) -> float:
        """How long a newcomer of the group may expect to wait; 0.0 where that is not known."""
        lane = group.lane
        if lane.pace == 0.0 or (not group.qos.preemptible and self._can_evict()):
            return 0.0
        # Of its own class, each tenant that waits has as many turns before it as it has itself.
        ahead = min(group.queued, (share.queued + 1) * group.waiting)
        for each in lane.groups:
            if each.qos.priority > group.qos.priority:
                ahead += each.queued
        return (ahead + 1) / lane.pace

    def _retry_s(self, group: Group) -> float:
        lane = group.lane
        if lane.pace == 0.0:
            return RETRY_UNKNOWN_S
        ahead = 0
        for each in lane.groups:
            if each.qos.priority >= group.qos.priority:
                ahead += each.queued
        return min(RETRY_MOST_S, max(RETRY_LEAST_S, float(ceil(ahead / lane.pace))))

    # Warnings.

    def _ends_at(self, group: Group, ticket: Ticket) -> float:
        """When its waiting ends without a turn."""
        at = ticket.queued_at + group.qos.max_wait_s
        if group.qos.late_reject:
            usual_s = group.standing.usual.likely_s if ticket.streams else 0.0
            at = min(at, ticket.arrived_at + group.qos.sla_s - usual_s)
        return at

    def _warned_at(self, group: Group, ticket: Ticket) -> float:
        """When it is in the warning zone of its class."""
        usual_s = group.standing.usual.careful_s if ticket.streams else 0.0
        return ticket.arrived_at + self._warning_ratio * group.qos.sla_s - usual_s

    def _warned(self, lane: Lane, now: float) -> bool:
        """Whether somebody waits there whom those that are preemptible are to make way for."""
        for group in lane.groups:
            head = group.head
            if head is not None and not group.qos.preemptible and now >= self._warned_at(group, head):
                return True
        return False

    def _can_evict(self) -> bool:
        return any(standing.evictable for standing in self._standings if standing.qos.preemptible)

    def _evict(self, lane: Lane, told: list[tuple[Ticket, TurnedAway]], now: float) -> None:
        """Tell as many of those that run to go as are in their warning zone."""
        wanted, most = 0, MAX_TOLD - len(told)
        for group in lane.groups:
            if group.qos.preemptible:
                continue
            ticket = group.head
            while ticket is not None and wanted < most and now >= self._warned_at(group, ticket):
                wanted += 1
                ticket = ticket.behind
        if not wanted or not self._can_evict():
            return
        pool = lane.pool
        pool.refresh(now)
        if pool.has_room(now) or _nobody_can(pool, now):
            return
        for leaving in self._leaving.values():
            wanted -= _runs_in(leaving, lane)
        for standing in reversed(self._standings):
            if wanted <= 0:
                return
            if standing.qos.preemptible and standing.evictable:
                victims = _victims(standing, lane, wanted)
                wanted -= len(victims)
                for victim in victims:
                    self._tell_to_go(standing, victim, lane, told, now)

    def _tell_to_go(
        self, standing: Standing, victim: Ticket, lane: Lane, told: list[tuple[Ticket, TurnedAway]], now: float
    ) -> None:
        del standing.evictable[victim.number]
        standing.preempted += 1
        victim.state = EVICTED
        if self.mode == "shadow":
            victim.shadowed = _PREEMPTED
            if lane.queued:
                self._give(lane, now)
            return
        self._leaving[victim.number] = victim
        why = f"class {victim.qos.name} made way for requests that could not wait"
        told.append((victim, TurnedAway(_PREEMPTED, why, EVICTED_RETRY_S)))

    # Lanes and tenants.

    def _lane_of(self, pool: Pool, version: VersionName | None, now: float) -> Lane:
        key = version, pool.kinds
        lane = self._lanes.get(key)
        if lane is None:
            if len(self._lanes) >= MAX_LANES:
                self._forget_lanes()
            lane = self._lanes[key] = Lane(key, pool, self._standings, now)
        else:
            self._by_pool.pop(lane.pool, None)
            lane.pool = pool
        self._by_pool[pool] = lane
        return lane

    def _forget_lanes(self) -> None:
        """Those in which nobody waits or runs."""
        for lane in list(self._lanes.values()):
            if not lane.queued and not lane.running:
                del self._lanes[lane.key]
                self._by_pool.pop(lane.pool, None)
                for group in lane.groups:
                    self._forget_group(group)

    def _forget_group(self, group: Group) -> None:
        group.gone = True
        self.tenants -= len(group.shares)
        for share in group.shares.values():
            self._idle.pop(share, None)
        group.shares = {}

    def _follow(self, lane: Lane, pool: Pool, pool_of: PoolOf, now: float) -> None:
        """The pool was made anew. Where other endpoints have these models now, the tickets go where they belong."""
        if pool.kinds == lane.key[1]:
            self._lane_of(pool, lane.key[0], now)
            return
        for ticket in _emptied(lane):
            self.queued -= 1
            index, share = ticket.qos.index, ticket.share
            assert share is not None
            if not share.running and not share.queued:
                self._idle[share] = None
            there = self._lane_of(pool_of(ticket.model, ticket.version), ticket.version, now)
            self._put_back(there.groups[index], ticket)
        if not lane.queued:
            self._busy.pop(lane, None)

    def _put_back(self, group: Group, ticket: Ticket) -> None:
        """It waits on, in another lane or class."""
        share = group.shares.get(ticket.tenant)
        if share is None:
            share = self._share(group, ticket.tenant)
        self._idle.pop(share, None)
        if not group.lane.queued:
            group.lane.model = ticket.model
        self._busy[group.lane] = None
        group.push(ticket, share)
        self.queued += 1

    def _share(self, group: Group, tenant: str) -> Share:
        share = group.shares[tenant] = Share(tenant, self._weights.get(tenant, 1.0), group)
        self._idle[share] = None
        self.tenants += 1
        while self.tenants > MAX_TENANTS and len(self._idle) > 1:
            oldest, _ = self._idle.popitem(last=False)
            del oldest.group.shares[oldest.tenant]
            self.tenants -= 1
        return share

    # Reloads.

    def _reclass(self, classes: Classes) -> None:
        """The classes are others: each takes over what is known of the one of its name, `default` of those gone."""
        known = {standing.qos.name: standing for standing in self._standings}
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
        self._standings = standings
        for lane in self._lanes.values():
            self._reclass_lane(lane, heir)

    def _reclass_lane(self, lane: Lane, heir: Standing) -> None:
        waiting = _emptied(lane)
        self.queued -= len(waiting)
        before = {group.standing: group for group in lane.groups}
        groups: list[Group] = []
        for standing in self._standings:
            group = before.pop(standing, None)
            if group is None:
                group = Group(standing, lane)
            group.qos = standing.qos
            groups.append(group)
        lane.groups = groups
        for gone in before.values():
            self._forget_group(gone)
        for ticket in waiting:
            share = ticket.share
            assert share is not None
            standing = _heir(share.group.standing)
            if not share.group.gone and not share.running and not share.queued:
                self._idle[share] = None
            ticket.qos = standing.qos
            self._put_back(groups[standing.qos.index], ticket)
        if not lane.queued:
            self._busy.pop(lane, None)

    def _reclassed(self, ticket: Ticket, lane: Lane) -> Group:
        """The group of a ticket whose class was looked up before a reload."""
        found = lane.groups[0]
        for group in lane.groups:
            if group.qos.name == ticket.qos.name:
                found = group
                break
            if group.qos.name == DEFAULT_CLASS:
                found = group
        ticket.qos = found.qos
        return found

    def _release(self, now: float) -> None:
        """The mode is another one: nobody waits any more. In shadow nobody did."""
        for lane in list(self._busy):
            for group in lane.groups:
                while (head := group.head) is not None and (share := head.share) is not None:
                    self._start(head, group, share, now)
                    if self.mode == "shadow":
                        self._owed.append(head)
                        self.queued += 1


def _nobody_can(pool: Pool, now: float) -> bool:
    """Whether no endpoint can serve, and waiting for one is not worth it. `pool` has no room."""
    if pool.ready.nodes:
        return False
    refusal = pool.refusal((), now)
    at = refusal.retry_at
    return refusal.reason is not _OVERLOADED or at is None or at > now + HOLD_S


def _overdue(lanes: list[Lane], now: float) -> Group | None:
    """The class whose oldest request is overdue longest; None: none is."""
    found: Group | None = None
    since = now
    for lane in lanes:
        for group in lane.groups:
            head = group.head
            if head is not None:
                at = head.arrived_at + min(group.qos.sla_s, group.qos.max_wait_s / 2.0)
                if at < since:
                    found, since = group, at
    return found


def _before(one: Group, other: Group) -> bool:
    """Whether the turn is rather the one's than the other's."""
    if one.qos.priority != other.qos.priority:
        return one.qos.priority > other.qos.priority
    if one.lane is other.lane:
        return one.counter < other.counter
    first, second = one.head, other.head
    return first is not None and second is not None and first.number < second.number


def _outweighs(one: Standing, other: Standing) -> bool:
    """Whether the other rather gives a place up."""
    if one.qos.priority != other.qos.priority:
        return one.qos.priority < other.qos.priority
    return one.queued / one.qos.weight > other.queued / other.qos.weight


def _runs_in(ticket: Ticket, lane: Lane) -> bool:
    """Whether it runs where it leaves room for those that wait in the lane."""
    node, share = ticket.node, ticket.share
    if node is not None:
        return lane.pool.has(node)
    return share is not None and share.group.lane is lane


def _victims(standing: Standing, lane: Lane, wanted: int) -> list[Ticket]:
    """Who of a class is to make room: of the tenant that runs most, for its weight, the newest; up to so many."""
    candidates: list[Ticket] = []
    for running in reversed(standing.evictable.values()):
        if _runs_in(running, lane):
            candidates.append(running)
            if len(candidates) >= CANDIDATES:
                break
    victims: list[Ticket] = []
    told: dict[Share, int] = {}
    while candidates and len(victims) < wanted:
        found, most = 0, -1.0
        for place, running in enumerate(candidates):
            share = running.share
            if share is not None:
                runs = (share.running - told.get(share, 0)) / share.weight
                if runs > most:
                    found, most = place, runs
        victim = candidates.pop(found)
        victims.append(victim)
        share = victim.share
        if share is not None:
            told[share] = told.get(share, 0) + 1
    return victims


def _emptied(lane: Lane) -> list[Ticket]:
    """All that wait in the lane, in the order in which they came; they keep their share, and are in no queue."""
    waiting: list[Ticket] = []
    for group in lane.groups:
        while (head := group.head) is not None and (share := head.share) is not None:
            group.remove(head, share)
            waiting.append(head)
    waiting.sort(key=_number)
    return waiting


def _heir(standing: Standing) -> Standing:
    while (heir := standing.heir) is not None:
        standing = heir
    return standing


def _number(ticket: Ticket) -> int:
    return ticket.number
