"""The pages of the log: what was said, by whom and why; one register's history, or all of it, live.

`GET /log` is NDJSON, one record a line, oldest first. With `follow=1` it does not end: a blank line says that what was
has been told, and then, whenever nothing was told for `HEARTBEAT_S`, that we live. A reader that is slower than the log
loses the oldest of what waits for it, and is told so: `{"lost": 12}`. `GET /log/<key>` is a JSON array.

1. A follower subscribes before the history is read: nothing falls between the two, and what is in both is told once.
2. Whoever reads may stop reading without leaving. What waits for him is bounded, and so are those who may read at once
   (`READERS`); after `STALLED_S` without taking a byte he is cut off.
3. Streams run on the same loop: one history is read at a time, and what is made of it is made in slices.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Final

import msgspec
from aiohttp import web

from sidecar.admin import answer, views
from sidecar.admin.facts import Facts, LogAway, LogFacts, LogRecord, Subscription
from sidecar.admin.words import parse_span
from sidecar.core.breaker import Scope

READERS: Final = 32
"""Who may read the log at once: operators and their tools; a history is read from the server."""

MOST_RECORDS: Final = 10_000
"""Of an answer, and of those that a pattern looks through."""

DEFAULT_RECORDS: Final = 1000
MAX_PATTERN: Final = 512
SLICE: Final = 200
"""Records written before the loop may go on: about a millisecond."""

GLANCE_S: Final = 1.0
"""How soon it is noticed that a follower left."""

PAUSE_S: Final = 0.05
"""A busy log is told twenty times a second and not once per record: nobody reads faster."""

HEARTBEAT_S: Final = 15.0
STALLED_S: Final = 600.0
"""An operator may stop his terminal's scrolling to read; ten minutes later he has forgotten."""

NDJSON: Final = "application/x-ndjson"
_PARAMETERS: Final = ("follow", "since", "key", "limit")
_SWITCH: Final = {"1": True, "true": True, "0": False, "false": False}


class Asked(msgspec.Struct, frozen=True):
    """What a reader wants. `pattern` "": every key; `since_us` None: whatever the log still has."""

    follow: bool
    since_us: int | None
    pattern: str
    limit: int

    def wants(self, record: LogRecord) -> bool:
        """Whether the pattern fits its key, or the name in it. As it stands it fits, too: names have brackets."""
        pattern = self.pattern
        if not pattern or pattern in (record.key, record.name):
            return True
        return fnmatchcase(record.key, pattern) or fnmatchcase(record.name, pattern)


Told = Callable[[LogFacts, Asked], Awaitable[web.StreamResponse]]


