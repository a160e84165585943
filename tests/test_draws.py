"""Token budgets over several sidecars and a server a round trip away: what all of them admit together."""

import asyncio
import copy
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sidecar.core.quotas.quota import Exceeded, Ledger, Reservation
from sidecar.draws import REFUSED_S, Quotas
from sidecar.policy.schema import Quota
from sidecar.txlog.codec import budget_key, budget_shard
from sidecar.txlog.local import LocalStore
from sidecar.txlog.log import State
from sidecar.txlog.server import RedisStore
from sidecar.txlog.store import Call, Reply, Store, StoreDown
from tests.quota_world import Sidecar, World, most_in_a_span
from tests.servers import ask_at, valkey

LIMIT = 20_000
MINUTE = Quota(name="q", tokens_per_minute=LIMIT)


def loaded(world: World, load: float, seconds: float, *, mean: int = 300, seed: int = 1, parts: int = 0) -> None:
    """A tenant asks all sidecars alike for `load` times the limit; `parts`: only the first so many."""
    chance = random.Random(seed)
    sidecars = world.sidecars[: parts or None]
    gap_s = 60.0 * mean * len(sidecars) / (load * LIMIT)
    for sidecar in sidecars:

        def one(sidecar: Sidecar = sidecar) -> None:
            world.ask(sidecar, "ann", chance.randint(mean // 2, mean * 3 // 2), None, chance.uniform(1.0, 10.0))

        world.every(lambda: chance.expovariate(1.0 / gap_s), world.now + seconds, one)


def used(world: World, after_s: float) -> int:
    return sum(tokens for at, tokens in world.admitted if at >= 1000.0 + after_s)


@pytest.mark.parametrize(
    ("sidecars", "parts", "load", "mean"),
    [
        pytest.param(1, 0, 4.0, 60, id="one sidecar"),
        pytest.param(10, 0, 4.0, 60, id="ten sidecars"),
        pytest.param(10, 2, 4.0, 60, id="ten sidecars of which two have the tenant"),
        pytest.param(10, 0, 20.0, 60, id="a flood"),
        pytest.param(10, 0, 4.0, 600, id="requests of a thirtieth of the limit"),
        pytest.param(30, 0, 4.0, 60, id="thirty sidecars"),
    ],
)
def test_the_limit_is_used_and_not_exceeded_in_any_minute(sidecars: int, parts: int, load: float, mean: int) -> None:
    world = World(sidecars, MINUTE)
    loaded(world, load, 180.0, mean=mean, parts=parts)
    world.run(180.0)
    assert most_in_a_span(world.admitted) <= 1.01 * LIMIT
    assert used(world, 60.0) >= (0.95 if mean == 60 else 0.8) * 2 * LIMIT


def test_a_tenant_that_stays_within_its_limit_is_hardly_ever_refused() -> None:
    world = World(10, MINUTE)
    loaded(world, 0.7, 300.0, mean=60)
    world.run(300.0)
    assert len(world.refused) <= 0.01 * len(world.admitted)


@pytest.mark.parametrize("forgot", [False, True], ids=["as it was", "and knows nothing"])
def test_without_the_server_each_has_its_part_and_afterwards_all_have_the_whole(forgot: bool) -> None:
    world = World(10, MINUTE)
    loaded(world, 4.0, 300.0, mean=60)
    world.clock.at(world.now + 80.0, world.lose)
    world.clock.at(world.now + 150.0, world.find, forgot)
    world.run(300.0)
    assert most_in_a_span(world.admitted) <= 1.02 * LIMIT
    away = sum(tokens for at, tokens in world.admitted if 1085.0 <= at < 1145.0)
    assert 0.7 * LIMIT <= away <= 1.02 * LIMIT
    assert used(world, 215.0) >= 0.95 * LIMIT


@pytest.mark.parametrize("age_s", [1.0, 20.0, 40.0])
def test_a_server_that_is_back_with_an_older_picture_of_itself_is_told_what_came_after(age_s: float) -> None:
    world = World(10, MINUTE)
    loaded(world, 4.0, 240.0)
    world.run(100.0)
    older = copy.deepcopy(world.server.budgets)
    world.run(age_s)
    world.lose()
    world.run(2.0)
    world.server.budgets = older
    world.find(forgot=False)
    world.run(140.0)
    assert most_in_a_span(world.admitted) <= 1.01 * LIMIT
    assert sum(tokens for _, tokens in world.admitted) >= 3.2 * LIMIT


def test_a_quota_may_refuse_all_while_the_server_is_away() -> None:
    world = World(2, Quota(name="q", tokens_per_minute=LIMIT, when_log_away="refuse"))
    world.lose()
    world.run(0.1)
    refused = world.ask(world.sidecars[0], "ann", 10)
    assert isinstance(refused, Exceeded)
    assert refused.detail == "quota q admits nothing while the transaction log cannot be reached"
    assert refused.retry_after_s
    world.find(forgot=True)
    world.run(0.6)
    assert isinstance(world.ask(world.sidecars[0], "ann", 10), Reservation)


def test_what_was_held_and_not_used_is_everybodys_again_within_two_seconds() -> None:
    world = World(2, MINUTE)
    loaded(world, 4.0, 2.0, parts=1)
    world.run(6.0)
    holder = world.sidecars[0].ledger.known("ann")[0].meters[0]
    world.run(2.0)
    assert (holder.held, holder.spare, holder.debt) == (0, 0, 0)
    world.run(10.0)
    left = LIMIT - sum(tokens for _, tokens in world.admitted)
    asked = 0
    while asked < 50 and not isinstance(world.ask(world.sidecars[1], "ann", left), Reservation):
        world.run(0.1)
        asked += 1
    assert asked < 50


@pytest.mark.parametrize("lasts_s", [2.0, 10.0, 90.0])
def test_what_a_request_gives_back_of_a_day_is_everybodys_again_though_nobody_else_came(lasts_s: float) -> None:
    world = World(10, Quota(name="q", tokens_per_day=100_000))
    for sidecar in world.sidecars:
        assert isinstance(world.ask(sidecar, "ann", 8000, 200, lasts_s), Reservation)
        world.run(lasts_s + 10.0)
    assert [meter.held for budget in world.budgets("ann") for meter in budget.meters] == [0] * 10
    assert world.budgets("ann")[-1].meters[0].used == 10 * 200


@pytest.mark.parametrize("seed", [0, 5, 16, 19])
def test_whatever_becomes_of_policy_server_and_clock_nothing_stays_held(seed: int) -> None:
    chance = random.Random(seed)

    def policy() -> tuple[Quota, ...]:
        made = []
        for name in ("p", "q"):
            quota = Quota(
                name=name,
                tenant=chance.choice(("*", "ann")),
                tokens_per_minute=chance.choice((None, 2000, 20_000)),
                tokens_per_day=chance.choice((None, 100_000)),
                requests_per_minute=chance.choice((None, 30)),
                concurrency=chance.choice((None, 1, 5, 40)),
                mode=chance.choice(("enforce", "shadow", "off")),
                when_log_away=chance.choice(("share", "refuse")),
            )
            made.append(quota if quota != Quota(name=name) else Quota(name=name, tokens_per_minute=5000))
        return tuple(made)

    world = World(3, *policy(), round_trip_s=chance.choice((0.002, 0.3)))
    server = world.server
    for _ in range(1200):
        what = chance.random()
        if what < 0.02:
            quotas = policy()
            for sidecar in world.sidecars:
                sidecar.ledger.use(quotas, world.now)
        elif what < 0.03:
            world.lose()
        elif what < 0.05 and not server.up:
            world.find(forgot=chance.random() < 0.3)
        elif what < 0.06:
            jump_us, before = chance.choice((-90_000_000, 5_000_000, 90_000_000)), server.now_us
            server.now_us = lambda at, jump_us=jump_us, before=before: before(at) + jump_us  # type: ignore[method-assign, misc]
        else:
            tokens, tenant = chance.randint(1, 900), chance.choice(("ann", "bob"))
            used = chance.choice((0, tokens // 2, tokens, 2 * tokens))
            world.ask(chance.choice(world.sidecars), tenant, tokens, used, chance.choice((0.0, 0.1, 5.0, 20.0)))
        world.run(chance.expovariate(20.0))
    world.find(forgot=False)
    world.run(60.0)
    for budget in [*world.budgets("ann"), *world.budgets("bob")]:
        assert (budget.in_flight, budget.reserved, budget.slots) == (0, 0, 0)
        assert all(meter.settled and meter.own >= 0 for meter in budget.meters)
    assert not [drawer for each in server.budgets._budgets.values() for drawer in each.drawers.values() if drawer.slots]


def test_one_request_per_sidecar_goes_before_anything_is_known() -> None:
    world = World(10, Quota(name="q", tokens_per_minute=1000))
    for sidecar in world.sidecars:
        assert isinstance(world.ask(sidecar, "ann", 1000), Reservation)
        assert isinstance(world.ask(sidecar, "ann", 1000), Exceeded)
    world.run(1.0)
    for sidecar in world.sidecars:
        assert isinstance(world.ask(sidecar, "ann", 1), Exceeded)


@pytest.mark.parametrize(
    "quota",
    [Quota(name="q", requests_per_minute=100), Quota(name="q", requests_per_minute=100, tokens_per_day=10_000_000)],
    ids=["of requests", "beside another window"],
)
def test_requests_are_counted_as_tokens_are(quota: Quota) -> None:
    world = World(5, quota)
    for _ in range(600):
        world.ask(random.Random(world.now).choice(world.sidecars), "ann", 50, None, 0.5)
        world.run(0.2)
    assert most_in_a_span([(at, 1) for at, _ in world.admitted]) <= 101
    assert len(world.admitted) >= 190


def test_no_more_requests_are_under_way_than_may_be() -> None:
    world = World(5, Quota(name="q", concurrency=10))
    chance = random.Random(1)
    most = 0
    for _ in range(2000):
        world.ask(chance.choice(world.sidecars), "ann", 10, None, 2.0)
        world.run(0.02)
        most = max(
            most,
            sum(sidecar.ledger.known("ann")[0].in_flight for sidecar in world.sidecars if sidecar.ledger.known("ann")),
        )
    assert 10 <= most <= 10 + 5  # one each on credit, at first
    assert sum(budget.in_flight for budget in world.budgets("ann")) == 10
    world.run(30.0)
    assert [budget.slots for budget in world.budgets("ann")] == [0] * 5


def test_a_sidecar_that_ends_gives_back_what_it_holds() -> None:
    world = World(2, MINUTE)
    first, second = world.sidecars
    for _ in range(20):
        world.ask(first, "ann", 900, 450, 0.1)
        world.run(0.1)
    world.run(0.1)
    first.leave()
    spent = sum(tokens for _, tokens in world.admitted)
    world.run(2.0)
    for _ in range(50):
        world.ask(second, "ann", LIMIT - spent)
        world.run(0.1)
    assert world.admitted[-1][1] == LIMIT - spent


class Log:
    """A log that is this process's own store, until it is away."""

    def __init__(self, clock: Any) -> None:
        self.state = State.UP
        self.asked: list[int] = []
        self.store: Store = LocalStore(lambda: int(clock() * 1e6))
        self.down = False
        self.members = 3

    async def ask(self, calls: list[Call]) -> list[Reply]:
        self.asked.append(len(calls))
        if self.down:
            raise StoreDown("away", "it is away")
        return await self.store.call(calls)


class Said:
    def __init__(self) -> None:
        self.events: list[str] = []

    def __call__(self, level: str, event: str, **fields: Any) -> None:
        self.events.append(event)


def joined(*quotas: Quota, clock: Callable[[], float] | None = None) -> tuple[Quotas, Log, Ledger, list[float], Said]:
    """A loop and what it joins; without a `clock` it is the time in the list."""
    now = [1000.0]
    clock = clock or (lambda: now[0])
    log, ledger, said = Log(clock), Ledger(), Said()
    ledger.use(quotas, now[0])
    quotas_ = Quotas(
        ledger,
        log,
        observer="pod-1",
        members=lambda: log.members,
        clock=clock,
        server_us=lambda at: int(at * 1e6),
        say=said,
    )
    return quotas_, log, ledger, now, said


@pytest.mark.parametrize("sidecars", [1, 10])
def test_a_burst_of_our_own_is_not_taken_for_what_others_take(sidecars: int) -> None:
    world = World(sidecars, MINUTE)
    for _ in range(4):
        world.ask(world.sidecars[0], "ann", 1000, lasts_s=5.0)
        world.run(0.06)
    world.run(0.3)
    ledger = world.sidecars[0].ledger
    told = ledger.headers(ledger.budgets("ann", "m"), world.now)
    assert len(world.admitted) == 4
    left = int(told.partition(b"remaining-tokens: ")[2].split(b"\r\n")[0])
    assert LIMIT - 4000 - 2000 <= left <= LIMIT - 4000


def test_who_is_refused_is_told_all_along_when_there_will_be_room() -> None:
    world = World(1, Quota(name="q", tokens_per_minute=1000))
    (sidecar,) = world.sidecars
    for _ in range(2):
        world.ask(sidecar, "ann", 414, lasts_s=0.5)
        world.run(0.5)
    while isinstance(refused := world.ask(sidecar, "ann", 314), Exceeded):
        assert refused.retry_after_s is not None
        left_s = 1061.0 - world.now
        assert left_s - 0.6 <= refused.retry_after_s <= left_s + 0.6
        world.run(4.0)
    assert world.now < 1066.0


async def test_all_that_is_due_is_asked_in_one_round_trip() -> None:
    loop, log, ledger, now, _ = joined(MINUTE)
    for number in range(50):
        ledger.reserve(ledger.budgets(f"tenant-{number}", "m"), 100, now[0])
    await loop.turn()
    assert log.asked == [50]
    assert ledger.members == 3
    (budget,) = ledger.known("tenant-7")
    assert (budget.meters[0].debt, budget.meters[0].used) == (0, 100)


async def test_a_failed_draw_tells_the_ledger_and_the_debt_is_told_when_the_log_is_back() -> None:
    loop, log, ledger, now, _ = joined(MINUTE)
    log.down = True
    ledger.reserve(ledger.budgets("ann", "m"), 100, now[0])
    await loop.turn()
    assert ledger.state == "away"
    (budget,) = ledger.known("ann")
    assert (budget.meters[0].debt, budget.meters[0].told) == (100, 0)
    log.down = False
    now[0] += 1.0
    await loop.turn()
    await loop.turn()
    assert (budget.meters[0].debt, budget.meters[0].used, ledger.state) == (0, 100, "settling")
    now[0] += 1.1
    assert isinstance(ledger.reserve(ledger.budgets("ann", "m"), 100, now[0]), Reservation)
    assert ledger.state == "up"


async def test_a_server_that_counts_the_sidecars_anew_gives_nobody_the_part_of_all() -> None:
    loop, log, ledger, now, _ = joined(MINUTE)
    await loop.turn()
    log.state = State.AWAY
    await loop.turn()
    log.state, log.members = State.UP, 1
    ledger.reserve(ledger.budgets("ann", "m"), 1, now[0])
    await loop.turn()
    assert (ledger.members, ledger.state) == (3, "settling")
    log.state = State.AWAY
    await loop.turn()
    assert ledger.members == 3
    log.state = State.UP
    await loop.turn()
    now[0] += 6.0
    await loop.turn()
    assert ledger.members == 1


async def test_a_log_that_is_away_is_not_asked() -> None:
    loop, log, ledger, now, _ = joined(MINUTE)
    log.state = State.AWAY
    ledger.reserve(ledger.budgets("ann", "m"), 100, now[0])
    await loop.turn()
    assert (log.asked, ledger.state) == ([], "away")
    await loop.leave()
    assert log.asked == []


async def test_who_leaves_gives_back_what_it_holds() -> None:
    loop, _, ledger, now, _ = joined(MINUTE)
    budgets = ledger.budgets("ann", "m")
    held = ledger.reserve(budgets, 900, now[0])
    assert isinstance(held, Reservation)
    await loop.turn()
    ledger.settle(held, 100, now[0])
    assert budgets[0].meters[0].held == 800
    await loop.leave()
    assert (budgets[0].meters[0].held, budgets[0].meters[0].used) == (0, 100)


async def used_at(server: RedisStore | None) -> list[int]:
    """What two sidecars are told when requests of one tenant use less, more and as much as they reserved."""
    clock = time.time if server is not None else lambda: 1000.0
    sidecars = [joined(MINUTE, clock=clock) for _ in range(2)]
    told = []
    for _, log, *_ in sidecars:
        log.store = server or sidecars[0][1].store
    tenant = "a/b\n\x00\xff"
    for tokens, used in ((900, 100), (100, 700), (50, 50)):
        for loop, _, ledger, _, _ in sidecars:
            budgets = ledger.budgets(tenant, "m")
            held = ledger.reserve(budgets, tokens, clock())
            assert isinstance(held, Reservation)
            await loop.turn()
            ledger.settle(held, used, clock())
            budgets[0].due_at = 0.0
            await loop.turn()
            told.append(budgets[0].meters[0].used)
    for loop, _, ledger, _, _ in sidecars:
        await loop.leave()
        told.append(ledger.known(tenant)[0].meters[0].used)
    return told


async def test_a_real_server_counts_as_the_one_in_this_process(tmp_path: Path) -> None:
    async with valkey(tmp_path) as server:
        store = RedisStore(server.url, "t")
        await store.open()
        try:
            told = await used_at(store)
        finally:
            await store.close()
    assert told == await used_at(None)
    assert told[-1] == 2 * (100 + 700 + 50)


async def test_a_budget_that_the_server_refuses_is_its_own_tenants_affair(tmp_path: Path) -> None:
    async with valkey(tmp_path) as server:
        store = RedisStore(server.url, "t")
        await store.open()
        try:
            loop, log, ledger, now, said = joined(MINUTE)
            log.store = store
            for round_ in range(3):
                for tenant in ("ann", "bob", "cleo"):
                    held = ledger.reserve(ledger.budgets(tenant, "m"), 100, now[0])
                    assert isinstance(held, Reservation)
                now[0] += 0.2
                await loop.turn()
                if not round_:
                    for key, of in ((budget_key("q", "ann"), ""), (budget_key("q", "bob"), "drawers:")):
                        name = f"{{t:{budget_shard(key):02d}}}:{of}{key}"
                        assert await ask_at(server.url, "DEL", name) == 1
                        await ask_at(server.url, "SET", name, "another program's")
            ann, bob, cleo = (ledger.known(tenant)[0] for tenant in ("ann", "bob", "cleo"))
            assert (ann.meters[0].used, ann.meters[0].debt, ledger.state) == (100, 200, "up")
            assert bob.meters[0].used == 100 and cleo.meters[0].used >= 300
            assert said.events == ["quota_unreadable"] and ann.due_at > now[0] + REFUSED_S - 1.0
        finally:
            await store.close()


async def test_a_server_that_refuses_all_is_away() -> None:
    loop, log, ledger, now, _ = joined(MINUTE)

    async def refuses(calls: list[Call]) -> list[Reply]:
        raise StoreDown("server", "it does not know the function")

    log.ask = refuses  # type: ignore[method-assign]
    for tenant in ("ann", "bob"):
        ledger.reserve(ledger.budgets(tenant, "m"), 100, now[0])
    await loop.turn()
    assert ledger.state == "away"


async def test_a_fault_in_a_turn_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, log, ledger, now, said = joined(MINUTE)
    monkeypatch.setattr("sidecar.draws.CRASHED_S", 0.0)

    async def fault(calls: list[Call]) -> list[Reply]:
        raise ValueError("a fault")

    log.ask = fault  # type: ignore[method-assign]
    ledger.reserve(ledger.budgets("ann", "m"), 100, now[0])
    running = asyncio.ensure_future(loop.run())
    for _ in range(20):
        await asyncio.sleep(0)
    assert said.events[0] == "quotas_crashed"
    (budget,) = ledger.known("ann")
    assert budget.meters[0].debt == 100
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def test_bursts_that_all_sidecars_get_at_once_do_not_come_to_more_than_the_limit() -> None:
    world = World(10, Quota(name="q", tokens_per_minute=10_000))

    def burst() -> None:
        for sidecar in world.sidecars:
            world.ask(sidecar, "ann", 9000, lasts_s=0.0)

    for number in range(120):
        world.clock.at(world.now + 1.0 + 61.0 * number, burst)
    world.run(121 * 61.0)
    assert sum(used for _, used in world.admitted) <= 120 * 10_000
