"""Updates whose writers are killed, and updates while the log's server is away; the stories are the suite's.

Kills fall at random moments of an update; every other one with the server held, so that what was sent is done and
nobody is told. `tests.outcomes.mishaps` says what must hold; whatever does not, raises.
"""

import contextlib
from pathlib import Path
from random import Random

import msgspec

from bench.routes.stage import engine, member, members
from bench.txlog.stage import Tree
from sidecar.demo.script import Script
from tests.outcomes.mishaps import first, killed_writers, server_away
from tests.outcomes.release import SERVICE, nothing, releasing
from tests.servers import Server


class Kills(msgspec.Struct, frozen=True):
    """How many writers were killed within how long after an update was said, and what had come of it by then."""

    rounds: int
    within_ms: float
    acked: int
    done_unacked: int
    not_done: int


class Away(msgspec.Struct, frozen=True):
    """An update while the server was away (`frozen`, `killed`): seconds until its NACK; from the server's return until
    it was taken; whether the first sending had been done after all."""

    how: str
    nack_s: float
    back_s: float
    repeated: bool
    message: str


async def killed(tree: Tree, server: Server, work: Path, *, rounds: int, within_s: float, seed: int) -> Kills:
    """At random moments."""
    policy = nothing(work / "policy.json")
    async with engine(Script(keep=0)) as port:
        fates = await killed_writers(
            server,
            lambda: member(tree, server.url, policy),
            port,
            rounds=rounds,
            within_s=within_s,
            chance=Random(seed),
        )
    counted = fates.counted
    return Kills(fates.rounds, 1000 * within_s, counted["acked"], counted["done"], counted["not done"])


async def away(tree: Tree, server: Server, work: Path, *, rounds: int) -> list[Away]:
    """Frozen, killed, frozen, ..."""
    found = []
    async with contextlib.AsyncExitStack() as stack:
        port = await stack.enter_async_context(engine(Script(keep=0)))
        fleet = await stack.enter_async_context(members(3, tree, server.url, nothing(work / "policy.json")))
        tools = [await stack.enter_async_context(releasing(each.control)) for each in fleet]
        version = (await tools[0].push(first(port))).accepted.table_version
        for tool in tools:
            await tool.until(SERVICE, version)
        for number in range(rounds):
            how = "killed" if number % 2 else "frozen"
            one = await server_away(server, fleet, tools, port, number, how)
            found.append(Away(one.how, round(one.nack_s, 3), round(one.back_s, 3), one.repeated, one.message))
    return found
