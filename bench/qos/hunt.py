"""An engine that is slower the more it is given must not make the balance hunt (T26).

A gives its first token after 0.5 s + 0.1 s for each request that it has; B after 2 s, however many it has. 40 requests
a second come for ten minutes, and a first token is owed within 3 s. A can give some 8 a second in that time: with 25 in
flight. Who balances by requests in flight gives it as many as B, 60, and A takes 6.5 s; who shuns it then finds it fast
again, and so on.

The request path is the product's (`simulate.product`): pipeline, gate, learned limit, balance, breakers. An answer is
over half a second after its first token.
"""

from collections.abc import Sequence
from math import exp

import msgspec

from sidecar.policy.schema import Admission, Endpoint, QosPolicy, Service, Snapshot
from sidecar.simulate.clock import VirtualClock
from sidecar.simulate.ledger import Ledger
from sidecar.simulate.method import Context, keys_of
from sidecar.simulate.product import Product
from sidecar.simulate.profile import Profile
from sidecar.simulate.workload import Arrival, Luck, rng_of
from sidecar.simulate.world import Flight, Pod, Sink, World

A, B = 0, 1
RATE = 40.0
TARGET_S = 3.0
MINUTES_S = 600.0
WARMUP_S = 60.0
SETTLED_S = 270.0
"""Until then nothing is wrong in any variant."""
WINDOW_S = 10.0
MOVE = 0.1
"""The share of A has turned when it goes back by so much of all requests: less is the chance of 400 of them."""
ANSWER_S = 0.5
SHEDS_AT, FULL_AT = 16, 20
"""What an engine has in flight when it says that it is full, in the variants where it does."""
ALL = 1 << 30
ENOUGH = 100
"""Requests in ten seconds: of fewer a share says nothing."""

EVEN = Profile(
    name="t26",
    prompt_median=512.0,
    prompt_sigma=0.5,
    prompt_max=4096,
    output_median=10.0,
    output_sigma=0.0,
    output_max=10,
    stragglers=0.0,
    errors=0.0,
    pauses=0.0,
    speed_sigma=0.0,
)


class Case(msgspec.Struct, frozen=True):
    """A variant. `rates`: until when so many requests come per second. `sheds`: A says 503 instead of slowing.
    `slow`: between two moments A takes so many times as long. `away`: A is scaled away and comes back. `full`: between
    two moments both say 503 from `FULL_AT` in flight on. `admission`: of the policy; None: the default's. `well_at`:
    from when on A ought to have its share again."""

    name: str
    what: str
    rates: tuple[tuple[float, float], ...] = ((MINUTES_S, RATE),)
    sheds: bool = False
    slow: tuple[float, float, float] = (0.0, 0.0, 1.0)
    away: tuple[float, float] = (0.0, 0.0)
    full: tuple[float, float] = (0.0, 0.0)
    admission: Admission | None = None
    well_at: float = 0.0

    @property
    def enough(self) -> bool:
        """Whether the two can do what is asked, all the time."""
        return not self.full[1] and self.admission is None


QUIET_S = 1800.0
OVER = Admission(mode="enforce", limit="fixed", concurrency=20, queue=50)
CASES = (
    Case("steady", "40 requests/s for 10 minutes"),
    Case("sheds", "A says 503 from 16 in flight on, and is as fast as ever", sheds=True),
    Case(
        "quiet",
        "A four times as slow for 2 minutes, then 1 request a minute for 30, then 40/s again",
        rates=((420.0, RATE), (420.0 + QUIET_S, 1.0 / 60.0), (420.0 + QUIET_S + 300.0, RATE)),
        slow=(300.0, 420.0, 4.0),
        well_at=420.0 + QUIET_S,
    ),
    Case("autoscaled", "A is removed for a minute and added again", away=(270.0, 330.0), well_at=330.0),
    Case("over", "both may have 20 in flight, 15/s, and 50 may wait: the rest is shed", admission=OVER),
    Case("full", "from 300 s on both say 503 from 20 in flight on", full=(300.0, 600.0)),
)


