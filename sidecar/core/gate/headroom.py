"""What is left free for the others while a tenant floods.

A flood that goes behind all others (`parts`) still runs in whatever is free, and what it runs holds its slots for
seconds: when more of the others come, a voice among them has none to wait for. So a flood gets no turn while fewer
slots are free than the square root of how many requests run there of those who keep to their part. That is how much a
number of requests that come and go by chance varies, one standard deviation of a Poisson count (the square-root
staffing of Halfin and Whitt, 1981): beside 4 of them it is 2 slots, beside 160 13. Where none of them runs nothing is
kept, and nobody is held back but a tenant that floods.
"""

from math import ceil, inf, sqrt

from sidecar.core.gate.turns import Lane
from sidecar.core.pool import LOOKS


def is_kept(lane: Lane) -> bool:
    """Whether what is free there is for those who keep to their part. Of very many endpoints some are looked at."""
    nodes = lane.pool.ready.nodes
    count = len(nodes)
    if not lane.within or not count:
        return False
    looks = min(count, LOOKS)
    wanted = sqrt(float(lane.within)) * looks / count
    free = 0.0
    for place in range(looks):
        node = nodes[place]
        if node.in_flight < node.limit:
            if node.limit == inf:
                return False
            free += ceil(node.limit - node.in_flight)  # of a limit of 1.2 the second runs, too
            if free >= wanted:
                return False
    return True