class LogPages:
    """The pages. `close` ends those that follow."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._readers = 0
        # Who waits for it waits for `READERS` histories at most, each with a deadline of its own.
        self._reading = asyncio.Semaphore(1)
        self._following: set[asyncio.Timeout] = set()
        self._closed = False

    def register(self, app: web.Application) -> None:
        """Puts the pages into `app`."""
        # Not even a HEAD request shall wait for what comes.
        app.router.add_get("/log", self.log, allow_head=False)
        scopes = "|".join((*(scope.value for scope in Scope), "route"))
        app.router.add_get(rf"/log/{{scope:{scopes}}}/{{name:(?s:.*)}}", self.named, allow_head=False)
        app.router.add_get(r"/log/{key:(?s:.+)}", self.key, allow_head=False)
        app.on_shutdown.append(self.close)

    async def close(self, app: web.Application | None = None) -> None:
        """Ends those that follow, well: the server stops, and shall not wait for them."""
        self._closed = True
        for deadline in self._following:
            deadline.reschedule(0.0)

    async def log(self, request: web.Request) -> web.StreamResponse:
        """What was, and with `follow` what comes."""

        async def told(log: LogFacts, asked: Asked) -> web.StreamResponse:
            if asked.follow:
                return await self._follow(request, log, asked)
            return web.Response(body=await _joined(await self._past(log, asked), b"\n"), content_type=NDJSON)

        return await self._told(request, _PARAMETERS, told)

    async def named(self, request: web.Request) -> web.StreamResponse:
        """The history of a breaker as `/breakers` names it: the same name in two services is two registers."""
        scope, name = request.match_info["scope"], request.match_info["name"]
        if scope == "route":
            return await self._histories(request, [f"route:{name.removesuffix('/')}/"])
        every = self._facts.fleet.services
        having = [service for service, state in every.items() if scope == Scope.NODE and name in state.nodes]
        return await self._histories(request, [f"{scope}:{service}/{name}" for service in having or list(every)])

    async def key(self, request: web.Request) -> web.StreamResponse:
        """The history of one register."""
        return await self._histories(request, [request.match_info["key"]])

    async def _histories(self, request: web.Request, keys: Sequence[str]) -> web.StreamResponse:
        async def told(log: LogFacts, asked: Asked) -> web.StreamResponse:
            records: list[LogRecord] = []
            try:
                for key in keys:
                    async with self._reading:
                        records.extend(await log.history(key, asked.since_us, asked.limit))
            except ValueError as exc:
                return answer.error(404, f"no such key: {exc}", "unknown_key")
            if not records:
                return answer.error(404, "the log has nothing about it", "unknown_key")
            records.sort(key=lambda record: record.ts_us)
            body = await _joined(records[-asked.limit :] if asked.limit else [], b",")
            return answer.encoded(b"[" + body.removesuffix(b",") + b"]")

        return await self._told(request, ("since", "limit"), told)

    async def _told(self, request: web.Request, parameters: Sequence[str], told: Told) -> web.StreamResponse:
        """What `told` says, or why it is not asked: no log, parameters that mean nothing, too many readers."""
        log = self._facts.log
        if log is None:
            return answer.error(404, "this sidecar keeps no log", "no_log")
        try:
            asked = parse(request.query, self._facts.wall(), parameters)
        except ValueError as exc:
            return answer.error(400, str(exc), "bad_request")
        if self._readers >= READERS:
            return answer.error(503, f"{READERS} read the log already", "too_many_readers")
        self._readers += 1
        try:
            return await told(log, asked)
        except LogAway as exc:
            return answer.error(503, f"the log is away: {exc}", "log_away")
        finally:
            self._readers -= 1

    async def _past(self, log: LogFacts, asked: Asked) -> list[LogRecord]:
        """The newest of all that is wanted, oldest first."""
        if asked.limit == 0:
            return []
        async with self._reading:
            some = await log.history(None, asked.since_us, MOST_RECORDS if asked.pattern else asked.limit)
        found: list[LogRecord] = []
        for begin in range(0, len(some), SLICE):
            found.extend(record for record in some[begin : begin + SLICE] if asked.wants(record))
            await asyncio.sleep(0)
        return found[-asked.limit :]

    async def _follow(self, request: web.Request, log: LogFacts, asked: Asked) -> web.StreamResponse:
        subscription = log.subscribe()
        try:
            records = await self._past(log, asked)
            response = web.StreamResponse(headers={"content-type": NDJSON, "cache-control": "no-store"})
            await response.prepare(request)
            # Ended, cut off, or gone by himself: in every case it is over.
            with suppress(TimeoutError, ConnectionError):
                # `close` sets the deadline; until then a reader may follow for as long as he likes.
                async with asyncio.timeout(None) as ends:
                    self._following.add(ends)
                    try:
                        if self._closed:
                            ends.reschedule(0.0)
                        reader = _Reader(request, response)
                        await reader.tell(records)
                        await reader.write(b"\n")
                        await reader.go_on(subscription, asked, {record.id for record in records})
                    finally:
                        self._following.discard(ends)
            return response
        finally:
            subscription.close()


class _Reader:
    """One that follows. Whatever is told him raises ConnectionError if he left, TimeoutError if he takes nothing."""

    def __init__(self, request: web.Request, response: web.StreamResponse) -> None:
        self._request = request
        self._response = response

    async def go_on(self, subscription: Subscription, asked: Asked, told: set[str]) -> None:
        """Live, until he leaves. `told` has the ids of what he was told already."""
        clock = asyncio.get_running_loop().time
        lost, said_at = 0, clock()
        while (transport := self._request.transport) is not None and not transport.is_closing():
            fresh = await _news(subscription)
            if subscription.lost > lost:
                await self.write(b'{"lost":%d}\n' % (subscription.lost - lost))
                lost = subscription.lost
            wanted = [record for record in fresh if record.id not in told and asked.wants(record)]
            told.difference_update(record.id for record in fresh)
            if wanted:
                await self.tell(wanted)
                said_at = clock()
            elif clock() - said_at >= HEARTBEAT_S:
                await self.write(b"\n")
                said_at = clock()
            if fresh:
                await asyncio.sleep(PAUSE_S)

    async def tell(self, records: Sequence[LogRecord]) -> None:
        """Lines of JSON."""
        for begin in range(0, len(records), SLICE):
            await self.write(b"".join(_json(record) + b"\n" for record in records[begin : begin + SLICE]))
            await asyncio.sleep(0)

    async def write(self, lines: bytes) -> None:
        """Bytes as they are."""
        try:
            async with asyncio.timeout(STALLED_S):
                await self._response.write(lines)
        except TimeoutError:
            if self._request.transport is not None:
                # What was written cannot be sent, so the answer cannot end well.
                self._request.transport.abort()
            raise


def parse(query: Mapping[str, str], wall: float, known: Sequence[str] = _PARAMETERS) -> Asked:
    """What the parameters of a query say; `wall` is now in Unix seconds. ValueError in words for who wrote them."""
    for name in query:
        if name not in known:
            raise ValueError(f'"{name[:40]}" is no parameter here: there are {", ".join(known)}')
    follow = query.get("follow", "0")
    if follow not in _SWITCH:
        raise ValueError("follow is 1 or 0")
    since_us = None
    if "since" in query:
        try:
            since_us = int((wall - parse_span(query["since"])) * 1e6)
        except ValueError as exc:
            raise ValueError(f"since: {exc}") from exc
    pattern = query.get("key", "")
    if len(pattern) > MAX_PATTERN:
        raise ValueError(f"key: a pattern has at most {MAX_PATTERN} characters")
    limit = query.get("limit", str(DEFAULT_RECORDS))
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 6 and int(limit) <= MOST_RECORDS):
        raise ValueError(f"limit is a number from 0 to {MOST_RECORDS}")
    return Asked(_SWITCH[follow], since_us, pattern, int(limit))


async def _news(subscription: Subscription) -> list[LogRecord]:
    """What came, or nothing after `GLANCE_S`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(GLANCE_S):
            return await subscription.next()
    return []


async def _joined(records: Sequence[LogRecord], after_each: bytes) -> bytearray:
    """The records as JSON, each with something behind it."""
    body = bytearray()
    for begin in range(0, len(records), SLICE):
        body += b"".join(_json(record) + after_each for record in records[begin : begin + SLICE])
        await asyncio.sleep(0)
    return body


def _json(record: LogRecord) -> bytes:
    return views.encode(views.record(record))
