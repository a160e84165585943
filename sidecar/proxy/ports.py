"""What the request path needs of the world, as Protocols, and the records it hands out at the end of things."""

from typing import Protocol

import msgspec

from sidecar.core.breaker import Transition
from sidecar.kernel.errors import Reason
from sidecar.kernel.ids import EndpointKey
from sidecar.kernel.outcome import Ending, Result


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One wire attempt, at its end. Times in seconds; `ttft_s` None where no token came."""

    service: str
    version: str
    endpoint: EndpointKey
    ending: Ending
    result: Result
    status: int
    duration_s: float
    ttft_s: float | None
    malformed_events: int
    reused_connection: bool


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request, at its end: the canonical log line. Times in seconds; None where it did not happen.

    `status` is what the client got (499: it left before a head went out). `flag` is the access-log flag of Envoy
    users, empty on success.
    """

    request_id: str
    trace_id: str
    client: str
    method: str
    path: str
    service: str
    model: str
    version: str
    endpoint: str
    session: str
    status: int
    reason: Reason | None
    flag: str
    result: Result
    stream: bool
    attempts: int
    bytes_in: int
    bytes_out: int
    duration_s: float
    ttft_s: float | None
    tokens: int
    max_gap_s: float | None
    prompt_tokens: int | None
    completion_tokens: int | None
    finish_reason: str | None


class Recorder(Protocol):
    """Telemetry: takes what ended. Never waits, never raises."""

    def attempt(self, record: AttemptRecord) -> None: ...

    def request(self, record: RequestRecord) -> None: ...

    def transition(self, transition: Transition) -> None: ...

    def refused(self, reason: Reason) -> None:
        """A request that never became one: malformed, oversized or too slow heads."""

    def malformed_upstream(self, endpoint: EndpointKey) -> None:
        """Bytes from an engine that are not HTTP, or bytes after an answer's end."""
