"""What is left free for the others while a tenant floods."""

import math

import pytest

from sidecar.core.gate.headroom import is_kept
from sidecar.core.gate.turns import Lane, Ticket
from sidecar.core.pool import LOOKS
from sidecar.policy.schema import Admission
from tests.core.build import trip
from tests.core.gate.build import World, full


def lane_of(ticket: Ticket) -> Lane:
    assert ticket.share is not None
    return ticket.share.group.lane


@pytest.mark.parametrize(
    "within, free, kept",
    [
        pytest.param(0, 0, False, id="beside none nothing"),
        pytest.param(1, 1, False, id="beside one not the last"),
        pytest.param(2, 1, True, id="beside two the last"),
        pytest.param(2, 2, False, id="beside two not the last but one"),
        pytest.param(4, 2, False, id="beside four two are free"),
        pytest.param(5, 2, True, id="beside five three are to be"),
        pytest.param(16, 3, True, id="beside sixteen four"),
        pytest.param(16, 4, False, id="beside sixteen four are free"),
    ],
)
def test_as_many_are_kept_as_the_number_of_the_others_varies_by(within: int, free: int, kept: bool) -> None:
    world = World(30)
    lane = lane_of(full(world)[0])
    lane.within = within
    world.nodes[0].limit = 30 + free
    assert is_kept(lane) is kept


def test_those_who_keep_to_their_part_are_counted_while_they_run() -> None:
    world = World(9)
    first = world.come("batch", "flood", 5000)
    small = [world.come(qos, f"small{place}", 10) for place, qos in enumerate(("voice", "text", "batch"))]
    lane = lane_of(first)
    assert lane.within == 4  # alone, the flood had but its part
    world.come("voice", "flood", 5000)
    flood = world.come("voice", "flood", 5000)
    assert (lane.running, lane.within) == (6, 5)
    for ticket in (flood, first, small[0]):
        world.leave(ticket)
        world.leave(ticket)
    assert (lane.running, lane.within) == (3, 3)


def test_where_nobody_can_serve_nothing_is_kept() -> None:
    world = World(10)
    lane = lane_of(full(world)[0])
    assert lane.within == 10 and is_kept(lane)
    trip(world.nodes[0].breaker, world.now)
    world.service.pool("m", None).refresh(world.now)
    assert not is_kept(lane)


def test_endpoints_count_together_and_one_over_its_limit_takes_from_none() -> None:
    world = World(5, 5)
    lane = lane_of(full(world)[0])
    lane.within = 9
    world.nodes[0].limit, world.nodes[1].limit = 1, 7
    assert is_kept(lane)
    world.nodes[1].limit = 8
    assert not is_kept(lane)
    world.nodes[0].limit, world.nodes[1].limit = 5, math.inf
    assert not is_kept(lane)


def test_a_part_of_a_slot_is_one() -> None:
    world = World(1, 1, 1, 1)
    lane = lane_of(full(world)[0])
    lane.within = 4
    for node in world.nodes[:2]:
        node.limit = 1.2
    assert lane.pool.has_room(world.now) and not is_kept(lane)
    world.nodes[0].limit = 1.0
    assert is_kept(lane)


def test_of_very_many_endpoints_a_part_is_looked_at() -> None:
    count = 4 * LOOKS
    world = World(*[1] * count, admission=Admission(queue=0, fairness="class"))
    lane = lane_of(full(world)[0])
    nodes = lane.pool.ready.nodes
    assert lane.within == count and is_kept(lane)
    for node in nodes[:8]:  # of all it would be the root, 32
        node.in_flight = 0
    assert not is_kept(lane)
