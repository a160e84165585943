"""Stand-ins behind the ports of the request path, on a virtual clock; each passes its port's contract (test_ports).

They keep what the real ones promise: after `abort`, an end, a loss or bad bytes a link tells its sink nothing; a paused
link holds back what the engine says; a cancelled connect is never heard of again.
"""

from collections.abc import Callable

from sidecar.core.breaker import Transition
from sidecar.core.poison import Condemned
from sidecar.kernel.errors import Reason, Refusal
from sidecar.kernel.exchange import Header, ResponseHead
from sidecar.kernel.ids import EndpointKey
from sidecar.policy.schema import Endpoint
from sidecar.proxy.exchange import Exchange
from sidecar.proxy.ports import AttemptRecord, RequestRecord, Sink

SSE = b"text/event-stream"
JSON = b"application/json"


def head_of(
    status: int = 200,
    content_type: bytes = SSE,
    length: int | None = None,
    *,
    encoded: bool = False,
    retry_after: tuple[Header, ...] = (),
    upgrade: bytes = b"",
) -> ResponseHead:
    lines = [b"content-type: %b\r\n" % content_type] if content_type else []
    return ResponseHead(status, b"OK", lines, content_type, length, encoded, upgrade, retry_after)


class FakeLink:
    """A connection to an engine; the lower half is the engine."""

    def __init__(self, *, used: bool = False) -> None:
        self.used = used
        self.received = False
        self.sink: Sink | None = None
        self.aborted = False
        self.reading = True
        self.head = b""
        self.body = b""
        self.head_only = False
        self.upgrade = False
        self.chunked_upload: bool | None = None
        self.uploaded = b""
        self.upload_ended = False
        self.upload_trailers: list[bytes] = []
        self.tunnelled = b""
        self._backlog: list[tuple[Callable[[Sink], object], bool]] = []

    def send(self, sink: Sink, head: bytes, body: bytes, *, head_only: bool, upgrade: bool) -> None:
        self.sink = sink
        self.head, self.body, self.head_only, self.upgrade = head, body, head_only, upgrade

    def open_upload(self, *, chunked: bool) -> None:
        self.chunked_upload = chunked

    def upload(self, data: bytes) -> None:
        self.uploaded += data

    def end_upload(self, trailers: list[bytes]) -> None:
        self.upload_ended = True
        self.upload_trailers = trailers

    def send_tunnel(self, data: bytes) -> None:
        self.tunnelled += data

    def pause(self) -> None:
        self.reading = False

    def resume(self) -> None:
        self.reading = True
        while self.reading and self._backlog:
            say, last = self._backlog.pop(0)
            self._say(say, last)

    def abort(self) -> None:
        self.aborted = True
        self.sink = None
        self._backlog = []

    def close(self) -> None:
        self.abort()

    # The engine; its words can be strung together.

    def _say(self, say: Callable[[Sink], object], last: bool = False) -> "FakeLink":
        if not self.reading:
            self._backlog.append((say, last))
            return self
        sink = self.sink
        if sink is not None:
            if last:
                self.sink = None
            say(sink)
        return self

    def informs(self, status: int = 103) -> "FakeLink":
        self.received = True
        return self._say(lambda sink: sink.on_informational(head_of(status, b"")))

    def heads(self, head: ResponseHead | None = None) -> "FakeLink":
        self.received = True
        made = head or head_of()
        return self._say(lambda sink: sink.on_head(made))

    def says(self, data: bytes) -> "FakeLink":
        self.received = True
        return self._say(lambda sink: sink.on_body(data))

    def ends(self, *trailers: bytes) -> "FakeLink":
        def end(sink: Sink) -> None:
            sink.on_end(list(trailers))
            sink.on_released()

        return self._say(end, True)

    def lost(self) -> "FakeLink":
        return self._say(lambda sink: sink.on_lost(), True)

    def talks_rubbish(self) -> "FakeLink":
        self.received = True
        return self._say(lambda sink: sink.on_bad_bytes("no HTTP"), True)

    def tunnels(self, data: bytes = b"") -> "FakeLink":
        self.received = True
        return self._say(lambda sink: sink.on_tunnel(head_of(101, b"", upgrade=b"websocket"), data))

    def tunnels_on(self, data: bytes) -> "FakeLink":
        return self._say(lambda sink: sink.on_tunnel_data(data))

    def blocks_upload(self) -> "FakeLink":
        return self._say(lambda sink: sink.on_upload_paused())

    def takes_upload(self) -> "FakeLink":
        return self._say(lambda sink: sink.on_upload_resumed())


class Opening:
    """One asking for a connection."""

    def __init__(self, key: EndpointKey, connect_s: float, sink: Sink, fresh: bool) -> None:
        self.key = key
        self.connect_s = connect_s
        self.sink: Sink | None = sink
        self.fresh = fresh
        self.link: FakeLink | None = None


