"""One arm: six simulated engines and `sidecar run` as processes, clients in this one, and what came of each request.

1. Before the clock starts each session asks once or more often, until every engine is the home of as many: where a
   session lives is the sidecar's choice, and the arms must agree on what a request's own engine is.
2. Times and luck are the plan's. A fault begins when its engine was told; the plan's moment is right to some
   milliseconds.
3. The client tells how a request ended and when its first token came, the sidecar's log where it was sent and how
   often. Breakers move when their line in the log is read, at most `POLL_S` later.
4. A request of more than one attempt failed before: on the engine whose fault would have bitten it, where there is
   one. Copies of probes are in no request's line and touch nobody.
5. Every process is bound to this one's life, and ended by it.
"""

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from bench.breaker_live.plan import (
    MODEL,
    PODS,
    SCRIPT,
    SESSIONS_PER_POD,
    Arm,
    Timeline,
    arrivals,
    engines_fault,
    request_id,
    struck_on,
    world,
)
from sidecar.simulate.fault import Fault
from sidecar.simulate.ledger import Ledger, Measures
from sidecar.simulate.product import BYTES_PER_TOKEN
from sidecar.simulate.workload import Arrival
from sidecar.simulate.world import Flight
from soak.stage import EngineProcess
from tests.processes import Process, process

POLL_S = 0.02
PATIENCE_S = 60.0
"""Of a client: beyond every deadline of the policy, so that whoever gives up is the sidecar."""
LINES_S = 10.0
"""How long the log may be behind at the end."""
SETTLERS = 12
SETTLING_TOKENS = 4
MOST_SETTLING = 20 * PODS * SESSIONS_PER_POD

_FIRST = b'"content":"t0'
_ERROR = b'"error"'
_DONE = b"data: [DONE]"


@dataclass(frozen=True)
class Result:
    """One arm's run. `lags_s`: how late the clients sent, and `ttft_s` what they saw, at the median and the 99th."""

    arm: str
    measures: Measures
    faults: tuple[Fault, ...]
    lag_s: tuple[float, float]
    ttft_s: tuple[float, float]
    unaccounted: int


@dataclass(frozen=True)
class Answer:
    """What a client got. `ttft_s` None: no token came."""

    status: int
    ttft_s: float | None
    whole: bool
    endpoint: str


