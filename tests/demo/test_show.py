import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import pytest

from sidecar.core.desk import Event, Notice
from sidecar.core.revise import Refused
from sidecar.core.table import Rollout
from sidecar.demo import show
from sidecar.demo.engine import Engine
from sidecar.demo.script import Kind, Script
from sidecar.policy.load import load
from tests.admin.facts import FakeDesk, rollout, table, table_view
from tests.demo.requests import ask, post, refused, stream_for
from tests.harness import connect

QUICK = Script(models=("demo",), token_gap_s=0.001)


async def test_engines_are_three_well_ones_and_end_with_the_context() -> None:
    async with show.engines() as engines:
        assert len({engine.port for engine in engines}) == 3
        ports = [engine.port for engine in engines]
    for port in ports:
        assert await refused(port)


async def test_policy_loads_without_a_warning_and_names_every_engine() -> None:
    async with show.engines() as engines:
        snapshot = load([("demo", show.policy_text(engines).encode())], 1)
        assert not snapshot.warnings
        (service,) = snapshot.services
        assert [endpoint.url for endpoint in service.endpoints] == [engine.url for engine in engines]


async def test_the_last_engine_is_a_version_without_traffic() -> None:
    async with show.engines() as engines:
        (service,) = load([("demo", show.policy_text(engines).encode())], 1).services
        assert [endpoint.version for endpoint in service.endpoints] == ["v1", "v1", "v2"]
        assert service.split == {"v1": 100.0, "v2": 0.0}
        assert "sidecar routes set demo v2 --weight 0.1 --admin a:1" in show.banner("p:1", "a:1", engines)
    async with show.engines(1) as engines:
        (service,) = load([("demo", show.policy_text(engines).encode())], 1).services
        assert ([endpoint.version for endpoint in service.endpoints], service.split) == (["v1"], {})
        assert "routes set" not in show.banner("p:1", "a:1", engines)


async def test_policy_has_three_classes_and_a_tenant_with_a_quota() -> None:
    async with show.engines() as engines:
        snapshot = load([("demo", show.policy_text(engines).encode())], 1)
        assert [policy.name for policy in snapshot.qos_policies] == ["voice", "default", "code-batch"]
        assert [policy.preemptible for policy in snapshot.qos_policies] == [False, False, True]
        (quota,) = snapshot.quotas
        assert (quota.tenant, quota.requests_per_minute, quota.mode) == ("trial", 2, "enforce")
        # What the acts ask for must never wait: they are about other things.
        room = show.CONCURRENCY * sum(version == show.STABLE for version in show.versions_of(engines))
        assert room >= max(show.WORKERS, show.CANARY_WORKERS)
        text = show.banner("p:1", "a:1", engines)
        for words in ("x-tenant-id: trial", "x-class: code-batch", "x-class: voice", "sidecar admission --admin a:1"):
            assert words in text
        assert "sidecar admission" not in show.banner("p:1", None, engines)


async def test_banner_names_addresses_and_every_fault() -> None:
    async with show.engines(2) as engines:
        text = show.banner("127.0.0.1:9400", "127.0.0.1:9401", engines)
        for engine in engines:
            assert engine.url in text
        for word in ("http://127.0.0.1:9400/v1/chat/completions", "http://127.0.0.1:9401/breakers", *Kind):
            assert word in text
        assert "/breakers" not in show.banner("127.0.0.1:9400", None, engines)
        assert "grpcurl" not in text
        assert "grpcurl -plaintext c:1 list" in show.banner("127.0.0.1:9400", None, engines, "c:1")


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "WARM_S", 0.03)
    monkeypatch.setattr(show, "_POLL_S", 0.005)


class Judge:
    """A stand-in for the sidecar's node breaker: open once the victim struck enough, closed once it is well.

    One strike more than there are workers, and one whole answer more: then at least one of them has told its result.
    """

    def __init__(self, victim: Engine) -> None:
        self.key = f"127.0.0.1:{victim.port}"
        self._victim = victim
        self._opened = False
        self._polls = 0

    def states(self) -> Mapping[str, str]:
        self._polls += 1
        if self._victim.script.fault is not None:
            dead = not self._victim.counters.open and self._polls > 10
            self._opened = self._opened or dead or self._victim.counters.struck > show.WORKERS
            if self._opened:
                self._polls = 0
            return {self.key: "open"} if self._opened else {}
        well = self._polls >= 3 and self._victim.counters.completed > show.WORKERS
        return {self.key: "half_open" if self._opened and not well else "closed"}