class FakeConnector:
    """Gives a link at once, unless `later`: then `connect` or `refuse` decides. `used` is how links look."""

    def __init__(self) -> None:
        self.openings: list[Opening] = []
        self.later = False
        self.used = False
        self.on_open: Callable[[FakeLink], object] | None = None

    def open(self, key: EndpointKey, endpoint: Endpoint, connect_s: float, sink: Sink, *, fresh: bool = False) -> None:
        opening = Opening(key, connect_s, sink, fresh)
        self.openings.append(opening)
        if not self.later:
            self.connect(used=self.used and not fresh)

    def cancel(self, sink: Sink) -> None:
        for opening in self.openings:
            if opening.sink is sink:
                opening.sink = None

    @property
    def pending(self) -> int:
        """Connects that somebody still waits for."""
        return sum(opening.sink is not None for opening in self.openings)

    def connect(self, *, used: bool = False) -> FakeLink:
        """The last asking is granted."""
        opening = self.openings[-1]
        sink, opening.sink = opening.sink, None
        opening.link = link = FakeLink(used=used)
        if sink is not None:
            sink.on_connected(link)
        if self.on_open is not None:
            self.on_open(link)
        return link

    def refuse(self, detail: str = "nobody listens") -> None:
        """The last asking fails."""
        opening = self.openings[-1]
        sink, opening.sink = opening.sink, None
        if sink is not None:
            sink.on_connect_failed(detail)

    @property
    def links(self) -> list[FakeLink]:
        return [opening.link for opening in self.openings if opening.link is not None]

    @property
    def link(self) -> FakeLink:
        """The newest link."""
        return self.links[-1]


class FakeClient:
    """The client's end of one exchange: what it got, and how its reply stands."""

    def __init__(self, peer: str = "10.0.0.9", loopback: bool = False) -> None:
        self.peer = peer
        self.loopback = loopback
        self.exchange: Exchange | None = None
        self.informational: list[int] = []
        self.head: ResponseHead | None = None
        self.extra = b""
        self.body = b""
        self.ended = False
        self.trailers: list[bytes] = []
        self.refusal: Refusal | None = None
        self.is_cut = False
        self.closes = False
        self.tunnel: ResponseHead | None = None
        self.upload_paused = False
        self.done = 0
        self.on_write: Callable[[], None] | None = None

    @property
    def scheme(self) -> bytes:
        return b"http"

    @property
    def can_append(self) -> bool:
        return self.head is None or self.head.content_length is None

    def _write(self) -> None:
        assert not self.ended and self.refusal is None, "written to after the reply's end"
        if self.on_write is not None:
            self.on_write()

    def send_informational(self, head: ResponseHead) -> None:
        self._write()
        self.informational.append(head.status)

    def send_head(self, head: ResponseHead, extra: bytes, body: bytes) -> None:
        assert self.head is None, "two heads"
        self.head, self.extra = head, extra
        self.body += body
        self._write()

    def send_body(self, data: bytes) -> None:
        assert self.head is not None or self.tunnel is not None, "a body without a head"
        assert data, "an empty write would end a chunked body"
        self.body += data
        self._write()

    def send_end(self, trailers: list[bytes]) -> None:
        assert self.head is not None, "an end without a head"
        self._write()
        self.ended = True
        self.trailers = trailers

    def refuse(self, refusal: Refusal, request_id: bytes, extra: bytes) -> None:
        assert self.head is None, "a refusal after a head"
        self._write()
        self.refusal, self.extra = refusal, extra

    def start_tunnel(self, head: ResponseHead, extra: bytes, data: bytes) -> None:
        assert self.head is None
        self.tunnel, self.extra = head, extra
        self.body += data
        self._write()

    def cut(self) -> None:
        self.is_cut = True

    def close_after_reply(self) -> None:
        self.closes = True

    def pause_upload(self) -> None:
        self.upload_paused = True

    def resume_upload(self) -> None:
        self.upload_paused = False

    def exchange_done(self) -> None:
        self.done += 1
        self.exchange = None


class FakeRecorder:
    """Keeps every record."""

    def __init__(self) -> None:
        self.attempts: list[AttemptRecord] = []
        self.requests: list[RequestRecord] = []
        self.transitions: list[Transition] = []
        self.condemnations: list[Condemned] = []
        self.refusals: list[Reason] = []
        self.malformed: list[EndpointKey] = []

    def attempt(self, record: AttemptRecord) -> None:
        self.attempts.append(record)

    def request(self, record: RequestRecord) -> None:
        self.requests.append(record)

    def transition(self, transition: Transition, trace: str = "") -> None:
        self.transitions.append(transition)

    def condemned(self, prompt: Condemned) -> None:
        self.condemnations.append(prompt)

    def refused(self, reason: Reason) -> None:
        self.refusals.append(reason)

    def malformed_upstream(self, endpoint: EndpointKey) -> None:
        self.malformed.append(endpoint)
