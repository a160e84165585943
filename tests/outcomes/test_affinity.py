"""T13: a session prefers its node and is not pinned to it: it moves at once, once, and says so."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Literal

import msgspec
import pytest

from sidecar.core.breaker import State
from sidecar.policy.schema import Adaptive, Balance, Retry, Seconds, Snapshot
from tests.harness import Message, Peer, Script, Upstream, eventually, one_by_one, says
from tests.under_test import (
    BREAKERS_OFF,
    Sidecar,
    chat,
    endpoint,
    error_body,
    json_answer,
    node_breaker,
    service,
    sidecar,
    whole_stream,
)

OPEN = Seconds(0.15)
MANY = Retry(attempts=3, budget_min=1000)


class Switch:
    """A behaviour that serves, or fails with 500 while `broken`."""

    def __init__(self) -> None:
        self.broken = False

    def script(self) -> Script:
        async def behave(peer: Peer) -> None:
            if self.broken:
                await peer.send(json_answer(error_body(), b"500 Oh"))
            else:
                await peer.send(whole_stream())

        return one_by_one(behave)


async def where(proxy: Sidecar, session: str = "s1") -> tuple[str, str]:
    """The endpoint that served, and what the answer says of a move."""
    got = await proxy.once(chat(session=session))
    assert got.status == 200
    return got.header(b"x-sidecar-endpoint").decode(), moved(got)


def moved(got: Message) -> str:
    return b"".join(got.values(b"x-sidecar-session")).decode()


async def stays(proxy: Sidecar, turns: int = 8) -> str:
    """The one endpoint that serves the session, turn after turn, without a word of moving."""
    seen = {await where(proxy) for _ in range(turns)}
    assert len(seen) == 1, seen
    [(key, word)] = seen
    assert word == ""
    return key


@pytest.mark.parametrize("nodes", [2, 5])
async def test_session_stays_where_its_cache_is(nodes: int) -> None:
    ups = [Upstream(one_by_one(says(whole_stream()))) for _ in range(nodes)]
    async with _all(ups):  # noqa: SIM117 - their ports are known only inside
        async with sidecar(*ups) as proxy:
            homes = [(await where(proxy, f"s{number}"))[0] for number in range(10)]
            for number in range(10):
                assert await where(proxy, f"s{number}") == (homes[number], "")


@contextlib.asynccontextmanager
async def _all(ups: Sequence[Upstream]) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as stack:
        for up in ups:
            await stack.enter_async_context(up)
        yield


@pytest.mark.parametrize("probe", ["copy", "request"])
@pytest.mark.parametrize("return_home", [True, False])
async def test_session_moves_at_once_and_at_most_once_per_recovery(
    return_home: bool, probe: Literal["copy", "request"]
) -> None:
    switches = [Switch(), Switch()]
    async with Upstream(switches[0].script()) as one, Upstream(switches[1].script()) as two:
        plan = service(
            one,
            two,
            balance=Balance(return_home=return_home),
            breakers=node_breaker(1, open_s=OPEN, successes=1, adaptive=Adaptive(probe=probe)),
            retry=MANY,
        )
        async with sidecar(plan) as proxy:
            home = await stays(proxy)
            by_key = {one.key: switches[0], two.key: switches[1]}
            [other] = set(by_key) - {home}
            by_key[home].broken = True
            # The request that finds it out is served elsewhere, and says so.
            assert await where(proxy) == (other, "moved")
            assert proxy.state("node", home) is State.OPEN
            assert await stays(proxy) == other
            by_key[home].broken = False
            await asyncio.sleep(OPEN + 0.02)
            # A request without a session probes, or its copy does, and closes it.
            served_by = other if probe == "copy" else home
            assert (await proxy.once(chat())).header(b"x-sidecar-endpoint") == served_by.encode()
            await eventually(lambda: proxy.state("node", home) is State.CLOSED, "the verdict")
            if return_home:
                assert await where(proxy) == (home, "returned")
                assert await stays(proxy) == home
            else:
                assert await stays(proxy) == other


async def test_session_does_not_play_ping_pong_while_its_node_flaps() -> None:
    switches = [Switch(), Switch()]
    async with Upstream(switches[0].script()) as one, Upstream(switches[1].script()) as two:
        plan = service(one, two, breakers=node_breaker(1, open_s=OPEN, successes=2), retry=MANY)
        async with sidecar(plan) as proxy:
            home = await stays(proxy)
            by_key = {one.key: switches[0], two.key: switches[1]}
            by_key[home].broken = True
            places = [(await where(proxy))[0] for _ in range(3)]
            for _ in range(3):
                # Half open and back: no recovery, so no return.
                await asyncio.sleep(OPEN * 1.2)
                places.extend([(await where(proxy))[0] for _ in range(2)])
            assert home not in places


async def test_binding_is_written_only_after_the_node_accepted() -> None:
    broken = one_by_one(says(json_answer(error_body(), b"500 Oh")))
    home_switch = Switch()
    async with (
        Upstream(home_switch.script()) as home,
        Upstream(broken) as bad,
        Upstream(one_by_one(says(whole_stream()))) as good,
    ):
        plan = service(
            endpoint(home, local=True),
            bad,
            good,
            balance=Balance(local_first=True, return_home=False),
            breakers=node_breaker(1, open_s=Seconds(3600)),
            retry=MANY,
        )
        async with sidecar(plan) as proxy:
            assert await where(proxy) == (home.key, "")
            bad.die()
            home_switch.broken = True
            got = await proxy.once(chat(session="s1"))
            assert (got.status, got.header(b"x-sidecar-endpoint")) == (200, good.key.encode())
            assert moved(got) == "moved"
            assert await stays(proxy) == good.key


async def test_aborted_version_is_never_used_whatever_the_session_remembers() -> None:
    async with (
        Upstream(one_by_one(says(whole_stream()))) as stable,
        Upstream(one_by_one(says(whole_stream()))) as canary,
    ):
        plan = service(endpoint(stable, version="v1"), endpoint(canary, version="v2"), split={"v1": 0.0, "v2": 100.0})
        async with sidecar(plan) as proxy:
            got = await proxy.once(chat(session="s1"))
            assert got.header(b"x-sidecar-version") == b"v2"
            assert await stays(proxy) == canary.key
            aborted = msgspec.structs.replace(plan, split={"v1": 100.0, "v2": 0.0})
            proxy.running.apply(Snapshot(version=2, services=(aborted,), ready_when="always"))
            before = len(canary.requests)
            for session in ("s1", "s1", "s2", ""):
                got = await proxy.once(chat(session=session))
                assert (got.header(b"x-sidecar-version"), got.header(b"x-sidecar-endpoint")) == (
                    b"v1",
                    stable.key.encode(),
                )
            assert len(canary.requests) == before


async def test_split_is_sticky_by_session_and_roughly_as_weighted() -> None:
    async with (
        Upstream(one_by_one(says(whole_stream()))) as stable,
        Upstream(one_by_one(says(whole_stream()))) as canary,
    ):
        plan = service(
            endpoint(stable, version="v1"),
            endpoint(canary, version="v2"),
            split={"v1": 50.0, "v2": 50.0},
            breakers=BREAKERS_OFF,
        )
        async with sidecar(plan) as proxy:
            first = [(await where(proxy, f"s{number}"))[0] for number in range(60)]
            again = [(await where(proxy, f"s{number}"))[0] for number in range(60)]
            assert first == again
            assert 12 <= first.count(canary.key) <= 48


async def test_affinity_off_forgets() -> None:
    ups = [Upstream(one_by_one(says(whole_stream()))) for _ in range(2)]
    async with _all(ups):  # noqa: SIM117 - their ports are known only inside
        async with sidecar(service(*ups, balance=Balance(affinity="off"))) as proxy:
            seen = {(await where(proxy))[0] for _ in range(40)}
            assert len(seen) == 2
