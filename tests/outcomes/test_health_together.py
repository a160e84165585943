"""Several sidecars that ask for the truth: one finds out, all of them know, and nobody's request was needed."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from msgspec.structs import replace

from sidecar.core.breaker import State
from sidecar.demo.engine import Engine
from sidecar.demo.script import Fault, Kind, Script
from sidecar.kernel.ids import EndpointKey
from sidecar.policy.schema import Endpoint, HealthCheck, NodeBreaker, Seconds, Shared
from tests.harness import eventually
from tests.outcomes.pods import SERVICE, Pod, pods
from tests.servers import Server, valkey
from tests.under_test import node_breaker, service

TRUTH = HealthCheck(
    mode="truth",
    interval_s=Seconds(0.05),
    timeout_s=Seconds(1),
    stalled_s=Seconds(0.5),
    canary_interval_s=Seconds(0.5),
)
RULE = NodeBreaker(open_s=Seconds(0.2), open_max_s=Seconds(0.4), successes=2, min_closed_ratio=0.34, adaptive=False)


def breaker(pod: Pod, engine: Engine) -> tuple[State, bool, str]:
    """What a sidecar holds of it: its state, whether all agreed on that, why."""
    [key] = [key for key in pod.running.fleet.services[SERVICE].nodes if key.endswith(f":{engine.port}")]
    found = pod.running.fleet.services[SERVICE].nodes[EndpointKey(key)].breaker
    return found.state, found.shared, found.evidence


@contextlib.asynccontextmanager
async def one_sick(tmp_path: Path) -> AsyncIterator[tuple[Server, list[Engine], list[Pod], Engine]]:
    """A server, three engines, three sidecars that ask for the truth, and the engine that all found to be dead."""
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(valkey(tmp_path / "server"))
        engines = [await stack.enter_async_context(Engine(Script(models=("m",)))) for _ in range(3)]
        plan = service(
            *[Endpoint(url=engine.url) for engine in engines],
            health_check=TRUTH,
            breakers=replace(node_breaker(), node=RULE),
            shared=Shared(quorum=2),
        )
        three = await stack.enter_async_context(pods([server.url] * 3, plan, tmp_path))
        await eventually(lambda: all(pod.running.logbook.replica.members == 3 for pod in three), "all to be there")
        sick = engines[1]
        sick.fail(Fault(kind=Kind.STATUS, status=500))
        await eventually(
            lambda: all(breaker(pod, sick)[:2] == (State.OPEN, True) for pod in three), "all to agree that it is open"
        )
        yield server, engines, three, sick


async def test_a_dead_engine_is_everybody_s_and_comes_back_without_a_request(tmp_path: Path) -> None:
    async with one_sick(tmp_path) as (_server, engines, three, sick):
        assert all("of ours for one token failed" in breaker(pod, sick)[2] for pod in three)
        sick.heal()
        await eventually(lambda: all(breaker(pod, sick)[0] is State.CLOSED for pod in three), "all to agree again")
        for other in (engines[0], engines[2]):
            assert all(breaker(pod, other)[0] is State.CLOSED for pod in three)
        for pod in three:
            metrics = (await pod.page(b"/metrics")).body.decode()
            assert "sidecar_health_canaries_total{" in metrics
            assert "sidecar_requests_total{" not in metrics and "sidecar_attempts_total{" not in metrics


async def test_while_the_log_is_away_each_finds_out_by_itself(tmp_path: Path) -> None:
    async with one_sick(tmp_path) as (server, _engines, three, sick):
        await server.kill()
        await eventually(lambda: not any(breaker(pod, sick)[1] for pod in three), "each to be alone")
        for _ in range(2):
            sick.heal()
            await eventually(lambda: all(breaker(pod, sick)[0] is State.CLOSED for pod in three), "each to close it")
            sick.fail(Fault(kind=Kind.STATUS, status=500))
            await eventually(lambda: all(breaker(pod, sick)[0] is State.OPEN for pod in three), "each to open it")
