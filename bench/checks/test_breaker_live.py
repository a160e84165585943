"""The live experiment: what clients, log and plan say is one thing, and what is entered is what was seen."""

import asyncio
from itertools import islice, pairwise
from types import SimpleNamespace

import pytest

from bench.breaker_live import run as live
from bench.breaker_live.__main__ import text
from bench.breaker_live.plan import (
    ARMS,
    PODS,
    SCRIPT,
    SECONDS,
    Timeline,
    arrivals,
    engines_fault,
    request_id,
    struck_on,
    world,
)
from bench.breaker_live.run import Answer, Result, Run, ask
from sidecar.demo import script as demo
from sidecar.demo.engine import Engine
from sidecar.policy.load import load
from sidecar.simulate.fault import Kind

KEYS = [f"127.0.0.1:{8000 + pod}" for pod in range(PODS)]
TIMELINE = Timeline(SECONDS)
QUICK = demo.Script(models=("live",), tokens=3)


@pytest.mark.parametrize("arm", ARMS.values(), ids=ARMS)
def test_policy_of_an_arm_loads_without_a_warning(arm):
    snapshot = load([("live", arm.policy(KEYS).encode())], 1)
    assert not snapshot.warnings
    (service,) = snapshot.services
    assert len(service.endpoints) == PODS
    assert (service.breakers.node.mode == "off") == arm.name.startswith("none")


@pytest.mark.parametrize("seed", range(5))
def test_faults_come_one_after_another_on_engines_of_their_own_and_leave_time_to_recover(seed):
    faults = TIMELINE.faults(seed)
    assert [fault.kind for fault in faults] == [Kind.STEP, Kind.STALL, Kind.ERRORS]
    assert len({fault.pods for fault in faults}) == 3
    assert faults[0].begin >= TIMELINE.warmup_s
    for fault, following in pairwise([*faults, SimpleNamespace(begin=SECONDS)]):
        assert fault.begin + 30 <= fault.end <= following.begin - 10


def test_engine_strikes_whom_the_plan_says():
    there = world(TIMELINE, 1)
    requests = [*islice(arrivals(TIMELINE, 36.0, 1), 400)]
    for fault in there.faults:
        there.clock.run_until(fault.begin + 1)
        (pod,) = fault.pods
        told = engines_fault(fault)
        struck = [arrival for arrival in requests if told.strikes(request_id(1, arrival))]
        assert struck == [arrival for arrival in requests if struck_on(there, arrival) == {pod}]
        assert len(struck) == pytest.approx(400 * fault.share, abs=40)
        there.clock.run_until(fault.end)
        assert not any(struck_on(there, arrival) for arrival in requests)


@pytest.mark.parametrize("seconds", [30.0, SECONDS, 600.0])
def test_rate_is_the_mean_of_the_run(seconds):
    assert sum(1 for _ in arrivals(Timeline(seconds), 36.0, 1)) / seconds == pytest.approx(36.0, rel=0.05)


def test_same_seed_has_the_same_requests():
    one, two = ([*islice(arrivals(TIMELINE, 36.0, 3), 50)] for _ in range(2))
    assert [(each.at, each.prompt_tokens, each.user_pod, each.fault_u) for each in one] == [
        (each.at, each.prompt_tokens, each.user_pod, each.fault_u) for each in two
    ]


async def answer_of(fault=None):
    async with Engine(QUICK) as engine:
        if fault is not None:
            engine.fail(fault)
        return await ask(engine.port, "r1", "s1", 100, 3)


async def test_client_knows_a_whole_answer():
    answer = await answer_of()
    assert answer.whole and answer.status == 200 and answer.ttft_s is not None


@pytest.mark.parametrize("kind", ["cut_fin", "cut_no_terminator", "in_band_error", "cut_rst"])
async def test_client_knows_an_answer_that_began_well_and_is_not_whole(kind):
    answer = await answer_of(demo.Fault(demo.Kind(kind), after=2))
    assert not answer.whole and answer.status == 200


