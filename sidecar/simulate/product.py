"""The product in the simulated world: its real pipeline, fleet and breakers, on virtual time and engines.

Nothing of the request path is imitated but its two ends. An engine's end is a link that answers with an engine's bytes
when the world says so; a client's end notes what became of the request. So what is measured here is what the relay
does, and a policy that is tried here is the policy that would be shipped.
"""

from random import Random
from re import compile as pattern
from typing import Final

from msgspec import json
from msgspec.structs import replace

from sidecar.core.breaker import Scope, State, Transition
from sidecar.core.fleet import Fleet
from sidecar.core.poison import Condemned
from sidecar.core.service import Session
from sidecar.kernel.errors import Reason, Refusal
from sidecar.kernel.exchange import ResponseHead
from sidecar.kernel.ids import EndpointKey, ServiceName, SessionId
from sidecar.kernel.outcome import Result
from sidecar.policy.address import endpoint_key
from sidecar.policy.schema import Endpoint, Service, Snapshot
from sidecar.policy.store import PolicyStore
from sidecar.proxy.attempt import Attempt
from sidecar.proxy.exchange import Exchange
from sidecar.proxy.pipeline import Pipeline
from sidecar.proxy.ports import AttemptRecord, RequestRecord, Sink
from sidecar.proxy.probe import Probe
from sidecar.proxy.request import Request
from sidecar.simulate.ledger import Ledger
from sidecar.simulate.method import Context, Factory
from sidecar.simulate.workload import Arrival
from sidecar.simulate.world import Flight
from sidecar.wire.call import Api
from sidecar.wire.headers import PASSED, Line

BYTES_PER_TOKEN: Final = 4  # of a prompt, as the relay sees it

COPY: Final = 1000  # the attempt's number of a probe's copy

_PATH: Final = b"/v1/chat/completions"
_HEAD: Final = ResponseHead(
    200, b"OK", [b"content-type: text/event-stream\r\n"], b"text/event-stream", None, False, b""
)
_ERROR_HEAD: Final = ResponseHead(
    500, b"Internal Server Error", [b"content-type: application/json\r\n"], b"application/json", None, False, b""
)
_ERROR: Final = b'{"error":{"message":"the simulated engine failed","type":"InternalServerError","code":500}}'
_FULL_HEAD: Final = ResponseHead(
    503,
    b"Service Unavailable",
    [b"content-type: application/json\r\n", b"retry-after: 1\r\n"],
    b"application/json",
    None,
    False,
    b"",
    ((b"retry-after", b"1"),),
)
_FULL: Final = b'{"error":{"message":"the simulated engine is full","type":"Overloaded","code":503}}'
_TOKEN: Final = (
    b'data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"token"}}]}\n\n'
)
_LAST: Final = (
    b'data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    b"data: [DONE]\n\n"
)

_CLASS: Final = pattern(r"\[!?(.)[^]]*\]")

_SUCCESS: Final = Result.SUCCESS


class Link:
    """A connection to a simulated engine: `proxy.ports.Link` on one side, the world's sink on the other."""

    __slots__ = ("_client", "_flight", "_product", "received", "sink", "used")

    def __init__(self, product: "Product", client: "Caller", sink: Sink) -> None:
        self._product = product
        self._client = client
        self._flight: Flight | None = None
        self.sink: Sink | None = sink
        self.used = False
        self.received = False

    def open(self, pod: int, copy: bool) -> None:
        """Connects, at once; a refusal follows. A copy touches no client and has luck of its own."""
        product, client, sink = self._product, self._client, self.sink
        arrival = client.arrival
        if copy:
            self._flight = flight = product.context.world.send(pod, arrival, COPY, self)
        else:
            client.attempts += 1
            self._flight = flight = product.context.world.send(pod, arrival, client.attempts, self)
            product.context.ledger.touched(arrival, flight)
        if not flight.refused and sink is not None:
            sink.on_connected(self)

    # What the relay asks.

    def send(self, sink: Sink, head: bytes, body: bytes, *, head_only: bool, upgrade: bool) -> None:
        """The flight is under way already."""

    def open_upload(self, *, chunked: bool) -> None:
        """No request here has an upload."""

    def upload(self, data: bytes) -> None:
        """As above."""

    def end_upload(self, trailers: list[bytes]) -> None:
        """As above."""

    def send_tunnel(self, data: bytes) -> None:
        """No request here asks for a tunnel."""

    def pause(self) -> None:
        """Clients here read as fast as they are written to."""

    def resume(self) -> None:
        """As above."""

    def abort(self) -> None:
        """Gives the flight up."""
        self._product.turn = self._client  # its exchange may try again before this returns
        self.sink = None
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.abort()

    def close(self) -> None:
        """As `abort`."""
        self.abort()

    # What the world tells.

    def first(self, flight: Flight) -> None:
        """The first token: the head with it, as engines do."""
        sink = self._heard()
        if sink is not None:
            sink.on_head(_HEAD)
            sink.on_body(_TOKEN)

    def token(self, flight: Flight) -> None:
        """More tokens."""
        sink = self._heard()
        if sink is not None:
            sink.on_body(_TOKEN)

    def end(self, flight: Flight) -> None:
        """The last of them."""
        sink = self._heard()
        self._flight = None
        if sink is not None:
            sink.on_body(self._product.last(self._client.arrival))
            self._over(sink)

    def error(self, flight: Flight, kind: str) -> None:
        """No answer, or an answer that is none."""
        self._flight = None
        if kind == "refused":
            self._product.turn = self._client
            sink, self.sink = self.sink, None
            if sink is not None:
                sink.on_connect_failed("connection refused")
            return
        sink = self._heard()
        if sink is None:
            return
        if kind == "http500":
            sink.on_head(_ERROR_HEAD)
            sink.on_body(_ERROR)
            self._over(sink)
        elif kind == "full":
            sink.on_head(_FULL_HEAD)
            sink.on_body(_FULL)
            self._over(sink)
        else:
            self.sink = None
            sink.on_lost()

    def _heard(self) -> Sink | None:
        self.received = True
        self._product.turn = self._client
        return self.sink

    def _over(self, sink: Sink) -> None:
        self.sink = None
        sink.on_end([])
        sink.on_released()


