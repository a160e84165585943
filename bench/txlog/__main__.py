"""What the transaction log costs and how quick it is: real sidecars, a real Valkey, in ten minutes.

    python -m bench.txlog                           everything
    python -m bench.txlog --parts probes,seen       some of it
    python -m bench.txlog --quick                   a look; no figures to keep
    python -m bench.txlog --tree .                  the sidecars as plain Python, not as `make compile` made them
    python -m bench.txlog --out docs/txlog.json     keep it
    make bench-log LOG="--parts stream --json"

| part   | what                                                                                              |
|--------|---------------------------------------------------------------------------------------------------|
| probes | 20 sidecars, 5 callers each, one half-open endpoint: what reaches it, and how many at a time      |
| seen   | an endpoint's open in one sidecar: when each of 19 others has it; the same with 20 bare tails     |
| stream | 2,000 transitions a second through one server with 1 and with 100 tails: CPU, and how far behind  |
| bulk   | 100,000 sessions and 10,000 endpoints in the log: memory, and how soon a sidecar has them         |
| path   | a request's and a chunk's CPU with the log on a server, against `--redis local`                   |
| counted | the same in instructions, which no neighbour changes: four minutes, wants valgrind               |

Exit code 1 if a budget is missed. The machine's own noise is in the figures: repetitions, median, range. Wants two
cores that have little else to do.
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
from bench.txlog import bulk, instructions, path, probes, seen, stream
from bench.txlog.results import Results, budgets, text
from bench.txlog.stage import COMPILED, Tree
from tests.servers import valkey

PARTS = ("probes", "seen", "stream", "bulk", "path", "counted")


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    said = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(said)
    tree = Tree(args.tree.absolute())
    if not Path(tree.python).exists():
        parser.error(f"no interpreter {tree.python}: `make compile` makes build/compiled")
    allow_files()
    results = Results(machine(), "make bench-log", tree.path.name)
    if args.read:
        results = msgspec.json.decode(args.read.read_bytes(), type=Results)
        args.parts = []
    try:
        for part in args.parts:
            print(f"bench.txlog: {part}", file=sys.stderr, flush=True)
            uvloop.run(_run(_MEASURES[part], tree, results, args.quick))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("bench.txlog: interrupted", file=sys.stderr)
        return 130
    results.command += f" LOG={shlex.quote(shlex.join(said))}" if said else ""
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
    with tempfile.TemporaryDirectory(prefix="bench-log-") as name:
        work = Path(name)
        async with valkey(work / "valkey") as server:
            await measure(tree, server, work, results, quick)


async def _probes(tree: Tree, server: Any, work: Path, results: Results, quick: bool) -> None:
    replicas, rounds = (4, 2) if quick else (20, 10)
    results.probes = await probes.measure(tree, server.url, work, replicas=replicas, callers=5, rounds=rounds)


async def _seen(tree: Tree, server: Any, work: Path, results: Results, quick: bool) -> None:
    count, opens, rounds = (4, 20, 1) if quick else (20, 60, 2)
    for _ in range(rounds):
        await server.ask("FLUSHALL")
        results.seen.append(await seen.full(tree, server.url, work, replicas=count, opens=opens))
        results.seen.append(await seen.tails(tree, server.url, count=count, opens=opens))


async def _stream(tree: Tree, server: Any, work: Path, results: Results, quick: bool) -> None:
    seconds, rounds = (2.0, 1) if quick else (5.0, 4)
    for tails in (1, 10) if quick else (1, 100):
        await server.ask("FLUSHALL")
        results.stream += await stream.measure(tree, server, tails=tails, rate=2000.0, seconds=seconds, rounds=rounds)


async def _bulk(tree: Tree, server: Any, work: Path, results: Results, quick: bool) -> None:
    sessions, nodes, rounds = (10_000, 1_000, 1) if quick else (100_000, 10_000, 4)
    results.bulk = await bulk.measure(tree, server, work, sessions=sessions, nodes=nodes, rounds=rounds)


async def _path(tree: Tree, server: Any, work: Path, results: Results, quick: bool) -> None:
    rounds, seconds = (1, 1.0) if quick else (8, 1.0)
    results.path = await path.measure(tree, work / "path", rounds=rounds, seconds=seconds, say=_say)
    results.idle = await path.idle(tree, work / "idle", rounds=1 if quick else 4, seconds=2.0)


async def _counted(tree: Tree, server: Any, work: Path, results: Results, quick: bool) -> None:
    results.counted = await instructions.measure(tree, work / "counted", seconds=5.0 if quick else 20.0)


_MEASURES = {"probes": _probes, "seen": _seen, "stream": _stream, "bulk": _bulk, "path": _path, "counted": _counted}


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    def parts(said: str) -> list[str]:
        found = [name for name in said.split(",") if name]
        if unknown := [name for name in found if name not in PARTS]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; there are {', '.join(PARTS)}")
        return found

    parser = argparse.ArgumentParser(
        prog="python -m bench.txlog", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--parts", type=parts, default=list(PARTS), metavar="A,B", help=f"of {', '.join(PARTS)}")
    add("--quick", action="store_true", help="few, small and once")
    add("--tree", type=Path, default=COMPILED, metavar="DIR", help="sources with a .venv; default build/compiled")
    add("--json", action="store_true", help="all figures as JSON on stdout, progress on stderr")
    add("--out", type=Path, metavar="JSON", help="where the figures are kept")
    add("--from", dest="read", type=Path, metavar="JSON", help="report a run that was kept, measuring nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
