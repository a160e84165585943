"""This sidecar's part of all token budgets: what a request reserves, what is drawn ahead for it, and what goes back.

A budget is one quota for one tenant: up to four sliding windows (`core.meter`: tokens and requests, a minute and a day)
and a bound on requests under way. It is one for all sidecars, and the transaction log's server counts it; but no
request waits for a server. So each sidecar draws a little ahead of its own pace and spends that here.

```
reserve -> held or on credit -> ... -> settle (more or less than was reserved)         the request's way: plain calls
low water, debt, refusals -> `wake` -> wants: draws -> the server -> drawn: slices      the loop's way (sidecar.quotas)
```

1. All or nothing: a request holds of every budget that fits it, or of none. A budget in shadow counts what it would
   have refused, and is then not charged, as if it had been.
2. A slice is what this sidecar used of the budget in `AHEAD_S`, and at least one request where these come more often
   than one a second or the room is scarce: where each sidecar's part of it is less than a request. So a slow tenant has
   no slice, and its requests go on credit, while there is room for that (meter, rules 2, 3).
3. What was drawn and not used within `CHECK_S` to two of it goes back, or is drawn anew: nothing is held for longer.
4. Refused is decided here, and the server is asked at most every `ASK_S` per budget, for the smallest request that was
   refused since; it gives that or nothing, or ten sidecars would each get a tenth of a request.
5. What a request used beyond its reservation is debt: it is always taken, and the next draw records it.
6. While the log is away a quota says what holds: `share` (meter, rule 4) or `refuse`. What is used meanwhile is debt.
   For `SETTLING_S` after it is back the same holds, until all sidecars have told theirs; a server that has forgotten a
   budget (`born_us` is another) is told what this sidecar used of the windows that run.
7. A draw that failed may have been done: debt is told again, what was given back is not, what was wanted counts as not
   granted. So a budget is rather too small for a window than too large.
8. Tenants are forgotten, the one least recently seen first, beyond `TENANTS`; never one with something under way, held
   or owed. A quota that is gone by a reload gives back what it holds; a reservation of it settles harmlessly.

Overshoot in any sliding window is at most what all sidecars hold at its start (rules 2, 3), one request on credit of
each sidecar that has not asked about the tenant for `FRESH_S` (or `COLD_RATIO` of the limit), and what requests under
way will have used beyond their reservations. docs/quotas.md has measurements.
"""

from collections import deque
from collections.abc import Callable
from math import ceil
from typing import Final

from sidecar.core.meter import REQUESTS, TOKENS, Meter
from sidecar.core.models import matches
from sidecar.policy.schema import Quota

TENANTS: Final = 100_000
MODELS: Final = 4096
"""Models whose quotas are remembered: clients choose the names."""
AHEAD_S: Final = 0.25
LOW_S: Final = 0.1
DRAW_S: Final = 0.05
"""Between two draws of one budget."""
ASK_S: Final = 0.1
CHECK_S: Final = 1.0
REPEAT_S: Final = 5.0
"""Slots stand for MEMBER_TTL_MS on the server unless told again."""
SETTLING_S: Final = 1.0
BATCH: Final = 100
"""Draws in one round trip."""
EVICT_TRIES: Final = 8
HEADER_S: Final = 0.25
"""How long headers are told again while nothing changes but the time."""
MINUTE_S: Final = 60.0
DAY_S: Final = 86_400.0
STREAM_FACTOR: Final = 1.2

UP: Final = 0
AWAY: Final = 1
SETTLING: Final = 2


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