class Caller:
    """The client of one request: `proxy.ports.Client`. What it is sent is not kept, only how it ended."""

    __slots__ = ("_product", "arrival", "attempts", "exchange")

    peer = ""
    loopback = False

    def __init__(self, product: "Product", arrival: Arrival) -> None:
        self._product = product
        self.arrival = arrival
        self.attempts = 0
        self.exchange: Exchange | None = None

    @property
    def scheme(self) -> bytes:
        return b"http"

    @property
    def can_append(self) -> bool:
        return True

    def send_informational(self, head: ResponseHead) -> None:
        """Not kept."""

    def send_head(self, head: ResponseHead, extra: bytes, body: bytes) -> None:
        """Not kept."""

    def send_body(self, data: bytes) -> None:
        """Not kept."""

    def send_end(self, trailers: list[bytes]) -> None:
        """Not kept."""

    def refuse(self, refusal: Refusal, request_id: bytes, extra: bytes) -> None:
        """The record tells."""

    def start_tunnel(self, head: ResponseHead, extra: bytes, data: bytes) -> None:
        """Nobody asks for one."""

    def cut(self) -> None:
        """The record tells."""

    def close_after_reply(self) -> None:
        """Connections cost nothing here."""

    def pause_upload(self) -> None:
        """There is none."""

    def resume_upload(self) -> None:
        """There is none."""

    def exchange_done(self) -> None:
        """It is over."""
        self.exchange = None
        self._product.done(self)


class Notes:
    """`proxy.ports.Recorder`: what the ledger needs of what the relay records."""

    __slots__ = ("_context", "_indexes", "_ledger", "last")

    def __init__(self, context: Context, indexes: dict[str, int]) -> None:
        self._context = context
        self._ledger: Ledger = context.ledger
        self._indexes = indexes
        self.last: RequestRecord | None = None

    def attempt(self, record: AttemptRecord) -> None:
        """The ledger hears of attempts when they are sent."""

    def request(self, record: RequestRecord) -> None:
        """The end of a request; its client is told next."""
        self.last = record

    def transition(self, transition: Transition, trace: str = "") -> None:
        """A breaker moved."""
        if transition.scope is Scope.NODE:
            pod = self._indexes.get(transition.key)
            if pod is not None:
                self._ledger.moved(
                    pod,
                    transition.old.value,
                    transition.new.value,
                    transition.at,
                    transition.why,
                    transition.evidence,
                    self._context.number,
                )
        elif transition.new is State.OPEN and transition.old is State.CLOSED:
            self._ledger.tripped(transition.scope.value)

    def condemned(self, prompt: Condemned) -> None:
        """A prompt that engines died of; each of its requests is told on its own."""

    def refused(self, reason: Reason) -> None:
        """Heads here are never malformed."""

    def malformed_upstream(self, endpoint: EndpointKey) -> None:
        """Engines here speak HTTP."""


class Connector:
    """`proxy.ports.Connector` to the simulated engines."""

    __slots__ = ("_indexes", "_opening", "_product")

    def __init__(self, product: "Product", indexes: dict[str, int]) -> None:
        self._product = product
        self._indexes = indexes
        self._opening: dict[Sink, Link] = {}

    def open(self, key: EndpointKey, endpoint: Endpoint, connect_s: float, sink: Sink, *, fresh: bool = False) -> None:
        """A link for the request that it is an attempt at: who waited has its turn at another's end."""
        assert isinstance(sink, Attempt)
        Link(self._product, self._product.caller(sink.request_id), sink).open(
            self._indexes[key], isinstance(sink.owner, Probe)
        )

    def cancel(self, sink: Sink) -> None:
        """Connects here are over within a millisecond, and no deadline is that short."""


