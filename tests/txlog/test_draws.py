"""Budgets: rule 11's contract in this process and in real servers; then that no history draws more than the limit."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from msgspec.structs import replace

from sidecar.txlog import draws
from sidecar.txlog.codec import budget_key
from sidecar.txlog.draws import Budgets
from sidecar.txlog.local import LocalStore
from sidecar.txlog.store import (
    DRAWER_TTL_MS,
    MEMBER_TTL_MS,
    PURGE,
    SPAN_PARTS,
    Call,
    Draw,
    Part,
    Unit,
    Window,
    drawn,
)
from tests.servers import Server, redis62, valkey
from tests.txlog.drawing import DAY_MS, KEY, Clocked, DrawContract, Virtual


@contextlib.contextmanager
def kept(running: contextlib.AbstractAsyncContextManager[Server]) -> Iterator[Server]:
    """A server for all tests, each of which has a loop of its own."""
    with asyncio.Runner() as runner:
        server = runner.run(running.__aenter__())
        try:
            yield server
        finally:
            runner.run(running.__aexit__(None, None, None))


@pytest.fixture(scope="module", params=["valkey", "redis 6.2"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("server")
    with kept(valkey(directory) if request.param == "valkey" else redis62(directory)) as server:
        yield server


class TestLocalStore(DrawContract):
    """The contract over `LocalStore`."""

    @pytest.fixture
    def store(self, clock: Virtual) -> LocalStore:
        return LocalStore(clock)


class TestServers(DrawContract):
    """The contract over the functions, in the Lua of a new server and of the oldest."""

    @pytest.fixture
    async def store(self, server: Server, clock: Virtual) -> AsyncIterator[Clocked]:
        await server.ask("FLUSHALL")
        store = Clocked(server.url, clock)
        await store.open()
        try:
            yield store
        finally:
            await store.close()


# --- two implementations of one rule ----------------------------------------------------------------------------------


class Draws:
    """Random draws on a few draws."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.keys = [budget_key("gold", "a"), budget_key("gold", "b"), budget_key("silver", "a")]
        self.times = [0]

    def some(self) -> Draw:
        pick, rolls = self.random.choice, self.random.random
        kinds = ((Unit.TOKENS, 60), (Unit.TOKENS, 6007), (Unit.REQUESTS, 6007), (Unit.TOKENS, DAY_MS))
        spans = self.random.sample(kinds, 2)
        if rolls() < 0.02:
            spans *= 2
        most = pick((3, 50, 50, 50, 70_000, 5_000_000_000, 1 << 47))
        windows = [
            Window(
                unit,
                span_ms,
                self.random.randint(0, 4 * most),
                must=self.random.randint(0, most) if rolls() < 0.1 else 0,
                want=self.random.randint(0, most) if rolls() < 0.7 else 0,
                give_back=self.random.randint(0, 2 * most) if rolls() < 0.3 else 0,
                least=self.random.randint(0, most) if rolls() < 0.2 else 0,
                give_back_us=pick(self.times[-30:]) + pick((0, 0, 5000)) if rolls() < 0.5 else 0,
            )
            for unit, span_ms in spans
        ]
        used = self.random.randint(0, 5) if rolls() < 0.5 else 0
        want, limit = self.random.randint(0, 8), self.random.randint(0, 20)
        return Draw(
            key=pick(self.keys),
            by=pick(("one", "two", "three")),
            windows=tuple(windows),
            slots_limit=limit,
            slots_used=used,
            slots_want=want if rolls() < 0.5 else 0,
        )

    def passes(self, clock: Virtual) -> None:
        ms = self.random.choice((0, 0, 0.4, 1, 1, 7, 100, 101, 3000, 6200, 20_000, 20 * 60_000, -1, -50, -3000))
        if self.random.random() < 0.01:
            ms = self.random.choice((-DAY_MS, DAY_MS, 3 * DAY_MS, -DRAWER_TTL_MS))
        clock.passes(ms)
        self.times.append(clock.now_us)


