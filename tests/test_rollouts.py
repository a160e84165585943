"""The conductor: who observes, what is told and read back, and who may conclude what from it."""

import asyncio
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from sidecar.core.breaker import Agreed, Breaker
from sidecar.core.breaker import State as BreakerState
from sidecar.core.desk import Event, Feed, Notice, TableView, outline
from sidecar.core.fleet import Fleet
from sidecar.core.revise import Accepted, Refused
from sidecar.core.rollout import begin
from sidecar.core.service import ServiceState
from sidecar.core.table import PARTS, Plan, Rollout, Step, Table, Version
from sidecar.core.verdict import Tally
from sidecar.kernel.ids import ServiceName
from sidecar.kernel.outcome import Ending, Result
from sidecar.policy.schema import Adaptive, Breakers, Endpoint, LongSeconds, NodeBreaker, Service, Shared, Snapshot
from sidecar.rollouts import DEAD_S, ORPHANED_S, Rollouts
from sidecar.txlog.codec import route_key, shard_of
from sidecar.txlog.log import State
from sidecar.txlog.store import Entry, StoreDown
from sidecar.txlog.summary import Observed, Summary, decode, decode_trial, encode, encode_trial

BEGIN_MS = 1_700_000_000_000
NAME = ServiceName("chat")
SHARD = shard_of(route_key(NAME))
PLAN = Plan("v1", (Step(2000, 30.0, 100), Step(PARTS, 0.0, 1)))
POLICY = Service(
    name=NAME,
    endpoints=tuple(
        Endpoint(url=f"http://{version}-{number}:80", version=version) for version in ("v1", "v2") for number in (1, 2)
    ),
    split={"v1": 1.0, "v2": 0.0},
    breakers=Breakers(node=NodeBreaker(min_closed_ratio=0.0)),
    shared=Shared(retention_s=LongSeconds(100)),
)
TABLE = Table(NAME, (Version("v1", PARTS), Version("v2", 0)))


def begun(id: str = "r1", plan: Plan = PLAN, at_s: float = 0.0) -> Table:
    made = begin(TABLE, "v2", plan, id, BEGIN_MS * 1000 + int(at_s * 1e6), "tool")
    assert isinstance(made, Table)
    return made


class Log:
    """The evidence of a service's shard, in one order, as all read it. Time goes when told."""

    def __init__(self) -> None:
        self.state = State.UP
        self.now = 0.0
        self.entries: list[Entry] = []
        self.pages = 0

    def append(self, data: bytes) -> None:
        last = [int(part) for part in self.entries[-1].id.split("-")] if self.entries else [0, 0]
        ms = max(BEGIN_MS + int(self.now * 1000), last[0])
        self.entries.append(Entry(SHARD, True, f"{ms}-{last[1] + 1 if ms == last[0] else 0}", data))

    def trim(self, count: int) -> None:
        del self.entries[:count]

    async def page(self, shard: int, *, evidence: bool, after: str, count: int) -> list[Entry]:
        assert shard == SHARD and evidence
        if self.state is not State.UP:
            raise StoreDown("away", "it is away")
        self.pages += 1

        def numbers(position: str) -> tuple[int, int]:
            ms, _, seq = position.partition("-")
            return int(ms), int(seq or 0)

        return [entry for entry in self.entries if numbers(entry.id) > numbers(after)][:count]