class Product:
    """One sidecar. `policy` is a service, whose endpoints become the world's engines, or a whole snapshot.

    `service` names the one of a snapshot's services that is asked, by default the first. `settled`: each session lives
    on the engine of its first request already, as in a fleet that has run for long. `turn` is the client of the request
    that is being worked on: what a link or a deadline sets off is all of one request.
    """

    __slots__ = (
        "_callers",
        "_fleet",
        "_keys",
        "_lines",
        "_model",
        "_notes",
        "_service",
        "_settled",
        "context",
        "pipeline",
        "turn",
    )

    def __init__(
        self, context: Context, policy: Service | Snapshot, service: str = "", *, settled: bool = True
    ) -> None:
        self.context = context
        snapshot = _snapshot(policy, context) if isinstance(policy, Service) else policy
        served = next(each for each in snapshot.services if service in ("", each.name))
        self._model = model_of(served)
        self._keys = context.pods
        indexes: dict[str, int] = {key: index for index, key in enumerate(context.pods)}
        rng = Random(f"product:{context.seed}:{context.number}")
        fleet = Fleet(rng.random)
        clock = context.clock
        fleet.apply(snapshot, clock.now)
        self._fleet = fleet
        self._service = fleet.services[ServiceName(served.name)]
        self._notes = Notes(context, indexes)
        self._lines: dict[str, list[Line]] = {}
        self._callers: dict[bytes, Caller] = {}
        self._settled = settled
        self.turn = Caller(self, Arrival(0, 0.0, 0, 0, None, 0))
        self.pipeline = Pipeline(
            PolicyStore(snapshot),
            fleet,
            Connector(self, indexes),
            self._notes,
            clock,
            now_wall=clock.time,
            new_id=_no_id,
            on_crash=_raise,
        )

    def start(self, arrival: Arrival) -> None:
        """A request comes; its session lives where it always did."""
        request = self.asked(arrival)
        self.turn = self._callers[request.request_id] = caller = Caller(self, arrival)
        caller.exchange = exchange = Exchange(self.pipeline, request, caller)
        exchange.start()

    def asked(self, arrival: Arrival) -> Request:
        """What the client sends."""
        session = arrival.session
        request = Request()
        request.method = b"POST"
        request.target = request.path = _PATH
        request.api = Api.CHAT
        request.held = request.complete = True
        request.request_id = number = b"%d" % arrival.id
        request.body = b'%b%b"}]}' % (self._model, number)  # no two prompts are alike
        request.content_length = request.body_size = BYTES_PER_TOKEN * arrival.prompt_tokens
        request.host = b"simulated"
        if session is not None:
            lines = self._lines.get(session)
            if lines is None:
                lines = self._lines[session] = [_line(session.encode())]
                if self._settled:
                    self._settle(self._service.session(SessionId(session), self.context.clock.now), arrival)
            request.headers = lines
        return request

    def caller(self, request_id: bytes) -> Caller:
        """The client of a request; of a copy that is tried once more when that is gone, whose turn it is."""
        return self._callers.get(request_id, self.turn)

    def last(self, arrival: Arrival) -> bytes:
        """The end of an engine's answer to it."""
        return _LAST

    def tick(self, now: float) -> None:
        """What the sidecar does once a second."""
        for transition in self._fleet.tick(now):
            self._notes.transition(transition)

    def close(self) -> None:
        """Nothing is left to be closed."""

    def done(self, caller: Caller) -> None:
        """A request is over."""
        record, ledger, arrival = self._notes.last, self.context.ledger, caller.arrival
        del self._callers[b"%d" % arrival.id]
        assert record is not None
        if record.result is _SUCCESS and record.reason is None and record.ttft_s is not None:
            ledger.served(arrival, record.ttft_s)
            return
        why = record.reason.value if record.reason is not None else f"status {record.status}"
        if caller.attempts:
            ledger.failed(arrival, why)
        else:
            ledger.rejected(arrival, why)

    def _settle(self, session: Session, arrival: Arrival) -> None:
        node = self._service.nodes.get(self._keys[arrival.user_pod])
        if node is not None:
            session.node_key = node.key
            session.version = node.version


def product(policy: Service | Snapshot, service: str = "", *, settled: bool = True) -> Factory:
    """Makes one for each sidecar."""
    return lambda context: Product(context, policy, service, settled=settled)


def model_of(service: Service) -> bytes:
    """The beginning of a body that asks for a model of this service; the prompt follows."""
    return b'{"model":%b,"stream":true,"messages":[{"role":"user","content":"' % json.encode(model_name(service))


def model_name(service: Service) -> str:
    """A name that the service's first glob takes; "" where it has none."""
    return _CLASS.sub(r"\1", service.models[0] if service.models else "").replace("*", "x").replace("?", "x")


def _snapshot(service: Service, context: Context) -> Snapshot:
    pods = zip(context.pods, context.world.pods, strict=True)
    endpoints = tuple(Endpoint(url=f"http://{key}", zone=pod.zone) for key, pod in pods)
    assert all(endpoint_key(endpoint.url) == key for endpoint, key in zip(endpoints, context.pods, strict=True))
    return Snapshot(version=1, services=(replace(service, endpoints=endpoints),))


def _line(session: bytes) -> Line:
    return Line(b"x-session-id", session, PASSED, b"x-session-id: %b\r\n" % session)


def _no_id() -> bytes:
    raise AssertionError("every request here has an id")


def _raise(exc: BaseException) -> None:
    raise exc
