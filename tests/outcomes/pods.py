"""Several sidecars over one server of the log, each whole and with a link of its own that can be cut.

They run in this process and on this loop, as `tests.under_test` starts them; the server is a process of its own
(`tests.servers`). A `Gate` stands where a network would: it lets through, swallows, or refuses.
"""

import asyncio
import contextlib
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from enum import Enum
from pathlib import Path

from msgspec.structs import replace

from sidecar.core.breaker import Breaker, Scope, State
from sidecar.kernel.ids import EndpointKey, ServiceName
from sidecar.main import serving
from sidecar.policy.schema import Breakers, NodeBreaker, Retry, Seconds, Service, Shared, Snapshot
from sidecar.settings import Listen, Settings
from sidecar.txlog.codec import SHARDS, Kind, Record, Unreadable, decode, register_key
from sidecar.txlog.functions import Shard
from sidecar.txlog.log import State as LogState
from tests.blocking import nothing_blocks
from tests.harness import Message, Upstream, awake, connect, one_by_one, request, says
from tests.servers import Server, ask_at
from tests.under_test import (
    REQUEST_OFF,
    SESSION_OFF,
    Sidecar,
    chat,
    error_body,
    json_answer,
    nothing_held,
    service,
    whole_stream,
)

AGREE_S = 10.0
"""How long a test waits for what takes a second: spent only where it fails."""
SERVICE = ServiceName("default")
GOOD = says(whole_stream())
BAD = says(json_answer(error_body(), b"500 Oh"))
PERSISTENT = Retry(attempts=4, budget_ratio=1.0, budget_min=10_000)
"""No request fails that any endpoint could serve."""


class Pod(Sidecar):
    """One sidecar, and what it logged."""

    def __init__(self, sidecar: Sidecar, name: str, lines: Path) -> None:
        super().__init__(sidecar.running)
        self.name = name
        self._lines = lines

    @property
    def log(self) -> LogState:
        return self.running.logbook.log.state

    def breaker(self, endpoint: Upstream, name: ServiceName = SERVICE) -> Breaker:
        return self.running.fleet.services[name].nodes[EndpointKey(endpoint.key)].breaker

    def events(self, *names: str) -> list[dict[str, object]]:
        """Logged so far, and written: the writer gathers for a twentieth of a second."""
        lines = [json.loads(line) for line in self._lines.read_text().splitlines()]
        return [line for line in lines if not names or line["event"] in names]

    async def said(self, name: str, times: int = 1) -> list[dict[str, object]]:
        """The events of a name, once there are so many."""
        await until(lambda: len(self.events(name)) >= times, lambda: f"{times} {name} of {self.name}: {self.events()}")
        return self.events(name)

    async def page(self, path: bytes) -> Message:
        """A page of its admin."""
        port = self.running.admin_port
        assert port is not None
        async with connect(port) as client:
            return await client.ask(request(path, headers=[b"Connection: close"]))

    async def health(self) -> dict[str, object]:
        """What `/healthz` says of the log."""
        decoded = json.loads((await self.page(b"/healthz")).body)
        part = decoded["parts"]["log"]
        assert isinstance(part, dict)
        return part

    async def metric(self, name: str) -> float:
        """A metric without labels."""
        text = (await self.page(b"/metrics")).body.decode()
        (line,) = [line for line in text.splitlines() if line.startswith(f"{name} ")]
        return float(line.split()[1])


