"""The canonical line of a request: the record's members, under their names."""

from sidecar.proxy.ports import RequestRecord
from sidecar.telemetry.shapes import RequestLine


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
        record.tenant,
        record.qos,
        record.queued_s,
        record.counted,
        record.reserved_tokens,
        record.shadowed,
        record.why,
    )
