"""A probe by copy: an endpoint on trial gets a copy of a request that another endpoint answers.

A half-open breaker has to try its endpoint with something. The request itself would make its client the tester, and
each failed trial one more who was kept waiting; a synthetic request would have to know every engine's dialect, and
says nothing of the prompts that are really asked. A copy costs the endpoint what a request costs, and nobody waits for
it: its answer is judged like any other and goes nowhere.

A stream does not run for as long as a request's may: `PROBE_S` after the first token's deadline it is stopped, and
counts as good if tokens came until then.
"""

from collections.abc import Callable
from typing import Final

from sidecar.core import evidence
from sidecar.core.balance import Choice
from sidecar.core.breaker import Transition
from sidecar.core.service import ServiceState
from sidecar.kernel.errors import Refusal, SidecarError
from sidecar.kernel.exchange import ResponseHead
from sidecar.kernel.outcome import DOCTRINE, Ending, Result
from sidecar.proxy.attempt import Attempt
from sidecar.proxy.forwarded import engine_head
from sidecar.proxy.ports import Connector, Recorder
from sidecar.proxy.request import Request
from sidecar.proxy.translated import TranslatedAttempt, Translation
from sidecar.proxy.watchdog import Watchdog
from sidecar.wire.call import Api, Call

PROBE_S: Final = 10.0
COPIED_BYTES: Final = 1 << 20
"""Of a body; a larger one is its own probe. Copies share the bytes but not the sending."""

COPIED: Final = frozenset({Api.CHAT, Api.COMPLETIONS, Api.MESSAGES, Api.EMBEDDINGS})
"""What may be asked twice without a trace. A response (`/v1/responses`) may be stored under its id."""

_FAILURE: Final = Result.FAILURE
_IGNORED: Final = Result.IGNORED
_SUCCESS: Final = Result.SUCCESS
_OVERLOADED: Final = Result.OVERLOADED


def may_copy(request: Request, call: Call) -> bool:
    """Whether a copy of this request can stand for it."""
    return request.held and len(request.body) <= COPIED_BYTES and call.api in COPIED


class Probe:
    """One copy on its way. Owns its attempt; gives the permit back when it ends, and tells the recorder."""

    __slots__ = (
        "_call",
        "_choice",
        "_clock",
        "_connector",
        "_now_wall",
        "_recorder",
        "_request",
        "_service",
        "_translation",
        "_watchdog",
    )

    def __init__(
        self,
        service: ServiceState,
        choice: Choice,
        request: Request,
        call: Call,
        connector: Connector,
        recorder: Recorder,
        watchdog: Watchdog,
        clock: Callable[[], float],
        now_wall: Callable[[], float],
        translation: Translation | None = None,
    ) -> None:
        self._service = service
        self._translation = translation
        self._choice = choice
        self._request = request.copy()
        self._call = call
        self._connector = connector
        self._recorder = recorder
        self._watchdog = watchdog
        self._clock = clock
        self._now_wall = now_wall

    def start(self, request_id: bytes, peer: str, scheme: bytes, request: Request) -> None:
        """Send it. `request` is the original, whose head the copy has."""
        service, node, permit, call = self._service, self._choice.node, self._choice.permit, self._call
        times = service.times
        # An answer that is no stream is told by its end alone, and that has a deadline.
        most_s = min(times.total_s, times.first_token_s + PROBE_S) if call.stream else times.total_s
        until = self._clock() + most_s
        translation, self._translation = self._translation, None  # what it asks need not be kept
        # The attempt knows us and we not the attempt: a circle would be left to the garbage collector.
        if translation is not None and translation.translates(node):
            try:
                prepared = translation.prepare(node, self._request)
            except SidecarError:
                # It cannot be put into this engine's words: nobody was asked, and nothing was learnt.
                self._tell(permit.moved)
                self._tell(node.breaker.record(permit, _IGNORED, self._clock()))
                return
            request = prepared.request
            attempt: Attempt = TranslatedAttempt(
                self,
                prepared,
                call,
                Nobody(),
                node,
                self._connector,
                self._clock,
                self._watchdog,
                times,
                until,
            )
        else:
            attempt = Attempt(
                self,
                self._request,
                call,
                Nobody(),
                node,
                self._connector,
                self._clock,
                self._watchdog,
                times,
                until,
            )
        head = engine_head(request, request_id, peer, scheme, node.key)
        node.in_flight += 1
        try:
            attempt.expectation = evidence.expect(
                service, node, permit, call.model if call.stream else "", request.body_size, None
            )
            self._tell(permit.moved)
            attempt.start(head)
        except BaseException:
            # Only a crash of ours; it is the request's, and what was lent for the copy goes back.
            attempt.stop(Ending.ABANDONED)
            raise

    def reply_lines(self, attempt: Attempt) -> bytes:
        """Nobody gets a reply."""
        return b""

    def attempt_accepted(self, attempt: Attempt) -> None:
        """Its first token came, or its whole answer."""
        expectation = attempt.expectation
        if expectation is not None and attempt.first_token_at:
            took_s = attempt.first_token_at - attempt.sent_at
            self._tell(evidence.first_token(self._service, attempt.node, expectation, took_s, attempt.first_token_at))

    def attempt_late(self, attempt: Attempt) -> None:
        """It proves nothing good any more, where lateness counts: what counts is known."""
        expectation = attempt.expectation
        attempt.node.late += 1
        try:
            if expectation is not None:
                silent = attempt.first_token_at > 0.0
                self._tell(evidence.late(self._service, attempt.node, expectation, silent, self._clock()))
        finally:
            if expectation is None or expectation.bad:
                attempt.stop(Ending.LATE)

    def attempt_done(self, attempt: Attempt) -> None:
        """Judge it."""
        ending = attempt.ending
        assert ending is not None
        service, node, now = self._service, self._choice.node, self._clock()
        node.in_flight -= 1
        result = DOCTRINE[ending].node
        if ending is Ending.LATE:
            result = _FAILURE
        elif ending is Ending.TOTAL_TIMEOUT:
            if attempt.last_token_at:
                result = _SUCCESS
            elif not attempt.committed:
                # What was committed without a token is compressed: nobody knows what is in it.
                result = _FAILURE
        if result is _OVERLOADED:
            service.overloaded(node, attempt.retry_after_s(self._now_wall()), now)
        self._tell(
            evidence.ended(
                service, node, self._choice.permit, attempt.expectation, ending, result, attempt.max_gap_s, now
            )
        )
        self._recorder.attempt(attempt.record(service.name, result, now, copy=True))

    def _tell(self, transition: Transition | None) -> None:
        if transition is not None:
            self._recorder.transition(transition)


class Nobody:
    """A client that takes everything and wants nothing."""

    __slots__ = ("loopback", "peer")

    def __init__(self) -> None:
        self.peer = ""
        self.loopback = True

    @property
    def scheme(self) -> bytes:
        return b"http"

    @property
    def can_append(self) -> bool:
        return True

    def send_informational(self, head: ResponseHead) -> None: ...

    def send_head(self, head: ResponseHead, extra: bytes, body: bytes) -> None: ...

    def send_body(self, data: bytes) -> None: ...

    def send_end(self, trailers: list[bytes]) -> None: ...

    def refuse(self, refusal: Refusal, request_id: bytes, extra: bytes) -> None: ...

    def start_tunnel(self, head: ResponseHead, extra: bytes, data: bytes) -> None: ...

    def cut(self) -> None: ...

    def close_after_reply(self) -> None: ...

    def pause_upload(self) -> None: ...

    def resume_upload(self) -> None: ...

    def exchange_done(self) -> None: ...
