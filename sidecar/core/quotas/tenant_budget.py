"""One quota for one tenant, as far as this sidecar has a part in it, and what it says to the server that counts it.

`core.quotas.quota` has the rules; here is what one budget makes of them: how much it wants to hold, what it gives back.
"""

from typing import Final

from sidecar.core.quotas.meter import FRESH_S, NEVER, REQUESTS, TOKENS, Meter
from sidecar.policy.schema import Quota

AHEAD_S: Final = 0.25
"""A slice lasts so long."""
CHECK_S: Final = 1.0
IDLE_S: Final = 2.5
"""What was neither used nor refused for so long has no slice: a client that was refused comes again within that."""
INTEREST_S: Final = 30.0
"""So long after it was used or refused it is asked each second how much is left, if that is less than half."""
REPEAT_S: Final = 5.0
"""Slots stand on the server for the log's MEMBER_TTL_MS unless they are told again."""
SCARCE: Final = 2
"""Requests that this sidecar's part of the room must be enough for, or one is held ready."""
MINUTE_S: Final = 60.0
DAY_S: Final = 86_400.0


class Counts:
    """Of one quota, since the start, for metrics. `refused`, `shadow_refused`: by window's words, or `concurrency`."""

    __slots__ = (
        "credit_tokens",
        "debt_tokens",
        "draw_failures",
        "draws",
        "refused",
        "reserved_tokens",
        "settled_tokens",
        "shadow_refused",
    )

    def __init__(self) -> None:
        self.reserved_tokens = 0
        self.settled_tokens = 0
        self.refused: dict[str, int] = {}
        self.shadow_refused: dict[str, int] = {}
        self.credit_tokens = 0
        self.debt_tokens = 0
        self.draws = 0
        self.draw_failures = 0


class Rule:
    """A quota as the ledger uses it. `bit` is its place in a policy's mask of quotas."""

    __slots__ = ("bit", "counts", "enforced", "name", "quota", "refuses_alone", "slots", "windows")

    def __init__(self, quota: Quota, bit: int, counts: Counts) -> None:
        self.quota = quota
        self.name = quota.name
        self.bit = bit
        self.counts = counts
        self.enforced = quota.mode == "enforce"
        self.refuses_alone = quota.when_log_away == "refuse"
        self.slots = quota.concurrency or 0
        """Requests under way, 0: no bound."""
        self.windows: list[tuple[int, float, int, str]] = []
        for unit, span_s, limit, word in (
            (TOKENS, MINUTE_S, quota.tokens_per_minute, "tokens per minute"),
            (TOKENS, DAY_S, quota.tokens_per_day, "tokens per day"),
            (REQUESTS, MINUTE_S, quota.requests_per_minute, "requests per minute"),
            (REQUESTS, DAY_S, quota.requests_per_day, "requests per day"),
        ):
            if limit is not None:
                self.windows.append((unit, span_s, limit, word))


class Portion:
    """What a draw says of one window: what it owes, gives back and wants.

    What it gives back was drawn by `back_at`, monotonic; 0: by now. `lacks`: what the smallest request that was refused
    needs, or a slice, with what is held.
    """

    __slots__ = ("back", "back_at", "lacks", "least", "meter", "must", "want")

    def __init__(self, meter: Meter, must: int, back: int, back_at: float, want: int, least: int) -> None:
        self.meter = meter
        self.lacks = meter.held + (least or want)
        self.must = must
        self.back = back
        self.back_at = back_at
        self.want = want
        self.least = least


class Draw:
    """One budget's next words to the server. Slots: the quota's bound, those under way, and as many as are wanted."""

    __slots__ = ("budget", "portions", "slots_limit", "slots_used", "slots_want")

    def __init__(
        self, budget: "Budget", portions: list[Portion], slots_limit: int, slots_used: int, slots_want: int
    ) -> None:
        self.budget = budget
        self.portions = portions
        self.slots_limit = slots_limit
        self.slots_used = slots_used
        self.slots_want = slots_want


class Drawn:
    """What the server answered. By window: `granted`, `used` (by all, afterwards), `wait_s` until what lacks fits.

    `slots` are ours, `slots_in_use` all that are. `born_us`: when the server began to count this budget, `before_us`:
    when we drew on it before (0: it does not know), `now_us`: now, all by its clock.
    """

    __slots__ = ("before_us", "born_us", "granted", "now_us", "slots", "slots_in_use", "used", "wait_s")

    def __init__(
        self,
        granted: list[int],
        used: list[int],
        wait_s: list[float],
        slots: int,
        slots_in_use: int,
        born_us: int,
        before_us: int = 0,
        now_us: int = 0,
    ) -> None:
        self.granted = granted
        self.used = used
        self.wait_s = wait_s
        self.slots = slots
        self.slots_in_use = slots_in_use
        self.born_us = born_us
        self.before_us = before_us
        self.now_us = now_us