@pytest.mark.parametrize("seed", range(3))
async def test_a_server_draws_byte_for_byte_as_this_process_does(server: Server, seed: int) -> None:
    await server.ask("FLUSHALL")
    clock, draws = Virtual(), Draws(seed)
    here, there = LocalStore(clock), Clocked(server.url, clock)
    await there.open()
    try:
        for _ in range(150):
            draws.passes(clock)
            calls: list[Call] = [draws.some() for _ in range(4)]
            replies = await there.call(calls)
            for call, reply in zip(calls, replies, strict=True):
                twin = here.do(call)
                assert (drawn(twin), twin) == (drawn(reply), reply), call
    finally:
        await there.close()


# --- no history draws more than the limit -----------------------------------------------------------------------------

SPANS_MS: Final = (6000, 60_000)
NAMES: Final = ("one", "two", "three")


class Event(msgspec.Struct):
    """Something drawn: by whom, when by the server and when in truth, and what of it was not given back."""

    by: str
    at_us: int
    true_us: int
    drawn: int
    left: int
    must: int


class Drawing(RuleBasedStateMachine):
    """Sidecars, a clock, and one budget of two windows. `broken` changes calls on their way, as a fault would."""

    broken: Callable[[Draw], Draw] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.clock = Virtual()
        self.true_us = 0
        self.store = LocalStore(self.clock)
        self.events: dict[int, list[Event]] = {span_ms: [] for span_ms in SPANS_MS}
        self.limits: dict[int, int] = {}
        self.times = [0]
        self.goes_back = False

    @initialize(limit=st.integers(0, 60), more=st.integers(0, 200), goes_back=st.booleans())
    def begin(self, limit: int, more: int, goes_back: bool) -> None:
        self.limits = dict(zip(SPANS_MS, (limit, limit + more), strict=True))
        self.goes_back = goes_back

    @rule(ms=st.sampled_from([1, 33, 99, 100, 950, 1050, 5900, 5950, 5990, 6000, 6100, 14_000, 59_500, 61_000]))
    def passes(self, ms: int) -> None:
        self.clock.passes(ms)
        self.true_us += ms * 1000

    @rule(when=st.integers(1, 6), span_ms=st.sampled_from(SPANS_MS), ms=st.sampled_from([-1, 0, 40, 99, 100, 999]))
    def passes_a_span(self, when: int, span_ms: int, ms: int) -> None:
        """Since an earlier call, about."""
        if when < len(self.times):
            self.passes(max(0, (self.times[-when] - self.clock.now_us) // 1000 + span_ms + ms))

    @rule(ms=st.sampled_from([1, 100, 2000, 30_000, 3_600_000]))
    def jumps_back(self, ms: int) -> None:
        if self.goes_back:
            self.clock.passes(-ms)

    @rule(
        by=st.sampled_from(NAMES),
        must=st.sampled_from([0, 0, 0, 0, 1, 30]),
        want=st.integers(0, 40),
        least=st.sampled_from([0, 0, 0, 10]),
        back=st.sampled_from([0, 0, 0, 1, 10, 25, 1000]),
        when=st.integers(0, 9),
        windows=st.sampled_from([SPANS_MS, SPANS_MS, SPANS_MS[:1], SPANS_MS[1:], SPANS_MS[::-1]]),
        lowered=st.sampled_from([0, 0, 0, 20]),
    )
    def draw(
        self, by: str, must: int, want: int, least: int, back: int, when: int, windows: tuple[int, ...], lowered: int
    ) -> None:
        back_us = self.times[-when] if when < len(self.times) and when > 4 else 0
        back = 0 if self.goes_back else back
        some = tuple(
            Window(Unit.TOKENS, span_ms, max(0, self.limits[span_ms] - lowered), must, want, back, least, back_us)
            for span_ms in windows
        )
        call = Draw(key=KEY, by=by, windows=some)
        reply = self.store.do(call if self.broken is None else self.broken(call))
        self.times.append(reply.now_us)
        for window, part in zip(some, drawn(reply).parts, strict=True):
            events = self.events[window.span_ms]
            if not self.goes_back:
                self._expects(window, by, part)
            at = (self.clock.now_us, self.true_us)
            events.append(Event(by, *at, must + part.granted, must + part.granted, must))

    def _expects(self, window: Window, by: str, part: Part) -> None:
        """By the rule's words alone: event by event, and no row of parts."""

        def number(us: int) -> int:
            return us // 1000 * SPAN_PARTS // window.span_ms

        now = number(self.clock.now_us)
        in_use = [event for event in self.events[window.span_ms] if number(event.at_us) >= now - SPAN_PARTS]
        back = window.give_back
        for event in reversed(in_use):
            is_late = window.give_back_us and number(event.at_us) > number(window.give_back_us)
            if event.by == by and not is_late and not self._is_forgotten(event):
                off = min(back, event.left)
                event.left -= off
                back -= off
        room = window.limit - sum(event.left for event in in_use) - window.must
        granted = max(0, min(window.want, room)) if room >= min(window.least, window.want) else 0
        assert part.granted == granted
        assert part.used == window.limit - room + granted
        assert (part.ms == 0) == (granted == window.want)

    def _is_forgotten(self, event: Event) -> bool:
        """Whether its sidecar was away for so long since that it has nothing to give back; no history is so long."""
        assert self.clock.now_us - event.at_us < DRAWER_TTL_MS * 1000
        return False

    def teardown(self) -> None:
        """In truth, whatever the clock did: from each draw on, for a span, no more than the limit and what was debt."""
        for span_ms, events in self.events.items():
            for first in events:
                span = [each for each in events if 0 <= each.true_us - first.true_us < span_ms * 1000]
                must = sum(each.must for each in span)
                assert sum(each.left for each in span) <= self.limits[span_ms] + must, "more than the limit in a span"


SETTINGS: Final = settings(
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)

TestDrawing = Drawing.TestCase
TestDrawing.settings = SETTINGS


def each(call: Draw, **changes: Callable[[Window], int]) -> Draw:
    windows = tuple(
        replace(window, **{name: change(window) for name, change in changes.items()}) for window in call.windows
    )
    return replace(call, windows=windows)


@pytest.mark.parametrize(
    "broken",
    [
        lambda call: each(call, limit=lambda window: window.limit + 1),
        lambda call: each(call, must=lambda _: 0),
        lambda call: each(call, give_back=lambda window: 2 * window.give_back),
        lambda call: each(call, give_back_us=lambda _: 0),
        lambda call: each(call, span_ms=lambda window: window.span_ms * 59 // 60),
        lambda call: each(call, least=lambda _: 0),
        lambda call: replace(call, by="one"),
    ],
    ids=["limit", "debt", "back", "where", "span", "least", "who"],
)
def test_what_is_done_wrong_is_found(broken: Callable[[Draw], Draw]) -> None:
    machine = type("Broken", (Drawing,), {"broken": staticmethod(broken)})
    quick = settings(SETTINGS, phases=[Phase.generate], derandomize=True, database=None, print_blob=False)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=quick)


# --- this process alone -----------------------------------------------------------------------------------------------


def test_there_are_only_so_many_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "MAX_BUDGETS", 100)
    it = Budgets()
    window = Window(Unit.TOKENS, 60_000, 10, want=10)
    calls = [Draw(key=budget_key("gold", f"{i}"), by="one", windows=(window,)) for i in range(1000)]
    for call in calls[:101]:
        assert drawn(it.draw(call, 10**12)).parts[0].granted == 10
    assert len(it) == 100
    assert drawn(it.draw(calls[1], 10**12)).parts[0].granted == 0, "the others are as they were"
    assert drawn(it.draw(calls[0], 10**12)).parts[0].granted == 10, "the one of longest ago begins anew"
    assert drawn(it.draw(calls[1], 10**12)).parts[0].granted == 0, "and who draws is not of long ago"
    for call in calls:
        it.draw(call, 10**12)
    assert len(it) == 100


def test_budgets_that_nobody_draws_on_are_forgotten() -> None:
    it = Budgets()
    window = Window(Unit.TOKENS, 60_000, 10, want=10)
    for i in range(1000):
        it.draw(Draw(key=budget_key("gold", f"{i}"), by="one", windows=(window,)), 10**12)
    later_us = 10**12 + (61_000 + MEMBER_TTL_MS) * 1000
    busy = Draw(key=budget_key("gold", "busy"), by="one", windows=(window,))
    it.draw(busy, later_us - 1000)
    assert len(it) == 1001
    for _ in range(1000 // PURGE + 1):
        it.draw(busy, later_us)
    assert len(it) == 1