class Budget:
    """One quota for one tenant, as far as this sidecar has a part in it."""

    __slots__ = (
        "born_us",
        "checked",
        "drawing",
        "due_at",
        "gone",
        "header",
        "header_of",
        "header_stamp",
        "header_until",
        "in_flight",
        "low",
        "mark_at",
        "mark_tokens",
        "meters",
        "pace",
        "queued",
        "refused",
        "requests",
        "rule",
        "slots",
        "slots_asked",
        "slots_at",
        "slots_in_use",
        "stamp",
        "tenant",
        "tokens",
        "typical",
        "used_at",
    )

    def __init__(self, rule: Rule, tenant: str) -> None:
        self.rule = rule
        self.tenant = tenant
        self.meters: list[Meter] = []
        self.gone = False
        self.in_flight = 0
        self.slots = 0
        """Requests that may be under way here."""
        self.slots_in_use = 0
        self.slots_at = -1e18
        self.slots_asked = False
        """One was refused here since the last draw."""
        self.tokens = 0
        self.requests = 0
        """Reserved here so far; `mark_*`: at the last check."""
        self.mark_tokens = 0
        self.mark_at = 0.0
        self.pace = 0.0
        """Tokens per second used here of late."""
        self.typical = 0.0
        """Tokens of a request, rather those of larger ones."""
        self.low = 0
        """A reservation that leaves fewer tokens than this asks for a draw."""
        self.used_at = -1e18
        self.due_at = 0.0
        """Not drawn before."""
        self.queued = False
        self.drawing = False
        self.checked = False
        self.born_us = 0
        self.refused = 0
        self.stamp = 0
        """Grows with what `headers` tells."""
        self.header = b""
        """Of `header_of`, good while the stamps' sum is `header_stamp`, until `header_until`."""
        self.header_of: tuple[Budget, ...] = ()
        self.header_stamp = -1
        self.header_until = 0.0
        self.use(rule)

    @property
    def idle(self) -> bool:
        """Whether nothing would be lost with it."""
        if self.in_flight or self.drawing or self.slots:
            return False
        return not any(meter.held or meter.debt or meter.told or meter.back for meter in self.meters)

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
        self.stamp += 1


class Reservation:
    """What a request holds until it is settled."""

    __slots__ = ("at", "budgets", "open", "tokens")

    def __init__(self, budgets: tuple[Budget, ...], tokens: int, at: float) -> None:
        self.budgets = budgets
        self.tokens = tokens
        self.at = at
        self.open = True


class Exceeded:
    """A request that no budget admits now. `retry_after_s` None: waiting does not help. `window`: its words."""

    __slots__ = ("budget", "detail", "retry_after_s", "window")

    def __init__(self, budget: Budget, window: str, retry_after_s: float | None, detail: str) -> None:
        self.budget = budget
        self.window = window
        self.retry_after_s = retry_after_s
        self.detail = detail


class Portion:
    """What a draw says of one window: what it owes, gives back and wants."""

    __slots__ = ("back", "back_at", "least", "meter", "must", "want")

    def __init__(self, meter: Meter, must: int, back: int, back_at: float, want: int, least: int) -> None:
        self.meter = meter
        self.must = must
        self.back = back
        self.back_at = back_at
        """Monotonic: none of it is younger."""
        self.want = want
        self.least = least


class Draw:
    """One budget's next words to the server."""

    __slots__ = ("budget", "portions", "slots_limit", "slots_used", "slots_want")

    def __init__(self, budget: Budget, portions: list[Portion], slots_limit: int, slots_used: int, slots_want: int):
        self.budget = budget
        self.portions = portions
        self.slots_limit = slots_limit
        self.slots_used = slots_used
        self.slots_want = slots_want


class Drawn:
    """What the server answered. By window: `granted`, `used` (by all, afterwards), `wait_s` until what lacks fits.

    `slots` are ours, `slots_in_use` all that are. `born_us`: when the server began to count this budget.
    """

    __slots__ = ("born_us", "granted", "slots", "slots_in_use", "used", "wait_s")

    def __init__(
        self, granted: list[int], used: list[int], wait_s: list[float], slots: int, slots_in_use: int, born_us: int
    ) -> None:
        self.granted = granted
        self.used = used
        self.wait_s = wait_s
        self.slots = slots
        self.slots_in_use = slots_in_use
        self.born_us = born_us


class _Tenant:
    """The quotas that fit a tenant, and its budgets."""

    __slots__ = ("budgets", "by_mask", "generation", "mask")

    def __init__(self) -> None:
        self.mask = 0
        self.generation = -1
        self.budgets: dict[str, Budget] = {}
        self.by_mask: dict[int, tuple[Budget, ...]] = {}


def _nobody() -> None:
    """Nobody draws: all goes by what is held and on credit."""


