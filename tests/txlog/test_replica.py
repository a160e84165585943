"""Several sidecars over one log: who opens what, who probes, what happens without the log, in virtual time."""

import math

import pytest
from msgspec.structs import replace

from sidecar.core.balance import Choice
from sidecar.core.breaker import Action, Breaker, Denied, Permit, Scope, State
from sidecar.kernel.ids import SessionId
from sidecar.kernel.outcome import Result
from sidecar.policy.schema import Breakers, Endpoint, Seconds
from sidecar.txlog.codec import Code, Kind, decode, encode_body, register_key, route_key, shard_of
from sidecar.txlog.lease import IDLE_S, KEEP_S
from sidecar.txlog.replica import MOST_DUE, REFUSED_S, REMIND_S, Job
from sidecar.txlog.store import Propose, Verdict
from tests.txlog.sidecars import BEGIN_US, RULE, Network, Sidecar, at_once, policy_of

CLOSED, OPEN, HALF_OPEN = State.CLOSED, State.OPEN, State.HALF_OPEN
S, F, I = Result.SUCCESS, Result.FAILURE, Result.IGNORED  # noqa: E741


def log_of(network: Network, number: int = 1) -> list[tuple[str, str, int, int]]:
    """What the log says of an endpoint: kind, state, version, and by whom (its number)."""
    key = network.register(number)
    entries = at_once(network.store.history(shard_of(key), evidence=False, after="0", count=10_000))
    records = [decode(entry.data) for entry in entries]
    return [
        (Kind(r.kind).name, Code(r.state).name, r.version, int(r.by.rpartition("-")[2]))
        for r in records
        if r.key == key
    ]


# --- opening ----------------------------------------------------------------------------------------------------------


def test_what_one_opens_is_open_for_all() -> None:
    network = Network(3)
    one, two, _three = network.sidecars
    one.fails()
    assert network.states() == [OPEN, CLOSED, CLOSED], "here at once"
    assert one.breaker().ours
    network.turn()
    assert network.states() == [OPEN] * 3
    assert [sidecar.breaker().shared for sidecar in network.sidecars] == [True] * 3
    (moved,) = two.told
    assert (moved.why, moved.agreed, two.breaker().observer) == ("consecutive", True, "pod-1")
    assert not one.told, "its own breaker had moved already"
    assert log_of(network) == [("TRANSITION", "OPEN", 1, 1)]


def test_a_start_reads_nothing_twice() -> None:
    network = Network(3)
    network.sidecars[0].fails()
    network.turn()
    assert [sidecar.replica.counts.resyncs for sidecar in network.sidecars] == [0, 0, 0]


def test_of_two_that_open_at_once_one_is_written_and_both_agree() -> None:
    network = Network(2)
    for sidecar in network.sidecars:
        sidecar.fails()
    network.turn()
    assert network.states() == [OPEN, OPEN]
    assert len(log_of(network)) == 1
    versions = {(s.breaker().epoch, s.breaker().version, s.breaker().observer) for s in network.sidecars}
    assert len(versions) == 1
    assert sum(sidecar.replica.counts.cas_losses for sidecar in network.sidecars) == 1


def test_the_floor_is_the_fleets_and_who_was_later_closes_again() -> None:
    network = Network(2, policy_of(3, replace(RULE, min_closed_ratio=0.67)))
    one, two = network.sidecars
    one.fails(1)
    two.fails(2)
    network.turn()
    assert (one.breaker(1).state, one.breaker(2).state) == (OPEN, CLOSED)
    assert (two.breaker(1).state, two.breaker(2).state) == (OPEN, CLOSED)
    assert two.breaker(2).why == "floor" and two.replica.counts.floor == 1


def test_endpoints_that_left_while_open_use_up_nothing_of_the_floor() -> None:
    network = Network(2)
    one, two = network.sidecars
    one.fails(1)
    network.turn()
    fresh = replace(policy_of(3), endpoints=tuple(Endpoint(url=f"http://h{number}:80") for number in (4, 5, 6)))
    for sidecar in network.sidecars:
        sidecar.use(fresh)
    two.fails(4)
    one.fails(5)
    network.turn()
    assert [one.breaker(number).state for number in (4, 5)] == [OPEN, OPEN]