class Table0:
    """What stands, and the sidecars that are told of it. A `Desk`, as far as the conductor asks."""

    def __init__(self) -> None:
        self.view: TableView | None = None
        self.pods: list[Pod] = []
        self.written: list[tuple[str, str, str]] = []
        self.refusals: list[Refused] = []
        self.before_change: Callable[[], None] = lambda: None

    def put(self, table: Table, why: str = "update", evidence: str = "") -> None:
        version = 1 if self.view is None else self.view.version + 1
        self.view = TableView(table, version, 0, "", why, evidence)
        for pod in self.pods:
            pod.rollouts.adopt(self.view)

    async def change(
        self, service: str, revise: Callable[[Table], Table | Refused], by: str, why: str, evidence: str = ""
    ) -> Accepted | Refused:
        assert self.view is not None and service == NAME
        revise(self.view.table)  # as a CAS that is lost does: it may be asked again
        self.before_change()
        made = revise(self.view.table)
        if isinstance(made, Refused):
            self.refusals.append(made)
            return made
        self.written.append((by, why, evidence))
        self.put(made, why, evidence)
        return Accepted(made, self.view.version)

    @property
    def table(self) -> Table:
        assert self.view is not None
        return self.view.table

    @property
    def rollout(self) -> Rollout:
        assert self.table.rollout is not None
        return self.table.rollout

    def phase(self) -> str:
        """A call: what it gives may be another after each look."""
        return self.rollout.phase


class Pod:
    """One sidecar's conductor, over a fleet of its own."""

    def __init__(self, log: Log, table: Table0, name: str = "pod-1", *, joins: bool = True) -> None:
        self.log = log
        self.name = name
        self.notices: list[Notice] = []
        self.moves: list[tuple[str, str]] = []
        self.lines: list[tuple[str, str, dict[str, Any]]] = []
        self.seq = BEGIN_MS
        self.chance = random.Random(name)
        self.table = table
        self.fleet = Fleet(lambda: 0.5)
        self.fleet.apply(Snapshot(version=1, services=(POLICY,)), 0.0)
        self.rollouts = Rollouts(
            self,
            table.change,
            log,
            self.fleet,
            observer=name,
            tell=self.tell,
            clock=lambda: log.now,
            server_us=lambda now: BEGIN_MS * 1000 + int(now * 1e6),
            say=lambda level, event, **fields: self.lines.append((level, event, fields)),
            moved=lambda service, to: self.moves.append((service, to)),
            breathe=lambda: asyncio.sleep(0),
        )
        if joins:
            table.pods.append(self)
            if table.view is not None:
                self.rollouts.adopt(table.view, news=False)

    @property
    def service(self) -> ServiceState:
        return self.fleet.services[NAME]

    def tell(self, service: ServiceState, trial: bytes) -> None:
        self.seq += 1
        self.log.append(encode(Summary(self.name, self.seq, service.name, 0, trial=trial)))

    def ends(self, version: str, good: int = 1, bad: int = 0) -> None:
        """Attempts that end now, and began late enough."""
        trial = self.service.trial
        if trial is None:
            return
        for number in range(good + bad):
            well = number >= bad
            ending, result = (Ending.COMPLETE, Result.SUCCESS) if well else (Ending.ERROR_IN_BAND, Result.FAILURE)
            trial.observe(
                version,
                1000,
                ending,
                result,
                0.2,
                0.02,
                100 if well else 10,
                "stop" if well else "",
                self.chance.randrange(32),
            )

    async def second(self, bad: int = 0, base_bad: int = 0) -> None:
        """A second of traffic, and the look at its end."""
        self.log.now += 1.0
        self.ends("v1", 40 - base_bad, base_bad)
        self.ends("v2", 10 - bad, bad)
        await self.rollouts.tick()

    # What the conductor asks of a desk.

    def tables(self) -> list[TableView]:
        return [] if self.table.view is None else [self.table.view]

    def outlines(self) -> list[TableView]:
        return [outline(view) for view in self.tables()]

    def standing(self, service: str) -> TableView | None:
        return self.table.view

    def subscribe(self) -> Feed:
        raise NotImplementedError

    def notice(self, notice: Notice) -> None:
        self.notices.append(notice)

    def effective(self) -> list[Service]:
        raise NotImplementedError

    async def submit(self, update: object) -> Accepted | Refused:
        raise NotImplementedError

    async def order(self, service: str, action: object, by: str) -> Accepted | Refused:
        raise NotImplementedError

    async def restore(self, service: str, table: Table, by: str, why: str, over: int = 0) -> Accepted | Refused:
        raise NotImplementedError

    def events(self) -> list[str]:
        return [event for _, event, _ in self.lines]


