import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.proxy.watchdog import GRACE_S, HELD_S, SLOT_S, Watchdog, grace_s
from tests.clock import START_S, Clock


class Looked:
    """What has a deadline; notes when it was looked at, and may set it anew."""

    def __init__(self, clock: Clock, watchdog: Watchdog) -> None:
        self._clock = clock
        self._watchdog = watchdog
        self.looks: list[float] = []
        self.again_at: list[float] = []

    def look(self, now: float) -> None:
        self.looks.append(now)
        if self.again_at:
            self._watchdog.add(self, self.again_at.pop(0))


def build(early_s: float = 0.0) -> tuple[Clock, Watchdog, Looked]:
    clock = Clock(early_s)
    watchdog = Watchdog(clock)
    return clock, watchdog, Looked(clock, watchdog)


@pytest.mark.parametrize("after_s", [0.0, 0.001, SLOT_S, 0.5, 1.0, 29.99, 30.0, 3600.0])
def test_a_deadline_is_seen_within_a_slot_and_never_early(after_s: float) -> None:
    clock, watchdog, looked = build()
    due = START_S + after_s
    watchdog.add(looked, due)
    clock.advance_to(due - 1e-6)
    assert looked.looks == []
    clock.advance_to(due + SLOT_S)
    (seen,) = looked.looks
    assert due <= seen <= due + SLOT_S
    assert len(watchdog) == 0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0.0, 5.0), min_size=1, max_size=30))
def test_many_deadlines_are_each_seen_once_within_a_slot(delays: list[float]) -> None:
    clock, watchdog, _ = build()
    all_looked = [(START_S + delay, Looked(clock, watchdog)) for delay in delays]
    for due, looked in all_looked:
        watchdog.add(looked, due)
    clock.advance(6.0)
    for due, looked in all_looked:
        (seen,) = looked.looks
        assert due <= seen <= due + SLOT_S + 1e-9
    assert clock.armed == []


def test_one_timer_serves_all_and_is_the_earliest() -> None:
    clock, watchdog, looked = build()
    for after_s in (9.0, 5.0, 7.0, 5.0):
        watchdog.add(looked, START_S + after_s)
    (armed,) = clock.armed
    assert START_S + 5.0 <= armed <= START_S + 5.0 + SLOT_S


def test_an_earlier_deadline_takes_the_timer_over() -> None:
    clock, watchdog, looked = build()
    watchdog.add(looked, START_S + 5.0)
    other = Looked(clock, watchdog)
    watchdog.add(other, START_S + 1.0)
    clock.advance(2.0)
    assert len(other.looks) == 1 and looked.looks == []
    clock.advance(4.0)
    assert len(looked.looks) == 1


def test_what_was_removed_is_not_looked_at() -> None:
    clock, watchdog, looked = build()
    slot = watchdog.add(looked, START_S + 1.0)
    watchdog.remove(looked, slot)
    assert len(watchdog) == 0
    clock.advance(2.0)
    assert looked.looks == []


def test_removing_twice_or_too_late_is_harmless() -> None:
    clock, watchdog, looked = build()
    slot = watchdog.add(looked, START_S + 1.0)
    clock.advance(2.0)
    watchdog.remove(looked, slot)
    watchdog.remove(looked, slot)
    assert len(looked.looks) == 1


def test_a_deadline_set_while_looking_is_seen_too() -> None:
    clock, watchdog, looked = build()
    looked.again_at = [START_S + 1.5, START_S + 1.0]  # one to come, and one that has passed by then
    watchdog.add(looked, START_S + 1.0)
    clock.advance(5.0)
    assert len(looked.looks) == 3
    assert clock.armed == []


def test_one_that_removes_another_while_looking_keeps_it_from_later_looks() -> None:
    clock, watchdog, looked = build()
    slot = watchdog.add(looked, START_S + 2.0)

    class Remover:
        def look(self, now: float) -> None:
            watchdog.remove(looked, slot)

    watchdog.add(Remover(), START_S + 1.0)
    clock.advance(5.0)
    assert looked.looks == []


@pytest.mark.parametrize("early_s", [1e-9, 0.0003, 0.0005, 0.00099])
@pytest.mark.parametrize("after_s", [1.0 - 1e-10, 1.0 - 0.0001, 1.0 - 0.0004, 1.0])
def test_timers_that_come_early_neither_spin_nor_lose_a_deadline(early_s: float, after_s: float) -> None:
    clock, watchdog, _ = build(early_s)
    due = START_S + after_s

    class Patient:
        """As attempts are: looked at before its time, it asks to be looked at again."""

        looks = 0
        seen: float | None = None

        def look(self, now: float) -> None:
            self.looks += 1
            assert self.looks < 100, "looked at again and again while time stands still"
            if now < due:
                watchdog.add(self, due)
            else:
                self.seen = now

    patient = Patient()
    watchdog.add(patient, due)
    clock.advance(2.0)
    assert patient.seen is not None
    assert patient.looks <= 2


