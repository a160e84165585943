from hypothesis import given
from hypothesis import strategies as st

from sidecar.simulate.clock import VirtualClock


def test_things_happen_in_order_of_time_and_ties_in_order_of_asking() -> None:
    clock = VirtualClock()
    seen: list[tuple[str, float]] = []
    for name, when in (("c", 2.0), ("a", 1.0), ("d", 2.0), ("b", 1.0)):
        clock.at(when, lambda name: seen.append((name, clock.now)), name)
    clock.run_until(3.0)
    assert seen == [("a", 1.0), ("b", 1.0), ("c", 2.0), ("d", 2.0)]
    assert clock.time() == 3.0


def test_what_lies_beyond_the_end_waits() -> None:
    clock = VirtualClock()
    seen: list[int] = []
    clock.at(2.0, seen.append, 1)
    clock.run_until(1.5)
    assert (seen, len(clock)) == ([], 1)
    clock.run_until(2.0)
    assert (seen, len(clock)) == ([1], 0)


def test_what_is_asked_for_in_the_past_happens_next_and_turns_no_clock_back() -> None:
    clock = VirtualClock(10.0)
    seen: list[float] = []
    clock.at(3.0, lambda: seen.append(clock.now))
    clock.run_until(11.0)
    clock.run_until(5.0)
    assert (seen, clock.now) == ([10.0], 11.0)


def test_a_cancelled_timer_does_not_fire_and_a_fired_one_is_over() -> None:
    clock = VirtualClock()
    seen: list[str] = []
    kept = clock.call_at(1.0, lambda: seen.append("kept"))
    gone = clock.call_at(1.0, lambda: seen.append("gone"))
    gone.cancel()
    gone.cancel()
    assert (kept.cancelled(), gone.cancelled(), kept.when()) == (False, True, 1.0)
    clock.run_until(2.0)
    kept.cancel()
    assert seen == ["kept"]
    assert kept.cancelled()


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 10)), max_size=30))
def test_time_never_goes_back_whatever_is_asked_from_within(plans: list[tuple[float, float]]) -> None:
    clock = VirtualClock()
    seen: list[float] = []

    def happen(more: float) -> None:
        seen.append(clock.now)
        if more > 0:
            clock.at(clock.now + more - 5.0, happen, 0.0)

    for when, more in plans:
        clock.at(when, happen, more)
    clock.run_until(200.0)
    assert seen == sorted(seen)
    assert len(clock) == 0
