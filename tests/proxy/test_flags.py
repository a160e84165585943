import pytest

from sidecar.kernel.errors import Reason
from sidecar.kernel.outcome import DOCTRINE, Ending
from sidecar.proxy.flags import flag_of


@pytest.mark.parametrize(
    ("reason", "ending", "flag"),
    [
        (None, None, ""),
        (None, Ending.COMPLETE, ""),
        (None, Ending.SERVER_ERROR, ""),
        (None, Ending.CLIENT_ERROR, ""),
        (None, Ending.CLIENT_LEFT, "DC"),
        (Reason.CLIENT_TIMEOUT, Ending.CLIENT_SLOW, "DC"),
        (Reason.BREAKER_OPEN, None, "UO"),
        (Reason.SESSION_OPEN, None, "UO"),
        (Reason.REQUEST_OPEN, None, "UO"),
        (Reason.POISONED_REQUEST, None, "UO"),
        (Reason.POISONED_REQUEST, Ending.RESET_BEFORE_HEAD, "UO"),
        (Reason.NO_ENDPOINT, None, "UH"),
        (Reason.OVERLOADED, None, "RL"),
        (Reason.UNKNOWN_MODEL, None, "NR"),
        (Reason.DRAINING, None, "SH"),
        (Reason.QUEUE_TIMEOUT, None, "SH"),
        (Reason.PREEMPTED, None, "SH"),
        (Reason.PREEMPTED, Ending.PREEMPTED, "SH"),
        (Reason.QUOTA_EXCEEDED, None, "RL"),
        (Reason.UNAUTHORIZED, None, ""),
        (Reason.DRAINING, Ending.ABANDONED, "SH"),
        (Reason.BAD_REQUEST, None, ""),
        (Reason.UPSTREAM_CONNECT, Ending.CONNECT_FAILED, "UF"),
        (Reason.UPSTREAM_RESET, Ending.RESET_BEFORE_HEAD, "UC"),
        (Reason.UPSTREAM_TRUNCATED, Ending.TRUNCATED, "UC"),
        (Reason.UPSTREAM_PROTOCOL, Ending.BAD_BYTES, "UPE"),
        (Reason.EMPTY_RESPONSE, Ending.EMPTY, "UPE"),
        (Reason.HEAD_TIMEOUT, Ending.HEAD_TIMEOUT, "UT"),
        (Reason.TTFT_TIMEOUT, Ending.TTFT_TIMEOUT, "UT"),
        (Reason.TOTAL_TIMEOUT, Ending.TOTAL_TIMEOUT, "UT"),
        (Reason.TOKEN_GAP_TIMEOUT, Ending.TOKEN_GAP_TIMEOUT, "SI"),
    ],
)
def test_flags_are_those_of_envoy(reason: Reason | None, ending: Ending | None, flag: str) -> None:
    assert flag_of(reason, ending, 1) == flag


@pytest.mark.parametrize("ending", [ending for ending in Ending if DOCTRINE[ending].reason is not None])
def test_every_ending_that_we_answer_for_has_a_flag_but_a_broken_upload(ending: Ending) -> None:
    assert bool(flag_of(DOCTRINE[ending].reason, ending, 1)) is (ending is not Ending.CLIENT_MALFORMED)


@pytest.mark.parametrize(("attempts", "flag"), [(1, ""), (2, "URX"), (3, "URX")])
def test_engines_own_failure_after_retries_is_told(attempts: int, flag: str) -> None:
    assert flag_of(None, Ending.SERVER_ERROR, attempts) == flag
    assert flag_of(None, Ending.COMPLETE, attempts) == ""


def test_full_engines_limit_a_rate_and_a_full_queue_of_ours_sheds() -> None:
    assert flag_of(Reason.OVERLOADED, None, 0) == "RL"
    assert flag_of(Reason.OVERLOADED, None, 0, shed=True) == "SH"
