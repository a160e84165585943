from random import Random

import pytest

from sidecar.simulate.fault import COLD_S, Fault, Kind
from sidecar.simulate.profile import CHAT
from sidecar.simulate.workload import luck_of, synthetic
from sidecar.simulate.world import LATE_S, TELL_S, World
from tests.simulate.build import EVEN, Heard, arrival_of, world_of


def test_an_answer_takes_its_prompt_and_then_a_step_for_each_token() -> None:
    world = world_of()
    heard = Heard(world)
    world.send(0, arrival_of(prompt=100, output=10), 1, heard)
    world.clock.run_until(10.0)
    assert heard.words == ["first", "end"]
    ttft_s = EVEN.ttft_s(100, 1)
    assert heard.times == pytest.approx([ttft_s, ttft_s + 9 * EVEN.step_s(1)])


def test_a_long_answer_is_heard_of_every_half_second_at_least() -> None:
    world = world_of()
    heard = Heard(world)
    world.send(0, arrival_of(output=400), 1, heard)
    world.clock.run_until(60.0)
    assert heard.words == ["first", *["token"] * (len(heard.words) - 2), "end"]
    gaps = [after - before for before, after in zip(heard.times, heard.times[1:], strict=False)]
    assert 0.4 < max(gaps) <= TELL_S
    assert heard.times[-1] - heard.times[0] == pytest.approx(399 * EVEN.step_s(1))


def test_an_answer_of_one_token_ends_as_it_begins() -> None:
    world = world_of()
    heard = Heard(world)
    world.send(0, arrival_of(output=1), 1, heard)
    world.clock.run_until(1.0)
    assert heard.words == ["first", "end"]
    assert heard.times[0] == heard.times[1]
    assert (world.pods[0].in_flight, world.pods[0].running) == (0, 0)


def test_who_finds_no_slot_waits_and_is_served_first_come_first_served() -> None:
    world = world_of()
    heard = [Heard(world) for _ in range(5)]
    for number, sink in enumerate(heard):
        world.send(0, arrival_of(number, output=5), 1, sink)
    pod = world.pods[0]
    assert (pod.in_flight, pod.running, len(pod.queue)) == (5, 2, 3)
    world.clock.run_until(10.0)
    begun = [sink.times[0] for sink in heard]
    assert begun == sorted(begun)
    assert begun[2] > heard[0].times[-1]
    assert (pod.in_flight, pod.running, len(pod.queue)) == (0, 0, 0)


@pytest.mark.parametrize("when", ["queued", "running", "failing"])
def test_abort_frees_the_slot_at_once_and_nothing_more_is_heard(when: str) -> None:
    world = world_of()
    others = [Heard(world), Heard(world)]
    if when == "queued":
        for number, sink in enumerate(others):
            world.send(0, arrival_of(number, output=400), 1, sink)
    heard = Heard(world)
    flight = world.send(0, arrival_of(9, poisoned=when == "failing"), 1, heard)
    held = world.pods[0].in_flight
    flight.abort()
    flight.abort()
    assert world.pods[0].in_flight == held - 1
    world.clock.run_until(60.0)
    assert heard.words == []
    assert (world.pods[0].in_flight, world.pods[0].running) == (0, 0)


def test_aborting_one_that_runs_lets_the_next_in_the_queue_begin() -> None:
    world = world_of()
    first = [world.send(0, arrival_of(number, output=400), 1, Heard(world)) for number in range(2)]
    waiting = Heard(world)
    world.send(0, arrival_of(2, output=1), 1, waiting)
    world.clock.run_until(0.5)
    assert waiting.words == []
    first[0].abort()
    assert world.pods[0].running == 2
    world.clock.run_until(1.0)
    assert waiting.words == ["first", "end"]


@pytest.mark.parametrize("word", ["first", "token", "end"])
def test_a_sink_may_abort_from_within_a_call(word: str) -> None:
    world = world_of()
    heard = Heard(world, abort_at=word)
    world.send(0, arrival_of(output=200), 1, heard)
    world.clock.run_until(60.0)
    assert heard.words[-1] == word
    assert (world.pods[0].in_flight, world.pods[0].running) == (0, 0)