class Hunted(msgspec.Struct, frozen=True):
    """What came of it, after the warm-up.

    `within`: of all requests, those whose first token came within the target. `turns`: how often A's share changed its
    direction. `shares`: of A, per 10 s (-1: nothing was asked). `shed`: requests that we refused, by reason; `failed`
    those that failed; `said_full`: answers of engines that were full. `trips`: breakers that opened. `again_s`: how
    long after `well_at` A had half of its usual share again, -1: never, or nothing was wrong; `quiet`: A's share of the
    few requests between the crowds, -1: there were always many.
    """

    case: str
    seed: int
    requests: int
    within: float
    turns: int
    share: float
    shares: list[float]
    shed: dict[str, int]
    failed: dict[str, int]
    said_full: int
    trips: int
    again_s: float
    quiet: float


class Held(Flight):
    """A request at one of the two."""

    __slots__ = ("over",)

    def __init__(self, world: "Pair", pod: Pod, arrival: Arrival, attempt: int, luck: Luck, sink: Sink) -> None:
        super().__init__(world, pod, arrival, attempt, luck, sink)
        self.over = False
        pod.in_flight += 1

    def abort(self) -> None:
        self._leave()

    def said_first(self) -> None:
        if not self.over:
            self.sink.first(self)

    def said_end(self) -> None:
        if self._leave():
            self.sink.end(self)

    def said_full(self) -> None:
        if self._leave():
            self.sink.error(self, "full")

    def _leave(self) -> bool:
        if self.over:
            return False
        self.over = True
        self.pod.in_flight -= 1
        return True


class Pair(World):
    """A and B."""

    __slots__ = ("case", "said_full")

    def __init__(self, case: Case, seed: int) -> None:
        super().__init__(VirtualClock(), EVEN, 2, (), seed)
        self.case = case
        self.said_full = 0

    def send(self, pod_index: int, arrival: Arrival, attempt: int, sink: Sink) -> Flight:
        clock, case, pod = self.clock, self.case, self.pods[pod_index]
        flight = Held(self, pod, arrival, attempt, arrival, sink)
        now = clock.now
        begin, end = case.full
        if case.sheds and pod_index == A:
            most = SHEDS_AT
        else:
            most = FULL_AT if begin <= now < end else ALL
        if pod.in_flight > most:
            self.said_full += 1
            clock.at(now + 0.005, flight.said_full)
            return flight
        took_s = 2.0
        if pod_index == A:
            took_s = 0.5 + (0.0 if case.sheds else 0.1 * pod.in_flight)
            if case.slow[0] <= now < case.slow[1]:
                took_s *= case.slow[2]
        took_s *= exp(0.05 * arrival.noise)
        clock.at(now + took_s, flight.said_first)
        clock.at(now + took_s + ANSWER_S, flight.said_end)
        return flight


class Book(Ledger):
    """Every request, and where it went first."""

    def __init__(self, world: World) -> None:
        super().__init__(world, 1, 0.0, 1e9)
        self.went: list[tuple[float, int]] = []
        self.firsts: list[tuple[float, float]] = []
        self.refused: list[tuple[float, str]] = []
        self.broken: list[tuple[float, str]] = []
        self.opened: list[float] = []

    def touched(self, arrival: Arrival, flight: Flight) -> None:
        self.went.append((flight.sent_at, flight.pod.index))

    def served(self, arrival: Arrival, ttft_s: float) -> None:
        self.firsts.append((arrival.at, ttft_s))

    def failed(self, arrival: Arrival, why: str) -> None:
        self.broken.append((arrival.at, why))

    def rejected(self, arrival: Arrival, why: str) -> None:
        self.refused.append((arrival.at, why))

    def moved(
        self, pod: int, old: str, new: str, at: float, why: str = "", evidence: str = "", sidecar: int = 0
    ) -> None:
        if new == "open":
            self.opened.append(at)

    def tripped(self, scope: str) -> None:
        raise AssertionError(f"a breaker of a {scope} opened: there are no sessions, and no answer is a fault")


def policy_of(endpoints: Sequence[int], admission: Admission) -> Snapshot:
    """One class, and the two engines."""
    keys = keys_of(2)
    service = Service(
        name="chat", endpoints=tuple(Endpoint(url=f"http://{keys[n]}") for n in endpoints), admission=admission
    )
    classes = (QosPolicy(name="default", latency_sla_ms=int(1000 * TARGET_S)),)
    return Snapshot(version=1, services=(service,), qos_policies=classes)


