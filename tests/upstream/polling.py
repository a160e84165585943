"""A reader of engines' pages over fakes: a clock that goes when told, links that answer when told."""

from itertools import chain, repeat

from sidecar.core.breaker import Transition
from sidecar.core.fleet import Fleet
from sidecar.core.pool import Node
from sidecar.kernel.exchange import ResponseHead
from sidecar.kernel.ids import EndpointKey, ServiceName
from sidecar.kernel.outcome import Ending, Result
from sidecar.policy.schema import Endpoint, HealthCheck, Seconds, Service, Snapshot
from sidecar.proxy.ports import Sink
from sidecar.proxy.watchdog import SLOT_S
from sidecar.upstream.load import LoadReader
from tests.clock import Clock
from tests.under_test import node_breaker

POLLED = HealthCheck(mode="load", interval_s=Seconds(1), timeout_s=Seconds(0.8))
MODELS = b'{"object":"list","data":[{"id":"tiny"},{"id":"l1"}]}'


def load_page(waiting: int, running: int = 1) -> bytes:
    return b"vllm:num_requests_running %d.0\nvllm:num_requests_waiting %d.0\n" % (running, waiting)


class FakeLink:
    """A connection that keeps what was sent, and answers when told."""

    def __init__(self, key: EndpointKey, used: bool) -> None:
        self.key = key
        self.used = used
        self.received = False
        self.sent = b""
        self.body = b""
        self.aborted = False
        self.sink: Sink | None = None

    @property
    def path(self) -> str:
        return self.sent.split(b" ")[1].decode()

    @property
    def open(self) -> bool:
        """Whether it waits for its answer."""
        return self.sink is not None

    def send(self, sink: Sink, head: bytes, body: bytes, *, head_only: bool, upgrade: bool) -> None:
        assert not (self.sent or head_only or upgrade)
        self.sink = sink
        self.sent = head
        self.body = body

    def answer(self, status: int, *parts: bytes, media: bytes = b"text/plain", wait_s: int = 0) -> None:
        """A whole answer, as far as its reader lets it come."""
        sink = self.sink
        assert sink is not None
        self.received = True
        retry_after = ((b"retry-after", b"%d" % wait_s),) if wait_s else ()
        sink.on_head(ResponseHead(status, b"", [], media, None, False, b"", retry_after))
        for part in parts:
            if self.sink is None:
                return
            sink.on_body(part)
        if self.sink is not None:
            sink = self._take()
            sink.on_end([])
            sink.on_released()

    def lose(self) -> None:
        self._take().on_lost()

    def garble(self) -> None:
        self._take().on_bad_bytes("no HTTP")

    def _take(self) -> Sink:
        sink, self.sink = self.sink, None
        assert sink is not None
        return sink

    def abort(self) -> None:
        self.aborted = True
        self.sink = None

    def close(self) -> None:
        raise AssertionError("a poll has no tunnel")

    def open_upload(self, *, chunked: bool) -> None:
        raise AssertionError

    def upload(self, data: bytes) -> None:
        raise AssertionError

    def end_upload(self, trailers: list[bytes]) -> None:
        raise AssertionError

    def send_tunnel(self, data: bytes) -> None:
        raise AssertionError

    def pause(self) -> None:
        raise AssertionError

    def resume(self) -> None:
        raise AssertionError


class FakePool:
    """A connector that connects at once, keeps who asks waiting while `slow`, or refuses while `deaf`.

    `reuses` lends used connections.
    """

    def __init__(self) -> None:
        self.slow = False
        self.deaf = False
        self.reuses = False
        self.links: list[FakeLink] = []
        self.fresh: list[bool] = []
        self.connecting: list[tuple[Sink, float]] = []

    def open(self, key: EndpointKey, endpoint: Endpoint, connect_s: float, sink: Sink, *, fresh: bool = False) -> None:
        self.fresh.append(fresh)
        if self.deaf:
            sink.on_connect_failed(f"cannot connect to {key}")
            return
        if self.slow:
            self.connecting.append((sink, connect_s))
            return
        link = FakeLink(key, self.reuses and not fresh)
        self.links.append(link)
        sink.on_connected(link)

    def cancel(self, sink: Sink) -> None:
        self.connecting = [waiting for waiting in self.connecting if waiting[0] is not sink]


class Heard:
    """What the reader tells; nobody else's requests end here."""

    def __init__(self) -> None:
        self.moved: list[Transition] = []
        self.canaries: list[tuple[EndpointKey, Ending, Result]] = []
        self.refused: list[str] = []
        self.successes = 0
        self.members = 1

    def transition(self, transition: Transition, trace: str = "") -> None:
        self.moved.append(transition)

    def canary(self, node: Node, ending: Ending, result: Result) -> None:
        self.canaries.append((node.key, ending, result))

    def canary_refused(self, node: Node, said: str) -> None:
        self.refused.append(said)


class Bench:
    """A reader over fakes. `chances` are where in the interval first polls fall; in its middle beyond."""

    def __init__(self, *services: Service, chances: tuple[float, ...] = ()) -> None:
        drawn = chain(chances, repeat(0.5))
        self.clock = Clock()
        self.start = self.clock.now
        self.fleet = Fleet(lambda: next(drawn))
        self.pool = FakePool()
        self.heard = heard = Heard()
        self.reader = LoadReader(
            self.fleet,
            self.pool,
            self.clock,
            recorder=heard,
            successes=lambda node: heard.successes,
            members=lambda: heard.members,
        )
        self.apply(*services)

    def apply(self, *services: Service) -> None:
        self.fleet.apply(Snapshot(version=1, services=services), self.clock.now)
        self.reader.follow()

    def node(self, number: int = 1) -> Node:
        return self.fleet.services[ServiceName("chat")].nodes[EndpointKey(f"h{number}:80")]

    @property
    def open(self) -> list[FakeLink]:
        return [link for link in self.pool.links if link.open]

    def asked(self) -> FakeLink:
        """The one link that waits for its answer."""
        [link] = self.open
        return link

    def answer_all(self, waiting: int = 0) -> None:
        """Whoever is asked answers, page after page."""
        while self.open:
            link = self.open[0]
            link.answer(200, MODELS if link.path == "/v1/models" else load_page(waiting))

    def until_asked(self) -> None:
        """Time goes by until somebody waits for an answer, or for a connection."""
        before = self.clock.now
        while not (self.open or self.pool.connecting):
            self.clock.advance(SLOT_S)
            assert self.clock.now < before + 3 * POLLED.interval_s, "nobody is asked"

    def poll(self, waiting: int = 0) -> list[str]:
        """The next to be asked answer; the paths asked for."""
        before = len(self.pool.links)
        self.until_asked()
        self.answer_all(waiting)
        return [link.path for link in self.pool.links[before:]]


def plan(count: int = 1, rule: HealthCheck = POLLED, **changes: object) -> Service:
    endpoints = tuple(Endpoint(url=f"http://h{number}:80", **changes) for number in range(1, count + 1))  # type: ignore[arg-type]
    return Service(name="chat", endpoints=endpoints, health_check=rule, breakers=node_breaker(1))
