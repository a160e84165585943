"""An endpoint on trial gets a copy of a request that another one answers; only where it cannot, the request itself.

Leaving `sidecar(...)` checks every time that no copy, no permit and no connection is still out.
"""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from sidecar.core.breaker import Scope, State
from sidecar.policy.schema import Balance, Retry, Seconds, SessionBreaker
from sidecar.proxy.probe import COPIED_BYTES
from tests import processes
from tests.harness import (
    Gone,
    Message,
    Peer,
    Script,
    Upstream,
    chunked,
    connect,
    eventually,
    one_by_one,
    request,
    says,
)
from tests.under_test import (
    JSON,
    PATIENT,
    Sidecar,
    chat,
    endpoint,
    error_body,
    json_answer,
    node_breaker,
    service,
    sidecar,
    stream_head,
    token,
    whole_stream,
)

OPEN = Seconds(0.1)
BROKEN = says(json_answer(error_body(), b"500 Internal Server Error"))
SERVED = whole_stream(2)
PROVED = whole_stream(5)


@contextlib.asynccontextmanager
async def on_trial(
    *trial: Script, well: Script | None = None, successes: int = 1, **changes: object
) -> AsyncIterator[tuple[Sidecar, Upstream, Upstream]]:
    """A sidecar, an endpoint whose wait is over and which behaves as `trial`, and one that is `well`."""
    async with (
        Upstream(one_by_one(BROKEN, *trial)) as sick,
        Upstream(well or one_by_one(says(SERVED))) as other,
    ):
        plan = service(
            # Preferred, so that its failure is the first request's.
            endpoint(sick, local=True),
            other,
            balance=Balance(local_first=True),
            breakers=node_breaker(1, open_s=OPEN, open_max_s=Seconds(3600), successes=successes),
        )
        async with sidecar(msgspec.structs.replace(plan, **changes)) as proxy:
            assert (await proxy.once(chat())).status == 500
            assert proxy.state("node", sick.key) is State.OPEN
            await asyncio.sleep(OPEN + 0.02)
            yield proxy, sick, other


async def becomes(proxy: Sidecar, upstream: Upstream, state: State) -> None:
    await eventually(lambda: proxy.state("node", upstream.key) is state, f"{upstream.key} to be {state.value}")


async def sample(proxy: Sidecar, start: str) -> float:
    """The sum of all samples of `/metrics` that begin so."""
    text, _ = await proxy.running.exposition()
    return sum(float(line.rpartition(" ")[2]) for line in text.decode().splitlines() if line.startswith(start))


async def test_copy_has_the_client_s_bytes_and_the_client_has_the_other_s_answer() -> None:
    async with on_trial(says(PROVED)) as (proxy, sick, well):
        got = await proxy.once(chat(session="s1", headers=[b"authorization: Bearer k", b"x-own: 1"], text="é" * 999))
        assert got.status == 200 and got.header(b"x-sidecar-endpoint") == well.key.encode()
        assert got.header(b"x-sidecar-attempts") == b"1" and got.values(b"x-sidecar-session") == []
        assert b"t1 " in got.body and b"t2 " not in got.body
        await becomes(proxy, sick, State.CLOSED)
        copy, served = sick.requests[-1], well.requests[-1]
        assert copy.raw == served.raw and copy.header(b"authorization") == b"Bearer k"
        assert (len(sick.requests), len(well.requests)) == (2, 1)


@pytest.mark.parametrize("stream", [True, False])
async def test_copy_that_fails_opens_again_and_the_client_sees_nothing_of_it(stream: bool) -> None:
    answer = SERVED if stream else json_answer(b'{"object":"chat.completion","choices":[{"index":0}]}')
    async with on_trial(BROKEN, well=one_by_one(says(answer))) as (proxy, sick, well):
        got = await proxy.once(chat(stream=stream))
        assert (got.status, got.header(b"x-sidecar-endpoint")) == (200, well.key.encode())
        await becomes(proxy, sick, State.OPEN)
        [view] = [view for view in proxy.running.fleet.views(proxy.running.now()) if view.key == sick.key]
        assert (view.why, view.version) == ("probe_failed", 3)


