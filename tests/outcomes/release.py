"""A release tool and the traffic that it must not harm: a real gRPC client, live streams, and who asks all the time.

Everything runs over real sockets; sidecars, engines and the log's server are processes of their own. `bench.routes`
plays the same at full size.

    async with releasing(port) as tool:
        answer = await tool.push(update(service_name="chat", version="v2", canary_weight=0.15))

Times are this process's monotonic clock, in seconds: the loop's own goes by milliseconds.
"""

import asyncio
import contextlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# It would watch each fork of ours; the processes that we start are other programs.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

import grpc
import grpc.aio

from sidecar.control.pb import control_pb2 as pb
from sidecar.demo.dialect import Chat, Spec, whole_stream
from tests.harness import Client, connect, request

METHOD = "/sidecar.control.v1.DescriptorControl/DescriptorStream"
LIMIT_S = 20.0
"""How long anything may take: spent only where something is broken."""
SERVICE = "chat"


# --- the tool ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What came of an update: its ack or its nack, and when it was sent and answered."""

    ack: pb.Ack | None
    nack: pb.Nack | None
    sent: float
    at: float

    @property
    def accepted(self) -> pb.Ack:
        """The ack; a nack fails."""
        assert self.ack is not None, self.nack
        return self.ack

    @property
    def refused(self) -> pb.Nack:
        """The nack; an ack fails."""
        assert self.nack is not None, self.ack
        return self.nack


class Tool:
    """One descriptor stream. Its answers come in the order of its updates; what else it is told is kept."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._answers: asyncio.Queue[tuple[pb.DescriptorEvent | None, float]] = asyncio.Queue()
        self._news = asyncio.Event()
        self.tables: dict[str, pb.Table] = {}
        """As they stand, by the events."""
        self.changes: list[tuple[float, pb.Table]] = []
        """In the order in which they were told, snapshots not counted."""
        self.notices: list[pb.Notice] = []
        self.snapshots = 0
        self.ended: BaseException | None = None

    async def read(self) -> None:
        """All events, until the stream ends."""
        try:
            async for event in self._call:
                self._take(event, time.monotonic())
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as exc:
            self.ended = exc
        finally:
            self.ended = self.ended or EOFError("the stream ended")
            self._answers.put_nowait((None, time.monotonic()))
            self._news.set()

    async def send(self, update: pb.DescriptorUpdate) -> float:
        """Say it and do not wait; when it was said."""
        now = time.monotonic()
        await self._call.write(update)
        return now

    async def answer(self, sent: float) -> Answer:
        """The next answer, to what was said at `sent`."""
        async with asyncio.timeout(LIMIT_S):
            event, at = await self._answers.get()
        if event is None:
            self._answers.put_nowait((None, at))
            raise ConnectionResetError("the stream ended before the answer") from self.ended
        if event.WhichOneof("event") == "ack":
            return Answer(event.ack, None, sent, at)
        return Answer(None, event.nack, sent, at)

    async def push(self, update: pb.DescriptorUpdate) -> Answer:
        """Say it, and wait for what comes of it."""
        return await self.answer(await self.send(update))

    async def until(self, service: str, version: int) -> pb.Table:
        """The table of a service, once it has that version or a later one."""
        async with asyncio.timeout(LIMIT_S):
            while service not in self.tables or self.tables[service].table_version < version:
                assert self.ended is None, self.ended
                self._news.clear()
                await self._news.wait()
        return self.tables[service]

    def _take(self, event: pb.DescriptorEvent, now: float) -> None:
        match event.WhichOneof("event"):
            case "ack" | "nack":
                self._answers.put_nowait((event, now))
            case "snapshot":
                self.snapshots += 1
                self.tables |= {table.service_name: table for table in event.snapshot.tables}
            case "table":
                self.tables[event.table.service_name] = event.table
                self.changes.append((now, event.table))
            case "notice":
                self.notices.append(event.notice)
        self._news.set()


@contextlib.asynccontextmanager
async def releasing(port: int) -> AsyncIterator[Tool]:
    """A stream to the sidecar whose control port that is."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream(
            METHOD,
            request_serializer=pb.DescriptorUpdate.SerializeToString,
            response_deserializer=pb.DescriptorEvent.FromString,
        )()
        tool = Tool(call)
        reading = asyncio.create_task(tool.read())
        try:
            yield tool
        finally:
            call.cancel()
            await reading


def update(**fields: Any) -> pb.DescriptorUpdate:
    """An update of `SERVICE`, unless told otherwise."""
    return pb.DescriptorUpdate(**({"service_name": SERVICE} | fields))


