"""What one request was counted as, what was taken out of its tenant's budgets, and its ticket at a service's gate.

Made only for requests that a quota fits or whose service has a gate; all others pay for finding that out and no more.
"""

from typing import Final

from sidecar.core.classes import QosClass
from sidecar.core.gate.admit import Ticket
from sidecar.core.quotas.quota import Budget, Ledger, Reservation
from sidecar.core.service import ServiceState
from sidecar.kernel.ids import VersionName
from sidecar.proxy.door import Door

UNREAD_TOKENS: Final = 256
"""What a request takes whose body streams through unread: an upload of speech, a tunnel, what we do not know."""

MOST_TOKENS: Final = 1 << 24
"""What one request is ever reckoned with, whatever it asks for and whatever its engine says of it: shares and budgets
are sums of these, and one number beyond all reason in a sum is there for good."""


class Admission:
    """One request's. `prompt_tokens` 0: not counted yet; `how` it was (`exact`, `cached`, `estimated`).

    `tokens`: what it is expected to use in all, `reserved` of it in budgets. `prompt` as it was counted, empty where it
    is not kept. `queued_s`: how long it waited for its turn, None if it did not. `hurried`: there is no time to wait
    for a count. `version`: what its turn was given for. `answers`: how many it asks for, of all its prompts.
    """

    __slots__ = (
        "answers",
        "budgets",
        "door",
        "how",
        "hurried",
        "prompt",
        "prompt_tokens",
        "qos",
        "queued_at",
        "queued_s",
        "reservation",
        "reserved",
        "ticket",
        "tokens",
        "version",
    )

    def __init__(self, qos: QosClass, budgets: tuple[Budget, ...]) -> None:
        self.qos = qos
        self.budgets = budgets
        self.reservation: Reservation | None = None
        self.reserved = 0
        self.prompt = b""
        self.prompt_tokens = 0
        self.answers = 1
        self.tokens = 0
        self.how = ""
        self.hurried = False
        self.ticket: Ticket | None = None
        self.door: Door | None = None
        self.queued_at = 0.0
        self.queued_s: float | None = None
        self.version: VersionName | None = None

    @property
    def enforced(self) -> bool:
        """Whether a budget of it may refuse."""
        return any(budget.rule.enforced for budget in self.budgets)

    def chosen(self, service: ServiceState, model: str) -> bool:
        """Whether `version` is the one that its turn was given for: once, for the first attempt, and if it is there."""
        ticket = self.ticket
        if ticket is None or ticket.node is not None:
            return False
        self.version = ticket.version
        return ticket.version is None or len(service.pool(model, ticket.version).nodes) > 0

    def let_in(self, now: float) -> None:
        """It waits no more: its turn came, or it goes without."""
        if self.queued_at:
            self.queued_s = (self.queued_s or 0.0) + now - self.queued_at
            self.queued_at = 0.0

    def leave(self, tokens: int, now: float) -> None:
        """Give its place at the gate to others; again is harmless. `tokens`: what the engine really had to do."""
        ticket, door = self.ticket, self.door
        if ticket is not None and door is not None:
            self.ticket = self.door = None
            door.left(ticket, tokens, now)

    def settle(self, ledger: Ledger, tokens: int, now: float, *, asked: bool) -> None:
        """Pay for what was used, once; `asked`: an engine was, and so it is a request."""
        reservation, self.reservation = self.reservation, None
        if reservation is None:
            return
        if asked:
            ledger.settle(reservation, tokens, now)
        else:
            ledger.cancel(reservation, now)
