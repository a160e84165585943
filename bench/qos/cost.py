"""What the gate costs a request: entering and leaving, with room and behind a queue, with few tenants and with many.

    python -m bench.qos.cost             microseconds of CPU, best of several runs; the same for the compiled package

The free path is what every request pays where a service has a gate. The queued one is a request that waits: it enters,
somebody leaves, and one of those that wait gets its turn. Each tenant has one request waiting, so that the heaps are as
large as they get. Figures: docs/qos.md#cost (4.6 us with room, plain Python, 4.8 with 10,000 tenants).
"""

import argparse
import time
from typing import Literal

from sidecar.core.classes import Classes
from sidecar.core.fleet import Fleet
from sidecar.core.gate.admit import Gate, Ticket
from sidecar.core.service import ServiceState
from sidecar.policy.schema import Admission, Endpoint, QosPolicy, Service, Snapshot

AIM_US = 5.0
TENANTS = (10, 10_000)
Fairness = Literal["class", "service"]
REQUESTS = 5_000
RUNS = 20

CLASSES = Classes(
    (
        QosPolicy(name="voice", latency_sla_ms=200, priority=9),
        QosPolicy(name="text", latency_sla_ms=2000, priority=5),
        QosPolicy(name="batch", latency_sla_ms=60_000, priority=3, preemptible=True),
    )
)


def service(limit: float) -> ServiceState:
    """Three endpoints that take so many at once."""
    endpoints = tuple(Endpoint(url=f"http://h{number}:80") for number in range(3))
    fleet = Fleet(lambda: 0.5)
    fleet.apply(Snapshot(version=1, services=(Service(name="chat", endpoints=endpoints),)), 0.0)
    (found,) = fleet.services.values()
    for node in found.nodes.values():
        node.limit = limit
    return found


def free_us(tenants: int, qos: str, fairness: Fairness = "service") -> float:
    """Microseconds to enter and to leave where there is room."""
    among = service(64)
    gate = Gate(Admission(fairness=fairness), CLASSES, 0.0)
    names = [f"tenant-{number}" for number in range(tenants)]
    of = CLASSES.by_name[qos]
    best = float("inf")
    for _ in range(RUNS):
        began = time.process_time()
        now = 0.0
        for number in range(REQUESTS):
            now += 0.001
            ticket = Ticket(None, of, names[number % tenants], "demo", 400, now)
            if gate.enter(ticket, among.pool("demo", None), now) is not True:
                raise AssertionError("it had to wait")
            gate.leave(ticket, 350, now + 0.5)
        best = min(best, (time.process_time() - began) / REQUESTS)
    return best * 1e6


def queued_us(tenants: int, qos: str, fairness: Fairness = "service") -> float:
    """Microseconds for a request that waits: to enter, to get its turn and to leave."""
    among = service(1)
    gate = Gate(Admission(queue=100_000, fairness=fairness), CLASSES, 0.0)
    of = CLASSES.by_name[qos]
    nodes = list(among.nodes.values())
    running: list[Ticket] = []
    for node in nodes:
        running.append(Ticket(None, of, "first", "demo", 400, 0.0))
        gate.enter(running[-1], among.pool("demo", None), 0.0)
        node.in_flight = 1
    names = [f"tenant-{number}" for number in range(tenants)]
    for name in names:
        gate.enter(Ticket(None, of, name, "demo", 400, 0.0), among.pool("demo", None), 0.0)
    best = float("inf")
    for _ in range(RUNS):
        began = time.process_time()
        now = 0.0
        for number in range(REQUESTS):
            now += 1e-7
            ticket = Ticket(None, of, names[number % tenants], "demo", 400, now)
            gate.enter(ticket, among.pool("demo", None), now)
            nodes[number % 3].in_flight -= 1
            gate.leave(running[number % 3], 350, now)
            following = gate.take(among.pool, now)
            if following is None:
                raise AssertionError("nobody got the turn")
            nodes[number % 3].in_flight += 1
            running[number % 3] = following
        best = min(best, (time.process_time() - began) / REQUESTS)
    return best * 1e6


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "").parse_args()
    print(f"{'us per request':<24}{'tenants':>9}{'voice':>9}{'batch':>9}{'batch, by class':>20}")
    for title, measure in (("with room", free_us), ("behind a queue", queued_us)):
        for tenants in TENANTS:
            voice, batch, by_class = (
                measure(tenants, "voice"),
                measure(tenants, "batch"),
                measure(tenants, "batch", "class"),
            )
            print(f"{title:<24}{tenants:>9}{voice:>9.2f}{batch:>9.2f}{by_class:>20.2f}")


if __name__ == "__main__":
    main()
