"""What happens beside requests, in steps of the event loop: pages over large fleets, and a reload.

A page is driven as the loop drives it, and each stretch between two waits is timed by itself.
"""

import gc
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import uvloop
from aiohttp.test_utils import make_mocked_request

from bench.growth_cases import Path, service, session_names
from sidecar.admin.app import application
from sidecar.admin.facts import Phase
from sidecar.core.fleet import Fleet
from sidecar.policy.schema import Snapshot
from sidecar.policy.store import PolicyStore
from sidecar.proxy.ports import Recorder

SESSIONS = 100_000
ENDPOINTS = 10_000


@dataclass(frozen=True)
class Step:
    """`build` gives a path of `size`; `page` is what then takes time. A reload is not `bounded`: it is rare."""

    name: str
    size: int
    build: Callable[[int], Path]
    page: Callable[[Path], Awaitable[object]]
    bounded: bool = True


class FactsOf:
    """The admin pages' `Facts` of a path."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.fleet: Fleet = path.fleet
        self.store = PolicyStore(Snapshot(version=1, services=tuple(s.policy for s in path.fleet.services.values())))
        self.recorder: Recorder = path.witness
        self.phase = Phase.SERVING

    def now(self) -> float:
        return self._path.now()

    def wall(self) -> float:
        return time.time()

    def drain(self) -> None:
        raise RuntimeError("nobody drains here")

    async def exposition(self) -> tuple[bytes, str]:
        return await self._path.metrics.render()


def longest_ms(step: Step, rounds: int) -> list[float]:
    """The longest stretch of each of `rounds` runs, ms of CPU."""

    async def run() -> list[float]:
        path = step.build(step.size)
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 50, 50)
        return [_longest_ms(step.page(path)) for _ in range(rounds)]

    return uvloop.run(run())


def _longest_ms(page: Awaitable[object]) -> float:
    coroutine: Coroutine[Any, Any, object] = _as_coroutine(page)
    longest = 0.0
    while True:
        began = time.process_time()
        try:
            waits_for = coroutine.send(None)
        except StopIteration:
            waits_for = coroutine
        longest = max(longest, time.process_time() - began)
        if waits_for is not None:
            # Its end, or a wait for another thread, which is not the loop's time.
            coroutine.close()
            return longest * 1e3


async def _as_coroutine(page: Awaitable[object]) -> object:
    return await page


def _page(url: str) -> Callable[[Path], Awaitable[object]]:
    """A page by the handler that serves it."""

    async def page(path: Path) -> None:
        path.metrics.watch_fleet(path.fleet, path.now)
        request = make_mocked_request("GET", url)
        found = await application(FactsOf(path)).router.resolve(request)
        response = await found.handler(request)
        if response.status != 200:
            raise RuntimeError(f"{url} answered {response.status}")

    return page


async def _reload(path: Path) -> None:
    policies = tuple(each.policy for each in path.fleet.services.values())
    path.fleet.apply(Snapshot(version=2, services=policies), path.now())


def _tripped(count: int) -> Path:
    path = Path(service(3))
    for name in session_names(count):
        path.break_session(name)
    return path


def _wide(count: int) -> Path:
    return Path(service(count))


STEPS = (
    Step("GET /breakers, tripped sessions", SESSIONS, _tripped, _page("/breakers")),
    Step("GET /metrics, tripped sessions", SESSIONS, _tripped, _page("/metrics")),
    Step("GET /metrics, endpoints", ENDPOINTS, _wide, _page("/metrics")),
    Step("GET /healthz, endpoints", ENDPOINTS, _wide, _page("/healthz")),
    Step("GET /routes, endpoints", ENDPOINTS, _wide, _page("/routes")),
    Step("a reload without a change, endpoints", ENDPOINTS, _wide, _reload, bounded=False),
)