def test_evidence_of_one_is_a_suspicion_and_of_two_opens() -> None:
    network = Network(3, policy_of(5, quorum=2))
    one, two, _three = network.sidecars
    one.fails()
    network.turn()
    assert network.states() == [OPEN, CLOSED, CLOSED] and one.breaker().ours
    assert log_of(network) == [("SUSPECT", "CLOSED", 0, 1)]
    two.fails(times=2)
    assert two.breaker().state is OPEN, "a suspected endpoint needs less"
    network.turn()
    assert network.states() == [OPEN] * 3
    assert not any(sidecar.breaker().ours for sidecar in network.sidecars)


def test_a_suspicion_that_its_own_probe_confirms_is_enough() -> None:
    network = Network(2, policy_of(5, quorum=2))
    one, _ = network.sidecars
    one.fails()
    network.turn()
    network.now += 10
    assert one.ends(one.breaker(), F), "what only we avoid is probed by us"
    network.turn()
    assert network.states() == [OPEN, OPEN]


def test_a_lone_sidecar_is_quorum_enough() -> None:
    network = Network(1, policy_of(5, quorum=2))
    network.sidecars[0].fails()
    network.turn()
    assert network.sidecars[0].breaker().shared


def test_a_suspicion_that_lasts_is_told_again() -> None:
    network = Network(2, policy_of(5, replace(RULE, open_s=Seconds(3600), open_max_s=Seconds(3600)), quorum=2))
    network.sidecars[0].fails()
    network.passes(150, 5.0)
    told = [kind for kind, *_ in log_of(network)]
    assert told.count("SUSPECT") >= 2 and set(told) == {"SUSPECT"}


def test_who_sees_more_than_half_fail_suspects_itself() -> None:
    network = Network(2, policy_of(4))
    one, two = network.sidecars
    one.fails(1)
    one.fails(2)
    one.fails(3)
    network.turn()
    assert [one.breaker(n).state for n in (1, 2)] == [OPEN, OPEN]
    assert [two.breaker(n).state for n in (1, 2, 3)] == [CLOSED] * 3
    assert not log_of(network, 1)


# --- probing ----------------------------------------------------------------------------------------------------------


def opened(count: int = 3, **changes: object) -> Network:
    network = Network(count, policy_of(3, replace(RULE, **changes)))
    network.sidecars[0].fails()
    network.turn()
    return network


def test_one_probe_at_a_time_for_all_and_exactly_as_many_as_close() -> None:
    network = opened(20, successes=5)
    out: list[tuple[Sidecar, Permit]] = []
    probes = 0
    network.passes(9.5, asking=network.sidecars)
    assert network.states() == [OPEN] * 20
    for _ in range(200):
        network.passes(0.05, 0.05, asking=network.sidecars)
        if network.states() == [CLOSED] * 20:
            break
        for sidecar in network.sidecars:
            for _ in range(5):
                permit = sidecar.breaker().acquire(sidecar.now())
                if isinstance(permit, Permit) and permit.probe:
                    out.append((sidecar, permit))
        assert len(out) <= 1
        for sidecar, permit in out:
            probes += 1
            sidecar.tells(sidecar.breaker().record(permit, S, sidecar.now(), "complete"))
        out.clear()
    assert network.states() == [CLOSED] * 20
    assert probes == 5


def test_the_next_request_after_the_wait_is_the_probe() -> None:
    network = opened(1)
    (one,) = network.sidecars
    network.passes(10.0, asking=[one])
    assert one.breaker().state is HALF_OPEN and one.breaker().can_probe(network.now)
    choice = one.asks()
    assert isinstance(choice, Choice) and choice.permit.probe and choice.node.key == "h1:80"


def test_a_failed_probe_opens_for_all_and_for_longer() -> None:
    network = opened(2)
    network.passes(10.0, asking=network.sidecars)
    holder = next(s for s in network.sidecars if s.breaker().can_probe(network.now))
    assert holder.ends(holder.breaker(), F)
    network.turn()
    assert network.states() == [OPEN, OPEN]
    assert [s.breaker().retry_at(network.now) - network.now for s in network.sidecars] == pytest.approx([20, 20])
    assert [s.breaker().evidence for s in network.sidecars] == ["3 failures in a row, the last: server_error"] * 2


def test_a_probe_that_says_nothing_frees_its_place() -> None:
    network = opened(2)
    network.passes(10.0, asking=network.sidecars)
    for _ in range(3):
        holder = next(s for s in network.sidecars if s.breaker().can_probe(network.now))
        holder.ends(holder.breaker(), I)
        network.passes(1.0, asking=network.sidecars)
    assert HALF_OPEN in network.states()


