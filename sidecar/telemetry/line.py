"""The canonical line of a request as its JSON encoder takes it: the record's members, under their names."""

import msgspec

from sidecar.kernel.errors import Reason
from sidecar.kernel.outcome import Result
from sidecar.proxy.ports import RequestRecord


class RequestLine(msgspec.Struct):
    """Every member of `RequestRecord`, in its order."""

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


def line_of(record: RequestRecord) -> RequestLine:
    """The line that a record makes."""
    return RequestLine(
        record.request_id,
        record.trace_id,
        record.client,
        record.method,
        record.path,
        record.service,
        record.model,
        record.version,
        record.endpoint,
        record.session,
        record.status,
        record.reason,
        record.flag,
        record.result,
        record.stream,
        record.attempts,
        record.bytes_in,
        record.bytes_out,
        record.duration_s,
        record.ttft_s,
        record.tokens,
        record.max_gap_s,
        record.prompt_tokens,
        record.completion_tokens,
        record.finish_reason,
    )
