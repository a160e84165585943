"""What engines say of themselves steers the choice: long queues are avoided, and so is who lacks the model.

Which node is asked shows in what it was sent; nothing is timed, only waited for.
"""

from collections import Counter

import msgspec

from sidecar.core.pool import Node
from sidecar.policy.schema import Endpoint, HealthCheck, Seconds, Service, Snapshot
from tests.harness import Peer, Script, Upstream, eventually
from tests.under_test import CHAT, COMPLETION, Sidecar, chat, json_answer, refusal, service, sidecar

LOAD = HealthCheck(mode="load", interval_s=Seconds(0.02), timeout_s=Seconds(2))
MANY = 24


class Shared:
    """An engine that others feed, too: what it says of itself is set here. `models` empty: it does not tell."""

    def __init__(self, waiting: int = 0, models: tuple[str, ...] = ("m",)) -> None:
        self.waiting = waiting
        self.models = models
        self.served: Counter[str] = Counter()

    def upstream(self) -> Upstream:
        return Upstream(self._script(), eager=True)

    def _script(self) -> Script:
        async def play(peer: Peer) -> None:
            while True:
                asked = await peer.request()
                await peer.send(self._answer(asked.target, asked.body))

        return play

    def _answer(self, target: bytes, body: bytes) -> bytes:
        if target == CHAT:
            self.served[str(msgspec.json.decode(body)["model"])] += 1
            return json_answer(COMPLETION)
        if target == b"/metrics":
            page = b'vllm:num_requests_running{engine="0"} 1.0\nvllm:num_requests_waiting{engine="0"} %d.0\n'
            return json_answer(page % self.waiting)
        if self.models:
            listed = {"object": "list", "data": [{"id": name} for name in self.models]}
            return json_answer(msgspec.json.encode(listed))
        return json_answer(b'{"error":"Unauthorized"}', b"401 Unauthorized")


def plan(*ups: Upstream) -> Service:
    return service(*ups, health_check=LOAD)


def nodes(proxy: Sidecar) -> list[Node]:
    [only] = proxy.running.fleet.services.values()
    return list(only.nodes.values())


async def ask(proxy: Sidecar, times: int, model: str = "m") -> None:
    async with proxy.client() as client:
        for _ in range(times):
            assert (await client.ask(chat(stream=False, model=model), b"POST")).status == 200


async def test_node_with_a_long_queue_gets_less_until_it_is_short() -> None:
    busy, idle = Shared(waiting=50), Shared()
    async with busy.upstream() as one, idle.upstream() as two, sidecar(plan(one, two)) as proxy:
        await eventually(lambda: nodes(proxy)[0].waiting == 50, "the queue to be known")
        await ask(proxy, MANY)
        assert (busy.served.total(), idle.served.total()) == (0, MANY)
        busy.waiting = 0
        await eventually(lambda: nodes(proxy)[0].waiting == 0, "the queue to be known as short")
        await ask(proxy, MANY)
        assert busy.served.total() > 0


async def test_queues_are_not_asked_for_by_default() -> None:
    busy, idle = Shared(waiting=50), Shared()
    async with busy.upstream() as one, idle.upstream() as two, sidecar(one, two) as proxy:
        await ask(proxy, MANY)
        assert busy.served.total() > 0
        assert {request.target for upstream in (one, two) for request in upstream.requests} == {CHAT}


async def test_node_without_the_model_gets_none_of_its_requests() -> None:
    base, adapted = Shared(models=("m",)), Shared(models=("m", "adapter"))
    async with base.upstream() as one, adapted.upstream() as two, sidecar(plan(one, two)) as proxy:
        await eventually(lambda: all(node.models for node in nodes(proxy)), "the models to be known")
        await ask(proxy, MANY, "adapter")
        await ask(proxy, MANY, "m")
        assert (base.served["adapter"], adapted.served["adapter"]) == (0, MANY)
        assert base.served["m"] > 0 and adapted.served["m"] > 0
        got = await proxy.once(chat(model="nobody's"))
        assert refusal(got) == (404, "unknown_model", "unknown_model")


async def test_node_gets_a_model_once_it_has_loaded_it() -> None:
    engine = Shared(models=("m",))
    async with engine.upstream() as upstream, sidecar(plan(upstream)) as proxy:
        await eventually(lambda: nodes(proxy)[0].models == frozenset({"m"}), "the models to be known")
        assert (await proxy.once(chat(stream=False, model="adapter"))).status == 404
        engine.models = ("m", "adapter")
        await eventually(lambda: nodes(proxy)[0].models == frozenset({"m", "adapter"}), "the adapter to be known")
        await ask(proxy, 1, "adapter")


async def test_node_that_does_not_tell_its_models_gets_all_of_them() -> None:
    engine = Shared(waiting=3, models=())
    async with engine.upstream() as upstream, sidecar(plan(upstream)) as proxy:
        await eventually(lambda: nodes(proxy)[0].waiting == 3, "the queue to be known")
        await ask(proxy, 3, "anything")
        assert nodes(proxy)[0].models is None


async def test_polls_use_the_connections_that_requests_use() -> None:
    engine = Shared()
    async with engine.upstream() as upstream, sidecar(plan(upstream)) as proxy:
        await ask(proxy, 3)
        polled = len(upstream.requests)
        await eventually(lambda: len(upstream.requests) > polled + 5, "some polls")
        # One was there for the requests; a poll that met one of them brought another.
        assert len(upstream.connections) <= 2


async def test_policy_that_switches_polling_off_forgets_what_was_said() -> None:
    busy, idle = Shared(waiting=50), Shared()
    async with busy.upstream() as one, idle.upstream() as two, sidecar(plan(one, two)) as proxy:
        await eventually(lambda: nodes(proxy)[0].waiting == 50 and nodes(proxy)[0].models is not None, "its word")
        proxy.running.apply(Snapshot(version=2, services=(service(one, two),), ready_when="always"))
        await eventually(lambda: (nodes(proxy)[0].waiting, nodes(proxy)[0].models) == (0, None), "it to be forgotten")
        await ask(proxy, MANY)
        assert busy.served.total() > 0


async def test_engine_of_another_dialect_is_polled_in_its_own_words() -> None:
    told, untold = Shared(), Shared(waiting=50)
    async with told.upstream() as one, untold.upstream() as two:
        endpoints = (Endpoint(url=one.url), Endpoint(url=two.url, engine="triton"))
        async with sidecar(service(*endpoints, health_check=LOAD)) as proxy:
            await eventually(lambda: len(two.requests) > 3, "some polls")
            asked = {request.target for request in two.requests}
            assert asked == {b"/v2/health/live", b"/v2/repository/index"}
            assert (nodes(proxy)[1].waiting, nodes(proxy)[1].models) == (0, None)
