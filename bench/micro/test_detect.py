"""Detecting: what it adds to a request, to a chunk and to a second, and what it keeps. Budgets in ns per unit.

What it may add to a request and to a chunk was set before it was written: 12 us and 0.5 us; so were the bytes per
endpoint and per session. The other budgets are half as much again as what it took when they were set.
"""

import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable
from math import exp
from random import Random

import pytest

from bench import sessions
from bench.micro.conftest import _RESULTS, REFERENCE_NS, ROUNDS, Budgeted, Calibration, Result
from bench.micro.test_decide import service_of, state_of
from bench.micro.test_read import middle_of
from sidecar.core import evidence
from sidecar.core.breaker import Permit
from sidecar.core.fleet import Fleet
from sidecar.core.pool import Node
from sidecar.core.service import ServiceState
from sidecar.kernel import outcome
from sidecar.kernel.ids import SessionId
from sidecar.kernel.outcome import Ending
from sidecar.proxy.attempt import Attempt
from sidecar.proxy.watchdog import Watchdog
from sidecar.wire.call import read_call
from tests.clock import Clock
from tests.proxy.bench import chat
from tests.proxy.fakes import FakeClient, FakeConnector, head_of

REQUEST_NS = 12_000
CHUNK_NS = 500
LATE_NS = 12_000
SECOND_NS = {10: 1700, 1000: 750}
LEARN_NS = 4300
ENDPOINT_BYTES = 16 * 1024
SESSION_BYTES = 400

UNITS = 200
CHUNKS = 100  # of `middle_of`
SIZES = [int(2000 * exp(Random(number).gauss(0.0, 1.0))) for number in range(UNITS)]
TOOK_S = [0.2 * exp(0.2 * Random(number).gauss(0.0, 1.0)) for number in range(UNITS)]
SESSIONS = [SessionId(f"{number:08x}-4b6e-4c1d-9d3e-5b1f0a2c7e88") for number in range(UNITS)]
SUCCESS, FAILURE = outcome.Result.SUCCESS, outcome.Result.FAILURE


def watched(count: int) -> tuple[Fleet, ServiceState, list[Node], Permit]:
    """Endpoints whose detector has learnt for a minute."""
    fleet, service = state_of(service_of(count))
    nodes = list(service.nodes.values())
    permit = nodes[0].breaker.acquire(0.0)
    assert isinstance(permit, Permit) and service.detection is not None
    for second in range(60):
        for number in range(UNITS):
            step(service, nodes[number % count], permit, number, float(second))
        fleet.tick(second + 1.0)
    assert service.detection.ready and not service.roster.not_closed
    return fleet, service, nodes, permit


def step(service: ServiceState, node: Node, permit: Permit, number: int, now: float) -> None:
    """What one good request asks of the detector, the breaker's own step in it."""
    expectation = evidence.expect(service, node, permit, "m", SIZES[number], SESSIONS[number])
    assert expectation is not None
    evidence.first_token(service, node, expectation, TOOK_S[number], now)
    evidence.ended(service, node, permit, expectation, Ending.COMPLETE, SUCCESS, 0.05, now)


@pytest.mark.parametrize("count", [1, 9])
def test_detector_of_a_request(budget: Budgeted, count: int) -> None:
    _, service, nodes, permit = watched(count)
    line = nodes[0].detector.line if nodes[0].detector is not None else None
    assert line is not None and line.ready
    pods = [nodes[number % count] for number in range(UNITS)]

    def run() -> None:
        line.pending.clear()  # a new second: what is sampled at all costs its sample
        for number, node in enumerate(pods):
            step(service, node, permit, number, 61.0)

    budget(REQUEST_NS, run, UNITS)
    assert not service.roster.not_closed and line.pending


def test_detector_of_a_late_request(budget: Budgeted) -> None:
    _, service, nodes, permit = watched(9)
    detector = nodes[0].detector
    assert detector is not None

    def run() -> None:
        for number in range(UNITS):
            detector.fast = detector.gray = detector.location = 1.0  # on trial for long, and never convicted
            expectation = evidence.expect(service, nodes[0], permit, "m", SIZES[number], SESSIONS[number])
            assert expectation is not None
            evidence.late(service, nodes[0], expectation, False, 61.0)
            evidence.first_token(service, nodes[0], expectation, 9.0, 61.0)
            evidence.ended(service, nodes[0], permit, expectation, Ending.COMPLETE, SUCCESS, 0.05, 61.0)

    budget(LATE_NS, run, UNITS)
    assert not service.roster.not_closed and len(detector.bad_at) > 2


@pytest.mark.parametrize("count", list(SECOND_NS))
def test_second_per_endpoint(budget: Budgeted, count: int) -> None:
    """Of a thousand, half wait for the next second."""
    fleet, service, nodes, permit = watched(count)
    for number, node in enumerate(nodes):
        step(service, node, permit, number % UNITS, 60.0)
    moments = iter(range(61, 10_000_000))

    def run() -> None:
        now = float(next(moments))
        for node in nodes:
            if node.detector is not None:
                node.detector.recent_n = 10.0
        fleet.tick(now)

    budget(SECOND_NS[count], run, count)