async def test_copy_that_says_nothing_opens_again_and_nobody_waits_for_it() -> None:
    deadlines = msgspec.structs.replace(PATIENT, first_token_s=Seconds(0.2))
    async with on_trial(_mute, deadlines=deadlines) as (proxy, sick, _):
        assert (await proxy.once(chat())).status == 200
        assert proxy.state("node", sick.key) is State.HALF_OPEN, "the client had its answer before the verdict"
        await becomes(proxy, sick, State.OPEN)
        await sick.connections[-1].gone()


async def _mute(peer: Peer) -> None:
    await peer.gone()
    raise Gone


async def test_copy_that_meets_overload_proves_nothing() -> None:
    full = says(json_answer(error_body(b"full", b"429"), b"429 Slow", [b"retry-after-ms: 1"]))
    async with on_trial(full, says(PROVED)) as (proxy, sick, _):
        assert (await proxy.once(chat())).status == 200
        await eventually(lambda: not _nodes(proxy)[sick.key], "the end of the copy")
        assert proxy.state("node", sick.key) is State.HALF_OPEN
        await asyncio.sleep(0.01)
        assert (await proxy.once(chat())).status == 200
        await becomes(proxy, sick, State.CLOSED)


async def test_client_that_leaves_does_not_end_the_copy() -> None:
    gate = asyncio.Event()

    async def gated(peer: Peer) -> None:
        await gate.wait()
        await peer.send(PROVED)

    async with on_trial(gated, well=one_by_one(_mute)) as (proxy, sick, well):
        async with proxy.client() as client:
            await client.send(chat())
            await eventually(lambda: bool(len(sick.requests) == 2 and well.requests), "request and copy")
            client.reset()
            await well.connections[-1].gone()
        await eventually(lambda: not proxy.running.pipeline.live, "the request's end")
        assert _nodes(proxy) == {sick.key: 1, well.key: 0}
        assert not sick.connections[-1].ended
        gate.set()
        await becomes(proxy, sick, State.CLOSED)


async def test_copied_stream_that_runs_on_for_ever_is_stopped_and_counts_as_good() -> None:
    async def endless(peer: Peer) -> None:
        await peer.send(stream_head())
        number = 0
        while not peer.ended:
            await peer.send(chunked(token(number), end=False))
            number += 1
            await asyncio.sleep(0.01)
        raise Gone

    # `total` is shorter than what a copy may take; the unit tests have the longer one.
    deadlines = msgspec.structs.replace(PATIENT, total_s=Seconds(0.3))
    async with on_trial(endless, deadlines=deadlines) as (proxy, sick, _):
        assert (await proxy.once(chat())).status == 200
        await sick.connections[-1].gone()
        await becomes(proxy, sick, State.CLOSED)


async def test_copy_counts_in_no_request_no_session_and_no_retry() -> None:
    breakers = msgspec.structs.replace(
        node_breaker(1, open_s=OPEN, open_max_s=Seconds(3600)), session=SessionBreaker(consecutive=1)
    )
    async with on_trial(BROKEN, breakers=breakers, retry=Retry(attempts=1)) as (proxy, sick, well):
        before = await sample(proxy, "sidecar_requests_total{")
        assert (await proxy.once(chat(session="s1"))).status == 200
        await becomes(proxy, sick, State.OPEN)
        assert await sample(proxy, "sidecar_requests_total{") == before + 1
        assert await sample(proxy, "sidecar_retries_total{") == 0
        [service_state] = proxy.running.fleet.services.values()
        [session] = service_state.sessions.values()
        assert (session.node_key, session.breaker) == (well.key, None)
        # A wire attempt it is, and told apart.
        assert await sample(proxy, "sidecar_attempts_total{") == 3
        on_sick = f'sidecar_probe_copies_total{{service="default",version="v1",endpoint="{sick.key}"'
        assert await sample(proxy, f'{on_sick},outcome="failure"}}') == 1
        assert await sample(proxy, "sidecar_probe_copies_total{") == 1
        assert await sample(proxy, "sidecar_endpoint_in_flight{") == 0


async def test_many_proofs_are_had_from_many_copies() -> None:
    async with on_trial(says(PROVED), successes=3) as (proxy, sick, well):
        for _ in range(3):
            await becomes(proxy, sick, State.HALF_OPEN)
            assert (await proxy.once(chat())).status == 200
            await eventually(lambda: not _nodes(proxy)[sick.key], "the end of the copy")
        await becomes(proxy, sick, State.CLOSED)
        assert (len(sick.requests), len(well.requests)) == (4, 3)


RESPONSES = [
    b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"x"}\n\n',
    b'event: response.completed\ndata: {"type":"response.completed","response":{}}\n\n',
]