def one() -> tuple[Log, Table0, Pod]:
    log, table = Log(), Table0()
    return log, table, Pod(log, table)


async def test_good_canary_is_led_to_the_whole() -> None:
    log, table, pod = one()
    table.put(begun())
    for _ in range(29):
        await pod.second()
    assert table.phase() == "running" and not table.written
    for _ in range(3):
        await pod.second()
    assert table.phase() == "promoted" and table.table.weights == {"v1": 0, "v2": PARTS}
    ((by, why, evidence),) = table.written
    assert (by, why) == ("", "promoted") and evidence and table.rollout.by == "pod-1"
    assert pod.rollouts.counts.concluded == {"promoted": 1}
    # What is over is not observed, told or read any more.
    assert pod.service.trial is None and not pod.rollouts.followed
    entries, pages = len(log.entries), log.pages
    await pod.second()
    assert (len(log.entries), log.pages) == (entries, pages)
    assert pod.events() == ["rollout_begun", "rollout_promoted"]
    assert pod.moves == [(NAME, "running"), (NAME, "promoted")]


async def test_bad_canary_is_taken_back_before_its_time() -> None:
    _, table, pod = one()
    table.put(begun())
    while table.phase() == "running" and pod.log.now < 60:
        await pod.second(bad=5)
    assert pod.log.now < 25 and table.phase() == "failed" and table.table.weights == {"v1": PARTS, "v2": 0}
    assert table.rollout.evidence and table.written[0][2] == table.rollout.evidence
    assert pod.lines[-1][:2] == ("warning", "rollout_failed")


async def test_two_sidecars_add_up_and_one_of_them_writes() -> None:
    log, table = Log(), Table0()
    pods = [Pod(log, table, f"pod-{number}") for number in (1, 2)]
    table.put(begun())
    while table.phase() == "running":
        log.now += 1.0
        assert log.now < 60
        for pod in pods:
            pod.ends("v1", 20)
            pod.ends("v2", 2, 2)
        first = pods[0].rollouts.followed[NAME]
        # The second reads what the first has told in this tick, the first reads the second's in the next.
        for pod in pods:
            await pod.rollouts.tick()
    assert len(table.written) == 1 and table.phase() == "failed"
    assert first.verdict is not None and first.verdict.baseline >= 20 * (log.now - 1)
    assert all(pod.service.trial is None for pod in pods)


async def test_one_that_dies_takes_nothing_along() -> None:
    log, table = Log(), Table0()
    pods = [Pod(log, table, f"pod-{number}") for number in (1, 2)]
    table.put(begun())
    for _ in range(10):
        log.now += 1.0
        for pod in pods:
            pod.ends("v1", 20)
            pod.ends("v2", 5)
            await pod.rollouts.tick()
    table.pods.remove(pods[0])
    while table.phase() == "running" and log.now < 60:
        await pods[1].second()
    assert table.phase() == "promoted" and table.rollout.by == "pod-2"


async def test_who_joins_in_mid_step_knows_what_all_know() -> None:
    log, table, early = one()
    table.put(begun())
    for _ in range(20):
        await early.second()
    late = Pod(log, table, "pod-2")
    await late.rollouts.tick()
    known = [pod.rollouts.followed[NAME] for pod in (early, late)]
    assert known[0].verdict == known[1].verdict and known[1].whole
    assert known[0].cursor == known[1].cursor


