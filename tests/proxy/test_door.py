"""Turns at a service's gate: in rounds, never a call within a call, and nobody is forgotten."""

import pytest

from sidecar.core.gate.admit import Ticket, TurnedAway
from sidecar.kernel.errors import Reason
from sidecar.policy.schema import Admission, QosPolicy, Seconds
from sidecar.proxy.door import LEAST_S, ROUND, Door, Doors
from tests.proxy.bench import Bench, chat, service
from tests.proxy.fakes import FakeClient, FakeLink
from tests.under_test import DONE, FINISH, ROLE, token

TEXT = QosPolicy(name="default", latency_sla_ms=5000, max_wait_s=Seconds(10))
ONE = Admission(limit="fixed", concurrency=1, queue=5000)


def bench() -> Bench:
    return Bench(service(1, admission=ONE), qos_policies=(TEXT,))


def serves(link: FakeLink) -> None:
    link.heads().says(ROLE + token(0)).says(FINISH + DONE).ends()


class Guest:
    """Keeps what it hears; may do something when its turn comes."""

    def __init__(self, on_turn: object = None) -> None:
        self.turns = 0
        self.away: list[Reason] = []
        self.on_turn = on_turn

    def turn_came(self) -> None:
        self.turns += 1
        if callable(self.on_turn):
            self.on_turn()

    def turned_away(self, away: TurnedAway) -> None:
        self.away.append(away.reason)


def ticket(at: Bench, guest: Guest) -> Ticket:
    return Ticket(guest, at.fleet.classes.default, "t", "m", 10, at.clock.now, True)


def door_of(at: Bench) -> Door:
    gate = at.state.gate
    assert gate is not None
    return at.pipeline.doors.door(at.state, gate)


def test_a_thousand_who_are_over_at_once_are_served_in_rounds_and_not_one_in_another() -> None:
    at = bench()
    at.begin(chat())
    clients = [at.begin(chat()) for _ in range(1000)]
    at.connector.on_open = serves
    first = at.connector.links[0]
    serves(first)  # each that gets its turn is over before the call returns
    served = sum(client.ended for client in clients)
    assert ROUND - 2 <= served <= ROUND
    rounds = 0
    while not all(client.ended for client in clients) and rounds < 100:
        at.clock.advance(LEAST_S)
        rounds += 1
    assert rounds <= 1000 // (ROUND - 2) + 2 and not at.crashes and not at.held()


def test_a_guest_that_crashes_takes_no_other_s_turn() -> None:
    at = bench()
    held = at.begin(chat())

    def crash() -> None:
        raise ValueError("a fault")

    door = door_of(at)
    bad, good = Guest(crash), Guest()
    tickets = [ticket(at, bad), ticket(at, good)]
    assert [door.enter(each, at.clock.now) for each in tickets] == [False, False]
    serves(at.link)
    assert held.ended and bad.turns == 1 and [str(crash) for crash in at.crashes] == ["a fault"]
    door.left(tickets[0], 0, at.clock.now)
    at.clock.advance(0.1)
    assert good.turns == 1
    door.left(tickets[1], 0, at.clock.now)
    assert not at.held()


def test_who_waits_too_long_is_told_by_the_clock_alone() -> None:
    at = bench()
    at.begin(chat())
    guest = Guest()
    waits = ticket(at, guest)
    assert door_of(at).enter(waits, at.clock.now) is False
    at.clock.advance(9.9)
    assert not guest.away
    at.clock.advance(0.2)
    assert guest.away == [Reason.QUEUE_TIMEOUT] and guest.turns == 0
    door_of(at).left(waits, 0, at.clock.now)
    serves(at.link)
    assert not at.held()


@pytest.mark.parametrize("how", ["off", "gone"])
def test_a_door_that_is_no_more_lets_all_through(how: str) -> None:
    at = bench()
    at.begin(chat())
    guests = [Guest() for _ in range(3)]
    for guest in guests:
        assert door_of(at).enter(ticket(at, guest), at.clock.now) is False
    doors: Doors = at.pipeline.doors
    if how == "off":
        at.apply(service(1, admission=Admission(mode="off")))
    else:
        doors.policy_changed({})
    assert [guest.turns for guest in guests] == [1, 1, 1]
    serves(at.link)


def test_nothing_is_armed_while_nobody_waits() -> None:
    at = bench()
    client = FakeClient()
    at.begin(chat(), client)
    armed = len(at.clock.armed)
    serves(at.link)
    assert client.ended and len(at.clock.armed) <= armed and not at.held()
