"""Engines that say that all is well, on a clock that goes when told: hung, asleep, gone behind a living front."""

import contextlib
import json
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from sidecar.core.breaker import Permit, State
from sidecar.demo.engine import Engine
from sidecar.demo.script import Fault, Kind, Script
from sidecar.kernel.exchange import ResponseHead
from sidecar.kernel.ids import ServiceName
from sidecar.kernel.outcome import Ending, Result
from sidecar.policy.schema import Deadlines, Endpoint, HealthCheck, NodeBreaker, Seconds, Service
from sidecar.proxy.watchdog import SLOT_S
from sidecar.upstream.trust import JITTER
from tests import captures
from tests.harness import eventually
from tests.under_test import node_breaker, service, sidecar
from tests.upstream.polling import Bench, FakeLink

TRUTH = HealthCheck(mode="truth")
STEP_S = 5 * SLOT_S
STALLED_S, CANARY_S, FIRST_TOKEN_S = 10.0, 30.0, 20.0
WAIT_S = 3.0  # how long the detector's breakers stay open at first
ANSWERS = {
    "/v1/completions": captures.body("mii/oai_completion.txt"),
    "/generate": captures.body("mii/api_generate.txt"),
    "/mii/smol": captures.body("mii/rest_mii.txt"),
}
TOKEN = b'data: {"model_name":"smol","model_version":"1","text_output":" a"}\n\n'
JSON = b"application/json"
EVENTS = b"text/event-stream"


class Model:
    """What the engine behind the front is like, and how its front answers.

    `state`: `well`; `hangs` (nothing is answered any more), `sleeps`, `fails` (its own way to say that it is gone),
    `refuses` (the client's fault), `full`, `gone` (nobody listens), `frozen` (as `hangs`, and its pages, too).
    `running`: requests of others in it, each of which gets a token with every page that is read while it is well.
    """

    def __init__(self) -> None:
        self.state = "well"
        self.running = 0
        self.tokens = 100
        self.cache = 0.0
        self.pages = True
        self.probe = 200  # how the page answers that the policy names
        self.parts: tuple[str, ...] = ()
        """Other models of the same Triton, which are none of language."""

    def page(self, link: FakeLink) -> bool:
        """Answers a page; False if this is none."""
        path = link.path
        if path.endswith("/generate_stream") or path in ANSWERS:
            return False
        if self.state == "frozen":
            return True
        if not self.pages:
            link.answer(404)
        elif path == "/metrics":
            if self.state == "well":
                self.tokens += self.running
            awake = self.state != "sleeps"
            link.answer(
                200,
                b"vllm:num_requests_running %d\nvllm:num_requests_waiting 0\nvllm:generation_tokens_total %d\n"
                b"vllm:kv_cache_usage_perc %f\n"
                b'vllm:engine_sleep_state{sleep_state="awake"} %d\n' % (self.running, self.tokens, self.cache, awake),
            )
        elif path == "/probe":
            link.answer(self.probe)
        elif path == "/v1/models":
            link.answer(200, b'{"data":[{"id":"tiny"}]}')
        elif path == "/v2/repository/index":
            listed = ",".join(f'{{"name":"{name}","version":"1","state":"READY"}}' for name in ("smol", *self.parts))
            link.answer(200, f"[{listed}]".encode())
        else:
            link.answer(200, b"ok")
        return True

    def canary(self, link: FakeLink) -> None:
        """Answers a request for a token, or does not."""
        triton = link.path.startswith("/v2/")
        if triton and link.path.split("/")[3] in self.parts:
            link.answer(400, b'{"error":"missing input tensor"}', media=JSON)
        elif self.state == "well":
            self.tokens += 1
            if triton:
                link.answer(
                    200, b'data: {"model_name":"smol","model_version":"1","text_output":" a"}\n\n', media=EVENTS
                )
            else:
                link.answer(200, ANSWERS[link.path], media=JSON)
        elif self.state == "fails" and triton:
            body = b'data: {"error":"Stub process \'smol_0_0\' is not healthy."}\n\n'
            link.answer(400, body, media=EVENTS)
        elif self.state == "fails":
            link.answer(500, b"Internal Server Error")
        elif self.state == "refuses":
            link.answer(404, b'{"error":{"message":"no such model","type":"NotFoundError","code":404}}', media=JSON)
        elif self.state == "full":
            link.answer(429, b"{}", media=JSON, wait_s=60)


