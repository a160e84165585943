"""The admin pages: aiohttp, beside the data path and never in it.

Looking is for everybody who reaches the port; changing (`POST`) is for operators on this machine (see `operator`). A
socket that other users may connect to is shared with an engine: those may drain, and our own user may do the rest.
"""

import asyncio
import math
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from errno import EADDRINUSE
from itertools import islice
from pathlib import Path
from socket import AF_UNIX, SO_PEERCRED, SOCK_STREAM, SOL_SOCKET, socket
from struct import Struct
from types import TracebackType

from aiohttp import web

from sidecar.admin import views
from sidecar.admin.admission import AdmissionPage
from sidecar.admin.answer import encoded, error, page
from sidecar.admin.evidence import EvidencePage
from sidecar.admin.facts import Facts
from sidecar.admin.log import LogPages
from sidecar.admin.models import ModelPages
from sidecar.admin.operator import FORWARDED, why_not
from sidecar.admin.order import ACTIONS, parse_order
from sidecar.admin.quotas import QuotaPages
from sidecar.admin.ready import readiness
from sidecar.admin.routes import RoutePages
from sidecar.core.breaker import Scope
from sidecar.policy.duration import parse_seconds

POLL_S = 0.1
"""How often those who wait for the end of a drain look."""

MOST_WAIT_S = 3600.0

MOST_WAITING = 16
"""Who may wait at once: two hooks of a pod, and a few who look on. Each looks ten times a second, beside requests."""

STOP_S = 1.0
"""How long a page under way may take when the server stops: all but the metrics take a few milliseconds."""

SLICE = 200
"""Breakers shown before the loop may go on: about a millisecond."""

OWN = 0o600
"""The mode of a socket that our own user alone, and root, may connect to."""

_PEER = Struct("iii")  # process, user, group

