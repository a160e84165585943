"""Rule 11 of `sidecar.txlog.store`, as tests over whatever draws on budgets, with a clock that goes when told.

A test module subclasses `DrawContract` and says what `store` and `clock` are. Servers have clocks of their own: there
the functions are asked what time it is by a key (`Clocked`), and are else what they are in service.
"""

from collections.abc import Sequence
from hashlib import sha1
from typing import Any, Final, Protocol

import pytest
from msgspec.structs import replace

from sidecar.txlog.codec import budget_key
from sidecar.txlog.functions import library
from sidecar.txlog.server import RedisStore, _reply
from sidecar.txlog.store import (
    DRAWER_TTL_MS,
    MAX_SPAN_MS,
    MAX_WINDOWS,
    MEMBER_TTL_MS,
    MIN_SPAN_MS,
    MOST_DRAWN,
    SPAN_PARTS,
    Call,
    Draw,
    Drawn,
    Part,
    Reply,
    Unit,
    Verdict,
    Window,
    drawn,
)

START_US: Final = 1_790_000_000_000_000 // 86_400_000_000 * 86_400_000_000
"""A midnight, and so the beginning of a part of every span that a day has whole."""
MINUTE_MS: Final = 60_000
DAY_MS: Final = 86_400_000
SECOND_MS: Final = MINUTE_MS // SPAN_PARTS
KEY: Final = budget_key("gold", "acme")


class Virtual:
    """A server's clock that goes when told, forwards and back."""

    def __init__(self) -> None:
        self.now_us = START_US

    def __call__(self) -> int:
        return self.now_us

    def passes(self, ms: float) -> None:
        self.now_us += round(ms * 1000)

    @property
    def ms(self) -> int:
        """Since the start."""
        return (self.now_us - START_US) // 1000


class Store(Protocol):
    async def call(self, calls: list[Call]) -> list[Reply]: ...


class Clocked(RedisStore):
    """A server, alone, whose functions have the time from a clock of ours. Draws only, as scripts."""

    _text = library().scripts["draw"].replace("call('TIME')", "call('HMGET', 'clock', 's', 'us')")
    _hash = sha1(_text.encode(), usedforsecurity=False).hexdigest().encode()

    def __init__(self, url: str, clock: Virtual) -> None:
        super().__init__(url, timeout_s=5.0, scripts_only=True)
        self.clock = clock

    async def open(self) -> None:
        assert "'clock'" in self._text
        await super().open()
        await self._run([0], [(b"SCRIPT", b"LOAD", self._text.encode())])

    async def call(self, calls: list[Call]) -> list[Reply]:
        packed = [self._packer.pack(call) for call in calls]
        seconds, us = divmod(self.clock(), 1_000_000)
        time = (b"HSET", b"clock", b"s", b"%d" % seconds, b"us", b"%d" % us)
        commands = [(b"EVALSHA", self._hash, *command[2:]) for _, command in packed]
        _, *raw = await self._run([0, *(shard for shard, _ in packed)], [time, *commands])
        return [_reply(each) for each in raw]


class Sidecar:
    """One that draws on one budget."""

    def __init__(self, store: Store, by: str = "one", key: str = KEY) -> None:
        self.store = store
        self.by = by
        self.key = key

    async def draws(self, *windows: Window, **slots: int) -> Drawn:
        (reply,) = await self.store.call([Draw(key=self.key, by=self.by, windows=windows, **slots)])
        assert reply.verdict is Verdict.OK
        found = drawn(reply)
        assert len(found.parts) == len(windows)
        return found

    async def draw(self, limit: int = 100, span_ms: int = MINUTE_MS, /, **numbers: int) -> Part:
        """Of tokens, in one window."""
        return (await self.draws(Window(Unit.TOKENS, span_ms, limit, **numbers))).parts[0]

    async def used(self, span_ms: int = MINUTE_MS) -> int:
        return (await self.draw(0, span_ms)).used

    async def slots(self, limit: int, used: int = 0, want: int = 0) -> tuple[int, int]:
        found = await self.draws(slots_limit=limit, slots_used=used, slots_want=want)
        return found.slots, found.slots_in_use


