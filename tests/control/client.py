"""A client of descriptor streams over real sockets, for the tests: it may send anything, and hides nothing it is told.

async with served(FakeDesk()) as control, stream(control.port) as client:
    ack = await client.ack(Update(service_name="chat", version="v1", canary_weight=1.0))
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from sidecar.control.door import Door
from sidecar.control.pb import control_pb2 as pb
from sidecar.control.server import Control, serving
from sidecar.core.desk import Desk
from tests.blocking import nothing_blocks

METHOD = "/sidecar.control.v1.DescriptorControl/DescriptorStream"
LIMIT_S = 5.0
"""How long a test waits for what must come; spent only where it fails."""

Line = tuple[str, str, dict[str, object]]
Update = pb.DescriptorUpdate
Event = pb.DescriptorEvent


class Ended(Exception):
    """The stream is over."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(code, details)
        self.code = code
        self.details = details


class Client:
    """One stream. Events are given in the order in which they came; those that a test did not wait for are kept."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.passed: list[pb.DescriptorEvent] = []

    async def send(self, update: pb.DescriptorUpdate | bytes) -> None:
        await self.call.write(update if isinstance(update, bytes) else update.SerializeToString())

    async def subscribe(self, *services: str, answers_only: bool = False) -> None:
        await self.send(Update(subscribe=pb.Subscribe(services=services, answers_only=answers_only)))

    async def say_last(self) -> None:
        await self.call.done_writing()

    async def event(self) -> pb.DescriptorEvent:
        """The next event. Ended where there is none any more."""
        async with asyncio.timeout(LIMIT_S):
            try:
                data = await self.call.read()
            except grpc.aio.AioRpcError as exc:
                raise Ended(exc.code(), exc.details() or "") from exc
            if data is grpc.aio.EOF:
                raise Ended(await self.call.code(), await self.call.details() or "")
        return pb.DescriptorEvent.FromString(data)

    async def until(self, ready: Callable[[pb.DescriptorEvent], bool]) -> pb.DescriptorEvent:
        """The next event that is `ready`; the others are in `passed`."""
        while not ready(event := await self.event()):
            self.passed.append(event)
        return event

    async def kind(self, name: str) -> pb.DescriptorEvent:
        return await self.until(lambda event: event.WhichOneof("event") == name)

    async def answer(self, update: pb.DescriptorUpdate | bytes) -> pb.DescriptorEvent:
        await self.send(update)
        return await self.until(lambda event: event.WhichOneof("event") in ("ack", "nack"))

    async def ack(self, update: pb.DescriptorUpdate | bytes) -> pb.Ack:
        """Sends it; what it made."""
        event = await self.answer(update)
        assert event.HasField("ack"), event
        return event.ack

    async def nack(self, update: pb.DescriptorUpdate | bytes) -> pb.Nack:
        """Sends it; why it was refused."""
        event = await self.answer(update)
        assert event.HasField("nack"), event
        return event.nack

    async def snapshot(self) -> dict[str, pb.Table]:
        """The next whole snapshot, by service."""
        tables: dict[str, pb.Table] = {}
        while True:
            piece = (await self.kind("snapshot")).snapshot
            tables |= {table.service_name: table for table in piece.tables}
            if piece.complete:
                return tables

    async def table(self) -> pb.Table:
        """The next change."""
        return (await self.kind("table")).table

    async def end(self) -> Ended:
        """How the stream ends; what came before is in `passed`."""
        try:
            while True:
                self.passed.append(await self.event())
        except Ended as exc:
            return exc


@contextlib.asynccontextmanager
async def served(
    desk: Desk,
    lines: list[Line] | None = None,
    answers: list[str] | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    **door: Any,
) -> AsyncIterator[Control]:
    """A server on a port of the system's choice; nothing may block the loop while it serves, and no stream is left.
    It may log if there are `lines`; `answers` gets what is counted."""
    answers = [] if answers is None else answers

    def say(level: str, event: str, **fields: object) -> None:
        assert lines is not None, (level, event, fields)
        lines.append((level, event, fields))

    async with asyncio.TaskGroup() as tasks:
        doing = serving(desk, Door(host=host, port=port, **door), tasks, say, answers.append)
        async with doing as control:
            with nothing_blocks():
                yield control
        assert control.streams == control.counts.streams == 0


@contextlib.asynccontextmanager
async def channel(
    port: int, credentials: grpc.ChannelCredentials | None = None, *, options: Sequence[tuple[str, Any]] = ()
) -> AsyncIterator[grpc.aio.Channel]:
    """A connection of its own."""
    options = [*options, ("grpc.use_local_subchannel_pool", 1)]
    if credentials is None:
        made = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)
    else:
        made = grpc.aio.secure_channel(f"localhost:{port}", credentials, options=options)
    async with made:
        yield made


@contextlib.asynccontextmanager
async def on(made: grpc.aio.Channel, **metadata: str) -> AsyncIterator[Client]:
    """A stream on a channel, cancelled at the end."""
    call: Any = made.stream_stream(METHOD)(metadata=[(key.replace("_", "-"), value) for key, value in metadata.items()])
    try:
        yield Client(call)
    finally:
        call.cancel()
        await call.code()  # what is left of it would be told to the next test's loop


@contextlib.asynccontextmanager
async def stream(
    port: int, credentials: grpc.ChannelCredentials | None = None, **metadata: str
) -> AsyncIterator[Client]:
    """A stream on a connection of its own."""
    async with channel(port, credentials) as made, on(made, **metadata) as client:
        yield client


def trusting(ca: Path, leaf: tuple[Path, Path] | None = None) -> grpc.ChannelCredentials:
    """Credentials of a client that trusts `ca`, with a certificate of its own or without."""
    certificate, key = leaf or (None, None)
    return grpc.ssl_channel_credentials(
        ca.read_bytes(),
        key.read_bytes() if key else None,
        certificate.read_bytes() if certificate else None,
    )


def put(weight: float | None = None, version: str = "v1", service: str = "chat", **more: Any) -> pb.DescriptorUpdate:
    """An update, by the words that tests vary."""
    return Update(service_name=service, version=version, canary_weight=weight, **more)
