"""The ring: per key the latest, the oldest first, and what falls out is counted."""

from sidecar.core.breaker import Scope, State, Transition
from sidecar.txlog.ring import CAPACITY, Pending, Ring


def pending(name: str, tx: int = 1) -> Pending:
    moved = Transition(Scope.NODE, name, "chat", State.CLOSED, State.OPEN, 1.0, "consecutive", "", 1)
    return Pending(f"node:chat/{name}", moved, bytes([tx]) * 16)


def test_a_key_waits_once_with_its_latest() -> None:
    ring = Ring()
    one, two, again = pending("a"), pending("b"), pending("a", 2)
    for each in (one, two, again):
        ring.put(each)
    assert len(ring) == 2 and list(ring.first(9)) == [two, again], "what was renewed waits behind"
    assert ring.get(one.key) is again and one.key in ring and "node:chat/c" not in ring
    assert ring.get("node:chat/c") is None
    assert again.scope is Scope.NODE


def test_only_what_was_told_is_dropped() -> None:
    ring = Ring()
    ring.put(pending("a", 2))
    ring.drop("node:chat/a", bytes([1]) * 16)
    assert len(ring) == 1, "another took its place while it was told"
    ring.drop("node:chat/b")
    ring.drop("node:chat/a", bytes([2]) * 16)
    assert len(ring) == 0
    ring.put(pending("a", 3))
    ring.drop("node:chat/a")
    assert len(ring) == 0 and ring.dropped == 0


def test_the_first_are_shown_and_stay() -> None:
    ring = Ring()
    for number in range(5):
        ring.put(pending(str(number)))
    assert [each.transition.key for each in ring.first(2)] == ["0", "1"]
    assert list(ring.first(0)) == [] and len(ring) == 5
    for each in ring.first(5):
        ring.drop(each.key)
    assert len(ring) == 0, "may be emptied while it is walked"


def test_a_full_one_loses_the_oldest_and_counts_it() -> None:
    ring = Ring()
    for number in range(CAPACITY + 3):
        ring.put(pending(str(number)))
    ring.put(pending(str(CAPACITY)))
    assert len(ring) == CAPACITY and ring.dropped == 3
    assert next(ring.first(1)).transition.key == "3"