@contextlib.asynccontextmanager
async def pod(name: str, url: str, plan: Service, directory: Path, **settings: object) -> AsyncIterator[Pod]:
    """A sidecar with its log at `url`; its lines are written to a file in `directory`."""
    lines = directory / f"{name}-{len(list(directory.glob(f'{name}-*.log')))}.log"
    fd = os.open(lines, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    chosen: dict[str, object] = {
        "listen": Listen("127.0.0.1", 0),
        "admin": Listen("127.0.0.1", 0),
        "control": None,
        "drain_s": 0.2,
        "settle_s": 0.0,
        "access_log": "off",
        "log_format": "json",
        "redis": url,
        "observer": name,
    }
    snapshot = Snapshot(version=1, services=(plan,))
    try:
        async with serving(Settings(**(chosen | settings)), snapshot, log_fd=fd) as running:  # type: ignore[arg-type]
            made = Pod(Sidecar(running), name, lines)
            yield made
            await nothing_held(running)
            assert running.logbook.log.crashes == 0, made.events("log_crashed")
    finally:
        os.close(fd)


@contextlib.asynccontextmanager
async def pods(urls: Sequence[str], plan: Service, directory: Path, **settings: object) -> AsyncIterator[list[Pod]]:
    """One sidecar per URL. Nothing may block the loop while all of them run: a start and an end may read files."""
    async with contextlib.AsyncExitStack() as stack:
        some = [
            await stack.enter_async_context(pod(f"pod-{number}", url, plan, directory, **settings))
            for number, url in enumerate(urls, 1)
        ]
        with nothing_blocks("sidecar.txlog.leash"):  # servers of tests
            yield some


class Way(Enum):
    """What a gate does with bytes."""

    THROUGH = "through"
    SWALLOWED = "swallowed"
    REFUSED = "refused"


class Gate:
    """A port that leads to a server, while it is let: the link of one sidecar."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._way = Way.THROUGH
        self._open: set[asyncio.StreamWriter] = set()
        self._listener: asyncio.Server | None = None
        self.port = 0
        self.accepted = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def open_connections(self) -> int:
        """From the sidecar's side."""
        return len(self._open)

    async def turn(self, way: Way) -> None:
        """SWALLOWED keeps connections and takes new ones; nothing passes. REFUSED ends and refuses them."""
        self._way = way
        if way is Way.REFUSED and self._listener is not None:
            self._listener.close()
            self._listener = None
        if way is not Way.SWALLOWED:
            # Those whose bytes were swallowed must not go on in the middle.
            for writer in self._open:
                writer.transport.abort()
        if way is not Way.REFUSED and self._listener is None:
            self._listener = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
            self.port = self._listener.sockets[0].getsockname()[1]

    async def close(self) -> None:
        await self.turn(Way.REFUSED)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self._open.add(writer)
        there: asyncio.StreamWriter | None = None
        try:
            back, there = await self._connect()
            async with asyncio.TaskGroup() as both:
                both.create_task(self._carry(reader, there))
                both.create_task(self._carry(back, writer))
        except* OSError:
            pass
        finally:
            self._open.discard(writer)
            for each in (writer, there):
                if each is not None:
                    each.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._target.startswith("unix://"):
            return await asyncio.open_unix_connection(self._target.removeprefix("unix://"))
        host, _, port = self._target.removeprefix("redis://").rpartition(":")
        return await asyncio.open_connection(host, int(port))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if self._way is Way.THROUGH:
                writer.write(data)
                await writer.drain()
        raise ConnectionResetError  # the other direction ends, too


@contextlib.asynccontextmanager
async def gate(server: Server | str) -> AsyncIterator[Gate]:
    """A gate before a server, open to begin with."""
    made = Gate(server if isinstance(server, str) else server.url)
    await made.turn(Way.THROUGH)
    try:
        yield made
    finally:
        await made.close()


# --- traffic ----------------------------------------------------------------------------------------------------------


class Engine(Upstream):
    """An endpoint that can be broken and mended."""

    def __init__(self) -> None:
        self.broken = False

        async def behave(peer: object) -> None:
            await (BAD if self.broken else GOOD)(peer)  # type: ignore[arg-type]

        super().__init__(one_by_one(behave))


@contextlib.asynccontextmanager
async def engines(count: int = 3) -> AsyncIterator[list[Engine]]:
    async with contextlib.AsyncExitStack() as stack:
        made = [Engine() for _ in range(count)]
        for each in made:
            await stack.enter_async_context(each)
        yield made


def plan_of(endpoints: Sequence[Upstream], **rule: object) -> Service:
    """Two failures that one sidecar saw open an endpoint for a long while; a request is tried until it succeeds."""
    node = NodeBreaker(
        consecutive=2,
        failure_ratio=0.0,
        open_s=Seconds(3600),
        open_max_s=Seconds(3600),
        successes=1,
        min_closed_ratio=0.34,
        adaptive=False,
    )
    breakers = Breakers(node=replace(node, **rule), session=SESSION_OFF, request=REQUEST_OFF)
    return service(*endpoints, breakers=breakers, retry=PERSISTENT, shared=Shared(quorum=1))


class Traffic:
    """What came of requests: statuses, and how long each took.

    What the machine took from this process is no request's wait (`awake`). A loop that is held would look the same:
    blockbuster is there for those.
    """

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.took_s: list[float] = []

    @property
    def longest_s(self) -> float:
        return max(self.took_s)

    @property
    def median_s(self) -> float:
        return sorted(self.took_s)[len(self.took_s) // 2]

    async def asks(self, pod: Sidecar, count: int, rate: float) -> None:
        """So many requests, each begun at its time whatever became of the others; what was held is not caught up on."""
        async with awake() as ran, asyncio.TaskGroup() as all_of_them:
            for number in range(count):
                await asyncio.sleep(max(0.0, number / rate - ran()))
                all_of_them.create_task(self._one(pod, ran))

    async def _one(self, pod: Sidecar, ran: Callable[[], float]) -> None:
        began = ran()
        answer = await pod.once(chat())
        self.took_s.append(ran() - began)
        self.statuses[answer.status] += 1


async def opens(pod: Pod, engine: Engine) -> None:
    """Requests until the sidecar has opened that endpoint, on what it saw itself."""
    engine.broken = True
    for _ in range(50):
        if pod.breaker(engine).state is State.OPEN:
            return
        assert (await pod.once(chat())).status == 200
    raise AssertionError("it never opened")


# --- what the server has ----------------------------------------------------------------------------------------------


async def records(url: str, prefix: str = "dtl", shards: Sequence[int] = range(SHARDS)) -> list[Record]:
    """Every record in every shard's log; what is none is left out."""
    found = []
    for shard in shards:
        reply = await ask_at(url, "XRANGE", Shard(prefix, shard).log, "-", "+")
        assert isinstance(reply, list)
        for entry in reply:
            assert isinstance(entry, list) and isinstance(entry[1], list)
            with contextlib.suppress(Unreadable):
                fields = entry[1]
                if len(fields) == 2 and fields[0] == b"r" and isinstance(fields[1], bytes):
                    found.append(decode(fields[1]))
    return found


async def register(url: str, key: str, shard: int, prefix: str = "dtl") -> Record | None:
    """A register as the server has it."""
    reply = await ask_at(url, "HGET", Shard(prefix, shard).registers, key)
    assert reply is None or isinstance(reply, bytes)
    return decode(reply) if reply else None


def key_of(engine: Upstream) -> str:
    return register_key(Scope.NODE, SERVICE, engine.key)


def sound(log: Sequence[Record]) -> None:
    """No record twice, and every key's versions rise one by one."""
    twice = [tx for tx, times in Counter(record.tx for record in log).items() if times > 1]
    assert not twice, [record for record in log if record.tx in twice]
    versions: dict[str, tuple[int, int]] = {}
    for record in (record for record in log if record.kind != Kind.SUSPECT):
        version = (record.epoch, record.version)
        assert version > versions.get(record.key, (0, 0)), f"{record.key} goes back to {version}: {log}"
        versions[record.key] = version


async def until(true: Callable[[], bool], what: Callable[[], str]) -> float:
    """Wait until it is so; how long that took, in seconds that this process ran."""
    async with awake() as ran:
        while not true():
            assert ran() < AGREE_S, f"waited {AGREE_S} s for {what()}"
            await asyncio.sleep(0.005)
        return ran()


async def eventually(true: Callable[[], Awaitable[bool]], what: Callable[[], str]) -> float:
    """As `until`, for what must be asked for."""
    async with awake() as ran:
        while not await true():
            assert ran() < AGREE_S, f"waited {AGREE_S} s for {what()}"
            await asyncio.sleep(0.005)
        return ran()


async def agree(some: Sequence[Pod], engine: Upstream, state: State) -> float:
    """Wait until all of them say so, by one register of the log; how long that took."""

    def agreed() -> bool:
        breakers = [each.breaker(engine) for each in some]
        versions = {(breaker.epoch, breaker.version) for breaker in breakers}
        return {breaker.state for breaker in breakers} == {state} and len(versions) == 1 and (0, 0) not in versions

    def said() -> str:
        return str([(b.state, b.epoch, b.version, b.shared, b.why) for b in (each.breaker(engine) for each in some)])

    return await until(agreed, lambda: f"all to say {state}: {said()}")
