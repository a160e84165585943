"""The page of what the log remembers: `GET /log/evidence`, a span of it as NDJSON, for `sidecar log replay`.

`since` and `until` are how long ago the span begins and ends (an hour, and now), `service` keeps the others out. The
lines are not ours: whoever keeps the log writes them (`docs/replay.md`); the last of them says that it is the last.

1. A span may be a gigabyte. It is read from the log's server as fast as the reader takes it, a page at a time.
2. Few may read at once, and who takes nothing for `STALLED_S` is cut off: what is read here is read from the server
   that all sidecars share.
3. Where the server goes away in the middle the answer is cut off, too: it must not look whole.
"""

import asyncio
from collections.abc import Mapping
from typing import Final

import msgspec
from aiohttp import web

from sidecar.admin import answer
from sidecar.admin.facts import Facts, LogAway
from sidecar.admin.words import parse_span

READERS: Final = 2
STALLED_S: Final = 60.0
DEFAULT_SPAN: Final = "1h"
MAX_SERVICE: Final = 63
NDJSON: Final = "application/x-ndjson"
_PARAMETERS: Final = ("since", "until", "service")


class Asked(msgspec.Struct, frozen=True):
    """What a reader wants; microseconds since the epoch."""

    since_us: int
    until_us: int
    service: str


class EvidencePage:
    """The page."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._readers = 0

    def register(self, app: web.Application) -> None:
        """Puts the page into `app`."""
        app.router.add_get("/log/evidence", self.evidence, allow_head=False)

    async def evidence(self, request: web.Request) -> web.StreamResponse:
        log = self._facts.log
        if log is None:
            return answer.error(404, "this sidecar keeps no log", "no_log")
        try:
            asked = parse(request.query, self._facts.wall())
        except ValueError as exc:
            return answer.error(400, str(exc), "bad_request")
        if self._readers >= READERS:
            return answer.error(503, f"{READERS} read the evidence already", "too_many_readers")
        self._readers += 1
        try:
            recording = log.record(asked.since_us, asked.until_us, asked.service)
            lines = await recording.next()
            response = web.StreamResponse(headers={"content-type": NDJSON, "cache-control": "no-store"})
            await response.prepare(request)
            try:
                while lines:
                    async with asyncio.timeout(STALLED_S):
                        await response.write(b"".join(lines))
                    lines = await recording.next()
            except (LogAway, TimeoutError):
                if request.transport is not None:
                    request.transport.abort()
            except ConnectionError:
                pass  # he left
            return response
        except LogAway as exc:
            return answer.error(503, f"the log is away: {exc}", "log_away")
        finally:
            self._readers -= 1


def parse(query: Mapping[str, str], wall: float) -> Asked:
    """What the parameters of a query say; `wall` is now in Unix seconds. ValueError in words for who wrote them."""
    for name in query:
        if name not in _PARAMETERS:
            raise ValueError(f'"{name[:40]}" is no parameter here: there are {", ".join(_PARAMETERS)}')
    ago: dict[str, float] = {"until": 0.0}
    for name in ("since", "until"):
        text = query.get(name, DEFAULT_SPAN if name == "since" else "")
        if text:
            try:
                ago[name] = parse_span(text)
            except ValueError as exc:
                raise ValueError(f"{name}: {exc}") from exc
    if ago["until"] >= ago["since"]:
        raise ValueError("until is as long ago as since, or longer: the span would be empty")
    service = query.get("service", "")
    if len(service) > MAX_SERVICE:
        raise ValueError(f"service: a name has at most {MAX_SERVICE} characters")
    return Asked(int((wall - ago["since"]) * 1e6), int((wall - ago["until"]) * 1e6), service)
