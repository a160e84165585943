"""Suspects: who is condemned by which deaths, for how long, and who is not."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.poison import ALONE, PRINT_BYTES, PROVEN_S, SETTLING_S, TRIAL_S, Condemned, Suspects
from sidecar.kernel.ids import EndpointKey
from sidecar.kernel.outcome import DEADLY, DOCTRINE, HANGS, Ending, Result
from sidecar.policy.schema import Poison, Seconds

A, B, C, D = (EndpointKey(f"h{number}:80") for number in range(1, 5))
TTL_S = 300.0
RULE = Poison()


class Bench:
    """One service's suspects; prompts are made known by striking them."""

    def __init__(self, **changes: object) -> None:
        self.suspects = Suspects("chat", msgspec.structs.replace(RULE, **changes), b"key")

    def mark(self, prompt: str = "x") -> bytes:
        return self.suspects.mark("m", prompt.encode())

    def dies(
        self,
        node: EndpointKey,
        now: float,
        prompt: str = "x",
        *,
        others: int = 0,
        sent_at: float | None = None,
        hung: bool = False,
    ) -> Condemned | None:
        sent = now if sent_at is None else sent_at
        return self.suspects.strike(self.mark(prompt), len(prompt), node, sent, others, now, hung=hung)

    def refuses(self, now: float, prompt: str = "x") -> bool:
        return self.suspects.refuses(self.mark(prompt), now)


def test_two_nodes_condemn_and_one_does_not() -> None:
    bench = Bench()
    assert bench.dies(A, 1.0) is None and not bench.refuses(1.0)
    told = bench.dies(B, 2.0)
    assert told == Condemned("chat", bench.mark()[:4].hex(), (A, B), TTL_S, "enforce")
    assert bench.refuses(2.0)
    assert not bench.refuses(2.0, "y")


@pytest.mark.parametrize(("nodes", "deaths"), [(1, 1), (2, 2), (3, 3), (4, 4)])
def test_as_many_nodes_as_the_policy_says(nodes: int, deaths: int) -> None:
    bench = Bench(nodes=nodes)
    for number, node in enumerate((A, B, C, D)[:deaths], 1):
        assert bench.refuses(number) is False
        assert (bench.dies(node, float(number)) is not None) is (number == deaths)
    assert bench.refuses(9.0)


def test_a_node_counts_once_however_often_it_dies() -> None:
    bench = Bench()
    for number in range(10):
        assert bench.dies(A, 10.0 * number) is None
        bench.suspects.served(b"", A, 10.0 * number + 1.0, 10.0 * number + 2.0)
    assert not bench.refuses(100.0)


def test_a_condemnation_is_told_once() -> None:
    bench = Bench()
    assert [bench.dies(node, 1.0) is not None for node in (A, B, C)] == [False, True, False]
    assert bench.suspects.condemnations == 1


# --- who was there by chance ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("others", [0, 1, ALONE - 1, ALONE, 100])
def test_deaths_that_took_many_need_one_more(others: int) -> None:
    bench = Bench()
    few = others < ALONE
    bench.dies(A, 1.0, others=others)
    assert (bench.dies(B, 2.0, others=others) is not None) is few
    assert (bench.dies(C, 3.0, others=others) is not None) is not few
    assert bench.refuses(3.0)


def test_who_dies_with_a_node_is_counted_whether_it_ended_before_or_after() -> None:
    bench = Bench()
    everyone = [str(number) for number in range(ALONE + 3)]
    for node, now in ((A, 1.0), (B, 5.0)):
        for number, prompt in enumerate(everyone):
            assert bench.dies(node, now, prompt, others=len(everyone) - number - 1) is None
    assert bench.suspects.condemned == 0


def test_a_good_answer_clears() -> None:
    bench = Bench()
    bench.dies(A, 1.0)
    bench.suspects.clear(bench.mark(), 2.0)
    assert len(bench.suspects) == 0
    assert bench.dies(B, 70.0) is None
    bench.dies(C, 71.0)
    assert bench.refuses(71.0)
    bench.suspects.clear(bench.mark(), 72.0)
    assert not bench.refuses(72.0)