async def test_act_says_each_change_once_and_leaves_the_engine_healed() -> None:
    said: list[str] = []
    async with show.engines(1, QUICK) as engines:
        judge = Judge(engines[0])
        assert await show.act("status", engines, engines[0].port, judge.states, said.append)
        assert engines[0].script.fault is None
        async with connect(engines[0].port) as client:
            body = ask(2, stream=True)
            assert (await client.ask(post(body), b"POST")).body == stream_for(body, 2)
    assert [line for line in said if line.startswith("breaker of")] == [
        f"breaker of {judge.key}: closed -> open",
        f"breaker of {judge.key}: open -> half_open",
        f"breaker of {judge.key}: half_open -> closed",
    ]
    assert "whole" in said[-1] and "refused with 500" in said[-1]


@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        (Kind.IN_BAND_ERROR, "cut, and told so"),
        (Kind.CUT_NO_TERMINATOR, "cut in silence"),
        (Kind.RST_BEFORE_HEAD, "ConnectionResetError"),
        (Kind.DIE, "ConnectionRe"),
    ],
)
async def test_act_says_what_clients_saw(kind: Kind, seen: str) -> None:
    said: list[str] = []
    async with show.engines(1, QUICK) as engines:
        assert await show.act(kind, engines, engines[0].port, Judge(engines[0]).states, said.append)
    assert seen in said[-1]


async def test_act_without_an_opening_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "ACT_S", 0.1)
    said: list[str] = []
    async with show.engines(1, QUICK) as engines:
        assert not await show.act("stale", engines, engines[0].port, dict, said.append)
        assert engines[0].script.fault is None
    assert any("no breaker opened" in line and "harms no stream" in line for line in said)


async def test_cancelled_act_leaves_the_engine_healed() -> None:
    async with show.engines(1, QUICK) as engines:
        victim = engines[0]
        task = asyncio.get_running_loop().create_task(show.act("hang", engines, victim.port, dict, lambda line: None))
        while victim.counters.live < show.WORKERS:
            await asyncio.sleep(0.005)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()
        assert victim.script.fault is None


async def test_act_with_an_unknown_fault_is_refused() -> None:
    with pytest.raises(ValueError, match="sulk"):
        await show.act("sulk", [], 1, dict, lambda line: None)


class Release:
    """A desk that leads a canary as it is told to, once it was asked for one and somebody knows what it answers."""

    def __init__(self, *rollouts: Rollout, says: Refused | None = None) -> None:
        self.engine: Engine | None = None
        self._desk = FakeDesk(says=says)
        self._events: list[Event] = [Notice("demo", "version_down", "v2"), table_view(table("demo"))]
        self._events += [table_view(table("demo", each)) for each in rollouts]
        self.closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._desk, name)

    def subscribe(self) -> "Release":
        return self

    lagged = False

    async def next(self) -> list[Event]:
        if not self._desk.updates or not self._events:
            await asyncio.Event().wait()
        while self.engine is not None and self.engine.counters.completed <= show.CANARY_WORKERS:
            await asyncio.sleep(0.005)
        return [self._events.pop(0)]

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("fault", [None, "slow"])
async def test_a_canary_is_asked_for_and_told_by_its_changes(fault: str | None) -> None:
    said: list[str] = []
    desk = Release(rollout(), rollout(step=1, evidence="as good"), rollout("promoted", 1, evidence="seen enough"))
    async with show.engines(2, QUICK) as engines:
        desk.engine = engines[0]
        assert await show.canary(fault, engines, engines[0].port, desk, said.append) == "promoted"
        assert engines[1].script.fault is None
    (update,) = desk.updates
    assert (update.service, update.version, update.plan) == ("demo", "v2", show.PLAN)
    assert said[1:-1] == [
        "canary v2: step 1, has 0.05",
        "canary v2: step 2, has 0.05; as good",
        "canary v2: promoted, has 0.05; seen enough",
    ]
    assert ("`slow`" in said[0]) == (fault is not None)
    assert "whole" in said[-1] and desk.closed


async def test_a_canary_that_is_refused_or_comes_to_no_end_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(show, "ACT_S", 0.05)
    async with show.engines(1, QUICK) as engines:
        refused = Release(says=Refused("unavailable", "the log is away"))
        assert await show.canary(None, engines, engines[0].port, refused, said.append) == ""
        assert "refused: the log is away" in said
        assert await show.canary(None, engines, engines[0].port, Release(rollout()), said.append) == "running"