LOOKING = ("GET", "HEAD", "OPTIONS")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AdminServer:
    """The admin pages on a socket, while the context lasts; entering it gives the port (0 on a unix socket)."""

    def __init__(self, facts: Facts, host: str, port: int, socket_path: str, mode: int, elsewhere: str) -> None:
        self._host = host
        self._port = port
        self._socket_path = socket_path
        self._mode = mode
        self._runner = web.AppRunner(
            application(facts, elsewhere, bool(socket_path) and mode != OWN),
            access_log=None,
            handle_signals=False,
            shutdown_timeout=STOP_S,
        )

    async def __aenter__(self) -> int:
        """Listen. OSError if the address cannot be had."""
        await self._runner.setup()
        try:
            if self._socket_path:
                place = await asyncio.to_thread(_listening_place, self._socket_path, self._mode)
                await web.SockSite(self._runner, place).start()
                return 0
            tcp = web.TCPSite(self._runner, self._host, self._port)
            await tcp.start()
            return tcp.port
        except BaseException:
            await self._runner.cleanup()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening; pages under way get `STOP_S`."""
        await self._runner.cleanup()
        if self._socket_path:
            await asyncio.to_thread(Path(self._socket_path).unlink, missing_ok=True)


def serve_admin(
    facts: Facts, host: str, port: int, *, socket_path: str = "", mode: int = OWN, elsewhere: str = ""
) -> AdminServer:
    """`async with serve_admin(facts, host, port) as bound_port`. Port 0 picks one; a `socket_path` replaces both.

    `mode`: who may connect to the socket; if others than our own user, those may look and drain. `elsewhere`: orders
    are not taken here, and these words say where they are.
    """
    return AdminServer(facts, host, port, socket_path, mode, elsewhere)


def application(facts: Facts, elsewhere: str = "", shared: bool = False) -> web.Application:
    """The pages over `facts`; with `elsewhere`, for looking alone; `shared`: on a socket that is not ours alone."""
    pages = _Pages(facts)
    refusing = [_only_looking(elsewhere)] if elsewhere else []
    app = web.Application(middlewares=[_errors_as_json, *refusing, *([_only_draining] if shared else [])])
    app.router.add_get("/livez", pages.livez)
    app.router.add_get("/readyz", pages.readyz)
    app.router.add_get("/healthz", pages.healthz)
    app.router.add_get("/metrics", pages.metrics)
    app.router.add_get("/breakers", pages.breakers)
    # A key holds slashes (`/run/vllm.sock`, `POST /v1/completions`), encoded or not, and anything a client may send.
    app.router.add_post(r"/breakers/{scope}/{key:(?s:.+)}/{action}", pages.override)
    app.router.add_get(r"/sessions/{id:(?s:.+)}", pages.sessions)
    app.router.add_get("/policy", pages.policy)
    app.router.add_post("/drain", pages.drain)
    app.router.add_get("/drained", pages.drained)
    RoutePages(facts, _require_operator).register(app)
    ModelPages(facts, _require_operator).register(app)
    QuotaPages(facts).register(app)
    AdmissionPage(facts).register(app)
    # Before the registers' histories: its name is no register's.
    EvidencePage(facts).register(app)
    LogPages(facts).register(app)
    return app


class _Pages:
    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._waiting = 0

    async def livez(self, request: web.Request) -> web.Response:
        return page({"live": True})

    async def readyz(self, request: web.Request) -> web.Response:
        facts = self._facts
        verdict = readiness(facts.phase, facts.store.current, facts.fleet, facts.now())
        return page(verdict, 200 if verdict.ready else 503)

    async def healthz(self, request: web.Request) -> web.Response:
        health = views.health(self._facts)
        return page(health, 200 if health.status == "ready" else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        body, content_type = await self._facts.exposition()
        return web.Response(body=body, headers={"content-type": content_type})

    async def breakers(self, request: web.Request) -> web.Response:
        lines = views.breakers(self._facts)
        # There may be 20 MB of them: grown in place, the whole is never copied at a stretch.
        body = bytearray(b"[")
        while some := list(islice(lines, SLICE)):
            if len(body) > 1:
                body += b","
            body += views.encode(some)[1:-1]
            await asyncio.sleep(0)
        body += b"]"
        return encoded(body)

    async def override(self, request: web.Request) -> web.Response:
        _require_operator(request)
        scope, key, action = (request.match_info[name] for name in ("scope", "key", "action"))
        known = ACTIONS.get(action)
        if scope not in set(Scope) or known is None:
            words = f"scopes are {', '.join(Scope)}; actions are {', '.join(ACTIONS)}"
            return error(404, words, "unknown_action")
        try:
            order = parse_order(known, request.query)
        except ValueError as exc:
            return error(400, str(exc), "bad_order")
        if not self._facts.override(Scope(scope), key, order.action, order.by, order.for_s):
            return error(404, "no such breaker", "unknown_breaker")
        return page(list(views.breakers(self._facts, scope, key)))

    async def sessions(self, request: web.Request) -> web.Response:
        lines = views.sessions(self._facts, request.match_info["id"])
        return page(lines) if lines else error(404, "no such session", "unknown_session")

    async def policy(self, request: web.Request) -> web.Response:
        return page(views.policy(self._facts))

    async def drain(self, request: web.Request) -> web.Response:
        _require_operator(request)
        self._facts.drain()
        return page({"draining": True}, 202)

    async def drained(self, request: web.Request) -> web.Response:
        """Whether the last reply has ended; asks that bring a `wait` wait for it. Polled, as the listener does."""
        facts = self._facts
        if "wait" not in request.query:
            return page({"drained": facts.drained, "live": facts.live})
        try:
            wait_s = min(parse_seconds(request.query["wait"]), MOST_WAIT_S)
        except ValueError as exc:
            return error(400, f"wait: {exc}", "bad_wait")
        if self._waiting >= MOST_WAITING:
            return error(503, f"{MOST_WAITING} wait for the end of a drain already", "too_many_wait")
        self._waiting += 1
        try:
            for _ in range(math.ceil(wait_s / POLL_S)):
                if facts.drained or request.transport is None:  # or nobody is there any more
                    break
                await asyncio.sleep(min(POLL_S, wait_s))
        finally:
            self._waiting -= 1
        return page({"drained": facts.drained, "live": facts.live})


def _listening_place(path: str, mode: int) -> socket:
    """A unix socket bound to `path`, for whom `mode` says: whoever may connect may open breakers.

    What a process that died left at `path` is replaced; OSError if a live one listens there, or it is no socket.
    """
    place = socket(AF_UNIX, SOCK_STREAM)
    try:
        # Before it has a name: afterwards there would be a moment in which anybody could connect.
        os.fchmod(place.fileno(), OWN)
        with suppress(FileNotFoundError, ConnectionRefusedError), socket(AF_UNIX, SOCK_STREAM) as probe:
            probe.settimeout(STOP_S)
            probe.connect(path)
            raise OSError(EADDRINUSE, os.strerror(EADDRINUSE), path)
        if Path(path).is_socket():
            Path(path).unlink()
        place.bind(path)
        if mode != OWN:
            Path(path).chmod(mode)  # the umask had its say at `bind`
    except BaseException:
        place.close()
        raise
    return place


def _only_looking(elsewhere: str) -> Callable[..., Awaitable[web.StreamResponse]]:
    @web.middleware
    async def refuse(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method not in LOOKING:
            raise web.HTTPForbidden(text=elsewhere)
        return await handler(request)

    return refuse


@web.middleware
async def _only_draining(request: web.Request, handler: Handler) -> web.StreamResponse:
    """An engine waits for our drain here. What else there is goes to all sidecars, and no engine has a say in that."""
    if request.method not in LOOKING and request.path != "/drain" and _user(request.transport) != os.geteuid():
        words = f"only user {os.geteuid()}, whose the sidecar is, gives orders here; others may drain"
        raise web.HTTPForbidden(text=words)
    return await handler(request)


def _user(transport: asyncio.Transport | None) -> int | None:
    """Who connected to a unix socket, as the kernel has it; None: nobody any more."""
    sock: socket | None = None if transport is None else transport.get_extra_info("socket")
    if sock is None or sock.family != AF_UNIX:
        return None
    user: int = _PEER.unpack(sock.getsockopt(SOL_SOCKET, SO_PEERCRED, _PEER.size))[1]
    return user


def _require_operator(request: web.Request) -> None:
    transport = request.transport
    if transport is None:
        raise web.HTTPForbidden(text="the client left")
    sock: socket | None = transport.get_extra_info("socket")
    reason = why_not(
        transport.get_extra_info("peername"),
        sock is not None and sock.family == AF_UNIX,
        any(name in request.headers for name in FORWARDED),
        request.headers.get("origin"),
        f"{request.scheme}://{request.host}",
    )
    if reason:
        raise web.HTTPForbidden(text=reason)


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as raised:
        if raised.status < 400:
            raise
        words = {403: raised.text, 404: "no such page", 405: "no such method here"}
        code = raised.reason.lower().replace(" ", "_")
        response = error(raised.status, words.get(raised.status) or raised.reason, code)
        if "allow" in raised.headers:
            response.headers["allow"] = raised.headers["allow"]
        return response
