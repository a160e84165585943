import re

import pytest

from sidecar.kernel.errors import STATUS, Reason, SidecarError


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_is_one_plain_word_with_an_error_status(reason: Reason) -> None:
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", reason.value)
    assert reason.value == reason.name.lower()
    assert 400 <= STATUS[reason] <= 599


def test_table_speaks_of_reasons_and_of_nothing_else() -> None:
    assert set(STATUS) == set(Reason)


def test_reason_is_found_by_its_word_as_well() -> None:
    assert dict.fromkeys(Reason, 1)["no_endpoint"] == 1  # type: ignore[index]


@pytest.mark.parametrize(
    ("status", "reasons"),
    [
        (401, {Reason.UNAUTHORIZED}),
        (408, {Reason.CLIENT_TIMEOUT, Reason.QUEUE_TIMEOUT}),
        (429, {Reason.OVERLOADED, Reason.QUOTA_EXCEEDED}),
        (
            503,
            {
                Reason.BREAKER_OPEN,
                Reason.SESSION_OPEN,
                Reason.REQUEST_OPEN,
                Reason.NO_ENDPOINT,
                Reason.DRAINING,
                Reason.PREEMPTED,
                Reason.KEYS_UNAVAILABLE,
            },
        ),
        (413, {Reason.TOO_LARGE}),
        (431, {Reason.HEAD_TOO_LARGE}),
    ],
)
def test_status_doctrine(status: int, reasons: set[Reason]) -> None:
    assert {reason for reason in Reason if STATUS[reason] == status} == reasons


def test_every_deadline_of_an_engine_is_a_gateway_timeout() -> None:
    late = {reason for reason in Reason if reason.value.endswith("_timeout")}
    late -= {Reason.CLIENT_TIMEOUT, Reason.QUEUE_TIMEOUT}
    assert {STATUS[reason] for reason in late} == {504}


def test_every_fault_on_an_engines_wire_is_a_bad_gateway() -> None:
    assert {STATUS[reason] for reason in Reason if reason.value.startswith("upstream_")} == {502}


@pytest.mark.parametrize("retryable", [True, False])
def test_error_says_what_it_was_told(retryable: bool) -> None:
    error = SidecarError(Reason.BAD_REQUEST, "downstream", "n: expected an integer", retryable=retryable)
    assert str(error) == error.detail == "n: expected an integer"
    assert (error.reason, error.origin, error.retryable) == (Reason.BAD_REQUEST, "downstream", retryable)


def test_error_is_not_retried_unless_that_was_said() -> None:
    assert SidecarError(Reason.UPSTREAM_RESET, "upstream", "gone").retryable is False
