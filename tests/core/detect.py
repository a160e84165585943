"""A service under its detector, whose endpoints answer at once and as a test says; no engine, no loop, one clock."""

import random
from collections.abc import Callable
from math import exp

from sidecar.core import evidence
from sidecar.core.breaker import Permit, State, Transition
from sidecar.core.detection import Counts, Detection
from sidecar.core.detector import Detector, Expectation
from sidecar.core.pool import Node
from sidecar.kernel.ids import EndpointKey, SessionId
from sidecar.kernel.outcome import DOCTRINE, Ending
from sidecar.policy.schema import Adaptive, NodeBreaker, Seconds
from tests.core.build import fleet_of, service_of

SIZE_BYTES = 2000
NOISE = 0.2  # of ln seconds
RATE = 10  # answers per second and endpoint


def usual_s(size_bytes: int = SIZE_BYTES, in_flight: int = 0) -> float:
    """What a first token takes where nothing is wrong."""
    return (0.1 + size_bytes / 40_000.0) * (1.0 + in_flight / 20.0)


class Answer:
    """How an endpoint answers: so many times slower than usual, and this share of its answers fails."""

    def __init__(self, slower: float = 1.0, failing: float = 0.0) -> None:
        self.slower = slower
        self.failing = failing


WELL = Answer()


class Pods:
    """`count` endpoints; only the detector opens them, unless `consecutive` says otherwise."""

    def __init__(
        self,
        count: int = 3,
        numbers: Adaptive | None = None,
        *,
        floor: float = 0.0,
        consecutive: int = 1000,
        seed: int = 1,
    ) -> None:
        self.rule = NodeBreaker(
            consecutive=consecutive,
            failure_ratio=0.0,
            open_s=Seconds(10),
            min_closed_ratio=floor,
            adaptive=numbers or Adaptive(),
        )
        self.fleet, self.service = fleet_of(service_of(count, self.rule))
        self.now = 0.0
        self.moved: list[Transition] = []
        self.chance = random.Random(seed)

    @property
    def detection(self) -> Detection:
        assert self.service.detection is not None
        return self.service.detection

    @property
    def nodes(self) -> list[Node]:
        return list(self.service.nodes.values())

    def detector(self, pod: int = 0) -> Detector:
        detector = self.nodes[pod].detector
        assert detector is not None
        return detector

    def state(self, pod: int = 0) -> State:
        return self.nodes[pod].breaker.state

    def tell(self, transition: Transition | None) -> None:
        if transition is not None:
            self.moved.append(transition)

    def opened(self, pod: int | None = None) -> list[Transition]:
        """What opened, of all endpoints or of one."""
        keys = [node.key for node in (self.nodes if pod is None else [self.nodes[pod]])]
        return [move for move in self.moved if move.new is State.OPEN and move.old is State.CLOSED and move.key in keys]

    # One attempt, step by step.

    def ask(
        self, pod: int = 0, *, size_bytes: int = SIZE_BYTES, session: str | None = None, model: str = "m"
    ) -> tuple[Permit, Expectation] | None:
        """An attempt begins; None: its breaker refuses."""
        node = self.nodes[pod]
        permit = node.breaker.acquire(self.now)
        if not isinstance(permit, Permit):
            return None
        self.tell(permit.moved)
        who = None if session is None else SessionId(session)
        expectation = evidence.expect(self.service, node, permit, model, size_bytes, who)
        assert expectation is not None
        return permit, expectation

    def first_token(self, pod: int, expectation: Expectation, took_s: float) -> None:
        self.tell(evidence.first_token(self.service, self.nodes[pod], expectation, took_s, self.now))

    def late(self, pod: int, expectation: Expectation, *, silent: bool = False) -> None:
        self.tell(evidence.late(self.service, self.nodes[pod], expectation, silent, self.now))

    def end(
        self,
        pod: int,
        permit: Permit,
        expectation: Expectation | None,
        ending: Ending = Ending.COMPLETE,
        max_gap_s: float = 0.0,
    ) -> None:
        result = DOCTRINE[ending].node
        node = self.nodes[pod]
        self.tell(evidence.ended(self.service, node, permit, expectation, ending, result, max_gap_s, self.now))

    # Whole attempts.

    def serve(
        self,
        pod: int = 0,
        slower: float = 1.0,
        *,
        size_bytes: int = SIZE_BYTES,
        session: str | None = None,
        gap_s: float = 0.0,
    ) -> bool:
        """One good answer, now, `slower` than usual; False: refused."""
        asked = self.ask(pod, size_bytes=size_bytes, session=session)
        if asked is None:
            return False
        took_s = usual_s(size_bytes, self.nodes[pod].in_flight) * slower
        self.first_token(pod, asked[1], took_s * exp(NOISE * self.chance.gauss(0.0, 1.0)))
        self.end(pod, *asked, max_gap_s=gap_s)
        return True

    def fail(self, pod: int = 0, ending: Ending = Ending.SERVER_ERROR, *, session: str | None = None) -> bool:
        """One failed answer, now; False: refused."""
        asked = self.ask(pod, session=session)
        if asked is None:
            return False
        self.end(pod, *asked, ending)
        return True

    # Time.

    def tick(self) -> None:
        self.moved.extend(self.fleet.tick(self.now))

    def second(self, how: Callable[[int], Answer] = lambda pod: WELL, rate: int = RATE, *, tick: bool = True) -> None:
        """A second of traffic on all endpoints, each with prompts of many lengths."""
        chance = self.chance
        for _ in range(rate):
            self.now += 1.0 / rate
            for pod in range(len(self.nodes)):
                answer = how(pod)
                if chance.random() < answer.failing:
                    self.fail(pod)
                else:
                    self.serve(pod, answer.slower, size_bytes=int(2000 * exp(0.7 * chance.gauss(0.0, 1.0))))
        if tick:
            self.tick()

    def seconds(self, count: int, how: Callable[[int], Answer] = lambda pod: WELL, rate: int = RATE) -> None:
        for _ in range(count):
            self.second(how, rate)

    def until_open(self, how: Callable[[int], Answer], most_s: int, pod: int = 0) -> float:
        """Seconds of such traffic after which `pod` opened; fails after `most_s`."""
        began = self.now
        for _ in range(most_s):
            self.second(how)
            if self.opened(pod):
                return self.opened(pod)[0].at - began
        raise AssertionError(f"it never opened in {most_s} s")

    def learnt(self, seconds: int = 60) -> "Pods":
        """After a while in which nothing was wrong, and nothing was found to be."""
        self.seconds(seconds)
        assert self.detection.ready and not self.opened(), self.opened()
        return self


def only(faulty: int, answer: Answer) -> Callable[[int], Answer]:
    """One endpoint answers so, the others well."""
    return lambda pod: answer if pod == faulty else WELL


def seen(key: EndpointKey, good: int, errors: int, location: float) -> Counts:
    """What another sidecar saw: so many answers, and first tokens that all together moved the location statistic so."""
    timed = 0 if location == 0.0 else 10
    return Counts(key, good, errors, 0, location, timed, 1.1 * timed)


def absorb(pods: Pods, counts: Counts, pod: int = 0) -> None:
    """What another sidecar says, as it will come once there is a way for it."""
    trip = pods.detection.absorb(pods.detector(pod), counts, pods.now)
    if trip is not None:
        pods.tell(evidence._trip(pods.detection, pods.nodes[pod], trip, pods.now))
