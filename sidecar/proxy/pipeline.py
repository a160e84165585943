"""The way of a request, stage by stage, on one screen: `Exchange._flow`.

The flow is a coroutine that no task runs. Between its stages nothing waits, so nothing can interleave and nothing
needs a lock; it waits in one place, for an attempt to end, and whoever ends the attempt resumes it. A task would cost
three more turns of the event loop per request and do nothing else (docs/adr/0001).

Bytes do not pass through here: an attempt hands them from the engine's connection to the client's.
"""

from collections.abc import Callable, Coroutine, Generator
from types import coroutine
from typing import Any, Final

from sidecar.core.balance import Choice, Unavailable, bind, pick
from sidecar.core.breaker import Breaker, Denied, Permit, Transition
from sidecar.core.fleet import Fleet, ServiceState, Session
from sidecar.core.identify import NOBODY
from sidecar.core.split import pick_version
from sidecar.kernel.errors import STATUS, Reason, Refusal, SidecarError
from sidecar.kernel.ids import EndpointKey
from sidecar.kernel.outcome import DOCTRINE, Ending, Result
from sidecar.policy.store import PolicyStore
from sidecar.proxy.attempt import Attempt
from sidecar.proxy.flags import flag_of
from sidecar.proxy.forwarded import engine_head
from sidecar.proxy.ports import AttemptRecord, Client, Connector, Recorder, RequestRecord
from sidecar.proxy.request import Request
from sidecar.proxy.watchdog import Timers, Watchdog
from sidecar.wire.call import API_BY_PATH, Call, read_call
from sidecar.wire.headers import is_safe_id
from sidecar.wire.refusal import error_event

_STILL_DEAF: Final = frozenset({Ending.HEAD_TIMEOUT, Ending.TTFT_TIMEOUT, Ending.OVERLOADED, Ending.OVERLOADED_IN_BAND})
"""Endings after which the same endpoint is not asked again by the same request: it would only take as long."""


_IGNORED: Final = Result.IGNORED
_OVERLOADED: Final = Result.OVERLOADED
_FAILURE: Final = Result.FAILURE
_CLIENT_LEFT: Final = Ending.CLIENT_LEFT
_COMPLETE: Final = Ending.COMPLETE
_CONNECT_FAILED: Final = Ending.CONNECT_FAILED
_UPSTREAM_RESET: Final = Reason.UPSTREAM_RESET


