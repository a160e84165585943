"""The simulated Triton and DeepSpeed-MII: their own bytes, as recorded; and that our dialects read them."""

import json

import pytest

from sidecar.demo.engine import Engine
from sidecar.demo.script import Fault, Kind, Script
from tests.demo.requests import CHAT, ask, get, post
from tests.harness import connect

STREAM = b"/v2/models/m/generate_stream"
TRITON = Script(engine="triton", models=("m",), tokens=3)
MII = Script(engine="deepspeed", models=("m",), tokens=3)


def generate(**more: object) -> bytes:
    return post(json.dumps({"text_input": "hi", "id": "r1"} | more).encode(), STREAM)


async def test_a_triton_streams_as_the_real_one_does() -> None:
    async with Engine(TRITON) as engine, connect(engine.port) as client:
        got = await client.ask(generate(), b"POST")
        assert (got.status, got.header(b"content-type")) == (200, b"text/event-stream; charset=utf-8")
        events = [json.loads(block.removeprefix(b"data: ")) for block in got.body.split(b"\n\n") if block]
        assert events[:-1] == [
            {"finish_reason": "None", "model_name": "m", "model_version": "1", "text_output": text}
            for text in ("t0 ", "t1 ", "t2 ")
        ]
        assert events[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize(("limit", "tokens", "reason"), [(2, 2, "length"), (3, 3, "length"), (4096, 3, "stop")])
async def test_a_limit_is_a_ceiling(limit: int, tokens: int, reason: str) -> None:
    async with Engine(TRITON) as engine, connect(engine.port) as client:
        body = (await client.ask(generate(max_tokens=limit), b"POST")).body
        assert body.count(b'"text_output":"t') == tokens
        assert f'"finish_reason":"{reason}"'.encode() in body


async def test_a_tritons_errors_name_neither_type_nor_code() -> None:
    async with Engine(TRITON) as engine, connect(engine.port) as client:
        engine.fail(Fault(Kind.IN_BAND_ERROR, after=1, message="exploded"))
        assert (await client.ask(generate(), b"POST")).body.endswith(b'data: {"error":"exploded"}\n\n')
        engine.fail(Fault(Kind.STATUS, status=400, message="Stub process 'm_0_0' is not healthy."))
        got = await client.ask(generate(), b"POST")
        assert (got.status, json.loads(got.body)) == (400, {"error": "Stub process 'm_0_0' is not healthy."})


async def test_a_triton_says_that_it_does_not_have_a_model_as_the_real_one_does() -> None:
    async with (
        Engine(Script(engine="triton", models=("x",), any_model=False)) as engine,
        connect(engine.port) as client,
    ):
        got = await client.ask(generate(), b"POST")
        assert (got.status, json.loads(got.body)) == (404, {"error": "Request for unknown model: 'm' is not found"})


async def test_a_tritons_pages() -> None:
    async with Engine(TRITON) as engine, connect(engine.port) as client:
        for path, status in ((b"/v2/health/ready", 200), (b"/v2/models/m/ready", 200), (b"/v2/models/x/ready", 404)):
            assert (await client.ask(get(path), b"GET")).status == status
        index = await client.ask(post(b"{}", b"/v2/repository/index"), b"POST")
        assert json.loads(index.body) == [{"name": "m", "version": "1", "state": "READY"}]
        assert (await client.ask(post(ask(2, stream=True)), b"POST")).status == 404
        engine.script = Script(engine="triton", models=("m",), healthy=False)
        assert (await client.ask(get(b"/v2/health/ready"), b"GET")).status == 400


@pytest.mark.parametrize("path", [CHAT, b"/v1/completions"])
async def test_a_mii_leaves_out_what_the_real_one_does(path: bytes) -> None:
    async with Engine(MII) as engine, connect(engine.port) as client:
        body = (await client.ask(post(ask(2, stream=True), path), b"POST")).body
        assert body.endswith(b"data: [DONE]\n\n")
        assert b'"object"' not in body and b'"created"' not in body and b'"usage"' not in body
        whole = json.loads((await client.ask(post(ask(2, stream=False), path), b"POST")).body)
        assert whole["usage"]["completion_tokens"] == 2
        for status, told, code in ((400, None, 40001), (404, None, 40301), (500, None, 50001), (400, 40303, 40303)):
            engine.fail(Fault(Kind.STATUS, status=status, message="bad", code=told))
            refused = json.loads((await client.ask(post(ask(2, stream=False), path), b"POST")).body)
            assert refused == {"object": "error", "message": "bad", "code": code}


async def test_a_triton_that_breaks_off_has_told_that_it_had_not_finished() -> None:
    async with Engine(TRITON) as engine, connect(engine.port) as client:
        engine.fail(Fault(Kind.CUT_NO_TERMINATOR, after=2))
        body = (await client.ask(generate(), b"POST")).body
        reasons = [json.loads(event.removeprefix(b"data: "))["finish_reason"] for event in body.split(b"\n\n") if event]
        assert reasons == ["None", "None"]