class Sickbed(Bench):
    """One engine, or `count`, and time that goes by. `canaries` counts those that were sent."""

    def __init__(self, plan: Service) -> None:
        super().__init__(plan)
        self.model = Model()
        self.canaries = 0
        self._seen = 0

    def go(self, seconds: float, until: Callable[[], bool] = lambda: False) -> float:
        """Lets time go by, at most so many seconds; how many until `until` held."""
        start = self.clock.now
        while self.clock.now - start < seconds and not until():
            self.pool.deaf = self.model.state == "gone"
            self.clock.advance(STEP_S)
            while True:
                fresh = self.pool.links[self._seen :]
                if not fresh:
                    break
                self._seen += len(fresh)
                for link in fresh:
                    if link.open and not self.model.page(link):
                        self.canaries += 1
                        self.model.canary(link)
        return self.clock.now - start

    @property
    def state(self) -> State:
        return self.node().breaker.state

    def opens(self, within_s: float) -> float:
        """It opens; after how long."""
        took = self.go(within_s, lambda: self.state is State.OPEN)
        assert self.state is State.OPEN, f"still closed after {took:.1f} s"
        return took

    def closes(self, within_s: float) -> float:
        """It closes; after how long."""
        took = self.go(within_s, lambda: self.state is State.CLOSED)
        assert self.state is State.CLOSED, f"still {self.state.value} after {took:.1f} s"
        assert (self.node().in_flight, self.node().breaker.probes_out) == (0, 0)
        return took

    @property
    def told(self) -> list[str]:
        """Why the breaker moved, as the log has it."""
        return [moved.why for moved in self.heard.moved]


NODES = NodeBreaker(min_closed_ratio=0.0, open_s=Seconds(60), open_max_s=Seconds(60))
ONLY_NODES = replace(node_breaker(), node=NODES)


def plan(rule: HealthCheck = TRUTH, *, node: NodeBreaker = NODES, **changes: object) -> Service:
    endpoint = Endpoint(url="http://h1:80", **changes)  # type: ignore[arg-type]
    return Service(
        name="chat",
        endpoints=(endpoint,),
        health_check=rule,
        breakers=replace(ONLY_NODES, node=node),
        deadlines=Deadlines(first_token_s=Seconds(FIRST_TOKEN_S)),
    )


def vllm(rule: HealthCheck = TRUTH, node: NodeBreaker = NODES) -> Sickbed:
    return Sickbed(plan(rule, node=node))


def engine(changes: dict[str, str]) -> Sickbed:
    return Sickbed(plan(**changes))  # type: ignore[arg-type]


MII = {"engine": "deepspeed", "engine_model": "smol"}
ONE_OF_TWO = Endpoint(url="http://h1:80", engine="deepspeed", models=("a", "b"))
TRITON = {"engine": "triton", "engine_model": "smol"}
ENGINES = pytest.mark.parametrize(
    "changes",
    [{}, TRITON, MII, {**MII, "front": "gateway"}, {**MII, "front": "api_server"}],
    ids=["vllm", "triton", "mii", "mii gateway", "mii api_server"],
)


# --- what it says of itself -----------------------------------------------------------------------------------------


