"""The soak's judgement on memory, and its pace."""

import pytest

from soak.measure import MAX_RATE, MAX_SLOPE_BYTES, MIN_RATE, Pace, Sampled, memory

MB = 1 << 20


def sampled(duration_s: int, a_minute: float, warm_up: float = 0.0) -> list[Sampled]:
    """A sample every two seconds; `warm_up` bytes more in the first minute, then so many a minute, in noise."""

    def rss(at: int) -> int:
        return int(60 * MB + warm_up * min(1.0, at / 30) + a_minute * at / 60 + 9000 * (at % 7))

    return [Sampled(at, rss(at), 0.5, 20, 1, 1, 1, 1, {}) for at in range(2, duration_s, 2)]


@pytest.mark.parametrize(
    ("duration_s", "a_minute", "flat"),
    [
        pytest.param(600, 0, True, id="flat"),
        pytest.param(600, 0.5 * MAX_SLOPE_BYTES, True, id="half of the bound"),
        pytest.param(600, 1.5 * MAX_SLOPE_BYTES, False, id="above the bound"),
        pytest.param(60, 1.5 * MAX_SLOPE_BYTES, True, id="above it for too short to tell"),
        pytest.param(60, 20 * MB, False, id="a torrent in little time"),
    ],
)
def test_memory_is_flat_or_not(duration_s: int, a_minute: float, flat: bool) -> None:
    assert memory(sampled(duration_s, a_minute)).flat is flat


def test_the_warm_up_does_not_count() -> None:
    judged = memory(sampled(600, 0, warm_up=30 * MB))
    assert judged.flat and judged.minutes[0] < judged.minutes[1]


def test_without_samples_nothing_is_judged() -> None:
    assert memory([]).flat and memory(sampled(10, 60 * MB)).flat


def test_the_pace_finds_its_cpu_and_keeps_its_bounds() -> None:
    pace = Pace(0.5)
    for _ in range(50):
        pace.saw(pace.rate / 800, full=False)
    assert pace.rate == pytest.approx(400, rel=0.01)
    for _ in range(50):
        pace.saw(0.0, full=False)
    assert pace.rate == MAX_RATE
    pace.saw(0.0, full=True)
    assert pace.rate == MAX_RATE
    for _ in range(50):
        pace.saw(1.0, full=True)
    assert pace.rate >= MIN_RATE


def test_a_full_machine_gets_no_higher_rate() -> None:
    pace = Pace(0.5, rate=100.0)
    pace.saw(0.1, full=True)
    assert pace.rate == 100.0
