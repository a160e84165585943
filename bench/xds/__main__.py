"""What Envoys make of the routes: real Envoys, under load, in about a minute.

    python -m bench.xds                          everything
    python -m bench.xds --parts weights,refusal  some of it
    python -m bench.xds --quick                  a look; no figures to keep
    python -m bench.xds --out docs/xds.json      keep it
    make bench-xds XDS=--json

| part     | what                                                                                             |
|----------|--------------------------------------------------------------------------------------------------|
| weights  | 60 changes of weights for three Envoys under wrk: failed requests, split, from push to last ACK  |
| refusal  | 20 updates that one of three Envoys refuses: until all three route as before                     |
| restart  | the server killed and started anew under load: failed requests, and whose table stands           |
| streams  | live streams across new weights, new endpoints, and a version that goes                          |
| sessions | 10,000 sessions while a version grows: who came back, who moved between the others               |
| growth   | snapshots of 1 to 1,000 services without Envoys: the first, and one of a new weight              |

Exit code 1 if a budget is missed. wrk and the engine in C are of `make bench-setup`; without them callers in Python are
the load. The machine's own noise is in the figures.
"""

import argparse
import asyncio
import contextlib
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from math import sqrt
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from msgspec.structs import replace

from bench.compare.machine import machine
from bench.setup import ROOT as BUILT
from bench.setup import debian_program
from bench.txlog.stage import share
from sidecar.control.door import Door
from sidecar.control.xds import server
from sidecar.control.xds.build import build
from sidecar.control.xds.server import Stream, Xds
from sidecar.control.xds.snapshot import compose
from sidecar.core.table import Table, Target, Version, effective
from sidecar.policy.schema import Service
from tests.control.xds.desk import Desk, Said
from tests.control.xds.envoys import LIMIT_S, Caller, Envoy, call, chunks, engine, envoy, load
from tests.processes import process

