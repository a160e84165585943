"""One run: requests through a policy to the engines, on virtual time, and what is counted of it.

Counted are requests that come between `begin` and `end`; traffic goes on past `end`, so that the last of them find the
load that the first found. Work (tokens, slots in use) is counted by when it is done, in the same time.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from bench.qos.traffic import ENGINE, FLOODER, KINDS, PODS, TENANTS, Asked
from sidecar.simulate.clock import VirtualClock
from sidecar.simulate.profile import Profile
from sidecar.simulate.world import Flight, World

WARMUP_S, AFTER_S, DRAIN_S = 30.0, 10.0, 60.0
FIRST_TOKEN_S = 30.0
"""An engine that has given no token by then is given up, as the policy's default deadline does."""
SERVED, PREEMPTED = "served", "preempted"
COMES_BACK, AFTER_PREEMPTED_S = 2, 1.0
"""A client that was preempted asks again after its Retry-After, as often as OpenAI's client does; of its SLA that time
is lost. Other refusals are final: who comes back after a 429 is offered load, and that is what `load` says."""


class Policy(Protocol):
    """What is compared: whom it lets to the engines, and when."""

    def start(self, asked: Asked) -> None:
        """A request came."""

    def tick(self, now: float) -> None:
        """A second went by."""


class Sender(Policy, Protocol):
    """One that sends by `Flying`."""

    def first(self, flying: "Flying") -> None:
        """Its first token came."""

    def over(self, flying: "Flying", whole: bool) -> None:
        """The engine is done with it; or it was given up (not `whole`)."""


class Passed:
    """How often in a row others were sent while a request of the lowest class was past its SLA, or half its longest
    wait. `most`: the most."""

    __slots__ = ("_now", "_overdue_s", "_waiting", "most")

    def __init__(self) -> None:
        policy = KINDS[-1].policy
        self._overdue_s = min(policy.latency_sla_ms / 1000.0, float(policy.max_wait_s) / 2.0)
        self._waiting: dict[int, float] = {}
        self._now = 0
        self.most = 0

    def waits(self, asked: Asked, now: float) -> None:
        """It came."""
        if asked.kind == len(KINDS) - 1:
            self._waiting[asked.id] = now

    def gone(self, asked: Asked) -> None:
        """It waits no more, without a turn."""
        self._waiting.pop(asked.id, None)

    def sent(self, asked: Asked, now: float) -> None:
        """It has its turn."""
        if asked.kind == len(KINDS) - 1:
            self._waiting.pop(asked.id, None)
            self._now = 0
            return
        oldest = next(iter(self._waiting.values()), None)
        if oldest is None or now - oldest < self._overdue_s:
            self._now = 0
            return
        self._now += 1
        self.most = max(self.most, self._now)


class Flying:
    """A request at an engine: hears of it for the policy and for the count."""

    __slots__ = ("asked", "context", "flight", "gone", "pod", "sender", "stage")

    def __init__(self, stage: "Stage", sender: Sender, asked: Asked, pod: int, context: object) -> None:
        self.stage = stage
        self.sender = sender
        self.asked = asked
        self.pod = pod
        self.context = context
        self.gone = False
        asked.sent_at = stage.clock.now
        stage.passed.sent(asked, asked.sent_at)
        self.flight = stage.world.send(pod, asked, 1, self)
        stage.clock.at(stage.clock.now + FIRST_TOKEN_S, self._late)

    def give_up(self, word: str) -> None:
        """Its slot is free at once."""
        if not self.gone:
            self.gone = True
            self.flight.abort()
            self.stage.ended(self.asked, word)
            self.sender.over(self, False)

    def _late(self) -> None:
        if self.asked.first_at < 0.0:
            self.give_up("ttft_timeout")

    def first(self, flight: Flight) -> None:
        self.asked.first_at = self.stage.clock.now
        self.sender.first(self)

    def token(self, flight: Flight) -> None:
        pass

    def end(self, flight: Flight) -> None:
        self.gone = True
        self.stage.ended(self.asked, SERVED)
        self.sender.over(self, True)

    def error(self, flight: Flight, kind: str) -> None:
        raise AssertionError(f"nothing fails here: {kind}")


