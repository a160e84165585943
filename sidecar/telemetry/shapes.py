"""The canonical line of a request, as its JSON encoder takes it.

It has a module of its own because a compiled one does not keep what is said in a class's head, as that defaults are
left out.
"""

import msgspec

from sidecar.kernel.errors import Reason
from sidecar.kernel.outcome import Result


class RequestLine(msgspec.Struct, omit_defaults=True):
    """Every member of `RequestRecord`, in its order. What has a default is left out while it has it."""

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
    tenant: str = ""
    qos: str = ""
    queued_s: float | None = None
    counted: str = ""
    reserved_tokens: int = 0
    shadowed: str = ""
    why: str = ""