def test_an_engine_that_hangs_with_work_opens_in_time_and_closes_once_it_works() -> None:
    bed = vllm()
    bed.model.running = 2
    bed.go(60)
    assert (bed.state, bed.canaries) == (State.CLOSED, 0)
    bed.model.state = "hangs"
    assert bed.opens(30) <= STALLED_S + 2 * TRUTH.interval_s
    breaker = bed.node().breaker
    assert breaker.why == "stalled"
    assert breaker.evidence.startswith("the engine says that it has 2 requests, and none got a token in 1")
    # Nobody is sent there to try while it still says so.
    bed.go(120)
    assert (bed.state, bed.canaries) == (State.OPEN, 0)
    bed.model.state = "well"
    assert bed.closes(10) <= WAIT_S
    assert bed.told == ["stalled", "waited", "proved"]
    assert bed.canaries == breaker.successes


def test_an_engine_that_sleeps_opens_at_once_and_is_not_disturbed() -> None:
    bed = vllm()
    bed.go(5)
    bed.model.state = "sleeps"
    assert bed.opens(10) <= 3 * TRUTH.interval_s
    assert (bed.node().breaker.why, bed.node().breaker.evidence) == ("stalled", "the engine says that it sleeps")
    bed.go(300)
    assert (bed.state, bed.canaries) == (State.OPEN, 0)
    bed.model.state = "well"
    bed.closes(10)


def test_what_still_hangs_after_an_order_to_close_opens_again() -> None:
    bed = vllm()
    bed.model.running = 1
    bed.go(5)
    bed.model.state = "hangs"
    bed.opens(15)
    bed.node().breaker.force("close", bed.clock.now, "someone")
    assert STALLED_S - 2 <= bed.opens(30) <= STALLED_S + 2


def test_load_alone_opens_nothing() -> None:
    bed = vllm(HealthCheck(mode="load"))
    bed.model.running = 1
    bed.go(5)
    for state in ("hangs", "sleeps", "gone"):
        bed.model.state = state
        bed.go(60)
    assert (bed.state, bed.told, bed.canaries) == (State.CLOSED, [], 0)


def test_the_floor_keeps_it_closed_and_counts_what_it_forbade() -> None:
    bed = vllm(node=NodeBreaker(min_closed_ratio=0.5))
    bed.model.running = 1
    bed.go(5)
    bed.model.state = "hangs"
    bed.go(60)
    assert (bed.state, bed.told) == (State.CLOSED, [])
    assert 4 <= bed.node().breaker.held_closed <= 6  # not with every page


def test_a_breaker_that_is_off_stays_off() -> None:
    bed = vllm(node=NodeBreaker(mode="off"))
    bed.model.state = "fails"
    bed.go(120)
    assert (bed.state, bed.told) == (State.CLOSED, [])


def test_the_fixed_rules_have_their_own_waits() -> None:
    bed = vllm(node=replace(NODES, adaptive=False))
    bed.model.running = 1
    bed.go(5)
    bed.model.state = "hangs"
    bed.opens(15)
    bed.model.state = "well"
    assert 55 <= bed.closes(70) <= 62
    assert bed.node().breaker.share(bed.clock.now + 0.01) == 1.0


def test_time_that_jumps_opens_nothing() -> None:
    bed = vllm(replace(TRUTH, stalled_s=Seconds(20), canary_interval_s=Seconds(3600)))
    bed.model.running = 1
    bed.go(5)
    bed.model.state = "hangs"
    bed.go(3)
    for _ in range(5):
        bed.clock.now += 600.0
        bed.go(1)
    bed.model.state = "well"
    bed.go(20)
    assert bed.told == []


# --- what it answers ------------------------------------------------------------------------------------------------


@ENGINES
def test_an_idle_engine_is_asked_now_and_then_and_never_opened(changes: dict[str, str]) -> None:
    bed = engine(changes)
    bed.go(1800)
    assert (bed.state, bed.told) == (State.CLOSED, [])
    assert 1800 / CANARY_S - 1 <= bed.canaries <= 1800 / (CANARY_S * (1 - JITTER)) + 1
    assert {(ending, result) for _, ending, result in bed.heard.canaries} == {(Ending.COMPLETE, Result.SUCCESS)}
    assert bed.node().in_flight == 0


