"""Polling on a clock that goes when told, over links that answer when told; once over real sockets."""

import asyncio
import contextlib
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from sidecar.adapters.vllm import Vllm
from sidecar.core.breaker import State
from sidecar.demo.engine import Engine
from sidecar.demo.script import Fault, Kind, Script
from sidecar.kernel.exchange import ResponseHead
from sidecar.kernel.ids import ServiceName
from sidecar.policy.schema import Endpoint, HealthCheck, Seconds, Service, Snapshot
from sidecar.proxy.watchdog import SLOT_S
from sidecar.upstream.load import MAX_PAGE_BYTES, MAX_POLLS, MISSES, RETRY_MODELS
from tests.harness import connect, eventually
from tests.under_test import chat, node_breaker, service, sidecar
from tests.upstream.polling import MODELS, POLLED, Bench, load_page, plan

MODELS_EVERY = Vllm.models_every


# --- who is asked, and when -----------------------------------------------------------------------------------------


def test_nobody_is_asked_while_policy_says_off() -> None:
    bench = Bench(plan(rule=HealthCheck()))
    bench.clock.advance(60)
    assert bench.pool.links == []


FRONTS = {
    # what the policy says -> what is asked, and where
    "vllm": ({}, [("h1:80", "GET /metrics"), ("h1:80", "GET /v1/models")]),
    "vllm, metrics apart": (
        {"metrics_url": "http://h1:9"},
        [("h1:9", "GET /metrics"), ("h1:80", "GET /v1/models")],
    ),
    "triton": ({"engine": "triton"}, [("h1:80", "GET /v2/health/live"), ("h1:80", "POST /v2/repository/index")]),
    "triton, metrics named": (
        {"engine": "triton", "metrics_url": "http://h1:8002"},
        [("h1:8002", "GET /metrics"), ("h1:80", "POST /v2/repository/index")],
    ),
    "triton, openai": (
        {"engine": "triton", "front": "openai"},
        [("h1:80", "GET /metrics"), ("h1:80", "GET /v1/models")],
    ),
    "mii": ({"engine": "deepspeed"}, [("h1:80", "GET /health")]),
    "mii, gateway": ({"engine": "deepspeed", "front": "gateway"}, [("h1:80", "GET /healthz")]),
}


@pytest.mark.parametrize(("changes", "expected"), FRONTS.values(), ids=FRONTS.keys())
def test_each_front_is_asked_for_what_it_tells(changes: dict[str, str], expected: list[tuple[str, str]]) -> None:
    bench = Bench(plan(**changes))  # type: ignore[arg-type]
    bench.until_asked()
    asked = []
    while bench.open:
        link = bench.asked()
        host = link.sent.partition(b"host: ")[2].partition(b"\r\n")[0].decode()
        assert host == link.key
        asked.append((host, b" ".join(link.sent.split(b" ")[:2]).decode()))
        assert bool(link.body) == link.sent.startswith(b"POST")
        link.answer(200, b"")
    assert asked == expected
    assert bench.node().healthy and bench.node().heard


def test_what_is_posted_is_json_of_its_length() -> None:
    bench = Bench(plan(engine="triton"))
    bench.until_asked()
    bench.asked().answer(200)
    link = bench.asked()
    assert link.sent == (
        b"POST /v2/repository/index HTTP/1.1\r\nhost: h1:80\r\nuser-agent: llm-sidecar\r\n"
        b"content-type: application/json\r\ncontent-length: 2\r\n\r\n"
    )
    assert link.body == b"{}"


def index(**states: str) -> bytes:
    told = [f'{{"name":"{name}","version":"1","state":"{state}"}}' for name, state in states.items()]
    return f"[{','.join(told)}]".encode()


def polled(bench: Bench, page: bytes) -> None:
    """A Triton answers one poll."""
    bench.until_asked()
    bench.asked().answer(200)
    bench.asked().answer(200, page)


def test_models_of_a_triton_are_those_that_are_ready() -> None:
    bench = Bench(plan(engine="triton"))
    node = bench.node()
    polled(bench, index(a="READY", b="LOADING", c="READY"))
    assert node.models == frozenset({"a", "c"})
    polled(bench, index(a="READY", b="READY", c="UNLOADING"))  # every poll, not every tenth
    assert node.models == frozenset({"a", "b"})
    polled(bench, index())
    assert node.models == frozenset()


