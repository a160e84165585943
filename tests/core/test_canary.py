"""Trials: what is counted, how tallies add up, and what is concluded from them."""

from itertools import pairwise
from math import exp, inf, nan
from random import Random

import pytest

from sidecar.core.canary import FAILED, IN_STREAM, Tally, Trial, Verdict, group_of
from sidecar.core.claim import OTHER_FAILURE
from sidecar.core.table import Margins, Plan, Step
from sidecar.core.verdict import BUCKETS, CLASSES, GROUPS, MOST_COUNTED, MOST_KEYS
from sidecar.kernel.outcome import DOCTRINE, Ending, Result

PLAN = Plan("v1", (Step(500, 300.0, 500), Step(5000, 300.0, 1000)))
WARM_S = 90
MEASURE = 2 * CLASSES * BUCKETS * GROUPS


def trial(plan: Plan = PLAN, step: int = 0) -> Trial:
    return Trial("r-1", step, "v2", "v1", plan)


def counted(made: Trial) -> dict[int, int]:
    tally = made.take()
    assert tally is not None and tally.valid()
    return tally.counts


def see(
    made: Trial,
    version: str = "v2",
    size: int = 2000,
    ending: Ending = Ending.COMPLETE,
    first_s: float = 0.1,
    gap_s: float = 0.02,
    tokens: int = 40,
    finish: str = "stop",
    group: int = 0,
) -> None:
    made.observe(version, size, ending, DOCTRINE[ending].node, first_s, gap_s, tokens, finish, group)


class Traffic:
    """Answers of a good baseline and a canary that may be bad, a second at a time, on the log's clock."""

    def __init__(self, made: Trial, seed: int = 1, *, share: float = 0.2, rate: int = 40) -> None:
        self.made = made
        self.chance = Random(seed)
        self.share = share
        self.rate = rate
        self.now_ms = 1_700_000_000_000

    def run(
        self,
        seconds: int,
        *,
        slow: float = 1.0,
        gap: float = 1.0,
        ending: Ending = Ending.SERVER_ERROR,
        failing: float = 0.0,
        base_failing: float = 0.0,
        length: float = 1.0,
        finish: str = "stop",
        least_size: int = 0,
    ) -> Verdict:
        chance = self.chance
        for _ in range(seconds):
            for _ in range(self.rate):
                canary = chance.random() < self.share
                size = int(2000 * exp(chance.gauss(0, 1)))
                bad = canary and size >= least_size
                how = Ending.COMPLETE
                if chance.random() < (failing if bad else base_failing):
                    how = ending
                first = (0.02 + size / 40_000) * exp(0.2 * chance.gauss(0, 1)) * (slow if bad else 1.0)
                see(
                    self.made,
                    "v2" if canary else "v1",
                    size,
                    how,
                    first,
                    0.02 * exp(0.1 * chance.gauss(0, 1)) * (gap if bad else 1.0),
                    1 + int(40 * exp(0.7 * chance.gauss(0, 1)) * (length if bad else 1.0)),
                    finish if bad and chance.random() < 0.2 else "stop",
                    -1,
                )
            self.now_ms += 1000
            tally = self.made.take()
            if tally is not None:
                self.made.add(tally, self.now_ms)
        return self.made.verdict()


# Counting


def test_an_answer_is_counted_under_each_measure_and_taken_once() -> None:
    made = trial()
    assert made.take() is None
    see(made)
    see(made)
    see(made, "v1")
    see(made, "v3")
    counts = counted(made)
    assert sorted(counts.values()) == [1] * 5 + [2] * 5
    assert made.take() is None


