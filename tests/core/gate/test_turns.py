"""Who is next within a class: queues, counters and the heaps that find them."""

import random
from collections import deque

import pytest

from sidecar.core.classes import Classes
from sidecar.core.gate.turns import SLACK, Group, Lane, Share, Standing, Ticket
from sidecar.core.pool import Pool
from sidecar.policy.schema import QosPolicy
from tests.core.build import fleet_of, service_of


def pool() -> Pool:
    _, service = fleet_of(service_of(1))
    return service.pool("", None)


def group() -> Group:
    classes = Classes((QosPolicy(name="text", latency_sla_ms=1000),))
    among = pool()
    lane = Lane((None, (), among.kinds), among, [Standing(qos) for qos in classes.all], 0.0)
    return lane.groups[0]


def share(of: Group, tenant: str, weight: float = 1.0) -> Share:
    return of.shares.setdefault(tenant, Share(tenant, weight, of))


def waiting(of: Group, tenant: str, tokens: int = 100, weight: float = 1.0) -> Ticket:
    ticket = Ticket(None, of.qos, tenant, "m", tokens, 0.0)
    of.push(ticket, share(of, tenant, weight))
    return ticket


def turn(of: Group) -> Ticket:
    first = of.first()
    ticket = first.head
    assert ticket is not None
    of.charge(first, ticket.tokens)
    of.remove(ticket, first)
    return ticket


def test_the_least_served_is_next_and_who_came_first_among_equals() -> None:
    of = group()
    come = [waiting(of, "a", 300), waiting(of, "b", 100), waiting(of, "a", 300), waiting(of, "b", 100)]
    come.append(waiting(of, "b", 100))
    assert [turn(of) for _ in come] == [come[0], come[1], come[3], come[4], come[2]]


def test_a_refund_brings_a_tenant_forward_at_once_and_more_use_back() -> None:
    of = group()
    for _ in range(3):
        waiting(of, "a", 1000)
        waiting(of, "b", 100)
    first = turn(of)
    assert first.tenant == "a"
    of.settle(share(of, "a"), -1000)
    assert of.first().tenant == "b" and turn(of).tenant == "b"
    assert of.first().tenant == "a"
    of.settle(share(of, "a"), 5000)
    assert of.first().tenant == "b"


def test_the_longest_is_counted_by_weight_and_falls_back_as_it_is_served() -> None:
    of = group()
    for _ in range(4):
        waiting(of, "heavy", weight=4.0)
    for _ in range(2):
        waiting(of, "light")
    assert of.longest().tenant == "light"
    last = share(of, "light").tail
    assert last is not None
    of.remove(last, share(of, "light"))
    assert of.longest().tenant == "light"  # as long, and came later
    of.remove(*first_of(of, "light"))
    assert of.longest().tenant == "heavy"


def first_of(of: Group, tenant: str) -> tuple[Ticket, Share]:
    found = share(of, tenant)
    assert found.head is not None
    return found.head, found


@pytest.mark.parametrize("seed", range(5))
def test_queues_hold_who_waits_in_order_whoever_leaves(seed: int) -> None:
    draw, of = random.Random(seed), group()
    queues: dict[str, deque[Ticket]] = {tenant: deque() for tenant in "abc"}
    line: list[Ticket] = []
    for _ in range(2000):
        tenant = draw.choice("abc")
        if draw.random() < 0.5:
            ticket = waiting(of, tenant, draw.randrange(1, 500))
            queues[tenant].append(ticket)
            line.append(ticket)
        elif line and draw.random() < 0.5:
            ticket = draw.choice(line)
            of.remove(ticket, share(of, ticket.tenant))
            queues[ticket.tenant].remove(ticket)
            line.remove(ticket)
        elif line:
            ticket = turn(of)
            assert ticket is queues[ticket.tenant].popleft()
            line.remove(ticket)
        found, ahead = of.head, []
        while found is not None:
            ahead.append(found)
            found = found.behind
        assert ahead == line and of.queued == of.lane.queued == of.standing.queued == len(line)
        assert of.waiting == sum(bool(queue) for queue in queues.values())
        if line:
            counters = {tenant: of.shares[tenant].counter for tenant in queues if queues[tenant]}
            assert of.first().counter == min(counters.values())
            assert of.longest().queued == max(map(len, queues.values()))


def test_entries_that_are_out_of_date_do_not_pile_up() -> None:
    of = group()
    kept = waiting(of, "kept")
    for number in range(5000):
        ticket = waiting(of, f"t{number % 50}", 10)
        of.remove(ticket, share(of, ticket.tenant))
        of.settle(share(of, "kept"), -1)
    assert len(of._next) <= 2 * of.waiting + SLACK + 1
    assert len(of._longest) <= 2 * of.waiting + SLACK + 1
    assert of.first().head is kept


def test_a_pace_is_what_leaves_while_somebody_waits() -> None:
    of = group()
    lane, now = of.lane, 0.0
    assert lane.pace == 0.0
    lane.fills(now)
    for _ in range(50):
        now += 0.1
        lane.left(now)
    assert lane.pace == pytest.approx(10.0, rel=0.15)
    now += 3600.0
    lane.fills(now)
    for _ in range(50):
        now += 0.1
        lane.left(now)
    assert lane.pace == pytest.approx(10.0, rel=0.15)