class Budget:
    """One quota for one tenant, as far as this sidecar has a part in it."""

    __slots__ = (
        "asks",
        "born_us",
        "checked",
        "drawing",
        "drawn_at",
        "due_at",
        "generation",
        "gone",
        "header",
        "header_of",
        "header_stamp",
        "header_until",
        "in_flight",
        "low",
        "mark_at",
        "meters",
        "queued",
        "refused",
        "reserved",
        "rule",
        "slots",
        "slots_asked",
        "slots_at",
        "slots_in_use",
        "stamp",
        "tenant",
        "told_us",
        "typical",
        "used_at",
    )

    def __init__(self, rule: Rule, tenant: str) -> None:
        self.rule = rule
        self.tenant = tenant
        self.meters: list[Meter] = []
        self.generation = 0
        """Of the policy that it knows."""
        self.gone = False
        """The policy has it no more: it gives back what it holds."""
        self.in_flight = 0
        self.low = False
        """The last `take` left too little, or used a slot."""
        self.slots = 0
        """Requests that may be under way here."""
        self.slots_in_use = 0
        self.slots_at = NEVER
        self.slots_asked = False
        """One was refused here since the last draw."""
        self.mark_at = 0.0
        """The last check."""
        self.typical = 0.0
        """Tokens of a request, rather those of larger ones."""
        self.used_at = NEVER
        """Or refused."""
        self.due_at = 0.0
        """Not drawn before."""
        self.drawn_at = NEVER
        self.queued = False
        self.drawing = False
        self.checked = False
        """It is among those that are looked at."""
        self.asks = False
        """It is drawn for though there is nothing to say."""
        self.born_us = 0
        self.told_us = 0
        """By the server's clock, when it last answered."""
        self.refused = 0
        """Requests for which there was no slot here, or no log, so far; the windows count theirs."""
        self.reserved = 0
        """Tokens of those that are under way here."""
        self.stamp = 0
        """Grows with what `headers` tells."""
        self.header = b""
        """Of `header_of`, good while the stamps' sum is `header_stamp`, until `header_until`."""
        self.header_of: tuple[Budget, ...] = ()
        self.header_stamp = -1
        self.header_until = 0.0
        self.use(rule)

    def use(self, rule: Rule) -> None:
        """Takes new limits at once; what was used and held of windows that stay, stays."""
        self.rule = rule
        known = {meter.word: meter for meter in self.meters}
        self.meters = []
        for unit, span_s, limit, word in rule.windows:
            meter = known.get(word)
            if meter is None:
                meter = Meter(unit, span_s, limit, word)
            meter.limit = limit
            self.meters.append(meter)
        if not rule.slots:
            self.slots = 0  # the server forgets them, too
            self.slots_asked = False
        self.stamp += 1

    @property
    def idle(self) -> bool:
        """Whether nothing would be lost with it."""
        return not self.in_flight and not self._restless

    @property
    def _restless(self) -> bool:
        """Whether something is held or is to be told, now or in a while."""
        if self.drawing or self.slots or (self.in_flight and self.rule.slots):
            return True
        return not all(meter.settled for meter in self.meters)

    def has_words(self, members: int) -> bool:
        """Whether there is something to tell or to want."""
        for meter in self.meters:
            if meter.debt or meter.back or meter.spare or meter.least or meter.held < meter.low:
                return True
        return self.slots_asked or (self.rule.slots > 0 and self.slots != self.slots_wanted(members))

    def has_slot(self, now: float, members: int, alone: bool) -> bool:
        """Whether one more may be under way; `alone`: the log is away."""
        limit = self.rule.slots
        if not limit or self.in_flight < self.slots:
            return True
        if alone:
            return self.in_flight < max(1, limit // members)
        if now - self.slots_at > FRESH_S:
            return self.in_flight < (limit if members == 1 else 1)
        return (self.in_flight + 1 - self.slots) * members <= limit - self.slots_in_use

    def slots_wanted(self, members: int) -> int:
        """One more than are under way where every sidecar may have that, or one was refused here."""
        if self.gone or (not self.in_flight and not self.slots_asked):
            return self.in_flight
        limit = self.rule.slots
        more = self.slots_asked or limit - self.slots_in_use >= members
        return min(limit, self.in_flight + 1) if more else self.in_flight

    def take(self, tokens: int, now: float) -> int:
        """A request goes; how much of it is on credit. `low`: less is held now than shall be."""
        credit = 0
        low = self.rule.slots > 0
        for meter in self.meters:
            owed = meter.take(tokens if meter.unit == TOKENS else 1, now)
            if owed > credit:
                credit = owed
            if meter.held < meter.low or owed:
                low = True
        self.low = low
        self.in_flight += 1
        self.reserved += tokens
        self.used_at = now
        usual = 0.9 * self.typical + 0.1 * tokens
        self.typical = usual if usual > tokens else float(tokens)
        self.stamp += 1
        return credit

    def draw(self, now: float, members: int, may_want: bool) -> Draw | None:
        """What is to be said now; None: nothing. It is under way until `answered` or `unanswered`."""
        worth = self.asks or self.gone
        self.asks = False
        active = not self.gone and now - self.used_at <= IDLE_S
        portions: list[Portion] = []
        for meter in self.meters:
            if self.gone:
                meter.spare += meter.held
                meter.held = 0
                meter.least = 0
            want, least = 0, 0
            if may_want:
                target = self._target(meter, now, members) if active or meter.least else 0
                meter.low = (target + 1) // 2
                least = max(0, meter.least - meter.held)
                want = max(0, target - meter.held, least)
                meter.least = 0
            must = meter.owes(now)
            back, back_at = meter.returns(now)
            if must or back or want:
                worth = True
            portions.append(Portion(meter, must, back, back_at, want, least))
        slots = 0
        if self.rule.slots:
            slots = self.slots_wanted(members)
            self.slots_asked = False
            if slots != self.slots or (slots and now - self.drawn_at >= REPEAT_S):
                worth = True
        if not worth:
            return None
        self.drawing = True
        return Draw(self, portions, self.rule.slots, self.in_flight if self.rule.slots else 0, slots)

    def answered(self, draw: Draw, reply: Drawn, now: float) -> bool:
        """The server answered; whether nothing was to be had of something that was wanted."""
        since = NEVER
        forgot = self.born_us != 0 and reply.born_us > self.born_us
        if not forgot and 0 < reply.before_us <= self.told_us - 1000 and self.told_us < reply.now_us:
            # It is back with an older picture of itself: what came after that is lost.
            forgot = True
            since = now - (reply.now_us - reply.before_us) * 1e-6
        self.born_us = reply.born_us
        self.told_us = reply.now_us
        in_vain = False
        for place, portion in enumerate(draw.portions):
            meter = portion.meter
            if forgot:
                meter.forgotten(portion.must, now, since)
            granted = reply.granted[place]
            meter.answered(
                granted,
                reply.used[place],
                reply.wait_s[place],
                now,
                portion.back,
                portion.lacks,
                refused=portion.least > 0,
            )
            if portion.want and not granted:
                in_vain = True
        if draw.slots_limit and self.rule.slots:
            self.slots = reply.slots
            self.slots_in_use = reply.slots_in_use
            self.slots_at = now
        self.drawing = False
        self.drawn_at = now
        self.stamp += 1
        return in_vain

    def unanswered(self, draw: Draw) -> None:
        """It may have been done all the same."""
        for portion in draw.portions:
            portion.meter.unanswered()
        self.drawing = False

    def watched(self, now: float) -> None:
        """It is looked at from now on."""
        self.checked = True
        self.mark_at = now
        for meter in self.meters:
            meter.mark = meter.taken

    def check(self, now: float) -> bool:
        """A second and more went by since the last look; False: it need not be looked at again."""
        elapsed_s = max(CHECK_S, now - self.mark_at)
        self.mark_at = now
        for meter in self.meters:
            meter.check(elapsed_s)
        if self.rule.slots and now - self.drawn_at >= REPEAT_S and (self.slots or self.in_flight):
            self.asks = True
        interests = self.interests(now)
        self.checked = interests or now - self.used_at <= IDLE_S or self.asks or self._restless
        return self.checked

    def interests(self, now: float) -> bool:
        """Whether how much is left is to be known, though nothing is drawn: little is, and somebody wanted of it."""
        return now - self.used_at <= INTEREST_S and any(meter.is_scarce(now) for meter in self.meters)

    def _target(self, meter: Meter, now: float, members: int) -> int:
        """How much shall be held of a window (rule 2)."""
        typical = int(self.typical) if meter.unit == TOKENS else 1
        flow = meter.flow
        if self.checked:
            flow = max(flow, (meter.taken - meter.mark) / max(now - self.mark_at, AHEAD_S))
        target = int(flow * AHEAD_S)
        if now - meter.answered_at > FRESH_S:
            return max(target, typical) if flow >= typical else 0
        part = meter.room(now) // members
        if target < typical and (flow >= typical or part < SCARCE * typical):
            target = typical
        # The last of a window is for all: nobody hoards it.
        return min(target, max(part, typical))