def _responses() -> bytes:
    body = b'{"model":"m","stream":true,"input":"hello"}'
    return request(b"/v1/responses", method=b"POST", headers=[JSON], body=body)


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        # An engine may store a response under its id, and a store must not have two of one.
        pytest.param(_responses(), stream_head() + chunked(*RESPONSES), id="responses"),
        pytest.param(chat(text="x" * COPIED_BYTES), SERVED, id="large-body"),
    ],
)
async def test_what_must_not_be_asked_twice_probes_itself(asked: bytes, answer: bytes) -> None:
    async with on_trial(says(answer)) as (proxy, sick, well):
        got = await proxy.once(asked)
        assert (got.status, got.header(b"x-sidecar-endpoint")) == (200, sick.key.encode())
        assert proxy.state("node", sick.key) is State.CLOSED
        assert (len(sick.requests), len(well.requests)) == (2, 0)


async def test_body_that_is_just_small_enough_is_copied() -> None:
    text = "x" * (COPIED_BYTES - 1 - len(chat(text="")))
    async with on_trial(says(PROVED)) as (proxy, sick, well):
        assert (await proxy.once(chat(text=text))).header(b"x-sidecar-endpoint") == well.key.encode()
        await becomes(proxy, sick, State.CLOSED)


@pytest.mark.parametrize("other", ["none", "open", "full", "another-model"])
async def test_where_nobody_else_may_serve_the_request_itself_is_the_probe(other: str) -> None:
    full = json_answer(error_body(b"full", b"429"), b"429 Slow", [b"retry-after: 60"])
    async with (
        Upstream(one_by_one(BROKEN, says(PROVED))) as sick,
        Upstream(one_by_one(says(full if other == "full" else SERVED))) as second,
    ):
        nodes = [endpoint(sick, local=True)]
        if other != "none":
            nodes.append(endpoint(second, models=("x",) if other == "another-model" else ("*",)))
        plan = service(*nodes, balance=Balance(local_first=True), breakers=node_breaker(1, open_s=OPEN, successes=1))
        async with sidecar(plan) as proxy:
            assert (await proxy.once(chat())).status == 500
            if other == "full":
                assert (await proxy.once(chat())).status == 429
            if other == "open":
                proxy.running.fleet.override(Scope.NODE, second.key, "open", proxy.running.now(), "test")
            seen = len(second.requests)
            await asyncio.sleep(OPEN + 0.02)
            got = await proxy.once(chat())
            assert (got.status, got.header(b"x-sidecar-endpoint")) == (200, sick.key.encode())
            assert proxy.state("node", sick.key) is State.CLOSED
            assert (len(sick.requests), len(second.requests)) == (2, seen)
            assert await sample(proxy, "sidecar_probe_copies_total{") == 0


async def test_drain_does_not_wait_for_a_copy_and_ends_it(tmp_path: Path) -> None:
    async with Upstream(one_by_one(BROKEN, _mute)) as sick, Upstream(one_by_one(says(SERVED))) as well:
        policy = tmp_path / "policy.yaml"
        policy.write_text(f"""\
apiVersion: sidecar/v1
kind: Policy
services:
  - name: chat
    endpoints: [{{url: "{sick.url}", local: true}}, {{url: "{well.url}"}}]
    balance: {{local_first: true}}
    breakers: {{node: {{consecutive: 1, open: 100ms}}}}
    retry: {{attempts: 1}}
""")
        flags = ["--policy", str(policy), "--settle", "0", "--drain", "30s"]
        async with processes.sidecar(*flags) as proxy:
            assert (await _once(proxy.port)).status == 500
            await asyncio.sleep(OPEN + 0.05)
            assert (await _once(proxy.port)).header(b"x-sidecar-endpoint") == well.key.encode()
            await eventually(lambda: len(sick.requests) == 2, "the copy")
            proxy.process.send(signal.SIGTERM)
            assert await proxy.process.ended() == 0
            await sick.connections[-1].gone()
            assert "Traceback" not in proxy.process.output


async def _once(port: int) -> Message:
    async with connect(port) as client:
        return await client.ask(chat(), b"POST")


def _nodes(proxy: Sidecar) -> dict[str, int]:
    """What is in flight on each endpoint."""
    return {
        node.key: node.in_flight for state in proxy.running.fleet.services.values() for node in state.nodes.values()
    }
