"""T15 at full size: 100 streams of 20 seconds, a token each 100 ms, while weights change and bad updates come.

The story is the suite's (`tests.outcomes.release`); there it is shorter.
"""

import contextlib
from pathlib import Path

import msgspec

from bench.routes.stage import engine, members, quantiles_ms
from bench.txlog.stage import Tree
from sidecar.demo.script import Script
from tests.outcomes.release import policy, weights_under_live_streams
from tests.servers import Server


class Live(msgspec.Struct, frozen=True):
    """What came of it. `followed_ms`: from an ack until a sidecar's requests all followed,
    at the latest: p50, p90, p99, most."""

    sidecars: int
    streams: int
    whole: int
    tokens: int
    by_version: dict[str, int]
    requests: int
    failed: int
    pushes: int
    followed_ms: list[float]
    refused: dict[str, str]


async def measure(
    tree: Tree, server: Server, work: Path, *, sidecars: int, streams: int, tokens: int, gap_s: float, pause_s: float
) -> Live:
    """Raises where anything of T15 does not hold."""
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        script = Script(token_gap_s=gap_s, keep=0)
        urls = {name: [f"http://127.0.0.1:{await enter(engine(script, '127.0.0.1'))}"] for name in ("v1", "v2")}
        rule = {"breakers": {"node": {"min_closed_ratio": 0}}}
        path = policy(work / "t15.json", urls, {"v1": 90, "v2": 10}, **rule)
        fleet = await enter(members(sidecars, tree, server.url, path))
        story = await weights_under_live_streams(
            fleet[0].control, [each.port for each in fleet], streams=streams, tokens=tokens, pause_s=pause_s
        )
    return Live(
        sidecars,
        streams,
        story.streams.whole,
        tokens,
        dict(story.streams.versions),
        len(story.asking.seen),
        sum(count for status, count in story.asking.statuses.items() if status != 200),
        len(story.turns),
        quantiles_ms(story.followed_s()),
        {name: nack.message for name, nack in story.nacks.items()},
    )