PARTS = ("weights", "refusal", "restart", "streams", "sessions", "growth")
LACKS = ("envoy.transport_sockets.upstream/envoy.transport_sockets.tls",)
CONNECTIONS = 4


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.xds", description="what Envoys make of the routes")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="a tenth of it")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--out", type=Path, help="keep it as JSON")
    args = parser.parse_args(argv)
    found: dict[str, Any] = {"machine": machine()}
    for part in args.parts.split(","):
        print(f"bench.xds: {part}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="bench-xds-") as work:
            found[part] = uvloop.run(MEASURES[part](Path(work), args.quick))
    found["missed"] = [words for words, met in budgets(found) if not met]
    kept = msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n"
    if args.out:
        args.out.write_bytes(kept)
    if args.json:
        print(kept.decode())
    else:
        for part, figures in found.items():
            print(f"{part}: {figures}")
    return 1 if found["missed"] else 0


def budgets(found: dict[str, Any]) -> list[tuple[str, bool]]:
    """What was aimed at, and whether it was met."""
    said: list[tuple[str, bool]] = []
    if "weights" in found:
        its = found["weights"]
        said += [
            ("no failed request over the changes", its["failed"] == 0),
            ("the split within 3 sigma", abs(its["sigmas"]) <= 3),
            ("push to ACK p95 <= 50 ms", its["ack_p95_ms"] <= 50),
            ("weights move routes alone", its["cluster_updates"] == 1),
        ]
    if "refusal" in found:
        said += [("each refusal takes all back", found["refusal"]["rounds"] == found["refusal"]["taken_back"])]
    if "restart" in found:
        its = found["restart"]
        said += [("no failed request over a restart", its["failed"] == 0), ("the table stands", its["kept"])]
    if "streams" in found:
        said += [("every stream whole", found["streams"]["whole"] == found["streams"]["streams"])]
    if "sessions" in found:
        its = found["sessions"]
        said += [("no session comes back", its["back"] == 0), ("none moves elsewhere", its["astray_ratio"] <= 0.001)]
    return said


# What the parts have in common.


def split(ports: Sequence[int], weights: Sequence[int], scheme: str = "http") -> Table:
    """Versions `v1`, `v2`, ... with an endpoint each; `scheme` is the last one's."""
    last = len(ports) - 1
    versions = (
        Version(
            f"v{number + 1}",
            weight,
            endpoints=(Target(f"{scheme if number == last else 'http'}://127.0.0.1:{port}"),),
        )
        for number, (port, weight) in enumerate(zip(ports, weights, strict=True))
    )
    return Table("chat", tuple(versions))


@contextlib.asynccontextmanager
async def serving(desk: Desk) -> AsyncIterator[tuple[Xds, Said]]:
    said, door = Said(), Door(port=0)
    async with (
        asyncio.TaskGroup() as tasks,
        server.serving(desk, door, tasks, said, clock=time.perf_counter) as xds,
    ):
        yield xds, said


async def until(ready: Any, limit_s: float = LIMIT_S) -> None:
    async with asyncio.timeout(limit_s):
        while not ready():
            await asyncio.sleep(0.001)


async def three(stack: contextlib.AsyncExitStack, work: Path, xds: Xds, lacks: Sequence[str] = ()) -> list[Envoy]:
    """Three Envoys of both protocols that have all there is; the last one `lacks` extensions."""
    proxies = []
    for number in range(3):
        off = lacks if number == 2 else ()
        made = envoy(work, xds.port, f"envoy-{number}", delta=number == 1, disabled=off)
        proxies.append(await stack.enter_async_context(made))
    for each in proxies:
        await each.listening()
    await until(lambda: len(xds.hub.envoys) == 3 and all(each.proven for each in xds.hub.envoys))
    await asyncio.sleep(0.1)
    return proxies


def all_settled(xds: Xds) -> bool:
    return all(each.settled for each in xds.hub.envoys if isinstance(each, Stream))


@contextlib.asynccontextmanager
async def engines(count: int) -> AsyncIterator[list[int]]:
    """Engines in C where they were built, else ours; their ports."""
    program = BUILT / "bin" / "upstream"
    async with contextlib.AsyncExitStack() as stack:
        if not program.exists():
            yield [(await stack.enter_async_context(engine(f"v{number + 1}"))).port for number in range(count)]
            return
        ports = []
        for _ in range(count):
            async with engine("free") as free:
                ports.append(free.port)
            running = await asyncio.create_subprocess_exec(str(program), str(ports[-1]), stdout=asyncio.subprocess.PIPE)
            stack.push_async_callback(running.wait)
            stack.callback(running.kill)
        await asyncio.sleep(0.2)
        yield ports


class Traffic:
    """Load on some Envoys: wrk where it is installed, else callers of ours. `failed` once it is over."""

    def __init__(self) -> None:
        self.failed = 0
        self.requests = 0
        self.by = "wrk"


@contextlib.asynccontextmanager
async def traffic(ports: Sequence[int]) -> AsyncIterator[Traffic]:
    program, environ = debian_program("wrk")
    made = Traffic()
    if not Path(program).exists():
        made.by = "callers in Python"
        async with contextlib.AsyncExitStack() as stack:
            loads = [await stack.enter_async_context(load(port, CONNECTIONS)) for port in ports]
            yield made
        made.failed = sum(len(each.failed) for each in loads)
        made.requests = sum(sum(each.served.values()) for each in loads)
        return
    running = [
        await asyncio.create_subprocess_exec(
            program, "-t1", f"-c{CONNECTIONS}", "-d600s", f"http://127.0.0.1:{port}/v1/models",
            env=environ, stdout=asyncio.subprocess.PIPE,
        )
        for port in ports
    ]  # fmt: skip
    try:
        yield made
    finally:
        for each in running:
            each.send_signal(2)  # it sums up and ends
            said = (await each.communicate())[0].decode()
            requests = re.search(r"^\s*(\d+) requests in", said, re.M)
            made.requests += int(requests[1]) if requests else 0
            refused = re.search(r"Non-2xx or 3xx responses: (\d+)", said)
            broken = re.search(r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)", said)
            made.failed += int(refused[1]) if refused else 0
            made.failed += sum(map(int, broken.groups())) if broken else 0


async def routed(proxies: Sequence[Envoy]) -> Counter[str]:
    """Requests by version, as the Envoys count them."""
    found: Counter[str] = Counter()
    for each in proxies:
        stats = await each.get(r"/stats?filter=%5Ecluster.chat%5C%7Cv%5Cd.upstream_rq_total")
        for version, count in re.findall(r"cluster\.chat\|(v\d)\.upstream_rq_total: (\d+)", stats):
            found[version] += int(count)
    return found


# The parts.


async def weights(work: Path, quick: bool) -> dict[str, Any]:
    changes, hold_s = (6, 0.2) if quick else (60, 0.3)
    desk = Desk()
    async with engines(2) as ports, contextlib.AsyncExitStack() as stack:
        desk.put(split(ports, (9000, 1000)))
        xds, said = await stack.enter_async_context(serving(desk))
        proxies = await three(stack, work, xds)
        seen = expected = variance = 0.0
        worst, counted = 0.0, 0
        async with traffic([each.port for each in proxies]) as load:
            await asyncio.sleep(0.3)
            for number in range(changes):
                weight = (number * 3700 + 500) % 10_000
                done = len(xds.counts.ack_s)
                desk.put(split(ports, (10_000 - weight, weight)))
                await until(lambda done=done: len(xds.counts.ack_s) > done)
                await asyncio.sleep(0.02)  # what was chosen by the weights before is counted by then
                before = await routed(proxies)
                await asyncio.sleep(hold_s)
                after = await routed(proxies)
                got, total = after["v2"] - before["v2"], (after - before).total()
                part = weight / 10_000
                seen, expected = seen + got, expected + part * total
                variance += total * part * (1 - part)
                worst = max(worst, abs(got - part * total) / max(1.0, sqrt(total * part * (1 - part))))
                counted += total
        acks = [1000 * took for took in xds.counts.ack_s]
        stats = await proxies[0].get("/stats?filter=cluster_manager.cds.update_success")
        return {
            "changes": changes,
            "envoys": 3,
            "load": load.by,
            "requests": load.requests,
            "failed": load.failed,
            "counted": counted,
            "sigmas": round((seen - expected) / sqrt(variance), 2),
            "worst_window_sigmas": round(worst, 2),
            "ack_p50_ms": round(share(acks, 0.5), 1),
            "ack_p95_ms": round(share(acks, 0.95), 1),
            "ack_max_ms": round(max(acks), 1),
            "nacks": xds.counts.nacks,
            "cluster_updates": int(stats.split(":")[1]),
            "said": sorted({event for _, event, _ in said.lines}),
        }


async def refusal(work: Path, quick: bool) -> dict[str, Any]:
    rounds = 3 if quick else 20
    async with engine("v1") as one, engine("v2") as other, contextlib.AsyncExitStack() as stack:
        ports = (one.port, other.port)
        good = split(ports, (9000, 1000))
        desk = Desk()
        desk.put(good)
        xds, _ = await stack.enter_async_context(serving(desk))
        proxies = await three(stack, work, xds, LACKS)
        took, back = [], 0
        for number in range(rounds):
            fingerprint = xds.hub.target.fingerprint
            start = time.perf_counter()
            desk.put(split(ports, (1000, 9000), "https"))
            await until(lambda number=number: len(desk.restored) > number)
            await until(lambda f=fingerprint: xds.hub.target.fingerprint == f and all_settled(xds))
            took.append(1000 * (time.perf_counter() - start))
            await asyncio.sleep(0.05)  # an Envoy answers when its main thread has it, and its worker is next
            shares = [Counter([(await call(each.port)).body for _ in range(50)]) for each in proxies]
            back += all(each[b"v1"] >= 35 and each.total() == 50 for each in shares)
        return {
            "rounds": rounds,
            "taken_back": back,
            "nacks": xds.counts.nacks,
            "update_to_all_back_p50_ms": round(share(took, 0.5), 1),
            "update_to_all_back_max_ms": round(max(took), 1),
        }


POLICY = """
apiVersion: sidecar/v1
kind: Policy
services:
- name: chat
  endpoints: [{{url: "http://127.0.0.1:{0}"}}, {{url: "http://127.0.0.1:{1}", version: v2}}]
  split: {{v1: 90, v2: 10}}
"""


async def restart(work: Path, quick: bool) -> dict[str, Any]:
    away_s = 0.5 if quick else 3.0
    async with engines(2) as ports, contextlib.AsyncExitStack() as stack:
        policy = work / "policy.yaml"
        policy.write_text(POLICY.format(*ports))
        flags = ["--policy", str(policy), "--redis", "embedded", "--data", str(work / "data"), "--log-format", "json"]

        async def served(xds: int) -> tuple[contextlib.AsyncExitStack, int, int]:
            inner = contextlib.AsyncExitStack()
            where = ["--xds", f"127.0.0.1:{xds}", "--admin", "127.0.0.1:0"]
            running = await inner.enter_async_context(process("sidecar", "xds", *flags, *where))
            started = await running.event("started")
            return inner, *(int(str(started[name]).rpartition(":")[2]) for name in ("admin", "xds"))

        first, admin, port = await served(0)
        proxy = await stack.enter_async_context(envoy(work, port))
        await proxy.listening()
        body = b'{"version": "v2", "weight": 0.4}'
        reader, writer = await asyncio.open_connection("127.0.0.1", admin)
        head = (
            "POST /routes/chat?by=bench HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\nconnection: close\r\n"
        )
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        answer = await reader.read()
        writer.close()
        if b" 200 " not in answer.split(b"\r\n")[0]:
            raise RuntimeError(answer.decode())
        await asyncio.sleep(0.3)
        async with traffic([proxy.port]) as load:
            await asyncio.sleep(0.3)
            await first.aclose()  # SIGKILL
            await asyncio.sleep(away_s)
            away = await ratio(proxy)
            start = time.perf_counter()
            second, _, _ = await served(port)
            connected = time.perf_counter() - start
            await asyncio.sleep(1.0)
            after = await ratio(proxy)
            await second.aclose()
        return {
            "away_s": away_s,
            "load": load.by,
            "requests": load.requests,
            "failed": load.failed,
            "share_while_away": away,
            "share_after": after,
            "serves_again_s": round(connected, 2),
            "kept": abs(away - 0.4) < 0.03 and abs(after - 0.4) < 0.03,
        }


async def ratio(proxy: Envoy) -> float:
    """The second version's part of what is routed in a moment."""
    before = await routed([proxy])
    await asyncio.sleep(0.5)
    some = await routed([proxy]) - before
    return round(some["v2"] / some.total(), 3)


async def streams(work: Path, quick: bool) -> dict[str, Any]:
    count, events = (4, 20) if quick else (40, 100)
    async with contextlib.AsyncExitStack() as stack:
        one, other, third = [await stack.enter_async_context(engine(f"v{number}")) for number in (1, 2, 3)]
        desk = Desk()
        desk.put(split((one.port, other.port), (5000, 5000)))
        xds, _ = await stack.enter_async_context(serving(desk))
        proxy = await stack.enter_async_context(envoy(work, xds.port))
        await proxy.listening()

        async def stream() -> int:
            caller = Caller(proxy.port)
            try:
                reader = await caller.begin(f"/stream/{events}")
                status, _ = await caller.head()
                return len([piece async for piece in chunks(reader)]) if status == 200 else 0
            except (OSError, asyncio.IncompleteReadError):
                return 0
            finally:
                caller.close()

        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(stream()) for _ in range(count)]
            await until(lambda: one.served + other.served >= count)
            for pause in range(5):  # weights, then an endpoint more, then another one instead, then a version less
                desk.put(split((one.port, other.port), (9000 - 2000 * pause, 1000 + 2000 * pause)))
                await asyncio.sleep(0.05)
            more = split((one.port, other.port), (5000, 5000))
            first, second = more.versions
            both = replace(first, endpoints=(*first.endpoints, Target(f"http://127.0.0.1:{third.port}")))
            desk.put(replace(more, versions=(both, second)))
            await asyncio.sleep(0.1)
            desk.put(replace(more, versions=(replace(first, endpoints=both.endpoints[1:]), second)))
            await asyncio.sleep(0.1)
            desk.put(split((third.port,), (10_000,)))
            await asyncio.sleep(0.1)
        whole = sum(each.result() == events for each in asked)
        return {"streams": count, "events": events, "whole": whole, "pushes": xds.counts.pushes}


