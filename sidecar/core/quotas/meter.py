"""One sliding window of one budget, as far as this sidecar has a part in it: what it holds, used, owes, and knows.

```
the server grants a slice -> held --reserve--> used here --settle: less was needed--> back, told with the next draws
                             (none held) reserve on credit -> debt, told with the next draw, always recorded
```

1. What is held was granted and is counted by the server already; using it changes nothing there. What is held for long
   would be used in a later window than the server counts it in, so it goes back or is drawn anew (`quota`, rule 3).
2. Credit. A request that finds too little held is admitted all the same while what is owed stays within this sidecar's
   part of the room, room / members: the others may do so at the same time, and together they stay within the room. The
   room is the last reply's, less what it shrinks by until now at twice the pace seen. A reply is believed for
   `FRESH_S`.
3. Of a window that was not asked about for longer than that little is known. With no other sidecar, all: what was used
   here. Else one request goes on credit, or several that are together at most `COLD_RATIO` of the limit over all
   sidecars, unless the window was more than half used when it was asked about within its span: its last half is for
   those who ask. The debt is told at once, and the reply is fresh. Who went beyond the limit so, by `OVERSHOT`, is
   known for somebody who could do it in every window, on every sidecar at once: for two spans there is no such credit
   but the small one, and twice as long each time, up to `MOST_SPANS`, until that long went well.
4. Alone (the log cannot be reached): what was used here in the span stays within limit / members; and what is used from
   the loss on within this sidecar's part of the room that there is, if what the others had used then leaves the window
   no sooner than what was used here, nor sooner than evenly. At least one request per span goes, or small limits would
   stop a tenant.
5. What was used here is kept in sixtieths of the span, the oldest of which counts whole until it has left. What a
   request did not need is given back of the sixtieth in which it was reserved, one of them at a time: given back of
   now, it would leave the window later than what it is taken off, and the window would be exceeded meanwhile.
"""

from typing import Final

BUCKETS: Final = 60
FRESH_S: Final = 2.0
COLD_RATIO: Final = 0.01
OVERSHOT: Final = 1.25
"""Times the limit: more than estimates that were too low make of it."""
FIRST_SPANS: Final = 2.0
MOST_SPANS: Final = 60.0
HASTE: Final = 2.0
"""By so much the others may hasten until the next reply."""
LEAST_AGE_S: Final = 0.02
PACE_GAIN: Final = 0.5
TOLD_S: Final = 0.1
"""By when debt has been told, mostly: what is given back was drawn by then."""
NEVER: Final = -1e18

TOKENS: Final = 0
REQUESTS: Final = 1