def bad_updates(standing: int, *, version: str = "v2", other: str = "v1") -> dict[str, tuple[pb.DescriptorUpdate, str]]:
    """Updates that must be refused, and with which code, where `version` has all traffic and says a schema hash, and
    `standing` is the table's version."""
    code = pb.Nack.Code
    invalid, stale, conflict = (code.Name(each) for each in (pb.Nack.INVALID, pb.Nack.STALE, pb.Nack.CONFLICT))

    def of(**fields: Any) -> pb.DescriptorUpdate:
        return update(**({"version": version} | fields))

    urls = ("ftp://10.0.0.1:21", "10.0.0.1:8000", "http://10.0.0.1:99999", "http://", "unix://relative", "")
    return {
        **{f"endpoint {url!r}": (of(endpoints=[pb.Endpoint(url=url)]), invalid) for url in urls},
        **{f"weight {weight}": (of(canary_weight=weight), invalid) for weight in (-1.0, 1.5, math.nan, math.inf)},
        "sum 0": (of(weights={version: 0.0, other: 0.0}), invalid),
        "sum 1.5": (of(weights={version: 1.0, other: 0.5}), invalid),
        "a weight of nobody": (of(weights={"v77": 1.0}), "NOT_FOUND"),
        "stale": (of(canary_weight=0.5, expected_table_version=standing - 1), stale),
        "wrong hash": (of(version=other, canary_weight=0.5, schema_hash="b" * 64), conflict),
        "no hash": (of(schema_hash="xyz"), invalid),
        "unknown engine": (
            of(version="v3", engine="gpt", endpoints=[pb.Endpoint(url="http://10.0.0.3:8000")]),
            invalid,
        ),
    }


# --- traffic ----------------------------------------------------------------------------------------------------------


def policy(path: Path, endpoints: Mapping[str, Iterable[str]], split: Mapping[str, float], **more: object) -> Path:
    """A policy file of `SERVICE`: its endpoints' URLs by version, its split."""
    service: dict[str, object] = {
        "name": SERVICE,
        "models": ["demo"],
        "endpoints": [{"url": url, "version": version} for version, urls in endpoints.items() for url in urls],
        "split": split,
    }
    path.write_text(json.dumps({"apiVersion": "sidecar/v1", "kind": "Policy", "services": [service | more]}))
    return path


def nothing(path: Path) -> Path:
    """A policy file without a service: all come from tables."""
    path.write_text(json.dumps({"apiVersion": "sidecar/v1", "kind": "Policy", "services": []}))
    return path


def asked(number: int, tokens: int, *, stream: bool, session: str = "") -> bytes:
    """A chat request whose answer is known to the byte by its number."""
    words = {"model": "demo", "stream": stream, "max_tokens": tokens, "messages": []}
    headers = [b"Content-Type: application/json", b"x-request-id: stream-%d" % number]
    headers += [b"x-session-id: " + session.encode()] if session else []
    return request(b"/v1/chat/completions", method=b"POST", headers=headers, body=json.dumps(words).encode())


@dataclass
class Streams:
    """Live streams, each checked byte by byte: what the engine sends, all tokens and `[DONE]`."""

    tokens: int
    whole: int = 0
    broken: list[str] = field(default_factory=list)
    versions: Counter[str] = field(default_factory=Counter)

    async def run(self, ports: Sequence[int], count: int, begun: asyncio.Event) -> None:
        """So many, in turns over the sidecars at `ports`; `begun` once all have their first token."""
        waiting = set(range(count))
        async with asyncio.TaskGroup() as all_of_them:
            for number in range(count):
                all_of_them.create_task(self._one(ports[number % len(ports)], number, waiting, begun))

    async def _one(self, port: int, number: int, waiting: set[int], begun: asyncio.Event) -> None:
        try:
            async with connect(port) as client:
                session = f"session-{number}" if number % 2 else ""
                await client.send(asked(number, self.tokens, stream=True, session=session))
                await client.seen(b"t0 ")
                waiting.discard(number)
                if not waiting:
                    begun.set()
                await self._rest(client, number)
        except (AssertionError, EOFError, OSError) as exc:
            self.broken.append(f"{number}: {exc!r}")
            waiting.discard(number)
            if not waiting:
                begun.set()

    async def _rest(self, client: Client, number: int) -> None:
        async with asyncio.timeout(120.0):
            while not client.received.endswith(b"\r\n0\r\n\r\n"):
                assert not client.ended, f"ended after {client.unread[-200:]!r}"
                await client.changed()
        answer = await client.response()
        spec = Spec("demo", f"stream-{number}", self.tokens, 0, finish_reason="length")
        assert answer.status == 200, answer.start
        assert answer.body == whole_stream(Chat(spec), self.tokens)
        assert answer.body.rstrip().endswith(b"data: [DONE]")
        self.versions[answer.header(b"x-sidecar-version").decode()] += 1
        self.whole += 1


@dataclass(frozen=True)
class Seen:
    """One request: when it began and ended, where, and which version answered it with what status."""

    began: float
    ended: float
    where: int
    status: int
    version: str


@dataclass(frozen=True)
class Followed:
    """When one place followed a change, in seconds after it: the last request that did not, as it began (0: none), and
    the first from which on all did. The truth lies between the two."""

    not_yet_s: float
    from_s: float