def test_learning_per_sample(budget: Budgeted) -> None:
    """At most 64 of a second, later 16."""
    _, service, nodes, permit = watched(1)
    detector = nodes[0].detector
    assert detector is not None and detector.line is not None
    line = detector.line
    for number in range(UNITS):
        step(service, nodes[0], permit, number, 61.0)
    samples = list(line.pending)

    def run() -> None:
        line.pending.extend(samples)
        line.learn(62.0)

    budget(LEARN_NS, run, len(samples))


# --- a chunk --------------------------------------------------------------------------------------------------------


class Owner:
    """Takes everything."""

    def reply_lines(self, attempt: Attempt) -> bytes:
        return b""

    def attempt_accepted(self, attempt: Attempt) -> None: ...

    def attempt_late(self, attempt: Attempt) -> None: ...

    def attempt_done(self, attempt: Attempt) -> None: ...


class Client(FakeClient):
    """Keeps nothing."""

    def send_body(self, data: bytes) -> None: ...


def streaming(expected: bool) -> Callable[[], None]:
    """Chunks of a stream that is under way, on an attempt of which something is expected or nothing."""
    _, service, nodes, permit = watched(1)
    clock, connector, asked = Clock(), FakeConnector(), chat()
    assert asked.api is not None
    attempt = Attempt(
        Owner(),
        asked,
        read_call(asked.api, asked.body),
        Client(),
        nodes[0],
        connector,
        clock.time,
        Watchdog(clock),
        service.times,
        1e9,
    )
    if expected:
        attempt.expectation = evidence.expect(service, nodes[0], permit, "m", 2000, None)
    attempt.start(b"POST /v1/chat/completions HTTP/1.1\r\n\r\n")
    chunks = middle_of("vllm/chat_stream.raw")
    attempt.on_head(head_of())

    def run() -> None:
        for chunk in chunks:
            clock.now += 0.02
            attempt.on_body(chunk)

    run()
    assert attempt.last_token_at == clock.now and attempt.ending is None
    return run


def test_detector_of_a_chunk() -> None:
    """The difference that an expectation makes, by pairs of rounds."""
    calibration, without, within = Calibration(), streaming(False), streaming(True)
    here: list[float] = []
    for _ in range(ROUNDS + 10):
        calibration.run()
        took = []
        for run in (without, within):
            began = time.process_time_ns()
            for _ in range(5):
                run()
            took.append(time.process_time_ns() - began)
        here.append((took[1] - took[0]) / (5 * CHUNKS))
    beside = calibration.ns
    found = Result(
        "detector_of_a_chunk",
        statistics.median(here),
        statistics.median(ns / each for ns, each in zip(here, beside, strict=True)) * REFERENCE_NS,
        CHUNK_NS,
        statistics.median(beside),
    )
    _RESULTS.append(found)
    assert found.reference_ns <= CHUNK_NS


# --- memory ---------------------------------------------------------------------------------------------------------


def kept_bytes(make: Callable[[], object]) -> tuple[int, object]:
    """What is still taken after `make`, by tracemalloc."""
    gc.collect()
    tracemalloc.start()
    try:
        made = make()
        gc.collect()
        return tracemalloc.get_traced_memory()[0], made
    finally:
        tracemalloc.stop()


def test_memory_per_endpoint() -> None:
    """Node, breaker and detector, with as many bad answers and sessions as are remembered."""
    make = {"few": 100, "many": 300}
    taken = {}
    for name, count in make.items():

        def fill(count: int = count) -> object:
            _, service = state_of(service_of(count))
            assert service.detection is not None
            for node in service.nodes.values():
                permit = node.breaker.acquire(0.0)
                for number in range(64):
                    assert isinstance(permit, Permit)
                    who = SessionId(f"{number:08x}-{node.key}")
                    expectation = evidence.expect(service, node, permit, "m", 2000, who)
                    assert expectation is not None
                    evidence.first_token(service, node, expectation, 0.2, number / 10)
                    ending = Ending.CONNECT_FAILED if number % 4 else Ending.SERVER_ERROR
                    evidence.ended(service, node, permit, expectation, ending, FAILURE, 0.0, number / 10)
            return service

        taken[name], _ = kept_bytes(fill)
    each = (taken["many"] - taken["few"]) / (make["many"] - make["few"])
    print(f"{each:.0f} bytes per endpoint")
    assert each <= ENDPOINT_BYTES


def test_memory_per_session() -> None:
    count = 20_000
    taken, _ = kept_bytes(lambda: sessions.fill(count, 0))
    print(f"{taken / count:.0f} bytes per session")
    assert taken / count <= SESSION_BYTES
