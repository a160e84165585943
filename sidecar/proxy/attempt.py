r"""One wire attempt: a request on one connection to one engine, its deadlines, and what it came to.

```
CONNECTING -> WAITING -> HOLDING -> FLOWING -> DONE          (any of them -> DONE; WAITING -> TUNNEL -> DONE)
                 \___________________/^
```

Nothing is committed downstream while it could still be re-sent: an inference stream is held until its first token (a
head, comments and a role-only chunk are no sign of life: engines send them while the request still queues), an answer
that is no stream until it is whole, both up to 64 KiB. So a first-token deadline can move the request elsewhere, and
an error under 200 can, too. What is no inference is committed at its head.

Once flowing, every read goes to the client first and to the reader after; deadlines move by an assignment, and one
watchdog for all attempts looks at them when they were due.
"""

from collections.abc import Callable
from enum import Enum
from math import inf, nan
from typing import Final, Protocol

from sidecar.core.canary import Trial, group_of
from sidecar.core.classify import ABORTED, ending_of_error, ending_of_status, ending_of_stream, retry_after_s
from sidecar.core.detector import Expectation
from sidecar.core.pool import Node
from sidecar.core.service import Times
from sidecar.kernel.exchange import ResponseHead
from sidecar.kernel.outcome import Ending, Result
from sidecar.proxy.forwarded import held_body
from sidecar.proxy.ports import AttemptRecord, Client, Connector, Link
from sidecar.proxy.request import Request
from sidecar.proxy.watchdog import Watchdog
from sidecar.wire.answer import Usage, is_json, read_answer
from sidecar.wire.call import Api, Call
from sidecar.wire.stream import StreamReader

HELD_BYTES: Final = 64 * 1024
"""What is held of an answer before it is committed unseen: errors and role chunks are far smaller."""

STALE_S: Final = 1.0
"""A reused connection that closes without a byte within this time of sending had been closed before we sent: engines
close idle connections silently, and the reset comes within a round trip. Later, the engine died of the request."""

ERROR_GRACE_S: Final = 0.1
"""After an error event before any token, an engine ends its stream at once; one that does not is not waited for."""

_EVENT_STREAM: Final = b"text/event-stream"


_NOT_OURS: Final = frozenset({Ending.EMPTY, Ending.TRUNCATED})
"""What is whole by its framing and no answer by its content may be bytes that were sent behind an earlier answer. The
true answer is then still to come, and must not become the next request's."""


class Phase(Enum):
    """Where an attempt stands."""

    __hash__ = object.__hash__  # Enum's own is a Python call

    CONNECTING = "connecting"
    WAITING = "waiting"
    HOLDING = "holding"
    FLOWING = "flowing"
    TUNNEL = "tunnel"
    DONE = "done"


# A constant is a load; an enum's member is looked up in its class each time.
_CONNECTING: Final = Phase.CONNECTING
_WAITING: Final = Phase.WAITING
_HOLDING: Final = Phase.HOLDING
_FLOWING: Final = Phase.FLOWING
_TUNNEL: Final = Phase.TUNNEL
_DONE: Final = Phase.DONE
_COMPLETE: Final = Ending.COMPLETE
_CLIENT_LEFT: Final = Ending.CLIENT_LEFT
_TOTAL_TIMEOUT: Final = Ending.TOTAL_TIMEOUT
_TTFT_TIMEOUT: Final = Ending.TTFT_TIMEOUT
_HEAD_TIMEOUT: Final = Ending.HEAD_TIMEOUT
_TOKEN_GAP_TIMEOUT: Final = Ending.TOKEN_GAP_TIMEOUT

TRANSITIONS: Final = {
    # A stale connection sends a waiting attempt back to connecting, once.
    _CONNECTING: frozenset({_WAITING, _DONE}),
    _WAITING: frozenset({_CONNECTING, _HOLDING, _FLOWING, _TUNNEL, _DONE}),
    _HOLDING: frozenset({_FLOWING, _DONE}),
    _FLOWING: frozenset({_DONE}),
    _TUNNEL: frozenset({_DONE}),
    _DONE: frozenset[Phase](),
}


