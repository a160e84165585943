"""The log's server: the contract over Valkey, Redis 6.2 and scripts; then what only a server can do to us."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest

from sidecar.txlog.server import RedisStore
from tests.servers import Server, redis62, valkey
from tests.txlog.contract import StoreContract


class Real:
    """The server's clock goes by itself."""

    virtual = False

    async def passes(self, ms: float) -> None:
        await asyncio.sleep((ms + 5) / 1000)  # a loop counts in milliseconds, and may be one short


@pytest.fixture
def clock() -> Real:
    return Real()


@contextlib.contextmanager
def kept(running: contextlib.AbstractAsyncContextManager[Server]) -> Iterator[Server]:
    """A server for all tests of a module, each of which has a loop of its own."""
    with asyncio.Runner() as runner:
        server = runner.run(running.__aenter__())
        try:
            yield server
        finally:
            runner.run(running.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with kept(valkey(tmp_path_factory.mktemp("valkey"))) as server:
        yield server


@pytest.fixture(scope="module")
def redis62_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with kept(redis62(tmp_path_factory.mktemp("redis"))) as server:
        yield server


@contextlib.asynccontextmanager
async def opened(server: Server, *, scripts_only: bool = False) -> AsyncIterator[RedisStore]:
    """A store over an empty server."""
    await server.ask("FLUSHALL")
    store = RedisStore(server.url, timeout_s=5.0, scripts_only=scripts_only)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


class TestValkey(StoreContract):
    """Functions."""

    @pytest.fixture
    async def store(self, valkey_server: Server) -> AsyncIterator[RedisStore]:
        async with opened(valkey_server) as store:
            yield store


class TestValkeyScripts(StoreContract):
    """A server that has functions, which we may not use."""

    @pytest.fixture
    async def store(self, valkey_server: Server) -> AsyncIterator[RedisStore]:
        async with opened(valkey_server, scripts_only=True) as store:
            yield store


class TestRedis62(StoreContract):
    """A server that has none."""

    @pytest.fixture
    async def store(self, redis62_server: Server) -> AsyncIterator[RedisStore]:
        async with opened(redis62_server) as store:
            yield store
