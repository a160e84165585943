"""The two ends of the product that the simulation makes up: its links to engines, and its clients."""

from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase

import pytest

from sidecar.kernel.ids import ServiceName
from sidecar.policy.schema import (
    Adaptive,
    Breakers,
    Deadlines,
    Endpoint,
    Hedge,
    Mode,
    NodeBreaker,
    RequestBreaker,
    Retry,
    Seconds,
    Service,
    SessionBreaker,
    Snapshot,
)
from sidecar.simulate.clock import VirtualClock
from sidecar.simulate.fault import Fault, Kind
from sidecar.simulate.ledger import Ledger, Measures
from sidecar.simulate.method import Context, keys_of
from sidecar.simulate.product import BYTES_PER_TOKEN, COPY, Product, model_name, model_of, product
from sidecar.simulate.profile import Profile
from sidecar.simulate.workload import Arrival, luck_of
from sidecar.simulate.world import Flight, Sink, World
from tests.simulate.build import EVEN, arrival_of

FIRST_TOKEN_S, TOKEN_GAP_S = 10.0, 5.0
DEADLINES = Deadlines(first_token_s=Seconds(FIRST_TOKEN_S), token_gap_s=Seconds(TOKEN_GAP_S))
QUIET = Breakers(node=NodeBreaker(mode="off"), session=SessionBreaker(mode="off"), request=RequestBreaker(mode="off"))
ONCE = Retry(attempts=1)


def service_of(
    breakers: Breakers = QUIET, *, retry: Retry | None = None, hedge: Mode = "off", models: Sequence[str] = ("*",)
) -> Service:
    return Service(
        name="chat",
        models=tuple(models),
        deadlines=DEADLINES,
        retry=retry or Retry(),
        hedge=Hedge(mode=hedge),
        breakers=breakers,
    )


def node_breaker(**changes: object) -> Breakers:
    rule: dict[str, object] = {
        "consecutive": 1,
        "failure_ratio": 0.0,
        "open_s": Seconds(5),
        "open_max_s": Seconds(5),
        "successes": 1,
        "min_closed_ratio": 0.0,
    }
    return Breakers(
        node=NodeBreaker(**(rule | changes)),  # type: ignore[arg-type]
        session=SessionBreaker(mode="off"),
        request=RequestBreaker(mode="off"),
    )


class Watched(World):
    """A world that keeps every flight."""

    def __init__(self, profile: Profile, pods: int, faults: Sequence[Fault]) -> None:
        super().__init__(VirtualClock(), profile, pods, faults, 1)
        self.flights: list[Flight] = []

    def send(self, pod_index: int, arrival: Arrival, attempt: int, sink: Sink) -> Flight:
        flight = super().send(pod_index, arrival, attempt, sink)
        self.flights.append(flight)
        return flight


class One:
    """A sidecar before three engines, asked a request at a time. Leaving says whether anything is still held."""

    def __init__(
        self,
        policy: Service | Snapshot,
        *faults: Fault,
        service: str = "",
        settled: bool = True,
        pods: int = 3,
        profile: Profile = EVEN,
        world: type[Watched] = Watched,
    ) -> None:
        self.world = world(profile, pods, faults)
        self.clock = self.world.clock
        self.ledger = Ledger(self.world, 1, 0.0, 10_000.0)
        context = Context(self.clock, self.world, self.ledger, keys_of(pods), 1, 0, [])
        made = product(policy, service, settled=settled)(context)
        assert isinstance(made, Product)
        self.product = made
        self.pipeline = self.product.pipeline
        self._asked = 0

    def ask(self, *, pod: int = 0, session: str | None = "user", after_s: float = 1.0, **of: object) -> Arrival:
        """The next request, `after_s` from now."""
        self.pass_by(after_s)
        self._asked += 1
        arrival = arrival_of(self._asked, self.clock.now, pod=pod, session=session, **of)  # type: ignore[arg-type]
        self.ledger.arrived(arrival)
        self.product.start(arrival)
        return arrival

    def pass_by(self, seconds: float) -> None:
        """Lets time go by, the sidecar's seconds too."""
        end = self.clock.now + seconds
        second = int(self.clock.now) + 1
        while second <= end:
            self.clock.run_until(float(second))
            self.product.tick(float(second))
            second += 1
        self.clock.run_until(end)

    def settle(self) -> Measures:
        """Until all is over; nothing may be left."""
        self.pass_by(60.0)
        assert self.pipeline.live == 0 and len(self.pipeline.watchdog) == 0
        assert [(pod.in_flight, pod.running) for pod in self.world.pods] == [(0, 0)] * len(self.world.pods)
        for service in self.pipeline.fleet.services.values():
            assert all(node.in_flight == 0 and not node.breaker.probes_out for node in service.nodes.values())
        return self.ledger.measures()

    @property
    def sent(self) -> list[tuple[int, int, int]]:
        """Request, attempt and engine of all that was sent."""
        return [(flight.arrival.id, flight.attempt, flight.pod.index) for flight in self.world.flights]


