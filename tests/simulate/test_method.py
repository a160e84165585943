"""What a method is given; that it is driven as promised is in test_run."""

import pytest

from sidecar.policy.address import endpoint_key
from sidecar.simulate.ledger import Ledger
from sidecar.simulate.method import Context, Method, keys_of
from sidecar.simulate.workload import Arrival
from tests.simulate.build import arrival_of, world_of


class Quiet:
    """A method that sends nothing anywhere."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.started: list[Arrival] = []

    def start(self, arrival: Arrival) -> None:
        self.started.append(arrival)

    def tick(self, now: float) -> None:
        raise AssertionError("nobody ticks here")

    def close(self) -> None:
        raise AssertionError("nobody closes here")


def test_every_engine_has_a_key_of_its_own_in_the_world_s_order() -> None:
    keys = keys_of(12)
    assert keys[0] == "pod-0:8000" and keys[11] == "pod-11:8000"
    assert len(set(keys)) == 12
    assert keys_of(3) == keys[:3]
    assert keys_of(0) == ()


@pytest.mark.parametrize("number", [0, 9, 150])
def test_a_key_is_the_one_that_a_policy_s_address_has(number: int) -> None:
    key = keys_of(number + 1)[number]
    assert endpoint_key(f"http://{key}") == key


def test_a_context_has_what_it_was_given_and_keys_that_nobody_can_change() -> None:
    world = world_of()
    ledger = Ledger(world, 2, 0.0, 10.0)
    keys = list(keys_of(3))
    context = Context(world.clock, world, ledger, keys, 7, 1, [])
    keys.clear()
    assert context.pods == keys_of(3)
    assert (context.clock, context.world, context.ledger) == (world.clock, world, ledger)
    assert (context.seed, context.number) == (7, 1)


def test_peers_are_seen_by_those_who_were_made_before_them() -> None:
    world = world_of()
    ledger = Ledger(world, 3, 0.0, 10.0)
    peers: list[Method] = []
    made = []
    for number in range(3):
        made.append(Quiet(Context(world.clock, world, ledger, keys_of(3), 1, number, peers)))
        peers.append(made[-1])
    assert all(one.context.peers == made for one in made)
    made[0].context.peers[2].start(arrival_of(5))
    assert [arrival.id for arrival in made[2].started] == [5]
