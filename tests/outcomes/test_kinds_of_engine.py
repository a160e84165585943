"""vLLM, Triton and DeepSpeed-MII behind one service while one of them fails in every way that the simulated ones know.

What may not happen: an answer that is short, doubled or another's and looks whole. Before the first byte went out, and
for clients that do not stream, a request moves to another kind of engine and nobody notices.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from sidecar.demo.engine import Engine
from sidecar.demo.script import MID_STREAM, EngineName, Fault, Kind, Script
from sidecar.demo.show import ENGINES
from sidecar.policy.schema import Endpoint, Retry, Seconds
from tests.harness import request
from tests.under_test import JSON, PATIENT, Sidecar, service, sidecar

TEMPLATE = str(Path(__file__).parents[2] / "sidecar" / "demo" / "chat_template.jinja")
TOKENS = 9
SHORT = msgspec.structs.replace(PATIENT, head_s=Seconds(1), first_token_s=Seconds(1), total_s=Seconds(30))
STALLED_S = 0.5
"""The gap of a stream that is meant to stall."""
PATIENT_S = 10.0
"""Where none is, one that is well may be kept waiting by the machine."""
Sick = Literal["triton", "deepspeed"]
EARLY = [kind for kind in Kind if kind not in (Kind.SLOW, Kind.SLOW_DRIP)]


@asynccontextmanager
async def three(sick: EngineName, fault: Fault, token_gap_s: float = PATIENT_S) -> AsyncIterator[Sidecar]:
    """A sidecar before one engine of each kind, of which `sick` fails every other request."""
    async with AsyncExitStack() as stack:
        endpoints = []
        for name in ENGINES:
            engine = await stack.enter_async_context(Engine(Script(engine=name, tokens=TOKENS, token_gap_s=0.001)))
            if name == sick:
                engine.fail(fault)
            endpoints.append(Endpoint(url=engine.url, engine=name, chat_template=TEMPLATE if name == "triton" else ""))
        deadlines = msgspec.structs.replace(SHORT, token_gap_s=Seconds(token_gap_s))
        plan = service(*endpoints, retry=Retry(attempts=3, budget_ratio=1.0, budget_min=1000), deadlines=deadlines)
        yield await stack.enter_async_context(sidecar(plan))


async def ask(proxy: Sidecar, number: int) -> tuple[bool, str]:
    """Whether the client streamed, and what it makes of its answer: "whole", or else the error it was told."""
    chat, stream = bool(number & 1), bool(number & 2)
    body: dict[str, Any] = {"model": "demo", "stream": stream, "max_tokens": TOKENS}
    body |= {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
    path = b"/v1/chat/completions" if chat else b"/v1/completions"
    headers = [JSON, b"x-request-id: r%d" % number]
    got = await proxy.once(request(path, method=b"POST", headers=headers, body=json.dumps(body).encode()))
    blocks = [block.removeprefix(b"data: ") for block in got.body.split(b"\n\n")] if stream else [got.body]
    events = [json.loads(block) for block in blocks if block.startswith(b"{")]
    errors = [event["error"]["message"] for event in events if "error" in event]
    if errors:
        assert blocks.count(b"[DONE]") == 0 or not stream
        return stream, errors[0]
    choices = [choice for event in events for choice in event["choices"]]
    said = [choice["delta" if stream else "message"]["content"] if chat else choice["text"] for choice in choices]
    assert [int(word) for word in re.findall(r"\d+", "".join(said))] == list(range(TOKENS))
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert blocks.count(b"[DONE]") == stream
    return stream, "whole"


async def many(proxy: Sidecar) -> list[tuple[bool, str]]:
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(ask(proxy, number)) for number in range(16)]
    return [each.result() for each in asked]


@pytest.mark.parametrize("kind", EARLY)
@pytest.mark.parametrize("sick", ["triton", "deepspeed"])
async def test_what_fails_before_it_said_anything_is_noticed_by_nobody(sick: Sick, kind: Kind) -> None:
    fault = Fault(kind, share=0.5, for_s=0.1 if kind is Kind.DIE else 0.0)
    async with three(sick, fault) as proxy:
        assert {what for _, what in await many(proxy)} == {"whole"}


@pytest.mark.parametrize("kind", sorted(MID_STREAM))
@pytest.mark.parametrize("sick", ["triton", "deepspeed"])
async def test_what_fails_in_the_middle_never_looks_whole(sick: Sick, kind: Kind) -> None:
    gap_s = STALLED_S if kind is Kind.STALL else PATIENT_S
    async with three(sick, Fault(kind, after=4, share=0.9), gap_s) as proxy:
        ends = [end for _ in range(5) for end in await many(proxy)]
    assert {what for stream, what in ends if not stream} == {"whole"}
    assert len({what for stream, what in ends if stream}) == 2