class Stage:
    """Engines, clock and policy of a run. `begin` and `end` are of what is counted."""

    __slots__ = ("_work", "begin", "clock", "end", "passed", "policy", "seed", "world")

    policy: Policy

    def __init__(self, seed: int, seconds: float, *, pods: int = PODS, profile: Profile = ENGINE) -> None:
        self.seed = seed
        self.clock = VirtualClock()
        self.world = World(self.clock, profile, pods, (), seed)
        self.begin, self.end = WARMUP_S, WARMUP_S + seconds
        self.passed = Passed()
        self._work = [[0] * TENANTS for _ in KINDS]

    @property
    def until(self) -> float:
        """How long requests come."""
        return self.end + AFTER_S

    def ended(self, asked: Asked, word: str) -> None:
        """A request is over, in this way."""
        now = self.clock.now
        assert not asked.word, f"{asked.word}, and then {word}"
        if word == PREEMPTED:
            asked.evicted += 1
            if asked.evicted <= COMES_BACK:
                asked.sent_at = asked.first_at = -1.0
                self.clock.at(now + AFTER_PREEMPTED_S, self._again, asked)
                return
        asked.word, asked.ended_at = word, now
        self.passed.gone(asked)
        if word == SERVED and self.begin <= now < self.end:
            self._work[asked.kind][asked.tenant] += asked.tokens

    def _again(self, asked: Asked) -> None:
        asked.began_at = self.clock.now
        self.passed.waits(asked, asked.began_at)
        self.policy.start(asked)

    def play(self, policy: Callable[["Stage"], Policy], coming: Sequence[Asked]) -> "Counted":
        """Sends `coming` through it."""
        clock, world = self.clock, self.world
        self.policy = made = policy(self)
        second = 1.0
        slots = 0
        for asked in coming:
            while second <= asked.at:
                clock.run_until(second)
                made.tick(second)
                if self.begin <= second < self.end:
                    slots += sum(pod.running for pod in world.pods)
                second += 1.0
            clock.run_until(asked.at)
            self.passed.waits(asked, asked.at)
            made.start(asked)
        for _ in range(int(DRAIN_S)):
            clock.run_until(second)
            made.tick(second)
            second += 1.0
        total = len(world.pods) * world.profile.slots * (self.end - self.begin)
        return count([asked for asked in coming if self.begin <= asked.at < self.end], self._work, slots / total, self)


class Group(msgspec.Struct, frozen=True):
    """What came of some requests of a class.

    `met`: served, with the first token within the SLA. `goodput`: tokens of answers of those. `longest_s`: the longest
    wait for an engine of one that was sent there in the end or gave up, `ttft_s` quantiles of those that got a token;
    `evicted`: how often one was. `away`: what those that were not served were told.
    """

    asked: int
    met: int
    goodput: int
    served: int
    longest_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    evicted: int
    away: dict[str, int]

    @property
    def attained(self) -> float:
        return self.met / self.asked if self.asked else 1.0


class Counted(msgspec.Struct, frozen=True):
    """A run's figures. `victims` (all but the flooding tenant) and `flooder` by class; `busy`: the part of all slots in
    use; `tokens` by class and tenant, those of prompts and answers; `wanted`: the same of what was asked for;
    `passed`: see `Passed`."""

    victims: list[Group]
    flooder: list[Group]
    busy: float
    tokens: list[list[int]]
    wanted: list[list[int]]
    output_tokens: int
    passed: int


def count(asked: Sequence[Asked], work: list[list[int]], busy: float, stage: Stage) -> Counted:
    wanted = [[0] * TENANTS for _ in KINDS]
    for each in asked:
        wanted[each.kind][each.tenant] += each.tokens
    victims, flooder = [], []
    for number in range(len(KINDS)):
        ours = [each for each in asked if each.kind == number]
        victims.append(_group([each for each in ours if each.tenant != FLOODER], number))
        flooder.append(_group([each for each in ours if each.tenant == FLOODER], number))
    done = sum(each.output_tokens for each in asked if each.word == SERVED)
    return Counted(victims, flooder, busy, work, wanted, done, stage.passed.most)


def _group(asked: Sequence[Asked], number: int) -> Group:
    sla_s = KINDS[number].sla_s
    met = goodput = served = evicted = 0
    longest_s = 0.0
    away: dict[str, int] = {}
    ttft = []
    for each in asked:
        if each.first_at >= 0.0:
            ttft.append(each.first_at - each.at)
        if each.word == SERVED:
            served += 1
            if each.first_at - each.at <= sla_s:
                met += 1
                goodput += each.output_tokens
        else:
            word = each.word or "unfinished"
            away[word] = away.get(word, 0) + 1
        evicted += each.evicted
        waited = (each.sent_at if each.sent_at >= 0.0 else each.ended_at) - each.at
        longest_s = max(longest_s, waited)
    ttft.sort()
    return Group(len(asked), met, goodput, served, longest_s, _at(ttft, 0.5), _at(ttft, 0.99), evicted, away)


def _at(values: Sequence[float], q: float) -> float:
    return values[min(len(values) - 1, int(q * len(values)))] if values else 0.0


def jain(shares: Sequence[float]) -> float:
    """Jain's fairness index: 1 where all are equal, 1/n where one has all (Jain, Chiu, Hawe 1984); 1 of nothing."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0
