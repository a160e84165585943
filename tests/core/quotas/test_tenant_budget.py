"""One budget's words to the server: what it tells, wants and gives back."""

from sidecar.core.quotas.tenant_budget import Budget, Counts, Draw, Drawn, Rule
from sidecar.policy.schema import Quota


def budget(quota: Quota) -> Budget:
    return Budget(Rule(quota, 1, Counts()), "ann")


def answered(it: Budget, draw: Draw, now: float, *, granted: int = 0, used: int = 0, born_us: int = 1) -> None:
    it.answered(draw, Drawn([granted], [used], [0.0], 0, 0, born_us), now)


def test_nothing_is_said_where_nothing_is_to_be_said() -> None:
    assert budget(Quota(name="q", tokens_per_minute=1000)).draw(0.0, 1, True) is None


def test_a_request_on_credit_is_told_once() -> None:
    it = budget(Quota(name="q", tokens_per_minute=1000))
    assert it.take(100, 0.0) == 100
    draw = it.draw(0.0, 1, True)
    assert draw is not None
    assert [(portion.must, portion.want) for portion in draw.portions] == [(100, 0)]
    answered(it, draw, 0.1, used=100)
    assert it.draw(0.2, 1, True) is None


def test_a_server_that_forgot_is_told_all_that_was_used_here() -> None:
    it = budget(Quota(name="q", tokens_per_minute=1000))
    it.take(100, 0.0)
    draw = it.draw(0.0, 1, True)
    assert draw is not None
    answered(it, draw, 0.1, used=100)
    it.take(50, 1.0)
    draw = it.draw(1.0, 1, True)
    assert draw is not None
    answered(it, draw, 1.1, used=50, born_us=2)
    draw = it.draw(1.2, 1, True)
    assert draw is not None
    assert draw.portions[0].must == 100


def test_a_server_with_an_older_picture_of_itself_is_told_what_was_used_since() -> None:
    it = budget(Quota(name="q", tokens_per_minute=1000))
    owed = []
    for second, tokens, before in ((1, 10, 0), (20, 200, 1), (40, 400, 1)):
        it.take(tokens, float(second))
        draw = it.draw(float(second), 1, True)
        assert draw is not None and draw.portions[0].must == tokens
        reply = Drawn([0], [700], [0.0], 0, 0, 1, before * 1_000_000, second * 1_000_000)
        it.answered(draw, reply, float(second))
        owed.append(it.meters[0].debt)
    # At 40 s it does not know of 20 s any more; the second that it knows last counts whole.
    assert owed == [0, 0, 10 + 200]


def test_a_failed_draw_tells_its_debt_again_and_gives_back_nothing_twice() -> None:
    it = budget(Quota(name="q", tokens_per_minute=1000))
    it.take(100, 0.0)
    it.meters[0].spare = 30
    draw = it.draw(0.0, 1, True)
    assert draw is not None
    it.unanswered(draw)
    again = it.draw(0.1, 1, True)
    assert again is not None
    assert [(portion.must, portion.back) for portion in again.portions] == [(100, 0)]


def test_a_new_limit_holds_at_once_and_what_was_used_counts() -> None:
    it = budget(Quota(name="q", tokens_per_minute=1000))
    it.take(100, 0.0)
    it.use(Rule(Quota(name="q", tokens_per_minute=150, requests_per_day=5), 1, Counts()))
    assert [(meter.word, meter.limit, meter.own) for meter in it.meters] == [
        ("tokens per minute", 150, 100),
        ("requests per day", 5, 0),
    ]


def test_slots_that_a_reload_took_away_are_not_there_when_it_brings_them_again() -> None:
    it = budget(Quota(name="q", concurrency=5))
    it.take(1, 0.0)
    draw = it.draw(0.0, 1, True)
    assert draw is not None
    without, again = Quota(name="q", tokens_per_minute=1000), Quota(name="q", concurrency=1)
    it.use(Rule(without, 1, Counts()))
    it.answered(draw, Drawn([], [], [], 2, 2, 1), 0.1)
    assert it.slots == 0
    it.use(Rule(again, 1, Counts()))
    assert not it.has_slot(0.1, 1, alone=False)
