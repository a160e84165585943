"""Zones: which slow down by themselves, which only seem to, and how they come back; all in virtual time."""

from collections.abc import Callable
from itertools import pairwise
from math import exp, log
from random import Random

import pytest

from sidecar.core.sketch import bucket_of
from sidecar.core.table import Decay, Table
from sidecar.core.zone import (
    BLIND_S,
    FORGIVEN_S,
    HOLD_S,
    MOST_HOLD_S,
    MOST_ZONES,
    SETTLE_S,
    STEP_S,
    Told,
    Turn,
    ZoneTally,
    ZoneWatch,
    hold_of,
    turned,
)
from sidecar.policy.schema import Seconds, ZoneDecay

START_S = 1_700_000_000
RULE = ZoneDecay()
Latency = Callable[[str, float], float]
"""The median of a zone's first tokens (seconds) at a moment of the play."""


class Play:
    """A service of some zones, its log, and sidecars that all hear it and conclude; seconds since its start."""

    def __init__(
        self,
        latency: Latency,
        *,
        zones: str = "abc",
        per_s: float = 20.0,
        sigma: float = 0.5,
        rule: ZoneDecay | None = RULE,
        endpoints: int = 3,
        sidecars: int = 1,
        explained: bool | None = None,
    ) -> None:
        self.latency = latency
        self.per_s = per_s
        self.sigma = sigma
        self.rule = rule
        self.ready = dict.fromkeys(zones, endpoints)
        self.table = Table("chat")
        self.watches = [ZoneWatch() for _ in range(sidecars)]
        self.turns: list[tuple[int, Turn]] = []
        self.stale = 0
        self.now = 0
        self.explained = explained
        self._random = Random(5)
        self._due = 0.0

    def until(self, end: int) -> list[tuple[int, str, float]]:
        """Plays on; what was concluded, as (second, zone, share)."""
        before = len(self.turns)
        while self.now < end:
            self._second()
        return [(at, turn.zone, turn.share) for at, turn in self.turns[before:]]

    def _second(self) -> None:
        shares = {zone: self.table.zones[zone].share if zone in self.table.zones else 1.0 for zone in self.ready}
        total = sum(shares.values()) or 1.0
        tallies = ZoneTally()
        self._due += self.per_s * len(self.ready)
        while self._due >= 1.0:
            self._due -= 1.0
            (zone,) = self._random.choices(list(shares), [share / total for share in shares.values()])
            took = self.latency(zone, self.now) * exp(self._random.gauss(0.0, self.sigma))
            if self.explained is None:
                tallies.add(zone, bucket_of(took))
            else:
                left = 0.0 if self.explained else log(self.latency(zone, self.now) / 0.3)
                tallies.add_timed(zone, bucket_of(took), left + self._random.gauss(0.0, 0.2))
        self.now += 1
        now_us = (START_S + self.now) * 1_000_000
        told = tallies.take()
        for watch in self.watches:
            for zone, each in told.items():
                watch.heard(now_us, zone, each)
        concluded = [watch.conclude(self.rule, self.ready, self.table.zones, now_us) for watch in self.watches]
        for turn in concluded:
            if turn is not None:
                made = turned(self.table, turn, now_us)
                if made is None:
                    self.stale += 1
                else:
                    self.table = made
                    self.turns.append((self.now, turn))


def steady(zone: str, at: float) -> float:
    return 0.3


def slow_from(begin: float, end: float = 1e9, which: str = "a", slow_s: float = 2.0) -> Latency:
    return lambda zone, at: slow_s if zone in which and begin <= at < end else 0.3


def test_a_zone_that_jumps_is_turned_down_and_comes_back_step_by_step() -> None:
    play = Play(slow_from(60, 120))
    assert play.until(60) == []
    ((at, zone, share),) = play.until(120)
    assert (zone, share) == ("a", 0.1) and 64 <= at <= 70
    turn = play.turns[0][1]
    assert turn.why == "zone_slow" and turn.times == 1 and turn.usual_s == pytest.approx(0.3, rel=0.1)
    assert "more than 0.80 s; usual 0.3" in turn.evidence and "other zones 0.3" in turn.evidence
    back = play.until(300)
    assert [share for _, _, share in back] == [0.25, 0.5, 1.0]
    assert back[0][0] >= 120 and back[2][0] <= 180, "once it is well, in a minute"
    assert all(later - earlier >= STEP_S for (earlier, _, _), (later, _, _) in pairwise(back))
    assert [turn.why for _, turn in play.turns[1:]] == ["zone_ramp", "zone_ramp", "zone_back"]


def test_sidecars_that_hear_the_same_conclude_the_same_and_one_writes() -> None:
    alone, many = Play(slow_from(60, 90)), Play(slow_from(60, 90), sidecars=5)
    assert alone.until(300) == many.until(300) != []
    assert many.stale == 4 * len(many.turns)


def test_a_sidecar_that_began_in_the_middle_brings_it_back_as_well() -> None:
    play = Play(lambda zone, at: (4.0 if 60 <= at < 100 else 0.9) if zone == "a" else 0.3)
    play.until(90)
    play.watches = [ZoneWatch()]
    assert [share for _, _, share in play.until(300)] == [0.25, 0.5, 1.0], "what was usual is in the table"


