"""How a sidecar with a log ends: as fast with a server that is silent as without one, and nothing stays behind."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sidecar.core.breaker import Scope, State
from sidecar.logbook import LEAVE_S
from sidecar.txlog.log import State as LogState
from tests import processes
from tests.harness import awake
from tests.outcomes.pods import Traffic, Way, agree, engines, gate, opens, plan_of, pod, pods
from tests.servers import blackhole, refused, valkey
from tests.under_test import chat

ENDS_S = 1.5
"""Of a process on a busy machine, from the signal to its end, with nobody to wait for."""


@contextlib.asynccontextmanager
async def somewhere(kind: str, directory: Path) -> AsyncIterator[str]:
    """A URL of a log that is in a bad way."""
    async with contextlib.AsyncExitStack() as stack:
        if kind == "silent":
            yield await stack.enter_async_context(blackhole())
        elif kind == "refused":
            yield refused()
        else:
            yield "local"


@pytest.mark.parametrize("kind", ["silent", "refused", "local"])
async def test_a_process_ends_as_fast_whatever_its_log_does(tmp_path: Path, kind: str) -> None:
    async with somewhere(kind, tmp_path) as url, processes.engine() as (_, port):
        words = ("--upstream", f"http://127.0.0.1:{port}", "--redis", url, "--settle", "0", "--drain", "30s")
        async with processes.sidecar(*words) as proxy:
            if kind != "local":
                await proxy.process.event("log_away")
            async with awake() as ran:
                proxy.process.send(signal.SIGTERM)
                assert await proxy.process.ended() == 0
                assert ran() < ENDS_S
            assert "Traceback" not in proxy.process.output
            assert proxy.process.events().count("log_away") == (kind != "local")


async def test_an_end_while_the_server_just_fell_silent_is_bounded(tmp_path: Path) -> None:
    """It says goodbye to a server that it takes for alive, and does not insist."""
    async with valkey(tmp_path / "server") as server, gate(server) as link, engines() as nodes, awake() as ran:
        async with pods([link.url], plan_of(nodes), tmp_path) as (only,):
            assert only.log is LogState.UP
            await link.turn(Way.SWALLOWED)
            await opens(only, nodes[0])
            began = ran()
        assert ran() - began < LEAVE_S + ENDS_S


@pytest.mark.parametrize("way", list(Way), ids=lambda way: way.value)
async def test_nothing_is_left_running_and_no_connection_open(tmp_path: Path, way: Way) -> None:
    async with valkey(tmp_path / "server") as server, gate(server) as link, engines() as nodes:
        before = asyncio.all_tasks()
        async with pod("pod-1", link.url, plan_of(nodes), tmp_path) as only:
            await opens(only, nodes[0])
            await agree([only], nodes[0], State.OPEN)
            await link.turn(way)
            if way is not Way.THROUGH:
                await only.said("log_away")
        # What is the gate's ends by itself, once nobody is at the other end.
        async with asyncio.timeout(5):
            while link.open_connections or asyncio.all_tasks() - before:
                await asyncio.sleep(0.005)


async def test_probes_in_hand_are_given_back_by_who_ends(tmp_path: Path) -> None:
    """Another need not wait for the lease to run out."""
    async with (
        valkey(tmp_path / "server") as server,
        engines(2) as nodes,
        pod("pod-2", server.url, plan_of(nodes, open_s=0.3), tmp_path) as stays,
    ):
        async with pod("pod-1", server.url, plan_of(nodes, open_s=0.3), tmp_path) as goes:
            await opens(goes, nodes[0])
            async with asyncio.timeout(10):
                while not goes.breaker(nodes[0]).can_probe(goes.running.now()):
                    await goes.once(chat())
                    await asyncio.sleep(0.01)
        nodes[0].broken = False
        async with asyncio.timeout(10), awake() as ran:
            while stays.breaker(nodes[0]).state is not State.CLOSED:
                await stays.once(chat())
                await asyncio.sleep(0.02)
            assert ran() < 3.0, "a lease has five seconds"


async def test_an_open_breaker_survives_its_sidecar_by_its_own_server(tmp_path: Path) -> None:
    async with engines() as nodes:
        plan, data = plan_of(nodes), tmp_path / "data"
        async with pod("pod", "embedded", plan, tmp_path, data=data) as first:
            assert first.log is LogState.UP
            await opens(first, nodes[0])
            await agree([first], nodes[0], State.OPEN)
            first.running.override(Scope.NODE, nodes[1].key, "hold", "op", 3600.0)
            (started,) = await first.said("embedded_started")
            version = (first.breaker(nodes[0]).epoch, first.breaker(nodes[0]).version)
        nodes[0].broken = False
        assert is_gone(started["pid"])
        async with pod("pod", "embedded", plan, tmp_path, data=data) as second:
            breaker = second.breaker(nodes[0])
            assert breaker.state is State.OPEN and breaker.shared
            assert (breaker.epoch, breaker.version) == version
            assert breaker.why == "consecutive"
            assert second.breaker(nodes[1]).held_until is not None
            traffic = Traffic()
            await traffic.asks(second, 10, 100)
            assert traffic.statuses == {200: 10}
            assert nodes[0].requests and len(nodes[0].requests) == 2, "it is not asked again"
            (again,) = await second.said("embedded_started")
        assert is_gone(again["pid"]) and again["pid"] != started["pid"]


async def test_a_server_of_its_own_that_dies_comes_back_and_nothing_is_forgotten(tmp_path: Path) -> None:
    async with engines() as nodes, pod("pod", "embedded", plan_of(nodes), tmp_path, data=tmp_path / "data") as only:
        await opens(only, nodes[0])
        await agree([only], nodes[0], State.OPEN)
        version = only.breaker(nodes[0]).version
        (started,) = await only.said("embedded_started")
        assert isinstance(started["pid"], int)
        os.kill(started["pid"], signal.SIGKILL)
        traffic = Traffic()
        await traffic.asks(only, 20, 40)
        assert traffic.statuses == {200: 20} and traffic.longest_s < 0.25
        await only.said("embedded_started", 2)
        await only.said("log_up", 2)
        await agree([only], nodes[0], State.OPEN)
        assert only.breaker(nodes[0]).version == version and only.breaker(nodes[0]).shared


def is_gone(pid: object) -> bool:
    """No such process, or one that only waits to be taken note of."""
    assert isinstance(pid, int)
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
