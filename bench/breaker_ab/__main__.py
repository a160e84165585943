"""The adaptive breaker beside the rules it has to beat: every arm sees the same requests with the same luck.

    python -m bench.breaker_ab                                        all arms, 13 + 2 scenarios, 5 seeds: half an hour
    python -m bench.breaker_ab --arms none,ours --scenarios step,gray --seeds 1-3      a look, on seeds for tuning
    python -m bench.breaker_ab --arms ours --set kappa=3 --set location_trip=15        the product with other numbers
    python -m bench.breaker_ab --rate 2 --pods 3 --sidecars 8 --out DIR --resume       more rows for the same report
    python -m bench.breaker_ab --from DIR                             the report of what was run, running nothing
    python -m bench.breaker_ab --from DIR --docs docs                 keep it: breaker.json, pictures, tables in .md
    python -m bench.breaker_ab --small                                the gate: under a minute, 1 if ours breaks it

Rows are written to DIR/rows.jsonl as they come (--resume keeps those that are there and runs only what is missing), the
report to DIR/report.md, pictures to DIR/breaker-*.png where matplotlib is installed (python -m bench.setup picture).
Under any interpreter that has the sidecar: `make compile && cd build/compiled && .venv/bin/python -m bench.breaker_ab`.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import yaml

from bench.breaker_ab import pictures, report, rows
from bench.breaker_ab.arms import ARMS, OURS, RULES
from bench.breaker_ab.rows import Row, Setting, Task
from bench.breaker_ab.scenarios import EVALUATION, SCENARIOS
from sidecar.simulate.profile import PROFILES

OUT = Path(__file__).parents[2] / "build" / "breaker_ab"
SMALL_SCENARIOS, SMALL_ARMS, SMALL_SEEDS = ("step", "errors", "surge"), ("none", "ours"), (101,)
GROUPS = {"rules": [arm.name for arm in RULES], "ours": ["ours"], "ablations": [arm.name for arm in OURS]}


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    out: Path = args.read or args.out
    path = out / "rows.jsonl"
    adaptive = _adaptive(parser, args.set)
    if args.small:
        args.arms, args.scenarios, args.seeds = SMALL_ARMS, SMALL_SCENARIOS, SMALL_SEEDS
    found: list[Row] = []
    if args.read:
        found = [*rows.read(path)]
    else:
        setting = Setting(args.profile, args.rate, args.pods, args.sidecars, args.pooled)
        todo = rows.tasks(args.arms, args.scenarios, args.seeds, setting)
        found = _run(todo, adaptive, args.jobs, None if args.small else path, resume=args.resume)
    if not found:
        parser.error(f"no rows in {path}")
    said = report.text(found)
    print(said)
    if args.small:
        broken = report.gate(found)
        for why in broken:
            print(f"breaker_ab: {why}", file=sys.stderr)
        return 1 if broken else 0
    (out / "report.md").write_text(said)
    if args.docs:
        report.write(found, args.docs / "breaker.md")
        (args.docs / "breaker.json").write_bytes(
            msgspec.json.format(msgspec.json.encode(report.summary(found)), indent=1) + b"\n"
        )
    if args.pictures:
        try:
            pictures.draw(found, args.docs or out, adaptive)
        except RuntimeError as exc:
            print(f"breaker_ab: no pictures: {exc}", file=sys.stderr)
    return 0


def _run(todo: list[Task], adaptive: dict[str, Any], jobs: int, path: Path | None, *, resume: bool) -> list[Row]:
    """Runs what is missing, and keeps each row as it comes."""
    found: list[Row] = []
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        found = [*rows.read(path)] if resume else []
        path.write_bytes(b"".join(rows.line(row) for row in found))
    there = {row.task for row in found}
    todo = [task for task in todo if task not in there]
    begun, told, count = monotonic(), 0.0, 0

    def done(row: Row) -> None:
        nonlocal told, count
        count += 1
        found.append(row)
        if path is not None:
            with path.open("ab") as file:
                file.write(rows.line(row))
        took = monotonic() - begun
        if took - told >= 5 or count == len(todo):
            told = took
            left = took / count * (len(todo) - count)
            print(f"{count} of {len(todo)} runs, {took:.0f} s, {left:.0f} s to go", file=sys.stderr, flush=True)

    rows.run_all(todo, adaptive, jobs, done)
    return found


def _adaptive(parser: argparse.ArgumentParser, pairs: Sequence[str]) -> dict[str, Any]:
    """key=value, the value as YAML."""
    made: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            parser.error(f"--set wants key=value, not {pair!r}")
        made[key] = yaml.safe_load(value)
    try:
        ARMS["ours"].service(made)
    except msgspec.ValidationError as exc:
        parser.error(f"--set: {exc}")
    return made


def _parser() -> argparse.ArgumentParser:
    def names(known: Sequence[str], groups: dict[str, list[str]]) -> Any:
        def read(said: str) -> list[str]:
            found = [name for each in said.split(",") if each for name in groups.get(each, [each])]
            if unknown := [name for name in found if name not in known]:
                raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
            return list(dict.fromkeys(found))

        return read

    def seeds(said: str) -> list[int]:
        found: list[int] = []
        for part in said.split(","):
            first, _, last = part.partition("-")
            found += range(int(first), int(last or first) + 1)
        return found

    parser = argparse.ArgumentParser(
        prog="python -m bench.breaker_ab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arms, scenarios = [*ARMS], [*SCENARIOS]
    add = parser.add_argument
    add("--arms", type=names(arms, GROUPS), default=arms, help=f"of {', '.join(arms)}, or {', '.join(GROUPS)}")
    add("--scenarios", type=names(scenarios, {}), default=scenarios, help=f"of {', '.join(scenarios)}")
    first = EVALUATION[0]
    add("--seeds", type=seeds, default=[*EVALUATION[:5]], help=f"such as 1-3,7; {first} and up are for evaluation")
    add("--profile", choices=sorted(PROFILES), default="chat")
    add("--rate", type=float, default=10.0, help="requests/s and pod at the mean; 10")
    add("--pods", type=int, default=9)
    add("--sidecars", type=int, default=1, help="each sees its part of the traffic")
    add("--pooled", action="store_true", help="sidecars share their evidence; ours only")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="of breakers.node.adaptive, for all of ours")
    add("--jobs", type=int, default=os.cpu_count() or 1)
    add("--out", type=Path, default=OUT, metavar="DIR", help="default build/breaker_ab")
    add("--from", type=Path, dest="read", metavar="DIR", help="report on the rows there")
    add("--docs", type=Path, metavar="DIR", help="keep it: breaker.json, pictures, and the tables in breaker.md")
    add("--resume", action="store_true", help="keep the rows that are there")
    add("--no-pictures", dest="pictures", action="store_false")
    add("--small", action="store_true", help="3 scenarios, one seed; exits 1 if ours breaks the gate")
    return parser


if __name__ == "__main__":
    sys.exit(main())
