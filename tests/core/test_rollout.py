"""A rollout's machine: plans that make no sense, every phase under every event, and where shares go back to."""

from collections.abc import Callable
from math import inf, nan
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from sidecar.core.desk import Action
from sidecar.core.revise import Refused
from sidecar.core.rollout import TRANSITIONS, begin, blocked, due, fault_of, judged, order, superseded
from sidecar.core.table import MAX_STEPS, PARTS, Margins, Phase, Plan, Rollout, Step, Table, Version, parts_of
from sidecar.core.verdict import Verdict, Word

STEPS = (Step(500, 10.0, 100), Step(2500, 20.0, 200), Step(PARTS, 0.0, 1))
PLAN = Plan("v1", STEPS)
TABLE = Table("chat", (Version("v1", PARTS), Version("v2", 0)))
SECOND_US = 1_000_000


def said(word: Word, evidence: str = "because", canary: int = 1_000) -> Verdict:
    return Verdict(word, evidence, canary, 1_000)


def all_ready(_: str) -> float:
    return 1.0


def only(**ready: float) -> Callable[[str], float]:
    return lambda version: ready.get(version, 0.0)


def begun(table: Table = TABLE, plan: Plan = PLAN, version: str = "v2") -> Table:
    made = begin(table, version, plan, "r1", 0, "tool")
    assert isinstance(made, Table), made
    return made


def rollout_of(table: Table | Refused) -> Rollout:
    assert isinstance(table, Table), table
    assert table.rollout is not None
    return table.rollout


def test_begins_at_its_first_step() -> None:
    made = begun()
    assert made.weights == {"v1": 9500, "v2": 500}
    assert made.rollout == Rollout("r1", "v2", PLAN, 0, "running", 0, "begun", "", "tool")


def test_others_keep_their_proportions() -> None:
    table = Table("chat", (Version("v1", 6000), Version("v0", 4000), Version("v2", 0)))
    made = begun(table)
    assert made.weights == {"v1": 5700, "v0": 3800, "v2": 500}
    after = judged(made, said("fail"), 1, all_ready)
    assert after is not None and after[0].weights == {"v1": 6000, "v0": 4000, "v2": 0}


BAD_PLANS = {
    "no steps": replace(PLAN, steps=()),
    "too many": replace(PLAN, steps=tuple(Step(n + 1, 0.0, 1) for n in range(MAX_STEPS + 1))),
    "falls": replace(PLAN, steps=(Step(500, 0.0, 1), Step(400, 0.0, 1))),
    "stays": replace(PLAN, steps=(Step(500, 0.0, 1), Step(500, 0.0, 1))),
    "nothing": replace(PLAN, steps=(Step(0, 0.0, 1),)),
    "more than all": replace(PLAN, steps=(Step(PARTS + 1, 0.0, 1),)),
    "all at once": replace(PLAN, steps=(Step(PARTS, 0.0, 1),)),
    "time": replace(PLAN, steps=(Step(500, -1.0, 1),)),
    "no time": replace(PLAN, steps=(Step(500, nan, 1),)),
    "for ever": replace(PLAN, steps=(Step(500, inf, 1),)),
    "no answers": replace(PLAN, steps=(Step(500, 0.0, 0),)),
    "too many answers": replace(PLAN, steps=(Step(500, 0.0, 1 << 40),)),
    "alarm": replace(PLAN, false_alarm=0.0),
    "alarms": replace(PLAN, false_alarm=0.5),
    "alarm nan": replace(PLAN, false_alarm=nan),
    "ready": replace(PLAN, min_ready=1.1),
    "ready nan": replace(PLAN, min_ready=nan),
    **{
        f"{field} {value}": replace(PLAN, margins=Margins(**{field: value}))
        for field in ("success", "errors", "finish")
        for value in (-0.1, 1.0, nan)
    },
    **{
        f"{field} {value}": replace(PLAN, margins=Margins(**{field: value}))
        for field in ("first_token", "token_gap", "length")
        for value in (0.9, inf, nan)
    },
}


