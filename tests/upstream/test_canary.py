"""What a canary asks, and of whom; what comes of its answers is in `test_trust`."""

import json

import pytest

from sidecar.core.fleet import Fleet
from sidecar.kernel.ids import EndpointKey, ServiceName
from sidecar.kernel.outcome import Ending, Result
from sidecar.policy.schema import Endpoint, Service, Snapshot
from sidecar.proxy.attempt import Attempt
from sidecar.proxy.watchdog import Watchdog
from sidecar.upstream.canary import Canary, models_to_ask, request_for
from sidecar.wire.call import Api, read_call
from tests.clock import Clock
from tests.upstream.polling import FakePool


def test_one_token_is_asked_for() -> None:
    request = request_for("m")
    call = read_call(Api.COMPLETIONS, request.body)
    assert (call.model, call.max_tokens, call.stream, call.n, call.user) == ("m", 1, False, 1, "")
    assert request.content_length == request.body_size == len(request.body)


def test_a_model_that_need_not_be_named_is_not() -> None:
    assert json.loads(request_for("").body) == {"prompt": "1", "max_tokens": 1, "stream": False}


CASES = {
    # the endpoint, the service's models, what the engine lists -> what is asked for, of an engine that needs no name
    "anything": ({}, ("*",), None, [""]),
    "anything that is listed": ({}, ("*",), {"b", "a"}, [""]),
    "named by the service": ({}, ("a", "b-*"), None, ["a"]),
    "named by the endpoint": ({"models": ("b", "a")}, ("*",), None, ["b", "a"]),
    "named and not listed": ({}, ("a", "b"), {"b"}, ["b"]),
    "named, none of them listed": ({}, ("a",), {"b"}, [""]),
    "named by the service, not the endpoint's": ({"models": ("b*",)}, ("a", "b1"), None, ["b1"]),
    "the engine's own name": ({"engine_model": "own"}, ("a",), None, ["own"]),
    "it says that it serves nothing": ({}, ("a",), set(), []),
    "its own name, not ready": ({"engine_model": "own"}, ("a",), set(), []),
    "it is to serve nothing": ({"models": ()}, ("a",), None, []),
    "a fallback": ({}, (), {"b", "a"}, [""]),
}


def fleet_of(endpoint: Endpoint, models: tuple[str, ...] = ("*",)) -> Fleet:
    fleet = Fleet(lambda: 0.5)
    fleet.apply(Snapshot(version=1, services=(Service(name="chat", models=models, endpoints=(endpoint,)),)), 0.0)
    return fleet


@pytest.mark.parametrize(("changes", "models", "listed", "expected"), CASES.values(), ids=CASES.keys())
def test_models_to_ask(
    changes: dict[str, object], models: tuple[str, ...], listed: set[str] | None, expected: list[str]
) -> None:
    endpoint = Endpoint(url="http://h1:80", **changes)  # type: ignore[arg-type]
    service = fleet_of(endpoint, models).services[ServiceName("chat")]
    node = service.nodes[EndpointKey("h1:80")]
    node.models = None if listed is None else frozenset(listed)
    assert list(models_to_ask(service, node, nameless=True)) == expected
    if expected == [""]:  # whoever needs a name gets those that are listed
        named = sorted(name for name in listed or () if models_match(models, name))
        assert list(models_to_ask(service, node, nameless=False)) == named


def models_match(models: tuple[str, ...], name: str) -> bool:
    return not models or "*" in models or name in models


class Sent:
    """A canary to one endpoint, and what was told of it."""

    def __init__(self, endpoint: Endpoint, within_s: float = 10.0) -> None:
        self.clock = Clock()
        self.pool = FakePool()
        self.told: list[tuple[Result, Ending | None]] = []
        service = fleet_of(endpoint).services[ServiceName("chat")]
        [self.node] = service.nodes.values()
        self.canary = Canary(self.node, "m", b"health-1", self.clock.time, self.hear)
        self.started = self.canary.start(service, self.pool, Watchdog(self.clock), within_s)

    def hear(self, result: Result, attempt: Attempt) -> None:
        self.told.append((result, attempt.ending))


def test_what_goes_out_is_a_request_like_any_other() -> None:
    sent = Sent(Endpoint(url="http://h1:80"))
    [link] = sent.pool.links
    head = link.sent.decode()
    assert head.startswith("POST /v1/completions HTTP/1.1\r\n")
    assert "\r\nhost: h1:80\r\n" in head
    assert f"\r\ncontent-length: {len(link.body)}\r\n" in head
    assert "\r\nx-request-id: health-1\r\n" in head
    assert sent.started and sent.node.in_flight == 1


@pytest.mark.parametrize(
    ("changes", "target", "field"),
    [
        ({"engine": "triton"}, "/v2/models/m/generate_stream", "text_input"),
        ({"engine": "deepspeed"}, "/v1/completions", "prompt"),
        ({"engine": "deepspeed", "front": "api_server"}, "/generate", "prompt"),
        ({"engine": "deepspeed", "front": "gateway"}, "/mii/m", "prompts"),
    ],
)
def test_other_engines_are_asked_in_their_own_words(changes: dict[str, str], target: str, field: str) -> None:
    sent = Sent(Endpoint(url="http://h1:80", **changes))  # type: ignore[arg-type]
    [link] = sent.pool.links
    assert link.path == target
    assert json.loads(link.body)[field] in ("1", ["1"])


def test_silence_is_a_failure_at_its_deadline() -> None:
    sent = Sent(Endpoint(url="http://h1:80"), within_s=5.0)
    sent.clock.advance(4.9)
    assert sent.told == []
    sent.clock.advance(0.2)
    assert sent.told == [(Result.FAILURE, Ending.HEAD_TIMEOUT)]
    assert sent.pool.links[0].aborted
    assert sent.node.in_flight == 0


def test_one_that_is_stopped_tells_nothing_and_holds_nothing() -> None:
    sent = Sent(Endpoint(url="http://h1:80"))
    sent.canary.stop()
    sent.clock.advance(60)
    assert (sent.told, sent.node.in_flight) == ([], 0)
    assert sent.pool.links[0].aborted


def test_nobody_listens() -> None:
    clock, pool, told = Clock(), FakePool(), list[Result]()
    pool.deaf = True
    service = fleet_of(Endpoint(url="http://h1:80")).services[ServiceName("chat")]
    [node] = service.nodes.values()
    canary = Canary(node, "", b"health-1", clock.time, lambda result, attempt: told.append(result))
    assert canary.start(service, pool, Watchdog(clock), 5.0)
    assert (told, node.in_flight) == ([Result.FAILURE], 0)
