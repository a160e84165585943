"""The composition root: builds every part, joins them, runs until told to stop, drains.

Clock and chance live here and are handed down. One TaskGroup owns what runs beside the connections: connects to
engines, the pool's sweep, health checks, the policy's watcher.
"""

import asyncio
import contextlib
import ctypes
import gc
import os
import random
import secrets
import signal
import ssl
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import uvloop

from sidecar import installed
from sidecar.admin.app import serve_admin
from sidecar.admin.facts import ControlView, LogFacts, Phase
from sidecar.admin.ready import readiness
from sidecar.control.door import Door
from sidecar.core.breaker import Action, Scope
from sidecar.core.fleet import Fleet
from sidecar.core.quotas.quota import Ledger
from sidecar.downstream.listener import Listener
from sidecar.draws import Quotas
from sidecar.hot_updates import HotUpdates
from sidecar.jwt.verifier import KeysView, TokenVerifier
from sidecar.kernel.ids import ServiceName
from sidecar.logbook import Logbook
from sidecar.policy.errors import PolicyErrors
from sidecar.policy.load import single
from sidecar.policy.schema import Service, Snapshot
from sidecar.policy.store import PolicyStore
from sidecar.proxy.pipeline import Pipeline
from sidecar.rollouts import Rollouts
from sidecar.routes import Routes
from sidecar.settings import Listen, Settings, UsageError
from sidecar.telemetry.logs import Logs
from sidecar.telemetry.metrics import Metrics
from sidecar.telemetry.recorder import TelemetryRecorder
from sidecar.telemetry.tally import Tally
from sidecar.telemetry.writer import LineWriter
from sidecar.templates import Templates
from sidecar.tokens.counter import Counter
from sidecar.txlog.log import State
from sidecar.txlog.replica import Replica
from sidecar.upstream.ask import ask
from sidecar.upstream.load import LoadReader
from sidecar.upstream.pool import Pool
from sidecar.watch import PolicyWatcher, read_policy
from sidecar.zones import Zones

if TYPE_CHECKING:
    from sidecar.control.server import Control
    from sidecar.control.xds.server import Xds

_SWEEP_S = 0.5  # of idle engine connections: they may be this much older than their limit
_TICK_S = 1.0  # of the detector: how often it learns what is normal
_TOKENIZERS_S = 10.0  # for a policy's tokenizers at the start; prompts are estimated until they are there
# A request allocates little that lives, so young collections find nothing; fewer of them cost less.
_GC_YOUNG = 50_000
_M_MMAP_THRESHOLD = -3  # malloc.h
_LARGE_BYTES = 128 * 1024  # glibc's own value at start


