"""One sliding window of one budget, as far as this sidecar has a part in it: what it holds, used, owes, and knows.

```
the server grants a slice -> held --reserve--> used here --settle: less was needed--> back, told with the next draw
                             (none held) reserve on credit -> debt, told with the next draw, always recorded
```

1. What is held was granted and is counted by the server already; using it changes nothing there. It is at most about a
   second old: what was not used in that time goes back, or is drawn anew, or the window would be exceeded by it.
2. Credit. A request that finds too little held is admitted all the same while what is owed stays within this sidecar's
   part of the room, room / members: the others may do so at the same time, and together they stay within the room. The
   room is the last reply's, less what it shrinks by until now at twice the pace seen. A reply is believed for
   `FRESH_S`.
3. Of a window that was not asked about for longer than that only so much is known: when it was full, until when. Else
   one request goes on credit, or several that are together at most `COLD_RATIO` of the limit over all sidecars; with no
   other sidecar as much as was not used here. The debt is told at once, and the reply is fresh.
4. Alone (the log cannot be reached): what was used here in the span stays within limit / members; and what is used from
   the loss on within this sidecar's part of the room that there is, if what the others had used then leaves the window
   evenly. At least one request per span goes, or small limits would stop a tenant.
5. What was used here is kept in sixtieths of the span, the oldest of which counts whole until it has left.
"""

from typing import Final

BUCKETS: Final = 60
FRESH_S: Final = 2.0
COLD_RATIO: Final = 0.01
HASTE: Final = 2.0  # the others may hasten until the next reply

TOKENS: Final = 0
REQUESTS: Final = 1
UNIT_WORDS: Final = ("tokens", "requests")


class Meter:
    """A window's part here. `unit` TOKENS or REQUESTS; amounts are whole numbers of it, times monotonic seconds."""

    __slots__ = (
        "_own",
        "_own_from",
        "_width_s",
        "answered_at",
        "back",
        "back_at",
        "debt",
        "held",
        "least",
        "limit",
        "loss",
        "others",
        "own",
        "pace",
        "retry_at",
        "since_loss",
        "span_s",
        "told",
        "unit",
        "used",
        "word",
    )

    def __init__(self, unit: int, span_s: float, limit: int, word: str) -> None:
        self.unit = unit
        self.span_s = span_s
        self.limit = limit
        self.word = word
        """`tokens per minute` and so on."""
        self.held = 0
        self.debt = 0
        self.told = 0
        """The debt that a draw under way tells."""
        self.back = 0
        """What a request reserved and did not need, to be told; `back_at` is when the earliest of it was reserved."""
        self.back_at = 0.0
        self.least = 0
        """The smallest that was refused here since the last draw, 0: nothing was."""
        self.used = 0
        """By all sidecars in the window, at `answered_at`."""
        self.answered_at = -1e18
        self.pace = 0.0
        """By how much per second `used` grew between replies."""
        self.retry_at = 0.0
        """There is no room before that, by the last reply."""
        self.own = 0
        """Used here in the window, as of the last `advance`."""
        self._own: dict[int, int] = {}
        self._own_from = 0
        self._width_s = span_s / BUCKETS
        self.loss = 0
        """The number of the loss of the log that `since_loss` and `others` are about."""
        self.since_loss = 0
        self.others = 0

    def room(self, now: float) -> float:
        """What is left of the limit over all sidecars, as far as known; what we owe is taken off."""
        age_s = now - self.answered_at
        if age_s >= self.span_s:
            self.advance(now)
            return float(self.limit - self.own)
        room = self.limit - self.used - self.debt - self.told
        if self.pace > 0.0:
            room -= int(HASTE * self.pace * min(age_s, FRESH_S))
        return float(room)

    def fits(self, amount: int, now: float, members: int) -> bool:
        """Whether `amount` may be used now, by what is held or on credit (rules 1-3)."""
        need = amount - self.held
        if need <= 0:
            return True
        if amount > self.limit:
            return False
        owed = self.debt + self.told
        age_s = now - self.answered_at
        if age_s <= FRESH_S:
            room = self.limit - self.used
            if self.pace > 0.0:
                room -= int(HASTE * self.pace * age_s)
            return (owed + need) * members <= room
        if now < self.retry_at:
            return False
        if owed == 0:
            return True
        if members == 1:
            self.advance(now)
            return self.own + amount <= self.limit
        return (owed + need) * members <= COLD_RATIO * self.limit

    def fits_alone(self, amount: int, now: float, members: int, loss: int, lost_at: float) -> bool:
        """Whether `amount` may be used now that the log is away since `lost_at` (rule 4)."""
        if amount > self.limit:
            return False
        if self.loss != loss:
            self.lost(loss, now)
        self.advance(now)
        own = self.own
        if own == 0:
            return True
        if (own + amount) * members > self.limit:
            return False
        gone_ratio = (now - lost_at) / self.span_s
        if gone_ratio >= 1.0:
            return True
        since = self.since_loss
        room = self.limit - self.others * (1.0 - gone_ratio) - (own - since)
        return (since + amount) * members <= room

    def lost(self, loss: int, now: float) -> None:
        """The log went away: what the others had used is what it said last, and decays from then on."""
        self.loss = loss
        self.since_loss = 0
        self.advance(now)
        age_s = now - self.answered_at
        others = max(0, self.used - self.own) if age_s < self.span_s else 0
        self.others = int(others * (1.0 - age_s / self.span_s)) if others else 0

    def take(self, amount: int, now: float) -> int:
        """Use `amount`; how much of it went on credit."""
        bucket = int(now / self._width_s)
        own = self._own
        if bucket in own:
            own[bucket] += amount
        else:
            self.advance(now)
            own[bucket] = amount
        self.own += amount
        self.since_loss += amount
        if amount <= self.held:
            self.held -= amount
            return 0
        credit = amount - self.held
        self.held = 0
        self.debt += credit
        return credit

    def give(self, amount: int, at: float, now: float) -> None:
        """Of what was taken at `at`, this was not needed."""
        bucket = int(at / self._width_s)
        own = self._own
        kept = own.get(bucket, 0)
        if kept:
            less = min(kept, amount)
            own[bucket] = kept - less
            self.own -= less
        self.since_loss = max(0, self.since_loss - amount)
        settled = min(self.debt, amount)
        self.debt -= settled
        amount -= settled
        if not amount:
            return
        if now - at < self._width_s:
            self.held += amount  # as good as just drawn
        elif now - at < self.span_s:
            self.back_at = min(self.back_at, at) if self.back else at
            self.back += amount

    def advance(self, now: float) -> None:
        """Drops what has left the window; `own` is right for `now` afterwards."""
        oldest = int(now / self._width_s) - BUCKETS
        if oldest <= self._own_from:
            return
        own = self._own
        gone = [bucket for bucket in own if bucket < oldest]
        for bucket in gone:
            self.own -= own.pop(bucket)
        self._own_from = min(own) if own else oldest