async def sessions(work: Path, quick: bool) -> dict[str, Any]:
    count = 300 if quick else 10_000
    async with contextlib.AsyncExitStack() as stack:
        made = [await stack.enter_async_context(engine(f"v{number}")) for number in (1, 2, 3)]
        ports = [each.port for each in made]
        desk = Desk()
        steps = [(6000, 4000, 0), (5400, 3600, 1000), (4200, 2800, 3000), (2400, 1600, 6000), (0, 0, 10_000)]
        desk.put(split(ports, steps[0]))
        xds, _ = await stack.enter_async_context(serving(desk))
        proxy = await stack.enter_async_context(envoy(work, xds.port))
        await proxy.listening()
        callers = [Caller(proxy.port) for _ in range(8)]
        rounds: list[list[str]] = []
        for step in steps:
            done = len(xds.counts.ack_s)
            if step != steps[0]:
                desk.put(split(ports, step))
                await until(lambda done=done: len(xds.counts.ack_s) > done)
            got = [""] * count

            async def some(first: int, caller: Caller, got: list[str] = got) -> None:
                for session in range(first, count, len(callers)):
                    got[session] = (await caller.get("/", x_session_id=f"session-{session}")).body.decode()

            async with asyncio.TaskGroup() as tasks:
                for number, caller in enumerate(callers):
                    tasks.create_task(some(number, caller))
            rounds.append(got)
        for caller in callers:
            caller.close()
        moves = [pair for before, after in pairwise(rounds) for pair in zip(before, after, strict=True)]
        back = sum(before == "v3" != after for before, after in moves)
        astray = sum(before != after and after != "v3" and before != "v3" for before, after in moves)
        return {
            "sessions": count,
            "steps": len(steps),
            "moved": sum(before != after for before, after in moves),
            "back": back,
            "astray_ratio": round(astray / len(moves), 5),
            "shares": [round(got.count("v3") / count, 3) for got in rounds],
        }


