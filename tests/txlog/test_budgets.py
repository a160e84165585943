"""Budgets: rule 11's contract in this process and in real servers; then that no history draws more than the limit."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest

from sidecar.txlog.local import LocalStore
from tests.servers import Server, redis62, valkey
from tests.txlog.drawing import Clocked, DrawContract, Virtual


@contextlib.contextmanager
def kept(running: contextlib.AbstractAsyncContextManager[Server]) -> Iterator[Server]:
    """A server for all tests, each of which has a loop of its own."""
    with asyncio.Runner() as runner:
        server = runner.run(running.__aenter__())
        try:
            yield server
        finally:
            runner.run(running.__aexit__(None, None, None))


@pytest.fixture(scope="module", params=["valkey", "redis 6.2"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("server")
    with kept(valkey(directory) if request.param == "valkey" else redis62(directory)) as server:
        yield server


class TestLocalStore(DrawContract):
    """The contract over `LocalStore`."""

    @pytest.fixture
    def store(self, clock: Virtual) -> LocalStore:
        return LocalStore(clock)


class TestServers(DrawContract):
    """The contract over the functions, in the Lua of a new server and of the oldest."""

    @pytest.fixture
    async def store(self, server: Server, clock: Virtual) -> AsyncIterator[Clocked]:
        await server.ask("FLUSHALL")
        store = Clocked(server.url, clock)
        await store.open()
        try:
            yield store
        finally:
            await store.close()
