"""The xDS server: gRPC on a port of its own, with the locks of the descriptor stream's.

A stream is one Envoy, and two loops: one reads and tells `Walk`, one writes what `Walk` has next. So an Envoy that does
not read stops its own writer and nothing else; what it is sent when it reads again is what holds then.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from ipaddress import ip_address
from pathlib import Path
from typing import Final

import grpc

from sidecar.control.door import Door
from sidecar.control.server import asker, bound, locks, metadata_of, shown
from sidecar.control.turns import Turns
from sidecar.control.writers import Caller, Writers
from sidecar.control.xds import protos, speech
from sidecar.control.xds.build import Where, listener
from sidecar.control.xds.hub import Counts, Hub, Say, Source
from sidecar.control.xds.walk import Walk

STREAMS: Final = 5_000
"""Envoys of one server. More are refused, and try elsewhere."""
MESSAGE_BYTES: Final = 4 << 20
"""A state-of-the-world request names all clusters: 10,000 with names as long as they may be have 1.3 MB."""
PING_S: Final = 10
PONG_S: Final = 10
"""An Envoy whose machine is gone must not count as one that does not answer for longer than this."""
AT_ONCE: Final = 4
"""Envoys that are told something in one turn of the loop: the routes of a thousand services take a millisecond each."""
STOP_S: Final = 0.5

_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", PING_S * 1000),
    ("grpc.keepalive_timeout_ms", PONG_S * 1000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
)

Context = grpc.aio.ServicerContext[bytes, bytes]


class Xds:
    """A server that serves; `changed` is to be called when the policy files changed."""

    def __init__(self, hub: Hub, writers: Writers, say: Say, pushed: Callable[[str], None]) -> None:
        self.port = 0
        self.address = ""
        self.hub = hub
        self._writers = writers
        self._turns = Turns(AT_ONCE)
        self._calls: set[asyncio.Task[None]] = set()
        self._say = say
        self._pushed = pushed

    @property
    def streams(self) -> int:
        """Envoys that are connected."""
        return len(self.hub.envoys)

    @property
    def counts(self) -> Counts:
        """Pushes and answers since the start."""
        return self.hub.counts

    def changed(self) -> None:
        """The policy files changed."""
        self.hub.changed()

    def handler(self) -> grpc.GenericRpcHandler:
        """The service; messages stay bytes on their way in and out."""
        return grpc.method_handlers_generic_handler(
            protos.SERVICE,
            {
                "StreamAggregatedResources": grpc.stream_stream_rpc_method_handler(self._world),
                "DeltaAggregatedResources": grpc.stream_stream_rpc_method_handler(self._delta),
            },
        )

    async def _world(self, _: object, context: Context) -> None:
        await self._serve(Walk(delta=False), context)

    async def _delta(self, _: object, context: Context) -> None:
        await self._serve(Walk(delta=True), context)

    async def _serve(self, walk: Walk, context: Context) -> None:
        call = asyncio.current_task()
        if call is not None:
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        # Once a stream: Envoy's are long, and a refusal has to be judged in the turn in which it comes.
        why_not = await self._writers.why_not(_asker(context))
        stream = Stream(self.hub, walk, context, self._pushed, why_not, self._turns)
        self.hub.joined(stream)
        try:
            await stream.run()
        except* speech.BadRequest as group:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(group.exceptions[0]))
        except* Exception as group:  # noqa: BLE001 - one stream's end, not the server's
            self._say("error", "xds_stream_crashed", envoy=stream.name, exc_info=group)
            await context.abort(grpc.StatusCode.INTERNAL, "the server failed: its log says how")
        finally:
            self.hub.left(stream)

    async def ended(self) -> None:
        """Every call is over: gRPC's word that it is comes later than its server's end."""
        if self._calls:
            _, left = await asyncio.wait(self._calls, timeout=STOP_S)
            for call in left:
                call.cancel()


class Stream:
    """One Envoy's stream. The hub's `Envoy`."""

    def __init__(
        self, hub: Hub, walk: Walk, context: Context, pushed: Callable[[str], None], why_not: str, turns: Turns
    ) -> None:
        self.name = context.peer()
        self.proven = False
        self.why_not = why_not
        self._hub = hub
        self._walk = walk
        self._context = context
        self._pushed = pushed
        self._turns = turns
        self._awake = asyncio.Event()
        self._over = False

    @property
    def settled(self) -> bool:
        """Whether it has all of the present target."""
        return self._walk.has(self._hub.target)

    def wake(self) -> None:
        """See `Envoy`."""
        self._awake.set()

    async def run(self) -> None:
        """Until the Envoy leaves. gRPC takes one message at a time, and a call's end counts as one: so what is being
        written is never given up, and the end waits for it."""
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(self._write())
            try:
                await self._read()
            finally:
                self._over = True
                self._awake.set()
                await asyncio.wait((writing,))

    async def _read(self) -> None:
        while True:
            data: object = await self._context.read()
            if not isinstance(data, bytes):  # gRPC's own word for the end
                return
            heard = speech.hear(self._walk, data)
            if heard.node:
                self.name = heard.node
            answer = heard.answer
            if answer is not None:
                if answer.error:
                    self._hub.refused(self, answer.push.snapshot, answer.push.kind, answer.error)
                else:
                    self._hub.acked(self)
            self._awake.set()

    async def _write(self) -> None:
        await self._hub.ready.wait()
        while True:
            await self._awake.wait()
            self._awake.clear()
            while not self._over:
                await self._turns.mine()
                push = self._walk.next(self._hub.target)
                if push is None:
                    break
                data = speech.write(push, self._walk.delta)
                try:
                    await self._context.write(data)
                    self._pushed(push.kind.word)
                except Exception:  # noqa: BLE001 - gRPC has many, some private, and all mean that the Envoy is gone
                    self._over = True
            if self._over:
                return
            if self._walk.has(self._hub.target):
                self._hub.accepted(self, self._hub.target)


@contextlib.asynccontextmanager
async def serving(
    desk: Source,
    door: Door,
    tasks: asyncio.TaskGroup,
    say: Say,
    *,
    clock: Callable[[], float],
    listen: Where | None = None,
    begin: asyncio.Event | None = None,
    pushed: Callable[[str], None] = lambda _: None,
) -> AsyncIterator[Xds]:
    """xDS over `desk`, while the context lasts; `listen`: where Envoys shall listen; `begin`: nobody is
    answered before it is set; `pushed` is told the kind of each push. OSError where an address, a certificate or
    a token is not to be had."""
    writers = Writers(door.token, door.token_file, door.local)
    await writers.check()
    credentials = await asyncio.to_thread(locks, door)
    hub = Hub(
        desk,
        tasks,
        clock=clock,
        say=say,
        read_ca=authorities,
        listener=None if listen is None else listener(listen),
    )
    xds = Xds(hub, writers, say, pushed)
    server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=STREAMS)
    server.add_generic_rpc_handlers((xds.handler(),))
    following = tasks.create_task(hub.run(begin))
    try:
        xds.port = await bound(server, door, credentials, "--xds")
        xds.address = f"{shown(door)}:{xds.port}"
        await server.start()
        yield xds
    finally:
        following.cancel()
        await server.stop(STOP_S)
        await xds.ended()


def authorities(name: str) -> str:
    """The PEM text of a file of authorities, or of the system's for an empty name. OSError where there is none."""
    path = name or ssl.get_default_verify_paths().cafile
    if not path:
        raise FileNotFoundError("this machine has no authorities of its own")
    return Path(path).read_text(encoding="ascii", errors="replace")


def _asker(context: Context) -> Caller:
    """Who opened a stream. An Envoy puts `x-forwarded-for` on its own calls, with an address of its machine: alone, and
    with one of ours, it is no proxy's."""
    said = metadata_of(context)
    hops = [value for name, value in said if name == "x-forwarded-for"]
    if len(hops) == 1 and _is_ours(hops[0]):
        said = [(name, value) for name, value in said if name != "x-forwarded-for"]
    return asker(context, said)


def _is_ours(address: str) -> bool:
    """Whether an address is one of this machine's: nobody can be bound to another one."""
    try:
        family = socket.AF_INET6 if ip_address(address).version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as trial:
            trial.bind((address, 0))
    except (ValueError, OSError):
        return False
    return True
