"""What every test runs on: uvloop, as in service, and an alarm for blocking calls made by the sidecar's own code."""

import asyncio
from collections.abc import Callable, Iterator, Mapping

import pytest
import uvloop
from blockbuster import blockbuster_ctx


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop of async tests."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
def _no_blocking_calls(request: pytest.FixtureRequest) -> Iterator[None]:
    """Blocking calls under a frame of `sidecar` raise while an async test runs; sync tests pay nothing."""
    if request.node.get_closest_marker("asyncio") is None:
        yield
        return
    with blockbuster_ctx("sidecar"):
        yield
