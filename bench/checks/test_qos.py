"""Simulated overload: that the world is what it is said to be, what is compared with does what its name says, and what
the tables say of rows."""

from collections.abc import Callable
from pathlib import Path

import pytest

from bench.qos import report
from bench.qos.__main__ import main
from bench.qos.hunt import CASES, Hunted, turns_of
from bench.qos.plain import PLAIN, Fifo, MaxMin, Priority, Queue
from bench.qos.rows import EVALUATION, LOADS, POLICIES, PRODUCT, Row, Task, tasks
from bench.qos.stage import COMES_BACK, Counted, Group, Passed, Policy, Stage, jain
from bench.qos.traffic import CODE, ENGINE, FLOOD, FLOODER, KINDS, PODS, TENANTS, TEXT, VOICE, Asked, requests, slot_s

DOCUMENT = Path(__file__).parents[2] / "docs" / "qos.md"


def asked(id: int, kind: int = TEXT, tenant: int = 1, *, at: float = 0.0, prompt: int = 100, output: int = 10) -> Asked:
    made = Asked(id, at, prompt, output, kind, tenant, False)
    made.noise = made.straggler = made.pause_s = made.pause_at = 0.0
    made.error_u = made.fault_u = made.fault_v = 0.5
    return made


def group(asked: int = 100, met: int = 90, goodput: int = 1000, **away: int) -> Group:
    return Group(asked, met, goodput, met, 1.0, 0.1, 0.2, 0, dict(away))


def counted(met: int = 90, goodput: int = 1000, tokens: int = 10, wanted: int = 10) -> Counted:
    groups = [group(met=met, goodput=goodput, overloaded=100 - met) for _ in KINDS]
    return Counted(groups, groups, 0.5, [[tokens] * TENANTS] * 3, [[wanted] * TENANTS] * 3, 3 * goodput, 19)


def row(policy: str, load: float, flood: str, counts: Counted, seed: int = 1) -> Row:
    return Row(Task(policy, load, seed, flood, 10.0), counts)


def hunted(case: str, within: float = 0.99, turns: int = 0, trips: int = 0) -> Hunted:
    return Hunted(case, 1, 100, within, turns, 0.1, [0.1] * 60, {}, {}, 0, trips, -1.0, -1.0)


# --- the traffic ----------------------------------------------------------------------------------------------------


def test_the_others_send_the_same_with_and_without_the_flood() -> None:
    def told(flood: bool) -> list[tuple[float, int, int, int, int, float]]:
        coming = requests(1.0, 60.0, 7, flood=flood)
        return [(a.at, a.kind, a.tenant, a.prompt_tokens, a.output_tokens, a.noise) for a in coming if not a.flood]

    assert told(True) == told(False)
    assert len(told(True)) > 500


def test_the_flood_is_ten_times_a_tenant_s_part_of_each_class_it_is_in() -> None:
    coming = requests(3.0, 300.0, 3, flood=True, kinds=(VOICE,))
    for number in range(len(KINDS)):
        ours = [each for each in coming if each.kind == number]
        flooder = sum(each.tenant == FLOODER for each in ours)
        part = (len(ours) - flooder) / (TENANTS - 1)
        assert flooder / part == pytest.approx(FLOOD if number == VOICE else 1.0, rel=0.15)


def test_load_1_is_what_fills_every_slot() -> None:
    coming = requests(1.0, 3000.0, 1, flood=True)
    wanted = sum(slot_s(each.prompt_tokens, each.output_tokens) for each in coming) / 3000.0
    assert wanted == pytest.approx(PODS * ENGINE.slots, rel=0.05)
    for kind, number in ((kind, KINDS.index(kind)) for kind in KINDS):
        part = sum(slot_s(each.prompt_tokens, each.output_tokens) for each in coming if each.kind == number) / 3000.0
        assert part / wanted == pytest.approx(kind.part, abs=0.03)


# --- what the gate is compared with -----------------------------------------------------------------------------------


def drained(queue: Queue, *all_asked: Asked) -> list[int]:
    for each in all_asked:
        queue.push(each)
    found = []
    while (each := queue.pop()) is not None:
        found.append(each.id)
    return found


def test_each_queue_has_its_order() -> None:
    def three() -> list[Asked]:
        return [asked(1, CODE, 1, prompt=5000), asked(2, CODE, 1), asked(3, TEXT, 2), asked(4, VOICE, 1)]

    assert drained(Fifo(), *three()) == [1, 2, 3, 4]
    assert drained(Priority(), *three()) == [4, 3, 1, 2]
    assert drained(MaxMin(), *three()) == [1, 3, 2, 4]  # tenant 1 had 5,010 tokens when tenant 2 had none


def test_those_that_gave_up_are_passed_over() -> None:
    for queue in (Fifo(), Priority(), MaxMin()):
        gone = asked(1)
        queue.push(gone)
        gone.word = "queue_timeout"
        queue.push(asked(2))
        assert [each.id for each in iter(queue.pop, None) if each is not None] == [2]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_serves_all_while_there_is_room(name: str) -> None:
    stage = Stage(3, 30.0)
    counts = stage.play(POLICIES[name], requests(0.2, stage.until, 3, flood=False))
    for each in (*counts.victims, *counts.flooder):
        assert each.served == each.asked and not each.away
    assert all(pod.in_flight == 0 for pod in stage.world.pods)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_ends_every_request_and_leaves_nothing(name: str) -> None:
    stage = Stage(3, 20.0)
    coming = requests(4.0, stage.until, 3, flood=True)
    stage.play(POLICIES[name], coming)
    stage.clock.run_until(stage.clock.now + 200.0)
    assert all(each.word for each in coming)
    assert all(pod.in_flight == 0 for pod in stage.world.pods)
    assert max(each.evicted for each in coming) <= COMES_BACK + 1


