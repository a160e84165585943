"""Polling on a clock that goes when told, over links that answer when told; once over real sockets."""

import asyncio
import contextlib
from collections.abc import Callable
from itertools import chain, repeat

import pytest
from msgspec.structs import replace

from sidecar.core.breaker import State
from sidecar.core.fleet import Fleet
from sidecar.core.pool import Node
from sidecar.demo.engine import Engine
from sidecar.demo.script import Fault, Kind, Script
from sidecar.kernel.exchange import ResponseHead
from sidecar.kernel.ids import EndpointKey, ServiceName
from sidecar.policy.schema import Endpoint, HealthCheck, Seconds, Service, Snapshot
from sidecar.proxy.ports import Sink
from sidecar.proxy.watchdog import SLOT_S
from sidecar.upstream.load import MAX_PAGE_BYTES, MAX_POLLS, MISSES, MODELS_EVERY, LoadReader
from tests.clock import Clock
from tests.harness import connect, eventually
from tests.under_test import chat, node_breaker, service, sidecar

POLLED = HealthCheck(mode="load", interval_s=Seconds(1), timeout_s=Seconds(0.8))
MODELS = b'{"object":"list","data":[{"id":"tiny"},{"id":"l1"}]}'


def load_page(waiting: int, running: int = 1) -> bytes:
    return b"vllm:num_requests_running %d.0\nvllm:num_requests_waiting %d.0\n" % (running, waiting)


class FakeLink:
    """A connection that keeps what was sent, and answers when told."""

    def __init__(self, key: EndpointKey, used: bool) -> None:
        self.key = key
        self.used = used
        self.received = False
        self.sent = b""
        self.aborted = False
        self.sink: Sink | None = None

    @property
    def path(self) -> str:
        return self.sent.split(b" ")[1].decode()

    @property
    def open(self) -> bool:
        """Whether it waits for its answer."""
        return self.sink is not None

    def send(self, sink: Sink, head: bytes, body: bytes, *, head_only: bool, upgrade: bool) -> None:
        assert not (self.sent or body or head_only or upgrade)
        self.sink = sink
        self.sent = head

    def answer(self, status: int, *parts: bytes) -> None:
        """A whole answer, as far as its reader lets it come."""
        sink = self.sink
        assert sink is not None
        self.received = True
        sink.on_head(ResponseHead(status, b"", [], b"text/plain", None, False, b""))
        for part in parts:
            if self.sink is None:
                return
            sink.on_body(part)
        if self.sink is not None:
            sink = self._take()
            sink.on_end([])
            sink.on_released()

    def lose(self) -> None:
        self._take().on_lost()

    def garble(self) -> None:
        self._take().on_bad_bytes("no HTTP")

    def _take(self) -> Sink:
        sink, self.sink = self.sink, None
        assert sink is not None
        return sink

    def abort(self) -> None:
        self.aborted = True
        self.sink = None

    def close(self) -> None:
        raise AssertionError("a poll has no tunnel")

    def open_upload(self, *, chunked: bool) -> None:
        raise AssertionError

    def upload(self, data: bytes) -> None:
        raise AssertionError

    def end_upload(self, trailers: list[bytes]) -> None:
        raise AssertionError

    def send_tunnel(self, data: bytes) -> None:
        raise AssertionError

    def pause(self) -> None:
        raise AssertionError

    def resume(self) -> None:
        raise AssertionError


class FakePool:
    """A connector that connects at once, or keeps who asks waiting while `slow`; `reuses` lends used connections."""

    def __init__(self) -> None:
        self.slow = False
        self.reuses = False
        self.links: list[FakeLink] = []
        self.fresh: list[bool] = []
        self.connecting: list[tuple[Sink, float]] = []

    def open(self, key: EndpointKey, endpoint: Endpoint, connect_s: float, sink: Sink, *, fresh: bool = False) -> None:
        self.fresh.append(fresh)
        if self.slow:
            self.connecting.append((sink, connect_s))
            return
        link = FakeLink(key, self.reuses and not fresh)
        self.links.append(link)
        sink.on_connected(link)

    def cancel(self, sink: Sink) -> None:
        self.connecting = [waiting for waiting in self.connecting if waiting[0] is not sink]


