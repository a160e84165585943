"""The cases of `bench.growth`: a request path without sockets over a fleet of a given size, in good and in bad times.

Everything that decides is the real thing, with every breaker on: policy, fleet, pipeline, metrics and access log. Only
the sockets are fakes. Breakers are opened by failures, as in service, for an hour: no wait ends while we measure.
"""

import asyncio
import gc
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from bench.path_cost import ANSWER, BODY, HEAD, _Connector, _Transport
from sidecar.core.breaker import Action, Breaker, Permit, Scope
from sidecar.core.fleet import Fleet
from sidecar.core.pool import Node
from sidecar.core.service import ServiceState
from sidecar.downstream.connection import ClientConnection
from sidecar.kernel.errors import Reason
from sidecar.kernel.ids import EndpointKey, SessionId, VersionName
from sidecar.kernel.outcome import Ending, Result
from sidecar.policy.schema import Breakers, Endpoint, NodeBreaker, Seconds, Service, SessionBreaker, Snapshot
from sidecar.policy.store import PolicyStore
from sidecar.proxy.pipeline import Pipeline
from sidecar.proxy.ports import AttemptRecord, Recorder, RequestRecord, Sink
from sidecar.telemetry.logs import Logs
from sidecar.telemetry.metrics import Metrics
from sidecar.telemetry.recorder import TelemetryRecorder
from sidecar.telemetry.writer import LineWriter

HOUR = Seconds(3600)
FLOORED = NodeBreaker(open_s=HOUR, open_max_s=HOUR)
NO_FLOOR = NodeBreaker(open_s=HOUR, open_max_s=HOUR, min_closed_ratio=0.0)
SESSION = SessionBreaker(open_s=HOUR, open_max_s=HOUR)
FEW_NAMES = 200  # more than the metrics have labels for; all further names share one
SEED = 20  # which endpoints and sessions are asked, and in which order, is the same in every run

Ask = Iterator[bytes]


class Engines(_Connector):
    """Every endpoint answers; `asked` is whether a request waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = False

    def open(self, key: EndpointKey, endpoint: Endpoint, connect_s: float, sink: Sink, *, fresh: bool = False) -> None:
        self.asked = True
        super().open(key, endpoint, connect_s, sink, fresh=fresh)


class Witness:
    """The recorder of service, and the count of what clients got: a cost is a figure only for the case it claims."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.statuses: Counter[int] = Counter()

    def attempt(self, record: AttemptRecord) -> None:
        self._recorder.attempt(record)

    def request(self, record: RequestRecord) -> None:
        self.statuses[record.status] += 1
        self._recorder.request(record)

    def transition(self, transition: object, trace: str = "") -> None:
        raise RuntimeError(f"a breaker moved by itself: {transition}")

    def condemned(self, prompt: object) -> None:
        raise RuntimeError(f"a prompt was taken for poison: {prompt}")

    def refused(self, reason: Reason) -> None:
        raise RuntimeError(f"a request was refused by the parser: {reason}")

    def malformed_upstream(self, endpoint: EndpointKey) -> None:
        raise RuntimeError(f"bad bytes from {endpoint}")


class Path:
    """A sidecar without sockets. Needs a running event loop."""

    def __init__(self, *services: Service) -> None:
        loop = asyncio.get_running_loop()
        store = PolicyStore(Snapshot(version=1, services=services))
        self.now = loop.time
        self.fleet = Fleet(random.Random(SEED).random)
        self.fleet.apply(store.current, loop.time())
        self.metrics = Metrics()
        # A writer that is never started: lines are encoded and handed over, and dropped once its little room is full.
        logs = Logs(LineWriter(-1, limit_bytes=1 << 16), time.time, access="all")
        self.witness = Witness(TelemetryRecorder(self.metrics, logs, time.time))
        self._engines = Engines()
        pipeline = Pipeline(
            store,
            self.fleet,
            self._engines,
            self.witness,
            loop,
            now_wall=time.time,
            new_id=lambda: b"%032x" % random.getrandbits(128),
            on_crash=_crash,
        )
        self._client = ClientConnection(pipeline, loop, set(), scheme=b"http", trusted=False)
        self._client.connection_made(_Transport())  # type: ignore[arg-type]
        self._warm_series()

    @property
    def first(self) -> ServiceState:
        return next(iter(self.fleet.services.values()))

    @property
    def nodes(self) -> list[Node]:
        return [node for service in self.fleet.services.values() for node in service.nodes.values()]

    def ask(self, request: bytes) -> None:
        """One request, and its engine's answer if it got to one."""
        engines = self._engines
        engines.asked = False
        self._client.data_received(request)
        if engines.asked:
            engines.last.data_received(ANSWER)

    def bind(self, sessions: Sequence[SessionId]) -> None:
        """Make the first service know `sessions`, each bound to some endpoint."""
        service, now = self.first, self.now()
        homes = itertools.cycle(service.nodes.values())
        for name in sessions:
            session, home = service.session(name, now), next(homes)
            session.node_key, session.version = home.key, home.version

    def break_session(self, name: SessionId) -> None:
        """Failures until the session's breaker is open."""
        service, now = self.first, self.now()
        session = service.session(name, now)
        for _ in range(100):
            permit = service.admit_session(session, now)
            if not isinstance(permit, Permit):
                return
            service.record_session(session, permit, Result.FAILURE, now, Ending.SERVER_ERROR)
        raise RuntimeError(f"the breaker of {name} does not open")

    def _warm_series(self) -> None:
        # An endpoint's series are made at its first attempt: that is paid once and is not what a request costs.
        for node in self.nodes:
            self.witness.attempt(
                AttemptRecord(
                    service=node.service,
                    version=node.version,
                    endpoint=node.key,
                    ending=Ending.COMPLETE,
                    result=Result.SUCCESS,
                    status=200,
                    duration_s=0.1,
                    ttft_s=None,
                    malformed_events=0,
                    reused_connection=True,
                )
            )


