"""The descriptor stream's server: gRPC on a port of its own, beside the data path and on its loop.

gRPC keeps its sockets on threads of its own and hands finished messages to the loop, so that a stream that nobody uses
costs the loop nothing. Importing this module imports gRPC, 20 MB and a tenth of a second: `main` does it where the port
is on.

1. A message is at most `MESSAGE_BYTES`; gRPC ends the stream that sends more with RESOURCE_EXHAUSTED. Calls at once are
   at most `CALLS`, with health and reflection.
2. The server pings a silent client every `PING_S`, so that no NAT and no mesh forgets the connection, and ends one that
   does not answer; clients may ping as often.
3. While we drain, health says NOT_SERVING, streams end with UNAVAILABLE, and so does each that begins; a client that
   comes back finds another sidecar with the same tables.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from sidecar.control import convert
from sidecar.control.door import Door
from sidecar.control.pb import control_pb2 as pb
from sidecar.control.stream import Counts, Say, Stream
from sidecar.control.turns import Turns
from sidecar.control.writers import Caller, Writers, caller
from sidecar.core.desk import Desk

SERVICE: Final = pb.DESCRIPTOR.services_by_name["DescriptorControl"].full_name
METHOD: Final = "DescriptorStream"

MESSAGE_BYTES: Final = 4 << 20
"""gRPC's own default, said: an update of 5,000 endpoints with long addresses has 1.5 MB."""
CALLS: Final = 1_000
"""A fleet's release tools and watchers are tens; each, with a connection of its own, holds 50 kB."""
PING_S: Final = 30
"""Cloud NATs forget a silent connection after 350 s at the earliest, meshes after an hour, some firewalls a minute."""
PONG_S: Final = 10
AT_ONCE: Final = 20
"""Streams that are told something in one turn of the loop: 2 ms, and 20 where it is a long table of a snapshot."""
STOP_S: Final = 1.0
"""How long calls under way may take when the server stops: streams end by themselves before."""

_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),  # else two sidecars would share a port, and each client reach either
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", PING_S * 1000),
    ("grpc.keepalive_timeout_ms", PONG_S * 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", PONG_S * 1000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", PONG_S * 1000),
)

Context = grpc.aio.ServicerContext[bytes, bytes]


class Control:
    """A server that serves. `port`: the one that it has; `address`: with its host before it. `counts`: for metrics."""

    def __init__(self, desk: Desk, writers: Writers, say: Say, answered: Callable[[str], None]) -> None:
        self.port = 0
        self.address = ""
        self.counts = Counts(answered)
        self.draining = asyncio.Event()
        self._desk = desk
        self._writers = writers
        self._say = say
        self._encoder = convert.Encoder()
        self._turns = Turns(AT_ONCE)
        self._streams: set[Stream] = set()
        self._calls: set[asyncio.Task[None]] = set()

    @property
    def streams(self) -> int:
        """How many are open."""
        return len(self._streams)

    def drain(self) -> None:
        """End all streams, and begin none; again is harmless."""
        self.draining.set()
        for stream in self._streams:
            stream.drain()

    async def ended(self) -> None:
        """Every call is over: gRPC's word that it is comes later than its server's end."""
        if self._calls:
            _, left = await asyncio.wait(self._calls, timeout=STOP_S)
            for call in left:
                call.cancel()

    def handler(self) -> grpc.GenericRpcHandler:
        """The service. Messages stay bytes on their way in and out: what is no message is answered by a nack."""
        return grpc.method_handlers_generic_handler(
            SERVICE, {METHOD: grpc.stream_stream_rpc_method_handler(self._serve)}
        )

    async def _serve(self, _: object, context: Context) -> None:
        call = asyncio.current_task()
        if call is not None:
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        who = asker(context, metadata_of(context))
        async with asyncio.TaskGroup() as tasks:
            wire = _Wire(context, tasks)
            stream = Stream(
                self._desk,
                self._writers,
                who,
                self._encoder,
                self.counts,
                self._say,
                read=wire.read,
                write=wire.write,
                breathe=self._turns.mine,
            )
            if self.draining.is_set():
                stream.drain()
            self._streams.add(stream)
            crashed: Exception | None = None
            drained = False
            try:
                drained = await stream.run()
            except Exception as exc:  # noqa: BLE001 - one stream's end, not the server's
                crashed = exc
            finally:
                self._streams.discard(stream)
            await wire.settled()
            if wire.gone:
                # gRPC knows it as well, and is about to cancel us: an end of ours could not be told to anybody.
                await asyncio.Event().wait()
        if crashed is not None:
            self._say("error", "control_stream_crashed", exc_info=crashed)
            await context.abort(grpc.StatusCode.INTERNAL, "the sidecar failed: its log says how")
        if drained:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "draining")


class Gone(Exception):
    """The client is not there any more: what was written did not reach it."""


