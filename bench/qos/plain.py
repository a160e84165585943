"""What the product is compared with: nothing at all, one queue, priorities, fair shares.

All but `Open` let an engine have as many requests as it has slots, hold the others in one bounded queue beside the
sidecar's own bounds (as long, as long a wait), and send to the less loaded of two engines with room. They know the
engine's slots, which an operator must find out and which the learned limit of the product does not know.
"""

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Protocol

from bench.qos.stage import Flying, Policy, Stage
from bench.qos.traffic import KINDS, TENANTS, Asked

QUEUE = 1000


class Queue(Protocol):
    """An order to wait in. Those that left it stay in until they are popped."""

    def push(self, asked: Asked) -> None: ...

    def pop(self) -> Asked | None:
        """Whose turn it is."""

    def ended(self, asked: Asked, tokens: int) -> None:
        """What it cost after all."""


class Fifo:
    """First come, first served."""

    def __init__(self) -> None:
        self._waiting: deque[Asked] = deque()

    def push(self, asked: Asked) -> None:
        self._waiting.append(asked)

    def pop(self) -> Asked | None:
        while self._waiting:
            asked = self._waiting.popleft()
            if not asked.word:
                return asked
        return None

    def ended(self, asked: Asked, tokens: int) -> None:
        pass


class Priority(Fifo):
    """The highest class first, first come, first served within it."""

    def __init__(self) -> None:
        self._classes = [Fifo() for _ in KINDS]

    def push(self, asked: Asked) -> None:
        self._classes[asked.kind].push(asked)

    def pop(self) -> Asked | None:
        for each in self._classes:
            asked = each.pop()
            if asked is not None:
                return asked
        return None


class MaxMin(Fifo):
    """The tenant that has had the fewest tokens first, whatever the class: counters of tokens, as Sheng et al.
    (OSDI 2024) keep them, with a tenant that comes back lifted to the least of those that wait."""

    def __init__(self) -> None:
        self._tenants = [Fifo() for _ in range(TENANTS)]
        self._waits = [0] * TENANTS
        self._had = [0.0] * TENANTS

    def push(self, asked: Asked) -> None:
        tenant = asked.tenant
        if not self._waits[tenant]:
            active = [had for had, waits in zip(self._had, self._waits, strict=True) if waits]
            if active:
                self._had[tenant] = max(self._had[tenant], min(active))
        self._waits[tenant] += 1
        self._tenants[tenant].push(asked)

    def pop(self) -> Asked | None:
        while True:
            waiting = [tenant for tenant in range(TENANTS) if self._waits[tenant]]
            if not waiting:
                return None
            tenant = min(waiting, key=self._had.__getitem__)
            asked = self._tenants[tenant].pop()
            if asked is None:
                self._waits[tenant] = 0
                continue
            self._waits[tenant] -= 1
            self._had[tenant] += asked.tokens
            return asked


class Open:
    """No admission: all is sent at once, to the less loaded of two engines, and waits in the engine's own queue."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._rng = Random(f"qos:{stage.seed}")

    def start(self, asked: Asked) -> None:
        pods = self.stage.world.pods
        Flying(self.stage, self, asked, self.choose(range(len(pods))), None)

    def choose(self, among: "range | list[int]") -> int:
        """The less loaded of two at random."""
        pods = self.stage.world.pods
        one, other = (self._rng.choice(among) for _ in range(2))
        return other if pods[other].in_flight < pods[one].in_flight else one

    def first(self, flying: Flying) -> None:
        pass

    def over(self, flying: Flying, whole: bool) -> None:
        pass

    def tick(self, now: float) -> None:
        pass


class Limited(Open):
    """As many at an engine as it has slots; the others wait in a queue."""

    def __init__(self, stage: Stage, queue: Queue) -> None:
        super().__init__(stage)
        self._queue = queue
        self._waits = 0

    def start(self, asked: Asked) -> None:
        if self._waits >= QUEUE:
            self.stage.ended(asked, "overloaded")
            return
        self._waits += 1
        self._queue.push(asked)
        self._pump()
        if asked.sent_at < 0.0:
            self.stage.clock.at(asked.at + float(KINDS[asked.kind].policy.max_wait_s), self._expire, asked)

    def _expire(self, asked: Asked) -> None:
        if asked.sent_at < 0.0:
            self._waits -= 1
            self.stage.ended(asked, "queue_timeout")

    def over(self, flying: Flying, whole: bool) -> None:
        self._pump()

    def _pump(self) -> None:
        world = self.stage.world
        while self._waits:
            room = [pod.index for pod in world.pods if pod.in_flight < world.profile.slots]
            asked = self._queue.pop() if room else None
            if asked is None:
                return
            self._waits -= 1
            Flying(self.stage, self, asked, self.choose(room), None)


PLAIN: dict[str, Callable[[Stage], Policy]] = {
    "open": Open,
    "fifo": lambda stage: Limited(stage, Fifo()),
    "priority": lambda stage: Limited(stage, Priority()),
    "max-min": lambda stage: Limited(stage, MaxMin()),
}