def test_a_holder_that_dies_with_its_probe_reopens() -> None:
    network = opened(2)
    network.passes(10.0, asking=network.sidecars)
    holder = next(s for s in network.sidecars if s.breaker().can_probe(network.now))
    other = next(s for s in network.sidecars if s is not holder)
    assert isinstance(holder.breaker().acquire(network.now), Permit)
    network.sidecars.remove(holder)
    network.passes(6.0, asking=[other])
    assert other.breaker().state is OPEN and other.breaker().why == "lease_expired"


def test_a_long_probe_keeps_its_lease() -> None:
    network = opened(2)
    network.passes(10.0, asking=network.sidecars)
    holder = next(s for s in network.sidecars if s.breaker().can_probe(network.now))
    permit = holder.breaker().acquire(network.now)
    assert isinstance(permit, Permit)
    network.passes(60.0, asking=network.sidecars)
    assert network.states() == [HALF_OPEN, HALF_OPEN]
    holder.breaker().record(permit, S, network.now, "complete")
    network.turn()
    assert network.states() == [HALF_OPEN, HALF_OPEN] and not holder.replica.counts.fenced


def test_a_request_nobody_heard_of_again_holds_its_probe_no_longer_than_any_may_take() -> None:
    network = opened(1)
    (one,) = network.sidecars
    network.passes(10.0, asking=[one])
    assert isinstance(one.breaker().acquire(network.now), Permit)
    network.passes(one.breaker().lease_s + 10.0, 1.0, asking=[one])
    assert one.breaker().why == "lease_expired"


def test_nobody_asks_for_probes_of_a_service_that_nobody_uses() -> None:
    network = opened(2)
    for sidecar in network.sidecars:
        sidecar.service.asked_at = -math.inf
    network.passes(60.0)
    assert network.states() == [OPEN, OPEN]
    network.passes(1.5, asking=[network.sidecars[1]])
    assert network.sidecars[1].breaker().can_probe(network.now)


def test_one_that_others_want_is_given_back_soon_and_otherwise_kept() -> None:
    network = opened(2)
    one, two = network.sidecars
    network.passes(10.0, asking=[one])
    assert one.breaker().can_probe(network.now)
    network.passes(KEEP_S / 2, asking=[one])
    assert one.breaker().can_probe(network.now)
    network.passes(IDLE_S + 5.0, asking=[one, two])
    network.passes(5.0, asking=[two])
    assert two.breaker().can_probe(network.now) and not one.breaker().can_probe(network.now)


# --- sessions and kinds of request ------------------------------------------------------------------------------------


def fail_session(sidecar: Sidecar, session: str, times: int = 2) -> None:
    found = sidecar.service.session(SessionId(session), sidecar.now())
    for _ in range(times):
        permit = sidecar.service.admit_session(found, sidecar.now())
        if isinstance(permit, Permit):
            sidecar.tells(sidecar.service.record_session(found, permit, F, sidecar.now(), "server_error"))


def test_a_session_breaker_follows_the_session_to_any_pod() -> None:
    network = Network(3)
    one, two, three = network.sidecars
    met = two.service.session(SessionId("s-1"), network.now)
    fail_session(one, "s-1")
    network.turn()
    assert isinstance(two.service.admit_session(met, network.now), Denied), "who knows it already"
    fresh = three.service.session(SessionId("s-1"), network.now)
    assert isinstance(three.service.admit_session(fresh, network.now), Denied), "and who meets it later"
    other = three.service.session(SessionId("s-2"), network.now)
    assert isinstance(three.service.admit_session(other, network.now), Permit)


def test_a_session_that_failed_is_probed_where_it_comes_back() -> None:
    network = Network(2)
    one, two = network.sidecars
    fail_session(one, "s-1")
    network.turn()
    network.passes(5.0)
    moved = two.service.session(SessionId("s-1"), network.now)
    refused = two.service.admit_session(moved, network.now)
    assert isinstance(refused, Denied)
    network.passes(4 * IDLE_S)
    permit = two.service.admit_session(moved, network.now)
    assert isinstance(permit, Permit) and permit.probe
    two.service.record_session(moved, permit, S, network.now, "complete")
    network.turn()
    assert isinstance(one.service.admit_session(one.service.sessions[SessionId("s-1")], network.now), Permit)


def test_a_kind_of_request_that_fails_is_refused_everywhere() -> None:
    network = Network(2)
    one, two = network.sidecars
    breaker = one.service.request_breaker("POST /v1/chat/completions", network.now)
    for _ in range(2):
        one.ends(breaker, F)
    network.turn()
    assert isinstance(
        two.service.request_breaker("POST /v1/chat/completions", network.now).acquire(network.now), Denied
    )