@ENGINES
def test_an_engine_that_is_gone_behind_its_front_opens_in_time_and_closes_once_it_is_back(
    changes: dict[str, str],
) -> None:
    bed = engine(changes)
    bed.go(40)
    bed.model.state = "fails"
    assert bed.opens(60) <= CANARY_S + 3 * TRUTH.interval_s
    breaker = bed.node().breaker
    assert breaker.why == "canary"
    assert breaker.evidence.startswith("2 requests of ours for one token failed in a row, the last: ")
    assert bed.node().healthy
    bed.go(60)
    assert bed.told[-1] == "probe_failed"
    bed.model.state = "well"
    assert bed.closes(30) <= 10 + 3 * TRUTH.interval_s  # the longest wait of the detector's
    assert bed.told[-1] == "proved"


@ENGINES
def test_an_engine_that_hangs_while_idle_opens_in_time(changes: dict[str, str]) -> None:
    bed = engine(changes)
    bed.go(40)
    bed.model.state = "hangs"
    each_s = FIRST_TOKEN_S if changes else STALLED_S
    assert bed.opens(120) <= CANARY_S + 2 * each_s + 4 * TRUTH.interval_s
    assert bed.node().breaker.why == "canary"
    bed.model.state = "well"
    bed.closes(60)


def test_an_engine_that_hangs_with_its_front_is_asked_at_once() -> None:
    bed = vllm()
    bed.go(40)
    bed.model.state = "frozen"
    assert bed.opens(120) <= 5 * (TRUTH.interval_s + TRUTH.timeout_s) + 2 * FIRST_TOKEN_S
    bed.model.state = "well"
    bed.closes(60)


def test_an_engine_that_nobody_listens_for_is_asked_at_once() -> None:
    bed = vllm()
    bed.go(40)
    bed.model.state = "gone"
    assert bed.opens(30) <= 6 * TRUTH.interval_s
    assert "connect_failed (cannot connect to h1:80)" in bed.node().breaker.evidence
    bed.model.state = "well"
    bed.closes(15)


def test_pages_that_cannot_be_read_open_nothing() -> None:
    bed = vllm()
    bed.model.pages = False
    bed.go(600)
    assert (bed.state, bed.told) == (State.CLOSED, [])
    assert bed.canaries >= 19


def test_a_page_of_the_policy_that_fails_has_a_token_asked_for_which_decides() -> None:
    bed = vllm(replace(TRUTH, path="/probe"))
    bed.go(5)
    bed.model.probe = 503
    before = bed.canaries
    assert bed.go(10, lambda: bed.canaries > before) <= 4 * TRUTH.interval_s
    bed.go(60)
    assert (bed.state, bed.told) == (State.CLOSED, [])
    bed.model.probe = 200
    bed.go(20)
    bed.model.probe, bed.model.state = 503, "fails"
    bed.opens(10 * TRUTH.interval_s)


@pytest.mark.parametrize("state", ["refuses", "full"])
def test_answers_that_are_no_evidence_open_nothing(state: str) -> None:
    bed = vllm()
    bed.model.state = state
    bed.go(300)
    assert (bed.state, bed.told) == (State.CLOSED, [])
    assert bed.canaries >= 9
    assert (bed.node().overload_until > bed.clock.now - CANARY_S) is (state == "full")
    assert bed.heard.refused == (["404 no such model"] if state == "refuses" else [])  # once, and not with every one


def test_who_says_that_he_is_full_is_left_to_clients_again_soon() -> None:
    bed = vllm()
    bed.model.state = "full"
    before = bed.canaries
    bed.go(60, lambda: bed.canaries > before)
    assert bed.clock.now < bed.node().overload_until <= bed.clock.now + 1  # and not for a minute


def test_a_refusal_is_told_again_after_another_answer() -> None:
    bed = vllm()
    for state in ("refuses", "well", "refuses"):
        bed.model.state = state
        bed.go(2 * CANARY_S)
    assert bed.heard.refused == ["404 no such model"] * 2


