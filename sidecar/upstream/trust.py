"""Whether one engine is to be trusted: what it says of itself, and what it answers, held against its breaker.

For services whose `health_check.mode` is `truth`. A page that is answered proves nothing: engines hang, sleep and die
behind fronts that go on answering. So only two things are evidence, and each is the engine's own word:

1. It says that it sleeps, or that it has work and got nowhere with it (`core.progress`). What it does not tell, and a
   page that cannot be read, is no evidence of anything.
2. It did not give a token that it was asked for (`canary`), twice in a row. It is asked where nothing was answered for
   `canary_interval` and nothing is under way: real traffic is the better canary, and is judged by whom it is of. An
   engine that stopped answering its pages is asked at once.

What comes of it goes the way of every trip: through the floor and the guards, to the log, to operators.

3. What was opened so is tried by canaries, too, as soon as it may be probed and no longer says that it hangs: where
   nobody asks for anything, nobody else would try. A breaker that was opened for another reason is left to real
   requests: one token proves nothing about the prompts that failed.
4. A canary that ends well while the breaker is closed changes nothing there: it must not outweigh what clients met.
5. An engine lists more than models of language: of Triton's ensembles each part is one. Who is asked by a name that
   only the engine told is no evidence until it gave a token once.
6. Sidecars that share a log share their canaries: each waits as many intervals as there are of them, so that an engine
   is asked about once an interval by all together. One that is told of a suspicion asks at once: a quorum has to see.
"""

from collections.abc import Callable
from math import inf
from typing import Final

from sidecar.core import evidence
from sidecar.core.breaker import Permit, State
from sidecar.core.fleet import Fleet
from sidecar.core.pool import Node
from sidecar.core.progress import MOST_INTERVALS, Progress
from sidecar.core.service import ServiceState
from sidecar.kernel.outcome import Ending, Result
from sidecar.policy.schema import HealthCheck
from sidecar.proxy.attempt import Attempt
from sidecar.proxy.ports import Connector
from sidecar.proxy.watchdog import Timers, Watchdog
from sidecar.upstream.canary import Canary, HealthRecorder, is_named, models_to_ask

FAILED_CANARIES: Final = 2
"""In a row, that open a breaker: one may have met a restart, and each is a whole answer that did not come."""

JITTER: Final = 0.2
"""Of the wait between canaries, so that sidecars that were told something at one time do not go on in step."""

_LATE: Final = evidence.DEADLINES | {Ending.TOTAL_TIMEOUT}

_REFUSED: Final = frozenset({Ending.CLIENT_ERROR, Ending.CLIENT_ERROR_IN_BAND})

STALLED: Final = "stalled"
CANARY: Final = "canary"
WHYS: Final = frozenset({STALLED, CANARY})
"""Why a breaker opened, in a word, where a health check opened it."""


class Means:
    """What all of them share.

    `recorder` hears of breakers that they move and of canaries; `successes` says how many requests a node has answered
    well, `members` how many sidecars share their canaries.
    """

    __slots__ = ("connector", "fleet", "members", "recorder", "successes", "timers", "watchdog")

    def __init__(
        self,
        fleet: Fleet,
        connector: Connector,
        timers: Timers,
        watchdog: Watchdog,
        recorder: HealthRecorder,
        successes: Callable[[Node], int],
        members: Callable[[], int],
    ) -> None:
        self.fleet = fleet
        self.connector = connector
        self.timers = timers
        self.watchdog = watchdog
        self.recorder = recorder
        self.successes = successes
        self.members = members