async def test_client_knows_an_error_and_no_answer(monkeypatch):
    assert await answer_of(demo.Fault(demo.Kind.STATUS)) == Answer(500, None, False, "")
    monkeypatch.setattr(live, "PATIENCE_S", 0.05)
    assert await answer_of(demo.Fault(demo.Kind.HANG)) == Answer(0, None, False, "")


class Log:
    """A sidecar that says what it is told to say."""

    def __init__(self):
        self.lines = []

    def request(self, name, endpoint, attempts=1, reason=None):
        pod = f'"endpoint":"{KEYS[endpoint]}"' if endpoint is not None else '"endpoint":""'
        said = "null" if reason is None else f'"{reason}"'
        self.lines.append(f'{{"event":"request","request_id":"{name}",{pod},"attempts":{attempts},"reason":{said}}}')

    def breaker(self, pod, old, new):
        self.lines.append(
            f'{{"event":"breaker","scope":"node","key":"{KEYS[pod]}","old":"{old}","new":"{new}",'
            '"why":"fast","evidence":"much"}'
        )


async def test_run_enters_what_client_and_log_say(monkeypatch):
    """One request per way to end, all of sessions whose engine fails half of them."""
    monkeypatch.setattr(live, "POLL_S", 0.001)
    log = Log()
    runs = Run(TIMELINE, 1, log, KEYS)
    fault = runs.world.faults[2]
    (bad,) = fault.pods
    good = (bad + 1) % PODS
    runs._began -= fault.begin + 1.0
    now = runs.now()
    struck = [each for each in arrivals(TIMELINE, 36.0, 1) if each.user_pod == bad and each.fault_u < fault.share][:4]
    ways = [(bad, 1, 500, None), (good, 1, 200, None), (good, 2, 200, None), (None, 0, 503, "breaker_open")]
    answers = {}
    for arrival, (pod, attempts, status, reason) in zip(struck, ways, strict=True):
        arrival.at = now
        name = request_id(1, arrival)
        answers[name] = Answer(status, 0.1 if status == 200 else None, status == 200, "")
        log.request(name, pod, attempts, reason)

    async def say(port, name, session, prompt_tokens, tokens):
        return answers[name]

    monkeypatch.setattr(live, "ask", say)
    log.breaker(bad, "closed", "open")
    log.breaker(good, "closed", "open")
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(runs.read())
        for arrival in struck:
            await runs.send(0, "s", arrival)
        await runs.settled()
        reading.cancel()
    measures = runs.ledger.measures()
    assert runs.open == 0
    tally = measures.kinds["errors"]
    assert (tally.affected, tally.untouched, tally.saved) == (4, 2, 3)
    assert measures.failed == {"status 500": 1} and measures.rejected == {"breaker_open": 1}
    assert (measures.trips, measures.false_trips, tally.tripped) == (2, 1, 1)
    assert measures.retried == 1

    class Args:
        rate, seconds, seed = 36.0, SECONDS, 1

    said = text(Args, [Result("ours", measures, runs.world.faults, (0.0, 0.0), (0.1, 0.2), 0)])
    assert "FALSE" in said and "| ours | errors | 4 | 50.0 |" in said


async def test_settling_gives_up_where_no_session_finds_a_home(monkeypatch):
    async def refused(port, name, session, prompt_tokens, tokens):
        return Answer(503, None, False, "")

    monkeypatch.setattr(live, "ask", refused)
    with pytest.raises(ExceptionGroup, match="unhandled"):
        await live.settle(0, KEYS)


def test_nothing_of_the_pace_is_left_to_the_order_of_arrival():
    assert SCRIPT.first_token_after_s("r1", 512, 0) == SCRIPT.first_token_after_s("r1", 512, 0)
    assert SCRIPT.keep == 0