@pytest.mark.parametrize(("later_s", "deaths"), [(0.0, 3), (PROVEN_S - 1.0, 3), (PROVEN_S, 2)])
def test_a_prompt_that_was_just_served_takes_one_death_more(later_s: float, deaths: int) -> None:
    bench = Bench()
    bench.dies(A, 0.0)
    bench.suspects.clear(bench.mark(), 10.0)
    now = 10.0 + later_s
    told = [bench.dies(node, now) is not None for node in (B, C, D)]
    assert told.index(True) == deaths - 1


def test_a_proof_does_not_last_because_it_is_repeated() -> None:
    bench = Bench()
    bench.dies(A, 0.0)
    bench.suspects.clear(bench.mark(), 10.0)
    bench.suspects.served(b"", A, 10.0, 11.0)
    for now in range(11, 70):
        assert bench.suspects.as_long(1, float(now))
        bench.suspects.clear(bench.mark(), float(now))
    assert not bench.suspects.as_long(1, 10.0 + PROVEN_S) and not bench.suspects.armed


def test_nodes_that_crash_together_condemn_no_prompt_that_was_on_all_of_them() -> None:
    bench = Bench()
    for number, node in enumerate((A, B, C, D)):
        assert bench.dies(node, 10.0 + number / 100, sent_at=9.9) is None
    assert bench.dies(EndpointKey("h5:80"), 10.2, sent_at=10.1) is not None, "it was sent once more, and killed again"


def test_nodes_that_hang_condemn_whenever_it_was_sent() -> None:
    bench = Bench()
    assert bench.dies(A, 30.0, sent_at=0.0, hung=True) is None
    assert bench.dies(B, 31.0, sent_at=1.0, hung=True) is not None


def test_what_was_sent_to_a_dead_node_is_no_evidence_until_it_served_somebody() -> None:
    bench = Bench()
    bench.dies(A, 1.0, "first")
    assert bench.dies(A, 3.0, sent_at=2.0) is None and len(bench.suspects) == 1
    assert bench.dies(A, 4.0, sent_at=0.9) is None and len(bench.suspects) == 2, "it was there when the node died"
    bench.suspects.served(b"", A, 5.0, 6.0)
    bench.dies(A, 8.0, "third", sent_at=7.0)
    assert len(bench.suspects) == 3


def test_an_outage_of_all_names_those_that_were_there_and_nobody_else() -> None:
    bench = Bench()
    for number in range(100):
        for place, node in enumerate((A, B, C)):
            now = 1.0 + number
            bench.dies(node, now, f"{number}", sent_at=now - 0.9 + place * 0.1)
    assert len(bench.suspects) == 1 and bench.suspects.condemned == 0


def test_an_answer_that_was_under_way_shows_that_the_node_lives() -> None:
    bench = Bench()
    bench.dies(A, 10.0)
    bench.suspects.served(b"", A, 9.0, 10.0 + SETTLING_S / 2)
    assert len(bench.suspects) == 1, "it may have been sent before the death"
    bench.suspects.served(b"", A, 9.0, 10.0 + SETTLING_S)
    assert len(bench.suspects) == 0 and not bench.suspects.armed


def test_a_withdrawn_strike_ends_a_condemnation() -> None:
    bench = Bench()
    bench.dies(A, 10.0)
    bench.dies(B, 11.0)
    assert bench.refuses(11.0)
    bench.suspects.served(b"", A, 9.0, 13.0)
    assert not bench.refuses(13.0) and len(bench.suspects) == 1


def test_an_answer_to_what_was_sent_later_proves_no_innocence() -> None:
    bench = Bench()
    bench.dies(A, 10.0)
    bench.suspects.served(b"", A, 10.5, 11.0)
    bench.dies(B, 12.0)
    assert bench.refuses(12.0)


# --- trials -----------------------------------------------------------------------------------------------------------


def condemned_at_2(**changes: object) -> Bench:
    bench = Bench(**changes)
    bench.dies(A, 1.0)
    bench.dies(B, 2.0)
    assert bench.refuses(2.0)
    return bench


def test_where_nobody_else_is_served_it_is_tried_now_and_then_on_those_it_killed() -> None:
    bench = condemned_at_2()
    trials = [now for now in range(2, 60) if bench.suspects.trial(bench.mark(), float(now)) == (A, B)]
    assert trials == [2 + TRIAL_S, 2 + 2 * TRIAL_S, 2 + 3 * TRIAL_S]
    assert bench.refuses(60.0), "all but these are refused"


