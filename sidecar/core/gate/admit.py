"""The gate of a service: who may run now, who waits for a turn, and who is told to come back or to go.

A pod has so many tokens a second to give. Beyond what its endpoints take at once (`Node.limit`, see `limit`) a request
either waits here or inside the engine, and an engine serves whoever came first: there, a voice stands behind a thousand
batches. So the queue is here, where classes, tenants and deadlines are known. The gate is pure: it is told what happens
and gives back tickets; whoever holds them calls nothing of it from inside.

1. A request whose endpoints have room runs at once, if nobody waits for the same endpoints, or only who goes after it.
2. Else it waits, if there is a place. The higher priority goes first; classes of one priority share by their weights,
   tenants of a class by theirs, by tokens (`turns`).
3. Starvation is bounded: while the oldest request of some class is overdue (it has waited for its SLA, or half its
   longest wait if that is sooner), one in every ceil(1 / `reserve`) turns goes to the overdue class that has gone
   without longest: since its last turn, or since it is overdue. So of `c` classes that are overdue (a class counts once
   for each lane) each gets at least one turn in c ceil(1 / `reserve`), however many of a higher one wait; and who had
   such a turn is not evicted.
4. A full queue turns away the newest, but not the humblest first come: a request of a higher class takes the place of
   one of the lowest class that waits, and within a class the tenant that has most waiting gives its place to one with
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

10. With `fairness: service` tenants that have used more than their part of the service (`parts`) go behind all that
   have not, whatever their class: in turns, in the queue's places and in evictions. While they still use so much more,
   they leave some room free for the others (`headroom`); in shadow that is not played. While that holds back all that
   wait and one of them is overdue, a second counts as a turn of another's does: it has one in 1 / `reserve` s at least.

Being turned away here is nobody's failure: no breaker hears of it.
"""

from collections import deque
from math import ceil, inf
from typing import Final

from sidecar.core.classes import Classes
from sidecar.core.gate.evict import longest_of, oldest_of, runs_in, victims_of
from sidecar.core.gate.headroom import is_kept
from sidecar.core.gate.lanes import Lanes, PoolOf, emptied, heir_of, number_of
from sidecar.core.gate.turns import (
    EVICTED,
    LEFT,
    OUT,
    QUEUED,
    RUNNING,
    Group,
    Lane,
    Share,
    Standing,
)
from sidecar.core.gate.turns import Ticket as Ticket
from sidecar.core.gate.view import ClassView as ClassView
from sidecar.core.gate.view import GateView as GateView
from sidecar.core.pool import Pool
from sidecar.kernel.count import counted
from sidecar.kernel.errors import Reason
from sidecar.policy.schema import Admission

MAX_TOLD: Final = 64  # turned away in one call: the event loop has other things to do as well
POLL_S: Final = 0.05  # room comes back without a word, too: a limit grows, a breaker closes
KEPT_S: Final = 1.0  # of room that is kept from the overdue, that earns them as much as a turn
HOLD_S: Final = 5.0  # a Retry-After that ends within it is waited for
MOST: Final = 0.5  # of its SLA, that a class reckons with for its first token: else a slow one refused it for ever
FADE_S: Final = 1.0  # how often what nobody has seen again is believed less
RETRY_LEAST_S: Final = 1.0
RETRY_MOST_S: Final = 60.0
RETRY_UNKNOWN_S: Final = 5.0  # while nobody has left yet
EVICTED_RETRY_S: Final = 1.0
_WHOLE: Final = 1.0 - 1e-9  # a turn: twenty times a twentieth must make one

_OVERLOADED: Final = Reason.OVERLOADED
_QUEUE_TIMEOUT: Final = Reason.QUEUE_TIMEOUT
_PREEMPTED: Final = Reason.PREEMPTED


class TurnedAway:
    """No turn, or no longer: `overloaded`, `queue_timeout` or `preempted`. `retry_after_s` is an estimate."""

    __slots__ = ("detail", "reason", "retry_after_s")

    def __init__(self, reason: Reason, detail: str, retry_after_s: float) -> None:
        self.reason = reason
        self.detail = detail
        self.retry_after_s = retry_after_s