@pytest.mark.parametrize("plan", BAD_PLANS.values(), ids=BAD_PLANS)
def test_plan_that_makes_no_sense_is_refused(plan: Plan) -> None:
    refused = begin(TABLE, "v2", plan, "r1", 0, "tool")
    assert isinstance(refused, Refused) and refused.code == "invalid" and refused.message


@pytest.mark.parametrize(
    ("version", "baseline", "id", "code"),
    [
        ("v3", "v1", "r1", "not_found"),
        ("v2", "v0", "r1", "not_found"),
        ("v1", "v1", "r1", "invalid"),
        ("v1", "v2", "r1", "conflict"),
        ("v2", "v1", "", "invalid"),
        ("v2", "v1", "r" * 129, "invalid"),
    ],
)
def test_what_is_not_there_has_no_rollout(version: str, baseline: str, id: str, code: str) -> None:
    refused = begin(TABLE, version, replace(PLAN, baseline=baseline), id, 0, "tool")
    assert isinstance(refused, Refused) and refused.code == code


def test_none_begins_while_another_version_is_under_way() -> None:
    table = replace(begun(), versions=(*begun().versions, Version("v3", 0)))
    refused = begin(table, "v3", PLAN, "r2", 5, "tool")
    assert isinstance(refused, Refused) and refused.code == "conflict"
    # Of the same version it begins anew, and so does any after the end.
    assert rollout_of(begin(table, "v2", PLAN, "r2", 5, "tool")).id == "r2"
    over = superseded(table, "me", 6)
    assert rollout_of(begin(over, "v3", PLAN, "r2", 7, "tool")).version == "v3"


def test_walks_its_steps_to_the_whole() -> None:
    table = begun()
    assert judged(table, said("pass"), 9 * SECOND_US, all_ready) is None, "its time is not over"
    assert judged(table, said("pass", canary=99), 10 * SECOND_US, all_ready) is None, "too few answers"
    assert judged(table, said("unclear"), 99 * SECOND_US, all_ready) is None
    moved = judged(table, said("pass", canary=100), 10 * SECOND_US, all_ready, "pod-a")
    assert moved is not None
    table, why, evidence = moved
    assert (why, evidence, table.weights) == ("step", "because", {"v1": 7500, "v2": 2500})
    assert table.rollout == Rollout("r1", "v2", PLAN, 1, "running", 10 * SECOND_US, "step", "because", "pod-a")
    moved = judged(table, said("pass"), 30 * SECOND_US, all_ready)
    assert moved is not None
    table, why, _ = moved
    assert (why, table.weights, rollout_of(table).phase) == ("promoted", {"v1": 0, "v2": PARTS}, "promoted")
    assert judged(table, said("fail"), 99 * SECOND_US, all_ready) is None


def test_last_step_says_what_it_ends_with() -> None:
    table = begun(plan=replace(PLAN, steps=(Step(500, 0.0, 1), Step(5000, 0.0, 1))))
    for _ in range(2):
        moved = judged(table, said("pass"), 1, all_ready)
        assert moved is not None
        table = moved[0]
    assert rollout_of(table).phase == "promoted" and table.weights == {"v1": 5000, "v2": 5000}


def test_failure_waits_for_nothing() -> None:
    moved = judged(begun(), said("fail", "slow", 3), 1, all_ready, "pod-a")
    assert moved is not None
    table, why, evidence = moved
    assert (why, evidence, table.weights) == ("failed", "slow", {"v1": PARTS, "v2": 0})
    assert rollout_of(table) == Rollout("r1", "v2", PLAN, 0, "failed", 1, "failed", "slow", "pod-a")


