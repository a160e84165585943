"""Asks engines for their queue and their models, and writes what they say on the fleet's nodes.

What we sent and did not get back is exact and free; an engine that others feed too is busier than that, and only the
engine knows. For services whose policy says so, every node's load page is read each interval and its list of models
every so many times.

1. With `health_check.mode: load` it informs the choice and judges nobody: no breaker hears of it. A stalled engine
   answers here as if nothing were wrong, and one too busy to answer still serves. With `truth`, `trust` judges.
2. Last words hold for two more failures and then count as unknown: an empty queue and every model, so that a page that
   cannot be read keeps nobody out of rotation.
3. The relay's own connections are used: one per node stays warm, and no client library is needed. There is no task per
   node: a node is a deadline in one watchdog, be it for its next poll or for the answer under way.
4. A queue that is read elsewhere (`metrics_url`) says nothing of the engine's own address: whether that answers is told
   by the list of models then.
5. A page that the policy asks for (`path`) is held to what Kubernetes holds it to, 2xx or 3xx, and alone says whether
   the engine's address answers. It is believed no more than any other: where it fails, a token is asked for.
6. Each node's polls start at a random moment of the interval and keep that phase, so that a thousand nodes do not
   answer at once, nor one engine all its sidecars.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from sidecar.adapters import DIALECTS
from sidecar.adapters.dialect import Query
from sidecar.core.fleet import Fleet
from sidecar.core.pool import Node
from sidecar.core.service import ServiceState
from sidecar.kernel.exchange import ResponseHead
from sidecar.kernel.ids import EndpointKey
from sidecar.policy.address import endpoint_key
from sidecar.policy.schema import Endpoint, HealthCheck, front_of
from sidecar.proxy.ports import Connector, Link
from sidecar.proxy.watchdog import Timers, Watchdog
from sidecar.upstream.canary import HealthRecorder
from sidecar.upstream.trust import Means, Trust

MISSES = 3
"""Failures in a row until what was said before is forgotten: one is noise, and after three the queue is another."""

RETRY_MODELS = 10
"""Polls until models that cannot be read are asked for again."""

MAX_POLLS = 64
"""Nodes asked at a time; the others wait their turn. Bounds what is held: 64 pages of 60 KB, of 1 MiB at worst."""

MAX_PAGE_BYTES = 1 << 20
"""vLLM's load page has 60 KB; one of a thousand adapters in the list of models, 400 KB."""

FOLLOW_S = 0.5
"""How soon a new policy is noticed; comparing is one `is`."""


class LoadReader:
    """Polls every node of every service whose `health_check.mode` is not `off`.

    `recorder` hears of breakers that it moves and of canaries; `successes` says how many requests a node has answered
    well, `members` how many sidecars share their canaries.
    """

    def __init__(
        self,
        fleet: Fleet,
        connector: Connector,
        timers: Timers,
        *,
        recorder: HealthRecorder,
        successes: Callable[[Node], int],
        members: Callable[[], int],
    ) -> None:
        self.watchdog = Watchdog(timers)
        self.means = Means(fleet, connector, timers, self.watchdog, recorder, successes, members)
        self._fleet = fleet
        self._timers = timers
        self._followed = -1
        self._watches: dict[Node, _Watch] = {}
        self._queue: deque[_Watch] = deque()
        self._polling = 0

    async def run(self) -> None:
        """Poll until cancelled; nothing is held then."""
        try:
            while True:
                self.follow()
                await asyncio.sleep(FOLLOW_S)
        finally:
            self.stop()

    def follow(self) -> None:
        """Watch the nodes that the policy in force says. A node under changed terms starts afresh."""
        if self._fleet.generation == self._followed:
            return
        self._followed = self._fleet.generation
        terms: dict[Node, tuple[ServiceState, Endpoint, HealthCheck]] = {}
        for service in self._fleet.services.values():
            rule = service.policy.health_check
            if rule.mode != "off":
                terms.update((node, (service, node.endpoint, rule)) for node in service.nodes.values())
        self._forget([node for node, watch in self._watches.items() if terms.get(node) != watch.terms])
        now = self._timers.time()
        for node, (service, _, rule) in terms.items():
            if node not in self._watches:
                self._watches[node] = watch = _Watch(self, service, node, rule)
                watch.wait(now + rule.interval_s * self._fleet.chance())

    def stop(self) -> None:
        """Ask nobody any more; polls under way are broken off."""
        self._forget(list(self._watches))

    def take_turn(self, watch: "_Watch") -> None:
        """Have `watch` poll, now or when others are done."""
        if self._polling < MAX_POLLS:
            self._polling += 1
            watch.poll()
        else:
            self._queue.append(watch)

    def turn_ended(self) -> None:
        """A poll is over: whoever waited longest is next."""
        self._polling -= 1
        if self._queue:
            self.take_turn(self._queue.popleft())

    def _forget(self, nodes: Iterable[Node]) -> None:
        gone = [self._watches.pop(node) for node in nodes]
        if self._queue:
            dropped = frozenset(gone)
            self._queue = deque(watch for watch in self._queue if watch not in dropped)
        for watch in gone:
            watch.drop()


