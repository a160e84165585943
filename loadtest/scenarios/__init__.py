"""One file per claim: its load, its fault, its pass mark. Each has a `SCENARIO`."""

import importlib
import pkgutil

from loadtest.scenario import Scenario


def names() -> list[str]:
    """What there is to run."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def scenario(name: str) -> Scenario:
    """The scenario of that name, one of `names()`."""
    found = importlib.import_module(f"{__name__}.{name}").SCENARIO
    assert isinstance(found, Scenario), name
    return found
