"""Tenants apart in vLLM's prefix cache: what engines are asked, over sockets, and by fakes where it is tried again."""

import json
from typing import Any

import pytest

from sidecar.adapters.salt import salt_of
from sidecar.core.breaker import State
from sidecar.kernel.ids import ServiceName
from sidecar.policy.schema import Identity, Retry, Seconds, Service, Source
from sidecar.wire.call import API_BY_PATH
from tests.harness import Upstream, answers, request
from tests.proxy.bench import Bench, chat, service
from tests.proxy.fakes import JSON as JSON_TYPE
from tests.proxy.fakes import FakeLink, head_of
from tests.under_test import (
    COMPLETION,
    DONE,
    FINISH,
    JSON,
    ROLE,
    Sidecar,
    endpoint,
    error_body,
    json_answer,
    node_breaker,
    sidecar,
    token,
)
from tests.under_test import service as service_of

KEY = "a key that nobody guesses"
CHAT = b"/v1/chat/completions"
BODY = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}\n'
WHOLE = answers(json_answer(COMPLETION))


async def ask(proxy: Sidecar, tenant: str = "", body: bytes = BODY, path: bytes = CHAT) -> int:
    headers = [JSON, *([b"X-Tenant-Id: " + tenant.encode()] if tenant else [])]
    return (await proxy.once(request(path, method=b"POST", headers=headers, body=body))).status


def apart(upstream: Upstream, **changes: object) -> Service:
    return service_of(endpoint(upstream, **changes), cache_salt="tenant")


def salt(tenant: str, generation: int = 0) -> str:
    return salt_of(KEY.encode(), "default", tenant, generation).decode()


def salts(upstream: Upstream) -> list[Any]:
    return [json.loads(each.body).get("cache_salt") for each in upstream.requests]


async def test_each_tenant_has_its_salt_and_those_who_name_none_share_one() -> None:
    async with Upstream(WHOLE) as upstream, sidecar(apart(upstream), cache_salt_key=KEY) as proxy:
        for tenant in ("a", "b", "a", "", ""):
            assert await ask(proxy, tenant) == 200
    assert salts(upstream) == [salt(tenant) for tenant in ("a", "b", "a", "", "")]
    assert len(set(salts(upstream))) == 3


async def test_body_is_as_it_was_but_for_its_salt_and_its_length() -> None:
    async with Upstream(WHOLE) as upstream, sidecar(apart(upstream), cache_salt_key=KEY) as proxy:
        assert await ask(proxy, "a") == 200
    sent = upstream.requests[0]
    assert sent.body == BODY.rstrip()[:-1] + b',"cache_salt":"%b"}' % salt("a").encode()
    assert sent.values(b"content-length") == [b"%d" % len(sent.body)]


async def test_salt_of_another_tenant_is_of_no_use() -> None:
    stolen = salt("victim").encode()
    async with Upstream(WHOLE) as upstream, sidecar(apart(upstream), cache_salt_key=KEY) as proxy:
        for body in (
            b'{"cache_salt":"%b",' % stolen + BODY[1:],
            BODY.rstrip()[:-1] + b',"cache_salt":"%b"}' % stolen,
            BODY.rstrip()[:-1] + b',"cache\\u005fsalt":"%b"}' % stolen,
            (BODY.decode().rstrip()[:-1] + f',"cache_salt":"{stolen.decode()}"}}').encode("utf-16-le"),
        ):
            assert await ask(proxy, "thief", body) == 200
    assert set(salts(upstream)) == {salt("thief")}


@pytest.mark.parametrize("path", sorted(API_BY_PATH))
async def test_whatever_runs_a_prompt_is_salted(path: bytes) -> None:
    async with Upstream(answers(json_answer(b"{}"))) as upstream, sidecar(apart(upstream), cache_salt_key=KEY) as proxy:
        await ask(proxy, "a", path=path)
    assert salts(upstream) == [salt("a")]


async def test_without_the_setting_bodies_go_by_as_they_are() -> None:
    body = BODY.rstrip()[:-1] + b',"cache_salt":"my own"}  '
    async with Upstream(WHOLE) as upstream, sidecar(service_of(upstream), cache_salt_key=KEY) as proxy:
        assert await ask(proxy, "a", body) == 200
    assert upstream.requests[0].body == body


