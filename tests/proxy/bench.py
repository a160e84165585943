"""The request path between fakes: requests go in as bytes, the clock stands still until a test moves it."""

import gc
from collections.abc import Callable
from typing import Any

import msgspec

from sidecar.core.fleet import Fleet
from sidecar.core.pool import Node
from sidecar.core.quotas.quota import Ledger
from sidecar.core.service import ServiceState
from sidecar.downstream.parser import RequestParser
from sidecar.kernel.ids import ServiceName
from sidecar.policy.schema import Deadlines, Endpoint, Seconds, Service, Snapshot
from sidecar.policy.store import PolicyStore
from sidecar.proxy.exchange import Exchange
from sidecar.proxy.pipeline import Pipeline
from sidecar.proxy.ports import TokenCounter
from sidecar.proxy.request import Request
from tests import under_test
from tests.clock import Clock
from tests.harness import request
from tests.proxy.fakes import FakeClient, FakeConnector, FakeLink, FakeRecorder

CONNECT_S, HEAD_S, TTFT_S, GAP_S, TOOL_S, TOTAL_S = 1.0, 60.0, 30.0, 10.0, 20.0, 600.0
DEADLINES = Deadlines(
    connect_s=Seconds(CONNECT_S),
    head_s=Seconds(HEAD_S),
    first_token_s=Seconds(TTFT_S),
    token_gap_s=Seconds(GAP_S),
    tool_gap_s=Seconds(TOOL_S),
    total_s=Seconds(TOTAL_S),
)


def request_of(data: bytes) -> Request:
    """The first request in `data`, as the downstream parser makes it."""
    parser = RequestParser(lambda: 1 << 20, False)
    parser.feed(data)
    return parser.requests[0]


def chat(*, stream: bool = True, model: str = "m", session: str = "") -> Request:
    return request_of(under_test.chat(stream=stream, model=model, session=session))


def get(target: bytes = b"/v1/models", method: bytes = b"GET") -> Request:
    return request_of(request(target, method=method))


def endpoints(count: int) -> tuple[Endpoint, ...]:
    return tuple(Endpoint(url=f"http://e{number}:80") for number in range(1, count + 1))


def service(count: int = 1, **changes: object) -> Service:
    """A plain service of `e1:80`, `e2:80`, ...: breakers off, no re-sending; changed as given."""
    return msgspec.structs.replace(under_test.service(*endpoints(count), deadlines=DEADLINES), **changes)


class Bench:
    """A pipeline on a virtual clock. `chance` is constant: what is drawn first is always the first."""

    def __init__(
        self,
        *services: Service,
        chance: Callable[[], float] = lambda: 0.0,
        early_s: float = 0.0,
        counter: TokenCounter | None = None,
        **policy: Any,
    ) -> None:
        self.clock = Clock(early_s)
        self.connector = FakeConnector()
        self.recorder = FakeRecorder()
        self.crashes: list[BaseException] = []
        self._policy = policy
        snapshot = Snapshot(version=1, services=services or (service(),), **policy)
        self.fleet = Fleet(chance)
        self.fleet.apply(snapshot, self.clock.now)
        self.ledger = Ledger()
        self.ledger.use(snapshot.quotas, self.clock.now)
        self.pipeline = Pipeline(
            PolicyStore(snapshot),
            self.fleet,
            self.connector,
            self.recorder,
            self.clock,
            now_wall=lambda: 1.8e9,
            new_id=lambda: b"id-of-ours",
            on_crash=self.crashes.append,
            ledger=self.ledger,
            counter=counter,
        )

    def apply(self, *services: Service) -> None:
        """A reload: other services under the same policy."""
        self.fleet.apply(Snapshot(version=2, services=services, **self._policy), self.clock.now)
        self.pipeline.policy_changed()

    @property
    def state(self) -> ServiceState:
        return next(iter(self.fleet.services.values()))

    def service(self, name: str) -> ServiceState:
        return self.fleet.services[ServiceName(name)]

    @property
    def nodes(self) -> list[Node]:
        return [node for state in self.fleet.services.values() for node in state.nodes.values()]

    @property
    def link(self) -> FakeLink:
        return self.connector.link

    def begin(self, asked: Request | None = None, client: FakeClient | None = None) -> FakeClient:
        """A request starts; its client's end."""
        client = client or FakeClient()
        exchange = Exchange(self.pipeline, asked or chat(), client)
        client.exchange = exchange
        exchange.start()
        return client

    def held(self) -> list[str]:
        """What is still out, in words."""
        out = [f"{node.key}: {node.in_flight} in flight" for node in self.nodes if node.in_flight]
        for state in self.fleet.services.values():
            out += [f"{breaker.key}: a probe out" for breaker in state.breakers() if breaker.probes_out]
            gate = state.gate
            if gate is not None and (gate.queued or gate.running):
                out.append(f"{gate.queued} wait and {gate.running} run at the gate of {state.name}")
        if self.pipeline.live:
            out.append(f"{self.pipeline.live} live")
        if len(self.pipeline.watchdog):
            out.append(f"{len(self.pipeline.watchdog)} watched")
        if self.connector.pending:
            out.append(f"{self.connector.pending} connects pending")
        out += ["a link is lent" for link in self.connector.links if link.sink is not None]
        return out


def garbage_of(act: Callable[[], None]) -> int:
    """How many objects only the garbage collector could free after `act`: cycles it left behind."""
    act()  # what is made once (caches, lazily built tables) is no litter
    gc.collect()
    gc.disable()
    try:
        act()
        return gc.collect()
    finally:
        gc.enable()