async def growth(work: Path, quick: bool) -> dict[str, Any]:
    """Ten versions of a hundred endpoints each; times in ms."""
    rows = []
    for services in (1, 10) if quick else (1, 10, 100, 1000):
        tables = [big(number) for number in range(services)]
        files = [effective(Service(name=each.service), each) for each in tables]
        start = time.process_time()
        parts = [build(policy, over, 1, lambda _: "") for policy, over in zip(files, tables, strict=True)]
        made = time.process_time()
        snapshot = compose(parts, None)
        composed = time.process_time()
        heavier = replace(tables[0], versions=(replace(tables[0].versions[0], weight=2000), *tables[0].versions[1:]))
        policy = effective(Service(name=heavier.service), heavier)
        again = time.process_time()
        parts[0] = build(policy, heavier, 2, lambda _: "", parts[0])
        rebuilt = time.process_time()
        after = compose(parts, None, snapshot)
        done = time.process_time()
        assert after.shelves[1] is snapshot.shelves[1]
        rows.append(
            {
                "services": services,
                "first_ms": round(1000 * (composed - start), 1),
                "of_it_one_service_ms": round(1000 * (made - start) / services, 2),
                "weight_part_ms": round(1000 * (rebuilt - again), 2),
                "weight_compose_ms": round(1000 * (done - rebuilt), 2),
                "routes_bytes": sum(len(each.body) for each in after.shelves[3].resources.values()),
                "endpoints_bytes": sum(len(each.body) for each in after.shelves[1].resources.values()),
            }
        )
        await asyncio.sleep(0)
    return {"rows": rows}


def big(number: int) -> Table:
    versions = tuple(
        Version(
            f"v{version}",
            1000,
            endpoints=tuple(
                Target(f"http://10.{number % 250}.{version * 10 + number // 250}.{host}:8000", zone=f"z{host % 3}")
                for host in range(100)
            ),
        )
        for version in range(10)
    )
    return Table(f"service-{number}", versions)


MEASURES = {
    "weights": weights,
    "refusal": refusal,
    "restart": restart,
    "streams": streams,
    "sessions": sessions,
    "growth": growth,
}

if __name__ == "__main__":
    sys.exit(main())