class Running:
    """A sidecar that serves: its addresses, its parts, and the way to end it. The admin pages' `Facts`."""

    def __init__(
        self,
        fleet: Fleet,
        store: PolicyStore,
        metrics: Metrics,
        recorder: TelemetryRecorder,
        logs: Logs,
        pool: Pool,
        logbook: Logbook,
        routes: Routes,
    ) -> None:
        self.fleet = fleet
        self.store = store
        self.metrics = metrics
        self.recorder = recorder
        self.logs = logs
        self.pool = pool
        self.phase = Phase.STARTING
        self.logbook = logbook
        self.routes = routes
        self.rollouts: Rollouts | None = None
        self.models: HotUpdates | None = None
        self.descriptors: Control | None = None
        self.envoys: Xds | None = None
        self.relays = True
        self.shares_salts = False
        self.proxy_port = 0
        self.admin_port: int | None = None
        self.pipeline: Pipeline
        self.templates: Templates
        self.verifier: TokenVerifier
        self.counter: Counter
        self.tokenizers_read = asyncio.Event()
        self.listener: Listener
        self.zones: Zones
        self.watcher: PolicyWatcher | None = None
        self.stopping = asyncio.Event()
        self._lost_nodes: set[str] = set()
        self._loop = asyncio.get_running_loop()

    def now(self) -> float:
        """The loop's monotonic seconds: the clock of everything here."""
        return self._loop.time()

    def wall(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def drain(self) -> None:
        """Begin to stop; again is harmless."""
        if self.phase is not Phase.DRAINING:
            self.phase = Phase.DRAINING
            self.logs.event.info("draining", live=self.pipeline.live)
            if self.descriptors is not None:
                self.descriptors.drain()
        self.stopping.set()

    @property
    def live(self) -> int:
        """Requests under way."""
        return self.pipeline.live

    @property
    def drained(self) -> bool:
        """Whether nothing is left to wait for."""
        return self.phase is Phase.DRAINING and not self.pipeline.live and (self.pipeline.draining or not self.relays)

    def override(self, scope: Scope, key: str, action: Action, by: str, for_s: float) -> bool:
        """Obey an operator, and tell all sidecars; False: nobody knows `key`."""
        moved = self.fleet.override(scope, key, action, self.now(), by, for_s)
        if moved is None:
            return False
        for transition in moved:
            self.recorder.transition(transition)
        self.logbook.order(scope, key, action, by, for_s)
        return True

    @property
    def ledger(self) -> Ledger | None:
        """The token budgets, as operators look into them."""
        return self.pipeline.ledger if self.relays else None

    @property
    def keys(self) -> list[KeysView]:
        """The keys that tokens are held against."""
        return self.verifier.views()

    def why_not_counted(self, service: str) -> str:
        """Why a service's tokenizer is not used."""
        return self.counter.why_not(service)

    @property
    def control(self) -> ControlView | None:
        """The descriptor stream's port, as operators see it."""
        control = self.descriptors
        return None if control is None else ControlView(control.address, control.streams)

    @property
    def xds(self) -> ControlView | None:
        """The xDS server's port, as operators see it."""
        envoys = self.envoys
        return None if envoys is None else ControlView(envoys.address, envoys.streams)

    def updated(self, result: str) -> None:
        """Count what became of an update of a routing table."""
        self.metrics.route_update(result)

    @property
    def log(self) -> LogFacts:
        """The transaction log, as operators look into it."""
        return self.logbook

    async def exposition(self) -> tuple[bytes, str]:
        """The metrics' text and its content type."""
        return await self.metrics.render()

    def apply(self, snapshot: Snapshot) -> None:
        """Put a policy in force for every request that starts from now on."""
        if not self.relays:  # no request waits for an endpoint
            snapshot = msgspec.structs.replace(snapshot, ready_when="always")
        self.store.swap(snapshot)
        routed, made = self.routes.files(snapshot)
        for transition in self.fleet.apply(routed, self.now(), made):
            self.recorder.transition(transition)
        self.routes.turn()
        self.pipeline.ledger.use(snapshot.quotas, self.now())
        self.pipeline.policy_changed()
        self.metrics.policy_load(True)
        self.metrics.retain(self.fleet)
        services = self.fleet.services.values()
        self.pool.keep_only(endpoint for service in services for endpoint in service.policy.endpoints)
        self.templates.keep_only(endpoint for service in services for endpoint in service.policy.endpoints)
        self.pipeline.verifier = self.verifier.use(snapshot.identity.jwt)
        if self.relays:
            self.counter.use(snapshot.services, self.tokenizers_read.set)
        for warning in snapshot.warnings:
            self.logs.event.warning("policy_warning", warning=warning)
        for service in self.fleet.services.values() if self.relays else ():
            if service.salts and not self.shares_salts:
                self.logs.event.warning(
                    "cache_salts_not_shared",
                    service=service.name,
                    hint="give all sidecars one SIDECAR_CACHE_SALT_KEY: a tenant's cache is then the same behind each",
                )
            if service.policy.breakers.node.mode == "enforce" and 0 < len(service.nodes) <= service.roster.minimum:
                # The default, and right for a lone engine without a fallback; but nobody should have to find out.
                self.logs.event.warning(
                    "breaker_never_opens",
                    service=service.name,
                    endpoints=len(service.nodes),
                    hint="breakers.node.min_closed_ratio keeps every endpoint closed; 0 lets it open",
                )
        if self.envoys is not None:
            self.envoys.changed()
        self.logs.event.info("policy_applied", version=snapshot.version, services=len(snapshot.services))

    def put(self, policy: Service) -> None:
        """Put one service's routes in force: at its own cost, however many others there are."""
        known = self.fleet.services.get(ServiceName(policy.name))
        before = None if known is None else known.policy
        for transition in self.fleet.put(policy, self.now()):
            self.recorder.transition(transition)
        if before is None or before.endpoints is not policy.endpoints:
            self.templates.add(policy.endpoints)
        if before is None:
            self.pipeline.policy_changed()
        elif before.endpoints is not policy.endpoints:
            self.pool.let_go(before.endpoints, policy.endpoints)
            self._lost_nodes.add(policy.name)

    def forget_lost(self) -> None:
        """Drop the series of endpoints that left: all that did since the last time, since each costs a look at all."""
        if self._lost_nodes:
            lost, self._lost_nodes = self._lost_nodes, set()
            self.metrics.retain(self.fleet, lost)

    def refuse(self, error: str) -> None:
        """A policy that cannot be taken: the last good one stays."""
        self.store.refuse(error)
        self.metrics.policy_load(False)
        self.logs.event.error("policy_refused", error=error, kept=self.store.current.version)


@contextlib.contextmanager
def _listening(where: Listen, flag: str) -> Iterator[None]:
    """Whatever goes wrong there is an OSError that names place and flag: asyncio's names neither as they were given."""
    try:
        yield
    except OSError as exc:
        words = os.strerror(exc.errno) if exc.errno is not None and exc.errno > 0 else exc.strerror or str(exc)
        raise OSError(f"cannot listen at {where} ({flag}): {words}") from exc


@contextlib.asynccontextmanager
async def serving(settings: Settings, snapshot: Snapshot | None = None, *, log_fd: int = 1) -> AsyncIterator[Running]:
    """A sidecar that accepts traffic while the context lasts. `snapshot` replaces the policy that `settings` name.

    Raises OSError where an address or a certificate is not to be had, PolicyErrors or UsageError where there is no
    policy to begin with.
    """
    path = settings.policy if snapshot is None else None
    if path is not None:
        first = read_policy(path, upstreams=settings.upstreams)
    else:
        first = snapshot or _without_files(settings)
    tls = _tls(settings)
    loop = asyncio.get_running_loop()
    metrics = Metrics(build=installed.number())
    writer = LineWriter(log_fd)
    logs = Logs(
        writer,
        time.time,
        format=settings.log_format,
        level=settings.log_level,
        access=settings.access_log,
        fixed={"pod": settings.pod_name, "node": settings.node_name, "zone": settings.zone},
    )
    replica = Replica(
        settings.observer,
        clock=loop.time,
        chance=random.random,
        new_tx=lambda: secrets.token_bytes(16),
        tell=lambda transition: recorder.transition(transition),
    )
    recorder = TelemetryRecorder(metrics, logs, time.time, replica.transition)
    replica.fleet = fleet = Fleet(random.random, secrets.token_bytes(32), replica)
    logbook = Logbook(
        replica, Tally(metrics), logs, clock=loop.time, wall=time.time, chance=random.random, tell=recorder.transition
    )
    routes = Routes(
        replica,
        use=lambda policy: running.put(policy),
        clock=loop.time,
        new_id=lambda: secrets.token_bytes(16),
        say=logbook.say,
    )
    templates = Templates(time.time, logbook.say)
    verifier = TokenVerifier(loop, random.random, logbook.say)
    first = verifier.read(templates.read(first))
    counter = Counter(loop, time.perf_counter, logbook.say, salt=secrets.randbits(62))
    failure: BaseException | None = None
    # A TaskGroup wraps what its body raises into a group; the caller shall get it as it was.
    with logs:
        async with asyncio.TaskGroup() as tasks:
            pool = Pool(loop, tasks, recorder)
            running = Running(fleet, PolicyStore(first), metrics, recorder, logs, pool, logbook, routes)
            running.pipeline = Pipeline(
                running.store,
                running.fleet,
                pool,
                recorder,
                loop,
                now_wall=time.time,
                new_id=_new_id,
                on_crash=lambda exc: logs.event.error("request_crashed", exc_info=exc),
                templates=templates,
                counter=counter,
                salt_key=settings.cache_salt_key.encode() or secrets.token_bytes(32),
            )
            running.listener = Listener(
                running.pipeline, tls=tls, trusted=settings.trusted, max_connections=settings.max_connections
            )
            running.templates = templates
            running.verifier = verifier
            running.counter = counter
            running.relays = settings.relay
            running.shares_salts = bool(settings.cache_salt_key)
            if settings.redis_note:
                logs.event.warning("log_local", error=settings.redis_note)
            running.apply(first)
            _watch_gauges(running)
            metrics.watch("log_lines_dropped", lambda: writer.dropped)
            load = LoadReader(
                running.fleet,
                pool,
                loop,
                recorder=recorder,
                successes=lambda node: metrics.successes(node.service, node.version, node.key),
                members=lambda: replica.members,
            )
            beside = [
                tasks.create_task(_sweep(pool, loop.time)),
                tasks.create_task(_tick(running)),
                tasks.create_task(templates.run()),
            ]
            if settings.relay:
                beside.append(tasks.create_task(load.run()))
                beside.append(tasks.create_task(verifier.run(partial(ask, pool))))
            if path is not None:
                running.watcher = PolicyWatcher(
                    path,
                    running.store,
                    running.apply,
                    running.refuse,
                    upstreams=settings.upstreams,
                    prepare=lambda read: verifier.read(templates.read(read)),
                )
                beside.append(tasks.create_task(running.watcher.run()))
            try:
                async with contextlib.AsyncExitStack() as stack:
                    await stack.enter_async_context(
                        logbook.kept(settings.redis, settings.redis_prefix, settings.data, tasks)
                    )
                    routes.log = logbook.log
                    rollouts = running.rollouts = Rollouts(
                        routes,
                        routes.change,
                        logbook.log,
                        fleet,
                        observer=replica.observer,
                        tell=logbook.tell_trial,
                        clock=loop.time,
                        server_us=replica.server.now_us,
                        say=logbook.say,
                        moved=metrics.rollout_moved,
                        breathe=lambda: asyncio.sleep(0),
                    )
                    stack.callback(tasks.create_task(rollouts.run()).cancel)
                    if settings.relay:
                        models = running.models = HotUpdates(
                            fleet,
                            routes,
                            ask=partial(ask, pool),
                            order=partial(running.override, Scope.NODE),
                            tasks=tasks,
                            observer=replica.observer,
                            clock=loop.time,
                            server_us=replica.server.now_us,
                            wall=time.time,
                            members=lambda: replica.members,
                            new_id=lambda: secrets.token_hex(4),
                            say=logbook.say,
                            stepped=metrics.model_update_stepped,
                        )
                        beside.append(tasks.create_task(models.run()))
                        stack.callback(models.stop)
                    running.zones = zones = Zones(
                        fleet,
                        routes.standing,
                        routes.change,
                        routes.notice,
                        clock=loop.time,
                        server_us=replica.server.now_us,
                        say=logbook.say,
                    )
                    logbook.on_summary = zones.heard
                    beside.append(tasks.create_task(zones.run()))
                    if settings.relay:
                        quotas = Quotas(
                            running.pipeline.ledger,
                            logbook.log,
                            observer=replica.observer,
                            members=lambda: replica.members,
                            clock=loop.time,
                            server_us=replica.server.now_us,
                            say=logbook.say,
                        )
                        stack.push_async_callback(quotas.leave)
                        stack.callback(tasks.create_task(quotas.run()).cancel)
                        stack.push_async_callback(asyncio.to_thread, counter.join, _TOKENIZERS_S)
                        stack.callback(counter.close)
                        # To read one holds the interpreter: better before anybody is served than while somebody is.
                        with contextlib.suppress(TimeoutError):
                            await asyncio.wait_for(running.tokenizers_read.wait(), _TOKENIZERS_S)
                        where = settings.listen
                        with _listening(where, "--listen"):
                            running.proxy_port = await running.listener.start(where.host, where.port)
                        stack.push_async_callback(running.listener.close)
                    if settings.admin is not None:
                        where = settings.admin
                        elsewhere = _orders_elsewhere(settings)
                        admin = serve_admin(
                            running, where.host, where.port, socket_path=where.path, elsewhere=elsewhere
                        )
                        with _listening(where, "--admin"):
                            running.admin_port = await stack.enter_async_context(admin)
                    if settings.operators is not None:
                        # In a pod the engine waits at it for our drain, as another user: the folder is the permission.
                        orders = serve_admin(running, "", 0, socket_path=settings.operators.path, mode=0o666)
                        with _listening(settings.operators, "--operators"):
                            await stack.enter_async_context(orders)
                    if settings.control is not None:
                        await stack.enter_async_context(_control(running, settings, tasks))
                    if settings.xds is not None:
                        await stack.enter_async_context(_xds(running, settings, settings.xds, tasks))
                    running.phase = Phase.SERVING
                    yield running
            except BaseException as exc:  # noqa: BLE001 - raised again below
                failure = exc
            finally:
                running.phase = Phase.DRAINING
                load.stop()
                pool.close()
                for task in beside:
                    task.cancel()
    if failure is not None:
        raise failure


def _orders_elsewhere(settings: Settings) -> str:
    """What the admin port says to orders; empty where it takes them."""
    if settings.operators is not None:
        return f"orders are taken at {settings.operators} alone"
    return "" if settings.orders else "no orders are taken (--operators off)"


def _door(where: Listen, settings: Settings) -> Door:
    """A place of the control plane's, with the locks that all of them share."""
    return Door(
        host=where.host,
        port=where.port,
        tls_cert=settings.control_tls_cert,
        tls_key=settings.control_tls_key,
        tls_ca=settings.control_tls_ca,
        token=settings.control_token,
        token_file=settings.control_token_file,
        local=settings.operators is None and settings.orders,
    )


@contextlib.asynccontextmanager
async def _control(running: Running, settings: Settings, tasks: asyncio.TaskGroup) -> AsyncIterator[None]:
    """The descriptor stream, where the settings have a place for it."""
    where = settings.control
    if where is None:
        yield
        return
    # With gRPC: 20 MB, and a tenth of a second of a start that does not need it.
    from sidecar.control import server

    door = _door(where, settings)
    async with server.serving(
        running.routes, door, tasks, running.logbook.say, running.metrics.route_update
    ) as running.descriptors:
        yield


@contextlib.asynccontextmanager
async def _xds(running: Running, settings: Settings, where: Listen, tasks: asyncio.TaskGroup) -> AsyncIterator[None]:
    """The routing tables for Envoys. None is told anything before the log was read once: it may know more than we."""
    # With gRPC, and Envoy's messages.
    from sidecar.control.xds import server
    from sidecar.control.xds.build import Where

    door = _door(where, settings)
    theirs = settings.xds_listener
    async with server.serving(
        running.routes,
        door,
        tasks,
        running.logbook.say,
        clock=time.monotonic,
        listen=None if theirs is None else Where(theirs.host, theirs.port),
        begin=running.logbook.log.learnt,
        pushed=running.metrics.xds_push,
    ) as running.envoys:
        yield


def _without_files(settings: Settings) -> Snapshot:
    if settings.upstreams:
        return single(settings.upstreams)
    if "://" in settings.redis:
        return Snapshot(version=1, services=())  # the routing tables of a log that is shared name them
    raise UsageError(
        "nothing to forward to: give --upstream URL (an engine), --policy FILE, or --redis URL (a log whose routing "
        "tables name engines)"
    )


def run(settings: Settings) -> int:
    """`sidecar run`, and `sidecar xds`: serve until SIGTERM or SIGINT, drain; the exit code."""
    verb = "run" if settings.relay else "xds"
    try:
        uvloop.run(_serve_until_stopped(settings))
    except UsageError as exc:
        print(f"sidecar {verb}: {exc}", file=sys.stderr)
        return 2
    except (PolicyErrors, OSError) as exc:
        print(f"sidecar {verb}: {exc}", file=sys.stderr)
        return 1
    return 0


async def _serve_until_stopped(settings: Settings) -> None:
    # Before anything listens: whoever waits for the port may signal at once.
    signals = Signals()
    async with serving(settings) as running:
        _tune_gc()
        _hold_allocator()
        _say_started(running, settings)
        await signals.until_stopped(running)
        if settings.relay:
            await running.listener.drain(settings.settle_s, settings.drain_s)
    signals.ignore()


class Signals:
    """SIGTERM and SIGINT ask for a drain, once: a second signal ends the process at once. Needs the main thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._asked = False
        self._running: Running | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal)
        # Where no watcher takes it there is nothing to reload; the default would end the process.
        self._loop.add_signal_handler(signal.SIGHUP, self._on_hangup)

    async def until_stopped(self, running: Running) -> None:
        """Wait for a signal, or for the admin's word, to drain."""
        self._running = running
        if self._asked:
            running.drain()
        await running.stopping.wait()

    def ignore(self) -> None:
        """All is done: a signal that comes now (kubelet's, after a preStop that drained) must not make it a failure."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)

    def _on_signal(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)
        self._asked = True
        if self._running is not None:
            self._running.drain()

    def _on_hangup(self) -> None:
        if self._running is not None:
            self._running.logs.event.info("nothing_to_reload")


def _say_started(running: Running, settings: Settings) -> None:
    listen = str(msgspec.structs.replace(settings.listen, port=running.proxy_port)) if settings.relay else "off"
    admin = "off"
    if settings.admin is not None:
        admin = str(msgspec.structs.replace(settings.admin, port=running.admin_port or 0))
    # Not an event: a log level must not hide it, since with port 0 nobody else knows the addresses.
    running.logs.line(
        "info",
        "started",
        {
            "listen": listen,
            "admin": admin,
            "control": "off" if running.descriptors is None else running.descriptors.address,
            "xds": "off" if running.envoys is None else running.envoys.address,
            "tls": settings.tls_cert is not None,
            "compiled": installed.compiled(),
        },
    )


async def _sweep(pool: Pool, now: Callable[[], float]) -> None:
    while True:
        await asyncio.sleep(_SWEEP_S)
        pool.sweep(now())


async def _tick(running: Running) -> None:
    while True:
        await asyncio.sleep(_TICK_S)
        try:
            for transition in running.fleet.tick(running.now()):
                running.recorder.transition(transition)
            running.logbook.tick(running.fleet, running.now())
            running.forget_lost()
        except Exception as exc:  # noqa: BLE001 - a second's learning is lost; the fixed rules judge on, and traffic flows
            running.logs.event.error("tick_crashed", exc_info=exc)


def _watch_gauges(running: Running) -> None:
    metrics = running.metrics
    metrics.watch_fleet(running.fleet, running.now)
    metrics.watch_desk(running.routes)
    metrics.watch_ledger(running.pipeline.ledger)
    metrics.watch_jwt(running.verifier)
    metrics.watch_counter(running.counter)
    metrics.watch("requests_in_flight", lambda: running.pipeline.live)
    metrics.watch("downstream_connections", lambda: running.listener.connections)
    metrics.watch("downstream_rejected", lambda: running.listener.rejected)
    metrics.watch("upstream_connections", lambda: running.pool.open_connections)
    metrics.watch("ready", lambda: readiness(running.phase, running.store.current, running.fleet, running.now()).ready)
    metrics.watch("draining", lambda: running.phase is Phase.DRAINING)
    metrics.watch("policy_version", lambda: running.store.current.version)
    book, replica, counts = running.logbook, running.logbook.replica, running.logbook.replica.counts
    metrics.watch("log_up", lambda: book.log.state is State.UP)
    metrics.watch("log_local", lambda: book.local)
    metrics.watch("log_read_age", lambda: max(0.0, running.now() - book.log.read_at))
    metrics.watch("log_lag", lambda: book.log.lag_records)
    metrics.watch("log_members", lambda: replica.members)
    metrics.watch("log_registers", lambda: len(replica.fold))
    metrics.watch("log_to_tell", lambda: len(replica.ring))
    metrics.watch("log_to_tell_dropped", lambda: replica.ring.dropped)
    metrics.watch("log_shares_dropped", lambda: counts.dropped_shares)
    metrics.watch("log_appended", lambda: counts.appended)
    metrics.watch("log_applied", lambda: counts.applied)
    metrics.watch("log_cas_losses", lambda: counts.cas_losses)
    metrics.watch("log_fenced", lambda: counts.fenced)
    metrics.watch("log_floor_refusals", lambda: counts.floor)
    metrics.watch("log_suspected", lambda: counts.suspected)
    metrics.watch("log_resyncs", lambda: counts.resyncs)
    metrics.watch("log_unreadable", lambda: book.log.unreadable + book.unreadable_summaries)
    metrics.watch("log_crashes", lambda: book.log.crashes)
    # Both ports may be off; whoever opens one tells where its numbers are.
    metrics.watch("control_streams", lambda: running.descriptors.streams if running.descriptors is not None else 0)
    metrics.watch("control_lagged", lambda: running.descriptors.counts.lagged if running.descriptors is not None else 0)
    metrics.watch("xds_clients", lambda: running.xds.streams if running.xds is not None else 0)
    metrics.watch("xds_acks", lambda: running.envoys.counts.acks if running.envoys is not None else 0)
    metrics.watch("xds_nacks", lambda: running.envoys.counts.nacks if running.envoys is not None else 0)
    metrics.watch("xds_left_out", lambda: running.envoys.hub.left_out if running.envoys is not None else 0)


def _tls(settings: Settings) -> ssl.SSLContext | None:
    if settings.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as exc:
        # Python names neither file.
        raise OSError(f"cannot use certificate {settings.tls_cert} with key {settings.tls_key}: {exc}") from exc
    context.set_alpn_protocols(["http/1.1"])
    return context


def _tune_gc() -> None:
    """What was made at start lives for ever: the collector need not look at it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_YOUNG, 50, 50)


def _hold_allocator() -> None:
    """Keep glibc's threshold for large blocks where it starts.

    It would move up with every large block that is freed, to 32 MiB; bodies and buffers then lie in the heap among what
    lives long, and resident memory creeps by megabytes a minute though nothing leaks.
    """
    try:
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
    except (OSError, AttributeError):
        pass  # another C library, with its own ways


def _new_id() -> bytes:
    return b"%032x" % random.getrandbits(128)
