"""The whole request path in the simulated overload: pipeline, door, gate, limits, balance, breakers, quotas' counting.

What `gated` does by hand, the product does itself here: it reads tenant and class off headers and counts prompts and
answers as it would. Slower, and therefore for few runs: that its figures are those of `gated` is what it shows.
"""

from collections.abc import Callable

from bench.qos.gated import CLASSES
from bench.qos.stage import SERVED, Policy, Stage
from bench.qos.traffic import KINDS, TENANTS, Asked
from sidecar.policy.schema import Admission, Endpoint, Identity, Service, Snapshot, Source
from sidecar.proxy.request import Request
from sidecar.simulate.ledger import Ledger
from sidecar.simulate.method import Context, keys_of
from sidecar.simulate.product import BYTES_PER_TOKEN, Product
from sidecar.simulate.workload import Arrival
from sidecar.simulate.world import Flight
from sidecar.wire.headers import PASSED, Line

_USED = (
    b'data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    b'data: {"id":"c","object":"chat.completion.chunk","choices":[],"usage":'
    b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}\n\ndata: [DONE]\n\n'
)


class Whole:
    """One sidecar, whole, before the engines."""

    def __init__(self, stage: Stage, admission: Admission) -> None:
        keys = keys_of(len(stage.world.pods))
        endpoints = tuple(Endpoint(url=f"http://{key}") for key in keys)
        service = Service(name="chat", endpoints=endpoints, admission=admission)
        identity = Identity(session=(), tenant=(Source(header="x-tenant-id"),), qos_class=(Source(header="x-class"),))
        snapshot = Snapshot(version=1, services=(service,), qos_policies=CLASSES, identity=identity)
        book = Book(stage)
        self.product = Clients(
            Context(stage.clock, stage.world, book, keys, stage.seed, 0, []), snapshot, settled=False
        )

    def start(self, asked: Asked) -> None:
        self.product.start(asked)

    def tick(self, now: float) -> None:
        for node in self.product.pipeline.fleet.services.values():
            for key, each in node.nodes.items():
                index = self.product.context.pods.index(key)
                each.waiting = len(self.product.context.world.pods[index].queue)
        self.product.tick(now)


class Clients(Product):
    """Clients that say who they are, and engines that say what they used."""

    __slots__ = ()

    def asked(self, arrival: Arrival) -> Request:
        assert isinstance(arrival, Asked)
        request = super().asked(arrival)
        head, _, _ = request.body.partition(b'"content":"')
        words = (b"%08d" % arrival.id).ljust(BYTES_PER_TOKEN * arrival.prompt_tokens, b"x")
        request.body = b'%b"content":"%b"}]}' % (head, words)
        request.content_length = request.body_size = len(request.body)
        request.headers = [_TENANTS[arrival.tenant], _CLASSES[arrival.kind]]
        return request

    def last(self, arrival: Arrival) -> bytes:
        prompt, answer = arrival.prompt_tokens, arrival.output_tokens
        return _USED % (prompt, answer, prompt + answer)


class Book(Ledger):
    """Tells the stage what the ledger of breakers is told."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage.world, 1, 0.0, 1e9)
        self._stage = stage

    def touched(self, arrival: Arrival, flight: Flight) -> None:
        assert isinstance(arrival, Asked)
        arrival.sent_at = self._stage.clock.now
        self._stage.passed.sent(arrival, arrival.sent_at)

    def served(self, arrival: Arrival, ttft_s: float) -> None:
        assert isinstance(arrival, Asked)
        # What was preempted comes again, later: its time is counted from when it came first.
        began = arrival.began_at if arrival.began_at >= 0.0 else arrival.at
        arrival.first_at = began + ttft_s
        self._stage.ended(arrival, SERVED)

    def failed(self, arrival: Arrival, why: str) -> None:
        assert isinstance(arrival, Asked)
        self._stage.ended(arrival, why)

    def rejected(self, arrival: Arrival, why: str) -> None:
        self.failed(arrival, why)


def whole(**changes: object) -> Callable[[Stage], Policy]:
    """The whole product with these numbers of `Admission`."""
    admission = Admission(**({"mode": "enforce"} | changes))  # type: ignore[arg-type]
    return lambda stage: Whole(stage, admission)


def _line(name: bytes, value: str) -> Line:
    return Line(name, value.encode(), PASSED, b"%b: %b\r\n" % (name, value.encode()))


_TENANTS = [_line(b"x-tenant-id", f"tenant-{number}") for number in range(TENANTS)]
_CLASSES = [_line(b"x-class", kind.name) for kind in KINDS]
