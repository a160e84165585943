"""The soak's plan: the same seed, the same soak; and nothing in it that contradicts itself."""

import itertools

from sidecar.policy.errors import PolicyErrors
from sidecar.policy.load import load
from soak import policies
from soak.plan import ENGINES, Carriage, Kind, Manner, Traffic, When, reloads, troubles


def test_the_same_seed_gives_the_same_plan() -> None:
    for seed in (1, 2):
        assert [Traffic(seed).turn() for _ in range(1)] == [Traffic(seed).turn() for _ in range(1)]
    once, again, other = (list(itertools.islice(Traffic(seed), 500)) for seed in (1, 1, 2))
    assert once == again != other
    assert troubles(1, 600.0) == troubles(1, 600.0) != troubles(2, 600.0)
    assert reloads(1, 600.0, policies.NAMES) == reloads(1, 600.0, policies.NAMES)


def test_every_request_has_a_number_of_its_own() -> None:
    traffic = Traffic(5)
    turns = [*itertools.islice(traffic, 3000), traffic.calm()]
    numbers = [ask.number for turn in turns for ask in turn.asks]
    assert numbers == list(range(1, len(numbers) + 1))


def test_everything_that_there_is_happens() -> None:
    turns = list(itertools.islice(Traffic(1), 20_000))
    assert {ask.kind for turn in turns for ask in turn.asks} == set(Kind)
    assert {turn.carriage for turn in turns} == set(Carriage)
    assert {turn.manner for turn in turns} == set(Manner)
    assert {turn.abort.when for turn in turns if turn.abort is not None} == set(When)


def test_troubles_of_an_engine_do_not_overlap_and_end_in_time() -> None:
    planned = troubles(1, 600.0)
    assert {each.engine for each in planned} == set(range(ENGINES))
    for engine in range(ENGINES):
        own = [each for each in planned if each.engine == engine]
        assert all(one.at_s + one.for_s < two.at_s for one, two in itertools.pairwise(own))
    assert all(each.at_s + each.for_s <= 598.0 for each in planned)


def test_no_policy_comes_twice_in_a_row() -> None:
    names = [policies.NAMES[0], *(each.variant for each in reloads(1, 600.0, policies.NAMES))]
    assert all(one != two for one, two in itertools.pairwise(names)) and set(names) == set(policies.NAMES)


def test_every_policy_loads_without_a_warning_and_the_broken_one_does_not() -> None:
    for name in policies.NAMES:
        document = [("policy.yaml", policies.text(name, [1, 2, 3, 4]).encode())]
        if name != policies.BROKEN:
            assert load(document, 1).warnings == ()
            continue
        try:
            load(document, 1)
        except PolicyErrors:
            continue
        raise AssertionError("it loads")
