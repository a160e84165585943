"""Rollouts on this sidecar: observes them, tells what it saw, hears what all saw, and moves them on. Nobody leads.

```
the table says a rollout's step -> a Trial for it: the request path observes -> a tally into the log's evidence
the log's evidence, everybody's in one order -> the Trial -> a verdict -> the table's next state, by compare-and-set
```

The evidence of a service lies in one shard's stream, in one order for all; whoever has read as much of it as another
has counted the same. So every sidecar judges by itself, the first to conclude writes, and for the others their
conclusion is about a table that is no more: the log refuses it. A sidecar that dies takes its last second along and
nothing else.

1. What is judged is what was read back from the log, ours too: what did not get there counts for nobody. It is read
   here by a position of our own and not as it happens to come, so that who joins in the middle of a step, or was away
   from the log, reads on from where it was, in the same order as all.
2. An observer numbers what it tells of a step, from 0. If the log's oldest entry is later than where we are to read
   on, something may have been trimmed: then an observer whose next number is not the one that is due has told what we
   will never know. Who missed something does not judge the step: others did not, and everybody says with each tally
   whether it is one of those. If none of those was heard of for `ORPHANED_S`, nobody may have all of it any more (every
   sidecar was started anew in the middle of a long step, say), and one judges with what it has: fewer answers, and no
   worse ones. That is another test of the same step, with a false alarm rate of its own.
3. With the log away nothing is judged. What is seen meanwhile is counted on, and told on return.
4. Attempts that began before the step was known here are not observed. Of a version that just got its traffic the
   short answers end first: beside a baseline whose long ones are under way for minutes it would seem to break off.
5. A sidecar that suspects itself tells nothing of its endpoints (`txlog.replica`), but it does tell of a trial: who
   sees both versions fail sees no difference.
6. A canary of which nobody may serve tells nothing any more: its share goes to the others by itself, request by request
   (`core.split`). If the log says of all its endpoints that they are open, for `DEAD_S`, it failed: whoever waits for
   its end would wait for ever.
7. What cannot be concluded is said once a step, as a notice: a verdict that stays unclear when the step has had its
   time and its answers, a rollback that has nowhere to go to.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

from sidecar.core import rollout as machine
from sidecar.core.canary import Trial
from sidecar.core.desk import Desk, Notice, TableView
from sidecar.core.fleet import Fleet
from sidecar.core.revise import Accepted, Refused
from sidecar.core.service import ServiceState
from sidecar.core.table import Rollout, Table
from sidecar.core.verdict import Verdict
from sidecar.kernel.ids import ServiceName
from sidecar.txlog.codec import Unreadable, route_key, shard_of
from sidecar.txlog.log import State
from sidecar.txlog.store import Entry, StoreDown
from sidecar.txlog.summary import (
    FORGOTTEN_MS,
    MOST_OBSERVERS,
    Observed,
    Summary,
    decode,
    decode_trial,
    encode_trial,
)

TICK_S: Final = 1.0
SHORTEST_TICK_S: Final = 0.1
BLOCKS: Final = 30
"""Of a step: a short one is looked at more often than once a second."""
PAGE: Final = 200
ORPHANED_S: Final = 60.0
"""A minute with a bad canary, where nobody who knew more is left; and longer than a sidecar is without a word that has
traffic."""
EARLIER_MS: Final = 2_000
"""Evidence is read from so long before a step began by its writer's clock: that one only estimates the server's."""
DEAD_S: Final = 300.0
"""Engines take minutes to load a model: one that is started anew is no failed canary."""
STALE_S: Final = 5.0
"""So long without a read, and something may have been trimmed before the next."""


class Say(Protocol):
    """Logs an event; never waits, never raises."""

    def __call__(self, level: str, event: str, **fields: Any) -> None: ...


class Change(Protocol):
    """`Routes.change`: writes what `revise` makes of the table that stands, if it still stands then."""

    async def __call__(
        self, service: str, revise: Callable[[Table], Table | Refused], by: str, why: str, evidence: str = ""
    ) -> Accepted | Refused: ...


class Log(Protocol):
    """What is asked of the transaction log."""

    @property
    def state(self) -> State: ...

    async def page(self, shard: int, *, evidence: bool, after: str, count: int) -> list[Entry]: ...


class Counts:
    """What happened, since the start; metrics read it."""

    __slots__ = ("concluded", "foreign", "lost", "told", "unreadable")

    def __init__(self) -> None:
        self.told = 0
        """Tallies of ours."""
        self.foreign = 0
        """Tallies read back, of all sidecars, that were added."""
        self.unreadable = 0
        """Tallies that are none, of this release."""
        self.lost = 0
        """Steps of which this sidecar missed something."""
        self.concluded: dict[str, int] = {}
        """Changes that this sidecar wrote, by why."""


class Followed:
    """One step of one service's rollout, as this sidecar follows it. Milliseconds are the log server's, `read_at` is
    monotonic."""

    __slots__ = (
        "_checked",
        "_heard",
        "_needle",
        "_parts",
        "cursor",
        "dead_us",
        "doubted",
        "part",
        "read_at",
        "rollout",
        "said",
        "table",
        "trial",
        "verdict",
        "whole",
        "whole_ms",
    )

    def __init__(self, table: Table, rollout: Rollout, now_ms: int) -> None:
        self.table = table
        self.rollout = rollout
        self.trial = Trial(rollout.id, rollout.step, rollout.version, rollout.plan.baseline, rollout.plan)
        self.cursor = f"{max(0, rollout.since_us // 1000 - EARLIER_MS)}-0"
        self.read_at: float | None = None
        self.whole = True
        self.whole_ms = now_ms
        """When somebody was last heard of who missed nothing; at first, when we began to listen."""
        self.doubted = False
        self.dead_us = 0
        """Since when all agree that none of the canary's endpoints may serve; 0: some may."""
        self.part = 0
        """The number of the next tally of ours."""
        self.said = ""
        self.verdict: Verdict | None = None
        self._needle = rollout.id.encode("utf-8", "surrogatepass")
        self._heard: dict[str, tuple[int, int]] = {}
        self._parts: dict[str, int] = {}
        self._checked: set[str] = set()

    @property
    def key(self) -> tuple[str, int]:
        """What evidence must name to count here."""
        return self.rollout.id, self.rollout.step

    def doubt(self) -> None:
        """What lies between the position and the next entry may have been trimmed."""
        self.doubted = True
        self._checked.clear()

    def names(self, entry: Entry) -> bool:
        """Whether an entry may be about this rollout: most are not, and are not decoded."""
        return self._needle in entry.data

    def add(self, seen: Summary, told: Observed, at_ms: int) -> bool:
        """Adds what an observer told; False if it was heard before."""
        observer = seen.observer
        last, heard_ms = self._heard.get(observer, (-1, at_ms))
        if seen.seq <= last and at_ms - heard_ms < FORGOTTEN_MS:
            return False
        if len(self._heard) >= MOST_OBSERVERS and observer not in self._heard:
            return False
        self._heard[observer] = seen.seq, at_ms
        due = self._parts.get(observer, 0)
        if self.doubted and observer not in self._checked:
            self._checked.add(observer)
            # From 0 anew is who was restarted.
            self.whole = self.whole and told.part in (0, due)
        self._parts[observer] = told.part + 1
        if told.whole:
            self.whole_ms = max(self.whole_ms, at_ms)
        self.trial.add(told.tally, at_ms)
        return True

    def may_judge(self, now_ms: int) -> bool:
        """Whether what was read is all there is, or nobody is left who read more."""
        return self.whole or now_ms - self.whole_ms > 1000 * ORPHANED_S


