import math

from loadtest.sse_client import Ended, Stream
from loadtest.tally import CHAT, Tally, quantile


def test_goodput_counts_what_came_whole_and_in_time_of_all_that_stayed() -> None:
    tally = Tally()
    for ended, ttft_s in [
        (Ended.WHOLE, 0.1),
        (Ended.WHOLE, 1.5),
        (Ended.TOLD, 0.1),
        (Ended.REFUSED, None),
        (Ended.LEFT, 0.1),
    ]:
        tally.end(CHAT, tally.begin(), "s", Stream(0.0, ended, ttft_s=ttft_s, gaps_s=[]))
    assert tally.goodput(1.0) == 0.25
    assert tally.goodput(2.0) == 0.5
    assert [record.ended for record in tally.broken()] == [Ended.TOLD]


def test_a_stream_belongs_to_the_phase_that_it_began_in() -> None:
    tally = Tally()
    phase = tally.begin()
    tally.phase = "next"
    assert tally.unaccounted == 1
    tally.end(CHAT, phase, "s", Stream(3.0, Ended.WHOLE, ttft_s=0.1, gaps_s=[0.5]))
    assert (tally.unaccounted, len(tally.of(phase="load")), len(tally.of(phase="next"))) == (0, 1, 0)
    assert tally.gap_s(0.5, phase="load") == 0.5
    assert math.isnan(tally.gap_s(0.5, phase="next"))
    assert math.isnan(tally.goodput(1.0, phase="next"))


def test_quantiles_are_values_that_were_there() -> None:
    assert [quantile([4.0, 1.0, 3.0, 2.0], at) for at in (0.0, 0.5, 0.99, 1.0)] == [1.0, 3.0, 4.0, 4.0]


def test_endings_name_the_reason_of_a_refusal() -> None:
    tally = Tally()
    tally.end(CHAT, tally.begin(), "s", Stream(0.0, Ended.REFUSED, status=503, reason="breaker_open", gaps_s=[]))
    assert tally.endings() == {"refused: 503 breaker_open": 1}