class Pipeline:
    """What every exchange shares. `now_wall` gives seconds since the epoch, `new_id` a fresh request id."""

    def __init__(
        self,
        store: PolicyStore,
        fleet: Fleet,
        connector: Connector,
        recorder: Recorder,
        timers: Timers,
        *,
        now_wall: Callable[[], float],
        new_id: Callable[[], bytes],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self.store = store
        self.fleet = fleet
        self.connector = connector
        self.recorder = recorder
        self.clock = timers.time
        self.watchdog = Watchdog(timers)
        self.now_wall = now_wall
        self.new_id = new_id
        self.on_crash = on_crash
        self.draining = False
        self.live = 0
        self._idle_client_s = 60.0
        self._body_limit = 0
        self.policy_changed()

    def policy_changed(self) -> None:
        """Work out anew what connections need before a request's service is known."""
        services = self.store.current.services
        self._idle_client_s = max((float(service.deadlines.idle_client_s) for service in services), default=60.0)
        self._body_limit = max((service.limits.body_bytes for service in services), default=1 << 20)

    def idle_client_s(self) -> float:
        """How long a client may be silent, in seconds."""
        return self._idle_client_s

    def body_limit(self) -> int:
        """The largest inference body that any service takes, in bytes."""
        return self._body_limit

    def exchange(self, request: Request, client: Client) -> "Exchange":
        """One request's way through; `start` it."""
        return Exchange(self, request, client)


class Exchange:
    """One request, from its head to its record. Owned by its client connection, which ends with `exchange_done`."""

    __slots__ = (
        "_attempt",
        "_attempts",
        "_binds",
        "_choice",
        "_client",
        "_cut_reason",
        "_flow_state",
        "_lent",
        "_node_failing",
        "_pipeline",
        "_reason",
        "_request",
        "_request_id",
        "_session",
        "_status",
        "_total_at",
        "_waiting",
        "_who",
        "started_at",
    )

    def __init__(self, pipeline: Pipeline, request: Request, client: Client) -> None:
        self._pipeline = pipeline
        self._request = request
        self._client = client
        self._attempt: Attempt | None = None
        self._attempts = 0
        self._choice: Choice | None = None
        self._session: Session | None = None
        self._binds = True
        self._who = NOBODY
        self._reason: Reason | None = None
        self._cut_reason: Reason | None = None
        self._lent: Choice | None = None
        self._node_failing = False
        self._status = 0
        self._waiting = False
        self._request_id = request.request_id if is_safe_id(request.request_id) else pipeline.new_id()
        self.started_at = pipeline.clock()
        self._total_at = self.started_at
        self._flow_state: Coroutine[Any, Any, None] = self._flow()

    # The flow.

    async def _flow(self) -> None:
        pipeline, request = self._pipeline, self._request
        fleet, now = pipeline.fleet, self.started_at
        call: Call | None = None
        service: ServiceState | None = None
        request_breaker: Breaker | None = None
        request_permit: Permit | Denied | None = None
        session_permit: Permit | Denied | None = None
        try:
            if pipeline.draining:
                return self._refuse(Reason.DRAINING, "this sidecar is shutting down", 1.0)
            # parse
            if request.api is not None:
                call = read_call(request.api, request.body)
            model = call.model if call is not None else ""
            # identify
            service = fleet.service_for(model)
            if service is None:
                return self._refuse(Reason.UNKNOWN_MODEL, f"no service has the model {model[:128]!r}", param="model")
            self._total_at = now + service.times.total_s
            if call is not None:
                if len(request.body) > service.body_bytes:
                    limit = service.body_bytes
                    return self._refuse(Reason.TOO_LARGE, f"the body exceeds {limit} bytes (limits.body_bytes)")
                self._who = who = fleet.identifier.identify(request.headers, call.user)
                # admit: the kind of request, and the session
                fallback = self._fallback_of(service)
                key = _request_key(service.request_key, request)
                if key is not None:
                    request_breaker = service.request_breaker(key, now)
                    request_permit = request_breaker.acquire(now)
                    if isinstance(request_permit, Permit):
                        self._note(request_permit)
                    elif fallback is None:
                        return self._deny(Reason.REQUEST_OPEN, "requests of this kind keep failing", request_permit)
                if who.session is not None:
                    self._session = service.session(who.session, now)
                    session_permit = service.admit_session(self._session, now)
                    if isinstance(session_permit, Permit):
                        self._note(session_permit)
                    elif fallback is None:
                        return self._deny(Reason.SESSION_OPEN, "this session's requests keep failing", session_permit)
                if fallback is not None and (isinstance(request_permit, Denied) or isinstance(session_permit, Denied)):
                    return await self._serve(fallback, call, home=False)
            await self._serve(service, call)
        except SidecarError as error:
            self._refuse(error.reason, error.detail)
        except Exception as exc:  # noqa: BLE001 - here a request begins: its crash is its own
            self._crashed(exc)
        finally:
            self._record(service, call, request_breaker, request_permit, session_permit)

    async def _serve(self, service: ServiceState, call: Call | None, *, home: bool = True) -> None:
        """Pick a version and a node, try, judge; again while that is allowed. Not `home`: this is the fallback."""
        pipeline = self._pipeline
        chance = pipeline.fleet.chance
        model = call.model if call is not None else ""
        session = self._session if home else None
        self._binds = home
        fallback = self._fallback_of(service) if home else None
        tried: list[EndpointKey] = []
        deaf: list[EndpointKey] = []
        now = pipeline.clock()
        service.budget.request(now)
        while True:
            version = pick_version(service, session, model, tried, now, chance)
            choice = pick(service, session, version, model, tried, now, chance, may_probe=call is not None)
            if isinstance(choice, Unavailable):
                if fallback is not None:
                    return await self._serve(fallback, call, home=False)
                if len(tried) > len(deaf):
                    choice = pick(service, session, version, model, deaf, now, chance, may_probe=call is not None)
                if isinstance(choice, Unavailable):
                    return self._give_up(choice, now)
            attempt = await self._try(service, choice, call)
            ending = attempt.ending
            assert ending is not None
            now = pipeline.clock()
            self._judge(service, choice, attempt, ending, now)
            if attempt.committed or not self._resendable(ending, now):
                return self._finish(attempt, ending)
            allowed = service.attempts
            if self._attempts >= allowed or not service.budget.take(now):
                if fallback is not None and allowed > 1:
                    return await self._serve(fallback, call, home=False)
                return self._finish(attempt, ending)
            key = choice.node.key
            tried.append(key)
            if ending in _STILL_DEAF:
                deaf.append(key)

    def _fallback_of(self, service: ServiceState) -> ServiceState | None:
        fallback = self._pipeline.fleet.services.get(service.fallback) if service.fallback else None
        return None if fallback is service else fallback

    async def _try(self, service: ServiceState, choice: Choice, call: Call | None) -> Attempt:
        """Forward, and wait for the attempt to end: the one place where a request waits."""
        pipeline, request, node = self._pipeline, self._request, choice.node
        self._note(choice.permit)
        self._choice = choice
        self._attempts += 1
        self._attempt = attempt = Attempt(
            self,
            request,
            call,
            self._client,
            node,
            pipeline.connector,
            pipeline.clock,
            pipeline.watchdog,
            service.times,
            self._total_at,
        )
        node.in_flight += 1
        self._lent = choice
        attempt.start(engine_head(request, self._request_id, self._client.peer, self._client.scheme, node.key))
        if attempt.ending is None:
            self._waiting = True
            await _until_resumed()
        return attempt

    def _judge(self, service: ServiceState, choice: Choice, attempt: Attempt, ending: Ending, now: float) -> None:
        """Record one wire attempt, on the node that made it."""
        pipeline, node = self._pipeline, choice.node
        node.in_flight -= 1
        self._lent = None
        result = DOCTRINE[ending].node
        if attempt.call is None:
            # Engines that hang answer health checks and model lists; and failures that no success of the same kind
            # could ever outweigh must not add up.
            result = _IGNORED
        if result is _OVERLOADED:
            service.overloaded(node, attempt.retry_after_s(pipeline.now_wall()), now)
        self._transition(node.breaker.record(choice.permit, result, now, ending))
        self._node_failing = node.breaker.failing
        reader = attempt.reader
        pipeline.recorder.attempt(
            AttemptRecord(
                service=service.name,
                version=node.version,
                endpoint=node.key,
                ending=ending,
                result=result,
                status=attempt.head.status if attempt.head is not None else 0,
                duration_s=now - attempt.started_at,
                ttft_s=attempt.first_token_at - attempt.sent_at if attempt.first_token_at else None,
                malformed_events=reader.malformed if reader is not None else 0,
                reused_connection=attempt.reused_connection,
            )
        )

    def _resendable(self, ending: Ending, now: float) -> bool:
        if not DOCTRINE[ending].resend or now >= self._total_at:
            return False
        return self._request.resendable or ending is _CONNECT_FAILED

    def _finish(self, attempt: Attempt, ending: Ending) -> None:
        """Give the client the end it is owed."""
        self._reason = reason = self._cut_reason or DOCTRINE[ending].reason
        if ending is _CLIENT_LEFT or (attempt.head is not None and attempt.head.status == 101):
            return  # nobody to tell; and a tunnel has no end but the connection's
        if attempt.committed and reason is not None:
            self._cut(attempt, reason)
        elif attempt.head is not None and reason is None:
            if not attempt.committed:
                attempt.deliver()
            self._close_reply(attempt)
        else:
            reason = reason or _UPSTREAM_RESET
            self._refuse(reason, attempt.detail or _SAID.get(reason, reason.value))

    def _close_reply(self, attempt: Attempt) -> None:
        """The engine said all it had to say, good or bad; end the reply as its framing can be ended."""
        client = self._client
        if not attempt.whole:
            if not client.can_append:
                client.cut()
                return
            client.close_after_reply()
        client.send_end(attempt.trailers)

    def _cut(self, attempt: Attempt, reason: Reason) -> None:
        """End a reply that has begun: in band where the body is an event stream, else by breaking the connection."""
        client = self._client
        if not attempt.is_stream or not client.can_append:
            client.cut()
            return
        # An event that was cut in two must not swallow ours.
        event = error_event(reason, attempt.detail or _SAID.get(reason, reason.value))
        client.close_after_reply()
        client.send_body(b"\n\n" + event if attempt.reader is not None and attempt.reader.pending else event)
        client.send_end([])

    def _give_up(self, unavailable: Unavailable, now: float) -> None:
        """Nothing can serve: the last attempt's own answer if there was one, else why."""
        last = self._attempt
        if last is not None and last.ending is not None:
            self._finish(last, last.ending)
            return
        wait_s = None if unavailable.retry_at is None else max(0.0, unavailable.retry_at - now)
        self._refuse(unavailable.reason, _SAID.get(unavailable.reason, unavailable.reason.value), wait_s)

    def _deny(self, reason: Reason, message: str, denied: Denied) -> None:
        self._refuse(reason, message, max(0.0, denied.retry_at - self.started_at))

    def _refuse(self, reason: Reason, message: str, wait_s: float | None = None, param: str | None = None) -> None:
        if wait_s is None and STATUS[reason] in (429, 503):
            wait_s = 1.0
        self._reason = reason
        self._status = STATUS[reason]
        extra = _attempts_line(self._attempts) if self._attempts else b""
        self._client.refuse(Refusal(reason, message, wait_s, param), self._request_id, extra)

    def _crashed(self, exc: Exception) -> None:
        self._pipeline.on_crash(exc)
        attempt = self._attempt
        if attempt is not None:
            attempt.stop(Ending.ABANDONED)
        if self._status or (attempt is not None and attempt.committed):
            self._client.cut()
        else:
            self._refuse(Reason.INTERNAL, "this sidecar failed; its log says how")

    def _record(
        self,
        service: ServiceState | None,
        call: Call | None,
        request_breaker: Breaker | None,
        request_permit: Permit | Denied | None,
        session_permit: Permit | Denied | None,
    ) -> None:
        """The request's own outcome, once, to whoever admitted it; then the line in the log."""
        pipeline, attempt, session = self._pipeline, self._attempt, self._session
        now = pipeline.clock()
        if self._lent is not None:
            # Only a crash of ours comes here: what was lent for the attempt goes back all the same.
            self._lent.node.in_flight -= 1
            self._transition(self._lent.node.breaker.record(self._lent.permit, _IGNORED, now))
        ending = attempt.ending if attempt is not None else None
        verdict = DOCTRINE[ending] if ending is not None else None
        why = ending if ending is not None else ""
        if isinstance(request_permit, Permit) and request_breaker is not None:
            # A kind of request fails where its endpoint serves others; what could not even connect, or met an endpoint
            # that fails anyway, says nothing about its kind.
            result = _IGNORED
            if (
                verdict is not None
                and verdict.node is verdict.session
                and not (verdict.node is _FAILURE and self._node_failing)
            ):
                result = verdict.node
            self._transition(request_breaker.record(request_permit, result, now, why))
        if isinstance(session_permit, Permit) and service is not None and session is not None:
            result = verdict.session if verdict is not None else _IGNORED
            self._transition(service.record_session(session, session_permit, result, now, why))
        pipeline.recorder.request(self._request_record(service, call, ending, now))

    def _request_record(
        self, service: ServiceState | None, call: Call | None, ending: Ending | None, now: float
    ) -> RequestRecord:
        request, attempt, choice = self._request, self._attempt, self._choice
        usage = attempt.usage if attempt is not None else None
        reader = attempt.reader if attempt is not None else None
        status = self._status
        if not status and attempt is not None and attempt.committed and attempt.head is not None:
            status = attempt.head.status
        reason = self._reason
        return RequestRecord(
            request_id=self._request_id.decode(),
            trace_id=request.traceparent[3:35].decode("ascii", "replace"),
            client=self._client.peer,
            method=request.method.decode("ascii", "replace"),
            path=request.path.decode("ascii", "replace"),
            service=service.name if service is not None else "",
            model=call.model if call is not None else "",
            version=choice.node.version if choice is not None else "",
            endpoint=choice.node.key if choice is not None else "",
            session=self._who.session or "",
            status=status or 499,
            reason=reason,
            flag=flag_of(reason, ending, self._attempts),
            result=_request_result(ending, reason, status),
            stream=reader is not None,
            attempts=self._attempts,
            bytes_in=request.body_size,
            bytes_out=attempt.bytes_out if attempt is not None else 0,
            duration_s=now - self.started_at,
            ttft_s=attempt.first_token_at - self.started_at if attempt is not None and attempt.first_token_at else None,
            tokens=reader.tokens if reader is not None else 0,
            max_gap_s=attempt.max_gap_s if attempt is not None and attempt.max_gap_s else None,
            prompt_tokens=usage.prompt_tokens if usage is not None else None,
            completion_tokens=usage.completion_tokens if usage is not None else None,
            finish_reason=attempt.finish_reason if attempt is not None else None,
        )

    def _note(self, permit: Permit) -> None:
        if permit.moved is not None:
            self._transition(permit.moved)

    def _transition(self, transition: Transition | None) -> None:
        if transition is not None:
            self._pipeline.recorder.transition(transition)

    # Who drives the flow.

    def start(self) -> None:
        """Run until the first wait, or to the end."""
        self._pipeline.live += 1
        self._resume()

    def _resume(self) -> None:
        try:
            self._flow_state.send(None)
        except StopIteration:
            pass
        except Exception as exc:  # noqa: BLE001 - not even its end could be recorded
            self._pipeline.on_crash(exc)
            self._client.cut()
        else:
            return
        # The attempt and we know each other: without this only the garbage collector could part us.
        self._attempt = self._choice = None
        self._pipeline.live -= 1
        self._client.exchange_done()

    def attempt_done(self, attempt: Attempt) -> None:
        """The attempt ended: on with the flow, unless it ended before the flow began to wait."""
        if self._waiting:
            self._waiting = False
            self._resume()

    # What the attempt asks.

    def attempt_accepted(self, attempt: Attempt) -> None:
        """The engine took the request: now, and not before, the session is bound to it."""
        head, choice, session = attempt.head, self._choice, self._session
        good = attempt.ending in (None, _COMPLETE) and head is not None and head.status < 400
        if self._binds and session is not None and choice is not None and good:
            bind(session, choice, self._pipeline.clock())

    def reply_lines(self, attempt: Attempt) -> bytes:
        """Our header lines on an engine's answer."""
        choice = self._choice
        assert choice is not None
        lines = b"x-request-id: %b\r\n%b%b" % (
            self._request_id,
            choice.node.reply_lines,
            _attempts_line(self._attempts),
        )
        if choice.affinity in ("moved", "returned"):
            lines += b"x-sidecar-session: %b\r\n" % choice.affinity.encode()
        return lines

    # What the client's connection tells.

    def upload(self) -> None:
        """More of the body came, or its end."""
        if self._attempt is not None:
            self._attempt.push_upload()

    def tunnel(self, data: bytes) -> None:
        """Bytes for the tunnel."""
        if self._attempt is not None:
            self._attempt.push_tunnel(data)

    def client_left(self) -> None:
        """The client is gone, before its reply ended."""
        if self._attempt is not None:
            self._attempt.stop(_CLIENT_LEFT)

    def client_slow(self) -> None:
        """The client did not read for too long."""
        if self._attempt is not None:
            self._attempt.stop(Ending.CLIENT_SLOW)

    def client_paused(self) -> None:
        """The client does not read as fast as it is written to."""
        if self._attempt is not None:
            self._attempt.pause()

    def client_resumed(self) -> None:
        """The client reads again."""
        if self._attempt is not None:
            self._attempt.resume()

    def cut(self, reason: Reason, message: str = "") -> None:
        """End what is under way, for a reason on our side or the client's."""
        attempt = self._attempt
        if attempt is None or attempt.ending is not None:
            return
        self._cut_reason = reason
        attempt.detail = message
        attempt.stop(_CUT.get(reason, Ending.CLIENT_MALFORMED))


@coroutine
def _until_resumed() -> Generator[None, None, None]:
    yield


def _attempts_line(attempts: int) -> bytes:
    return _FIRST_ATTEMPT if attempts == 1 else b"x-sidecar-attempts: %d\r\n" % attempts


_FIRST_ATTEMPT: Final = b"x-sidecar-attempts: 1\r\n"


def _request_key(rule: str, request: Request) -> str | None:
    """What kind of request this is; None where the rule's header is absent: of no kind that could fail."""
    if rule == "route":
        return _ROUTES[request.path]
    wanted = rule.removeprefix("header:").lower().encode()
    for name, value in request.headers:
        if name == wanted:
            return value[:128].decode("latin-1") or None
    return None


def _request_result(ending: Ending | None, reason: Reason | None, status: int) -> Result:
    if ending is None:
        return _IGNORED if reason is None or status < 500 else _FAILURE
    return DOCTRINE[ending].node


# Only inference has a request breaker, and its paths are known.
_ROUTES: Final = {path: f"POST {path.decode()}" for path in API_BY_PATH}

_CUT: Final = {Reason.DRAINING: Ending.ABANDONED, Reason.CLIENT_TIMEOUT: Ending.CLIENT_SLOW}

_SAID: Final = {
    Reason.BREAKER_OPEN: "every endpoint that could serve this has an open breaker",
    Reason.OVERLOADED: "every endpoint that could serve this is at its limit",
    Reason.NO_ENDPOINT: "no endpoint can serve this",
    Reason.UNKNOWN_MODEL: "no endpoint has this model",
    Reason.HEAD_TIMEOUT: "the engine did not answer in time",
    Reason.TTFT_TIMEOUT: "the engine produced no token in time",
    Reason.TOKEN_GAP_TIMEOUT: "the engine stopped producing tokens",
    Reason.TOTAL_TIMEOUT: "the request took longer than is allowed in all",
    Reason.UPSTREAM_TRUNCATED: "the engine's answer broke off",
    Reason.DRAINING: "this sidecar is shutting down",
}