def test_who_refuses_probes_is_not_asked_with_every_page() -> None:
    bed = vllm()
    bed.model.running = 1
    bed.go(5)
    bed.model.state = "hangs"
    bed.opens(15)
    bed.model.state = "refuses"
    bed.model.running = 0
    bed.go(10 * CANARY_S)
    assert (bed.state, bed.node().breaker.probes_out) == (State.HALF_OPEN, 0)
    assert 9 <= bed.canaries <= 11
    bed.model.state = "well"
    bed.closes(CANARY_S + 10)


def test_no_two_canaries_have_one_id() -> None:
    bed = vllm()
    drawn = iter(range(1, 1000))
    bed.fleet.chance = lambda: next(drawn) / 1000
    bed.go(300)
    ids = [link.sent.partition(b"x-request-id: ")[2].partition(b"\r")[0] for link in bed.pool.links if link.body]
    assert len(ids) == len(set(ids)) == bed.canaries > 5


def test_one_failure_is_none() -> None:
    bed = engine(MII)
    for _ in range(10):
        bed.model.state = "fails"
        before = bed.canaries
        bed.go(60, lambda before=before: bed.canaries > before)  # type: ignore[misc]
        bed.model.state = "well"
        bed.go(60)
    assert (bed.state, bed.told) == (State.CLOSED, [])


def test_real_traffic_is_the_better_canary() -> None:
    bed = engine(MII)
    for _ in range(60):
        bed.heard.successes += 1
        bed.go(10)
    assert bed.canaries == 0
    bed.node().in_flight += 1
    bed.go(600)
    assert bed.canaries == 0
    bed.node().in_flight -= 1
    bed.go(2 * CANARY_S)
    assert bed.canaries >= 1


def test_models_that_only_the_engine_names_owe_no_token_until_they_gave_one() -> None:
    bed = engine({"engine": "triton"})
    bed.model.parts = ("postprocessing", "preprocessing")
    bed.go(1200)
    assert (bed.state, bed.told) == (State.CLOSED, [])
    results = {result for _, _, result in bed.heard.canaries}
    assert results == {Result.SUCCESS, Result.IGNORED}
    bed.model.state = "fails"
    assert bed.opens(200) <= 3 * CANARY_S + 3 * TRUTH.interval_s
    bed.model.state = "well"
    bed.closes(30)  # by the one that gave a token


def test_a_model_that_is_refused_keeps_no_other_from_its_turn() -> None:
    bed = Sickbed(replace(plan(), endpoints=(ONE_OF_TWO,)))
    asked = []
    for state in ("refuses", "well", "refuses", "well"):
        bed.model.state = state
        before = bed.canaries
        bed.go(60, lambda before=before: bed.canaries > before)  # type: ignore[misc]
        [*_, last] = [link for link in bed.pool.links if link.body]
        asked.append(json.loads(last.body)["model"])
    assert asked == ["a", "b", "a", "b"]


def test_an_engine_that_gives_more_than_it_was_asked_gave_a_token() -> None:
    bed = engine(TRITON)
    bed.model.state = "hangs"  # what it says is said here
    begun = None
    while bed.clock.now - bed.start < 300:
        bed.go(0.5)
        for link in bed.open:
            assert link.path.endswith("/generate_stream") and link.sink is not None
            if link is not begun:
                begun = link
                link.received = True
                link.sink.on_head(ResponseHead(200, b"OK", [], EVENTS, None, False, b""))
            link.sink.on_body(TOKEN)
    assert {(ending, result) for _, ending, result in bed.heard.canaries} == {(Ending.TOTAL_TIMEOUT, Result.SUCCESS)}
    assert (bed.state, bed.told) == (State.CLOSED, [])


