"""Runs a scenario: locust's users by the scenario's shape, its fault beside them, and its marks in the end.

locust is used as a library, in one process: it makes users, spreads them over time and collects their events. Importing
it patches sockets and sleeps for gevent, which is why this module comes first (`__main__.py`), and why nothing of
`sidecar/` runs in this process.
"""

import random
import sys
import time
from collections.abc import Callable

import gevent
import msgspec
from locust import LoadTestShape
from locust.env import Environment

from loadtest.locustfile import ChatUser, SlowReader, StreamUser
from loadtest.marks import Evidence, Mark
from loadtest.scenario import Scenario
from loadtest.shapes import Shape
from loadtest.sse_client import Ask, Ended
from loadtest.stage import Stage, StageError, remote, simulated
from loadtest.tally import ALL, CHAT, Tally, count

SPAWN_PER_S = 100.0
"""A shape's step is a step, as far as locust makes one without a warning."""
LAG_PERIOD_S = 0.05
STOP_MARGIN_S = 15.0


class Options(msgspec.Struct, frozen=True):
    """What the command line changes. Zero and empty: as the scenario says."""

    seconds: float = 0.0
    users: int = 0
    shape: Shape | None = None
    url: str = ""
    admin: str = ""
    model: str = "demo"
    headers: tuple[tuple[str, str], ...] = ()
    ttft_s: float = 0.0
    patience_s: float = 0.0
    service: dict[str, object] | None = None
    """None: the scenario's."""
    broken: bool = False


class Outcome(msgspec.Struct, frozen=True):
    """A run that was made: the marks and the figures around them."""

    scenario: str
    claim: str
    ok: bool
    marks: list[Mark]
    figures: dict[str, float]
    endings: dict[str, int]
    changes: list[tuple[float, str, str]]
    examples: list[str]


class TableShape(LoadTestShape):
    """A table of `shapes.py` as locust asks for it."""

    abstract = True  # not to be picked up as a locustfile's own

    def __init__(self, shape: Shape, seconds: float, users: int, others: int) -> None:
        super().__init__()
        self._shape, self._seconds, self._users, self._others = shape, seconds, users, others

    def tick(self) -> tuple[int, float] | None:
        """Users now, `others` of a fixed number among them; None ends the run."""
        users = self._shape.users_at(self.get_run_time(), self._seconds, self._users)
        return None if users is None else (users + self._others, SPAWN_PER_S)


def run(scenario: Scenario, options: Options) -> Outcome:
    """Make one run. StageError where it cannot be made, or a user, the fault or the watcher crashed."""
    setting = scenario.broken_setting if options.broken else scenario.setting
    if options.service is not None:
        setting = msgspec.structs.replace(setting, service=options.service)
    if options.patience_s:
        plan = msgspec.structs.replace(scenario.plan, patience_s=options.patience_s)
        scenario = msgspec.structs.replace(scenario, plan=plan)
    seconds = options.seconds or scenario.seconds
    tally = Tally()
    where = (
        remote(setting, tally, seconds, options.url, options.admin or None)
        if options.url
        else simulated(setting, tally, seconds)
    )
    with where as stage:
        print(f"{scenario.name}: {scenario.claim}", file=sys.stderr)
        _load(scenario, options, stage)
        stage.conclude()
    evidence = Evidence(tally, stage.facts, seconds, options.ttft_s or scenario.ttft_s)
    marks = scenario.marks(evidence)
    return Outcome(
        scenario.name,
        scenario.claim,
        all(mark.ok is not False for mark in marks) and any(mark.ok for mark in marks),
        marks,
        _figures(evidence, [crowd.kind for crowd in scenario.plan.crowds]),
        tally.endings(),
        stage.facts.changes,
        [f"{record.ended} at {record.began_s:.1f} s: {record.detail}" for record in tally.broken(ALL)[:5]],
    )


