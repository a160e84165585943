"""T09: the log's server is silent, refuses, does not write, is full or loads. No request notices; it is said once."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from sidecar.core.breaker import State
from sidecar.txlog.codec import Code
from sidecar.txlog.log import State as LogState
from sidecar.txlog.server import TIMEOUT_S
from tests.harness import awake
from tests.outcomes.pods import (
    Engine,
    Gate,
    Pod,
    Traffic,
    Way,
    agree,
    engines,
    eventually,
    gate,
    key_of,
    opens,
    plan_of,
    pods,
    records,
    sound,
)
from tests.servers import Server, valkey

REQUESTS = 40
RATE = 40.0
SLOW_S = 0.45
"""Less than a call to the server may take: a request that waited for one is slower."""


@dataclass
class Trouble:
    """A server, the way to it, how trouble begins and ends, and what the sidecar says of it."""

    server: Server
    gate: Gate
    begins: Callable[[], Awaitable[object]]
    ends: Callable[[], Awaitable[object]]
    causes: set[str]
    text: str


async def silent(server: Server, link: Gate) -> Trouble:
    causes = {"timeout"}
    return Trouble(
        server, link, lambda: link.turn(Way.SWALLOWED), lambda: link.turn(Way.THROUGH), causes, "did not answer"
    )


async def refusing(server: Server, link: Gate) -> Trouble:
    causes = {"reset", "refused"}
    return Trouble(server, link, lambda: link.turn(Way.REFUSED), lambda: link.turn(Way.THROUGH), causes, "refuses")


async def stopped(server: Server, link: Gate) -> Trouble:
    async def begins() -> None:
        server.freeze()

    async def ends() -> None:
        server.thaw()

    return Trouble(server, link, begins, ends, {"timeout"}, "did not answer")


async def readonly(server: Server, link: Gate) -> Trouble:
    async def begins() -> None:
        await server.ask("REPLICAOF", "127.0.0.1", "1")

    async def ends() -> None:
        await server.ask("REPLICAOF", "NO", "ONE")

    # Who becomes a replica ends the connections that wait.
    return Trouble(server, link, begins, ends, {"readonly", "reset"}, "read only replica")


async def full(server: Server, link: Gate) -> Trouble:
    async def begins() -> None:
        await server.ask("CONFIG", "SET", "maxmemory", "1")

    async def ends() -> None:
        await server.ask("CONFIG", "SET", "maxmemory", "0")

    return Trouble(server, link, begins, ends, {"oom"}, "maxmemory")


async def loading(server: Server, link: Gate) -> Trouble:
    """It comes back with a file that takes it a while: a tenth of a millisecond for each of its keys."""
    await server.ask("CONFIG", "SET", "appendonly", "yes")
    await server.ask("EVAL", "for i = 1, 20000 do redis.call('SET', 'k' .. i, '') end", 0)

    async def begins() -> None:
        await server.stop()
        await server.start(ready=False)

    async def ends() -> None:
        await server.ask("CONFIG", "SET", "key-load-delay", "0")

    return Trouble(server, link, begins, ends, {"loading", "reset", "refused"}, "loading")


KINDS = {each.__name__: each for each in (silent, refusing, stopped, readonly, full, loading)}


@contextlib.asynccontextmanager
async def troubled(kind: str, directory: Path) -> AsyncIterator[Trouble]:
    config = ("key-load-delay", "100", "appendonly", "yes") if kind == "loading" else ()
    async with valkey(directory / "server", *config) as server, gate(server) as link:
        yield await KINDS[kind](server, link)


@pytest.mark.parametrize("kind", KINDS)
async def test_no_request_notices_and_what_was_decided_meanwhile_is_told_once(tmp_path: Path, kind: str) -> None:
    async with (
        troubled(kind, tmp_path) as trouble,
        engines() as nodes,
        pods([trouble.gate.url] * 2, plan_of(nodes), tmp_path) as both,
    ):
        assert [each.log for each in both] == [LogState.UP, LogState.UP]
        await trouble.begins()
        await is_away(trouble, both, nodes)
        await trouble.ends()
        await is_back(trouble, both, nodes, ups=2)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_sidecar_that_starts_meanwhile_serves_at_once(tmp_path: Path, kind: str) -> None:
    async with troubled(kind, tmp_path) as trouble, engines() as nodes:
        await trouble.begins()
        async with awake() as ran, pods([trouble.gate.url] * 2, plan_of(nodes), tmp_path) as both:
            assert ran() < 2 * 2 * TIMEOUT_S
            await is_away(trouble, both, nodes)
            await trouble.ends()
            await is_back(trouble, both, nodes, ups=1)


async def test_each_change_is_said_once_however_often_it_comes_and_goes(tmp_path: Path) -> None:
    async with (
        valkey(tmp_path / "server") as server,
        gate(server) as link,
        engines() as nodes,
        pods([link.url], plan_of(nodes), tmp_path) as (only,),
    ):
        for turn in range(1, 4):
            await link.turn(Way.REFUSED)
            await only.said("log_away", turn)
            await asyncio.sleep(0.2)  # several tries to connect
            await link.turn(Way.THROUGH)
            await only.said("log_up", turn + 1)
            await opens(only, nodes[0])
        names = [event["event"] for event in only.events("log_up", "log_away")]
        assert names == ["log_up"] + ["log_away", "log_up"] * 3
        away = [event["away_s"] for event in only.events("log_up")]
        assert away[0] is None and all(isinstance(each, float) and each > 0.2 for each in away[1:])


async def is_away(trouble: Trouble, both: list[Pod], nodes: list[Engine]) -> None:
    """Traffic goes on as before, each sidecar judges by itself, and it can be seen how it stands."""
    await unnoticed(both, nodes)
    for each in both:
        (event,) = await each.said("log_away")
        assert event["cause"] in trouble.causes, event
        assert each.log is LogState.AWAY
        breaker = each.breaker(nodes[0])
        assert (breaker.state, breaker.shared, breaker.ours) == (State.OPEN, False, True)
        assert len(each.running.logbook.replica.ring) == 1
        await says_degraded(each, trouble.text)


async def is_back(trouble: Trouble, both: list[Pod], nodes: list[Engine], *, ups: int) -> None:
    """They agree, what both found out was told once, and no breaker moved."""
    await agree(both, nodes[0], State.OPEN)
    for each in both:
        await each.said("log_up", ups)
    traffic = Traffic()
    await traffic.asks(both[0], 10, RATE)
    assert set(traffic.statuses) == {200}
    await told_once(trouble.server, both, nodes[0])
    for each in both:
        assert (await each.health())["ok"] is True and await each.metric("sidecar_log_up") == 1
        assert len(each.events("log_away")) == 1 and len(each.events("log_up")) == ups
        assert not len(each.running.logbook.replica.ring)


async def unnoticed(some: list[Pod], nodes: list[Engine]) -> Traffic:
    """Requests through all of them, while one endpoint fails. None fails, none waits; each sidecar opens it alone."""
    nodes[0].broken = True
    traffic = Traffic()
    async with asyncio.TaskGroup() as together:
        for each in some:
            together.create_task(traffic.asks(each, REQUESTS, RATE))
    assert traffic.statuses == {200: REQUESTS * len(some)}
    assert traffic.longest_s < SLOW_S and traffic.median_s < SLOW_S / 5
    return traffic


async def says_degraded(each: Pod, text: str) -> None:
    part: dict[str, object] = {}

    async def said() -> bool:
        nonlocal part
        part = await each.health()
        assert part["ok"] is False and str(part["detail"]).startswith("away since"), part
        return text in str(part["detail"])

    # Of its last try; one may have met a server that was not run.
    await eventually(said, lambda: f"{text!r} in {part}")
    assert (await each.page(b"/readyz")).status == 200
    assert (await each.page(b"/livez")).status == 200
    assert await each.metric("sidecar_log_up") == 0


async def told_once(server: Server, some: list[Pod], node: Engine) -> None:
    """One record of what several found out; no breaker moved but to open."""
    log = await records(server.url)
    sound(log)
    (record,) = [record for record in log if record.key == key_of(node)]
    assert (record.state, record.version) == (Code.OPEN, 1) and record.by in {each.name for each in some}
    await asyncio.sleep(0.1)  # for the lines to be written
    for each in some:
        moves = [(event["old"], event["new"]) for event in each.events("breaker") if event["key"] == node.key]
        assert moves == [("closed", "open")], moves
