"""T23: each kind of "not now" has its own status and word, the same shape, and says when to come back; over sockets.

The operator reads the same word in the request's line, with the flag that Envoy's users grep for.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sidecar.policy.schema import Admission, Identity, QosPolicy, Quota, Seconds
from tests.admin.seen import BATCH, ONE_AT_A_TIME, VOICE, Seen, seen
from tests.harness import Message, chunked, one_by_one, says
from tests.jwt import issuing
from tests.under_test import ROLE, chat, error_body, json_answer, node_breaker, refusal, stream_head, token

DEAD = one_by_one(says(json_answer(error_body(), b"500 Internal Server Error")))
OFF = Admission(mode="off")


async def told(it: Seen, answer: Message, *, flag: str) -> str:
    """The word; checks that its request's line has it, the status and the flag."""
    status, word, code = refusal(answer)
    assert word == code
    lines: list[dict[str, Any]] = []
    while not lines or lines[-1]["status"] != status:
        lines = await it.lines(len(lines) + 1)
    assert (lines[-1]["reason"], lines[-1]["flag"]) == (word, flag)
    assert await it.metric("sidecar_requests_total", reason=word, status=str(status)) == 1
    return word


async def test_a_all_places_are_taken_and_every_engine_is_well() -> None:
    async with seen() as it:
        running, waiting = it.ask("batch"), None
        await it.running(1)
        waiting = it.ask("batch")
        await it.queued(1)
        answer = await it.ask("batch")
        assert answer.status == 429 and int(answer.header(b"retry-after")) >= 1
        assert await told(it, answer, flag="SH") == "overloaded"
        it.engine.free.set()
        assert {(await each).status for each in (running, waiting)} == {200}


async def test_b_no_engine_is_well() -> None:
    async with seen(OFF, script=DEAD, breakers=node_breaker(1)) as it:
        assert (await it.ask()).status == 500
        answer = await it.ask()
        assert answer.status == 503 and int(answer.header(b"retry-after")) >= 1
        assert await told(it, answer, flag="UO") == "breaker_open"


async def test_b_no_engine_is_well_and_some_would_wait_for_their_turn() -> None:
    async with seen(ONE_AT_A_TIME, script=DEAD, breakers=node_breaker(1)) as it:
        assert (await it.ask("batch")).status == 500
        answer = await it.ask("batch")
        assert answer.status == 503 and int(answer.header(b"retry-after")) >= 1
        assert await told(it, answer, flag="UO") == "breaker_open"


async def test_c_a_tenant_has_spent_its_part() -> None:
    async with seen(OFF, [Quota(name="q", tenant="t", requests_per_minute=1)]) as it:
        it.engine.free.set()
        assert (await it.ask(tenant="t")).status == 200
        answer = await it.ask(tenant="t")
        assert answer.status == 429 and int(answer.header(b"retry-after")) >= 1
        assert answer.header(b"x-ratelimit-remaining-requests") == b"0"
        assert await told(it, answer, flag="RL") == "quota_exceeded"


async def test_c_a_request_asks_for_more_than_there_ever_is() -> None:
    async with seen(OFF, [Quota(name="q", tenant="t", tokens_per_minute=5)]) as it:
        it.engine.free.set()
        answer = await it.ask(tenant="t")
        assert answer.status == 429
        assert not answer.values(b"retry-after") and answer.header(b"x-should-retry") == b"false"
        assert await told(it, answer, flag="RL") == "quota_exceeded"


async def test_c_an_answer_is_to_be_longer_than_one_request_may_have() -> None:
    async with seen(OFF, [Quota(name="q", tenant="t", tokens_per_minute=100_000)], request_tokens=5) as it:
        it.engine.free.set()
        answer = await it.ask(tenant="t")
        assert answer.status == 429 and answer.header(b"x-should-retry") == b"false"
        assert json.loads(answer.body)["error"]["param"] == "max_tokens"
        assert await told(it, answer, flag="RL") == "quota_exceeded"


