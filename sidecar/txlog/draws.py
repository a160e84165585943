"""Tenants' budgets of the log's server inside this process: rule 11 of `store` in Python, as functions.lua has it.

A window's parts are numbers in a row, all sidecars' and beside them each sidecar's own, of which the last is the part
of now: time goes by as the row moves on. So what left the window is gone without anybody who looks after it, and a
clock that went back is a row that moves back: what is ahead of now is added to now's part, and is in use for a whole
span from then on. It was drawn, and is lost to nobody.

1. What a sidecar drew says no more than what it may give back. Where it is forgotten, what it drew stays in use.
2. Budgets are bounded in number (`MAX_BUDGETS`). Of more, the one that was drawn on longest ago begins anew when it is
   drawn on again: at most its limit more than it should have had.
"""

from array import array
from itertools import islice
from typing import Final

from sidecar.txlog.codec import budget_shard
from sidecar.txlog.store import (
    DRAWER_TTL_MS,
    MAX_SPAN_MS,
    MAX_WINDOWS,
    MEMBER_TTL_MS,
    MIN_SPAN_MS,
    MOST_DRAWN,
    PART,
    PURGE,
    SLOTS,
    SPAN_PARTS,
    Draw,
    Reply,
    Unit,
    Verdict,
    Window,
    cut,
)

PARTS: Final = SPAN_PARTS + 1
"""The part that begins a span ago is in use as long as any of it is."""
MAX_BUDGETS: Final = 1 << 14
"""Of some 3.5 KB with a minute's and a day's window: 57 MB."""

_Id = tuple[Unit, int]


class _Parts:
    """What was drawn in each part, the oldest first; `now` numbers the last one."""

    __slots__ = ("drawn", "now")

    def __init__(self, now: int) -> None:
        self.now = now
        self.drawn = _zeros(PARTS)

    def turn(self, now: int) -> None:
        """Another part is now's."""
        by, self.now = now - self.now, now
        if by > 0:
            self.drawn = self.drawn[by:] + _zeros(min(by, PARTS))
        elif by < 0:
            ahead = sum(self.drawn[by:])
            self.drawn = _zeros(min(-by, PARTS)) + self.drawn[:by]
            self.drawn[-1] = min(MOST_DRAWN, self.drawn[-1] + ahead)


