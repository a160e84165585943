"""T16: a client that leaves while the engine is silent frees the engine at once and charges nobody."""

import asyncio
import os
from pathlib import Path

import pytest

from sidecar.core.breaker import State
from sidecar.policy.schema import Deadlines, Seconds, Snapshot
from sidecar.settings import Listen, Settings
from tests.harness import Gone, Peer, Script, Upstream, chunked, connect, eventually, one_by_one, says
from tests.under_test import (
    HOUR,
    NO_RETRY,
    ROLE,
    behind,
    chat,
    error_body,
    held,
    json_answer,
    node_breaker,
    service,
    session_breaker,
    stream_head,
    token,
    whole_stream,
)

BROKEN = says(json_answer(error_body(), b"500 Oh", [b"connection: close"]))
OPEN = Seconds(0.15)


def silent_after(data: bytes) -> Script:
    async def behave(peer: Peer) -> None:
        await peer.send(data)
        await peer.gone()
        raise Gone

    return behave


SILENCES = [
    pytest.param(b"", True, id="stream-no-head"),
    pytest.param(b"", False, id="plain-no-head"),
    pytest.param(stream_head(), True, id="stream-head"),
    pytest.param(stream_head() + chunked(ROLE, end=False), True, id="stream-role"),
    pytest.param(stream_head() + chunked(ROLE, token(1), end=False), True, id="stream-token"),
    pytest.param(json_answer(b"{" + b" " * 99)[:-90], False, id="plain-half-a-body"),
]


@pytest.mark.parametrize(("data", "stream"), SILENCES)
@pytest.mark.parametrize("scope", ["node", "session"])
async def test_leaving_frees_the_engine_and_counts_neither_way(data: bytes, stream: bool, scope: str) -> None:
    breakers = node_breaker(2) if scope == "node" else session_breaker(2)
    script = one_by_one(BROKEN, silent_after(data), BROKEN)
    async with behind(script, breakers=breakers, retry=NO_RETRY) as (upstream, proxy):
        key = upstream.key if scope == "node" else "s1"
        plan = chat(stream=stream, session="s1")
        assert (await proxy.once(chat(session="s1"))).status == 500
        async with proxy.client() as client:
            await client.send(plan)
            await eventually(lambda: len(upstream.requests) >= 2, "the request upstream")
            await client.settled(40)
            assert held(proxy.running)
            client.reset()
            await upstream.connections[-1].gone()
        await eventually(lambda: not held(proxy.running), "everything to be given back")
        assert proxy.state(scope, key) is State.CLOSED, "it counted as a failure"
        await proxy.once(chat(session="s1"))
        assert proxy.state(scope, key) is State.OPEN, "it counted as a success"


async def test_probe_place_is_given_back() -> None:
    script = one_by_one(BROKEN, silent_after(stream_head()), says(whole_stream()))
    plan = node_breaker(1, open_s=OPEN, successes=1)
    async with behind(script, breakers=plan, retry=NO_RETRY) as (upstream, proxy):
        assert (await proxy.once(chat())).status == 500
        assert proxy.state("node", upstream.key) is State.OPEN
        await asyncio.sleep(OPEN + 0.02)
        async with proxy.client() as client:
            await client.send(chat())
            await eventually(lambda: len(upstream.requests) == 2, "the probe")
            client.close()
            await upstream.connections[-1].gone()
        assert proxy.state("node", upstream.key) is State.HALF_OPEN
        assert (await proxy.once(chat())).status == 200
        assert proxy.state("node", upstream.key) is State.CLOSED


@pytest.mark.parametrize("stall", ["first-token", "gap"])
async def test_leaving_after_the_limit_changes_no_charge(stall: str) -> None:
    data = stream_head() if stall == "first-token" else stream_head() + chunked(ROLE, token(1), end=False)
    soon = Seconds(0.12)
    limits = Deadlines(head_s=HOUR, first_token_s=soon, token_gap_s=soon, tool_gap_s=HOUR, total_s=HOUR)
    async with behind(one_by_one(silent_after(data)), breakers=node_breaker(1), deadlines=limits, retry=NO_RETRY) as (
        upstream,
        proxy,
    ):
        async with proxy.client() as client:
            await client.send(chat())
            await eventually(lambda: proxy.state("node", upstream.key) is State.OPEN, "the deadline")
            client.reset()
        assert proxy.state("node", upstream.key) is State.OPEN


@pytest.mark.parametrize("begun", [False, True], ids=["before-head", "after-token"])
async def test_log_says_that_the_client_left(begun: bool, tmp_path: Path) -> None:
    from sidecar.main import serving

    data = stream_head() + chunked(ROLE, token(1), end=False) if begun else b""
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    settings = Settings(listen=Listen("127.0.0.1", 0), admin=None, control=None, log_format="json", access_log="all")
    async with Upstream(one_by_one(silent_after(data))) as upstream:
        snapshot = Snapshot(version=1, services=(service(upstream),), ready_when="always")
        async with serving(settings, snapshot, log_fd=log) as running, connect(running.proxy_port) as client:
            await client.send(chat(headers=[b"x-request-id: mine"]))
            await eventually(lambda: len(upstream.requests) == 1, "the request upstream")
            if begun:
                await client.seen(b"t1")
            client.reset()
            await eventually(lambda: not held(running), "the request's end")
    os.close(log)
    [line] = [line for line in (tmp_path / "log").read_text().splitlines() if '"mine"' in line]
    assert '"DC"' in line and ("499" in line or begun), line