def test_where_others_are_served_it_is_not_tried() -> None:
    bench = condemned_at_2()
    bench.suspects.served(b"", C, 2.5, 3.0)
    assert not any(bench.suspects.trial(bench.mark(), float(now)) for now in range(2, 300))


def test_suspects_that_turn_out_innocent_are_no_others() -> None:
    bench = condemned_at_2()
    bench.dies(C, 2.0, "y")
    bench.suspects.served(bench.mark("y"), C, 3.0, 4.0)
    bench.suspects.clear(bench.mark("y"), 4.0)
    bench.suspects.served(bench.mark("y"), C, 5.0, 6.0)
    assert bench.suspects.trial(bench.mark(), 2.0 + TRIAL_S) == (A, B)


def test_a_trial_that_kills_puts_the_next_one_off() -> None:
    bench = condemned_at_2()
    assert bench.suspects.trial(bench.mark(), 20.0)
    bench.dies(A, 30.0, sent_at=0.5)
    assert not bench.suspects.trial(bench.mark(), 30.0 + TRIAL_S - 1.0)
    assert bench.suspects.trial(bench.mark(), 30.0 + TRIAL_S)
    assert not bench.suspects.trial(bench.mark("unknown"), 100.0)


# --- for how long, and how much ---------------------------------------------------------------------------------------


def test_after_ttl_it_is_forgotten_and_refusing_prolongs_nothing() -> None:
    bench = Bench()
    bench.dies(A, 0.0)
    bench.dies(B, 100.0)
    for now in range(100, 400, 10):
        assert bench.refuses(float(now))
    assert not bench.refuses(100.0 + TTL_S)
    assert not bench.suspects.armed and len(bench.suspects) == 0


def test_strikes_further_apart_than_ttl_are_not_added() -> None:
    bench = Bench(ttl_s=Seconds(10))
    bench.dies(A, 0.0)
    assert bench.dies(B, 10.0) is None
    assert bench.dies(A, 19.9) is not None, "A was dead for ttl: that is forgotten as well"


def test_a_prompt_of_another_length_is_asked_nothing_more() -> None:
    bench = Bench()
    assert not bench.suspects.as_long(1, 0.0)
    bench.dies(A, 0.0)
    bench.dies(A, 0.0, "y")
    assert bench.suspects.as_long(1, 1.0) and not bench.suspects.as_long(2, 1.0)
    bench.suspects.clear(bench.mark("x"), 1.0)
    assert bench.suspects.as_long(1, 1.0)
    assert not bench.suspects.as_long(1, TTL_S) and not bench.suspects.armed
    assert not bench.suspects._lengths


def test_prompts_of_one_length_are_told_apart_and_so_are_models() -> None:
    suspects = Bench().suspects
    marks = {suspects.mark(model, prompt) for model in ("m", "n", "mx") for prompt in (b"x", b"y", b"xx")}
    assert len(marks) == 9 and {len(mark) for mark in marks} == {PRINT_BYTES}
    assert suspects.mark("a", b"x") != Suspects("chat", RULE, b"other key").mark("a", b"x")
    assert suspects.mark("\ud800", b"x") == suspects.mark("\ud800", b"x")


@pytest.mark.parametrize("limit", [1, 3, 1000])
def test_the_table_is_bounded_and_forgets_the_oldest_but_the_condemned_last(limit: int) -> None:
    bench = Bench(max=limit)
    for number in range(3 * limit):
        now = number / 100
        bench.dies(A, now, str(number))
        bench.suspects.served(b"", A, now + 0.001, now + 0.002)
        assert len(bench.suspects) <= limit
    bench.dies(B, 50.0, str(3 * limit - 1))
    bench.dies(B, 50.0, "0")
    assert not bench.refuses(50.0, "0")
    for number in range(3 * limit):
        bench.suspects.served(b"", A, 51.0, 52.0)
        bench.dies(A, 53.0 + number / 100, f"more {number}")
    assert bench.refuses(100.0, str(3 * limit - 1))


