"""Budgets that mean the same on any machine: nanoseconds where the calibration takes a microsecond.

The calibration is a fixed piece of pure Python that does what the request path does: attributes, dictionaries, calls,
slices of bytes. Before each round of a benchmark it is timed in the same process by the same clock, and the figure is
the median over rounds of the *ratio within the round*: a slow machine, or a slow minute, is given its time, and a
quick one takes none for itself. So `budget_ns` holds on a machine whose calibration takes REFERENCE_NS, and is scaled
to where we are.

The clock is the process's CPU time: `make bench-micro` tells pytest-benchmark so.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import pytest

REFERENCE_NS = 1000.0
"""What the calibration takes on the reference: close to one core of the machines that the project is measured on."""

ROUNDS = 100
ROUND_S = 0.001  # long against the clock's grain, short against a scheduler's turn
CALIBRATIONS = 100  # per round, a tenth of a millisecond


class _Counter:
    __slots__ = ("last", "n")

    def __init__(self) -> None:
        self.n = 0
        self.last = b""

    def take(self, data: bytes, known: dict[bytes, int]) -> bool:
        head = data[:8]
        self.n += known.get(head, 1)
        self.last = head
        return head != data


class Calibration:
    """The fixed piece, timed again and again."""

    def __init__(self) -> None:
        self.ns: list[float] = []
        self._counter, self._known = _Counter(), {b"data: 12": 3}

    def run(self) -> None:
        take, known, data = self._counter.take, self._known, b'data: 123 {"id":"chatcmpl-0"}'
        began = time.process_time_ns()
        for _ in range(CALIBRATIONS * 8):
            take(data, known)
        self.ns.append((time.process_time_ns() - began) / CALIBRATIONS)


@dataclass
class Result:
    """One benchmark: medians over its rounds, ns per unit here, on the reference, and its budget there."""

    name: str
    ns: float
    reference_ns: float
    budget_ns: float
    calibration_ns: float


_RESULTS: list[Result] = []


class Budgeted(Protocol):
    """Times `run`, which does the thing `units` times; fails where one is dearer than `budget_ns` on the reference."""

    def __call__(self, budget_ns: float, run: Callable[[], object], units: int = 1) -> None: ...


@pytest.fixture
def budget(benchmark: Any, request: pytest.FixtureRequest) -> Budgeted:
    def measure(budget_ns: float, run: Callable[[], object], units: int = 1) -> None:
        calibration, times = Calibration(), _times_of(run)

        def round_() -> None:
            for _ in range(times):
                run()

        benchmark.pedantic(round_, setup=calibration.run, rounds=ROUNDS, warmup_rounds=ROUNDS // 10)
        each = [took_s * 1e9 / times / units for took_s in benchmark.stats.stats.data]
        beside = calibration.ns[-len(each) :]
        found = Result(
            request.node.name.removeprefix("test_"),
            statistics.median(each),
            statistics.median(ns / here for ns, here in zip(each, beside, strict=True)) * REFERENCE_NS,
            budget_ns,
            statistics.median(beside),
        )
        _RESULTS.append(found)
        benchmark.extra_info.update(asdict(found), units_per_round=times * units)
        assert found.reference_ns <= budget_ns, (
            f"{found.reference_ns:.0f} ns each on the reference, of {budget_ns:.0f}; {found.ns:.0f} here"
        )

    return measure


def _times_of(run: Callable[[], object]) -> int:
    """How often `run` fills a round."""
    times = 1
    while True:
        began = time.process_time()
        for _ in range(times):
            run()
        if time.process_time() - began >= ROUND_S / 2:
            return times * 2
        times *= 2


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _RESULTS:
        return
    terminalreporter.section("budgets: ns per unit, scaled by calibration")
    row = "{:<50} {:>10} {:>10} {:>10} {:>6}"
    terminalreporter.write_line(row.format("", "here", "reference", "budget", "used"))
    for found in _RESULTS:
        terminalreporter.write_line(
            row.format(
                found.name,
                f"{found.ns:.0f}",
                f"{found.reference_ns:.0f}",
                f"{found.budget_ns:.0f}",
                f"{found.reference_ns / found.budget_ns:.0%}",
            )
        )
    calibrations = [found.calibration_ns for found in _RESULTS]
    terminalreporter.write_line(
        f"calibration: {statistics.median(calibrations):.0f} ns here ({min(calibrations):.0f}-{max(calibrations):.0f}),"
        f" {REFERENCE_NS:.0f} on the reference"
    )
