"""The list of models: an engine's own where all speak one language, ours where they do not."""

from collections.abc import Iterable

import msgspec
import pytest

from sidecar.core.breaker import Scope
from sidecar.kernel.outcome import Result
from sidecar.policy.schema import Endpoint, Service
from sidecar.proxy.models import names_of
from tests.harness import Upstream, answers, connect, request
from tests.proxy.bench import Bench, get
from tests.under_test import JSON, endpoint, json_answer, service, sidecar

TRITON = Endpoint(url="http://t:80", engine="triton")
MII = Endpoint(url="http://d:80", engine="deepspeed")
VLLM = Endpoint(url="http://v:80")


def listed(
    *endpoints: Endpoint, models: tuple[str, ...] = ("*",), reports: Iterable[Iterable[str] | None] = ()
) -> object:
    """The names that a service lists whose engines report these, in order."""
    bench = Bench(service(*endpoints, models=models))
    for node, told in zip(bench.nodes, reports, strict=False):
        node.models = None if told is None else frozenset(told)
    return names_of(bench.state)


def named(each: Endpoint, *models: str, **changes: object) -> Endpoint:
    return msgspec.structs.replace(each, models=models, **changes)


CASES = [
    pytest.param((TRITON,), ("*",), (), [], id="nothing but globs"),
    pytest.param((TRITON,), ("b", "a", "c-*"), (), ["b", "a"], id="the service's names in its order"),
    pytest.param((named(TRITON, "x", "y*"), VLLM), ("*",), (), ["x"], id="an endpoint's names"),
    pytest.param((named(TRITON, "x", "a"),), ("a",), (), ["a"], id="only what the service has"),
    pytest.param((named(TRITON, "x"),), ("a", "x"), (), ["x"], id="only what an endpoint has"),
    pytest.param((TRITON, VLLM), ("*",), (["z", "a"], ["b"]), ["a", "b", "z"], id="what engines report"),
    pytest.param((TRITON,), ("a", "b"), (["b"],), ["b"], id="not what no engine reports"),
    pytest.param((TRITON, VLLM), ("a", "b"), (["b"], None), ["a", "b"], id="unless an engine did not say"),
    pytest.param((TRITON,), ("a",), ([],), [], id="an engine that serves nothing"),
    pytest.param((named(MII, "*", engine_model="/models/m"),), ("*",), (), ["/models/m"], id="the engine's name"),
    pytest.param((named(MII, "m", engine_model="/models/m"),), ("*",), (), ["m"], id="only if clients may use it"),
    pytest.param((TRITON,), ("a?", "a[1]", "a1"), (["a1", "a?"],), ["a1", "a?"], id="odd names"),
    pytest.param((), ("a",), (), [], id="no endpoints"),
    pytest.param((named(TRITON, "x"),), (), (), ["x"], id="a service that is a fallback"),
]


@pytest.mark.parametrize(("endpoints", "models", "reports", "names"), CASES)
def test_what_may_be_asked_for_is_listed(
    endpoints: tuple[Endpoint, ...],
    models: tuple[str, ...],
    reports: tuple[Iterable[str] | None, ...],
    names: list[str],
) -> None:
    assert listed(*endpoints, models=models, reports=reports) == names


def test_endpoint_that_drains_counts_for_nothing_and_one_that_is_open_counts() -> None:
    bench = Bench(service(named(TRITON, "a"), named(MII, "b"), models=("a", "b")))
    first, second = bench.nodes
    first.draining = True
    bench.fleet.override(Scope.NODE, second.key, "open", bench.clock.now, "a test", 60.0)
    assert names_of(bench.state) == ["b"]


def mixed(upstream: Upstream) -> Service:
    return service(endpoint(upstream, engine="triton"), models=("small", "large"))


@pytest.mark.parametrize("split", [False, True])
async def test_client_gets_vllms_shape_and_no_engine_is_asked(split: bool) -> None:
    async with Upstream(answers(json_answer(b"{}")), eager=True) as upstream, sidecar(mixed(upstream)) as proxy:
        async with connect(proxy.port, split=split) as client:
            got = await client.ask(request(b"/v1/models?x=1", headers=[b"X-Request-Id: mine"]))
            again = await client.ask(request(b"/v1/models"))  # the same connection
        assert not upstream.requests
    assert (got.status, got.header(b"content-type"), got.framing) == (200, b"application/json", "length")
    assert got.header(b"x-request-id") == b"mine"
    answer = msgspec.json.decode(got.body)
    assert answer["object"] == "list"
    assert [card["id"] for card in answer["data"]] == ["small", "large"]
    for card in answer["data"]:
        assert (card["object"], card["root"], card["parent"]) == ("model", card["id"], None)
        assert isinstance(card["created"], int)
        assert isinstance(card["owned_by"], str)
    assert again.status == 200


OTHERS = [
    pytest.param(request(b"/v1/models", method=b"HEAD"), id="another method"),
    pytest.param(request(b"/v1/models", method=b"POST", headers=[JSON], body=b"{}"), id="one with a body"),
    pytest.param(request(b"/v1/models/small"), id="another path"),
    pytest.param(request(b"/v2/models/small"), id="the engine's own"),
]


@pytest.mark.parametrize("asked", OTHERS)
async def test_all_else_goes_to_the_engine(asked: bytes) -> None:
    async with Upstream(answers(json_answer(b""))) as upstream, sidecar(mixed(upstream)) as proxy:
        await proxy.once(asked, asked.split()[0])
        assert [each.start for each in upstream.requests] == [asked.split(b"\r\n")[0]]


async def test_engines_that_speak_one_language_answer_themselves() -> None:
    page = b'{"object":"list","data":[{"id":"m"}]}'
    async with Upstream(answers(json_answer(page)), eager=True) as upstream:
        for each in (endpoint(upstream), endpoint(upstream, engine="triton", front="openai")):
            async with sidecar(service(each, models=("a", "b"))) as proxy:
                assert (await proxy.once(request(b"/v1/models"), b"GET")).body == page


def test_answer_of_ours_is_recorded_and_nothing_is_held() -> None:
    bench = Bench(service(TRITON, models=("a",)))
    client = bench.begin(get())
    assert client.ended
    (record,) = bench.recorder.requests
    assert (record.status, record.reason, record.result, record.attempts) == (200, None, Result.IGNORED, 0)
    assert not bench.held()
    assert not bench.connector.openings
