"""The adaptive breaker live: the real sidecar before simulated engines, with its breaker and then without.

    python -m bench.breaker_live                           ours and none, 3 minutes each
    python -m bench.breaker_live --seconds 60 --arms ours  a look
    python -m bench.breaker_live --json                    the figures as JSON
    make breaker-live LIVE="--seed 2"

Six engines as processes, `sidecar run` as another, clients here: 36 requests a second in sessions that live on one
engine each. A sixth of the time to learn, then an engine five times as slow, one that stalls half of its streams, one
that answers half of its requests with 500, each for a fifth of the time and with some time to recover. What is measured
is defined in `sidecar/simulate/ledger.py`, as for the simulated experiment. Every arm has the same requests, the same
homes of sessions and the same luck; the machine's is its own, so it says how late the clients themselves were. Wants
two cores that have little else to do. Exit code 1 if a request has no line in the log.
"""

import argparse
import asyncio
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import msgspec
import uvloop

from bench.breaker_ab.stats import markdown, percent, seconds
from bench.breaker_live.plan import ARMS, PODS, RATE, SECONDS, Arm, Timeline
from bench.breaker_live.run import Result, run
from sidecar.simulate.ledger import Tally

COLUMNS = [
    "arm",
    "requests",
    "D1 %",
    "D2",
    "D3 %",
    "affected",
    "I1 %",
    "I3 %",
    "detect s",
    "recover s",
    "re-opens",
    "goodput %",
]
DOES = {"step": "be slow", "stall": "stall", "errors": "fail"}


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if not 30.0 <= args.seconds <= 3600.0:
        parser.error("--seconds: between 30 and 3600; nothing would be learnt in less")
    if not 1.0 <= args.rate <= 200.0:
        parser.error("--rate: between 1 and 200")
    results = []
    try:
        for name in args.arms:
            print(f"breaker_live: {name}, {args.seconds:g} s", file=sys.stderr, flush=True)
            results.append(uvloop.run(_run(ARMS[name], Timeline(args.seconds), args.rate, args.seed)))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("breaker_live: interrupted", file=sys.stderr)
        return 130
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(told(args, results)), indent=1).decode())
    else:
        print(text(args, results))
    return 1 if any(result.unaccounted for result in results) else 0


async def _run(arm: Arm, timeline: Timeline, rate: float, seed: int) -> Result:
    """As Ctrl-C, SIGTERM ends what was started before it ends this."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await run(arm, timeline, rate, seed)


def told(args: argparse.Namespace, results: Sequence[Result]) -> dict[str, object]:
    """All figures; shares are in percent in `row`, counts elsewhere."""
    return {
        "seconds": args.seconds,
        "seed": args.seed,
        "rate": args.rate,
        "engines": PODS,
        "arms": [
            {
                "arm": result.arm,
                "what": ARMS[result.arm].what,
                "row": result.measures.row(),
                "measures": result.measures,
                **{name: value for name, value in asdict(result).items() if name not in ("arm", "measures", "faults")},
            }
            for result in results
        ],
        "faults": results[0].faults if results else (),
    }


def text(args: argparse.Namespace, results: Sequence[Result]) -> str:
    """The tables, and what the breakers did."""
    parts = [
        f"{PODS} engines, {args.rate:g} requests/s in all, {args.seconds:g} s, seed {args.seed}\n",
        markdown(
            COLUMNS,
            [_row(result) for result in results],
        ),
        markdown(
            ["arm", "fault", "affected", "I1 %", "I2 %", "I3 %", "detect s"],
            [
                _kind(result.arm, kind, tally)
                for result in results
                for kind, tally in [*result.measures.kinds.items(), ("all", result.measures.all_kinds)]
            ],
        ),
    ]
    for result in results:
        measures = result.measures
        parts.append(f"{result.arm}: {ARMS[result.arm].what}")
        ends = {**measures.failed, **{f"rejected {why}": count for why, count in measures.rejected.items()}}
        parts.append(f"  {measures.served} served, " + ", ".join(f"{count} {why}" for why, count in ends.items()))
        if measures.others_tripped:
            parts.append(f"  tripped besides: {measures.others_tripped}")
        parts.append(
            f"  clients sent {1000 * result.lag_s[0]:.1f} ms late at the median, {1000 * result.lag_s[1]:.0f} at the "
            f"99th percentile; first tokens {result.ttft_s[0]:.2f} s and {result.ttft_s[1]:.2f}"
        )
        if result.unaccounted:
            parts.append(f"  {result.unaccounted} requests have no line in the log: the figures are not all")
        parts += [f"  {at:6.1f} s  {words}" for at, words in sorted(_events(result, Timeline(args.seconds).warmup_s))]
        parts.append("")
    return "\n".join(parts)


def _row(result: Result) -> list[str]:
    measures, every = result.measures, result.measures.all_kinds
    return [
        result.arm,
        f"{measures.requests}",
        percent(measures.d1, 2),
        f"{measures.false_trips}/{measures.trips}",
        percent(measures.d3, 2),
        f"{every.affected}",
        percent(every.i1),
        percent(every.i3),
        seconds(measures.detect_median_s),
        seconds(measures.recover_median_s),
        "-" if measures.reopens is None else f"{measures.reopens:.1f}",
        percent(measures.goodput, 2),
    ]


def _kind(arm: str, kind: str, tally: Tally) -> list[str]:
    detect = ", ".join(seconds(value) for value in tally.detect_s) or "-"
    return [arm, kind, f"{tally.affected}", percent(tally.i1), percent(tally.i2), percent(tally.i3), detect]


def _events(result: Result, warmup_s: float) -> Iterator[tuple[float, str]]:
    """What happened, by seconds since the warm-up."""
    for fault in result.faults:
        (pod,) = fault.pods
        yield fault.begin - warmup_s, f"engine {pod} begins to {DOES[fault.kind]}"
        yield fault.end - warmup_s, f"engine {pod} is well"
    for move in result.measures.moves:
        wrong = " FALSE" if move.false else ""
        yield move.at, f"  breaker {move.pod}: {move.old} -> {move.new}{wrong} ({move.why}) {move.evidence}"


def _parser() -> argparse.ArgumentParser:
    def arms(said: str) -> list[str]:
        found = [name for name in said.split(",") if name]
        if unknown := [name for name in found if name not in ARMS]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; there are {', '.join(ARMS)}")
        return found

    parser = argparse.ArgumentParser(
        prog="python -m bench.breaker_live", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--arms", type=arms, default=["ours", "none"], metavar="A,B", help=f"of {', '.join(ARMS)}; ours,none")
    add("--seconds", type=float, default=SECONDS, help="of each arm; 180")
    add("--rate", type=float, default=RATE, help="requests/s in all at the mean; 36")
    add("--seed", type=int, default=1, help="what traffic, luck and the choice of engines are drawn from; 1")
    add("--json", action="store_true", help="the figures as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