class Gate:
    """Who runs, who waits and who does neither. `queued`, `running`: requests; in shadow as if it were enforced.

    `mode` is `enforce` or `shadow`. A request's ticket is entered once and leaves once, from wherever it got to.
    """

    __slots__ = (
        "_credit",
        "_fades_at",
        "_kept_at",
        "_lanes",
        "_leaving",
        "_number",
        "_owed",
        "_places",
        "_reserve",
        "_shed",
        "_stirred",
        "_warning_ratio",
        "mode",
        "queued",
        "running",
        "turns",
    )

    def __init__(self, policy: Admission, classes: Classes, now: float) -> None:
        self.mode = "enforce"
        self.queued = 0
        self.running = 0
        self.turns = 0
        self._places = 0
        self._reserve = 0.0
        self._warning_ratio = 1.0
        self._lanes = Lanes()
        self._leaving: dict[int, Ticket] = {}
        """Told to go."""
        self._shed: deque[tuple[Ticket, TurnedAway]] = deque()
        """Out of the queue, and not told yet."""
        self._owed: deque[Ticket] = deque()
        """They have their turn, and `take` is to give them out: a reload ended their waiting."""
        self._fades_at = -inf
        self._number = 0
        self._stirred = False
        self._credit = 0.0
        """How much of a turn the overdue have earned."""
        self._kept_at = -inf
        """When somebody was last held back beside what is free."""
        self.use(policy, classes, now)

    def use(self, policy: Admission, classes: Classes, now: float) -> None:
        """Takes a new policy; whoever waits keeps his place, in `default` if his class is gone."""
        mode = "shadow" if policy.mode == "shadow" else "enforce"
        self._places = policy.queue
        self._reserve = policy.reserve
        self._warning_ratio = policy.warning_ratio
        self._lanes.use(policy, classes, now)
        if mode != self.mode:
            self.mode = mode
            self._release(now)
            for standing in self._lanes.standings:
                # Who was turned away, and who would have been, are not one count.
                standing.overloaded = standing.queue_timeout = standing.preempted = 0

    def enter(self, ticket: Ticket, pool: Pool, now: float) -> TurnedAway | bool:
        """True: it runs, and is to be sent before anything else is asked of the gate. False: it waits for `take`."""
        pool.refresh(now)
        lanes = self._lanes
        lane = lanes.lane_of(pool, ticket.version, ticket.without, now)
        group = lanes.group_of(ticket, lane)
        share = lanes.share_of(group, ticket.tenant, now)
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
        if in_vain or (room and self._is_first(lane, share, now)):
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
        for lane in list(self._lanes.busy):
            pool = pool_of(lane.model, lane.key[0], lane.key[1])
            if pool is not lane.pool:
                self._lanes.follow(lane, pool, pool_of, now)
        self._lanes.sort(now)
        roomy: list[Lane] = []
        for lane in self._lanes.busy:
            lane.pool.refresh(now)
            if lane.pool.has_room(now) or _nobody_can(lane.pool, now):
                roomy.append(lane)
        while roomy:
            group = self._next(roomy, now)
            if group is None:
                self._keep(roomy, now)
                return None
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
        self._lanes.sort(now)
        if now >= self._fades_at:
            self._fades_at = now + FADE_S
            for standing in self._lanes.standings:
                standing.usual.fade(now)
        for lane in list(self._lanes.busy):
            for group in lane.groups:
                while len(self._shed) < MAX_TOLD and (head := group.head) is not None:
                    if now < self._ends_at(group, head):
                        break
                    self._late(group, head, now)
        told: list[tuple[Ticket, TurnedAway]] = []
        shed = self._shed
        while shed and len(told) < MAX_TOLD:
            entry = shed.popleft()
            if entry[0].state == OUT:  # else it left before it was told
                told.append(entry)
        for lane in list(self._lanes.busy):
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
        standing = heir_of(share.group.standing)
        if not ticket.qos.evict_streams:
            standing.evictable.pop(ticket.number, None)
        if ticket.streams:
            if ticket.state >= RUNNING and ticket.state != OUT:
                standing.usual.add(now - ticket.started_at, now)
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
            standing = heir_of(group.standing)
            standing.running -= 1
            share.running -= 1
            lane.running -= 1
            if ticket.within:
                ticket.within = False
                lane.within -= 1
            self.running -= 1
            if tokens != ticket.tokens:
                group.settle(share, tokens - ticket.tokens)
                if self._lanes.parts is not None and share.payer is not None:
                    self._lanes.parts.settle(share.payer, tokens - ticket.tokens, ticket.started_at)
            if ticket.qos.preemptible:
                standing.evictable.pop(ticket.number, None)
                if state == EVICTED:
                    self._leaving.pop(ticket.number, None)
            if lane.queued:
                lane.left(now)
                if ticket.node is not None:
                    lane.pool.left(ticket.node)
                if self.mode == "shadow":
                    self._give(lane, now)
        ticket.share = None
        self._lanes.rests(share, now)

    def due(self, now: float) -> float:
        """When to ask `take` and `turned_away` again though nothing happens, in monotonic seconds; inf: no need."""
        if self._shed:
            return now
        if not self.queued:
            return inf
        if self._stirred or self._owed:
            return now
        at = now + POLL_S
        for lane in self._lanes.busy:
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
        for lane in self._lanes.busy:
            for ticket in emptied(lane):
                ticket.share = None
                ticket.state = LEFT
                left.append(ticket)
        self._lanes.busy.clear()
        left.extend([ticket for ticket, _ in self._shed if ticket.state == OUT])  # not told yet: they wait still
        self._shed.clear()
        self.queued = 0
        left.sort(key=number_of)
        return left

    def view(self, now: float) -> GateView:
        """How things stand."""
        classes = [ClassView(standing) for standing in self._lanes.standings]
        for lane in self._lanes.busy:
            for index, group in enumerate(lane.groups):
                head = group.head
                if head is not None:
                    seen = classes[index]
                    seen.waiting_s = max(seen.waiting_s, now - head.queued_at)
                    seen.warning = seen.warning or now >= self._warned_at(group, head)
        return GateView(self.mode, self.queued, self.running, self._lanes.tenants, self.turns, classes)

    # Turns.

    def _start(self, ticket: Ticket, group: Group, share: Share, now: float) -> None:
        """Its turn begins; if it waited, it stands in the queue no more."""
        waited = ticket.state == QUEUED
        standing, qos = group.standing, ticket.qos
        group.charge(share, ticket.tokens)
        if waited:
            self._unqueue(group, ticket, share)
        else:
            self._lanes.wakes(share)
        within = share.payer is None or not share.payer.behind
        if self._lanes.parts is not None and share.payer is not None:
            self._lanes.parts.use(share.payer, ticket.tokens, now)
            if not self.queued:
                self._lanes.parts.turned.clear()
        ticket.state = RUNNING
        ticket.share = share
        ticket.started_at = now
        share.running += 1
        group.lane.running += 1
        if within:
            ticket.within = True
            group.lane.within += 1
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
        ticket = (self._first(group) or group.first()).head
        assert ticket is not None
        return ticket

    def _give(self, lane: Lane, now: float) -> None:
        """In shadow: a turn to whoever would have it."""
        self._lanes.sort(now)
        lanes = [lane]
        group = self._next(lanes, now)
        assert group is not None
        self._begin(group, self._head(group), lanes, now)

    def _begin(self, group: Group, ticket: Ticket, lanes: list[Lane], now: float) -> None:
        """A turn given; what the overdue earn by it or spend is reckoned here."""
        overdue = _overdue(lanes, now)
        paid = False
        if overdue is not None:
            earned = self._credit + self._reserve
            if overdue is not group:
                self._credit = earned
            elif earned >= _WHOLE:
                self._credit = earned - 1.0
                paid = True
        group.turned_at = now
        share = ticket.share
        assert share is not None
        self._start(ticket, group, share, now)
        if paid:
            # Its turn was owed: evicted, it would starve with turns instead of without.
            group.standing.evictable.pop(ticket.number, None)

    def _is_first(self, lane: Lane, share: Share, now: float) -> bool:
        """Whether a newcomer goes before all that wait there, who would have had their turn else."""
        if not lane.queued:
            return not self._is_held(lane, share)
        if share.payer is None or share.payer.behind:
            return False
        for group in lane.groups:
            if group.queued > group.behind:
                return False
        overdue = _overdue([lane], now)
        if overdue is not None:
            earned = self._credit + self._reserve
            if earned >= _WHOLE:
                return False
            self._credit = earned
        return True

    def _is_held(self, lane: Lane, share: Share) -> bool:
        """Whether a tenant floods, and is to leave what is free to others."""
        parts, payer = self._lanes.parts, share.payer
        if parts is None or payer is None or not payer.behind or self.mode == "shadow":
            return False
        return parts.floods(payer) and is_kept(lane)

    def _next(self, lanes: list[Lane], now: float) -> Group | None:
        """The class whose turn it is, of those that wait in `lanes`: somebody does in each. None: all are held back."""
        if self._credit + self._reserve >= _WHOLE:
            overdue = _overdue(lanes, now)
            if overdue is not None:
                return overdue
        chosen: Group | None = None
        chosen_within = False
        for lane in lanes:
            warned = self._warned(lane, now)
            for group in lane.groups:
                if group.head is None or (warned and group.qos.preemptible):
                    continue
                within = self._lanes.parts is None or group.has_within()
                if not within and (chosen_within or self._first(group) is None):
                    continue
                if chosen is None or within > chosen_within or (within == chosen_within and _before(group, chosen)):
                    chosen, chosen_within = group, within
        return chosen

    def _first(self, group: Group) -> Share | None:
        """Whose turn it is of a class in which somebody waits; None: all that wait there are held back."""
        share = group.first()
        if not self._is_held(group.lane, share):
            return share
        for other in group.some_behind():
            if not self._is_held(group.lane, other):
                return other
        return None

    def _keep(self, lanes: list[Lane], now: float) -> None:
        """All that wait where there is room are held back: the others may not come for minutes, and what runs hang."""
        since = min(now - self._kept_at, KEPT_S)
        self._kept_at = now
        if since > 0.0 and _overdue(lanes, now) is not None:
            self._credit += self._reserve * since / KEPT_S

    # The queue.

    def _queue(self, ticket: Ticket, group: Group, share: Share, now: float) -> TurnedAway | None:
        """It waits, if that makes sense and there is a place."""
        lane, qos = group.lane, ticket.qos
        if qos.late_reject and now + self._wait_s(group, share) >= self._ends_at(group, ticket):
            group.standing.overloaded += 1
            return TurnedAway(
                _OVERLOADED,
                f"its turn would come too late for class {qos.name}: {_waiting(self.queued)}",
                self._retry_s(group),
            )
        if self.queued >= self._places and not self._make_place(group, share, now):
            group.standing.overloaded += 1
            return TurnedAway(
                _OVERLOADED,
                f"every endpoint that could serve this is at its limit, and {_waiting(self.queued)}",
                self._retry_s(group),
            )
        self._lanes.wakes(share)
        if self._lanes.parts is not None and share.payer is not None:
            self._lanes.parts.judge(share.payer)
        if not lane.queued:
            lane.fills(now)
            lane.model = ticket.model
            self._lanes.busy[lane] = None
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
            self._lanes.busy.pop(group.lane, None)

    def _shed_one(self, group: Group, ticket: Ticket, away: TurnedAway, now: float) -> None:
        """Out of the queue, to be told."""
        share = ticket.share
        assert share is not None
        self._unqueue(group, ticket, share)
        ticket.share = None
        ticket.state = OUT
        self._lanes.rests(share, now)
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
        self._shed_one(group, ticket, TurnedAway(_QUEUE_TIMEOUT, why, self._retry_s(group)), now)

    def _make_place(self, group: Group, share: Share, now: float) -> bool:
        """Turn the right one away for a newcomer of a full queue; False: that is the newcomer itself."""
        self._lanes.sort(now)
        victim = self._place_of_one_behind(group, share) or self._place_of_the_humblest(group, share)
        if victim is None:
            return False
        fullest = victim.group
        newest = victim.tail
        assert newest is not None
        fullest.standing.overloaded += 1
        away = TurnedAway(
            _OVERLOADED,
            f"every endpoint is at its limit, {_waiting(self.queued)}, and this one gave its place to another",
            self._retry_s(fullest),
        )
        self._shed_one(fullest, newest, away, now)
        return True

    def _place_of_one_behind(self, group: Group, share: Share) -> Share | None:
        """For one that keeps to its part: a tenant that does not, of the lowest class in which one waits."""
        if share.payer is None or share.payer.behind:
            return None
        found: Share | None = None
        for lane in self._lanes.busy:
            for each in lane.groups:
                behind = each.first_behind()
                if behind is not None and (found is None or each.qos.priority < found.group.qos.priority):
                    longest = each.longest()
                    found = longest if longest.payer is not None and longest.payer.behind else behind
        return found

    def _place_of_the_humblest(self, group: Group, share: Share) -> Share | None:
        """Of the lowest class that waits, the tenant that has most waiting; None: the newcomer is humbler."""
        lowest: Standing | None = None
        for standing in self._lanes.standings:
            if standing.queued and (lowest is None or not _outweighs(lowest, standing)):
                lowest = standing
        if lowest is None or lowest.qos.priority > group.qos.priority:
            return None
        fullest: Group | None = None
        for lane in self._lanes.busy:
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
        if gives_way and (share.payer is None or not share.payer.behind):
            return longest
        # Who goes after all others takes no place from those who do not.
        return longest if gives_way and (longest.payer is None or longest.payer.behind) else None

    def _wait_s(self, group: Group, share: Share) -> float:
        """How long a newcomer of the group may expect to wait; 0.0 where that is not known."""
        lane = group.lane
        if lane.pace == 0.0 or (not group.qos.preemptible and self._can_evict()):
            return 0.0
        behind = share.payer is not None and share.payer.behind
        # Of its own class, each tenant that waits has as many turns before it as it has itself.
        ahead = min(_ahead(group, behind), (share.queued + 1) * group.waiting)
        for each in lane.groups:
            if each.qos.priority > group.qos.priority:
                ahead += _ahead(each, behind)
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
            usual_s = min(group.standing.usual.likely_s, MOST * group.qos.sla_s) if ticket.streams else 0.0
            at = min(at, ticket.arrived_at + group.qos.sla_s - usual_s)
        return at

    def _warned_at(self, group: Group, ticket: Ticket) -> float:
        """When it is in the warning zone of its class."""
        usual_s = min(group.standing.usual.careful_s, MOST * group.qos.sla_s) if ticket.streams else 0.0
        return ticket.arrived_at + self._warning_ratio * group.qos.sla_s - usual_s

    def _warned(self, lane: Lane, now: float) -> bool:
        """Whether somebody waits there whom those that are preemptible are to make room for."""
        for group in lane.groups:
            if not group.qos.preemptible:
                oldest = longest_of(group)
                if oldest is not None and now >= self._warned_at(group, oldest):
                    return True
        return False

    def _can_evict(self) -> bool:
        return any(standing.evictable for standing in self._lanes.standings if standing.qos.preemptible)

    def _evict(self, lane: Lane, told: list[tuple[Ticket, TurnedAway]], now: float) -> None:
        """Tell as many of those that run to go as are in their warning zone."""
        wanted, most = 0, MAX_TOLD - len(told)
        for group in lane.groups:
            if group.qos.preemptible:
                continue
            ticket = longest_of(group)
            while ticket is not None and wanted < most and now >= self._warned_at(group, ticket):
                wanted += 1
                ticket = None if ticket.behind is None else oldest_of(group, ticket.behind)
        if not wanted or not self._can_evict():
            return
        pool = lane.pool
        pool.refresh(now)
        if pool.has_room(now) or _nobody_can(pool, now):
            return
        for leaving in self._leaving.values():
            wanted -= runs_in(leaving, lane)
        for only_behind in (True, False) if self._lanes.parts is not None else (False,):
            for standing in reversed(self._lanes.standings):
                if wanted <= 0:
                    return
                if standing.qos.preemptible and standing.evictable:
                    victims = victims_of(standing, lane, wanted, only_behind)
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
        why = f"class {victim.qos.name} made room for requests that could not wait"
        told.append((victim, TurnedAway(_PREEMPTED, why, EVICTED_RETRY_S)))

    def _release(self, now: float) -> None:
        """The mode is another one: nobody waits any more. In shadow nobody did."""
        for lane in list(self._lanes.busy):
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
    """Of the classes whose oldest request is overdue, the one that has gone without a turn longest; None: none is."""
    found: Group | None = None
    since = now
    for lane in lanes:
        for group in lane.groups:
            head = group.head
            if head is not None:
                at = head.arrived_at + min(group.qos.sla_s, group.qos.max_wait_s / 2.0)
                if at < now:
                    at = max(at, group.turned_at)
                    if found is None or at < since:
                        found, since = group, at
    return found


def _waiting(count: int) -> str:
    return counted(count, "request waits", "requests wait")


def _ahead(group: Group, behind: bool) -> int:
    """How many of a class may go before one more, which goes after all others (`behind`) or not."""
    return group.queued if behind else group.queued - group.behind


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