class DrawContract:
    """The tests. Fixtures to give: `store`, `clock`."""

    @pytest.fixture
    def clock(self) -> Virtual:
        return Virtual()

    @pytest.fixture
    def one(self, store: Store) -> Sidecar:
        return Sidecar(store)

    @pytest.fixture
    def two(self, store: Store) -> Sidecar:
        return Sidecar(store, "two")

    # --- one window ---------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("there", "numbers", "granted", "used"),
        [
            (0, {}, 0, 0),
            (0, {"want": 60}, 60, 60),
            (0, {"want": 100}, 100, 100),
            (0, {"want": 101}, 100, 100),
            (40, {"want": 60}, 60, 100),
            (40, {"want": 61}, 60, 100),
            (40, {"want": 61, "least": 60}, 60, 100),
            (40, {"want": 61, "least": 61}, 0, 40),
            (40, {"want": 61, "least": 1000}, 0, 40),
            (40, {"want": 50, "least": 1000}, 50, 90),
            (100, {"want": 1}, 0, 100),
            (0, {"must": 60}, 0, 60),
            (0, {"must": 60, "want": 60}, 40, 100),
            (0, {"must": 160}, 0, 160),
            (100, {"must": 60, "want": 1}, 0, 160),
            (100, {"give_back": 60}, 0, 40),
            (100, {"give_back": 60, "want": 80}, 60, 100),
            (100, {"give_back": 60, "must": 70, "want": 80}, 0, 110),
            (100, {"give_back": 1000}, 0, 0),
            (100, {"give_back": 1000, "want": 1000}, 100, 100),
            (0, {"give_back": 5, "want": 100}, 100, 100),
        ],
    )
    async def test_it_is_granted_as_far_as_there_is_room(
        self, one: Sidecar, there: int, numbers: dict[str, int], granted: int, used: int
    ) -> None:
        await one.draw(want=there)
        part = await one.draw(**numbers)
        assert (part.granted, part.used) == (granted, used)
        assert (part.ms == 0) == (granted == numbers.get("want", 0))
        assert await one.used() == used

    @pytest.mark.parametrize("limit", [0, 1, 1_000_000_000_000])
    @pytest.mark.parametrize("want", [1, 1_000_000_000_000, 1 << 62])
    async def test_any_limit_is_kept_to_the_token(self, one: Sidecar, two: Sidecar, limit: int, want: int) -> None:
        first, second = await one.draw(limit, want=want), await two.draw(limit, want=want)
        assert first.granted == min(limit, want)
        assert first.granted + second.granted == first.granted + second.used - first.used == min(limit, 2 * want)
        if want > limit - first.granted:
            assert second.ms == MINUTE_MS if want > limit else second.ms > MINUTE_MS

    @pytest.mark.parametrize("much", [(1 << 16) - 1, 1 << 16, (1 << 32) - 1, 1 << 32])
    async def test_what_is_kept_is_what_was_drawn(self, one: Sidecar, clock: Virtual, much: int) -> None:
        """Whatever the width that a server keeps it with."""
        for i in range(1, 4):
            assert await one.draw(10 * much, want=much) == Part(much, i * much, 0)
            clock.passes(SECOND_MS)
        assert [(await one.draw(give_back=much)).used for _ in range(4)] == [2 * much, much, 0, 0]

    async def test_what_all_have_is_told_to_all(self, store: Store) -> None:
        granted = [(await Sidecar(store, f"s{i}").draw(want=30)).granted for i in range(6)]
        assert granted == [30, 30, 30, 10, 0, 0]

    async def test_tenants_and_quotas_have_budgets_of_their_own(self, store: Store) -> None:
        keys = [
            budget_key(quota, tenant) for quota in ("gold", "silver") for tenant in ("acme", "ACME", "", "ü\ud800/")
        ]
        keys += [budget_key("gold", "x" * 10_000), budget_key("gold", "x" * 10_001)]
        calls: list[Call] = [
            Draw(key=key, by="one", windows=(Window(Unit.TOKENS, MINUTE_MS, 9, want=8),)) for key in keys
        ]
        for granted in (8, 1, 0):
            assert [drawn(reply).parts[0].granted for reply in await store.call(calls)] == [granted] * len(keys)

    # --- limits -------------------------------------------------------------------------------------------------------

    async def test_a_limit_is_right_at_once(self, one: Sidecar, two: Sidecar) -> None:
        assert (await one.draw(100, want=80)).granted == 80
        assert (await two.draw(50, want=1)).granted == 0
        assert (await two.draw(0, want=1)).granted == 0
        assert (await one.draw(90, want=50)).granted == 10
        assert (await two.draw(50, want=1)).granted == 0
        assert (await two.draw(1000, want=1000)) == Part(910, 1000, MINUTE_MS + SECOND_MS)

    # --- time ---------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("span_ms", [MINUTE_MS, DAY_MS, 61, 7 * DAY_MS], ids=str)
    async def test_each_part_is_in_use_for_a_span_and_until_its_end(
        self, one: Sidecar, clock: Virtual, span_ms: int
    ) -> None:
        """At each border: what was drawn at a part's first and last moment."""
        first = clock.now_us // 1000 * SPAN_PARTS // span_ms
        begins = [-(-(first + i) * span_ms // SPAN_PARTS) for i in range(1, 2 * SPAN_PARTS + 4)]
        for i in range(SPAN_PARTS):
            clock.now_us = begins[i] * 1000
            assert (await one.draw(1000, span_ms, want=1)).used == 2 * i + 1
            clock.now_us = begins[i + 1] * 1000 - 1
            assert (await one.draw(1000, span_ms, want=1)).used == 2 * i + 2
        for i in range(SPAN_PARTS):
            ends = begins[i + SPAN_PARTS + 1]
            clock.now_us = ends * 1000 - 1
            assert await one.used(span_ms) == 2 * (SPAN_PARTS - i)
            clock.now_us = ends * 1000
            assert await one.used(span_ms) == 2 * (SPAN_PARTS - i - 1)

    @pytest.mark.parametrize(("want", "parts"), [(1, 0), (10, 0), (11, 1), (30, 2), (31, 3), (60, 5)])
    async def test_how_long_until_it_fits_is_exact(self, one: Sidecar, clock: Virtual, want: int, parts: int) -> None:
        clock.passes(1)
        for _ in range(6):  # at 1, 1001, ... ms; the limit is full
            assert (await one.draw(60, want=10)).granted == 10
            clock.passes(SECOND_MS)
        part = await one.draw(60, want=want)
        assert (part.granted, part.ms) == (0, MINUTE_MS + SECOND_MS * (parts + 1) - clock.ms)
        clock.passes(part.ms - 1)
        assert (await one.draw(60, want=want, least=want)).ms == 1
        clock.passes(1)
        assert await one.draw(60, want=want, least=want) == Part(want, 60 - 10 * (parts + 1) + want, 0)

    async def test_what_can_never_fit_waits_a_span(self, one: Sidecar) -> None:
        await one.draw(want=50)
        assert (await one.draw(want=200, least=200)).ms == MINUTE_MS
        assert (await one.draw(want=150)) == Part(50, 100, MINUTE_MS + SECOND_MS)
        assert (await one.draw(want=101)).ms == MINUTE_MS

    @pytest.mark.parametrize("back_ms", [1, SECOND_MS, 30 * SECOND_MS, MINUTE_MS, 2 * MINUTE_MS, DAY_MS])
    async def test_a_clock_that_goes_back_loses_nothing_and_holds_nothing_longer_than_a_span(
        self, one: Sidecar, two: Sidecar, clock: Virtual, back_ms: int
    ) -> None:
        await one.draw(want=20)
        clock.passes(29.5 * SECOND_MS)
        await one.draw(want=30)
        clock.passes(-back_ms)
        assert (await one.draw(want=100)).granted == 50
        assert (await one.draw(give_back=60)).used == 40, "what it drew later it drew now, and is the newest"
        assert (await two.draw(give_back=60)).used == 40
        clock.passes(MINUTE_MS - SECOND_MS)
        assert (await one.used()) <= 40
        clock.passes(2 * SECOND_MS)
        assert await one.used() == 0
        assert (await two.draw(want=101)).granted == 100

    async def test_a_clock_that_jumps_on_empties_the_window(self, one: Sidecar, clock: Virtual) -> None:
        await one.draw(want=100)
        clock.passes(400 * DAY_MS)
        assert await one.draw(want=100) == Part(100, 100, 0)
        clock.passes(-400 * DAY_MS)
        assert (await one.draw(want=100)).granted == 0
        clock.passes(MINUTE_MS + SECOND_MS)
        assert (await one.draw(want=100)).granted == 100

    # --- what is given back -------------------------------------------------------------------------------------------

    async def test_nobody_gives_back_what_another_drew(self, one: Sidecar, two: Sidecar) -> None:
        await one.draw(want=50)
        await two.draw(want=10)
        assert (await two.draw(give_back=50)).used == 50
        assert (await two.draw(give_back=50)).used == 50
        assert (await one.draw(give_back=20)).used == 30

    async def test_what_is_given_back_twice_comes_off_what_it_drew_and_no_more(
        self, one: Sidecar, two: Sidecar
    ) -> None:
        await two.draw(want=10)
        await one.draw(want=50)
        assert [(await one.draw(give_back=30)).used for _ in range(3)] == [30, 10, 10]

    async def test_the_newest_goes_back_first(self, one: Sidecar, clock: Virtual) -> None:
        for _ in range(3):
            await one.draw(want=10)
            clock.passes(SECOND_MS)
        assert (await one.draw(give_back=15)).used == 15
        clock.passes(MINUTE_MS - 2 * SECOND_MS)
        assert await one.used() == 5, "those of the first part are gone, of the second half are left"

    async def test_what_left_the_window_changes_nothing(self, one: Sidecar, clock: Virtual) -> None:
        await one.draw(want=80)
        clock.passes(MINUTE_MS + SECOND_MS)
        await one.draw(want=30)
        assert (await one.draw(give_back=30)).used == 0
        assert (await one.draw(give_back=80)).used == 0
        assert (await one.draw(want=101)).granted == 100

    async def test_it_goes_back_where_it_was_drawn(self, one: Sidecar, clock: Virtual) -> None:
        times = []
        for _ in range(5):
            times.append(clock.now_us)
            await one.draw(want=10)
            clock.passes(SECOND_MS)
        assert (await one.draw(give_back=10, give_back_us=times[3] + 999_999)).used == 40
        assert (await one.draw(give_back=15, give_back_us=times[2])).used == 25, (
            "and of the older ones, the newest first"
        )
        assert (await one.draw(give_back=15, give_back_us=times[2])).used == 20 - 5 - 5, "and none that are newer"
        assert (await one.draw(give_back=99, give_back_us=times[0] - 1)).used == 10
        assert (await one.draw(give_back=4, give_back_us=clock.now_us + 10**9)).used == 6, "what is to come is now"
        clock.passes(MINUTE_MS - SECOND_MS)
        assert (clock.ms, await one.used()) == (64_000, 6), "all of them were drawn at 4 s"
        clock.passes(SECOND_MS)
        assert await one.used() == 0

    async def test_what_was_drawn_before_the_window_is_not_given_back(self, one: Sidecar, clock: Virtual) -> None:
        before_us = clock.now_us
        await one.draw(want=80)
        clock.passes(MINUTE_MS + SECOND_MS)
        await one.draw(want=30)
        assert (await one.draw(give_back=80, give_back_us=before_us)).used == 30
        assert (await one.draw(give_back=80, give_back_us=1)).used == 30

    async def test_what_is_held_can_be_drawn_anew(self, one: Sidecar, clock: Virtual) -> None:
        """Given back and wanted in one call: it is of now, and in use for a whole span."""
        await one.draw(want=100)
        clock.passes(30 * SECOND_MS)
        assert await one.draw(give_back=40, want=40) == Part(40, 100, 0)
        clock.passes(31 * SECOND_MS)
        assert await one.used() == 40

    async def test_what_is_in_use_can_be_given_back_though_other_windows_were_drawn_on(
        self, one: Sidecar, clock: Virtual
    ) -> None:
        await one.draw(want=50)
        clock.passes(MINUTE_MS)
        await one.draw(100, DAY_MS, want=10)
        assert (await one.draw(give_back=20)).used == 30
        assert (await one.draw(100, DAY_MS, give_back=20)).used == 0

    async def test_who_was_not_here_for_long_has_nothing_to_give_back(
        self, one: Sidecar, two: Sidecar, clock: Virtual
    ) -> None:
        await one.draw(100, DAY_MS, want=50)
        clock.passes(DRAWER_TTL_MS - 1)
        assert (await one.draw(100, DAY_MS, give_back=10)).used == 40
        clock.passes(DRAWER_TTL_MS)
        assert (await two.draw(100, DAY_MS, want=10)).used == 50
        assert (await one.draw(100, DAY_MS, give_back=40)).used == 50

    # --- several windows ----------------------------------------------------------------------------------------------

    async def test_each_window_grants_by_itself(self, one: Sidecar) -> None:
        windows = (
            Window(Unit.TOKENS, MINUTE_MS, 50, want=60),
            Window(Unit.TOKENS, DAY_MS, 1000, want=60),
            Window(Unit.REQUESTS, MINUTE_MS, 3, want=5, must=1),
            Window(Unit.REQUESTS, DAY_MS, 0, want=5),
        )
        found = await one.draws(*windows, slots_limit=4, slots_want=9)
        assert [(part.granted, part.used) for part in found.parts] == [(50, 50), (60, 60), (2, 3), (0, 0)]
        assert (found.slots, found.slots_in_use) == (4, 4)

    async def test_a_window_is_known_by_what_it_counts_and_how_long(self, one: Sidecar) -> None:
        """And not by its place: a policy that is loaded anew may have more of them, or fewer."""
        minute, day = (Window(Unit.TOKENS, span_ms, 100, want=10) for span_ms in (MINUTE_MS, DAY_MS))
        requests = replace(minute, unit=Unit.REQUESTS, want=1)
        await one.draws(minute, day)
        assert [part.used for part in (await one.draws(requests, day, minute)).parts] == [1, 20, 20]
        assert [part.used for part in (await one.draws(day)).parts] == [30]
        back = [replace(window, want=0, give_back=100) for window in (minute, requests, day)]
        assert [part.used for part in (await one.draws(*back)).parts] == [0, 0, 0]

    @pytest.mark.parametrize(
        "windows",
        [
            [(Unit.TOKENS, MINUTE_MS)] * 2,
            [(Unit.TOKENS, MINUTE_MS), (Unit.REQUESTS, MINUTE_MS), (Unit.TOKENS, MINUTE_MS)],
            [(Unit.TOKENS, MINUTE_MS + i) for i in range(MAX_WINDOWS + 1)],
            [(Unit.TOKENS, MINUTE_MS + i) for i in range(300)],
            [(Unit.TOKENS, 0)],
            [(Unit.TOKENS, -5)],
            [(Unit.TOKENS, MIN_SPAN_MS - 1)],
            [(Unit.TOKENS, DAY_MS), (Unit.TOKENS, MAX_SPAN_MS + 1)],
            [(Unit.TOKENS, 1 << 70)],
        ],
        ids=["twice", "twice apart", "five", "300", "no span", "less", "short", "long", "endless"],
    )
    async def test_windows_that_cannot_be_are_illegal_and_nothing_is_done(
        self, store: Store, one: Sidecar, windows: Sequence[tuple[Unit, int]]
    ) -> None:
        some = tuple(Window(unit, span_ms, 100, want=10) for unit, span_ms in windows)
        (reply,) = await store.call([Draw(key=KEY, by="one", windows=some, slots_limit=1, slots_want=1)])
        assert (reply.verdict, reply.record, drawn(reply)) == (Verdict.ILLEGAL, b"", Drawn())
        assert await one.used() == 0 and await one.slots(9) == (0, 0)

    @pytest.mark.parametrize("span_ms", [MIN_SPAN_MS, MAX_SPAN_MS])
    async def test_the_shortest_and_the_longest_span(self, one: Sidecar, clock: Virtual, span_ms: int) -> None:
        await one.draw(100, span_ms, want=100)
        part = await one.draw(100, span_ms, want=1)
        assert (part.granted, part.used) == (0, 100) and span_ms < part.ms <= span_ms * 61 // 60
        clock.passes(part.ms)
        assert await one.draw(100, span_ms, want=100) == Part(100, 100, 0)

    @pytest.mark.parametrize("key", ["", "gold", "node:chat/a:80", "gold/acme", "budget:/x", "budget:gold/\ud800"])
    async def test_a_key_that_is_none_is_refused_here(self, store: Store, key: str) -> None:
        with pytest.raises(ValueError):
            await store.call([Draw(key=key, by="one", windows=())])

    # --- much ---------------------------------------------------------------------------------------------------------

    async def test_a_part_holds_so_much_and_no_more(self, one: Sidecar, two: Sidecar, clock: Virtual) -> None:
        for by in (one, two):
            for _ in range(100):
                part = await by.draw(0, must=1_000_000_000_000)
        assert part == Part(0, MOST_DRAWN, 0)
        clock.passes(SECOND_MS)
        assert (await one.draw(1 << 70, want=1 << 70)) == Part(0, MOST_DRAWN, MINUTE_MS)
        assert (await one.draw(1 << 70, must=1 << 70)).used == 2 * MOST_DRAWN
        assert [(await one.draw(give_back=1 << 70)).used for _ in range(2)] == [MOST_DRAWN, 0]
        for _ in range(SPAN_PARTS):
            clock.passes(SECOND_MS)
            part = await one.draw(must=MOST_DRAWN - 1)
        assert part.used == SPAN_PARTS * (MOST_DRAWN - 1)
        clock.passes(-5 * SECOND_MS)
        assert await one.used() == (SPAN_PARTS - 5) * (MOST_DRAWN - 1) + 1, "of now there is no more than a part holds"

    @pytest.mark.parametrize("number", [-1, -(1 << 70)])
    async def test_less_than_nothing_is_nothing(self, one: Sidecar, number: int) -> None:
        await one.draw(want=50)
        part = await one.draw(must=number, want=number, give_back=number, least=number, give_back_us=number)
        assert part == Part(0, 50, 0)
        assert await one.draw(number, want=10) == Part(0, 50, MINUTE_MS)
        assert await one.slots(number, number, number) == (0, 0)

    # --- slots --------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("used", "want", "slots"),
        [(0, 0, 0), (0, 3, 3), (0, 6, 6), (0, 7, 6), (3, 0, 3), (3, 5, 5), (3, 9, 6), (6, 6, 6), (8, 9, 8), (8, 0, 8)],
    )
    async def test_slots_are_what_is_used_and_what_there_is_room_for(
        self, one: Sidecar, two: Sidecar, used: int, want: int, slots: int
    ) -> None:
        assert await two.slots(10, want=4) == (4, 4)
        assert await one.slots(10, used, want) == (slots, 4 + slots)
        assert await one.slots(10, used, want) == (slots, 4 + slots), "each time anew, and no more than that"
        assert await one.slots(10) == (0, 4)

    async def test_slots_of_a_lowered_limit_are_given_up_when_they_are_not_used(
        self, one: Sidecar, two: Sidecar
    ) -> None:
        await one.slots(10, want=10)
        assert await two.slots(4, want=4) == (0, 10)
        assert await one.slots(4, used=6, want=10) == (6, 6)
        assert await one.slots(4, used=1, want=10) == (4, 4)
        assert await one.slots(0, used=1, want=10) == (1, 1)
        assert await two.slots(20, want=100) == (19, 20)

    async def test_a_dead_sidecar_s_slots_come_back(self, one: Sidecar, two: Sidecar, clock: Virtual) -> None:
        three = Sidecar(one.store, "three")
        await three.draw(1, DAY_MS)
        assert await one.slots(10, used=6) == (6, 6)
        assert await three.slots(10, used=1) == (1, 7)
        clock.passes(MEMBER_TTL_MS - 1)
        assert await two.slots(10, want=9) == (3, 10)
        clock.passes(1)
        assert await two.slots(10, want=9) == (9, 9)
        assert await one.slots(10, used=6) == (6, 15), "it was not dead"

    async def test_who_comes_back_has_no_slots_of_before(self, one: Sidecar, two: Sidecar, clock: Virtual) -> None:
        await one.draw(1, DAY_MS)
        await one.slots(10, used=6)
        clock.passes(MEMBER_TTL_MS / 2)
        await two.slots(10, used=4)
        clock.passes(MEMBER_TTL_MS / 2)
        assert await one.slots(10, want=9) == (6, 10), "and the others have theirs"

    async def test_slots_last_as_long_as_they_are_told_of(self, one: Sidecar, two: Sidecar, clock: Virtual) -> None:
        for _ in range(5):
            await one.slots(10, used=10)
            clock.passes(MEMBER_TTL_MS - 1)
            assert await two.slots(10, want=1) == (0, 10)

    @pytest.mark.parametrize("back_ms", [1, MEMBER_TTL_MS, DAY_MS])
    async def test_slots_of_the_dead_outlive_no_clock_that_goes_back(
        self, one: Sidecar, two: Sidecar, clock: Virtual, back_ms: int
    ) -> None:
        await one.draw(1, DAY_MS)
        await one.slots(10, used=10)
        clock.passes(-back_ms)
        assert await two.slots(10, want=1) == (0, 10)
        clock.passes(MEMBER_TTL_MS)
        assert await two.slots(10, want=1) == (1, 1)

    # --- a budget's life ----------------------------------------------------------------------------------------------

    async def test_a_budget_is_born_once_and_again_when_nothing_of_it_is_in_use(
        self, one: Sidecar, two: Sidecar, clock: Virtual
    ) -> None:
        minute = Window(Unit.TOKENS, MINUTE_MS, 100, want=1)
        day = replace(minute, span_ms=DAY_MS)
        born_us = clock.now_us
        assert (await one.draws(minute)).born_us == born_us
        clock.passes(MINUTE_MS)
        assert (await two.draws(minute)).born_us == born_us
        assert (await two.draws(day)).born_us == born_us
        clock.passes(DAY_MS)
        assert (await two.draws(minute)).born_us == born_us, "as long as its longest window"
        clock.passes(DAY_MS * 61 // 60 + MEMBER_TTL_MS - 1)
        assert (await one.draws(minute)).born_us == born_us
        clock.passes(DAY_MS * 61 // 60 + MEMBER_TTL_MS)
        found = await one.draws(minute)
        assert (found.born_us, found.parts) == (clock.now_us, (Part(1, 1, 0),))

    async def test_it_says_when_this_sidecar_drew_before(self, one: Sidecar, two: Sidecar, clock: Virtual) -> None:
        window = Window(Unit.TOKENS, DAY_MS, 100, want=1)
        assert (await one.draws(window)).before_us == 0
        first_us = clock.now_us // 1000 * 1000
        clock.passes(1500)
        assert (await two.draws(window)).before_us == 0
        assert (await one.draws(window)).before_us == first_us
        clock.passes(-1000)
        assert (await one.draws(window)).before_us == clock.now_us // 1000 * 1000, "never later than now"
        clock.passes(DRAWER_TTL_MS)
        assert (await one.draws(window)).before_us == 0

    async def test_answers_have_the_time(self, store: Store, clock: Virtual) -> None:
        clock.passes(0.123)
        call = Draw(key=KEY, by="one", windows=(Window(Unit.TOKENS, MINUTE_MS, 1),))
        for reply in await store.call([call, replace(call, windows=call.windows * 2)]):
            assert (reply.now_us, reply.seq, reply.ms, reply.contended) == (clock.now_us, 0, 0, False)

    async def test_draws_of_one_list_are_done_in_order(self, store: Store) -> None:
        steps: list[dict[str, Any]] = [{"want": 60}, {"want": 60}, {"give_back": 30, "by": "two"}, {"give_back": 30}]
        steps += [{"want": 60, "by": "two"}]
        calls: list[Call] = []
        for step in steps:
            by = step.pop("by", "one")
            calls.append(Draw(key=KEY, by=by, windows=(Window(Unit.TOKENS, MINUTE_MS, 100, **step),)))
        assert [drawn(reply).parts[0].used for reply in await store.call(calls)] == [60, 100, 100, 70, 100]