def test_an_endpoint_that_joins_is_open_from_its_start_if_the_others_say_so() -> None:
    network = Network(2)
    one, two = network.sidecars
    two.use(policy_of(1))
    one.fails(2)
    network.turn()
    two.use(policy_of(3))
    assert two.breaker(2).state is OPEN


# --- without the log --------------------------------------------------------------------------------------------------


def test_what_happens_without_the_log_is_told_once_it_is_back() -> None:
    network = Network(2)
    one, _two = network.sidecars
    one.down = True
    network.turn()
    one.fails()
    network.turn()
    assert network.states() == [OPEN, CLOSED]
    one.down = False
    network.turn()
    assert network.states() == [OPEN, OPEN]
    assert len(log_of(network)) == 1, "and once"
    network.passes(3.0)
    assert len(log_of(network)) == 1


def test_what_opened_and_closed_again_without_the_log_is_not_told() -> None:
    network = Network(1)
    (one,) = network.sidecars
    one.down = True
    network.turn()
    one.fails()
    network.passes(30.0)
    while one.breaker().state is not CLOSED:
        assert one.ends(one.breaker(), S)
    one.down = False
    network.turn()
    assert not log_of(network)


def test_who_was_away_loses_to_who_was_not() -> None:
    network = Network(2)
    one, two = network.sidecars
    one.down = True
    network.turn()
    two.fails()
    one.fails()
    network.turn()
    one.down = False
    network.turn()
    assert [by for *_, by in log_of(network)] == [2]
    assert network.states() == [OPEN, OPEN] and one.breaker().observer == "pod-2"


def test_a_lost_answer_is_no_second_record() -> None:
    network = Network(2)
    one, _ = network.sidecars
    one.fails()
    one.write(lose_answers=True)
    network.turn()
    assert network.states() == [OPEN, OPEN] and len(log_of(network)) == 1


def test_a_server_that_lost_everything_is_told_what_is_open() -> None:
    network = opened(2)
    one, two = network.sidecars
    network.loses_all()
    for sidecar in network.sidecars:
        sidecar.beat()
    network.turn()
    assert network.states() == [OPEN, OPEN]
    assert len(log_of(network)) == 1
    network.passes(11.0, asking=[one, two])
    assert HALF_OPEN in network.states(), "and it goes on as before"


def test_a_loss_that_was_written_over_before_anything_was_read_is_noticed() -> None:
    network = Network(1, policy_of(5))
    (one,) = network.sidecars
    one.fails(1)
    one.write()
    network.loses_all()
    network.now += 1.0
    one.fails(2)
    one.write()
    network.turn()
    assert len(log_of(network, 1)) == len(log_of(network, 2)) == 1


def test_without_the_log_the_probes_of_many_are_apart() -> None:
    network = opened(10)
    for sidecar in network.sidecars:
        sidecar.down = True
    network.turn()
    waits = sorted(s.breaker().retry_at(network.now) - network.now for s in network.sidecars)
    assert waits[0] >= 9.9 and 30.0 < waits[-1] <= 10.0 + 100.0 and len(set(waits)) == 10
    network.now += 10.0 + 9 * 10.0
    assert all(isinstance(s.breaker().acquire(network.now), Permit) for s in network.sidecars), "but come at last"


def test_a_trimmed_log_is_read_whole() -> None:
    network = Network(2)
    one, two = network.sidecars
    two.down = True
    network.turn()
    for _ in range(3):
        one.fails()
        network.turn()
        network.passes(200.0, 1.0, asking=[one])
        while one.breaker().state is not CLOSED:
            one.ends(one.breaker(), S)
            network.passes(1.0, asking=[one])
    one.fails()
    network.turn()
    two.down = False
    network.turn()
    assert network.states() == [OPEN, OPEN]


# --- orders -----------------------------------------------------------------------------------------------------------


def test_an_order_holds_everywhere_until_the_next() -> None:
    network = Network(2)
    one, two = network.sidecars
    breaker = two.breaker()
    breaker.force("open", network.now, "ann")
    two.replica.order(breaker, "open", "ann", math.inf, network.now)
    network.turn()
    assert network.states() == [OPEN, OPEN]
    network.passes(500.0, 50.0, asking=network.sidecars)
    assert network.states() == [OPEN, OPEN] and one.breaker().by == "ann at pod-2"
    one.breaker().force("close", network.now, "bob")
    one.replica.order(one.breaker(), "close", "bob", math.inf, network.now)
    network.turn()
    assert network.states() == [CLOSED, CLOSED]


