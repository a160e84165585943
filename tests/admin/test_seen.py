"""What operators see of admission and quotas, of a sidecar that serves: the line, the metrics, the page, the client.

The engine answers when the test says so, so that who runs and who waits is known and nothing sleeps.
"""

import json
import time
from pathlib import Path

import pytest

from sidecar.policy.schema import Admission, Identity, Quota, Source
from tests.admin.seen import reason, seen
from tests.jwt import issuing
from tests.under_test import refusal


async def test_who_waits_is_on_every_page_while_it_waits() -> None:
    async with seen() as it:
        first = it.ask("batch", "nightly")
        await it.running(1)
        second = it.ask("batch", "weekly")
        await it.queued(1)
        (line,) = await it.page("/admission")
        batch = next(each for each in line["classes"] if each["name"] == "batch")
        assert (line["mode"], line["queued"], line["running"], line["tenants"]) == ("enforce", 1, 1, 2)
        assert (batch["queued"], batch["running"], batch["turns"]) == (1, 1, 1)
        assert (line["endpoints"][0]["limit"], line["endpoints"][0]["in_flight"]) == (1.0, 1)
        assert (await it.page("/healthz"))["parts"]["queue default"]["detail"].startswith("1 waiting (batch 1)")
        assert await it.metric("sidecar_queued", service="default", qos="batch") == 1
        assert await it.metric("sidecar_running", service="default", qos="batch") == 1
        it.engine.free.set()
        assert [(await each).status for each in (first, second)] == [200, 200]
        assert await it.metric("sidecar_queued") == 0
        assert "queue default" not in (await it.page("/healthz"))["parts"]
        assert await it.metric("sidecar_queue_wait_seconds_count", qos="batch") == 1
        one, two = await it.lines(2)
        assert (one["tenant"], one["qos"], "queued_s" in one) == ("nightly", "batch", False)
        assert (two["tenant"], two["qos"], two["queued_s"] > 0) == ("weekly", "batch", True)
        assert two["ttft_s"] >= two["queued_s"]


async def test_who_is_turned_away_is_told_why_and_so_is_the_operator() -> None:
    async with seen() as it:
        running = it.ask("batch", "a")
        await it.running(1)
        waiting = it.ask("batch", "a")
        await it.queued(1)
        status, word, after = reason(await it.ask("batch", "a"))
        assert (status, word, int(after) >= 1) == (429, "overloaded", True)
        voice = it.ask("voice", "phone")
        assert reason(await running) == (503, "preempted", "1")
        await it.running(2)
        it.engine.free.set()
        # The queue was full: who comes first has the place of who comes last.
        assert [(await each).status for each in (voice, waiting)] == [200, 429]
        lines = {(line["qos"], line["status"]): line for line in await it.lines(4)}
        assert (lines["batch", 429]["flag"], lines["batch", 429]["reason"]) == ("SH", "overloaded")
        assert (lines["batch", 503]["flag"], lines["batch", 503]["reason"]) == ("SH", "preempted")
        assert lines["voice", 200]["queued_s"] > 0
        for name in ("overloaded", "preempted"):
            assert await it.metric("sidecar_turned_away_total", qos="batch", reason=name, mode="enforce") >= 1
            assert await it.metric("sidecar_requests_total", reason=name) >= 1


