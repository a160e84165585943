"""Verdicts on tokens, remembered within bounds."""

from sidecar.jwt.remembered import MAX_BYTES, Remembered, mark_of


def test_it_holds_until_its_time() -> None:
    known: Remembered[str] = Remembered(10)
    known.put(b"a", "good", 100.0, 1)
    assert known.get(b"a", 99.9) == "good"
    assert known.get(b"a", 100.0) is None
    assert known.get(b"a", 99.9) is None and len(known) == 0
    assert known.get(b"b", 0.0) is None


def test_no_more_than_were_asked_for_are_held_and_what_is_used_stays() -> None:
    known: Remembered[int] = Remembered(100)
    known.put(b"used", -1, 1.0, 1)
    for number in range(1000):
        known.put(b"%d" % number, number, 1.0, 1)
        assert known.get(b"used", 0.0) == -1
        assert known.get(b"%d" % number, 0.0) == number
        assert len(known) <= 100
    assert known.get(b"1", 0.0) is None
    assert known.get(b"980", 0.0) == 980


def test_large_tokens_are_fewer() -> None:
    known: Remembered[int] = Remembered(10_000)
    for number in range(2000):
        known.put(b"%d" % number, number, 1.0, MAX_BYTES // 100)
        assert len(known) <= 102


def test_it_forgets_all_at_once() -> None:
    known: Remembered[int] = Remembered(4)
    for number in range(4):
        known.put(b"%d" % number, number, 1.0, 1)
    known.clear()
    assert len(known) == 0 and known.get(b"3", 0.0) is None


def test_marks_are_of_the_whole_token() -> None:
    assert len({mark_of(each) for each in (b"a", b"b", b"a ", b"")}) == 4
    assert len(mark_of(b"x" * 16_000)) == 32