def test_an_order_ends_everywhere_at_its_time() -> None:
    network = Network(2)
    one, _two = network.sidecars
    one.breaker().force("open", network.now, "ann", network.now + 60.0)
    one.replica.order(one.breaker(), "open", "ann", 60.0, network.now)
    network.passes(59.0, 1.0, asking=network.sidecars)
    assert network.states() == [OPEN, OPEN]
    network.passes(3.0, asking=network.sidecars)
    assert HALF_OPEN in network.states()


def test_what_is_held_closed_is_opened_by_nobody() -> None:
    network = Network(2)
    one, two = network.sidecars
    one.breaker().force("hold", network.now, "ann", network.now + 60.0)
    one.replica.order(one.breaker(), "hold", "ann", 60.0, network.now)
    network.turn()
    two.fails()
    network.turn()
    assert network.states() == [CLOSED, CLOSED]
    network.passes(61.0, 1.0)
    two.fails()
    network.turn()
    assert network.states() == [OPEN, OPEN]


def test_an_order_without_the_log_is_told_when_it_is_back() -> None:
    network = Network(2)
    one, _ = network.sidecars
    one.down = True
    network.turn()
    one.breaker().force("open", network.now, "ann")
    one.replica.order(one.breaker(), "open", "ann", math.inf, network.now)
    one.down = False
    network.turn()
    assert network.states() == [OPEN, OPEN]


def test_all_ramp_up_together() -> None:
    network = opened(2, successes=1)
    one, two = network.sidecars
    key = register_key(Scope.NODE, "chat", "h1:80")
    assert one.replica.fold.state(key) == Code.OPEN
    network.passes(10.0, asking=network.sidecars)
    holder = next(s for s in network.sidecars if s.breaker().can_probe(network.now))
    assert holder.ends(holder.breaker(), S)
    network.turn()
    assert network.states() == [CLOSED, CLOSED]
    assert one.breaker().ramp_until == pytest.approx(two.breaker().ramp_until, abs=1e-3)


def test_who_ends_gives_back_what_it_was_lent() -> None:
    network = opened(2)
    one, two = network.sidecars
    network.passes(10.0, asking=[one])
    assert one.breaker().can_probe(network.now)
    one.replica.leave(network.now)
    one.write()
    network.sidecars.remove(one)
    network.passes(1.0, asking=[two])
    assert two.breaker().can_probe(network.now), "at once, and not as after a failure"


def test_a_session_called_what_no_utf8_can_say_is_agreed_on_here_alone() -> None:
    network = Network(2)
    one, two = network.sidecars
    fail_session(one, "half \ud800 of a pair")
    network.turn()
    assert not len(one.replica.ring)
    met = two.service.session(SessionId("half \ud800 of a pair"), network.now)
    assert isinstance(two.service.admit_session(met, network.now), Denied), "who meets it later knows it"


def test_a_session_finds_out_by_itself_that_the_log_is_away() -> None:
    network = Network(2)
    one, _ = network.sidecars
    fail_session(one, "s-1")
    network.turn()
    for sidecar in network.sidecars:
        sidecar.down = True
    network.turn()
    found = one.service.sessions[SessionId("s-1")]
    network.now += 5.0
    permit = one.service.admit_session(found, network.now)
    assert isinstance(permit, Permit) and permit.probe, "at once: nobody else is trying for it"
    moved = one.service.record_session(found, permit, S, network.now, "complete")
    assert moved is not None and moved.new is CLOSED


def test_a_register_that_the_server_forgot_is_told_again_and_not_open_for_ever() -> None:
    network = opened(2)
    one, two = network.sidecars
    network.loses_all()
    for _ in range(40):
        network.passes(2.0, asking=[one, two])
        for sidecar in (one, two):
            sidecar.ends(sidecar.breaker(), S)
    network.turn()
    assert network.states() == [CLOSED, CLOSED]


def test_an_order_that_waited_for_the_log_ends_when_it_was_to_end() -> None:
    network = Network(2)
    one, two = network.sidecars
    one.down = True
    network.turn()
    one.breaker().force("open", network.now, "ann", network.now + 60.0)
    one.replica.order(one.breaker(), "open", "ann", 60.0, network.now)
    network.now += 50.0
    one.down = False
    network.turn()
    assert two.breaker().held_until == pytest.approx(network.now + 10.0, abs=0.01)
    one.down = True
    network.turn()
    one.breaker(2).force("open", network.now, "ann", network.now + 60.0)
    one.replica.order(one.breaker(2), "open", "ann", 60.0, network.now)
    network.now += 3600.0
    one.down = False
    network.turn()
    assert two.breaker(2).state is CLOSED and not len(one.replica.ring)