@pytest.mark.parametrize("ending", Ending)
def test_what_ended_counts_by_the_doctrine(ending: Ending) -> None:
    made = trial()
    see(made, "v1", 100, ending, nan, nan, 0, "")
    tally = made.take()
    outcomes = {} if tally is None else {key // GROUPS: n for key, n in tally.counts.items() if key < BUCKETS * GROUPS}
    match DOCTRINE[ending].node:
        case Result.SUCCESS:
            assert outcomes == {0: 1}
        case Result.FAILURE:
            assert outcomes == {FAILED[ending]: 1}, "every failure has a number of its own"
        case _:
            assert outcomes == {}


def test_a_failure_that_is_not_known_counts_as_one() -> None:
    made = trial()
    made.observe("v1", 100, Ending.CLIENT_LEFT, Result.FAILURE, nan, nan, 0, "", 5)
    assert counted(made) == {OTHER_FAILURE * GROUPS + 5: 1}
    assert all(number < OTHER_FAILURE for number in IN_STREAM.values()), "a claim is about a range of them"
    assert len(set(FAILED.values())) == len(FAILED)


@pytest.mark.parametrize("ending", [Ending.LATE, Ending.TTFT_TIMEOUT, Ending.HEAD_TIMEOUT])
def test_who_waited_in_vain_is_later_than_all(ending: Ending) -> None:
    waited, measured = trial(), trial()
    see(waited, ending=ending, first_s=nan, gap_s=nan)
    see(measured, ending=Ending.CLIENT_LEFT, first_s=1e9, gap_s=nan)
    assert [key for key in counted(waited) if key >= MEASURE] == [*counted(measured)]


@pytest.mark.parametrize("odd", [0.0, -1.0, inf, 1e-300, 1e300])
def test_whatever_a_clock_made_of_a_time_has_a_bucket(odd: float) -> None:
    made = trial()
    see(made, size=1 << 40, first_s=odd, gap_s=odd, tokens=1 << 60)
    see(made, size=0, first_s=odd, gap_s=odd, tokens=-1)
    assert sum(counted(made).values()) == 9


def test_lengths_and_reasons_are_of_whole_answers_alone() -> None:
    made = trial()
    see(made, ending=Ending.TRUNCATED)
    see(made, ending=Ending.CLIENT_LEFT)
    assert max(counted(made)) < 3 * MEASURE


def test_what_is_in_no_session_is_like_no_other_and_sessions_have_groups() -> None:
    made = trial()
    for number in range(64 * GROUPS):
        bad = number % 2 == 0  # two engines by turns, one of which is bad
        see(made, ending=Ending.TRUNCATED if bad else Ending.CLIENT_LEFT, first_s=nan, gap_s=nan, group=-1)
    assert len(counts := counted(made)) == GROUPS
    assert max(counts.values()) < 2 * min(counts.values())
    groups = {group_of(f"user-{number}") for number in range(1000)}
    assert groups == set(range(GROUPS))
    assert group_of("user-1") == 20 and group_of("\udcff") == group_of("\udcff"), "the same on every machine"


def test_what_is_more_than_a_tally_holds_goes_with_the_next() -> None:
    made, seen = trial(), 0
    for number in range(3 * MOST_KEYS):
        see(made, first_s=1e-3 * 1.0003**number, gap_s=nan, group=number % GROUPS)
    while (tally := made.take()) is not None:
        assert tally.valid()
        seen += sum(tally.counts.values())
    assert seen == 4 * 3 * MOST_KEYS


# Adding up


def test_what_is_of_another_step_or_can_be_no_tally_is_left_out() -> None:
    made = trial()
    for tally in (Tally("r-2", 0, {0: 1}), Tally("r-1", 1, {0: 1}), Tally("r-1", 0, {0: 1, -5: 1})):
        made.add(tally, 1)
    assert made.verdict().baseline == 0


def test_five_sidecars_say_what_one_would() -> None:
    """Everybody reads the same log, so all judge alike, whatever they saw themselves."""
    alone, told = trial(), [trial() for _ in range(5)]
    chance = Random(3)
    for second in range(200):
        for _ in range(40):
            version = "v2" if chance.random() < 0.2 else "v1"
            first = 0.1 * exp(0.2 * chance.gauss(0, 1)) * (2.0 if version == "v2" else 1.0)
            see(alone, version, first_s=first)
            see(told[chance.randrange(5)], version, first_s=first)
        log = [tally for tally in (each.take() for each in told) if tally is not None]
        whole = alone.take()
        assert whole is not None
        alone.add(whole, second * 1000)
        for tally in log:
            for each in told:
                each.add(tally, second * 1000)
        verdicts = {each.verdict() for each in told}
        assert verdicts == {alone.verdict()}
    assert alone.verdict().word == "fail"


# Judging


def test_a_canary_as_good_passes_when_enough_was_seen() -> None:
    traffic = Traffic(trial())
    early = traffic.run(20)
    assert early.word == "unclear" and "of 500 answers" in early.evidence
    verdict = traffic.run(100)
    assert verdict.word == "pass" and verdict.canary > 500 and "first tokens" in verdict.evidence


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"slow": 2.0}, "first tokens came past 1.1 times"),
        ({"gap": 1.5}, "mean gaps were past 1.1 times"),
        ({"failing": 0.1}, "answers failed"),
        ({"failing": 0.1, "ending": Ending.ERROR_IN_BAND}, "answers"),
        ({"length": 0.4}, "length under 1/1.25"),
        ({"length": 2.5}, "length past 1.25 times"),
        ({"finish": "length"}, "ended for length"),
        ({"finish": "tool_calls"}, "ended for tool_calls"),
        ({"finish": "content_filter"}, "ended for another reason"),
        ({"slow": 3.0, "least_size": 8192}, "of requests of"),
    ],
    ids=["slow", "gaps", "errors", "in-stream", "short", "long", "cut", "tools", "filter", "long-prompts"],
)
def test_each_fault_is_found_and_named(bad: dict[str, float], said: str) -> None:
    traffic = Traffic(trial(), share=0.3)
    verdict = traffic.run(WARM_S + 160, **bad)  # type: ignore[arg-type]
    assert verdict.word == "fail"
    assert said in verdict.evidence
    assert traffic.run(30).word == "fail", "and stays found"