class _Drawer:
    """A sidecar that draws on a budget: when it last did (`seen_ms` goes back with the clock), its slots, and what it
    drew of each window."""

    __slots__ = ("drawn", "drew_ms", "seen_ms", "slots")

    def __init__(self, seen_ms: int) -> None:
        self.seen_ms = seen_ms
        self.drew_ms = 0
        self.slots = 0
        self.drawn: dict[_Id, _Parts] = {}

    def forget(self, now_ms: int) -> None:
        """Of windows that a policy has no more: nothing is in use, and nothing can be given back."""
        for id_ in [id_ for id_, it in self.drawn.items() if it.now <= now_ms * SPAN_PARTS // id_[1] - PARTS]:
            del self.drawn[id_]


class _Budget:
    """One tenant's."""

    __slots__ = ("at_ms", "born_us", "drawers", "longest_ms", "windows")

    def __init__(self, born_us: int) -> None:
        self.windows: dict[_Id, _Parts] = {}
        self.drawers: dict[str, _Drawer] = {}
        self.born_us = born_us
        self.at_ms = 0
        self.longest_ms = 0

    def is_over(self, now_ms: int) -> bool:
        """Whether nothing of it is in use."""
        return now_ms - self.at_ms >= -(-self.longest_ms * PARTS // SPAN_PARTS) + MEMBER_TTL_MS

    def seen(self, now_ms: int) -> None:
        """It is now, for all who were here; who was not here for long has no slots, or is gone."""
        for by, drawer in list(self.drawers.items()):
            drawer.seen_ms = min(drawer.seen_ms, now_ms)
            if now_ms - drawer.seen_ms >= MEMBER_TTL_MS:
                drawer.slots = 0
            if now_ms - drawer.seen_ms >= DRAWER_TTL_MS:
                del self.drawers[by]
        self.at_ms = now_ms


class Budgets:
    """All tenants' budgets, those first that were not drawn on for longest."""

    __slots__ = ("_budgets",)

    def __init__(self) -> None:
        self._budgets: dict[str, _Budget] = {}

    def __len__(self) -> int:
        return len(self._budgets)

    def draw(self, call: Draw, now_us: int) -> Reply:
        """One call, at the server's time. ValueError: the key is none of a budget."""
        budget_shard(call.key)  # a key that is none is none here, too
        if not _is_legal(call.windows):
            return Reply(Verdict.ILLEGAL, now_us)
        now_ms = now_us // 1000
        found = self._budgets.pop(call.key, None)
        budget = _Budget(now_us) if found is None or found.is_over(now_ms) else found
        self._budgets[call.key] = budget
        budget.seen(now_ms)
        before = budget.drawers.pop(call.by, None)
        others = sum(drawer.slots for drawer in budget.drawers.values())
        slots = max(cut(call.slots_used), min(cut(call.slots_want), cut(call.slots_limit) - others))
        before_us = 0 if before is None else min(before.drew_ms, now_ms) * 1000
        mine = budget.drawers[call.by] = _Drawer(now_ms) if before is None else before
        mine.seen_ms, mine.drew_ms, mine.slots = now_ms, now_ms, slots
        record = SLOTS.pack(slots, others + slots, budget.born_us, before_us)
        for window in call.windows:
            id_ = (window.unit, window.span_ms)
            budget.longest_ms = max(budget.longest_ms, window.span_ms)
            now = now_ms * SPAN_PARTS // window.span_ms
            parts = budget.windows.setdefault(id_, _Parts(now))
            own = mine.drawn.setdefault(id_, _Parts(now))
            parts.turn(now)
            own.turn(now)
            record += _draw(window, parts, own, now_ms)
        mine.forget(now_ms)
        self._forget(now_ms)
        return Reply(Verdict.OK, now_us, record)

    def _forget(self, now_ms: int) -> None:
        """Forget a few of which nothing is in use, of those that were drawn on longest ago."""
        for key in list(islice(self._budgets, PURGE)):
            if self._budgets[key].is_over(now_ms):
                del self._budgets[key]
        while len(self._budgets) > MAX_BUDGETS:
            del self._budgets[next(iter(self._budgets))]


def _draw(window: Window, parts: _Parts, own: _Parts, now_ms: int) -> bytes:
    """One window. What it gave, as a reply says it."""
    drawn = parts.drawn
    place = PARTS - 1
    if window.give_back_us > 0:
        place += min(0, window.give_back_us // 1000 * SPAN_PARTS // window.span_ms - parts.now)
    back = cut(window.give_back)
    while back and place >= 0:
        off = min(back, own.drawn[place])
        own.drawn[place] -= off
        drawn[place] -= min(off, drawn[place])
        back -= off
        place -= 1
    limit, want = cut(window.limit), cut(window.want)
    must = min(cut(window.must), MOST_DRAWN - drawn[-1])
    room = min(limit - sum(drawn), MOST_DRAWN - drawn[-1]) - must
    granted = max(0, min(want, room)) if room >= min(cut(window.least), want) else 0
    drawn[-1] += must + granted
    own.drawn[-1] = min(MOST_DRAWN, own.drawn[-1] + must + granted)
    return PART.pack(granted, sum(drawn), _wait_ms(window.span_ms, limit, parts, want - granted, now_ms))


def _wait_ms(span_ms: int, limit: int, parts: _Parts, rest: int, now_ms: int) -> int:
    """How long until `rest` fits below the limit."""
    if not rest:
        return 0
    if rest > limit:
        return span_ms
    used = sum(parts.drawn)
    for place, drawn in enumerate(parts.drawn, 1):
        used -= drawn
        if used + rest <= limit:
            return -(-(parts.now + place) * span_ms // SPAN_PARTS) - now_ms
    raise AssertionError("an empty window has room for all that is within its limit")


def _is_legal(windows: tuple[Window, ...]) -> bool:
    distinct = {(window.unit, window.span_ms) for window in windows}
    return len(windows) == len(distinct) <= MAX_WINDOWS and all(
        MIN_SPAN_MS <= window.span_ms <= MAX_SPAN_MS for window in windows
    )


def _zeros(count: int) -> "array[int]":
    return array("q", bytes(8 * count))
