"""Keeps these tests out of every run that does not ask for the folder: they need what only `make test-deploy` installs.

They are never skipped: a run that asks for them where something is missing fails, and says how to get it.
"""

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves this folder's tests alone unless the run names it."""
    asked = any("deploy" in argument for argument in config.args)
    return None if asked or not collection_path.name.startswith("test_") else True
