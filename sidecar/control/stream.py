"""One descriptor stream: what its client says is done in order and answered, and what happens is told to it.

On callables that read and write messages, so that it can be held against scripts without a socket.

1. Updates are answered in their order; the next begins when the answer to the one before it was taken by the wire. So
   a client that does not read its answers sends no more, and nothing piles up here.
2. Events begin with a snapshot, `FIRST_S` after the stream at the latest: what the client says by then may narrow what
   it hears. A change of mind, or events that fell out because the client read too slowly, bring a snapshot anew.
3. Of one service, tables are told in the order of their versions. What an update changes comes as an event, also where
   the snapshot has it already, since an update begins when the events after the snapshot are kept; its answer comes
   before or after that event.
4. A client that has said its last hears on until it cancels, unless it wanted answers only: then the stream ends.
5. A sidecar that drains answers the update under way, tells a last notice, and ends the stream.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from sidecar.control import convert
from sidecar.control.pb import control_pb2 as pb
from sidecar.control.writers import Caller, Writers
from sidecar.core.desk import Desk, Event, Feed, Notice
from sidecar.core.revise import Accepted, Refused

FIRST_S: Final = 0.05
"""How long a stream's begin waits for what the client wants to hear: a client on the same continent sends it with the
call."""
WISHES: Final = 10_000
"""Services that one client may name: each event is looked up among them, and a message has room for a million."""
ANSWER_S: Final = 0.5
"""How long a drain waits for the answer to an update under way: the log answers within milliseconds, or is away."""
LAST_S: Final = 0.2
"""And for a client to take the last notice."""

Say = Callable[..., None]
"""`say(level, event, **fields)`: a line in the log."""

DRAINING: Final = Notice("", "draining", "the sidecar stops; another one has the same tables")


class Counts:
    """What is counted over all streams: how many are open, how often one was too slow for its events, and by `answered`
    every answer: `accepted`, `repeated`, or the code of a refusal."""

    __slots__ = ("answered", "lagged", "streams")

    def __init__(self, answered: Callable[[str], None]) -> None:
        self.streams = 0
        self.lagged = 0
        self.answered = answered


class Wish(msgspec.Struct, frozen=True):
    """What a client wants to hear. `services` empty: of all."""

    services: frozenset[str] = frozenset()
    answers_only: bool = False

    def wants(self, service: str) -> bool:
        """Whether a client with this wish hears of a service; "": of what is about none."""
        return not self.services or not service or service in self.services


def wish_of(said: pb.Subscribe) -> Wish:
    """What a client says that it wants; of more than `WISHES` services: of all."""
    services = frozenset(said.services) if len(said.services) <= WISHES else frozenset[str]()
    return Wish(services, said.answers_only)


class Stream:
    """One client. `read` gives its next message's bytes, None after its last; `write` returns when there is room for
    the next one; `breathe` when it is this stream's turn to tell something. `run` is called once; `drain` any time."""

    def __init__(
        self,
        desk: Desk,
        writers: Writers,
        caller: Caller,
        encoder: convert.Encoder,
        counts: Counts,
        say: Say,
        *,
        read: Callable[[], Awaitable[bytes | None]],
        write: Callable[[bytes], Awaitable[None]],
        breathe: Callable[[], Awaitable[None]],
    ) -> None:
        self._desk = desk
        self._writers = writers
        self._caller = caller
        self._encoder = encoder
        self._counts = counts
        self._say = say
        self._read = read
        self._write = write
        self._breathe = breathe
        self._writing = asyncio.Lock()
        self._wish = Wish()
        self._wished = asyncio.Event()
        self._settled = asyncio.Event()  # the wish is in force: what changes from now on is an event
        self._patience: asyncio.Timeout | None = None
        self._draining = asyncio.Event()
        self._answering = False
        self._number = 0
        self._denied = False

    def drain(self) -> None:
        """Begin to end; again is harmless."""
        self._draining.set()

    async def run(self) -> bool:
        """Until the stream is over; whether that is because of a drain. Cancelled when the client is gone."""
        self._counts.streams += 1
        try:
            async with asyncio.TaskGroup() as tasks:
                telling = tasks.create_task(self._tell())
                hearing = tasks.create_task(self._hear())
                draining = tasks.create_task(self._draining.wait())
                await asyncio.wait((hearing, draining), return_when=asyncio.FIRST_COMPLETED)
                if not draining.done() and not self._wish.answers_only:
                    await draining
                if draining.done():
                    if not self._answering:
                        hearing.cancel()
                    await asyncio.wait((hearing,), timeout=ANSWER_S)
                    await self._say_last(telling)
                for task in (telling, hearing, draining):
                    task.cancel()
            return self._draining.is_set()
        finally:
            self._counts.streams -= 1

    async def _say_last(self, telling: asyncio.Task[None]) -> None:
        if self._wish.answers_only:
            return
        try:
            async with asyncio.timeout(LAST_S):
                await self._writing.acquire()
                telling.cancel()  # not in the middle of a message: the lock is ours
                await self._write(self._encoder.event(DRAINING))
        except TimeoutError:
            pass  # it does not read: it sees the end of the stream

    # What the client says.

    async def _hear(self) -> None:
        while not self._draining.is_set() and (data := await self._read()) is not None:
            self._answering = True
            try:
                await self._heard(data)
            finally:
                self._answering = False

    async def _heard(self, data: bytes) -> None:
        try:
            message = convert.message_of(data)
        except convert.Unusable as exc:
            self._number += 1
            await self._answer(pb.DescriptorUpdate(), Refused("invalid", str(exc)))
            return
        if message.HasField("subscribe"):
            self._wish = wish_of(message.subscribe)
            self._settled.clear()
            if self._patience is not None:
                self._patience.reschedule(0.0)
                self._patience = None  # once: a second wish may come before the first has woken who waits
            self._wished.set()
            return
        self._wished.set()
        await self._settled.wait()
        self._number += 1
        await self._answer(message, await self._done(message))

    async def _done(self, message: pb.DescriptorUpdate) -> Accepted | Refused:
        why = await self._writers.why_not(self._caller)
        if why:
            if not self._denied:  # once a stream: a client that may not write must not fill the log
                self._denied = True
                self._say("warning", "control_denied", peer=self._caller.says(""), error=why)
            return Refused("denied", why, self._version(message.service_name))
        try:
            update = convert.update_of(message, self._caller)
        except convert.Unusable as exc:
            return Refused("invalid", str(exc), self._version(message.service_name))
        return await self._desk.submit(update)

    async def _answer(self, message: pb.DescriptorUpdate, done: Accepted | Refused) -> None:
        if isinstance(done, Accepted):
            self._counts.answered("repeated" if done.repeated else "accepted")
            said = convert.ack(message, self._number, done)
        else:
            self._counts.answered(done.code)
            said = convert.nack(message, self._number, done)
        await self._send(said)

    def _version(self, service: str) -> int:
        """The version of the table that stands; 0 if there is none."""
        view = self._desk.standing(service)
        return 0 if view is None else view.version

    # What the client is told.

    async def _tell(self) -> None:
        try:
            async with asyncio.timeout(FIRST_S):
                await self._wished.wait()
        except TimeoutError:
            pass
        while True:
            wish = self._wish
            self._wished.clear()
            if wish.answers_only:
                self._settled.set()
                await self._wished.wait()
                continue
            feed = self._desk.subscribe()
            try:
                await self._follow(feed, wish)
            finally:
                feed.close()

    async def _follow(self, feed: Feed, wish: Wish) -> None:
        """A snapshot and what comes after it, until the client wishes otherwise or has missed some of it."""
        # In the turn of the subscription: what comes later is in the feed.
        names = [view.table.service for view in self._desk.outlines() if wish.wants(view.table.service)]
        self._settled.set()
        told = await self._snapshot(names, wish)
        while self._wish is wish:
            events = await self._news(feed)
            if feed.lagged:
                self._counts.lagged += 1
                return
            for event in events:
                if self._is_news(event, wish, told):
                    await self._breathe()
                    await self._send(self._encoder.event(event))

    async def _snapshot(self, names: list[str], wish: Wish) -> dict[str, int]:
        """Tells tables, each as it stands when its turn comes; their versions. Ends early when the client wishes
        otherwise."""
        told: dict[str, int] = {}
        pieces = convert.Pieces()
        for name in names:
            await self._breathe()
            view = self._desk.standing(name)
            if view is None:
                continue
            told[name] = view.version
            piece = pieces.add(view)
            if piece is not None:
                await self._send(piece)
            await asyncio.sleep(0)  # a long table takes a millisecond to read and encode, and a write need not wait
            if self._wish is not wish:
                return told
        await self._send(pieces.last())
        return told

    def _is_news(self, event: Event, wish: Wish, told: dict[str, int]) -> bool:
        """Whether the client wants it, and was not told a later table in the snapshot."""
        if isinstance(event, Notice):
            return wish.wants(event.service)
        service = event.table.service
        return wish.wants(service) and event.version >= told.get(service, 0)

    async def _news(self, feed: Feed) -> list[Event]:
        """What came; nothing once the client wishes otherwise."""
        try:
            async with asyncio.timeout(None) as self._patience:
                return await feed.next()
        except TimeoutError:
            return []
        finally:
            self._patience = None

    async def _send(self, data: bytes) -> None:
        async with self._writing:
            await self._write(data)