def test_nothing_is_heard_from_within_send() -> None:
    world = world_of(Fault(Kind.OUTAGE, (0,), 0.0, 10.0))
    world.clock.run_until(1.0)
    heard = Heard(world)
    flight = world.send(0, arrival_of(), 1, heard)
    assert flight.refused
    assert heard.words == []
    world.clock.run_until(2.0)
    assert heard.words == ["refused"]


def test_a_pause_is_a_silence_that_ends() -> None:
    world = world_of()
    arrival = arrival_of(output=100)
    arrival.pause_s, arrival.pause_at = 3.0, 0.5
    heard = Heard(world)
    world.send(0, arrival, 1, heard)
    world.clock.run_until(60.0)
    gaps = [after - before for before, after in zip(heard.times, heard.times[1:], strict=False)]
    assert heard.words[-1] == "end"
    assert [gap for gap in gaps if gap > TELL_S] == [pytest.approx(3.0, abs=TELL_S + 0.01)]


FAULTS = [
    # kind, strength, share, u, v, what is heard first, whether it is hit
    (Kind.STEP, 3.0, 1.0, 0.5, 0.5, "first", True),
    (Kind.STEP, 1.9, 1.0, 0.5, 0.5, "first", False),
    (Kind.RAMP, 10.0, 1.0, 0.5, 0.5, "first", True),
    (Kind.COLD, 8.0, 1.0, 0.5, 0.5, "first", True),
    (Kind.ZONE, LATE_S, 1.0, 0.5, 0.5, "first", True),
    (Kind.ZONE, LATE_S - 0.01, 1.0, 0.5, 0.5, "first", False),
    (Kind.ERRORS, 1.0, 0.4, 0.3, 0.1, "http500", True),
    (Kind.ERRORS, 1.0, 0.4, 0.3, 0.9, "reset", True),
    (Kind.ERRORS, 1.0, 0.4, 0.5, 0.1, "first", False),
    (Kind.MULTI, 1.0, 0.8, 0.7, 0.1, "http500", True),
    (Kind.STALL, 1.0, 0.4, 0.3, 0.1, "", True),
    (Kind.STALL, 1.0, 0.4, 0.3, 0.9, "first", True),
    (Kind.STALL, 1.0, 0.4, 0.5, 0.1, "first", False),
    (Kind.GRAY, 1.0, 0.1, 0.05, 0.2, "first", True),
    (Kind.GRAY, 1.0, 0.1, 0.05, 0.6, "http500", True),
    (Kind.GRAY, 1.0, 0.1, 0.05, 0.95, "reset", True),
    (Kind.GRAY, 1.0, 0.1, 0.2, 0.2, "first", False),
    (Kind.OUTAGE, 1.0, 1.0, 0.5, 0.5, "refused", True),
    (Kind.RELOAD, 8.0, 1.0, 0.5, 0.5, "refused", True),
]


@pytest.mark.parametrize(
    ("kind", "strength", "share", "u", "v", "word", "hit"),
    FAULTS,
    ids=[f"{row[0]}-{row[5]}-{row[6]}" for row in FAULTS],
)
def test_what_a_fault_does_to_whom(
    kind: Kind, strength: float, share: float, u: float, v: float, word: str, hit: bool
) -> None:
    fault = Fault(kind, (1,), 0.0, 75.0, strength, share)
    world = world_of(fault)
    world.clock.run_until(40.0 if kind is Kind.RAMP else 1.0)
    bitten, spared = Heard(world), Heard(world)
    arrival = arrival_of(u=u, v=v, pod=1)
    assert world.affected(arrival) is hit
    assert world.send(1, arrival, 1, bitten).hit is hit
    assert world.send(0, arrival, 1, spared).hit is False
    assert not world.affected(arrival_of(u=u, v=v, pod=0))
    world.clock.run_until(70.0)
    assert (bitten.words or [""])[0] == word
    assert spared.words == ["first", "end"]