class Ledger:
    """All budgets that are in use here."""

    __slots__ = (
        "_checks",
        "_exact",
        "_generation",
        "_globs",
        "_losses",
        "_lost_at",
        "_low",
        "_masks",
        "_recheck",
        "_rules",
        "_settling_until",
        "_state",
        "_tenants",
        "any",
        "counts",
        "members",
        "wake",
    )

    def __init__(self) -> None:
        self.any = False
        """Whether there are quotas at all."""
        self.members = 1
        """How many sidecars there are, as last known."""
        self.wake: Callable[[], None] = _nobody
        """Called when there is something to draw; never waits."""
        self.counts: dict[str, Counts] = {}
        self._rules: list[Rule] = []
        self._exact: dict[str, int] = {}
        self._globs: list[Rule] = []
        self._generation = 0
        self._masks: dict[str, int] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._low: dict[Budget, None] = {}
        self._checks: deque[tuple[float, Budget]] = deque()
        self._recheck: list[str] = []
        self._state = UP
        self._losses = 0
        self._lost_at = 0.0
        self._settling_until = 0.0

    # Policy.

    def use(self, quotas: tuple[Quota, ...], now: float) -> None:
        """A policy is in force: limits hold from the next request on."""
        counts = self.counts
        self._rules = []
        self._exact = {}
        self._globs = []
        self.counts = {}
        for quota in quotas:
            if quota.mode == "off":
                continue
            kept = counts.get(quota.name)
            rule = Rule(quota, 1 << len(self._rules), kept if kept is not None else Counts())
            self.counts[quota.name] = rule.counts
            self._rules.append(rule)
            glob = quota.tenant
            if "*" in glob or "?" in glob or "[" in glob:
                self._globs.append(rule)
            else:
                self._exact[glob] = self._exact.get(glob, 0) | rule.bit
        self.any = len(self._rules) > 0
        self._masks = {}
        self._generation += 1
        for _, budget in self._checks:  # what holds something gives it back, or knows its new limits
            self._renew(budget)

    def fitting(self, tenant: str) -> list[Quota]:
        """The quotas that would hold a tenant, in the policy's order."""
        mask = self._mask_of(tenant)
        return [rule.quota for rule in self._rules if rule.bit & mask]

    def budgets(self, tenant: str, model: str) -> tuple[Budget, ...]:
        """What holds a tenant's requests for a model; () if nothing does. `tenant` "" is a tenant, too."""
        tenants = self._tenants
        known = tenants.get(tenant)
        if known is None:
            known = _Tenant()
            self._make_room()
        else:
            del tenants[tenant]
        tenants[tenant] = known
        if known.generation != self._generation:
            self._refresh(tenant, known)
        if not known.mask:
            return ()
        models = self._masks.get(model)
        if models is None:
            models = self._mask_of_model(model)
        mask = models & known.mask
        found = known.by_mask.get(mask)
        return found if found is not None else self._find(tenant, known, mask)

    # The request's way.

    def reserve(self, budgets: tuple[Budget, ...], tokens: int, now: float) -> Reservation | Exceeded:
        """Hold `tokens` and one request of all of them, or of none."""
        shadowed = False
        for budget in budgets:
            meter = self._lacking(budget, tokens, now)
            if meter is None and self._has_slot(budget, now):
                continue
            if budget.rule.enforced:
                return self._exceeded(budget, meter, tokens, now)
            self._refused(budget, meter, tokens)
            shadowed = True
        if shadowed:
            budgets = tuple(
                budget
                for budget in budgets
                if budget.rule.enforced or (self._lacking(budget, tokens, now) is None and self._has_slot(budget, now))
            )
        for budget in budgets:
            credit = self._take(budget, tokens, now)
            budget.in_flight += 1
            budget.requests += 1
            budget.typical = max(float(tokens), 0.9 * budget.typical + 0.1 * tokens)
            counts = budget.rule.counts
            counts.reserved_tokens += tokens
            counts.credit_tokens += credit
            if not budget.queued and not budget.drawing:
                rule = budget.rule
                if credit or (rule.slots and budget.in_flight >= budget.slots) or self._is_low(budget):
                    self._queue(budget)
        return Reservation(budgets, tokens, now)

    def settle(self, reservation: Reservation, tokens: int, now: float) -> None:
        """A request ended and used `tokens`; again is harmless."""
        if not reservation.open:
            return
        reservation.open = False
        reserved = reservation.tokens
        for budget in reservation.budgets:
            self._leave(budget)
            counts = budget.rule.counts
            counts.settled_tokens += tokens
            if tokens < reserved:
                for meter in budget.meters:
                    if meter.unit == TOKENS:
                        meter.give(reserved - tokens, reservation.at, now)
            elif tokens > reserved:
                more = tokens - reserved
                counts.debt_tokens += more
                budget.tokens += more
                budget.used_at = now
                for meter in budget.meters:
                    if meter.unit == TOKENS:
                        meter.take(more, now)
            budget.stamp += 1
            if not budget.queued and not budget.drawing and (tokens != reserved or budget.rule.slots):
                self._queue(budget)

    def cancel(self, reservation: Reservation, now: float) -> None:
        """A request never went to an engine: all of it is given back; again is harmless."""
        if not reservation.open:
            return
        for budget in reservation.budgets:
            for meter in budget.meters:
                if meter.unit == REQUESTS:
                    meter.give(1, reservation.at, now)
        self.settle(reservation, 0, now)

    def headers(self, budgets: tuple[Budget, ...], now: float) -> bytes:
        """Lines x-ratelimit-{limit,remaining,reset}-{requests,tokens} of the tightest that are enforced; or none."""
        if not budgets:
            return b""
        stamp = 0
        for budget in budgets:
            stamp += budget.stamp
        first = budgets[0]
        if first.header_stamp == stamp and first.header_of is budgets and now < first.header_until:
            return first.header
        lines = b""
        for unit in (REQUESTS, TOKENS):
            tightest: Meter | None = None
            least = 0.0
            for budget in budgets:
                if not budget.rule.enforced:
                    continue
                for meter in budget.meters:
                    if meter.unit == unit:
                        room = meter.room(now)
                        if tightest is None or room < least:
                            tightest, least = meter, room
            if tightest is not None:
                lines += _lines(tightest, int(max(0.0, least)), now)
        first.header = lines
        first.header_of = budgets
        first.header_stamp = stamp
        first.header_until = now + HEADER_S
        return lines

    # The loop's way.

    def next_at(self) -> float:
        """When `wants` may have something that it has not now, though nothing happens; inf: never."""
        return self._checks[0][0] if self._checks else float("inf")

    def wants(self, now: float) -> list[Draw]:
        """Up to `BATCH` draws that are due."""
        return []

    def drawn(self, draw: Draw, reply: Drawn, now: float) -> None:
        """The server answered a draw."""

    def undrawn(self, draw: Draw, now: float) -> None:
        """A draw failed, and may have been done all the same (rule 7)."""

    def went_away(self, members: int, now: float) -> None:
        """The log cannot be reached (rule 6)."""
        self.members = max(1, members)
        if self._state != AWAY:
            self._state = AWAY
            self._losses += 1
            self._lost_at = now

    def came_back(self, now: float) -> None:
        """The log answers again."""
        if self._state == AWAY:
            self._state = SETTLING
            self._settling_until = now + SETTLING_S
            self._recheck = list(self._tenants)
            self.wake()

    # Inside.

    def _lacking(self, budget: Budget, tokens: int, now: float) -> Meter | None:
        """The first window of a budget that does not admit a request; None: all do."""
        state = self._state
        if state == UP:
            for meter in budget.meters:
                if not meter.fits(tokens if meter.unit == TOKENS else 1, now, self.members):
                    return meter
            return None
        if state == SETTLING and now >= self._settling_until:
            self._state = UP
            return self._lacking(budget, tokens, now)
        for meter in budget.meters:
            amount = tokens if meter.unit == TOKENS else 1
            if budget.rule.refuses_alone and state == AWAY:
                return meter
            if not meter.fits_alone(amount, now, self.members, self._losses, self._lost_at):
                return meter
        return None

    def _has_slot(self, budget: Budget, now: float) -> bool:
        slots = budget.rule.slots
        if not slots or budget.in_flight < budget.slots:
            return True
        if self._state != UP:
            return budget.in_flight < max(1, slots // self.members)
        return budget.in_flight == 0 or budget.in_flight < slots // self.members

    def _take(self, budget: Budget, tokens: int, now: float) -> int:
        most = 0
        for meter in budget.meters:
            if meter.unit == TOKENS:
                most = max(most, meter.take(tokens, now))
            else:
                meter.take(1, now)
        budget.tokens += tokens
        budget.used_at = now
        budget.stamp += 1
        return most

    def _is_low(self, budget: Budget) -> bool:
        low = budget.low
        return any(meter.unit == TOKENS and meter.held < low for meter in budget.meters)

    def _leave(self, budget: Budget) -> None:
        budget.in_flight -= 1

    def _queue(self, budget: Budget) -> None:
        """It has something to draw."""
        if not budget.queued:
            budget.queued = True
            if not self._low:
                self.wake()
            self._low[budget] = None

    def _refused(self, budget: Budget, meter: Meter | None, tokens: int) -> str:
        word = "concurrency"
        if meter is not None:
            word = meter.word
            amount = tokens if meter.unit == TOKENS else 1
            meter.least = min(meter.least, amount) if meter.least else amount
        else:
            budget.slots_asked = True
        counts = budget.rule.counts
        refused = counts.refused if budget.rule.enforced else counts.shadow_refused
        refused[word] = refused.get(word, 0) + 1
        budget.refused += 1
        self._queue(budget)
        return word

    def _exceeded(self, budget: Budget, meter: Meter | None, tokens: int, now: float) -> Exceeded:
        word = self._refused(budget, meter, tokens)
        quota = budget.rule.name
        if meter is None:
            return Exceeded(budget, word, 1.0, f"quota {quota} admits {budget.rule.slots} requests at a time")
        amount = tokens if meter.unit == TOKENS else 1
        if amount > meter.limit:
            detail = f"a request of {tokens} tokens is more than all of quota {quota}, {meter.limit} {meter.word}"
            return Exceeded(budget, word, None, detail)
        left = max(0, int(meter.room(now)))
        retry_s = max(ASK_S, meter.retry_at - now)
        detail = f"quota {quota}: {meter.limit} {meter.word}, {left} left, {amount} wanted"
        return Exceeded(budget, word, retry_s, detail)

    def _mask_of(self, tenant: str) -> int:
        mask = self._exact.get(tenant, 0)
        for rule in self._globs:
            if matches((rule.quota.tenant,), tenant):
                mask |= rule.bit
        return mask

    def _mask_of_model(self, model: str) -> int:
        mask = 0
        for rule in self._rules:
            if matches(rule.quota.models, model):
                mask |= rule.bit
        if len(self._masks) >= MODELS:
            self._masks = {}
        self._masks[model] = mask
        return mask

    def _find(self, tenant: str, known: _Tenant, mask: int) -> tuple[Budget, ...]:
        found: list[Budget] = []
        for rule in self._rules:
            if rule.bit & mask:
                budget = known.budgets.get(rule.name)
                if budget is None:
                    budget = known.budgets[rule.name] = Budget(rule, tenant)
                found.append(budget)
        known.by_mask[mask] = tuple(found)
        return known.by_mask[mask]

    def _refresh(self, tenant: str, known: _Tenant) -> None:
        """A policy came into force since it was last seen."""
        known.generation = self._generation
        known.mask = self._mask_of(tenant)
        known.by_mask = {}
        for name in list(known.budgets):
            budget = known.budgets[name]
            self._renew(budget)
            if budget.gone:
                del known.budgets[name]

    def _renew(self, budget: Budget) -> None:
        for rule in self._rules:
            if rule.name == budget.rule.name and matches((rule.quota.tenant,), budget.tenant):
                if rule is not budget.rule:
                    budget.use(rule)
                return
        budget.gone = True
        self._queue(budget)

    def _make_room(self) -> None:
        """Forget who was seen least recently (rule 8)."""
        tenants = self._tenants
        if len(tenants) < TENANTS:
            return
        for tries, (tenant, known) in enumerate(tenants.items()):
            if all(budget.idle for budget in known.budgets.values()):
                del tenants[tenant]
                return
            if tries == EVICT_TRIES:
                return


def allowance(request_tokens: int, stream: bool, budget_factor: float) -> int:
    """The tokens that one request may reserve, by its service (`request_tokens`), shape and class; 0: no bound."""
    return ceil(request_tokens * (STREAM_FACTOR if stream else 1.0) * budget_factor)


def _lines(meter: Meter, left: int, now: float) -> bytes:
    """When the window is whole again if nothing more is used is not known to the second: it is told as OpenAI's bucket
    would refill, in proportion to what is used, and not before there is room at all."""
    reset_s = max(meter.retry_at - now, meter.span_s * min(1.0, (meter.limit - left) / meter.limit))
    unit = b"tokens" if meter.unit == TOKENS else b"requests"
    return b"x-ratelimit-limit-%b: %d\r\nx-ratelimit-remaining-%b: %d\r\nx-ratelimit-reset-%b: %b\r\n" % (
        unit,
        meter.limit,
        unit,
        left,
        unit,
        _duration(reset_s),
    )


def _duration(seconds: float) -> bytes:
    """As OpenAI writes it: `350ms`, `1.2s`, `6m0s`, `23h59m1s`."""
    if seconds < 1.0:
        return b"%dms" % ceil(max(0.0, seconds) * 1000.0)
    whole = ceil(seconds)
    if whole < 60:
        return b"%ds" % whole
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return b"%dm%ds" % (minutes, rest)
    hours, minutes = divmod(minutes, 60)
    return b"%dh%dm%ds" % (hours, minutes, rest)
