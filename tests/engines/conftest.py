"""Keeps the engine tests out of every run that does not ask for them by marker, and gives those that do their engine.

The marker is the only switch: `-m engines` runs them, any other run deselects them. They are never skipped: a run that
asks for engines where none is installed fails, and says how to install one.
"""

from collections.abc import Iterator

import pytest

from tests.engines.engine import Vllm, VllmKeeper


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what is marked `engines` unless the run's marker expression speaks of it."""
    if "engines" in str(config.getoption("markexpr")):
        return
    asking = [item for item in items if item.get_closest_marker("engines") is not None]
    if asking:
        config.hook.pytest_deselected(items=asking)
        items[:] = [item for item in items if item.get_closest_marker("engines") is None]


@pytest.fixture(scope="session")
def vllm_keeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmKeeper]:
    keeper = VllmKeeper(tmp_path_factory.mktemp("vllm"))
    yield keeper
    keeper.stop()


@pytest.fixture
def vllm(vllm_keeper: VllmKeeper) -> Vllm:
    """A ready, idle engine: the one of the test before if it lives, else a new one (about a minute)."""
    return vllm_keeper.ready()
