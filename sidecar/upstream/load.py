"""Asks engines for their queue and their models, and writes what they say on the fleet's nodes.

What we sent and did not get back is exact and free; an engine that others feed too is busier than that, and only the
engine knows. For services whose policy says so, every node's load page is read each interval and its list of models
every tenth time.

1. It informs the choice and judges nobody: no breaker hears of it. A stalled engine answers here as if nothing were
   wrong, and one too busy to answer still serves.
2. Last words hold for two more failures and then count as unknown: an empty queue and every model, so that a page that
   cannot be read keeps nobody out of rotation.
3. The relay's own connections are used: one per node stays warm, and no client library is needed. There is no task per
   node: a node is a deadline in one watchdog, be it for its next poll or for the answer under way.
4. Each node's polls start at a random moment of the interval and keep that phase, so that a thousand nodes do not
   answer at once, nor one engine all its sidecars.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from sidecar.adapters import DIALECTS
from sidecar.adapters.dialect import Dialect
from sidecar.core.fleet import Fleet
from sidecar.core.pool import Node
from sidecar.kernel.exchange import ResponseHead
from sidecar.policy.schema import HealthCheck
from sidecar.proxy.ports import Connector, Link
from sidecar.proxy.watchdog import Timers, Watchdog

MODELS_EVERY = 10
"""Polls between two looks at the models: they change when somebody loads one, not with every request."""

MISSES = 3
"""Failures in a row until what was said before is forgotten: one is noise, and after three the queue is another."""

MAX_POLLS = 64
"""Nodes asked at a time; the others wait their turn. Bounds what is held: 64 pages of 60 KB, of 1 MiB at worst."""

MAX_PAGE_BYTES = 1 << 20
"""vLLM's load page has 60 KB; one of a thousand adapters in the list of models, 400 KB."""

FOLLOW_S = 0.5
"""How soon a new policy is noticed; comparing is one `is`."""


class LoadReader:
    """Polls every node of every service whose `health_check.mode` is `load` and whose engine has a dialect."""

    def __init__(self, fleet: Fleet, connector: Connector, timers: Timers) -> None:
        self._fleet = fleet
        self._connector = connector
        self._timers = timers
        self._watchdog = Watchdog(timers)
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
        terms: dict[Node, tuple[Dialect, HealthCheck]] = {}
        for service in self._fleet.services.values():
            rule = service.policy.health_check
            if rule.mode == "off":
                continue
            for node in service.nodes.values():
                dialect = DIALECTS.get(node.endpoint.engine)
                if dialect is not None:
                    terms[node] = (dialect, rule)
        self._forget([node for node, watch in self._watches.items() if terms.get(node) != (watch.dialect, watch.rule)])
        now = self._timers.time()
        for node, (dialect, rule) in terms.items():
            if node not in self._watches:
                watch = _Watch(self, self._connector, self._timers, self._watchdog, node, dialect, rule)
                self._watches[node] = watch
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
        "_connector",
        "_due",
        "_get",
        "_load_misses",
        "_models_in",
        "_models_misses",
        "_node",
        "_reader",
        "_slot",
        "_timers",
        "_watchdog",
        "dialect",
        "rule",
    )

    def __init__(
        self,
        reader: LoadReader,
        connector: Connector,
        timers: Timers,
        watchdog: Watchdog,
        node: Node,
        dialect: Dialect,
        rule: HealthCheck,
    ) -> None:
        self._reader = reader
        self._connector = connector
        self._timers = timers
        self._watchdog = watchdog
        self._node = node
        self.dialect = dialect
        self.rule = rule
        self._get: _Get | None = None
        self._slot = 0
        self._due = 0.0
        self._load_misses = 0
        self._models_misses = 0
        self._models_in = 0  # polls until the models are asked for again

    def wait(self, due: float) -> None:
        """Rest until `due`, then poll."""
        self._due = due
        self._slot = self._watchdog.add(self, due)

    def poll(self) -> None:
        """Ask for the load, and for the models if it is time; `turn_ended` follows."""
        self._models_in -= 1
        self._ask(self.dialect.load_path, self._load_told)

    def drop(self) -> None:
        """Watch it no more: what it said will be wrong soon, so it is forgotten."""
        self._watchdog.remove(self, self._slot)
        if self._get is not None:
            self._get.stop()
            self._get = None
            self._reader.turn_ended()
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

    def _ask(self, path: bytes, told: Callable[[int, bytes], None]) -> None:
        self._slot = self._watchdog.add(self, self._timers.time() + self.rule.timeout_s)
        self._get = _Get(self._connector, self._node, path, told)
        self._get.start(self.rule.timeout_s)

    def _load_told(self, status: int, page: bytes) -> None:
        self._watchdog.remove(self, self._slot)
        node = self._node
        node.healthy = answered = 0 < status < 500
        load = self.dialect.read_load(page) if status == 200 else None
        if load is not None:
            self._load_misses = 0
            node.waiting = load.waiting
        else:
            self._load_misses += 1
            if self._load_misses >= MISSES:
                node.waiting = 0
        if not answered:
            self._missed_models()
            # When it comes back, it may be another engine.
            self._models_in = 0
            self._rest()
        elif self._models_in <= 0:
            self._ask(self.dialect.models_path, self._models_told)
        else:
            self._rest()

    def _models_told(self, status: int, page: bytes) -> None:
        self._watchdog.remove(self, self._slot)
        models = self.dialect.read_models(page) if status == 200 else None
        if models is not None:
            self._models_misses = 0
            self._models_in = MODELS_EVERY
            self._node.models = models
        else:
            self._missed_models()
            self._models_in = 1 if self._models_misses < MISSES else MODELS_EVERY
        self._rest()

    def _missed_models(self) -> None:
        self._models_misses += 1
        if self._models_misses >= MISSES:
            self._node.models = None

    def _rest(self) -> None:
        self._get = None
        interval_s = self.rule.interval_s
        # Polls that should have begun meanwhile are left out, so that the phase stays.
        late = max(0.0, self._timers.time() - self._due)
        self.wait(self._due + interval_s * (late // interval_s + 1))
        self._reader.turn_ended()


class _Get:
    """One GET: a sink that collects the page. `tell(status, page)` comes once, status 0 without a whole answer."""

    __slots__ = (
        "_connector",
        "_link",
        "_node",
        "_path",
        "_pieces",
        "_reused",
        "_size",
        "_status",
        "_timeout_s",
        "tell",
    )

    def __init__(self, connector: Connector, node: Node, path: bytes, tell: Callable[[int, bytes], None]) -> None:
        self._connector = connector
        self._node = node
        self._path = path
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
        node = self._node
        self._connector.open(node.key, node.endpoint, self._timeout_s, self, fresh=fresh)

    # What the pool and the link call.

    def on_connected(self, link: Link) -> None:
        self._link = link
        self._reused = link.used
        host = "localhost" if self._node.endpoint.url.startswith("unix:") else self._node.key
        head = b"GET %b HTTP/1.1\r\nhost: %b\r\nuser-agent: llm-sidecar\r\n\r\n" % (self._path, host.encode())
        link.send(self, head, b"", head_only=False, upgrade=False)

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