class Run:
    """The time, the ledger, and the log between them."""

    def __init__(self, timeline: Timeline, seed: int, sidecar: Process, keys: list[str]) -> None:
        self._sidecar = sidecar
        self._seed = seed
        self._pods = {key: index for index, key in enumerate(keys)}
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self.world = world(timeline, seed)
        self.ledger = Ledger(self.world, 1, timeline.warmup_s, timeline.seconds)
        self._answers: dict[str, tuple[Arrival, set[int], Answer]] = {}
        self._lines: dict[str, dict[str, Any]] = {}
        self.open = 0
        self.lags_s: list[float] = []
        self.ttft_s: list[float] = []

    def start(self) -> None:
        """The clock starts now."""
        self._sidecar.lines.clear()
        self._began = self._loop.time()

    def now(self) -> float:
        """Seconds since the start; brings the world to it."""
        now = self._loop.time() - self._began
        self.world.clock.run_until(now)
        return now

    async def until(self, when: float) -> None:
        await asyncio.sleep(max(0.0, self._began + when - self._loop.time()))

    async def send(self, port: int, session: str, arrival: Arrival) -> None:
        """One request from its arrival to its end; its log line may follow."""
        lag_s = self.now() - arrival.at
        self.ledger.arrived(arrival)
        self.open += 1
        struck, name = struck_on(self.world, arrival), request_id(self._seed, arrival)
        answer = await ask(port, name, session, arrival.prompt_tokens, arrival.output_tokens)
        self.lags_s.append(lag_s)
        if answer.ttft_s is not None:
            self.ttft_s.append(answer.ttft_s)
        self._answers[name] = arrival, struck, answer
        self._settle(name)

    async def read(self) -> None:
        """The log, for ever."""
        while True:
            now = self.now()
            lines, self._sidecar.lines = self._sidecar.lines, []
            for text in lines:
                if not text.startswith("{"):
                    continue
                line = json.loads(text)
                if line["event"] == "request":
                    self._lines[line["request_id"]] = line
                    self._settle(line["request_id"])
                elif line["event"] == "breaker":
                    self._moved(line, now)
            await asyncio.sleep(POLL_S)

    async def settled(self) -> None:
        """Returns when every request's line was read, or is given up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINES_S):
                while self.open:
                    await asyncio.sleep(POLL_S)

    def _moved(self, line: dict[str, Any], now: float) -> None:
        if line["scope"] == "node":
            why, evidence = line["why"], line["evidence"]
            self.ledger.moved(self._pods[line["key"]], line["old"], line["new"], now, why, evidence)
        elif line["new"] == "open" and line["old"] == "closed":
            self.ledger.tripped(line["scope"])

    def _settle(self, name: str) -> None:
        """Enters a request of which both ends are known."""
        if name not in self._answers or name not in self._lines:
            return
        (arrival, struck, answer), line = self._answers.pop(name), self._lines.pop(name)
        self.open -= 1
        ledger, attempts = self.ledger, line["attempts"]
        for _ in range(attempts - 1):
            self._touched(arrival, next(iter(struck), arrival.user_pod), struck)
        if attempts:
            self._touched(arrival, self._pods[line["endpoint"]], struck)
        if answer.whole and answer.ttft_s is not None:
            ledger.served(arrival, answer.ttft_s)
            return
        why = line["reason"] or (f"status {answer.status}" if answer.status != 200 else "broken")
        if attempts:
            ledger.failed(arrival, why)
        else:
            ledger.rejected(arrival, why)

    def _touched(self, arrival: Arrival, pod: int, struck: set[int]) -> None:
        # All that the ledger reads of a flight.
        flight = cast(Flight, SimpleNamespace(pod=self.world.pods[pod], hit=pod in struck))
        self.ledger.touched(arrival, flight)


async def run(arm: Arm, timeline: Timeline, rate: float, seed: int) -> Result:
    """Everything from the first process to the last one's end."""
    async with stage(arm) as (engines, sidecar, port, keys):
        homes = await settle(port, keys)
        live = Run(timeline, seed, sidecar, keys)
        async with asyncio.TaskGroup() as reading:
            log = reading.create_task(live.read())
            live.start()
            async with asyncio.TaskGroup() as group:
                for fault in live.world.faults:
                    group.create_task(befall(live, engines, fault))
                for arrival in arrivals(timeline, rate, seed):
                    await live.until(arrival.at)
                    number = int((arrival.session or "0").rpartition("-")[2])
                    session = homes[arrival.user_pod][number // PODS % SESSIONS_PER_POD]
                    group.create_task(live.send(port, session, arrival))
            await live.settled()
            log.cancel()
        return Result(
            arm.name,
            live.ledger.measures(),
            live.world.faults,
            _two(live.lags_s),
            _two(live.ttft_s),
            live.open,
        )


async def befall(live: Run, engines: list[EngineProcess], fault: Fault) -> None:
    """One fault, from its begin to its end."""
    (pod,) = fault.pods
    await live.until(fault.begin)
    await engines[pod].script(engines_fault(fault))
    await live.until(fault.end)
    await engines[pod].script(None)


async def settle(port: int, keys: list[str]) -> list[list[str]]:
    """Sessions by the engine that they live on, as many on each."""
    homes: dict[str, list[str]] = {key: [] for key in keys}
    missing, count = PODS * SESSIONS_PER_POD, 0

    async def settler() -> None:
        nonlocal missing, count
        while missing > 0:
            count += 1
            if count > MOST_SETTLING:
                raise RuntimeError(f"{missing} sessions found no home in {MOST_SETTLING} requests")
            session = f"user-{count}"
            answer = await ask(port, f"settle-{count}", session, 256, SETTLING_TOKENS)
            if not answer.whole:
                continue
            home = homes[answer.endpoint]
            if len(home) < SESSIONS_PER_POD:
                home.append(session)
                missing -= 1

    async with asyncio.TaskGroup() as group:
        for _ in range(SETTLERS):
            group.create_task(settler())
    return [homes[key] for key in keys]


async def ask(port: int, name: str, session: str, prompt_tokens: int, tokens: int) -> Answer:
    """One stream on a connection of its own, read to its end. The prompt is no other's."""
    prompt = name.ljust(BYTES_PER_TOKEN * prompt_tokens, ".")
    body = b'{"model":"%b","stream":true,"max_tokens":%d,"messages":[{"role":"user","content":"%b"}]}' % (
        MODEL.encode(),
        tokens,
        prompt.encode(),
    )
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: live\r\nconnection: close\r\nx-request-id: {name}\r\n"
        f"x-session-id: {session}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    began, ttft_s, got = loop.time(), None, bytearray()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(head.encode() + body)
                while data := await reader.read(1 << 16):
                    got += data
                    if ttft_s is None and _FIRST in got:
                        ttft_s = loop.time() - began
            finally:
                writer.close()
    status = int(got[9:12]) if got[:5] == b"HTTP/" else 0
    whole = status == 200 and _DONE in got and _ERROR not in got and got.count(b'"content":"t') == tokens
    return Answer(status, ttft_s, whole, _header(got, b"x-sidecar-endpoint"))


@contextlib.asynccontextmanager
async def stage(arm: Arm) -> AsyncIterator[tuple[list[EngineProcess], Process, int, list[str]]]:
    """Engines, the sidecar, its port, the engines' keys; all gone when the context ends."""
    async with AsyncExitStack() as stack:
        engines = [EngineProcess(SCRIPT) for _ in range(PODS)]
        for engine in engines:
            stack.push_async_callback(engine.kill)
            await engine.start()
        keys = [f"127.0.0.1:{engine.port}" for engine in engines]
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="breaker-live-")))
        policy = directory / "policy.yaml"
        policy.write_text(arm.policy(keys))
        flags = ["--listen", "127.0.0.1:0", "--admin", "off", "--control", "off"]
        flags += ["--log-format", "json", "--policy", str(policy)]
        sidecar = await stack.enter_async_context(process("soak.apart", "sidecar", "run", *flags))
        started = await sidecar.event("started")
        yield engines, sidecar, int(str(started["listen"]).rpartition(":")[2]), keys


def _header(got: bytearray, name: bytes) -> str:
    head = bytes(got[: got.find(b"\r\n\r\n")])
    return next((line[len(name) + 2 :].decode() for line in head.split(b"\r\n") if line.startswith(name + b": ")), "")


def _two(values: list[float]) -> tuple[float, float]:
    """Median and P99; 0 of nothing."""
    found = sorted(values) or [0.0]
    return round(found[len(found) // 2], 6), round(found[int(len(found) * 0.99)], 6)