def test_share_never_goes_to_too_few_ready_endpoints() -> None:
    table = begun()
    for part in (0.0, 0.49):
        ready = only(v1=part, v2=1.0)
        assert judged(table, said("fail"), 1, ready) is None
        assert "'v2' keeps its share" in blocked(table, ready) and "of 'v1'" in blocked(table, ready)
        refused = order(table, "abort", "me", 1, ready)
        assert isinstance(refused, Refused) and refused.code == "conflict" and "'v1'" in refused.message
    assert blocked(table, only(v1=0.5)) == ""
    moved = judged(table, said("fail"), 1, only(v1=0.5))
    assert moved is not None and moved[0].weights == {"v1": PARTS, "v2": 0}
    # Not even with a plan that asks for none goes it to a version of which nobody may serve.
    lax = begun(plan=replace(PLAN, min_ready=0.0))
    assert judged(lax, said("fail"), 1, only(v2=1.0)) is None


def test_share_goes_to_those_who_may_serve() -> None:
    table = begun(Table("chat", (Version("v1", 6000), Version("v0", 3000), Version("vx", 1000), Version("v2", 0))))
    before = table.weights
    moved = judged(table, said("fail"), 1, only(v0=1.0, vx=0.8))
    assert moved is not None
    after = moved[0].weights
    assert after["v1"] == before["v1"] and after["v2"] == 0 and sum(after.values()) == PARTS
    assert after["v0"] - before["v0"] == pytest.approx(375, abs=1)


def test_canary_is_led_to_no_more_than_it_can_serve() -> None:
    table = begun()
    ready = only(v1=1.0, v2=0.4)
    assert judged(table, said("pass"), 10 * SECOND_US, ready) is None
    for action in ("promote", "promote_full"):
        refused = order(table, action, "me", 1, ready)
        assert isinstance(refused, Refused) and refused.code == "conflict"


def test_held_goes_on_where_it_was() -> None:
    table = begun()
    held = order(table, "hold", "me", 5 * SECOND_US, all_ready)
    assert isinstance(held, Table) and held.weights == table.weights
    assert (rollout_of(held).phase, rollout_of(held).since_us) == ("held", 0)
    words: tuple[Word, ...] = ("pass", "fail")
    for word in words:
        assert judged(held, said(word), 99 * SECOND_US, all_ready) is None
    again = order(held, "resume", "me", 50 * SECOND_US, all_ready)
    assert isinstance(again, Table) and due(rollout_of(again), said("pass"), 50 * SECOND_US)
    assert isinstance(order(held, "hold", "me", 6, all_ready), Refused)
    assert isinstance(order(table, "resume", "me", 6, all_ready), Refused)


def test_operator_leads_it() -> None:
    for table in (begun(), order(begun(), "hold", "me", 0, all_ready)):
        assert isinstance(table, Table)
        ahead = order(table, "promote", "me", 7, all_ready)
        assert isinstance(ahead, Table) and ahead.weights == {"v1": 7500, "v2": 2500}
        assert (rollout_of(ahead).phase, rollout_of(ahead).step, rollout_of(ahead).since_us) == ("running", 1, 7)
        whole = order(ahead, "promote", "me", 8, all_ready)
        assert isinstance(whole, Table) and whole.weights == {"v1": 0, "v2": PARTS}
        assert rollout_of(whole).phase == "promoted"
        whole = order(table, "promote_full", "me", 8, all_ready)
        assert isinstance(whole, Table) and whole.weights == {"v1": 0, "v2": PARTS}
        away = order(table, "abort", "me", 9, all_ready)
        assert isinstance(away, Table) and away.weights == {"v1": PARTS, "v2": 0}
        assert rollout_of(away) == Rollout("r1", "v2", PLAN, 0, "aborted", 9, "abort", "by me", "me")


@pytest.mark.parametrize("step", [-1, 3, 1 << 40])
def test_rollout_that_makes_no_sense_is_not_led_and_can_be_ended(step: int) -> None:
    table = begun()
    for odd in (
        replace(rollout_of(table), step=step),
        replace(rollout_of(table), plan=replace(PLAN, steps=())),
        replace(rollout_of(table), plan=replace(PLAN, false_alarm=0.0)),
    ):
        strange = replace(table, rollout=odd)
        assert fault_of(odd) and not fault_of(rollout_of(table))
        assert judged(strange, said("fail"), 99 * SECOND_US, all_ready) is None
        assert isinstance(order(strange, "promote", "me", 1, all_ready), Refused)
        away = order(strange, "abort", "me", 1, all_ready)
        assert isinstance(away, Table) and away.weights == {"v1": PARTS, "v2": 0}