# --- what becomes of a request --------------------------------------------------------------------------------------


def test_a_request_is_served_by_the_engine_and_its_first_token_is_the_engine_s() -> None:
    one = One(service_of())
    arrival = one.ask(prompt=100, output=10)
    measures = one.settle()
    assert one.sent == [(1, 1, 0)]
    assert (measures.served, measures.attempts, measures.retried, measures.per_pod) == (1, 1, 0, (1, 0, 0))
    assert measures.ttft_s(0.5) == pytest.approx(EVEN.ttft_s(100, 1), rel=0.02)
    assert (arrival.flights, arrival.touched) == (1, False)


FATES = [
    # the fault, its strength and the request's luck; what is said of a request that is tried once
    (Kind.OUTAGE, 0.5, "upstream_connect"),
    (Kind.ERRORS, 0.1, "status 500"),
    (Kind.ERRORS, 0.9, "upstream_reset"),
    (Kind.STALL, 0.1, "ttft_timeout"),
    (Kind.STALL, 0.9, "token_gap_timeout"),
]


@pytest.mark.parametrize(("kind", "v", "why"), FATES, ids=[row[2] for row in FATES])
def test_what_fails_once_fails_for_a_reason(kind: Kind, v: float, why: str) -> None:
    one = One(service_of(retry=ONCE), Fault(kind, (0,), 0.0, 100.0))
    arrival = one.ask(v=v, output=100)
    measures = one.settle()
    assert measures.failed == {why: 1}
    assert (measures.served, measures.rejected, measures.attempts) == (0, {}, 1)
    assert arrival.touched


@pytest.mark.parametrize(("kind", "v"), [(Kind.OUTAGE, 0.5), (Kind.ERRORS, 0.9), (Kind.STALL, 0.1)])
def test_what_fails_before_its_first_token_is_tried_elsewhere_and_counts_as_a_retry(kind: Kind, v: float) -> None:
    one = One(service_of(), Fault(kind, (0,), 0.0, 100.0))
    arrival = one.ask(v=v)
    measures = one.settle()
    assert [(number, attempt) for number, attempt, _ in one.sent] == [(1, 1), (1, 2)]
    first, second = (flight.pod.index for flight in one.world.flights)
    assert first == 0 and second in (1, 2)
    assert (measures.served, measures.attempts, measures.retried, measures.failed) == (1, 2, 1, {})
    assert (arrival.flights, arrival.touched) == (2, True)
    assert (measures.every_kind.affected, measures.every_kind.untouched) == (1, 0)


def test_a_stream_that_stalls_is_cut_and_not_tried_again() -> None:
    one = One(service_of(), Fault(Kind.STALL, (0,), 0.0, 100.0))
    one.ask(v=0.75, output=100)
    measures = one.settle()
    assert len(one.sent) == 1
    assert measures.failed == {"token_gap_timeout": 1}


def test_attempts_are_as_many_as_the_policy_has_and_each_has_luck_of_its_own() -> None:
    one = One(service_of(retry=Retry(attempts=3)), Fault(Kind.OUTAGE, (0, 1, 2), 0.0, 100.0))
    one.ask()
    measures = one.settle()
    assert [attempt for _, attempt, _ in one.sent] == [1, 2, 3]
    assert {pod for _, _, pod in one.sent} == {0, 1, 2}
    lucks = [flight._luck.fault_u for flight in one.world.flights]
    assert len(set(lucks)) == 3
    assert (measures.attempts, measures.retried, measures.failed) == (3, 1, {"upstream_connect": 1})


