import msgspec
import pytest

from sidecar.policy.schema import (
    Breakers,
    Deadlines,
    NodeBreaker,
    RequestBreaker,
    Retry,
    Seconds,
    Service,
    SessionBreaker,
)
from sidecar.simulate.fault import Fault, Kind
from sidecar.simulate.ledger import Measures
from sidecar.simulate.method import Context, Method
from sidecar.simulate.product import Product, product
from sidecar.simulate.profile import CHAT
from sidecar.simulate.run import Scenario, simulate
from sidecar.simulate.workload import Arrival, Modifier, synthetic

DEADLINES = Deadlines(first_token_s=Seconds(10), token_gap_s=Seconds(15))
NONE = Service(
    name="chat",
    deadlines=DEADLINES,
    retry=Retry(attempts=1),
    breakers=Breakers(
        node=NodeBreaker(mode="off"), session=SessionBreaker(mode="off"), request=RequestBreaker(mode="off")
    ),
)
OURS = Service(name="chat", deadlines=DEADLINES)
WARMUP_S = 10.0


def scenario(kind: Kind, *, share: float = 1.0, strength: float = 6.0) -> Scenario:
    return Scenario(kind.value, lambda _, __: [Fault(kind, (1,), 30.0, 60.0, strength, share)], seconds=60.0)


def tried(service: Service, what: Scenario, seed: int = 1, *, sidecars: int = 1, rate: float = 4.0) -> Measures:
    return simulate(product(service), what, seed, pods=3, sidecars=sidecars, rate=rate, warmup_s=WARMUP_S)


def text(measures: Measures) -> bytes:
    return msgspec.json.encode(measures)


def test_the_same_seed_is_the_same_to_the_last_byte() -> None:
    what = scenario(Kind.STALL, share=0.5)
    assert text(tried(OURS, what)) == text(tried(OURS, what))
    assert text(tried(OURS, what)) != text(tried(OURS, what, 2))


@pytest.mark.parametrize("kind", list(Kind))
def test_every_request_has_an_end_and_without_a_breaker_each_affected_one_meets_the_fault(kind: Kind) -> None:
    measures = tried(NONE, scenario(kind, share=0.5))
    ended = measures.served + sum(measures.failed.values()) + sum(measures.rejected.values())
    assert ended == measures.requests > 500
    tally = measures.every_kind
    assert (tally.untouched, measures.trips, measures.retried, measures.rejected) == (0, 0, 0, {})
    assert tally.affected > 20
    assert measures.attempts == measures.requests


def test_without_a_fault_nearly_all_are_answered_in_time() -> None:
    measures = tried(NONE, Scenario("healthy", seconds=60.0))
    assert measures.all_kinds == type(measures.all_kinds)()
    assert measures.goodput is not None
    assert measures.goodput > 0.995


@pytest.mark.parametrize("kind", [Kind.ERRORS, Kind.OUTAGE])
def test_our_breaker_opens_on_the_engine_that_fails_and_keeps_clients_away(kind: Kind) -> None:
    without, ours = (tried(service, scenario(kind)) for service in (NONE, OURS))
    assert {move.pod for move in ours.moves if move.new == "open"} == {1}
    assert ours.false_trips == 0
    i1 = ours.all_kinds.i1
    assert i1 is not None
    assert i1 > 0.8
    assert ours.goodput is not None and without.goodput is not None
    assert ours.goodput > without.goodput
    assert ours.requests == without.requests
    assert all(move.evidence for move in ours.moves if move.new == "open")


def test_a_poisoned_session_is_stopped_and_no_engine_is_blamed() -> None:
    what = Scenario("tenant", modifiers=lambda _: [Modifier("tenant", 10.0, 70.0, 0.1)], seconds=60.0)
    measures = tried(OURS, what, rate=8.0)
    assert measures.trips == 0
    assert measures.others_tripped["session"] >= 1
    assert measures.rejected["session_open"] > 20
    assert measures.good_rejected == 0


def test_each_sidecar_sees_its_share_and_all_are_each_other_s_peers() -> None:
    seen: list[Counting] = []

    def make(context: Context) -> Method:
        seen.append(Counting(context))
        return seen[-1]

    measures = simulate(make, Scenario("healthy", seconds=30.0), 1, pods=3, sidecars=4, rate=4.0, warmup_s=0.0)
    assert [each.context.number for each in seen] == [0, 1, 2, 3]
    assert all(each.context.peers == seen and each.ticks >= 30 and each.closed for each in seen)
    assert sum(each.requests for each in seen) == measures.requests
    assert min(each.requests for each in seen) > 50
    assert sum(measures.rejected.values()) == measures.requests


class Counting:
    """A method that refuses everybody."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.requests = self.ticks = 0
        self.closed = False

    def start(self, arrival: Arrival) -> None:
        self.requests += 1
        self.context.ledger.rejected(arrival, "all")

    def tick(self, now: float) -> None:
        assert now == pytest.approx(self.context.clock.now)
        self.ticks += 1

    def close(self) -> None:
        self.closed = True


def test_nothing_is_held_when_it_is_over() -> None:
    made: list[Product] = []

    def make(context: Context) -> Method:
        made.append(Product(context, OURS))
        return made[-1]

    simulate(make, scenario(Kind.STALL, share=0.5), 1, pods=3, rate=4.0, warmup_s=WARMUP_S)
    (one,) = made
    assert one.pipeline.live == 0
    assert len(one.pipeline.watchdog) == 0
    assert all(pod.in_flight == 0 for pod in one.context.world.pods)
    assert all(
        node.in_flight == 0 for service in one.pipeline.fleet.services.values() for node in service.nodes.values()
    )


def test_a_session_lives_on_its_engine_from_the_first_request() -> None:
    measures = tried(NONE, Scenario("healthy", seconds=60.0))
    made = [arrival for arrival in synthetic(CHAT, 4.0, 3, WARMUP_S + 60.0, 1) if arrival.at >= WARMUP_S]
    assert measures.per_pod == tuple(sum(arrival.user_pod == pod for arrival in made) for pod in range(3))
