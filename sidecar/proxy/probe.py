"""A probe by copy: an endpoint on trial gets a copy of a request that another endpoint answers.

A half-open breaker has to try its endpoint with something. The request itself would make its client the tester, and
each failed trial one more who was kept waiting; a synthetic request would have to know every engine's dialect, and
says nothing of the prompts that are really asked. A copy costs the endpoint what a request costs, and nobody waits for
it: its answer is judged like any other and goes nowhere.

It does not run for as long as a request may: `PROBE_S` after the first token's deadline it is stopped, and counts as
good if tokens came until then.
"""

from collections.abc import Callable
from typing import Final

from sidecar.core import evidence
from sidecar.core.balance import Choice
from sidecar.core.breaker import Transition
from sidecar.core.fleet import ServiceState
from sidecar.kernel.errors import Refusal
from sidecar.kernel.exchange import ResponseHead
from sidecar.kernel.outcome import DOCTRINE, Ending, Result
from sidecar.proxy.attempt import Attempt
from sidecar.proxy.forwarded import engine_head
from sidecar.proxy.ports import AttemptRecord, Connector, Recorder
from sidecar.proxy.request import Request
from sidecar.proxy.watchdog import Watchdog
from sidecar.wire.call import Api, Call

PROBE_S: Final = 10.0
COPIED_BYTES: Final = 1 << 20
"""Of a body; a larger one is its own probe. Copies share the bytes but not the sending."""

COPIED: Final = frozenset({Api.CHAT, Api.COMPLETIONS, Api.MESSAGES, Api.EMBEDDINGS})
"""What may be asked twice without a trace. A response (`/v1/responses`) may be stored under its id."""

_FAILURE: Final = Result.FAILURE
_SUCCESS: Final = Result.SUCCESS
_OVERLOADED: Final = Result.OVERLOADED


def may_copy(request: Request, call: Call) -> bool:
    """Whether a copy of this request can stand for it."""
    return request.held and len(request.body) <= COPIED_BYTES and call.api in COPIED


class Probe:
    """One copy on its way. Owns its attempt; gives the permit back when it ends, and tells the recorder."""

    __slots__ = ("_attempt", "_choice", "_clock", "_now_wall", "_recorder", "_service")

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
    ) -> None:
        self._service = service
        self._choice = choice
        self._recorder = recorder
        self._clock = clock
        self._now_wall = now_wall
        times = service.times
        end_at = clock() + min(times.total_s, times.first_token_s + PROBE_S)
        self._attempt = Attempt(
            self, request.copy(), call, _Nobody(), choice.node, connector, clock, watchdog, times, end_at
        )
        self._attempt.expectation = evidence.expect(
            service, choice.node, choice.permit, call.model if call.stream else "", request.body_size, None
        )

    def start(self, request_id: bytes, peer: str, scheme: bytes, request: Request) -> None:
        """Send it."""
        node = self._choice.node
        node.in_flight += 1
        if self._choice.permit.moved is not None:
            self._recorder.transition(self._choice.permit.moved)
        self._attempt.start(engine_head(request, request_id, peer, scheme, node.key))

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
        """It proves nothing good any more: what counts is known."""
        expectation = attempt.expectation
        if expectation is not None:
            silent = attempt.first_token_at > 0.0
            self._tell(evidence.late(self._service, attempt.node, expectation, silent, self._clock()))
        attempt.stop(Ending.ABANDONED)

    def attempt_done(self, attempt: Attempt) -> None:
        """Judge it."""
        ending = attempt.ending
        assert ending is not None
        service, node, now = self._service, self._choice.node, self._clock()
        node.in_flight -= 1
        result = DOCTRINE[ending].node
        if ending is Ending.TOTAL_TIMEOUT:
            result = _SUCCESS if attempt.last_token_at else _FAILURE
        if result is _OVERLOADED:
            service.overloaded(node, attempt.retry_after_s(self._now_wall()), now)
        self._tell(
            evidence.ended(
                service, node, self._choice.permit, attempt.expectation, ending, result, attempt.max_gap_s, now
            )
        )
        reader = attempt.reader
        self._recorder.attempt(
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
                copy=True,
            )
        )

    def _tell(self, transition: Transition | None) -> None:
        if transition is not None:
            self._recorder.transition(transition)


class _Nobody:
    """A client that takes everything and wants nothing."""

    __slots__ = ("peer",)

    def __init__(self) -> None:
        self.peer = ""

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
