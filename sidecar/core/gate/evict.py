"""Who of those that run has to make room for one that cannot wait, and who those are that cannot.

The lowest priority goes first, as whoever asks sees to; within a class it is the tenant that runs most, and of its
requests the newest: that has cost least, and a flood pays for the room itself. Whose tenant has used more than its part
of the service (`parts`) goes first of all, and has nobody evicted.
"""

from typing import Final

from sidecar.core.gate.turns import Group, Lane, Share, Standing, Ticket

CANDIDATES: Final = 256  # of the newest that run, those who are looked at when some have to go
PASSED: Final = 64  # of a flood's requests, those that are passed over to find who waits longest of the others


def oldest_of(group: Group, ticket: Ticket) -> Ticket | None:
    """Who has waited longest, from a ticket on, of those that do not go after all others; None: no one."""
    for _ in range(PASSED):
        share, following = ticket.share, ticket.behind
        if share is None or share.payer is None or not share.payer.behind:
            return ticket
        if following is None:
            return None
        ticket = following
    return None


def longest_of(group: Group) -> Ticket | None:
    """Who of a class has waited longest of those that do not go after all others; behind very many of a flood who of
    them is next. None: no one."""
    if group.head is None:
        return None
    oldest = oldest_of(group, group.head)
    return group.first().head if oldest is None and group.has_within() else oldest


def victims_of(standing: Standing, lane: Lane, wanted: int, only_behind: bool) -> list[Ticket]:
    """Who of a class is to make room: of the tenant that runs most, for its weight, the newest; up to so many.
    `only_behind`: of those that go after all others."""
    candidates: list[Ticket] = []
    for running in reversed(standing.evictable.values()):
        of = running.share
        if only_behind and (of is None or of.payer is None or not of.payer.behind):
            continue
        if runs_in(running, lane):
            candidates.append(running)
            if len(candidates) >= CANDIDATES:
                break
    victims: list[Ticket] = []
    told: dict[Share, int] = {}
    while candidates and len(victims) < wanted:
        found, most = 0, -1.0
        for place, running in enumerate(candidates):
            share = running.share
            if share is not None:
                runs = (share.running - told.get(share, 0)) / share.weight
                if runs > most:
                    found, most = place, runs
        victim = candidates.pop(found)
        victims.append(victim)
        share = victim.share
        if share is not None:
            told[share] = told.get(share, 0) + 1
    return victims


def runs_in(ticket: Ticket, lane: Lane) -> bool:
    """Whether it runs where it leaves room for those that wait in the lane."""
    node, share = ticket.node, ticket.share
    if node is not None:
        return lane.pool.has(node)
    return share is not None and share.group.lane is lane