class Bench:
    """A reader over fakes. `chances` are where in the interval first polls fall; in its middle beyond."""

    def __init__(self, *services: Service, chances: tuple[float, ...] = ()) -> None:
        drawn = chain(chances, repeat(0.5))
        self.clock = Clock()
        self.start = self.clock.now
        self.fleet = Fleet(lambda: next(drawn))
        self.pool = FakePool()
        self.reader = LoadReader(self.fleet, self.pool, self.clock)
        self.apply(*services)

    def apply(self, *services: Service) -> None:
        self.fleet.apply(Snapshot(version=1, services=services), self.clock.now)
        self.reader.follow()

    def node(self, number: int = 1) -> Node:
        return self.fleet.services[ServiceName("chat")].nodes[EndpointKey(f"h{number}:80")]

    @property
    def open(self) -> list[FakeLink]:
        return [link for link in self.pool.links if link.open]

    def asked(self) -> FakeLink:
        """The one link that waits for its answer."""
        [link] = self.open
        return link

    def answer_all(self, waiting: int = 0) -> None:
        """Whoever is asked answers, page after page."""
        while self.open:
            link = self.open[0]
            link.answer(200, MODELS if link.path == "/v1/models" else load_page(waiting))

    def until_asked(self) -> None:
        """Time goes by until somebody waits for an answer, or for a connection."""
        before = self.clock.now
        while not (self.open or self.pool.connecting):
            self.clock.advance(SLOT_S)
            assert self.clock.now < before + 3 * POLLED.interval_s, "nobody is asked"

    def poll(self, waiting: int = 0) -> list[str]:
        """The next to be asked answer; the paths asked for."""
        before = len(self.pool.links)
        self.until_asked()
        self.answer_all(waiting)
        return [link.path for link in self.pool.links[before:]]


def plan(count: int = 1, rule: HealthCheck = POLLED, **changes: str) -> Service:
    endpoints = tuple(Endpoint(url=f"http://h{number}:80", **changes) for number in range(1, count + 1))  # type: ignore[arg-type]
    return Service(name="chat", endpoints=endpoints, health_check=rule, breakers=node_breaker(1))


# --- who is asked, and when -----------------------------------------------------------------------------------------


def test_nobody_is_asked_while_policy_says_off() -> None:
    bench = Bench(plan(rule=HealthCheck()))
    bench.clock.advance(60)
    assert bench.pool.links == []


@pytest.mark.parametrize("engine", ["triton", "deepspeed"])
def test_engine_without_a_dialect_is_not_asked(engine: str) -> None:
    bench = Bench(plan(engine=engine))
    bench.clock.advance(60)
    assert bench.pool.links == []


def test_first_polls_are_spread_over_the_interval() -> None:
    bench = Bench(plan(3), chances=(0.75, 0.25, 0.5))
    seen = []
    for _ in range(int(1 / SLOT_S) + 2):
        bench.clock.advance(SLOT_S)
        seen += [(link.key, round(bench.clock.now - bench.start, 2)) for link in bench.open]
        bench.answer_all()
    assert [key for key, _ in seen] == ["h2:80", "h3:80", "h1:80"]
    for (_, at), due in zip(seen, (0.25, 0.5, 0.75), strict=True):
        assert due <= at <= due + 2 * SLOT_S


def test_each_node_is_asked_once_an_interval() -> None:
    bench = Bench(plan(3), chances=(0.1, 0.5, 0.9))
    for _ in range(1000):
        bench.clock.advance(0.01)
        bench.answer_all()
    loads = [link.key for link in bench.pool.links if link.path == "/metrics"]
    assert sorted(loads) == ["h1:80"] * 10 + ["h2:80"] * 10 + ["h3:80"] * 10