@pytest.mark.parametrize("trimmed", [1, 10])
async def test_who_missed_a_part_does_not_judge_until_nobody_is_left_who_can(trimmed: int) -> None:
    log, table, early = one()
    table.put(begun(plan=replace(PLAN, steps=(Step(2000, 5.0, 40), Step(PARTS, 0.0, 1)))))
    for _ in range(4):
        await early.second()
    await early.second()
    log.trim(min(trimmed, len(log.entries) - 1))
    table.pods.remove(early)
    late = Pod(log, table, "pod-2")
    began = log.now
    await late.rollouts.tick()
    assert not late.rollouts.followed[NAME].whole and late.rollouts.counts.lost == 1
    assert late.events() == ["rollout_evidence_trimmed"]
    while table.phase() == "running" and log.now < 1000:
        await late.second()
    assert table.phase() == "promoted"
    assert log.now - began == pytest.approx(ORPHANED_S, abs=2)


async def test_who_missed_a_part_leaves_the_step_to_who_did_not() -> None:
    log, table = Log(), Table0()
    early = Pod(log, table)
    table.put(begun(plan=replace(PLAN, steps=(Step(2000, 200.0, 100), Step(PARTS, 0.0, 1)))))
    for _ in range(10):
        await early.second()
    log.trim(5)
    late = Pod(log, table, "pod-2")
    while table.phase() == "running":
        assert log.now < 250
        log.now += 1.0
        for pod in (late, early):  # the late one would be the first
            pod.ends("v1", 20)
            pod.ends("v2", 5)
            await pod.rollouts.tick()
    assert table.rollout.by == "pod-1" and late.rollouts.counts.lost == 1
    assert not decode_trial(decode(log.entries[-2].data).trial).whole


async def test_trimmed_while_it_was_away_is_noticed() -> None:
    for gap in (False, True):
        log, table = Log(), Table0()
        pods = [Pod(log, table, f"pod-{number}") for number in (1, 2)]
        table.put(begun())
        for _ in range(3):
            log.now += 1.0
            for pod in pods:
                pod.ends("v1", 20)
                await pod.rollouts.tick()
        for _ in range(10):
            log.now += 1.0
            pods[0].ends("v1", 20)
            await pods[0].rollouts.tick()
        if gap:
            log.trim(len(log.entries) - 2)
        log.now += 1.0
        await pods[1].rollouts.tick()
        assert pods[1].rollouts.followed[NAME].whole is not gap
        assert pods[0].rollouts.followed[NAME].whole


async def test_restarted_observer_counts_on() -> None:
    log, table, early = one()
    table.put(begun())
    for _ in range(5):
        await early.second()
    table.pods.remove(early)
    again = Pod(log, table, "pod-1")
    again.seq = early.seq + 5000
    await again.second()
    known = again.rollouts.followed[NAME]
    assert known.whole and known.verdict is not None and known.verdict.baseline == 6 * 40


async def test_who_was_restarted_while_another_was_away_begins_at_nothing_missed() -> None:
    log, table = Log(), Table0()
    early, away = (Pod(log, table, f"pod-{number}") for number in (1, 2))
    table.put(begun())
    for _ in range(3):
        log.now += 1.0
        for pod in (early, away):
            pod.ends("v1", 20)
            await pod.rollouts.tick()
    read = len(log.entries)
    table.pods.remove(early)
    again = Pod(log, table, "pod-1")
    again.seq = early.seq + 5000
    for _ in range(10):
        log.now += 1.0
        again.ends("v1", 20)
        await again.rollouts.tick()
    log.trim(read)
    log.now += 1.0
    await away.rollouts.tick()
    assert away.rollouts.followed[NAME].whole and away.rollouts.counts.lost == 0


async def test_what_is_told_twice_counts_once() -> None:
    log, table, pod = one()
    table.put(begun())
    await pod.second()
    log.entries.append(replace(log.entries[-1], id=f"{BEGIN_MS + 1500}-0"))
    await pod.second()
    verdict = pod.rollouts.followed[NAME].verdict
    assert verdict is not None and verdict.baseline == 80


