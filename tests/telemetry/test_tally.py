"""The tally is the difference of what the metrics count: nothing twice, nothing lost."""

import pytest

from sidecar.core.sketch import bucket_of
from sidecar.core.tally import EndpointTally, ServiceTally
from sidecar.kernel.ids import EndpointKey
from sidecar.kernel.outcome import Ending, Result
from sidecar.telemetry.metrics import Metrics
from sidecar.telemetry.tally import Tally
from tests.telemetry.records import NODE, attempt, fleet_of, value

S, F = Result.SUCCESS, Result.FAILURE
OTHER = EndpointKey("10.0.0.2:8000")


def test_what_ended_is_told_once() -> None:
    metrics = Metrics()
    tally = Tally(metrics)
    assert tally.take() == []
    for ttft_s in (0.5, 0.5, 2.0):
        metrics.attempt(attempt(ttft_s=ttft_s))
    metrics.attempt(attempt(ending=Ending.SERVER_ERROR, result=F, ttft_s=None))
    (told,) = tally.take()
    assert told == ServiceTally(
        "chat",
        [
            EndpointTally(
                NODE,
                "v1",
                {(Ending.COMPLETE, S): 3, (Ending.SERVER_ERROR, F): 1},
                {},
                {bucket_of(0.5): 2, bucket_of(2.0): 1},
                (0, 1, 1),
            )
        ],
    )
    assert tally.take() == []
    metrics.attempt(attempt())
    ((only,),) = [told.endpoints for told in tally.take()]
    assert only.ended == {(Ending.COMPLETE, S): 1}
    assert only.first_tokens == {bucket_of(0.5): 1}


def test_services_versions_and_endpoints_stand_apart() -> None:
    metrics = Metrics()
    tally = Tally(metrics)
    for changes in ({}, {"version": "v2"}, {"endpoint": OTHER}, {"service": "small"}):
        metrics.attempt(attempt(**changes))
    told = {service.service: [(each.endpoint, each.version) for each in service.endpoints] for service in tally.take()}
    assert told == {"chat": [(NODE, "v1"), (NODE, "v2"), (OTHER, "v1")], "small": [(NODE, "v1")]}


def test_copies_are_told_with_what_they_proved() -> None:
    metrics = Metrics()
    tally = Tally(metrics)
    metrics.attempt(attempt(ending=Ending.LATE, result=F, copy=True))
    metrics.attempt(attempt(copy=True))
    metrics.attempt(attempt())
    for _ in range(2):
        metrics.attempt(attempt(copy=True))
    ((only,),) = [told.endpoints for told in tally.take()]
    assert only.ended == {(Ending.LATE, F): 1, (Ending.COMPLETE, S): 4}
    assert only.copies == {F: 1, S: 3}


async def test_a_policy_change_neither_repeats_nor_loses_what_stays() -> None:
    metrics = Metrics()
    tally = Tally(metrics)
    metrics.attempt(attempt())
    tally.take()
    metrics.attempt(attempt())
    metrics.attempt(attempt(endpoint=OTHER))
    metrics.retain(fleet_of(NODE))
    metrics.attempt(attempt())
    ((only,),) = [told.endpoints for told in tally.take()]
    assert (only.endpoint, only.ended) == (NODE, {(Ending.COMPLETE, S): 2})
    metrics.attempt(attempt(endpoint=OTHER))
    ((back,),) = [told.endpoints for told in tally.take()]
    assert (back.endpoint, back.ended) == (OTHER, {(Ending.COMPLETE, S): 1})
    labels = {"service": "chat", "version": "v1", "ending": "complete", "outcome": "success"}
    assert await value(metrics, "sidecar_attempts_total", **labels, endpoint=NODE) == 3


@pytest.mark.parametrize(
    ("ended", "runs"),
    [
        pytest.param("", [(0, 0, 0)], id="no failures"),
        pytest.param("ss", [(0, 0, 0)], id="successes"),
        pytest.param("fff", [(3, 3, 3)], id="failures alone"),
        pytest.param("ffsfffsf", [(2, 3, 1)], id="before, between and after"),
        pytest.param("sfff", [(0, 3, 3)], id="at the end"),
        pytest.param("fisfoifs", [(1, 2, 0)], id="what says nothing interrupts no run"),
        pytest.param("sff|ffs|ss", [(0, 2, 2), (2, 2, 0), (0, 0, 0)], id="each second for itself"),
    ],
)
def test_failures_in_a_row_are_told(ended: str, runs: list[tuple[int, int, int]]) -> None:
    outcomes = {
        "s": (Ending.COMPLETE, S),
        "f": (Ending.SERVER_ERROR, F),
        "i": (Ending.CLIENT_LEFT, Result.IGNORED),
        "o": (Ending.OVERLOADED, Result.OVERLOADED),
    }
    metrics = Metrics()
    tally = Tally(metrics)
    for second, expected in zip(ended.split("|"), runs, strict=True):
        for letter in second:
            ending, result = outcomes[letter]
            metrics.attempt(attempt(ending=ending, result=result))
        told = [each.runs for service in tally.take() for each in service.endpoints]
        assert told == ([expected] if second else [])


def test_what_nobody_takes_stays_bounded() -> None:
    metrics = Metrics()
    for number in range(2000):
        metrics.attempt(attempt(ttft_s=0.0001 * number))
    assert len(metrics.touched) == 1
    assert len(metrics.touched[0].first_tokens) <= 128