def test_an_engine_that_has_its_own_name_for_the_model_serves_all_or_nothing() -> None:
    bench = Bench(plan(engine="triton", engine_model="smol"))
    polled(bench, index(smol="READY"))
    assert bench.node().models is None
    polled(bench, index(smol="UNLOADING", other="READY"))
    assert bench.node().models == frozenset()
    assert bench.fleet.services[ServiceName("chat")].pool("any", None).nodes == ()
    for turn in range(1, MISSES + 1):
        polled(bench, b"?")
        assert bench.node().models == (frozenset() if turn < MISSES else None)


def test_one_version_of_a_model_serves_while_it_is_ready() -> None:
    bench = Bench(plan(engine="triton", engine_model="smol/versions/2"))
    polled(bench, index(smol="READY"))  # another version
    assert bench.node().models == frozenset()
    polled(bench, b'[{"name":"smol","version":"2","state":"READY"}]')
    assert bench.node().models is None


def test_a_queue_that_is_read_elsewhere_says_nothing_of_the_engine() -> None:
    bench = Bench(plan(engine="triton", metrics_url="http://h1:8002"))
    node = bench.node()

    def polls(*, metrics: bool, models: bool) -> None:
        bench.until_asked()
        for answered, page in ((metrics, b"nv_inference_pending_request_count 3\n"), (models, index(a="READY"))):
            link = bench.asked()
            assert (link.key, link.path) == (
                ("h1:8002", "/metrics") if link.path == "/metrics" else ("h1:80", "/v2/repository/index")
            )
            if answered:
                link.answer(200, page)
            else:
                link.lose()

    polls(metrics=True, models=True)
    assert (node.healthy, node.waiting, node.models) == (True, 3, frozenset({"a"}))
    for _ in range(MISSES):
        polls(metrics=False, models=True)
    assert (node.healthy, node.waiting, node.models) == (True, 0, frozenset({"a"}))
    for _ in range(MISSES):
        polls(metrics=True, models=False)
    assert (node.healthy, node.waiting, node.models) == (False, 3, None)
    polls(metrics=True, models=True)
    assert (node.healthy, node.models) == (True, frozenset({"a"}))


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


PROBED = replace(POLLED, path="/ready?deep=1")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [("h1:80", "/metrics"), ("h1:80", "/ready?deep=1"), ("h1:80", "/v1/models")]),
        ({"metrics_url": "http://h1:9"}, [("h1:9", "/metrics"), ("h1:80", "/ready?deep=1"), ("h1:80", "/v1/models")]),
        ({"engine": "deepspeed"}, [("h1:80", "/health"), ("h1:80", "/ready?deep=1")]),
    ],
    ids=["vllm", "vllm, metrics apart", "mii"],
)
def test_the_policy_s_page_is_asked_for_on_the_engine_s_address(
    changes: dict[str, str], expected: list[tuple[str, str]]
) -> None:
    bench = Bench(plan(rule=PROBED, **changes))  # type: ignore[arg-type]
    bench.until_asked()
    asked = []
    while bench.open:
        link = bench.asked()
        asked.append((link.key, link.path))
        link.answer(200, b"")
    assert asked == expected
    assert bench.node().healthy


@pytest.mark.parametrize(
    ("status", "good"), [(200, True), (204, True), (302, True), (404, False), (401, False), (500, False), (0, False)]
)
def test_the_policy_s_page_alone_says_whether_an_engine_answers(status: int, good: bool) -> None:
    bench = Bench(plan(rule=PROBED))
    node = bench.node()
    for turn, load in enumerate((200, 404, 503)):
        bench.until_asked()
        bench.asked().answer(load, load_page(7))
        if status:
            bench.asked().answer(status)
        else:
            bench.asked().lose()
        assert node.healthy is good
        assert bool(bench.open) is (good and turn == 0), "its models are asked of who answers"
        for link in bench.open:
            link.answer(200, MODELS)
    assert node.waiting == 7


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
    assert [turn for turn, asked in enumerate(paths, start=1) if "/v1/models" in asked] == [RETRY_MODELS]
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


def stopped(bench: Bench) -> None:
    bench.reader.stop()


LEAVING = pytest.mark.parametrize("leave", [gone, service_gone, switched_off, stopped])


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


def test_another_engine_at_the_address_is_asked_in_its_own_words_at_once() -> None:
    bench = Bench(plan())
    bench.poll(waiting=7)
    bench.apply(plan(engine="triton"))
    assert (bench.node().waiting, bench.node().models) == (0, None)
    polled(bench, index(a="READY"))
    assert bench.node().models == frozenset({"a"})


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