def test_the_prompt_s_length_is_that_of_the_body_and_no_two_prompts_are_alike() -> None:
    one = One(service_of())
    for _ in range(2):
        one.ask(prompt=300)
        exchange = one.product.turn.exchange
        assert exchange is not None
        assert exchange._request.content_length == 300 * BYTES_PER_TOKEN
    one.settle()


# --- sessions -------------------------------------------------------------------------------------------------------


def test_a_settled_session_lives_on_the_engine_that_a_random_balancer_chose() -> None:
    one = One(service_of())
    for number in range(30):
        one.ask(pod=number % 2, session=f"user-{number % 2}", after_s=0.01)
    one.settle()
    assert {(number % 2, pod) for number, _, pod in one.sent} == {(1, 0), (0, 1)}


def test_a_session_that_is_not_settled_goes_where_the_balancer_likes_and_stays_there() -> None:
    one = One(service_of(), settled=False)
    for after_s in (0.01, 1.0):
        for number in range(12):
            one.ask(pod=0, session=f"user-{number}", output=100, after_s=after_s)
        one.pass_by(10.0)
    one.settle()
    homes: dict[str | None, set[int]] = {}
    for flight in one.world.flights:
        homes.setdefault(flight.arrival.session, set()).add(flight.pod.index)
    assert all(len(pods) == 1 for pods in homes.values())
    assert set.union(*homes.values()) == {0, 1, 2}


def test_a_request_without_a_session_has_none_and_is_spread() -> None:
    one = One(service_of())
    for _ in range(30):
        one.ask(pod=0, session=None, output=100, after_s=0.01)
    measures = one.settle()
    (service,) = one.pipeline.fleet.services.values()
    assert len(service.sessions) == 0
    assert min(measures.per_pod) >= 5
    assert measures.served == 30


# --- probes by copy -------------------------------------------------------------------------------------------------


def on_trial(*, share: float, numbers: bool | Adaptive = True) -> One:
    """Engine 0 was away, its breaker opened, its wait is over; it fails `share` of what it is asked."""
    faults = Fault(Kind.OUTAGE, (0,), 0.0, 3.0), Fault(Kind.ERRORS, (0,), 4.0, 1000.0, 1.0, share)
    one = One(service_of(node_breaker(adaptive=numbers)), *faults)
    one.ask(session="first")
    one.pass_by(1.0)
    (opened,) = one.ledger.measures().moves
    assert (opened.pod, opened.old, opened.new) == (0, "closed", "open")
    one.pass_by(5.0)
    one.world.flights.clear()
    return one


def test_a_copy_goes_to_the_engine_on_trial_and_touches_no_client() -> None:
    one = on_trial(share=1.0)
    attempts = one.ledger.attempts
    arrival = one.ask(session="second")
    copy, served = sorted(one.world.flights, key=lambda flight: -flight.attempt)
    assert (copy.attempt, copy.pod.index, copy.hit) == (COPY, 0, True)
    assert (served.attempt, served.hit) == (1, False) and served.pod.index != 0
    measures = one.settle()
    assert one.ledger.attempts == attempts + 1, "the copy is no attempt of a client's"
    assert (arrival.flights, arrival.touched) == (1, False)
    assert measures.served == 2 and measures.failed == {}
    assert [move.new for move in measures.moves] == ["open", "half_open", "open"]


def test_a_copy_has_luck_of_its_own() -> None:
    one = on_trial(share=0.5)
    mine = []
    for _ in range(40):
        one.ask(session=None, u=0.99, after_s=6.0)
    for flight in one.world.flights:
        if flight.attempt == COPY:
            wanted = luck_of(1, flight.arrival.id, COPY, EVEN).fault_u < 0.5
            assert flight.hit is wanted, "and not that of the request, which is never bitten"
            mine.append(flight.hit)
    assert {*mine} == {True, False}
    one.settle()


