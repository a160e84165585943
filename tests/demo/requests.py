"""Requests as bytes, and the answers they must get, for the tests of the simulated engine."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import msgspec

from sidecar.demo.dialect import SHAPES, Spec, whole_stream
from sidecar.demo.engine import Engine
from sidecar.demo.script import Fault, Script
from tests.harness import Client, connect

CHAT = b"/v1/chat/completions"


def post(
    body: bytes,
    path: bytes = CHAT,
    *headers: bytes,
    request_id: str = "r1",
    version: bytes = b"1.1",
) -> bytes:
    """A POST with a content-length."""
    lines = [
        b"POST %b HTTP/%b" % (path, version),
        b"host: engine",
        b"x-request-id: " + request_id.encode(),
        b"content-length: %d" % len(body),
        *headers,
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def get(path: bytes, method: bytes = b"GET") -> bytes:
    return b"%b %b HTTP/1.1\r\nhost: engine\r\n\r\n" % (method, path)


def ask(tokens: int, *, stream: bool, **more: object) -> bytes:
    """An inference body for an answer of `tokens` tokens."""
    return json.dumps({"model": "demo", "stream": stream, "max_tokens": tokens, **more}).encode()


def spec_for(body: bytes, tokens: int, *, usage: bool = False, choices: int = 1) -> Spec:
    """What the engine makes of `ask(tokens)` sent by `post` with its default request id."""
    return Spec("demo", "r1", tokens, len(body) // 4, "length", choices, usage)


def stream_for(body: bytes, tokens: int, path: bytes = CHAT, *, usage: bool = False, choices: int = 1) -> bytes:
    """The body of the right streamed answer, unchunked."""
    return whole_stream(SHAPES[path](spec_for(body, tokens, usage=usage, choices=choices)), tokens)


def plain_for(body: bytes, tokens: int, path: bytes = CHAT) -> bytes:
    """The body of the right plain answer."""
    return SHAPES[path](spec_for(body, tokens)).plain()


def begun_for(body: bytes, tokens: int, sent: int) -> bytes:
    """The first `sent` tokens of a chat stream with what precedes them."""
    shape = SHAPES[CHAT](spec_for(body, tokens))
    return shape.opening() + b"".join(shape.token(index) for index in range(sent))


@contextlib.asynccontextmanager
async def engine_and_client(
    script: Script | None = None, fault: Fault | None = None
) -> AsyncIterator[tuple[Engine, Client]]:
    """An engine and one client that is connected to it."""
    script = script or Script()
    if fault is not None:
        script = msgspec.structs.replace(script, fault=fault)
    async with Engine(script) as engine, connect(engine.port) as client:
        yield engine, client


@contextlib.asynccontextmanager
async def talk(script: Script | None = None, fault: Fault | None = None) -> AsyncIterator[Client]:
    """A client connected to an engine of its own."""
    async with engine_and_client(script, fault) as (_, client):
        yield client


async def refused(port: int) -> bool:
    """True if nothing listens on `port`."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionRefusedError:
        return True
    writer.close()
    return False