def test_better_is_no_fault() -> None:
    assert Traffic(trial()).run(200, slow=0.5, gap=0.5, base_failing=0.1).word == "pass"


def test_a_cold_start_is_not_held_against_times_but_against_answers() -> None:
    traffic = Traffic(trial())
    assert traffic.run(WARM_S - 20, slow=4.0).word != "fail"
    assert traffic.run(100).word == "pass"
    assert Traffic(trial()).run(80, failing=0.3).word == "fail"


def test_one_incident_convicts_nobody() -> None:
    traffic = Traffic(trial())
    traffic.run(150)
    assert traffic.run(20, failing=1.0).word != "fail"
    assert traffic.run(60).word != "fail"


def test_what_comes_over_both_is_no_evidence() -> None:
    traffic = Traffic(trial())
    traffic.run(120)
    verdict = traffic.run(120, failing=0.3, base_failing=0.3)
    assert verdict.word != "fail"


def test_what_is_past_its_margin_and_not_yet_proven_is_unclear() -> None:
    plan = Plan("v1", (Step(500, 300.0, 100),), margins=Margins(success=0.0))
    verdict = Traffic(trial(plan), share=0.05).run(110, failing=0.03)
    assert verdict.word == "unclear"
    assert "not enough to tell" in verdict.evidence and "answers failed" in verdict.evidence


def test_few_sessions_are_another_few() -> None:
    """Four sessions on the canary that ask for long answers; twenty on the baseline, half of which do."""
    words = []
    for together in (True, False):
        made, chance = trial(), Random(7)
        for second in range(400):
            for _ in range(30):
                canary = chance.random() < 0.2
                session = chance.randrange(4) if canary else 4 + chance.randrange(20)
                long = canary or session % 2 == 0
                length = int(40 * exp(0.3 * chance.gauss(0, 1)) * (3.0 if long else 1.0))
                see(made, "v2" if canary else "v1", tokens=length, group=session if together else -1)
            tally = made.take()
            assert tally is not None
            made.add(tally, second * 1000)
        words.append(made.verdict().word)
    assert words[0] != "fail"
    assert words[1] == "fail", "of as many answers of as many sessions it would be another length"


def test_without_a_baseline_nothing_can_be_told() -> None:
    traffic = Traffic(trial(), share=1.0)
    verdict = traffic.run(60)
    assert verdict.word == "unclear" and "baseline" in verdict.evidence


def test_a_short_step_has_short_blocks() -> None:
    """For tests and for those in a hurry: a step of 2 s fails within it."""
    made = trial(Plan("v1", (Step(500, 2.0, 20),)))
    now_ms = 0
    verdict = made.verdict()
    while verdict.word != "fail" and now_ms < 2000:
        for number in range(10):
            see(made, "v2" if number % 2 else "v1", ending=Ending.TRUNCATED if number % 4 == 1 else Ending.COMPLETE)
        now_ms += 100
        tally = made.take()
        assert tally is not None
        made.add(tally, now_ms)
        verdict = made.verdict()
    assert verdict.word == "fail"


def test_the_log_clock_may_stand_still_or_go_back() -> None:
    made = trial()
    for at_ms in (1000, 1000, 500, 0, 20_000, 19_000):
        see(made)
        see(made, "v1")
        tally = made.take()
        assert tally is not None
        made.add(tally, at_ms)
    assert made.verdict().canary == 6


