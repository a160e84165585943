"""Keeps the engine tests out of every run that does not ask for them by marker, and gives those that do their engine.

The marker is the only switch: `-m engines` runs them, any other run does not even import them, for they need what only
`make test-engines` installs. They are never skipped: a run that asks for engines where none is installed fails, and
says how to install one.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.engines.script")

from tests.engines.engine import Vllm, VllmKeeper  # noqa: E402 (after what decides how it is read)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves this folder's tests alone unless the run's marker expression speaks of `engines`."""
    asked = "engines" in str(config.getoption("markexpr"))
    return None if asked or not collection_path.name.startswith("test_") else True


@pytest.fixture(scope="session")
def vllm_keeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmKeeper]:
    keeper = VllmKeeper(tmp_path_factory.mktemp("vllm"))
    yield keeper
    keeper.stop()


@pytest.fixture
def vllm(vllm_keeper: VllmKeeper) -> Vllm:
    """A ready, idle engine: the one of the test before if it lives, else a new one (about a minute)."""
    return vllm_keeper.ready()