def test_many_that_are_due_at_once_have_their_turn() -> None:
    network = Network(1)
    (one,) = network.sidecars
    for number in range(MOST_DUE + 100):
        fail_session(one, f"s-{number}")
    network.turn(1000)
    network.now += 6.0
    one.replica.tick(network.now)
    assert one.replica.next_at() <= network.now, "the rest is due still"
    for _ in range(10):
        one.replica.tick(network.now)
    assert one.replica.next_at() > network.now


def test_what_was_off_is_again_what_the_others_have() -> None:
    network = Network(2)
    one, two = network.sidecars
    one.fails()
    network.turn()
    two.use(policy_of(3, replace(RULE, mode="off")))
    assert two.breaker().state is CLOSED
    two.use(policy_of(3))
    assert two.breaker().state is OPEN and two.breaker().shared


def lent(network: Network) -> tuple[Sidecar, Sidecar]:
    """Who has a probe in hand, and another."""
    one, two = network.sidecars[:2]
    network.passes(10.0, asking=[one])
    assert one.breaker().can_probe(network.now)
    return one, two


@pytest.mark.parametrize("used", [False, True], ids=["in hand", "with a request"])
@pytest.mark.parametrize("why", ["panic", "load", "floor", "off"])
def test_what_closes_here_alone_gives_the_others_its_probe(why: str, used: bool) -> None:
    network = opened(2)
    one, two = lent(network)
    permit = one.breaker().acquire(network.now) if used else None
    match why:
        case "panic":
            one.tells(one.breaker().close_in_panic(network.now))
        case "load":
            one.tells(one.breaker().close_for_load(network.now))
        case "floor":
            one.use(policy_of(3, replace(RULE, min_closed_ratio=1.0)))
        case _:
            one.use(policy_of(3, replace(RULE, mode="off")))
    assert one.breaker().state is CLOSED
    one.service.asked_at = -math.inf  # else it may well be the one that is lent the next
    network.passes(3.0, asking=[two])
    assert two.breaker().can_probe(network.now) and two.breaker().doublings == 0
    if isinstance(permit, Permit):
        one.tells(one.breaker().record(permit, F, network.now, "late"))
        network.turn()
        assert two.breaker().state is HALF_OPEN, "it counts for nothing any more"


def overfull() -> tuple[Network, Sidecar]:
    """A sidecar that alone avoids h1, when the log has h2 opened: two more than may be open there."""
    network = Network(3, policy_of(3, replace(RULE, min_closed_ratio=0.67), quorum=2))
    one, two, three = network.sidecars
    two.fails(1)
    network.turn()
    for sidecar in (one, three):
        sidecar.fails(2)
    network.turn()
    assert (two.breaker(1).state, two.breaker(2).state) == (OPEN, CLOSED) and two.breaker(1).ours
    assert one.breaker(2).state is OPEN
    return network, two


@pytest.mark.parametrize(
    "why", ["refused", "proved", "order", "reset", "panic", "load", "panic over", "lower floor", "joined", "left"]
)
def test_what_the_floor_refused_is_open_as_soon_as_there_is_room(why: str) -> None:
    network, two = overfull()
    rule = replace(RULE, min_closed_ratio=0.67)
    ours = two.breaker(1)
    match why:
        case "refused":
            network.now += REMIND_S  # what it saw alone is told again, and the fleet has no room for it
        case "proved":
            network.now += 20.0
            network.turn()
            assert two.ends(ours, S) and two.ends(ours, S)
        case "order" | "reset":
            action: Action = "close" if why == "order" else "reset"
            ours.force(action, network.now, "ann")
            two.replica.order(ours, action, "ann", math.inf, network.now)
        case "panic":
            two.tells(ours.close_in_panic(network.now))
        case "load":
            two.tells(ours.close_for_load(network.now))
        case "panic over":
            two.service.roster.panic = True
            two.tells(ours.close_in_panic(network.now))
            network.turn()
            assert two.breaker(2).state is CLOSED
            two.service.roster.panic = False
        case "lower floor":
            two.use(policy_of(3, RULE, quorum=2))
        case "joined":
            two.use(policy_of(6, replace(rule, min_closed_ratio=0.5), quorum=2))
        case _:
            several = policy_of(3, rule, quorum=2)
            two.use(replace(several, endpoints=several.endpoints[1:]))
    network.turn()
    assert two.breaker(2).state is OPEN and two.breaker(2).shared
    assert not two.replica._refused


