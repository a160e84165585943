"""Requests through a whole sidecar whose service has a tokenizer: counted, answered, and nobody kept from it."""

import asyncio
from pathlib import Path

import pytest

from sidecar.policy.schema import QosPolicy
from tests.harness import Upstream, answers, eventually
from tests.under_test import COMPLETION, chat, endpoint, json_answer, service, sidecar

TEXT = QosPolicy(name="text", latency_sla_ms=20_000)
LONG = "some words and a few more of them, " * 2000


@pytest.mark.parametrize("text", ["hello", LONG], ids=["on the spot", "on a thread"])
async def test_a_request_is_counted_exactly_and_its_next_turn_from_there(tiny_path: Path, text: str) -> None:
    async with (
        Upstream(answers(json_answer(COMPLETION))) as upstream,
        sidecar(service(endpoint(upstream), tokenizer=str(tiny_path)), qos_policies=[TEXT]) as proxy,
    ):
        counter = proxy.running.counter
        for how in ("exact", "cached"):
            async with proxy.client() as client:
                await client.send(chat(stream=False, text=text))
                head = await client.response_head()
                assert head.status == 200
            await eventually(lambda how=how: counter.counts[how] == 1, how)  # type: ignore[misc]
        assert counter.counts == {"exact": 1, "cached": 1, "estimated": 0}


async def test_a_bad_tokenizer_fails_no_request(tmp_path: Path) -> None:
    async with (
        Upstream(answers(json_answer(COMPLETION))) as upstream,
        sidecar(service(endpoint(upstream), tokenizer=str(tmp_path)), qos_policies=[TEXT]) as proxy,
        proxy.client() as client,
    ):
        await client.send(chat(stream=False))
        assert (await client.response_head()).status == 200
        assert proxy.running.counter.counts["estimated"] == 1


async def test_a_client_that_leaves_while_it_is_counted_leaves_nothing(tiny_path: Path) -> None:
    async with (
        Upstream(answers(json_answer(COMPLETION))) as upstream,
        sidecar(service(endpoint(upstream), tokenizer=str(tiny_path)), qos_policies=[TEXT]) as proxy,
    ):
        counter = proxy.running.counter
        async with proxy.client() as client:
            await client.send(chat(stream=False, text="x y z " * 150_000))
            await eventually(lambda: counter.pending_bytes > 0, "the thread to count")
        await eventually(lambda: counter.left == 1, "the sidecar to notice")
        await eventually(lambda: counter.pending_bytes == 0, "the thread to drop it")
        await asyncio.sleep(0)
        assert counter.counts["exact"] == 0