@dataclass(frozen=True)
class Case:
    """What grows, to which sizes, and how much dearer the largest may be than the smallest.

    `build` gives a path and an endless supply of requests. `expect` is what clients may get. `stir`: orders to one
    endpoint's breaker, one before each request, in turn.
    """

    name: str
    what: str
    sizes: tuple[int, ...]
    build: Callable[[int], tuple[Path, Ask]]
    bound: float = 1.5
    expect: frozenset[int] = frozenset({200})
    stir: tuple[Action, ...] = ()


def service(
    count: int, name: str = "bench", models: tuple[str, ...] = ("*",), rule: NodeBreaker = FLOORED, **changes: object
) -> Service:
    """`count` endpoints behind `models`; a `split` gives every tenth endpoint the version v2."""
    endpoints = tuple(
        Endpoint(url=f"http://{name}-{number}:8000", version="v2" if "split" in changes and number % 10 == 1 else "v1")
        for number in range(count)
    )
    breakers = Breakers(node=rule, session=SESSION)
    return Service(name=name, models=models, endpoints=endpoints, breakers=breakers, **changes)  # type: ignore[arg-type]


def session_names(count: int) -> list[SessionId]:
    """As long as a UUID."""
    return [SessionId(f"{number:08x}-4b6e-4c1d-9d3e-5b1f0a2c7e88") for number in range(count)]


def asking(sessions: Sequence[str] = ("",), models: Sequence[bytes] = (b"demo",)) -> Ask:
    """Requests of `sessions` ("": of none) for `models`, shuffled and for ever."""
    chance = random.Random(SEED)
    while True:
        session, model = chance.choice(sessions), chance.choice(models)
        yield asked(session, model)


def asked(session: str, model: bytes) -> bytes:
    body = BODY.replace(b'"demo"', b'"%b"' % model)
    head = HEAD if session else HEAD.replace(b"x-session-id: %b\r\n", b"%b")
    return head % (session.encode(), len(body)) + body


def never_seen(prefix: Callable[[random.Random], bytes]) -> Ask:
    """Requests that each name a model nobody named before."""
    chance = random.Random(SEED)
    for number in itertools.count():
        yield asked("", b"%bm%09d" % (prefix(chance), number))


def trip(node: Node, now: float) -> None:
    """Failures until its breaker is open."""
    breaker: Breaker = node.breaker
    for _ in range(1000):
        permit = breaker.acquire(now)
        if not isinstance(permit, Permit):
            return
        breaker.record(permit, Result.FAILURE, now, Ending.SERVER_ERROR)
    raise RuntimeError(f"the breaker of {node.key} does not open")


def stir(path: Path, action: Action) -> None:
    """Move the breaker of one endpoint, so that nothing found out about the others may be kept."""
    path.fleet.override(Scope.NODE, next(iter(path.first.nodes)), action, path.now(), "bench")


def endpoints(count: int) -> tuple[Path, Ask]:
    return Path(service(count)), asking()


def sessions(count: int) -> tuple[Path, Ask]:
    path, names = Path(service(3)), session_names(count)
    path.bind(names)
    return path, asking(names)


def sessions_churning(count: int) -> tuple[Path, Ask]:
    """The table is full: each request brings a new session and drives the oldest out."""
    rule = msgspec.structs.replace(SESSION, max_sessions=count)
    path = Path(msgspec.structs.replace(service(3), breakers=Breakers(node=FLOORED, session=rule)))
    path.bind(session_names(count))
    return path, (asked(f"new-{number:08x}-4b6e-4c1d-9d3e-5b1f0a2c7e88", b"demo") for number in itertools.count())


def services(count: int) -> tuple[Path, Ask]:
    path = Path(*(service(2, f"s{number}", (f"model-{number}",)) for number in range(count)))
    models = [b"model-%d" % number for number in range(count)]
    for model in models:
        # A model's series are made at its first request: paid once, too.
        path.ask(asked("", model))
    return path, asking(models=models)


