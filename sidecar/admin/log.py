"""The pages of the log: what was said, by whom and why; one register's history, or all of it, live.

`GET /log` is NDJSON, one record a line, oldest first. With `follow=1` it does not end: a blank line says that what was
has been told, and then, whenever nothing was told for `HEARTBEAT_S`, that we live. A reader that is slower than the log
loses the oldest of what waits for it, and is told so: `{"lost": 12}`. `GET /log/<key>` is a JSON array.

1. A follower subscribes before the history is read: nothing falls between the two, and what is in both is told once.
2. Whoever reads may stop reading without leaving. What waits for him is bounded, and so are those who may read at once
   (`READERS`); after `STALLED_S` without taking a byte he is cut off.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
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


class LogPages:
    """The pages. `close` ends those that follow."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._readers = 0
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
        log = self._facts.log
        if log is None:
            return _no_log()
        try:
            asked = parse(request.query, self._facts.wall())
        except ValueError as exc:
            return answer.error(400, str(exc), "bad_request")
        if self._readers >= READERS:
            return answer.error(503, f"{READERS} read the log already", "too_many_readers")
        self._readers += 1
        try:
            if asked.follow:
                return await self._follow(request, log, asked)
            records = await _past(log, asked)
        except LogAway as exc:
            return answer.error(503, f"the log is away: {exc}", "log_away")
        finally:
            self._readers -= 1
        return web.Response(body=b"".join(_lines(records)), content_type=NDJSON)

    async def named(self, request: web.Request) -> web.StreamResponse:
        """The history of a breaker as `/breakers` names it: the same name in two services is two registers."""
        scope, name = request.match_info["scope"], request.match_info["name"]
        every = self._facts.fleet.services
        having = [service for service, state in every.items() if scope == Scope.NODE and name in state.nodes]
        services = having or list(every)
        return await self._histories(request, [f"{scope}:{service}/{name}" for service in services])

    async def key(self, request: web.Request) -> web.StreamResponse:
        """The history of one register."""
        return await self._histories(request, [request.match_info["key"]])

    async def _histories(self, request: web.Request, keys: Sequence[str]) -> web.StreamResponse:
        log = self._facts.log
        if log is None:
            return _no_log()
        try:
            asked = parse(request.query, self._facts.wall(), ("since", "limit"))
        except ValueError as exc:
            return answer.error(400, str(exc), "bad_request")
        if self._readers >= READERS:
            return answer.error(503, f"{READERS} read the log already", "too_many_readers")
        self._readers += 1
        try:
            records = [record for key in keys for record in await log.history(key, asked.since_us, asked.limit)]
        except ValueError as exc:
            return answer.error(404, f"no such key: {exc}", "unknown_key")
        except LogAway as exc:
            return answer.error(503, f"the log is away: {exc}", "log_away")
        finally:
            self._readers -= 1
        records.sort(key=lambda record: record.ts_us)
        lines = [views.record(record) for record in records[len(records) - min(asked.limit, len(records)) :]]
        return answer.page(lines) if lines else answer.error(404, "the log has nothing about it", "unknown_key")

    async def _follow(self, request: web.Request, log: LogFacts, asked: Asked) -> web.StreamResponse:
        subscription = log.subscribe()
        try:
            records = await _past(log, asked)
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
                        await _tell(request, response, [*_lines(records), b"\n"])
                        await _go_on(request, response, subscription, asked, {record.id for record in records})
                    finally:
                        self._following.discard(ends)
            return response
        finally:
            subscription.close()


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


async def _past(log: LogFacts, asked: Asked) -> list[LogRecord]:
    if asked.limit == 0:
        return []
    if not asked.pattern:
        return await log.history(None, asked.since_us, asked.limit)
    some = await log.history(None, asked.since_us, MOST_RECORDS)
    return [record for record in some if asked.wants(record)][-asked.limit :]


async def _go_on(
    request: web.Request,
    response: web.StreamResponse,
    subscription: Subscription,
    asked: Asked,
    told: set[str],
) -> None:
    """Live, until the reader leaves. `told` has the ids of what was told already."""
    lost, quiet_s = 0, 0.0
    while (transport := request.transport) is not None and not transport.is_closing():
        fresh = await _news(subscription)
        lines = []
        if subscription.lost > lost:
            lines.append(b'{"lost":%d}\n' % (subscription.lost - lost))
            lost = subscription.lost
        wanted = []
        for record in fresh:
            if record.id in told:
                told.discard(record.id)
            elif asked.wants(record):
                wanted.append(record)
        lines.extend(_lines(wanted))
        quiet_s = 0.0 if lines else quiet_s + GLANCE_S * (not fresh)
        if quiet_s >= HEARTBEAT_S:
            lines, quiet_s = [b"\n"], 0.0
        await _tell(request, response, lines)


async def _news(subscription: Subscription) -> list[LogRecord]:
    """What came, or nothing after `GLANCE_S`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(GLANCE_S):
            return await subscription.next()
    return []


async def _tell(request: web.Request, response: web.StreamResponse, lines: Sequence[bytes]) -> None:
    """Writes; ConnectionError if the reader left, or was cut off because he takes nothing."""
    for begin in range(0, len(lines), SLICE):
        try:
            async with asyncio.timeout(STALLED_S):
                await response.write(b"".join(lines[begin : begin + SLICE]))
        except TimeoutError:
            if request.transport is not None:
                # What was written cannot be sent, so the answer cannot end well.
                request.transport.abort()
            raise


def _lines(records: Sequence[LogRecord]) -> Iterator[bytes]:
    return (views.encode(views.record(record)) + b"\n" for record in records)


def _no_log() -> web.Response:
    return answer.error(404, "this sidecar keeps no log", "no_log")
