"""T22: every wire attempt is counted by itself, whatever became of the request; retries live on a budget."""

import pytest

from sidecar.core.breaker import State
from sidecar.policy.schema import Balance, Retry, Seconds
from tests.harness import Upstream, one_by_one, says
from tests.under_test import (
    behind,
    chat,
    endpoint,
    error_body,
    json_answer,
    node_breaker,
    service,
    session_breaker,
    sidecar,
    whole_stream,
)

BROKEN = says(json_answer(error_body(b"mine"), b"500 Oh"))
OK = says(whole_stream())


@pytest.mark.parametrize(("threshold", "opens"), [(3, True), (4, False)])
async def test_three_failed_attempts_are_three_failures(threshold: int, opens: bool) -> None:
    async with behind(one_by_one(BROKEN), breakers=node_breaker(threshold), retry=Retry(attempts=3)) as (
        upstream,
        proxy,
    ):
        got = await proxy.once(chat())
        assert (got.status, got.body) == (500, error_body(b"mine")), "the upstream's own answer"
        assert got.header(b"x-sidecar-attempts") == b"3"
        assert len(upstream.requests) == 3
        assert proxy.state("node", upstream.key) is (State.OPEN if opens else State.CLOSED)


async def test_failure_on_one_and_success_on_another_are_just_that() -> None:
    async with Upstream(one_by_one(BROKEN)) as first, Upstream(one_by_one(OK)) as second:
        plan = service(
            endpoint(first, local=True),
            second,
            balance=Balance(local_first=True),
            breakers=node_breaker(2),
            retry=Retry(attempts=3, budget_min=10),
        )
        async with sidecar(plan) as proxy:
            got = await proxy.once(chat())
            assert (got.status, got.header(b"x-sidecar-attempts")) == (200, b"2")
            assert (len(first.requests), len(second.requests)) == (1, 1)
            assert proxy.state("node", first.key) is State.CLOSED
            assert (await proxy.once(chat())).status == 200
            assert (len(first.requests), len(second.requests)) == (2, 2)
            assert proxy.state("node", first.key) is State.OPEN
            assert proxy.state("node", second.key) is State.CLOSED


@pytest.mark.parametrize("attempts", [1, 2, 5])
async def test_attempts_are_at_most_as_many_as_configured(attempts: int) -> None:
    async with (
        Upstream(one_by_one(BROKEN)) as first,
        Upstream(one_by_one(BROKEN)) as second,
        sidecar(service(first, second, retry=Retry(attempts=attempts, budget_min=100))) as proxy,
    ):
        got = await proxy.once(chat())
        assert got.header(b"x-sidecar-attempts") == b"%d" % attempts
        assert len(first.requests) + len(second.requests) == attempts


async def test_other_node_is_tried_before_the_same_again() -> None:
    async with (
        Upstream(one_by_one(BROKEN)) as first,
        Upstream(one_by_one(BROKEN)) as second,
        sidecar(service(first, second, retry=Retry(attempts=2, budget_min=1000))) as proxy,
    ):
        for turn in range(1, 11):
            await proxy.once(chat())
            assert (len(first.requests), len(second.requests)) == (turn, turn)


async def test_retries_are_paid_from_a_budget() -> None:
    plan = Retry(attempts=2, budget_ratio=0.0, budget_min=3, window_s=Seconds(60))
    async with (
        Upstream(one_by_one(BROKEN)) as first,
        Upstream(one_by_one(BROKEN)) as second,
        sidecar(service(first, second, retry=plan)) as proxy,
    ):
        attempts = [int((await proxy.once(chat())).header(b"x-sidecar-attempts")) for _ in range(8)]
        assert attempts == [2, 2, 2, 1, 1, 1, 1, 1]


async def test_budget_grows_with_requests() -> None:
    plan = Retry(attempts=2, budget_ratio=0.5, budget_min=0, window_s=Seconds(60))
    good = [OK] * 10
    async with Upstream(one_by_one(*good, BROKEN)) as first, sidecar(service(first, retry=plan)) as proxy:
        for _ in good:
            assert (await proxy.once(chat())).status == 200
        retried = [int((await proxy.once(chat())).header(b"x-sidecar-attempts")) - 1 for _ in range(30)]
        # Of n requests n/2 may be retries: 10 good ones and the failing ones themselves earn them.
        assert 5 <= sum(retried) <= 21
        assert retried[0] == 1


async def test_session_is_charged_once_a_request_however_often_it_was_tried() -> None:
    async with behind(one_by_one(BROKEN), breakers=session_breaker(3), retry=Retry(attempts=3, budget_min=100)) as (
        upstream,
        proxy,
    ):
        for turn in range(1, 4):
            assert proxy.state("session", "s1") is State.CLOSED
            await proxy.once(chat(session="s1"))
            assert len(upstream.requests) == 3 * turn
        assert proxy.state("session", "s1") is State.OPEN
