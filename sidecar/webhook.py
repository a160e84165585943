"""`sidecar webhook`: the mutating admission webhook, over TLS, as an API server wants it.

1. `POST /inject` is an AdmissionReview; what it means is `sidecar.inject.review`'s. `/livez`, `/readyz` and `/metrics`
   are on the same port: kubelet probes by HTTPS without looking at certificates.
2. Certificates are looked at every `LOOK_S`, and read again when they change: who makes them (cert-manager, a rotation)
   restarts nobody. A pair that does not fit is told, and the last one serves.
3. A fault of ours lets the pod pass, with a warning, unless `--strict`: then it is refused. The API server's own
   `failurePolicy` says what holds while nobody answers.
4. A body is bounded by what an API server can send: it takes 3 MiB itself, and sends a pod that is made once. So is its
   time, and that of connections that ask nothing: anybody in the cluster reaches the port, and 4 MiB made for it are a
   hundred of objects.
"""

import argparse
import asyncio
import signal
import ssl
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, get_args

import msgspec
from aiohttp import web

from sidecar.inject.review import Result, Rules, failed, question, reviewed
from sidecar.injection import defaults_from
from sidecar.settings import Listen, UsageError, parse_listen

OK: Final = 0
FAILED: Final = 1

MAX_BYTES: Final = 4 << 20
LOOK_S: Final = 10.0
BODY_S: Final = 10.0
"""How long a question may take to come: an API server waits 30 s at most for its answer, and 5 s by our manifests."""
IDLE_S: Final = 120.0
"""How long a connection is kept that asks nothing, or never gets to the end of its head; an API server keeps 90 s."""
STOP_S: Final = 5.0
"""How long reviews under way may take at the end: they take a millisecond."""

Say = Callable[[str, dict[str, object]], None]


class Certificates:
    """The listener's certificate and key, as files that change."""

    def __init__(self, cert: Path, key: Path) -> None:
        """OSError for files that are none."""
        self._cert = cert
        self._key = key
        self._seen = self._look()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(cert, key)

    def refresh(self) -> bool:
        """Whether there is a new pair, which new connections get. OSError for one that is none: the last one serves."""
        seen = self._look()
        if seen == self._seen:
            return False
        # Tried apart: a context that was given half a pair has lost the other one.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self._cert, self._key)
        self.context.load_cert_chain(self._cert, self._key)
        self._seen = seen
        return True

    def _look(self) -> tuple[tuple[int, int, int], ...]:
        # A mounted secret is a link that is changed to another folder: another inode.
        looks = (path.stat() for path in (self._cert, self._key))
        return tuple((look.st_ino, look.st_mtime_ns, look.st_size) for look in looks)


class Webhook:
    """The pages."""

    def __init__(self, rules: Rules, say: Say, body_s: float = BODY_S) -> None:
        self._rules = rules
        self._body_s = body_s
        self._say = say
        self._counts: Counter[str] = Counter()

    def application(self) -> web.Application:
        """What is served."""
        app = web.Application(client_max_size=MAX_BYTES)
        app.router.add_post("/inject", self._inject)
        app.router.add_get("/livez", self._well)
        app.router.add_get("/readyz", self._well)
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _inject(self, request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(self._body_s):
                body = await request.read()
        except TimeoutError:
            self._counts["malformed"] += 1
            return web.Response(status=408, text="the question does not end\n", headers={"connection": "close"})
        try:
            review = question(body)
        except (ValueError, RecursionError) as exc:
            self._counts["malformed"] += 1
            return web.Response(status=400, text=f"{exc}\n")
        try:
            verdict = reviewed(review, self._rules, len(body))
        except Exception as exc:  # noqa: BLE001 - whatever is wrong with us, the pod's maker is to have an answer
            self._counts["failed"] += 1
            words = (f"the webhook failed: {type(exc).__name__}: {exc}",)
            verdict = failed(review.request.uid, review.request.namespace, words, self._rules)
        else:
            self._counts[verdict.result] += 1
        if verdict.result != "unchanged":
            self._say("reviewed", {"pod": verdict.pod, "result": verdict.result, "words": verdict.words})
        return web.Response(body=msgspec.json.encode(verdict.answer), content_type="application/json")

    async def _well(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _metrics(self, request: web.Request) -> web.Response:
        lines = [
            "# HELP sidecar_webhook_reviews_total Pods that were judged.",
            "# TYPE sidecar_webhook_reviews_total counter",
        ]
        for result in (*get_args(Result), "failed", "malformed"):
            lines.append(f'sidecar_webhook_reviews_total{{result="{result}"}} {self._counts[result]}')
        return web.Response(text="\n".join((*lines, "")), headers={"content-type": "text/plain; version=0.0.4"})


@asynccontextmanager
async def serving(
    listen: Listen,
    certificates: Certificates,
    rules: Rules,
    say: Say,
    *,
    look_s: float = LOOK_S,
    body_s: float = BODY_S,
    idle_s: float = IDLE_S,
) -> AsyncIterator[int]:
    """The webhook at `listen` while the context lasts; gives the port. OSError where that cannot be had."""
    runner = web.AppRunner(
        Webhook(rules, say, body_s).application(),
        access_log=None,
        handle_signals=False,
        shutdown_timeout=STOP_S,
        keepalive_timeout=idle_s,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, listen.host, listen.port, ssl_context=certificates.context)
        await site.start()
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(_follow(certificates, say, look_s))
            try:
                yield site.port
            finally:
                following.cancel()
    finally:
        await runner.cleanup()


async def _follow(certificates: Certificates, say: Say, look_s: float) -> None:
    told = ""
    while True:
        await asyncio.sleep(look_s)
        try:
            if await asyncio.to_thread(certificates.refresh):
                say("certificate_read", {})
            told = ""
        except OSError as exc:
            if (words := str(exc)) != told:
                say("certificate_refused", {"why": words})
            told = words


def serve(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. UsageError for flags that mean nothing."""
    listen = parse_listen(arguments.listen, "--listen")
    if listen.path:
        raise UsageError("--listen: API servers connect by HOST:PORT")
    rules = Rules(defaults_from(arguments), arguments.unlabelled, arguments.strict)
    try:
        asyncio.run(_until_stopped(listen, Path(arguments.tls_cert), Path(arguments.tls_key), rules))
    except OSError as exc:
        print(f"sidecar webhook: {exc}", file=sys.stderr)
        return FAILED
    return OK


async def _until_stopped(listen: Listen, cert: Path, key: Path, rules: Rules) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    try:
        certificates = await asyncio.to_thread(Certificates, cert, key)
    except OSError as exc:
        raise OSError(f"cannot use certificate {cert} with key {key}: {exc}") from exc
    async with serving(listen, certificates, rules, say) as port:
        say("started", {"listen": str(Listen(listen.host, port))})
        await stopped.wait()


def say(event: str, fields: dict[str, object]) -> None:
    """A line of JSON, for whoever collects the webhook's output."""
    print(msgspec.json.encode({"event": event, **fields}).decode(), flush=True)
