"""Which tenants have used more than their part of a service lately, over all of its classes.

Fair shares inside a class (`turns`) do not help a tenant's batches against the voices of another that floods: by class,
the flood goes first. Where the policy asks for it (`fairness: service`), who has used more than its part goes behind
those who have not, whatever its class; its part is that of its weight in what all used who came lately. Nobody is held
back from what nobody else asks for: going behind costs next to nothing while no one waits (`headroom`). It is rough
justice: up to three quarters more than its part, less where that is most of the service, a tenant goes by class still:
use comes in bursts, and a burst of voices is not to wait behind a batch. Who went behind comes back when it is at its
part.

What was used fades (half of it counts after 42 s), for all alike. So instead of taking from all that was used before,
what is used counts for more the later it is (forward decay, Cormode et al., ICDE 2009): by e each span. Then a tenant's
figure changes only when it uses something itself, and a heap of them stays a heap.
"""

from collections import OrderedDict
from heapq import heapify, heappop, heappush, heapreplace
from math import exp, inf
from typing import Final

SPAN_S: Final = 60.0  # in which e times less counts; in 30 s the bursts of a tenant that keeps to its part exceed it
MORE: Final = 0.75  # of its part, times what is not its part: with less its bursts put it behind (bench.qos)
LOOKED: Final = 128  # tenants looked at in one call: there may be 100,000, and the loop waits
FEW: Final = 2  # those looked at whenever one is refunded, beyond so many: there are never many more
SLACK: Final = 64  # entries of the heap that may be out of date, beyond one per tenant that is behind
ABOUT: Final = 1.0 + 1e-6  # sums of the same tokens, over a weight and not, are not the same to the last bit
SPANS: Final = 400.0  # after which figures begin anew, once in seven hours: e to the 709th is what a float can hold


class Payer:
    """A tenant, over all classes. `used`, in tokens over its weight, each times what it counts for. `behind`: it has
    used more than its part."""

    __slots__ = ("active", "behind", "entry", "shares", "tenant", "used", "weight")

    def __init__(self, tenant: str, weight: float) -> None:
        self.tenant = tenant
        self.weight = weight
        self.used = 0.0
        self.behind = False
        self.entry = 0
        self.shares = 0
        """Classes and sets of endpoints that know it: forgotten by all, it is forgotten here."""
        self.active = 0
        """Those of them in which something waits or runs."""


