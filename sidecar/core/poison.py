"""Poison: prompts that crash or hang the engines they are sent to, told by a fingerprint, for a while.

A session's breaker stops the client that sends poison as long as one knows whose it is; nobody knows of a request that
names no session, and a retry carries it to the next node by itself. What is remembered here is the prompt, and of it a
keyed hash only: after `nodes` endpoints have died of it, it is not sent to one more.

A node that dies takes down all that it was serving, so most who were there are innocent. Rules, each against one way of
naming them:

1. A strike is a node's death with the request on it. Of one node it counts once: a node that fails all says nothing
   about any. With one endpoint nothing is ever condemned, unless `nodes` is 1.
2. A death that took up to `ALONE` requests names them; one that took more names nobody for sure, and it takes one death
   more than `nodes` to condemn by those. Who was there by chance is served elsewhere, and has to be unlucky again.
3. The first strike is when the node died. What was sent to it later, while it has served nobody since, is no evidence:
   else an outage would condemn all traffic.
4. Of a crash only what was sent after the prompt's first strike adds to it: copies of one prompt that were on several
   nodes when these went down together (a load test, a monitor, a deploy gone wrong) were sent when nothing was known of
   it. A hang is not judged so: it takes a deadline until it is news.
5. A good answer, anywhere, clears the prompt, and for `PROVEN_S` none of its deaths names it (as in 2). One that was
   under way when its node is said to have died shows that the node did not: the strikes of that death are withdrawn.
   (Not within `SETTLING_S`: an answer may be read late.)
6. Refusing is there to protect others. Where nobody else was served since the prompt was condemned, it protects nobody:
   then, every `TRIAL_S`, one request with it may go to a node that it is said to have killed, never to another. Traffic
   that is all one prompt so outlives an outage of everything, which looks the same as poison.
7. After `ttl` without a further death a prompt is forgotten, condemned or not: refusing does not prolong it. Of more
   than `max`, those are forgotten first that are not condemned, and of these the oldest: engines that hang make
   suspects by the hundred.

Costs nothing while nobody is suspected: `armed` is all that a request asks then. After that the length of its prompt
decides first, and only who is as long as a suspect is hashed.
"""

from collections import OrderedDict
from hashlib import blake2b
from math import inf
from typing import Final

import msgspec

from sidecar.kernel.ids import EndpointKey
from sidecar.policy.schema import Poison

ALONE: Final = 4
"""How many requests may die with a node and each be named. An engine that is hardly used has about so many, and of
four at most three are innocent, who must then meet another death within `ttl`, without a good answer between."""

SETTLING_S: Final = 1.0
"""An answer that the engine sent before it died may be read after the news of its death: by a turn of the loop, or by
a second where the loop is busy."""

PROVEN_S: Final = 60.0
"""How long a prompt that was suspected, and then served, is taken to be none that kills for sure. Not prolonged by more
good answers: traffic that is all one prompt would be looked at for ever."""

TRIAL_S: Final = 15.0
"""How long after the last death or trial a condemned prompt may be tried, where nobody else is served. About as long
as a node's breaker waits; an engine that died takes longer to come back."""

KEPT_BYTES: Final = 4 * 1024
"""Bodies up to this size are kept while their streams flow, for an engine may die in mid-answer. Longer ones can be
told only until their answer begins: ten thousand streams must not hold gigabytes."""

PRINT_BYTES: Final = 16  # two prompts alike by chance: never, with 1,000 in the table


class Condemned(msgspec.Struct, frozen=True):
    """A prompt was condemned. `mark` tells it from others in this process; nothing can be read from it."""

    service: str
    mark: str
    endpoints: tuple[EndpointKey, ...]
    ttl_s: float
    mode: str


class Suspect:
    """A prompt that was on nodes when they died, first at `since`. `deaths`: whether that node's death named it."""

    __slots__ = ("at", "condemned", "condemned_at", "deaths", "length", "since", "tried_at")

    def __init__(self, length: int, at: float) -> None:
        self.length = length
        self.at = at
        self.since = at
        self.deaths: dict[EndpointKey, bool] = {}
        self.condemned = False
        self.condemned_at = at
        self.tried_at = at


class Proof:
    """A good answer to a prompt that had been suspected, at `at`."""

    __slots__ = ("at", "length")

    def __init__(self, length: int, at: float) -> None:
        self.length = length
        self.at = at