async def test_foreign_bytes_are_counted_and_stop_nothing() -> None:
    log, table, pod = one()
    table.put(begun())
    good = Tally("r1", 0, {0: 5})
    for trial in (
        b"\xc1r1",
        encode_trial(Observed(0, Tally("r1", 0, {1 << 40: 5}))),
        encode_trial(Observed(0, Tally("r1", 0, {0: -5}))),
        encode_trial(Observed(-1, good)),
        b"\x92\x00\xa2r1",
    ):
        log.append(encode(Summary("evil", 1, NAME, 0, trial=trial)))
    log.append(b"\x01 r1 no summary")
    log.append(b"\xff r1")
    # Another service's, another rollout's, another step's: none of ours, and nothing wrong with them.
    log.append(encode(Summary("pod-2", 1, "other", 0, trial=encode_trial(Observed(0, good)))))
    log.append(encode(Summary("pod-2", 2, NAME, 0, trial=encode_trial(Observed(0, replace(good, rollout="r12"))))))
    log.append(encode(Summary("pod-2", 3, NAME, 0, trial=encode_trial(Observed(0, replace(good, step=1))))))
    log.append(encode(Summary("r1", 4, NAME, 0)))
    await pod.second()
    assert pod.rollouts.counts.unreadable == 7
    assert pod.rollouts.counts.foreign == 1
    verdict = pod.rollouts.followed[NAME].verdict
    assert verdict is not None and verdict.baseline == 40


async def test_nothing_is_judged_while_the_log_is_away() -> None:
    log, table, pod = one()
    table.put(begun())
    for _ in range(10):
        await pod.second()
    log.state = State.AWAY
    for _ in range(30):
        await pod.second()
    assert table.phase() == "running" and len(log.entries) == 10
    log.state = State.UP
    followed = pod.rollouts.followed[NAME]
    await pod.second()
    verdict = followed.verdict
    assert verdict is not None and verdict.baseline == 41 * 40, "what was seen meanwhile is lost"
    assert table.phase() == "promoted"


async def test_held_is_observed_and_not_moved() -> None:
    _, table, pod = one()
    table.put(begun())
    for _ in range(5):
        await pod.second()
    table.put(replace(table.table, rollout=replace(table.rollout, phase="held")))
    for _ in range(40):
        await pod.second(bad=1)
    assert table.phase() == "held" and not table.written
    followed = pod.rollouts.followed[NAME]
    assert followed.verdict is not None and followed.verdict.baseline == 45 * 40
    table.put(replace(table.table, rollout=replace(table.rollout, phase="running")))
    await pod.second()
    assert table.phase() == "failed"
    assert pod.events() == ["rollout_begun", "rollout_held", "rollout_resumed", "rollout_failed"]


async def test_next_step_begins_with_nothing_known() -> None:
    _, table, pod = one()
    table.put(begun(plan=replace(PLAN, steps=(Step(1000, 10.0, 50), Step(5000, 10.0, 50)))))
    for _ in range(12):
        await pod.second()
    assert table.rollout.step == 1 and table.phase() == "running"
    followed = pod.rollouts.followed[NAME]
    assert followed.key == ("r1", 1) and pod.service.trial is followed.trial
    await pod.second()
    assert followed.verdict is not None and followed.verdict.baseline <= 3 * 40
    assert "rollout_step" in pod.events()


async def test_rollback_waits_until_the_baseline_may_serve() -> None:
    _, table, pod = one()
    table.put(begun())
    for node in pod.service.nodes.values():
        if node.version == "v1":
            node.breaker.force("open", 0.0, "op")
            assert node.breaker.state is BreakerState.OPEN
    for _ in range(35):
        await pod.second(bad=6)
    assert table.phase() == "running" and table.table.weights["v2"] == 2000
    (notice,) = pod.notices
    assert notice.kind == "rollout_unclear" and "'v1'" in notice.text and "taken back" in notice.text
    for node in pod.service.nodes.values():
        node.breaker.force("close", 0.0, "op")
    await pod.second()
    assert table.phase() == "failed"


