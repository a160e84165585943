"""The doctrine as a whole: that it is complete and that its columns agree with each other."""

import pytest

from sidecar.kernel.errors import STATUS, Reason
from sidecar.kernel.outcome import DOCTRINE, Ending, Result


def test_every_ending_has_its_verdict() -> None:
    assert set(DOCTRINE) == set(Ending)


@pytest.mark.parametrize("ending", list(Ending))
def test_what_counts_against_nobody_is_not_sent_again_but_for_what_was_given_up_for_that(ending: Ending) -> None:
    verdict = DOCTRINE[ending]
    if verdict.node is Result.IGNORED:
        assert verdict.resend == (ending is Ending.LATE)


@pytest.mark.parametrize("ending", list(Ending))
def test_a_session_never_fares_worse_than_its_node_but_for_what_is_too_long(ending: Ending) -> None:
    verdict = DOCTRINE[ending]
    too_long = ending in (Ending.CONTEXT_LENGTH, Ending.CONTEXT_LENGTH_IN_BAND)
    assert (verdict.session is Result.FAILURE and verdict.node is not Result.FAILURE) == too_long


def test_only_a_complete_answer_is_a_success() -> None:
    good = [ending for ending in Ending if Result.SUCCESS in (DOCTRINE[ending].node, DOCTRINE[ending].session)]
    assert good == [Ending.COMPLETE]


@pytest.mark.parametrize("ending", list(Ending))
def test_a_reason_is_one_that_has_a_status(ending: Ending) -> None:
    reason = DOCTRINE[ending].reason
    assert reason is None or STATUS[reason] >= 400


def test_who_left_is_told_nothing() -> None:
    assert DOCTRINE[Ending.CLIENT_LEFT].reason is None
    assert DOCTRINE[Ending.CLIENT_SLOW].reason is Reason.CLIENT_TIMEOUT
