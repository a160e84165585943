"""A soak from beginning to end: the stage is set, traffic and troubles run, all is healed, and what is left is counted.

Everything runs in one TaskGroup beside the clock. At the end nothing is asked at once of a process that was busy a
moment ago: each check waits, within a limit, for what must come, and tells what did not.
"""

import asyncio
import sys
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from soak import policies
from soak.audit import Baseline, Figures, audit
from soak.client import LIMIT_S, Crew
from soak.ledger import Ledger, Line
from soak.measure import Pace, Sampled, memory
from soak.plan import ENGINES, Traffic, Trouble, What, reloads, troubles
from soak.report import Report, mean_cpu, rules_of
from soak.requests import FAST, PACED
from soak.stage import EngineProcess, Sample, SidecarProcess, sidecar

HALF_OPEN = 2
"""In `sidecar_breaker_state`."""

SAMPLE_S = 2.0
PROGRESS_S = 10.0
READ_S = 0.05
MAX_LIVE = 800
"""Turns at once; beyond, the next ones wait: a machine that cannot keep up must not drown."""

HEAL_S = 20.0
"""How long breakers may take to close once every engine is well: a few of their longest waits. A probe's place that
was lost comes back only with its lease, which is longer (`policies.TOTAL_S`)."""

HALF_OPEN_S = 40.0
"""How long a breaker may be half-open under traffic: longer than any policy that sends nothing to the canary stays."""

EVENTS_ALLOWED = frozenset(
    {"started", "policy_applied", "policy_refused", "breaker", "malformed_upstream", "request", "draining",
     "nothing_to_reload"}
)  # fmt: skip
"""What a sidecar may log in a soak. Crashes, warnings of the library and the like are none of it."""


class Options(msgspec.Struct, frozen=True):
    """What was asked for. `cpu_ratio`: what the sidecar shall take of one core."""

    minutes: float = 10.0
    seed: int = 1
    cpu_ratio: float = 0.5
    program: str = "soak.observed"


