"""Whether a request costs more where there is more: endpoints, sessions, services; in good times and in bad.

    python -m bench.growth                         every case, a table; exit 1 if a bound is exceeded
    python -m bench.growth --cases open,all-open   those only; --list tells them
    python -m bench.growth --json                  the figures as JSON
    python -m bench.growth --profile all-full      where a request's time goes at the largest size

How it measures, and why:

1. CPU per request in process, without sockets (`bench.growth_cases`): the kernel's share does not grow with a policy,
   and would hide what does.
2. Each size has a process of its own, set up as in service, so that one size's heap costs no other one collector time
   or cache. They take turns within a round, in rotating order: A B C, B C A, ...
3. The figure is the median over rounds of the *ratio to the smallest size within the round*: a noisy minute hits all.
4. A bound is 1.5 for everything: a request may be a little dearer where its fleet no longer fits the caches (100,000
   sessions are 40 MB), but anything that is looked at one by one is many times dearer at 10,000.
5. A page or a reload may take as long as its size makes it, but not at a stretch: no single step of the loop may be
   longer than STEP_MS, or every stream stands still for it. Medians over rounds.
"""

import argparse
import cProfile
import json
import os
import platform
import pstats
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection

import uvloop

from bench.growth_cases import CASE_OF, CASES, Arm, Case
from bench.growth_steps import STEPS, longest_ms

SAMPLE_S = 0.04  # CPU per sample: long against the clock's and the scheduler's grain, short against a noisy minute
FEWEST, MOST = 10, 1000  # requests per sample
STEP_MS = 20.0
"""Deadlines are seen up to 20 ms late as it is (the watchdog's SLOT_S): a stall of that length breaks no promise."""
PATIENCE_S = 120.0


@dataclass
class Growth:
    """One case: CPU per request by size, us (median, least, most), and the largest's ratio to the smallest."""

    case: str
    what: str
    us: dict[int, tuple[float, float, float]]
    ratio: tuple[float, float, float]
    bound: float
    ok: bool


@dataclass
class Stall:
    """The longest step of the loop that one page or reload takes, ms (median, least, most)."""

    step: str
    size: int
    ms: tuple[float, float, float]
    bound_ms: float | None
    ok: bool


@dataclass
class Report:
    """Everything that was measured."""

    rounds: int
    cores: int = field(default_factory=lambda: os.cpu_count() or 0)
    python: str = field(default_factory=platform.python_version)
    load_before: float = field(default_factory=lambda: os.getloadavg()[0])
    growth: list[Growth] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)


class Child:
    """A process with one case at one size."""

    def __init__(self, case: Case, size: int) -> None:
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(case.name, size, theirs), daemon=True)
        self._name = f"{case.name} at {size:,}"
        self._process.start()
        theirs.close()

    def sample(self, count: int) -> float:
        """CPU per request over `count` of them, us."""
        self._connection.send(count)
        if not self._connection.poll(PATIENCE_S):
            raise SystemExit(f"{self._name}: {count} requests took more than {PATIENCE_S:g} s")
        try:
            us: float = self._connection.recv()
        except EOFError:
            raise SystemExit(f"{self._name}: its process died, see above") from None
        return us

    def close(self) -> None:
        self._connection.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(name: str, size: int, connection: Connection) -> None:
    async def serve() -> None:
        arm = Arm(name, size)
        while True:
            try:
                count = connection.recv()
            except EOFError:
                return
            connection.send(arm.sample(count))

    uvloop.run(serve())