class Trust:
    """One node: `read` or `unread` after each page of its load, `silent` if none is answered, `look` after a poll."""

    __slots__ = (
        "_answered",
        "_asked",
        "_canary",
        "_due",
        "_failures",
        "_means",
        "_nameless",
        "_node",
        "_permit",
        "_progress",
        "_proved",
        "_refused",
        "_refused_until",
        "_rule",
        "_sent_at",
        "_service",
        "_suspected",
        "_tells",
    )

    def __init__(self, means: Means, service: ServiceState, node: Node, rule: HealthCheck, *, nameless: bool) -> None:
        self._means = means
        self._service = service
        self._node = node
        self._rule = rule
        self._nameless = nameless
        self._progress = Progress(rule.stalled_s)
        self._canary: Canary | None = None
        self._permit: Permit | None = None  # of the canary under way, where it is a probe
        self._tells = False  # its pages tell whether it gets anywhere
        self._suspected = False  # it was asked because of what speaks against it now
        self._sent_at = -inf  # when a canary last went out
        self._asked = 0  # canaries that did not fail: whose turn it is
        self._proved: set[str] = set()  # models that the engine alone names and that gave a token
        self._failures = 0  # in a row
        self._refused = False  # the last one was, as no request that it takes
        self._refused_until = -inf  # a probe came to nothing: the next may be had then
        self._answered = means.successes(node)
        # -infinity: at once, whatever it does for others
        self._due = means.timers.time() + self._wait_s() * means.fleet.chance()

    def read(self, requests: int, mark: tuple[float, ...], asleep: bool) -> None:
        """What a page said."""
        self._tells = bool(mark)
        now = self._means.timers.time()
        said = self._progress.read(requests, mark, asleep, self._rule.interval_s, now)
        if said:
            self._distrust(STALLED, said, now)

    def unread(self, *, unknown: bool) -> None:
        """A page could not be read; `unknown`: too many in a row, so that what was said before holds no longer."""
        self._tells = False
        self._progress.unread()
        if unknown:
            self._progress.forget()

    def silent(self) -> None:
        """Too many pages in a row were not even answered: a token is asked for."""
        self._due = -inf

    def drop(self) -> None:
        """No more of it; a probe under way is given back."""
        canary, self._canary = self._canary, None
        if canary is not None:
            canary.stop()
        self._give_back(Result.IGNORED, Ending.ABANDONED)

    def look(self, now: float) -> None:
        """After each poll: whether a canary is to go out."""
        node = self._node
        breaker = node.breaker
        if self._canary is not None or self._progress.hangs or node.draining:
            return
        if breaker.state is not State.CLOSED:
            # Of an order, or of what clients met, it is another cause.
            if breaker.cause in WHYS and now >= self._refused_until and breaker.waited(now):
                self._probe(now)
            return
        if breaker.unblemished:
            self._suspected = False
        elif not self._suspected:
            self._suspected = True
            self._due = -inf
        if now < self._due:
            return
        answered = self._means.successes(node)
        if answered != self._answered or node.in_flight:
            # Others' requests are judged, by whom they are of.
            self._answered = answered
            self._failures = 0
            self._wait(now)
        elif self._due > -inf and self._works_for_others(now):
            self._wait(self._progress.gave_at)
        else:
            self._wait(now)
            self._send(self._models())

    def _works_for_others(self, now: float) -> bool:
        rule = self._rule
        # What moved right after a canary was the canary.
        ours_until = self._sent_at + MOST_INTERVALS * rule.interval_s
        return self._progress.gave_at > max(now - rule.canary_interval_s, ours_until)

    def _probe(self, now: float) -> None:
        models = tuple([model for model in self._models() if self._owes(model)])
        permit = self._node.breaker.probe(now) if models else None
        if permit is not None:
            if permit.moved is not None:
                self._means.recorder.transition(permit.moved)
            self._permit = permit
            if not self._send(models):
                self._give_back(Result.IGNORED, Ending.ABANDONED)

    def _models(self) -> tuple[str, ...]:
        return models_to_ask(self._service, self._node, nameless=self._nameless)

    def _owes(self, model: str) -> bool:
        """Whether a token of `model` is one that it has to give."""
        return model in self._proved or is_named(self._service, self._node, model)

    def _send(self, models: tuple[str, ...]) -> bool:
        means, service = self._means, self._service
        if not models:
            return False
        model = models[self._asked % len(models)]
        # Who tells whether it gets anywhere is known to hang sooner; any other may have a queue, as for clients.
        within_s = float(self._rule.stalled_s) if self._tells else service.times.first_token_s
        request_id = b"health-%012x" % int(means.fleet.chance() * (1 << 48))
        self._canary = canary = Canary(self._node, model, request_id, means.timers.time, self._ended)
        if canary.start(service, means.connector, means.watchdog, within_s):
            self._sent_at = canary.sent_at
            return True
        self._canary = None
        return False

    def _ended(self, result: Result, attempt: Attempt) -> None:
        canary, self._canary = self._canary, None
        ending = attempt.ending
        assert canary is not None and ending is not None
        means, node, now = self._means, self._node, self._means.timers.time()
        if result is Result.FAILURE and not self._counts(ending, canary):
            result = Result.IGNORED
        means.recorder.canary(node, ending, result)
        if result is not Result.FAILURE:
            self._asked += 1
        refused = ending in _REFUSED
        if refused and not self._refused:
            status = "" if attempt.head is None else f"{attempt.head.status} "
            means.recorder.canary_refused(node, f"{status}{attempt.detail[:200]}".rstrip())
        self._refused = refused
        if result is Result.OVERLOADED:
            # Not for as long as it says: that may be of those who have no key, and no client would find out.
            self._service.overloaded(node, None, now)
        if self._permit is not None:
            self._failures = 0
            if result is not Result.SUCCESS and result is not Result.FAILURE:
                self._refused_until = now + float(self._rule.canary_interval_s)
            self._give_back(result, ending)
        elif result is Result.SUCCESS:
            self._failures = 0
            if not is_named(self._service, node, canary.model):
                self._proved.intersection_update(self._models())
                self._proved.add(canary.model)
        elif result is Result.FAILURE:
            self._failures += 1
            self._due = -inf
            if self._failures >= FAILED_CANARIES:
                said = f"{self._failures} requests of ours for one token failed in a row, the last: {ending}"
                if attempt.detail:
                    said += f" ({attempt.detail[:200]})"
                self._failures = 0
                self._wait(now)
                self._distrust(CANARY, said, now)

    def _counts(self, ending: Ending, canary: Canary) -> bool:
        """Whether a failure is the engine's."""
        if ending in _LATE:
            detection = self._service.detection
            if self._progress.moved_at > canary.sent_at or (detection is not None and detection.normal.overload):
                return False  # it worked for others, who came first; or all are late, of whoever asks
        return ending is Ending.CONNECT_FAILED or self._owes(canary.model)

    def _distrust(self, why: str, said: str, now: float) -> None:
        moved = evidence.distrust(self._service, self._node, why, said, now)
        if moved is not None:
            self._means.recorder.transition(moved)

    def _give_back(self, result: Result, ending: Ending) -> None:
        permit, self._permit = self._permit, None
        if permit is not None:
            moved = self._node.breaker.record(permit, result, self._means.timers.time(), ending)
            if moved is not None:
                self._means.recorder.transition(moved)

    def _wait(self, since: float) -> None:
        self._due = since + self._wait_s() * (1.0 - JITTER * self._means.fleet.chance())

    def _wait_s(self) -> float:
        return float(self._rule.canary_interval_s) * max(1, self._means.members())
