"""What may befall an update: the sidecar that was to write it is killed, or the log's server is away.

Whatever comes of it, a table is the old or the new one, the same everywhere, and a release tool that sends its update
again, to whichever sidecar, has made one update. An update here changes all that a table has at once (weights,
endpoints, hash), so that half of one would be seen.
"""

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from sidecar.control.pb import control_pb2 as pb
from sidecar.core.table import Table, decode
from sidecar.txlog import codec
from sidecar.txlog.codec import route_key, shard_of
from sidecar.txlog.functions import Shard
from tests.harness import connect
from tests.outcomes.release import SERVICE, Tool, asked, releasing, update
from tests.servers import Server

AGREE_S = 5.0
SETTLE_S = 0.05
"""Until a server has done what a process that is gone had sent it."""
ENDPOINTS = 20


class Member(Protocol):
    """A sidecar process: where clients and release tools connect, and its end."""

    @property
    def port(self) -> int: ...

    @property
    def control(self) -> int: ...

    async def kill(self) -> None:
        """SIGKILL; it is gone when this returns."""


Spawn = Callable[[], AbstractAsyncContextManager[Member]]


@dataclass
class Fates:
    """What came of updates whose writers were killed: `acked` and done, done but never answered, not done."""

    counted: Counter[str] = field(default_factory=Counter)
    delays_s: list[float] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        return self.counted.total()


def change(number: int, engine_port: int) -> pb.DescriptorUpdate:
    """The update of a round: everything of the table changes."""
    share = 0.05 + 0.9 * (number % 19) / 19
    endpoints = [f"http://127.{2 + number % 90}.0.{place + 1}:{engine_port}" for place in range(ENDPOINTS)]
    return update(
        version="v2",
        update_id=f"round-{number}",
        engine="vllm",
        endpoints=[pb.Endpoint(url=url, zone=f"z{number}") for url in endpoints],
        weights={"v1": round(1 - share, 4), "v2": round(share, 4)},
        schema_hash=hashlib.sha256(b"%d" % number).hexdigest(),
        compatible_schema_hashes=[FIRST_HASH],
        signature={"round": str(number)},
    )


FIRST_HASH = hashlib.sha256(b"first").hexdigest()


def first(engine_port: int) -> pb.DescriptorUpdate:
    """The service begins with one version."""
    endpoints = [pb.Endpoint(url=f"http://127.1.0.{place + 1}:{engine_port}") for place in range(ENDPOINTS)]
    return update(
        version="v1", engine="vllm", endpoints=endpoints, canary_weight=1.0, schema_hash=FIRST_HASH, models=["demo"]
    )


def shown(table: pb.Table) -> dict[str, object]:
    """A version's table without when and by whom it was made."""
    return {version.name: version.SerializeToString(deterministic=True) for version in table.versions}


def says(table: pb.Table, wanted: pb.DescriptorUpdate) -> bool:
    """Whether a table is what an update asked for, in all of its parts."""
    found = {version.name: version for version in table.versions}
    two = found.get(wanted.version)
    return (
        two is not None
        and list(two.endpoints) == list(wanted.endpoints)
        and two.schema_hash == wanted.schema_hash
        and two.signature == wanted.signature
        and all(abs(found[name].weight - weight) < 1e-9 for name, weight in wanted.weights.items())
    )


async def standing(server: Server) -> tuple[Table, tuple[int, int]]:
    """The table as the server has it, and its register's version."""
    key = route_key(SERVICE)
    data = await server.ask("HGET", Shard("dtl", shard_of(key)).registers, key)
    assert isinstance(data, bytes)
    record = codec.decode(data)
    return decode(record.blob), (record.epoch, record.version)


async def alike(tools: Sequence[Tool], version: int) -> pb.Table:
    """The table at that version, once all have been told it; they must have been told the same."""
    found = [await tool.until(SERVICE, version) for tool in tools]
    assert {table.table_version for table in found} == {version}, found
    assert len({table.SerializeToString(deterministic=True) for table in found}) == 1, found
    return found[0]


async def served(member: Member, table: pb.Table, number: int) -> None:
    """Requests go to endpoints of that table, each to its version's."""
    where = {
        endpoint.url.removeprefix("http://"): version.name
        for version in table.versions
        for endpoint in version.endpoints
    }
    async with connect(member.port) as client:
        for _ in range(6):
            answer = await client.ask(asked(number, 1, stream=False), b"POST")
            assert answer.status == 200, answer.start
            version = answer.header(b"x-sidecar-version").decode()
            assert where[answer.header(b"x-sidecar-endpoint").decode()] == version


