"""The listener on real sockets: who is let in, and what drain does and does not wait for."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from unittest.mock import patch

import pytest

from sidecar.downstream import listener as listener_module
from sidecar.downstream.listener import Listener
from tests.harness import Client, connect, eventually, request
from tests.proxy.bench import Bench, service
from tests.proxy.fakes import JSON, head_of
from tests.under_test import chat, token


class Door:
    """A listener before a bench of fakes. Deadlines stand still; the loop's own clock times the drain."""

    def __init__(self, max_connections: int = 10) -> None:
        self.bench = Bench(service(2))
        self.listener = Listener(self.bench.pipeline, max_connections=max_connections)
        self.port = 0

    def answers(self) -> None:
        self.bench.link.heads(head_of(200, JSON, 2)).says(b"{}").ends()


@asynccontextmanager
async def opened(max_connections: int = 10) -> AsyncIterator[Door]:
    door = Door(max_connections)
    door.port = await door.listener.start("127.0.0.1", 0)
    try:
        yield door
    finally:
        await door.listener.close()
        await eventually(lambda: door.listener.connections == 0, "every connection to end")
        assert door.bench.held() == []


async def asked(door: Door, client: Client, data: bytes) -> None:
    """A request that has reached its engine."""
    before = len(door.bench.connector.openings)
    await client.send(data)
    await eventually(lambda: len(door.bench.connector.openings) > before, "the request to be forwarded")


async def test_connections_above_the_limit_are_told_and_closed() -> None:
    async with opened(max_connections=2) as door, connect(door.port), connect(door.port):
        await eventually(lambda: door.listener.connections == 2, "two connections")
        async with connect(door.port) as third:
            answer = await third.response()
            assert answer.status == 503
            assert answer.header(b"retry-after") == b"1" and answer.header(b"connection") == b"close"
            await third.gone()
        assert door.listener.rejected == 1 and door.listener.connections == 2


async def test_a_place_that_was_left_is_free_again() -> None:
    async with opened(max_connections=1) as door:
        async with connect(door.port):
            await eventually(lambda: door.listener.connections == 1, "a connection")
        await eventually(lambda: door.listener.connections == 0, "its end")
        async with connect(door.port) as client:
            await asked(door, client, request())
            door.answers()
            assert (await client.response()).status == 200


async def test_busy_are_connections_with_a_request_begun() -> None:
    async with opened() as door, connect(door.port) as client, connect(door.port):
        await eventually(lambda: door.listener.connections == 2, "two connections")
        assert door.listener.busy == 0
        await client.send(b"GET / HT")
        await eventually(lambda: door.listener.busy == 1, "a request begun")
        await client.send(b"TP/1.1\r\nHost: h\r\n\r\n")
        await eventually(lambda: bool(door.bench.connector.openings), "a request forwarded")
        assert door.listener.busy == 1
        door.answers()
        await client.response()
        assert door.listener.busy == 0


async def test_drain_closes_idle_connections_and_waits_for_live_replies() -> None:
    async with opened() as door, connect(door.port) as idle, connect(door.port) as busy:
        await asked(door, busy, request())
        async with asyncio.TaskGroup() as tasks:
            drained = tasks.create_task(door.listener.drain(0.0, 60.0))
            await idle.gone()
            assert not drained.done() and door.bench.pipeline.draining
            door.answers()
            answer = await busy.response()
            assert answer.status == 200 and answer.header(b"connection") == b"close"
            await busy.gone()


async def test_requests_are_served_while_it_settles() -> None:
    async with opened() as door, connect(door.port) as client, asyncio.TaskGroup() as tasks:
        drained = tasks.create_task(door.listener.drain(0.2, 60.0))
        await asked(door, client, request())
        assert not drained.done()
        door.answers()
        assert (await client.response()).status == 200


@pytest.mark.parametrize("grace_s", [0.0, 0.1])
async def test_what_outlives_the_grace_is_cut_in_band(grace_s: float) -> None:
    async with opened() as door, connect(door.port) as client:
        await asked(door, client, chat())
        door.bench.link.heads().says(token(0))
        await client.seen(token(0))
        await door.listener.drain(0.0, grace_s)
        body = await client.rest()
        assert body.endswith(b"\r\n0\r\n\r\n") and b'"code":"draining"' in body and b"[DONE]" not in body


async def test_close_right_after_drain_loses_no_last_word() -> None:
    async with opened() as door, connect(door.port) as client:
        await asked(door, client, chat())
        door.bench.link.heads().says(token(0))
        await client.seen(token(0))
        await door.listener.drain(0.0, 0.0)
        await door.listener.close()
        assert (await client.rest()).endswith(b"\r\n0\r\n\r\n")


async def test_a_client_that_does_not_read_its_last_word_holds_the_drain_for_a_moment_only() -> None:
    with patch.object(listener_module, "_FLUSH_S", 0.05):
        async with opened() as door, connect(door.port, rcvbuf=4096) as client:
            await asked(door, client, chat())
            client.transport.pause_reading()
            link = door.bench.link.heads()
            while link.reading:
                link.says(token(1) * 500)
                await asyncio.sleep(0)
            async with asyncio.timeout(5.0):
                await door.listener.drain(0.0, 0.0)


async def test_closing_breaks_what_is_left_and_frees_the_port() -> None:
    async with opened() as door, connect(door.port) as client:
        await asked(door, client, request())
        await door.listener.close()
        await client.gone()
        again = Listener(door.bench.pipeline)
        assert await again.start("127.0.0.1", door.port) == door.port
        await again.close()


async def test_closing_what_never_started_is_harmless() -> None:
    await Listener(Bench().pipeline).close()


async def test_an_address_in_use_is_an_oserror() -> None:
    async with opened() as door:
        with pytest.raises(OSError):
            await Listener(door.bench.pipeline).start("127.0.0.1", door.port)
