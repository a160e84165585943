"""This sidecar's part of token budgets: what is reserved, refused, settled, drawn and given back."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from sidecar.core.quotas.quota import MODELS, MOST_TENANTS, TENANTS, Drawn, Exceeded, Ledger, Reservation, allowance
from sidecar.policy.schema import Quota
from sidecar.txlog.codec import budget_key
from tests.quota_world import World


def made(*quotas: Quota) -> Ledger:
    ledger = Ledger()
    ledger.use(quotas, 0.0)
    return ledger


def test_a_sidecar_that_is_alone_admits_the_limit_in_each_minute() -> None:
    ledger = made(Quota(name="q", tokens_per_minute=1000))
    budgets = ledger.budgets("ann", "m")
    held = [ledger.reserve(budgets, 300, 1.0) for _ in range(4)]
    assert [isinstance(each, Reservation) for each in held] == [True, True, True, False]
    refused = held[3]
    assert isinstance(refused, Exceeded)
    assert (refused.window, refused.budget) == ("tokens per minute", budgets[0])
    assert refused.detail == "quota q: 1000 tokens per minute, 100 left, 300 wanted"
    assert isinstance(ledger.reserve(budgets, 300, 62.1), Reservation)


def test_a_request_larger_than_the_limit_is_told_that_waiting_does_not_help() -> None:
    ledger = made(Quota(name="q", tokens_per_minute=1000))
    refused = ledger.reserve(ledger.budgets("ann", "m"), 1001, 1.0)
    assert isinstance(refused, Exceeded)
    assert refused.retry_after_s is None


@pytest.mark.parametrize(
    ("tokens", "stream", "factor", "allowed"), [(0, True, 1.5, 0), (1000, False, 1.0, 1000), (1000, True, 1.5, 1800)]
)
def test_a_request_may_take_what_its_service_shape_and_class_allow(
    tokens: int, stream: bool, factor: float, allowed: int
) -> None:
    assert allowance(tokens, stream, factor) == allowed


# Headers.


def lines(told: bytes) -> dict[str, str]:
    assert told.endswith(b"\r\n")
    return dict(line.split(": ") for line in told.decode().split("\r\n")[:-1])


def test_headers_tell_of_the_tightest_budget_that_is_enforced() -> None:
    ledger = made(
        Quota(name="wide", tokens_per_minute=10_000, requests_per_day=50),
        Quota(name="tight", tokens_per_minute=1000, tokens_per_day=100_000),
        Quota(name="tried", tokens_per_minute=10, mode="shadow"),
    )
    budgets = ledger.budgets("ann", "m")
    ledger.reserve(budgets, 250, 1.0)
    assert lines(ledger.headers(budgets, 1.0)) == {
        "x-ratelimit-limit-requests": "50",
        "x-ratelimit-remaining-requests": "49",
        "x-ratelimit-reset-requests": "28m48s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "750",
        "x-ratelimit-reset-tokens": "15s",
    }


def test_headers_are_made_again_when_their_numbers_change() -> None:
    ledger = made(Quota(name="q", tokens_per_minute=1000))
    budgets = ledger.budgets("ann", "m")
    first = ledger.headers(budgets, 1.0)
    assert ledger.headers(budgets, 1.1) is first
    held = ledger.reserve(budgets, 250, 1.1)
    assert isinstance(held, Reservation)
    second = ledger.headers(budgets, 1.1)
    assert lines(second)["x-ratelimit-remaining-tokens"] == "750"
    ledger.settle(held, 50, 1.2)
    assert lines(ledger.headers(budgets, 1.2))["x-ratelimit-remaining-tokens"] == "950"
    ledger.use((Quota(name="q", tokens_per_minute=500),), 1.3)
    assert lines(ledger.headers(ledger.budgets("ann", "m"), 1.3))["x-ratelimit-limit-tokens"] == "500"


def test_no_header_where_nothing_is_enforced() -> None:
    ledger = made(Quota(name="q", tokens_per_minute=1000, mode="shadow"))
    assert ledger.headers(ledger.budgets("ann", "m"), 1.0) == b""
    assert ledger.headers((), 1.0) == b""


def test_nothing_is_left_and_not_less_than_that() -> None:
    ledger = made(Quota(name="q", tokens_per_minute=1000))
    budgets = ledger.budgets("ann", "m")
    held = ledger.reserve(budgets, 900, 1.0)
    assert isinstance(held, Reservation)
    ledger.settle(held, 5000, 1.0)
    assert lines(ledger.headers(budgets, 1.0))["x-ratelimit-remaining-tokens"] == "0"


# Which quotas hold whom.


FITS = (
    Quota(name="all", tokens_per_minute=1),
    Quota(name="acme", tenant="acme", tokens_per_minute=1),
    Quota(name="acmes", tenant="acme-*", models=("llama-*", "sql"), tokens_per_minute=1),
    Quota(name="off", tokens_per_minute=1, mode="off"),
    Quota(name="one", tenant="?", tokens_per_minute=1),
)


@pytest.mark.parametrize(
    ("tenant", "model", "names"),
    [
        ("bob", "m", ["all"]),
        ("acme", "m", ["all", "acme"]),
        ("acme-1", "llama-7b", ["all", "acmes"]),
        ("acme-1", "sql", ["all", "acmes"]),
        ("acme-1", "mistral", ["all"]),
        ("Acme", "m", ["all"]),
        ("", "m", ["all"]),
        ("x", "m", ["all", "one"]),
        ("acme/\n\x00", "m", ["all"]),
        ("x" * 100_000, "m", ["all"]),
    ],
)
def test_quotas_hold_whom_they_name(tenant: str, model: str, names: list[str]) -> None:
    ledger = made(*FITS)
    for _ in range(2):
        assert [budget.rule.name for budget in ledger.budgets(tenant, model)] == names
    fitting = [quota.name for quota in ledger.fitting(tenant)]
    assert [name for name in fitting if name in names] == names


def test_names_that_clients_make_up_share_nothing() -> None:
    """Quotas `a` and `b`, tenants with slashes and colons: each pair is a budget of its own, here and on the server."""
    ledger = made(Quota(name="a", tokens_per_minute=10), Quota(name="b", tokens_per_minute=10))
    tenants = ["", "/", "a/", "b/ann", "budget:a/ann", "ann\n", "ann", "ann ", "ANN", "a" * 255, "a" * 257, "a" * 258]
    seen: set[int] = set()
    keys: set[str] = set()
    for tenant in tenants:
        for budget in ledger.budgets(tenant, "m"):
            seen.add(id(budget))
            keys.add(budget_key(budget.rule.name, budget.tenant))
    assert len(seen) == len(keys) == 2 * len(tenants)


def test_who_was_not_seen_for_longest_is_forgotten_and_never_one_with_something_under_way() -> None:
    ledger = made(Quota(name="q", tokens_per_minute=1000))
    held = ledger.reserve(ledger.budgets("busy", "m"), 10, 0.0)
    assert isinstance(held, Reservation)
    for number in range(TENANTS + 50):
        ledger.budgets(f"tenant-{number}", "m")
    assert len(ledger.tenants) == TENANTS
    assert ledger.known("busy")
    assert ledger.tenants[0] == "tenant-51"
    ledger.settle(held, 10, 0.0)


def test_a_few_with_something_under_way_keep_nobody_else() -> None:
    ledger = made(Quota(name="q", tokens_per_minute=1000))
    held = [ledger.reserve(ledger.budgets(f"busy-{number}", "m"), 10, 0.0) for number in range(30)]
    for number in range(TENANTS + 500):
        ledger.budgets(f"tenant-{number}", "m")
    assert len(ledger.tenants) == TENANTS and all(isinstance(each, Reservation) for each in held)
    assert all(ledger.known(f"busy-{number}") for number in range(30))


def test_names_made_up_while_the_log_is_away_take_no_more_room_than_a_tenth() -> None:
    ledger = made(Quota(name="q", tokens_per_minute=1000))
    ledger.went_away(2, 1.0)
    last = None
    for number in range(MOST_TENANTS + 500):
        last = ledger.reserve(ledger.budgets(f"tenant-{number}", "m"), 10, 1.0)
        assert isinstance(last, Reservation)
        ledger.settle(last, 12, 1.0)
    assert len(ledger.tenants) == MOST_TENANTS and not ledger._due
    ledger.came_back(2.0)
    told: set[str] = set()
    now = 2.0
    while len(told) < MOST_TENANTS:
        now += 0.02
        draws = ledger.wants(now)
        assert draws, len(told)
        for draw in draws:
            assert [portion.must for portion in draw.portions] == [12]
            told.add(draw.budget.tenant)
            ledger.drawn(draw, Drawn([0], [12], [0.0], 0, 0, 1), now)


def test_a_name_as_long_as_a_body_is_not_kept() -> None:
    ledger = made(Quota(name="q", models=("*a*b*c*",), tokens_per_minute=1000), Quota(name="all", tokens_per_minute=9))
    assert [budget.rule.name for budget in ledger.budgets("ann", "a" * 1_000_000)] == ["all"]
    assert not ledger._masks


def test_models_that_clients_make_up_take_no_room() -> None:
    ledger = made(Quota(name="q", models=("a*",), tokens_per_minute=1000), Quota(name="all", tokens_per_minute=1000))
    for number in range(3 * MODELS):
        ledger.budgets("ann", f"a{number}" if number % 2 else f"b{number}")
    assert len(ledger._masks) <= MODELS
    assert len(ledger._tenants["ann"].by_mask) == 2


# Shadow, several budgets, reloads.


def test_a_shadow_quota_counts_what_it_would_have_refused_and_refuses_nothing() -> None:
    ledger = made(Quota(name="q", tokens_per_minute=1000, mode="shadow"), Quota(name="wide", tokens_per_minute=10_000))
    budgets = ledger.budgets("ann", "m")
    held = [ledger.reserve(budgets, 300, 1.0) for _ in range(5)]
    assert all(isinstance(each, Reservation) for each in held)
    counts = ledger.counts["q"]
    assert (counts.shadow_refused, counts.refused, counts.reserved_tokens) == ({"tokens per minute": 2}, {}, 900)
    assert (ledger.counts["wide"].reserved_tokens, budgets[0].meters[0].refused) == (1500, 2)


def test_a_request_holds_of_all_budgets_or_of_none() -> None:
    ledger = made(Quota(name="a", tokens_per_minute=1000), Quota(name="b", requests_per_minute=1))
    budgets = ledger.budgets("ann", "m")
    assert isinstance(ledger.reserve(budgets, 10, 0.0), Reservation)
    refused = ledger.reserve(budgets, 10, 0.0)
    assert isinstance(refused, Exceeded)
    assert (refused.window, budgets[0].meters[0].own, budgets[0].in_flight) == ("requests per minute", 10, 1)


def test_a_request_that_never_went_gives_itself_back() -> None:
    ledger = made(Quota(name="q", tokens_per_minute=1000, requests_per_minute=1, concurrency=1))
    budgets = ledger.budgets("ann", "m")
    for _ in range(3):
        held = ledger.reserve(budgets, 1000, 0.0)
        assert isinstance(held, Reservation)
        ledger.cancel(held, 0.5)
        ledger.cancel(held, 0.5)
        ledger.settle(held, 7, 0.5)
    assert (budgets[0].in_flight, budgets[0].reserved, [meter.own for meter in budgets[0].meters]) == (0, 0, [0, 0])


def test_what_was_used_beyond_the_reservation_is_owed() -> None:
    ledger = made(Quota(name="q", tokens_per_minute=1000))
    budgets = ledger.budgets("ann", "m")
    held = ledger.reserve(budgets, 100, 0.0)
    assert isinstance(held, Reservation)
    ledger.settle(held, 5000, 0.0)
    ledger.settle(held, 5000, 0.0)
    counts = ledger.counts["q"]
    assert (budgets[0].meters[0].own, counts.debt_tokens, counts.settled_tokens) == (5000, 4900, 5000)
    assert isinstance(ledger.reserve(budgets, 1, 60.9), Exceeded)
    assert isinstance(ledger.reserve(budgets, 1, 62.0), Reservation)


def test_a_new_limit_holds_from_the_next_request_on() -> None:
    ledger = made(Quota(name="q", tokens_per_minute=1000))
    ledger.reserve(ledger.budgets("ann", "m"), 600, 0.0)
    ledger.use((Quota(name="q", tokens_per_minute=500),), 1.0)
    assert isinstance(ledger.reserve(ledger.budgets("ann", "m"), 1, 1.0), Exceeded)
    ledger.use((Quota(name="q", tokens_per_minute=2000),), 2.0)
    assert isinstance(ledger.reserve(ledger.budgets("ann", "m"), 1400, 2.0), Reservation)
    ledger.use((Quota(name="q", tokens_per_minute=2000, mode="off"),), 3.0)
    assert (ledger.budgets("ann", "m"), ledger.any) == ((), False)


def test_a_quota_that_is_gone_gives_back_and_its_reservations_settle() -> None:
    world = World(1, Quota(name="q", tokens_per_minute=1000, concurrency=5), Quota(name="kept", tokens_per_day=5000))
    (sidecar,) = world.sidecars
    ledger = sidecar.ledger
    world.ask(sidecar, "ann", 500, 100, lasts_s=20.0)
    world.ask(sidecar, "ann", 500, 100, lasts_s=0.2)
    world.run(0.5)
    gone, kept = ledger.known("ann")
    ledger.use((Quota(name="kept", tokens_per_day=5000),), world.now)
    assert [budget.rule.name for budget in ledger.budgets("ann", "m")] == ["kept"]
    world.run(2.5)
    assert (gone.meters[0].held, gone.meters[0].spare, gone.gone, gone.in_flight) == (0, 0, True, 1)
    world.run(30.0)
    assert (gone.in_flight, gone.reserved, gone.slots, kept.meters[0].own) == (0, 0, 0, 200)
    assert not ledger._checks


def test_of_a_window_that_a_reload_added_nothing_is_given_back() -> None:
    ledger = made(Quota(name="q", tokens_per_minute=100_000))
    held = ledger.reserve(ledger.budgets("ann", "m"), 90_000, 0.0)
    assert isinstance(held, Reservation)
    ledger.use((Quota(name="q", tokens_per_minute=100_000, tokens_per_day=1000),), 1.0)
    (budget,) = ledger.budgets("ann", "m")
    ledger.settle(held, 10, 2.0)
    assert [(meter.own, meter.held, meter.back) for meter in budget.meters] == [(10, 0, 0), (0, 0, 0)]
    assert isinstance(ledger.reserve(ledger.budgets("ann", "m"), 1001, 3.0), Exceeded)


# Whatever happens.


class Step(msgspec.Struct, frozen=True):
    sidecar: int
    tokens: int
    used: int
    lasts_s: float
    wait_s: float


STEPS = st.lists(
    st.builds(
        Step,
        sidecar=st.integers(0, 2),
        tokens=st.integers(0, 400),
        used=st.integers(0, 600),
        lasts_s=st.sampled_from([0.0, 0.01, 0.3, 1.5, 4.0]),
        wait_s=st.sampled_from([0.0, 0.001, 0.02, 0.2, 1.1]),
    ),
    max_size=25,
)
EVENTS = st.lists(
    st.tuples(st.integers(0, 24), st.sampled_from(["lose", "find", "forget", "drop", "reload"])), max_size=4
)
WALKED = Quota(name="q", tokens_per_minute=2000, requests_per_day=15, concurrency=4)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, events=EVENTS)
def test_when_all_is_settled_nothing_is_held_and_the_server_has_counted_no_less_than_was_used(
    steps: list[Step], events: list[tuple[int, str]]
) -> None:
    world = World(3, WALKED)
    happens = dict(events)
    for number, step in enumerate(steps):
        match happens.get(number):
            case "lose":
                world.lose()
            case "find":
                world.find(False, within_s=0.1)
            case "forget":  # a server that is started anew is away for a moment at least
                world.lose(seen_after_s=0.0)
                world.run(0.01)
                world.find(True, within_s=0.1)
            case "drop":
                world.server.mute = not world.server.mute
            case "reload":
                for sidecar in world.sidecars:
                    sidecar.ledger.use((replace(WALKED, tokens_per_minute=1000 + 100 * number),), world.now)
        world.ask(world.sidecars[step.sidecar], "ann", step.tokens, step.used, step.lasts_s)
        world.run(step.wait_s)
        for budget in world.budgets("ann"):
            for meter in budget.meters:
                assert min(meter.held, meter.debt, meter.told, meter.back, meter.spare, meter.own) >= 0
    calm = not {"lose", "find", "forget", "drop"} & set(happens.values())
    world.server.mute = False
    world.find(False, within_s=0.1)
    world.run(10.0)
    for budget in world.budgets("ann"):
        assert (budget.in_flight, budget.reserved, budget.slots) == (0, 0, 0)
        assert all(meter.settled for meter in budget.meters)
    used = [sum(tokens for _, tokens in world.admitted), len(world.admitted)]
    counted = world.server.told("q", "ann")
    assert min(counted[0] - used[0], counted[1] - used[1]) >= 0
    if calm:
        assert counted == used
    world.run(40.0)
    assert all(not sidecar.ledger._checks and not sidecar.ledger._due for sidecar in world.sidecars)