class Owner(Protocol):
    """The exchange that an attempt belongs to."""

    def reply_lines(self, attempt: "Attempt") -> bytes:
        """Our header lines for the answer of this attempt."""

    def attempt_accepted(self, attempt: "Attempt") -> None:
        """The engine took the request: its answer is being committed."""

    def attempt_late(self, attempt: "Attempt") -> None:
        """No token came in the time that was expected; it goes on all the same, unless it is stopped."""

    def attempt_done(self, attempt: "Attempt") -> None:
        """`attempt.ending` is set, its link is given back."""


class Attempt:
    """One attempt; a `Sink` for its link. `ending` is set once, when it is done.

    Times are the loop's seconds. `first_token_at` and `last_token_at` are 0 while no token came; `max_gap_s` is the
    longest wait between two token-bearing reads. `paused_at`: when the client first did not read, 0 while it always
    did. `bytes_out` counts body bytes sent to the client. `expectation` is to be set before `start`, where there is
    one.
    """

    __slots__ = (
        "_came_to",
        "_client",
        "_clock",
        "_closed_whole",
        "_connector",
        "_due",
        "_due_ending",
        "_engine_head",
        "_erred",
        "_held",
        "_held_size",
        "_late_at",
        "_link",
        "_paused",
        "_pieces",
        "_request",
        "_restarted",
        "_slot",
        "_times",
        "_total_at",
        "_trailers",
        "_upload_ended",
        "_upload_stuck",
        "_watchdog",
        "_watched_at",
        "bytes_out",
        "call",
        "committed",
        "detail",
        "ending",
        "expectation",
        "finish_reason",
        "first_token_at",
        "head",
        "last_token_at",
        "max_gap_s",
        "node",
        "owner",
        "paused_at",
        "phase",
        "reader",
        "reused_connection",
        "sent_at",
        "started_at",
        "usage",
    )

    def __init__(
        self,
        owner: Owner,
        request: Request,
        call: Call | None,
        client: Client,
        node: Node,
        connector: Connector,
        clock: Callable[[], float],
        watchdog: Watchdog,
        times: Times,
        total_at: float,
    ) -> None:
        self.owner = owner
        self._request = request
        self.call = call
        self._client = client
        self.node = node
        self._connector = connector
        self._clock = clock
        self._watchdog = watchdog
        self._times = times
        self._total_at = total_at
        self._late_at = inf
        self.expectation: Expectation | None = None
        self._engine_head = b""
        self._link: Link | None = None
        self._held: list[bytes] = []
        self._held_size = 0
        self._erred = False
        self._trailers: list[bytes] = []
        self._closed_whole = False
        self._paused = False
        self._restarted = False
        self._upload_ended = False
        self._upload_stuck = False
        self._slot = 0
        self._watched_at = 0.0
        self._due = 0.0
        self._due_ending = _TOTAL_TIMEOUT
        self._came_to = _COMPLETE
        self.phase = _CONNECTING
        self.ending: Ending | None = None
        self.detail = ""
        self.head: ResponseHead | None = None
        self.reader: StreamReader | None = None
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self.committed = False
        self.reused_connection = False
        self.started_at = clock()
        self.sent_at = 0.0
        self.first_token_at = 0.0
        self.last_token_at = 0.0
        self.max_gap_s = 0.0
        self.paused_at = 0.0
        self.bytes_out = 0

    @property
    def request_id(self) -> bytes:
        """Of the request that it is an attempt at."""
        return self._request.request_id

    # What the exchange calls.

    def start(self, engine_head: bytes) -> None:
        """Ask for a connection; it may be there at once."""
        self._engine_head = engine_head
        if not self._request.held and not self._request.complete:
            self._client.pause_upload()
        self._connect(fresh=False)

    def push_upload(self) -> None:
        """Send on what has come of a streamed body."""
        link, request = self._link, self._request
        if link is None or self._upload_ended:
            return
        pieces = request.pieces
        if pieces:
            data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            link.upload(data)
        if request.complete:
            self._upload_ended = True
            link.end_upload(request.trailers)
            if self.phase is _WAITING:
                self._await_head(self._clock())
        elif self.phase is _WAITING and not self._upload_stuck:
            self._watch(self._total_at, _TOTAL_TIMEOUT)

    def push_tunnel(self, data: bytes) -> None:
        """Bytes of a tunnel from the client."""
        if self._link is not None:
            self._link.send_tunnel(data)

    def pause(self) -> None:
        """The client does not read: stop reading the engine, and charge it for no silence."""
        self._paused = True
        if not self.paused_at:
            self.paused_at = self._clock()
        if self._link is not None:
            self._link.pause()

    def resume(self) -> None:
        """The client reads again; the engine's clock starts anew."""
        self._paused = False
        if self._link is not None:
            self._link.resume()
        now = self._clock()
        reader = self.reader
        self._late_at = inf  # of what came meanwhile nobody knows when
        if self.phase is _FLOWING and self.call is not None:
            if self.last_token_at:
                self.last_token_at = now
                if self.expectation is not None and reader is not None and not reader.tool_call:
                    self._late_at = now + self.expectation.late_gap_s
            if self.last_token_at or reader is None:
                self._await_more(now)
            else:
                self._await_head(now)
        elif self.phase is _HOLDING or (self.phase is _WAITING and self._upload_ended):
            self._await_head(now)

    def stop(self, ending: Ending) -> None:
        """Give up, for a reason that is not the engine's."""
        self._end(ending)

    def leave(self) -> None:
        """Give up, for the client is gone. It may have gone because all was said: OpenAI's clients close the connection
        at `[DONE]`, and at an error event, before the engine's framing can end. Then that is what it came to."""
        reader = self.reader
        if reader is not None and self.phase is _FLOWING and (reader.terminal or reader.error is not None):
            self._end(self._judge_stream(reader, False))
        else:
            self._end(_CLIENT_LEFT)

    def deliver(self) -> None:
        """Commit what is held of an answer that ended: a good one, or the last one when nothing else worked."""
        self._commit()

    # What the link calls.

    def on_connected(self, link: Link) -> None:
        request = self._request
        self._link = link
        self._move(_WAITING)
        self.reused_connection = link.used
        now = self._clock()
        self.sent_at = now
        if self.expectation is not None:
            self._late_at = now + self.expectation.late_s
        body = held_body(request) if request.held else b""
        if self._paused:
            link.pause()
        link.send(self, self._engine_head, body, head_only=request.method == b"HEAD", upgrade=bool(request.upgrade))
        if request.held or not request.has_body:
            self._upload_ended = True
        else:
            link.open_upload(chunked=request.chunked)
            if not request.complete:
                self._client.resume_upload()
            if request.pieces or request.complete or not request.expect_continue:
                self.push_upload()
                return
            # It is the engine that keeps the client waiting: for its 100.
        self._await_head(now)

    def on_connect_failed(self, detail: str) -> None:
        self.detail = detail
        self._end(Ending.CONNECT_FAILED)

    def on_informational(self, head: ResponseHead) -> None:
        # Where the body was held, the client was told to send it before the engine was asked.
        if head.status != 100 or not self._request.held:
            self._client.send_informational(head)

    def on_head(self, head: ResponseHead) -> None:
        self.head = head
        call = self.call
        if call is None or head.encoded:
            # Nothing to learn from the body before it is passed on.
            self._late_at = inf
            self._move(_FLOWING)
            self._commit()
            self._watch(self._total_at, _TOTAL_TIMEOUT)
            return
        self._move(_HOLDING)
        # An answer that is no stream must be whole by the deadline of its head: engines send both at once.
        if head.status == 200 and head.content_type == _EVENT_STREAM:
            self.reader = StreamReader(call.api)
            self._watch(self.sent_at + self._times.first_token_s, _TTFT_TIMEOUT)
        else:
            self._late_at = inf  # no tokens of it are seen

    def on_body(self, data: bytes) -> None:
        reader = self.reader
        if self.phase is _FLOWING:
            self.bytes_out += len(data)
            self._client.send_body(data)
            if reader is not None:
                if reader.feed(data):
                    self._token()
            elif self.call is not None:
                self._await_more(self._clock())
            return
        self._held.append(data)
        self._held_size += len(data)
        if reader is not None and reader.feed(data):
            self._token()
            self._flow()
        elif reader is not None and reader.error is not None and not self._erred:
            # Nothing good can follow, and nothing is committed. The rest of this read is held, too.
            self._erred = True
            self._watch(self._clock() + ERROR_GRACE_S, Ending.ERROR_IN_BAND)
        elif self._held_size > HELD_BYTES:
            self._flow()

    def on_end(self, trailers: list[bytes]) -> bool:
        self._link = None
        self._trailers = trailers
        self._closed_whole = True
        self._came_to = ending = _COMPLETE if self.phase is _TUNNEL else self._judge()
        return ending not in _NOT_OURS

    def on_released(self) -> None:
        self._end(self._came_to)

    def on_lost(self) -> None:
        link, self._link = self._link, None
        if self.phase is _WAITING:
            if link is not None and not link.received and self._is_stale():
                self._restarted = True
                self._unwatch()
                self._move(_CONNECTING)
                self._connect(fresh=True)
                return
            self.detail = "the engine closed the connection before it answered"
            self._end(Ending.RESET_BEFORE_HEAD)
        elif self.phase is _TUNNEL:
            self._end(_COMPLETE)
        else:
            self.detail = "the engine's answer broke off"
            self._end(self._judge_broken())

    def on_bad_bytes(self, detail: str) -> None:
        self._link = None
        self.detail = f"the engine's bytes are not HTTP/1.1: {detail}"
        if self.phase is _FLOWING or (self.reader is not None and self.reader.events):
            self._end(self._judge_broken())
        else:
            self._end(Ending.BAD_BYTES)

    def on_tunnel(self, head: ResponseHead, data: bytes) -> None:
        self.head = head
        self._move(_TUNNEL)
        self.committed = True
        self._unwatch()
        self.owner.attempt_accepted(self)
        self._client.start_tunnel(head, self.owner.reply_lines(self), data)

    def on_tunnel_data(self, data: bytes) -> None:
        self.bytes_out += len(data)
        self._client.send_body(data)

    def on_upload_paused(self) -> None:
        self._upload_stuck = True
        self._client.pause_upload()
        if self.phase is _WAITING:
            self._await_head(self._clock())

    def on_upload_resumed(self) -> None:
        self._upload_stuck = False
        self._client.resume_upload()
        if self.phase is _WAITING and not self._upload_ended:
            self._watch(self._total_at, _TOTAL_TIMEOUT)

    # Our own.

    def _connect(self, *, fresh: bool) -> None:
        node = self.node
        self._connector.open(node.key, node.endpoint, self._times.connect_s, self, fresh=fresh)

    def _await_head(self, now: float) -> None:
        times = self._times
        call = self.call
        head_at = now + times.head_s
        if call is not None and call.stream and now + times.first_token_s < head_at:
            self._watch(now + times.first_token_s, _TTFT_TIMEOUT)
        else:
            self._watch(head_at, _HEAD_TIMEOUT)

    def _await_more(self, now: float) -> None:
        reader = self.reader
        times = self._times
        gap_s = times.tool_gap_s if reader is not None and reader.tool_call else times.token_gap_s
        self._watch(now + gap_s, _TOKEN_GAP_TIMEOUT)

    def _token(self) -> None:
        now = self._clock()
        if self.last_token_at:
            gap = now - self.last_token_at
            if gap > self.max_gap_s:
                self.max_gap_s = gap
        else:
            self.first_token_at = now
        self.last_token_at = now
        if self.expectation is not None:
            reader = self.reader
            self._late_at = now + self.expectation.late_gap_s if reader is None or not reader.tool_call else inf
        self._await_more(now)

    def _flow(self) -> None:
        self._move(_FLOWING)
        self._commit()
        if self.reader is None:
            self._await_more(self._clock())

    def _commit(self) -> None:
        head = self.head
        assert head is not None
        self.committed = True
        self._request.body = b""
        self.owner.attempt_accepted(self)
        held = self._held
        body = held[0] if len(held) == 1 else b"".join(held)
        self._held = []
        self.bytes_out += len(body)
        self._client.send_head(head, self.owner.reply_lines(self), body)

    def _judge(self) -> Ending:
        """What a whole answer came to."""
        head, call, reader = self.head, self.call, self.reader
        assert head is not None
        if call is None:
            return ending_of_status(head.status, None, bool(head.retry_after))
        if reader is not None:
            return self._judge_stream(reader, True)
        if self.committed:
            # Too large to be held whole: judged by its status and its framing alone.
            return ending_of_status(head.status, None, bool(head.retry_after))
        body = b"".join(self._held)
        if head.status == 204 or 300 <= head.status < 400:
            return _COMPLETE
        answer = read_answer(call.api, body, status=head.status)
        self.usage = answer.usage
        self.finish_reason = answer.finish_reason
        if answer.error is not None:
            self.detail = answer.error.message
        if head.status >= 400:
            return ending_of_status(head.status, answer.error, self.retry_after_s(0.0) is not None)
        if answer.error is not None:
            return ending_of_error(answer.error)
        if not body or (call.api is not Api.OTHER and not head.content_type.endswith(b"json")):
            self.detail = f"the engine answered {head.status} with a body that is no JSON"
            return Ending.EMPTY
        if answer.malformed and call.api is not Api.OTHER and not is_json(body):
            self.detail = f"the engine answered {head.status} with JSON that breaks off"
            return Ending.TRUNCATED
        return Ending.ABORTED if answer.finish_reason == ABORTED else _COMPLETE

    def _judge_broken(self) -> Ending:
        """What an answer came to whose connection broke after its head."""
        if self.reader is None:
            return Ending.TRUNCATED
        ending = self._judge_stream(self.reader, False)
        self._end_early(ending)
        return ending

    def _end_early(self, ending: Ending) -> None:
        """What is missing after the API's own end carried nothing, unless the head promised so many bytes."""
        self._closed_whole = ending is _COMPLETE and self.head is not None and self.head.content_length is None

    def _judge_stream(self, reader: StreamReader, clean: bool) -> Ending:
        ending = ending_of_stream(reader, clean)
        if reader.error is not None:
            self.detail = reader.error.message
        elif ending is Ending.EMPTY:
            self.detail = "the engine answered 200 and sent no event"
        elif ending is Ending.TRUNCATED and clean:
            self.detail = "the stream ended without its end marker"
        return ending

    def record(self, service: str, result: Result, now: float, *, copy: bool = False) -> AttemptRecord:
        """What is told of it once `ending` is set; `copy`: it was a probe's."""
        ending, head, reader, node = self.ending, self.head, self.reader, self.node
        assert ending is not None
        return AttemptRecord(
            service=service,
            version=node.version,
            endpoint=node.key,
            ending=ending,
            result=result,
            status=head.status if head is not None else 0,
            duration_s=now - self.started_at,
            ttft_s=self.first_token_at - self.sent_at if self.first_token_at else None,
            malformed_events=reader.malformed if reader is not None else 0,
            reused_connection=self.reused_connection,
            copy=copy,
        )

    def observe(self, trial: Trial, result: Result, session: str | None, now: float) -> None:
        """Tell a rollout's trial how it went, once `ending` is set. What a slow client held up says nothing of time."""
        ending, reader, usage = self.ending, self.reader, self.usage
        assert ending is not None
        first_at, paused_at = self.first_token_at, self.paused_at
        tokens = reader.tokens if reader is not None else 0
        if usage is not None and usage.completion_tokens:
            # An event may carry several tokens, of one version and not of the other.
            tokens = usage.completion_tokens
        first_s = gap_s = nan
        if first_at and (not paused_at or first_at < paused_at):
            first_s = first_at - self.sent_at
            waited_s = self.last_token_at - first_at
            if tokens > 1 and waited_s > 0.0 and not paused_at:
                gap_s = waited_s / (tokens - 1)
        elif ending is _CLIENT_LEFT and not first_at and self.sent_at:
            call = self.call
            if call is not None and call.stream:
                first_s = now - self.sent_at
        trial.observe(
            self.node.version,
            self._request.body_size,
            ending,
            result,
            first_s,
            gap_s,
            tokens,
            self.finish_reason or "",
            group_of(session) if session is not None else -1,
        )

    def retry_after_s(self, now_wall: float) -> float | None:
        """What the answer asks us to wait; None where it asks nothing."""
        head = self.head
        return retry_after_s(head.retry_after, now_wall) if head is not None and head.retry_after else None

    @property
    def whole(self) -> bool:
        """Whether the answer's framing came to its end, so that the client's reply can be ended cleanly."""
        return self._closed_whole

    @property
    def restarted(self) -> bool:
        """Whether it was sent anew to the same node: a connection that was used before broke at once, as if stale."""
        return self._restarted

    @property
    def spoke(self) -> bool:
        """Whether a token came, as far as that can be told before the answer is whole."""
        return self.first_token_at > 0.0

    @property
    def is_stream(self) -> bool:
        """Whether the answer is an event stream that was read as one."""
        return self.reader is not None

    @property
    def trailers(self) -> list[bytes]:
        """The answer's trailers, as header lines."""
        return self._trailers

    def _is_stale(self) -> bool:
        return (
            self.reused_connection
            and not self._restarted
            and self._request.resendable
            and self._clock() - self.sent_at < STALE_S
        )

    def _expired(self) -> None:
        ending = self._due_ending
        reader = self.reader
        if reader is not None and (reader.terminal or reader.error is not None):
            # All was said; only the connection was not ended.
            ending = self._judge_stream(reader, True)
            self._end_early(ending)
        self._end(ending)

    def _watch(self, due: float, ending: Ending) -> None:
        if due > self._total_at or self._paused:
            due = self._total_at
            ending = _TOTAL_TIMEOUT
        self._due = due
        self._due_ending = ending
        if self._late_at < due:
            due = self._late_at
        if not self._slot:
            self._watched_at = due
            self._slot = self._watchdog.add(self, due)
        elif due < self._watched_at:
            self._watchdog.remove(self, self._slot)
            self._watched_at = due
            self._slot = self._watchdog.add(self, due)

    def look(self, now: float) -> None:
        """Our deadline's time has come, unless it was moved."""
        self._slot = 0
        if self.phase is _DONE:
            return  # ended while this round of looks was under way
        if now >= self._late_at:
            self._late_at = inf
            reader = self.reader
            said_all = reader is not None and (reader.terminal or reader.error is not None)
            if not said_all and not self._paused:
                self.owner.attempt_late(self)
                if self.ending is not None:
                    return
        if now < self._due:
            self._watch(self._due, self._due_ending)
        elif self._paused and self._due < self._total_at:
            # Paused after this deadline was set: the silence is the client's.
            self._watch(self._total_at, _TOTAL_TIMEOUT)
        else:
            self._expired()

    def _unwatch(self) -> None:
        if self._slot:
            self._watchdog.remove(self, self._slot)
            self._slot = 0

    def _move(self, phase: Phase) -> None:
        assert phase in TRANSITIONS[self.phase], (self.phase, phase)
        self.phase = phase

    def _end(self, ending: Ending) -> None:
        if self.phase is _DONE:
            return
        if self.phase is _CONNECTING:
            self._connector.cancel(self)
        tunnel = self.phase is _TUNNEL
        self._move(_DONE)
        self._unwatch()
        link, self._link = self._link, None
        if link is not None:
            if tunnel:
                link.close()  # what the client said last still goes out
            else:
                link.abort()
        if self.reader is not None and self.usage is None:
            self.usage = self.reader.usage
            self.finish_reason = self.reader.finish_reason
        self.ending = ending
        self.owner.attempt_done(self)
