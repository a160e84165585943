"""What every async test runs on: uvloop, as in service. And which build is to be tested."""

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

import sidecar.control as _control  # what gRPC is to know is said before a test imports it

assert _control


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make test-compiled` says that it means the compiled package."""
    parser.addoption(
        "--compiled", action="store_true", help="fail if the package is not compiled (tests/checks/test_compiled.py)"
    )


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop of async tests."""
    return {"uvloop": uvloop.new_event_loop}