def services_by_glob(count: int) -> tuple[Path, Ask]:
    path = Path(*(service(2, f"s{number}", (f"team-{number}/*",)) for number in range(count)))
    for number in range(max(2 * count, FEW_NAMES)):
        path.ask(asked("", b"team-%d/warm-%d" % (number % count, number)))
    return path, never_seen(lambda chance: b"team-%d/" % chance.randrange(count))


def endpoints_new_models(count: int) -> tuple[Path, Ask]:
    path = Path(service(count))
    for number in range(FEW_NAMES):
        path.ask(asked("", b"warm-%d" % number))
    return path, never_seen(lambda chance: b"")


def mostly_open(count: int) -> tuple[Path, Ask]:
    """As many breakers open as the floor lets, the first of the policy."""
    path = Path(service(count))
    now = path.now()
    for node in path.nodes:
        if not path.first.roster.may_open():
            break
        trip(node, now)
    return path, asking()


def nearly_all_open(count: int) -> tuple[Path, Ask]:
    path = Path(service(count, rule=NO_FLOOR))
    now = path.now()
    for node in path.nodes[: -max(1, count // 100)]:
        trip(node, now)
    return path, asking()


def all_open(count: int) -> tuple[Path, Ask]:
    path, ask = Path(service(count, rule=NO_FLOOR)), asking()
    now = path.now()
    for node in path.nodes:
        trip(node, now)
    return path, ask


def all_full(count: int) -> tuple[Path, Ask]:
    path = Path(service(count))
    now = path.now()
    for node in path.nodes:
        node.overload_until = now + float(HOUR)
    return path, asking()


def half_of_sessions(count: int) -> tuple[Path, Ask]:
    path, names = sessions(count)[0], session_names(count)
    for name in names[::2]:
        path.break_session(name)
    return path, asking(names)


def canary(count: int, *, open_: bool = False) -> tuple[Path, Ask]:
    path = Path(service(count, split={"v1": 95.0, "v2": 5.0}))
    now, names = path.now(), session_names(100)
    path.bind(names)
    if open_:
        for node in path.nodes:
            if node.version == VersionName("v1") and path.first.roster.may_open():
                trip(node, now)
    return path, asking(names)


def canary_mostly_open(count: int) -> tuple[Path, Ask]:
    return canary(count, open_=True)


ENDPOINTS = (1, 100, 10_000)
SOME = (10, 100, 10_000)
REFUSED = frozenset({503})

CASES = (
    Case("endpoints", "every request draws an endpoint", ENDPOINTS, endpoints),
    Case("sessions", "all known and bound, asked at random", (1, 1_000, 100_000), sessions),
    Case("sessions-churning", "as many as are kept, each request a new one", (10, 1_000, 100_000), sessions_churning),
    Case("services", "each with a model of its own", (1, 100, 1_000), services),
    Case("canary", "endpoints; split 95/5, bound sessions", SOME, canary),
    Case("open", "endpoints, as many open as the floor lets", SOME, mostly_open),
    Case("open-moving", "the same, a breaker moves before each request", SOME, mostly_open, stir=("open", "close")),
    Case("nearly-all-open", "endpoints, 1 of 100 closed, no floor", SOME, nearly_all_open),
    Case("all-open", "endpoints, all refuse", ENDPOINTS, all_open, expect=REFUSED),
    Case(
        "all-open-moving",
        "the same, a breaker moves before each request",
        SOME,
        all_open,
        expect=REFUSED,
        stir=("open",),
    ),
    Case("all-full", "endpoints, all inside their Retry-After", ENDPOINTS, all_full, expect=frozenset({429})),
    Case("canary-open", "endpoints, v1 as open as the floor lets, bound sessions", SOME, canary_mostly_open),
    Case(
        "half-tripped",
        "sessions, every other one's breaker open",
        (2, 1_000, 100_000),
        half_of_sessions,
        expect=frozenset({200, 503}),
    ),
    Case("endpoints-new-models", "endpoints; each request names a new model", ENDPOINTS, endpoints_new_models),
    Case("services-new-models", "services by glob; each request names a new model", (1, 100, 1_000), services_by_glob),
)
CASE_OF = {case.name: case for case in CASES}


class Arm:
    """One case at one size, ready to be timed."""

    def __init__(self, name: str, size: int) -> None:
        self.case = CASE_OF[name]
        self._path, self._requests = self.case.build(size)
        # As `sidecar run` does once it serves.
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 50, 50)

    def sample(self, count: int) -> float:
        """CPU per request over `count` of them, us."""
        path, witness, moves = self._path, self._path.witness, self.case.stir
        ask = path.ask
        requests = list(itertools.islice(self._requests, count))
        witness.statuses.clear()
        began = time.process_time()
        for turn, request in enumerate(requests):
            if moves:
                stir(path, moves[turn % len(moves)])
            ask(request)
        took = time.process_time() - began
        got = witness.statuses
        if got.total() != count or not got.keys() <= self.case.expect:
            raise RuntimeError(f"{self.case.name}: {count} requests got {dict(got)}, not only {set(self.case.expect)}")
        return took / count * 1e6


def _crash(exc: BaseException) -> None:
    raise exc
