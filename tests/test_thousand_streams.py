"""A thousand streams at once through one `sidecar run`: every byte as the engine sent it, little memory, nothing left.

The engine is simulated and deterministic, so that what each stream must be is known to the byte. All streams are alive
together: each waits `GAP_S` between its tokens, which is longer than it takes to begin them all.
"""

import asyncio
import re
from pathlib import Path

import pytest

from sidecar.demo.dialect import Chat, Spec, whole_stream
from tests.harness import Client, connect, request
from tests.processes import Sidecar, engine, sidecar

STREAMS = 1000
TOKENS = 4
GAP_S = 1.5
IDLE_STREAM_BYTES = 16 * 1024
"""What an idle stream may cost: both of its connections, their parsers, the request and what observes it."""

LEFT_BYTES = 4 << 20
"""What a second round may add to what a first one left, 4 KiB for each of its streams.

Resident memory does not fall to where it began: allocators keep what was freed for the next use, and a page with one
live object stays. What must hold is that the next thousand streams find their room there: a leak would not fit in.
"""

# A busy machine may take seconds to begin a thousand connections; and a lone endpoint that may open warns of nothing.
POLICY = """\
apiVersion: sidecar/v1
kind: Policy
services:
  - name: demo
    endpoints: [{{url: "http://127.0.0.1:{port}"}}]
    deadlines: {{connect: 30s, first_token: 60s, head: 60s, token_gap: 30s}}
    breakers: {{node: {{min_closed_ratio: 0}}}}
"""

HELD = ("sidecar_requests_in_flight", "sidecar_endpoint_in_flight", "sidecar_downstream_connections")
IDLE = ("sidecar_upstream_connections",)
"""Connections to engines may wait for their next use, a few seconds."""


async def gauges(proxy: Sidecar) -> dict[str, float]:
    """The gauges that count what is held."""
    async with connect(proxy.admin) as client:
        page = (await client.ask(request(b"/metrics", headers=[b"Connection: close"]))).body.decode()
    return {name: float(value) for name, value in re.findall(r"^(\w+)(?:\{[^}]*\})? ([0-9.e+]+)$", page, re.M)}


def asked(number: int) -> bytes:
    body = b'{"model":"demo","stream":true,"max_tokens":%d,"messages":[]}' % TOKENS
    headers = [b"Content-Type: application/json", b"x-request-id: stream-%d" % number]
    return request(b"/v1/chat/completions", method=b"POST", headers=headers, body=body)


def whole(number: int) -> bytes:
    """What the engine sends for that request."""
    return whole_stream(Chat(Spec("demo", f"stream-{number}", TOKENS, 0, finish_reason="length")), TOKENS)


async def stream(proxy: Sidecar, number: int, begun: asyncio.Barrier, go_on: asyncio.Event) -> None:
    """One client: reads its first token, waits until all have theirs, reads the rest and checks it."""
    async with connect(proxy.port) as client:
        await client.send(asked(number))
        await client.seen(b"t0 ")
        await begun.wait()
        await go_on.wait()
        await checked(client, number)


async def checked(client: Client, number: int) -> None:
    async with asyncio.timeout(30.0):
        while not client.received.endswith(b"\r\n0\r\n\r\n"):
            assert not client.ended, client.unread[-400:]
            await client.changed()
    answer = await client.response()
    assert answer.status == 200
    assert answer.body == whole(number)
    assert not client.unread


async def a_round(proxy: Sidecar, count: int) -> int:
    """So many streams at once, each checked; resident bytes while all were idle."""
    begun, go_on = asyncio.Barrier(count + 1), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for number in range(count):
            tasks.create_task(stream(proxy, number, begun, go_on))
        async with asyncio.timeout(30.0):
            await begun.wait()
        resident = proxy.process.rss_bytes
        assert (await gauges(proxy))["sidecar_requests_in_flight"] == count
        go_on.set()
    return resident


@pytest.mark.timeout(120)
async def test_a_thousand_streams_are_whole_small_and_leave_nothing(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    async with engine(token_gap_s=GAP_S, keep=0) as (_, port):
        policy.write_text(POLICY.format(port=port))
        async with sidecar("--policy", str(policy), "--access-log", "errors") as proxy:
            await whole_small_and_gone(proxy)


async def whole_small_and_gone(proxy: Sidecar) -> None:
    await a_round(proxy, 5)  # what is made once is no stream's
    before = proxy.process.rss_bytes
    idle = await a_round(proxy, STREAMS)
    assert (idle - before) / STREAMS <= IDLE_STREAM_BYTES
    await let_go(proxy, *HELD)
    left = proxy.process.rss_bytes
    await a_round(proxy, STREAMS)
    await let_go(proxy, *HELD)
    assert proxy.process.rss_bytes - left <= LEFT_BYTES
    await let_go(proxy, *HELD, *IDLE)
    assert proxy.process.events() == ["policy_applied", "started"]  # no warning, no error


async def let_go(proxy: Sidecar, *names: str) -> None:
    """Waits until the sidecar counts nothing as held; its metrics are fetched anew each time."""
    async with asyncio.timeout(10.0):
        while True:
            now = await gauges(proxy)
            if not any(now[name] for name in names):
                return
            await asyncio.sleep(0.05)