def test_probes_by_request_touch_their_client() -> None:
    one = on_trial(share=1.0, numbers=Adaptive(probe="request"))
    arrival = one.ask(session="second", pod=0)
    one.settle()
    assert COPY not in {attempt for _, attempt, _ in one.sent}
    assert (0 in {pod for _, _, pod in one.sent}) is arrival.touched is True


# --- late requests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["off", "shadow", "enforce"])
def test_a_late_request_moves_if_the_policy_says_so(mode: Mode) -> None:
    breakers = node_breaker(consecutive=1000, adaptive=Adaptive(min_samples=50))
    one = One(service_of(breakers, hedge=mode), Fault(Kind.STALL, (0,), 100.0, 1000.0))
    for number in range(240):
        one.ask(pod=number % 3, session=f"user-{number % 3}", prompt=50 + 7 * (number % 50), after_s=0.4)
    one.pass_by(10.0)
    one.world.flights.clear()
    before = one.ledger.measures()
    arrival = one.ask(pod=0, session="user-0", v=0.1)
    asked_at = one.clock.now
    after = one.settle()
    first, second = one.world.flights
    assert (first.pod.index, first.attempt, second.attempt) == (0, 1, 2) and second.pod.index != 0
    waited_s = second.sent_at - asked_at
    if mode == "enforce":
        assert 0.25 <= waited_s < 2.0
    else:
        assert waited_s == pytest.approx(FIRST_TOKEN_S, abs=0.2)
    (service,) = one.pipeline.fleet.services.values()
    assert service.hedge_shadowed == (mode == "shadow")
    assert after.served == before.served + 1 and after.retried == before.retried + 1
    assert arrival.touched, "it met the fault all the same"
    assert after.within_slo == before.within_slo + (mode == "enforce")


# --- policies -------------------------------------------------------------------------------------------------------


def snapshot() -> Snapshot:
    """`chat` on engines 0 and 1, with `small` on engine 2 to fall back on."""

    def of(name: str, pods: Sequence[int], models: Sequence[str], fallback: str = "") -> Service:
        endpoints = tuple(Endpoint(url=f"http://{keys_of(3)[pod]}") for pod in pods)
        return Service(
            name=name,
            models=tuple(models),
            fallback=fallback,
            endpoints=endpoints,
            deadlines=DEADLINES,
            breakers=QUIET,
        )

    return Snapshot(version=1, services=(of("chat", (0, 1), ["big-*"], "small"), of("small", (2,), ["tiny"])))


@pytest.mark.parametrize(("asked", "pods"), [("", {0, 1}), ("chat", {0, 1}), ("small", {2})])
def test_the_service_that_is_asked_is_the_named_one_or_the_first(asked: str, pods: set[int]) -> None:
    one = One(snapshot(), service=asked)
    for _ in range(20):
        one.ask(session=None, output=100, after_s=0.2)
    measures = one.settle()
    assert measures.served == 20
    assert {pod for _, _, pod in one.sent} == pods


def test_when_a_service_s_engines_are_gone_its_fallback_serves() -> None:
    one = One(snapshot(), Fault(Kind.OUTAGE, (0, 1), 0.0, 100.0))
    one.ask()
    measures = one.settle()
    assert [pod for _, _, pod in one.sent][-1] == 2
    assert (measures.served, measures.failed) == (1, {})


def test_a_session_whose_engine_is_another_service_s_is_settled_nowhere() -> None:
    one = One(snapshot())
    one.ask(pod=2)
    one.settle()
    ((_, _, pod),) = one.sent
    assert pod in (0, 1)
    session = one.pipeline.fleet.services[ServiceName("chat")].sessions
    assert [each.node_key for each in session.values()] == [keys_of(3)[pod]]


def test_a_service_s_endpoints_become_the_worlds_engines_with_their_zones() -> None:
    one = One(service_of(), pods=5)
    (service,) = one.pipeline.fleet.services.values()
    assert tuple(service.nodes) == keys_of(5)
    assert [endpoint.zone for endpoint in service.policy.endpoints] == [pod.zone for pod in one.world.pods]