class _Wire:
    """A call's two directions. gRPC takes one message at a time, and the call's end counts as one; a write that was
    given up goes on there all the same. So each is a task of its own, which outlives who waits for it."""

    def __init__(self, context: Context, tasks: asyncio.TaskGroup) -> None:
        self._context = context
        self._tasks = tasks
        self._writing: asyncio.Task[None] | None = None
        self.gone = False

    async def read(self) -> bytes | None:
        """The client's next message; None after its last."""
        data = await self._context.read()
        return data if isinstance(data, bytes) else None  # gRPC's own word for the end

    async def write(self, data: bytes) -> None:
        """Returns when there is room for the next one; waits for one that was given up. Gone. Not for two at once."""
        await self.settled()
        if not self.gone:
            self._writing = self._tasks.create_task(self._put(data))
            await self.settled()
        if self.gone:
            raise Gone

    async def settled(self) -> None:
        """Nothing is being written any more: for ever, where the client does not read, and until it or we go."""
        if self._writing is not None:
            await asyncio.wait((self._writing,))

    async def _put(self, data: bytes) -> None:
        try:
            await self._context.write(data)
        except Exception:  # noqa: BLE001 - gRPC has many, some private, and all of them mean that
            self.gone = True


@contextlib.asynccontextmanager
async def serving(
    desk: Desk, door: Door, tasks: asyncio.TaskGroup, say: Say, answered: Callable[[str], None]
) -> AsyncIterator[Control]:
    """The descriptor stream over `desk`, while the context lasts. `answered` counts (`stream.Counts`). OSError where an
    address, a certificate or a token is not to be had."""
    writers = Writers(door.token, door.token_file, door.local)
    await writers.check()
    credentials = await asyncio.to_thread(locks, door)
    control = Control(desk, writers, say, answered)
    server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=CALLS)
    status = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    server.add_generic_rpc_handlers((control.handler(),))
    try:
        control.port = await bound(server, door, credentials)
        control.address = f"{shown(door)}:{control.port}"
        await server.start()
        for name in ("", SERVICE):
            await status.set(name, health_pb2.HealthCheckResponse.SERVING)
        leaving = tasks.create_task(_leave(control, status))
        try:
            yield control
        finally:
            control.drain()
            leaving.cancel()
    finally:
        await server.stop(STOP_S)
        await control.ended()


async def _leave(control: Control, status: health.aio.HealthServicer) -> None:
    await control.draining.wait()
    await status.enter_graceful_shutdown()


async def bound(
    server: grpc.aio.Server, door: Door, credentials: grpc.ServerCredentials | None, flag: str = "--control"
) -> int:
    """The port, listened at; OSError names `flag`. gRPC tells nobody why it cannot have one, so the address is tried
    before."""
    where = f"{shown(door)}:{door.port}"
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(door.host, door.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in found:
            with socket.socket(family, kind, protocol) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind(address)
                trial.listen(1)
    except OSError as exc:
        raise OSError(f"cannot listen at {where} ({flag}): {exc.strerror or exc}") from exc
    try:
        if credentials is None:
            return server.add_insecure_port(where)
        return server.add_secure_port(where, credentials)
    except RuntimeError as exc:
        raise OSError(f"cannot listen at {where} ({flag}): it was there a moment ago") from exc


def shown(door: Door) -> str:
    """A door's host as it stands before a port."""
    return f"[{door.host}]" if ":" in door.host else door.host


def locks(door: Door) -> grpc.ServerCredentials | None:
    """What a door's certificates ask of clients; None: nothing. OSError for files that are none. Reads the disk."""
    if door.tls_cert is None or door.tls_key is None:
        return None
    # gRPC would tell nobody what is wrong with a file; Python's reader does, though not with which.
    trial = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        trial.load_cert_chain(door.tls_cert, door.tls_key)
    except OSError as exc:
        raise OSError(f"cannot use certificate {door.tls_cert} with key {door.tls_key} (--control-tls): {exc}") from exc
    authority = None
    if door.tls_ca is not None:
        try:
            trial.load_verify_locations(door.tls_ca)
            authority = door.tls_ca.read_bytes()
        except OSError as exc:
            raise OSError(f"cannot use authority {door.tls_ca} (--control-tls-ca): {exc}") from exc
    pair = (door.tls_key.read_bytes(), door.tls_cert.read_bytes())
    return grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)


def asker(context: Context, metadata: list[tuple[str, str]]) -> Caller:
    """Who opened a stream with this metadata."""
    return caller(context.peer(), _certified(context), metadata)


def _certified(context: Context) -> str:
    """The name in the client's certificate, which gRPC verified; empty: it brought none."""
    names = list(context.peer_identities() or ())
    if not names:
        return ""
    common = list(context.auth_context().get("x509_common_name") or ())
    return (common or names)[0].decode("utf-8", "replace") or "certificate"


def metadata_of(context: Context) -> list[tuple[str, str]]:
    """A call's metadata that is text, names in lower case."""
    return [(key.lower(), value) for key, value in context.invocation_metadata() or () if isinstance(value, str)]
