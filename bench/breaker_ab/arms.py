"""What is compared: the rules to beat in a simple flow each, and ours with its ablations in the product's own pipeline.

The flow is the same for all rules: the pod that a random balancer chose if its breaker admits, else the less loaded of
two random pods that do, else a rejection. No retries. A request that has no first token after 10 s, or is silent for
15 s, is given up and counts as failed: with the client as with the breaker.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from msgspec import convert

from bench.breaker_ab.guards import (
    Alarms,
    Detector,
    Ejection,
    Formula,
    Group,
    Guard,
    Linkerd,
    Moved,
    Resilience4j,
    Sweep,
)
from bench.breaker_ab.pooled import Pooled
from bench.breaker_ab.spot import Dspot, Spot
from sidecar.kernel.ids import ServiceName
from sidecar.policy.schema import (
    Adaptive,
    Breakers,
    Deadlines,
    Hedge,
    Mode,
    NodeBreaker,
    Retry,
    Seconds,
    Service,
    SessionBreaker,
)
from sidecar.simulate.ledger import Ledger
from sidecar.simulate.method import Context, Factory
from sidecar.simulate.product import product
from sidecar.simulate.workload import Arrival
from sidecar.simulate.world import Flight

TTFT_S, GAP_S = 10.0, 15.0
FIRST = 1
"""The number of a request's first attempt, which has the luck that all arms see."""


class Flow:
    """One sidecar that routes by a rule."""

    __slots__ = ("_chance", "_clock", "_context", "_group", "_in_flight", "_ledger", "_number", "_world")

    def __init__(self, context: Context, make: "Make") -> None:
        pods = len(context.pods)
        self._context = context
        self._clock = context.clock
        self._world = context.world
        self._ledger: Ledger = context.ledger
        self._number = context.number
        self._chance = Random(f"{context.seed}/{context.number}")
        self._in_flight = [0] * pods
        self._group = make(pods, self._moved, self._chance)

    def start(self, arrival: Arrival) -> None:
        now = self._clock.now
        guards = self._group.guards
        pod = arrival.user_pod
        if not guards[pod].admits(now):
            others = [guard.pod for guard in guards if guard.admits(now)]
            if not others:
                self._ledger.rejected(arrival, "no pod")
                return
            if len(others) > 2:
                others = self._chance.sample(others, 2)
            pod = min(others, key=self._in_flight.__getitem__)
        self._in_flight[pod] += 1
        Try(self, arrival, guards[pod], now)

    def tick(self, now: float) -> None:
        self._group.tick(now)

    def close(self) -> None:
        pass

    def _moved(self, pod: int, old: str, new: str, at: float, why: str) -> None:
        self._ledger.moved(pod, old, new, at, why, sidecar=self._number)


class Try:
    """A request at a pod, and the deadlines on it."""

    __slots__ = ("_arrival", "_begun", "_done", "_flight", "_flow", "_guard", "_heard", "_permit", "_ttft_s")

    def __init__(self, flow: Flow, arrival: Arrival, guard: Guard, now: float) -> None:
        self._flow = flow
        self._arrival = arrival
        self._guard = guard
        self._begun = self._heard = now
        self._ttft_s: float | None = None
        self._done = False
        self._permit = guard.sent(now)
        self._flight = flow._world.send(guard.pod, arrival, FIRST, self)
        flow._ledger.touched(arrival, self._flight)
        flow._clock.at(now + TTFT_S, self._look)

    def first(self, flight: Flight) -> None:
        self._heard = now = self._flow._clock.now
        self._ttft_s = now - self._begun
        self._guard.first(self._permit, now, self._ttft_s)

    def token(self, flight: Flight) -> None:
        self._heard = self._flow._clock.now

    def end(self, flight: Flight) -> None:
        self._end(True)
        self._flow._ledger.served(self._arrival, self._ttft_s if self._ttft_s is not None else 0.0)

    def error(self, flight: Flight, kind: str) -> None:
        self._end(False)
        self._flow._ledger.failed(self._arrival, kind)

    def _look(self) -> None:
        if self._done:
            return
        now = self._flow._clock.now
        due = self._heard + GAP_S
        if self._ttft_s is not None and now < due:
            self._flow._clock.at(due, self._look)
            return
        self._flight.abort()
        self._end(False)
        self._flow._ledger.failed(self._arrival, "no first token" if self._ttft_s is None else "silent")

    def _end(self, ok: bool) -> None:
        now = self._flow._clock.now
        self._done = True
        self._flow._in_flight[self._guard.pod] -= 1
        self._guard.ended(self._permit, now, ok, self._ttft_s, now - self._begun)


NEVER = 1_000_000

Make = Callable[[int, Moved, Random], Group]


