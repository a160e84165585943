"""Ten real sidecars, one real server of the log, tenants who ask for several times their limit; the server is killed.

    python -m bench.qos.quotas                    some nine minutes of a few per cent of a core
    python -m bench.qos.quotas --quick            two and a half minutes, one sidecar's control left out
    python -m bench.qos.quotas --json             the figures as JSON
    python -m bench.qos.quotas --virtual          other cases, in virtual time with a round trip of 2 ms; seconds

`ann` has 100,000 tokens a minute, asks for four times as much, and goes on within each sidecar's part while the log is
away; `bob` has as many, asks for one and a half times, and is refused then. All is judged from the client's side: a
request counts with the tokens that its answer says it used, at the moment when it was sent. The engine answers after
`ENGINE_S`, always: what an admitted request takes beyond that is the sidecar's, and the client's own loop's.

Each sidecar is `sidecar run` as a process of its own; the server is Valkey, killed by SIGKILL, and keeps nothing. Exits
1 if an aim is missed.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

import aiohttp
import msgspec

from sidecar.policy.schema import Quota
from tests import processes
from tests.quota_world import Sidecar, World, most_in_a_span
from tests.servers import Server, valkey

LIMIT: Final = 100_000
LOADS: Final = {"ann": 4.0, "bob": 1.5}
ENGINE_S: Final = 0.5
MEAN_TOKENS: Final = 300
PROMPT: Final = "Say something about the weather of tomorrow, and be brief about it."
POLICY: Final = """\
apiVersion: sidecar/v1
kind: Policy
services:
  - {{name: chat, models: ["*"], endpoints: [{{url: "http://127.0.0.1:{port}", models: ["*"]}}]}}
identity: {{tenant: [{{header: x-tenant-id}}]}}
quotas:
  - {{name: ann, tenant: ann, tokens_per_minute: {limit}, when_log_away: share}}
  - {{name: bob, tenant: bob, tokens_per_minute: {limit}, when_log_away: refuse}}
"""
MOST_OVER: Final = 0.01
LEAST_USED: Final = 0.95


class Sent(msgspec.Struct):
    """A request as its client saw it; `tokens` 0: it was refused."""

    tenant: str
    at: float
    took_s: float
    status: int
    tokens: int
    message: str = ""
    headers: dict[str, str] = {}


class Waits(msgspec.Struct, frozen=True):
    """Milliseconds, of requests in a phase: refused ones from end to end, admitted ones beyond the engine's time."""

    refused: int
    refused_p50_ms: float
    refused_p99_ms: float
    refused_max_ms: float
    admitted: int
    admitted_p50_ms: float
    admitted_p99_ms: float
    admitted_max_ms: float


class Used(msgspec.Struct, frozen=True):
    """Of a tenant's limit: the most in any sliding minute and in any calendar minute, and the mean per minute."""

    sliding: float
    calendar: float
    mean: float


class Figures(msgspec.Struct, frozen=True):
    """One run. `steady`: from the second minute until the kill; `whole`: everything; `away`: without the server."""

    sidecars: int
    seconds: float
    steady: dict[str, Used]
    whole: dict[str, Used]
    away: dict[str, Used]
    after: dict[str, Used]
    waits: dict[str, Waits]
    statuses: dict[str, int]
    calls_per_s: float
    example: dict[str, str]


@contextlib.asynccontextmanager
async def fleet(count: int, server: Server, policy: Path) -> AsyncIterator[list[processes.Sidecar]]:
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for _ in range(count):
            running = processes.sidecar("--policy", str(policy), "--redis", server.tcp_url)
            found.append(await stack.enter_async_context(running))
        yield found