async def test_other_engines_get_no_salt() -> None:
    async with Upstream(WHOLE) as upstream:
        async with sidecar(apart(upstream, engine="triton", front="openai"), cache_salt_key=KEY) as proxy:
            assert await ask(proxy, "a") == 200
        async with sidecar(apart(upstream, engine="deepspeed"), cache_salt_key=KEY) as proxy:
            assert await ask(proxy, "a") == 200
    assert upstream.requests[0].body == BODY
    assert salts(upstream) == [None, None]


async def test_what_is_no_inference_is_not_touched() -> None:
    async with Upstream(answers(json_answer(b"{}"))) as upstream, sidecar(apart(upstream)) as proxy:
        assert await ask(proxy, "a", b'{"model":"m","prompt":"x"}', b"/tokenize") == 200
    assert upstream.requests[0].body == b'{"model":"m","prompt":"x"}'


async def test_another_generation_is_another_cache_for_all() -> None:
    async with Upstream(WHOLE) as upstream, sidecar(apart(upstream), cache_salt_key=KEY) as proxy:
        assert await ask(proxy, "a") == 200
        proxy.running.fleet.services[ServiceName("default")].salt_generation = 1
        assert await ask(proxy, "a") == 200
    assert salts(upstream) == [salt("a"), salt("a", 1)]


async def test_sidecars_share_a_tenants_cache_by_their_key_alone() -> None:
    async with Upstream(WHOLE) as upstream:
        for key in (KEY, KEY, "", ""):
            async with sidecar(apart(upstream), cache_salt_key=key) as proxy:
                assert await ask(proxy, "a") == 200
    first, second, own, other = salts(upstream)
    assert first == second == salt("a")
    assert len({first, own, other}) == 3


async def test_tenant_is_who_the_policy_says() -> None:
    identity = Identity(tenant=(Source(header="x-team"),))
    async with Upstream(WHOLE) as upstream, sidecar(apart(upstream), identity=identity, cache_salt_key=KEY) as proxy:
        lines = [JSON, b"X-Team: a", b"X-Tenant-Id: b"]
        await proxy.once(request(CHAT, method=b"POST", headers=lines, body=BODY))
    assert salts(upstream) == [salt("a")]


# --- tried again ------------------------------------------------------------------------------------------------------


def salted_times(link: FakeLink) -> int:
    return link.body.count(b'"cache_salt":"')


def test_retry_is_salted_once_and_the_prompt_is_let_go_when_it_was_taken() -> None:
    bench, asked = Bench(service(2, cache_salt="tenant", retry=Retry())), chat()
    client = bench.begin(asked)
    bench.link.heads(head_of(500, JSON_TYPE, len(error_body()))).says(error_body()).ends()
    first, second = bench.connector.links
    assert first.body == second.body
    assert salted_times(second) == 1
    assert asked.body
    second.heads().says(ROLE + token(0))
    assert asked.body == b""
    second.says(FINISH + DONE).ends()
    assert client.ended
    assert not bench.held()


def test_copy_that_probes_has_the_same_salt() -> None:
    breakers = node_breaker(1, open_s=Seconds(10), successes=1)
    bench = Bench(service(2, breakers=breakers, cache_salt="tenant"))
    bench.begin()
    bench.link.heads(head_of(500, JSON_TYPE, len(error_body()))).says(error_body()).ends()
    bench.clock.advance(10)
    bench.begin()
    copy, own = bench.connector.links[-2:]
    assert bench.nodes[0].breaker.state is State.HALF_OPEN
    assert copy.head == own.head
    assert copy.body == own.body
    assert salted_times(copy) == 1


@pytest.mark.parametrize("apart_there", [True, False])
def test_fallback_has_a_setting_of_its_own(apart_there: bool) -> None:
    there = {True: "tenant", False: "off"}
    home = service(0, cache_salt=there[not apart_there], fallback="other")
    other = service(1, name="other", models=(), cache_salt=there[apart_there])
    bench = Bench(home, other)
    bench.begin()
    assert salted_times(bench.link) == apart_there
    if apart_there:
        assert salt_of(b"", "other", "", 0) in bench.link.body
