"""Who is next among those that wait for the same endpoints: a class's queue, in which each tenant has one of its own.

Between the tenants of a class it is the tokens that are shared and not the turns: a turn may be ten tokens or a hundred
thousand. Each tenant has a counter of the tokens that it was served, over its weight, and whose counter is the least is
next (the virtual token counter of Sheng et al., OSDI 2024, kept as start-time fair queuing keeps its tags, Goyal et
al., SIGCOMM 1996). That is max-min fair: who asks for less than its part gets all of it, and the rest is divided anew.

1. A turn is charged what the request is estimated to use, when it begins: charged at its end, a tenant could begin a
   hundred before the first one counts. What it did use replaces the estimate when it leaves.
2. Who comes back with nothing waiting starts at the counter of the turn given last, if its own is less: nobody saves
   turns up, and nobody is in debt for having been served while there was enough for all.
3. A counter that is not ahead of that says nothing, so a tenant that is idle may be forgotten.
4. Counters belong to one set of endpoints (`Lane`). What a tenant got on others is no reason to wait here.
5. Within a tenant, first come, first served.

Everything is O(log tenants) or less: heaps hold one entry per tenant that waits, and entries that are out of date are
passed over when they come up, and cleared out when they are more than the others.
"""

from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import Final

from sidecar.core.classes import QosClass
from sidecar.core.gate.parts import Payer
from sidecar.core.gate.usual import Usual
from sidecar.core.pool import Kind, Node, Pool, Without
from sidecar.kernel.ids import VersionName

# new -> queued -> running -> evicted -> left: any of them may be skipped, but none comes again.
NEW: Final = 0
QUEUED: Final = 1
RUNNING: Final = 2
EVICTED: Final = 3  # told to go, and not gone yet
OUT: Final = 4  # turned away while it waited; in shadow it runs all the same
LEFT: Final = 5

SLACK: Final = 64  # entries of a heap that may be out of date, beyond one per tenant that waits
SOME: Final = 32  # of those that go after all others, looked at for one that need not wait
ROLL_S: Final = 1.0  # how often a lane's pace is worked out
NEWEST: Final = 0.3  # how much the last second counts in it

LaneKey = tuple[VersionName | None, Without, frozenset[Kind]]
"""What tells one set of endpoints from another, and survives that some of its endpoints come and go."""


class Ticket:
    """One request at the gate. `tokens`: what it is estimated to use, prompt and answer.

    `waiter` is whose it is, and nothing to the gate. `streams` False: its SLA ends where its turn begins. `version`:
    the one chosen, None for any; `without`: engines that cannot do what it asks; `node`: where it runs, None where that
    is not known. `shadowed`: what enforcing would have done with it: "" nothing, `queued`, or the reason for which it
    would have been turned away.
    """

    __slots__ = (
        "ahead",
        "arrived_at",
        "behind",
        "model",
        "newer",
        "node",
        "number",
        "older",
        "qos",
        "queued_at",
        "shadowed",
        "share",
        "spoken",
        "started_at",
        "state",
        "streams",
        "tenant",
        "tokens",
        "version",
        "waiter",
        "within",
        "without",
    )

    def __init__(
        self,
        waiter: object,
        qos: QosClass,
        tenant: str,
        model: str,
        tokens: int,
        arrived_at: float,
        streams: bool = True,
    ) -> None:
        self.waiter = waiter
        self.qos = qos
        self.tenant = tenant
        self.model = model
        self.tokens = tokens
        self.arrived_at = arrived_at
        self.streams = streams
        self.version: VersionName | None = None
        self.without: Without = ()
        self.node: Node | None = None
        self.shadowed = ""
        self.state: int = NEW
        self.spoken = False
        self.within = False
        """It runs, and its tenant was within its part (`parts`) when its turn began."""
        self.number = 0
        self.queued_at = 0.0
        self.started_at = 0.0
        self.share: Share | None = None
        # Its neighbours in its tenant's queue, and in its class's line.
        self.older: Ticket | None = None
        self.newer: Ticket | None = None
        self.ahead: Ticket | None = None
        self.behind: Ticket | None = None


class Share:
    """What one tenant had of one class: `counter`, in tokens over its weight; and its requests that wait."""

    __slots__ = (
        "behind",
        "counter",
        "entry",
        "group",
        "head",
        "length",
        "payer",
        "queued",
        "running",
        "tail",
        "tenant",
        "weight",
    )

    def __init__(self, tenant: str, weight: float, group: "Group") -> None:
        self.tenant = tenant
        self.weight = weight
        self.group = group
        self.payer: Payer | None = None
        """The tenant over all classes; None where that does not count."""
        self.behind = False
        """Whether what waits stands behind all others (`parts`)."""
        self.counter = 0.0
        self.running = 0
        self.queued = 0
        self.head: Ticket | None = None
        self.tail: Ticket | None = None
        self.entry = 0
        """The number of its entry among the next; others of it are out of date."""
        self.length = 0
        """The number of its entry among the longest."""