class Lending:
    """Lends no probe."""

    def wants(self, breaker: Breaker) -> None: ...

    def ended(self, breaker: Breaker, seq: int, result: Result, why: str) -> None: ...


async def opens(pod: Pod, *versions: str, by: str = "") -> None:
    """All agree that these versions' endpoints are open."""
    for node in pod.service.nodes.values():
        if node.version in versions:
            held_until = math.inf if by else -math.inf
            agreed = Agreed(BreakerState.OPEN, 7, 1, pod.log.now, math.inf, "fast", "", by, "pod-9", held_until)
            node.breaker.adopt(agreed, Lending(), pod.log.now)
            assert node.breaker.shared and not node.breaker.passes


async def test_canary_that_nobody_can_reach_has_failed() -> None:
    _, table, pod = one()
    table.put(begun())
    await pod.second()
    await opens(pod, "v2")
    began = pod.log.now
    while table.phase() == "running" and pod.log.now < 1000:
        pod.log.now += 1.0
        pod.ends("v1", 40)
        await pod.rollouts.tick()
    assert table.phase() == "failed" and "may serve" in table.rollout.evidence
    assert pod.log.now - began == pytest.approx(DEAD_S, abs=2)


@pytest.mark.parametrize("how", ["one alone", "own breakers", "an order", "all versions"])
async def test_canary_is_not_dead_by_what_is_no_evidence_of_all(how: str) -> None:
    _, table, pod = one()
    table.put(begun())
    await pod.second()
    if how == "an order":
        await opens(pod, "v2", by="op")
    elif how == "all versions":
        await opens(pod, "v1", "v2")
    else:
        if how == "one alone":
            await opens(pod, "v2")
        for node in [node for node in pod.service.nodes.values() if node.version == "v2"][how == "one alone" :]:
            node.breaker.force("close", pod.log.now, "op")
            if how == "own breakers":
                trip = node.breaker.trip("fast", "", 1, Adaptive(), pod.log.now)
                assert trip is not None and not node.breaker.passes and not node.breaker.shared
    for _ in range(400):
        pod.log.now += 1.0
        await pod.rollouts.tick()
    assert table.phase() == "running"


async def test_unclear_is_said_once() -> None:
    _, table, pod = one()
    table.put(begun(plan=replace(PLAN, steps=(Step(2000, 5.0, 1), Step(PARTS, 0.0, 1)))))
    for _ in range(20):
        pod.log.now += 1.0
        pod.ends("v2", 10)  # and no answers of the baseline beside them
        await pod.rollouts.tick()
    assert [notice.kind for notice in pod.notices] == ["rollout_unclear"] and table.phase() == "running"


async def test_conclusion_about_a_step_that_is_over_is_dropped() -> None:
    log, table, pod = one()
    table.put(begun())
    table.before_change = lambda: table.put(begun("r2", at_s=log.now), "update")
    for _ in range(30):
        await pod.second(bad=6)
        if table.refusals:
            break
    assert [refusal.code for refusal in table.refusals] == ["stale"] and not table.written
    assert table.rollout.id == "r2" and table.phase() == "running"
    assert pod.rollouts.followed[NAME].key == ("r2", 0)


async def test_rollout_that_cannot_be_led_is_said_and_left_alone() -> None:
    _, table, pod = one()
    table.put(begun())
    for odd in (replace(table.rollout, step=7), replace(table.rollout, plan=replace(PLAN, false_alarm=0.0))):
        table.put(replace(table.table, rollout=odd))
        assert pod.service.trial is None and pod.events()[-1] == "rollout_unusable"
        await pod.second()
    table.put(begun("r2"))
    assert pod.service.trial is not None