def test_deadlines_of_a_fleet_that_has_too_much_to_do_are_no_evidence() -> None:
    bed = engine(MII)
    detection = bed.fleet.services[ServiceName("chat")].detection
    assert detection is not None
    bed.go(40)
    bed.model.state = "hangs"
    detection.normal.overload = True
    bed.go(300)
    assert (bed.state, bed.told) == (State.CLOSED, [])
    detection.normal.overload = False
    bed.opens(120)


def test_an_engine_whose_pages_are_late_has_as_long_as_a_client_would_wait() -> None:
    bed = vllm()
    bed.model.running = 1
    bed.go(40)
    bed.model.pages = False
    sent = bed.canaries
    bed.model.running = 0
    bed.model.state = "hangs"
    bed.go(60, lambda: bed.canaries > sent)
    assert bed.go(60, lambda: len(bed.heard.canaries) > sent) >= FIRST_TOKEN_S - 1


def test_a_breaker_that_traffic_opens_again_is_not_closed_by_a_token() -> None:
    bed = vllm()
    bed.go(40)
    bed.model.state = "gone"
    bed.opens(30)
    bed.model.state = "well"
    bed.closes(15)
    breaker = bed.node().breaker
    permit = breaker.acquire(bed.clock.now)
    assert isinstance(permit, Permit)
    for _ in range(5):  # before the next look
        breaker.record(permit, Result.FAILURE, bed.clock.now, "server_error")
    before = bed.canaries
    bed.go(600)
    assert (bed.state, breaker.why, bed.canaries - before) == (State.OPEN, "consecutive", 0)


def test_an_order_that_is_over_is_no_health_checks_to_undo() -> None:
    bed = vllm()
    bed.go(40)
    bed.model.state = "gone"
    bed.opens(30)
    bed.node().breaker.force("open", bed.clock.now, "someone", bed.clock.now + 60)
    bed.model.state = "well"
    before = bed.canaries
    bed.go(600)
    assert (bed.state, bed.canaries - before) == (State.OPEN, 0)


def test_in_shadow_nobody_was_refused() -> None:
    bed = vllm(node=replace(NODES, mode="shadow"))
    bed.go(40)
    bed.model.state = "gone"
    bed.opens(30)
    breaker = bed.node().breaker
    bed.clock.now += 70.0
    client = breaker.acquire(bed.clock.now)
    assert isinstance(client, Permit) and client.probe
    bed.model.state = "well"
    bed.go(30)
    assert (bed.state, breaker.shadow_denied) == (State.HALF_OPEN, 0)


def test_an_engine_that_works_for_others_is_asked_for_nothing() -> None:
    bed = vllm()
    bed.model.running = 3
    bed.go(600)
    assert bed.canaries == 0


def test_requests_that_only_come_and_go_are_no_work() -> None:
    bed = vllm()
    for _ in range(int(4 * CANARY_S)):
        bed.model.cache = 0.5 - bed.model.cache  # other sidecars' canaries, say, that fail
        bed.go(1)
    assert bed.canaries >= 3


def test_a_canary_that_waits_behind_others_is_no_evidence() -> None:
    bed = vllm()
    bed.go(40)
    sent = bed.canaries
    bed.model.state = "hangs"
    bed.go(60, lambda: bed.canaries > sent)
    for _ in range(15):
        bed.model.tokens += 1  # of others
        bed.go(1)
    [*_, (_, ending, result)] = bed.heard.canaries
    assert (ending, result) == (Ending.HEAD_TIMEOUT, Result.IGNORED)
    assert bed.told == []


def test_a_breaker_that_others_opened_is_left_to_real_requests() -> None:
    bed = vllm()
    bed.go(5)
    breaker = bed.node().breaker
    permit = breaker.acquire(bed.clock.now)
    assert isinstance(permit, Permit)
    for _ in range(5):
        breaker.record(permit, Result.FAILURE, bed.clock.now, "server_error")
    assert bed.state is State.OPEN
    bed.go(600)
    assert (bed.state, bed.canaries) == (State.OPEN, 0)


