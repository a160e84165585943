"""What a session that is kept costs in memory, at 100,000 of them.

    python -m bench.sessions                    a table: bytes per session by RSS and by tracemalloc
    python -m bench.sessions --json             the same as JSON
    python -m bench.sessions --count 10000      another number of them

Each figure is a process of its own, which fills one service's table as requests would: a session is met, served, and
bound to an endpoint; one in trouble fails, too. Ids are as long as a UUID. RSS is what the operating system is asked
for, with the allocator's leftovers; tracemalloc is what Python's objects take. The table's bound is checked as well:
one session more must drive the oldest out, breaker and all.
"""

import argparse
import gc
import json
import os
import random
import resource
import sys
import tracemalloc
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from sidecar.core.balance import Choice, bind, pick
from sidecar.core.breaker import Permit
from sidecar.core.fleet import Fleet
from sidecar.core.service import ServiceState
from sidecar.kernel.ids import SessionId
from sidecar.kernel.outcome import Result
from sidecar.policy.load import single
from sidecar.policy.schema import Breakers, SessionBreaker, Snapshot

COUNT = 100_000
FAILURES = {"never failed": 0, "failed once": 1, "breaker open": SessionBreaker().consecutive}
METHODS = ("rss", "tracemalloc")
PATIENCE_S = 300.0


@dataclass
class Cost:
    """Bytes per kept session; `kept` of those met are still there after one more than the bound came."""

    sessions: str
    count: int
    kept: int
    breakers: int
    rss_bytes: float = 0.0
    tracemalloc_bytes: float = 0.0


def fill(count: int, failures: int) -> tuple[Fleet, ServiceState]:
    """A fleet whose service keeps `count` sessions, each of which had `failures` failures."""
    fleet, state = _fleet(count)
    for number in range(count):
        _meet(fleet, state, number, failures)
    return fleet, state


def _fleet(count: int) -> tuple[Fleet, ServiceState]:
    snapshot = single(["http://127.0.0.1:8000", "http://127.0.0.1:8001", "http://127.0.0.1:8002"])
    [service] = snapshot.services
    breakers = Breakers(session=msgspec.structs.replace(service.breakers.session, max_sessions=count))
    service = msgspec.structs.replace(service, breakers=breakers)
    fleet = Fleet(random.Random(1).random)
    fleet.apply(Snapshot(version=1, services=(service,)), 0.0)
    return fleet, next(iter(fleet.services.values()))


def _meet(fleet: Fleet, state: ServiceState, number: int, failures: int) -> None:
    now = number * 1e-4  # seconds; so slow that none is idle, so fast that none of their waits is over
    session = state.session(SessionId(f"{number:08x}-4b6e-4c1d-9d3e-5b1f0a2c7e88"), now)
    for attempt in range(max(1, failures)):
        permit = state.admit_session(session, now)
        choice = pick(state, session, None, "m", (), now, fleet.chance)
        if not isinstance(permit, Permit) or not isinstance(choice, Choice):
            raise RuntimeError(f"session {number} was refused at attempt {attempt + 1}: {permit}, {choice}")
        bind(session, choice, now)
        choice.node.breaker.record(choice.permit, Result.SUCCESS, now)
        state.record_session(session, permit, Result.FAILURE if failures else Result.SUCCESS, now, "context_length")


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _child(name: str, method: str, count: int, connection: Connection) -> None:
    failures = FAILURES[name]
    fill(200, failures)  # what is made once is made before
    gc.collect()
    if method == "tracemalloc":
        tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0] if method == "tracemalloc" else _rss_bytes()
    fleet, state = fill(count, failures)
    gc.collect()
    after = tracemalloc.get_traced_memory()[0] if method == "tracemalloc" else _rss_bytes()
    _meet(fleet, state, count, failures)
    kept = len(state.sessions)
    broken = sum(session.breaker is not None for session in state.sessions.values())
    connection.send(((after - before) / count, kept, broken))


def measure(name: str, count: int) -> Cost:
    """Both methods, each in a child."""
    context = get_context("spawn")
    found: dict[str, tuple[float, int, int]] = {}
    for method in METHODS:
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(name, method, count, theirs), daemon=True)
        process.start()
        theirs.close()
        try:
            if not mine.poll(PATIENCE_S):
                raise SystemExit(f"{name}, {method}: not done within {PATIENCE_S:g} s; try a smaller --count")
            found[method] = mine.recv()
        except EOFError:
            raise SystemExit(f"{name}, {method}: its process died, see above") from None
        finally:
            process.join(5)
            if process.is_alive():
                process.kill()
    rss, kept, broken = found["rss"]
    return Cost(name, count, kept, broken, rss, found["tracemalloc"][0])


def table(costs: Sequence[Cost]) -> str:
    lines = [f"{'sessions':<14} {'kept':>8} {'with breaker':>13} {'RSS':>9} {'tracemalloc':>12} {'RSS of all':>11}"]
    for cost in costs:
        lines.append(
            f"{cost.sessions:<14} {cost.kept:>8,} {cost.breakers:>13,} {cost.rss_bytes:>7.0f} B"
            f" {cost.tracemalloc_bytes:>10.0f} B {cost.rss_bytes * cost.kept / 1e6:>8.1f} MB"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.sessions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=COUNT, help=f"sessions kept (default: {COUNT})")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    args = parser.parse_args(argv)
    if not 1000 <= args.count <= 1_000_000:
        parser.error("--count: 1000 to 1000000; fewer are lost in the allocator's pages")
    costs = []
    for name in FAILURES:
        print(f"{args.count:,} sessions, {name} ...", file=sys.stderr, flush=True)
        costs.append(measure(name, args.count))
    print(
        json.dumps(
            {"python": sys.version.split()[0], "cores": os.cpu_count(), "sessions": [asdict(c) for c in costs]},
            indent=2,
        )
        if args.json
        else table(costs)
    )
    over = [cost.sessions for cost in costs if cost.kept != cost.count]
    if over:
        print(f"the bound on sessions does not hold: {', '.join(over)}", file=sys.stderr)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
