"""Who is served in time under overload: 20 tenants, three classes, one tenant that floods, on virtual time.

    python -m bench.qos                      all: 7 loads, 9 policies, 3 seeds, T26; minutes of one core
    python -m bench.qos --quick              two loads, one seed, shorter; seconds
    python -m bench.qos --json               every run as an object, instead of the tables
    python -m bench.qos --docs docs          keep it: qos.json, and the tables in qos.md
    python -m bench.qos --policies product --loads 2 --seed 1 --seeds 3     a look, on seeds for tuning

What is missed of the aims is told at the end.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

import msgspec

from bench.qos import report
from bench.qos.hunt import CASES, Hunted, hunt
from bench.qos.rows import EVALUATION, LOADS, POLICIES, SECONDS, SEEDS, Row, play_all, tasks

QUICK_LOADS, QUICK_SECONDS = (1.0, 2.0), 120.0
HUNTS = 3
"""Seeds of T26: each is an hour and a half of simulated time."""


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    quick = args.quick
    loads = args.loads or (QUICK_LOADS if quick else LOADS)
    seeds = range(args.seed, args.seed + (args.seeds or (1 if quick else SEEDS)))
    seconds = args.seconds or (QUICK_SECONDS if quick else SECONDS)
    planned = tasks(args.policies or [*POLICIES], loads, seeds, seconds, floods_apart=not quick)
    begun = told = monotonic()
    rows: list[Row] = []
    for count, row in enumerate(play_all(planned, args.jobs), 1):
        rows.append(row)
        now = monotonic()
        if now - told >= 5 or count == len(planned):
            told = now
            print(f"{count} of {len(planned)} runs, {now - begun:.0f} s", file=sys.stderr, flush=True)
    hunted: list[Hunted] = []
    if not args.policies:
        for seed in seeds[: 1 if quick else HUNTS]:
            hunted += [hunt(case, seed) for case in CASES]
            print(f"T26, seed {seed}: {monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    figures = b"[\n" + b",\n".join(map(msgspec.json.encode, report.figures(rows, hunted))) + b"\n]"
    print(figures.decode() if args.json else report.text(rows, hunted))
    if args.docs:
        report.write(rows, hunted, args.docs / "qos.md")
        (args.docs / "qos.json").write_bytes(figures + b"\n")
    for each in report.broken(rows, hunted):
        print(f"missed: {each}", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    def names(said: str) -> list[str]:
        found = [each.strip() for each in said.split(";") if each.strip()]
        if unknown := [each for each in found if each not in POLICIES]:
            raise argparse.ArgumentTypeError(f"unknown: {'; '.join(unknown)}; there are {'; '.join(POLICIES)}")
        return found

    def numbers(said: str) -> tuple[float, ...]:
        return tuple(float(each) for each in said.split(","))

    parser = argparse.ArgumentParser(
        prog="python -m bench.qos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--policies", type=names, metavar="A;B", help=f"of {'; '.join(POLICIES)}; without T26")
    add("--loads", type=numbers, metavar="X,Y", help="times what fills every slot; default 0.5 to 3")
    add("--seed", type=int, default=EVALUATION, help=f"the first; {EVALUATION} and up are for evaluation")
    add("--seeds", type=int, default=0, help=f"how many; default {SEEDS}")
    add("--seconds", type=float, default=0.0, help=f"that are counted of each run; default {SECONDS:.0f}")
    add("--jobs", type=int, default=1)
    add("--json", action="store_true", help="every run as an object")
    add("--quick", action="store_true", help="two loads, one seed, two minutes each")
    add("--docs", type=Path, metavar="DIR", help="keep it: qos.json, and the tables in qos.md")
    return parser


if __name__ == "__main__":
    sys.exit(main())