def hunt(case: Case, seed: int, admission: Admission | None = None) -> Hunted:
    """Plays it. `admission`: by default the product's own, enforced."""
    rule = admission or case.admission or Admission(mode="enforce")
    world = Pair(case, seed)
    clock = world.clock
    book = Book(world)
    product = Product(Context(clock, world, book, keys_of(2), seed, 0, []), policy_of((A, B), rule), settled=False)

    def scale(endpoints: tuple[int, ...]) -> None:
        product.pipeline.fleet.apply(policy_of(endpoints, rule), clock.now)
        product.pipeline.policy_changed()

    if case.away[1]:
        clock.at(case.away[0], scale, (B,))
        clock.at(case.away[1], scale, (A, B))
    end = case.rates[-1][0]
    rng = rng_of(seed, f"t26:{case.name}")
    second, number, now, first = 1.0, 0, 0.0, 0.0
    asked = []
    for until, rate in case.rates:
        now = first
        while True:
            now += rng.expovariate(rate)
            if now >= until:
                break
            while second <= now:
                clock.run_until(second)
                product.tick(second)
                second += 1.0
            clock.run_until(now)
            number += 1
            prompt = max(
                1, min(EVEN.prompt_max, int(EVEN.prompt_median * exp(EVEN.prompt_sigma * rng.gauss(0.0, 1.0))))
            )
            arrival = Arrival(number, now, prompt, 10, None, 0)
            arrival.draw(rng, EVEN)
            asked.append(now)
            product.start(arrival)
        first = until
    while second <= end + 60.0:
        clock.run_until(second)
        product.tick(second)
        second += 1.0
    return _hunted(case, seed, asked, book, world.said_full, end)


def _hunted(case: Case, seed: int, asked: Sequence[float], book: Book, said_full: int, end: float) -> Hunted:
    counts = [[0, 0] for _ in range(int(end / WINDOW_S) + 1)]
    for at, pod in book.went:
        if at < end:
            counts[int(at / WINDOW_S)][pod] += 1
    shares = [a / (a + b) if a + b >= ENOUGH else -1.0 for a, b in counts[:-1]]
    quiet = [sum(count[pod] for count in counts if 0 < sum(count) < ENOUGH) for pod in (A, B)]
    count = sum(at >= WARMUP_S for at in asked)
    within = sum(at >= WARMUP_S and ttft_s <= TARGET_S for at, ttft_s in book.firsts)
    warm = [share for share in shares[int(WARMUP_S / WINDOW_S) :] if share >= 0.0]
    before = [share for share in shares[int(WARMUP_S / WINDOW_S) : int(SETTLED_S / WINDOW_S)] if share >= 0.0]
    settled = sum(before) / len(before)
    again = [number for number in range(int(case.well_at / WINDOW_S), len(shares)) if shares[number] >= settled / 2.0]
    return Hunted(
        case.name,
        seed,
        count,
        within / count,
        turns_of(warm),
        settled,
        [round(share, 3) for share in shares if share >= 0.0],
        _sum(book.refused),
        _sum(book.broken),
        said_full,
        sum(at >= WARMUP_S for at in book.opened),
        again[0] * WINDOW_S + WINDOW_S - case.well_at if case.well_at and again else -1.0,
        quiet[A] / sum(quiet) if sum(quiet) >= 10 else -1.0,
    )


def turns_of(shares: Sequence[float], move: float = MOVE) -> int:
    """How often a course turns by at least `move`."""
    turns, way, extreme = 0, 0, shares[0] if shares else 0.0
    for share in shares:
        if (way > 0 and share > extreme) or (way < 0 and share < extreme):
            extreme = share
        elif abs(share - extreme) >= move:
            turns += way != 0
            way = 1 if share > extreme else -1
            extreme = share
    return turns


def _sum(told: Sequence[tuple[float, str]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for at, why in told:
        if at >= WARMUP_S:
            found[why] = found.get(why, 0) + 1
    return dict(sorted(found.items()))