async def test_d_it_was_preempted_before_its_first_byte() -> None:
    async with seen() as it:
        batch = it.ask("batch")
        await it.running(1)
        voice = it.ask("voice")
        answer = await batch
        assert (answer.status, answer.header(b"retry-after")) == (503, b"1")
        assert await told(it, answer, flag="SH") == "preempted"
        it.engine.free.set()
        assert (await voice).status == 200


async def test_d_a_stream_is_preempted_only_where_the_policy_says_so_and_is_told_in_band() -> None:
    streams = msgspec.structs.replace(BATCH, evict="streams")
    begun = says(stream_head() + chunked(ROLE, token(0), end=False))
    whole = says(stream_head() + chunked(ROLE, token(0)))
    async with seen(policies=(VOICE, streams), script=one_by_one(begun, whole)) as it, it.proxy.client() as client:
        await client.send(chat(headers=[b"x-class: batch"]))
        await client.seen(b"t0")
        voice = it.ask("voice")
        answer = await client.response(b"POST")
        last = answer.body.rstrip().rpartition(b"data: ")[2]
        assert answer.status == 200 and json.loads(last)["error"]["code"] == "preempted"
        assert b"[DONE]" not in answer.body
        assert (await voice).status == 200
        line = next(line for line in await it.lines(2) if line["qos"] == "batch")
        assert (line["status"], line["reason"], line["flag"]) == (200, "preempted", "SH")


async def test_e_it_is_shutting_down() -> None:
    async with seen(OFF) as it:
        it.engine.free.set()
        async with it.proxy.client() as client:
            assert (await client.ask(chat(), b"POST")).status == 200
            it.proxy.running.pipeline.draining = True
            answer = await client.ask(chat(), b"POST")
        assert answer.status == 503 and int(answer.header(b"retry-after")) >= 1
        assert await told(it, answer, flag="SH") == "draining"


async def test_f_its_turn_did_not_come_in_time() -> None:
    hurried = msgspec.structs.replace(BATCH, max_wait_s=Seconds(0.05))
    async with seen(policies=(VOICE, hurried)) as it:
        running = it.ask("batch")
        await it.running(1)
        answer = await it.ask("batch")
        assert answer.status == 408 and int(answer.header(b"retry-after")) >= 1
        assert await told(it, answer, flag="SH") == "queue_timeout"
        it.engine.free.set()
        assert (await running).status == 200
        line = next(line for line in await it.lines(2) if line["status"] == 408)
        assert 0.05 <= line["queued_s"] < 1.0


async def test_f_its_promise_can_no_longer_be_kept() -> None:
    strict = QosPolicy(name="strict", latency_sla_ms=60, late="reject")
    async with seen(policies=(strict, BATCH)) as it:
        running = it.ask()  # of the class that makes room for nobody
        await it.running(1)
        answer = await it.ask("strict")
        assert answer.status == 408 and int(answer.header(b"retry-after")) >= 1
        assert await told(it, answer, flag="SH") == "queue_timeout"
        assert it.engine.asked == 1
        it.engine.free.set()
        assert (await running).status == 200


@pytest.mark.parametrize("keys", ["missing", "there"])
async def test_whose_it_is_cannot_be_told(tmp_path: Path, keys: str) -> None:
    place = tmp_path / "jwks.json"
    if keys == "there":
        place.write_bytes(issuing.jwks(issuing.rsa()))
    jwt = issuing.policy(issuing.provider(jwks_url="", jwks_file=str(place)))
    async with seen(OFF, identity=Identity(jwt=jwt)) as it:
        times: dict[str, Any] = {"iat": it.proxy.running.wall() - 10, "exp": it.proxy.running.wall() + 600}
        answer = await it.ask(token=issuing.token(issuing.rsa("stranger"), header={"kid": "rsa"}, **times))
        if keys == "there":
            assert answer.status == 401 and not answer.values(b"retry-after")
            assert await told(it, answer, flag="") == "unauthorized"
        else:
            assert answer.status == 503 and int(answer.header(b"retry-after")) >= 1
            assert await told(it, answer, flag="") == "keys_unavailable"
