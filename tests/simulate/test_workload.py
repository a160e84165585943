from statistics import median

import pytest

from sidecar.simulate.profile import CHAT, PROFILES, SHORT, Profile, slo_s
from sidecar.simulate.workload import TENANT, Arrival, Luck, Modifier, synthetic


def facts(arrival: Arrival) -> tuple[object, ...]:
    return tuple(getattr(arrival, name) for name in (*Arrival.__slots__, *Luck.__slots__))


def test_the_same_seed_draws_the_same_requests_and_another_seed_others() -> None:
    one, same, other = ([facts(arrival) for arrival in synthetic(CHAT, 5.0, 3, 30.0, seed)] for seed in (7, 7, 8))
    assert one == same
    assert one != other


def test_how_many_sidecars_there_are_changes_nothing_else_of_a_request() -> None:
    one = list(synthetic(CHAT, 5.0, 3, 30.0, 7))
    eight = list(synthetic(CHAT, 5.0, 3, 30.0, 7, sidecars=8))
    assert {arrival.sidecar for arrival in eight} == set(range(8))
    for alone, among in zip(one, eight, strict=True):
        among.sidecar = 0
        assert facts(alone) == facts(among)


def test_a_session_lives_on_one_engine_and_a_hundred_on_each() -> None:
    homes: dict[str | None, set[int]] = {}
    for arrival in synthetic(CHAT, 20.0, 3, 120.0, 1):
        homes.setdefault(arrival.session, set()).add(arrival.user_pod)
    assert all(len(pods) == 1 for pods in homes.values())
    assert len(homes) == 300


def test_the_rate_swings_over_a_day_and_is_what_was_asked_for_at_its_mean() -> None:
    times = [arrival.at for arrival in synthetic(CHAT, 10.0, 3, 600.0, 1)]
    assert times == sorted(times)
    assert len(times) / 600.0 == pytest.approx(30.0, rel=0.05)
    busy, calm = (sum(begin <= at < begin + 100.0 for at in times) for begin in (100.0, 400.0))
    assert busy / calm == pytest.approx(1.38 / 0.62, rel=0.15)


def test_modifiers_bend_the_traffic_while_they_last() -> None:
    def during(modifier: Modifier) -> list[Arrival]:
        made = synthetic(CHAT, 10.0, 3, 120.0, 1, [modifier])
        return [arrival for arrival in made if 60.0 <= arrival.at < 120.0]

    usual = during(Modifier("surge", 0.0, 0.0, 1.0))
    surge = during(Modifier("surge", 60.0, 120.0, 2.0))
    mix = during(Modifier("mix", 60.0, 120.0, 4.0))
    tenant = during(Modifier("tenant", 60.0, 120.0, 0.04))
    assert len(surge) / len(usual) == pytest.approx(2.0, rel=0.1)
    assert median(a.prompt_tokens for a in mix) / median(a.prompt_tokens for a in usual) == pytest.approx(4.0, rel=0.1)
    assert max(arrival.prompt_tokens for arrival in mix) == CHAT.prompt_max
    poisoned = [arrival for arrival in tenant if arrival.poisoned]
    assert {arrival.session for arrival in poisoned} == {TENANT}
    assert len(poisoned) / len(tenant) == pytest.approx(0.04, rel=0.3)
    assert len({arrival.user_pod for arrival in poisoned}) == 3, "a random balancer spreads it"
    assert not any(arrival.poisoned for arrival in usual)


@pytest.mark.parametrize(("profile", "p50", "p99"), [(CHAT, 512, 5200), (SHORT, 40, 257)], ids=["chat", "short"])
def test_prompts_have_their_profile_s_quantiles(profile: Profile, p50: int, p99: int) -> None:
    prompts = sorted(arrival.prompt_tokens for arrival in synthetic(profile, 10.0, 9, 200.0, 1))
    assert prompts[len(prompts) // 2] == pytest.approx(p50, rel=0.05)
    assert prompts[int(len(prompts) * 0.99)] == pytest.approx(p99, rel=0.1)


def test_luck_is_as_rare_as_its_profile_says() -> None:
    made = list(synthetic(CHAT, 20.0, 9, 300.0, 1))
    count = len(made)
    assert sum(arrival.straggler > 0 for arrival in made) / count == pytest.approx(CHAT.stragglers, rel=0.2)
    assert sum(arrival.error_u < CHAT.errors for arrival in made) / count == pytest.approx(CHAT.errors, rel=0.4)
    assert sum(arrival.pause_s > 0 for arrival in made) / count == pytest.approx(CHAT.pauses, rel=0.3)
    assert all(2.0 <= arrival.straggler <= 100.0 for arrival in made if arrival.straggler)


def test_a_step_grows_with_the_batch_and_the_slo_with_the_prompt() -> None:
    assert CHAT.step_s(1) == pytest.approx(0.00945)
    assert CHAT.step_s(96) == pytest.approx(0.05112, abs=1e-4)
    assert CHAT.ttft_s(1000, 64) == pytest.approx(CHAT.step_s(64) + 0.2)
    assert (slo_s(0), slo_s(1000)) == (1.0, 1.3)
    assert list(PROFILES) == ["chat", "short"]
