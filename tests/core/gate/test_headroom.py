"""What is left free for the others while a tenant floods."""

import math

import pytest

from sidecar.core.gate.headroom import is_kept
from sidecar.core.gate.turns import Share
from sidecar.core.pool import LOOKS
from sidecar.policy.schema import Admission
from tests.core.build import trip
from tests.core.gate.build import World


def there(world: World, tenant: str, count: int, qos: str = "text") -> Share:
    """The tenant, with so many that run."""
    tickets = [world.come(qos, tenant) for _ in range(count)]
    share = tickets[0].share
    assert share is not None and share.running == count
    return share


@pytest.mark.parametrize(
    "others, free, kept",
    [
        pytest.param(1, 1, False, id="beside one the last"),
        pytest.param(2, 1, True, id="beside two not the last"),
        pytest.param(2, 2, False, id="beside two the last but one"),
        pytest.param(4, 2, False, id="beside four two are free"),
        pytest.param(5, 2, True, id="beside five three are to be"),
        pytest.param(16, 3, True, id="beside sixteen four"),
        pytest.param(16, 4, False, id="beside sixteen the fifth"),
    ],
)
def test_as_many_are_kept_as_the_number_of_the_others_varies_by(others: int, free: int, kept: bool) -> None:
    world = World(others + 1 + free)
    there(world, "small", others)
    flood = there(world, "flood", 1)
    assert is_kept(flood.group.lane, flood) is kept


def test_whoever_the_others_are_and_whatever_their_class() -> None:
    world = World(20)
    for place, qos in enumerate(("voice", "text", "batch")):
        there(world, f"small{place}", 3, qos)
    there(world, "flood", 6, "batch")
    flood = there(world, "flood", 3, "voice")
    assert is_kept(flood.group.lane, flood)  # 2 are free, and 9 of others run
    world.nodes[0].limit = 21
    assert not is_kept(flood.group.lane, flood)


def test_nothing_is_kept_where_nobody_else_runs_or_nobody_can() -> None:
    world = World(10)
    flood = there(world, "flood", 10)
    assert not is_kept(flood.group.lane, flood)
    world = World(10)
    there(world, "small", 9)
    flood = there(world, "flood", 1)
    assert is_kept(flood.group.lane, flood)
    trip(world.nodes[0].breaker, world.now)
    world.service.pool("m", None).refresh(world.now)
    assert not is_kept(flood.group.lane, flood)


def test_endpoints_count_together_and_one_over_its_limit_takes_from_none() -> None:
    world = World(5, 5)
    there(world, "small", 7)
    flood = there(world, "flood", 1)
    assert is_kept(flood.group.lane, flood)
    world.nodes[0].limit, world.nodes[1].limit = 1, 7
    assert not is_kept(flood.group.lane, flood)  # 3 are free at one; the other has 4 of the one it may have
    world.nodes[1].limit = math.inf
    assert not is_kept(flood.group.lane, flood)


def test_of_very_many_endpoints_a_part_is_looked_at() -> None:
    count = 4 * LOOKS
    world = World(*[1] * count, admission=Admission(queue=0))
    flood = there(world, "flood", 1)
    there(world, "small", count - 100)
    nodes = world.service.pool("m", None).ready.nodes
    for node in nodes:
        node.in_flight = 1
    assert is_kept(flood.group.lane, flood)
    for node in nodes[: LOOKS // 8]:  # of all they would be 128, and the root is 31
        node.in_flight = 0
    assert not is_kept(flood.group.lane, flood)
