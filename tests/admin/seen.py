"""A sidecar that serves, with its pages and its log at hand, in front of an engine that answers when it is told to."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from sidecar.policy.schema import Admission, Identity, QosPolicy, Quota, Source
from sidecar.settings import Listen
from tests.harness import Message, Peer, Script, Upstream, eventually
from tests.under_test import Sidecar, chat, refusal, service, sidecar, whole_stream

VOICE = QosPolicy(name="voice", latency_sla_ms=100, priority=9)
BATCH = QosPolicy(name="batch", latency_sla_ms=60_000, priority=1, preemptible=True)
WHO = Identity(tenant=(Source(header="x-tenant-id"),), qos_class=(Source(header="x-class"),))
ONE_AT_A_TIME = Admission(limit="fixed", concurrency=1, queue=1)


class Engine:
    """Holds every request until `release`."""

    def __init__(self) -> None:
        self.free = asyncio.Event()
        self.asked = 0

    async def play(self, peer: Peer) -> None:
        while True:
            await peer.request()
            self.asked += 1
            await self.free.wait()
            await peer.send(whole_stream())


class Seen:
    """A sidecar, its admin pages and its log."""

    def __init__(self, proxy: Sidecar, engine: Engine, client: aiohttp.ClientSession, log: int) -> None:
        self.proxy = proxy
        self.engine = engine
        self._client = client
        self._log = log
        self._told = b""

    async def page(self, path: str) -> Any:
        async with self._client.get(f"http://127.0.0.1:{self.proxy.running.admin_port}{path}") as response:
            return json.loads(await response.read())

    async def metrics(self) -> str:
        async with self._client.get(f"http://127.0.0.1:{self.proxy.running.admin_port}/metrics") as response:
            return (await response.read()).decode()

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples that have these labels."""
        return sum(
            sample.value
            for family in text_string_to_metric_families(await self.metrics())
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    async def lines(self, count: int) -> list[dict[str, Any]]:
        """All request lines so far, once there are so many."""

        def told() -> list[dict[str, Any]]:
            decoded = [json.loads(line) for line in self._told.splitlines(keepends=True) if line.endswith(b"\n")]
            return [line for line in decoded if line["event"] == "request"]

        async with asyncio.timeout(5):
            while len(told()) < count:
                self._told += await asyncio.to_thread(os.read, self._log, 1 << 16)
        return told()

    def ask(self, qos: str = "", tenant: str = "", token: bytes = b"") -> "asyncio.Task[Message]":
        headers = [b"x-class: " + qos.encode()] if qos else []
        if token:
            headers.append(b"authorization: Bearer " + token)
        if tenant:
            headers.append(b"x-tenant-id: " + tenant.encode())
        return asyncio.get_running_loop().create_task(self.proxy.once(chat(headers=headers)))

    async def queued(self, count: int) -> None:
        (state,) = self.proxy.running.fleet.services.values()
        await eventually(lambda: state.gate is not None and state.gate.queued == count, f"{count} to wait")

    async def running(self, count: int) -> None:
        await eventually(lambda: self.engine.asked == count, f"{count} requests at the engine")


@contextlib.asynccontextmanager
async def seen(
    admission: Admission = ONE_AT_A_TIME,
    quotas: Sequence[Quota] = (),
    policies: Sequence[QosPolicy] = (VOICE, BATCH),
    identity: Identity = WHO,
    script: Script | None = None,
    **changes: Any,
) -> AsyncIterator[Seen]:
    """In front of an `Engine`, or of whom plays `script`; the service is changed as given."""
    engine = Engine()
    log, log_in = os.pipe()
    try:
        async with (
            Upstream(script or engine.play) as upstream,
            aiohttp.ClientSession() as client,
            sidecar(
                service(upstream, admission=admission, **changes),
                identity=identity,
                qos_policies=policies,
                quotas=quotas,
                admin=Listen("127.0.0.1", 0),
                access_log="all",
                log_format="json",
                log_fd=log_in,
            ) as proxy,
        ):
            yield Seen(proxy, engine, client, log)
    finally:
        os.close(log)
        os.close(log_in)


def reason(answer: Message) -> tuple[int, str, str]:
    """Status, reason and Retry-After; checks the shape that every refusal has."""
    status, word, code = refusal(answer)
    assert word == code
    return status, word, answer.header(b"retry-after").decode()