async def test_old_table_that_comes_late_changes_nothing() -> None:
    _, table, pod = one()
    table.put(begun())
    stale = table.view
    assert stale is not None
    table.put(replace(table.table, rollout=replace(table.rollout, phase="aborted")))
    pod.rollouts.adopt(stale)
    assert pod.service.trial is None and not pod.rollouts.followed


async def test_service_that_is_made_later_or_anew_is_observed() -> None:
    log, table, pod = one()
    pod.fleet.apply(Snapshot(version=2, services=()), 0.0)
    table.put(begun())
    log.now += 1.0
    await pod.rollouts.tick()
    assert pod.rollouts.followed[NAME].verdict is None
    pod.fleet.apply(Snapshot(version=3, services=(POLICY,)), log.now)
    log.now += 1.0
    await pod.rollouts.tick()
    assert pod.service.trial is pod.rollouts.followed[NAME].trial and pod.service.trial_since == log.now
    await pod.second()
    assert pod.rollouts.followed[NAME].verdict is not None


def test_short_steps_are_looked_at_more_often() -> None:
    _, table, pod = one()
    assert pod.rollouts.pause_s == 1.0
    table.put(begun())
    assert pod.rollouts.pause_s == 1.0
    table.put(begun("r2", replace(PLAN, steps=(Step(100, 6.0, 1),))))
    assert pod.rollouts.pause_s == pytest.approx(0.2)
    table.put(begun("r3", replace(PLAN, steps=(Step(100, 0.0, 1),))))
    assert pod.rollouts.pause_s == pytest.approx(0.1)


class Feeding(Pod):
    """A pod whose desk tells."""

    def __init__(self, log: Log, table: Table0) -> None:
        super().__init__(log, table, joins=False)
        self.news = asyncio.Event()
        self.events_: list[Event] = []
        self.lagged = False
        self.closed = False

    def subscribe(self) -> Feed:
        return self

    async def next(self) -> list[Event]:
        await self.news.wait()
        self.news.clear()
        some, self.events_ = self.events_, []
        return some

    def close(self) -> None:
        self.closed = True

    def feed(self, *events: Event) -> None:
        self.events_ += events
        self.news.set()


async def until(ready: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not ready():
            await asyncio.sleep(0.001)


async def test_follows_what_stands_and_what_comes_until_its_end() -> None:
    log, table = Log(), Table0()
    table.put(begun())
    pod = Feeding(log, table)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(pod.rollouts.run())
        await until(lambda: pod.service.trial is not None)
        assert not pod.events(), "what stood already is no news"
        table.put(replace(table.table, rollout=replace(table.rollout, phase="aborted")))
        assert table.view is not None
        pod.feed(table.view, Notice(NAME, "version_down", "not ours"))
        await until(lambda: pod.service.trial is None)
        # Who lagged behind reads all that stands.
        table.put(begun("r2"))
        pod.lagged = True
        pod.feed(Notice(NAME, "version_back", "the others fell out"))
        await until(lambda: pod.service.trial is not None)
        running.cancel()
    assert pod.closed and pod.service.trial is None
    assert pod.events() == ["rollout_aborted", "rollout_begun"]


async def test_its_own_fault_is_said_and_costs_one_look() -> None:
    log, table = Log(), Table0()
    table.put(begun(plan=replace(PLAN, steps=(Step(100, 0.0, 1),))))
    pod = Feeding(log, table)
    asked = 0

    async def failing(*_: object, **__: object) -> list[Entry]:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise StoreDown("away", "gone")
        raise KeyError("ours")

    log.page = failing  # type: ignore[method-assign]
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(pod.rollouts.run())
        await until(lambda: asked >= 3)
        running.cancel()
    assert set(pod.events()) == {"rollout_crashed"}


def test_a_tally_within_a_summary_comes_back() -> None:
    told = encode_trial(Observed(3, Tally("r1", 2, {0: 5, 700: 1})))
    assert decode(encode(Summary("pod-1", 1, NAME, 0, trial=told))).trial == told