@pytest.mark.parametrize(
    "play",
    [
        pytest.param(Play(steady), id="all well"),
        pytest.param(Play(slow_from(60, which="abc")), id="all slow"),
        pytest.param(Play(slow_from(60, 63)), id="a hiccup of three seconds"),
        pytest.param(Play(slow_from(60, slow_s=0.7)), id="slower, within the limit"),
        pytest.param(Play(lambda zone, at: 2.0 if zone == "a" else 0.3), id="long prompts from the beginning"),
        pytest.param(Play(lambda zone, at: 1.2 if zone == "a" and at > 60 else 0.7), id="not twice the others"),
        pytest.param(Play(lambda zone, at: (1.2 if at < 60 else 2.0) if zone == "a" else 0.3), id="not twice its own"),
        pytest.param(Play(slow_from(60), per_s=1 / 60), id="a request a minute"),
        pytest.param(Play(slow_from(60), zones="a"), id="the only zone"),
        pytest.param(Play(slow_from(60), explained=True), id="what came is longer, and explains it"),
        pytest.param(Play(slow_from(60), rule=ZoneDecay(weight=1.0)), id="a weight of all"),
        pytest.param(Play(slow_from(60), rule=ZoneDecay(latency_s=Seconds(5))), id="a higher limit"),
        pytest.param(Play(slow_from(60), rule=None), id="no zone decay"),
        pytest.param(Play(slow_from(1)), id="slow before anything was usual"),
    ],
)
def test_others_are_left_alone(play: Play) -> None:
    assert play.until(240) == []


def test_chance_turns_no_zone_down() -> None:
    for per_s, sigma in ((0.4, 1.0), (2.0, 1.0), (30.0, 0.8)):
        play = Play(lambda zone, at: 0.75, per_s=per_s, sigma=sigma)
        assert play.until(1800 if per_s < 10 else 300) == []


def test_what_prompts_do_not_explain_is_slow() -> None:
    play = Play(slow_from(60), explained=False)
    assert [(zone, share) for _, zone, share in play.until(90)] == [("a", 0.1)]


def test_where_half_the_answers_are_slow_it_is_not_the_zone() -> None:
    chance = Random(4)
    play = Play(lambda zone, at: 2.0 if zone == "a" and at > 60 and chance.random() < 0.45 else 0.3, sigma=0.2)
    assert play.until(300) == []


@pytest.mark.parametrize(
    ("slow", "zones", "expected"),
    [
        pytest.param("ab", "ab", [], id="both of two"),
        pytest.param("a", "ab", ["a"], id="one of two"),
        pytest.param("ab", "abcde", ["a", "b"], id="two of five"),
        pytest.param("abcd", "abcde", [], id="four of five"),
    ],
)
def test_the_rest_must_be_able_to_bear_it(slow: str, zones: str, expected: list[str]) -> None:
    assert [zone for _, zone, _ in Play(slow_from(60, which=slow), zones=zones).until(200)] == expected


def test_a_rest_that_may_not_serve_bears_nothing() -> None:
    play = Play(slow_from(60))
    play.ready = {"a": 3, "b": 1, "c": 0}
    assert play.until(200) == []


def test_endpoints_without_a_zone_are_never_turned_down_and_are_others() -> None:
    slow = Play(lambda zone, at: 2.0 if zone == "" and at > 60 else 0.3)
    slow.ready = {"": 3, "a": 3}
    assert slow.until(200) == []
    fast = Play(lambda zone, at: 2.0 if zone == "a" and at > 60 else 0.3)
    fast.ready = {"": 3, "a": 3}
    assert [zone for _, zone, _ in fast.until(80)] == ["a"]


def test_a_relapse_holds_for_twice_as_long_and_is_forgiven_in_time() -> None:
    slow = [(60, 70)]
    play = Play(lambda zone, at: 2.0 if zone == "a" and any(begin <= at < end for begin, end in slow) else 0.3)
    holds = []
    for times in (1, 2, 3):
        ((down, _, share),) = play.until(play.now + (75 if times == 1 else 15))
        assert share == 0.1 and play.table.zones["a"].times == times
        back = play.until(play.now + 400 - 100 * (times == 1))
        assert [share for _, _, share in back] == [0.25, 0.5, 1.0]
        holds.append(back[0][0] - down)
        slow.append((play.now, play.now + 10))
    assert [hold - SETTLE_S for hold in holds] == [HOLD_S, 2 * HOLD_S, 4 * HOLD_S]
    slow.clear()
    play.until(play.now + FORGIVEN_S)
    slow.append((play.now, play.now + 10))
    play.until(play.now + 15)
    assert play.table.zones["a"].times == 1