def test_a_look_that_crashes_takes_no_other_along() -> None:
    clock, watchdog, _ = build()
    left = ["a bug"]

    class Crashing(Looked):
        def look(self, now: float) -> None:
            if left:
                raise RuntimeError(left.pop())
            super().look(now)

    same_slot = [Crashing(clock, watchdog) for _ in range(8)]
    later = Looked(clock, watchdog)
    for each in same_slot:
        watchdog.add(each, START_S + 1.0)
    watchdog.add(later, START_S + 2.0)
    with pytest.raises(RuntimeError, match="a bug"):
        clock.advance(3.0)
    clock.advance(3.0)
    assert sum(len(each.looks) for each in same_slot) == 7
    assert len(later.looks) == 1 and len(watchdog) == 0 and clock.armed == []


def test_deadline_set_while_looking_holds_up_no_earlier_one() -> None:
    clock, watchdog, _ = build()
    seen: list[float] = []

    class Once:
        def look(self, now: float) -> None:
            seen.append(round(now - START_S, 1))

    class Again:
        def look(self, now: float) -> None:
            watchdog.add(Once(), now + 3.0)

    watchdog.add(Again(), START_S + 1.0)
    watchdog.add(Once(), START_S + 2.0)
    clock.advance(10.0)
    assert seen == [2.0, 4.0]


def hold(clock: Clock, seconds: float) -> None:
    """The loop does not run for so long; then its timers come first."""
    clock.now += seconds
    clock.advance(0.0)


@pytest.mark.parametrize("late_s", [HELD_S + 0.001, 0.3, GRACE_S, 5.0, 3600.0])
def test_a_loop_that_was_held_listens_as_long_again_before_it_believes_a_silence(late_s: float) -> None:
    clock, watchdog, looked = build()
    watchdog.add(looked, START_S + 1.0)
    hold(clock, 1.0 + SLOT_S + late_s)
    assert looked.looks == []
    grace = min(late_s, GRACE_S)
    clock.advance(grace - 0.001)
    assert looked.looks == []
    clock.advance(0.001 + SLOT_S)
    assert len(looked.looks) == 1 and clock.armed == []


@pytest.mark.parametrize("late_s", [0.0, 0.01, HELD_S - 0.001])
def test_a_loop_that_ran_believes_at_once(late_s: float) -> None:
    clock, watchdog, looked = build()
    watchdog.add(looked, START_S + 1.0)
    (at,) = clock.armed
    hold(clock, at - START_S + late_s)
    assert len(looked.looks) == 1
    assert grace_s(late_s) == 0.0


def test_what_was_removed_while_listening_is_not_looked_at() -> None:
    clock, watchdog, looked = build()
    slot = watchdog.add(looked, START_S + 1.0)
    hold(clock, 3.0)
    watchdog.remove(looked, slot)
    clock.advance(5.0)
    assert looked.looks == []


def test_a_loop_that_never_keeps_its_time_looks_all_the_same() -> None:
    clock, watchdog, looked = build()
    watchdog.add(looked, START_S + 1.0)
    hold(clock, 3.0)
    hold(clock, 3.0)
    assert len(looked.looks) == 1


def test_no_deadline_set_while_listening_cuts_that_short() -> None:
    clock, watchdog, looked = build()
    watchdog.add(looked, START_S + 1.0)
    hold(clock, 1.5)
    other = Looked(clock, watchdog)
    watchdog.add(other, clock.now + 2 * SLOT_S)
    clock.advance(0.4)
    assert looked.looks == [] and other.looks == []
    clock.advance(0.2)
    assert len(looked.looks) == 1 and len(other.looks) == 1


def test_each_deadline_after_a_hold_has_its_own_time() -> None:
    clock, watchdog, looked = build()
    watchdog.add(looked, START_S + 1.0)
    hold(clock, 2.0)
    clock.advance(1.1)
    assert len(looked.looks) == 1
    watchdog.add(looked, clock.now + 1.0)
    clock.advance(1.0 + SLOT_S)
    assert len(looked.looks) == 2
    watchdog.add(looked, clock.now + 1.0)
    hold(clock, 2.0)
    assert len(looked.looks) == 2


@pytest.mark.parametrize("ago_s", [0.2, 30.0])
def test_a_deadline_that_had_passed_when_it_was_set_is_no_sign_of_a_hold(ago_s: float) -> None:
    clock, watchdog, looked = build()
    watchdog.add(looked, clock.now - ago_s)
    clock.advance(SLOT_S)
    assert len(looked.looks) == 1