@pytest.mark.parametrize(
    ("glob", "name"),
    [("*", "x"), ("llama-[37]*", "llama-3x"), ("gpt-?", "gpt-x"), ("plain", "plain"), ("a[b-d]?*", "abxx")],
)
def test_the_model_asked_for_is_one_that_the_first_glob_takes(glob: str, name: str) -> None:
    service = service_of(models=[glob, "another"])
    assert model_name(service) == name
    assert fnmatchcase(name, glob)
    assert model_of(service).startswith(b'{"model":"%b",' % name.encode())


def test_a_service_without_models_is_asked_for_none() -> None:
    assert model_name(service_of(models=())) == ""


# --- breakers -------------------------------------------------------------------------------------------------------


def test_every_move_of_an_engine_s_breaker_reaches_the_ledger() -> None:
    one = One(service_of(node_breaker()), Fault(Kind.OUTAGE, (0,), 0.0, 3.0))
    one.ask(session="a")
    one.ask(session="b", after_s=6.0)
    measures = one.settle()
    assert [(move.pod, move.old, move.new) for move in measures.moves] == [
        (0, "closed", "open"),
        (0, "open", "half_open"),
        (0, "half_open", "closed"),
    ]
    assert [move.at for move in measures.moves][:2] == pytest.approx([1.0, 7.0], abs=0.01)
    assert measures.moves[0].why == "consecutive" and "connect_failed" in measures.moves[0].evidence
    assert (measures.trips, measures.false_trips, measures.others_tripped) == (1, 0, {})


def test_a_session_s_breaker_is_no_engine_s_and_refuses_before_any_attempt() -> None:
    breakers = Breakers(
        node=NodeBreaker(mode="off"),
        session=SessionBreaker(consecutive=2, open_s=Seconds(100)),
        request=RequestBreaker(mode="off"),
    )
    one = One(service_of(breakers, retry=ONCE))
    for _ in range(3):
        one.ask(session="tenant", poisoned=True)
    measures = one.settle()
    assert len(one.sent) == 2
    assert measures.others_tripped == {"session": 1} and measures.moves == ()
    assert (measures.failed, measures.rejected) == ({"status 500": 2}, {"session_open": 1})


def test_the_sidecar_s_second_lets_it_learn() -> None:
    one = One(service_of(node_breaker()))
    for number in range(40):
        one.ask(pod=number % 3, session=None, after_s=0.1)
    one.settle()
    (service,) = one.pipeline.fleet.services.values()
    assert service.detection is not None
    (line,) = service.detection._lines.values()
    assert line.learnt == 40


def test_the_same_seed_makes_the_same_choices_and_another_sidecar_makes_others() -> None:
    def pods(number: int) -> list[int]:
        world = Watched(EVEN, 3, ())
        one = Product(
            Context(world.clock, world, Ledger(world, 2, 0.0, 100.0), keys_of(3), 1, number, []), service_of()
        )
        for id in range(60):
            world.clock.run_until(0.01 * id)
            one.context.ledger.arrived(arrival := arrival_of(id, world.clock.now, output=1))
            one.start(arrival)
        world.clock.run_until(60.0)
        return [flight.pod.index for flight in world.flights]

    assert pods(0) == pods(0) != pods(1)
    assert min(Counter(pods(0)).values()) > 5


class Full(Watched):
    """Engines of which the first says that it is full."""

    def send(self, pod_index: int, arrival: Arrival, attempt: int, sink: Sink) -> Flight:
        flight = super().send(pod_index, arrival, attempt, sink)
        if pod_index == 0:
            self.clock.at(self.clock.now + 0.001, self._refuse, flight, sink)
        return flight

    def _refuse(self, flight: Flight, sink: Sink) -> None:
        flight.abort()
        sink.error(flight, "full")


def test_an_engine_that_is_full_is_left_alone_and_its_breaker_stays_closed() -> None:
    one = One(service_of(node_breaker()), world=Full)
    for _ in range(10):
        one.ask(pod=0, after_s=0.3)
    measures = one.settle()
    assert measures.requests == measures.within_slo == 10
    assert measures.trips == 0
    asked_of_it = sum(flight.pod.index == 0 for flight in one.world.flights)
    assert 1 <= asked_of_it < 10  # its Retry-After is a second
