"""A model update's machine: every step of every kind broken once, and what it does then."""

from collections.abc import Callable
from math import inf

import pytest
from msgspec.structs import replace

from sidecar.core.hot_update import (
    DEADLINES,
    LIVE,
    MAX_DETAIL,
    MAX_STEPPED,
    TRANSITIONS,
    Asked,
    HotUpdate,
    Task,
    deadline_of,
    word_of,
)
from sidecar.core.table import Plan, Target
from sidecar.core.table import Step as PlanStep
from sidecar.kernel.change import Again, Before, Done, Failed, Outcome

A, B = "a:80", "b:80"
LOADED = Before(True, ("1",), "/old", "{}")
REPOSITORY = Asked(service="chat", model="m", action="load", kind="repository", places=(A, B), by="ann", rest="yes")
ADAPTER = replace(REPOSITORY, kind="adapter", path="/new")
WAKE = replace(REPOSITORY, kind="sleep")
VERSION = replace(
    REPOSITORY, kind="version", places=(B,), rest="no", version="v2", old=(A,), targets=(Target("http://b:80"),)
)
UNLOAD = replace(REPOSITORY, action="unload")
SLEEP = replace(WAKE, action="unload")
LEAVE = replace(VERSION, action="unload", targets=(), leaving="unload")
PLAN = Plan("v1", (PlanStep(2000, 1.0, 1),))


def walked(
    asked: Asked,
    fails: Callable[[Task, int], Outcome | None] = lambda task, number: None,
    before: Before = LOADED,
) -> tuple[HotUpdate, list[str]]:
    """An update of which all goes well but what `fails` says of a task and its number; what was done, in words."""
    update = HotUpdate(asked, "u1", 0.0)
    said: list[str] = []
    number = 0
    while (task := update.task) is not None:
        outcome = fails(task, number)
        if outcome is None:
            outcome = Done(before=before if task.step == "look" else None)
        said.append(f"{word_of(task)} {task.place[:1]}".strip() + ("" if isinstance(outcome, Done) else "!"))
        update.told(outcome, float(number))
        number += 1
        assert number < 200
    return update, said


def breaking(step: str, place: str = "", *, doubted: bool = False) -> Callable[[Task, int], Outcome | None]:
    """The step fails, the first time, on the way there."""

    def fails(task: Task, number: int) -> Outcome | None:
        return Failed("because", doubted) if (task.step, task.place, task.undo) == (step, place, False) else None

    return fails


def test_triton_reloads_one_endpoint_after_the_other() -> None:
    update, said = walked(REPOSITORY)
    each = ["rest", "load", "ready", "cache", "canary", "weights", "drain"]
    assert said == ["look a", "look b", *(f"{step} {place}" for place in "ab" for step in each)]
    assert (update.phase, update.why) == ("done", "")
    assert [(step.step, step.place) for step in update.steps][:2] == [("look", A), ("look", B)]


def test_what_is_new_at_an_endpoint_needs_no_rest_and_replaces_nothing() -> None:
    for asked in (REPOSITORY, ADAPTER):
        _, said = walked(replace(asked, places=(A,)), before=Before())
        assert said == ["look a", "load a", "ready a", "cache a", "canary a", "weights a"]


def test_an_adapter_of_the_same_name_waits_for_its_streams_first() -> None:
    _, said = walked(replace(ADAPTER, places=(A,)))
    assert said == [f"{step} a" for step in ("look", "rest", "drain", "load", "ready", "cache", "canary", "weights")]


def test_a_version_has_its_weight_after_its_canary_and_before_the_old_drains() -> None:
    update, said = walked(replace(VERSION, leaving="terminate"))
    assert said == ["load", "ready b", "cache b", "canary b", "weights", "drain", "unload a"]
    assert update.phase == "done"
    assert walked(replace(VERSION, targets=(), old=()))[1] == ["ready b", "cache b", "canary b", "weights"]


def test_unloading() -> None:
    assert walked(UNLOAD)[1] == ["look a", "look b", "unload a", "unload b"]
    assert walked(replace(SLEEP, places=(A,)))[1] == ["look a", "rest a", "drain a", "unload a"]
    assert walked(LEAVE)[1] == ["weights", "drain", "unload b"]