async def killed_writers(
    server: Server, spawn: Spawn, engine_port: int, *, rounds: int, within_s: float, chance: Random
) -> Fates:
    """Rounds of an update whose writer is killed some time within `within_s` after it was said.

    Every other round the server is held until the writer is gone: what it had sent is done, and nobody was answered.
    """
    fates = Fates()
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        members = [await enter(spawn()) for _ in range(2)]
        tools = [await enter(releasing(member.control)) for member in members]
        version = (await tools[0].push(first(engine_port))).accepted.table_version
        for number in range(rounds):
            before = await alike(tools, version)
            _, (epoch, registered) = await standing(server)
            wanted = change(number, engine_port)
            async with spawn() as victim, releasing(victim.control) as tool:
                assert shown(await tool.until(SERVICE, version)) == shown(before), "who starts knows what stands"
                acked = await _killed(tool, victim, wanted, server, chance.random() * within_s, fates, hold=number % 2)
            table, at = await standing(server)
            done = at == (epoch, registered + 1)
            assert done or at == (epoch, registered), "one change, or none"
            assert done or not acked, "what was acknowledged stands"
            fates.counted["acked" if acked else "done" if done else "not done"] += 1
            assert {each.name: each.schema_hash for each in table.versions}.get("v2") == (
                wanted.schema_hash if done else {each.name: each.schema_hash for each in before.versions}.get("v2")
            )
            if done:
                version += 1
            found = await alike(tools, version)
            assert says(found, wanted) if done else shown(found) == shown(before), "old or new, never half"
            for member in members:
                await served(member, found, number)
            # The tool sends it again, elsewhere.
            again = (await tools[number % 2].push(wanted)).accepted
            version += not done
            assert again.repeated == done and again.table_version == version
            assert says(await alike(tools, version), wanted)
            assert (await standing(server))[1] == (epoch, registered + 1), "one update"
    return fates


async def _killed(
    tool: Tool, victim: Member, wanted: pb.DescriptorUpdate, server: Server, delay_s: float, fates: Fates, *, hold: int
) -> bool:
    """Says the update and kills; whether it was acknowledged before."""
    if hold:
        server.freeze()
    try:
        sent = await tool.send(wanted)
        await asyncio.sleep(delay_s)
        await victim.kill()
    finally:
        if hold:
            server.thaw()
    fates.delays_s.append(delay_s)
    try:
        acked = (await tool.answer(sent)).ack is not None
    except ConnectionResetError:
        acked = False
    await asyncio.sleep(SETTLE_S)
    return acked


@dataclass
class Away:
    """An update while the server was away: how long until its NACK, until the next was taken once the server was back;
    how many updates the table counts for it, and whether the first one had been done after all."""

    how: str
    nack_s: float
    message: str
    back_s: float
    repeated: bool


async def server_away(
    server: Server, members: Sequence[Member], tools: Sequence[Tool], engine_port: int, number: int, how: str
) -> Away:
    """The server is `frozen` or `killed` as an update is said; the update is said again until it is taken."""
    before = tools[0].tables[SERVICE]
    wanted = change(number, engine_port)
    if how == "frozen":
        server.freeze()
    else:
        await server.kill()
    try:
        answer = await tools[0].push(wanted)
        nack = answer.refused
        assert pb.Nack.Code.Name(nack.code) == "UNAVAILABLE" and nack.message, nack
        assert nack.last_good_version == before.table_version
        for tool, member in zip(tools, members, strict=True):
            assert tool.tables[SERVICE] == before, "the table stays"
            await served(member, before, number)
    finally:
        if how == "frozen":
            server.thaw()
        else:
            await server.start()
    began = time.monotonic()
    again = await tools[1].push(wanted)
    while again.nack is not None:
        assert pb.Nack.Code.Name(again.nack.code) == "UNAVAILABLE", again.nack
        assert time.monotonic() - began < AGREE_S, "the server is back"
        await asyncio.sleep(0.05)
        again = await tools[1].push(wanted)
    back_s = time.monotonic() - began
    ack = again.accepted
    found = await alike(tools, ack.table_version)
    assert says(found, wanted)
    for member in members:
        await served(member, found, number)
    return Away(how, answer.at - answer.sent, nack.message, back_s, ack.repeated)