class Rollouts:
    """The rollouts of one sidecar. `tell` appends a tally to the evidence, `server_us` is the log server's clock.

    `moved` is told of a service and that its rollout came to a `step`, or to which phase, whoever did it.
    """

    def __init__(
        self,
        desk: Desk,
        change: Change,
        log: Log,
        fleet: Fleet,
        *,
        observer: str,
        tell: Callable[[ServiceState, bytes], None],
        clock: Callable[[], float],
        server_us: Callable[[float], int],
        say: Say,
        moved: Callable[[str, str], None],
        breathe: Callable[[], Awaitable[None]],
    ) -> None:
        self._desk = desk
        self._change = change
        self._log = log
        self._fleet = fleet
        self._observer = observer
        self._tell = tell
        self._clock = clock
        self._server_us = server_us
        self._say = say
        self._moved = moved
        self._breathe = breathe
        self._known: dict[str, tuple[int, Rollout | None]] = {}
        self._followed: dict[str, Followed] = {}
        self.counts = Counts()

    @property
    def followed(self) -> dict[str, Followed]:
        """The rollouts under way, by service."""
        return self._followed

    async def run(self) -> None:
        """Follow the tables until cancelled."""
        feed = self._desk.subscribe()
        try:
            for view in self._desk.outlines():
                self._take(view, news=False)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._beat())
                while True:
                    events = await feed.next()
                    if feed.lagged:
                        events = list(self._desk.outlines())
                    for event in events:
                        if isinstance(event, TableView):
                            self._take(event)
        finally:
            feed.close()
            for name in list(self._followed):
                self._leave(name)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.pause_s)
            try:
                await self.tick()
            except StoreDown:
                pass  # the log says so itself
            except Exception as exc:  # noqa: BLE001 - a second's judgement is lost, and made up for by the next
                self._say("error", "rollout_crashed", exc_info=exc)

    @property
    def pause_s(self) -> float:
        """How long until the next look: a second, or less while a step is a matter of seconds."""
        shortest = min((_step_s(each.rollout) for each in self._followed.values()), default=BLOCKS * TICK_S)
        return min(TICK_S, max(SHORTEST_TICK_S, shortest / BLOCKS))

    def _take(self, view: TableView, *, news: bool = True) -> None:
        try:
            self.adopt(view, news=news)
        except Exception as exc:  # noqa: BLE001 - a fault of ours costs this service's rollout, and no other's
            self._leave(view.table.service)
            self._say("error", "rollout_crashed", service=view.table.service, exc_info=exc)

    def adopt(self, view: TableView, *, news: bool = True) -> None:
        """A service's table as it stands now; `news`: it has just come to be so."""
        table, rollout = view.table, view.table.rollout
        name = table.service
        version, before = self._known.get(name, (0, None))
        if version >= view.version:
            return
        self._known[name] = view.version, rollout
        if rollout is None:
            self._leave(name)
            return
        if news:
            self._say_moved(name, before, rollout)
        followed = self._followed.get(name)
        if not rollout.live:
            self._leave(name)
        elif fault := machine.fault_of(rollout):
            self._leave(name)
            self._say("error", "rollout_unusable", service=name, version=rollout.version, error=fault)
        elif followed is None or followed.key != (rollout.id, rollout.step):
            self._leave(name)
            self._followed[name] = Followed(table, rollout, self._now_us() // 1000)
            self._attach(name)
        else:
            followed.table, followed.rollout = table, rollout

    async def tick(self) -> None:
        """Tell what was seen, read what all saw, conclude what may be concluded. StoreDown."""
        for name in list(self._followed):
            service = self._attach(name)
            followed = self._followed.get(name)
            if followed is None:
                continue
            if self._log.state is not State.UP:
                continue
            if service is not None:
                self._told(service, followed)
            await self._read(name, followed)
            if self._followed.get(name) is followed and service is not None:
                await self._judge(name, service, followed)

    # Our own.

    def _now_us(self) -> int:
        return self._server_us(self._clock())

    def _attach(self, name: str) -> ServiceState | None:
        """Puts the trial where the request path looks for it: the service may have been made since, or made anew."""
        service = self._fleet.services.get(ServiceName(name))
        followed = self._followed.get(name)
        if service is not None and followed is not None and service.trial is not followed.trial:
            service.trial = followed.trial
            service.trial_since = self._clock()
        return service

    def _leave(self, name: str) -> None:
        followed = self._followed.pop(name, None)
        service = self._fleet.services.get(ServiceName(name))
        if followed is not None and service is not None and service.trial is followed.trial:
            service.trial = None

    def _told(self, service: ServiceState, followed: Followed) -> None:
        tally = followed.trial.take()
        if tally is not None:
            self._tell(service, encode_trial(Observed(followed.part, tally, followed.whole)))
            followed.part += 1
            self.counts.told += 1

    async def _read(self, name: str, followed: Followed) -> None:
        """Reads on to the end of the evidence."""
        shard = shard_of(route_key(name))
        now = self._clock()
        if followed.read_at is None or now - followed.read_at > STALE_S:
            oldest = await self._log.page(shard, evidence=True, after="0", count=1)
            if oldest and _numbers(oldest[0].id) > _numbers(followed.cursor):
                followed.doubt()
        while True:
            page = await self._log.page(shard, evidence=True, after=followed.cursor, count=PAGE)
            if self._followed.get(name) is not followed:
                return
            for entry in page:
                followed.cursor = entry.id
                if followed.names(entry):
                    self._heard(name, followed, entry)
                    await self._breathe()  # of a busy service each is milliseconds
                    if self._followed.get(name) is not followed:
                        return
            if len(page) < PAGE:
                break
            await self._breathe()
        followed.read_at = self._clock()
        if followed.doubted and not followed.whole:
            self.counts.lost += 1
            hint = "others judge this step; where none is left who can, this sidecar does with what it has"
            self._say("warning", "rollout_evidence_trimmed", service=name, version=followed.rollout.version, hint=hint)
        followed.doubted = False

    def _heard(self, name: str, followed: Followed, entry: Entry) -> None:
        try:
            seen = decode(entry.data)
            if seen.service != name or not seen.trial:
                return
            told = decode_trial(seen.trial)
            at_ms = _numbers(entry.id)[0]
        except Unreadable:
            self.counts.unreadable += 1
            return
        if (told.tally.rollout, told.tally.step) == followed.key and followed.add(seen, told, at_ms):
            self.counts.foreign += 1

    async def _judge(self, name: str, service: ServiceState, followed: Followed) -> None:
        verdict = followed.verdict = followed.trial.verdict()
        rollout = followed.rollout
        now_us = self._now_us()
        dead_s = _dead_s(service, followed, now_us)
        if rollout.phase != "running":
            return
        if dead_s >= DEAD_S:
            said = f"none of its endpoints may serve for {dead_s:.0f} s: all their breakers are open"
            verdict = Verdict("fail", said, verdict.canary, verdict.baseline)
        elif not followed.may_judge(now_us // 1000):
            return
        moved = machine.judged(followed.table, verdict, now_us, service.ready, self._observer)
        if moved is None:
            self._say_stuck(name, service, followed, verdict, now_us)
            return
        _, why, evidence = moved

        def revise(table: Table) -> Table | Refused:
            stands = table.rollout
            if stands is None or stands.phase != "running" or (stands.id, stands.step) != followed.key:
                return Refused("stale", "the rollout has moved on")
            again = machine.judged(table, verdict, now_us, service.ready, self._observer)
            return Refused("stale", "the rollout stays where it is") if again is None else again[0]

        answer = await self._change(name, revise, "", why, evidence)
        if isinstance(answer, Accepted) and not answer.repeated:
            self.counts.concluded[why] = self.counts.concluded.get(why, 0) + 1

    def _say_stuck(self, name: str, service: ServiceState, followed: Followed, verdict: Verdict, now_us: int) -> None:
        rollout, text = followed.rollout, ""
        if verdict.word == "fail":
            text = f"to be taken back ({verdict.evidence}), but {machine.blocked(followed.table, service.ready)}"
        elif machine.due(rollout, verdict, now_us):
            text = verdict.evidence if verdict.word == "unclear" else "too few endpoints of the canary may serve"
        if text and followed.said != verdict.word:
            followed.said = verdict.word
            about = f"{rollout.version!r} at step {rollout.step + 1} of {len(rollout.plan.steps)}: {text}"
            self._desk.notice(Notice(name, "rollout_unclear", about))

    def _say_moved(self, name: str, before: Rollout | None, rollout: Rollout) -> None:
        """A line in the log for what became of a rollout, whoever did it."""
        same = before is not None and before.id == rollout.id
        if same and before is not None and (before.phase, before.step) == (rollout.phase, rollout.step):
            return
        if not same:
            event = "begun"
        elif rollout.phase != "running":
            event = rollout.phase
        else:
            event = "resumed" if before is not None and before.step == rollout.step else "step"
        self._moved(name, "step" if event == "step" else rollout.phase)
        self._say(
            "warning" if rollout.phase == "failed" else "info",
            f"rollout_{event}",
            service=name,
            version=rollout.version,
            rollout=rollout.id,
            step=rollout.step + 1,
            steps=len(rollout.plan.steps),
            by=rollout.by,
            evidence=rollout.evidence,
        )


def _dead_s(service: ServiceState, followed: Followed, now_us: int) -> float:
    """How long the log has had all endpoints of the canary open. An operator's order is no evidence against it."""
    breakers = [node.breaker for node in service.nodes.values() if node.version == followed.rollout.version]
    if not breakers or any(each.passes or not each.shared or each.held_open for each in breakers):
        followed.dead_us = 0
        return 0.0
    followed.dead_us = followed.dead_us or now_us
    return (now_us - followed.dead_us) / 1e6


def _step_s(rollout: Rollout) -> float:
    return rollout.plan.steps[rollout.step].min_s


def _numbers(position: str) -> tuple[int, int]:
    ms, _, seq = position.partition("-")
    try:
        return int(ms or 0), int(seq or 0)
    except ValueError as exc:
        raise Unreadable(f"no position: {position!r}") from exc
