"""What relaying costs, beside Envoy, nginx and others: CPU, latency, streams, memory, in one run.

    python -m bench.compare                                   everything, about 12 minutes
    python -m bench.compare --quick                           one short round, a look; no figures to keep
    python -m bench.compare --arms direct,sidecar,envoy --kinds requests,paced
    python -m bench.compare --interpreted                     the sidecar as plain Python, too
    python -m bench.compare --sidecar-python /path/to/venv/bin/python,other=/path/to/other/bin/python
    python -m bench.compare --out docs                        keep it: performance.json, .png, and the tables in .md
    python -m bench.compare --from docs/performance.json --out docs    the same from what was kept, measuring nothing

Linux only, and two cores that nobody else uses: the figures of a busy machine are void.
"""

import argparse
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench import setup
from bench.compare.arms import arms
from bench.compare.kinds import KINDS, MEMORY
from bench.compare.load import load_version
from bench.compare.machine import machine
from bench.compare.measure import Plan, measure
from bench.compare.panels import draw
from bench.compare.process import allow_files
from bench.compare.report import text, write
from bench.compare.results import Results, from_json, to_json

ALL_KINDS = (*KINDS, MEMORY)
COMPILED = Path(__file__).parents[2] / "build" / "compiled" / ".venv" / "bin" / "python"
"""What `make compile` makes."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    said = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(said)
    if args.quick:
        args.rounds, args.seconds = 1, 1.0
        args.arms = args.arms or ",".join(
            name for name in arms(_pythons(args.sidecar_python, args.interpreted)) if name != "litellm"
        )
        args.kinds = args.kinds or ",".join(kind for kind in ALL_KINDS if kind not in ("batch", "suite"))
    if args.read:
        results = from_json(args.read.read_bytes())
    else:
        plan = _plan(parser, args)
        results = _results(plan, said)
        _measure(plan, results, args.out, args.keep_logs)
    if args.out:
        _keep(results, args.out)
    print(to_json(results).decode() if args.json else text(results))
    return 0


def _plan(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Plan:
    """What was asked for; what is needed for it is installed."""
    pythons = _pythons(args.sidecar_python, args.interpreted)
    if missing := [path for path in pythons.values() if not Path(path).exists()]:
        parser.error(f"no interpreter: {', '.join(missing)}; `make compile` makes build/compiled/.venv/bin/python")
    known = arms(pythons)
    wanted = [name for name in args.arms.split(",") if name] or list(known)
    kinds = [kind for kind in args.kinds.split(",") if kind] or list(ALL_KINDS)
    for what, asked, there in (("arms", wanted, known), ("kinds", kinds, ALL_KINDS)):
        if unknown := [name for name in asked if name not in there]:
            parser.error(f"unknown {what}: {', '.join(unknown)}; there are {', '.join(there)}")
    cores = [int(core) for core in args.cores.split(",")]
    if len(set(cores)) != 2 or not set(cores) <= os.sched_getaffinity(0):
        parser.error(f"--cores wants two of {sorted(os.sched_getaffinity(0))}")
    setup.prepare(["native", "debian", *sorted({known[name].part for name in wanted} - {"", "debian"})])
    return Plan({name: known[name] for name in wanted}, kinds, args.rounds, args.seconds, *cores)


def _results(plan: Plan, said: list[str]) -> Results:
    """Empty but for what runs; arms that are missing leave the plan."""
    missing = {name: why for name, arm in plan.arms.items() if (why := arm.missing())}
    plan.arms = {name: arm for name, arm in plan.arms.items() if name not in missing}
    here = shlex.join(said).replace(f"{Path.cwd()}/", "")
    return Results(
        machine=machine(),
        command="make bench" + (f" BENCH={shlex.quote(here)}" if here else ""),
        rounds=plan.rounds,
        seconds=plan.seconds,
        arms={name: arm.what for name, arm in plan.arms.items()},
        versions={name: arm.version() for name, arm in plan.arms.items()},
        missing=missing,
        load=load_version(),
    )


def _keep(results: Results, folder: Path) -> None:
    """JSON, picture, and the generated parts of the document."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "performance.json").write_bytes(to_json(results))
    write(results, folder / "performance.md")
    setup.prepare(["picture"])
    try:
        draw(results, folder / "performance.png")
    except (OSError, RuntimeError) as exc:
        print(f"no picture: {exc}", file=sys.stderr)


def _measure(plan: Plan, results: Results, out: Path | None, keep_logs: Path | None) -> None:
    """Fills `results`. A failure ends the program; what was measured before it is kept beside, under another name."""
    allow_files()
    work = Path(tempfile.mkdtemp(prefix="bench-"))
    mine = os.sched_getaffinity(0)
    try:
        measure(plan, results, work, lambda line: print(line, file=sys.stderr, flush=True))
    except RuntimeError as exc:
        said = f"{exc}\n--keep-logs DIR keeps what the proxies said"
        if out:
            out.mkdir(parents=True, exist_ok=True)
            (out / "unfinished.json").write_bytes(to_json(results))
            said += f"; what was measured is in {out / 'unfinished.json'}, for --from"
        raise SystemExit(said) from exc
    finally:
        os.sched_setaffinity(0, mine)
        if keep_logs:
            shutil.copytree(work, keep_logs, dirs_exist_ok=True)
        shutil.rmtree(work)


def _pythons(said: str, interpreted: bool) -> dict[str, str]:
    """PATH or NAME=PATH, by name; without one, the name is its environment's folder."""
    found = {}
    for each in [*said.split(","), *([f"interpreted={sys.executable}"] if interpreted else [])]:
        name, _, path = each.rpartition("=")
        # Not resolved: an environment's interpreter is a link, and what it finds goes by where the link is.
        found[name or Path(path).absolute().parents[1].name.lstrip(".")] = str(Path(path).absolute())
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", default="", help="default all that install")
    parser.add_argument("--kinds", default="", help=f"of load; default {','.join(ALL_KINDS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measured window")
    parser.add_argument(
        "--quick", action="store_true", help="one round of one second each, without LiteLLM and the longer streams"
    )
    parser.add_argument("--cores", default="0,1", metavar="A,B", help="the proxy's, and load's and upstream's")
    parser.add_argument(
        "--sidecar-python",
        default=str(COMPILED),
        metavar="PATH[,NAME=PATH]",
        help="interpreters that have the sidecar, default the compiled one; the second and later ones are arms of "
        "their own, sidecar-NAME",
    )
    parser.add_argument(
        "--interpreted", action="store_true", help="the sidecar as plain Python as well, the arm sidecar-interpreted"
    )
    parser.add_argument("--json", action="store_true", help="all figures as JSON on stdout, progress on stderr")
    parser.add_argument("--out", metavar="DIR", type=Path, help="where performance.json, .png and .md go")
    parser.add_argument("--from", dest="read", metavar="JSON", type=Path, help="report a run that was kept")
    parser.add_argument("--keep-logs", metavar="DIR", type=Path, help="where the proxies' output goes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
