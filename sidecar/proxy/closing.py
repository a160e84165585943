"""The end of a request: what its client is told, what is paid, and what is recorded of it.

The lowest of the three parts that a request's way is written in: `Closing` has what is known of a request and ends it,
`Arrival` brings it to where it may be sent, `Exchange` sends it. They are one object, for a request is one; each part
calls those below it, and of those above one function alone: `_serve`.
"""

from typing import Final

from sidecar.core import evidence
from sidecar.core.balance import Choice
from sidecar.core.breaker import Breaker, Denied, Permit, Transition
from sidecar.core.identify import NOBODY
from sidecar.core.quotas.quota import Budget
from sidecar.core.service import ServiceState, Session
from sidecar.kernel.errors import STATUS, Reason, Refusal, SidecarError
from sidecar.kernel.ids import EndpointKey
from sidecar.kernel.outcome import DOCTRINE, Ending, Result
from sidecar.proxy.admission import MOST_TOKENS, Admission
from sidecar.proxy.attempt import Attempt
from sidecar.proxy.flags import flag_of
from sidecar.proxy.pipeline import Pipeline
from sidecar.proxy.ports import Client, RequestRecord
from sidecar.proxy.request import Request
from sidecar.proxy.translated import Translation
from sidecar.wire.call import Api, Call
from sidecar.wire.headers import is_safe_id
from sidecar.wire.refusal import error_event

NO_STEP: Final = 0
"""Nothing is waited for before the request is sent: see `arrival`."""

MOST_CHARS: Final = 6
"""Of a token, on average over an answer: an event with more has several, and a client need not ask for the usage."""

_EMBEDDINGS: Final = Api.EMBEDDINGS
_OTHER: Final = Api.OTHER
_RESPONSES: Final = Api.RESPONSES
_UNDER_WAY: Final = frozenset({"queued", "in_progress"})
"""How a response stands whose answer is all there is for now."""
_IGNORED: Final = Result.IGNORED
_FAILURE: Final = Result.FAILURE
_CLIENT_LEFT: Final = Ending.CLIENT_LEFT
_COMPLETE: Final = Ending.COMPLETE
_UPSTREAM_RESET: Final = Reason.UPSTREAM_RESET