class _Watch:
    """One node that is polled: rests until its next poll is due, or has a page asked for."""

    __slots__ = (
        "_apart",
        "_dialect",
        "_due",
        "_get",
        "_load_misses",
        "_models_in",
        "_models_misses",
        "_node",
        "_page",
        "_page_at",
        "_probe",
        "_reader",
        "_rule",
        "_silences",
        "_slot",
        "_trust",
        "terms",
    )

    def __init__(self, reader: LoadReader, service: ServiceState, node: Node, rule: HealthCheck) -> None:
        endpoint = node.endpoint
        self.terms = (service, endpoint, rule)
        self._reader = reader
        self._node = node
        self._rule = rule
        self._dialect = dialect = DIALECTS[endpoint.engine, front_of(endpoint)]
        self._trust = (
            Trust(reader.means, service, node, rule, nameless=dialect.nameless) if rule.mode == "truth" else None
        )
        self._page = dialect.alive
        self._page_at = endpoint
        self._apart = False  # the page is not at the engine's own address
        self._probe = Query(rule.path.encode()) if rule.path else None
        if dialect.load is not None and (endpoint.metrics_url or not dialect.load_apart):
            self._page = dialect.load
            if endpoint.metrics_url:
                self._page_at = replace(endpoint, url=endpoint.metrics_url)
                self._apart = True
        self._get: _Get | None = None
        self._slot = 0
        self._due = 0.0
        self._load_misses = 0
        self._silences = 0  # polls in a row that were not answered
        self._models_misses = 0
        self._models_in = 0  # polls until the models are asked for again

    def wait(self, due: float) -> None:
        """Rest until `due`, then poll."""
        self._due = due
        self._slot = self._reader.watchdog.add(self, due)

    def poll(self) -> None:
        """Ask for the load, and for the models if it is time; `turn_ended` follows."""
        self._models_in -= 1
        self._ask(self._page, self._page_at, self._load_told)

    def drop(self) -> None:
        """Watch it no more: what it said will be wrong soon, so it is forgotten."""
        self._reader.watchdog.remove(self, self._slot)
        if self._get is not None:
            self._get.stop()
            self._get = None
            self._reader.turn_ended()
        if self._trust is not None:
            self._trust.drop()
        node = self._node
        node.waiting = 0
        node.models = None
        node.healthy = True

    def look(self, now: float) -> None:
        """The watchdog: the next poll is due, or the answer under way is late."""
        get = self._get
        if get is None:
            self._reader.take_turn(self)
        else:
            get.stop()
            get.tell(0, b"")

    def _ask(self, query: Query, at: Endpoint, told: Callable[[int, bytes], None]) -> None:
        reader = self._reader
        self._slot = reader.watchdog.add(self, reader.means.timers.time() + self._rule.timeout_s)
        key = self._node.key if at is self._node.endpoint else endpoint_key(at.url)
        self._get = _Get(reader.means.connector, key, at, query, told)
        self._get.start(self._rule.timeout_s)

    def _load_told(self, status: int, page: bytes) -> None:
        self._reader.watchdog.remove(self, self._slot)
        node, trust = self._node, self._trust
        answered = self._apart or self._probe is not None or self._heard(0 < status < 500)
        load = self._dialect.read_load(page) if status == 200 else None
        if load is not None:
            self._load_misses = 0
            node.waiting = load.waiting
            if trust is not None:
                signs = self._dialect.read_signs(page)
                trust.read(load.running + load.waiting, signs.mark, signs.asleep)
        else:
            self._load_misses += 1
            if self._load_misses >= MISSES:
                node.waiting = 0
            if trust is not None:
                trust.unread(unknown=self._load_misses >= MISSES)
        if not answered:
            self._lost()
        elif self._probe is not None:
            self._ask(self._probe, node.endpoint, self._probe_told)
        else:
            self._ask_models()

    def _probe_told(self, status: int, page: bytes) -> None:
        self._reader.watchdog.remove(self, self._slot)
        if self._heard(200 <= status < 400):
            self._ask_models()
        else:
            self._lost()

    def _ask_models(self) -> None:
        if self._models_in <= 0 and self._dialect.models is not None:
            self._ask(self._dialect.models, self._node.endpoint, self._models_told)
        else:
            self._rest()

    def _models_told(self, status: int, page: bytes) -> None:
        self._reader.watchdog.remove(self, self._slot)
        if self._apart and self._probe is None and not self._heard(0 < status < 500):
            self._lost()
            return
        engine_model = self._node.endpoint.engine_model
        models = self._dialect.read_models(page, engine_model) if status == 200 else None
        if models is not None:
            self._models_misses = 0
            self._models_in = self._dialect.models_every
            if engine_model:
                # Clients have other names for it: it serves what the policy says, or nothing.
                self._node.models = None if engine_model in models else frozenset()
            else:
                self._node.models = models
        else:
            self._missed_models()
            self._models_in = 1 if self._models_misses < MISSES else RETRY_MODELS
        self._rest()

    def _heard(self, answered: bool) -> bool:
        """Whether its own address answered."""
        self._node.healthy = answered
        if answered:
            self._node.heard = True
        self._silences = 0 if answered else self._silences + 1
        if self._trust is not None and self._silences == MISSES:
            self._trust.silent()
        return answered

    def _lost(self) -> None:
        self._missed_models()
        # When it comes back, it may be another engine.
        self._models_in = 0
        self._rest()

    def _missed_models(self) -> None:
        self._models_misses += 1
        if self._models_misses >= MISSES:
            self._node.models = None

    def _rest(self) -> None:
        self._get = None
        interval_s = self._rule.interval_s
        now = self._reader.means.timers.time()
        # Polls that should have begun meanwhile are left out, so that the phase stays.
        late = max(0.0, now - self._due)
        self.wait(self._due + interval_s * (late // interval_s + 1))
        if self._trust is not None:
            self._trust.look(now)
        self._reader.turn_ended()


class _Get:
    """One page: a sink that collects it. `tell(status, page)` comes once, status 0 without a whole answer."""

    __slots__ = (
        "_connector",
        "_endpoint",
        "_key",
        "_link",
        "_pieces",
        "_query",
        "_reused",
        "_size",
        "_status",
        "_timeout_s",
        "tell",
    )

    def __init__(
        self,
        connector: Connector,
        key: EndpointKey,
        endpoint: Endpoint,
        query: Query,
        tell: Callable[[int, bytes], None],
    ) -> None:
        self._connector = connector
        self._key = key
        self._endpoint = endpoint
        self._query = query
        self.tell = tell
        self._link: Link | None = None
        self._reused = False
        self._timeout_s = 0.0
        self._status = 0
        self._pieces: list[bytes] = []
        self._size = 0

    def start(self, timeout_s: float) -> None:
        """Ask for a connection, of which `timeout_s` is the longest wait."""
        self._timeout_s = timeout_s
        self._open(fresh=False)

    def stop(self) -> None:
        """Break it off; nothing is told any more."""
        if self._link is not None:
            self._link.abort()
        else:
            self._connector.cancel(self)

    def _open(self, *, fresh: bool) -> None:
        self._connector.open(self._key, self._endpoint, self._timeout_s, self, fresh=fresh)

    # What the pool and the link call.

    def on_connected(self, link: Link) -> None:
        self._link = link
        self._reused = link.used
        host = "localhost" if self._endpoint.url.startswith("unix:") else self._key
        query = self._query
        method, more = b"GET", b""
        if query.body:
            method, more = b"POST", b"content-type: application/json\r\ncontent-length: %d\r\n" % len(query.body)
        head = b"%b %b HTTP/1.1\r\nhost: %b\r\nuser-agent: llm-sidecar\r\n%b\r\n" % (
            method,
            query.path,
            host.encode(),
            more,
        )
        link.send(self, head, query.body, head_only=False, upgrade=False)

    def on_connect_failed(self, detail: str) -> None:
        self.tell(0, b"")

    def on_informational(self, head: ResponseHead) -> None:
        return

    def on_head(self, head: ResponseHead) -> None:
        self._status = head.status

    def on_body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > MAX_PAGE_BYTES:
            self.stop()
            self.tell(self._status, b"")
        else:
            self._pieces.append(data)

    def on_end(self, trailers: list[bytes]) -> bool:
        return True

    def on_released(self) -> None:
        self.tell(self._status, b"".join(self._pieces))

    def on_lost(self) -> None:
        link, self._link = self._link, None
        if self._reused and link is not None and not link.received:
            # It had been closed before we asked.
            self._open(fresh=True)
        else:
            self.tell(0, b"")

    def on_bad_bytes(self, detail: str) -> None:
        self.tell(0, b"")

    def on_tunnel(self, head: ResponseHead, data: bytes) -> None:
        return

    def on_tunnel_data(self, data: bytes) -> None:
        return

    def on_upload_paused(self) -> None:
        return

    def on_upload_resumed(self) -> None:
        return
