"""How soon everybody follows: twenty sidecars and three Envoys, one after another all to one version and back.

Every sidecar and Envoy is asked again and again, by itself, on a connection that is kept. A push gives one version all
traffic. For each place and push, after the ack and after the sending: when the last request *began* that the other
version answered (`not_yet`, 0 where none did), and when the first from which on all followed (`from`). The truth lies
between the two, which are a pause between two requests of one place (`every_ms`) apart; the budget is on the later one.
What is measured includes all: the log, the fold, the swap, for Envoys xDS.

`told`: the same push, at a release tool that follows through that sidecar: when it was told, by the clock of this
process. Twenty interpreters, three Envoys, the load and the tools share this machine's cores: its noise is in it.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from bench.routes.envoys import envoys
from bench.routes.stage import addresses, engine, members, quantiles_ms
from bench.txlog.stage import Tree
from sidecar.demo.script import Script
from tests.outcomes.release import Asking, Followed, Turn, policy, releasing, update
from tests.servers import Server

SETTLE_S = 2.0
FOLLOW_S = 2.0
"""After the last push of all: everybody is asked until then."""


class Propagation(msgspec.Struct, frozen=True):
    """Milliseconds, p50, p90, p99 and the most, over `pushes` times the places."""

    sidecars: int
    envoys: int
    pushes: int
    requests: int
    failed: int
    every_ms: float
    never: int
    """Of pushes times places: not before the next push, `pause_s` later."""
    request_ms: list[float]
    """How long the requests took: what the machine did to them, too."""
    ack_ms: list[float]
    told_ms: list[float]
    """After the ack; negative where the tool's answer came later than the change."""
    ways: list["Way"]

    def way(self, who: str, since: str) -> "Way | None":
        """One of them."""
        return next((each for each in self.ways if (each.who, each.since) == (who, since)), None)


class Way(msgspec.Struct, frozen=True):
    """How soon requests followed: `who` is `sidecars` or `Envoys`, `since` is `ack` or `sending`."""

    who: str
    since: str
    not_yet_ms: list[float]
    from_ms: list[float]


async def measure(
    tree: Tree,
    server: Server,
    work: Path,
    *,
    sidecars: int,
    envoy_count: int,
    pushes: int,
    pause_s: float,
    every_s: float,
    say: Callable[[str], None],
) -> Propagation:
    """Pushes through the first sidecar in turn and the others."""
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        port = await enter(engine(Script(tokens=1, keep=0)))
        urls = {"v1": addresses(1, 3, port), "v2": addresses(2, 3, port)}
        path = policy(work / "propagation.json", urls, {"v1": 100})
        fleet = await enter(members(sidecars, tree, server.url, path))
        around = await enter(envoys(envoy_count, tree, server.url, path, work)) if envoy_count else []
        tools = [await enter(releasing(each.control)) for each in fleet]
        asking = Asking(every_s)
        stop = asyncio.Event()
        turns: list[Turn] = []
        told: list[float] = []
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asking.run([*(each.port for each in fleet), *around], stop))
            await asyncio.sleep(SETTLE_S)
            for number in range(pushes):
                version = "v1" if number % 2 else "v2"
                other = "v2" if number % 2 else "v1"
                answer = await tools[number % sidecars].push(update(version=version, weights={version: 1, other: 0}))
                made = answer.accepted.table_version
                await asyncio.sleep(pause_s)
                turns.append(Turn(version, answer.sent, answer.at, time.monotonic()))
                for tool in tools:
                    await tool.until("chat", made)
                    told += [at - answer.at for at, table in tool.changes if table.table_version == made]
            stop.set()
        say(f"propagation: {len(asking.seen)} requests, {dict(asking.statuses)}")
    failed = sum(count for status, count in asking.statuses.items() if status != 200)
    ways, never = [], 0
    for since in ("ack", "sending"):
        found: dict[str, list[Followed]] = {"sidecars": [], "Envoys": []}
        for turn in turns:
            began = turn.sent if since == "sending" else turn.acked
            for place, each in asking.followed(turn.version, began, turn.until).items():
                found["sidecars" if place < sidecars else "Envoys"].append(each)
                if each.from_s == math.inf and since == "ack":
                    never += 1
                    some = [
                        one
                        for one in asking.seen
                        if one.where == place and began <= one.began and one.ended < turn.until
                    ]
                    say(f"propagation: place {place} did not follow {turn.version}: {some[-3:]} of {len(some)}")
        for who, some in found.items():
            if some:
                not_yet = [each.not_yet_s for each in some]
                at = [min(each.from_s, pause_s) for each in some]
                ways.append(Way(who, since, quantiles_ms(not_yet), quantiles_ms(at)))
    return Propagation(
        sidecars,
        envoy_count,
        pushes,
        len(asking.seen),
        failed,
        1000 * every_s,
        never,
        quantiles_ms([each.ended - each.began for each in asking.seen]),
        quantiles_ms([turn.acked - turn.sent for turn in turns]),
        quantiles_ms(told),
        ways,
    )
