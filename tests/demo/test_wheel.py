import asyncio
from collections.abc import Callable
from functools import partial
from typing import cast

from sidecar.demo.wheel import TICK_S, Wheel


class Timer:
    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Clock:
    """The two methods of a loop that the wheel uses, driven by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.armed: list[tuple[float, Callable[[], None], Timer]] = []
        self.wakes = 0

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[[], None]) -> Timer:
        timer = Timer()
        self.armed.append((when, call, timer))
        return timer

    def run_to(self, now: float) -> None:
        while True:
            live = [entry for entry in self.armed if not entry[2].cancelled and entry[0] <= now]
            if not live:
                break
            entry = min(live, key=lambda candidate: candidate[0])
            self.armed.remove(entry)
            self.now = max(self.now, entry[0])
            self.wakes += 1
            entry[1]()
        self.now = now


def wheel_on(clock: Clock) -> Wheel:
    return Wheel(cast(asyncio.AbstractEventLoop, clock))


def test_steps_run_in_the_order_of_their_time_and_never_early() -> None:
    clock = Clock()
    wheel = wheel_on(clock)
    ran: list[tuple[str, float]] = []

    def note(name: str, now: float) -> None:
        ran.append((name, now))

    for name, after in (("c", 0.030), ("a", 0.010), ("b", 0.020)):
        wheel.at(100.0 + after, partial(note, name))
    clock.run_to(101.0)
    assert [name for name, _ in ran] == ["a", "b", "c"]
    for (_, at), after in zip(ran, (0.010, 0.020, 0.030), strict=True):
        assert 100.0 + after <= at + TICK_S / 2 and at <= 100.0 + after + 2 * TICK_S


def test_steps_of_one_tick_share_one_wake_up_in_the_order_of_asking() -> None:
    clock = Clock()
    wheel = wheel_on(clock)
    ran: list[int] = []

    def note(number: int, now: float) -> None:
        ran.append(number)

    for number in range(1000):
        wheel.at(100.0102, partial(note, number))
    clock.run_to(101.0)
    assert ran == list(range(1000))
    assert clock.wakes == 1


def test_step_that_queues_itself_for_the_past_runs_in_the_next_turn() -> None:
    clock = Clock()
    wheel = wheel_on(clock)
    turns: list[int] = []

    def again(now: float) -> None:
        turns.append(clock.wakes)
        if len(turns) < 5:
            wheel.at(now - 1.0, again)

    wheel.at(100.0, again)
    clock.run_to(101.0)
    assert turns == [1, 2, 3, 4, 5]


def test_earlier_step_rearms_the_timer() -> None:
    clock = Clock()
    wheel = wheel_on(clock)
    ran: list[str] = []
    wheel.at(150.0, lambda now: ran.append("late"))
    wheel.at(100.5, lambda now: ran.append("early"))
    clock.run_to(101.0)
    assert ran == ["early"]
    clock.run_to(151.0)
    assert ran == ["early", "late"]


def test_failing_step_does_not_stop_the_wheel() -> None:
    clock = Clock()
    wheel = wheel_on(clock)
    ran: list[str] = []

    def fails(now: float) -> None:
        raise ValueError

    wheel.at(100.1, fails)
    wheel.at(100.2, lambda now: ran.append("after"))
    try:
        clock.run_to(100.15)
    except ValueError:
        ran.append("raised")
    clock.run_to(101.0)
    assert ran == ["raised", "after"]


def test_stopped_wheel_calls_nothing_and_may_be_used_again() -> None:
    clock = Clock()
    wheel = wheel_on(clock)
    ran: list[str] = []
    wheel.at(100.1, lambda now: ran.append("forgotten"))
    wheel.stop()
    clock.run_to(101.0)
    wheel.at(101.1, lambda now: ran.append("new"))
    clock.run_to(102.0)
    assert ran == ["new"]
