"""This sidecar's part of all token budgets: what a request reserves, what is drawn ahead for it, and what goes back.

A budget is one quota for one tenant: up to four sliding windows (`meter`: tokens and requests, a minute and a day)
and a bound on requests under way. It is one for all sidecars, and the transaction log's server counts it; but no
request waits for a server. So each sidecar draws a little ahead of its own pace and spends that here.

```
reserve -> held or on credit -> ... -> settle (more or less than was reserved)         the request's way: plain calls
low water, debt, refusals -> `wake` -> wants: draws -> the server -> drawn: slices      the loop's way (sidecar.draws)
```

1. All or nothing: a request holds of every budget that fits it, or of none. A budget in shadow counts what it would
   have refused, and is then not charged, as if it had been.
2. A slice is what this sidecar used of the budget in `AHEAD_S`, and at least one request where these come more often
   than one a second or the room is scarce: where each sidecar's part of it is less than a request. So a slow tenant has
   no slice, and its requests go on credit, while there is room for that (meter, rules 2, 3).
3. What was drawn and not used within `CHECK_S` to two of it goes back, or is drawn anew: nothing is held for longer.
   What a request gives back is held, too, however long nobody else came.
4. Refused is decided here, and the server is asked at most every `ASK_S` per budget, for the smallest request that was
   refused since; it gives that or nothing, or ten sidecars would each get a tenth of a request.
5. What a request used beyond its reservation is debt: it is always taken, and the next draw records it.
6. While the log is away a quota says what holds: `share` (meter, rule 4) or `refuse`. What is used meanwhile is debt.
   For `SETTLING_S` after it is back the same holds, until all sidecars have told theirs; a server that has forgotten a
   budget (`born_us` is another) is told what this sidecar used of the windows that run.
7. A draw that failed may have been done: debt is told again, what was given back is not, what was wanted counts as not
   granted. So a budget is rather too small for a window than too large.
8. Tenants are forgotten, the one least recently seen first, beyond `TENANTS`; never one with something under way, nor,
   until there are a tenth more (the log was away, and strangers made up names), with something held or owed. A quota
   that is gone by a reload gives back what it holds; a reservation of it settles harmlessly.

Overshoot in any sliding window is at most what all sidecars hold at its start (rules 2, 3), one request on credit of
each sidecar that has not asked about the tenant for `FRESH_S` (or `COLD_RATIO` of the limit), and what requests under
way will have used beyond their reservations. docs/quotas.md has measurements.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from heapq import heappop, heappush
from math import ceil, inf
from typing import Final

from sidecar.core.models import MAX_MODEL_NAME, matches
from sidecar.core.quotas.meter import REQUESTS, TOKENS, Meter
from sidecar.core.quotas.rate_lines import rate_lines
from sidecar.core.quotas.tenant_budget import CHECK_S, Budget, Counts, Draw, Drawn, Rule
from sidecar.kernel.count import counted
from sidecar.policy.schema import Quota

__all__ = ["Budget", "Counts", "Draw", "Drawn", "Exceeded", "Ledger", "Reservation", "allowance"]

TENANTS: Final = 100_000
MOST_TENANTS: Final = TENANTS + TENANTS // 10
MODELS: Final = 4096
"""Models whose quotas are remembered: clients choose the names."""
DRAW_S: Final = 0.05
"""Between two draws of one budget."""
ASK_S: Final = 0.1
SETTLING_S: Final = 1.0
BATCH: Final = 100
"""Draws in one round trip."""
CHECKS: Final = 300
"""Budgets looked at before the loop may go on: about half a millisecond."""
POLL_S: Final = 0.9
POLLS: Final = 100.0
"""Draws a second that only ask how much is left: where more tenants are near their limits, each has its turn."""
AWAY_RETRY_S: Final = 1.0
EVICT_TRIES: Final = 8
HEADER_S: Final = 0.25
"""How long headers are told again while nothing changes but the time."""
STREAM_FACTOR: Final = 1.2
LOG_AWAY: Final = "log_away"
CONCURRENCY: Final = "concurrency"

UP: Final = 0
AWAY: Final = 1
SETTLING: Final = 2
STATE_WORDS: Final = ("up", "away", "settling")


class Reservation:
    """What a request holds until it is settled."""

    __slots__ = ("at", "budgets", "open", "tokens")

    def __init__(self, budgets: tuple[Budget, ...], tokens: int, at: float) -> None:
        self.budgets = budgets
        self.tokens = tokens
        self.at = at
        self.open = True


class Exceeded:
    """A request that a budget does not admit. `retry_after_s` None: waiting does not help. `window`: its words."""

    __slots__ = ("budget", "detail", "retry_after_s", "window")

    def __init__(self, budget: Budget, window: str, retry_after_s: float | None, detail: str) -> None:
        self.budget = budget
        self.window = window
        self.retry_after_s = retry_after_s
        self.detail = detail


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
    """All budgets that are in use here. `members`, a number of sidecars, is 1 or more."""

    __slots__ = (
        "_by_name",
        "_checks",
        "_due",
        "_exact",
        "_generation",
        "_globs",
        "_losses",
        "_lost_at",
        "_masks",
        "_next_at",
        "_order",
        "_polled_at",
        "_polls",
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
        """Called when `wants` has something sooner than `next_at` said; never waits."""
        self.counts: dict[str, Counts] = {}
        self._rules: list[Rule] = []
        self._by_name: dict[str, Rule] = {}
        self._exact: dict[str, int] = {}
        self._globs: list[Rule] = []
        self._generation = 0
        self._masks: dict[str, int] = {}
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._due: list[tuple[float, int, Budget]] = []
        """A heap of what has something to draw, by when it may; `_order` keeps those of one moment apart."""
        self._order = 0
        self._next_at = inf
        self._checks: deque[tuple[float, Budget]] = deque()
        self._polls = 0.0
        """How many may still be asked about now, of `POLLS` a second."""
        self._polled_at = 0.0
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
        self._by_name = {rule.name: rule for rule in self._rules}
        self._generation += 1  # budgets learn of it when they are used or looked at, which is within a second or two

    def fitting(self, tenant: str) -> list[Quota]:
        """The quotas that hold a tenant, in the policy's order."""
        mask = self._mask_of(tenant)
        return [rule.quota for rule in self._rules if rule.bit & mask]

    def budgets(self, tenant: str, model: str | None) -> tuple[Budget, ...]:
        """What holds a tenant's requests for a model; () if nothing does. `tenant` "" is a tenant, too. `model` "": for
        none; None: for one that it does not name, which every quota holds, whatever its models."""
        tenants = self._tenants
        known = tenants.get(tenant)
        if known is None:
            self._make_room()
            known = tenants[tenant] = _Tenant()
        else:
            tenants.move_to_end(tenant)
        if known.generation != self._generation:
            self._refresh(tenant, known)
        if not known.mask:
            return ()
        mask = known.mask
        if model is not None:
            models = self._masks.get(model)
            if models is None:
                models = self._mask_of_model(model)
            mask &= models
        found = known.by_mask.get(mask)
        return found if found is not None else self._find(tenant, known, mask)

    # What operators see.

    @property
    def state(self) -> str:
        """How it stands with the log: `up`, `away` or `settling`."""
        return STATE_WORDS[self._state]

    @property
    def tenants(self) -> list[str]:
        """Those that are known, the one seen last at the end."""
        return list(self._tenants)

    def known(self, tenant: str) -> list[Budget]:
        """A tenant's budgets as they are, in the policy's order; looking keeps nobody from being forgotten."""
        known = self._tenants.get(tenant)
        if known is None:
            return []
        if known.generation != self._generation:
            self._refresh(tenant, known)
        return [known.budgets[rule.name] for rule in self._rules if rule.name in known.budgets]

    # The request's way.

    def reserve(self, budgets: tuple[Budget, ...], tokens: int, now: float) -> Reservation | Exceeded:
        """Hold `tokens` and one request of all of them, or of none."""
        left_out: list[Budget] | None = None
        alone = self._state != UP and self._alone(now)
        for budget in budgets:
            if alone and self._state == AWAY and budget.rule.refuses_alone:
                word, meter = LOG_AWAY, None
            else:
                meter = self._lacking(budget, tokens, now, alone)
                if meter is not None:
                    word = meter.word
                elif budget.has_slot(now, self.members, alone):
                    continue
                else:
                    word = CONCURRENCY
            self._refuse(budget, word, meter, tokens, now)
            if budget.rule.enforced:
                return self._exceeded(budget, word, meter, tokens, now, alone)
            if left_out is None:
                left_out = []
            left_out.append(budget)
        if left_out is not None:
            budgets = tuple([budget for budget in budgets if budget not in left_out])
        for budget in budgets:
            credit = budget.take(tokens, now)
            counts = budget.rule.counts
            counts.reserved_tokens += tokens
            if credit:
                counts.credit_tokens += min(credit, tokens)
            if budget.low and not budget.queued and not budget.drawing:
                self._queue(budget)
        return Reservation(budgets, tokens, now)

    def settle(self, reservation: Reservation, tokens: int, now: float) -> None:
        """A request ended and used `tokens`; again is harmless."""
        if not reservation.open:
            return
        reservation.open = False
        over = tokens - reservation.tokens
        for budget in reservation.budgets:
            budget.in_flight -= 1
            budget.reserved -= reservation.tokens
            counts = budget.rule.counts
            counts.settled_tokens += tokens
            if over:
                budget.stamp += 1
                for meter in budget.meters:
                    if meter.unit != TOKENS:
                        continue
                    if over < 0:
                        meter.give(-over, reservation.at, now)
                    else:
                        meter.take(over, now)
                if over > 0:
                    counts.debt_tokens += over
                    budget.used_at = now
                elif budget.gone:
                    self._queue(budget)
                elif not budget.checked and self._state != AWAY:
                    self._watch(budget, now)  # it was idle for as long as this lasted, and holds something now
            if not budget.queued and not budget.drawing and budget.has_words(self.members):
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
            least = 0
            for budget in budgets:
                if not budget.rule.enforced:
                    continue
                for meter in budget.meters:
                    if meter.unit == unit:
                        room = meter.room(now)
                        if tightest is None or room < least:
                            tightest, least = meter, room
            if tightest is not None:
                lines += rate_lines(tightest, max(0, least), now)
        first.header = lines
        first.header_of = budgets
        first.header_stamp = stamp
        first.header_until = now + HEADER_S
        return lines

    # The loop's way.

    def next_at(self) -> float:
        """When `wants` may have something, if nothing happens before; inf: never. `wake` says if that comes sooner."""
        at = inf
        if self._state != AWAY:
            if self._recheck:
                at = 0.0
            elif self._due:
                at = self._due[0][0]
            if self._checks:
                at = min(at, self._checks[0][0])
        self._next_at = at
        return at

    def wants(self, now: float) -> list[Draw]:
        """Up to `BATCH` draws that are due; each ends in `drawn` or `undrawn`."""
        draws: list[Draw] = []
        if self._state == AWAY:
            return draws
        alone = self._alone(now)
        self._look_again(now)
        checks = self._checks
        for _ in range(CHECKS):
            if not checks or checks[0][0] > now:
                break
            budget = checks.popleft()[1]
            if budget.generation != self._generation:
                self._renew(budget)
            if budget.check(now):
                checks.append((now + CHECK_S, budget))
            if now - budget.drawn_at >= POLL_S and budget.interests(now) and self._may_poll(now):
                budget.asks = True
            if budget.asks or budget.has_words(self.members):
                self._queue(budget)
        due = self._due
        while due and due[0][0] <= now and len(draws) < BATCH:
            budget = heappop(due)[2]
            budget.queued = False
            # Until all have told what they used, nobody is granted anything.
            draw = budget.draw(now, self.members, not alone)
            if draw is not None:
                draws.append(draw)
        return draws

    def leave(self, now: float) -> list[Draw]:
        """Draws that give back all that is held, and tell all that is owed: this sidecar ends."""
        draws: list[Draw] = []
        if self._state == AWAY:
            return draws
        for budget in {budget: None for _, budget in [*self._checks, *[(0.0, each[2]) for each in self._due]]}:
            budget.gone = True
            draw = None if budget.drawing else budget.draw(now, self.members, False)
            if draw is not None:
                draws.append(draw)
        return draws

    def drawn(self, draw: Draw, reply: Drawn, now: float) -> None:
        """The server answered a draw."""
        budget = draw.budget
        budget.rule.counts.draws += 1
        in_vain = budget.answered(draw, reply, now)
        budget.due_at = now + (ASK_S if in_vain else DRAW_S)
        self._watch(budget, now)
        if budget.has_words(self.members):
            self._queue(budget)

    def undrawn(self, draw: Draw, now: float, wait_s: float = ASK_S) -> None:
        """A draw failed, and may have been done all the same (rule 7); the next one is not before `wait_s` are over."""
        budget = draw.budget
        budget.rule.counts.draw_failures += 1
        budget.unanswered(draw)
        budget.due_at = now + wait_s
        self._watch(budget, now)
        self._queue(budget)

    def went_away(self, members: int, now: float) -> None:
        """The log cannot be reached (rule 6); `members`: how many sidecars there were."""
        self.members = members
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

    def _alone(self, now: float) -> bool:
        """Whether each counts for itself; after the log is back, until all have told what they used."""
        if self._state == SETTLING and now >= self._settling_until and not self._recheck:
            self._state = UP
        return self._state != UP

    def _may_poll(self, now: float) -> bool:
        self._polls = min(POLLS, self._polls + POLLS * (now - self._polled_at))
        self._polled_at = now
        if self._polls < 1.0:
            return False
        self._polls -= 1.0
        return True

    def _lacking(self, budget: Budget, tokens: int, now: float, alone: bool) -> Meter | None:
        """The first window of a budget that does not admit a request; None: all do."""
        for meter in budget.meters:
            amount = tokens if meter.unit == TOKENS else 1
            if alone:
                if not meter.fits_alone(amount, now, self.members, self._losses, self._lost_at):
                    return meter
            elif not meter.fits(amount, now, self.members):
                return meter
        return None

    def _refuse(self, budget: Budget, word: str, meter: Meter | None, tokens: int, now: float) -> None:
        """Counts it, and sees that the server is asked for as much."""
        counts = budget.rule.counts
        refused = counts.refused if budget.rule.enforced else counts.shadow_refused
        refused[word] = refused.get(word, 0) + 1
        budget.used_at = now
        if meter is None:
            budget.refused += 1
        if meter is not None:
            meter.refused += 1
            amount = tokens if meter.unit == TOKENS else 1
            if amount > meter.limit:
                return
            meter.least = min(meter.least, amount) if meter.least else amount
        elif word == CONCURRENCY:
            budget.slots_asked = True
        else:
            return
        self._queue(budget)

    def _exceeded(
        self, budget: Budget, word: str, meter: Meter | None, tokens: int, now: float, alone: bool
    ) -> Exceeded:
        rule = budget.rule
        part = ""
        if alone and self.members > 1:
            part = f"; until all sidecars agree again this one has one part in {self.members} of it"
        if word == LOG_AWAY:
            detail = f"quota {rule.name} admits nothing while the transaction log cannot be reached"
            return Exceeded(budget, word, AWAY_RETRY_S, detail)
        if meter is None:
            detail = f"quota {rule.name} admits {counted(rule.slots, 'request')} at a time{part}"
            return Exceeded(budget, word, ASK_S, detail)
        amount = tokens if meter.unit == TOKENS else 1
        if amount > meter.limit:
            detail = f"a request of {tokens} tokens is more than quota {rule.name} has, {meter.limit} {meter.word}"
            return Exceeded(budget, word, None, detail)
        if part:
            detail = f"quota {rule.name}: {meter.limit} {meter.word}, {meter.own} used here, {amount} wanted{part}"
            return Exceeded(budget, word, AWAY_RETRY_S, detail)
        left = max(0, meter.room(now))
        detail = f"quota {rule.name}: {meter.limit} {meter.word}, {left} left, {amount} wanted"
        return Exceeded(budget, word, max(ASK_S, meter.retry_at - now), detail)

    def _queue(self, budget: Budget) -> None:
        """It has something to draw; again is harmless."""
        if budget.queued or budget.drawing:
            return
        if self._state == AWAY and not budget.gone:
            return  # `came_back` has all tenants looked at, and a heap of them all would keep those that are forgotten
        budget.queued = True
        self._order += 1
        heappush(self._due, (budget.due_at, self._order, budget))
        if budget.due_at < self._next_at and self._state != AWAY:
            self._next_at = budget.due_at
            self.wake()

    def _watch(self, budget: Budget, now: float) -> None:
        """Look at it once a second, until it is idle."""
        if not budget.checked:
            budget.watched(now)
            self._checks.append((now + CHECK_S, budget))
            if now + CHECK_S < self._next_at:
                self._next_at = now + CHECK_S
                self.wake()

    def _look_again(self, now: float) -> None:
        """After a loss: whether the server has forgotten what was used here, of a slice of the tenants."""
        for _ in range(min(BATCH, len(self._recheck))):
            known = self._tenants.get(self._recheck.pop())
            if known is None:
                continue
            for budget in known.budgets.values():
                for meter in budget.meters:
                    meter.advance(now)
                    if meter.own or not meter.settled:
                        budget.asks = True
                if budget.asks or budget.in_flight:
                    budget.asks = True
                    self._queue(budget)

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
        if len(model) <= MAX_MODEL_NAME:
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
                    budget.generation = self._generation
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
        """It has new limits, or is gone: a tenant that comes back has another."""
        budget.generation = self._generation
        rule = self._by_name.get(budget.rule.name)
        if budget.gone or rule is None or not matches((rule.quota.tenant,), budget.tenant):
            budget.gone = True
            self._queue(budget)
        elif rule is not budget.rule:
            budget.use(rule)

    def _make_room(self) -> None:
        """Forget who was seen least recently (rule 8). Who stays goes to the end, or a few would keep all others."""
        tenants = self._tenants
        for _ in range(EVICT_TRIES):
            if len(tenants) < TENANTS:
                return
            tenant = next(iter(tenants))
            crowded = len(tenants) >= MOST_TENANTS
            for budget in tenants[tenant].budgets.values():
                if budget.in_flight or not (crowded or budget.idle):
                    tenants.move_to_end(tenant)
                    break
            else:
                del tenants[tenant]


def allowance(request_tokens: int, stream: bool, budget_factor: float) -> int:
    """The tokens that one request may reserve, by its service (`request_tokens`), shape and class; 0: no bound."""
    return ceil(request_tokens * (STREAM_FACTOR if stream else 1.0) * budget_factor)