class Load:
    """Sends what tenants ask, each request to a sidecar of its own choice, and keeps what came of it."""

    def __init__(self, sidecars: list[processes.Sidecar], seed: int) -> None:
        self.sent: list[Sent] = []
        self._urls = [f"http://127.0.0.1:{each.port}/v1/chat/completions" for each in sidecars]
        self._chance = random.Random(seed)

    async def run(self, seconds: float) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as client, asyncio.TaskGroup() as tasks:
            for tenant, load in LOADS.items():
                tasks.create_task(self._arrivals(client, tasks, tenant, load * LIMIT / MEAN_TOKENS / 60.0, seconds))

    async def _arrivals(
        self, client: aiohttp.ClientSession, tasks: asyncio.TaskGroup, tenant: str, rate: float, seconds: float
    ) -> None:
        at = time.monotonic()
        end = at + seconds
        while True:
            at += self._chance.expovariate(rate)
            if at >= end:
                return
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            answer = self._chance.randint(MEAN_TOKENS // 3, 5 * MEAN_TOKENS // 3) - 40
            tasks.create_task(self._send(client, tenant, self._chance.choice(self._urls), answer))

    async def _send(self, client: aiohttp.ClientSession, tenant: str, url: str, answer: int) -> None:
        body = {"model": "demo", "max_tokens": answer, "messages": [{"role": "user", "content": PROMPT}]}
        at = time.monotonic()
        async with client.post(url, json=body, headers={"x-tenant-id": tenant}) as response:
            told = json.loads(await response.read())
            took_s = time.monotonic() - at
            tokens = told["usage"]["total_tokens"] if response.status == 200 else 0
            message = told["error"]["message"] if "error" in told else ""
            lines = {name.lower(): value for name, value in response.headers.items()}
            rate = {n: v for n, v in lines.items() if n.startswith("x-ratelimit") or n == "retry-after"}
            self.sent.append(Sent(tenant, at, took_s, response.status, tokens, message, rate))


async def measured(count: int, before_s: float, away_s: float, after_s: float, seed: int, say: bool) -> Figures:
    """One run; `away_s` 0: the server is not killed."""
    with tempfile.TemporaryDirectory(prefix="quotas-") as name:
        policy = Path(name, "policy.yaml")
        async with (
            processes.engine(first_token_s=ENGINE_S, keep=0) as (_, port),
            valkey(Path(name, "valkey"), port=0) as server,
        ):
            policy.write_text(POLICY.format(port=port, limit=LIMIT))
            async with fleet(count, server, policy) as sidecars:
                load = Load(sidecars, seed)
                begun = time.monotonic()
                seconds = before_s + away_s + after_s
                running = asyncio.create_task(load.run(seconds))
                await asyncio.sleep(before_s)
                killed = time.monotonic()
                back = killed
                calls = await _calls(sidecars)
                if away_s:
                    await server.kill()
                    _tell(say, f"server {server.pid} is gone")
                    await asyncio.sleep(away_s)
                    await server.start()
                    back = time.monotonic()
                    _tell(say, "it is back, and knows nothing")
                await running
                return _figures(count, load.sent, begun, killed, back, seconds, calls / before_s)


def _tell(say: bool, words: str) -> None:
    if say:
        print(words, file=sys.stderr, flush=True)


async def _calls(sidecars: list[processes.Sidecar]) -> float:
    """Draws of all sidecars so far, by their own pages."""
    draws = 0
    async with aiohttp.ClientSession() as client:
        for each in sidecars:
            async with client.get(f"http://127.0.0.1:{each.admin}/quotas") as response:
                page = json.loads(await response.read())
            draws += sum(line["counts"]["draws"] for line in page["quotas"])
    return draws


def _figures(
    count: int, sent: list[Sent], begun: float, killed: float, back: float, seconds: float, calls_per_s: float
) -> Figures:
    end = begun + seconds
    ordered = sorted(sent, key=lambda each: each.at)
    phases = {"with the server": (begun, killed)}
    if back > killed:
        phases |= {"without it": (killed, back), "after it is back": (back, end)}
    statuses: dict[str, int] = {}
    for each in ordered:
        word = f"{each.tenant} {each.status}"
        statuses[word] = statuses.get(word, 0) + 1

    def of(since: float, until: float) -> dict[str, Used]:
        return {tenant: _used([e for e in ordered if e.tenant == tenant], since, until) for tenant in LOADS}

    refused = [each for each in ordered if each.status == 429]
    return Figures(
        sidecars=count,
        seconds=seconds,
        steady=of(begun + 60.0, killed),
        whole=of(begun, end),
        away=of(killed + 5.0, back) if back > killed else {},
        after=of(back + 60.0, back + 120.0) if end > back + 120.0 and back > killed else {},
        waits={word: _waits([e for e in ordered if since <= e.at < until]) for word, (since, until) in phases.items()},
        statuses=statuses,
        calls_per_s=round(calls_per_s, 1),
        example=refused[-1].headers | {"message": refused[-1].message} if refused else {},
    )


def _used(sent: list[Sent], since: float, until: float) -> Used:
    """What was sent between two moments; windows that reach over the beginning count what was before."""
    ats = [each.at for each in sent]
    sums = [0]
    for each in sent:
        sums.append(sums[-1] + each.tokens)

    def between(one: float, other: float) -> int:
        return sums[bisect_left(ats, other)] - sums[bisect_left(ats, one)]

    sliding = max(
        (
            sums[bisect_right(ats, each.at)] - sums[bisect_right(ats, each.at - 60.0)]
            for each in sent
            if since <= each.at < until
        ),
        default=0,
    )
    offset = time.time() - time.monotonic()
    first = 60.0 * ((since + offset) // 60.0) - offset
    minutes = [between(first + 60.0 * n, first + 60.0 * (n + 1)) for n in range(int((until - first) // 60.0) + 1)]
    mean = between(since, until) / max(1.0, until - since) * 60.0
    return Used(round(sliding / LIMIT, 4), round(max(minutes) / LIMIT, 4), round(mean / LIMIT, 4))


def _waits(sent: list[Sent]) -> Waits:
    refused = sorted(1000 * each.took_s for each in sent if each.status == 429)
    admitted = sorted(1000 * (each.took_s - ENGINE_S) for each in sent if each.status == 200)

    def of(values: list[float], part: float) -> float:
        return round(values[min(len(values) - 1, int(part * len(values)))], 1) if values else 0.0

    return Waits(
        *(len(refused), of(refused, 0.5), of(refused, 0.99), of(refused, 1.0)),
        *(len(admitted), of(admitted, 0.5), of(admitted, 0.99), of(admitted, 1.0)),
    )


def missed(figures: Figures) -> list[str]:
    """The aims that a run did not meet, in words."""
    words = []
    for part, used in (("steady", figures.steady), ("whole", figures.whole)):
        for tenant, each in used.items():
            most = max(each.sliding, each.calendar)
            if most > 1.0 + MOST_OVER:
                words.append(
                    f"{figures.sidecars} sidecars, {tenant}, {part}: {100 * most:.1f} % of the limit in a minute"
                )
    for tenant, each in figures.steady.items():
        if each.mean < LEAST_USED:
            words.append(f"{figures.sidecars} sidecars, {tenant}: only {100 * each.mean:.1f} % of the limit was used")
    if figures.away and figures.away["bob"].mean:
        words.append("bob was admitted without the log")
    return words


def table(runs: Sequence[Figures]) -> str:
    """The figures as docs/quotas.md has them."""
    lines = [
        "| sidecars | tenant | phase | most in a sliding minute | most in a calendar minute | mean |",
        "|---------:|--------|-------|-------------------------:|--------------------------:|-----:|",
    ]
    for run in runs:
        for phase, used in (
            ("with the server, from its second minute", run.steady),
            ("without the server", run.away),
            ("in the second minute after it is back", run.after),
            ("all of it", run.whole),
        ):
            for tenant, each in used.items():
                shares = " | ".join(f"{100 * share:.1f} %" for share in (each.sliding, each.calendar, each.mean))
                lines.append(f"| {run.sidecars} | {tenant} | {phase} | {shares} |")
    lines += [
        "",
        "| sidecars | phase | refused | p50 | p99 | most | admitted | p50 | p99 | most |",
        "|---------:|-------|--------:|----:|----:|-----:|---------:|----:|----:|-----:|",
    ]
    for run in runs:
        for phase, waits in run.waits.items():
            lines.append(
                f"| {run.sidecars} | {phase} | {waits.refused} | {waits.refused_p50_ms} ms | {waits.refused_p99_ms} ms"
                f" | {waits.refused_max_ms} ms | {waits.admitted} | {waits.admitted_p50_ms} ms"
                f" | {waits.admitted_p99_ms} ms | {waits.admitted_max_ms} ms |"
            )
    lines += ["", *(f"Draws a second on {run.sidecars}: {run.calls_per_s}; answers: {run.statuses}" for run in runs)]
    return "\n".join(lines)


class Case(msgspec.Struct, frozen=True):
    """A case in virtual time. `at`: only so many sidecars are asked (0: all); `first`: the first one's part of it.

    A request takes of its estimate a part between `least` and `most`, for `shortest_s` to `longest_s`.
    """

    words: str
    sidecars: int = 10
    load: float = 4.0
    mean: int = MEAN_TOKENS
    at: int = 0
    first: float = 0.0
    least: float = 1.0
    most: float = 1.0
    shortest_s: float = 1.0
    longest_s: float = 20.0
    away: bool = False
    forgets: bool = False


CASES: Final = (
    Case("4 times the limit, one sidecar", sidecars=1),
    Case("2 times the limit", load=2.0),
    Case("4 times the limit"),
    Case("10 times the limit", load=10.0),
    Case("4 times the limit", sidecars=50),
    Case("4 times the limit, all at 2 of them", at=2),
    Case("0.5 times the limit", load=0.5),
    Case("0.9 times the limit", load=0.9),
    Case("0.9 times the limit, one sidecar", sidecars=1, load=0.9),
    Case("requests of 3,000 tokens", mean=3000),
    Case("requests of 5,000 tokens", mean=5000),
    Case("answers use 50 to 150 % of their estimate", least=0.5, most=1.5),
    Case("answers use 90 to 120 % of it: 5 % too low on average", least=0.9, most=1.2),
    Case("answers use 10 to 30 % of it and take 5 to 40 s", least=0.1, most=0.3, shortest_s=5.0, longest_s=40.0),
    Case("the server is away for a minute", away=True),
    Case("the server is away for a minute, and forgets", away=True, forgets=True),
    Case("the same, nine tenths of the traffic at one sidecar", away=True, forgets=True, first=0.9),
)
VIRTUAL_S: Final = 300.0


def virtual(case: Case, seed: int) -> str:
    """A case's row: the most in any sliding minute, the mean from the second minute on, refusals and draws."""
    chance = random.Random(seed)
    world = World(case.sidecars, Quota(name="q", tokens_per_minute=LIMIT))
    begun = world.now
    asked = world.sidecars[: case.at or None]
    for place, sidecar in enumerate(asked):
        part = 1.0 / len(asked)
        if case.first:
            part = case.first if place == 0 else (1.0 - case.first) / (len(asked) - 1)

        def one(sidecar: Sidecar = sidecar) -> None:
            tokens = chance.randint(case.mean // 2, case.mean * 3 // 2)
            used = max(1, int(tokens * chance.uniform(case.least, case.most)))
            world.ask(sidecar, "ann", tokens, used, chance.uniform(case.shortest_s, case.longest_s))

        def gap(rate: float = part * case.load * LIMIT / case.mean / 60.0) -> float:
            return chance.expovariate(rate)

        world.every(gap, begun + VIRTUAL_S, one)
    if case.away:
        world.clock.at(begun + 90.0, world.lose)
        world.clock.at(begun + 150.0, world.find, case.forgets)
    world.run(VIRTUAL_S)
    most = most_in_a_span(world.admitted) / LIMIT
    mean = sum(used for at, used in world.admitted if at >= begun + 60.0) / LIMIT / (VIRTUAL_S / 60.0 - 1.0)
    refused = len(world.refused) / (len(world.refused) + len(world.admitted))
    draws = world.server.calls / VIRTUAL_S
    shares = f"{100 * most:.1f} % | {100 * mean:.1f} % | {100 * refused:.1f} %"
    return f"| {case.sidecars} | {case.words} | {shares} | {draws:.0f} |"


def _virtual(seed: int) -> None:
    print("| sidecars | case | most in a sliding minute | mean | refused | draws a second |")
    print("|---------:|------|-------------------------:|-----:|--------:|---------------:|")
    for case in CASES:
        print(virtual(case, seed), flush=True)


async def _all(arguments: argparse.Namespace) -> list[Figures]:
    if arguments.quick:
        return [await measured(arguments.sidecars, 100.0, 20.0, 30.0, arguments.seed, True)]
    runs = [await measured(arguments.sidecars, 180.0, 75.0, 125.0, arguments.seed, True)]
    print(table(runs), file=sys.stderr, flush=True)
    runs.append(await measured(1, 120.0, 0.0, 0.0, arguments.seed, True))
    return runs


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.qos.quotas", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sidecars", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--virtual", action="store_true")
    arguments = parser.parse_args(argv)
    if arguments.virtual:
        _virtual(arguments.seed)
        return 0
    runs = asyncio.run(_all(arguments))
    print(msgspec.json.format(msgspec.json.encode(runs), indent=2).decode() if arguments.json else table(runs))
    words = [word for run in runs for word in missed(run)]
    for word in words:
        print(f"missed: {word}", file=sys.stderr)
    return 1 if words else 0


if __name__ == "__main__":
    sys.exit(main())
