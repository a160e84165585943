from functools import cache
from itertools import pairwise
from statistics import quantiles

import pytest

from sidecar.simulate.clock import VirtualClock
from sidecar.simulate.profile import CHAT, PROFILES, SHORT, Profile, slo_s
from sidecar.simulate.workload import synthetic
from sidecar.simulate.world import USUAL_BATCH, World
from tests.simulate.build import Heard

PODS, RATE, SECONDS = 9, 10.0, 100.0
BOTH = [pytest.param(profile, id=profile.name) for profile in (CHAT, SHORT)]


@cache
def first_tokens(profile: Profile) -> list[float]:
    """How long first tokens take where nothing is wrong: the experiment's fleet and rate, a random balancer."""
    world = World(VirtualClock(), profile, PODS, (), 1)
    heard: list[tuple[float, Heard]] = []
    for arrival in synthetic(profile, RATE, PODS, SECONDS, 1):
        world.clock.run_until(arrival.at)
        sink = Heard(world)
        heard.append((arrival.at, sink))
        world.send(arrival.user_pod, arrival, 1, sink)
    world.clock.run_until(SECONDS + 60.0)
    return [sink.times[0] - at for at, sink in heard if sink.words[0] == "first"]


def test_the_short_profile_is_as_quick_as_it_says() -> None:
    percentiles = quantiles(first_tokens(SHORT), n=100)
    assert percentiles[49] == pytest.approx(0.018, abs=0.001)
    assert percentiles[98] == pytest.approx(0.047, abs=0.003)


def test_of_the_short_profile_next_to_nobody_takes_200_ms_and_of_chat_many_do_not() -> None:
    short, chat = first_tokens(SHORT), first_tokens(CHAT)
    assert sum(took > 0.2 for took in short) / len(short) < 0.002
    assert sum(took > 0.2 for took in chat) / len(chat) > 0.02


@pytest.mark.parametrize("profile", BOTH)
def test_a_step_takes_longer_the_larger_the_batch(profile: Profile) -> None:
    steps = [profile.step_s(batch) for batch in range(profile.slots + 1)]
    assert all(one < next_ for one, next_ in pairwise(steps))
    assert 0.005 < steps[0] < steps[-1] < 0.1


@pytest.mark.parametrize("profile", BOTH)
def test_a_larger_batch_serves_more_tokens_a_second_all_the_same(profile: Profile) -> None:
    paces = [batch / profile.step_s(batch) for batch in range(1, profile.slots + 1)]
    assert all(one < next_ for one, next_ in pairwise(paces))


@pytest.mark.parametrize("profile", BOTH)
def test_a_first_token_takes_longer_with_the_prompt_and_with_the_batch(profile: Profile) -> None:
    for batch in (1, USUAL_BATCH, profile.slots):
        by_prompt = [profile.ttft_s(tokens, batch) for tokens in range(1, profile.prompt_max, 97)]
        assert all(one < next_ for one, next_ in pairwise(by_prompt))
    for tokens in (1, 512, profile.prompt_max):
        by_batch = [profile.ttft_s(tokens, batch) for batch in range(1, profile.slots + 1)]
        assert all(one < next_ for one, next_ in pairwise(by_batch))


def test_a_first_token_is_a_step_and_the_reading_of_the_prompt() -> None:
    assert CHAT.ttft_s(0, 8) == pytest.approx(CHAT.step_s(8))
    assert CHAT.ttft_s(1000, 0) - CHAT.ttft_s(0, 0) == pytest.approx(0.1)
    assert CHAT.ttft_s(1000, 64) - CHAT.ttft_s(0, 64) == pytest.approx(0.2)


@pytest.mark.parametrize("profile", BOTH)
def test_what_is_owed_is_more_than_an_idle_engine_takes_for_any_prompt(profile: Profile) -> None:
    for tokens in range(1, profile.prompt_max, 97):
        assert slo_s(tokens) > 2.0 * profile.ttft_s(tokens, USUAL_BATCH)
    assert (slo_s(0), slo_s(10_000)) == (1.0, 4.0)


def test_profiles_are_found_by_their_names() -> None:
    assert {name: profile.name for name, profile in PROFILES.items()} == {"chat": "chat", "short": "short"}