def test_of_too_many_condemned_the_oldest_is_forgotten() -> None:
    bench = Bench(nodes=1, max=2)
    for number in range(3):
        assert bench.dies(EndpointKey(f"h{number}:80"), float(number), str(number)) is not None
    assert [bench.refuses(3.0, str(number)) for number in range(3)] == [False, True, True]


def test_a_clock_that_goes_back_makes_nothing_last_longer_than_ttl_from_then() -> None:
    bench = Bench()
    bench.dies(A, 1e9)
    bench.dies(B, 1e9)
    assert bench.refuses(5.0)
    assert bench.refuses(5.0 + TTL_S - 1.0)
    assert not bench.refuses(5.0 + TTL_S)
    assert not bench.suspects.armed


# --- modes ------------------------------------------------------------------------------------------------------------


def test_shadow_counts_and_refuses_nobody() -> None:
    bench = Bench(mode="shadow")
    bench.dies(A, 1.0)
    told = bench.dies(B, 1.0)
    assert told is not None and told.mode == "shadow"
    assert not bench.refuses(1.0) and not bench.refuses(2.0) and not bench.refuses(2.0, "y")
    assert bench.suspects.shadow_refused == 2


def test_off_remembers_nothing() -> None:
    bench = Bench(mode="off")
    assert [bench.dies(node, 1.0) for node in (A, B, C)] == [None, None, None]
    assert not bench.suspects.armed and len(bench.suspects) == 0 and bench.suspects.kept_bytes == 0


def test_a_reload_keeps_what_is_known_and_judges_it_by_the_new_numbers() -> None:
    bench = Bench()
    bench.dies(A, 1.0)
    bench.dies(A, 1.0, "y")
    bench.dies(B, 2.0)
    bench.suspects.use(Poison(nodes=3))
    assert not bench.refuses(3.0)
    bench.suspects.use(Poison(nodes=1))
    assert bench.refuses(3.0) and bench.refuses(3.0, "y")
    bench.suspects.use(Poison(max=1))
    assert len(bench.suspects) == 1 and bench.refuses(3.0)
    bench.suspects.use(Poison(mode="off"))
    assert not bench.suspects.armed and not bench.refuses(3.0)


# --- all of it --------------------------------------------------------------------------------------------------------

Step = tuple[int, int, int, float, float]
TIMES = st.floats(-1e12, 1e12) | st.floats(0, 400)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 4), TIMES, TIMES), max_size=60),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_no_order_and_no_clock_breaks_it(steps: list[Step], nodes: int, limit: int) -> None:
    bench = Bench(nodes=nodes, max=limit)
    suspects = bench.suspects
    struck: dict[str, set[str]] = {}
    now = 0.0
    for kind, who, where, now, sent_at in steps:
        prompt, node = "p" * (who % 3 + 1) + str(who), EndpointKey(f"h{where}:80")
        if kind <= 1:
            if suspects.strike(bench.mark(prompt), len(prompt), node, sent_at, who, now):
                assert len(struck.get(prompt, set()) | {node}) >= nodes, "condemned without evidence"
            struck.setdefault(prompt, set()).add(node)
        elif kind == 2:
            suspects.served(b"", node, sent_at, now)
        else:
            suspects.clear(bench.mark(prompt), now)
            assert not suspects.refuses(bench.mark(prompt), now)
        assert len(suspects) <= limit
        assert sum(suspects._lengths.values()) == len(suspects) + len(suspects._proven)
        assert suspects.armed == bool(suspects._table or suspects._deaths or suspects._proven)
        assert len(suspects._proven) <= limit
    suspects.as_long(1, now)
    suspects.as_long(1, now + TTL_S * 1.001 + abs(now) * 1e-9)
    assert not suspects.armed, "something stays for ever"


def test_what_hangs_is_deadly() -> None:
    assert HANGS < DEADLY


def test_what_is_deadly_is_a_failure_of_node_and_session_and_no_answer() -> None:
    for ending in DEADLY:
        verdict = DOCTRINE[ending]
        assert verdict.node is verdict.session is Result.FAILURE
        assert verdict.reason is not None
    assert not DEADLY & {Ending.CONNECT_FAILED, Ending.SERVER_ERROR, Ending.EMPTY, Ending.ABORTED, Ending.TOTAL_TIMEOUT}
