"""Silence, added up reading by reading."""

from sidecar.core.progress import ASLEEP_READINGS, MOST_INTERVALS, Progress


class Engine:
    """Read each second, on a clock of its own."""

    def __init__(self, stalled_s: float = 10.0, interval_s: float = 1.0) -> None:
        self.progress = Progress(stalled_s)
        self.interval_s = interval_s
        self.now = 1000.0

    def read(
        self, requests: int, *mark: float, asleep: bool = False, times: int = 1, after_s: float | None = None
    ) -> list[str]:
        said = []
        for _ in range(times):
            self.now += self.interval_s if after_s is None else after_s
            told = self.progress.read(requests, mark, asleep, self.interval_s, self.now)
            if told:
                said.append(told)
        return said


def test_work_without_a_token_is_told_once_it_lasted() -> None:
    engine = Engine()
    assert engine.read(3, 7.0, times=10) == []
    assert not engine.progress.hangs
    [said] = engine.read(3, 7.0)
    assert said == "the engine says that it has 3 requests, and none got a token in 10 s"
    assert engine.progress.hangs


def test_it_is_told_again_after_as_long_once_more() -> None:
    engine = Engine()
    engine.read(1, 7.0, times=11)
    assert len(engine.read(1, 7.0, times=9)) == 0
    assert len(engine.read(1, 7.0, times=31)) == 4


def test_any_number_that_moves_is_progress() -> None:
    engine = Engine()
    for value in range(100):
        assert engine.read(1, 7.0, float(value)) == []
    engine.read(1, 7.0, 99.0, times=8)
    assert engine.read(1, 0.0, 0.0) == []  # it started anew
    assert engine.read(1, 0.0, 0.0, times=9) == []
    assert len(engine.read(1, 0.0, 0.0)) == 1
    assert engine.progress.moved_at == engine.now - 10


def test_what_it_gave_is_told_by_the_first_number() -> None:
    engine = Engine()
    engine.read(1, 7.0, 0.5, times=2)
    engine.read(1, 7.0, 0.6)
    assert (engine.progress.moved_at, engine.progress.gave_at) == (engine.now, float("-inf"))
    engine.read(1, 8.0, 0.6)
    assert engine.progress.gave_at == engine.now


def test_an_idle_engine_is_never_told() -> None:
    engine = Engine()
    assert engine.read(0, 7.0, times=10_000) == []
    assert engine.read(1, 7.0, times=9) == []
    assert engine.read(0, 7.0) == []
    assert engine.read(1, 7.0, times=9) == []
    assert not engine.progress.hangs


def test_silence_before_there_was_work_is_none() -> None:
    engine = Engine(interval_s=60.0)
    assert engine.read(0, 7.0, times=5) == []
    assert engine.read(1, 7.0) == []  # it came just now
    assert not engine.progress.hangs
    assert engine.read(1, 7.0) == ["the engine says that it has 1 request, and none got a token in 60 s"]


def test_what_cannot_be_read_for_long_is_forgotten_but_not_a_sleep() -> None:
    engine = Engine()
    engine.read(1, 7.0, times=20)
    engine.progress.forget()
    assert not engine.progress.hangs
    assert engine.read(1, 7.0, times=10) == []
    assert len(engine.read(1, 7.0)) == 1
    engine.read(0, 7.0, asleep=True, times=2)
    engine.progress.forget()
    assert engine.progress.hangs


def test_an_engine_without_a_mark_is_never_told() -> None:
    engine = Engine()
    assert engine.read(5, times=1000) == []
    assert engine.progress.moved_at == float("-inf")


def test_a_clock_that_jumps_is_no_silence() -> None:
    engine = Engine()
    engine.read(1, 7.0)
    assert engine.read(1, 7.0, after_s=86_400.0) == []
    assert engine.read(1, 7.0, after_s=-86_400.0) == []
    assert engine.read(1, 7.0, times=int(10 - MOST_INTERVALS) - 1) == []
    assert len(engine.read(1, 7.0)) == 1


def test_pages_that_cannot_be_read_are_no_silence() -> None:
    engine = Engine()
    engine.read(1, 7.0, times=5)
    for _ in range(10):
        engine.now += 100
        engine.progress.unread()
        assert engine.read(1, 7.0) == []
    assert engine.read(1, 7.0, times=5) == []
    assert len(engine.read(1, 7.0)) == 1


def test_an_interval_longer_than_the_silence_takes_two_readings() -> None:
    engine = Engine(stalled_s=10.0, interval_s=60.0)
    assert engine.read(1, 7.0) == []
    assert len(engine.read(1, 7.0)) == 1


def test_sleep_is_told_at_the_second_reading_and_over_at_the_first() -> None:
    engine = Engine()
    assert engine.read(0, 7.0, asleep=True, times=ASLEEP_READINGS - 1) == []
    assert engine.read(0, 7.0, asleep=True) == ["the engine says that it sleeps"]
    assert engine.progress.hangs
    assert len(engine.read(0, 7.0, asleep=True, times=30)) == 3
    assert engine.read(0, 7.0) == []
    assert not engine.progress.hangs


def test_sleep_that_one_page_tells_is_none() -> None:
    engine = Engine()
    for _ in range(10):
        assert engine.read(0, 7.0, asleep=True) == []
        assert engine.read(0, 7.0) == []