def grow(case: Case, rounds: int, say: Callable[[str], None]) -> Growth:
    """Measure one case at all its sizes."""
    children: dict[int, Child] = {}
    try:
        for size in case.sizes:
            children[size] = Child(case, size)
        counts = {}
        for size, child in children.items():
            child.sample(FEWEST)
            us = min(child.sample(FEWEST) for _ in range(3))
            counts[size] = max(FEWEST, min(MOST, int(SAMPLE_S * 1e6 / us)))
            child.sample(counts[size])
        found: dict[int, list[float]] = {size: [] for size in case.sizes}
        for round_ in range(rounds):
            turn = round_ % len(case.sizes)
            for size in case.sizes[turn:] + case.sizes[:turn]:
                found[size].append(children[size].sample(counts[size]))
    finally:
        for child in children.values():
            child.close()
    ratio = _spread([most / least for least, most in zip(found[case.sizes[0]], found[case.sizes[-1]], strict=True)])
    result = Growth(
        case=case.name,
        what=case.what,
        us={size: _spread(us) for size, us in found.items()},
        ratio=ratio,
        bound=case.bound,
        ok=ratio[0] <= case.bound,
    )
    say(line(result))
    return result


def stalls(rounds: int, say: Callable[[str], None]) -> list[Stall]:
    """Measure the longest step of every page and of a reload."""
    found = []
    for step in STEPS:
        ms = _spread(longest_ms(step, max(3, rounds // 3)))
        bound = STEP_MS if step.bounded else None
        found.append(Stall(step.name, step.size, ms, bound, bound is None or ms[0] <= bound))
        say(stall_line(found[-1]))
    return found


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return statistics.median(values), min(values), max(values)


def line(found: Growth) -> str:
    costs = "  ".join(f"{size:>7,}: {us[0]:8.1f} us" for size, us in found.us.items())
    median, least, most = found.ratio
    verdict = "ok" if found.ok else "GROWS"
    return f"{found.case:<21} {costs}   x{median:<6.2f} ({least:.2f}-{most:.2f})  <= {found.bound:g}  {verdict}"


def stall_line(found: Stall) -> str:
    median, least, most = found.ms
    bound = "no bound" if found.bound_ms is None else f"<= {found.bound_ms:g} ms"
    verdict = "ok" if found.ok else "TOO LONG"
    return f"{found.step:<40} {found.size:>7,}: {median:8.1f} ms ({least:.1f}-{most:.1f})  {bound}  {verdict}"


def table(report: Report) -> str:
    lines = ["CPU per request by size, and the largest's ratio to the smallest (median of rounds, least-most)", ""]
    lines += [line(found) for found in report.growth]
    if report.stalls:
        lines += ["", "The longest step of the event loop (median, least-most)", ""]
        lines += [stall_line(found) for found in report.stalls]
    lines += ["", f"{report.rounds} rounds, {report.cores} cores, load before {report.load_before:.2f}"]
    return "\n".join(lines)


def profile(case: Case) -> None:
    """Where a request's time goes, at the largest size."""

    async def run() -> None:
        arm = Arm(case.name, case.sizes[-1])
        arm.sample(FEWEST)
        profiler = cProfile.Profile()
        profiler.runcall(arm.sample, 200)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(20)

    uvloop.run(run())


def _cases(names: str) -> list[Case]:
    unknown = [name for name in names.split(",") if name not in CASE_OF]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; there are {', '.join(CASE_OF)}")
    return [CASE_OF[name] for name in names.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.growth", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=_cases, default=None, metavar="NAME,NAME", help="only these; no pages")
    parser.add_argument("--rounds", type=int, default=15, help="samples per size (default: 15)")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    parser.add_argument("--list", action="store_true", help="tell the cases and end")
    parser.add_argument("--profile", type=lambda name: _cases(name)[0], metavar="NAME", help="profile one case and end")
    args = parser.parse_args(argv)
    if args.list:
        for case in CASES:
            print(f"{case.name:<21} {'/'.join(f'{size:,}' for size in case.sizes):<18} {case.what}")
        return 0
    if args.profile:
        profile(args.profile)
        return 0
    if args.rounds < 1:
        parser.error("--rounds: at least 1")
    report = Report(args.rounds)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    report.growth = [grow(case, args.rounds, say) for case in args.cases or CASES]
    if args.cases is None:
        report.stalls = stalls(args.rounds, say)
    print(json.dumps(asdict(report), indent=2) if args.json else table(report))
    within = all(found.ok for found in report.growth) and all(found.ok for found in report.stalls)
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
