"""Whether an engine that has work gets anywhere with it: judged by what it says of itself, poll after poll.

An engine's core may hang, sleep or be paused behind a front that goes on answering. Its pages then say the same again
and again: so many requests, and not a token more.

1. Silence is added up between readings, and no step counts for more than `MOST_INTERVALS` intervals: a clock that
   jumps, a machine that stood still or pages that could not be read are no silence of the engine's.
2. Any number that moves is progress, up or down: an engine that started anew counts from 0.
3. An engine without work is well. What it is worth when it has some, a request finds out. The time before a reading
   that first finds work counts for nothing: the work may have come just now.
4. Who was told of a silence is told again after as long once more: what it did of it may have been undone.
"""

from typing import Final

from sidecar.kernel.count import counted

MOST_INTERVALS: Final = 2.0
"""A poll may be one late; what is later was nobody's silence but ours."""

ASLEEP_READINGS: Final = 2
"""In a row: one may be a page that was made while it woke."""


class Progress:
    """One engine. `moved_at`: when it last got anywhere, as far as is known; -infinity while it never did.

    `gave_at`: when it last gave somebody something, by the first of its numbers; requests that come and go may move the
    others.
    """

    __slots__ = ("_asleep", "_mark", "_quiet_s", "_read_at", "_stalled_s", "_told_s", "_worked", "gave_at", "moved_at")

    def __init__(self, stalled_s: float) -> None:
        self._stalled_s = stalled_s
        self._mark: tuple[float, ...] = ()
        self._read_at: float | None = None
        self._quiet_s = 0.0
        self._told_s = 0.0
        self._asleep = 0
        self._worked = False  # the last reading found work
        self.moved_at = float("-inf")
        self.gave_at = float("-inf")

    @property
    def hangs(self) -> bool:
        """Whether what it last said is that it sleeps, or that it got nowhere for so long."""
        return self._asleep >= ASLEEP_READINGS or self._quiet_s >= self._stalled_s

    def read(self, requests: int, mark: tuple[float, ...], asleep: bool, interval_s: float, now: float) -> str:
        """What a page said; what is wrong in words, "" while nothing is, or nothing new.

        `requests`: those in it, waiting ones too. `mark`: numbers of which one moves while it gets anywhere, the
        first with what it gives; empty: it tells none.
        """
        since_s = 0.0 if self._read_at is None else min(max(0.0, now - self._read_at), MOST_INTERVALS * interval_s)
        self._read_at = now
        worked = self._worked
        self._worked = requests > 0
        if asleep:
            self._asleep += 1
            if self._asleep == ASLEEP_READINGS or (self._asleep > ASLEEP_READINGS and self._due(since_s)):
                self._told_s = 0.0
                return "the engine says that it sleeps"
            return ""
        self._asleep = 0
        if mark != self._mark or not mark:
            if mark and self._mark:
                self.moved_at = now
                if mark[0] != self._mark[0]:
                    self.gave_at = now
            self._mark = mark
            self._quiet_s = self._told_s = 0.0
            return ""
        if not worked or requests <= 0:
            self._quiet_s = self._told_s = 0.0
            return ""
        before_s = self._quiet_s
        self._quiet_s += since_s
        if self._quiet_s < self._stalled_s or (before_s >= self._stalled_s and not self._due(since_s)):
            return ""
        self._told_s = 0.0
        return (
            f"the engine says that it has {counted(requests, 'request')}, and none got a token in {self._quiet_s:.3g} s"
        )

    def unread(self) -> None:
        """A page that could not be read: the time until the next one says nothing."""
        self._read_at = None

    def forget(self) -> None:
        """Too many pages could not be read: of its work nothing is known any more. One that slept sleeps still."""
        self._mark = ()
        self._quiet_s = self._told_s = 0.0

    def _due(self, since_s: float) -> bool:
        self._told_s += since_s
        return self._told_s >= self._stalled_s
