"""A canary that answers well is led to the whole, one that breaks streams is taken back, and nobody does it by hand.

Real sidecars, real sockets, real streams; steps of seconds.
"""

import asyncio
import contextlib
import json
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from sidecar.core.desk import TableView
from sidecar.core.revise import Accepted, Update
from sidecar.core.table import PARTS, Plan, Rollout, Step
from tests import processes
from tests.harness import Gone, Upstream, connect, one_by_one, request, says
from tests.outcomes.pods import SERVICE, Pod, pod
from tests.servers import valkey
from tests.under_test import chat, endpoint, service, whole_stream

LIMIT_S = 15.0
"""How long a test waits for what takes two seconds: spent only where it fails."""
VERSION = b"x-sidecar-version"


class Seen:
    """What clients got: answers and broken streams, by version."""

    def __init__(self) -> None:
        self.answers: Counter[str] = Counter()
        self.broken: Counter[str] = Counter()
        self.last = ""


@contextlib.asynccontextmanager
async def asking(ports: list[int], seen: Seen, workers: int = 6) -> AsyncIterator[None]:
    """So many clients at each port ask one thing after the other, as long as it is among `ports`."""

    async def asks(port: int) -> None:
        with contextlib.suppress(Gone):
            async with connect(port) as client:
                while True:
                    answer = await client.ask(chat(), b"POST")
                    assert answer.status == 200
                    version = answer.header(VERSION).decode()
                    seen.answers[version] += 1
                    seen.broken[version] += b"[DONE]" not in answer.body or b'"error"' in answer.body
                    seen.last = version
                    if b"close" in answer.values(b"connection"):
                        return
                    await asyncio.sleep(0.005)

    async def anew(port: int) -> None:
        while port in ports:
            await asks(port)

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(anew(port)) for port in ports for _ in range(workers)]
        try:
            yield
        finally:
            for each in running:
                each.cancel()


async def until(ready: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not ready():
            await asyncio.sleep(0.02)


def standing(only: Pod) -> TableView:
    view = only.running.routes.standing("default")
    assert view is not None
    return view


def rollout_of(only: Pod) -> Rollout:
    rollout = standing(only).table.rollout
    assert rollout is not None
    return rollout


async def test_good_canary_is_led_to_the_whole_by_itself(tmp_path: Path) -> None:
    good = says(whole_stream(8))
    async with Upstream(one_by_one(good)) as old, Upstream(one_by_one(good)) as new:
        plan = service(endpoint(old, version="v1"), endpoint(new, version="v2"), split={"v1": 1.0, "v2": 0.0})
        async with pod("pod-1", "local", plan, tmp_path, control=None) as only:
            seen = Seen()
            async with asking([only.port], seen):
                await until(lambda: seen.answers["v1"] > 20)
                assert not seen.answers["v2"] and only.running.fleet.services[SERVICE].trial is None
                steps = (Step(2000, 0.8, 30), Step(5000, 0.8, 30), Step(PARTS, 0.0, 1))
                done = await only.running.routes.submit(
                    Update(service="default", version="v2", plan=Plan("v1", steps), by="tool")
                )
                assert isinstance(done, Accepted) and done.table.weights == {"v1": 8000, "v2": 2000}
                await until(lambda: rollout_of(only).phase != "running")
                rollout = rollout_of(only)
                assert rollout.phase == "promoted" and standing(only).table.weights == {"v1": 0, "v2": PARTS}
                assert rollout.evidence and rollout.by == "pod-1"
                old_answers = seen.answers["v1"]
                await until(lambda: seen.answers["v1"] + seen.answers["v2"] > old_answers + 300)
                assert seen.answers["v1"] <= old_answers + 6, "what was under way, and no more"
            assert not seen.broken["v1"] and not seen.broken["v2"]
            said = await only.said("rollout_promoted")
            assert said[0]["service"] == "default" and said[0]["version"] == "v2" and said[0]["evidence"]
            assert len(only.events("rollout_begun")) == len(only.events("rollout_step")) == 1
            assert only.running.fleet.services[SERVICE].trial is None


POLICY = """apiVersion: sidecar/v1
kind: Policy
services:
  - name: chat
    endpoints:
      - {url: "http://127.0.0.1:%d", version: v1}
      - {url: "http://127.0.0.1:%d", version: v2}
    split: {v1: 100, v2: 0}
    breakers: {node: {mode: off}, session: {mode: off}, request: {mode: off}}
    retry: {attempts: 1}
"""


async def page(port: int, path: bytes, body: bytes | None = None) -> object:
    method = b"GET" if body is None else b"POST"
    async with connect(port) as client:
        answer = await client.ask(request(path, method=method, body=body, headers=[b"Connection: close"]), method)
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


async def verdict_of(port: int) -> Any:
    """What a sidecar would conclude now of the rollout of `chat`."""
    line = await page(port, b"/canary/chat")
    assert isinstance(line, dict)
    return line["verdict"] or {"word": "", "canary": 0}


async def test_bad_canary_is_taken_back_by_who_came_later_from_what_a_dead_one_told(tmp_path: Path) -> None:
    """It is held until all was seen: one sidecar alone at first, then two, of which the first is killed."""
    fault = {"kind": "in_band_error", "after": 4, "share": 0.5}
    async with (
        valkey(tmp_path / "server") as server,
        processes.engine(tokens=8) as (_, old),
        processes.engine(tokens=8, fault=fault) as (_, new),
    ):
        policy = tmp_path / "policy.yaml"
        policy.write_text(POLICY % (old, new))
        words = ("--policy", str(policy), "--redis", server.url, "--control", "off", "--access-log", "off")
        async with contextlib.AsyncExitStack() as stack:
            first = await stack.enter_async_context(processes.sidecar(*words))
            seen, ports = Seen(), [first.port]
            update = {
                "version": "v2",
                "plan": {
                    "baseline": "v1",
                    "steps": [{"weight": 0.4, "min": "3s", "min_samples": 50}, {"weight": 1.0, "min": "1s"}],
                },
            }
            await page(first.admin, b"/routes/chat", json.dumps(update).encode())
            await page(first.admin, b"/canary/chat/hold", b"")
            async with asking(ports, seen):
                await until(lambda: seen.answers["v2"] >= 50)
                second = await stack.enter_async_context(processes.sidecar(*words))
                async with asking([second.port], seen):
                    alone = seen.answers["v2"]
                    await until(lambda: seen.answers["v2"] >= alone + 50)
                    # A tally a second is a block of evidence, and five convict: of fewer any number of answers is none.
                    async with asyncio.timeout(LIMIT_S):
                        while (await verdict_of(second.admin))["word"] != "fail":
                            await asyncio.sleep(0.1)
                    assert (await verdict_of(second.admin))["canary"] >= alone, "what the first told is missing"
                    ports.remove(first.port)
                    first.process.send(signal.SIGKILL)
            asked = sum(seen.answers.values())
            await page(second.admin, b"/canary/chat/resume", b"")
            failed = await second.process.event("rollout_failed")
            assert failed["version"] == "v2" and failed["service"] == "chat" and failed["evidence"]
            assert sum(seen.answers.values()) == asked, "nobody asked for anything in the meantime"
            after = Seen()
            async with asking([second.port], after):
                await until(lambda: after.answers["v1"] >= 40)
            assert not after.answers["v2"], "a canary that was taken back still gets sessions"
            assert seen.broken["v2"] and not seen.broken["v1"]