def test_late_answers_shift_no_phase_and_leave_out_polls_that_passed() -> None:
    bench = Bench(plan(rule=HealthCheck(mode="load", interval_s=Seconds(1), timeout_s=Seconds(10))))
    bench.until_asked()
    bench.clock.advance(2.7)
    bench.answer_all()
    bench.clock.advance_to(bench.start + 3.5 - SLOT_S)
    assert bench.open == []
    bench.clock.advance_to(bench.start + 3.5 + 2 * SLOT_S)
    assert bench.asked().path == "/metrics"


def test_request_is_a_plain_get() -> None:
    bench = Bench(plan())
    bench.until_asked()
    assert bench.asked().sent == b"GET /metrics HTTP/1.1\r\nhost: h1:80\r\nuser-agent: llm-sidecar\r\n\r\n"


def test_host_of_a_unix_socket_is_localhost() -> None:
    service = Service(name="chat", endpoints=(Endpoint(url="unix:///run/ëngine.sock"),), health_check=POLLED)
    bench = Bench(service)
    bench.until_asked()
    assert b"\r\nhost: localhost\r\n" in bench.asked().sent


def test_only_so_many_are_asked_at_a_time() -> None:
    count = MAX_POLLS + 3
    bench = Bench(plan(count))
    bench.until_asked()
    assert len(bench.open) == MAX_POLLS
    bench.open[0].answer(503)
    assert len(bench.open) == MAX_POLLS
    bench.answer_all()
    assert len({link.key for link in bench.pool.links}) == count
    bench.until_asked()
    assert len(bench.open) == MAX_POLLS


def test_who_waited_longest_for_a_turn_is_next() -> None:
    early = (0.1,) * MAX_POLLS
    bench = Bench(plan(MAX_POLLS + 3), chances=(*early, 0.4, 0.2, 0.3))
    bench.clock.advance(0.5)
    for number in (2, 3, 1):
        bench.open[0].answer(503)
        assert bench.pool.links[-1].key == f"h{MAX_POLLS + number}:80"


# --- what comes of it -----------------------------------------------------------------------------------------------


def test_queue_and_models_are_written_on_the_node() -> None:
    bench = Bench(plan())
    node = bench.node()
    assert (node.waiting, node.models) == (0, None)
    bench.until_asked()
    page = load_page(7)
    bench.asked().answer(200, *(page[at : at + 1] for at in range(len(page))))
    assert (node.waiting, node.models) == (7, None)
    bench.asked().answer(200, MODELS)
    assert (node.waiting, node.models, node.healthy) == (7, frozenset({"tiny", "l1"}), True)
    bench.poll(waiting=3)
    assert node.waiting == 3


def test_models_are_asked_for_every_tenth_time() -> None:
    bench = Bench(plan())
    paths = [bench.poll() for _ in range(2 * MODELS_EVERY + 1)]
    assert [turn for turn, asked in enumerate(paths) if "/v1/models" in asked] == [0, MODELS_EVERY, 2 * MODELS_EVERY]
    assert all(asked[0] == "/metrics" and len(asked) <= 2 for asked in paths)


def lost(bench: Bench) -> None:
    bench.asked().lose()


def bad_bytes(bench: Bench) -> None:
    bench.asked().garble()


def broken_off(bench: Bench) -> None:
    link = bench.asked()
    assert link.sink is not None
    link.sink.on_head(ResponseHead(200, b"", [], b"", None, False, b""))
    link.sink.on_body(load_page(9))
    link.received = True
    link.lose()


def silent(bench: Bench) -> None:
    link = bench.asked()
    bench.clock.advance(POLLED.timeout_s + SLOT_S)
    assert link.aborted


def answers(status: int, *parts: bytes) -> Callable[[Bench], None]:
    return lambda bench: bench.asked().answer(status, *parts)


