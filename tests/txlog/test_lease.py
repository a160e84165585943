"""Leases: prolonged while they are used, given back when nobody uses them, void when the register moves."""

from sidecar.core.breaker import Agreed, Breaker, Permit, Scope, State
from sidecar.kernel.outcome import Result
from sidecar.policy.schema import NodeBreaker
from sidecar.txlog.lease import IDLE_S, KEEP_S, RENEW_S, Lease, Leases

KEY = "node:chat/h1:80"
LEASE_S = 60.0


class Nobody:
    """A lender that is asked for nothing."""

    def wants(self, breaker: Breaker) -> None:
        pass

    def ended(self, breaker: Breaker, seq: int, result: Result, why: str) -> None:
        pass


def half_open() -> Breaker:
    breaker = Breaker(Scope.NODE, "h1:80", "chat", NodeBreaker(probes=4), 0.0, lease_s=LEASE_S)
    breaker.adopt(Agreed(State.HALF_OPEN, 7, 2, 0.0, 0.0, "waited", "", "", "pod-2"), Nobody(), 0.0)
    return breaker


def lent(leases: Leases, breaker: Breaker, seq: int = 1, now: float = 0.0, version: int = 2) -> Lease:
    assert breaker.lend(seq)
    lease = Lease(breaker, 7, version, seq, now)
    leases.add(KEY, lease)
    return lease


def used(breaker: Breaker, now: float) -> Permit:
    permit = breaker.acquire(now)
    assert isinstance(permit, Permit) and permit.probe
    return permit


def test_one_that_a_request_uses_is_prolonged_until_no_probe_may_take_so_long() -> None:
    leases, breaker = Leases(), half_open()
    lease = lent(leases, breaker)
    used(breaker, 0.5)
    assert leases.due(1.0) == ([], []) and lease.used_at == 1.0
    assert leases.due(RENEW_S) == ([(KEY, lease)], [])
    assert leases.due(RENEW_S + 0.1) == ([], []), "prolonged a moment ago"
    assert leases.due(2 * RENEW_S) == ([(KEY, lease)], [])
    assert leases.due(1.0 + LEASE_S) == ([], []) and leases.held(KEY) == []


def test_one_in_hand_that_others_want_is_given_back_soon_and_else_kept() -> None:
    leases, breaker = Leases(), half_open()
    lease = lent(leases, breaker)
    leases.want(KEY, 0.0)
    release = leases.due(IDLE_S)[1]
    assert not release
    lease.contended = True
    assert leases.due(IDLE_S + 0.1)[1] == [(KEY, lease)]
    assert leases.held(KEY) == [] and not breaker.holds(1)
    assert not leases.wanted(KEY, IDLE_S + 0.1), "others first"


def test_one_that_nobody_wants_is_given_back_late() -> None:
    leases, breaker = Leases(), half_open()
    lease = lent(leases, breaker)
    assert leases.due(KEEP_S - 0.1)[1] == []
    assert leases.due(KEEP_S)[1] == [(KEY, lease)]


def test_one_that_is_wanted_is_kept_however_long() -> None:
    leases, breaker = Leases(), half_open()
    lease = lent(leases, breaker)
    for second in range(0, 200, 10):
        leases.want(KEY, float(second))
        assert leases.due(float(second))[1] == []
    assert leases.held(KEY) == [lease] and leases.keys() == [KEY]


def test_a_register_that_moved_makes_its_leases_void() -> None:
    leases, breaker = Leases(), half_open()
    lent(leases, breaker)
    leases.want(KEY, 0.0)
    leases.moved(KEY, 7, 2, False)
    assert len(leases.held(KEY)) == 1, "it is still that version"
    leases.moved(KEY, 7, 3, False)
    assert leases.held(KEY) == [] and leases.wanted(KEY, 1.0)
    leases.moved(KEY, 7, 4, True)
    assert not leases.wanted(KEY, 1.0), "of a closed one nobody wants any"


def test_a_lease_of_a_later_version_replaces_all_earlier() -> None:
    leases, breaker = Leases(), half_open()
    first, second = lent(leases, breaker, 1), lent(leases, breaker, 2)
    assert leases.held(KEY) == [first, second]
    third = lent(leases, breaker, 1, version=3)
    assert leases.held(KEY) == [third]


def test_what_ended_is_taken_out_once() -> None:
    leases, breaker = Leases(), half_open()
    lease = lent(leases, breaker)
    assert leases.remove(KEY, 9) is None
    assert leases.remove(KEY, 1) is lease
    assert leases.remove(KEY, 1) is None and leases.keys() == []


def test_those_in_hand_are_known_for_the_end() -> None:
    leases, breaker = Leases(), half_open()
    first, second = lent(leases, breaker, 1), lent(leases, breaker, 2)
    used(breaker, 0.0)
    unused = [lease for _, lease in leases.unused()]
    assert len(unused) == 1 and unused[0] in (first, second) and breaker.holds(unused[0].seq)
    leases.clear()
    assert leases.unused() == []


def test_a_wish_is_forgotten() -> None:
    leases = Leases()
    assert not leases.wanted(KEY, 0.0)
    leases.want(KEY, 0.0)
    assert leases.wanted(KEY, KEEP_S - 0.1) and not leases.wanted(KEY, KEEP_S)
    leases.due(KEEP_S)
    leases.void(KEY)
    assert leases.keys() == []