class Soak:
    """One soak; `run` it once. `stop` ends its traffic early, and it goes on with the checks."""

    def __init__(self, options: Options, say: Callable[[str], None]) -> None:
        self._options = options
        self._say = say
        self._stopping = asyncio.Event()
        self._policy: Path
        self._proxy: SidecarProcess
        self._crew: Crew
        self.interrupted = False
        self.duration_s = options.minutes * 60.0
        self.ledger = Ledger()
        self.traffic = Traffic(options.seed)
        self.pace = Pace(options.cpu_ratio)
        self.troubles = troubles(options.seed, self.duration_s)
        self.reloads = reloads(options.seed, self.duration_s, policies.NAMES)
        self.engines = [EngineProcess(FAST if at == ENGINES - 1 else PACED) for at in range(ENGINES)]
        self.sampled: list[Sampled] = []
        self.happened: list[str] = []
        self._half_open_at: dict[str, float] = {}

    def stop(self) -> None:
        """End the traffic now."""
        self.interrupted = True
        self._stopping.set()

    async def run(self) -> Report:
        """The whole of it."""
        async with AsyncExitStack() as stack:
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
            for engine in self.engines:
                stack.push_async_callback(engine.kill)
                await engine.start()
            self._policy = home / "policy.yaml"
            self._write_policy(policies.NAMES[0])
            self._proxy = await stack.enter_async_context(sidecar(self._policy, self._options.program))
            self._crew = Crew(self._proxy.port, self.ledger)
            await self._proxy.metrics()  # makes what the first scrape makes
            baseline = Baseline(
                len(self._proxy.descriptors()), self._proxy.threads, await self._proxy.tell(), self._proxy.rss_bytes
            )
            return await self._run(baseline)

    async def _run(self, baseline: Baseline) -> Report:
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(each) for each in (self._read_log(), self._watch(began))]
            troubling = [tasks.create_task(self._trouble(each, began)) for each in self.troubles]
            troubling.append(tasks.create_task(self._reload(began)))
            ended_at = began + self.duration_s
            await self._ask(tasks, ended_at)
            lasted_s = loop.time() - began
            self._say(f"traffic ended after {lasted_s:.0f} s; healing, then counting what is left")
            for task in troubling:
                task.cancel()
            await asyncio.wait(troubling)
            await self._heal()
            await self._until(lambda: not self._crew.live, LIMIT_S + 10.0)
            if self._crew.live:
                self.ledger.breach("every request ends", f"{self._crew.live} clients still wait")
            self._crew.close()
            for task in beside:
                task.cancel()
        figures = await audit(self._proxy, self.ledger, baseline, self._take_lines)
        return self._report(lasted_s, baseline, figures)

    def _report(self, lasted_s: float, baseline: Baseline, figures: Figures | None) -> Report:
        ledger = self.ledger
        judged = memory([sample for sample in self.sampled if sample.at_s <= lasted_s])
        if not judged.flat:
            what = f"{judged.slope_bytes / 1024:.0f} KiB a minute, {judged.rise_bytes / 1024:.0f} KiB in all"
            ledger.breach("memory is flat", what, f"least of each minute: {judged.minutes}")
        return Report(
            ok=not ledger.broken,
            interrupted=self.interrupted,
            seed=self._options.seed,
            minutes=round(lasted_s / 60.0, 2),
            cpu_ratio=round(mean_cpu(self.sampled), 3),
            requests=ledger.requests,
            connections=self._crew.connections,
            aborted=ledger.aborted,
            stale=self._crew.stale,
            got={got.value: count for got, count in ledger.got.items()},
            reasons=dict(ledger.words),
            troubles=self.happened,
            log_lines=ledger.totals.lines,
            baseline=baseline,
            figures=figures,
            memory=judged,
            sampled=self.sampled,
            rules=rules_of(ledger),
            breaches=ledger.breaches,
        )

    async def _ask(self, tasks: asyncio.TaskGroup, ended_at: float) -> None:
        """Takes turns at the pace until it is time, or somebody stops it."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while loop.time() < ended_at and not self._stopping.is_set() and self._proxy.alive:
            due = max(due + 1.0 / self.pace.rate, loop.time() - 0.1)
            await asyncio.sleep(max(0.0, due - loop.time()))
            if self._crew.live < MAX_LIVE:
                tasks.create_task(self._crew.take(self.traffic.turn()))
        if not self._proxy.alive:
            self.ledger.breach("the sidecar runs", "its process ended under traffic")

    async def _heal(self) -> None:
        """Everything well again, and a little traffic until each breaker of an endpoint has found out."""
        for engine in self.engines:
            engine.thaw()
            await engine.kill()
            await engine.start()
        self._write_policy(policies.NAMES[0])
        self._proxy.hang_up()
        loop = asyncio.get_running_loop()
        due = loop.time() + HEAL_S
        open_ones: list[str] = []
        await asyncio.sleep(2.0)  # a change of the policy counts once it was read twice
        while loop.time() < due:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(8):
                    tasks.create_task(self._crew.take(self.traffic.calm()))
            lines = msgspec.json.decode(await self._proxy.page(b"/breakers"), type=list[dict[str, object]])
            open_ones = [
                f"{line['scope']} {line['key']} {line['state']}"
                for line in lines
                if line["state"] != "closed" and line["scope"] != "session"
            ]
            if not open_ones:
                return
            await asyncio.sleep(0.2)
        self.ledger.breach("breakers close once all is well", f"not closed after {HEAL_S:g} s: {open_ones}")

    async def _trouble(self, trouble: Trouble, began: float) -> None:
        loop = asyncio.get_running_loop()
        engine = self.engines[trouble.engine]
        await asyncio.sleep(max(0.0, began + trouble.at_s - loop.time()))
        async with engine.busy:
            self.happened.append(str(trouble))
            match trouble.what:
                case What.FREEZE:
                    engine.freeze()
                    await asyncio.sleep(trouble.for_s)
                    engine.thaw()
                case What.KILL:
                    await engine.kill()
                    await asyncio.sleep(trouble.for_s)
                    await engine.start()
                case What.SCRIPT:
                    await engine.script(trouble.fault)
                    await asyncio.sleep(trouble.for_s)
                    await engine.script(None)

    async def _reload(self, began: float) -> None:
        loop = asyncio.get_running_loop()
        for reload in self.reloads:
            await asyncio.sleep(max(0.0, began + reload.at_s - loop.time()))
            self.happened.append(str(reload))
            self._write_policy(reload.variant)
            if reload.hangup:
                self._proxy.hang_up()

    def _write_policy(self, name: str) -> None:
        part = self._policy.with_suffix(".part")
        part.write_text(policies.text(name, [engine.port for engine in self.engines]))
        part.replace(self._policy)

    async def _watch(self, began: float) -> None:
        """Samples the sidecar, sets the pace, says how it goes."""
        loop = asyncio.get_running_loop()
        cpu_s, at, told_at = self._proxy.cpu_s, loop.time(), began
        while self._proxy.alive:
            await asyncio.sleep(SAMPLE_S)
            now, cpu_now = loop.time(), self._proxy.cpu_s
            ratio = (cpu_now - cpu_s) / (now - at)
            cpu_s, at = cpu_now, now
            self.pace.saw(ratio, full=self._crew.live >= 0.9 * MAX_LIVE)
            sample = await self._sample(now - began, ratio)
            self.sampled.append(sample)
            for service, count in sample.sessions.items():
                if count > policies.SESSION_BOUNDS[service]:
                    self.ledger.breach("sessions keep their bound", f"{service} remembers {count}")
            if now - told_at >= PROGRESS_S:
                told_at = now
                self._say(
                    f"{sample.at_s:5.0f} s  {self.ledger.requests} requests, {sample.live} live, "
                    f"{ratio:.2f} of a core, {sample.rss_bytes / 1e6:.1f} MB, {sample.descriptors} descriptors, "
                    f"{sum(sample.sessions.values())} sessions, {self.ledger.broken.total()} breaches"
                )

    def _look_at_breakers(self, metrics: dict[Sample, float], at_s: float) -> None:
        """A probe whose place was lost keeps its breaker half-open, until its lease ends."""
        half_open = {
            dict(labels)["endpoint"]
            for (name, labels), value in metrics.items()
            if name == "sidecar_breaker_state" and value == HALF_OPEN
        }
        since = self._half_open_at
        self._half_open_at = {endpoint: since.get(endpoint, at_s) for endpoint in half_open}
        for endpoint, began_s in self._half_open_at.items():
            if at_s - began_s > HALF_OPEN_S:
                self.ledger.breach("no breaker stays half-open", f"{endpoint} for {at_s - began_s:.0f} s")

    async def _sample(self, at_s: float, cpu_ratio: float) -> Sampled:
        metrics = await self._proxy.metrics()
        self._look_at_breakers(metrics, at_s)
        sums: dict[str, float] = {}
        for (name, _), value in metrics.items():
            sums[name] = sums.get(name, 0.0) + value
        return Sampled(
            at_s=round(at_s, 1),
            rss_bytes=self._proxy.rss_bytes,
            cpu_ratio=round(cpu_ratio, 3),
            descriptors=len(self._proxy.descriptors()),
            live=self._crew.live,
            in_flight=int(sums["sidecar_requests_in_flight"]),
            upstream=int(sums["sidecar_upstream_connections"]),
            requests=self.ledger.requests,
            sessions={
                dict(labels)["service"]: int(value)
                for (name, labels), value in metrics.items()
                if name == "sidecar_sessions"
            },
        )

    async def _read_log(self) -> None:
        while True:
            await asyncio.sleep(READ_S)
            self._take_lines()

    def _take_lines(self) -> None:
        """Enter what the sidecar has logged since the last call."""
        for raw in self._proxy.take_lines():
            try:
                event = _event_of(raw)
                if event == "request":
                    self.ledger.read(_line_of(raw), raw)
                elif event not in EVENTS_ALLOWED:
                    self.ledger.breach("nothing odd is logged", event, raw)
            except msgspec.MsgspecError:
                self.ledger.breach("nothing odd is logged", "a line that is no JSON", raw)

    async def _until(self, ready: Callable[[], bool], limit_s: float) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + limit_s
        while not ready() and loop.time() < due:
            await asyncio.sleep(0.05)


class _Event(msgspec.Struct):
    event: str


_EVENTS = msgspec.json.Decoder(_Event)
_LINES = msgspec.json.Decoder(Line)


def _event_of(raw: str) -> str:
    return _EVENTS.decode(raw).event


def _line_of(raw: str) -> Line:
    return _LINES.decode(raw)


def say(words: str) -> None:
    """Progress goes to stderr."""
    print(words, file=sys.stderr, flush=True)