class Standing:
    """How a class of a service is doing: who of it waits and runs, and what became of the rest.

    `met`, `missed`: its SLA, of those that had their turn. `evictable`: those that run and may be told to go, the
    newest last. `rivals`: another class has the same priority. `heir`: the class that took over, after a reload without
    this one.
    """

    __slots__ = (
        "evictable",
        "heir",
        "met",
        "missed",
        "overloaded",
        "preempted",
        "qos",
        "queue_timeout",
        "queued",
        "rivals",
        "running",
        "turns",
        "usual",
    )

    def __init__(self, qos: QosClass) -> None:
        self.qos = qos
        self.rivals = False
        self.heir: Standing | None = None
        self.queued = 0
        self.running = 0
        self.turns = 0
        self.overloaded = 0
        self.queue_timeout = 0
        self.preempted = 0
        self.met = 0
        self.missed = 0
        self.usual = Usual()
        self.evictable: dict[int, Ticket] = {}


class Group:
    """The requests of one class that wait for the same endpoints. `start` is the counter of the turn given last.

    `head` is who has waited longest. `counter` is what the class had, against others of the same priority. `gone`: a
    reload left it without a class.
    """

    __slots__ = (
        "_behind",
        "_entries",
        "_longest",
        "_next",
        "behind",
        "counter",
        "gone",
        "head",
        "lane",
        "qos",
        "queued",
        "shares",
        "standing",
        "start",
        "tail",
        "turned_at",
        "waiting",
    )

    def __init__(self, standing: Standing, lane: "Lane") -> None:
        self.standing = standing
        self.qos = standing.qos
        self.lane = lane
        self.shares: dict[str, Share] = {}
        self.start = 0.0
        self.counter = 0.0
        self.queued = 0
        self.behind = 0
        """Of those that wait, those of tenants that go after all others."""
        self.waiting = 0
        """Tenants that have a request here."""
        self.gone = False
        self.turned_at = -inf
        """When one that waited here had its turn last."""
        self.head: Ticket | None = None
        self.tail: Ticket | None = None
        self._entries = 0
        self._next: list[tuple[float, int, Share]] = []
        self._behind: list[tuple[float, int, Share]] = []
        """Those that go after all others (`parts`)."""
        self._longest: list[tuple[float, int, Share]] = []

    def push(self, ticket: Ticket, share: Share) -> None:
        """The ticket waits, behind all others of its tenant and its class."""
        ticket.state = QUEUED
        ticket.share = share
        last = share.tail
        if last is None:
            share.head = ticket
            share.counter = max(share.counter, self.start)
            self.waiting += 1
            if self.standing.rivals and not self.queued:
                self.counter = max(self.counter, self.lane.starts[self.qos.priority])
        else:
            last.newer = ticket
            ticket.older = last
        share.tail = ticket
        share.queued += 1
        if share.behind:
            self.behind += 1
        if last is None:
            self.offer(share)
        if last is not None or share.weight < 1.0:
            self._note_length(share)
        end = self.tail
        if end is None:
            self.head = ticket
        else:
            end.behind = ticket
            ticket.ahead = end
        self.tail = ticket
        self.queued += 1
        self.standing.queued += 1
        self.lane.queued += 1

    def remove(self, ticket: Ticket, share: Share) -> None:
        """The ticket waits no more, wherever it stood."""
        older, newer = ticket.older, ticket.newer
        if older is None:
            share.head = newer
        else:
            older.newer = newer
        if newer is None:
            share.tail = older
        else:
            newer.older = older
        ahead, behind = ticket.ahead, ticket.behind
        if ahead is None:
            self.head = behind
        else:
            ahead.behind = behind
        if behind is None:
            self.tail = ahead
        else:
            behind.ahead = ahead
        ticket.older = ticket.newer = ticket.ahead = ticket.behind = None
        share.queued -= 1
        if share.behind:
            self.behind -= 1
        if not share.queued:
            share.behind = False
            self.waiting -= 1
            share.entry = share.length = 0
        self.queued -= 1
        self.standing.queued -= 1
        self.lane.queued -= 1

    def offer(self, share: Share) -> None:
        """Enter a tenant that has somebody waiting among the next, at its counter and its place as they are now."""
        self._entries += 1
        share.entry = self._entries
        payer = share.payer
        behind = payer is not None and payer.behind
        if behind != share.behind:
            share.behind = behind
            self.behind += share.queued if behind else -share.queued
        heap = self._behind if behind else self._next
        heappush(heap, (share.counter, share.entry, share))
        if len(heap) > 2 * self.waiting + SLACK:
            kept = [entry for entry in heap if entry[1] == entry[2].entry]
            heap[:] = kept
            heapify(heap)

    def first(self) -> Share:
        """Whose turn it is. Somebody waits here."""
        share = _least(self._next) or _least(self._behind)
        assert share is not None
        return share

    def first_behind(self) -> Share | None:
        """The first of those that go after all others; None: nobody does."""
        return _least(self._behind)

    def some_behind(self) -> list[Share]:
        """Of those that go after all others some, the first of them among them."""
        return [entry[2] for entry in self._behind[:SOME] if entry[1] == entry[2].entry]

    def has_within(self) -> bool:
        """Whether somebody waits who does not go after all others."""
        return _least(self._next) is not None

    def longest(self) -> Share:
        """Who has most waiting, for its weight; of those with as many, whose last came last. Somebody waits here."""
        heap, tail = self._longest, self.tail
        assert tail is not None and tail.share is not None
        newest = tail.share
        while heap:
            length, entry, share = heap[0]
            if entry != share.length:
                heappop(heap)
            elif -share.queued / share.weight > length:
                heapreplace(heap, (-share.queued / share.weight, entry, share))
            else:
                # Tenants with one request are in no heap: the last that came is as good as any of them.
                return share if -length > newest.queued / newest.weight else newest
        return newest

    def _note_length(self, share: Share) -> None:
        self._entries += 1
        share.length = -self._entries
        heappush(self._longest, (-share.queued / share.weight, share.length, share))
        if len(self._longest) > 2 * self.waiting + SLACK:
            self._longest = [entry for entry in self._longest if entry[1] == entry[2].length]
            heapify(self._longest)

    def charge(self, share: Share, tokens: int) -> None:
        """A turn of so many tokens is the tenant's. Of one that waited: before it is removed."""
        start = share.counter
        if start > self.start:
            self.start = start
        elif not share.queued:
            start = self.start
        share.counter = start + tokens / share.weight
        if self.standing.rivals:
            starts, priority = self.lane.starts, self.qos.priority
            before = self.counter if self.queued else max(self.counter, starts[priority])
            starts[priority] = max(starts[priority], before)
            self.counter = before + tokens / self.qos.weight

    def settle(self, share: Share, tokens: int) -> None:
        """It used so many more than were charged, or fewer (negative)."""
        share.counter += tokens / share.weight
        if self.standing.rivals:
            self.counter += tokens / self.qos.weight
        if tokens < 0 and share.queued:
            self.offer(share)