@dataclass(frozen=True)
class Arm:
    """One row of the table: a rule (`make`), or the product.

    `adaptive`: keys of breakers.node.adaptive that differ from its defaults; None: the fixed rules alone. `attempts`:
    of retry. `hedge`: whether late requests move. `session`: mode of the sessions' breakers.
    """

    name: str
    what: str
    make: Make | None = None
    adaptive: dict[str, Any] | None = field(default_factory=dict)
    attempts: int = 1
    hedge: Mode = "off"
    session: Mode = "enforce"

    @property
    def ours(self) -> bool:
        return self.make is None

    def factory(self, adaptive: Mapping[str, Any], *, pooled: bool = False) -> Factory:
        """Makes one per sidecar; `adaptive` are keys that all of ours get as well, `pooled` is for ours."""
        make = self.make
        if make is not None:
            return lambda context: Flow(context, make)
        service = self.service(adaptive)
        return (lambda context: Pooled(context, service)) if pooled else product(service)

    def service(self, adaptive: Mapping[str, Any]) -> Service:
        """The policy of one of ours. ValidationError if a key or a value is none."""
        judged = False if self.adaptive is None else convert({**adaptive, **self.adaptive}, Adaptive, strict=False)
        return Service(
            name=ServiceName("chat"),
            deadlines=Deadlines(first_token_s=Seconds(TTFT_S), token_gap_s=Seconds(GAP_S)),
            retry=Retry(attempts=self.attempts),
            hedge=Hedge(mode=self.hedge),
            breakers=Breakers(node=NodeBreaker(adaptive=judged), session=SessionBreaker(mode=self.session)),
        )


def each(guard: Callable[[int, Moved, Random], Guard]) -> Make:
    """A rule of which every pod has its own."""
    return lambda pods, moved, chance: Group([guard(pod, moved, chance) for pod in range(pods)])


def _formula(name: str, what: str, **numbers: Any) -> Arm:
    return Arm(name, what, each(lambda pod, moved, chance: Formula(pod, moved, **numbers)))


def _resilience4j(name: str, what: str, **numbers: Any) -> Arm:
    return Arm(name, what, each(lambda pod, moved, chance: Resilience4j(pod, moved, **numbers)))


def _envoy(name: str, what: str, rules: Ejection) -> Arm:
    return Arm(name, what, lambda pods, moved, chance: Sweep(pods, moved, rules))


def _alarms(name: str, what: str, detector: Callable[[], Detector], needed: int) -> Arm:
    return Arm(name, what, each(lambda pod, moved, chance: Alarms(pod, moved, detector(), needed=needed)))


RULES = [
    Arm("none", "no breaker", each(lambda pod, moved, chance: Guard(pod, moved))),
    _formula("fixed-and", "P99.9 > 200 ms and > 3 failures", fixed_s=0.2),
    _formula("fixed-slow", "P99.9 > 200 ms and > 3 failures, slow is a failure", fixed_s=0.2, slow_counts=True),
    _formula("formula", "the formula as written, kappa 1.82", kappa=1.82),
    _formula("formula-5.87", "the same with kappa 5.87", kappa=5.87),
    _formula("formula-slow", "kappa 1.82, slow is a failure", kappa=1.82, slow_counts=True),
    _formula("formula-slow-5.87", "kappa 5.87, slow is a failure", kappa=5.87, slow_counts=True),
    _resilience4j("resilience4j", "resilience4j's defaults"),
    _resilience4j(
        "resilience4j-tuned",
        "window 20, failures 30 %, slow 50 % at 1 s, wait 5 s, 5 trials",
        window=20,
        least=10,
        failed_ratio=0.3,
        slow_s=1.0,
        slow_ratio=0.5,
        wait_s=5.0,
        permitted=5,
    ),
    _envoy("envoy", "Envoy's outlier detection, defaults", Ejection()),
    _envoy(
        "envoy-tuned",
        "3 in a row, or 20 % of 20 in 5 s; 5 s ejection, 66 %, panic at 30 %, slow at 1 s is a 5xx",
        Ejection(
            consecutive_5xx=3,
            interval_s=5.0,
            base_ejection_s=5.0,
            max_ejection_ratio=0.66,
            success_rate_minimum_hosts=NEVER,
            failure_ratio=0.2,
            failure_request_volume=20,
            panic_ratio=0.3,
            slow_s=1.0,
        ),
    ),
    _envoy(
        "envoy-percentage",
        "failure percentage only: 30 % of 50 in 10 s, slow at 1 s is a 5xx",
        Ejection(
            consecutive_5xx=NEVER,
            success_rate_minimum_hosts=NEVER,
            failure_ratio=0.3,
            base_ejection_s=15.0,
            max_ejection_ratio=0.66,
            panic_ratio=0.3,
            slow_s=1.0,
        ),
    ),
    Arm(
        "linkerd",
        "7 in a row, 1 to 60 s, first token after 1 s is a failure",
        each(lambda pod, moved, chance: Linkerd(pod, moved, chance, slow_s=1.0)),
    ),
    _alarms("spot", "SPOT on the first token's time, q 1e-4, 4 alarms or failures in 20 requests", Spot, 4),
    _alarms("dspot", "DSPOT, depth 100, the same", Dspot, 4),
]

OURS = [
    Arm("ours", "the product's adaptive breaker, nothing sent twice"),
    Arm("ours+rescue", "the same, with retries and hedges before the first byte", attempts=3, hedge="enforce"),
    Arm("ours-fixed", "the product's fixed rules alone", adaptive=None),
    Arm("ours-no-covariates", "prompt and load explain nothing", adaptive={"covariates": False}),
    Arm("ours-no-location", "without the location statistic", adaptive={"statistics": ["fast", "gray"]}),
    Arm("ours-no-gray", "without the gray statistic", adaptive={"statistics": ["fast", "location"]}),
    Arm("ours-no-in-flight", "what is late counts at its end", adaptive={"in_flight": False}),
    Arm("ours-no-guards", "overload stops nothing", adaptive={"guards": False}),
    Arm("ours-probe-request", "probes are clients' requests, no copies", adaptive={"probe": "request"}),
    Arm("ours-no-session", "sessions have no breakers", session="off"),
]

ARMS = {arm.name: arm for arm in (*RULES, *OURS)}
