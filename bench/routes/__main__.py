"""Routing tables: T15 at full size, how soon everybody follows, killed writers, a server that is away, many services.

    python -m bench.routes                          everything, some ten minutes
    python -m bench.routes --parts t15,kill         some of it
    python -m bench.routes --quick                  a look; no figures to keep
    python -m bench.routes --tree .                 the sidecars as plain Python, not as `make compile` made them
    python -m bench.routes --out docs/routing.json  keep it
    make bench-routes ROUTES="--parts propagation"

| part        | what                                                                                             |
|-------------|--------------------------------------------------------------------------------------------------|
| t15         | 100 streams of 20 s while weights change and bad updates come: whole, and requests follow        |
| propagation | 20 sidecars and 3 Envoys: from a push's ack until each one's requests follow                      |
| kill        | SIGKILL of the sidecar that writes, at random moments: old or new everywhere, one update          |
| away        | the log's server frozen or killed as an update comes: a NACK, the old table, one update later     |
| growth      | 1,000 services x 10 versions x 100 endpoints: one update, a start, memory                         |

Exit code 1 if a budget is missed. Wants two cores that have little else to do.
"""

import argparse
import asyncio
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from bench.compare.machine import machine
from bench.compare.process import allow_files
from bench.routes import growth, kill, propagation, t15
from bench.routes.results import Results, budgets, text
from bench.txlog.stage import COMPILED, Tree
from tests.servers import valkey

PARTS = ("t15", "propagation", "kill", "away", "growth")


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    said = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(said)
    tree = Tree(args.tree.absolute())
    if not Path(tree.python).exists():
        parser.error(f"no interpreter {tree.python}: `make compile` makes build/compiled")
    allow_files()
    results = Results(machine(), "make bench-routes", tree.path.name)
    if args.read:
        results = msgspec.json.decode(args.read.read_bytes(), type=Results)
        args.parts = args.parts if "--parts" in said else []
    try:
        for part in args.parts:
            _say(f"bench.routes: {part}")
            uvloop.run(_run(_MEASURES[part], tree, results, args.quick))
    except (KeyboardInterrupt, asyncio.CancelledError):
        _say("bench.routes: interrupted")
        return 130
    if not args.read:
        results.command += f" ROUTES={shlex.quote(shlex.join(said))}" if said else ""
    kept = msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n"
    if args.out:
        args.out.write_bytes(kept)
    print(kept.decode() if args.json else text(results))
    return 1 if any(budget.met is False for budget in budgets(results)) else 0


async def _run(measure: Callable[..., Any], tree: Tree, results: Results, quick: bool) -> None:
    """As Ctrl-C, SIGTERM ends what was started before it ends this."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with tempfile.TemporaryDirectory(prefix="bench-routes-") as name:
        work = Path(name)
        async with valkey(work / "valkey") as server:
            await measure(tree, server, work, results, quick)


async def _t15(tree: Tree, server: Any, work: Path, results: Results, quick: bool) -> None:
    count, tokens, pause_s = (2, 60, 1.0) if quick else (3, 200, 3.0)
    results.t15 = [
        await t15.measure(tree, server, work, sidecars=count, streams=100, tokens=tokens, gap_s=0.1, pause_s=pause_s)
    ]


async def _propagation(tree: Tree, server: Any, work: Path, results: Results, quick: bool) -> None:
    sidecars, envoys, pushes = (4, 1, 10) if quick else (20, 3, 100)
    results.propagation = [
        await propagation.measure(
            tree,
            server,
            work,
            sidecars=sidecars,
            envoy_count=envoys,
            pushes=pushes,
            pause_s=0.5,
            every_s=0.02,
            say=_say,
        )
    ]


async def _kill(tree: Tree, server: Any, work: Path, results: Results, quick: bool) -> None:
    results.kills = [await kill.killed(tree, server, work, rounds=6 if quick else 60, within_s=0.008, seed=15)]


async def _away(tree: Tree, server: Any, work: Path, results: Results, quick: bool) -> None:
    results.away = await kill.away(tree, server, work, rounds=2 if quick else 6)


async def _growth(tree: Tree, server: Any, work: Path, results: Results, quick: bool) -> None:
    services, updates, rounds = (50, 10, 1) if quick else (1000, 50, 2)
    results.growth = await growth.measure(
        tree, server, work, services=services, updates=updates, rounds=rounds, say=_say
    )


_MEASURES = {"t15": _t15, "propagation": _propagation, "kill": _kill, "away": _away, "growth": _growth}


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    def parts(said: str) -> list[str]:
        found = [name for name in said.split(",") if name]
        if unknown := [name for name in found if name not in PARTS]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; there are {', '.join(PARTS)}")
        return found

    parser = argparse.ArgumentParser(
        prog="python -m bench.routes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--parts", type=parts, default=list(PARTS), metavar="A,B", help=f"of {', '.join(PARTS)}")
    add("--quick", action="store_true", help="few, small and once")
    add("--tree", type=Path, default=COMPILED, metavar="DIR", help="sources with a .venv; default build/compiled")
    add("--json", action="store_true", help="all figures as JSON on stdout, progress on stderr")
    add("--out", type=Path, metavar="JSON", help="where the figures are kept")
    add(
        "--from", dest="read", type=Path, metavar="JSON", help="report a run that was kept; with --parts, measured anew"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