def too_large(bench: Bench) -> None:
    link = bench.asked()
    link.answer(200, load_page(9), *[b"#" * 65536] * (MAX_PAGE_BYTES // 65536))
    assert link.aborted


FAILURES: dict[str, tuple[Callable[[Bench], None], bool]] = {
    # what happens -> whether the engine lives nevertheless
    "lost": (lost, False),
    "broken off": (broken_off, False),
    "not HTTP": (bad_bytes, False),
    "no answer": (silent, False),
    "500": (answers(500, load_page(9)), False),
    "503": (answers(503), False),
    "404: metrics are off": (answers(404, b"{}"), True),
    "401": (answers(401, load_page(9)), True),
    "a redirect": (answers(307), True),
    "another page": (answers(200, b"<html></html>"), True),
    "an empty page": (answers(200), True),
    "a page without an end": (too_large, True),
}


@pytest.mark.parametrize(("fail", "lives"), FAILURES.values(), ids=FAILURES.keys())
def test_three_failures_in_a_row_make_what_was_said_unknown(fail: Callable[[Bench], None], lives: bool) -> None:
    bench = Bench(plan())
    node = bench.node()
    bench.poll(waiting=7)
    for turn in range(1, MISSES + 3):
        bench.until_asked()
        fail(bench)
        assert bench.open == []
        forgotten = turn >= MISSES
        assert node.waiting == (0 if forgotten else 7), turn
        assert node.models == (None if forgotten and not lives else frozenset({"tiny", "l1"})), turn
        assert node.healthy is lives
    bench.poll(waiting=5)
    assert (node.waiting, node.models, node.healthy) == (5, frozenset({"tiny", "l1"}), True)
    assert (node.breaker.state, node.breaker.generation, node.breaker.unblemished) == (State.CLOSED, 0, True)


def test_failures_between_answers_make_nothing_unknown() -> None:
    bench = Bench(plan())
    node = bench.node()
    bench.poll(waiting=7)
    for _ in range(4):
        for _ in range(MISSES - 1):
            bench.until_asked()
            bench.asked().lose()
            assert (node.waiting, node.healthy) == (7, False)
        bench.poll(waiting=7)
        assert (node.waiting, node.healthy) == (7, True)
    assert node.models is not None


def test_engine_that_comes_back_is_asked_for_its_models_at_once() -> None:
    bench = Bench(plan())
    bench.poll()
    bench.until_asked()
    bench.asked().lose()
    assert bench.poll() == ["/metrics", "/v1/models"]
    assert bench.poll() == ["/metrics"]


@pytest.mark.parametrize(
    "fail",
    [answers(401, MODELS), answers(200, b"[]"), answers(500), lost, silent, too_large],
    ids=["401", "no list", "500", "lost", "no answer", "without an end"],
)
def test_models_that_cannot_be_read_thrice_are_unknown(fail: Callable[[Bench], None]) -> None:
    bench = Bench(plan())
    node = bench.node()
    for _ in range(MODELS_EVERY):
        bench.poll(waiting=7)
    for turn in range(1, MISSES + 1):
        bench.until_asked()
        bench.asked().answer(200, load_page(7))
        # A failure is followed up by the next poll, not by the tenth.
        assert bench.asked().path == "/v1/models", turn
        fail(bench)
        assert node.models == (None if turn == MISSES else frozenset({"tiny", "l1"})), turn
    # Who never tells is asked as seldom as who does.
    paths = [bench.poll(waiting=7) for _ in range(MODELS_EVERY)]
    assert [turn for turn, asked in enumerate(paths, start=1) if "/v1/models" in asked] == [MODELS_EVERY]
    assert (node.waiting, node.models) == (7, frozenset({"tiny", "l1"}))


def test_models_that_can_be_read_in_between_stay_known() -> None:
    bench = Bench(plan())
    bench.poll()
    for _ in range(3):
        for _ in range(MISSES - 1):
            bench.until_asked()
            bench.asked().lose()
            assert bench.node().models == frozenset({"tiny", "l1"})
        bench.poll()


def test_stale_connection_is_no_failure() -> None:
    bench = Bench(plan())
    bench.pool.reuses = True
    bench.until_asked()
    bench.asked().lose()
    assert bench.pool.fresh == [False, True]
    bench.asked().answer(200, load_page(7))
    assert (bench.node().waiting, bench.node().healthy) == (7, True)


def test_second_loss_is_a_failure() -> None:
    bench = Bench(plan())
    bench.pool.reuses = True
    bench.until_asked()
    bench.asked().lose()
    bench.asked().lose()
    assert (bench.open, bench.node().healthy) == ([], False)


def test_reused_connection_that_breaks_within_the_answer_is_a_failure() -> None:
    bench = Bench(plan())
    bench.pool.reuses = True
    bench.until_asked()
    broken_off(bench)
    assert (bench.open, bench.node().healthy) == ([], False)


def test_connect_that_fails_is_a_failure() -> None:
    bench = Bench(plan())
    bench.pool.slow = True
    bench.until_asked()
    [(sink, connect_s)] = bench.pool.connecting
    assert connect_s == POLLED.timeout_s
    sink.on_connect_failed("refused")
    assert not bench.node().healthy


def test_connect_without_an_end_is_given_up() -> None:
    bench = Bench(plan())
    bench.pool.slow = True
    bench.until_asked()
    bench.clock.advance(POLLED.timeout_s + 2 * SLOT_S)
    assert (bench.pool.connecting, bench.node().healthy) == ([], False)


# --- policies come and go -------------------------------------------------------------------------------------------


def gone(bench: Bench) -> None:
    bench.apply(Service(name="chat", health_check=POLLED))


def service_gone(bench: Bench) -> None:
    bench.apply()


def switched_off(bench: Bench) -> None:
    bench.apply(plan(rule=HealthCheck()))


def another_engine(bench: Bench) -> None:
    bench.apply(plan(engine="triton"))


def stopped(bench: Bench) -> None:
    bench.reader.stop()


LEAVING = pytest.mark.parametrize("leave", [gone, service_gone, switched_off, another_engine, stopped])


@LEAVING
def test_who_is_watched_no_more_is_forgotten_and_not_asked(leave: Callable[[Bench], None]) -> None:
    bench = Bench(plan())
    node = bench.node()
    bench.poll(waiting=7)
    bench.until_asked()
    bench.asked().lose()
    assert (node.waiting, node.models is None, node.healthy) == (7, False, False)
    leave(bench)
    assert (node.waiting, node.models, node.healthy) == (0, None, True)
    before = len(bench.pool.links)
    bench.clock.advance(60)
    assert len(bench.pool.links) == before


@LEAVING
@pytest.mark.parametrize("slow", [False, True], ids=["asked", "connecting"])
def test_poll_under_way_is_broken_off(leave: Callable[[Bench], None], slow: bool) -> None:
    bench = Bench(plan())
    node = bench.node()
    bench.pool.slow = slow
    bench.until_asked()
    assert len(bench.open) + len(bench.pool.connecting) == 1
    leave(bench)
    assert (bench.open, bench.pool.connecting) == ([], [])
    bench.clock.advance(60)
    assert (bench.open, bench.pool.connecting) == ([], [])
    assert node.healthy


@LEAVING
def test_places_of_those_who_left_are_free_again(leave: Callable[[Bench], None]) -> None:
    bench = Bench(plan(2 * MAX_POLLS))
    bench.until_asked()
    assert len(bench.open) == MAX_POLLS
    asked = len(bench.pool.links)
    leave(bench)
    # Nobody who only waited for a turn was asked on the way out, but for a node that stays.
    assert len(bench.pool.links) == asked
    bench.apply(plan(2 * MAX_POLLS, HealthCheck(mode="load", interval_s=Seconds(1), timeout_s=Seconds(0.5))))
    bench.until_asked()
    assert len(bench.open) == MAX_POLLS


def test_node_that_waits_for_its_turn_and_stays_gets_it() -> None:
    whole = plan(MAX_POLLS + 1)
    bench = Bench(whole)
    bench.until_asked()
    [last] = {bench.node(number + 1).key for number in range(MAX_POLLS + 1)} - {link.key for link in bench.open}
    alone = tuple(endpoint for endpoint in whole.endpoints if endpoint.url.endswith(last))
    bench.apply(Service(name="chat", endpoints=alone, health_check=POLLED))
    assert bench.asked().key == last


def test_policy_that_changes_something_else_changes_nothing_here() -> None:
    bench = Bench(plan())
    bench.poll(waiting=7)
    bench.until_asked()
    under_way = bench.asked()
    changed = Service(name="chat", endpoints=plan().endpoints, health_check=POLLED)
    bench.apply(changed)
    assert bench.node().waiting == 7 and bench.node().models
    assert bench.asked() is under_way
    bench.answer_all(waiting=8)
    assert bench.node().waiting == 8


def test_new_terms_hold_from_now_on_and_not_after_the_old_interval() -> None:
    bench = Bench(plan(rule=HealthCheck(mode="load", interval_s=Seconds(3600))))
    bench.clock.advance(1801)
    bench.answer_all(waiting=7)
    bench.apply(plan())
    assert bench.poll() == ["/metrics", "/v1/models"]


def test_an_endpoint_that_came_alone_is_asked_and_new_weights_change_nothing() -> None:
    bench = Bench(plan())
    bench.fleet.put(plan(2), bench.clock.now)
    bench.reader.follow()
    watched = dict(bench.reader._watches)
    assert {node.key for node in watched} == {"h1:80", "h2:80"}
    generation = bench.fleet.generation
    policy = bench.fleet.services[ServiceName("chat")].policy
    bench.fleet.put(replace(policy, split={"v1": 1.0}), bench.clock.now)
    assert bench.fleet.generation == generation


def test_new_node_is_watched_beside_the_old_ones() -> None:
    bench = Bench(plan(1))
    bench.poll(waiting=7)
    bench.apply(plan(2))
    assert bench.node(1).waiting == 7
    bench.poll(waiting=8)
    bench.poll(waiting=8)
    assert (bench.node(1).waiting, bench.node(2).waiting) == (8, 8)


async def test_run_holds_nothing_once_cancelled() -> None:
    bench = Bench()
    bench.fleet.apply(Snapshot(version=1, services=(plan(),)), bench.clock.now)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(bench.reader.run())
        await asyncio.sleep(0)
        bench.until_asked()
        assert bench.asked().path == "/metrics"
        running.cancel()
    assert bench.open == []
    bench.clock.advance(60)
    assert bench.open == []


# --- over real sockets ----------------------------------------------------------------------------------------------


FAST = HealthCheck(mode="load", interval_s=Seconds(0.02), timeout_s=Seconds(1))


async def test_a_real_engine_tells_its_queue_its_models_and_its_death() -> None:
    script = Script(models=("m", "adapter"), slots=1, first_token_s=3600.0)
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(Engine(script))
        plan = service(Endpoint(url=engine.url), health_check=FAST, breakers=node_breaker(1))
        proxy = await stack.enter_async_context(sidecar(plan))
        [node] = proxy.running.fleet.services[ServiceName("default")].nodes.values()
        await eventually(lambda: node.models == frozenset({"m", "adapter"}), "its models")
        assert node.waiting == 0
        async with contextlib.AsyncExitStack() as others:
            for _ in range(4):
                client = await others.enter_async_context(connect(engine.port))
                await client.send(chat())
            await eventually(lambda: node.waiting == 3, "its queue")
        await eventually(lambda: node.waiting == 0, "its queue to be empty again")
        engine.fail(Fault(kind=Kind.DIE))
        await eventually(lambda: not node.healthy and node.models is None, "its death")
        assert proxy.state("node", node.key) is State.CLOSED
        engine.heal()
        await eventually(lambda: node.healthy and node.models is not None, "its return")
