"""What is none of ours: foreign and broken entries, records of a later release, servers that will not do."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from sidecar.core.breaker import Scope, State
from sidecar.txlog.codec import SCHEMA, encode, shard_of
from sidecar.txlog.functions import Shard
from sidecar.txlog.log import State as LogState
from tests.outcomes.pods import Pod, Traffic, agree, engines, key_of, opens, plan_of, pods, records, sound, until
from tests.servers import valkey

SHARD = shard_of("node:default/any")
LOG = Shard("dtl", SHARD).log

ENTRIES: dict[str, tuple[tuple[bytes | str, ...], str]] = {
    "foreign": (("user", "7"), "an empty record"),
    "garbage": (("r", b"\xff\xfe garbage"), "schema 255 is not known here"),
    "cut short": (("r", bytes([SCHEMA]) + b"\0" * 20), "no record"),
    "a later release's": (("r", bytes([SCHEMA + 1]) + b"\0" * 120), f"schema {SCHEMA + 1} is not known here"),
}


@pytest.mark.parametrize("kind", ENTRIES)
async def test_an_entry_that_is_none_of_ours_is_skipped_counted_and_named(tmp_path: Path, kind: str) -> None:
    fields, why = ENTRIES[kind]
    async with (
        valkey(tmp_path / "server") as server,
        engines() as nodes,
        pods([server.url] * 2, plan_of(nodes), tmp_path) as both,
    ):
        await opens(both[0], nodes[0])
        await agree(both, nodes[0], State.OPEN)
        # The first record of a shard makes all read it whole, and what that jumps over is not looked at.
        await until(lambda: not any(each.running.logbook.replica.stale for each in both), lambda: "all to follow")
        id_ = await server.ask("XADD", LOG, "*", *fields)
        assert isinstance(id_, bytes)
        for each in both:
            (event,) = await each.said("log_unreadable")
            assert (event["shard"], event["id"]) == (SHARD, id_.decode())
            assert str(event["error"]).startswith(why), event
            assert each.running.logbook.log.unreadable == 1
            assert await each.metric("sidecar_log_unreadable_total") == 1
        await goes_on(both, nodes[0].key)
        assert all(not each.events("log_away", "log_crashed") for each in both)
        sound(await records(server.url))


async def test_many_are_counted_each_and_named_once_a_second(tmp_path: Path) -> None:
    async with (
        valkey(tmp_path / "server") as server,
        engines() as nodes,
        pods([server.url], plan_of(nodes), tmp_path) as (only,),
    ):
        for _ in range(50):
            await server.ask("XADD", LOG, "*", "x", "y")
        async with asyncio.timeout(5):
            while only.running.logbook.log.unreadable < 50:
                await asyncio.sleep(0.01)
        await only.said("log_unreadable")
        assert len(only.events("log_unreadable")) <= 2


async def test_a_register_of_a_later_release_is_left_alone(tmp_path: Path) -> None:
    """It is read with its shard; whoever wrote it knows what it means. What is ours there is taken."""
    async with valkey(tmp_path / "server") as server, engines() as nodes:
        async with pods([server.url], plan_of(nodes), tmp_path) as (only,):
            await opens(only, nodes[0])
            await agree([only], nodes[0], State.OPEN)
        (record,) = await records(server.url)
        registers = Shard("dtl", SHARD).registers
        later = bytes([SCHEMA + 1]) + encode(record)[1:]
        await server.ask("HSET", registers, key_of(nodes[1]), later)
        async with pods([server.url], plan_of(nodes), tmp_path) as (only,):
            assert only.breaker(nodes[0]).state is State.OPEN and only.breaker(nodes[1]).state is State.CLOSED
            (event,) = await only.said("log_unreadable")
            assert event["error"] == f"schema {SCHEMA + 1} is not known here"
            assert only.log is LogState.UP
        assert await server.ask("HGET", registers, key_of(nodes[1])) == later


async def test_a_record_of_a_key_that_is_none_harms_nobody(tmp_path: Path) -> None:
    """Well made, but of no key that has a place: skipped where it is read, and no page of the log fails by it."""
    async with (
        valkey(tmp_path / "server") as server,
        engines() as nodes,
        pods([server.url], plan_of(nodes), tmp_path) as (only,),
    ):
        await opens(only, nodes[0])
        await agree([only], nodes[0], State.OPEN)
        (record,) = await records(server.url)
        await server.ask("XADD", LOG, "*", "r", encode(replace(record, key="nonsense", tx=b"n" * 16)))
        await goes_on([only], nodes[0].key)
        assert not only.events("log_away", "log_crashed")
        assert (await only.page(b"/log")).status == 200


# --- servers that will not do -----------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def old_server(directory: Path) -> AsyncIterator[str]:
    """Answers any number of sidecars with the same INFO."""
    info = b"# Server\r\nredis_version:5.0.14\r\nredis_mode:standalone\r\n"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                for _ in range(data.count(b"INFO") + data.count(b"CLIENT")):
                    writer.write(b"$%d\r\n%b\r\n" % (len(info), info))
        writer.close()

    path = directory / "old"
    async with await asyncio.start_unix_server(serve, path):
        yield f"unix://{path}"


@contextlib.asynccontextmanager
async def unfit(kind: str, directory: Path) -> AsyncIterator[tuple[str, str, str]]:
    """A URL, the word and a piece of the line that names what to mend."""
    if kind == "an old version":
        async with old_server(directory) as url:
            yield url, "version", "is Redis 5.0.14: Redis 6.2 or Valkey 7.2 is the oldest"
        return
    async with valkey(directory / "server") as server:
        await server.ask("ACL", "SETUSER", "reader", "on", ">pass", "~*", "+@read", "+@connection", "+info")
        if kind == "a wrong password":
            yield server.url.replace("://", "://reader:s3cret@"), "noauth", "refuses the user or the password"
        elif kind == "no permission":
            yield server.url.replace("://", "://reader:pass@"), "noperm", "grant the user"
        else:
            for shard in range(16):
                await server.ask("RPUSH", Shard("dtl", shard).registers, "theirs")
            yield server.url, "foreign", "another prefix"


@pytest.mark.parametrize("kind", ["a wrong password", "no permission", "an old version", "another program's keys"])
async def test_a_server_that_will_not_do_is_one_clear_line_and_traffic_flows(tmp_path: Path, kind: str) -> None:
    async with (
        unfit(kind, tmp_path) as (url, word, text),
        engines() as nodes,
        pods([url], plan_of(nodes), tmp_path) as (only,),
    ):
        traffic = Traffic()
        await traffic.asks(only, 30, 30)  # several tries to connect
        await opens(only, nodes[0])
        assert traffic.statuses == {200: 30} and traffic.longest_s < 0.25
        (event,) = await only.said("log_away")
        assert event["cause"] == word and text in str(event["error"]), event
        assert "s3cret" not in str(only.events())
        assert only.log is LogState.AWAY
        assert (await only.page(b"/readyz")).status == 200
        part = await only.health()
        assert part["ok"] is False and text in str(part["detail"])


async def test_a_password_that_is_mended_while_we_run_is_enough(tmp_path: Path) -> None:
    async with valkey(tmp_path / "server") as server, engines() as nodes:
        await server.ask("ACL", "SETUSER", "log", "on", ">old", "~*", "+@all")
        url = server.url.replace("://", "://log:new@")
        async with pods([url], plan_of(nodes), tmp_path) as (only,):
            await only.said("log_away")
            await server.ask("ACL", "SETUSER", "log", ">new")
            await only.said("log_up")
            assert len(only.events("log_away")) == 1


async def goes_on(some: list[Pod], key: str) -> None:
    """What comes after it is taken by all."""
    some[0].running.override(Scope.NODE, key, "reset", "op", 0.0)
    async with asyncio.timeout(5):
        while any(each.state("node", key) is not State.CLOSED for each in some):
            await asyncio.sleep(0.005)