class Lane:
    """All that wait for the same endpoints, class by class, the highest first.

    `model` is one that they serve. `starts`: by priority, the class counter of the turn given last. `within`: of those
    that run, those whose tenants were within their part.
    """

    __slots__ = ("_left", "_since", "groups", "key", "model", "pace", "pool", "queued", "running", "starts", "within")

    def __init__(self, key: LaneKey, pool: Pool, standings: list[Standing], now: float) -> None:
        self.key = key
        self.pool = pool
        self.model = ""
        self.queued = 0
        self.running = 0
        self.within = 0
        self.starts = [0.0] * 10
        self.groups = [Group(standing, self) for standing in standings]
        self.pace = 0.0
        """Requests that leave in a second while somebody waits: with nobody waiting it would be what comes, and not
        what could go. 0.0: not known yet."""
        self._left = 0
        self._since = now

    def fills(self, now: float) -> None:
        """Somebody is about to wait, and nobody does yet."""
        self._left = 0
        self._since = now

    def left(self, now: float) -> None:
        """One that ran is gone, while somebody waits."""
        self._left += 1
        if now - self._since >= ROLL_S:
            rate = self._left / (now - self._since)
            self.pace = rate if self.pace == 0.0 else self.pace + NEWEST * (rate - self.pace)
            self._left = 0
            self._since = now


def _least(heap: list[tuple[float, int, Share]]) -> Share | None:
    """The tenant with the least counter, of a heap whose entries may be out of date; None: there is none."""
    while heap:
        counter, entry, share = heap[0]
        if entry != share.entry:
            heappop(heap)
        elif share.counter > counter:
            heapreplace(heap, (share.counter, entry, share))
        else:
            return share
    return None