def test_a_step_that_no_plan_has_ends_nothing() -> None:
    """The table was decoded; what it says is not for here to refuse."""
    assert trial(step=7).verdict().word == "unclear"


def test_more_steps_want_more_evidence_each() -> None:
    """One false alarm rate for the whole rollout: each step has its part."""
    few, many = trial(), trial(Plan("v1", PLAN.steps * 10))
    took = []
    for made in (few, many):
        traffic, seconds = Traffic(made, seed=5, share=0.05), 0
        while traffic.run(10, failing=0.05).word != "fail":
            seconds += 10
        took.append(seconds)
    assert all(one <= other for one, other in pairwise(took))


@pytest.mark.parametrize(("rate", "samples"), [(0.2, 20), (0.5, 20), (1.0, 100)])
def test_a_canary_that_answers_nothing_never_passes_however_little_is_known(rate: float, samples: int) -> None:
    """Half of a little traffic each: of no size of prompts is much known of the baseline."""
    made, chance, now_s = trial(Plan("v1", (Step(5000, 300.0, samples),))), Random(2), 0.0
    word = "unclear"
    while now_s < 1800.0 and word == "unclear":
        now_s += chance.expovariate(rate)
        canary = chance.random() < 0.5
        how = Ending.SERVER_ERROR if canary else Ending.COMPLETE
        see(made, "v2" if canary else "v1", int(2000 * exp(1.5 * chance.gauss(0, 1))), how, nan, nan, 0, "", -1)
        tally = made.take()
        assert tally is not None
        made.add(tally, int(now_s * 1000))
        word = made.verdict().word
    assert word == "fail"


def test_what_has_nothing_beside_it_does_not_pass() -> None:
    """A canary whose sessions ask what no other does."""
    for how, said in ((Ending.COMPLETE, "only 0 of 800 answers"), (Ending.SERVER_ERROR, "100.0 % of all 800 answers")):
        made = trial()
        for second in range(400):
            see(made, "v1")
            see(made, "v1")
            see(made, "v2", 1 << 20, how)
            see(made, "v2", 1 << 20, how)
            tally = made.take()
            assert tally is not None
            made.add(tally, second * 1000)
        verdict = made.verdict()
        assert verdict.word == "unclear" and said in verdict.evidence


def test_failures_of_prompts_that_the_baseline_never_gets_are_told() -> None:
    made = trial()
    for second in range(400):
        see(made, "v1")
        see(made, "v2")
        see(made, "v2", 1 << 20, Ending.SERVER_ERROR if second % 4 == 0 else Ending.COMPLETE)
        tally = made.take()
        assert tally is not None
        made.add(tally, second * 1000)
    verdict = made.verdict()
    assert verdict.word == "unclear" and "12.5 % of all 800 answers failed" in verdict.evidence


def test_a_canary_that_hangs_until_all_clients_have_left_fails() -> None:
    """None of its answers is judged; how long they waited is."""
    made, chance = trial(), Random(4)
    for second in range(300):
        for _ in range(10):
            see(made, "v1", first_s=0.1 * exp(0.3 * chance.gauss(0, 1)), group=-1)
        see(made, "v2", ending=Ending.CLIENT_LEFT, first_s=8.0, gap_s=nan, group=-1)
        tally = made.take()
        assert tally is not None
        made.add(tally, second * 1000)
    verdict = made.verdict()
    assert verdict.word == "fail" and verdict.canary == 0


def test_counts_of_a_log_that_was_away_for_long_are_told_in_parts() -> None:
    made = trial()
    made._seen = {7: 2 * MOST_COUNTED + 5}
    told = []
    while (tally := made.take()) is not None:
        assert tally.valid()
        told.append(tally.counts)
    assert told == [{7: MOST_COUNTED}, {7: MOST_COUNTED}, {7: 5}]


def test_a_log_clock_that_is_an_hour_behind_from_now_on_delays_nothing() -> None:
    traffic = Traffic(trial())
    traffic.run(60)
    traffic.now_ms -= 3_600_000
    assert traffic.run(300, slow=2.0).word == "fail"


def test_caches_fill_in_a_step_of_a_minute_too() -> None:
    """Twice as slow at first, decaying in 30 s: what is left of it when times count is a fifth."""
    for seed in range(3):
        traffic = Traffic(trial(Plan("v1", (Step(2000, 60.0, 100),))), seed, rate=15)
        for second in range(60):
            assert traffic.run(1, slow=1.0 + exp(-second / 30.0)).word != "fail"