def test_what_the_floor_refused_is_open_once_what_was_open_before_is_read_as_closed() -> None:
    """Records come in any order: for a moment more is open than the log ever had."""
    network = Network(2, policy_of(3, replace(RULE, min_closed_ratio=0.67)))
    one, two = network.sidecars
    one.fails(1)
    network.turn()
    one.breaker(1).force("close", network.now, "ann")
    one.replica.order(one.breaker(1), "close", "ann", math.inf, network.now)
    one.write()
    one.fails(2)
    one.write()
    after = {shard: two.replica.position(shard) for shard in range(16)}
    closed, opened = at_once(network.store.read(0, after, 0, 1000))
    two.replica.entries([opened], network.now)
    assert (two.breaker(1).state, two.breaker(2).state) == (OPEN, CLOSED)
    two.replica.entries([closed], network.now)
    two.replica.tick(network.now)
    assert (two.breaker(1).state, two.breaker(2).state) == (CLOSED, OPEN)


def test_what_the_floor_refused_of_who_joined_is_open_as_soon_as_there_is_room() -> None:
    network, two = overfull()
    rule = replace(RULE, min_closed_ratio=0.67)
    three = policy_of(3, rule, quorum=2)
    two.use(replace(three, endpoints=three.endpoints[::2]))
    two.use(three)
    network.turn()
    assert (two.breaker(1).state, two.breaker(2).state) == (OPEN, CLOSED), "h2 came back, and is refused again"
    two.breaker(1).force("reset", network.now, "ann")
    two.replica.order(two.breaker(1), "reset", "ann", math.inf, network.now)
    network.turn()
    assert two.breaker(2).state is OPEN and two.breaker(2).shared


@pytest.mark.parametrize("gone", ["the register", "the endpoint", "the service", "the rule"])
def test_what_the_floor_refused_and_is_gone_is_looked_at_no_more(gone: str) -> None:
    network, two = overfull()
    three = policy_of(3, replace(RULE, min_closed_ratio=0.67), quorum=2)
    match gone:
        case "the register":
            one = network.sidecars[0]
            one.breaker(2).force("close", network.now, "ann")
            one.replica.order(one.breaker(2), "close", "ann", math.inf, network.now)
            network.turn()
        case "the endpoint":
            two.use(replace(three, endpoints=three.endpoints[::2]))
        case "the service":
            two.use(policy_of(3, name="other"))
        case _:
            two.use(policy_of(3, replace(RULE, mode="off"), quorum=2))
    network.passes(REFUSED_S)
    assert not two.replica._refused


def met(sidecar: Sidecar, scope: Scope) -> Breaker:
    """The breaker of h1, of a session or of a kind of request, which this sidecar knows now."""
    if scope is Scope.NODE:
        return sidecar.breaker()
    if scope is Scope.REQUEST:
        return sidecar.service.request_breaker("/r", sidecar.now())
    sidecar.service.session(SessionId("s"), sidecar.now())
    found = sidecar.service.find(Scope.SESSION, "s", sidecar.now())
    assert found is not None
    return found


@pytest.mark.parametrize("ends", ["time", "order", "trial"])
@pytest.mark.parametrize("scope", Scope)
def test_who_is_off_obeys_an_order_and_its_end_and_takes_nobodys_probe(scope: Scope, ends: str) -> None:
    network = Network(2)
    one, two = network.sidecars
    rules = policy_of().breakers
    off = Breakers(
        node=replace(rules.node, mode="off"),
        session=replace(rules.session, mode="off"),
        request=replace(rules.request, mode="off"),
    )
    two.use(replace(policy_of(), breakers=off))
    ours, theirs = met(one, scope), met(two, scope)
    ours.force("open", network.now, "ann", network.now + 30.0)
    one.replica.order(ours, "open", "ann", 30.0, network.now)
    network.turn()
    assert theirs.held_open and isinstance(theirs.acquire(network.now), Denied)
    if ends == "order":
        ours.force("close", network.now, "ann")
        one.replica.order(ours, "close", "ann", math.inf, network.now)
        network.turn()
    else:
        network.passes(32.0, asking=[two])
        assert ours.state is OPEN and network.states() == [OPEN if scope is Scope.NODE else CLOSED, CLOSED]
    if ends == "trial":
        for _ in range(20):
            one.service.asked_at = one.now()
            one.ends(ours, S)
            network.passes(0.5, asking=[two])
        assert ours.state is CLOSED, "nobody else has its probes"
    assert theirs.state is CLOSED and theirs.passes and theirs.held_until is None
    assert not two.replica.leases.held(key_of(scope)) and not len(two.replica.ring)


