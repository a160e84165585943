"""The product, as the pipeline uses it: `admit.Gate`, `limit.Limiter`, `core.balance.pick`, the breakers."""

from collections.abc import Callable
from random import Random

from bench.qos.stage import Flying, Policy, Stage
from bench.qos.traffic import ENGINE, KINDS, TENANTS, Asked, mean, rate_of
from sidecar.core.balance import Choice, pick
from sidecar.core.fleet import Fleet
from sidecar.core.gate.admit import Gate, Ticket, TurnedAway
from sidecar.core.quotas.quota import Exceeded, Ledger, Reservation
from sidecar.kernel.ids import ServiceName
from sidecar.kernel.outcome import Result
from sidecar.policy.schema import Admission, Endpoint, Quota, Service, Snapshot

MODEL = "m"
BYTES_PER_TOKEN = 4
CLASSES = tuple([kind.policy for kind in KINDS])
USUAL_ANSWER = 256
"""Tokens that an answer is reckoned at before it is known: what the pipeline begins with."""

_SUCCESS, _IGNORED = Result.SUCCESS, Result.IGNORED


class Gated:
    """One sidecar before the engines."""

    def __init__(
        self,
        stage: Stage,
        admission: Admission,
        quotas: tuple[Quota, ...] = (),
    ) -> None:
        self.stage = stage
        pods = stage.world.pods
        endpoints = tuple(Endpoint(url=f"http://pod-{pod.index}:8000") for pod in pods)
        policy = Service(name="chat", endpoints=endpoints, admission=admission)
        self._chance = Random(f"qos:{stage.seed}").random
        self._fleet = Fleet(self._chance)
        self._fleet.apply(Snapshot(version=1, services=(policy,), qos_policies=CLASSES), 0.0)
        self.service = self._fleet.services[ServiceName("chat")]
        self._indexes = {f"pod-{pod.index}:8000": pod.index for pod in pods}
        self._classes = [self._fleet.classes.by_name[kind.name] for kind in KINDS]
        gate = self.service.gate
        assert gate is not None
        self.gate: Gate = gate
        self._ledger = Ledger()
        self._ledger.use(quotas, 0.0)
        # One sidecar: its part of every budget is the whole.
        self._ledger.went_away(1, 0.0)
        self._held: dict[int, Reservation] = {}
        self._flying: dict[int, Flying] = {}
        self._due = float("inf")

    def start(self, asked: Asked) -> None:
        now = self.stage.clock.now
        kind = self._classes[asked.kind]
        tokens = asked.prompt_tokens + USUAL_ANSWER
        if self._ledger.any:
            held = self._ledger.reserve(self._ledger.budgets(f"tenant-{asked.tenant}", MODEL), tokens, now)
            if isinstance(held, Exceeded):
                self.stage.ended(asked, "quota_exceeded")
                return
            self._held[asked.id] = held
        ticket = Ticket(asked, kind, f"tenant-{asked.tenant}", MODEL, tokens, now, True)
        answer = self.gate.enter(ticket, self.service.pool(MODEL, None), now)
        if isinstance(answer, TurnedAway):
            self._leave(ticket, asked, 0)
            self.stage.ended(asked, answer.reason.value)
        elif answer:
            self._send(ticket)
        self._pump()

    def first(self, flying: Flying) -> None:
        ticket, choice = self._context(flying)
        now, asked = self.stage.clock.now, flying.asked
        self.gate.spoke(ticket, now)
        limiter = choice.node.limiter
        if limiter is not None:
            size = BYTES_PER_TOKEN * asked.prompt_tokens
            limiter.sample(now - asked.sent_at, size, choice.node.in_flight, now)
        self._pump()

    def over(self, flying: Flying, whole: bool) -> None:
        ticket, choice = self._context(flying)
        now, asked = self.stage.clock.now, flying.asked
        choice.node.in_flight -= 1
        choice.node.breaker.record(choice.permit, _SUCCESS if whole else _IGNORED, now, "")
        del self._flying[asked.id]
        self._leave(ticket, asked, asked.tokens if whole else asked.prompt_tokens)
        self._pump()

    def tick(self, now: float) -> None:
        for key, node in self.service.nodes.items():
            node.waiting = len(self.stage.world.pods[self._indexes[key]].queue)
        self._fleet.tick(now)
        self._pump()

    def _pump(self) -> None:
        """Sends whose turn it is, ends whose time is over, and comes back when the gate wants it."""
        gate, now = self.gate, self.stage.clock.now
        while True:
            for ticket, away in gate.turned_away(now):
                asked = ticket.waiter
                assert isinstance(asked, Asked)
                flying = self._flying.get(asked.id)
                if flying is not None:
                    flying.give_up(away.reason.value)
                else:
                    self._leave(ticket, asked, 0)
                    self.stage.ended(asked, away.reason.value)
            ticket_or_none = gate.take(self.service.pool, now)
            if ticket_or_none is None:
                break
            self._send(ticket_or_none)
        due = gate.due(now)
        if due < self._due or self._due <= now:
            self._due = due
            if due < float("inf"):
                self.stage.clock.at(due, self._wake, due)

    def _leave(self, ticket: Ticket, asked: Asked, tokens: int) -> None:
        now = self.stage.clock.now
        self.gate.leave(ticket, tokens, now)
        held = self._held.pop(asked.id, None)
        if held is not None and tokens:
            self._ledger.settle(held, tokens, now)
        elif held is not None:
            self._ledger.cancel(held, now)

    def _wake(self, due: float) -> None:
        if due == self._due:
            self._due = float("inf")
            self._pump()

    def _send(self, ticket: Ticket) -> None:
        now, asked = self.stage.clock.now, ticket.waiter
        assert isinstance(asked, Asked)
        choice = pick(self.service, None, None, MODEL, (), now, self._chance)
        assert isinstance(choice, Choice), choice
        choice.node.in_flight += 1
        ticket.node = choice.node
        self._flying[asked.id] = Flying(self.stage, self, asked, self._indexes[choice.node.key], (ticket, choice))

    def _context(self, flying: Flying) -> tuple[Ticket, Choice]:
        context = flying.context
        assert isinstance(context, tuple)
        return context


def enforced(*quotas: Quota, **changes: object) -> Callable[[Stage], Policy]:
    """The product with these quotas and numbers of `Admission`."""
    admission = Admission(**({"mode": "enforce"} | changes))  # type: ignore[arg-type]
    return lambda stage: Gated(stage, admission, quotas=quotas)


LEARNS_FROM = 16
"""Where the learned limit begins: at its default, 64, these engines would leave it nothing to learn."""
OVERSOLD = 1.5
"""Quotas are of so many times an even part: few tenants want all of theirs at once."""


def quota() -> Quota:
    """What a tenant may use in a minute: its even part of what the engines can do in this mix, oversold."""
    tokens = sum(rate_of(kind, 1.0) * (mean(kind.prompt) + mean(kind.output)) for kind in KINDS)
    return Quota(name="part", tokens_per_minute=int(OVERSOLD * 60.0 * tokens / TENANTS))


GATED: dict[str, Callable[[Stage], Policy]] = {
    "product": enforced(limit="fixed", concurrency=ENGINE.slots),
    "product, by class": enforced(limit="fixed", concurrency=ENGINE.slots, fairness="class"),
    "product, quotas": enforced(quota(), limit="fixed", concurrency=ENGINE.slots),
    "product, learned limit": enforced(limit="learned", concurrency=LEARNS_FROM),
}