class Meter:
    """A window's part here. `unit` TOKENS or REQUESTS; amounts are whole numbers of it, times monotonic seconds."""

    __slots__ = (
        "_backs",
        "_bucket",
        "_current",
        "_edge",
        "_own",
        "_width_s",
        "answered_at",
        "back",
        "before",
        "debt",
        "flow",
        "held",
        "lacked",
        "least",
        "limit",
        "loss",
        "low",
        "mark",
        "others",
        "own",
        "pace",
        "refused",
        "retry_at",
        "since_loss",
        "span_s",
        "spare",
        "taken",
        "told",
        "unit",
        "used",
        "wary_s",
        "wary_until",
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
        """What requests reserved and did not need, to be told."""
        self.spare = 0
        """What was held in vain, to be told."""
        self.least = 0
        """The smallest that was refused here since the last draw, 0: nothing was."""
        self.refused = 0
        """Requests that found too little, here, so far."""
        self.used = 0
        """By all sidecars in the window, at `answered_at`."""
        self.answered_at = NEVER
        self.pace = 0.0
        """By how much per second others' part of `used` grew between replies."""
        self.retry_at = 0.0
        """There is no room before that for `lacked`: the smallest that was refused when the server was last asked for
        as much, or else a slice. Good until there is."""
        self.lacked = 0
        self.wary_until = NEVER
        """There is no credit without a reply before that; and for how long that was."""
        self.wary_s = 0.0
        self.taken = 0
        """Used here so far; `mark`: at the last check; `flow`: per second between the last two."""
        self.mark = 0
        self.flow = 0.0
        self.low = 0
        """What is held shall not fall below this."""
        self.own = 0
        """Used here in the window, as of the last `advance`."""
        self.loss = 0
        """The number of the loss of the log that `since_loss` and `others` are about."""
        self.since_loss = 0
        self.others = 0
        """Used by the others then; `before`: here."""
        self.before = 0
        self._backs: dict[int, int] = {}
        self._own: dict[int, int] = {}
        """Of sixtieths that are over; `_current`: of the one that ends at `_edge`."""
        self._width_s = span_s / BUCKETS
        self._bucket = 0
        self._current = 0
        self._edge = 0.0

    @property
    def settled(self) -> bool:
        """Whether the server knows all."""
        return not (self.held or self.debt or self.told or self.back or self.spare)

    def room(self, now: float) -> int:
        """What is left of the limit over all sidecars, as far as known; may be negative."""
        age_s = now - self.answered_at
        if age_s >= self.span_s:
            self.advance(now)
            return self.limit - self.own
        room = self.limit - self.used - self.debt - self.told
        if self.pace > 0.0:
            room -= int(HASTE * self.pace * min(age_s, FRESH_S))
        return room

    def is_scarce(self, now: float) -> bool:
        """Whether more than half of it was used, as far as is known of this span."""
        return 2 * self.used > self.limit and now - self.answered_at < self.span_s

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
        if members == 1:
            self.advance(now)
            return self.own + amount <= self.limit
        if self.is_scarce(now):
            return False
        if owed == 0 and now >= self.wary_until:
            return True
        return (owed + need) * members <= COLD_RATIO * self.limit

    def fits_alone(self, amount: int, now: float, members: int, loss: int, lost_at: float) -> bool:
        """Whether `amount` may be used now that the log is away since `lost_at` (rule 4)."""
        if amount > self.limit:
            return False
        if self.loss != loss:
            self._lose(loss, lost_at)
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
        before = max(0, own - since)
        kept_ratio = max(1.0 - gone_ratio, min(1.0, before / self.before) if self.before else 0.0)
        return (since + amount) * members <= self.limit - self.others * kept_ratio - before

    def take(self, amount: int, now: float) -> int:
        """Use `amount`; how much of it went on credit."""
        if now >= self._edge:
            self.advance(now)
        self._current += amount
        self.own += amount
        self.since_loss += amount
        self.taken += amount
        if amount <= self.held:
            self.held -= amount
            return 0
        credit = amount - self.held
        self.held = 0
        self.debt += credit
        return credit

    def give(self, amount: int, at: float, now: float) -> None:
        """Of what was taken at `at`, this was not needed. What is held then is to be looked at (`check`)."""
        bucket = int(at / self._width_s)
        if bucket >= self._bucket:
            less = min(self._current, amount)
            self._current -= less
        else:
            less = min(self._own.get(bucket, 0), amount)
            if less:
                self._own[bucket] -= less
        self.own -= less
        amount = less  # of a window that a reload added since then nothing was taken
        self.since_loss = max(0, self.since_loss - amount)
        settled = min(self.debt, amount)
        self.debt -= settled
        amount -= settled
        if not amount:
            return
        if now - at < self._width_s:
            self.held += amount  # as good as just drawn
        elif now - at < self.span_s:
            self._backs[bucket] = self._backs.get(bucket, 0) + amount
            self.back += amount

    def advance(self, now: float) -> None:
        """Drops what has left the window; `own` is right for `now` afterwards."""
        if now < self._edge:
            return
        own = self._own
        if self._current:
            own[self._bucket] = self._current
            self._current = 0
        self._bucket = int(now / self._width_s)
        self._edge = (self._bucket + 1) * self._width_s
        oldest = self._bucket - BUCKETS
        # In the order of time: the first that stays is the end.
        while own:
            bucket = next(iter(own))
            if bucket >= oldest:
                break
            self.own -= own.pop(bucket)

    # With the server.

    def check(self, elapsed_s: float) -> None:
        """A second went by: what is held beyond what was used in it is held in vain."""
        used = self.taken - self.mark
        self.mark = self.taken
        self.flow = used / elapsed_s
        spare = self.held - used
        if spare > 0:
            self.held -= spare
            self.spare += spare

    def owes(self, now: float) -> int:
        """The debt that is told now: what has left the window is nothing to it any more."""
        self.advance(now)
        self.told = min(self.debt, self.own)
        self.debt = 0
        return self.told

    def returns(self, now: float) -> tuple[int, float]:
        """How much is given back now, and by when all of that had been drawn (rule 5), 0: by now."""
        if self.spare:
            spare = self.spare
            self.spare = 0
            return spare, 0.0
        while self._backs:
            bucket = next(iter(self._backs))
            amount = self._backs.pop(bucket)
            self.back -= amount
            at = (bucket + 1) * self._width_s + TOLD_S
            if now - at < self.span_s:
                return amount, at if at < now else 0.0
        return 0, 0.0

    def answered(
        self,
        granted: int,
        used: int,
        wait_s: float,
        now: float,
        back: int = 0,
        lacks: int = 0,
        *,
        refused: bool = False,
    ) -> None:
        """The server granted this and took this back, and all sidecars together have `used` so much; `wait_s` until
        there is room for `lacks`. `refused`: it was asked for a request that was refused."""
        self.held += granted
        ours = self.told + granted - back
        self.told = 0
        age_s = now - self.answered_at
        if age_s > FRESH_S:
            self.pace = 0.0
        elif age_s >= LEAST_AGE_S:
            self.pace += PACE_GAIN * ((used - self.used - ours) / age_s - self.pace)
        self.used = used
        self.answered_at = now
        if used > OVERSHOT * self.limit and now >= self.wary_until:
            most = MOST_SPANS * self.span_s
            again = now - self.wary_until < most
            self.wary_s = min(most, 2.0 * self.wary_s) if again else FIRST_SPANS * self.span_s
            self.wary_until = now + self.wary_s
        if wait_s > 0.0 and (not granted if refused else now >= self.retry_at):
            self.retry_at = now + wait_s
            self.lacked = lacks
        elif self.limit - used + self.held >= self.lacked:
            self.retry_at = 0.0

    def unanswered(self) -> None:
        """What was told is told again, less what came back of it meanwhile: the server may know of neither."""
        self.debt += self.told
        self.told = 0
        less = min(self.debt, self.held)
        self.held -= less
        self.debt -= less
        less = min(self.debt, self.spare)
        self.spare -= less
        self.debt -= less
        while self.debt and self._backs:
            bucket, amount = self._backs.popitem()
            less = min(self.debt, amount)
            self.debt -= less
            self.back -= less
            if less < amount:
                self._backs[bucket] = amount - less

    def forgotten(self, told: int, now: float, since: float = NEVER) -> None:
        """The server has lost count of what was drawn after `since` (`NEVER`: of all): what was used here since then is
        owed again, but `told`; what was held is void."""
        self.held = 0
        self.spare = 0
        self.back = 0
        self._backs = {}
        self.advance(now)
        first = int(max(0.0, since) / self._width_s)
        lost = self._current if self._bucket >= first else 0
        for bucket, used in self._own.items():
            if bucket >= first:
                lost += used
        self.debt = max(self.debt, lost - told)

    def _lose(self, loss: int, lost_at: float) -> None:
        """The log went away: what the others had used is what it said last, less what has left since."""
        self.loss = loss
        self.since_loss = 0
        self.advance(lost_at)
        self.before = self.own
        kept_ratio = 1.0 - (lost_at - self.answered_at) / self.span_s
        self.others = int(max(0, self.used - self.own) * kept_ratio) if kept_ratio > 0.0 else 0