def test_sidecars_that_share_a_log_share_their_canaries() -> None:
    bed = engine(MII)
    bed.heard.members = 10
    bed.apply(plan(**MII, version="v2"))  # type: ignore[arg-type]
    bed.go(6000)
    assert 6000 / (10 * CANARY_S) - 1 <= bed.canaries <= 6000 / (10 * CANARY_S * (1 - JITTER)) + 1
    # One that saw a failure tells the others: they need not wait for their turn.
    bed.model.state = "fails"
    bed.node().breaker.suspect()
    assert bed.opens(10) <= 4 * TRUTH.interval_s


def test_a_policy_that_asks_no_more_takes_back_what_is_under_way() -> None:
    bed = vllm()
    bed.go(40)
    bed.model.state = "fails"
    bed.opens(60)
    bed.model.state = "hangs"
    bed.go(10, lambda: bed.node().in_flight > 0)
    assert (bed.node().in_flight, bed.node().breaker.probes_out) == (1, 1)
    node = bed.node()
    bed.apply(plan(HealthCheck()))
    assert (node.in_flight, node.breaker.probes_out) == (0, 0)
    bed.clock.advance(60)
    assert bed.open == []


@pytest.mark.parametrize(
    "changes", [{}, {**MII, "front": "gateway"}, {**MII, "metrics_url": "http://h9:1"}, {**MII, "zone": "a"}]
)
def test_what_a_health_check_opened_is_its_to_close_under_other_terms_too(changes: dict[str, str]) -> None:
    bed = engine(MII)
    bed.go(40)
    bed.model.state = "fails"
    bed.opens(60)
    bed.model.state = "hangs"
    bed.go(10, lambda: bed.node().in_flight > 0)
    assert bed.state is State.HALF_OPEN
    bed.apply(plan(**changes))  # type: ignore[arg-type]
    assert (bed.node().in_flight, bed.node().breaker.probes_out) == (0, 0)
    bed.model.state = "well"
    bed.closes(10)


def test_a_node_that_drains_is_asked_for_nothing() -> None:
    bed = vllm()
    bed.node().draining = True
    bed.go(120)
    assert bed.canaries == 0


def test_a_model_that_is_not_ready_is_not_asked_for() -> None:
    bed = engine({"engine": "triton", "engine_model": "another"})
    bed.go(120)
    assert (bed.node().models, bed.canaries) == (frozenset(), 0)


# --- over real sockets ----------------------------------------------------------------------------------------------


async def test_a_real_engine_that_hangs_opens_without_a_client_and_closes_once_healed() -> None:
    rule = HealthCheck(
        mode="truth",
        interval_s=Seconds(0.02),
        timeout_s=Seconds(1),
        stalled_s=Seconds(0.1),
        canary_interval_s=Seconds(0.1),
    )
    async with contextlib.AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(Engine(Script(models=("m",))))
        breakers = node_breaker(5, open_s=Seconds(0.05), open_max_s=Seconds(0.1), adaptive=False)
        made = service(Endpoint(url=upstream.url), health_check=rule, breakers=breakers)
        patient = replace(made, deadlines=replace(made.deadlines, first_token_s=Seconds(0.2)))
        proxy = await stack.enter_async_context(sidecar(patient))
        [node] = proxy.running.fleet.services[ServiceName("default")].nodes.values()
        family = proxy.running.metrics.health_canaries
        await eventually(lambda: any("complete" in piece for piece in family.pieces()), "a canary that ended well")
        upstream.fail(Fault(kind=Kind.HANG))
        await eventually(lambda: proxy.state("node", node.key) is State.OPEN, "its breaker to open")
        assert node.breaker.why in ("stalled", "canary", "probe_failed")
        upstream.heal()
        await eventually(lambda: proxy.state("node", node.key) is State.CLOSED, "its breaker to close")
        assert b"sidecar_health_canaries_total" in (await proxy.running.exposition())[0]
        assert proxy.running.metrics.successes("default", "v1", node.key) == 0  # nobody's request