def test_superseded_keeps_the_weights() -> None:
    table = begun()
    over = superseded(table, "me", 4)
    assert over.weights == table.weights and rollout_of(over).phase == "superseded"
    assert superseded(over, "you", 5) is over
    assert superseded(TABLE, "you", 5) is TABLE


EVENTS: dict[str, Callable[[Table], Table | Refused | None]] = {
    **{
        action: (lambda table, action=action: order(table, action, "me", 60 * SECOND_US, all_ready))  # type: ignore[misc]
        for action in get_args(Action)
    },
    **{
        word: (lambda table, word=word: _first(judged(table, said(word), 60 * SECOND_US, all_ready)))  # type: ignore[misc]
        for word in ("pass", "fail", "unclear")
    },
    "by_hand": lambda table: superseded(table, "me", 60 * SECOND_US),
}


def _first(moved: tuple[Table, str, str] | None) -> Table | None:
    return None if moved is None else moved[0]


def in_phase(phase: Phase) -> Table:
    table = begun()
    return replace(table, rollout=replace(rollout_of(table), phase=phase))


@pytest.mark.parametrize("phase", get_args(Phase))
def test_every_event_moves_along_an_edge_or_not_at_all(phase: Phase) -> None:
    reached = set()
    for name, event in EVENTS.items():
        table = in_phase(phase)
        after = event(table)
        if isinstance(after, Table) and after is not table:
            reached.add(rollout_of(after).phase)
            assert rollout_of(after).phase in TRANSITIONS[phase], name
            assert sum(after.weights.values()) == PARTS
        else:
            assert not (phase == "running" and name in ("pass", "fail", "abort")), name
    # Promoted at the second step's end and not in one event.
    assert reached | {"promoted"} == TRANSITIONS[phase] | {"promoted"}


def test_every_phase_has_its_edges_and_an_end_has_none() -> None:
    assert set(TRANSITIONS) == set(get_args(Phase))
    for phase, edges in TRANSITIONS.items():
        assert bool(edges) == in_phase(phase).rollout.live  # type: ignore[union-attr]


WEIGHTS = st.lists(st.integers(1, PARTS), min_size=1, max_size=4)


@given(WEIGHTS, st.lists(st.sampled_from([*EVENTS]), max_size=12), st.data())
def test_any_walk_keeps_a_whole_and_the_step_within_its_plan(
    others: list[int], events: list[str], data: st.DataObject
) -> None:
    parts = parts_of({f"o{number}": float(weight) for number, weight in enumerate(others)})
    table = Table("chat", (*(Version(name, weight) for name, weight in parts.items()), Version("v2", 0)))
    baseline = max(parts, key=lambda name: parts[name])
    weights = sorted(data.draw(st.sets(st.integers(1, PARTS), min_size=1, max_size=5)))
    made: Any = begin(table, "v2", Plan(baseline, tuple(Step(weight, 0.0, 1) for weight in weights)), "r", 0, "tool")
    if isinstance(made, Refused):
        assert weights[0] > PARTS - len(parts)
        return
    for event in events:
        before = made
        after = EVENTS[event](made)
        made = after if isinstance(after, Table) else made
        rollout = rollout_of(made)
        assert sum(made.weights.values()) == PARTS and all(weight >= 0 for weight in made.weights.values())
        assert 0 <= rollout.step < len(weights)
        if rollout.phase == "running":
            # Each of the others keeps a part of what little is left.
            assert weights[rollout.step] - len(parts) < made.weights["v2"] <= weights[rollout.step]
        if rollout.phase in ("failed", "aborted"):
            assert made.weights["v2"] == 0
        if not rollout_of(before).live:
            assert made is before
