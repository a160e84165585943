"""One window's part here: what is held, on credit, given back."""

from sidecar.core.quotas.meter import TOKENS, Meter


def test_what_was_taken_leaves_the_window_after_the_span() -> None:
    meter = Meter(TOKENS, 60.0, 1000, "tokens per minute")
    for second in range(10):
        meter.take(10, float(second))
    assert (meter.own, meter.debt) == (100, 100)
    meter.advance(60.9)
    assert meter.own == 100
    meter.advance(61.0)
    assert meter.own == 90
    meter.advance(1000.0)
    assert meter.own == 0


def test_what_was_not_needed_lessens_the_debt_first() -> None:
    meter = Meter(TOKENS, 60.0, 1000, "tokens per minute")
    meter.take(100, 0.0)
    meter.give(30, 0.0, 20.0)
    assert (meter.own, meter.debt, meter.back) == (70, 70, 0)


def test_who_goes_far_beyond_the_limit_on_credit_has_none_for_twice_as_long_each_time() -> None:
    meter = Meter(TOKENS, 60.0, 1000, "tokens per minute")
    assert meter.fits(900, 0.0, 10)
    meter.take(900, 0.0)
    meter.owes(0.0)
    now = 1.0
    for spans in (2, 4, 8, 16, 32, 60, 60):
        meter.answered(0, 9000, 0.0, now)
        meter.answered(0, 9000, 0.0, now + 1.0)  # the same again
        assert not meter.fits(900, now + 61.5, 10) and meter.fits(1, now + 61.5, 10) and meter.fits(900, now + 61.5, 1)
        assert not meter.fits(900, now + 60.0 * spans - 1.0, 10)
        now += 60.0 * spans + 1.0
        assert meter.fits(900, now, 10)
    now += 3600.0
    meter.answered(0, 9000, 0.0, now)
    assert meter.fits(900, now + 121.0, 10)


def test_what_is_used_here_is_no_pace_of_others() -> None:
    meter = Meter(TOKENS, 60.0, 10_000, "tokens per minute")
    meter.answered(0, 500, 0.0, 100.0)
    meter.take(800, 100.5)
    assert meter.owes(100.5) == 800
    meter.answered(200, 1500, 0.0, 101.0)  # told 800 and granted 200: 500 and that are 1500
    assert (meter.pace, meter.room(102.0)) == (0.0, 8500)
    meter.answered(0, 1700, 0.0, 102.0, back=100)  # others took 300
    assert meter.pace > 0.0


def test_what_was_told_of_a_refused_request_is_good_until_there_is_room_for_it() -> None:
    meter = Meter(TOKENS, 60.0, 1000, "tokens per minute")
    meter.answered(0, 900, 50.0, 100.0, lacks=300, refused=True)
    meter.answered(0, 900, 0.0, 101.0)  # it was asked how much is left
    meter.answered(50, 950, 55.0, 102.0, lacks=400)  # a slice was wanted, of which there was some
    assert meter.retry_at == 150.0
    meter.answered(0, 750, 0.0, 103.0)
    assert meter.retry_at == 0.0


def test_an_estimate_that_was_too_low_costs_no_credit() -> None:
    meter = Meter(TOKENS, 60.0, 1000, "tokens per minute")
    meter.answered(0, 1200, 0.0, 0.1)
    assert meter.fits(900, 61.0, 10)