@dataclass
class Asking:
    """Someone who asks each of some ports again and again, without a session, on a connection that is kept."""

    every_s: float = 0.02
    seen: list[Seen] = field(default_factory=list)

    async def run(self, ports: Sequence[int], stop: asyncio.Event) -> None:
        """Until told to stop; the ports' turns lie evenly between each other."""
        async with asyncio.TaskGroup() as all_of_them:
            for place, port in enumerate(ports):
                all_of_them.create_task(self._one(place, port, stop, self.every_s * place / len(ports)))

    async def _one(self, place: int, port: int, stop: asyncio.Event, first_s: float) -> None:
        due = time.monotonic() + first_s
        number = 0
        async with connect(port) as client:
            while not stop.is_set():
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                began = time.monotonic()
                answer = await client.ask(asked(number, 1, stream=False), b"POST")
                version = answer.values(b"x-sidecar-version")
                said = version[0].decode() if version else ""
                self.seen.append(Seen(began, time.monotonic(), place, answer.status, said))
                number += 1
                due = max(due + self.every_s, time.monotonic())

    def followed(self, version: str, since: float, until: float) -> dict[int, "Followed"]:
        """By place, when its requests followed a change at `since` to `version`, which stood until `until`; infinity
        is for a place whose last one did not. What had not ended by then may have gone either way and says nothing."""
        wrong: dict[int, float] = {}
        right: dict[int, float | None] = {}
        for each in sorted(self.seen, key=lambda each: each.began):
            if since <= each.began and each.ended < until:
                if each.version != version:
                    wrong[each.where] = each.began - since
                    right[each.where] = None
                elif right.get(each.where) is None:
                    right[each.where] = each.began - since
        assert right, "nobody asked"
        return {place: Followed(wrong.get(place, 0.0), math.inf if at is None else at) for place, at in right.items()}

    @property
    def statuses(self) -> Counter[int]:
        return Counter(each.status for each in self.seen)


# --- T15 --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """A push that was taken: which version had all traffic from then on, when it was sent, answered and overruled."""

    version: str
    sent: float
    acked: float
    until: float


@dataclass
class Story:
    """What came of T15."""

    streams: Streams
    asking: Asking
    turns: list[Turn] = field(default_factory=list)
    nacks: dict[str, pb.Nack] = field(default_factory=dict)

    def followed_s(self) -> list[float]:
        """From each turn's ack until a sidecar's requests all followed it, sidecar by sidecar, at the latest."""
        return [
            each.from_s
            for turn in self.turns
            for each in self.asking.followed(turn.version, turn.acked, turn.until).values()
        ]


async def weights_under_live_streams(
    control: int, ports: Sequence[int], *, streams: int, tokens: int, pause_s: float, every_s: float = 0.02
) -> Story:
    """T15 through the sidecar whose control port is `control`, with traffic through all of `ports`, over v1:90/v2:10.

    Pushes 0/100, then 100/0, then three within 100 ms, then what must be refused; `pause_s` between them. The streams
    are longer than that.
    """
    story = Story(Streams(tokens), Asking(every_s))
    begun, stop = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks, releasing(control) as tool:
        live = tasks.create_task(story.streams.run(ports, streams, begun))
        tasks.create_task(story.asking.run(ports, stop))
        async with asyncio.timeout(LIMIT_S):
            await begun.wait()
        taken: list[tuple[str, Answer]] = []
        for version in ("v2", "v1"):
            taken.append((version, await tool.push(_all_to(version))))
            await asyncio.sleep(pause_s)
        last = ("v2", "v1", "v2")
        said = [(version, await tool.send(_all_to(version))) for version in last]
        assert said[-1][1] - said[0][1] < 0.1, "three within 100 ms"
        taken += [(version, await tool.answer(sent)) for version, sent in said]
        await asyncio.sleep(pause_s)
        standing = (await tool.push(update(version="v2", schema_hash="sha256:" + "a" * 64))).accepted.table_version
        before = await tool.until(SERVICE, standing)
        began = time.monotonic()
        for name, (bad, code) in bad_updates(standing).items():
            nack = (await tool.push(bad)).refused
            assert pb.Nack.Code.Name(nack.code) == code, (name, nack)
            assert nack.message and nack.last_good_version == standing, (name, nack)
            story.nacks[name] = nack
        await asyncio.sleep(pause_s)
        assert tool.tables[SERVICE] == before, "what was refused changed nothing"
        assert not live.done(), "the streams were to live through it all"
        end = time.monotonic()
        assert all(not each.not_yet_s for each in story.asking.followed("v2", began, end).values())
        nexts = [answer.sent for _, answer in taken[1:]] + [end]
        for (version, answer), until in zip(taken, nexts, strict=True):
            assert answer.accepted.table_version
            if until - answer.at > pause_s / 2:  # of the three, the last
                story.turns.append(Turn(version, answer.sent, answer.at, until))
        await live
        stop.set()
    return story


def _all_to(version: str) -> pb.DescriptorUpdate:
    other = "v1" if version == "v2" else "v2"
    return update(version=version, weights={version: 1.0, other: 0.0})