def test_slow_again_on_the_way_back_goes_down_again() -> None:
    # It is slow with more than a tenth of its load, as something is that has lost its capacity.
    play = Play(steady)

    def latency(zone: str, at: float) -> float:
        share = play.table.zones["a"].share if "a" in play.table.zones else 1.0
        return 2.0 if zone == "a" and at > 60 and share > 0.3 else 0.3

    play.latency = latency
    found = play.until(900)
    assert {share for _, _, share in found} == {0.1, 0.25, 0.5}
    downs = [at for at, _, share in found if share == 0.1]
    assert 3 <= len(downs) <= 6, "its hold doubles"
    assert downs[-1] - downs[-2] > 2 * (downs[1] - downs[0])


def test_between_well_and_slow_it_stays_as_it_is() -> None:
    play = Play(lambda zone, at: (2.0 if at < 90 else 0.72) if zone == "a" and at > 60 else 0.3, sigma=0.1)
    assert [share for _, _, share in play.until(400)] == [0.1]


def test_with_too_little_traffic_it_comes_back_blind_unless_what_little_came_was_slow() -> None:
    play = Play(slow_from(60, 70))
    play.until(80)
    play.per_s = 0.05
    back = play.until(80 + 8 * BLIND_S)
    assert [share for _, _, share in back] == [0.25, 0.5, 1.0]
    assert all(later - earlier >= BLIND_S for (earlier, _, _), (later, _, _) in pairwise(back))

    play = Play(slow_from(60))
    play.until(80)
    play.per_s = 1.0
    assert play.until(80 + 5 * BLIND_S) == []


def test_without_any_traffic_nothing_is_concluded() -> None:
    play = Play(slow_from(60, 70))
    play.until(80)
    play.per_s = 0.0
    assert [share for _, _, share in play.until(1000)] == [0.25], "of what had come before"


def test_a_weight_of_nothing_comes_back_blind() -> None:
    play = Play(slow_from(60, 70), rule=ZoneDecay(weight=0.0))
    assert [share for _, _, share in play.until(400)] == [0.0, 0.05, 0.25, 0.5, 1.0]


def test_a_policy_that_no_longer_asks_for_it_brings_it_back() -> None:
    play = Play(slow_from(60))
    play.until(80)
    play.rule = None
    assert [(share, turn.why) for _, turn in play.turns[-1:] for share in (turn.share,)] == [(0.1, "zone_slow")]
    assert play.until(81) == [(81, "a", 1.0)]
    assert play.turns[-1][1].why == "zone_off"
    assert play.until(100) == []


def test_what_all_have_become_is_learnt_anew() -> None:
    play = Play(lambda zone, at: 0.3 if at < 60 else 1.0 if zone != "a" else 1.9, per_s=5.0)
    assert play.until(60) == []
    assert play.until(800) == [], "not twice the others"
    play.latency = lambda zone, at: 0.3 if zone != "a" else 1.9
    assert play.until(900) == [], "and 1.9 s is usual by now"


def test_a_conclusion_from_another_table_is_dropped() -> None:
    turn = Turn("a", 0.1, "zone_slow", "words", 0, 1)
    table = turned(Table("chat"), turn, 5)
    assert table is not None and table.zones == {"a": Decay(0.1, 5, "zone_slow")}
    assert turned(table, turn, 6) is None
    again = turned(table, Turn("a", 0.25, "zone_ramp", "words", 5, 1, 0.5), 7)
    assert again is not None and again.zones == {"a": Decay(0.25, 7, "zone_ramp", 1, 0.5)}


def test_zones_that_have_been_back_for_long_are_forgotten_with_the_next_change() -> None:
    at_us = 2 * FORGIVEN_S * 1_000_000
    zones = {"a": Decay(1.0, 0), "b": Decay(0.1, 0), "c": Decay(1.0, at_us)}
    table = turned(Table("chat", zones=zones), Turn("d", 0.1, "zone_slow", "", 0, 1), at_us)
    assert table is not None and set(table.zones) == {"b", "c", "d"}


def test_a_hold_is_bounded() -> None:
    assert [hold_of(times) for times in (0, 1, 2, 5, 6, 10**9)] == [30, 30, 60, 480, MOST_HOLD_S, MOST_HOLD_S]


def test_what_was_counted_is_told_once() -> None:
    tally = ZoneTally()
    tally.add("a", 3)
    tally.add_timed("a", 3, 0.5)
    tally.add_timed("a", 4, 99.0)
    tally.add_timed("b", 4, float("nan"))
    assert tally.take() == {"a": ({3: 2, 4: 1}, 2, 8500), "b": ({4: 1}, 0, 0)}
    assert tally.take() == {}
    for number in range(2 * MOST_ZONES):
        tally.add(f"z{number}", 1)
        tally.add_timed(f"z{number}", 1, 0.0)
    assert len(tally.take()) == MOST_ZONES


def test_a_foreign_tally_does_no_harm() -> None:
    watch = ZoneWatch()
    for number in range(3 * MOST_ZONES):
        told: Told = ({-5: 3, 10**6: 100, 90: 10}, 2**60, -(2**60))
        watch.heard(10**6 * (number % 7), f"zone{number}", told)
        watch.heard(10**6 * number, "zone1", told)
    assert watch.conclude(RULE, {"zone1": 1, "x": 2}, {"gone": Decay(0.1, 0)}, 10**9) is None
