"""The access log's flag: the letters that Envoy's users grep for, from our reasons and endings."""

from types import MappingProxyType

from sidecar.kernel.errors import Reason
from sidecar.kernel.outcome import DOCTRINE, Ending

_BY_ENDING = MappingProxyType(
    {
        Ending.CLIENT_LEFT: "DC",
        Ending.CLIENT_SLOW: "DC",
        Ending.TRUNCATED: "UC",
        Ending.RESET_BEFORE_HEAD: "UC",
        Ending.CONNECT_FAILED: "UF",
        Ending.BAD_BYTES: "UPE",
        Ending.EMPTY: "UPE",
        Ending.TOKEN_GAP_TIMEOUT: "SI",
        Ending.HEAD_TIMEOUT: "UT",
        Ending.TTFT_TIMEOUT: "UT",
        Ending.LATE: "UT",
        Ending.TOTAL_TIMEOUT: "UT",
    }
)
_BY_REASON = MappingProxyType(
    {
        Reason.BREAKER_OPEN: "UO",
        Reason.SESSION_OPEN: "UO",
        Reason.REQUEST_OPEN: "UO",
        Reason.POISONED_REQUEST: "UO",
        Reason.NO_ENDPOINT: "UH",
        Reason.OVERLOADED: "RL",
        Reason.UNKNOWN_MODEL: "NR",
        Reason.UNSUPPORTED: "NR",
        Reason.DRAINING: "SH",
        Reason.QUEUE_TIMEOUT: "SH",
        Reason.PREEMPTED: "SH",
        Reason.QUOTA_EXCEEDED: "RL",
        Reason.CLIENT_TIMEOUT: "DC",
    }
)


def flag_of(reason: Reason | None, ending: Ending | None, attempts: int, shed: bool = False) -> str:
    """The flag; empty where all went well, or where the engine's own answer to one attempt says it all.

    `shed`: it was turned away by our own admission, whose `overloaded` is no engine's.
    """
    if shed:
        return "SH"
    if reason is not None and reason in _BY_REASON:
        return _BY_REASON[reason]
    if ending is None:
        return ""
    return _BY_ENDING.get(ending) or ("URX" if attempts > 1 and DOCTRINE[ending].resend else "")
