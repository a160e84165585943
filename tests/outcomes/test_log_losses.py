"""What a server, a failover or a network can lose: the log is flushed, killed, moved, cut in two. All agree again."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from sidecar.core.breaker import Breaker, Scope, State
from sidecar.txlog.codec import Code, shard_of
from sidecar.txlog.functions import Shard, slot_of
from sidecar.txlog.log import State as LogState
from tests.outcomes.pods import (
    Engine,
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
    register,
    sound,
    until,
)
from tests.servers import cluster, sentinel, valkey

SLOW_S = 0.25
HEALED_S = 1.0
"""All agree so soon after the last that they could not know; design/txlog.md."""
NOISE_S = 1.0
"""What a busy machine adds to it here."""


async def orders(pod: Pod, engine: Engine, stop: asyncio.Event, given: list[str], every_s: float = 0.01) -> None:
    """An operator that opens and closes one endpoint through one sidecar, until told to stop."""
    number = 0
    while not stop.is_set():
        number += 1
        given.append(f"op-{number}")
        pod.running.override(Scope.NODE, engine.key, "open" if number % 2 else "reset", given[-1], 3600.0)
        await asyncio.sleep(every_s)


def all_of(some: Sequence[Pod], engine: Engine) -> list[Breaker]:
    return [each.breaker(engine) for each in some]


async def test_a_server_that_is_killed_while_it_writes_loses_nobody(tmp_path: Path) -> None:
    """Its file has all but the last second, which the sidecars have: they restore it."""
    async with (
        valkey(tmp_path / "server", "appendonly", "yes", "appendfsync", "everysec") as server,
        engines() as nodes,
        pods([server.url] * 3, plan_of(nodes), tmp_path) as three,
    ):
        stop = asyncio.Event()
        traffic = Traffic()
        async with asyncio.TaskGroup() as together:
            given: list[str] = []
            for each in three:
                together.create_task(orders(each, nodes[0], stop, given))
            asking = [together.create_task(traffic.asks(each, 60, 30)) for each in three]
            for _ in range(2):
                given.clear()
                await until(
                    lambda: len(given) >= 100 and all(each.log is LogState.UP for each in three),
                    lambda: f"a hundred orders, and the log: {len(given)}, {[each.log for each in three]}",
                )
                await server.kill()
                await asyncio.sleep(0.2)
                await server.start()
            for one in asking:
                await one
            stop.set()
        assert traffic.statuses == {200: 180} and traffic.longest_s < SLOW_S
        await quiet(three)
        three[0].running.override(Scope.NODE, nodes[0].key, "open", "last", 3600.0)
        await agree(three, nodes[0], State.OPEN)
        sound(await records(server.url))
        for each in three:
            await each.said("log_up", 3)
            assert len(each.events("log_away")) == 2 and len(each.events("log_up")) == 3


async def test_after_a_flush_what_is_open_stays_open_and_the_registers_are_back(tmp_path: Path) -> None:
    async with (
        valkey(tmp_path / "server") as server,
        engines(5) as nodes,
        pods([server.url] * 3, plan_of(nodes), tmp_path) as three,
    ):
        for each, node in zip(three, nodes, strict=False):
            await opens(each, node)
        for node in nodes[:3]:
            await agree(three, node, State.OPEN)
        before = {node.key: (three[0].breaker(node).epoch, three[0].breaker(node).version) for node in nodes[:3]}
        await server.ask("FLUSHALL")
        shard = shard_of(key_of(nodes[0]))

        async def restored() -> bool:
            found = [await register(server.url, key_of(node), shard) for node in nodes[:3]]
            assert {b.state for node in nodes[:3] for b in all_of(three, node)} == {State.OPEN}, "it forgot"
            return all(record is not None and record.state == Code.OPEN for record in found)

        took_s = await eventually(restored, lambda: "the registers to be restored")
        assert took_s < 2.0 + NOISE_S
        for node in nodes[:3]:
            record = await register(server.url, key_of(node), shard)
            assert record is not None and (record.epoch, record.version) == before[node.key], "restored as it was"
            await agree(three, node, State.OPEN)
        log = await records(server.url)
        sound(log)
        assert len(log) == 3
        # And it goes on from there.
        nodes[0].broken = False
        three[1].running.override(Scope.NODE, nodes[0].key, "close", "op", 0.0)
        await agree(three, nodes[0], State.CLOSED)


async def test_a_flush_of_what_nobody_had_read_yet_loses_nothing(tmp_path: Path) -> None:
    """Told, answered, and gone before any log was read: the writer knows, by the answer."""
    async with (
        valkey(tmp_path / "server") as server,
        engines() as nodes,
        pods([server.url] * 2, plan_of(nodes), tmp_path) as both,
    ):
        await opens(both[0], nodes[0])
        breaker = both[0].breaker(nodes[0])
        await until(lambda: breaker.version > 0, lambda: "the answer")
        await server.ask("FLUSHALL")
        await opens(both[1], nodes[1])
        await agree(both, nodes[0], State.OPEN)
        await agree(both, nodes[1], State.OPEN)
        shard = shard_of(key_of(nodes[0]))

        async def restored() -> bool:
            return all([await register(server.url, key_of(node), shard) for node in nodes[:2]])

        await eventually(restored, lambda: "both registers to be there")


async def test_a_failover_that_loses_a_write_ends_with_all_of_one_mind(tmp_path: Path) -> None:
    async with (
        sentinel(tmp_path) as servers,
        engines(5) as nodes,
        pods([servers.url] * 3, plan_of(nodes), tmp_path) as three,
    ):
        await opens(three[0], nodes[0])
        await agree(three, nodes[0], State.OPEN)
        await servers.cut()
        await opens(three[1], nodes[1])
        await agree(three, nodes[1], State.OPEN)
        nodes[0].broken = False
        three[2].running.override(Scope.NODE, nodes[0].key, "reset", "op", 0.0)
        await agree(three, nodes[0], State.CLOSED)
        traffic = Traffic()
        async with asyncio.TaskGroup() as together:
            together.create_task(servers.failover())
            for each in three:
                together.create_task(traffic.asks(each, 40, 20))
        assert traffic.statuses == {200: 120} and traffic.longest_s < SLOW_S
        await quiet(three)
        url = servers.replica.tcp_url
        shard = shard_of(key_of(nodes[0]))

        async def restored() -> bool:
            found = [await register(url, key_of(node), shard) for node in nodes[:2]]
            return [record.state if record else None for record in found] == [Code.CLOSED, Code.OPEN]

        await eventually(restored, lambda: "what was lost to be restored")
        await agree(three, nodes[0], State.CLOSED)
        await agree(three, nodes[1], State.OPEN)
        sound(await records(url))


async def test_slots_move_while_breakers_and_requests_go_on(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path, 2) as servers,
        engines(5) as nodes,
        pods([servers.url] * 2, plan_of(nodes), tmp_path) as both,
    ):
        slot = slot_of(Shard("dtl", shard_of(key_of(nodes[0]))).tag)
        stop = asyncio.Event()
        traffic = Traffic()
        async with asyncio.TaskGroup() as together:
            given: list[str] = []
            together.create_task(orders(both[0], nodes[0], stop, given, 0.02))
            asking = [together.create_task(traffic.asks(each, 40, 20)) for each in both]
            for _ in range(2):
                given.clear()
                await until(lambda: len(given) >= 10, lambda: "ten orders")
                source = await servers.owner_of(slot)
                to = next(each for each in servers.masters if each is not source)
                await servers.begin_move(slot, to)
                await asyncio.sleep(0.2)
                await servers.end_move(slot, source, to)
            await opens(both[1], nodes[1])
            for one in asking:
                await one
            stop.set()
        assert traffic.statuses == {200: 80} and traffic.longest_s < SLOW_S
        await quiet(both)
        both[1].running.override(Scope.NODE, nodes[0].key, "open", "last", 3600.0)
        await agree(both, nodes[0], State.OPEN)
        await agree(both, nodes[1], State.OPEN)
        sound(await records((await servers.owner_of(slot)).tcp_url, shards=[shard_of(key_of(nodes[0]))]))


async def test_one_of_three_that_is_cut_off_decides_alone_and_agrees_again(tmp_path: Path) -> None:
    async with (
        valkey(tmp_path / "server") as server,
        gate(server) as one,
        gate(server) as two,
        gate(server) as three,
        engines(5) as nodes,
        pods([one.url, two.url, three.url], plan_of(nodes), tmp_path) as some,
    ):
        alone, *others = some
        before, left, right, *_ = nodes
        await opens(alone, before)
        await agree(some, before, State.OPEN)
        await one.turn(Way.SWALLOWED)
        traffic = Traffic()
        async with asyncio.TaskGroup() as together:
            for each in some:
                together.create_task(traffic.asks(each, 60, 20))
            await asyncio.sleep(0.5)
            left.broken = True
            await opens(alone, left)
            left.broken = False
            await opens(others[0], right)
            right.broken = False
            await agree(others, right, State.OPEN)
            others[1].running.override(Scope.NODE, before.key, "reset", "op", 0.0)
            before.broken = False
            await agree(others, before, State.CLOSED)
            await alone.said("log_away")
        assert traffic.statuses == {200: 180} and traffic.longest_s < SLOW_S
        assert [each.breaker(left).state for each in some] == [State.OPEN, State.CLOSED, State.CLOSED]
        assert [each.breaker(right).state for each in some] == [State.CLOSED, State.OPEN, State.OPEN]
        assert alone.breaker(before).state is State.OPEN, "nothing that it knows of closed it"
        assert not any(each.events("log_away") for each in others)

        await one.turn(Way.THROUGH)
        took_s = await agree(some, left, State.OPEN)
        took_s += await agree(some, right, State.OPEN)
        took_s += await agree(some, before, State.CLOSED)
        assert took_s < HEALED_S + NOISE_S
        sound(await records(server.url))


async def quiet(some: Sequence[Pod]) -> None:
    """Wait until all follow the log and have nothing left to tell."""
    await until(
        lambda: all(each.log is LogState.UP and not len(each.running.logbook.replica.ring) for each in some),
        lambda: str([(each.log, len(each.running.logbook.replica.ring), each.events()) for each in some]),
    )
