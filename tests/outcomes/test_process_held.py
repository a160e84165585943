"""A sidecar that its machine did not run for a while: the silence was its own, and no engine and no client pays for it.

A cgroup out of its CPU time, a machine that is moved while it runs: here the process is stopped for longer than every
deadline of its streams and then goes on. uvloop comes to its timers before it reads.
"""

import asyncio
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from sidecar.demo.dialect import Chat, Spec, whole_stream
from tests.harness import Client, connect, request
from tests.processes import Process, engine, sidecar

STREAMS = 8
TOKENS = 30
GAP_S = 0.1
DEADLINE_S = 2.0
STOPPED_S = 3.5

POLICY = """\
apiVersion: sidecar/v1
kind: Policy
services:
  - name: demo
    endpoints: [{{url: "http://127.0.0.1:{port}"}}]
    deadlines: {{first_token: 2s, head: 2s, token_gap: 2s}}
    breakers: {{node: {{consecutive: 1, min_closed_ratio: 0}}}}
"""


async def stop(*processes: Process) -> None:
    """None of them runs for `STOPPED_S`; then they go on in this order, a little apart."""
    for each in processes:
        each.send(signal.SIGSTOP)
    await asyncio.sleep(STOPPED_S)
    for each in processes:
        each.send(signal.SIGCONT)
        await asyncio.sleep(0.05)


async def stream(client: Client, number: int) -> bytes:
    body = b'{"model":"demo","stream":true,"max_tokens":%d,"messages":[]}' % TOKENS
    headers = [b"Content-Type: application/json", b"x-request-id: stream-%d" % number]
    await client.send(request(b"/v1/chat/completions", method=b"POST", headers=headers, body=body))
    async with asyncio.timeout(60.0):
        answer = await client.response()
    assert answer.status == 200
    return answer.body


@pytest.mark.parametrize("engine_too", [False, True], ids=["alone", "with its engine"])
async def test_no_stream_breaks_off_and_no_breaker_opens(tmp_path: Path, engine_too: bool) -> None:
    async with AsyncExitStack() as stack:
        behind, port = await stack.enter_async_context(engine(token_gap_s=GAP_S))
        policy = tmp_path / "policy.yaml"
        policy.write_text(POLICY.format(port=port))
        proxy = await stack.enter_async_context(sidecar("--policy", str(policy)))
        clients = [await stack.enter_async_context(connect(proxy.port)) for _ in range(STREAMS)]
        group = await stack.enter_async_context(asyncio.TaskGroup())
        bodies = [group.create_task(stream(client, number)) for number, client in enumerate(clients)]
        for client in clients:
            await client.seen(b"t2 ")
        await stop(proxy.process, *([behind] if engine_too else []))
        for number, body in enumerate(bodies):
            assert await body == whole_stream(
                Chat(Spec("demo", f"stream-{number}", TOKENS, 0, finish_reason="length")), TOKENS
            )
        assert "breaker" not in proxy.process.events()