def test_a_limit_is_the_slots_and_no_engine_has_a_queue() -> None:
    stage = Stage(3, 20.0)
    most = [0]

    def watched(make: Callable[[Stage], Policy]) -> Callable[[Stage], Policy]:
        def made(stage: Stage) -> Policy:
            stage.clock.at(25.0, lambda: most.append(max(pod.in_flight for pod in stage.world.pods)))
            return make(stage)

        return made

    stage.play(watched(PLAIN["priority"]), requests(3.0, stage.until, 3, flood=True))
    assert most[-1] == ENGINE.slots


# --- what is counted --------------------------------------------------------------------------------------------------


def test_jain_s_index() -> None:
    assert jain([3, 3, 3]) == 1.0
    assert jain([5, 0, 0, 0]) == 0.25
    assert jain([]) == jain([0, 0]) == 1.0


def test_passed_over_is_counted_from_the_sla_on() -> None:
    passed = Passed()
    waiting, sla_s = asked(1, CODE), KINDS[CODE].sla_s
    passed.waits(waiting, 0.0)
    for number, at in enumerate((1.0, sla_s - 0.1, sla_s + 1.0, sla_s + 2.0), 2):
        passed.sent(asked(number, TEXT), at)
    assert passed.most == 2
    passed.sent(waiting, sla_s + 3.0)
    passed.sent(asked(9, VOICE), sla_s + 4.0)
    assert passed.most == 2


def test_a_course_turns_where_it_goes_back_by_more_than_chance() -> None:
    assert turns_of([0.1, 0.12, 0.1, 0.13, 0.09]) == 0
    assert turns_of([0.5, 0.1, 0.1, 0.12, 0.1]) == 0
    assert turns_of([0.1, 0.3, 0.1, 0.3, 0.1]) == 3
    assert turns_of([]) == 0


# --- the tables -------------------------------------------------------------------------------------------------------


def test_aims_are_judged_by_the_worst_load() -> None:
    rows = []
    for load, with_it in ((1.0, counted(met=90)), (1.25, counted(met=89, goodput=980)), (2.0, counted(met=80))):
        rows += [row(PRODUCT, load, "none", counted()), row(PRODUCT, load, "all", with_it)]
    missed = report.broken(rows, [hunted("steady")])
    assert any("all, the others had enough: voice kept: 98.89 %" in each for each in missed)
    assert any("all, the others had enough: goodput lost: 2.00 %" in each for each in missed)
    assert any("all, the others had too little: voice kept: 88.89 %" in each for each in missed)
    assert not report.broken([row(PRODUCT, 1.0, flood, counted()) for flood in ("none", "all")], [hunted("steady")])


def test_t26_is_judged_by_its_worst_seed() -> None:
    assert not report.broken([], [hunted(case.name) for case in CASES])
    missed = report.broken([], [hunted("steady", within=0.94), hunted("steady"), hunted("sheds", turns=4, trips=1)])
    assert len(missed) == 3


def test_fair_parts_are_max_min() -> None:
    assert report.parts_of(12.0, [1.0, 10.0, 3.0, 10.0]) == [1.0, 4.0, 3.0, 4.0]
    assert report.parts_of(9.0, [3.0, 3.0, 3.0]) == [3.0, 3.0, 3.0]


def test_fairness_is_judged_where_there_is_something_to_share() -> None:
    assert report.index(counted(tokens=5, wanted=10), TEXT) == pytest.approx(1.0)
    assert report.index(counted(tokens=10, wanted=10), TEXT) is None
    uneven = counted(tokens=0, wanted=10)
    uneven.tokens[TEXT][:10] = [10] * 10
    assert report.index(uneven, TEXT) == pytest.approx(0.5)


def test_the_tables_fill_the_document(tmp_path: Path) -> None:
    rows = [
        row(policy, load, flood, counted(tokens=5))
        for policy in POLICIES
        for load in (1.0, 2.0)
        for flood in (*report.FLOODS, "none")
    ]
    found = [hunted(case.name) for case in CASES]
    document = tmp_path / "qos.md"
    document.write_text(DOCUMENT.read_text())
    for _ in range(2):
        report.write(rows, found, document)
    said = document.read_text()
    assert said.count("| 1 | max-min |") >= 3 and "90.00 (90.00-90.00)" in said
    assert len(report.figures(rows, found)) == len(rows) + len(found)
    document.write_text("nothing")
    with pytest.raises(ValueError, match="no place"):
        report.write(rows, found, document)


def test_a_look_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--policies", "product", "--loads", "1", "--seconds", "5", "--seeds", "1"]) == 0
    assert "| 1 | product |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--policies", "no such"])


def test_seeds_for_tuning_and_for_evaluation_are_apart() -> None:
    planned = tasks([PRODUCT], LOADS, range(EVALUATION, EVALUATION + 2), 10.0, floods_apart=True)
    assert {task.seed for task in planned} == {EVALUATION, EVALUATION + 1}
    assert len(planned) == len({(task.policy, task.load, task.seed, task.flood) for task in planned})
