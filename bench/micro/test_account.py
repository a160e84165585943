"""Accounting: deadlines on the watchdog, metrics and the access log. Budgets in ns per unit.

They are half as much again as what it took when they were set, so that noise passes and a mistake does not.
"""

import asyncio
import time
from collections.abc import Callable

from bench.micro.conftest import Budgeted
from sidecar.kernel.ids import EndpointKey
from sidecar.kernel.outcome import Ending, Result
from sidecar.proxy.ports import AttemptRecord, RequestRecord
from sidecar.proxy.watchdog import Watchdog
from sidecar.telemetry.logs import Logs
from sidecar.telemetry.metrics import Metrics
from sidecar.telemetry.recorder import TelemetryRecorder
from sidecar.telemetry.writer import LineWriter

WATCHDOG_NS = 370
RECORD_NS = 6500
RECORD_QUIET_NS = 3000

UNITS = 100

ATTEMPT = AttemptRecord(
    service="chat",
    version="v1",
    endpoint=EndpointKey("10.0.0.7:8000"),
    ending=Ending.COMPLETE,
    result=Result.SUCCESS,
    status=200,
    duration_s=1.25,
    ttft_s=0.08,
    malformed_events=0,
    reused_connection=True,
)
REQUEST = RequestRecord(
    request_id="5891da4a7e22bc417cecc45da5b83bc4",
    trace_id="0af7651916cd43dd8448eb211c80319c",
    client="127.0.0.1",
    method="POST",
    path="/v1/chat/completions",
    service="chat",
    model="demo",
    version="v1",
    endpoint="10.0.0.7:8000",
    session="0123abcd-4b6e-4c1d-9d3e-5b1f0a2c7e88",
    status=200,
    reason=None,
    flag="",
    result=Result.SUCCESS,
    stream=True,
    attempts=1,
    bytes_in=1024,
    bytes_out=14_500,
    duration_s=1.25,
    ttft_s=0.08,
    tokens=64,
    max_gap_s=0.03,
    prompt_tokens=200,
    completion_tokens=64,
    finish_reason="stop",
)


class StillTimers:
    """A loop whose timers never come."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def time(self) -> float:
        return 100.0

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.TimerHandle(when, callback, (), self._loop)

    def close(self) -> None:
        self._loop.close()


class Attempt:
    """Something with a deadline."""

    def look(self, now: float) -> None:
        raise RuntimeError("no time passes here")


def test_watchdog_add_and_remove(budget: Budgeted) -> None:
    timers = StillTimers()
    watchdog, attempts = Watchdog(timers), [Attempt() for _ in range(UNITS)]
    # As one after the other comes and goes at 500 requests a second: ten of them share a slot.
    due = [130.0 + number / 500 for number in range(UNITS)]

    def run() -> None:
        for attempt, at in zip(attempts, due, strict=True):
            watchdog.remove(attempt, watchdog.add(attempt, at))

    budget(WATCHDOG_NS, run, UNITS)
    timers.close()
    assert len(watchdog) == 0


def _recording(budget: Budgeted, budget_ns: float, *, log: bool) -> None:
    # A writer that is never started takes lines while it has room; more than a benchmark can fill.
    writer = LineWriter(-1, limit_bytes=1 << 40)
    logs = Logs(writer, time.time, access="all" if log else "off")
    recorder = TelemetryRecorder(Metrics(), logs, time.time)

    def run() -> None:
        for _ in range(UNITS):
            recorder.attempt(ATTEMPT)
            recorder.request(REQUEST)

    budget(budget_ns, run, UNITS)
    assert writer.dropped == 0


def test_metrics_of_a_request(budget: Budgeted) -> None:
    _recording(budget, RECORD_QUIET_NS, log=False)


def test_metrics_and_log_of_a_request(budget: Budgeted) -> None:
    _recording(budget, RECORD_NS, log=True)