class Closing:
    """What is known of one request, and its end. Owned by its client connection, which ends with `exchange_done`."""

    __slots__ = (
        "_admission",
        "_asked",
        "_attempt",
        "_attempts",
        "_barred",
        "_call",
        "_choice",
        "_client",
        "_client_gone",
        "_cut_reason",
        "_deaf",
        "_home",
        "_kept",
        "_lent",
        "_mark",
        "_node_failing",
        "_pipeline",
        "_prompt_bytes",
        "_reason",
        "_request",
        "_request_breaker",
        "_request_id",
        "_request_permit",
        "_service",
        "_serving",
        "_session",
        "_session_permit",
        "_shed",
        "_slot",
        "_status",
        "_step",
        "_total_at",
        "_translation",
        "_trial",
        "_tried",
        "_waiting",
        "_who",
        "_why",
        "started_at",
    )

    def __init__(self, pipeline: Pipeline, request: Request, client: Client) -> None:
        self._pipeline = pipeline
        self._request = request
        self._client = client
        self._admission: Admission | None = None
        self._asked = False
        self._attempt: Attempt | None = None
        self._attempts = 0
        self._choice: Choice | None = None
        self._session: Session | None = None
        self._home = True
        self._call: Call | None = None
        self._service: ServiceState | None = None
        self._serving: ServiceState | None = None
        self._tried: list[EndpointKey] = []
        self._deaf: list[EndpointKey] = []
        self._barred = 0
        self._request_breaker: Breaker | None = None
        self._request_permit: Permit | None = None
        self._session_permit: Permit | None = None
        self._who = NOBODY
        self._reason: Reason | None = None
        self._client_gone = False
        self._cut_reason: Reason | None = None
        self._lent: Choice | None = None
        self._node_failing = False
        self._kept = b""
        self._mark = b""
        self._prompt_bytes = 0
        self._trial: tuple[EndpointKey, ...] = ()
        self._translation: Translation | None = None
        self._shed = False
        self._slot = 0
        self._status = 0
        self._step = NO_STEP
        self._waiting = False
        self._why = ""
        self._request_id = request.request_id if is_safe_id(request.request_id) else pipeline.new_id()
        self.started_at = pipeline.clock()
        self._total_at = self.started_at

    def _finish(self, attempt: Attempt, ending: Ending) -> None:
        """Give the client the end it is owed."""
        self._reason = reason = self._cut_reason or DOCTRINE[ending].reason
        if self._client_gone or (attempt.head is not None and attempt.head.status == 101):
            return  # nobody to tell; and a tunnel has no end but the connection's
        if attempt.committed and reason is not None:
            self._cut(attempt, reason)
        elif attempt.head is not None and reason is None:
            if not attempt.committed:
                attempt.deliver()
            self._close_reply(attempt)
        else:
            reason = reason or _UPSTREAM_RESET
            self._refuse(reason, attempt.detail or SAID.get(reason, reason.value))

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
        event = error_event(reason, attempt.detail or SAID.get(reason, reason.value))
        client.close_after_reply()
        client.send_body(b"\n\n" + event if attempt.reader is not None and attempt.reader.pending else event)
        client.send_end([])

    def _deny(self, reason: Reason, message: str, denied: Denied) -> None:
        self._refuse(reason, message, max(0.0, denied.retry_at - self.started_at))

    def _refuse(
        self,
        reason: Reason,
        message: str,
        wait_s: float | None = None,
        param: str | None = None,
        *,
        final: bool = False,
    ) -> None:
        if wait_s is None and not final and STATUS[reason] in (408, 429, 503):
            wait_s = 1.0
        self._reason = reason
        self._status = STATUS[reason]
        extra = attempts_line(self._attempts) if self._attempts else b""
        budgets = self._budgets()
        if budgets:
            extra += self._pipeline.ledger.headers(budgets, self._pipeline.clock())
        self._client.refuse(Refusal(reason, message, wait_s, param, final), self._request_id, extra)

    def _budgets(self) -> tuple[Budget, ...]:
        """What holds the request; of one that was refused before it was metered, too, once it is known whose it is."""
        admission, call, ledger = self._admission, self._call, self._pipeline.ledger
        if admission is not None:
            return admission.budgets
        if call is None or not ledger.any or self._who is NOBODY or self._who.conflict:
            return ()
        return ledger.budgets(self._who.tenant, call.model or None)

    def _failed(self, exc: Exception) -> None:
        """Tell the client, as far as it can be told; never raises, for the end must follow."""
        try:
            if isinstance(exc, SidecarError):
                self._refuse(exc.reason, exc.detail)
            else:
                self._crashed(exc)
        except Exception as worse:  # noqa: BLE001 - as above
            self._pipeline.on_crash(worse)
            self._client.cut()

    def _crashed(self, exc: Exception) -> None:
        self._pipeline.on_crash(exc)
        attempt = self._attempt
        if attempt is not None:
            attempt.stop(Ending.ABANDONED)
        if self._status or (attempt is not None and attempt.committed):
            self._client.cut()
        else:
            self._refuse(Reason.INTERNAL, "this sidecar failed; its log says how")

    def _end(self) -> None:
        try:
            self._record()
        except Exception as exc:  # noqa: BLE001 - not even its end could be recorded
            self._pipeline.on_crash(exc)
            self._client.cut()
        admission = self._admission
        if admission is not None:
            try:
                self._leave(admission)
            except Exception as exc:  # noqa: BLE001 - as above
                self._pipeline.on_crash(exc)
        # The attempt and we know each other: without this only the garbage collector could part us.
        self._attempt = self._choice = None
        self._kept = b""
        self._pipeline.live -= 1
        self._client.exchange_done()

    def _leave(self, admission: Admission) -> None:
        """Pay for what was used, and let the next one in."""
        pipeline, call, now = self._pipeline, self._call, self._pipeline.clock()
        self._admission = None
        attempt = self._attempt
        asked = self._asked or (attempt is not None and attempt.sent_at > 0.0)
        used = 0
        try:
            used = self._used(admission, call)
        finally:
            admission.settle(pipeline.ledger, used, now, asked=asked)
            admission.leave(used, now)

    def _used(self, admission: Admission, call: Call | None) -> int:
        """Tokens that the last attempt took: as the engine says, else as we counted; what gave nothing is free."""
        attempt, service = self._attempt, self._serving
        if attempt is None or attempt.ending is None or not attempt.sent_at:
            return 0
        if attempt.head is not None and attempt.head.status >= 400:
            return 0
        if call is None:
            return admission.prompt_tokens if attempt.head is not None else 0
        if call.api is _RESPONSES and attempt.finish_reason in _UNDER_WAY:
            return admission.tokens  # it is generated in the background, and asked for by others that are free
        usage, reader = attempt.usage, attempt.reader
        told = usage.prompt_tokens if usage is not None else None
        answer = usage.completion_tokens if usage is not None else None
        if answer is not None and answer < 0:
            answer = None
        counted = attempt.bytes_out // 4 if attempt.committed and reader is None else 0
        if reader is not None:
            counted = max(reader.tokens, reader.chars // MOST_CHARS)
        if call.api is _EMBEDDINGS or (call.api is _OTHER and told):
            counted = 0  # numbers about the prompt
        if attempt.ending is not _COMPLETE and answer is not None and answer < counted:
            answer = None  # it was told before the end: Messages begin with it
        if service is not None and attempt.ending is _COMPLETE:
            if told and told > 0 and admission.prompt:
                self._pipeline.counter.reported(service.name, call.model, admission.prompt, told)
            if call.api is not _EMBEDDINGS:
                each = (answer if answer is not None else counted) // admission.answers
                self._pipeline.answers.heard(service.name, call.model, each)
        if attempt.ending is not _COMPLETE and attempt.ending is not _CLIENT_LEFT and not counted and not answer:
            return 0
        used = (told if told and told > 0 else admission.prompt_tokens) + (answer if answer is not None else counted)
        return max(0, min(MOST_TOKENS, used))

    def _record(self) -> None:
        """The request's own outcome, once, to whoever admitted it; then the line in the log."""
        pipeline, attempt, session = self._pipeline, self._attempt, self._session
        now = pipeline.clock()
        if self._lent is not None:
            # The request could not be put into the engine's words, or we crashed: what was lent goes back all the same.
            self._lent.node.in_flight -= 1
            self._transition(self._lent.node.breaker.record(self._lent.permit, _IGNORED, now))
        ending = attempt.ending if attempt is not None else None
        verdict = DOCTRINE[ending] if ending is not None else None
        why = ending if ending is not None else ""
        service, session_permit = self._service, self._session_permit
        request_breaker, request_permit = self._request_breaker, self._request_permit
        if request_permit is not None and request_breaker is not None and service is not None:
            # A kind of request fails where its endpoint serves others; what could not even connect, or met an endpoint
            # that fails anyway, says nothing about its kind.
            result = _IGNORED
            if (
                verdict is not None
                and verdict.node is verdict.session
                and not (verdict.node is _FAILURE and self._node_failing)
            ):
                result = verdict.node
            self._transition(service.record_request(request_breaker, request_permit, result, now, why))
        if session_permit is not None and service is not None and session is not None:
            result = _IGNORED
            if verdict is not None:
                node = attempt.node if attempt is not None else None
                result = evidence.session_result(service, node, verdict.session)
            self._transition(service.record_session(session, session_permit, result, now, why))
        pipeline.recorder.request(self._request_record(ending, now))

    def _request_record(self, ending: Ending | None, now: float) -> RequestRecord:
        request, attempt, choice = self._request, self._attempt, self._choice
        service, call = self._service, self._call
        usage = attempt.usage if attempt is not None else None
        reader = attempt.reader if attempt is not None else None
        admission = self._admission
        ticket = admission.ticket if admission is not None else None
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
            flag="DC" if self._client_gone and ending is None else flag_of(reason, ending, self._attempts, self._shed),
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
            tenant=self._who.tenant,
            qos=admission.qos.name if admission is not None else "",
            queued_s=admission.queued_s if admission is not None else None,
            counted=admission.how if admission is not None else "",
            reserved_tokens=admission.reserved if admission is not None else 0,
            shadowed=ticket.shadowed if ticket is not None else "",
            why=self._why,
        )

    def _note(self, permit: Permit) -> None:
        if permit.moved is not None:
            self._transition(permit.moved)

    def _transition(self, transition: Transition | None) -> None:
        if transition is not None:
            trace = self._request.traceparent[3:35].decode("ascii", "replace")
            self._pipeline.recorder.transition(transition, trace)


def attempts_line(attempts: int) -> bytes:
    """The header line that says how many attempts it took."""
    return _FIRST_ATTEMPT if attempts == 1 else b"x-sidecar-attempts: %d\r\n" % attempts


_FIRST_ATTEMPT: Final = b"x-sidecar-attempts: 1\r\n"


def _request_result(ending: Ending | None, reason: Reason | None, status: int) -> Result:
    if ending is None:
        return _IGNORED if reason is None or status < 500 else _FAILURE
    return DOCTRINE[ending].node


SAID: Final = {
    Reason.POISONED_REQUEST: "engines crashed or hung on this prompt; it is not sent to one more",
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
    Reason.KEYS_UNAVAILABLE: "the keys that tokens are checked with are not to be had at the moment",
}