def _load(scenario: Scenario, options: Options, stage: Stage) -> None:
    """The load from its first user to its last stream's end."""
    tally = stage.tally
    StreamUser.plan, StreamUser.tally, StreamUser.stage = scenario.plan, tally, stage
    StreamUser.chance = random.Random(1)
    StreamUser.ask = Ask(0, options.model, "", options.headers, checked=stage.simulated)
    classes: list[type[StreamUser]] = [ChatUser]
    if scenario.slow_readers:
        SlowReader.fixed_count = scenario.slow_readers
        classes.append(SlowReader)
    users = options.users or scenario.users
    shape = TableShape(options.shape or scenario.shape, stage.seconds, users, scenario.slow_readers)
    environment = Environment(
        user_classes=classes,
        shape_class=shape,
        host="http://stage",
        stop_timeout=scenario.plan.patience_s + STOP_MARGIN_S,
    )
    crashes: list[str] = []
    environment.events.user_error.add_listener(lambda exception, **_: crashes.append(f"a user: {exception!r}"))
    runner = environment.create_local_runner()
    beside = [
        gevent.spawn(_guarded, crashes, "the fault", lambda: scenario.fault(stage)),
        gevent.spawn(_guarded, crashes, "the watcher", stage.watch),
        gevent.spawn(_measure_lag, stage),
        gevent.spawn(_progress, stage),
    ]
    try:
        stage.start()
        tally.start(time.perf_counter())
        runner.start_shape()
        gevent.sleep(stage.seconds)
        stage.over = True
        if runner.shape_greenlet is not None:
            runner.shape_greenlet.join(timeout=scenario.plan.patience_s + 2 * STOP_MARGIN_S)
        # A fault's last act may be a little behind the load; it is not cut short, so that it is not half done.
        gevent.joinall(beside, timeout=STOP_MARGIN_S)
    finally:
        stage.over = True
        gevent.killall(beside)
        runner.quit()
    if crashes:
        raise StageError("; ".join(crashes[:3]))


def _guarded(crashes: list[str], who: str, act: Callable[[], None]) -> None:
    try:
        act()
    except Exception as exc:  # noqa: BLE001 - a greenlet begins here; `_load` tells
        crashes.append(f"{who}: {type(exc).__name__}: {exc}")


def _measure_lag(stage: Stage) -> None:
    """How late this process wakes: what of the gaps and first tokens is the load's own doing."""
    while not stage.over:
        before = time.perf_counter()
        gevent.sleep(LAG_PERIOD_S)
        stage.facts.lags_s.append((stage.elapsed_s, time.perf_counter() - before - LAG_PERIOD_S))


def _progress(stage: Stage) -> None:
    while not stage.over:
        gevent.sleep(5.0)
        tally = stage.tally
        print(
            f"  {stage.elapsed_s:5.1f} s  phase {tally.phase}: {len(tally.records)} streams ended, "
            f"{tally.unaccounted} under way, {len(tally.broken(ALL))} broken",
            file=sys.stderr,
        )


def _figures(evidence: Evidence, crowds: list[str]) -> dict[str, float]:
    """What is worth knowing of every run; of each crowd where there are some."""
    tally = evidence.tally
    streams = tally.of(CHAT)
    if crowds:
        return {
            name: figure
            for kind in crowds
            for name, figure in (
                (f"{kind}: streams", float(len(tally.of(kind)))),
                (f"{kind}: whole", float(count(tally.of(kind), lambda record: record.ended is Ended.WHOLE))),
                (f"{kind}: first_token_p50_s", tally.ttft_s(0.5, kind)),
                (f"{kind}: first_token_p99_s", tally.ttft_s(0.99, kind)),
            )
        } | {"load_lag_p99_s": evidence.lag_s(0.99), **evidence.facts.notes}
    return {
        "streams": len(streams),
        "goodput_ratio": tally.goodput(evidence.ttft_s),
        "first_token_p50_s": tally.ttft_s(0.5),
        "first_token_p99_s": tally.ttft_s(0.99),
        "gap_p50_s": tally.gap_s(0.5),
        "gap_p99_s": tally.gap_s(0.99),
        "load_lag_p99_s": evidence.lag_s(0.99),
        "proxy_rss_mb": max((value for _, value in evidence.facts.rss_bytes), default=0.0) / 1e6,
        **evidence.facts.notes,
    }
