"""Simulated rollouts of good and bad canaries, through `core.canary` and `core.rollout`.

    python -m bench.rollouts                                 all: 1,000 of each in the ordinary world, 100 elsewhere
    python -m bench.rollouts --scenarios same,slow2x -n 50   a look; --seed 1: on seeds for tuning
    python -m bench.rollouts --from DIR --docs docs          keep what was run: canary.json, and the tables in canary.md
    python -m bench.rollouts --small                         the gate: seconds, 1 if it finds something wrong

Rows are written to DIR/rows.jsonl as they come; --resume plays only what is missing. Under any interpreter that has the
sidecar: compiled, it takes half as long.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

import msgspec

from bench.rollouts import report, rows
from bench.rollouts.play import Played
from bench.rollouts.scenarios import SCENARIOS

OUT = Path(__file__).parents[2] / "build" / "rollouts"
SMALL = ("same", "slow2x", "errors5")
ORDINARY, ELSEWHERE, SMALL_NUMBER = 1000, 100, 10


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    out: Path = args.read or args.out
    path = out / "rows.jsonl"
    if args.read:
        found = rows.read(path)
    else:
        names = SMALL if args.small else args.scenarios
        usual = {name: ELSEWHERE if "/" in name else ORDINARY for name in names}
        many = (
            dict.fromkeys(names, SMALL_NUMBER) if args.small else {name: args.number or usual[name] for name in names}
        )
        # All kinds at once: what was played when somebody stops it is a smaller table, and no part of one.
        tasks = [(name, args.seed + n) for n in range(max(many.values())) for name in names if n < many[name]]
        found = _run(tasks, args.jobs, None if args.small else path, resume=args.resume)
    print(report.text(found))
    if args.small:
        wrong = report.broken(found)
        for why in wrong:
            print(f"rollouts: {why}", file=sys.stderr)
        return 1 if wrong else 0
    if args.docs:
        report.write(found, args.docs / "canary.md")
        told = msgspec.json.format(msgspec.json.encode(report.summary(found)), indent=1)
        (args.docs / "canary.json").write_bytes(told + b"\n")
    return 0


def _run(tasks: list[tuple[str, int]], jobs: int, path: Path | None, *, resume: bool) -> list[Played]:
    found: list[Played] = []
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        found = rows.read(path) if resume else []
        path.write_bytes(b"".join(map(rows.line, found)))
    there = {(row.scenario, row.seed) for row in found}
    tasks = [task for task in tasks if task not in there]
    begun = told = monotonic()
    for count, row in enumerate(rows.play_all(tasks, jobs), 1):
        found.append(row)
        if path is not None:
            with path.open("ab") as file:
                file.write(rows.line(row))
        now = monotonic()
        if now - told >= 10 or count == len(tasks):
            told = now
            print(f"{count} of {len(tasks)} rollouts, {now - begun:.0f} s", file=sys.stderr, flush=True)
    return found


def _parser() -> argparse.ArgumentParser:
    def names(said: str) -> list[str]:
        found = [each for each in said.split(",") if each]
        if unknown := [each for each in found if each not in SCENARIOS]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
        return found

    parser = argparse.ArgumentParser(
        prog="python -m bench.rollouts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--scenarios", type=names, default=[*SCENARIOS], help=f"of {', '.join(SCENARIOS)}")
    add("-n", "--number", type=int, default=0, help=f"of each; {ORDINARY}, and {ELSEWHERE} where the world is another")
    add("--seed", type=int, default=rows.EVALUATION, help=f"the first; {rows.EVALUATION} and up are for evaluation")
    add("--jobs", type=int, default=2)
    add("--out", type=Path, default=OUT, metavar="DIR", help="default build/rollouts")
    add("--from", type=Path, dest="read", metavar="DIR", help="report on the rows there")
    add("--docs", type=Path, metavar="DIR", help="keep it: canary.json, and the tables in canary.md")
    add("--resume", action="store_true", help="keep the rows that are there")
    add("--small", action="store_true", help="ten of three kinds; exits 1 if something is wrong")
    return parser


if __name__ == "__main__":
    sys.exit(main())