async def test_a_tenant_s_quota_is_told_on_every_answer_and_its_refusal_to_all() -> None:
    quota = Quota(name="small", tenant="t", requests_per_minute=2, tokens_per_minute=10_000)
    async with seen(Admission(mode="off"), [quota]) as it:
        it.engine.free.set()
        answers = [await it.ask(tenant="t") for _ in range(3)]
        assert [answer.status for answer in answers] == [200, 200, 429]
        for answer, left in zip(answers, (1, 0, 0), strict=True):
            assert answer.header(b"x-ratelimit-limit-requests") == b"2"
            assert int(answer.header(b"x-ratelimit-remaining-requests")) == left
            assert answer.header(b"x-ratelimit-limit-tokens") == b"10000"
            assert answer.header(b"x-ratelimit-reset-requests")
        status, word, after = reason(answers[2])
        assert (status, word, int(after) >= 1) == (429, "quota_exceeded", True)
        other = await it.ask(tenant="somebody-else")
        assert other.status == 200 and not other.values(b"x-ratelimit-limit-requests")
        lines = await it.lines(4)
        assert [line["tenant"] for line in lines] == ["t", "t", "t", "somebody-else"]
        assert lines[0]["reserved_tokens"] > 0 and lines[0]["counted"] in ("exact", "cached", "estimated")
        assert (lines[2]["flag"], lines[2]["reason"]) == ("RL", "quota_exceeded")
        assert "reserved_tokens" not in lines[3]
        labels = {"quota": "small", "window": "requests_per_minute", "mode": "enforce"}
        assert await it.metric("sidecar_quota_refused_total", **labels) == 1
        assert await it.metric("sidecar_quota_reserved_tokens_total", quota="small") == 2 * lines[0]["reserved_tokens"]


async def test_in_shadow_nobody_is_refused_and_all_is_told() -> None:
    quota = Quota(name="small", tenant="t", requests_per_minute=1, mode="shadow")
    admission = Admission(limit="fixed", concurrency=1, queue=0, mode="shadow")
    async with seen(admission, [quota]) as it:
        asked = [it.ask("batch", "t") for _ in range(3)]
        await it.running(3)
        it.engine.free.set()
        assert [(await each).status for each in asked] == [200] * 3
        lines = await it.lines(3)
        assert sum("shadowed" in line for line in lines) >= 2
        assert await it.metric("sidecar_turned_away_total", mode="shadow") == 2
        assert await it.metric("sidecar_turned_away_total", mode="enforce") == 0
        assert await it.metric("sidecar_quota_refused_total", mode="shadow", quota="small") == 2


async def test_who_is_not_believed_is_told_what_is_wrong_and_so_is_the_operator(tmp_path: Path) -> None:
    keys = tmp_path / "jwks.json"
    keys.write_bytes(issuing.jwks(issuing.rsa()))
    trusted = issuing.policy(issuing.provider(jwks_url="", jwks_file=str(keys)))
    now = time.time()
    good = issuing.token(iat=now - 10, exp=now + 600, tenant="acme")
    old = issuing.token(iat=now - 1000, exp=now - 600)
    stranger = issuing.token(issuing.rsa("stranger"), iat=now - 10, exp=now + 600, header={"kid": "rsa"})
    async with seen(identity=Identity(tenant=(Source(jwt_claim="tenant"),), jwt=trusted)) as it:
        it.engine.free.set()
        for token, words in ((b"", b"required"), (old, b"expired"), (stranger, b"signature")):
            answer = await it.ask(token=token)
            assert refusal(answer) == (401, "unauthorized", "unauthorized")
            assert words in answer.body and (not token or token not in answer.body)
        assert (await it.ask(token=good)).status == 200
        assert it.engine.asked == 1
        lines = await it.lines(4)
        assert [line["status"] for line in lines] == [401, 401, 401, 200]
        assert [line.get("tenant") for line in lines] == [None, None, None, "acme"]
        assert await it.metric("sidecar_jwt_verified_total") == 1
        for why in ("missing", "expired", "signature"):
            assert await it.metric("sidecar_jwt_refused_total", why=why) == 1
        assert await it.metric("sidecar_jwt_keys", issuer=issuing.ISSUER) == 1
        assert await it.metric("sidecar_requests_total", reason="unauthorized", status="401") == 3


@pytest.mark.parametrize("name", ["tenant-secret", "x" * 200])
async def test_no_tenant_is_in_the_metrics_or_on_the_page(name: str) -> None:
    async with seen(quotas=[Quota(name="all", tokens_per_minute=100_000)]) as it:
        it.engine.free.set()
        assert (await it.ask("batch", name)).status == 200
        assert name not in json.dumps(await it.page("/admission"))
        assert await it.metric("sidecar_admission_tenants") == 1
        assert name not in await it.metrics()
