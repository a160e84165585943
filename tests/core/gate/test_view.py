"""A gate as operators see it."""

import pytest

from tests.core.gate.build import World, full


def test_a_view_tells_who_waits_and_who_is_in_the_zone() -> None:
    world = World(1)
    full(world)
    world.come("voice")
    world.now += 0.17
    world.come("batch")
    view = world.gate.view(world.now)
    assert (view.mode, view.queued, view.running, view.turns) == ("enforce", 2, 1, 1)
    seen = {each.name: each for each in view.classes}
    assert [each.name for each in view.classes] == ["voice", "text", "default", "batch"]
    assert seen["voice"].warning and not seen["batch"].warning
    assert seen["voice"].waiting_s == pytest.approx(0.17)
    assert (seen["voice"].queued, seen["text"].running, seen["batch"].queued) == (1, 1, 1)