class Death:
    """A node died at `at` and has served nobody since; `marks` are those it took down, as they became known."""

    __slots__ = ("at", "marks")

    def __init__(self, at: float) -> None:
        self.at = at
        self.marks: list[bytes] = []


class Suspects:
    """The prompts of one service that nodes died of. `key` makes the fingerprints ours alone; <= 64 bytes.

    `now` is monotonic seconds; a clock that goes backwards makes nothing last longer than `ttl` from then.
    `armed` False: nobody is suspected, and nothing else here needs to be asked.
    """

    __slots__ = (
        "_deaths",
        "_key",
        "_latest",
        "_lengths",
        "_max",
        "_mode",
        "_nodes",
        "_others_at",
        "_proven",
        "_service",
        "_table",
        "_ttl_s",
        "armed",
        "condemnations",
        "kept_bytes",
        "shadow_refused",
    )

    def __init__(self, service: str, rule: Poison, key: bytes) -> None:
        self._service = service
        self._key = key
        self._table: OrderedDict[bytes, Suspect] = OrderedDict()
        self._proven: OrderedDict[bytes, Proof] = OrderedDict()
        self._lengths: dict[int, int] = {}
        self._deaths: dict[EndpointKey, Death] = {}
        self._latest = 0.0
        self._others_at = -inf
        self.armed = False
        self.condemnations = 0
        self.shadow_refused = 0
        self.use(rule)

    def __len__(self) -> int:
        return len(self._table)

    def use(self, rule: Poison) -> None:
        """Takes new numbers and keeps what is known; `off` forgets it."""
        self._mode = rule.mode
        self._nodes = rule.nodes
        self._ttl_s = float(rule.ttl_s)
        self._max = rule.max
        self.kept_bytes = 0 if rule.mode == "off" else KEPT_BYTES
        if rule.mode == "off":
            self._deaths.clear()
            while self._proven:
                self._short(self._proven.popitem()[1].length)
        while self._table and (len(self._table) > self._max or rule.mode == "off"):
            self._forget(self._least())
        for suspect in self._table.values():
            suspect.condemned = self._enough(suspect)
        self._settle()

    @property
    def mode(self) -> str:
        """Enforce, shadow or off."""
        return self._mode

    @property
    def condemned(self) -> int:
        """How many prompts are refused now."""
        return sum(suspect.condemned for suspect in self._table.values())

    def as_long(self, length: int, now: float) -> bool:
        """Whether some suspect's prompt has this length: if not, no mark needs to be made."""
        self._expire(now)
        return length in self._lengths

    def suspected(self, mark: bytes) -> bool:
        """Whether a node died with this prompt on it, and nobody answered it well since."""
        return mark in self._table

    def mark(self, model: str, prompt: bytes) -> bytes:
        """The fingerprint of a prompt: the same for the same bytes and model, in this process."""
        digest = blake2b(model.encode("utf-8", "surrogatepass"), key=self._key, digest_size=PRINT_BYTES)
        digest.update(b"\0")
        digest.update(prompt)
        return digest.digest()

    def refuses(self, mark: bytes, now: float) -> bool:
        """Whether the prompt must not be sent; in shadow mode it is counted instead."""
        self._expire(now)
        suspect = self._table.get(mark)
        if suspect is None or not suspect.condemned:
            return False
        if self._mode == "shadow":
            self.shadow_refused += 1
            return False
        return True

    def strike(
        self,
        mark: bytes,
        length: int,
        node: EndpointKey,
        sent_at: float,
        others: int,
        now: float,
        *,
        hung: bool = False,
    ) -> Condemned | None:
        """The node died with this request on it; `others` are still out there. Returns the condemnation, if it is one.

        `sent_at` is when the node got the request. `hung`: it did not crash, but fell silent.
        """
        if self._mode == "off":
            return None
        self._expire(now)
        death = self._deaths.get(node)
        if death is None:
            death = self._deaths[node] = Death(now)
        elif sent_at > death.at:
            return None
        if len(death.marks) < self._max:
            death.marks.append(mark)
        self.armed = True
        suspect = self._table.get(mark)
        if suspect is None:
            suspect = self._table[mark] = Suspect(length, now)
            self._long(length)
        elif not hung and sent_at < suspect.since and node not in suspect.deaths:
            return None
        else:
            self._table.move_to_end(mark)
        suspect.at = suspect.tried_at = now
        named = len(death.marks) + others <= ALONE and mark not in self._proven
        suspect.deaths[node] = named or suspect.deaths.get(node, False)
        condemned = not suspect.condemned and self._enough(suspect)
        if condemned:
            suspect.condemned = True
            suspect.condemned_at = now
        if len(self._table) > self._max:
            self._forget(self._least())
        if not condemned:
            return None
        self.condemnations += 1
        return Condemned(self._service, mark[:4].hex(), tuple(suspect.deaths), self._ttl_s, self._mode)

    def trial(self, mark: bytes, now: float) -> tuple[EndpointKey, ...]:
        """The nodes that may be tried with a refused prompt, this once; empty: none. Never one that it did not kill."""
        suspect = self._table.get(mark)
        if suspect is None or now < suspect.tried_at + TRIAL_S or self._others_at >= suspect.condemned_at:
            return ()
        suspect.tried_at = now
        return tuple(suspect.deaths)

    def served(self, mark: bytes, node: EndpointKey, sent_at: float, now: float) -> None:
        """The node gave a good answer to what it got at `sent_at`; `mark` may be empty. Asked only while `armed`."""
        if mark not in self._table and mark not in self._proven:
            self._others_at = now
        death = self._deaths.get(node)
        if death is None:
            return
        if sent_at <= death.at:
            if now < death.at + SETTLING_S:
                return
            for mark in death.marks:
                self._withdraw(mark, node)
        del self._deaths[node]
        self._settle()

    def clear(self, mark: bytes, now: float) -> None:
        """The prompt got a good answer: it is no poison."""
        suspect = self._table.get(mark)
        if suspect is None:
            return
        self._forget(mark)
        if mark not in self._proven:
            self._proven[mark] = Proof(suspect.length, now)
            self._long(suspect.length)
            if len(self._proven) > self._max:
                self._short(self._proven.popitem(last=False)[1].length)
        self._settle()

    def _enough(self, suspect: Suspect) -> bool:
        deaths = suspect.deaths
        return len(deaths) > self._nodes or sum(deaths.values()) >= self._nodes

    def _withdraw(self, mark: bytes, node: EndpointKey) -> None:
        suspect = self._table.get(mark)
        if suspect is None or suspect.deaths.pop(node, None) is None:
            return
        suspect.condemned = suspect.condemned and self._enough(suspect)
        if not suspect.deaths:
            self._forget(mark)

    def _expire(self, now: float) -> None:
        """Forgets what is over. Both tables are in the order of their times, so only the fronts are looked at."""
        if now < self._latest:
            # The clock went back: from here on everything has its time, and not longer.
            for suspect in self._table.values():
                suspect.at = min(suspect.at, now)
                suspect.since = min(suspect.since, now)
                suspect.tried_at = min(suspect.tried_at, now)
                suspect.condemned_at = min(suspect.condemned_at, now)
            self._others_at = min(self._others_at, now)
            for death in self._deaths.values():
                death.at = min(death.at, now)
            for proof in self._proven.values():
                proof.at = min(proof.at, now)
        self._latest = now
        oldest_kept = now - self._ttl_s
        while self._table:
            mark, suspect = next(iter(self._table.items()))
            if suspect.at > oldest_kept:
                break
            self._forget(mark)
        while self._deaths:
            node, death = next(iter(self._deaths.items()))
            if death.at > oldest_kept:
                break
            del self._deaths[node]
        while self._proven:
            mark, proof = next(iter(self._proven.items()))
            if proof.at > now - PROVEN_S:
                break
            del self._proven[mark]
            self._short(proof.length)
        self._settle()

    def _least(self) -> bytes:
        """Whose memory is worth least: the oldest that is not condemned, or the oldest of all."""
        for mark, suspect in self._table.items():
            if not suspect.condemned:
                return mark
        return next(iter(self._table))

    def _forget(self, mark: bytes) -> None:
        self._short(self._table.pop(mark).length)

    def _long(self, length: int) -> None:
        self._lengths[length] = self._lengths.get(length, 0) + 1

    def _short(self, length: int) -> None:
        left = self._lengths[length] - 1
        if left:
            self._lengths[length] = left
        else:
            del self._lengths[length]

    def _settle(self) -> None:
        self.armed = bool(self._table or self._deaths or self._proven)