class Parts:
    """All tenants of a gate. `turned`: those that went behind or came back, for whoever sorts them to empty."""

    __slots__ = (
        "_ahead",
        "_at",
        "_behind",
        "_counts",
        "_entries",
        "_idle",
        "_payers",
        "_since",
        "_total",
        "_weight",
        "turned",
    )

    def __init__(self, now: float) -> None:
        self._payers: dict[str, Payer] = {}
        self._total = 0.0
        self._since = now
        self._at = now
        self._counts = 1.0
        """What a token counts for `at` that moment: 1 at first, e one span later."""
        self._weight = 0.0
        """Of those who came lately."""
        self._idle: OrderedDict[Payer, float] = OrderedDict()
        """Of whom nothing waits or runs, and since when."""
        self._ahead: list[tuple[float, int, Payer]] = []
        self._entries = 0
        self._behind = 0
        self.turned: list[Payer] = []

    def of(self, tenant: str, weight: float) -> Payer:
        """The tenant, known to one more."""
        payer = self._payers.get(tenant)
        if payer is None:
            payer = self._payers[tenant] = Payer(tenant, weight)
        payer.shares += 1
        return payer

    def forget(self, payer: Payer) -> None:
        """Known to one less."""
        payer.shares -= 1
        if payer.shares:
            return
        del self._payers[payer.tenant]
        if self._idle.pop(payer, None) is not None:
            self._weight = max(0.0, self._weight - payer.weight)
        if payer.behind:
            self._return(payer)

    def weigh(self, weights: dict[str, float]) -> None:
        """Other weights."""
        self._weight = 0.0
        for payer in self._payers.values():
            weight = weights.get(payer.tenant, 1.0)
            payer.used *= payer.weight / weight
            payer.weight = weight
            if payer.active or payer in self._idle:
                self._weight += weight
            if payer.behind:
                self._note(payer)

    def comes(self, payer: Payer) -> None:
        """Something of it waits or runs in one more class."""
        payer.active += 1
        if payer.active == 1 and self._idle.pop(payer, None) is None:
            self._weight += payer.weight

    def goes(self, payer: Payer, now: float) -> None:
        """Nothing of it does in one of them any more."""
        payer.active -= 1
        if not payer.active:
            self._idle[payer] = now
            self._retire(FEW, now)

    def use(self, payer: Payer, tokens: int, now: float) -> None:
        """It is thought to use so many tokens."""
        if now > self._at:
            if now - self._since > SPANS * SPAN_S:
                self._begin_anew(now)
            self._at = now
            self._counts = exp((now - self._since) / SPAN_S)
        self._add(payer, tokens * self._counts)
        self.judge(payer)

    def settle(self, payer: Payer, tokens: int, at: float) -> None:
        """It used so many more than was thought at that moment, or less (negative): they count for what they did then,
        or who waits long for nothing would get back more than it gave."""
        self._add(payer, tokens * exp(min(0.0, at - self._at) / SPAN_S) * self._counts)
        if payer.behind and tokens < 0:
            self._note(payer)
            if self._behind > LOOKED:
                self._bring_back(FEW)
        else:
            self.judge(payer)

    def _add(self, payer: Payer, counts: float) -> None:
        before = payer.used
        payer.used = max(0.0, before + counts / payer.weight)
        # By what it changed: what one tenant gets back is not taken from what the others used.
        self._total = max(0.0, self._total + (payer.used - before) * payer.weight)

    def judge(self, payer: Payer) -> None:
        """Whether it has used more than its part: others may have come, and made that less."""
        if not payer.behind and self.floods(payer):
            payer.behind = True
            self._behind += 1
            self._note(payer)
            self.turned.append(payer)

    def floods(self, payer: Payer) -> bool:
        """Whether it has used so much more than its part as puts it behind: who is behind may have less by now."""
        if self._weight <= 0.0:
            return False  # all were idle for long
        part = min(1.0, payer.weight / self._weight)
        return payer.used > ABOUT * (1.0 + MORE * (1.0 - part)) * self._total / self._weight

    def look(self, now: float) -> None:
        """Lets those come back whose part it is again; of very many a few each time, the first of them first."""
        self._retire(LOOKED, now)
        self._bring_back(LOOKED)

    def _bring_back(self, most: int) -> None:
        heap = self._ahead
        level = ABOUT * self._total / self._weight if self._weight > 0.0 else inf
        for _ in range(most):
            if not heap:
                return
            used, entry, payer = heap[0]
            if entry != payer.entry:
                heappop(heap)
            elif payer.used > used:
                heapreplace(heap, (payer.used, entry, payer))
            elif payer.used <= level:
                heappop(heap)
                self._return(payer)
                self.turned.append(payer)
            else:
                return

    def _retire(self, most: int, now: float) -> None:
        """Those who were idle for so long have no part any more; at most so many at once."""
        idle = self._idle
        for _ in range(min(most, len(idle))):
            oldest, since = next(iter(idle.items()))
            if now - since < SPAN_S:
                return
            del idle[oldest]
            self._weight = max(0.0, self._weight - oldest.weight)

    def _return(self, payer: Payer) -> None:
        payer.behind = False
        payer.entry = 0
        self._behind -= 1

    def _note(self, payer: Payer) -> None:
        self._entries += 1
        payer.entry = self._entries
        heappush(self._ahead, (payer.used, payer.entry, payer))
        if len(self._ahead) > 2 * self._behind + SLACK:
            self._ahead = [each for each in self._ahead if each[1] == each[2].entry]
            heapify(self._ahead)

    def _begin_anew(self, now: float) -> None:
        """A token counts for 1 again."""
        less = exp((self._since - now) / SPAN_S)
        for payer in self._payers.values():
            payer.used *= less
        self._total *= less
        self._since = now
        self._ahead = [(payer.used, payer.entry, payer) for payer in self._payers.values() if payer.behind]
        heapify(self._ahead)
