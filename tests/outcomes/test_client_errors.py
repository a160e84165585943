"""T04: what the client did wrong counts neither for nor against a node, and is never sent to another one."""

import asyncio

import pytest

from sidecar.core.breaker import State
from sidecar.policy.schema import Balance, Retry, Seconds
from tests.harness import Upstream, one_by_one, says
from tests.under_test import (
    NO_RETRY,
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

BROKEN = says(json_answer(error_body(), b"500 Internal Server Error"))
OK = says(whole_stream())
OPEN = Seconds(0.15)


def refuses(status: int) -> bytes:
    message = b"maximum context length is 4096" if status == 400 else b"no"
    return json_answer(error_body(message, b"%d" % status, b"BadRequestError"), b"%d Refused" % status)


STATUSES = [400, 401, 404, 413, 422, 403, 405, 409, 410, 415, 418, 451]


async def test_client_errors_never_open_and_are_never_resent() -> None:
    answers = [refuses(status) for status in [*[400] * 20, *STATUSES * 3]]
    async with Upstream(one_by_one(*map(says, answers))) as first, Upstream(one_by_one(OK)) as second:
        plan = service(
            endpoint(first, local=True),
            second,
            balance=Balance(local_first=True),
            breakers=node_breaker(1),
            retry=Retry(attempts=3, budget_min=1000),
        )
        async with sidecar(plan) as proxy:
            for number, answer in enumerate(answers):
                got = await proxy.once(chat(stream=number % 2 == 0))
                assert got.raw.endswith(answer.partition(b"\r\n\r\n")[2])
                assert got.status == int(answer[9:12])
                assert got.header(b"x-sidecar-attempts") == b"1"
            assert len(first.requests) == len(answers) and second.requests == []
            assert proxy.state("node", first.key) is State.CLOSED


@pytest.mark.parametrize("status", STATUSES)
async def test_client_error_between_failures_neither_counts_nor_resets(status: int) -> None:
    async with behind(
        one_by_one(*[BROKEN] * 4, says(refuses(status)), BROKEN), breakers=node_breaker(5), retry=NO_RETRY
    ) as (upstream, proxy):
        for want in [500, 500, 500, 500, status]:
            assert (await proxy.once(chat(stream=False))).status == want
        assert proxy.state("node", upstream.key) is State.CLOSED
        assert (await proxy.once(chat())).status == 500
        assert proxy.state("node", upstream.key) is State.OPEN


@pytest.mark.parametrize("status", STATUSES)
async def test_probe_answered_by_a_client_error_is_inconclusive(status: int) -> None:
    async with Upstream(one_by_one(BROKEN, says(refuses(status)), OK)) as upstream:
        plan = service(upstream, breakers=node_breaker(1, open_s=OPEN, successes=1))
        async with sidecar(plan) as proxy:
            await proxy.once(chat())
            assert proxy.state("node", upstream.key) is State.OPEN
            await asyncio.sleep(OPEN + 0.02)
            assert (await proxy.once(chat())).status == status
            assert proxy.state("node", upstream.key) is State.HALF_OPEN
            assert (await proxy.once(chat())).status == 200
            assert proxy.state("node", upstream.key) is State.CLOSED


@pytest.mark.parametrize("status", [401, 403, 404, 422])
async def test_session_is_charged_for_length_alone(status: int) -> None:
    async with behind(one_by_one(says(refuses(status))), breakers=session_breaker(1)) as (_, proxy):
        for _ in range(5):
            assert (await proxy.once(chat(session="s1"))).status == status
        assert proxy.state("session", "s1") is State.CLOSED