@pytest.mark.parametrize(
    ("asked", "step", "place", "undone"),
    [
        pytest.param(REPOSITORY, "look", B, [], id="nothing was touched"),
        pytest.param(REPOSITORY, "rest", A, [], id="nor here"),
        pytest.param(REPOSITORY, "load", A, ["undo_weights a"], id="Triton keeps the old one, it comes back"),
        pytest.param(
            REPOSITORY, "ready", A, ["revert a", "undo_ready a", "undo_cache a", "undo_weights a"], id="never ready"
        ),
        pytest.param(
            REPOSITORY, "canary", A, ["revert a", "undo_ready a", "undo_cache a", "undo_weights a"], id="wrong answer"
        ),
        pytest.param(
            REPOSITORY,
            "canary",
            B,
            [
                *["revert b", "undo_ready b", "undo_cache b", "undo_weights b"],
                *["undo_rest a", "revert a", "undo_ready a", "undo_cache a", "undo_weights a"],
            ],
            id="the one before goes back, too",
        ),
        pytest.param(
            replace(REPOSITORY, rest="cannot"),
            "canary",
            A,
            ["revert a", "undo_ready a", "undo_cache a"],
            id="alone: it never left rotation",
        ),
        pytest.param(ADAPTER, "drain", A, ["undo_weights a"], id="the streams do not end"),
        pytest.param(
            ADAPTER,
            "canary",
            B,
            [
                *["revert b", "undo_ready b", "undo_cache b", "undo_weights b"],
                *["undo_rest a", "undo_drain a", "revert a", "undo_ready a", "undo_cache a", "undo_weights a"],
            ],
            id="adapters change under their streams on the way back, too",
        ),
        pytest.param(
            WAKE,
            "canary",
            A,
            ["revert a", "undo_ready a", "undo_cache a", "undo_weights a"],
            id="it was awake, and serves again",
        ),
        pytest.param(VERSION, "load", "", [], id="desk refuses the endpoints"),
        pytest.param(VERSION, "ready", B, ["revert"], id="its endpoints leave the table"),
        pytest.param(VERSION, "canary", B, ["revert"], id="wrong answer of a version"),
        pytest.param(VERSION, "weights", "", ["undo_weights", "revert"], id="desk refuses the weights"),
        pytest.param(VERSION, "drain", "", ["undo_weights", "revert"], id="old will not drain"),
        pytest.param(SLEEP, "drain", A, ["undo_weights a"], id="it stays awake"),
        pytest.param(SLEEP, "unload", A, ["undo_ready a", "undo_weights a"], id="only if it is awake"),
        pytest.param(UNLOAD, "unload", B, [], id="what was unloaded stays unloaded"),
        pytest.param(LEAVE, "drain", "", ["undo_weights"], id="its share comes back"),
    ],
)
def test_a_step_that_fails_undoes_what_was_done(asked: Asked, step: str, place: str, undone: list[str]) -> None:
    update, said = walked(asked, breaking(step, place))
    failed = next(number for number, words in enumerate(said) if words.endswith("!"))
    assert said[failed + 1 :] == undone
    assert update.phase == "failed"
    assert update.why == f"{step}{f' at {place}' if place else ''} failed: because"
    assert update.steps[failed].result == "failed" and update.steps[failed].detail == "because"


@pytest.mark.parametrize(
    ("asked", "step", "place"),
    [
        pytest.param(replace(VERSION, leaving="unload"), "unload", A, id="the old one was told to go"),
        pytest.param(REPOSITORY, "drain", A, id="Triton let go of it already"),
        pytest.param(LEAVE, "unload", B, id="a version that left"),
    ],
)
def test_past_taking_back_it_stands_and_says_what_is_left(asked: Asked, step: str, place: str) -> None:
    update, said = walked(asked, breaking(step, place))
    assert said[-1] == f"{step} {place[:1]}!"
    assert (update.phase, update.why) == ("unfinished", f"{step} at {place} failed: because")


def test_a_load_that_nobody_answered_is_undone_like_one_that_was_done() -> None:
    _, said = walked(replace(REPOSITORY, places=(A,)), breaking("load", A, doubted=True))
    assert said[-5:] == ["load a!", "revert a", "undo_ready a", "undo_cache a", "undo_weights a"]
    _, said = walked(VERSION, breaking("load", doubted=True))
    assert said == ["load!", "revert"]
    _, said = walked(replace(ADAPTER, places=(A,)), breaking("load", A, doubted=True), before=Before())
    assert said[-2:] == ["load a!", "revert a"], "it was not there: it is unloaded, and that is all"


def test_one_that_slept_before_sleeps_again_and_stays_out_of_rotation() -> None:
    _, said = walked(replace(WAKE, places=(A,)), breaking("canary", A), before=Before(False))
    assert said[-2:] == ["canary a!", "revert a"]
    update, said = walked(replace(WAKE, places=(A,)), breaking("load", A), before=Before(False))
    assert (said[-1], update.phase) == ("load a!", "failed")