def test_a_stall_after_the_first_token_holds_its_slot_until_it_is_given_up() -> None:
    world = world_of(Fault(Kind.STALL, (0,), 0.0, 75.0, 1.0, 1.0))
    world.clock.run_until(1.0)
    heard = Heard(world)
    flight = world.send(0, arrival_of(output=400, v=0.75), 1, heard)
    world.clock.run_until(500.0)
    assert heard.words[0] == "first"
    assert "end" not in heard.words
    assert len(heard.words) > 1, "half of the answer came"
    assert world.pods[0].running == 1
    flight.abort()
    assert (world.pods[0].running, world.pods[0].in_flight) == (0, 0)


def test_a_slow_engine_is_slow_to_begin_and_slow_to_go_on() -> None:
    world = world_of(Fault(Kind.STEP, (1,), 0.0, 75.0, 5.0))
    world.clock.run_until(1.0)
    well, slow = Heard(world), Heard(world)
    for pod, sink in ((0, well), (1, slow)):
        world.send(pod, arrival_of(pod), 1, sink)
    world.clock.run_until(60.0)
    assert slow.times[0] - 1.0 == pytest.approx(5.0 * (well.times[0] - 1.0))
    assert slow.times[-1] - slow.times[0] == pytest.approx(5.0 * (well.times[-1] - well.times[0]))


def test_a_reload_refuses_then_is_cold_then_is_well() -> None:
    fault = Fault(Kind.RELOAD, (0,), 10.0, 30.0, 8.0)
    world = world_of(fault)
    assert fault.until == 30.0 + COLD_S
    hits = []
    for at in (5.0, 20.0, 31.0, 30.0 + COLD_S - 1.0, 30.0 + COLD_S + 1.0):
        world.clock.run_until(at)
        flight = world.send(0, arrival_of(), 1, Heard(world))
        hits.append((flight.refused, flight.hit))
    assert hits == [(False, False), (True, True), (False, True), (False, False), (False, False)]


def test_what_is_poisoned_fails_everywhere_and_is_no_fault_s() -> None:
    world = world_of(Fault(Kind.STEP, (1,), 0.0, 75.0, 5.0))
    world.clock.run_until(1.0)
    heard = [Heard(world), Heard(world)]
    arrival = arrival_of(poisoned=True, pod=1)
    assert not world.affected(arrival)
    for pod, sink in enumerate(heard):
        world.send(pod, arrival, pod + 1, sink)
    world.clock.run_until(5.0)
    assert [sink.words for sink in heard] == [["http500"], ["http500"]]


def test_the_first_attempt_has_the_request_s_own_luck_and_the_second_another() -> None:
    world = World(world_of().clock, CHAT, 1, [Fault(Kind.ERRORS, (0,), 0.0, 1000.0, 1.0, 0.5)], 3)
    world.clock.run_until(0.5)
    same = differ = 0
    for arrival in synthetic(CHAT, 5.0, 1, 60.0, 3):
        affected = world.affected(arrival)
        assert world.send(0, arrival, 1, Heard(world)).hit is affected
        again = world.send(0, arrival, 2, Heard(world)).hit
        assert again is world.send(0, arrival, 2, Heard(world)).hit, "and always the same one"
        same, differ = same + (again is affected), differ + (again is not affected)
    assert 0.3 < same / (same + differ) < 0.7
    assert luck_of(3, 7, 2, CHAT).fault_u == luck_of(3, 7, 2, CHAT).fault_u != luck_of(3, 7, 3, CHAT).fault_u


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_held_when_all_is_over_whoever_gave_up_when(seed: int) -> None:
    faults = [Fault(Kind.STALL, (0,), 5.0, 20.0, 1.0, 0.5), Fault(Kind.STEP, (1,), 5.0, 20.0, 6.0)]
    world = World(world_of().clock, CHAT, 3, faults, seed)
    rng = Random(seed)
    for arrival in synthetic(CHAT, 60.0, 3, 25.0, seed):
        world.clock.run_until(arrival.at)
        flight = world.send(arrival.user_pod, arrival, 1, Heard(world, abort_at=rng.choice(["", "", "first", "token"])))
        world.clock.at(world.clock.now + rng.choice([0.05, 1.0, 30.0]), flight.abort)
    world.clock.run_until(300.0)
    for pod in world.pods:
        assert (pod.in_flight, pod.running, len(pod.queue), pod.active) == (0, 0, 0, [])