def key_of(scope: Scope) -> str:
    return register_key(scope, "chat", {Scope.NODE: "h1:80", Scope.REQUEST: "/r", Scope.SESSION: "s"}[scope])


def test_an_old_record_that_was_restored_does_not_keep_the_others_from_opening() -> None:
    """A sidecar is back after so long that the server has forgotten what the others closed meanwhile."""
    network = opened(3)
    one, two, late = network.sidecars
    late.down = True
    network.turn()
    for _ in range(60):
        network.passes(0.5, 0.5, asking=[one, two])
        for sidecar in (one, two):
            if sidecar.breaker().can_probe(network.now):
                sidecar.ends(sidecar.breaker(), S)
    network.turn()
    assert (one.breaker().state, two.breaker().state) == (CLOSED, CLOSED)
    network.loses_all()
    late.down = False
    late.turn()
    late.turn()
    assert (
        decode(network.store._shards[shard_of(network.register())].registers[network.register()].data).state
        == Code.OPEN
    )
    one.fails()
    network.turn()
    network.passes(1.0)
    assert network.states() == [OPEN] * 3, "its trip holds"
    assert len({sidecar.replica.fold.version(network.register()) for sidecar in network.sidecars}) == 1


def test_what_the_server_lost_is_restored_before_it_is_told_what_is_new() -> None:
    network = opened(2)
    for sidecar in network.sidecars:
        sidecar.down = True
    network.turn()
    one, two = network.sidecars
    for _ in range(100):
        network.passes(0.5, 0.5)
        for sidecar in (one, two):
            if sidecar.breaker().can_probe(network.now):
                sidecar.ends(sidecar.breaker(), S)
        if network.states() == [CLOSED, CLOSED]:
            break
    network.loses_all()
    for sidecar in network.sidecars:
        sidecar.down = False
    network.turn()
    network.passes(2.0)
    assert network.states() == [CLOSED, CLOSED], "what was proved stays proved"


def test_lag_of_a_shard_that_had_no_record_is_no_date() -> None:
    network = Network(2)
    one, two = network.sidecars
    one.fails()
    one.write()
    assert 0 < two.replica.counted(at_once(network.store.counts())) < 10_000


def route(version: int, blob: bytes, tx: int = 0) -> Propose:
    return Propose(
        key=route_key("chat"),
        service="chat",
        kind=Kind.ROUTE,
        state=Code.CLOSED,
        epoch=0 if version == 1 else BEGIN_US // 1_000_000 + 1000,
        version=version - 1,
        tx=bytes([tx or version]) * 16,
        body=encode_body(route_key("chat"), "chat", "ann", "update", "", blob),
        by="pod-1",
    )


def test_a_table_is_handed_on_once_whoever_wrote_it_and_however_it_came() -> None:
    network = Network(2)
    told: list[list[bytes]] = [[], []]
    for sidecar, heard in zip(network.sidecars, told, strict=True):
        sidecar.replica.on_route = lambda record, heard=heard: heard.append(record.blob)  # type: ignore[misc]
    one = network.sidecars[0]
    for version in (1, 2):
        call = route(version, b"table %d" % version)
        (reply,) = at_once(network.store.call([call]))
        assert reply.verdict is Verdict.OK
        one.replica.replied(Job(call), reply, one.now())
        network.turn()
    late = route(2, b"too late", 9)
    (reply,) = at_once(network.store.call([late]))
    one.replica.replied(Job(late), reply, one.now())
    assert (one.replica.counts.appended, one.replica.counts.cas_losses) == (2, 1)
    for sidecar in network.sidecars:
        sidecar.disconnect()
    network.turn()
    assert told == [[b"table 1", b"table 2"]] * 2
    for sidecar in network.sidecars:
        record = sidecar.replica.route("chat")
        assert record is not None and (record.blob, record.version) == (b"table 2", 2)
        assert sidecar.replica.route("other") is None and not len(sidecar.replica.ring)


def test_a_table_that_the_server_lost_is_restored() -> None:
    network = Network(2)
    call = route(1, b"table")
    (reply,) = at_once(network.store.call([call]))
    network.sidecars[0].replica.replied(Job(call), reply, network.now)
    network.turn()
    network.loses_all()
    for sidecar in network.sidecars:
        sidecar.disconnect()
    network.turn()
    third = Sidecar("pod-3", network, network.policy, 3)
    third.turn()
    found = third.replica.route("chat")
    assert found is not None and replace(found, n=0) == replace(decode(reply.record), n=0)