def test_what_cannot_be_undone_is_said_and_stays_out_of_rotation() -> None:
    def fails(task: Task, number: int) -> Outcome | None:
        if task.step == "canary":
            return Failed("wrong answer")
        return Failed("the old files are gone") if task.step == "revert" else None

    update, said = walked(replace(REPOSITORY, places=(A,)), fails)
    assert said[-2:] == ["canary a!", "revert a!"]
    assert update.phase == "stuck"
    assert update.why == "canary at a:80 failed: wrong answer; and revert at a:80 failed: the old files are gone"


def test_an_adapter_is_not_replaced_under_streams_that_nobody_else_could_take() -> None:
    update, said = walked(replace(ADAPTER, rest="cannot"))
    assert (update.phase, said) == ("failed", ["look a", "look b"])
    assert "in_rotation" in update.why
    assert walked(replace(ADAPTER, rest="cannot"), before=Before())[0].phase == "done"
    assert walked(replace(ADAPTER, rest="no"))[0].phase == "done"


def test_an_adapter_is_not_replaced_where_the_old_ones_cache_would_answer() -> None:
    keeps = Before(True, path="/old", forgets=False)
    update, said = walked(ADAPTER, before=keeps)
    assert (update.phase, said) == ("failed", ["look a", "look b"])
    assert "cannot reset its prefix cache" in update.why
    assert walked(replace(ADAPTER, salts=True), before=keeps)[0].phase == "done"
    assert walked(ADAPTER, before=Before(forgets=False))[0].phase == "done", "nothing of it was cached"


def test_a_step_is_tried_again_until_its_time_is_over() -> None:
    update = HotUpdate(replace(REPOSITORY, places=(A,), deadlines={"ready": 3.0}), "u1", 0.0)
    for _ in ("look", "rest", "load"):
        update.told(Done(before=LOADED), 10.0)
    assert update.task == Task("ready", A)
    assert update.left_s(10.5) == 2.5
    assert update.told(Again("LOADING"), 12.9) is None
    assert update.task == Task("ready", A)
    stepped = update.told(Again("LOADING"), 13.0)
    assert stepped is not None and (stepped.result, stepped.took_s) == ("failed", 3.0)
    assert update.why == "ready at a:80 failed: not within 3 s: LOADING"
    assert update.task == Task("revert", A, True)
    assert update.took_s(14.0) == 14.0


def test_deadlines() -> None:
    for step, seconds in DEADLINES.items():
        assert deadline_of(REPOSITORY, Task(step, A)) == seconds
    assert deadline_of(replace(VERSION, plan=PLAN), Task("weights")) == inf
    assert deadline_of(replace(VERSION, plan=PLAN), Task("weights", undo=True)) == DEADLINES["weights"]
    assert deadline_of(replace(VERSION, plan=PLAN, deadlines={"weights": 9.0}), Task("weights")) == 9.0
    assert deadline_of(replace(REPOSITORY, deadlines={"load": 7.0}), Task("revert", A, True)) == 7.0


def test_what_is_remembered_is_bounded() -> None:
    places = tuple(f"h{number}:80" for number in range(20))
    update, _ = walked(
        replace(REPOSITORY, places=places), lambda task, number: Done("x" * 1000) if task.step != "look" else None
    )
    assert (update.phase, len(update.steps)) == ("done", MAX_STEPPED)
    assert all(len(step.detail) <= MAX_DETAIL for step in update.steps)


@pytest.mark.parametrize("asked", [REPOSITORY, ADAPTER, WAKE, VERSION, UNLOAD, SLEEP, LEAVE])
@pytest.mark.parametrize("loaded", [True, False])
def test_whatever_fails_it_ends(asked: Asked, loaded: bool) -> None:
    """Every pair of tasks broken, in every way: it comes to an end, by transitions that there are."""
    before = LOADED if loaded else Before()
    length = len(walked(asked, before=before)[1])
    for first in range(length):
        for second in range(first + 1, length + 8):
            for doubted in (False, True):
                update, said = walked(
                    asked,
                    lambda task, number, at=(first, second), doubted=doubted: (  # type: ignore[misc]
                        Failed("x", doubted) if number in at else None
                    ),
                    before=before,
                )
                assert not update.live and update.task is None and update.why
                assert update.phase in ("failed", "stuck", "unfinished"), said


def test_every_phase_is_walked() -> None:
    assert set(TRANSITIONS) == {"running", "undoing", "done", "unfinished", "failed", "stuck"}
    assert {phase for phase, after in TRANSITIONS.items() if after} == LIVE
